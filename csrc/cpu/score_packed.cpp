// score_packed: query x packed summaries. Whole groups of pages by their codes, the best of them kept, and the pages of
// those by theirs; the pages after the last whole group from K.
#include "cpu/agree.h"
#include "cpu/best.h"
#include "cpu/codes.h"
#include "cpu/tables.h"

namespace quest::cpu::QUEST_ISA {

// The weights of maxima and of minima for one token's query heads, of pages and of coarse ones, and each head's largest
// |query|. Small numbers are lifted first, so that no reciprocal overflows.
void weigh_packed(const PackedScoreParams& p, int64_t token) {
  const int64_t b = token / p.seq.q_len, t = token % p.seq.q_len, dim = p.packed.dim, size = p.num_heads * dim;
  alignas(64) float query[kMaxHeadDim];
  for (int64_t h = 0; h < p.num_heads; h++) {
    load_query(static_cast<float*>(nullptr), p.query, b, t, h, query, dim);
    float most = 0;
    for (int64_t d = 0; d < dim; d++) most = max_known(most, query[d] < 0 ? -query[d] : query[d]);
    p.largest[token * p.num_heads + h] = most;
    const float lift = lift_of(most), inverse = most > 0 ? static_cast<float>(p.max_weight) / (most * lift) : 0.0f;
    for (int level = 0; level < 2; level++) {
      const float slack = level ? p.coarse_slack : p.slack, toward = (1 + slack) / 2, against = (1 - slack) / 2;
      float* to = p.weights + (2 * token + level) * 4 * size + h * dim;
      for (int64_t d = 0; d < dim; d++) {
        const float above = query[d] * (query[d] > 0 ? toward : against);
        const float below = query[d] * (query[d] > 0 ? against : toward);
        to[d] = above;
        to[size + d] = below;
        to[2 * size + d] = above * lift * inverse;
        to[3 * size + d] = below * lift * inverse;
      }
    }
  }
}

constexpr int64_t kRuns = 64;  // of codes that are scored together, at most

// A token and KV head.
struct Unit {
  int64_t b, token, kv_head, group, first_head;
  Span span;
  Unit(const PackedScoreParams& p, int64_t unit) {
    token = unit / p.num_kv_heads;
    kv_head = unit % p.num_kv_heads;
    b = token / p.seq.q_len;
    group = p.num_heads / p.num_kv_heads;
    first_head = kv_head * group;
    span = p.seq.span(b, token % p.seq.q_len);
  }
};

// Call f(first head, heads) for at most four query heads of a unit at a time.
template <typename F>
static void heads_of(const Unit& u, const F& f) {
  for (int64_t h = 0; h < u.group; h += 4) f(h, static_cast<int>(u.group - h < 4 ? u.group - h : 4));
}

// The groups of blocks [begin, end) of a unit's row.
void score_groups(const PackedScoreParams& p, int64_t unit, int64_t begin, int64_t end) {
  const Packed& x = p.packed;
  const Unit u(p, unit);
  const Level level{x.coarse_words, x.coarse_lanes, x.bits, true, false};
  float* raw = p.coarse_raw + (u.token * p.num_heads + u.first_head) * p.max_groups;
  auto block_at = [&](int64_t i) {
    const int64_t id = p.seq.block(u.b, i);
    return id < 0 ? nullptr : x.block(id, u.kv_head);
  };
  BlockWeights weights;
  for (int64_t i = begin; i < end; i++) {
    const char *block = block_at(i), *next = i + 1 < end ? block_at(i + 1) : block;
    float* to = raw + i * x.groups;
    if (!block) {
      for (int64_t h = 0; h < u.group; h++)
        for (int64_t g = 0; g < x.groups; g++) to[h * p.max_groups + g] = -kInf;
      continue;
    }
    if (!next) next = block;
    heads_of(u, [&](int64_t h, int heads) {
      weights.make(p, u.token, u.first_head + h, heads, level, block, next);
      const char *codes[kRuns], *soon[kRuns];
      float* first[kRuns];
      for (int64_t g = 0; g < x.groups;) {
        int64_t n = 0;
        for (; n < kRuns && g < x.groups; n++, g += level.lanes) {
          const int64_t at = x.coarse_at + g * level.words * 4;
          codes[n] = block + at, soon[n] = next + at, first[n] = to + h * p.max_groups + g;
        }
        score_runs(weights, x, level, heads, codes, soon, n, first, p.max_groups);
      }
    });
  }
}

// Which groups of a unit have their pages scored.
void keep(const PackedScoreParams& p, int64_t unit) {
  const Unit u(p, unit);
  const int64_t begin = p.first_group(u.span), end = p.last_group(u.span, u.b);
  const int64_t kept = p.kept_of(end - begin, u.span.pos);
  int32_t* to = p.kept + unit * p.max_kept;
  int64_t count = 0;
  auto take = [&](int64_t i) { to[count++] = static_cast<int32_t>(begin + i); };
  if (kept == end - begin) {
    for (int64_t i = 0; i < kept; i++) take(i);
  } else {
    float* raw = p.coarse_raw + (u.token * p.num_heads + u.first_head) * p.max_groups;
    float* scores = p.coarse_scores + unit * p.max_groups;
    agree_heads(raw, p.max_groups, u.group, begin, end, p.rule == GroupRule::softmax, p.softmax_scale, scores);
    take_best(scores + begin, end - begin, kept, take);
  }
  p.num_kept[unit] = static_cast<int32_t>(count);
}

// The pages of kept groups [begin, end) of a unit.
void score_kept(const PackedScoreParams& p, int64_t unit, int64_t begin, int64_t end) {
  const Packed& x = p.packed;
  const Unit u(p, unit);
  const Level level{x.words, x.lanes, x.bits, false, x.single};
  const int64_t size = x.group_pages, runs = size / x.lanes, bytes = x.lanes * x.words * 4;
  const int64_t first_page = p.first_page(u.span), last_page = p.last_page(u.span, u.b);
  const int32_t* kept = p.kept + unit * p.max_kept;
  float* raw = p.raw + (u.token * p.num_heads + u.first_head) * p.max_candidates;
  auto block_of = [&](int64_t i) {
    const int64_t id = p.seq.block(u.b, kept[i] / x.groups);
    return id < 0 ? nullptr : x.block(id, u.kv_head);
  };
  auto codes_in = [&](const char* block, int64_t i) { return block + x.fine_at + kept[i] % x.groups * runs * bytes; };
  auto hide = [&](int64_t from, int64_t to) {
    for (int64_t h = 0; h < u.group; h++)
      for (int64_t c = from; c < to; c++) raw[h * p.max_candidates + c] = -kInf;
  };

  BlockWeights weights;
  for (int64_t i = begin; i < end;) {
    // Groups of one block share its weights.
    const char* block = block_of(i);
    int64_t next = i + 1;
    while (next < end && (next + 1 - i) * runs <= kRuns && kept[next] / x.groups == kept[i] / x.groups) next++;
    if (!block) {
      hide(i * size, next * size);
      i = next;
      continue;
    }
    const int64_t n = (next - i) * runs;
    const char *codes[kRuns], *soon[kRuns], *then = next < end ? block_of(next) : block;
    for (int64_t r = 0; r < n; r++) {
      codes[r] = codes_in(block, i + r / runs) + r % runs * bytes;
      const int64_t after = next + r / runs;
      const char* later = after < end ? block_of(after) : nullptr;
      soon[r] = later ? codes_in(later, after) + r % runs * bytes : codes[r];
    }
    heads_of(u, [&](int64_t h, int heads) {
      weights.make(p, u.token, u.first_head + h, heads, level, block, then ? then : block);
      float* to[kRuns];
      for (int64_t r = 0; r < n; r++) to[r] = raw + h * p.max_candidates + i * size + r * x.lanes;
      score_runs(weights, x, level, heads, codes, soon, n, to, p.max_candidates);
    });
    for (; i < next; i++) {
      const int64_t before = first_page - kept[i] * size, after = (kept[i] + 1) * size - last_page;
      if (before > 0) hide(i * size, i * size + (before < size ? before : size));
      if (after > 0) hide((i + 1) * size - (after < size ? after : size), (i + 1) * size);
    }
  }
}

template <typename T>
static void score_open_pages(T*, const PackedScoreParams& p, int64_t unit) {
  const Sequences& seq = p.seq;
  const Unit u(p, unit);
  const int64_t dim = p.k_cache.dim, wide = p.packed.dim;
  const int64_t first_page = p.first_page(u.span), last_page = p.last_page(u.span, u.b);
  const int64_t open = p.coded_pages(u.span), index = open / p.packed.pages;
  if (open >= last_page) return;  // the table may end here
  const int64_t block = seq.block(u.b, index);
  float* to =
      p.raw + (u.token * p.num_heads + u.first_head) * p.max_candidates + p.num_kept[unit] * p.packed.group_pages;
  const float* above = p.weights + (8 * u.token * p.num_heads + u.first_head) * wide;
  const float* below = above + p.num_heads * wide;
  alignas(64) float low[kMaxHeadDim] = {}, high[kMaxHeadDim] = {};
  for (int64_t page = open; page < last_page; page++, to++) {
    if (block < 0 || page < first_page) {
      for (int64_t h = 0; h < u.group; h++) to[h * p.max_candidates] = -kInf;
      continue;
    }
    const int64_t first = page * seq.page_size;
    const T* keys = static_cast<const T*>(p.k_cache.data) + block * p.k_cache.stride_block +
                    u.kv_head * p.k_cache.stride_head + (first - index * seq.block_size) * p.k_cache.stride_row;
    for (int64_t d = 0; d < dim; d += W) {
      const int64_t n = dim - d < W ? dim - d : W;
      Vec l = splat(kInf), h = splat(-kInf);
      for (int64_t j = 0; j < seq.page_size; j++) {
        const T* row = keys + j * p.k_cache.stride_row + d;
        const Vec v = n == W ? load(row) : load_n(row, n);
        l = v < l ? v : l;
        h = v > h ? v : h;
      }
      store(low + d, l);
      store(high + d, h);
    }
    for (int64_t h = 0; h < u.group; h++) {
      const float *a = above + h * wide, *b = below + h * wide;
      Vec sums{};
      for (int64_t d = 0; d < wide; d += W) sums += load(a + d) * load(high + d) + load(b + d) * load(low + d);
      to[h * p.max_candidates] = sum(sums);
    }
  }
}

// The pages of a unit that have no codes.
void score_open(const PackedScoreParams& p, int64_t unit) {
  by_dtype(p.k_cache.dtype, [&](auto* type) { score_open_pages(type, p, unit); });
}

// The group rule over a unit's candidates; the first and the last ones may be forced, or outside the window.
void agree_packed(const PackedScoreParams& p, int64_t unit) {
  const Unit u(p, unit);
  const int64_t first_page = p.first_page(u.span), last_page = p.last_page(u.span, u.b);
  float* to = p.scores + unit * p.max_candidates;
  auto page = [&](int64_t i) { return p.page_of(u.span, unit, i); };
  int64_t begin = 0, end = p.candidates(u.span, u.b, unit);
  for (; begin < end && page(begin) < first_page; begin++) to[begin] = -kInf;
  for (; end > begin && page(end - 1) >= last_page; end--) to[end - 1] = -kInf;
  float* raw = p.raw + (u.token * p.num_heads + u.first_head) * p.max_candidates;
  agree_heads(raw, p.max_candidates, u.group, begin, end, p.rule == GroupRule::softmax, p.softmax_scale, to);
}

}  // namespace quest::cpu::QUEST_ISA
