// The two products of a tile: query x K, and weights x V. Both kinds share one layout of results over a warp: lane
// 4 g + q holds columns 8 n + 2 q and 8 n + 2 q + 1 of rows (query heads) g and g + 8, as x[n][0 .. 3].
#pragma once

#include "cuda/layout.h"
#include "cuda/rows.cuh"
#include "cuda/types.cuh"

namespace quest::cuda {

template <typename T, int D>
using Logits = float[Layout<T, D>::kTokens / 8][4];
template <int D>
using Sums = float[D / 8][4];

__device__ __forceinline__ float element(const Rows& rows, const void* row, int i) {
  switch (rows.dtype) {
    case DType::bf16: return to_float(static_cast<const bf16*>(row)[i]);
    case DType::f16: return to_float(static_cast<const f16*>(row)[i]);
    default: return static_cast<const float*>(row)[i];
  }
}

// A unit's query, in tiles' layout, by `threads` threads. What lies in rows beyond the unit's heads does not matter:
// nobody reads what comes of it.
template <typename T, int D>
__device__ void load_query(const AttendParams& p, const Unit& unit, int thread, int threads, unsigned char* tile) {
  constexpr int kPerChunk = kChunk / sizeof(T);
  for (int i = thread; i < unit.heads * D; i += threads) {
    const int head = i / D, d = i % D;
    const float x = d < p.query.dim ? element(p.query, p.query.at(unit.b, unit.t, unit.head + head), d) : 0.0f;
    from_float(x, reinterpret_cast<T*>(tile + Layout<T, D>::offset(head, d / kPerChunk)) + d % kPerChunk);
  }
}

// On tensor cores.
template <typename T, int D>
class Products {
 public:
  using L = Layout<T, D>;

  // Each warp uses a stage that its copies have not reached yet.
  __device__ Products(const AttendParams& p, const Unit& unit, unsigned char*, unsigned char* stage) {
    const int lane = threadIdx.x % 32;
    load_query<T, D>(p, unit, lane, 32, stage);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < D / 16; i++) ldmatrix(query_[i], stage + L::offset(lane % 16, 2 * i + lane / 16));
    __syncwarp();
  }

  __device__ __forceinline__ void logits(const unsigned char* k, Logits<T, D>& x) const {
    const int lane = threadIdx.x % 32, token = lane / 16 * 8 + lane % 8;
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
      uint32_t keys[4];
      ldmatrix(keys, k + L::offset(token, 2 * i + lane / 8 % 2));
      mma<T>(x[0], query_[i], keys[0], keys[1]);
      mma<T>(x[1], query_[i], keys[2], keys[3]);
    }
  }

  __device__ __forceinline__ void mix(const Logits<T, D>& weights, const unsigned char* v, Sums<D>& sums) const {
    const int lane = threadIdx.x % 32, token = lane % 16;
    const uint32_t w[4] = {pack<T>(weights[0][0], weights[0][1]), pack<T>(weights[0][2], weights[0][3]),
                           pack<T>(weights[1][0], weights[1][1]), pack<T>(weights[1][2], weights[1][3])};
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
      uint32_t values[4];
      ldmatrix_trans(values, v + L::offset(token, 2 * i + lane / 16));
      mma<T>(sums[2 * i], w, values[0], values[1]);
      mma<T>(sums[2 * i + 1], w, values[2], values[3]);
    }
  }

 private:
  uint32_t query_[D / 16][4];
};

// In fp32, number by number.
template <int D>
class Products<float, D> {
 public:
  using L = Layout<float, D>;

  // All warps use one copy.
  __device__ Products(const AttendParams& p, const Unit& unit, unsigned char* query, unsigned char*) : query_(query) {
    load_query<float, D>(p, unit, threadIdx.x, L::kThreads, query);
    __syncthreads();
  }

  __device__ __forceinline__ void logits(const unsigned char* k, Logits<float, D>& x) const {
    const int lane = threadIdx.x % 32;
#pragma unroll kUnroll
    for (int chunk = 0; chunk < L::kChunks; chunk++) {
      auto at = [&](const unsigned char* tile, int row) {
        return *reinterpret_cast<const float4*>(tile + L::offset(row, chunk));
      };
      const float4 q[2] = {at(query_, lane / 4), at(query_, lane / 4 + 8)};
      const float4 keys[2] = {at(k, lane % 4 * 2), at(k, lane % 4 * 2 + 1)};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float4 a = q[i / 2], b = keys[i % 2];
        x[0][i] += fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, a.x * b.x)));  // the large sum is rounded once
      }
    }
  }

  __device__ __forceinline__ void mix(const Logits<float, D>& weights, const unsigned char* v, Sums<D>& sums) const {
    const int lane = threadIdx.x % 32, quad = lane % 4;
#pragma unroll kUnroll
    for (int token = 0; token < L::kTokens; token++) {
      const int owner = lane / 4 * 4 + token / 2;
      const bool odd = token % 2;
      const float w[2] = {__shfl_sync(~0u, odd ? weights[0][1] : weights[0][0], owner),
                          __shfl_sync(~0u, odd ? weights[0][3] : weights[0][2], owner)};
#pragma unroll
      for (int n = 0; n < D / 8; n++) {
        const unsigned char* at = v + L::offset(token, 2 * n + quad / 2) + quad % 2 * sizeof(float2);
        const float2 values = *reinterpret_cast<const float2*>(at);
#pragma unroll
        for (int i = 0; i < 4; i++) sums[n][i] = fmaf(w[i / 2], i % 2 ? values.y : values.x, sums[n][i]);
      }
    }
  }

 private:
  static constexpr int kUnroll = D > 128 ? 1 : 2;  // what the registers beside the sums suffice for

  const unsigned char* query_;
};

}  // namespace quest::cuda
