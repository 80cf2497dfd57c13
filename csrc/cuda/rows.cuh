// From the places of a split's tokens to the rows of K and V in the pool, and from there to shared memory.
#pragma once

#include "cuda/layout.h"
#include "cuda/types.cuh"

namespace quest::cuda {

// Division of numbers below 2^31 by one that is known before the launch.
class Divisor {
 public:
  explicit Divisor(int64_t by) : by_(static_cast<uint32_t>(by)), shift_(0) {
    while (uint64_t{1} << shift_ < by_) shift_++;
    multiplier_ = static_cast<uint32_t>(((uint64_t{1} << (31 + shift_)) + by_ - 1) / by_);
  }
  __device__ __forceinline__ int by() const { return static_cast<int>(by_); }
  __device__ __forceinline__ int quotient(int n) const {
    return by_ == 1 ? n : static_cast<int>(__umulhi(n, multiplier_) >> (shift_ - 1));
  }

 private:
  uint32_t by_, shift_, multiplier_;
};

struct Divisors {
  Divisor page_size, pages_per_block;
};

// Which query heads a block attends for.
struct Unit {
  int b, t, sel_head, head, heads, kv_head;

  __device__ Unit(const AttendParams& p, int unit) {
    const int tiles = static_cast<int>(p.num_tiles), sel_heads = static_cast<int>(p.sel_heads);
    const int group = static_cast<int>(p.num_heads) / sel_heads, tile_heads = static_cast<int>(p.tile_heads);
    const int tile = unit % tiles, q_len = static_cast<int>(p.seq.q_len);
    sel_head = unit / tiles % sel_heads;
    t = unit / tiles / sel_heads % q_len;
    b = unit / tiles / sel_heads / q_len;
    head = sel_head * group + tile * tile_heads;
    heads = min(group - tile * tile_heads, tile_heads);
    kv_head = head / static_cast<int>(p.num_heads / p.num_kv_heads);
  }
};

// The tokens of a split, numbered in the order of its pages. Each lane looks for one token of a tile. Three loads
// depend on each other: page_idx, block_table, then K and V; so a tile's are asked for one after the other, while
// earlier tiles are at work.
class TokenWalk {
 public:
  struct Page {
    int page, offset;  // of the token in the page; page -1 = none
  };
  struct Place {
    int block, row;  // block -1 = no token, or none that the query token sees
  };
  struct Rows {
    int64_t k, v;  // in elements, -1 = as above
  };

  __device__ TokenWalk(const AttendParams& p, const Divisors& by, const Unit& unit, int split)
      : p_(p), by_(by), kv_head_(unit.kv_head), table_(p.seq.block_table + unit.b * p.seq.table_stride) {
    const auto pos = static_cast<int>(p.seq.length(unit.b) - p.seq.q_len + unit.t);
    first_token_ = p.seq.window < 0 || pos < p.seq.window ? 0 : pos + 1 - static_cast<int>(p.seq.window);
    seen_tokens_ = pos < 0 ? 0 : pos + 1 - first_token_;
    end_page_ = pos < 0 ? 0 : by.page_size.quotient(pos) + 1;
    page_idx_ =
        p.page_idx + unit.b * p.idx_stride_batch + unit.t * p.idx_stride_token + unit.sel_head * p.idx_stride_head;
    const int first = p.every_page ? by.page_size.quotient(first_token_) : 0;
    const int pages = p.every_page ? max(0, static_cast<int>(end_page_) - first) : static_cast<int>(p.max_selected);
    const int splits = static_cast<int>(p.num_splits), share = pages / splits, rest = pages % splits;
    begin_ = first + split * share + min(split, rest);
    tokens_ = (share + (split < rest)) * by.page_size.by();
  }

  __device__ __forceinline__ int tokens() const { return tokens_; }

  __device__ __forceinline__ Page page(int token) const {
    if (token >= tokens_) return {-1, 0};
    const int i = by_.page_size.quotient(token);
    return {p_.every_page ? begin_ + i : page_idx_[begin_ + i], token - i * by_.page_size.by()};
  }
  __device__ __forceinline__ Place place(Page at) const {
    if (static_cast<unsigned>(at.page) >= end_page_) return {-1, 0};
    const unsigned token = at.page * static_cast<unsigned>(by_.page_size.by()) + at.offset;
    if (token - first_token_ >= seen_tokens_) return {-1, 0};
    const int i = by_.pages_per_block.quotient(at.page);
    return {table_[i], (at.page - i * by_.pages_per_block.by()) * by_.page_size.by() + at.offset};
  }
  __device__ __forceinline__ Rows rows(Place at) const {
    if (at.block < 0 || at.block >= p_.seq.num_blocks) return {-1, -1};
    const int64_t head = anew(kv_head_);
    auto row = [&](const Pool& pool) {
      return head * pool.stride_head + at.block * pool.stride_block + at.row * pool.stride_row;
    };
    return {row(p_.k_cache), row(p_.v_cache)};
  }

 private:
  const AttendParams& p_;
  const Divisors& by_;
  const int kv_head_;
  const int32_t *table_, *page_idx_;
  unsigned first_token_, seen_tokens_, end_page_;  // that the query token sees
  int begin_, tokens_;                             // place of the split's first page, and its tokens
};

// Ask for the lane's chunks of a row of K or V; those beyond the row's end, and a row of -1, become zeros without being
// read.
template <typename T, int D>
__device__ __forceinline__ void copy_row(const Pool& pool, int64_t row, int token, unsigned char* tile) {
  constexpr int kPerChunk = kChunk / sizeof(T);
#pragma unroll
  for (int line = 0; line < Layout<T, D>::kChunks; line += kLine) {
    const int chunk = line + threadIdx.x % kLine;
    const bool valid = row >= 0 && chunk * kPerChunk < pool.dim;
    const T* from = static_cast<const T*>(pool.data) + (valid ? row + chunk * kPerChunk : 0);
    cp_async(tile + Layout<T, D>::offset(token, chunk), from, valid);
  }
}

// Ask for a tile: K, then V. Lane i gives the rows of token i.
template <typename T, int D>
__device__ __forceinline__ void copy_tile(const AttendParams& p, TokenWalk::Rows rows, unsigned char* stage) {
  using L = Layout<T, D>;
#pragma unroll
  for (int i = 0; i < L::kTokens; i += 32 / kLine) {
    const int token = i + threadIdx.x % 32 / kLine;
    copy_row<T, D>(p.k_cache, __shfl_sync(~0u, rows.k, token), token, stage);
    copy_row<T, D>(p.v_cache, __shfl_sync(~0u, rows.v, token), token, stage + L::kTileBytes);
  }
}

}  // namespace quest::cuda
