// Accumulators: identities, updates by block, combination of vectors and lanes.
#include <limits>

#include "codegen/llvm/emitter.h"

namespace vitrify::codegen::x86 {

using llvm::Constant;
using llvm::ConstantFP;
using llvm::ConstantInt;
using loop::Accum;
using loop::AccumKind;

namespace {
bool is_unsigned(DType t) { return t == DType::U8 || t == DType::Bool; }

llvm::Type* slot_type(Value* slot) { return llvm::cast<llvm::AllocaInst>(slot)->getAllocatedType(); }

Constant* extreme(llvm::Type* type, DType t, bool lowest) {
  if (is_float(t)) return ConstantFP::getInfinity(type, lowest);
  int bits = type->getScalarSizeInBits();
  llvm::APInt v = is_unsigned(t) ? (lowest ? llvm::APInt::getMinValue(bits) : llvm::APInt::getMaxValue(bits))
                                 : (lowest ? llvm::APInt::getSignedMinValue(bits) : llvm::APInt::getSignedMaxValue(bits));
  return ConstantInt::get(type, v);
}
}  // namespace

// Long f32 sums and moments are added up in two levels, short runs in f32 and their sums in f64: the error does not grow with the length.
bool KernelEmitter::wants_two_level(const loop::Stage& s) {
  for (auto& a : s.accums)
    if ((a.kind == AccumKind::Sum || loop::is_moments(a.kind)) && a.type == DType::F32) return true;
  return false;
}

// Component types and start values of one accumulator.
std::vector<Value*> KernelEmitter::identity(const Accum& a, int lanes) {
  auto* type = vec(compute_llvm(a.type), lanes);
  auto* zero = Constant::getNullValue(type);
  auto* one = is_float(a.type) ? ConstantFP::get(type, 1.0) : static_cast<Constant*>(ConstantInt::get(type, 1));
  switch (a.kind) {
    case AccumKind::Sum:
      return {zero};
    case AccumKind::Prod:
      return {one};
    case AccumKind::Min:
      return {extreme(type, a.type, false)};
    case AccumKind::Max:
      return {extreme(type, a.type, true)};
    case AccumKind::Any:
      return {ConstantInt::getFalse(vec(b_.getInt1Ty(), lanes))};
    case AccumKind::All:
      return {ConstantInt::getTrue(vec(b_.getInt1Ty(), lanes))};
    case AccumKind::ArgMin:
    case AccumKind::ArgMax:
      return {extreme(type, a.type, a.kind == AccumKind::ArgMax), ConstantInt::get(vec(b_.getInt64Ty(), lanes), std::numeric_limits<int64_t>::max())};
    case AccumKind::Welford:
    case AccumKind::Moments:
      return {zero, zero, zero};
  }
  VT_UNREACHABLE();
}

AccSet KernelEmitter::make_accs(const loop::Stage& s, int lanes, int unroll, bool two_level, bool masked) {
  AccSet set;
  set.masked = masked;
  set.lanes = lanes;
  set.unroll = unroll;
  for (size_t n = 0; n < s.accums.size(); ++n) {
    auto& a = s.accums[n];
    auto start = identity(a, lanes);
    bool shared_count = loop::is_moments(a.kind) && !masked;
    for (auto& i : s.body) shared_count &= !(i.op == Op::reduce && size_t(i.iimm) == n && i.c >= 0);
    auto fresh = [&] {
      AccState st;
      for (auto* v : start) st.push_back(shared_count && st.size() == 2 ? nullptr : make_slot(v->getType(), "acc"));
      return st;
    };
    auto& slots = set.slots.emplace_back();
    auto& totals = set.totals.emplace_back();
    for (int u = 0; u < unroll; ++u) {
      slots.push_back(fresh());
      if (two_level && a.kind == AccumKind::Sum && a.type == DType::F32) totals.push_back({make_slot(vec(b_.getDoubleTy(), lanes), "total")});
    }
    // every lane of every vector has seen as many elements: one scalar counts them
    if (shared_count) {
      auto* count = make_slot(compute_llvm(a.type), "count");
      for (auto& st : slots) st[2] = count;
      if (two_level && a.type == DType::F32) {
        auto* wide = vec(b_.getDoubleTy(), lanes);
        auto* counts = make_slot(b_.getDoubleTy(), "count");
        for (int u = 0; u < unroll; ++u) totals.push_back({make_slot(wide, "total"), make_slot(wide, "total"), counts});
      }
    }
  }
  return set;
}

void KernelEmitter::reset(const loop::Stage& s, AccSet& set) {
  for (size_t a = 0; a < s.accums.size(); ++a) {
    auto start = identity(s.accums[a], set.lanes);
    for (auto* group : {&set.slots[a], &set.totals[a]})
      for (auto& st : *group)
        for (size_t c = 0; c < st.size(); ++c)
          b_.CreateStore(slot_type(st[c]) == start[c]->getType() ? start[c] : Constant::getNullValue(slot_type(st[c])), st[c]);
  }
}

// The moments of both levels of vector u as one: mean, squares, count.
AccState KernelEmitter::join_moments(AccSet& set, size_t a, size_t u) {
  auto* wide = vec(b_.getDoubleTy(), set.lanes);
  const AccState &part = set.slots[a][u], &total = set.totals[a][u];
  auto load = [&](Value* slot) { return b_.CreateLoad(slot_type(slot), slot); };
  Value *before = load(total[2]), *more = b_.CreateFPExt(load(part[2]), b_.getDoubleTy()), *n = b_.CreateFAdd(before, more);
  Value* none = b_.CreateFCmpOEQ(more, Constant::getNullValue(more->getType()));
  Value* share = b_.CreateSelect(none, more, b_.CreateFDiv(more, n));
  auto spread = [&](Value* v) { return set.lanes > 1 ? b_.CreateVectorSplat(set.lanes, v) : v; };
  Value *mean = load(total[0]), *m2 = load(total[1]);
  Value* delta = b_.CreateFSub(b_.CreateFPExt(load(part[0]), wide), mean);
  Value* square = b_.CreateFMul(b_.CreateFMul(delta, delta), spread(b_.CreateFMul(before, share)));
  return {b_.CreateSelect(none, mean, b_.CreateFAdd(mean, b_.CreateFMul(delta, spread(share)))),
          b_.CreateSelect(none, m2, b_.CreateFAdd(m2, b_.CreateFAdd(b_.CreateFPExt(load(part[1]), wide), square))), n};
}

void KernelEmitter::flush(const loop::Stage& s, AccSet& set) {
  constexpr double kFew = 32;  // of moments: not worth joining yet
  for (size_t a = 0; a < s.accums.size(); ++a) {
    if (loop::is_moments(s.accums[a].kind) && !set.totals[a].empty()) {
      Value* count = set.slots[a][0][2];
      auto* few = ConstantFP::get(slot_type(count), kFew);
      if_then(b_.CreateFCmpOGE(b_.CreateLoad(slot_type(count), count), few), [&] {
        Value* n = nullptr;
        for (size_t u = 0; u < set.totals[a].size(); ++u) {
          AccState& total = set.totals[a][u];
          const AccState joined = join_moments(set, a, u);
          for (size_t c : {0, 1}) {
            b_.CreateStore(joined[c], total[c]);
            b_.CreateStore(Constant::getNullValue(slot_type(set.slots[a][u][c])), set.slots[a][u][c]);
          }
          n = joined[2];
        }
        b_.CreateStore(n, set.totals[a][0][2]);
        b_.CreateStore(Constant::getNullValue(slot_type(count)), count);
      });
      continue;
    }
    for (size_t u = 0; u < set.totals[a].size(); ++u) {
      auto *type = vec(b_.getFloatTy(), set.lanes), *wide = vec(b_.getDoubleTy(), set.lanes);
      Value *part = set.slots[a][u][0], *total = set.totals[a][u][0];
      b_.CreateStore(b_.CreateFAdd(b_.CreateLoad(wide, total), b_.CreateFPExt(b_.CreateLoad(type, part), wide)), total);
      b_.CreateStore(Constant::getNullValue(type), part);
    }
  }
}

AccState KernelEmitter::read(const Accum& acc, AccSet& set, size_t a, int u) {
  auto start = identity(acc, set.lanes);
  AccState st;
  for (size_t c = 0; c < start.size(); ++c) {
    Value* slot = set.slots[a][u][c];
    Value* v = b_.CreateLoad(slot_type(slot), slot);
    st.push_back(v->getType() == start[c]->getType() ? v : b_.CreateVectorSplat(set.lanes, v));
  }
  if (!set.totals[a].empty() && loop::is_moments(acc.kind)) {
    const AccState joined = join_moments(set, a, static_cast<size_t>(u));
    for (size_t c : {0, 1}) st[c] = b_.CreateFPTrunc(joined[c], st[c]->getType());
    Value* n = b_.CreateFPTrunc(joined[2], compute_llvm(acc.type));
    st[2] = set.lanes > 1 ? b_.CreateVectorSplat(set.lanes, n) : n;
  } else if (!set.totals[a].empty()) {
    auto* wide = vec(b_.getDoubleTy(), set.lanes);
    st[0] = b_.CreateFPTrunc(b_.CreateFAdd(b_.CreateLoad(wide, set.totals[a][u][0]), b_.CreateFPExt(st[0], wide)), st[0]->getType());
  }
  return st;
}

AccState KernelEmitter::combine(const Accum& acc, const AccState& x, const AccState& y) {
  bool f = is_float(acc.type), is_bool = acc.type == DType::Bool;
  Value *a = x[0], *b = y[0];
  switch (acc.kind) {
    case AccumKind::Sum:
      return {f ? b_.CreateFAdd(a, b) : is_bool ? b_.CreateOr(a, b) : b_.CreateAdd(a, b)};
    case AccumKind::Prod:
      return {f ? b_.CreateFMul(a, b) : is_bool ? b_.CreateAnd(a, b) : b_.CreateMul(a, b)};
    case AccumKind::Any:
      return {b_.CreateOr(a, b)};
    case AccumKind::All:
      return {b_.CreateAnd(a, b)};
    case AccumKind::Min:
    case AccumKind::Max: {
      bool is_max = acc.kind == AccumKind::Max;
      if (f) return {float_max(a, b, is_max)};
      return {b_.CreateSelect(compare(is_max ? Op::gt : Op::lt, acc.type, a, b), a, b)};
    }
    case AccumKind::ArgMin:
    case AccumKind::ArgMax: {
      bool is_max = acc.kind == AccumKind::ArgMax;
      Value* better = compare(is_max ? Op::gt : Op::lt, acc.type, a, b);
      Value* equal = compare(Op::eq, acc.type, a, b);
      if (f) {
        Value *an = b_.CreateFCmpUNO(a, a), *bn = b_.CreateFCmpUNO(b, b);
        better = b_.CreateOr(better, b_.CreateAnd(an, b_.CreateNot(bn)));
        equal = b_.CreateOr(equal, b_.CreateAnd(an, bn));
      }
      Value* take = b_.CreateOr(better, b_.CreateAnd(equal, b_.CreateICmpSLT(x[1], y[1])));
      return {b_.CreateSelect(take, a, b), b_.CreateSelect(take, x[1], y[1])};
    }
    case AccumKind::Welford:
    case AccumKind::Moments: {
      Value* n = b_.CreateFAdd(x[2], y[2]);
      Value* zero = Constant::getNullValue(n->getType());
      Value* share = b_.CreateSelect(b_.CreateFCmpOEQ(n, zero), zero, b_.CreateFDiv(y[2], n));
      Value* delta = b_.CreateFSub(b, a);
      Value* mean = fma(delta, share, a);
      Value* m2 = fma(b_.CreateFMul(delta, b_.CreateFMul(x[2], share)), delta, b_.CreateFAdd(x[1], y[1]));
      // a side without elements adds nothing, whatever the other holds (inf - 0 would make NaN)
      Value *no_x = b_.CreateFCmpOEQ(x[2], zero), *no_y = b_.CreateFCmpOEQ(y[2], zero);
      mean = b_.CreateSelect(no_x, b, b_.CreateSelect(no_y, a, mean));
      m2 = b_.CreateSelect(no_x, y[1], b_.CreateSelect(no_y, x[1], m2));
      return {mean, m2, n};
    }
  }
  VT_UNREACHABLE();
}

void KernelEmitter::update(const loop::Stage& s, AccSet& set, const Instr& in) {
  size_t n = size_t(in.iimm);
  const Accum& acc = s.accums[n];
  bool wide = set.lanes > 1;
  auto start = identity(acc, set.lanes);
  Value *count = nullptr, *share = nullptr;  // of Welford, when common to all vectors
  if (loop::is_moments(acc.kind) && slot_type(set.slots[n][0][2]) == compute_llvm(acc.type) && in.c < 0 && !set.masked) {
    auto* slot = set.slots[n][0][2];
    auto* one = ConstantFP::get(compute_llvm(acc.type), 1.0);
    count = b_.CreateFAdd(b_.CreateLoad(one->getType(), slot), one);
    b_.CreateStore(count, slot);
    share = b_.CreateFDiv(one, count);
    if (wide) share = b_.CreateVectorSplat(set.lanes, share);
  }
  for (int u = 0; u < set.unroll; ++u) {
    Value* v = get(in.a, u, wide);
    Value* mask = in.c >= 0 ? get(in.c, u, wide) : nullptr;
    if (set.masked && block_.mask) mask = mask ? b_.CreateAnd(mask, block_.mask) : block_.mask;
    auto& slots = set.slots[n][u];
    AccState old;
    for (size_t c = 0; c < start.size(); ++c) old.push_back(b_.CreateLoad(slot_type(slots[c]), slots[c]));
    AccState next;
    switch (acc.kind) {
      case AccumKind::Any:
      case AccumKind::All:
        next = combine(acc, {cast(v, types_[in.a], DType::Bool)}, old);
        break;
      case AccumKind::ArgMin:
      case AccumKind::ArgMax:
        next = combine(acc, {v, get(in.b, u, wide)}, old);
        break;
      case AccumKind::Welford:
      case AccumKind::Moments: {
        auto* one = ConstantFP::get(v->getType(), 1.0);
        Value* own_count = count ? nullptr : b_.CreateFAdd(old[2], one);
        Value* delta = b_.CreateFSub(v, old[0]);
        Value* mean = fma(delta, count ? share : b_.CreateFDiv(one, own_count), old[0]);
        next = {mean, fma(delta, b_.CreateFSub(v, mean), old[1])};
        if (own_count) next.push_back(own_count);
        break;
      }
      default:
        next = in.b >= 0 ? AccState{fma(v, get(in.b, u, wide), old[0])} : combine(acc, {v}, old);
        break;
    }
    for (size_t c = 0; c < next.size(); ++c) b_.CreateStore(mask ? b_.CreateSelect(mask, next[c], old[c]) : next[c], slots[c]);
  }
}

AccState KernelEmitter::fold_lanes(const Accum& acc, AccState st) {
  int lanes = value_lanes(st[0]);
  while (lanes > 1) {
    llvm::SmallVector<int, 16> lo, hi;
    for (int l = 0; l < lanes / 2; ++l) {
      lo.push_back(l);
      hi.push_back(l + lanes / 2);
    }
    AccState a, b;
    for (Value* v : st) {
      a.push_back(b_.CreateShuffleVector(v, lo));
      b.push_back(b_.CreateShuffleVector(v, hi));
    }
    lanes /= 2;
    if (lanes == 1)
      for (auto* side : {&a, &b})
        for (auto& v : *side) v = b_.CreateExtractElement(v, uint64_t(0));
    st = combine(acc, a, b);
  }
  return st;
}

// Welford's mean turns to NaN after an infinity, and where numbers lie too far apart: then the sum says what it is, as eager's does.
void KernelEmitter::sum_again(const loop::Stage& s, size_t a, std::vector<AccState>& states) {
  if (s.accums[a].kind != AccumKind::Moments) return;
  auto finite = [&](Value* v) { return b_.CreateFCmpONE(b_.CreateUnaryIntrinsic(llvm::Intrinsic::fabs, v), ConstantFP::getInfinity(v->getType())); };
  Value* odd = b_.getFalse();
  std::vector<Value*> sums, slots;
  for (AccState& st : states) {
    odd = b_.CreateOr(odd, any(b_.CreateNot(finite(st[0]))));
    auto* wide = vec(b_.getDoubleTy(), value_lanes(st[0]));
    sums.push_back(make_slot(wide, "sum"));
    for (size_t c : {0, 1}) {
      slots.push_back(make_slot(st[c]->getType(), "moment"));
      b_.CreateStore(st[c], slots.back());
    }
  }
  if_then(odd, [&] {
    const Block block = block_;
    const auto values = values_;
    const auto symbols = symbols_;
    for (Value* sum : sums) b_.CreateStore(Constant::getNullValue(slot_type(sum)), sum);
    Value* count = ConstantFP::get(b_.getDoubleTy(), 1.0);
    for (auto& l : s.inner) count = b_.CreateFMul(count, b_.CreateSIToFP(scalar_index(l.extent, 0), b_.getDoubleTy()));
    nest(s.inner.data(), static_cast<int>(s.inner.size()), [&] {
      for (auto& in : s.body) {
        if (in.op != Op::reduce) {
          if (in.op != Op::store && in.op != Op::store_add) emit_instr(in, nullptr);
        } else if (static_cast<size_t>(in.iimm) == a) {
          for (size_t u = 0; u < sums.size(); ++u) {
            auto* wide = slot_type(sums[u]);
            Value *v = b_.CreateFPCast(get(in.a, static_cast<int>(u), block_.lanes > 1), wide), *old = b_.CreateLoad(wide, sums[u]);
            Value* next = b_.CreateFAdd(old, v);
            b_.CreateStore(in.c >= 0 ? b_.CreateSelect(get(in.c, static_cast<int>(u), block_.lanes > 1), next, old) : next, sums[u]);
          }
        }
      }
    });
    for (size_t u = 0; u < sums.size(); ++u) {
      auto* wide = slot_type(sums[u]);
      auto* type = states[u][0]->getType();
      Value* n = type->isVectorTy() ? b_.CreateVectorSplat(value_lanes(states[u][0]), count) : count;
      Value* mean = b_.CreateFPCast(b_.CreateFDiv(b_.CreateLoad(wide, sums[u]), n), type);
      Value* m2 = b_.CreateSelect(finite(mean), ConstantFP::getInfinity(type), ConstantFP::getNaN(type));
      Value* sound = finite(states[u][0]);
      b_.CreateStore(b_.CreateSelect(sound, states[u][0], mean), slots[2 * u]);
      b_.CreateStore(b_.CreateSelect(sound, states[u][1], m2), slots[2 * u + 1]);
    }
    block_ = block;
    values_ = values;
    symbols_ = symbols;
  });
  for (size_t u = 0; u < states.size(); ++u)
    for (size_t c : {0, 1}) states[u][c] = b_.CreateLoad(slot_type(slots[2 * u + c]), slots[2 * u + c]);
}

void KernelEmitter::publish(const Accum& acc, const std::vector<AccState>& states, bool uniform) {
  for (int r = 0; r < loop::num_results(acc.kind); ++r) {
    if (acc.results[r] < 0) continue;
    Multi m;
    m.uniform = uniform;
    for (auto& st : states) {
      Value* v = st[r];
      if ((acc.kind == AccumKind::ArgMin || acc.kind == AccumKind::ArgMax) && r == 1) {
        auto* none = ConstantInt::get(v->getType(), std::numeric_limits<int64_t>::max());
        v = b_.CreateSelect(b_.CreateICmpEQ(v, none), Constant::getNullValue(v->getType()), v);
      }
      m.v.push_back(v);
    }
    DType t = r == 1 && (acc.kind == AccumKind::ArgMin || acc.kind == AccumKind::ArgMax) ? DType::I64
              : acc.kind == AccumKind::Any || acc.kind == AccumKind::All                 ? DType::Bool
                                                                                         : acc.type;
    define(acc.results[r], t, m);
  }
}

}  // namespace vitrify::codegen::x86
