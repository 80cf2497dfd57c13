#include "run.h"

#include <algorithm>
#include <vector>

#include "arguments.h"
#include "cpu/kernels.h"
#include "step.h"

namespace quest {

using cpu::kernels;

constexpr int64_t kPagesPerChunk = 24;    // scored by one task, at least
constexpr int64_t kTokensPerSplit = 256;  // at least, where the pages of a unit are split

void run(const AppendParams& p) {
  constexpr int64_t grain = 64;  // tokens
  run_tasks(ceil_div(p.num_tokens, grain), p.num_tokens * p.num_kv_heads * (p.key.dim + p.value.dim),
            [&](int64_t i) { kernels().append(p, i * grain, std::min((i + 1) * grain, p.num_tokens)); });
}

void run(const SummariseParams& p) {
  constexpr int64_t grain = 64;  // pages
  const Sequences& seq = p.seq;
  auto end_page = [&](int64_t b) { return ceil_div(seq.length(b), seq.page_size); };
  auto first_page = [&](int64_t b) {
    if (p.num_new[b] <= 0) return end_page(b);
    return std::max<int64_t>(0, seq.length(b) - p.num_new[b]) / seq.page_size;
  };
  int64_t most = 0;
  for (int64_t b = 0; b < seq.batch; b++) most = std::max(most, end_page(b) - first_page(b));
  const int64_t chunks = ceil_div(most, grain), heads = seq.batch * p.num_kv_heads;
  run_tasks(heads * chunks, heads * most * seq.page_size * p.k_cache.dim, [&](int64_t i) {
    const int64_t b = i / chunks / p.num_kv_heads, begin = first_page(b) + i % chunks * grain;
    const int64_t end = std::min(begin + grain, end_page(b));
    kernels().summarise(p, b, i / chunks % p.num_kv_heads, begin, end);
  });
}

// The tasks of `score`: each token's pages in chunks, large ones first and small ones last, so that there are few and
// yet all threads finish together. A thread takes its next task before it works on one, which asks for its memory; so
// the first ones, of which every thread takes two, are much smaller than its share.
class ScoreTasks {
 public:
  explicit ScoreTasks(const ScoreParams& p)
      : p_(p), tokens_(p.seq.batch * p.seq.q_len), bands_(ceil_div(p.num_kv_heads, kBandHeads)) {
    const int64_t threads = torch::stable::get_num_threads(), pages = p.seq.max_pages;
    const int64_t share = threads > 1 && tokens_ > 0 ? ceil_div(4 * threads, tokens_ * bands_) + 1 : 1;
    for (int64_t page = 0; page < pages || ends_.empty(); ends_.push_back(page))
      page = std::min(pages, page + std::max(kPagesPerChunk, ceil_div(pages - page, share)));
  }
  int64_t of_token() const { return bands_ * static_cast<int64_t>(ends_.size()); }
  // Work until no task is left; call done(token) after each, and leave out those of tokens that need no scores.
  template <typename Needed, typename Done>
  void work(const Needed& needed, const Done& done) {
    ScoreTask now, next;
    bool more = take(now, needed, done);
    for (; more; now = next) {
      more = take(next, needed, done);
      kernels().score(p_, now, next);
      done(now.token);
    }
  }

 private:
  template <typename Needed, typename Done>
  bool take(ScoreTask& task, const Needed& needed, const Done& done) {
    const int64_t tokens = std::max<int64_t>(1, tokens_), size = tokens_ * of_token();
    for (;;) {
      const int64_t i = next_.fetch_add(1, std::memory_order_relaxed), chunk = i / bands_ / tokens;
      task = {0, 0, 0, 0};
      if (i >= size) return false;
      const int64_t token = i / bands_ % tokens;
      if (needed(token)) {
        task = {token, i % bands_, chunk ? ends_[chunk - 1] : 0, ends_[chunk]};
        return true;
      }
      done(token);
    }
  }

  const ScoreParams& p_;
  const int64_t tokens_, bands_;
  std::vector<int64_t> ends_;  // of the chunks
  std::atomic<int64_t> next_{0};
};

static void weigh(const ScoreParams& p) {
  const int64_t tokens = p.seq.batch * p.seq.q_len;
  run_tasks(tokens, tokens * p.num_heads * p.weight_dim, [&](int64_t i) { kernels().weigh(p, i); });
}

void run(const ScoreParams& p) {
  ScoreTasks tasks(p);
  const int64_t units = p.seq.batch * p.seq.q_len * p.num_kv_heads;
  const int64_t scores = p.seq.batch * p.seq.q_len * p.num_heads * p.seq.max_pages;
  weigh(p);
  run_tasks(torch::stable::get_num_threads(), scores * p.query.dim,
            [&](int64_t) { tasks.work([](int64_t) { return true; }, [](int64_t) {}); });
  if (p.rule == GroupRule::per_head) return;
  run_tasks(units, scores, [&](int64_t i) { kernels().agree(p, i); });
}

void run(const SelectParams& p) {
  const int64_t units = p.seq.batch * p.seq.q_len * p.sel_heads;
  run_tasks(units, units * p.seq.max_pages * 4, [&](int64_t i) { kernels().select(p, i); });
}

// The most tokens that a unit attends to.
static int64_t most_tokens(const AttendParams& p) {
  int64_t longest = 0;
  for (int64_t b = 0; b < p.seq.batch; b++) longest = std::max(longest, p.seq.length(b));
  return p.every_page ? longest : std::min(longest, p.max_selected * p.seq.page_size);
}

Tensor split(AttendParams& p) {
  const int64_t units = p.units(), threads = torch::stable::get_num_threads();
  const int64_t wanted = threads > 1 && units > 0 ? ceil_div(4 * threads, units) : 1;
  p.num_splits = std::max<int64_t>(1, std::min(wanted, most_tokens(p) / kTokensPerSplit));
  Tensor partial;
  if (p.num_splits > 1) {
    partial = new_tensor({units, p.num_splits, p.tile_heads, p.v_cache.dim + 2}, ScalarType::Float);
    p.partial = static_cast<float*>(data_of(partial));
  }
  return partial;
}

std::tuple<Tensor, Tensor> run(AttendParams& p, ScalarType out_dtype) {
  auto result = allocate(p, out_dtype);
  const Tensor partial = split(p);
  const int64_t units = p.units(), rows = units * p.tile_heads * (p.k_cache.dim + p.v_cache.dim);
  run_tasks(units * p.num_splits, rows * most_tokens(p),
            [&](int64_t i) { kernels().attend(p, i / p.num_splits, i % p.num_splits); });
  if (p.num_splits > 1) run_tasks(units, rows * p.num_splits, [&](int64_t i) { kernels().combine(p, i); });
  return result;
}

std::tuple<Tensor, Tensor> run(const ScoreParams& scored, const SelectParams& selected, AttendParams& attended,
                               ScalarType out_dtype) {
  const Sequences& seq = scored.seq;
  ScoreTasks scores(scored);
  const int64_t tokens = seq.batch * seq.q_len, workers = torch::stable::get_num_threads();
  Countdown to_score(tokens, scores.of_token());
  Flags ready(tokens);

  // A token needs no scores if it sees nothing, or reads everything.
  auto needed = [&](int64_t token) {
    const Span span = seq.span(token / seq.q_len, token % seq.q_len);
    return span.pos >= 0 && !selected.reads_all(span);
  };
  auto done = [&](int64_t token) {
    if (to_score.last(token)) ready.set(token);
  };
  weigh(scored);
  return run_step(
      workers, [&](int64_t) { scores.work(needed, done); },
      [&](int64_t unit) {
        const int64_t token = unit / scored.num_kv_heads;
        ready.wait(token);
        if (needed(token) && scored.rule != GroupRule::per_head) kernels().agree(scored, unit);
      },
      2 * seq.max_pages, selected, attended, out_dtype);
}

void run(const MergeParams& p, int64_t rows) {
  constexpr int64_t grain = 64;
  run_tasks(ceil_div(rows, grain), rows * p.dim,
            [&](int64_t i) { kernels().merge(p, i * grain, std::min((i + 1) * grain, rows)); });
}

}  // namespace quest
