// attend on the host: how the work is split, and which kernel does it.
#include <algorithm>

#include "cuda/attend.cuh"
#include "cuda/launch.h"

namespace quest::cuda {

extern template cudaError_t launch_attend<float>(const AttendParams&, cudaStream_t);
extern template cudaError_t launch_attend<bf16>(const AttendParams&, cudaStream_t);
extern template cudaError_t launch_attend<f16>(const AttendParams&, cudaStream_t);

constexpr int64_t kTokensPerSplit = 128;  // at least
constexpr double kGoodEnough = 0.9;

// The most tokens that a unit attends to, as far as shapes say.
static int64_t most_tokens(const AttendParams& p) {
  const int64_t pages = p.every_page ? p.seq.max_pages : std::min(p.max_selected, p.seq.max_pages);
  const int64_t tokens = pages * p.seq.page_size;
  return p.seq.window < 0 ? tokens : std::min(tokens, p.seq.window + p.seq.page_size);
}

// How many blocks the device runs at a time.
static cudaError_t count_slots(const AttendParams& p, int64_t* slots) {
  int device = 0, processors = 0, shared = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  const int used = by_dtype(p.k_cache.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return by_dim(p, [](auto dim) { return Layout<T, decltype(dim)::value>::kSharedUsed; });
  });
  constexpr int kReserved = 1024;  // of each block's shared memory, by CUDA
  *slots = std::max(1, shared / (used + kReserved)) * int64_t{processors};
  return error;
}

// The fewest splits that leave about as few slots idle, in the last wave of blocks, as any number does.
static int64_t splits_for(int64_t units, int64_t most, int64_t slots) {
  auto busy = [&](int64_t splits) {
    const int64_t blocks = units * splits, waves = (blocks + slots - 1) / slots;
    return static_cast<double>(blocks) / static_cast<double>(waves * slots);
  };
  double best = 0;
  for (int64_t n = 1; n <= most; n++) best = std::max(best, busy(n));
  int64_t n = 1;
  while (busy(n) < kGoodEnough * best) n++;
  return n;
}

}  // namespace quest::cuda

using namespace quest;

cudaError_t quest_plan_attend(AttendParams* p, int64_t* partial_size) {
  int64_t slots = 1;
  const cudaError_t error = cuda::count_slots(*p, &slots);
  const int64_t most = std::min<int64_t>(cuda::kMaxSplits, cuda::most_tokens(*p) / cuda::kTokensPerSplit);
  p->num_splits = p->units() > 0 && most > 1 ? cuda::splits_for(p->units(), most, slots) : 1;
  const int64_t rows = p->units() * p->num_splits * p->tile_heads;
  *partial_size = p->num_splits > 1 ? rows * (p->v_cache.dim + 2) + p->units() : 0;
  return error;
}

cudaError_t quest_attend(const AttendParams* p, cudaStream_t stream) {
  if (p->units() == 0) return cudaSuccess;
  if (p->num_splits > 1) {
    const cudaError_t error = cudaMemsetAsync(cuda::Partial(*p).done, 0, p->units() * sizeof(unsigned), stream);
    if (error != cudaSuccess) return error;
  }
  return cuda::by_dtype(p->k_cache.dtype, [&](auto* type) {
    return cuda::launch_attend<std::remove_pointer_t<decltype(type)>>(*p, stream);
  });
}
