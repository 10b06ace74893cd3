// Captures the derivative: autograd's own formulas run over the placeholders, under the same mode as the program did.
#include "torch/joint.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <queue>
#include <ranges>
#include <unordered_set>

#include "ir/faults.h"
#include "support/budget.h"
#include "support/counters.h"
#include "torch/absent.h"
#include "torch/convert.h"
#include "torch/derivatives.h"
#include "torch/overlap.h"
#include "torch/slice.h"
#include "torch/stops.h"
#include "torch/sym_node.h"
#include "torch/tape.h"
#include "torch/tracer_impl.h"
#include "torch/versions.h"
#include "torch/write_history.h"

namespace vitrify {

using capture::as_fake;
using capture::fail;
using capture::FakeImpl;
using capture::refuse_hooks;
using ir::Value;
using torch::autograd::Edge;
using torch::autograd::Node;

void capture::refuse_hooks(const std::vector<Edge>& roots, const std::vector<Edge>& to) {
  std::vector<Node*> todo;
  std::unordered_set<Node*> seen;
  for (const Edge& e : to) seen.insert(e.function.get());
  auto add = [&](const Edge& e) {
    if (e.function && seen.insert(e.function.get()).second) todo.push_back(e.function.get());
  };
  for (const Edge& e : roots) add(e);
  while (!todo.empty()) {
    Node* n = todo.back();
    todo.pop_back();
    const bool leaf = n->num_outputs() == 0;  // hooks of a leaf run when the gradient arrives, as in eager
    if (!leaf && (!n->pre_hooks().empty() || !n->post_hooks().empty() || !n->tensor_pre_hooks().empty() || !n->retains_grad_hooks().empty()))
      fail("registers a gradient hook, or retains the gradient of a tensor that is not a leaf");
    for (const Edge& e : n->next_edges()) add(e);
  }
}

namespace {

bool comes_from(const Node& n, const Node& before) {
  std::vector<Edge> inputs;
  for (uint32_t i = 0; i < n.num_inputs(); ++i) inputs.emplace_back(const_cast<Node&>(n).getptr(), i);
  return leads_to(Edge(const_cast<Node&>(before).getptr(), 0), inputs);
}

// A backward that comes to it brings some: not so behind a user's own node of several results, which may give none for those that nobody used. Others
// than generated nodes raise without.
bool always_has_gradients(const Node& node, const std::vector<Edge>& from) {
  if (dynamic_cast<const torch::autograd::Error*>(&node)) return true;
  std::vector<const Node*> todo;
  std::unordered_set<const Node*> seen;
  for (const Edge& e : from) todo.push_back(e.function.get());
  while (!todo.empty()) {
    const Node* n = todo.back();
    todo.pop_back();
    if (!n || n == &node || !seen.insert(n).second) continue;
    if (n->num_inputs() > 1 && capture::of_users(*n) && comes_from(node, *n)) return false;
    for (const Edge& e : n->next_edges()) todo.push_back(e.function.get());
  }
  return true;
}

}  // namespace

// What eager's backward raises where it comes to the node under way, whatever its gradient is: versions, and what has no derivative. False: it is
// something else.
bool Tracer::Impl::note_raising(std::string says) {
  const compat::NodePtr node = std::exchange(running, {});
  if (!node || failure || raises(node.get()) || capture::of_python(*node)) return false;
  const bool unimplemented = capture::is_unimplemented(*node, says);
  if (unimplemented && !always_has_gradients(*node, levels.back().from)) return false;
  // Of parts that run one by one eager takes turns: where each would raise another error, which comes first is its to say.
  if (std::ranges::any_of(raising, [&](const Raising& r) {
        return r.says.starts_with(kChanged) == unimplemented && !comes_from(*node, *r.node) && !comes_from(*r.node, *node);
      }))
    return false;
  Raising r{node, says};
  if (!unimplemented) {
    constexpr std::string_view kVersion = " is at version ", kExpected = "; expected version ";
    const size_t version = says.find(kVersion), expected = says.find(kExpected);
    if (!says.starts_with(kChanged) || version == std::string::npos || expected == std::string::npos) return false;
    if (says.find("VitrifyInput") != std::string::npos) return false;
    const int64_t now = std::stoll(says.substr(version + kVersion.size())), then = std::stoll(says.substr(expected + kExpected.size()));
    // Versions of what a call is given are counted from those it has. Whose they are is not said: what was written as often and looks alike is taken
    // if its versions have moved alike, and a view of an argument is not known.
    const std::string_view of = std::string_view(says).substr(kChanged.size());
    const Source* found = nullptr;
    bool written = false;
    for (const Source* s : inputs) {
      if (!s->fake.defined() || !s->real.defined()) continue;
      const at::Tensor& t = seen_by_autograd(*s);
      if (!t.defined() || !counts_versions(t) || !s->bumps || static_cast<int64_t>(t._version()) != now) continue;
      written = true;
      if (!of.starts_with(fmt::format("{} [{}]] is at", t.toString(), fmt::join(t.sizes(), ", ")))) continue;
      const bool counted = t.is_same(s->real);
      if (found && !(counted && seen_by_autograd(*found).is_same(found->real) && found->real_version == s->real_version)) return false;
      if (!found) r.expected = then - (counted ? s->real_version : 0);
      found = found ? found : s;
    }
    if (written && !found) return false;
    if (found) r.input = found->input;
    for (const at::Tensor& saved : found ? std::vector<at::Tensor>() : capture::saved_by(*node))
      if (const FakeImpl* f = as_fake(saved);
          f && f->view->storage->input < 0 && static_cast<int64_t>(saved._version()) == now && counts_writes(*f->view, 0))
        r.memory = f->view->storage;
  }
  raising.push_back(std::move(r));
  return true;
}

// The same of what a backward raised that recorded the nodes from `first` on.
bool Tracer::Impl::notes_raising(const std::exception& e, uint32_t first) {
  rethrow_interrupt();
  const auto drew = [&](const ir::Node* n) { return n->id >= first && (n->op->flags & (ir::kRandom | ir::kEffect)); };
  if (std::ranges::any_of(graph->nodes(), drew)) return false;
  const c10::Error* of_torch = dynamic_cast<const c10::Error*>(&e);
  return note_raising(of_torch ? of_torch->what_without_backtrace() : e.what());
}

// A backward that asks for them, and for no others, comes that way and finds none, or raises. Gradients of gradients may come to them.
void Tracer::Impl::find_past_raising(JointProgram& j, const Level& level) const {
  std::unordered_set<const Node*> seen;
  std::vector<const Node*> todo;
  for (const Edge& e : level.from)
    if (e.function) todo.push_back(e.function.get());
  while (!todo.empty()) {
    const Node* n = todo.back();
    todo.pop_back();
    if (!seen.insert(n).second) continue;
    for (const Edge& e : n->next_edges()) {
      const auto to = std::ranges::find(level.to, e);
      if (to == level.to.end()) {
        if (e.function) todo.push_back(e.function.get());
        continue;
      }
      const uint32_t given = j.place_of(level.of[static_cast<size_t>(to - level.to.begin())]);
      const bool known = std::ranges::find(j.gradients, given, &Gradient::given) != j.gradients.end() ||
                         std::ranges::find(j.past_raising, given) != j.past_raising.end();
      if (!known) j.past_raising.push_back(given);
    }
  }
}

std::optional<bool> Tracer::Impl::check(Value v) {
  const ir::TensorType& type = v.type();
  if (!running || !capture::checks_values(*running) || type.dtype != DType::Bool || !type.numel().is(1) || type.device.kind != DeviceKind::CPU)
    return std::nullopt;
  if (!checks.denied) {
    checks.asked.push_back(v);
    return true;
  }
  if (checks.next > *checks.denied) return std::nullopt;
  return checks.next++ != *checks.denied;
}

void Tracer::Impl::raise_where_false(Node& node, const std::vector<at::Tensor>& grads) {
  const std::vector<Value> asked = std::exchange(checks, {}).asked;
  for (size_t k = 0; k < asked.size(); ++k) {
    checks.denied = k;
    std::string says;
    try {
      node(torch::autograd::variable_list(grads));
    } catch (const CaptureError&) {
    } catch (const c10::Error& e) {
      says = e.what_without_backtrace();
    }
    checks = {};
    if (says.empty()) fail("reads a tensor's value: aten::item");
    at::_assert_async(new_tensor(asked[k]), says);
  }
}

void Tracer::Impl::require_grad(Source& s) {
  if (s.real.is_leaf()) {
    c10::InferenceMode as_made(s.real.is_inference());  // outside of it such tensors may not begin to
    s.fake.set_requires_grad(true);
    if (const auto* real = torch::autograd::impl::get_autograd_meta(s.real)) {  // what the engine casts its gradient to
      auto& meta = *torch::autograd::impl::get_autograd_meta(s.fake);
      meta.grad_dtype_ = real->grad_dtype_;
      meta.allow_grad_dtype_mismatch_ = real->allow_grad_dtype_mismatch_;
    }
  } else {
    torch::autograd::set_history(s.fake, compat::make_node<InputNode>());
  }
  s.edge = torch::autograd::impl::gradient_edge(seen_by_autograd(s));
}

// An argument is met as its placeholder, anything else as itself.
const at::Tensor& Tracer::Impl::seen_by_autograd(const Source& s) const { return s.input < static_cast<int32_t>(num_args) ? s.fake : s.real; }

const at::Tensor& Tracer::Impl::seen_by_autograd(const ir::Node& input, const Level& level) const {
  const auto tangent = level.given.find(&input);
  return tangent != level.given.end() ? tangent->second : seen_by_autograd(*inputs[input_index(input)]);
}

// Gradients of an input are added in the order in which they arrive: those of a view made before autograd hears of the program come last.
void Tracer::Impl::order_views_of_inputs(const std::vector<at::Tensor>& outputs, const Level& level, Program& p) {
  if (std::ranges::none_of(p.results, [](const ResultSpec& r) { return r.kind == ResultSpec::Kind::ViewOfInput; })) return;
  const capture::LastUsers last = capture::last_users(level.from, level.to);
  for (size_t i = 0; i < outputs.size(); ++i) {
    ResultSpec& r = p.results[i];
    if (r.kind != ResultSpec::Kind::ViewOfInput || !fake_of(outputs[i]).requires_grad()) continue;
    if (std::ranges::any_of(p.mutations, [&](const Mutation& m) { return m.input == r.index; })) continue;
    const Edge& input = inputs[r.index]->edge;
    capture::Chain chain = capture::views_between(input, fake_of(outputs[i]));
    if (chain.empty()) continue;
    chain.insert(chain.begin(), input.function);
    if (!capture::comes_first(chain, last)) r.turn = 0;
  }
}

// What is in the memory of another tensor is made again as a view of it, and its gradient goes to that one. A derivative of the user's may give such
// a view without being that of a view: its gradient would go past it.
void Tracer::Impl::refuse_own_derivatives(const std::vector<at::Tensor>& outputs, const Program& p) const {
  using Kind = ResultSpec::Kind;
  const auto base_of = [&](size_t i) -> Edge {
    const ResultSpec& r = p.results[i];
    if (r.kind == Kind::ViewOfOutput) {
      at::Tensor base;
      base = outputs[i]._base();
      return torch::autograd::impl::gradient_edge(base);
    }
    if (r.kind == Kind::ViewOfValue) return torch::autograd::impl::gradient_edge(outputs[r.index]);
    const Source& s = *inputs[r.index];
    const bool written = std::ranges::any_of(p.mutations, [&](const Mutation& m) { return m.input == r.index; });
    return written ? torch::autograd::impl::gradient_edge(seen_by_autograd(s)) : s.edge;  // gradients follow the write
  };
  for (size_t i = 0; i < outputs.size() && i < p.results.size(); ++i) {
    const ResultSpec& r = p.results[i];
    if (r.kind == Kind::Value || r.kind == Kind::Undefined || !outputs[i].defined() || !outputs[i].grad_fn()) continue;
    const bool of_input = r.kind == Kind::Input || r.kind == Kind::ViewOfInput;
    const Edge base = base_of(i);
    std::vector<Edge> todo{torch::autograd::impl::gradient_edge(outputs[i])};
    std::unordered_set<const Node*> seen;
    bool reached = false;
    while (!todo.empty()) {
      const Edge e = todo.back();
      todo.pop_back();
      reached = reached || e == base;
      if (!e.function || e == base || !seen.insert(e.function.get()).second) continue;
      if (capture::of_users(*e.function))
        fail(of_input ? "returns what it was given, or a view of it, by a derivative of its own"
                      : "returns a view of what it made, by a derivative of its own");
      for (const Edge& next : e.function->next_edges()) todo.push_back(next);
    }
    if (!reached) fail("returns a view of a tensor that its gradient does not go to");
  }
}

bool Tracer::Impl::makes_gradients(const std::vector<at::Tensor>& outputs) {
  if (failure) return false;
  auto is_given = [&](const at::Tensor& t) { return std::ranges::any_of(inputs, [&](const Source* s) { return s->fake.is_same(t); }); };
  for (const at::Tensor& t : outputs)
    if (t.defined() && fake_of(t).requires_grad() && !is_given(fake_of(t))) return true;
  return std::ranges::any_of(inputs, [&](const Source* s) {
    if (!s->fake.defined() || s->grad_of) return false;
    const at::Tensor& t = seen_by_autograd(*s);
    return t.requires_grad() && torch::autograd::impl::gradient_edge(t) != s->edge;
  });
}

namespace {

// The engine takes those of leaves first, in the order of a heap of equal ones, which hooks of theirs see: so that it takes them as eager's gradients
// were ready.
void order_gradients(JointProgram& j, const Tracer::Impl::Level& level, std::unordered_map<const Node*, size_t>& ready) {
  const auto edge = [&](uint32_t g) {
    return level.to[static_cast<size_t>(std::ranges::find(level.of, j.given[j.gradients[g].given]) - level.of.begin())];
  };
  std::vector<uint32_t> placed;
  // `waiting`: so many other nodes are ready when that of these runs, and `behind` when it has.
  const auto place = [&](std::vector<uint32_t> order, size_t waiting, size_t behind) {
    const auto others = std::ranges::stable_partition(
        order, [&](uint32_t g) { return dynamic_cast<const torch::autograd::AccumulateGrad*>(edge(g).function.get()) != nullptr; });
    const auto leaves = order.size() - others.size();
    std::ranges::stable_sort(order.begin(), others.begin(), {}, [&](uint32_t g) { return ready[edge(g).function.get()]; });
    using Task = std::pair<bool, size_t>;
    const auto before = [](const Task& a, const Task& b) { return a.first < b.first; };
    std::priority_queue<Task, std::vector<Task>, decltype(before)> heap(before);
    for (size_t i = 0; i < waiting; ++i) heap.emplace(false, order.size());
    for (size_t i = 0; i < order.size() + behind; ++i) heap.emplace(i < leaves, i);
    std::vector<uint32_t> now = order;
    for (size_t i = 0; i < leaves; ++i, heap.pop()) now[heap.top().second] = order[i];
    placed.insert(placed.end(), now.begin(), now.end());
  };
  std::vector<uint32_t> rest(j.gradients.size());
  std::iota(rest.begin(), rest.end(), 0);
  // Another part in front leads to it as well, and runs later.
  const auto is_ready_later = [&](uint32_t g, size_t part) {
    const auto leads = [&](size_t q) { return std::ranges::find(j.parts[q].edges, g) != j.parts[q].edges.end(); };
    bool later = false;
    for (size_t q = 0; q < part; ++q) {
      if (q < j.first_front && leads(q)) return false;
      later = later || leads(q);
    }
    return later;
  };
  for (size_t p = j.parts.size(); p > j.first_front + 1; --p) {  // each in front runs by itself, the last made first
    std::vector<uint32_t> its;
    for (uint32_t g : j.parts[p - 1].edges)
      if (!is_ready_later(g, p - 1) && std::erase(rest, g)) its.push_back(g);
    place(std::move(its), p - 1 - j.first_front, j.parts[p - 1].stops.empty() ? 0 : 1);
  }
  place(std::move(rest), 0, j.first_front > 0);
  std::vector<Gradient> gradients;
  std::vector<uint32_t> now(placed.size());
  for (uint32_t g : placed) {
    now[g] = static_cast<uint32_t>(gradients.size());
    gradients.push_back(std::move(j.gradients[g]));
  }
  j.gradients = std::move(gradients);
  for (JointProgram::Part& part : j.parts)
    for (uint32_t& e : part.edges)
      if (e < now.size()) e = now[e];
}

// Behind a result that leads to nothing but leaves of the program's own no derivative was taken, which would say what gradients on their way to it
// read of what was written.
void refuse_lost_ways(const JointProgram& j) {
  if (std::ranges::all_of(j.program.mutations, &Mutation::metadata_only)) return;
  const std::vector<char> gives = j.tape->gives_gradients();
  for (const JointProgram::Part& p : j.parts)
    for (uint32_t place : p.stops)
      if (const int32_t step = j.tape->step_of(place); step >= 0 && !gives[static_cast<size_t>(step)])
        fail("writes to what it is given, and has results behind one another that lead to nothing but leaves of its own");
}

}  // namespace

JointProgram Tracer::Impl::finish_joint(const std::vector<at::Tensor>& outputs) {
  if (failure) throw CaptureError(*failure);
  JointProgram j;
  count_versions();
  std::vector<at::Tensor> tensors;  // per graph output: the tensor it is; undefined where it carries no gradient
  emit_outputs(with_grads(outputs, j.program), j.program, &tensors);
  j.num_forward = static_cast<uint32_t>(graph->outputs.size());
  tensors.resize(j.num_forward);
  j.outputs = graph->outputs;

  for (size_t i = 0; i < outputs.size(); ++i)
    if (const FakeImpl* f = outputs[i].defined() ? as_fake(fake_of(outputs[i])) : nullptr; f && !f->view->parent && f->view->storage->input < 0)
      if (const ResultSpec& r = j.program.results[i]; r.kind == ResultSpec::Kind::Value && j.outputs[r.index] == f->view->storage->base)
        result_memory.emplace(f->view->storage, r.index);
  for (uint32_t i = 0; i < outputs.size(); ++i)
    if (const FakeImpl* f = outputs[i].defined() ? as_fake(fake_of(outputs[i])) : nullptr; f && (f->view->parent || f->view->storage->input < 0))
      if (j.program.results[i].kind != ResultSpec::Kind::Input) result_views.try_emplace(f->view, i);
  if (!saved_arguments.empty())
    for (const at::Tensor& t : outputs) may_be_found.push_back(t.defined() ? fake_of(t) : t);
  std::vector<int32_t> written(j.num_forward, -1);
  const auto needs = [](const at::Tensor& t) { return t.defined() && t.requires_grad(); };
  for (const Mutation& m : j.program.mutations) {
    const Source& s = *inputs[m.input];
    const at::Tensor& t = seen_by_autograd(s);
    if (!t.requires_grad()) continue;
    const bool follows = torch::autograd::impl::gradient_edge(t) != s.edge, viewed = as_fake(s.fake)->view->storage->has_views && s.real.is_leaf();
    if ((s.bumps || m.counted >= 0) && (viewed || (!follows && is_argument(s) && std::ranges::any_of(tensors, needs)))) {
      // Eager gives a view another history then, from its base.
      if (s.real.is_view()) fail(fmt::format("writes to '{}', a view that needs gradients, without them", s.name));
      add_fact(s.input, Fact::View);
    }
    if (!follows) continue;
    if (m.metadata_only) fail(fmt::format("changes the shape of input '{}', whose gradients must follow", s.name));
    if (t.is_view() && t.is_same(s.real)) fail(fmt::format("writes to '{}', a view, in a way that gradients must follow", s.name));
    tensors[m.output] = t;
    written[m.output] = static_cast<int32_t>(m.input);
  }

  refuse_own_derivatives(outputs, j.program);
  find_spent(tensors, j.program);
  Level& level = levels.emplace_back();
  for (uint32_t o = 0; o < tensors.size(); ++o) {
    if (!needs(tensors[o])) continue;
    add_root(j, level, o, tensors[o]);
    j.roots.back().written = written[o];
  }
  // What is found autograd meets as itself, and saves so. It has the call's history afterwards, with which a later derivative would meet it again.
  for (size_t k = 0; k < j.roots.size(); ++k) {
    const Source* s = j.roots[k].written < 0 ? nullptr : inputs[static_cast<size_t>(j.roots[k].written)];
    if (!s || !seen_by_autograd(*s).is_same(s->real)) continue;
    const auto is_of_it = [&](const at::Tensor& t) { return t.defined() && !as_fake(t) && t.has_storage() && t.is_alias_of(s->real); };
    if (capture::saves(*level.from[k].function) || std::ranges::any_of(capture::saved_behind(level.from, options.saved_tensors), is_of_it))
      fail(fmt::format("writes to '{}' in a way that gradients must follow, and they read it", s->name));
  }
  std::vector<Value> values;
  std::vector<Grad> grads;
  if (!j.roots.empty()) {
    if (!traced.empty()) fail("reads a tensor's value: aten::item, and returns what gradients can still come back through");
    const auto changes = [](const Numbers::Step& s) { return s.op != Numbers::Op::Constant; };
    if (!j.program.grad_writes.empty() || std::ranges::any_of(numbers->steps, changes) ||
        std::any_of(inputs.begin(), inputs.end(), [](Source* s) { return s->grad_of; }))
      fail("returns what gradients can still come back through, and reads or sets a .grad or numbers of an optimizer");
    // What a node has saved of what no op reads is an input too, whose version it looks at.
    for (const at::Tensor& t : capture::saved_behind(level.from, options.saved_tensors))
      if (t.defined() && !t.unsafeGetTensorImpl()->is_wrapped_number()) fake_of(t);
    for (Source* s : inputs) {
      if (s->fake.defined() && s->frozen && seen_by_autograd(*s).requires_grad()) {
        const auto writes = [&](const Mutation& m) { return m.input == static_cast<uint32_t>(s->input) && !m.metadata_only; };
        if (std::ranges::any_of(j.program.mutations, writes)) fail(fmt::format("freezes '{}' for a part, and writes to it", s->name));
        if (!s->edge.function) require_grad(*s);
      }
      if (!s->fake.defined() || !s->edge.function) continue;
      level.to.push_back(s->edge);
      level.of.push_back(graph->inputs[s->input].value);
    }
    refuse_found_behind_another();
    refuse_hooks(level.from, level.to);
    check_found();
    if (has_side_effects(*graph) && std::ranges::any_of(graph->nodes(), [](const ir::Node* n) { return n->op->name.starts_with("vitrify::assume"); }))
      fail("decides by what follows from content, beside calls that may have effects");
    for (const Mutation& m : j.program.mutations) {
      if (m.path.empty()) continue;
      if (!m.metadata_only) fail("gives an input another size, beside gradients");
      for (const ResultSpec& r : j.program.results)
        if (r.kind == ResultSpec::Kind::ViewOfInput && r.index == m.input) fail("returns a view of an input whose shape it changes in place");
    }
    order_views_of_inputs(outputs, level, j.program);
    for (const at::Tensor& saved : capture::saved_behind(level.from))  // views of what lies there now, and none that a backward makes of it
      if (const FakeImpl* f = as_fake(saved); f && f->view->parent && f->view->storage->generation) read(*f->view);
    j.backward = graph->next_id();
    if (generators_moved()) fail("sets the state of a random number generator");  // before a checkpoint puts it there
    in_backward = true;
    last_forward_states = states();
    std::unordered_map<const StorageState*, uint64_t> writes;
    for (const auto& s : input_storages) writes[s.get()] = s->generation;
    const size_t read = inputs.size();
    for (bool done = false; !done;) {
      const uint32_t first = graph->next_id();
      try {
        grads = differentiate(level, level.tangents, values);
        done = true;
      } catch (const CaptureError&) {
        throw;
      } catch (const std::exception& e) {
        if (!notes_raising(e, first)) throw;
        values.clear();
        sums.clear();
      }
    }
    in_backward = false;
    if (inputs.size() > read) fail(fmt::format("reads '{}' in its backward alone, by which time it may be another tensor", inputs[read]->name));
    for (const auto& s : input_storages)  // as batch norm does; it would be left out
      if (s->generation != writes[s.get()])
        fail(fmt::format("writes to input '{}' once more when a checkpoint is computed again", inputs[static_cast<size_t>(s->input)]->name));
  }
  stop();
  if (failure) throw CaptureError(*failure);
  take_inputs(j.program);
  place_inputs(j);
  take_gradients(j, std::move(grads), values);
  find_past_raising(j, level);
  find_parts(j, level, outputs);
  order_gradients(j, level, ready);
  find_nodes(j, level);
  j.tape = tape_of(j, level);
  refuse_lost_ways(j);
  // A user's own backward may read what it gives no gradient: to second order that has one.
  for (const Tape::Step& step : j.tape->steps) {
    if (!capture::of_python(*step.node)) continue;
    const Edge node(const_cast<Node*>(step.node)->getptr(), 0);
    const auto refuse = [&](uint32_t g) {
      const Source* s = is_input(*j.given[g].node) ? inputs[input_index(*j.given[g].node)] : nullptr;
      if (!s || s->input < static_cast<int32_t>(num_args) || !s->edge.function) return;
      if (!leads_to(node, {s->edge}) || std::ranges::find(j.gradients, g, &Gradient::given) == j.gradients.end())
        fail(fmt::format("reads '{}' in a backward of its own that gives it no gradient", s->name));
    };
    for (const auto* reads : {&step.reads_given, &step.found_given}) std::ranges::for_each(*reads, refuse);
    for (const auto* reads : {&step.reads_outputs, &step.found_outputs})  // or what it is once the program has written to it
      for (const Mutation& w : j.program.mutations)
        if (std::ranges::find(*reads, w.output) != reads->end()) refuse(j.place_of(graph->inputs[w.input].value));
  }
  find_added(j, sums);
  for (uint32_t i = 0; i < num_args; ++i) {  // the trace lives as long as the plan: the caller's tensors need not
    by_real.erase(inputs[i]->real.unsafeGetTensorImpl());
    inputs[i]->real = at::Tensor();
  }
  for (Source& s : sources) {
    if (s.input < 0 && s.real.defined()) {  // it was not met, and cannot be any more
      if (const auto known = by_real.find(s.real.unsafeGetTensorImpl()); known != by_real.end() && known->second == &s) by_real.erase(known);
      s.real.reset();
    }
    if (s.real.defined() && s.input >= static_cast<int32_t>(num_args)) by_real.try_emplace(s.real.unsafeGetTensorImpl(), &s);
  }
  if (j.roots.empty()) {  // otherwise the trace may go on
    ir::cut_dead_readers(*graph);
    for (const ir::Node* n : ir::dead_nodes(*graph)) counters().values_compiled += std::max<size_t>(n->outs.size(), 1);  // as finish() does
    graph->remove_dead();
  }
  return j;
}

namespace {

// Of what plans of any size can be given: where sizes differ from call to call, memory without gaps, whose strides follow from them.
ir::TensorType type_of_tangent(ir::TensorType type) {
  if (overlaps_itself(type)) type.strides = ir::contiguous_strides(type.sizes);  // it has elements of its own
  if (capture::is_static(type)) return type;
  const std::vector<int64_t> now = values_of(type.strides), sizes = values_of(type.sizes);
  std::vector<size_t> order(type.dim());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::greater(), [&](size_t d) { return std::pair(now[d], sizes[d] > 1); });  // as tangents are compared with it
  sym::Int next = 1;
  for (size_t d : std::views::reverse(order)) {
    type.strides[d] = next;
    next = next * sym::max(type.sizes[d], 1);
  }
  return type;
}

}  // namespace

void Tracer::Impl::add_root(JointProgram& j, Level& level, uint32_t output, const at::Tensor& t) {
  const Value tangent = add_tangent(fmt::format("tangent{}_{}", levels.size() - 1, j.roots.size()), type_of_tangent(j.outputs[output].type()));
  j.roots.emplace_back();
  j.roots.back().output = output;
  j.roots.back().tangent = tangent;
  level.tangents.push_back(new_tensor(tangent));
  level.from.push_back(torch::autograd::impl::gradient_edge(t));
  level.views.emplace_back();
  if (j.level || !views_of_output.contains(output)) return;
  std::vector<OutputView> views = views_of_output.at(output);
  std::ranges::stable_sort(views, {}, [](const OutputView& v) { return capture::turn_of(v.chain); });
  for (OutputView& v : views) {
    j.roots.back().views.push_back(v.result);
    level.views.back().push_back(std::move(v.chain));
  }
}

Value Tracer::Impl::add_tangent(const std::string& name, const ir::TensorType& type, ir::InputKind kind) {
  sources.push_back({{}, {}, kind, name});
  sources.back().input = static_cast<int32_t>(inputs.size());
  inputs.push_back(&sources.back());
  return graph->add_input(kind, name, type);
}

std::vector<Value> Tracer::Impl::tangents_for(const JointProgram& j, const std::vector<TangentLayout>& how) {
  std::vector<Value> r(j.places());
  for (size_t k = 0; k < r.size(); ++k) {
    if (!how[k].defined) continue;
    r[k] = j.tangent(k);
    if (how[k].strides.empty()) continue;
    ir::TensorType type = r[k].type();
    const std::vector<int64_t>& strides = how[k].strides;
    type.strides.assign(strides.begin(), strides.end());
    sym::Int next = 1;  // for the places in memory without gaps
    for (int64_t place = -1;; --place) {
      const auto d = static_cast<size_t>(std::ranges::find(strides, place) - strides.begin());
      if (d == strides.size()) break;
      type.strides[d] = next;
      next = next * sym::max(type.sizes[d], 1);
    }
    if (how[k].batch) type.sizes.insert(type.sizes.begin() + how[k].batch_dim, sym::Int(how[k].batch));
    for (size_t d = 0; d < type.dim(); ++d)
      if (how[k].is_expanded(d) && capture::is_static(j.tangent(k).type())) type.sizes[d] = 1;
    r[k] = add_tangent(fmt::format("tangent{}_{}_{}", j.level, k, inputs.size()), type);
  }
  return r;
}

// Inputs are counted without tangents from here on.
void Tracer::Impl::place_inputs(JointProgram& j) {
  std::vector<uint32_t> place(inputs.size());
  std::vector<at::Tensor> captured;
  for (uint32_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i]->kind == ir::InputKind::Tangent) continue;
    place[i] = static_cast<uint32_t>(j.given.size());
    j.given.push_back(graph->inputs[i].value);
    if (i >= num_args) captured.push_back(inputs[i]->grad_of ? at::Tensor() : inputs[i]->real);
  }
  j.program.captured = std::move(captured);
  for (ResultSpec& r : j.program.results)
    if (r.kind == ResultSpec::Kind::Input || r.kind == ResultSpec::Kind::ViewOfInput) r.index = place[r.index];
  for (Mutation& m : j.program.mutations) m.input = place[m.input];
  for (JointProgram::Root& r : j.roots)
    if (r.written >= 0) r.written = static_cast<int32_t>(place[r.written]);
}

}  // namespace vitrify
