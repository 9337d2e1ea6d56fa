// Python bindings. Shapes and meanings are documented in paceline/_native.pyi and checked here.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstring>
#include <memory>

#include "amx.h"
#include "plan.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace paceline;

void register_sampling(nb::module_& m);
void register_dequant(nb::module_& m);
void register_quant(nb::module_& m);
void register_delta(nb::module_& m);
void register_markov_head(nb::module_& m);
void register_candidate_selector(nb::module_& m);
void register_draft_step(nb::module_& m);
void register_draft_tree(nb::module_& m);
void register_cost_curve(nb::module_& m);
void register_draft_lengths(nb::module_& m);

namespace {

using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats2 = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ConstFloats2 = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Halves2 = nb::ndarray<const uint16_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bytes2 = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints2 = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// A few numbers of a pass: an array, or a list, which takes the caller less time to make.
struct IntRow {
  Ints array;
  std::vector<int32_t> own;

  const int32_t* data() const { return own.empty() ? array.data() : own.data(); }
  size_t size() const { return own.empty() ? (array.is_valid() ? array.shape(0) : 0) : own.size(); }
};

// Owns what the operations point to.
struct PyPlan {
  std::shared_ptr<ThreadPool> pool;
  std::unique_ptr<Plan> plan;
  std::vector<std::unique_ptr<std::vector<float>>> vectors;
  std::vector<nb::object> keep;
  std::vector<std::unique_ptr<ExpertWeights>> experts;

  const float* vector(const std::optional<Floats>& v, size_t size, const char* what) {
    if (!v) return nullptr;
    if (v->shape(0) != size)
      throw std::invalid_argument(std::string(what) + ": " + std::to_string(v->shape(0)) + " values, expected " +
                                  std::to_string(size));
    vectors.push_back(std::make_unique<std::vector<float>>(v->data(), v->data() + size));
    vectors.back()->resize((size + 31) / 32 * 32);
    return vectors.back()->data();
  }
};

void check_fill(const Packed& p, size_t rows, size_t columns, int row, int part, bool quantised = false) {
  if (quantised != (p.quant != Quant::kNone) || columns != size_t(p.k) || row < 0 || size_t(row) + rows > size_t(p.n) ||
      part < 0 || part > int(p.gated))
    throw std::invalid_argument("fill: shape does not fit the packed weight");
}

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

template <>
struct nb::detail::type_caster<IntRow> {
  NB_TYPE_CASTER(IntRow, const_name("list[int] | ") + make_caster<Ints>::Name)

  bool from_python(handle src, uint8_t flags, cleanup_list* cleanup) noexcept {
    if (!PyList_CheckExact(src.ptr())) {
      make_caster<Ints> array;
      if (!array.from_python(src, flags, cleanup)) return false;
      value.array = std::move(array.value);
      return true;
    }
    const Py_ssize_t size = PyList_GET_SIZE(src.ptr());
    value.own.resize(size_t(size));
    for (Py_ssize_t i = 0; i < size; ++i) {
      int overflow = 0;
      const long x = PyLong_AsLongAndOverflow(PyList_GET_ITEM(src.ptr(), i), &overflow);
      if (overflow || x != int32_t(x) || (x == -1 && PyErr_Occurred())) {
        PyErr_Clear();
        return false;
      }
      value.own[size_t(i)] = int32_t(x);
    }
    return true;
  }
};

NB_MODULE(_native, m) {
  m.doc() = "Kernels and plan interpreter of Paceline.";
  nb::set_leak_warnings(false);  // interpreters end with objects alive; that is not an error of ours
  m.attr("KEYS_PER_BLOCK") = kKeysPerBlock;
  m.attr("MIN_INT8_HEAD_DIM") = kMinInt8HeadDim;
  m.def("best_isa", [] { return std::string(best_isa()); });
  m.def("default_isa", [] { return std::string(default_isa()); });
  m.def("amx_refused", [] {
    const std::string best = best_isa();
    const char* why = best == "amx" || best == "avx512_bf16" ? amx_refused() : "the processor has no AMX";
    return why ? std::optional<std::string>(why) : std::nullopt;
  });
  m.def(
      "select_isa", [](const std::string& name) { return std::string(kernels_for(name.c_str()).name); }, "name"_a = "");

  nb::class_<ThreadPool>(m, "ThreadPool").def(nb::init<int>(), "threads"_a).def_prop_ro("size", &ThreadPool::size);

  nb::class_<Arena>(m, "Arena").def(nb::init<size_t>(), "capacity"_a).def_prop_ro("used", &Arena::used);

  register_quant(m);
  nb::class_<Packed>(m, "Packed")
      .def(nb::init<Arena&, int, int, bool, bool, Quant>(), "arena"_a, "n"_a, "k"_a, "f32"_a, "gated"_a = false,
           "quant"_a = Quant::kNone, nb::keep_alive<1, 2>())
      .def(
          "view", [](const Packed& p, int row, int count) { return new Packed(p, row, count); }, "row"_a, "count"_a,
          nb::keep_alive<0, 1>())
      .def_ro("n", &Packed::n)
      .def_ro("k", &Packed::k)
      .def_ro("quant", &Packed::quant)
      .def_prop_ro("nbytes", &Packed::bytes)
      .def(
          "fill_quant",
          [](Packed& p, Bytes2 a, int row, int part) {
            if (p.quant == Quant::kNone || a.shape(1) != quant_row_bytes(p.quant, p.k))
              throw std::invalid_argument("fill_quant: the rows are not in the form of the packed weight");
            check_fill(p, a.shape(0), size_t(p.k), row, part, true);
            nb::gil_scoped_release release;
            p.fill_quant(a.data(), row, int(a.shape(0)), part);
          },
          "rows"_a, "row"_a = 0, "part"_a = 0)
      .def(
          "fill",
          [](Packed& p, ConstFloats2 a, int row, int part) {
            check_fill(p, a.shape(0), a.shape(1), row, part);
            nb::gil_scoped_release release;
            p.fill_f32(a.data(), row, int(a.shape(0)), part);
          },
          "values"_a, "row"_a = 0, "part"_a = 0)
      .def(
          "fill_bf16",
          [](Packed& p, Halves2 a, int row, int part) {
            check_fill(p, a.shape(0), a.shape(1), row, part);
            nb::gil_scoped_release release;
            p.fill_bf16(a.data(), row, int(a.shape(0)), part);
          },
          "bits"_a, "row"_a = 0, "part"_a = 0)
      .def(
          "row",
          [](const Packed& p, int row, Floats2 out) {
            if (row < 0 || row >= p.n || out.shape(0) != 1 || int(out.shape(1)) != p.k)
              throw std::invalid_argument("row: outside the packed weight");
            p.row_f32(row, out.data());
          },
          "row"_a, "out"_a.noconvert());

  nb::class_<KVCache>(m, "KVCache")
      .def(
          "__init__",
          [](KVCache* self, int layers, int kv_heads, int head_dim, int blocks, bool f32, bool int8) {
            const CacheType type = int8 ? CacheType::kInt8 : f32 ? CacheType::kF32 : CacheType::kBF16;
            new (self) KVCache(layers, kv_heads, head_dim, blocks, type);
          },
          "layers"_a, "kv_heads"_a, "head_dim"_a, "blocks"_a, "f32"_a, "int8"_a = false)
      .def_ro("blocks", &KVCache::blocks)
      .def_ro("layers", &KVCache::layers)
      .def_prop_ro("nbytes", &KVCache::bytes)
      .def_prop_ro("bytes_per_block",
                   [](const KVCache& c) { return c.block_bytes() * size_t(c.kv_heads) * size_t(c.layers); })
      .def(
          "read",
          [](const KVCache& c, int layer, int block, int slot, Floats2 keys, Floats2 values) {
            if (layer < 0 || layer >= c.layers || block < 0 || block >= c.blocks || slot < 0 || slot >= kKeysPerBlock ||
                int(keys.size()) != c.kv_heads * c.head_dim || keys.size() != values.size())
              throw std::invalid_argument("read: outside the cache");
            c.read(layer, block, slot, keys.data(), values.data());
          },
          "layer"_a, "block"_a, "slot"_a, "keys"_a.noconvert(), "values"_a.noconvert())
      .def(
          "copy_rows",
          [](KVCache& c, int from, int to, int slot, int count) {
            c.check_copy(from, to, slot, count);
            nb::gil_scoped_release release;
            for (int layer = 0; layer < c.layers; ++layer)
              for (int head = 0; head < c.kv_heads; ++head) c.copy_rows(layer, head, from, to, slot, count);
          },
          "source"_a, "to"_a, "slot"_a, "count"_a);

  register_delta(m);
  nb::enum_<BufferKind>(m, "BufferKind")
      .value("F32", BufferKind::kF32)
      .value("ACT", BufferKind::kAct)
      .value("INPUT", BufferKind::kInput)
      .value("LOGITS", BufferKind::kLogits)
      .value("TAPS", BufferKind::kTaps);

  nb::enum_<Epilogue>(m, "Epilogue")
      .value("STORE", Epilogue::kStore)
      .value("ADD", Epilogue::kAdd)
      .value("SWIGLU", Epilogue::kSwiGLU)
      .value("GELU_TANH", Epilogue::kGeluTanh);

  nb::class_<PyPlan>(m, "Plan")
      .def(
          "__init__",
          [](PyPlan* self, std::shared_ptr<ThreadPool> pool, const std::string& isa, bool f32, int max_rows) {
            auto plan = std::make_unique<Plan>(pool, kernels_for(isa.c_str()), f32, max_rows);
            new (self) PyPlan{pool, std::move(plan), {}, {}, {}};
          },
          "pool"_a, "isa"_a, "f32"_a, "max_rows"_a)
      .def_prop_ro("max_rows", [](const PyPlan& p) { return p.plan->max_rows(); })
      .def_prop_ro("scratch_bytes", [](const PyPlan& p) { return p.plan->scratch_bytes(); })
      .def(
          "profile", [](PyPlan& p, bool on) { p.plan->profile(on); }, "on"_a)
      .def_prop_ro("op_times",
                   [](const PyPlan& p) {
                     static const char* const names[] = {"embed",   "rope",       "linear",    "qkv_post", "attention",
                                                         "copy",    "local_conv", "norm",      "gate",     "softcap",
                                                         "experts", "short_conv", "delta_rule"};
                     nb::list out;
                     const auto& ns = p.plan->op_ns();
                     for (size_t i = 0; i < ns.size(); ++i) {
                       const Op& op = p.plan->ops()[i];
                       out.append(nb::make_tuple(names[int(op.kind)], op.w ? op.w->n : 0, op.w ? op.w->k : 0, ns[i]));
                     }
                     return out;
                   })
      .def(
          "buffer", [](PyPlan& p, BufferKind kind, int width) { return p.plan->add_buffer(kind, width); }, "kind"_a,
          "width"_a)
      .def(
          "embed_packed",
          [](PyPlan& p, int out, nb::object weight, float scale) {
            const Packed& w = nb::cast<const Packed&>(weight);
            Op op{};
            op.kind = Op::kEmbed;
            op.out = out;
            op.w = &w;
            op.vocab = w.n;
            op.width = w.k;
            op.scale = scale;
            p.plan->add(op);
            p.keep.push_back(weight);
          },
          "out"_a, "weight"_a, "scale"_a = 1.0f)
      .def(
          "embed_table",
          [](PyPlan& p, int out, nb::object table, float scale) {
            Op op{};
            op.kind = Op::kEmbed;
            op.out = out;
            op.scale = scale;
            ConstFloats2 f;
            if (nb::try_cast(table, f, false)) {  // as it is: bits of halves would convert to numbers
              op.table = reinterpret_cast<const uint8_t*>(f.data());
              op.table_f32 = true;
              op.vocab = int(f.shape(0));
              op.width = int(f.shape(1));
            } else {
              const Halves2 h = nb::cast<Halves2>(table, false);
              op.table = reinterpret_cast<const uint8_t*>(h.data());
              op.vocab = int(h.shape(0));
              op.width = int(h.shape(1));
            }
            p.plan->add(op);
            p.keep.push_back(table);
          },
          "out"_a, "table"_a, "scale"_a = 1.0f)
      .def(
          "rope",
          [](PyPlan& p, int cos, int sin, Floats inv_freq, float scale) {
            Op op{};
            op.kind = Op::kRope;
            op.cos = cos;
            op.sin = sin;
            op.half = int(inv_freq.shape(0));
            op.inv_freq = p.vector(inv_freq, inv_freq.shape(0), "inv_freq");
            op.scale = scale;
            p.plan->add(op);
          },
          "cos"_a, "sin"_a, "inv_freq"_a, "scale"_a = 1.0f)
      .def(
          "linear",
          [](PyPlan& p, int in, int out, nb::object weight, Epilogue epilogue, std::optional<Floats> norm, float eps,
             bool convert, bool selected, std::optional<Floats> bias) {
            const Packed& w = nb::cast<const Packed&>(weight);
            Op op{};
            op.kind = Op::kLinear;
            op.in = in;
            op.out = out;
            op.w = &w;
            op.epilogue = epilogue;
            op.norm = p.vector(norm, size_t(w.k), "norm");
            op.convert = convert || norm.has_value();
            op.selected = selected;
            op.eps = eps;
            op.bias = p.vector(bias, size_t(w.n) * (w.gated ? 2 : 1), "bias");
            p.plan->add(op);
            p.keep.push_back(weight);
          },
          "input"_a, "out"_a, "weight"_a, "epilogue"_a = Epilogue::kStore, "norm"_a = nb::none(), "eps"_a = 0.0f,
          "convert"_a = false, "selected"_a = false, "bias"_a = nb::none())
      .def(
          "qkv_post",
          [](PyPlan& p, int in, int out, int cos, int sin, int layer, int heads, int kv_heads, int head_dim,
             int rotary_dim, bool interleaved, std::optional<Floats> q_norm, std::optional<Floats> k_norm, float eps) {
            Op op{};
            op.kind = Op::kQkvPost;
            op.in = in;
            op.out = out;
            op.cos = cos;
            op.sin = sin;
            op.half = rotary_dim / 2;
            op.layer = layer;
            op.heads = heads;
            op.kv_heads = kv_heads;
            op.head_dim = head_dim;
            op.interleaved = interleaved;
            op.q_norm = p.vector(q_norm, size_t(head_dim), "q_norm");
            op.k_norm = p.vector(k_norm, size_t(head_dim), "k_norm");
            op.eps = eps;
            p.plan->add(op);
          },
          "input"_a, "out"_a, "cos"_a, "sin"_a, "layer"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "rotary_dim"_a,
          "interleaved"_a = false, "q_norm"_a = nb::none(), "k_norm"_a = nb::none(), "eps"_a = 0.0f)
      .def(
          "attention",
          [](PyPlan& p, int in, int out, int layer, int heads, int kv_heads, int head_dim, float scale, bool causal,
             int window, float softcap, int first_key) {
            Op op{};
            op.kind = Op::kAttention;
            op.in = in;
            op.out = out;
            op.layer = layer;
            op.heads = heads;
            op.kv_heads = kv_heads;
            op.head_dim = head_dim;
            op.scale = scale;
            op.causal = causal;
            op.window = window;
            op.first_key = first_key;
            op.softcap = softcap;
            p.plan->add(op);
          },
          "input"_a, "out"_a, "layer"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "scale"_a, "causal"_a = true,
          "window"_a = 0, "softcap"_a = 0.0f, "first_key"_a = 0)
      .def(
          "copy",
          [](PyPlan& p, int in, int out, int width, int offset) {
            Op op{};
            op.kind = Op::kCopy;
            op.in = in;
            op.out = out;
            op.width = width;
            op.offset = offset;
            p.plan->add(op);
          },
          "input"_a, "out"_a, "width"_a, "offset"_a = 0)
      .def(
          "local_conv",
          [](PyPlan& p, int in, int out, int delta, ConstFloats2 base, int group, int offset, bool add,
             std::optional<Floats> norm, float eps) {
            Op op{};
            op.kind = Op::kLocalConv;
            op.in = in;
            op.out = out;
            op.delta = delta;
            op.taps = int(base.shape(0));
            op.width = int(base.shape(1));
            p.vectors.push_back(std::make_unique<std::vector<float>>(base.data(), base.data() + base.size()));
            op.conv = p.vectors.back()->data();
            op.group = group;
            op.offset = offset;
            op.add = add;
            op.norm = p.vector(norm, size_t(op.width), "norm");
            op.eps = eps;
            p.plan->add(op);
          },
          "input"_a, "out"_a, "delta"_a, "base"_a, "group"_a, "offset"_a = 0, "add"_a = false, "norm"_a = nb::none(),
          "eps"_a = 0.0f)
      .def(
          "norm",
          [](PyPlan& p, int in, int out, Floats weight, float eps, bool add) {
            Op op{};
            op.kind = Op::kNorm;
            op.in = in;
            op.out = out;
            op.width = int(weight.shape(0));
            op.norm = p.vector(weight, weight.shape(0), "weight");
            op.eps = eps;
            op.add = add;
            p.plan->add(op);
          },
          "input"_a, "out"_a, "weight"_a, "eps"_a, "add"_a = false)
      .def(
          "gate",
          [](PyPlan& p, int in, int out, int width, int offset) {
            Op op{};
            op.kind = Op::kGate;
            op.in = in;
            op.out = out;
            op.width = width;
            op.offset = offset;
            p.plan->add(op);
          },
          "input"_a, "out"_a, "width"_a, "offset"_a = 0)
      .def(
          "short_conv",
          [](PyPlan& p, int in, int rows, int layer, ConstFloats2 weight, int heads, int head_dim) {
            Op op{};
            op.kind = Op::kShortConv;
            op.in = in;
            op.rows = rows;
            op.heads = heads;
            op.head_dim = head_dim;
            op.taps = int(weight.shape(0));
            op.width = int(weight.shape(1));
            p.vectors.push_back(std::make_unique<std::vector<float>>(weight.data(), weight.data() + weight.size()));
            p.vectors.back()->resize(weight.size() + 32);
            op.delta_net.layer = layer;
            op.delta_net.conv = p.vectors.back()->data();
            p.plan->add(op);
          },
          "input"_a, "rows"_a, "layer"_a, "weight"_a, "heads"_a, "head_dim"_a)
      .def(
          "delta_rule",
          [](PyPlan& p, int in, int rows, int out, int layer, int channels, int kernel, Floats rate, Floats dt_bias,
             Floats norm, float eps) {
            Op op{};
            op.kind = Op::kDeltaRule;
            op.in = in;
            op.rows = rows;
            op.out = out;
            op.heads = int(rate.shape(0));
            op.head_dim = int(norm.shape(0));
            op.taps = kernel;
            op.width = channels;
            op.delta_net.layer = layer;
            op.delta_net.rate = p.vector(rate, rate.shape(0), "rate");
            op.delta_net.dt_bias = p.vector(dt_bias, rate.shape(0), "dt_bias");
            op.delta_net.norm = p.vector(norm, norm.shape(0), "norm");
            op.delta_net.eps = eps;
            p.plan->add(op);
          },
          "input"_a, "rows"_a, "out"_a, "layer"_a, "channels"_a, "kernel"_a, "rate"_a, "dt_bias"_a, "norm"_a, "eps"_a)
      .def(
          "softcap",
          [](PyPlan& p, int out, int width, float scale, float cap) {
            Op op{};
            op.kind = Op::kSoftcap;
            op.out = out;
            op.width = width;
            op.scale = scale;
            op.softcap = cap;
            p.plan->add(op);
          },
          "out"_a, "width"_a, "scale"_a = 1.0f, "cap"_a = 0.0f)
      .def(
          "experts",
          [](PyPlan& p, int in, int router, int out, nb::list gate_up, nb::list down, int top_k, bool normalise,
             Floats norm, float eps) {
            auto w = std::make_unique<ExpertWeights>();
            for (nb::handle h : gate_up) w->gate_up.push_back(&nb::cast<const Packed&>(h));
            for (nb::handle h : down) w->down.push_back(&nb::cast<const Packed&>(h));
            w->top_k = top_k;
            w->normalise = normalise;
            Op op{};
            op.kind = Op::kExperts;
            op.in = in;
            op.delta = router;
            op.out = out;
            op.norm = p.vector(norm, norm.shape(0), "norm");
            op.width = int(norm.shape(0));
            op.eps = eps;
            op.experts = w.get();
            p.plan->add(op);
            p.experts.push_back(std::move(w));
            p.keep.push_back(gate_up);
            p.keep.push_back(down);
          },
          "input"_a, "router"_a, "out"_a, "gate_up"_a, "down"_a, "top_k"_a, "normalise"_a, "norm"_a, "eps"_a)
      .def(
          "forward",
          [](PyPlan& p, KVCache* cache, const IntRow& positions, const IntRow& starts, std::optional<IntRow> tokens,
             std::optional<Ints2> tables, std::optional<IntRow> select, std::optional<Floats2> logits,
             std::optional<Floats2> taps, std::optional<ConstFloats2> input, StateCache* state,
             std::optional<Ints> slots, std::optional<Ints> journal, std::optional<Ints2> snapshots,
             std::optional<Ints2> mirrors, std::optional<Ints2> copies) {
            Batch b;
            b.rows = int(positions.size());
            b.sequences = int(starts.size()) - 1;
            b.positions = positions.data();
            b.starts = starts.data();
            std::vector<int32_t> none;
            if (tokens) {
              if (int(tokens->size()) != b.rows) throw std::invalid_argument("tokens: one per row");
              b.tokens = tokens->data();
            } else {
              none.assign(size_t(b.rows), 0);
              b.tokens = none.data();
            }
            if (tables) {
              if (int(tables->shape(0)) != b.sequences) throw std::invalid_argument("block_tables: one per sequence");
              b.tables = tables->data();
              b.table_width = int(tables->shape(1));
            }
            if (select) {
              b.select = select->data();
              b.selected = int(select->size());
              if (!logits || int(logits->shape(0)) < b.selected)
                throw std::invalid_argument("logits: one row per selected row");
            }
            if (logits) {
              b.logits = logits->data();
              b.ld_logits = logits->shape(1);
            }
            if (taps) {
              if (int(taps->shape(0)) < b.rows) throw std::invalid_argument("taps: one row per row");
              b.taps = taps->data();
              b.ld_taps = taps->shape(1);
            }
            if (input) {
              if (int(input->shape(0)) != b.rows) throw std::invalid_argument("input: one row per row");
              b.input = input->data();
              b.ld_input = input->shape(1);
            }
            if (state) {
              if (!slots || !journal || int(slots->shape(0)) != b.sequences || int(journal->shape(0)) != b.sequences)
                throw std::invalid_argument("slots, journal: one per sequence");
              b.state.cache = state;
              b.state.slots = slots->data();
              b.state.journal = journal->data();
              b.state.starts = b.starts;
              b.state.sequences = b.sequences;
              if (snapshots) {
                if (snapshots->shape(1) != 3) throw std::invalid_argument("snapshots: [n, 3]");
                b.state.snapshots = reinterpret_cast<const Snapshot*>(snapshots->data());
                b.state.num_snapshots = int(snapshots->shape(0));
              }
            }
            if (mirrors) {
              if (mirrors->shape(1) != 2) throw std::invalid_argument("mirrors: expected (row, sequence) pairs");
              b.mirrors = mirrors->data();
              b.mirrored = int(mirrors->shape(0));
            }
            if (copies) {
              if (copies->shape(1) != 4) throw std::invalid_argument("copies: expected (from, to, slot, count)");
              b.copies = copies->data();
              b.copied = int(copies->shape(0));
            }
            nb::gil_scoped_release release;
            p.plan->run(b, cache);
          },
          "cache"_a.none(), "positions"_a, "row_starts"_a, "tokens"_a = nb::none(), "block_tables"_a = nb::none(),
          "select"_a = nb::none(), "logits"_a.noconvert() = nb::none(), "taps"_a.noconvert() = nb::none(),
          "input"_a = nb::none(), "state"_a.none() = nb::none(), "slots"_a = nb::none(), "journal"_a = nb::none(),
          "snapshots"_a = nb::none(), "mirrors"_a = nb::none(), "copies"_a = nb::none());

  // Floors of design.md section 4. GB/s of the best of a plain and a prefetching read loop; operations per second.
  m.def(
      "measure_read_bandwidth",
      [](ThreadPool& pool, size_t bytes, const std::string& isa) {
        const Kernels& kernels = kernels_for(isa.c_str());
        nb::gil_scoped_release release;
        static std::unique_ptr<Region> region;
        if (!region || region->bytes() < bytes) {
          region = std::make_unique<Region>(bytes);
          std::memset(region->data(), 1, bytes);
        }
        double best = 0;
        for (const int prefetch : {0, 2048, 4096}) {
          const double start = seconds();
          pool.run([&](int tid) {
            const size_t part = bytes / size_t(pool.size()) / 4096 * 4096;
            kernels.read_loop(region->data() + part * size_t(tid), part, prefetch);
          });
          best = std::max(best, double(bytes) / (seconds() - start) / 1e9);
        }
        return best;
      },
      "pool"_a, "bytes"_a, "isa"_a = "");
  m.def(
      "measure_peak",
      [](ThreadPool& pool, const std::string& isa, bool f32, long iterations, const std::string& weights) {
        const Kernels& kernels = kernels_for(isa.c_str());
        const QuantKernels& quant = quant_kernels_for(kernels.name);
        const bool quantised = weights.rfind("int", 0) == 0, int4 = weights == "int4";
        nb::gil_scoped_release release;
        std::vector<double> done(size_t(pool.size()), 0.0);
        const double start = seconds();
        pool.run([&](int tid) {
          done[size_t(tid)] = quantised ? quant.peak_loop(iterations, int4) : kernels.peak_loop(iterations, f32);
        });
        const double elapsed = seconds() - start;
        double total = 0;
        for (const double d : done) total += d;
        return total / elapsed / 1e9;
      },
      "pool"_a, "isa"_a = "", "f32"_a = false, "iterations"_a = 2'000'000L, "weights"_a = "");

  register_sampling(m);
  register_dequant(m);
  register_markov_head(m);
  register_candidate_selector(m);
  register_draft_step(m);
  register_draft_tree(m);
  register_cost_curve(m);
  register_draft_lengths(m);
}
