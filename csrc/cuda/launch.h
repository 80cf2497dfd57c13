// The launchers of the CUDA kernels: no torch on this side. Each starts work on the stream of the device in use and
// returns what CUDA said. Nothing is read back, no memory is taken, and grids depend on shapes only, so that all of it
// can be captured in a graph.
#pragma once

#include "cuda/runtime.h"
#include "params.h"

extern "C" {

cudaError_t quest_append(const quest::AppendParams* p, cudaStream_t stream);
cudaError_t quest_summarise(const quest::SummariseParams* p, cudaStream_t stream);
// Both in one launch, for the last q_len tokens of each row that stores any; num_new is not read.
cudaError_t quest_append_summarise(const quest::AppendParams* rows, const quest::SummariseParams* p,
                                   cudaStream_t stream);

// Chooses num_splits for the device in use, and says how many floats `partial` must hold.
cudaError_t quest_plan_attend(quest::AttendParams* p, int64_t* partial_size);
cudaError_t quest_attend(const quest::AttendParams* p, cudaStream_t stream);

cudaError_t quest_merge(const quest::MergeParams* p, int64_t rows, cudaStream_t stream);
}
