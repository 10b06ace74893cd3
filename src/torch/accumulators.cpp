// What a capture records holds on to the nodes behind it, as long as the plan. An AccumulateGrad of a weight is to go with the last graph that leads
// to it, as in eager: it knows the shape that the weight had, and what hooks have been put on it. So what is recorded leads to nodes of its own
// there, but while a capture runs, when the program meets the weight itself.
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/variable.h>

#include "torch/tracer_impl.h"

namespace vitrify {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::Node;

namespace {

bool is_accumulator(const Edge& e) { return dynamic_cast<const AccumulateGrad*>(e.function.get()) != nullptr; }

// Without asking a view for its history, which would be made anew.
Edge history_of(const at::Tensor& t) {
  const auto* meta = t.defined() ? torch::autograd::impl::get_autograd_meta(t) : nullptr;
  return meta ? Edge(meta->grad_fn_, meta->output_nr_) : Edge();
}

}  // namespace

// All edges to these nodes lead to others. Nothing has changed when it throws.
void Tracer::Impl::redirect(const std::unordered_map<const Node*, Edge>& to) {
  std::vector<Edge> todo;
  std::vector<Edge*> changed;
  const auto comes_to = [&](Edge& e) {
    if (to.contains(e.function.get())) changed.push_back(&e);
    todo.push_back(e);
  };
  for (Level& l : levels) {
    for (std::vector<Edge>* edges : {&l.from, &l.inner, &l.to})
      for (Edge& e : *edges) comes_to(e);
    for (const auto* tensors : {&l.tangents, &l.inner_tangents})
      for (const at::Tensor& t : *tensors) todo.push_back(history_of(t));
    for (const Raising& r : l.raising) todo.emplace_back(r.node, 0);
  }
  for (const Raising& r : raising) todo.emplace_back(r.node, 0);
  for (const at::Tensor& t : may_be_found) todo.push_back(history_of(t));
  std::unordered_set<const Node*> seen;  // what lies behind what the program found is eager's
  for (Source& s : sources) {
    if (to.contains(s.edge.function.get())) changed.push_back(&s.edge);
    if (s.input >= static_cast<int32_t>(num_args))
      seen.insert(s.edge.function.get());
    else
      todo.push_back(history_of(s.fake));
  }
  const auto follow = [&](Node& n) {
    for (Edge& e : n.next_edges()) comes_to(e);
  };
  while (!todo.empty()) {
    const compat::NodePtr n = todo.back().function;
    todo.pop_back();
    if (!n || is_accumulator({n, 0}) || !seen.insert(n.get()).second) continue;
    follow(*n);
    if (auto* slices = dynamic_cast<torch::autograd::CopySlices*>(n.get()); slices && slices->fn) follow(*slices->fn);
  }
  for (Edge* e : changed) *e = to.at(e->function.get());
}

void Tracer::Impl::let_accumulators_go() {
  if (!hooked.empty()) return;  // what hooks were given is found by way of the tensor's own
  std::unordered_map<const Node*, Edge> to;
  for (Source& s : sources) {
    if (s.input < static_cast<int32_t>(num_args) || !s.fake.defined() || !is_accumulator(s.edge) || s.edge.function == s.accumulator) continue;
    if (!s.accumulator) s.accumulator = compat::make_node<AccumulateGrad>(s.real);
    to.emplace(s.edge.function.get(), Edge(s.accumulator, 0));
  }
  if (!to.empty()) redirect(to);
}

void Tracer::Impl::take_accumulators() {
  std::unordered_map<const Node*, Edge> to;
  for (const Source& s : sources) {
    if (!s.accumulator || s.edge.function != s.accumulator || !s.real.requires_grad() || !s.real.is_leaf()) continue;
    if (s.real.sym_sizes() != s.accumulator->input_metadata(0).shape_as_dim_vector())
      capture::fail(fmt::format("has read '{}', which is of another size by now", s.name));
    to.emplace(s.accumulator.get(), torch::autograd::impl::gradient_edge(s.real));
  }
  if (!to.empty()) redirect(to);
}

}  // namespace vitrify
