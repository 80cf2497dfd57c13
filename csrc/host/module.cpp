#include "host/bindings.h"

PYBIND11_MODULE(_host, module) {
  module.doc() = "Bookkeeping of the paged cache: blocks, prefixes, tables of a step, and which units are resident.";
  quest_host::bind_blocks(module);
  quest_host::bind_memory(module);
  quest_host::bind_residency(module);
  quest_host::bind_slots(module);
}
