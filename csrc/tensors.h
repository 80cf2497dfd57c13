// From torch's tensors to the kernels' plain structs. What is wrong here is thrown before any memory is touched, as
// std::invalid_argument, which Python sees as ValueError. quest/checks.py has already said it better for callers of
// the public functions; these lines keep the raw ops and compiled graphs from reading out of bounds.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <optional>
#include <sstream>
#include <stdexcept>

#include "params.h"

namespace quest {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename... Args>
[[noreturn]] inline void fail(const Args&... args) {
  std::ostringstream message;
  (message << ... << args);
  throw std::invalid_argument(message.str());
}

inline void expect(bool ok, const char* op, const char* arg, const char* rule) {
  if (!ok) fail(op, ": ", arg, ": ", rule);
}

inline DType dtype_of(const Tensor& x, const char* op, const char* arg) {
  switch (x.scalar_type()) {
    case ScalarType::Float: return DType::f32;
    case ScalarType::BFloat16: return DType::bf16;
    case ScalarType::Half: return DType::f16;
    default: fail(op, ": ", arg, ": expected float32, bfloat16 or float16");
  }
}

inline void* data_of(const Tensor& x) { return x.mutable_data_ptr(); }

inline void expect_rows(const Tensor& x, const char* op, const char* arg) {
  expect(x.dim() == 4 && (x.size(3) == 1 || x.stride(3) == 1), op, arg, "expected 4 dimensions, the last contiguous");
  expect(x.size(3) >= 1 && x.size(3) <= kMaxHeadDim, op, arg, "head_dim must be in [1, 1024]");
}

inline Pool pool_of(const Tensor& x, const char* op, const char* arg) {
  expect_rows(x, op, arg);
  return {data_of(x), dtype_of(x, op, arg), x.stride(0), x.stride(1), x.stride(2), x.size(3)};
}

// New rows with their sizes.
struct SizedRows : Rows {
  int64_t batch, q_len, num_heads;
};

// Of x [batch, q_len, num_heads, dim], or [batch, num_heads, q_len, dim] with `heads_first`.
inline SizedRows rows_of(const Tensor& x, const char* op, const char* arg, bool heads_first = false) {
  expect_rows(x, op, arg);
  const int token = heads_first ? 2 : 1, head = 3 - token;
  const Rows rows{data_of(x), dtype_of(x, op, arg), x.stride(0), x.stride(token), x.stride(head), x.size(3)};
  return {rows, x.size(0), x.size(token), x.size(head)};
}

// A contiguous tensor, on the CPU if no device is named. Not by torch::stable::empty, which looks up an op by its name:
// that takes longer than the allocation, and a step makes eight.
inline Tensor new_tensor(std::initializer_list<int64_t> sizes, ScalarType dtype,
                         std::optional<torch::stable::Device> device = std::nullopt) {
  int64_t strides[8], stride = 1;
  for (size_t i = sizes.size(); i-- > 0; stride *= std::max<int64_t>(1, sizes.begin()[i])) strides[i] = stride;
  const int32_t type = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle made;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.begin(), strides, type,
                               device ? static_cast<int32_t>(device->type()) : aoti_torch_device_type_cpu(),
                               device ? device->index() : 0, &made));
  return Tensor(made);
}

inline const int32_t* int32_of(const Tensor& x, int64_t size, const char* op, const char* arg) {
  expect(x.scalar_type() == ScalarType::Int && x.dim() == 1 && x.size(0) == size && (size <= 1 || x.stride(0) == 1), op,
         arg, "expected a contiguous int32 tensor [batch]");
  return static_cast<const int32_t*>(data_of(x));
}

// The block table and lengths; with `check`, their values too.
inline Sequences sequences_of(const Tensor& block_table, const Tensor& seq_lens, int64_t num_blocks, int64_t block_size,
                              int64_t page_size, int64_t q_len, int64_t window, bool check, const char* op) {
  expect(block_table.scalar_type() == ScalarType::Int && block_table.dim() == 2 &&
             (block_table.size(1) <= 1 || block_table.stride(1) == 1),
         op, "block_table", "expected an int32 tensor [batch, max_blocks] with contiguous rows");
  expect(page_size >= 1 && block_size >= page_size && block_size % page_size == 0, op, "page_size",
         "must divide block_size");
  expect(window == -1 || window >= 1, op, "window", "must be at least 1");
  Sequences s;
  s.batch = block_table.size(0);
  s.max_blocks = block_table.size(1);
  s.block_table = static_cast<const int32_t*>(data_of(block_table));
  s.seq_lens = int32_of(seq_lens, s.batch, op, "seq_lens");
  s.table_stride = block_table.stride(0);
  s.num_blocks = num_blocks;
  s.block_size = block_size;
  s.page_size = page_size;
  s.max_pages = s.max_blocks * (block_size / page_size);
  s.q_len = q_len;
  s.window = window;
  if (!check) return s;
  for (int64_t b = 0; b < s.batch; b++) {
    const int64_t length = s.seq_lens[b], blocks = (length + block_size - 1) / block_size;
    if (length < 0) fail(op, ": seq_lens[", b, "]: must not be negative, got ", length);
    if (blocks > s.max_blocks)
      fail(op, ": block_table: ", s.max_blocks, " blocks of ", block_size, " tokens are too narrow for seq_lens[", b,
           "] = ", length);
    for (int64_t i = 0; i < blocks; i++) {
      const int64_t id = s.block_table[b * s.table_stride + i];
      if (id < 0 || id >= num_blocks)
        fail(op, ": block_table[", b, ", ", i, "]: block id must be in [0, ", num_blocks, ") for seq_lens[", b,
             "] = ", length, ", got ", id);
    }
  }
  return s;
}

}  // namespace quest
