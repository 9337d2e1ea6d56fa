// Operations of networks with a gated delta net.
#include <stdexcept>
#include <string>

#include "plan.h"

namespace paceline {

void Plan::add_delta(const Op& op) const {
  const auto need = [&](int id, BufferKind kind, const char* what) {
    if (id < 0 || id >= int(buffers_.size()) || buffers_[size_t(id)].kind != kind)
      throw std::invalid_argument(std::string(what) + ": no such buffer, or of the wrong kind");
  };
  need(op.in, BufferKind::kF32, "in");
  need(op.rows, BufferKind::kF32, "rows");
  if (op.kind == Op::kDeltaRule) need(op.out, BufferKind::kAct, "delta_rule out");
}

void Plan::check_delta(const Batch& b) const {
  bool checked = false;
  for (const Op& op : ops_) {
    if (op.kind != Op::kShortConv && op.kind != Op::kDeltaRule) continue;
    if (!b.state.cache) throw std::invalid_argument("this plan needs a state cache");
    const DeltaShape& s = b.state.cache->shape();
    const int mixed = s.channels() + s.values() + 2 * s.value_heads;
    if (op.delta_net.layer < 0 || op.delta_net.layer >= s.layers || op.width != s.channels() || op.taps != s.kernel ||
        op.heads != s.value_heads || op.head_dim != s.value_dim || buffers_[size_t(op.in)].width < mixed ||
        buffers_[size_t(op.rows)].width < s.channels() ||
        (op.kind == Op::kDeltaRule && buffers_[size_t(op.out)].width < s.values()))
      throw std::invalid_argument("the state cache does not fit the plan");
    if (!checked)
      b.state.cache->check(b.state.slots, b.state.journal, b.starts, b.positions, b.sequences, b.state.snapshots,
                           b.state.num_snapshots);
    checked = true;
  }
}

void Plan::delta(const Op& op, const Batch& b, int tid) {
  const int threads = pool_->size();
  DeltaRows r{};
  r.mixed = f32(op.in, b, &r.ld_mixed);
  r.rows = f32(op.rows, b, &r.ld_rows);
  r.act = act_;
  if (op.kind == Op::kShortConv) {
    run_short_conv(delta_kernels_, op.delta_net, b.state, r, tid, threads);
    return;
  }
  r.out = buffers_[size_t(op.out)].memory->data();
  r.ld_out = buffers_[size_t(op.out)].stride;
  run_delta_rule(delta_kernels_, op.delta_net, b.state, r, tid, threads);
}

}  // namespace paceline
