// Conditions on symbolic sizes: binds the symbols of a captured graph from the arguments of a call and evaluates what the compile assumed.
#pragma once
#include <memory>
#include <vector>

#include "ir/graph.h"
#include "python/tree.h"
#include "sym/known.h"

namespace vitrify::python {

class Symbols {
 public:
  // Marks symbolic sizes and strides in `metas` as free; null when every size is constant.
  static std::shared_ptr<Symbols> of(std::shared_ptr<ir::Graph>, std::vector<TensorMeta>& metas);
  bool check(const c10::SmallVectorImpl<PyObject*>& tensors) const;

 private:
  struct Slot {
    uint32_t tensor, dim;
    bool stride;
    sym::Int expr;
  };
  std::shared_ptr<ir::Graph> graph_;  // has the symbols
  sym::Known known_;                  // of them, by the end of the compile
  std::vector<Slot> bare_, derived_;  // symbols first, expressions of them after
};

}  // namespace vitrify::python
