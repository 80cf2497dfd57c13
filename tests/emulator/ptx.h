// The functions of csrc/cuda/ptx.cuh, as PTX documents the instructions that they are made of.
#pragma once

#include "emulator/emulator.h"

#define QUEST_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  ((void)(stream), ::emulator::launch(kernel, grid, block, shared_bytes, __VA_ARGS__))
#define QUEST_SHARED(name) unsigned char* const name = ::emulator::block().shared()

namespace quest::cuda {

inline void expect_aligned(const void* p, const char* what) {
  if (reinterpret_cast<uintptr_t>(p) % 16) throw std::runtime_error(std::string(what) + ": address not aligned");
}

inline int anew(int x) { return x; }

// ---- asynchronous copies: NaN until they are waited for ----

inline void cp_async(void* shared, const void* global, bool valid) {
  expect_aligned(shared, "cp.async");
  emulator::Copy copy{shared, {}};
  if (valid) {
    expect_aligned(global, "cp.async");
    memcpy(copy.bytes, global, sizeof copy.bytes);
  }
  memset(shared, 0xff, sizeof copy.bytes);
  emulator::current().copies.push_back(copy);
}
inline void cp_async_commit() { emulator::current().groups.push_back(emulator::current().copies.size()); }

template <int kPending>
void cp_async_wait() {
  auto& copies = emulator::current().copies;
  auto& groups = emulator::current().groups;
  if (groups.size() <= kPending) return;
  const size_t done = groups.size() - kPending, end = groups[done - 1];
  for (size_t i = 0; i < end; i++) memcpy(copies[i].to, copies[i].bytes, sizeof copies[i].bytes);
  copies.erase(copies.begin(), copies.begin() + end);
  groups.erase(groups.begin(), groups.begin() + done);
  for (size_t& group : groups) group -= end;
}

// ---- tensor cores ----

inline void load_matrices(uint32_t (&r)[4], const void* row, bool transposed, emulator::Place at) {
  expect_aligned(row, "ldmatrix");
  auto slots = emulator::block().together(~0u, row, "ldmatrix", at, [&](emulator::Slots slots) {
    uint16_t matrices[4][8][8];
    for (int i = 0; i < 32; i++) {
      const void* from;
      memcpy(&from, slots[i], sizeof from);
      memcpy(matrices[i / 8][i % 8], from, 16);
    }
    for (int lane = 0; lane < 32; lane++) {
      uint16_t halves[4][2];
      for (int m = 0; m < 4; m++)
        for (int i = 0; i < 2; i++) {
          const int major = lane / 4, minor = lane % 4 * 2 + i;
          halves[m][i] = transposed ? matrices[m][minor][major] : matrices[m][major][minor];
        }
      memcpy(slots[lane], halves, sizeof halves);
    }
  });
  memcpy(r, slots[emulator::current().lane], sizeof r);
}
inline void ldmatrix(uint32_t (&r)[4], const void* row, EMULATOR_CALLER) { load_matrices(r, row, false, {file, line}); }
inline void ldmatrix_trans(uint32_t (&r)[4], const void* row, EMULATOR_CALLER) {
  load_matrices(r, row, true, {file, line});
}

template <typename T>
float half_of(uint32_t word, int i) {
  const auto bits = static_cast<uint16_t>(word >> 16 * i);
  if constexpr (std::is_same_v<T, __half>) return __half2float({bits});
  return __bfloat162float({bits});
}
template <typename T>
uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) return __float2half_rn(low).bits | __float2half_rn(high).bits << 16;
  return __float2bfloat16_rn(low).bits | uint32_t{__float2bfloat16_rn(high).bits} << 16;
}

// d (16 x 8) += a (16 x 16) * b (16 x 8). Lane 4 g + q holds, of a: rows g and g + 8, columns 2 q, 2 q + 1 and 8 more;
// of b: those as rows, column g; of d: rows g and g + 8, columns 2 q, 2 q + 1.
template <typename T>
void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, EMULATOR_CALLER) {
  struct Fragments {
    uint32_t a[4], b[2];
    float d[4];
  } mine{{a[0], a[1], a[2], a[3]}, {b0, b1}, {d[0], d[1], d[2], d[3]}};
  auto slots = emulator::block().together(~0u, mine, "mma", {file, line}, [](emulator::Slots slots) {
    float rows[16][16], columns[16][8], sums[16][8];
    auto each = [&](auto f) {
      for (int lane = 0; lane < 32; lane++) f(*reinterpret_cast<Fragments*>(slots[lane]), lane / 4, lane % 4 * 2);
    };
    each([&](const Fragments& x, int g, int q) {
      for (int i = 0; i < 2; i++) {
        for (int r = 0; r < 4; r++) rows[g + r % 2 * 8][q + r / 2 * 8 + i] = half_of<T>(x.a[r], i);
        for (int r = 0; r < 2; r++) columns[q + r * 8 + i][g] = half_of<T>(x.b[r], i);
        for (int r = 0; r < 2; r++) sums[g + r * 8][q + i] = x.d[r * 2 + i];
      }
    });
    for (int m = 0; m < 16; m++)
      for (int k = 0; k < 16; k++)
        for (int n = 0; n < 8; n++) sums[m][n] += rows[m][k] * columns[k][n];
    each([&](Fragments& x, int g, int q) {
      for (int i = 0; i < 4; i++) x.d[i] = sums[g + i / 2 * 8][q + i % 2];
    });
  });
  memcpy(d, reinterpret_cast<Fragments*>(slots[emulator::current().lane])->d, sizeof d);
}

}  // namespace quest::cuda
