// attend: exact attention over the selected pages, online softmax over tiles of rows; combine: the splits of one unit.
#include "cpu/tables.h"
#include "cpu/tiles.h"

namespace quest::cpu::QUEST_ISA {

// Which query heads a unit is, in which row.
struct Unit {
  int64_t b, t, sel_head, tile, head, heads, kv_head;
  Unit(const AttendParams& p, int64_t unit) {
    tile = unit % p.num_tiles;
    sel_head = unit / p.num_tiles % p.sel_heads;
    t = unit / p.num_tiles / p.sel_heads % p.seq.q_len;
    b = unit / p.num_tiles / p.sel_heads / p.seq.q_len;
    const int64_t group = p.num_heads / p.sel_heads, left = group - tile * p.tile_heads;
    head = sel_head * group + tile * p.tile_heads;
    heads = left < p.tile_heads ? left : p.tile_heads;
    kv_head = head / (p.num_heads / p.num_kv_heads);
  }
};

// Running softmax of one unit: best logit, sum of exp(logit - best), and sum of exp(logit - best) * v, which is in the
// halves of V's type.
struct State {
  float best[kTileHeads], total[kTileHeads];
  alignas(64) float acc[kTileHeads * kMaxHeadDim];
};

static void write(const AttendParams& p, const Unit& u, const State& s, int64_t lda) {
  by_dtype(p.out.dtype, [&](auto* type) {
    using T = decltype(type);
    for (int64_t h = 0; h < u.heads; h++) {
      float best = s.best[h], total = s.total[h], scale = 1;
      const bool empty = total == 0 && best == -kInf;
      if (p.sinks && !empty) {  // the sink is one more logit, without a value
        const float sink = p.sinks[u.head + h], top = max_known(best, sink);
        scale = best == top ? 1.0f : __builtin_expf(best - top);
        total = total * scale + __builtin_expf(sink - top);
        best = top;
      }
      alignas(64) float row[kMaxHeadDim];
      by_dtype(p.v_cache.dtype, [&](auto* v) { from_halves(v, s.acc + h * lda, row, p.out.dim); });
      const float norm = empty ? 0.0f : scale / total;
      for (int64_t d = 0; d < p.out.dim; d++) row[d] = empty ? 0.0f : row[d] * norm;
      store_row(static_cast<T>(p.out.at(u.b, u.t, u.head + h)), row, p.out.dim);
      p.lse[(u.b * p.seq.q_len + u.t) * p.num_heads + u.head + h] = empty ? -kInf : best + __builtin_logf(total);
    }
  });
}

// A tile of rows: K and V of up to kTileRows tokens, from any pages.
template <typename T>
struct Tile {
  const T *k[kTileRows + Ahead<T>::kMost], *v[kTileRows + Ahead<T>::kMost];
  int n;
};

// Logits of one tile, then the running softmax; the next tile is asked for meanwhile.
template <typename Q, typename T>
static void attend_rows(const AttendParams& p, const Q* q, int64_t ldq, int64_t heads, const Tile<T>& tile,
                        const Tile<T>& next, State& s, int64_t lda) {
  const int n = tile.n;
  alignas(64) float logits[kTileHeads * kTileRows];
  dot(Factors<Q, T, 1>{{q}, {tile.k}}, heads, n, ldq, p.k_cache.dim, logits, kTileRows, Ahead<T>(next.k, kTileRows));
  for (int64_t h = 0; h < heads; h++) {
    float* l = logits + h * kTileRows;
    // The softmax itself reads nothing: rows of V that are asked for meanwhile keep the memory at work.
    for (int64_t r = 4 * h; r < 4 * h + 4 && r < kTileRows; r++)
      for (int64_t d = 0; d < p.v_cache.dim; d += 64 / sizeof(T)) prefetch(next.v[r] + d);
    if (p.softcap > 0) {
      for (int i = 0; i < n; i++) l[i] = p.softcap * __builtin_tanhf(l[i] * p.softmax_scale / p.softcap);
    } else {
      for (int i = 0; i < n; i++) l[i] *= p.softmax_scale;
    }
    for (int64_t i = n; i < round_up(n, W); i++) l[i] = -kInf;
    Vec tops = splat(-kInf);
    for (int64_t i = 0; i < n; i += W) tops = max_known(tops, load(l + i));
    const float best = max_known(s.best[h], largest(tops));
    const float base = best == -kInf ? 0.0f : best;  // every logit is -inf (or NaN, which stays)
    Vec total{};
    for (int64_t i = 0; i < n; i += W) {
      const Vec e = exp(load(l + i) - base);
      store(l + i, e);
      total += e;
    }
    if (best != s.best[h] && s.best[h] != -kInf) {
      const float shrink = __builtin_expf(s.best[h] - best);
      s.total[h] *= shrink;
      for (int64_t d = 0; d < lda; d++) s.acc[h * lda + d] *= shrink;
    }
    s.total[h] += sum(total);
    s.best[h] = best;
  }
  mix(logits, kTileRows, heads, tile.v, n, p.v_cache.dim, s.acc, lda, next.v);
}

// The rows of a unit's pages, one tile after the other.
template <typename T>
class RowWalk {
 public:
  RowWalk(const AttendParams& p, const Unit& u, int64_t split) : p_(p), u_(u), span_(p.seq.span(u.b, u.t)) {
    int64_t begin = span_.first_page, end = span_.pos < 0 ? begin : span_.end_page;
    if (!p.every_page) {
      idx_ = p.page_idx + u.b * p.idx_stride_batch + u.t * p.idx_stride_token + u.sel_head * p.idx_stride_head;
      begin = 0, end = span_.pos < 0 ? 0 : p.max_selected;
      while (end > 0 && idx_[end - 1] < 0) end--;  // -1 fills the end
    }
    const int64_t pages = end - begin;
    next_ = touched_ = begin + pages * split / p.num_splits;
    end_ = begin + pages * (split + 1) / p.num_splits;
    k_head_ = static_cast<T*>(p.k_cache.data) + u.kv_head * p.k_cache.stride_head;
    v_head_ = static_cast<T*>(p.v_cache.data) + u.kv_head * p.v_cache.stride_head;
  }

  // Fill a tile; with nothing when there are no rows left.
  void fill(Tile<T>& tile) {
    tile.n = 0;
    while (tile.n < kTileRows) {
      if (token_ == stop_ && !next_page()) break;
      tile.k[tile.n] = k_row_;
      tile.v[tile.n++] = v_row_;
      k_row_ += p_.k_cache.stride_row;
      v_row_ += p_.v_cache.stride_row;
      token_++;
    }
    for (int i = tile.n; i < kTileRows + Ahead<T>::kMost; i++) tile.k[i] = k_head_, tile.v[i] = v_head_;
  }

 private:
  // The block of a page, or -1 where the token sees none of it.
  int64_t block_of(int64_t page) const {
    if (page < span_.first_page || page >= span_.end_page) return -1;
    return p_.seq.block(u_.b, page * p_.seq.page_size / p_.seq.block_size);
  }
  int64_t page(int64_t i) const { return p_.every_page ? i : idx_[i]; }

  void touch() {
    Touch touch;
    for (const int64_t end = touched_ + Touch::kPages < end_ ? touched_ + Touch::kPages : end_; touched_ < end;
         touched_++) {
      const int64_t block = block_of(page(touched_)), offset = page(touched_) * p_.seq.page_size % p_.seq.block_size;
      if (block < 0) continue;
      auto add = [&](const T* head, const Pool& pool) {
        const T* row = head + block * pool.stride_block + offset * pool.stride_row;
        touch.add(row, row + (p_.seq.page_size - 1) * pool.stride_row);
      };
      add(k_head_, p_.k_cache);
      add(v_head_, p_.v_cache);
    }
    touch.ask();
  }

  // Set the rows of the next page of which the token sees something.
  bool next_page() {
    const Sequences& seq = p_.seq;
    while (next_ < end_) {
      if (next_ == touched_) touch();
      const int64_t now = page(next_++), block = block_of(now);
      if (block < 0) continue;
      token_ = now * seq.page_size;
      stop_ = token_ + seq.page_size;
      token_ = token_ < span_.first_token ? span_.first_token : token_;
      stop_ = stop_ > span_.pos + 1 ? span_.pos + 1 : stop_;
      const int64_t offset = token_ % seq.block_size;
      k_row_ = k_head_ + block * p_.k_cache.stride_block + offset * p_.k_cache.stride_row;
      v_row_ = v_head_ + block * p_.v_cache.stride_block + offset * p_.v_cache.stride_row;
      return true;
    }
    token_ = stop_ = 0;
    return false;
  }

  const AttendParams& p_;
  const Unit& u_;
  const Span span_;
  const int32_t* idx_ = nullptr;
  const T *k_head_, *v_head_, *k_row_ = nullptr, *v_row_ = nullptr;
  int64_t next_, end_, touched_, token_ = 0, stop_ = 0;
};

template <typename Q, typename T>
static void attend_pages(const T* rows_type, const AttendParams& p, const Unit& u, int64_t split, State& s,
                         int64_t lda) {
  const int64_t ldq = round_up(p.query.dim, 2 * W);
  alignas(64) Q q[kTileHeads * kMaxHeadDim];
  for (int64_t h = 0; h < u.heads; h++) load_query(rows_type, p.query, u.b, u.t, u.head + h, q + h * ldq, ldq);
  RowWalk<T> walk(p, u, split);
  Tile<T> tiles[2];  // the one being attended to and the next
  walk.fill(tiles[0]);
  for (int turn = 0; tiles[turn].n > 0; turn ^= 1) {
    walk.fill(tiles[turn ^ 1]);
    attend_rows(p, q, ldq, u.heads, tiles[turn], tiles[turn ^ 1], s, lda);
  }
}

void attend(const AttendParams& p, int64_t unit, int64_t split) {
  const Unit u(p, unit);
  const int64_t lda = round_up(p.v_cache.dim, W);
  State s;
  for (int64_t h = 0; h < u.heads; h++) s.best[h] = -kInf, s.total[h] = 0;
  memset(s.acc, 0, u.heads * lda * sizeof(float));
  by_dtype(p.k_cache.dtype, [&](auto* type) {
    if constexpr (kMultipliesBf16 && kIsBf16<decltype(type)>)
      if (p.query.dtype == DType::bf16) return attend_pages<bf16>(type, p, u, split, s, lda);
    attend_pages<float>(type, p, u, split, s, lda);
  });
  if (p.num_splits == 1) return write(p, u, s, lda);
  for (int64_t h = 0; h < u.heads; h++) {
    float* to = p.partial + ((unit * p.num_splits + split) * p.tile_heads + h) * (p.v_cache.dim + 2);
    to[0] = s.best[h];
    to[1] = s.total[h];
    memcpy(to + 2, s.acc + h * lda, p.v_cache.dim * sizeof(float));
  }
}

void combine(const AttendParams& p, int64_t unit) {
  const Unit u(p, unit);
  const int64_t dim = p.v_cache.dim;
  State s;
  for (int64_t h = 0; h < u.heads; h++) {
    auto part = [&](int64_t i) { return p.partial + ((unit * p.num_splits + i) * p.tile_heads + h) * (dim + 2); };
    float best = -kInf, total = 0, *acc = s.acc + h * dim;
    for (int64_t i = 0; i < p.num_splits; i++) best = max_known(best, part(i)[0]);
    memset(acc, 0, dim * sizeof(float));
    for (int64_t i = 0; i < p.num_splits; i++) {
      const float* x = part(i);
      // A part of only -inf (or NaN) logits was summed against 0, not against its best.
      const float weight = x[0] == best || x[0] == -kInf ? 1.0f : __builtin_expf(x[0] - best);
      total += x[1] * weight;
      for (int64_t d = 0; d < dim; d++) acc[d] += x[2 + d] * weight;
    }
    s.best[h] = best;
    s.total[h] = total;
  }
  write(p, u, s, dim);
}

}  // namespace quest::cpu::QUEST_ISA
