// The part of the CUDA runtime that launchers call, on a small GPU.
#pragma once

#include <map>
#include <memory>

#include "emulator/block.h"

using cudaStream_t = struct CUstream_st*;
enum cudaError_t { cudaSuccess = 0 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount, cudaDevAttrMaxSharedMemoryPerMultiprocessor };

inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? 8 : 100 << 10;
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t) {
  memset(p, value, bytes);
  return cudaSuccess;
}

namespace emulator {

constexpr size_t kSharedBytes = 48 << 10, kMostSharedBytes = 99 << 10;  // of a block, as for compute capability 8.6
inline std::map<const void*, size_t> shared_limits;

[[noreturn]] inline void refuse(const std::string& why) { throw std::runtime_error("launch refused: " + why); }

template <typename Kernel>
void check_launch(Kernel* kernel, dim3 grid, dim3 size, size_t shared_bytes) {
  const size_t threads = size_t{size.x} * size.y * size.z;
  if (!grid.x || !grid.y || !grid.z || !threads) refuse("an empty grid or block");
  if (grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535) refuse("the grid is too large");
  if (threads > 1024) refuse("more than 1024 threads");
  const auto limit = shared_limits.find(reinterpret_cast<const void*>(kernel));
  if (shared_bytes > (limit == shared_limits.end() ? kSharedBytes : limit->second)) refuse("too much shared memory");
}

// One block after the other; in the shuffled order some at a time, of which the first runs as long as it stays the
// first.
inline void run_grid(const std::function<void()>& kernel, dim3 grid, dim3 size, size_t shared_bytes) {
  static std::vector<std::unique_ptr<Block>> idle;
  std::vector<std::unique_ptr<Block>> busy;
  Random random(config.seed);
  Patience patience;
  std::vector<size_t> waiting = order_of(size_t{grid.x} * grid.y * grid.z, random);
  std::reverse(waiting.begin(), waiting.end());
  const size_t at_a_time = config.order == Order::shuffled ? 3 : 1;
  while (!waiting.empty() || !busy.empty()) {
    while (busy.size() < at_a_time && !waiting.empty()) {
      auto block = idle.empty() ? std::make_unique<Block>() : std::move(idle.back());
      if (!idle.empty()) idle.pop_back();
      const size_t i = waiting.back();
      waiting.pop_back();
      block->size = size;
      block->grid = grid;
      block->index = {static_cast<unsigned>(i % grid.x), static_cast<unsigned>(i / grid.x % grid.y),
                      static_cast<unsigned>(i / grid.x / grid.y)};
      block->start(kernel, shared_bytes, config.seed + static_cast<unsigned>(i));
      busy.push_back(std::move(block));
    }
    if (config.order == Order::shuffled && patience.ends(random)) random.shuffle(busy);
    const bool ended = !busy[0]->step();
    if (busy[0]->paused() && random.below(2)) std::rotate(busy.begin(), busy.begin() + 1, busy.end());
    if (!ended) continue;
    idle.push_back(std::move(busy[0]));
    busy.erase(busy.begin());
  }
}

template <typename... Parameters, typename... Args>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 size, size_t shared_bytes, Args&&... args) {
  check_launch(kernel, grid, size, shared_bytes);
  run_grid([&] { kernel(args...); }, grid, size, shared_bytes);
}

}  // namespace emulator

template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute, int bytes) {
  if (static_cast<size_t>(bytes) > emulator::kMostSharedBytes) emulator::refuse("too much shared memory");
  emulator::shared_limits[reinterpret_cast<const void*>(kernel)] = bytes;
  return cudaSuccess;
}
