// Which units of K and V have a slot on a device, and which lie in the host's memory only. No torch, and no copies:
// here is what must be copied where.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "host/residency.h"

namespace quest_host {

// Units are numbered as in `Layer`: by block, KV head and place in the block. A unit that is needed gets a slot, if
// need be that of a unit that was not used of late; what is newer in a slot than on the host is copied out before.
class Slots {
 public:
  struct Place {
    int64_t unit, slot;
  };
  struct Moves {                 // of one call
    std::vector<Place> gone;     // units that lost their slot
    std::vector<uint8_t> dirty;  // which of these are newer there than on the host
    std::vector<Place> come;     // units that got a slot
  };
  struct Counts {
    int64_t hits = 0, misses = 0;  // units that reads named and that had a slot, or not
    int64_t used = 0, peak = 0;    // slots
  };

  Slots(int64_t num_blocks, int64_t num_kv_heads, int64_t units_per_head, int64_t unit_tokens, int64_t capacity);
  void grow(int64_t num_blocks);

  // The units of selected pages, each once.
  std::vector<int64_t> units(Table table, const Selection& selection);
  // Slots for different units that are read. False if there are more of them than slots: then none has moved.
  bool read(const int64_t* units, int64_t count);
  // Slots for units that are written: of each, or -1 where they have run out and the unit is written on the host.
  std::vector<int64_t> write(const int64_t* units, int64_t count);
  const Moves& moves() const { return moves_; }  // of the last call of the two
  void undo();                                   // that call: its copies were not made

  int64_t slot(int64_t unit) const { return slot_of_.at(unit); }  // -1: on the host
  void forget(const std::vector<int64_t>& blocks);                // they hold nothing any more
  const Counts& counts() const { return counts_; }

 private:
  bool use(int64_t unit);  // note that this call uses a unit; whether it is the first time
  void come(int64_t unit);
  int64_t take();

  int64_t num_kv_heads_, units_per_head_, unit_tokens_, capacity_;
  std::vector<int32_t> slot_of_;   // of a unit
  std::vector<uint32_t> used_by_;  // the last call that used a unit
  std::vector<int32_t> unit_of_;   // of a slot, -1: free
  std::vector<uint8_t> use_;       // of a slot: how often the hand passes by before it takes it
  std::vector<uint8_t> dirty_;     // of a slot
  std::vector<int32_t> free_;      // slots, a stack
  std::vector<int64_t> named_;     // units of this call
  uint32_t call_ = 0;
  int64_t hand_ = 0;
  Moves moves_;
  Counts counts_;
};

}  // namespace quest_host
