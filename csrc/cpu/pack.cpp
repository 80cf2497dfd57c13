// pack: the summary of a full block as codes, the cells that hold its pages' minima and maxima. quest/packing.py has
// the layout, quest/reference_packed.py the rule.
#include "cpu/tables.h"

namespace quest::cpu::QUEST_ISA {

constexpr float kMaxKey = 1e38f;

// The bfloat16 at or above x, at or below x.
static uint16_t bf16_above(float x) {
  const uint32_t u = float_to_bits(x);
  return static_cast<uint16_t>((u >> 31 ? u : u + 0xffff) >> 16);
}
static uint16_t bf16_below(float x) {
  const uint32_t u = float_to_bits(x);
  return static_cast<uint16_t>((u >> 31 ? u + 0xffff : u) >> 16);
}
static float from_bf16(uint16_t x) { return bits_to_float(uint32_t{x} << 16); }

// The smallest float above x >= 0.
static float next_up(float x) { return bits_to_float(float_to_bits(x) + 1); }

QUEST_INLINE float floor_of(float x) { return __builtin_floorf(x); }

// A channel's cells.
struct Cells {
  float lo, step, last;

  // The cell of a minimum, whose lower edge is not above it, of a maximum, whose upper edge is not below it, and of a
  // key that is both. The division rounds: a cell that doesn't hold its key moves.
  uint32_t lower(float x) const { return clip(below(x)); }
  uint32_t upper(float x) const { return clip(above(-floor_of(-(x - lo) / step) - 1, x)); }
  uint32_t only(float x) const { return clip(above(below(x), x)); }

 private:
  float below(float x) const {
    const float c = floor_of((x - lo) / step);
    return c - (lo + c * step > x);
  }
  float above(float c, float x) const { return c + (lo + (c + 1) * step < x); }
  uint32_t clip(float c) const { return step > 0 && c > 0 ? static_cast<uint32_t>(c < last ? c : last) : 0; }
};

static Cells cells_of(float low, float high, float count, uint16_t* lo, uint16_t* step) {
  *lo = bf16_below(low);
  const double width = static_cast<double>(high) - static_cast<double>(from_bf16(*lo));
  *step = width > 0 ? bf16_above(next_up(static_cast<float>(width / count))) : 0;
  return {from_bf16(*lo), from_bf16(*step), count - 1};
}

// One KV head of block `index` of a row, which is full.
template <typename T>
static void pack_block(T*, const PackParams& p, int64_t block, int64_t kv_head, int64_t sink) {
  const Packed& x = p.packed;
  const int64_t page_size = p.seq.page_size, head_dim = p.k_cache.dim;
  const float count = static_cast<float>(x.cells());
  const T* keys =
      static_cast<const T*>(p.k_cache.data) + block * p.k_cache.stride_block + kv_head * p.k_cache.stride_head;
  char* out = x.data + block * x.stride_block + kv_head * x.stride_head;
  memset(out, 0, x.fine_at + x.pages * x.words * 4);
  auto* lo = reinterpret_cast<uint16_t*>(out);
  uint16_t* step = lo + x.dim;
  auto* coarse = reinterpret_cast<uint32_t*>(out + x.coarse_at);
  auto* fine = reinterpret_cast<uint32_t*>(out + x.fine_at);
  // Put code c of channel `place` among the `of_page` words of a page, in the lower or the upper half of one.
  auto put = [&](uint32_t* words, int64_t of_page, int64_t lanes, int64_t page, int64_t place, int half, uint32_t c) {
    const int64_t at = (page / lanes * of_page + place % of_page) * lanes + page % lanes;
    words[at] |= c << (place / of_page * x.bits + 16 * half);
  };

  for (int64_t d = 0; d < head_dim; d += W) {
    const int64_t n = head_dim - d < W ? head_dim - d : W;
    auto range = [&](int64_t page, float* low, float* high) {
      const T* rows = keys + page * page_size * p.k_cache.stride_row + d;
      Vec l = splat(kInf), h = splat(-kInf);
      for (int64_t j = 0; j < page_size; j++, rows += p.k_cache.stride_row) {
        const Vec v = n == W ? load(rows) : load_n(rows, n);
        l = v < l ? v : l;
        h = v > h ? v : h;
      }
      store(low, l < -kMaxKey ? splat(-kMaxKey) : l);
      store(high, h > kMaxKey ? splat(kMaxKey) : h);
    };
    float low[W], high[W], least[W], most[W];
    for (int64_t i = 0; i < W; i++) least[i] = kInf, most[i] = -kInf;
    for (int64_t page = sink; page < x.pages; page++) {
      range(page, low, high);
      for (int64_t i = 0; i < W; i++) {
        least[i] = low[i] < least[i] ? low[i] : least[i];
        most[i] = high[i] > most[i] ? high[i] : most[i];
      }
    }
    Cells cells[W];
    for (int64_t i = 0; i < n; i++)
      cells[i] = sink < x.pages ? cells_of(least[i], most[i], count, lo + d + i, step + d + i) : Cells{0, 0, 0};
    for (int64_t group = sink / x.group_pages; group < x.groups; group++) {
      uint32_t down[W], up[W] = {};
      for (int64_t i = 0; i < W; i++) down[i] = static_cast<uint32_t>(count) - 1;
      const int64_t first = group * x.group_pages, end = first + x.group_pages, half = x.dim / 2;
      for (int64_t page = first > sink ? first : sink; page < end; page++) {
        range(page, low, high);
        for (int64_t i = 0; i < n; i++) {
          const uint32_t a = x.single ? cells[i].only(high[i]) : cells[i].upper(high[i]);
          const uint32_t b = x.single ? a : cells[i].lower(low[i]);
          if (x.single) {
            put(fine, x.words, x.lanes, page, (d + i) % half, (d + i) / half, a);
          } else {
            put(fine, x.words, x.lanes, page, d + i, 0, a);
            put(fine, x.words, x.lanes, page, d + i, 1, b);
          }
          down[i] = b < down[i] ? b : down[i];
          up[i] = a > up[i] ? a : up[i];
        }
      }
      for (int64_t i = 0; x.coarse && i < n; i++) {
        put(coarse, x.coarse_words, x.coarse_lanes, group, d + i, 0, up[i]);
        put(coarse, x.coarse_words, x.coarse_lanes, group, d + i, 1, down[i]);
      }
    }
  }
}

void pack(const PackParams& p, int64_t row, int64_t kv_head, int64_t index) {
  const int64_t block = p.seq.block(row, index), before = index * p.packed.pages;
  if (block < 0) return;
  const int64_t sink = p.sink_pages - before < p.packed.pages ? p.sink_pages - before : p.packed.pages;
  by_dtype(p.k_cache.dtype, [&](auto* type) { pack_block(type, p, block, kv_head, sink > 0 ? sink : 0); });
}

}  // namespace quest::cpu::QUEST_ISA
