// What kernels call by CUDA's own names.
#pragma once

#include "emulator/block.h"

#define threadIdx (::emulator::current().index)
#define blockIdx (::emulator::block.index)
#define blockDim (::emulator::block.size)
#define gridDim (::emulator::block.grid)

using emulator::Place;
using std::max;
using std::min;

inline void __syncthreads(Place at = EMULATOR_HERE) { emulator::block.barrier(at); }
inline void __syncwarp(unsigned mask = 0xffffffffu, Place at = EMULATOR_HERE) {
  emulator::block.together(mask, 0, "__syncwarp", at, [](auto) {});
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane, Place at = EMULATOR_HERE) {
  auto slots = emulator::block.together(mask, value, "__shfl_sync", at, [](auto) {});
  memcpy(&value, slots[lane & 31], sizeof value);
  return value;
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, Place at = EMULATOR_HERE) {
  return __shfl_sync(mask, value, emulator::current().lane ^ lanes, at);
}
inline unsigned __ballot_sync(unsigned mask, bool yes, Place at = EMULATOR_HERE) {
  auto slots = emulator::block.together(mask, yes, "__ballot_sync", at, [](auto) {});
  unsigned ballot = 0;
  for (int i = 0; i < 32; i++) ballot |= (mask >> i & 1) ? unsigned{slots[i][0]} << i : 0;
  return ballot;
}

// Blocks run one after the other and threads don't interrupt each other.
inline unsigned atomicAdd(unsigned* p, unsigned value) {
  const unsigned before = *p;
  *p += value;
  return before;
}
inline void __threadfence() {}

template <typename T>
T __ldcg(const T* p) {
  return *p;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return uint64_t{a} * b >> 32; }
