// attend for caches of f32: a file for each dtype, so that they compile side by side.
#include "cuda/attend.cuh"

template cudaError_t quest::cuda::launch_attend<float>(const AttendParams&, cudaStream_t);
