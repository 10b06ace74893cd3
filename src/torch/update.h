// The update rules of torch::optim, as its step() computes them, over tensors that may be placeholders. Numbers (learning rates, moments' decay, bias
// corrections) are made on the host by each call, in double as torch makes them, and are operands.
#pragma once
#include <torch/optim/optimizer.h>

#include <memory>
#include <optional>
#include <vector>

namespace vitrify::update {

enum class Rule : uint8_t { SGD, Adam, AdamW, Adagrad, RMSprop };
std::optional<Rule> rule_of(const torch::optim::Optimizer&);  // a class derived from one of these is none

// The update of a parameter now: which ops, and their numbers.
struct Update {
  Rule rule;
  bool decay = false, momentum = false, nesterov = false, amsgrad = false, centered = false;
  std::vector<double> numbers;
  uint8_t kind() const { return static_cast<uint8_t>(decay | momentum << 1 | nesterov << 2 | amsgrad << 3 | centered << 4); }
};
// `step`: counted from 1; `first`: there is no state yet.
Update read(Rule, const torch::optim::OptimizerOptions&, int64_t step, bool first);
// Writes p and its state. `numbers`: 0-d tensors.
void apply(const Update&, const at::Tensor& p, const at::Tensor& grad, const std::vector<at::Tensor>& state, const std::vector<at::Tensor>& numbers);

// What optimizer.state() holds. Null: this update keeps none.
using ParamState = torch::optim::OptimizerParamState;
std::unique_ptr<ParamState> new_state(const Update&, const at::Tensor& p);
std::vector<at::Tensor> tensors_of(Rule, const ParamState&);  // undefined where there is none
int64_t steps_of(Rule, const ParamState&);
void set_steps(Rule, ParamState&, int64_t);

}  // namespace vitrify::update
