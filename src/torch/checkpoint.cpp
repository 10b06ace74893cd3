// Reentrant checkpoints (vitrify/_checkpoint.py): to autograd each is one node, of Python, whose gradients come from a backward of their own.
#include <ATen/SavedTensorHooks.h>
#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <algorithm>
#include <unordered_set>

#include "torch/slice.h"
#include "torch/tracer_impl.h"

namespace vitrify {

using torch::autograd::Edge;
using torch::autograd::Node;

void Tracer::note_checkpoint(const at::Tensor& result, size_t args) { impl_->checkpoints.push_back({result.grad_fn(), args}); }

const void* capture::hooks_on_saved() {
  const auto hooks = at::SavedTensorDefaultHooks::get_hooks();
  return hooks ? hooks->first.ptr(&hooks->first.pyinterpreter()) : nullptr;
}

void Tracer::note_saved(const std::vector<at::Tensor>& args) {
  Impl::SavedArguments& saved = impl_->saved_arguments.emplace_back();
  saved.from = at::sequence_number::peek();
  for (const at::Tensor& t : args)
    if (const auto* fake = capture::as_fake(impl_->fake_of(t))) {
      saved.values.push_back(root_of(fake->view->storage->base));
      saved.memory.push_back(fake->view->storage);
    }
}

void Tracer::note_cached(uintptr_t which, uint64_t first) { impl_->cached.push_back({which, first, at::sequence_number::peek()}); }

void Tracer::note_taken(uintptr_t which) {
  const auto at = std::ranges::find(impl_->cached, which, &Impl::Cached::which);
  if (at != impl_->cached.end()) at->once = true;
}

bool Tracer::takes_gradients() const { return impl_->in_backward || impl_->in_trial; }

bool Tracer::note_refusal(const std::string& of_grad) {
  if (impl_->in_backward) impl_->no_grad = of_grad;
  return impl_->in_backward;
}

bool Tracer::Impl::has_placeholder(const at::Tensor& real) const {
  return (real.unsafeGetTensorImpl()->is_wrapped_number() && !by_real.contains(real.unsafeGetTensorImpl())) ||
         std::ranges::any_of(sources, [&](const Source& s) { return s.real.is_same(real) && s.fake.defined() && !is_argument(s); });
}

at::Tensor Tracer::Impl::late_constant(const at::Tensor& real) {
  const auto known = std::ranges::find_if(met_late, [&](const auto& met) { return met.first.is_same(real); });
  if (known != met_late.end()) return known->second;
  check_in_scope(real);
  const at::Tensor now = real.detach().resolve_conj().resolve_neg();
  ir::TensorType type = type_of(now);
  type.wrapped_number = false;
  const ir::Value v = graph->add_constant(type, std::make_shared<at::Tensor>(now));
  made_late.push_back(v.node);
  return met_late.emplace_back(real, new_tensor(v)).second;
}

// Eager's backward in the backward adds to its .grad.
bool Tracer::note_late(const at::Tensor& leaf, const at::Tensor& grad) {
  Impl& m = *impl_;
  const auto is_leaf = [&](const at::Tensor& t) { return t.defined() && t.is_same(leaf); };
  if (is_fake(leaf) && std::ranges::none_of(m.inputs, is_leaf, [](const Impl::Source* s) { return s->fake; }) &&
      std::ranges::none_of(m.may_be_found, is_leaf))
    return false;
  if (is_fake(leaf) || !m.once)
    capture::fail(
        "a reentrant checkpoint's function comes to a tensor that needs gradients by now and did not in the forward: that is to be changed "
        "before the call, or the checkpoint takes use_reentrant=False");
  if (!grad.defined()) return true;
  const ir::Value to = m.graph->add_constant(type_of(leaf), std::make_shared<at::Tensor>(leaf));
  m.made_late.push_back(to.node);
  const ir::Value value = m.read(*capture::as_fake(m.fake_of(grad))->view);
  m.made_late.push_back(m.graph->append(m.graph->op("vitrify::accumulate", ir::kEffect), {to, value}, {}));
  return true;
}

// Nodes of a derivative that has been taken out of the graph by then.
void Tracer::Impl::forget_late() {
  once = false;
  met_late.clear();
  for (ir::Node* n : made_late)
    if (n->outs.empty())
      graph->erase(n);
    else
      graph->constants[static_cast<size_t>(std::get<sym::Int>(n->args[0]).value())] = {};
  made_late.clear();
}

namespace {

void accumulate(const at::Tensor& leaf, const at::Tensor& grad) {
  torch::autograd::Engine::get_default_engine().execute({torch::autograd::impl::gradient_edge(leaf)}, {grad}, false, false, true, {});
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(vitrify, m) { m.def("accumulate(Tensor leaf, Tensor grad) -> ()", accumulate); }

std::vector<at::Tensor> Tracer::gradients(const std::vector<at::Tensor>& of, const std::vector<at::Tensor>& tangents,
                                          const std::vector<at::Tensor>& to) {
  Impl::Level level;
  for (const at::Tensor& t : of) level.from.push_back(torch::autograd::impl::gradient_edge(t));
  for (const at::Tensor& t : to) level.to.push_back(torch::autograd::impl::gradient_edge(t));
  capture::refuse_hooks(level.from, level.to);
  return impl_->run_backward(level, tangents, false, std::vector<TangentLayout>(tangents.size(), {.autocast = 1}));  // as it is around it
}

// In eager nothing leads from a checkpoint to what its function found elsewhere.
void Tracer::Impl::find_checkpoints(JointProgram& j, const Level& level) const {
  if (checkpoints.empty()) return;
  j.no_grad = no_grad;
  // Calls `met` with each edge that is come to.
  auto walk = [&](std::vector<Edge> todo, auto&& met) {
    std::unordered_set<const Node*> seen;
    while (!todo.empty()) {
      const Edge e = std::move(todo.back());
      todo.pop_back();
      if (!e.function) continue;
      const auto c = std::ranges::find(checkpoints, e.function.get(), [](const Checkpoint& c) { return c.node.get(); });
      met(e, c == checkpoints.end() ? nullptr : &*c);
      if (!seen.insert(e.function.get()).second) continue;
      const auto& next = e.function->next_edges();
      todo.insert(todo.end(), next.begin(), c == checkpoints.end() ? next.end() : next.begin() + static_cast<std::ptrdiff_t>(c->args));
    }
  };
  for (size_t k = 0; k < j.places(); ++k) {
    JointProgram::Way& way = j.way(k);
    std::vector<Edge> behind;
    walk({level.at(k)}, [&](const Edge& e, const Checkpoint* c) {
      if (!c) return;
      way.checkpointed = true;
      const auto& next = e.function->next_edges();
      behind.insert(behind.end(), next.begin(), next.begin() + static_cast<std::ptrdiff_t>(c->args));
    });
    walk(behind, [&](const Edge& e, const Checkpoint*) {
      for (size_t i = 0; i < level.to.size(); ++i)
        if (level.to[i] == e) way.barred.push_back(j.place_of(level.of[i]));
      for (uint32_t place = 0; place < j.places(); ++place)
        if (level.at(place) == e) way.barred_places.push_back(place);
    });
  }
}

}  // namespace vitrify
