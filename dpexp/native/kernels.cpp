// Two things that torch has no fast way for on a CPU: discrete Gaussian noise from a cipher, and the weight gradient of a convolution
// for every example, the examples spread over the cores. Optional: everything works without this file, see __init__.py.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

// ---- Noise ----------------------------------------------------------------------------------------------------------
// The twin of dpexp/privacy/staircase.py, number for number: read that first. Whole numbers of standard deviation 2^40 that follow the
// discrete Gaussian, from the words of ChaCha8. The number of a place depends on (key, stream, place) alone, so that
// neither threads nor the order of blocks change it.

constexpr int kLanes = 16;           // blocks of the cipher that are computed side by side
constexpr int kGroup = 8 * kLanes;   // numbers that they give
constexpr int kBlock = 16 * kGroup;  // numbers whose words stay in the cache
constexpr int kRounds = 8;           // of the cipher
constexpr int kLayers = 1024;
constexpr int kLowBits = 20;

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

// Blocks of ChaCha (RFC 8439, with 8 or 20 rounds) for 16 counters: `out[w][lane]` is word w of the block of `counters[lane]`.
void chacha(const uint32_t* key, const uint64_t* counters, uint32_t stream, uint32_t turn, int rounds, uint32_t out[16][kLanes]) {
  constexpr uint32_t constants[4] = {0x61707865u, 0x3320646eu, 0x79622d32u, 0x6b206574u}; // "expand 32-byte k"
  for (int from = 0; from < kLanes; from += kWide) {
    Wide start[16], x[16];
    for (int w = 0; w < 4; ++w) start[w] = Wide{} + constants[w];
    for (int w = 0; w < 8; ++w) start[4 + w] = Wide{} + key[w];
    for (int i = 0; i < kWide; ++i) {
      start[12][i] = static_cast<uint32_t>(counters[from + i]);
      start[13][i] = static_cast<uint32_t>(counters[from + i] >> 32);
    }
    start[14] = Wide{} + stream;
    start[15] = Wide{} + turn;
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

struct Staircase {
  const int32_t* widths;  // kLayers + 1
  const int32_t* heights; // kLayers + 1
  double total;
};

// Numbers from two words each; NaN where the words alone don't say that the number is accepted. As many as `count`, rounded up to groups.
inline void propose(const uint32_t* first, const uint32_t* second, int count, const Staircase& stairs, double* out) {
  for (int start = 0; start < count; start += kGroup) {
    uint64_t steps[kGroup]; // the width of the layer and of the one above, in one load
    for (int i = 0; i < kGroup; ++i) std::memcpy(steps + i, stairs.widths + (second[start + i] & (kLayers - 1)), 8);
    for (int i = 0; i < kGroup; ++i) {
      const uint64_t width = steps[i] & 0xffffffffu, above = steps[i] >> 32;
      const uint64_t product = width * first[start + i];
      const uint64_t coarse = product >> 32, rest = product & 0xffffffffu;
      const uint32_t word = second[start + i];
      const bool sure = (coarse - 1 < above - 3) & (rest >= width);
      const double magnitude = static_cast<double>(static_cast<int64_t>(coarse << kLowBits | (word >> 10 & 0xfffffu)));
      const double number = static_cast<int32_t>(word) < 0 ? -magnitude : magnitude;
      out[start + i] = sure ? number : std::numeric_limits<double>::quiet_NaN();
    }
  }
}

// The number of two words if it is accepted, given 128 further bits for its height within the layer; else NaN.
double decide(uint32_t first, uint32_t second, const uint32_t* bits, const Staircase& stairs) {
  const uint32_t layer = second & (kLayers - 1);
  const uint32_t width = static_cast<uint32_t>(stairs.widths[layer]);
  const uint64_t product = static_cast<uint64_t>(width) * first;
  const bool whole = static_cast<uint32_t>(product) >= (uint64_t{1} << 32) % width;
  const double magnitude = static_cast<double>((product >> 32) << kLowBits | (second >> 10 & 0xfffffu));
  const bool negative = static_cast<int32_t>(second) < 0;
  double share = 0;
  for (int i = 3; i >= 0; --i) share = (share + bits[i]) * 0x1p-32;
  const double height = stairs.heights[layer] + share * (stairs.heights[layer + 1] - stairs.heights[layer]);
  const double x = magnitude * 0x1p-40;
  const bool accepted = whole && !(negative && magnitude == 0) && height < stairs.total * std::exp(x * x * -0.5);
  return accepted ? (negative ? -magnitude : magnitude) : std::numeric_limits<double>::quiet_NaN();
}

// The numbers of the places `place .. place + count - 1`, at most kBlock; `place` is a multiple of kGroup.
void integers(const uint32_t* key, uint32_t stream, uint64_t place, int count, const Staircase& stairs, double* out) {
  uint32_t first[kBlock], second[kBlock];
  for (int start = 0; start < count; start += kGroup) {
    uint64_t counters[kLanes];
    uint32_t words[16][kLanes];
    for (int i = 0; i < kLanes; ++i) counters[i] = (place + start) / 8 + i;
    chacha(key, counters, stream, 0, kRounds, words);
    std::memcpy(first + start, words, sizeof words / 2);
    std::memcpy(second + start, words + 8, sizeof words / 2);
  }
  propose(first, second, count, stairs, out);
  int waiting[kBlock], left = 0;
  for (int start = 0; start < count; start += kLanes) {
    // Accepted numbers are at least 2^20, so that this bit of the exponent is that of a NaN. Looking at all at once is faster.
    uint64_t any = 0, bits[kLanes];
    std::memcpy(bits, out + start, sizeof bits);
    for (int i = 0; i < kLanes; ++i) any |= bits[i];
    if ((any >> 61 & 1) == 0) continue;
    for (int i = start; i < std::min(start + kLanes, count); ++i) {
      if (std::isnan(out[i])) waiting[left++] = i;
    }
  }
  for (uint32_t turn = 1; left > 0; ++turn) {
    int kept = 0;
    for (int start = 0; start < left; start += kLanes) {
      const int lanes = std::min(kLanes, left - start);
      uint64_t counters[kLanes] = {};
      uint32_t words[16][kLanes];
      for (int i = 0; i < lanes; ++i) counters[i] = place + waiting[start + i];
      chacha(key, counters, stream, turn, kRounds, words);
      for (int i = 0; i < lanes; ++i) {
        const int at = waiting[start + i];
        const uint32_t bits[4] = {words[0][i], words[1][i], words[2][i], words[3][i]};
        out[at] = decide(first[at], second[at], bits, stairs);
        if (!std::isnan(out[at])) continue;
        first[at] = words[4][i], second[at] = words[5][i];
        waiting[kept++] = at;
      }
    }
    left = kept;
  }
}

// Round the values to the grid, add the numbers of the places `place ..`, and write the sums in the precision of `target`.
template <typename Float>
void add_on_grid(Float* data, int64_t numel, double grid, const uint32_t* key, uint32_t stream, uint64_t place,
                 const Staircase& stairs) {
  const double inverse = 1 / grid;
  at::parallel_for(0, (numel + kBlock - 1) / kBlock, 4, [&](int64_t begin, int64_t end) {
    double drawn[kBlock];
    for (int64_t start = begin * kBlock; start < std::min(end * kBlock, numel); start += kBlock) {
      const int count = static_cast<int>(std::min<int64_t>(kBlock, numel - start));
      integers(key, stream, place + start, count, stairs, drawn);
      for (int i = 0; i < count; ++i) {
        Float& value = data[start + i];
        value = static_cast<Float>((std::rint(static_cast<double>(value) * inverse) + drawn[i]) * grid);
      }
    }
  });
}

// `stairs`: int32 [2, 1025], widths and heights.
void add_noise_(at::Tensor target, double grid, const at::Tensor& key, int64_t stream, int64_t place, const at::Tensor& stairs,
                double total) {
  TORCH_CHECK(target.device().is_cpu() && target.is_contiguous() && (target.scalar_type() == at::kFloat || target.scalar_type() == at::kDouble),
              "add_noise_ takes a contiguous float32 or float64 tensor on the CPU");
  TORCH_CHECK(place >= 0 && place % kGroup == 0, "add_noise_ starts at a multiple of ", kGroup);
  TORCH_CHECK(key.scalar_type() == at::kInt && key.is_contiguous() && key.numel() == 8, "a key has 8 words");
  TORCH_CHECK(stairs.scalar_type() == at::kInt && stairs.is_contiguous() && stairs.numel() == 2 * (kLayers + 1), "no staircase");
  const Staircase layers{stairs.const_data_ptr<int32_t>(), stairs.const_data_ptr<int32_t>() + kLayers + 1, total};
  const uint32_t* words = reinterpret_cast<const uint32_t*>(key.const_data_ptr<int32_t>());
  const auto add = [&](auto* data) {
    add_on_grid(data, target.numel(), grid, words, static_cast<uint32_t>(stream), static_cast<uint64_t>(place), layers);
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
    uint64_t counters[kLanes];
    uint32_t words[16][kLanes];
    for (int i = 0; i < kLanes; ++i) counters[i] = static_cast<uint64_t>(first + start + i);
    chacha(reinterpret_cast<const uint32_t*>(key.const_data_ptr<int32_t>()), counters, static_cast<uint32_t>(stream),
           static_cast<uint32_t>(turn), static_cast<int>(rounds), words);
    for (int64_t i = 0; i < std::min<int64_t>(kLanes, out.size(0) - start); ++i) {
      for (int w = 0; w < 16; ++w) data[16 * (start + i) + w] = static_cast<int32_t>(words[w][i]);
    }
  }
}

// ---- Convolutions ---------------------------------------------------------------------------------------------------

// Weight gradients [B, *weight] from x [B * rows, C, ...] and gy [B * rows, O, ...], written into `out`.
void conv_gradients_(at::Tensor out, const at::Tensor& x, const at::Tensor& gy, int64_t rows, at::IntArrayRef stride,
                     at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                     at::IntArrayRef output_padding, int64_t groups) {
  const int64_t examples = out.size(0);
  const at::Tensor weight = at::empty(out.sizes().slice(1), x.options()); // only its shape is looked at
  at::parallel_for(0, examples, 1, [&](int64_t begin, int64_t end) {
#ifdef _OPENMP
    // Without it the convolution library lays its scratch memory out for a team that it does not get, and is silently wrong.
    omp_set_num_threads(1);
#endif
    at::NoGradGuard no_grad;
    for (int64_t i = begin; i < end; ++i) {
      auto gradients =
          at::convolution_backward(gy.narrow(0, i * rows, rows), x.narrow(0, i * rows, rows), weight, std::nullopt, stride,
                                   padding, dilation, transposed, output_padding, groups, {false, true, false});
      out.select(0, i).copy_(std::get<1>(gradients));
    }
  });
}

} // namespace

TORCH_LIBRARY(dpexp_native, library) {
  library.def(
      "add_noise_(Tensor(a!) target, float grid, Tensor key, int stream, int place, Tensor stairs, float total) -> ()",
      &add_noise_);
  library.def("chacha_(Tensor(a!) out, Tensor key, int first, int stream, int turn, int rounds) -> ()", &chacha_);
  library.def(
      "conv_gradients_(Tensor(a!) out, Tensor x, Tensor gy, int rows, int[] stride, int[] padding, int[] dilation, "
      "bool transposed, int[] output_padding, int groups) -> ()",
      &conv_gradients_);
}
