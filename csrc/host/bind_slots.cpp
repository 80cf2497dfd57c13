// quest._host.Slots, as quest/_host.pyi describes it.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <tuple>

#include "host/bindings.h"
#include "host/slots.h"

namespace py = pybind11;

namespace quest_host {

namespace {

using Units = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;

template <typename To, typename From, typename F>
py::array_t<To> array_of(const std::vector<From>& from, const F& f) {
  py::array_t<To> array(static_cast<py::ssize_t>(from.size()));
  std::transform(from.begin(), from.end(), array.mutable_data(), f);
  return array;
}

py::tuple arrays_of(const Slots::Moves& moves) {
  const auto unit = [](const Slots::Place& place) { return place.unit; };
  const auto slot = [](const Slots::Place& place) { return place.slot; };
  const auto dirty = array_of<bool>(moves.dirty, [](uint8_t flag) { return flag != 0; });
  return py::make_tuple(array_of<int64_t>(moves.gone, unit), array_of<int64_t>(moves.gone, slot), dirty,
                        array_of<int64_t>(moves.come, unit), array_of<int64_t>(moves.come, slot));
}

}  // namespace

void bind_slots(py::module_& module) {
  const auto same = [](int64_t x) { return x; };
  py::class_<Slots>(module, "Slots")
      .def(py::init<int64_t, int64_t, int64_t, int64_t, int64_t>(), py::arg("num_blocks"), py::kw_only(),
           py::arg("num_kv_heads"), py::arg("units_per_head"), py::arg("unit_tokens"), py::arg("capacity"))
      .def(py::init<const Slots&>(), py::arg("other"))
      .def("grow", &Slots::grow)
      .def("units",
           [same](Slots& self, std::tuple<uintptr_t, int64_t, int64_t> table, uintptr_t page_idx,
                  std::tuple<int64_t, int64_t, int64_t, int64_t> shape, int64_t page_size) {
             const auto [batch, q_len, heads, selected] = shape;
             const auto [ids, stride, width] = table;
             const Table rows{reinterpret_cast<const int32_t*>(ids), stride, width};
             const auto* pages = reinterpret_cast<const int32_t*>(page_idx);
             return array_of<int64_t>(self.units(rows, {pages, batch, q_len, heads, selected, page_size}), same);
           })
      .def("read",
           [](Slots& self, const Units& units) -> py::object {
             if (!self.read(units.data(), units.size())) return py::none();
             return arrays_of(self.moves());
           })
      .def("write",
           [same](Slots& self, const Units& units) {
             const auto slots = array_of<int64_t>(self.write(units.data(), units.size()), same);
             return py::make_tuple(slots, arrays_of(self.moves()));
           })
      .def("undo", &Slots::undo)
      .def("where",
           [](const Slots& self, const Units& units) {
             py::array_t<int64_t> slots(units.size());
             for (py::ssize_t i = 0; i < units.size(); i++) slots.mutable_data()[i] = self.slot(units.data()[i]);
             return slots;
           })
      .def("forget", &Slots::forget)
      .def_property_readonly("counts", [](const Slots& self) {
        const Slots::Counts& counts = self.counts();
        return py::make_tuple(counts.hits, counts.misses, counts.used, counts.peak);
      });
}

}  // namespace quest_host
