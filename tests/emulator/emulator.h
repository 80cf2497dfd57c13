// Runs CUDA C++ kernels on the CPU, thread for thread, for tests: the kernels' sources compile with a host compiler
// against this header in place of CUDA's, and nothing of CUDA need be installed.
//
// Each CUDA thread is a fiber; blocks run one after the other, or in the shuffled order some at a time. The order of
// threads and blocks is chosen (configure): what is right in one order only lacks a barrier. Shared memory begins as
// NaN, and so does the target of an asynchronous copy until the wait that covers it. Thrown as std::runtime_error:
// barriers that not all threads reach or that they reach in different places, warp functions that not all named lanes
// call, copies never waited for, misaligned addresses, launches that a GPU would refuse. With -fsanitize=address,
// accesses beyond shared or global memory are reports.
//
// Not modelled: weak memory, bank conflicts, time, blocks that wait for each other, lanes that a warp function
// happens to bring together where __syncwarp is missing.
#pragma once

#include "emulator/block.h"
#include "emulator/intrinsics.h"
#include "emulator/runtime.h"
#include "emulator/types.h"
