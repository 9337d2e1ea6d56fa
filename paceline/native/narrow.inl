// Matrix products and the loops of attention for sixteen registers of eight lanes (AVX2). Included by kernels.inl,
// inside its unnamed namespace.
//
// Twelve registers hold sums: 6 rows times 16 columns. A sum needs the one before it four cycles later and two are
// computed a cycle, so fewer than eight sums wait for one another. What an instruction of a tile reads and writes, and
// in which order they come, is written out: GCC moves loads and shifts ahead, runs out of registers, and then keeps
// sums in memory.

// Inlined into something large, sums end in memory, too.
#define PL_APART __attribute__((noinline))

constexpr int kTileRows = 6;  // of a tile half a panel wide
constexpr int kWideRows = 2;  // of a tile as wide as a panel
// Weights of a panel that all rows take before the next ones: they come from memory once and stay in the second-level
// cache, and the next ones are asked for meanwhile.
constexpr int kBlockSteps = 384;
constexpr int kChunkRows = 24;        // rows whose sums are kept between two blocks of weights
constexpr size_t kLeadBytes = 16384;  // of one tile: how far ahead weights are asked for

// Eight weights of a k, even or odd ones of pairs; or eight fp32 values.
template <bool F32, bool kOdd>
inline __m256 eight(const void* from) {
  alignas(32) static const uint32_t mask[8] = {0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u,
                                               0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u};
  const auto* p = static_cast<const __m256i_u*>(from);
  __m256 w;
  if (F32)
    asm volatile("vmovups %1, %0" : "=x"(w) : "m"(*p));
  else if (kOdd)
    asm volatile("vmovdqu %1, %0\n\tvpand %2, %0, %0" : "=&x"(w) : "m"(*p), "m"(mask));
  else
    asm volatile("vmovdqu %1, %0\n\tvpslld $16, %0, %0" : "=x"(w) : "m"(*p));
  return w;
}

inline void fma_to(__m256& sum, __m256 w, __m256 x) {
  asm volatile("vfmadd231ps %1, %2, %0" : "+x"(sum) : "x"(w), "x"(x));
}

// sums[r] += w * x, x one value for each row: two registers of columns.
inline void fma_row(__m256* sums, __m256 w0, __m256 w1, const float* x) {
  __m256 t;
  asm volatile("vbroadcastss %[x], %[t]\n\tvfmadd231ps %[w0], %[t], %[s0]\n\tvfmadd231ps %[w1], %[t], %[s1]"
               : [s0] "+x"(sums[0]), [s1] "+x"(sums[1]), [t] "=&x"(t)
               : [w0] "x"(w0), [w1] "x"(w1), [x] "m"(*x));
}

// One k of C * 8 columns, those of register v from `load(v)`. R: where row r has its values, as Rows.
template <int MR, int C, class R, class Load>
inline void narrow_k(__m256 (&sums)[MR][C], const R& rows, size_t k, Load load) {
  if constexpr (C == 2) {
    const __m256 w0 = load(0), w1 = load(1);
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) fma_row(sums[r], w0, w1, rows.at(r) + k);
  } else {
    __m256 x[MR];
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) asm volatile("vbroadcastss %1, %0" : "=x"(x[r]) : "m"(rows.at(r)[k]));
#pragma GCC unroll 8
    for (int v = 0; v < C; ++v) {
      const __m256 w = load(v);
#pragma GCC unroll 8
      for (int r = 0; r < MR; ++r) fma_to(sums[r][v], w, x[r]);
    }
  }
}

// One step of weights or keys, those of register v at `at(v)`: one k, or a pair.
template <bool F32, int MR, int C, class R, class At>
inline void narrow_step(__m256 (&sums)[MR][C], const R& rows, size_t step, At at) {
  if constexpr (F32) {
    narrow_k(sums, rows, step, [&](int v) { return eight<true, false>(at(v)); });
  } else {
    narrow_k(sums, rows, 2 * step, [&](int v) { return eight<false, false>(at(v)); });
    narrow_k(sums, rows, 2 * step + 1, [&](int v) { return eight<false, true>(at(v)); });
  }
}

template <int MR, int C>
inline void narrow_start(__m256 (&sums)[MR][C], const float* from, size_t ld) {
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < C; ++v) sums[r][v] = from ? _mm256_loadu_ps(from + r * ld + v * 8) : _mm256_setzero_ps();
}

template <int MR, int C>
inline void narrow_end(const __m256 (&sums)[MR][C], float* to, size_t ld) {
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < C; ++v) _mm256_storeu_ps(to + r * ld + v * 8, sums[r][v]);
}

// ---------------------------------------------------------------- matrix product

// What to ask for while a tile runs: `step` bytes further per step of the walk.
struct Ask {
  const uint8_t* at;
  size_t step;
};

// MR rows times C * 8 columns over `steps` k, or pairs of k for bf16 weights: sums [MR][ldt] begin or go on.
template <int MR, int C, bool F32>
inline void narrow_tile(const float* a, size_t lda, const uint8_t* w, int steps, float* sums, int ldt, bool begin,
                        Ask ask) {
  __m256 acc[MR][C];
  narrow_start(acc, begin ? nullptr : sums, size_t(ldt));
  const Rows<float, MR> rows(a, lda);
#pragma GCC unroll 1
  for (int i = 0; i < steps; ++i) {
    S::prefetch_far(ask.at);
    if (C == 4) S::prefetch_far(ask.at + 64);
    ask.at += ask.step;
    narrow_step<F32>(acc, rows, size_t(i), [&](int v) { return w + size_t(i) * 128 + v * 32; });
  }
  narrow_end(acc, sums, size_t(ldt));
}

template <int MR, bool F32>
void narrow_panel(const float* a, size_t lda, const uint8_t* w, int steps, float* sums, int ldt, bool begin, Ask ask) {
  if constexpr (MR <= kWideRows) {
    narrow_tile<MR, 4, F32>(a, lda, w, steps, sums, ldt, begin, ask);
  } else {
    narrow_tile<MR, 2, F32>(a, lda, w, steps, sums, ldt, begin, ask);
    ask.at += size_t(steps) * ask.step;
    narrow_tile<MR, 2, F32>(a, lda, w + 64, steps, sums + 16, ldt, begin, ask);
  }
}

// Panels [panel_begin, panel_end) for all rows. The weights of a thread are one stream. Lines of it are asked for at an
// even pace while tiles compute, so that memory never waits for arithmetic: one after the other takes the sum of both.
template <bool F32>
void narrow_gemm(const GemmArgs& g) {
  using Call = void (*)(const float*, size_t, const uint8_t*, int, float*, int, bool, Ask);
  static constexpr Call calls[kTileRows] = {narrow_panel<1, F32>, narrow_panel<2, F32>, narrow_panel<3, F32>,
                                            narrow_panel<4, F32>, narrow_panel<5, F32>, narrow_panel<6, F32>};
  const int steps = F32 ? g.k : (g.k + 1) / 2;
  const size_t panel_bytes = size_t(steps) * 128;
  const auto* weights = static_cast<const uint8_t*>(g.w);
  const bool gated = g.epilogue == Epilogue::kSwiGLU || g.epilogue == Epilogue::kGeluTanh;
  const int chunks = (g.rows + kChunkRows - 1) / kChunkRows;
  const auto chunk_at = [&](int c) { return int(int64_t(g.rows) * c / chunks); };
  const auto tiles_of = [](int rows) { return (rows + kTileRows - 1) / kTileRows; };
  int passes = 0;  // over the weights of a panel
  for (int c = 0; c < chunks; ++c) passes += 2 * tiles_of(chunk_at(c + 1) - chunk_at(c));
  if (g.rows <= kWideRows) passes = 1;
  const int blocks = passes == 1 ? 1 : (steps + kBlockSteps - 1) / kBlockSteps;
  const int unit = gated || chunks > 1 ? 2 : 1;  // panels that all rows take before the next
  const size_t lead = chunks > 1    ? panel_bytes * size_t(unit)
                      : passes == 1 ? kLeadBytes
                                    : size_t((steps + blocks - 1) / blocks) * 128;
  const size_t ask_step = (128 + size_t(passes) - 1) / size_t(passes);
  alignas(64) float sums[kChunkRows * 64];
  for (int p = g.panel_begin; p < g.panel_end; p += unit) {
    const int panels = g.panel_end - p < unit ? g.panel_end - p : unit, ldt = panels * 32;
    const uint8_t* w = weights + size_t(p) * panel_bytes;
    const size_t left = size_t(g.panel_end - p) * panel_bytes;
    Ask ask{w, 0};  // nothing new: a line that is at hand
    if (lead < left)
      ask = {w + lead, ask_step};
    else if (lead - left < g.next_bytes)
      ask = {g.next + (lead - left), ask_step};
    for (int c = 0; c < chunks; ++c) {
      const int c0 = chunk_at(c), rows = chunk_at(c + 1) - c0, tiles = tiles_of(rows);
      for (int i = 0; i < panels; ++i)
        for (int b = 0; b < blocks; ++b) {
          const int s0 = int(int64_t(steps) * b / blocks), s1 = int(int64_t(steps) * (b + 1) / blocks);
          for (int t = 0; t < tiles; ++t) {
            const int r0 = rows * t / tiles, mr = rows * (t + 1) / tiles - r0;
            const float* a = static_cast<const float*>(g.a) + size_t(c0 + r0) * g.lda + size_t(s0) * (F32 ? 1 : 2);
            calls[mr - 1](a, g.lda, w + i * panel_bytes + size_t(s0) * 128, s1 - s0, sums + r0 * ldt + i * 32, ldt,
                          b == 0, ask);
            ask.at += ask.step * size_t(s1 - s0) * (mr <= kWideRows ? 1 : 2);
          }
        }
      epilogue(g, sums, c0, rows, p, panels);
    }
  }
}

// ---------------------------------------------------------------- attention

template <int TQ>
struct Vectors {
  const float* p[TQ];
  inline const float* at(int r) const { return p[r]; }
};

// As scores_t of attention.inl, B blocks at a time.
template <int TQ, int B, bool F32>
PL_APART void narrow_score_blocks(int head_dim, const void* const* q, const uint8_t* const* blocks, float* out) {
  constexpr int C = 2 * B;
  Vectors<TQ> rows;
#pragma GCC unroll 8
  for (int r = 0; r < TQ; ++r) rows.p[r] = static_cast<const float*>(q[r]);
  const uint8_t* block[B];
#pragma GCC unroll 8
  for (int b = 0; b < B; ++b) block[b] = blocks[b];
  __m256 acc[TQ][C];
  narrow_start(acc, nullptr, 0);
  const int steps = F32 ? head_dim : head_dim / 2;
#pragma GCC unroll 1
  for (int i = 0; i < steps; ++i)
    narrow_step<F32>(acc, rows, size_t(i), [&](int v) { return block[v / 2] + size_t(i) * 64 + v % 2 * 32; });
  narrow_end(acc, out, kPartition);
}

template <int TQ, bool F32, int NB>
inline void narrow_scores(int head_dim, const void* const* q, const uint8_t* const* blocks, float* out) {
  constexpr int most = TQ == 1 ? 4 : TQ == 2 ? 2 : 1, B = NB < most ? NB : most;
#pragma GCC unroll 1
  for (int b = 0; b < NB; b += B) narrow_score_blocks<TQ, B, F32>(head_dim, q, blocks + b, out + b * 16);
}

// Eight values of a token of a block, from the one at `at`.
template <CacheType kType>
inline __m256 eight_values(const uint8_t* block, size_t at) {
  if (kType == CacheType::kF32) return eight<true, false>(block + at * 4);
  __m256 x;
  if (kType == CacheType::kBF16)
    asm volatile("vpmovzxwd %1, %0\n\tvpslld $16, %0, %0"
                 : "=x"(x)
                 : "m"(*reinterpret_cast<const __m128i_u*>(block + at * 2)));
  else
    asm volatile("vpmovsxbd %q1, %0\n\tvcvtdq2ps %0, %0"
                 : "=x"(x)
                 : "m"(*reinterpret_cast<const __m128i_u*>(block + at)));
  return x;
}

// `keys` tokens of a block, weighted: sums [TQ][ld] begin or go on. prob [TQ][64] and values of the first one.
template <int TQ, int NV, CacheType kType>
PL_APART void narrow_value_block(const uint8_t* values, size_t width, int keys, const float* prob, float* sums,
                                 size_t ld, bool begin) {
  __m256 acc[TQ][2 * NV];
  narrow_start(acc, begin ? nullptr : sums, ld);
  Vectors<TQ> rows;
#pragma GCC unroll 8
  for (int r = 0; r < TQ; ++r) rows.p[r] = prob + r * kPartition;
#pragma GCC unroll 1
  for (int j = 0; j < keys; ++j, values += width)
    narrow_k(acc, rows, size_t(j), [values](int v) { return eight_values<kType>(values, size_t(v) * 8); });
  narrow_end(acc, sums, ld);
}

// As values_t of attention.inl.
template <int TQ, int NV, CacheType kType, class Part>
inline void narrow_values(const Part& part, size_t offset, size_t width, const float* prob, int d, float* out,
                          size_t ld, size_t step) {
  constexpr size_t item = kType == CacheType::kF32 ? 4 : kType == CacheType::kBF16 ? 2 : 1;
  for (int j = part.skip, end; j < part.used; j = end) {
    end = j / 16 * 16 + 16 < part.used ? j / 16 * 16 + 16 : part.used;
    if (step)
      for (size_t i = size_t(j % 16) * step; i < size_t(j % 16 + end - j) * step; i += 64)
        S::prefetch_far(part.next[j / 16] + i);
    narrow_value_block<TQ, NV, kType>(part.blocks[j / 16] + (offset + size_t(j % 16) * width + size_t(d)) * item,
                                      width * item, end - j, prob + j, out + d, ld, j == part.skip);
  }
}
