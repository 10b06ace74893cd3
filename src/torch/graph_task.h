// What the backward under way on this thread asks of nodes.
#pragma once
#include <torch/csrc/autograd/function.h>

#include <functional>
#include <vector>

namespace vitrify {

bool is_of_grad();  // it is grad()'s, or one with inputs=: not all nodes run
bool comes_to(const torch::autograd::Edge&);
bool adds_to_grad(const torch::autograd::Edge&);  // to that of the leaf it leads to: grad() gives what comes there to its caller
// From another node, or from several roots: a single one is where it begins.
bool comes_to_node(const torch::autograd::Node*);
// Eager never comes to what no gradient leads to: nor does this backward from `node`, which gives `grads`, where someone would notice. Where edges
// are taken off for that they are back when it is done. Of its first edges; eager's may `come` along some of them without a gradient.
void skip_unreached(torch::autograd::Node& node, const torch::autograd::variable_list& grads, size_t edges, const std::vector<char>& come);
// Whether the strides of the gradients that `node` gives along its first edges can be seen: a .grad has those of its tensor.
bool strides_show(const torch::autograd::Node& node, size_t edges);
// A leaf without a gradient takes it in its own strides, but for those of dims of one element.
bool strides_of_ones_show(const torch::autograd::Node& node);

// Somebody looks at what comes there, or changes it.
bool is_observed(const torch::autograd::Edge&);
// Others than `node`, which runs, give gradients there too.
bool is_shared(const torch::autograd::Node& node, const torch::autograd::Edge&);

// Of a node that runs and the nodes of results behind it, to which it has edges: each follows those to which it leads.
struct Ahead {
  size_t first;                                                  // of its edges, and of theirs
  uint64_t oldest;                                               // sequence number of the oldest that was made with them
  std::function<bool(const torch::autograd::Node&)> is_part;     // has such edges
  std::function<bool(const torch::autograd::Node&)> is_reached;  // gradients lead there
  // From elsewhere these have come to it, which may be taken out of them. False: they stay.
  std::function<bool(torch::autograd::Node&, std::vector<at::Tensor>&)> take;
};
// By edge from Ahead::first on: whether a gradient has to be given along it. Where nobody notices, the node goes on in the place of the one behind,
// which is then given nothing.
std::vector<char> to_be_given(torch::autograd::Node& node, const Ahead&);

}  // namespace vitrify
