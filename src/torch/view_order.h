// In which order gradients come back through views: eager adds them in the strides of the first.
#pragma once
#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>

#include <unordered_map>
#include <vector>

#include "torch/compat.h"

namespace vitrify::capture {

// The views that lead from one tensor to another, the first one first. The engine takes nodes of higher numbers first.
using Chain = std::vector<compat::NodePtr>;
// Per node: the highest number among those that give it gradients.
using LastUsers = std::unordered_map<const torch::autograd::Node*, uint64_t>;

// From the tensor whose gradients go to `end`; empty where other ops are among them.
Chain views_between(const torch::autograd::Edge& end, const at::Tensor& t);
// Of two chains from one tensor, gradients come first through the one whose turn is higher.
std::vector<uint64_t> turn_of(const Chain&);
LastUsers last_users(const std::vector<torch::autograd::Edge>& from, const std::vector<torch::autograd::Edge>& to);
// Whether gradients through a chain come to its node `i` before those of the users.
bool comes_first(const Chain&, const LastUsers&, size_t i = 0);
// `root`, for gradients that came through a chain of views made elsewhere: as if it were among the users.
torch::autograd::Edge in_turn(const torch::autograd::Edge& root, const Chain&, const LastUsers&, const at::Tensor& gradient);

}  // namespace vitrify::capture
