#include "host/blocks.h"

#include <numeric>

namespace quest_host {

namespace {

int64_t at_least(const char* name, int64_t value, int64_t low) {
  if (value < low) {
    throw std::invalid_argument(std::string("Blocks: ") + name + " must be at least " + std::to_string(low) + ", got " +
                                std::to_string(value));
  }
  return value;
}

}  // namespace

Blocks::Blocks(int64_t num_blocks, int64_t block_size, int64_t watermark, int hash_bits)
    : block_size_(at_least("block_size", block_size, 1)),
      watermark_(at_least("watermark", watermark, 0)),
      next_{0},
      previous_{0},
      prefixes_(block_size, static_cast<int>(at_least("hash_bits", hash_bits, 0))) {
  grow(at_least("num_blocks", num_blocks, 0));
}

int32_t Blocks::refs(int32_t block) const {
  check(block);
  return refs_[block];
}

bool Blocks::is_cached(int32_t block) const {
  check(block);
  return prefixes_.has(block);
}

void Blocks::grow(int64_t num_blocks) {
  int64_t before = size(), added = num_blocks - before;
  if (added <= 0) return;
  // Blocks that lie deeper in the stack are taken later, and of new ones the lowest first.
  std::vector<int32_t> free(added);
  std::iota(free.rbegin(), free.rend(), static_cast<int32_t>(before));
  free.insert(free.end(), free_.begin(), free_.end());
  std::vector<int32_t> next(num_blocks + 1), previous(num_blocks + 1);
  auto moved = [&](int32_t node) { return node == before ? static_cast<int32_t>(num_blocks) : node; };
  for (int64_t i = 0; i <= before; ++i) {
    next[moved(i)] = moved(next_[i]);
    previous[moved(i)] = moved(previous_[i]);
  }
  prefixes_.grow(num_blocks);
  refs_.resize(num_blocks, 0);
  free_ = std::move(free);
  next_ = std::move(next);
  previous_ = std::move(previous);
}

void Blocks::expect(int64_t count, const char* op) const {
  if (count > num_free()) {
    throw OutOfBlocks(std::string(op) + ": " + std::to_string(count) + " more blocks are needed, and " +
                      std::to_string(num_free()) + " of " + std::to_string(size()) + " are free");
  }
}

int32_t Blocks::allocate() {
  int32_t block;
  if (!free_.empty()) {
    block = free_.back();
    free_.pop_back();
  } else {
    block = next_[size()];
    ++num_evicted_;
    unlink(block);
    prefixes_.remove(block);
  }
  refs_[block] = 1;
  return block;
}

void Blocks::retain(int32_t block) {
  check(block);
  if (refs_[block] == 0) {
    if (!prefixes_.has(block)) throw std::invalid_argument("retain: block " + std::to_string(block) + " is free");
    unlink(block);
  }
  num_shared_ += ++refs_[block] == 2;
}

bool Blocks::release(int32_t block) {
  check(block);
  if (refs_[block] == 0) throw std::invalid_argument("release: block " + std::to_string(block) + " is free already");
  num_shared_ -= --refs_[block] == 1;
  if (refs_[block] > 0) return false;
  if (prefixes_.has(block)) {
    link(block);
    return false;
  }
  free_.push_back(block);
  return true;
}

std::vector<int32_t> Blocks::find(const int64_t* tokens, int64_t count, const std::string& extra) {
  std::vector<int32_t> blocks;
  Prefixes::Place place = prefixes_.root(extra);
  for (int64_t first = 0; first + block_size_ <= count; first += block_size_) {
    int32_t block = prefixes_.step(place, tokens + first);
    if (block < 0) break;
    blocks.push_back(block);
  }
  for (int32_t block : blocks) retain(block);
  return blocks;
}

int64_t Blocks::remember(const int64_t* tokens, const std::vector<int32_t>& blocks, const std::string& extra) {
  for (int32_t block : blocks) {
    check(block);
    if (refs_[block] == 0) throw std::invalid_argument("remember: block " + std::to_string(block) + " is free");
  }
  int64_t added = 0;
  Prefixes::Place place = prefixes_.root(extra);
  for (size_t i = 0; i < blocks.size(); ++i) {
    const int64_t* own = tokens + i * block_size_;
    if (prefixes_.step(place, own) >= 0) continue;
    if (prefixes_.has(blocks[i])) {
      if (!prefixes_.is_lost(blocks[i])) break;  // under other tokens or another `extra`: it would have been found
      prefixes_.remove(blocks[i]);
    }
    prefixes_.add(place, own, blocks[i]);
    ++added;
  }
  return added;
}

void Blocks::forget(int32_t block) {
  check(block);
  if (!prefixes_.has(block)) return;
  prefixes_.remove(block);
  if (refs_[block] == 0) {
    unlink(block);
    free_.push_back(block);
  }
}

void Blocks::forget_all() {
  while (num_idle_) forget(next_[size()]);
  prefixes_.clear();
}

void Blocks::check(int32_t block) const {
  if (block < 0 || block >= size()) {
    throw std::out_of_range("block must be in [0, " + std::to_string(size()) + "), got " + std::to_string(block));
  }
}

void Blocks::link(int32_t block) {
  int32_t end = static_cast<int32_t>(size()), last = previous_[end];
  next_[last] = previous_[end] = block;
  next_[block] = end;
  previous_[block] = last;
  ++num_idle_;
}

void Blocks::unlink(int32_t block) {
  next_[previous_[block]] = next_[block];
  previous_[next_[block]] = previous_[block];
  --num_idle_;
}

}  // namespace quest_host
