#include "storage.h"

#include <sys/mman.h>

#include <cstring>
#include <new>
#include <stdexcept>

namespace paceline {
namespace {

constexpr size_t kHuge = size_t(2) << 20;
constexpr size_t kSlack = 16384;  // prefetches and whole-vector loads may run past the end

uint16_t to_bf16(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t((u >> 16) | 0x40);
  return uint16_t((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

float from_bf16(uint16_t h) {
  const uint32_t u = uint32_t(h) << 16;
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

// Bytes of `width` values of every token of a block.
size_t key_bytes(int width, CacheType type) {
  return size_t(width) * kKeysPerBlock * (type == CacheType::kF32 ? 4 : type == CacheType::kBF16 ? 2 : 1);
}

int key_width(int head_dim, CacheType type) { return type == CacheType::kInt8 ? (head_dim + 3) / 4 * 4 : head_dim; }
int value_width(int head_dim) { return (head_dim + 15) / 16 * 16; }

size_t cache_block_bytes(int head_dim, CacheType type) {
  const size_t bytes = key_bytes(key_width(head_dim, type), type) + key_bytes(value_width(head_dim), type) +
                       (type == CacheType::kInt8 ? 2 * kKeysPerBlock * 4 : 0);
  return (bytes + 63) / 64 * 64;
}

}  // namespace

Region::Region(size_t bytes) : bytes_((bytes + kSlack + kHuge - 1) / kHuge * kHuge) {
  void* p = mmap(nullptr, bytes_ + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  // keep a huge-page aligned window and give the rest back
  const uintptr_t start = reinterpret_cast<uintptr_t>(p), aligned = (start + kHuge - 1) / kHuge * kHuge;
  if (aligned > start) munmap(p, aligned - start);
  if (start + kHuge > aligned) munmap(reinterpret_cast<void*>(aligned + bytes_), start + kHuge - aligned);
  data_ = reinterpret_cast<uint8_t*>(aligned);
  madvise(data_, bytes_, MADV_HUGEPAGE);
}

Region::~Region() { munmap(data_, bytes_); }

uint8_t* Arena::take(size_t bytes) {
  const size_t at = (used_ + 4095) / 4096 * 4096;
  if (at + bytes > region_.bytes() - kSlack) throw std::length_error("weight arena is too small for this model");
  used_ = at + bytes;
  return region_.data() + at;
}

Packed::Packed(Arena& arena_, int n_, int k_, bool f32_, bool gated_, Quant quant_)
    : arena(&arena_), n(n_), k(k_), f32(f32_ && quant_ == Quant::kNone), gated(gated_), quant(quant_) {
  if (n <= 0 || k <= 0) throw std::invalid_argument("packed weight needs positive dimensions");
  panels = (n + kPanel - 1) / kPanel * (gated ? 2 : 1);
  data = arena->take(bytes());
}

Packed::Packed(const Packed& of, int row, int count)
    : arena(of.arena),
      n(count),
      k(of.k),
      f32(of.f32),
      gated(false),
      quant(of.quant),
      panels((count + kPanel - 1) / kPanel) {
  if (of.gated || row < 0 || row % kPanel || count < 1 || row + count > of.n)
    throw std::invalid_argument("view: rows must start at a multiple of 32 inside an ungated weight");
  data = of.panel(row, 0);
}

uint8_t* Packed::panel(int row, int part) const {
  return data + (size_t(row / kPanel) * (gated ? 2 : 1) + part) * panel_bytes();
}

uint8_t* Packed::cell(int row, int part) const { return panel(row, part) + size_t(row % kPanel) * 4; }

void Packed::fill_quant(const uint8_t* src, int row, int count, int part) {
  for (int r = row; r < row + count; ++r, src += quant_row_bytes(quant, k))
    pack_quant_row(quant, src, k, panel(r, part), r % kPanel);
}

void Packed::fill_f32(const float* src, int row, int count, int part) {
  for (int r = 0; r < count; ++r, src += k) {
    uint8_t* to = cell(row + r, part);
    if (f32) {
      for (int i = 0; i < k; ++i) std::memcpy(to + size_t(i) * 128, src + i, 4);
    } else {
      for (int i = 0; i < k; i += 2) {
        const uint32_t low = to_bf16(src[i]), high = i + 1 < k ? to_bf16(src[i + 1]) : 0;
        const uint32_t both = low | high << 16;
        std::memcpy(to + size_t(i / 2) * 128, &both, 4);
      }
    }
  }
}

void Packed::fill_bf16(const uint16_t* src, int row, int count, int part) {
  // eight rows at a time share the cache lines they are scattered to
  for (int r0 = 0; r0 < count; r0 += 8) {
    const int rows = count - r0 < 8 ? count - r0 : 8;
    uint8_t* to[8];
    for (int r = 0; r < rows; ++r) to[r] = cell(row + r0 + r, part);
    for (int i = 0; i < k; i += f32 ? 1 : 2)
      for (int r = 0; r < rows; ++r) {
        const uint16_t* s = src + size_t(r0 + r) * k + i;
        if (f32) {
          const float x = from_bf16(*s);
          std::memcpy(to[r] + size_t(i) * 128, &x, 4);
        } else {
          const uint32_t both = s[0] | (i + 1 < k ? uint32_t(s[1]) << 16 : 0);
          std::memcpy(to[r] + size_t(i / 2) * 128, &both, 4);
        }
      }
  }
}

void Packed::row_f32(int row, float* out) const {
  if (quant != Quant::kNone) return unpack_quant_row(quant, panel(row, 0), row % kPanel, k, out);
  const uint8_t* from = cell(row, 0);
  for (int i = 0; i < k; ++i) {
    if (f32) {
      std::memcpy(out + i, from + size_t(i) * 128, 4);
    } else {
      uint16_t h;
      std::memcpy(&h, from + size_t(i / 2) * 128 + (i & 1) * 2, 2);
      out[i] = from_bf16(h);
    }
  }
}

KVCache::KVCache(int layers_, int kv_heads_, int head_dim_, int blocks_, CacheType type_)
    : layers(layers_),
      kv_heads(kv_heads_),
      head_dim(head_dim_),
      blocks(blocks_),
      type(type_),
      block_bytes_(cache_block_bytes(head_dim_, type_)),
      layer_bytes_(block_bytes_ * size_t(kv_heads_) * size_t(blocks_)),
      region_(layer_bytes_ * size_t(layers_)) {
  if (layers < 1 || kv_heads < 1 || head_dim < 1 || blocks < 1)
    throw std::invalid_argument("a cache needs positive dimensions");
  if (type == CacheType::kInt8 && head_dim < kMinInt8HeadDim)
    throw std::invalid_argument("an int8 cache needs heads of 8 values or more");
}

void KVCache::read(int layer_index, int block, int slot, float* keys, float* values) const {
  const int width = value_width(head_dim);
  for (int h = 0; h < kv_heads; ++h) {
    const uint8_t* base = layer(layer_index) + (size_t(block) * kv_heads + h) * block_bytes_;
    const uint8_t* value = base + key_bytes(key_width(head_dim, type), type);
    float scale[2] = {1, 1};  // of an int8 key and value
    if (type == CacheType::kInt8)
      for (int i = 0; i < 2; ++i)
        std::memcpy(&scale[i], value + key_bytes(width, type) + size_t(i * kKeysPerBlock + slot) * 4, 4);
    for (int d = 0; d < head_dim; ++d) {
      float k, v;
      if (type == CacheType::kInt8) {
        k = scale[0] * float(int(base[(size_t(d / 4) * kKeysPerBlock + slot) * 4 + d % 4]) - 128);
        v = scale[1] * float(int8_t(value[size_t(slot) * width + d]));
      } else if (type == CacheType::kF32) {
        std::memcpy(&k, base + (size_t(d) * kKeysPerBlock + slot) * 4, 4);
        std::memcpy(&v, value + (size_t(slot) * width + d) * 4, 4);
      } else {
        uint16_t kb, vb;
        std::memcpy(&kb, base + ((size_t(d / 2) * kKeysPerBlock + slot) * 2 + (d & 1)) * 2, 2);
        std::memcpy(&vb, value + (size_t(slot) * width + d) * 2, 2);
        k = from_bf16(kb);
        v = from_bf16(vb);
      }
      keys[h * head_dim + d] = k;
      values[h * head_dim + d] = v;
    }
  }
}

void KVCache::check_copy(int from, int to, int slot, int count) const {
  if (from < 0 || from >= blocks || to < 0 || to >= blocks || from == to || slot < 0 || count < 1 ||
      slot + count > kKeysPerBlock)
    throw std::invalid_argument("copy_rows: outside the cache");
}

void KVCache::copy_rows(int layer_index, int kv_head, int from, int to, int slot, int count) {
  const auto at = [&](int block) { return layer(layer_index) + (size_t(block) * kv_heads + kv_head) * block_bytes_; };
  const uint8_t* source = at(from);
  uint8_t* target = at(to);
  const auto copy = [&](size_t offset, size_t bytes) { std::memcpy(target + offset, source + offset, bytes); };
  // keys lie side by side by four bytes (one fp32, two bf16, four int8), values row by row, scales side by side
  const size_t item = type == CacheType::kF32 ? 4 : type == CacheType::kBF16 ? 2 : 1;
  const size_t keys = key_bytes(key_width(head_dim, type), type), width = size_t(value_width(head_dim)) * item;
  for (size_t line = 0; line < keys; line += kKeysPerBlock * 4) copy(line + size_t(slot) * 4, size_t(count) * 4);
  copy(keys + size_t(slot) * width, size_t(count) * width);
  if (type == CacheType::kInt8)
    for (size_t i = 0; i < 2; ++i)
      copy(keys + kKeysPerBlock * width + (i * kKeysPerBlock + size_t(slot)) * 4, size_t(count) * 4);
}

}  // namespace paceline
