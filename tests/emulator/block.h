// One block: its threads as fibers, its barrier, what its warps do together, and its asynchronous copies.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
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

class Block {
 public:
  dim3 size, grid;
  uint3 index;

  Thread& current() { return *current_; }
  unsigned char* shared() { return shared_; }

  void run(const std::function<void()>& kernel, unsigned char* shared, unsigned seed) {
    start(kernel, shared);
    std::vector<size_t> order(threads_.size());
    for (size_t i = 0; i < order.size(); i++) order[i] = config.order == Order::reverse ? order.size() - 1 - i : i;
    Random random(seed);
    while (alive_ > 0) {
      if (config.order == Order::shuffled) random.shuffle(order);
      bool progress = false;
      for (size_t i : order) progress |= resume(threads_[i]);
      if (!error_.empty()) throw std::runtime_error(error_);
      if (!progress) throw std::runtime_error(deadlock());
    }
    for (const Thread& t : threads_)
      if (!t.copies.empty()) throw std::runtime_error("a copy to shared memory was never waited for");
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

  struct Random {
    unsigned state;
    explicit Random(unsigned seed) : state(seed * 2654435761u + 1) {}
    template <typename T>
    void shuffle(std::vector<T>& x) {
      for (size_t i = x.size(); i > 1; i--) {
        state = state * 1664525u + 1013904223u;
        std::swap(x[i - 1], x[(state >> 8) % i]);
      }
    }
  };

 private:
  void start(const std::function<void()>& kernel, unsigned char* shared);
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
  const std::function<void()>* kernel_ = nullptr;
  unsigned char* shared_ = nullptr;
  Thread* current_ = nullptr;
  void* scheduler_ = nullptr;
  unsigned alive_ = 0, barrier_arrived_ = 0, barrier_turn_ = 0;
  Place barrier_place_{};
  std::string error_;
};

inline Block block;  // the one that runs
inline Thread& current() { return block.current(); }

inline void Block::start(const std::function<void()>& kernel, unsigned char* shared) {
  const size_t count = size_t{size.x} * size.y * size.z;
  kernel_ = &kernel;
  shared_ = shared;
  alive_ = count, barrier_arrived_ = 0;
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
  try {
    (*block.kernel_)();
  } catch (const std::exception& e) {
    if (block.error_.empty()) block.error_ = e.what();
  }
  Thread& t = *block.current_;
  t.done = true;
  block.alive_--;
  block.open_barrier();
  emulator_switch(&t.stack_pointer, block.scheduler_);
  abort();  // a fiber that is done is not resumed
}

}  // namespace emulator
