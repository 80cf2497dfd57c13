// The device that an op's tensors lie on: checked, made the current one, and its stream.
#pragma once

#include <initializer_list>
#include <stdexcept>
#include <string>

#include "cuda/runtime.h"
#include "tensors.h"

#ifndef QUEST_EMULATE
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
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
  // The stable ABI gives a stream's handle from torch 2.13 on only. What its C shim has lies in a library of torch's
  // CUDA builds alone, so it can't be linked with, but it is loaded where there is a CUDA tensor.
  static cudaStream_t stream_of(int device) {
    using Current = AOTITorchError (*)(int32_t device, void** stream);
    static const auto current = [] {
      void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
      void* found = library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr;
      if (!found) throw std::runtime_error("quest: this torch has no aoti_torch_get_current_cuda_stream");
      return reinterpret_cast<Current>(found);
    }();
    void* stream = nullptr;
    if (current(device, &stream) != AOTI_TORCH_SUCCESS) throw std::runtime_error("quest: torch has no current stream");
    return static_cast<cudaStream_t>(stream);
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
