// Pooling and resampling over the last n dims. Small windows are unrolled, large ones are reductions over a window view.
#include "ops/pool.h"

#include <array>
#include <cmath>
#include <limits>

#include "ir/faults.h"
#include "ops/norm.h"
#include "ops/view.h"

namespace vitrify::ops {

std::vector<int64_t> per_dim(const Args& a, size_t i, size_t n, const std::vector<int64_t>& if_empty) {
  auto v = a.constant_ints(i);
  if (v.empty()) return if_empty;
  if (v.size() == 1) v.resize(n, v[0]);
  return v;
}

Int window_numel(const Index& o, const Dims& sizes, const std::vector<int64_t>& stride, const std::vector<int64_t>& pad,
                 const std::vector<int64_t>& kernel, bool include_pad) {
  Int count = 1;
  const size_t n = kernel.size(), lead = o.size() - n;
  for (size_t d = 0; d < n; ++d) {
    const Int size = sizes[lead + d], begin = o[lead + d] * stride[d] - pad[d], end = sym::min(begin + kernel[d], size + pad[d]);
    count = count * (include_pad ? end - begin : sym::min(end, size) - sym::max(begin, 0));
  }
  return count;
}

namespace {

constexpr int64_t kUnrolled = 30;

struct Window {
  size_t n = 0;  // pooled dims, the last ones
  std::vector<int64_t> kernel, stride, pad, dilation;
  bool ceil_mode = false;
  int64_t taps() const {
    int64_t t = 1;
    for (auto k : kernel) t *= k;
    return t;
  }
  bool clipped() const {  // a window may leave the input
    for (auto p : pad)
      if (p) return true;
    return ceil_mode;
  }
  // Offsets of tap t, row-major.
  std::vector<int64_t> offsets(int64_t t) const {
    std::vector<int64_t> o(n);
    for (size_t d = n; d-- > 0; t /= kernel[d]) o[d] = t % kernel[d];
    return o;
  }
  Int at(size_t d, Int out, Int tap) const { return out * stride[d] - pad[d] + tap * dilation[d]; }
};

// Value of one tap; `other` outside the input.
Val tap(Body& b, const Tensor& x, const Window& w, const Index& i, std::span<const Int> offsets, Val other) {
  const size_t lead = i.size() - w.n;
  Index j = i;
  Val in = b.constant_int(DType::Bool, 1);
  for (size_t d = 0; d < w.n; ++d) {
    j[lead + d] = w.at(d, i[lead + d], offsets[d]);
    if (w.clipped()) in = in & within(b, j[lead + d], 0, x.sizes[lead + d]);
  }
  return b.masked(in, [&] { return x.at(b, j); }, other);
}

// All taps as trailing dims, for L.reduce.
Tensor window_view(const Args& a, const Tensor& x, const Window& w, double other) {
  Dims sizes = a.out().sizes;
  for (auto k : w.kernel) sizes.push_back(k);
  return a.L.map(
      x.dtype, sizes,
      [=, rank = a.out().sizes.size()](Body& b, const Index& i) {
        return tap(b, x, w, Index(i.begin(), i.begin() + rank), std::span<const Int>(i.data() + rank, w.n), b.constant(compute_type(x.dtype), other));
      },
      x.cost + 2, x.reads);
}
std::vector<int64_t> window_dims(const Args& a, const Window& w) {
  std::vector<int64_t> d;
  for (size_t k = 0; k < w.n; ++k) d.push_back(static_cast<int64_t>(a.out().sizes.size() + k));
  return d;
}

// max_pool*_with_indices(self, kernel, stride, padding, dilation, ceil_mode) -> (values, flat positions). NaN wins; the first of equals.
template <size_t n>
bool lower_max_pool(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  const size_t rank = x.sizes.size();
  if (!is_float(x.dtype) || rank < n + 1) return false;
  Window w{n, per_dim(a, 1, n, {}), {}, per_dim(a, 3, n, std::vector<int64_t>(n, 0)), per_dim(a, 4, n, std::vector<int64_t>(n, 1)), a.boolean(5)};
  w.stride = per_dim(a, 2, n, w.kernel);
  const bool indices = a.n.outs.size() > 1 && a.L.uses({const_cast<ir::Node*>(&a.n), 1}) > 0;
  const double low = -std::numeric_limits<double>::infinity();
  const DType t = compute_type(x.dtype);
  if (w.taps() > kUnrolled) {
    if (indices) return false;
    r.push_back(a.L.reduce(AccumKind::Max, window_view(a, x, w, low), window_dims(a, w), false, t, x.dtype)[0]);
    if (a.n.outs.size() > 1) r.push_back(a.L.full(DType::I64, a.out(1).sizes, 0));
    return true;
  }
  if (x.cost > 4) x = a.L.realize(x);
  auto pooled = [=](bool want_index) {
    return [=](Body& b, const Index& i) {
      const size_t lead = i.size() - n;
      Val best = b.constant(t, low);
      Int first = 0;  // the first position inside the input: what an all -inf window gives
      for (size_t d = 0; d < n; ++d) {
        Int s = i[lead + d] * w.stride[d] - w.pad[d];
        if (w.pad[d]) s = sym::max(s, sym::mod(s, w.dilation[d]));
        first = first * x.sizes[lead + d] + s;
      }
      Val where_best = want_index ? b.index(first) : Val{};
      for (int64_t k = 0; k < w.taps(); ++k) {
        auto off = w.offsets(k);
        std::vector<Int> o(off.begin(), off.end());
        Val v = tap(b, x, w, i, o, b.constant(t, low));
        if (want_index) {
          v = stored(x, v);  // equal ones are those that eager sees
          Int flat = 0;
          for (size_t d = 0; d < n; ++d) flat = flat * x.sizes[lead + d] + w.at(d, i[lead + d], off[d]);
          Val better = (v > best) | b.op(LOp::isnan, t, v);
          best = where(better, v, best);
          where_best = where(better, b.index(flat), where_best);
        } else {
          best = maximum(best, v);
        }
      }
      return want_index ? where_best : best;
    };
  };
  const int taps = static_cast<int>(w.taps());
  r.push_back(a.L.map(x.dtype, a.out().sizes, pooled(false), taps * 2, taps));
  if (a.n.outs.size() > 1)
    r.push_back(indices ? a.L.map(DType::I64, a.out(1).sizes, pooled(true), taps * 4, taps) : a.L.full(DType::I64, a.out(1).sizes, 0));
  return true;
}

// Sum of the taps in compute type.
Tensor window_sum(const Args& a, const Tensor& input, const Window& w, DType t) {
  Tensor x = input;
  if (w.taps() > kUnrolled) return reduce_sum(a.L, window_view(a, x, w, 0), window_dims(a, w), false, t, t);
  if (x.cost > 4) x = a.L.realize(x);
  const int taps = static_cast<int>(w.taps());
  return a.L.map(
      t, a.out().sizes,
      [=](Body& b, const Index& i) {
        Val sum;
        for (int64_t k = 0; k < w.taps(); ++k) {
          auto off = w.offsets(k);
          std::vector<Int> o(off.begin(), off.end());
          Val v = tap(b, x, w, i, o, b.constant(t, 0));
          sum = sum.body ? sum + v : v;
        }
        return sum;
      },
      taps, taps);
}

// avg_poolNd(self, kernel, stride, padding, ceil_mode, count_include_pad, divisor_override)
template <size_t n>
bool lower_avg_pool(const Args& a, std::vector<Tensor>& r) {
  if (n == 3 && a.out().dtype != compute_type(a.out().dtype)) return false;  // eager has none of half types
  Tensor x = a.tensor(0);
  if (!is_float(x.dtype) || x.sizes.size() < n + 1) return false;
  Window w{n, per_dim(a, 1, n, {}), {}, per_dim(a, 3, n, std::vector<int64_t>(n, 0)), std::vector<int64_t>(n, 1), a.boolean(4)};
  w.stride = per_dim(a, 2, n, w.kernel);
  const bool include_pad = a.boolean(5);
  std::optional<int64_t> divisor;
  if (a.n.args.size() > 6 && !a.none(6)) divisor = a.constant_int(6);
  if (divisor == 0) return false;
  const DType t = compute_type(x.dtype), out = a.out().dtype;
  Tensor s = window_sum(a, x, w, t);
  r.push_back(a.L.map(
      out, s.sizes,
      [=, sizes = x.sizes](Body& b, const Index& i) {
        Val v = s.at(b, i);
        if (divisor) return v / static_cast<double>(*divisor);
        if (!w.clipped()) return v / static_cast<double>(w.taps());
        return v / cast(b.index(window_numel(i, sizes, w.stride, w.pad, w.kernel, include_pad)), t);
      },
      s.cost + 4, s.reads));
  return true;
}

// Windows [floor(o I / O), ceil((o + 1) I / O)).
template <size_t n>
bool lower_adaptive_avg(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  const size_t rank = x.sizes.size();
  if (!is_float(x.dtype) || rank < n + 1 || known_empty(x.sizes)) return false;
  const size_t lead = rank - n;
  const DType t = compute_type(x.dtype), out = a.out().dtype;
  const auto& os = a.out().sizes;
  auto divided = [&](const Tensor& s, Int count) { return map1(a.L, s, out, [count, t](Body& b, Val v) { return v / numel_as(b, count, t); }, 2); };
  bool whole = true, even = true;
  for (size_t d = lead; d < rank; ++d) {
    whole = whole && os[d].is(1);
    even = even && os[d].is_const() && os[d].value() > 0 && sym::known_multiple(x.sizes[d], os[d].value());
  }
  if (whole) {
    auto dims = dims_from(lead, rank);
    r.push_back(divided(reduce_sum(a.L, x, dims, true, t, t), product(x.sizes, dims)));
    return true;
  }
  Window w{n, {}, {}, std::vector<int64_t>(n, 0), std::vector<int64_t>(n, 1), false};
  for (size_t d = lead; d < rank; ++d) {
    if (!x.sizes[d].is_const() || !os[d].is_const() || os[d].value() < 1) return false;
    const int64_t in = x.sizes[d].value(), o = os[d].value();
    w.stride.push_back(in / o);
    int64_t longest = 0;
    for (int64_t k = 0; k < o; ++k) longest = std::max(longest, ((k + 1) * in + o - 1) / o - k * in / o);
    w.kernel.push_back(longest);
  }
  if (even) {
    r.push_back(divided(window_sum(a, x, w, t), w.taps()));
    return true;
  }
  if (w.taps() > kUnrolled) return false;
  if (x.cost > 4) x = a.L.realize(x);
  r.push_back(a.L.map(
      out, os,
      [=](Body& b, const Index& i) {
        Val sum = b.constant(t, 0);
        Int count = 1;
        std::vector<Int> begin, end;
        for (size_t d = 0; d < n; ++d) {
          const Int in = x.sizes[lead + d], o = os[lead + d];
          begin.push_back(sym::floordiv(i[lead + d] * in, o));
          end.push_back(sym::ceildiv((i[lead + d] + 1) * in, o));
          count = count * (end[d] - begin[d]);
        }
        for (int64_t k = 0; k < w.taps(); ++k) {
          auto off = w.offsets(k);
          Index j = i;
          Val in = b.constant_int(DType::Bool, 1);
          for (size_t d = 0; d < n; ++d) {
            j[lead + d] = begin[d] + off[d];
            in = in & within(b, j[lead + d], 0, end[d]);
          }
          sum = sum + b.masked(in, [&] { return x.at(b, j); }, sum.lit(0));
        }
        return sum / cast(b.index(count), t);
      },
      static_cast<int>(w.taps()) * 3, static_cast<int>(w.taps())));
  return true;
}

// --- resampling

// Scale factors: numbers at `first`.. (one per dim) or, for .vec overloads, one list there; nullopt entries mean "from the sizes".
std::vector<std::optional<double>> scales(const Args& a, size_t first, size_t n, bool list) {
  std::vector<std::optional<double>> s(n);
  if (list) {
    if (auto* v = std::get_if<std::vector<double>>(&a.n.args[first]))
      for (size_t d = 0; d < n && d < v->size(); ++d) s[d] = (*v)[d];
    return s;
  }
  for (size_t d = 0; d < n; ++d)
    if (!a.none(first + d)) s[d] = a.scalar(first + d);
  return s;
}
// Where the elements of a nearest resampling come from along one dim. ATen has two ways (UpSampleKernel.cpp): by a scale in the dtype that it
// computes in, or in float32, unless the sizes are equal or one is twice the other, whatever scale factor was given.
class Nearest {
 public:
  Nearest(std::optional<double> given, int64_t in, int64_t out, bool in_double) : in_(in), out_(out), in_double_(in_double) {
    const bool has = given && *given > 0;
    scale_ = has ? static_cast<float>(1.0 / *given) : static_cast<float>(in) / static_cast<float>(out);
    wide_ = has ? 1.0 / *given : static_cast<double>(in) / static_cast<double>(out);
  }
  int64_t by_scale(int64_t k) const { return in_double_ ? floored(static_cast<float>(wide_ * static_cast<double>(k))) : in_float(k); }
  int64_t by_sizes(int64_t k) const { return out_ == in_ ? k : out_ == 2 * in_ ? k / 2 : in_float(k); }
  bool alike() const {
    for (int64_t k = 0; k < out_; ++k)
      if (by_scale(k) != by_sizes(k)) return false;
    return true;
  }
  // Each element so many times; 0: it is not that simple.
  int64_t repeats(bool sizes) const {
    if (out_ % in_) return 0;
    for (int64_t k = 0; k < out_; ++k)
      if ((sizes ? by_sizes(k) : by_scale(k)) != k / (out_ / in_)) return 0;
    return out_ / in_;
  }
  Val at(Body& b, Int k, bool sizes) const {
    const Val f =
        in_double_ && !sizes ? cast(cast(b.index(k), DType::F64) * wide_, DType::F32) : cast(b.index(k), DType::F32) * static_cast<double>(scale_);
    return binary(LOp::min, cast(unary(LOp::floor, f), DType::I64), b.index(in_ - 1));
  }

 private:
  int64_t in_float(int64_t k) const { return floored(static_cast<float>(k) * scale_); }
  int64_t floored(float f) const { return std::min(static_cast<int64_t>(std::floor(f)), in_ - 1); }
  int64_t in_, out_;
  bool in_double_;
  float scale_;
  double wide_;
};

constexpr int64_t kSmallImage = 128;  // height and width of the result together: ATen goes by sizes there
constexpr int64_t kFewChannels = 3;   // of these it never does in larger ones; of more where they lie closest

bool is_small_image(const Dims& os) { return os.size() == 4 && os[2].is_const() && os[3].is_const() && os[2].value() + os[3].value() <= kSmallImage; }

template <size_t n, bool vec>
bool lower_nearest(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  const size_t rank = x.sizes.size();
  const auto& os = a.out().sizes;
  if (rank != n + 2 || (!is_float(x.dtype) && x.dtype != DType::U8)) return false;  // eager has no others
  auto given = scales(a, 2, n, vec);
  std::vector<Nearest> from;
  bool alike = true;
  for (size_t d = 0; d < n; ++d) {
    if (!x.sizes[2 + d].is_const() || !os[2 + d].is_const()) return false;
    const int64_t in = x.sizes[2 + d].value(), out = os[2 + d].value();
    if (in < 1 || out < 1) return false;
    from.emplace_back(given[d], in, out, x.dtype == DType::F64);
    alike = alike && from.back().alike();
  }
  const bool few = x.sizes[1].is_const() && x.sizes[1].value() <= kFewChannels;
  const bool sizes = is_small_image(os);
  if (!alike && !sizes && n > 1 && !few) return false;  // it looks at strides
  std::vector<int64_t> repeats;
  for (const Nearest& f : from) repeats.push_back(f.repeats(sizes));
  r.push_back(a.L.map(
      x.dtype, os,
      [=](Body& b, const Index& i) {
        Index j = i;
        for (size_t d = 0; d < n; ++d)
          j[2 + d] = repeats[d] ? sym::floordiv(i[2 + d], repeats[d]) : b.indirect(from[d].at(b, i[2 + d], sizes), x.sizes[2 + d]);
        return x.at(b, j);
      },
      x.cost + 4, x.reads));
  return true;
}

template <size_t n, bool vec>
bool lower_linear(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  const auto& os = a.out().sizes;
  if (!is_float(x.dtype) || x.sizes.size() != n + 2) return false;
  const bool align = a.boolean(2);
  auto given = scales(a, 3, n, vec);
  const DType t = compute_type(x.dtype);
  std::vector<double> scale;
  for (size_t d = 0; d < n; ++d) {
    if (!x.sizes[2 + d].is_const() || !os[2 + d].is_const()) return false;
    const int64_t in = x.sizes[2 + d].value(), out = os[2 + d].value();
    if (in < 1) return false;
    double s;
    if (align)
      s = out > 1 ? static_cast<double>(in - 1) / static_cast<double>(out - 1) : 0;
    else
      s = given[d] && *given[d] > 0 ? 1.0 / *given[d] : static_cast<double>(in) / static_cast<double>(out);
    scale.push_back(t == DType::F32 ? static_cast<float>(s) : s);
  }
  const auto asks = align ? nullptr : place_rounds_once.load();
  const ir::TensorType& image = std::get<ir::Value>(a.n.args[0]).type();
  const bool last = asks && n > 1 && !a.n.as_contiguous &&
                    is_contiguous(a.L.ctx(), image, n == 2 ? ir::MemoryFormat::ChannelsLast : ir::MemoryFormat::ChannelsLast3d);
  const int64_t channels = last ? image.sizes[1].is_const() ? std::min<int64_t>(image.sizes[1].value(), 64) : 16 : 0;
  std::array<bool, n> once;
  for (size_t d = 0; d < n; ++d) once[d] = !asks || a.out().device.kind != DeviceKind::CPU || asks(x.dtype, n, d, channels);
  if (x.cost > 4) x = a.L.realize(x);
  r.push_back(a.L.map(
      a.out().dtype, os,
      [=](Body& b, const Index& i) {
        std::vector<Int> lo(n), hi(n);
        std::vector<Val> w(n);
        for (size_t d = 0; d < n; ++d) {
          const Int in = x.sizes[2 + d];
          if (os[2 + d] == in) {  // every element for itself, whatever the scale
            lo[d] = hi[d] = i[2 + d];
            w[d] = b.constant(t, 0);
            continue;
          }
          Val o = cast(b.index(i[2 + d]), t);
          // As eager's kernels round it: whether a weight is zero decides whether an infinity becomes NaN. The element is that of a float32.
          Val place = once[d] ? fma(o + 0.5, o.lit(scale[d]), o.lit(-0.5)) : (o + 0.5) * scale[d] - 0.5;
          Val s = align ? o * scale[d] : maximum(place, o.lit(0));
          Val base = binary(LOp::min, cast(cast(s, DType::F32), DType::I64), b.index(in - 1));
          Val next = binary(LOp::min, base + b.constant_int(DType::I64, 1), b.index(in - 1));
          w[d] = minimum(maximum(s - cast(base, t), s.lit(0)), s.lit(1));
          lo[d] = b.indirect(base, in), hi[d] = b.indirect(next, in);
        }
        Val sum;
        for (size_t corner = 0; corner < (size_t(1) << n); ++corner) {
          Index j = i;
          Val k;
          for (size_t d = 0; d < n; ++d) {
            const bool up = corner >> (n - 1 - d) & 1;
            j[2 + d] = up ? hi[d] : lo[d];
            Val f = up ? w[d] : 1.0 - w[d];
            k = k.body ? k * f : f;
          }
          Val v = k * x.at(b, j);
          sum = sum.body ? sum + v : v;
        }
        return sum;
      },
      20, 1 << n));
  return true;
}

const OpRow kRows[] = {
    {"aten::max_pool2d_with_indices", 0, shape_max_pool2d, lower<lower_max_pool<2>>},
    {"aten::max_pool3d_with_indices", 0, nullptr, lower<lower_max_pool<3>>},
    {"aten::max_pool2d", 0, nullptr, lower<lower_max_pool<2>>},
    {"aten::max_pool1d", ir::kGivesContiguous, shape_max_pool1d, lower<lower_max_pool<1>>},
    {"aten::max_pool1d_with_indices", 0, nullptr, lower<lower_max_pool<1>>},
    {"aten::avg_pool1d", 0, nullptr, lower<lower_avg_pool<1>>},
    {"aten::avg_pool2d", 0, shape_avg_pool2d, lower<lower_avg_pool<2>>},
    {"aten::avg_pool3d", 0, nullptr, lower<lower_avg_pool<3>>},
    {"aten::adaptive_avg_pool1d", 0, nullptr, lower<lower_adaptive_avg<1>>},
    {"aten::adaptive_avg_pool2d", 0, nullptr, lower<lower_adaptive_avg<2>>},
    {"aten::_adaptive_avg_pool2d", 0, shape_adaptive_avg_pool2d, lower<lower_adaptive_avg<2>>},
    {"aten::_adaptive_avg_pool3d", 0, nullptr, lower<lower_adaptive_avg<3>>},
    {"aten::adaptive_max_pool2d", ir::kFaults, shape_adaptive_max_pool2d, nullptr},
    {"aten::upsample_nearest1d", 0, shape_upsample, lower<lower_nearest<1, false>>},
    {"aten::upsample_nearest2d", 0, shape_upsample, lower<lower_nearest<2, false>>},
    {"aten::upsample_nearest3d", 0, shape_upsample, lower<lower_nearest<3, false>>},
    {"aten::upsample_nearest2d.vec", 0, nullptr, lower<lower_nearest<2, true>>},
    {"aten::upsample_linear1d", 0, shape_upsample, lower<lower_linear<1, false>>},
    {"aten::upsample_bilinear2d", 0, shape_upsample, lower<lower_linear<2, false>>},
    {"aten::upsample_bilinear2d.vec", 0, nullptr, lower<lower_linear<2, true>>},
    {"aten::upsample_trilinear3d", 0, shape_upsample, lower<lower_linear<3, false>>},
    {"aten::upsample_bicubic2d", ir::kFaults, shape_upsample, nullptr},
    {"aten::_upsample_nearest_exact1d", ir::kFaults, shape_upsample, nullptr},
    {"aten::_upsample_nearest_exact2d", ir::kFaults, shape_upsample, nullptr},
    {"aten::_upsample_nearest_exact3d", ir::kFaults, shape_upsample, nullptr},
    {"aten::_upsample_bilinear2d_aa", ir::kFaults, shape_upsample, nullptr},
    {"aten::_upsample_bicubic2d_aa", ir::kFaults, shape_upsample, nullptr},
    {"aten::upsample_nearest1d_backward", ir::kFaults, shape_upsample_backward, nullptr},
    {"aten::upsample_nearest2d_backward", ir::kFaults, shape_upsample_backward, nullptr},
    {"aten::upsample_nearest3d_backward", ir::kFaults, shape_upsample_backward_in_order, nullptr},
    {"aten::upsample_linear1d_backward", ir::kFaults, shape_upsample_backward, nullptr},
    {"aten::upsample_bilinear2d_backward", ir::kFaults, shape_upsample_backward, nullptr},
    {"aten::upsample_trilinear3d_backward", ir::kFaults, shape_upsample_backward, nullptr},
    {"aten::upsample_bicubic2d_backward", ir::kFaults, shape_upsample_backward_in_order, nullptr},
    {"aten::_upsample_nearest_exact1d_backward", ir::kFaults, shape_upsample_backward, nullptr},
    {"aten::_upsample_nearest_exact2d_backward", ir::kFaults, shape_upsample_backward, nullptr},
    {"aten::_upsample_nearest_exact3d_backward", ir::kFaults, shape_upsample_backward_in_order, nullptr},
    {"aten::_upsample_bilinear2d_aa_backward", ir::kFaults, shape_upsample_backward, nullptr},
    {"aten::_upsample_bicubic2d_aa_backward", ir::kFaults, shape_upsample_backward_in_order, nullptr},
};

}  // namespace

std::span<const OpRow> pool_rows() { return kRows; }

bool nearest_looks_at_strides(const ir::Node& n) {
  const auto* x = std::get_if<ir::Value>(&n.args[0]);
  const Dims& os = n.outs[0].sizes;
  if (!x || x->type().sizes.size() != 4 || os.size() != 4) return true;
  if (is_small_image(os)) return false;
  for (size_t d = 2; d < 4; ++d) {
    const Int in = x->type().sizes[d], out = os[d];
    const auto* real = std::get_if<double>(&n.args[d]);
    if (!real) {
      if (!std::holds_alternative<ir::None>(n.args[d])) return true;
      continue;  // by the sizes
    }
    if (in.is_const() && out.is_const()) {
      if (in.value() < 1 || !Nearest(*real, in.value(), out.value(), false).alike()) return true;
    } else if (*real < 1 || *real != std::floor(*real) || *real > kSmallImage || out != in * static_cast<int64_t>(*real)) {
      return true;
    }
  }
  return false;
}

}  // namespace vitrify::ops
