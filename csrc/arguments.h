// What the ops are given, as what the kernels are told; the rules of each argument are checked on the way.
#pragma once

#include <optional>
#include <string>
#include <tuple>

#include "tensors.h"

namespace quest {

AppendParams append_params(const SizedRows& key, const SizedRows& value, const Tensor& k_cache, const Tensor& v_cache,
                           const Tensor& slot_mapping, bool check, const char* op);
// num_new is left to the caller.
SummariseParams summarise_params(const Tensor& k_cache, const Tensor& page_min, const Tensor& page_max,
                                 const Sequences& seq, const char* op);
SummariseParams summarise_params(const Tensor& k_cache, const Tensor& page_min, const Tensor& page_max,
                                 const Tensor& block_table, const Tensor& seq_lens, const Tensor& num_new, bool check,
                                 const char* op);
ScoreParams score_params(const SizedRows& query, const Tensor& page_min, const Tensor& page_max, const Sequences& seq,
                         double softmax_scale, double slack, const std::string& group_rule, const char* op);
// Allocates the scores of all query heads (`raw`) and of the groups; returns what the selection reads.
Tensor allocate(ScoreParams& p, Tensor& raw, Tensor& weights);
// How packed summaries are laid out, as quest/packing.py says; coarse_size 0 = one level.
Packed packed_of(const Tensor& packed, const Tensor& k_cache, int64_t page_size, int64_t coarse_size, int64_t bits,
                 const char* op);
PackedScoreParams packed_score_params(const SizedRows& query, const Tensor& k_cache, const Packed& packed,
                                      const Sequences& seq, double coarse_keep, int64_t coarse_limit, int64_t budget,
                                      double budget_fraction, int64_t sink_pages, int64_t recent_pages,
                                      double softmax_scale, double slack, double coarse_slack,
                                      const std::string& group_rule, const char* op);
// What scoring works in. `candidates` are the scores that the selection reads.
struct PackedScratch {
  Tensor floats, kept, raw, candidates;
};
PackedScratch allocate(PackedScoreParams& p);
SelectParams select_params(const Sequences& seq, const Tensor& scores, int64_t budget, double budget_fraction,
                           int64_t sink_pages, int64_t recent_pages, const Tensor& page_idx, const Tensor& counts,
                           const char* op);
// Attends to every page, until `choose_pages` says which.
AttendParams attend_params(const SizedRows& query, const Tensor& k_cache, const Tensor& v_cache, const Sequences& seq,
                           double softmax_scale, double softcap, const std::optional<Tensor>& sinks, const char* op);
void choose_pages(AttendParams& p, const Tensor& page_idx, const char* op);
AttendParams attend_params(const Tensor& query, const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_table,
                           const Tensor& seq_lens, const std::optional<Tensor>& page_idx, int64_t page_size,
                           double softmax_scale, double softcap, const std::optional<Tensor>& sinks, int64_t window,
                           bool check, const char* op);
// Allocates out and lse, on the CPU if no device is named, and chooses the heads that are attended to together.
std::tuple<Tensor, Tensor> allocate(AttendParams& p, ScalarType out_dtype,
                                    std::optional<torch::stable::Device> device = std::nullopt);
MergeParams merge_params(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b,
                         const char* op);
// Allocates out and lse, like those of a part.
std::tuple<Tensor, Tensor> allocate(MergeParams& p, const Tensor& out_like, const Tensor& lse_like);

}  // namespace quest
