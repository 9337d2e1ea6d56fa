// Interface between the plan interpreter and the instruction-set specific kernels.
//
// Every isa_*.cpp defines one `Kernels` table from the same source (kernels.inl). This header must stay free of inline
// functions and templates with external linkage: code compiled for AVX-512 must never be merged into the baseline.
#pragma once
#include <cstddef>
#include <cstdint>

namespace paceline {

constexpr int kPanel = 32;         // columns of one packed weight panel
constexpr int kKeysPerBlock = 16;  // tokens of one KV cache block
constexpr int kPartition = 64;     // keys whose softmax is computed as one partial result, at absolute positions
constexpr int kMaxHeadDim = 256;
constexpr int kStateHead = 16;     // floats before the values in a state of attention: max, sum, padding
constexpr int kMaxQueryTile = 16;  // query vectors that attention handles at once

// How rows are stored as inputs of matrix products.
enum class Act : int {
  kF32 = 0,         // fp32 weights: unrounded
  kF32Rounded = 1,  // bf16 weights on a path without a bf16 dot product: bf16 values held in fp32
  kBF16 = 2,        // bf16 weights on a path with a bf16 dot product
};

// How a cache holds keys and values.
enum class CacheType : int { kF32 = 0, kBF16 = 1, kInt8 = 2 };
constexpr int kMinInt8HeadDim = 8;  // below, a query with its scale is larger than its place in the activations

enum class Epilogue : int {
  kStore = 0,     // out = a w^T (+ bias)
  kAdd = 1,       // out += a w^T (+ bias)
  kSwiGLU = 2,    // act_out = silu(gate) * up; gate and up panels interleaved
  kGeluTanh = 3,  // act_out = gelu_tanh(gate) * up
};

struct GemmArgs {
  const void* a;   // [rows, lda] in the path's activation format
  size_t lda;      // elements
  int rows, k, n;  // n: columns to write (gated: columns of the result)
  const void* w;   // packed panels
  bool w_f32;
  int panel_begin, panel_end;
  const uint8_t* next;  // weights that this thread reads next, to be on their way when it gets there
  size_t next_bytes;
  int far_rows;  // from so many rows of a tile on, ask for weights in two steps, through the second-level cache; 0:
                 // never
  Epilogue epilogue;
  const float* bias;  // [n] or null
  float* out;         // [rows, ldo]
  size_t ldo;
  void* act_out;  // gated epilogues: of row `act_row`, column `act_column`
  size_t ld_act;
  int act_row, act_column;
  Act act;
};

struct QkvPostArgs {
  const float* qkv;  // [rows, ld]: q heads, k heads, v heads
  size_t ld;
  int heads, kv_heads, head_dim, rotary_dim;
  bool interleaved_rope;
  const float* q_norm;  // [head_dim] or null
  const float* k_norm;
  float eps;
  const float* cos;  // [rows, rotary_dim / 2]
  const float* sin;
  void* q_out;  // [rows, heads * head_dim] activation format, or in its place int8 queries (int8_cache.inl)
  size_t ld_q;
  Act act;
  // cache of this layer
  uint8_t* cache;      // base of the layer
  size_t block_bytes;  // bytes of one (block, kv head): keys then values
  CacheType cache_type;
};

struct AttentionArgs {
  const void* q;  // as QkvPostArgs::q_out
  size_t ld_q;
  int heads, kv_heads, head_dim;
  float scale;
  float softcap;  // 0: none
  Act act;
  const uint8_t* cache;
  size_t block_bytes;
  CacheType cache_type;
  void* out;  // [rows, heads * head_dim] activation format
  size_t ld_out;
};

// One tile of query vectors that share a kv head: vector i belongs to row rows[i], query head heads[i], and sees keys
// first[i] <= key <= last[i].
struct QueryTile {
  int count;
  int kv_head;
  int row[kMaxQueryTile];
  int head[kMaxQueryTile];
  int first[kMaxQueryTile];
  int last[kMaxQueryTile];
};

struct Kernels {
  const char* name;
  int query_tile;  // query vectors that `attend` works on at a time: tiles of fewer cost, wider ones read less often
  bool bf16_dot;
  void (*gemm)(const GemmArgs&);
  // sums [mr][panels * 32] of rows from `row` and of `panels` panels (1 or 2) -> what g.epilogue makes of them
  void (*epilogue)(const GemmArgs& g, const float* sums, int row, int mr, int panel, int panels);
  // rows [begin, end) of x [*, ldx] -> act [*, lda]: rmsnorm when weight is given, plain conversion otherwise
  void (*norm_rows)(const float* x, size_t ldx, int width, const float* weight, float eps, void* act, size_t lda,
                    Act mode, int begin, int end);
  // head h of row r: h counts q heads, then k heads, then v heads
  void (*qkv_post)(const QkvPostArgs&, int row, int head, int block, int slot);
  // state: [count][2 + padded head_dim] = max, sum, weighted values; folded over partitions [p0, p1)
  void (*attend)(const AttentionArgs&, const QueryTile&, const int32_t* block_table, int p0, int p1, float* state);
  void (*merge)(float* state, const float* partial, int head_dim);
  void (*finish)(const AttentionArgs&, const float* state, int row, int head);
  // elementwise.inl
  void (*gate_row)(void* act, Act mode, const float* gate, int width);
  void (*softcap_row)(float* x, int width, float scale, float cap);
  void (*add_row)(float* to, const float* from, int width, float scale);
  // floors
  double (*peak_loop)(long iterations, bool f32);  // returns operations done
  uint64_t (*read_loop)(const uint8_t* p, size_t bytes, int prefetch_bytes);
};

extern const Kernels kPortableKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
extern const Kernels kAvx512Bf16Kernels;
#endif

// The path for this process: `name`, PACELINE_ISA or default_isa(). Throws std::runtime_error.
const Kernels& kernels_for(const char* name);
const char* best_isa();     // the last that runs here, of those that include one another
const char* default_isa();  // the fastest here
// From how many rows of a tile on prefetches in two steps, the first into the second-level cache, pay
// (GemmArgs::far_rows); 0: they do not. Measured on Zen 4 (wide tiles only), Zen 5 (never) and a Xeon of the fourth
// generation without AMX (always: 0.93 of the time with one row, 0.87 with 2 to 4, 0.95 with 8). Elsewhere: 0.
int far_prefetch_rows();

}  // namespace paceline
