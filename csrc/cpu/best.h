// The best of many scores, exactly: linear in their number, ties to the lower place, NaN below -inf.
#pragma once

#include "cpu/vec.h"

namespace quest::cpu::QUEST_ISA {

// How many of n scores a comparison holds for.
template <typename F>
QUEST_INLINE int64_t count_where(const float* scores, int64_t n, const F& held) {
  IVec counts{};
  int64_t i = 0;
  for (; i + W <= n; i += W) counts -= held(load(scores + i));
  int64_t total = 0;
  for (int lane = 0; lane < W; lane++) total += counts[lane];
  if (i < n) total += __builtin_popcount(bits_of(held(load_n(scores + i, n - i))) & ((1u << (n - i)) - 1));
  return total;
}

// The place of a float among all floats as an integer in offset binary, and back.
QUEST_INLINE float float_at(uint32_t place) {
  return bits_to_float(place & 0x80000000u ? place & 0x7fffffffu : ~place);
}

// The score from which on the k > 0 best are, found bit by bit: the largest that k of n scores reach. At least k are
// known, that is not NaN.
inline float kth_best(const float* scores, int64_t n, int64_t k) {
  constexpr uint32_t lowest = 0x007fffff, highest = 0xff800000;  // the places of -inf and of inf
  uint32_t found = 0;
  for (int bit = 31; bit >= 0; bit--) {
    const uint32_t more = found | 1u << bit;
    if (more > highest) continue;
    const float least = float_at(more);
    const int64_t reach = more <= lowest ? k : count_where(scores, n, [&](Vec x) { return x >= least; });
    if (reach >= k) found = more;
    if (reach == k && more > lowest) break;  // exactly those
  }
  return float_at(found);
}

// Call take(place) for the `room` best of n scores, in ascending order of their places; 0 < room < n.
template <typename F>
QUEST_INLINE void take_best(const float* scores, int64_t n, int64_t room, const F& take) {
  const int64_t known = count_where(scores, n, [](Vec x) { return x == x; });
  const bool all_known = known <= room;  // then NaN, which ranks below -inf, fills the rest
  const float least = all_known ? -kInf : kth_best(scores, n, room);
  auto sure = [&](Vec x) { return all_known ? x == x : x > least; };
  auto tied = [&](Vec x) { return all_known ? x != x : x == least; };
  int64_t ties = room - count_where(scores, n, sure);  // so many fit, the first ones
  for (int64_t i = 0; i < n; i += W) {
    const int64_t some = n - i < W ? n - i : W;
    const Vec x = some < W ? load_n(scores + i, some) : load(scores + i);
    const uint32_t valid = some < W ? (1u << some) - 1 : ~0u, takes = bits_of(sure(x)) & valid;
    for (uint32_t left = takes | (bits_of(tied(x)) & valid); left; left &= left - 1) {
      const int lane = __builtin_ctz(left);
      if (takes >> lane & 1 || ties-- > 0) take(i + lane);
    }
  }
}

}  // namespace quest::cpu::QUEST_ISA
