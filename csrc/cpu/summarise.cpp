// summarise: channel-wise minimum and maximum over the tokens present in a page.
#include "cpu/tables.h"

namespace quest::cpu::QUEST_ISA {

// NaN stays: a page that holds one has NaN in that channel.
QUEST_INLINE Vec lower(Vec m, Vec x) { return ((x < m) | (x != x)) ? x : m; }
QUEST_INLINE Vec upper(Vec m, Vec x) { return ((x > m) | (x != x)) ? x : m; }

template <typename T>
static void page_range(const T* keys, int64_t stride, int64_t tokens, int64_t dim, T* low, T* high) {
  float lo[W], hi[W];
  for (int64_t d = 0; d < dim; d += W) {
    const int64_t n = dim - d < W ? dim - d : W;
    auto row = [&](int64_t j) { return n == W ? load(keys + j * stride + d) : load_n(keys + j * stride + d, n); };
    Vec l = row(0), h = l;
    for (int64_t j = 1; j < tokens; j++) {
      const Vec x = row(j);
      l = lower(l, x);
      h = upper(h, x);
    }
    store(lo, l);
    store(hi, h);
    store_row(low + d, lo, n);
    store_row(high + d, hi, n);
  }
}

void summarise(const SummariseParams& p, int64_t row, int64_t kv_head, int64_t begin, int64_t end) {
  const Sequences& seq = p.seq;
  const int64_t length = seq.length(row), pages_per_block = seq.block_size / seq.page_size;
  by_dtype(p.k_cache.dtype, [&](auto* type) {
    using T = decltype(type);
    for (int64_t page = begin; page < end; page++) {
      const int64_t block = seq.block(row, page / pages_per_block), offset = page % pages_per_block;
      if (block < 0) continue;
      const int64_t left = length - page * seq.page_size;
      auto at = [&](const Pool& pool, int64_t r) {
        return static_cast<T>(pool.data) + block * pool.stride_block + kv_head * pool.stride_head + r * pool.stride_row;
      };
      page_range(at(p.k_cache, offset * seq.page_size), p.k_cache.stride_row,
                 left < seq.page_size ? left : seq.page_size, p.k_cache.dim, at(p.page_min, offset),
                 at(p.page_max, offset));
    }
  });
}

}  // namespace quest::cpu::QUEST_ISA
