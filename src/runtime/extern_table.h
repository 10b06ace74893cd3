// Facts about extern calls that the scheduler needs to give their results a place.
#pragma once
#include <string_view>

namespace vitrify::runtime {

// True for ops the executor calls with out=: their result may live in an Arena or Output slot at no cost. Results of others are best kept in
// Extern slots; an Arena or Output slot works too, by a copy.
inline bool writes_into_slot(std::string_view op) { return op == "aten::mm" || op == "aten::addmm" || op == "aten::bmm" || op == "aten::baddbmm"; }

}  // namespace vitrify::runtime
