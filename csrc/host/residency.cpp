#include "host/residency.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>

#include <algorithm>

namespace quest_host {

// The state of a unit. Neither resident nor stored: it holds nothing.
constexpr uint8_t kResident = 1;     // in memory
constexpr uint8_t kDirty = 2;        // newer in memory than in the file
constexpr uint8_t kStored = 4;       // in the file
constexpr uint8_t kHeld = 8;         // used by this step
constexpr uint8_t kUse = 16;         // so many times the hand passes by before it takes the unit
constexpr uint8_t kUses = 3 * kUse;  // at most
constexpr size_t kMostParts = 1024;  // IOV_MAX

// The memory of `count` units in the file's order.
static std::vector<iovec> memory_of(const Layer& x, int64_t first, int64_t count) {
  std::vector<iovec> parts;
  for (int64_t u = first; u < first + count; u++) {
    parts.push_back({x.k + u * x.k_bytes, static_cast<size_t>(x.k_bytes)});
    parts.push_back({x.v + u * x.v_bytes, static_cast<size_t>(x.v_bytes)});
  }
  return parts;
}

// Move units between memory and a file, with preadv or pwritev, which may do less than they are told.
// A mapping of the file would be shorter, but says by a signal that the disk is full.
template <typename F>
static void transfer(F* call, const Layer& from, std::vector<iovec> parts, int64_t first, const char* failed) {
  int64_t offset = first * from.unit_bytes();
  for (size_t at = 0; at < parts.size();) {
    const ssize_t moved = call(from.fd, &parts[at], static_cast<int>(std::min(parts.size() - at, kMostParts)), offset);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) throw MoveError{errno, std::string(failed) + ": " + strerror(errno), from.file};
    if (moved == 0) throw MoveError{EIO, std::string(failed) + ": the file ends too early", from.file};
    offset += moved;
    for (size_t left = moved; left;) {
      const size_t part = std::min(left, parts[at].iov_len);
      parts[at].iov_base = static_cast<char*>(parts[at].iov_base) + part;
      parts[at].iov_len -= part;
      left -= part;
      at += !parts[at].iov_len;
    }
  }
}

static void release(const Layer& x, int64_t first, int64_t count) {
  madvise(x.k + first * x.k_bytes, count * x.k_bytes, MADV_DONTNEED);
  madvise(x.v + first * x.v_bytes, count * x.v_bytes, MADV_DONTNEED);
}

static void copy(const Layer& from, int64_t source, const Layer& to, int64_t target) {
  memcpy(to.k + target * to.k_bytes, from.k + source * from.k_bytes, from.k_bytes);
  memcpy(to.v + target * to.v_bytes, from.v + source * from.v_bytes, from.v_bytes);
}

void Residency::set_layer(int64_t layer, Layer made, int64_t num_blocks) {
  made.state.resize(num_blocks * made.units_per_block());
  layers_.at(layer) = std::move(made);
}

void Residency::grow(int64_t layer, char* k, char* v, int64_t num_blocks) {
  Layer &x = layers_.at(layer), larger = x;
  larger.k = k;
  larger.v = v;
  for (int64_t u = 0; u < x.num_units(); u++) {
    if (!(x.state[u] & kResident)) continue;
    copy(x, u, larger, u);
    release(x, u, 1);  // at once, or the layer would be in memory twice
  }
  set_layer(layer, std::move(larger), num_blocks);
}

// --- what a step uses ------------------------------------------------------------------------------------------------

template <typename F>
void Residency::each_unit(int64_t layer, Table table, const std::vector<Positions>& rows, const F& f) {
  const Layer& x = layers_.at(layer);
  const int64_t size = x.block_size, heads = x.unit_tokens ? x.num_kv_heads : 1,
                step = x.unit_tokens ? x.unit_tokens : size;
  for (size_t b = 0; b < rows.size(); b++) {
    const auto [begin, end] = rows[b];
    for (int64_t i = begin / size; i * size < end && i < table.max_blocks; i++) {
      const int64_t block = table.ids[b * table.stride + i];
      if (block < 0 || x.unit(block, 0, 0) >= x.num_units()) continue;
      const int64_t from = std::max(begin - i * size, int64_t{0}) / step * step, to = std::min(end - i * size, size);
      for (int64_t head = 0; head < heads; head++)
        for (int64_t offset = from; offset < to; offset += step) f(x.unit(block, head, offset));
    }
  }
}

void Residency::want(int64_t layer, int64_t unit, Access access) {
  Layer& x = layers_[layer];
  uint8_t& state = x.state[unit];
  const bool stored = state & (kResident | kStored);
  if (state & kHeld || (!stored && access != Access::write)) return;  // nothing to read
  if (state & kResident) {
    x.held += x.unit_bytes();
    counts_.hits += access != Access::write;
    if (access != Access::scan && (state & kUses) != kUses) state += kUse;
  } else {
    room_ += x.unit_bytes();
    counts_.misses += access != Access::write;
    if (stored) missing_.push_back(unit);
  }
  state |= kHeld;
  held_.push_back({layer, unit});
}

// Bring what `want` has found missing.
void Residency::fetch(int64_t layer, Access access) {
  Layer& x = layers_[layer];
  std::vector<int64_t> missing;
  std::swap(missing, missing_);
  const int64_t room = std::exchange(room_, 0);
  make_room(room, max_bytes_, layer);
  if (access == Access::select) spare_ = std::max(room, spare_ - spare_ / 64);
  std::sort(missing.begin(), missing.end());
  std::vector<std::pair<int64_t, int64_t>> runs;  // of units in a row: the first, and how many
  for (const int64_t unit : missing) {
    if (!runs.empty() && unit == runs.back().first + runs.back().second) {
      runs.back().second++;
    } else {
      runs.push_back({unit, 1});
    }
  }
  for (const auto& [first, count] : runs)  // the disk is told of all before one is waited for
    posix_fadvise(x.fd, first * x.unit_bytes(), count * x.unit_bytes(), POSIX_FADV_WILLNEED);
  for (const auto& [first, count] : runs) {
    try {
      transfer(preadv, x, memory_of(x, first, count), first, "reading K and V back failed, they are still in the file");
    } catch (...) {
      release(x, first, count);
      throw;
    }
    counts_.bytes_in += count * x.unit_bytes();
    for (int64_t u = first; u < first + count; u++) add(x, u, 0);
  }
}

// A held unit is in memory from now on.
void Residency::add(Layer& x, int64_t unit, uint8_t flags) {
  x.state[unit] |= kResident | flags;
  x.resident += x.unit_bytes();
  counts_.resident += x.unit_bytes();
  counts_.peak = std::max(counts_.peak, counts_.resident);
  if (x.state[unit] & kHeld) x.held += x.unit_bytes();
}

void Residency::use(int64_t layer, Table table, const std::vector<Positions>& rows, Access access) {
  each_unit(layer, table, rows, [&](int64_t unit) { want(layer, unit, access); });
  fetch(layer, access);
  if (access != Access::write) return;
  Layer& x = layers_[layer];
  each_unit(layer, table, rows, [&](int64_t unit) {
    if (!(x.state[unit] & kResident)) add(x, unit, kUse);
    x.state[unit] |= kDirty;
  });
}

void Residency::use_pages(int64_t layer, Table table, const Selection& s) {
  const Layer& x = layers_.at(layer);
  const int64_t size = x.block_size, step = x.unit_tokens ? x.unit_tokens : size;
  const int32_t* page_idx = s.page_idx;
  for (int64_t i = 0; i < s.batch * s.q_len * s.heads; i++, page_idx += s.selected) {
    const int32_t* ids = table.ids + i / (s.q_len * s.heads) * table.stride;
    const int64_t head = i % s.heads * x.num_kv_heads / s.heads;
    int64_t done = 0;  // pages are ascending, and often several of a unit
    for (int64_t j = 0; j < s.selected && page_idx[j] >= 0; j++) {
      const int64_t token = page_idx[j] * s.page_size;
      if (token < done || token >= table.max_blocks * size) continue;
      done = (token / step + 1) * step;
      const int64_t block = ids[token / size];
      if (block >= 0 && x.unit(block, 0, 0) < x.num_units())
        want(layer, x.unit(block, head, token % size), Access::select);
    }
  }
  fetch(layer, Access::select);
}

// --- whole blocks ----------------------------------------------------------------------------------------------------

void Residency::hold(const std::vector<int64_t>& blocks) {
  for (size_t layer = 0; layer < layers_.size(); layer++) {
    const Layer& x = layers_[layer];
    const int64_t size = x.units_per_block();
    for (const int64_t block : blocks)
      for (int64_t u = block * size; u < (block + 1) * size && u < x.num_units(); u++) want(layer, u, Access::select);
    room_ += static_cast<int64_t>(blocks.size()) * size * x.unit_bytes();
    fetch(layer, Access::select);
  }
}

void Residency::copy_blocks(const std::vector<std::pair<int64_t, int64_t>>& pairs) {
  for (Layer& x : layers_) {
    const int64_t size = x.units_per_block();
    for (const auto& [source, target] : pairs)
      for (int64_t u = 0; u < size && source * size + u < x.num_units(); u++) {
        if (!(x.state[source * size + u] & kResident)) continue;
        copy(x, source * size + u, x, target * size + u);
        add(x, target * size + u, kDirty | kUse);
      }
  }
}

void Residency::written(int64_t layer, const std::vector<int64_t>& blocks) {
  Layer& x = layers_.at(layer);
  const int64_t size = x.units_per_block();
  for (const int64_t block : blocks)
    for (int64_t u = block * size; u < (block + 1) * size && u < x.num_units(); u++) {
      if (!(x.state[u] & kResident)) add(x, u, kUse);
      x.state[u] |= kDirty;
    }
}

void Residency::forget(const std::vector<int64_t>& blocks) {
  for (Layer& x : layers_) {
    const int64_t size = x.units_per_block();
    for (const int64_t block : blocks)
      for (int64_t u = block * size; u < (block + 1) * size && u < x.num_units(); u++) {
        if (x.state[u] & kResident) {
          release(x, u, 1);
          x.resident -= x.unit_bytes();
          counts_.resident -= x.unit_bytes();
          if (x.state[u] & kHeld) x.held -= x.unit_bytes();
        }
        x.state[u] = 0;
      }
  }
}

void Residency::copy_layer(int64_t layer, const Residency& other) {
  Layer& x = layers_.at(layer);
  const Layer& from = other.layers_.at(layer);
  for (int64_t u = 0; u < from.num_units(); u++) {
    if (from.state[u] & kResident) {
      copy(from, u, x, u);
    } else if (from.state[u] & kStored) {
      transfer(preadv, from, memory_of(x, u, 1), u, "reading K and V for a copy of the cache failed");
    } else {
      continue;
    }
    add(x, u, kDirty);
    make_room(0, max_bytes_, layer);
  }
}

// --- moving out ------------------------------------------------------------------------------------------------------

void Residency::settle() {
  for (const auto& [layer, unit] : held_) {
    layers_[layer].state[unit] &= ~kHeld;
    layers_[layer].held = 0;
  }
  held_.clear();
  try {
    make_room(0, max_bytes_ - std::min(spare_, max_bytes_ / 2), -1);
  } catch (const MoveError&) {
    // What a step did is done. Who uses something next fails with this before anything is.
  }
}

// Move out units that are not held until `bytes` more, of `layer`, fit under the limit, or there are none.
//
// The layer that has most gives first, so that all have the same in the end. One clock for all would do worse than
// none: layers come in turn, and just before one comes it would have taken what that one read in the step before.
void Residency::make_room(int64_t bytes, int64_t limit, int64_t layer) {
  while (counts_.resident + bytes > limit) {
    Layer* most = nullptr;
    int64_t size = -1, second = 0;
    for (Layer& x : layers_) {
      if (x.resident == x.held) continue;
      const int64_t has = x.resident + (layer >= 0 && &x == &layers_[layer] ? bytes : 0);
      second = std::max(second, std::min(size, has));
      if (has > size) size = has, most = &x;
    }
    if (!most) return;
    const int64_t excess = std::min(counts_.resident + bytes - limit, std::max(size - second, most->unit_bytes()));
    take_from(*most, std::min(excess, most->resident - most->held));
  }
}

// Move out `bytes` of a layer, rounded up to units, of which it has so many that are not held.
void Residency::take_from(Layer& x, int64_t bytes) {
  while (bytes > 0) {
    if (x.hand >= x.num_units()) x.hand = 0;
    const int64_t first = x.hand;
    const int64_t end = std::min(x.num_units(), first + (bytes + x.unit_bytes() - 1) / x.unit_bytes());
    while (x.hand < end && (x.state[x.hand] & (kResident | kHeld | kUses)) == kResident) x.hand++;
    if (x.hand > first) {
      bytes -= (x.hand - first) * x.unit_bytes();
      move_out(x, first, x.hand - first);
    } else {
      uint8_t& state = x.state[x.hand++];
      if ((state & (kResident | kHeld)) == kResident) state -= kUse;
    }
  }
}

void Residency::move_out(Layer& x, int64_t first, int64_t count) {
  const int64_t end = first + count;
  for (int64_t u = first, next; u < end; u = next) {
    for (next = u + 1; next < end && (x.state[next] & kDirty) == (x.state[u] & kDirty);) next++;
    if (!(x.state[u] & kDirty)) continue;
    transfer(pwritev, x, memory_of(x, u, next - u), u, "moving K and V out failed, they stay in memory");
    counts_.bytes_out += (next - u) * x.unit_bytes();
    std::fill(&x.state[u], &x.state[0] + next, kResident | kStored);
  }
  release(x, first, count);
  std::fill(&x.state[first], &x.state[0] + end, kStored);
  x.resident -= count * x.unit_bytes();
  counts_.resident -= count * x.unit_bytes();
}

}  // namespace quest_host
