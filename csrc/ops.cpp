// The ops on CPU tensors: tensors to params, tasks to torch's threads. One task is one call of a kernel of
// cpu/kernels.h.
#include "ops.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "cpu/kernels.h"
#include "tensors.h"

namespace quest {

using cpu::kernels;

// Run f(0) .. f(n - 1) on torch's pool; threads take the next task as they finish one, so ragged tasks balance.
template <typename F>
static void run_tasks(int64_t n, const F& f) {
  const int64_t threads = std::min<int64_t>(n, torch::stable::get_num_threads());
  if (threads <= 1) {
    for (int64_t i = 0; i < n; i++) f(i);
    return;
  }
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; worker++)
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) f(i);
  });
}

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

static GroupRule rule_of(const std::string& name, const char* op) {
  if (name == "softmax") return GroupRule::softmax;
  if (name == "relative") return GroupRule::relative;
  if (name == "per_head") return GroupRule::per_head;
  fail(op, ": group_rule: expected softmax, relative or per_head, got ", name);
}

// ---- append, summarise ----

static AppendParams append_params(const Tensor& key, const Tensor& value, const Tensor& k_cache, const Tensor& v_cache,
                                  const Tensor& slot_mapping, bool check, const char* op) {
  AppendParams p;
  p.key = rows_of(key, op, "key");
  p.value = rows_of(value, op, "value");
  p.k_cache = pool_of(k_cache, op, "k_cache");
  p.v_cache = pool_of(v_cache, op, "v_cache");
  p.q_len = key.size(1);
  p.num_tokens = key.size(0) * key.size(1);
  p.num_kv_heads = k_cache.size(1);
  p.block_size = k_cache.size(2);
  p.num_slots = k_cache.size(0) * p.block_size;
  expect(p.k_cache.dtype == p.v_cache.dtype && p.key.dtype == p.k_cache.dtype && p.value.dtype == p.k_cache.dtype, op,
         "key, value", "must have the dtype of the cache");
  expect(v_cache.size(0) == k_cache.size(0) && v_cache.size(1) == p.num_kv_heads && v_cache.size(2) == p.block_size, op,
         "v_cache", "must match k_cache in all but the last dimension");
  expect(value.size(0) == key.size(0) && value.size(1) == p.q_len && key.size(2) == p.num_kv_heads &&
             value.size(2) == p.num_kv_heads && p.key.dim == p.k_cache.dim && p.value.dim == p.v_cache.dim,
         op, "key, value", "must match each other and the cache");
  expect(slot_mapping.scalar_type() == ScalarType::Long && slot_mapping.numel() == p.num_tokens &&
             slot_mapping.is_contiguous(),
         op, "slot_mapping", "expected a contiguous int64 tensor, one slot for each token");
  p.slots = static_cast<const int64_t*>(data_of(slot_mapping));
  for (int64_t i = 0; check && i < p.num_tokens; i++)
    if (p.slots[i] < -1 || p.slots[i] >= p.num_slots)
      fail(op, ": slot_mapping: slot of token ", i, " must be -1 (skip) or in [0, ", p.num_slots, "), got ",
           p.slots[i]);
  return p;
}

static void run(const AppendParams& p) {
  constexpr int64_t grain = 64;  // tokens
  run_tasks(ceil_div(p.num_tokens, grain),
            [&](int64_t i) { kernels().append(p, i * grain, std::min((i + 1) * grain, p.num_tokens)); });
}

static SummariseParams summarise_params(const Tensor& k_cache, const Tensor& page_min, const Tensor& page_max,
                                        const Sequences& seq, const char* op) {
  SummariseParams p;
  p.seq = seq;
  p.k_cache = pool_of(k_cache, op, "k_cache");
  p.page_min = pool_of(page_min, op, "page_min");
  p.page_max = pool_of(page_max, op, "page_max");
  p.num_new = nullptr;
  p.num_kv_heads = k_cache.size(1);
  const Tensor* summaries[] = {&page_min, &page_max};
  for (const Tensor* x : summaries)
    expect(x->size(0) == k_cache.size(0) && x->size(1) == k_cache.size(1) && x->size(3) == k_cache.size(3) &&
               x->scalar_type() == k_cache.scalar_type() && x->size(2) * seq.page_size == seq.block_size,
           op, "page_min, page_max", "must match k_cache and page_size");
  return p;
}

static void run(const SummariseParams& p) {
  constexpr int64_t grain = 64;  // pages
  const Sequences& seq = p.seq;
  auto end_page = [&](int64_t b) { return ceil_div(seq.length(b), seq.page_size); };
  auto first_page = [&](int64_t b) {
    if (p.num_new[b] <= 0) return end_page(b);
    return std::max<int64_t>(0, seq.length(b) - p.num_new[b]) / seq.page_size;
  };
  int64_t most = 0;
  for (int64_t b = 0; b < seq.batch; b++) most = std::max(most, end_page(b) - first_page(b));
  const int64_t chunks = ceil_div(most, grain);
  run_tasks(seq.batch * p.num_kv_heads * chunks, [&](int64_t i) {
    const int64_t b = i / chunks / p.num_kv_heads, begin = first_page(b) + i % chunks * grain;
    const int64_t end = std::min(begin + grain, end_page(b));
    kernels().summarise(p, b, i / chunks % p.num_kv_heads, begin, end);
  });
}

void append(const Tensor& key, const Tensor& value, Tensor k_cache, Tensor v_cache, const Tensor& slot_mapping,
            bool check) {
  run(append_params(key, value, k_cache, v_cache, slot_mapping, check, "append"));
}

void summarise(const Tensor& k_cache, Tensor page_min, Tensor page_max, const Tensor& block_table,
               const Tensor& seq_lens, const Tensor& num_new, bool check) {
  const char* op = "summarise";
  expect(k_cache.dim() == 4 && page_min.dim() == 4 && page_max.dim() == 4, op, "k_cache", "expected 4 dimensions");
  const int64_t block_size = k_cache.size(2), pages = page_min.size(2);
  expect(pages >= 1 && block_size % pages == 0, op, "page_min", "pages per block must divide block_size");
  SummariseParams p = summarise_params(
      k_cache, page_min, page_max,
      sequences_of(block_table, seq_lens, k_cache.size(0), block_size, block_size / pages, 1, -1, check, op), op);
  p.num_new = int32_of(num_new, p.seq.batch, op, "num_new");
  run(p);
}

// ---- score ----

static ScoreParams score_params(const Tensor& query, const Tensor& page_min, const Tensor& page_max,
                                const Sequences& seq, double softmax_scale, double slack, const std::string& group_rule,
                                const char* op) {
  ScoreParams p;
  p.seq = seq;
  p.query = rows_of(query, op, "query");
  p.page_min = pool_of(page_min, op, "page_min");
  p.page_max = pool_of(page_max, op, "page_max");
  p.num_heads = query.size(2);
  p.num_kv_heads = page_min.size(1);
  p.slack = static_cast<float>(slack);
  p.softmax_scale = static_cast<float>(softmax_scale);
  p.rule = rule_of(group_rule, op);
  expect(p.num_kv_heads >= 1 && p.num_heads >= 1 && p.num_heads % p.num_kv_heads == 0, op, "query",
         "num_heads must be a multiple of num_kv_heads");
  expect(query.size(0) == seq.batch && p.query.dim == p.page_min.dim && p.query.dim == p.page_max.dim &&
             page_max.size(0) == seq.num_blocks && page_max.size(1) == p.num_kv_heads &&
             page_min.size(2) * seq.page_size == seq.block_size && page_max.size(2) == page_min.size(2) &&
             p.page_min.dtype == p.page_max.dtype,
         op, "page_min, page_max", "must match each other, the query and the block table");
  return p;
}

// Scores of every row, but for tokens that `skip` says need none.
template <typename Skip>
static void run(const ScoreParams& p, const Skip& skip) {
  constexpr int64_t grain = 512;  // pages
  const Sequences& seq = p.seq;
  const int64_t units = seq.batch * seq.q_len * p.num_kv_heads, chunks = ceil_div(seq.max_pages, grain);
  auto needed = [&](int64_t unit) {
    const int64_t t = unit / p.num_kv_heads;
    return !skip(seq.span(t / seq.q_len, t % seq.q_len));
  };
  run_tasks(units * chunks, [&](int64_t i) {
    const int64_t begin = i % chunks * grain;
    if (needed(i / chunks)) kernels().score(p, i / chunks, begin, std::min(begin + grain, seq.max_pages));
  });
  if (p.rule == GroupRule::per_head) return;
  run_tasks(units, [&](int64_t i) {
    if (needed(i)) kernels().agree(p, i);
  });
}

// Allocates the scores of all query heads and of the groups; returns what the selection reads.
static Tensor allocate(ScoreParams& p, Tensor& raw) {
  raw = new_tensor({p.seq.batch, p.seq.q_len, p.num_heads, p.seq.max_pages}, ScalarType::Float);
  p.raw = static_cast<float*>(data_of(raw));
  p.scores = nullptr;
  if (p.rule == GroupRule::per_head) return raw;
  Tensor scores = new_tensor({p.seq.batch, p.seq.q_len, p.num_kv_heads, p.seq.max_pages}, ScalarType::Float);
  p.scores = static_cast<float*>(data_of(scores));
  return scores;
}

Tensor score(const Tensor& query, const Tensor& page_min, const Tensor& page_max, const Tensor& block_table,
             const Tensor& seq_lens, int64_t page_size, double softmax_scale, double slack, std::string group_rule,
             int64_t window, bool check) {
  const char* op = "score";
  expect(query.dim() == 4 && page_min.dim() == 4 && page_max.dim() == 4, op, "query", "expected 4 dimensions");
  const Sequences seq = sequences_of(block_table, seq_lens, page_min.size(0), page_min.size(2) * page_size, page_size,
                                     query.size(1), window, check, op);
  ScoreParams p = score_params(query, page_min, page_max, seq, softmax_scale, slack, group_rule, op);
  Tensor raw;
  Tensor scores = allocate(p, raw);
  run(p, [](const Span&) { return false; });
  return scores;
}

// ---- select ----

static SelectParams select_params(const Sequences& seq, const Tensor& scores, int64_t budget, double budget_fraction,
                                  int64_t sink_pages, int64_t recent_pages, const Tensor& page_idx,
                                  const Tensor& counts, const char* op) {
  expect(sink_pages >= 0 && recent_pages >= 1 && budget >= 0 && budget_fraction >= 0, op, "budget",
         "budget and forced pages must not be negative, the newest page is always read");
  SelectParams p;
  p.seq = seq;
  p.scores = static_cast<const float*>(data_of(scores));
  p.page_idx = static_cast<int32_t*>(data_of(page_idx));
  p.counts = static_cast<int32_t*>(data_of(counts));
  p.sel_heads = scores.size(2);
  p.max_selected = page_idx.size(3);
  p.budget = budget;
  p.budget_fraction = budget_fraction;
  p.sink_pages = sink_pages;
  p.recent_pages = recent_pages;
  return p;
}

static void run(const SelectParams& p) {
  run_tasks(p.seq.batch * p.seq.q_len * p.sel_heads, [&](int64_t i) { kernels().select(p, i); });
}

std::tuple<Tensor, Tensor> select(const Tensor& scores, const Tensor& seq_lens, int64_t page_size, int64_t budget,
                                  double budget_fraction, int64_t sink_pages, int64_t recent_pages, int64_t window,
                                  int64_t max_selected, bool check) {
  const char* op = "select";
  expect(scores.dim() == 4 && scores.scalar_type() == ScalarType::Float && scores.is_contiguous(), op, "scores",
         "expected a contiguous float32 tensor [batch, q_len, heads, max_pages]");
  expect(page_size >= 1, op, "page_size", "must be at least 1");
  expect(window == -1 || window >= 1, op, "window", "must be at least 1");
  expect(max_selected >= 0, op, "max_selected", "must not be negative");
  Sequences seq{};  // no table: pages are places in the sequence
  seq.batch = scores.size(0);
  seq.q_len = scores.size(1);
  seq.max_pages = seq.max_blocks = scores.size(3);
  seq.page_size = seq.block_size = page_size;
  seq.window = window;
  seq.seq_lens = int32_of(seq_lens, seq.batch, op, "seq_lens");
  for (int64_t b = 0; check && b < seq.batch; b++)
    if (seq.seq_lens[b] < 0 || seq.seq_lens[b] > seq.max_pages * page_size)
      fail(op, ": seq_lens[", b, "]: must be in [0, ", seq.max_pages * page_size, "], the pages of scores, got ",
           seq.seq_lens[b]);
  Tensor page_idx = new_tensor({seq.batch, seq.q_len, scores.size(2), max_selected}, ScalarType::Int);
  Tensor counts = new_tensor({seq.batch, seq.q_len, scores.size(2)}, ScalarType::Int);
  run(select_params(seq, scores, budget, budget_fraction, sink_pages, recent_pages, page_idx, counts, op));
  return {page_idx, counts};
}

// ---- attend ----

static AttendParams attend_params(const Tensor& query, const Tensor& k_cache, const Tensor& v_cache,
                                  const Sequences& seq, double softmax_scale, double softcap,
                                  const std::optional<Tensor>& sinks, const char* op) {
  AttendParams p;
  p.seq = seq;
  p.query = rows_of(query, op, "query");
  p.k_cache = pool_of(k_cache, op, "k_cache");
  p.v_cache = pool_of(v_cache, op, "v_cache");
  p.num_heads = query.size(2);
  p.sel_heads = p.num_kv_heads = k_cache.size(1);
  p.softmax_scale = static_cast<float>(softmax_scale);
  p.softcap = static_cast<float>(softcap);
  p.every_page = true;
  p.page_idx = nullptr;
  p.idx_stride_batch = p.idx_stride_token = p.idx_stride_head = p.max_selected = 0;
  expect(p.num_kv_heads >= 1 && p.num_heads >= 1 && p.num_heads % p.num_kv_heads == 0, op, "query",
         "num_heads must be a multiple of num_kv_heads");
  expect(query.size(0) == seq.batch && p.query.dim == p.k_cache.dim && p.k_cache.dtype == p.v_cache.dtype &&
             v_cache.size(0) == k_cache.size(0) && v_cache.size(1) == p.num_kv_heads &&
             v_cache.size(2) == k_cache.size(2) && k_cache.size(2) == seq.block_size,
         op, "k_cache, v_cache", "must match each other, the query and the block table");
  p.sinks = nullptr;
  if (sinks) {
    expect(sinks->scalar_type() == ScalarType::Float && sinks->dim() == 1 && sinks->size(0) == p.num_heads &&
               sinks->is_contiguous(),
           op, "sinks", "expected a contiguous float32 tensor [num_heads]");
    p.sinks = static_cast<const float*>(data_of(*sinks));
  }
  return p;
}

static void choose_pages(AttendParams& p, const Tensor& page_idx, const char* op) {
  expect(page_idx.dim() == 4 && page_idx.scalar_type() == ScalarType::Int && page_idx.size(0) == p.seq.batch &&
             page_idx.size(1) == p.seq.q_len &&
             (page_idx.size(2) == p.num_kv_heads || page_idx.size(2) == p.num_heads) &&
             (page_idx.size(3) <= 1 || page_idx.stride(3) == 1),
         op, "page_idx", "expected an int32 tensor [batch, q_len, num_kv_heads or num_heads, max_selected]");
  p.every_page = false;
  p.page_idx = static_cast<const int32_t*>(data_of(page_idx));
  p.idx_stride_batch = page_idx.stride(0);
  p.idx_stride_token = page_idx.stride(1);
  p.idx_stride_head = page_idx.stride(2);
  p.max_selected = page_idx.size(3);
  p.sel_heads = page_idx.size(2);
}

static std::tuple<Tensor, Tensor> run(AttendParams& p, ScalarType out_dtype) {
  constexpr int64_t most_heads = 16, tokens_per_split = 256;
  const Sequences& seq = p.seq;
  const int64_t group = p.num_heads / p.sel_heads;
  p.num_tiles = std::max<int64_t>(1, ceil_div(group, most_heads));
  p.tile_heads = ceil_div(group, p.num_tiles);

  Tensor out = new_tensor({seq.batch, seq.q_len, p.num_heads, p.v_cache.dim}, out_dtype);
  Tensor lse = new_tensor({seq.batch, seq.q_len, p.num_heads}, ScalarType::Float);
  p.out = rows_of(out, "attend", "out");
  p.lse = static_cast<float*>(data_of(lse));

  // Few units on many threads: split their pages, so that no thread waits long for the last one.
  const int64_t units = p.units(), threads = torch::stable::get_num_threads();
  int64_t longest = 0;
  for (int64_t b = 0; b < seq.batch; b++) longest = std::max(longest, seq.length(b));
  if (!p.every_page) longest = std::min(longest, p.max_selected * seq.page_size);
  const int64_t wanted = threads > 1 && units > 0 ? ceil_div(4 * threads, units) : 1;
  p.num_splits = std::max<int64_t>(1, std::min(wanted, longest / tokens_per_split));
  Tensor partial;
  p.partial = nullptr;
  if (p.num_splits > 1) {
    partial = new_tensor({units, p.num_splits, p.tile_heads, p.v_cache.dim + 2}, ScalarType::Float);
    p.partial = static_cast<float*>(data_of(partial));
  }
  run_tasks(units * p.num_splits, [&](int64_t i) { kernels().attend(p, i / p.num_splits, i % p.num_splits); });
  if (p.num_splits > 1) run_tasks(units, [&](int64_t i) { kernels().combine(p, i); });
  return {out, lse};
}

std::tuple<Tensor, Tensor> attend(const Tensor& query, const Tensor& k_cache, const Tensor& v_cache,
                                  const Tensor& block_table, const Tensor& seq_lens, std::optional<Tensor> page_idx,
                                  int64_t page_size, double softmax_scale, double softcap, std::optional<Tensor> sinks,
                                  int64_t window, bool check) {
  const char* op = "attend";
  expect(query.dim() == 4 && k_cache.dim() == 4 && v_cache.dim() == 4, op, "query", "expected 4 dimensions");
  const Sequences seq = sequences_of(block_table, seq_lens, k_cache.size(0), k_cache.size(2), page_size, query.size(1),
                                     window, check, op);
  AttendParams p = attend_params(query, k_cache, v_cache, seq, softmax_scale, softcap, sinks, op);
  if (page_idx) {
    choose_pages(p, *page_idx, op);
    const int64_t rows = seq.batch * seq.q_len * p.sel_heads;
    for (int64_t r = 0; check && r < rows; r++) {
      const int64_t h = r % p.sel_heads, t = r / p.sel_heads % seq.q_len, b = r / p.sel_heads / seq.q_len;
      const int32_t* idx = p.page_idx + b * p.idx_stride_batch + t * p.idx_stride_token + h * p.idx_stride_head;
      int64_t last = -1;
      bool ended = false;
      for (int64_t i = 0; i < p.max_selected; i++) {
        if (idx[i] == -1) {
          ended = true;
          continue;
        }
        if (idx[i] < -1 || idx[i] >= seq.max_pages || idx[i] <= last || ended)
          fail(op, ": page_idx[", b, ", ", t, ", ", h, ", ", i, "]: pages must be ascending in [0, ", seq.max_pages,
               "), then -1, got ", idx[i]);
        last = idx[i];
      }
    }
  }
  return run(p, query.scalar_type());
}

// ---- merge ----

std::tuple<Tensor, Tensor> merge(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b) {
  const char* op = "merge";
  const Tensor* tensors[] = {&out_a, &lse_a, &out_b, &lse_b};
  for (const Tensor* x : tensors) expect(x->is_contiguous(), op, "out, lse", "must be contiguous");
  expect(out_a.dim() >= 1 && out_a.numel() == out_b.numel() && out_a.scalar_type() == out_b.scalar_type(), op, "out_b",
         "must match out_a");
  MergeParams p;
  p.dtype = dtype_of(out_a, op, "out_a");
  p.dim = out_a.size(out_a.dim() - 1);
  const int64_t rows = p.dim ? out_a.numel() / p.dim : 0;
  expect(lse_a.scalar_type() == ScalarType::Float && lse_b.scalar_type() == ScalarType::Float &&
             lse_a.numel() == lse_b.numel() && (p.dim == 0 || lse_a.numel() == rows),
         op, "lse_a, lse_b", "expected float32, one value for each row of out");
  Tensor out = torch::stable::empty_like(out_a), lse = torch::stable::empty_like(lse_a);
  p.out_a = data_of(out_a);
  p.out_b = data_of(out_b);
  p.lse_a = static_cast<const float*>(data_of(lse_a));
  p.lse_b = static_cast<const float*>(data_of(lse_b));
  p.out = data_of(out);
  p.lse = static_cast<float*>(data_of(lse));
  constexpr int64_t grain = 64;
  run_tasks(ceil_div(rows, grain), [&](int64_t i) { kernels().merge(p, i * grain, std::min((i + 1) * grain, rows)); });
  return {out, lse};
}

// ---- decode: append .. attend in one call ----

std::tuple<Tensor, Tensor> decode(const Tensor& query, const Tensor& key, const Tensor& value, Tensor k_cache,
                                  Tensor v_cache, Tensor page_min, Tensor page_max, const Tensor& block_table,
                                  const Tensor& seq_lens, const Tensor& slot_mapping, bool dense, double softmax_scale,
                                  int64_t budget, double budget_fraction, int64_t sink_pages, int64_t recent_pages,
                                  int64_t max_selected, double slack, std::string group_rule, double softcap,
                                  std::optional<Tensor> sinks, int64_t window, bool check) {
  const char* op = "decode";
  expect(query.dim() == 4 && k_cache.dim() == 4 && page_min.dim() == 4 && page_max.dim() == 4, op, "query",
         "expected 4 dimensions");
  const int64_t block_size = k_cache.size(2), pages = page_min.size(2);
  expect(pages >= 1 && block_size % pages == 0, op, "page_min", "pages per block must divide block_size");
  expect(max_selected >= 0, op, "max_selected", "must not be negative");

  // Everything is checked before the cache is written.
  const AppendParams rows = append_params(key, value, k_cache, v_cache, slot_mapping, check, op);
  const Sequences seq = sequences_of(block_table, seq_lens, k_cache.size(0), block_size, block_size / pages,
                                     query.size(1), window, check, op);
  expect(key.size(0) == seq.batch && key.size(1) == seq.q_len, op, "key", "must have the query's batch and q_len");
  SummariseParams summary = summarise_params(k_cache, page_min, page_max, seq, op);
  std::vector<int32_t> num_new(seq.batch);  // a row that stores nothing keeps its summaries, and may share their block
  for (int64_t i = 0; i < rows.num_tokens; i++)
    if (rows.slots[i] >= 0) num_new[i / seq.q_len] = static_cast<int32_t>(seq.q_len);
  summary.num_new = num_new.data();
  ScoreParams scored = score_params(query, page_min, page_max, seq, softmax_scale, slack, group_rule, op);
  AttendParams attended = attend_params(query, k_cache, v_cache, seq, softmax_scale, softcap, sinks, op);

  if (dense) {
    run(rows);
    run(summary);
    return run(attended, query.scalar_type());
  }
  Tensor raw;
  const Tensor scores = allocate(scored, raw);
  Tensor page_idx = new_tensor({seq.batch, seq.q_len, scores.size(2), max_selected}, ScalarType::Int);
  Tensor counts = new_tensor({seq.batch, seq.q_len, scores.size(2)}, ScalarType::Int);
  const SelectParams selected =
      select_params(seq, scores, budget, budget_fraction, sink_pages, recent_pages, page_idx, counts, op);
  run(rows);
  run(summary);
  run(scored, [&](const Span& s) { return s.pos < 0 || selected.reads_all(s); });
  run(selected);
  choose_pages(attended, page_idx, op);
  return run(attended, query.scalar_type());
}

// ---- the instruction set ----

std::string isa() { return kernels().isa; }
std::string isas() { return cpu::isa_names(); }

void use_isa(std::string name) {
  if (!cpu::use_isa(name.c_str())) fail("use_isa: ", name, " is not usable here; usable: ", cpu::isa_names());
}

}  // namespace quest
