// The ops as C++ functions; registration.cpp gives them their schemas. Shapes and rules: quest/ops.py.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <tuple>

namespace quest {

using torch::stable::Tensor;

void append(const Tensor& key, const Tensor& value, Tensor k_cache, Tensor v_cache, const Tensor& slot_mapping,
            bool check);
void summarise(const Tensor& k_cache, Tensor page_min, Tensor page_max, const Tensor& block_table,
               const Tensor& seq_lens, const Tensor& num_new, bool check);
Tensor score(const Tensor& query, const Tensor& page_min, const Tensor& page_max, const Tensor& block_table,
             const Tensor& seq_lens, int64_t page_size, double softmax_scale, double slack, std::string group_rule,
             int64_t window, bool check);
void pack(const Tensor& k_cache, Tensor packed, const Tensor& block_table, const Tensor& seq_lens,
          const Tensor& num_new, int64_t page_size, int64_t coarse_size, int64_t bits, int64_t sink_pages, bool check);
Tensor score_packed(const Tensor& query, const Tensor& k_cache, const Tensor& packed, const Tensor& block_table,
                    const Tensor& seq_lens, int64_t page_size, int64_t coarse_size, int64_t bits, double coarse_keep,
                    int64_t coarse_limit, int64_t budget, double budget_fraction, int64_t sink_pages,
                    int64_t recent_pages, double softmax_scale, double slack, double coarse_slack,
                    std::string group_rule, int64_t window, bool check);
std::tuple<Tensor, Tensor> select(const Tensor& scores, const Tensor& seq_lens, int64_t page_size, int64_t budget,
                                  double budget_fraction, int64_t sink_pages, int64_t recent_pages, int64_t window,
                                  int64_t max_selected, bool check);
std::tuple<Tensor, Tensor> attend(const Tensor& query, const Tensor& k_cache, const Tensor& v_cache,
                                  const Tensor& block_table, const Tensor& seq_lens, std::optional<Tensor> page_idx,
                                  int64_t page_size, double softmax_scale, double softcap, std::optional<Tensor> sinks,
                                  int64_t window, bool check);
std::tuple<Tensor, Tensor> merge(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b);
// heads_first: query, key and value are [batch, num_heads, q_len, dim]; the result has tokens first all the same.
std::tuple<Tensor, Tensor> decode(const Tensor& query, const Tensor& key, const Tensor& value, Tensor k_cache,
                                  Tensor v_cache, Tensor page_min, Tensor page_max, const Tensor& block_table,
                                  const Tensor& seq_lens, const Tensor& slot_mapping, bool dense, double softmax_scale,
                                  int64_t budget, double budget_fraction, int64_t sink_pages, int64_t recent_pages,
                                  int64_t max_selected, double slack, std::string group_rule, double softcap,
                                  std::optional<Tensor> sinks, int64_t window, bool check, bool heads_first);

std::tuple<Tensor, Tensor> decode_packed(const Tensor& query, const Tensor& key, const Tensor& value, Tensor k_cache,
                                         Tensor v_cache, Tensor packed, const Tensor& block_table,
                                         const Tensor& seq_lens, const Tensor& slot_mapping, int64_t page_size,
                                         int64_t coarse_size, int64_t bits, double coarse_keep, int64_t coarse_limit,
                                         double coarse_slack, bool dense, double softmax_scale, int64_t budget,
                                         double budget_fraction, int64_t sink_pages, int64_t recent_pages,
                                         int64_t max_selected, double slack, std::string group_rule, double softcap,
                                         std::optional<Tensor> sinks, int64_t window, bool check, bool heads_first);

std::string isa();
std::string isas();
void use_isa(std::string name);

}  // namespace quest
