#include "python/symbols.h"

#include <torch/csrc/autograd/python_variable.h>

#include "sym/holds.h"

namespace vitrify::python {

std::shared_ptr<Symbols> Symbols::of(std::shared_ptr<ir::Graph> g, std::vector<TensorMeta>& metas) {
  auto s = std::make_shared<Symbols>();
  for (uint32_t i = 0; i < metas.size() && i < g->inputs.size(); ++i) {
    const ir::TensorType& t = g->inputs[i].value.type();
    auto take = [&](const ir::Dims& dims, auto& meta, bool stride) {
      for (uint32_t d = 0; d < dims.size() && d < meta.size(); ++d) {
        if (dims[d].is_const()) continue;
        meta[d] = TensorMeta::kAny;
        (sym::is_symbol(dims[d]) ? s->bare_ : s->derived_).push_back({i, d, stride, dims[d]});
      }
    };
    take(t.sizes, metas[i].sizes, false);
    take(t.strides, metas[i].strides, true);
  }
  if (s->bare_.empty() && s->derived_.empty()) return nullptr;
  s->known_ = sym::known(g->ctx());
  s->graph_ = std::move(g);
  return s;
}

bool Symbols::check(const c10::SmallVectorImpl<PyObject*>& tensors) const {
  c10::SmallVector<int64_t, 16> values(known_.symbols.size(), TensorMeta::kAny);
  auto actual = [&](const Slot& s) {
    auto* t = THPVariable_Unpack(tensors[s.tensor]).unsafeGetTensorImpl();
    return s.stride ? t->strides()[s.dim] : t->sizes()[s.dim];
  };
  for (auto& s : bare_) {
    const uint32_t id = sym::view(s.expr).symbol->id;
    const auto& [range, multiple_of] = known_.symbols[id];
    int64_t v = actual(s);
    int64_t& slot = values[id];
    if (slot != TensorMeta::kAny && slot != v) return false;
    if (v < range.lo || v > range.hi || (multiple_of > 1 && v % multiple_of)) return false;
    slot = v;
  }
  const auto value = [&](uint32_t id) { return values[id] == TensorMeta::kAny ? std::nullopt : std::optional(values[id]); };
  for (auto& s : derived_)
    if (sym::eval(s.expr, [&](uint32_t id) { return values[id]; }) != actual(s)) return false;
  // Those of sizes that the run finds are looked at by the run.
  for (const sym::Guard& g : known_.guards)
    if (!sym::holds(g, value).value_or(true)) return false;
  return true;
}

}  // namespace vitrify::python
