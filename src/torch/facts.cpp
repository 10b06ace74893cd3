// What a program reads of a tensor that no op says: a guard where the next call can be compared with this one, else the end of the capture.
#include <algorithm>

#include "torch/tracer_impl.h"

namespace vitrify {

using capture::as_fake;
using capture::FakeImpl;

void Tracer::note_fact(const at::Tensor& t, Fact fact, std::string_view name) {
  Impl& m = *impl_;
  const auto refuse = [&] {
    note_failure(fmt::format("reads {} of a tensor, which calls may not have in common", name));
    throw CaptureError(*m.failure);
  };
  if (fact == Fact::Other) refuse();
  const auto refuse_hooks = [&] {
    note_failure("it registers a hook on a tensor, or looks at those it has");
    throw CaptureError(*m.failure);
  };
  FakeImpl* f = as_fake(t);
  if (!f) {
    const auto known = m.by_real.find(t.unsafeGetTensorImpl());
    if (known == m.by_real.end()) return;  // the program's own
    // What it is itself the program sees: what of that may be another in the next call?
    if (fact == Fact::History) return;
    if (fact == Fact::Hooks) refuse_hooks();
    if (fact != Fact::View && fact != Fact::Offset) refuse();
    const capture::Paused paused;
    f = as_fake(m.fake_of(t));
  }
  capture::StorageState& s = *f->view->storage;
  if (s.trace != m.trace) return;
  if (fact == Fact::Offset || fact == Fact::Memory) f->specialize_offset();
  if (fact == Fact::Memory)
    for (const ir::Dims* dims : {&s.type.sizes, &s.type.strides})
      for (const sym::Int& i : *dims) s.ctx->specialize(i);
  if (s.input < 0) return;
  const Impl::Source& source = *m.inputs[static_cast<size_t>(s.input)];
  const at::Tensor& real = source.real;
  switch (fact) {
    case Fact::Version:
      for (const capture::View* v = f->view.get(); v; v = v->parent.get())
        if (v->own_versions) return;
      refuse();
      break;
    case Fact::View:
      if (as_fake(t) && real.is_view()) refuse();  // the placeholder is none
      break;
    case Fact::Memory:
      if (s.resized || !real.defined() || std::ranges::any_of(m.inputs, [&](const Impl::Source* o) {
            return o != &source && o->real.defined() && o->real.has_storage() && o->real.is_alias_of(real);
          }))
        refuse();  // placeholders have memory of their own each
      s.storage.set_nbytes(real.storage().nbytes());
      break;
    case Fact::History:
      if (source.fake.is_same(t) && real.requires_grad() && !real.is_leaf()) refuse();
      return;  // of leaves it is the same for all
    case Fact::Hooks:
      if (source.fake.is_same(t)) refuse_hooks();
      return;
    case Fact::Address:
      return;  // a placeholder refuses
    default:
      break;
  }
  const InputFact read{static_cast<uint32_t>(s.input), fact};
  if (std::ranges::none_of(m.facts, [&](const InputFact& o) { return o.input == read.input && o.fact == fact; })) m.facts.push_back(read);
}

}  // namespace vitrify
