// select: forced pages and the best others under the budget, ascending. Exact and linear in the pages.
#include "cpu/tables.h"

namespace quest::cpu::QUEST_ISA {

// How many of n scores a comparison holds for.
template <typename F>
static int64_t count_where(const float* scores, int64_t n, const F& held) {
  IVec counts{};
  int64_t i = 0;
  for (; i + W <= n; i += W) counts -= held(load(scores + i));
  int64_t total = 0;
  for (int lane = 0; lane < W; lane++) total += counts[lane];
  if (i < n) total += __builtin_popcount(bits_of(held(load_n(scores + i, n - i))) & ((1u << (n - i)) - 1));
  return total;
}

// The place of a float among all floats as an integer in offset binary, and back.
static float float_at(uint32_t place) { return bits_to_float(place & 0x80000000u ? place & 0x7fffffffu : ~place); }

// The score from which on the k > 0 best are, found bit by bit: the largest that k of n scores reach. At least k are
// known, that is not NaN.
static float kth_best(const float* scores, int64_t n, int64_t k) {
  constexpr uint32_t lowest = 0x007fffff, highest = 0xff800000;  // the places of -inf and of inf
  uint32_t found = 0;
  for (int bit = 31; bit >= 0; bit--) {
    const uint32_t more = found | 1u << bit;
    if (more > highest) continue;
    const float least = float_at(more);
    const int64_t reach = more <= lowest ? k : count_where(scores, n, [&](Vec x) { return x >= least; });
    if (reach >= k) found = more;
    if (reach == k && more > lowest) break;  // exactly those
  }
  return float_at(found);
}

void select(const SelectParams& p, int64_t unit) {
  const Sequences& seq = p.seq;
  const int64_t t = unit / p.sel_heads % seq.q_len, b = unit / p.sel_heads / seq.q_len;
  int32_t* to = p.page_idx + unit * p.max_selected;
  int64_t count = 0;
  auto take = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end && count < p.max_selected; i++) to[count++] = static_cast<int32_t>(i);
  };

  const Span span = seq.span(b, t);
  if (span.pos >= 0) {
    // Forced pages are a head and a tail of the visible ones: candidates are [begin, end).
    int64_t begin = p.sink_pages < span.first_page ? span.first_page : p.sink_pages;
    int64_t end = span.end_page - p.recent_pages;
    if (seq.q_len > 1) {
      const int64_t first_new = seq.length(b) > seq.q_len ? (seq.length(b) - seq.q_len) / seq.page_size : 0;
      end = first_new < end ? first_new : end;
    }
    begin = begin < span.end_page ? begin : span.end_page;
    end = end > begin ? end : begin;
    const int64_t forced = begin - span.first_page + span.end_page - end, candidates = end - begin;
    int64_t room = p.budget_tokens(span) / seq.page_size;
    room = room < p.max_selected ? room - forced : p.max_selected - forced;
    if (p.reads_all(span) || room >= candidates) {
      take(span.first_page, span.end_page);
    } else {
      take(span.first_page, begin);
      if (room > 0) {
        const float* scores = p.scores + unit * seq.max_pages + begin;
        const int64_t known = count_where(scores, candidates, [](Vec x) { return x == x; });
        const bool all_known = known <= room;  // then NaN, which ranks below -inf, fills the rest
        const float least = all_known ? -kInf : kth_best(scores, candidates, room);
        auto sure = [&](Vec x) { return all_known ? x == x : x > least; };
        auto tied = [&](Vec x) { return all_known ? x != x : x == least; };
        int64_t ties = room - count_where(scores, candidates, sure);  // so many fit, the first ones
        for (int64_t i = 0; i < candidates; i += W) {
          const int64_t n = candidates - i < W ? candidates - i : W;
          const Vec x = n < W ? load_n(scores + i, n) : load(scores + i);
          const uint32_t valid = n < W ? (1u << n) - 1 : ~0u, takes = bits_of(sure(x)) & valid;
          for (uint32_t left = takes | (bits_of(tied(x)) & valid); left; left &= left - 1) {
            const int lane = __builtin_ctz(left);
            if (takes >> lane & 1 || ties-- > 0) take(begin + i + lane, begin + i + lane + 1);
          }
        }
      }
      take(end, span.end_page);
    }
  }
  p.counts[unit] = static_cast<int32_t>(count);
  for (int64_t i = count; i < p.max_selected; i++) to[i] = -1;
}

}  // namespace quest::cpu::QUEST_ISA
