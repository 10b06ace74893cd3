// Ops that write to their arguments are recorded as pure ones, and the writes as values that the memory has then.

#include "ops/shapes.h"
#include "support/budget.h"
#include "torch/ask_kernel.h"
#include "torch/compat.h"
#include "torch/convert.h"
#include "torch/effects.h"
#include "torch/extern_call.h"
#include "torch/learned.h"
#include "torch/overlap.h"
#include "torch/stack.h"
#include "torch/sym_node.h"
#include "torch/tracer_impl.h"
#include "torch/versions.h"

namespace vitrify {

using c10::IValue;
using capture::as_fake;
using capture::fail;
using capture::FakeImpl;
using capture::OpInfo;
using compat::Stack;
using ir::Arg;
using ir::TensorType;
using ir::Value;

namespace {

// The permutation that makes a dense tensor contiguous, and its inverse.
std::pair<std::vector<sym::Int>, std::vector<sym::Int>> memory_order(const TensorType& t) {
  std::vector<size_t> order(t.dim());
  for (size_t d = 0; d < order.size(); ++d) order[d] = d;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return value_of(t.strides[a]) > value_of(t.strides[b]); });
  std::vector<sym::Int> to(order.size()), from(order.size());
  for (size_t i = 0; i < order.size(); ++i) {
    to[i] = static_cast<int64_t>(order[i]);
    from[order[i]] = static_cast<int64_t>(i);
  }
  return {to, from};
}

// It computes by another op: its writes are counted by the ops that copy the results into its out arguments, one for each.
bool copies_count_writes(const OpInfo& info) {
  using enum c10::DispatchKey;
  return info.name.starts_with("aten::") && info.op.hasKernelForDispatchKey(CompositeExplicitAutograd) && !info.op.hasKernelForDispatchKey(CPU) &&
         !info.op.hasKernelForDispatchKey(ADInplaceOrView);
}

}  // namespace

Value Tracer::Impl::permute(Value v, const std::vector<sym::Int>& order) {
  TensorType t = v.type();
  for (size_t i = 0; i < order.size(); ++i) {
    t.sizes[i] = v.type().sizes[order[i].value()];
    t.strides[i] = v.type().strides[order[i].value()];
  }
  return append("aten::permute", {v, order}, {t})->out();
}

namespace {

// A call of the op on a copy is one of the same memory, but for what lies beside: how it lies may decide what the kernel copies first.
bool is_copied_whole(const OpInfo& info, const FakeImpl& t) {
  const capture::View& v = *t.view;
  return info.writes.size() == 1 && writes_first(info.op.schema()) && info.name.starts_with("aten::") && v.type.dtype != DType::Opaque &&
         ops::is_dense(*v.storage->ctx, v.type) && !t.is_conj() && !t.is_neg();
}

}  // namespace

// The op itself, on copies: the node's results are the op's own and then what the written arguments have become.
void Tracer::Impl::run_on_copies(const OpInfo& info, const Stack& fakes, const std::vector<at::Tensor>& targets, Stack* stack) {
  const size_t n = info.args.size();
  Stack args(last(*stack, n).begin(), last(*stack, n).end());
  // Copies of one memory would be several: eager decides.
  for (const at::Tensor& w : targets) {
    size_t given = 0;
    const FakeImpl* to = as_fake(w);
    for_each_tensor(fakes, [&](const at::Tensor& t) {
      const FakeImpl* f = as_fake(t);
      if (!f || f->view->storage != to->view->storage) return;
      given += f == to || may_share(f->view->offset, f->hint_sizes(), f->hint_strides(), to->view->offset, to->hint_sizes(), to->hint_strides());
    });
    if (given > 1) fail(fmt::format("{} writes over an argument", info.name));
  }
  std::vector<Arg> converted = convert_args(info, fakes);
  Types types;
  const auto& returns = info.op.schema().returns();
  const bool fresh = std::ranges::any_of(returns, [](const c10::Argument& r) { return !r.alias_info(); });
  if (described) {
    types = *described;
  } else if (fresh) {
    c10::Device device = c10::kCPU;
    Stack metas;
    const Operands o = look_at(info, converted);
    const bool asks = info.name.starts_with("aten::") && o.can_be_made_up();  // as in asks_kernel()
    try {
      metas = run_meta(info, fakes, &device, true, asks);
    } catch (const std::exception& refusal) {
      rethrow_interrupt();
      if (!asks || o.other) throw capture::Undescribed(refusal.what());
      try {  // perhaps it takes no zeros
        metas = run_meta(info, fakes, &device, true, false);
      } catch (const std::exception& e) {
        rethrow_interrupt();
        throw capture::Undescribed(e.what());
      }
    }
    for (size_t i = 0; i < returns.size(); ++i) {
      if (returns[i].alias_info()) continue;
      std::vector<at::Tensor> tensors;
      flatten_results({metas[i]}, tensors);
      for (const at::Tensor& t : tensors) {
        types.push_back(t.defined() ? type_of(t) : undefined_type());
        if (t.defined()) types.back().device = to_device(device);
      }
    }
  }
  const size_t first = types.size();
  for (const at::Tensor& t : targets) types.push_back(read(*as_fake(t)->view).type());
  TensorType count;
  count.dtype = DType::I64;
  const bool counted = !info.name.starts_with("aten::") && (info.flags & ir::kEffect) && kernel_counts_writes(info.op);
  if (counted) types.insert(types.end(), targets.size(), count);
  ir::Node* node = append(info, std::move(converted), std::move(types));
  for (size_t i = 0; i < targets.size(); ++i) {
    View& v = *as_fake(targets[i])->view;
    write(v, node->out(static_cast<uint32_t>(first + i)), info.name);
    if (!counted || !counts_writes(v, 0)) continue;
    if (counts_versions(targets[i])) targets[i].unsafeGetTensorImpl()->bump_version();  // as if once: what has saved it before raises
    Value& all = writes_counted[v.storage.get()];
    const Value times = node->out(static_cast<uint32_t>(first + targets.size() + i));
    all = all ? append("aten::add.Tensor", {all, times, sym::Int(1)}, {count})->out() : times;
  }
  drop(*stack, n);
  uint32_t next = 0;
  for (const auto& r : returns) {
    if (!r.alias_info()) {
      if (r.type()->kind() != c10::TypeKind::TensorType) fail(fmt::format("calls {}, which writes into its arguments and returns a list", info.name));
      stack->emplace_back(new_tensor(node->out(next)));
      note_memory(info, next++, stack->back().toTensor(), {});
      continue;
    }
    for (size_t w : info.writes)
      if (info.op.schema().arguments()[w].alias_info()->beforeSets() == r.alias_info()->beforeSets()) stack->push_back(args[w]);
  }
}

// What eager makes of an out argument of another size or type: its kernel says so, on zeros. Undefined where it refuses, or would take long.
at::Tensor Tracer::Impl::out_on_zeros(const OpInfo& info, const Stack& fakes, size_t out) {
  if (!info.name.starts_with("aten::") || info.flags & (ir::kRandom | ir::kEffect | ir::kDataDependent)) return {};
  bool usual = true;
  auto zeros = [&](const at::Tensor& t) -> at::Tensor {
    FakeImpl* f = as_fake(t);
    usual = usual && (f ? f->device().is_cpu() : !symbolic_number(t));
    if (!f || !usual) return t;
    f->specialize();
    double elements = 1;
    for (int64_t n : f->hint_sizes()) elements *= static_cast<double>(n);
    if (!(usual = elements <= kMostZeros)) return t;
    return f->zeros();
  };
  Stack args;
  for (const IValue& v : fakes) {
    if (v.isTensor() && v.toTensor().defined()) {
      args.emplace_back(zeros(v.toTensor()));
    } else if (v.isTensorList()) {
      c10::List<at::Tensor> l;
      for (const at::Tensor& t : v.toTensorVector()) l.push_back(zeros(t));
      args.emplace_back(std::move(l));
    } else {
      args.push_back(capture::static_value(v, true));
    }
  }
  if (!usual) return {};
  at::Tensor made = args[out].toTensor();
  c10::impl::ExcludeDispatchKeyGuard below(compat::above_backend_keys());
  try {
    call_on_made_up(info, &args);
  } catch (const NotAsked&) {
    return {};
  } catch (const c10::Error&) {
    return {};
  }
  return made;
}

// An out argument that takes the result's size, as in eager, where nothing else looks at its memory: from now on it is the result. `real`: its
// layout.
bool Tracer::Impl::resize_out(const at::Tensor& out, Value result, const at::Tensor& real) {
  FakeImpl* fake = as_fake(out);
  const View& v = *fake->view;
  const std::shared_ptr<StorageState> old = v.storage;
  const bool input = old->input >= 0;
  const bool own = !input || inputs[static_cast<size_t>(old->input)]->fake.is_same(out);
  if (old->input >= static_cast<int32_t>(num_args)) return false;  // the program has the tensor itself, whose sizes it goes on to see
  const long holders = input ? 3 : 2;                              // `old`, the view, and of an input the list of them
  if (!own || v.parent || old->shared_with >= 0 || fake->view.use_count() != 1 || old.use_count() != holders || out.requires_grad()) return false;
  for (const Source* s : inputs)  // larger, it may reach into what lies beside it
    if (input && s->input != old->input && s->real.has_storage() && s->real.is_alias_of(inputs[static_cast<size_t>(old->input)]->real)) return false;
  TensorType type = result.type();
  type.wrapped_number = false;
  type.dtype = v.type.dtype;
  type.opaque_scalar_type = v.type.opaque_scalar_type;
  type.strides.assign(real.strides().begin(), real.strides().end());
  if (!capture::is_static(type) || values_of(type.sizes) != real.sizes().vec() || !(type.device == v.type.device)) return false;
  result = cast(result, type);
  if (!(result.type() == type)) {
    if (result.type().dtype != type.dtype || !type.is_contiguous()) return false;
    result = append("aten::clone", {result, ir::MemoryFormat::Contiguous}, {type})->out();
  }
  auto view = std::make_shared<View>();
  view->storage = new_storage(result, type, input ? old->offset : 0, to_torch_device(type.device));
  view->type = type;
  view->offset = view->storage->offset;
  view->storage->shrunk = old->shrunk || value_of(type.numel()) < value_of(old->type.numel());
  if (old->storage.nbytes() > view->storage->storage.nbytes()) view->storage->storage.set_nbytes(old->storage.nbytes());  // memory never shrinks
  if (input) {
    view->storage->input = old->input;
    view->storage->generation = old->generation + 1;
    view->storage->resized = true;
    std::ranges::replace(input_storages, old, view->storage);
  }
  fake->view = std::move(view);
  fake->set_storage_keep_dtype(fake->view->storage->storage);
  fake->set_geometry();
  return true;
}

// Eager's kernels raise where they write the first that counts no versions, and have written those before it.
void Tracer::Impl::check_inference(const std::vector<at::Tensor>& written, const OpInfo& info) const {
  if (!c10::InferenceMode::is_enabled() && std::ranges::any_of(written, [](const at::Tensor& t) { return t.defined() && t.is_inference(); }))
    fail(fmt::format("{} writes to a tensor that was made in inference mode, outside of it", info.name));
}

void Tracer::Impl::run_write(const OpInfo& info, Stack* stack) {
  size_t n = info.args.size();
  Stack args(last(*stack, n).begin(), last(*stack, n).end());
  // Real tensors become their placeholders first: overlap is seen between placeholders.
  Stack fakes = args;
  for (IValue& v : fakes) {
    if (v.isTensor() && v.toTensor().defined()) {
      if (!v.toTensor().unsafeGetTensorImpl()->is_wrapped_number()) v = fake_of(v.toTensor());
    } else if (v.isTensorList()) {
      c10::List<at::Tensor> l;
      for (const at::Tensor& t : v.toTensorVector()) l.push_back(t.defined() ? fake_of(t) : t);
      v = std::move(l);
    }
  }
  std::vector<at::Tensor> targets;
  for (size_t w : info.writes) {
    if (fakes[w].isTensor())
      targets.push_back(fakes[w].toTensor());
    else if (fakes[w].isTensorList())
      for (const at::Tensor& t : fakes[w].toTensorVector()) targets.push_back(t);
    else if (!fakes[w].isNone())
      fail(fmt::format("{} writes into an argument of an unknown kind", info.name));
  }
  for (const at::Tensor& t : targets) check_write(t, fakes, info.name);
  if (info.flags & ir::kEffect) check_inference(targets, info);
  const auto in_order = [](const at::Tensor& t) { return as_fake(t)->view->type.is_contiguous(); };
  const bool draws = (info.flags | (info.functional ? info.functional->flags : 0)) & ir::kRandom;
  if (draws && !info.writes.empty() && info.writes.front() > 0 && !std::ranges::all_of(targets, in_order))
    fail(fmt::format("{} draws in the order of the memory that it is given", info.name));
  if (!info.functional) return run_on_copies(info, fakes, targets, stack);
  // What is written first is read, and written over, by what comes next.
  if (writes_one_memory_twice(targets, {})) fail(fmt::format("{} writes one memory twice", info.name));
  bool writes_out = info.op.hasTag(at::Tag::out_variant) || info.functional_args.size() < n;
  // Elementwise kernels may write over what they read. Others read what they have written by then: a copy does the same where it is both.
  std::vector<size_t> same;
  if (!info.op.hasTag(at::Tag::pointwise) && !ops::is_elementwise(info.functional->name))
    for (size_t i : info.functional_args) {
      if (!writes_out && std::ranges::find(info.writes, i) != info.writes.end()) continue;
      for_each_tensor(c10::ArrayRef<IValue>(fakes).slice(i, 1), [&](const at::Tensor& t) {
        for (const at::Tensor& w : targets) {
          const FakeImpl *f = as_fake(t), *to = as_fake(w);
          if (!f || f->view->storage != to->view->storage) continue;
          if (!writes_out && !may_share(f->view->offset, f->hint_sizes(), f->hint_strides(), to->view->offset, to->hint_sizes(), to->hint_strides()))
            continue;
          if (f != to || writes_out || !fakes[i].isTensor() || !is_copied_whole(info, *to))
            fail(fmt::format("{} writes over an argument", info.name));
          same.push_back(i);
        }
      });
    }
  const OpInfo& f = *info.functional;
  Stack fargs;
  for (size_t i : info.functional_args) fargs.push_back(fakes[i]);
  std::vector<sym::Int> to_memory, from_memory;
  Call call;
  // The op itself is called, on a copy in the same strides.
  const auto call_itself = [&](std::vector<Arg> given) {
    TensorType t = as_fake(targets[0])->view->type;
    t.wrapped_number = false;
    t.strides = ops::preserved_strides(graph->ctx(), t);
    call.types = {t};
    call.node = append(info, std::move(given), call.types);
  };
  if (!same.empty()) {
    std::vector<Arg> given = convert_args(info, fakes);
    for (size_t i : same) given[i] = sym::Int(0);
    call_itself(std::move(given));
  } else if ((f.flags & ir::kRandom) && targets.size() == 1 && fargs[0].isTensor() && fargs[0].toTensor().is_same(targets[0]) &&
             !as_fake(targets[0])->view->type.is_contiguous()) {
    View& v = *as_fake(targets[0])->view;
    // Numbers are drawn in the order of memory: a mask and numbers of [0, 1) as they would be into contiguous memory.
    if (ops::is_dense(graph->ctx(), v.type) && (f.name == "aten::bernoulli.p" || f.name == "aten::uniform")) {
      std::tie(to_memory, from_memory) = memory_order(v.type);
      fargs[0] = new_tensor(permute(read(v), to_memory));
    } else {
      VT_CHECK(info.flags & ir::kRandom, "{} draws and does not say so", info.name);
      call_itself(convert_args(info, fakes));  // kernels for contiguous memory may draw others
    }
  }
  if (!call.node) call = record_call(f, fargs);
  const bool fresh_results =
      std::ranges::any_of(info.op.schema().returns(), [](const c10::Argument& r) { return !r.alias_info() || !r.alias_info()->isWrite(); });
  if (fresh_results ? call.types.size() < targets.size() : call.types.size() != targets.size())
    fail(fmt::format("{} has other results than it is given tensors to write", info.name));
  std::vector<at::Tensor> metas;
  flatten_results(call.metas, metas);
  if (std::ranges::any_of(metas, [](const at::Tensor& t) { return t.defined() && (t.is_conj() || t.is_neg()); }))
    fail(fmt::format("{} makes a conjugate or negative view of its out argument", info.name));
  size_t first = call.types.size() - targets.size();
  const bool counts = copies_count_writes(info);
  for (size_t i = 0; i < targets.size(); ++i) {
    View& v = *as_fake(targets[i])->view;
    if (counts && counts_versions(targets[i])) targets[i].unsafeGetTensorImpl()->bump_version();
    Value made = call.node->out(first + i);
    if (!from_memory.empty()) made = permute(made, from_memory);
    const TensorType& r = made.type();
    const bool other_size = !same_sizes(r.sizes, v.type.sizes);
    if (other_size && !writes_out) fail(fmt::format("{} needs a result of another shape than the tensor it writes", info.name));
    if (!writes_out && is_complex(v.type.dtype) && is_float(r.dtype)) fail(fmt::format("{} would write real numbers over complex ones", info.name));
    if (writes_out && (other_size || scalar_type_of(r) != scalar_type_of(v.type))) {
      const at::Tensor real = targets.size() == info.writes.size() ? out_on_zeros(info, fakes, info.writes[i]) : at::Tensor();
      // Of those that compute element by element eager converts the result; others compute in the type of their out argument.
      const bool takes_type = scalar_type_of(r) == scalar_type_of(v.type) || info.op.hasTag(at::Tag::pointwise);
      if (!takes_type || (!real.defined() && !other_size)) fail(fmt::format("{} converts to the type of its out argument", info.name));
      if (other_size) {
        bool read = false;  // by the op itself: mostly eager's to refuse
        for (size_t k = 0; k < fakes.size(); ++k)
          read = read || (std::ranges::find(info.writes, k) == info.writes.end() && fakes[k].isTensor() && fakes[k].toTensor().is_same(targets[i]));
        if (read || !real.defined() || !resize_out(targets[i], made, real)) fail(fmt::format("{} resizes its out argument", info.name));
        continue;
      }
    }
    if (!c10::canCast(scalar_type_of(r), scalar_type_of(v.type)))
      fail(fmt::format("{} cannot store {} in {}", info.name, to_string(r.dtype), to_string(v.type.dtype)));
    Value value = cast(made, v.type);
    if (value.type().dtype != v.type.dtype || !(value.type().device == v.type.device)) value = conform(value, v.type, [&] { return read(v); });
    write(v, value, info.name);
  }
  std::optional<Types> own;  // what the op itself gives, where its functional form lays it out otherwise
  if (info.row && info.row->shape) own = info.row->shape(graph->ctx(), convert_args(info, fakes));
  drop(*stack, n);
  uint32_t fresh = 0;
  for (const auto& ret : info.op.schema().returns()) {
    if (ret.alias_info() && ret.alias_info()->isWrite()) {
      for (size_t w : info.writes) {
        const auto& set = info.op.schema().arguments()[w].alias_info()->beforeSets();
        if (set == ret.alias_info()->beforeSets()) stack->push_back(args[w]);
      }
    } else {
      Value made = call.node->out(fresh);
      if (own && fresh < own->size() && (*own)[fresh].strides != made.type().strides && (*own)[fresh].is_contiguous())
        made = append("aten::clone", {made, ir::MemoryFormat::Contiguous}, {(*own)[fresh]})->out();
      ++fresh;
      stack->emplace_back(new_tensor(made));
    }
  }
}

}  // namespace vitrify
