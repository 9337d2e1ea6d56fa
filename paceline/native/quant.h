// Quantised weights: their packed layout, their kernels, and the rows they are multiplied with.
//
// A weight of column c is scale * q (int8), scale * (q - 8) (int4) or scale * q + minimum (int4 with minimum) with one
// scale per 32 values of k, or one per column. Rows are quantised to int8 with one scale per 32 values. A product is
//
//   for each group: out = fma(float(sum of q * a) * scale, row_scale, out)
//                   out = fma(minimum, row_scale * sum of a, out)  [where there is a minimum]
//
// with exact integers inside a group and fp32 products and sums, the latter fused, in the order of the groups (one
// scale per column multiplies `out` at the end). So every instruction set gives the same bits, and numpy too
// (tests/native/quant_reference.py).
#pragma once
#include <cstddef>
#include <cstdint>

namespace paceline {

enum class Quant : int {
  kNone = 0,
  kInt8 = 1,         // ggml's Q8_0: one fp16 scale for 32 values
  kInt8Channel = 2,  // one fp32 scale per column
  kInt4 = 3,         // Q4_0: zero at 8
  kInt4Min = 4,      // Q4_1: fp16 scale and fp16 minimum
};

constexpr int kGroup = 32;

// An exact sum s becomes fp32 without a conversion: adders start at these bits, and what they arrive at is the fp32
// number kMagic + s (|s| <= 32 * 128 * 128 < 2^22). With a scale that has the 11 bits of fp16, kMagic * scale is exact,
// so that fma(kMagic + s, scale, -kMagic * scale) is s * scale, rounded once.
constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23
constexpr int32_t kMagicBits = 0x4b400000;

// 32 values of a row, and what the kernels need of their sum.
struct QuantGroup {
  int8_t q[kGroup];
  float scale;
  int32_t start_int8;  // kMagicBits - 128 * sum: undoes the offset of int8 weights, which are stored as q + 128
  int32_t start_int4;  // kMagicBits - 8 * sum: that of int4
  float scaled_sum;    // scale * sum
};
static_assert(sizeof(QuantGroup) == 48, "rows are laid out by it");

// A packed panel of 32 columns: [header][groups][two halves of 16 columns][...], then per group the scales of its
// columns. int8: 8 lines a half, line j holds k = 4 j .. 4 j + 3 of each column; int4: 4 lines, the high nibbles hold
// k + 16. Header: the fp32 scales of kInt8Channel.
constexpr bool is_int8(Quant f) { return f == Quant::kInt8 || f == Quant::kInt8Channel; }
constexpr size_t quant_header_bytes(Quant f) { return f == Quant::kInt8Channel ? 128 : 0; }
constexpr size_t quant_half_bytes(Quant f) { return is_int8(f) ? 512 : 256; }
constexpr size_t quant_group_bytes(Quant f) {
  return 2 * quant_half_bytes(f) + (f == Quant::kInt8Channel ? 0 : f == Quant::kInt4Min ? 128 : 64);
}
constexpr int quant_groups(int k) { return (k + kGroup - 1) / kGroup; }
constexpr size_t quant_panel_bytes(Quant f, int k) {
  return quant_header_bytes(f) + size_t(quant_groups(k)) * quant_group_bytes(f);
}

constexpr int kQuantRows = 12;                        // rows of a tile
constexpr int kMaxQuantRows = 16;                     // of a wide one
constexpr size_t kSpreadGroup = size_t(kGroup) * 16;  // bytes of half a panel's group, spread out

// The part of a row that a tile reads lies together: row r, group g at (g * tile rows + r) records.
struct QuantTile {
  const QuantGroup* a;
  int stride;        // records from one group to the next
  int rows;          // 1 .. kQuantRows, or kMaxQuantRows for wide_tile
  const uint8_t* w;  // one panel
  int groups;
  bool fresh;      // the first tile of rows to read this panel
  int8_t* spread;  // for wide_tile: this panel as signed bytes, [two halves][groups][8 lines]; to be filled if `fresh`
  const uint8_t* next;  // what to ask memory for meanwhile: `lines` per group and pass over the groups, on from here
  int lines;
  bool near;   // into the first-level cache: it is read soon
  float* out;  // [rows][ld], 32 columns
  size_t ld;
};

struct QuantKernels {
  const char* name;
  void (*tile)(Quant format, const QuantTile&);
  // k values -> one record per group, `stride` records apart; bf16 values when the flag is set, else fp32
  void (*quantise)(const void* x, bool bf16, int k, QuantGroup* out, size_t stride);
  double (*peak_loop)(long iterations, bool int4);  // returns operations done
  int whole_rows;                                   // tiles of up to so many rows pass over a panel once, others twice
  // For products of this many rows and more (0: none), with tiles of up to kMaxQuantRows: the same bits as `tile`.
  // Between begin, which takes the rows of a tile, and end the thread does no other products.
  int wide_rows = 0;
  void (*wide_begin)(int rows) = nullptr;
  void (*wide_tile)(Quant format, const QuantTile&) = nullptr;
  void (*wide_end)() = nullptr;

  // Rows of a tile in a product of `rows` rows.
  int tile_rows(int rows) const;
};

extern const QuantKernels kPortableQuant;
#if defined(__x86_64__)
extern const QuantKernels kAvx2Quant;
extern const QuantKernels kVnniQuant;
#endif

// The kernels of a path ("portable", "avx2", "avx512", "avx512_bf16", "amx"); those with AVX-512 use VNNI where there
// is one.
const QuantKernels& quant_kernels_for(const char* isa);

// Rows as files hold them: ggml's blocks of 32, or for kInt8Channel an fp32 scale and k int8 values.
size_t quant_row_bytes(Quant f, int k);
// One row of fp32 values to that form. False if the values are not finite or too large for a scale.
bool quantise_weights(Quant f, const float* row, int k, uint8_t* out);

// Row r of a matrix to and from the cell of its column in a packed panel; column: 0 .. 31.
void pack_quant_row(Quant f, const uint8_t* row, int k, uint8_t* panel, int column);
void unpack_quant_row(Quant f, const uint8_t* panel, int column, int k, float* out);

}  // namespace paceline
