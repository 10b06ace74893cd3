// Gradients of pooling. Each element of the input asks the windows that reach it, in their order, so that nothing is added atomically.
#include "ir/faults.h"
#include "ops/gradient_shapes.h"
#include "ops/norm.h"
#include "ops/pool.h"
#include "ops/view.h"

namespace vitrify::ops {
namespace {

constexpr int64_t kMaxWindows = 30;  // that reach one element: unrolled

struct Windows {
  std::vector<int64_t> kernel, stride, pad;  // of the last dims
  size_t n() const { return kernel.size(); }
  int64_t reach(size_t d) const { return (kernel[d] + stride[d] - 1) / stride[d]; }
  int64_t count() const {
    int64_t c = 1;
    for (size_t d = 0; d < n(); ++d) c *= reach(d);
    return c;
  }
};

std::optional<Windows> windows(const Args& a, size_t kernel, size_t stride, size_t pad, size_t n) {
  Windows w;
  w.kernel = per_dim(a, kernel, n, {});
  w.stride = per_dim(a, stride, n, w.kernel);
  w.pad = per_dim(a, pad, n, std::vector<int64_t>(n, 0));
  if (w.kernel.size() != n || w.stride.size() != n || w.pad.size() != n || w.count() > kMaxWindows) return std::nullopt;
  return w;
}

// Sum over the windows that reach element i of what `of` says of window `o`. With `exact`, windows that do not hold the element are left out by
// position; otherwise `of` has to know.
Val over_windows(Body& b, const Windows& w, const Index& i, const Dims& out, bool exact, DType t, const std::function<Val(const Index&)>& of) {
  const size_t lead = i.size() - w.n();
  Val sum;
  for (int64_t k = 0; k < w.count(); ++k) {
    Index o = i;
    Val in = b.constant_int(DType::Bool, 1);
    int64_t rest = k;
    for (size_t d = w.n(); d-- > 0; rest /= w.reach(d)) {
      const int64_t back = w.reach(d) - 1 - rest % w.reach(d);  // the furthest back first
      const Int at = i[lead + d] + w.pad[d];
      o[lead + d] = sym::floordiv(at, w.stride[d]) - back;
      in = in & within(b, o[lead + d], 0, out[lead + d]);
      if (exact && w.kernel[d] % w.stride[d] != 0) in = in & within(b, at - o[lead + d] * w.stride[d], 0, w.kernel[d]);
    }
    Val v = b.masked(in, [&] { return of(o); }, b.constant(t, 0));
    sum = sum.body ? sum + v : v;
  }
  return sum;
}

// (grad, self, kernel, stride, padding, dilation, ceil_mode, indices)
template <size_t n>
bool lower_max_pool_backward(const Args& a, std::vector<Tensor>& r) {
  Tensor g = a.tensor(0), picked = a.tensor(7);
  const auto& out = a.out();
  const auto w = windows(a, 2, 3, 4, n);
  if (!w || !is_float(out.dtype) || out.sizes.size() < n + 1 || picked.dtype != DType::I64 || !(g.sizes == picked.sizes)) return false;
  for (int64_t d : a.constant_ints(5))
    if (d != 1) return false;
  g = reused(a.L, g), picked = reused(a.L, picked);
  const DType t = compute_type(out.dtype);
  r.push_back(a.L.map(
      out.dtype, out.sizes,
      [=, sizes = out.sizes, w = *w](Body& b, const Index& i) {
        Int flat = 0;
        for (size_t d = sizes.size() - n; d < sizes.size(); ++d) flat = flat * sizes[d] + i[d];
        Val here = b.index(flat);
        return over_windows(b, w, i, g.sizes, false, t, [&](const Index& o) {
          Val v = cast(g.at(b, o), t);
          return where(eq(picked.at(b, o), here), v, v.lit(0));
        });
      },
      static_cast<int>(w->count()) * 6, static_cast<int>(w->count()) * 2));
  return true;
}

// (grad, self, kernel, stride, padding, ceil_mode, count_include_pad, divisor_override)
template <size_t n>
bool lower_avg_pool_backward(const Args& a, std::vector<Tensor>& r) {
  Tensor g = a.tensor(0);
  const auto& out = a.out();
  const auto w = windows(a, 2, 3, 4, n);
  if (!w || !is_float(out.dtype) || out.sizes.size() < n + 1) return false;
  std::optional<int64_t> divisor;
  if (!a.none(7)) divisor = a.constant_int(7);
  if (divisor == 0) return false;
  bool clipped = a.boolean(5);
  int64_t taps = 1;
  for (size_t d = 0; d < n; ++d) clipped = clipped || w->pad[d], taps *= w->kernel[d];
  const bool include_pad = a.boolean(6);
  g = reused(a.L, g);
  const DType t = compute_type(out.dtype);
  r.push_back(a.L.map(
      out.dtype, out.sizes,
      [=, sizes = out.sizes, w = *w](Body& b, const Index& i) {
        return over_windows(b, w, i, g.sizes, true, t, [&](const Index& o) {
          Val v = cast(g.at(b, o), t);
          if (divisor) return v / static_cast<double>(*divisor);
          if (!clipped) return v / static_cast<double>(taps);
          return v / cast(b.index(window_numel(o, sizes, w.stride, w.pad, w.kernel, include_pad)), t);
        });
      },
      static_cast<int>(w->count()) * 6, static_cast<int>(w->count())));
  return true;
}

// (grad, self), where each output is the mean of an equal share of the input
template <size_t n>
bool lower_adaptive_avg_backward(const Args& a, std::vector<Tensor>& r) {
  Tensor g = a.tensor(0);
  const auto& out = a.out();
  if (!is_float(out.dtype) || out.sizes.size() < n + 1) return false;
  const size_t lead = out.sizes.size() - n;
  Int count = 1;
  std::vector<Int> share;
  for (size_t d = lead; d < out.sizes.size(); ++d) {
    if (!g.sizes[d].is_const() || g.sizes[d].value() < 1 || !sym::known_multiple(out.sizes[d], g.sizes[d].value())) return false;
    share.push_back(sym::floordiv(out.sizes[d], g.sizes[d]));
    count = count * share.back();
  }
  const DType t = compute_type(out.dtype);
  r.push_back(a.L.map(
      out.dtype, out.sizes,
      [=](Body& b, const Index& i) {
        Index o = i;
        for (size_t d = 0; d < n; ++d) o[lead + d] = sym::floordiv(i[lead + d], share[d]);
        return cast(g.at(b, o), t) / numel_as(b, count, t);
      },
      g.cost + 3, g.reads));
  return true;
}

const OpRow kRows[] = {
    {"aten::max_pool2d_with_indices_backward", 0, shape_pool_backward, lower<lower_max_pool_backward<2>>},
    {"aten::max_pool3d_with_indices_backward", 0, nullptr, lower<lower_max_pool_backward<3>>},
    {"aten::avg_pool2d_backward", 0, shape_pool_backward, lower<lower_avg_pool_backward<2>>},
    {"aten::avg_pool3d_backward", 0, nullptr, lower<lower_avg_pool_backward<3>>},
    {"aten::adaptive_max_pool2d_backward", ir::kFaults, shape_pool_backward, nullptr},
    {"aten::_adaptive_avg_pool2d_backward", 0, shape_pool_backward, lower<lower_adaptive_avg_backward<2>>},
    {"aten::_adaptive_avg_pool3d_backward", 0, nullptr, lower<lower_adaptive_avg_backward<3>>},
};

}  // namespace

std::span<const OpRow> pool_gradient_rows() { return kRows; }

}  // namespace vitrify::ops
