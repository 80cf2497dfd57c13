#include "arguments.h"

#include <algorithm>

namespace quest {

static GroupRule rule_of(const std::string& name, const char* op) {
  if (name == "softmax") return GroupRule::softmax;
  if (name == "relative") return GroupRule::relative;
  if (name == "per_head") return GroupRule::per_head;
  fail(op, ": group_rule: expected softmax, relative or per_head, got ", name);
}

AppendParams append_params(const SizedRows& key, const SizedRows& value, const Tensor& k_cache, const Tensor& v_cache,
                           const Tensor& slot_mapping, bool check, const char* op) {
  AppendParams p;
  p.key = key;
  p.value = value;
  p.k_cache = pool_of(k_cache, op, "k_cache");
  p.v_cache = pool_of(v_cache, op, "v_cache");
  p.q_len = key.q_len;
  p.num_tokens = key.batch * key.q_len;
  p.num_kv_heads = k_cache.size(1);
  p.block_size = k_cache.size(2);
  p.num_slots = k_cache.size(0) * p.block_size;
  expect(p.k_cache.dtype == p.v_cache.dtype && key.dtype == p.k_cache.dtype && value.dtype == p.k_cache.dtype, op,
         "key, value", "must have the dtype of the cache");
  expect(v_cache.size(0) == k_cache.size(0) && v_cache.size(1) == p.num_kv_heads && v_cache.size(2) == p.block_size, op,
         "v_cache", "must match k_cache in all but the last dimension");
  expect(value.batch == key.batch && value.q_len == p.q_len && key.num_heads == p.num_kv_heads &&
             value.num_heads == p.num_kv_heads && key.dim == p.k_cache.dim && value.dim == p.v_cache.dim,
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

SummariseParams summarise_params(const Tensor& k_cache, const Tensor& page_min, const Tensor& page_max,
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

SummariseParams summarise_params(const Tensor& k_cache, const Tensor& page_min, const Tensor& page_max,
                                 const Tensor& block_table, const Tensor& seq_lens, const Tensor& num_new, bool check,
                                 const char* op) {
  expect(k_cache.dim() == 4 && page_min.dim() == 4 && page_max.dim() == 4, op, "k_cache", "expected 4 dimensions");
  const int64_t block_size = k_cache.size(2), pages = page_min.size(2);
  expect(pages >= 1 && block_size % pages == 0, op, "page_min", "pages per block must divide block_size");
  SummariseParams p = summarise_params(
      k_cache, page_min, page_max,
      sequences_of(block_table, seq_lens, k_cache.size(0), block_size, block_size / pages, 1, -1, check, op), op);
  p.num_new = int32_of(num_new, p.seq.batch, op, "num_new");
  return p;
}

ScoreParams score_params(const SizedRows& query, const Tensor& page_min, const Tensor& page_max, const Sequences& seq,
                         double softmax_scale, double slack, const std::string& group_rule, const char* op) {
  ScoreParams p;
  p.seq = seq;
  p.query = query;
  p.page_min = pool_of(page_min, op, "page_min");
  p.page_max = pool_of(page_max, op, "page_max");
  p.num_heads = query.num_heads;
  p.num_kv_heads = page_min.size(1);
  p.slack = static_cast<float>(slack);
  p.softmax_scale = static_cast<float>(softmax_scale);
  p.rule = rule_of(group_rule, op);
  expect(p.num_kv_heads >= 1 && p.num_heads >= 1 && p.num_heads % p.num_kv_heads == 0, op, "query",
         "num_heads must be a multiple of num_kv_heads");
  expect(query.batch == seq.batch && query.dim == p.page_min.dim && query.dim == p.page_max.dim &&
             page_max.size(0) == seq.num_blocks && page_max.size(1) == p.num_kv_heads &&
             page_min.size(2) * seq.page_size == seq.block_size && page_max.size(2) == page_min.size(2) &&
             p.page_min.dtype == p.page_max.dtype,
         op, "page_min, page_max", "must match each other, the query and the block table");
  return p;
}

Tensor allocate(ScoreParams& p, Tensor& raw, Tensor& weights) {
  p.weight_dim = (p.query.dim + 31) / 32 * 32;
  weights = new_tensor({p.seq.batch, p.seq.q_len, 2, p.num_heads, p.weight_dim}, ScalarType::Float);
  p.weights = static_cast<float*>(data_of(weights));
  raw = new_tensor({p.seq.batch, p.seq.q_len, p.num_heads, p.seq.max_pages}, ScalarType::Float);
  p.raw = static_cast<float*>(data_of(raw));
  p.scores = nullptr;
  if (p.rule == GroupRule::per_head) return raw;
  Tensor scores = new_tensor({p.seq.batch, p.seq.q_len, p.num_kv_heads, p.seq.max_pages}, ScalarType::Float);
  p.scores = static_cast<float*>(data_of(scores));
  return scores;
}

// The largest power of two that divides a number of pages, at most 16.
static int64_t lanes_of(int64_t pages) { return std::min<int64_t>(16, pages & -pages); }

Packed packed_of(const Tensor& packed, const Tensor& k_cache, int64_t page_size, int64_t coarse_size, int64_t bits,
                 const char* op) {
  expect(bits == 8 || bits == 4 || bits == 2, op, "bits", "must be 8, 4 or 2");
  const int64_t block_size = k_cache.size(2), group_size = coarse_size ? coarse_size : page_size;
  expect(page_size >= 1 && block_size % (4 * group_size) == 0, op, "page_size, coarse_size",
         "a block must hold a multiple of 4 pages, of 4 coarse ones if there are any");
  const int64_t ratio = coarse_size / page_size;
  expect(coarse_size == 0 || (coarse_size % page_size == 0 && ratio >= 4 && ratio <= 64 && (ratio & (ratio - 1)) == 0),
         op, "coarse_size", "must be 4, 8, 16, 32 or 64 pages");
  Packed p;
  p.bits = static_cast<int>(bits);
  p.coarse = coarse_size > 0;
  p.single = page_size == 1;
  expect(!p.single || (p.coarse ? ratio >= 16 : block_size % 16 == 0), op, "coarse_size",
         "pages of one token come in groups of 16");
  p.dim = (k_cache.size(3) + 31) / 32 * 32;
  p.coarse_words = p.dim * bits / 16;
  p.words = p.single ? p.coarse_words / 2 : p.coarse_words;
  p.pages = block_size / page_size;
  p.group_pages = p.coarse ? ratio : lanes_of(p.pages);
  p.groups = p.pages / p.group_pages;
  p.lanes = lanes_of(p.group_pages);
  p.coarse_lanes = p.coarse ? lanes_of(p.groups) : 1;
  p.coarse_at = 4 * p.dim;
  p.fine_at = p.coarse_at + (p.coarse ? p.groups * p.coarse_words * 4 : 0);
  const int64_t num_bytes = p.fine_at + p.pages * p.words * 4;
  expect(packed.scalar_type() == ScalarType::Byte && packed.dim() == 3 && packed.size(0) == k_cache.size(0) &&
             packed.size(1) == k_cache.size(1) && packed.size(2) == num_bytes && packed.stride(2) == 1,
         op, "packed", "expected uint8 [num_blocks, num_kv_heads, num_bytes] as the packing says");
  p.data = static_cast<char*>(data_of(packed));
  p.stride_block = packed.stride(0);
  p.stride_head = packed.stride(1);
  expect(reinterpret_cast<uintptr_t>(p.data) % 4 == 0 && p.stride_block % 4 == 0 && p.stride_head % 4 == 0, op,
         "packed", "must lie at multiples of 4 bytes");
  return p;
}

PackedScoreParams packed_score_params(const SizedRows& query, const Tensor& k_cache, const Packed& packed,
                                      const Sequences& seq, double coarse_keep, int64_t coarse_limit, int64_t budget,
                                      double budget_fraction, int64_t sink_pages, int64_t recent_pages,
                                      double softmax_scale, double slack, double coarse_slack,
                                      const std::string& group_rule, const char* op) {
  PackedScoreParams p;
  p.seq = seq;
  p.query = query;
  p.k_cache = pool_of(k_cache, op, "k_cache");
  p.packed = packed;
  p.num_heads = query.num_heads;
  p.num_kv_heads = k_cache.size(1);
  p.sink_pages = sink_pages;
  p.recent_pages = recent_pages;
  p.budget = budget;
  p.budget_fraction = budget_fraction;
  p.coarse_keep = coarse_keep;
  p.coarse_limit = coarse_limit;
  p.slack = static_cast<float>(slack);
  p.coarse_slack = static_cast<float>(coarse_slack);
  p.softmax_scale = static_cast<float>(softmax_scale);
  p.rule = rule_of(group_rule, op);
  p.max_weight = std::min<int64_t>(32766, INT32_MAX / (2 * packed.dim * (packed.cells() - 1)));
  expect(p.num_kv_heads >= 1 && p.num_heads >= 1 && p.num_heads % p.num_kv_heads == 0, op, "query",
         "num_heads must be a multiple of num_kv_heads");
  expect(query.batch == seq.batch && query.dim == p.k_cache.dim && k_cache.size(0) == seq.num_blocks, op, "query",
         "must match k_cache and the block table");
  expect(coarse_keep > 0 && coarse_keep <= 1 && coarse_limit >= 1, op, "coarse_keep, coarse_limit",
         "must be in (0, 1], and at least 1");
  expect(sink_pages >= 0 && recent_pages >= 1 && budget >= 0 && budget_fraction >= 0, op, "budget",
         "budget and forced pages must not be negative, the newest page is always read");
  return p;
}

PackedScratch allocate(PackedScoreParams& p) {
  const Sequences& seq = p.seq;
  p.count();
  const int64_t tokens = seq.batch * seq.q_len, units = tokens * p.num_kv_heads, heads = tokens * p.num_heads;
  const int64_t coarse = p.packed.coarse ? p.max_groups : 0;
  PackedScratch scratch;
  scratch.floats = new_tensor({heads * (8 * p.packed.dim + 1 + coarse) + units * coarse}, ScalarType::Float);
  p.weights = static_cast<float*>(data_of(scratch.floats));
  p.largest = p.weights + heads * 8 * p.packed.dim;
  p.coarse_raw = p.largest + heads;
  p.coarse_scores = p.coarse_raw + heads * coarse;
  scratch.kept = new_tensor({units * (p.max_kept + 1)}, ScalarType::Int);
  p.kept = static_cast<int32_t*>(data_of(scratch.kept));
  p.num_kept = p.kept + units * p.max_kept;
  scratch.raw = new_tensor({seq.batch, seq.q_len, p.num_heads, p.max_candidates}, ScalarType::Float);
  p.raw = static_cast<float*>(data_of(scratch.raw));
  p.scores = nullptr;
  scratch.candidates = scratch.raw;
  if (p.rule != GroupRule::per_head) {
    scratch.candidates = new_tensor({seq.batch, seq.q_len, p.num_kv_heads, p.max_candidates}, ScalarType::Float);
    p.scores = static_cast<float*>(data_of(scratch.candidates));
  }
  return scratch;
}

SelectParams select_params(const Sequences& seq, const Tensor& scores, int64_t budget, double budget_fraction,
                           int64_t sink_pages, int64_t recent_pages, const Tensor& page_idx, const Tensor& counts,
                           const char* op) {
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
  p.packed = nullptr;
  return p;
}

AttendParams attend_params(const SizedRows& query, const Tensor& k_cache, const Tensor& v_cache, const Sequences& seq,
                           double softmax_scale, double softcap, const std::optional<Tensor>& sinks, const char* op) {
  AttendParams p;
  p.seq = seq;
  p.query = query;
  p.k_cache = pool_of(k_cache, op, "k_cache");
  p.v_cache = pool_of(v_cache, op, "v_cache");
  p.num_heads = query.num_heads;
  p.sel_heads = p.num_kv_heads = k_cache.size(1);
  p.softmax_scale = static_cast<float>(softmax_scale);
  p.softcap = static_cast<float>(softcap);
  p.every_page = true;
  p.page_idx = nullptr;
  p.idx_stride_batch = p.idx_stride_token = p.idx_stride_head = p.max_selected = 0;
  expect(p.num_kv_heads >= 1 && p.num_heads >= 1 && p.num_heads % p.num_kv_heads == 0, op, "query",
         "num_heads must be a multiple of num_kv_heads");
  expect(query.batch == seq.batch && query.dim == p.k_cache.dim && p.k_cache.dtype == p.v_cache.dtype &&
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

void choose_pages(AttendParams& p, const Tensor& page_idx, const char* op) {
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

AttendParams attend_params(const Tensor& query, const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_table,
                           const Tensor& seq_lens, const std::optional<Tensor>& page_idx, int64_t page_size,
                           double softmax_scale, double softcap, const std::optional<Tensor>& sinks, int64_t window,
                           bool check, const char* op) {
  expect(k_cache.dim() == 4 && v_cache.dim() == 4, op, "k_cache, v_cache", "expected 4 dimensions");
  const SizedRows rows = rows_of(query, op, "query");
  const Sequences seq =
      sequences_of(block_table, seq_lens, k_cache.size(0), k_cache.size(2), page_size, rows.q_len, window, check, op);
  AttendParams p = attend_params(rows, k_cache, v_cache, seq, softmax_scale, softcap, sinks, op);
  if (page_idx) choose_pages(p, *page_idx, op);
  return p;
}

std::tuple<Tensor, Tensor> allocate(AttendParams& p, ScalarType out_dtype,
                                    std::optional<torch::stable::Device> device) {
  const Sequences& seq = p.seq;
  const int64_t group = p.num_heads / p.sel_heads;
  p.num_tiles = (group + kTileHeads - 1) / kTileHeads;
  p.tile_heads = (group + p.num_tiles - 1) / p.num_tiles;
  p.num_splits = 1;
  p.partial = nullptr;
  Tensor out = new_tensor({seq.batch, seq.q_len, p.num_heads, p.v_cache.dim}, out_dtype, device);
  Tensor lse = new_tensor({seq.batch, seq.q_len, p.num_heads}, ScalarType::Float, device);
  p.out = rows_of(out, "attend", "out");
  p.lse = static_cast<float*>(data_of(lse));
  return {out, lse};
}

MergeParams merge_params(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b,
                         const char* op) {
  const Tensor* tensors[] = {&out_a, &lse_a, &out_b, &lse_b};
  for (const Tensor* x : tensors) expect(x->is_contiguous(), op, "out, lse", "must be contiguous");
  expect(out_a.dim() >= 1 && out_a.numel() == out_b.numel() && out_a.scalar_type() == out_b.scalar_type(), op, "out_b",
         "must match out_a");
  MergeParams p;
  p.dtype = dtype_of(out_a, op, "out_a");
  p.dim = out_a.size(out_a.dim() - 1);
  expect(lse_a.scalar_type() == ScalarType::Float && lse_b.scalar_type() == ScalarType::Float &&
             lse_a.numel() == lse_b.numel() && (p.dim == 0 || lse_a.numel() == out_a.numel() / p.dim),
         op, "lse_a, lse_b", "expected float32, one value for each row of out");
  p.out_a = data_of(out_a);
  p.out_b = data_of(out_b);
  p.lse_a = static_cast<const float*>(data_of(lse_a));
  p.lse_b = static_cast<const float*>(data_of(lse_b));
  return p;
}

std::tuple<Tensor, Tensor> allocate(MergeParams& p, const Tensor& out_like, const Tensor& lse_like) {
  Tensor out = torch::stable::empty_like(out_like), lse = torch::stable::empty_like(lse_like);
  p.out = data_of(out);
  p.lse = static_cast<float*>(data_of(lse));
  return {out, lse};
}

}  // namespace quest
