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

// Of the recorded graph, and where the trace keeps them: those that lead to one of these nodes.
std::vector<Edge*> Tracer::Impl::edges_to(const std::unordered_set<const Node*>& nodes) {
  std::vector<Edge> todo;
  std::vector<Edge*> found;
  const auto comes_to = [&](Edge& e) {
    if (nodes.contains(e.function.get())) found.push_back(&e);
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
    if (nodes.contains(s.edge.function.get())) found.push_back(&s.edge);
    if (s.input >= static_cast<int32_t>(num_args))
      seen.insert(s.edge.function.get());
    else
      todo.push_back(history_of(s.fake));
  }
  const auto follow = [&](Node& n) {
    for (Edge& e : n.next_edges()) comes_to(e);
  };
  while (!todo.empty()) {
    const compat::NodePtr n = std::move(todo.back().function);
    todo.pop_back();
    if (!n || is_accumulator({n, 0}) || !seen.insert(n.get()).second) continue;
    follow(*n);
    if (auto* slices = dynamic_cast<torch::autograd::CopySlices*>(n.get()); slices && slices->fn) follow(*slices->fn);
  }
  return found;
}

// Nothing has changed when it throws.
void Tracer::Impl::redirect(const std::unordered_map<const Node*, Edge>& to) {
  std::unordered_set<const Node*> nodes;
  for (const auto& [node, _] : to) nodes.insert(node);
  for (Edge* e : edges_to(nodes)) *e = to.at(e->function.get());
}

namespace {

using Weak = decltype(torch::autograd::AutogradMeta::grad_accumulator_);

// What the tensor had; null: nothing.
std::optional<Weak> put(const at::Tensor& into, const Weak& node) {
  auto* meta = torch::autograd::impl::get_autograd_meta(into);
  if (!meta) return {};
  const std::lock_guard lock(meta->mutex_);
  return std::exchange(meta->grad_accumulator_, node);
}

bool has(const at::Tensor& t, const compat::NodePtr& node) {
  auto* meta = torch::autograd::impl::get_autograd_meta(t);
  if (!meta) return false;
  const std::lock_guard lock(meta->mutex_);
  return compat::lock(meta->grad_accumulator_) == node;
}

}  // namespace

void Tracer::Impl::let_accumulators_go() {
  for (Source& s : sources)
    if (s.before) put(s.real, *std::exchange(s.before, std::nullopt));
  std::unordered_map<const Node*, Edge> to;
  std::unordered_set<const Node*> kept;
  for (Source& s : sources) {
    if (s.input < static_cast<int32_t>(num_args) || !s.fake.defined() || !is_accumulator(s.edge)) continue;
    if (s.edge.function != s.accumulator) {
      s.exchanged = !hooked.empty();  // what hooks were given is found by way of the node that the tensor had: the trace keeps that
      s.accumulator = s.exchanged ? s.edge.function : compat::NodePtr(compat::make_node<AccumulateGrad>(s.real));
      if (!s.exchanged) to.emplace(s.edge.function.get(), Edge(s.accumulator, 0));
    }
    if (s.exchanged) kept.insert(s.accumulator.get());
  }
  if (!to.empty()) redirect(to);
  if (kept.empty()) return;
  std::unordered_map<const Node*, size_t> ours;
  for (const Edge* e : edges_to(kept)) ++ours[e->function.get()];
  for (const Source& s : sources)  // the tensor gets another, where nobody else leads to this one
    if (s.exchanged && has(s.real, s.accumulator) && static_cast<size_t>(s.accumulator.use_count()) <= ours[s.accumulator.get()] + 1)
      put(s.real, Weak(compat::NodePtr()));
}

void Tracer::Impl::take_accumulators() {
  std::unordered_map<const Node*, Edge> to;
  for (Source& s : sources) {
    if (!s.accumulator || s.edge.function != s.accumulator || !s.real.requires_grad() || !s.real.is_leaf()) continue;
    if (s.exchanged)
      s.before = put(s.real, Weak(s.accumulator));
    else if (s.real.sym_sizes() == s.accumulator->input_metadata(0).shape_as_dim_vector())  // otherwise eager's old graph leads to the old one, too
      to.emplace(s.accumulator.get(), torch::autograd::impl::gradient_edge(s.real));
  }
  if (!to.empty()) redirect(to);
}

}  // namespace vitrify
