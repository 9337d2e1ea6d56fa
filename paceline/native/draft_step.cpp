// One token per sequence, for drafters that draft token by token: as sampling's draft_rows, for a single slot whose
// earlier drafts are given.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "draft_heads.h"

namespace nb = nanobind;
using namespace nb::literals;

void register_draft_step(nb::module_& m);

namespace {

using Logits = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Tokens = std::vector<int64_t>;
namespace sampling = paceline::sampling;

Tokens draft_step(const Logits& logits, const std::vector<sampling::SamplingState*>& states,
                  const std::vector<Tokens>& drafts, const sampling::IdMap* map, nb::object probs) {
  const size_t rows = logits.shape(0), width = logits.shape(1);
  if (states.size() != rows || drafts.size() != rows)
    throw std::invalid_argument("logits: one row for each state and its drafts");
  const size_t vocab = map == nullptr ? width : map->columns.size();
  if (map != nullptr && map->ids.size() != width) throw std::invalid_argument("id_map: not that of the columns");
  for (size_t i = 0; i < rows; ++i) {
    if (size_t(states[i]->vocab_size) != vocab)
      throw std::invalid_argument("states: made for a vocabulary of " + std::to_string(states[i]->vocab_size) +
                                  ", the logits have " + std::to_string(vocab));
    for (const int64_t id : drafts[i]) states[i]->check(id, "drafts");
  }
  float* out = nullptr;
  if (!probs.is_none()) {
    Rows array = nb::cast<Rows>(probs, false);
    if (array.shape(0) != rows || array.shape(1) != width) throw std::invalid_argument("probs: not like logits");
    out = array.data();
  }
  Tokens tokens(rows);
  nb::gil_scoped_release release;
  paceline::SlotRow slot;
  const auto stream = out == nullptr ? sampling::Stream::kGumbel : sampling::Stream::kDraft;
  for (size_t i = 0; i < rows; ++i) {
    sampling::Prefix prefix(*states[i]);
    for (const int64_t id : drafts[i]) prefix.push(id);
    const sampling::SamplingState& state = *states[i];
    const sampling::RowView& view = slot.view(logits.data() + i * width, int(width), map, state);
    if (out != nullptr) sampling::Distribution(view, state.warp).write(out + i * width);
    tokens[i] = view.token(sampling::draw_coupled(view, state.warp, state.noise(stream)));
  }
  return tokens;
}

}  // namespace

void register_draft_step(nb::module_& m) {
  m.def("draft_step", &draft_step, "logits"_a, "states"_a, "drafts"_a, "id_map"_a = nb::none(), "probs"_a = nb::none(),
        "The next draft of each sequence (target ids). logits: float32 [sequences, columns], seeing drafts[i] behind "
        "the committed tokens. probs: float32 like logits, to be filled with the distributions drawn from with the "
        "drafter's own noise; None: drawn with the target's.");
}
