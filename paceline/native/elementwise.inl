// Row operations between matrix products, for kernels.inl: each element depends on itself alone.

// 16 values of a row in the activation format, zeros behind its end.
inline V load_act_part(const void* base, size_t index, Act act, int n) {
  if (act != Act::kBF16) return load_part(static_cast<const float*>(base) + index, n);
  uint16_t t[16] = {0};
  for (int i = 0; i < 16 && i < n; ++i) t[i] = static_cast<const uint16_t*>(base)[index + i];
  return S::load_bf16(t);
}

// act *= sigmoid(gate)
void gate_row(void* act, Act mode, const float* gate, int width) {
  for (int i = 0; i < width; i += 16) {
    const V open =
        S::div(S::set1(1.0f), S::add(S::set1(1.0f), exp_v(S::sub(S::zero(), load_part(gate + i, width - i)))));
    store_act_part(act, size_t(i), mode, S::mul(load_act_part(act, size_t(i), mode, width - i), open), width - i);
  }
}

// x *= scale; then x = cap * tanh(x / cap) if there is a cap
void softcap_row(float* x, int width, float scale, float cap) {
  for (int i = 0; i < width; i += 16) {
    V y = S::mul(load_part(x + i, width - i), S::set1(scale));
    if (cap > 0.0f) y = S::mul(tanh_v(S::div(y, S::set1(cap))), S::set1(cap));
    store_part(x + i, y, width - i);
  }
}

// to += from * scale
void add_row(float* to, const float* from, int width, float scale) {
  for (int i = 0; i < width; i += 16)
    store_part(to + i, S::fma(load_part(from + i, width - i), S::set1(scale), load_part(to + i, width - i)), width - i);
}
