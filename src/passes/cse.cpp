#include "passes/cse.h"

#include <bit>
#include <unordered_set>

#include "ir/faults.h"
#include "ir/node_map.h"
#include "ir/views.h"
#include "passes/output_storage.h"
#include "support/hash.h"

namespace vitrify::passes {

using ir::Arg;
using ir::Node;
using ir::Value;

namespace {

uint64_t hash_of(double v) { return std::bit_cast<uint64_t>(v); }
uint64_t hash_of(const ir::Complex& v) { return hash_mix(hash_of(v.re), hash_of(v.im)); }
uint64_t hash_of(const std::string& v) { return hash_string(v); }
uint64_t hash_of(const ir::None&) { return 0; }
uint64_t hash_of(const ir::OpaqueArg& v) { return v.index; }
uint64_t hash_of(const Device& v) { return static_cast<uint64_t>(v.kind) * 256 + static_cast<uint8_t>(v.index); }
template <class T>
  requires(std::is_integral_v<T> || std::is_enum_v<T>)
uint64_t hash_of(T v) {
  return static_cast<uint64_t>(v);
}
template <class T>
  requires(std::is_same_v<T, sym::Int> || std::is_same_v<T, Value>)
uint64_t hash_of(const T& v) {
  return std::hash<T>()(v);
}
template <class T>
uint64_t hash_of(const std::vector<T>& l) {
  uint64_t h = l.size();
  for (const auto& x : l) h = hash_mix(h, hash_of(static_cast<const T&>(x)));
  return h;
}

// Bits decide: 0.0 and -0.0 differ, a NaN equals itself.
bool same(double a, double b) { return std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b); }
bool same(const ir::Complex& a, const ir::Complex& b) { return same(a.re, b.re) && same(a.im, b.im); }
template <class T>
bool same(const T& a, const T& b) {
  return a == b;
}
template <class T>
bool same(const std::vector<T>& a, const std::vector<T>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i)
    if (!same(static_cast<T>(a[i]), static_cast<T>(b[i]))) return false;
  return true;
}

uint64_t hash_node(const Node& n) {
  uint64_t h = std::hash<const void*>()(n.op);
  for (const Arg& a : n.args) h = hash_mix(h, std::visit([&](const auto& v) { return hash_mix(a.index(), hash_of(v)); }, a));
  return h;
}

bool same_node(const Node& x, const Node& y) {
  if (x.op != y.op || x.args.size() != y.args.size() || !(x.outs == y.outs)) return false;
  for (size_t i = 0; i < x.args.size(); ++i) {
    if (x.args[i].index() != y.args[i].index()) return false;
    const bool equal = std::visit([&](const auto& v) { return same(v, std::get<std::decay_t<decltype(v)>>(y.args[i])); }, x.args[i]);
    if (!equal) return false;
  }
  return true;
}

// The nodes whose memory custom ops are shown. In eager each has its own, which such an op may keep and write to.
std::unordered_set<const Node*> shown_to_custom_ops(const ir::Graph& g) {
  std::unordered_set<const Node*> r;
  for (Node* n : g.nodes())
    if (n->op->flags & ir::kEffect) ir::for_each_input(*n, [&](Value& v) { r.insert(ir::root_of(v).node); });
  return r;
}

}  // namespace

bool cse(ir::Graph& g, const Options&, const std::function<int(const ir::Node&)>& group) {
  OutputStorage storage(g);
  std::unordered_set<const Node*> shown = shown_to_custom_ops(g);
  std::unordered_multimap<uint64_t, Node*> seen;
  seen.reserve(g.nodes().size());
  ir::ValueMap<Value> merged(g);
  bool changed = false;
  for (Node* n : g.nodes()) {
    if (!merged.empty()) {
      ir::for_each_input(*n, [&](Value& v) {
        if (const Value* kept = merged.find(v)) v = *kept;
      });
    }
    if ((n->op->flags & (ir::kRandom | ir::kEffect)) || n->op->name.starts_with("graph::") || n->outs.empty()) continue;
    // Results whose sizes depend on values have symbols of their own, so that their types differ anyway.
    const int own = group ? group(*n) : 0;
    if (own < 0) continue;
    const uint64_t hash = hash_mix(hash_node(*n), static_cast<uint64_t>(own));
    Node* found = nullptr;
    for (auto [it, end] = seen.equal_range(hash); it != end; ++it)
      if (same_node(*it->second, *n) && (!group || group(*it->second) == own)) found = it->second;
    if (!found) {
      seen.emplace(hash, n);
      continue;
    }
    if (shown.contains(n) && !shown.insert(found).second) continue;
    for (uint32_t i = 0; i < n->outs.size(); ++i) {
      if (!storage.replace(n->out(i), found->out(i))) continue;
      merged.emplace(n->out(i), found->out(i));
      changed = true;
      ir::retire(g, *n);
    }
  }
  if (!changed) return false;
  for (Value& v : g.outputs)
    if (const Value* kept = v ? merged.find(v) : nullptr) v = *kept;
  g.remove_dead();
  return true;
}

}  // namespace vitrify::passes
