// vitrify::compile_step: a step of training in one compiled program, from the forward pass to the update.
//
//   auto step = vitrify::compile_step(net, optimizer, loss);     // net: as for compile(); loss(output, target) -> at::Tensor
//   at::Tensor l = step(x, y);
//
// does what this does, and leaves what it leaves (gradients, optimizer.state(), buffers, generators):
//
//   optimizer.zero_grad();
//   at::Tensor l = loss(net->forward(x), y);
//   l.backward();
//   optimizer.step();
//   l = l.detach();
//
// Of more arguments, the last one is the target; loss may also take the output alone.
//
// torch::optim's SGD, Adam, AdamW, Adagrad and RMSprop update inside the program. Their options are read by each call, so that schedulers never
// recompile; so are step counts. Another optimizer's own step() runs after compiled gradients (LBFGS: with a closure that makes them).
//
// Gradients are compiled by themselves, and the update by itself, when an argument needs gradients, when a parameter has hooks, or when the optimizer
// does not hold all parameters that need gradients.
//
// The optimizer must outlive the step. A step may be saved, loaded or replaced by the loop above at any time; loading compiles once more.
#pragma once
#include <torch/optim/optimizer.h>

#include "vitrify/compile.h"

namespace vitrify {
namespace detail {

// Not a template, lives in libvitrify.
class StepEngine {
 public:
  StepEngine(CompileOptions, std::shared_ptr<torch::nn::Module>, torch::optim::Optimizer&);
  using Loss = std::function<at::Tensor()>;
  using TracedLoss = std::function<at::Tensor(const std::vector<at::Tensor>& placeholders)>;
  // `traced`: the loss on placeholders of the call's tensors. `loss`: the loss of this call, by a program of its own, with its gradients.
  at::Tensor run(const Flat& call, const TracedLoss& traced, const Loss& loss);
  void reset();
  std::string explain() const;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

template <class M, class L>
struct LossOf {
  std::shared_ptr<M> module;
  L loss;
  template <class... A>
  at::Tensor operator()(A&&... a) {
    static_assert(sizeof...(A) > 0, "vitrify::compile_step: a step takes the arguments of forward() and a target");
    return call(std::tie(a...), std::make_index_sequence<sizeof...(A) - 1>());
  }

 private:
  template <class T, size_t... I>
  at::Tensor call(T all, std::index_sequence<I...>) {
    auto& last = std::get<sizeof...(I)>(all);
    if constexpr (requires { loss(module->forward(std::get<I>(all)...), last); })
      return loss(module->forward(std::get<I>(all)...), last);
    else
      return loss(module->forward(std::get<I>(all)..., last));
  }
};
template <class M, class L>
inline constexpr bool kOneSignature<LossOf<M, L>> = true;

[[noreturn]] inline void null_argument(const char* name) { throw OptionError(std::string("compile_step: `") + name + "` is null"); }

}  // namespace detail

template <class F>
class CompiledStep {
 public:
  CompiledStep(F f, CompileOptions o, std::shared_ptr<torch::nn::Module> m, torch::optim::Optimizer& optimizer)
      : f_(f), loss_(std::move(f), o, m), engine_(std::move(o), std::move(m), optimizer) {}

  template <class... Args>
  at::Tensor operator()(Args&&... args) {
    detail::Flat flat;
    flat.bytes(typeid(std::tuple<std::decay_t<Args>...>*).hash_code());
    auto add = [&](at::Tensor& t) { flat.tensors.push_back(t), flat.tag('t'); };
    (detail::walk(args, &flat, add), ...);
    return engine_.run(
        flat, [&](const std::vector<at::Tensor>& fakes) { return detail::on_placeholders<F, Args...>(f_, fakes, args...); },
        [&] { return loss_(args...); });
  }

  void reset() { loss_.reset(), engine_.reset(); }  // forgets what was compiled, looks at the module anew
  std::string explain() const { return engine_.explain() + loss_.explain(); }

 private:
  F f_;
  Compiled<F> loss_;
  detail::StepEngine engine_;
};

template <class M, class L>
  requires std::is_base_of_v<torch::nn::Module, M>
auto compile_step(std::shared_ptr<M> net, torch::optim::Optimizer& optimizer, L loss, CompileOptions o = {}) {
  if (!net) detail::null_argument("net");
  if constexpr (requires { loss == nullptr; })
    if (loss == nullptr) detail::null_argument("loss");
  using F = detail::LossOf<M, L>;
  return CompiledStep<F>(F{net, std::move(loss)}, std::move(o), net, optimizer);
}
// A holder made by TORCH_MODULE.
template <class H, class L>
  requires requires(H h) { h.ptr()->is_training(); }
auto compile_step(H net, torch::optim::Optimizer& optimizer, L loss, CompileOptions o = {}) {
  if (net.is_empty()) detail::null_argument("net");
  return compile_step(net.ptr(), optimizer, std::move(loss), std::move(o));
}

}  // namespace vitrify
