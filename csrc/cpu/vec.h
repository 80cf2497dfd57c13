// A vector of floats and the few things the kernels do with it. GCC/Clang vector extensions give the arithmetic on
// every instruction set; intrinsics are used where the compiler would not find the instruction.
//
// This header is compiled once per instruction set, everything in it inside that set's own namespace, so that no
// inline function of a higher set can be linked into a lower one. It includes no STL for the same reason.
#pragma once

#include <cstdint>
#include <cstring>

#include "params.h"

#if defined(__SSE2__)
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
typedef int32_t IVec __attribute__((vector_size(4 * W)));
typedef uint32_t UVec __attribute__((vector_size(4 * W)));
typedef uint16_t HVec __attribute__((vector_size(2 * W)));  // W values of 16 bits
typedef float Quad __attribute__((vector_size(16)));

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

template <typename Pointer>
constexpr bool kIsBf16 = false;
template <>
constexpr bool kIsBf16<bf16*> = true;

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
// Two vectors of the 2 W values at p. Of bf16 they are the values at even and at odd places, a shift and a mask instead
// of two shuffles; of other types the first and the second W. `to_halves` brings a row into that order.
template <int Half, typename T>
QUEST_INLINE Vec load_half(const T* p) {
  return load(p + Half * W);
}
template <int Half>
QUEST_INLINE Vec load_half(const bf16* p) {
  UVec both;
  memcpy(&both, p, sizeof both);
  return Half ? (Vec)(both & 0xffff0000u) : (Vec)(both << 16);
}
template <typename T>
QUEST_INLINE void to_halves(const T*, const float* row, float* to, int64_t dim) {
  memcpy(to, row, dim * sizeof(float));
}
QUEST_INLINE void to_halves(const bf16*, const float* row, float* to, int64_t dim) {
  int64_t d = 0;
  for (; d + 2 * W <= dim; d += 2 * W)
    for (int i = 0; i < W; i++) to[d + i] = row[d + 2 * i], to[d + W + i] = row[d + 2 * i + 1];
  memcpy(to + d, row + d, (dim - d) * sizeof(float));
}
template <typename T>
QUEST_INLINE void from_halves(const T*, const float* halves, float* to, int64_t dim) {
  memcpy(to, halves, dim * sizeof(float));
}
QUEST_INLINE void from_halves(const bf16*, const float* halves, float* to, int64_t dim) {
  int64_t d = 0;
  for (; d + 2 * W <= dim; d += 2 * W)
    for (int i = 0; i < W; i++) to[d + 2 * i] = halves[d + i], to[d + 2 * i + 1] = halves[d + W + i];
  memcpy(to + d, halves + d, (dim - d) * sizeof(float));
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

// Products of pairs of bf16 values, added up in fp32 (subnormal values count as zero). Places are those of memory.
#if defined(__AVX512BF16__)
constexpr bool kMultipliesBf16 = true;
typedef __m512bh Pairs;  // 2 W values
QUEST_INLINE Pairs load_pairs(const bf16* p) { return (Pairs)_mm512_loadu_si512(p); }
QUEST_INLINE Vec add_products(Vec sums, Pairs a, Pairs b) { return (Vec)_mm512_dpbf16_ps((__m512)sums, a, b); }
#else
constexpr bool kMultipliesBf16 = false;
#endif

// The sums of four vectors. Every sum of a vector is taken in this order, so that equal rows get equal scores.
QUEST_INLINE Quad sum4(Vec a, Vec b, Vec c, Vec d) {
#if defined(__AVX512F__)
  constexpr __mmask16 all = 0xffff;
  auto low = [](Vec x, Vec y) { return _mm512_maskz_unpacklo_ps(all, (__m512)x, (__m512)y); };
  auto high = [](Vec x, Vec y) { return _mm512_maskz_unpackhi_ps(all, (__m512)x, (__m512)y); };
  const __m512d ab = (__m512d)(low(a, b) + high(a, b)), cd = (__m512d)(low(c, d) + high(c, d));
  const __m512 x = (__m512)_mm512_maskz_unpacklo_pd(0xff, ab, cd) + (__m512)_mm512_maskz_unpackhi_pd(0xff, ab, cd);
  const __m256 y = _mm512_castps512_ps256(x) + _mm512_maskz_extractf32x8_ps(0xff, x, 1);
  return (Quad)(_mm256_castps256_ps128(y) + _mm256_extractf128_ps(y, 1));
#elif defined(__AVX2__)
  auto in_lanes = [](Vec x, Vec y) {
    return (__m256d)(_mm256_unpacklo_ps((__m256)x, (__m256)y) + _mm256_unpackhi_ps((__m256)x, (__m256)y));
  };
  const __m256d ab = in_lanes(a, b), cd = in_lanes(c, d);
  const __m256 y = (__m256)_mm256_unpacklo_pd(ab, cd) + (__m256)_mm256_unpackhi_pd(ab, cd);
  return (Quad)(_mm256_castps256_ps128(y) + _mm256_extractf128_ps(y, 1));
#elif defined(__SSE2__)
  auto in_lanes = [](Vec x, Vec y) {
    return (__m128d)(_mm_unpacklo_ps((__m128)x, (__m128)y) + _mm_unpackhi_ps((__m128)x, (__m128)y));
  };
  const __m128d ab = in_lanes(a, b), cd = in_lanes(c, d);
  return (Quad)((__m128)_mm_unpacklo_pd(ab, cd) + (__m128)_mm_unpackhi_pd(ab, cd));
#elif defined(__ARM_NEON)
  auto pairs = [](Vec x, Vec y) { return vpaddq_f32((float32x4_t)x, (float32x4_t)y); };
  return (Quad)vpaddq_f32(pairs(a, b), pairs(c, d));
#else
  auto sum = [](Vec v) { return (v[0] + v[2]) + (v[1] + v[3]); };
  return Quad{sum(a), sum(b), sum(c), sum(d)};
#endif
}
QUEST_INLINE float sum(Vec v) { return sum4(v, v, v, v)[0]; }
// Maximum that passes over NaN: false comparisons keep what is there.
QUEST_INLINE float max_known(float m, float x) { return x > m ? x : m; }
QUEST_INLINE Vec max_known(Vec m, Vec x) { return x > m ? x : m; }
// The largest of values that are no NaN.
QUEST_INLINE float largest(Vec v) {
  Quad parts[W / 4];
  memcpy(parts, &v, sizeof v);
  Quad m = parts[0];
  for (int i = 1; i < W / 4; i++) m = parts[i] > m ? parts[i] : m;
  return max_known(max_known(m[0], m[1]), max_known(m[2], m[3]));
}

// The lanes where a comparison held, as bits.
QUEST_INLINE uint32_t bits_of(IVec held) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)held);
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)held);
#elif defined(__SSE2__)
  return _mm_movemask_ps((__m128)held);
#else
  const IVec bits = held & IVec{1, 2, 4, 8};
  return bits[0] | bits[1] | bits[2] | bits[3];
#endif
}

// x rounded up
QUEST_INLINE IVec ceil_to_int(Vec x) {
#if defined(__AVX512F__)
  return (IVec)_mm512_maskz_cvt_roundps_epi32(0xffff, (__m512)x, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
#else
  const IVec n = __builtin_convertvector(x, IVec);
  return n - (IVec)(__builtin_convertvector(n, Vec) < x);
#endif
}

// exp(x) for x <= 0, relative error below 3e-7 down to -87.3; 0 below, NaN for NaN.
// 2^n by the exponent bits, e^r on [-ln2/2, ln2/2] by the Taylor polynomial of degree 6.
QUEST_INLINE Vec exp(Vec x) {
  const Vec shift = splat(0x1.8p23f);  // adding it rounds to an integer in the low bits
  const Vec shifted = x * 0x1.715476p0f + shift, n = shifted - shift;
  Vec r = x - n * 0x1.62e4p-1f;  // ln2 in two parts, the first exact when multiplied by n
  r = r - n * 0x1.7f7d1cp-20f;
  Vec p = splat(1.0f / 720);
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const UVec scale = ((UVec)shifted << 23) + (127u << 23);
  return x < -87.3f ? Vec{} : p * (Vec)scale;
}

}  // namespace quest::cpu::QUEST_ISA
