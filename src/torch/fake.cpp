#include "torch/fake.h"

#include <c10/core/InferenceMode.h>
#include <c10/core/WrapDimMinimal.h>

#include <algorithm>
#include <unordered_set>

#include "ops/shapes.h"
#include "sym/known.h"
#include "torch/composites.h"
#include "torch/convert.h"
#include "torch/sym_node.h"
#include "torch/tracer_impl.h"
#include "torch/unreadable.h"

namespace vitrify::capture {

namespace {
constexpr const char* kUnreadable = "this tensor is a placeholder used while vitrify captures a program: its data cannot be read";

// Where in its memory it begins may follow from sizes.
bool moves(const View& v) {
  for (const View* p = &v; p->parent; p = p->parent.get())
    if (!is_static(p->parent->type) || !std::ranges::all_of(p->step.args, [](const c10::IValue& a) { return is_static(a); })) return true;
  return false;
}

// From the memory of `v` to `v`: a chain may be longer than the stack is deep.
template <class V>
std::vector<V*> steps_to(V& v) {
  std::vector<V*> steps{&v};
  while (steps.back()->parent) steps.push_back(steps.back()->parent.get());
  std::ranges::reverse(steps);
  return steps;
}

// What a view is as a meta tensor at the sizes that are the hints now, of what it is a view of; `v` has where it begins.
at::Tensor find_step(View& v, const at::Tensor& of) {
  if (!v.step.op) {
    v.offset = v.parent->offset;
    return of;
  }
  compat::Stack stack{of};
  for (const c10::IValue& a : v.step.args) stack.push_back(static_value(a, false));
  c10::impl::ExcludeDispatchKeyGuard below(compat::above_backend_keys());
  try {
    v.step.op->op.callBoxed(&stack);
  } catch (const c10::Error&) {
    fail("a view of what has other sizes by now begins nobody knows where");
  }
  std::vector<at::Tensor> results;
  flatten_results(stack, results);
  const at::Tensor t = results.at(static_cast<size_t>(std::max(v.step.result, 0)));
  v.offset = t.storage_offset();
  return t;
}

void find_offset(View& v) {
  at::Tensor t;
  for (View* s : steps_to(v)) {
    if (s->parent) {
      t = find_step(*s, t);
      continue;
    }
    t = at::empty_strided(values_of(s->type.sizes), values_of(s->type.strides), at::TensorOptions(scalar_type_of(s->type)).device(at::kMeta));
    if (s->offset) t.unsafeGetTensorImpl()->set_storage_offset(s->offset);
  }
}

// Where in its memory it begins, of a view of what begins there, as far as that follows from its step.
std::optional<sym::Int> place_after(const View& v, sym::Int of) {
  if (!v.step.op) return of;
  static const std::unordered_set<std::string_view> stays{
      "aten::alias",  "aten::detach",     "aten::view",    "aten::_reshape_alias", "aten::transpose.int", "aten::permute",
      "aten::t",      "aten::unsqueeze",  "aten::squeeze", "aten::squeeze.dim",    "aten::squeeze.dims",  "aten::expand",
      "aten::unfold", "aten::transpose_", "aten::t_",      "aten::unsqueeze_",     "aten::squeeze_"};
  if (stays.contains(v.step.op->name)) return of;
  if (v.step.op->name == "aten::view_as_real") return of * 2;
  const bool slice = v.step.op->name == "aten::slice.Tensor";
  const std::vector<c10::IValue>& args = v.step.args;
  if ((!slice && v.step.op->name != "aten::select.int") || !args[0].isInt()) return std::nullopt;
  const ir::TensorType& type = v.parent->type;
  const auto d = static_cast<size_t>(c10::maybe_wrap_dim(args[0].toInt(), static_cast<int64_t>(type.dim())));
  sym::Context& ctx = *v.storage->ctx;
  const auto number = [](const c10::IValue& i, sym::Int otherwise) {
    return i.isNone() ? otherwise : i.isSymInt() ? from_sym_int(i.toSymInt()) : sym::Int(i.toInt());
  };
  sym::Int at = number(args[1], 0);
  if (slice)
    ops::size_of_slice(ctx, type.sizes[d], at, number(args[2], type.sizes[d]), number(args[3], 1));
  else if (ctx.guard_lt(at, 0))
    at = at + type.sizes[d];
  return of + at * type.strides[d];
}

size_t dim_of(int64_t d, const ir::TensorType& t) {
  return static_cast<size_t>(c10::maybe_wrap_dim(d, static_cast<int64_t>(t.dim()), /*wrap_scalar=*/false));
}

std::optional<sym::Int> place_of(const View& v) {
  std::optional<sym::Int> place;
  for (const View* s : steps_to(v)) {
    place = s->parent ? place_after(*s, *place) : sym::Int(s->offset);
    if (!place) break;
  }
  return place;
}

}  // namespace

FakeImpl::FakeImpl(std::shared_ptr<View> v, c10::DispatchKeySet keys, caffe2::TypeMeta dtype)
    : TensorImpl(TensorImpl::VIEW, c10::Storage(v->storage->storage), keys, dtype), view(std::move(v)) {
  set_geometry();
}

void FakeImpl::set_geometry() {
  set_hints();
  sym_sizes_.clear();
  sym_strides_.clear();
  if (is_static(view->type) && !moves(*view)) {
    set_custom_sizes_strides(SizesStridesPolicy::Default);
    return;
  }
  for (const sym::Int& i : view->type.sizes) sym_sizes_.push_back(to_sym_int(view->storage->ctx, i));
  for (const sym::Int& i : view->type.strides) sym_strides_.push_back(to_sym_int(view->storage->ctx, i));
  set_custom_sizes_strides(SizesStridesPolicy::CustomSizes);
}

void FakeImpl::set_hints() {
  const bool may_change = allow_tensor_metadata_change();  // it does not: other sizes of a call have become its hints
  set_allow_tensor_metadata_change(true);
  set_sizes_and_strides(values_of(view->type.sizes), values_of(view->type.strides), view->offset);
  set_allow_tensor_metadata_change(may_change);
  hinted_ = sym::hinted(*view->storage->ctx);
  meta_ = at::Tensor();
}

const FakeImpl& FakeImpl::now() const {
  if (hinted_ == sym::hinted(*view->storage->ctx)) return *this;
  if (moves(*view)) {
    const Paused paused;  // whoever asks for sizes may have the mode on the stack, which would take this for a call of the program's
    find_offset(*view);
  }
  const_cast<FakeImpl*>(this)->set_hints();
  return *this;
}

void FakeImpl::specialize() const {
  for (const sym::Int& i : view->type.sizes) view->storage->ctx->specialize(i);
  for (const sym::Int& i : view->type.strides) view->storage->ctx->specialize(i);
}

std::optional<sym::Int> FakeImpl::place() const {
  const auto p = place_of(*view);
  return p && value_of(*p) == now().view->offset ? p : std::nullopt;
}

void FakeImpl::specialize_offset() const {
  if (const auto p = place()) {
    view->storage->ctx->specialize(*p);
    return;
  }
  for (const View* v = view.get(); v->parent; v = v->parent.get()) {
    bool from_end = v->step.result >= 0;  // places that count from the end, and the parts of a split, follow from the size
    for (const c10::IValue& a : v->step.args) {
      const c10::IValue known = static_value(a, true);
      from_end = from_end || !known.isInt() || known.toInt() < 0;
    }
    for (const sym::Int& i : v->parent->type.strides) view->storage->ctx->specialize(i);
    if (!from_end) continue;
    for (const sym::Int& i : v->parent->type.sizes) view->storage->ctx->specialize(i);
  }
}

// ATen reads the first size of a scalar before it refuses an index into it.
c10::SymIntArrayRef FakeImpl::sym_sizes_custom() const {
  static const c10::SymInt none(0);
  return sym_sizes_.empty() ? c10::SymIntArrayRef(&none, size_t{0}) : c10::SymIntArrayRef(sym_sizes_);
}
c10::IntArrayRef FakeImpl::sizes_custom() const {
  for (const sym::Int& i : view->type.sizes) view->storage->ctx->specialize(i);
  return now().sizes_default();
}
c10::IntArrayRef FakeImpl::strides_custom() const {
  for (const sym::Int& i : view->type.strides) view->storage->ctx->specialize(i);
  return now().strides_default();
}
int64_t FakeImpl::size_custom(int64_t d) const { return view->storage->ctx->specialize(view->type.sizes[dim_of(d, view->type)]); }
int64_t FakeImpl::numel_custom() const {
  sizes_custom();
  return numel_default();
}
int64_t FakeImpl::storage_offset_custom() const {
  specialize_offset();
  return now().view->offset;
}
c10::SymInt FakeImpl::sym_storage_offset_custom() const {
  const auto p = place();
  return p ? to_sym_int(view->storage->ctx, *p) : c10::SymInt(storage_offset_custom());
}
c10::SymInt FakeImpl::sym_size_custom(int64_t d) const { return sym_sizes_[dim_of(d, view->type)]; }
c10::SymInt FakeImpl::sym_numel_custom() const { return to_sym_int(view->storage->ctx, view->type.numel()); }

c10::SymBool FakeImpl::sym_is_contiguous_custom(at::MemoryFormat format) const {
  if (format != at::MemoryFormat::Contiguous) {
    specialize();
    return now().is_contiguous_default(format);
  }
  sym::Context& ctx = *view->storage->ctx;
  const auto is_empty = [&](const sym::Int& n) { return ctx.guard_eq(n, 0); };  // memory without elements is contiguous, whatever its strides
  sym::Int expected = 1;
  for (size_t d = view->type.dim(); d-- > 0;) {
    const sym::Int& n = view->type.sizes[d];
    if (!(view->type.strides[d] == expected)) {  // where it fits, nothing need be known of the size
      if (ctx.guard_eq(n, 1)) continue;
      if (!ctx.guard_eq(view->type.strides[d], expected)) return std::ranges::any_of(view->type.sizes, is_empty);
    }
    expected *= n;
  }
  return true;
}

at::Tensor FakeImpl::meta() {
  now();
  if (!meta_.defined()) {
    c10::InferenceMode mode(is_inference());
    meta_ = at::empty_strided(hint_sizes(), hint_strides(), at::TensorOptions(dtype()).device(at::kMeta));
    c10::TensorImpl* impl = meta_.unsafeGetTensorImpl();
    if (view->offset) impl->set_storage_offset(view->offset);
    if (view->type.wrapped_number) impl->set_wrapped_number(true);
    if (is_conj()) impl->_set_conj(true);
    if (is_neg()) impl->_set_neg(true);
  }
  return meta_;
}

at::Tensor FakeImpl::zeros() const {
  at::AutoDispatchBelowADInplaceOrView below;
  at::Tensor t = at::empty_strided(hint_sizes(), hint_strides(), at::TensorOptions(dtype())).zero_();
  t.unsafeGetTensorImpl()->_set_conj(is_conj());
  t.unsafeGetTensorImpl()->_set_neg(is_neg());
  return t;
}

c10::intrusive_ptr<c10::TensorImpl> FakeImpl::shallow_copy_and_detach(const c10::VariableVersion& version, bool allow) const {
  return shallow_copy_and_detach(c10::VariableVersion(version), allow);
}

c10::intrusive_ptr<c10::TensorImpl> FakeImpl::shallow_copy_and_detach(c10::VariableVersion&& version, bool allow) const {
  std::shared_ptr<View> detached = detached_view(view);
  // detach() shares its tensor's. So does what a node of autograd has saved, which is given them once it is made.
  detached->own_versions = version.enabled() && version.unique() && !torch::autograd::get_current_node();
  // Made outside of inference mode it counts writes, whatever it is a copy of.
  const auto keys = key_set() | compat::dense_keys(device(), c10::typeMetaToScalarType(dtype()), c10::InferenceMode::is_enabled());
  auto copy = c10::make_intrusive<FakeImpl>(std::move(detached), keys, dtype());
  copy->key_set_ = key_set();
  if (!copy->is_inference()) copy->set_version_counter(std::move(version));
  copy->set_allow_tensor_metadata_change(allow);
  return copy;
}

void FakeImpl::shallow_copy_from(const c10::intrusive_ptr<c10::TensorImpl>&) {
  const std::string why = "assigns to the .data of a tensor";
  if (Tracer* t = Tracer::current()) t->note_failure(why);  // also where the program catches it
  fail(why);
}

FakeImpl* as_fake(const c10::TensorImpl* t) {
  return t && typeid(*t) == typeid(FakeImpl) ? const_cast<FakeImpl*>(static_cast<const FakeImpl*>(t)) : nullptr;
}
FakeImpl* as_fake(const at::Tensor& t) { return t.defined() ? as_fake(t.unsafeGetTensorImpl()) : nullptr; }

bool is_whole(const View& v) { return !v.parent && v.storage->input < 0 && !v.storage->in_part && !v.storage->shrunk && v.storage->offset == 0; }

bool reads_placeholder(std::string_view message) { return message.find(kUnreadable) != std::string_view::npos; }
bool reads_placeholder(const c10::Error& e) { return reads_placeholder(std::string_view(e.msg())); }

c10::Storage make_storage(c10::Device device, const ir::TensorType& type, int64_t offset) {
  int64_t extent = offset + 1;
  for (size_t d = 0; d < type.dim(); ++d) {
    int64_t n = value_of(type.sizes[d]);
    if (n == 0) extent = 0;
    if (extent) extent += (n - 1) * value_of(type.strides[d]);
  }
  return compat::unreadable_storage(device, extent * c10::elementSize(scalar_type_of(type)), kUnreadable);
}

at::Tensor make_fake(std::shared_ptr<View> view, c10::DispatchKeySet keys) {
  auto dtype = c10::scalarTypeToTypeMeta(scalar_type_of(view->type));
  return at::Tensor(c10::make_intrusive<FakeImpl>(std::move(view), keys | composite_keys(), dtype));
}

}  // namespace vitrify::capture
