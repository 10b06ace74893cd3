// Where gradients leave a recorded program on their way, and go no further (torch/joint.cpp).
#pragma once
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/tensor.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <unordered_set>
#include <utility>
#include <vector>

#include "torch/compat.h"
#include "torch/tracer_impl.h"

namespace vitrify {

// Where the gradient of an input that is not a leaf leaves the program.
struct Tracer::Impl::InputNode final : torch::autograd::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override { TORCH_CHECK(false, "vitrify: a placeholder has no gradient"); }
  std::string name() const override { return "VitrifyInput"; }
};

// The engine begins with gradients alone: what it is given is none to those behind.
struct Without final : torch::autograd::Node {
  Without(const torch::autograd::Edge& to, const at::Tensor& like) : Node(/*sequence_nr=*/UINT64_MAX, torch::autograd::edge_list{to}) {
    add_input_metadata(like);
  }
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override { return torch::autograd::variable_list(1); }
};

// For a backward, edges to places where it stops lead out of the program.
class Tracer::Impl::Stops {
 public:
  Stops(const Level& level, std::vector<torch::autograd::Edge> todo, const std::vector<TangentLayout>& how) {
    for (size_t k = 0; k < how.size(); ++k)
      if (how[k].stops) places_.push_back(k);
    if (places_.empty()) return;
    for (size_t k : places_) {
      auto out = compat::make_node<InputNode>();
      out->add_input_metadata(level.tangent(k));
      ends.emplace_back(std::move(out), 0);
    }
    std::unordered_set<torch::autograd::Node*> seen;
    while (!todo.empty()) {
      const compat::NodePtr n = todo.back().function;
      todo.pop_back();
      if (!n || !seen.insert(n.get()).second) continue;
      for (size_t i = 0; i < n->next_edges().size(); ++i) {
        const auto at = std::ranges::find_if(places_, [&](size_t k) { return level.at(k) == n->next_edge(i); });
        if (at == places_.end()) {
          todo.push_back(n->next_edge(i));
          continue;
        }
        const auto cut = [&](const compat::NodePtr& of) {
          cut_.emplace_back(of, i, std::exchange(of->next_edges()[i], ends[static_cast<size_t>(at - places_.begin())]));
        };
        cut(n);
        // What wrote to a part has all edges but that of what it wrote to itself.
        if (const auto* slices = dynamic_cast<const torch::autograd::CopySlices*>(n.get()); slices && slices->fn && i > 0) cut(slices->fn);
      }
    }
  }
  ~Stops() {
    for (auto& [node, i, edge] : cut_) node->next_edges()[i] = std::move(edge);
  }
  Stops(const Stops&) = delete;
  std::vector<torch::autograd::Edge> ends;  // by place that stops

 private:
  std::vector<size_t> places_;
  std::vector<std::tuple<compat::NodePtr, size_t, torch::autograd::Edge>> cut_;
};

}  // namespace vitrify
