#include "torch/as_it_was.h"

#include <algorithm>
#include <span>
#include <unordered_set>

#include "ops/lowering.h"
#include "torch/slice.h"

namespace vitrify {

using ir::Value;

bool recomputable(const ir::Node& n) {
  if (n.op->flags & ir::kView) return true;
  return !(n.op->flags & ((ir::kRandom | ir::kEffect) | ir::kDataDependent)) && ops::is_elementwise(n.op->name);
}

bool is_visible(const JointProgram& j, Value given) {
  if (std::ranges::find(j.was, given, &JointProgram::Was::was) != j.was.end()) return false;
  return is_input(*given.node) || std::ranges::find(j.results, given) != j.results.end();
}

// For what was detached then an alias stands (Tracer::Impl::read_noted).
void read_early_views(Snapshots& as, ir::Node* n, const ir::NodeSet& late) {
  ir::for_each_input(*n, [&](Value& v) {
    if (!(v.node->op->flags & ir::kView)) return;
    const bool detached = v.node->op->name == "aten::alias" && !late.contains(std::get<Value>(v.node->args[0]).node);
    if (detached || !late.contains(v.node)) v = as.of(v, n);
  });
}

Lost::Lost(const ir::Graph& g, const std::vector<Value>& given, const std::vector<Value>& lost) : is_(g) {
  for (Value v : lost) is_.emplace(v, true);
  for (Value v : given) is_.emplace(v, false);
}

bool Lost::contains(Value v) {
  if (const bool* known = is_.find(v)) return *known;
  const bool r = makes(v);
  is_.emplace(v, bool(r));
  return r;
}

bool Lost::makes(Value v) {
  bool r = false;
  ir::for_each_input(*v.node, [&](Value& of) { r = r || contains(of); });
  return r;
}

void read_snapshots(ir::Graph& g, const JointProgram& j, const std::vector<Saved>& saved, std::vector<Value>& given, const ir::NodeSet& late) {
  ir::ValueMap<Value> kept(g), memories(g);
  std::vector<Value> gone;
  const std::span before(given.begin(), saved.size());
  for (const Mutation& m : j.program.mutations)
    if (const Value v = given[saved.size() + m.input]; std::ranges::find(before, v) == before.end()) gone.push_back(v);
  Lost lost(g, given, gone);
  std::unordered_set<Value> results;
  const std::vector<ir::Node*> order = g.nodes();
  for (size_t k = 0; k < saved.size(); ++k) {
    if (saved[k].kind == Saved::Kind::Result) results.insert(given[k]);
    if (!saved[k].snapshot) continue;
    const auto next = is_input(*given[k].node) ? std::ranges::find_if(order, [](const ir::Node* n) { return !n->op->name.starts_with("graph::"); })
                                               : std::next(std::ranges::find(order, given[k].node));
    if (next == order.end()) continue;
    const Value was = copy_before(g, *next, given[k]);
    (saved[k].kind == Saved::Kind::Private ? kept : memories).emplace(given[k], was);
    given[k] = was;
  }
  Snapshots as_it_was(g, {}, [&](Value v, ir::Node* before) -> Value {
    if (const Value* was = kept.find(v)) return *was;
    if (results.contains(v) && recomputable(*v.node) && !lost.makes(v)) return again_before(g, before, v);
    const Value* was = memories.find(v);
    return was ? *was : Value();
  });
  Snapshots of_memory(g, {}, [&](Value v, ir::Node*) {
    const Value* was = memories.find(v);
    return was ? *was : Value();
  });
  for (ir::Node* n : order)
    if (late.contains(n))
      read_early_views(of_memory, n, late);
    else
      as_it_was.redirect(n);
}

// A result that is cheap to make is made again as it was by the level that has made it.
void read_as_was(ir::Graph& g, const JointProgram& j, const std::vector<Value>& now, const std::vector<Value>& given,
                 const std::function<int(const ir::Node&)>& level_of) {
  std::unordered_set<Value> results;
  for (size_t i = 0; i < j.given.size(); ++i)
    if (std::ranges::find(j.results, j.given[i]) != j.results.end()) results.insert(given[i]);
  if (j.was.empty() && results.empty()) return;
  std::vector<Value> gone;
  for (size_t i = 0; i < j.given.size(); ++i)
    if (j.unkept.contains(j.given[i])) gone.push_back(given[i]);
  Lost lost(g, given, gone);
  for (int level = 0; level < static_cast<int>(j.level); ++level) {
    Snapshots as_it_was(g, {}, [&](Value v, ir::Node* before) -> Value {
      for (size_t i = 0; i < j.was.size(); ++i)
        if (static_cast<int>(j.was[i].level) == level && now[i] == v) return given[j.place_of(j.was[i].was)];
      const bool made = results.contains(v) && recomputable(*v.node) && level_of(*v.node) == level && !lost.makes(v);
      return made ? again_before(g, before, v) : Value();
    });
    const std::vector<ir::Node*> order = g.nodes();
    for (ir::Node* n : order)
      if (!n->op->name.starts_with("graph::") && level_of(*n) == level) as_it_was.redirect(n);
  }
}

}  // namespace vitrify
