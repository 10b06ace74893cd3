// What a program reads of a tensor that no op says: a guard where the next call can be compared with this one, else the end of the capture.
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "torch/leaf_gradient.h"
#include "torch/slice.h"
#include "torch/tracer_impl.h"

namespace vitrify {

using capture::as_fake;
using capture::FakeImpl;
using torch::autograd::Edge;
using torch::autograd::Node;

void Tracer::Impl::add_fact(int32_t input, Fact fact) {
  const auto of = static_cast<uint32_t>(input);
  if (std::ranges::none_of(facts, [&](const InputFact& f) { return f.input == of && f.fact == fact; })) facts.push_back({of, fact});
}

void Tracer::note_fact(const at::Tensor& t, Fact fact, std::string_view name) {
  Impl& m = *impl_;
  const auto refuse = [&] {
    note_failure(fmt::format("reads {} of a tensor, which calls may not have in common", name));
    throw CaptureError(*m.failure);
  };
  if (fact == Fact::Other) refuse();
  const auto refuse_hooks = [&] {
    note_failure("it registers a hook on a tensor, or looks at those it has");
    throw CaptureError(*m.failure);
  };
  FakeImpl* f = as_fake(t);
  if (!f) {
    const auto known = m.by_real.find(t.unsafeGetTensorImpl());
    if (known == m.by_real.end()) {
      if (fact == Fact::Hooks) refuse_hooks();  // what the eager call would register again
      return;                                   // the program's own
    }
    // What it is itself the program sees: what of that may be another in the next call?
    if (fact == Fact::History) {  // one that it has by now is put back at the end, without what retain_grad() has hung there
      const FakeImpl* met = as_fake(known->second->fake);
      if (met && met->view->storage->generation && t.requires_grad() && !known->second->real.is_leaf()) refuse();
      return;
    }
    if (fact == Fact::Hooks) refuse_hooks();
    if (fact != Fact::View && fact != Fact::Offset) refuse();
    const capture::Paused paused;
    f = as_fake(m.fake_of(t));
  }
  capture::StorageState& s = *f->view->storage;
  if (s.trace != m.trace) return;
  if ((fact == Fact::Offset || fact == Fact::Memory) && s.in_part) refuse();
  if (const ir::Value of = s.base ? root_of(s.base) : ir::Value();
      of && is_input(*of.node) && m.inputs[input_index(*of.node)]->kind == ir::InputKind::Tangent)
    if (fact == Fact::Version || fact == Fact::View || fact == Fact::Offset || fact == Fact::Memory) refuse();  // of each backward's own
  if (fact == Fact::Offset || fact == Fact::Memory) {
    f->specialize_offset();
    if (s.input < 0) m.assume_place(s);
  }
  if (fact == Fact::Memory)
    for (const ir::Dims* dims : {&s.type.sizes, &s.type.strides})
      for (const sym::Int& i : *dims) s.ctx->specialize(i);
  if (s.input < 0) return;
  const Impl::Source& source = *m.inputs[static_cast<size_t>(s.input)];
  const at::Tensor& real = source.real;
  switch (fact) {
    case Fact::Version:
      for (const capture::View* v = f->view.get(); v; v = v->parent.get())
        if (v->own_versions) return;
      refuse();
      break;
    case Fact::View:
      if (as_fake(t) && real.is_view()) refuse();  // the placeholder is none
      break;
    case Fact::Memory:
      if (s.resized || !real.defined() || std::ranges::any_of(m.inputs, [&](const Impl::Source* o) {
            return o != &source && o->real.defined() && o->real.has_storage() && o->real.is_alias_of(real);
          }))
        refuse();  // placeholders have memory of their own each
      s.storage.set_nbytes(real.storage().nbytes());
      break;
    case Fact::History:
      if (source.fake.is_same(t) && real.requires_grad() && !real.is_leaf()) refuse();
      return;  // of leaves it is the same for all
    case Fact::Hooks:
      if (source.fake.is_same(t)) refuse_hooks();
      return;
    case Fact::Address:
      return;  // a placeholder refuses
    default:
      break;
  }
  m.add_fact(s.input, fact);
}

// An argument's placeholder and the tensor itself, which the program may find as well, each have a requires_grad of their own.
void Tracer::note_requires_grad(const at::Tensor& t, bool needed) {
  Impl& m = *impl_;
  const auto refuse = [&](std::string why) {
    note_failure(std::move(why));
    throw CaptureError(*m.failure);
  };
  const auto itself = std::ranges::find_if(m.sources, [&](const Impl::Source& s) { return (as_fake(t) ? s.fake : s.real).is_same(t); });
  const bool given = itself != m.sources.end();
  if (given && itself->real.is_view() && itself->real.is_leaf()) {  // it needs what its base does, whatever is set of itself
    const at::Tensor base(itself->real._base());
    if (base.requires_grad() || std::ranges::any_of(m.sources, [&](const Impl::Source& s) { return s.real.defined() && s.real.is_same(base); }))
      refuse("freezes or unfreezes a view, which needs gradients with its base");
  }
  if (t.requires_grad() == needed) return;
  if ((given || !needed) && (!m.hooked.empty() || !m.saved_arguments.empty()))
    refuse("freezes or unfreezes a tensor beside a checkpoint, whose function may read it again");
  if (!given) return;
  bool argument = false, found = !as_fake(t);
  for (Impl::Source& s : m.sources) {
    if (!s.real.is_same(itself->real)) continue;
    (m.is_argument(s) ? argument : found) = true;
    s.frozen = m.freezes = true;
  }
  if (argument && found) refuse(fmt::format("freezes or unfreezes '{}', an argument that it also reaches by itself", itself->name));
}

// What the program is given has no history here, but for what it reaches by itself: eager's gradients go on through that.
void Tracer::note_gradients(const std::vector<Edge>& of, const std::vector<at::Tensor>& to, const std::vector<Edge>& to_edges) {
  Impl& m = *impl_;
  const auto has_history = [](const Impl::Source* s) {
    return s->fake.defined() && s->edge.function && !dynamic_cast<const torch::autograd::AccumulateGrad*>(s->edge.function.get());
  };
  if (m.in_backward) {  // by then they may have hooks that see that, and be asked for otherwise
    const auto is_made_before = [&](const at::Tensor& t) {
      const FakeImpl* f = as_fake(t);
      return f ? !f->view->round : m.by_real.contains(t.unsafeGetTensorImpl());
    };
    const auto ends_at = [&](const Impl::Source* s) {
      return s->edge.function && std::ranges::any_of(of, [&](const Edge& e) { return leads_to(e, {s->edge}); });
    };
    if (!to_edges.empty() || std::ranges::any_of(to, is_made_before) || (to.empty() && std::ranges::any_of(m.inputs, ends_at))) {
      note_failure("takes gradients in a backward of its own by what it was given or has made before");
      throw CaptureError(*m.failure);
    }
  }
  m.went_back = true;
  const bool any_history = std::ranges::any_of(m.inputs, has_history);
  for (const at::Tensor& t : to) {  // that no op has met
    if (as_fake(t)) continue;
    const auto known = m.by_real.find(t.unsafeGetTensorImpl());
    if (known == m.by_real.end()) continue;
    if (m.is_argument(*known->second) && t.requires_grad()) {
      note_failure(fmt::format("goes back to '{}', which it also reaches by itself", known->second->name));
      throw CaptureError(*m.failure);
    }
    if (!any_history && !t.requires_grad()) continue;
    const capture::Paused paused;
    m.fake_of(t);
  }
  for (const Impl::Source* s : m.inputs)
    if (s->real.defined() && s->real.requires_grad() && gradient_of_leaf(s->real.unsafeGetTensorImpl()) != kUsualGradient) {
      note_failure(fmt::format("takes gradients itself, and those of '{}' have another dtype (grad_dtype), or it is a view that gets none", s->name));
      throw CaptureError(*m.failure);
    }
  const bool all = to.empty() && to_edges.empty();
  std::vector<Edge> ends = to_edges;
  for (const at::Tensor& t : to)
    if (Edge e = t.requires_grad() ? torch::autograd::impl::gradient_edge(t) : Edge(); e.function) ends.push_back(std::move(e));
  uint64_t shortest = all || ends.empty() || any_history ? 0 : UINT64_MAX;  // of placeholders with a history the paths are short
  for (const Edge& e : ends) shortest = std::min(shortest, e.function->topological_nr());
  std::unordered_set<const Node*> come_to;
  std::vector<const Node*> todo;
  const auto come = [&](const Edge& e) {
    if (e.function && e.function->topological_nr() >= shortest && come_to.insert(e.function.get()).second) todo.push_back(e.function.get());
  };
  for (const Edge& e : of) come(e);
  while (!todo.empty()) {
    const Node* n = todo.back();
    todo.pop_back();
    for (const Edge& e : n->next_edges()) come(e);
  }
  for (const Impl::Source* s : m.inputs) {  // its hooks are not those of a placeholder, and others by the time of another call
    if (!s->real.defined() || !s->edge.function) continue;
    if (all ? !come_to.contains(s->edge.function.get()) : std::ranges::find(ends, s->edge) == ends.end()) continue;
    if (hooks_see_gradient(s->real)) {
      note_failure(fmt::format("hooks of {} see gradients that it takes itself", m.is_argument(*s) ? "an argument" : s->name));
      throw CaptureError(*m.failure);
    }
    m.add_fact(s->input, Fact::Sought);
  }
  if (!any_history) return;
  for (const Impl::Source* crossed : m.inputs) {
    if (!has_history(crossed) || !come_to.contains(crossed->edge.function.get())) continue;
    if (all && !m.is_argument(*crossed)) {  // eager's own nodes would run on placeholders, and be freed
      note_failure("a backward of its own goes on through the history of what it finds");
      throw CaptureError(*m.failure);
    }
    for (const Impl::Source* sought : m.inputs) {
      if (sought == crossed || !sought->fake.defined() || !sought->edge.function) continue;
      if (!all && std::ranges::find(ends, sought->edge) == ends.end()) continue;
      if (leads_to(m.edge_in_calls(*crossed), {m.edge_in_calls(*sought)})) {
        note_failure("gradients that it takes itself go on through the history of what it is given");
        throw CaptureError(*m.failure);
      }
      if (!m.is_argument(*crossed) && !m.is_argument(*sought)) continue;  // neither changes
      m.add_fact(crossed->input, Fact::Crossed);
      m.add_fact(sought->input, Fact::Sought);
    }
  }
}

}  // namespace vitrify
