// Derivatives whose formula in ATen looks at values to choose how it computes. Under a mode it takes a way that needs no such choice and gives other
// strides, and other values where an operand is not finite: here the choice is part of the graph, or made in the call under way where the next
// gradient goes another way by it.
#pragma once
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <functional>
#include <list>
#include <string>
#include <vector>

namespace vitrify::capture {

bool looks_at_values(const torch::autograd::Node&);  // it has to see that a mode is on
bool takes_batches(const torch::autograd::Node&);    // of a batch of gradients, it looks at no values
bool of_python(const torch::autograd::Node&);        // Python code may ask for the mode, or put one of its own above it
bool of_users(const torch::autograd::Node&);         // a derivative of their own, in Python or C++: it need not be linear
// It has saved tensors, whether its formula reads them here or not.
bool saves(const torch::autograd::Node&);
// Those: as far as versions go, they are read.
std::vector<at::Tensor> saved_by(const torch::autograd::Node&);
// The same of all nodes behind those edges. `of_own`: of a user's own node.
std::vector<at::Tensor> saved_behind(const torch::autograd::edge_list&,
                                     const std::function<std::vector<at::Tensor>(const torch::autograd::Node&)>& of_own = {});

// Its formula reads truth values, and does nothing but raise where they are false.
bool checks_values(const torch::autograd::Node&);

// But for these, whose choice is made in the call under way.
bool chooses(const torch::autograd::Node&);

// Its formula, which would be captured as steps by the thousand, need not run: as_chosen() gives all of it.
bool is_replaced(const torch::autograd::Node&);

// What torch's own stand-ins raise where an op has no derivative: also those that are generated. It is raised whatever the gradients are and
// whichever are asked for.
bool is_unimplemented(torch::autograd::Node&, const std::string& says);
// Which of its edges have to be asked for, one at least, that it raises this; none: whichever are.
std::vector<size_t> edges_raising(torch::autograd::Node&, const std::string& says);
bool is_of_formula(const std::string& says);  // that of a node which does so where a gradient comes to it; others raise whenever they are come to
[[noreturn]] void raise_as_torch(const std::string& says);  // an error of that text, of the class that torch's has

// What hooks have of what a node has saved is asked for, and the node has that itself in their place: a checkpoint's give it once, and formulas here
// read it beside the node's own.
class WithoutHooksOnSaved {
 public:
  explicit WithoutHooksOnSaved(torch::autograd::Node&);
  WithoutHooksOnSaved(const WithoutHooksOnSaved&) = delete;

 private:
  struct Replaced {
    ~Replaced() { at = std::move(was); }
    torch::autograd::SavedVariable& at;
    torch::autograd::SavedVariable was;
  };
  std::list<Replaced> replaced_;
};

// The gradient that such a node should have given in place of `made`.
at::Tensor as_chosen(torch::autograd::Node&, const at::Tensor& grad, const at::Tensor& made);

}  // namespace vitrify::capture
