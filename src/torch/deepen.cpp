// The trace goes on after the program: derivatives for other tangents, and derivatives of derivatives.
#include <ATen/LegacyBatchedTensorImpl.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <list>
#include <unordered_map>
#include <unordered_set>

#include "support/budget.h"
#include "torch/derivatives.h"
#include "torch/old_versions.h"
#include "torch/overlap.h"
#include "torch/slice.h"
#include "torch/sym_node.h"
#include "torch/tangents.h"
#include "torch/tape.h"
#include "torch/tracer_impl.h"
#include "torch/versions.h"

namespace vitrify {

using capture::as_fake;
using capture::fail;
using capture::FakeImpl;
using ir::Value;
using torch::autograd::Edge;
using torch::autograd::Node;

namespace {

// As the caller has the tangent of which `t` is what lies in memory.
at::Tensor as_it_comes(at::Tensor t, const ir::TensorType& type, const TangentLayout& how, const std::shared_ptr<sym::Context>& ctx) {
  const at::AutoDispatchBelowADInplaceOrView no_view;  // it is no view to autograd
  std::vector<c10::SymInt> sizes;
  for (sym::Int n : type.sizes) sizes.push_back(capture::to_sym_int(ctx, n));
  if (how.batch) sizes.insert(sizes.begin() + how.batch_dim, how.batch);
  for (uint32_t d : how.expanded) t = t.narrow(d, 0, 1);
  if (!how.expanded.empty()) t = t.expand_symint(sizes);
  if (how.conj) t = t._conj();
  if (how.neg) t = t._neg_view();
  return how.batch ? at::addBatchDim(std::move(t), 1, how.batch_dim) : t;
}

// Of what cannot be differentiated again: nothing is behind it, so that only a whole backward comes there.
std::string refusal_behind(const Edge& from) {
  std::vector<const Node*> todo{from.function.get()};
  std::unordered_set<const Node*> seen(todo.begin(), todo.end());
  while (!todo.empty()) {
    const Node* n = todo.back();
    todo.pop_back();
    if (auto* error = dynamic_cast<const torch::autograd::Error*>(n)) return error->msg;
    for (const Edge& e : n->next_edges())
      if (e.function && seen.insert(e.function.get()).second) todo.push_back(e.function.get());
  }
  return {};
}

// The views that make it of `of`, or none where it is that itself, if they are all of its history and can be made again.
std::optional<std::vector<ResultSpec::ViewOp>> views_from(const at::Tensor& of, const at::Tensor& t, const std::unordered_set<uint32_t>& said) {
  const FakeImpl *view = as_fake(t), *from = as_fake(of);
  if (t.is_same(of)) return std::vector<ResultSpec::ViewOp>();
  if (view->view->storage != from->view->storage || view->view == from->view || t.requires_grad() != of.requires_grad()) return {};
  auto path = path_between(from->view.get(), *view->view, said);
  if (!path || !t.requires_grad()) return path;
  const compat::NodePtr end = torch::autograd::impl::gradient_edge(of).function;
  for (compat::NodePtr n = t.grad_fn(); n != end; n = n->next_edge(0).function)
    if (!n || capture::of_users(*n) || n->num_outputs() != 1) return {};
  return path;
}

// A Function of users returned a view of memory that it made itself: the history is that of the view, and what it is a view of has none.
bool has_own_history(const at::Tensor& t) { return t.requires_grad() && (!t.is_view() || !t._base().requires_grad()); }

// Without where the gradients leave that nobody asks for: what leads to those alone does not run.
template <class Level>
Level as_asked(Level level, const JointProgram& j, const std::vector<TangentLayout>& how) {
  const auto of = std::ranges::find_if(how, [](const TangentLayout& l) { return !l.unasked.empty(); });
  for (size_t i = level.to.size(); of != how.end() && i-- > 0;) {
    const auto unasked = [&](uint32_t g) { return j.given[j.gradients.at(g).given] == level.of[i]; };
    if (std::ranges::none_of(of->unasked, unasked)) continue;
    level.to.erase(level.to.begin() + static_cast<std::ptrdiff_t>(i));
    level.of.erase(level.of.begin() + static_cast<std::ptrdiff_t>(i));
  }
  return level;
}

// For a backward, placeholders need gradients where what they stand for does by then.
class NeedsNow {
 public:
  NeedsNow(const at::Tensor& placeholder, bool needs) : meta_(*torch::autograd::impl::materialize_autograd_meta(placeholder)) {
    node_ = meta_.grad_fn_;
    needed_ = std::exchange(meta_.requires_grad_, needs && !node_);
    if (!needs) meta_.grad_fn_ = {};
  }
  ~NeedsNow() {
    meta_.requires_grad_ = needed_;
    meta_.grad_fn_ = std::move(node_);
  }
  NeedsNow(const NeedsNow&) = delete;

 private:
  torch::autograd::AutogradMeta& meta_;
  compat::NodePtr node_;
  bool needed_;
};

// Around a backward there may be what was not around the call: modes of others, which would be asked about placeholders, and anomaly detection, which
// would look at their values. They are for tensors of the call.
class Alone {
 public:
  Alone() : modes_(compat::ModeStack::get_state()), anomalies_(AnomalyMode::is_enabled()), nans_(AnomalyMode::should_check_nan()) {
    if (compat::any_mode_on_stack()) compat::ModeStack::set_state({});
    if (anomalies_) AnomalyMode::set_enabled(false, nans_);
  }
  ~Alone() {
    compat::ModeStack::set_state(std::move(modes_));
    if (anomalies_) AnomalyMode::set_enabled(true, nans_);
  }
  Alone(const Alone&) = delete;

 private:
  using AnomalyMode = torch::autograd::AnomalyMode;
  compat::ModeStack modes_;
  bool anomalies_, nans_;
};

}  // namespace

void Tracer::Impl::again(const std::function<void()>& f) {
  auto run = [&] {
    const Alone alone;
    forget_late();
    failure.reset();
    OldHistories histories;
    for (const Source& s : sources)
      if (s.fake.defined() && s.real.defined() && s.input >= static_cast<int32_t>(num_args)) histories.keep(s.real);
    OldVersions versions;
    for (Source& s : sources)
      // As the program has left it: what it wrote, autograd saved with the versions of that.
      if (s.fake.defined() && s.real.defined() && counts_versions(s.real))
        versions.set(s.real, s.real_version + s.bumps - static_cast<int64_t>(s.fake._version()));
    resume();
    if (moved_on_from(state_key())) draw();  // only what takes the generator back draws what was drawn
    in_backward = true;
    last_forward_states = states();
    std::unordered_map<const StorageState*, uint64_t> writes;
    for (const auto& s : input_storages) writes[s.get()] = s->generation;
    try {
      take_accumulators();
      f();
      for (const auto& s : input_storages)  // nobody would write that
        if (const auto had = writes.find(s.get()); had != writes.end() && had->second != s->generation)
          fail(fmt::format("writes to input '{}' in a backward", inputs[static_cast<size_t>(s->input)]->name));
    } catch (...) {
      in_backward = in_batch = once = false;
      look = nullptr;
      assigned.clear();
      stop();
      let_accumulators_go();
      if (failure) throw CaptureError(*failure);  // Python code on its way has made another exception of it
      throw;
    }
    in_backward = in_batch = once = false;
    assigned.clear();
    stop();
    let_accumulators_go();
  };
  if (options.with_gil)
    options.with_gil(run);
  else
    run();
}

// Captured tensors are met as themselves.
void Tracer::Impl::placeholders_of(const JointProgram& j, const Needs& needs, const std::function<void(const at::Tensor&, bool)>& f) const {
  const Level& level = levels.at(j.level);
  for (const auto& [given, needed] : needs)
    if (given >= j.given.size())
      f(may_be_found.at(given - j.given.size()), needed);
    else if (const ir::Node& n = *j.given[given].node; is_input(n) && (level.given.contains(&n) || is_argument(*inputs[input_index(n)])))
      if (const at::Tensor& t = seen_by_autograd(n, level); t.defined()) f(t, needed);
}

// For a backward: results whose .data is another tensor. `made`: what stands for those of now.
void Tracer::Impl::assign(const JointProgram& j, const std::vector<uint32_t>& now, std::vector<std::pair<uint32_t, Value>>& made) {
  for (uint32_t i : now) made.emplace_back(i, Value());
  for (const auto& [view, i] : result_views) {
    for (const auto& [result, value] : j.assigned)
      if (result == i) assigned[view.get()] = value;
    for (auto& [result, value] : made)
      if (result == i) assigned[view.get()] = value = add_tangent(fmt::format("assigned{}", inputs.size()), view->type, ir::InputKind::Captured);
  }
}

std::vector<Gradient> Tracer::differentiate(const JointProgram& j, const std::vector<TangentLayout>& how, std::vector<Value>& tangents,
                                            std::vector<Value>& values, const Needs& needs, const std::vector<uint32_t>& assigned, bool once) {
  Impl& m = *impl_;
  std::vector<Gradient> r;
  m.again([&] {
    m.once = once;
    std::list<NeedsNow> now;
    m.placeholders_of(j, needs, [&](const at::Tensor& t, bool n) { now.emplace_back(t, n); });
    tangents = m.tangents_for(j, how);
    std::vector<at::Tensor> given;
    for (size_t k = 0; k < tangents.size(); ++k) {
      given.push_back(tangents[k] ? as_it_comes(m.new_tensor(tangents[k]), j.tangent(k).type(), how[k], m.graph->shared_ctx()) : at::Tensor());
    }
    std::vector<std::pair<uint32_t, Value>> other;
    m.assign(j, assigned, other);
    for (const auto& [_, value] : other) tangents.push_back(value);
    for (Impl::Grad& g : m.differentiate(as_asked(m.levels.at(j.level), j, how), given, values, how))
      r.push_back({g.place < 0 ? j.place_of(g.of) : 0, g.place, std::move(g.how), std::move(g.type), g.batch_dim});
    for (const auto& [_, fake] : m.met_late)
      if (as_fake(fake)->view->storage->generation) fail("a checkpoint's function writes to what it did not find in the forward");
    const auto turn = [&](const Gradient& g) {  // as the first derivative has them: plans of the same gradients are one
      return g.place < 0 ? std::ranges::find(j.gradients, g.given, &Gradient::given) - j.gradients.begin() : std::ssize(j.gradients) + g.place;
    };
    std::ranges::stable_sort(r, {}, turn);
  });
  return r;
}

bool Tracer::Impl::note_failing(Level& level, const std::exception_ptr& error) {
  const compat::NodePtr node = std::exchange(running, {});
  if (!node) return false;
  Raising r{node, {}};
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& e) {
    r.says = e.what_without_backtrace();
  } catch (const std::exception& e) {
    r.says = e.what();
  }
  r.edges = capture::edges_raising(*node, r.says);
  if (std::ranges::any_of(level.raising, [&](const Raising& o) { return o.node == node && o.edges == r.edges; })) return false;
  if (options.raised_anew) r.raise = options.raised_anew(error);
  if (!r.raise) r.raise = [error] { std::rethrow_exception(error); };
  level.raising.push_back(std::move(r));
  return true;
}

JointProgram Tracer::deepen(const JointProgram& below, const std::vector<TangentLayout>& how, const std::vector<Value>& kept,
                            const std::vector<Value>& snapshots, Look look, const Needs& needs, const std::vector<uint32_t>& assigned) {
  Impl& m = *impl_;
  JointProgram j;
  m.again([&] {
    std::list<NeedsNow> now;
    m.placeholders_of(below, needs, [&](const at::Tensor& t, bool n) { now.emplace_back(t, n); });
    const Tracer::Impl::Level base = m.levels.at(below.level);  // a copy: levels may move
    j.level = m.levels.size();
    j.below = below.tape;
    j.begins = below.begins;
    j.begins.push_back(below.backward);
    j.given = below.given;
    std::unordered_set<Value> known(j.given.begin(), j.given.end());
    auto add = [&](Value v) {
      const bool fresh = known.insert(v).second;
      if (fresh) j.given.push_back(v);
      return fresh;
    };
    for (Value v : kept) add(v);
    for (const Mutation& w : below.program.mutations)  // what it was before
      if (const Value v = below.given[w.input]; std::ranges::find(kept, v) == kept.end()) j.unkept.insert(v);
    std::ranges::copy_if(below.unkept, std::inserter(j.unkept, j.unkept.end()), [](Value v) { return is_input(*v.node); });
    for (ir::Node* n : m.graph->nodes())  // drawn once, by the program
      if ((n->op->flags & ir::kRandom) && n->id < below.backward)
        for (uint32_t i = 0; i < n->outs.size(); ++i)
          if (add(n->out(i)) || below.unkept.contains(n->out(i))) j.unkept.insert(n->out(i));
    m.assign(below, assigned, j.assigned);
    for (const auto& [_, value] : j.assigned) j.given.push_back(value);
    for (const auto& before : below.assigned)
      if (std::ranges::find(assigned, before.first) == assigned.end()) j.assigned.push_back(before);
    j.was = below.was;
    for (Value v : snapshots) {
      ir::TensorType type = v.type();
      type.wrapped_number = false;
      const Value was = m.add_tangent(fmt::format("was{}", m.inputs.size()), type, ir::InputKind::Captured);
      j.was.push_back({v, below.level, was});
      j.given.push_back(was);
    }
    const capture::InRound in_round(++m.round);
    const std::vector<Value> given = m.tangents_for(below, how);
    std::vector<at::Tensor> tangents(given.size());
    Tracer::Impl::Level& level = m.levels.emplace_back();
    level.to = base.to;
    level.of = base.of;
    level.given = base.given;
    for (size_t k = 0; k < tangents.size(); ++k) {
      if (!given[k]) continue;
      tangents[k] = as_it_comes(m.new_tensor(given[k]), below.tangent(k).type(), how[k], m.graph->shared_ctx());
      m.tangent_memory[as_fake(m.fake_of(tangents[k]))->view->storage] = static_cast<int32_t>(input_index(*given[k].node));
      level.given.insert_or_assign(given[k].node, tangents[k]);
      j.given.push_back(given[k]);
      if (!how[k].needs_grad) continue;
      tangents[k].set_requires_grad(true);
      level.to.push_back(torch::autograd::impl::gradient_edge(tangents[k]));
      level.of.push_back(given[k]);
    }
    for (const auto& [given, needed] : needs) {
      if (given >= below.given.size()) continue;  // a result, which has its gradients by way of its place
      const Value v = below.given[given];
      if (!needed || !is_input(*v.node) || std::ranges::find(level.of, v) != level.of.end()) continue;
      Edge edge = torch::autograd::impl::gradient_edge(m.seen_by_autograd(*v.node, base));
      if (!edge.function) continue;  // a view of a leaf, which gets none
      level.to.push_back(std::move(edge));
      level.of.push_back(v);
    }
    j.begin = m.graph->next_id();
    m.look = &look;
    for (size_t k = 0; k < given.size(); ++k)
      if (given[k] && look.tangents[k].defined()) m.known_now.emplace_back(given[k], look.tangents[k]);
    for (const auto& [result, now] : look.assigned)
      if (const auto at = std::ranges::find(j.assigned, result, [](const auto& a) { return a.first; }); at != j.assigned.end())
        m.known_now.emplace_back(at->second, now);
    const Tracer::Impl::Level asked = as_asked(base, below, how);
    const std::vector<at::Tensor> grads = m.run_backward(asked, tangents, true, how);
    m.look = nullptr;
    std::vector<at::Tensor> results;
    const auto gradient_of = [&](uint32_t input) {
      const auto at = std::ranges::find(asked.of, below.given[input]);
      return at == asked.of.end() ? at::Tensor() : grads[static_cast<size_t>(at - asked.of.begin())];
    };
    for (const Gradient& g : below.gradients) results.push_back(gradient_of(g.given));
    for (uint32_t i : below.past_raising) results.push_back(gradient_of(i));  // a user's formula may give one where some results have none
    while (results.size() > below.gradients.size() && !results.back().defined()) results.pop_back();
    if (!below.parts.empty()) {
      results.resize(below.gradients.size() + below.past_raising.size() + below.places());
      for (size_t k = 0, i = asked.to.size(); k < how.size(); ++k)
        if (how[k].stops) results[results.size() - below.places() + k] = grads[i++];
    }
    std::vector<std::pair<uint32_t, at::Tensor>> roots;
    std::unordered_map<const c10::TensorImpl*, uint32_t> made;
    auto owners = m.output_roots;
    std::vector<const ir::TensorType*> types;  // of what each call says the sizes of
    for (const Value& v : below.given) types.push_back(&v.type());
    for (size_t k = 0; k < how.size(); ++k)
      if (how[k].defined) types.push_back(&below.tangent(k).type());
    const std::unordered_set<uint32_t> said = said_by(types);
    for (const at::Tensor& t : results) {
      ResultSpec r;
      r.kind = ResultSpec::Kind::Undefined;
      if (t.defined()) {
        at::Tensor root = m.fake_of(t);
        const auto is_shown = [&] { return overlaps_itself(as_fake(root)->view->type) || root.is_conj() || root.is_neg(); };
        Value value;
        std::optional<std::vector<ResultSpec::ViewOp>> views;
        size_t tangent = 0;
        while (tangent < tangents.size() && !(tangents[tangent].defined() && (views = views_from(tangents[tangent], root, said)))) ++tangent;
        const auto same = made.find(t.unsafeGetTensorImpl());
        if (same == made.end() && !views && is_shown() && as_fake(root)->view->storage->input < 0 && has_own_history(root))
          root = m.fake_of(root.clone(at::MemoryFormat::Contiguous).resolve_conj().resolve_neg());
        capture::View& v = *as_fake(root)->view;
        if (same != made.end()) {
          r = j.program.results[same->second];
          if (!r.path.empty()) r = {.kind = ResultSpec::Kind::ViewOfValue, .index = same->second};
        } else if (views) {  // the caller's own, or a view of it
          r.path = std::move(*views);
          r.kind = r.path.empty() ? ResultSpec::Kind::Input : ResultSpec::Kind::ViewOfInput;
          r.index = j.place_of(given[tangent]);
        } else if (is_shown()) {  // users get such a one, made for real of what it is a view of
          if (!v.parent) fail("a gradient is a conjugate or negative view of nothing");
          r.path = m.path_of(v);
          if (v.storage->input >= 0) {
            r.kind = ResultSpec::Kind::ViewOfInput;
            r.index = j.place_of(m.graph->inputs[static_cast<size_t>(v.storage->input)].value);
          } else {
            r.kind = ResultSpec::Kind::ViewOfOutput;
            if (root.requires_grad()) root = root.is_view() ? root._base() : at::Tensor();
            const FakeImpl* base = as_fake(root);
            if (t.requires_grad() && (!base || base->view->parent || base->view->storage != v.storage)) fail("a gradient overlaps itself");
            value = v.storage->base;
          }
        } else {
          r.kind = ResultSpec::Kind::Value;
          value = m.read(v);
        }
        if (value) {
          r.index = static_cast<uint32_t>(j.outputs.size());
          if (root.requires_grad()) roots.emplace_back(r.index, root);
          j.outputs.push_back(m.own_storage(value, v.storage.get(), owners));
        }
        made.try_emplace(t.unsafeGetTensorImpl(), static_cast<uint32_t>(j.program.results.size()));
      }
      j.program.results.push_back(std::move(r));
    }
    j.num_forward = static_cast<uint32_t>(j.outputs.size());
    for (const auto& [output, root] : roots) {
      m.add_root(j, level, output, root);
      j.roots.back().refuses = refusal_behind(level.from.back());
    }
    m.find_nodes(j, level);
    m.find_below(j, level, below, base);
    j.backward = m.graph->next_id();
    if (j.roots.empty()) return;
    const auto tries = [&](auto&& run) -> std::exception_ptr {
      try {
        run();
        return {};
      } catch (const CaptureError&) {
        throw;
      } catch (...) {
        rethrow_interrupt();
        if (m.failure) throw CaptureError(*m.failure);  // Python code on its way has made another exception of it
        return std::current_exception();
      }
    };
    if (!j.inner.empty()) {
      JointProgram::Part& part = j.parts.emplace_back();
      for (uint32_t k = 0; k < j.places(); ++k) (k < j.roots.size() ? part.places : part.stops).push_back(k);
    }
    std::vector<TangentLayout> stopped;
    const auto differentiate = [&] {
      std::vector<Value> values;
      auto gradients = m.differentiate(level, level.tangents, values, stopped);
      std::erase_if(gradients, [](const Tracer::Impl::Grad& g) { return g.place >= 0; });
      m.take_gradients(j, std::move(gradients), values);
      m.find_past_raising(j, level);
      for (uint32_t e = 0; !j.parts.empty() && e < j.edge_to(0); ++e) j.parts[0].edges.push_back(e);
      Tape tape = *m.tape_of(j, level);
      tape.stopped = !stopped.empty();
      j.tape = std::make_shared<const Tape>(std::move(tape));
    };
    // Where one of eager's nodes raises, the others go round it. Python code may raise for what these gradients alone bring it: it runs when others
    // have brought theirs, and they stop in front of it.
    while (const std::exception_ptr error = tries(differentiate)) {
      if (m.running && capture::of_users(*m.running) && stopped.empty() && !j.parts.empty()) {
        const std::shared_ptr<const Tape> tape = m.tape_of(j, level);
        stopped.resize(j.places());
        for (uint32_t k : j.parts[0].stops) {
          const int32_t step = tape->places[k].first;
          stopped[k].stops = step >= 0 && tape->take_whole[static_cast<size_t>(step)];
        }
        if (std::ranges::any_of(stopped, &TangentLayout::stops)) continue;
        stopped.clear();
      }
      if (!m.note_failing(level, error)) fail("raises where no node of its runs");
    }
  });
  j.program.graph = m.graph;
  j.program.num_args = static_cast<uint32_t>(j.given.size());
  return j;
}

}  // namespace vitrify
