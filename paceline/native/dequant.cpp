// ggml's block formats -> float32 or bfloat16 (round to nearest even). The definition is paceline/weights/dequant.py;
// each value here is built with the same roundings: q * scale in float32, then plus or minus the offset, never fused.
// Single-threaded by design: the GIL is released, so the caller converts several tensors at once.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

namespace nb = nanobind;

namespace {

float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// IEEE half -> float, exact (subnormals, infinities and NaN included).
float load_half(const uint8_t* src) {
  uint16_t half;
  std::memcpy(&half, src, sizeof half);
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7FFFu;
  if (magnitude >= 0x7C00u) {  // infinity or NaN
    return bits_to_float(sign | 0x7F800000u | ((magnitude & 0x3FFu) << 13));
  }
  // Shifting the exponent field into place leaves it 112 too small; one exact multiplication mends normals and
  // subnormals.
  const float scaled = bits_to_float(magnitude << 13) * bits_to_float(0x77800000u);
  return bits_to_float(sign | float_to_bits(scaled));
}

inline void store(float* dst, float value) { *dst = value; }

inline void store(uint16_t* dst, float value) {
  const uint32_t bits = float_to_bits(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40u;
  *dst = static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet : rounded);
}

struct F32 {
  static constexpr size_t elements = 1, bytes = 4;
  template <class T>
  static void block(const uint8_t* src, T* dst) {
    float value;
    std::memcpy(&value, src, sizeof value);
    store(dst, value);
  }
};

struct F16 {
  static constexpr size_t elements = 1, bytes = 2;
  template <class T>
  static void block(const uint8_t* src, T* dst) {
    store(dst, load_half(src));
  }
};

struct BF16 {
  static constexpr size_t elements = 1, bytes = 2;
  template <class T>
  static void block(const uint8_t* src, T* dst) {
    uint16_t half;
    std::memcpy(&half, src, sizeof half);
    store(dst, bits_to_float(static_cast<uint32_t>(half) << 16));
  }
};

struct Q8_0 {
  static constexpr size_t elements = 32, bytes = 34;
  template <class T>
  static void block(const uint8_t* src, T* dst) {
    const float d = load_half(src);
    const int8_t* q = reinterpret_cast<const int8_t*>(src + 2);
    for (int i = 0; i < 32; ++i) store(dst + i, d * static_cast<float>(q[i]));
  }
};

struct Q4_0 {
  static constexpr size_t elements = 32, bytes = 18;
  template <class T>
  static void block(const uint8_t* src, T* dst) {
    const float d = load_half(src);
    const uint8_t* q = src + 2;
    for (int i = 0; i < 16; ++i) store(dst + i, d * static_cast<float>((q[i] & 0x0F) - 8));
    for (int i = 0; i < 16; ++i) store(dst + 16 + i, d * static_cast<float>((q[i] >> 4) - 8));
  }
};

struct Q4_1 {
  static constexpr size_t elements = 32, bytes = 20;
  template <class T>
  static void block(const uint8_t* src, T* dst) {
    const float d = load_half(src), m = load_half(src + 2);
    const uint8_t* q = src + 4;
    for (int i = 0; i < 16; ++i) store(dst + i, d * static_cast<float>(q[i] & 0x0F) + m);
    for (int i = 0; i < 16; ++i) store(dst + 16 + i, d * static_cast<float>(q[i] >> 4) + m);
  }
};

struct Q5_0 {
  static constexpr size_t elements = 32, bytes = 22;
  template <class T>
  static void block(const uint8_t* src, T* dst) {
    const float d = load_half(src);
    uint32_t high;
    std::memcpy(&high, src + 2, sizeof high);
    const uint8_t* q = src + 6;
    for (int i = 0; i < 16; ++i) {
      const int low_bits = (q[i] & 0x0F) | (((high >> i) & 1) << 4);
      const int high_bits = (q[i] >> 4) | (((high >> (i + 16)) & 1) << 4);
      store(dst + i, d * static_cast<float>(low_bits - 16));
      store(dst + 16 + i, d * static_cast<float>(high_bits - 16));
    }
  }
};

// Scale and minimum number j (0..7) of the 12 packed bytes of Q4_K and Q5_K, six bits each.
inline void k_scale(const uint8_t* packed, int j, float* scale, float* minimum) {
  if (j < 4) {
    *scale = static_cast<float>(packed[j] & 0x3F);
    *minimum = static_cast<float>(packed[j + 4] & 0x3F);
  } else {
    *scale = static_cast<float>((packed[j + 4] & 0x0F) | ((packed[j - 4] >> 2) & 0x30));
    *minimum = static_cast<float>((packed[j + 4] >> 4) | ((packed[j] >> 2) & 0x30));
  }
}

struct Q4_K {
  static constexpr size_t elements = 256, bytes = 144;
  template <class T>
  static void block(const uint8_t* src, T* dst) {
    const float d = load_half(src), dmin = load_half(src + 2);
    for (int j = 0; j < 8; ++j) {
      float scale, minimum;
      k_scale(src + 4, j, &scale, &minimum);
      const float ds = d * scale, m = dmin * minimum;
      const uint8_t* q = src + 16 + 32 * (j / 2);
      const int shift = 4 * (j % 2);
      for (int i = 0; i < 32; ++i) store(dst + 32 * j + i, ds * static_cast<float>((q[i] >> shift) & 0x0F) - m);
    }
  }
};

struct Q5_K {
  static constexpr size_t elements = 256, bytes = 176;
  template <class T>
  static void block(const uint8_t* src, T* dst) {
    const float d = load_half(src), dmin = load_half(src + 2);
    const uint8_t* high = src + 16;
    for (int j = 0; j < 8; ++j) {
      float scale, minimum;
      k_scale(src + 4, j, &scale, &minimum);
      const float ds = d * scale, m = dmin * minimum;
      const uint8_t* q = src + 48 + 32 * (j / 2);
      const int shift = 4 * (j % 2);
      for (int i = 0; i < 32; ++i) {
        const int value = ((q[i] >> shift) & 0x0F) | (((high[i] >> j) & 1) << 4);
        store(dst + 32 * j + i, ds * static_cast<float>(value) - m);
      }
    }
  }
};

struct Q6_K {
  static constexpr size_t elements = 256, bytes = 210;
  template <class T>
  static void block(const uint8_t* src, T* dst) {
    const int8_t* scales = reinterpret_cast<const int8_t*>(src + 192);
    const float d = load_half(src + 208);
    for (int j = 0; j < 8; ++j) {  // groups of 32; four of them share 64 low and 32 high bytes
      const uint8_t* low = src + 64 * (j / 4) + 32 * (j % 2);
      const int low_shift = 4 * ((j / 2) % 2);
      const uint8_t* high = src + 128 + 32 * (j / 4);
      const int high_shift = 2 * (j % 4);
      for (int half = 0; half < 2; ++half) {
        const float ds = d * static_cast<float>(scales[2 * j + half]);
        for (int i = 16 * half; i < 16 * half + 16; ++i) {
          const int value = ((low[i] >> low_shift) & 0x0F) | (((high[i] >> high_shift) & 3) << 4);
          store(dst + 32 * j + i, ds * static_cast<float>(value - 32));
        }
      }
    }
  }
};

template <class Format, class T>
void convert(const uint8_t* src, size_t src_bytes, T* dst, size_t dst_elements) {
  const size_t blocks = src_bytes / Format::bytes;
  if (src_bytes != blocks * Format::bytes || dst_elements != blocks * Format::elements) {
    throw std::invalid_argument("source and destination sizes do not match the format");
  }
  for (size_t b = 0; b < blocks; ++b) Format::block(src + b * Format::bytes, dst + b * Format::elements);
}

template <class T>
void dequantize(const std::string& format, const uint8_t* src, size_t src_bytes, T* dst, size_t dst_elements) {
  using Convert = void (*)(const uint8_t*, size_t, T*, size_t);
  static const struct {
    const char* name;
    Convert run;
  } formats[] = {
      {"F32", convert<F32, T>},   {"F16", convert<F16, T>},   {"BF16", convert<BF16, T>}, {"Q8_0", convert<Q8_0, T>},
      {"Q4_0", convert<Q4_0, T>}, {"Q4_1", convert<Q4_1, T>}, {"Q5_0", convert<Q5_0, T>}, {"Q4_K", convert<Q4_K, T>},
      {"Q5_K", convert<Q5_K, T>}, {"Q6_K", convert<Q6_K, T>},
  };
  for (const auto& entry : formats) {
    if (format == entry.name) return entry.run(src, src_bytes, dst, dst_elements);
  }
  throw std::invalid_argument("unknown format " + format);
}

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Values = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class T>
void bound(const std::string& format, Bytes src, Values<T> dst) {
  const uint8_t* from = src.data();
  T* to = dst.data();
  const size_t src_bytes = src.size(), dst_elements = dst.size();
  nb::gil_scoped_release release;
  dequantize<T>(format, from, src_bytes, to, dst_elements);
}

}  // namespace

void register_dequant(nb::module_& m) {
  m.def("dequantize_f32", &bound<float>, nb::arg("format"), nb::arg("src").noconvert(), nb::arg("dst").noconvert(),
        "Convert stored blocks (uint8 [bytes]) into dst (float32 [elements]); the GIL is released.");
  m.def("dequantize_bf16", &bound<uint16_t>, nb::arg("format"), nb::arg("src").noconvert(), nb::arg("dst").noconvert(),
        "Convert stored blocks (uint8 [bytes]) into dst (bfloat16 bits as uint16 [elements]); the GIL is released.");
}
