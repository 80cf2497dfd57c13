// score: query x summaries, and the group rule that makes one score of a group's.
#include "cpu/tables.h"
#include "cpu/tiles.h"

namespace quest::cpu::QUEST_ISA {

// A tile of pages of one row and KV head: where their summaries are.
template <typename T>
struct Pages {
  const T *low[kTileRows], *high[kTileRows];
  int n;
  bool absent;  // some have no block

  void find(const ScoreParams& p, int64_t b, int64_t kv_head, int64_t page, int64_t last) {
    const Sequences& seq = p.seq;
    const int64_t pages_per_block = seq.block_size / seq.page_size;
    n = last - page < kTileRows ? static_cast<int>(last - page) : kTileRows;
    absent = false;
    for (int i = 0; i < n; i++) {
      int64_t block = seq.block(b, (page + i) / pages_per_block);
      absent |= block < 0;
      block = block < 0 ? 0 : block;
      const int64_t r = (page + i) % pages_per_block;
      low[i] = static_cast<T*>(p.page_min.data) + block * p.page_min.stride_block + kv_head * p.page_min.stride_head +
               r * p.page_min.stride_row;
      high[i] = static_cast<T*>(p.page_max.data) + block * p.page_max.stride_block + kv_head * p.page_max.stride_head +
                r * p.page_max.stride_row;
      prefetch(low[i], p.page_min.dim);
      prefetch(high[i], p.page_max.dim);
    }
  }
};

// above . page_max + below . page_min for the query heads of one tile and pages [first, last) of row b.
template <typename T>
static void score_pages(T*, const ScoreParams& p, int64_t b, int64_t kv_head, const float* above, const float* below,
                        int64_t ldq, int64_t heads, int64_t first, int64_t last, float* raw) {
  const Sequences& seq = p.seq;
  const int64_t pages_per_block = seq.block_size / seq.page_size;
  Pages<T> tiles[2];  // the one being scored and the next
  tiles[0].find(p, b, kv_head, first, last);
  for (int64_t page = first, turn = 0; page < last; page += kTileRows, turn ^= 1) {
    const Pages<T>& now = tiles[turn];
    if (page + kTileRows < last) tiles[turn ^ 1].find(p, b, kv_head, page + kTileRows, last);
    float* to = raw + page;
    dot(Factors<T, 2>{{above, below}, {now.high, now.low}}, heads, now.n, ldq, p.query.dim, to, seq.max_pages);
    if (!now.absent) continue;
    for (int i = 0; i < now.n; i++)
      if (seq.block(b, (page + i) / pages_per_block) < 0)
        for (int64_t h = 0; h < heads; h++) to[h * seq.max_pages + i] = -kInf;
  }
}

// Scores of pages [begin, end) for the query heads of one KV head. With a = (q + slack |q|)/2, b = (q - slack |q|)/2
// the score is a . page_max + b . page_min, two inner products with rows of the summary.
void score(const ScoreParams& p, int64_t unit, int64_t begin, int64_t end) {
  const Sequences& seq = p.seq;
  const int64_t kv_head = unit % p.num_kv_heads, t = unit / p.num_kv_heads % seq.q_len;
  const int64_t b = unit / p.num_kv_heads / seq.q_len, group = p.num_heads / p.num_kv_heads;
  const int64_t ldq = round_up(p.query.dim, W);
  float* raw = p.raw + ((b * seq.q_len + t) * p.num_heads + kv_head * group) * seq.max_pages;

  const Span span = seq.span(b, t);
  const int64_t first = begin > span.first_page ? begin : span.first_page;
  const int64_t last = seq.num_blocks == 0 ? first : end < span.scored_end ? end : span.scored_end;
  for (int64_t h = 0; h < group; h++) {
    float* to = raw + h * seq.max_pages;
    for (int64_t i = begin; i < end; i++)
      if (i < first || i >= last) to[i] = -kInf;
  }
  if (first >= last) return;

  alignas(64) float above[kTileHeads * kMaxHeadDim], below[kTileHeads * kMaxHeadDim];
  for (int64_t head = 0; head < group; head += kTileHeads) {
    const int64_t heads = group - head < kTileHeads ? group - head : kTileHeads;
    load_query(p.query, b, t, kv_head * group + head, heads, above, ldq);
    for (int64_t i = 0; i < heads * ldq; i++) {
      const float q = above[i], s = p.slack * (q < 0 ? -q : q);
      above[i] = (q + s) / 2;
      below[i] = (q - s) / 2;
    }
    by_dtype(p.page_max.dtype, [&](auto* type) {
      score_pages(type, p, b, kv_head, above, below, ldq, heads, first, last, raw + head * seq.max_pages);
    });
  }
}

// Softmax rule: mean over heads of exp(scale (s - best)) / sum. Relative rule: max over heads of s - best. Equal
// infinities have a gap of 0; NaN takes no part in a head's best or sum and makes the page's score NaN.
void agree(const ScoreParams& p, int64_t unit) {
  const Sequences& seq = p.seq;
  const int64_t kv_head = unit % p.num_kv_heads, t = unit / p.num_kv_heads % seq.q_len;
  const int64_t b = unit / p.num_kv_heads / seq.q_len, group = p.num_heads / p.num_kv_heads;
  const Span span = seq.span(b, t);
  const int64_t begin = span.first_page, end = span.pos < 0 ? 0 : span.scored_end;
  const float* raw = p.raw + ((b * seq.q_len + t) * p.num_heads + kv_head * group) * seq.max_pages;
  float* to = p.scores + unit * seq.max_pages;
  const bool softmax = p.rule == GroupRule::softmax;

  for (int64_t i = 0; i < seq.max_pages; i++) to[i] = i >= begin && i < end && softmax ? 0.0f : -kInf;
  for (int64_t h = 0; h < group; h++) {
    const float* s = raw + h * seq.max_pages;
    float best = -kInf;
    for (int64_t i = begin; i < end; i++) best = max_known(best, s[i]);
    auto gap = [&](Vec x) { return x == best ? Vec{} : x - best; };
    // The last, partial vector is padded with NaN, which no sum counts.
    auto pages = [&](int64_t i) {
      if (end - i >= W) return load(s + i);
      Vec x = splat(__builtin_nanf(""));
      for (int64_t j = 0; j < end - i; j++) x[j] = s[i + j];
      return x;
    };
    auto put = [&](int64_t i, Vec v) {
      if (end - i >= W) return store(to + i, v);
      for (int64_t j = 0; j < end - i; j++) to[i + j] = v[j];
    };
    auto have = [&](int64_t i) {
      if (end - i >= W) return load(to + i);
      Vec x{};
      for (int64_t j = 0; j < end - i; j++) x[j] = to[i + j];
      return x;
    };
    if (softmax) {
      Vec total{};
      for (int64_t i = begin; i < end; i += W) {
        const Vec e = exp(gap(pages(i)) * p.softmax_scale);
        total += e == e ? e : Vec{};
      }
      const float all = sum(total), weight = 1.0f / (group * (all > 1e-38f ? all : 1e-38f));
      for (int64_t i = begin; i < end; i += W) put(i, have(i) + exp(gap(pages(i)) * p.softmax_scale) * weight);
    } else {
      for (int64_t i = begin; i < end; i += W) {
        const Vec g = gap(pages(i)), m = have(i);
        put(i, ((g > m) | (g != g)) ? g : m);
      }
    }
  }
}

}  // namespace quest::cpu::QUEST_ISA
