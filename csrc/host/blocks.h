// Which blocks of a pool are taken, shared, or kept for the tokens they hold.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "host/prefixes.h"

namespace quest_host {

struct OutOfBlocks : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Hands out block ids and counts references. A block without references is free; if its tokens are known (`remember`)
// it keeps what it holds until no other block is left, the least recently used one going first. Every call is O(1) per
// block, and as any block serves any sequence, no order of calls leaves blocks that can't be used.
class Blocks {
 public:
  // `watermark` blocks are not for new sequences (`admits`), so that running ones can go on.
  Blocks(int64_t num_blocks, int64_t block_size, int64_t watermark, int hash_bits);

  int64_t size() const { return static_cast<int64_t>(refs_.size()); }
  int64_t block_size() const { return block_size_; }
  int64_t watermark() const { return watermark_; }
  int64_t num_free() const { return static_cast<int64_t>(free_.size()) + num_idle_; }
  int64_t num_cached() const { return prefixes_.size(); }
  int64_t num_idle() const { return num_idle_; }
  int64_t num_shared() const { return num_shared_; }
  int64_t num_evicted() const { return num_evicted_; }
  int32_t refs(int32_t block) const;
  const std::vector<int32_t>& free() const { return free_; }
  bool is_cached(int32_t block) const;
  bool admits(int64_t count) const { return count + watermark_ <= num_free(); }

  void grow(int64_t num_blocks);
  // Throws OutOfBlocks, in the name of `op`, if so many are not free.
  void expect(int64_t count, const char* op) const;
  int32_t allocate();  // one that is free; `expect` first
  void retain(int32_t block);
  bool release(int32_t block);  // whether nobody needs what it holds any more

  // The blocks of the longest known beginning of `tokens`, each with one more reference.
  std::vector<int32_t> find(const int64_t* tokens, int64_t count, const std::string& extra);
  // Makes full blocks findable: block i holds tokens [i, i + 1) * block_size. Those that other blocks hold stay with
  // them. Returns how many are new.
  int64_t remember(const int64_t* tokens, const std::vector<int32_t>& blocks, const std::string& extra);
  // What a block holds changes: it is not found any more.
  void forget(int32_t block);
  void forget_all();

 private:
  void check(int32_t block) const;
  void link(int32_t block);    // to the end of the idle list: used most recently
  void unlink(int32_t block);  // from it

  int64_t block_size_, watermark_;
  std::vector<int32_t> refs_;
  std::vector<int32_t> free_;  // a stack
  // Idle blocks, unreferenced but with known tokens, as a ring through the node after the last block.
  std::vector<int32_t> next_, previous_;
  int64_t num_idle_ = 0, num_shared_ = 0, num_evicted_ = 0;
  Prefixes prefixes_;
};

}  // namespace quest_host
