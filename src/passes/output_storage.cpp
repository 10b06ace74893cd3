#include "passes/output_storage.h"

#include <algorithm>

namespace vitrify::passes {

using ir::Value;

namespace {

// Whether a result is the memory of argument 0 in eager. Maybe: depends on strides, or on arguments not looked at here.
enum class Aliasing { No, Maybe, Yes };

Aliasing aliasing(const ir::Node& n) {
  static constexpr std::string_view always[] = {"alias",   "detach", "expand",    "lift_fresh", "permute", "select",      "slice",
                                                "squeeze", "t",      "transpose", "unsqueeze",  "view",    "_unsafe_view"};
  static constexpr std::string_view sometimes[] = {"contiguous", "dropout", "expand_as", "flatten", "reshape",
                                                   "reshape_as", "to",      "type_as",   "view_as"};
  std::string_view s = n.op->name;
  if (s.starts_with("aten::")) {
    s.remove_prefix(6);
    s = s.substr(0, s.find('.'));
    if (std::find(std::begin(always), std::end(always), s) != std::end(always)) return Aliasing::Yes;
    if (std::find(std::begin(sometimes), std::end(sometimes), s) != std::end(sometimes)) return Aliasing::Maybe;
  }
  return n.op->flags & ir::kView ? Aliasing::Maybe : Aliasing::No;
}

template <class F>
Value up_to_root(Value v, F&& visit) {
  for (;;) {
    visit(v);
    if (aliasing(*v.node) == Aliasing::No || v.node->args.empty()) return v;
    const Value* base = std::get_if<Value>(&v.node->args[0]);
    if (!base || !*base) return v;
    v = *base;
  }
}
Value root(Value v) {
  return up_to_root(v, [](Value) {});
}

uint32_t count(const std::unordered_map<Value, uint32_t>& map, Value v) {
  auto it = map.find(v);
  return it == map.end() ? 0 : it->second;
}

}  // namespace

OutputStorage::OutputStorage(const ir::Graph& g) {
  for (const Value& v : g.outputs) {
    if (!v) continue;
    ++outputs_[v];
    up_to_root(v, [&](Value x) { ++inside_[x]; });
  }
}

bool OutputStorage::replace(Value from, Value to) {
  const uint32_t direct = count(outputs_, from), inside = count(inside_, from);
  if (direct && (to.node->op->name.starts_with("graph::") || count(outputs_, to))) return false;
  if (inside) {
    if (aliasing(*from.node) == Aliasing::Yes) {
      // The memory was the base's and stays the base's.
      inside_[to] += inside;
    } else {
      const Value base = root(to);
      const uint32_t others = count(inside_, base) - (root(from) == base ? inside : 0);
      if (others || base.node->op->name.starts_with("graph::")) return false;
      up_to_root(to, [&](Value x) { inside_[x] = std::max(inside_[x], inside); });
    }
  }
  if (direct) {
    outputs_.erase(from);
    outputs_[to] += direct;
  }
  return true;
}

}  // namespace vitrify::passes
