// Losses. Reduction: 0 none, 1 mean, 2 sum.
#include "ir/faults.h"
#include "ops/gradient_shapes.h"
#include "ops/norm.h"

namespace vitrify::ops {
namespace {

// Of the first `count` operands those that there are. Eager raises for others, or rounds between its ops: that is left to it.
bool all_of_type(const Args& a, size_t count, DType type) {
  for (size_t i = 0; i < count; ++i)
    if (a.is_tensor(i) && a.tensor(i).dtype != type) return false;
  return true;
}

Tensor reduced_loss(const Args& a, const Tensor& x, int64_t reduction) {
  const DType out = a.out().dtype, t = compute_type(out);
  if (reduction == 0 || x.sizes.empty()) return as_type(a.L, x, out);
  auto dims = dims_from(0, x.sizes.size());
  Tensor s = reduce_sum(a.L, x, dims, false, t, t);
  if (reduction == 2) return as_type(a.L, s, out);
  return map1(a.L, s, out, [n = product(x.sizes, dims)](Body& b, Val v) { return v / numel_as(b, n, v.type); }, 2);
}

Dims broadcast_of(const Args& a) {
  const auto &x = a.tensor(0).sizes, &y = a.tensor(1).sizes;
  if (x.size() == y.size() && x == y) return x;
  Dims r;
  return broadcast_sizes(a.L.ctx(), x, y, r) ? r : Dims{};
}

template <class F>
bool pair_loss(const Args& a, std::vector<Tensor>& r, F f) {
  const DType out = a.out().dtype;
  if (!is_float(out) || a.constant_int(2) < 0 || a.constant_int(2) > 2) return false;
  const Dims sizes = broadcast_of(a);
  if (sizes.empty() && !(a.tensor(0).sizes.empty() && a.tensor(1).sizes.empty())) return false;
  const DType t = compute_type(out);
  Tensor x = elementwise(a, {operand(a, 0, sizes), operand(a, 1, sizes)}, t, t, sizes, 4, [f](Body&, Val* v) { return f(v[0] - v[1]); });
  r.push_back(reduced_loss(a, x, a.constant_int(2)));
  return true;
}
bool lower_mse(const Args& a, std::vector<Tensor>& r) {
  return pair_loss(a, r, [](Val d) { return d * d; });
}
bool lower_l1(const Args& a, std::vector<Tensor>& r) {
  return pair_loss(a, r, [](Val d) { return unary(LOp::abs, d); });
}
bool lower_smooth_l1(const Args& a, std::vector<Tensor>& r) {
  const double beta = *a.scalar(3);
  return beta >= 0 && pair_loss(a, r, [beta](Val d) {  // eager raises
           Val z = unary(LOp::abs, d);
           return beta == 0 ? z : where(z < z.lit(beta), 0.5 * z * z / beta, z - 0.5 * beta);
         });
}
bool lower_huber(const Args& a, std::vector<Tensor>& r) {
  if (!all_of_type(a, 2, a.out().dtype)) return false;
  const double delta = *a.scalar(3);
  return pair_loss(a, r, [delta](Val d) {
    Val z = unary(LOp::abs, d);
    return where(z <= z.lit(delta), 0.5 * z * z, delta * (z - 0.5 * delta));
  });
}

template <class F>
bool pair_loss_backward(const Args& a, std::vector<Tensor>& r, F f) {
  const auto& out = a.out();
  if (!is_float(out.dtype) || !all_of_type(a, 3, out.dtype)) return false;
  const bool mean = a.constant_int(3) == 1;
  Int n = 1;
  for (auto& s : a.tensor(1).sizes) n = n * s;
  r.push_back(elementwise(a, {operand(a, 0, out.sizes), operand(a, 1, out.sizes), operand(a, 2, out.sizes)}, compute_type(out.dtype), out.dtype,
                          out.sizes, 5, [f, mean, n](Body& b, Val* v) {
                            Val g = f(v[1] - v[2], v[0]);
                            return mean ? g / numel_as(b, n, g.type) : g;
                          }));
  return true;
}
bool lower_mse_backward(const Args& a, std::vector<Tensor>& r) {
  return pair_loss_backward(a, r, [](Val d, Val g) { return 2.0 * d * g; });
}
bool lower_smooth_l1_backward(const Args& a, std::vector<Tensor>& r) {
  const double beta = *a.scalar(4);
  return pair_loss_backward(a, r, [beta](Val d, Val g) {
    Val flat = where(d < d.lit(0), -g, where(d > d.lit(0), g, g.lit(0)));
    return where(d <= d.lit(-beta), -g, where(d >= d.lit(beta), g, beta == 0 ? flat : d * g / beta));
  });
}
bool lower_huber_backward(const Args& a, std::vector<Tensor>& r) {
  const double delta = *a.scalar(4);
  return pair_loss_backward(a, r, [delta](Val d, Val g) { return where(d < d.lit(-delta), -g * delta, where(d > d.lit(delta), g * delta, d * g)); });
}

bool lower_bce_with_logits(const Args& a, std::vector<Tensor>& r) {
  const DType out = a.out().dtype, t = compute_type(out);
  Tensor x = a.tensor(0), y = a.tensor(1);
  if (!is_float(out) || !(x.sizes == y.sizes) || !all_of_type(a, 4, out)) return false;
  Tensor w = a.is_tensor(2) ? broadcast(a.L, a.tensor(2), x.sizes) : Tensor{}, p = a.is_tensor(3) ? broadcast(a.L, a.tensor(3), x.sizes) : Tensor{};
  Tensor loss = a.L.map(
      t, x.sizes,
      [=](Body& b, const Index& i) {
        Val v = cast(x.at(b, i), t), target = cast(y.at(b, i), t);
        Val log_sigmoid = minimum(v.lit(0), v) - unary(LOp::log1p, unary(LOp::exp, -unary(LOp::abs, v)));
        Val l = (1.0 - target) * v;
        if (p)
          l = l - ((cast(p.at(b, i), t) - 1.0) * target + 1.0) * log_sigmoid;
        else
          l = l - log_sigmoid;
        return w ? l * cast(w.at(b, i), t) : l;
      },
      x.cost + y.cost + 34, x.reads + y.reads + 2);
  r.push_back(reduced_loss(a, loss, a.constant_int(4)));
  return true;
}

// The class of one sample: faults unless it is ignored or in range.
Val checked_target(Body& b, Val t, Int ignore, Int classes, Val& kept) {
  t = cast(t, DType::I64);
  kept = ne(t, b.index(ignore));
  Val safe = where(kept, t, t.lit(0));
  return b.check_index(safe, classes);
}

// (loss, total weight) for [C], [N, C] and, with 2d, [N, C, H, W] log probabilities.
bool lower_nll(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0), target = a.tensor(1), w = a.is_tensor(2) ? a.tensor(2) : Tensor{};
  const int64_t reduction = a.constant_int(3);
  const Int ignore = a.integer(4);
  if (!is_float(x.dtype) || x.sizes.empty() || (target.dtype != DType::I64 && target.dtype != DType::U8)) return false;
  if (w && w.dtype != x.dtype) return false;  // eager raises
  if (known_empty(x.sizes)) return false;     // as for a class that is none
  const size_t c = x.sizes.size() == 1 ? 0 : 1;
  const Int classes = x.sizes[c];
  const DType t = compute_type(x.dtype);
  auto picked = [=](bool weight_only) {
    return [=](Body& b, const Index& i) {
      Val kept;
      Val k = checked_target(b, target.at(b, x.sizes.size() == 1 && !target.sizes.empty() ? Index{Int(0)} : i), ignore, classes, kept);
      const Int at = b.indirect(k, classes);
      Val weight = w ? cast(w.at(b, Index{at}), t) : b.constant(t, 1);
      Val v = weight;
      if (!weight_only) {
        Index j = x.sizes.size() == 1 ? Index{} : i;
        j.insert(j.begin() + static_cast<int64_t>(c), at);
        v = -(cast(x.at(b, j), t) * weight);
      }
      return where(kept, v, v.lit(0));
    };
  };
  const Dims samples = x.sizes.size() == 1 ? Dims{} : target.sizes;
  const DType out = a.out().dtype;
  if (reduction == 0) {
    if (a.L.uses({const_cast<ir::Node*>(&a.n), 1}) > 0) return false;
    r.push_back(a.L.map(out, a.out().sizes, picked(false), x.cost + 8, 2));
    r.push_back(a.L.full(out, a.out(1).sizes, 0));
    return true;
  }
  Tensor losses = a.L.map(t, samples, picked(false), x.cost + 8, 2), weights = a.L.map(t, samples, picked(true), 6, 1);
  auto total = [&](const Tensor& v) { return v.sizes.empty() ? v : reduce_sum(a.L, v, dims_from(0, v.sizes.size()), false, t, t); };
  Tensor loss = total(losses), weight = total(weights);
  r.push_back(reduction == 1 ? map2(a.L, loss, weight, out, [](Body&, Val p, Val q) { return p / q; }, 2) : as_type(a.L, loss, out));
  r.push_back(as_type(a.L, weight, a.out(1).dtype));
  return true;
}

// Gradient of the picked class, zero elsewhere.
bool lower_nll_backward(const Args& a, std::vector<Tensor>& r) {
  Tensor g = a.tensor(0), x = a.tensor(1), target = a.tensor(2), w = a.is_tensor(3) ? a.tensor(3) : Tensor{}, total = a.tensor(6);
  const int64_t reduction = a.constant_int(4);
  const Int ignore = a.integer(5);
  if (!is_float(x.dtype) || x.sizes.size() < 2 || target.dtype != DType::I64 || g.dtype != x.dtype || (w && w.dtype != x.dtype)) return false;
  const DType t = compute_type(x.dtype), out = a.out().dtype;
  r.push_back(a.L.map(
      out, x.sizes,
      [=](Body& b, const Index& i) {
        Index sample = i;
        sample.erase(sample.begin() + 1);
        Val k = target.at(b, sample);
        Val hit = eq(k, b.index(i[1])) & ne(k, b.index(ignore));
        Val v = -cast(g.at(b, reduction == 0 ? sample : Index{}), t);
        if (w) v = v * cast(w.at(b, Index{i[1]}), t);
        if (reduction == 1) v = v / cast(total.at(b, {}), t);
        return cast(where(hit, v, v.lit(0)), compute_type(out));
      },
      8, 4));
  return true;
}

Shape shape_pair_loss(sym::Context& ctx, ArgSpan args) {
  const TensorType *x = tensor_arg(args, 0), *y = tensor_arg(args, 1);
  auto reduction = int_arg(ctx, args, 2);
  if (!x || !y || !reduction || *reduction < 0 || *reduction > 2) return {};  // eager raises
  const DType d = result_type({&args[0], &args[1]});
  if (!is_float(d)) return {};
  const TensorType* ops[] = {x, y};
  auto t = elementwise_type(ctx, ops, d, d);
  if (!t || *reduction == 0) return one(t);
  return one(contiguous_type(d, t->device, {}));
}
Shape shape_smooth_l1(sym::Context& ctx, ArgSpan args) {
  auto* beta = args.size() > 3 ? std::get_if<double>(&args[3]) : nullptr;
  return beta && *beta >= 0 ? shape_pair_loss(ctx, args) : Shape();
}
// Made of the target, and changed in place from then on: of its type.
Shape shape_bce_with_logits(sym::Context& ctx, ArgSpan args) {
  const TensorType *x = tensor_arg(args, 0), *y = tensor_arg(args, 1);
  auto reduction = int_arg(ctx, args, 4);
  if (!x || !y || !reduction || !is_float(x->dtype) || !is_float(y->dtype) || x->sizes != y->sizes) return {};
  bool mixed = false;
  for (size_t i = 1; i < 4; ++i)
    if (const TensorType* t = tensor_arg(args, i)) mixed = mixed || t->dtype != x->dtype;
  if (!mixed) return {};
  if (*reduction != 0) return one(contiguous_type(y->dtype, x->device, {}));
  const TensorType* ops[] = {y};
  return one(elementwise_type(ctx, ops, y->dtype, y->dtype));
}
// Written into contiguous zeros of the input's type, whatever the types of the others are.
Shape shape_smooth_l1_backward(sym::Context& ctx, ArgSpan args) {
  if (auto r = shape_loss_backward(ctx, args)) return r;
  const TensorType *g = tensor_arg(args, 0), *x = tensor_arg(args, 1), *y = tensor_arg(args, 2);
  if (!g || !x || !y || !is_float(g->dtype) || !is_float(x->dtype) || !is_float(y->dtype)) return {};
  const TensorType* operands[] = {x, y, g};
  auto r = elementwise_type(ctx, operands, x->dtype, x->dtype);
  if (!r || r->sizes != x->sizes) return {};
  return one(contiguous_type(x->dtype, x->device, x->sizes));
}
Shape shape_huber(sym::Context& ctx, ArgSpan args) {
  auto* delta = args.size() > 3 ? std::get_if<double>(&args[3]) : nullptr;
  auto r = delta && *delta > 0 ? shape_pair_loss(ctx, args) : Shape();
  const TensorType *x = tensor_arg(args, 0), *y = tensor_arg(args, 1);
  if (!r) return r;
  TensorType& t = (*r)[0];  // made of the input, and changed in place from then on
  if (is_float(x->dtype)) t.dtype = x->dtype;
  if (t.sizes == x->sizes && x->sizes == y->sizes) t.strides = preserved_strides(ctx, *x);
  return r;
}
Shape shape_nll(sym::Context& ctx, ArgSpan args) {
  const TensorType *x = tensor_arg(args, 0), *y = tensor_arg(args, 1);
  auto reduction = int_arg(ctx, args, 3);
  if (!x || !y || !reduction || !is_float(x->dtype) || x->sizes.size() != 2 || y->sizes.size() != 1 || y->dtype != DType::I64 ||
      !ctx.guard_eq(x->sizes[0], y->sizes[0]))
    return {};
  const TensorType* weight = tensor_arg(args, 2);
  if (weight && (weight->sizes.size() != 1 || !ctx.guard_eq(weight->sizes[0], x->sizes[1]))) return {};  // Meta's kernel says what eager does
  auto scalar = contiguous_type(x->dtype, x->device, {});
  if (*reduction == 0) return Types{contiguous_type(x->dtype, x->device, y->sizes), scalar};
  return Types{scalar, scalar};
}

const OpRow kRows[] = {
    {"aten::mse_loss", 0, shape_pair_loss, lower<lower_mse>},
    {"aten::l1_loss", 0, nullptr, lower<lower_l1>},
    {"aten::smooth_l1_loss", 0, shape_smooth_l1, lower<lower_smooth_l1>},
    {"aten::huber_loss", 0, shape_huber, lower<lower_huber>},
    {"aten::mse_loss_backward", 0, shape_loss_backward, lower<lower_mse_backward>},
    {"aten::smooth_l1_loss_backward", 0, shape_smooth_l1_backward, lower<lower_smooth_l1_backward>},
    {"aten::huber_loss_backward", 0, shape_loss_backward, lower<lower_huber_backward>},
    {"aten::binary_cross_entropy_with_logits", 0, shape_bce_with_logits, lower<lower_bce_with_logits>},
    {"aten::nll_loss_forward", ir::kFaults, shape_nll, lower<lower_nll>},
    {"aten::nll_loss2d_forward", ir::kFaults, nullptr, lower<lower_nll>},
    {"aten::nll_loss_backward", 0, shape_nll_backward, lower<lower_nll_backward>},
    {"aten::nll_loss2d_backward", 0, shape_nll2d_backward, lower<lower_nll_backward>},
};

}  // namespace

std::span<const OpRow> loss_rows() { return kRows; }

}  // namespace vitrify::ops
