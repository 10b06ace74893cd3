// Attributes and methods of tensors that no op stands behind: a capture hears of their being read.
#pragma once
#include <ATen/ATen.h>

namespace vitrify::python {

void hear_of_facts();  // from now on
// How many hooks a tensor has, and the node that adds to its .grad, without the capture's hearing of it.
size_t hooks_of(const at::Tensor&);

}  // namespace vitrify::python
