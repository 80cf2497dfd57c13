// Params to tasks, tasks to torch's threads.
#pragma once

#include <tuple>

#include "tensors.h"

namespace quest {

void run(const AppendParams& p);
void run(const SummariseParams& p);
// Where `selection` is given, tokens that read everything are not scored.
void run(const ScoreParams& p, const SelectParams* selection);
void run(const SelectParams& p);
// These allocate out and lse.
std::tuple<Tensor, Tensor> run(AttendParams& p, ScalarType out_dtype);
std::tuple<Tensor, Tensor> run(const ScoreParams& scored, const SelectParams& selected, AttendParams& attended,
                               ScalarType out_dtype);
void run(const MergeParams& p, int64_t rows);

}  // namespace quest
