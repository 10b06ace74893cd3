// What the op families share: checks, operands of any kind (tensor or number), elementwise maps, type promotion.
#pragma once
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "ops/lowering.h"
#include "ops/shapes.h"

namespace vitrify::ops {

using loop::AccumKind;
using LOp = loop::Op;

// False when an operand or result has a type kernels cannot touch, or lives in memory the kernel cannot reach (a number's 0-d CPU tensor can be
// inlined).
bool kernel_can(const Args&);

// Puts kernel_can before a rule, so that the rules themselves see plain types only.
template <LowerFn F>
bool lower(const Args& a, std::vector<Tensor>& r) {
  return kernel_can(a) && F(a, r);
}

bool has_value(const ir::Arg&);                 // a defined tensor
bool is_number(const ir::Arg&);                 // Int, double or bool
const ir::TensorType* type_of(const ir::Arg&);  // of a defined tensor, else null

// A number argument inside a body. `type` is a compute type; symbolic ints become index values.
Val number(Body&, const ir::Arg&, DType type);
// True if casting the number to `type` loses nothing but float precision.
bool number_fits(const ir::Arg&, DType type);
double largest(DType);  // finite number of a float type
// True unless eager, which converts the number to `type` itself, refuses it for its size.
bool number_converts(const ir::Arg&, DType type);

// One operand of an elementwise rule, already broadcast.
struct Operand {
  Tensor tensor;  // unset for numbers
  const ir::Arg* arg = nullptr;
  bool wider = false;  // the result is of another type, in which a half value's missing rounding would show
  Val at(Body&, const Index&, DType type) const;
};
Operand operand(const Args&, size_t i, const Dims& sizes);
Operand operand(Lowering&, const Tensor&, const Dims& sizes);

// As the value would be after being stored in t.dtype: decisions on values (comparison, floor) and conversions see what eager sees.
Val stored(const Tensor& t, Val v);

Tensor broadcast(Lowering&, const Tensor&, const Dims& sizes);
bool same_sizes(const Dims&, const Dims&);

// out[i] = f(operands[i]...), every operand cast to `type` first.
template <class F>
Tensor elementwise(const Args& a, std::initializer_list<Operand> in, DType type, DType out, const Dims& sizes, int cost, F f, bool exact = false) {
  std::vector<Operand> ops(in);
  int reads = 0;
  for (auto& o : ops)
    if (o.tensor) cost += o.tensor.cost, reads += o.tensor.reads;
  return a.L.map(
      out, sizes,
      [ops, type, f, exact](Body& b, const Index& i) {
        boost::container::small_vector<Val, 4> v;
        for (auto& o : ops) {
          v.push_back(o.tensor && exact ? cast(stored(o.tensor, o.tensor.at(b, i)), type) : o.at(b, i, type));
        }
        return f(b, v.data());
      },
      cost, reads);
}

// A map over one tensor.
template <class F>
Tensor map1(Lowering& L, const Tensor& x, DType out, F f, int cost = 1) {
  return L.map(out, x.sizes, [x, f](Body& b, const Index& i) { return f(b, x.at(b, i)); }, x.cost + cost, x.reads);
}
template <class F>
Tensor map2(Lowering& L, const Tensor& x, const Tensor& y, DType out, F f, int cost = 1) {
  return L.map(out, x.sizes, [x, y, f](Body& b, const Index& i) { return f(b, x.at(b, i), y.at(b, i)); }, x.cost + y.cost + cost, x.reads + y.reads);
}

// The tensor for a rule that reads it in more than one loop nest: costly expressions get a buffer.
Tensor reused(Lowering&, const Tensor&);

Val numel_as(Body&, const Int& n, DType type);  // an element count as a value
Int product(const Dims& sizes, std::span<const int64_t> dims);
bool known_empty(const Dims&);

inline Val minimum(Val a, Val b) { return a.type == DType::Bool ? a & b : binary(LOp::min, a, b); }
inline Val maximum(Val a, Val b) { return a.type == DType::Bool ? a | b : binary(LOp::max, a, b); }
inline Val sigmoid(Val a) { return unary(LOp::sigmoid, a); }
inline Val square(Val a) { return a * a; }
inline Val finite(Val a) { return unary(LOp::abs, a) <= a.lit(largest(a.type)); }

}  // namespace vitrify::ops
