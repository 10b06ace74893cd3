// Index expressions, loads and stores.
#include <llvm/IR/PatternMatch.h>

#include <algorithm>
#include <numeric>

#include "codegen/llvm/emitter.h"
#include "sym/measure.h"

namespace vitrify::codegen::x86 {

using llvm::BasicBlock;
using llvm::Constant;
using llvm::ConstantInt;
using sym::ExprOp;

namespace {
llvm::Constant* iota(llvm::Type* element, int lanes, int64_t step = 1) {
  llvm::SmallVector<Constant*, 16> v;
  for (int l = 0; l < lanes; ++l) v.push_back(llvm::ConstantInt::getSigned(element, l * step));
  return llvm::ConstantVector::get(v);
}
constexpr __int128 kFar = __int128(1) << 100;
__int128 clamp(__int128 v) { return std::clamp(v, -kFar, kFar); }
}  // namespace

bool KernelEmitter::varies(Int e) const {
  if (block_.lanes == 1 || e.is_const()) return false;
  std::vector<Int> free;
  sym::free_symbols(e, free);
  for (Int s : free) {
    if (s == block_.var) return true;
    auto it = indirect_.find(sym::view(s).symbol->id);
    if (it != indirect_.end() && !values_[it->second].uniform) return true;
  }
  return false;
}

KernelEmitter::Bounds KernelEmitter::range_of(Int e) const {
  if (e.is_const()) return {e.value(), e.value()};
  if (auto it = ranges_.find(e); it != ranges_.end()) return it->second;
  const Bounds r = find_range(e);
  ranges_.emplace(e, r);
  return r;
}

KernelEmitter::Bounds KernelEmitter::find_range(Int e) const {
  sym::View v = sym::view(e);
  auto arg = [&](size_t i) { return range_of(v.args[i]); };
  switch (v.op) {
    case ExprOp::Const:
      return {v.value, v.value};
    case ExprOp::Symbol: {
      auto it = extents_.find(v.symbol->id);
      if (it != extents_.end()) return {0, std::max<__int128>(range_of(it->second).second - 1, 0)};
      return {v.symbol->range.lo, v.symbol->range.hi};
    }
    case ExprOp::Add: {
      auto r = arg(0);
      for (size_t i = 1; i < v.args.size(); ++i) {
        auto x = arg(i);
        r = {clamp(r.first + x.first), clamp(r.second + x.second)};
      }
      return r;
    }
    case ExprOp::Mul: {
      auto r = arg(0);
      for (size_t i = 1; i < v.args.size(); ++i) {
        auto x = arg(i);
        constexpr __int128 kSafe = __int128(1) << 62;
        auto small = [&](__int128 a) { return std::clamp(a, -kSafe, kSafe); };
        __int128 p[4] = {small(r.first) * small(x.first), small(r.first) * small(x.second), small(r.second) * small(x.first),
                         small(r.second) * small(x.second)};
        r = {clamp(*std::min_element(p, p + 4)), clamp(*std::max_element(p, p + 4))};
      }
      return r;
    }
    case ExprOp::FloorDiv: {
      auto a = arg(0), b = arg(1);
      if (a.first >= 0 && b.first >= 1) return {0, a.second / b.first};
      return {-kFar, kFar};
    }
    case ExprOp::Mod: {
      auto b = arg(1);
      if (b.first >= 1) return {0, b.second - 1};
      return {-kFar, kFar};
    }
    case ExprOp::Min: {
      auto a = arg(0), b = arg(1);
      return {std::min(a.first, b.first), std::min(a.second, b.second)};
    }
    case ExprOp::Max: {
      auto a = arg(0), b = arg(1);
      return {std::max(a.first, b.first), std::max(a.second, b.second)};
    }
  }
  return {-kFar, kFar};
}

// Arithmetic modulo 2^32 gives the right value when the arguments of every operation that is not a ring operation fit.
bool KernelEmitter::fits32(Int e) const {
  if (e.is_const()) return true;
  if (auto it = fits32_.find(e); it != fits32_.end()) return it->second;
  return fits32_[e] = find_fits32(e);
}

bool KernelEmitter::find_fits32(Int e) const {
  sym::View v = sym::view(e);
  for (Int a : v.args) {
    if (!fits32(a)) return false;
    if (v.op == ExprOp::Add || v.op == ExprOp::Mul) continue;
    auto r = range_of(a);
    if (r.first < INT32_MIN || r.second > INT32_MAX) return false;
  }
  return true;
}

Value* KernelEmitter::floor_div(Value* a, Value* b, bool non_negative, bool want_mod) {
  if (non_negative) return want_mod ? b_.CreateURem(a, b) : b_.CreateUDiv(a, b);
  Value* q = b_.CreateSDiv(a, b);
  Value* r = b_.CreateSub(a, b_.CreateMul(q, b));
  Value* zero = Constant::getNullValue(a->getType());
  Value* fix = b_.CreateAnd(b_.CreateICmpNE(r, zero), b_.CreateICmpSLT(b_.CreateXor(r, b), zero));
  if (want_mod) return b_.CreateSelect(fix, b_.CreateAdd(r, b), r);
  return b_.CreateSelect(fix, b_.CreateSub(q, llvm::ConstantInt::get(q->getType(), 1)), q);
}

// Parts of one index are made once, however often they occur in each other. They stay in one basic block while it is made.
class KernelEmitter::IndexScope {
 public:
  explicit IndexScope(KernelEmitter& k) : k_(k) { ++k.index_depth_; }
  ~IndexScope() {
    if (--k_.index_depth_ == 0) k_.made_.clear();
  }

 private:
  KernelEmitter& k_;
};

Value* KernelEmitter::scalar_index(Int e, int u) {
  if (e.is_const()) return i64(e.value());
  if (sym::weight(e) < 8) return make_scalar_index(e, u);
  IndexScope scope(*this);
  const auto key = std::tuple(e.node(), u, static_cast<llvm::Type*>(nullptr));
  if (auto it = made_.find(key); it != made_.end()) return it->second;
  return made_[key] = make_scalar_index(e, u);
}

Value* KernelEmitter::make_scalar_index(Int e, int u) {
  sym::View v = sym::view(e);
  switch (v.op) {
    case ExprOp::Const:
      return i64(v.value);
    case ExprOp::Symbol: {
      if (block_.lanes > 1 && e == block_.var) return u ? b_.CreateNSWAdd(block_.base, i64(int64_t(u) * block_.lanes)) : block_.base;
      auto ind = indirect_.find(v.symbol->id);
      if (ind != indirect_.end()) return get(ind->second, 0, false);
      auto it = symbols_.find(v.symbol->id);
      VT_CHECK(it != symbols_.end(), "symbol {} has no value in kernel {}", sym::str(e), k_.name);
      return it->second;
    }
    case ExprOp::Add: {
      // outer loops first, so that what does not change in an inner loop can leave it
      auto rank = [&](Int a) {
        std::vector<Int> free;
        sym::free_symbols(a, free);
        int r = 0;
        for (Int s : free) {
          uint32_t id = sym::view(s).symbol->id;
          if (indirect_.count(id)) r = std::max(r, 2000);
          for (size_t d = 0; d < k_.outer.size(); ++d)
            if (k_.outer[d].var == s) r = std::max(r, int(d) + 1);
          for (auto& st : k_.stages)
            for (size_t d = 0; d < st.inner.size(); ++d)
              if (st.inner[d].var == s) r = std::max(r, int(d) + 100);
        }
        return r;
      };
      std::vector<std::pair<int, Int>> terms;
      for (Int a : v.args) terms.emplace_back(rank(a), a);
      std::stable_sort(terms.begin(), terms.end(), [](auto& a, auto& b) { return a.first < b.first; });
      Value* sum = scalar_index(terms[0].second, u);
      for (size_t i = 1; i < terms.size(); ++i) sum = b_.CreateAdd(sum, scalar_index(terms[i].second, u));
      return sum;
    }
    case ExprOp::Mul: {
      Value* p = scalar_index(v.args[0], u);
      for (size_t i = 1; i < v.args.size(); ++i) p = b_.CreateMul(p, scalar_index(v.args[i], u));
      return p;
    }
    default:
      break;
  }
  Value *a = scalar_index(v.args[0], u), *b = scalar_index(v.args[1], u);
  if (v.op == ExprOp::Min) return b_.CreateBinaryIntrinsic(llvm::Intrinsic::smin, a, b);
  if (v.op == ExprOp::Max) return b_.CreateBinaryIntrinsic(llvm::Intrinsic::smax, a, b);
  bool plain = range_of(v.args[0]).first >= 0 && range_of(v.args[1]).first >= 1;
  return floor_div(a, b, plain, v.op == ExprOp::Mod);
}

Value* KernelEmitter::vector_index(Int e, int u, llvm::Type* element) {
  if (sym::weight(e) < 8) return make_vector_index(e, u, element);
  IndexScope scope(*this);
  const auto key = std::tuple(e.node(), u, element);
  if (auto it = made_.find(key); it != made_.end()) return it->second;
  return made_[key] = make_vector_index(e, u, element);
}

Value* KernelEmitter::make_vector_index(Int e, int u, llvm::Type* element) {
  int lanes = block_.lanes;
  if (!varies(e)) return b_.CreateVectorSplat(lanes, b_.CreateSExtOrTrunc(scalar_index(e, u), element));
  sym::View v = sym::view(e);
  if (v.op == ExprOp::Symbol) {
    if (e == block_.var) return b_.CreateAdd(b_.CreateVectorSplat(lanes, b_.CreateSExtOrTrunc(scalar_index(e, u), element)), iota(element, lanes));
    Value* x = get(indirect_.at(v.symbol->id), u, true);
    return b_.CreateSExtOrTrunc(x, vec(element, lanes));
  }
  if (v.op == ExprOp::Add || v.op == ExprOp::Mul) {
    Value *uniform = nullptr, *result = nullptr;
    auto join = [&](Value* a, Value* b) { return !a ? b : v.op == ExprOp::Add ? b_.CreateAdd(a, b) : b_.CreateMul(a, b); };
    for (Int a : v.args)
      if (!varies(a)) uniform = join(uniform, scalar_index(a, u));
    for (Int a : v.args)
      if (varies(a)) result = join(result, vector_index(a, u, element));
    return uniform ? join(result, b_.CreateVectorSplat(lanes, b_.CreateSExtOrTrunc(uniform, element))) : result;
  }
  Value *a = vector_index(v.args[0], u, element), *b = vector_index(v.args[1], u, element);
  if (v.op == ExprOp::Min) return b_.CreateBinaryIntrinsic(llvm::Intrinsic::smin, a, b);
  if (v.op == ExprOp::Max) return b_.CreateBinaryIntrinsic(llvm::Intrinsic::smax, a, b);
  bool plain = range_of(v.args[0]).first >= 0 && range_of(v.args[1]).first >= 1;
  return floor_div(a, b, plain, v.op == ExprOp::Mod);
}

llvm::Type* KernelEmitter::compute_llvm(DType t) const {
  auto& b = const_cast<llvm::IRBuilder<>&>(b_);
  switch (t) {
    case DType::Bool:
      return b.getInt1Ty();
    case DType::U8:
    case DType::I8:
      return b.getInt8Ty();
    case DType::I16:
      return b.getInt16Ty();
    case DType::I32:
      return b.getInt32Ty();
    case DType::I64:
      return b.getInt64Ty();
    case DType::F16:
    case DType::BF16:
    case DType::F32:
      return b.getFloatTy();
    case DType::F64:
      return b.getDoubleTy();
    default:
      VT_UNREACHABLE("type {} in a kernel", to_string(t));
  }
}

llvm::Type* KernelEmitter::storage_llvm(DType t) const {
  auto& b = const_cast<llvm::IRBuilder<>&>(b_);
  if (t == DType::Bool) return b.getInt8Ty();
  if (t == DType::F16) return b.getHalfTy();
  if (t == DType::BF16) return b.getInt16Ty();
  return compute_llvm(t);
}

Value* KernelEmitter::widen(Value* raw, DType storage) {
  int lanes = value_lanes(raw);
  auto* f32 = vec(b_.getFloatTy(), lanes);
  if (storage == DType::Bool) return b_.CreateICmpNE(raw, Constant::getNullValue(raw->getType()));
  if (storage == DType::F16) return b_.CreateFPExt(raw, f32);
  if (storage == DType::BF16) return b_.CreateBitCast(b_.CreateShl(b_.CreateZExt(raw, vec(b_.getInt32Ty(), lanes)), 16), f32);
  return raw;
}

Value* KernelEmitter::narrow(Value* v, DType storage) {
  int lanes = value_lanes(v);
  if (storage == DType::Bool) return b_.CreateZExt(v, vec(b_.getInt8Ty(), lanes));
  if (storage == DType::F16) return b_.CreateFPTrunc(v, vec(b_.getHalfTy(), lanes));
  if (storage == DType::BF16) {
    using namespace llvm::PatternMatch;
    Value* raw = nullptr;  // as it was loaded
    if (match(v, m_BitCast(m_Shl(m_ZExt(m_Value(raw)), m_SpecificInt(16)))) && raw->getType() == vec(b_.getInt16Ty(), lanes)) return raw;
    auto* i32 = vec(b_.getInt32Ty(), lanes);
    Value* bits = b_.CreateBitCast(v, i32);
    Value* odd = b_.CreateAnd(b_.CreateLShr(bits, 16), 1);
    Value* rounded = b_.CreateLShr(b_.CreateAdd(b_.CreateAdd(bits, llvm::ConstantInt::get(i32, 0x7fff)), odd), 16);
    Value* r = b_.CreateSelect(b_.CreateFCmpUNO(v, v), llvm::ConstantInt::get(i32, 0x7fc0), rounded);
    return b_.CreateTrunc(r, vec(b_.getInt16Ty(), lanes));
  }
  return v;
}

// Where accesses of lanes that are switched off go.
Value* KernelEmitter::dummy_pointer() {
  if (!dummy_) {
    auto* a = make_slot(llvm::ArrayType::get(b_.getInt64Ty(), 8), "unused");
    llvm::IRBuilder<> at(entry_, std::next(a->getIterator()));
    at.CreateStore(Constant::getNullValue(a->getAllocatedType()), a);
    dummy_ = a;
  }
  return dummy_;
}

Value* KernelEmitter::element_pointer(const Instr& in, int u) {
  auto* type = storage_llvm(k_.buffers[in.buf].dtype);
  Value* base = buffers_[in.buf];
  if (block_.lanes > 1) {
    auto aff = sym::affine_in(in.at, block_.var);
    if (aff && aff->first.is(1)) {
      // split, so that the part that does not change in this loop leaves it
      if (!aff->second.is(0)) base = b_.CreateGEP(type, base, scalar_index(aff->second, u));
      base = b_.CreateGEP(type, base, block_.base);
      return u ? b_.CreateConstGEP1_64(type, base, int64_t(u) * block_.lanes) : base;
    }
  }
  return b_.CreateGEP(type, base, scalar_index(in.at, u));
}

Value* KernelEmitter::lane_pointers(const Instr& in, int u) {
  auto* type = storage_llvm(k_.buffers[in.buf].dtype);
  int lanes = block_.lanes;
  if (!varies(in.at)) return b_.CreateVectorSplat(lanes, element_pointer(in, u));
  // Where they fit, indices of 32 bits: half the instructions of pointers, which would moreover all leave the loop and lie on the stack meanwhile.
  if (fits32(in.at) && range_of(k_.buffers[in.buf].extent).second <= INT32_MAX)
    return b_.CreateGEP(type, buffers_[in.buf], vector_index(in.at, u, b_.getInt32Ty()));
  auto aff = sym::affine_in(in.at, block_.var);
  if (aff && !varies(aff->first) && !varies(aff->second)) {
    Value* base = b_.CreateGEP(type, buffers_[in.buf], scalar_index(in.at, u));
    if (aff->first.is_const() && std::abs(aff->first.value()) < (1 << 24))
      return b_.CreateGEP(type, base, iota(b_.getInt32Ty(), lanes, aff->first.value()));
    Value* stride = b_.CreateVectorSplat(lanes, scalar_index(aff->first, u));
    return b_.CreateGEP(type, base, b_.CreateMul(stride, iota(b_.getInt64Ty(), lanes)));
  }
  return b_.CreateGEP(type, buffers_[in.buf], vector_index(in.at, u, b_.getInt64Ty()));
}

// Lanes `stride` elements apart: every vector from the first to the last is read, and what is wanted of it kept. A gather takes longer.
Value* KernelEmitter::load_strided(const Instr& in, int u, int64_t stride) {
  auto* type = storage_llvm(k_.buffers[in.buf].dtype);
  const int lanes = block_.lanes;
  const llvm::Align align(std::max<size_t>(size_of(k_.buffers[in.buf].dtype), 1));
  const int64_t step = std::abs(stride), last = step * (lanes - 1);
  Value* first = b_.CreateGEP(type, buffers_[in.buf], scalar_index(in.at, u));
  if (stride < 0) first = b_.CreateConstGEP1_64(type, first, stride * (lanes - 1));
  Value* r = nullptr;
  for (int64_t at = 0; at <= last; at += lanes) {
    const int64_t from = std::max<int64_t>(0, std::min(at, last + 1 - lanes));  // nothing beyond the last lane's element is touched
    Value* v = tag(b_.CreateAlignedLoad(vec(type, lanes), b_.CreateConstGEP1_64(type, first, from), align), in.buf, true);
    llvm::SmallVector<int, 64> pick(lanes, llvm::PoisonMaskElem);
    for (int l = 0; l < lanes; ++l) {
      const int64_t e = step * (stride < 0 ? lanes - 1 - l : l);
      if (e >= at && e < at + lanes) pick[l] = int(e - from) + (r ? lanes : 0);
      if (r && e < at) pick[l] = l;
    }
    r = r ? b_.CreateShuffleVector(r, v, pick) : b_.CreateShuffleVector(v, pick);
  }
  return r;
}

// A load whose address varies by lane; lanes outside `mask` (null: none) yield anything.
Value* KernelEmitter::load_one(const Instr& in, int u, Value* mask, Value*) {
  DType storage = k_.buffers[in.buf].dtype;
  auto* type = storage_llvm(storage);
  auto* vtype = vec(type, block_.lanes);
  llvm::Align align(std::max<size_t>(size_of(storage), 1));
  auto aff = sym::affine_in(in.at, block_.var);
  bool contiguous = aff && aff->first.is(1) && !varies(aff->second);
  if (contiguous && !mask) return widen(tag(b_.CreateAlignedLoad(vtype, element_pointer(in, u), align), in.buf, true), storage);
  if (contiguous && t_.masked_access(size_of(storage)))
    return widen(tag(b_.CreateMaskedLoad(vtype, element_pointer(in, u), align, mask, Constant::getNullValue(vtype)), in.buf, true), storage);
  if (!mask && read_only_[in.buf] && aff && !varies(aff->second) && aff->first.is_const() &&
      std::abs(aff->first.value()) <= (t_.avx512 ? block_.lanes : 4) && aff->first.value() != 0)
    return widen(load_strided(in, u, aff->first.value()), storage);
  Value* ptrs = lane_pointers(in, u);
  if (mask && !t_.native_gather(size_of(storage))) {
    ptrs = b_.CreateSelect(mask, ptrs, b_.CreateVectorSplat(block_.lanes, dummy_pointer()));
    mask = nullptr;
  }
  return widen(tag(b_.CreateMaskedGather(vtype, ptrs, align, mask, Constant::getNullValue(vtype)), in.buf, true), storage);
}

Multi KernelEmitter::load(const Instr& in) {
  DType storage = k_.buffers[in.buf].dtype;
  bool masked = in.a >= 0;
  Multi r;
  if (varies(in.at)) {
    r.uniform = false;
    for (int u = 0; u < block_.unroll; ++u) {
      Value* user = masked ? get(in.a, u, true) : nullptr;
      Value* v = load_one(in, u, and_mask(user), nullptr);
      r.v.push_back(masked ? b_.CreateSelect(user, v, get(in.b, u, true)) : v);
    }
    return r;
  }
  llvm::Align align(std::max<size_t>(size_of(storage), 1));
  auto scalar = [&](Value* on) {
    Value* p = element_pointer(in, 0);
    if (on) p = b_.CreateSelect(on, p, dummy_pointer());
    auto* l = b_.CreateAlignedLoad(storage_llvm(storage), p, align);
    return widen(on ? l : tag(l, in.buf, true), storage);
  };
  if (!masked) {
    r.v.push_back(scalar(nullptr));
    return r;
  }
  Value* v = nullptr;
  const Multi& m = values_[in.a];
  if (m.uniform) v = scalar(m.v[0]);
  r.uniform = m.uniform && values_[in.b].uniform;
  for (int u = 0; u < (r.uniform ? 1 : block_.unroll); ++u) {
    if (r.uniform) {
      r.v.push_back(b_.CreateSelect(m.v[0], v, get(in.b, 0, false)));
    } else {
      Value* user = get(in.a, u, true);
      Value* x = m.uniform ? v : scalar(any(and_mask(user)));
      r.v.push_back(b_.CreateSelect(user, splat(x), get(in.b, u, true)));
    }
  }
  return r;
}

// Neighbouring bits are part of a word; others take a byte each.
Multi KernelEmitter::load_bit(const Instr& in) {
  auto *i8 = b_.getInt8Ty(), *i64t = b_.getInt64Ty();
  auto byte_of = [&](Value* bit) { return b_.CreateGEP(i8, buffers_[in.buf], b_.CreateAShr(bit, ConstantInt::get(bit->getType(), 3))); };
  auto shift_of = [&](Value* bit, llvm::Type* word) { return b_.CreateZExtOrTrunc(b_.CreateAnd(bit, ConstantInt::get(bit->getType(), 7)), word); };
  auto word = [&](Value* bit, int n) {  // n of at most 32: with those before the first in its byte, they are in one word
    auto* type = b_.getIntNTy(n <= 8 ? 16 : n <= 24 ? 32 : 64);
    Value* raw = tag(b_.CreateAlignedLoad(type, byte_of(bit), llvm::Align(1)), in.buf, true);
    return b_.CreateBitCast(b_.CreateTrunc(b_.CreateLShr(raw, shift_of(bit, type)), b_.getIntNTy(n)), vec(b_.getInt1Ty(), n));
  };
  const bool vary = varies(in.at);
  const auto aff = vary ? sym::affine_in(in.at, block_.var) : std::nullopt;
  const bool neighbours = aff && in.a < 0 && aff->first.is(1) && !varies(aff->second);
  Multi r;
  r.uniform = !vary && (in.a < 0 || (values_[in.a].uniform && values_[in.b].uniform));
  for (int u = 0; u < (r.uniform ? 1 : block_.unroll); ++u) {
    if (neighbours) {
      Value* first = scalar_index(in.at, u);
      if (block_.lanes <= 32) {
        r.v.push_back(word(first, block_.lanes));
        continue;
      }
      llvm::SmallVector<int, 64> both(block_.lanes);
      std::iota(both.begin(), both.end(), 0);
      r.v.push_back(b_.CreateShuffleVector(word(first, 32), word(b_.CreateAdd(first, i64(32)), block_.lanes - 32), both));
      continue;
    }
    Value* user = in.a < 0 ? nullptr : get(in.a, u, !r.uniform);
    Value* on = r.uniform ? user : and_mask(user);
    Value* bit = vary ? vector_index(in.at, u, i64t) : scalar_index(in.at, u);
    Value *p = byte_of(bit), *raw;
    if (vary) {
      if (on) p = b_.CreateSelect(on, p, b_.CreateVectorSplat(block_.lanes, dummy_pointer()));
      auto* bytes = vec(i8, block_.lanes);
      raw = b_.CreateMaskedGather(bytes, p, llvm::Align(1), nullptr, Constant::getNullValue(bytes));
    } else {
      if (on) p = b_.CreateSelect(on->getType()->isVectorTy() ? any(on) : on, p, dummy_pointer());
      raw = b_.CreateAlignedLoad(i8, p, llvm::Align(1));
    }
    Value* v = b_.CreateTrunc(b_.CreateLShr(raw, shift_of(bit, raw->getType())), vec(b_.getInt1Ty(), value_lanes(raw)));
    if (!vary && !r.uniform) v = splat(v);
    r.v.push_back(user ? b_.CreateSelect(user, v, get(in.b, u, !r.uniform)) : v);
  }
  return r;
}

// A whole vector to neighbouring elements.
void KernelEmitter::store_vector(Value* v, Value* p, uint32_t buf) {
  const size_t element = std::max<size_t>(size_of(k_.buffers[buf].dtype), 1), bytes = element * value_lanes(v);
  auto plain = [&] { tag(b_.CreateAlignedStore(v, p, llvm::Align(element)), buf, false); };
  if (!streams_[buf] || bytes < 16) return plain();
  auto *past = BasicBlock::Create(cx_, "past_cache", fn_), *through = BasicBlock::Create(cx_, "through_cache", fn_),
       *done = BasicBlock::Create(cx_, "stored", fn_);
  Value* odd = b_.CreateAnd(b_.CreatePtrToInt(p, b_.getInt64Ty()), i64(int64_t(bytes) - 1));
  b_.CreateCondBr(b_.CreateICmpEQ(odd, i64(0)), past, through);
  b_.SetInsertPoint(past);
  auto* st = tag(b_.CreateAlignedStore(v, p, llvm::Align(bytes)), buf, false);
  st->setMetadata(llvm::LLVMContext::MD_nontemporal, llvm::MDNode::get(cx_, llvm::ConstantAsMetadata::get(b_.getInt32(1))));
  b_.CreateBr(done);
  b_.SetInsertPoint(through);
  plain();
  b_.CreateBr(done);
  b_.SetInsertPoint(done);
}

void KernelEmitter::store(const Instr& in) {
  DType storage = k_.buffers[in.buf].dtype;
  llvm::Align align(std::max<size_t>(size_of(storage), 1));
  bool masked = in.b >= 0;
  if (block_.lanes == 1) {
    Value* p = element_pointer(in, 0);
    if (masked) {
      // the address may be the dummy's, so no alias facts
      b_.CreateAlignedStore(narrow(get(in.a, 0, false), storage), b_.CreateSelect(get(in.b, 0, false), p, dummy_pointer()), align);
    } else {
      tag(b_.CreateAlignedStore(narrow(get(in.a, 0, false), storage), p, align), in.buf, false);
    }
    return;
  }
  auto aff = sym::affine_in(in.at, block_.var);
  bool contiguous = varies(in.at) && aff && aff->first.is(1) && !varies(aff->second);
  if (!varies(in.at) && !masked && values_[in.a].uniform) {
    tag(b_.CreateAlignedStore(narrow(get(in.a, 0, false), storage), element_pointer(in, 0), align), in.buf, false);
    return;
  }
  for (int u = 0; u < block_.unroll; ++u) {
    Value* mask = and_mask(masked ? get(in.b, u, true) : nullptr);
    Value* v = values_[in.a].uniform ? splat(narrow(get(in.a, 0, false), storage)) : narrow(get(in.a, u, true), storage);
    if (contiguous && !mask) {
      store_vector(v, element_pointer(in, u), in.buf);
    } else if (contiguous && t_.masked_access(size_of(storage))) {
      tag(b_.CreateMaskedStore(v, element_pointer(in, u), align, mask), in.buf, false);
    } else if (!mask && aff && !varies(aff->first) && !varies(aff->second)) {  // a store a lane is quicker than a scatter
      Value* p = b_.CreateGEP(storage_llvm(storage), buffers_[in.buf], scalar_index(in.at, u));
      Value* stride = scalar_index(aff->first, u);
      for (int l = 0; l < block_.lanes; ++l)
        tag(b_.CreateAlignedStore(b_.CreateExtractElement(v, uint64_t(l)), b_.CreateGEP(storage_llvm(storage), p, b_.CreateMul(stride, i64(l))),
                                  align),
            in.buf, false);
    } else {
      Value* ptrs = lane_pointers(in, u);
      if (mask && !(t_.avx512 && size_of(storage) >= 4)) {
        ptrs = b_.CreateSelect(mask, ptrs, b_.CreateVectorSplat(block_.lanes, dummy_pointer()));
        mask = nullptr;
        b_.CreateMaskedScatter(v, ptrs, align);
      } else {
        tag(b_.CreateMaskedScatter(v, ptrs, align, mask), in.buf, false);
      }
    }
  }
}

void KernelEmitter::store_add(const Instr& in) {
  DType storage = k_.buffers[in.buf].dtype;
  auto order = llvm::AtomicOrdering::Monotonic;
  llvm::Align align(std::max<size_t>(size_of(storage), 1));
  auto add = [&](Value* p, Value* v) {
    if (k_.serial) {
      Value* old = widen(b_.CreateAlignedLoad(storage_llvm(storage), p, align), storage);
      Value* sum = storage == DType::Bool ? b_.CreateOr(old, v) : v->getType()->isFPOrFPVectorTy() ? b_.CreateFAdd(old, v) : b_.CreateAdd(old, v);
      b_.CreateAlignedStore(narrow(sum, storage), p, align);
      return;
    }
    if (storage == DType::F16 || storage == DType::BF16) {
      auto* i16 = b_.getInt16Ty();
      Value* seen = b_.CreateAlignedLoad(i16, p, align);
      auto* before = b_.GetInsertBlock();
      auto* loop = llvm::BasicBlock::Create(cx_, "retry", fn_);
      auto* done = llvm::BasicBlock::Create(cx_, "added", fn_);
      b_.CreateBr(loop);
      b_.SetInsertPoint(loop);
      auto* old = b_.CreatePHI(i16, 2);
      old->addIncoming(seen, before);
      Value* raw = storage == DType::F16 ? b_.CreateBitCast(old, b_.getHalfTy()) : static_cast<Value*>(old);
      Value* sum = b_.CreateBitCast(narrow(b_.CreateFAdd(widen(raw, storage), v), storage), i16);
      Value* pair = b_.CreateAtomicCmpXchg(p, old, sum, align, order, order);
      old->addIncoming(b_.CreateExtractValue(pair, 0), loop);
      b_.CreateCondBr(b_.CreateExtractValue(pair, 1), done, loop);
      b_.SetInsertPoint(done);
    } else if (storage == DType::Bool) {
      b_.CreateAtomicRMW(llvm::AtomicRMWInst::Or, p, narrow(v, storage), align, order);
    } else {
      b_.CreateAtomicRMW(is_float(storage) ? llvm::AtomicRMWInst::FAdd : llvm::AtomicRMWInst::Add, p, v, align, order);
    }
  };
  bool masked = in.b >= 0;
  if (block_.lanes == 1) {
    auto act = [&] { add(element_pointer(in, 0), get(in.a, 0, false)); };
    masked ? if_then(get(in.b, 0, false), act) : act();
    return;
  }
  // Lanes that are neighbours in memory cannot collide with each other.
  auto aff = sym::affine_in(in.at, block_.var);
  if (k_.serial && varies(in.at) && aff && aff->first.is(1) && !varies(aff->second) && storage != DType::Bool && t_.masked_access(size_of(storage))) {
    auto* type = vec(storage_llvm(storage), block_.lanes);
    for (int u = 0; u < block_.unroll; ++u) {
      Value *mask = and_mask(masked ? get(in.b, u, true) : nullptr), *p = element_pointer(in, u);
      Value* old =
          mask ? static_cast<Value*>(b_.CreateMaskedLoad(type, p, align, mask, Constant::getNullValue(type))) : b_.CreateAlignedLoad(type, p, align);
      Value *x = widen(old, storage), *v = get(in.a, u, true);
      Value* sum = narrow(is_float(storage) ? b_.CreateFAdd(x, v) : b_.CreateAdd(x, v), storage);
      mask ? static_cast<void>(b_.CreateMaskedStore(sum, p, align, mask)) : static_cast<void>(b_.CreateAlignedStore(sum, p, align));
    }
    return;
  }
  auto* i8 = b_.getInt8Ty();
  for (int u = 0; u < block_.unroll; ++u) {
    // lanes one by one, in a loop to keep the code small
    Value* mask = and_mask(masked ? get(in.b, u, true) : nullptr);
    Value *ptrs = lane_pointers(in, u), *v = get(in.a, u, true);
    auto* element = v->getType()->getScalarType();
    if (element->isIntegerTy(1)) {
      element = i8;
      v = b_.CreateZExt(v, vec(i8, block_.lanes));
    }
    auto *ps = make_slot(ptrs->getType(), "ptrs"), *vs = make_slot(v->getType(), "addends"), *ms = make_slot(vec(i8, block_.lanes), "on");
    b_.CreateStore(ptrs, ps);
    b_.CreateStore(v, vs);
    if (mask) b_.CreateStore(b_.CreateZExt(mask, vec(i8, block_.lanes)), ms);
    for_loop(i64(0), i64(block_.lanes), i64(1), [&](Value* l) {
      auto act = [&] {
        Value* x = b_.CreateLoad(element, b_.CreateGEP(element, vs, l));
        if (storage == DType::Bool) x = b_.CreateICmpNE(x, b_.getInt8(0));
        add(b_.CreateLoad(b_.getPtrTy(), b_.CreateGEP(b_.getPtrTy(), ps, l)), x);
      };
      if (mask)
        if_then(b_.CreateICmpNE(b_.CreateLoad(i8, b_.CreateGEP(i8, ms, l)), b_.getInt8(0)), act);
      else
        act();
    });
  }
}

}  // namespace vitrify::codegen::x86
