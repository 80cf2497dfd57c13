// What kernels call by CUDA's own names.
#pragma once

#include "emulator/block.h"

#define threadIdx (::emulator::current().index)
#define blockIdx (::emulator::block().index)
#define blockDim (::emulator::block().size)
#define gridDim (::emulator::block().grid)

using std::max;
using std::min;

inline void __syncthreads(EMULATOR_CALLER) { emulator::block().barrier({file, line}); }
inline void __syncwarp(unsigned mask = 0xffffffffu, EMULATOR_CALLER) {
  emulator::block().together(mask, 0, "__syncwarp", {file, line}, [](auto) {});
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane, EMULATOR_CALLER) {
  auto slots = emulator::block().together(mask, value, "__shfl_sync", {file, line}, [](auto) {});
  memcpy(&value, slots[lane & 31], sizeof value);
  return value;
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, EMULATOR_CALLER) {
  return __shfl_sync(mask, value, emulator::current().lane ^ lanes, file, line);
}
inline unsigned __ballot_sync(unsigned mask, bool yes, EMULATOR_CALLER) {
  auto slots = emulator::block().together(mask, yes, "__ballot_sync", {file, line}, [](auto) {});
  unsigned ballot = 0;
  for (int i = 0; i < 32; i++) ballot |= (mask >> i & 1) ? unsigned{slots[i][0]} << i : 0;
  return ballot;
}

// Threads don't interrupt each other.
inline unsigned atomicAdd(unsigned* p, unsigned value) {
  const unsigned before = *p;
  *p += value;
  emulator::block().pause();
  return before;
}
inline void __threadfence() {}

template <typename T>
T __ldcg(const T* p) {
  return *p;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return uint64_t{a} * b >> 32; }
