// Two things that torch has no fast way for on a CPU: Gaussian noise from a counter, and the weight gradient of a convolution
// for every example, the examples spread over the cores. Optional: everything works without this file, see __init__.py.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __AES__
#include <immintrin.h>
#endif

namespace {

// ---- Gaussian noise -------------------------------------------------------------------------------------------------
// Random words from a counter and the transform of Box and Muller. The noise of element i depends on (key, stream, i) alone, so that
// neither threads nor the order of blocks change it. The words are those of AES-128 in counter mode (FIPS 197; NIST SP 800-38A, 6.5)
// where the processor has instructions for it, ten of which make 16 words or more; else those of Philox4x32-10 (Salmon et al. 2011,
// "Parallel random numbers: as easy as 1, 2, 3").

constexpr int kLanes = 64;               // counters that go through the rounds side by side
constexpr int kNormals = 4 * kLanes;     // words that they give, and normals
constexpr int64_t kBlock = 16 * kNormals;

inline float log_of(float x) { // natural logarithm of a normal, positive float; absolute error below 3e-7
  int32_t bits;
  std::memcpy(&bits, &x, 4);
  int32_t exponent = (bits - 0x3f3504f3) >> 23; // so that the mantissa is between sqrt(1/2) and sqrt(2)
  bits -= exponent << 23;
  float m;
  std::memcpy(&m, &bits, 4);
  float f = m - 1.0f;
  float q = -0.07673641f;
  q = q * f + 0.12722673f;
  q = q * f - 0.13127555f;
  q = q * f + 0.14204855f;
  q = q * f - 0.16626646f;
  q = q * f + 0.20001234f;
  q = q * f - 0.25000781f;
  q = q * f + 0.33333331f;
  q = q * f - 0.49999997f;
  return static_cast<float>(exponent) * 0.69314718f + (f + f * f * q);
}

// `Words(key, stream).of(first, out)`: the words of the counters `first .. first + 63`, where `first` is a multiple of kLanes.
#ifdef __AES__
struct Words {
  static constexpr const char* kName = "aes128-ctr";
  __m128i keys[11];

  Words(uint64_t key, uint64_t stream) { // the 128 bits are the key of the cipher; its counter starts at 0
    keys[0] = _mm_set_epi64x(static_cast<int64_t>(stream), static_cast<int64_t>(key));
    expand<0x01>(1), expand<0x02>(2), expand<0x04>(3), expand<0x08>(4), expand<0x10>(5);
    expand<0x20>(6), expand<0x40>(7), expand<0x80>(8), expand<0x1b>(9), expand<0x36>(10);
  }

  template <int constant>
  void expand(int i) {
    __m128i previous = keys[i - 1];
    const __m128i word = _mm_shuffle_epi32(_mm_aeskeygenassist_si128(previous, constant), 0xff);
    for (int shift = 0; shift < 3; ++shift) previous = _mm_xor_si128(previous, _mm_slli_si128(previous, 4));
    keys[i] = _mm_xor_si128(previous, word);
  }

#if defined(__VAES__) && defined(__AVX512F__)
  void of(uint64_t first, uint32_t* out) const {
    constexpr int kWide = kLanes / 4, kTogether = 8; // four counters in a register; so many registers hide what a round takes
    for (int start = 0; start < kWide; start += kTogether) {
      __m512i x[kTogether];
      __m512i k = _mm512_broadcast_i32x4(keys[0]);
      for (int j = 0; j < kTogether; ++j) {
        const int64_t at = static_cast<int64_t>(first) + 4 * (start + j);
        x[j] = _mm512_xor_si512(_mm512_set_epi64(0, at + 3, 0, at + 2, 0, at + 1, 0, at), k);
      }
      for (int round = 1; round < 10; ++round) {
        k = _mm512_broadcast_i32x4(keys[round]);
        for (int j = 0; j < kTogether; ++j) x[j] = _mm512_aesenc_epi128(x[j], k);
      }
      k = _mm512_broadcast_i32x4(keys[10]);
      for (int j = 0; j < kTogether; ++j) {
        _mm512_storeu_si512(out + 16 * (start + j), _mm512_aesenclast_epi128(x[j], k));
      }
    }
  }
#else
  void of(uint64_t first, uint32_t* out) const {
    constexpr int kTogether = 8;
    for (int start = 0; start < kLanes; start += kTogether) {
      __m128i x[kTogether];
      for (int j = 0; j < kTogether; ++j) {
        x[j] = _mm_xor_si128(_mm_set_epi64x(0, static_cast<int64_t>(first) + start + j), keys[0]);
      }
      for (int round = 1; round < 10; ++round) {
        for (int j = 0; j < kTogether; ++j) x[j] = _mm_aesenc_si128(x[j], keys[round]);
      }
      for (int j = 0; j < kTogether; ++j) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 4 * (start + j)), _mm_aesenclast_si128(x[j], keys[10]));
      }
    }
  }
#endif
};
#else
struct Words {
  static constexpr const char* kName = "philox4x32-10";
  uint64_t key, stream;

  Words(uint64_t key, uint64_t stream) : key(key), stream(stream) {}

  void of(uint64_t first, uint32_t* out) const {
    uint32_t *c0 = out, *c1 = out + kLanes, *c2 = out + 2 * kLanes, *c3 = out + 3 * kLanes;
    uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
    for (int i = 0; i < kLanes; ++i) {
      c0[i] = static_cast<uint32_t>(first) + i; // no carry
      c1[i] = static_cast<uint32_t>(first >> 32);
      c2[i] = static_cast<uint32_t>(stream);
      c3[i] = static_cast<uint32_t>(stream >> 32);
    }
    for (int round = 0; round < 10; ++round) {
      for (int i = 0; i < kLanes; ++i) {
        uint64_t p0 = static_cast<uint64_t>(0xD2511F53u) * c0[i];
        uint64_t p1 = static_cast<uint64_t>(0xCD9E8D57u) * c2[i];
        uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1[i] ^ k0;
        uint32_t n2 = static_cast<uint32_t>(p0 >> 32) ^ c3[i] ^ k1;
        c1[i] = static_cast<uint32_t>(p1);
        c3[i] = static_cast<uint32_t>(p0);
        c0[i] = n0;
        c2[i] = n2;
      }
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
  }
};
#endif

// 256 standard normals of counters `first .. first + 63`: one half of the words are radii, the other angles.
inline void normals(const Words& source, uint64_t first, float* out) {
  constexpr int kPairs = kNormals / 2;
  uint32_t words[kNormals];
  source.of(first, words);
  for (int i = 0; i < kPairs; ++i) {
    // 31 bits, the middle of their interval: between 2^-32 and 1, so a normal is at most 6.66
    float u = static_cast<float>(static_cast<int32_t>(words[i] >> 1)) * 0x1p-31f + 0x1p-32f;
    float t = -2.0f * log_of(u);
    float r = std::sqrt(t > 0.0f ? t : 0.0f);
    float v = static_cast<float>(static_cast<int32_t>(words[kPairs + i])) * 0x1p-31f; // half of the angle is pi/2 * v
    float w = v * v;
    float s = -3.4317889e-06f;
    s = s * w + 1.6025460e-04f;
    s = s * w - 4.6816575e-03f;
    s = s * w + 7.9692602e-02f;
    s = s * w - 6.4596409e-01f;
    s = (s * w + 1.5707964f) * v;
    float c = 4.4921640e-07f;
    c = c * w - 2.5172185e-05f;
    c = c * w + 9.1924000e-04f;
    c = c * w - 2.0863473e-02f;
    c = c * w + 2.5366950e-01f;
    c = c * w - 1.2337005e+00f;
    c = c * w + 1.0f;
    out[i] = r * (1.0f - 2.0f * s * s);
    out[kPairs + i] = r * (2.0f * s * c);
  }
}

// `offset`: how many numbers of the stream come before the first element; a multiple of kNormals.
void add_normals_(at::Tensor target, double std, int64_t key, int64_t stream, int64_t offset) {
  TORCH_CHECK(target.device().is_cpu() && target.scalar_type() == at::kFloat && target.is_contiguous(),
              "add_normals_ takes a contiguous float32 tensor on the CPU");
  TORCH_CHECK(offset >= 0 && offset % kNormals == 0, "add_normals_ starts at a multiple of ", kNormals);
  float* data = target.mutable_data_ptr<float>();
  const int64_t numel = target.numel();
  const float scale = static_cast<float>(std);
  const Words source(static_cast<uint64_t>(key), static_cast<uint64_t>(stream));
  at::parallel_for(0, (numel + kBlock - 1) / kBlock, 4, [&](int64_t begin, int64_t end) {
    float drawn[kNormals];
    for (int64_t start = begin * kBlock; start < std::min(end * kBlock, numel); start += kNormals) {
      normals(source, static_cast<uint64_t>((offset + start) / 4), drawn);
      const int64_t count = std::min<int64_t>(kNormals, numel - start);
      for (int64_t i = 0; i < count; ++i) data[start + i] += scale * drawn[i];
    }
  });
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
  library.def("add_normals_(Tensor(a!) target, float std, int key, int stream, int offset) -> ()", &add_normals_);
  library.def("noise_generator() -> str", [] { return std::string(Words::kName); });
  library.def(
      "conv_gradients_(Tensor(a!) out, Tensor x, Tensor gy, int rows, int[] stride, int[] padding, int[] dilation, "
      "bool transposed, int[] output_padding, int groups) -> ()",
      &conv_gradients_);
}
