// Tasks on torch's threads, and the second half of every sparse step: what is selected is attended to.
#pragma once

#include <algorithm>
#include <atomic>
#include <thread>
#include <tuple>
#include <vector>

#include "arguments.h"
#include "cpu/kernels.h"
#include "tensors.h"

namespace quest {

constexpr int64_t kWorthThreads = 1 << 15;  // numbers to touch; below, waking the pool costs more than it gives

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Run f(0) .. f(n - 1), which touch about `work` numbers in all, on torch's pool. A thread takes the next task as it
// finishes one, so ragged tasks balance.
template <typename F>
void run_tasks(int64_t n, int64_t work, const F& f) {
  const int64_t threads = std::min<int64_t>(n, torch::stable::get_num_threads());
  if (threads <= 1 || work < kWorthThreads) {
    for (int64_t i = 0; i < n; i++) f(i);
    return;
  }
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; worker++)
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) f(i);
  });
}

// For each of n things, how many of its parts are still to be done.
class Countdown {
 public:
  Countdown(int64_t n, int64_t parts) : left_(n) {
    for (auto& x : left_) x.store(parts, std::memory_order_relaxed);
  }
  // Count one part of thing i as done; whether it was the last, whose caller sees what all parts have written.
  bool last(int64_t i) { return left_[i].fetch_sub(1, std::memory_order_acq_rel) == 1; }

 private:
  std::vector<std::atomic<int64_t>> left_;
};

// For each of n things, whether it is done. Who waits for one must know that another thread is at work on it.
class Flags {
 public:
  explicit Flags(int64_t n) : done_(n) {}
  void set(int64_t i) { done_[i].store(true, std::memory_order_release); }
  void wait(int64_t i) const {
    for (int spins = 0; !done_[i].load(std::memory_order_acquire); spins++)
      if (spins > 1000) std::this_thread::yield();
  }

 private:
  std::vector<std::atomic<bool>> done_;
};

// Few units on many threads: split their pages, so that no thread waits long for the last one. Returns what holds the
// partial results.
Tensor split(AttendParams& p);

// The whole step in one parallel region, whose tasks are taken in order: `before` ones that score, before_task(i), then
// for each unit (batch, token, kv head) its selection, for which agree(unit) makes the scores ready, and its attention
// in splits, whose last to finish combines them. A unit is selected for just before the unit ahead of it is attended
// to: while one thread selects, which leaves the memory idle, the others read. A selection waits for its unit's scores
// and attention for its unit's selection, that is only ever for work which some thread has begun before: with any
// number of threads nobody waits forever. A unit's scoring touches about `scored` rows.
template <typename Before, typename Agree>
std::tuple<Tensor, Tensor> run_step(int64_t before, const Before& before_task, const Agree& agree, int64_t scored,
                                    const SelectParams& selected, AttendParams& attended, ScalarType out_dtype) {
  const Sequences& seq = attended.seq;
  auto result = allocate(attended, out_dtype);
  const Tensor partial = split(attended);
  const int64_t units = seq.batch * seq.q_len * attended.num_kv_heads;
  const int64_t selections = attended.sel_heads / attended.num_kv_heads;  // of a unit
  const int64_t attends = selections * attended.num_tiles;                // of a unit, each in num_splits tasks
  Countdown to_attend(units * attends, attended.num_splits);
  Flags chosen(units);

  auto select = [&](int64_t unit) {
    agree(unit);
    for (int64_t s = unit * selections; s < (unit + 1) * selections; s++) cpu::kernels().select(selected, s);
    chosen.set(unit);
  };
  auto attend = [&](int64_t unit, int64_t part) {
    chosen.wait(unit);
    const int64_t which = unit * attends + part / attended.num_splits;
    cpu::kernels().attend(attended, which, part % attended.num_splits);
    if (attended.num_splits > 1 && to_attend.last(which)) cpu::kernels().combine(attended, which);
  };

  const int64_t parts = attends * attended.num_splits;
  const int64_t rows = units * attends * attended.tile_heads * (scored + attended.max_selected * seq.page_size);
  run_tasks(before + (units + 1) * (1 + parts), rows * attended.k_cache.dim, [&](int64_t i) {
    if (i < before) return before_task(i);
    const int64_t unit = (i - before) / (1 + parts), part = (i - before) % (1 + parts) - 1;
    if (part < 0 && unit < units) select(unit);
    if (part >= 0 && unit > 0) attend(unit - 1, part);
  });
  return result;
}

}  // namespace quest
