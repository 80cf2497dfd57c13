// merge: two attention results over disjoint tokens into one, a warp for each row.
#include "cuda/launch.h"
#include "cuda/types.cuh"

namespace quest::cuda {

constexpr int kRowsPerBlock = 4;

// Weights relative to the larger part, not to the sum: that one may round to the part itself.
__device__ __forceinline__ float weight_of(float part, float top) {
  return part == -kInf ? 0.0f : part == top ? 1.0f : expf(part - top);
}

template <typename T>
__global__ void __launch_bounds__(32 * kRowsPerBlock) merge(const __grid_constant__ MergeParams p, int64_t rows) {
  const int64_t row = int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / 32;
  if (row >= rows) return;
  const float a = p.lse_a[row], b = p.lse_b[row];
  const float top = a > b || a != a ? a : b, low = top == a ? b : a;
  if (threadIdx.x % 32 == 0)
    p.lse[row] = low == top ? top + (top == -kInf ? 0.0f : 0.693147181f) : top + log1pf(expf(low - top));

  float weight_a = weight_of(a, top), weight_b = weight_of(b, top);
  const float total = weight_a + weight_b, norm = total == 0 ? 0.0f : 1 / total;
  weight_a *= norm, weight_b *= norm;
  const T* out_a = static_cast<const T*>(p.out_a) + row * p.dim;
  const T* out_b = static_cast<const T*>(p.out_b) + row * p.dim;
  T* out = static_cast<T*>(p.out) + row * p.dim;
  // A part of weight zero takes no part, whatever it holds.
  for (int64_t d = threadIdx.x % 32; d < p.dim; d += 32)
    from_float(
        (weight_a == 0 ? 0 : weight_a * to_float(out_a[d])) + (weight_b == 0 ? 0 : weight_b * to_float(out_b[d])),
        out + d);
}

}  // namespace quest::cuda

using namespace quest;

cudaError_t quest_merge(const MergeParams* p, int64_t rows, cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  const int64_t blocks = (rows + cuda::kRowsPerBlock - 1) / cuda::kRowsPerBlock;
  return cuda::by_dtype(p->dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    QUEST_LAUNCH(cuda::merge<T>, blocks, 32 * cuda::kRowsPerBlock, 0, stream, *p, rows);
    return cudaGetLastError();
  });
}
