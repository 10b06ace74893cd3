// Reads and writes at loaded positions. Out of range faults; negative positions wrap only where eager's do.
#include "ops/rules.h"
#include "ops/view.h"

namespace vitrify::ops {
namespace {

// A position that must be in [0, bound) as it is.
Int plain_index(Body& b, Val v, Int bound) { return b.indirect(b.check_index(cast(v, DType::I64), bound), bound); }
bool is_index(const Tensor& t) { return t.dtype == DType::I64 || t.dtype == DType::I32; }

bool lower_embedding(const Args& a, std::vector<Tensor>& r) {
  Tensor w = a.tensor(0), i = a.tensor(1);
  if (!is_index(i) || w.sizes.size() != 2) return false;
  r.push_back(a.L.map(
      w.dtype, a.out().sizes,
      [=, n = w.sizes[0]](Body& b, const Index& k) {
        Index at(k.begin(), k.end() - 1);
        return w.at(b, Index{plain_index(b, i.at(b, at), n), k.back()});
      },
      w.cost + i.cost + 2, w.reads + i.reads));
  return true;
}

bool lower_index_select(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0), i = a.tensor(2);
  if (!is_index(i) || x.sizes.empty() || i.sizes.size() > 1) return false;
  const int64_t d = wrap_dim(a.constant_int(1), x.sizes.size());
  r.push_back(a.L.map(
      x.dtype, a.out().sizes,
      [=](Body& b, const Index& k) {
        Index at = k;
        at[d] = plain_index(b, i.at(b, i.sizes.empty() ? Index{} : Index{k[d]}), x.sizes[d]);
        return x.at(b, at);
      },
      x.cost + i.cost + 2, x.reads + i.reads));
  return true;
}

bool lower_gather(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0), i = a.tensor(2);
  if (!is_index(i) || x.sizes.empty() || x.sizes.size() != i.sizes.size()) return false;
  const int64_t d = wrap_dim(a.constant_int(1), x.sizes.size());
  r.push_back(a.L.map(
      x.dtype, a.out().sizes,
      [=](Body& b, const Index& k) {
        Index at = k;
        at[d] = plain_index(b, i.at(b, k), x.sizes[d]);
        return x.at(b, at);
      },
      x.cost + i.cost + 2, x.reads + i.reads));
  return true;
}

// Advanced indexing with integer tensors: where the broadcast index dims go and what each dim of x reads.
struct Advanced {
  std::vector<Tensor> indices;  // unset: the dim is taken whole
  Dims shape;                   // of the broadcast indices
  size_t position = 0;          // where `shape` starts in the result

  // Result index -> index into x.
  Index source(Body& b, const Index& k, const Dims& sizes) const {
    const Index at(k.begin() + position, k.begin() + position + shape.size());
    Index s;
    size_t next = 0;  // result dim of the next whole dim
    for (size_t d = 0; d < sizes.size(); ++d) {
      if (d < indices.size() && indices[d]) {
        s.push_back(b.checked_index(cast(indices[d].at(b, at), DType::I64), sizes[d]));
      } else {
        if (next == position) next += shape.size();
        s.push_back(k[next++]);
      }
    }
    return s;
  }
  int cost() const {
    int c = 0;
    for (auto& i : indices) c += i ? i.cost + 4 : 0;
    return c;
  }
  int reads() const {
    int c = 0;
    for (auto& i : indices) c += i ? i.reads : 0;
    return c;
  }
};
std::optional<Advanced> advanced(const Args& a, size_t at, size_t rank) {
  auto* list = std::get_if<std::vector<ir::Value>>(&a.n.args[at]);
  if (!list || list->size() > rank) return std::nullopt;
  Advanced r;
  bool first = true;
  size_t groups = 0;
  for (size_t d = 0; d < list->size(); ++d) {
    const ir::Value& v = (*list)[d];
    if (!v) {
      r.indices.emplace_back();
      continue;
    }
    if (v.type().dtype != DType::I64 && v.type().dtype != DType::I32) return std::nullopt;
    const auto& sizes = v.type().sizes;
    if (first)
      r.shape = sizes;
    else {
      Dims merged;
      if (!broadcast_sizes(a.L.ctx(), r.shape, sizes, merged)) return std::nullopt;
      r.shape = merged;
    }
    if (groups == 0 || !(*list)[d - 1]) ++groups;
    if (groups == 1 && first) r.position = d;
    first = false;
    r.indices.push_back(a.L.get(v));
  }
  if (first) return std::nullopt;
  if (groups > 1) r.position = 0;
  for (auto& i : r.indices)
    if (i) i = a.L.expand(i, r.shape);
  return r;
}

bool lower_index(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0);
  auto adv = advanced(a, 1, x.sizes.size());
  if (!adv || known_empty(x.sizes)) return false;
  r.push_back(a.L.map(
      x.dtype, a.out().sizes, [x, adv = *adv](Body& b, const Index& k) { return x.at(b, adv.source(b, k, x.sizes)); }, x.cost + adv->cost(),
      x.reads + adv->reads()));
  return true;
}

// --- writes. Colliding plain stores have no order, so only those of one value are lowered; half types would accumulate their rounding.
bool can_accumulate(DType t) { return is_int(t) || (is_float(t) && t == compute_type(t)); }

bool lower_index_put(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0), v = a.tensor(2);
  const bool accumulate = a.boolean(3);
  auto adv = advanced(a, 1, x.sizes.size());
  if (!adv || v.dtype != x.dtype || known_empty(x.sizes)) return false;
  Int n = 1;
  for (auto& s : v.sizes) n = n * s;
  if (accumulate ? !can_accumulate(x.dtype) : !n.is(1)) return false;
  Dims space;
  size_t whole = 0;
  for (size_t d = 0; d < x.sizes.size() + 1; ++d) {
    if (space.size() == adv->position) space.insert(space.end(), adv->shape.begin(), adv->shape.end());
    for (; whole < x.sizes.size(); ++whole)
      if (whole >= adv->indices.size() || !adv->indices[whole]) break;
    if (whole < x.sizes.size()) space.push_back(x.sizes[whole++]);
    if (adv->shape.empty() && whole >= x.sizes.size()) break;
    if (space.size() >= x.sizes.size() + adv->shape.size()) break;
  }
  if (v.sizes.size() > space.size()) return false;
  v = a.L.expand(v, space);
  r.push_back(a.L.scatter(x, space, accumulate,
                          [x, v, adv = *adv](Body& b, const Index& k) { return Lowering::Write{adv.source(b, k, x.sizes), v.at(b, k), {}}; }));
  return true;
}

bool scatter_along(const Args& a, std::vector<Tensor>& r, bool accumulate, const std::function<Val(Body&, const Index&, DType)>& value) {
  Tensor x = a.tensor(0), i = a.tensor(2);
  if (i.dtype != DType::I64 || x.sizes.empty() || x.sizes.size() != i.sizes.size()) return false;
  const int64_t d = wrap_dim(a.constant_int(1), x.sizes.size());
  r.push_back(a.L.scatter(x, i.sizes, accumulate, [=](Body& b, const Index& k) {
    Index at = k;
    at[d] = plain_index(b, i.at(b, k), x.sizes[d]);
    return Lowering::Write{at, value(b, k, compute_type(x.dtype)), {}};
  }));
  return true;
}
bool lower_scatter_value(const Args& a, std::vector<Tensor>& r) {
  const ir::Arg& v = a.n.args[3];
  if (!is_number(v) || !number_fits(v, a.out().dtype)) return false;
  return scatter_along(a, r, false, [v](Body& b, const Index&, DType t) { return number(b, v, t); });
}
bool lower_scatter_add(const Args& a, std::vector<Tensor>& r) {
  Tensor src = a.tensor(3);
  if (!can_accumulate(a.out().dtype) || src.dtype != a.out().dtype) return false;
  return scatter_along(a, r, true, [src](Body& b, const Index& k, DType t) { return cast(src.at(b, k), t); });
}
bool lower_index_add(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0), i = a.tensor(2), src = a.tensor(3);
  const ir::Arg alpha = a.n.args[4];
  const DType t = compute_type(x.dtype);
  if (!is_index(i) || i.sizes.size() != 1 || x.sizes.empty() || !can_accumulate(x.dtype) || src.dtype != x.dtype ||
      src.sizes.size() != x.sizes.size())
    return false;
  if (!is_number(alpha) || !number_fits(alpha, t)) return false;
  const int64_t d = wrap_dim(a.constant_int(1), x.sizes.size());
  r.push_back(a.L.scatter(x, src.sizes, true, [=](Body& b, const Index& k) {
    Index at = k;
    at[d] = plain_index(b, i.at(b, Index{k[d]}), x.sizes[d]);
    return Lowering::Write{at, src.at(b, k) * number(b, alpha, t), {}};
  }));
  return true;
}
bool lower_index_fill(const Args& a, std::vector<Tensor>& r) {
  Tensor x = a.tensor(0), i = a.tensor(2);
  const ir::Arg v = a.n.args[3];
  if (i.dtype != DType::I64 || i.sizes.size() != 1 || x.sizes.empty() || !is_number(v) || !number_fits(v, x.dtype)) return false;
  const int64_t d = wrap_dim(a.constant_int(1), x.sizes.size());
  Dims space = x.sizes;
  space[d] = i.sizes[0];
  r.push_back(a.L.scatter(x, space, false, [=](Body& b, const Index& k) {
    Index at = k;
    at[d] = b.checked_index(i.at(b, Index{k[d]}), x.sizes[d]);
    return Lowering::Write{at, number(b, v, compute_type(x.dtype)), {}};
  }));
  return true;
}
bool lower_embedding_backward(const Args& a, std::vector<Tensor>& r) {
  Tensor g = a.tensor(0), i = a.tensor(1);
  const Int padding = a.integer(3), rows = a.integer(2);
  if (a.boolean(4) || !is_index(i) || !can_accumulate(g.dtype) || g.sizes.empty()) return false;
  Tensor zero = a.L.full(g.dtype, a.out().sizes, 0);
  r.push_back(a.L.scatter(zero, g.sizes, true, [=](Body& b, const Index& k) {
    Val row = cast(i.at(b, Index(k.begin(), k.end() - 1)), DType::I64);
    Val kept = ne(row, b.index(padding));
    row = b.check_index(where(kept, row, row.lit(0)), rows);
    return Lowering::Write{Index{b.indirect(row, rows), k.back()}, g.at(b, k), kept};
  }));
  return true;
}

// --- shapes

Shape shape_embedding(sym::Context&, ArgSpan args) {
  const TensorType *w = tensor_arg(args, 0), *i = tensor_arg(args, 1);
  if (!w || !i || w->sizes.size() != 2 || (i->dtype != DType::I64 && i->dtype != DType::I32)) return {};
  Dims sizes = i->sizes;
  sizes.push_back(w->sizes[1]);
  return one(contiguous_type(w->dtype, w->device, sizes));
}
Shape shape_index_select(sym::Context& ctx, ArgSpan args) {
  const TensorType *x = tensor_arg(args, 0), *i = tensor_arg(args, 2);
  auto d = dims_arg(ctx, args, 1, x ? x->sizes.size() : 0);
  if (!x || !i || !d || d->size() != 1 || x->sizes.empty() || i->sizes.size() > 1 || (i->dtype != DType::I64 && i->dtype != DType::I32)) return {};
  Dims sizes = x->sizes;
  sizes[(*d)[0]] = i->sizes.empty() ? Int(1) : i->sizes[0];
  return one(contiguous_type(x->dtype, x->device, sizes));
}
Shape shape_gather(sym::Context& ctx, ArgSpan args) {
  const TensorType *x = tensor_arg(args, 0), *i = tensor_arg(args, 2);
  auto d = dims_arg(ctx, args, 1, x ? x->sizes.size() : 0);
  if (!x || !i || !d || x->sizes.empty() || i->dtype != DType::I64 || i->sizes.size() != x->sizes.size()) return {};
  for (size_t k = 0; k < x->sizes.size(); ++k)
    if (static_cast<int64_t>(k) != (*d)[0] && !ctx.guard_le(i->sizes[k], x->sizes[k])) return {};
  return one(contiguous_type(x->dtype, x->device, i->sizes));
}
Shape shape_as_self(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  if (!x) return {};
  return one(contiguous_type(x->dtype, x->device, x->sizes));
}
// scatter and index_put clone their operand, or allocate like it.
Shape shape_preserved(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  if (!x) return {};
  TensorType t = *x;
  t.wrapped_number = false;
  t.strides = preserved_strides(ctx, *x);
  return one(t);
}
Shape shape_embedding_backward(sym::Context&, ArgSpan args) {
  const TensorType* g = tensor_arg(args, 0);
  auto* n = args.size() > 2 ? std::get_if<Int>(&args[2]) : nullptr;
  if (!g || !n || g->sizes.empty()) return {};
  return one(contiguous_type(g->dtype, g->device, Dims{*n, g->sizes.back()}));
}
// The result of an index as eager's iterator allocates it: over the operand with stride 0 where it is indexed, and over each index, broadcast and
// with dims of size 1 in place of the operand's whole dims.
Shape shape_index(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  auto* list = args.size() > 1 ? std::get_if<std::vector<ir::Value>>(&args[1]) : nullptr;
  if (!x || !list || list->size() > x->sizes.size()) return {};
  auto index_at = [&](size_t d) { return d < list->size() && (*list)[d] ? &(*list)[d].type() : nullptr; };
  Dims shape;
  size_t groups = 0, position = 0, count = 0;
  bool contiguous = x->strides == ir::contiguous_strides(x->sizes);
  for (size_t d = 0; d < list->size(); ++d) {
    const TensorType* i = index_at(d);
    if (!i) continue;
    if (i->dtype != DType::I64 && i->dtype != DType::I32) return {};
    contiguous = contiguous && i->strides == ir::contiguous_strides(i->sizes);
    if (count++ == 0)
      shape = i->sizes, position = d;
    else {
      Dims merged;
      if (!broadcast_sizes(ctx, shape, i->sizes, merged)) return {};
      shape = merged;
    }
    if (groups == 0 || !index_at(d - 1)) ++groups;
  }
  if (count == 0) return {};
  if (groups > 1) position = 0;
  TensorType source = contiguous_type(x->dtype, x->device, {});
  auto whole = [&](size_t d) {
    if (!index_at(d)) source.sizes.push_back(x->sizes[d]), source.strides.push_back(x->strides[d]);
  };
  size_t d = 0;
  for (; source.sizes.size() < position; ++d) whole(d);
  source.sizes.insert(source.sizes.end(), shape.begin(), shape.end());
  source.strides.insert(source.strides.end(), shape.size(), Int(0));
  for (; d < x->sizes.size(); ++d) whole(d);
  for (auto& s : source.sizes)
    if (ctx.guard_eq(s, 0)) contiguous = false;
  for (size_t k = 0; k < x->sizes.size(); ++k)
    if (index_at(k) && ctx.guard_eq(x->sizes[k], 0)) return {};  // every index is out of range
  if (contiguous) return one(contiguous_type(x->dtype, x->device, source.sizes));

  std::vector<TensorType> operands{source};
  for (size_t k = 0; k < list->size(); ++k) {
    const TensorType* given = index_at(k);
    if (!given) continue;
    TensorType i = contiguous_type(DType::I64, given->device, shape);
    if (given->sizes == shape) {
      i.strides = given->strides;
    } else {
      const size_t lead = shape.size() - given->sizes.size();
      for (size_t n = shape.size(); n-- > 0;) {
        if (n >= lead)
          i.strides[n] = given->sizes[n - lead] == shape[n] ? given->strides[n - lead] : Int(0);
        else
          i.strides[n] = !shape[n].is(1) ? Int(0) : n + 1 < shape.size() ? shape[n + 1] * i.strides[n + 1] : Int(1);
      }
    }
    if (given->dtype == DType::I32) i.strides = preserved_strides(ctx, i);  // widened after it was broadcast
    Dims sizes(source.sizes.size(), Int(1));
    std::copy(shape.begin(), shape.end(), sizes.begin() + position);
    auto strides = strides_of_view(ctx, i, sizes);
    if (!strides) return {};
    i.sizes = sizes, i.strides = *strides;
    operands.push_back(std::move(i));
  }
  std::vector<const TensorType*> pointers;
  for (auto& t : operands) pointers.push_back(&t);
  return one(elementwise_type(ctx, pointers, x->dtype));
}

// The index, and a source, must fit; eager says so otherwise.
Shape shape_scatter(sym::Context& ctx, ArgSpan args) {
  const TensorType *x = tensor_arg(args, 0), *i = tensor_arg(args, 2), *src = tensor_arg(args, 3);
  auto dim = int_arg(ctx, args, 1);
  if (!x || !i || !dim || (i->dtype != DType::I64 && i->dtype != DType::I32)) return {};
  auto rank = [](const TensorType& t) { return std::max<size_t>(t.sizes.size(), 1); };
  const int64_t d = wrap_dim(*dim, x->sizes.size());
  if (rank(*i) != rank(*x) || (src && (rank(*src) != rank(*x) || src->dtype != x->dtype)) || d < 0 || d >= static_cast<int64_t>(rank(*x))) return {};
  for (size_t k = 0; k < i->sizes.size(); ++k) {
    if (static_cast<int64_t>(k) != d && k < x->sizes.size() && ctx.guard_lt(x->sizes[k], i->sizes[k])) return {};
    if (src && k < src->sizes.size() && ctx.guard_lt(src->sizes[k], i->sizes[k])) return {};
  }
  return shape_as_self(ctx, args);
}
// The Meta kernel gives the strides of CUDA's, [1, size]; the CPU's are contiguous, which what follows inherits.
Shape shape_nonzero_static(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = tensor_arg(args, 0);
  const auto size = int_arg(ctx, args, 1);
  if (!x || x->device.kind != DeviceKind::CPU || !size || *size < 0) return {};
  return one(contiguous_type(DType::I64, x->device, {*size, static_cast<int64_t>(x->sizes.size())}));
}

const OpRow kRows[] = {
    {"aten::embedding", 0, shape_embedding, lower<lower_embedding>},
    {"aten::index_select", 0, shape_index_select, lower<lower_index_select>},
    {"aten::gather", 0, shape_gather, lower<lower_gather>},
    {"aten::index.Tensor", 0, shape_index, lower<lower_index>},
    {"aten::_unsafe_index.Tensor", 0, nullptr, lower<lower_index>},
    {"aten::index_put", 0, shape_preserved, lower<lower_index_put>},
    {"aten::_unsafe_index_put", 0, nullptr, lower<lower_index_put>},
    {"aten::_index_put_impl", 0, nullptr, lower<lower_index_put>},
    {"aten::scatter.value", 0, shape_scatter, lower<lower_scatter_value>},
    {"aten::scatter.src", 0, shape_scatter, nullptr},
    {"aten::scatter_add", 0, shape_scatter, lower<lower_scatter_add>},
    {"aten::scatter_reduce.two", 0, shape_scatter, nullptr},
    {"aten::index_add", 0, shape_as_self, lower<lower_index_add>},
    {"aten::index_fill.int_Scalar", 0, nullptr, lower<lower_index_fill>},
    {"aten::embedding_dense_backward", 0, shape_embedding_backward, lower<lower_embedding_backward>},
    {"aten::nonzero_static", 0, shape_nonzero_static, nullptr},
    {"aten::nonzero", ir::kDataDependent, nullptr, nullptr},
    {"aten::masked_select", ir::kDataDependent, nullptr, nullptr},
    {"aten::_local_scalar_dense", ir::kDataDependent, nullptr, nullptr},
    {"aten::_unique2", ir::kDataDependent, nullptr, nullptr},
    {"aten::repeat_interleave.Tensor", ir::kDataDependent, nullptr, nullptr},
};

}  // namespace

std::span<const OpRow> index_rows() { return kRows; }

}  // namespace vitrify::ops
