// What quest._host consists of, a file for each: bookkeeping on the host, without torch.
#pragma once

#include <pybind11/pybind11.h>

namespace quest_host {

void bind_blocks(pybind11::module_& module);
void bind_memory(pybind11::module_& module);
void bind_residency(pybind11::module_& module);
void bind_slots(pybind11::module_& module);

}  // namespace quest_host
