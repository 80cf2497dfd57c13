// The device that an op's tensors lie on: checked, made the current one, and its stream.
#pragma once

#include <initializer_list>
#include <stdexcept>
#include <string>

#include "cuda/runtime.h"
#include "tensors.h"

#ifndef QUEST_EMULATE
#include <torch/csrc/stable/accelerator.h>
#endif

namespace quest_cuda {

class OnDevice {
 public:
  using Tensor = torch::stable::Tensor;

  OnDevice(const char* op, const Tensor& first, std::initializer_list<const Tensor*> others)
      : op_(op), guard_(expect_one_device(op, first, others)), stream_(stream_of(first.get_device_index())) {}

  cudaStream_t stream() const { return stream_; }
  void expect_success(cudaError_t error) const {
    if (error != cudaSuccess) throw std::runtime_error(std::string(op_) + ": CUDA: " + cudaGetErrorString(error));
  }

 private:
#ifdef QUEST_EMULATE
  struct Guard {
    explicit Guard(int) {}
  };
  static cudaStream_t stream_of(int) { return nullptr; }
#else
  using Guard = torch::stable::accelerator::DeviceGuard;
  static cudaStream_t stream_of(int device) {
    return static_cast<cudaStream_t>(torch::stable::accelerator::getCurrentStream(device).nativeHandle());
  }
#endif
  static int expect_one_device(const char* op, const Tensor& first, std::initializer_list<const Tensor*> others) {
    for (const Tensor* x : others)
      if (x->device() != first.device()) quest::fail(op, ": all tensors must be on one device");
    return first.get_device_index();
  }

  const char* op_;
  Guard guard_;
  cudaStream_t stream_;
};

}  // namespace quest_cuda
