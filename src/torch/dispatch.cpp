// One op arrives below autograd: decomposed, recorded, or refused.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/PythonFallbackKernel.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include "ir/faults.h"
#include "ops/shapes.h"
#include "support/budget.h"
#include "torch/ask_kernel.h"
#include "torch/bits.h"
#include "torch/composite_state.h"
#include "torch/composites.h"
#include "torch/convert.h"
#include "torch/learned.h"
#include "torch/overlap.h"
#include "torch/passes/layout.h"
#include "torch/process_state.h"
#include "torch/random.h"
#include "torch/slice.h"
#include "torch/stack.h"
#include "torch/sym_node.h"
#include "torch/tracer_impl.h"

namespace vitrify {

using c10::IValue;
using capture::as_fake;
using capture::fail;
using capture::FakeImpl;
using capture::OpKind;
using compat::Stack;
using ir::Arg;
using ir::TensorType;
using ir::Value;

namespace {

// Rules know a type that is none of ours as such, but not which: it is that of an operand.
void name_foreign(std::span<TensorType> types, const std::vector<Arg>& args) {
  const auto is_foreign = [](const TensorType& t) { return t.dtype == DType::Opaque && t.opaque_scalar_type; };
  uint8_t name = 0;
  for (const Arg& a : args) {
    if (const auto* v = std::get_if<Value>(&a); v && *v && is_foreign(v->type())) name = name ? name : v->type().opaque_scalar_type;
    if (const auto* l = std::get_if<std::vector<Value>>(&a))
      for (const Value& v : *l)
        if (v && is_foreign(v.type())) name = name ? name : v.type().opaque_scalar_type;
  }
  for (TensorType& t : types)
    if (t.dtype == DType::Opaque && !t.opaque_scalar_type) t.opaque_scalar_type = name;
}

// Nothing says what the op gives.
using NoMeta = NotAsked;
// Autograd has not seen the op, since it takes inference tensors only or has no formula, and would see what its kernel calls.
bool kernel_may_need_gradients(const capture::OpInfo& info, c10::ArrayRef<IValue> args) {
  if (!c10::GradMode::is_enabled() || c10::InferenceMode::is_enabled() || info.kind == OpKind::View) return false;
  const bool custom = (info.flags & ir::kEffect) && info.kind != OpKind::Composite && !has_formula(info.op);
  bool needed = false, seen = false;
  for_each_tensor(args, [&](const at::Tensor& t) {
    needed = needed || ((custom || t.is_inference()) && t.requires_grad());
    seen = seen || !(custom || t.is_inference());
  });
  return needed && !seen;
}
// Of the kernel that takes it apart.
std::optional<c10::DispatchKey> composite_key(const capture::OpInfo& info) {
  const auto key = std::ranges::find_if(kCompositeKeys, [&](c10::DispatchKey k) { return info.op.hasKernelForDispatchKey(k); });
  return key == kCompositeKeys.end() ? std::nullopt : std::optional(*key);
}
// A view that needs gradients by its base alone.
bool made_without_gradients(const at::Tensor& t) {
  if (!t.is_view() || !t.requires_grad()) return false;
  return torch::autograd::impl::get_view_autograd_meta(t)->get_creation_meta() == torch::autograd::CreationMeta::NO_GRAD_MODE;
}
// That the call is given, if it is another than the one of the process.
std::optional<at::Generator> generator_of(const ir::Graph& g, const std::vector<Arg>& args) {
  for (const Arg& a : args)
    if (const auto* opaque = std::get_if<ir::OpaqueArg>(&a))
      if (const auto& v = *static_cast<const IValue*>(g.constants.at(opaque->index).get()); v.isGenerator())
        if (const at::Generator given = v.toGenerator(); given.device().is_cpu() && given != at::detail::getDefaultCPUGenerator()) return given;
  return std::nullopt;
}
// Attention and recurrent layers draw only where they drop something.
bool drops_nothing(const capture::OpInfo& info, const std::vector<Arg>& args) {
  const bool attention = info.name.find("scaled_dot_product") != std::string::npos;
  bool known = false, drops = false, trains = true;
  for (size_t i = 0; i < args.size(); ++i) {
    const std::string& name = info.op.schema().arguments()[i].name();
    if (name == (attention ? "dropout_p" : "dropout")) known = true, drops = std::get<double>(args[i]) != 0;
    if (const bool* train = std::get_if<bool>(&args[i]); name == "train" && !attention && train) trains = *train;
  }
  return known && !(drops && trains);
}

// One of those nodes, if it calls the op with what is computed as `args` are.
const ir::Node* computes_alike(const std::vector<ir::Node*>& nodes, const std::string& op, const std::vector<Arg>& args) {
  const auto same = [](const Arg& a, const Arg& b) {
    const Value *v = std::get_if<Value>(&a), *w = std::get_if<Value>(&b);
    return a == b || (v && w && same_computation(*v, *w));
  };
  const auto at = std::ranges::find_if(nodes, [&](const ir::Node* n) { return n->op->name == op && std::ranges::equal(n->args, args, same); });
  return at == nodes.end() ? nullptr : *at;
}

}  // namespace

void Tracer::Impl::dispatch(const c10::OperatorHandle& op, Stack* stack) {
  const OpInfo& info = ops.get(op);
  const bool whole = capture::stays_whole() && has_rule(info, last(*stack, info.args.size()));
  if (const void* hooks = in_backward ? nullptr : capture::hooks_on_saved(); hooks && hooks != outer_hooks)
    hooked.insert(at::sequence_number::peek() - 1);  // of the node that autograd has just made for it
  if (!in_backward) {
    turn_now = {at::sequence_number::peek() - 1, graph->next_id()};
    if ((info.flags & ir::kEffect) && !info.name.starts_with("aten::")) last_write = turn_now;
  }
  at::sequence_number::get_and_increment();  // free numbers between autograd's: see in_turn
  if (!in_backward && !went_back && goes_back()) went_back = true;
  try {
    if (c10::GradMode::is_enabled() && !in_backward)  // eager's base of such a view is the leaf's own, which needs none
      for_each_tensor(last(*stack, info.args.size()), [&](const at::Tensor& t) {
        if (!t.defined() || !made_without_gradients(t)) return;
        const at::Tensor of(t._base());
        const FakeImpl* base = as_fake(of);
        if (const int32_t i = base ? base->view->storage->input : -1; i >= 0)
          if (const Source& s = *inputs[static_cast<size_t>(i)]; s.real.is_view() && s.real.is_leaf())
            fail(fmt::format("makes a view of '{}', a leaf that is a view, in no_grad, and reads it where gradients may follow", s.name));
      });
    if (saved && !saved->saved_tensor_hooks.stack.empty() && at::SavedTensorDefaultHooks::get_disabled_error_message())
      fail("refuses hooks on saved tensors, which there are around the call");
    if (kernel_may_need_gradients(info, last(*stack, info.args.size())))
      fail(fmt::format("calls {} on a tensor that needs gradients: autograd sees what its kernel calls", info.name));
    if ((info.kind == OpKind::Composite && !whole) || (info.sees_autocast && Cast::asked_for())) {
      if (composite_key(info)) return decompose(info, stack);
      for_each_tensor(last(*stack, info.args.size()), [&](const at::Tensor& t) {
        if (at::isReducedFloatingType(t.scalar_type()) && t.scalar_type() != at::autocast::get_autocast_dtype(at::kCPU))
          fail(fmt::format("calls {}, which joins {} under autocast to another half", info.name, c10::toString(t.scalar_type())));
      });
    }
    if ((info.flags & ir::kEffect) && c10::InferenceMode::is_enabled())
      for_each_tensor(last(*stack, info.args.size()),
                      [&](const at::Tensor& t) { gives_ordinary = gives_ordinary || (t.defined() && !t.is_inference()); });
    // One call per tensor: they fuse with what is around them.
    if (info.name.starts_with("aten::_foreach_")) return decompose_list(info, stack);
    if (has_live_number(info, *stack)) return decompose_numbers(info, stack);
    std::optional<capture::Paused> paused(std::in_place);
    if (info.kind == OpKind::Pass) {
      op.callBoxed(stack);
      return;
    }
    if (source_callback) {
      std::string where = source_callback();
      auto [it, fresh] = source_ids.try_emplace(where, graph->sources.size());
      if (fresh) graph->sources.push_back(where);
      source = it->second;
    }
    const size_t given = stack->size();
    try {
      return run(info, stack);
    } catch (const capture::Undescribed& e) {
      paused.reset();
      if (!describe(info, *stack)) fail(e.what());
    } catch (const CaptureError&) {
      throw;
    } catch (const std::bad_alloc&) {
      throw;
    } catch (const std::exception&) {
      if (stack->size() != given) throw;  // the arguments are gone
      rethrow_as_eager(info, last(*stack, info.args.size()));
    }
    paused.emplace();
    run(info, stack);
    described.reset();
  } catch (const CaptureError& e) {
    if (!failure) failure = e.what();
    throw;
  } catch (const InternalError& e) {  // autograd and Python make other exceptions of it
    if (!failure) failure = fmt::format("internal error: {}", e.what());
    throw;
  }
}

// What has refused the op is its Meta kernel, or a rule: the program may catch the error and look at it. The kernel itself says what eager raises, of
// zeros as well only if it is not for what they hold.
void Tracer::Impl::rethrow_as_eager(const OpInfo& info, c10::ArrayRef<IValue> args) {
  const std::exception_ptr refusal = std::current_exception();
  rethrow_interrupt();
  if (raised_now || in_backward) std::rethrow_exception(refusal);
  raised_now = fmt::format("{} raises, which the program catches", info.name);
  if (info.flags & (ir::kEffect | ir::kDataDependent)) std::rethrow_exception(refusal);
  const Operands o = look_at(info, convert_args(info, args));
  if (!o.can_be_made_up()) std::rethrow_exception(refusal);
  try {
    c10::Device device = c10::kCPU;
    run_meta(info, args, &device, true, true);
  } catch (const CaptureError&) {
    std::rethrow_exception(refusal);
  } catch (const std::exception&) {
    rethrow_interrupt();
    if (refuses_for_good(*graph, info, convert_args(info, args), false)) raised_now.reset();
    throw;
  }
  std::rethrow_exception(refusal);
}

void Tracer::Impl::run(const OpInfo& info, Stack* stack) {
  if (ops::default_float() != to_dtype(c10::get_default_dtype_as_scalartype())) fail("changes the default dtype");
  switch (info.kind) {
    case OpKind::Refuse:
      fail(info.why);
    case OpKind::Special:
      return run_special(info, stack);
    case OpKind::View:
      return run_view(info, stack);
    case OpKind::InPlaceView:
      return run_in_place_view(info, stack);
    case OpKind::Write:
      return run_write(info, stack);
    case OpKind::Effect:
      return run_effect(info, stack);
    default:
      return run_pure(info, stack);
  }
}

// What the composite calls arrives here.
void Tracer::Impl::decompose(const OpInfo& info, Stack* stack) {
  const auto& returns = info.op.schema().returns();
  if ((info.flags & ir::kEffect) && std::ranges::none_of(returns, [](const c10::Argument& r) {
        return r.type()->kind() == c10::TypeKind::TensorType || r.type()->kind() == c10::TypeKind::ListType;
      }))
    fail(fmt::format("calls {}, of which nothing is known but that it has no tensor for a result", info.name));
  const c10::DispatchKey key = *composite_key(info);
  const size_t below = stack->size() - info.args.size();
  const Stack given(stack->begin() + static_cast<std::ptrdiff_t>(below), stack->end());
  bool seen = false;  // by autograd, which has taken it apart if it is called from above
  for_each_tensor(given, [&](const at::Tensor& t) { seen = seen || !t.is_inference(); });
  const bool explicit_kernel = key != c10::DispatchKey::CompositeImplicitAutograd;
  const bool whole =
      !explicit_kernel && !info.op.hasKernelForDispatchKey(c10::DispatchKey::ADInplaceOrView) && (!seen || c10::InferenceMode::is_enabled());
  const Counted counted(whole);
  const Conjugates conjugates(true);
  const Negatives negatives(true);
  const Cast cast((whole || explicit_kernel) && !info.op.hasKernelForDispatchKey(Cast::kKey));
  const size_t nodes = graph->nodes().size();
  // Without gradients it has a kernel of its own, which takes less than what it is taken apart into.
  if (info.flags & ir::kGivesContiguous && !(c10::GradMode::is_enabled() && given[0].toTensor().requires_grad()) &&
      !kernel_takes(*graph, info, convert_args(info, given)))
    fail(fmt::format("{} refuses what it is given", info.name));
  try {
    std::optional<capture::Unseen> unseen;
    if (!info.taken_apart_seen) unseen.emplace();
    info.op.callBoxedForDispatchKey(key, *stack);
  } catch (const c10::Error& e) {
    // Some look at values unless a mode is on (ctc_loss).
    if (info.taken_apart_seen || info.op.schema().is_mutable() || !capture::reads_placeholder(e)) throw;
    const auto& made = graph->nodes();
    if (std::any_of(made.begin() + static_cast<std::ptrdiff_t>(nodes), made.end(),
                    [](const ir::Node* n) { return n->op->flags & (ir::kRandom | ir::kEffect); }))
      throw;
    stack->resize(below);
    stack->insert(stack->end(), given.begin(), given.end());
    info.op.callBoxedForDispatchKey(key, *stack);
  }
  if (info.flags & ir::kGivesContiguous) {
    at::Tensor t = stack->back().toTensor().contiguous();
    const TensorType& type = as_fake(fake_of(t))->view->type;
    if (type.strides != ir::contiguous_strides(type.sizes)) t = t.clone(at::MemoryFormat::Contiguous);  // along dims of one element
    stack->back() = std::move(t);
  }
}

c10::intrusive_ptr<c10::TensorImpl> Tracer::Impl::detach(const c10::TensorImpl* real) {
  capture::Paused paused;
  auto self = c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(const_cast<c10::TensorImpl*>(real));
  FakeImpl* fake = as_fake(fake_of(at::Tensor(std::move(self))));
  return fake->shallow_copy_and_detach(c10::VariableVersion(0), false);
}

// Ops of others may ask for whatever is set around them: plans run them in the state that the call began in.
void Tracer::Impl::check_surroundings(const OpInfo& info) const {
  if (library_state() != saved->library || at::get_num_threads() != saved->threads)
    fail(fmt::format("sets a state of the process around {}", info.name));
  if (in_backward) return;
  const at::impl::RestorePythonTLSSnapshot as_the_program_has_it;  // a mode is called without autocast
  if (at::autocast::is_autocast_enabled(at::kCPU)) fail(fmt::format("calls {} under autocast, which it may see", info.name));
}

ir::Node* Tracer::Impl::append(const OpInfo& info, std::vector<Arg> args, Types outs) {
  uint32_t flags = info.flags;
  if (info.flags & ir::kEffect) return append_custom(info, std::move(args), std::move(outs));
  if (!info.name.starts_with("aten::") && !info.name.starts_with("vitrify::")) {
    check_surroundings(info);
    if (generators_moved()) fail("sets the state of a random number generator");  // prims draw and do not say so
  }
  if ((flags & ir::kRandom) && drops_nothing(info, args)) flags &= ~ir::kRandom;
  std::string state;
  if (const auto own = flags & ir::kRandom ? generator_of(*graph, args) : std::nullopt) {  // checkpoints do not take it back
    if (seed_set()) fail("sets the state of a random number generator");
    refuse_other_draws();
    draw_from(*own);
  } else if (flags & ir::kRandom) {
    state = state_key();
    if (goes_back())
      if (ir::Node* before = drawn_before(state, info, args, outs)) return before;
    if (generators_moved())
      fail(in_backward ? "draws, from where a random number generator was in the forward, other numbers than there: what a checkpoint draws by "
                         "(dropout's p, sizes) is to be changed before the call"
                       : "sets the state of a random number generator");
    refuse_other_draws();
    draw();
    last_forward_states = states();
  }
  const ir::Op* op = graph->op(info.name, flags);
  if ((op->flags ^ flags) & ir::kRandom) fail(fmt::format("{} with and without dropout in one program", info.name));
  ir::Node* n = graph->append(op, std::move(args), std::move(outs));
  n->source = source;
  if (!state.empty()) draws.try_emplace(std::move(state), Drawn{n, saved->cpu_engine});
  if ((flags & ir::kRandom) && !in_backward) last_write = turn_now;
  return n;
}

ir::Node* Tracer::Impl::append(std::string_view name, std::vector<Arg> args, Types outs) {
  const OpInfo* info = ops.find(name);
  VT_CHECK(info, "torch has no {}", name);
  return append(*info, std::move(args), std::move(outs));
}

std::vector<Arg> Tracer::Impl::convert_args(const OpInfo& info, c10::ArrayRef<IValue> args) {
  std::vector<Arg> r;
  r.reserve(args.size());
  auto resolve = [this](const at::Tensor& t) { return value_of_tensor(t); };
  for (size_t i = 0; i < args.size(); ++i) r.push_back(to_arg(*graph, args[i], info.args[i], resolve));
  return r;
}

bool Tracer::Impl::has_rule(const OpInfo& info, c10::ArrayRef<IValue> args) {
  return info.row && info.row->shape && info.row->shape(graph->ctx(), convert_args(info, args));
}

// The op's Meta kernel on tensors of the same metadata; `device`: where the results live.
// `real`: the kernel itself is asked, on zeros: many of ATen's Meta kernels are written in Python, and a C++ process has none of those.
Stack Tracer::Impl::run_meta(const OpInfo& info, c10::ArrayRef<IValue> args, c10::Device* device, bool specialize, bool real) {
  if (real ? !info.name.starts_with("aten::") || (info.flags & (ir::kEffect | ir::kDataDependent))
           : !info.op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta))
    throw NoMeta(fmt::format("no shape rule and no Meta kernel for {}", info.name));
  std::optional<c10::Device> named, first, accelerator;
  bool bits = false;
  Stack metas;
  metas.reserve(args.size());
  auto convert = [&](const at::Tensor& t) -> at::Tensor {
    // A number stays the CPU tensor it is: Python Meta kernels read its value.
    if (!t.defined()) return t;
    if (t.unsafeGetTensorImpl()->is_wrapped_number() && !as_fake(t)) {
      auto n = symbolic_number(t);
      if (!n) return t;
      if (n->isSymFloat()) {
        const uint32_t step = capture::step_of(n->toSymFloat()).value();
        if (numbers->steps[step].traced) fail("reads a tensor's value: aten::item");
        n = numbers->seen[step];
      } else if (n->isSymbolic()) {
        n = capture::static_value(n->toSymInt(), specialize).toInt();
      }
      at::Tensor number = at::scalar_tensor(*n, at::TensorOptions(t.scalar_type()));
      number.unsafeGetTensorImpl()->set_wrapped_number(true);
      return number;
    }
    at::Tensor fake = fake_of(t);
    FakeImpl* f = as_fake(fake);
    if (!first) first = f->device();
    if (!accelerator && !f->device().is_cpu()) accelerator = f->device();
    if (specialize) f->specialize();
    if (!real) return f->meta();
    if (!f->device().is_cpu()) fail(fmt::format("no shape rule and no Meta kernel for {}", info.name));
    bits = bits || f->is_conj() || f->is_neg();
    return f->zeros();
  };
  for (size_t i = 0; i < args.size(); ++i) {
    const IValue& v = args[i];
    if (v.isTensor()) {
      metas.emplace_back(convert(v.toTensor()));
    } else if (v.isTensorList()) {
      c10::List<at::Tensor> l;
      for (const at::Tensor& t : v.toTensorVector()) l.push_back(convert(t));
      metas.emplace_back(std::move(l));
    } else if (info.args[i] == ArgKind::OptionalTensorList && v.isList()) {
      c10::List<std::optional<at::Tensor>> l;
      for (const IValue& e : v.toListRef()) l.push_back(e.isNone() ? std::nullopt : std::optional<at::Tensor>(convert(e.toTensor())));
      metas.emplace_back(std::move(l));
    } else if (v.isDevice()) {
      named = v.toDevice();
      metas.emplace_back(c10::Device(c10::kMeta));
    } else if (v.isGenerator()) {
      metas.emplace_back();
    } else {
      metas.push_back(capture::static_value(v, specialize));
    }
  }
  bool factory = !first;
  for (size_t i = 0; (factory || real) && i < args.size(); ++i)
    if (info.args[i] == ArgKind::Device) metas[i] = c10::Device(real && (!named || named->is_cpu()) ? c10::kCPU : c10::kMeta);
  *device = named ? *named : accelerator ? *accelerator : first ? *first : c10::Device(c10::kCPU);
  if (device->is_cuda() && !device->has_index()) *device = c10::Device(c10::kCUDA, accelerator ? accelerator->index() : 0);
  // The Meta kernels of products take any two dtypes, the real ones raise or make another than they say.
  if (info.flags & ir::kOneDtype) {
    std::optional<at::ScalarType> dtype;
    for (const IValue& v : metas) {
      if (!v.isTensor() || !v.toTensor().defined()) continue;
      const at::ScalarType t = v.toTensor().scalar_type();
      if (t != dtype.value_or(t)) fail(fmt::format("{} of two dtypes", info.name));
      dtype = t;
    }
  }
  c10::impl::ExcludeDispatchKeyGuard below(compat::above_backend_keys());
  // Without a tensor the dispatcher would find the very kernel of a custom op, which has effects.
  const bool custom = factory && (info.flags & ir::kEffect);
  const KeepsDraws keeps(real && info.flags & ir::kRandom);
  if (custom && !info.op.hasKernelForDispatchKey(c10::DispatchKey::Meta)) throw NoMeta(fmt::format("no Meta kernel for {}", info.name));
  const Stack held = metas;  // as in call_on_made_up()
  try {
    if (custom)
      info.op.callBoxedForDispatchKey(c10::DispatchKey::Meta, metas);
    else if (real)
      call_on_made_up(info, &metas);
    else
      info.op.callBoxed(&metas);
  } catch (const c10::NotImplementedError& e) {
    if (!real && !options.python_mode) return run_meta(info, args, device, specialize, true);
    throw NoMeta(fmt::format("no shape rule and no Meta kernel for {} ({})", info.name, e.what_without_backtrace()));
  }
  if (bits && !lies_alike_without_bits(info, held, metas))  // calls are given none
    fail(fmt::format("{} lays its result out by the conjugate or negative bit of what it is given", info.name));
  return metas;
}

Tracer::Impl::Call Tracer::Impl::record_call(const OpInfo& info, c10::ArrayRef<IValue> args) {
  Call call;
  std::vector<Arg> converted = convert_args(info, args);
  bool only_tensors = true;
  for (const auto& r : info.op.schema().returns()) {
    auto kind = r.type()->kind();
    only_tensors &= kind == c10::TypeKind::TensorType || kind == c10::TypeKind::ListType;
  }
  if (!only_tensors && (info.flags & ir::kEffect)) fail(fmt::format("calls {}, whose result is no tensor", info.name));
  if (info.flags & ir::kCopiesMemory) {
    const FakeImpl* f = as_fake(fake_of(args[0].toTensor()));
    const TensorType& t = f->view->type;
    bool repeats = false;  // what has a stride of zero is written out
    for (size_t d = 0; d < t.dim(); ++d) repeats = repeats || (t.strides[d].is(0) && !t.sizes[d].is(1));
    if (!repeats && !ops::is_dense(graph->ctx(), t) && (f->specialize(), may_overlap_itself(f->hint_sizes(), f->hint_strides())))
      fail(fmt::format("{} writes to a tensor that overlaps itself", info.name));
  }
  bool plain = true;  // rules know the types of the IR only
  for (size_t i = 0; i < converted.size(); ++i) {
    if (info.args[i] == ArgKind::ScalarType && std::holds_alternative<ir::OpaqueArg>(converted[i])) plain = false;
    if (auto* l = std::get_if<ir::Layout>(&converted[i]); l && *l != ir::Layout::Strided)
      fail(fmt::format("{} makes a tensor that is not strided", info.name));
    if (auto* d = std::get_if<vitrify::Device>(&converted[i]); d && d->kind != DeviceKind::CPU)
      fail(fmt::format("{} makes a tensor that does not lie on the CPU", info.name));
  }
  if ((call.node = info.flags & ir::kDataDependent ? found_before(info, converted) : nullptr)) {
    call.types.assign(call.node->outs.begin(), call.node->outs.end());
    return call;
  }
  std::optional<Types> ruled;
  std::vector<at::Tensor> now;
  const size_t symbols = graph->ctx().num_symbols();
  const ir::Node* alike = in_backward && (info.flags & ir::kDataDependent) ? computes_alike(found_nodes, info.name, converted) : nullptr;
  if (alike)  // a checkpoint finds again what the program has found
    ruled.emplace(alike->outs.begin(), alike->outs.end());
  else if (only_tensors && plain && info.row && info.row->shape)
    ruled = info.row->shape(graph->ctx(), converted);
  if (ruled) name_foreign({ruled->data(), ruled->size()}, converted);
  if (described) ruled = described;
  const bool finds = graph->ctx().num_symbols() > symbols;
  if (finds && ruled) now = find_sizes(info, converted, *ruled, symbols);
  if (!ruled || (options.check_shapes && !finds && !described && !alike)) {
    c10::Device device = c10::kCPU;
    bool asked = false;  // the kernel itself has said it
    try {
      if (!ruled && !(info.flags & ir::kEffect) && info.kind == OpKind::Pure && (info.flags & ir::kDataDependent))
        throw NoMeta(fmt::format("reads a tensor's value: {}", info.name));
      const bool asks = !ruled && asks_kernel(info, converted);
      try {
        asked = hides_sizes(info.name) || asks || info.kind == OpKind::Composite;
        call.metas = run_meta(info, args, &device, !ruled, asked);
      } catch (const CaptureError&) {
        throw;
      } catch (const std::exception&) {  // perhaps it takes no zeros
        rethrow_interrupt();
        if (!asks || checks_operands(info, in_backward) || refuses_for_good(*graph, info, converted, in_backward)) throw;
        asked = answers_others(*graph, info, converted, &call.metas);
        if (!asked) call.metas = run_meta(info, args, &device, !ruled);
      }
    } catch (const NoMeta& e) {
      if (info.flags & ir::kEffect) throw capture::Undescribed(e.what());
      if (!ruled && !run_now(info, converted, &call.metas)) {
        if (info.flags & ir::kDataDependent) throw;
        call.metas = run_meta(info, args, &device, true, true);
      }
    } catch (const CaptureError&) {
      if (!ruled) throw;
    } catch (const std::exception& e) {
      rethrow_interrupt();
      if ((info.flags & ir::kEffect) && options.describe) throw capture::Undescribed(e.what());
      const Operands o = look_at(info, converted);
      if (ruled || !o.can_be_made_up()) throw;
      const auto refusal = std::current_exception();
      try {  // Meta kernels written in Python refuse what others take
        call.metas = run_meta(info, args, &device, true, true);
      } catch (const NoMeta&) {
        std::rethrow_exception(refusal);
      }
    }
    std::vector<at::Tensor> tensors;
    flatten_results(call.metas, tensors);
    if (!asked && hides_strides(info.name, tensors, device)) {
      call.metas = run_meta(info, args, &device, !ruled, true);
      tensors.clear();
      flatten_results(call.metas, tensors);
    }
    for (const at::Tensor& t : tensors) {
      if (t.defined() && (t.layout() != at::kStrided || t.is_quantized())) fail(fmt::format("{} makes a sparse or quantized tensor", info.name));
      TensorType type = t.defined() ? type_of(t) : undefined_type();
      if (t.defined()) type.device = to_device(device);
      type.wrapped_number = false;
      call.types.push_back(std::move(type));
    }
    if (ruled && !tensors.empty()) {
      VT_CHECK(ruled->size() == call.types.size(), "{}: the shape rule gives {} results, ATen {}", info.name, ruled->size(), call.types.size());
      for (size_t i = 0; i < call.types.size(); ++i) {
        const TensorType &r = (*ruled)[i], &m = call.types[i];
        if (is_undefined(m) || info.name == "aten::native_batch_norm") continue;  // Meta is wrong about the statistics of eval mode
        VT_CHECK(
            r.dtype == m.dtype && values_of(r.sizes) == values_of(m.sizes) && values_of(r.strides) == values_of(m.strides) && r.device == m.device,
            "{} result {}: the shape rule gives {} [{}] [{}], ATen {} [{}] [{}]", info.name, i, to_string(r.dtype),
            fmt::join(values_of(r.sizes), ","), fmt::join(values_of(r.strides), ","), to_string(m.dtype), fmt::join(values_of(m.sizes), ","),
            fmt::join(values_of(m.strides), ","));
      }
    }
  }
  if (ruled) {
    call.types = std::move(*ruled);
    for (size_t i = 0; i < converted.size(); ++i)
      if (auto* mask = std::get_if<std::vector<bool>>(&converted[i]); mask && info.op.schema().arguments()[i].name() == "output_mask")
        for (size_t k = 0; k < mask->size() && k < call.types.size(); ++k)
          if (!(*mask)[k]) call.types[k] = undefined_type();
  }
  for (const TensorType& t : call.types)
    if (std::ranges::any_of(t.strides, [](sym::Int i) { return i.is_const() && i.value() < 0; }))
      fail(fmt::format("{} is given negative strides", info.name));
  if (std::ranges::any_of(call.types, [](const TensorType& t) { return t.device.kind != DeviceKind::CPU; }))
    fail(fmt::format("{} makes a tensor that does not lie on the CPU", info.name));
  if (call.types.empty() && !(info.flags & ir::kEffect)) return call;  // an answer about metadata
  bool has_tensor = false;
  for (const Arg& a : converted) has_tensor |= std::holds_alternative<Value>(a) || std::holds_alternative<std::vector<Value>>(a);
  if (!has_tensor && !call.types.empty())  // a factory's dtype is the default dtype of now
    for (size_t i = 0; i < converted.size(); ++i)
      if (info.args[i] == ArgKind::ScalarType && std::holds_alternative<ir::None>(converted[i]) && call.types[0].dtype != DType::Opaque)
        converted[i] = call.types[0].dtype;
  if (info.name == "aten::convolution_backward") {  // Meta follows grad_output; the kernels follow input and weight
    auto format = ir::MemoryFormat::Contiguous;
    for (size_t i : {1, 2})
      if (auto f = ops::suggest_memory_format(graph->ctx(), std::get<Value>(converted[i]).type()); f == ir::MemoryFormat::ChannelsLast) format = f;
    for (size_t i : {0, 1}) {
      const bool pixels = i == 1 && call.types[i].dim() == 4 && call.types[i].sizes[2].is(1) && call.types[i].sizes[3].is(1);
      if (call.types[i].dim() == 4 && call.types[i].device.kind == DeviceKind::CPU &&
          (!pixels || taken_by_onednn({converted.data(), converted.size()}, 1)))
        call.types[i].strides = ops::strides_for(format, call.types[i].sizes);
    }
    // Of a weight for one channel either stride is right, and oneDNN chooses by sizes.
    const auto has_sizes = [&](size_t i) { return capture::is_static(std::get<Value>(converted[i]).type()); };
    if (TensorType& w = call.types[1]; w.dim() == 4 && w.sizes[1].is(1) && std::get<sym::Int>(converted[9]).is(1) && has_sizes(0) && has_sizes(1) &&
                                       has_sizes(2) && look_at(info, converted).can_be_made_up()) {
      c10::Device device = c10::kCPU;
      const Stack asked = run_meta(info, args, &device, false, true);
      if (asked[1].toTensor().defined()) w.strides = type_of(asked[1].toTensor()).strides;
    }
  }
  capture::apply_learned(info.name, converted, {call.types.data(), call.types.size()});
  call.node = draw_in_bulk(info, converted, call.types);
  if (!call.node) call.node = made_of_sizes(info, converted, call.types);
  if (!call.node) call.node = append(info, std::move(converted), call.types);
  if (finds) found_nodes.push_back(call.node);
  for (uint32_t i = 0; i < now.size() && i < call.types.size(); ++i) known_now.emplace_back(call.node->out(i), now[i]);
  return call;
}

// Draws from the default CPU generator as ops of ours, where those give the same numbers: a mask is kept as a bit, and nothing reads the memory that
// is drawn into. Null where they do not.
ir::Node* Tracer::Impl::draw_in_bulk(const OpInfo& info, const std::vector<Arg>& args, const Types& types) {
  if (!(info.flags & ir::kRandom) || types.size() != 1 || !is_native(types[0].dtype) || types[0].device.kind != DeviceKind::CPU ||
      !types[0].is_contiguous())
    return nullptr;
  const TensorType& type = types[0];
  if (std::ranges::any_of(type.sizes, [](sym::Int i) { return i.is(0); })) return nullptr;  // nothing is drawn
  for (const Arg& a : args)
    if (std::holds_alternative<ir::OpaqueArg>(a)) return nullptr;  // a generator of the program's
  auto number = [&](size_t i) {
    auto* d = std::get_if<double>(&args[i]);
    return d ? *d : -1.0;
  };
  const bool coins = info.name == "aten::bernoulli.p" && number(1) >= 0 && number(1) <= 1;
  const bool uniform = type.dtype == DType::F32 && (info.name == "aten::rand" || info.name == "aten::rand_like" ||
                                                    (info.name == "aten::uniform" && number(1) == 0 && number(2) == 1));
  if (!coins && !uniform) return nullptr;
  {
    capture::Paused paused;
    if (!draws_as_aten()) return nullptr;
  }
  const std::vector<sym::Int> sizes(type.sizes.begin(), type.sizes.end());
  // Each list by itself: where memory failed in a call with several braced ones, what gcc 12 makes of it crashed.
  const auto call = [&](std::string_view name, const TensorType& made, auto&&... given) {
    std::vector<Arg> list;
    list.reserve(sizeof...(given));
    (list.emplace_back(given), ...);
    Types one(1, made);
    return append(name, std::move(list), std::move(one));
  };
  if (uniform) return call("vitrify::uniform", type, sizes);
  TensorType coin = type;
  coin.dtype = DType::Bool;
  coin.wrapped_number = false;
  const TensorType of_bits = bits_of(coin);
  const Value bits = call("vitrify::bernoulli", of_bits, sizes, number(1))->out();
  const std::vector<sym::Int> strides(coin.strides.begin(), coin.strides.end());
  return cast(call("vitrify::unpack_bits", coin, bits, sizes, strides)->out(), type).node;
}

void Tracer::Impl::run_pure(const OpInfo& info, Stack* stack) {
  size_t n = info.args.size();
  Call call = record_call(info, last(*stack, n));
  if (call.types.size() == 1) call.node = filled(call.node).node;
  const bool sum = is_sum(info);
  if (sum) sums.insert(call.node->id);
  if (sum && sums_in_place(last(*stack, n))) {
    View& sum = *as_fake(last(*stack, n)[0].toTensor())->view;
    at::Tensor r = new_tensor(conform(call.node->out(), sum.type, [&] { return read(sum); }));
    drop(*stack, n);
    stack->emplace_back(std::move(r));
    return;
  }
  const bool shows_part = info.flags & ir::kCopiesMemory && !capture::is_whole(*as_fake(fake_of(last(*stack, n)[0].toTensor()))->view);
  drop(*stack, n);
  const auto& returns = info.op.schema().returns();
  std::vector<at::Tensor> metas;
  flatten_results(call.metas, metas);
  uint32_t next = 0;
  auto tensor = [&]() {
    const at::Tensor meta = next < metas.size() ? metas[next] : at::Tensor();
    at::Tensor t = new_tensor(call.node->out(next), meta.defined() && meta.is_conj(), meta.defined() && meta.is_neg());
    note_memory(info, next++, t, meta);
    return t;
  };
  for (size_t i = 0; i < returns.size(); ++i) {
    bool have = i < call.metas.size();
    auto kind = returns[i].type()->kind();
    if (kind == c10::TypeKind::TensorType) {
      stack->emplace_back(tensor());
    } else if (kind == c10::TypeKind::ListType && (!have || call.metas[i].isTensorList())) {
      size_t count = have ? call.metas[i].toTensorVector().size() : call.types.size() - next;
      c10::List<at::Tensor> l;
      for (size_t k = 0; k < count; ++k) l.push_back(tensor());
      stack->emplace_back(std::move(l));
    } else {
      stack->push_back(call.metas.at(i));
    }
  }
  if (shows_part) as_fake(stack->back().toTensor())->view->storage->in_part = true;
}

namespace {

// _assert_tensor_metadata(a, size, stride, dtype, *, device, layout)
bool has_metadata(sym::Context& ctx, c10::ArrayRef<IValue> args) {
  const at::Tensor& t = args[0].toTensor();
  const auto are = [&](const IValue& said, c10::SymIntArrayRef now) {
    return said.isNone() ||
           std::ranges::equal(capture::ints_of(said), capture::ints_of(IValue(now)), [&](sym::Int a, sym::Int b) { return ctx.guard_eq(a, b); });
  };
  return are(args[1], t.sym_sizes()) && are(args[2], t.sym_strides()) && (args[3].isNone() || args[3].toScalarType() == t.scalar_type()) &&
         (args[4].isNone() || args[4].toDevice().type() == t.device().type()) && (args[5].isNone() || args[5].toLayout() == t.layout());
}

}  // namespace

void Tracer::Impl::run_effect(const OpInfo& info, Stack* stack) {
  size_t n = info.args.size();
  auto args = last(*stack, n);
  bool tensors = false;
  for_each_tensor(args, [&](const at::Tensor&) { tensors = true; });
  const bool custom = info.flags & ir::kEffect;
  if (info.name == "aten::_assert_tensor_metadata" && !has_metadata(graph->ctx(), args)) fail("a tensor is not what the program asserts");
  if (info.name == "aten::_assert_tensor_metadata" || info.name.starts_with("aten::sym_constrain_range") || (!tensors && !custom)) {
    drop(*stack, n);
    return;
  }
  std::vector<Arg> converted = convert_args(info, args);
  if (custom)
    append_custom(info, std::move(converted), {});
  else
    graph->append(graph->op(info.name, info.flags | ir::kEffect), std::move(converted), {})->source = source;
  drop(*stack, n);
}

void Tracer::Impl::run_view(const OpInfo& info, Stack* stack) {
  size_t n = info.args.size();
  auto args = last(*stack, n);
  at::Tensor self = fake_of(args[0].toTensor());
  FakeImpl* fake = as_fake(self);
  if (info.name == "aten::detach") {
    at::Tensor r;
    if (fake->is_inference() && !c10::InferenceMode::is_enabled())  // it counts writes of its own
      r = at::Tensor(fake->shallow_copy_and_detach(c10::VariableVersion(0), false));
    else
      r = capture::make_fake(capture::detached_view(fake->view), fake->key_set());
    drop(*stack, n);
    stack->emplace_back(std::move(r));
    return;
  }
  // Without symbols ATen's own kernel says everything; with them it says where the view starts, and the shape rule the rest.
  Value parent = read_noted(*fake->view);
  std::vector<Arg> converted{parent};
  for (size_t i = 1; i < n; ++i) converted.push_back(to_arg(*graph, args[i], info.args[i], {}));
  bool symbolic = !capture::is_static(fake->view->type);
  for (const IValue& v : args) symbolic |= !capture::is_static(v);
  std::optional<Types> ruled;
  if (symbolic && info.row && info.row->shape) ruled = info.row->shape(graph->ctx(), converted);
  c10::Device device = c10::kCPU;
  Stack metas = run_meta(info, args, &device, !ruled);
  std::vector<at::Tensor> results;
  flatten_results(metas, results);
  // Larger elements begin at places of their own size only.
  if (!results.empty() && results[0].dtype().itemsize() > fake->dtype().itemsize()) {
    if (fake->view->storage->in_part) fail(fmt::format("{} counts from the beginning of memory that shows in part only", info.name));
    fake->specialize_offset();
    assume_place(*fake->view->storage);
  }
  std::vector<IValue> rest(args.begin() + 1, args.end());
  auto all = std::make_shared<capture::ViewCallResults>();
  std::vector<TensorType>& types = all->types;
  for (const at::Tensor& m : results) {
    TensorType t = type_of(m);
    t.device = fake->view->type.device;
    t.wrapped_number = false;
    types.push_back(std::move(t));
  }
  if (ruled) {
    VT_CHECK(ruled->size() == types.size(), "{}: the shape rule gives {} results, ATen {}", info.name, ruled->size(), types.size());
    types.assign(ruled->begin(), ruled->end());
  }
  ir::Node* node = append(info, std::move(converted), Types(types.begin(), types.end()));
  all->call = ++view_calls;
  all->made = node;
  all->generation = fake->view->storage->generation;
  fake->view->storage->has_views |= at::GradMode::is_enabled();
  c10::List<at::Tensor> made;
  for (size_t k = 0; k < results.size(); ++k) {
    auto v = std::make_shared<View>();
    v->storage = fake->view->storage;
    v->parent = fake->view;
    v->step = {&info, rest, info.multi_result_view ? static_cast<int32_t>(k) : -1, info.multi_result_view ? all : nullptr};
    v->type = types[k];
    v->offset = results[k].storage_offset();
    v->cached = node->out(k);
    v->generation = v->storage->generation;
    auto keys = compat::dense_keys(to_torch_device(v->type.device), results[k].scalar_type(), results[k].is_inference());
    if (results[k].is_conj()) keys = keys.add(c10::DispatchKey::Conjugate);
    if (results[k].is_neg()) keys = keys.add(c10::DispatchKey::Negative);
    made.push_back(capture::make_fake(std::move(v), keys));
  }
  drop(*stack, n);
  if (info.multi_result_view)
    stack->emplace_back(std::move(made));
  else
    stack->emplace_back(made.extract(0));
}

void Tracer::Impl::run_in_place_view(const OpInfo& info, Stack* stack) {
  size_t n = info.args.size();
  at::Tensor self = last(*stack, n)[0].toTensor();
  FakeImpl* fake = as_fake(self);
  if (!fake) fail(fmt::format("{} on a tensor that is not an argument", info.name));
  Stack view(last(*stack, n).begin(), last(*stack, n).end());
  run_view(*info.out_of_place, &view);
  auto made = as_fake(view.back().toTensor())->view;
  made->in_place = &info;
  fake->view = made;
  fake->set_geometry();
  drop(*stack, n);
  stack->emplace_back(std::move(self));
}

}  // namespace vitrify
