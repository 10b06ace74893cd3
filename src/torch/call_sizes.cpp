#include "torch/call_sizes.h"

#include <algorithm>

namespace vitrify {

const std::vector<std::optional<int64_t>>& CallSizes::by_symbol() const {
  if (found_) return *found_;
  found_.emplace();
  if (!ctx_) return *found_;
  found_->resize(ctx_->num_symbols());
  each_([&](ir::Value v, const at::Tensor& t) {
    const ir::Dims& sizes = v.type().sizes;
    if (!t.defined() || t.dim() != static_cast<int64_t>(sizes.size())) return;
    for (size_t d = 0; d < sizes.size(); ++d)
      if (!sizes[d].is_const() && sym::is_symbol(sizes[d]))
        if (auto& known = (*found_)[sym::view(sizes[d]).symbol->id]; !known) known = t.size(static_cast<int64_t>(d));
  });
  return *found_;
}

bool CallSizes::hold(const Assumed& assumed, const sym::Known& before) const {
  const auto& guards = assumed.guards;
  if (!ctx_ || guards.size() <= before.guards.size()) return true;
  const auto& sizes = by_symbol();
  for (size_t i = before.guards.size(); i < guards.size(); ++i) {
    bool known = true, found = false;
    const int64_t v = sym::eval(guards[i].expr, [&](uint32_t id) -> int64_t {
      if (id < sizes.size() && sizes[id]) return *sizes[id];
      const bool looks = std::ranges::find(assumed.found, id) != assumed.found.end();
      found = found || looks;
      known = known && looks;
      return 1;
    });
    if (!known) return false;
    if (found) continue;
    switch (guards[i].kind) {
      case sym::Guard::Kind::EqZero:
        if (v != 0) return false;
        break;
      case sym::Guard::Kind::NeZero:
        if (v == 0) return false;
        break;
      case sym::Guard::Kind::GeZero:
        if (v < 0) return false;
        break;
    }
  }
  return true;
}

}  // namespace vitrify
