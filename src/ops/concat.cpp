// Joining, padding and repeating.
#include "ops/rules.h"
#include "ops/view.h"

namespace vitrify::ops {
namespace {

Tensor as_out(const Args& a, const Tensor& x) {
  const DType out = a.out().dtype;
  return x.dtype == out ? x : map1(a.L, x, out, [x, out](Body&, Val v) { return cast(stored(x, v), compute_type(out)); });
}

bool lower_cat(const Args& a, std::vector<Tensor>& r) {
  const auto& list = std::get<std::vector<ir::Value>>(a.n.args[0]);
  const size_t rank = a.out().sizes.size();
  const int64_t d = a.dim(1, rank);
  std::vector<Tensor> parts;
  for (auto& v : list) {
    if (!v) return false;
    Tensor x = a.L.get(v);
    if (x.sizes.size() == 1 && x.sizes[0].is(0) && rank != 1) continue;  // an old rule: empty vectors join anything
    if (x.sizes.size() != rank) return false;
    if (x.sizes[d].is(0)) continue;
    parts.push_back(as_out(a, x));
  }
  if (parts.empty()) return r.push_back(a.L.full(a.out().dtype, a.out().sizes, 0)), true;
  r.push_back(parts.size() == 1 ? parts[0] : a.L.concat(parts, d));
  return true;
}
bool lower_stack(const Args& a, std::vector<Tensor>& r) {
  const auto& list = std::get<std::vector<ir::Value>>(a.n.args[0]);
  const int64_t d = a.dim(1, a.out().sizes.size());
  std::vector<Tensor> parts;
  for (auto& v : list) {
    if (!v) return false;
    parts.push_back(a.L.unsqueeze(as_out(a, a.L.get(v)), d));
  }
  if (parts.empty()) return false;
  r.push_back(parts.size() == 1 ? parts[0] : a.L.concat(parts, d));
  return true;
}

// pad: (before, after) pairs from the last dim; negative ones cut.
bool lower_constant_pad(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  auto pad = a.ints(1);
  const ir::Arg value = a.n.args[2];
  const DType out = a.out().dtype, t = compute_type(out);
  if (!is_number(value) || !number_converts(value, out) || pad.size() % 2 || pad.size() / 2 > x.sizes.size()) return false;
  r.push_back(a.L.map(
      out, a.out().sizes,
      [=](Body& b, const Index& i) {
        Index j = i;
        Val in = b.constant_int(DType::Bool, 1);
        for (size_t k = 0; k < pad.size() / 2; ++k) {
          if (pad[2 * k].is(0) && pad[2 * k + 1].is(0)) continue;
          const size_t d = j.size() - 1 - k;
          j[d] = i[d] - pad[2 * k];
          in = in & within(b, j[d], 0, x.sizes[d]);
        }
        return b.masked(in, [&] { return x.at(b, j); }, number(b, value, t));
      },
      x.cost + 4, x.reads));
  return true;
}
template <bool reflect>
bool lower_edge_pad(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  auto pad = a.constant_ints(1);
  if (pad.size() / 2 > x.sizes.size()) return false;
  r.push_back(a.L.view(x, a.out().sizes, [pad, sizes = x.sizes](const Index& i) {
    Index j = i;
    for (size_t k = 0; k < pad.size() / 2; ++k) {
      const size_t d = j.size() - 1 - k;
      Int p = i[d] - pad[2 * k], last = sizes[d] - 1;
      if (reflect) {
        if (pad[2 * k] > 0) p = sym::max(p, -p);
        if (pad[2 * k + 1] > 0) p = sym::min(p, 2 * last - p);
      } else {
        if (pad[2 * k] > 0) p = sym::max(p, 0);
        if (pad[2 * k + 1] > 0) p = sym::min(p, last);
      }
      j[d] = p;
    }
    return j;
  }));
  return true;
}

bool lower_roll(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  auto shifts = a.ints(1);
  auto dims = a.none(2) ? std::vector<int64_t>{} : a.constant_ints(2);
  if (x.sizes.empty() || known_empty(x.sizes)) return r.push_back(x), true;
  Tensor y = x;
  if (dims.empty()) {
    if (shifts.size() != 1) return false;
    Int n = 1;
    for (auto& s : x.sizes) n = n * s;
    if (x.sizes.size() > 1) y = a.L.reshape(x, Dims{n});
    dims = {0};
  }
  if (dims.size() != shifts.size()) return false;
  for (auto& d : dims) d = checked_dim(d, y.sizes.size());
  y = a.L.view(y, y.sizes, [dims, shifts, sizes = y.sizes](const Index& i) {
    Index j = i;
    for (size_t k = 0; k < dims.size(); ++k) j[dims[k]] = sym::mod(j[dims[k]] - shifts[k], sizes[dims[k]]);
    return j;
  });
  r.push_back(y.sizes == x.sizes ? y : a.L.reshape(y, x.sizes));
  return true;
}
// repeat and tile: x read modulo its sizes, aligned at the last dim.
bool lower_repeat(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  const auto& out = a.out();
  if (known_empty(out.sizes)) return r.push_back(a.L.full(out.dtype, out.sizes, 0)), true;
  r.push_back(a.L.view(x, out.sizes, [sizes = x.sizes, to = out.sizes](const Index& i) {
    Index j;
    const size_t lead = i.size() - sizes.size();
    for (size_t d = 0; d < sizes.size(); ++d)
      j.push_back(sizes[d] == to[lead + d] ? i[lead + d] : sizes[d].is(1) ? Int(0) : sym::mod(i[lead + d], sizes[d]));
    return j;
  }));
  return true;
}
bool lower_repeat_interleave(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  if (x.sizes.empty()) return false;
  const Int n = a.integer(1);
  const bool flat = a.none(2);
  if (flat && x.sizes.size() > 1) {
    Int all = 1;
    for (auto& s : x.sizes) all = all * s;
    x = a.L.reshape(x, Dims{all});
  }
  const int64_t d = flat ? 0 : a.dim(2, x.sizes.size());
  if (n.is(0)) return r.push_back(a.L.full(x.dtype, a.out().sizes, 0)), true;
  r.push_back(a.L.view(x, a.out().sizes, [d, n](const Index& i) {
    Index j = i;
    j[d] = sym::floordiv(i[d], n);
    return j;
  }));
  return true;
}

// --- shapes

// The common memory format decides the result's, if all parts agree.
std::optional<TensorType> cat_type(sym::Context& ctx, std::span<const TensorType> parts, int64_t dim, DType out) {
  const TensorType* first = nullptr;
  for (auto& t : parts) {
    if (t.dtype == DType::Opaque || t.sizes.empty()) return std::nullopt;
    const bool skipped = t.sizes.size() == 1 && ctx.guard_eq(t.sizes[0], 0);
    if (!skipped && !first) first = &t;
  }
  if (!first || out == DType::Opaque) return std::nullopt;
  const size_t rank = first->sizes.size();
  const int64_t d = wrap_dim(dim, rank);
  if (d < 0 || d >= static_cast<int64_t>(rank)) return std::nullopt;
  Int total = 0;
  std::optional<ir::MemoryFormat> format;
  bool mixed = false;
  for (auto& t : parts) {
    const ir::MemoryFormat f = suggest_memory_format(ctx, t);
    if (!format)
      format = f;
    else if (*format != f)
      mixed = true;
    if (t.sizes.size() == 1 && rank != 1 && ctx.guard_eq(t.sizes[0], 0)) continue;
    if (t.sizes.size() != rank || !(t.device == first->device)) return std::nullopt;
    for (size_t k = 0; k < rank; ++k)
      if (static_cast<int64_t>(k) != d && !ctx.guard_eq(t.sizes[k], first->sizes[k])) return std::nullopt;
    total = total + t.sizes[d];
  }
  TensorType t = contiguous_type(out, first->device, first->sizes);
  t.sizes[d] = total;
  t.strides = strides_for(mixed ? ir::MemoryFormat::Contiguous : *format, t.sizes);
  return t;
}
bool list_types(ArgSpan args, std::vector<TensorType>& types) {
  auto* list = args.empty() ? nullptr : std::get_if<std::vector<ir::Value>>(&args[0]);
  if (!list || list->empty()) return false;
  for (auto& v : *list) {
    if (!v) return false;
    types.push_back(v.type());
  }
  return true;
}
Shape shape_cat(sym::Context& ctx, ArgSpan args) {
  std::vector<TensorType> parts;
  auto dim = int_arg(ctx, args, 1);
  if (!dim || !list_types(args, parts)) return {};
  return one(cat_type(ctx, parts, *dim, result_type({&args[0]})));
}
// A cat whose dim is then split; a new last dim is joined as such.
Shape shape_stack(sym::Context& ctx, ArgSpan args) {
  std::vector<TensorType> parts;
  auto dim = int_arg(ctx, args, 1);
  if (!dim || !list_types(args, parts)) return {};
  const size_t rank = parts[0].sizes.size() + 1;
  const int64_t d = wrap_dim(*dim, rank);
  if (d < 0 || d >= static_cast<int64_t>(rank)) return {};
  for (auto& t : parts) {
    if (t.sizes.size() + 1 != rank) return {};
    for (size_t k = 0; k + 1 < rank; ++k)
      if (!ctx.guard_eq(t.sizes[k], parts[0].sizes[k])) return {};
  }
  const DType out = result_type({&args[0]});
  if (d + 1 == static_cast<int64_t>(rank)) {
    for (auto& t : parts) t.sizes.push_back(Int(1)), t.strides.push_back(Int(1));
    return one(cat_type(ctx, parts, d, out));
  }
  auto t = cat_type(ctx, parts, d, out);
  if (!t) return {};
  Dims sizes = parts[0].sizes;
  sizes.insert(sizes.begin() + d, Int(static_cast<int64_t>(parts.size())));
  auto strides = strides_of_view(ctx, *t, sizes);
  if (!strides) return {};
  t->sizes = sizes, t->strides = *strides;
  return one(t);
}
Shape shape_constant_pad(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  auto* pad = args.size() > 2 ? std::get_if<std::vector<Int>>(&args[1]) : nullptr;
  if (!x || !pad || pad->size() % 2 || pad->size() / 2 > x->sizes.size()) return {};
  bool nothing = true;
  for (auto& p : *pad) {
    if (!p.is_const()) return {};
    nothing = nothing && p.value() <= 0;
  }
  Dims sizes = x->sizes;
  for (size_t k = 0; k < pad->size() / 2; ++k) {
    Int& s = sizes[sizes.size() - 1 - k];
    Int left = s;  // eager cuts off before it pads
    for (const Int& p : {(*pad)[2 * k], (*pad)[2 * k + 1]}) {
      if (p.value() >= 0) continue;
      left = left + p;
      if (ctx.guard_lt(left, 0)) return {};
    }
    s = s + (*pad)[2 * k] + (*pad)[2 * k + 1];
    if (ctx.guard_lt(s, 0)) return {};
  }
  TensorType t = contiguous_type(x->dtype, x->device, sizes);
  if (nothing) {  // eager returns a clone of a slice
    t.strides = x->strides;
    t.strides = preserved_strides(ctx, t);
  } else {
    t.strides = strides_for(suggest_memory_format(ctx, *x), sizes);
  }
  return one(t);
}
Shape shape_roll(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  auto* shifts = args.size() > 2 ? std::get_if<std::vector<Int>>(&args[1]) : nullptr;
  auto* dims = args.size() > 2 ? std::get_if<std::vector<Int>>(&args[2]) : nullptr;
  if (!x || !shifts || !dims || shifts->empty() || dims->size() != shifts->size() || x->sizes.empty()) return {};
  for (auto& s : x->sizes)
    if (ctx.guard_eq(s, 0)) return {};
  if (x->device.kind != DeviceKind::CPU) return {};
  TensorType t = *x;
  t.wrapped_number = false;
  const auto rank = static_cast<int64_t>(x->sizes.size());
  for (size_t k = 0; k < dims->size(); ++k) {  // one dim after the other: the CPU joins two parts, which say how it lies; an empty one is row-major
    const int64_t d = wrap_dim((*dims)[k].is_const() ? (*dims)[k].value() : ctx.specialize((*dims)[k]), x->sizes.size());
    if (d < 0 || d >= rank) return {};
    const bool moves = !ctx.guard_eq(sym::mod((*shifts)[k], x->sizes[d]), 0);
    auto format = ir::MemoryFormat::Contiguous;
    if (moves) {
      TensorType from = t, to = t;
      to.sizes[d] = sym::mod(Int(0) - (*shifts)[k], t.sizes[d]);
      from.sizes[d] = t.sizes[d] - to.sizes[d];
      const auto f = suggest_memory_format(ctx, from);
      if (f == suggest_memory_format(ctx, to)) format = f;
    }
    t.strides = strides_for(format, t.sizes);
  }
  return one(t);
}
template <size_t n, bool reflect>
Shape shape_edge_pad(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  auto* pad = args.size() > 1 ? std::get_if<std::vector<Int>>(&args[1]) : nullptr;
  if (!x || !pad || pad->size() != 2 * n || !is_float(x->dtype) || x->device.kind != DeviceKind::CPU) return {};
  if (x->sizes.size() != n + 1 && x->sizes.size() != n + 2) return {};
  Dims sizes = x->sizes;
  for (auto& s : sizes)
    if (ctx.guard_eq(s, 0)) return {};
  for (size_t k = 0; k < 2 * n; ++k) {
    Int& s = sizes[sizes.size() - 1 - k / 2];
    const Int in = x->sizes[sizes.size() - 1 - k / 2], p = (*pad)[k];
    if (!p.is_const() || (reflect && !ctx.guard_lt(p, in))) return {};
    s = s + p;
  }
  for (auto& s : sizes)
    if (ctx.guard_lt(s, 1)) return {};
  return like_image(ctx, *x, std::move(sizes));
}
Shape shape_repeat(sym::Context&, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  auto* n = args.size() > 1 ? std::get_if<std::vector<Int>>(&args[1]) : nullptr;
  if (!x || !n || n->size() < x->sizes.size()) return {};
  Dims sizes(n->begin(), n->end());
  for (auto& s : sizes)
    if (s.is_const() && s.value() < 0) return {};
  for (size_t d = 0; d < x->sizes.size(); ++d) {
    Int& s = sizes[n->size() - x->sizes.size() + d];
    s = s * x->sizes[d];
  }
  return one(contiguous_type(x->dtype, x->device, sizes));
}

const OpRow kRows[] = {
    {"aten::cat", 0, shape_cat, lower<lower_cat>},
    {"aten::concat", 0, nullptr, lower<lower_cat>},
    {"aten::stack", 0, shape_stack, lower<lower_stack>},
    {"aten::constant_pad_nd", 0, shape_constant_pad, lower<lower_constant_pad>},
    {"aten::reflection_pad1d", 0, shape_edge_pad<1, true>, lower<lower_edge_pad<true>>},
    {"aten::reflection_pad2d", 0, shape_edge_pad<2, true>, lower<lower_edge_pad<true>>},
    {"aten::reflection_pad3d", 0, shape_edge_pad<3, true>, lower<lower_edge_pad<true>>},
    {"aten::replication_pad1d", 0, shape_edge_pad<1, false>, lower<lower_edge_pad<false>>},
    {"aten::replication_pad2d", 0, shape_edge_pad<2, false>, lower<lower_edge_pad<false>>},
    {"aten::replication_pad3d", 0, shape_edge_pad<3, false>, lower<lower_edge_pad<false>>},
    {"aten::roll", 0, shape_roll, lower<lower_roll>},
    {"aten::repeat", 0, shape_repeat, lower<lower_repeat>},
    {"aten::tile", 0, nullptr, lower<lower_repeat>},
    {"aten::repeat_interleave.self_int", 0, nullptr, lower<lower_repeat_interleave>},
};

}  // namespace

std::span<const OpRow> concat_rows() { return kRows; }

}  // namespace vitrify::ops
