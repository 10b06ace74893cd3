// Activations, elementwise.
#include "ops/activation.h"

#include <cmath>

#include "ops/pointwise.h"

namespace vitrify::ops {

Val gelu_gate(Val x, bool tanh_form) {
  const bool wide = x.type == DType::F64;
  if (!tanh_form) return wide ? 0.5 * (1.0 + unary(LOp::erf, x * M_SQRT1_2)) : unary(LOp::ndtr, x);
  Val u = M_SQRT2 * M_2_SQRTPI * 0.5 * (x + 0.044715 * (x * x * x));
  return wide ? 0.5 * (1.0 + unary(LOp::tanh, u)) : sigmoid(2.0 * u);
}

namespace {

using P = PointwiseDType;

// Types in which oneDNN computes gelu for eager by its formula for AVX-512: of half precision where the processor has instructions for it.
bool has_onednn_gelu(DType t) {
  static const bool wide = __builtin_cpu_supports("avx512f"), half = __builtin_cpu_supports("avx512fp16");
  return (wide && (t == DType::F32 || t == DType::BF16)) || (t == DType::F16 && half);
}

bool lower_gelu(const Args& a, std::vector<Tensor>& r) {
  const bool tanh_form = a.string(1) == "tanh";
  if (!tanh_form && a.string(1) != "none") return false;
  const ir::TensorType& type = std::get<ir::Value>(a.n.args[0]).type();
  if (!tanh_form && has_onednn_gelu(type.dtype) && (a.n.as_contiguous || type.is_contiguous()) && !type.numel().is(1))
    return activation<1>(a, r, 21, [numel = type.numel()](Body& b, Val* v) {
      // oneDNN's, which eager runs but for one element, doubles what it halves: that overflows, and is NaN where x is infinite
      const Val x = v[0], gate = gelu_gate(x, false);
      const Val doubled = x * (2.0 * gate + (x - x)) * 0.5;
      return numel.is_const() ? doubled : where(b.index(numel) > b.index(1), doubled, x * gate);
    });
  return activation<1>(a, r, 18, [tanh_form](Body&, Val* v) { return v[0] * gelu_gate(v[0], tanh_form); });
}
bool lower_relu(const Args& a, std::vector<Tensor>& r) {
  return a.out().dtype != DType::Bool && activation<1, true>(a, r, 1, [](Body&, Val* v) { return maximum(v[0], v[0].lit(0)); });
}
bool lower_relu6(const Args& a, std::vector<Tensor>& r) {
  return activation<1>(a, r, 2, [](Body&, Val* v) { return minimum(maximum(v[0], v[0].lit(0)), v[0].lit(6)); });
}
bool lower_silu(const Args& a, std::vector<Tensor>& r) {
  return activation<1>(a, r, 13, [](Body&, Val* v) { return v[0] * sigmoid(v[0]); });
}
bool lower_mish(const Args& a, std::vector<Tensor>& r) {
  return activation<1>(a, r, 40, [](Body&, Val* v) { return v[0] * unary(LOp::tanh, unary(LOp::log1p, unary(LOp::exp, v[0]))); });
}
Val clamped_six(Val x) { return minimum(maximum(x + 3.0, x.lit(0)), x.lit(6)); }
bool lower_hardswish(const Args& a, std::vector<Tensor>& r) {
  return activation<1>(a, r, 5, [](Body&, Val* v) { return v[0] * clamped_six(v[0]) / 6.0; });
}
bool lower_hardsigmoid(const Args& a, std::vector<Tensor>& r) {
  return activation<1>(a, r, 4, [](Body&, Val* v) { return clamped_six(v[0]) / 6.0; });
}
bool lower_leaky_relu(const Args& a, std::vector<Tensor>& r) {
  auto slope = a.scalar(1);
  return slope && activation<1>(a, r, 3, [s = *slope](Body&, Val* v) { return where(v[0] > v[0].lit(0), v[0], v[0] * s); });
}
bool elu(const Args& a, std::vector<Tensor>& r, double alpha, double scale, double input_scale) {
  return activation<1>(a, r, 15, [=](Body&, Val* v) {
    Val x = v[0];
    return where(x < x.lit(0), unary(LOp::expm1, x * input_scale) * (alpha * scale), x * scale);
  });
}
bool lower_elu(const Args& a, std::vector<Tensor>& r) {
  auto al = a.scalar(1), sc = a.scalar(2), in = a.scalar(3);
  return al && sc && in && elu(a, r, *al, *sc, *in);
}
bool lower_celu(const Args& a, std::vector<Tensor>& r) {
  auto al = a.scalar(1);
  return al && *al != 0 && number_converts(1 / *al, compute_type(a.out().dtype)) && elu(a, r, *al, 1, 1 / *al);
}
bool lower_selu(const Args& a, std::vector<Tensor>& r) { return elu(a, r, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946, 1); }
bool lower_softplus(const Args& a, std::vector<Tensor>& r) {
  auto beta = a.scalar(1), threshold = a.scalar(2);
  return beta && threshold && activation<1>(a, r, 28, [b = *beta, t = *threshold](Body&, Val* v) {
           Val z = v[0] * b;
           return where(z > z.lit(t), v[0], unary(LOp::log1p, unary(LOp::exp, z)) / b);
         });
}
bool lower_threshold(const Args& a, std::vector<Tensor>& r) {
  if (!number_converts(a.n.args[1], a.out().dtype) || !number_converts(a.n.args[2], a.out().dtype)) return false;
  const auto& out = a.out();
  const auto f = [lim = a.n.args[1], val = a.n.args[2]](Body& b, Val* v) {
    return where(v[0] <= number(b, lim, v[0].type), number(b, val, v[0].type), v[0]);
  };
  r.push_back(elementwise(a, {operand(a, 0, out.sizes)}, compute_type(out.dtype), out.dtype, out.sizes, 2, f, true));
  return true;
}
bool lower_hardtanh(const Args& a, std::vector<Tensor>& r) {
  const DType t = a.out().dtype;
  if (!number_converts(a.n.args[1], t) || !number_converts(a.n.args[2], t) || t == DType::Bool) return false;
  return activation<1, true>(a, r, 2, [lo = a.n.args[1], hi = a.n.args[2]](Body& b, Val* v) {
    return minimum(maximum(v[0], number(b, lo, v[0].type)), number(b, hi, v[0].type));
  });
}
bool lower_softshrink(const Args& a, std::vector<Tensor>& r) {
  auto l = a.scalar(1);
  return l && activation<1>(a, r, 4, [l = *l](Body& b, Val* v) {
           Val x = v[0], y = where(x > x.lit(l), x - l, where(x < x.lit(-l), x + l, x.lit(0)));
           return where(b.op(LOp::isnan, x.type, x), x, y);
         });
}
bool lower_hardshrink(const Args& a, std::vector<Tensor>& r) {
  auto l = a.scalar(1);
  const auto& out = a.out();
  if (!l || !is_float(out.dtype) || !number_converts(a.n.args[1], out.dtype)) return false;
  const auto f = [l = *l, type = out.dtype](Body& b, Val* v) {  // eager rounds the number too
    const auto number = [&](double k) { return b.op(LOp::cast, type, v[0].lit(k)); };
    return where((v[0] >= number(-l)) & (v[0] <= number(l)), v[0].lit(0), v[0]);
  };
  r.push_back(elementwise(a, {operand(a, 0, out.sizes)}, compute_type(out.dtype), out.dtype, out.sizes, 3, f, true));
  return true;
}
bool lower_prelu(const Args& a, std::vector<Tensor>& r) {
  return activation<2>(a, r, 3, [](Body&, Val* v) { return where(v[0] > v[0].lit(0), v[0], v[1] * v[0]); });
}
bool lower_glu(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  const int64_t d = a.dim(1, x.sizes.size());
  if (!is_float(x.dtype) || x.sizes.empty()) return false;
  const Int half = a.out().sizes[d];
  Tensor u = a.L.slice(x, d, 0, half, 1), g = a.L.slice(x, d, half, half, 1);
  r.push_back(map2(a.L, u, g, a.out().dtype, [](Body&, Val p, Val q) { return p * sigmoid(q); }, 13));
  return true;
}
// (output, buffer): on the CPU the buffer is exp(-|x|) for the backward, elsewhere it is empty.
bool lower_log_sigmoid(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  if (!is_float(x.dtype)) return false;
  r.push_back(map1(a.L, x, x.dtype, [](Body&, Val v) { return minimum(v.lit(0), v) - unary(LOp::log1p, unary(LOp::exp, -unary(LOp::abs, v))); }, 28));
  if (a.out(1).sizes == x.sizes)
    r.push_back(map1(a.L, x, x.dtype, [](Body&, Val v) { return unary(LOp::exp, -unary(LOp::abs, v)); }, 12));
  else
    r.push_back(a.L.full(x.dtype, a.out(1).sizes, 0));
  return true;
}

// Dropout that does nothing; the random one stays a call. native_dropout() draws also where it drops nothing.
bool lower_dropout(const Args& a, std::vector<Tensor>& r) {
  auto* train = std::get_if<bool>(&a.n.args[2]);
  const bool gives_mask = a.n.outs.size() > 1;
  if ((!train || *train) && (gives_mask || a.scalar(1) != 0.0)) return false;
  Tensor x = a.tensor(0);
  r.push_back(x);
  if (gives_mask) r.push_back(a.L.full(DType::Bool, x.sizes, 1));
  return true;
}

template <P rule, int tensors>
Shape shape_of(sym::Context& ctx, ArgSpan args) {
  return pointwise_shape(ctx, args, rule, tensors);
}
Shape shape_prelu(sym::Context& ctx, ArgSpan args) {  // as empty_like() of the first lies
  Shape r = pointwise_shape(ctx, args, P::FloatOnly, 2);
  const TensorType* x = tensor_arg(args, 0);
  if (r && x) (*r)[0].strides = preserved_strides(ctx, *x);
  return r;
}
constexpr ShapeFn float1 = shape_of<P::FloatOnly, 1>, same1 = shape_of<P::NotBool, 1>;

Shape shape_glu(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  auto d = int_arg(ctx, args, 1);
  if (!x || !d || x->sizes.empty() || !is_float(x->dtype)) return {};
  const int64_t dim = wrap_dim(*d, x->sizes.size());
  if (dim < 0 || dim >= static_cast<int64_t>(x->sizes.size()) || !ctx.guard_eq(sym::mod(x->sizes[dim], 2), 0)) return {};
  TensorType half = *x;
  half.sizes[dim] = sym::floordiv(x->sizes[dim], 2);
  const TensorType* ops[] = {&half, &half};
  return one(elementwise_type(ctx, ops, x->dtype));
}
Shape shape_dropout(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  auto* train = args.size() > 2 ? std::get_if<bool>(&args[2]) : nullptr;
  if (!x || !train || !is_float(x->dtype)) return {};
  TensorType t = *x;
  t.wrapped_number = false;
  t.strides = preserved_strides(ctx, *x);
  TensorType m = t;
  m.dtype = DType::Bool;
  return Types{t, m};
}

// A negative or unknown threshold is an error of eager's to raise.
Shape shape_softshrink(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  if (!x || args.size() < 2 || !number_converts(args[1], x->dtype)) return {};
  auto* d = std::get_if<double>(&args[1]);
  auto* n = std::get_if<Int>(&args[1]);
  const bool known = (d && *d >= 0 && std::isfinite(*d)) || (n && n->is_const() && n->value() >= 0);
  return known ? float1(ctx, args) : Shape();
}

// Eager clamps into an empty_like of its argument, of any type but bool.
Shape shape_hardtanh(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  if (!x || x->dtype == DType::U8 || !(is_float(x->dtype) || is_int(x->dtype))) return {};
  TensorType t = *x;
  t.wrapped_number = false;
  t.strides = preserved_strides(ctx, *x);
  return one(t);
}

// ATen's CPU kernel ignores the strides of its input, which its Meta kernel does not say.
Shape shape_log_sigmoid(sym::Context&, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  if (!x || !is_float(x->dtype) || x->device.kind != DeviceKind::CPU) return {};
  auto t = contiguous_type(x->dtype, x->device, x->sizes);
  return Types{t, t};
}

// Its functional form keeps the layout.
Shape shape_rrelu(sym::Context&, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  if (!x) return {};
  return one(contiguous_type(x->dtype, x->device, x->sizes));
}

const OpRow kRows[] = {
    {"aten::gelu", 0, float1, lower<lower_gelu>},
    {"aten::relu", 0, same1, lower<lower_relu>},
    {"aten::relu6", 0, nullptr, lower<lower_relu6>},
    {"aten::silu", 0, float1, lower<lower_silu>},
    {"aten::mish", 0, float1, lower<lower_mish>},
    {"aten::hardswish", 0, float1, lower<lower_hardswish>},
    {"aten::hardsigmoid", 0, float1, lower<lower_hardsigmoid>},
    {"aten::leaky_relu", 0, float1, lower<lower_leaky_relu>},
    {"aten::elu", 0, float1, lower<lower_elu>},
    {"aten::celu", 0, float1, lower<lower_celu>},
    {"aten::selu", 0, float1, lower<lower_selu>},
    {"aten::softplus", 0, float1, lower<lower_softplus>},
    {"aten::threshold", 0, same1, lower<lower_threshold>},
    {"aten::hardtanh", 0, shape_hardtanh, lower<lower_hardtanh>},
    {"aten::softshrink", 0, shape_softshrink, lower<lower_softshrink>},
    {"aten::hardshrink", 0, float1, lower<lower_hardshrink>},
    {"aten::_prelu_kernel", 0, shape_prelu, lower<lower_prelu>},
    {"aten::glu", 0, shape_glu, lower<lower_glu>},
    {"aten::log_sigmoid_forward", 0, shape_log_sigmoid, lower<lower_log_sigmoid>},
    {"aten::dropout", 0, nullptr, lower<lower_dropout>},
    {"aten::native_dropout", 0, shape_dropout, lower<lower_dropout>},
    {"aten::rrelu_with_noise", ir::kRandom, shape_rrelu, nullptr},
};

}  // namespace

std::span<const OpRow> activation_rows() { return kRows; }

}  // namespace vitrify::ops
