// The group rule: one score per page from those of a group's heads.
#pragma once

#include "cpu/vec.h"

namespace quest::cpu::QUEST_ISA {

// to[i] for i in [begin, end), from raw[h * stride + i] of `group` heads, which the softmax rule overwrites.
//
// Softmax rule: mean over heads of exp(scale (s - best)) / sum. Relative rule: max over heads of s - best. Equal
// infinities have a gap of 0; NaN takes no part in a head's best or sum and makes the page's score NaN.
inline void agree_heads(float* raw, int64_t stride, int64_t group, int64_t begin, int64_t end, bool softmax,
                        float scale, float* to) {
  for (int64_t i = begin; i < end; i++) to[i] = softmax ? 0.0f : -kInf;
  for (int64_t h = 0; h < group; h++) {
    float* s = raw + h * stride;
    // Call f(scores, have) for every vector of pages; f may change both. The last, partial one is padded with NaN,
    // which no sum counts.
    auto each = [&](auto f) {
      int64_t i = begin;
      for (; i + W <= end; i += W) {
        Vec x = load(s + i), have = load(to + i);
        f(x, have);
        store(s + i, x);
        store(to + i, have);
      }
      if (i >= end) return;
      const size_t rest = (end - i) * sizeof(float);
      Vec x = splat(__builtin_nanf("")), have = x;
      memcpy(&x, s + i, rest);
      memcpy(&have, to + i, rest);
      f(x, have);
      memcpy(s + i, &x, rest);
      memcpy(to + i, &have, rest);
    };
    Vec tops = splat(-kInf), total{};
    each([&](Vec x, Vec) { tops = max_known(tops, x); });
    const float best = largest(tops);
    auto gap = [&](Vec x) { return x == best ? Vec{} : x - best; };
    if (softmax) {
      each([&](Vec& x, Vec) {
        x = exp(gap(x) * scale);
        total += x == x ? x : Vec{};
      });
      const float all = sum(total), weight = 1.0f / (group * (all > 1e-38f ? all : 1e-38f));
      each([&](Vec x, Vec& have) { have += x * weight; });
    } else {
      each([&](Vec x, Vec& have) {
        const Vec g = gap(x);
        have = ((g > have) | (g != g)) ? g : have;
      });
    }
  }
}

}  // namespace quest::cpu::QUEST_ISA
