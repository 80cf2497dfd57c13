// pack: the summary of a full block as codes, rounded outward between bounds that its pages share. quest/packing.py has
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
QUEST_INLINE float clip(float x, float most) { return x > 0 ? (x < most ? x : most) : 0.0f; }

struct Bounds {
  float lo, step;

  // Floor code of a minimum, ceiling code of a maximum. The division rounds; a code that is not outward moves on.
  uint32_t below(float x, float levels) const {
    if (!(step > 0)) return 0;
    float c = floor_of((x - lo) / step);
    c -= lo + c * step > x;
    return static_cast<uint32_t>(clip(c, levels));
  }
  uint32_t above(float x, float levels) const {
    if (!(step > 0)) return 0;
    float c = -floor_of(-(x - lo) / step);
    c += lo + c * step < x;
    return static_cast<uint32_t>(clip(c, levels));
  }
};

static Bounds bounds_of(float low, float high, float levels, uint16_t* lo, uint16_t* step) {
  *lo = bf16_below(low);
  const double width = static_cast<double>(high) - static_cast<double>(from_bf16(*lo));
  *step = width > 0 ? bf16_above(next_up(static_cast<float>(width / levels))) : 0;
  return {from_bf16(*lo), from_bf16(*step)};
}

// One KV head of block `index` of a row, which is full.
template <typename T>
static void pack_block(T*, const PackParams& p, int64_t block, int64_t kv_head, int64_t sink) {
  const Packed& x = p.packed;
  const int64_t page_size = p.seq.page_size, head_dim = p.k_cache.dim;
  const float levels = static_cast<float>(x.levels());
  const T* keys =
      static_cast<const T*>(p.k_cache.data) + block * p.k_cache.stride_block + kv_head * p.k_cache.stride_head;
  char* out = x.data + block * x.stride_block + kv_head * x.stride_head;
  memset(out, 0, x.fine_at + x.pages * x.words * 4);
  auto* lo = reinterpret_cast<uint16_t*>(out);
  uint16_t* step = lo + x.dim;
  auto* coarse = reinterpret_cast<uint32_t*>(out + x.coarse_at);
  auto* fine = reinterpret_cast<uint32_t*>(out + x.fine_at);
  // Where a page's word is among those of its level.
  auto at = [&](int64_t page, int64_t lanes, int64_t word) {
    return (page / lanes * x.words + word) * lanes + page % lanes;
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
    Bounds bounds[W];
    for (int64_t i = 0; i < n; i++)
      bounds[i] = sink < x.pages ? bounds_of(least[i], most[i], levels, lo + d + i, step + d + i) : Bounds{0, 0};
    for (int64_t group = sink / x.group_pages; group < x.groups; group++) {
      uint32_t down[W], up[W] = {};
      for (int64_t i = 0; i < W; i++) down[i] = static_cast<uint32_t>(levels);
      const int64_t first = group * x.group_pages, end = first + x.group_pages;
      for (int64_t page = first > sink ? first : sink; page < end; page++) {
        range(page, low, high);
        for (int64_t i = 0; i < n; i++) {
          const int64_t word = (d + i) % x.words, shift = (d + i) / x.words * x.bits;
          const uint32_t b = bounds[i].below(low[i], levels), a = bounds[i].above(high[i], levels);
          fine[at(page, x.group_pages, word)] |= a << shift | b << (16 + shift);
          down[i] = b < down[i] ? b : down[i];
          up[i] = a > up[i] ? a : up[i];
        }
      }
      for (int64_t i = 0; x.coarse && i < n; i++) {
        const int64_t word = (d + i) % x.words, shift = (d + i) / x.words * x.bits;
        coarse[at(group, x.coarse_lanes, word)] |= up[i] << shift | down[i] << (16 + shift);
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
