// The stride and type rules ATen applies to whole families of ops.
#include "ops/shapes.h"

#include <algorithm>

#include "ops/pointwise.h"
#include "ops/rules.h"

namespace vitrify::ops {

using ir::MemoryFormat;

// --- types

namespace {
int category(DType t) { return t == DType::Opaque ? -1 : t == DType::Bool ? 0 : is_int(t) ? 1 : is_float(t) ? 2 : 3; }
DType to_complex(DType t) { return t == DType::F64 || t == DType::C128 ? DType::C128 : DType::C64; }
}  // namespace

DType& default_float() {
  thread_local DType t = DType::F32;
  return t;
}

DType promote_types(DType a, DType b) {
  if (a == b) return a;
  if (a == DType::Opaque || b == DType::Opaque) return DType::Opaque;
  if (category(a) < category(b)) std::swap(a, b);
  if (is_complex(a))
    return is_complex(b) || b == DType::F64 ? (a == DType::C128 || b == DType::C128 || b == DType::F64 ? DType::C128 : DType::C64) : a;
  if (is_float(a)) {
    if (!is_float(b)) return a;
    if (size_of(a) == size_of(b)) return DType::F32;  // f16 with bf16
    return size_of(a) > size_of(b) ? a : b;
  }
  if (a == DType::Bool || b == DType::Bool) return a == DType::Bool ? b : a;
  if (a == DType::U8 || b == DType::U8) {
    const DType s = a == DType::U8 ? b : a;
    return s == DType::I8 ? DType::I16 : s;
  }
  return size_of(a) > size_of(b) ? a : b;
}

DType to_float(DType t) { return is_int(t) || t == DType::Bool ? default_float() : t; }

DType result_type(std::span<const ir::Arg* const> args) {
  std::optional<DType> by[3];  // with dims, 0-d, numbers
  auto add = [](std::optional<DType>& s, DType t) { s = s ? promote_types(*s, t) : t; };
  auto add_tensor = [&](const ir::Value& v) {
    if (!v) return;
    const TensorType& t = v.type();
    if (t.wrapped_number)
      add(by[2], is_complex(t.dtype) ? to_complex(default_float()) : is_float(t.dtype) ? default_float() : t.dtype);
    else
      add(by[t.sizes.empty() ? 1 : 0], t.dtype);
  };
  for (const ir::Arg* a : args) {
    if (auto* v = std::get_if<ir::Value>(a))
      add_tensor(*v);
    else if (auto* l = std::get_if<std::vector<ir::Value>>(a)) {
      for (auto& v : *l) add_tensor(v);
    } else if (std::holds_alternative<Int>(*a))
      add(by[2], DType::I64);
    else if (std::holds_alternative<double>(*a))
      add(by[2], default_float());
    else if (std::holds_alternative<bool>(*a))
      add(by[2], DType::Bool);
    else if (std::holds_alternative<ir::Complex>(*a))
      add(by[2], to_complex(default_float()));
  }
  auto combine = [](std::optional<DType> hi, std::optional<DType> lo) -> std::optional<DType> {
    if (!hi) return lo;
    if (!lo) return hi;
    if (is_complex(*hi)) return hi;
    if (is_float(*hi)) return is_complex(*lo) ? to_complex(*hi) : *hi;
    if (*hi == DType::Bool || is_float(*lo) || is_complex(*lo) || *hi == DType::Opaque || *lo == DType::Opaque) return promote_types(*hi, *lo);
    return hi;
  };
  return combine(by[0], combine(by[1], by[2])).value_or(DType::Opaque);
}
DType result_type(std::initializer_list<const ir::Arg*> args) { return result_type(std::span<const ir::Arg* const>(args.begin(), args.size())); }

// --- sizes and strides

bool broadcast_sizes(sym::Context& ctx, const Dims& a, const Dims& b, Dims& out) {
  const size_t n = std::max(a.size(), b.size());
  out.assign(n, Int(1));
  for (size_t k = 0; k < n; ++k) {
    const Int x = k + a.size() >= n ? a[k + a.size() - n] : Int(1), y = k + b.size() >= n ? b[k + b.size() - n] : Int(1);
    if (x == y)
      out[k] = x;
    else if (x.is(1))
      out[k] = y;
    else if (y.is(1))
      out[k] = x;
    else if (ctx.guard_eq(x, y))
      out[k] = x.is_const() ? x : y;
    else if (ctx.guard_eq(x, 1))
      out[k] = y;
    else if (ctx.guard_eq(y, 1))
      out[k] = x;
    else
      return false;
  }
  return true;
}

TensorType contiguous_type(DType dtype, Device device, Dims sizes) {
  TensorType t;
  t.dtype = dtype;
  t.device = device;
  t.strides = ir::contiguous_strides(sizes);
  t.sizes = std::move(sizes);
  return t;
}

namespace {
std::vector<size_t> order_of(MemoryFormat f, size_t rank) {  // fastest first
  if (f == MemoryFormat::ChannelsLast && rank == 4) return {1, 3, 2, 0};
  if (f == MemoryFormat::ChannelsLast3d && rank == 5) return {1, 4, 3, 2, 0};
  std::vector<size_t> o(rank);
  for (size_t k = 0; k < rank; ++k) o[k] = rank - 1 - k;
  return o;
}
bool has_format(MemoryFormat f, size_t rank) {
  return f == MemoryFormat::Contiguous || (f == MemoryFormat::ChannelsLast && rank == 4) || (f == MemoryFormat::ChannelsLast3d && rank == 5);
}
bool is_empty(sym::Context& ctx, const Dims& sizes) {
  for (auto& s : sizes)
    if (ctx.guard_eq(s, 0)) return true;
  return false;
}
bool is_one(sym::Context& ctx, Int s) { return s.is(1) || ctx.guard_eq(s, 1); }
}  // namespace

Dims strides_for(MemoryFormat f, const Dims& sizes) {
  if (order_of(f, sizes.size()) == order_of(MemoryFormat::Contiguous, sizes.size())) return ir::contiguous_strides(sizes);
  Dims st(sizes.size());
  Int next = 1;
  for (size_t d : order_of(f, sizes.size())) {
    st[d] = next;
    next = next * sizes[d];  // of no elements too, unlike rows
  }
  return st;
}

bool is_contiguous(sym::Context& ctx, const TensorType& t, MemoryFormat f) {
  if (!has_format(f, t.sizes.size())) return false;
  bool fits = true;  // whatever the sizes: nothing need be known of them
  Int expected = 1;
  for (size_t d : order_of(f, t.sizes.size())) {
    fits = fits && t.strides[d] == expected;
    expected = expected * t.sizes[d];
  }
  if (fits) return true;
  if (f == MemoryFormat::Contiguous && is_empty(ctx, t.sizes)) return true;
  expected = 1;
  for (size_t d : order_of(f, t.sizes.size())) {
    if (is_one(ctx, t.sizes[d])) continue;
    if (!ctx.guard_eq(t.strides[d], expected)) return false;
    expected = expected * t.sizes[d];
  }
  return true;
}

bool is_dense(sym::Context& ctx, const TensorType& t) {
  if (is_contiguous(ctx, t) || is_contiguous(ctx, t, MemoryFormat::ChannelsLast) || is_contiguous(ctx, t, MemoryFormat::ChannelsLast3d)) return true;
  std::vector<size_t> perm;
  for (size_t d = 0; d < t.sizes.size(); ++d)
    if (!is_one(ctx, t.sizes[d])) perm.push_back(d);
  // Insertion sort: few dims, and each comparison may be a guard.
  for (size_t i = 1; i < perm.size(); ++i)
    for (size_t j = i; j > 0 && ctx.guard_lt(t.strides[perm[j]], t.strides[perm[j - 1]]); --j) std::swap(perm[j], perm[j - 1]);
  Int expected = 1;
  for (size_t d : perm) {
    if (!ctx.guard_eq(t.strides[d], expected)) return false;
    expected = expected * t.sizes[d];
  }
  return true;
}

MemoryFormat suggest_memory_format(sym::Context& ctx, const TensorType& t) {
  const size_t rank = t.sizes.size();
  if (rank != 4 && rank != 5) return MemoryFormat::Contiguous;
  const MemoryFormat f = rank == 4 ? MemoryFormat::ChannelsLast : MemoryFormat::ChannelsLast3d;
  if (ctx.guard_eq(t.strides[1], 0)) return MemoryFormat::Contiguous;
  Int least = 0;
  for (size_t d : order_of(f, rank)) {
    if (ctx.guard_eq(t.sizes[d], 0) || ctx.guard_lt(t.strides[d], least)) return MemoryFormat::Contiguous;
    if (d == 0 && ctx.guard_eq(least, t.strides[1])) return MemoryFormat::Contiguous;  // ambiguous
    least = t.strides[d];
    if (!is_one(ctx, t.sizes[d])) least = least * t.sizes[d];
  }
  return f;
}

namespace {

// Dims from fastest to slowest, as eager's iterator orders them: by the strides of the first operand that tells two dims apart.
std::vector<size_t> stride_order(sym::Context& ctx, const Dims& sizes, std::span<const Dims> strides) {
  const size_t n = sizes.size();
  std::vector<size_t> perm(n);
  for (size_t k = 0; k < n; ++k) perm[k] = n - 1 - k;
  auto compare = [&](size_t p, size_t q) {
    for (auto& st : strides) {
      if (ctx.guard_eq(st[p], 0) || ctx.guard_eq(st[q], 0)) continue;
      if (!(st[p] == st[q])) {
        if (ctx.guard_lt(st[p], st[q])) return -1;
        if (ctx.guard_lt(st[q], st[p])) return 1;
      }
      if (ctx.guard_lt(sizes[q], sizes[p])) return 1;
    }
    return 0;
  };
  for (size_t i = 1; i < n; ++i) {
    size_t at = i;
    for (size_t k = i; k-- > 0;) {
      const int c = compare(perm[k], perm[at]);
      if (c > 0) {
        std::swap(perm[k], perm[at]);
        at = k;
      } else if (c < 0) {
        break;
      }
    }
  }
  return perm;
}

}  // namespace

Dims preserved_strides(sym::Context& ctx, const TensorType& t) {
  if (is_dense(ctx, t)) return t.strides;
  if (t.sizes.size() == 1) return Dims{Int(1)};
  const Dims st[] = {t.strides};
  Dims out(t.sizes.size());
  Int next = 1;
  for (size_t d : stride_order(ctx, t.sizes, st)) {
    out[d] = next;
    if (!ctx.guard_eq(t.sizes[d], 0)) next = next * t.sizes[d];
  }
  return out;
}

Dims likely_preserved_strides(sym::Context& ctx, const TensorType& t) {
  if (t.sizes.size() == 1) return Dims{Int(1)};
  const auto likely = [](Dims d) {
    constexpr int64_t kUnknown = 1024;
    for (Int& i : d) {
      std::vector<Int> symbols;
      sym::free_symbols(i, symbols);
      i = sym::eval(i, [&](uint32_t id) {
        const auto s = std::ranges::find(symbols, id, [](Int s) { return sym::view(s).symbol->id; });
        return sym::has_hint(*s) ? sym::hint(*s) : kUnknown;
      });
    }
    return d;
  };
  const Dims sizes = likely(t.sizes), strides[] = {likely(t.strides)};
  Dims out(t.sizes.size());
  Int next = 1;
  for (size_t d : stride_order(ctx, sizes, strides)) {
    out[d] = next;
    if (!sizes[d].is(0)) next = next * t.sizes[d];
  }
  return out;
}

std::optional<TensorType> elementwise_type(sym::Context& ctx, std::span<const TensorType* const> given, DType out, DType common) {
  if (given.empty() || out == DType::Opaque) return std::nullopt;
  // On the CPU eager converts operands to the common type first, which also makes them dense.
  std::vector<const TensorType*> operands(given.begin(), given.end());
  std::vector<TensorType> converted;
  converted.reserve(given.size());
  for (auto*& t : operands) {
    if (common == DType::Opaque || t->dtype == common || t->device.kind != DeviceKind::CPU || t->sizes.empty()) continue;
    converted.push_back(*t);
    converted.back().strides = preserved_strides(ctx, *t);
    t = &converted.back();
  }
  TensorType r;
  r.dtype = out;
  bool device_set = false, same = true, scalars = false, dims = false;
  r.device = operands[0]->device;
  for (auto* t : operands) {
    if (t->dtype == DType::Opaque) return std::nullopt;
    const bool cpu_scalar = t->sizes.empty() && t->device.kind == DeviceKind::CPU;
    if (!cpu_scalar) {
      if (device_set && !(t->device == r.device)) return std::nullopt;
      r.device = t->device;
      device_set = true;
    }
    (t->sizes.empty() ? scalars : dims) = true;
  }
  r.sizes = operands[0]->sizes;
  for (auto* t : operands) {
    Dims merged;
    bool equal = t->sizes.size() == r.sizes.size();
    for (size_t d = 0; equal && d < r.sizes.size(); ++d) equal = t->sizes[d] == r.sizes[d] || ctx.guard_eq(t->sizes[d], r.sizes[d]);
    if (equal) continue;
    same = false;
    if (!broadcast_sizes(ctx, r.sizes, t->sizes, merged)) return std::nullopt;
    r.sizes = merged;
  }
  if (scalars && dims) same = false;
  const size_t n = r.sizes.size();
  if (n < 2) return r.strides = ir::contiguous_strides(r.sizes), r;  // whatever the size: it may follow from content

  if (same) {
    auto all = [&](auto f) { return std::all_of(operands.begin(), operands.end(), [&](auto* t) { return f(*t); }); };
    if (all([&](auto& t) { return is_contiguous(ctx, t); })) return r.strides = ir::contiguous_strides(r.sizes), r;
    if (all([&](auto& t) { return is_contiguous(ctx, t, MemoryFormat::ChannelsLast); }))
      return r.strides = strides_for(MemoryFormat::ChannelsLast, r.sizes), r;
    if (all([&](auto& t) { return is_dense(ctx, t); }) && all([&](auto& t) { return t.strides == operands[0]->strides; }))
      return r.strides = operands[0]->strides, r;
  }

  std::vector<Dims> strides;
  for (auto* t : operands) {
    Dims st(n, Int(0));
    const size_t lead = n - t->sizes.size();
    for (size_t d = 0; d < t->sizes.size(); ++d)
      if (t->sizes[d] == r.sizes[lead + d] || !is_one(ctx, t->sizes[d]) || is_one(ctx, r.sizes[lead + d])) st[lead + d] = t->strides[d];
    strides.push_back(std::move(st));
  }
  auto perm = stride_order(ctx, r.sizes, strides);
  bool row_major = true;
  for (size_t k = 0; k < n; ++k) row_major = row_major && perm[k] == n - 1 - k;
  if (row_major) return r.strides = ir::contiguous_strides(r.sizes), r;
  r.strides.assign(n, Int(0));
  Int next = 1;
  for (size_t d : perm) {
    r.strides[d] = next;
    next = next * r.sizes[d];
  }
  return r;
}

// --- arguments

const TensorType* tensor_arg(ArgSpan args, size_t i) { return i < args.size() ? type_of(args[i]) : nullptr; }
std::optional<int64_t> int_arg(sym::Context& ctx, ArgSpan args, size_t i) {
  auto* v = i < args.size() ? std::get_if<Int>(&args[i]) : nullptr;
  if (!v) return std::nullopt;
  return v->is_const() ? v->value() : ctx.specialize(*v);
}
bool bool_arg(ArgSpan args, size_t i) {
  auto* v = i < args.size() ? std::get_if<bool>(&args[i]) : nullptr;
  return v && *v;
}
std::optional<std::vector<int64_t>> dims_arg(sym::Context& ctx, ArgSpan args, size_t i, size_t rank, bool empty_is_all) {
  std::vector<int64_t> r;
  if (i < args.size()) {
    if (auto* v = std::get_if<Int>(&args[i]))
      r.push_back(v->is_const() ? v->value() : ctx.specialize(*v));
    else if (auto* l = std::get_if<std::vector<Int>>(&args[i])) {
      for (auto& x : *l) r.push_back(x.is_const() ? x.value() : ctx.specialize(x));
    } else if (!std::holds_alternative<ir::None>(args[i])) {
      return std::nullopt;
    }
  }
  const int64_t n = rank == 0 ? 1 : static_cast<int64_t>(rank);
  std::vector<bool> seen(n);
  for (auto& d : r) {
    d = wrap_dim(d, rank);
    if (d < 0 || d >= n || seen[d]) return std::nullopt;
    seen[d] = true;
  }
  if (r.empty() && empty_is_all)
    for (int64_t d = 0; d < static_cast<int64_t>(rank); ++d) r.push_back(d);
  return r;
}

Int size_of_slice(sym::Context& ctx, Int size, Int& start, Int end, Int step) {
  constexpr int64_t kHuge = int64_t(1) << 62;
  const bool to_end = end == size || (end.is_const() && end.value() >= kHuge);
  if (start.is_const() && start.value() >= kHuge) start = size;
  if (ctx.guard_lt(start, 0)) start = start + size;
  if (ctx.guard_lt(start, 0))
    start = 0;
  else if (ctx.guard_lt(size, start))
    start = size;
  if (to_end) {
    end = size;
  } else {
    if (ctx.guard_lt(end, 0)) end = end + size;
    if (ctx.guard_lt(end, start))
      end = start;
    else if (ctx.guard_lt(size, end))
      end = size;
  }
  return sym::ceildiv(end - start, step);
}

// --- elementwise ops

Shape pointwise_shape(sym::Context& ctx, ArgSpan args, PointwiseDType rule, int tensors) {
  using P = PointwiseDType;
  if (args.size() < static_cast<size_t>(tensors)) return {};
  std::vector<const TensorType*> ops;
  std::vector<const ir::Arg*> typed;
  TensorType number;
  const TensorType* first = nullptr;
  for (int i = 0; i < tensors; ++i) {
    typed.push_back(&args[i]);
    if (auto* t = type_of(args[i])) {
      ops.push_back(t);
      if (!first) first = t;
    } else if (is_number(args[i])) {
      ops.push_back(&number);
    } else {
      return {};
    }
  }
  if (!first) return {};
  number.device = Device{};
  if (rule == P::Clamp)
    for (size_t i = 1; i < args.size(); ++i)
      if (is_number(args[i]))
        typed.push_back(&args[i]);
      else if (!std::holds_alternative<ir::None>(args[i]))
        return {};
  DType t = rule == P::Same ? first->dtype : result_type(typed);
  if (!is_native(t)) return {};
  switch (rule) {
    case P::Same:
      for (auto* o : ops)
        if (o != &number && o->dtype != t) return {};
      break;
    case P::Promote:
      break;
    case P::Float:
      t = to_float(t);
      break;
    case P::Bool:
      t = DType::Bool;
      break;
    case P::DivMode:
      if (args.size() < 3) return {};
      if (std::holds_alternative<ir::None>(args[2]))
        t = to_float(t);
      else if (t == DType::Bool)
        return {};
      break;
    case P::Clamp:
      if (t == DType::Bool) return {};
      break;
    case P::Addcdiv:
      if (!is_float(ops[1]->dtype) && !is_float(ops[2]->dtype)) return {};  // eager does not divide integers
      [[fallthrough]];
    case P::FloatOnly:
      if (!is_float(t) || !is_float(first->dtype)) return {};
      break;
    case P::NotBool:
      if (t == DType::Bool || first->dtype == DType::Bool) return {};
      break;
  }
  const DType common = rule == P::Bool ? result_type(typed) : t;
  return one(elementwise_type(ctx, ops, t, common));
}

Shape like_image(sym::Context& ctx, const TensorType& x, Dims sizes) {
  TensorType t = contiguous_type(x.dtype, x.device, std::move(sizes));
  t.strides = strides_for(suggest_memory_format(ctx, x), t.sizes);
  return one(t);
}

Shape masked_fill_shape(sym::Context&, const TensorType& self, const Dims& sizes) { return one(contiguous_type(self.dtype, self.device, sizes)); }

Shape formatted_shape(sym::Context& ctx, const TensorType& x, MemoryFormat f) {
  TensorType t = x;
  t.wrapped_number = false;
  if (f == MemoryFormat::Preserve)
    t.strides = preserved_strides(ctx, x);
  else if (!has_format(f, x.sizes.size()))
    return {};
  else
    t.strides = strides_for(f, x.sizes);
  return one(t);
}

}  // namespace vitrify::ops
