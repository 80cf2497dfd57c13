// The two inner products of attention, in register tiles: several query heads times several rows of the cache, so
// that a loaded row serves the whole group. Rows come as pointers: a page is a run of them, any page size will do.
//
// While a tile is computed the rows of the next one are asked for, a few at a time: pages lie anywhere, so the hardware
// does not foresee them, and asking for all of them at once would leave the arithmetic waiting for the memory and then
// the memory for the arithmetic.
#pragma once

#include "cpu/vec.h"

namespace quest::cpu::QUEST_ISA {

constexpr int kTileRows = 32;  // rows of K and V per tile

#if defined(__AVX512F__) || defined(__ARM_NEON)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif

// How many rows go with so many heads: enough sums to keep the multipliers busy, in registers beside what they are made
// of. More rows than that are slower, as the halves of a 16-bit row need registers too.
constexpr int rows_with(int heads) { return kRegisters == 32 || heads <= 2 ? 4 : 3; }

// Rows that are read next. The products ask for them line by line on the way, into the second level: asked for all at
// once the processor drops most of them, and in the first level two tiles would push each other out.
template <typename T>
class Ahead {
 public:
  // The list is followed by kMost more pointers that can be asked for.
  static constexpr int kMost = 16;
  Ahead(const T* const* rows, int n) : rows_(rows), n_(n) {}
  // The next `count` <= kMost rows.
  const T* const* take(int count) {
    const T* const* rows = rows_ + (at_ < n_ ? at_ : n_);
    at_ += count;
    return rows;
  }

 private:
  const T* const* rows_;
  const int n_;
  int at_ = 0;
};

template <typename T>
QUEST_INLINE void prefetch(const T* p) {
  __builtin_prefetch(p, 0, 2);
}

// Asks for many pages at once: their walks through the page tables then run side by side, while one that a row alone
// needs is waited for. The list is made first, because the processor looks ahead only so many instructions.
class Touch {
 public:
  static constexpr int64_t kPages = 128;
  // The rows from `first` to `last`, which may lie across two pages of memory.
  template <typename T>
  void add(const T* first, const T* last) {
    list_[n_++] = first;
    if ((reinterpret_cast<uintptr_t>(first) ^ reinterpret_cast<uintptr_t>(last)) >> 12) list_[n_++] = last;
  }
  void ask() const {
    for (int i = 0; i < n_; i++) __builtin_prefetch(list_[i], 0, 2);
  }

 private:
  const void* list_[4 * kPages];
  int n_ = 0;
};

// Call f(Number<H>, first head) for pieces of at most four heads, as equal as can be.
template <int N>
struct Number {
  static constexpr int value = N;
};
template <typename F>
QUEST_INLINE void by_heads(int64_t heads, const F& f) {
  for (int64_t h = 0; h < heads;) {
    const int64_t left = heads - h;
    switch (left) {
      case 1: f(Number<1>{}, h), h += 1; break;
      case 2: f(Number<2>{}, h), h += 2; break;
      case 3:
      case 5:
      case 6: f(Number<3>{}, h), h += 3; break;
      default: f(Number<4>{}, h), h += 4;
    }
  }
}

// S inner products that are added up: S = 1 for q . k, S = 2 for above . page_max + below . page_min.
template <typename Q, typename T, int S>
struct Factors {
  const Q* q[S];            // [heads, ldq], see `load_query`
  const T* const* rows[S];  // [n] pointers to rows of dim values
};

// One step of `dot_tile`: add the products of q and rows at [d, d + 2 W) to the sums.
template <int H, int R, typename T>
QUEST_INLINE void dot_step(const float* q, int64_t ldq, const T* const (&rows)[R], int64_t d, Vec* acc) {
  Vec k[R];
  auto add = [&](int64_t place) {
#pragma GCC unroll 8
    for (int h = 0; h < H; h++) {
      const Vec qh = load(q + h * ldq + place);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) acc[h * R + r] += qh * k[r];
    }
  };
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) k[r] = load_half<0>(rows[r] + d);
  add(d);
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) k[r] = load_half<1>(rows[r] + d);
  add(d + W);
}
#if defined(__AVX512BF16__)
template <int H, int R>
QUEST_INLINE void dot_step(const bf16* q, int64_t ldq, const bf16* const (&rows)[R], int64_t d, Vec* acc) {
  Pairs k[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) k[r] = load_pairs(rows[r] + d);
#pragma GCC unroll 8
  for (int h = 0; h < H; h++) {
    const Pairs qh = load_pairs(q + h * ldq + d);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) acc[h * R + r] = add_products(acc[h * R + r], qh, k[r]);
  }
}
#endif

// dots[h][r] = sum_s q[s][head + h] . rows[s][row + r] for H heads and R rows
template <int H, int R, typename Q, typename T, int S>
QUEST_INLINE void dot_tile(const Factors<Q, T, S>& f, int64_t head, int row, int64_t ldq, int64_t dim, float* dots,
                           int64_t ldd, Ahead<T>& ahead) {
  constexpr int N = (H * R + 3) / 4 * 4;
  Vec acc[N] = {};
#pragma GCC unroll 2
  for (int s = 0; s < S; s++) {
    const Q* q = f.q[s] + head * ldq;
    const T* const* soon = ahead.take(R);
    const T* rows[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) rows[r] = f.rows[s][row + r];
    int64_t d = 0;
    for (; d + 2 * W <= dim; d += 2 * W) {
      if (d * sizeof(T) % 64 == 0) {
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) prefetch(soon[r] + d);
      }
      if constexpr (2 * W * sizeof(T) > 64) {
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) prefetch(soon[r] + d + W);
      }
      dot_step<H, R>(q, ldq, rows, d, acc);
    }
    if (d < dim) {  // the rest as a full step, padded with zeros
      T padded[R][2 * W] = {};
      const T* ends[R];
      for (int r = 0; r < R; r++) {
        memcpy(padded[r], rows[r] + d, (dim - d) * sizeof(T));
        ends[r] = padded[r];
      }
      dot_step<H, R>(q + d, ldq, ends, 0, acc);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < N; i += 4) {
    const Quad sums = sum4(acc[i], acc[i + 1], acc[i + 2], acc[i + 3]);
    if constexpr (R % 4 == 0) {
      memcpy(dots + (head + i / R) * ldd + row + i % R, &sums, sizeof sums);
    } else {
      for (int j = i; j < i + 4 && j < H * R; j++) dots[(head + j / R) * ldd + row + j % R] = sums[j - i];
    }
  }
}

// dots[h][r] = sum_s q[s][h] . rows[s][r]
template <typename Q, typename T, int S>
inline void dot(const Factors<Q, T, S>& f, int64_t heads, int n, int64_t ldq, int64_t dim, float* dots, int64_t ldd,
                Ahead<T> ahead) {
  by_heads(heads, [&](auto piece, int64_t head) {
    constexpr int H = decltype(piece)::value, R = rows_with(H);
    int r = 0;
    for (; r + R <= n; r += R) dot_tile<H, R>(f, head, r, ldq, dim, dots, ldd, ahead);
    if (r < n && n >= R) {
      dot_tile<H, R>(f, head, n - R, ldq, dim, dots, ldd, ahead);  // some rows a second time
    } else {
      for (; r < n; r++) dot_tile<H, 1>(f, head, r, ldq, dim, dots, ldd, ahead);
    }
  });
}

// acc[h][d ..] += sum_r p[h][r] * rows[r][d ..] for H heads and C vectors
template <int H, int C, typename T>
QUEST_INLINE void mix_tile(const float* p, int64_t ldp, const T* const* rows, int64_t n, int64_t d, float* acc,
                           int64_t lda, const T* const* soon) {
  constexpr int bytes = C * W * sizeof(T), turns = bytes < 64 ? 64 / bytes : 1;  // tiles that share a line take turns
  const int turn = static_cast<int>(d / (C * W));
  Vec a[H][C];
#pragma GCC unroll 8
  for (int h = 0; h < H; h++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) a[h][c] = load(acc + h * lda + d + c * W);
  for (int64_t r = 0; r < n; r++) {
    if ((r + turn) % turns == 0) {
#pragma GCC unroll 8
      for (int c = 0; c < C * W; c += 64 / sizeof(T)) prefetch(soon[r] + d + c);
    }
    Vec v[C];
    if constexpr (C == 1) {
      v[0] = load(rows[r] + d);
    } else {
#pragma GCC unroll 8
      for (int c = 0; c < C; c += 2) {
        v[c] = load_half<0>(rows[r] + d + c * W);
        v[c + 1] = load_half<1>(rows[r] + d + c * W);
      }
    }
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

// acc[h] += sum_r p[h][r] * rows[r]; acc is in the halves of T, its rows hold a multiple of W values.
template <typename T>
inline void mix(const float* p, int64_t ldp, int64_t heads, const T* const* rows, int64_t n, int64_t dim, float* acc,
                int64_t lda, const T* const* soon) {
  by_heads(heads, [&](auto piece, int64_t head) {
    constexpr int H = decltype(piece)::value, most = kRegisters / 2 / H;
    constexpr int C = most >= 8 ? 8 : most >= 4 ? 4 : 2;
    const float* ph = p + head * ldp;
    float* to = acc + head * lda;
    int64_t d = 0;
    auto tiles = [&](auto count) {
      constexpr int c = decltype(count)::value;
      for (; d + c * W <= dim; d += c * W) {
        mix_tile<H, c>(ph, ldp, rows, n, d, to, lda, soon);
      }
    };
    tiles(Number<C>{});
    if constexpr (C > 2) tiles(Number<2>{});
    tiles(Number<1>{});
    if (d < dim) {
      for (int64_t r = 0; r < n; r++) {
        const Vec v = load_n(rows[r] + d, dim - d);
        for (int h = 0; h < H; h++) store(to + h * lda + d, load(to + h * lda + d) + ph[h * ldp + r] * v);
      }
    }
  });
}

// A query row for products with rows of T, padded with zeros to ldq, a multiple of 2 W: as fp32 in the halves of T ...
template <typename T>
inline void load_query(const T* rows_type, const Rows& query, int64_t b, int64_t t, int64_t head, float* to,
                       int64_t ldq) {
  alignas(64) float row[kMaxHeadDim];
  for (int64_t d = query.dim; d < ldq; d++) row[d] = 0;
  by_dtype(query.dtype, [&](auto* type) {
    auto* from = static_cast<decltype(type)>(query.at(b, t, head));
    load_row(row, from, query.dim);
  });
  to_halves(rows_type, row, to, ldq);
}
// ... or as it is.
inline void load_query(const bf16*, const Rows& query, int64_t b, int64_t t, int64_t head, bf16* to, int64_t ldq) {
  memset(to, 0, ldq * sizeof(bf16));
  memcpy(to, query.at(b, t, head), query.dim * sizeof(bf16));
}

}  // namespace quest::cpu::QUEST_ISA
