// Blocks found by the tokens that they and all before them hold.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

namespace quest_host {

// A block is known by its chain: the entry of the block before it, and its own tokens. Chains are hashed to be found
// and then compared token by token, the block before it by an id that is never used twice, so a collision of hashes
// costs time and nothing else. The first block of a chain is also known by `extra`: what else its K and V depend on.
class Prefixes {
 public:
  // Hashes of fewer than 64 bits are for tests of collisions.
  Prefixes(int64_t block_size, int hash_bits);

  // A place in a chain: where to go on with `step`.
  struct Place {
    uint64_t entry;  // id of the last block's entry, 0 before the first
    int32_t block;   // the last block, -1 before the first
    uint64_t hash;
    std::string extra;  // empty after the first
  };
  Place root(const std::string& extra) const;
  // The block that holds these block_size tokens after `place`, which moves on; -1 (and `place` stays) if none is
  // known.
  int32_t step(Place& place, const int64_t* tokens) const;
  // Enters a block that isn't, after `place`, which moves on.
  void add(Place& place, const int64_t* tokens, int32_t block);
  void remove(int32_t block);  // one that is entered
  void clear();

  void grow(int64_t num_blocks) { entries_.resize(num_blocks); }
  bool has(int32_t block) const { return entries_[block].id != 0; }
  // Whether an entered block can't be found, whatever the tokens: a block before it has been removed.
  bool is_lost(int32_t block) const;
  int64_t size() const { return size_; }

 private:
  struct Entry {
    uint64_t id = 0;  // 0: none
    uint64_t parent = 0;
    int32_t parent_block = -1;
    uint64_t hash = 0;
    std::vector<int64_t> tokens;
    std::string extra;
  };
  uint64_t hash(uint64_t before, const int64_t* tokens) const;

  int64_t block_size_;
  uint64_t mask_;
  uint64_t last_id_ = 0;
  int64_t size_ = 0;
  std::vector<Entry> entries_;  // by block
  std::unordered_multimap<uint64_t, int32_t> by_hash_;
};

}  // namespace quest_host
