// Vector math. Largest errors in units in the last place, against the double function over a grid of the whole range (tests/unit/codegen):
//
//   f32, inline     exp 1, exp2 1, expm1 2, log 1, log2 2, log10 2, log1p 2, sin 1, cos 1, tanh 2, erf 2, sigmoid 2 (0 below -88.7)
//   f32 ndtr        4, or 2^-24 absolute where that is more; 0 below -5.7, where it is under 6e-9
//   f32 sin, cos    beyond |x| = 12000, infinities, NaN: the host's sinf and cosf for those lanes
//   the others      Sleef's 1.0-ulp functions (erfc 1.5) where the process has them, else the host's libm lane by lane; always libm for
//                   lgamma (3), nextafter, fmod (exact), and sinh, cosh, asinh, acosh (1); erfinv is our own, in double (1)
//   f64             as "the others", sinh to acosh included; erfinv 64 (far tail), lgamma 4; sigmoid through exp
//
// Constants are minimax fits of the function named at each.
#include <llvm/IR/IntrinsicsX86.h>

#include "codegen/llvm/emitter.h"

namespace vitrify::codegen::x86 {

using llvm::Constant;
using llvm::ConstantFP;
using llvm::ConstantInt;

namespace {
constexpr double kMagic = 12582912.0;  // 1.5 * 2^23: adding it rounds a small f32 to an integer, held in the low bits
constexpr int32_t kMagicBits = 0x4b400000;
constexpr double kLog2e = 1.44269504088896341, kLn2Hi = 0.693359375, kLn2Lo = -2.12194440054690583e-4;

int lanes_of(Value* v) {
  auto* t = llvm::dyn_cast<llvm::FixedVectorType>(v->getType());
  return t ? int(t->getNumElements()) : 1;
}
}  // namespace

bool VectorMath::is_math(Op op) {
  return (op >= Op::exp && op <= Op::sigmoid) || op == Op::pow || op == Op::atan2 || op == Op::hypot || op == Op::nextafter || op == Op::fmod ||
         op == Op::remainder || op == Op::floordiv;
}

llvm::Type* VectorMath::int_like(Value* x) {
  auto* i = b_.getIntNTy(x->getType()->getScalarSizeInBits());
  int n = lanes_of(x);
  return n == 1 ? static_cast<llvm::Type*>(i) : llvm::FixedVectorType::get(i, n);
}
Value* VectorMath::ci(Value* like, int64_t v) { return ConstantInt::get(int_like(like), uint64_t(v), true); }
Value* VectorMath::mad(Value* x, Value* y, Value* z) { return b_.CreateIntrinsic(llvm::Intrinsic::fmuladd, {x->getType()}, {x, y, z}); }
Value* VectorMath::poly(Value* x, std::initializer_list<double> highest_first) {
  Value* p = nullptr;
  for (double k : highest_first) p = p ? mad(p, x, c(x, k)) : c(x, k);
  return p;
}

llvm::AllocaInst* VectorMath::slot(llvm::Type* type) {
  auto& entry = b_.GetInsertBlock()->getParent()->getEntryBlock();
  llvm::IRBuilder<> at(&entry, entry.begin());
  return at.CreateAlloca(type);
}

// p * 2^n for |n| <= 150; n_bits is n as an integer. Zero where it is not `kept`, without an underflow, which takes a hundred cycles.
Value* VectorMath::scale(Value* p, Value* n_bits, Value* n, Value* kept) {
  if (t_.avx512 && lanes_of(p) == 16) {
    Value* mask = kept ? b_.CreateBitCast(kept, b_.getInt16Ty()) : b_.getInt16(-1);
    return b_.CreateIntrinsic(llvm::Intrinsic::x86_avx512_mask_scalef_ps_512, {}, {p, n, c(p, 0), mask, b_.getInt32(4)});
  }
  if (kept) p = b_.CreateSelect(kept, p, c(p, 0));
  // two steps: one power of two cannot reach the denormals and the largest numbers
  Value* half = b_.CreateAShr(n_bits, 1);
  auto power = [&](Value* e) { return b_.CreateBitCast(b_.CreateShl(b_.CreateAdd(e, ci(p, 127)), 23), p->getType()); };
  return b_.CreateFMul(b_.CreateFMul(p, power(half)), power(b_.CreateSub(n_bits, half)));
}

// e^r - 1 for |r| <= ln2/2
Value* VectorMath::exp_poly(Value* r) {
  Value* q = poly(r, {1.395051950e-03, 8.368908428e-03, 4.166620597e-02, 1.666651815e-01, 0.5});
  return mad(b_.CreateFMul(r, r), q, r);
}

Value* VectorMath::exp(Value* x) {
  x = b_.CreateSelect(b_.CreateFCmpOGT(x, c(x, 88.8)), c(x, 88.8), x);
  Value* kept = b_.CreateFCmpUGE(x, c(x, -104.0));  // and NaN
  x = b_.CreateSelect(b_.CreateFCmpOLT(x, c(x, -104.0)), c(x, -104.0), x);
  Value* t = mad(x, c(x, kLog2e), c(x, kMagic));
  Value* n = b_.CreateFSub(t, c(x, kMagic));
  Value* r = mad(n, c(x, -kLn2Lo), mad(n, c(x, -kLn2Hi), x));
  Value* p = b_.CreateFAdd(exp_poly(r), c(x, 1));
  return scale(p, b_.CreateSub(b_.CreateBitCast(t, int_like(x)), ci(x, kMagicBits)), n, kept);
}

Value* VectorMath::exp2(Value* x) {
  x = b_.CreateSelect(b_.CreateFCmpOGT(x, c(x, 128.0)), c(x, 128.0), x);
  Value* kept = b_.CreateFCmpUGE(x, c(x, -150.0));  // and NaN
  x = b_.CreateSelect(b_.CreateFCmpOLT(x, c(x, -150.0)), c(x, -150.0), x);
  Value* t = b_.CreateFAdd(x, c(x, kMagic));
  Value* n = b_.CreateFSub(t, c(x, kMagic));
  Value* r = b_.CreateFMul(b_.CreateFSub(x, n), c(x, 0.693147180559945309));
  Value* p = b_.CreateFAdd(exp_poly(r), c(x, 1));
  return scale(p, b_.CreateSub(b_.CreateBitCast(t, int_like(x)), ci(x, kMagicBits)), n, kept);
}

Value* VectorMath::expm1(Value* x0) {
  Value* x = b_.CreateSelect(b_.CreateFCmpOGT(x0, c(x0, 89.0)), c(x0, 89.0), x0);
  x = b_.CreateSelect(b_.CreateFCmpOLT(x, c(x, -30.0)), c(x, -30.0), x);
  Value* t = mad(x, c(x, kLog2e), c(x, kMagic));
  Value* n = b_.CreateFSub(t, c(x, kMagic));
  Value* r = mad(n, c(x, -kLn2Lo), mad(n, c(x, -kLn2Hi), x));
  Value* e = exp_poly(r);
  // half of the power, so that 2^128 is not needed
  Value* bits = b_.CreateAdd(b_.CreateSub(b_.CreateBitCast(t, int_like(x)), ci(x, kMagicBits)), ci(x, 126));
  Value* s = b_.CreateBitCast(b_.CreateShl(bits, 23), x->getType());
  Value* y = b_.CreateFMul(mad(e, s, b_.CreateFSub(s, c(x, 0.5))), c(x, 2));
  return b_.CreateSelect(b_.CreateFCmpOLT(abs(x0), c(x, 1e-8)), x0, y);
}

Value* VectorMath::log(Value* x, int base) {
  auto* type = x->getType();
  Value* tiny = b_.CreateFCmpOLT(x, c(x, 1.17549435e-38));
  Value* scaled = b_.CreateSelect(tiny, b_.CreateFMul(x, c(x, 8388608.0)), x);
  Value* bits = b_.CreateBitCast(scaled, int_like(x));
  Value* e = b_.CreateAShr(b_.CreateSub(bits, ci(x, 0x3f3504f3)), 23);  // the mantissa will lie in [sqrt(1/2), sqrt(2))
  Value* f = b_.CreateFSub(b_.CreateBitCast(b_.CreateSub(bits, b_.CreateShl(e, 23)), type), c(x, 1));
  Value* n = b_.CreateFAdd(b_.CreateSIToFP(e, type), b_.CreateSelect(tiny, c(x, -23), c(x, 0)));
  Value* z = b_.CreateFMul(f, f);
  // (log(1+f) - f + f^2/2) / f^3
  Value* y = poly(f, {6.746552140e-02, -1.167562827e-01, 1.188819036e-01, -1.240559444e-01, 1.421954930e-01, -1.666799486e-01, 2.000211924e-01,
                      -2.500000894e-01, 3.333331347e-01});
  y = b_.CreateFMul(b_.CreateFMul(y, f), z);
  Value* r;
  if (base == 0) {
    y = mad(n, c(x, kLn2Lo), y);
    y = mad(z, c(x, -0.5), y);
    r = mad(n, c(x, kLn2Hi), b_.CreateFAdd(f, y));
  } else if (base == 2) {
    y = mad(z, c(x, -0.5), y);
    Value* k = c(x, kLog2e - 1);
    r = mad(f, k, b_.CreateFMul(y, k));
    r = b_.CreateFAdd(b_.CreateFAdd(r, y), f);
    r = b_.CreateFAdd(r, n);
  } else {
    y = mad(z, c(x, -0.5), y);
    constexpr double hi = 0.43359375, lo = 7.00731903251827651e-4;          // log10(e)
    constexpr double two_hi = 0.30078125, two_lo = 2.48745663981195214e-4;  // log10(2)
    r = b_.CreateFMul(b_.CreateFAdd(f, y), c(x, lo));
    r = mad(n, c(x, two_lo), r);
    r = mad(y, c(x, hi), r);
    r = mad(f, c(x, hi), r);
    r = mad(n, c(x, two_hi), r);
  }
  auto* inf = ConstantFP::getInfinity(type);
  r = b_.CreateSelect(b_.CreateFCmpOEQ(x, inf), x, r);
  Value* bad = b_.CreateSelect(b_.CreateFCmpOEQ(x, c(x, 0)), ConstantFP::getInfinity(type, true), ConstantFP::getNaN(type));
  return b_.CreateSelect(b_.CreateFCmpOGT(x, c(x, 0)), r, bad);
}

Value* VectorMath::log1p(Value* x) {
  Value* u = b_.CreateFAdd(x, c(x, 1));
  Value* lost = b_.CreateFSub(x, b_.CreateFSub(u, c(x, 1)));  // what 1 + x rounded away
  Value* l = log(u, 0);
  Value* y = b_.CreateFAdd(l, b_.CreateFDiv(lost, u));
  Value* edge = b_.CreateOr(b_.CreateFCmpOEQ(x, ConstantFP::getInfinity(x->getType())), b_.CreateFCmpOEQ(u, c(x, 0)));
  y = b_.CreateSelect(edge, l, y);
  return b_.CreateSelect(b_.CreateFCmpOEQ(u, c(x, 1)), x, y);
}

Value* VectorMath::sincos(Value* x, bool cosine) {
  auto* type = x->getType();
  Value* t = mad(x, c(x, 0.636619772367581343), c(x, kMagic));
  Value* n = b_.CreateFSub(t, c(x, kMagic));
  // pi/2 in parts of 8, 11 and 11 bits whose products with n are exact, and the rest
  Value* r = x;
  for (double part : {1.5703125, 4.837512969970703e-4, 7.549533620476723e-08, 2.5633440682570896e-12}) r = mad(n, c(x, -part), r);
  Value* q = b_.CreateBitCast(t, int_like(x));
  if (cosine) q = b_.CreateAdd(q, ci(x, 1));
  Value* z = b_.CreateFMul(r, r);
  Value* s = mad(b_.CreateFMul(z, r), poly(z, {-1.951521990e-04, 8.332160302e-03, -1.666665524e-01}), r);
  Value* k = b_.CreateFMul(b_.CreateFMul(z, z), poly(z, {2.443837730e-05, -1.388736651e-03, 4.166664556e-02}));
  k = b_.CreateFAdd(mad(z, c(x, -0.5), k), c(x, 1));
  Value* odd = b_.CreateICmpNE(b_.CreateAnd(q, ci(x, 1)), ci(x, 0));
  Value* y = b_.CreateSelect(odd, k, s);
  Value* sign = b_.CreateShl(b_.CreateAnd(q, ci(x, 2)), 30);
  y = b_.CreateBitCast(b_.CreateXor(b_.CreateBitCast(y, int_like(x)), sign), type);
  if (!cosine) y = b_.CreateSelect(b_.CreateFCmpOEQ(x, c(x, 0)), x, y);
  Value* far = b_.CreateFCmpUGT(abs(x), c(x, 12000.0));
  Value* any_far = far;
  int lanes = lanes_of(x);
  if (lanes > 1) {
    auto* bits = b_.getIntNTy(lanes);
    any_far = b_.CreateICmpNE(b_.CreateBitCast(far, bits), ConstantInt::get(bits, 0));
  }
  auto* fn = b_.GetInsertBlock()->getParent();
  auto* here = b_.GetInsertBlock();
  auto* slow = llvm::BasicBlock::Create(b_.getContext(), "far", fn);
  auto* done = llvm::BasicBlock::Create(b_.getContext(), "near", fn);
  b_.CreateCondBr(any_far, slow, done);
  b_.SetInsertPoint(slow);
  // Only for the lanes that are far: a number's sine must not follow from its neighbours.
  Value* z2 = b_.CreateSelect(far, per_lane(cosine ? "vt_cos_f32" : "vt_sin_f32", x, nullptr), y);
  b_.CreateBr(done);
  b_.SetInsertPoint(done);
  auto* phi = b_.CreatePHI(type, 2);
  phi->addIncoming(y, here);
  phi->addIncoming(z2, slow);
  return phi;
}

Value* VectorMath::tanh(Value* x) {
  Value *a = abs(x), *z = b_.CreateFMul(x, x);
  Value* p = poly(z, {-5.704994779e-03, 2.063909546e-02, -5.373971909e-02, 1.333144158e-01, -3.333328068e-01});
  Value* small = mad(b_.CreateFMul(a, z), p, a);
  Value* e = exp(b_.CreateFAdd(a, a));
  Value* large = b_.CreateFSub(c(x, 1), b_.CreateFDiv(c(x, 2), b_.CreateFAdd(e, c(x, 1))));
  Value* y = b_.CreateSelect(b_.CreateFCmpOLT(a, c(x, 0.625)), small, large);
  return b_.CreateBinaryIntrinsic(llvm::Intrinsic::copysign, y, x);
}

Value* VectorMath::erf(Value* x) {
  Value *t = abs(x), *z = b_.CreateFMul(x, x);
  Value* p = poly(z, {-5.953961518e-04, 4.985993262e-03, -2.676176652e-02, 1.128168404e-01, -3.761247993e-01, 1.283791512e-01});
  Value* small = mad(p, t, t);
  Value* far = b_.CreateSelect(b_.CreateFCmpOGT(t, c(x, 4)), c(x, 4), t);
  // (log(erfc(t)) + t) / t
  Value* q = poly(far, {-1.076362969e-05, 3.180640342e-04, -3.622935619e-03, 2.372021973e-02, -1.061876491e-01, -6.351814866e-01, -1.286409646e-01});
  Value* large = b_.CreateFSub(c(x, 1), exp(mad(q, far, b_.CreateFNeg(far))));
  Value* y = b_.CreateSelect(b_.CreateFCmpOLT(t, c(x, 0.92)), small, large);
  return b_.CreateBinaryIntrinsic(llvm::Intrinsic::copysign, y, x);
}

// The normal distribution function, P(X < x): 2^q(t) or 1 - 2^q(t), where q(t) is the logarithm of the tail beyond t = |x|.
Value* VectorMath::ndtr(Value* x) {
  Value* t = abs(x);
  Value* q = poly(t, {3.046951217e-07, -6.668076826e-06, 5.890329874e-05, -2.381690718e-04, -5.900787604e-05, 6.997488073e-03, -5.246635255e-02,
                      -4.592144877e-01, -1.151104769, -1});
  Value* n = b_.CreateUnaryIntrinsic(llvm::Intrinsic::floor, q);
  Value* p = poly(b_.CreateFSub(q, n), {2.161291582e-04, 1.246784616e-03, 9.675451602e-03, 5.548528060e-02, 2.402293056e-01, 6.931470444e-01, 1});
  Value* tail = scale(p, b_.CreateSub(b_.CreateBitCast(b_.CreateFAdd(n, c(x, kMagic)), int_like(x)), ci(x, kMagicBits)), n);
  tail = b_.CreateSelect(b_.CreateFCmpOGT(t, c(x, 5.7)), c(x, 0), tail);
  return b_.CreateSelect(b_.CreateFCmpOGT(x, c(x, 0)), b_.CreateFSub(c(x, 1), tail), tail);
}

Value* VectorMath::per_lane(const std::string& name, Value* x, Value* y) {
  symbols_.insert(name);
  llvm::Type *ptr = b_.getPtrTy(), *i32 = b_.getInt32Ty();
  auto* type = llvm::FunctionType::get(b_.getVoidTy(), {ptr, ptr, i32}, false);
  auto* fn = llvm::cast<llvm::Function>(m_.getOrInsertFunction(name, type).getCallee());
  fn->addFnAttr(llvm::Attribute::NoUnwind);
  fn->addFnAttr(llvm::Attribute::WillReturn);
  fn->setOnlyAccessesArgMemory();
  auto* xs = slot(x->getType());
  b_.CreateStore(x, xs);
  Value* ys = Constant::getNullValue(ptr);
  if (y) {
    ys = slot(y->getType());
    b_.CreateStore(y, ys);
  }
  b_.CreateCall(fn, {xs, ys, b_.getInt32(lanes_of(x))});
  return b_.CreateLoad(x->getType(), xs);
}

Value* VectorMath::sleef(Op op, Value* x, Value* y) {
  int lanes = lanes_of(x);
  bool f64 = x->getType()->getScalarType()->isDoubleTy();
  const char* isa = nullptr;
  int bits = lanes * (f64 ? 64 : 32);
  if (bits == 512 && t_.avx512) isa = "avx512f";
  if (bits == 256 && t_.avx2) isa = "avx2";
  if (!isa || !resolve_ || op == Op::erfinv || op == Op::nextafter || op == Op::fmod || op == Op::lgamma) return nullptr;
  // the f32 forms of these overflow before their results do
  if (!f64 && (op == Op::sinh || op == Op::cosh || op == Op::asinh || op == Op::acosh)) return nullptr;
  const char* ulp = op == Op::erfc ? "_u15" : op == Op::hypot ? "_u05" : "_u10";
  std::string name = fmt::format("Sleef_{}{}{}{}{}", loop::to_string(op), f64 ? "d" : "f", lanes, ulp, isa);
  if (!resolve_(name.c_str())) return nullptr;
  symbols_.insert(name);
  llvm::SmallVector<llvm::Type*, 2> types(y ? 2 : 1, x->getType());
  auto fn = m_.getOrInsertFunction(name, llvm::FunctionType::get(x->getType(), types, false));
  auto* f = llvm::cast<llvm::Function>(fn.getCallee());
  f->addFnAttr(llvm::Attribute::NoUnwind);
  f->addFnAttr(llvm::Attribute::WillReturn);
  f->setDoesNotAccessMemory();
  return y ? b_.CreateCall(fn, {x, y}) : b_.CreateCall(fn, {x});
}

Value* VectorMath::call(Op op, Value* x) {
  const std::string name = fmt::format("vt_{}_of_{}", loop::to_string(op), lanes_of(x));
  llvm::Function* f = m_.getFunction(name);
  if (!f) {
    f = llvm::Function::Create(llvm::FunctionType::get(x->getType(), {x->getType()}, false), llvm::Function::InternalLinkage, name, m_);
    set_target(*f, t_);
    f->addFnAttr(llvm::Attribute::WillReturn);
    f->setDoesNotAccessMemory();
    llvm::IRBuilderBase::InsertPointGuard here(b_);
    b_.SetInsertPoint(llvm::BasicBlock::Create(b_.getContext(), "entry", f));
    shared_ = false;
    b_.CreateRet(emit(op, f->getArg(0), nullptr));
    shared_ = true;
  }
  return b_.CreateCall(f, {x});
}

Value* VectorMath::emit(Op op, Value* x, Value* y) {
  if (!is_math(op)) return nullptr;
  bool f64 = x->getType()->getScalarType()->isDoubleTy();
  if (shared_ && !f64 && !y) return call(op, x);
  if (op == Op::sigmoid) {
    Value* e = emit(Op::exp, b_.CreateFNeg(x), nullptr);
    return b_.CreateFDiv(c(x, 1), b_.CreateFAdd(e, c(x, 1)));
  }
  if (f64 && op == Op::ndtr) return b_.CreateFMul(c(x, 0.5), emit(Op::erfc, b_.CreateFMul(c(x, -M_SQRT1_2), x), nullptr));
  if (!f64) {
    switch (op) {
      case Op::exp:
        return exp(x);
      case Op::exp2:
        return exp2(x);
      case Op::expm1:
        return expm1(x);
      case Op::log:
        return log(x, 0);
      case Op::log2:
        return log(x, 2);
      case Op::log10:
        return log(x, 10);
      case Op::log1p:
        return log1p(x);
      case Op::sin:
        return sincos(x, false);
      case Op::cos:
        return sincos(x, true);
      case Op::tanh:
        return tanh(x);
      case Op::erf:
        return erf(x);
      case Op::ndtr:
        return ndtr(x);
      default:
        break;
    }
  }
  if (Value* v = sleef(op, x, y)) return v;
  return per_lane(fmt::format("vt_{}_{}", loop::to_string(op), f64 ? "f64" : "f32"), x, y);
}

}  // namespace vitrify::codegen::x86
