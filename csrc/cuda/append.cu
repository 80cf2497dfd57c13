// append: K and V rows into their slots. summarise: minimum and maximum of the pages touched. append_summarise: both in
// one launch, a block for each row and KV head.
#include <algorithm>

#include "cuda/launch.h"
#include "cuda/types.cuh"

namespace quest::cuda {

constexpr int kThreads = 128;
constexpr int kPagesPerTurn = 8;  // summarised by a block at a time
constexpr int kMaxBlocks = 4096;  // of summarise, more take turns

// ---- rows into slots ----

// Copy rows[b, t, head] to a slot, by all threads of a group.
template <typename T>
__device__ void store_row(const Rows& rows, const Pool& pool, int64_t b, int64_t t, int64_t head, int64_t slot,
                          int64_t block_size, int first, int step) {
  const T* from = static_cast<const T*>(rows.at(b, t, head));
  T* to = static_cast<T*>(pool.data) + slot / block_size * pool.stride_block + head * pool.stride_head +
          slot % block_size * pool.stride_row;
  for (int d = first; d < pool.dim; d += step) to[d] = from[d];
}

template <typename T>
__device__ void store_token(const AppendParams& p, int64_t token, int64_t head, int first, int step) {
  const int64_t slot = p.slots[token], b = token / p.q_len, t = token % p.q_len;
  if (slot < 0 || slot >= p.num_slots) return;
  store_row<T>(p.key, p.k_cache, b, t, head, slot, p.block_size, first, step);
  store_row<T>(p.value, p.v_cache, b, t, head, slot, p.block_size, first, step);
}

// A block for each token, a warp for each KV head in turn.
template <typename T>
__global__ void __launch_bounds__(kThreads) append(const __grid_constant__ AppendParams p) {
  for (int64_t head = threadIdx.x / 32; head < p.num_kv_heads; head += kThreads / 32)
    store_token<T>(p, blockIdx.x, head, threadIdx.x % 32, 32);
}

// ---- summaries ----

// NaN stays: a page that holds one has NaN in that channel.
__device__ __forceinline__ float lower(float m, float x) { return x < m || x != x ? x : m; }
__device__ __forceinline__ float upper(float m, float x) { return x > m || x != x ? x : m; }

// Pages [begin, end) of a row, a thread for each channel of a page.
template <typename T>
__device__ void refresh(const SummariseParams& p, int64_t row, int64_t head, int64_t begin, int64_t end) {
  const Sequences& seq = p.seq;
  const int64_t length = seq.length(row), pages_per_block = seq.block_size / seq.page_size;
  const int dim = static_cast<int>(p.k_cache.dim), items = static_cast<int>(end - begin) * dim;
  for (int i = threadIdx.x; i < items; i += kThreads) {
    const int64_t page = begin + i / dim, left = length - page * seq.page_size;
    const int64_t block = seq.block(row, page / pages_per_block), offset = page % pages_per_block;
    if (block < 0) continue;
    auto at = [&](const Pool& pool, int64_t r) {
      return static_cast<T*>(pool.data) + block * pool.stride_block + head * pool.stride_head + r * pool.stride_row +
             i % dim;
    };
    const T* key = at(p.k_cache, offset * seq.page_size);
    const int tokens = static_cast<int>(left < seq.page_size ? left : seq.page_size);
    float low = to_float(*key), high = low;
#pragma unroll 8
    for (int j = 1; j < tokens; j++) {
      const float x = to_float(key[j * p.k_cache.stride_row]);
      low = lower(low, x);
      high = upper(high, x);
    }
    from_float(low, at(p.page_min, offset));
    from_float(high, at(p.page_max, offset));
  }
}

__device__ __forceinline__ int64_t end_page(const Sequences& seq, int64_t row) {
  return (seq.length(row) + seq.page_size - 1) / seq.page_size;
}
__device__ __forceinline__ int64_t first_page(const Sequences& seq, int64_t row, int64_t num_new) {
  if (num_new <= 0) return end_page(seq, row);
  const int64_t old = seq.length(row) - num_new;
  return (old > 0 ? old : 0) / seq.page_size;
}

// Block x takes every turns-th run of pages of one row and KV head.
template <typename T>
__global__ void __launch_bounds__(kThreads) summarise(const __grid_constant__ SummariseParams p, int turns) {
  const int64_t row = blockIdx.x / turns / p.num_kv_heads, head = blockIdx.x / turns % p.num_kv_heads;
  const int64_t end = end_page(p.seq, row), step = int64_t{turns} * kPagesPerTurn;
  int64_t begin = first_page(p.seq, row, p.num_new[row]) + blockIdx.x % turns * kPagesPerTurn;
  for (; begin < end; begin += step)
    refresh<T>(p, row, head, begin, begin + kPagesPerTurn < end ? begin + kPagesPerTurn : end);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    append_summarise(const __grid_constant__ AppendParams rows, const __grid_constant__ SummariseParams p) {
  const int64_t row = blockIdx.x / p.num_kv_heads, head = blockIdx.x % p.num_kv_heads;
  bool stores = false;
  for (int64_t t = 0; t < rows.q_len; t++) stores |= rows.slots[row * rows.q_len + t] >= 0;
  if (!stores) return;  // such a row may share its open page with a longer one
  for (int64_t t = threadIdx.x / 32; t < rows.q_len; t += kThreads / 32)
    store_token<T>(rows, row * rows.q_len + t, head, threadIdx.x % 32, 32);
  __syncthreads();  // the block sees the rows it has stored
  refresh<T>(p, row, head, first_page(p.seq, row, rows.q_len), end_page(p.seq, row));
}

}  // namespace quest::cuda

using namespace quest;

cudaError_t quest_append(const AppendParams* p, cudaStream_t stream) {
  if (p->num_tokens == 0 || p->num_kv_heads == 0) return cudaSuccess;
  return cuda::by_dtype(p->key.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    QUEST_LAUNCH(cuda::append<T>, p->num_tokens, cuda::kThreads, 0, stream, *p);
    return cudaGetLastError();
  });
}

cudaError_t quest_summarise(const SummariseParams* p, cudaStream_t stream) {
  const int64_t rows = p->seq.batch * p->num_kv_heads;
  if (rows == 0 || p->seq.max_pages == 0) return cudaSuccess;
  const int64_t most = (p->seq.max_pages + cuda::kPagesPerTurn - 1) / cuda::kPagesPerTurn;
  const auto turns = static_cast<int>(std::clamp<int64_t>(cuda::kMaxBlocks / rows, 1, most));
  return cuda::by_dtype(p->k_cache.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    QUEST_LAUNCH(cuda::summarise<T>, rows * turns, cuda::kThreads, 0, stream, *p, turns);
    return cudaGetLastError();
  });
}

cudaError_t quest_append_summarise(const AppendParams* rows, const SummariseParams* p, cudaStream_t stream) {
  const int64_t blocks = p->seq.batch * p->num_kv_heads;
  if (blocks == 0 || rows->q_len == 0) return cudaSuccess;
  return cuda::by_dtype(p->k_cache.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    QUEST_LAUNCH(cuda::append_summarise<T>, blocks, cuda::kThreads, 0, stream, *rows, *p);
    return cudaGetLastError();
  });
}
