#include "plan.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "local_conv.h"

namespace paceline {
namespace {

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }
int padded(int n) { return int(round_up(size_t(n), 16)); }

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

// Tiles of query vectors for one attention geometry, in sequence order. Work is handed out tile by tile, or, when there
// are too few tiles to keep the threads busy, partition by partition with a fold afterwards; both give the same bits.
struct Plan::Tiles {
  int group, kv_heads, head_dim, window, first_key;
  bool causal;
  struct Item {
    QueryTile tile;
    int sequence, first_part, last_part;  // partitions [first, last)
    size_t partial;                       // offset of the first partial state
  };
  std::vector<Item> items;
  std::vector<std::pair<int, int>> split;  // (item, partition)
  bool by_partition = false;
  size_t partial_floats = 0;
};

Plan::Plan(std::shared_ptr<ThreadPool> pool, const Kernels& kernels, bool f32, int max_rows)
    : pool_(std::move(pool)),
      kernels_(kernels),
      quant_kernels_(quant_kernels_for(kernels.name)),
      delta_kernels_(delta_kernels_for(kernels.name)),
      f32_(f32),
      act_(f32                ? Act::kF32
           : kernels.bf16_dot ? Act::kBF16
                              : Act::kF32Rounded),
      far_rows_(far_prefetch_rows()),
      max_rows_(max_rows) {
  if (max_rows < 1) throw std::invalid_argument("max_rows must be positive");
}

Plan::~Plan() = default;

int Plan::add_buffer(BufferKind kind, int width) {
  if (width < 1) throw std::invalid_argument("buffer width must be positive");
  Buffer b{kind, width, round_up(size_t(width), 32), nullptr};
  if (kind == BufferKind::kF32) b.memory = std::make_unique<Region>(b.stride * max_rows_ * 4);
  if (kind == BufferKind::kAct) {
    // the last tile of a pass may have fewer rows, but its records lie as far apart as those of the others
    const size_t records = size_t(quant_groups(width)) * sizeof(QuantGroup) * size_t(max_rows_ + kMaxQuantRows);
    b.memory = std::make_unique<Region>(std::max(b.stride * max_rows_ * act_item(), records));
    b.records = true;  // until an operation needs it otherwise
  }
  buffers_.push_back(std::move(b));
  return int(buffers_.size()) - 1;
}

void Plan::need(int id, std::initializer_list<BufferKind> kinds, const char* what) const {
  if (id < 0 || id >= int(buffers_.size())) throw std::invalid_argument(std::string(what) + ": no such buffer");
  for (const BufferKind k : kinds)
    if (buffers_[id].kind == k) return;
  throw std::invalid_argument(std::string(what) + ": buffer of the wrong kind");
}

void Plan::add(Op op) {
  using K = BufferKind;
  switch (op.kind) {
    case Op::kEmbed:
      need(op.out, {K::kF32}, "embed out");
      if (buffers_[op.out].width < op.width) throw std::invalid_argument("embed out: too narrow");
      if (!op.table && op.w->gated) throw std::invalid_argument("embed: the weight is gated");
      break;
    case Op::kRope:
      need(op.cos, {K::kF32}, "rope cos");
      need(op.sin, {K::kF32}, "rope sin");
      if (std::min(buffers_[op.cos].width, buffers_[op.sin].width) < op.half)
        throw std::invalid_argument("rope: cos or sin too narrow");
      break;
    case Op::kLinear: {
      if (op.w->quant == Quant::kNone && op.w->f32 != f32_)
        throw std::invalid_argument("linear: weight type differs from the plan's");
      if (op.convert) {
        need(op.in, {K::kF32, K::kInput}, "linear in");
        if (op.w->quant == Quant::kNone) scratch_stride_ = std::max(scratch_stride_, round_up(size_t(op.w->k), 32));
      } else {
        need(op.in, {K::kAct}, "linear in");
      }
      if (op.w->quant != Quant::kNone) quant_groups_ = std::max(quant_groups_, size_t(quant_groups(op.w->k)));
      if (buffers_[op.in].width != op.w->k)
        throw std::invalid_argument("linear in: width " + std::to_string(buffers_[op.in].width) + ", weight takes " +
                                    std::to_string(op.w->k));
      if (op.w->gated != (op.epilogue == Epilogue::kSwiGLU || op.epilogue == Epilogue::kGeluTanh))
        throw std::invalid_argument("linear: gated weight and epilogue do not match");
      if (op.w->gated)
        need(op.out, {K::kAct}, "linear out");
      else
        need(op.out, {K::kF32, K::kLogits}, "linear out");
      if (buffers_[op.out].width < op.w->n) throw std::invalid_argument("linear out: too narrow");
      if (buffers_[op.out].kind == K::kLogits && !op.selected)
        throw std::invalid_argument("linear out: logits are those of selected rows");
      break;
    }
    case Op::kQkvPost:
    case Op::kAttention: {
      if (op.head_dim < 2 || op.head_dim > kMaxHeadDim || op.head_dim % 2)
        throw std::invalid_argument("head_dim must be even and at most 256");
      if (op.kv_heads < 1 || (op.heads && op.heads % op.kv_heads))
        throw std::invalid_argument("heads must be a multiple of kv_heads");
      if (op.kind == Op::kQkvPost) {
        need(op.in, {K::kF32}, "qkv in");
        if (op.heads) need(op.out, {K::kAct}, "qkv out");
        need(op.cos, {K::kF32}, "qkv cos");
        need(op.sin, {K::kF32}, "qkv sin");
        if (op.half < 0 || op.half * 2 > op.head_dim)
          throw std::invalid_argument("rotary_dim must be from 0 to head_dim");
        if (std::min(buffers_[op.cos].width, buffers_[op.sin].width) < op.half)
          throw std::invalid_argument("qkv: cos or sin too narrow");
        if (op.heads < 0 || (op.heads && buffers_[op.out].width < op.heads * op.head_dim))
          throw std::invalid_argument("qkv out: too narrow");
        if (buffers_[op.in].width < (op.heads + 2 * op.kv_heads) * op.head_dim)
          throw std::invalid_argument("qkv in: too narrow");
      } else {
        need(op.in, {K::kAct}, "attention in");
        need(op.out, {K::kAct}, "attention out");
        if (op.heads < 1 || op.window < 0) throw std::invalid_argument("attention: heads or window out of range");
        if (op.first_key < 0) throw std::invalid_argument("attention: first_key must be 0 or more");
        if (std::min(buffers_[op.in].width, buffers_[op.out].width) < op.heads * op.head_dim)
          throw std::invalid_argument("attention: buffer too narrow");
      }
      break;
    }
    case Op::kCopy:
      need(op.in, {K::kF32}, "copy in");
      need(op.out, {K::kF32, K::kTaps}, "copy out");
      if (op.width < 1 || op.offset < 0 || buffers_[op.in].width < op.width)
        throw std::invalid_argument("copy: width or offset out of range");
      if (buffers_[op.out].width < op.offset + op.width) throw std::invalid_argument("copy out: too narrow");
      break;
    case Op::kLocalConv:
      need(op.in, {K::kF32}, "local_conv in");
      need(op.out, {K::kF32}, "local_conv out");
      need(op.delta, {K::kF32}, "local_conv delta");
      if (op.in == op.out) throw std::invalid_argument("local_conv: in and out are the same buffer");
      if (op.taps < 1 || op.group < 1 || op.width % op.group || op.offset < 0)
        throw std::invalid_argument("local_conv: kernel, group or offset out of range");
      if (buffers_[op.in].width != op.width || buffers_[op.out].width != op.width ||
          buffers_[op.delta].width < op.offset + op.taps * (op.width / op.group))
        throw std::invalid_argument("local_conv: widths do not fit");
      break;
    case Op::kNorm:
    case Op::kGate:
    case Op::kSoftcap:
      check_block(op);
      break;
    case Op::kExperts:
      check_experts(op);
      break;
    case Op::kShortConv:
    case Op::kDeltaRule:
      add_delta(op);
      break;
  }
  int tiles = -1;
  if (op.kind == Op::kAttention) {
    const int group = op.heads / op.kv_heads;
    for (size_t i = 0; i < tiles_.size(); ++i)
      if (tiles_[i]->group == group && tiles_[i]->kv_heads == op.kv_heads && tiles_[i]->head_dim == op.head_dim &&
          tiles_[i]->window == op.window && tiles_[i]->first_key == op.first_key && tiles_[i]->causal == op.causal)
        tiles = int(i);
    if (tiles < 0) {
      auto t = std::make_unique<Tiles>();
      t->group = group;
      t->kv_heads = op.kv_heads;
      t->head_dim = op.head_dim;
      t->window = op.window;
      t->first_key = op.first_key;
      t->causal = op.causal;
      tiles_.push_back(std::move(t));
      tiles = int(tiles_.size()) - 1;
    }
  }
  op_tiles_.push_back(tiles);
  ops_.push_back(op);
  note_records(op);
}

void Plan::note_records(const Op& op) {
  const bool product = op.kind == Op::kLinear && op.w->quant != Quant::kNone && !op.selected;
  const auto exclude = [&](int id) {
    if (id >= 0) buffers_[size_t(id)].records = false;
  };
  if (!product || op.convert) exclude(op.in);
  const int width = op.out < 0 ? 0 : buffers_[size_t(op.out)].width;
  const bool whole_groups = op.kind == Op::kAttention && op.head_dim % kGroup == 0 && op.heads * op.head_dim == width;
  if (!(product && op.w->gated && op.w->n == width) && !whole_groups) exclude(op.out);
}

// Where the records of `row` begin, or those of a group in it; `tile_rows` further comes the next group.
QuantGroup* Plan::record_of(const Buffer& buffer, int row, int group, int tile_rows) const {
  const int first = row / tile_rows * tile_rows;
  return reinterpret_cast<QuantGroup*>(buffer.memory->data()) + size_t(first) * size_t(quant_groups(buffer.width)) +
         size_t(group) * size_t(tile_rows) + size_t(row - first);
}

size_t Plan::scratch_bytes() const {
  size_t total = 0;
  for (const Buffer& b : buffers_)
    if (b.memory) total += b.stride * max_rows_ * (b.kind == BufferKind::kAct ? act_item() : 4);
  const size_t rows = size_t(max_rows_) + size_t(kPrivateRows) * pool_->size();
  total += quant_groups_ * (sizeof(QuantGroup) * rows + kGroup * 4 * size_t(pool_->size()));
  total += expert_scratch_.bytes();
  return total + scratch_stride_ * act_item() * rows;
}

float* Plan::f32(int id, const Batch& batch, size_t* stride) {
  Buffer& b = buffers_[id];
  switch (b.kind) {
    case BufferKind::kInput:
      *stride = batch.ld_input;
      return const_cast<float*>(batch.input);
    case BufferKind::kLogits:
      *stride = batch.ld_logits;
      return batch.logits;
    case BufferKind::kTaps:
      *stride = batch.ld_taps;
      return batch.taps;
    default:
      *stride = b.stride;
      return reinterpret_cast<float*>(b.memory->data());
  }
}

void Plan::check(const Batch& b, const KVCache* cache) const {
  if (b.rows < 1 || b.rows > max_rows_)
    throw std::invalid_argument("rows: " + std::to_string(b.rows) + " is outside 1.." + std::to_string(max_rows_));
  if (b.sequences < 1 || b.starts[0] != 0 || b.starts[b.sequences] != b.rows)
    throw std::invalid_argument("row_starts must begin at 0 and end at the number of rows");
  for (int s = 0; s < b.sequences; ++s)  // all of them before a row is looked at
    if (b.starts[s + 1] <= b.starts[s]) throw std::invalid_argument("row_starts must ascend");
  for (int s = 0; s < b.sequences; ++s) {
    for (int r = b.starts[s]; r < b.starts[s + 1]; ++r) {
      const int p = b.positions[r];
      if (p < 0 || (r > b.starts[s] && p != b.positions[r - 1] + 1))
        throw std::invalid_argument("positions of a sequence must ascend by one");
    }
    if (cache) {
      const int used = b.positions[b.starts[s + 1] - 1] / kKeysPerBlock + 1;
      if (used > b.table_width) throw std::invalid_argument("block_tables: too few blocks for the last position");
      for (int i = 0; i < used; ++i) {
        const int block = b.tables[size_t(s) * b.table_width + i];
        if (block < 0 || block >= cache->blocks) throw std::invalid_argument("block_tables: no such block");
      }
    }
  }
  if (cache) check_branches(b, cache);
  if (b.selected > max_rows_) throw std::invalid_argument("select: more rows than a pass holds");
  for (int i = 0; i < b.selected; ++i)
    if (b.select[i] < 0 || b.select[i] >= b.rows) throw std::invalid_argument("selected row does not exist");
  for (const Op& op : ops_) {
    if (op.kind == Op::kEmbed)
      for (int r = 0; r < b.rows; ++r)
        if (b.tokens[r] < 0 || b.tokens[r] >= op.vocab)
          throw std::invalid_argument("token id " + std::to_string(b.tokens[r]) + " is outside the vocabulary of " +
                                      std::to_string(op.vocab));
    if (op.kind == Op::kQkvPost || op.kind == Op::kAttention) {
      if (!cache) throw std::invalid_argument("this plan needs a cache");
      if (op.layer < 0 || op.layer >= cache->layers || op.kv_heads != cache->kv_heads ||
          op.head_dim != cache->head_dim ||
          (cache->type != CacheType::kInt8 && cache->type != (f32_ ? CacheType::kF32 : CacheType::kBF16)))
        throw std::invalid_argument("the cache does not fit the plan");
    }
  }
  check_delta(b);
  for (const Buffer& buf : buffers_) {
    if (buf.kind == BufferKind::kInput && (!b.input || b.ld_input < size_t(buf.width)))
      throw std::invalid_argument("this plan needs input rows of width " + std::to_string(buf.width));
    if (buf.kind == BufferKind::kTaps && (!b.taps || b.ld_taps < size_t(buf.width)))
      throw std::invalid_argument("this plan needs room for taps of width " + std::to_string(buf.width));
    if (buf.kind == BufferKind::kLogits && b.selected && (!b.logits || b.ld_logits < size_t(buf.width)))
      throw std::invalid_argument("this plan needs room for logits of width " + std::to_string(buf.width));
  }
}

void Plan::check_branches(const Batch& b, const KVCache* cache) {
  for (int i = 0; i < b.copied; ++i) {
    const int32_t* c = b.copies + size_t(i) * 4;
    cache->check_copy(c[0], c[1], c[2], c[3]);
  }
  for (int i = 0; i < b.mirrored; ++i) {
    const int row = b.mirrors[2 * i], sequence = b.mirrors[2 * i + 1];
    if (row < 0 || row >= b.rows || sequence < 0 || sequence >= b.sequences)
      throw std::invalid_argument("mirrors: no such row or sequence");
    if (b.positions[row] >= b.positions[b.starts[sequence]])
      throw std::invalid_argument("mirrors: a row is mirrored in front of a sequence's own rows");
  }
}

// Keys and values of heads [begin, end) of k and v that a pass writes besides those of its rows at home.
void Plan::write_branches(const Op& op, const Batch& b, KVCache* cache, const QkvPostArgs& args, Range heads) const {
  for (int i = 0; i < b.mirrored; ++i) {
    const int row = b.mirrors[2 * i], at = b.positions[row];
    const int block = b.tables[size_t(b.mirrors[2 * i + 1]) * b.table_width + at / kKeysPerBlock];
    for (int h = heads.begin; h < heads.end; ++h) kernels_.qkv_post(args, row, op.heads + h, block, at % kKeysPerBlock);
  }
}

void Plan::plan_attention(const Batch& b) {
  const int threads = pool_->size();
  size_t most = 0;
  for (auto& tp : tiles_) {
    Tiles& t = *tp;
    t.items.clear();
    t.split.clear();
    t.partial_floats = 0;
    const size_t state = size_t(kStateHead + padded(t.head_dim));
    for (int s = 0; s < b.sequences; ++s) {
      const int r0 = b.starts[s], r1 = b.starts[s + 1], end = b.positions[r1 - 1];
      const int vectors = (r1 - r0) * t.group;
      // as few tiles as the threads can share evenly, of whole pieces that the kernel works on at a time
      const int piece = kernels_.query_tile, pieces = (vectors + piece - 1) / piece,
                most_pieces = kMaxQueryTile / piece;
      int count = (pieces + most_pieces - 1) / most_pieces;
      while (count * t.kv_heads % threads && count < pieces) ++count;
      for (int kv = 0; kv < t.kv_heads; ++kv)
        for (int i = 0; i < count; ++i) {
          const Range whole = share(pieces, i, count);
          const Range v = {whole.begin * piece, std::min(whole.end * piece, vectors)};
          Tiles::Item item;
          item.sequence = s;
          item.tile.count = v.end - v.begin;
          item.tile.kv_head = kv;
          int lo = 1 << 30, hi = 0;
          for (int j = 0; j < item.tile.count; ++j) {
            const int row = r0 + (v.begin + j) / t.group, at = b.positions[row];
            int last = t.causal ? at : end;
            int first = std::min(t.first_key, at);  // a row always sees itself
            if (t.window > 0) {
              first = std::max(first, at - t.window + 1);
              if (!t.causal) last = std::min(last, at + t.window - 1);
            }
            item.tile.row[j] = row;
            item.tile.head[j] = kv * t.group + (v.begin + j) % t.group;
            item.tile.first[j] = first;
            item.tile.last[j] = last;
            lo = std::min(lo, first);
            hi = std::max(hi, last);
          }
          item.first_part = lo / kPartition;
          item.last_part = hi / kPartition + 1;
          item.partial = t.partial_floats;
          t.partial_floats += state * item.tile.count * size_t(item.last_part - item.first_part);
          t.items.push_back(item);
        }
    }
    const int n = int(t.items.size());
    t.by_partition = threads > 1 && n % threads != 0 && n < 4 * threads;
    if (t.by_partition) {
      for (int i = 0; i < n; ++i)
        for (int p = t.items[i].first_part; p < t.items[i].last_part; ++p) t.split.emplace_back(i, p);
      if (int(t.split.size()) == n) t.by_partition = false;
    }
    if (t.by_partition) most = std::max(most, t.partial_floats);
  }
  if (partials_.size() < most) partials_.resize(most);
}

// For the first partitions of what thread `tid` will attend to in the operation behind `op`, where that is known:
// blocks that this pass does not write. steps: calls of `ask` to come.
KeysAhead Plan::keys_ahead(const Op& op, const Batch& b, KVCache* cache, int tid, int steps) const {
  KeysAhead ahead;
  const Op* next = &op + 1;
  if (next >= ops_.data() + ops_.size() || next->kind != Op::kAttention || steps < 1) return ahead;
  const Tiles& t = *tiles_[size_t(op_tiles_[size_t(next - ops_.data())])];
  const int threads = pool_->size(), n = int(t.items.size());
  if (t.by_partition || n > 16 * threads) return ahead;
  const Range mine = share(n, tid, threads);
  for (int i = mine.begin; i < mine.end; ++i) {
    const Tiles::Item& item = t.items[size_t(i)];
    if (i > mine.begin && t.items[size_t(i) - 1].sequence == item.sequence &&
        t.items[size_t(i) - 1].tile.kv_head == item.tile.kv_head)
      continue;
    const int first = item.first_part * (kPartition / kKeysPerBlock);
    const int written = b.positions[b.starts[item.sequence]] / kKeysPerBlock;
    for (int j = first; j < std::min(first + kPartition / kKeysPerBlock, written); ++j) {
      if (ahead.blocks == KeysAhead::kMost) break;
      const size_t block = size_t(b.tables[size_t(item.sequence) * size_t(b.table_width) + size_t(j)]);
      ahead.block[ahead.blocks++] = cache->layer(next->layer) +
                                    (block * size_t(next->kv_heads) + size_t(item.tile.kv_head)) * cache->block_bytes();
    }
  }
  ahead.bytes = cache->block_bytes();
  ahead.lines = (size_t(ahead.blocks) * ahead.bytes / 64 + size_t(steps) - 1) / size_t(steps);
  return ahead;
}

void Plan::run(const Batch& batch, KVCache* cache) {
  check(batch, cache);
  if (batch.state.cache) batch.state.cache->begin();
  plan_attention(batch);
  if (!counters_) counters_.reset(new std::atomic<int>[ops_.size() * 2]);
  for (size_t i = 0; i < ops_.size() * 2; ++i) counters_[i].store(0, std::memory_order_relaxed);
  if (scratch_stride_ && !private_scratch_) {
    private_scratch_ = std::make_unique<Region>(scratch_stride_ * act_item() * kPrivateRows * pool_->size());
    shared_scratch_ = std::make_unique<Region>(scratch_stride_ * act_item() * max_rows_);
  }
  if (quant_groups_ && !quant_private_) {
    const size_t row = quant_groups_ * sizeof(QuantGroup);
    // the last tile of a pass may have fewer rows, but its records lie as far apart as those of the others
    quant_private_ = std::make_unique<Region>(row * (kPrivateRows * size_t(pool_->size()) + kMaxQuantRows));
    quant_shared_ = std::make_unique<Region>(row * (size_t(max_rows_) + kMaxQuantRows));
    quant_row_ = std::make_unique<Region>(quant_groups_ * kGroup * 4 * size_t(pool_->size()));
  }
  if (expert_scratch_.places) expert_scratch_.allocate(act_item());
  const bool timed = !op_ns_.empty();
  pool_->run([&](int tid) {
    for (size_t i = 0; i < ops_.size(); ++i) {
      const Op& op = ops_[i];
      const int64_t start = timed && tid == 0 ? now_ns() : 0;
      if (op.kind == Op::kAttention)
        attention(op, batch, cache, tid, &counters_[i * 2]);
      else
        step(op, batch, cache, tid, nullptr);
      pool_->barrier();
      if (timed && tid == 0) op_ns_[i] += now_ns() - start;
    }
  });
  if (const StateBatch& s = batch.state; s.cache)
    s.cache->passed(s.slots, s.journal, s.starts, s.sequences, s.snapshots, s.num_snapshots);
}

void Plan::profile(bool on) { op_ns_.assign(on ? ops_.size() : 0, 0); }

void Plan::step(const Op& op, const Batch& b, KVCache* cache, int tid, std::atomic<int>*) {
  const int threads = pool_->size();
  switch (op.kind) {
    case Op::kEmbed: {
      size_t ld;
      float* out = f32(op.out, b, &ld);
      const Range rows = share(b.rows, tid, threads);
      for (int r = rows.begin; r < rows.end; ++r) {
        float* to = out + size_t(r) * ld;
        const size_t token = size_t(b.tokens[r]);
        if (!op.table) {
          op.w->row_f32(int(token), to);
        } else if (op.table_f32) {
          std::memcpy(to, op.table + token * op.width * 4, size_t(op.width) * 4);
        } else {
          for (int i = 0; i < op.width; ++i) {
            uint16_t h;
            std::memcpy(&h, op.table + (token * op.width + i) * 2, 2);
            const uint32_t u = uint32_t(h) << 16;
            std::memcpy(to + i, &u, 4);
          }
        }
        if (op.scale != 1.0f)
          for (int i = 0; i < op.width; ++i) to[i] *= op.scale;
      }
      break;
    }
    case Op::kRope: {
      size_t ldc, lds;
      float* cos_out = f32(op.cos, b, &ldc);
      float* sin_out = f32(op.sin, b, &lds);
      const Range rows = share(b.rows, tid, threads);
      for (int r = rows.begin; r < rows.end; ++r)
        for (int i = 0; i < op.half; ++i) {
          // the angle is rounded to fp32 as in the reference implementations; its functions are exact
          const double angle = double(float(b.positions[r]) * op.inv_freq[i]);
          cos_out[size_t(r) * op.half + i] = float(std::cos(angle)) * op.scale;
          sin_out[size_t(r) * op.half + i] = float(std::sin(angle)) * op.scale;
        }
      break;
    }
    case Op::kLinear:
      linear(op, b, tid);
      break;
    case Op::kQkvPost: {
      size_t ld, ldc, lds;
      QkvPostArgs a{};
      a.qkv = f32(op.in, b, &ld);
      a.ld = ld;
      a.heads = op.heads;
      a.kv_heads = op.kv_heads;
      a.head_dim = op.head_dim;
      a.rotary_dim = op.half * 2;
      a.interleaved_rope = op.interleaved;
      a.q_norm = op.q_norm;
      a.k_norm = op.k_norm;
      a.eps = op.eps;
      a.cos = f32(op.cos, b, &ldc);
      a.sin = f32(op.sin, b, &lds);
      if (op.heads) {
        a.q_out = buffers_[op.out].memory->data();
        a.ld_q = buffers_[op.out].stride;
      }
      a.act = act_;
      a.cache = cache->layer(op.layer);
      a.block_bytes = cache->block_bytes();
      a.cache_type = cache->type;
      if (b.copied) {
        const Range mine = share(b.copied * op.kv_heads, tid, threads);
        for (int i = mine.begin; i < mine.end; ++i) {
          const int32_t* c = b.copies + size_t(i / op.kv_heads) * 4;
          cache->copy_rows(op.layer, i % op.kv_heads, c[0], c[1], c[2], c[3]);
        }
      }
      if (b.mirrored) write_branches(op, b, cache, a, share(2 * op.kv_heads, tid, threads));
      const int heads = op.heads + 2 * op.kv_heads;
      // by heads, so that a thread mostly finds what it computed itself (cores may share no cache); by rows when there
      // are more threads than heads
      const bool by_head = heads >= 2 * threads;
      const Range work = share(by_head ? heads : b.rows * heads, tid, threads);
      const Range head_range = by_head ? work : Range{0, heads};
      KeysAhead ahead = keys_ahead(op, b, cache, tid, by_head ? b.rows * (work.end - work.begin) : 0);
      for (int s = 0; s < b.sequences; ++s)
        for (int row = b.starts[s]; row < b.starts[s + 1]; ++row) {
          const int at = b.positions[row];
          const int block = b.tables[size_t(s) * b.table_width + at / kKeysPerBlock];
          for (int h = head_range.begin; h < head_range.end; ++h)
            if (by_head || (row * heads + h >= work.begin && row * heads + h < work.end)) {
              ahead.ask();
              kernels_.qkv_post(a, row, h, block, at % kKeysPerBlock);
            }
        }
      break;
    }
    case Op::kCopy: {
      size_t ldi, ldo;
      const float* in = f32(op.in, b, &ldi);
      float* out = f32(op.out, b, &ldo);
      const Range rows = share(b.rows, tid, threads);
      for (int r = rows.begin; r < rows.end; ++r)
        std::memcpy(out + size_t(r) * ldo + op.offset, in + size_t(r) * ldi, size_t(op.width) * 4);
      break;
    }
    case Op::kLocalConv: {
      LocalConvArgs a{};
      a.in = f32(op.in, b, &a.ld_in);
      a.delta = f32(op.delta, b, &a.ld_delta) + op.offset;
      a.base = op.conv;
      a.norm = op.norm;
      a.eps = op.eps;
      a.width = op.width;
      a.kernel = op.taps;
      a.group = op.group;
      a.add = op.add;
      a.out = f32(op.out, b, &a.ld_out);
      const Range rows = share(b.rows, tid, threads);
      local_conv(a, b.starts, b.sequences, rows.begin, rows.end);
      break;
    }
    case Op::kNorm:
    case Op::kGate:
    case Op::kSoftcap:
      block_step(op, b, tid);
      break;
    case Op::kExperts:
      experts(op, b, tid);
      break;
    case Op::kShortConv:
    case Op::kDeltaRule:
      delta(op, b, tid);
      break;
    case Op::kAttention:
      break;
  }
}

void Plan::linear(const Op& op, const Batch& b, int tid) {
  if (op.w->quant != Quant::kNone) return quant_linear(op, b, tid);
  const int threads = pool_->size();
  const int rows = op.selected ? b.selected : b.rows;
  if (rows == 0) return;
  GemmArgs g{};
  g.rows = rows;
  g.k = op.w->k;
  g.n = op.w->n;
  g.w = op.w->data;
  g.w_f32 = op.w->f32;
  g.epilogue = op.epilogue;
  g.bias = op.bias;
  g.act = act_;
  if (op.convert) {
    size_t ld;
    const float* x = f32(op.in, b, &ld);
    const bool own = rows <= kPrivateRows;
    uint8_t* scratch = own ? private_scratch_->data() + size_t(tid) * kPrivateRows * scratch_stride_ * act_item()
                           : shared_scratch_->data();
    // the rest of the last pair of k must read as zero, whatever wider matrix used the scratch before
    const size_t lda = round_up(size_t(g.k), 32);
    const Range mine = own ? Range{0, rows} : share(rows, tid, threads);
    for (int r = mine.begin; r < mine.end; ++r) {
      const int from = op.selected ? b.select[r] : r;
      uint8_t* to = scratch + size_t(r) * lda * act_item();
      if (g.k % 2) std::memset(to + size_t(g.k) * act_item(), 0, act_item());
      kernels_.norm_rows(x + size_t(from) * ld, ld, g.k, op.norm, op.eps, to, lda, act_, 0, 1);
    }
    if (!own) pool_->barrier();
    g.a = scratch;
    g.lda = lda;
  } else {
    g.a = buffers_[op.in].memory->data();
    g.lda = buffers_[op.in].stride;
  }
  if (op.w->gated) {
    g.act_out = buffers_[op.out].memory->data();
    g.ld_act = buffers_[op.out].stride;
  } else {
    size_t ld;
    g.out = f32(op.out, b, &ld);
    g.ldo = ld;
  }
  g.far_rows = far_rows_;
  const int unit = op.w->gated ? 2 : 1;
  const Range panels = share(op.w->panels / unit, tid, threads);
  g.panel_begin = panels.begin * unit;
  g.panel_end = panels.end * unit;
  for (const Op* next = &op + 1; next < ops_.data() + ops_.size(); ++next) {
    if (next->kind != Op::kLinear) continue;
    const int next_unit = next->w->gated ? 2 : 1;
    const Range first = share(next->w->panels / next_unit, tid, threads);
    const size_t panel = next->w->bytes() / size_t(next->w->panels);
    g.next = next->w->data + panel * size_t(first.begin * next_unit);
    g.next_bytes = panel * size_t(std::min(2, (first.end - first.begin) * next_unit));
    break;
  }
  kernels_.gemm(g);
}

void Plan::attention(const Op& op, const Batch& b, KVCache* cache, int tid, std::atomic<int>* counter) {
  const Tiles& t = *tiles_[op_tiles_[&op - ops_.data()]];
  AttentionArgs a{};
  a.q = buffers_[op.in].memory->data();
  a.ld_q = buffers_[op.in].stride;
  a.heads = op.heads;
  a.kv_heads = op.kv_heads;
  a.head_dim = op.head_dim;
  a.scale = op.scale;
  a.softcap = op.softcap;
  a.act = act_;
  a.cache = cache->layer(op.layer);
  a.block_bytes = cache->block_bytes();
  a.cache_type = cache->type;
  a.out = buffers_[op.out].memory->data();
  a.ld_out = buffers_[op.out].stride;
  const size_t state = size_t(kStateHead + padded(op.head_dim));
  alignas(64) float local[kMaxQueryTile * (kStateHead + kMaxHeadDim)];
  // What the states of a tile come to: rows, or their records. Neighbouring heads of a row are quantised together.
  const Buffer& out = buffers_[op.out];
  const int tile_rows = quant_kernels_.tile_rows(b.rows);
  const auto finish = [&](const QueryTile& tile) {
    if (!out.records) {
      for (int j = 0; j < tile.count; ++j) kernels_.finish(a, local + j * state, tile.row[j], tile.head[j]);
      return;
    }
    alignas(64) float values[kMaxQueryTile * kMaxHeadDim];
    AttentionArgs here = a;
    here.out = values;
    for (int j = 0, end; j < tile.count; j = end) {
      for (end = j; end < tile.count && tile.row[end] == tile.row[j]; ++end)
        kernels_.finish(here, local + end * state, 0, end - j);
      quant_kernels_.quantise(values, act_ == Act::kBF16, (end - j) * op.head_dim,
                              record_of(out, tile.row[j], tile.head[j] * op.head_dim / kGroup, tile_rows),
                              size_t(tile_rows));
    }
  };
  if (!t.by_partition) {
    const auto work = [&](int i) {
      const Tiles::Item& item = t.items[i];
      kernels_.attend(a, item.tile, b.tables + size_t(item.sequence) * b.table_width, item.first_part, item.last_part,
                      local);
      finish(item.tile);
    };
    const int n = int(t.items.size()), threads = pool_->size();
    if (n <= 16 * threads) {  // few and alike: neighbouring heads to one thread, which computed their queries
      const Range mine = share(n, tid, threads);
      for (int i = mine.begin; i < mine.end; ++i) work(i);
    } else {
      for (int i; (i = counter[0].fetch_add(1, std::memory_order_relaxed)) < n;) work(i);
    }
    return;
  }
  const auto split = [&](int i) {
    const Tiles::Item& item = t.items[t.split[i].first];
    const int part = t.split[i].second;
    float* out = partials_.data() + item.partial + state * item.tile.count * size_t(part - item.first_part);
    kernels_.attend(a, item.tile, b.tables + size_t(item.sequence) * b.table_width, part, part + 1, out);
  };
  const int parts = int(t.split.size()), threads = pool_->size();
  if (parts > 16 * threads) {  // neighbours to one thread, which has asked for them
    const Range mine = share(parts, tid, threads);
    for (int i = mine.begin; i < mine.end; ++i) split(i);
  } else {
    for (int i; (i = counter[0].fetch_add(1, std::memory_order_relaxed)) < parts;) split(i);
  }
  pool_->barrier();
  for (int i; (i = counter[1].fetch_add(1, std::memory_order_relaxed)) < int(t.items.size());) {
    const Tiles::Item& item = t.items[i];
    const float* from = partials_.data() + item.partial;
    for (int j = 0; j < item.tile.count; ++j) {
      local[j * state] = -INFINITY;  // empty: the first partial replaces it
      for (int part = item.first_part; part < item.last_part; ++part)
        kernels_.merge(local + j * state, from + state * (size_t(item.tile.count) * (part - item.first_part) + j),
                       op.head_dim);
    }
    finish(item.tile);
  }
}

}  // namespace paceline
