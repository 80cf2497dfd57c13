// Runs the CPU kernels on one case from a file, without torch and on one thread: for an instruction set that this
// machine has only in an emulator.
//
//     kernels CASE RESULT VERB...
//
// The verbs run in the order given: append, summarise, score, pack, score_packed, select, attend, merge. CASE and
// RESULT are lists of named arrays. An array is a line "name type dims size... stride... bytes", strides in elements,
// and then its memory from the first element to the last; a number has no dimensions. Verbs find their arguments by
// name, under the names they have in quest/ops.py, and so find the results of earlier verbs. RESULT holds what the
// verbs wrote.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iostream>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/kernels.h"

using namespace quest;
using cpu::kernels;
using std::string, std::vector;

static int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// ---- arrays ----

// Memory filled with 0xa5. It ends where a page begins that may not be touched.
static char* guarded(int64_t bytes) {
  const int64_t page = sysconf(_SC_PAGESIZE), room = round_up(bytes, page);
  void* p = mmap(nullptr, room + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED || mprotect(static_cast<char*>(p) + room, page, PROT_NONE)) throw std::bad_alloc();
  memset(p, 0xa5, room);
  return static_cast<char*>(p) + room - bytes;
}

struct Array {
  string type;
  vector<int64_t> size, stride;
  int64_t bytes = 0;
  char* memory = nullptr;
  bool written = false;

  template <typename T>
  T* data() const {
    return reinterpret_cast<T*>(memory);
  }
  DType dtype() const { return type == "float32" ? DType::f32 : type == "bfloat16" ? DType::bf16 : DType::f16; }
  operator Pool() const { return {memory, dtype(), stride[0], stride[1], stride[2], size[3]}; }
  operator Rows() const { return {memory, dtype(), stride[0], stride[1], stride[2], size[3]}; }
};

static std::map<string, Array> arrays;

static Array& get(const string& name) {
  const auto found = arrays.find(name);
  if (found == arrays.end()) throw std::runtime_error("the case has no " + name);
  return found->second;
}
static int64_t integer(const string& name) { return *get(name).data<int64_t>(); }
static float real(const string& name) { return static_cast<float>(*get(name).data<double>()); }
static Array& output(const string& name) {
  get(name).written = true;
  return get(name);
}
// A new result.
static Array& output(const string& name, const string& type, const vector<int64_t>& size) {
  Array a{type, size, size, type == "float32" || type == "int32" ? 4 : 2, nullptr, true};
  int64_t count = 1;
  for (size_t i = size.size(); i-- > 0; count *= size[i]) a.stride[i] = count;
  a.bytes *= count;
  a.memory = guarded(a.bytes);
  return arrays[name] = a;
}

static void read(const char* path) {
  std::ifstream file(path, std::ios::binary);
  string name;
  while (file >> name) {
    Array a;
    size_t dims;
    file >> a.type >> dims;
    a.size.resize(dims), a.stride.resize(dims);
    for (auto& x : a.size) file >> x;
    for (auto& x : a.stride) file >> x;
    file >> a.bytes;
    a.memory = guarded(a.bytes);
    file.ignore(1).read(a.memory, a.bytes);
    arrays[name] = a;
  }
}

static void write(const char* path) {
  std::ofstream file(path, std::ios::binary);
  for (const auto& [name, a] : arrays) {
    if (!a.written) continue;
    file << name << ' ' << a.type << ' ' << a.size.size();
    for (int64_t x : a.size) file << ' ' << x;
    for (int64_t x : a.stride) file << ' ' << x;
    file << ' ' << a.bytes << '\n';
    file.write(a.memory, a.bytes);
  }
}

// ---- verbs ----

static Sequences sequences(int64_t num_blocks, int64_t block_size, int64_t q_len) {
  const Array& table = get("block_table");
  const int64_t page_size = integer("page_size");
  return {.block_table = table.data<int32_t>(),
          .seq_lens = get("seq_lens").data<int32_t>(),
          .table_stride = table.stride[0],
          .batch = table.size[0],
          .max_blocks = table.size[1],
          .num_blocks = num_blocks,
          .block_size = block_size,
          .page_size = page_size,
          .max_pages = table.size[1] * (block_size / page_size),
          .q_len = q_len,
          .window = integer("window")};
}

static void append() {
  const Array &key = get("key"), &k_cache = output("k_cache");
  const AppendParams p{.key = key,
                       .value = get("value"),
                       .k_cache = k_cache,
                       .v_cache = output("v_cache"),
                       .slots = get("slot_mapping").data<int64_t>(),
                       .q_len = key.size[1],
                       .num_tokens = key.size[0] * key.size[1],
                       .num_kv_heads = k_cache.size[1],
                       .block_size = k_cache.size[2],
                       .num_slots = k_cache.size[0] * k_cache.size[2]};
  kernels().append(p, 0, p.num_tokens);
}

static void summarise() {
  const Array& k_cache = get("k_cache");
  const SummariseParams p{.seq = sequences(k_cache.size[0], k_cache.size[2], 1),
                          .k_cache = k_cache,
                          .page_min = output("page_min"),
                          .page_max = output("page_max"),
                          .num_new = get("num_new").data<int32_t>(),
                          .num_kv_heads = k_cache.size[1]};
  for (int64_t b = 0; b < p.seq.batch; b++) {
    const int64_t length = p.seq.length(b), old = std::max<int64_t>(0, length - p.num_new[b]);
    const int64_t end = round_up(length, p.seq.page_size) / p.seq.page_size;
    const int64_t first = p.num_new[b] <= 0 ? end : old / p.seq.page_size;
    for (int64_t h = 0; h < p.num_kv_heads; h++) kernels().summarise(p, b, h, first, end);
  }
}

static void score() {
  const Array &query = get("query"), &low = get("page_min");
  ScoreParams p{.seq = sequences(low.size[0], low.size[2] * integer("page_size"), query.size[1]),
                .query = query,
                .page_min = low,
                .page_max = get("page_max"),
                .weights = nullptr,
                .weight_dim = round_up(query.size[3], 32),
                .raw = nullptr,
                .scores = nullptr,
                .num_heads = query.size[2],
                .num_kv_heads = low.size[1],
                .slack = real("slack"),
                .softmax_scale = real("softmax_scale"),
                .rule = static_cast<GroupRule>(integer("group_rule"))};
  const int64_t batch = p.seq.batch, q_len = p.seq.q_len, pages = p.seq.max_pages, chunk = integer("pages_per_task");
  const bool grouped = p.rule != GroupRule::per_head;
  p.weights = output("weights", "float32", {batch, q_len, 2, p.num_heads, p.weight_dim}).data<float>();
  p.raw = output(grouped ? "raw" : "scores", "float32", {batch, q_len, p.num_heads, pages}).data<float>();
  if (grouped) p.scores = output("scores", "float32", {batch, q_len, p.num_kv_heads, pages}).data<float>();

  vector<ScoreTask> tasks;
  for (int64_t token = 0; token < batch * q_len; token++)
    for (int64_t band = 0; band * kBandHeads < p.num_kv_heads; band++)
      for (int64_t page = 0; page < pages; page += chunk)
        tasks.push_back({token, band, page, std::min(page + chunk, pages)});
  tasks.push_back({0, 0, 0, 0});  // nothing follows the last one
  for (int64_t token = 0; token < batch * q_len; token++) kernels().weigh(p, token);
  for (size_t i = 0; i + 1 < tasks.size(); i++) kernels().score(p, tasks[i], tasks[i + 1]);
  for (int64_t i = 0; grouped && i < batch * q_len * p.num_kv_heads; i++) kernels().agree(p, i);
}

static int64_t lanes_of(int64_t pages) { return std::min<int64_t>(16, pages & -pages); }

// As arguments.cpp lays it out.
static Packed packed_of(const Array& a, const Array& k_cache) {
  const int64_t page_size = integer("page_size"), coarse_size = integer("coarse_size"), block_size = k_cache.size[2];
  Packed p{};
  p.data = a.memory;
  p.stride_block = a.stride[0];
  p.stride_head = a.stride[1];
  p.bits = static_cast<int>(integer("bits"));
  p.coarse = coarse_size > 0;
  p.single = page_size == 1;
  p.dim = round_up(k_cache.size[3], 32);
  p.coarse_words = p.dim * p.bits / 16;
  p.words = p.single ? p.coarse_words / 2 : p.coarse_words;
  p.pages = block_size / page_size;
  p.group_pages = p.coarse ? coarse_size / page_size : lanes_of(p.pages);
  p.groups = p.pages / p.group_pages;
  p.lanes = lanes_of(p.group_pages);
  p.coarse_lanes = p.coarse ? lanes_of(p.groups) : 1;
  p.coarse_at = 4 * p.dim;
  p.fine_at = p.coarse_at + (p.coarse ? p.groups * p.coarse_words * 4 : 0);
  if (p.fine_at + p.pages * p.words * 4 != a.size[2]) throw std::runtime_error("packed: another layout");
  return p;
}

static void pack() {
  const Array& k_cache = get("k_cache");
  const PackParams p{.seq = sequences(k_cache.size[0], k_cache.size[2], 1),
                     .k_cache = k_cache,
                     .packed = packed_of(output("packed"), k_cache),
                     .num_new = get("num_new").data<int32_t>(),
                     .num_kv_heads = k_cache.size[1],
                     .sink_pages = integer("sink_pages")};
  for (int64_t b = 0; b < p.seq.batch; b++)
    for (int64_t i = p.first_block(b); i < p.end_block(b); i++)
      for (int64_t h = 0; h < p.num_kv_heads; h++) kernels().pack(p, b, h, i);
}

// What of it a token and KV head scores, each step in two parts.
static void score_unit(const PackedScoreParams& p, int64_t unit, const Span& span, int64_t b) {
  const int64_t first = p.first_group(span), end = p.last_group(span, b);
  if (p.kept_of(end - first, span.pos) < end - first) {
    const int64_t begin = first / p.packed.groups, last = round_up(end, p.packed.groups) / p.packed.groups;
    const int64_t middle = (begin + last) / 2;
    kernels().score_groups(p, unit, begin, middle);
    kernels().score_groups(p, unit, middle, last);
  }
  kernels().keep(p, unit);
  const int64_t kept = p.num_kept[unit];
  kernels().score_kept(p, unit, 0, kept / 2);
  kernels().score_kept(p, unit, kept / 2, kept);
  kernels().score_open(p, unit);
  if (p.scores) kernels().agree_packed(p, unit);
}

static void score_packed() {
  const Array &query = get("query"), &k_cache = get("k_cache");
  const Packed packed = packed_of(get("packed"), k_cache);
  PackedScoreParams p{};
  p.seq = sequences(k_cache.size[0], k_cache.size[2], query.size[1]);
  p.query = query;
  p.k_cache = k_cache;
  p.packed = packed;
  p.num_heads = query.size[2];
  p.num_kv_heads = k_cache.size[1];
  p.sink_pages = integer("sink_pages");
  p.recent_pages = integer("recent_pages");
  p.budget = integer("budget");
  p.coarse_limit = integer("coarse_limit");
  p.coarse_keep = *get("coarse_keep").data<double>();
  p.slack = real("slack");
  p.coarse_slack = real("coarse_slack");
  p.softmax_scale = real("softmax_scale");
  p.rule = static_cast<GroupRule>(integer("group_rule"));
  p.max_weight = std::min<int64_t>(32766, INT32_MAX / (2 * packed.dim * (packed.cells() - 1)));
  p.count();
  const int64_t batch = p.seq.batch, q_len = p.seq.q_len, heads = p.num_heads, kv_heads = p.num_kv_heads;
  auto floats = [&](const string& name, int64_t rows, int64_t n) {
    return output(name, "float32", {batch, q_len, rows, n}).data<float>();
  };
  p.weights = floats("weights", 8 * heads, packed.dim);
  p.largest = floats("largest", heads, 1);
  p.coarse_raw = floats("coarse_raw", heads, p.max_groups);
  p.coarse_scores = floats("coarse_scores", kv_heads, p.max_groups);
  p.raw = floats("raw", heads, p.max_candidates);
  if (p.rule != GroupRule::per_head) p.scores = floats("candidates", kv_heads, p.max_candidates);
  p.kept = output("kept", "int32", {batch, q_len, kv_heads, p.max_kept}).data<int32_t>();
  p.num_kept = output("num_kept", "int32", {batch, q_len, kv_heads}).data<int32_t>();

  // From candidates to pages.
  const int64_t of_unit = p.scores ? 1 : heads / kv_heads, pages = p.seq.max_pages;
  float* to = floats("scores", kv_heads * of_unit, pages);
  std::fill(to, to + batch * q_len * kv_heads * of_unit * pages, -INFINITY);
  for (int64_t token = 0; token < batch * q_len; token++) {
    const Span span = p.seq.span(token / q_len, token % q_len);
    kernels().weigh_packed(p, token);
    for (int64_t unit = token * kv_heads; span.pos >= 0 && unit < (token + 1) * kv_heads; unit++) {
      score_unit(p, unit, span, token / q_len);
      for (int64_t row = unit * of_unit; row < (unit + 1) * of_unit; row++) {
        const float* from = (p.scores ? p.scores : p.raw) + row * p.max_candidates;
        for (int64_t c = 0; c < p.candidates(span, token / q_len, unit); c++)
          to[row * pages + p.page_of(span, unit, c)] = from[c];
      }
    }
  }
}

static void select() {
  const Array& scores = get("scores");
  const int64_t batch = scores.size[0], q_len = scores.size[1], heads = scores.size[2], pages = scores.size[3];
  const int64_t page_size = integer("page_size"), most = integer("max_selected");
  const SelectParams p{.seq = {.block_table = nullptr,  // pages are places in the sequence
                               .seq_lens = get("seq_lens").data<int32_t>(),
                               .table_stride = 0,
                               .batch = batch,
                               .max_blocks = pages,
                               .num_blocks = 0,
                               .block_size = page_size,
                               .page_size = page_size,
                               .max_pages = pages,
                               .q_len = q_len,
                               .window = integer("window")},
                       .scores = scores.data<float>(),
                       .page_idx = output("page_idx", "int32", {batch, q_len, heads, most}).data<int32_t>(),
                       .counts = output("counts", "int32", {batch, q_len, heads}).data<int32_t>(),
                       .sel_heads = heads,
                       .max_selected = most,
                       .budget = integer("budget"),
                       .budget_fraction = *get("budget_fraction").data<double>(),
                       .sink_pages = integer("sink_pages"),
                       .recent_pages = integer("recent_pages"),
                       .packed = nullptr};
  for (int64_t i = 0; i < batch * q_len * heads; i++) kernels().select(p, i);
}

static void attend() {
  const Array &query = get("query"), &k_cache = get("k_cache"), &v_cache = get("v_cache");
  AttendParams p{};
  p.seq = sequences(k_cache.size[0], k_cache.size[2], query.size[1]);
  p.query = query;
  p.k_cache = k_cache;
  p.v_cache = v_cache;
  p.num_heads = query.size[2];
  p.num_kv_heads = p.sel_heads = k_cache.size[1];
  p.every_page = !arrays.count("page_idx");
  if (!p.every_page) {
    const Array& idx = get("page_idx");
    p.page_idx = idx.data<int32_t>();
    p.idx_stride_batch = idx.stride[0];
    p.idx_stride_token = idx.stride[1];
    p.idx_stride_head = idx.stride[2];
    p.sel_heads = idx.size[2];
    p.max_selected = idx.size[3];
  }
  if (arrays.count("sinks")) p.sinks = get("sinks").data<float>();
  p.softmax_scale = real("softmax_scale");
  p.softcap = real("softcap");
  const int64_t batch = p.seq.batch, q_len = p.seq.q_len, dim = v_cache.size[3], group = p.num_heads / p.sel_heads;
  p.num_tiles = (group + kTileHeads - 1) / kTileHeads;
  p.tile_heads = (group + p.num_tiles - 1) / p.num_tiles;
  p.num_splits = integer("num_splits");
  p.out = output("out", query.type, {batch, q_len, p.num_heads, dim});
  p.lse = output("lse", "float32", {batch, q_len, p.num_heads}).data<float>();
  if (p.num_splits > 1)
    p.partial = output("partial", "float32", {p.units(), p.num_splits, p.tile_heads, dim + 2}).data<float>();
  for (int64_t i = 0; i < p.units() * p.num_splits; i++) kernels().attend(p, i / p.num_splits, i % p.num_splits);
  for (int64_t i = 0; p.num_splits > 1 && i < p.units(); i++) kernels().combine(p, i);
}

static void merge() {
  const Array &out_a = get("out_a"), &lse_a = get("lse_a");
  const MergeParams p{.out_a = out_a.memory,
                      .out_b = get("out_b").memory,
                      .lse_a = lse_a.data<float>(),
                      .lse_b = get("lse_b").data<float>(),
                      .out = output("out", out_a.type, out_a.size).memory,
                      .lse = output("lse", "float32", lse_a.size).data<float>(),
                      .dtype = out_a.dtype(),
                      .dim = out_a.size.back()};
  kernels().merge(p, 0, lse_a.bytes / 4);
}

int main(int argc, char** argv) {
  const std::map<string, void (*)()> verbs = {
      {"append", append}, {"summarise", summarise}, {"score", score}, {"pack", pack}, {"score_packed", score_packed},
      {"select", select}, {"attend", attend},       {"merge", merge}};
  try {
    read(argv[1]);
    for (int i = 3; i < argc; i++) verbs.at(argv[i])();
    write(argv[2]);
  } catch (const std::exception& e) {
    std::cerr << e.what() << '\n';
    return 1;
  }
  return 0;
}
