#include "host/sequences.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace quest_host {

Sequences::~Sequences() {
  for (auto& item : sequences_) {
    const std::vector<int32_t>& blocks = item.second.blocks;
    for (auto block = blocks.rbegin(); block != blocks.rend(); ++block) blocks_->release(*block);
  }
}

Sequences Sequences::copy_on(std::shared_ptr<Blocks> blocks) const {
  Sequences copy = *this;
  copy.blocks_ = std::move(blocks);
  for (const auto& item : copy.blocks_ == blocks_ ? sequences_ : decltype(sequences_){}) {
    for (int32_t block : item.second.blocks) blocks_->retain(block);
  }
  copy.table_.reset(new int32_t[room_rows_ * room_width_]);
  std::copy_n(table_.get(), room_rows_ * room_width_, copy.table_.get());
  return copy;
}

const Sequences::Sequence& Sequences::at(int64_t id) const {
  auto found = sequences_.find(id);
  if (found == sequences_.end()) throw std::invalid_argument("no sequence has id " + std::to_string(id));
  return found->second;
}

std::vector<int64_t> Sequences::ids() const {
  std::vector<int64_t> ids;
  for (const auto& item : sequences_) ids.push_back(item.first);
  std::sort(ids.begin(), ids.end());
  return ids;
}

std::vector<int64_t> Sequences::lengths() const {
  std::vector<int64_t> lengths;
  for (int64_t id : rows_) lengths.push_back(at(id).length);
  return lengths;
}

int64_t Sequences::unused_slots() const {
  const int64_t size = blocks_->block_size();
  std::unordered_map<int32_t, int64_t> used;
  for (const auto& [id, sequence] : sequences_) {
    for (size_t i = 0; i < sequence.blocks.size(); ++i) {
      int64_t& most = used[sequence.blocks[i]];
      most = std::max(most, std::min(size, sequence.length - static_cast<int64_t>(i) * size));
    }
  }
  int64_t unused = 0;
  for (const auto& item : used) unused += size - item.second;
  return unused;
}

// --- sequences and rows ----------------------------------------------------------------------------------------------

int64_t Sequences::add() {
  int64_t id = next_id_++;
  sequences_[id].row = static_cast<int64_t>(rows_.size());
  rows_.push_back(id);
  show(rows_.size() - 1, 0);
  return id;
}

int64_t Sequences::copy(int64_t id) {
  std::vector<int32_t> blocks = at(id).blocks;
  int64_t length = at(id).length, fresh = add();
  for (int32_t block : blocks) blocks_->retain(block);
  Sequence& sequence = at(fresh);
  sequence.blocks = std::move(blocks);
  sequence.length = length;
  show(rows_.size() - 1, 0);
  return fresh;
}

void Sequences::select(const std::vector<int64_t>& ids) {
  std::unordered_map<int64_t, int64_t> place;
  for (size_t row = 0; row < ids.size(); ++row) {
    at(ids[row]);
    if (!place.emplace(ids[row], row).second) {
      throw std::invalid_argument("sequence " + std::to_string(ids[row]) + " is named twice");
    }
  }
  for (int64_t id : rows_) at(id).row = -1;
  std::vector<int64_t> before = std::exchange(rows_, ids);
  for (size_t row = 0; row < ids.size(); ++row) {
    at(ids[row]).row = static_cast<int64_t>(row);
    if (row >= before.size() || before[row] != ids[row]) show(row, 0);
  }
}

std::vector<int32_t> Sequences::remove(int64_t id) {
  std::vector<int32_t> freed = empty(id);
  int64_t gone = at(id).row;
  if (gone >= 0) {
    std::vector<int64_t> left = rows_;
    left.erase(left.begin() + gone);
    select(left);
  }
  sequences_.erase(id);
  return freed;
}

std::vector<int32_t> Sequences::empty(int64_t id) {
  std::vector<int32_t> freed;
  Sequence& sequence = at(id);
  release(sequence, 0, freed);
  sequence.length = 0;
  return freed;
}

Sequences::Sequence& Sequences::empty_one(int64_t id) {
  Sequence& sequence = at(id);
  if (!sequence.blocks.empty()) {
    throw std::invalid_argument("sequence " + std::to_string(id) + " must be empty, but has " +
                                std::to_string(sequence.length) + " tokens");
  }
  return sequence;
}

std::vector<int32_t> Sequences::fill(int64_t id, int64_t length) {
  Sequence& sequence = empty_one(id);
  blocks_->expect(blocks_for(length), "resume");
  for (int64_t i = blocks_for(length); i > 0; --i) sequence.blocks.push_back(blocks_->allocate());
  sequence.length = length;
  if (sequence.row >= 0) show(sequence.row, 0);
  return sequence.blocks;
}

void Sequences::adopt(int64_t id, std::vector<int32_t> blocks) {
  Sequence& sequence = empty_one(id);
  sequence.blocks = std::move(blocks);
  sequence.length = static_cast<int64_t>(sequence.blocks.size()) * blocks_->block_size();
  if (sequence.row >= 0) show(sequence.row, 0);
}

std::vector<int32_t> Sequences::fork(const std::vector<int64_t>& indices) {
  for (int64_t i : indices) {
    if (i < 0 || i >= static_cast<int64_t>(rows_.size())) {
      throw std::invalid_argument("fork: indices must be in [0, " + std::to_string(rows_.size()) + "), got " +
                                  std::to_string(i));
    }
  }
  std::vector<int64_t> before = rows_, after, uses(before.size(), 0);
  // Of the rows that become one old row, the first is that sequence still; the others are new ones.
  for (int64_t i : indices) after.push_back(uses[i]++ ? copy(before[i]) : before[i]);
  select(after);
  std::vector<int32_t> freed;
  for (size_t i = 0; i < before.size(); ++i) {
    if (uses[i]) continue;
    std::vector<int32_t> more = remove(before[i]);
    freed.insert(freed.end(), more.begin(), more.end());
  }
  return freed;
}

// --- tokens ----------------------------------------------------------------------------------------------------------

int64_t Sequences::missing(int64_t row, int64_t end) const {
  return std::max<int64_t>(0, blocks_for(end) - static_cast<int64_t>(this->row(row).blocks.size()));
}

Sequences::Places Sequences::shared(const Span& span) const {
  const int64_t size = blocks_->block_size();
  std::unordered_map<int32_t, int32_t> writers;  // rows so far that write to a block but copy it first
  Places places;
  for (size_t row = 0; row < rows_.size(); ++row) {
    if (!span.counts[row]) continue;
    const std::vector<int32_t>& blocks = this->row(row).blocks;
    int64_t end = std::min<int64_t>(blocks_for(span.begin[row] + span.counts[row]), blocks.size());
    for (int64_t place = span.begin[row] / size; place < end; ++place) {
      int32_t refs = blocks_->refs(blocks[place]);
      // Where all who refer to a block write to it, the last may keep it.
      if (refs > 1 && refs > writers[blocks[place]] + 1) {
        ++writers[blocks[place]];
        places.emplace_back(row, place);
      }
    }
  }
  return places;
}

void Sequences::check(const Span& span, const char* op) const {
  if (span.begin.size() != rows_.size() || span.counts.size() != rows_.size()) {
    throw std::invalid_argument(std::string(op) + ": there must be one number for each of " +
                                std::to_string(rows_.size()) + " rows");
  }
  for (size_t row = 0; row < rows_.size(); ++row) {
    if (span.begin[row] < 0 || span.begin[row] > this->row(row).length || span.counts[row] < 0) {
      throw std::invalid_argument(
          std::string(op) + ": row " + std::to_string(row) + " has " + std::to_string(this->row(row).length) +
          " tokens, got " + std::to_string(span.counts[row]) + " from " + std::to_string(span.begin[row]) + " on");
    }
  }
}

std::vector<int32_t> Sequences::to_copy(const Span& span) const {
  check(span, "to_copy");
  std::vector<int32_t> blocks;
  for (auto [row, place] : shared(span)) blocks.push_back(this->row(row).blocks[place]);
  return blocks;
}

int64_t Sequences::needed(const Span& span) const {
  check(span, "extend");
  int64_t count = static_cast<int64_t>(shared(span).size());
  for (size_t row = 0; row < rows_.size(); ++row) count += missing(row, span.begin[row] + span.counts[row]);
  return count;
}

Sequences::Span Sequences::redone(const std::vector<int64_t>& ends, const std::vector<int64_t>& redo) const {
  check({ends, redo}, "crop");
  Span span{ends, redo};
  for (size_t row = 0; row < rows_.size(); ++row) span.begin[row] -= redo[row];
  check(span, "crop");
  return span;
}

int64_t Sequences::needed_to_crop(const std::vector<int64_t>& ends, const std::vector<int64_t>& redo) const {
  return static_cast<int64_t>(shared(redone(ends, redo)).size());
}

void Sequences::make_own(const Span& span, Change& change) {
  for (auto [row, place] : shared(span)) {
    int32_t& block = this->row(row).blocks[place];
    int32_t fresh = blocks_->allocate();
    blocks_->release(block);  // others hold it
    change.copies.emplace_back(block, fresh);
    change.fresh.push_back(fresh);
    block = fresh;
    table_[row * room_width_ + place] = fresh;
  }
  const int64_t size = blocks_->block_size();
  for (size_t row = 0; row < rows_.size(); ++row) {
    if (!span.counts[row]) continue;
    const std::vector<int32_t>& blocks = this->row(row).blocks;
    int64_t end = std::min<int64_t>(blocks_for(span.begin[row] + span.counts[row]), blocks.size());
    for (int64_t place = span.begin[row] / size; place < end; ++place) blocks_->forget(blocks[place]);
  }
}

Sequences::Change Sequences::extend(const Span& span) {
  blocks_->expect(needed(span), "extend");
  Change change;
  make_own(span, change);
  for (size_t row = 0; row < rows_.size(); ++row) {
    Sequence& sequence = this->row(row);
    int64_t end = span.begin[row] + span.counts[row], held = static_cast<int64_t>(sequence.blocks.size());
    for (int64_t i = missing(row, end); i > 0; --i) {
      sequence.blocks.push_back(blocks_->allocate());
      change.fresh.push_back(sequence.blocks.back());
    }
    sequence.length = std::max(sequence.length, end);
    if (held < static_cast<int64_t>(sequence.blocks.size())) show(row, held);
  }
  return change;
}

Sequences::Change Sequences::crop(const std::vector<int64_t>& ends, const std::vector<int64_t>& redo) {
  blocks_->expect(needed_to_crop(ends, redo), "crop");
  Span span = redone(ends, redo);
  Change change;
  make_own(span, change);
  for (size_t row = 0; row < rows_.size(); ++row) {
    Sequence& sequence = this->row(row);
    release(sequence, blocks_for(ends[row]), change.freed);
    sequence.length = ends[row];
  }
  return change;
}

void Sequences::release(Sequence& sequence, int64_t keep, std::vector<int32_t>& freed) {
  // The last first: of cached blocks, a later one is of no use without those before it, so it is to go first.
  while (static_cast<int64_t>(sequence.blocks.size()) > keep) {
    if (blocks_->release(sequence.blocks.back())) freed.push_back(sequence.blocks.back());
    sequence.blocks.pop_back();
  }
  if (sequence.row >= 0) show(sequence.row, keep);
}

void Sequences::slots(const Span& span, int64_t q_len, const bool* real, int64_t* out) const {
  const int64_t size = blocks_->block_size();
  for (size_t row = 0; row < rows_.size(); ++row) {
    const std::vector<int32_t>& blocks = this->row(row).blocks;
    int64_t position = span.begin[row], skip = q_len - span.counts[row];
    for (int64_t i = 0; i < q_len; ++i, ++out) {
      bool stored = real ? real[row * q_len + i] : i >= skip;
      *out = stored ? int64_t{blocks[position / size]} * size + position % size : -1;
      position += stored;
    }
  }
}

// --- the table -------------------------------------------------------------------------------------------------------

int64_t Sequences::width() const {
  size_t most = 0;
  for (int64_t id : rows_) most = std::max(most, at(id).blocks.size());
  return static_cast<int64_t>(most);
}

void Sequences::show(int64_t row, int64_t from) {
  const std::vector<int32_t>& blocks = this->row(row).blocks;
  int64_t count = static_cast<int64_t>(blocks.size());
  if (row >= room_rows_ || count > room_width_) return make_room(row + 1, count);
  int32_t* line = table_.get() + row * room_width_;
  std::copy(blocks.begin() + std::min(from, count), blocks.end(), line + std::min(from, count));
  std::fill(line + count, line + std::max(count, shown_[row]), -1);
  shown_[row] = count;
}

void Sequences::make_room(int64_t rows, int64_t width) {
  if (rows > room_rows_) room_rows_ = std::max<int64_t>(rows, 2 * room_rows_);
  if (width > room_width_) room_width_ = std::max<int64_t>(width, 2 * room_width_);
  room_width_ = std::max<int64_t>(room_width_, 1);
  table_.reset(new int32_t[room_rows_ * room_width_]);
  std::fill_n(table_.get(), room_rows_ * room_width_, -1);
  shown_.assign(room_rows_, 0);
  for (size_t row = 0; row < rows_.size(); ++row) {
    const std::vector<int32_t>& blocks = this->row(row).blocks;
    if (static_cast<int64_t>(blocks.size()) > room_width_) return make_room(room_rows_, blocks.size());
    std::copy(blocks.begin(), blocks.end(), table_.get() + row * room_width_);
    shown_[row] = static_cast<int64_t>(blocks.size());
  }
}

}  // namespace quest_host
