#include "passes/partition.h"

#include <algorithm>
#include <boost/graph/adjacency_list.hpp>
#include <boost/graph/boykov_kolmogorov_max_flow.hpp>

#include "ir/node_map.h"

namespace vitrify::passes {

using ir::Node;
using ir::Value;

namespace {

using Traits = boost::adjacency_list_traits<boost::vecS, boost::vecS, boost::directedS>;
using Flow = boost::adjacency_list<
    boost::vecS, boost::vecS, boost::directedS,
    boost::property<
        boost::vertex_index_t, size_t,
        boost::property<boost::vertex_color_t, boost::default_color_type,
                        boost::property<boost::vertex_distance_t, int64_t, boost::property<boost::vertex_predecessor_t, Traits::edge_descriptor>>>>,
    boost::property<boost::edge_capacity_t, int64_t,
                    boost::property<boost::edge_residual_capacity_t, int64_t, boost::property<boost::edge_reverse_t, Traits::edge_descriptor>>>>;

constexpr int64_t kNever = int64_t{1} << 50;
constexpr int64_t kLaunch = 4096;  // bytes that move in the time of a launch

class Network {
 public:
  size_t vertex() { return boost::add_vertex(g_); }
  void edge(size_t from, size_t to, int64_t capacity) {
    auto capacities = boost::get(boost::edge_capacity, g_);
    auto reverses = boost::get(boost::edge_reverse, g_);
    auto e = boost::add_edge(from, to, g_).first, r = boost::add_edge(to, from, g_).first;
    capacities[e] = capacity;
    capacities[r] = 0;
    reverses[e] = r;
    reverses[r] = e;
  }
  // Vertices on the source's side of a minimum cut.
  std::vector<char> cut(size_t source, size_t sink) {
    const int64_t flow = boost::boykov_kolmogorov_max_flow(g_, source, sink);
    VT_CHECK(flow < kNever, "the backward needs a value that may be neither kept nor computed again");
    auto residual = boost::get(boost::edge_residual_capacity, g_);
    std::vector<char> side(boost::num_vertices(g_));
    std::vector<size_t> todo{source};
    side[source] = 1;
    while (!todo.empty()) {
      const size_t v = todo.back();
      todo.pop_back();
      for (auto [e, end] = boost::out_edges(v, g_); e != end; ++e)
        if (const size_t u = boost::target(*e, g_); residual[*e] > 0 && !side[u]) {
          side[u] = 1;
          todo.push_back(u);
        }
    }
    return side;
  }

 private:
  Flow g_;
};

// What the backward asks floats of the forward to be equal to (where an extremum was): computed again among other things, a product may be contracted
// into a sum where it was not, and nothing is equal.
ir::NodeSet compared_in_backward(const JointView& j) {
  ir::NodeSet seen(j.graph), exact(j.graph);
  std::vector<Value> todo;
  for (Node* n : const_cast<ir::Graph&>(j.graph).nodes())
    if (n->op->name == "aten::eq.Tensor" && j.in_backward(*n)) ir::for_each_input(*n, [&](Value& v) { todo.push_back(v); });
  while (!todo.empty()) {
    const Value v = todo.back();
    todo.pop_back();
    if (!is_float(v.type().dtype) || !seen.insert(v.node)) continue;
    if (j.in_backward(*v.node) || (v.node->op->flags & ir::kView))
      ir::for_each_input(*v.node, [&](Value& from) { todo.push_back(from); });
    else if (j.may_save(v))
      exact.insert(v.node);
  }
  return exact;
}

}  // namespace

int64_t likely(sym::Int i) { return i.is_const() ? i.value() : sym::has_hint(i) ? sym::hint(i) : 1024; }
int64_t likely_bytes(const ir::TensorType& t) {
  auto n = static_cast<int64_t>(size_of(t.dtype));
  for (sym::Int i : t.sizes) n *= likely(i);
  return n;
}

Partition partition(const JointView& j) {
  auto& g = const_cast<ir::Graph&>(j.graph);
  Partition p;
  p.backward.resize(g.next_id());
  for (size_t i = j.first_tangent; i < g.inputs.size(); ++i) p.backward[g.inputs[i].value.node->id] = 1;
  std::unordered_set<Value> visible;
  for (uint32_t o = 0; o < j.num_forward; ++o)
    if (g.outputs[o]) visible.insert(g.outputs[o]);

  const ir::NodeSet exact = compared_in_backward(j);
  auto recomputable = [&](const Node& n) { return j.recomputable(n) && !exact.contains(&n); };

  Network net;
  const size_t source = net.vertex(), sink = net.vertex();
  struct Ends {
    size_t in, out;
  };
  ir::ValueMap<Ends> ends(g);
  std::vector<Value> can_remake;
  for (Node* n : g.nodes()) {
    bool late = p.backward[n->id] || j.in_backward(*n);
    ir::for_each_input(*n, [&](Value& v) { late = late || p.backward[v.node->id]; });
    if (late) {
      p.backward[n->id] = 1;
      ir::for_each_input(*n, [&](Value& v) {
        if (const Ends* e = ends.find(v)) net.edge(e->out, sink, kNever);
      });
      continue;
    }
    const bool input = ir::is_input(*n), constant = ir::is_constant(*n);
    if (constant) continue;  // both sides have it
    const size_t compute = net.vertex();
    if (input || !recomputable(*n)) net.edge(source, compute, kNever);
    bool nothing = true;
    ir::for_each_input(*n, [&](Value& v) {
      if (const Ends* e = ends.find(v)) {
        net.edge(e->out, compute, kNever);
        nothing = false;
      }
    });
    for (uint32_t i = 0; i < n->outs.size(); ++i) {
      const Value v = n->out(i);
      // In memory already: it costs that it stays. Otherwise the forward would have to write it as well.
      const bool there = input || visible.contains(v) || j.materialized(*n);
      const bool copied = j.may_copy && !(input && j.may_save(v)) && j.may_copy(v);
      int64_t cost = input && !copied ? 1 : std::max<int64_t>(1, likely_bytes(v.type()) * (there && !copied ? 1 : 2));
      if (copied) cost += kLaunch;
      if (j.is_held && j.is_held(v)) cost = 1;
      if ((n->op->flags & ir::kView) || !(copied || j.may_save(v))) cost = kNever;  // a view is kept as what it looks at
      if (nothing && !input && recomputable(*n)) cost = kNever;                     // made of nothing: never kept
      const Ends e{net.vertex(), net.vertex()};
      net.edge(e.in, e.out, cost);
      ends.emplace(v, e);
    }
    for (uint32_t i = 0; i < n->outs.size(); ++i) {
      const Value v = n->out(i);
      std::vector<Value> parts;
      if (j.made_of && !recomputable(*n) && !exact.contains(n)) parts = j.made_of(v);
      const size_t made = parts.empty() ? compute : net.vertex();
      for (Value part : parts)
        if (const Ends* e = ends.find(part)) net.edge(e->out, made, kNever);
      if (!parts.empty()) can_remake.push_back(v);
      net.edge(made, ends.at(v).in, kNever);
    }
  }
  for (size_t o = j.num_forward; o < g.outputs.size(); ++o)
    if (const Ends* e = g.outputs[o] ? ends.find(g.outputs[o]) : nullptr) net.edge(e->out, sink, kNever);

  const std::vector<char> side = net.cut(source, sink);
  for (const auto& [v, e] : ends)
    if (side[e.in] && !side[e.out]) p.saved.push_back(v);
  std::ranges::copy_if(can_remake, std::back_inserter(p.remade), [&](Value v) { return !side[ends.at(v).in]; });
  return p;
}

}  // namespace vitrify::passes
