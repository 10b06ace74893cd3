// Maps whose operands lie along different loops: squares of W x W elements, transposed in registers.
//
// A square of every operand that lies along the last outer loop ("down") is read as W vectors, transposed, and left in a few lines of stack; the body
// then runs row by row with lanes across the inner loop and finds its operand there. Stores that lie along "down" take the same way back.
#include "codegen/llvm/emitter.h"

namespace vitrify::codegen::x86 {

namespace {
// Squares down before one step across: long pieces of the rows that are read, and time for what was asked for to come. Operands that are read across
// as well lie in a page for each row of the band: as many as can be looked up at once.
constexpr int64_t kBand = 64, kBandAcross = 8;

// Swaps the off-diagonal blocks of every size: W log W shuffles of two vectors.
void transpose(llvm::IRBuilder<>& b, std::vector<Value*>& rows) {
  const int n = int(rows.size());
  for (int s = 1; s < n; s *= 2) {
    llvm::SmallVector<int, 16> upper(n), lower(n);
    for (int l = 0; l < n; ++l) {
      upper[l] = l & s ? n + l - s : l;
      lower[l] = l & s ? n + l : l + s;
    }
    for (int i = 0; i < n; ++i) {
      if (i & s) continue;
      Value *x = rows[i], *y = rows[i + s];
      rows[i] = b.CreateShuffleVector(x, y, upper);
      rows[i + s] = b.CreateShuffleVector(x, y, lower);
    }
  }
}
}  // namespace

void KernelEmitter::emit_tiles() {
  const loop::Stage& stage = k_.stages[0];
  const loop::Loop &down = k_.outer.back(), &across = stage.inner[0];
  const uint32_t down_id = sym::view(down.var).symbol->id, across_id = sym::view(across.var).symbol->id;
  const int w = lanes_;

  const auto direct = [&](const Instr& i) {  // its place follows from loops alone
    std::vector<Int> free;
    sym::free_symbols(i.at, free);
    return std::none_of(free.begin(), free.end(), [&](Int s) { return indirect_.count(sym::view(s).symbol->id) > 0; });
  };
  std::map<const Instr*, Value*> squares;  // of the accesses that lie along `down`
  for (auto& i : stage.body) {
    const bool load = i.op == Op::load && i.a < 0, store = i.op == Op::store && i.b < 0;
    if (!(load || store) || !loop::lies_along(i.at, down.var, across.var) || (load && !read_only_[i.buf])) continue;
    if (!direct(i)) continue;
    auto* square = make_slot(llvm::ArrayType::get(vec(storage_llvm(k_.buffers[i.buf].dtype), w), w), "square");
    square->setAlignment(llvm::Align(64));
    squares[&i] = square;
  }
  const bool across_too = std::any_of(stage.body.begin(), stage.body.end(), [&](const Instr& i) {
    return i.op == Op::load && !squares.count(&i) && sym::contains(i.at, across.var) && sym::contains(i.at, down.var);
  });
  const int64_t band_rows = (across_too ? kBandAcross : kBand) * w;
  auto vector_of = [&](const Instr& i) { return vec(storage_llvm(k_.buffers[i.buf].dtype), w); };
  auto row_of = [&](const Instr& i, Value* r) { return b_.CreateInBoundsGEP(vector_of(i), squares.at(&i), r); };
  // W vectors down, one for each step across.
  auto columns = [&](const Instr& i, Value* d0, Value* a0, auto&& each) {
    block_ = {};
    symbols_[down_id] = d0;
    symbols_[across_id] = a0;
    auto* type = storage_llvm(k_.buffers[i.buf].dtype);
    Value* p = element_pointer(i, 0);
    Value* stride = scalar_index(sym::affine_in(i.at, across.var)->first, 0);
    for (int l = 0; l < w; ++l) each(l, b_.CreateGEP(type, p, b_.CreateMul(stride, i64(l))));
  };
  auto square = [&](Value* d0, Value* a0) {
    // The square across comes a band later. Its lines lie a row apart: no hardware foresees them.
    Value* next = b_.CreateAdd(a0, i64(w));
    for (auto& i : stage.body) {
      if (i.op != Op::load || !squares.count(&i)) continue;
      const llvm::Align align(size_of(k_.buffers[i.buf].dtype));
      std::vector<Value*> v;
      columns(i, d0, a0, [&](int, Value* p) { v.push_back(tag(b_.CreateAlignedLoad(vector_of(i), p, align), i.buf, true)); });
      columns(i, d0, next, [&](int, Value* p) { prefetch(p, Near::L2); });
      transpose(b_, v);
      for (int r = 0; r < w; ++r) b_.CreateAlignedStore(v[r], row_of(i, i64(r)), llvm::Align(align.value() * w));
    }
    for_loop(i64(0), i64(w), i64(1), [&](Value* r) {
      block_ = {};
      block_.lanes = w;
      block_.var = across.var;
      block_.base = a0;
      symbols_[down_id] = b_.CreateNSWAdd(d0, r);
      for (auto& i : stage.body) {
        if (!squares.count(&i)) {
          const auto along = sym::affine_in(i.at, across.var);
          if (i.op == Op::load && i.a < 0 && along && along->first.is(1) && sym::contains(i.at, down.var) && direct(i)) {
            block_.base = b_.CreateAdd(a0, i64(2 * w));
            prefetch(element_pointer(i, 0), Near::L2);
            block_.base = a0;
          }
          emit_instr(i, nullptr);
          continue;
        }
        const DType storage = k_.buffers[i.buf].dtype;
        const llvm::Align align(size_of(storage) * w);
        if (i.op == Op::load)
          define(i.result, compute_type(i.type), {.v = {widen(b_.CreateAlignedLoad(vector_of(i), row_of(i, r), align), storage)}, .uniform = false});
        else
          b_.CreateAlignedStore(narrow(get(i.a, 0, true), storage), row_of(i, r), align);
      }
    });
    for (auto& i : stage.body) {
      if (i.op != Op::store || !squares.count(&i)) continue;
      const llvm::Align align(size_of(k_.buffers[i.buf].dtype));
      std::vector<Value*> v;
      for (int r = 0; r < w; ++r) v.push_back(b_.CreateAlignedLoad(vector_of(i), row_of(i, i64(r)), llvm::Align(align.value() * w)));
      transpose(b_, v);
      columns(i, d0, a0, [&](int l, Value* p) { store_vector(v[l], p, i.buf); });
    }
    block_ = {};
  };

  split_runs(k_.outer.data(), int(k_.outer.size()), [&](Value* from, Value* to) {
    Value* width = scalar_index(across.extent, 0);
    Value* whole = b_.CreateAnd(width, i64(-w));
    Value* last = b_.CreateAdd(from, b_.CreateAnd(b_.CreateSub(to, from), i64(-w)));
    for_loop(from, last, i64(band_rows), [&](Value* band) {
      Value* band_end = b_.CreateBinaryIntrinsic(llvm::Intrinsic::smin, b_.CreateAdd(band, i64(band_rows)), last);
      for_loop(i64(0), whole, i64(w), [&](Value* a0) { for_loop(band, band_end, i64(w), [&](Value* d0) { square(d0, a0); }); });
    });
    // what is left at the right of the squares, and the rows below them
    for_loop(from, to, i64(1), [&](Value* row) {
      symbols_[down_id] = row;
      Value* start = b_.CreateSelect(b_.CreateICmpSLT(row, last), whole, i64(0));
      vector_run(across.var, start, width, w, 1, [&](Phase) { emit_body(stage, nullptr); });
    });
  });
}

}  // namespace vitrify::codegen::x86
