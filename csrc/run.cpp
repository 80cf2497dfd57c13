#include "run.h"

#include <algorithm>
#include <atomic>

#include "cpu/kernels.h"

namespace quest {

using cpu::kernels;

constexpr int64_t kHeadsPerTile = 16;       // query heads attended to together, the kernels' kTileHeads
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

// Whether a unit (batch, token, kv head) needs scores.
static bool needs_scores(const ScoreParams& p, const SelectParams* selection, int64_t unit) {
  if (!selection) return true;
  const int64_t t = unit / p.num_kv_heads;
  const Span span = p.seq.span(t / p.seq.q_len, t % p.seq.q_len);
  return span.pos >= 0 && !selection->reads_all(span);
}

void run(const ScoreParams& p, const SelectParams* selection) {
  constexpr int64_t grain = 128;  // pages
  const Sequences& seq = p.seq;
  const int64_t units = seq.batch * seq.q_len * p.num_kv_heads, chunks = ceil_div(seq.max_pages, grain);
  const int64_t scores = seq.batch * seq.q_len * p.num_heads * seq.max_pages;
  run_tasks(units * chunks, scores * p.query.dim, [&](int64_t i) {
    const int64_t begin = i % chunks * grain;
    if (needs_scores(p, selection, i / chunks))
      kernels().score(p, i / chunks, begin, std::min(begin + grain, seq.max_pages));
  });
  if (p.rule == GroupRule::per_head) return;
  run_tasks(units, scores, [&](int64_t i) {
    if (needs_scores(p, selection, i)) kernels().agree(p, i);
  });
}

void run(const SelectParams& p) {
  const int64_t units = p.seq.batch * p.seq.q_len * p.sel_heads;
  run_tasks(units, units * p.seq.max_pages * 4, [&](int64_t i) { kernels().select(p, i); });
}

// Allocate out and lse, and choose the heads that are attended to together.
static std::tuple<Tensor, Tensor> allocate(AttendParams& p, ScalarType out_dtype) {
  const Sequences& seq = p.seq;
  const int64_t group = p.num_heads / p.sel_heads;
  p.num_tiles = ceil_div(group, kHeadsPerTile);
  p.tile_heads = ceil_div(group, p.num_tiles);
  p.num_splits = 1;
  p.partial = nullptr;
  Tensor out = new_tensor({seq.batch, seq.q_len, p.num_heads, p.v_cache.dim}, out_dtype);
  Tensor lse = new_tensor({seq.batch, seq.q_len, p.num_heads}, ScalarType::Float);
  p.out = rows_of(out, "attend", "out");
  p.lse = static_cast<float*>(data_of(lse));
  return {out, lse};
}

std::tuple<Tensor, Tensor> run(AttendParams& p, ScalarType out_dtype) {
  const Sequences& seq = p.seq;
  auto result = allocate(p, out_dtype);

  // Few units on many threads: split their pages, so that no thread waits long for the last one.
  const int64_t units = p.units(), threads = torch::stable::get_num_threads();
  int64_t longest = 0;
  for (int64_t b = 0; b < seq.batch; b++) longest = std::max(longest, seq.length(b));
  if (!p.every_page) longest = std::min(longest, p.max_selected * seq.page_size);
  const int64_t wanted = threads > 1 && units > 0 ? ceil_div(4 * threads, units) : 1;
  p.num_splits = std::max<int64_t>(1, std::min(wanted, longest / kTokensPerSplit));
  Tensor partial;
  if (p.num_splits > 1) {
    partial = new_tensor({units, p.num_splits, p.tile_heads, p.v_cache.dim + 2}, ScalarType::Float);
    p.partial = static_cast<float*>(data_of(partial));
  }
  const int64_t rows = units * p.tile_heads * (p.k_cache.dim + p.v_cache.dim);
  run_tasks(units * p.num_splits, rows * longest,
            [&](int64_t i) { kernels().attend(p, i / p.num_splits, i % p.num_splits); });
  if (p.num_splits > 1) run_tasks(units, rows * p.num_splits, [&](int64_t i) { kernels().combine(p, i); });
  return result;
}

std::tuple<Tensor, Tensor> run(const ScoreParams& scored, const SelectParams& selected, AttendParams& attended,
                               ScalarType out_dtype) {
  const Sequences& seq = scored.seq;
  const int64_t units = seq.batch * seq.q_len * scored.num_kv_heads, threads = torch::stable::get_num_threads();
  if (threads > 1 && units < 4 * threads) {
    run(scored, &selected);
    run(selected);
    return run(attended, out_dtype);
  }
  // Enough KV heads for every thread: each is done from scores to output by one, with no waiting in between.
  auto result = allocate(attended, out_dtype);
  const int64_t selections = attended.sel_heads / scored.num_kv_heads;
  const int64_t rows = std::min(seq.max_pages * 2, attended.max_selected * seq.page_size);
  run_tasks(units, units * rows * scored.query.dim, [&](int64_t unit) {
    if (needs_scores(scored, &selected, unit)) {
      kernels().score(scored, unit, 0, seq.max_pages);
      if (scored.rule != GroupRule::per_head) kernels().agree(scored, unit);
    }
    for (int64_t s = unit * selections; s < (unit + 1) * selections; s++) {
      kernels().select(selected, s);
      for (int64_t tile = 0; tile < attended.num_tiles; tile++)
        kernels().attend(attended, s * attended.num_tiles + tile, 0);
    }
  });
  return result;
}

void run(const MergeParams& p, int64_t rows) {
  constexpr int64_t grain = 64;
  run_tasks(ceil_div(rows, grain), rows * p.dim,
            [&](int64_t i) { kernels().merge(p, i * grain, std::min((i + 1) * grain, rows)); });
}

}  // namespace quest
