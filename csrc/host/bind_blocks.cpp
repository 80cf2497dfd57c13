#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>

#include "host/bindings.h"
#include "host/sequences.h"

namespace py = pybind11;

namespace quest_host {

namespace {

using Tokens = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;
using Counts = std::vector<int64_t>;
using Real = std::optional<py::array_t<bool, py::array::c_style>>;

py::array_t<int32_t> int32_array(const Counts& numbers) {
  py::array_t<int32_t> array(static_cast<py::ssize_t>(numbers.size()));
  std::copy(numbers.begin(), numbers.end(), array.mutable_data());
  return array;
}

int64_t remember(Blocks& blocks, const Tokens& tokens, const std::vector<int32_t>& held, const std::string& extra) {
  if (tokens.size() < static_cast<py::ssize_t>(held.size()) * blocks.block_size()) {
    throw std::invalid_argument("remember: tokens must fill " + std::to_string(held.size()) + " blocks of " +
                                std::to_string(blocks.block_size()) + ", got " + std::to_string(tokens.size()));
  }
  return blocks.remember(tokens.data(), held, extra);
}

// Throws unless q_len places, or those of them that `real` names, hold `counts` tokens.
void check_places(const Counts& counts, int64_t q_len, const Real& real) {
  const auto rows = static_cast<py::ssize_t>(counts.size());
  bool fits = !real || (real->ndim() == 2 && real->shape(0) == rows && real->shape(1) == q_len);
  for (py::ssize_t row = 0; fits && row < rows; ++row) {
    const bool* places = real ? real->data() + row * q_len : nullptr;
    fits = places ? std::count(places, places + q_len, true) == counts[row] : counts[row] <= q_len;
  }
  if (!fits) throw std::invalid_argument("extend: q_len places must hold each row's count of tokens, as real says");
}

// A step's tensors: what `extend` changed, slot_mapping [rows, q_len], seq_lens and num_new [rows].
py::tuple extend(Sequences& sequences, const Counts& begin, const Counts& counts, int64_t q_len, const Real& real) {
  Sequences::Span span{begin, counts};
  check_places(counts, q_len, real);
  Sequences::Change change = sequences.extend(span);
  py::array_t<int64_t> slots({static_cast<py::ssize_t>(counts.size()), static_cast<py::ssize_t>(q_len)});
  sequences.slots(span, q_len, real ? real->data() : nullptr, slots.mutable_data());
  Counts ends = begin;
  for (size_t row = 0; row < ends.size(); ++row) ends[row] += counts[row];
  return py::make_tuple(change.copies, change.fresh, slots, ends, int32_array(ends), int32_array(counts));
}

// The array shares the memory of the table, which lives as long as one of the two.
py::array table(const Sequences& sequences) {
  auto memory = new std::shared_ptr<int32_t[]>(sequences.table());
  py::capsule owner(memory, [](void* pointer) { delete static_cast<std::shared_ptr<int32_t[]>*>(pointer); });
  return py::array_t<int32_t>({sequences.room_rows(), sequences.room_width()}, memory->get(), owner);
}

}  // namespace

void bind_blocks(py::module_& module) {
  py::register_exception<OutOfBlocks>(module, "OutOfBlocks", PyExc_RuntimeError);

  py::class_<Blocks, std::shared_ptr<Blocks>>(module, "Blocks")
      .def(py::init<int64_t, int64_t, int64_t, int>(), py::arg("num_blocks"), py::kw_only(), py::arg("block_size"),
           py::arg("watermark") = 0, py::arg("hash_bits") = 64)
      .def_property_readonly("num_blocks", &Blocks::size)
      .def_property_readonly("block_size", &Blocks::block_size)
      .def_property_readonly("watermark", &Blocks::watermark)
      .def_property_readonly("num_free", &Blocks::num_free)
      .def_property_readonly("num_cached", &Blocks::num_cached)
      .def_property_readonly("num_idle", &Blocks::num_idle)
      .def_property_readonly("num_shared", &Blocks::num_shared)
      .def_property_readonly("num_evicted", &Blocks::num_evicted)
      .def_property_readonly("counts",
                             [](const Blocks& blocks) {
                               return py::make_tuple(blocks.size(), blocks.num_free(), blocks.num_idle(),
                                                     blocks.num_shared(), blocks.num_cached(), blocks.num_evicted());
                             })
      .def_property_readonly("free", &Blocks::free)
      .def("refs", &Blocks::refs, py::arg("block"))
      .def("is_cached", &Blocks::is_cached, py::arg("block"))
      .def("admits", &Blocks::admits, py::arg("count"))
      .def("grow", &Blocks::grow, py::arg("num_blocks"))
      .def(
          "allocate",
          [](Blocks& blocks, int64_t count) {
            blocks.expect(count, "allocate");
            std::vector<int32_t> taken;
            for (int64_t i = 0; i < count; ++i) taken.push_back(blocks.allocate());
            return taken;
          },
          py::arg("count"))
      .def("retain", &Blocks::retain, py::arg("block"))
      .def("release", &Blocks::release, py::arg("block"))
      .def(
          "find",
          [](Blocks& blocks, const Tokens& tokens, const std::string& extra) {
            return blocks.find(tokens.data(), tokens.size(), extra);
          },
          py::arg("tokens"), py::arg("extra"))
      .def("remember", &remember, py::arg("tokens"), py::arg("blocks"), py::arg("extra"))
      .def("forget", &Blocks::forget, py::arg("block"))
      .def("forget_all", &Blocks::forget_all)
      .def("__deepcopy__", [](const Blocks& blocks, const py::dict&) { return std::make_shared<Blocks>(blocks); });

  py::class_<Sequences>(module, "Sequences")
      .def(py::init<std::shared_ptr<Blocks>>(), py::arg("blocks"))
      .def_property_readonly("blocks", &Sequences::blocks)
      .def_property_readonly("ids", &Sequences::ids)
      .def_property_readonly("rows", &Sequences::rows)
      .def_property_readonly("lengths", &Sequences::lengths)
      .def_property_readonly("unused_slots", &Sequences::unused_slots)
      .def_property_readonly("width", &Sequences::width)
      .def_property_readonly(
          "room",
          [](const Sequences& sequences) { return py::make_tuple(sequences.room_rows(), sequences.room_width()); })
      .def("__contains__", &Sequences::has, py::arg("id"))
      .def("table", &table)
      .def("length", &Sequences::length, py::arg("id"))
      .def("blocks_of", &Sequences::blocks_of, py::arg("id"))
      .def("add", &Sequences::add)
      .def("copy", &Sequences::copy, py::arg("id"))
      .def("select", &Sequences::select, py::arg("ids"))
      .def("remove", &Sequences::remove, py::arg("id"))
      .def("empty", &Sequences::empty, py::arg("id"))
      .def("fill", &Sequences::fill, py::arg("id"), py::arg("length"))
      .def("adopt", &Sequences::adopt, py::arg("id"), py::arg("blocks"))
      .def("fork", &Sequences::fork, py::arg("indices"))
      .def(
          "to_copy",
          [](const Sequences& sequences, const Counts& begin, const Counts& counts) {
            return sequences.to_copy({begin, counts});
          },
          py::arg("begin"), py::arg("counts"))
      .def(
          "needed",
          [](const Sequences& sequences, const Counts& begin, const Counts& counts) {
            return sequences.needed({begin, counts});
          },
          py::arg("begin"), py::arg("counts"))
      .def("extend", &extend, py::arg("begin"), py::arg("counts"), py::arg("q_len"), py::arg("real") = py::none())
      .def("needed_to_crop", &Sequences::needed_to_crop, py::arg("ends"), py::arg("redo"))
      .def(
          "crop",
          [](Sequences& sequences, const Counts& ends, const Counts& redo) {
            Sequences::Change change = sequences.crop(ends, redo);
            return py::make_tuple(change.copies, change.fresh, change.freed);
          },
          py::arg("ends"), py::arg("redo"))
      .def("__deepcopy__", [](const Sequences& sequences, const py::dict& memo) {
        py::object blocks = py::module_::import("copy").attr("deepcopy")(sequences.blocks(), memo);
        return sequences.copy_on(blocks.cast<std::shared_ptr<Blocks>>());
      });
}

}  // namespace quest_host
