// quest._host.Residency, as quest/_host.pyi describes it.
#include <pybind11/stl.h>

#include <tuple>

#include "host/bindings.h"
#include "host/residency.h"

namespace py = pybind11;

namespace quest_host {

using Access = Residency::Access;
using TableTuple = std::tuple<uintptr_t, int64_t, int64_t>;

static Table table_of(const TableTuple& x) {
  return {reinterpret_cast<const int32_t*>(std::get<0>(x)), std::get<1>(x), std::get<2>(x)};
}

void bind_residency(py::module_& module) {
  py::register_local_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const MoveError& e) {
      PyErr_SetObject(PyExc_OSError, py::make_tuple(e.code, e.what, e.file).ptr());
    }
  });

  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<Counts>(module, "ResidencyCounts")
      .def_readonly("hits", &Counts::hits)
      .def_readonly("misses", &Counts::misses)
      .def_readonly("bytes_in", &Counts::bytes_in)
      .def_readonly("bytes_out", &Counts::bytes_out)
      .def_readonly("resident", &Counts::resident)
      .def_readonly("peak", &Counts::peak);
  py::class_<Residency>(module, "Residency")
      .def(py::init<int64_t, int64_t>(), py::arg("num_layers"), py::arg("max_bytes"))
      .def(
          "set_layer",
          [](Residency& self, int64_t layer, uintptr_t k, uintptr_t v, std::pair<int64_t, int64_t> unit_bytes,
             int64_t num_blocks, int64_t num_kv_heads, int64_t block_size, int64_t unit_tokens, int fd,
             std::string file) {
            Layer made;
            made.k = reinterpret_cast<char*>(k), made.v = reinterpret_cast<char*>(v);
            made.k_bytes = unit_bytes.first, made.v_bytes = unit_bytes.second;
            made.num_kv_heads = num_kv_heads, made.block_size = block_size, made.unit_tokens = unit_tokens;
            made.fd = fd, made.file = std::move(file);
            self.set_layer(layer, std::move(made), num_blocks);
          },
          py::arg("layer"), py::arg("k"), py::arg("v"), py::arg("unit_bytes"), py::kw_only(), py::arg("num_blocks"),
          py::arg("num_kv_heads"), py::arg("block_size"), py::arg("unit_tokens"), py::arg("fd"), py::arg("file"))
      .def(
          "grow",
          [](Residency& self, int64_t layer, uintptr_t k, uintptr_t v, int64_t num_blocks) {
            self.grow(layer, reinterpret_cast<char*>(k), reinterpret_cast<char*>(v), num_blocks);
          },
          no_gil)
      .def(
          "scan",
          [](Residency& self, int64_t layer, const TableTuple& table, const std::vector<Positions>& rows) {
            self.use(layer, table_of(table), rows, Access::scan);
          },
          no_gil)
      .def(
          "read",
          [](Residency& self, int64_t layer, const TableTuple& table, const std::vector<Positions>& rows) {
            self.use(layer, table_of(table), rows, Access::select);
          },
          no_gil)
      .def(
          "write",
          [](Residency& self, int64_t layer, const TableTuple& table, const std::vector<Positions>& rows) {
            self.use(layer, table_of(table), rows, Access::write);
          },
          no_gil)
      .def(
          "read_pages",
          [](Residency& self, int64_t layer, const TableTuple& table, uintptr_t page_idx,
             std::tuple<int64_t, int64_t, int64_t, int64_t> shape, int64_t page_size) {
            const auto [batch, q_len, heads, selected] = shape;
            const auto* ids = reinterpret_cast<const int32_t*>(page_idx);
            self.use_pages(layer, table_of(table), {ids, batch, q_len, heads, selected, page_size});
          },
          no_gil)
      .def("hold", &Residency::hold, no_gil)
      .def("copy_blocks", &Residency::copy_blocks, no_gil)
      .def("written", &Residency::written, no_gil)
      .def("forget", &Residency::forget, no_gil)
      .def("copy_layer", &Residency::copy_layer, no_gil)
      .def("settle", &Residency::settle, no_gil)
      .def_property_readonly("counts", [](const Residency& self) { return Counts(self.counts()); });
}

}  // namespace quest_host
