#include "host/prefixes.h"

#include <algorithm>
#include <functional>

namespace quest_host {

namespace {

// The finaliser of splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

Prefixes::Prefixes(int64_t block_size, int hash_bits)
    : block_size_(block_size), mask_(hash_bits >= 64 ? ~uint64_t{0} : (uint64_t{1} << hash_bits) - 1) {}

uint64_t Prefixes::hash(uint64_t before, const int64_t* tokens) const {
  uint64_t h = before;
  for (int64_t i = 0; i < block_size_; ++i) h = mix(h + 0x9e3779b97f4a7c15u + static_cast<uint64_t>(tokens[i]));
  return h & mask_;
}

Prefixes::Place Prefixes::root(const std::string& extra) const {
  return {0, -1, mix(std::hash<std::string>{}(extra)) & mask_, extra};
}

int32_t Prefixes::step(Place& place, const int64_t* tokens) const {
  uint64_t h = hash(place.hash, tokens);
  auto [first, last] = by_hash_.equal_range(h);
  for (auto it = first; it != last; ++it) {
    const Entry& entry = entries_[it->second];
    if (entry.parent == place.entry && entry.extra == place.extra &&
        std::equal(entry.tokens.begin(), entry.tokens.end(), tokens)) {
      place = {entry.id, it->second, h, {}};
      return it->second;
    }
  }
  return -1;
}

void Prefixes::add(Place& place, const int64_t* tokens, int32_t block) {
  uint64_t h = hash(place.hash, tokens);
  entries_[block] = {++last_id_, place.entry, place.block, h, {tokens, tokens + block_size_}, place.extra};
  by_hash_.emplace(h, block);
  ++size_;
  place = {last_id_, block, h, {}};
}

void Prefixes::remove(int32_t block) {
  auto [first, last] = by_hash_.equal_range(entries_[block].hash);
  by_hash_.erase(std::find_if(first, last, [&](const auto& item) { return item.second == block; }));
  entries_[block] = {};
  --size_;
}

bool Prefixes::is_lost(int32_t block) const {
  const Entry* entry = &entries_[block];
  while (entry->parent != 0) {
    const Entry& before = entries_[entry->parent_block];
    if (before.id != entry->parent) return true;
    entry = &before;
  }
  return false;
}

void Prefixes::clear() {
  std::fill(entries_.begin(), entries_.end(), Entry{});
  by_hash_.clear();
  size_ = 0;
}

}  // namespace quest_host
