// The ops of namespace quest_cuda: arguments to params (arguments.h), params to the launchers (launch.h). Values are
// not looked at, which would wait for the device: kernels skip what is out of range.
#include <torch/csrc/stable/library.h>

#include "arguments.h"
#include "cuda/device.h"
#include "cuda/launch.h"
#include "cuda/layout.h"

namespace quest_cuda {

using namespace quest;
using cuda::kChunk, cuda::kMaxDim;

static void append(const Tensor& key, const Tensor& value, Tensor k_cache, Tensor v_cache, const Tensor& slot_mapping,
                   bool) {
  const char* op = "append";
  const OnDevice on(op, key, {&value, &k_cache, &v_cache, &slot_mapping});
  const AppendParams p =
      append_params(rows_of(key, op, "key"), rows_of(value, op, "value"), k_cache, v_cache, slot_mapping, false, op);
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
  const AppendParams rows =
      append_params(rows_of(key, op, "key"), rows_of(value, op, "value"), k_cache, v_cache, slot_mapping, false, op);
  const SummariseParams p = summarise_params(k_cache, page_min, page_max, block_table, seq_lens, seq_lens, false, op);
  expect(key.size(0) == p.seq.batch, op, "key", "must have one row for each of seq_lens");
  on.expect_success(quest_append_summarise(&rows, &p, on.stream()));
}

// ---- attend ----

// Whether every row of a pool is a whole number of copies at an address that they can have.
static bool rows_are_copyable(const Tensor& x) {
  const int64_t size = x.element_size();
  if (reinterpret_cast<uintptr_t>(data_of(x)) % kChunk || x.size(3) * size % kChunk) return false;
  for (int i = 0; i < 3; i++)
    if (x.size(i) > 1 && x.stride(i) * size % kChunk) return false;
  return true;
}

static std::string reason(const Tensor& query, const Tensor& k_cache, const Tensor& v_cache) {
  if (k_cache.size(3) > kMaxDim || v_cache.size(3) > kMaxDim) return "head_dim is above " + std::to_string(kMaxDim);
  if (k_cache.scalar_type() != ScalarType::Float && k_cache.scalar_type() != query.scalar_type())
    return "a 16-bit cache needs a query of its dtype";
  const std::pair<const char*, const Tensor*> pools[] = {{"k_cache", &k_cache}, {"v_cache", &v_cache}};
  for (const auto& [name, pool] : pools)
    if (!rows_are_copyable(*pool))
      return std::string(name) + ": rows must be multiples of 16 bytes, at multiples of 16 bytes";
  return "";
}

static std::tuple<Tensor, Tensor> attend(const Tensor& query, const Tensor& k_cache, const Tensor& v_cache,
                                         const Tensor& block_table, const Tensor& seq_lens,
                                         std::optional<Tensor> page_idx, int64_t page_size, double softmax_scale,
                                         double softcap, std::optional<Tensor> sinks, int64_t window, bool) {
  const char* op = "attend";
  const OnDevice on(
      op, query,
      {&k_cache, &v_cache, &block_table, &seq_lens, page_idx ? &*page_idx : &query, sinks ? &*sinks : &query});
  AttendParams p = attend_params(query, k_cache, v_cache, block_table, seq_lens, page_idx, page_size, softmax_scale,
                                 softcap, sinks, window, false, op);
  const std::string why_not = reason(query, k_cache, v_cache);
  if (!why_not.empty()) fail(op, ": the CUDA kernel can't run: ", why_not);
  auto result = allocate(p, query.scalar_type(), query.device());
  int64_t partial_size = 0;
  on.expect_success(quest_plan_attend(&p, &partial_size));
  expect(p.units() * p.num_splits <= INT32_MAX, op, "query", "too many rows and heads for one launch");
  Tensor partial;
  if (partial_size > 0) {
    partial = new_tensor({partial_size}, ScalarType::Float, query.device());
    p.partial = static_cast<float*>(data_of(partial));
  }
  on.expect_success(quest_attend(&p, on.stream()));
  return result;
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
  m.impl("attend", TORCH_BOX(&quest_cuda::attend));
  m.impl("reason", TORCH_BOX(&quest_cuda::reason));
  m.impl("merge", TORCH_BOX(&quest_cuda::merge));
}
