#include "torch/graph_task.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstddef>
#include <mutex>
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

// Whether the backward comes to the node behind edge `which` of `from`, and to those behind that, by this edge alone.
static bool only_from(const Node& from, size_t which) {
  GraphTask* task = current_task();
  if (!task) return false;
  const std::unordered_set<Node*> behind = behind_of(from.next_edge(which));
  auto leads_there = [&](const Node& n) {
    for (size_t i = 0; i < n.next_edges().size(); ++i)
      if (!(&n == &from && i == which) && behind.contains(n.next_edge(i).function.get())) return true;
    return false;
  };
  if (leads_there(from)) return false;
  const auto& all = task->nodes_in_graph_;
  if (std::any_of(all.begin(), all.end(), [&](Node* n) { return !behind.contains(n) && leads_there(*n); })) return false;
  std::lock_guard lock(task->mutex_);  // what it begins at, beside others, is none of its nodes
  return std::none_of(task->not_ready_.begin(), task->not_ready_.end(), [&](const auto& waits) { return behind.contains(waits.first); });
}

// This backward, and no other, does not come to the node behind `e`, which it comes to by this edge alone. False: it cannot be had for this backward.
// Edges are of all backwards: others, on other threads and in hooks, go along them meanwhile. Which nodes are to run is of each: all, where it does
// not say. That it says so is what reentrant checkpoints take for grad(), and refuse: nodes of Python may be such.
static bool pass_over(const Edge& e) {
  GraphTask* task = current_task();
  if (!task) return false;
  auto& runs = task->exec_info_;
  if (runs.empty()) {
    if (std::ranges::any_of(task->nodes_in_graph_, [](const Node* n) { return capture::of_python(*n); })) return false;
    for (Node* n : task->nodes_in_graph_) runs[n].needed_ = true;
    for (Node* n : task->graph_roots_) runs[n].needed_ = true;
    runs[nullptr];  // it is no grad()
  }
  for (Node* n : behind_of(e))
    if (const auto at = runs.find(n); at != runs.end()) {
      at->second.needed_ = false;
      at->second.captures_.reset();
    }
  return true;
}

bool strides_show(const Node& node) {
  for (const Edge& e : node.next_edges()) {
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

void skip_unreached(Node& node, const torch::autograd::variable_list& grads) {
  struct Cut {
    compat::NodePtr node;
    std::vector<std::pair<size_t, Edge>> edges;
    ~Cut() {
      for (auto& [i, e] : edges) node->next_edges()[i] = std::move(e);
    }
  };
  auto cut = std::make_shared<Cut>();
  for (size_t i = 0; i < grads.size(); ++i) {
    const Edge& e = node.next_edge(i);
    if (grads[i].defined() || !e.is_valid() || is_silent(*e.function) || !only_from(node, i) || pass_over(e)) continue;
    cut->edges.emplace_back(i, std::exchange(node.next_edges()[i], Edge()));
  }
  if (cut->edges.empty()) return;
  cut->node = node.getptr();
  torch::autograd::Engine::get_default_engine().queue_callback([cut] {});
}

}  // namespace vitrify
