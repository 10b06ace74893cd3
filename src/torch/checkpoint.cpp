// What torch.utils.checkpoint says while a program is captured (vitrify/_checkpoint.py), and what its functions find in a backward.
#include <ATen/SavedTensorHooks.h>
#include <ATen/SequenceNumber.h>

#include <algorithm>

#include "torch/slice.h"
#include "torch/tracer_impl.h"

namespace vitrify {

const void* capture::hooks_on_saved() {
  const auto hooks = at::SavedTensorDefaultHooks::get_hooks();
  return hooks ? hooks->first.ptr(&hooks->first.pyinterpreter()) : nullptr;
}

void Tracer::note_saved(const std::vector<at::Tensor>& args) {
  Impl::SavedArguments& saved = impl_->saved_arguments.emplace_back();
  saved.from = at::sequence_number::peek();
  for (const at::Tensor& t : args)
    if (const auto* fake = capture::as_fake(impl_->fake_of(t))) {
      saved.values.push_back(root_of(fake->view->storage->base));
      saved.memory.push_back(fake->view->storage);
    }
}

void Tracer::note_cached(uintptr_t which, uint64_t first) { impl_->cached.push_back({which, first, at::sequence_number::peek()}); }

void Tracer::note_taken(uintptr_t which) {
  const auto at = std::ranges::find(impl_->cached, which, &Impl::Cached::which);
  if (at != impl_->cached.end()) at->once = true;
}

bool Tracer::takes_gradients() const { return impl_->in_backward || impl_->in_trial; }

bool Tracer::Impl::has_placeholder(const at::Tensor& real) const {
  return (real.unsafeGetTensorImpl()->is_wrapped_number() && !by_real.contains(real.unsafeGetTensorImpl())) ||
         std::ranges::any_of(sources, [&](const Source& s) { return s.real.is_same(real) && s.fake.defined() && !is_argument(s); });
}

at::Tensor Tracer::Impl::late_constant(const at::Tensor& real) {
  const auto known = std::ranges::find_if(met_late, [&](const auto& met) { return met.first.is_same(real); });
  if (known != met_late.end()) return known->second;
  check_in_scope(real);
  const at::Tensor now = real.detach().resolve_conj().resolve_neg();
  ir::TensorType type = type_of(now);
  type.wrapped_number = false;
  const ir::Value v = graph->add_constant(type, std::make_shared<at::Tensor>(now));
  made_late.push_back(v.node);
  return met_late.emplace_back(real, new_tensor(v)).second;
}

// Nodes of a derivative that has been taken out of the graph by then.
void Tracer::Impl::forget_late() {
  once = false;
  met_late.clear();
  for (const ir::Node* n : made_late) graph->constants[static_cast<size_t>(std::get<sym::Int>(n->args[0]).value())] = {};
  made_late.clear();
}

}  // namespace vitrify
