#include "runtime/layout.h"

#include <algorithm>

#include "runtime/memory.h"

namespace vitrify::runtime {

std::optional<int64_t> SymbolValues::eval(Int e) const {
  if (e.is_const()) return e.value();
  bool ok = true;
  std::vector<Int> symbols;
  sym::free_symbols(e, symbols);
  for (Int s : symbols) {
    uint32_t id = sym::view(s).symbol->id;
    ok = ok && id < known_.size() && known_[id];
  }
  if (!ok) return std::nullopt;
  return sym::eval(e, [&](uint32_t id) { return values_[id]; });
}

bool SymbolValues::eval(const std::vector<Int>& es, std::vector<int64_t>& out) const {
  out.resize(es.size());
  for (size_t i = 0; i < es.size(); ++i) {
    auto v = eval(es[i]);
    if (!v) return false;
    out[i] = *v;
  }
  return true;
}

std::vector<Lifetime> lifetimes(const Plan& plan) {
  std::vector<Lifetime> out(plan.slots.size());
  auto touch = [&](uint32_t slot, int32_t step) {
    if (out[slot].first < 0) out[slot].first = step;
    out[slot].last = step;
  };
  for (size_t i = 0; i < plan.steps.size(); ++i) {
    const Step& s = plan.steps[i];
    auto step = static_cast<int32_t>(i);
    if (s.kind == Step::Kind::Launch)
      for (uint32_t slot : plan.launches[s.index].slots) touch(slot, step);
    if (s.kind == Step::Kind::Extern) {
      for (const TensorRef& r : plan.externs[s.index].operands) touch(r.slot, step);
      for (int32_t slot : plan.externs[s.index].results)
        if (slot >= 0) touch(static_cast<uint32_t>(slot), step);
    }
  }
  for (const Output& o : plan.outputs)
    if (o.defined) touch(o.ref.slot, static_cast<int32_t>(plan.steps.size()));
  return out;
}

// Large ones first; each at the lowest gap between those that are alive with it.
int64_t place(std::vector<Block>& blocks) {
  for (Block& b : blocks) b.bytes = (b.bytes + kAlignment - 1) / kAlignment * kAlignment;
  std::stable_sort(blocks.begin(), blocks.end(), [](const Block& a, const Block& b) { return a.bytes > b.bytes; });
  std::vector<const Block*> placed;  // by offset
  int64_t total = 0;
  for (Block& b : blocks) {
    b.offset = 0;
    for (const Block* p : placed) {
      if (p->life.last < b.life.first || b.life.last < p->life.first) continue;
      if (p->offset - b.offset >= b.bytes) break;
      b.offset = std::max(b.offset, p->offset + p->bytes);
    }
    total = std::max(total, b.offset + b.bytes);
    placed.insert(std::ranges::upper_bound(placed, b.offset, {}, &Block::offset), &b);
  }
  return total;
}

ArenaLayout lay_out_arena(const Plan& plan, const SymbolValues& symbols) {
  ArenaLayout out;
  out.offsets.assign(plan.slots.size(), -1);
  std::vector<Block> blocks;
  for (uint32_t i = 0; i < plan.slots.size(); ++i) {
    const Slot& s = plan.slots[i];
    if (s.kind != SlotKind::Arena) continue;
    auto bytes = symbols.eval(s.bytes);
    if (!bytes) continue;
    if (s.first_step < 0 || *bytes == 0)
      out.offsets[i] = 0;
    else
      blocks.push_back({i, *bytes, {s.first_step, s.last_step}});
  }
  out.bytes = place(blocks);
  for (const Block& b : blocks) out.offsets[b.slot] = b.offset;
  return out;
}

}  // namespace vitrify::runtime
