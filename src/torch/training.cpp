#include "torch/training.h"

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "ops/lowering.h"
#include "passes/partition.h"
#include "pipeline/pipeline.h"
#include "support/counters.h"
#include "torch/learned.h"
#include "torch/slice.h"
#include "torch/view_path.h"

namespace vitrify {

namespace {

using ir::Value;
using torch::autograd::Edge;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

Value root_of(Value v) {
  while (v.node->op->flags & ir::kView) v = std::get<Value>(v.node->args[0]);
  return v;
}

constexpr int kMaxRenewals = 4;  // derivatives taken again, with more learned

// A value the forward keeps for the backward.
struct Saved {
  enum class Kind : uint8_t { Input, Result, Private, Sizes } kind;  // Sizes: of a graph input, whose elements nobody reads
  uint32_t index;                                                    // graph input, graph output, or which of the private ones
  Value value;                                                       // in the graph as recorded
};

class Training;

// What autograd sees of a compiled call.
class RegionNode final : public torch::autograd::Node {
 public:
  RegionNode(std::shared_ptr<const Training> region, bool hooked) : region_(std::move(region)), hooked_(hooked) {}
  variable_list apply(variable_list&& tangents) override;
  void release_variables() override;
  std::string name() const override { return "VitrifyBackward"; }

  void save(const at::Tensor& t, bool is_output) { visible_.emplace_back(t, is_output); }
  void save_private(at::Tensor t) { own_.push_back(std::move(t)); }

 private:
  std::shared_ptr<const Training> region_;
  std::vector<SavedVariable> visible_;  // in the order of Training::saved(), those that users can reach
  std::vector<at::Tensor> own_;         // the others
  bool hooked_;                         // private ones are among the visible: hooks may want to move them
  bool released_ = false;
};

class Training final : public CompiledGraph, public std::enable_shared_from_this<Training> {
 public:
  Training(JointProgram j, std::shared_ptr<Tracer> trace, const Options& options)
      : joint_(std::move(j)), trace_(std::move(trace)), options_(options) {
    build();
    // What its passes assume of sizes must be among the guards that the door reads now.
    if (joint_.program.graph->ctx().num_symbols()) backward_for(std::vector<char>(joint_.roots.size(), 1));
    built_ = true;
  }

  std::vector<at::Tensor> run(at::ArrayRef<at::Tensor> args) override {
    std::vector<at::Tensor> out;
    run(args, out);
    return out;
  }

  void run(at::ArrayRef<at::Tensor> args, std::vector<at::Tensor>& out) override {
    std::vector<const at::Tensor*> inputs;
    for (const at::Tensor& t : args) inputs.push_back(&t);
    for (const at::Tensor& t : program_.captured) inputs.push_back(&t);
    std::vector<at::Tensor> values;
    forward_->run(args, values);

    const bool hooked = at::SavedTensorDefaultHooks::get_hooks().has_value();
    auto node = compat::make_node<RegionNode>(shared_from_this(), hooked);
    torch::autograd::edge_list edges;
    for (uint32_t i : receivers_) edges.push_back(torch::autograd::impl::gradient_edge(*inputs[i]));
    node->set_next_edges(std::move(edges));
    for (const JointProgram::Root& r : joint_.roots) torch::autograd::set_history(values[r.output], node);
    for (const Saved& s : saved_) {
      if (s.kind == Saved::Kind::Input)
        node->save(*inputs[s.index], false);
      else if (s.kind == Saved::Kind::Sizes)
        node->save_private(at::zeros({}, inputs[s.index]->options()).expand(inputs[s.index]->sizes()));
      else if (s.kind == Saved::Kind::Result)
        node->save(values[s.index], values[s.index].grad_fn() == node);
      else if (hooked)
        node->save(values[joint_.num_forward + s.index], false);
      else
        node->save_private(std::move(values[joint_.num_forward + s.index]));
    }
    results_.make(values, inputs, out);
  }

  // Gradients for the defined tangents; one tensor per joint().gradients, undefined where there is none.
  variable_list backward(const std::vector<at::Tensor>& saved, const variable_list& tangents) const {
    std::vector<char> defined;
    for (const at::Tensor& t : tangents) defined.push_back(t.defined());
    std::shared_ptr<const Backward> b = backward_for(defined);
    std::vector<at::Tensor> args(saved), grads;
    for (size_t k = 0; k < tangents.size(); ++k)
      if (tangents[k].defined()) args.push_back(as_recorded(tangents[k], k));
    try {
      b->plan->run(args, grads);
    } catch (const capture::PlanRefused&) {
      // A kernel gave another layout than was recorded. Nothing has been written: op by op this time, and the next derivative knows better.
      grads.clear();
      counters().fallbacks.fetch_add(1, std::memory_order_relaxed);
      ResultMaker(b->results).make(interpret(*b->graph, args, false, true), {}, grads);
      std::lock_guard lock(mutex_);
      if (renewals_++ < kMaxRenewals) backwards_.erase(defined);
    }
    variable_list all(joint_.gradients.size());
    for (size_t k = 0; k < grads.size(); ++k) all[b->gradients[k]] = std::move(grads[k]);
    return all;
  }

  const std::vector<Saved>& saved() const { return saved_; }
  const Program& program() const override { return program_; }
  Stats stats() const override { return forward_->stats(); }
  double estimated_us() const override { return std::max(100.0, forward_->estimated_us()); }
  std::string describe() const override {
    std::string s = "forward:\n" + forward_->describe();
    std::lock_guard lock(mutex_);
    for (auto& [mask, b] : backwards_)
      if (b) s += "\nbackward:\n" + (b->plan ? b->plan->describe() : ir::print(*b->graph));
    return s;
  }

 private:
  struct Backward {
    std::shared_ptr<ir::Graph> graph;  // as cut out, before any pass
    std::shared_ptr<CompiledGraph> plan;
    std::vector<ResultSpec> results;
    std::vector<uint32_t> gradients;  // per result: which of joint_.gradients
  };

  void build();
  void find_visible(const ir::Graph&);
  std::shared_ptr<const Backward> backward_for(const std::vector<char>& defined) const;
  std::shared_ptr<Backward> derive(const std::vector<char>& defined) const;
  std::shared_ptr<Backward> make_backward(const ir::Graph&, const std::vector<Value>& outputs, std::vector<ResultSpec>,
                                          std::vector<uint32_t> gradients, std::vector<Value> given, const std::vector<ir::Node*>& also) const;

  // Of the type and strides that the plan was made for.
  at::Tensor as_recorded(const at::Tensor& t, size_t k) const {
    const ir::TensorType& type = joint_.program.graph->inputs[joint_.roots[k].tangent].value.type();
    std::vector<int64_t> strides;
    for (size_t d = 0; d < type.dim(); ++d) {
      if (!type.strides[d].is_const()) return t.contiguous();
      strides.push_back(type.strides[d].value());
    }
    bool same = t.layout() == at::kStrided && !t.is_conj() && !t.is_neg() && !t._is_zerotensor() && t.dim() == static_cast<int64_t>(type.dim());
    for (size_t d = 0; same && d < strides.size(); ++d)
      same = t.size(static_cast<int64_t>(d)) == 1 || t.stride(static_cast<int64_t>(d)) == strides[d];
    if (same) return t;
    at::Tensor r = at::empty_strided(t.sizes(), strides, t.options().layout(at::kStrided));
    r.copy_(t);
    return r;
  }

  JointProgram joint_;
  Program program_;                  // as the door sees it: without tangents among its inputs
  std::vector<uint32_t> receivers_;  // inputs that get gradients, in the order of joint_.gradients
  std::shared_ptr<Tracer> trace_;
  Options options_;
  std::shared_ptr<CompiledGraph> forward_;
  ResultMaker results_{{}};
  std::vector<Saved> saved_;
  std::vector<char> kept_inputs_, kept_outputs_;  // eager's backward would hold on to these
  mutable std::mutex mutex_;
  mutable std::map<std::vector<char>, std::shared_ptr<Backward>> backwards_;
  mutable int renewals_ = 0;
  bool built_ = false;
};

// Pointwise work and views fuse into what reads them: as good as free.
bool recomputable(const ir::Node& n) {
  if (n.op->flags & ir::kView) return true;
  if (n.op->flags & (ir::kRandom | ir::kEffect | ir::kDataDependent)) return false;
  return ops::is_elementwise(n.op->name);
}
bool is_extern(const ir::Node& n) {
  const ops::OpRow* row = ops::find_op(n.op->name);
  return !row || !row->lower;
}

// Users can change inputs and results; eager notices when it had saved them, and nothing is lost when it had not.
void Training::find_visible(const ir::Graph& g) {
  std::unordered_set<Value> read;
  for (const ir::Node* n : g.nodes()) {
    if (n->id < joint_.backward) continue;
    ir::for_each_input(const_cast<ir::Node&>(*n), [&](Value& v) { read.insert(root_of(v)); });
  }
  for (const ir::Input& in : g.inputs) kept_inputs_.push_back(read.contains(in.value));
  for (uint32_t o = 0; o < joint_.num_forward; ++o) kept_outputs_.push_back(g.outputs[o] && read.contains(root_of(g.outputs[o])));
}

void Training::build() {
  const ir::Graph& recorded = *joint_.program.graph;
  find_visible(recorded);
  std::vector<char> returned(joint_.num_forward), written(recorded.inputs.size());
  for (const ResultSpec& r : joint_.program.results)
    if (r.kind == ResultSpec::Kind::Value || r.kind == ResultSpec::Kind::ViewOfOutput) returned[r.index] = 1;
  for (const Mutation& m : joint_.program.mutations) written[m.input] = 1;

  // A copy to work on: the recorded graph may be asked for more.
  std::vector<Value> inputs, forward_inputs;
  std::vector<ir::Node*> effects;
  for (const ir::Input& in : recorded.inputs) inputs.push_back(in.value);
  for (ir::Node* n : recorded.nodes())
    if (n->op->flags & (ir::kRandom | ir::kEffect)) effects.push_back(n);
  std::unordered_map<Value, Value> copies;
  auto joint = extract(recorded, recorded.outputs, inputs, effects, &copies);
  std::unordered_map<Value, Value> recorded_as;
  std::unordered_set<const ir::Node*> late;
  for (auto& [from, to] : copies) {
    recorded_as.emplace(to, from);
    if (from.node->id >= joint_.backward && (from.node->op->flags & (ir::kRandom | ir::kEffect))) late.insert(to.node);
  }
  for (const pipeline::Stage& s : pipeline::graph_stages()) pipeline::run_stage(s, *joint, options_);

  std::unordered_set<Value> fixed;  // values that users see and eager would not keep
  std::unordered_set<const ir::Node*> read_by_calls, read_by_late_calls;
  for (const ir::Node* n : joint->nodes()) {
    if (!is_extern(*n)) continue;
    const bool after =
        recorded_as.contains(const_cast<ir::Node*>(n)->out()) && recorded_as.at(const_cast<ir::Node*>(n)->out()).node->id >= joint_.backward;
    ir::for_each_input(const_cast<ir::Node&>(*n), [&](Value& v) { (after ? read_by_late_calls : read_by_calls).insert(root_of(v).node); });
  }
  for (uint32_t o = 0; o < joint_.num_forward; ++o)
    if (joint->outputs[o] && returned[o] && !kept_outputs_[o]) fixed.insert(root_of(joint->outputs[o])), fixed.insert(joint->outputs[o]);
  for (uint32_t i = 0; i < joint->inputs.size(); ++i)
    if (!kept_inputs_[i]) fixed.insert(joint->inputs[i].value);
  passes::Partition parts = passes::partition({
      .graph = *joint,
      .num_forward = joint_.num_forward,
      .in_backward = [&](const ir::Node& n) { return late.contains(&n); },
      // What a call reads in the forward and in the backward is cheaper kept than made twice.
      .recomputable = [&](const ir::Node& n) { return recomputable(n) && !(read_by_calls.contains(&n) && read_by_late_calls.contains(&n)); },
      .materialized = [&](const ir::Node& n) { return is_extern(n) || read_by_calls.contains(&n); },
      .may_save = [&](Value v) { return !fixed.contains(v) && (v.node->op->name == "graph::input" || recorded_as.contains(v)); },
  });

  std::vector<Value> known = parts.saved;
  for (const JointProgram::Root& r : joint_.roots) known.push_back(joint->inputs[r.tangent].value);
  std::unordered_set<Value> sizes_only;
  for (Value v : carriers(*joint, known))
    if (!parts.backward[v.node->id]) {
      sizes_only.insert(v);
      parts.saved.push_back(v);
    }
  std::vector<Value> forward_outputs(joint->outputs.begin(), joint->outputs.begin() + joint_.num_forward), saved_values;
  for (Value v : parts.saved) {
    Saved s{Saved::Kind::Private, 0, recorded_as.at(v)};
    uint32_t output = 0;
    while (output < joint_.num_forward && !(joint->outputs[output] == v && returned[output])) ++output;
    if (is_input(*v.node) && sizes_only.contains(v))
      s = {Saved::Kind::Sizes, input_index(*v.node), s.value};
    else if (is_input(*v.node))
      s = {Saved::Kind::Input, input_index(*v.node), s.value};
    else if (output < joint_.num_forward)
      s = {Saved::Kind::Result, output, s.value};
    if (s.kind == Saved::Kind::Input && written[s.index]) s.kind = Saved::Kind::Private;  // what it was before
    if (s.kind == Saved::Kind::Private) {
      s.index = static_cast<uint32_t>(forward_outputs.size()) - joint_.num_forward;
      forward_outputs.push_back(v);
    }
    saved_.push_back(s);
    saved_values.push_back(v);
  }

  Program f;
  f.num_args = joint_.program.num_args;
  std::vector<uint32_t> place(inputs.size());  // of an input, once tangents are left out
  for (uint32_t i = 0; i < inputs.size(); ++i) {
    if (joint->inputs[i].kind == ir::InputKind::Tangent) continue;
    place[i] = static_cast<uint32_t>(forward_inputs.size());
    forward_inputs.push_back(joint->inputs[i].value);
    if (i >= f.num_args) f.captured.push_back(joint_.program.captured[i - f.num_args]);
  }
  program_.graph = joint_.program.graph;
  program_.num_args = f.num_args;
  program_.captured = f.captured;
  program_.results = joint_.program.results;
  for (ResultSpec& r : program_.results)
    if (r.kind == ResultSpec::Kind::Input || r.kind == ResultSpec::Kind::ViewOfInput) r.index = place[r.index];
  for (Saved& s : saved_)
    if (s.kind == Saved::Kind::Input || s.kind == Saved::Kind::Sizes) s.index = place[s.index];
  for (const Gradient& g : joint_.gradients) receivers_.push_back(place[g.input]);
  std::vector<ir::Node*> early, during;
  for (ir::Node* n : joint->nodes())
    if (n->op->flags & (ir::kRandom | ir::kEffect)) (parts.backward[n->id] ? during : early).push_back(n);
  f.graph = extract(*joint, forward_outputs, forward_inputs, early);
  for (uint32_t o = 0; o < forward_outputs.size(); ++o) {
    ResultSpec r;
    r.index = o;
    if (o < joint_.num_forward && !returned[o]) r.kind = ResultSpec::Kind::Undefined;
    f.results.push_back(r);
  }
  for (Mutation m : joint_.program.mutations) {
    m.input = place[m.input];
    f.mutations.push_back(m);
    program_.mutations.push_back(std::move(m));
  }
  f.trained = true;
  forward_ = CompiledGraph::compile(std::move(f), options_);
  results_ = ResultMaker(program_.results);

  std::vector<Value> grads(joint->outputs.begin() + joint_.num_forward, joint->outputs.end());
  std::vector<ResultSpec> how;
  std::vector<uint32_t> which;
  for (const Gradient& g : joint_.gradients) {
    which.push_back(static_cast<uint32_t>(which.size()));
    how.push_back(g.how);
    how.back().index -= joint_.num_forward;
  }
  for (const JointProgram::Root& r : joint_.roots) saved_values.push_back(joint->inputs[r.tangent].value);
  backwards_[std::vector<char>(joint_.roots.size(), 1)] =
      make_backward(*joint, grads, std::move(how), std::move(which), std::move(saved_values), during);
}

std::shared_ptr<Training::Backward> Training::make_backward(const ir::Graph& g, const std::vector<Value>& outputs, std::vector<ResultSpec> how,
                                                            std::vector<uint32_t> which, std::vector<Value> given,
                                                            const std::vector<ir::Node*>& also) const {
  auto b = std::make_shared<Backward>();
  b->graph = extract(g, outputs, given, also);
  b->results = std::move(how);
  b->gradients = std::move(which);
  return b;
}

std::shared_ptr<const Training::Backward> Training::backward_for(const std::vector<char>& defined) const {
  std::lock_guard lock(mutex_);
  auto& b = backwards_[defined];
  if (!b) b = derive(defined);
  if (!b->plan) {
    Program p;
    std::vector<Value> inputs;
    for (const ir::Input& in : b->graph->inputs) inputs.push_back(in.value);
    p.graph = extract(*b->graph, b->graph->outputs, inputs);
    p.num_args = static_cast<uint32_t>(inputs.size());
    p.results = b->results;
    p.trained = true;
    const size_t guards = joint_.program.graph->ctx().guards().size();
    b->plan = CompiledGraph::compile(std::move(p), options_);
    TORCH_CHECK(!built_ || joint_.program.graph->ctx().guards().size() == guards,
                "vitrify: the gradients through some of the results hold for these sizes only; compile with dynamic=False");
  }
  return b;
}

// From the trace, for these tangents, out of what the forward keeps for all of them.
std::shared_ptr<Training::Backward> Training::derive(const std::vector<char>& defined) const {
  std::vector<Value> outputs, given;
  std::vector<ResultSpec> how;
  std::vector<uint32_t> which;
  const ir::Graph& g = *joint_.program.graph;
  const uint32_t before = g.next_id();
  for (Gradient& made : trace_->differentiate(defined, outputs)) {
    const auto at = std::find_if(joint_.gradients.begin(), joint_.gradients.end(), [&](const Gradient& k) { return k.input == made.input; });
    VT_CHECK(at != joint_.gradients.end(), "a gradient that the full derivative does not have");
    which.push_back(static_cast<uint32_t>(at - joint_.gradients.begin()));
    how.push_back(std::move(made.how));
  }
  for (const Saved& s : saved_) given.push_back(s.value);
  for (size_t k = 0; k < defined.size(); ++k)
    if (defined[k]) given.push_back(g.inputs[joint_.roots[k].tangent].value);
  std::vector<ir::Node*> effects;
  for (ir::Node* n : g.nodes())
    if (n->id >= before && (n->op->flags & (ir::kRandom | ir::kEffect))) effects.push_back(n);
  return make_backward(g, outputs, std::move(how), std::move(which), std::move(given), effects);
}

variable_list RegionNode::apply(variable_list&& tangents) {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(!released_, torch::autograd::ERR_BACKWARD_TWICE);
  TORCH_CHECK(!c10::GradMode::is_enabled(), "vitrify: a gradient of a gradient");
  std::vector<at::Tensor> saved;
  size_t visible = 0, own = 0;
  for (const Saved& s : region_->saved()) {
    const bool is_own = s.kind == Saved::Kind::Sizes || (s.kind == Saved::Kind::Private && !hooked_);
    saved.push_back(is_own ? own_[own++] : visible_[visible++].unpack(shared_from_this()));
  }
  return region_->backward(saved, tangents);
}

void RegionNode::release_variables() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (SavedVariable& v : visible_) v.reset_data();
  own_.clear();
  released_ = true;
}

}  // namespace

std::shared_ptr<CompiledGraph> compile_training(JointProgram j, std::shared_ptr<Tracer> trace, const Options& options) {
  return std::make_shared<Training>(std::move(j), std::move(trace), options);
}

}  // namespace vitrify
