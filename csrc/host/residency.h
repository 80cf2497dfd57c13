// Which units of K and V are in memory, and which in a file only. No torch: pools are addresses, kernels read them as
// if everything were there, and what they are about to read or write is fetched before.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace quest_host {

// A move failed. `code` is errno.
struct MoveError {
  int code;
  std::string what, file;
};

// block_table [batch, max_blocks], -1 = none.
struct Table {
  const int32_t* ids;
  int64_t stride, max_blocks;
};

// Positions [begin, end) of a row.
using Positions = std::pair<int64_t, int64_t>;

// page_idx [batch, q_len, heads, selected], -1 after a head's last.
struct Selection {
  const int32_t* page_idx;
  int64_t batch, q_len, heads, selected, page_size;
};

// A layer's pools, cut into units: K and V of `unit_tokens` tokens of one block and KV head, or of a whole block where
// nothing smaller is made of whole memory pages. Unit u lies at k + u * k_bytes and at v + u * v_bytes, and in the file
// at u * (k_bytes + v_bytes), V after K.
struct Layer {
  char *k = nullptr, *v = nullptr;
  int64_t k_bytes = 0, v_bytes = 0;  // of a unit, multiples of a memory page
  int64_t num_kv_heads = 0, block_size = 0;
  int64_t unit_tokens = 0;  // 0: a unit is a whole block
  int fd = -1;
  std::string file;            // its name for people
  std::vector<uint8_t> state;  // of each unit, see residency.cpp
  int64_t resident = 0;        // bytes in memory
  int64_t held = 0;            // of these, of units that the step uses
  int64_t hand = 0;            // of the clock that goes round the units and takes those that nobody uses

  int64_t unit_bytes() const { return k_bytes + v_bytes; }
  int64_t num_units() const { return static_cast<int64_t>(state.size()); }
  int64_t units_per_block() const { return unit_tokens ? num_kv_heads * (block_size / unit_tokens) : 1; }
  int64_t unit(int64_t block, int64_t head, int64_t offset) const {
    return unit_tokens ? (block * num_kv_heads + head) * (block_size / unit_tokens) + offset / unit_tokens : block;
  }
};

struct Counts {
  int64_t hits = 0, misses = 0;         // units that reads named and that were there, or not
  int64_t bytes_in = 0, bytes_out = 0;  // read from files, written to them
  int64_t resident = 0, peak = 0;       // bytes in memory
};

// What a step of a layer reads or writes is held until `settle`, which ends the step and moves out what is too much.
// Moving out writes a unit to the file, unless the file has it, and only then gives its memory back. So an error, which
// is a MoveError, loses nothing: units are where they were. Only what comes before a change throws: `use`, `use_pages`
// and `hold`.
class Residency {
 public:
  enum class Access { scan, select, write };  // a scan reads everything, and makes nothing stay

  Residency(int64_t num_layers, int64_t max_bytes) : max_bytes_(max_bytes), layers_(num_layers) {}

  void set_layer(int64_t layer, Layer made, int64_t num_blocks);
  // The pools lie elsewhere now and have more blocks: what is resident goes there.
  void grow(int64_t layer, char* k, char* v, int64_t num_blocks);

  void use(int64_t layer, Table table, const std::vector<Positions>& rows, Access access);
  void use_pages(int64_t layer, Table table, const Selection& selection);

  // Fetch whole blocks in every layer, and make room for as many copies: `copy_blocks` can't fail then.
  void hold(const std::vector<int64_t>& blocks);
  void copy_blocks(const std::vector<std::pair<int64_t, int64_t>>& pairs);  // (held, unused)
  // All of these blocks of a layer has been written, in memory.
  void written(int64_t layer, const std::vector<int64_t>& blocks);
  // Nobody refers to these blocks any more.
  void forget(const std::vector<int64_t>& blocks);
  // All that `other` has of a layer of the same shape.
  void copy_layer(int64_t layer, const Residency& other);

  void settle();
  const Counts& counts() const { return counts_; }

 private:
  struct Place {
    int64_t layer, unit;
  };
  template <typename F>
  void each_unit(int64_t layer, Table table, const std::vector<Positions>& rows, const F& f);
  void want(int64_t layer, int64_t unit, Access access);
  void fetch(int64_t layer, Access access);
  void add(Layer& x, int64_t unit, uint8_t flags);
  void make_room(int64_t bytes, int64_t limit, int64_t layer);
  void take_from(Layer& x, int64_t bytes);
  void move_out(Layer& x, int64_t first, int64_t count);

  int64_t max_bytes_;
  std::vector<Layer> layers_;
  Counts counts_;
  std::vector<Place> held_;
  std::vector<int64_t> missing_;  // units of a layer that `want` has found in the file only
  int64_t room_ = 0;              // bytes that they take, and units that are written for the first time
  int64_t spare_ = 0;             // bytes that `settle` leaves free, for what the next layer's selection will miss
};

}  // namespace quest_host
