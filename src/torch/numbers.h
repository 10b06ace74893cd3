// Numbers that change from call to call without a new compile: Python floats that are read anew, 0-d tensors read with item(), and what a program
// computes from them. Computed on the host before the plan runs, in double, as Python computes them; or in the graph, where they follow from values
// that the graph computes ("traced").
#pragma once
#include <ATen/ATen.h>
#include <c10/core/SymFloat.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace vitrify {

struct Numbers {
  // From Neg on of one operand.
  enum class Op : uint8_t { Constant, Live, Item, Traced, Add, Sub, Mul, Div, Pow, FloorDiv, Mod, Min, Max, Neg, Sqrt, Floor, Ceil, Round };
  struct Step {
    Op op;
    uint32_t a = 0, b = 0;              // earlier steps; Live: which one; Item: graph input; Traced: which value of the tracer's
    double constant = 0;                // Constant
    at::ScalarType type = at::kDouble;  // Round: to this type
    bool traced = false;                // only the graph knows it
  };
  enum class Compare : uint8_t { Eq, Ne, Lt, Le };
  struct Check {  // a comparison that the program's control flow followed
    Compare how;
    uint32_t a, b;
    bool holds;
  };
  std::vector<Step> steps;
  std::vector<Check> checks;
  std::vector<double> seen;  // per step: its value when captured; traced: NaN
  uint32_t num_live = 0;

  // A step and its value now; nullopt where Python raises or makes something else than a float, or may do so with a traced number.
  std::optional<uint32_t> add(Step, double value_of_source = 0);
  bool compare(Compare, uint32_t a, uint32_t b);  // the answer now, to be checked from now on; CaptureError for traced numbers
  bool computed_on_host() const;                  // some are, or are checked
  // `values`: one per step. False: the program would go another way, or raise.
  bool eval(const double* live, const at::Tensor* const* inputs, std::vector<double>& values) const;

 private:
  bool positive(uint32_t step) const;  // and no NaN
  bool never_zero(uint32_t step);
};

double number_in(const at::Tensor&);  // a 0-d tensor of floats on the CPU, its negative bit too

namespace capture {

c10::SymFloat to_sym_float(const std::shared_ptr<Numbers>&, uint32_t step);
bool compared_by_program();
// The step that one of our SymFloats is.
std::optional<uint32_t> step_of(const c10::SymFloat&);

}  // namespace capture
}  // namespace vitrify
