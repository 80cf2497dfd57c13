// The ops of namespace quest_cuda: arguments to params (arguments.h), params to the launchers (launch.h). Values are
// not looked at, which would wait for the device: kernels skip what is out of range.
#include <torch/csrc/stable/library.h>

#include "arguments.h"
#include "cuda/device.h"
#include "cuda/launch.h"

namespace quest_cuda {

using namespace quest;

static void append(const Tensor& key, const Tensor& value, Tensor k_cache, Tensor v_cache, const Tensor& slot_mapping,
                   bool) {
  const char* op = "append";
  const OnDevice on(op, key, {&value, &k_cache, &v_cache, &slot_mapping});
  const AppendParams p = append_params(key, value, k_cache, v_cache, slot_mapping, false, op);
  on.expect_success(quest_append(&p, on.stream()));
}

static void summarise(const Tensor& k_cache, Tensor page_min, Tensor page_max, const Tensor& block_table,
                      const Tensor& seq_lens, const Tensor& num_new, bool) {
  const char* op = "summarise";
  const OnDevice on(op, k_cache, {&page_min, &page_max, &block_table, &seq_lens, &num_new});
  const SummariseParams p = summarise_params(k_cache, page_min, page_max, block_table, seq_lens, num_new, false, op);
  on.expect_success(quest_summarise(&p, on.stream()));
}

static void append_summarise(const Tensor& key, const Tensor& value, Tensor k_cache, Tensor v_cache, Tensor page_min,
                             Tensor page_max, const Tensor& block_table, const Tensor& seq_lens,
                             const Tensor& slot_mapping) {
  const char* op = "append_summarise";
  const OnDevice on(op, key,
                    {&value, &k_cache, &v_cache, &page_min, &page_max, &block_table, &seq_lens, &slot_mapping});
  const AppendParams rows = append_params(key, value, k_cache, v_cache, slot_mapping, false, op);
  const SummariseParams p = summarise_params(k_cache, page_min, page_max, block_table, seq_lens, seq_lens, false, op);
  expect(key.size(0) == p.seq.batch, op, "key", "must have one row for each of seq_lens");
  on.expect_success(quest_append_summarise(&rows, &p, on.stream()));
}

static std::tuple<Tensor, Tensor> merge(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                                        const Tensor& lse_b) {
  const OnDevice on("merge", out_a, {&lse_a, &out_b, &lse_b});
  MergeParams p = merge_params(out_a, lse_a, out_b, lse_b, "merge");
  auto result = allocate(p, out_a, lse_a);
  on.expect_success(quest_merge(&p, p.dim ? lse_a.numel() : 0, on.stream()));
  return result;
}

}  // namespace quest_cuda

#ifdef QUEST_EMULATE
STABLE_TORCH_LIBRARY_IMPL(quest_cuda, CPU, m) {
#else
STABLE_TORCH_LIBRARY_IMPL(quest_cuda, CUDA, m) {
#endif
  m.impl("append", TORCH_BOX(&quest_cuda::append));
  m.impl("summarise", TORCH_BOX(&quest_cuda::summarise));
  m.impl("append_summarise", TORCH_BOX(&quest_cuda::append_summarise));
  m.impl("merge", TORCH_BOX(&quest_cuda::merge));
}
