// What the kernels are told: plain structs of pointers and sizes, each pointer with its shape. No torch, no STL.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define QUEST_HD __host__ __device__
#else
#define QUEST_HD
#endif

namespace quest {

enum class DType : int { f32, bf16, f16 };
enum class GroupRule : int { softmax, relative, per_head };

constexpr int kMaxHeadDim = 1024;
constexpr int kTileHeads = 16;  // query heads that a kernel attends to together, at most
constexpr int kCandidates = 2;  // times the budget: what coarse pages hold at least whose pages are scored
constexpr int kBandHeads = 8;   // KV heads that are scored together, at most: their summaries lie side by side

// A pool of rows: K or V (rows are tokens) or a summary (rows are pages), any strides, contiguous last dimension.
struct Pool {
  void* data;  // [num_blocks, num_kv_heads, rows_per_block, dim]
  DType dtype;
  int64_t stride_block, stride_head, stride_row;  // in elements
  int64_t dim;
};

// New rows: key, value, query, out. [batch, q_len, num_heads, dim]
struct Rows {
  void* data;
  DType dtype;
  int64_t stride_batch, stride_token, stride_head;  // in elements
  int64_t dim;

  QUEST_HD void* at(int64_t b, int64_t t, int64_t head) const {
    const int64_t element = b * stride_batch + t * stride_token + head * stride_head;
    return static_cast<char*>(data) + element * (dtype == DType::f32 ? 4 : 2);
  }
};

// The visible part of a row for one query token. Pages are [first_page, end_page), scored ones [first_page,
// scored_end).
struct Span {
  int64_t pos;          // position of the query token in its row; negative: an inert token
  int64_t first_token;  // the window's edge
  int64_t first_page, end_page, scored_end;
};

struct Sequences {
  const int32_t* block_table;  // [batch, max_blocks], -1 = none
  const int32_t* seq_lens;     // [batch], length after the append
  int64_t table_stride;
  int64_t batch, max_blocks, num_blocks;
  int64_t block_size, page_size, max_pages;
  int64_t q_len;
  int64_t window;  // -1 = none

  // Lengths and block ids are bounded here, so that unchecked input never reads out of bounds.
  QUEST_HD int64_t length(int64_t b) const {
    const int64_t n = seq_lens[b], most = max_blocks * block_size;
    return n < 0 ? 0 : n > most ? most : n;
  }
  QUEST_HD int64_t block(int64_t b, int64_t i) const {
    const int64_t id = block_table[b * table_stride + i];
    return id < num_blocks ? id : -1;
  }
  Span span(int64_t b, int64_t t) const {
    const int64_t len = length(b), pos = len - q_len + t;
    Span s{pos, 0, 0, 0, 0};
    if (pos < 0) return s;
    s.first_token = window < 0 || pos + 1 <= window ? 0 : pos + 1 - window;
    s.first_page = s.first_token / page_size;
    s.end_page = pos / page_size + 1;
    // A page whose summary already holds a later token says nothing about this one.
    s.scored_end = pos + 1 == len ? s.end_page : (pos + 1) / page_size;
    return s;
  }
};

struct AppendParams {
  Rows key, value;  // [num_tokens as (batch, q_len), num_kv_heads, dim]
  Pool k_cache, v_cache;
  const int64_t* slots;  // [batch, q_len]; outside the pool = skip
  int64_t q_len, num_tokens, num_kv_heads, block_size, num_slots;
};

struct SummariseParams {
  Sequences seq;
  Pool k_cache, page_min, page_max;
  const int32_t* num_new;  // [batch]
  int64_t num_kv_heads;
};

struct ScoreParams {
  Sequences seq;
  Rows query;
  Pool page_min, page_max;
  float* weights;  // [batch, q_len, 2, num_heads, weight_dim]: what page_max and page_min are multiplied by
  int64_t weight_dim;
  float* raw;     // [batch, q_len, num_heads, max_pages]
  float* scores;  // [batch, q_len, num_kv_heads, max_pages], or null for per_head: raw is the result
  int64_t num_heads, num_kv_heads;
  float slack, softmax_scale;
  GroupRule rule;
};

// Pages [begin, end) of one token (batch, token) for one band of KV heads.
struct ScoreTask {
  int64_t token, band, begin, end;
};

// Summaries as codes, see quest/packing.py. A group is a run of pages whose codes lie together: those of a coarse page.
struct Packed {
  char* data;                         // [num_blocks, num_kv_heads, num_bytes]
  int64_t stride_block, stride_head;  // in bytes
  int bits;
  bool coarse, single;                 // groups have codes of their own; pages of one token have one per channel
  int64_t dim;                         // channels, a multiple of 32
  int64_t words, coarse_words;         // of a page, of a coarse page
  int64_t pages, groups, group_pages;  // of a block, of a group
  int64_t lanes, coarse_lanes;         // pages whose words lie side by side
  int64_t coarse_at, fine_at;          // in a block's bytes

  int64_t cells() const { return 1 << bits; }
  const char* block(int64_t id, int64_t head) const { return data + id * stride_block + head * stride_head; }
};

struct PackParams {
  Sequences seq;
  Pool k_cache;
  Packed packed;
  const int32_t* num_new;  // [batch]
  int64_t num_kv_heads, sink_pages;

  // The blocks in which a row's last num_new tokens complete a group: [first_block, end_block).
  int64_t first_block(int64_t b) const { return coded(before(b)) / seq.block_size; }
  int64_t end_block(int64_t b) const {
    const int64_t now = coded(seq.length(b)), then = coded(before(b));
    return num_new[b] > 0 && now > then ? (now + seq.block_size - 1) / seq.block_size : first_block(b);
  }

 private:
  int64_t before(int64_t b) const { return seq.length(b) > num_new[b] ? seq.length(b) - num_new[b] : 0; }
  int64_t coded(int64_t length) const {
    const int64_t group = packed.group_pages * seq.page_size;
    return length / group * group;
  }
};

// A budget in tokens; as a fraction of the `visible` ones where that is given.
inline int64_t budget_tokens(int64_t budget, double fraction, int64_t visible) {
  if (fraction <= 0) return budget;
  const double tokens = fraction * static_cast<double>(visible);
  const int64_t whole = static_cast<int64_t>(tokens);
  return static_cast<double>(whole) < tokens ? whole + 1 : whole;
}

// The candidates of a token and KV head (a unit) are the pages of the groups it keeps, in order, and after them the
// pages after the last whole group, which have no codes yet and are scored from K.
struct PackedScoreParams {
  Sequences seq;
  Rows query;
  Pool k_cache;
  Packed packed;
  int64_t num_heads, num_kv_heads, sink_pages, recent_pages, budget, coarse_limit;
  double budget_fraction, coarse_keep;
  float slack, coarse_slack, softmax_scale;
  GroupRule rule;
  int64_t max_weight;
  float* weights;        // [batch, q_len, 2, 4, num_heads, dim]: of pages and coarse ones; of maxima and minima, and
                         // both in units that make the head's largest |query| `max_weight`
  float* largest;        // [batch, q_len, num_heads]: of a head's |query|
  float* coarse_raw;     // [batch, q_len, num_heads, max_groups], null without coarse codes
  float* coarse_scores;  // [batch, q_len, num_kv_heads, max_groups]
  int32_t* kept;         // [batch, q_len, num_kv_heads, max_kept] groups, ascending
  int32_t* num_kept;     // [batch, q_len, num_kv_heads]
  float* raw;            // [batch, q_len, num_heads, max_candidates]
  float* scores;         // [batch, q_len, num_kv_heads, max_candidates], or null for per_head: raw is the result
  int64_t max_groups, max_kept, max_candidates;

  // Pages that have codes which say nothing of a later token: those of whole groups. Codes of a block that later tokens
  // of the same step fill or go on filling depend on them.
  int64_t coded_pages(const Span& s) const {
    if (seq.q_len > 1) return (s.pos + 1) / seq.block_size * packed.pages;
    return (s.pos + 1) / (packed.group_pages * seq.page_size) * packed.group_pages;
  }
  // Pages [first_page, last_page) of a token's may have a score; those before and after are forced, or not visible.
  int64_t first_page(const Span& s) const { return s.first_page > sink_pages ? s.first_page : sink_pages; }
  int64_t last_page(const Span& s, int64_t b) const {
    int64_t last = s.end_page - recent_pages;
    if (seq.q_len > 1) {
      const int64_t length = seq.length(b), first_new = length > seq.q_len ? (length - seq.q_len) / seq.page_size : 0;
      last = first_new < last ? first_new : last;
    }
    return last > 0 ? last : 0;
  }
  // The groups to choose from, those that hold such a page: [first_group, last_group).
  int64_t first_group(const Span& s) const { return first_page(s) / packed.group_pages; }
  int64_t last_group(const Span& s, int64_t b) const {
    const int64_t end = coded_pages(s) / packed.group_pages, first = first_group(s);
    const int64_t last = (last_page(s, b) + packed.group_pages - 1) / packed.group_pages;
    const int64_t least = last < end ? last : end;
    return least > first ? least : first;
  }
  // How many of `total` groups are kept: a fraction, not too many, but room for a choice.
  int64_t kept_of(int64_t total, int64_t pos) const {
    if (!packed.coarse) return total;
    const int64_t size = packed.group_pages * seq.page_size;
    auto groups = [&](int64_t tokens) { return (tokens + size - 1) / size; };
    const int64_t least = groups(kCandidates * budget_tokens(budget, budget_fraction, pos + 1)) + 2;
    const double share = coarse_keep * static_cast<double>(total);
    int64_t kept = static_cast<int64_t>(share);
    kept += static_cast<double>(kept) < share;
    const int64_t most = groups(coarse_limit);
    kept = kept < most ? kept : most;
    kept = kept > least ? kept : least;
    return kept < total ? kept : total;
  }
  // The page of a unit's i-th candidate.
  int64_t page_of(const Span& s, int64_t unit, int64_t i) const {
    const int64_t size = packed.group_pages, in_groups = num_kept[unit] * size;
    return i < in_groups ? kept[unit * max_kept + i / size] * size + i % size : coded_pages(s) + i - in_groups;
  }
  // The most groups and candidates that a token has.
  void count() {
    max_groups = max_kept = 0;
    for (int64_t b = 0; b < seq.batch; b++) {
      const int64_t groups = seq.length(b) / (packed.group_pages * seq.page_size),
                    kept = kept_of(groups, seq.length(b) - 1);
      max_groups = groups > max_groups ? groups : max_groups;
      max_kept = kept > max_kept ? kept : max_kept;
    }
    // Scores of groups are written block by block.
    max_groups = (max_groups + packed.groups - 1) / packed.groups * packed.groups;
    max_candidates = max_kept * packed.group_pages + packed.pages;
  }
  int64_t candidates(const Span& s, int64_t b, int64_t unit) const {
    const int64_t open = last_page(s, b) - coded_pages(s);
    return num_kept[unit] * packed.group_pages + (open > 0 ? open : 0);
  }
};

struct SelectParams {
  Sequences seq;
  const float* scores;  // [batch, q_len, sel_heads, max_pages], or of candidates
  int32_t* page_idx;    // [batch, q_len, sel_heads, max_selected]
  int32_t* counts;      // [batch, q_len, sel_heads]
  int64_t sel_heads, max_selected;
  int64_t budget;          // tokens
  double budget_fraction;  // of the context; 0 = none
  int64_t sink_pages, recent_pages;
  const PackedScoreParams* packed;  // whose candidates the scores are of, or null: scores are of pages

  // Whether a token reads every visible page, which needs no scores.
  bool reads_all(const Span& s) const { return budget_tokens(s) >= s.pos + 1 - s.first_token; }
  int64_t budget_tokens(const Span& s) const { return quest::budget_tokens(budget, budget_fraction, s.pos + 1); }
};

struct AttendParams {
  Sequences seq;
  Rows query, out;
  Pool k_cache, v_cache;
  bool every_page;
  const int32_t* page_idx;  // [batch, q_len, sel_heads, max_selected], unused with every_page
  int64_t idx_stride_batch, idx_stride_token, idx_stride_head, max_selected;
  const float* sinks;  // [num_heads] or null
  float* lse;          // [batch, q_len, num_heads]
  float* partial;      // [units, num_splits, tile_heads, v_dim + 2], null when num_splits is 1
  int64_t num_heads, num_kv_heads, sel_heads;
  int64_t tile_heads, num_tiles;  // query heads of a selection that are attended to together, and how many such tiles
  int64_t num_splits;
  float softmax_scale, softcap;  // softcap 0 = none

  int64_t units() const { return seq.batch * seq.q_len * sel_heads * num_tiles; }
};

struct MergeParams {
  const void *out_a, *out_b;   // [rows, dim]
  const float *lse_a, *lse_b;  // [rows]
  void* out;
  float* lse;
  DType dtype;
  int64_t dim;
};

}  // namespace quest
