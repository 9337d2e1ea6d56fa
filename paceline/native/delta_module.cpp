// Python bindings of the states of gated delta nets. Shapes are documented in paceline/_native.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <stdexcept>

#include "delta_net.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace paceline;

namespace {

using Ints2 = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void check_slot(const StateCache& c, int slot) {
  if (slot < 0 || slot >= c.slots()) throw std::invalid_argument("slot " + std::to_string(slot) + " does not exist");
}

}  // namespace

void register_delta(nb::module_& m) {
  nb::class_<StateCache>(m, "StateCache")
      .def(
          "__init__",
          [](StateCache* self, std::shared_ptr<ThreadPool> pool, int layers, int key_heads, int value_heads,
             int key_dim, int value_dim, int kernel, int slots, int journal_rows) {
            new (self) StateCache(std::move(pool), {layers, key_heads, value_heads, key_dim, value_dim, kernel}, slots,
                                  journal_rows);
          },
          "pool"_a, "layers"_a, "key_heads"_a, "value_heads"_a, "key_dim"_a, "value_dim"_a, "kernel"_a, "slots"_a,
          "journal_rows"_a)
      .def_prop_ro("slots", &StateCache::slots)
      .def_prop_ro("journal_rows", &StateCache::journal_rows)
      .def_prop_ro("slot_bytes", &StateCache::slot_bytes)
      .def_prop_ro("journal_row_bytes", &StateCache::journal_row_bytes)
      .def(
          "rows",
          [](const StateCache& c, int slot) {
            check_slot(c, slot);
            return c.rows(slot);
          },
          "slot"_a)
      .def(
          "reset",
          [](StateCache& c, int slot) {
            check_slot(c, slot);
            nb::gil_scoped_release release;
            c.reset(slot);
          },
          "slot"_a)
      .def(
          "copy",
          [](StateCache& c, int from, int to) {
            check_slot(c, from);
            check_slot(c, to);
            nb::gil_scoped_release release;
            c.copy(from, to);
          },
          "source"_a, "to"_a)
      .def(
          "assume",
          [](StateCache& c, int slot, int64_t rows) {
            check_slot(c, slot);
            c.assume(slot, rows);
          },
          "slot"_a, "rows"_a)
      .def(
          "read",
          [](const StateCache& c, int slot, Bytes out) {
            check_slot(c, slot);
            if (out.size() != c.slot_bytes()) throw std::invalid_argument("read: slot_bytes bytes");
            std::memcpy(out.data(), c.data(slot), c.slot_bytes());
          },
          "slot"_a, "out"_a.noconvert())
      .def(
          "commit",
          [](StateCache& c, const std::string& isa, Ints2 entries, std::optional<Ints2> snapshots) {
            if (entries.shape(1) != 3 || (snapshots && snapshots->shape(1) != 3))
              throw std::invalid_argument("commit: entries and snapshots are [n, 3]");
            for (size_t i = 0; i < entries.shape(0); ++i) check_slot(c, entries(i, 0));
            const DeltaKernels& kernels = delta_kernels_for(kernels_for(isa.c_str()).name);
            nb::gil_scoped_release release;
            c.commit(kernels, reinterpret_cast<const JournalEntry*>(entries.data()), int(entries.shape(0)),
                     snapshots ? reinterpret_cast<const Snapshot*>(snapshots->data()) : nullptr,
                     snapshots ? int(snapshots->shape(0)) : 0);
          },
          "isa"_a, "entries"_a, "snapshots"_a = nb::none());
}
