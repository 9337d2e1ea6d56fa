// Keys and values as int8 with a scale per token and head. Included by kernels.inl, inside its unnamed namespace.
//
// A block of one kv head: [head_dim / 4][16 keys][4] keys, [16 keys][padded head_dim] values, 16 key scales, 16 value
// scales. Keys are stored as k + 128, because the byte dot product takes one unsigned operand. Queries are rounded to
// int8 as well, with a scale per row and head, so that their product with a key is an exact integer.

inline int quads_of(int head_dim) { return (head_dim + 3) / 4; }
inline size_t int8_value_offset(int head_dim) { return size_t(quads_of(head_dim)) * 64; }
inline size_t int8_scale_offset(int head_dim) { return int8_value_offset(head_dim) + size_t(padded(head_dim)) * 16; }

inline V value_scales(const uint8_t* block, int head_dim) {
  return S::load(reinterpret_cast<const float*>(block + int8_scale_offset(head_dim)) + kKeysPerBlock);
}

// n values -> q [padded n], the largest magnitude becoming 127; returns the scale. What is not finite ends in the
// scale.
inline float quantise_head(const float* x, int n, int8_t* q) {
  V most = S::zero(), sum = S::zero();
  for (int i = 0; i < n; i += 16) {
    const V a = load_part(x + i, n - i);
    most = S::max(most, S::max(a, S::sub(S::zero(), a)));
    sum = S::add(sum, a);
  }
  const float top = lane_max(most);
  const V inverse = S::set1(top < 0x1p-100f ? 0.0f : 127.0f / top);
  for (int i = 0; i < n; i += 16) S::store_int8(q + i, S::nearest(S::mul(load_part(x + i, n - i), inverse)));
  return top / 127.0f + 0.0f * lane_sum(sum);  // a maximum may pass over NaN, a sum does not
}

// The query's place in the activations holds [head_dim / 4][4] int8, the fp32 scale and the int32 sum of its values.
inline void store_int8_query(const float* y, int head_dim, uint8_t* to) {
  int8_t q[kMaxHeadDim];
  const float scale = quantise_head(y, head_dim, q);
  const size_t bytes = size_t(quads_of(head_dim)) * 4;
  int32_t sum = 0;
  for (size_t i = 0; i < bytes; ++i) sum += q[i];
  memcpy(to, q, bytes);
  memcpy(to + bytes, &scale, 4);
  memcpy(to + bytes + 4, &sum, 4);
}

inline void store_int8_key(const float* y, int head_dim, uint8_t* block, int slot) {
  int8_t q[kMaxHeadDim];
  const float scale = quantise_head(y, head_dim, q);
  for (int i = 0; i < quads_of(head_dim); ++i) {
    uint32_t four;
    memcpy(&four, q + i * 4, 4);
    four ^= 0x80808080u;
    memcpy(block + (i * kKeysPerBlock + slot) * 4, &four, 4);
  }
  memcpy(block + int8_scale_offset(head_dim) + slot * 4, &scale, 4);
}

inline void store_int8_value(const float* x, int head_dim, uint8_t* block, int slot) {
  int8_t* to = reinterpret_cast<int8_t*>(block + int8_value_offset(head_dim)) + slot * padded(head_dim);
  const float scale = quantise_head(x, head_dim, to);
  memcpy(block + int8_scale_offset(head_dim) + (kKeysPerBlock + slot) * 4, &scale, 4);
}

#ifdef PACELINE_NARROW
// Sums of N query vectors and the keys of a block: sums [N][16]. pairs: [quads][2] of each vector, `ld` apart.
template <int N>
PL_APART void narrow_int8_block(int quads, const int32_t* pairs, size_t ld, const uint8_t* block, I* sums) {
  I acc[N];
#pragma GCC unroll 4
  for (int r = 0; r < N; ++r) acc[r] = sums[r];
#pragma GCC unroll 1
  for (int d = 0; d < quads; ++d) {
    const Quads k = S::load_quads(block + d * 64);
#pragma GCC unroll 4
    for (int r = 0; r < N; ++r) {
      const __m256i even = _mm256_set1_epi32(pairs[r * ld + 2 * d]), odd = _mm256_set1_epi32(pairs[r * ld + 2 * d + 1]);
      const auto dot = [&](int i) {
        return _mm256_add_epi32(_mm256_madd_epi16(k.even[i], even), _mm256_madd_epi16(k.odd[i], odd));
      };
      acc[r] = {_mm256_add_epi32(acc[r].lo, dot(0)), _mm256_add_epi32(acc[r].hi, dot(1))};
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < N; ++r) sums[r] = acc[r];
}

// As int8_scores_t below.
template <int TQ, int NB>
inline void narrow_int8_scores(int head_dim, const void* const* q, const uint8_t* const* blocks, float* out) {
  constexpr size_t ld = kMaxHeadDim / 2;
  const int quads = quads_of(head_dim);
  const size_t scales = int8_scale_offset(head_dim);
  float scale[TQ];
  I start[TQ], sums[TQ];
  int32_t pairs[TQ * ld];  // four values of a vector, as the 16-bit pairs that keys are in
  for (int r = 0; r < TQ; ++r) {
    const auto* vector = static_cast<const uint8_t*>(q[r]);
    int32_t sum;
    memcpy(&scale[r], vector + quads * 4, 4);
    memcpy(&sum, vector + quads * 4 + 4, 4);
    start[r] = S::quads_start(sum);
    for (int d = 0; d < quads; ++d) {
      int8_t four[4];
      memcpy(four, vector + d * 4, 4);
      pairs[r * ld + 2 * d] = int32_t(uint32_t(uint16_t(four[0])) | uint32_t(uint16_t(four[2])) << 16);
      pairs[r * ld + 2 * d + 1] = int32_t(uint32_t(uint16_t(four[1])) | uint32_t(uint16_t(four[3])) << 16);
    }
  }
  constexpr int n = TQ <= 3 ? TQ : (TQ + 1) / 2;
  for (int b = 0; b < NB; ++b) {
    for (int r = 0; r < TQ; ++r) sums[r] = start[r];
    narrow_int8_block<n>(quads, pairs, ld, blocks[b], sums);
    if constexpr (TQ > n) narrow_int8_block<TQ - n>(quads, pairs + n * ld, ld, blocks[b], sums + n);
    const V ks = S::load(reinterpret_cast<const float*>(blocks[b] + scales));
    for (int r = 0; r < TQ; ++r)
      S::store(out + r * kPartition + b * 16, S::mul(S::to_float(sums[r]), S::mul(S::set1(scale[r]), ks)));
  }
}
#endif

// As scores_t of kernels.inl.
template <int TQ, int NB>
inline void int8_scores_t(const AttentionArgs& p, const void* const* q, const uint8_t* const* blocks, float* out) {
#ifdef PACELINE_NARROW
  narrow_int8_scores<TQ, NB>(p.head_dim, q, blocks, out);
#else
  const int quads = quads_of(p.head_dim);
  const size_t scales = int8_scale_offset(p.head_dim);
  float scale[TQ];
  I acc[TQ][NB];
  for (int r = 0; r < TQ; ++r) {
    int32_t sum;
    memcpy(&scale[r], static_cast<const uint8_t*>(q[r]) + quads * 4, 4);
    memcpy(&sum, static_cast<const uint8_t*>(q[r]) + quads * 4 + 4, 4);
    for (int b = 0; b < NB; ++b) acc[r][b] = S::quads_start(sum);
  }
  for (int d = 0; d < quads; ++d) {
    Quads k[NB];
    for (int b = 0; b < NB; ++b) k[b] = S::load_quads(blocks[b] + d * 64);
    for (int r = 0; r < TQ; ++r) {
      int32_t x;
      memcpy(&x, static_cast<const uint8_t*>(q[r]) + d * 4, 4);
      for (int b = 0; b < NB; ++b) acc[r][b] = S::dot_quads(acc[r][b], k[b], x);
    }
  }
  for (int b = 0; b < NB; ++b) {
    const V ks = S::load(reinterpret_cast<const float*>(blocks[b] + scales));
    for (int r = 0; r < TQ; ++r)
      S::store(out + r * kPartition + b * 16, S::mul(S::to_float(acc[r][b]), S::mul(S::set1(scale[r]), ks)));
  }
#endif
}
