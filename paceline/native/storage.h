// Memory of the engine: packed weights and the paged key/value cache.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels.h"
#include "quant.h"

namespace paceline {

// Address space taken at once, memory taken as it is touched; on huge pages where the system offers them.
class Region {
 public:
  explicit Region(size_t bytes);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  uint8_t* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  uint8_t* data_;
  size_t bytes_;
};

// Weights of one model, packed one behind the other in the order in which a pass reads them.
class Arena {
 public:
  explicit Arena(size_t bytes) : region_(bytes) {}
  uint8_t* take(size_t bytes);
  size_t used() const { return used_; }

 private:
  Region region_;
  size_t used_ = 0;
};

// A [n, k] matrix as panels of 32 columns: [panels][ceil(k/2)][32][2] bf16, [panels][k][32] fp32, or quantised
// (quant.h). Gated matrices hold gate and up panels in turn.
struct Packed {
  Arena* arena;
  int n, k;
  bool f32, gated;
  Quant quant = Quant::kNone;
  int panels;
  uint8_t* data;

  Packed(Arena& arena, int n, int k, bool f32, bool gated, Quant quant = Quant::kNone);
  // rows [row, row + count) of another packed weight, sharing its memory; row must start a panel
  Packed(const Packed& of, int row, int count);
  size_t panel_bytes() const {
    return quant != Quant::kNone ? quant_panel_bytes(quant, k) : (f32 ? size_t(k) : size_t(k + 1) / 2) * 128;
  }
  size_t bytes() const { return size_t(panels) * panel_bytes(); }
  // rows [row, row + count) of the unpacked matrix; part 1 is the up half of a gated one
  void fill_f32(const float* src, int row, int count, int part);
  void fill_bf16(const uint16_t* src, int row, int count, int part);
  // rows in the form that quant_row_bytes describes; only for quantised weights
  void fill_quant(const uint8_t* src, int row, int count, int part);
  void row_f32(int row, float* out) const;  // one row back, for embeddings that share the head's memory

 private:
  uint8_t* panel(int row, int part) const;
  uint8_t* cell(int row, int part) const;
};

// Keys and values in blocks of 16 tokens: [layers][blocks][kv_heads][keys | values | scales of an int8 cache].
class KVCache {
 public:
  KVCache(int layers, int kv_heads, int head_dim, int blocks, CacheType type);
  uint8_t* layer(int i) const { return region_.data() + size_t(i) * layer_bytes_; }
  size_t block_bytes() const { return block_bytes_; }
  size_t bytes() const { return region_.bytes(); }
  // A stored row back as fp32: keys, then values, each [kv_heads, head_dim].
  void read(int layer, int block, int slot, float* keys, float* values) const;
  // Rows [slot, slot + count) of a block into the same slots of another, bit for bit.
  void copy_rows(int layer, int kv_head, int from, int to, int slot, int count);
  void check_copy(int from, int to, int slot, int count) const;

  const int layers, kv_heads, head_dim, blocks;
  const CacheType type;

 private:
  size_t block_bytes_, layer_bytes_;
  Region region_;
};

}  // namespace paceline
