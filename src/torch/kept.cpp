#include "torch/kept.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "ir/node_map.h"
#include "runtime/layout.h"
#include "torch/bits.h"
#include "torch/convert.h"
#include "torch/slice.h"
#include "torch/sym_node.h"
#include "torch/versions.h"

namespace vitrify {

using ir::Value;

namespace {

bool is_symbolic(const ir::TensorType& t) {
  return std::ranges::any_of(t.sizes, [](sym::Int i) { return !i.is_const(); });
}

// The first `given` of `tensors` in the strides that their types say, in which symbols are first what the others say. False: they have other sizes.
bool take_by_sizes(std::vector<at::Tensor>& tensors, const std::vector<Value>& values, size_t given) {
  runtime::SymbolValues known;
  const auto type = [&](size_t i) -> const ir::TensorType& { return values[i].type(); };
  auto note = [&](sym::Int e, int64_t is) {
    if (const uint32_t id = sym::is_symbol(e) ? sym::view(e).symbol->id : 0; sym::is_symbol(e) && !known.known(id)) known.set(id, is);
  };
  const auto is_strided = [&](size_t i) { return tensors[i].defined() && tensors[i].layout() == at::kStrided; };
  std::vector<size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::rotate(order, order.begin() + static_cast<std::ptrdiff_t>(given));
  for (const bool strides : {false, true})  // those of dims of one element say nothing
    for (size_t i : order)
      for (size_t d = 0; is_strided(i) && d < type(i).dim() && d < static_cast<size_t>(tensors[i].dim()); ++d)
        if (!strides)
          note(type(i).sizes[d], tensors[i].sizes()[d]);
        else if (tensors[i].sizes()[d] != 1)
          note(type(i).strides[d], tensors[i].strides()[d]);
  std::vector<int64_t> sizes, strides;
  for (size_t i = 0; i < given; ++i) {
    if (!is_strided(i) || type(i).dtype == DType::Opaque) continue;
    if (tensors[i].numel() > 0 && tensors[i].storage().nbytes() == 0 && !tensors[i]._is_zerotensor()) continue;  // sizes alone
    if (!is_alike(tensors[i], type(i), false)) return false;
    const ir::Dims &size = type(i).sizes, &stride = type(i).strides;
    if (!known.eval({size.begin(), size.end()}, sizes) || !known.eval({stride.begin(), stride.end()}, strides)) return false;
    if (tensors[i].sizes() != at::IntArrayRef(sizes)) return false;
    bool same = is_alike(tensors[i], type(i), true);
    for (size_t d = 0; d < sizes.size(); ++d) same = same && (sizes[d] == 1 || tensors[i].strides()[d] == strides[d]);
    if (!same) tensors[i] = laid_in(tensors[i], sizes, strides);
  }
  return true;
}

}  // namespace

at::Tensor laid_in(const at::Tensor& t, at::IntArrayRef sizes, at::IntArrayRef strides) {
  const at::Tensor r = at::empty_strided(sizes, strides, t.options().requires_grad(false));
  at::Tensor to = r, from = t.detach();
  for (int64_t d = 0; d < to.dim(); ++d)  // what is expanded has its elements once
    if (to.stride(d) == 0 && to.size(d) > 1) to = to.narrow(d, 0, 1), from = from.narrow(d, 0, 1);
  to.copy_(from);
  return r;
}

Kept::Kept(const at::Tensor& t, Hold how) : itself(how != Hold::Memory) {
  if (!t.defined()) return;
  const bool leaf = itself && t.is_leaf() && t.requires_grad();
  tensor = leaf ? t : t.tensor_data();
  if (itself && !leaf) given_.emplace(t);
  if (how == Hold::Both) was_ = leaf ? t.tensor_data() : tensor;
  version = version_of(t);
}

at::Tensor Kept::tensor_now() const { return given_ ? given_->now() : tensor; }

std::optional<bool> Kept::needs_now() const {
  const at::Tensor now = itself && readable() ? tensor_now() : at::Tensor();
  if (!now.defined() || !now.is_leaf() || now.requires_grad() != given_.has_value()) return {};
  return now.requires_grad();
}

void Kept::take_now() {
  if (!given_ || !readable()) return;
  const at::Tensor now = given_->now();
  if (!now.defined() || (now.is_alias_of(tensor) && now.storage_offset() == tensor.storage_offset() && now.sizes() == tensor.sizes() &&
                         now.strides() == tensor.strides() && now.dtype() == tensor.dtype()))
    return;
  tensor = now.tensor_data();
}

Kept Kept::for_level(Hold how) const {
  Kept k = *this;
  if (how != Hold::Tensor && itself && readable()) k.was_ = tensor.tensor_data();
  if (how != Hold::Memory || !itself) return k;
  if (readable()) k.tensor = std::exchange(k.was_, {});
  k.given_.reset();
  k.itself = false;
  k.loose = true;
  return k;
}

void Kept::check_memory() const {
  TORCH_CHECK(
      !was_.defined() || !readable() || (tensor.is_alias_of(was_) && tensor.storage_offset() == was_.storage_offset()),
      "vitrify: the .data of a tensor was assigned to between forward and backward, and a gradient of a gradient reads the tensor and a view of "
      "what it was");
}

Kept Kept::sizes_of(const at::Tensor& t) {
  Kept r;
  r.tensor = at::empty({0}, t.options().requires_grad(false));
  r.tensor.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides());
  r.hollow = true;
  return r;
}

bool Kept::changed() const { return readable() && version_of(tensor) != version; }

std::vector<const at::Tensor*> addresses_of(const std::vector<at::Tensor>& tensors) {
  std::vector<const at::Tensor*> r;
  for (const at::Tensor& t : tensors) r.push_back(&t);
  return r;
}

bool is_alike(const at::Tensor& t, const ir::TensorType& type, bool strides) {
  bool same = t.layout() == at::kStrided && t.dim() == static_cast<int64_t>(type.dim()) &&
              (type.dtype == DType::Opaque || t.scalar_type() == scalar_type_of(type)) &&
              (!strides || !(t.is_conj() || t.is_neg() || t._is_zerotensor()));
  for (size_t d = 0; same && d < type.dim(); ++d) {
    const auto i = static_cast<int64_t>(d);
    same = (!type.sizes[d].is_const() || t.size(i) == type.sizes[d].value()) &&
           (!strides || !type.strides[d].is_const() || t.size(i) == 1 || t.stride(i) == type.strides[d].value());
  }
  return same;
}

Fit take_as_it_is_now(std::vector<Kept>& saved, const ir::Graph& graph) {
  Fit fit = Fit::Yes;
  for (size_t k = 0; k < saved.size(); ++k) {
    if (!(saved[k].itself || saved[k].loose) || !saved[k].readable()) continue;
    at::Tensor& t = saved[k].tensor;
    const ir::TensorType& type = graph.inputs[k].value.type();
    if (const bool fixed = capture::is_static(type); is_alike(t, type, true) && fixed)
      continue;
    else if (!is_alike(t, type, false))
      return Fit::No;
    else if (fixed)
      t = laid_in(t, values_of(type.sizes), values_of(type.strides));
    else
      fit = Fit::BySizes;
  }
  return fit;
}

bool take_by_sizes(std::vector<at::Tensor>& tensors, const ir::Graph& graph, size_t given) {
  std::vector<Value> values;
  for (const ir::Input& in : graph.inputs) values.push_back(in.value);
  return take_by_sizes(tensors, values, given);
}

bool take_given(const Origin& origin, std::vector<at::Tensor>& given, const JointProgram& j, const std::vector<char>& needs) {
  bool sizes = false;
  for (size_t i = 0; i < given.size(); ++i) {
    if (!(origin.given[i].itself || origin.given[i].loose) || !given[i].defined()) continue;
    const ir::TensorType& type = j.given[i].type();
    if (needs[i] && !is_alike(given[i], type, false)) return false;
    if (!capture::is_static(type))
      sizes = true;
    else if (needs[i] && !is_alike(given[i], type, true))
      given[i] = laid_in(given[i], values_of(type.sizes), values_of(type.strides));
  }
  if (!sizes) return true;
  return take_by_sizes(given, j.given, origin.tangents);
}

Kept laid_as_recorded(const Saved& s, Kept k, const CallSizes& sizes) {
  const auto now = [&](const ir::Dims& d) { return sizes.values({d.data(), d.size()}); };
  const ir::TensorType& type = s.value.type();
  if (s.bits || s.strides != type.strides) {
    at::Tensor t = at::empty_strided(now(type.sizes), now(type.strides), k.tensor.options().dtype(scalar_type_of(type)));
    t.copy_(s.bits ? unpacked(k.tensor, t.sizes(), now(s.strides)) : k.tensor);
    k = Kept(t);
  }
  return k;
}

Kept any_numbers(const Kept& freed, const ir::TensorType& type) {
  const std::vector<int64_t> sizes = freed.hollow ? freed.tensor.sizes().vec() : values_of(type.sizes);
  const std::vector<int64_t> strides = freed.hollow ? freed.tensor.strides().vec() : values_of(type.strides);
  return Kept(at::empty_strided(sizes, strides, at::TensorOptions(scalar_type_of(type)).device(to_torch_device(type.device))).zero_());
}

void check_freed(std::vector<Kept>& saved, const ir::Graph& graph, const std::vector<Value>& asked) {
  const ir::NodeSet needed = nodes_behind(graph, asked);
  const auto uses = ir::count_uses(graph);
  for (size_t k = 0; k < saved.size(); ++k) {
    const Value v = graph.inputs[k].value;
    if (!saved[k].freed) continue;
    TORCH_CHECK(!needed.contains(v.node), torch::autograd::ERR_BACKWARD_TWICE);
    if (!saved[k].hollow || uses.at(v.node)[0]) saved[k] = any_numbers(saved[k], v.type());
  }
}

Kept Call::unpack(size_t saved, const compat::NodePtr& node) const {
  if (saved >= kept.size()) {
    Kept k = given[saved - kept.size()];
    if (k.freed) return k;
    k.take_now();
    TORCH_CHECK(k.readable(), "vitrify: a gradient of a program that writes to its arguments reads what they were");
    k.check_memory();
    return k;
  }
  if (kept[saved].freed) return kept[saved];
  if (!hooked.empty() && !kept[saved].tensor.defined()) {
    if (plan) check_plan(node);
    Kept k(from_hooks(saved, node));
    k.loose = true;  // hooks may give something else than they were given
    return k;
  }
  TORCH_CHECK(kept[saved].tensor.defined(), torch::autograd::ERR_BACKWARD_TWICE);
  Kept k = kept[saved];
  k.take_now();
  return k;
}

// What a checkpoint's function saved when it was called again is given back by number: by another plan it is something else.
void Call::check_plan(const compat::NodePtr& node) const {
  const int task = torch::autograd::get_current_graph_task_id();
  {
    std::lock_guard lock(mutex_);
    if (task >= 0 && std::exchange(plan_seen_, task) == task) return;
  }
  const at::Tensor t = hooked.back().unpack(node);
  TORCH_CHECK(t.defined() && t.scalar_type() == at::kLong && t.numel() == 1 && t.item<int64_t>() == plan,
              "vitrify: a checkpoint's function saves something else when it is called again: it is not called with the same (one tensor for two "
              "arguments, behind other hooks on saved tensors, comes back as two), or does not run compiled in both; call it with each tensor once");
}

at::Tensor Call::from_hooks(size_t saved, const compat::NodePtr& node) const {
  const int task = torch::autograd::get_current_graph_task_id();
  const bool once = tape_->places.size() < 2 && !repeats_ && !c10::GradMode::is_enabled();  // what is differentiated again may be looked at before
  if (once || task < 0) return hooked[saved].unpack(node);
  const std::shared_ptr<FromHooks> here = [&] {
    std::lock_guard lock(mutex_);
    if (!from_hooks_ || from_hooks_->task != task) {
      from_hooks_ = std::make_shared<FromHooks>();
      from_hooks_->task = task;
      torch::autograd::Engine::get_default_engine().queue_callback([gone = std::weak_ptr(from_hooks_)] {
        const auto done = gone.lock();
        if (!done) return;
        std::map<size_t, at::Tensor> saved;  // let go of without the lock: that may run Python code
        std::lock_guard lock(done->mutex);
        saved.swap(done->saved);
      });
    }
    return from_hooks_;
  }();
  {
    std::lock_guard lock(here->mutex);
    if (const auto at = here->saved.find(saved); at != here->saved.end()) return at->second;
  }
  at::Tensor t = hooked[saved].unpack(node);  // without the lock: the user's code runs
  std::lock_guard lock(here->mutex);
  return here->saved.emplace(saved, std::move(t)).first->second;
}

int Call::freed_by(size_t step) const {
  if (const int32_t b = tape_->steps[step].below; below_ && b >= 0) {
    std::lock_guard lock(below_->mutex_);
    return below_->freed_by(static_cast<size_t>(b));
  }
  return freed_.empty() ? kNone : freed_[step];
}

std::optional<size_t> Call::spent(const Path& path) const {
  std::lock_guard lock(mutex_);
  if (freed_.empty() && !below_) return {};
  const int now = torch::autograd::get_current_graph_task_id();  // in which eager comes to each of its nodes once
  return tape_->first(path, [&](const Tape::Step& s) {
    const int by = s.saves ? freed_by(static_cast<size_t>(&s - tape_->steps.data())) : kNone;
    return by != kNone && by != now;
  });
}

bool Call::come_once(const Path& path) {
  Call* all = this;
  while (all->below_) all = all->below_.get();
  const int now = torch::autograd::get_current_graph_task_id();
  std::lock_guard lock(all->mutex_);
  for (size_t i = 0; i < tape_->steps.size(); ++i) {
    const int32_t once = tape_->steps[i].once;
    if (once < 0 || !on(path, i)) continue;
    if (all->came_.size() <= static_cast<size_t>(once)) all->came_.resize(static_cast<size_t>(once) + 1, kNone);
    int& came = all->came_[static_cast<size_t>(once)];
    if (came != kNone && came != now) return false;
    came = now;
  }
  return true;
}

void Call::mark(size_t step, bool from_above) {
  if (from_above) {
    held_.resize(tape_->steps.size(), kNone);
    held_[step] = torch::autograd::get_current_graph_task_id();
  }
  if (const int32_t b = tape_->steps[step].below; below_ && b >= 0) {
    std::lock_guard lock(below_->mutex_);
    return below_->mark(static_cast<size_t>(b), true);
  }
  freed_.resize(tape_->steps.size(), kNone);
  freed_[step] = torch::autograd::get_current_graph_task_id();
}

void Call::free(const Path& path) {
  std::lock_guard lock(mutex_);
  for (size_t i = 0; i < tape_->steps.size(); ++i)
    if (on(path, i)) mark(i);
  let_go();
  if (!below_) return;
  torch::autograd::Engine::get_default_engine().queue_callback(
      [call = below_, task = torch::autograd::get_current_graph_task_id()] { call->end_backward(task); });
}

void Call::end_backward(int task) {
  {
    std::lock_guard lock(mutex_);
    std::ranges::replace(held_, task, kNone);
    let_go();
  }
  if (below_) below_->end_backward(task);
}

// Of what no root needs any more from which there is still a way to a node that was not freed.
void Call::let_go() {
  std::vector<char> leads(tape_->steps.size()), live, needed(kept.size());
  for (size_t i = leads.size(); i-- > 0;)
    leads[i] = tape_->steps[i].holds || (tape_->steps[i].saves && (freed_by(i) == kNone || (!held_.empty() && held_[i] != kNone))) ||
               std::ranges::any_of(tape_->steps[i].next, [&](uint32_t n) { return leads[n] != 0; });
  for (int32_t r : tape_->roots) live.push_back(r >= 0 && leads[static_cast<size_t>(r)]);
  const bool any = std::ranges::find(live, 1) != live.end();
  if (!any) all_freed();
  // On its way to a leaf that the program has made a gradient reads what the derivative through all does not.
  const auto ends_between = [&] {
    std::vector<char> ends = tape_->gives_gradients();
    for (size_t i = ends.size(); i-- > 0;) ends[i] = !ends[i] || std::ranges::any_of(tape_->steps[i].next, [&](uint32_t n) { return ends[n] != 0; });
    for (size_t k = 0; k < live.size(); ++k)
      if (live[k] && ends[static_cast<size_t>(tape_->roots[k])]) return true;
    return false;
  };
  if (any && ends_between()) {
    needed.assign(needed.size(), 1);
  } else if (any) {
    needed = derivative_->needed_through(live, kept.size());
  }
  for (size_t k = 0; k < kept.size(); ++k) {
    if (needed[k] || kept[k].hollow) continue;
    const bool has_sizes =
        kept[k].tensor.defined() && kept[k].tensor.layout() == at::kStrided && is_symbolic(derivative_->graph().inputs[k].value.type());
    kept[k] = has_sizes ? Kept::sizes_of(kept[k].tensor) : k < behind_hooks.size() ? behind_hooks[k] : Kept();
    kept[k].freed = true;
    if (!hooked.empty()) hooked[k].reset_data();
  }
  std::vector<char> behind(given.size());
  for (size_t k = 0; k < live.size(); ++k)
    if (live[k] && tape_->behind.empty())
      behind.assign(behind.size(), 1);
    else if (live[k])
      for (uint32_t i : tape_->behind[k]) behind[i] = 1;
  for (size_t i = 0; i < given.size(); ++i)
    if (!behind[i] && !given[i].hollow && given[i].tensor.defined()) {
      given[i] = sized && given[i].tensor.layout() == at::kStrided ? Kept::sizes_of(given[i].tensor) : Kept();
      given[i].freed = true;
    }
}

void Call::free_all() {
  std::lock_guard lock(mutex_);
  all_freed();
  kept.assign(kept.size(), {});
  given.assign(given.size(), {});
  for (auto& h : hooked) h.reset_data();
}

}  // namespace vitrify
