// The loops around the bodies: outer iterations, vector runs with tails, accumulator lifetimes.
#include <llvm/IR/IntrinsicsX86.h>
#include <llvm/IR/MDBuilder.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "codegen/llvm/emitter.h"
#include "sym/measure.h"

namespace vitrify::codegen::x86 {

using llvm::BasicBlock;
using llvm::ConstantInt;

namespace {
// A result this large leaves the caches before anyone reads it: storing past them saves reading each line first.
constexpr int64_t kStreamBytes = int64_t(32) << 20;

constexpr size_t kDivisions = 8;  // of an index, which are nothing beside the loads

constexpr size_t kInlinedMath = 16;  // functions of a kernel that are written out at each place; of more, each is one function that is called

// Elements of a row worth asking for early, of one that the first cache holds, of one that the second holds beside what else is there, and of a
// buffer that no cache holds.
constexpr int64_t kRowAhead = 256, kShortRow = 4096, kLongRow = 32768, kCached = int64_t(1) << 18;

std::optional<int64_t> const_of(Value* v) {
  if (auto* c = llvm::dyn_cast<ConstantInt>(v)) return c->getSExtValue();
  return {};
}
bool has_scratch(const loop::Kernel& k) {
  for (auto& b : k.buffers)
    if (b.kind == loop::BufferKind::Scratch) return true;
  return false;
}
}  // namespace

KernelEmitter::KernelEmitter(const loop::Kernel& k, llvm::Module& m, const Target& t, VectorMath::Resolve resolve, std::set<std::string>& symbols)
    : k_(k), m_(m), cx_(m.getContext()), t_(t), b_(cx_), math_(b_, m, t, resolve, symbols) {
  values_.resize(k.num_values);
  types_.resize(k.num_values, DType::F32);
  lanes_ = t.lanes;
  for (auto& s : k.stages)
    for (auto& i : s.body)
      if (i.type == DType::F64) lanes_ = t.lanes / 2;
  for (auto& l : k.outer) extents_[sym::view(l.var).symbol->id] = l.extent;
  for (auto& s : k.stages)
    for (auto& l : s.inner) extents_[sym::view(l.var).symbol->id] = l.extent;
  for (auto& [s, id] : k.indirect) indirect_[sym::view(s).symbol->id] = id;
  size_t calls = 0;
  for (auto& s : k.stages) calls += std::ranges::count_if(s.body, [](const Instr& i) { return VectorMath::is_math(i.op); });
  math_.share(calls > kInlinedMath);
}

llvm::AllocaInst* KernelEmitter::make_slot(llvm::Type* type, const char* name) {
  llvm::IRBuilder<> at(entry_, entry_->begin());
  return at.CreateAlloca(type, nullptr, name);
}

void KernelEmitter::prologue() {
  auto* invariant = llvm::MDNode::get(cx_, {});
  auto* ptr = b_.getPtrTy();
  Value *bufs = fn_->getArg(0), *sizes = fn_->getArg(1);
  auto argument = [&](Value* array, llvm::Type* type, size_t i) {
    auto* l = b_.CreateAlignedLoad(type, b_.CreateConstInBoundsGEP1_64(type, array, i), llvm::Align(8));
    l->setMetadata(llvm::LLVMContext::MD_invariant_load, invariant);
    return l;
  };
  for (size_t i = 0; i < k_.sizes.size(); ++i) symbols_[sym::view(k_.sizes[i]).symbol->id] = argument(sizes, b_.getInt64Ty(), i);
  size_t next = 0;
  buffers_.resize(k_.buffers.size());
  for (size_t i = 0; i < k_.buffers.size(); ++i)
    if (k_.buffers[i].kind != loop::BufferKind::Scratch) buffers_[i] = argument(bufs, ptr, next++);
  if (k_.may_fault) fault_ = argument(bufs, ptr, next++);
  if (has_scratch(k_)) {
    // same layout as loop::scratch_bytes: each buffer rounded up to 64 bytes
    Value* p = argument(bufs, ptr, next++);
    for (size_t i = 0; i < k_.buffers.size(); ++i) {
      if (k_.buffers[i].kind != loop::BufferKind::Scratch) continue;
      buffers_[i] = p;
      Value* bytes = b_.CreateMul(scalar_index(k_.buffers[i].extent, 0), i64(size_of(k_.buffers[i].dtype)));
      bytes = b_.CreateAnd(b_.CreateAdd(bytes, i64(63)), i64(~int64_t(63)));
      p = b_.CreateInBoundsGEP(b_.getInt8Ty(), p, bytes);
    }
  }
  llvm::MDBuilder md(cx_);
  auto* domain = md.createAnonymousAliasScopeDomain(fn_->getName());
  size_t n = k_.buffers.size();
  std::vector<llvm::Metadata*> scopes(n);
  for (size_t i = 0; i < n; ++i) scopes[i] = md.createAnonymousAliasScope(domain);
  scope_.resize(n);
  noalias_.resize(n);
  read_only_.resize(n);
  streams_.resize(n);
  auto root = [&](size_t i) { return k_.buffers[i].inplace_of >= 0 ? size_t(k_.buffers[i].inplace_of) : i; };
  for (size_t i = 0; i < n; ++i) {
    std::vector<llvm::Metadata*> others;
    const auto& b = k_.buffers[i];
    read_only_[i] = b.kind == loop::BufferKind::In;
    streams_[i] =
        b.kind == loop::BufferKind::Out && b.inplace_of < 0 && b.extent.is_const() && b.extent.value() * int64_t(size_of(b.dtype)) >= kStreamBytes;
    for (size_t j = 0; j < n; ++j) {
      bool in_in = k_.buffers[i].kind == loop::BufferKind::In && k_.buffers[j].kind == loop::BufferKind::In;
      if (root(i) != root(j) && !in_in) others.push_back(scopes[j]);
      if (j != i && root(i) == root(j)) read_only_[i] = false;
    }
    scope_[i] = llvm::MDNode::get(cx_, {scopes[i]});
    noalias_[i] = llvm::MDNode::get(cx_, others);
  }
}

void set_target(llvm::Function& f, const Target& t) {
  f.addFnAttr(llvm::Attribute::NoUnwind);
  f.addFnAttr("target-cpu", t.cpu);
  f.addFnAttr("target-features", t.features);
  if (t.avx512) {
    f.addFnAttr("prefer-vector-width", "512");
    f.addFnAttr("min-legal-vector-width", "512");
  }
}

void KernelEmitter::emit(const std::string& symbol) {
  auto* i64t = b_.getInt64Ty();
  auto* ptr = b_.getPtrTy();
  auto* type = llvm::FunctionType::get(b_.getVoidTy(), {ptr, ptr, i64t, i64t}, false);
  fn_ = llvm::Function::Create(type, llvm::Function::ExternalLinkage, symbol, m_);
  set_target(*fn_, t_);
  for (int i : {0, 1}) {
    fn_->addParamAttr(i, llvm::Attribute::NoAlias);
    fn_->addParamAttr(i, llvm::Attribute::NoUndef);
  }
  entry_ = BasicBlock::Create(cx_, "entry", fn_);
  auto* start = BasicBlock::Create(cx_, "start", fn_);
  b_.SetInsertPoint(start);
  prologue();
  bool any_inner = false;
  for (auto& s : k_.stages) any_inner |= !s.inner.empty();
  if (k_.outer.empty()) {
    auto& inner = k_.stages.at(0).inner;
    if (k_.vector_axis == loop::VectorAxis::None) lanes_ = 1;
    emit_runs(inner.data(), inner.size(), true);
  } else if (k_.vector_axis == loop::VectorAxis::Outer || (!any_inner && k_.vector_axis == loop::VectorAxis::Inner)) {
    // scratch holds one outer iteration, so several of them cannot run side by side
    if (has_scratch(k_)) lanes_ = 1;
    emit_runs(k_.outer.data(), k_.outer.size(), false);
  } else if (k_.vector_axis == loop::VectorAxis::Tile) {
    emit_tiles();
  } else {
    if (k_.vector_axis == loop::VectorAxis::None) lanes_ = 1;
    emit_rows();
  }
  if (std::find(streams_.begin(), streams_.end(), true) != streams_.end()) b_.CreateIntrinsic(llvm::Intrinsic::x86_sse_sfence, {}, {});
  b_.CreateRetVoid();
  b_.SetInsertPoint(entry_);
  b_.CreateBr(start);
}

void KernelEmitter::if_then(Value* cond, const Body& body) {
  auto* yes = BasicBlock::Create(cx_, "then", fn_);
  auto* done = BasicBlock::Create(cx_, "done", fn_);
  b_.CreateCondBr(cond, yes, done, llvm::MDBuilder(cx_).createUnlikelyBranchWeights());
  b_.SetInsertPoint(yes);
  body();
  b_.CreateBr(done);
  b_.SetInsertPoint(done);
}

void KernelEmitter::for_loop(Value* lo, Value* hi, Value* step, const std::function<void(Value*)>& body) {
  auto l = const_of(lo), h = const_of(hi), s = const_of(step);
  if (l && h && *l >= *h) return;
  if (l && h && s && *l + *s >= *h) return body(lo);
  auto* loop = BasicBlock::Create(cx_, "loop", fn_);
  auto* done = BasicBlock::Create(cx_, "end", fn_);
  auto* before = b_.GetInsertBlock();
  if (l && h)
    b_.CreateBr(loop);
  else
    b_.CreateCondBr(b_.CreateICmpSLT(lo, hi), loop, done);
  b_.SetInsertPoint(loop);
  auto* i = b_.CreatePHI(b_.getInt64Ty(), 2);
  i->addIncoming(lo, before);
  body(i);
  Value* next = b_.CreateNSWAdd(i, step);
  i->addIncoming(next, b_.GetInsertBlock());
  b_.CreateCondBr(b_.CreateICmpSLT(next, hi), loop, done);
  b_.SetInsertPoint(done);
}

void KernelEmitter::nest(const loop::Loop* loops, int n, const Body& body) {
  if (n == 0) return body();
  for_loop(i64(0), scalar_index(loops->extent, 0), i64(1), [&](Value* i) {
    symbols_[sym::view(loops->var).symbol->id] = i;
    nest(loops + 1, n - 1, body);
  });
}

void KernelEmitter::vector_run(Int var, Value* lo, Value* hi, int lanes, int unroll, const std::function<void(Phase)>& body, const Body& after_chunk,
                               int64_t chunk_steps) {
  uint32_t id = sym::view(var).symbol->id;
  auto scalar_loop = [&](Value* from, Phase phase) {
    for_loop(from, hi, i64(1), [&](Value* i) {
      block_ = {};
      symbols_[id] = i;
      body(phase);
    });
  };
  if (lanes == 1) {
    scalar_loop(lo, Phase::Main);
    return;
  }
  auto run = [&](Value* from, Value* to, int u, Phase phase, bool masked) {
    for_loop(from, to, i64(int64_t(lanes) * u), [&](Value* i) {
      block_ = {};
      block_.lanes = lanes;
      block_.unroll = u;
      block_.var = var;
      block_.base = i;
      if (masked) {
        llvm::SmallVector<llvm::Constant*, 16> iota;
        for (int l = 0; l < lanes; ++l) iota.push_back(b_.getInt32(l));
        Value* left = b_.CreateTrunc(b_.CreateSub(to, i), b_.getInt32Ty());
        block_.mask = b_.CreateICmpULT(llvm::ConstantVector::get(iota), b_.CreateVectorSplat(lanes, left));
      }
      body(phase);
    });
  };
  auto round_down = [&](int64_t step) { return b_.CreateAdd(lo, b_.CreateAnd(b_.CreateSub(hi, lo), i64(-step))); };
  int64_t step = int64_t(lanes) * unroll;
  // Blocks that no run has are not emitted, nor those whose elements the masked ones may take as well.
  const auto extent = extents_.find(id);
  const bool no_block = extent != extents_.end() && extent->second.is_const() && extent->second.value() < step;
  Value* main_end = no_block || (masked_only_ && t_.avx512) ? lo : round_down(step);
  auto cl = const_of(lo), ch = const_of(main_end);
  if (after_chunk && chunk_steps && !(cl && ch && *ch - *cl <= step * chunk_steps)) {
    for_loop(lo, main_end, i64(step * chunk_steps), [&](Value* c) {
      Value* end = b_.CreateBinaryIntrinsic(llvm::Intrinsic::smin, b_.CreateAdd(c, i64(step * chunk_steps)), main_end);
      run(c, end, unroll, Phase::Main, false);
      after_chunk();
    });
  } else {
    if (main_end != lo) run(lo, main_end, unroll, Phase::Main, false);
    if (after_chunk) after_chunk();
  }
  if (unroll > 4 && main_end != lo) {
    Value* end = round_down(int64_t(lanes) * 4);
    run(main_end, end, 4, Phase::Main, false);
    main_end = end;
  }
  if (t_.avx512) {
    run(main_end, hi, 1, Phase::Tail, true);
  } else {
    Value* middle_end = main_end;
    if (unroll > 1) {
      middle_end = round_down(lanes);
      run(main_end, middle_end, 1, Phase::Middle, false);
    }
    scalar_loop(middle_end, Phase::Tail);
  }
  block_ = {};
}

// Of few vectors, or of much code for each: a mask costs them nothing, and a second copy of the code takes as long to compile as the first.
bool KernelEmitter::masked_throughout(const loop::Loop* loops, int n) const {
  constexpr int64_t kVectors = 4;
  constexpr size_t kLongBody = 128;                                                       // instructions
  if (std::find(streams_.begin(), streams_.end(), true) != streams_.end()) return false;  // stores past the caches have no mask
  size_t instrs = 0;
  for (auto& s : k_.stages) instrs += std::ranges::count_if(s.body, [](const Instr& i) { return i.op != Op::constant; });
  Int elements = 1;
  for (int d = 0; d < n; ++d) elements = elements * loops[d].extent;
  return instrs >= kLongBody || (elements.is_const() && elements.value() <= kVectors * lanes_);
}

int KernelEmitter::choose_unroll(const std::vector<loop::Stage>& stages, bool reduction, Int lanes_along) const {
  int cost = 0;
  bool loops = false;
  for (auto& s : stages) loops = loops || !s.inner.empty();
  for (auto& s : stages) {
    if (loops && s.inner.empty()) continue;  // runs once where the loops run many times: their chains decide
    int c = 0;
    for (auto& i : s.body) {
      if (loop::is_load(i.op) || i.op == Op::store) {  // lanes apart from each other take a load or store each, more or less
        auto aff = sym::affine_in(i.at, lanes_along);
        c += aff && (aff->first.is(0) || aff->first.is(1)) ? 1 : 8;
        std::unordered_set<Int> divisions;  // and what else an index is made of beside sums and products, for each vector anew
        sym::divisions(i.at, divisions);
        if (divisions.size() > kDivisions) c += 2 * static_cast<int>(divisions.size());
      } else if (VectorMath::is_math(i.op))
        c += 12;
      else if (i.op == Op::div || i.op == Op::sqrt || i.op == Op::rsqrt || i.op == Op::reciprocal)
        c += 3;
      else if (i.op == Op::reduce && s.accums[i.iimm].kind >= loop::AccumKind::ArgMin)
        c += loop::is_moments(s.accums[i.iimm].kind) ? 8 : 4;
      else if (i.op != Op::constant)
        c += i.type == DType::I64 || i.type == DType::BF16 ? 2 : 1;
    }
    cost = std::max(cost, c);
  }
  if (reduction) return cost <= 10 ? 4 : cost <= 32 ? 2 : 1;
  return cost <= 6 ? 4 : cost <= 14 ? 2 : 1;
}

void KernelEmitter::emit_body(const loop::Stage& s, AccSet* accs) {
  for (auto& i : s.body) {
    if (i.op == Op::reduce)
      update(s, *accs, i);
    else
      emit_instr(i, accs);
  }
}

// What the first loop over a row reads from memory, to be asked for one row ahead while a later loop, which walks along the same, works in the
// caches.
std::vector<const Instr*> KernelEmitter::reads_of_rows(const loop::Stage& asks) const {
  std::vector<const Instr*> r;
  if (k_.outer.empty()) return r;
  auto first = std::find_if(k_.stages.begin(), k_.stages.end(), [](auto& s) { return !s.inner.empty(); });
  if (first == k_.stages.end() || first->inner.size() != 1) return r;
  const Int along = first->inner[0].var, row = k_.outer.back().var;
  if (asks.inner.back().var != along) return r;
  for (auto& i : first->body) {
    if (i.op != Op::load || i.a >= 0 || !read_only_[i.buf]) continue;
    const Int extent = k_.buffers[i.buf].extent;
    const auto near = sym::affine_in(i.at, along), far = sym::affine_in(i.at, row);
    const bool direct =
        near && far && near->first.is(1) && far->first.is_const() && far->first.value() >= kRowAhead && far->first.value() <= kLongRow;
    if (direct && (!extent.is_const() || extent.value() >= kCached)) r.push_back(&i);
  }
  return r;
}

void KernelEmitter::prefetch(Value* p, Near cache) {  // never faults, wherever p points
  b_.CreateIntrinsic(llvm::Intrinsic::prefetch, {b_.getPtrTy()}, {p, b_.getInt32(0), b_.getInt32(int(cache)), b_.getInt32(1)});
}

// What `loads` will read when `var` is `steps` further.
void KernelEmitter::prefetch_ahead(const std::vector<const Instr*>& loads, Int var, int64_t steps, Near near) {
  if (loads.empty()) return;
  Value*& at = symbols_.at(sym::view(var).symbol->id);
  Value* now = std::exchange(at, b_.CreateAdd(at, i64(steps)));
  for (const Instr* i : loads)
    for (int u = 0; u < block_.unroll; ++u) prefetch(element_pointer(*i, u), near);
  at = now;
}

// Columns are summed in short pieces of rows that lie pages apart: no hardware foresees the next.
void KernelEmitter::prefetch_column(const loop::Stage& s, int64_t rows_ahead) {
  if (block_.lanes == 1) return;
  const Int down = s.inner.back().var;
  std::vector<const Instr*> loads;
  for (auto& i : s.body) {
    if (i.op != Op::load || i.a >= 0 || !read_only_[i.buf]) continue;
    const auto near = sym::affine_in(i.at, block_.var), far = sym::affine_in(i.at, down);
    if (near && far && near->first.is(1) && !varies(near->second) && far->first.is_const() && far->first.value() >= 2 * kRowAhead)
      loads.push_back(&i);
  }
  prefetch_ahead(loads, down, rows_ahead);
}

void KernelEmitter::emit_rows() {
  if (const loop::Stage* lead = leads_last()) return emit_trailing_rows(*lead);
  int n = int(k_.outer.size());
  std::vector<Value*> extents(n), slots(n);
  Value *begin = fn_->getArg(2), *end = fn_->getArg(3);
  for (int d = 1; d < n; ++d) extents[d] = scalar_index(k_.outer[d].extent, 0);
  Value* rest = begin;
  for (int d = n - 1; d >= 1; --d) {
    slots[d] = make_slot(b_.getInt64Ty(), "coord");
    // an empty space has no iterations, but the division happens before the loop asks
    Value* e = b_.CreateBinaryIntrinsic(llvm::Intrinsic::smax, extents[d], i64(1));
    b_.CreateStore(b_.CreateURem(rest, e), slots[d]);
    rest = b_.CreateUDiv(rest, e);
  }
  if (n > 1) {
    slots[0] = make_slot(b_.getInt64Ty(), "coord");
    b_.CreateStore(rest, slots[0]);
  }
  for_loop(begin, end, i64(1), [&](Value* o) {
    for (int d = 0; d < n; ++d) symbols_[sym::view(k_.outer[d].var).symbol->id] = n == 1 ? o : b_.CreateLoad(b_.getInt64Ty(), slots[d]);
    emit_stages(k_.stages.size());
    Value* carry = i64(1);
    for (int d = n - 1; d >= 1; --d) {
      Value* c = b_.CreateAdd(b_.CreateLoad(b_.getInt64Ty(), slots[d]), carry);
      Value* wrap = b_.CreateICmpEQ(c, extents[d]);
      b_.CreateStore(b_.CreateSelect(wrap, i64(0), c), slots[d]);
      carry = b_.CreateZExt(wrap, b_.getInt64Ty());
    }
    if (n > 1) b_.CreateStore(b_.CreateAdd(b_.CreateLoad(b_.getInt64Ty(), slots[0]), carry), slots[0]);
  });
}

void KernelEmitter::emit_stages(size_t count, const loop::Stage* lead, const Trailing* trailing) {
  int loops = 0;
  for (size_t k = 0; k < count; ++k) {
    const loop::Stage& s = k_.stages[k];
    loops += !s.inner.empty();
    if (loops == 2 && !s.inner.empty()) ahead_ = reads_of_rows(s);
    if (&s == lead) trailing_ = trailing;
    emit_stage(s);
    ahead_ = {};
    trailing_ = nullptr;
  }
}

namespace {

// And no sums in f32 beside them.
bool has_only_moments(const loop::Stage& s) {
  const auto sums = [](const loop::Accum& a) { return a.kind == loop::AccumKind::Sum && a.type == DType::F32; };
  return std::ranges::any_of(s.accums, [](auto& a) { return loop::is_moments(a.kind); }) && std::ranges::none_of(s.accums, sums);
}

// So many elements are added up in f32 before their sum goes to those in f64. Equal ones are rounded the same way each time: of 64 the error is up to
// 9 eps, where eager's is 4.
int64_t run_in_f32(const loop::Stage& s) { return has_only_moments(s) ? 64 : 16; }

}  // namespace

void KernelEmitter::emit_stage(const loop::Stage& s) {
  block_ = {};
  if (s.inner.empty() && s.accums.empty()) return emit_body(s, nullptr);
  bool empty = s.inner.empty();
  int lanes = k_.vector_axis == loop::VectorAxis::None || empty ? 1 : lanes_;
  int unroll = lanes == 1 ? 1 : choose_unroll({s}, !s.accums.empty(), s.inner.back().var);
  Value* extent = empty ? i64(1) : scalar_index(s.inner.back().extent, 0);
  auto n = const_of(extent);
  while (n && unroll > 1 && *n < int64_t(lanes) * unroll) unroll /= 2;
  int64_t step = int64_t(lanes) * unroll;
  const int64_t chunk_size = run_in_f32(s);
  bool two_level = wants_two_level(s) && !(s.inner.size() == 1 && n && *n <= step * chunk_size);
  AccSet sets[3];
  bool used[3] = {!n || *n >= step, lanes > 1 && !t_.avx512 && unroll > 1 && (!n || (*n % step) >= lanes),
                  lanes > 1 && (!n || (t_.avx512 ? *n % step != 0 : *n % lanes != 0))};
  const size_t depth = s.inner.size();
  const bool many_rows = two_level && depth > 1;  // then the ends of rows are long sums too
  if (!s.accums.empty()) {
    sets[0] = make_accs(s, lanes, unroll, two_level);
    sets[1] = make_accs(s, lanes, 1, many_rows);
    sets[2] = make_accs(s, t_.avx512 ? lanes : 1, 1, many_rows, t_.avx512 && lanes > 1);
    for (int p = 0; p < 3; ++p)
      if (used[p]) reset(s, sets[p]);
  }
  if (empty) {
    emit_body(s, &sets[0]);
  } else {
    auto row = [&] {
      Body chunk;
      if (two_level) chunk = [&] { flush(s, sets[0]); };
      vector_run(
          s.inner.back().var, i64(0), extent, lanes, unroll,
          [&](Phase p) {
            if (trailing_) emit_trailing(*trailing_);
            emit_body(s, &sets[int(p)]);
            if (p == Phase::Main && lanes > 1) prefetch_ahead(ahead_, k_.outer.back().var, 1, n && *n > kShortRow ? Near::L2 : Near::L1);
          },
          chunk, chunk_size);
    };
    if (!many_rows) {
      nest(s.inner.data(), int(depth) - 1, row);
    } else {
      const loop::Loop& rows = s.inner[depth - 2];
      nest(s.inner.data(), int(depth) - 2, [&] {
        Value* count = scalar_index(rows.extent, 0);
        for_loop(i64(0), count, i64(chunk_size), [&](Value* c) {
          Value* end = b_.CreateBinaryIntrinsic(llvm::Intrinsic::smin, b_.CreateAdd(c, i64(chunk_size)), count);
          for_loop(c, end, i64(1), [&](Value* i) {
            symbols_[sym::view(rows.var).symbol->id] = i;
            row();
          });
          for (int p : {1, 2})
            if (used[p]) flush(s, sets[p]);
        });
      });
    }
  }
  block_ = {};
  for (size_t a = 0; a < s.accums.size(); ++a) {
    auto& acc = s.accums[a];
    llvm::SmallVector<AccState, 8> vectors, scalars;
    for (int p = 0; p < 3; ++p) {
      if (!used[p]) continue;
      for (int u = 0; u < sets[p].unroll; ++u) (sets[p].lanes == lanes ? vectors : scalars).push_back(read(acc, sets[p], a, u));
    }
    while (vectors.size() > 1) {
      llvm::SmallVector<AccState, 8> half;
      for (size_t i = 0; i + 1 < vectors.size(); i += 2) half.push_back(combine(acc, vectors[i], vectors[i + 1]));
      if (vectors.size() % 2) half.push_back(vectors.back());
      vectors = std::move(half);
    }
    AccState total;
    if (!vectors.empty()) total = fold_lanes(acc, vectors[0]);
    for (auto& x : scalars) total = total.empty() ? x : combine(acc, total, x);
    if (total.empty()) {  // constant empty space
      AccSet none = make_accs(s, 1, 1, false);
      reset(s, none);
      total = read(acc, none, a, 0);
    }
    std::vector<AccState> states{total};
    sum_again(s, a, states);
    publish(acc, states, true);
  }
}

void KernelEmitter::emit_stage_in_block(const loop::Stage& s) {
  Block outer = block_;
  if (s.accums.empty()) {
    nest(s.inner.data(), int(s.inner.size()), [&] { emit_body(s, nullptr); });
    return;
  }
  constexpr int64_t kPrefetched = 128;
  const int64_t chunk = run_in_f32(s);
  auto at_most = [&](int64_t n) { return s.inner.size() == 1 && s.inner[0].extent.is_const() && s.inner[0].extent.value() <= n; };
  const bool two_level = wants_two_level(s) && !s.inner.empty() && !at_most(has_only_moments(s) ? 2 * chunk : chunk),
             prefetched = !at_most(kPrefetched);
  AccSet accs = make_accs(s, block_.lanes, block_.unroll, two_level);
  reset(s, accs);
  if (!two_level) {
    nest(s.inner.data(), int(s.inner.size()), [&] { emit_body(s, &accs); });
  } else {
    nest(s.inner.data(), int(s.inner.size()) - 1, [&] {
      Value* n = scalar_index(s.inner.back().extent, 0);
      for_loop(i64(0), n, i64(chunk), [&](Value* c) {
        Value* end = b_.CreateBinaryIntrinsic(llvm::Intrinsic::smin, b_.CreateAdd(c, i64(chunk)), n);
        for_loop(c, end, i64(1), [&](Value* i) {
          symbols_[sym::view(s.inner.back().var).symbol->id] = i;
          emit_body(s, &accs);
          if (prefetched) prefetch_column(s);
        });
        flush(s, accs);
      });
    });
  }
  block_ = outer;
  for (size_t a = 0; a < s.accums.size(); ++a) {
    std::vector<AccState> states;
    for (int u = 0; u < block_.unroll; ++u) states.push_back(read(s.accums[a], accs, a, u));
    sum_again(s, a, states);
    publish(s.accums[a], states, block_.lanes == 1);
  }
}

void KernelEmitter::emit_runs(const loop::Loop* loops, int n, bool flat) {
  Value *begin = fn_->getArg(2), *end = fn_->getArg(3);
  bool reduction = false;
  for (auto& s : k_.stages) reduction |= !s.accums.empty();
  int unroll = lanes_ == 1 || n == 0 ? 1 : choose_unroll(k_.stages, reduction, loops[n - 1].var);
  const bool long_columns = reduction && n > 0 && sums_long_columns();
  // Columns of a sum: long pieces of each row, as far as the registers go.
  if (reduction && unroll == 4 && k_.stages[0].accums.size() == 1 && k_.stages[0].body.size() <= 3)
    unroll = (t_.avx512 && !long_columns ? 16 : 8) / (loop::is_moments(k_.stages[0].accums[0].kind) ? 2 : 1);
  auto body = [&](Phase) {
    if (flat)
      emit_body(k_.stages[0], nullptr);
    else
      for (auto& s : k_.stages) emit_stage_in_block(s);
  };
  if (n == 0) {  // a single element
    for_loop(begin, end, i64(1), [&](Value*) { body(Phase::Main); });
    return;
  }
  const loop::Loop& last = loops[n - 1];
  if (last.extent.is_const())
    while (unroll > 1 && last.extent.value() < int64_t(lanes_) * unroll) unroll /= 2;
  masked_only_ = !long_columns && masked_throughout(loops, n);
  split_runs(loops, n, [&](Value* from, Value* to) {
    if (long_columns)
      emit_columns(last, unroll, from, to);
    else
      vector_run(last.var, from, to, lanes_, unroll, body);
  });
}

void KernelEmitter::split_runs(const loop::Loop* loops, int n, const std::function<void(Value*, Value*)>& run) {
  Value *begin = fn_->getArg(2), *end = fn_->getArg(3);
  if (n == 1) return run(begin, end);
  auto* i64t = b_.getInt64Ty();
  std::vector<Value*> extents(n), slots(n);
  Value* rest = begin;
  for (int d = n - 1; d >= 0; --d) {
    slots[d] = make_slot(i64t, "coord");
    if (d == 0) {
      b_.CreateStore(rest, slots[0]);
      break;
    }
    extents[d] = scalar_index(loops[d].extent, 0);
    Value* e = b_.CreateBinaryIntrinsic(llvm::Intrinsic::smax, extents[d], i64(1));
    b_.CreateStore(b_.CreateURem(rest, e), slots[d]);
    rest = b_.CreateUDiv(rest, e);
  }
  auto* position = make_slot(i64t, "position");
  b_.CreateStore(begin, position);
  auto* row = BasicBlock::Create(cx_, "row", fn_);
  auto* done = BasicBlock::Create(cx_, "rows_end", fn_);
  b_.CreateCondBr(b_.CreateICmpSLT(begin, end), row, done);
  b_.SetInsertPoint(row);
  for (int d = 0; d + 1 < n; ++d) symbols_[sym::view(loops[d].var).symbol->id] = b_.CreateLoad(i64t, slots[d]);
  Value* pos = b_.CreateLoad(i64t, position);
  Value* from = b_.CreateLoad(i64t, slots[n - 1]);
  Value* to = b_.CreateBinaryIntrinsic(llvm::Intrinsic::smin, extents[n - 1], b_.CreateAdd(from, b_.CreateSub(end, pos)));
  run(from, to);
  Value* next = b_.CreateAdd(pos, b_.CreateSub(to, from));
  b_.CreateStore(next, position);
  b_.CreateStore(i64(0), slots[n - 1]);
  Value* carry = i64(1);
  for (int d = n - 2; d >= 0; --d) {
    Value* c = b_.CreateAdd(b_.CreateLoad(i64t, slots[d]), carry);
    if (d > 0) {
      Value* wrap = b_.CreateICmpEQ(c, extents[d]);
      b_.CreateStore(b_.CreateSelect(wrap, i64(0), c), slots[d]);
      carry = b_.CreateZExt(wrap, i64t);
    } else {
      b_.CreateStore(c, slots[0]);
    }
  }
  b_.CreateCondBr(b_.CreateICmpSLT(next, end), row, done);
  b_.SetInsertPoint(done);
}

}  // namespace vitrify::codegen::x86
