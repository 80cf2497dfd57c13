#include "run.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "cpu/kernels.h"

namespace quest {

using cpu::kernels;

constexpr int64_t kPagesPerChunk = 128;     // scored by one task
constexpr int64_t kTokensPerSplit = 256;    // at least, where the pages of a unit are split
constexpr int64_t kWorthThreads = 1 << 15;  // numbers to touch; below, waking the pool costs more than it gives

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Run f(0) .. f(n - 1), which touch about `work` numbers in all, on torch's pool. A thread takes the next task as it
// finishes one, so ragged tasks balance.
template <typename F>
static void run_tasks(int64_t n, int64_t work, const F& f) {
  const int64_t threads = std::min<int64_t>(n, torch::stable::get_num_threads());
  if (threads <= 1 || work < kWorthThreads) {
    for (int64_t i = 0; i < n; i++) f(i);
    return;
  }
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; worker++)
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) f(i);
  });
}

// For each of n things, how many of its parts are still to be done.
class Countdown {
 public:
  Countdown(int64_t n, int64_t parts) : left_(n) {
    for (auto& x : left_) x.store(parts, std::memory_order_relaxed);
  }
  // Count one part of thing i as done; whether it was the last, whose caller sees what all parts have written.
  bool last(int64_t i) { return left_[i].fetch_sub(1, std::memory_order_acq_rel) == 1; }

 private:
  std::vector<std::atomic<int64_t>> left_;
};

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

// Whether a unit (batch, token, kv head) needs scores: not if it sees nothing, or reads everything.
static bool needs_scores(const ScoreParams& p, const SelectParams& selection, int64_t unit) {
  const int64_t t = unit / p.num_kv_heads;
  const Span span = p.seq.span(t / p.seq.q_len, t % p.seq.q_len);
  return span.pos >= 0 && !selection.reads_all(span);
}

void run(const ScoreParams& p) {
  const Sequences& seq = p.seq;
  const int64_t units = seq.batch * seq.q_len * p.num_kv_heads, chunks = ceil_div(seq.max_pages, kPagesPerChunk);
  const int64_t scores = seq.batch * seq.q_len * p.num_heads * seq.max_pages;
  run_tasks(units * chunks, scores * p.query.dim, [&](int64_t i) {
    const int64_t begin = i / units * kPagesPerChunk;
    kernels().score(p, i % units, begin, std::min(begin + kPagesPerChunk, seq.max_pages));
  });
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

// Allocate out and lse, and choose the heads that are attended to together.
static std::tuple<Tensor, Tensor> allocate(AttendParams& p, ScalarType out_dtype) {
  const Sequences& seq = p.seq;
  const int64_t group = p.num_heads / p.sel_heads;
  p.num_tiles = ceil_div(group, kTileHeads);
  p.tile_heads = ceil_div(group, p.num_tiles);
  p.num_splits = 1;
  p.partial = nullptr;
  Tensor out = new_tensor({seq.batch, seq.q_len, p.num_heads, p.v_cache.dim}, out_dtype);
  Tensor lse = new_tensor({seq.batch, seq.q_len, p.num_heads}, ScalarType::Float);
  p.out = rows_of(out, "attend", "out");
  p.lse = static_cast<float*>(data_of(lse));
  return {out, lse};
}

// Few units on many threads: split their pages, so that no thread waits long for the last one. Returns what holds the
// partial results.
static Tensor split(AttendParams& p) {
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

// The whole step in one parallel region. Tasks are taken in order: the scores of all units (batch, token, kv head) in
// chunks of pages, then the attention of each in splits. Whoever finishes a unit's last chunk selects its pages, and
// whoever finishes its last split combines them. Attention waits for its unit's selection, that is only ever for tasks
// which some thread has taken before: with any number of threads nobody waits forever.
std::tuple<Tensor, Tensor> run(const ScoreParams& scored, const SelectParams& selected, AttendParams& attended,
                               ScalarType out_dtype) {
  const Sequences& seq = scored.seq;
  auto result = allocate(attended, out_dtype);
  const Tensor partial = split(attended);
  const int64_t units = seq.batch * seq.q_len * scored.num_kv_heads,
                chunks = std::max<int64_t>(1, ceil_div(seq.max_pages, kPagesPerChunk));
  const int64_t selections = attended.sel_heads / scored.num_kv_heads;  // of a unit
  const int64_t attends = selections * attended.num_tiles;              // of a unit, each in num_splits tasks

  Countdown to_score(units, chunks), to_attend(units * attends, attended.num_splits);
  std::vector<std::atomic<bool>> chosen(units);

  auto score = [&](int64_t unit, int64_t chunk) {
    const bool needed = needs_scores(scored, selected, unit);
    const int64_t begin = chunk * kPagesPerChunk;
    if (needed) kernels().score(scored, unit, begin, std::min(begin + kPagesPerChunk, seq.max_pages));
    if (!to_score.last(unit)) return;
    if (needed && scored.rule != GroupRule::per_head) kernels().agree(scored, unit);
    for (int64_t s = unit * selections; s < (unit + 1) * selections; s++) kernels().select(selected, s);
    chosen[unit].store(true, std::memory_order_release);
  };
  auto attend = [&](int64_t unit, int64_t part) {
    for (int spins = 0; !chosen[unit].load(std::memory_order_acquire); spins++)
      if (spins > 1000) std::this_thread::yield();
    const int64_t which = unit * attends + part / attended.num_splits;
    kernels().attend(attended, which, part % attended.num_splits);
    if (attended.num_splits > 1 && to_attend.last(which)) kernels().combine(attended, which);
  };

  const int64_t scores = units * chunks, parts = attends * attended.num_splits;
  const int64_t rows =
      units * attends * attended.tile_heads * (2 * seq.max_pages + attended.max_selected * seq.page_size);
  run_tasks(scores + units * parts, rows * scored.query.dim, [&](int64_t i) {
    if (i < scores)
      score(i % units, i / units);  // the heads of a page lie side by side
    else
      attend((i - scores) / parts, (i - scores) % parts);
  });
  return result;
}

void run(const MergeParams& p, int64_t rows) {
  constexpr int64_t grain = 64;
  run_tasks(ceil_div(rows, grain), rows * p.dim,
            [&](int64_t i) { kernels().merge(p, i * grain, std::min((i + 1) * grain, rows)); });
}

}  // namespace quest
