#include "torch/graph_task.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <map>
#include <mutex>
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

std::unordered_set<Node*> behind_of(const Edge& e) {
  std::unordered_set<Node*> behind{e.function.get()};
  std::vector<Node*> todo(behind.begin(), behind.end());
  while (!todo.empty()) {
    const Node* n = todo.back();
    todo.pop_back();
    for (const Edge& next : n->next_edges())
      if (next.function && behind.insert(next.function.get()).second) todo.push_back(next.function.get());
  }
  return behind;
}

bool runs(const Edge& e, const Task* task) { return e.is_valid() && (task ? task->should_execute() : !is_of_grad()); }

}  // namespace

bool is_of_grad() {
  const auto* tasks = torch::autograd::get_current_graph_task_exec_info();
  return tasks && !tasks->empty() && !tasks->contains(nullptr);
}

bool comes_to(const Edge& e) { return runs(e, task_of(e)); }

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

// Whether all that still comes to the node behind edge `which` of `from`, and to those behind that, comes by this edge, and nothing has come yet.
static bool only_from(const Node& from, size_t which) {
  GraphTask* task = current_task();
  if (!task) return false;
  const std::unordered_set<Node*> behind = behind_of(from.next_edge(which));
  const auto is_to_run = [&](Node* n) { return task->exec_info_.empty() || (task->exec_info_.contains(n) && task->exec_info_.at(n).should_execute()); };
  std::unordered_map<Node*, int> by_it;
  ++by_it[from.next_edge(which).function.get()];
  for (Node* n : behind)
    if (is_to_run(n))
      for (const Edge& e : n->next_edges())
        if (e.function) ++by_it[e.function.get()];
  std::lock_guard lock(task->mutex_);
  return std::ranges::all_of(behind, [&](Node* n) {
    if (!is_to_run(n)) return true;
    const auto at = task->dependencies_.find(n);
    return at != task->dependencies_.end() && at->second == by_it[n] && is_nothing(*task, n);
  });
}

// Which nodes are to run is of each backward: all, where it does not say. That it says so is what reentrant checkpoints take for grad(), and refuse:
// nodes of Python may be such.
static bool keep_from_running(GraphTask& task, const std::unordered_set<Node*>& nodes) {
  auto& runs = task.exec_info_;
  if (runs.empty()) {
    if (std::ranges::any_of(task.nodes_in_graph_, [](const Node* n) { return capture::of_python(*n); })) return false;
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

// This backward, and no other, does not come to the node behind `e`, which it comes to by this edge alone. False: it cannot be had for this backward.
// Edges are of all backwards: others, on other threads and in hooks, go along them meanwhile.
static bool pass_over(const Edge& e) {
  GraphTask* task = current_task();
  if (!task) return false;
  const std::unordered_set<Node*> behind = behind_of(e);
  {
    std::lock_guard lock(task->mutex_);
    for (Node* n : behind)
      if (is_nothing(*task, n)) task->not_ready_.erase(n);
  }
  return keep_from_running(*task, behind);
}

bool strides_show(const Node& node, size_t edges) {
  for (size_t i = 0; i < edges; ++i) {
    const Edge& e = node.next_edge(i);
    const Task* task = task_of(e);
    if (!runs(e, task)) continue;
    if (task && task->captures_) return true;
    if (!dynamic_cast<torch::autograd::AccumulateGrad*>(e.function.get()) || !e.function->tensor_pre_hooks().empty()) return true;
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
  ~Cut() {
    for (auto& [i, e] : edges) node->next_edges()[i] = std::move(e);
  }
};

void cut(Node& node, const std::vector<size_t>& edges) {
  if (edges.empty()) return;
  auto c = std::make_shared<Cut>();
  c->node = node.getptr();
  for (size_t i : edges) c->edges.emplace_back(i, std::exchange(node.next_edges()[i], Edge()));
  torch::autograd::Engine::get_default_engine().queue_callback([c] {});
}

bool is_observed(Node& n, const Task* task) {
  return !n.tensor_pre_hooks().empty() || !n.pre_hooks().empty() || !n.post_hooks().empty() || !n.retains_grad_hooks().empty() ||
         (task && task->captures_);
}

}  // namespace

void skip_unreached(Node& node, const torch::autograd::variable_list& grads, size_t count) {
  std::vector<size_t> edges;
  for (size_t i = 0; i < count; ++i) {
    const Edge& e = node.next_edge(i);
    if (!grads[i].defined() && e.is_valid() && !is_silent(*e.function) && only_from(node, i) && !pass_over(e)) edges.push_back(i);
  }
  cut(node, edges);
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
      through = alone && !hooked && !is_observed(*n, runs);
      const auto come = task->not_ready_.find(n);
      if (alone && !is_nothing(*task, n)) {
        alone = false;
        through = through && part && ahead.take(*n, come->second.buffer);
      }
    }
    if (through) {
      if (part || n->num_outputs() == 1) go_through(*n, part);
      if (!part && n->num_outputs() == 1)  // to what it is a view of
        if (Node* next = n->next_edge(0).function.get(); next && next->sequence_nr() > ahead.oldest) todo[{next->sequence_nr(), next}];
      continue;
    }
    if (alone && !edges.empty() && !ahead.is_reached(*n)) {
      // Eager does not come to it: its hooks are not called, and what is behind it does not wait for it.
      std::lock_guard lock(task->mutex_);
      std::unordered_set<Node*> off{n};
      std::unordered_map<Node*, int> less;
      std::vector<Node*> open{n};
      while (!open.empty()) {
        Node* of = open.back();
        open.pop_back();
        for (const Edge& e : of->next_edges())
          if (const auto waits = task->dependencies_.find(e.function.get()); e.function && waits != task->dependencies_.end())
            if (++less[waits->first] == waits->second && off.insert(waits->first).second) open.push_back(waits->first);
      }
      if (std::ranges::all_of(off, [&](Node* o) { return is_nothing(*task, o); })) {
        for (auto [of, count] : less)
          if (task->dependencies_[of] -= count; off.contains(of)) task->dependencies_.erase(of);
        for (Node* o : off) task->not_ready_.erase(o);
        if (!keep_from_running(*task, off))
          for (size_t i : edges) passed.push_back(ahead.first + i);
        continue;
      }
    }
    for (size_t i : edges) give[i] = 1;
  }
  cut(node, passed);
  return give;
}

}  // namespace vitrify
