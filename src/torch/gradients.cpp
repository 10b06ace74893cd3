// What a backward of the trace gives, and whose memory that is.
#include <ATen/LegacyBatchedTensorImpl.h>
#include <torch/csrc/autograd/functions/basic_ops.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "torch/call_sizes.h"
#include "torch/convert.h"
#include "torch/joint.h"
#include "torch/overlap.h"
#include "torch/sym_node.h"
#include "torch/tangents.h"
#include "torch/tracer_impl.h"

namespace vitrify {

using capture::as_fake;
using capture::fail;
using capture::FakeImpl;
using ir::Value;

std::unordered_set<uint32_t> said_by(const std::vector<const ir::TensorType*>& types) {
  std::unordered_set<uint32_t> r;
  for (const ir::TensorType* t : types)
    for (sym::Int i : t->sizes)
      if (!i.is_const() && sym::is_symbol(i)) r.insert(sym::view(i).symbol->id);
  return r;
}

std::optional<std::vector<ResultSpec::ViewOp>> path_between(const capture::View* of, const capture::View& v,
                                                            const std::unordered_set<uint32_t>& said) {
  const auto is_said = [&](const c10::IValue& a) {
    if (capture::is_static(a)) return true;
    std::vector<sym::Int> symbols;
    for (sym::Int i : sizes_in(a)) sym::free_symbols(i, symbols);
    return std::ranges::all_of(symbols, [&](sym::Int s) { return said.contains(sym::view(s).symbol->id); });
  };
  std::vector<ResultSpec::ViewOp> path;
  const capture::View* at = &v;
  for (; at != of && at->parent; at = at->parent.get()) {
    if (at->in_place || !std::ranges::all_of(at->step.args, is_said)) return {};
    if (at->step.op)
      path.push_back({at->step.op->name, at->step.args, at->step.result, at->step.results ? at->step.results->call : 0});
    else
      path.push_back({.op = "aten::detach", .args = {}, .own_versions = at->own_versions});
  }
  if (of && at != of) return {};
  std::ranges::reverse(path);
  return path;
}

void Tracer::Impl::take_gradients(JointProgram& j, std::vector<Grad> grads, const std::vector<Value>& values) {
  for (Grad& g : grads) {
    if (!is_of_tangent(g.how)) g.how.index += j.num_forward;
    j.gradients.push_back({.given = j.place_of(g.of), .how = std::move(g.how), .type = std::move(g.type)});
  }
  j.outputs.insert(j.outputs.end(), values.begin(), values.end());
  j.end = graph->next_id();
}

std::vector<Tracer::Impl::Grad> Tracer::Impl::differentiate(const Level& level, const std::vector<at::Tensor>& tangents, std::vector<Value>& values,
                                                            const std::vector<TangentLayout>& how) {
  backward_begin = graph->next_id();
  const capture::InRound in_round(++round);
  read_itself.clear();
  read_memory.clear();
  detached.clear();
  read_counted.clear();
  read_uncounted.clear();
  const auto fake_behind = [](const at::Tensor& t) {
    const auto* batched = t.defined() ? at::maybeGetBatchedImpl(t) : nullptr;
    return as_fake(batched ? batched->value() : t);
  };
  const std::vector<at::Tensor> grads = run_backward(level, tangents, false, how);
  std::vector<Grad> r;
  std::vector<int32_t> stops;
  for (size_t k = 0; k < how.size(); ++k)
    if (how[k].stops) stops.push_back(static_cast<int32_t>(k));
  // Results have memory of their own. Gradients have what eager's have: of a tangent, or of each other, or as views. A view holds what it is of, so
  // that nothing is added to it in place.
  auto owners = output_roots;
  std::unordered_map<const StorageState*, size_t> tangent_of;
  std::vector<const ir::TensorType*> types;  // of what sizes are read of
  for (const ir::Input& in : graph->inputs)
    if (in.kind != ir::InputKind::Tangent) types.push_back(&in.value.type());
  for (size_t k = 0; k < tangents.size(); ++k)
    if (const FakeImpl* f = fake_behind(tangents[k])) {
      tangent_of.emplace(f->view->storage.get(), k);
      types.push_back(&f->view->type);
    }
  const std::unordered_set<uint32_t> said = said_by(types);
  std::unordered_map<const StorageState*, uint32_t> made;
  std::unordered_map<const View*, uint32_t> made_as;
  std::unordered_map<const View*, size_t> views;
  for (size_t k = 0; k < grads.size(); ++k) {
    if (!grads[k].defined()) continue;
    const auto* batched = at::maybeGetBatchedImpl(grads[k]);
    const at::Tensor g = fake_of(batched ? batched->value() : grads[k]);
    FakeImpl* f = as_fake(g);
    const bool lazy = f->is_conj() || f->is_neg();
    capture::View& v = *f->view;
    if (lazy && (batched || !v.parent)) fail("a gradient is a conjugate or negative view");
    ResultSpec how;
    how.index = static_cast<uint32_t>(values.size());
    const StorageState* const memory = v.storage.get();
    const auto from = tangent_of.find(memory);
    auto of_tangent = from == tangent_of.end() || (batched != nullptr) != (at::maybeGetBatchedImpl(tangents[from->second]) != nullptr)
                          ? std::nullopt
                          : path_between(fake_behind(tangents[from->second])->view.get(), v, said);
    auto of_memory = memory->input >= 0 ? std::nullopt : path_between(nullptr, v, said);
    if (of_tangent) {
      how.index = static_cast<uint32_t>(from->second);
      how.path = std::move(*of_tangent);
      how.kind = how.path.empty() ? ResultSpec::Kind::Input : ResultSpec::Kind::ViewOfInput;
    } else if (lazy || overlaps_itself(v.type) || of_memory) {
      const auto [at, fresh] = made.try_emplace(memory, how.index);
      if (fresh) values.push_back(own_storage(memory->base, memory, owners));
      how.index = at->second;
      if (v.parent) how.kind = ResultSpec::Kind::ViewOfOutput, how.path = of_memory ? std::move(*of_memory) : path_of(v);
    } else {
      const auto [at, fresh] = made_as.try_emplace(&v, how.index);
      if (fresh) values.push_back(own_storage(read(v), v.storage.get(), owners));
      how.index = at->second;
    }
    if (!how.path.empty()) how.order = 1 + static_cast<uint32_t>(views.try_emplace(&v, k).first->second);
    const bool stopped = k >= level.of.size();
    how.held = !stopped && held.contains(level.to[k].function.get());
    const bool given = is_of_tangent(how);
    r.push_back({stopped ? Value() : level.of[k], std::move(how), given ? undefined_type() : v.type,
                 batched ? static_cast<int32_t>(batched->bdims()[0].dim()) : -1, stopped ? stops[k - level.of.size()] : -1});
  }
  return r;
}

// The engine's own, of gradients that meet, and no formula's.
bool Tracer::Impl::is_sum(const OpInfo& info) const {
  if (!in_backward || info.name != "aten::add.Tensor") return false;
  const auto node = torch::autograd::get_current_node();
  return node && (node.get() == summing || dynamic_cast<const torch::autograd::GraphRoot*>(node.get()));
}

// The engine adds to a gradient that nobody else holds in place, but never under a mode: its layout stays.
bool Tracer::Impl::sums_in_place(c10::ArrayRef<c10::IValue> args) const {
  if (c10::GradMode::is_enabled() || in_batch) return false;
  const at::Tensor& sum = args[0].toTensor();
  const FakeImpl* f = as_fake(sum);
  // The engine, the call and its boxed arguments hold the tensor, and its object where Python made it; it and its state hold the memory.
  const bool made_by_python = f && f->pyobj_slot()->has_unique_reference();
  return f && sum.use_count() == (made_by_python ? 4 : 3) && f->view->storage->storage.use_count() == 2 && f->is_non_overlapping_and_dense() &&
         !f->is_conj() && !f->is_neg();
}

}  // namespace vitrify
