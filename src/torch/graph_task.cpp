#include "torch/graph_task.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "torch/compat.h"
#include "torch/derivatives.h"

namespace vitrify {

using torch::autograd::Edge;
using torch::autograd::Node;

namespace {

using torch::autograd::GraphTask;
using Task = GraphTask::ExecInfo;

// torch gives the parts of the task under way, of which this is one, and not the task.
GraphTask* current_task() {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
  constexpr size_t kOffset = offsetof(GraphTask, nodes_in_graph_);
#pragma GCC diagnostic pop
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  return nodes ? reinterpret_cast<GraphTask*>(reinterpret_cast<char*>(const_cast<std::unordered_set<Node*>*>(nodes)) - kOffset) : nullptr;
}

const Task* task_of(const Edge& e) {
  const auto* tasks = torch::autograd::get_current_graph_task_exec_info();
  if (!tasks) return nullptr;
  const auto at = tasks->find(e.function.get());
  return at == tasks->end() ? nullptr : &at->second;
}

bool runs(const Edge& e, const Task* task) { return e.is_valid() && (task ? task->should_execute() : !is_of_grad()); }

}  // namespace

bool is_of_grad() {
  const auto* tasks = torch::autograd::get_current_graph_task_exec_info();
  return tasks && !tasks->empty() && !tasks->contains(nullptr);
}

bool comes_to(const Edge& e) { return runs(e, task_of(e)); }
bool adds_to_grad(const Edge& e) {
  if (!dynamic_cast<const torch::autograd::AccumulateGrad*>(e.function.get())) return false;
  const Task* task = task_of(e);
  return task ? task->needed_ : !is_of_grad();
}

bool comes_to_node(const Node* n) {
  const auto* all = torch::autograd::get_current_graph_task_nodes_in_graph();
  return all && all->contains(const_cast<Node*>(n));
}

// Nobody notices when it is called without a gradient.
static bool is_silent(const Node& n) {
  return dynamic_cast<const torch::autograd::AccumulateGrad*>(&n) && const_cast<Node&>(n).tensor_pre_hooks().empty() &&
         const_cast<Node&>(n).pre_hooks().empty() && const_cast<Node&>(n).post_hooks().empty() && !n.tensor_post_acc_grad_hooks();
}

// All of these have come, and none is defined.
static bool is_nothing(GraphTask& task, Node* n) {
  const auto at = task.not_ready_.find(n);
  return at == task.not_ready_.end() || std::ranges::none_of(at->second.buffer, [](const at::Tensor& t) { return t.defined(); });
}

struct TakenOff {
  std::unordered_set<Node*> nodes;  // that nothing leads to any more
  std::vector<Node*> ready;         // they have gradients, and wait for one thing more, which is to be given to them: see go_on_to
};

// Eager does not come to `n`, to which this backward comes by `edges` edges that are still to be gone along: takes off what those behind it wait for
// on its account. None, where something else comes to it, or where some are ready and cannot be gone on to.
static std::optional<TakenOff> take_off(GraphTask& task, Node* n, int edges, bool can_go_on) {
  const auto is_to_run = [&](Node* n) {
    if (task.exec_info_.empty()) return true;
    const auto at = task.exec_info_.find(n);
    return at != task.exec_info_.end() && at->second.should_execute();
  };
  std::lock_guard lock(task.mutex_);
  const auto waits = task.dependencies_.find(n);
  if (waits == task.dependencies_.end() || waits->second != edges || !is_nothing(task, n)) return {};
  TakenOff off{{n}, {}};
  std::unordered_map<Node*, int> less;
  std::vector<Node*> open{n};
  while (!open.empty()) {
    Node* of = open.back();
    open.pop_back();
    for (const Edge& e : of->next_edges()) {
      if (!e.function || !is_to_run(e.function.get())) continue;
      const auto at = task.dependencies_.find(e.function.get());
      if (at == task.dependencies_.end()) return {};
      if (++less[at->first] != at->second) continue;
      if (!is_nothing(task, at->first))
        off.ready.push_back(at->first);
      else if (off.nodes.insert(at->first).second)
        open.push_back(at->first);
    }
  }
  if (!off.ready.empty() && !can_go_on) return {};
  for (auto [of, count] : less)
    if (off.nodes.contains(of))
      task.dependencies_.erase(of);
    else
      task.dependencies_[of] -= count;
  for (Node* of : off.ready) task.dependencies_[of] = 1;
  for (Node* o : off.nodes) task.not_ready_.erase(o);
  return off;
}

// Which nodes are to run is of each backward: all, where it does not say. That it says so is what reentrant checkpoints take for grad(), and refuse:
// nodes of Python may be such.
static bool can_keep_from_running(const GraphTask& task) {
  return !task.exec_info_.empty() || std::ranges::none_of(task.nodes_in_graph_, [](const Node* n) { return capture::of_python(*n); });
}
static bool keep_from_running(GraphTask& task, const std::unordered_set<Node*>& nodes) {
  auto& runs = task.exec_info_;
  if (!can_keep_from_running(task)) return false;
  if (runs.empty()) {
    for (Node* n : task.nodes_in_graph_) runs[n].needed_ = true;
    for (Node* n : task.graph_roots_) runs[n].needed_ = true;
    runs[nullptr];  // it is no grad()
  }
  for (Node* n : nodes)
    if (const auto at = runs.find(n); at != runs.end()) {
      at->second.needed_ = false;
      at->second.captures_.reset();
    }
  return true;
}

bool strides_show(const Node& node, size_t edges) {
  for (size_t i = 0; i < edges; ++i) {
    const Edge& e = node.next_edge(i);
    const Task* task = task_of(e);
    if (!runs(e, task)) continue;
    if (task && task->captures_) return true;
    Node& next = *e.function;
    if (!dynamic_cast<const torch::autograd::AccumulateGrad*>(&next) || !next.tensor_pre_hooks().empty()) return true;
    if (!next.pre_hooks().empty() || !next.post_hooks().empty()) return true;
  }
  return false;
}

bool strides_of_ones_show(const Node& node) {
  for (const Edge& e : node.next_edges()) {
    auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(e.function.get());
    if (leaf && runs(e, task_of(e)) && !leaf->variable.grad().defined() && std::ranges::count(leaf->variable.sizes(), 1)) return true;
  }
  return false;
}

namespace {

// Edges of `node` that lead nowhere until the backward under way is done.
struct Cut {
  compat::NodePtr node;
  std::vector<std::pair<size_t, Edge>> edges;
  void restore() {
    for (auto& [i, e] : std::exchange(edges, {})) node->next_edges()[i] = std::move(e);
  }
  ~Cut() { restore(); }
};

void cut(Node& node, const std::vector<size_t>& edges) {
  if (edges.empty()) return;
  auto c = std::make_shared<Cut>();
  c->node = node.getptr();
  for (size_t i : edges) c->edges.emplace_back(i, std::exchange(node.next_edges()[i], Edge()));
  torch::autograd::Engine::get_default_engine().queue_callback([c] {});
}

// Has nothing to give: what it leads to goes on with what it has.
struct GoOn final : Node {
  explicit GoOn(torch::autograd::edge_list&& next) : Node(/*sequence_nr=*/UINT64_MAX, std::move(next)) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override {
    if (const auto c = instead_of.lock()) c->restore();
    return torch::autograd::variable_list(num_outputs());
  }
  std::weak_ptr<Cut> instead_of;
};

// Edge `i` of `node`, which runs, leads to all of these until they have gone on. The engine keeps what is ready to itself.
void go_on_to(GraphTask& task, Node& node, size_t i, const std::vector<Node*>& ready) {
  torch::autograd::edge_list next;
  for (Node* n : ready) next.emplace_back(n->getptr(), 0);
  auto between = compat::make_node<GoOn>(std::move(next));
  between->add_input_metadata(Node::undefined_input());
  {
    std::lock_guard lock(task.mutex_);
    task.dependencies_[between.get()] = 1;
    if (!task.exec_info_.empty()) task.exec_info_[between.get()].needed_ = true;
  }
  auto c = std::make_shared<Cut>();
  between->instead_of = c;
  c->node = node.getptr();
  c->edges.emplace_back(i, std::exchange(node.next_edges()[i], Edge(std::move(between), 0)));
  torch::autograd::Engine::get_default_engine().queue_callback([c] {});
}

// Takes these edges of `node` out of the backward under way, with what they alone lead to; `others` lead there by way of other nodes.
bool leave_out(GraphTask& task, Node& node, Node* n, std::vector<size_t> edges, int others, std::vector<size_t>& to_cut) {
  const auto off = take_off(task, n, static_cast<int>(edges.size()) + others, !edges.empty());
  if (!off) return false;
  const bool kept = keep_from_running(task, off->nodes);
  if (!off->ready.empty()) {
    go_on_to(task, node, edges.front(), off->ready);
    edges.erase(edges.begin());
  }
  if (!kept) to_cut.insert(to_cut.end(), edges.begin(), edges.end());
  return true;
}

bool is_observed(Node& n, const Task* task) {
  return !n.tensor_pre_hooks().empty() || !n.pre_hooks().empty() || !n.post_hooks().empty() || !n.retains_grad_hooks().empty() ||
         (task && task->captures_);
}

}  // namespace

bool is_observed(const Edge& e) {
  const Task* task = task_of(e);
  return runs(e, task) && is_observed(*e.function, task);
}

bool is_shared(const Node& node, const Edge& e) {
  GraphTask* task = current_task();
  if (!task || !comes_to(e)) return false;
  const auto own = std::ranges::count(node.next_edges(), e.function, &Edge::function);
  std::lock_guard lock(task->mutex_);
  const auto still = task->dependencies_.find(e.function.get());
  return !is_nothing(*task, e.function.get()) || (still != task->dependencies_.end() && still->second > own);
}

// Edges are of all backwards: others, on other threads and in hooks, go along them meanwhile.
void skip_unreached(Node& node, const torch::autograd::variable_list& grads, size_t count, const std::vector<char>& come) {
  std::vector<size_t> edges;
  std::vector<std::pair<Node*, std::vector<size_t>>> unreached;
  GraphTask* task = current_task();
  std::unordered_set<const Node*> met;
  for (size_t i = 0; i < count && task; ++i) {
    const Edge& e = node.next_edge(i);
    const auto reached = [&](size_t k) { return k >= grads.size() || grads[k].defined() || (k < come.size() && come[k]); };
    if (reached(i) || !comes_to(e) || is_silent(*e.function) || !met.insert(e.function.get()).second) continue;
    std::vector<size_t> all;
    for (size_t k = 0; k < node.num_outputs(); ++k)
      if (node.next_edge(k).function == e.function) all.push_back(k);
    if (std::ranges::none_of(all, reached)) unreached.emplace_back(e.function.get(), std::move(all));
  }
  // Some lead to others of them, which wait for those first.
  while (std::erase_if(unreached, [&](const auto& u) { return leave_out(*task, node, u.first, u.second, 0, edges); })) {
  }
  cut(node, edges);
}

// Gradients are added in the order in which they come: whether, between `node`, which runs, and `n`, one runs that gives to what `n` gives to. Those
// in whose place the node goes on are `gone`.
static bool comes_between(const GraphTask& task, const Node& node, const Node& n, size_t edges, const std::unordered_set<const Node*>& gone) {
  std::vector<Edge> to;
  for (size_t i = 0; i < edges; ++i)
    if (const Edge& e = n.next_edge(i); comes_to(e)) to.push_back(e);
  return std::ranges::any_of(task.nodes_in_graph_, [&](const Node* m) {
    return m->sequence_nr() > n.sequence_nr() && m->sequence_nr() < node.sequence_nr() && !gone.contains(m) &&
           std::ranges::any_of(m->next_edges(), [&](const Edge& e) { return e.function && std::ranges::find(to, e) != to.end(); });
  });
}

std::vector<char> to_be_given(Node& node, const Ahead& ahead) {
  std::vector<char> give(node.num_outputs() - ahead.first);
  // The last made first: none leads to one before it.
  std::map<std::pair<uint64_t, Node*>, std::vector<size_t>, std::greater<>> todo;
  for (size_t i = 0; i < give.size(); ++i)
    if (const Edge& e = node.next_edge(ahead.first + i); comes_to(e)) todo[{e.function->sequence_nr(), e.function.get()}].push_back(i);
  GraphTask* task = current_task();
  std::unordered_map<const Node*, int> by_it;  // how often it leads there, in the place of those it goes through
  const auto go_through = [&](const Node& n, bool part) {
    for (size_t i = part ? ahead.first : 0; i < n.num_outputs(); ++i)
      if (n.next_edge(i).function) ++by_it[n.next_edge(i).function.get()];
  };
  go_through(node, true);
  std::vector<size_t> passed;
  std::unordered_set<const Node*> gone;
  const bool hooked = !node.post_hooks().empty();  // which may add others
  while (!todo.empty()) {
    const auto [at, edges] = *todo.begin();
    todo.erase(todo.begin());
    Node* const n = at.second;
    const Task* runs = nullptr;
    if (task)
      if (const auto of = task->exec_info_.find(n); of != task->exec_info_.end()) runs = &of->second;
    const bool part = ahead.is_part(*n);
    bool alone = false, through = false;
    if (task) {
      std::lock_guard lock(task->mutex_);
      const auto still = task->dependencies_.find(n);
      alone = still != task->dependencies_.end() && still->second == by_it[n];
      through = alone && !hooked && !is_observed(*n, runs) && !(part && comes_between(*task, node, *n, ahead.first, gone));
      const auto come = task->not_ready_.find(n);
      if (alone && !is_nothing(*task, n)) {
        alone = false;
        through = through && part && ahead.take(*n, come->second.buffer);
      }
    }
    if (through) {
      gone.insert(n);
      if (part || n->num_outputs() == 1) go_through(*n, part);
      if (!part && n->num_outputs() == 1)  // to what it is a view of
        if (Node* next = n->next_edge(0).function.get(); next && next->sequence_nr() > ahead.oldest) {
          std::vector<size_t>& to = todo[{next->sequence_nr(), next}];
          if (!ahead.is_part(*next)) to.insert(to.end(), edges.begin(), edges.end());  // nor is there another way to it
        }
      continue;
    }
    if (alone && !ahead.is_reached(*n) && (edges.size() == static_cast<size_t>(by_it[n]) || can_keep_from_running(*task))) {
      std::vector<size_t> own;
      for (size_t i : edges) own.push_back(ahead.first + i);
      if (leave_out(*task, node, n, std::move(own), by_it[n] - static_cast<int>(edges.size()), passed)) continue;
    }
    for (size_t i : edges) give[i] = 1;
  }
  cut(node, passed);
  return give;
}

}  // namespace vitrify
