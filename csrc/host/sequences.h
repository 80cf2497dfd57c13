// The blocks of each sequence, and the rows of a step that sequences take part in.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "host/blocks.h"

namespace quest_host {

// Sequences are known by ids that are never used twice. Some of them, in some order, are the rows of the coming steps;
// the others wait. The block table of the rows is kept up to date in place, so that a step writes what is new in it.
//
// Whatever changes several things checks first, and throws before it has changed anything.
class Sequences {
 public:
  // Whole blocks to be copied, (from, to), and blocks that hold nothing of anybody's: `fresh` ones were taken by the
  // call, `freed` ones given back.
  struct Change {
    std::vector<std::pair<int32_t, int32_t>> copies;
    std::vector<int32_t> fresh, freed;
  };
  // New tokens of every row: `counts` of them, from `begin` on.
  struct Span {
    std::vector<int64_t> begin, counts;
  };

  explicit Sequences(std::shared_ptr<Blocks> blocks) : blocks_(std::move(blocks)) {}
  Sequences(Sequences&&) = default;
  ~Sequences();  // releases what the sequences hold

  // A copy that shares all blocks, or one for a copy of the pool.
  Sequences copy_on(std::shared_ptr<Blocks> blocks) const;

  const std::shared_ptr<Blocks>& blocks() const { return blocks_; }
  const std::vector<int64_t>& rows() const { return rows_; }  // ids
  bool has(int64_t id) const { return sequences_.count(id) > 0; }
  std::vector<int64_t> ids() const;
  std::vector<int64_t> lengths() const;  // of the rows
  int64_t length(int64_t id) const { return at(id).length; }
  const std::vector<int32_t>& blocks_of(int64_t id) const { return at(id).blocks; }
  int64_t unused_slots() const;  // of blocks that are taken, slots that no sequence has filled

  int64_t add();                                                   // an empty one, as the last row
  int64_t copy(int64_t id);                                        // one that shares all blocks, as the last row
  void select(const std::vector<int64_t>& ids);                    // they are the rows from now on
  std::vector<int32_t> remove(int64_t id);                         // its blocks are released, and it is gone
  std::vector<int32_t> empty(int64_t id);                          // its blocks are released, and it stays
  std::vector<int32_t> fill(int64_t id, int64_t length);           // blocks for an empty one
  void adopt(int64_t id, std::vector<int32_t> blocks);             // full blocks, retained already, for an empty one
  std::vector<int32_t> fork(const std::vector<int64_t>& indices);  // row i becomes the old row indices[i]

  // Blocks that must be copied before each row writes its tokens of the span.
  std::vector<int32_t> to_copy(const Span& span) const;
  // Blocks that `extend` will take.
  int64_t needed(const Span& span) const;
  Change extend(const Span& span);
  // Cuts rows to `ends`, after their tokens from `redo` before the end on are made theirs alone, to be written again.
  int64_t needed_to_crop(const std::vector<int64_t>& ends, const std::vector<int64_t>& redo) const;
  Change crop(const std::vector<int64_t>& ends, const std::vector<int64_t>& redo);
  // Slots of the tokens of `span` in [rows, q_len] places, -1 in those that hold none. `real` says which hold one;
  // without it they are a row's last ones.
  void slots(const Span& span, int64_t q_len, const bool* real, int64_t* out) const;

  // int32 [room_rows, room_width], -1 where a row has no block. Another array after the rows or the width have grown.
  const std::shared_ptr<int32_t[]>& table() const { return table_; }
  int64_t room_rows() const { return room_rows_; }
  int64_t room_width() const { return room_width_; }
  int64_t width() const;  // of the longest row

 private:
  Sequences(const Sequences&) = default;

  struct Sequence {
    std::vector<int32_t> blocks;
    int64_t length = 0;
    int64_t row = -1;  // -1: it waits
  };
  using Places = std::vector<std::pair<int64_t, int64_t>>;  // row, place in its blocks

  // Throws, in the name of `op`, unless the span has a place and a count for every row, and no gap before it.
  void check(const Span& span, const char* op) const;
  Sequence& empty_one(int64_t id);  // throws if it has tokens
  // The span of the tokens to be written again, from `redo` before `ends` on.
  Span redone(const std::vector<int64_t>& ends, const std::vector<int64_t>& redo) const;

  const Sequence& at(int64_t id) const;
  Sequence& at(int64_t id) { return const_cast<Sequence&>(std::as_const(*this).at(id)); }
  const Sequence& row(int64_t row) const { return at(rows_[row]); }
  Sequence& row(int64_t row) { return at(rows_[row]); }
  int64_t blocks_for(int64_t tokens) const { return (tokens + blocks_->block_size() - 1) / blocks_->block_size(); }
  int64_t missing(int64_t row, int64_t end) const;
  // The blocks that must be copied before each row writes its tokens of the span.
  Places shared(const Span& span) const;
  // Copies those, and forgets what the span's other blocks held.
  void make_own(const Span& span, Change& change);
  void release(Sequence& sequence, int64_t keep, std::vector<int32_t>& freed);
  void show(int64_t row, int64_t from);  // in the table
  void make_room(int64_t rows, int64_t width);

  std::shared_ptr<Blocks> blocks_;
  std::unordered_map<int64_t, Sequence> sequences_;
  std::vector<int64_t> rows_;
  int64_t next_id_ = 0;
  std::shared_ptr<int32_t[]> table_;  // by row
  std::vector<int64_t> shown_;        // blocks of each row that stand in the table
  int64_t room_rows_ = 0, room_width_ = 0;
};

}  // namespace quest_host
