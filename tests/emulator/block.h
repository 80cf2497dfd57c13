// One block: its threads as fibers, its barrier, what its warps do together, and its asynchronous copies.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "emulator/fiber.h"
#include "emulator/types.h"

namespace emulator {

enum class Order : int { forward, reverse, shuffled };

struct Config {
  Order order = Order::forward;
  unsigned seed = 1;
};
inline Config config;

// A line of a kernel, for messages.
struct Place {
  const char* file;
  int line;
  bool operator==(const Place& other) const { return file == other.file && line == other.line; }
  std::string text() const { return std::string(file) + ":" + std::to_string(line); }
};
// As the last parameters of a function: the place that it is called from.
#define EMULATOR_CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()

// The lanes of a warp that call a function together. Each leaves what it gives; the last to come works on all of it.
constexpr int kSlotBytes = 64;
using Slots = unsigned char (*)[kSlotBytes];
struct Gathering {
  unsigned mask, arrived = 0, turn = 0;
  const char* what = nullptr;
  alignas(16) unsigned char slots[2][32][kSlotBytes];  // by turns: the slow may still read when the fast come again
  explicit Gathering(unsigned mask) : mask(mask) {}
};

struct Warp {
  std::vector<std::unique_ptr<Gathering>> gatherings;
  Gathering& of(unsigned mask) {
    for (auto& g : gatherings)
      if (g->mask == mask) return *g;
    gatherings.push_back(std::make_unique<Gathering>(mask));
    return *gatherings.back();
  }
};

struct Copy {
  void* to;
  unsigned char bytes[16];
};

struct Thread {
  uint3 index;
  int lane;
  Warp* warp;
  void* stack_pointer;
  bool done;
  const unsigned* waits_for;  // blocked as long as it holds `seen`
  unsigned seen;
  const char* what;
  Place place;
  std::vector<Copy> copies;    // not yet in shared memory
  std::vector<size_t> groups;  // of copies, by where they end
};

// Numbers that look random, the same for the same seed.
class Random {
 public:
  explicit Random(unsigned seed = 1) : state_(seed * 2654435761u + 1) {}
  size_t below(size_t n) {
    state_ = state_ * 1664525u + 1013904223u;
    return (state_ >> 8) % n;
  }
  template <typename T>
  void shuffle(std::vector<T>& x) {
    for (size_t i = x.size(); i > 1; i--) std::swap(x[i - 1], x[below(i)]);
  }

 private:
  unsigned state_;
};

// When to shuffle anew: after a few steps or after thousands, so that what comes last may have to wait for long.
class Patience {
 public:
  bool ends(Random& random) {
    if (left_ > 0) return left_--, false;
    left_ = size_t{1} << random.below(15);
    return true;
  }

 private:
  size_t left_ = 0;
};

// The order in which n things run, threads or blocks.
inline std::vector<size_t> order_of(size_t n, Random& random) {
  std::vector<size_t> order(n);
  for (size_t i = 0; i < n; i++) order[i] = config.order == Order::reverse ? n - 1 - i : i;
  if (config.order == Order::shuffled) random.shuffle(order);
  return order;
}

// Dynamic shared memory, NaN at first. The allocation has just its size, so that AddressSanitizer knows where it ends;
// marks behind it say so in builds without.
class SharedMemory {
 public:
  unsigned char* bytes() { return memory_.get(); }
  void reset(size_t size) {
    if (!memory_ || size != size_) {
      void* p = nullptr;
      if (posix_memalign(&p, 1024, size + kMarks)) throw std::bad_alloc();
      memory_.reset(static_cast<unsigned char*>(p));
      size_ = size;
    }
    memset(memory_.get(), 0xff, size_ + kMarks);
  }
  bool overrun() const {
    const unsigned char* end = memory_.get() + size_ + kMarks;
    return std::any_of(end - kMarks, end, [](unsigned char mark) { return mark != 0xff; });
  }

 private:
#ifdef __SANITIZE_ADDRESS__
  static constexpr size_t kMarks = 0;
#else
  static constexpr size_t kMarks = 64;
#endif
  struct Free {
    void operator()(unsigned char* p) const { free(p); }
  };
  std::unique_ptr<unsigned char, Free> memory_;
  size_t size_ = 0;
};

class Block;
inline Block* running;  // the block whose thread runs

class Block {
 public:
  dim3 size, grid;
  uint3 index;

  Thread& current() { return *current_; }
  unsigned char* shared() { return shared_.bytes(); }

  void start(const std::function<void()>& kernel, size_t shared_bytes, unsigned seed);

  // Let threads run until they wait for others: all of them, or in the shuffled order the first that can. False at the
  // block's end.
  bool step() {
    running = this;
    if (config.order == Order::shuffled && patience_.ends(random_)) random_.shuffle(order_);
    bool resumed = false;
    for (size_t i : order_) {
      resumed |= resume(threads_[i]);
      if (resumed && config.order == Order::shuffled) break;
    }
    if (!error_.empty()) throw std::runtime_error(error_);
    if (alive_ > 0 && !resumed) throw std::runtime_error(deadlock());
    if (alive_ == 0) expect_a_clean_end();
    return alive_ > 0;
  }

  void barrier(Place place) {
    if (barrier_arrived_ == 0)
      barrier_place_ = place;
    else if (!(barrier_place_ == place))
      throw std::runtime_error("divergent __syncthreads: " + place.text() + " and " + barrier_place_.text());
    const unsigned turn = barrier_turn_;
    barrier_arrived_++;
    open_barrier();
    if (barrier_turn_ == turn) wait(&barrier_turn_, turn, "__syncthreads", place);
  }

  // Where other blocks can see how far this one has come: let them, in the shuffled order, go first for a while.
  void pause() {
    if (config.order != Order::shuffled) return;
    paused_ = true;
    emulator_switch(&current_->stack_pointer, scheduler_);
  }
  bool paused() { return std::exchange(paused_, false); }

  // All lanes of `mask` give a value; the last to come runs `work` on the values; all get them back.
  template <typename T, typename Work>
  Slots together(unsigned mask, const T& value, const char* what, Place place, const Work& work) {
    static_assert(sizeof value <= kSlotBytes);
    Thread& t = *current_;
    if (!(mask >> t.lane & 1)) throw std::runtime_error(std::string(what) + " without its own lane: " + place.text());
    Gathering& g = t.warp->of(mask);
    if (g.arrived == 0) g.what = what;
    if (strcmp(g.what, what))
      throw std::runtime_error(std::string("lanes in ") + g.what + " and in " + what + ": " + place.text());
    const unsigned turn = g.turn;
    Slots slots = g.slots[turn & 1];
    memcpy(slots[t.lane], &value, sizeof value);
    g.arrived |= 1u << t.lane;
    if (g.arrived == mask) {
      work(slots);
      g.arrived = 0;
      g.turn++;
    } else {
      wait(&g.turn, turn, what, place);
    }
    return slots;
  }

 private:
  static void enter();

  void wait(const unsigned* what_changes, unsigned seen, const char* what, Place place) {
    Thread& t = *current_;
    t.waits_for = what_changes, t.seen = seen, t.what = what, t.place = place;
    emulator_switch(&t.stack_pointer, scheduler_);
  }
  bool resume(Thread& t) {
    if (t.done || (t.waits_for && *t.waits_for == t.seen)) return false;
    t.waits_for = nullptr;
    current_ = &t;
    emulator_switch(&scheduler_, t.stack_pointer);
    return true;
  }
  // Threads that have ended are not waited for, as on a GPU.
  void open_barrier() {
    if (barrier_arrived_ == 0 || barrier_arrived_ < alive_) return;
    barrier_arrived_ = 0;
    barrier_turn_++;
  }
  void expect_a_clean_end() const {
    for (const Thread& t : threads_)
      if (!t.copies.empty()) throw std::runtime_error("a copy to shared memory was never waited for");
    if (shared_.overrun()) throw std::runtime_error("shared memory was written beyond its end");
  }
  std::string deadlock() const {
    std::string text = "deadlock in block " + std::to_string(index.x) + ":";
    int named = 0;
    for (const Thread& t : threads_) {
      if (t.done || ++named > 4) continue;
      text += " thread " + std::to_string(t.index.x) + " in " + t.what + " at " + t.place.text() + ";";
    }
    return text;
  }

  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  Stacks stacks_;
  SharedMemory shared_;
  Random random_;
  Patience patience_;
  std::vector<size_t> order_;
  const std::function<void()>* kernel_ = nullptr;
  Thread* current_ = nullptr;
  void* scheduler_ = nullptr;
  unsigned alive_ = 0, barrier_arrived_ = 0, barrier_turn_ = 0;
  Place barrier_place_{};
  bool paused_ = false;
  std::string error_;
};

inline Block& block() { return *running; }
inline Thread& current() { return running->current(); }

inline void Block::start(const std::function<void()>& kernel, size_t shared_bytes, unsigned seed) {
  const size_t count = size_t{size.x} * size.y * size.z;
  kernel_ = &kernel;
  shared_.reset(shared_bytes);
  random_ = Random(seed);
  order_ = order_of(count, random_);
  alive_ = count, barrier_arrived_ = 0, paused_ = false;
  error_.clear();
  stacks_.reserve(count);
  threads_.resize(count);
  warps_.clear();
  warps_.resize((count + 31) / 32);
  for (size_t i = 0; i < count; i++) {
    Thread& t = threads_[i];
    t.index = {static_cast<unsigned>(i % size.x), static_cast<unsigned>(i / size.x % size.y),
               static_cast<unsigned>(i / size.x / size.y)};
    t.lane = i % 32;
    t.warp = &warps_[i / 32];
    t.done = false;
    t.waits_for = nullptr;
    t.copies.clear();
    t.groups.clear();
    t.stack_pointer = stacks_.prepare(i, &Block::enter);
  }
}

inline void Block::enter() {
  Block& self = *running;
  try {
    (*self.kernel_)();
  } catch (const std::exception& e) {
    if (self.error_.empty()) self.error_ = e.what();
  }
  Thread& t = *self.current_;
  t.done = true;
  self.alive_--;
  self.open_barrier();
  emulator_switch(&t.stack_pointer, self.scheduler_);
  abort();  // a fiber that is done is not resumed
}

}  // namespace emulator
