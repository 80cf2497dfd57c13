// The two inner products of attention, in register tiles: several query heads times several rows of the cache, so
// that a loaded row serves the whole group. Rows come as pointers: a page is a run of them, any page size will do.
#pragma once

#include "cpu/vec.h"

namespace quest::cpu::QUEST_ISA {

constexpr int kTileRows = 64;  // rows of the cache per tile

// S inner products that are added up: S = 1 for q . k, S = 2 for above . page_max + below . page_min.
template <typename T, int S>
struct Factors {
  const float* q[S];        // [heads, ldq], padded with zeros to a multiple of W
  const T* const* rows[S];  // [n] pointers to rows of dim values
};

// dots[h][r] = sum_s q[s][head + h] . rows[s][row + r] for H heads and R rows, H * R <= 8
template <int H, int R, typename T, int S>
QUEST_INLINE void dot_tile(const Factors<T, S>& f, int64_t head, int row, int64_t ldq, int64_t dim, float* dots,
                           int64_t ldd) {
  Vec acc[8] = {};
#pragma GCC unroll 2
  for (int s = 0; s < S; s++) {
    const float* q = f.q[s] + head * ldq;
    const T* const* rows = f.rows[s] + row;
    int64_t d = 0;
    for (; d + W <= dim; d += W) {
      Vec k[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) k[r] = load(rows[r] + d);
#pragma GCC unroll 8
      for (int h = 0; h < H; h++) {
        const Vec qh = load(q + h * ldq + d);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) acc[h * R + r] += qh * k[r];
      }
    }
    if (d < dim) {
      for (int r = 0; r < R; r++) {
        const Vec k = load_n(rows[r] + d, dim - d);
        for (int h = 0; h < H; h++) acc[h * R + r] += load(q + h * ldq + d) * k;
      }
    }
  }
  float sums[8];
  sum_each<H * R>(acc, sums);
#pragma GCC unroll 8
  for (int h = 0; h < H; h++)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) dots[(head + h) * ldd + row + r] = sums[h * R + r];
}

template <int H, typename T, int S>
QUEST_INLINE void dot_rows(const Factors<T, S>& f, int64_t head, int n, int64_t ldq, int64_t dim, float* dots,
                           int64_t ldd) {
  constexpr int R = 8 / H;
  int r = 0;
  for (; r + R <= n; r += R) dot_tile<H, R>(f, head, r, ldq, dim, dots, ldd);
  for (; r < n; r++) dot_tile<H, 1>(f, head, r, ldq, dim, dots, ldd);
}

// dots[h][r] = sum_s q[s][h] . rows[s][r]
template <typename T, int S>
inline void dot(const Factors<T, S>& f, int64_t heads, int n, int64_t ldq, int64_t dim, float* dots, int64_t ldd) {
  int64_t h = 0;
  for (; h + 4 <= heads; h += 4) dot_rows<4>(f, h, n, ldq, dim, dots, ldd);
  switch (heads - h) {
    case 3: return dot_rows<3>(f, h, n, ldq, dim, dots, ldd);
    case 2: return dot_rows<2>(f, h, n, ldq, dim, dots, ldd);
    case 1: return dot_rows<1>(f, h, n, ldq, dim, dots, ldd);
    default: return;
  }
}

// Ask for a row that the next tile reads: pages lie anywhere, so the hardware does not foresee them. Into the second
// level: two tiles of K and V would push each other out of the first.
template <typename T>
QUEST_INLINE void prefetch(const T* row, int64_t dim) {
  const char* p = reinterpret_cast<const char*>(row);
  for (int64_t i = 0; i < dim * static_cast<int64_t>(sizeof(T)); i += 64) __builtin_prefetch(p + i, 0, 2);
}

template <int H, int C, typename T>
QUEST_INLINE void mix_tile(const float* p, int64_t ldp, const T* const* rows, int64_t n, int64_t d, float* acc,
                           int64_t lda) {
  Vec a[H][C];
#pragma GCC unroll 8
  for (int h = 0; h < H; h++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) a[h][c] = load(acc + h * lda + d + c * W);
  for (int64_t r = 0; r < n; r++) {
    Vec v[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) v[c] = load(rows[r] + d + c * W);
#pragma GCC unroll 8
    for (int h = 0; h < H; h++)
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) a[h][c] += p[h * ldp + r] * v[c];
  }
#pragma GCC unroll 8
  for (int h = 0; h < H; h++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) store(acc + h * lda + d + c * W, a[h][c]);
}

template <int H, typename T>
QUEST_INLINE void mix_rows(const float* p, int64_t ldp, const T* const* rows, int64_t n, int64_t dim, float* acc,
                           int64_t lda) {
  int64_t d = 0;
  for (; d + 2 * W <= dim; d += 2 * W) mix_tile<H, 2>(p, ldp, rows, n, d, acc, lda);
  for (; d + W <= dim; d += W) mix_tile<H, 1>(p, ldp, rows, n, d, acc, lda);
  if (d < dim) {
    for (int64_t r = 0; r < n; r++) {
      const Vec v = load_n(rows[r] + d, dim - d);
      for (int h = 0; h < H; h++) {
        float* to = acc + h * lda + d;
        store(to, load(to) + p[h * ldp + r] * v);
      }
    }
  }
}

// acc[h] += sum_r p[h][r] * rows[r]; acc rows hold a multiple of W values.
template <typename T>
inline void mix(const float* p, int64_t ldp, int64_t heads, const T* const* rows, int64_t n, int64_t dim, float* acc,
                int64_t lda) {
  int64_t h = 0;
  for (; h + 4 <= heads; h += 4) mix_rows<4>(p + h * ldp, ldp, rows, n, dim, acc + h * lda, lda);
  switch (heads - h) {
    case 3: return mix_rows<3>(p + h * ldp, ldp, rows, n, dim, acc + h * lda, lda);
    case 2: return mix_rows<2>(p + h * ldp, ldp, rows, n, dim, acc + h * lda, lda);
    case 1: return mix_rows<1>(p + h * ldp, ldp, rows, n, dim, acc + h * lda, lda);
    default: return;
  }
}

// Query rows of one token as fp32, padded with zeros to ldq.
inline void load_query(const Rows& query, int64_t b, int64_t t, int64_t head, int64_t heads, float* to, int64_t ldq) {
  by_dtype(query.dtype, [&](auto* type) {
    auto* from = static_cast<decltype(type)>(query.data) + b * query.stride_batch + t * query.stride_token;
    for (int64_t h = 0; h < heads; h++) {
      load_row(to + h * ldq, from + (head + h) * query.stride_head, query.dim);
      for (int64_t d = query.dim; d < ldq; d++) to[h * ldq + d] = 0;
    }
  });
}

}  // namespace quest::cpu::QUEST_ISA
