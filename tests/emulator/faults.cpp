// Kernels with a fault each, that the emulator must find: faults NAME SEED prints what it said, or "nothing found".
#include <iostream>

#include "emulator/ptx.h"

namespace {

constexpr int kThreads = 64;

// Each thread reads what its neighbour wrote: right only behind a barrier.
template <bool kBarrier>
__global__ void neighbour(int* out) {
  QUEST_SHARED(shared);
  int* x = reinterpret_cast<int*>(shared);
  x[threadIdx.x] = threadIdx.x;
  if (kBarrier) __syncthreads();
  out[threadIdx.x] = x[(threadIdx.x + 1) % kThreads];
}

__global__ void divergent_barrier(int* out) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = 1;
}

__global__ void barrier_not_reached(int* out) {
  if (threadIdx.x < 40) __syncthreads();
  if (threadIdx.x >= 40) out[0] = __shfl_sync(~0u, 1, 0);  // lanes of one warp wait in different places
}

__global__ void different_warp_functions(int* out) {
  if (threadIdx.x % 2)
    out[0] = __shfl_sync(~0u, 1, 0);
  else
    out[1] = __ballot_sync(~0u, true);
}

__global__ void copy_not_waited_for(int* out) {
  QUEST_SHARED(shared);
  quest::cuda::cp_async(shared + threadIdx.x * 16, out, true);
  quest::cuda::cp_async_commit();
}

template <int kPending>
__global__ void copy_read(int* out) {
  QUEST_SHARED(shared);
  quest::cuda::cp_async(shared + threadIdx.x * 16, out + threadIdx.x * 4, true);
  quest::cuda::cp_async_commit();
  quest::cuda::cp_async_wait<kPending>();
  const int x = reinterpret_cast<int*>(shared)[threadIdx.x * 4];
  quest::cuda::cp_async_wait<0>();
  out[threadIdx.x] = x;
}

__global__ void beyond_shared_memory(int*) {
  QUEST_SHARED(shared);
  shared[kThreads * 16 + threadIdx.x] = 1;
}

// Right only if block 0 is the first to run.
__global__ void order_of_blocks(int* out) {
  if (blockIdx.x == 0) out[0] = 7;
  if (threadIdx.x == 0) out[1 + blockIdx.x] = out[0];
}

// The last block to end adds up what all have written: right only if each says that it is done when all its threads
// are.
template <bool kBarrier>
__global__ void last_block_adds_up(int* out) {
  QUEST_SHARED(last);
  unsigned* done = reinterpret_cast<unsigned*>(out + 1);
  int* parts = out + 2;
  parts[blockIdx.x * kThreads + threadIdx.x] = 1;
  __threadfence();
  if (kBarrier) __syncthreads();
  if (threadIdx.x == 0) *last = atomicAdd(done, 1) == gridDim.x - 1;
  __syncthreads();
  if (!*last || threadIdx.x > 0) return;
  out[0] = 0;
  for (unsigned i = 0; i < gridDim.x * kThreads; i++) out[0] += parts[i];
}

bool in_order(const int* out, int n, int first) {
  for (int i = 0; i < n; i++)
    if (out[i] != (i + first) % n) return false;
  return true;
}

void run(const std::string& name) {
  std::vector<int> memory(kThreads * 8 + 2, 0);
  int* out = memory.data();
  auto launch = [&](auto* kernel, int* to, int shared_bytes = kThreads* 16, int blocks = 1) {
    QUEST_LAUNCH(kernel, blocks, kThreads, shared_bytes, nullptr, to);
  };
  auto expect = [](bool right) {
    if (!right) throw std::runtime_error("wrong result");
  };
  if (name == "barrier") {
    launch(&neighbour<true>, out);
    expect(in_order(out, kThreads, 1));
  } else if (name == "missing_barrier") {
    launch(&neighbour<false>, out);
    expect(in_order(out, kThreads, 1));
  } else if (name == "divergent_barrier") {
    launch(&divergent_barrier, out);
  } else if (name == "barrier_not_reached") {
    launch(&barrier_not_reached, out);
  } else if (name == "different_warp_functions") {
    launch(&different_warp_functions, out);
  } else if (name == "copy_not_waited_for") {
    launch(&copy_not_waited_for, out);
  } else if (name == "copy_read_after_waiting") {
    launch(&copy_read<0>, out);
    expect(out[0] == 0);
  } else if (name == "copy_read_too_early") {
    launch(&copy_read<1>, out);
    expect(out[0] == 0);
  } else if (name == "misaligned_copy") {
    launch(&copy_read<0>, out + 1);
  } else if (name == "beyond_shared_memory") {
    launch(&beyond_shared_memory, out);
  } else if (name == "too_much_shared_memory") {
    launch(&neighbour<true>, out, 64 << 10);
  } else if (name == "order_of_blocks") {
    launch(&order_of_blocks, out, 0, 8);
    for (int i = 1; i <= 8; i++) expect(out[i] == 7);
  } else if (name == "said_too_early" || name == "said_in_time") {
    launch(name == "said_in_time" ? &last_block_adds_up<true> : &last_block_adds_up<false>, out, 16, 8);
    expect(out[0] == 8 * kThreads);
  } else {
    throw std::runtime_error("no such fault");
  }
}

}  // namespace

int main(int, char** argv) {
  emulator::config = {emulator::Order::shuffled, static_cast<unsigned>(atoi(argv[2]))};
  try {
    run(argv[1]);
    std::cout << "nothing found\n";
  } catch (const std::exception& e) {
    std::cout << e.what() << "\n";
  }
}
