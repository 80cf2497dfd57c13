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
  // A vector of pages; the last, partial one is padded with NaN, which no maximum or sum counts.
  auto get = [&](const float* x, int64_t i) {
    if (i + W <= end) return load(x + i);
    Vec last = splat(__builtin_nanf(""));
    memcpy(&last, x + i, (end - i) * sizeof(float));
    return last;
  };
  auto put = [&](float* x, int64_t i, Vec values) {
    if (i + W <= end)
      store(x + i, values);
    else
      memcpy(x + i, &values, (end - i) * sizeof(float));
  };
  for (int64_t h = 0; h < group; h++) {
    float* s = raw + h * stride;
    Vec tops = splat(-kInf), total{};
    for (int64_t i = begin; i < end; i += W) tops = max_known(tops, get(s, i));
    const float best = largest(tops);
    auto gap = [&](Vec x) { return x == best ? Vec{} : x - best; };
    if (softmax) {
      for (int64_t i = begin; i < end; i += W) {
        const Vec x = exp(gap(get(s, i)) * scale);
        total += x == x ? x : Vec{};
        put(s, i, x);
      }
      const float all = sum(total), weight = 1.0f / (group * (all > 1e-38f ? all : 1e-38f));
      for (int64_t i = begin; i < end; i += W) put(to, i, (h ? get(to, i) : Vec{}) + get(s, i) * weight);
    } else {
      for (int64_t i = begin; i < end; i += W) {
        const Vec g = gap(get(s, i)), have = h ? get(to, i) : splat(-kInf);
        put(to, i, ((g > have) | (g != g)) ? g : have);
      }
    }
  }
}

}  // namespace quest::cpu::QUEST_ISA
