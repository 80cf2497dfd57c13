// The group rule: one score per page from those of a group's heads.
#pragma once

#include "cpu/vec.h"

namespace quest::cpu::QUEST_ISA {

// to[i] for i in [begin, end), from raw[h * stride + i] of `group` heads.
//
// Softmax rule: mean over heads of exp(scale (s - best)) / sum. Relative rule: max over heads of s - best. Equal
// infinities have a gap of 0; NaN takes no part in a head's best or sum and makes the page's score NaN.
inline void agree_heads(const float* raw, int64_t stride, int64_t group, int64_t begin, int64_t end, bool softmax,
                        float scale, float* to) {
  for (int64_t i = begin; i < end; i++) to[i] = softmax ? 0.0f : -kInf;
  for (int64_t h = 0; h < group; h++) {
    const float* s = raw + h * stride;
    // Call f(scores, have) for every vector of pages and put what it returns. The last, partial one is padded with NaN,
    // which no sum counts.
    auto each = [&](auto f) {
      int64_t i = begin;
      for (; i + W <= end; i += W) store(to + i, f(load(s + i), load(to + i)));
      if (i >= end) return;
      const Vec nan = splat(__builtin_nanf(""));
      float x[W], have[W];
      store(x, nan);
      store(have, nan);
      memcpy(x, s + i, (end - i) * sizeof(float));
      memcpy(have, to + i, (end - i) * sizeof(float));
      store(have, f(load(x), load(have)));
      memcpy(to + i, have, (end - i) * sizeof(float));
    };
    Vec tops = splat(-kInf), total{};
    each([&](Vec x, Vec have) {
      tops = max_known(tops, x);
      return have;
    });
    const float best = largest(tops);
    auto gap = [&](Vec x) { return x == best ? Vec{} : x - best; };
    if (softmax) {
      each([&](Vec x, Vec have) {
        const Vec e = exp(gap(x) * scale);
        total += e == e ? e : Vec{};
        return have;
      });
      const float all = sum(total), weight = 1.0f / (group * (all > 1e-38f ? all : 1e-38f));
      each([&](Vec x, Vec have) { return have + exp(gap(x) * scale) * weight; });
    } else {
      each([&](Vec x, Vec have) {
        const Vec g = gap(x);
        return ((g > have) | (g != g)) ? g : have;
      });
    }
  }
}

}  // namespace quest::cpu::QUEST_ISA
