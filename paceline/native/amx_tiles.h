// What files compiled for the tile unit share. Unnamed on purpose: see kernels.h.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace {

// GCC's intrinsics do not say what memory they read: what was written to `p` must be there.
inline void written(const void* p) { asm volatile("" ::"r"(p) : "memory"); }

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int tile_rows, int row_bytes) {
    rows[tile] = uint8_t(tile_rows);
    bytes[tile] = uint16_t(row_bytes);
  }
  void load() const {
    written(this);
    _tile_loadconfig(this);
  }
};

}  // namespace
