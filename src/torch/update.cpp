#include "torch/update.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <typeinfo>

#include "support/error.h"

namespace vitrify::update {

namespace optim = torch::optim;
using at::Tensor;

std::optional<Rule> rule_of(const optim::Optimizer& o) {
  const std::type_info& t = typeid(o);
  if (t == typeid(optim::SGD)) return Rule::SGD;
  if (t == typeid(optim::Adam)) return Rule::Adam;
  if (t == typeid(optim::AdamW)) return Rule::AdamW;
  if (t == typeid(optim::Adagrad)) return Rule::Adagrad;
  if (t == typeid(optim::RMSprop)) return Rule::RMSprop;
  return std::nullopt;
}

namespace {

template <class Options>
Update read_adam(Update u, const Options& o, int64_t step) {
  const auto [beta1, beta2] = o.betas();
  const double correction1 = 1 - std::pow(beta1, step), correction2 = 1 - std::pow(beta2, step);
  u.decay = o.weight_decay() != 0;
  u.amsgrad = o.amsgrad();
  const double decay = u.rule == Rule::AdamW ? 1 - o.lr() * o.weight_decay() : o.weight_decay();
  u.numbers = {decay, beta1, 1 - beta1, beta2, 1 - beta2, std::sqrt(correction2), o.eps(), -(o.lr() / correction1)};
  return u;
}

// As through .data, which SGD writes: the version stays.
void add_unseen(const Tensor& p, const Tensor& t) {
  at::AutoDispatchBelowADInplaceOrView below;
  p.add_(t);
}

}  // namespace

Update read(Rule rule, const optim::OptimizerOptions& options, int64_t step, bool first) {
  Update u{rule};
  switch (rule) {
    case Rule::SGD: {
      auto& o = static_cast<const optim::SGDOptions&>(options);
      u.decay = o.weight_decay() != 0;
      u.momentum = o.momentum() != 0;
      u.nesterov = o.nesterov();
      u.numbers = {o.weight_decay(), o.momentum(), first ? 1 : 1 - o.dampening(), -1 * o.lr()};
      return u;
    }
    case Rule::Adam:
      return read_adam(u, static_cast<const optim::AdamOptions&>(options), step);
    case Rule::AdamW:
      return read_adam(u, static_cast<const optim::AdamWOptions&>(options), step);
    case Rule::Adagrad: {
      auto& o = static_cast<const optim::AdagradOptions&>(options);
      u.decay = o.weight_decay() != 0;
      u.numbers = {o.weight_decay(), o.eps(), -(o.lr() / (1 + static_cast<double>(step - 1) * o.lr_decay()))};
      return u;
    }
    case Rule::RMSprop: {
      auto& o = static_cast<const optim::RMSpropOptions&>(options);
      u.decay = o.weight_decay() != 0;
      u.momentum = o.momentum() > 0;
      u.centered = o.centered();
      u.numbers = {o.weight_decay(), o.alpha(), 1 - o.alpha(), o.eps(), o.momentum(), -o.lr()};
      return u;
    }
  }
  VT_UNREACHABLE("rule {}", int(rule));
}

void apply(const Update& u, const Tensor& p, const Tensor& gradient, const std::vector<Tensor>& state, const std::vector<Tensor>& n) {
  Tensor grad = gradient;
  if (u.decay && u.rule != Rule::AdamW) grad = grad.add(p * n[0]);
  switch (u.rule) {
    case Rule::SGD: {
      if (u.momentum) {
        const Tensor& buffer = state[0];
        buffer.mul_(n[1]).add_(grad * n[2]);
        grad = u.nesterov ? grad.add(buffer * n[1]) : buffer;
      }
      return add_unseen(p, grad * n[3]);
    }
    case Rule::Adam:
    case Rule::AdamW: {
      const Tensor &mean = state[0], &square = state[1], &largest = state[2];
      if (u.decay && u.rule == Rule::AdamW) p.mul_(n[0]);
      mean.mul_(n[1]).add_(grad * n[2]);
      square.mul_(n[3]).add_(grad * n[4] * grad);
      if (u.amsgrad) largest.copy_(at::maximum(largest, square));
      const Tensor denominator = ((u.amsgrad ? largest : square).sqrt() / n[5]).add_(n[6]);
      p.add_(mean * n[7] / denominator);
      return;
    }
    case Rule::Adagrad: {
      const Tensor& sum = state[0];
      sum.add_(grad * grad);
      p.add_(grad * n[2] / sum.sqrt().add_(n[1]));
      return;
    }
    case Rule::RMSprop: {
      const Tensor &square = state[0], &buffer = state[1], &mean = state[2];
      square.mul_(n[1]).add_(grad * n[2] * grad);
      Tensor average;
      if (u.centered) {
        mean.mul_(n[1]).add_(grad * n[2]);
        average = square.addcmul(mean, mean, -1).sqrt_().add_(n[3]);
      } else {
        average = square.sqrt().add_(n[3]);
      }
      if (u.momentum) {
        buffer.mul_(n[4]).add_(grad / average);
        p.add_(buffer * n[5]);
      } else {
        p.add_(grad * n[5] / average);
      }
      return;
    }
  }
}

std::unique_ptr<ParamState> new_state(const Update& u, const Tensor& p) {
  auto zeros = [&] { return at::zeros_like(p, {}, at::MemoryFormat::Preserve).detach(); };
  auto adam = [&](auto state) -> std::unique_ptr<ParamState> {
    state->exp_avg(zeros()).exp_avg_sq(zeros());
    if (u.amsgrad) state->max_exp_avg_sq(zeros());
    return state;
  };
  switch (u.rule) {
    case Rule::SGD: {
      if (!u.momentum) return nullptr;
      auto state = std::make_unique<optim::SGDParamState>();
      state->momentum_buffer(zeros());
      return state;
    }
    case Rule::Adam:
      return adam(std::make_unique<optim::AdamParamState>());
    case Rule::AdamW:
      return adam(std::make_unique<optim::AdamWParamState>());
    case Rule::Adagrad:
      TORCH_CHECK(false, "Adagrad makes its state when it is constructed");
    case Rule::RMSprop: {
      auto state = std::make_unique<optim::RMSpropParamState>();
      state->square_avg(zeros());
      if (u.momentum) state->momentum_buffer(zeros());
      if (u.centered) state->grad_avg(zeros());
      return state;
    }
  }
  VT_UNREACHABLE("rule {}", int(u.rule));
}

std::vector<Tensor> tensors_of(Rule rule, const ParamState& state) {
  auto adam = [](const auto& s) { return std::vector<Tensor>{s.exp_avg(), s.exp_avg_sq(), s.max_exp_avg_sq()}; };
  switch (rule) {
    case Rule::SGD:
      return {static_cast<const optim::SGDParamState&>(state).momentum_buffer()};
    case Rule::Adam:
      return adam(static_cast<const optim::AdamParamState&>(state));
    case Rule::AdamW:
      return adam(static_cast<const optim::AdamWParamState&>(state));
    case Rule::Adagrad:
      return {static_cast<const optim::AdagradParamState&>(state).sum()};
    case Rule::RMSprop: {
      auto& s = static_cast<const optim::RMSpropParamState&>(state);
      return {s.square_avg(), s.momentum_buffer(), s.grad_avg()};
    }
  }
  VT_UNREACHABLE("rule {}", int(rule));
}

namespace {

// Calls f with the state as what it is; SGD counts nothing.
template <class F>
void with_count(Rule rule, ParamState& state, F&& f) {
  if (rule == Rule::Adam) f(static_cast<optim::AdamParamState&>(state));
  if (rule == Rule::AdamW) f(static_cast<optim::AdamWParamState&>(state));
  if (rule == Rule::Adagrad) f(static_cast<optim::AdagradParamState&>(state));
  if (rule == Rule::RMSprop) f(static_cast<optim::RMSpropParamState&>(state));
}

}  // namespace

int64_t steps_of(Rule rule, const ParamState& state) {
  int64_t n = 0;
  with_count(rule, const_cast<ParamState&>(state), [&](const auto& s) { n = s.step(); });
  return n;
}
void set_steps(Rule rule, ParamState& state, int64_t n) {
  with_count(rule, state, [&](auto& s) { s.step(n); });
}

}  // namespace vitrify::update
