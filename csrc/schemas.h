// The schemas of the ops that have CUDA C++ kernels too, under the names that both namespaces give them.
#pragma once

namespace quest::schemas {

constexpr char kAppend[] =
    "append(Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, "
    "bool check=True) -> ()";
constexpr char kSummarise[] =
    "summarise(Tensor k_cache, Tensor(a!) page_min, Tensor(b!) page_max, Tensor block_table, Tensor seq_lens, "
    "Tensor num_new, bool check=True) -> ()";
constexpr char kAttend[] =
    "attend(Tensor query, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, Tensor? page_idx, "
    "SymInt page_size, float softmax_scale, float softcap=0.0, Tensor? sinks=None, SymInt window=-1, "
    "bool check=True) -> (Tensor, Tensor)";
constexpr char kMerge[] = "merge(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)";

}  // namespace quest::schemas
