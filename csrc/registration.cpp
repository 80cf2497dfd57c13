// The schemas, once for all backends, and the CPU kernels behind them. Mutation is declared, sizes are SymInt.
#include <Python.h>
#include <torch/csrc/stable/library.h>

#include "ops.h"
#include "schemas.h"

STABLE_TORCH_LIBRARY(quest, m) {
  m.def(quest::schemas::kAppend);
  m.def(quest::schemas::kSummarise);
  m.def(
      "score(Tensor query, Tensor page_min, Tensor page_max, Tensor block_table, Tensor seq_lens, SymInt page_size, "
      "float softmax_scale, float slack, str group_rule, SymInt window=-1, bool check=True) -> Tensor");
  m.def(
      "pack(Tensor k_cache, Tensor(a!) packed, Tensor block_table, Tensor seq_lens, Tensor num_new, SymInt page_size, "
      "SymInt coarse_size, int bits, SymInt sink_pages, bool check=True) -> ()");
  m.def(
      "score_packed(Tensor query, Tensor k_cache, Tensor packed, Tensor block_table, Tensor seq_lens, "
      "SymInt page_size, SymInt coarse_size, int bits, float coarse_keep, SymInt coarse_limit, SymInt budget, float "
      "budget_fraction, "
      "SymInt sink_pages, SymInt recent_pages, float softmax_scale, float slack, float coarse_slack, str group_rule, "
      "SymInt window=-1, "
      "bool check=True) -> Tensor");
  m.def(
      "select(Tensor scores, Tensor seq_lens, SymInt page_size, SymInt budget, float budget_fraction, "
      "SymInt sink_pages, SymInt recent_pages, SymInt window, SymInt max_selected, bool check=True) "
      "-> (Tensor, Tensor)");
  m.def(quest::schemas::kAttend);
  m.def(quest::schemas::kMerge);
  m.def(
      "decode(Tensor query, Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!) page_min, "
      "Tensor(d!) page_max, Tensor block_table, Tensor seq_lens, Tensor slot_mapping, bool dense, "
      "float softmax_scale, SymInt budget, float budget_fraction, SymInt sink_pages, SymInt recent_pages, "
      "SymInt max_selected, float slack, str group_rule, float softcap=0.0, Tensor? sinks=None, SymInt window=-1, "
      "bool check=True, *, bool heads_first=False) -> (Tensor, Tensor)");
  m.def(
      "decode_packed(Tensor query, Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, "
      "Tensor(c!) packed, Tensor block_table, Tensor seq_lens, Tensor slot_mapping, SymInt page_size, "
      "SymInt coarse_size, int bits, float coarse_keep, SymInt coarse_limit, float coarse_slack, bool dense, float "
      "softmax_scale, SymInt "
      "budget, "
      "float budget_fraction, SymInt sink_pages, SymInt recent_pages, SymInt max_selected, float slack, "
      "str group_rule, float softcap=0.0, Tensor? sinks=None, SymInt window=-1, bool check=True, *, "
      "bool heads_first=False) -> (Tensor, Tensor)");
  m.def("isa() -> str");
  m.def("isas() -> str");
  m.def("use_isa(str name) -> ()");
  m.def("version() -> str");
  m.def("build() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(quest, CPU, m) {
  m.impl("append", TORCH_BOX(&quest::append));
  m.impl("summarise", TORCH_BOX(&quest::summarise));
  m.impl("score", TORCH_BOX(&quest::score));
  m.impl("pack", TORCH_BOX(&quest::pack));
  m.impl("score_packed", TORCH_BOX(&quest::score_packed));
  m.impl("select", TORCH_BOX(&quest::select));
  m.impl("attend", TORCH_BOX(&quest::attend));
  m.impl("merge", TORCH_BOX(&quest::merge));
  m.impl("decode", TORCH_BOX(&quest::decode));
  m.impl("decode_packed", TORCH_BOX(&quest::decode_packed));
}

static std::string version() { return QUEST_VERSION; }
static std::string build() { return QUEST_BUILD; }

STABLE_TORCH_LIBRARY_IMPL(quest, CompositeExplicitAutograd, m) {
  m.impl("isa", TORCH_BOX(&quest::isa));
  m.impl("isas", TORCH_BOX(&quest::isas));
  m.impl("use_isa", TORCH_BOX(&quest::use_isa));
  m.impl("version", TORCH_BOX(&version));
  m.impl("build", TORCH_BOX(&build));
}

// Importing the module runs the registrations above; it has nothing else.
PyMODINIT_FUNC PyInit__C(void) {
  static struct PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
