// Params to tasks, tasks to torch's threads.
#pragma once

#include <tuple>

#include "tensors.h"

namespace quest {

void run(const AppendParams& p);
void run(const SummariseParams& p);
void run(const ScoreParams& p);
void run(const PackParams& p);
void run(const PackedScoreParams& p);
void run(const SelectParams& p);
// These allocate out and lse; the others are score, select and attend in one, and score no token that reads everything.
std::tuple<Tensor, Tensor> run(AttendParams& p, ScalarType out_dtype);
std::tuple<Tensor, Tensor> run(const ScoreParams& scored, const SelectParams& selected, AttendParams& attended,
                               ScalarType out_dtype);
std::tuple<Tensor, Tensor> run(const PackedScoreParams& scored, const SelectParams& selected, AttendParams& attended,
                               ScalarType out_dtype);
void run(const MergeParams& p, int64_t rows);

}  // namespace quest
