// Runs the CUDA kernels in the emulator without torch or Python, for AddressSanitizer: every tensor is an allocation of
// its own, of just its size. What they give is held to sums in fp64.
//
//     cuda_kernels SEED
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <type_traits>
#include <vector>

#include "cuda/launch.h"
#include "cuda/types.cuh"

using namespace quest;
using cuda::bf16, cuda::f16;
using std::vector;

static std::mt19937 rng;

static float uniform() { return std::uniform_real_distribution<float>(-1, 1)(rng); }

struct Shape {
  int64_t heads, kv_heads, dim, v_dim, page_size, block_size, q_len;
  vector<int32_t> lengths;
};

// One decode step: its tensors, as the kernels see them.
template <typename T>
struct Step {
  static constexpr DType kType = std::is_same_v<T, float>  ? DType::f32
                                 : std::is_same_v<T, bf16> ? DType::bf16
                                                           : DType::f16;
  Shape shape;
  int64_t batch, max_blocks, num_blocks, max_pages;
  vector<T> query, key, value, k_cache, v_cache, page_min, page_max;
  vector<int32_t> table, page_idx;
  vector<int64_t> slots;

  explicit Step(const Shape& s) : shape(s), batch(s.lengths.size()), max_blocks(0), num_blocks(1) {
    for (int32_t n : s.lengths) max_blocks = std::max<int64_t>(max_blocks, (n + s.block_size - 1) / s.block_size);
    num_blocks += batch * max_blocks;
    max_pages = max_blocks * (s.block_size / s.page_size);
    query = numbers(batch * s.q_len * s.heads * s.dim);
    key = numbers(batch * s.q_len * s.kv_heads * s.dim);
    value = numbers(batch * s.q_len * s.kv_heads * s.v_dim);
    k_cache = numbers(num_blocks * s.kv_heads * s.block_size * s.dim);
    v_cache = numbers(num_blocks * s.kv_heads * s.block_size * s.v_dim);
    page_min = numbers(num_blocks * s.kv_heads * (s.block_size / s.page_size) * s.dim);
    page_max = page_min;
    for (int64_t i = 0; i < batch * max_blocks; i++) table.push_back(static_cast<int32_t>(num_blocks - 1 - i));
    for (int64_t b = 0; b < batch; b++)
      for (int64_t t = 0; t < s.q_len; t++) slots.push_back(slot(b, s.lengths[b] - s.q_len + t));
    // Every second page, and one that does not exist.
    for (int64_t i = 0; i < batch * s.q_len * s.kv_heads; i++)
      for (int64_t page = 0; page <= max_pages; page += 2)
        page_idx.push_back(static_cast<int32_t>(page + 2 > max_pages ? 1 << 30 : page));
  }
  int64_t selected() const { return max_pages / 2 + 1; }

  static vector<T> numbers(int64_t n) {
    vector<T> x(n);
    for (T& v : x) cuda::from_float(uniform(), &v);
    return x;
  }
  int64_t slot(int64_t b, int64_t token) const {
    if (token < 0) return -1;
    return table[b * max_blocks + token / shape.block_size] * shape.block_size + token % shape.block_size;
  }
  Sequences sequences() const {
    return {table.data(),     shape.lengths.data(), max_blocks, batch,       max_blocks, num_blocks,
            shape.block_size, shape.page_size,      max_pages,  shape.q_len, -1};
  }
  static Rows rows(vector<T>& x, int64_t q_len, int64_t heads, int64_t dim) {
    return {x.data(), kType, q_len * heads * dim, heads * dim, dim, dim};
  }
  Pool pool(vector<T>& x, int64_t dim, int64_t per_block) const {
    return {x.data(), kType, shape.kv_heads * per_block * dim, per_block * dim, dim, dim};
  }
  const T* row(const vector<T>& cache, int64_t b, int64_t token, int64_t head, int64_t dim) const {
    const int64_t at = slot(b, token), block = at / shape.block_size, offset = at % shape.block_size;
    return cache.data() + ((block * shape.kv_heads + head) * shape.block_size + offset) * dim;
  }
};

static int failures = 0;
static void expect_near(double got, double truth, double tolerance, const char* what) {
  if (std::abs(got - truth) <= tolerance) return;
  if (++failures < 10) std::printf("%s: %g, not %g\n", what, got, truth);
}

template <typename T>
static void append_summarise(Step<T>& x) {
  const Shape& s = x.shape;
  const AppendParams rows{x.rows(x.key, s.q_len, s.kv_heads, s.dim),
                          x.rows(x.value, s.q_len, s.kv_heads, s.v_dim),
                          x.pool(x.k_cache, s.dim, s.block_size),
                          x.pool(x.v_cache, s.v_dim, s.block_size),
                          x.slots.data(),
                          s.q_len,
                          x.batch * s.q_len,
                          s.kv_heads,
                          s.block_size,
                          x.num_blocks * s.block_size};
  const int64_t per_block = s.block_size / s.page_size;
  const SummariseParams p{
      x.sequences(), rows.k_cache, x.pool(x.page_min, s.dim, per_block), x.pool(x.page_max, s.dim, per_block),
      nullptr,       s.kv_heads};
  quest_append_summarise(&rows, &p, nullptr);

  for (int64_t b = 0; b < x.batch; b++) {
    const int64_t last = s.lengths[b] - 1, page = last / s.page_size;
    for (int64_t h = 0; last >= 0 && h < s.kv_heads; h++) {
      float low = INFINITY;
      for (int64_t t = page * s.page_size; t <= last; t++)
        low = std::min(low, cuda::to_float(*x.row(x.k_cache, b, t, h, s.dim)));
      const int64_t block = x.table[b * x.max_blocks + page / per_block];
      const T got = x.page_min[((block * s.kv_heads + h) * per_block + page % per_block) * s.dim];
      expect_near(cuda::to_float(got), low, 0, "page_min");
    }
  }
}

template <typename T>
static void attend(Step<T>& x, bool every_page) {
  const Shape& s = x.shape;
  const int64_t rows = x.batch * s.q_len * s.heads, group = s.heads / s.kv_heads;
  vector<T> out(rows * s.v_dim);
  vector<float> lse(rows), partial;
  AttendParams p{};
  p.seq = x.sequences();
  p.query = x.rows(x.query, s.q_len, s.heads, s.dim);
  p.out = x.rows(out, s.q_len, s.heads, s.v_dim);
  p.k_cache = x.pool(x.k_cache, s.dim, s.block_size);
  p.v_cache = x.pool(x.v_cache, s.v_dim, s.block_size);
  p.every_page = every_page;
  p.page_idx = every_page ? nullptr : x.page_idx.data();
  p.max_selected = p.idx_stride_head = x.selected();
  p.idx_stride_token = s.kv_heads * p.idx_stride_head;
  p.idx_stride_batch = s.q_len * p.idx_stride_token;
  p.lse = lse.data();
  p.num_heads = s.heads;
  p.num_kv_heads = p.sel_heads = s.kv_heads;
  p.num_tiles = (group + kTileHeads - 1) / kTileHeads;
  p.tile_heads = (group + p.num_tiles - 1) / p.num_tiles;
  p.softmax_scale = 1;
  int64_t size = 0;
  quest_plan_attend(&p, &size);
  partial.assign(size, NAN);
  p.partial = partial.data();
  quest_attend(&p, nullptr);

  for (int64_t row = 0; row < rows; row++) {
    const int64_t h = row % s.heads, t = row / s.heads % s.q_len, b = row / s.heads / s.q_len;
    double total = 0;
    vector<double> sums(s.v_dim);
    for (int64_t token = 0; token <= s.lengths[b] - s.q_len + t; token++) {
      if (!every_page && (token / s.page_size % 2 || token / s.page_size + 2 > x.max_pages)) continue;
      double logit = 0;
      for (int64_t d = 0; d < s.dim; d++)
        logit += double{cuda::to_float(x.query[row * s.dim + d])} *
                 cuda::to_float(x.row(x.k_cache, b, token, h / group, s.dim)[d]);
      total += std::exp(logit);
      const T* v = x.row(x.v_cache, b, token, h / group, s.v_dim);
      for (int64_t d = 0; d < s.v_dim; d++) sums[d] += std::exp(logit) * cuda::to_float(v[d]);
    }
    const double tolerance = std::is_same_v<T, float> ? 1e-5 : 2e-2;
    for (int64_t d = 0; d < s.v_dim; d++)
      expect_near(cuda::to_float(out[row * s.v_dim + d]), total > 0 ? sums[d] / total : 0, tolerance, "out");
    if (total > 0) expect_near(lse[row], std::log(total), tolerance, "lse");
  }
}

template <typename T>
static void run(const Shape& shape) {
  Step<T> step(shape);
  append_summarise(step);
  attend(step, true);
  attend(step, false);
}

int main(int, char** argv) {
  const auto seed = static_cast<unsigned>(std::atoi(argv[1]));
  rng.seed(seed);
  emulator::config = {emulator::Order::shuffled, seed};
  //     heads, KV heads, dims, page, block, q_len, lengths
  run<bf16>({4, 1, 128, 128, 16, 16, 1, {900, 0, 17}});
  run<bf16>({6, 2, 64, 64, 8, 32, 3, {41, 2}});
  run<f16>({20, 1, 192, 128, 4, 8, 1, {37}});
  run<f16>({2, 2, 80, 96, 1, 16, 2, {33, 1}});
  run<float>({3, 1, 100, 36, 24, 48, 1, {50, 290}});
  run<float>({1, 1, 256, 256, 64, 64, 2, {70}});
  if (failures) return std::printf("%d wrong numbers\n", failures), 1;
  std::printf("all right\n");
}
