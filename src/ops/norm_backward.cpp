// Gradients of normalisations and softmax.
#include "ops/gradient_shapes.h"
#include "ops/norm.h"

namespace vitrify::ops {
namespace {

Tensor unused(const Args& a, size_t i) { return a.L.full(a.out(i).dtype, a.out(i).sizes, 0); }
bool mask_arg(const Args& a, size_t i, std::vector<bool>& m) {
  auto* v = std::get_if<std::vector<bool>>(&a.n.args[i]);
  return v && (m = *v, true);
}

// g * w in compute type
Tensor scaled(const Args& a, const Tensor& g, const Tensor& w, DType t) {
  if (!w) return as_type(a.L, g, t);
  return map2(a.L, g, broadcast(a.L, w, g.sizes), t, [t](Body&, Val p, Val q) { return cast(p, t) * cast(q, t); });
}
// (x - mean) * rstd
Tensor hat(const Args& a, const Tensor& x, const Tensor& mean, const Tensor& rstd, DType t) {
  Tensor m = broadcast(a.L, mean, x.sizes), s = broadcast(a.L, rstd, x.sizes);
  return a.L.map(
      t, x.sizes, [=](Body& b, const Index& i) { return (cast(x.at(b, i), t) - cast(m.at(b, i), t)) * cast(s.at(b, i), t); },
      x.cost + m.cost + s.cost + 2, x.reads + 2);
}
Tensor product_of(Lowering& L, const Tensor& x, const Tensor& y, DType t) {
  return map2(L, x, y, t, [t](Body&, Val p, Val q) { return cast(p, t) * cast(q, t); });
}

// rstd * (gw - mean(gw) - xhat * mean(gw * xhat)); the means over `dims`, spread back over x by `spread`.
Tensor input_gradient(const Args& a, const Tensor& gw, const Tensor& xh, const Tensor& sum_g, const Tensor& sum_gx, const Tensor& rstd, Int count,
                      DType out) {
  const DType t = gw.dtype;
  return a.L.map(
      out, gw.sizes,
      [=](Body& b, const Index& i) {
        Val n = numel_as(b, count, t);
        Val v = gw.at(b, i) - (sum_g.at(b, i) + xh.at(b, i) * sum_gx.at(b, i)) / n;
        return cast(v * cast(rstd.at(b, i), t), compute_type(out));
      },
      gw.cost + xh.cost + 6, gw.reads + xh.reads + 3);
}

bool lower_layer_norm_backward(const Args& a, std::vector<Tensor>& r) {
  std::vector<bool> mask;
  Tensor g = a.tensor(0), x = a.tensor(1);
  const size_t k = a.ints(2).size(), rank = x.sizes.size();
  if (!is_float(x.dtype) || !is_float(g.dtype) || !mask_arg(a, 7, mask) || k == 0 || k > rank) return false;
  g = reused(a.L, g), x = reused(a.L, x);
  const DType t = compute_type(x.dtype);
  Tensor mean = a.tensor(3), rstd = a.tensor(4), w = a.is_tensor(5) ? a.tensor(5) : Tensor{};
  Tensor xh = hat(a, x, mean, rstd, t);
  auto inner = dims_from(rank - k, rank);
  std::vector<int64_t> outer;
  for (size_t d = 0; d < rank - k; ++d) outer.push_back(static_cast<int64_t>(d));
  if (mask[0]) {
    Tensor gw = scaled(a, g, w, t);
    Tensor sg = a.L.expand(reduce_sum(a.L, gw, inner, true, t, t), x.sizes);
    Tensor sgx = a.L.expand(reduce_sum(a.L, product_of(a.L, gw, xh, t), inner, true, t, t), x.sizes);
    r.push_back(input_gradient(a, gw, xh, sg, sgx, broadcast(a.L, rstd, x.sizes), product(x.sizes, inner), a.out(0).dtype));
  } else {
    r.push_back(unused(a, 0));
  }
  auto columns = [&](const Tensor& v, size_t i) {
    return outer.empty() ? as_type(a.L, v, a.out(i).dtype) : reduce_sum(a.L, v, outer, false, t, a.out(i).dtype);
  };
  r.push_back(mask[1] ? columns(product_of(a.L, g, xh, t), 1) : unused(a, 1));
  r.push_back(mask[2] ? columns(as_type(a.L, g, t), 2) : unused(a, 2));
  return true;
}

bool lower_rms_norm_backward(const Args& a, std::vector<Tensor>& r) {
  std::vector<bool> mask;
  Tensor g = a.tensor(0), x = a.tensor(1);
  const size_t k = a.ints(2).size(), rank = x.sizes.size();
  if (!is_float(x.dtype) || !mask_arg(a, 5, mask) || k == 0 || k > rank) return false;
  g = reused(a.L, g), x = reused(a.L, x);
  const DType t = compute_type(x.dtype);
  Tensor s = broadcast(a.L, a.tensor(3), x.sizes), w = a.is_tensor(4) ? a.tensor(4) : Tensor{};
  Tensor xh = product_of(a.L, x, s, t);
  auto inner = dims_from(rank - k, rank);
  std::vector<int64_t> outer;
  for (size_t d = 0; d < rank - k; ++d) outer.push_back(static_cast<int64_t>(d));
  if (mask[0]) {
    Tensor gw = scaled(a, g, w, t);
    Tensor sgx = a.L.expand(reduce_sum(a.L, product_of(a.L, gw, xh, t), inner, true, t, t), x.sizes);
    r.push_back(a.L.map(
        a.out(0).dtype, x.sizes,
        [=, n = product(x.sizes, inner)](Body& b, const Index& i) {
          return (gw.at(b, i) - xh.at(b, i) * sgx.at(b, i) / numel_as(b, n, t)) * cast(s.at(b, i), t);
        },
        gw.cost + xh.cost + 5, gw.reads + xh.reads + 2));
  } else {
    r.push_back(unused(a, 0));
  }
  if (!mask[1] || !w) return r.push_back(unused(a, 1)), true;
  Tensor p = product_of(a.L, g, xh, t);
  r.push_back(outer.empty() ? as_type(a.L, p, a.out(1).dtype) : reduce_sum(a.L, p, outer, false, t, a.out(1).dtype));
  return true;
}

bool lower_batch_norm_backward(const Args& a, std::vector<Tensor>& r) {
  std::vector<bool> mask;
  Tensor g = a.tensor(0), x = a.tensor(1);
  const bool train = a.boolean(7);
  if (!is_float(x.dtype) || x.sizes.size() < 2 || !mask_arg(a, 9, mask)) return false;
  if (train ? !a.is_tensor(5) || !a.is_tensor(6) : !a.is_tensor(3) || !a.is_tensor(4)) return false;
  g = reused(a.L, g), x = reused(a.L, x);
  const DType t = compute_type(x.dtype);
  Tensor mean = a.tensor(train ? 5 : 3), rstd = a.tensor(6);
  if (!train) rstd = map1(a.L, a.tensor(4), t, [t, eps = *a.scalar(8)](Body&, Val v) { return unary(LOp::rsqrt, cast(v, t) + eps); }, 4);
  auto dims = all_but_channel(x.sizes.size());
  auto spread = [&](const Tensor& v) { return channelwise(a.L, v, x.sizes); };
  Tensor xh = hat(a, x, spread(mean), spread(rstd), t);
  Tensor sum_g = reduce_sum(a.L, g, dims, false, t, t), sum_gx = reduce_sum(a.L, product_of(a.L, g, xh, t), dims, false, t, t);
  if (mask[0]) {
    Tensor w = a.is_tensor(2) ? spread(a.tensor(2)) : Tensor{}, s = spread(rstd), sg = spread(sum_g), sgx = spread(sum_gx);
    r.push_back(a.L.map(
        a.out(0).dtype, x.sizes,
        [=, n = product(x.sizes, dims)](Body& b, const Index& i) {
          Val v = cast(g.at(b, i), t);
          if (train) v = v - (sg.at(b, i) + xh.at(b, i) * sgx.at(b, i)) / numel_as(b, n, t);
          v = v * cast(s.at(b, i), t);
          return w ? v * cast(w.at(b, i), t) : v;
        },
        g.cost + xh.cost + 7, g.reads + x.reads + 5));
  } else {
    r.push_back(unused(a, 0));
  }
  r.push_back(mask[1] ? as_type(a.L, sum_gx, a.out(1).dtype) : unused(a, 1));
  r.push_back(mask[2] ? as_type(a.L, sum_g, a.out(2).dtype) : unused(a, 2));
  return true;
}

// The input's gradient is scale * g + slope * (x - from) + shift, where scale is rstd * weight, with these by sample and group.
struct GroupGradient {
  Tensor slope, from, shift;
};
// wg and wgx: sums over each group of weight * g, and of that by x. sg and sgh: those of scale * g, and of that by the normalised x, which alone is
// accurate far from zero. Where eager's numbers, which it makes of the former, are not finite, they are taken: they say where infinities and NaNs
// are.
GroupGradient group_gradient(Lowering& L, const Tensor& wg, const Tensor& wgx, const Tensor& sg, const Tensor& sgh, const Tensor& mean,
                             const Tensor& rstd, Int count) {
  const DType t = wg.dtype;
  struct Numbers {
    Val slope, from, shift;
  };
  auto numbers = [=](Body& b, const Index& i) -> Numbers {
    Val m = cast(mean.at(b, i), t), s = cast(rstd.at(b, i), t), each = 1.0 / numel_as(b, count, t), sum = wg.at(b, i);
    Val slope = (sum * m - wgx.at(b, i)) * s * s * s * each, shift = -slope * m - sum * s * each, by_scale = sg.at(b, i), by_hat = sgh.at(b, i);
    Val ours = finite(slope) & finite(shift) & finite(by_scale) & finite(by_hat);
    return {where(ours, -by_hat * s * each, slope), where(ours, m, m.lit(0)), where(ours, -by_scale * each, shift)};
  };
  auto one = [&](Val Numbers::* which) {
    return L.realize(L.map(t, wg.sizes, [=](Body& b, const Index& i) { return numbers(b, i).*which; }, 20, 6));
  };
  return {one(&Numbers::slope), one(&Numbers::from), one(&Numbers::shift)};
}

bool lower_group_norm_backward(const Args& a, std::vector<Tensor>& r) {
  std::vector<bool> mask;
  Tensor g = a.tensor(0), x = a.tensor(1);
  const int64_t groups = a.constant_int(8);
  if (!is_float(x.dtype) || x.sizes.size() < 2 || groups < 1 || !mask_arg(a, 9, mask)) return false;
  g = reused(a.L, g), x = reused(a.L, x);
  const DType t = compute_type(x.dtype);
  const Int per = sym::floordiv(x.sizes[1], groups);
  const Dims channels{x.sizes[0], x.sizes[1]};
  auto spread = [&](const Tensor& v, const Dims& sizes) {  // [N, groups] over [N, C, ...]
    return a.L.view(v, sizes, [per](const Index& i) { return Index{i[0], sym::floordiv(i[1], per)}; });
  };
  Tensor mean = a.tensor(2), rstd = a.tensor(3), w = a.is_tensor(4) ? a.tensor(4) : Tensor{};
  // The elements are read once: what is asked for is made of sums by sample and channel.
  const auto inner = dims_from(2, x.sizes.size());
  auto channel_sum = [&](const Tensor& v) { return inner.empty() ? as_type(a.L, v, t) : reduce_sum(a.L, v, inner, false, t, t); };
  Tensor sum_g = channel_sum(g), sum_gx = channel_sum(product_of(a.L, g, x, t)),
         sum_gh = channel_sum(product_of(a.L, g, hat(a, x, spread(mean, x.sizes), spread(rstd, x.sizes), t), t));
  if (mask[0]) {
    Tensor weight = w ? channelwise(a.L, w, channels) : w, scale = scaled(a, spread(rstd, channels), weight, t);
    auto group_sum = [&](const Tensor& v, const Tensor& factor) {
      const int64_t last[] = {2};
      return reduce_sum(a.L, a.L.reshape(scaled(a, v, factor, t), {x.sizes[0], Int(groups), per}), last, false, t, t);
    };
    const GroupGradient of = group_gradient(a.L, group_sum(sum_g, weight), group_sum(sum_gx, weight), group_sum(sum_g, scale),
                                            group_sum(sum_gh, scale), mean, rstd, per * product(x.sizes, inner));
    Tensor factor = a.L.view(scale, x.sizes, [](const Index& i) { return Index{i[0], i[1]}; });
    Tensor slope = spread(of.slope, x.sizes), from = spread(of.from, x.sizes), shift = spread(of.shift, x.sizes);
    const DType out = a.out(0).dtype;
    r.push_back(a.L.map(
        out, x.sizes,
        [=](Body& b, const Index& i) {
          Val v = factor.at(b, i) * cast(g.at(b, i), t) + slope.at(b, i) * (cast(x.at(b, i), t) - from.at(b, i)) + shift.at(b, i);
          return cast(v, compute_type(out));
        },
        g.cost + x.cost + 6, g.reads + x.reads + 5));
  } else {
    r.push_back(unused(a, 0));
  }
  const int64_t samples[] = {0};
  if (mask[1]) {
    Tensor m = spread(mean, channels), s = spread(rstd, channels);
    Tensor by_sample = a.L.map(
        t, channels,
        [=](Body& b, const Index& i) {
          Val raw = (sum_gx.at(b, i) - sum_g.at(b, i) * cast(m.at(b, i), t)) * cast(s.at(b, i), t), ours = sum_gh.at(b, i);
          return where(finite(raw) & finite(ours), ours, raw);  // as in group_gradient
        },
        8, 5);
    r.push_back(reduce_sum(a.L, by_sample, samples, false, t, a.out(1).dtype));
  } else {
    r.push_back(unused(a, 1));
  }
  r.push_back(mask[2] ? reduce_sum(a.L, sum_g, samples, false, t, a.out(2).dtype) : unused(a, 2));
  return true;
}

template <bool log>
bool lower_softmax_backward(const Args& a, std::vector<Tensor>& r) {
  Tensor g = a.tensor(0), y = a.tensor(1);
  const DType out = a.out().dtype;
  if (!is_float(g.dtype) || y.sizes.empty() || g.dtype != out || y.dtype != out) return false;  // eager raises for unlike types
  g = reused(a.L, g), y = reused(a.L, y);
  const DType t = compute_type(y.dtype);
  const int64_t d[] = {a.dim(2, y.sizes.size())};
  Tensor s = reduce_sum(a.L, log ? as_type(a.L, g, t) : product_of(a.L, g, y, t), d, true, t, t);
  Tensor sx = a.L.expand(s, y.sizes);
  r.push_back(a.L.map(
      out, y.sizes,
      [=](Body& b, const Index& i) {
        Val p = cast(g.at(b, i), t), q = cast(y.at(b, i), t), k = sx.at(b, i);
        return cast(log ? p - unary(LOp::exp, q) * k : (p - k) * q, compute_type(out));
      },
      g.cost + y.cost + (log ? 12 : 2), g.reads + y.reads + 1));
  return true;
}

Shape shape_softmax_backward(sym::Context& ctx, ArgSpan args) {
  const TensorType* g = tensor_arg(args, 0);
  auto* d = args.size() > 3 ? std::get_if<DType>(&args[3]) : nullptr;
  const TensorType* y = tensor_arg(args, 1);
  if (!g || !y || !d || !is_float(*d) || !std::ranges::equal(y->sizes, g->sizes, [&](Int a, Int b) { return ctx.guard_eq(a, b); })) return {};
  return one(contiguous_type(*d, g->device, g->sizes));
}

const OpRow kRows[] = {
    {"aten::native_layer_norm_backward", 0, shape_layer_norm_backward, lower<lower_layer_norm_backward>},
    {"aten::_fused_rms_norm_backward", 0, nullptr, lower<lower_rms_norm_backward>},
    {"aten::native_batch_norm_backward", 0, shape_batch_norm_backward, lower<lower_batch_norm_backward>},
    {"aten::native_group_norm_backward", 0, shape_group_norm_backward, lower<lower_group_norm_backward>},
    {"aten::_softmax_backward_data", 0, shape_softmax_backward, lower<lower_softmax_backward<false>>},
    {"aten::_log_softmax_backward_data", 0, shape_softmax_backward, lower<lower_softmax_backward<true>>},
};

}  // namespace

std::span<const OpRow> norm_gradient_rows() { return kRows; }

}  // namespace vitrify::ops
