// The element types of caches and queries, and their conversion to and from fp32.
#pragma once

#include "cuda/ptx.cuh"
#include "params.h"

namespace quest::cuda {

using bf16 = __nv_bfloat16;
using f16 = __half;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(f16 x) { return __half2float(x); }

__device__ __forceinline__ void from_float(float x, float* to) { *to = x; }
__device__ __forceinline__ void from_float(float x, bf16* to) { *to = __float2bfloat16_rn(x); }
__device__ __forceinline__ void from_float(float x, f16* to) { *to = __float2half_rn(x); }

// f(null pointer of the type).
template <typename F>
auto by_dtype(DType dtype, const F& f) {
  switch (dtype) {
    case DType::bf16: return f(static_cast<bf16*>(nullptr));
    case DType::f16: return f(static_cast<f16*>(nullptr));
    default: return f(static_cast<float*>(nullptr));
  }
}

// The larger of two, of which NaN is none.
__device__ __forceinline__ float max_known(float a, float b) { return fmaxf(a, b); }

constexpr float kInf = __builtin_inff();

}  // namespace quest::cuda
