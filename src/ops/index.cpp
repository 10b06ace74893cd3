// Reads and writes at loaded positions. Out of range faults; negative positions wrap only where eager's do.
#include "ir/faults.h"
#include "ops/rules.h"
#include "ops/view.h"

namespace vitrify::ops {
namespace {

// A position that must be in [0, bound) as it is.
Int plain_index(Body& b, Val v, Int bound) { return b.indirect(b.check_index(cast(v, DType::I64), bound), bound); }
bool is_index(const Tensor& t) { return t.dtype == DType::I64 || t.dtype == DType::I32; }
// Nothing is made, and yet eager looks at the indices: a kernel would not come to them. Of nothing, it would read what is not there.
// A dim that no index makes may turn out empty only in the run.
bool is_unchecked(const Dims& made, const Tensor& of, const Tensor& indices, size_t indexed, size_t dims) {
  if (known_empty(indices.sizes)) return false;
  if (known_empty(made) || known_empty(of.sizes)) return true;
  for (size_t d = 0; d < made.size(); ++d)
    if ((d < indexed || d >= indexed + dims) && !sym::known_lt(Int(0), made[d]).value_or(false)) return true;
  return false;
}

bool lower_embedding(const Args& a, std::vector<Tensor>& r) {
  Tensor w = a.tensor(0), i = a.tensor(1);
  if (!is_index(i) || w.sizes.size() != 2 || is_unchecked(a.out().sizes, w, i, 0, i.sizes.size())) return false;
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
  const int64_t d = a.dim(1, x.sizes.size());
  if (is_unchecked(a.out().sizes, x, i, static_cast<size_t>(d), 1)) return false;
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
  if (!is_index(i) || x.sizes.empty() || x.sizes.size() != i.sizes.size() || is_unchecked(a.out().sizes, x, i, 0, x.sizes.size())) return false;
  const int64_t d = a.dim(1, x.sizes.size());
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

// Whole dims with those of the broadcast indices among them.
template <class F>
Dims indexed_sizes(const Dims& sizes, const Dims& shape, size_t position, const F& is_indexed) {
  Dims r;
  for (size_t d = 0; d < sizes.size(); ++d)
    if (!is_indexed(d)) r.push_back(sizes[d]);
  r.insert(r.begin() + static_cast<std::ptrdiff_t>(position), shape.begin(), shape.end());
  return r;
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
  // Sizes of what is read, or written, of something of those sizes.
  Dims space(const Dims& sizes) const {
    return indexed_sizes(sizes, shape, position, [&](size_t d) { return d < indices.size() && indices[d]; });
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
  const Dims space = adv->space(x.sizes);
  if (v.sizes.size() > space.size()) return false;
  for (size_t k = 0, lead = space.size() - v.sizes.size(); k < v.sizes.size(); ++k) {
    const Int n = a.L.ctx().settled(v.sizes[k]);
    if (!n.is(1) && !(n == a.L.ctx().settled(space[lead + k]))) return false;  // the rule of shapes has not seen that they fit
  }
  v = a.L.expand(v, space);
  r.push_back(a.L.scatter(x, space, accumulate,
                          [x, v, adv = *adv](Body& b, const Index& k) { return Lowering::Write{adv.source(b, k, x.sizes), v.at(b, k), {}}; }));
  return true;
}

bool scatter_along(const Args& a, std::vector<Tensor>& r, bool accumulate, const std::function<Val(Body&, const Index&, DType)>& value) {
  Tensor x = a.tensor(0), i = a.tensor(2);
  if (i.dtype != DType::I64 || x.sizes.empty() || x.sizes.size() != i.sizes.size()) return false;
  const int64_t d = a.dim(1, x.sizes.size());
  r.push_back(a.L.scatter(x, i.sizes, accumulate, [=](Body& b, const Index& k) {
    Index at = k;
    at[d] = plain_index(b, i.at(b, k), x.sizes[d]);
    return Lowering::Write{at, value(b, k, compute_type(x.dtype)), {}};
  }));
  return true;
}
bool lower_scatter_value(const Args& a, std::vector<Tensor>& r) {
  const ir::Arg& v = a.n.args[3];
  if (!is_number(v) || !number_converts(v, a.out().dtype)) return false;
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
  if (known_empty(x.sizes) && x.sizes.size() > 1) return false;  // eager looks at no index
  const int64_t d = a.dim(1, x.sizes.size());
  Dims taken = x.sizes;
  taken[d] = i.sizes[0];
  if (src.sizes != taken) return false;  // perhaps eager's to refuse
  // Eager adds slices, which are multiplied and added with one rounding; of one dim it multiplies first.
  if (is_float(x.dtype) && x.sizes.size() > 1 && a.scalar(4) != 1.0) return false;
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
  if (i.dtype != DType::I64 || i.sizes.size() != 1 || x.sizes.empty() || !is_number(v) || !number_converts(v, x.dtype)) return false;
  const int64_t d = a.dim(1, x.sizes.size());
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
// Where sizes do not agree for certain, Meta's kernel says what eager does.
Shape shape_index_add(sym::Context& ctx, ArgSpan args) {
  const TensorType *x = tensor_arg(args, 0), *index = tensor_arg(args, 2), *source = tensor_arg(args, 3);
  const auto dim = int_arg(ctx, args, 1);
  if (!x || !index || !source || !dim || x->sizes.empty() || index->sizes.size() != 1 || x->dtype != source->dtype) return {};
  const int64_t d = wrap_dim(*dim, x->sizes.size());
  if (d < 0 || d >= static_cast<int64_t>(x->sizes.size())) return {};
  Dims sizes = x->sizes;
  sizes[d] = index->sizes[0];
  return source->sizes == sizes ? shape_as_self(ctx, args) : Shape{};
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
// The value must fit what is written; where it does not, eager says so.
Shape shape_index_put(sym::Context& ctx, ArgSpan args) {
  const TensorType *x = tensor_arg(args, 0), *value = tensor_arg(args, 2);
  auto* list = args.size() > 1 ? std::get_if<std::vector<ir::Value>>(&args[1]) : nullptr;
  if (!x || !value || !list || list->size() > x->sizes.size()) return {};
  const auto is_indexed = [&](size_t d) { return d < list->size() && (*list)[d]; };
  Dims shape;
  size_t groups = 0, position = 0;
  for (size_t d = 0; d < list->size(); ++d) {
    if (!is_indexed(d)) continue;
    const TensorType& i = (*list)[d].type();
    if (!is_int(i.dtype) || i.dtype == DType::U8) return shape_preserved(ctx, args);  // a mask is as many as it holds
    Dims merged;
    if (!broadcast_sizes(ctx, shape, i.sizes, merged)) return {};
    shape = merged;
    if (groups == 0) position = d;
    if (groups == 0 || !is_indexed(d - 1)) ++groups;
  }
  if (groups != 1) position = 0;
  const Dims space = indexed_sizes(x->sizes, shape, position, is_indexed);
  if (value->sizes.size() > space.size()) return {};
  for (size_t k = 0, lead = space.size() - value->sizes.size(); k < value->sizes.size(); ++k)
    if (!ctx.guard_eq(value->sizes[k], space[lead + k]) && !ctx.guard_eq(value->sizes[k], 1)) return {};
  return shape_preserved(ctx, args);
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
  contiguous = contiguous || source.sizes.size() == 1;
  for (size_t k = 1; k < source.sizes.size(); ++k)  // of the first dim no stride depends
    if (ctx.guard_eq(source.sizes[k], 0)) contiguous = false;
  const auto surely_some = [](const Dims& sizes) { return std::ranges::all_of(sizes, [](Int s) { return s.is_const() && s.value() > 0; }); };
  for (size_t k = 0; k < x->sizes.size() && surely_some(shape); ++k)
    if (index_at(k) && x->sizes[k].is(0)) return {};  // every index is out of range; of a size that is not known yet the run sees that
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

// --- ops whose results have sizes that follow from content: symbols that the run finds, with a guess until then
Int found_size(sym::Context& ctx, Int most, int64_t least = 0) {
  const int64_t hi = most.is_const() ? std::max(most.value(), least) : INT32_MAX;
  if (hi == least) return least;
  constexpr int64_t kSome = 1 << 10;  // where nothing bounds it
  const int64_t some = !most.is_const() && sym::has_hint(most) ? std::max<int64_t>(sym::hint(most), 4) : hi == INT32_MAX ? kSome : hi;
  return ctx.symbol(sym::SymbolKind::Size, std::clamp<int64_t>(some / 2, least, hi), {least, hi});
}
Int numel_of(const TensorType& t) { return t.numel(); }
const TensorType* on_cpu(ArgSpan args, size_t i) {
  const TensorType* t = tensor_arg(args, i);
  return t && t->device.kind == DeviceKind::CPU && t->dtype != DType::Opaque ? t : nullptr;
}
// CPU kernels give the indices of one element side by side.
Shape shape_nonzero(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = on_cpu(args, 0);
  if (!x) return {};
  TensorType t = contiguous_type(DType::I64, x->device, {found_size(ctx, numel_of(*x)), static_cast<int64_t>(x->sizes.size())});
  t.strides = {1, t.sizes[0]};
  return one(t);
}
Shape shape_masked_select(sym::Context& ctx, ArgSpan args) {
  const TensorType *x = on_cpu(args, 0), *mask = on_cpu(args, 1);
  Dims both;
  if (!x || !mask || mask->dtype != DType::Bool || !broadcast_sizes(ctx, x->sizes, mask->sizes, both)) return {};
  return one(contiguous_type(x->dtype, x->device, {found_size(ctx, contiguous_type(x->dtype, x->device, both).numel())}));
}
// Of all elements: (values, where each is among them, how often).
Types unique_types(sym::Context& ctx, const TensorType& x, bool inverse, bool counts) {
  const Int found = found_size(ctx, numel_of(x));
  return {contiguous_type(x.dtype, x.device, {found}), contiguous_type(DType::I64, x.device, inverse ? x.sizes : Dims{0}),
          contiguous_type(DType::I64, x.device, {counts ? found : Int(0)})};
}
Shape shape_unique(sym::Context& ctx, ArgSpan args) {  // sorted, return_inverse[, return_counts]
  const TensorType* x = on_cpu(args, 0);
  if (!x) return {};
  Types t = unique_types(ctx, *x, bool_arg(args, 2), args.size() > 3 && bool_arg(args, 3));
  t.resize(args.size() > 3 ? 3 : 2);
  return t;
}
// Of slices along a dim: they are gathered with that dim in front.
Shape unique_slices(sym::Context& ctx, const TensorType& x, std::optional<int64_t> dim) {
  const auto rank = static_cast<int64_t>(x.sizes.size());
  if (!dim || *dim < -rank || *dim >= rank) return {};
  const auto d = static_cast<size_t>(wrap_dim(*dim, x.sizes.size()));
  if (std::any_of(x.sizes.begin(), x.sizes.end(), [](Int s) { return s.is(0); })) return {};
  const Int found = found_size(ctx, x.sizes[d], x.sizes[d].is_const() && x.sizes[d].value() > 0 ? 1 : 0);
  TensorType values = contiguous_type(x.dtype, x.device, x.sizes);
  values.sizes[d] = found;
  Int next = 1;
  for (size_t k = x.sizes.size(); k-- > 0;)
    if (k != d) {
      values.strides[k] = next;
      next = next * x.sizes[k];
    }
  values.strides[d] = next;
  return Types{values, contiguous_type(DType::I64, x.device, {x.sizes[d]}), contiguous_type(DType::I64, x.device, {found})};
}
Shape shape_unique_dim(sym::Context& ctx, ArgSpan args) {
  const TensorType* x = on_cpu(args, 0);
  return x ? unique_slices(ctx, *x, int_arg(ctx, args, 1)) : Shape();
}
Shape shape_unique_dim_consecutive(sym::Context& ctx, ArgSpan args) { return shape_unique_dim(ctx, args); }
Shape shape_unique_consecutive(sym::Context& ctx, ArgSpan args) {  // return_inverse, return_counts, dim
  const TensorType* x = on_cpu(args, 0);
  if (!x) return {};
  const auto dim = std::holds_alternative<ir::None>(args[3]) ? std::nullopt : int_arg(ctx, args, 3);
  if (dim && !(*dim == 0 && x->sizes.size() == 1)) return unique_slices(ctx, *x, dim);  // ATen takes all elements for the one dim
  return unique_types(ctx, *x, bool_arg(args, 1), bool_arg(args, 2));
}
Shape shape_bincount(sym::Context& ctx, ArgSpan args) {  // self, weights, minlength
  const TensorType *x = on_cpu(args, 0), *weights = tensor_arg(args, 1);
  const auto least = int_arg(ctx, args, 2);
  if (!x || !is_int(x->dtype) || x->sizes.size() != 1 || !least || *least < 0) return {};
  const DType type = !weights ? DType::I64 : weights->dtype == DType::F32 ? DType::F32 : DType::F64;
  return one(contiguous_type(type, x->device, {found_size(ctx, INT32_MAX, *least)}));
}
Shape shape_repeat_interleave(sym::Context& ctx, ArgSpan args) {  // repeats, output_size
  const TensorType* repeats = on_cpu(args, 0);
  if (!repeats || repeats->sizes.size() != 1 || (repeats->dtype != DType::I64 && repeats->dtype != DType::I32)) return {};
  if (auto* size = std::get_if<Int>(&args[1])) return one(contiguous_type(repeats->dtype, repeats->device, {*size}));
  return one(contiguous_type(repeats->dtype, repeats->device, {found_size(ctx, INT32_MAX)}));
}
Shape shape_one_hot(sym::Context& ctx, ArgSpan args) {  // self, num_classes
  const TensorType* x = on_cpu(args, 0);
  const auto classes = int_arg(ctx, args, 1);
  if (!x || x->dtype != DType::I64 || !classes || *classes < -1 || *classes == 0) return {};
  if (std::any_of(x->sizes.begin(), x->sizes.end(), [](Int s) { return s.is(0); })) return {};
  Dims sizes = x->sizes;
  sizes.push_back(*classes == -1 ? found_size(ctx, INT32_MAX, 1) : Int(*classes));
  return one(contiguous_type(x->dtype, x->device, sizes));
}

const OpRow kRows[] = {
    {"aten::embedding", ir::kFaults, shape_embedding, lower<lower_embedding>},
    {"aten::index_select", ir::kFaults | ir::kChecksIndex, shape_index_select, lower<lower_index_select>},
    {"aten::gather", ir::kFaults, shape_gather, lower<lower_gather>},
    {"aten::index.Tensor", ir::kFaults | ir::kChecksIndex, shape_index, lower<lower_index>},
    {"aten::_unsafe_index.Tensor", ir::kChecksIndex, nullptr, lower<lower_index>},
    {"aten::index_put", ir::kFaults | ir::kChecksIndex, shape_index_put, lower<lower_index_put>},
    {"aten::_unsafe_index_put", ir::kChecksIndex, shape_index_put, lower<lower_index_put>},
    {"aten::_index_put_impl", ir::kFaults | ir::kChecksIndex, shape_index_put, lower<lower_index_put>},
    {"aten::scatter.value", ir::kFaults, shape_scatter, lower<lower_scatter_value>},
    {"aten::scatter.src", ir::kFaults, shape_scatter, nullptr},
    {"aten::scatter_add", ir::kFaults, shape_scatter, lower<lower_scatter_add>},
    {"aten::scatter_reduce.two", ir::kFaults, shape_scatter, nullptr},
    {"aten::index_add", ir::kFaults | ir::kChecksIndex, shape_index_add, lower<lower_index_add>},
    {"aten::index_fill.int_Scalar", ir::kFaults | ir::kChecksIndex, nullptr, lower<lower_index_fill>},
    {"aten::scatter.reduce", ir::kFaults, nullptr, nullptr},
    {"aten::scatter.value_reduce", ir::kFaults, nullptr, nullptr},
    {"aten::index_copy", ir::kFaults, nullptr, nullptr},
    {"aten::index_fill.int_Tensor", ir::kFaults, nullptr, nullptr},
    {"aten::index_reduce", ir::kFaults, nullptr, nullptr},
    {"aten::take", ir::kFaults, nullptr, nullptr},
    {"aten::put", ir::kFaults, nullptr, nullptr},
    {"aten::masked_scatter", ir::kFaults, nullptr, nullptr},
    {"aten::_embedding_bag", ir::kFaults, nullptr, nullptr},
    {"aten::_embedding_bag_forward_only", ir::kFaults, nullptr, nullptr},
    {"aten::max_unpool2d", ir::kFaults, nullptr, nullptr},
    {"aten::max_unpool3d", ir::kFaults, nullptr, nullptr},
    {"aten::multi_margin_loss", ir::kFaults, nullptr, nullptr},
    {"aten::multilabel_margin_loss_forward", ir::kFaults, nullptr, nullptr},
    {"aten::segment_reduce", ir::kFaults, nullptr, nullptr},
    {"aten::embedding_dense_backward", 0, shape_embedding_backward, lower<lower_embedding_backward>},
    {"aten::nonzero_static", 0, shape_nonzero_static, nullptr},
    {"aten::_local_scalar_dense", ir::kDataDependent, nullptr, nullptr},
    {"aten::nonzero", ir::kDataDependent, shape_nonzero, nullptr},
    {"aten::masked_select", ir::kDataDependent, shape_masked_select, nullptr},
    {"aten::_unique", ir::kDataDependent, shape_unique, nullptr},
    {"aten::_unique2", ir::kDataDependent, shape_unique, nullptr},
    {"aten::unique_consecutive", ir::kDataDependent, shape_unique_consecutive, nullptr},
    {"aten::unique_dim", ir::kDataDependent, shape_unique_dim, nullptr},
    {"aten::unique_dim_consecutive", ir::kDataDependent, shape_unique_dim_consecutive, nullptr},
    {"aten::bincount", ir::kDataDependent | ir::kFaults, shape_bincount, nullptr},
    {"aten::repeat_interleave.Tensor", ir::kDataDependent | ir::kFaults, shape_repeat_interleave, nullptr},
    {"aten::one_hot", ir::kDataDependent | ir::kFaults, shape_one_hot, nullptr},
};

}  // namespace

std::span<const OpRow> index_rows() { return kRows; }

}  // namespace vitrify::ops
