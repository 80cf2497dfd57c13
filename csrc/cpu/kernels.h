// The CPU kernels as a table of functions, one table per instruction set; dispatch.cpp picks one at run time.
// A kernel does one task, or a range of rows; ops.cpp spreads the tasks over torch's threads.
#pragma once

#include "params.h"

namespace quest::cpu {

struct Kernels {
  const char* isa;
  bool (*finite)(const Rows&, int64_t b, int64_t t, int64_t head);  // whether a row can be packed
  void (*append)(const AppendParams&, int64_t begin, int64_t end);  // tokens
  void (*summarise)(const SummariseParams&, int64_t row, int64_t kv_head, int64_t begin, int64_t end);  // pages
  void (*weigh)(const ScoreParams&, int64_t token);                                 // token: (batch, token)
  void (*score)(const ScoreParams&, const ScoreTask& task, const ScoreTask& next);  // next is asked for
  void (*agree)(const ScoreParams&, int64_t unit);  // the group rule; unit: (batch, token, kv head)
  void (*pack)(const PackParams&, int64_t row, int64_t kv_head, int64_t index);  // block `index` of a row
  void (*weigh_packed)(const PackedScoreParams&, int64_t token);
  void (*score_groups)(const PackedScoreParams&, int64_t unit, int64_t begin, int64_t end);  // blocks
  void (*keep)(const PackedScoreParams&, int64_t unit);                                      // of its groups, the best
  void (*score_kept)(const PackedScoreParams&, int64_t unit, int64_t begin, int64_t end);    // kept groups
  void (*score_open)(const PackedScoreParams&, int64_t unit);                                // pages that have no codes
  void (*agree_packed)(const PackedScoreParams&, int64_t unit);
  void (*select)(const SelectParams&, int64_t unit);                 // unit: (batch, token, selection head)
  void (*attend)(const AttendParams&, int64_t unit, int64_t split);  // unit: (batch, token, selection head, tile)
  void (*combine)(const AttendParams&, int64_t unit);                // the splits of one unit
  void (*merge)(const MergeParams&, int64_t begin, int64_t end);     // rows
};

const Kernels& kernels();        // the table in use
bool use_isa(const char* name);  // "" = the best one; false: not built, or this CPU lacks it
const char* isa_names();         // usable here, best first, separated by commas

}  // namespace quest::cpu
