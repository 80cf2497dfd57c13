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

template <typename... Parameters, typename... Args>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 size, size_t shared_bytes, Args&&... args) {
  check_launch(kernel, grid, size, shared_bytes);
  const std::function<void()> run = [&] { kernel(args...); };
  std::vector<size_t> order(size_t{grid.x} * grid.y * grid.z);
  for (size_t i = 0; i < order.size(); i++) order[i] = config.order == Order::reverse ? order.size() - 1 - i : i;
  if (config.order == Order::shuffled) Block::Random(config.seed).shuffle(order);

  // An allocation of just this size: AddressSanitizer knows where it ends. The marks behind it are for builds without.
  constexpr size_t kMarks = 64;
#ifdef __SANITIZE_ADDRESS__
  const size_t room = shared_bytes;
#else
  const size_t room = shared_bytes + kMarks;
#endif
  std::unique_ptr<void, decltype(&free)> shared(nullptr, &free);
  void* memory = nullptr;
  if (posix_memalign(&memory, 1024, room ? room : 1)) throw std::bad_alloc();
  shared.reset(memory);
  auto* bytes = static_cast<unsigned char*>(memory);
  block.size = size;
  block.grid = grid;
  for (size_t i : order) {
    block.index = {static_cast<unsigned>(i % grid.x), static_cast<unsigned>(i / grid.x % grid.y),
                   static_cast<unsigned>(i / grid.x / grid.y)};
    memset(bytes, 0xff, room);
    block.run(run, bytes, config.seed + static_cast<unsigned>(i));
    for (size_t j = shared_bytes; j < room; j++)
      if (bytes[j] != 0xff) throw std::runtime_error("shared memory was written beyond its end");
  }
}

}  // namespace emulator

template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute, int bytes) {
  if (static_cast<size_t>(bytes) > emulator::kMostSharedBytes) emulator::refuse("too much shared memory");
  emulator::shared_limits[reinterpret_cast<const void*>(kernel)] = bytes;
  return cudaSuccess;
}
