#include "torch/fake.h"

#include "torch/convert.h"
#include "torch/tracer_impl.h"

namespace vitrify::capture {

namespace {
constexpr const char* kUnreadable = "this tensor is a placeholder used while vitrify captures a program: its data cannot be read";
}

FakeImpl::FakeImpl(std::shared_ptr<View> v, c10::DispatchKeySet keys, caffe2::TypeMeta dtype)
    : TensorImpl(TensorImpl::VIEW, c10::Storage(v->storage->storage), keys, dtype), view(std::move(v)) {
  set_geometry();
}

void FakeImpl::set_geometry() {
  set_sizes_and_strides(values_of(view->type.sizes), values_of(view->type.strides), view->offset);
  meta_ = at::Tensor();
}

at::Tensor FakeImpl::meta() {
  if (!meta_.defined()) {
    c10::InferenceMode mode(is_inference());
    meta_ = at::empty_strided(sizes(), strides(), at::TensorOptions(dtype()).device(at::kMeta));
    c10::TensorImpl* impl = meta_.unsafeGetTensorImpl();
    if (storage_offset()) impl->set_storage_offset(storage_offset());
    if (view->type.wrapped_number) impl->set_wrapped_number(true);
    if (is_conj()) impl->_set_conj(true);
    if (is_neg()) impl->_set_neg(true);
  }
  return meta_;
}

c10::intrusive_ptr<c10::TensorImpl> FakeImpl::shallow_copy_and_detach(const c10::VariableVersion& version, bool allow) const {
  return shallow_copy_and_detach(c10::VariableVersion(version), allow);
}

c10::intrusive_ptr<c10::TensorImpl> FakeImpl::shallow_copy_and_detach(c10::VariableVersion&& version, bool allow) const {
  auto copy = c10::make_intrusive<FakeImpl>(detached_view(view), key_set(), dtype());
  if (!copy->is_inference()) copy->set_version_counter(std::move(version));
  copy->set_allow_tensor_metadata_change(allow);
  return copy;
}

void FakeImpl::shallow_copy_from(const c10::intrusive_ptr<c10::TensorImpl>&) { fail("assigns to the .data of a tensor"); }

FakeImpl* as_fake(const c10::TensorImpl* t) {
  return t && typeid(*t) == typeid(FakeImpl) ? const_cast<FakeImpl*>(static_cast<const FakeImpl*>(t)) : nullptr;
}
FakeImpl* as_fake(const at::Tensor& t) { return t.defined() ? as_fake(t.unsafeGetTensorImpl()) : nullptr; }

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
  return at::Tensor(c10::make_intrusive<FakeImpl>(std::move(view), keys, dtype));
}

}  // namespace vitrify::capture
