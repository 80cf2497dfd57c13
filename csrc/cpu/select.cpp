// select: forced pages and the best others under the budget, ascending. Exact and linear in the pages.
#include "cpu/tables.h"

namespace quest::cpu::QUEST_ISA {

// Order-preserving bits: NaN below -inf, both zeros equal.
QUEST_INLINE uint32_t rank(float score) {
  if (score != score) return 0;
  const uint32_t u = float_to_bits(score + 0.0f);
  return u >> 31 ? ~u : u | 0x80000000u;
}

// The rank of the k-th best of n > k > 0 scores, and how many of that very rank are among the k best. Radix select:
// each round counts the next 8 bits of those that share the bits found so far.
static uint32_t kth_best(const float* scores, int64_t n, int64_t k, int64_t* ties) {
  uint32_t found = 0, mask = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    int64_t count[256] = {};
    for (int64_t i = 0; i < n; i++) {
      const uint32_t r = rank(scores[i]);
      if ((r & mask) == found) count[r >> shift & 255]++;
    }
    int digit = 255;
    while (count[digit] < k) k -= count[digit--];
    found |= static_cast<uint32_t>(digit) << shift;
    mask |= 255u << shift;
  }
  *ties = k;
  return found;
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
        int64_t ties;
        const uint32_t least = kth_best(scores, candidates, room, &ties);
        for (int64_t i = 0; i < candidates; i++) {
          const uint32_t r = rank(scores[i]);
          if (r > least || (r == least && ties-- > 0)) take(begin + i, begin + i + 1);
        }
      }
      take(end, span.end_page);
    }
  }
  p.counts[unit] = static_cast<int32_t>(count);
  for (int64_t i = count; i < p.max_selected; i++) to[i] = -1;
}

}  // namespace quest::cpu::QUEST_ISA
