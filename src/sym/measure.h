// How large an expression is, for those who decide whether to go on with it.
#pragma once
#include <unordered_set>

#include "sym/sym.h"

namespace vitrify::sym {

uint32_t weight(Int e);                               // nodes of the tree that e stands for; large ones count as 2^20
void divisions(Int e, std::unordered_set<Int>& out);  // adds what e does with loop variables beside sums and products

}  // namespace vitrify::sym
