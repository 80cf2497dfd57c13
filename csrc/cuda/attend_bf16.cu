// attend for caches of bf16: a file for each dtype, so that they compile side by side.
#include "cuda/attend.cuh"

template cudaError_t quest::cuda::launch_attend<quest::cuda::bf16>(const AttendParams&, cudaStream_t);
