// From parts to a whole: a block's warps in shared memory, then a unit's splits in `partial`, which the last of the
// unit's blocks to end adds up.
#pragma once

#include "cuda/softmax.cuh"

namespace quest::cuda {

// What AttendParams::partial holds: sums [units, num_splits, tile_heads, v_dim], best and total of each of those rows,
// and how many splits of each unit are done.
struct Partial {
  int64_t rows;
  float* sums;
  float2* heads;
  unsigned* done;

  __host__ __device__ explicit Partial(const AttendParams& p)
      : rows(p.seq.batch * p.seq.q_len * p.sel_heads * p.num_tiles * p.num_splits * p.tile_heads),
        sums(p.partial),
        heads(reinterpret_cast<float2*>(sums + rows * p.v_cache.dim)),
        done(reinterpret_cast<unsigned*>(heads + rows)) {}
};

// Parts of one head and four columns: heads(i) is a part's best and total, sums(i) its sums.
template <typename Heads, typename Columns>
__device__ __forceinline__ Result add_up(int parts, const Heads& heads, const Columns& sums) {
  Result x;
  for (int i = 0; i < parts; i++) x.best = max_known(x.best, heads(i).x);
#pragma unroll 8
  for (int i = 0; i < parts; i++) x.add(heads(i).y, sums(i), weight_against(heads(i).x, x.best));
  return x;
}

// f(head, column) for every fourth column of each head, spread over the block.
template <int D, typename F>
__device__ __forceinline__ void each_quarter(const AttendParams& p, const Unit& unit, int threads, const F& f) {
  for (int i = threadIdx.x; i < unit.heads * (D / 4); i += threads)
    if (i % (D / 4) * 4 < p.v_cache.dim) f(i / (D / 4), i % (D / 4) * 4);
}

// The warps' results in shared memory.
template <typename T, int D>
class WarpParts {
 public:
  using L = Layout<T, D>;
  __device__ explicit WarpParts(unsigned char* shared)
      : sums_(reinterpret_cast<float*>(shared)),
        heads_(reinterpret_cast<float2*>(sums_ + L::kWarps * kTileHeads * L::kSumStride)) {}

  __device__ void leave(const Running<T, D>& x) {
    const int thread = anew(threadIdx.x), warp = thread / 32, lane = thread % 32;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = warp * kTileHeads + lane / 4 + 8 * r;
      float total = x.total[r];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      if (lane % 4 == 0) heads_[row] = make_float2(x.best[r], total);
      float* to = sums_ + row * L::kSumStride + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < D / 8; n++)
        *reinterpret_cast<float2*>(to + 8 * n) = make_float2(x.sums[n][2 * r], x.sums[n][2 * r + 1]);
    }
  }
  __device__ Result result(int head, int column) const {
    auto row = [&](int warp) { return warp * kTileHeads + head; };
    return add_up(
        L::kWarps, [&](int warp) { return heads_[row(warp)]; },
        [&](int warp) { return *reinterpret_cast<const float4*>(sums_ + row(warp) * L::kSumStride + column); });
  }

 private:
  float* sums_;
  float2* heads_;
};

// Leave a split's result for the unit's last block; true in that block.
template <typename T, int D>
__device__ bool leave_split(const AttendParams& p, const Unit& unit, int unit_index, int split,
                            const WarpParts<T, D>& parts, unsigned char* shared) {
  const Partial partial(p);
  const int64_t row = (unit_index * p.num_splits + split) * p.tile_heads;
  each_quarter<D>(p, unit, Layout<T, D>::kThreads, [&](int head, int column) {
    const Result x = parts.result(head, column);
    *reinterpret_cast<float4*>(partial.sums + (row + head) * p.v_cache.dim + column) =
        make_float4(x.sums[0], x.sums[1], x.sums[2], x.sums[3]);
    if (column == 0) partial.heads[row + head] = make_float2(x.best, x.total);
  });
  __threadfence();
  __syncthreads();
  bool* last = reinterpret_cast<bool*>(shared);
  if (threadIdx.x == 0) *last = atomicAdd(partial.done + unit_index, 1) == p.num_splits - 1;
  __syncthreads();
  return *last;
}

// Add up a unit's splits. Loads go past the first-level cache, which knows nothing of other blocks' stores.
template <typename T, int D>
__device__ void combine_splits(const AttendParams& p, const Unit& unit, int unit_index, unsigned char* shared) {
  constexpr int kThreads = Layout<T, D>::kThreads;
  const Partial partial(p);
  const int splits = static_cast<int>(p.num_splits), tile_heads = static_cast<int>(p.tile_heads);
  const int64_t first = int64_t{unit_index} * splits * tile_heads;
  auto* heads = reinterpret_cast<float2*>(shared);
  __threadfence();
  __syncthreads();  // nobody reads whether the block is the last any more
  for (int i = threadIdx.x; i < splits * tile_heads; i += kThreads) heads[i] = __ldcg(partial.heads + first + i);
  __syncthreads();
  each_quarter<D>(p, unit, kThreads, [&](int head, int column) {
    const float* sums = partial.sums + (first + head) * p.v_cache.dim + column;
    const int64_t step = tile_heads * p.v_cache.dim;
    auto columns = [&](int split) { return __ldcg(reinterpret_cast<const float4*>(sums + split * step)); };
    write(p, unit, head, column, add_up(splits, [&](int split) { return heads[split * tile_heads + head]; }, columns));
  });
}

}  // namespace quest::cuda
