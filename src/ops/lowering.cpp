// Views of lowered tensors and the argument helpers of rules.
#include "ops/lowering.h"

#include "ops/view.h"

namespace vitrify::ops {

int64_t wrap_dim(int64_t d, size_t rank) {
  const int64_t r = rank == 0 ? 1 : static_cast<int64_t>(rank);
  return d < 0 ? d + r : d;
}

int64_t checked_dim(int64_t d, size_t rank) {
  const int64_t r = wrap_dim(d, rank);
  if (r < 0 || r >= std::max<int64_t>(static_cast<int64_t>(rank), 1)) throw NoSuchDim();
  return r;
}

int64_t Args::dim(size_t i, size_t rank) const { return checked_dim(constant_int(i), rank); }

std::optional<double> Args::scalar(size_t i) const {
  const ir::Arg& a = n.args[i];
  if (auto* v = std::get_if<Int>(&a)) return v->is_const() ? std::optional<double>(static_cast<double>(v->value())) : std::nullopt;
  if (auto* v = std::get_if<double>(&a)) return *v;
  if (auto* v = std::get_if<bool>(&a)) return *v ? 1.0 : 0.0;
  return std::nullopt;
}

std::vector<int64_t> Args::constant_ints(size_t i) const {
  std::vector<int64_t> r;
  if (none(i)) return r;
  for (Int v : ints(i)) r.push_back(v.is_const() ? v.value() : L.ctx().specialize(v));
  return r;
}

std::vector<int64_t> Args::dims(size_t i, size_t rank) const {
  std::vector<int64_t> r;
  if (std::holds_alternative<Int>(n.args[i])) {
    r.push_back(dim(i, rank));
  } else if (!none(i)) {
    r = constant_ints(i);
    for (auto& d : r) d = checked_dim(d, rank);
  }
  if (r.empty())
    for (size_t d = 0; d < rank; ++d) r.push_back(static_cast<int64_t>(d));
  return r;
}

Tensor Lowering::view(const Tensor& t, Dims sizes, const std::function<Index(const Index&)>& to_source) {
  Tensor r = t;
  r.sizes = std::move(sizes);
  r.buffer = -1;
  r.lazy = -1;
  r.strides.clear();
  r.offset = 0;
  r.at = [src = t.at, to_source](Body& b, const Index& i) { return src(b, to_source(i)); };
  return r;
}

// `at` is recomputed from the new strides, so that indices stay affine.
Tensor restride(const Tensor& t, Dims sizes, Dims strides, Int offset) {
  Tensor r = t;
  r.sizes = std::move(sizes);
  r.strides = std::move(strides);
  r.offset = offset;
  r.at = [buffer = static_cast<uint32_t>(t.buffer), dtype = t.dtype, s = r.strides, offset](Body& b, const Index& i) {
    Int at = offset;
    for (size_t d = 0; d < i.size(); ++d) at += i[d] * s[d];
    return b.load(buffer, dtype, at);
  };
  return r;
}

Tensor Lowering::expand(const Tensor& t, const Dims& sizes) {
  const size_t lead = sizes.size() - t.sizes.size();
  boost::container::small_vector<bool, 5> broadcast;
  bool same = lead == 0;
  for (size_t d = 0; d < t.sizes.size(); ++d) {
    // Guards may have fixed the size of what a call finds, which is a symbol where nothing is computed yet.
    const Int from = t.sizes[d], to = sizes[lead + d];
    broadcast.push_back(!(from == to) && ctx().settled(from).is(1) && !ctx().settled(to).is(1));
    same = same && !broadcast.back();
  }
  if (same) return t;
  if (t.buffer >= 0) {
    Dims st(lead, Int(0));
    for (size_t d = 0; d < t.sizes.size(); ++d) st.push_back(broadcast[d] ? Int(0) : t.strides[d]);
    return restride(t, sizes, st, t.offset);
  }
  return view(t, sizes, [lead, broadcast](const Index& i) {
    Index r;
    for (size_t d = 0; d < broadcast.size(); ++d) r.push_back(broadcast[d] ? Int(0) : i[lead + d]);
    return r;
  });
}

Tensor Lowering::permute(const Tensor& t, std::span<const int64_t> perm) {
  Dims sizes, strides;
  for (int64_t p : perm) {
    sizes.push_back(t.sizes[p]);
    if (t.buffer >= 0) strides.push_back(t.strides[p]);
  }
  if (t.buffer >= 0) return restride(t, sizes, strides, t.offset);
  return view(t, sizes, [p = std::vector<int64_t>(perm.begin(), perm.end())](const Index& i) {
    Index r(p.size());
    for (size_t d = 0; d < p.size(); ++d) r[p[d]] = i[d];
    return r;
  });
}

namespace {
// Strides of the same memory seen with other sizes, if there are any (as at::detail::computeStride, on provable sizes).
std::optional<Dims> reshaped_strides(const Dims& sizes, const Dims& strides, const Dims& to) {
  // Runs of dims that are one memory-contiguous dim, from the last.
  Dims out(to.size());
  int64_t view_d = static_cast<int64_t>(to.size()) - 1;
  Int tensor_numel = 1, view_numel = 1;
  if (sizes.empty()) {
    for (auto& s : out) s = 1;
    return out;
  }
  Int base = strides.back();
  for (int64_t d = static_cast<int64_t>(sizes.size()) - 1; d >= 0; --d) {
    tensor_numel = tensor_numel * sizes[d];
    const bool boundary = d == 0 || (!sizes[d - 1].is(1) && !(strides[d - 1] == tensor_numel * base));
    if (!boundary) continue;
    while (view_d >= 0 && (sym::known_lt(view_numel, tensor_numel).value_or(false) || to[view_d].is(1))) {
      out[view_d] = view_numel * base;
      view_numel = view_numel * to[view_d];
      --view_d;
    }
    if (!(view_numel == tensor_numel)) return std::nullopt;
    if (d > 0) {
      base = strides[d - 1];
      tensor_numel = 1;
      view_numel = 1;
    }
  }
  if (view_d != -1) return std::nullopt;
  return out;
}
}  // namespace

Tensor Lowering::reshape(const Tensor& t, const Dims& sizes) {
  if (sizes == t.sizes) return t;
  if (t.buffer >= 0)
    if (auto st = reshaped_strides(t.sizes, t.strides, sizes)) return restride(t, sizes, *st, t.offset);
  // Dims that stand alone on both sides need no arithmetic; the rest go through the linear index.
  const Dims from_sizes = t.sizes;
  return view(t, sizes, [from_sizes, sizes](const Index& i) {
    Index r(from_sizes.size());
    size_t a = 0, b = 0;
    while (a < from_sizes.size() || b < sizes.size()) {
      // smallest group of source dims [a, a2) and target dims [b, b2) of equal numel
      size_t a2 = a, b2 = b;
      Int na = 1, nb = 1;
      if (a2 < from_sizes.size()) na = from_sizes[a2++];
      if (b2 < sizes.size()) nb = sizes[b2++];
      while (!(na == nb) || (a2 < from_sizes.size() && b2 == sizes.size()) || (b2 < sizes.size() && a2 == from_sizes.size())) {
        const bool take_source = b2 == sizes.size() || (a2 < from_sizes.size() && sym::known_lt(na, nb).value_or(true) && !(na == nb));
        if (take_source && a2 < from_sizes.size())
          na = na * from_sizes[a2++];
        else if (b2 < sizes.size())
          nb = nb * sizes[b2++];
        else
          break;
      }
      Int lin = 0;
      for (size_t d = b; d < b2; ++d) lin = lin * sizes[d] + i[d];
      for (size_t d = a2; d-- > a;) {
        if (d == a)
          r[d] = lin;
        else {
          r[d] = sym::mod(lin, from_sizes[d]);
          lin = sym::floordiv(lin, from_sizes[d]);
        }
        if (from_sizes[d].is(1)) r[d] = 0;
      }
      a = a2;
      b = b2;
    }
    return r;
  });
}

Tensor Lowering::slice(const Tensor& t, int64_t dim, Int start, Int length, Int step) {
  Dims sizes = t.sizes;
  sizes[dim] = length;
  if (t.buffer >= 0) {
    Dims st = t.strides;
    const Int offset = t.offset + start * st[dim];
    st[dim] = st[dim] * step;
    return restride(t, sizes, st, offset);
  }
  return view(t, sizes, [dim, start, step](const Index& i) {
    Index r = i;
    r[dim] = start + i[dim] * step;
    return r;
  });
}

Tensor Lowering::select(const Tensor& t, int64_t dim, Int index) {
  Dims sizes = t.sizes;
  sizes.erase(sizes.begin() + dim);
  if (t.buffer >= 0) {
    Dims st = t.strides;
    const Int offset = t.offset + index * st[dim];
    st.erase(st.begin() + dim);
    return restride(t, sizes, st, offset);
  }
  return view(t, sizes, [dim, index](const Index& i) {
    Index r = i;
    r.insert(r.begin() + dim, index);
    return r;
  });
}

Tensor Lowering::unsqueeze(const Tensor& t, int64_t dim) {
  Dims sizes = t.sizes;
  sizes.insert(sizes.begin() + dim, Int(1));
  if (t.buffer >= 0) {
    Dims st = t.strides;
    st.insert(st.begin() + dim, dim < static_cast<int64_t>(t.sizes.size()) ? t.sizes[dim] * t.strides[dim] : Int(1));
    return restride(t, sizes, st, t.offset);
  }
  return view(t, sizes, [dim](const Index& i) {
    Index r = i;
    r.erase(r.begin() + dim);
    return r;
  });
}

Tensor Lowering::squeeze(const Tensor& t, int64_t dim) { return select(t, dim, 0); }

Tensor Lowering::cast(const Tensor& t, DType to) {
  if (t.dtype == to) return t;
  return map(to, t.sizes, [at = t.at, to](Body& b, const Index& i) { return ops::cast(at(b, i), to); }, t.cost + 1, t.reads);
}

Tensor Lowering::full(DType dtype, Dims sizes, double v) {
  return map(dtype, std::move(sizes), [dtype, v](Body& b, const Index&) { return b.constant(compute_type(dtype), v); }, 0, 0);
}

}  // namespace vitrify::ops
