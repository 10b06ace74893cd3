// Elementwise rules over the first N arguments, shared by activations and their gradients.
#pragma once
#include "ops/rules.h"

namespace vitrify::ops {

// The arguments at `positions` are the operands, broadcast to the result; float results only unless `any_type`.
template <bool any_type = false, class F>
bool activation_at(const Args& a, std::vector<Tensor>& r, std::initializer_list<size_t> positions, int cost, F f) {
  const auto& out = a.out();
  if (!any_type && !is_float(out.dtype)) return false;
  std::vector<Operand> ops;
  int reads = 0;
  for (size_t i : positions) {
    ops.push_back(operand(a, i, out.sizes));
    if (ops.back().tensor) cost += ops.back().tensor.cost, reads += ops.back().tensor.reads;
  }
  r.push_back(a.L.map(
      out.dtype, out.sizes,
      [ops, f, t = compute_type(out.dtype)](Body& b, const Index& i) {
        boost::container::small_vector<Val, 4> v;
        for (auto& o : ops) v.push_back(o.at(b, i, t));
        return f(b, v.data());
      },
      cost, reads));
  return true;
}
template <int n, bool any_type = false, class F>
bool activation(const Args& a, std::vector<Tensor>& r, int cost, F f) {
  if constexpr (n == 1)
    return activation_at<any_type>(a, r, {0}, cost, f);
  else
    return activation_at<any_type>(a, r, {0, 1}, cost, f);
}

// What gelu multiplies x by: the normal distribution function or its tanh form. In f64 as eager writes it, else without the 1 + that cancels.
Val gelu_gate(Val x, bool tanh_form);

std::span<const OpRow> activation_gradient_rows();

}  // namespace vitrify::ops
