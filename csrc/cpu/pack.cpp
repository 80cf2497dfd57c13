// pack: the summary of a block as codes, the cells that hold its pages' minima and maxima. quest/packing.py has
// the layout, quest/reference_packed.py the rule.
#include "cpu/tables.h"

namespace quest::cpu::QUEST_ISA {

constexpr float kMaxKey = 1e38f;

template <typename T>
struct Pointee;
template <typename T>
struct Pointee<T*> {
  using type = T;
};

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

// Vectors of codes, and of as many bytes.
typedef uint8_t BVec __attribute__((vector_size(W)));

QUEST_INLINE IVec floor_to_int(Vec x) {
  const IVec n = __builtin_convertvector(x, IVec);
  return n + (IVec)(__builtin_convertvector(n, Vec) > x);
}
QUEST_INLINE IVec least(IVec a, IVec b) { return a < b ? a : b; }
QUEST_INLINE IVec most(IVec a, IVec b) { return a > b ? a : b; }

// The cells of W channels.
struct Cells {
  Vec lo, step;
  IVec last;

  // The cell of a minimum, whose lower edge is not above it, of a maximum, whose upper edge is not below it, and of a
  // key that is both. The division rounds: a cell that doesn't hold its key moves.
  IVec lower(Vec x) const { return clip(below(x)); }
  IVec upper(Vec x) const { return clip(above(ceil_to_int(place(x)) - 1, x)); }
  IVec only(Vec x) const { return clip(above(below(x), x)); }

 private:
  Vec place(Vec x) const {
    const Vec at = (x - lo) / step, some = at > -2.0f ? at : splat(-2.0f);  // also where it is NaN
    return some < 1024.0f ? some : splat(1024.0f);
  }
  Vec edge(IVec c) const { return lo + __builtin_convertvector(c, Vec) * step; }
  IVec below(Vec x) const {
    const IVec c = floor_to_int(place(x));
    return c + (IVec)(edge(c) > x);
  }
  IVec above(IVec c, Vec x) const { return c - (IVec)(edge(c + 1) < x); }
  IVec clip(IVec c) const { return most(least(c, last), IVec{}) & (IVec)(step > 0.0f); }
};

static void cells_of(float low, float high, int64_t count, uint16_t* lo, uint16_t* step) {
  *lo = bf16_below(low);
  const double width = static_cast<double>(high) - static_cast<double>(from_bf16(*lo));
  *step = width > 0 ? bf16_above(next_up(static_cast<float>(width / static_cast<double>(count)))) : 0;
}

QUEST_INLINE void store_codes(uint8_t* to, IVec codes) {
  const BVec bytes = __builtin_convertvector(codes, BVec);
  memcpy(to, &bytes, sizeof bytes);
}

// One KV head of a block, of whose pages the first `count` have tokens and the first `sink` are left out.
template <typename T>
class BlockPacker {
 public:
  BlockPacker(const PackParams& p, int64_t block, int64_t kv_head, int64_t sink, int64_t count)
      : p_(p), x_(p.packed), page_size_(p.seq.page_size), stride_(p.k_cache.stride_row), sink_(sink), count_(count) {
    keys_ = static_cast<const T*>(p.k_cache.data) + block * p.k_cache.stride_block + kv_head * p.k_cache.stride_head;
    out_ = x_.data + block * x_.stride_block + kv_head * x_.stride_head;
  }

  void run() {
    memset(out_, 0, x_.fine_at + x_.pages * x_.words * 4);
    if (sink_ >= count_) return;
    for (int64_t d = 0; d < p_.k_cache.dim; d += W) find_cells(d);
    for (int64_t group = sink_ / x_.group_pages; group < count_ / x_.group_pages; group++) pack_group(group);
  }

 private:
  static constexpr int kMostPages = 64;  // of a group
  struct Codes {
    uint8_t lower[kMaxHeadDim + W], upper[kMaxHeadDim + W];
  };

  uint16_t* lo() { return reinterpret_cast<uint16_t*>(out_); }
  uint16_t* step() { return lo() + x_.dim; }

  // Minimum and maximum of a page's W channels from d on.
  void range(int64_t page, int64_t d, Vec* low, Vec* high) const {
    const int64_t n = p_.k_cache.dim - d;
    const T* row = keys_ + page * page_size_ * stride_ + d;
    *low = splat(kInf);
    *high = splat(-kInf);
    for (int64_t j = 0; j < page_size_; j++, row += stride_) {
      const Vec v = n >= W ? load(row) : load_n(row, n);
      *low = v < *low ? v : *low;
      *high = v > *high ? v : *high;
    }
    *low = *low < -kMaxKey ? splat(-kMaxKey) : *low;
    *high = *high > kMaxKey ? splat(kMaxKey) : *high;
  }

  void find_cells(int64_t d) {
    Vec low, high, lowest = splat(kInf), highest = splat(-kInf);
    for (int64_t page = sink_; page < count_; page++) {
      range(page, d, &low, &high);
      lowest = low < lowest ? low : lowest;
      highest = high > highest ? high : highest;
    }
    for (int64_t i = 0; i < W && d + i < p_.k_cache.dim; i++)
      cells_of(lowest[i], highest[i], x_.cells(), lo() + d + i, step() + d + i);
  }

  void pack_group(int64_t group) {
    Codes pages[kMostPages], coarse;
    const int64_t first = group * x_.group_pages, begin = first > sink_ ? first : sink_, end = first + x_.group_pages;
    const IVec last = static_cast<int32_t>(x_.cells() - 1) - IVec{};
    for (int64_t d = 0; d < x_.dim; d += W) {
      const Cells cells{load(reinterpret_cast<const bf16*>(lo()) + d), load(reinterpret_cast<const bf16*>(step()) + d),
                        last};
      IVec down = last, up{};
      for (int64_t page = begin; page < end; page++) {
        Vec low{}, high{};
        if (d < p_.k_cache.dim) range(page, d, &low, &high);
        const IVec upper = x_.single ? cells.only(high) : cells.upper(high),
                   lower = x_.single ? upper : cells.lower(low);
        store_codes(pages[page - first].lower + d, lower);
        store_codes(pages[page - first].upper + d, upper);
        down = least(down, lower);
        up = most(up, upper);
      }
      store_codes(coarse.lower + d, down & (IVec)(cells.step > 0.0f));
      store_codes(coarse.upper + d, up);
    }
    auto* fine = reinterpret_cast<uint32_t*>(out_ + x_.fine_at);
    for (int64_t page = begin; page < end; page++) {
      const Codes& codes = pages[page - first];
      const uint8_t* second = x_.single ? codes.upper + x_.dim / 2 : codes.lower;
      put(fine, x_.words, x_.lanes, page, codes.upper, second);
    }
    if (x_.coarse) {
      auto* words = reinterpret_cast<uint32_t*>(out_ + x_.coarse_at);
      put(words, x_.coarse_words, x_.coarse_lanes, group, coarse.upper, coarse.lower);
    }
  }

  // A page's words, from the codes of their bits 0..15 and of their bits 16..31.
  void put(uint32_t* to, int64_t words, int64_t lanes, int64_t page, const uint8_t* first,
           const uint8_t* second) const {
    uint32_t made[kMaxHeadDim / 2] = {};
    for (int j = 0; j < 16 / x_.bits; j++, first += words, second += words)
      for (int64_t w = 0; w < words; w++)
        made[w] |= static_cast<uint32_t>(first[w]) << (x_.bits * j) | static_cast<uint32_t>(second[w])
                                                                          << (16 + x_.bits * j);
    to += page / lanes * words * lanes + page % lanes;
    for (int64_t w = 0; w < words; w++) to[w * lanes] = made[w];
  }

  const PackParams& p_;
  const Packed& x_;
  const int64_t page_size_, stride_, sink_, count_;
  const T* keys_;
  char* out_;
};

void pack(const PackParams& p, int64_t row, int64_t kv_head, int64_t index) {
  const int64_t block = p.seq.block(row, index), before = index * p.packed.pages;
  if (block < 0) return;
  const int64_t groups = (p.seq.length(row) / p.seq.page_size - before) / p.packed.group_pages;
  const int64_t count = groups < p.packed.groups ? groups * p.packed.group_pages : p.packed.pages;
  const int64_t sink = p.sink_pages - before;
  by_dtype(p.k_cache.dtype, [&](auto* type) {
    using T = typename Pointee<decltype(type)>::type;
    BlockPacker<T>(p, block, kv_head, sink > 0 ? sink : 0, count).run();
  });
}

}  // namespace quest::cpu::QUEST_ISA
