// Three things that torch has no fast way for on a CPU: discrete Gaussian noise from a cipher, the weight gradient of a convolution
// for every example, the examples spread over the cores, and the checksum of the sums of a step. Optional: everything works without this file, see __init__.py.

// not all of ATen, which takes longer to read than the rest to compile
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

// ---- Noise ----------------------------------------------------------------------------------------------------------
// The twin of dpexp/privacy/staircase.py, number for number: read that first. Whole numbers of standard deviation 2^40 that follow the
// discrete Gaussian, from the words of ChaCha8. The number of a place depends on (key, stream, place) alone, so that
// neither threads nor the order of blocks change it.

constexpr int kLanes = 16;         // blocks of the cipher that are computed side by side
constexpr int kGroup = 8 * kLanes; // numbers that they give
constexpr int kRounds = 8;         // of the cipher
constexpr int kLayers = 256;
constexpr int kLayerBits = 8;
constexpr int kLowBits = 23;
constexpr uint32_t kWidthMask = (1u << 21) - 1;

// So many lanes fit into one register of the processor; wider ones would live in memory.
#if defined(__AVX512F__)
constexpr int kWide = 16;
#elif defined(__AVX2__)
constexpr int kWide = 8;
#else
constexpr int kWide = 4;
#endif
typedef uint32_t Wide __attribute__((vector_size(4 * kWide)));

template <int by>
inline void rotate(Wide& x) {
  x = (x << by) | (x >> (32 - by));
}

inline void quarter_round(Wide& a, Wide& b, Wide& c, Wide& d) {
  a += b, d ^= a, rotate<16>(d);
  c += d, b ^= c, rotate<12>(b);
  a += b, d ^= a, rotate<8>(d);
  c += d, b ^= c, rotate<7>(b);
}

// Which blocks of ChaCha: the counters' low and high halves, and the turn of each.
struct Counters {
  uint32_t low[kLanes] = {}, high[kLanes] = {}, turn[kLanes] = {};
  void set(int lane, uint64_t counter) { low[lane] = static_cast<uint32_t>(counter), high[lane] = static_cast<uint32_t>(counter >> 32); }
};

// Blocks of ChaCha (RFC 8439, with 8 or 20 rounds) for 16 counters: `out[w][lane]` is word w of the block of that lane's counter.
void chacha(const uint32_t* key, const Counters& counters, uint32_t stream, int rounds, uint32_t out[16][kLanes]) {
  constexpr uint32_t constants[4] = {0x61707865u, 0x3320646eu, 0x79622d32u, 0x6b206574u}; // "expand 32-byte k"
  for (int from = 0; from < kLanes; from += kWide) {
    Wide start[16], x[16];
    for (int w = 0; w < 4; ++w) start[w] = Wide{} + constants[w];
    for (int w = 0; w < 8; ++w) start[4 + w] = Wide{} + key[w];
    std::memcpy(&start[12], counters.low + from, sizeof(Wide));
    std::memcpy(&start[13], counters.high + from, sizeof(Wide));
    start[14] = Wide{} + stream;
    std::memcpy(&start[15], counters.turn + from, sizeof(Wide));
    for (int w = 0; w < 16; ++w) x[w] = start[w];
    for (int round = 0; round < rounds; round += 2) {
      quarter_round(x[0], x[4], x[8], x[12]), quarter_round(x[1], x[5], x[9], x[13]);
      quarter_round(x[2], x[6], x[10], x[14]), quarter_round(x[3], x[7], x[11], x[15]);
      quarter_round(x[0], x[5], x[10], x[15]), quarter_round(x[1], x[6], x[11], x[12]);
      quarter_round(x[2], x[7], x[8], x[13]), quarter_round(x[3], x[4], x[9], x[14]);
    }
    for (int w = 0; w < 16; ++w) {
      const Wide sum = x[w] + start[w];
      std::memcpy(out[w] + from, &sum, sizeof sum);
    }
  }
}

// The number that two words make in a layer of this width. The highest bit makes n of a magnitude m, or -1 - n: every number once.
inline double number_of(uint32_t first, uint32_t second, uint32_t width) {
  const int64_t coarse = static_cast<int64_t>(static_cast<uint64_t>(width) * first >> 32);
  const int64_t magnitude = coarse << kLowBits | (second >> kLayerBits & ((1u << kLowBits) - 1));
  return static_cast<double>(magnitude ^ (static_cast<int32_t>(second) >> 31));
}

struct Staircase {
  const uint32_t* layers; // kLayers: the width, and above it the first words that are sure to be accepted
  const int32_t* heights; // kLayers + 1
  double total;
};

// Numbers from two words for each of 16 lanes, lane 2 i at place i and lane 2 i + 1 at place 8 + i. Returns a bit for each place: whether
// the words alone say that the number is accepted.
#if defined(__AVX512F__) && defined(__AVX512DQ__)
struct Proposer {
  __m512i table[kLayers / 16]; // 16 registers of the processor's 32: a look at any of 256 layers without memory

  explicit Proposer(const Staircase& stairs) {
    for (int i = 0; i < kLayers / 16; ++i) table[i] = _mm512_loadu_si512(stairs.layers + 16 * i);
  }

  inline uint32_t operator()(const uint32_t* first_words, const uint32_t* second_words, double* out) const {
    const __m512i first = _mm512_loadu_si512(first_words), second = _mm512_loadu_si512(second_words);
    __m512i found[8]; // by bits 0 to 4 of the layer
    for (int i = 0; i < 8; ++i) found[i] = _mm512_permutex2var_epi32(table[2 * i], second, table[2 * i + 1]);
    const __mmask16 bit5 = _mm512_test_epi32_mask(second, _mm512_set1_epi32(32));
    const __mmask16 bit6 = _mm512_test_epi32_mask(second, _mm512_set1_epi32(64));
    const __mmask16 bit7 = _mm512_test_epi32_mask(second, _mm512_set1_epi32(128));
    for (int i = 0; i < 8; i += 2) found[i] = _mm512_mask_mov_epi32(found[i], bit5, found[i + 1]);
    for (int i = 0; i < 8; i += 4) found[i] = _mm512_mask_mov_epi32(found[i], bit6, found[i + 2]);
    const __m512i layer = _mm512_mask_mov_epi32(found[0], bit7, found[4]);
    const __m512i width = _mm512_and_si512(layer, _mm512_set1_epi32(kWidthMask));
    const __m512i even = _mm512_mul_epu32(width, first);
    const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(width, 32), _mm512_srli_epi64(first, 32));
    // Both low halves side by side, to be compared with the widths at once.
    const __m512i rest = _mm512_mask_mov_epi32(even, 0xaaaa, _mm512_slli_epi64(odd, 32));
    const __mmask16 sure = _mm512_cmplt_epu32_mask(first, _mm512_andnot_si512(_mm512_set1_epi32(kWidthMask), layer)) &
                           _mm512_cmpge_epu32_mask(rest, width);
    _mm512_storeu_pd(out, number(even, _mm512_srli_epi64(second, kLayerBits), _mm512_slli_epi64(second, 32)));
    _mm512_storeu_pd(out + 8, number(odd, _mm512_srli_epi64(second, 32 + kLayerBits), second));
    return _pext_u32(sure, 0x5555) | _pext_u32(sure, 0xaaaa) << 8;
  }

  // `sign`: in the highest bit.
  static inline __m512d number(__m512i product, __m512i low, __m512i sign) {
    const __m512i mask = _mm512_set1_epi64((int64_t{1} << kLowBits) - 1);
    const __m512i magnitude = _mm512_ternarylogic_epi64(mask, low, _mm512_srli_epi64(product, 32 - kLowBits), 0xca);
    return _mm512_cvtepi64_pd(_mm512_xor_si512(magnitude, _mm512_srai_epi64(sign, 63)));
  }
};
#else
struct Proposer {
  const Staircase& stairs;

  explicit Proposer(const Staircase& layers) : stairs(layers) {}

  inline uint32_t operator()(const uint32_t* first_words, const uint32_t* second_words, double* out) const {
    uint32_t layers[16], sure[16], bits = 0;
    double numbers[16];
    for (int i = 0; i < 16; ++i) layers[i] = stairs.layers[second_words[i] & (kLayers - 1)];
    for (int i = 0; i < 16; ++i) {
      const uint32_t first = first_words[i], second = second_words[i], width = layers[i] & kWidthMask;
      sure[i] = (first < (layers[i] & ~kWidthMask)) & (width * first >= width);
      numbers[i] = number_of(first, second, width);
    }
    for (int i = 0; i < 8; ++i) {
      out[i] = numbers[2 * i], out[8 + i] = numbers[2 * i + 1];
      bits |= sure[2 * i] << i | sure[2 * i + 1] << (8 + i);
    }
    return bits;
  }
};
#endif

// exp(-x²/2) for 0 ≤ x ≤ 16, right to some units in the last place; loops over it become vector code.
inline double density(double x) {
  const double t = x * x * -0.5;
  const double shifted = t * 1.4426950408889634 + 0x1.8p52; // the nearest multiple of log 2 stands in the lowest bits
  const double k = shifted - 0x1.8p52;
  const double r = (t - k * 0x1.62e42fee00000p-1) - k * 0x1.a39ef35793c76p-33;
  constexpr double series[] = {1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,
                               1.0 / 720,        1.0 / 120,       1.0 / 24,       1.0 / 6,       1.0 / 2,      1.0,         1.0};
  double sum = 0;
  for (const double coefficient : series) sum = sum * r + coefficient;
  int64_t bits;
  std::memcpy(&bits, &shifted, 8);
  bits = (bits << 52) + (int64_t{1023} << 52);
  double power;
  std::memcpy(&power, &bits, 8);
  return sum * power;
}

// Places whose number is not decided yet, with the value that it is added to.
template <typename Float>
struct Waiting {
  int count = 0;
  int64_t at[kGroup + kLanes];
  uint32_t first[kGroup + kLanes], second[kGroup + kLanes], turn[kGroup + kLanes];
  Float value[kGroup + kLanes];

  void push(int64_t place, uint32_t a, uint32_t b, uint32_t turns, Float before) {
    at[count] = place, first[count] = a, second[count] = b, turn[count] = turns, value[count] = before;
    ++count;
  }
};

// Look at up to 16 of them, the last ones, each with 128 further bits for its height within its layer. Who is rejected gets two new words,
// and waits again unless these are sure.
template <typename Float>
void settle(Float* data, double grid, double inverse, const uint32_t* key, uint32_t stream, uint64_t place, const Staircase& stairs,
            Waiting<Float>& waiting) {
  const int lanes = std::min(kLanes, waiting.count);
  const int begin = waiting.count -= lanes;
  int64_t at[kLanes];
  uint32_t first[kLanes] = {}, second[kLanes] = {};
  Counters counters;
  Float value[kLanes];
  std::copy_n(waiting.at + begin, lanes, at), std::copy_n(waiting.value + begin, lanes, value);
  std::copy_n(waiting.first + begin, lanes, first), std::copy_n(waiting.second + begin, lanes, second);
  std::copy_n(waiting.turn + begin, lanes, counters.turn);
  for (int i = 0; i < lanes; ++i) counters.set(i, place + at[i]);
  uint32_t words[16][kLanes];
  chacha(key, counters, stream, kRounds, words);
  double numbers[kLanes], height[kLanes], bound[kLanes];
  bool whole[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    const uint32_t layer = second[i] & (kLayers - 1), width = stairs.layers[layer] & kWidthMask;
    const uint32_t rest = width * first[i];
    // Words of the last, incomplete round of all widths; division is slow.
    whole[i] = rest >= width || rest >= (uint64_t{1} << 32) % width;
    numbers[i] = number_of(first[i], second[i], width);
    height[i] = stairs.heights[layer + 1] - stairs.heights[layer], bound[i] = stairs.heights[layer];
  }
  for (int i = 0; i < kLanes; ++i) {
    double share = 0;
    for (int w = 3; w >= 0; --w) share = (share + words[w][i]) * 0x1p-32;
    height[i] = bound[i] + share * height[i];
    bound[i] = stairs.total * density(std::abs(numbers[i]) * 0x1p-40);
  }
  for (int i = 0; i < lanes; ++i) {
    if (!whole[i] || !(height[i] < bound[i])) {
      const uint32_t layer = stairs.layers[words[5][i] & (kLayers - 1)], width = layer & kWidthMask;
      if (words[4][i] >= (layer & ~kWidthMask) || width * words[4][i] < width) {
        waiting.push(at[i], words[4][i], words[5][i], counters.turn[i] + 1, value[i]);
        continue;
      }
      numbers[i] = number_of(words[4][i], words[5][i], width);
    }
    data[at[i]] = static_cast<Float>((std::rint(static_cast<double>(value[i]) * inverse) + numbers[i]) * grid);
  }
}

// Round the values to the grid, add the numbers of the places `place ..`, and write the sums in the precision of `target`.
template <typename Float>
void add_on_grid(Float* data, int64_t numel, double grid, const uint32_t* key, uint32_t stream, uint64_t place,
                 const Staircase& stairs) {
  const double inverse = 1 / grid;
  at::parallel_for(0, (numel + kGroup - 1) / kGroup, 64, [&](int64_t begin, int64_t end) {
    const Proposer propose(stairs);
    Waiting<Float> waiting;
    for (int64_t start = begin * kGroup; start < std::min(end * kGroup, numel); start += kGroup) {
      Counters counters;
      for (int i = 0; i < kLanes; ++i) counters.set(i, (place + start) / 8 + i);
      uint32_t words[16][kLanes];
      chacha(key, counters, stream, kRounds, words);
      double numbers[kGroup];
      uint32_t unsure[8];
      for (int row = 0; row < 8; ++row) unsure[row] = 0xffff & ~propose(words[row], words[row + 8], numbers + kLanes * row);
      const int count = static_cast<int>(std::min<int64_t>(kGroup, numel - start));
      for (int row = 0; row < 8; ++row) {
        for (uint32_t left = unsure[row]; left != 0; left &= left - 1) {
          const int i = __builtin_ctz(left), lane = 2 * (i & 7) + (i >> 3), at = kLanes * row + i;
          if (at < count) waiting.push(start + at, words[row][lane], words[row + 8][lane], 1, data[start + at]);
        }
      }
      const auto add = [&](int number) {
        for (int i = 0; i < number; ++i) {
          Float& value = data[start + i];
          value = static_cast<Float>((std::rint(static_cast<double>(value) * inverse) + numbers[i]) * grid);
        }
      };
      count == kGroup ? add(kGroup) : add(count);
      while (waiting.count >= kLanes) settle(data, grid, inverse, key, stream, place, stairs, waiting);
    }
    while (waiting.count > 0) settle(data, grid, inverse, key, stream, place, stairs, waiting);
  });
}

// `layers`: int32 [256], `heights`: int32 [257].
void add_noise_(at::Tensor target, double grid, const at::Tensor& key, int64_t stream, int64_t place, const at::Tensor& layers,
                const at::Tensor& heights, double total) {
  TORCH_CHECK(target.device().is_cpu() && target.is_contiguous() && (target.scalar_type() == at::kFloat || target.scalar_type() == at::kDouble),
              "add_noise_ takes a contiguous float32 or float64 tensor on the CPU");
  TORCH_CHECK(place >= 0 && place % kGroup == 0, "add_noise_ starts at a multiple of ", kGroup);
  TORCH_CHECK(key.scalar_type() == at::kInt && key.is_contiguous() && key.numel() == 8, "a key has 8 words");
  TORCH_CHECK(layers.scalar_type() == at::kInt && layers.is_contiguous() && layers.numel() == kLayers, "no layers");
  TORCH_CHECK(heights.scalar_type() == at::kInt && heights.is_contiguous() && heights.numel() == kLayers + 1, "no heights");
  const Staircase stairs{reinterpret_cast<const uint32_t*>(layers.const_data_ptr<int32_t>()), heights.const_data_ptr<int32_t>(), total};
  const uint32_t* words = reinterpret_cast<const uint32_t*>(key.const_data_ptr<int32_t>());
  const auto add = [&](auto* data) {
    add_on_grid(data, target.numel(), grid, words, static_cast<uint32_t>(stream), static_cast<uint64_t>(place), stairs);
  };
  if (target.scalar_type() == at::kFloat) {
    add(target.mutable_data_ptr<float>());
  } else {
    add(target.mutable_data_ptr<double>());
  }
}

// Words of the blocks `first ..`: `out` is int32 [n, 16].
void chacha_(at::Tensor out, const at::Tensor& key, int64_t first, int64_t stream, int64_t turn, int64_t rounds) {
  TORCH_CHECK(out.scalar_type() == at::kInt && out.is_contiguous() && out.dim() == 2 && out.size(1) == 16, "out is int32 [n, 16]");
  TORCH_CHECK(key.scalar_type() == at::kInt && key.is_contiguous() && key.numel() == 8, "a key has 8 words");
  int32_t* data = out.mutable_data_ptr<int32_t>();
  for (int64_t start = 0; start < out.size(0); start += kLanes) {
    Counters counters;
    uint32_t words[16][kLanes];
    for (int i = 0; i < kLanes; ++i) {
      counters.set(i, static_cast<uint64_t>(first + start + i));
      counters.turn[i] = static_cast<uint32_t>(turn);
    }
    chacha(reinterpret_cast<const uint32_t*>(key.const_data_ptr<int32_t>()), counters, static_cast<uint32_t>(stream),
           static_cast<int>(rounds), words);
    for (int64_t i = 0; i < std::min<int64_t>(kLanes, out.size(0) - start); ++i) {
      for (int w = 0; w < 16; ++w) data[16 * (start + i) + w] = static_cast<int32_t>(words[w][i]);
    }
  }
}

// ---- Convolutions ---------------------------------------------------------------------------------------------------

// Inside of a team of threads each works alone: otherwise the convolution library lays its scratch memory out for a team that
// it does not get, and is silently wrong. A single example is computed outside of any team, with all threads, and what is set
// there would stay: every later operation of the process would then have one thread.
class AloneInTeam {
 public:
#ifdef _OPENMP
  AloneInTeam() : threads_(omp_get_max_threads()) {
    if (omp_in_parallel()) omp_set_num_threads(1);
  }
  ~AloneInTeam() { omp_set_num_threads(threads_); }
  AloneInTeam(const AloneInTeam&) = delete;
  AloneInTeam& operator=(const AloneInTeam&) = delete;

 private:
  int threads_;
#endif
};

// Weight gradients [B, *weight] from x [B * rows, C, ...] and gy [B * rows, O, ...], written into `out`.
void conv_gradients_(at::Tensor out, const at::Tensor& x, const at::Tensor& gy, int64_t rows, at::IntArrayRef stride,
                     at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                     at::IntArrayRef output_padding, int64_t groups) {
  const int64_t examples = out.size(0);
  const at::Tensor weight = at::empty(out.sizes().slice(1), x.options()); // only its shape is looked at
  at::parallel_for(0, examples, 1, [&](int64_t begin, int64_t end) {
    const AloneInTeam alone;
    const at::NoGradGuard no_grad;
    for (int64_t i = begin; i < end; ++i) {
      auto gradients =
          at::convolution_backward(gy.narrow(0, i * rows, rows), x.narrow(0, i * rows, rows), weight, std::nullopt, stride,
                                   padding, dilation, transposed, output_padding, groups, {false, true, false});
      out.select(0, i).copy_(std::get<1>(gradients));
    }
  });
}

// ---- Checksums ------------------------------------------------------------------------------------------------------

constexpr int64_t kPiece = 1 << 14; // words that one core adds up at a time

// The twin of `checksum` in dpexp/privacy/fingerprint.py: word j of the tensor that `words` are the part of from `place` on counts with weight
// j mod W, in chunk j / W, modulo 2^64. `out`: int64 [chunks], `weights`: int64 [W].
void checksums_(at::Tensor out, const at::Tensor& words, const at::Tensor& weights, int64_t place) {
  TORCH_CHECK(words.device().is_cpu() && words.scalar_type() == at::kInt && words.is_contiguous() && words.dim() == 1, "words are int32 [n]");
  TORCH_CHECK(weights.scalar_type() == at::kLong && weights.is_contiguous() && weights.numel() > 0 && weights.numel() % kPiece == 0,
              "weights are int64, a multiple of ", kPiece);
  const int64_t end = place + words.numel(), chunk = weights.numel(), first = place / kPiece;
  TORCH_CHECK(out.scalar_type() == at::kLong && out.is_contiguous() && place >= 0 && out.numel() * chunk >= end, "too few chunks");
  const int32_t* word = words.const_data_ptr<int32_t>();
  const auto* weight = reinterpret_cast<const uint64_t*>(weights.const_data_ptr<int64_t>());
  std::vector<uint64_t> sums(words.numel() > 0 ? (end - 1) / kPiece - first + 1 : 0);
  at::parallel_for(0, sums.size(), 1, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) {
      const int64_t begin = std::max(place, (first + i) * kPiece), count = std::min(end, (first + i + 1) * kPiece) - begin;
      const int32_t* a = word + (begin - place);
      const uint64_t* b = weight + begin % chunk;
      uint64_t sum = 0;
      for (int64_t j = 0; j < count; ++j) sum += static_cast<uint64_t>(static_cast<int64_t>(a[j])) * b[j];
      sums[i] = sum;
    }
  });
  auto* found = reinterpret_cast<uint64_t*>(out.mutable_data_ptr<int64_t>());
  for (size_t i = 0; i < sums.size(); ++i) found[(first + static_cast<int64_t>(i)) * kPiece / chunk] += sums[i];
}

} // namespace

TORCH_LIBRARY(dpexp_native, library) {
  library.def(
      "add_noise_(Tensor(a!) target, float grid, Tensor key, int stream, int place, Tensor layers, Tensor heights, float total) -> ()",
      &add_noise_);
  library.def("chacha_(Tensor(a!) out, Tensor key, int first, int stream, int turn, int rounds) -> ()", &chacha_);
  library.def(
      "conv_gradients_(Tensor(a!) out, Tensor x, Tensor gy, int rows, int[] stride, int[] padding, int[] dilation, "
      "bool transposed, int[] output_padding, int groups) -> ()",
      &conv_gradients_);
  library.def("checksums_(Tensor(a!) out, Tensor words, Tensor weights, int place) -> ()", &checksums_);
}
