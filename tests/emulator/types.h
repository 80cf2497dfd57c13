// CUDA's qualifiers and built-in types.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// ---- 16-bit floats ----

struct __nv_bfloat16 {
  uint16_t bits;
};
struct __half {
  uint16_t bits;
};

inline float __uint_as_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float __bfloat162float(__nv_bfloat16 x) { return __uint_as_float(uint32_t{x.bits} << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  const uint32_t u = __float_as_uint(x);
  if (x != x) return {0x7fff};
  return {static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16)};  // to nearest, ties to even
}

inline float __half2float(__half x) {
  const uint32_t sign = uint32_t{x.bits & 0x8000u} << 16, rest = x.bits & 0x7fffu;
  if (rest >= 0x7c00) return __uint_as_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  // 2^112 moves the exponent from half's bias to float's and makes a subnormal exact.
  return __uint_as_float(sign | __float_as_uint(__uint_as_float(rest << 13) * 0x1p112f));
}
inline __half __float2half_rn(float x) {
  const uint16_t sign = __float_as_uint(x) >> 16 & 0x8000;
  const float size = fabsf(x);
  if (x != x) return {0x7fff};
  if (size >= 65520) return {static_cast<uint16_t>(sign | 0x7c00)};  // the middle of the largest and the next
  if (size < 0x1p-14f) {                                             // subnormal: the sum rounds to half's last place
    return {static_cast<uint16_t>(sign | (__float_as_uint(size + 0.5f) - 0x3f000000u))};
  }
  const uint32_t u = __float_as_uint(size) - (112u << 23);
  return {static_cast<uint16_t>(sign | (u + 0xfff + (u >> 13 & 1)) >> 13)};
}
