// Body: SSA construction with value numbering.
#include <bit>
#include <cmath>

#include "ops/lowering.h"
#include "support/budget.h"
#include "support/hash.h"

namespace vitrify::ops {

using loop::Instr;
using loop::kNoValue;

namespace {

uint64_t hash_instr(const Instr& i) {
  uint64_t h = hash_mix(static_cast<uint64_t>(i.op) << 8 | static_cast<uint64_t>(i.type), static_cast<uint32_t>(i.a));
  h = hash_mix(h, static_cast<uint64_t>(static_cast<uint32_t>(i.b)) << 32 | static_cast<uint32_t>(i.c));
  h = hash_mix(h, std::bit_cast<uint64_t>(i.fimm));
  h = hash_mix(h, static_cast<uint64_t>(i.iimm));
  return hash_mix(h, i.buf ^ i.at.hash());
}
bool same(const Instr& x, const Instr& y) {
  return x.op == y.op && x.type == y.type && x.a == y.a && x.b == y.b && x.c == y.c && x.iimm == y.iimm && x.buf == y.buf && x.at == y.at &&
         std::bit_cast<uint64_t>(x.fimm) == std::bit_cast<uint64_t>(y.fimm);
}
bool is_comparison(loop::Op o) {
  switch (o) {
    case loop::Op::lt:
    case loop::Op::le:
    case loop::Op::gt:
    case loop::Op::ge:
    case loop::Op::eq:
    case loop::Op::ne:
    case loop::Op::isnan:
    case loop::Op::isinf:
      return true;
    default:
      return false;
  }
}

}  // namespace

Val Body::emit(Instr i, DType result_type) {
  Budget::spend(1);
  const bool mergeable = i.op != loop::Op::store && i.op != loop::Op::store_add && i.op != loop::Op::reduce;
  uint64_t h = 0;
  if (mergeable) {
    h = hash_instr(i);
    if (auto it = cse_.find(h); it != cse_.end())
      for (size_t k : it->second)
        if (same(instrs[k], i)) return {this, instrs[k].result, result_type};
    i.result = num_values++;
    def_.resize(num_values);
    def_[i.result] = instrs.size();
    cse_[h].push_back(instrs.size());
  }
  instrs.push_back(i);
  return {this, i.result, result_type};
}

std::optional<Val> Body::given(int32_t expression, const Index& at) {
  const auto it = given_.find(expression);
  if (it == given_.end() || it->second.mask != mask_ || it->second.at != at) return std::nullopt;
  return Val{this, it->second.id, it->second.type};
}
void Body::give(int32_t expression, const Index& at, Val v) { given_.insert_or_assign(expression, Given{at, mask_, v.id, v.type}); }

const Instr* Body::constant_of(Val v) const {
  const Instr& d = instrs[def_[v.id]];
  return d.op == loop::Op::constant ? &d : nullptr;
}

Val Val::lit(double v) const { return body->constant(type, v); }

Val Body::constant(DType t, double v) {
  if (!is_float(t)) return constant_int(t, static_cast<int64_t>(v));
  if (t == DType::F32) v = static_cast<float>(v);
  return emit({.op = loop::Op::constant, .type = t, .fimm = v}, t);
}
Val Body::constant_int(DType t, int64_t v) {
  if (is_float(t)) return constant(t, t == DType::F32 ? static_cast<float>(v) : static_cast<double>(v));  // rounded once
  if (t == DType::Bool) v = v != 0;
  return emit({.op = loop::Op::constant, .type = t, .iimm = v}, t);
}
Val Body::index(Int e) {
  if (e.is_const()) return constant_int(DType::I64, e.value());
  return emit({.op = loop::Op::index, .type = DType::I64, .at = e}, DType::I64);
}

Val Body::load(uint32_t buffer, DType storage, Int at) {
  const DType t = compute_type(storage);
  if (mask_ == kNoValue) return emit({.op = loop::Op::load, .type = t, .buf = buffer, .at = at}, t);
  Val other = constant(t, 0);
  return emit({.op = loop::Op::load, .type = t, .a = mask_, .b = other.id, .buf = buffer, .at = at}, t);
}
Val Body::load_bit(uint32_t buffer, Int at) {
  const int32_t other = mask_ == kNoValue ? kNoValue : constant(DType::Bool, 0).id;
  return emit({.op = loop::Op::load_bit, .type = DType::Bool, .a = mask_, .b = other, .buf = buffer, .at = at}, DType::Bool);
}
Val Body::load_masked(uint32_t buffer, DType storage, Int at, Val mask, Val other) {
  if (mask_ != kNoValue) mask = Val{this, mask_, DType::Bool} & mask;
  return emit({.op = loop::Op::load, .type = compute_type(storage), .a = mask.id, .b = other.id, .buf = buffer, .at = at}, compute_type(storage));
}

Val Body::op(loop::Op o, DType type, Val a, Val b, Val c) {
  using loop::Op;
  VT_CHECK(a.body == this && (!b.body || b.body == this) && (!c.body || c.body == this), "operand of another body in {}", loop::to_string(o));
  const DType result = is_comparison(o) ? DType::Bool : compute_type(type);
  if (o == Op::cast && a.type == type) return a;
  if (o == Op::cast && type == compute_type(type)) {
    if (const Instr* k = constant_of(a)) {
      if (!is_float(a.type) && (is_float(type) || type == DType::I64)) return constant_int(type, k->iimm);
      if (is_float(a.type) && is_float(type)) return constant(type, k->fimm);
    }
  }
  if (o == Op::where) {
    VT_CHECK(a.type == DType::Bool && b.type == c.type, "where({}, {}, {})", to_string(a.type), to_string(b.type), to_string(c.type));
    if (const Instr* k = constant_of(a)) return k->iimm ? b : c;
    if (b.id == c.id) return b;
  } else if (b.body) {
    VT_CHECK(a.type == b.type, "{} of {} and {}", loop::to_string(o), to_string(a.type), to_string(b.type));
  }
  if (!is_float(a.type) && b.body && o != Op::where) {
    const Instr* kb = constant_of(b);
    if (kb && kb->iimm == 0 && (o == Op::add || o == Op::sub || o == Op::or_ || o == Op::shl || o == Op::shr)) return a;
  }
  if (b.body && (o == Op::mul || o == Op::div)) {
    const Instr* kb = constant_of(b);
    if (kb && (is_float(a.type) ? kb->fimm == 1.0 : kb->iimm == 1) && a.type != DType::Bool) return a;
    const Instr* ka = constant_of(a);
    if (o == Op::mul && ka && (is_float(a.type) ? ka->fimm == 1.0 : ka->iimm == 1) && a.type != DType::Bool) return b;
  }
  if (!is_float(a.type) && (o == Op::div || o == Op::floordiv || o == Op::remainder || o == Op::fmod) && a.type != DType::Bool) {
    const Instr* kb = constant_of(b);
    if (!kb || kb->iimm == 0) {
      may_fault = true;
      if (mask_ != kNoValue) b = where(Val{this, mask_, DType::Bool}, b, constant_int(b.type, 1));  // divides by nothing where it is off
    }
  }
  if (a.type == DType::Bool && o == Op::and_ && b.body) {
    if (const Instr* k = constant_of(a)) return k->iimm ? b : a;
    if (const Instr* k = constant_of(b)) return k->iimm ? a : b;
    if (a.id == b.id) return a;
  }
  return emit({.op = o, .type = type, .a = a.id, .b = b.id, .c = c.id}, result);
}

Val Body::check_index(Val i, Int bound, Val mask) {
  VT_CHECK(i.type == DType::I64);
  may_fault = true;
  int32_t m = mask.body ? mask.id : kNoValue;
  if (mask_ != kNoValue) m = mask.body ? (Val{this, mask_, DType::Bool} & mask).id : mask_;
  return emit({.op = loop::Op::check_index, .type = DType::I64, .a = i.id, .b = m, .at = bound}, DType::I64);
}

Int Body::indirect(Val v, Int bound) {
  VT_CHECK(v.type == DType::I64);
  if (const Instr* k = constant_of(v)) return Int(k->iimm);
  for (auto& [s, id] : indirects)
    if (id == v.id) return s;
  sym::Range r{0, std::numeric_limits<int64_t>::max()};
  if (auto b = sym::bounds(bound); b && b->hi != r.hi) r.hi = std::max<int64_t>(b->hi, 1) - 1;  // of nothing: every index is out of range
  Int s = ctx->symbol(sym::SymbolKind::Indirect, {}, r);
  indirects.emplace_back(s, v.id);
  return s;
}

Int Body::checked_index(Val i, Int bound) {
  i = ops::cast(i, DType::I64);
  Val wrapped = where(i < constant_int(DType::I64, 0), i + index(bound), i);
  return indirect(check_index(wrapped, bound), bound);
}

Val Body::masked(Val mask, const std::function<Val()>& f, Val other) {
  if (const Instr* k = constant_of(mask)) return k->iimm ? f() : other;
  const int32_t outer = mask_;
  Val m = outer == kNoValue ? mask : Val{this, outer, DType::Bool} & mask;
  mask_ = m.id;
  Val v = f();
  mask_ = outer;
  return where(mask, v, other);
}

Val unary(loop::Op o, Val a) { return a.body->op(o, a.type, a); }
Val binary(loop::Op o, Val a, Val b) { return a.body->op(o, a.type, a, b); }
Val operator+(Val a, Val b) { return binary(loop::Op::add, a, b); }
Val operator-(Val a, Val b) { return binary(loop::Op::sub, a, b); }
Val operator*(Val a, Val b) { return binary(loop::Op::mul, a, b); }
Val operator/(Val a, Val b) { return binary(loop::Op::div, a, b); }
Val operator-(Val a) { return unary(loop::Op::neg, a); }
Val operator<(Val a, Val b) { return binary(loop::Op::lt, a, b); }
Val operator<=(Val a, Val b) { return binary(loop::Op::le, a, b); }
Val operator>(Val a, Val b) { return binary(loop::Op::gt, a, b); }
Val operator>=(Val a, Val b) { return binary(loop::Op::ge, a, b); }
Val eq(Val a, Val b) { return binary(loop::Op::eq, a, b); }
Val ne(Val a, Val b) { return binary(loop::Op::ne, a, b); }
Val operator&(Val a, Val b) { return binary(loop::Op::and_, a, b); }
Val operator|(Val a, Val b) { return binary(loop::Op::or_, a, b); }
Val operator!(Val a) { return unary(loop::Op::not_, a); }
Val where(Val c, Val a, Val b) { return c.body->op(loop::Op::where, a.type, c, a, b); }
Val fma(Val a, Val b, Val c) { return is_float(a.type) ? a.body->op(loop::Op::fma, a.type, a, b, c) : a * b + c; }
Val cast(Val v, DType to) {
  if (v.type == to) return v;
  if (to == DType::Bool) return logical(v);
  return v.body->op(loop::Op::cast, to, v);
}
Val logical(Val v) { return v.type == DType::Bool ? v : ne(v, v.body->constant(v.type, 0)); }

}  // namespace vitrify::ops
