// What a compiled entry reads anew at every call: gradients of tensors it knows, and Python floats.
#pragma once
#include <memory>
#include <vector>

#include "python/tree.h"
#include "torch/compiled.h"

namespace vitrify::python {

class Live {
 public:
  struct Float {  // dict[key], or dict[key][index] of a tuple
    Ref dict, key;
    int64_t index = -1;
  };
  // `watched`: tensors whose .grad the program may look at. `args` as they are now.
  Live(std::shared_ptr<CompiledGraph>, const std::vector<Ref>& args, const std::vector<at::Tensor>& watched, std::vector<Float> floats);
  // Gradients and floats are as the plan needs them. `floats`: what they are now.
  bool check(const c10::SmallVectorImpl<PyObject*>& args, std::vector<double>& floats) const;
  bool holds(const at::TensorImpl*) const;
  void visit(int (*f)(PyObject*, void*), void* arg, int& result) const;

 private:
  struct Grad {
    at::Tensor of;
    int32_t arg = -1;  // or of this argument
    bool defined = false, written = false, read = false;
    TensorMeta meta;  // when read
  };
  std::shared_ptr<CompiledGraph> graph_;
  const Program* program_ = nullptr;  // of the graph
  std::vector<Grad> grads_;
  std::vector<std::pair<const at::TensorImpl*, int32_t>> owners_;  // those that the program reaches by itself, sorted; their places in `grads_`
  std::vector<int32_t> given_;                                     // per argument: which of them it is, -1: none
  std::vector<bool> sets_;                                         // per argument: the plan sets its .grad
  int32_t owner(const at::Tensor&) const;
  std::vector<Float> floats_;
  bool apart_ = false;  // the program writes to something: each gradient has memory of its own, which neither is argument nor captured
};

}  // namespace vitrify::python
