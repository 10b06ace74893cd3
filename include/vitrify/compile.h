// vitrify::compile for LibTorch programs: a callable over at::Tensor, or a torch::nn module, compiled on its first call.
//
//   auto f = vitrify::compile([](at::Tensor a, at::Tensor b) { return (a * b).softmax(-1); });
//   auto fast = vitrify::compile(net);          // a shared_ptr to a module or a module holder; calls net->forward(...)
//   at::Tensor y = fast(x);
//
// Arguments and results may be tensors, integers, floats, bools, strings, std::optional, std::vector, std::array, std::pair, std::tuple of these, and
// structs for which `auto fields(S& s) { return std::tie(s.a, s.b); }` is found by argument-dependent lookup in namespace vitrify or the struct's own.
//
// The callable runs once per signature on placeholder tensors; what it does besides tensor ops happens then and not on later calls. Guards: dtype, sizes,
// strides, device of every tensor, every other argument's value, the module's training flags and the metadata of its parameters, grad mode, inference mode,
// autocast, thread count. A read of a tensor's value (item(), data_ptr) cannot be captured: such a call runs the callable itself, with one warning, or throws
// CaptureError if fullgraph is set. Tensors the callable holds (captured by value or by reference, globals) are taken by identity at capture.
//
// Thread-safe: one compiled object may be called from many threads.
#pragma once
#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <any>
#include <array>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "vitrify/error.h"

namespace vitrify {

enum class Mode { Default, ReduceOverhead, MaxAutotune, MaxAutotuneNoCudagraphs };
enum class Dynamic { Auto, Always, Never };

struct CompileOptions {
  Mode mode = Mode::Default;
  Dynamic dynamic = Dynamic::Auto;
  bool fullgraph = false;
  bool disable = false;
  std::string name = "compiled callable";
  // Names and meanings: docs/options.md. OptionError for an unknown name or a wrong type.
  std::map<std::string, std::variant<bool, int64_t, double, std::string, std::vector<std::string>>> options = {};
};

// Counts since the process began or reset_counters(): captures, kernels_built, kernels_launched, externs_called, fallbacks, eager_calls, ...
std::map<std::string, uint64_t> counters_map();
void reset_counters();

namespace detail {

// A call's arguments taken apart: its tensors in order, and everything else as bytes.
struct Flat {
  std::vector<at::Tensor> tensors;
  std::string key;
  void tag(char c) { key.push_back(c); }
  template <class T>
  void bytes(const T& v) {
    char b[sizeof(T)];
    std::memcpy(b, &v, sizeof(T));
    key.append(b, sizeof(T));
  }
};

template <class T>
concept HasFields = requires(T& t) { fields(t); };

// Visits the leaves of v in order: on_tensor(at::Tensor&) for tensors, `flat` (may be null) gets everything else.
template <class T, class F>
void walk(T& v, Flat* flat, F&& on_tensor) {
  using U = std::remove_const_t<T>;
  if constexpr (std::is_base_of_v<at::Tensor, U>) {
    on_tensor(const_cast<U&>(v));
  } else if constexpr (std::is_arithmetic_v<U> || std::is_enum_v<U>) {
    if (flat) flat->tag('n'), flat->bytes(v);
  } else if constexpr (std::is_same_v<U, std::string>) {
    if (flat) flat->tag('s'), flat->bytes(v.size()), flat->key.append(v);
  } else if constexpr (requires { v.has_value(); *v; }) {
    if (flat) flat->tag(v.has_value() ? 'o' : '-');
    if (v.has_value()) walk(*v, flat, on_tensor);
  } else if constexpr (HasFields<U>) {
    std::apply([&](auto&... x) { (walk(x, flat, on_tensor), ...); }, fields(const_cast<U&>(v)));
  } else if constexpr (requires { std::tuple_size<U>::value; }) {
    std::apply([&](auto&... x) { (walk(x, flat, on_tensor), ...); }, v);
  } else if constexpr (requires { v.begin(); v.end(); v.size(); }) {
    if (flat) flat->tag('['), flat->bytes(v.size());
    for (auto&& x : v) walk(x, flat, on_tensor);
  } else if constexpr (std::is_same_v<U, std::nullopt_t> || std::is_same_v<U, std::monostate>) {
    if (flat) flat->tag('0');
  } else {
    static_assert(!sizeof(U), "vitrify::compile: this argument or result type is not supported; give it a vitrify::fields overload");
  }
}

// One compiled callable: entries by signature. Not a template, lives in libvitrify.
class Engine {
 public:
  Engine(CompileOptions, std::shared_ptr<torch::nn::Module> module);
  ~Engine();
  struct Entry;
  // `trace` runs the callable on placeholders and returns the tensors of its result.
  using Trace = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& placeholders, std::any& blueprint)>;
  // The entry for this call, compiled now if there is none; null: run the callable itself.
  std::shared_ptr<Entry> find(const Flat&, const Trace&);
  std::vector<at::Tensor> run(Entry&, const std::vector<at::Tensor>& args);
  const std::any& blueprint(const Entry&) const;
  void reset();
  std::string explain() const;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace detail

template <class F>
class Compiled {
 public:
  Compiled(F f, CompileOptions o, std::shared_ptr<torch::nn::Module> m) : f_(std::move(f)), engine_(std::make_shared<detail::Engine>(std::move(o), std::move(m))) {}

  template <class... Args>
  auto operator()(Args&&... args) -> std::invoke_result_t<F&, Args...> {
    using Result = std::decay_t<std::invoke_result_t<F&, Args...>>;
    detail::Flat flat;
    auto add = [&](at::Tensor& t) { flat.tensors.push_back(t), flat.tag('t'); };
    (detail::walk(args, &flat, add), ...);
    auto entry = engine_->find(flat, [&](const std::vector<at::Tensor>& fakes, std::any& blueprint) {
      std::tuple<std::decay_t<Args>...> copy{args...};
      size_t next = 0;
      auto fill = [&](at::Tensor& t) { t = fakes[next++]; };
      detail::walk(copy, nullptr, fill);
      Result r = std::apply([&](auto&... a) -> Result { return f_(std::forward<Args>(a)...); }, copy);
      std::vector<at::Tensor> out;
      auto take = [&](at::Tensor& t) { out.push_back(t), t = at::Tensor(); };
      detail::walk(r, nullptr, take);
      blueprint = std::move(r);
      return out;
    });
    if (!entry) return f_(std::forward<Args>(args)...);
    std::vector<at::Tensor> out = engine_->run(*entry, flat.tensors);
    Result r = std::any_cast<const Result&>(engine_->blueprint(*entry));
    size_t next = 0;
    auto fill = [&](at::Tensor& t) { t = std::move(out[next++]); };
    detail::walk(r, nullptr, fill);
    return r;
  }

  void reset() { engine_->reset(); }                         // forgets what was compiled
  std::string explain() const { return engine_->explain(); }  // graphs, kernels and plans as text

 private:
  F f_;
  std::shared_ptr<detail::Engine> engine_;
};

namespace detail {
template <class M>
struct Forward {
  std::shared_ptr<M> module;
  template <class... A>
  auto operator()(A&&... a) -> decltype(module->forward(std::forward<A>(a)...)) {
    return module->forward(std::forward<A>(a)...);
  }
};
}  // namespace detail

template <class M>
  requires std::is_base_of_v<torch::nn::Module, M>
auto compile(std::shared_ptr<M> module, CompileOptions o = {}) {
  return Compiled<detail::Forward<M>>({module}, std::move(o), module);
}
// A holder made by TORCH_MODULE.
template <class H>
  requires requires(H h) { h.ptr()->is_training(); }
auto compile(H holder, CompileOptions o = {}) {
  return compile(holder.ptr(), std::move(o));
}
template <class F>
  requires(!requires(F f) { f.ptr()->is_training(); } && !requires(F f) { f->is_training(); })
auto compile(F f, CompileOptions o = {}) {
  return Compiled<F>(std::move(f), std::move(o), nullptr);
}

}  // namespace vitrify
