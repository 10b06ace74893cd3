// Writes become values: a storage is a current value and a count of writes; a view replays its path when the count moved on; a write into a view
// scatters back along its path into the value of the storage.
#include <ATen/TensorUtils.h>

#include "torch/convert.h"
#include "torch/overlap.h"
#include "torch/stack.h"
#include "torch/sym_node.h"
#include "torch/tracer_impl.h"
#include "torch/versions.h"

namespace vitrify {

using capture::fail;
using ir::Arg;
using ir::TensorType;
using ir::Value;

namespace {

std::vector<sym::Int> to_ints(const ir::Dims& d) { return {d.begin(), d.end()}; }

bool same_layout(const TensorType& a, const TensorType& b) {
  return a.dtype == b.dtype && a.opaque_scalar_type == b.opaque_scalar_type && a.device == b.device && a.sizes == b.sizes && a.strides == b.strides;
}

// Some permutation of a row-major tensor.
bool dense(const TensorType& t) {
  std::vector<std::pair<int64_t, int64_t>> dims;
  for (size_t d = 0; d < t.dim(); ++d)
    if (int64_t n = value_of(t.sizes[d]); n != 1) dims.emplace_back(value_of(t.strides[d]), n);
  std::sort(dims.begin(), dims.end());
  int64_t expected = 1;
  for (auto [stride, n] : dims) {
    if (stride != expected) return false;
    expected *= n;
  }
  return true;
}

int64_t wrap(int64_t d, size_t rank) { return d < 0 ? d + static_cast<int64_t>(std::max<size_t>(rank, 1)) : d; }

}  // namespace

namespace capture {

void fail(std::string what) { throw CaptureError(what); }

std::shared_ptr<View> detached_view(const std::shared_ptr<View>& of) {
  auto v = std::make_shared<View>();
  v->storage = of->storage;
  v->parent = of;
  v->type = of->type;
  v->offset = of->offset;
  return v;  // a step without an op is the identity
}

}  // namespace capture

std::shared_ptr<capture::StorageState> Tracer::Impl::new_storage(Value base, TensorType type, int64_t offset, c10::Device device) {
  auto s = std::make_shared<StorageState>();
  s->trace = trace;
  s->ctx = graph->shared_ctx();
  s->storage = capture::make_storage(device, type, offset);
  s->base = base;
  s->type = std::move(type);
  s->offset = offset;
  return s;
}

at::Tensor Tracer::Impl::new_tensor(Value value, bool conj, bool neg) {
  const TensorType& type = value.type();
  if (is_undefined(type)) return {};
  c10::Device device = to_torch_device(type.device);
  auto view = std::make_shared<View>();
  view->storage = new_storage(value, type, 0, device);
  view->type = type;
  auto keys = compat::dense_keys(device, scalar_type_of(type), c10::InferenceMode::is_enabled());
  if (conj) keys = keys.add(c10::DispatchKey::Conjugate);
  if (neg) keys = keys.add(c10::DispatchKey::Negative);
  at::Tensor t = capture::make_fake(std::move(view), keys);
  if (type.wrapped_number) t.unsafeGetTensorImpl()->set_wrapped_number(true);
  return t;
}

const capture::View* Tracer::Impl::before_backwards(const View& v) {
  const View* at = &v;
  while (at->parent && at->round) at = at->parent.get();
  return at;
}

// A view that a backward has made of it looks at the memory that it has by then; those that are older keep theirs.
Value Tracer::Impl::read_as_assigned(View& v, const View& result) {
  if (&v == &result) return assigned.at(&v);
  if (v.cached && v.generation == v.storage->generation) return v.cached;
  if (v.step.op && v.step.op->name == "aten::as_strided") fail("looks at memory of a view whose .data was assigned to");
  v.cached = apply(v, read_as_assigned(*v.parent, result));
  v.generation = v.storage->generation;
  return v.cached;
}

Value Tracer::Impl::read(View& v) {
  if (!assigned.empty())
    if (const View* early = before_backwards(v); assigned.contains(early)) return read_as_assigned(v, *early);
  return read_as_was(v);
}

Value Tracer::Impl::read_as_was(View& v) {
  StorageState& s = *v.storage;
  if (!v.parent) return s.base;
  if (!v.cached || v.generation != s.generation) {
    v.cached = v.step.op && v.step.op->name == "aten::as_strided" ? read_strided(v) : apply(v, read_as_was(*v.parent));
    v.generation = s.generation;
  }
  return v.cached;
}

Value Tracer::Impl::apply(View& v, Value parent) {
  if (!v.step.op) return parent;
  const OpInfo& op = *v.step.op;
  capture::ViewCallResults* all = v.step.results.get();
  if (all && all->made && all->generation == v.storage->generation) return all->made->out(v.step.result);
  std::vector<Arg> args{parent};
  for (size_t i = 0; i < v.step.args.size(); ++i) args.push_back(to_arg(*graph, v.step.args[i], op.args[i + 1], {}));
  Types outs;
  if (all)
    outs.assign(all->types.begin(), all->types.end());
  else
    outs.push_back(v.type);
  ir::Node* node = append(op, std::move(args), std::move(outs));
  if (all) all->made = node, all->generation = v.storage->generation;
  return node->out(v.step.result < 0 ? 0 : v.step.result);
}

// The parent's value with `value` in the place that `child` looks at.
Value Tracer::Impl::scatter(View& child, Value parent, Value value, std::string_view by) {
  if (!child.step.op) return value;
  const std::string& name = child.step.op->name;
  const auto& a = child.step.args;
  const TensorType& type = parent.type();
  size_t rank = type.dim();
  auto arg = [&](size_t i) { return to_arg(*graph, a[i], child.step.op->args[i + 1], {}); };
  auto op = [&](std::string_view n, std::vector<Arg> args, TensorType t) { return append(n, std::move(args), {std::move(t)})->out(); };
  auto permuted = [&](const std::vector<int64_t>& perm) {  // a type like value's with dims permuted
    TensorType t = value.type();
    for (size_t i = 0; i < perm.size(); ++i) {
      t.sizes[i] = value.type().sizes[perm[i]];
      t.strides[i] = value.type().strides[perm[i]];
    }
    return t;
  };
  if (name == "aten::alias") return value;
  if (name == "aten::view_as_real") {
    TensorType whole = value.type(), t = type;
    whole.strides = ir::contiguous_strides(whole.sizes);
    t.strides = ir::contiguous_strides(t.sizes);
    if (!(whole == value.type())) value = op("aten::clone", {value, ir::MemoryFormat::Contiguous}, whole);
    return op("aten::view_as_complex", {value}, t);
  }
  if (name == "aten::_conj" || name == "aten::_neg_view") {
    TensorType t = value.type();
    if (!dense(t)) t.strides = ir::contiguous_strides(t.sizes);
    return op(name == "aten::_conj" ? "aten::_conj_physical" : "aten::neg", {value}, t);
  }
  if (name == "aten::select.int") return op("aten::select_scatter", {parent, value, arg(0), arg(1)}, type);
  if (name == "aten::slice.Tensor") {
    if (child.type.sizes == type.sizes) return value;
    return op("aten::slice_scatter", {parent, value, arg(0), arg(1), arg(2), arg(3)}, type);
  }
  if (name == "aten::diagonal") return op("aten::diagonal_scatter", {parent, value, arg(0), arg(1), arg(2)}, type);
  if (name == "aten::t" || name == "aten::transpose.int") {
    std::vector<int64_t> perm(rank);
    for (size_t i = 0; i < rank; ++i) perm[i] = i;
    if (name == "aten::t") {
      if (rank < 2) return value;
      std::swap(perm[0], perm[1]);
      return op(name, {value}, permuted(perm));
    }
    if (!rank) return value;
    std::swap(perm[wrap(a[0].toInt(), rank)], perm[wrap(a[1].toInt(), rank)]);
    return op(name, {value, arg(0), arg(1)}, permuted(perm));
  }
  if (name == "aten::permute") {
    std::vector<int64_t> inverse(rank);
    auto dims = a[0].toIntVector();
    for (size_t i = 0; i < rank; ++i) inverse[wrap(dims[i], rank)] = i;
    return op(name, {value, std::vector<sym::Int>(inverse.begin(), inverse.end())}, permuted(inverse));
  }
  if (name == "aten::split.Tensor" || name == "aten::split_with_sizes" || name == "aten::chunk") {
    int64_t dim = wrap(a[1].toInt(), rank);
    sym::Int start = 0;
    for (int32_t i = 0; i < child.step.result; ++i) start += child.step.results->types[i].sizes[dim];
    return op("aten::slice_scatter", {parent, value, sym::Int(dim), start, start + child.type.sizes[dim], sym::Int(1)}, type);
  }
  if (name == "aten::unbind.int") return op("aten::select_scatter", {parent, value, arg(0), sym::Int(child.step.result)}, type);
  bool reshapes = name == "aten::view" || name == "aten::_reshape_alias" || name == "aten::unsqueeze" || name.starts_with("aten::squeeze") ||
                  name == "aten::expand";
  if (reshapes && child.type.numel() == type.numel()) {
    TensorType t = value.type();
    t.sizes = type.sizes;
    std::optional<std::vector<sym::Int>> strides;
    if (value.type().is_contiguous()) {
      auto c = ir::contiguous_strides(type.sizes);
      strides.emplace(c.begin(), c.end());
    } else {
      auto number = [&](const ir::Dims& d) {
        std::vector<int64_t> r;
        for (sym::Int i : d) r.push_back(graph->ctx().specialize(i));
        return r;
      };
      if (auto c = at::detail::computeStride(number(value.type().sizes), number(value.type().strides), number(type.sizes)))
        strides.emplace(c->begin(), c->end());
    }
    if (!strides) {
      TensorType dense = value.type();
      dense.strides = ir::contiguous_strides(dense.sizes);
      value = op("aten::clone", {value, ir::MemoryFormat::Contiguous}, dense);
      t.strides = ir::contiguous_strides(t.sizes);
    } else {
      t.strides.assign(strides->begin(), strides->end());
    }
    return op("aten::view", {value, to_ints(type.sizes)}, t);
  }
  fail(fmt::format("{} writes through {}", by, name));
}

// `value` with exactly the layout of `type`; `old` gives a value of that layout (its elements do not matter).
Value Tracer::Impl::conform(Value value, const TensorType& type, const std::function<Value()>& old) {
  if (same_layout(value.type(), type)) return value;
  if (!same_sizes(value.type().sizes, type.sizes)) fail("a write changes the shape of a tensor");
  if (value.type().device == type.device && value.type().strides == type.strides) {
    Value r = cast(value, type);
    if (same_layout(r.type(), type)) return r;
  }
  TensorType t = type;
  t.wrapped_number = false;
  return append("aten::copy", {old(), value, false}, {t})->out();
}

bool Tracer::Impl::same_sizes(const ir::Dims& a, const ir::Dims& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i)
    if (!graph->ctx().guard_eq(a[i], b[i])) return false;
  return true;
}

// `value` in the dtype of `type`, whatever its strides; itself when ATen would not keep them.
Value Tracer::Impl::cast(Value value, const TensorType& type) {
  const TensorType& from = value.type();
  if (from.dtype == type.dtype || from.dtype == DType::Opaque || type.dtype == DType::Opaque || !(from.device == type.device) || !dense(from))
    return value;
  TensorType t = from;
  t.dtype = type.dtype;
  t.wrapped_number = false;
  return append("aten::_to_copy", {value, type.dtype, ir::None{}, ir::None{}, ir::None{}, false, ir::None{}}, {t})->out();
}

void Tracer::Impl::write(View& v, Value value, std::string_view op) {
  StorageState& s = *v.storage;
  if (in_backward && s.input < 0) {  // the caller has it, or the next backward of the call would find it as it was
    const View* root = &v;
    while (root->parent) root = root->parent.get();
    if (root->round != round || tangent_memory.contains(v.storage) || std::ranges::find(given_now, v.storage) != given_now.end())
      fail(fmt::format("{} writes in a backward to what was there before", op));
  }
  Value current = value;
  for (View* p = &v; p->parent;) {
    View* into = p->parent.get();
    if (p->step.op && p->step.op->name == "aten::as_strided") {
      const auto memory = memory_of(*p);
      if (!memory) fail(fmt::format("{} writes through aten::as_strided of memory with gaps", op));
      current = write_strided(*p, *memory, current);
      into = memory->of;
    } else {
      current = scatter(*p, p->step.op ? read(*into) : Value{}, current, op);
    }
    p = into;
  }
  current = conform(current, s.type, [&] { return s.base; });
  s.base = current;
  if (s.input >= 0 && !in_backward) last_write = turn_now;
  ++s.generation;
  s.known.reset();
  if (v.parent && same_layout(value.type(), v.type)) {
    v.cached = value;
    v.generation = s.generation;
  }
}

bool placeholders_may_share(const at::Tensor& a, const at::Tensor& b) {
  capture::FakeImpl *f = capture::as_fake(a), *g = capture::as_fake(b);
  if (!f || !g || f->view->storage != g->view->storage) return false;
  if (f == g) return true;
  for (const capture::FakeImpl* t : {f, g}) t->specialize(), t->specialize_offset();
  return f->dtype().itemsize() != g->dtype().itemsize() ||
         may_share(f->storage_offset(), f->sizes(), f->strides(), g->storage_offset(), g->sizes(), g->strides());
}

bool writes_one_memory_twice(const std::vector<at::Tensor>& written, const std::vector<at::Tensor>& read) {
  std::unordered_map<const void*, std::vector<const at::Tensor*>> by_memory;
  const auto meets = [&](const at::Tensor& t, bool writes) {
    const capture::FakeImpl* f = capture::as_fake(t);
    if (!f && !t.has_storage()) return false;
    auto& others = by_memory[f ? static_cast<const void*>(f->view->storage.get()) : t.storage().unsafeGetStorageImpl()];
    if (std::ranges::any_of(others, [&](const at::Tensor* o) { return o->is_same(t) || (f ? placeholders_may_share(*o, t) : may_share(*o, t)); }))
      return true;
    if (writes) others.push_back(&t);
    return false;
  };
  return std::ranges::any_of(written, [&](const at::Tensor& t) { return meets(t, true); }) ||
         std::ranges::any_of(read, [&](const at::Tensor& t) { return meets(t, false); });
}

void Tracer::Impl::refuse_torn_apart(const StorageState& s) {
  std::erase_if(torn_apart, [](const auto& both) { return both.first.expired() || both.second.expired(); });
  for (const auto& both : torn_apart)
    if (both.first.lock().get() == &s || both.second.lock().get() == &s)
      fail("writes to, or returns, memory of a tensor that it has also by _unsafe_view");
}

// Autograd makes the history of a view anew, without the hooks on it, when its count has changed since.
static bool is_made_anew(const at::Tensor& t) {
  const auto* view = torch::autograd::impl::get_view_autograd_meta(t);
  return view && view->has_bw_view() && counts_versions(t) && (view->grad_fn_ || view->get_backward_view().base_.requires_grad());
}

// The checks real kernels make on memory, which Meta kernels do not: where eager may refuse, or the outcome depends on the order of writes, eager
// decides.
void Tracer::Impl::check_write(const at::Tensor& written, c10::ArrayRef<c10::IValue> args, std::string_view op) {
  capture::FakeImpl* w = capture::as_fake(written);
  const StorageState& s = *w->view->storage;
  if (s.trace != trace) fail(fmt::format("{} writes to a placeholder of another capture", op));
  refuse_torn_apart(s);
  if (s.input >= 0 && c10::InferenceMode::is_enabled())
    for (const View* p = w->view.get(); p->parent; p = p->parent.get())
      if (p->apart && p->step.results) fail(fmt::format("{} writes to a part of an argument, by {}, in inference mode", op, p->apart->name));
  if (s.shared_with >= 0)
    fail(fmt::format("{} writes to input '{}', which shares memory with input '{}'", op, inputs[s.input]->name, inputs[s.shared_with]->name));
  // The history of a view is that of its base, which autograd would change as soon as this has returned.
  const auto found = [&](const capture::FakeImpl* f) {
    const int32_t input = f ? f->view->storage->input : -1;
    return input >= static_cast<int32_t>(num_args) ? inputs[static_cast<size_t>(input)] : nullptr;
  };
  if (const Source* of = found(w); of && of->real.retains_grad() && c10::GradMode::is_enabled())
    fail(fmt::format("writes to '{}', which retains its gradient", of->name));
  if (const Source* of = found(w); of && of->real.is_view() && c10::GradMode::is_enabled()) {
    bool follows = false;
    for_each_tensor(args, [&](const at::Tensor& t) {
      const Source* by = found(capture::as_fake(t));
      follows = follows || (by ? by->real.requires_grad() : t.requires_grad());
    });
    if (follows) fail(fmt::format("writes to '{}', a view, in a way that gradients must follow", of->name));
  }
  if (const Source* of = found(w); of && counts_versions(of->real))
    for (const Source& s : sources)
      if (!is_argument(s) && s.real.defined() && is_made_anew(s.real) && counter_of(s.real) == counter_of(of->real))
        fail(fmt::format("writes without gradients to the memory of '{}', a view that has a history", s.name));
  // Views of dense memory reach each element once, but for these.
  bool overlays = !dense(s.type);
  for (const View* p = w->view.get(); p->parent; p = p->parent.get())
    overlays = overlays ||
               (p->step.op && (p->step.op->name == "aten::as_strided" || p->step.op->name == "aten::unfold" || p->step.op->name == "aten::expand"));
  if (overlays) {
    w->specialize();                                                                        // what overlaps at these sizes may not at others
    bool repeats = may_overlap_itself(values_of(s.type.sizes), values_of(s.type.strides));  // the final value of the whole is written back
    for (const View* p = w->view.get(); p->parent && !repeats; p = p->parent.get()) {       // by way of what each step shows
      for (const ir::Dims& dims : {p->type.sizes, p->type.strides})
        for (const sym::Int& i : dims) s.ctx->specialize(i);
      repeats = may_overlap_itself(values_of(p->type.sizes), values_of(p->type.strides));
    }
    if (repeats) fail(fmt::format("{} writes to a tensor that overlaps itself", op));
  }
  auto check = [&](const at::Tensor& t) {
    capture::FakeImpl* f = capture::as_fake(t);
    if (!f || f == w || f->view->storage != w->view->storage) return;
    for (const capture::FakeImpl* t : {f, w}) t->specialize(), t->specialize_offset();
    const bool same = f->storage_offset() == w->storage_offset() && f->sizes() == w->sizes() && f->strides() == w->strides() &&
                      f->is_conj() == w->is_conj() && f->is_neg() == w->is_neg();
    if (!same && (f->dtype().itemsize() != w->dtype().itemsize() ||
                  may_share(f->storage_offset(), f->sizes(), f->strides(), w->storage_offset(), w->sizes(), w->strides())))
      fail(fmt::format("{} reads memory it writes", op));
  };
  for (const c10::IValue& v : args) {
    if (v.isTensor())
      check(v.toTensor());
    else if (v.isTensorList())
      for (const at::Tensor& t : v.toTensorVector()) check(t);
  }
}

std::vector<ResultSpec::ViewOp> Tracer::Impl::path_of(const View& v) const {
  std::vector<ResultSpec::ViewOp> path;
  for (const View* p = &v; p->parent; p = p->parent.get()) {
    if (p->step.op) {
      path.push_back({(p->apart ? p->apart : p->step.op)->name, {}, p->step.result, p->step.results ? p->step.results->call : 0});
      for (const c10::IValue& a : p->step.args) path.back().args.push_back(capture::static_value(a, true));
    } else
      path.push_back({.op = "aten::detach", .args = {}, .own_versions = p->own_versions});
  }
  std::reverse(path.begin(), path.end());
  return path;
}

}  // namespace vitrify
