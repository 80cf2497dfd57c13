#include <cstddef>
#include <cstdint>

#include "host/bindings.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace py = pybind11;

namespace quest_host {

// What the system makes of it is its affair, so nothing is said of failure.
static void advise_huge_pages(uintptr_t address, size_t num_bytes) {
#if defined(MADV_HUGEPAGE)
  madvise(reinterpret_cast<void*>(address), num_bytes, MADV_HUGEPAGE);
#else
  (void)address, (void)num_bytes;
#endif
}

void bind_memory(py::module_& module) {
  module.def("advise_huge_pages", &advise_huge_pages, py::arg("address"), py::arg("num_bytes"));
}

}  // namespace quest_host
