// Inner products of a query's integer weights with the codes of packed summaries, in integers.
//
// A word holds the codes of a few channels of one page, maxima below and minima above (quest/packing.py). Shifted and
// masked, a vector of words is a vector of pairs (maximum, minimum) of 16 bits each, one pair per page or, where fewer
// pages lie side by side than a vector holds, per page and word. A pair of weights goes with it; one instruction of
// most processors multiplies both and adds them up.
#pragma once

#include "cpu/tiles.h"

namespace quest::cpu::QUEST_ISA {

typedef int32_t IQuad __attribute__((vector_size(16)));

// sums += a.low * b.low + a.high * b.high, of signed 16-bit halves
QUEST_INLINE IVec add_pairs(IVec sums, IVec a, IVec b) {
#if defined(__AVX512VNNI__)
  return (IVec)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
  return sums + (IVec)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return sums + (IVec)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return sums + (IVec)_mm_madd_epi16((__m128i)a, (__m128i)b);
#elif defined(__ARM_NEON)
  const int16x8_t x = vreinterpretq_s16_s32((int32x4_t)a), y = vreinterpretq_s16_s32((int32x4_t)b);
  return sums + (IVec)vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
#else
  return sums + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

QUEST_INLINE IVec load_words(const int32_t* p) {
  IVec v;
  memcpy(&v, p, sizeof v);
  return v;
}
QUEST_INLINE IVec splat_word(int32_t x) { return x - IVec{}; }

// The words of x at the places that `from` says.
QUEST_INLINE IVec permute(IVec x, IVec from) {
#if defined(__AVX512F__)
  return (IVec)_mm512_maskz_permutexvar_epi32(0xffff, (__m512i)from, (__m512i)x);
#elif defined(__AVX2__)
  return (IVec)_mm256_permutevar8x32_epi32((__m256i)x, (__m256i)from);
#else
  IVec y;
  for (int i = 0; i < W; i++) y[i] = x[from[i] & (W - 1)];
  return y;
#endif
}

// What makes reciprocals of very small numbers finite.
QUEST_INLINE float lift_of(float x) { return x < 1e-30f ? 0x1p100f : 1.0f; }

// Codes of one level: of coarse pages, of pages, or of pages of one token, which have one code per channel.
struct Level {
  int64_t words, lanes;
  int bits;
  bool coarse, single;
};

// The weights of at most four heads for the pages of one block, as pairs of integers (for bits 0..15 and 16..31 of the
// words) in units that make the largest there may be `max_weight`. A page's score is base + unit * (sum of weight x
// code).
struct BlockWeights {
  alignas(64) int32_t pairs[4 * kMaxHeadDim + W];                // [heads, dim]
  alignas(64) int32_t spread[W > 4 ? 4 * kMaxHeadDim * 8 : 16];  // [heads, dim * lanes / W, W], where lanes < W
  float base[4], unit[4];

  // `bounds` are the block's lo and step; `soon` is what is read next, asked for line by line.
  void make(const PackedScoreParams& p, int64_t token, int64_t first_head, int heads, const Level& level,
            const char* bounds, const char* soon) {
    by_heads(heads, [&](auto piece, int64_t) {
      constexpr int H = decltype(piece)::value;
      if (level.single)
        make_for<H, true>(p, token, first_head, level, bounds, soon);
      else
        make_for<H, false>(p, token, first_head, level, bounds, soon);
    });
  }
  // Weights in the order of vectors that hold several words of Lanes < W pages.
  template <int Lanes>
  void spread_for(const Packed& x, const Level& level, int heads) {
    constexpr int64_t step = W / Lanes;  // words of a vector
    const int64_t words = level.words, places = 16 / level.bits;
    IVec from;
    for (int i = 0; i < W; i++) from[i] = i / Lanes;
    for (int h = 0; h < heads; h++) {
      int32_t* to = spread + h * words * places * Lanes;
      for (int64_t w = 0; w < words; w += step)
        for (int64_t j = 0; j < places; j++, to += W) {
          const IVec lane = permute(load_words(pairs + h * x.dim + j * words + w), from);
          memcpy(to, &lane, sizeof lane);
        }
    }
  }

 private:
  template <int H, bool Single>
  void make_for(const PackedScoreParams& p, int64_t token, int64_t first_head, const Level& level, const char* bounds,
                const char* soon) {
    const int64_t dim = p.packed.dim, half = dim / 2;
    const auto* lo = reinterpret_cast<const bf16*>(bounds);
    const bf16* step = lo + dim;
    Vec tops{};
    for (int64_t d = 0; d < dim; d += W) {
      if (d * 4 % 64 == 0) prefetch(soon + d * 4);
      tops = max_known(tops, load(step + d));
    }
    const float top = largest(tops), lift = lift_of(top), inverse = top > 0 ? 1.0f / (top * lift) : 0.0f;
    const int64_t size = p.num_heads * dim;
    const float* above = p.weights + (2 * token + level.coarse) * 4 * size + first_head * dim;
    const float *below = above + size, *up = below + size, *down = up + size;  // the latter two in integer units
    for (int h = 0; h < H; h++)
      unit[h] = p.largest[token * p.num_heads + first_head + h] * top * (1.0f / static_cast<float>(p.max_weight));
    Vec sums[H] = {};
    auto put = [&](int h, int64_t d, IVec first, IVec second) {
      const IVec pair = (first & 0xffff) | (IVec)((UVec)second << 16);
      memcpy(pairs + h * dim + d, &pair, sizeof pair);
    };
    for (int64_t d = 0; d < (Single ? half : dim); d += W) {
      // An upper edge is one step above its cell's lower edge.
      const Vec s = load(step + d), low = load(lo + d), high = low + s, part = s * lift * inverse;
      if constexpr (Single) {
        const Vec s2 = load(step + d + half), low2 = load(lo + d + half), high2 = low2 + s2,
                  part2 = s2 * lift * inverse;
#pragma GCC unroll 4
        for (int h = 0; h < H; h++) {
          const int64_t at = h * dim + d, at2 = at + half;
          sums[h] += load(above + at) * high + load(below + at) * low;
          sums[h] += load(above + at2) * high2 + load(below + at2) * low2;
          put(h, d, ceil_to_int((load(up + at) + load(down + at)) * part),
              ceil_to_int((load(up + at2) + load(down + at2)) * part2));
        }
      } else {
#pragma GCC unroll 4
        for (int h = 0; h < H; h++) {
          const int64_t at = h * dim + d;
          sums[h] += load(above + at) * high + load(below + at) * low;
          put(h, d, ceil_to_int(load(up + at) * part), ceil_to_int(load(down + at) * part));
        }
      }
    }
    for (int h = 0; h < H; h++) base[h] = sum(sums[h]);
  }
};

// Scores of `lanes` >= W pages whose words lie side by side: to[h * ldt + lane].
template <int Bits, int H>
QUEST_INLINE void score_wide(const BlockWeights& weights, int64_t dim, const Level& level, const char* codes,
                             const char* soon, float* to, int64_t ldt) {
  constexpr int places = 16 / Bits;
  constexpr int32_t mask = ((1 << Bits) - 1) * 0x10001;
  const int64_t words = level.words, lanes = level.lanes;
  for (int64_t part = 0; part < lanes; part += W) {
    const auto* at = reinterpret_cast<const int32_t*>(codes) + part;
    IVec acc[2][H] = {};
    for (int64_t w = 0; w < words; w++) {
      prefetch(soon + (w * lanes + part) * 4);
      const IVec all = load_words(at + w * lanes);
#pragma GCC unroll 8
      for (int j = 0; j < places; j++) {
        const IVec pair = (IVec)((UVec)all >> (Bits * j)) & mask;
#pragma GCC unroll 4
        for (int h = 0; h < H; h++)
          acc[j & 1][h] = add_pairs(acc[j & 1][h], pair, splat_word(weights.pairs[h * dim + j * words + w]));
      }
    }
    for (int h = 0; h < H; h++) {
      const Vec sums = __builtin_convertvector(acc[0][h] + acc[1][h], Vec);
      store(to + h * ldt + part, weights.base[h] + sums * weights.unit[h]);
    }
  }
}

// Scores of Lanes < W pages whose words lie side by side, for T such groups at once: to[t][h * ldt + lane].
template <int Bits, int H, int Lanes, int T>
QUEST_INLINE void score_narrow(const BlockWeights& weights, const Level& level, const char* const* codes,
                               const char* const* soon, float* const* to, int64_t ldt) {
  constexpr int places = 16 / Bits;
  constexpr int32_t mask = ((1 << Bits) - 1) * 0x10001;
  const int64_t vectors = level.words * Lanes / W;
  IVec acc[T][H] = {};
  for (int64_t v = 0; v < vectors; v++) {
    IVec all[T];
#pragma GCC unroll 4
    for (int t = 0; t < T; t++) {
      if (v * W * 4 % 64 == 0) prefetch(soon[t] + v * W * 4);
      memcpy(&all[t], codes[t] + v * W * 4, sizeof all[t]);
    }
#pragma GCC unroll 8
    for (int j = 0; j < places; j++) {
      IVec pair[T];
#pragma GCC unroll 4
      for (int t = 0; t < T; t++) pair[t] = (IVec)((UVec)all[t] >> (Bits * j)) & mask;
#pragma GCC unroll 4
      for (int h = 0; h < H; h++) {
        const IVec weight = load_words(weights.spread + ((h * vectors + v) * places + j) * W);
#pragma GCC unroll 4
        for (int t = 0; t < T; t++) acc[t][h] = add_pairs(acc[t][h], pair[t], weight);
      }
    }
  }
  for (int t = 0; t < T; t++)
    for (int h = 0; h < H; h++) {
      IQuad quads[W / 4], sums[Lanes / 4] = {};
      memcpy(quads, &acc[t][h], sizeof quads);
      for (int i = 0; i < W / 4; i++) sums[i % (Lanes / 4)] += quads[i];
      for (int i = 0; i < Lanes / 4; i++) {
        const Quad scores = weights.base[h] + __builtin_convertvector(sums[i], Quad) * weights.unit[h];
        memcpy(to[t] + h * ldt + 4 * i, &scores, sizeof scores);
      }
    }
}

// Call f(Number<bits>, Number<heads>) for 1 to 4 heads.
template <typename F>
QUEST_INLINE void by_bits_and_heads(int bits, int heads, const F& f) {
  by_heads(heads, [&](auto some, int64_t) {
    switch (bits) {
      case 8: return f(Number<8>{}, some);
      case 4: return f(Number<4>{}, some);
      default: return f(Number<2>{}, some);
    }
  });
}

// Scores of n runs of codes, each of `lanes` pages: to[i] points to the first head's score of run i's first page.
// `soon` has a pointer for each run: what is read later, as long as this.
inline void score_runs(BlockWeights& weights, const Packed& x, const Level& level, int heads, const char* const* codes,
                       const char* const* soon, int64_t n, float* const* to, int64_t ldt) {
  auto narrow = [&](auto count) {
    constexpr int Lanes = decltype(count)::value, T = kRegisters == 32 ? 4 : 2;
    weights.spread_for<Lanes>(x, level, heads);
    by_bits_and_heads(level.bits, heads, [&](auto bits, auto some) {
      constexpr int Bits = decltype(bits)::value, H = decltype(some)::value;
      int64_t i = 0;
      for (; i + T <= n; i += T) score_narrow<Bits, H, Lanes, T>(weights, level, codes + i, soon + i, to + i, ldt);
      for (; i < n; i++) score_narrow<Bits, H, Lanes, 1>(weights, level, codes + i, soon + i, to + i, ldt);
    });
  };
  if constexpr (W > 8)
    if (level.lanes == 8) return narrow(Number<8>{});
  if constexpr (W > 4)
    if (level.lanes == 4) return narrow(Number<4>{});
  by_bits_and_heads(level.bits, heads, [&](auto bits, auto some) {
    for (int64_t i = 0; i < n; i++)
      score_wide<decltype(bits)::value, decltype(some)::value>(weights, x.dim, level, codes[i], soon[i], to[i], ldt);
  });
}

}  // namespace quest::cpu::QUEST_ISA
