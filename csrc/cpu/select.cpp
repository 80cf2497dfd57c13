// select: forced pages and the best others under the budget, ascending. Exact and linear in the pages.
#include "cpu/tables.h"

namespace quest::cpu::QUEST_ISA {

typedef int32_t IVec __attribute__((vector_size(4 * W)));

// Order-preserving integers: NaN below -inf, both zeros equal.
QUEST_INLINE IVec rank(Vec scores) {
  const IVec bits = (IVec)(scores + 0.0f);
  const IVec order = bits ^ ((bits >> 31) & 0x7fffffff);
  return scores == scores ? order : (IVec{} + INT32_MIN);
}
QUEST_INLINE int32_t rank(float score) { return rank(splat(score))[0]; }

// How many of n scores rank at least `least`.
static int64_t reached(const float* scores, int64_t n, int32_t least) {
  IVec counts{};
  int64_t i = 0;
  for (; i + W <= n; i += W) counts -= rank(load(scores + i)) >= least;
  int64_t total = 0;
  for (int lane = 0; lane < W; lane++) total += counts[lane];
  for (; i < n; i++) total += rank(scores[i]) >= least;
  return total;
}

// The rank from which on the k best of n > k > 0 scores are, found bit by bit: the largest that k scores reach.
static int32_t kth_best(const float* scores, int64_t n, int64_t k) {
  uint32_t found = 0;  // offset binary
  for (int bit = 31; bit >= 0; bit--) {
    const uint32_t more = found | 1u << bit;
    const int64_t reach = reached(scores, n, static_cast<int32_t>(more ^ 0x80000000u));
    if (reach >= k) found = more;
    if (reach == k) break;  // exactly those
  }
  return static_cast<int32_t>(found ^ 0x80000000u);
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
        const int32_t least = kth_best(scores, candidates, room);
        int64_t ties = room;  // of the least rank, so many fit: the first ones
        if (least < INT32_MAX) ties -= reached(scores, candidates, least + 1);
        int32_t ranks[W];
        for (int64_t i = 0; i < candidates; i++) {
          if (i % W == 0) {
            const IVec r = rank(candidates - i < W ? load_n(scores + i, candidates - i) : load(scores + i));
            memcpy(ranks, &r, sizeof r);
          }
          const int32_t r = ranks[i % W];
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
