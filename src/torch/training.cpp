#include "torch/training.h"

#include <ATen/LegacyBatchedTensorImpl.h>
#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>
#include <ranges>
#include <set>
#include <unordered_set>

#include "ops/lowering.h"
#include "support/counters.h"
#include "sym/known.h"
#include "torch/absent.h"
#include "torch/bits.h"
#include "torch/convert.h"
#include "torch/derivatives.h"
#include "torch/formulas.h"
#include "torch/graph_task.h"
#include "torch/kept.h"
#include "torch/learned.h"
#include "torch/mode.h"
#include "torch/region_node.h"
#include "torch/slice.h"
#include "torch/split.h"
#include "torch/sym_node.h"
#include "torch/tangents.h"
#include "torch/tape.h"
#include "torch/versions.h"
#include "torch/view_path.h"
#include "torch/write_history.h"

namespace vitrify {

namespace {

using ir::Value;
using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

constexpr int kMaxRenewals = 4;      // derivatives taken again, with more learned
constexpr int64_t kMaxSingles = 64;  // backwards for the tangents of one batch: ATen's own ops take larger ones whole
constexpr size_t kMaxLayouts = 8;    // of tangents in strides of their own

// What a derivative needs of what was saved, and whether plans can read it; the last one to ask leaves nothing.
using Unpack = std::function<std::pair<std::vector<at::Tensor>, Fit>(const BackwardProgram&, bool last)>;

}  // namespace

class Training final : public CompiledGraph, public std::enable_shared_from_this<Training> {
 public:
  Training(JointProgram j, std::shared_ptr<Tracer> trace, const Options& options)
      : joint_(std::move(j)), trace_(std::move(trace)), options_(options) {
    Split s = [&] {
      StageTimer timer("split");
      return split(joint_, options_);
    }();
    saved_ = std::move(s.saved);
    kept_bytes_ = s.kept_bytes;
    if (!joint_.tape) joint_.tape = std::make_shared<Tape>();
    find_read(*s.forward.graph);
    for (size_t i = 0; i < joint_.tape->steps.size(); ++i) {
      if (!joint_.tape->steps[i].raises.empty()) raising_.push_back(i);
      reads_state_ = reads_state_ || joint_.tape->steps[i].python;
      of_user_ = of_user_ || joint_.tape->steps[i].of_user;
    }
    derivative_ = s.backward.graph;
    for (const ir::Node* n : derivative_->nodes())
      for (const ir::TensorType& t : n->outs) static_ = static_ && (is_undefined(t) || capture::is_static(t));
    forward_ = CompiledGraph::compile(std::move(s.forward), options_);
    results_ = ResultMaker(joint_.program.results);
    const Layouts all = all_results();
    for (uint32_t p = 0; p < joint_.parts.size(); ++p) {
      const std::vector<uint32_t>& places = joint_.parts[p].places;
      for (uint32_t i = 0; i < places.size(); ++i) input_of_[places[i]] = {p, i};
    }
    backwards_[all] = std::make_shared<Backward>(std::move(s.backward), all);
    // What its passes assume of sizes must be among the guards that the door reads now.
    if (joint_.program.graph->ctx().dynamic()) backward_for(all);
    built_ = true;
    options_.compile_budget_s = 1e9;  // a backward is needed once its forward has run
  }

  std::vector<at::Tensor> run(at::ArrayRef<at::Tensor> args) override {
    std::vector<at::Tensor> out;
    run(args, out);
    return out;
  }

  void run(at::ArrayRef<at::Tensor> args, std::vector<at::Tensor>& out) override { run(args, out, nullptr); }

  void run(at::ArrayRef<at::Tensor> args, std::vector<at::Tensor>& out, const Origin* origin) {
    std::vector<const at::Tensor*> given;
    for (const at::Tensor& t : args) given.push_back(&t);
    for (const at::Tensor& t : joint_.program.captured) given.push_back(&t);
    for (const JointProgram::Root& r : joint_.roots)
      if (r.written >= 0) check_written(*given[r.written]);
    // Before anything is written: the edge of a view that was written through would be another.
    auto edge_of = [&](size_t i) { return origin ? origin->edges[i] : torch::autograd::impl::gradient_edge(*given[i]); };
    torch::autograd::edge_list edges;
    for (const Gradient& g : joint_.gradients) edges.push_back(edge_of(g.given));
    for (uint32_t i : joint_.past_raising) edges.push_back(edge_of(i));
    if (joint_.failed)  // it is raised when autograd comes here on its way to any of them
      for (size_t i = 0; i < given.size(); ++i)
        if (origin ? origin->edges[i].is_valid() : given[i]->defined() && given[i]->requires_grad()) edges.push_back(edge_of(i));
    std::vector<Edge> before(joint_.roots.size());
    for (size_t k = 0; k < before.size(); ++k)
      if (joint_.roots[k].written >= 0 && given[joint_.roots[k].written]->requires_grad())
        before[k] = torch::autograd::impl::gradient_edge(*given[joint_.roots[k].written]);
    std::vector<RegionCall::Raised> raised;
    for (size_t s : raising_) {
      const Tape::Step& step = joint_.tape->steps[s];
      raised.push_back({s});
      if (step.stale < 0 || !counts_versions(*given[static_cast<size_t>(step.stale)])) continue;
      raised.back().version = given[static_cast<size_t>(step.stale)]->unsafeGetTensorImpl()->version_counter();
      raised.back().expected = version_of(*given[static_cast<size_t>(step.stale)]) + step.expected;
    }
    std::vector<at::Tensor> values;
    forward_->run(args, values);
    out.clear();
    results_.make(values, given, out, 0);

    const bool hooked = at::SavedTensorDefaultHooks::get_hooks().has_value();
    auto call = std::make_shared<RegionCall>(joint_, derivative_, origin ? origin->call : nullptr);
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
    if (joint_.parts.empty()) {
      nodes.push_back(compat::make_node<RegionNode>(shared_from_this(), call, 0));
      nodes[0]->set_next_edges(std::move(edges));
      for (size_t k = 0; k < joint_.roots.size(); ++k) set_history(k, nodes[0]);
    }
    for (size_t p = 0; p < joint_.parts.size(); ++p) {
      nodes.push_back(compat::make_node<RegionNode>(shared_from_this(), call, p));
      torch::autograd::edge_list own(joint_.edge_to(joint_.places()));
      for (uint32_t e : joint_.parts[p].edges) own[e] = edges[e];
      for (uint32_t k : joint_.parts[p].stops) own[joint_.edge_to(k)] = edge_to_place(k, nodes, values, given, out);
      nodes[p]->set_next_edges(std::move(own));
      for (uint32_t k : joint_.parts[p].places) set_history(k, nodes[p]);
      results_.make(values, given, out, static_cast<uint32_t>(p) + 1);
    }
    call->oldest = nodes[0]->sequence_nr();
    keep(*call, given, values, hooked, origin);
    call->raised = std::move(raised);
    for (uint32_t i : read_given_)  // hooks keep what it was
      if (!hooked) call->watch(*given[i], origin ? origin->given[i].version : version_of(*given[i]), false, i);
    for (uint32_t o : read_outputs_)
      if (!hooked)
        call->watch(written_[o] < 0 ? values[o] : *given[static_cast<size_t>(written_[o])],
                    version_of(written_[o] < 0 ? values[o] : *given[static_cast<size_t>(written_[o])]), true, o);
    results_.make(values, given, out);
    for (uint32_t k = 0; k < joint_.roots.size(); ++k)
      if (const auto& views = joint_.roots[k].views; views.size() > 1)
        for (uint32_t v = 0; v < views.size(); ++v) call->add_view(k, v, out[views[v]]);
  }

  // Gradients for the defined tangents: one per edge, undefined where there is none. `unpack` gives what that derivative needs of what was saved.
  variable_list backward(const Unpack& unpack, variable_list tangents, const RegionNode& node) const {
    if (joint_.failed) std::rethrow_exception(joint_.failed);
    if (!is_of_grad())
      for (size_t k = 0; k < joint_.roots.size(); ++k)
        if (tangents[k].defined() && !joint_.roots[k].refuses.empty()) throw std::runtime_error(joint_.roots[k].refuses);
    if (is_stale()) return op_by_op(unpack, tangents, node);
    const bool batched = !all_plain(tangents);
    if (batched && !is_batch(tangents)) return op_by_op(unpack, tangents, node);
    if (batched && !static_) return one_by_one(unpack, tangents, node);
    std::optional<capture::InBatch> no_batch;
    if (batched) no_batch.emplace(false);  // what runs is a plan of whole batches
    Layouts how = batched ? batches_of(tangents, node) : layouts_of(tangents, node);
    pass_checkpoints(how, node);
    std::shared_ptr<const Backward> b;
    variable_list grads;
    for (int refused = 0;;) {
      try {
        b = backward_for(how);
      } catch (const CaptureError& e) {
        if (!batched) throw;
        no_batch.reset();
        return one_by_one(unpack, tangents, node, e.what());
      }
      const bool last = b->proven || (b->certain && !strides_show(node, node.edges_shown()));  // it will not be run again
      auto [saved, fit] = unpack(b->program, last);
      for (size_t k = 0; k < tangents.size(); ++k)
        if (tangents[k].defined()) saved.push_back(laid_out(tangents[k], type_of_tangent(k), b->tangents[k]));
      if (fit == Fit::BySizes && take_by_sizes(saved, *b->program.graph, b->program.saved.size())) fit = Fit::Yes;
      if (fit != Fit::Yes) {
        ResultMaker(b->program.results).make(interpret(*b->program.graph, saved), addresses_of(saved), grads);
        break;
      }
      try {
        if (last) {
          tangents.clear();
          b->plan->run_consuming(saved, grads);
        } else {
          b->plan->run(saved, grads);
        }
        if (last || !b->plan->learned() || draws(*b->program.graph) || !strides_show(node, node.edges_shown()) || refused++ == kMaxRenewals) break;
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
      if (batched && grads[k].defined() && b->program.batch_dims[k] >= 0)
        grads[k] = at::addBatchDim(std::move(grads[k]), 1, b->program.batch_dims[k]);
      all[b->program.gradients[k]] = std::move(grads[k]);
    }
    return all;
  }

  // Those of a batch that no plan has whole: its formulas fix sizes, or look at values.
  variable_list one_by_one(const Unpack& unpack, const variable_list& tangents, const RegionNode& node, const std::string& why = "") const {
    const int64_t n = size_of_batch(tangents);
    std::vector<variable_list> each;
    {
      capture::InBatch no_batch(false);
      Layouts how = layouts_of(one_of_batch(tangents, 0), node);
      pass_checkpoints(how, node);
      if (n <= kMaxSingles && !draws(*backward_for(how)->program.graph)) {
        const Unpack kept = [&](const BackwardProgram& b, bool) { return unpack(b, false); };
        for (int64_t i = 0; i < n; ++i) {
          each.push_back(backward(kept, one_of_batch(tangents, i), node));
          if (i == 0 && has_dims_of_one(each[0])) break;
        }
        if (!each.empty() && has_dims_of_one(each[0])) each.clear();
      }
    }
    if (each.empty()) {
      if (!why.empty()) warn_once("batched gradients", why);
      return op_by_op(unpack, tangents, node);
    }
    return as_batch(each);
  }

  // The same through ATen, for tangents that kernels cannot read.
  variable_list op_by_op(const Unpack& unpack, const variable_list& tangents, const RegionNode& node) const {
    ++counters().fallbacks;
    Layouts how = node.layouts(tangents);
    pass_checkpoints(how, node);
    const std::shared_ptr<const Backward> b = [&] {
      std::lock_guard lock(mutex_);
      return is_stale() ? derivative(how) : backward_known(how);
    }();
    std::vector<at::Tensor> inputs = unpack(b->program, false).first, grads;
    for (const at::Tensor& t : tangents)
      if (t.defined()) inputs.push_back(t);
    ResultMaker(b->program.results).make(interpret(*b->program.graph, inputs), addresses_of(inputs), grads);
    variable_list all(num_edges());
    for (size_t k = 0; k < grads.size(); ++k) all[b->program.gradients[k]] = std::move(grads[k]);
    return all;
  }

  Layouts batches_of(const variable_list& tangents, const RegionNode& node) const {
    Layouts how = node.layouts(tangents);
    for (size_t k = 0; k < tangents.size(); ++k)
      if (how[k].defined && !take_batch(tangents[k], how[k])) take_strides(tangents[k], type_of_tangent(k), how[k]);
    return how;
  }

  // The same as a compiled call of its own, which has gradients too.
  variable_list differentiable_backward(const std::shared_ptr<Call>& call, const variable_list& tangents, RegionNode& node) const {
    if (joint_.failed) std::rethrow_exception(joint_.failed);
    if (!all_plain(tangents)) {
      if (!is_batch(tangents) || !of_user_) return by_formulas(*call, tangents, node, "tangents that are no plain tensors");
      std::vector<variable_list> each;
      for (int64_t i = 0, n = size_of_batch(tangents); i < n; ++i) each.push_back(differentiable_backward(call, one_of_batch(tangents, i), node));
      return as_batch(each);
    }
    Layouts how = layouts_of(tangents, node);
    pass_checkpoints(how, node);
    for (size_t k = 0; k < tangents.size(); ++k) how[k].needs_grad = tangents[k].defined() && tangents[k].requires_grad();
    for (int refused = 0;;) {
      const auto [next, why] = next_level(how);
      if (!next) {
        for (size_t k = 0; k < how.size(); ++k)
          TORCH_CHECK(!how[k].defined || !joint_.way(k).checkpointed,
                      "vitrify: gradients of gradients that a reentrant checkpoint gives cannot be compiled: ", why);
        warn_once("gradients of the gradients", why);
        return by_formulas(*call, tangents, node, why);
      }
      const Origin origin = next->origin(*this, call, tangents, how, node);
      std::vector<at::Tensor> given;
      for (const Kept& k : origin.given) given.push_back(k.tensor);
      if (!take_given(origin, given, next->joint_, next->needs_)) return by_formulas(*call, tangents, node, "what was saved is not as it was");
      try {
        variable_list all;
        next->run(given, all, &origin);
        return all;
      } catch (const capture::PlanRefused& e) {  // as in backward()
        std::lock_guard lock(mutex_);
        if (refused++ == kMaxRenewals)
          next_[how] = {nullptr, e.what()};
        else if (auto at = next_.find(how); at != next_.end() && at->second.program == next)
          next_.erase(at);
      }
    }
  }

  // Which steps of eager's backward the one under way stands for.
  Path path_of(const variable_list& tangents, const RegionNode& node) const {
    const bool some = is_of_grad();
    if (!some && joint_.parts.empty() && std::ranges::all_of(tangents, [](const at::Tensor& t) { return t.defined(); })) return {};
    const std::function<bool(size_t)> asked = [&](size_t g) { return comes_to(node.next_edge(g)); };
    return joint_.tape->path([&](size_t k) { return tangents[k].defined(); }, some ? &asked : nullptr, node.stops());
  }
  const Tape& tape() const { return *joint_.tape; }

  // What of it a derivative reads was changed, but not what eager reads on that path: it may not matter.
  void check_changed(const BackwardProgram& b, const std::vector<Kept>& saved, const Node& node, const Path& path) const {
    for (size_t k = 0; k < saved.size(); ++k) {
      if (!saved[k].changed()) continue;
      const auto given =
          std::ranges::find(joint_.given, b.saved[k] < saved_.size() ? saved_[b.saved[k]].value : joint_.given[b.saved[k] - saved_.size()]);
      if (given != joint_.given.end() && tape().finds(path, false, static_cast<uint32_t>(given - joint_.given.begin()))) continue;
      if (const Saved* s = b.saved[k] < saved_.size() ? &saved_[b.saved[k]] : nullptr;
          s && s->kind == Saved::Kind::Result && tape().finds(path, true, s->index))
        continue;
      std::vector<Value> asked;
      for (size_t g = 0; g < b.gradients.size(); ++g)
        if (comes_to(node.next_edge(b.gradients[g]))) asked.push_back(b.graph->outputs[b.results[g].index]);
      if (nodes_behind(*b.graph, asked).contains(b.graph->inputs[k].value.node)) refuse(saved[k], b.graph->inputs[k].value.type());
    }
  }

  const ir::TensorType& type_of_watched(bool is_output, uint32_t index) const {
    return (is_output ? joint_.outputs[index] : joint_.given[index]).type();
  }
  const Program& program() const override { return joint_.program; }
  Stats stats() const override {
    Stats s = forward_->stats();
    s.kept_bytes = kept_bytes_;
    return s;
  }
  double estimated_us() const override { return std::max(100.0, forward_->estimated_us()); }
  std::string describe() const override {
    std::string s = "forward:\n" + forward_->describe();
    std::lock_guard lock(mutex_);
    for (auto& [mask, b] : backwards_)
      if (b) s += "\nbackward:\n" + (b->plan ? b->plan->describe() : ir::print(*b->program.graph));
    return s;
  }

 private:
  struct Backward {
    Backward(BackwardProgram p, Layouts how) : program(std::move(p)), tangents(std::move(how)) {}
    BackwardProgram program;
    std::shared_ptr<CompiledGraph> plan;  // made when first needed
    Layouts tangents;
    bool certain = false;                     // no kernel can give a size that was not recorded: there is a rule for each
    mutable std::atomic<bool> proven{false};  // has run to the end once
  };

  const ir::TensorType& type_of_tangent(size_t k) const { return joint_.tangent(k).type(); }
  size_t num_edges() const { return joint_.parts.empty() ? joint_.gradients.size() : joint_.edge_to(joint_.places()); }
  Layouts all_results() const {
    Layouts how(joint_.places());
    for (size_t k = joint_.roots.size(); k < how.size(); ++k) how[k].defined = false;
    return how;
  }
  Edge edge_to_place(size_t place, const std::vector<compat::NodePtr>& nodes, const std::vector<at::Tensor>& values,
                     const std::vector<const at::Tensor*>& given, const std::vector<at::Tensor>& results) const {
    if (place >= joint_.roots.size()) {
      const int32_t view = joint_.inner[place - joint_.roots.size()].view;
      if (view >= 0) return torch::autograd::impl::gradient_edge(results[static_cast<size_t>(view)]);
      const auto [part, input] = input_of_.at(place);
      return Edge(nodes[part], input);
    }
    const JointProgram::Root& r = joint_.roots[place];
    return torch::autograd::impl::gradient_edge(r.written < 0 ? values[r.output] : *given[static_cast<size_t>(r.written)]);
  }

  void forget(const std::shared_ptr<const Backward>& b, bool counted = false) const {
    std::lock_guard lock(mutex_);
    learned_ = true;
    if (!counted || renewals_++ < kMaxRenewals) std::erase_if(backwards_, [&](const auto& known) { return known.second == b; });
  }

  [[noreturn]] static void refuse(const Kept& k, const ir::TensorType& type) {
    refuse_changed(type, "", static_cast<int64_t>(k.tensor._version()), k.version);
  }

  void find_read(const ir::Graph& forward) {
    const std::vector<char> returned = returned_outputs(joint_.program, joint_.num_forward);
    std::vector<char> changes(joint_.given.size()), given(joint_.given.size()), outputs(joint_.num_forward);
    written_.assign(joint_.num_forward, -1);
    for (const Mutation& m : joint_.program.mutations) {
      changes[m.input] = 1;  // what it was before is what eager read
      if (!m.metadata_only) written_[m.output] = static_cast<int32_t>(m.input);
    }
    for (const Tape::Step& s : joint_.tape->steps) {
      for (uint32_t i : s.reads_given) given[i] = !changes[i];
      for (uint32_t o : s.reads_outputs) outputs[o] = returned[o] || written_[o] >= 0;
    }
    for (uint32_t i = 0; i < given.size(); ++i)
      if (given[i]) read_given_.push_back(i);
    for (uint32_t o = 0; o < outputs.size(); ++o)
      if (outputs[o]) read_outputs_.push_back(o);
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
    const ir::Graph& g = *joint_.program.graph;
    const std::vector<Value> gradients(joint_.outputs.begin() + joint_.num_forward, joint_.outputs.end());
    const ir::NodeSet behind = nodes_behind(g, gradients);
    const bool chooses = std::ranges::any_of(joint_.tape->steps, [](const Tape::Step& s) { return capture::of_python(*s.node); });
    for (size_t i = 0; i < joint_.given.size(); ++i)
      if (!changes[i] && (chooses || behind.contains(joint_.given[i].node))) kept_given_.push_back(static_cast<uint32_t>(i));
  }

  // `hooks`: they may want to move what is kept.
  void keep(Call& call, const std::vector<const at::Tensor*>& given, std::vector<at::Tensor>& values, bool hooks, const Origin* origin) const {
    const std::vector<Hold>& holds = tape().holds;
    auto of_given = [&](size_t i) {
      const Hold how = i < holds.size() ? holds[i] : Hold::Memory;
      return origin ? origin->given[i].for_level(how) : Kept(*given[i], how);
    };
    call.given.resize(given.size());
    for (uint32_t i : kept_given_) call.given[i] = of_given(i);
    if (joint_.program.graph->ctx().dynamic())
      for (size_t i = 0; i < given.size(); ++i)
        if (!call.given[i].tensor.defined() && given[i]->defined()) call.given[i] = Kept::sizes_of(*given[i]);
    call.kept.resize(saved_.size());
    if (hooks) call.hooked.resize(saved_.size());
    for (size_t k = 0; k < saved_.size(); ++k) {
      const Saved& s = saved_[k];
      if (s.kind == Saved::Kind::Sizes) {
        call.kept[k] = Kept::sizes_of(*given[s.index]);
        continue;
      }
      at::Tensor& value = s.kind == Saved::Kind::Private ? values[joint_.num_forward + s.index] : values[s.index];
      if (hooks)
        call.hooked[k] = s.kind == Saved::Kind::Given ? SavedVariable(*given[s.index], false)
                                                      : SavedVariable(value, static_cast<const RegionCall&>(call).made(value));
      else if (s.kind == Saved::Kind::Given)
        call.kept[k] = s.snapshot ? Kept(*given[s.index]) : of_given(s.index);
      else if (s.kind == Saved::Kind::Result)
        call.kept[k] = Kept(value);
      else
        call.kept[k].tensor = std::move(value);
    }
  }

  // Of what a call of this program, which computes the gradients of the program below, is given.
  Origin origin(const Training& below, const std::shared_ptr<Call>& call, const variable_list& tangents, const Layouts& how, RegionNode& node) const {
    const std::vector<Value>& wanted = joint_.given;
    const size_t own = below.joint_.given.size();
    Origin o{std::vector<Kept>(wanted.size()), torch::autograd::edge_list(wanted.size()), call};
    std::vector<char> found(wanted.size());
    for (uint32_t i = 0; i < own; ++i) found[i] = below.tape().finds({}, false, i);
    std::ranges::copy(call->given, o.given.begin());
    for (Kept& k : o.given) k.take_now();
    const size_t gradients = below.joint_.gradients.size();
    for (size_t g = 0; g < gradients; ++g) o.edges[below.joint_.gradients[g].given] = node.next_edge(g);
    for (size_t p = 0; p < below.joint_.past_raising.size(); ++p) o.edges[below.joint_.past_raising[p]] = node.next_edge(gradients + p);
    for (size_t s = 0; s < below.saved_.size(); ++s) {
      const auto at = static_cast<size_t>(std::ranges::find(wanted, below.saved_[s].value) - wanted.begin());
      if (at == wanted.size() || below.saved_[s].kind == Saved::Kind::Sizes || below.saved_[s].snapshot) continue;
      if (!needs_[at]) {  // but for its sizes, which no guard may know
        if (!capture::is_static(wanted[at].type()) && !below.saved_[s].bits && call->kept[s].tensor.defined())
          o.given[at] = Kept::sizes_of(call->kept[s].tensor);
      } else {
        Kept kept = call->unpack(s, node.getptr());
        TORCH_CHECK(!kept.freed, torch::autograd::ERR_BACKWARD_TWICE);
        o.given[at] = laid_as_recorded(below.saved_[s], std::move(kept));
        if (below.saved_[s].kind == Saved::Kind::Result && below.tape().finds({}, true, below.saved_[s].index)) found[at] = 1;
      }
    }
    size_t k = 0;
    for (size_t i = own; i < wanted.size(); ++i) {
      if (!is_input(*wanted[i].node)) continue;
      while (!how[k].defined) ++k;
      const at::Tensor t = laid_out(tangents[k], below.type_of_tangent(k), how[k]);
      o.given[i] = Kept(t);
      if (t.requires_grad()) o.edges[i] = torch::autograd::impl::gradient_edge(t);
      ++k;
    }
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (!needs_[i]) continue;
      TORCH_CHECK(o.given[i].readable(), is_input(*wanted[i].node) ? "vitrify: a gradient of a gradient of a program that writes to its arguments"
                                                                   : "vitrify: a gradient of a gradient needs random numbers that were not kept");
      o.given[i].check_memory();
      if (found[i]) o.given[i].version = version_of(o.given[i].tensor);  // of the version that it has by now
      if (o.given[i].changed() && reads_for(below, node, i)) refuse(o.given[i], wanted[i].type());
    }
    return o;
  }

  // Whether a gradient that is asked for follows from what this is given there.
  bool reads_for(const Training& below, const Node& node, size_t given) const {
    std::vector<Value> asked;
    for (size_t g = 0; g < below.joint_.gradients.size(); ++g) {
      const ResultSpec& r = joint_.program.results[g];
      if (r.kind == ResultSpec::Kind::Undefined || !comes_to(node.next_edge(g))) continue;
      asked.push_back(r.kind == ResultSpec::Kind::ViewOfInput ? joint_.given[r.index] : joint_.outputs[r.index]);
    }
    std::lock_guard lock(below.mutex_);
    return nodes_behind(*joint_.program.graph, asked, joint_.given).contains(joint_.given[given].node);
  }

  variable_list by_formulas(Call& call, const variable_list& tangents, RegionNode& node, const std::string& why) const {
    TORCH_CHECK(!of_user_, "vitrify: gradients of gradients that an autograd.Function of the program gives cannot be compiled: ", why);
    TORCH_CHECK(node.stops().empty() && std::none_of(tangents.begin() + static_cast<std::ptrdiff_t>(joint_.roots.size()), tangents.end(),
                                                     [](const at::Tensor& t) { return t.defined(); }),
                "vitrify: a gradient of a gradient that is seen on its way through the program cannot be computed by formulas");
    std::vector<at::Tensor> given(joint_.given.size()), saved(saved_.size());
    for (uint32_t i : kept_given_) {
      Kept k = call.given[i];
      k.take_now();
      TORCH_CHECK(k.readable(), torch::autograd::ERR_BACKWARD_TWICE);
      if (k.changed() && !tape().finds({}, false, i)) refuse(k, joint_.given[i].type());
      k.check_memory();
      given[i] = k.tensor.tensor_data();
    }
    for (size_t i = 0; i < given.size(); ++i)
      if (!given[i].defined() && is_input(*joint_.given[i].node)) given[i] = call.stand_in(joint_, saved_, i, node.getptr());
    for (size_t g = 0; g < joint_.gradients.size(); ++g)
      if (at::Tensor& t = given[joint_.gradients[g].given]; t.defined()) torch::autograd::impl::set_gradient_edge(t, node.next_edge(g));
    for (size_t s = 0; s < saved_.size(); ++s)
      if (saved_[s].value.node->op->flags & ir::kRandom) saved[s] = call.unpack(s, node.getptr()).tensor;
    return vitrify::by_formulas(joint_, saved_, given, saved, tangents, mutex_);
  }

  // Eager's gradients are strided as their tangents are, and as the first where several are added: where that shows, each way in which tangents come
  // has a plan of its own.
  Layouts layouts_of(const variable_list& tangents, const RegionNode& node) const {
    Layouts how = node.layouts(tangents);
    bool other = false;
    for (size_t k = 0; k < tangents.size(); ++k)
      other = other || (how[k].defined &&
                        ((k < joint_.roots.size() && joint_.roots[k].views.size() > 1) || !is_recorded(tangents[k], type_of_tangent(k), true)));
    if (!other || !(strides_show(node, node.edges_shown()) || strides_of_ones_show(node))) return how;
    for (size_t k = 0; k < tangents.size(); ++k)
      if (how[k].defined) take_strides(tangents[k], type_of_tangent(k), how[k]);
    node.call().find_views(how);
    for (size_t k = 0; k < joint_.roots.size(); ++k)
      if (how[k].view + 1 == static_cast<int32_t>(joint_.roots[k].views.size())) how[k].view = -1;
    return how;
  }

  // grad() raises where eager's would come to a reentrant checkpoint, and goes past those that lead to nothing it asks for.
  void pass_checkpoints(Layouts& how, const RegionNode& node) const {
    if (joint_.no_grad.empty() || !is_of_grad()) return;
    std::unordered_set<uint32_t> asked;
    for (size_t i = 0; i < joint_.gradients.size(); ++i)
      if (comes_to(node.next_edge(i))) asked.insert(joint_.gradients[i].given);
    for (size_t k = 0; k < how.size(); ++k) {
      if (!how[k].defined || !joint_.way(k).checkpointed) continue;
      if (std::ranges::any_of(joint_.way(k).barred, [&](uint32_t i) { return asked.contains(i); }) ||
          std::ranges::any_of(joint_.way(k).barred_places, [&](uint32_t p) { return how[p].stops; }))
        throw std::runtime_error(joint_.no_grad);
      how[k].past_checkpoints = true;
    }
  }

  std::shared_ptr<const Backward> backward_for(const Layouts& how) const {
    std::lock_guard lock(mutex_);
    return planned(how);
  }

  std::shared_ptr<Backward> planned(const Layouts& how) const {
    if (const auto at = backwards_.find(how); at != backwards_.end() && at->second->plan) return at->second;
    sym::Context& ctx = joint_.program.graph->ctx();
    const sym::Known known = sym::known(ctx);
    const std::shared_ptr<Backward> b = backward_known(how);
    if (b->plan) {  // of another layout, whose gradients are the same
      sym::go_back(ctx, known);
      return b;
    }
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
    p.results = b->program.results;
    p.trained = p.lenient = true;
    b->plan = CompiledGraph::compile(std::move(p), options_);
    if (!built_ || ctx.guards().size() == known.guards.size()) return b;
    sym::go_back(ctx, known);
    std::erase_if(backwards_, [&](const auto& of) { return of.second == b; });
    if (is_other(how) && std::ranges::none_of(how, [](const TangentLayout& l) { return l.batch != 0; }))
      return backwards_[how] = planned(as_recorded(how));
    TORCH_CHECK(false, "vitrify: the gradients through some of the results hold for these sizes only; compile with dynamic=False");
  }

  std::shared_ptr<Backward>& backward_known(const Layouts& how) const {
    if (auto known = backwards_.find(how); known != backwards_.end()) return known->second;
    if (is_other(how) && layouts_++ >= kMaxLayouts) {
      if (std::ranges::any_of(how, [](const TangentLayout& l) { return l.batch != 0; })) throw CaptureError("batches come in too many layouts");
      return backward_known(as_recorded(how));
    }
    if (auto b = made_of_all(how)) return backwards_[how] = std::move(b);
    auto b = derivative(how);
    if (is_other(how))  // many gradients do not follow their tangents
      if (auto plain = backwards_.find(as_recorded(how)); plain != backwards_.end() && plain->second->program.types == b->program.types)
        b = plain->second;
    return backwards_[how] = std::move(b);
  }

  std::shared_ptr<Backward> derivative(const Layouts& how) const {
    StageTimer timer("derivative");
    std::vector<Value> tangents, values;
    const uint32_t first = joint_.program.graph->next_id();
    std::vector<Gradient> gradients = trace_->differentiate(joint_, how, tangents, values);
    return std::make_shared<Backward>(backward_from(joint_, saved_, tangents, std::move(gradients), values, first), how);
  }

  // What Python code in the backward reads is not as it was: no derivative that was taken before holds.
  bool is_stale() const { return reads_state_ && !trace_->state_holds(); }

  // Where all is as in the derivative through all results but for what some of them add to it.
  std::shared_ptr<Backward> made_of_all(const Layouts& how) const {
    const auto all = backwards_.find(all_results());
    if (all == backwards_.end() || learned_) return nullptr;
    std::vector<size_t> absent;
    for (size_t k = 0; k < how.size(); ++k) {
      if (!how[k].defined && k < joint_.roots.size()) absent.push_back(k);
      if (how[k] != TangentLayout{.defined = how[k].defined} || joint_.way(k).checkpointed || (how[k].defined && k >= joint_.roots.size()))
        return nullptr;
    }
    auto b = backward_without(joint_, all->second->program, absent);
    return b ? std::make_shared<Backward>(std::move(*b), how) : nullptr;
  }

  struct Next {
    std::shared_ptr<Training> program;  // null where it cannot be captured
    std::string why;
  };

  Next next_level(Layouts& how) const {
    std::lock_guard lock(mutex_);
    for (TangentLayout& l : how)                                  // the gradient of each of its elements is another
      if (!l.expanded.empty()) l = {.needs_grad = l.needs_grad};  // it is one that is defined
    if (is_other(how) && !next_.contains(how) && layouts_++ >= kMaxLayouts) how = as_recorded(how);
    std::vector<Value> kept;
    for (const Saved& s : saved_)
      if (s.kind != Saved::Kind::Sizes && !s.snapshot) kept.push_back(s.value);
    const bool stale = is_stale();
    if (stale) next_.erase(how);
    auto [at, fresh] = next_.try_emplace(how);
    if (!fresh) return at->second;
    sym::Context& ctx = joint_.program.graph->ctx();
    const sym::Known known = sym::known(ctx);
    try {
      auto program = std::make_shared<Training>(trace_->deepen(joint_, how, kept), trace_, options_);
      if (ctx.guards().size() > known.guards.size()) throw CaptureError("they hold for these sizes only");  // the door has read what it asks of calls
      at->second.program = std::move(program);
    } catch (const CaptureError& e) {
      sym::go_back(ctx, known);
      at->second.why = e.what();
    } catch (...) {
      sym::go_back(ctx, known);
      next_.erase(at);
      throw;
    }
    const Next made = at->second;
    if (stale) next_.erase(at);
    return made;
  }

  void warn_once(const std::string& part, const std::string& why) const {
    {
      std::lock_guard lock(mutex_);
      if (!warned_.insert(why).second) return;
    }
    trace_->warn_eager(part, why);
  }

  JointProgram joint_;
  std::shared_ptr<Tracer> trace_;
  Options options_;
  std::shared_ptr<CompiledGraph> forward_;
  ResultMaker results_{{}};
  std::vector<Saved> saved_;
  std::map<size_t, std::pair<uint32_t, uint32_t>> input_of_;  // by place: the part whose node has it, and as which input
  std::vector<uint32_t> read_given_, read_outputs_;           // that steps of eager's backward have saved and users can change
  std::vector<int32_t> written_;                              // by output of the forward: which of `given` it is written to, or -1
  std::vector<size_t> raising_;                               // steps of eager's backward that raise
  std::vector<uint32_t> kept_given_;                          // that gradients follow from, as they were
  std::vector<char> needs_;                                   // by given: its elements are read
  std::shared_ptr<const ir::Graph> derivative_;               // through all results
  mutable std::mutex mutex_;
  mutable std::map<Layouts, std::shared_ptr<Backward>> backwards_;
  mutable std::map<Layouts, Next> next_;
  mutable std::set<std::string> warned_;
  mutable size_t layouts_ = 0;
  int64_t kept_bytes_ = 0;
  mutable int renewals_ = 0;
  mutable bool learned_ = false;  // something that the first derivative recorded otherwise
  bool built_ = false;
  bool reads_state_ = false;  // its backward runs Python code
  bool of_user_ = false;      // which says what a derivative is
  bool static_ = true;        // no size in the derivative differs from call to call
};

variable_list RegionNode::apply(variable_list&& given) {
  std::lock_guard<std::mutex> lock(mutex_);
  freed_ = false;
  variable_list tangents = by_place(std::move(given));
  if (part_ + 1 < call_->joint.parts.size() && std::ranges::none_of(tangents, &at::Tensor::defined)) {
    freed_ = !torch::autograd::get_current_graph_task_keep_graph();
    variable_list none(num_outputs());
    skip_unreached(*this, none, edges_out());
    return none;
  }
  find_stops(tangents);
  const Path path = region_->path_of(tangents, *this);
  TORCH_CHECK(!call_->spent(path), torch::autograd::ERR_BACKWARD_TWICE);
  for (const RegionCall::Watched& w : call_->watched)
    if (const auto now = static_cast<int64_t>(w.version.current_version()); now != w.expected && region_->tape().reads(path, w.is_output, w.index))
      refuse_changed(region_->type_of_watched(w.is_output, w.index),
                     w.is_output ? ", which is output " + std::to_string(w.index) + " of " + name() + "," : "", now, w.expected);
  for (const RegionCall::Raised& r : call_->raised) {
    if (!on(path, r.step)) continue;
    const Tape::Step& step = region_->tape().steps[r.step];
    if (r.version)
      refuse_changed(region_->type_of_watched(false, static_cast<uint32_t>(step.stale)), "", static_cast<int64_t>(r.version->current_version()),
                     r.expected);
    TORCH_CHECK(false, step.raises);
  }
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
      check_freed(kept, *b.graph);
      region_->check_changed(b, kept, *this, path);
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
  skip_unreached(*this, grads, edges_out());
  return grads;
}

void RegionNode::release_variables() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!freed_ && call_->joint.parts.empty()) call_->free_all();  // of several, others may go on
}

std::shared_ptr<CompiledGraph> compile_training(JointProgram j, std::shared_ptr<Tracer> trace, const Options& options) {
  return std::make_shared<Training>(std::move(j), std::move(trace), options);
}

}  // namespace vitrify
