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

// Call f(place) for every score that a comparison holds for, in order.
template <typename F, typename G>
QUEST_INLINE void each_where(const float* scores, int64_t n, const F& held, const G& f) {
  for (int64_t i = 0; i < n; i += W) {
    const int64_t some = n - i < W ? n - i : W;
    const Vec x = some < W ? load_n(scores + i, some) : load(scores + i);
    for (uint32_t left = bits_of(held(x)) & ((1u << some) - 1); left; left &= left - 1) f(i + __builtin_ctz(left));
  }
}

// The place of a float among all floats as an integer in offset binary, and back.
QUEST_INLINE float float_at(uint32_t place) {
  return bits_to_float(place & 0x80000000u ? place & 0x7fffffffu : ~place);
}

// The score from which on the k > 0 best are, found bit by bit: the largest that k of n scores reach. At least k are
// known, that is not NaN. Whenever only a quarter of those counted can still be it, the others are left out from then
// on.
inline float kth_best(const float* scores, int64_t n, int64_t k) {
  constexpr uint32_t lowest = 0x007fffff, highest = 0xff800000;  // the places of -inf and of inf
  constexpr int64_t kFew = 4096;                                 // that many are copied, at most
  float few[kFew], low = -kInf, high = __builtin_nanf("");       // it reaches low, and not high, which no score may do
  uint32_t found = 0;
  int64_t reach_low = n, reach_high = 0, above = 0;  // above: scores that are no longer among those counted
  for (int bit = 31; bit >= 0; bit--) {
    const uint32_t more = found | 1u << bit;
    if (more > highest) continue;
    const float least = float_at(more);
    if (more <= lowest) {
      found = more;
      continue;
    }
    const int64_t reach = above + count_where(scores, n, [&](Vec x) { return x >= least; });
    if (reach >= k)
      found = more, low = least, reach_low = reach;
    else
      high = least, reach_high = reach;
    if (reach == k) break;  // exactly those
    if (const int64_t left = reach_low - reach_high; left <= kFew && 4 * left <= n) {
      int64_t kept = 0;
      each_where(
          scores, n, [&](Vec x) { return (x >= low) & ~(x >= high); }, [&](int64_t i) { few[kept++] = scores[i]; });
      scores = few, n = kept, above = reach_high;
    }
  }
  return float_at(found);
}

// Call take(place) for the `room` best of n scores, in ascending order of their places; 0 < room < n.
template <typename F>
QUEST_INLINE void take_best(const float* scores, int64_t n, int64_t room, const F& take) {
  const int64_t known = count_where(scores, n, [](Vec x) { return x == x; });
  const bool all_known = known <= room;  // then NaN, which ranks below -inf, fills the rest
  const float least = all_known ? -kInf : kth_best(scores, n, room);
  auto sure = [&](auto x) { return all_known ? x == x : x > least; };
  auto tied = [&](auto x) { return all_known ? x != x : x == least; };
  int64_t ties = room - count_where(scores, n, sure);  // so many fit, the first ones
  each_where(
      scores, n, [&](Vec x) { return sure(x) | tied(x); },
      [&](int64_t i) {
        if (sure(scores[i]) || ties-- > 0) take(i);
      });
}

}  // namespace quest::cpu::QUEST_ISA
