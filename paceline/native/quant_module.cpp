// Python bindings of the quantised forms. Meanings are documented in paceline/_native.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>

#include "kernels.h"
#include "quant.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace paceline;

void register_quant(nb::module_& m) {
  using Rows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
  using Stored = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
  nb::enum_<Quant>(m, "Quant")
      .value("NONE", Quant::kNone)
      .value("INT8", Quant::kInt8)
      .value("INT8_CHANNEL", Quant::kInt8Channel)
      .value("INT4", Quant::kInt4)
      .value("INT4_MIN", Quant::kInt4Min);
  m.def(
      "quant_row_bytes",
      [](Quant quant, int k) {
        if (quant == Quant::kNone || k < 1) throw std::invalid_argument("quant_row_bytes: needs a format and k > 0");
        return quant_row_bytes(quant, k);
      },
      "quant"_a, "k"_a);
  m.def(
      "packed_quant_bytes",
      [](Quant quant, int n, int k, bool gated) {
        if (quant == Quant::kNone || n < 1 || k < 1)
          throw std::invalid_argument("packed_quant_bytes: needs a format and a matrix");
        return size_t((n + kPanel - 1) / kPanel) * (gated ? 2 : 1) * quant_panel_bytes(quant, k);
      },
      "quant"_a, "n"_a, "k"_a, "gated"_a = false);
  m.def(
      "quantise_rows",
      [](Quant quant, Rows values, Stored out) {
        const int k = int(values.shape(1));
        if (quant == Quant::kNone || k < 1 || out.shape(0) != values.shape(0) ||
            out.shape(1) != quant_row_bytes(quant, k))
          throw std::invalid_argument("quantise_rows: the shape of out does not fit");
        const float* from = values.data();
        uint8_t* to = out.data();
        nb::gil_scoped_release release;
        for (size_t r = 0; r < values.shape(0); ++r)
          if (!quantise_weights(quant, from + r * size_t(k), k, to + r * out.shape(1))) return int64_t(r);
        return int64_t(-1);
      },
      "quant"_a, "values"_a, "out"_a.noconvert());
  m.def(
      "quant_isa",
      [](const std::string& isa) { return std::string(quant_kernels_for(kernels_for(isa.c_str()).name).name); },
      "isa"_a = "");
  m.def(
      "quantise_activations",
      [](Rows values, Stored out, const std::string& isa) {
        const size_t k = values.shape(1), groups = size_t(quant_groups(int(k)));
        if (k < 1 || out.shape(0) != values.shape(0) || out.shape(1) != groups * sizeof(QuantGroup))
          throw std::invalid_argument("quantise_activations: the shape of out does not fit");
        const QuantKernels& kernels = quant_kernels_for(kernels_for(isa.c_str()).name);
        for (size_t r = 0; r < values.shape(0); ++r)
          kernels.quantise(values.data() + r * k, false, int(k),
                           reinterpret_cast<QuantGroup*>(out.data() + r * out.shape(1)), 1);
      },
      "values"_a, "out"_a.noconvert(), "isa"_a = "");
}
