// Gradients of a compiled call, and the derivatives that are taken when gradients come as none did before.
#include <ATen/LegacyBatchedTensorImpl.h>
#include <ATen/MemoryOverlap.h>
#include <torch/csrc/autograd/engine.h>

#include <ranges>
#include <unordered_map>

#include "ops/lowering.h"
#include "support/budget.h"
#include "support/eager.h"
#include "torch/absent.h"
#include "torch/derivatives.h"
#include "torch/graph_task.h"
#include "torch/mode.h"
#include "torch/sym_node.h"
#include "torch/tangents.h"
#include "torch/tape.h"
#include "torch/training_impl.h"
#include "torch/view_path.h"

namespace vitrify {

namespace {

constexpr int64_t kMaxSingles = 64;  // backwards for the tangents of one batch: ATen's own ops take larger ones whole

// What the graph makes of them: views in sizes of the call are made of it by then.
std::vector<ResultSpec> made_by_graph(std::vector<ResultSpec> results) {
  for (ResultSpec& r : results)
    if (is_of_tangent(r))
      r = {.kind = ResultSpec::Kind::Undefined};
    else if (has_sizes(r.path))
      r = {.kind = ResultSpec::Kind::Value, .index = r.index};
  return results;
}

// The others are tangents or their views, as eager's are: what is done to the one is done to the other.
class Finish {
 public:
  Finish(const BackwardProgram& b, const Layouts& how, const variable_list& tangents, const JointProgram& j, const CallSizes& sizes, const Node* node)
      : results_(b.results), gradients_(b.gradients), node_(node) {
    for (size_t g = 0; g < b.results.size(); ++g) {
      const ResultSpec& r = b.results[g];
      const bool sized = has_sizes(r.path);
      if (!r.path.empty()) parts_.push_back(g);
      if (!is_of_tangent(r)) {
        if (sized) views_.emplace_back(g, resolve(path_in(r.path, sizes)));
        continue;
      }
      const ir::TensorType& type = j.tangent(r.index).type();
      const at::Tensor whole = how[r.index].batch ? at::maybeGetBatchedImpl(tangents[r.index])->value() : tangents[r.index];
      const bool shown = how[r.index].conj || how[r.index].neg;
      const at::Tensor t = shown || any_bits(r.path) ? whole : whole.resolve_conj().resolve_neg();
      const bool as_is = any_strides(r.path) || !how[r.index].strides.empty() || is_recorded(turned(t, t), type);
      made_.emplace_back(g,
                         follow(resolve(sized ? path_in(r.path, sizes) : r.path), as_is ? t : turned(laid_out(turned(t, t), type, how[r.index]), t)));
    }
  }
  void take(variable_list& grads) {
    for (auto& [g, t] : made_) grads[g] = std::move(t);
    for (auto& [g, path] : views_) grads[g] = follow(path, std::move(grads[g]));
    std::unordered_map<uint32_t, size_t> views;  // those of one order are one
    for (size_t g = 0; g < grads.size(); ++g)
      if (const uint32_t order = results_[g].order)
        if (const auto [first, fresh] = views.try_emplace(order, g); !fresh) grads[g] = grads[first->second];
    if (!c10::GradMode::is_enabled()) give_apart(grads);
  }

 private:
  // A leaf takes a gradient that nobody else has for its .grad, and adds the next to it in place: no other may have that memory. Eager's node of a
  // view still has the whole gradient when a leaf beside that comes to it, so that the leaf copies it. What is not dense each leaf copies.
  void give_apart(variable_list& grads) const {
    // Of tangents, whose memory others have, the leaf copies what is held for as long as the backward takes.
    for (size_t g = 0; g < grads.size(); ++g)
      if (const at::Tensor& t = grads[g]; results_[g].held && is_of_tangent(results_[g]) && t.defined() && is_leaf(g))
        torch::autograd::Engine::get_default_engine().queue_callback([t] {});
    for (const size_t part : parts_)
      for (size_t g = 0; g < grads.size(); ++g) {
        if (g == part || !of_one(g, part) || !grads[g].defined() || !grads[part].defined()) continue;
        if (!grads[g].has_storage() || !grads[part].has_storage() || grads[g].is_same(grads[part]) || !grads[g].is_alias_of(grads[part])) continue;
        const auto views = [&](size_t i) { return results_[i].path.size(); };
        const bool alike = views(g) == views(part), first = views(g) < views(part) || (alike && g < part);
        const size_t one = is_leaf(g) && (first || !is_leaf(part)) ? g : part;
        at::Tensor& t = grads[one];
        if (!is_leaf(one) || !t.is_non_overlapping_and_dense() || at::get_overlap_status(grads[g], grads[part]) == at::MemOverlapStatus::No) continue;
        t = alike ? copied(t) : t.clone();
      }
  }
  // In its own strides, as eager's leaf would have taken it.
  static at::Tensor copied(const at::Tensor& t) { return at::empty_strided(t.sizes(), t.strides(), t.options()).copy_(t); }
  bool of_one(size_t g, size_t h) const {
    const ResultSpec &r = results_[g], &s = results_[h];
    return r.index == s.index && r.kind != ResultSpec::Kind::Undefined && is_of_tangent(r) == is_of_tangent(s);
  }
  bool is_leaf(size_t g) const { return node_ && adds_to_grad(node_->next_edge(gradients_[g])); }

  const std::vector<ResultSpec>& results_;
  const std::vector<uint32_t>& gradients_;
  const Node* node_;  // null: no leaf is given them
  std::vector<std::pair<size_t, at::Tensor>> made_;
  std::vector<size_t> parts_;                       // views, of tangents or of what the graph makes
  std::vector<std::pair<size_t, ViewPath>> views_;  // of what the graph makes
};

// Whether a gradient is a view of tangent `k`, or a copy: in other strides that one is a view.
bool may_be_viewed(const BackwardProgram& b, const Layouts& how, size_t k) {
  const auto before =
      static_cast<size_t>(std::count_if(how.begin(), how.begin() + static_cast<std::ptrdiff_t>(k), [](const auto& l) { return l.defined; }));
  const Value tangent = b.graph->inputs[b.saved.size() + before].value;
  return std::ranges::any_of(b.results, [&](const ResultSpec& r) {
    if (is_of_tangent(r)) return r.index == k && !any_strides(r.path);
    if (r.kind == ResultSpec::Kind::Undefined) return false;
    Value v = b.graph->outputs[r.index];
    while (v != tangent && ((v.node->op->flags & ir::kView) || v.node->op->name == "aten::clone" || v.node->op->name == "aten::_unsafe_view")) {
      const Value* of = std::get_if<Value>(&v.node->args[0]);
      if (!of) return false;
      v = *of;
    }
    return v == tangent;
  });
}

bool same_results(const std::vector<ResultSpec>& a, const std::vector<ResultSpec>& b) {
  const auto same_step = [](const ResultSpec::ViewOp& v, const ResultSpec::ViewOp& w) {
    return v.op == w.op && v.result == w.result && std::ranges::equal(v.args, w.args, [](const c10::IValue& a, const c10::IValue& b) {
             const bool fixed = capture::is_static(a) && capture::is_static(b);
             return fixed ? a == b : sizes_in(a) == sizes_in(b) && a.isSymInt() == b.isSymInt();
           });
  };
  return std::ranges::equal(a, b, [&](const ResultSpec& r, const ResultSpec& s) {
    return r.kind == s.kind && r.index == s.index && r.order == s.order && r.held == s.held && (!is_of_tangent(r) || any_strides(r.path)) &&
           std::ranges::equal(r.path, s.path, same_step);
  });
}

bool has_bits_in_batch(const at::Tensor& t) { return t.defined() && !is_plain(t) && has_bits(t); }

// Its elements as those of another dtype, from where they begin. Both are of one memory: writes to the one count as writes to the other.
at::Tensor in_dtype(const at::Tensor& t, at::ScalarType dtype) {
  if (t.scalar_type() == dtype) return t;
  const auto elements = static_cast<int64_t>(std::max<size_t>(1, c10::elementSize(dtype) / t.element_size()));
  return t.as_strided({elements}, {1}).view(dtype);
}

void note_op_by_op(const std::string& why) {
  ++counters().fallbacks;
  note_eager("gradients are computed op by op: " + why);
}

bool draws(const ir::Graph& g) {
  return std::ranges::any_of(g.nodes(), [](const ir::Node* n) { return n->op->flags & (ir::kRandom | ir::kEffect); });
}

}  // namespace

variable_list Training::backward(const Unpack& unpack, variable_list tangents, const RegionNode& node) const {
  if (!is_of_grad())
    for (size_t k = 0; k < joint_.roots.size(); ++k)
      if (tangents[k].defined() && !joint_.roots[k].refuses.empty()) throw std::runtime_error(joint_.roots[k].refuses);
  if (any_transform()) {
    const Call::Repeats repeats(node.call());
    const Unpack kept = [&](const BackwardProgram& b, bool) { return unpack(b, false); };
    if (auto made = under_transforms(as_transformed([&](variable_list one) { return backward(kept, std::move(one), node); }), tangents)) return *made;
    return op_by_op(unpack, tangents, node, "a transform of torch.func has no rule for what they do");
  }
  if (is_stale() || !node.call().needs_now().empty() || !node.call().assigned(joint_.level > 0).empty())
    return op_by_op(unpack, tangents, node, "what they read is changed between the forward and them");
  const bool batched = !all_plain(tangents);
  if (batched && !is_batch(tangents)) return op_by_op(unpack, tangents, node, "they come by tangents that are no plain tensors");
  if (batched && (no_whole_batches_ || std::ranges::any_of(tangents, has_bits_in_batch))) return one_by_one(unpack, tangents, node);
  if (!batched && compat::any_mode_on_stack() && !Tracer::current()) return op_by_op(unpack, tangents, node, "a mode sees what eager calls");
  std::optional<capture::InBatch> no_batch;
  if (batched) no_batch.emplace(false);  // what runs is a plan of whole batches
  Layouts how = batched ? batches_of(tangents, node) : layouts_of(tangents, node);
  const CallSizes sizes = sizes_of(node.call(), tangents);
  if (!batched) take_viewed(how, tangents, sizes);
  std::shared_ptr<const Backward> b;
  variable_list grads;
  for (int refused = 0;;) {
    try {
      b = backward_for(how, sizes);
      if (!b) {
        constexpr const char* kWhy = "they come in too many sizes or layouts";
        warn_once("gradients", kWhy);
        return op_by_op(unpack, tangents, node, kWhy);
      }
    } catch (const CaptureError& e) {
      if (!batched) throw;
      no_batch.reset();
      return one_by_one(unpack, tangents, node, e.what());
    } catch (const c10::Error&) {  // ATen's rules for batches, of which some take no sizes that change
      if (!batched || static_) throw;
      no_whole_batches_ = true;
      no_batch.reset();
      return one_by_one(unpack, tangents, node);
    }
    const bool seen = strides_show(node, node.edges_shown()), last = b->proven || (b->certain && !seen);  // last: it will not be run again
    Finish finish(b->program, b->tangents, tangents, joint_, sizes, &node);                               // sizes are let go of with what is kept
    auto [saved, fit] = unpack(b->program, last);
    for (size_t k = 0; k < tangents.size(); ++k)
      if (tangents[k].defined()) saved.push_back(laid_out(tangents[k], type_of_tangent(k), b->tangents[k]));
    if (fit == Fit::BySizes && take_by_sizes(saved, *b->program.graph, b->program.saved.size())) fit = Fit::Yes;
    if (fit != Fit::Yes) {
      note_op_by_op("what they read has another size or dtype than in the forward");
      ResultMaker(made_by_graph(b->program.results)).make(interpret(*b->program.graph, saved), addresses_of(saved), grads);
      finish.take(grads);
      break;
    }
    try {
      if (last) {
        tangents.clear();
        b->plan->run_consuming(saved, grads, !seen);
      } else {
        b->plan->run(saved, grads);
      }
      finish.take(grads);
      if (last || !b->plan->learned() || draws(*b->program.graph) || !seen || refused++ == kMaxRenewals) break;
      forget(b);
    } catch (const capture::PlanRefused&) {  // a kernel gave something else than was recorded: what it gives is known now
      if (last || refused++ == kMaxRenewals) throw;
      forget(b);
    }
  }
  b->proven = true;
  if (b->plan->learned()) forget(b, true);  // a layout was not as recorded: the next derivative knows better
  variable_list all(num_edges());
  for (size_t k = 0; k < grads.size(); ++k) {
    if (batched && grads[k].defined() && b->program.batch_dims[k] >= 0) grads[k] = at::addBatchDim(std::move(grads[k]), 1, b->program.batch_dims[k]);
    all[b->program.gradients[k]] = std::move(grads[k]);
  }
  return all;
}

namespace {

at::Tensor as_meta(const at::Tensor& t) {
  if (!t.defined()) return t;
  if (const auto* batch = at::maybeGetBatchedImpl(t)) return at::addBatchDim(as_meta(batch->value()), 1, batch->bdims()[0].dim());
  at::Tensor r = at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta).requires_grad(false));
  return t.is_conj() || t.is_neg() ? turned(r, t) : r;
}

// Memory as that of `like`, which was computed of `given` where there are no elements: what looks at the same memory there does here, and what looks
// at that of one of `tangents` is of that.
variable_list laid_out_as(const variable_list& like, const variable_list& given, const variable_list& tangents,
                          const std::vector<variable_list>& each) {
  const auto value_of = [](const at::Tensor& t) {
    const auto* batch = at::maybeGetBatchedImpl(t);
    return batch ? batch->value() : t;
  };
  std::unordered_map<const c10::StorageImpl*, at::Tensor> memory, made;  // made: all elements of it are there
  std::unordered_map<const c10::TensorImpl*, at::Tensor> same;
  for (size_t k = 0; k < given.size(); ++k)
    if (given[k].defined()) {
      made.emplace(value_of(given[k]).storage().unsafeGetStorageImpl(), value_of(tangents[k]));
      same.emplace(value_of(given[k]).unsafeGetTensorImpl(), value_of(tangents[k]));
    }
  variable_list r(like.size());
  for (size_t g = 0; g < like.size(); ++g) {
    if (!like[g].defined()) continue;
    const at::Tensor is = value_of(like[g]);
    const auto* batch = at::maybeGetBatchedImpl(like[g]);
    const c10::StorageImpl* storage = is.storage().unsafeGetStorageImpl();
    if (const auto known = same.find(is.unsafeGetTensorImpl()); known != same.end()) {
      r[g] = known->second;
    } else if (const auto of = made.find(storage); of != made.end()) {
      const at::Tensor all = in_dtype(turned(of->second, of->second), is.scalar_type());
      r[g] = turned(all.as_strided(is.sizes(), is.strides(), all.storage_offset() + is.storage_offset()), is);
    } else {
      const auto bytes = static_cast<int64_t>(storage->nbytes());
      at::Tensor& all = memory[storage];
      if (!all.defined()) all = at::empty({bytes}, at::TensorOptions(at::kByte));
      r[g] = at::empty({0}, is.options().device(at::kCPU)).set_(all.storage(), is.storage_offset(), is.sizes(), is.strides());
      r[g] = turned(std::move(r[g]), is);
      for (size_t i = 0; i < each.size(); ++i) {
        at::Tensor to = batch ? r[g].select(batch->bdims()[0].dim(), static_cast<int64_t>(i)) : r[g], from = each[i][g];
        for (int64_t d = 0; d < to.dim(); ++d)
          if (to.stride(d) == 0 && to.size(d) > 1) to = to.narrow(d, 0, 1), from = from.narrow(d, 0, 1);
        to.copy_(from);
      }
    }
    same.emplace(is.unsafeGetTensorImpl(), r[g]);
    if (batch) r[g] = at::addBatchDim(std::move(r[g]), 1, batch->bdims()[0].dim());
  }
  return r;
}

struct Silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

}  // namespace

variable_list Training::one_by_one(const Unpack& unpack, const variable_list& tangents, const RegionNode& node, const std::string& why) const {
  const Call::Repeats repeats(node.call());
  const int64_t n = size_of_batch(tangents);
  std::vector<variable_list> each;
  std::shared_ptr<const Backward> b;
  {
    capture::InBatch no_batch(false);
    Layouts how = layouts_of(one_of_batch(tangents, 0), node);
    b = backward_for(how, sizes_of(node.call(), one_of_batch(tangents, 0)));
    if (n <= kMaxSingles && b && !draws(*b->program.graph)) {
      const Unpack kept = [&](const BackwardProgram& b, bool) { return unpack(b, false); };
      for (int64_t i = 0; i < n; ++i) each.push_back(backward(kept, one_of_batch(tangents, i), node));
    }
  }
  if (!each.empty()) {
    variable_list given, inputs = unpack(b->program, false).first;
    for (const at::Tensor& t : tangents) given.push_back(as_meta(t));
    for (at::Tensor& t : inputs) t = as_meta(t);
    try {
      Silent silent;
      const c10::WarningUtils::WarningHandlerGuard unheard(&silent);
      const variable_list like = interpreted(*b, nullptr, std::move(inputs), given, sizes_of(node.call(), tangents));
      return laid_out_as(like, given, tangents, each);
    } catch (const std::exception&) {  // some kernel has no form without elements
      rethrow_interrupt();
    }
    if (!has_dims_of_one(each[0]) && !strides_show(node, node.edges_shown())) return as_batch(each);
  }
  if (!why.empty()) warn_once("batched gradients", why);
  return op_by_op(unpack, tangents, node, why.empty() ? "a batch of them has no plan" : why);
}

TransformedOp Training::as_transformed(std::function<variable_list(variable_list)> run) const {
  const std::vector<Tape::Step>& steps = tape().steps;
  return {std::move(run), std::ranges::none_of(steps, &Tape::Step::draws), std::ranges::none_of(steps, &Tape::Step::own)};
}

variable_list Training::interpreted(const Backward& b, const RegionNode* to, std::vector<at::Tensor> inputs, const variable_list& tangents,
                                    const CallSizes& sizes, const RegionCall::Assigned& assigned) const {
  Finish finish(b.program, b.tangents, tangents, joint_, sizes, to);
  // Also where it was found that the strides do not matter: a copy that is as its original would be strided as that.
  for (size_t k = 0; k < tangents.size(); ++k)
    if (const at::Tensor& t = tangents[k]; t.defined())
      inputs.push_back(has_bits_in_batch(t) ? batch_without_bits(t)  // formulas look at parts of complex numbers
                       : is_plain(t) && !t._is_zerotensor() && (b.tangents[k].is_own() || lies_otherwise(t, type_of_tangent(k)))
                           ? laid_out(t, type_of_tangent(k), b.tangents[k])
                           : t);
  for (const auto& [_, other] : assigned) inputs.push_back(other.tensor);
  variable_list grads;
  ResultMaker(made_by_graph(b.program.results)).make(interpret(*b.program.graph, inputs), addresses_of(inputs), grads);
  finish.take(grads);
  variable_list all(num_edges());
  for (size_t k = 0; k < grads.size(); ++k) all[b.program.gradients[k]] = std::move(grads[k]);
  return all;
}

void Training::note_unasked(Layouts& how, const RegionNode& node) const {
  std::vector<uint32_t> unasked;
  for (uint32_t g = 0; g < joint_.gradients.size(); ++g)
    if (!is_asked(node.next_edge(g))) unasked.push_back(g);
  for (TangentLayout& l : how)
    if (l.defined || l.without) l.unasked = unasked;
}

// Eager's backward(inputs=) and grad() do not run what leads to nothing they ask for: it matters where that draws.
Layouts Training::layouts_as_asked(const variable_list& tangents, const RegionNode& node) const {
  Layouts how = node.layouts(tangents);
  if (!is_of_grad() || std::ranges::none_of(tape().steps, &Tape::Step::draws)) return how;
  std::vector<char> runs = which_defined(tangents);
  for (size_t k = 0; k < how.size(); ++k) runs[k] = runs[k] || how[k].without;
  const Path asked = path_of(runs, node), all = tape().path([&](size_t k) { return runs[k] != 0; }, nullptr, node.stops());
  bool more = false;
  for (size_t i = 0; i < tape().steps.size(); ++i) more = more || (tape().steps[i].draws && on(all, i) && !on(asked, i));
  if (more) note_unasked(how, node);
  return how;
}

variable_list Training::op_by_op(const Unpack& unpack, const variable_list& tangents, const RegionNode& node, const std::string& why) const {
  note_op_by_op(why);
  Layouts how = own_backward_ && all_plain(tangents) ? layouts_of(tangents, node) : layouts_as_asked(tangents, node);
  const CallSizes sizes = sizes_of(node.call(), tangents);
  const RegionCall::Assigned assigned = node.call().assigned(joint_.level > 0);
  const std::shared_ptr<const Backward> b = [&] {
    std::lock_guard lock(mutex_);
    const bool stale = is_stale();
    const Tracer::Needs needs = node.call().needs_now();
    const std::vector<uint32_t> numbers = RegionCall::numbers_of(assigned);
    const bool usual = needs.empty() && numbers.empty();
    if (!stale && usual)
      if (const auto known = backward_known(how, sizes)) return known;
    if (!stale && !usual)
      for (const auto& known : of_others_[{how, numbers, needs}])
        if (holds(known->known, sizes)) return known;
    const bool may_be_once = stale || !needs.empty();
    bool once = false;
    if (may_be_once) note_stale();
    const auto made = derivative(how, sizes, needs, numbers, may_be_once ? &once : nullptr);
    if (!stale && !once && !usual) {
      auto& all = of_others_[{how, numbers, needs}];
      if (all.size() >= kMaxVariants) all.erase(all.begin());
      all.push_back(made);
    }
    return made;
  }();
  return interpreted(*b, &node, unpack(b->program, false).first, tangents, sizes, assigned);
}

Layouts Training::batches_of(const variable_list& tangents, const RegionNode& node) const {
  Layouts how = layouts_as_asked(tangents, node);
  for (size_t k = 0; k < tangents.size(); ++k)
    if (how[k].defined && !take_batch(tangents[k], how[k])) take_strides(tangents[k], type_of_tangent(k), how[k], own_backward_);
  return how;
}

std::vector<Value> Training::asked_of(const BackwardProgram& b, const Node& node) const {
  std::vector<Value> asked;
  for (size_t g = 0; g < b.gradients.size(); ++g)
    if (!is_of_tangent(b.results[g]) && is_asked(node.next_edge(b.gradients[g]))) asked.push_back(b.graph->outputs[b.results[g].index]);
  return asked;
}

void Training::check_changed(const BackwardProgram& b, const std::vector<Kept>& saved, const Node& node, const Path& path,
                             const std::function<void()>& before) const {
  for (size_t k = 0; k < saved.size(); ++k) {
    if (!saved[k].changed()) continue;
    const auto given =
        std::ranges::find(joint_.given, b.saved[k] < saved_.size() ? saved_[b.saved[k]].value : joint_.given[b.saved[k] - saved_.size()]);
    if (given != joint_.given.end() && tape().finds(path, false, static_cast<uint32_t>(given - joint_.given.begin()))) continue;
    if (const Saved* s = b.saved[k] < saved_.size() ? &saved_[b.saved[k]] : nullptr;
        s && s->kind == Saved::Kind::Result && tape().finds(path, true, s->index))
      continue;
    if (!nodes_behind(*b.graph, asked_of(b, node)).contains(b.graph->inputs[k].value.node)) continue;
    before();
    refuse(saved[k], b.graph->inputs[k].value.type());
  }
}

Layouts Training::layouts_of(const variable_list& tangents, const RegionNode& node) const {
  Layouts how = layouts_as_asked(tangents, node);
  bool other = false;
  for (size_t k = 0; k < tangents.size(); ++k)
    other = other || (how[k].defined &&
                      ((k < joint_.roots.size() && joint_.roots[k].views.size() > 1) || !is_recorded(tangents[k], type_of_tangent(k), true)));
  if (!other || !(own_backward_ || strides_show(node, node.edges_shown()) || strides_of_ones_show(node))) return how;
  for (size_t k = 0; k < tangents.size(); ++k)
    if (how[k].defined) take_strides(tangents[k], type_of_tangent(k), how[k], own_backward_);
  node.call().find_views(how);
  for (size_t k = 0; k < joint_.roots.size(); ++k)
    if (how[k].view + 1 == static_cast<int32_t>(joint_.roots[k].views.size())) how[k].view = -1;
  return how;
}

void Training::take_viewed(Layouts& how, const variable_list& tangents, const CallSizes& sizes) const {
  std::vector<size_t> other;
  for (size_t k = 0; k < tangents.size(); ++k)
    if (const at::Tensor& t = tangents[k]; t.defined() && how[k].strides.empty() && lies_otherwise(turned(t, t), type_of_tangent(k)))
      other.push_back(k);
  if (other.empty()) return;
  std::lock_guard lock(mutex_);
  const auto recorded = backward_known(as_recorded(how), sizes);
  if (!recorded) return;
  Layouts taken = how;
  for (size_t k : other)
    if (may_be_viewed(recorded->program, how, k)) {
      take_strides(tangents[k], type_of_tangent(k), taken[k], false);
      if (taken[k].strides.empty()) take_numbers(tangents[k], taken[k]);
    }
  if (taken == how) return;
  try {
    const auto b = backward_known(taken, sizes);
    const auto views_it = [&](const ResultSpec& r) { return is_of_tangent(r) && taken[r.index] != how[r.index] && !any_strides(r.path); };
    if (b && std::ranges::any_of(b->program.results, views_it)) how = std::move(taken);
  } catch (const CaptureError&) {  // then it is a view of a copy
  }
}

std::shared_ptr<Training::Backward> Training::planned(const Layouts& how, const CallSizes& sizes) const {
  const std::shared_ptr<Backward> b = backward_known(how, sizes);
  if (!b || b->plan) return b;
  const Taking taking(*this, b->known, sizes);
  const ir::Graph& g = *b->program.graph;
  b->certain = std::all_of(g.nodes().begin(), g.nodes().end(), [](const ir::Node* n) {
    if (n->op->name.starts_with("graph::") || !ops::is_extern(n->op->name)) return true;
    const ops::OpRow* row = ops::find_op(n->op->name);
    return row && row->shape;
  });
  std::vector<Value> inputs;
  for (const ir::Input& in : g.inputs) inputs.push_back(in.value);
  std::vector<ir::Node*> unordered;
  for (ir::Node* n : g.nodes())
    if (n->op->flags & (ir::kRandom | ir::kEffect)) unordered.push_back(n);
  Program p;
  p.graph = extract(g, g.outputs, inputs, unordered);
  p.num_args = static_cast<uint32_t>(inputs.size());
  p.results = made_by_graph(b->program.results);
  p.trained = p.lenient = true;
  b->plan = CompiledGraph::compile(std::move(p), options_);
  if (built_) b->known = taking.known(sizes, g, g.outputs, {});
  return b;
}

std::shared_ptr<Training::Backward> Training::backward_known(const Layouts& how, const CallSizes& sizes) const {
  auto& all = backwards_[how];
  for (const auto& b : all)
    if (holds(b->known, sizes)) return b;
  if (all.empty() && is_other(how) && layouts_++ >= kMaxLayouts) {
    if (std::ranges::any_of(how, [](const TangentLayout& l) { return l.batch != 0; })) throw CaptureError("batches come in too many layouts");
    return own_backward_ ? nullptr : backward_known(as_recorded(how), sizes);
  }
  if (all.size() >= kMaxVariants) return nullptr;
  auto b = made_of_all(how, sizes);
  if (!b) b = derivative(how, sizes);
  if (is_other(how) && !own_backward_)  // many gradients do not follow their tangents
    if (const auto plain = backwards_.find(as_recorded(how)); plain != backwards_.end())
      for (const auto& p : plain->second)
        if (p->program.types == b->program.types && p->program.batch_dims == b->program.batch_dims &&
            same_results(p->program.results, b->program.results) && holds(p->known, sizes))
          b = p;
  return all.emplace_back(std::move(b));
}

std::shared_ptr<Training::Backward> Training::derivative(const Layouts& how, const CallSizes& sizes, const Tracer::Needs& needs,
                                                         const std::vector<uint32_t>& assigned, bool* once) const {
  StageTimer timer("derivative");
  const WithoutTransforms none;
  const Taking taking(*this, assumed_, sizes);
  std::vector<Value> tangents, values;
  const uint32_t first = joint_.program.graph->next_id();
  std::vector<Gradient> gradients = trace()->differentiate(joint_, how, tangents, values, needs, assigned, once != nullptr);
  // What functions have found by now, and did not in the forward, is a constant.
  if (once) *once = std::ranges::any_of(joint_.program.graph->nodes(), [&](const ir::Node* n) { return n->id >= first && ir::is_constant(*n); });
  BackwardProgram b = backward_from(joint_, saved_, tangents, std::move(gradients), values, first);
  Assumed known = taking.known(sizes, *b.graph, b.graph->outputs, {});
  return std::make_shared<Backward>(std::move(b), how, std::move(known));
}

std::shared_ptr<Training::Backward> Training::made_of_all(const Layouts& how, const CallSizes& sizes) const {
  const auto known = backwards_.find(all_results());
  if (known == backwards_.end() || learned_) return nullptr;
  const auto all = std::ranges::find_if(known->second, [&](const auto& b) { return holds(b->known, sizes); });
  if (all == known->second.end()) return nullptr;
  std::vector<size_t> absent;
  for (size_t k = 0; k < how.size(); ++k) {
    if (!how[k].defined && k < joint_.roots.size()) absent.push_back(k);
    if (how[k] != TangentLayout{.defined = how[k].defined} || (how[k].defined && k >= joint_.roots.size())) return nullptr;
  }
  auto b = backward_without(joint_, (*all)->program, absent);
  return b ? std::make_shared<Backward>(std::move(*b), how, (*all)->known) : nullptr;
}

}  // namespace vitrify
