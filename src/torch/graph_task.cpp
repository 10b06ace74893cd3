#include "torch/graph_task.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <unordered_set>
#include <vector>

namespace vitrify {

using torch::autograd::Edge;
using torch::autograd::Node;

namespace {

using Task = torch::autograd::GraphTask::ExecInfo;

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
  return tasks && !tasks->empty();
}

bool comes_to(const Edge& e) { return runs(e, task_of(e)); }

bool comes_to_node(const Node* n) {
  const auto* all = torch::autograd::get_current_graph_task_nodes_in_graph();
  return all && all->contains(const_cast<Node*>(n));
}

bool is_silent(const Node& n) {
  return dynamic_cast<const torch::autograd::AccumulateGrad*>(&n) && const_cast<Node&>(n).tensor_pre_hooks().empty() &&
         const_cast<Node&>(n).pre_hooks().empty() && const_cast<Node&>(n).post_hooks().empty() && !n.tensor_post_acc_grad_hooks();
}

bool only_from(const Node& from, size_t which) {
  const auto* all = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (!all) return false;
  std::unordered_set<const Node*> behind{from.next_edge(which).function.get()};
  std::vector<const Node*> todo(behind.begin(), behind.end());
  while (!todo.empty()) {
    const Node* n = todo.back();
    todo.pop_back();
    for (const Edge& e : n->next_edges())
      if (e.function && behind.insert(e.function.get()).second) todo.push_back(e.function.get());
  }
  auto leads_there = [&](const Node& n) {
    for (size_t i = 0; i < n.next_edges().size(); ++i)
      if (!(&n == &from && i == which) && behind.contains(n.next_edge(i).function.get())) return true;
    return false;
  };
  if (leads_there(from)) return false;
  return std::none_of(all->begin(), all->end(), [&](const Node* n) { return !behind.contains(n) && leads_there(*n); });
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

}  // namespace vitrify
