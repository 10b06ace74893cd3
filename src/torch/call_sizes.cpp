#include "torch/call_sizes.h"

#include <algorithm>

#include "sym/holds.h"
#include "torch/sym_node.h"

namespace vitrify {

const std::vector<std::optional<int64_t>>& CallSizes::by_symbol() const {
  if (found_) return *found_;
  found_.emplace();
  if (!ctx_) return *found_;
  each_([&](ir::Value v, const at::Tensor& t) {
    const ir::Dims& sizes = v.type().sizes;
    if (!t.defined() || t.dim() != static_cast<int64_t>(sizes.size())) return;
    for (size_t d = 0; d < sizes.size(); ++d)
      if (!sizes[d].is_const() && sym::is_symbol(sizes[d])) {
        const uint32_t id = sym::view(sizes[d]).symbol->id;
        if (id >= found_->size()) found_->resize(id + 1);
        if (auto& known = (*found_)[id]; !known) known = t.size(static_cast<int64_t>(d));
      }
  });
  return *found_;
}

std::vector<int64_t> CallSizes::values(std::span<const sym::Int> ints) const {
  std::vector<int64_t> r;
  for (sym::Int i : ints)
    r.push_back(sym::eval(i, [&](uint32_t id) {
      const auto& known = by_symbol();
      VT_CHECK(id < known.size() && known[id], "a gradient has a size that the call does not say");
      return *known[id];
    }));
  return r;
}

bool CallSizes::hold(const Assumed& assumed, const sym::Known& before) const {
  const auto& guards = assumed.guards;
  if (!ctx_ || guards.size() <= before.guards.size()) return true;
  const auto& sizes = by_symbol();
  for (size_t i = before.guards.size(); i < guards.size(); ++i) {
    const auto size = [&](uint32_t id) { return id < sizes.size() ? sizes[id] : std::nullopt; };
    std::vector<sym::Int> symbols;
    sym::free_symbols(guards[i].expr, symbols);
    const auto nobody_knows = [&](sym::Int s) {
      const uint32_t id = sym::view(s).symbol->id;
      return !size(id) && std::ranges::find(assumed.found, id) == assumed.found.end();
    };
    if (std::ranges::any_of(symbols, nobody_knows) || !sym::holds(guards[i], size).value_or(true)) return false;
  }
  return true;
}

bool has_sizes(const std::vector<ResultSpec::ViewOp>& path) {
  return std::ranges::any_of(
      path, [](const ResultSpec::ViewOp& v) { return !std::ranges::all_of(v.args, [](const auto& a) { return capture::is_static(a); }); });
}

std::vector<sym::Int> sizes_in(const c10::IValue& a) {
  if (a.isSymInt()) return {capture::from_sym_int(a.toSymInt())};
  return a.isIntList() || a.isSymIntList() ? capture::ints_of(a) : std::vector<sym::Int>();
}

std::vector<ResultSpec::ViewOp> path_in(std::vector<ResultSpec::ViewOp> path, const CallSizes& sizes) {
  for (ResultSpec::ViewOp& v : path)
    for (c10::IValue& a : v.args) {
      if (capture::is_static(a)) continue;
      const std::vector<int64_t> now = sizes.values(sizes_in(a));
      a = a.isSymInt() ? c10::IValue(now[0]) : c10::IValue(now);
    }
  return path;
}

}  // namespace vitrify
