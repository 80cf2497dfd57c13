// The schemas of namespace quest_cuda: those of namespace quest, and what only a GPU has.
#include <Python.h>
#include <torch/csrc/stable/library.h>

#include <string>

#include "schemas.h"

STABLE_TORCH_LIBRARY(quest_cuda, m) {
  m.def(quest::schemas::kAppend);
  m.def(quest::schemas::kSummarise);
  m.def(quest::schemas::kAttend);
  m.def(quest::schemas::kMerge);
  m.def(
      "append_summarise(Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!) page_min, "
      "Tensor(d!) page_max, Tensor block_table, Tensor seq_lens, Tensor slot_mapping) -> ()");
  // Why attend can't run on such tensors; empty where it can.
  m.def("reason(Tensor query, Tensor k_cache, Tensor v_cache) -> str");
  // The architectures that there is machine code for, as QUEST_CUDA_ARCHS says.
  m.def("archs() -> str");
}

static std::string archs() { return QUEST_CUDA_ARCHS; }

STABLE_TORCH_LIBRARY_IMPL(quest_cuda, CompositeExplicitAutograd, m) { m.impl("archs", TORCH_BOX(&archs)); }

// Importing the module runs the registrations; CUDA starts with the first kernel.
PyMODINIT_FUNC PyInit__C_cuda(void) {
  static struct PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C_cuda", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
