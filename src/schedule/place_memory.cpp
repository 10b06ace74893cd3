#include "schedule/place_memory.h"

#include <algorithm>
#include <numeric>

#include "runtime/extern_table.h"
#include "runtime/layout.h"
#include "support/error.h"

namespace vitrify::schedule {

using runtime::SlotKind;
using runtime::Step;

namespace {
// May this call leave its result in the memory of its second operand: whole, laid out alike, and read here for the last time?
bool dies_as_result(const runtime::Plan& p, const runtime::ExternCall& e, int32_t step, bool fixed) {
  if (!runtime::writes_into_operand(e.node->op->name) || e.results[0] < 0) return false;
  const runtime::TensorRef& r = e.operands[1];
  const runtime::Slot &from = p.slots[r.slot], &to = p.slots[static_cast<size_t>(e.results[0])];
  const bool plain = from.kind == to.kind && (from.kind == SlotKind::Extern || (from.kind == SlotKind::Arena && fixed));
  return plain && from.last_step == step && std::ranges::count(e.operands, r.slot, &runtime::TensorRef::slot) == 1 && r.offset.is(0) &&
         r.sizes == from.sizes && r.strides == from.strides && from.sizes == to.sizes && from.strides == to.strides && from.dtype == to.dtype;
}
}  // namespace

void place_memory(runtime::Plan& p) {
  const size_t n = p.slots.size();
  const std::vector<runtime::Lifetime> lives = runtime::lifetimes(p);
  for (size_t s = 0; s < n; ++s) {
    p.slots[s].first_step = lives[s].first;
    p.slots[s].last_step = lives[s].last;
  }
  // the result of an extern view is its operand's memory
  for (size_t k = p.steps.size(); k-- > 0;) {
    if (p.steps[k].kind != Step::Kind::Extern) continue;
    auto& e = p.externs[p.steps[k].index];
    if (!(e.node->op->flags & ir::kView)) continue;
    for (int32_t r : e.results)
      if (r >= 0)
        for (auto& o : e.operands) p.slots[o.slot].last_step = std::max(p.slots[o.slot].last_step, p.slots[r].last_step);
  }

  // free extern results early
  std::vector<Step> steps;
  std::vector<int32_t> moved(p.steps.size() + 1);
  for (size_t k = 0; k < p.steps.size(); ++k) {
    moved[k] = static_cast<int32_t>(steps.size());
    steps.push_back(p.steps[k]);
    for (uint32_t s = 0; s < n; ++s)
      if (p.slots[s].kind == SlotKind::Extern && p.slots[s].last_step == static_cast<int32_t>(k)) steps.push_back({Step::Kind::Free, s});
  }
  moved[p.steps.size()] = static_cast<int32_t>(steps.size());
  p.steps = std::move(steps);
  for (auto& s : p.slots)
    if (s.first_step >= 0) {
      s.first_step = moved[s.first_step];
      s.last_step = moved[s.last_step];
    }

  const bool fixed = !p.dynamic && std::ranges::all_of(p.slots, [](const runtime::Slot& s) {
    return s.kind != SlotKind::Arena || s.first_step < 0 || s.bytes.is_const();
  });
  std::vector<uint32_t> host(n);  // whose memory a slot has: its own, or that of the operand it replaces
  std::iota(host.begin(), host.end(), 0);
  std::vector<int32_t> last(n);
  for (uint32_t s = 0; s < n; ++s) last[s] = p.slots[s].last_step;
  for (size_t k = 0; k < p.steps.size(); ++k) {
    if (p.steps[k].kind != Step::Kind::Extern) continue;
    runtime::ExternCall& e = p.externs[p.steps[k].index];
    e.in_place = dies_as_result(p, e, static_cast<int32_t>(k), fixed);
    if (!e.in_place) continue;
    const auto to = static_cast<uint32_t>(e.results[0]);
    host[to] = host[e.operands[1].slot];
    last[host[to]] = last[to];
  }
  if (!fixed) {
    p.arena_bytes = 0;
    return;
  }

  std::vector<runtime::Block> blocks;
  for (uint32_t s = 0; s < n; ++s)
    if (p.slots[s].kind == SlotKind::Arena && p.slots[s].first_step >= 0 && host[s] == s)
      blocks.push_back({s, std::max<int64_t>(p.slots[s].bytes.value(), 1), {p.slots[s].first_step, last[s]}});
  p.arena_bytes = runtime::place(blocks);
  for (const runtime::Block& b : blocks) p.slots[b.slot].arena_offset = b.offset;
  for (uint32_t s = 0; s < n; ++s) p.slots[s].arena_offset = p.slots[host[s]].arena_offset;
}

}  // namespace vitrify::schedule
