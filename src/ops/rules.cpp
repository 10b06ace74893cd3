#include "ops/rules.h"

#include <cmath>
#include <limits>

namespace vitrify::ops {

bool has_value(const ir::Arg& a) {
  auto* v = std::get_if<ir::Value>(&a);
  return v && *v;
}

const ir::TensorType* type_of(const ir::Arg& a) {
  auto* v = std::get_if<ir::Value>(&a);
  return v && *v ? &v->type() : nullptr;
}

bool is_number(const ir::Arg& a) { return std::holds_alternative<Int>(a) || std::holds_alternative<double>(a) || std::holds_alternative<bool>(a); }

bool kernel_can(const Args& a) {
  const Device device = a.n.outs.empty() ? Device{} : a.out().device;
  for (auto& o : a.n.outs)
    if (!is_native(o.dtype) || !(o.device == device)) return false;
  auto operand_ok = [&](const ir::Value& v) {
    if (!v) return true;
    const auto& t = v.type();
    if (!is_native(t.dtype)) return false;
    return t.device == device || (t.sizes.empty() && a.L.get(v).buffer < 0);
  };
  for (auto& x : a.n.args) {
    if (auto* v = std::get_if<ir::Value>(&x); v && !operand_ok(*v)) return false;
    if (auto* l = std::get_if<std::vector<ir::Value>>(&x))
      for (auto& v : *l)
        if (!operand_ok(v)) return false;
    if (std::holds_alternative<ir::Complex>(x) || std::holds_alternative<std::vector<ir::Complex>>(x)) return false;
    if (std::holds_alternative<double>(x) && !a.n.outs.empty() && is_float(a.out().dtype) && !number_converts(x, a.out().dtype)) return false;
  }
  return true;
}

Val number(Body& b, const ir::Arg& a, DType type) {
  if (auto* v = std::get_if<Int>(&a)) {
    if (v->is_const()) return b.constant_int(type, v->value());
    return cast(b.index(*v), type);
  }
  if (auto* v = std::get_if<double>(&a)) return b.constant(type, *v);
  return b.constant_int(type, std::get<bool>(a) ? 1 : 0);
}

bool number_fits(const ir::Arg& a, DType type) {
  if (is_float(type)) return is_number(a);
  if (auto* d = std::get_if<double>(&a)) {
    if (std::trunc(*d) != *d || std::abs(*d) > 9e15) return false;
    if (type == DType::U8 && *d < 0) return false;  // integers wrap, floats do not
    return type == DType::I64 || std::abs(*d) < 127;
  }
  if (auto* v = std::get_if<Int>(&a); v && type != DType::I64) {
    if (!v->is_const()) return false;
    if (type == DType::Bool) return v->value() == 0 || v->value() == 1;
    const int bits = static_cast<int>(size_of(type)) * 8;
    if (type == DType::U8) return v->value() >= 0 && v->value() < 256;
    const int64_t lim = int64_t(1) << (bits - 1);
    return v->value() >= -lim && v->value() < lim;
  }
  return is_number(a);
}

bool number_converts(const ir::Arg& a, DType type) {
  if (!is_float(type)) return number_fits(a, type);
  auto* d = std::get_if<double>(&a);
  auto* i = std::get_if<Int>(&a);
  if (!d && !i) return is_number(a);
  if (i && !i->is_const()) return type != DType::F16;
  const double v = d ? *d : static_cast<double>(i->value());
  return !std::isfinite(v) || std::abs(v) <= largest(type);
}

double largest(DType type) {
  switch (type) {
    case DType::F16:
      return 65504.0;
    case DType::BF16:
      return 3.3895313892515355e38;
    case DType::F32:
      return std::numeric_limits<float>::max();
    default:
      return std::numeric_limits<double>::max();
  }
}

Val Operand::at(Body& b, const Index& i, DType type) const {
  if (!tensor) return number(b, *arg, type);
  const Val v = tensor.at(b, i);
  return cast(wider ? stored(tensor, v) : v, type);
}

Tensor broadcast(Lowering& L, const Tensor& t, const Dims& sizes) { return t.sizes == sizes ? t : L.expand(t, sizes); }

Operand operand(Lowering& L, const Tensor& t, const Dims& sizes) { return {broadcast(L, t, sizes), nullptr}; }
Operand operand(const Args& a, size_t i, const Dims& sizes) {
  if (!a.is_tensor(i)) return {{}, &a.n.args[i]};
  Operand o = operand(a.L, a.tensor(i), sizes);
  o.wider = o.tensor.dtype != a.out().dtype;
  return o;
}

Val stored(const Tensor& t, Val v) {
  // Of a buffer too: a kernel may hand on what it stored from its registers, unrounded.
  const bool half = t.dtype == DType::F16 || t.dtype == DType::BF16;
  return half ? v.body->op(LOp::cast, t.dtype, v) : v;
}

bool same_sizes(const Dims& a, const Dims& b) { return a == b; }

Tensor reused(Lowering& L, const Tensor& t) { return t.buffer < 0 && (t.cost > 12 || t.reads > 2) ? L.realize(t) : t; }

Val numel_as(Body& b, const Int& n, DType type) { return n.is_const() ? b.constant_int(type, n.value()) : cast(b.index(n), type); }

Int product(const Dims& sizes, std::span<const int64_t> dims) {
  Int n = 1;
  for (int64_t d : dims)
    if (static_cast<size_t>(d) < sizes.size()) n = n * sizes[d];
  return n;
}

bool known_empty(const Dims& sizes) {
  for (auto& s : sizes)
    if (s.is(0)) return true;
  return false;
}

}  // namespace vitrify::ops
