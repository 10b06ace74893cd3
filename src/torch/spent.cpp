// Results that the program's own gradients have gone through.
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_set>

#include "torch/tracer_impl.h"

namespace vitrify {

using capture::as_fake;
using capture::fail;
using capture::FakeImpl;
using torch::autograd::Edge;
using torch::autograd::Node;

namespace {

// What lies behind one of those is eager's own graph.
void add_leaves_behind(const Edge& from, std::vector<Edge>& to) {
  std::vector<Node*> todo{from.function.get()};
  std::unordered_set<const Node*> seen(todo.begin(), todo.end());
  for (const Edge& e : to) seen.insert(e.function.get());
  while (!todo.empty()) {
    Node* n = todo.back();
    todo.pop_back();
    const Edge own(n->getptr(), 0);
    if (dynamic_cast<torch::autograd::AccumulateGrad*>(n) && std::ranges::find(to, own) == to.end()) to.push_back(own);
    for (const Edge& e : n->next_edges())
      if (e.function && seen.insert(e.function.get()).second) todo.push_back(e.function.get());
  }
}

}  // namespace

// Autograd goes on by itself from what the program finds: what came to both of two, one behind the other, would be counted twice, and a capture would
// run eager's nodes between them.
void Tracer::Impl::refuse_found_behind_another() const {
  std::vector<Edge> found;
  for (const Source* s : inputs)
    if (s->edge.function && !is_argument(*s)) found.push_back(edge_in_calls(*s));
  for (const Source* s : inputs)
    if (s->fake.defined() && !is_argument(*s) && leads_to(s->edge, found))
      fail(fmt::format("reads '{}', which follows from another tensor that it reads", s->name));
  if (levels.empty()) return;
  // A Function may give a gradient to what no op has read: nobody would follow it there.
  std::unordered_set<const Node*> seen;
  for (const Source* s : inputs) seen.insert(s->edge.function.get());  // what lies behind is eager's own graph
  std::vector<Node*> todo;
  const auto come = [&](const Edge& e) {
    if (e.function && seen.insert(e.function.get()).second) todo.push_back(e.function.get());
  };
  for (const Edge& e : levels.back().from) come(e);
  while (!todo.empty()) {
    Node* n = todo.back();
    todo.pop_back();
    for (const Edge& e : n->next_edges()) come(e);
    const auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(n);
    if (!leaf || as_fake(leaf->variable)) continue;
    const auto known = by_real.find(leaf->variable.unsafeGetTensorImpl());
    if (known == by_real.end() || !known->second->fake.defined()) fail("gives a gradient to a tensor that no op of it reads");
  }
  for (const Source& s : sources) {
    const auto* meta = s.fake.defined() || !s.real.defined() ? nullptr : torch::autograd::impl::get_autograd_meta(s.real);
    if (meta && meta->grad_fn_ && seen.contains(meta->grad_fn_.get())) fail(fmt::format("gives a gradient to '{}', which no op of it reads", s.name));
  }
}

// A backward() of the program's own frees the graph it goes through. The results it came from keep a grad_fn, which can only say so.
void Tracer::Impl::find_spent(std::vector<at::Tensor>& tensors, Program& p) {
  if (!went_back) return;
  if (std::ranges::any_of(tensors, [](const at::Tensor& t) { return t.defined() && t.requires_grad(); })) refuse_found_behind_another();
  Level trial;
  std::vector<Edge> to;
  for (Source* s : inputs)
    if (s->fake.defined() && s->edge.function) to.push_back(s->edge);
  const uint32_t first_of_trials = graph->next_id();
  Level& all = levels.emplace_back();  // for note_raising()
  in_trial = true;
  for (const at::Tensor& t : tensors)
    if (t.defined() && t.requires_grad()) all.from.push_back(torch::autograd::impl::gradient_edge(t));
  const auto is_spent = [&](const FakeImpl& f) {
    while (true) {
      const uint32_t first = graph->next_id();
      try {
        run_backward(trial, {capture::make_fake(capture::detached_view(f.view), f.key_set())}, false);
        return false;
      } catch (const CaptureError&) {
        throw;
      } catch (const std::exception& e) {
        if (std::string_view(e.what()).find("backward through the graph a second time") != std::string_view::npos) return true;
        if (!notes_raising(e, first)) throw;
      }
    }
  };
  for (uint32_t o = 0; o < tensors.size(); ++o) {
    if (!tensors[o].defined() || !tensors[o].requires_grad()) continue;
    trial.from = {torch::autograd::impl::gradient_edge(tensors[o])};
    trial.to = to;
    add_leaves_behind(trial.from[0], trial.to);  // a leaf that the program has made
    if (!is_spent(*as_fake(fake_of(tensors[o])))) continue;
    std::vector<uint32_t> led_to;
    for (const Source* s : inputs) {
      if (!s->fake.defined() || !s->edge.function || !leads_to(trial.from[0], {s->edge})) continue;
      trial.to = {s->edge};
      if (!is_spent(*as_fake(fake_of(tensors[o])))) fail("returns what its backward() went through on the way to some inputs, and not to others");
      led_to.push_back(static_cast<uint32_t>(s->input));
    }
    if (std::ranges::any_of(p.mutations, [&](const Mutation& m) { return !m.metadata_only && m.output == o; }))
      fail("writes what its backward() went through");
    capture::refuse_hooks(trial.from, to);  // they run with its gradient, before that is known to be spent
    tensors[o].reset();
    for (uint32_t r = 0; r < p.results.size(); ++r) {
      const ResultSpec& how = p.results[r];
      const bool view_of_it = how.kind == ResultSpec::Kind::ViewOfValue && !how.path.empty() &&
                              p.results[how.index].kind == ResultSpec::Kind::Value && p.results[how.index].index == o;
      if (view_of_it || (how.kind == ResultSpec::Kind::ViewOfOutput && how.index == o)) fail("returns a view of what its backward() went through");
      if (how.kind == ResultSpec::Kind::Value && how.index == o) p.spent.push_back({r, led_to});
    }
  }
  in_trial = false;
  levels.pop_back();
  for (const ir::Node* n : graph->nodes())  // a trial is no call of the program's
    if (n->id >= first_of_trials && (n->op->flags & (ir::kRandom | ir::kEffect)))
      fail("takes gradients, and draws or has effects in other backwards");
}

}  // namespace vitrify
