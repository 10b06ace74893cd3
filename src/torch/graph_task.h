// What the backward under way on this thread asks of nodes.
#pragma once
#include <torch/csrc/autograd/function.h>

namespace vitrify {

bool is_of_grad();  // it is grad()'s, or one with inputs=: not all nodes run
bool comes_to(const torch::autograd::Edge&);
// From another node, or from several roots: a single one is where it begins.
bool comes_to_node(const torch::autograd::Node*);
// Eager never comes to what no gradient leads to: nor does this backward from `node`, which gives `grads`, where someone would notice. Where edges
// are taken off for that they are back when it is done.
void skip_unreached(torch::autograd::Node& node, const torch::autograd::variable_list& grads);
// Whether the strides of the gradients that `node` gives can be seen: a .grad has those of its tensor.
bool strides_show(const torch::autograd::Node& node);
// A leaf without a gradient takes it in its own strides, but for those of dims of one element.
bool strides_of_ones_show(const torch::autograd::Node& node);

}  // namespace vitrify
