// Gradients of activations, elementwise.
#include <cmath>

#include "ops/activation.h"
#include "ops/pointwise.h"

namespace vitrify::ops {
namespace {

using P = PointwiseDType;

// A comparison with NaN fails: the order of each `where` below is that of ATen's vectors, from which the ends of its loops differ at NaN.

bool lower_gelu_backward(const Args& a, std::vector<Tensor>& r) {
  const bool tanh_form = a.string(2) == "tanh";
  return activation<2>(a, r, 40, [tanh_form](Body&, Val* v) {
    Val g = v[0], x = v[1], s = gelu_gate(x, tanh_form);
    if (!tanh_form) {
      Val pdf = unary(LOp::exp, -0.5 * (x * x)) * (M_2_SQRTPI * M_SQRT1_2 * 0.5);
      return g * (s + x * pdf);
    }
    const double beta = M_SQRT2 * M_2_SQRTPI * 0.5, kappa = 0.044715;
    Val d_inner = beta * (1.0 + 3 * kappa * (x * x));
    if (x.type != DType::F64) return g * (s + 2.0 * (x * (s * (1.0 - s))) * d_inner);
    Val th = unary(LOp::tanh, beta * (x + kappa * (x * x * x)));
    return g * (s + 0.5 * x * (1.0 - th * th) * d_inner);
  });
}
bool lower_silu_backward(const Args& a, std::vector<Tensor>& r) {
  return activation<2>(a, r, 16, [](Body&, Val* v) {
    Val s = sigmoid(v[1]);
    return v[0] * s * (1.0 + v[1] * (1.0 - s));
  });
}
bool lower_mish_backward(const Args& a, std::vector<Tensor>& r) {
  return activation<2>(a, r, 50, [](Body&, Val* v) {
    Val x = v[1], s = sigmoid(x), t = unary(LOp::tanh, unary(LOp::log1p, unary(LOp::exp, x)));
    return v[0] * (t + x * s * (1.0 - t * t));
  });
}
bool lower_sigmoid_backward(const Args& a, std::vector<Tensor>& r) {
  return activation<2>(a, r, 3, [](Body&, Val* v) { return v[0] * (1.0 - v[1]) * v[1]; });
}
bool lower_tanh_backward(const Args& a, std::vector<Tensor>& r) {
  return activation<2>(a, r, 3, [](Body&, Val* v) { return v[0] * (1.0 - v[1] * v[1]); });
}
bool lower_threshold_backward(const Args& a, std::vector<Tensor>& r) {
  if (!number_fits(a.n.args[2], compute_type(a.out().dtype))) return false;
  return activation<2, true>(a, r, 2, [lim = a.n.args[2]](Body& b, Val* v) { return where(v[1] <= number(b, lim, v[1].type), v[0].lit(0), v[0]); });
}
bool lower_leaky_relu_backward(const Args& a, std::vector<Tensor>& r) {
  auto slope = a.scalar(2);
  return slope && activation<2>(a, r, 3, [s = *slope](Body&, Val* v) { return where(v[1] > v[1].lit(0), v[0], v[0] * s); });
}
bool lower_hardtanh_backward(const Args& a, std::vector<Tensor>& r) {
  auto lo = a.scalar(2), hi = a.scalar(3);
  return lo && hi &&
         activation<2>(a, r, 3, [l = *lo, h = *hi](Body&, Val* v) { return where((v[1] > v[1].lit(l)) & (v[1] < v[1].lit(h)), v[0], v[0].lit(0)); });
}
bool lower_hardswish_backward(const Args& a, std::vector<Tensor>& r) {
  return activation<2>(a, r, 6, [](Body&, Val* v) {
    Val g = v[0], x = v[1];
    return where(x <= x.lit(-3), x.lit(0), where(x >= x.lit(3), g, g * (x / 3.0 + 0.5)));
  });
}
bool lower_hardsigmoid_backward(const Args& a, std::vector<Tensor>& r) {
  constexpr double kSixth = 1.0F / 6.0F;  // as ATen has it, for doubles too
  return activation<2>(a, r, 4, [](Body&, Val* v) { return where((v[1] > v[1].lit(-3)) & (v[1] < v[1].lit(3)), v[0] * kSixth, v[0].lit(0)); });
}
bool lower_elu_backward(const Args& a, std::vector<Tensor>& r) {
  auto al = a.scalar(1), sc = a.scalar(2), in = a.scalar(3);
  if (!al || !sc || !in) return false;
  const double neg = *al * *sc, pos = *sc, input = *in;
  return activation_at(a, r, {0, 5}, 16, [=, is_result = a.boolean(4)](Body&, Val* v) {
    Val g = v[0], x = v[1];
    Val below = is_result ? g * input * (x + neg) : g * (input * neg) * unary(LOp::exp, x * input);
    return where(x > x.lit(0), g * pos, below);
  });
}
bool lower_softplus_backward(const Args& a, std::vector<Tensor>& r) {
  auto beta = a.scalar(2), threshold = a.scalar(3);
  return beta && threshold && activation<2>(a, r, 14, [b = *beta, t = *threshold](Body&, Val* v) {
           Val z = v[1] * b, e = unary(LOp::exp, z);  // which overflows below large thresholds
           return where(z > z.lit(t), v[0], v[0] * e / (e + 1.0));
         });
}
bool lower_log_sigmoid_backward(const Args& a, std::vector<Tensor>& r) {
  // Where the forward has kept exp(-|x|), that counts: x may have been written since.
  if (a.tensor(2).sizes == a.tensor(1).sizes)
    return activation_at(a, r, {0, 1, 2}, 10, [](Body&, Val* v) {
      Val part = v[2] / (1.0 + v[2]);
      return v[0] * where(v[1] < v[1].lit(0), 1.0 - part, part);
    });
  return activation<2>(a, r, 14, [](Body&, Val* v) { return v[0] * sigmoid(-v[1]); });
}
bool lower_shrink_backward(const Args& a, std::vector<Tensor>& r) {
  auto l = a.scalar(2);
  if (!l || !number_converts(a.n.args[2], a.out().dtype)) return false;
  return activation<2>(a, r, 3, [l = *l](Body&, Val* v) { return where((v[1] < v[1].lit(-l)) | (v[1] > v[1].lit(l)), v[0], v[0].lit(0)); });
}
bool lower_dropout_backward(const Args& a, std::vector<Tensor>& r) {
  auto scale = a.scalar(2);
  return scale && activation<2>(a, r, 2, [s = *scale](Body&, Val* v) { return v[0] * v[1] * s; });
}
bool lower_prelu_backward(const Args& a, std::vector<Tensor>& r) {
  const auto& out = a.out();
  if (!is_float(out.dtype)) return false;
  const DType t = compute_type(out.dtype);
  r.push_back(elementwise(a, {operand(a, 0, out.sizes), operand(a, 1, out.sizes), operand(a, 2, out.sizes)}, t, out.dtype, out.sizes, 2,
                          [](Body&, Val* v) { return where(v[1] > v[1].lit(0), v[0], v[2] * v[0]); }));
  r.push_back(elementwise(a, {operand(a, 0, out.sizes), operand(a, 1, out.sizes)}, t, a.out(1).dtype, out.sizes, 2,
                          [](Body&, Val* v) { return where(v[1] > v[1].lit(0), v[0].lit(0), v[0] * v[1]); }));
  return true;
}
bool lower_glu_backward(const Args& a, std::vector<Tensor>& r) {
  Tensor g = a.tensor(0), x = a.tensor(1);
  if (!is_float(x.dtype)) return false;
  const int64_t d = a.dim(2, x.sizes.size());
  const Int half = g.sizes[d];
  Tensor u = a.L.slice(x, d, 0, half, 1), s = map1(a.L, a.L.slice(x, d, half, half, 1), x.dtype, [](Body&, Val v) { return sigmoid(v); }, 12);
  Tensor first = map2(a.L, g, s, x.dtype, [](Body&, Val p, Val q) { return p * q; });
  Tensor second = a.L.map(
      x.dtype, g.sizes,
      [=](Body& b, const Index& i) {
        Val q = s.at(b, i);
        return g.at(b, i) * u.at(b, i) * (1.0 - q) * q;
      },
      g.cost + u.cost + s.cost + 4, 3);
  r.push_back(a.L.concat({first, second}, d));
  return true;
}

Shape float2(sym::Context& ctx, ArgSpan args) { return pointwise_shape(ctx, args, P::FloatOnly, 2); }

// The input leads: its strides are the result's.
template <P rule>
Shape input_first(sym::Context& ctx, ArgSpan args) {
  if (args.size() < 2) return {};
  const ir::Arg pair[] = {args[1], args[0]};
  return pointwise_shape(ctx, pair, rule, 2);
}

// What was computed in place tells its input by the sign of the result: ATen raises where it does not.
bool loses_sign(const ir::Arg& slope, const ir::Arg& is_result) {
  const bool* in_place = std::get_if<bool>(&is_result);
  if (in_place && !*in_place) return false;
  if (auto* d = std::get_if<double>(&slope)) return *d < 0;
  auto* i = std::get_if<sym::Int>(&slope);
  return !i || !i->is_const() || i->value() < 0;
}

Shape shape_leaky_relu_backward(sym::Context& ctx, ArgSpan args) {
  if (args.size() < 4 || loses_sign(args[2], args[3])) return {};
  return input_first<P::FloatOnly>(ctx, args);
}

Shape shape_elu_backward(sym::Context& ctx, ArgSpan args) {
  if (args.size() < 6 || loses_sign(args[1], args[4])) return {};
  const ir::Arg pair[] = {args[0], args[5]};
  return pointwise_shape(ctx, pair, P::FloatOnly, 2);
}

Shape shape_prelu_backward(sym::Context& ctx, ArgSpan args) {  // gradient, self, weight: both results are of all their sizes
  const TensorType *g = tensor_arg(args, 0), *x = tensor_arg(args, 1), *w = tensor_arg(args, 2);
  if (!g || !x || !w || !is_float(x->dtype) || g->dtype != x->dtype || w->dtype != x->dtype) return {};
  const TensorType* operands[] = {x, w, g};
  auto t = elementwise_type(ctx, operands, x->dtype);
  if (!t) return {};
  return Types{*t, *t};
}
Shape shape_glu_backward(sym::Context& ctx, ArgSpan args) {  // gradient, self, dim
  const TensorType *g = tensor_arg(args, 0), *x = tensor_arg(args, 1);
  if (!g || !x || !is_float(x->dtype) || g->dtype != x->dtype || x->sizes.empty() || g->sizes.size() != x->sizes.size()) return {};
  const auto dim = dims_arg(ctx, args, 2, x->sizes.size());
  if (!dim || dim->size() != 1) return {};
  for (size_t d = 0; d < x->sizes.size(); ++d)
    if (!ctx.guard_eq(static_cast<int64_t>(d) == (*dim)[0] ? g->sizes[d] * 2 : g->sizes[d], x->sizes[d])) return {};
  return one(contiguous_type(x->dtype, x->device, x->sizes));
}

const OpRow kRows[] = {
    {"aten::gelu_backward", 0, float2, lower<lower_gelu_backward>},
    {"aten::silu_backward", 0, float2, lower<lower_silu_backward>},
    {"aten::mish_backward", 0, float2, lower<lower_mish_backward>},
    {"aten::sigmoid_backward", 0, float2, lower<lower_sigmoid_backward>},
    {"aten::tanh_backward", 0, float2, lower<lower_tanh_backward>},
    {"aten::threshold_backward", 0, input_first<P::Promote>, lower<lower_threshold_backward>},
    {"aten::leaky_relu_backward", 0, shape_leaky_relu_backward, lower<lower_leaky_relu_backward>},
    {"aten::hardtanh_backward", 0, float2, lower<lower_hardtanh_backward>},
    {"aten::hardswish_backward", 0, float2, lower<lower_hardswish_backward>},
    {"aten::hardsigmoid_backward", 0, float2, lower<lower_hardsigmoid_backward>},
    {"aten::elu_backward", 0, shape_elu_backward, lower<lower_elu_backward>},
    {"aten::softplus_backward", 0, float2, lower<lower_softplus_backward>},
    {"aten::log_sigmoid_backward", 0, nullptr, lower<lower_log_sigmoid_backward>},
    {"aten::hardshrink_backward", 0, float2, lower<lower_shrink_backward>},
    {"aten::softshrink_backward", 0, float2, lower<lower_shrink_backward>},
    {"aten::native_dropout_backward", 0, nullptr, lower<lower_dropout_backward>},
    {"aten::_prelu_kernel_backward", 0, shape_prelu_backward, lower<lower_prelu_backward>},
    {"aten::glu_backward", 0, shape_glu_backward, lower<lower_glu_backward>},
};

}  // namespace

std::span<const OpRow> activation_gradient_rows() { return kRows; }

}  // namespace vitrify::ops
