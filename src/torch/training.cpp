#include "torch/training.h"

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <deque>
#include <numeric>
#include <unordered_set>

#include "torch/derivatives.h"
#include "torch/effects.h"
#include "torch/extern_call.h"
#include "torch/saved_hooks.h"
#include "torch/tape.h"
#include "torch/training_impl.h"
#include "torch/versions.h"

namespace vitrify {

using torch::autograd::SavedVariable;

// What is returned follows from a written input by way of a view that was there before: autograd makes the history of such a view again, from the
// base and by its strides. Where that input is a view itself, its base is another, and eager's gradients do not come through that input.
static bool is_passed(const JointProgram& j, size_t root) {
  const int32_t written = j.tape->roots[root];
  const auto passes = [&](const Tape::Step& s) {
    return dynamic_cast<const torch::autograd::generated::AsStridedBackward0*>(s.node) &&
           std::ranges::find(s.next, static_cast<uint32_t>(written)) != s.next.end();
  };
  const auto is_view = [&](const ResultSpec& r) {
    return r.kind == ResultSpec::Kind::ViewOfInput && r.index == static_cast<uint32_t>(j.roots[root].written);
  };
  return (written >= 0 && std::ranges::any_of(j.tape->steps, passes)) || std::ranges::any_of(j.program.results, is_view);
}

// As a plan writes, which gives values memory of their own.
static void write_interpreted(const Program& p, const std::vector<const at::Tensor*>& given, std::vector<at::Tensor>& values) {
  for (at::Tensor& v : values)
    if (v.defined() && v.has_storage() && std::ranges::any_of(p.mutations, [&](const Mutation& m) { return given[m.input]->is_alias_of(v); }))
      v = v.clone();
  const PlanGuard guard;
  for (const Mutation& m : p.mutations) {
    note_effect();
    write_back(m, resolve(m.path), *given[m.input], values);
  }
}

void Training::run(at::ArrayRef<at::Tensor> args, std::vector<at::Tensor>& out, const Origin* origin) {
  std::vector<const at::Tensor*> given;
  for (const at::Tensor& t : args) given.push_back(&t);
  for (const at::Tensor& t : joint_.program.captured) given.push_back(&t);
  for (size_t k = 0; k < joint_.roots.size(); ++k) {
    const JointProgram::Root& r = joint_.roots[k];
    if (r.written < 0) continue;
    check_written(*given[r.written]);
    if (!origin && given[r.written]->is_view()) check_written_view(*given[r.written], is_passed(joint_, k));
  }
  for (const auto [written, other] : written_beside_)
    if (given[written]->has_storage() && given[written]->is_alias_of(*given[other]) && !given[written]->is_same(*given[other]) &&
        share_versions(*given[written], *given[other]))
      throw capture::CallRefused("it writes to one of two views of one tensor, beside gradients");
  if (!joint_.program.facts.empty()) check_histories(joint_.program, given.data());
  if (!origin) check_own_backward(joint_.program, given);
  const bool hooked = at::SavedTensorDefaultHooks::get_hooks().has_value();
  if (hooked && writes_behind_hooks_) throw capture::CallRefused("hooks take what it saves before it has written, or drawn, all");
  if (hooked && finds_what_hooks_take_) throw capture::CallRefused("hooks take a tensor that a checkpoint's function finds by itself, too");
  // Before anything is written: the edge of a view that was written through would be another.
  auto edge_of = [&](size_t i) { return origin ? origin->edges[i] : torch::autograd::impl::gradient_edge(*given[i]); };
  torch::autograd::edge_list edges;
  for (const Gradient& g : joint_.gradients) edges.push_back(edge_of(g.given));
  for (uint32_t i : joint_.past_raising) edges.push_back(edge_of(i));
  std::vector<Edge> before(joint_.roots.size());
  for (size_t k = 0; k < before.size(); ++k)
    if (joint_.roots[k].written >= 0 && given[joint_.roots[k].written]->requires_grad())
      before[k] = torch::autograd::impl::gradient_edge(*given[joint_.roots[k].written]);
  const auto* below = origin ? static_cast<const RegionCall*>(origin->call.get()) : nullptr;
  std::vector<RegionCall::Raised> raised, raised_below;
  if (below && !raising_.empty()) {
    const auto lock = below->lock();
    raised_below = below->raised;
  }
  for (size_t s : raising_) {
    const Tape::Step& step = joint_.tape->steps[s];
    raised.push_back({s, {}, {}, 0});
    const auto same = std::ranges::find(raised_below, step.below, [](const RegionCall::Raised& r) { return static_cast<int32_t>(r.step); });
    if (same != raised_below.end()) {  // what it has saved is counted from the call's begin
      raised.back() = *same;
      raised.back().step = s;
      continue;
    }
    if (step.stale < 0) continue;
    const at::Tensor& stale = *given[static_cast<size_t>(step.stale)];
    if (!counts_versions(stale)) continue;
    raised.back() = {s, stale.unsafeGetTensorImpl()->version_counter(), RegionCall::Seen(stale.getIntrusivePtr()), version_of(stale) + step.expected};
  }
  std::vector<const at::Tensor*> as_given = given;
  std::vector<at::Tensor> in_shape;
  in_shape.reserve(reshaped_.size());
  for (uint32_t i : reshaped_) as_given[i] = &in_shape.emplace_back(given[i]->detach());
  std::vector<compat::NodePtr> spent;  // what leads to a view that is written is asked before: it would be made anew, of what its base was
  for (const Program::Spent& s : joint_.program.spent) spent.push_back(spent_node(s, given.data()));
  std::vector<at::Tensor> values;
  if (compat::any_mode_on_stack() && !Tracer::current()) {  // around a derivative, or a checkpoint's function: it sees what eager calls
    if (!origin && !reshaped_.empty()) throw capture::CallRefused("a mode is around a checkpoint's function that reshapes what it is given in place");
    std::vector<at::Tensor> inputs;
    if (origin) inputs.assign(args.begin(), args.end());
    for (size_t i = 0; i < given.size() && !origin; ++i) inputs.push_back(given[i]->detach());
    values = interpret(*split(joint_, options_).forward.graph, inputs);
    if (!origin) write_interpreted(joint_.program, given, values);
  } else {
    forward_->run(args, values);
  }
  for (size_t i = 0; i < spent.size(); ++i)
    torch::autograd::set_history(values[joint_.program.results[joint_.program.spent[i].result].index], spent[i]);
  out.clear();
  // An expanded tangent is given once, a conjugate one as it lies in memory, and gradients may be views of it as it came.
  std::vector<const at::Tensor*> whole;
  std::deque<at::Tensor> expanded;
  if (origin) {
    whole = given;
    for (const auto& [i, followed] : origin->views)
      if (const at::Tensor tangent = followed.now();
          tangent.defined() &&
          (tangent.sizes() != given[i]->sizes() || tangent.is_conj() != given[i]->is_conj() || tangent.is_neg() != given[i]->is_neg()))
        whole[i] = &expanded.emplace_back(tangent);
  }
  const std::vector<const at::Tensor*>& as_came = origin ? whole : given;
  results_.make(values, as_came, out, 0);

  auto call = std::make_shared<RegionCall>(joint_, whole_, origin ? origin->call : nullptr);
  std::vector<compat::NodePtr> nodes;
  const auto set_history = [&](size_t k, const compat::NodePtr& node) {
    if (k >= joint_.roots.size()) {
      add_inner(*node, joint_.tangent(k).type());
    } else if (const JointProgram::Root& r = joint_.roots[k]; r.written < 0) {
      torch::autograd::set_history(values[r.output], node);
    } else {
      rebase(*given[r.written], Edge(node, node->add_input_metadata(*given[r.written])), before[k]);
    }
  };
  const auto set_histories = [&](const compat::NodePtr& node, const std::vector<uint32_t>& places) {
    const auto in = [&](const std::vector<uint32_t>& own) { return std::ranges::find(places, own[0]) != places.end(); };
    if (std::ranges::none_of(joint_.nodes, in)) {
      for (uint32_t k : places) set_history(k, node);
      return;
    }
    for (uint32_t k : places) {
      const JointProgram::Root& r = joint_.roots[k];
      node->add_input_metadata(r.written < 0 ? values[r.output] : *given[r.written]);
    }
    static_cast<RegionNode&>(*node).has_results_in_front();
    for (const std::vector<uint32_t>& own : joint_.nodes) {
      if (!in(own)) continue;
      const auto in_front = compat::make_node<ResultNode>(call);
      torch::autograd::edge_list next;
      for (uint32_t k : own) next.emplace_back(node, static_cast<uint32_t>(std::ranges::find(places, k) - places.begin()));
      in_front->set_next_edges(std::move(next));
      for (uint32_t k : own) set_history(k, in_front);
    }
  };
  if (joint_.parts.empty()) {
    nodes.push_back(compat::make_node<RegionNode>(shared_from_this(), call, 0));
    nodes[0]->set_next_edges(std::move(edges));
    std::vector<uint32_t> places(joint_.roots.size());
    std::iota(places.begin(), places.end(), 0);
    set_histories(nodes[0], places);
  }
  if (!joint_.parts.empty()) nodes.resize(joint_.parts.size());
  for (uint32_t p : in_turn_) {
    nodes[p] = compat::make_node<RegionNode>(shared_from_this(), call, p);
    torch::autograd::edge_list own(joint_.edge_to(joint_.places()));
    for (uint32_t e : joint_.parts[p].edges) own[e] = edges[e];
    for (uint32_t k : joint_.parts[p].stops) own[joint_.edge_to(k)] = edge_to_place(k, nodes, values, given, out, origin);
    nodes[p]->set_next_edges(std::move(own));
    set_histories(nodes[p], joint_.parts[p].places);
    results_.make(values, as_came, out, p + 1);
  }
  for (size_t k = 0; k < joint_.places(); ++k) call->add_place(edge_to_place(k, nodes, values, given, out, origin));
  call->oldest = nodes[in_turn_.empty() ? 0 : in_turn_[0]]->sequence_nr();
  const bool again = !origin && std::ranges::any_of(tape().steps, [](const Tape::Step& s) { return s.again; });
  if (again)
    for (uint32_t i = 0; i < given.size(); ++i)
      if (given[i]->defined() && std::ranges::find(joint_.program.mutations, i, &Mutation::input) == joint_.program.mutations.end())
        call->computed_again.push_back({RegionCall::Seen(given[i]->getIntrusivePtr()), i, given[i]->requires_grad()});
  keep(*call, as_given, values, hooked, origin);
  call->raised = std::move(raised);
  const auto note_leaf = [&](const at::Tensor& t) {
    if (t.defined() && t.is_leaf() && !t.requires_grad() && torch::autograd::isDifferentiableType(t.scalar_type()))
      call->saved_leaves.emplace_back(t.getIntrusivePtr());
  };
  if (!origin)
    for (const Mutation& m : joint_.program.mutations)
      if (!m.metadata_only) note_leaf(*given[m.input]);
  if (below) {
    const auto lock = below->lock();
    call->saved_leaves = below->saved_leaves;
    const size_t given_below = below->joint.given.size();
    for (RegionCall::Given found : below->computed_again) {
      if (found.index >= given_below) found.index += static_cast<uint32_t>(joint_.given.size() - given_below);  // a result
      call->computed_again.push_back(std::move(found));
    }
  }
  for (uint32_t i : read_given_) {
    if (hooked) break;  // hooks keep what it was
    if (!below) {
      call->watch(*given[i], version_of(*given[i]), false, i);
      continue;
    }
    const Kept& k = origin->given[i];  // it has no history, and may be a copy in other strides
    const at::Tensor seen = below->seen(joint_.given[i]);
    const bool same = seen.defined() && k.tensor.defined() && seen.has_storage() && k.tensor.has_storage() && seen.is_alias_of(k.tensor);
    call->watch(same ? seen : k.tensor, k.version, false, i);
  }
  for (uint32_t o : read_outputs_)
    if (!hooked)
      call->watch(written_[o] < 0 ? values[o] : *given[static_cast<size_t>(written_[o])],
                  version_of(written_[o] < 0 ? values[o] : *given[static_cast<size_t>(written_[o])]), true, o);
  results_.make(values, as_came, out);
  if (origin) {
    for (const RegionCall::Unfollowed& u : below->unfollowed) {
      const Value v = u.is_output ? below->joint.outputs[u.index] : below->joint.given[u.index];
      if (const auto at = std::ranges::find(joint_.given, v); at != joint_.given.end())
        call->unfollowed.push_back({u.tensor, false, static_cast<uint32_t>(at - joint_.given.begin())});
    }
    for (const auto& [i, tangent] : origin->views) call->unfollowed.push_back({tangent, false, i});
    for (uint32_t o : read_outputs_)
      for (uint32_t i = 0; i < out.size(); ++i)
        if (joint_.program.results[i].kind == ResultSpec::Kind::Value && joint_.program.results[i].index == o && out[i].defined())
          call->unfollowed.push_back({Followed(out[i]), true, o});
  }
  for (RegionCall::Raised& r : call->raised)
    if (const int32_t i = tape().steps[r.step].stale_result; i >= 0 && !r.version && out[static_cast<size_t>(i)].defined()) {
      const at::Tensor& t = out[static_cast<size_t>(i)];
      if (counts_versions(t)) r.version = t.unsafeGetTensorImpl()->version_counter(), r.expected = version_of(t);
    }
  for (uint32_t i = 0; i < out.size() && again; ++i)
    if (joint_.program.results[i].kind == ResultSpec::Kind::Value)
      call->computed_again.push_back(
          {RegionCall::Seen(out[i].getIntrusivePtr()), static_cast<uint32_t>(joint_.given.size()) + i, out[i].requires_grad()});
  if (!hooked)  // hooks keep what it was
    for (uint32_t i : saved_results_) note_leaf(out[i]);
  if (!hooked && !origin)
    for (uint32_t i : tape().views) {
      const ResultSpec& r = joint_.program.results[i];
      const bool kept = r.kind == ResultSpec::Kind::Value && tape().holds_results[r.index] != Hold::Memory;
      call->note_memory(i, kept ? static_cast<int32_t>(r.index) : -1, out[i]);
    }
  if (origin)
    for (const RegionCall::InMemory& m : static_cast<const RegionCall&>(*origin->call).in_memory)
      if (const at::Tensor now = m.tensor.now(); now.defined()) call->note_memory(m.result, -1, now, m.recorded);
  for (uint32_t k = 0; k < joint_.roots.size(); ++k)
    if (const auto& views = joint_.roots[k].views; views.size() > 1)
      for (uint32_t v = 0; v < views.size(); ++v) call->add_view(k, v, out[views[v]]);
}

// Derivatives that there are serve those results.
void Training::let_go() {
  for (at::Tensor& t : joint_.program.captured) t.reset();
  forward_->let_go();
  std::shared_ptr<Tracer> gone;
  {
    std::lock_guard lock(trace_mutex_);
    gone = std::move(trace_);
  }
  std::unique_lock lock(mutex_, std::try_to_lock);  // whoever has it may wait for the interpreter, which the caller has
  if (!lock) return;
  for (auto& [how, all] : next_)
    for (const Next& n : all) n.program->let_go();
}

std::shared_ptr<Tracer> Training::trace() const {
  std::lock_guard lock(trace_mutex_);
  TORCH_CHECK(trace_, "vitrify: a tensor that the program read was swapped (torch.utils.swap_tensors) between its forward and its backward");
  return trace_;
}

// Views of one tensor share its versions, and what is written to one gives them all a history. A placeholder of an argument is none: what the program
// reaches by itself is what it is.
void Training::find_written_beside(const std::vector<char>& given, const std::vector<char>& outputs) {
  if (joint_.level > 0) return;
  std::vector<char> counts = given;
  for (const Gradient& g : joint_.gradients) counts[g.given] = 1;
  for (uint32_t i : joint_.past_raising) counts[i] = 1;
  std::vector<char> follows(given.size());
  for (const JointProgram::Root& r : joint_.roots)
    if (r.written >= 0) follows[static_cast<size_t>(r.written)] = 1;
  for (const Mutation& m : joint_.program.mutations)
    if (!m.metadata_only && (outputs[m.output] || follows[m.input])) counts[m.input] = 1;
  for (const Mutation& m : joint_.program.mutations)
    for (uint32_t i = 0; i < counts.size(); ++i) {
      const bool shows = m.metadata_only ? given[i] != 0 : counts[i] || follows[m.input];  // another shape counts as a write, and gives no history
      if (i != m.input && shows && std::min(i, m.input) < joint_.program.num_args) written_beside_.emplace_back(m.input, i);
    }
}

void Training::find_read(const ir::Graph& forward) {
  const std::vector<char> returned = returned_outputs(joint_.program, joint_.num_forward);
  std::vector<char> changes(joint_.given.size()), given(joint_.given.size()), outputs(joint_.num_forward);
  written_.assign(joint_.num_forward, -1);
  for (const Mutation& m : joint_.program.mutations) {
    if (m.metadata_only) {
      reshaped_.push_back(m.input);
      continue;
    }
    changes[m.input] = 1;  // what it was before is what eager read
    written_[m.output] = static_cast<int32_t>(m.input);
  }
  for (const Tape::Step& s : joint_.tape->steps) {
    for (uint32_t i : s.reads_given) given[i] = !changes[i];
    for (uint32_t o : s.reads_outputs) outputs[o] = returned[o] || written_[o] >= 0;
  }
  find_written_beside(given, outputs);
  for (uint32_t i = 0; i < given.size(); ++i)
    if (given[i]) read_given_.push_back(i);
  for (uint32_t o = 0; o < outputs.size(); ++o)
    if (outputs[o]) read_outputs_.push_back(o);
  saved_results_ = tape().views;
  const size_t derived = joint_.level > 0 ? joint_.program.results.size() : 0;  // gradients: which of them are views is not known
  for (uint32_t i = 0; i < derived; ++i) {
    const ResultSpec& r = joint_.program.results[i];
    if (r.kind == ResultSpec::Kind::Value && r.path.empty() && r.index < outputs.size() && outputs[r.index]) saved_results_.push_back(i);
  }
  // A checkpoint's hooks end the recomputation with the last tensor that they were given in the forward: what comes behind it happens once.
  const bool saves = std::ranges::any_of(saved_, [](const Saved& s) { return s.kind != Saved::Kind::Sizes; });
  const auto draws = [&](const ir::Node* n) { return n->id < joint_.backward && (n->op->flags & (ir::kRandom | ir::kEffect)); };
  const bool writes = joint_.level == 0 && (!joint_.program.mutations.empty() || std::ranges::any_of(joint_.program.graph->nodes(), draws));
  writes_behind_hooks_ = joint_.tape->writes_last ? saves || joint_.tape->hands_out : writes && saves != joint_.tape->hands_out;
  for (const Saved& s : saved_) {
    const bool output = s.kind == Saved::Kind::Result, users = output || s.kind == Saved::Kind::Given;
    const bool found = users && joint_.tape->finds({}, output, s.index);
    given_to_hooks_.push_back(s.kind != Saved::Kind::Sizes && !found);
    const auto finds = [&](const Tape::Step& step) {
      const auto& all = output ? step.found_outputs : step.found_given;
      return std::ranges::find(all, s.index) != all.end();
    };
    finds_what_hooks_take_ = finds_what_hooks_take_ || (users && !found && std::ranges::any_of(joint_.tape->steps, finds));
  }
  gives_hooks_ = std::ranges::find(given_to_hooks_, 1) != given_to_hooks_.end();
  if (gives_hooks_) find_made();
  // What the halves read, and gradients of the gradients may.
  std::unordered_set<const ir::Node*> read;
  for (Value v : forward.outputs)
    if (v) read.insert(v.node);
  for (ir::Node* n : forward.nodes()) ir::for_each_input(*n, [&](Value& v) { read.insert(v.node); });
  needs_.resize(joint_.given.size());
  for (size_t i = 0; i < needs_.size(); ++i) needs_[i] = read.contains(forward.inputs[i].value.node);
  for (const Saved& s : saved_)
    if (s.kind == Saved::Kind::Given) needs_[s.index] = 1;
  for (const ResultSpec& r : joint_.program.results)
    if (r.kind == ResultSpec::Kind::Input || r.kind == ResultSpec::Kind::ViewOfInput) needs_[r.index] = 1;
  for (uint32_t o = 0; o < joint_.num_forward && joint_.level; ++o) {
    const ir::NodeSet behind = forward.outputs[o] ? nodes_behind(forward, {forward.outputs[o]}) : ir::NodeSet(forward);
    std::vector<char>& reads = reads_.emplace_back(joint_.given.size());
    for (size_t i = 0; i < reads.size(); ++i) reads[i] = behind.contains(forward.inputs[i].value.node);
  }
  std::unordered_set<Value> was;
  for (const JointProgram::Was& w : joint_.was) was.insert(w.was);
  const ir::Graph& g = *joint_.program.graph;
  const std::vector<Value> gradients(joint_.outputs.begin() + joint_.num_forward, joint_.outputs.end());
  const ir::NodeSet behind = nodes_behind(g, gradients);
  const bool chooses = std::ranges::any_of(joint_.tape->steps, [](const Tape::Step& s) { return capture::of_python(*s.node); });
  for (size_t i = 0; i < joint_.given.size(); ++i) {
    // By eager's nodes, of what the program has computed: some formulas read it only where they are differentiated themselves.
    const bool saved = joint_.level && given[i] && !is_input(*joint_.given[i].node);
    if (changes[i] || !(saved || chooses || ends_between(joint_) || behind.contains(joint_.given[i].node) || was.contains(joint_.given[i]))) continue;
    kept_given_.push_back(static_cast<uint32_t>(i));
    needs_[i] = needs_[i] || saved || (joint_.level && chooses && !joint_.unkept.contains(joint_.given[i]));
  }
}

void Training::keep(Call& call, const std::vector<const at::Tensor*>& given, std::vector<at::Tensor>& values, bool hooks,
                    const Origin* origin) const {
  const std::vector<Hold>& holds = tape().holds;
  auto of_given = [&](size_t i) {
    const Hold how = i < holds.size() ? holds[i] : Hold::Memory;
    return origin ? origin->given[i].for_level(how) : Kept(*given[i], how);
  };
  call.sized = ctx().dynamic();
  call.given.resize(given.size());
  for (uint32_t i : kept_given_) call.given[i] = of_given(i);
  if (call.sized)
    for (size_t i = 0; i < given.size(); ++i)
      if (!call.given[i].tensor.defined() && given[i]->defined()) call.given[i] = Kept::sizes_of(*given[i]);
  call.kept.resize(saved_.size());
  if (hooks) call.hooked.resize(saved_.size());
  if (hooks && call.sized) call.behind_hooks.resize(saved_.size());
  for (size_t k = 0; k < saved_.size(); ++k) {
    const Saved& s = saved_[k];
    if (s.kind == Saved::Kind::Sizes) {
      call.kept[k] = Kept::sizes_of(*given[s.index]);
      continue;
    }
    at::Tensor in_given;
    if (s.kind == Saved::Kind::Result && written_[s.index] >= 0) in_given = *given[static_cast<size_t>(written_[s.index])];
    at::Tensor& value = s.kind == Saved::Kind::Private ? values[joint_.num_forward + s.index] : in_given.defined() ? in_given : values[s.index];
    if (const at::Tensor& t = s.kind == Saved::Kind::Given ? *given[s.index] : value;
        k < call.behind_hooks.size() && !s.bits && t.defined() && t.layout() == at::kStrided)
      call.behind_hooks[k] = Kept::sizes_of(t);
    if (hooks && given_to_hooks_[k])
      call.hooked[k] = s.kind == Saved::Kind::Given ? SavedVariable(*given[s.index], false)
                                                    : SavedVariable(value, static_cast<const RegionCall&>(call).made(value));
    else if (s.kind == Saved::Kind::Given)
      call.kept[k] = s.snapshot ? Kept(*given[s.index]) : of_given(s.index);
    else if (s.kind == Saved::Kind::Result)
      call.kept[k] = Kept(value, s.snapshot || s.index >= tape().holds_results.size() ? Hold::Memory : tape().holds_results[s.index]);
    else {  // a custom op may have counted its writes to it
      call.kept[k].version = version_of(value);
      call.kept[k].tensor = std::move(value);
    }
  }
  if (hooks && gives_hooks_ && saved_hooks_compute_again()) {
    call.plan = number_of_saved(sizes_of(call, {}));
    call.hooked.emplace_back(at::full({1}, call.plan, at::kLong), false);
  }
}

// The other nodes of the call that this backward comes to after this one, each with the places at which gradients come to it. Of one that has several
// it is not known to which.
std::vector<std::pair<const RegionNode*, std::vector<char>>> RegionNode::later() const {
  std::vector<std::pair<const RegionNode*, std::vector<char>>> r;
  const JointProgram& j = call_->joint;
  const std::vector<Edge> places = call_->places();
  for (size_t p = 0; p < j.parts.size(); ++p) {
    if (p == part_ || j.parts[p].places.size() != 1) continue;
    const size_t k = j.parts[p].places[0];
    const auto* node = dynamic_cast<const RegionNode*>(places[k].function.get());
    if (!node || !comes_to_node(node) || node->sequence_nr() > sequence_nr()) continue;
    std::vector<char> come(j.places());
    come[k] = 1;
    r.emplace_back(node, std::move(come));
  }
  return r;
}

std::optional<size_t> Training::first_finding(const Path& path, uint32_t index) const {
  const bool given = index < joint_.given.size();
  const uint32_t at = given ? index : joint_.program.results[index - joint_.given.size()].index;
  return tape().first(path, [&](const Tape::Step& s) {
    const std::vector<uint32_t>& found = given ? s.found_given : s.found_outputs;
    return std::ranges::find(found, at) != found.end();
  });
}

void RegionNode::raise_first(std::vector<char> given, const std::vector<char>& come, const Path& path) const {
  const Tape& tape = region_->tape();
  std::optional<size_t> first;
  std::function<void()> raise;
  const auto turn = [&](size_t i) { return std::pair(~tape.steps[i].number, i); };
  const auto note = [&](std::optional<size_t> step, std::function<void()> how) {
    if (!step || (first && turn(*first) <= turn(*step))) return;
    first = step;
    raise = std::move(how);
  };
  struct Way {
    Path all, own;
    bool meets(size_t step) const { return on(all, step) || on(own, step); }
  };
  // Of what `node` runs: formulas are asked on one way, and what is saved is unpacked on the other, which is longer where no gradient comes.
  const auto find = [&](const RegionNode& node, const Path& path, const Way& asks, const Way& unpacks) {
    for (const RegionCall::Watched& w : call_->watched) {
      if (w.has_node && w.is_detached()) note(tape.first_reading_itself(path, w.is_output, w.index), refuse_detached);
      const auto now = static_cast<int64_t>(w.version.current_version());
      if (now == w.expected) continue;
      note(tape.first_reading(path, w.is_output, w.index), [this, &w = w, now] {
        refuse_changed(region_->type_of_watched(w.is_output, w.index), at::Tensor(w.tensor.lock()),
                       w.is_output && w.has_node ? ", which is output " + std::to_string(w.index) + " of " + name() + "," : "", now, w.expected);
      });
    }
    for (const RegionCall::Given& g : call_->computed_again)
      if (const at::Tensor now(g.tensor.lock()); now.defined() && is_spoiled(now.unsafeGetTensorImpl()))
        note(region_->first_finding(path, g.index), [now] { now.grad_fn(); });  // raises
    for (const Tape::Failing& f : tape.failing) {
      const bool whole = !is_of_grad();
      const auto asked = [&](uint32_t g) { return whole || is_asked(node.next_edge(g)); };
      if (!asks.meets(f.step)) continue;
      if (f.always || std::ranges::any_of(f.next, [&](uint32_t n) { return on(asks.all, n); }) || std::ranges::any_of(f.gradients, asked))
        note(f.step, f.raise);
    }
    for (const RegionCall::Raised& r : call_->raised) {
      if (!(capture::is_of_formula(tape.steps[r.step].raises) ? asks : unpacks).meets(r.step)) continue;
      note(r.step, [this, &r = r, &tape] {
        const Tape::Step& step = tape.steps[r.step];
        const int64_t now = r.version ? static_cast<int64_t>(r.version->current_version()) : 0;
        if (!r.tensor) capture::raise_as_torch(r.version ? with_writes(step.raises, now - r.expected) : step.raises);
        TORCH_CHECK(now != r.expected, "vitrify: a custom op was to write to what a gradient reads, and has counted no write in this call");
        refuse_changed(region_->type_of_watched(false, static_cast<uint32_t>(step.stale)), at::Tensor(r.tensor->lock()), "", now, r.expected);
      });
    }
  };
  note(call_->spent(path), [] { TORCH_CHECK(false, torch::autograd::ERR_BACKWARD_TWICE); });
  try {
    const auto lock = call_->lock();
    // Before it begins: also what raises where other nodes of the call go on with the gradients. That way leads to none that are asked for where they
    // stop at a result.
    const auto way_from = [&](const std::vector<char>& places) {
      if (call_->raised.empty() && tape.failing.empty()) return Way();
      return Way{region_->path_of(places, *this, true), region_->path_of(places, *this)};
    };
    for (size_t k = 0; k < without_.size(); ++k) given[k] = given[k] || without_[k];
    find(*this, path, way_from(given), way_from(come));
    // Eager runs all in one order: what raises here does only when those have run that come before it, also those that other nodes of the call stand
    // for.
    if (first && std::ranges::find(given, 1) != given.end())
      for (const auto& [node, places] : later()) {
        const Path behind = region_->path_of(places, *node, true);
        if (!behind.empty()) find(*node, behind, Way{behind, behind}, Way{behind, behind});
      }
    if (raise) raise();
  } catch (...) {  // it has run those before
    Path before(tape.steps.size());
    for (size_t i = 0; i < before.size() && first; ++i) before[i] = on(path, i) && turn(i) < turn(*first);
    if (!torch::autograd::get_current_graph_task_keep_graph()) call_->free(before);
    throw;
  }
}

void RegionNode::find_without(const variable_list& tangents, const std::vector<char>& come, bool behind_stops) {
  without_.clear();
  const std::vector<Tape::Step>& steps = region_->tape().steps;
  if (!region_->tape().own) return;
  std::vector<char> without(come.size());
  for (size_t k = 0; k < come.size(); ++k) without[k] = come[k] && !tangents[k].defined();
  if (std::ranges::find(without, 1) == without.end()) return;
  const std::vector<char> given = which_defined(tangents);
  const bool some = std::ranges::find(given, 1) != given.end();
  const Path others = some ? region_->path_of(given, *this, behind_stops) : Path(steps.size());
  const int now = torch::autograd::get_current_graph_task_id();
  const auto lock = call_->lock();
  for (size_t k = 0; k < without.size(); ++k) {
    if (!without[k]) continue;
    std::vector<char> only(without.size());
    only[k] = 1;
    const Path path = region_->path_of(only, *this, behind_stops);
    bool runs = false;
    for (size_t i = 0; i < steps.size(); ++i)
      runs = runs || (steps[i].own && on(path, i) && !on(others, i) && (call_->ran.empty() || call_->ran[i] != now));
    without[k] = runs;
  }
  if (std::ranges::find(without, 1) != without.end()) without_ = std::move(without);
}

variable_list RegionNode::apply(variable_list&& given) {
  std::lock_guard<std::mutex> lock(mutex_);
  freed_ = false;
  variable_list tangents = by_place(std::move(given));
  std::vector<char> come = places_come(tangents);
  const JointProgram& j = call_->joint;
  std::vector<char> behind;  // edges to places
  find_without(tangents, come, true);
  if (std::ranges::none_of(tangents, &at::Tensor::defined)) {
    if (j.level > 0) {
      freed_ = !torch::autograd::get_current_graph_task_keep_graph();
      variable_list none(num_outputs());
      skip_unreached(*this, none, num_outputs(), {});
      return none;
    }
    // Eager comes to the nodes behind all the same: they unpack what they have saved, and let go of it.
    stops_.assign(j.parts.empty() ? 0 : j.places(), 0);
    if (!j.parts.empty())
      for (uint32_t p : j.parts[part_].stops) stops_[p] = is_asked(next_edge(j.edge_to(p)));  // there their own nodes are come to
  } else {
    find_stops(tangents, come);
  }
  find_without(tangents, come, false);
  for (size_t k = 0; k < come.size(); ++k) come[k] = come[k] || tangents[k].defined();
  if (j.level == 0 && !j.parts.empty()) {  // the others' nodes would run users' derivatives
    behind.resize(num_outputs());
    for (size_t k = 0; k < come.size(); ++k)
      if (come[k])
        for (uint32_t p : j.way(k).behind) behind[j.edge_to(p)] = 1;
  }
  const Path path = region_->path_of(come, *this);
  const std::vector<char> with_gradient = which_defined(tangents);
  raise_first(with_gradient, come, path);
  call_->check_unfollowed(path);
  const auto reached = [&] {
    std::vector<char> r = region_->tape().edges_on(path, edges_out());
    r.resize(num_outputs());
    for (size_t e = 0; e < behind.size(); ++e) r[e] = r[e] || behind[e];
    for (size_t k = 0; k < stops_.size() && j.level > 0; ++k)  // the nodes of the level below are come to
      if (stops_[k] && region_->tape().comes_to_place(path, k)) r[j.edge_to(k)] = 1;
    return r;
  };
  if (without_.empty() && std::ranges::none_of(tangents, &at::Tensor::defined)) {
    freed_ = !torch::autograd::get_current_graph_task_keep_graph();
    variable_list none(num_outputs());
    if (freed_) call_->free(path);
    skip_unreached(*this, none, num_outputs(), reached());
    return none;
  }
  if (region_->tape().own) {
    const auto lock = call_->lock();
    call_->ran.resize(path.empty() ? region_->tape().steps.size() : path.size(), kNone);
    for (size_t i = 0; i < call_->ran.size(); ++i)
      if (on(path, i)) call_->ran[i] = torch::autograd::get_current_graph_task_id();
  }
  TORCH_CHECK(
      call_->come_once(path),
      "Trying to backward an extra time. You are only allowed to backward once on any region computed under selective activation checkpoint.");
  auto free = [&] {
    if (!torch::autograd::get_current_graph_task_keep_graph() && !std::exchange(freed_, true)) call_->free(path);
  };
  variable_list grads;
  if (c10::GradMode::is_enabled()) {
    grads = region_->differentiable_backward(call_, tangents, *this);
  } else {
    const Unpack needed = [&](const BackwardProgram& b, bool last) {
      std::vector<Kept> kept;
      for (uint32_t k : b.saved) kept.push_back(call_->unpack(k, getptr()));
      if (std::ranges::any_of(kept, &Kept::freed)) check_freed(kept, *b.graph, region_->asked_of(b, *this));
      region_->check_changed(b, kept, *this, path, [&] { raise_first(with_gradient, come, region_->path_of(come, *this, true)); });
      const Fit fit = take_as_it_is_now(kept, *b.graph);
      std::vector<at::Tensor> saved;
      for (Kept& k : kept) saved.push_back(std::move(k.tensor));
      if (last) free();  // the plan drops each as it goes
      return std::pair(std::move(saved), fit);
    };
    grads = region_->backward(needed, std::move(tangents), *this);
  }
  free();
  grads.resize(num_outputs());  // those past what raises have none
  describe_inner(grads);
  if (std::ranges::any_of(grads.begin(), grads.end(), [](const at::Tensor& t) { return !t.defined(); }))
    skip_unreached(*this, grads, num_outputs(), reached());
  return grads;
}

void RegionNode::release_variables() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (call_ && !freed_ && call_->joint.parts.size() <= 1) call_->free_all();  // of several, others may go on
}

bool is_training(const CompiledGraph& g) { return dynamic_cast<const Training*>(&g) != nullptr; }

std::shared_ptr<CompiledGraph> compile_training(JointProgram j, std::shared_ptr<Tracer> trace, const Options& options) {
  return std::make_shared<Training>(std::move(j), std::move(trace), options);
}

}  // namespace vitrify
