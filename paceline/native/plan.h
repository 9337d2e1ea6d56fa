// A network as a flat list of fused operations over row buffers, run for a ragged batch of rows in one call.
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "delta_net.h"
#include "experts.h"
#include "kernels.h"
#include "storage.h"
#include "thread_pool.h"

namespace paceline {

enum class BufferKind : int {
  kF32 = 0,     // fp32 rows, owned
  kAct = 1,     // rows in the activation format, owned
  kInput = 2,   // fp32 rows given to the call
  kLogits = 3,  // fp32 rows returned by the call, one per selected row
  kTaps = 4,    // fp32 rows returned by the call
};

struct Op {
  enum Kind {
    kEmbed,
    kRope,
    kLinear,
    kQkvPost,
    kAttention,
    kCopy,
    kLocalConv,
    kNorm,
    kGate,
    kSoftcap,
    kExperts,
    kShortConv,
    kDeltaRule
  };
  Kind kind;
  int in = -1, out = -1;
  // linear
  const Packed* w = nullptr;
  Epilogue epilogue = Epilogue::kStore;
  const float* norm = nullptr;
  bool convert = false;   // input is fp32 rows: norm or round them into scratch first
  bool selected = false;  // only the selected rows
  const float* bias = nullptr;
  float eps = 0;
  // embed
  const uint8_t* table = nullptr;  // row-major table; null: rows come from `w`
  bool table_f32 = false;
  int vocab = 0, width = 0;
  float scale = 1;
  // rope
  const float* inv_freq = nullptr;
  int half = 0, cos = -1, sin = -1;
  // qkv and attention
  int heads = 0, kv_heads = 0, head_dim = 0, layer = 0, window = 0, first_key = 0;
  bool interleaved = false, causal = true;
  const float* q_norm = nullptr;
  const float* k_norm = nullptr;
  float softcap = 0;
  // copy: column offset in the destination; local convolution: first column of `delta`
  int offset = 0;
  // local convolution (local_conv.h)
  const float* conv = nullptr;
  int delta = -1, taps = 0, group = 0;
  bool add = false;
  // experts: `in` rows, their norm, router logits in `delta`
  const ExpertWeights* experts = nullptr;
  // short convolution: in -> out; delta rule: in, rows -> out (delta_net.h)
  int rows = -1;
  DeltaLayer delta_net;
};

struct Batch {
  int rows = 0, sequences = 0, selected = 0, table_width = 0;
  const int32_t* tokens = nullptr;     // [rows]
  const int32_t* positions = nullptr;  // [rows], ascending by one inside a sequence
  const int32_t* starts = nullptr;     // [sequences + 1]
  const int32_t* tables = nullptr;     // [sequences, table_width]
  const int32_t* select = nullptr;     // [selected] row indices
  const float* input = nullptr;        // [rows, ld_input]
  float* logits = nullptr;             // [selected, ld_logits]
  float* taps = nullptr;               // [rows, ld_taps]
  size_t ld_input = 0, ld_logits = 0, ld_taps = 0;
  StateBatch state;  // of plans with a delta net
  // Branches of a tree of drafts are sequences whose tables share their first blocks. Before the rows of a pass write
  // their keys and values, `copies` brings committed rows into a branch's own blocks: (from, to, slot, count).
  // `mirrors` are (row, sequence): the row's keys and values are also written into that sequence's blocks.
  int mirrored = 0, copied = 0;
  const int32_t* mirrors = nullptr;  // [mirrored, 2]
  const int32_t* copies = nullptr;   // [copied, 4]
};

constexpr int kPrivateRows = 16;  // up to here every thread norms all rows itself, which is cheaper than a barrier

// plan_quant.cpp: the product of one quantised weight with quantised rows, laid out in tiles of `tile_rows`. A gated
// one that gets `records` writes its result there, quantised, in tiles alike.
void quant_gemm(const Kernels& kernels, const QuantKernels& quant, const Packed& w, const GemmArgs& g, int tile_rows,
                QuantGroup* records = nullptr);

// Keys and values that attention begins with, asked for while a thread still rotates heads: a few lines at each step.
struct KeysAhead {
  static constexpr int kMost = 32;
  const uint8_t* block[kMost];
  int blocks = 0;
  size_t bytes = 0, lines = 0, at = 0;  // of each block; lines of all in a step; the next one, counted over all blocks

  void ask() {
    for (size_t i = 0; i < lines && at < size_t(blocks) * bytes; ++i, at += 64)
      __builtin_prefetch(block[at / bytes] + at % bytes, 0, 2);
  }
};

class Plan {
 public:
  Plan(std::shared_ptr<ThreadPool> pool, const Kernels& kernels, bool f32, int max_rows);
  ~Plan();

  int add_buffer(BufferKind kind, int width);
  void add(Op op);
  void run(const Batch& batch, KVCache* cache);

  Act act() const { return act_; }
  int max_rows() const { return max_rows_; }
  int buffer_width(int id) const { return buffers_.at(id).width; }
  size_t scratch_bytes() const;
  // Nanoseconds that thread 0 spent per operation, waiting included, since profiling was switched on.
  void profile(bool on);
  const std::vector<int64_t>& op_ns() const { return op_ns_; }
  const std::vector<Op>& ops() const { return ops_; }

 private:
  struct Buffer {
    BufferKind kind;
    int width;
    size_t stride;  // elements
    std::unique_ptr<Region> memory;
    // Of kAct: whoever writes the rows quantises them, since quantised products alone read them. They are kept as
    // records (quant.h) only, in tiles as the product of all rows of a pass reads them.
    bool records = false;
  };
  struct Tiles;  // how the query vectors of a batch are cut into tiles, per attention geometry

  void note_records(const Op& op);
  QuantGroup* record_of(const Buffer& buffer, int row, int group, int tile_rows) const;
  void check(const Batch& batch, const KVCache* cache) const;
  static void check_branches(const Batch& batch, const KVCache* cache);
  void write_branches(const Op& op, const Batch& batch, KVCache* cache, const QkvPostArgs& args, Range heads) const;
  void step(const Op& op, const Batch& batch, KVCache* cache, int tid, std::atomic<int>* counter);
  void linear(const Op& op, const Batch& batch, int tid);
  void quant_linear(const Op& op, const Batch& batch, int tid);  // plan_quant.cpp, these two
  const QuantGroup* quantised_rows(const Op& op, const Batch& batch, int rows, int tile_rows, int tid);
  void add_delta(const Op& op) const;  // plan_delta.cpp, these three
  void check_delta(const Batch& batch) const;
  void delta(const Op& op, const Batch& batch, int tid);
  void attention(const Op& op, const Batch& batch, KVCache* cache, int tid, std::atomic<int>* counter);
  void plan_attention(const Batch& batch);
  KeysAhead keys_ahead(const Op& op, const Batch& batch, KVCache* cache, int tid, int steps) const;
  void check_block(const Op& op);                              // plan_blocks.cpp: kNorm, kGate, kSoftcap
  void block_step(const Op& op, const Batch& batch, int tid);  // plan_blocks.cpp
  void check_experts(const Op& op);                            // plan_experts.cpp
  void experts(const Op& op, const Batch& batch, int tid);     // plan_experts.cpp
  void expert_products(const Op& op, bool down, int tid);      // plan_experts.cpp
  void need(int id, std::initializer_list<BufferKind> kinds, const char* what) const;

  float* f32(int id, const Batch& batch, size_t* stride);
  size_t act_item() const { return act_ == Act::kBF16 ? 2 : 4; }

  std::shared_ptr<ThreadPool> pool_;
  const Kernels& kernels_;
  const QuantKernels& quant_kernels_;
  const DeltaKernels& delta_kernels_;
  const bool f32_;
  const Act act_;
  const int far_rows_;
  const int max_rows_;
  std::vector<Buffer> buffers_;
  std::vector<Op> ops_;
  std::vector<std::unique_ptr<Tiles>> tiles_;
  std::vector<int> op_tiles_;
  std::unique_ptr<std::atomic<int>[]> counters_;
  // inputs of linears normed or rounded: one copy per thread for few rows, one for all otherwise
  size_t scratch_stride_ = 0;
  std::unique_ptr<Region> private_scratch_, shared_scratch_;
  // the same for quantised weights: groups of the widest input; then one fp32 row a thread
  size_t quant_groups_ = 0;
  std::unique_ptr<Region> quant_private_, quant_shared_, quant_row_;
  ExpertScratch expert_scratch_;
  std::vector<float> partials_;
  std::vector<int64_t> op_ns_;  // empty: not profiling
};

}  // namespace paceline
