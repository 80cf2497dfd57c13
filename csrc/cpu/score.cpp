// score: query x summaries, and the group rule that makes one score of a group's.
#include "cpu/agree.h"
#include "cpu/tables.h"
#include "cpu/tiles.h"

namespace quest::cpu::QUEST_ISA {

// With a = (q + slack |q|)/2, b = (q - slack |q|)/2 the score is a . page_max + b . page_min, two inner products with
// rows of the summary. `weigh` makes the a and b of one token's query heads.
void weigh(const ScoreParams& p, int64_t token) {
  const int64_t b = token / p.seq.q_len, t = token % p.seq.q_len, size = p.num_heads * p.weight_dim;
  float *above = p.weights + token * 2 * size, *below = above + size;
  by_dtype(p.page_max.dtype, [&](auto* type) {
    for (int64_t h = 0; h < p.num_heads; h++)
      load_query(type, p.query, b, t, h, above + h * p.weight_dim, p.weight_dim);
  });
  for (int64_t i = 0; i < size; i++) {
    const float q = above[i], s = p.slack * (q < 0 ? -q : q);
    above[i] = (q + s) / 2;
    below[i] = (q - s) / 2;
  }
}

constexpr int kStripe = 12;  // pages

// The pages of a task that its token sees and that have a summary.
struct Visible {
  int64_t b, first_head, heads, first, last;
  Visible(const ScoreParams& p, const ScoreTask& task) {
    const Sequences& seq = p.seq;
    b = task.token / seq.q_len;
    first_head = task.band * kBandHeads;
    heads = p.num_kv_heads - first_head < kBandHeads ? p.num_kv_heads - first_head : kBandHeads;
    const Span span = seq.span(b, task.token % seq.q_len);
    first = task.begin > span.first_page ? task.begin : span.first_page;
    last = task.end < span.scored_end ? task.end : span.scored_end;
    if (last < first || seq.num_blocks == 0) last = first;
  }
};

// Pages that are scored together, for all KV heads of a band: their rows lie side by side in a block, and are asked for
// in that order.
template <typename T>
class Stripe {
 public:
  int n = 0;            // pages
  bool absent = false;  // some have no block

  void find(const ScoreParams& p, const Visible& v, int64_t page) {
    const Sequences& seq = p.seq;
    const int64_t pages_per_block = seq.block_size / seq.page_size;
    n = v.last - page < kStripe ? static_cast<int>(v.last - page) : kStripe;
    absent = false;
    for (int begin = 0, end; begin < n; begin = end) {
      int64_t block = seq.block(v.b, (page + begin) / pages_per_block);
      absent |= block < 0;
      block = block < 0 ? 0 : block;
      const int64_t row = (page + begin) % pages_per_block;
      end = n - begin < pages_per_block - row ? n : static_cast<int>(begin + pages_per_block - row);
      auto at = [&](const Pool& pool) {
        return static_cast<T*>(pool.data) + block * pool.stride_block + v.first_head * pool.stride_head +
               row * pool.stride_row;
      };
      const T *low = at(p.page_min), *high = at(p.page_max);
      const int64_t low_head = p.page_min.stride_head, high_head = p.page_max.stride_head, step = 2 * (end - begin);
      const T** first = rows_ + 2 * begin * v.heads;
      for (int i = begin; i < end; i++, low += p.page_min.stride_row, high += p.page_max.stride_row, first += 2) {
        low_[i] = low, high_[i] = high;
        for (int64_t h = 0; h < v.heads; h++) {
          first[h * step] = low + h * low_head;
          first[h * step + 1] = high + h * high_head;
        }
      }
    }
    num_rows_ = 2 * n * v.heads;
    for (int i = 0; i < Ahead<T>::kMost; i++) rows_[num_rows_ + i] = static_cast<T*>(p.page_max.data);
  }
  // The rows of one KV head of the band.
  void rows(const ScoreParams& p, int64_t head, const T** high, const T** low) const {
    for (int i = 0; i < n; i++) high[i] = high_[i] + head * p.page_max.stride_head;
    for (int i = 0; i < n; i++) low[i] = low_[i] + head * p.page_min.stride_head;
  }
  // Part `part` of `of` of all rows.
  Ahead<T> ahead(int64_t part, int64_t of) const {
    const int64_t begin = num_rows_ * part / of, end = num_rows_ * (part + 1) / of;
    return Ahead<T>(rows_ + begin, static_cast<int>(end - begin));
  }

 private:
  const T *high_[kStripe], *low_[kStripe];
  const T* rows_[2 * kStripe * kBandHeads + Ahead<T>::kMost];
  int64_t num_rows_ = 0;
};

template <typename T>
static void touch(T*, const ScoreParams& p, const Visible& v, int64_t page) {
  const int64_t pages_per_block = p.seq.block_size / p.seq.page_size;
  Touch touch;
  for (const int64_t end = page + Touch::kPages < v.last ? page + Touch::kPages : v.last; page < end; page++) {
    const int64_t block = p.seq.block(v.b, page / pages_per_block), row = page % pages_per_block;
    if (block < 0) continue;
    auto add = [&](const Pool& pool) {
      const T* x = static_cast<T*>(pool.data) + block * pool.stride_block + v.first_head * pool.stride_head +
                   row * pool.stride_row;
      touch.add(x, x + (v.heads - 1) * pool.stride_head);
    };
    add(p.page_max);
    add(p.page_min);
  }
  touch.ask();
}

template <typename T>
static void score_pages(T* type, const ScoreParams& p, int64_t token, const Visible& v, const Visible& then) {
  const Sequences& seq = p.seq;
  const int64_t group = p.num_heads / p.num_kv_heads, pages_per_block = seq.block_size / seq.page_size;
  Stripe<T> stripes[2];  // the one being scored and the next
  stripes[0].find(p, v, v.first);
  int64_t touched = v.first;
  for (int64_t page = v.first, turn = 0; page < v.last; page += kStripe, turn ^= 1) {
    if (page + kStripe >= touched) touch(type, p, v, touched), touched += Touch::kPages;
    const Stripe<T>& now = stripes[turn];
    Stripe<T>& next = stripes[turn ^ 1];
    if (page + kStripe < v.last)
      next.find(p, v, page + kStripe);
    else
      next.find(p, then, then.first);
    for (int64_t h = 0; h < v.heads; h++) {
      const int64_t head = (v.first_head + h) * group;
      const float* above = p.weights + (token * 2 * p.num_heads + head) * p.weight_dim;
      float* to = p.raw + (token * p.num_heads + head) * seq.max_pages + page;
      const T *high[kStripe], *low[kStripe];
      now.rows(p, h, high, low);
      dot(Factors<float, T, 2>{{above, above + p.num_heads * p.weight_dim}, {high, low}}, group, now.n, p.weight_dim,
          p.query.dim, to, seq.max_pages, next.ahead(h, v.heads));
      if (!now.absent) continue;
      for (int i = 0; i < now.n; i++)
        if (seq.block(v.b, (page + i) / pages_per_block) < 0)
          for (int64_t g = 0; g < group; g++) to[g * seq.max_pages + i] = -kInf;
    }
  }
}

static void no_score(float* to, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i++) to[i] = -kInf;
}

void score(const ScoreParams& p, const ScoreTask& task, const ScoreTask& next) {
  const Visible v(p, task), then(p, next);
  const int64_t group = p.num_heads / p.num_kv_heads;
  for (int64_t h = 0; h < v.heads * group; h++) {
    float* to = p.raw + (task.token * p.num_heads + v.first_head * group + h) * p.seq.max_pages;
    no_score(to, task.begin, v.first < task.end ? v.first : task.end);
    no_score(to, v.last, task.end);
  }
  by_dtype(p.page_max.dtype, [&](auto* type) { score_pages(type, p, task.token, v, then); });
}

void agree(const ScoreParams& p, int64_t unit) {
  const Sequences& seq = p.seq;
  const int64_t kv_head = unit % p.num_kv_heads, t = unit / p.num_kv_heads % seq.q_len;
  const int64_t b = unit / p.num_kv_heads / seq.q_len, group = p.num_heads / p.num_kv_heads;
  const Span span = seq.span(b, t);
  const int64_t begin = span.first_page, end = span.pos < 0 ? begin : span.scored_end;
  float* to = p.scores + unit * seq.max_pages;
  no_score(to, 0, begin);
  no_score(to, end, seq.max_pages);
  float* raw = p.raw + ((b * seq.q_len + t) * p.num_heads + kv_head * group) * seq.max_pages;
  agree_heads(raw, seq.max_pages, group, begin, end, p.rule == GroupRule::softmax, p.softmax_scale, to);
}

}  // namespace quest::cpu::QUEST_ISA
