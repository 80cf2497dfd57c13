// select: forced pages and the best others under the budget, ascending. Exact and linear in the pages.
#include "cpu/best.h"
#include "cpu/tables.h"

namespace quest::cpu::QUEST_ISA {

// Where a unit's scores are: of every page, or of its candidates, which are pages of the groups it keeps and then those
// after them.
class Scored {
 public:
  Scored(const SelectParams& p, int64_t unit, const Span& span) : packed_(p.packed), span_(span) {
    if (!packed_) {
      scores_ = p.scores + unit * p.seq.max_pages;
      return;
    }
    unit_ = unit / (p.sel_heads / packed_->num_kv_heads);  // the unit of (batch, token, kv head)
    scores_ = p.scores + unit * packed_->max_candidates;
    n_ = packed_->candidates(span, unit_ / packed_->num_kv_heads / p.seq.q_len, unit_);
  }
  const float* at(int64_t place) const { return scores_ + place; }
  int64_t page(int64_t place) const { return packed_ ? packed_->page_of(span_, unit_, place) : place; }
  // The first place whose page is at or after `page`.
  int64_t place(int64_t page) const {
    if (!packed_) return page;
    int64_t low = 0, high = n_;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (this->page(middle) < page)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }

 private:
  const PackedScoreParams* packed_;
  const Span& span_;
  const float* scores_;
  int64_t unit_ = 0, n_ = 0;
};

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
        const Scored scored(p, unit, span);
        const int64_t first = scored.place(begin), n = scored.place(end) - first;
        if (room >= n)
          for (int64_t i = 0; i < n; i++) take(scored.page(first + i), scored.page(first + i) + 1);
        else
          take_best(scored.at(first), n, room, [&](int64_t i) {
            const int64_t page = scored.page(first + i);
            take(page, page + 1);
          });
      }
      take(end, span.end_page);
    }
  }
  p.counts[unit] = static_cast<int32_t>(count);
  for (int64_t i = count; i < p.max_selected; i++) to[i] = -1;
}

}  // namespace quest::cpu::QUEST_ISA
