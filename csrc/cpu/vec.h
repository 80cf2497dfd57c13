// A vector of floats and the few things the kernels do with it. GCC/Clang vector extensions give the arithmetic on
// every instruction set; intrinsics are used where the compiler would not find the instruction.
//
// This header is compiled once per instruction set, everything in it inside that set's own namespace, so that no
// inline function of a higher set can be linked into a lower one. It includes no STL for the same reason.
#pragma once

#include <cstdint>
#include <cstring>

#include "params.h"

#if defined(__AVX2__)
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 says so of its own intrinsics' undefined lanes
#endif
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define QUEST_INLINE inline __attribute__((always_inline))

namespace quest::cpu::QUEST_ISA {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * W)));
typedef uint32_t UVec __attribute__((vector_size(4 * W)));
typedef uint16_t HVec __attribute__((vector_size(2 * W)));  // W values of 16 bits

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

constexpr float kInf = __builtin_inff();

QUEST_INLINE Vec splat(float x) { return x - Vec{}; }
QUEST_INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// ---- conversions, one value ----

QUEST_INLINE float bits_to_float(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
QUEST_INLINE uint32_t float_to_bits(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}
QUEST_INLINE float to_float(float x) { return x; }
QUEST_INLINE float to_float(bf16 x) { return bits_to_float(uint32_t{x.bits} << 16); }
QUEST_INLINE float to_float(f16 x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  const uint32_t sign = uint32_t{x.bits & 0x8000u} << 16, rest = x.bits & 0x7fffu;
  if (rest >= 0x7c00) return bits_to_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  // 2^112 moves the exponent from half's bias to float's and makes a subnormal exact.
  return bits_to_float(sign | float_to_bits(bits_to_float(rest << 13) * 0x1p112f));
#endif
}
QUEST_INLINE void from_float(float x, float* to) { *to = x; }
QUEST_INLINE void from_float(float x, bf16* to) {  // to nearest, ties to even
  const uint32_t u = float_to_bits(x);
  to->bits = x != x ? uint16_t(u >> 16 | 0x40) : uint16_t((u + 0x7fffu + (u >> 16 & 1)) >> 16);
}
QUEST_INLINE void from_float(float x, f16* to) {
#if defined(__F16C__)
  to->bits = static_cast<uint16_t>(_cvtss_sh(x, 0));
#else
  const uint32_t u = float_to_bits(x), sign = u >> 16 & 0x8000u, rest = u & 0x7fffffffu;
  uint32_t h;
  if (rest > 0x7f800000u) {
    h = 0x7e00;
  } else if (rest >= 0x477ff000u) {  // rounds to 65536 or more
    h = 0x7c00;
  } else if (rest < 0x38800000u) {  // subnormal: let the adder round at the right bit
    h = float_to_bits(bits_to_float(rest) + 0.5f) - float_to_bits(0.5f);
  } else {
    h = (rest + 0xfffu + (rest >> 13 & 1) - 0x38000000u) >> 13;
  }
  to->bits = static_cast<uint16_t>(sign | h);
#endif
}

// ---- loads and stores ----

QUEST_INLINE Vec load(const float* p) {
  Vec v;
  memcpy(&v, p, sizeof v);
  return v;
}
QUEST_INLINE Vec load(const bf16* p) {
#if defined(__AVX512F__)
  const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return (Vec)_mm512_maskz_slli_epi32(0xffff, _mm512_maskz_cvtepu16_epi32(0xffff, h), 16);
#elif defined(__AVX2__)
  return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16);
#else
  HVec h;
  memcpy(&h, p, sizeof h);
  return (Vec)(__builtin_convertvector(h, UVec) << 16);
#endif
}
QUEST_INLINE Vec load(const f16* p) {
#if defined(__AVX512F__)
  return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__ARM_NEON)
  return (Vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits)));
#else
  Vec v;
  for (int i = 0; i < W; i++) v[i] = to_float(p[i]);
  return v;
#endif
}
// The first n < W values; the lanes beyond are zero and their memory is not read.
template <typename T>
QUEST_INLINE Vec load_n(const T* p, int64_t n) {
  T padded[W] = {};
  for (int64_t i = 0; i < n; i++) padded[i] = p[i];
  return load(padded);
}
QUEST_INLINE void store(float* p, Vec v) { memcpy(p, &v, sizeof v); }
template <typename T>
QUEST_INLINE void store_row(T* to, const float* from, int64_t n) {
  for (int64_t i = 0; i < n; i++) from_float(from[i], to + i);
}
template <typename T>
QUEST_INLINE void load_row(float* to, const T* from, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] = to_float(from[i]);
}

// Call f with a null pointer of the element type.
template <typename F>
QUEST_INLINE void by_dtype(DType dtype, const F& f) {
  switch (dtype) {
    case DType::f32: return f(static_cast<float*>(nullptr));
    case DType::bf16: return f(static_cast<bf16*>(nullptr));
    case DType::f16: return f(static_cast<f16*>(nullptr));
  }
}

// ---- arithmetic ----

#if defined(__AVX2__)
// The upper half added to the lower.
QUEST_INLINE __m256 fold(Vec v) {
#if defined(__AVX512F__)
  return _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_maskz_extractf32x8_ps(0xff, (__m512)v, 1));
#else
  return (__m256)v;
#endif
}
#endif

QUEST_INLINE float sum(Vec v) {
#if defined(__AVX2__)
  const __m256 y = fold(v);
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
#else
  return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}
// The sums of N <= 8 vectors, where it pays by adding and transposing all of them at once.
template <int N>
QUEST_INLINE void sum_each(const Vec (&v)[8], float* sums) {
#if defined(__AVX2__)
  if constexpr (N > 2) {
    auto pair = [&](int i) { return _mm256_hadd_ps(fold(v[i]), fold(v[i + 1])); };
    const __m256 a = _mm256_hadd_ps(pair(0), pair(2)), b = _mm256_hadd_ps(pair(4), pair(6));
    _mm256_storeu_ps(sums, _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)));
    return;
  }
#endif
  for (int i = 0; i < N; i++) sums[i] = sum(v[i]);
}
// Maximum that passes over NaN: false comparisons keep what is there.
QUEST_INLINE float max_known(float m, float x) { return x > m ? x : m; }
QUEST_INLINE Vec max_known(Vec m, Vec x) { return x > m ? x : m; }
QUEST_INLINE float largest(Vec v) {
  float m = -kInf;
  for (int i = 0; i < W; i++) m = max_known(m, v[i]);
  return m;
}

// exp(x), relative error below 3e-7 for x in [-87.3, 88]; 0 below, inf above, NaN for NaN.
// 2^n by the exponent bits, e^r on [-ln2/2, ln2/2] by the Taylor polynomial of degree 7.
QUEST_INLINE Vec exp(Vec x) {
  const Vec shift = splat(0x1.8p23f);  // adding it rounds to an integer in the low bits
  const Vec n = (x * 0x1.715476p0f + shift) - shift;
  Vec r = x - n * 0x1.62e4p-1f;  // ln2 in two parts, the first exact when multiplied by n
  r = r - n * 0x1.7f7d1cp-20f;
  Vec p = splat(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const UVec scale = ((UVec)(n + shift) << 23) + (127u << 23);
  Vec y = p * (Vec)scale;
  y = x < -87.3f ? Vec{} : y;
  y = x > 88.0f ? splat(kInf) : y;
  return x == x ? y : x;
}

}  // namespace quest::cpu::QUEST_ISA
