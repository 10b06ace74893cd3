// Runs autograd's engine over the placeholders, and notes what a derivative has to know of how it went.
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <ranges>
#include <unordered_set>

#include "torch/absent.h"
#include "torch/derivatives.h"
#include "torch/slice.h"
#include "torch/stops.h"
#include "torch/tracer_impl.h"

namespace vitrify {

using capture::as_fake;
using capture::fail;
using capture::looks_at_values;
using torch::autograd::Edge;
using torch::autograd::Node;

namespace {

// On this thread, since the tracer belongs to it. Autocast holds for it where the backward is called under it, whatever the program was.
class BackwardState {
 public:
  explicit BackwardState(bool autocast) : multithreading_(c10::AutogradState::get_tls_state().get_multithreading_enabled()) {
    c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
    if (!autocast) no_autocast_.emplace(c10::autocast_dispatch_keyset);
  }
  ~BackwardState() { c10::AutogradState::get_tls_state().set_multithreading_enabled(multithreading_); }
  BackwardState(const BackwardState&) = delete;

 private:
  bool multithreading_;
  std::optional<c10::impl::ExcludeDispatchKeyGuard> no_autocast_;
};

// Hooks of the tensors that gradients are for run when a gradient arrives, as in eager, and their .grad is kept: not now, of placeholders.
class WithoutHooks {
 public:
  explicit WithoutHooks(const std::vector<Edge>& to) {
    std::unordered_set<Node*> seen;
    for (const Edge& e : to)
      if (e.function && seen.insert(e.function.get()).second) swap(kept_.emplace_back(e.function, Hooks()));
  }
  ~WithoutHooks() { std::ranges::for_each(kept_, swap); }
  WithoutHooks(const WithoutHooks&) = delete;

 private:
  struct Hooks {
    std::remove_cvref_t<decltype(std::declval<Node>().tensor_pre_hooks())> of_tensors;
    std::remove_cvref_t<decltype(std::declval<Node>().retains_grad_hooks())> that_retain;
  };
  static void swap(std::pair<compat::NodePtr, Hooks>& kept) {
    kept.second.of_tensors.swap(kept.first->tensor_pre_hooks());
    kept.second.that_retain.swap(kept.first->retains_grad_hooks());
  }
  std::vector<std::pair<compat::NodePtr, Hooks>> kept_;
};

}  // namespace

// What is done around each node of a graph. That it has given its gradients is noted: what the engine adds from then on is what it got from several.
class Tracer::Impl::Nodes {
 public:
  Nodes(std::vector<Edge> todo, const std::vector<Edge>& to, Impl& impl) : impl_(impl) {
    std::unordered_set<Node*> seen;
    for (const Edge& e : to) seen.insert(e.function.get());
    ends_at_.insert(seen.begin(), seen.end());
    while (!todo.empty()) {
      const Edge e = std::move(todo.back());
      todo.pop_back();
      if (!e.function || !seen.insert(e.function.get()).second) continue;
      hooks_.emplace_back(e.function, e.function->add_post_hook(std::make_unique<After>(*this, e.function.get())));
      const bool seen_there = looks_at_values(*e.function) || capture::of_python(*e.function);
      e.function->add_pre_hook(std::make_unique<Before>(*this, e.function.get(), seen_there));
      for (const Edge& next : e.function->next_edges()) todo.push_back(next);
    }
  }
  ~Nodes() {
    for (auto& [node, hook] : hooks_) {
      node->del_post_hook(hook);
      std::erase_if(node->pre_hooks(), [](const auto& h) { return dynamic_cast<Before*>(h.get()); });
    }
    impl_.summing = nullptr;
    impl_.given_now.clear();
    impl_.ends = std::move(ends_);
    impl_.ready = std::move(ready_);
    impl_.came = std::move(came_);
    impl_.held = std::move(shared_);
  }
  Nodes(const Nodes&) = delete;

 private:
  using variable_list = torch::autograd::variable_list;

  struct Before final : torch::autograd::FunctionPreHook {
    Before(Nodes& nodes, Node* node, bool seen) : nodes(nodes), node(node), seen(seen) {}
    variable_list operator()(const variable_list& grads) override {
      nodes.impl_.running = node->getptr();
      nodes.let_go(node);
      nodes.impl_.given_now.clear();
      for (const at::Tensor& g : grads)
        if (const auto* f = g.defined() ? capture::as_fake(g) : nullptr; f && f->view->storage->base) {
          nodes.came_[node].insert(root_of(f->view->storage->base).node->id);
          if (capture::of_python(*node)) nodes.impl_.given_now.push_back(f->view->storage);
        }
      if (looks_at_values(*node) || capture::checks_values(*node)) nodes.without_hooks_.emplace(*node);
      if (!seen || capture::chooses(*node)) return grads;
      if (nodes.impl_.options.keeps_attributes && capture::of_python(*node))
        nodes.same_ = nodes.impl_.options.keeps_attributes(*node, !nodes.impl_.done);
      nodes.mode_.emplace();
      if (grads.size() != 1 || !capture::is_replaced(*node)) return grads;
      nodes.held_ = grads[0];
      return {at::Tensor()};
    }
    Nodes& nodes;
    Node* node;
    bool seen;  // it runs with the mode on the stack
  };
  struct After final : torch::autograd::FunctionPostHook {
    After(Nodes& nodes, Node* node) : nodes(nodes), node(node) {}
    variable_list operator()(const variable_list& made, const variable_list& grads) override {
      nodes.mode_.reset();
      if (const auto same = std::exchange(nodes.same_, nullptr); same && !same())
        fail(fmt::format("{} changes attributes of its ctx, which another backward would find", node->name()));
      variable_list r = made;
      const bool of_batch = nodes.impl_.in_batch && !grads.empty() && grads[0].defined() && at::maybeGetBatchedImpl(grads[0]);
      const bool looks = looks_at_values(*node) && !(of_batch && capture::takes_batches(*node));
      if (nodes.impl_.in_batch && looks) fail(fmt::format("{} looks at values of a batch", node->name()));
      const at::Tensor held = std::exchange(nodes.held_, {});
      if (looks && made.size() == 1 && grads.size() == 1 && (held.defined() || grads[0].defined()))
        r[0] = capture::as_chosen(*node, held.defined() ? held : grads[0], made[0]);
      nodes.impl_.raise_where_false(*node, grads);
      nodes.without_hooks_.reset();
      nodes.impl_.running = {};
      nodes.impl_.summing = node;
      nodes.ends_.emplace_back(node, nodes.impl_.graph->next_id());
      for (const Edge& e : node->next_edges()) nodes.ready_[e.function.get()] = ++nodes.given_;
      nodes.hand_on(*node, r);
      return r;
    }
    Nodes& nodes;
    Node* node;
  };

  // A node has what it was given until it runs. A gradient's own node, which comes last here, would run first in eager: it is given what others have.
  void let_go(const Node* node) {
    for (const c10::TensorImpl* t : given_to_[node]) std::erase(holders_[t], node);
    given_to_.erase(node);
  }
  void hand_on(const Node& node, const variable_list& grads) {
    const auto each = [&](bool ends, const auto& f) {
      for (size_t i = 0; i < std::min<size_t>(grads.size(), node.num_outputs()); ++i)
        if (const Node* to = node.next_edge(i).function.get(); to && grads[i].defined() && ends_at_.contains(to) == ends)
          f(to, grads[i].unsafeGetTensorImpl());
    };
    each(false, [&](const Node* to, const c10::TensorImpl* t) {
      holders_[t].push_back(to);
      given_to_[to].push_back(t);
    });
    each(true, [&](const Node* to, const c10::TensorImpl* t) {
      if (const auto at = holders_.find(t); at != holders_.end() && !at->second.empty()) shared_.insert(to);
    });
  }
  std::vector<std::pair<compat::NodePtr, uintptr_t>> hooks_;
  std::optional<capture::Seen> mode_;
  std::optional<capture::WithoutHooksOnSaved> without_hooks_;  // of the node that runs
  at::Tensor held_;                                            // the gradient of the node that runs, where its formula is not to
  std::function<bool()> same_;                                 // of the node of Python that runs
  std::vector<std::pair<const Node*, uint32_t>> ends_;
  std::unordered_map<const Node*, size_t> ready_;
  std::map<const Node*, std::set<uint32_t>> came_;
  size_t given_ = 0;
  std::unordered_set<const Node*> ends_at_, shared_;
  std::unordered_map<const c10::TensorImpl*, std::vector<const Node*>> holders_;
  std::unordered_map<const Node*, std::vector<const c10::TensorImpl*>> given_to_;
  Impl& impl_;
};

// For a backward, no edge leads to a node that it goes round: eager's does not come to it, or raises there.
class Tracer::Impl::Round {
 public:
  Round(const Impl& impl, const Level& level, std::vector<Edge> todo) {
    if (impl.raising.empty() && level.raising.empty()) return;
    std::unordered_set<Node*> seen;
    while (!todo.empty()) {
      const compat::NodePtr n = todo.back().function;
      todo.pop_back();
      if (!n || !seen.insert(n.get()).second) continue;
      const auto raises_for = [&](size_t i) {
        return std::ranges::any_of(level.raising, [&](const Raising& r) { return r.node == n && std::ranges::find(r.edges, i) != r.edges.end(); });
      };
      for (size_t i = 0; i < n->next_edges().size(); ++i) {
        const Edge next = n->next_edge(i);
        if (!next.function) continue;
        if (raises_for(i) || impl.goes_round(level, next.function.get()))
          cut_.emplace_back(n, i, std::exchange(n->next_edges()[i], Edge()));
        else
          todo.push_back(next);
      }
    }
  }
  ~Round() {
    for (auto& [node, i, edge] : cut_) node->next_edges()[i] = std::move(edge);
  }
  Round(const Round&) = delete;

 private:
  std::vector<std::tuple<compat::NodePtr, size_t, Edge>> cut_;
};

std::vector<at::Tensor> Tracer::Impl::run_backward(const Level& level, const std::vector<at::Tensor>& tangents, bool create_graph,
                                                   const std::vector<TangentLayout>& how) {
  std::vector<Edge> from;
  std::vector<at::Tensor> defined, grads;
  const auto comes = [&](size_t k) {
    return (tangents[k].defined() || (k < how.size() && how[k].without)) && !goes_round(level, level.at(k).function.get());
  };
  for (size_t k = 0; k < tangents.size(); ++k)
    if (comes(k)) {
      const at::Tensor& t = tangents[k].defined() ? tangents[k] : level.tangent(k);
      from.push_back(tangents[k].defined() ? level.at(k) : Edge(compat::make_node<Without>(level.at(k), t), 0));
      defined.push_back(t);
    }
  const auto stops = static_cast<size_t>(std::ranges::count_if(how, &TangentLayout::stops));
  if (level.to.size() + stops == 0 || from.empty()) return std::vector<at::Tensor>(level.to.size() + stops);
  if (std::ranges::any_of(level.views, [](const auto& views) { return !views.empty(); })) {
    const capture::LastUsers last = capture::last_users(from, level.to);
    for (size_t k = 0, i = 0; k < level.views.size(); ++k) {
      if (!comes(k)) continue;
      if (const auto& views = level.views[k]; !views.empty() && tangents[k].defined()) {
        const bool known = k < how.size() && how[k].view >= 0;
        from[i] = capture::in_turn(from[i], known ? views.at(static_cast<size_t>(how[k].view)) : views.back(), last, tangents[k]);
      }
      ++i;
    }
  }
  const bool batched = std::ranges::any_of(how, [](const TangentLayout& l) { return l.batch != 0; });
  auto run = [&] {
    const BackwardState state(std::ranges::any_of(how, [](const TangentLayout& l) { return l.autocast != 0; }));
    std::optional<capture::InBatch> in_batch_now;  // it lets nobody draw
    if (batched) in_batch_now.emplace();
    capture::Unseen unseen;
    WithoutHooks no_hooks(level.to);
    const Stops stops(level, from, how);
    Round round(*this, level, from);  // not of edges that end before a checkpoint
    std::vector<Edge> to = level.to;
    to.insert(to.end(), stops.ends.begin(), stops.ends.end());
    running = {};
    Nodes nodes(from, to, *this);
    in_batch = batched;
    grads = torch::autograd::Engine::get_default_engine().execute(from, defined, /*keep_graph=*/true, create_graph, /*accumulate_grad=*/false, to);
  };
  if (options.without_gil)
    options.without_gil(run);
  else
    run();
  return grads;
}

}  // namespace vitrify
