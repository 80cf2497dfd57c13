// The CUDA runtime or, in tests on the CPU, its emulation.
#pragma once

#ifdef QUEST_EMULATE
#include "emulator/emulator.h"
#else
#include <cuda_runtime_api.h>
#endif
