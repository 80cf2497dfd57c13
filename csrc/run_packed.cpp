// Packed summaries: params to tasks, as run.cpp does it for those in K's dtype.
#include "run.h"
#include "step.h"

namespace quest {

using cpu::kernels;

constexpr int64_t kBlocksPerTask = 8;  // at least
constexpr int64_t kTasksPerThread = 4;

void run(const PackParams& p) {
  const Sequences& seq = p.seq;
  int64_t most = 0;
  for (int64_t b = 0; b < seq.batch; b++) most = std::max(most, p.end_block(b) - p.first_block(b));
  run_tasks(seq.batch * most * p.num_kv_heads, seq.batch * most * p.num_kv_heads * seq.block_size * p.packed.dim,
            [&](int64_t i) {
              const int64_t b = i / p.num_kv_heads / most, index = p.first_block(b) + i / p.num_kv_heads % most;
              if (index < p.end_block(b)) kernels().pack(p, b, i % p.num_kv_heads, index);
            });
}

// The tasks that score a step's units: their groups in parts of blocks, then the pages of what they keep, also in
// parts. The thread that ends the last part of a unit goes on with what needs all of them.
class PackedTasks {
 public:
  template <typename Needed>
  PackedTasks(const PackedScoreParams& p, const Needed& needed)
      : p_(p),
        units_(p.seq.batch * p.seq.q_len * p.num_kv_heads),
        parts_(parts_of(p, units_)),
        to_keep_(units_, parts_),
        to_score_(units_, parts_),
        kept_(units_),
        scored_(units_),
        needed_(units_) {
    for (int64_t u = 0; u < units_; u++) needed_[u] = needed(u / p.num_kv_heads);
  }
  int64_t size() const { return 2 * units_ * parts_; }
  void work(int64_t task) {
    const int64_t unit = task % (units_ * parts_) / parts_, part = task % parts_;
    if (task < units_ * parts_)
      groups(unit, part);
    else
      pages(unit, part);
  }
  // Wait for a unit's scores; false if it needs none.
  bool ready(int64_t unit) const {
    scored_.wait(unit);
    return needed_[unit];
  }

 private:
  static int64_t parts_of(const PackedScoreParams& p, int64_t units) {
    const int64_t threads = torch::stable::get_num_threads(), blocks = p.max_groups / p.packed.groups;
    if (threads <= 1 || units == 0) return 1;
    return std::max<int64_t>(1, std::min(ceil_div(kTasksPerThread * threads, units), blocks / kBlocksPerTask));
  }
  void groups(int64_t unit, int64_t part) {
    if (needed_[unit]) {
      const int64_t token = unit / p_.num_kv_heads;
      const Span span = p_.seq.span(token / p_.seq.q_len, token % p_.seq.q_len);
      const int64_t first = p_.first_group(span), end = p_.last_group(span, token / p_.seq.q_len);
      if (p_.kept_of(end - first, span.pos) < end - first) {
        const int64_t begin = first / p_.packed.groups, n = ceil_div(end, p_.packed.groups) - begin;
        kernels().score_groups(p_, unit, begin + n * part / parts_, begin + n * (part + 1) / parts_);
      }
    }
    if (!to_keep_.last(unit)) return;
    if (needed_[unit]) kernels().keep(p_, unit);
    kept_.set(unit);
  }
  void pages(int64_t unit, int64_t part) {
    kept_.wait(unit);
    if (needed_[unit]) {
      const int64_t n = p_.num_kept[unit];
      kernels().score_kept(p_, unit, n * part / parts_, n * (part + 1) / parts_);
      if (part == parts_ - 1) kernels().score_open(p_, unit);
    }
    if (!to_score_.last(unit)) return;
    if (needed_[unit] && p_.rule != GroupRule::per_head) kernels().agree_packed(p_, unit);
    scored_.set(unit);
  }

  const PackedScoreParams& p_;
  const int64_t units_, parts_;
  Countdown to_keep_, to_score_;
  Flags kept_, scored_;
  std::vector<char> needed_;
};

static void weigh(const PackedScoreParams& p) {
  const int64_t tokens = p.seq.batch * p.seq.q_len;
  run_tasks(tokens, tokens * p.num_heads * p.packed.dim, [&](int64_t i) { kernels().weigh_packed(p, i); });
}

static int64_t work_of(const PackedScoreParams& p) {
  return p.seq.batch * p.seq.q_len * p.num_heads * (p.max_groups + p.max_candidates) * p.packed.dim;
}

void run(const PackedScoreParams& p) {
  PackedTasks tasks(p, [&](int64_t token) { return p.seq.span(token / p.seq.q_len, token % p.seq.q_len).pos >= 0; });
  weigh(p);
  run_tasks(tasks.size(), work_of(p), [&](int64_t i) { tasks.work(i); });
}

std::tuple<Tensor, Tensor> run(const PackedScoreParams& scored, const SelectParams& selected, AttendParams& attended,
                               ScalarType out_dtype) {
  PackedTasks tasks(scored, [&](int64_t token) {
    const Span span = scored.seq.span(token / scored.seq.q_len, token % scored.seq.q_len);
    return span.pos >= 0 && !selected.reads_all(span);
  });
  weigh(scored);
  return run_step(
      tasks.size(), [&](int64_t i) { tasks.work(i); }, [&](int64_t unit) { tasks.ready(unit); },
      scored.max_groups + scored.max_candidates, selected, attended, out_dtype);
}

}  // namespace quest
