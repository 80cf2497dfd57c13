// merge: two attention results over disjoint tokens into one.
#include "cpu/tables.h"

namespace quest::cpu::QUEST_ISA {

void merge(const MergeParams& p, int64_t begin, int64_t end) {
  by_dtype(p.dtype, [&](auto* type) {
    using T = decltype(type);
    for (int64_t r = begin; r < end; r++) {
      const float a = p.lse_a[r], b = p.lse_b[r];
      const float top = a > b || a != a ? a : b, low = top == a ? b : a;
      const float lse =
          low == top ? top + (top == -kInf ? 0.0f : 0.693147181f) : top + __builtin_log1pf(__builtin_expf(low - top));
      // Weights relative to the larger part, not to the sum: that one may round to the part itself.
      auto weight = [&](float part) { return part == -kInf ? 0.0f : part == top ? 1.0f : __builtin_expf(part - top); };
      float wa = weight(a), wb = weight(b);
      const float total = wa + wb, norm = total == 0 ? 0.0f : 1.0f / total;
      wa *= norm, wb *= norm;
      const T out_a = static_cast<T>(const_cast<void*>(p.out_a)) + r * p.dim;
      const T out_b = static_cast<T>(const_cast<void*>(p.out_b)) + r * p.dim;
      const T out = static_cast<T>(p.out) + r * p.dim;
      p.lse[r] = lse;
      // A part of weight zero takes no part, whatever it holds.
      for (int64_t d = 0; d < p.dim; d++)
        from_float((wa == 0 ? 0 : wa * to_float(out_a[d])) + (wb == 0 ? 0 : wb * to_float(out_b[d])), out + d);
    }
  });
}

}  // namespace quest::cpu::QUEST_ISA
