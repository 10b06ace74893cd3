#include "python/live.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "python/errors.h"

namespace vitrify::python {

namespace {

const void* storage_of(const at::Tensor& t) { return t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl(); }

const at::Tensor& grad_of(const at::Tensor& t) { return python::grad_of(t.unsafeGetTensorImpl()); }

}  // namespace

int32_t Live::owner(const at::Tensor& t) const {
  const auto at = std::ranges::lower_bound(owners_, t.unsafeGetTensorImpl(), {}, &std::pair<const at::TensorImpl*, int32_t>::first);
  return at != owners_.end() && at->first == t.unsafeGetTensorImpl() ? at->second : -1;
}

bool Live::holds(const at::TensorImpl* t) const {
  return std::ranges::any_of(grads_, [&](const Grad& g) { return g.of.defined() && g.of.unsafeGetTensorImpl() == t; });
}

Live::Live(std::shared_ptr<CompiledGraph> graph, const std::vector<Ref>& args, const std::vector<at::Tensor>& watched, std::vector<Float> floats)
    : graph_(std::move(graph)), program_(graph_ ? &graph_->program() : nullptr), floats_(std::move(floats)) {
  for (const at::Tensor& t : watched) grads_.push_back({t, -1, grad_of(t).defined()});
  for (size_t k = 0; k < watched.size(); ++k) owners_.emplace_back(watched[k].unsafeGetTensorImpl(), static_cast<int32_t>(k));
  std::ranges::sort(owners_);
  for (const Ref& a : args) given_.push_back(owner(THPVariable_Unpack(a.get())));
  sets_.resize(args.size());
  const Program* p = program_;
  if (!p) return;
  auto of_input = [&](uint32_t input) -> Grad& {
    Grad g;
    if (input < p->num_args) {
      g.arg = static_cast<int32_t>(input);
    } else {
      g.of = p->captured[input - p->num_args];
    }
    for (Grad& known : grads_)
      if (g.arg >= 0 ? known.arg == g.arg : known.of.is_same(g.of)) return known;
    g.defined = grad_of(g.arg >= 0 ? THPVariable_Unpack(args[input].get()) : g.of).defined();
    return grads_.emplace_back(std::move(g));
  };
  for (const LiveInput& in : p->live) {
    if (in.grad_of < 0) continue;
    Grad& g = of_input(static_cast<uint32_t>(in.grad_of));
    const at::Tensor& grad = grad_of(g.arg >= 0 ? THPVariable_Unpack(args[static_cast<size_t>(g.arg)].get()) : g.of);
    if (!grad.defined()) continue;
    g.read = true;
    g.meta = TensorMeta::of(grad, nullptr);
  }
  apart_ = !p->mutations.empty();
  for (const GradWrite& w : p->grad_writes) {
    of_input(w.input).written = true;
    if (w.input < sets_.size()) sets_[w.input] = true;
  }
}

bool Live::check(const c10::SmallVectorImpl<PyObject*>& args, std::vector<double>& floats) const {
  // Data that is given in turn has no gradient, and gets none.
  const auto counts = [&](int32_t k) { return k >= 0 && (grads_[static_cast<size_t>(k)].defined || grads_[static_cast<size_t>(k)].written); };
  for (size_t i = 0; i < given_.size() && !owners_.empty(); ++i)
    if (const int32_t now = owner(THPVariable_Unpack(args[i])); now != given_[i] && (counts(now) || counts(given_[i]) || sets_[i])) return false;
  c10::SmallVector<const void*, 16> storages;
  for (const Grad& g : grads_) {
    const at::Tensor& t = g.arg >= 0 ? THPVariable_Unpack(args[static_cast<size_t>(g.arg)]) : g.of;
    const at::Tensor& grad = grad_of(t);
    if (grad.defined() != g.defined) return false;
    if (g.read && !g.meta.matches(grad.unsafeGetTensorImpl())) return false;
    if (apart_ && g.read) storages.push_back(storage_of(grad));
  }
  if (apart_) {
    for (PyObject* a : args) storages.push_back(storage_of(THPVariable_Unpack(a)));
    for (const at::Tensor& t : program_->captured)
      if (t.defined()) storages.push_back(storage_of(t));
    size_t grads = 0;
    for (const Grad& g : grads_) grads += g.read;
    const auto first = storages.begin(), middle = first + static_cast<std::ptrdiff_t>(grads);
    std::sort(first, middle);
    if (std::adjacent_find(first, middle) != middle) return false;
    for (auto it = middle; it != storages.end(); ++it)
      if (std::binary_search(first, middle, *it)) return false;
  }
  floats.clear();
  for (const Float& f : floats_) {
    PyObject* v = PyDict_GetItemWithError(f.dict.get(), f.key.get());
    if (v && f.index >= 0) v = PyTuple_CheckExact(v) && PyTuple_GET_SIZE(v) > f.index ? PyTuple_GET_ITEM(v, f.index) : nullptr;
    if (!v || !PyFloat_CheckExact(v)) {
      forget_error();
      return false;
    }
    floats.push_back(PyFloat_AS_DOUBLE(v));
  }
  if (!program_ || !program_->numbers || program_->numbers->checks.empty()) return true;
  c10::SmallVector<const at::Tensor*, 32> inputs;
  for (PyObject* a : args) inputs.push_back(&THPVariable_Unpack(a));
  for (const at::Tensor& t : program_->captured) inputs.push_back(&t);
  static thread_local std::vector<double> values;
  return floats.size() >= program_->numbers->num_live && program_->numbers->eval(floats.data(), inputs.data(), values);
}

void Live::visit(int (*f)(PyObject*, void*), void* arg, int& result) const {
  for (const Float& x : floats_)
    for (const Ref* r : {&x.dict, &x.key})
      if (!result && *r) result = f(r->get(), arg);
}

}  // namespace vitrify::python
