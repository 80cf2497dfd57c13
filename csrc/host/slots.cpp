#include "host/slots.h"

#include <algorithm>
#include <utility>

namespace quest_host {

constexpr uint8_t kMostUse = 3;

Slots::Slots(int64_t num_blocks, int64_t num_kv_heads, int64_t units_per_head, int64_t unit_tokens, int64_t capacity)
    : num_kv_heads_(num_kv_heads),
      units_per_head_(units_per_head),
      unit_tokens_(unit_tokens),
      capacity_(capacity),
      unit_of_(capacity, -1),
      use_(capacity),
      dirty_(capacity) {
  for (int64_t slot = capacity; slot-- > 0;) free_.push_back(static_cast<int32_t>(slot));
  grow(num_blocks);
}

void Slots::grow(int64_t num_blocks) {
  const int64_t num_units = num_blocks * num_kv_heads_ * units_per_head_;
  slot_of_.resize(num_units, -1);
  used_by_.resize(num_units);
}

bool Slots::use(int64_t unit) { return std::exchange(used_by_.at(unit), call_) != call_; }

// A slot that is free, or that of the first unit which the hand finds unused. Not all slots may be this call's.
int64_t Slots::take() {
  if (!free_.empty()) {
    const int64_t slot = free_.back();
    free_.pop_back();
    return slot;
  }
  for (;; hand_ = (hand_ + 1) % capacity_) {
    const int64_t slot = hand_, unit = unit_of_[slot];
    if (used_by_[unit] == call_) continue;
    if (use_[slot]) {
      use_[slot]--;
      continue;
    }
    moves_.gone.push_back({unit, slot});
    moves_.dirty.push_back(dirty_[slot]);
    slot_of_[unit] = -1;
    counts_.used--;
    return slot;
  }
}

void Slots::come(int64_t unit) {
  const int64_t slot = take();
  slot_of_[unit] = static_cast<int32_t>(slot);
  unit_of_[slot] = static_cast<int32_t>(unit);
  use_[slot] = dirty_[slot] = 0;
  moves_.come.push_back({unit, slot});
  counts_.peak = std::max(counts_.peak, ++counts_.used);
}

std::vector<int64_t> Slots::units(Table table, const Selection& s) {
  call_++;
  std::vector<int64_t> found;
  const int64_t size = units_per_head_ * unit_tokens_;
  const int32_t* page_idx = s.page_idx;
  for (int64_t i = 0; i < s.batch * s.q_len * s.heads; i++, page_idx += s.selected) {
    const int32_t* ids = table.ids + i / (s.q_len * s.heads) * table.stride;
    const int64_t head = i % s.heads * num_kv_heads_ / s.heads;
    for (int64_t j = 0; j < s.selected && page_idx[j] >= 0; j++) {
      const int64_t token = page_idx[j] * s.page_size;
      if (token >= table.max_blocks * size || ids[token / size] < 0) continue;
      const int64_t unit = (ids[token / size] * num_kv_heads_ + head) * units_per_head_ + token % size / unit_tokens_;
      if (use(unit)) found.push_back(unit);
    }
  }
  return found;
}

bool Slots::read(const int64_t* units, int64_t count) {
  moves_ = {};
  call_++;
  int64_t hits = 0;
  for (int64_t i = 0; i < count; i++) {
    use(units[i]);
    hits += slot_of_[units[i]] >= 0;
  }
  counts_.hits += hits;
  counts_.misses += count - hits;
  if (count > capacity_) return false;
  for (int64_t i = 0; i < count; i++) {
    if (const int64_t slot = slot_of_[units[i]]; slot >= 0) {
      use_[slot] = std::min<uint8_t>(use_[slot] + 1, kMostUse);
    } else {
      come(units[i]);
    }
  }
  return true;
}

std::vector<int64_t> Slots::write(const int64_t* units, int64_t count) {
  moves_ = {};
  call_++;
  int64_t held = 0;
  for (int64_t i = 0; i < count; i++) held += use(units[i]) && slot_of_[units[i]] >= 0;
  std::vector<int64_t> slots(count);
  for (int64_t i = count; i-- > 0;) {  // the newest first
    if (slot_of_[units[i]] < 0 && held < capacity_) {
      come(units[i]);
      held++;
    }
    const int64_t slot = slots[i] = slot_of_[units[i]];
    if (slot < 0) continue;
    dirty_[slot] = 1;
    use_[slot] = std::max<uint8_t>(use_[slot], 1);
  }
  return slots;
}

void Slots::undo() {
  for (const auto& [unit, slot] : moves_.come) slot_of_[unit] = unit_of_[slot] = -1;
  for (size_t i = 0; i < moves_.gone.size(); i++) {
    const auto& [unit, slot] = moves_.gone[i];
    slot_of_[unit] = static_cast<int32_t>(slot);
    unit_of_[slot] = static_cast<int32_t>(unit);
    dirty_[slot] = moves_.dirty[i];
  }
  for (const auto& [unit, slot] : moves_.come)
    if (unit_of_[slot] < 0) free_.push_back(static_cast<int32_t>(slot));
  counts_.used += static_cast<int64_t>(moves_.gone.size()) - static_cast<int64_t>(moves_.come.size());
  moves_ = {};
}

void Slots::forget(const std::vector<int64_t>& blocks) {
  const int64_t size = num_kv_heads_ * units_per_head_, end = static_cast<int64_t>(slot_of_.size());
  for (const int64_t block : blocks)
    for (int64_t unit = block * size; unit < (block + 1) * size && unit < end; unit++) {
      const int32_t slot = slot_of_[unit];
      if (slot < 0) continue;
      slot_of_[unit] = unit_of_[slot] = -1;
      free_.push_back(slot);
      counts_.used--;
    }
}

}  // namespace quest_host
