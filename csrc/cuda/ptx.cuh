// What CUDA C++ has no words for: asynchronous copies, tensor-core instructions, dynamic shared memory and the launch.
// Nothing else differs between the kernels on a GPU and in the emulator of the tests.
#pragma once

#ifndef QUEST_EMULATE

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#define QUEST_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  kernel<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__)
#define QUEST_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]

namespace quest::cuda {

// Copy 16 bytes to shared memory without waiting; where not `valid`, nothing is read and zeros are written.
__device__ __forceinline__ void cp_async(void* shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait for all of the thread's groups of copies but the last kPending.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8 x 8 matrices of 16-bit values: lane i gives the address of row i % 8 of matrix i / 8, and gets, of each
// matrix, elements 2 (i % 4) and 2 (i % 4) + 1 of row i / 4; of column i / 4 with _trans.
__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_trans(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}

// Two values of type T in one register.
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t packed;
  if constexpr (std::is_same_v<T, __half>)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// d (16 x 8) += a (16 x 16) * b (16 x 8), of type T. Lane 4 g + q holds, of a: rows g and g + 8, columns 2 q, 2 q + 1
// and those 8 further, as (g, 2 q), (g + 8, 2 q), (g, 2 q + 8), (g + 8, 2 q + 8); of b: rows 2 q, 2 q + 1 (b0) and
// those 8 further (b1), column g; of d: columns 2 q, 2 q + 1 of row g, then of row g + 8.
template <typename T>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#define QUEST_MMA(type)                                                      \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                 \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                       \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
  if constexpr (std::is_same_v<T, __half>)
    QUEST_MMA("f16");
  else
    QUEST_MMA("bf16");
#undef QUEST_MMA
}

// x, of which the compiler then knows nothing: what follows from it is computed here, and need not stay in registers
// from where it was computed before.
__device__ __forceinline__ int anew(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

}  // namespace quest::cuda

#else
#include "emulator/ptx.h"
#endif
