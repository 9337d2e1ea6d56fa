// Body of the vector kernels, included once per instruction set by sampling_kernels.cpp, which defines the register
// types F (floats) and I (32-bit integers), their width and their operations. See sampling_kernels.h for what each one
// does.

PACELINE_TARGET float block_maxima(const float* x, int blocks, float* maxima) {
  float best = -std::numeric_limits<float>::infinity();
  for (int b = 0; b < blocks; ++b, x += kBlock) {
    F m = splat(-std::numeric_limits<float>::infinity());
    for (int i = 0; i < kBlock; i += kWidth) m = max(load(x + i), m);  // x first: NaN in x yields m
    maxima[b] = max_lane(m);
    best = maxima[b] > best ? maxima[b] : best;
  }
  return best;
}

PACELINE_TARGET uint64_t mask_ge(const float* x, float threshold) {
  const F t = splat(threshold);
  uint64_t mask = 0;
  for (int i = 0; i < kBlock; i += kWidth) mask |= static_cast<uint64_t>(ge(load(x + i), t)) << i;
  return mask;
}

PACELINE_OP F exp_vector(F x, F top, F scale) {
  const F d = mul(sub(x, top), scale);
  const F t = max(d, splat(kExpFloor));
  const F k = add(mul(t, splat(kLog2e)), splat(kRoundMagic));
  const F n = sub(k, splat(kRoundMagic));
  F r = sub(t, mul(n, splat(kLn2High)));
  r = sub(r, mul(n, splat(kLn2Low)));
  F p = splat(kC6);
  p = add(mul(p, r), splat(kC5));
  p = add(mul(p, r), splat(kC4));
  p = add(mul(p, r), splat(kC3));
  p = add(mul(p, r), splat(kC2));
  p = add(mul(p, r), splat(1.0f));
  p = add(mul(p, r), splat(1.0f));
  p = from_bits(addi(bits(p), shl<23>(bits(k))));
  return zero_unless_ge(p, d, splat(kExpFloor));
}

PACELINE_TARGET void exp_block(const float* x, float top, float scale, float* out) {
  for (int i = 0; i < kBlock; i += kWidth) store(out + i, exp_vector(load(x + i), splat(top), splat(scale)));
}

PACELINE_TARGET void sum_exp(const float* x, const float* maxima, int blocks, float top, float scale, double* lanes) {
  const F t = splat(top), s = splat(scale);
  Sum sums[16 / kWidth];
  for (int c = 0; c < 16 / kWidth; ++c) sums[c] = load_sum(lanes + c * kWidth);
  for (int b = 0; b < blocks; ++b, x += kBlock) {
    if (!((maxima[b] - top) * scale >= kExpFloor)) continue;
    for (int i = 0; i < kBlock; i += 16)
      for (int c = 0; c < 16 / kWidth; ++c) sums[c] = accumulate(sums[c], exp_vector(load(x + i + c * kWidth), t, s));
  }
  for (int c = 0; c < 16 / kWidth; ++c) store_sum(lanes + c * kWidth, sums[c]);
}

PACELINE_OP void philox(I* c0, I* c1, I* c2, I* c3, const NoiseKey& key) {
  const I m0 = splati(0xD2511F53u), m1 = splati(0xCD9E8D57u);
  const I step0 = splati(0x9E3779B9u), step1 = splati(0xBB67AE85u);
  I key0 = splati(key.key0), key1 = splati(key.key1);
  for (int c = 0; c < kChains; ++c) {
    c1[c] = splati(key.position);
    c2[c] = splati(key.choice);
    c3[c] = splati(key.stream);
  }
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c) {
      I high0, low0, high1, low1;
      mul_wide(c0[c], m0, high0, low0);
      mul_wide(c2[c], m1, high1, low1);
      c0[c] = xor3(high1, c1[c], key0);
      c1[c] = low1;
      c2[c] = xor3(high0, c3[c], key1);
      c3[c] = low0;
    }
    key0 = addi(key0, step0);
    key1 = addi(key1, step1);
  }
}

PACELINE_OP uint32_t bound_bits(F x, I words, F top, F scale, F limit) {
  const F half = to_float(shr<1>(words));
  const F noise = sub(splat(kBoundBase), mul(splat(kBoundSlope), to_float(bits(half))));
  return ge(add(mul(sub(x, top), scale), noise), limit);
}

PACELINE_TARGET int scan_noise(const float* x, const float* maxima, int begin, int end, const NoiseKey& key, float top,
                               float scale, float threshold, uint32_t* words, uint64_t* mask) {
  static_assert(kWidth * kChains == 16, "one round of chains covers the 16 counters of a block");
  const F t = splat(top), s = splat(scale), limit = splat(threshold);
  for (int b = begin; b < end; ++b) {
    if (!((maxima[b] - top) * scale + static_cast<float>(kMaxGumbel) >= threshold)) continue;
    I c0[kChains], c1[kChains], c2[kChains], c3[kChains];
    for (int c = 0; c < kChains; ++c) c0[c] = addi(splati(static_cast<uint32_t>(b * 16 + c * kWidth)), iota());
    philox(c0, c1, c2, c3, key);
    uint64_t found = 0;
    for (int c = 0; c < kChains; ++c) {
      const float* at = x + b * kBlock + c * kWidth;
      const int shift = c * kWidth;
      found |= static_cast<uint64_t>(bound_bits(load(at), c0[c], t, s, limit)) << shift;
      found |= static_cast<uint64_t>(bound_bits(load(at + 16), c1[c], t, s, limit)) << (shift + 16);
      found |= static_cast<uint64_t>(bound_bits(load(at + 32), c2[c], t, s, limit)) << (shift + 32);
      found |= static_cast<uint64_t>(bound_bits(load(at + 48), c3[c], t, s, limit)) << (shift + 48);
    }
    if (found == 0) continue;
    for (int c = 0; c < kChains; ++c) {
      uint32_t* out = words + c * kWidth;
      storei(out, c0[c]);
      storei(out + 16, c1[c]);
      storei(out + 32, c2[c]);
      storei(out + 48, c3[c]);
    }
    *mask = found;
    return b;
  }
  return end;
}

PACELINE_TARGET void noise_ids(const int32_t* ids, const NoiseKey& key, uint32_t* words) {
  for (int i = 0; i < kBlock; i += kWidth * kChains) {
    I id[kChains], c0[kChains], c1[kChains], c2[kChains], c3[kChains];
    for (int c = 0; c < kChains; ++c) {
      id[c] = loadi(ids + i + c * kWidth);
      c0[c] = ori(shl<4>(shr<6>(id[c])), andi(id[c], splati(15)));
    }
    philox(c0, c1, c2, c3, key);
    for (int c = 0; c < kChains; ++c) {
      const I word = andi(shr<4>(id[c]), splati(3));
      I out = where_equal(word, splati(1), c1[c], c0[c]);
      out = where_equal(word, splati(2), c2[c], out);
      out = where_equal(word, splati(3), c3[c], out);
      storei(words + i + c * kWidth, out);
    }
  }
}

PACELINE_TARGET uint64_t bound_mask(const float* x, const uint32_t* words, float top, float scale, float threshold) {
  const F t = splat(top), s = splat(scale), limit = splat(threshold);
  uint64_t mask = 0;
  for (int i = 0; i < kBlock; i += kWidth)
    mask |= static_cast<uint64_t>(bound_bits(load(x + i), loadi(words + i), t, s, limit)) << i;
  return mask;
}
