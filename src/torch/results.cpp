// The end of a capture: how the program's results and writes are made from the outputs of the graph.
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <unordered_set>

#include "ir/faults.h"
#include "ops/shapes.h"
#include "support/counters.h"
#include "torch/ask_kernel.h"
#include "torch/convert.h"
#include "torch/derivatives.h"
#include "torch/slice.h"
#include "torch/sym_node.h"
#include "torch/tracer_impl.h"
#include "torch/versions.h"

namespace vitrify {

using capture::as_fake;
using capture::fail;
using capture::FakeImpl;
using capture::View;
using ir::TensorType;
using ir::Value;
using torch::autograd::CreationMeta;

// A graph output must be memory of its own: not an input's, a constant's, or another output's (unless eager shares it as well).
Value Tracer::Impl::own_storage(Value v, const StorageState* storage, ir::ValueMap<const StorageState*>& roots) {
  Value root = root_of(v);
  const ir::Node* n = root.node;
  bool borrowed = ir::is_input(*n) || ir::is_constant(*n) || n->op->name == "aten::scalar_tensor";
  if (const auto* owner = roots.find(root); owner && *owner != storage) borrowed = true;
  if (borrowed) {
    TensorType type = v.type();
    type.wrapped_number = false;
    if (ir::is_input(*n) || ir::is_constant(*n) || type.dim()) {
      Value empty =
          append("aten::empty_strided",
                 {std::vector<sym::Int>(type.sizes.begin(), type.sizes.end()), std::vector<sym::Int>(type.strides.begin(), type.strides.end()),
                  type.dtype == DType::Opaque ? ir::Arg(ir::None{}) : ir::Arg(type.dtype), ir::None{}, type.device, ir::None{}},
                 {type})
              ->out();
      bool dense = type.is_contiguous();
      v = dense || type.dtype == DType::Opaque ? append("aten::clone", {v, ir::MemoryFormat::Preserve}, {type})->out()
                                               : append("aten::copy", {empty, v, false}, {type})->out();
    } else {
      v = append("aten::clone", {v, ir::MemoryFormat::Preserve}, {type})->out();
    }
    root = v;
  }
  roots.emplace(root, storage);
  return v;
}

Program Tracer::Impl::finish(const std::vector<at::Tensor>& outputs) {
  stop();
  if (failure) throw CaptureError(*failure);
  Program p;
  emit_outputs(with_grads(outputs, p), p);
  take_inputs(p);
  ir::cut_dead_readers(*graph);
  for (const ir::Node* n : ir::dead_nodes(*graph))
    counters().values_compiled += std::max<size_t>(n->outs.size(), 1);  // the pipeline counts the others
  graph->remove_dead();
  if (!p.resumes) check_found();
  return p;
}

// Gradients are found through the tensors they belong to, and set on them: those are inputs as well.
std::vector<at::Tensor> Tracer::Impl::with_grads(const std::vector<at::Tensor>& outputs, Program& p) {
  std::vector<at::Tensor> all = outputs;
  for (auto& [of, grad] : new_grads) {
    const auto known = by_real.find(of.unsafeGetTensorImpl());
    const bool argument = known != by_real.end() && is_argument(*known->second);
    const at::Tensor f = argument ? known->second->fake : fake_of(of);
    const StorageState& s = *as_fake(f)->view->storage;
    if (s.input < 0 || !as_fake(inputs[static_cast<size_t>(s.input)]->fake) || !inputs[static_cast<size_t>(s.input)]->fake.is_same(f))
      fail("sets the .grad of a tensor that is not an input");
    const Source& owner = *inputs[static_cast<size_t>(s.input)];
    if (std::ranges::any_of(sources,
                            [&](const Source& o) { return &o != &owner && o.real.is_same(owner.real) && is_argument(o) != is_argument(owner); }))
      fail("sets the .grad of an argument that it also reaches by itself");
    if (owner.real.defined() && !owner.real.is_leaf()) fail("sets the .grad of a tensor that is not a leaf");
    if (grad.defined() && grad.requires_grad()) fail("makes gradients that need gradients");
    p.grad_writes.push_back({static_cast<uint32_t>(s.input), grad.defined() ? static_cast<int32_t>(all.size()) : -1});
    if (grad.defined()) all.push_back(grad);
  }
  for (const at::Tensor& t : all)
    if (t.defined()) fake_of(t);  // may be a gradient itself
  for (size_t i = 0; i < inputs.size(); ++i)
    if (Source* s = inputs[i]->grad_of; s && !s->fake.defined()) fake_of(s->real);  // may add inputs
  return all;
}

namespace {

// Whether the history of `t` goes through `view`, at most so many steps back: not where a write has given them another.
bool made_from(const at::Tensor& t, const at::Tensor& view, size_t steps) {
  const torch::autograd::Node *n = t.grad_fn().get(), *end = view.grad_fn().get();
  for (; n && n != end && steps; --steps) n = n->num_outputs() == 1 ? n->next_edge(0).function.get() : nullptr;
  return n && n == end;
}

// The program's own as_strided() of all that a view is was recorded as an alias of that view. Its derivative is another: users get it as it was made.
void make_strided_again(const at::Tensor& t, std::vector<ResultSpec::ViewOp>& path) {
  const torch::autograd::Node* n = t.grad_fn().get();
  const capture::View* v = as_fake(t)->view.get();
  for (size_t k = path.size(); k-- > 0 && n && v;) {
    if (path[k].op == "aten::alias" && dynamic_cast<const torch::autograd::generated::AsStridedBackward0*>(n) && capture::is_static(v->type))
      path[k] = {.op = "aten::as_strided", .args = {values_of(v->type.sizes), values_of(v->type.strides), c10::IValue()}, .mode = path[k].mode};
    n = n->num_outputs() == 1 ? n->next_edge(0).function.get() : nullptr;
    v = v->parent.get();
  }
}

// The last steps of `path` lead to `v`. A detached tensor counts writes, and its views have it for their base: all that is made of one has one.
// Autograd takes it for no view.
bool is_apart(const View& v) { return !v.step.op || (v.step.op->name == "aten::view.dtype" && v.type.dim() == v.parent->type.dim()); }

void note_modes(const View* v, std::vector<ResultSpec::ViewOp>& path, std::unordered_map<const View*, uint64_t>& detached, uint64_t& calls) {
  for (auto step = path.rbegin(); step != path.rend() && v->parent; ++step, v = v->parent.get()) {
    step->mode = v->mode;
    if (v->step.op) continue;
    const auto [at, fresh] = detached.try_emplace(v, calls + 1);
    if (fresh) ++calls;
    step->call = at->second;
  }
}

// What is apart from autograd, as .data, and reshaped in place is no view, nor are its views those of what it was: it is made apart when it has its
// shape. `shapes`: of such ones, as the results see them.
void make_apart_last(const View& v, std::vector<ResultSpec::ViewOp>& path, std::unordered_map<const View*, const View*>& shapes) {
  size_t run = 0;  // steps in place behind this one
  size_t place = path.size();
  const View* shape = &v;  // the last of them
  for (const View* q = &v; q->parent && place > 0; q = q->parent.get()) {
    --place;
    if (q->in_place)
      ++run;
    else {
      // By another type's elements the last dim is another one after it: only inference mode, in which no view is apart from what it was, has those
      // in turn.
      const bool other_elements = q->step.op && c10::elementSize(scalar_type_of(q->type)) != c10::elementSize(scalar_type_of(q->parent->type));
      if (is_apart(*q) && run && other_elements) {
        if (q->mode != ViewMode::Inference) fail("returns a view in another type's elements, reshaped in place");
      } else if (is_apart(*q)) {
        if (shapes.try_emplace(q, shape).first->second != shape)
          fail("returns what it has detached and reshaped in place, and a view of that from before");
        std::rotate(path.begin() + static_cast<std::ptrdiff_t>(place), path.begin() + static_cast<std::ptrdiff_t>(place) + 1,
                    path.begin() + static_cast<std::ptrdiff_t>(place + 1 + run));
      }
      run = 0;
      shape = q->parent.get();
    }
  }
}

// In eager's history a view of memory that was written to since is made again, from the whole of it and by its strides: so many views of `path` that
// lead to `t` were made of such a one, or none was.
std::optional<size_t> views_since_made_again(const at::Tensor& t, const std::vector<ResultSpec::ViewOp>& path) {
  const torch::autograd::Node* n = t.grad_fn().get();
  at::Tensor base = t;
  if (t.is_view()) base = t._base();
  const compat::NodePtr whole = torch::autograd::impl::gradient_edge(base).function;
  for (size_t steps = 0; n && steps < path.size(); ++steps) {
    const std::string& op = path[path.size() - 1 - steps].op;
    // The program's own as_strided(), which of all that a view is was recorded as an alias of that view, is one of that view.
    const bool own = (op == "aten::alias" || op == "aten::as_strided") && n->num_outputs() == 1 && n->next_edge(0).function != whole;
    if (dynamic_cast<const torch::autograd::generated::AsStridedBackward0*>(n)) {
      if (!own) return steps;
      if (op == "aten::as_strided") return {};
    }
    n = n->num_outputs() == 1 ? n->next_edge(0).function.get() : nullptr;
  }
  return {};
}

// What is written to the base of `view` since the call began is no part of its history.
bool is_same_edge(const torch::autograd::Edge& begin, const at::Tensor& view) {
  at::Tensor base = view;
  if (view.is_view()) base = view._base();
  return torch::autograd::impl::gradient_edge(base) == begin;
}

}  // namespace

// A view of a view that is returned as well is made from that one, as in eager: their gradients meet there, in the strides of the first.
void Tracer::Impl::chain_views(const std::vector<at::Tensor>& fakes, std::vector<ResultSpec>& results) const {
  std::unordered_map<const View*, uint32_t> views;
  for (uint32_t i = 0; i < fakes.size(); ++i)
    if (FakeImpl* f = as_fake(fakes[i]); f && f->view->parent && fakes[i].requires_grad()) {
      views.try_emplace(f->view.get(), i);
      try {
        (void)fakes[i].grad_fn();
      } catch (const c10::Error&) {  // eager raises it when gradients come: this one would be made after the write
        fail("returns one of several views of what it has written to since");
      }
    }
  auto turn_of = [&](uint32_t i) {
    const ResultSpec& r = results[i];
    at::Tensor base = fakes[r.kind == ResultSpec::Kind::ViewOfValue ? r.index : i];
    if (r.kind == ResultSpec::Kind::ViewOfOutput && base.is_view()) base = base._base();
    const bool of_input = r.kind == ResultSpec::Kind::ViewOfInput;
    const capture::Chain chain = capture::views_between(of_input ? inputs[r.index]->edge : torch::autograd::impl::gradient_edge(base), fakes[i]);
    return chain.empty() ? std::vector{fakes[i].grad_fn()->sequence_nr()} : capture::turn_of(chain);
  };
  std::vector<std::pair<std::vector<uint64_t>, uint32_t>> turns;
  for (uint32_t i = 0; i < fakes.size(); ++i) {
    ResultSpec& r = results[i];
    if (r.path.empty() || r.kind == ResultSpec::Kind::Value || !fakes[i].requires_grad()) continue;
    if (std::ranges::any_of(r.path, [](const ResultSpec::ViewOp& v) { return v.op == "aten::detach"; }))
      fail("returns a detached tensor that gradients come back through");  // one with a history of its own, in the memory of another
    if (fakes[i].grad_fn()) turns.emplace_back(turn_of(i), i);
    const View& v = *as_fake(fakes[i])->view;
    const bool of_whole =
        r.kind == ResultSpec::Kind::ViewOfOutput || (r.kind == ResultSpec::Kind::ViewOfValue && results[r.index].kind == ResultSpec::Kind::Value);
    if (r.kind == ResultSpec::Kind::ViewOfInput && as_fake(fakes[i])->view->storage->generation && !inputs[r.index]->real.is_view() &&
        is_same_edge(inputs[r.index]->edge, fakes[i]) && views_since_made_again(fakes[i], r.path))
      fail("returns a view of an argument that it has written since, by way of what is detached of it");
    const auto since = of_whole ? views_since_made_again(fakes[i], r.path) : std::nullopt;
    bool chained = false;
    size_t steps = 1;
    const View* p = as_fake(fakes[i])->view->parent.get();
    for (; p && steps < r.path.size() && steps <= since.value_or(steps); p = p->parent.get(), ++steps) {
      const auto it = views.find(p);
      if (it == views.end() || results[it->second].path.empty() || !made_from(fakes[i], fakes[it->second], steps)) continue;
      r.kind = ResultSpec::Kind::ViewOfValue;
      r.index = it->second;
      r.path.erase(r.path.begin(), r.path.end() - static_cast<std::ptrdiff_t>(steps));
      chained = true;
      break;
    }
    if (since && !chained) {
      const View* whole = &v;
      for (size_t s = 0; s < *since; ++s) whole = whole->parent.get();
      if (whole->type.dtype == v.storage->type.dtype && capture::is_static(whole->type) && capture::is_static(v.storage->type)) {
        r.path.erase(r.path.begin(), r.path.end() - static_cast<std::ptrdiff_t>(*since));
        r.path.insert(r.path.begin(), {.op = "aten::as_strided",
                                       .args = {values_of(whole->type.sizes), values_of(whole->type.strides), whole->offset - v.storage->offset},
                                       .mode = whole->mode});
      } else if (const auto end = r.path.end() - static_cast<std::ptrdiff_t>(*since);
                 std::any_of(r.path.begin() + (end != r.path.begin()), end, [](const ResultSpec::ViewOp& o) { return o.op == "aten::as_strided"; })) {
        fail("returns as_strided() of a view that it has written since, in sizes that change from call to call");
      }
    }
    make_strided_again(fakes[i], r.path);
  }
  std::ranges::sort(turns);
  for (uint32_t k = 0; k < turns.size(); ++k) results[turns[k].second].order = k + 1;
  for (ResultSpec& r : results)
    if (r.kind == ResultSpec::Kind::ViewOfValue && r.path.empty()) r.order = results[r.index].order;  // the same tensor again
}

namespace {

// Whether this is all of its memory, in the shape that transpose_() and the like gave the tensor that it was made as, or _unsafe_view in its place.
bool is_reshaped_in_place(const capture::View& v) {
  const capture::StorageState& s = *v.storage;
  const capture::View* p = &v;
  while (p->parent && (p->in_place || p->apart)) p = p->parent.get();
  return v.parent && !p->parent && v.offset == 0 && v.type.dtype == s.type.dtype && ops::is_dense(*s.ctx, v.type) && ops::is_dense(*s.ctx, s.type) &&
         s.ctx->guard_eq(v.type.numel(), s.type.numel());  // which it may be in other terms
}

bool is_static(const capture::View& v) { return capture::is_static(v.type) && capture::is_static(v.storage->type); }

// The same of a base, where gradients come back through it.
capture::View* reshaped_in_place(const std::vector<at::Tensor>& results, const capture::StorageState* s) {
  for (const at::Tensor& t : results) {
    const FakeImpl* f = as_fake(t);
    if (!f || f->view->storage.get() != s || !t.requires_grad() || !t.is_view()) continue;
    at::Tensor whose;
    whose = t._base();
    const FakeImpl* base = as_fake(whose);
    if (base && base->view->storage.get() == s && is_static(*base->view) && is_reshaped_in_place(*base->view)) return base->view.get();
  }
  return nullptr;
}

// That nodes behind `results` have saved.
std::unordered_set<const capture::StorageState*> memory_saved(const std::vector<at::Tensor>& results, const TracerOptions& options) {
  torch::autograd::edge_list from;
  for (const at::Tensor& t : results) {
    if (!t.defined() || !t.requires_grad()) continue;
    try {
      from.push_back(torch::autograd::impl::gradient_edge(t));
    } catch (const c10::Error&) {  // eager raises it when gradients come (chain_views)
    }
  }
  std::unordered_set<const capture::StorageState*> r;
  for (const at::Tensor& t : capture::saved_behind(from, options.saved_tensors))
    if (const FakeImpl* f = t.defined() ? as_fake(t) : nullptr) r.insert(f->view->storage.get());
  return r;
}

// A call makes all that it gives in one inference mode.
void note_inference(Program& p, const std::vector<at::Tensor>& outputs) {
  const bool mode = c10::InferenceMode::is_enabled();
  size_t made = 0, as_mode = 0;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (p.results[i].kind != ResultSpec::Kind::Value && p.results[i].kind != ResultSpec::Kind::ViewOfOutput) continue;
    ++made;
    as_mode += outputs[i].is_inference() == mode;
  }
  if (made && !as_mode) p.inference = !mode;
  if (made && as_mode && as_mode != made) fail("returns, or sets as a .grad, both inference tensors and others");
}

}  // namespace

// By what its base counts as the program leaves it.
bool Tracer::Impl::is_outdated(const at::Tensor& view) const {
  const auto* meta = view_meta(view.unsafeGetTensorImpl());
  if (!meta) return false;
  int64_t now = version_of(view);
  for (const Source& s : sources)
    if (s.fake.defined() && s.real.defined() && s.input >= static_cast<int32_t>(num_args) && share_versions(s.real, view))
      now = s.real_version + s.bumps - version_of(s.fake);
  return meta->get_attr_version() != now;
}

// Graph outputs for what the program returns and for what it wrote.
void Tracer::Impl::emit_outputs(const std::vector<at::Tensor>& outputs, Program& p, std::vector<at::Tensor>* root_tensors) {
  std::vector<at::Tensor> fakes;
  for (const at::Tensor& t : outputs) fakes.push_back(t.defined() ? fake_of(t) : t);
  std::unordered_map<const StorageState*, uint32_t> root_result;
  std::unordered_map<const c10::TensorImpl*, uint32_t> by_impl;
  for (uint32_t i = 0; i < fakes.size(); ++i)
    if (FakeImpl* f = as_fake(fakes[i]); f && !f->view->parent) root_result.try_emplace(f->view->storage.get(), i);
  for (uint32_t i = 0; i < fakes.size(); ++i)  // where none of them is the tensor that was made
    if (FakeImpl* f = as_fake(fakes[i]); f && !fakes[i].requires_grad() && !fakes[i].is_view() && is_reshaped_in_place(*f->view))
      root_result.try_emplace(f->view->storage.get(), i);
  const auto is_inputs_own = [&](const at::Tensor& t) {
    const FakeImpl* f = as_fake(t);
    return !f || (f->view->storage->input >= 0 && f == as_fake(inputs[f->view->storage->input]->fake));
  };
  const auto is_own = [&](uint32_t i) {  // reshaped in place, and no view
    return as_fake(fakes[i])->view->in_place && !fakes[i].is_view() && !is_inputs_own(fakes[i]);
  };
  std::unordered_map<const View*, uint32_t> own_versions;
  for (uint32_t i = 0; i < fakes.size(); ++i)
    if (FakeImpl* f = as_fake(fakes[i]); f && f->view->own_versions) own_versions.try_emplace(f->view.get(), i);

  // Views of a result's .data count their writes with it: made of it, in that many steps, they do.
  auto shares_versions = [&](uint32_t i) -> std::pair<std::optional<uint32_t>, size_t> {
    size_t steps = 0;
    for (const View* q = as_fake(fakes[i])->view.get(); q->parent; q = q->parent.get(), ++steps) {
      if (const auto it = own_versions.find(q); it != own_versions.end() && steps) return {it->second, steps};
      if (q->own_versions) break;
    }
    return {};
  };
  auto& roots = output_roots;
  auto note_root = [&](uint32_t output, const at::Tensor& t) {
    if (!root_tensors || !t.requires_grad()) return;
    if (t.is_leaf()) fail("returns a leaf that needs gradients, which it makes");
    if (root_tensors->size() <= output) root_tensors->resize(output + 1);
    (*root_tensors)[output] = t;
  };
  // Written memory that users have afterwards: derivatives read what lies there by then, so its value is neither part of another nor known by parts.
  auto memory_of = [&](View& v) {
    StorageState& s = *v.storage;
    Value is = read(v);
    if (!root_tensors || !s.generation) return own_storage(is, &s, roots);
    const Value whole = root_of(is);
    if (whole != is) roots.emplace(whole, nullptr);
    is = own_storage(is, &s, roots);
    for (SavedArguments& saved : saved_arguments)  // a checkpoint that was given this memory was given what users have
      if (std::ranges::find(saved.memory, &s, &std::shared_ptr<const StorageState>::get) != saved.memory.end()) saved.values.push_back(root_of(is));
    if (v.parent) {
      v.cached = is;
      v.generation = s.generation;
    } else {
      s.base = is;
      ++s.generation;
    }
    return is;
  };
  auto whole_of = [](View& v) -> View& {
    View* whole = &v;
    while (whole->parent) whole = whole->parent.get();
    return *whole;
  };
  // To a view of that memory, from what the tensor that was reshaped in place is.
  const auto path_from = [&](const View& base, const View& v) {
    std::vector<ResultSpec::ViewOp> path = path_of(v);
    const View* from = &v;
    while (from && from != &base) from = from->parent.get();
    const StorageState& s = *v.storage;
    if (from)
      path.erase(path.begin(), path.begin() + static_cast<std::ptrdiff_t>(path_of(base).size()));
    else if (!is_static(base))
      fail("returns a view of what is reshaped in place after it");
    else  // older than its base's shape
      path.insert(path.begin(), {"aten::as_strided", {values_of(s.type.sizes), values_of(s.type.strides), int64_t{0}}, -1});
    return path;
  };
  // Results that share memory with each other and not with a returned root are views of one hidden output, as in eager.
  std::unordered_map<const StorageState*, std::unordered_set<const c10::TensorImpl*>> loose;
  std::unordered_map<const StorageState*, uint32_t> root_output;
  for (const at::Tensor& t : fakes)
    if (FakeImpl* f = as_fake(t)) loose[f->view->storage.get()].insert(t.unsafeGetTensorImpl());
  // What users write to a view of memory that eager has saved is read by the derivative, whichever view of it that is: then it is a view here too.
  const std::unordered_set<const StorageState*> saved = root_tensors ? memory_saved(fakes, options) : std::unordered_set<const StorageState*>();
  const auto is_of_saved = [&](const at::Tensor& t, const View& v) {
    const auto counts_apart = [](const View* q) {
      while (q && !q->own_versions) q = q->parent.get();
      return q != nullptr;
    };
    return saved.contains(v.storage.get()) && (t.is_view() || counts_apart(&v));
  };
  const auto creation_of = [](const at::Tensor& t) -> std::optional<CreationMeta> {
    const auto* view = torch::autograd::impl::get_view_autograd_meta(t);
    return view && view->has_bw_view() ? std::optional(view->get_creation_meta()) : std::nullopt;
  };
  // .data of an inference tensor, taken outside of that mode, is one that counts writes all the same.
  const auto counts_in_inference = [](FakeImpl& f) { return f.is_inference() && f.version_counter().enabled(); };
  std::unordered_map<const View*, uint64_t> detached;
  std::unordered_map<const View*, const View*> shapes;
  std::unordered_map<const StorageState*, View*> shown;  // what of a hidden output's memory is its tensor; null: all as it was made
  for (uint32_t i = 0; i < fakes.size(); ++i) {
    ResultSpec r;
    FakeImpl* f = as_fake(fakes[i]);
    if (!f) {
      r.kind = ResultSpec::Kind::Undefined;
      p.results.push_back(std::move(r));
      continue;
    }
    View& v = *f->view;
    StorageState* s = v.storage.get();
    auto [same, first] = by_impl.try_emplace(fakes[i].unsafeGetTensorImpl(), i);
    if (s->input < 0 && s->storage.nbytes() > capture::make_storage(to_torch_device(s->type.device), s->type, s->offset).nbytes())
      fail("returns a part of memory that was resized");
    if (const View* q = is_own(i) ? &v : nullptr) {
      while (q->in_place) q = q->parent.get();
      if (q->parent ? !is_apart(*q) && !f->is_inference() : !is_reshaped_in_place(v))
        fail("returns a tensor that it makes part of its memory in place");
    }
    const auto* meta = torch::autograd::impl::get_autograd_meta(fakes[i]);  // views say what their base does
    if (meta && meta->requires_grad_ && fakes[i].is_leaf() && !is_inputs_own(fakes[i])) fail("returns a leaf that needs gradients, which it makes");
    if (fakes[i].requires_grad() && fakes[i].is_view()) {
      at::Tensor base;
      base = fakes[i]._base();
      if (base.is_leaf() && !is_inputs_own(base)) fail("returns a view of a leaf, which it makes");
    }
    refuse_torn_apart(*s);
    const auto refuse_expanded = [](const TensorType& type) {  // outputs of a graph are dense
      if (std::any_of(type.sizes.begin(), type.sizes.end(), [](sym::Int n) { return n.is(0); })) return;
      for (size_t d = 0; d < type.dim(); ++d)
        if (type.strides[d].is(0) && !type.sizes[d].is(1)) fail("returns a tensor that overlaps itself");
    };
    auto emit_view_of_output = [&] {
      refuse_expanded(whole_of(v).type);
      auto [it, fresh] = root_output.try_emplace(s, static_cast<uint32_t>(graph->outputs.size()));
      if (fresh) {
        shown[s] = root_tensors ? reshaped_in_place(fakes, s) : nullptr;
        for (View* q = &v; q && !shown[s]; q = q->parent.get())
          if (q->apart && !q->storage->resized && is_reshaped_in_place(*q)) shown[s] = q;
        graph->outputs.push_back(memory_of(shown[s] ? *shown[s] : whole_of(v)));
      }
      const View* const base_view = shown[s];
      if (root_tensors && fakes[i].requires_grad()) {  // any of the views may be the one that gradients follow
        at::Tensor base;
        if (fakes[i].is_view()) base = fakes[i]._base();
        const View* own = as_fake(base) ? as_fake(base)->view.get() : nullptr;
        if (!own || own->storage.get() != s || (own->parent && own != base_view)) fail("returns views of memory that has no tensor of its own");
        note_root(it->second, base);
        capture::Chain chain = capture::views_between(torch::autograd::impl::gradient_edge(base), fakes[i]);
        if (!chain.empty()) views_of_output[it->second].push_back({i, std::move(chain)});
      }
      r.kind = ResultSpec::Kind::ViewOfOutput;
      r.index = it->second;
      r.path = base_view ? path_from(*base_view, v) : path_of(v);
    };
    const auto of_any_size = [](const View& v) {
      for (const View* p = &v; p->parent; p = p->parent.get())
        if (!std::ranges::all_of(p->step.args, [](const c10::IValue& a) { return capture::is_static(a); })) return false;
      return true;
    };
    // Eager's is a view of a tensor that nobody is given: so is what users get, where that is all of the memory and calls of any sizes have one path.
    const auto can_be_made = [&](const at::Tensor& t, View& v) {
      const auto creation = creation_of(t);
      const TensorType& whole = whole_of(v).type;
      if (!creation || (creation == CreationMeta::IN_CUSTOM_FUNCTION && t.requires_grad()) || went_back || !of_any_size(v) ||
          !ops::is_dense(graph->ctx(), whole))
        return false;
      if (!t.requires_grad()) return true;
      at::Tensor base;
      base = t._base();
      const FakeImpl* of = as_fake(base);
      if (!root_tensors || !of || of->view->storage != v.storage || base.is_leaf()) return false;
      if (of->view->parent && of->view.get() != reshaped_in_place(fakes, s)) return false;
      try {
        return t.is_leaf() || !capture::views_between(torch::autograd::impl::gradient_edge(base), t).empty();
      } catch (const c10::Error&) {  // eager raises it when gradients come (chain_views)
        return false;
      }
    };
    auto emit_value = [&] {
      if (f->is_neg() && v.type.dtype != DType::Opaque) fail("returns a negative tensor that is a view of nothing");
      if (!v.parent) refuse_expanded(v.type);
      r.kind = ResultSpec::Kind::Value;
      r.index = static_cast<uint32_t>(graph->outputs.size());
      if (v.parent && creation_of(fakes[i]))
        r.path.push_back({.op = "aten::alias", .args = {}, .creation = static_cast<int8_t>(*creation_of(fakes[i]))});
      graph->outputs.push_back(memory_of(v));
      note_root(r.index, fakes[i]);
    };
    if (const auto [of, steps] = shares_versions(i); first && of) {
      r.kind = ResultSpec::Kind::ViewOfValue;
      r.index = *of;
      r.path = path_of(v);
      r.path.erase(r.path.begin(), r.path.end() - static_cast<std::ptrdiff_t>(steps));
    } else if (!first && f != (s->input >= 0 ? as_fake(inputs[s->input]->fake) : nullptr)) {
      r.kind = ResultSpec::Kind::ViewOfValue;
      r.index = same->second;
    } else if (s->input >= 0) {
      r.index = s->input;
      FakeImpl* own = as_fake(inputs[s->input]->fake);
      if (f == own) {
        r.kind = ResultSpec::Kind::Input;
      } else {
        // Where no gradients follow, a view only has to look at the same memory.
        if (s->resized) fail("returns a view of an input whose size it changes");
        for (const View* q = &v; q; q = q->parent.get())
          if (q->in_place && fakes[i].requires_grad()) fail("returns a view of an input, changed in place");  // its history is another
        r.kind = ResultSpec::Kind::ViewOfInput;
        r.path = path_of(v);
      }
    } else if (auto it = root_result.find(s); it != root_result.end() && it->second != i) {
      r.kind = ResultSpec::Kind::ViewOfValue;
      r.index = it->second;
      const View& root = *as_fake(fakes[it->second])->view;
      r.path = root.parent ? path_from(root, v) : path_of(v);
    } else if (it == root_result.end() && v.parent &&
               (loose[s].size() > 1 || is_of_saved(fakes[i], v) || !ops::is_dense(graph->ctx(), v.type) || f->is_conj() || f->is_neg() ||
                counts_in_inference(*f) || creation_of(fakes[i]) == CreationMeta::MULTI_OUTPUT_NODE || can_be_made(fakes[i], v))) {
      emit_view_of_output();
    } else {
      emit_value();
    }
    if (r.kind != ResultSpec::Kind::Value && fakes[i].requires_grad() && s->generation)
      for (const View* q = &v; q; q = q->parent.get())
        if (q->apart) fail("returns what it has written in the memory of another, by unsafe_split or the like, and gradients come back through");
    const View* from = nullptr;  // what the path begins with
    if (r.kind == ResultSpec::Kind::ViewOfOutput) from = shown[s];
    if (r.kind == ResultSpec::Kind::ViewOfValue) from = as_fake(fakes[r.index])->view.get();
    if (r.kind == ResultSpec::Kind::ViewOfInput || r.kind == ResultSpec::Kind::ViewOfOutput || r.kind == ResultSpec::Kind::ViewOfValue)
      for (const View* q = v.parent.get(); q && q != from; q = q->parent.get())
        if (q->apart && !q->step.results) fail("returns a view of what shares memory with another, by _unsafe_view");
    r.outdated = r.kind != ResultSpec::Kind::Value && !fakes[i].requires_grad() && is_outdated(fakes[i]);
    note_modes(&v, r.path, detached, view_calls);
    make_apart_last(v, r.path, shapes);
    if (r.kind == ResultSpec::Kind::Value && !r.path.empty() && fakes[i].requires_grad()) r.path[0].mode = ViewMode::Grad;
    p.results.push_back(std::move(r));
  }
  // A view that calls make by themselves leads nowhere that hooks would be looked for.
  std::vector<torch::autograd::Edge> of_views, to;
  for (const Source* input : inputs) to.push_back(input->edge);
  for (uint32_t i = 0; i < fakes.size(); ++i)
    if (const auto kind = p.results[i].kind; kind == ResultSpec::Kind::ViewOfInput || kind == ResultSpec::Kind::ViewOfOutput)
      if (const auto* meta = torch::autograd::impl::get_autograd_meta(fakes[i])) of_views.emplace_back(meta->grad_fn_, meta->output_nr_);
  capture::refuse_hooks(of_views, to);
  chain_views(fakes, p.results);
  note_inference(p, fakes);
  for (uint32_t i = 0; i < fakes.size(); ++i)  // no mode says so
    if (auto& path = p.results[i].path; !path.empty() && creation_of(fakes[i]) == CreationMeta::IN_CUSTOM_FUNCTION && fakes[i].is_leaf())
      path.back().creation = static_cast<int8_t>(CreationMeta::IN_CUSTOM_FUNCTION);

  for (uint32_t i = 0; i < inputs.size(); ++i) {
    Source& src = *inputs[i];
    if (!src.fake.defined()) continue;  // a second mention of another input
    View& v = *as_fake(src.fake)->view;
    StorageState* s = v.storage.get();
    int32_t metadata = 0;
    Mutation change;
    for (const View* q = &v; q->parent; q = q->parent.get()) {
      VT_CHECK(q->in_place, "an input's own object became a view");
      change.path.push_back({q->in_place->name, q->step.args, -1});
      ++metadata;
    }
    if (metadata && src.real.requires_grad() && src.real.is_leaf())  // its gradient's size is that of the tensor when autograd first met it
      fail(fmt::format("gives '{}', a leaf that needs gradients, another size or order in place", src.name));
    std::reverse(change.path.begin(), change.path.end());
    if (s->generation) {
      Mutation w;
      w.input = i;
      w.output = static_cast<uint32_t>(graph->outputs.size());
      w.version_bumps = std::max<int32_t>(0, static_cast<int32_t>(src.bumps - src.shared) - metadata);
      if (s->resized) {
        if (metadata) fail("gives an input another size, beside what cannot follow it");
        w.path.push_back({"aten::resize_", {values_of(s->type.sizes)}, -1});
        if (s->type.strides != ir::contiguous_strides(s->type.sizes))
          w.path.push_back({"aten::as_strided_", {values_of(s->type.sizes), values_of(s->type.strides)}, -1});
      }
      graph->outputs.push_back(memory_of(whole_of(v)));
      if (const auto by = writes_counted.find(s); by != writes_counted.end()) {
        w.counted = static_cast<int32_t>(graph->outputs.size());
        graph->outputs.push_back(by->second);
        int32_t noted = 1;  // one for each, which the run counts
        for (const ir::Node* n = by->second.node; n->op->name == "aten::add.Tensor"; n = std::get<Value>(n->args[0]).node) ++noted;
        w.version_bumps = std::max(0, w.version_bumps - noted);
      }
      p.mutations.push_back(std::move(w));
    }
    const int32_t counted =
        s->generation ? metadata : std::max(metadata, static_cast<int32_t>(src.bumps - src.shared));  // t_() on a view of it counts too
    if (counted) {
      change.input = i;
      change.metadata_only = true;
      change.version_bumps = counted;
      p.mutations.push_back(std::move(change));
    }
  }
  if (std::ranges::any_of(graph->nodes(), [](const ir::Node* n) { return n->op->name == "vitrify::looks_between"; })) {
    if (std::ranges::any_of(p.mutations, [](const Mutation& m) { return !m.metadata_only; }))
      fail("aten::as_strided of an argument's memory with gaps, in a program that writes to arguments");
    if (!saved_arguments.empty())
      fail("aten::as_strided of an argument's memory with gaps, beside a checkpoint");  // whose function finds it elsewhere
  }
  // Nothing will run of what nobody reads: what its kernel refuses, eager raises.
  for (const ir::Node* n : ir::dead_nodes(*graph))
    if (const OpInfo* info = n->op->flags & ir::kView ? nullptr : ops.find(n->op->name); info && !kernel_takes(*graph, *info, n->args))
      fail(fmt::format("{} refuses what it is given", n->op->name));
}

void Tracer::Impl::take_inputs(Program& p) {
  const bool goes_by_name = went_back || !options.python_mode;
  for (const Source& s : sources)
    if (goes_by_name && is_argument(s) && s.real.requires_grad() &&
        std::ranges::any_of(sources, [&](const Source& o) { return !is_argument(o) && o.input >= 0 && o.real.is_same(s.real); }))
      fail("may go back to an argument that it also reaches by itself");
  p.graph = graph;
  p.num_args = num_args;
  p.resumes = options.resumes;
  p.goes_back = went_back;
  p.goes_by_name = goes_by_name;
  p.freezes = freezes;
  p.gives_ordinary = gives_ordinary;
  for (uint32_t i = num_args; i < inputs.size(); ++i) {
    const Source& s = *inputs[i];
    p.captured.push_back(s.grad_of ? at::Tensor() : s.real);
    if (s.grad_of) p.live.push_back({i, s.grad_of->input, 0});
    if (s.number) p.live.push_back({i, -1, *s.number});
  }
  p.facts = facts;
  if (numbers->computed_on_host()) p.numbers = std::make_shared<const Numbers>(*numbers);
}

}  // namespace vitrify
