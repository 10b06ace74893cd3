#include "schedule/place_memory.h"

#include <algorithm>

#include "support/error.h"

namespace vitrify::schedule {

using runtime::SlotKind;
using runtime::Step;

namespace {
constexpr int64_t kAlign = 64;
int64_t round_up(int64_t n) { return (n + kAlign - 1) / kAlign * kAlign; }
}  // namespace

void place_memory(runtime::Plan& p) {
  const size_t n = p.slots.size();
  for (auto& s : p.slots) s.first_step = s.last_step = -1;
  auto touch = [&](uint32_t slot, size_t step) {
    auto& s = p.slots[slot];
    if (s.first_step < 0) s.first_step = static_cast<int32_t>(step);
    s.last_step = static_cast<int32_t>(step);
  };
  for (size_t k = 0; k < p.steps.size(); ++k) {
    if (p.steps[k].kind == Step::Kind::Launch) {
      for (uint32_t s : p.launches[p.steps[k].index].slots) touch(s, k);
    } else {
      auto& e = p.externs[p.steps[k].index];
      for (auto& o : e.operands) touch(o.slot, k);
      for (int32_t r : e.results)
        if (r >= 0) touch(static_cast<uint32_t>(r), k);
    }
  }
  for (auto& o : p.outputs)
    if (o.defined) touch(o.ref.slot, p.steps.size());
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

  // greedy by size: each block at the lowest offset free over its whole life
  std::vector<uint32_t> order;
  for (uint32_t s = 0; s < n; ++s) {
    if (p.slots[s].kind != SlotKind::Arena || p.slots[s].first_step < 0) continue;
    if (!p.slots[s].bytes.is_const()) {
      p.arena_bytes = 0;
      return;
    }
    order.push_back(s);
  }
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return p.slots[a].bytes.value() > p.slots[b].bytes.value(); });
  std::vector<uint32_t> placed;
  for (uint32_t s : order) {
    auto& x = p.slots[s];
    const int64_t need = round_up(std::max<int64_t>(x.bytes.value(), 1));
    std::vector<std::pair<int64_t, int64_t>> busy;
    for (uint32_t q : placed) {
      auto& y = p.slots[q];
      if (y.last_step < x.first_step || x.last_step < y.first_step) continue;
      busy.emplace_back(y.arena_offset, y.arena_offset + round_up(std::max<int64_t>(y.bytes.value(), 1)));
    }
    std::sort(busy.begin(), busy.end());
    int64_t at = 0;
    for (auto& [lo, hi] : busy) {
      if (at + need <= lo) break;
      at = std::max(at, hi);
    }
    x.arena_offset = at;
    p.arena_bytes = std::max(p.arena_bytes, at + need);
    placed.push_back(s);
  }
}

}  // namespace vitrify::schedule
