// Rows whose last loop trails a row behind.
//
// Softmax computes exponents in the caches, then stores the whole row to memory, and one waits for the other. Here the last loop of a row runs within
// the loop before it of the next row: stores drain while the next exponents are computed. They go through the caches, into lines asked for early:
// past them, each would hold one of the few buffers that the next row's loads wait for.
#include <algorithm>
#include <utility>

#include "codegen/llvm/emitter.h"

namespace vitrify::codegen::x86 {

namespace {
constexpr int64_t kStoresAhead = 2048;  // bytes
}

// The loop that the last one can run in a row later, or null. It is busy with math; the last one only stores to memory that nothing reads here, and
// what it reads of this kernel's own is what the other left at the same index, or scalars of the row.
const loop::Stage* KernelEmitter::leads_last() const {
  if (t_.follows_streams) return nullptr;  // stores past the caches are faster there, and loads do not wait for them
  if (lanes_ == 1 || k_.outer.size() != 1 || k_.may_fault || !k_.indirect.empty()) return nullptr;
  const loop::Stage& last = k_.stages.back();
  auto lead = std::find_if(k_.stages.rbegin() + 1, k_.stages.rend(), [](auto& s) { return !s.inner.empty(); });
  if (lead == k_.stages.rend() || lead->inner.size() != 1 || last.inner.size() != 1 || !last.accums.empty()) return nullptr;
  if (!(lead->inner[0].var == last.inner[0].var) || !(lead->inner[0].extent == last.inner[0].extent)) return nullptr;
  if (std::none_of(lead->body.begin(), lead->body.end(), [](auto& i) { return VectorMath::is_math(i.op); })) return nullptr;
  auto all_stores = [&](uint32_t buf, auto&& allowed) {
    return std::all_of(k_.stages.begin(), k_.stages.end(), [&](auto& s) {
      return std::all_of(s.body.begin(), s.body.end(), [&](auto& i) { return i.op != Op::store || i.buf != buf || allowed(s, i); });
    });
  };
  std::set<int32_t> own;
  for (const Instr& i : last.body) {
    if (i.op == Op::load) {
      if (!read_only_[i.buf] && !all_stores(i.buf, [&](auto& s, auto& j) { return &s == &*lead && j.at == i.at; })) return nullptr;
    } else if (i.op == Op::store) {
      const auto along = sym::affine_in(i.at, last.inner[0].var);
      if (!streams_[i.buf] || !all_stores(i.buf, [&](auto& s, auto&) { return &s == &last; }) || !along || !along->first.is(1)) return nullptr;
    } else if (i.op == Op::load_bit || i.op == Op::store_add) {
      return nullptr;
    }
    for (int32_t v : {i.a, i.b, i.c})
      if (v != loop::kNoValue && !own.contains(v) && !row_value(v)) return nullptr;
    own.insert(i.result);
  }
  return &*lead;
}

// The type of a number that a row has one of: what its loops accumulate. None for other values.
std::optional<DType> KernelEmitter::row_value(int32_t id) const {
  for (const auto& s : k_.stages)
    for (const auto& a : s.accums)
      if (a.results[0] == id || a.results[1] == id) {
        if (a.kind <= loop::AccumKind::Max || loop::is_moments(a.kind)) return a.type;
        return {};
      }
  return {};
}

void KernelEmitter::emit_trailing_rows(const loop::Stage& lead) {
  const loop::Stage& last = k_.stages.back();
  Value*& row = symbols_[sym::view(k_.outer[0].var).symbol->id];
  Value *begin = fn_->getArg(2), *end = fn_->getArg(3);
  Trailing trailing{.last = &last};
  for (const Instr& i : last.body)
    if (i.op == Op::store) streams_[i.buf] = false;
  for (const Instr& i : last.body)
    for (int32_t v : {i.a, i.b, i.c})
      if (auto type = v == loop::kNoValue ? std::nullopt : row_value(v)) {
        llvm::AllocaInst*& slot = trailing.of_row[v];
        if (slot) continue;
        slot = make_slot(compute_llvm(*type), "of_row");
        b_.CreateStore(llvm::Constant::getNullValue(slot->getAllocatedType()), slot);
        types_[v] = *type;
      }
  for_loop(begin, end, i64(1), [&](Value* o) {
    row = o;
    // The first row has none before it: what this stores into it is stored over a row later.
    trailing.row = b_.CreateBinaryIntrinsic(llvm::Intrinsic::smax, b_.CreateSub(o, i64(1)), begin);
    emit_stages(k_.stages.size() - 1, &lead, &trailing);
    for (auto& [v, slot] : trailing.of_row) b_.CreateStore(get(v, 0, false), slot);
  });
  if_then(b_.CreateICmpSLT(begin, end), [&] {
    row = b_.CreateSub(end, i64(1));
    for (auto& [v, slot] : trailing.of_row) values_[v] = {{b_.CreateLoad(slot->getAllocatedType(), slot)}, true};
    emit_stage(last);
  });
}

// The last loop's part in a block of the leading one: of the row before.
void KernelEmitter::emit_trailing(const Trailing& t) {
  Value*& row = symbols_.at(sym::view(k_.outer[0].var).symbol->id);
  Value* now = std::exchange(row, t.row);
  std::vector<std::pair<int32_t, Multi>> of_this;
  for (auto& [v, slot] : t.of_row) of_this.emplace_back(v, std::exchange(values_[v], {{b_.CreateLoad(slot->getAllocatedType(), slot)}, true}));
  emit_body(*t.last, nullptr);
  for (const Instr& i : t.last->body)
    for (int u = 0; i.op == Op::store && u < block_.unroll; ++u)
      prefetch(b_.CreateGEP(b_.getInt8Ty(), element_pointer(i, u), i64(kStoresAhead)), Near::L1);
  for (auto& [v, value] : of_this) values_[v] = std::move(value);
  row = now;
}

}  // namespace vitrify::codegen::x86
