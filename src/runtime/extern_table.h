// Facts about extern calls that the scheduler needs to give their results a place.
#pragma once
#include <algorithm>
#include <array>
#include <string_view>

namespace vitrify::runtime {

// Ops whose one result the executor can have made where the plan wants it, at no cost: by out=, or because they allocate it with at::empty
// (torch/placement.h). Results of others are best kept in Extern slots; an Arena or Output slot works too, by a copy.
inline bool writes_into_slot(std::string_view op) {
  constexpr std::array kOps = {"aten::mm",
                               "aten::addmm",
                               "aten::bmm",
                               "aten::baddbmm",
                               "mkldnn::_convolution_pointwise",
                               "mkldnn::_convolution_pointwise.binary",
                               "vitrify::convolution_in_chains",
                               "vitrify::winograd_convolution",
                               "mkldnn::_linear_pointwise",
                               "mkldnn::_linear_pointwise.binary",
                               "mkl::_mkl_linear",
                               "vitrify::product"};
  return std::ranges::find(kOps, op) != kOps.end();
}

// Ops whose second operand can be given up to become their result (a residual sum into the residual), at no cost of a copy.
inline bool writes_into_operand(std::string_view op) { return op == "mkldnn::_convolution_pointwise.binary"; }

// Ops whose kernel writes its first result also where their last argument, the output mask, leaves it out: torch's own ends the process for
// channels-last operands (2.11). They are asked for it.
inline bool writes_what_is_left_out(std::string_view op) { return op == "aten::native_group_norm_backward"; }

}  // namespace vitrify::runtime
