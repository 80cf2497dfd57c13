// How a block of `attend` is laid out: its warps, and what lies where in shared memory.
#pragma once

#include "params.h"

namespace quest::cuda {

constexpr int kMaxDim = 256;            // of K and V
constexpr int kMaxSplits = 128;         // of a unit
constexpr int kMaxStages = 4;           // tiles that a warp has in shared memory
constexpr int kSharedBytes = 99 << 10;  // of a block, for compute capabilities 8.6 and 12.0 too
constexpr int kChunk = 16;              // bytes that are copied at a time
constexpr int kLine = 8;                // chunks that neighbouring lanes copy, 128 bytes

// For rows of K and V of D elements of type T; shorter rows are filled up with zeros. A warp takes tiles of kTokens
// tokens and keeps several of them in stages of its own, so that it never waits for other warps.
template <typename T, int D>
struct Layout {
  static constexpr int kTokens = sizeof(T) == 2 ? 16 : 8;
  static constexpr int kChunks = D * sizeof(T) / kChunk;      // of a row
  static constexpr int kTileBytes = kTokens * D * sizeof(T);  // K or V
  static constexpr int kStageBytes = 2 * kTileBytes;
  // Tensor cores take the query from registers, the other products from here.
  static constexpr int kQueryBytes = sizeof(T) == 2 ? 0 : kTileHeads * D * sizeof(T);

  static constexpr int stages(int warps) {
    const int n = (kSharedBytes - kQueryBytes) / (warps * kStageBytes);
    return n < kMaxStages ? n : kMaxStages;
  }
  static constexpr int kWarps = stages(4) >= 3 ? 4 : stages(2) >= 3 ? 2 : 1;
  static constexpr int kStages = stages(kWarps);
  static_assert(kStages >= 3);

  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kWarpBytes = kStages * kStageBytes;
  static constexpr int kSharedUsed = kQueryBytes + kWarps * kWarpBytes;

  // In the end the same memory holds each warp's sums, rows apart so that lanes write to different banks, and with
  // several splits then their weights.
  static constexpr int kSumStride = D + 8;
  static constexpr int kSumBytes = kWarps * kTileHeads * (kSumStride + 2) * 4;
  static_assert(kSumBytes <= kSharedUsed && kTileHeads * (kMaxSplits + 2) * 4 <= kSharedUsed);

  // Chunks of a row change places with the row's number: eight rows' chunks of one column lie in different banks.
  static constexpr int offset(int row, int chunk) { return (row * kChunks + (chunk ^ (row & 7))) * kChunk; }
};

}  // namespace quest::cuda
