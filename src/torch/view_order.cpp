#include "torch/view_order.h"

#include <algorithm>
#include <limits>
#include <unordered_set>

namespace vitrify::capture {

using torch::autograd::Edge;
using torch::autograd::Node;

namespace {

// Stands for a view that is made around the program.
struct ViewNode final : Node {
  ViewNode(uint64_t order, torch::autograd::edge_list&& next) : Node(order, std::move(next)) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&& g) override { return std::move(g); }
};

}  // namespace

Chain views_between(const Edge& end, const at::Tensor& t) {
  Chain chain;
  for (compat::NodePtr n = t.grad_fn(); n && n->num_outputs() == 1; n = n->next_edge(0).function) {
    chain.push_back(n);
    if (n->next_edge(0) != end) continue;
    std::ranges::reverse(chain);
    return chain;
  }
  return {};
}

std::vector<uint64_t> turn_of(const Chain& chain) {
  std::vector<uint64_t> turn;
  for (const auto& n : chain) turn.push_back(n->sequence_nr());
  turn.push_back(std::numeric_limits<uint64_t>::max());  // the gradient of the last view itself is there from the beginning
  return turn;
}

LastUsers last_users(const std::vector<Edge>& from, const std::vector<Edge>& to) {
  LastUsers last;
  std::unordered_set<const Node*> seen;
  for (const Edge& e : to) seen.insert(e.function.get());
  std::vector<const Node*> todo;
  for (const Edge& e : from) todo.push_back(e.function.get());
  while (!todo.empty()) {
    const Node* n = todo.back();
    todo.pop_back();
    if (!n || !seen.insert(n).second) continue;
    for (const Edge& next : n->next_edges()) {
      uint64_t& number = last[next.function.get()];
      number = std::max(number, n->sequence_nr());
      todo.push_back(next.function.get());
    }
  }
  return last;
}

bool comes_first(const Chain& chain, const LastUsers& last, size_t i) {
  const auto user = last.find(chain[i].get());
  if (user == last.end() || i + 1 == chain.size()) return true;
  const uint64_t next = chain[i + 1]->sequence_nr();
  return next == user->second ? comes_first(chain, last, i + 1) : next > user->second;
}

Edge in_turn(const Edge& root, const Chain& chain, const LastUsers& last, const at::Tensor& gradient) {
  // Numbers beside those of nodes are free: a capture leaves them out.
  const uint64_t order = chain[0]->sequence_nr();
  auto view = compat::make_node<ViewNode>(comes_first(chain, last) ? order + 1 : order - 1, torch::autograd::edge_list{root});
  view->add_input_metadata(gradient);
  return {std::move(view), 0};
}

}  // namespace vitrify::capture
