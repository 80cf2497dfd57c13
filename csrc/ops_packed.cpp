// The ops of packed summaries on CPU tensors, as ops.cpp has the others.
#include <vector>

#include "arguments.h"
#include "cpu/kernels.h"
#include "ops.h"
#include "run.h"

namespace quest {

// Refuses keys that are not finite or too large for codes, in the tokens that are stored.
static void expect_finite(const AppendParams& p, const char* op) {
  for (int64_t i = 0; i < p.num_tokens; i++) {
    if (p.slots[i] < 0) continue;
    for (int64_t h = 0; h < p.num_kv_heads; h++)
      if (!cpu::kernels().finite(p.key, i / p.q_len, i % p.q_len, h))
        fail(op, ": key: must be finite and at most 1e38 where summaries are packed, got another value in token ", i,
             ", KV head ", h);
  }
}

static PackParams pack_params(const Tensor& k_cache, const Packed& packed, const Sequences& seq, const int32_t* num_new,
                              int64_t sink_pages, const char* op) {
  expect(sink_pages >= 0, op, "sink_pages", "must not be negative");
  return {seq, pool_of(k_cache, op, "k_cache"), packed, num_new, k_cache.size(1), sink_pages};
}

void pack(const Tensor& k_cache, Tensor packed, const Tensor& block_table, const Tensor& seq_lens,
          const Tensor& num_new, int64_t page_size, int64_t coarse_size, int64_t bits, int64_t sink_pages, bool check) {
  const char* op = "pack";
  expect(k_cache.dim() == 4, op, "k_cache", "expected 4 dimensions");
  const Packed layout = packed_of(packed, k_cache, page_size, coarse_size, bits, op);
  const Sequences seq =
      sequences_of(block_table, seq_lens, k_cache.size(0), k_cache.size(2), page_size, 1, -1, check, op);
  run(pack_params(k_cache, layout, seq, int32_of(num_new, seq.batch, op, "num_new"), sink_pages, op));
}

Tensor score_packed(const Tensor& query, const Tensor& k_cache, const Tensor& packed, const Tensor& block_table,
                    const Tensor& seq_lens, int64_t page_size, int64_t coarse_size, int64_t bits, double coarse_keep,
                    int64_t coarse_limit, int64_t budget, double budget_fraction, int64_t sink_pages,
                    int64_t recent_pages, double softmax_scale, double slack, double coarse_slack,
                    std::string group_rule, int64_t window, bool check) {
  const char* op = "score_packed";
  expect(query.dim() == 4 && k_cache.dim() == 4, op, "query", "expected 4 dimensions");
  const Packed layout = packed_of(packed, k_cache, page_size, coarse_size, bits, op);
  const Sequences seq = sequences_of(block_table, seq_lens, k_cache.size(0), k_cache.size(2), page_size, query.size(1),
                                     window, check, op);
  PackedScoreParams p = packed_score_params(rows_of(query, op, "query"), k_cache, layout, seq, coarse_keep,
                                            coarse_limit, budget, budget_fraction, sink_pages, recent_pages,
                                            softmax_scale, slack, coarse_slack, group_rule, op);
  const PackedScratch scratch = allocate(p);
  run(p);

  // From candidates to pages.
  const int64_t heads = scratch.candidates.size(2), of_unit = heads / p.num_kv_heads;
  Tensor scores = new_tensor({seq.batch, seq.q_len, heads, seq.max_pages}, ScalarType::Float);
  auto* to = static_cast<float*>(data_of(scores));
  const auto* from = static_cast<const float*>(data_of(scratch.candidates));
  for (int64_t row = 0; row < seq.batch * seq.q_len * heads; row++, to += seq.max_pages, from += p.max_candidates) {
    for (int64_t i = 0; i < seq.max_pages; i++) to[i] = -INFINITY;
    const int64_t unit = row / of_unit, token = unit / p.num_kv_heads;
    const Span span = seq.span(token / seq.q_len, token % seq.q_len);
    if (span.pos < 0) continue;
    for (int64_t c = 0; c < p.candidates(span, token / seq.q_len, unit); c++) to[p.page_of(span, unit, c)] = from[c];
  }
  return scores;
}

std::tuple<Tensor, Tensor> decode_packed(const Tensor& query, const Tensor& key, const Tensor& value, Tensor k_cache,
                                         Tensor v_cache, Tensor packed, const Tensor& block_table,
                                         const Tensor& seq_lens, const Tensor& slot_mapping, int64_t page_size,
                                         int64_t coarse_size, int64_t bits, double coarse_keep, int64_t coarse_limit,
                                         double coarse_slack, bool dense, double softmax_scale, int64_t budget,
                                         double budget_fraction, int64_t sink_pages, int64_t recent_pages,
                                         int64_t max_selected, double slack, std::string group_rule, double softcap,
                                         std::optional<Tensor> sinks, int64_t window, bool check, bool heads_first) {
  const char* op = "decode_packed";
  expect(k_cache.dim() == 4, op, "k_cache", "expected 4 dimensions");
  const SizedRows q = rows_of(query, op, "query", heads_first), k = rows_of(key, op, "key", heads_first),
                  v = rows_of(value, op, "value", heads_first);
  expect(max_selected >= 0, op, "max_selected", "must not be negative");

  // Everything is checked before the cache is written.
  const AppendParams rows = append_params(k, v, k_cache, v_cache, slot_mapping, check, op);
  const Packed layout = packed_of(packed, k_cache, page_size, coarse_size, bits, op);
  const Sequences seq =
      sequences_of(block_table, seq_lens, k_cache.size(0), k_cache.size(2), page_size, q.q_len, window, check, op);
  expect(k.batch == seq.batch && k.q_len == seq.q_len, op, "key", "must have the query's batch and q_len");
  expect_finite(rows, op);
  std::vector<int32_t> num_new(seq.batch);  // a row that stores nothing keeps its summaries, and may share their block
  for (int64_t i = 0; i < rows.num_tokens; i++)
    if (rows.slots[i] >= 0) num_new[i / seq.q_len] = static_cast<int32_t>(seq.q_len);
  const PackParams summary = pack_params(k_cache, layout, seq, num_new.data(), sink_pages, op);
  PackedScoreParams scored =
      packed_score_params(q, k_cache, layout, seq, coarse_keep, coarse_limit, budget, budget_fraction, sink_pages,
                          recent_pages, softmax_scale, slack, coarse_slack, group_rule, op);
  AttendParams attended = attend_params(q, k_cache, v_cache, seq, softmax_scale, softcap, sinks, op);

  if (dense) {
    run(rows);
    run(summary);
    return run(attended, query.scalar_type());
  }
  const PackedScratch scratch = allocate(scored);
  const int64_t heads = scratch.candidates.size(2);
  Tensor page_idx = new_tensor({seq.batch, seq.q_len, heads, max_selected}, ScalarType::Int);
  Tensor counts = new_tensor({seq.batch, seq.q_len, heads}, ScalarType::Int);
  SelectParams selected =
      select_params(seq, scratch.candidates, budget, budget_fraction, sink_pages, recent_pages, page_idx, counts, op);
  selected.packed = &scored;
  choose_pages(attended, page_idx, op);
  run(rows);
  run(summary);
  return run(scored, selected, attended, query.scalar_type());
}

}  // namespace quest
