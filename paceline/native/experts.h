// Mixture of experts: which experts a row goes to, and the rows of a pass sorted by expert.
#pragma once
#include <cstddef>
#include <memory>
#include <vector>

#include "storage.h"

namespace paceline {

// One sparse layer. gate_up: gated [inner, hidden] each; down: [hidden, inner].
struct ExpertWeights {
  std::vector<const Packed*> gate_up, down;
  int top_k = 0;
  bool normalise = false;  // the weights of the chosen ones sum to one
  int hidden() const { return gate_up[0]->k; }
  int inner() const { return down[0]->k; }
  bool quantised() const { return gate_up[0]->quant != Quant::kNone; }
};

// The `top_k` largest of logits [experts], ties to the lower id: `ids` in increasing order, so that a row's sum over
// its experts has one order, and their softmax over all experts (or over the chosen ones).
void route(const float* logits, int experts, int top_k, bool normalise, int* ids, float* weights);

// Rows of a pass sorted by expert, rows of one expert in their own order: expert e has places [starts[e], starts[e +
// 1]), place[row * top_k + j] is where row's j-th expert keeps it.
void sort_by_expert(const int* ids, int rows, int top_k, int experts, int* starts, int* place);

// Memory of a pass, shared by all sparse layers of a plan. Places are rows of `gathered`, `inner` and `out`.
struct ExpertScratch {
  size_t places = 0;
  size_t hidden_stride = 0, inner_stride = 0;  // elements
  size_t hidden_groups = 0, inner_groups = 0;  // of quantised layers
  int experts = 0;
  std::unique_ptr<Region> gathered, inner, out, hidden_records, inner_records;
  std::vector<int> ids, place, starts;
  std::vector<float> weights;

  void reserve(const ExpertWeights& w, int max_rows);
  void allocate(size_t act_item);  // once, before the first pass
  size_t bytes() const;
};

}  // namespace paceline
