// The CPU kernels as a table of functions, one table per instruction set; dispatch.cpp picks one at run time.
// A kernel does one task, or a range of rows; ops.cpp spreads the tasks over torch's threads.
#pragma once

#include "params.h"

namespace quest::cpu {

struct Kernels {
  const char* isa;
  void (*append)(const AppendParams&, int64_t begin, int64_t end);                                      // tokens
  void (*summarise)(const SummariseParams&, int64_t row, int64_t kv_head, int64_t begin, int64_t end);  // pages
  void (*weigh)(const ScoreParams&, int64_t token);                                 // token: (batch, token)
  void (*score)(const ScoreParams&, const ScoreTask& task, const ScoreTask& next);  // next is asked for
  void (*agree)(const ScoreParams&, int64_t unit);                   // the group rule; unit: (batch, token, kv head)
  void (*select)(const SelectParams&, int64_t unit);                 // unit: (batch, token, selection head)
  void (*attend)(const AttendParams&, int64_t unit, int64_t split);  // unit: (batch, token, selection head, tile)
  void (*combine)(const AttendParams&, int64_t unit);                // the splits of one unit
  void (*merge)(const MergeParams&, int64_t begin, int64_t end);     // rows
};

const Kernels& kernels();        // the table in use
bool use_isa(const char* name);  // "" = the best one; false: not built, or this CPU lacks it
const char* isa_names();         // usable here, best first, separated by commas

}  // namespace quest::cpu
