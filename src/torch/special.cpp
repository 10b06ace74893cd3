// Ops the tracer knows by name.
#include "ops/shapes.h"
#include "torch/composites.h"
#include "torch/convert.h"
#include "torch/overlap.h"
#include "torch/stack.h"
#include "torch/sym_node.h"
#include "torch/tracer_impl.h"

namespace vitrify {

using c10::IValue;
using capture::as_fake;
using capture::fail;
using capture::FakeImpl;
using compat::Stack;
using ir::Arg;
using ir::TensorType;
using ir::Value;

namespace {

std::vector<sym::Int> to_ints(const ir::Dims& d) { return {d.begin(), d.end()}; }

Arg scalar_arg(const IValue& v) {
  if (v.isBool()) return v.toBool();
  if (v.isDouble()) return v.toDouble();
  if (v.isComplexDouble()) return ir::Complex{v.toComplexDouble().real(), v.toComplexDouble().imag()};
  return sym::Int(v.toInt());
}

Arg zero_of(DType type) { return is_float(type) ? Arg(0.0) : type == DType::Bool ? Arg(false) : Arg(sym::Int(0)); }

bool broadcasts_to(sym::Context& ctx, const TensorType& from, const TensorType& to) {
  if (from.dim() > to.dim()) return false;
  for (size_t i = 0; i < from.dim(); ++i) {
    sym::Int a = from.sizes[from.dim() - 1 - i], b = to.sizes[to.dim() - 1 - i];
    if (!a.is(1) && !ctx.guard_eq(a, b)) return false;
  }
  return true;
}

}  // namespace

void Tracer::Impl::run_special(const OpInfo& info, Stack* stack) {
  size_t n = info.args.size();
  auto args = c10::ArrayRef<IValue>(*stack).slice(stack->size() - n, n);
  auto finish = [&](IValue v) {
    stack->erase(stack->end() - n, stack->end());
    stack->push_back(std::move(v));
  };
  const std::string& name = info.name;

  if (name == "aten::lift_fresh") {
    at::Tensor t = args[0].toTensor();
    return finish(as_fake(t) ? t : constant(t));
  }
  if (name == "aten::scalar_tensor") {  // a literal, which rounds or wraps to what its type holds
    if (!args[0].isScalar() || args[0].toScalar().isSymbolic()) return run_pure(info, stack);
    Stack literal(args.begin(), args.end());
    {
      capture::Paused paused;
      info.op.callBoxed(&literal);
    }
    const at::Tensor held = literal[0].toTensor();
    return held.device().is_cpu() && held.layout() == at::kStrided ? finish(constant(held)) : run_pure(info, stack);
  }
  if (name == "aten::detach_") return finish(args[0]);
  if (name == "aten::is_pinned") return finish(false);

  if (name == "aten::_local_scalar_dense") {
    const at::Tensor t = fake_of(args[0].toTensor());
    if (FakeImpl* f = as_fake(t); !f->view->parent && f->view->storage->known) return finish(*f->view->storage->known);
    if (auto known = constant_item(read(*as_fake(t)->view))) return finish(*known);
    if (auto step = options.python_mode ? step_of_item(read(*as_fake(t)->view)) : std::nullopt) {
      if (numbers->steps[*step].op == Numbers::Op::Constant) return finish(numbers->seen[*step]);
      return finish(capture::to_sym_float(numbers, *step));
    }
    if (auto holds = check(read(*as_fake(t)->view))) return finish(*holds);
    if (auto known = assume(read(*as_fake(t)->view))) return finish(*known);
    fail("reads a tensor's value: aten::item");
  }

  if (name == "aten::equal") {
    if (auto same = assume_equal(args[0].toTensor(), args[1].toTensor())) return finish(*same);
    fail("reads a tensor's value: aten::equal");
  }

  // Views in all but the schema.
  const auto run_apart = [&](std::string_view view) {
    run_view(*ops.find(view), stack);
    for_each_tensor(last(*stack, 1), [&](const at::Tensor& t) { as_fake(t)->view->apart = &info; });
  };
  if (name == "aten::unsafe_split.Tensor") return run_apart("aten::split.Tensor");
  if (name == "aten::unsafe_split_with_sizes") return run_apart("aten::split_with_sizes");
  // One that gradients go through is a tensor of its own to autograd, and mostly of memory that nobody else has. What is expanded has no such memory.
  if (name == "aten::_unsafe_view") {
    const View& of = *as_fake(fake_of(args[0].toTensor()))->view;
    const bool own = of.storage->input < 0 && !overlaps_itself(of.type) && !capture::LooksAtOperands::now();
    if (!own || !args[0].toTensor().requires_grad()) return run_apart("aten::view");
    const std::weak_ptr<StorageState> from = of.storage;
    run_pure(info, stack);
    torn_apart.emplace_back(from, as_fake(stack->back().toTensor())->view->storage);
    return;
  }

  if (name == "aten::index.Tensor") {
    for (const IValue& e : args[1].toListRef())
      if (!e.isNone() && e.toTensor().defined() && (e.toTensor().scalar_type() == at::kBool || e.toTensor().scalar_type() == at::kByte))
        return run_index_by_mask(info, stack);
    return run_pure(info, stack);
  }

  // What lies in the gaps of a tensor, only the tensor itself knows: an argument that nobody has written.
  const auto run_strided = [&](Stack& view) {
    at::Tensor self = fake_of(view[0].toTensor());
    FakeImpl* f = as_fake(self);
    const auto sizes = capture::static_value(view[1], true).toIntVector(), strides = capture::static_value(view[2], true).toIntVector();
    TORCH_CHECK(std::ranges::none_of(strides, [](int64_t s) { return s < 0; }),
                "as_strided: Negative strides are not supported at the moment, got strides: ", at::IntArrayRef(strides));
    f->specialize_offset();
    const int64_t offset = view[3].isNone() ? f->storage_offset() : view[3].toInt();
    if (f->view->storage->in_part && !view[3].isNone()) fail("aten::as_strided counts from the beginning of memory that shows in part only");
    if (!view[3].isNone()) assume_place(*f->view->storage);
    const bool same = f->sizes() == sizes && f->strides() == strides && offset == f->storage_offset();
    // Eager's gradient of an element that several places of a tensor have is shared among those.
    if (same && name == "aten::as_strided" && !may_overlap_itself(sizes, strides)) {
      view = {self};
      return run_view(*ops.find("aten::alias"), &view);
    }
    run_view(*ops.find("aten::as_strided"), &view);
    View& v = *as_fake(view.back().toTensor())->view;
    if (!same && !memory_of(v)) {  // what is remembered of an argument's content covers its memory from the first element to the last
      int64_t begin = offset - f->storage_offset(), end = begin + 1, own_end = f->numel() ? 1 : 0;
      for (size_t d = 0; d < sizes.size(); ++d) end += (sizes[d] - 1) * strides[d];  // what looks at nothing is in memory_of()
      for (int64_t d = 0; own_end && d < f->dim(); ++d) own_end += (f->sizes()[d] - 1) * f->strides()[d];
      if (f->view->parent || f->view->storage->input < 0 || f->view->storage->generation || begin < 0 || end > own_end)
        fail("aten::as_strided reaches outside its tensor");
    }
    v.cached = read_strided(v);
  };
  if (name == "aten::as_strided") {
    Stack view(args.begin(), args.end());
    run_strided(view);
    return finish(view.back());
  }

  if (name == "aten::as_strided_copy" || name == "aten::as_strided_scatter") return finish(copy_strided(args));

  if (name == "aten::as_strided_") {
    const at::Tensor self = args[0].toTensor();
    FakeImpl* f = as_fake(self);
    const auto sizes = capture::ints_of(args[1]), strides = capture::ints_of(args[2]);
    const auto differs = [&](bool but_for_ones) {
      if (!f || !args[3].isNone() || sizes.size() != f->view->type.dim() || strides.size() != sizes.size()) return true;
      for (size_t d = 0; d < sizes.size(); ++d)
        if (sizes[d] != f->view->type.sizes[d] || (strides[d] != f->view->type.strides[d] && !(but_for_ones && sizes[d].is(1)))) return true;
      return false;
    };
    if (!differs(false)) return finish(self);
    // Global average pooling marks its result as channels-last so: other strides for dims of size 1.
    const bool marks = f && f->view->storage->input < 0 && !differs(true);
    if (!f || (!marks && self.requires_grad())) fail("calls aten::as_strided_, which cannot be captured");
    Stack view(args.begin(), args.end());
    if (marks) {
      run_view(*ops.find("aten::as_strided"), &view);
      View& v = *as_fake(view.back().toTensor())->view;
      v.cached = read_strided(v);
    } else {
      run_strided(view);
    }
    const auto made = as_fake(view.back().toTensor())->view;
    made->in_place = &info;
    f->view = made;
    f->set_geometry();
    return finish(self);
  }

  if (name == "aten::resize_") {
    const at::Tensor self = fake_of(args[0].toTensor());
    View& v = *as_fake(self)->view;
    TensorType type = v.type;
    const auto sizes = capture::ints_of(args[1]);
    const ir::Dims wanted(sizes.begin(), sizes.end());
    if (args[2].isNone() && same_sizes(type.sizes, wanted)) return finish(args[0]);
    const auto refuse = [] { fail("calls aten::resize_, which cannot be captured"); };
    if (!args[2].isNone() || type.dtype == DType::Opaque || v.parent || !capture::is_static(type)) refuse();
    if (v.storage->input >= static_cast<int32_t>(num_args)) refuse();  // the program has the tensor itself, whose sizes it goes on to see
    const int64_t before = value_of(type.numel());
    const bool in_order = type.is_contiguous();
    const auto flat = [&](sym::Int n) {
      TensorType t = type;
      t.sizes = {n}, t.strides = {sym::Int(1)}, t.wrapped_number = false;
      return t;
    };
    type.sizes = wanted;
    type.strides = ir::contiguous_strides(wanted);
    type.wrapped_number = false;
    if (!capture::is_static(type)) refuse();
    const int64_t after = value_of(type.numel()), kept = std::min(before, after);
    if ((before && !in_order) || (after > before && v.storage->shrunk)) refuse();
    if (v.storage->input >= 0 && after > before) {  // what its memory holds beyond the tensor is no input
      const at::Tensor& given = inputs[v.storage->input]->real;
      if (!given.defined() || given.storage().nbytes() > static_cast<size_t>(given.storage_offset() + before) * given.itemsize()) refuse();
      assume_end(static_cast<uint32_t>(v.storage->input));
    }
    const at::Tensor real = at::empty_strided(values_of(type.sizes), values_of(type.strides), at::TensorOptions(at::kMeta));
    Value value;
    if (after > kept || !after) {
      const TensorType t = kept ? flat(after - kept) : type;
      value = filled(append("aten::empty_strided", {to_ints(t.sizes), to_ints(t.strides), t.dtype, ir::None{}, t.device, ir::None{}}, {t}));
    }
    if (kept) {  // the first elements stay
      Value first = append("aten::view", {read(v), std::vector<sym::Int>{before}}, {flat(before)})->out();
      if (kept < before) first = append("aten::slice.Tensor", {first, sym::Int(0), sym::Int(0), sym::Int(kept), sym::Int(1)}, {flat(kept)})->out();
      if (after > kept) first = append("aten::cat", {std::vector<Value>{first, value}, sym::Int(0)}, {flat(after)})->out();
      value = append("aten::view", {first, to_ints(wanted)}, {type})->out();
    }
    if (!resize_out(self, value, real)) fail("calls aten::resize_, which cannot be captured");
    return finish(args[0]);
  }

  if (name == "aten::copy_") {
    at::Tensor self = fake_of(args[0].toTensor()), src = fake_of(args[1].toTensor());
    check_write(self, {IValue(self), IValue(src)}, name);
    View& v = *as_fake(self)->view;
    Value from = value_of_tensor(src);
    if (!broadcasts_to(graph->ctx(), from.type(), v.type)) fail("aten::copy_ of a tensor of another shape");
    Value value;
    // What is a view with a bit of its own would be one still where it becomes the contents of other memory.
    const bool resolved = from.type().dtype != DType::Opaque || !(src.is_conj() || src.is_neg());
    if (from.type().sizes == v.type.sizes && resolved) value = cast(from, v.type);
    if (value == from) {  // what has saved the one does not mind writes to the other
      TensorType t = from.type();
      t.wrapped_number = false;
      value = ops::is_dense(graph->ctx(), t) ? append("aten::clone", {from, ir::MemoryFormat::Preserve}, {t})->out() : Value{};
    }
    if (!value || value.type().dtype != v.type.dtype || value.type().opaque_scalar_type != v.type.opaque_scalar_type ||
        !(value.type().device == v.type.device)) {
      TensorType t = v.type;
      t.wrapped_number = false;
      value = append("aten::copy", {read(v), from, false}, {t})->out();
    }
    write(v, value, name);
    return finish(args[0]);
  }

  if (name == "aten::fill_.Scalar" || name == "aten::zero_") {
    at::Tensor self = fake_of(args[0].toTensor());
    check_write(self, {}, name);
    View& v = *as_fake(self)->view;
    TensorType t = v.type;
    t.wrapped_number = false;
    Arg number = name == "aten::zero_" ? zero_of(t.dtype) : scalar_arg(args[1]);
    Value value;
    if (t.dtype != DType::Opaque && v.parent) t.strides = ir::contiguous_strides(t.sizes);  // scattered into place anyway
    if (t.strides == ir::contiguous_strides(t.sizes) && t.dtype != DType::Opaque)
      value = append("aten::full", {to_ints(t.sizes), number, t.dtype, ir::None{}, t.device, ir::None{}}, {t})->out();
    else {
      t.strides = ops::preserved_strides(graph->ctx(), t);
      value = append("aten::fill.Scalar", {read(v), number}, {t})->out();
    }
    write(v, value, name);
    return finish(args[0]);
  }

  // Torch's own key for zeros without memory would ask Meta kernels, some of them in Python, for the sizes of their products.
  if (name == "aten::_efficientzerotensor") {
    run_pure(*ops.find("aten::zeros"), stack);
    as_fake(stack->back().toTensor())->view->storage->zeros = true;
    return;
  }
  const auto is_zeros = [](const IValue& v) {
    FakeImpl* f = as_fake(v.toTensor());
    return f && f->view->storage->zeros && f->view->storage->generation == 0;
  };
  if (name == "aten::add.Tensor") {
    const bool first = is_zeros(args[0]), zeros = first != is_zeros(args[1]);
    run_pure(info, stack);
    if (!zeros || !args[2].isInt() || args[2].toInt() != 1) return;
    const IValue& other = args[first ? 1 : 0];
    const TensorType &sum = as_fake(stack->back().toTensor())->view->type, type = value_of_tensor(fake_of(other.toTensor())).type();
    if (type.sizes != sum.sizes || type.dtype != sum.dtype || type.dtype == DType::Opaque) return;
    stack->back() = other;  // what zeros are added to stays as it lies
    stack->emplace_back(int64_t(at::MemoryFormat::Preserve));
    return run_pure(*ops.find("aten::clone"), stack);
  }
  if (name == "aten::mul.Tensor" || name == "aten::div.Tensor") {
    const bool zero = name == "aten::mul.Tensor" ? is_zeros(args[0]) || is_zeros(args[1]) : is_zeros(args[0]) && !is_zeros(args[1]);
    run_pure(info, stack);
    if (!zero) return;
    TensorType t = as_fake(stack->back().toTensor())->view->type;
    t.strides = ir::contiguous_strides(t.sizes);
    t.wrapped_number = false;
    at::Tensor zeros = new_tensor(append("aten::full", {to_ints(t.sizes), zero_of(t.dtype), t.dtype, ir::None{}, t.device, ir::None{}}, {t})->out());
    as_fake(zeros)->view->storage->zeros = true;
    stack->back() = std::move(zeros);
    return;
  }

  if (name == "aten::native_batch_norm") {
    if (args[5].toBool() && args[3].isTensor() && args[3].toTensor().defined()) return run_batch_norm(info, stack);
    return run_pure(info, stack);
  }
  if (name == "aten::cudnn_batch_norm") {
    if (args[5].toBool()) fail("batch norm in training mode on CUDA");
    return run_pure(info, stack);
  }
  VT_UNREACHABLE("{}", name);
}

// Training mode updates the running statistics, which the schema does not say.
void Tracer::Impl::run_batch_norm(const OpInfo& info, Stack* stack) {
  size_t n = info.args.size();
  Stack args(stack->end() - n, stack->end());
  const OpInfo* functional = ops.find("aten::_native_batch_norm_legit_functional");
  VT_CHECK(functional);
  at::Tensor mean = fake_of(args[3].toTensor()), var = fake_of(args[4].toTensor());
  check_write(mean, {}, info.name);
  check_write(var, {}, info.name);
  for (size_t written : {3, 4})
    for (size_t i = 0; i < written; ++i)
      if (args[i].isTensor() && args[i].toTensor().defined() &&
          placeholders_may_share(fake_of(args[written].toTensor()), fake_of(args[i].toTensor())))
        fail(fmt::format("{} reads memory that it writes, or writes it twice", info.name));
  Call call = record_call(*functional, args);
  write(*as_fake(mean)->view, call.node->out(3), info.name);
  write(*as_fake(var)->view, call.node->out(4), info.name);
  stack->erase(stack->end() - n, stack->end());
  for (uint32_t i = 0; i < 3; ++i) stack->emplace_back(new_tensor(call.node->out(i)));
}

}  // namespace vitrify
