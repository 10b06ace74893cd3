#include "torch/ask_kernel.h"

#include <c10/core/InferenceMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "ir/faults.h"
#include "ops/lowering.h"
#include "ops/pool.h"
#include "ops/rules.h"
#include "support/budget.h"
#include "torch/convert.h"
#include "torch/mode.h"
#include "torch/stack.h"

namespace vitrify {

using ir::Arg;
using ir::TensorType;
using ir::Value;

// What they keep for their backward is of a size that the kernel alone knows: Meta says another, or none.
bool hides_sizes(const std::string& name) {
  return name == "aten::_embedding_bag" || name == "aten::_embedding_bag_forward_only" || name == "aten::mkldnn_rnn_layer";
}

// Meta says other strides than the kernel gives. What is large is left to the run to find out.
bool hides_strides(const std::string& name, const std::vector<at::Tensor>& results, c10::Device device) {
  constexpr int64_t kMostElements = 1 << 16;
  return (name == "aten::_fft_r2c" || name == "aten::_linalg_svd" || name == "aten::linalg_eig") && device.is_cpu() &&
         std::ranges::all_of(results, [&](const at::Tensor& t) {
           const bool one = t.defined() && name == "aten::_fft_r2c" && std::count(t.sizes().begin(), t.sizes().end(), 1);
           return !t.defined() || one || t.numel() <= kMostElements;
         });
}

namespace {

// LAPACK's pivots, of which one is the first.
bool takes_pivots(std::string_view op) {
  static const std::unordered_set<std::string_view> names{"aten::linalg_lu_solve",      "aten::linalg_lu_solve.out", "aten::linalg_ldl_solve",
                                                          "aten::linalg_ldl_solve.out", "aten::lu_unpack",           "aten::lu_unpack.out"};
  return names.contains(op);
}

// Beside floats, which nobody has said to take all values. LAPACK's own integers are int32: kernels look at those of torch, which are int64.
struct Places {
  explicit Places(const capture::OpInfo& info) : known(info.row || takes_pivots(info.name) || hides_sizes(info.name)) {}
  const bool known;
  bool ints = false, floats = false;
  void add(at::ScalarType t) {
    ints = ints || t == at::kInt;
    floats = floats || at::isFloatingType(t) || at::isComplexType(t);
  }
  explicit operator bool() const { return ints && floats && !known; }
};

}  // namespace

void call_on_made_up(const capture::OpInfo& info, compat::Stack* stack) {
  Places places(info);
  const bool pivots = takes_pivots(info.name);
  const auto args = last(*stack, info.args.size());
  for (size_t i = 0; i < args.size(); ++i) {
    if (std::ranges::find(info.writes, i) != info.writes.end()) continue;
    // The derivative of an embedding trusts that its forward has looked at the rows: of none no zero is one.
    if (args[i].isInt() && args[i].toInt() == 0 && info.op.schema().arguments()[i].name() == "num_weights")
      throw NotAsked(fmt::format("{} is given rows of a table that has none", info.name));
    for_each_tensor(args.slice(i, 1), [&](const at::Tensor& t) {
      places.add(t.scalar_type());
      if (pivots && t.scalar_type() == at::kInt) t.fill_(1);
    });
  }
  if (places) throw NotAsked(fmt::format("{} is given places in memory that only the call knows", info.name));
  const compat::Stack held = *stack;  // several out arguments are given back as references, which a boxed call drops before it has copied them
  info.op.callBoxed(stack);
}

bool lies_alike_without_bits(const capture::OpInfo& info, const compat::Stack& given, const compat::Stack& results) {
  compat::Stack plain = given;
  for_each_tensor(plain, [](const at::Tensor& t) {
    if (t.defined()) t.unsafeGetTensorImpl()->_set_conj(false), t.unsafeGetTensorImpl()->_set_neg(false);
  });
  call_on_made_up(info, &plain);
  std::vector<at::Tensor> with, without;
  flatten_results(results, with);
  flatten_results(plain, without);
  return std::ranges::equal(with, without,
                            [](const at::Tensor& a, const at::Tensor& b) { return !a.defined() || !b.defined() || a.strides() == b.strides(); });
}

Operands look_at(const capture::OpInfo& info, const std::vector<Arg>& args) {
  Operands r;
  Places places(info);
  auto look = [&](const Value& v) {
    if (!v) return;
    const TensorType& t = v.type();
    r.other = r.other || !(t.strides == ir::contiguous_strides(t.sizes));  // those of one element too
    places.add(scalar_type_of(t));
    r.here = r.here && t.device.kind == DeviceKind::CPU;
    double n = 1;
    for (sym::Int s : t.sizes) n *= static_cast<double>(value_of(s));
    r.elements += n;
  };
  for (const Arg& a : args) {
    if (auto* v = std::get_if<Value>(&a)) look(*v);
    if (auto* l = std::get_if<std::vector<Value>>(&a)) std::ranges::for_each(*l, look);
  }
  r.places = bool(places);
  return r;
}

bool has_formula(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::Autograd) || op.hasKernelForDispatchKey(c10::DispatchKey::AutogradCPU);
}

bool checks_operands(const capture::OpInfo& info, bool in_backward) {
  if (!info.row || !info.row->shape || info.flags & (ir::kFaults | ir::kDivides | ir::kRandom | ir::kChecksIndex)) return false;
  return !in_backward || ops::is_elementwise(info.name);
}

// Meta kernels lay results out by rules of their own where operands are not row-major (channels-last images). They are written in Python: the first
// of them that runs has torch import its own compiler, which takes longer than most captures. The kernel takes about as long as in a call.
bool asks_kernel(const capture::OpInfo& info, const std::vector<Arg>& args) {
  if (!info.name.starts_with("aten::") || info.op.schema().is_mutable() || info.flags & (ir::kEffect | ir::kDataDependent)) return false;
  const Operands o = look_at(info, args);
  return o.can_be_made_up();
}

namespace {

struct KindOfCall {
  std::string key;
  void add(const Value& v) {
    if (!v) return add(ir::None{});
    const TensorType& t = v.type();
    fmt::format_to(std::back_inserter(key), "{}.{}{}[", static_cast<int>(t.dtype), t.opaque_scalar_type, t.wrapped_number ? "w" : "");
    for (sym::Int s : t.sizes) fmt::format_to(std::back_inserter(key), "{},", value_of(s));
    key += ']';
  }
  void add(sym::Int i) { fmt::format_to(std::back_inserter(key), "{},", value_of(i)); }
  void add(double d) { fmt::format_to(std::back_inserter(key), "{},", d); }
  void add(bool b) { key += b ? "t," : "f,"; }
  void add(const std::string& s) { fmt::format_to(std::back_inserter(key), "{}:{},", s.size(), s); }
  void add(const ir::Complex& c) { fmt::format_to(std::back_inserter(key), "{}+{}i,", c.re, c.im); }
  void add(ir::None) { key += "-,"; }
  void add(DType t) { fmt::format_to(std::back_inserter(key), "{},", static_cast<int>(t)); }
  void add(Device) {}
  void add(ir::MemoryFormat f) { fmt::format_to(std::back_inserter(key), "{},", static_cast<int>(f)); }
  void add(ir::Layout) {}
  void add(ir::OpaqueArg) {}
  template <class T>
  void add(const std::vector<T>& l) {
    for (const auto& x : l) add(static_cast<const T&>(x));
    key += ']';
  }
};

// `most`: elements of a dim. `make`: of sizes and a type. Others of those types: `as`.
void ask(const ir::Graph& g, const capture::OpInfo& info, const std::vector<Arg>& args, int64_t most, std::optional<at::ScalarType> as,
         const std::function<at::Tensor(at::IntArrayRef, at::TensorOptions)>& make) {
  compat::Stack stack;
  const auto small = [&](const Value& v) {
    const TensorType& t = v.type();
    std::vector<int64_t> sizes = values_of(t.sizes);
    for (int64_t& n : sizes) n = std::min(n, most);
    at::Tensor r = make(sizes, at::TensorOptions(as.value_or(scalar_type_of(t))));
    if (t.wrapped_number) r.unsafeGetTensorImpl()->set_wrapped_number(true);
    return r;
  };
  for (size_t i = 0; i < args.size(); ++i) stack.push_back(to_ivalue(g, args[i], info.args[i], small));
  call_on_made_up(info, &stack);
}

at::Tensor zeros(at::IntArrayRef sizes, at::TensorOptions type) { return at::zeros(sizes, type); }
at::Tensor ones(at::IntArrayRef sizes, at::TensorOptions type) { return at::ones(sizes, type); }
at::Tensor units(at::IntArrayRef sizes, at::TensorOptions type) {
  if (sizes.size() < 2) return ones(sizes, type);
  at::Tensor r = at::zeros(sizes, type);
  r.diagonal(0, -2, -1).fill_(1);
  return r;
}

// A question is not heard, and changes nothing.
struct Asking {
  struct Silent final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silent;
  c10::WarningUtils::WarningHandlerGuard no_warnings{&silent};
  capture::Paused paused;
  c10::InferenceMode ordinary{false};
  c10::impl::ExcludeDispatchKeyGuard below{compat::above_backend_keys()};
};

// Of samples of an infinity, five along each dim: rounded once, the place of the third is not quite zero, and neither is its weight, which leaves
// no NaN.
bool rounds_place_once(DType dtype, size_t n, size_t d, int64_t channels) {
  static std::mutex mutex;
  static std::map<std::tuple<DType, size_t, int64_t>, std::vector<bool>> known;
  const std::lock_guard lock(mutex);
  std::vector<bool>& once = known[{dtype, n, channels}];
  if (!once.empty()) return once[d];
  const Asking asking;
  const std::vector<int64_t> size(n, 5);
  TensorType type;
  type.dtype = dtype;
  std::vector<int64_t> sizes(n + 2, 1);
  sizes[1] = std::max<int64_t>(1, channels);
  at::Tensor x = at::full(sizes, std::numeric_limits<double>::infinity(), at::TensorOptions(scalar_type_of(type)));
  if (channels) x = x.movedim(1, -1).clone(at::MemoryFormat::Contiguous).movedim(-1, 1);
  const at::Tensor r = n == 1   ? at::upsample_linear1d(x, size, false)
                       : n == 2 ? at::upsample_bilinear2d(x, size, false)
                                : at::upsample_trilinear3d(x, size, false);
  std::vector<bool> found;
  for (size_t i = 0; i < n; ++i) {
    at::Tensor t = r[0][0];
    for (size_t j = 0; j < n; ++j) t = t[i == j ? 2 : 4];
    found.push_back(!std::isnan(t.item<double>()));
  }
  once = std::move(found);
  return once[d];
}
[[maybe_unused]] const bool is_asked = (ops::place_rounds_once = rounds_place_once, true);

}  // namespace

bool kernel_takes(const ir::Graph& g, const capture::OpInfo& info, const std::vector<Arg>& args) {
  if (!info.name.starts_with("aten::") || info.op.schema().is_mutable() || info.flags & (ir::kEffect | ir::kRandom | ir::kDataDependent)) return true;
  if (std::ranges::any_of(args, [](const Arg& a) { return std::holds_alternative<ir::OpaqueArg>(a); })) return true;
  const Operands o = look_at(info, args);
  if (!o.here || o.places || (o.elements == 0 && std::ranges::none_of(args, [](const Arg& a) { return std::holds_alternative<Value>(a); })))
    return true;
  KindOfCall kind{info.name + "("};
  for (const Arg& a : args) {
    fmt::format_to(std::back_inserter(kind.key), "{}:", a.index());
    std::visit([&](const auto& x) { kind.add(x); }, a);
  }
  static std::mutex mutex;
  static std::unordered_map<std::string, bool> known;
  {
    const std::lock_guard lock(mutex);
    if (const auto it = known.find(kind.key); it != known.end()) return it->second;
  }
  const Asking asking;
  const auto accepts = [&](int64_t most, std::optional<at::ScalarType> as = {}) {
    try {
      ask(g, info, args, most, as, info.flags & ir::kDivides ? ones : zeros);  // divisors are no zeros
      return true;
    } catch (const std::exception&) {
      rethrow_interrupt();
      return false;
    }
  };
  bool takes;
  if (o.elements <= kMostZeros) {
    takes = accepts(INT64_MAX);
  } else {  // kernels of convolutions and pools take no images of one pixel: what is refused for its type is taken of another
    constexpr int64_t kImage = 16;
    const auto of_others = [&](int64_t most) { return accepts(most, at::kFloat) || accepts(most, at::kLong); };
    takes = accepts(1) || (!of_others(1) && (accepts(kImage) || !of_others(kImage)));
  }
  const std::lock_guard lock(mutex);
  known.emplace(std::move(kind.key), takes);
  return takes;
}

namespace {

bool refuses_layout(const ir::Graph& g, const capture::OpInfo& info, const std::vector<Arg>& args) {
  const Operands o = look_at(info, args);
  return o.other && o.can_be_made_up() && !(info.flags & ir::kRandom) &&
         std::ranges::none_of(args, [](const Arg& a) { return std::holds_alternative<ir::OpaqueArg>(a); }) && kernel_takes(g, info, args);
}

// Ones and unit matrices stand for what it is given. Lengths and the like are neither.
bool may_stand_for(const capture::OpInfo& info, const std::vector<Arg>& args) {
  if (info.op.schema().is_mutable() || info.flags & (ir::kEffect | ir::kDataDependent)) return false;
  if (std::ranges::any_of(args, [](const Arg& a) { return std::holds_alternative<ir::OpaqueArg>(a); })) return false;
  const Operands o = look_at(info, args);
  return o.can_be_made_up();
}

struct Kinds {
  bool ints = false, others = false;
};
Kinds kinds_of(const std::vector<Arg>& args) {
  Kinds r;
  for (const Arg& a : args)
    if (auto* v = std::get_if<Value>(&a); v && *v) (is_int(v->type().dtype) ? r.ints : r.others) = true;
  return r;
}

bool refuses_contents(const ir::Graph& g, const capture::OpInfo& info, const std::vector<Arg>& args) {
  if (!may_stand_for(info, args)) return false;
  const Kinds kinds = kinds_of(args);
  const bool lengths = kinds.ints && kinds.others && !takes_pivots(info.name);
  const Asking asking;
  const KeepsDraws keeps(info.flags & ir::kRandom);
  const auto says = [&](const auto& make) -> std::string {
    try {
      ask(g, info, args, INT64_MAX, {}, make);
    } catch (const c10::NotImplementedError& e) {  // of a type
      return e.what_without_backtrace();
    } catch (const c10::IndexError& e) {  // of a place: zero is one of all that have any
      return lengths ? "no such place" : e.what_without_backtrace();
    } catch (const c10::Error& e) {
      return lengths ? std::string() : e.what_without_backtrace();
    } catch (const std::exception&) {
      rethrow_interrupt();
    }
    return {};
  };
  const std::string of_zeros = says(zeros);
  return !of_zeros.empty() && says(ones) == of_zeros && says(units) == of_zeros;
}

}  // namespace

bool answers_others(const ir::Graph& g, const capture::OpInfo& info, const std::vector<Arg>& args, compat::Stack* results) {
  if (!may_stand_for(info, args) || kinds_of(args).ints) return false;
  const Asking asking;
  const KeepsDraws keeps(info.flags & ir::kRandom);
  for (const auto& make : {ones, units}) {
    const auto lies_so = [&](const Value& v) {
      const TensorType& t = v.type();
      at::Tensor r = at::empty_strided(values_of(t.sizes), values_of(t.strides), at::TensorOptions(scalar_type_of(t)));
      r.copy_(make(r.sizes(), r.options()));
      if (t.wrapped_number) r.unsafeGetTensorImpl()->set_wrapped_number(true);
      return r;
    };
    compat::Stack stack;
    for (size_t i = 0; i < args.size(); ++i) stack.push_back(to_ivalue(g, args[i], info.args[i], lies_so));
    try {
      call_on_made_up(info, &stack);
    } catch (const std::exception&) {
      rethrow_interrupt();
      continue;
    }
    *results = std::move(stack);
    return true;
  }
  return false;
}

bool refuses_for_good(const ir::Graph& g, const capture::OpInfo& info, const std::vector<Arg>& args, bool in_backward) {
  return refuses_layout(g, info, args) || (!in_backward && refuses_contents(g, info, args));
}

}  // namespace vitrify
