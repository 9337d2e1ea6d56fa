// Attention of a tile of query vectors over partitions of 64 keys. Included by kernels.inl, inside its unnamed
// namespace.
//
// A tile has up to kMaxQueryTile vectors, the registers hold the sums of S::kQueryTile. A partition is taken by all
// vectors of a tile, some after the others, before the next one: it is asked for once and found in the nearest cache.

// Scores of TQ query vectors against the first NB blocks of a partition: out [TQ][64], unscaled.
template <int TQ, bool F32, int NB>
inline void scores_t(const AttentionArgs& p, const void* const* q, const uint8_t* const* blocks, float* out) {
#ifdef PACELINE_NARROW
  narrow_scores<TQ, F32, NB>(p.head_dim, q, blocks, out);
#else
  V acc[TQ][NB];
  for (int r = 0; r < TQ; ++r)
    for (int b = 0; b < NB; ++b) acc[r][b] = S::zero();
  if constexpr (F32) {
    for (int d = 0; d < p.head_dim; ++d) {
      V k[NB];
      for (int b = 0; b < NB; ++b) k[b] = S::load(reinterpret_cast<const float*>(blocks[b]) + d * 16);
      for (int r = 0; r < TQ; ++r) {
        const V x = S::set1(static_cast<const float*>(q[r])[d]);
        for (int b = 0; b < NB; ++b) acc[r][b] = S::fma(k[b], x, acc[r][b]);
      }
    }
  } else {
    for (int d = 0; d < p.head_dim / 2; ++d) {
      Pairs k[NB];
      for (int b = 0; b < NB; ++b) k[b] = S::load_pairs(reinterpret_cast<const uint16_t*>(blocks[b]) + d * 32);
#ifdef PACELINE_BF16_DOT
      for (int r = 0; r < TQ; ++r) {
        const uint32_t x = static_cast<const uint32_t*>(q[r])[d];
        for (int b = 0; b < NB; ++b) acc[r][b] = S::dot_pairs(acc[r][b], k[b], x);
      }
#else
      V half[NB];  // one after the other: with both, there are not registers enough
      for (int b = 0; b < NB; ++b) half[b] = S::even(k[b]);
      for (int r = 0; r < TQ; ++r) {
        const V x = S::set1(static_cast<const float*>(q[r])[2 * d]);
        for (int b = 0; b < NB; ++b) acc[r][b] = S::fma(half[b], x, acc[r][b]);
      }
      for (int b = 0; b < NB; ++b) half[b] = S::odd(k[b]);
      for (int r = 0; r < TQ; ++r) {
        const V x = S::set1(static_cast<const float*>(q[r])[2 * d + 1]);
        for (int b = 0; b < NB; ++b) acc[r][b] = S::fma(half[b], x, acc[r][b]);
      }
#endif
    }
  }
  for (int r = 0; r < TQ; ++r)
    for (int b = 0; b < NB; ++b) S::store(out + r * kPartition + b * 16, acc[r][b]);
#endif
}

// Sixteen values of a token of a block as fp32: lanes [at, at + 16) of its values.
template <CacheType kType>
inline V load_values(const uint8_t* block, size_t at) {
  if constexpr (kType == CacheType::kInt8) return S::load_int8(reinterpret_cast<const int8_t*>(block) + at);
  if constexpr (kType == CacheType::kF32) return S::load(reinterpret_cast<const float*>(block) + at);
  return S::load_bf16(reinterpret_cast<const uint16_t*>(block) + at);
}

// The keys of a partition that a tile reads, and what to ask for meanwhile.
struct Partition {
  int base;        // of its first key
  int skip, used;  // keys [skip, used) of it are seen
  const uint8_t* blocks[4];
  const uint8_t* next[4];  // of the next partition; null: nothing to ask for
};

// Weighted values: out [TQ][ld] for lanes [d, d + 16 * NV). Meanwhile `step` bytes per key are asked for from the next
// partition (0: nothing).
template <int TQ, int NV, CacheType kType>
inline void values_t(const Partition& part, size_t offset, size_t width, const float* prob, int d, float* out,
                     size_t ld, size_t step) {
#ifdef PACELINE_NARROW
  narrow_values<TQ, NV, kType>(part, offset, width, prob, d, out, ld, step);
#else
  V acc[TQ][NV];
  for (int r = 0; r < TQ; ++r)
    for (int v = 0; v < NV; ++v) acc[r][v] = S::zero();
  for (int j = part.skip; j < part.used; ++j) {
    for (size_t i = 0; i < step; i += 64) S::prefetch_far(part.next[j / 16] + size_t(j % 16) * step + i);
    V x[NV];
    for (int v = 0; v < NV; ++v)
      x[v] = load_values<kType>(part.blocks[j / 16], offset + size_t(j % 16) * width + d + v * 16);
    for (int r = 0; r < TQ; ++r) {
      const V w = S::set1(prob[r * kPartition + j]);
      for (int v = 0; v < NV; ++v) acc[r][v] = S::fma(x[v], w, acc[r][v]);
    }
  }
  for (int r = 0; r < TQ; ++r)
    for (int v = 0; v < NV; ++v) S::store(out + r * ld + d + v * 16, acc[r][v]);
#endif
}

// States and partials, n <= 8 of them, ld apart: [max, sum, pad to 16 lanes, values...]: fold partials in behind
// states. The exponentials of all of them are one vector.
void merge_rows(float* states, const float* partials, size_t ld, int n, int head_dim) {
  const int end = kStateHead + padded(head_dim);
  float t[16] = {0};
  for (int r = 0; r < n; ++r) {
    const float a = states[r * ld], b = partials[r * ld], top = a > b ? a : b;
    if (a == kNegInf || b == kNegInf) continue;
    t[r] = a - top;
    t[8 + r] = b - top;
  }
  S::store(t, exp_v(S::load(t)));
  for (int r = 0; r < n; ++r) {
    float* state = states + r * ld;
    const float* partial = partials + r * ld;
    if (partial[0] == kNegInf) continue;
    if (state[0] == kNegInf) {  // nothing yet: what follows would multiply by exactly 0 and 1
      for (int i = 0; i < end; i += 16) S::store(state + i, S::load(partial + i));
      continue;
    }
    const float top = state[0] > partial[0] ? state[0] : partial[0];
    const float sum = state[1] * t[r] + partial[1] * t[8 + r];
    const V a = S::set1(t[r]), b = S::set1(t[8 + r]);
    for (int i = kStateHead; i < end; i += 16)
      S::store(state + i, S::fma(S::load(partial + i), b, S::mul(S::load(state + i), a)));
    state[1] = sum;
    state[0] = top;
  }
}

void merge(float* state, const float* partial, int head_dim) { merge_rows(state, partial, 0, 1, head_dim); }

// Scores of vectors [from, from + TQ) of the tile against the first NB blocks become weights, in place of them
// [TQ][64]; maxima and sums go to `partial`.
template <int TQ, CacheType kType, int NB>
inline void weights_t(const AttentionArgs& p, const QueryTile& t, int from, const Partition& part, float* score,
                      float* partial, size_t ld) {
  for (int r = 0; r < TQ; ++r) {
    const int low = t.first[from + r] - part.base, high = t.last[from + r] - part.base + 1;
    const bool all = low <= 0 && high >= NB * 16;
    V s[NB], m = S::set1(kNegInf), sum = S::zero();
#pragma GCC unroll 4
    for (int b = 0; b < NB; ++b) {
      s[b] = S::mul(S::load(score + r * kPartition + b * 16), S::set1(p.scale));
      if (p.softcap > 0.0f) s[b] = S::mul(tanh_v(S::div(s[b], S::set1(p.softcap))), S::set1(p.softcap));
      if (!all) s[b] = S::keep(s[b], low - b * 16, high - b * 16, kNegInf);
      m = S::max(m, s[b]);
    }
    const float top = lane_max(m);
#pragma GCC unroll 4
    for (int b = 0; b < NB; ++b) {
      const V e = top == kNegInf ? S::zero() : exp_v(S::sub(s[b], S::set1(top)));
      sum = S::add(sum, e);
      S::store(score + r * kPartition + b * 16,
               kType == CacheType::kInt8 ? S::mul(e, value_scales(part.blocks[b], p.head_dim)) : e);
    }
    partial[r * ld] = top;
    partial[r * ld + 1] = lane_sum(sum);
  }
}

template <int TQ, CacheType kType, int NB>
inline void scores_and_weights(const AttentionArgs& p, const QueryTile& t, int from, const Partition& part,
                               float* score, float* partial, size_t ld) {
  const size_t item = p.act == Act::kBF16 ? 2 : 4;
  const void* q[TQ];
  for (int r = 0; r < TQ; ++r)
    q[r] = static_cast<const uint8_t*>(p.q) +
           (size_t(t.row[from + r]) * p.ld_q + size_t(t.head[from + r]) * p.head_dim) * item;
  if constexpr (kType == CacheType::kInt8)
    int8_scores_t<TQ, NB>(p, q, part.blocks, score);
  else
    scores_t<TQ, kType == CacheType::kF32, NB>(p, q, part.blocks, score);
  weights_t<TQ, kType, NB>(p, t, from, part, score, partial, ld);
}

// One partition for vectors [from, from + TQ) of a tile; ask: for the next partition, too.
template <int TQ, CacheType kType>
void attend_partition(const AttentionArgs& p, const QueryTile& t, int from, const Partition& part, float* state,
                      bool ask) {
  const size_t width = padded(p.head_dim), ld = kStateHead + width;
  const size_t offset = kType == CacheType::kInt8 ? int8_value_offset(p.head_dim) : size_t(p.head_dim) * kKeysPerBlock;
  alignas(64) float score[TQ * kPartition];
  alignas(64) float partial[TQ * (kStateHead + kMaxHeadDim)];
  const int filled = (part.used + 15) / 16;  // blocks; lanes of the others would be masked
  if (filled == 1)
    scores_and_weights<TQ, kType, 1>(p, t, from, part, score, partial, ld);
  else if (filled == 2)
    scores_and_weights<TQ, kType, 2>(p, t, from, part, score, partial, ld);
  else
    scores_and_weights<TQ, kType, 4>(p, t, from, part, score, partial, ld);
  const size_t step = ask ? p.block_bytes / kKeysPerBlock : 0;
  float* out = partial + kStateHead;
  size_t d = 0;
  constexpr int most = S::value_vectors(TQ);
  for (; d + 16 * most <= width; d += 16 * most)
    values_t<TQ, most, kType>(part, offset, width, score, int(d), out, ld, d ? 0 : step);
  for (; d < width; d += 16) values_t<TQ, 1, kType>(part, offset, width, score, int(d), out, ld, 0);
  merge_rows(state + size_t(from) * ld, partial, ld, TQ, p.head_dim);
}

using AttendPartition = void (*)(const AttentionArgs&, const QueryTile&, int, const Partition&, float*, bool);

// attend_partition for 1 + N vectors, by N.
template <CacheType kType, int... N>
inline const AttendPartition* partition_calls(std::integer_sequence<int, N...>) {
  static constexpr AttendPartition calls[] = {attend_partition<N + 1, kType>...};
  return calls;
}

template <CacheType kType>
void attend_t(const AttentionArgs& p, const QueryTile& t, const int32_t* table, int p0, int p1, float* state) {
  const AttendPartition* calls = partition_calls<kType>(std::make_integer_sequence<int, S::kQueryTile>{});
  const size_t ld = kStateHead + padded(p.head_dim);
  int last = -1, first = t.first[0];
  for (int r = 0; r < t.count; ++r) {
    last = t.last[r] > last ? t.last[r] : last;
    first = t.first[r] < first ? t.first[r] : first;
    for (size_t i = 0; i < ld; i += 16) S::store(state + r * ld + i, S::zero());
    state[r * ld] = kNegInf;
  }
  const int pieces = (t.count + S::kQueryTile - 1) / S::kQueryTile;
  for (int index = p0; index < p1; ++index) {
    Partition part{};
    part.base = index * kPartition;
    if (part.base > last || part.base + kPartition <= first) continue;
    part.used = last - part.base + 1 < kPartition ? last - part.base + 1 : kPartition;
    part.skip = first > part.base ? first - part.base : 0;
    const auto block_at = [&](int i) { return p.cache + (size_t(table[i]) * p.kv_heads + t.kv_head) * p.block_bytes; };
    // blocks past the end are never read by a kept lane: point them at a block that exists
    for (int b = 0; b < 4; ++b) part.blocks[b] = block_at(index * 4 + (b * 16 < part.used ? b : 0));
    // ask for everything the partition reads: few bytes from many places, which no stream detector foresees
    for (int b = 0; b * 16 < part.used; ++b)
      for (size_t line = 0; line < p.block_bytes; line += 64) S::prefetch(part.blocks[b] + line);
    // and, while values are added up, for the next one, so that a long context streams
    const bool more = part.base + 2 * kPartition - 1 <= last;
    for (int b = 0; more && b < 4; ++b) part.next[b] = block_at(index * 4 + 4 + b);
    for (int i = 0; i < pieces; ++i) {
      const int from = i * t.count / pieces, to = (i + 1) * t.count / pieces;
      calls[to - from - 1](p, t, from, part, state, more && i == 0);
    }
  }
}

void attend(const AttentionArgs& p, const QueryTile& t, const int32_t* table, int p0, int p1, float* state) {
  if (p.cache_type == CacheType::kInt8)
    attend_t<CacheType::kInt8>(p, t, table, p0, p1, state);
  else if (p.cache_type == CacheType::kF32)
    attend_t<CacheType::kF32>(p, t, table, p0, p1, state);
  else
    attend_t<CacheType::kBF16>(p, t, table, p0, p1, state);
}

void finish(const AttentionArgs& p, const float* state, int row, int head) {
  const V total = S::set1(state[1]);
  for (int i = 0; i < p.head_dim; i += 16)
    store_act_part(p.out, size_t(row) * p.ld_out + size_t(head) * p.head_dim + i, p.act,
                   S::div(S::load(state + kStateHead + i), total), p.head_dim - i);
}
