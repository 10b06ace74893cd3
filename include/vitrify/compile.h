// vitrify::compile for LibTorch programs: a callable over at::Tensor, or a torch::nn module, compiled on its first call.
//
//   auto f = vitrify::compile([](at::Tensor a, at::Tensor b) { return (a * b).softmax(-1); });
//   auto fast = vitrify::compile(net);          // a shared_ptr to a module or a module holder; calls net->forward(...)
//   at::Tensor y = fast(x);
//
// Arguments and results may be tensors, numbers, bools, enums, strings, at::Scalar, c10::Device, std::optional, std::vector, std::array, std::map,
// std::pair, std::tuple of these, and structs for which `auto fields(S& s) { return std::tie(s.a, s.b); }` stands in the struct's own namespace. A
// result may be void.
//
// The callable runs once per signature on placeholder tensors; what it does besides tensor ops happens then and not on later calls. Guards: dtype,
// sizes, strides, device of every tensor, every other argument's value, the module's training flags and the metadata of its parameters, grad mode,
// inference mode, autocast, thread count. Tensors the callable holds (captured by value or by reference, globals) are taken by identity at capture
// and read live; a module's parameters and buffers may be written in place, but after replace_module or another change of its structure call reset().
//
// A call runs the callable itself, with one warning for each kind of reason, when it reads a tensor's value (item(), data_ptr), when it assigns to an
// argument that it takes by reference, when it needs gradients, or when there are recompile_limit signatures already. Under fullgraph the first two
// throw CaptureError. What the callable throws, it throws as if called directly.
//
// Thread-safe: one compiled object may be called from many threads.
#pragma once
#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <any>
#include <array>
#include <complex>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <variant>
#include <vector>

#include "vitrify/error.h"

namespace vitrify {

// On the CPU all modes give the same code: there are no launch graphs to record, and a kernel is tuned when it is built. They are accepted so that a
// program written for a GPU runs.
enum class Mode { Default, ReduceOverhead, MaxAutotune, MaxAutotuneNoCudagraphs };
// Which sizes of the arguments one compiled signature serves. Auto: the sizes of the first call, and from the second signature on, any value of those
// that changed. Always: any value of every size (0 and 1 are still signatures of their own). Never: every set of sizes is a signature.
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
  void text(std::string_view s) { bytes(s.size()), key.append(s); }
};

template <class T>
concept HasFields = requires(T& t) { fields(t); };
template <class T>
concept IsRange = requires(T& v) {
  v.begin();
  v.end();
  v.size();
};
template <class>
inline constexpr bool kUnsupported = false;

// Visits the leaves of v in order: on_tensor(at::Tensor&) for tensors, `flat` (may be null) gets everything else.
template <class T, class F>
void walk(T& v, Flat* flat, F&& on_tensor) {
  using U = std::remove_const_t<T>;
  if constexpr (std::is_base_of_v<at::Tensor, U>) {
    on_tensor(const_cast<U&>(v));
  } else if constexpr (std::is_arithmetic_v<U> || std::is_enum_v<U> || std::is_same_v<U, c10::Device>) {
    if (flat) flat->tag('n'), flat->bytes(v);
  } else if constexpr (std::is_convertible_v<const U&, std::string_view>) {
    if (flat) flat->tag('s'), flat->text(std::string_view(v));
  } else if constexpr (std::is_same_v<U, at::Scalar>) {
    if (flat) {
      flat->tag('c'), flat->bytes(v.type());
      if (v.isIntegral(/*includeBool=*/true))
        flat->bytes(v.toLong());
      else
        flat->bytes(v.toComplexDouble());
    }
  } else if constexpr (HasFields<U>) {
    std::apply([&](auto&... x) { (walk(x, flat, on_tensor), ...); }, fields(const_cast<U&>(v)));
  } else if constexpr (requires {
                         v.has_value();
                         *v;
                       }) {
    if (flat) flat->tag(v.has_value() ? 'o' : '-');
    if (v.has_value()) walk(*v, flat, on_tensor);
  } else if constexpr (requires { std::tuple_size<U>::value; }) {
    std::apply([&](auto&... x) { (walk(x, flat, on_tensor), ...); }, v);
  } else if constexpr (std::is_same_v<U, std::vector<bool>>) {
    if (flat) {
      flat->tag('['), flat->bytes(v.size());
      for (bool x : v) flat->tag(x ? '1' : '0');
    }
  } else if constexpr (IsRange<U>) {
    using Element = std::decay_t<decltype(*v.begin())>;
    static_assert(!std::is_trivially_copyable_v<U> || std::is_trivially_copyable_v<Element>,
                  "vitrify::compile: pass tensors in a container that owns them, a std::vector");
    if (flat) flat->tag('['), flat->bytes(v.size());
    for (auto&& x : v) walk(x, flat, on_tensor);
  } else if constexpr (std::is_same_v<U, std::nullopt_t> || std::is_same_v<U, std::monostate>) {
    if (flat) flat->tag('0');
  } else if constexpr (requires {
                         v.real();
                         v.imag();
                       }) {
    if (flat) flat->tag('z'), flat->bytes(v.real()), flat->bytes(v.imag());
  } else {
    static_assert(kUnsupported<U>, "vitrify::compile: this argument or result type is not supported; give it a `fields` function in its namespace");
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
  // While it is held, custom ops that have run for a call give what they gave.
  using Rest = std::shared_ptr<void>;
  // False: nothing was written, run the callable itself, holding `rest`. `live`: numbers that the program reads anew.
  bool run(const std::shared_ptr<Entry>&, const std::vector<at::Tensor>& args, std::vector<at::Tensor>& out, Rest& rest,
           at::ArrayRef<double> live = {});
  const std::any& blueprint(const Entry&) const;
  void reset();
  std::string explain() const;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

[[noreturn]] inline void argument_assigned() { throw CaptureError("it assigns to an argument that it takes by reference"); }

// An argument as the callable gets it: the copy made for the capture, with the value category of the call.
template <class Arg, class Copy>
decltype(auto) pass(Copy& copy) {
  if constexpr (std::is_array_v<std::remove_reference_t<Arg>>)
    return (copy);
  else
    return std::forward<Arg>(copy);
}

// Takes the same parameters whatever it is called with: not a template, not an overload set.
template <class F>
inline constexpr bool kOneSignature = requires { &F::operator(); } || std::is_pointer_v<F>;
template <class M>
struct Forward {
  std::shared_ptr<M> module;
  template <class... A>
  auto operator()(A&&... a) -> decltype(module->forward(std::forward<A>(a)...)) {
    return module->forward(std::forward<A>(a)...);
  }
};
template <class M>
inline constexpr bool kOneSignature<Forward<M>> = requires { &M::forward; };

// The arguments that the callable could assign to.
template <class... Args, class Copies, size_t... I>
Flat assignable(Copies& copies, std::index_sequence<I...>) {
  Flat flat;
  auto add = [&](at::Tensor& t) { flat.tensors.push_back(t), flat.tag('t'); };
  auto one = [&]<class Arg>(std::type_identity<Arg>, auto& copy) {
    if constexpr (std::is_lvalue_reference_v<Arg> && !std::is_const_v<std::remove_reference_t<Arg>>) walk(copy, &flat, add);
  };
  (one(std::type_identity<Args>(), std::get<I>(copies)), ...);
  return flat;
}

// What the callable returns for these arguments with placeholders in place of their tensors.
template <class F, class... Args>
auto on_placeholders(F& f, const std::vector<at::Tensor>& placeholders, std::remove_reference_t<Args>&... args) {
  using Returned = std::decay_t<std::invoke_result_t<F&, Args...>>;
  constexpr bool is_void = std::is_void_v<Returned>;
  using Result = std::conditional_t<is_void, std::monostate, Returned>;
  std::tuple<std::decay_t<Args>...> copy{args...};
  size_t next = 0;
  auto fill = [&](at::Tensor& t) { t = placeholders[next++]; };
  walk(copy, nullptr, fill);
  const auto before = assignable<Args...>(copy, std::index_sequence_for<Args...>());
  Result r = std::apply(
      [&](auto&... a) -> Result {
        if constexpr (is_void)
          return f(pass<Args>(a)...), std::monostate();
        else
          return f(pass<Args>(a)...);
      },
      copy);
  const auto after = assignable<Args...>(copy, std::index_sequence_for<Args...>());
  if (before.key != after.key) argument_assigned();
  for (size_t i = 0; i < before.tensors.size(); ++i)
    if (!before.tensors[i].is_same(after.tensors[i])) argument_assigned();
  return r;
}

}  // namespace detail

template <class F>
class Compiled {
 public:
  Compiled(F f, CompileOptions o, std::shared_ptr<torch::nn::Module> m)
      : f_(std::move(f)), engine_(std::make_shared<detail::Engine>(std::move(o), std::move(m))) {}

  template <class... Args>
  auto operator()(Args&&... args) -> std::decay_t<std::invoke_result_t<F&, Args...>> {
    using Returned = std::decay_t<std::invoke_result_t<F&, Args...>>;
    constexpr bool is_void = std::is_void_v<Returned>;
    using Result = std::conditional_t<is_void, std::monostate, Returned>;
    detail::Flat flat;
    using Types = std::conditional_t<detail::kOneSignature<F>, std::tuple<std::decay_t<Args>...>, std::tuple<Args...>>;
    flat.bytes(typeid(Types*).hash_code());  // a generic callable is another one for other types
    auto add = [&](at::Tensor& t) { flat.tensors.push_back(t), flat.tag('t'); };
    (detail::walk(args, &flat, add), ...);
    auto entry = engine_->find(flat, [&](const std::vector<at::Tensor>& fakes, std::any& blueprint) {
      Result r = detail::on_placeholders<F, Args...>(f_, fakes, args...);
      std::vector<at::Tensor> out;
      auto take = [&](at::Tensor& t) { out.push_back(t), t = at::Tensor(); };
      detail::walk(r, nullptr, take);
      blueprint = std::move(r);
      return out;
    });
    std::vector<at::Tensor> out;
    detail::Engine::Rest rest;
    if (!entry || !engine_->run(entry, flat.tensors, out, rest)) return f_(std::forward<Args>(args)...);
    if constexpr (!is_void) {
      Result r = std::any_cast<const Result&>(engine_->blueprint(*entry));
      size_t next = 0;
      auto fill = [&](at::Tensor& t) { t = std::move(out[next++]); };
      detail::walk(r, nullptr, fill);
      return r;
    }
  }

  void reset() { engine_->reset(); }                          // forgets what was compiled, looks at the module anew
  std::string explain() const { return engine_->explain(); }  // graphs, kernels and plans as text

 private:
  F f_;
  std::shared_ptr<detail::Engine> engine_;
};

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
  requires(
      !requires(F f) { f.ptr()->is_training(); } && !requires(F f) { f->is_training(); })
auto compile(F f, CompileOptions o = {}) {
  return Compiled<F>(std::move(f), std::move(o), nullptr);
}

}  // namespace vitrify
