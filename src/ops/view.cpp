// Views and their inverses (scatters of a slice). A view moves no data: it rewrites indices.
#include "ops/view.h"

#include <algorithm>

#include "ir/views.h"
#include "ops/rules.h"

namespace vitrify::ops {

Val within(Body& b, Int e, Int lo, Int hi) {
  Val yes = b.constant_int(DType::Bool, 1), i = b.index(e);
  Val above = sym::known_le(lo, e).value_or(false) ? yes : i >= b.index(lo);
  Val below = sym::known_lt(e, hi).value_or(false) ? yes : i < b.index(hi);
  return above & below;
}

namespace {

bool lower_reshape(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  if (x.dtype != a.out().dtype) return false;
  r.push_back(x.sizes == a.out().sizes ? x : a.L.reshape(x, a.out().sizes));
  // What is known of sizes that are symbols, the record's guards say.
  if (x.buffer >= 0 && r[0].buffer < 0 && (a.n.op->flags & ir::kView))
    if (const TensorType& of = std::get<ir::Value>(a.n.args[0]).type(); x.sizes == of.sizes && x.strides == of.strides)
      if (auto strides = strides_of_view(a.L.ctx(), of, a.out().sizes)) r[0] = restride(x, a.out().sizes, std::move(*strides), x.offset);
  return true;
}
bool lower_expand(const Args& a, std::vector<Tensor>& r) { return r.push_back(a.L.expand(a.tensor(0), a.out().sizes)), true; }

bool permuted(const Args& a, std::vector<Tensor>& r, const std::vector<int64_t>& perm) { return r.push_back(a.L.permute(a.tensor(0), perm)), true; }
std::vector<int64_t> identity_perm(size_t rank) {
  std::vector<int64_t> p;
  for (size_t d = 0; d < rank; ++d) p.push_back(static_cast<int64_t>(d));
  return p;
}
bool lower_permute(const Args& a, std::vector<Tensor>& r) {
  if (a.tensor(0).sizes.empty()) return r.push_back(a.tensor(0)), true;
  return permuted(a, r, a.dims(1, a.tensor(0).sizes.size()));
}
bool lower_transpose(const Args& a, std::vector<Tensor>& r) {
  const size_t rank = a.tensor(0).sizes.size();
  if (rank == 0) return r.push_back(a.tensor(0)), true;
  auto p = identity_perm(rank);
  std::swap(p[a.dim(1, rank)], p[a.dim(2, rank)]);
  return permuted(a, r, p);
}
bool lower_t(const Args& a, std::vector<Tensor>& r) {
  auto p = identity_perm(a.tensor(0).sizes.size());
  if (p.size() == 2) std::swap(p[0], p[1]);
  return permuted(a, r, p);
}
// numpy_T, mT: all dims reversed, the last two swapped.
bool lower_mT(const Args& a, std::vector<Tensor>& r) {
  auto p = identity_perm(a.tensor(0).sizes.size());
  if (p.size() < 2) return false;
  std::swap(p[p.size() - 1], p[p.size() - 2]);
  return permuted(a, r, p);
}
bool lower_reversed(const Args& a, std::vector<Tensor>& r) {
  auto p = identity_perm(a.tensor(0).sizes.size());
  return permuted(a, r, std::vector<int64_t>(p.rbegin(), p.rend()));
}
bool lower_movedim(const Args& a, std::vector<Tensor>& r) {
  const size_t rank = a.tensor(0).sizes.size();
  if (rank == 0) return r.push_back(a.tensor(0)), true;
  const int64_t from = a.dim(1, rank), to = a.dim(2, rank);
  auto p = identity_perm(rank);
  p.erase(p.begin() + from);
  p.insert(p.begin() + to, from);
  return permuted(a, r, p);
}

// Start and step of slice.Tensor-like arguments at `first` (start, end, step), over a dim of `size` elements.
std::pair<Int, Int> slice_of(const Args& a, size_t first, Int size) {
  Int start = a.none(first) ? Int(0) : a.integer(first), end = a.none(first + 1) ? size : a.integer(first + 1), step = a.integer(first + 2);
  size_of_slice(a.L.ctx(), size, start, end, step);
  return {start, step};
}
bool lower_slice(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  if (x.sizes.empty()) return false;
  const int64_t d = a.dim(1, x.sizes.size());
  auto [start, step] = slice_of(a, 2, x.sizes[d]);
  r.push_back(a.L.slice(x, d, start, a.out().sizes[d], step));
  return true;
}
bool lower_narrow(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  const int64_t d = a.dim(1, x.sizes.size());
  Int start = a.integer(2);
  if (a.L.ctx().guard_lt(start, 0)) start = start + x.sizes[d];
  r.push_back(a.L.slice(x, d, start, a.out().sizes[d], 1));
  return true;
}
Int wrapped_index(sym::Context& ctx, Int i, Int size) { return ctx.guard_lt(i, 0) ? i + size : i; }
bool lower_select(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  const int64_t d = a.dim(1, x.sizes.size());
  r.push_back(a.L.select(x, d, wrapped_index(a.L.ctx(), a.integer(2), x.sizes[d])));
  return true;
}
bool lower_unfold(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  if (x.sizes.empty()) return false;
  const int64_t d = a.dim(1, x.sizes.size());
  if (x.buffer >= 0) {
    Dims strides = x.strides;
    strides.push_back(strides[d]);
    strides[d] = strides[d] * a.integer(3);
    return r.push_back(restride(x, a.out().sizes, std::move(strides), x.offset)), true;
  }
  r.push_back(a.L.view(x, a.out().sizes, [d, step = a.integer(3)](const Index& i) {
    Index s(i.begin(), i.end() - 1);
    s[d] = i[d] * step + i.back();
    return s;
  }));
  return true;
}
struct Diagonal {
  int64_t d1, d2;
  Int row, col;                         // where it starts
  Index source(const Index& i) const {  // i: the other dims, then the position
    Index s(i.begin(), i.end() - 1);
    const int64_t lo = std::min(d1, d2), hi = std::max(d1, d2);
    s.insert(s.begin() + lo, i.back() + (lo == d1 ? row : col));
    s.insert(s.begin() + hi, i.back() + (hi == d1 ? row : col));
    return s;
  }
};
Diagonal diagonal_of(const Args& a, size_t first, size_t rank) {
  const int64_t offset = a.constant_int(first);
  return {a.dim(first + 1, rank), a.dim(first + 2, rank), offset < 0 ? -offset : 0, offset < 0 ? 0 : offset};
}
bool lower_diagonal(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  const Diagonal d = diagonal_of(a, 1, x.sizes.size());
  if (x.buffer >= 0) {
    Dims strides;
    for (size_t k = 0; k < x.sizes.size(); ++k)
      if (static_cast<int64_t>(k) != d.d1 && static_cast<int64_t>(k) != d.d2) strides.push_back(x.strides[k]);
    strides.push_back(x.strides[d.d1] + x.strides[d.d2]);
    return r.push_back(restride(x, a.out().sizes, std::move(strides), x.offset + d.row * x.strides[d.d1] + d.col * x.strides[d.d2])), true;
  }
  r.push_back(a.L.view(x, a.out().sizes, [d](const Index& i) { return d.source(i); }));
  return true;
}
bool lower_flip(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  if (x.sizes.empty() || a.ints(1).empty()) return r.push_back(x), true;
  r.push_back(a.L.view(x, x.sizes, [dims = a.dims(1, x.sizes.size()), sizes = x.sizes](const Index& i) {
    Index s = i;
    for (int64_t d : dims) s[d] = sizes[d] - 1 - i[d];
    return s;
  }));
  return true;
}
// split, chunk, ...: consecutive parts along the dim at argument `dim_at`.
template <size_t dim_at>
bool lower_split(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  if (x.sizes.empty()) return false;
  const int64_t d = a.dim(dim_at, x.sizes.size());
  Int start = 0;
  for (auto& o : a.n.outs) {
    r.push_back(a.L.slice(x, d, start, o.sizes[d], 1));
    start = start + o.sizes[d];
  }
  return true;
}
bool lower_unbind(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  const int64_t d = a.dim(1, x.sizes.size());
  for (size_t k = 0; k < a.n.outs.size(); ++k) r.push_back(a.L.select(x, d, static_cast<int64_t>(k)));
  return true;
}
bool lower_pixel_shuffle(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  const int64_t f = a.constant_int(1), n = static_cast<int64_t>(x.sizes.size());
  if (n < 3) return false;
  r.push_back(a.L.view(x, a.out().sizes, [f, n](const Index& i) {
    Index s = i;
    s[n - 3] = i[n - 3] * (f * f) + sym::mod(i[n - 2], f) * f + sym::mod(i[n - 1], f);
    s[n - 2] = sym::floordiv(i[n - 2], f);
    s[n - 1] = sym::floordiv(i[n - 1], f);
    return s;
  }));
  return true;
}
bool lower_pixel_unshuffle(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  const int64_t f = a.constant_int(1), n = static_cast<int64_t>(x.sizes.size());
  if (n < 3) return false;
  r.push_back(a.L.view(x, a.out().sizes, [f, n](const Index& i) {
    Index s = i;
    s[n - 3] = sym::floordiv(i[n - 3], f * f);
    s[n - 2] = i[n - 2] * f + sym::mod(sym::floordiv(i[n - 3], f), f);
    s[n - 1] = i[n - 1] * f + sym::mod(i[n - 3], f);
    return s;
  }));
  return true;
}

// --- a slice of x replaced by src; x missing: zeros

Tensor with_slice(const Args& a, const Tensor& x, const Tensor& src, int64_t d, Int start, Int length, Int step) {
  const auto& out = a.out();
  return a.L.map(
      out.dtype, out.sizes,
      [=](Body& b, const Index& i) {
        const Int from_start = i[d] - start;
        Val in = within(b, i[d], start, start + (length - 1) * step + 1);
        if (!step.is(1)) in = in & eq(b.index(sym::mod(from_start, step)), b.constant_int(DType::I64, 0));
        Index j = i;
        j[d] = step.is(1) ? from_start : sym::floordiv(from_start, step);
        Val other = x ? x.at(b, i) : b.constant(compute_type(out.dtype), 0);
        return b.masked(in, [&] { return cast(src.at(b, j), other.type); }, other);
      },
      (x ? x.cost : 0) + src.cost + 4, (x ? x.reads : 0) + src.reads);
}
bool lower_slice_scatter(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0), src = a.tensor(1);
  if (!shape_slice_scatter(a.L.ctx(), a.n.args)) return false;  // eager refuses it
  const int64_t d = a.dim(2, x.sizes.size());
  auto [start, step] = slice_of(a, 3, x.sizes[d]);
  r.push_back(with_slice(a, x, src, d, start, src.sizes[d], step));
  return true;
}
bool lower_slice_backward(const Args& a, std::vector<Tensor>& r) {
  Tensor g = a.tensor(0);
  if (g.sizes.empty()) return false;
  const int64_t d = a.dim(2, g.sizes.size());
  auto [start, step] = slice_of(a, 3, a.out().sizes[d]);
  r.push_back(with_slice(a, {}, g, d, start, g.sizes[d], step));
  return true;
}
Tensor with_select(const Args& a, const Tensor& x, const Tensor& src, int64_t d, Int index) {
  return with_slice(a, x, a.L.unsqueeze(src, d), d, wrapped_index(a.L.ctx(), index, a.out().sizes[d]), 1, 1);
}
bool lower_select_scatter(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  if (!shape_select_scatter(a.L.ctx(), a.n.args)) return false;
  r.push_back(with_select(a, x, a.tensor(1), a.dim(2, x.sizes.size()), a.integer(3)));
  return true;
}
bool lower_select_backward(const Args& a, std::vector<Tensor>& r) {
  r.push_back(with_select(a, {}, a.tensor(0), a.dim(2, a.out().sizes.size()), a.integer(3)));
  return true;
}
Tensor with_diagonal(const Args& a, const Tensor& x, const Tensor& src, const Diagonal& d) {
  const auto& out = a.out();
  const Int length = src.sizes.back();
  return a.L.map(
      out.dtype, out.sizes,
      [=](Body& b, const Index& i) {
        const Int k = i[d.d1] - d.row;
        Val in = eq(b.index(k), b.index(i[d.d2] - d.col)) & within(b, k, 0, length);
        Index j;
        for (size_t q = 0; q < i.size(); ++q)
          if (static_cast<int64_t>(q) != d.d1 && static_cast<int64_t>(q) != d.d2) j.push_back(i[q]);
        j.push_back(k);
        Val other = x ? x.at(b, i) : b.constant(compute_type(out.dtype), 0);
        return b.masked(in, [&] { return cast(src.at(b, j), other.type); }, other);
      },
      (x ? x.cost : 0) + src.cost + 4, (x ? x.reads : 0) + src.reads);
}
bool lower_diagonal_scatter(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  if (!shape_diagonal_scatter(a.L.ctx(), a.n.args)) return false;
  r.push_back(with_diagonal(a, x, a.tensor(1), diagonal_of(a, 2, x.sizes.size())));
  return true;
}
bool lower_diagonal_backward(const Args& a, std::vector<Tensor>& r) {
  r.push_back(with_diagonal(a, {}, a.tensor(0), diagonal_of(a, 2, a.out().sizes.size())));
  return true;
}

// Memory without gaps or overlaps: dims from the outermost, those of size 1 left out.
std::optional<std::vector<size_t>> dense_order(const Dims& sizes, const Dims& strides) {
  std::vector<size_t> order;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (!sizes[d].is_const() || !strides[d].is_const() || sizes[d].value() == 0) return std::nullopt;
    if (!sizes[d].is(1)) order.push_back(d);
  }
  std::sort(order.begin(), order.end(), [&](size_t x, size_t y) { return strides[x].value() > strides[y].value(); });
  int64_t expect = 1;
  for (size_t k = order.size(); k-- > 0;) {
    if (strides[order[k]].value() != expect) return std::nullopt;
    expect *= sizes[order[k]].value();
  }
  return order;
}
// The index that lies at place `p` of such memory.
Index index_at(Int p, const Dims& sizes, const Dims& strides, const std::vector<size_t>& order) {
  Index i(sizes.size(), Int(0));
  for (size_t k = 0; k < order.size(); ++k) {
    const Int q = sym::floordiv(p, strides[order[k]]);
    i[order[k]] = k == 0 ? q : sym::mod(q, sizes[order[k]]);
  }
  return i;
}
Int place_of(const Index& i, const Dims& strides) {
  Int p = 0;
  for (size_t d = 0; d < i.size(); ++d) p += i[d] * strides[d];
  return p;
}
Int numel_of(const Dims& sizes) {
  Int n = 1;
  for (Int s : sizes) n = n * s;
  return n;
}
Dims dims_of(const std::vector<Int>& v) { return {v.begin(), v.end()}; }

// Of elements in a row, from the first on: what memory looks like to whoever records these ops (src/torch/strided.cpp).
bool lower_as_strided(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  const Dims strides = dims_of(a.ints(2));
  if (x.sizes.size() != 1 || !a.none(3)) return false;
  for (size_t d = 0; d < strides.size(); ++d)
    if (!strides[d].is_const() || !a.out().sizes[d].is_const()) return false;
  if (x.buffer >= 0 && x.strides[0].is(1)) return r.push_back(restride(x, a.out().sizes, strides, x.offset)), true;
  r.push_back(a.L.view(x, a.out().sizes, [=](const Index& i) { return Index{place_of(i, strides)}; }));
  return true;
}
// (self, src, size, stride, offset), where src goes over all of self
bool lower_as_strided_scatter(const Args& a, std::vector<Tensor>& r) {
  Tensor src = a.tensor(1);
  const Dims& all = a.out().sizes;
  const Dims sizes = dims_of(a.ints(2)), strides = dims_of(a.ints(3));
  const auto order = dense_order(sizes, strides);
  if (all.size() != 1 || !order || !(all[0] == numel_of(sizes)) || !a.none(4) || src.dtype != a.out().dtype) return false;
  r.push_back(a.L.view(src, all, [=, order = *order](const Index& i) { return index_at(i[0], sizes, strides, order); }));
  return true;
}

constexpr uint32_t V = ir::kView;
const OpRow kRows[] = {
    {"aten::view", V, shape_view, lower<lower_reshape>},
    {"aten::reshape", 0, nullptr, lower<lower_reshape>},
    {"aten::_unsafe_view", 0, shape_unsafe_view, lower<lower_reshape>},
    {"aten::_reshape_alias", V, shape_as_strided, lower<lower_reshape>},
    {"aten::_reshape_copy", 0, nullptr, lower<lower_reshape>},
    {"aten::view_copy", 0, nullptr, lower<lower_reshape>},
    {"aten::view.dtype", V | ir::kStartsAligned, nullptr, lower<lower_reshape>},
    {"aten::view_as", V, nullptr, lower<lower_reshape>},
    {"aten::reshape_as", 0, nullptr, lower<lower_reshape>},
    {"aten::flatten.using_ints", 0, nullptr, lower<lower_reshape>},
    {"aten::unflatten.int", 0, nullptr, lower<lower_reshape>},
    {"aten::squeeze", V, shape_squeeze_all, lower<lower_reshape>},
    {"aten::squeeze.dim", V, shape_squeeze, lower<lower_reshape>},
    {"aten::squeeze.dims", V, shape_squeeze, lower<lower_reshape>},
    {"aten::unsqueeze", V, shape_unsqueeze, lower<lower_reshape>},
    {"aten::squeeze_copy.dim", 0, nullptr, lower<lower_reshape>},
    {"aten::unsqueeze_copy", 0, nullptr, lower<lower_reshape>},
    {"aten::expand", V, shape_expand, lower<lower_expand>},
    {"aten::expand_as", V, nullptr, lower<lower_expand>},
    {"aten::expand_copy", 0, nullptr, lower<lower_expand>},
    {"aten::broadcast_to", V, nullptr, lower<lower_expand>},
    {"aten::permute", V, shape_permute, lower<lower_permute>},
    {"aten::permute_copy", 0, nullptr, lower<lower_permute>},
    {"aten::transpose.int", V, shape_transpose, lower<lower_transpose>},
    {"aten::transpose_copy.int", 0, nullptr, lower<lower_transpose>},
    {"aten::swapaxes", V, nullptr, lower<lower_transpose>},
    {"aten::swapdims", V, nullptr, lower<lower_transpose>},
    {"aten::t", V, shape_t, lower<lower_t>},
    {"aten::t_copy", 0, nullptr, lower<lower_t>},
    {"aten::mT", V, nullptr, lower<lower_mT>},
    {"aten::numpy_T", V, nullptr, lower<lower_reversed>},
    {"aten::movedim.int", V, nullptr, lower<lower_movedim>},
    {"aten::slice.Tensor", V, shape_slice, lower<lower_slice>},
    {"aten::slice_copy.Tensor", 0, nullptr, lower<lower_slice>},
    {"aten::narrow", V, nullptr, lower<lower_narrow>},
    {"aten::narrow_copy", 0, nullptr, lower<lower_narrow>},
    {"aten::select.int", V, shape_select, lower<lower_select>},
    {"aten::select_copy.int", 0, nullptr, lower<lower_select>},
    {"aten::unfold", V, shape_unfold, lower<lower_unfold>},
    {"aten::unfold_copy", 0, nullptr, lower<lower_unfold>},
    {"aten::diagonal", V, shape_diagonal, lower<lower_diagonal>},
    {"aten::diagonal_copy", 0, nullptr, lower<lower_diagonal>},
    {"aten::flip", 0, shape_flip, lower<lower_flip>},
    {"aten::split.Tensor", V, shape_split, lower<lower_split<2>>},
    {"aten::split_with_sizes", V, shape_split_sizes, lower<lower_split<2>>},
    {"aten::split_with_sizes_copy", 0, nullptr, lower<lower_split<2>>},
    {"aten::split.sizes", V, nullptr, lower<lower_split<2>>},
    {"aten::unsafe_split.Tensor", 0, shape_split, lower<lower_split<2>>},
    {"aten::unsafe_split_with_sizes", 0, shape_split_sizes, lower<lower_split<2>>},
    {"aten::chunk", V, nullptr, lower<lower_split<2>>},
    {"aten::unsafe_chunk", 0, nullptr, lower<lower_split<2>>},
    {"aten::tensor_split.sections", V, nullptr, lower<lower_split<2>>},
    {"aten::unbind.int", V, shape_unbind, lower<lower_unbind>},
    {"aten::pixel_shuffle", 0, shape_pixel_shuffle, lower<lower_pixel_shuffle>},
    {"aten::pixel_unshuffle", 0, shape_pixel_unshuffle, lower<lower_pixel_unshuffle>},
    {"aten::slice_scatter", ir::kCopiesMemory, shape_slice_scatter, lower<lower_slice_scatter>},
    {"aten::select_scatter", ir::kCopiesMemory, shape_select_scatter, lower<lower_select_scatter>},
    {"aten::diagonal_scatter", ir::kCopiesMemory, shape_diagonal_scatter, lower<lower_diagonal_scatter>},
    {"aten::slice_backward", 0, shape_backward_of_view, lower<lower_slice_backward>},
    {"aten::select_backward", 0, shape_backward_of_view, lower<lower_select_backward>},
    {"aten::diagonal_backward", 0, shape_backward_of_view, lower<lower_diagonal_backward>},
    {"aten::as_strided", V, shape_as_strided, lower<lower_as_strided>},
    {"aten::as_strided_scatter", 0, nullptr, lower<lower_as_strided_scatter>},
    {"aten::_conj", V | ir::kMakesBits, nullptr, nullptr},
    {"aten::view_as_real", V, shape_view_as_real, nullptr},
    {"aten::view_as_complex", V | ir::kStartsAligned, shape_view_as_complex, nullptr},
};

}  // namespace

std::span<const OpRow> view_rows() { return kRows; }

}  // namespace vitrify::ops
