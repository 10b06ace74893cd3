// Sums of long columns.
//
// A block of columns that goes down alone reads short pieces of rows that lie pages apart. Here a strip of columns goes down together, a few rows at
// a time, so that each row is read in one long piece; the totals of the strip wait in the first cache meanwhile. Where the hardware follows as many
// streams, all rows are read along at once, a vector of each; elsewhere as many vectors of one row as registers can sum, the next rows asked for.
#include "codegen/llvm/emitter.h"

namespace vitrify::codegen::x86 {

namespace {
constexpr int64_t kRows = 16;         // added in f32 before they go to the totals
constexpr int64_t kStreams = 8;       // as many, where they are read along at once
constexpr int64_t kStrip = 1024;      // columns
constexpr int64_t kLongColumn = 128;  // rows; shorter ones stay in registers from end to end
}  // namespace

bool KernelEmitter::sums_long_columns() const {
  const loop::Stage& s = k_.stages[0];
  if (lanes_ == 1 || s.accums.empty() || s.inner.size() != 1) return false;
  if (s.inner[0].extent.is_const() && s.inner[0].extent.value() <= kLongColumn) return false;
  for (auto& a : s.accums)
    if (a.kind != loop::AccumKind::Sum || a.type != DType::F32) return false;
  for (auto& i : s.body)
    if (i.op == Op::store_add) return false;
  return std::all_of(k_.stages.begin() + 1, k_.stages.end(), [](auto& after) { return after.inner.empty() && after.accums.empty(); });
}

void KernelEmitter::emit_columns(const loop::Loop& columns, int unroll, Value* from, Value* to) {
  const loop::Stage& s = k_.stages[0];
  const uint32_t column = sym::view(columns.var).symbol->id, row = sym::view(s.inner[0].var).symbol->id;
  const int64_t rows = t_.follows_streams ? kStreams : kRows;
  if (t_.follows_streams) unroll = 1;
  const int64_t strip = kStrip / int64_t(llvm::PowerOf2Ceil(s.accums.size()));
  auto* f64 = b_.getDoubleTy();
  std::vector<llvm::AllocaInst*> totals;
  for (size_t a = 0; a < s.accums.size(); ++a) {
    totals.push_back(make_slot(llvm::ArrayType::get(f64, uint64_t(strip + lanes_)), "totals"));
    totals.back()->setAlignment(llvm::Align(64));
  }
  for_loop(from, to, i64(strip), [&](Value* begin) {
    Value* end = b_.CreateBinaryIntrinsic(llvm::Intrinsic::smin, b_.CreateAdd(begin, i64(strip)), to);
    for (auto* t : totals) b_.CreateMemSet(t, b_.getInt8(0), uint64_t(strip + lanes_) * 8, llvm::Align(64));
    auto total = [&](size_t a, int u) {
      Value* at = b_.CreateSub(block_.lanes == 1 ? symbols_.at(column) : block_.base, begin);
      return b_.CreateInBoundsGEP(f64, totals[a], b_.CreateAdd(at, i64(int64_t(u) * block_.lanes)));
    };
    auto wide = [&] { return vec(f64, block_.lanes); };
    Value* n = scalar_index(s.inner[0].extent, 0);
    for_loop(i64(0), n, i64(rows), [&](Value* first) {
      Value* last = b_.CreateBinaryIntrinsic(llvm::Intrinsic::smin, b_.CreateAdd(first, i64(rows)), n);
      vector_run(columns.var, begin, end, lanes_, unroll, [&](Phase) {
        AccSet accs = make_accs(s, block_.lanes, block_.unroll, false);
        reset(s, accs);
        const Block block = block_;
        for_loop(first, last, i64(1), [&](Value* r) {
          symbols_[row] = r;
          emit_body(s, &accs);
          if (!t_.follows_streams) prefetch_column(s, rows);
        });
        block_ = block;
        for (size_t a = 0; a < s.accums.size(); ++a)
          for (int u = 0; u < block_.unroll; ++u) {
            Value *p = total(a, u), *sum = b_.CreateFPExt(read(s.accums[a], accs, a, u)[0], wide());
            b_.CreateAlignedStore(b_.CreateFAdd(b_.CreateAlignedLoad(wide(), p, llvm::Align(8)), sum), p, llvm::Align(8));
          }
      });
    });
    vector_run(columns.var, begin, end, lanes_, unroll, [&](Phase) {
      for (size_t a = 0; a < s.accums.size(); ++a) {
        std::vector<AccState> states;
        for (int u = 0; u < block_.unroll; ++u)
          states.push_back({b_.CreateFPTrunc(b_.CreateAlignedLoad(wide(), total(a, u), llvm::Align(8)), vec(b_.getFloatTy(), block_.lanes))});
        publish(s.accums[a], states, block_.lanes == 1);
      }
      for (size_t k = 1; k < k_.stages.size(); ++k) emit_stage_in_block(k_.stages[k]);
    });
  });
}

}  // namespace vitrify::codegen::x86
