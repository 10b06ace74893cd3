// Lowering rules of small matrix products; larger ones stay calls of the library.
#pragma once
#include "ops/lowering.h"

namespace vitrify::ops {

bool lower_small_mm(const Args&, std::vector<Tensor>&);     // aten::mm(self, mat2)
bool lower_small_addmm(const Args&, std::vector<Tensor>&);  // aten::addmm(self, mat1, mat2, *, beta, alpha)

}  // namespace vitrify::ops
