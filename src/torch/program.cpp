#include "torch/program.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/ScalarOps.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "torch/leaf_gradient.h"
#include "torch/learned.h"
#include "torch/tracer_impl.h"
#include "torch/versions.h"

namespace vitrify {

using torch::autograd::Edge;
using torch::autograd::Node;

ViewMode view_mode() {
  if (c10::InferenceMode::is_enabled()) return ViewMode::Inference;
  return c10::GradMode::is_enabled() ? ViewMode::Grad : ViewMode::NoGrad;
}

namespace {

// Of a result whose graph the program's own backward() has freed.
struct SpentNode final : torch::autograd::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override { TORCH_CHECK(false, torch::autograd::ERR_BACKWARD_TWICE); }
  std::string name() const override { return "VitrifyBackward"; }
};

}  // namespace

at::Tensor number_tensor(double v) {
  at::Tensor t = at::detail::scalar_tensor_static(v, at::kDouble, at::kCPU);
  t.unsafeGetTensorImpl()->set_wrapped_number(true);
  return t;
}

std::vector<at::Tensor> all_inputs(const Program& p, at::ArrayRef<at::Tensor> args, at::ArrayRef<double> live) {
  std::vector<at::Tensor> all(args.begin(), args.end());
  all.insert(all.end(), p.captured.begin(), p.captured.end());
  for (const LiveInput& in : p.live)
    if (in.grad_of >= 0) all[in.input] = all[static_cast<size_t>(in.grad_of)].grad();
  if (!p.numbers) return all;
  std::vector<const at::Tensor*> pointers;
  for (const at::Tensor& t : all) pointers.push_back(&t);
  std::vector<double> values;
  VT_CHECK(live.size() >= p.numbers->num_live, "{} numbers, {} expected", live.size(), p.numbers->num_live);
  if (!p.numbers->eval(live.data(), pointers.data(), values)) throw capture::CallRefused("a number leads another way");
  for (const LiveInput& in : p.live)
    if (in.grad_of < 0) all[in.input] = number_tensor(values[in.number]);
  return all;
}

// Numbers of nodes grow by thread, so that they order nothing; a node has a longer way to the leaves than all that it leads to.
bool leads_to(const Edge& from, const std::vector<Edge>& to) {
  std::unordered_set<Edge> ends;
  uint64_t shortest = UINT64_MAX;
  for (const Edge& e : to)
    if (e.function && ends.insert(e).second) shortest = std::min(shortest, e.function->topological_nr());
  if (!from.function || ends.empty()) return false;
  std::vector<const Node*> todo{from.function.get()};
  std::unordered_set<const Node*> seen(todo.begin(), todo.end());
  while (!todo.empty()) {
    const Node* n = todo.back();
    todo.pop_back();
    for (const Edge& e : n->next_edges()) {
      if (!e.function) continue;
      if (ends.contains(e)) return true;
      if (e.function->topological_nr() > shortest && seen.insert(e.function.get()).second) todo.push_back(e.function.get());
    }
  }
  return false;
}

void check_histories(const Program& p, const at::Tensor* const* inputs) {
  std::vector<Edge> sought;
  const bool crosses = std::ranges::any_of(p.facts, [](const InputFact& f) { return f.fact == Fact::Crossed; });
  for (const InputFact& f : p.facts)
    if (f.fact == Fact::Sought) {
      if (crosses) sought.push_back(torch::autograd::impl::gradient_edge(*inputs[f.input]));
      if (hooks_see_gradient(*inputs[f.input]))
        throw capture::CallRefused(
            fmt::format("hooks of {} see gradients that it takes itself", f.input < p.num_args ? "an argument" : "what it reaches"));
    }
  if (sought.empty()) return;
  for (const InputFact& f : p.facts)
    if (f.fact == Fact::Crossed && leads_to(torch::autograd::impl::gradient_edge(*inputs[f.input]), sought))
      throw capture::CallRefused("gradients that it takes itself go on through the history of what it is given");
}

void check_own_backward(const Program& p, at::ArrayRef<const at::Tensor*> inputs) {
  if (p.goes_by_name)
    for (const at::Tensor* t : inputs.slice(0, p.num_args))
      if (t && t->requires_grad() && std::ranges::any_of(inputs.slice(p.num_args), [&](const at::Tensor* o) { return o && o->is_same(*t); }))
        throw capture::CallRefused("may go back to an argument that it also reaches by itself");
  if (!p.goes_back) return;
  if (at::SavedTensorDefaultHooks::get_hooks()) throw capture::CallRefused("hooks on saved tensors are around gradients that it takes itself");
  if (p.mutations.empty()) return;
  std::unordered_map<const void*, const at::Tensor*> written;
  const auto counter = [](const at::Tensor* t) { return t && t->defined() ? counter_of(*t) : nullptr; };
  for (const Mutation& m : p.mutations)
    if (const void* c = counter(inputs[m.input])) written.try_emplace(c, inputs[m.input]);
  for (const at::Tensor* t : inputs)
    if (const auto at = written.find(counter(t)); at != written.end() && !t->is_same(*at->second))
      throw capture::CallRefused("it writes to one of two views of one tensor, beside gradients that it takes itself");
}

bool is_side_effect(const ir::Node& n) {
  const std::string& name = n.op->name;
  return (n.op->flags & ir::kEffect) && !name.starts_with("aten::") && !name.starts_with("prims::") && !name.starts_with("vitrify::");
}
bool has_side_effects(const ir::Graph& g) {
  return std::ranges::any_of(g.nodes(), [](const ir::Node* n) { return is_side_effect(*n); });
}

compat::NodePtr spent_node(const Program::Spent& s, const at::Tensor* const* inputs) {
  auto node = compat::make_node<SpentNode>();
  torch::autograd::edge_list next;
  for (uint32_t i : s.inputs)
    if (inputs[i]->defined() && inputs[i]->requires_grad()) next.push_back(torch::autograd::impl::gradient_edge(*inputs[i]));
  node->set_next_edges(std::move(next));
  return node;
}

void take_grads(const Program& p, const at::Tensor* const* inputs, std::vector<at::Tensor>& results) {
  for (const Program::Spent& s : p.spent) torch::autograd::set_history(results[s.result], spent_node(s, inputs));
  size_t made = 0;
  for (const GradWrite& w : p.grad_writes) {
    inputs[w.input]->mutable_grad() = w.result < 0 ? at::Tensor() : results[static_cast<size_t>(w.result)];
    made += w.result >= 0;
  }
  results.resize(results.size() - made);
}

std::vector<char> returned_outputs(const Program& p, size_t count) {
  std::vector<char> r(count);
  for (const ResultSpec& s : p.results)
    if (s.kind == ResultSpec::Kind::Value || s.kind == ResultSpec::Kind::ViewOfOutput) r[s.index] = 1;
  return r;
}

void complete(Program& p, const std::vector<at::Generator>& known) {
  for (ResultSpec& r : p.results)
    for (ResultSpec::ViewOp& v : r.path)
      if (v.mode == view_mode()) v.mode.reset();

  for (const ir::Node* n : p.graph->nodes()) {
    for (const ir::Arg& a : n->args) {
      auto* opaque = std::get_if<ir::OpaqueArg>(&a);
      if (!opaque) continue;
      const auto& v = *std::static_pointer_cast<c10::IValue>(p.graph->constants.at(opaque->index));
      if (!v.isGenerator()) continue;
      const at::Generator g = v.toGenerator();
      if (g == at::detail::getDefaultCPUGenerator()) continue;
      if (std::none_of(known.begin(), known.end(), [&](const at::Generator& k) { return k == g; }))
        capture::fail(n->op->name + " draws from a generator that the program makes");
    }
  }
}

}  // namespace vitrify
