// Running softmax of a warp's tiles, and what a unit's parts come to.
#pragma once

#include "cuda/products.cuh"

namespace quest::cuda {

// How much sums against `best` count against `top`; a part of only -inf (or NaN) logits was summed against 0.
__device__ __forceinline__ float weight_against(float best, float top) { return best == top ? 1.0f : expf(best - top); }

// Best logit and sum of exp(logit - best) of rows g and g + 8, the sum over the lane's own columns only; and the sums
// of exp(logit - best) * v.
template <typename T, int D>
struct Running {
  float best[2] = {-kInf, -kInf}, total[2] = {0, 0};
  Sums<D> sums = {};

  // Take in a tile's logits, which become weights. Of its tokens, those count whose bit in `seen` is set.
  __device__ __forceinline__ void weigh(Logits<T, D>& x, unsigned seen, float scale, float softcap) {
    constexpr int kRuns = Layout<T, D>::kTokens / 8;
#pragma unroll
    for (int n = 0; n < kRuns; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int token = 8 * n + threadIdx.x % 4 * 2 + i % 2;
        float logit = x[n][i] * scale;
        if (softcap > 0) logit = softcap * tanhf(logit / softcap);
        x[n][i] = seen >> token & 1 ? logit : -kInf;
      }
    }
    float shrink[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float top = best[r];
#pragma unroll
      for (int n = 0; n < kRuns; n++) top = max_known(top, max_known(x[n][2 * r], x[n][2 * r + 1]));
      top = max_known(top, __shfl_xor_sync(~0u, top, 1));
      top = max_known(top, __shfl_xor_sync(~0u, top, 2));
      const float base = top == -kInf ? 0.0f : top;  // every logit is -inf (or NaN, which stays)
      shrink[r] = best[r] == top ? 1.0f : expf(best[r] - base);
      best[r] = top;
      total[r] *= shrink[r];
#pragma unroll
      for (int n = 0; n < kRuns; n++) {
#pragma unroll
        for (int i = 2 * r; i < 2 * r + 2; i++) total[r] += x[n][i] = expf(x[n][i] - base);
      }
    }
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) sums[n][i] *= shrink[i / 2];
    }
  }
};

// Four neighbouring columns of one head's result, from parts that are taken in one by one.
struct Result {
  float best = -kInf, total = 0, sums[4] = {0, 0, 0, 0};

  __device__ __forceinline__ void add(float part_total, float4 part_sums, float weight) {
    total += part_total * weight;
    sums[0] += part_sums.x * weight;
    sums[1] += part_sums.y * weight;
    sums[2] += part_sums.z * weight;
    sums[3] += part_sums.w * weight;
  }
};

// Write columns [column, column + 4) of a head's out, and with the first of them its lse.
__device__ inline void write(const AttendParams& p, const Unit& unit, int head, int column, Result x) {
  const bool empty = x.total == 0 && x.best == -kInf;
  const int64_t of = int64_t{unit.head} + head;
  float scale = 1;
  if (p.sinks && !empty) {  // the sink is one more logit, without a value
    const float sink = p.sinks[of], top = max_known(x.best, sink);
    scale = weight_against(x.best, top);
    x.total = x.total * scale + expf(sink - top);
    x.best = top;
  }
  const float norm = empty ? 0.0f : scale / x.total;
  void* row = p.out.at(unit.b, unit.t, of);
  for (int i = 0; i < 4; i++) {
    const float y = empty ? 0.0f : x.sums[i] * norm;
    switch (p.out.dtype) {
      case DType::bf16: from_float(y, static_cast<bf16*>(row) + column + i); break;
      case DType::f16: from_float(y, static_cast<f16*>(row) + column + i); break;
      default: static_cast<float*>(row)[column + i] = y;
    }
  }
  if (column == 0) p.lse[(unit.b * p.seq.q_len + unit.t) * p.num_heads + of] = empty ? -kInf : x.best + logf(x.total);
}

}  // namespace quest::cuda
