// Arithmetic, comparisons, casts, faults.
#include "codegen/llvm/emitter.h"

namespace vitrify::codegen::x86 {

using llvm::Constant;
using llvm::ConstantFP;
using llvm::ConstantInt;
namespace Intrinsic = llvm::Intrinsic;

namespace {
bool is_unsigned(DType t) { return t == DType::U8 || t == DType::Bool; }
bool is_compare(Op op) {
  return op == Op::lt || op == Op::le || op == Op::gt || op == Op::ge || op == Op::eq || op == Op::ne || op == Op::isnan || op == Op::isinf;
}
}  // namespace

int KernelEmitter::value_lanes(Value* v) const {
  auto* t = llvm::dyn_cast<llvm::FixedVectorType>(v->getType());
  return t ? int(t->getNumElements()) : 1;
}

Value* KernelEmitter::get(int32_t id, int u, bool widen) {
  const Multi& m = values_[id];
  VT_CHECK(!m.v.empty(), "%{} is used before it is defined in kernel {}", id, k_.name);
  if (m.uniform) return widen ? splat(m.v[0]) : m.v[0];
  return m.v[u];
}

Value* KernelEmitter::and_mask(Value* user) {
  if (!user || !block_.mask) return user ? user : block_.mask;
  return b_.CreateAnd(user, block_.mask);
}

Value* KernelEmitter::any(Value* mask) {
  int lanes = value_lanes(mask);
  if (lanes == 1) return mask;
  auto* bits = b_.getIntNTy(lanes);
  return b_.CreateICmpNE(b_.CreateBitCast(mask, bits), ConstantInt::get(bits, 0));
}

void KernelEmitter::fault(Value* failed, KernelFault kind, Value* leave) {
  VT_CHECK(fault_, "kernel {} may fault but does not say so", k_.name);
  if_then(any(failed), [&] {
    auto* s = b_.CreateAlignedStore(b_.getInt32(int32_t(kind)), fault_, llvm::Align(4));
    s->setAtomic(llvm::AtomicOrdering::Monotonic);
    if (!leave) return;
    llvm::BasicBlock *left = llvm::BasicBlock::Create(cx_, "left", fn_), *stays = llvm::BasicBlock::Create(cx_, "stays", fn_);
    b_.CreateCondBr(leave, left, stays);
    llvm::ReturnInst::Create(cx_, left);
    b_.SetInsertPoint(stays);
  });
}

Value* KernelEmitter::constant(DType t, const Instr& in) {
  auto* type = compute_llvm(t);
  if (type->isFloatingPointTy()) return ConstantFP::get(type, in.fimm);
  return ConstantInt::get(type, uint64_t(t == DType::Bool ? in.iimm != 0 : in.iimm), true);
}

Multi KernelEmitter::check_index(const Instr& in) {
  Multi r;
  bool vary = !values_[in.a].uniform || varies(in.at) || (in.b >= 0 && !values_[in.b].uniform);
  r.uniform = !vary;
  const auto range = sym::bounds(in.at);
  const bool has_first = range && range->lo >= 1;  // else there is no element that could stand in for one out of range
  for (int u = 0; u < (vary ? block_.unroll : 1); ++u) {
    Value* a = get(in.a, u, vary);
    auto* element = a->getType()->getScalarType();
    Value* bound = varies(in.at) ? vector_index(in.at, u, element) : vary ? splat(scalar_index(in.at, u)) : scalar_index(in.at, u);
    Value* bad = b_.CreateICmpUGE(a, bound);
    Value* failed = bad;
    if (in.b >= 0) failed = b_.CreateAnd(failed, get(in.b, u, vary));
    if (vary && block_.mask) failed = b_.CreateAnd(failed, block_.mask);
    fault(failed, KernelFault::IndexOutOfRange, has_first ? nullptr : any(b_.CreateICmpSLE(bound, Constant::getNullValue(bound->getType()))));
    r.v.push_back(b_.CreateSelect(bad, Constant::getNullValue(a->getType()), a));
  }
  return r;
}

void KernelEmitter::emit_instr(const Instr& in, AccSet*) {
  switch (in.op) {
    case Op::store:
      return store(in);
    case Op::store_add:
      return store_add(in);
    case Op::load:
      return define(in.result, compute_type(in.type), load(in));
    case Op::load_bit:
      return define(in.result, DType::Bool, load_bit(in));
    case Op::check_index:
      return define(in.result, types_[in.a], check_index(in));
    case Op::constant:
      return define(in.result, compute_type(in.type), {{constant(in.type, in)}, true});
    case Op::index: {
      Multi r;
      r.uniform = !varies(in.at);
      for (int u = 0; u < (r.uniform ? 1 : block_.unroll); ++u)
        r.v.push_back(r.uniform ? scalar_index(in.at, 0) : vector_index(in.at, u, b_.getInt64Ty()));
      return define(in.result, DType::I64, r);
    }
    default:
      break;
  }
  Multi r;
  for (int32_t id : {in.a, in.b, in.c})
    if (id >= 0) r.uniform &= values_[id].uniform;
  DType ta = in.a >= 0 ? types_[in.a] : in.type, tb = in.b >= 0 ? types_[in.b] : in.type;
  for (int u = 0; u < (r.uniform ? 1 : block_.unroll); ++u) {
    auto operand = [&](int32_t id) { return id >= 0 ? get(id, u, !r.uniform) : nullptr; };
    r.v.push_back(op_value(in, operand(in.a), operand(in.b), operand(in.c), ta, tb, u));
  }
  define(in.result, is_compare(in.op) ? DType::Bool : compute_type(in.type), r);
}

Value* KernelEmitter::compare(Op op, DType t, Value* a, Value* b) {
  using P = llvm::CmpInst::Predicate;
  if (op == Op::isnan) return is_float(t) ? b_.CreateFCmpUNO(a, a) : ConstantInt::getFalse(vec(b_.getInt1Ty(), value_lanes(a)));
  if (op == Op::isinf)
    return is_float(t) ? b_.CreateFCmpOEQ(b_.CreateUnaryIntrinsic(Intrinsic::fabs, a), ConstantFP::getInfinity(a->getType()))
                       : static_cast<Value*>(ConstantInt::getFalse(vec(b_.getInt1Ty(), value_lanes(a))));
  bool f = is_float(t), u = is_unsigned(t);
  P p;
  switch (op) {
    case Op::lt:
      p = f ? P::FCMP_OLT : u ? P::ICMP_ULT : P::ICMP_SLT;
      break;
    case Op::le:
      p = f ? P::FCMP_OLE : u ? P::ICMP_ULE : P::ICMP_SLE;
      break;
    case Op::gt:
      p = f ? P::FCMP_OGT : u ? P::ICMP_UGT : P::ICMP_SGT;
      break;
    case Op::ge:
      p = f ? P::FCMP_OGE : u ? P::ICMP_UGE : P::ICMP_SGE;
      break;
    case Op::eq:
      p = f ? P::FCMP_OEQ : P::ICMP_EQ;
      break;
    default:
      p = f ? P::FCMP_UNE : P::ICMP_NE;
      break;
  }
  return b_.CreateCmp(p, a, b);
}

// As the host converts: out of range gives the minimum of the 32- or 64-bit integer, narrower results take its low bits.
Value* KernelEmitter::cast(Value* v, DType from, DType to) {
  int lanes = value_lanes(v);
  DType target = compute_type(to);
  auto* type = vec(compute_llvm(target), lanes);
  if (is_float(from) && is_float(target)) {
    Value* r = from == target ? v : b_.CreateFPCast(v, type);
    return to == DType::BF16 || to == DType::F16 ? widen(narrow(r, to), to) : r;
  }
  if (is_float(from)) {
    if (target == DType::Bool) return b_.CreateFCmpUNE(v, Constant::getNullValue(v->getType()));
    bool wide = target == DType::I64 || target == DType::U8;
    // What does not fit has no value in LLVM, which would take another's: the integer that the float was made of, or the other side of a choice.
    auto* ints = vec(wide ? b_.getInt64Ty() : b_.getInt32Ty(), lanes);
    Value* fits = b_.CreateFCmpOLT(b_.CreateUnaryIntrinsic(Intrinsic::fabs, v), ConstantFP::get(v->getType(), wide ? 0x1p63 : 0x1p31));
    Value* i = b_.CreateFPToSI(b_.CreateSelect(fits, v, Constant::getNullValue(v->getType())), ints);
    return b_.CreateTrunc(b_.CreateSelect(fits, i, ConstantInt::get(ints, wide ? INT64_MIN : INT32_MIN, true)), type);
  }
  if (is_float(target)) {
    Value* r = is_unsigned(from) ? b_.CreateUIToFP(v, type) : b_.CreateSIToFP(v, type);
    return to == DType::BF16 || to == DType::F16 ? widen(narrow(r, to), to) : r;
  }
  if (from == target) return v;
  if (target == DType::Bool) return b_.CreateICmpNE(v, Constant::getNullValue(v->getType()));
  return is_unsigned(from) ? b_.CreateZExtOrTrunc(v, type) : b_.CreateSExtOrTrunc(v, type);
}

// max(a, b): as the host's maxps, which yields b when equal, but NaN from either side. Not "unordered(a) ? a : a > b ? a : b": InstCombine of LLVM 19
// turns (|x| unordered or |x| > 0) into (x unordered or x > 0).
Value* KernelEmitter::float_max(Value* a, Value* b, bool is_max) {
  // equal operands give the first, as ATen's clamps do: -0 stays -0. UGE and ULE are also the one machine instruction.
  Value* pick = b_.CreateSelect(is_max ? b_.CreateFCmpUGE(a, b) : b_.CreateFCmpULE(a, b), a, b);
  return fenced(b_.CreateSelect(b_.CreateFCmpUNO(b, b), b, pick));
}

// InstCombine of LLVM 19 loses the NaN of "y = x < 0 ? 0 : x; y > 0 ? y : 0": comparisons must not look into a select of comparisons.
Value* KernelEmitter::fenced(Value* v) { return b_.CreateIntrinsic(llvm::Intrinsic::arithmetic_fence, {v->getType()}, {v}); }

// Nothing else is rounded once: a product that the program adds to something is a number of its own in eager.
Value* KernelEmitter::fma(Value* a, Value* b, Value* c) {
  return t_.avx2 ? b_.CreateIntrinsic(Intrinsic::fma, {a->getType()}, {a, b, c}) : b_.CreateFAdd(b_.CreateFMul(a, b), c);
}

Value* KernelEmitter::float_op(const Instr& in, Value* a, Value* b) {
  auto* type = a->getType();
  auto lit = [&](double v) { return ConstantFP::get(type, v); };
  auto unary = [&](Intrinsic::ID id) { return b_.CreateUnaryIntrinsic(id, a); };
  const char* suffix = in.type == DType::F64 ? "_f64" : "_f32";
  auto fmod = [&] { return math_.per_lane(std::string("vt_fmod") + suffix, a, b); };
  auto differ = [&](Value* m) {  // m != 0 and its sign is not b's
    return b_.CreateAnd(b_.CreateFCmpUNE(m, lit(0)), b_.CreateXor(b_.CreateFCmpOLT(b, lit(0)), b_.CreateFCmpOLT(m, lit(0))));
  };
  switch (in.op) {
    case Op::neg:
      return b_.CreateFNeg(a);
    case Op::abs:
      return unary(Intrinsic::fabs);
    case Op::sign:
      return b_.CreateSelect(b_.CreateFCmpOGT(a, lit(0)), lit(1), b_.CreateSelect(b_.CreateFCmpOLT(a, lit(0)), lit(-1), lit(0)));
    case Op::sqrt:
      return unary(Intrinsic::sqrt);
    case Op::rsqrt:
      return b_.CreateFDiv(lit(1), unary(Intrinsic::sqrt));
    case Op::reciprocal:
      return b_.CreateFDiv(lit(1), a);
    case Op::floor:
      return unary(Intrinsic::floor);
    case Op::ceil:
      return unary(Intrinsic::ceil);
    case Op::round:
      return unary(Intrinsic::roundeven);
    case Op::trunc:
      return unary(Intrinsic::trunc);
    case Op::add:
      return b_.CreateFAdd(a, b);
    case Op::sub:
      return b_.CreateFSub(a, b);
    case Op::mul:
      return b_.CreateFMul(a, b);
    case Op::div:
      return b_.CreateFDiv(a, b);
    case Op::fmod:
      return fmod();
    case Op::remainder: {
      Value* m = fmod();
      return b_.CreateSelect(differ(m), b_.CreateFAdd(m, b), m);
    }
    case Op::floordiv: {
      Value* m = fmod();
      Value* d = b_.CreateFDiv(b_.CreateFSub(a, m), b);
      d = b_.CreateSelect(differ(m), b_.CreateFSub(d, lit(1)), d);
      Value* f = b_.CreateUnaryIntrinsic(Intrinsic::floor, d);
      f = b_.CreateSelect(b_.CreateFCmpOGT(b_.CreateFSub(d, f), lit(0.5)), b_.CreateFAdd(f, lit(1)), f);
      Value* quotient = b_.CreateFDiv(a, b);
      f = b_.CreateSelect(b_.CreateFCmpUNE(d, lit(0)), f, b_.CreateBinaryIntrinsic(Intrinsic::copysign, lit(0), quotient));
      return b_.CreateSelect(b_.CreateFCmpOEQ(b, lit(0)), quotient, f);
    }
    case Op::copysign:
      return b_.CreateBinaryIntrinsic(Intrinsic::copysign, a, b);
    case Op::min:
      return float_max(a, b, false);
    case Op::max:
      return float_max(a, b, true);
    case Op::fmin:
    case Op::fmax: {
      Value* pick = b_.CreateSelect(in.op == Op::fmax ? b_.CreateFCmpUGE(a, b) : b_.CreateFCmpULE(a, b), a, b);
      return fenced(b_.CreateSelect(b_.CreateFCmpUNO(a, a), b, pick));
    }
    default:
      break;
  }
  Value* r = math_.emit(in.op, a, b);
  VT_CHECK(r, "{} of {}", loop::to_string(in.op), to_string(in.type));
  return r;
}

Value* KernelEmitter::int_divide(Op op, DType t, Value* a, Value* b, int) {
  auto* type = a->getType();
  auto lit = [&](int64_t v) { return ConstantInt::get(type, uint64_t(v), true); };
  bool is_signed = !is_unsigned(t);
  int lanes = value_lanes(a), bits = type->getScalarSizeInBits();
  auto* constant_b = llvm::dyn_cast<Constant>(b);
  if (constant_b && lanes > 1) constant_b = constant_b->getSplatValue();
  auto* known = llvm::dyn_cast_or_null<ConstantInt>(constant_b);
  Value *zero = nullptr, *minus = nullptr, *safe = b;
  if (!known || known->isZero()) {
    zero = b_.CreateICmpEQ(b, lit(0));
    Value* failed = lanes > 1 && block_.mask ? b_.CreateAnd(zero, block_.mask) : zero;
    fault(failed, KernelFault::DivisionByZero);
    safe = b_.CreateSelect(zero, lit(1), safe);
  }
  if (is_signed && (!known || known->isMinusOne())) {
    minus = b_.CreateICmpEQ(b, lit(-1));
    safe = b_.CreateSelect(minus, lit(1), safe);
  }
  Value* q;
  if (lanes > 1 && !known && bits <= 32) {
    // exact: a quotient below an integer is further from it than half a unit of the wider float
    auto* f = vec(bits == 32 ? b_.getDoubleTy() : b_.getFloatTy(), lanes);
    auto to_float = [&](Value* v) { return is_signed ? b_.CreateSIToFP(v, f) : b_.CreateUIToFP(v, f); };
    q = b_.CreateTrunc(b_.CreateFPToSI(b_.CreateFDiv(to_float(a), to_float(safe)), vec(b_.getInt32Ty(), lanes)), type);
  } else {
    q = is_signed ? b_.CreateSDiv(a, safe) : b_.CreateUDiv(a, safe);
  }
  if (minus) q = b_.CreateSelect(minus, b_.CreateNeg(a), q);
  Value* result;
  if (op == Op::div) {
    result = q;
  } else {
    Value* r = b_.CreateSub(a, b_.CreateMul(q, b));
    Value* adjust = is_signed ? b_.CreateAnd(b_.CreateICmpNE(r, lit(0)), b_.CreateICmpSLT(b_.CreateXor(r, b), lit(0))) : nullptr;
    if (op == Op::fmod || !adjust)
      result = op == Op::floordiv ? q : r;
    else if (op == Op::remainder)
      result = b_.CreateSelect(adjust, b_.CreateAdd(r, b), r);
    else
      result = b_.CreateSelect(adjust, b_.CreateSub(q, lit(1)), q);
  }
  return zero ? b_.CreateSelect(zero, lit(0), result) : result;
}

Value* KernelEmitter::int_op(const Instr& in, Value* a, Value* b) {
  auto* type = a->getType();
  DType t = in.type;
  bool is_bool = t == DType::Bool, u = is_unsigned(t);
  auto lit = [&](int64_t v) { return ConstantInt::get(type, uint64_t(v), true); };
  Value* zero = lit(0);
  switch (in.op) {
    case Op::neg:
      return is_bool ? a : b_.CreateNeg(a);
    case Op::abs:
      return u ? a : b_.CreateSelect(b_.CreateICmpSLT(a, zero), b_.CreateNeg(a), a);
    case Op::sign: {
      if (is_bool) return a;
      Value* positive = u ? b_.CreateICmpNE(a, zero) : b_.CreateICmpSGT(a, zero);
      Value* rest = u ? zero : b_.CreateSelect(b_.CreateICmpSLT(a, zero), lit(-1), zero);
      return b_.CreateSelect(positive, lit(1), rest);
    }
    case Op::floor:
    case Op::ceil:
    case Op::round:
    case Op::trunc:
      return a;
    case Op::add:
      return is_bool ? b_.CreateOr(a, b) : b_.CreateAdd(a, b);
    case Op::sub:
      return is_bool ? b_.CreateXor(a, b) : b_.CreateSub(a, b);
    case Op::mul:
      return is_bool ? b_.CreateAnd(a, b) : b_.CreateMul(a, b);
    case Op::min:
    case Op::fmin:
      return b_.CreateSelect(u ? b_.CreateICmpULT(a, b) : b_.CreateICmpSLT(a, b), a, b);
    case Op::max:
    case Op::fmax:
      return b_.CreateSelect(u ? b_.CreateICmpUGT(a, b) : b_.CreateICmpSGT(a, b), a, b);
    case Op::pow: {
      auto* wide = vec(b_.getInt64Ty(), value_lanes(a));
      auto extend = [&](Value* v) { return u ? b_.CreateZExt(v, wide) : b_.CreateSExt(v, wide); };
      return b_.CreateTrunc(math_.per_lane("vt_pow_i64", extend(a), extend(b)), type);
    }
    case Op::shl:
    case Op::shr: {
      int bits = type->getScalarSizeInBits();
      Value* inside = b_.CreateICmpULT(b, lit(bits));
      Value* amount = b_.CreateSelect(inside, b, zero);
      if (in.op == Op::shl) return b_.CreateSelect(inside, b_.CreateShl(a, amount), zero);
      if (u) return b_.CreateSelect(inside, b_.CreateLShr(a, amount), zero);
      return b_.CreateAShr(a, b_.CreateSelect(inside, b, lit(bits - 1)));
    }
    default:
      VT_UNREACHABLE("{} of {}", loop::to_string(in.op), to_string(t));
  }
}

Value* KernelEmitter::op_value(const Instr& in, Value* a, Value* b, Value* c, DType ta, DType, int u) {
  switch (in.op) {
    case Op::cast:
      return cast(a, ta, in.type);
    case Op::bitcast: {
      int lanes = value_lanes(a);
      if (in.type == DType::BF16 || in.type == DType::F16) {
        Value* raw = b_.CreateBitCast(a, vec(in.type == DType::F16 ? b_.getHalfTy() : b_.getInt16Ty(), lanes));
        return widen(raw, in.type);
      }
      if (ta == DType::Bool) a = b_.CreateZExt(a, vec(b_.getInt8Ty(), lanes));
      if (in.type == DType::Bool) return b_.CreateICmpNE(a, Constant::getNullValue(a->getType()));
      return b_.CreateBitCast(a, vec(compute_llvm(in.type), lanes));
    }
    case Op::where: {
      Value* r = b_.CreateSelect(a, b, c);
      return r->getType()->isFPOrFPVectorTy() ? fenced(r) : r;
    }
    case Op::fma:
      return fma(a, b, c);
    case Op::and_:
      return b_.CreateAnd(a, b);
    case Op::or_:
      return b_.CreateOr(a, b);
    case Op::xor_:
      return b_.CreateXor(a, b);
    case Op::not_:
      return b_.CreateNot(a);
    case Op::lt:
    case Op::le:
    case Op::gt:
    case Op::ge:
    case Op::eq:
    case Op::ne:
    case Op::isnan:
    case Op::isinf:
      return compare(in.op, ta, a, b);
    default:
      break;
  }
  if (is_float(in.type)) return float_op(in, a, b);
  if (in.op == Op::div || in.op == Op::floordiv || in.op == Op::fmod || in.op == Op::remainder) return int_divide(in.op, in.type, a, b, u);
  return int_op(in, a, b);
}

}  // namespace vitrify::codegen::x86
