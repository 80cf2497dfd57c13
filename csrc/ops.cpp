// The ops on CPU tensors: arguments to params (arguments.h), params to the kernels (run.h).
#include "ops.h"

#include <vector>

#include "arguments.h"
#include "cpu/kernels.h"
#include "run.h"

namespace quest {

void append(const Tensor& key, const Tensor& value, Tensor k_cache, Tensor v_cache, const Tensor& slot_mapping,
            bool check) {
  run(append_params(rows_of(key, "append", "key"), rows_of(value, "append", "value"), k_cache, v_cache, slot_mapping,
                    check, "append"));
}

void summarise(const Tensor& k_cache, Tensor page_min, Tensor page_max, const Tensor& block_table,
               const Tensor& seq_lens, const Tensor& num_new, bool check) {
  run(summarise_params(k_cache, page_min, page_max, block_table, seq_lens, num_new, check, "summarise"));
}

Tensor score(const Tensor& query, const Tensor& page_min, const Tensor& page_max, const Tensor& block_table,
             const Tensor& seq_lens, int64_t page_size, double softmax_scale, double slack, std::string group_rule,
             int64_t window, bool check) {
  const char* op = "score";
  expect(query.dim() == 4 && page_min.dim() == 4 && page_max.dim() == 4, op, "query", "expected 4 dimensions");
  const Sequences seq = sequences_of(block_table, seq_lens, page_min.size(0), page_min.size(2) * page_size, page_size,
                                     query.size(1), window, check, op);
  ScoreParams p =
      score_params(rows_of(query, op, "query"), page_min, page_max, seq, softmax_scale, slack, group_rule, op);
  Tensor raw, weights;
  Tensor scores = allocate(p, raw, weights);
  run(p);
  return scores;
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

// Ascending page indices, then -1.
static void check_pages(const AttendParams& p, const char* op) {
  const Sequences& seq = p.seq;
  const int64_t rows = seq.batch * seq.q_len * p.sel_heads;
  for (int64_t r = 0; r < rows; r++) {
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

std::tuple<Tensor, Tensor> attend(const Tensor& query, const Tensor& k_cache, const Tensor& v_cache,
                                  const Tensor& block_table, const Tensor& seq_lens, std::optional<Tensor> page_idx,
                                  int64_t page_size, double softmax_scale, double softcap, std::optional<Tensor> sinks,
                                  int64_t window, bool check) {
  const char* op = "attend";
  AttendParams p = attend_params(query, k_cache, v_cache, block_table, seq_lens, page_idx, page_size, softmax_scale,
                                 softcap, sinks, window, check, op);
  if (check && page_idx) check_pages(p, op);
  return run(p, query.scalar_type());
}

std::tuple<Tensor, Tensor> merge(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b) {
  MergeParams p = merge_params(out_a, lse_a, out_b, lse_b, "merge");
  auto result = allocate(p, out_a, lse_a);
  run(p, p.dim ? lse_a.numel() : 0);
  return result;
}

// ---- decode: append .. attend in one call ----

std::tuple<Tensor, Tensor> decode(const Tensor& query, const Tensor& key, const Tensor& value, Tensor k_cache,
                                  Tensor v_cache, Tensor page_min, Tensor page_max, const Tensor& block_table,
                                  const Tensor& seq_lens, const Tensor& slot_mapping, bool dense, double softmax_scale,
                                  int64_t budget, double budget_fraction, int64_t sink_pages, int64_t recent_pages,
                                  int64_t max_selected, double slack, std::string group_rule, double softcap,
                                  std::optional<Tensor> sinks, int64_t window, bool check, bool heads_first) {
  const char* op = "decode";
  expect(k_cache.dim() == 4 && page_min.dim() == 4 && page_max.dim() == 4, op, "k_cache, page_min, page_max",
         "expected 4 dimensions");
  const SizedRows q = rows_of(query, op, "query", heads_first), k = rows_of(key, op, "key", heads_first),
                  v = rows_of(value, op, "value", heads_first);
  const int64_t block_size = k_cache.size(2), pages = page_min.size(2);
  expect(pages >= 1 && block_size % pages == 0, op, "page_min", "pages per block must divide block_size");
  expect(max_selected >= 0, op, "max_selected", "must not be negative");

  // Everything is checked before the cache is written.
  const AppendParams rows = append_params(k, v, k_cache, v_cache, slot_mapping, check, op);
  const Sequences seq =
      sequences_of(block_table, seq_lens, k_cache.size(0), block_size, block_size / pages, q.q_len, window, check, op);
  expect(k.batch == seq.batch && k.q_len == seq.q_len, op, "key", "must have the query's batch and q_len");
  SummariseParams summary = summarise_params(k_cache, page_min, page_max, seq, op);
  std::vector<int32_t> num_new(seq.batch);  // a row that stores nothing keeps its summaries, and may share their block
  for (int64_t i = 0; i < rows.num_tokens; i++)
    if (rows.slots[i] >= 0) num_new[i / seq.q_len] = static_cast<int32_t>(seq.q_len);
  summary.num_new = num_new.data();
  ScoreParams scored = score_params(q, page_min, page_max, seq, softmax_scale, slack, group_rule, op);
  AttendParams attended = attend_params(q, k_cache, v_cache, seq, softmax_scale, softcap, sinks, op);

  if (dense) {
    run(rows);
    run(summary);
    return run(attended, query.scalar_type());
  }
  Tensor raw, weights;
  const Tensor scores = allocate(scored, raw, weights);
  Tensor page_idx = new_tensor({seq.batch, seq.q_len, scores.size(2), max_selected}, ScalarType::Int);
  Tensor counts = new_tensor({seq.batch, seq.q_len, scores.size(2)}, ScalarType::Int);
  const SelectParams selected =
      select_params(seq, scores, budget, budget_fraction, sink_pages, recent_pages, page_idx, counts, op);
  choose_pages(attended, page_idx, op);
  run(rows);
  run(summary);
  return run(scored, selected, attended, query.scalar_type());
}

// ---- the instruction set ----

std::string isa() { return cpu::kernels().isa; }
std::string isas() { return cpu::isa_names(); }

void use_isa(std::string name) {
  if (!cpu::use_isa(name.c_str())) fail("use_isa: ", name, " is not usable here; usable: ", cpu::isa_names());
}

}  // namespace quest
