// attend: exact attention over the selected pages. A block takes one split of one unit (batch row, query token,
// selection head, tile of query heads), block x split x % num_splits of unit x / num_splits. Its warps take tiles of
// tokens in turn and meet only at the end.
#pragma once

#include <type_traits>

#include "cuda/combine.cuh"

namespace quest::cuda {

// A warp's tiles, one after the other: while it works on one, the next are on their way.
template <typename T, int D>
class Tiles {
 public:
  using L = Layout<T, D>;

  __device__ Tiles(const AttendParams& p, const TokenWalk& walk, unsigned char* stages)
      : p_(p), walk_(walk), stages_(stages) {
    TokenWalk::Page pages[L::kStages + 1];
    TokenWalk::Place places[L::kStages];
#pragma unroll
    for (int i = 0; i <= L::kStages; i++) pages[i] = walk.page(token_ + i * kStep);
#pragma unroll
    for (int i = 0; i < L::kStages; i++) places[i] = walk.place(pages[i]);
#pragma unroll
    for (int i = 0; i < L::kStages - 1; i++) ask(walk.rows(places[i]), i, i);
    place_ = places[L::kStages - 1];
    page_ = pages[L::kStages];
  }

  // The stage that next() is the first to fill.
  __device__ unsigned char* free_stage() const { return stages_ + stage_ * L::kStageBytes; }

  // Wait for the next tile, and ask for another in place of the last; false if there is none.
  __device__ __forceinline__ bool next() {
    if (token_ / L::kTokens * L::kTokens >= walk_.tokens()) return false;
    cp_async_wait<L::kStages - 2>();
    __syncwarp();  // all lanes' copies are there, and all lanes are done with the last tile
    seen_ = static_cast<unsigned>(asked_) & kAll;
    asked_ >>= L::kTokens;
    ask(walk_.rows(place_), stage_, L::kStages - 2);
    place_ = walk_.place(page_);
    page_ = walk_.page(token_ + (L::kStages + 1) * kStep);
    token_ += kStep;
    stage_ = stage_ == L::kStages - 1 ? 0 : stage_ + 1;
    return true;
  }
  __device__ __forceinline__ unsigned seen() const { return seen_; }  // a bit for each token
  __device__ __forceinline__ const unsigned char* k() const { return stages_ + stage_ * L::kStageBytes; }
  __device__ __forceinline__ const unsigned char* v() const { return k() + L::kTileBytes; }

 private:
  static constexpr int kStep = L::kWarps * L::kTokens;  // from one tile of a warp to its next
  static constexpr unsigned kAll = (1u << L::kTokens) - 1;
  using Masks = std::conditional_t<L::kTokens*(L::kStages - 1) <= 32, uint32_t, uint64_t>;

  // Into a stage, while `ahead` others are on their way.
  __device__ __forceinline__ void ask(TokenWalk::Rows rows, int stage, int ahead) {
    const unsigned seen = __ballot_sync(~0u, rows.k >= 0) & kAll;
    if (seen) copy_tile<T, D>(p_, rows, stages_ + stage * L::kStageBytes);
    cp_async_commit();
    asked_ |= Masks{seen} << L::kTokens * ahead;
  }

  const AttendParams& p_;
  const TokenWalk& walk_;
  unsigned char* const stages_;
  TokenWalk::Place place_;
  TokenWalk::Page page_;
  Masks asked_ = 0;  // what is seen of the tiles on their way
  unsigned seen_ = 0;
  int token_ = threadIdx.x / 32 * L::kTokens + threadIdx.x % L::kTokens;  // the lane's, of the next tile
  int stage_ = L::kStages - 1;                                            // of the current tile
};

template <typename T, int D>
__global__ void __launch_bounds__(Layout<T, D>::kThreads, 1)
    attend(const __grid_constant__ AttendParams p, const __grid_constant__ Divisors by) {
  using L = Layout<T, D>;
  QUEST_SHARED(shared);
  Running<T, D> running;
  {
    const int splits = static_cast<int>(p.num_splits);
    const Unit unit(p, blockIdx.x / splits);
    const TokenWalk walk(p, by, unit, blockIdx.x % splits);
    Tiles<T, D> tiles(p, walk, shared + L::kQueryBytes + threadIdx.x / 32 * L::kWarpBytes);
    const Products<T, D> products(p, unit, shared, tiles.free_stage());
    while (tiles.next()) {
      if (tiles.seen() == 0) continue;
      Logits<T, D> x = {};
      products.logits(tiles.k(), x);
      running.weigh(x, tiles.seen(), p.softmax_scale, p.softcap);
      products.mix(x, tiles.v(), running.sums);
    }
  }

  __syncthreads();  // all warps are done with their tiles, whose memory now takes the results
  WarpParts<T, D> parts(shared);
  parts.leave(running);
  __syncthreads();
  const int block = anew(blockIdx.x), splits = static_cast<int>(p.num_splits);
  const int unit_index = block / splits, split = block % splits;
  const Unit unit(p, unit_index);
  if (splits == 1)
    each_quarter<D>(p, unit, L::kThreads,
                    [&](int head, int column) { write(p, unit, head, column, parts.result(head, column)); });
  else if (leave_split(p, unit, unit_index, split, parts, shared))
    combine_splits<T, D>(p, unit, unit_index, shared);
}

// f(D as a constant type) for the smallest D that rows of K and V fit in.
template <typename F>
auto by_dim(const AttendParams& p, const F& f) {
  const int64_t dim = p.k_cache.dim > p.v_cache.dim ? p.k_cache.dim : p.v_cache.dim;
  if (dim <= 64) return f(std::integral_constant<int, 64>());
  if (dim <= 128) return f(std::integral_constant<int, 128>());
  if (dim <= 192) return f(std::integral_constant<int, 192>());
  return f(std::integral_constant<int, kMaxDim>());
}

template <typename T>
cudaError_t launch_attend(const AttendParams& p, cudaStream_t stream) {
  return by_dim(p, [&](auto dim) {
    constexpr int D = decltype(dim)::value;
    using L = Layout<T, D>;
    const auto kernel = &attend<T, D>;
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, L::kSharedUsed);
    if (error != cudaSuccess) return error;
    const Divisors by{Divisor(p.seq.page_size), Divisor(p.seq.block_size / p.seq.page_size)};
    QUEST_LAUNCH(kernel, p.units() * p.num_splits, L::kThreads, L::kSharedUsed, stream, p, by);
    return cudaGetLastError();
  });
}

}  // namespace quest::cuda
