// Operations on rows between matrix products: norms that stand alone, gates, logits scaled and softly capped.
#include <stdexcept>

#include "plan.h"

namespace paceline {

void Plan::check_block(const Op& op) {
  using K = BufferKind;
  if (op.width < 1) throw std::invalid_argument("width must be positive");
  if (op.kind == Op::kNorm) {
    need(op.in, {K::kF32, K::kInput}, "norm in");
    need(op.out, {K::kF32}, "norm out");
    if (!op.norm) throw std::invalid_argument("norm: there is no weight");
    if (op.add && op.in == op.out) throw std::invalid_argument("norm: in and out are the same buffer");
    if (std::min(buffers_[op.in].width, buffers_[op.out].width) < op.width)
      throw std::invalid_argument("norm: buffer too narrow");
  } else if (op.kind == Op::kGate) {
    need(op.in, {K::kF32}, "gate in");
    need(op.out, {K::kAct}, "gate out");
    if (op.offset < 0 || buffers_[op.in].width < op.offset + op.width || buffers_[op.out].width < op.width)
      throw std::invalid_argument("gate: buffer too narrow");
  } else {
    need(op.out, {K::kF32, K::kLogits}, "softcap");
    if (buffers_[op.out].width < op.width) throw std::invalid_argument("softcap: buffer too narrow");
    if (!(op.softcap >= 0)) throw std::invalid_argument("softcap: the cap must be 0 or more");
  }
}

void Plan::block_step(const Op& op, const Batch& b, int tid) {
  const bool logits = buffers_[op.out].kind == BufferKind::kLogits;
  const Range rows = share(logits ? b.selected : b.rows, tid, pool_->size());
  size_t ld_in = 0, ld_out = 0;
  const float* in = op.kind == Op::kSoftcap ? nullptr : f32(op.in, b, &ld_in);
  if (op.kind == Op::kGate) {
    const Buffer& out = buffers_[op.out];
    for (int r = rows.begin; r < rows.end; ++r)
      kernels_.gate_row(out.memory->data() + size_t(r) * out.stride * act_item(), act_,
                        in + size_t(r) * ld_in + op.offset, op.width);
    return;
  }
  float* out = f32(op.out, b, &ld_out);
  if (op.kind == Op::kSoftcap) {
    for (int r = rows.begin; r < rows.end; ++r)
      kernels_.softcap_row(out + size_t(r) * ld_out, op.width, op.scale, op.softcap);
    return;
  }
  std::vector<float> row(op.add ? size_t(op.width) : 0);
  for (int r = rows.begin; r < rows.end; ++r) {
    float* to = out + size_t(r) * ld_out;
    kernels_.norm_rows(in + size_t(r) * ld_in, ld_in, op.width, op.norm, op.eps, op.add ? row.data() : to, 0, Act::kF32,
                       0, 1);
    if (op.add) kernels_.add_row(to, row.data(), op.width, 1.0f);
  }
}

}  // namespace paceline
