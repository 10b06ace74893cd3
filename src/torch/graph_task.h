// What the backward under way on this thread asks of nodes.
#pragma once
#include <torch/csrc/autograd/function.h>

namespace vitrify {

bool is_of_grad();  // it is grad()'s, or one with inputs=: not all nodes run
bool comes_to(const torch::autograd::Edge&);
// From another node, or from several roots: a single one is where it begins.
bool comes_to_node(const torch::autograd::Node*);
// Nobody notices when it is called without a gradient.
bool is_silent(const torch::autograd::Node&);
// Whether it comes to the node behind edge `which` of `from`, and to those behind that, by this edge alone.
bool only_from(const torch::autograd::Node& from, size_t which);
// This backward, and no other, does not come to the node behind `e`, which it comes to by this edge alone. False: it cannot be had for this backward.
bool pass_over(const torch::autograd::Edge& e);
// Whether the strides of the gradients that `node` gives can be seen: a .grad has those of its tensor.
bool strides_show(const torch::autograd::Node& node);
// A leaf without a gradient takes it in its own strides, but for those of dims of one element.
bool strides_of_ones_show(const torch::autograd::Node& node);

}  // namespace vitrify
