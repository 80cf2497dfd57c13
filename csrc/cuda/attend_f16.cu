// attend for caches of f16: a file for each dtype, so that they compile side by side.
#include "cuda/attend.cuh"

template cudaError_t quest::cuda::launch_attend<quest::cuda::f16>(const AttendParams&, cudaStream_t);
