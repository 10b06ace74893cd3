#include "torch/training.h"

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>

#include "support/counters.h"
#include "torch/convert.h"
#include "torch/slice.h"
#include "torch/split.h"
#include "torch/view_path.h"

namespace vitrify {

namespace {

using ir::Value;
using torch::autograd::Edge;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

constexpr int kMaxRenewals = 4;  // derivatives taken again, with more learned

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
  void save_given(const at::Tensor& t) {
    given_.push_back(t);
    versions_.push_back(t.is_inference() ? 0 : static_cast<int64_t>(t._version()));
  }
  // Eager would have saved it: it may not change, though nothing of it is kept here.
  void watch(const at::Tensor& t, bool is_output, uint32_t index) {
    if (!t.defined() || t.is_inference()) return;
    watched_.push_back({t.unsafeGetTensorImpl()->version_counter(), static_cast<int64_t>(t._version()), is_output, index});
  }

 private:
  struct Watched {
    c10::VariableVersion version;
    int64_t expected;
    bool is_output;
    uint32_t index;
  };
  std::vector<at::Tensor> unpack(const std::vector<uint32_t>& which);
  void forget();
  void check_versions(const BackwardProgram&) const;
  std::shared_ptr<const Training> region_;
  std::vector<SavedVariable> visible_;  // in the order of Training::saved(), those that users can reach
  std::vector<at::Tensor> own_;         // the others
  std::vector<at::Tensor> given_;       // what the call was given: for gradients of gradients
  std::vector<int64_t> versions_;
  std::vector<Watched> watched_;
  bool hooked_;  // private ones are among the visible: hooks may want to move them
  bool released_ = false;
};

// Gradients reach an input that was written through the region; what a view's base held there gets none.
class WriteNode final : public torch::autograd::Node {
 public:
  variable_list apply(variable_list&& g) override {
    if (num_outputs() == 1) return {g[0]};
    return {g[0].defined() ? at::zeros_like(g[0]) : g[0], g[0]};
  }
  std::string name() const override { return "VitrifyWriteBackward"; }
};

// Sizes and strides, and no elements.
at::Tensor sizes_of(const at::Tensor& t) {
  at::Tensor r = at::empty({0}, t.options().requires_grad(false));
  r.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides());
  return r;
}

class Training final : public CompiledGraph, public std::enable_shared_from_this<Training> {
 public:
  Training(JointProgram j, std::shared_ptr<Tracer> trace, const Options& options)
      : joint_(std::move(j)), trace_(std::move(trace)), options_(options) {
    Split s = split(joint_, options_);
    saved_ = std::move(s.saved);
    kept_bytes_ = s.kept_bytes;
    forward_ = CompiledGraph::compile(std::move(s.forward), options_);
    results_ = ResultMaker(joint_.program.results);
    const std::vector<char> all(joint_.roots.size(), 1);
    find_watched(s.backward);
    backwards_[all] = std::make_shared<Backward>(Backward{std::move(s.backward), nullptr});
    // What its passes assume of sizes must be among the guards that the door reads now.
    if (joint_.program.graph->ctx().dynamic()) backward_for(all);
    built_ = true;
  }

  std::vector<at::Tensor> run(at::ArrayRef<at::Tensor> args) override {
    std::vector<at::Tensor> out;
    run(args, out);
    return out;
  }

  void run(at::ArrayRef<at::Tensor> args, std::vector<at::Tensor>& out) override {
    std::vector<const at::Tensor*> given;
    for (const at::Tensor& t : args) given.push_back(&t);
    for (const at::Tensor& t : joint_.program.captured) given.push_back(&t);
    // Before anything is written: the edge of a view that was written through would be another.
    torch::autograd::edge_list edges;
    for (const Gradient& g : joint_.gradients) edges.push_back(torch::autograd::impl::gradient_edge(*given[g.given]));
    std::vector<Edge> before(joint_.roots.size());
    for (size_t k = 0; k < before.size(); ++k)
      if (joint_.roots[k].written >= 0 && given[joint_.roots[k].written]->requires_grad())
        before[k] = torch::autograd::impl::gradient_edge(*given[joint_.roots[k].written]);
    std::vector<at::Tensor> values;
    forward_->run(args, values);

    const bool hooked = at::SavedTensorDefaultHooks::get_hooks().has_value();
    auto node = compat::make_node<RegionNode>(shared_from_this(), hooked);
    node->set_next_edges(std::move(edges));
    for (size_t k = 0; k < joint_.roots.size(); ++k) {
      const JointProgram::Root& r = joint_.roots[k];
      if (r.written < 0)
        torch::autograd::set_history(values[r.output], node);
      else
        rebase(*given[r.written], Edge(node, node->add_input_metadata(*given[r.written])), before[k]);
    }
    for (const Saved& s : saved_) switch (s.kind) {
        case Saved::Kind::Given:
          node->save(*given[s.index], false);
          break;
        case Saved::Kind::Sizes:
          node->save_private(sizes_of(*given[s.index]));
          break;
        case Saved::Kind::Result:
          node->save(values[s.index], values[s.index].grad_fn() == node);
          break;
        case Saved::Kind::Private:
          if (hooked)
            node->save(values[joint_.num_forward + s.index], false);
          else
            node->save_private(std::move(values[joint_.num_forward + s.index]));
      }
    std::vector<char> rebased(given.size());
    for (const JointProgram::Root& r : joint_.roots)
      if (r.written >= 0) rebased[r.written] = 1;
    for (size_t i = 0; i < given.size(); ++i) node->save_given(rebased[i] ? at::Tensor() : *given[i]);  // it holds the node: not the node it
    for (uint32_t i : watched_given_) node->watch(*given[i], false, i);
    for (uint32_t o : watched_outputs_) node->watch(values[o], true, o);
    results_.make(values, given, out);
  }

  // Gradients for the defined tangents: one per edge, undefined where there is none. `unpack` gives what that derivative needs of what was saved.
  template <class F>
  variable_list backward(F&& unpack, variable_list tangents) const {
    if (joint_.failed) std::rethrow_exception(joint_.failed);
    const std::vector<char> defined = defined_of(tangents);
    std::shared_ptr<const Backward> b = backward_for(defined);
    std::vector<at::Tensor> saved = unpack(b->program), grads;
    for (size_t k = 0; k < tangents.size(); ++k)
      if (tangents[k].defined()) saved.push_back(as_recorded(tangents[k], k));
    tangents.clear();
    b->plan->run_consuming(saved, grads);
    if (b->plan->learned()) {  // a kernel gave another layout than was recorded: the next derivative knows better
      std::lock_guard lock(mutex_);
      if (renewals_++ < kMaxRenewals) backwards_.erase(defined);
    }
    variable_list all(joint_.gradients.size());
    for (size_t k = 0; k < grads.size(); ++k) all[b->program.gradients[k]] = std::move(grads[k]);
    return all;
  }

  // The same as a compiled call of its own, which has gradients too. `saved` is asked for values that the program drew.
  variable_list differentiable_backward(std::vector<at::Tensor> given, const std::vector<at::Tensor>& saved, const variable_list& tangents) const {
    const std::vector<char> defined = defined_of(tangents);
    std::shared_ptr<Training> next = next_level(defined);
    const std::vector<Value>& wanted = next->joint_.given;
    size_t k = 0;
    for (size_t i = given.size(); i < wanted.size(); ++i) {
      if (is_input(*wanted[i].node)) {
        while (!defined[k]) ++k;
        given.push_back(as_recorded(tangents[k], k));
        ++k;
        continue;
      }
      const auto at = std::find_if(saved_.begin(), saved_.end(), [&](const Saved& s) { return s.value == wanted[i]; });
      given.push_back(at == saved_.end() ? at::Tensor() : saved[static_cast<size_t>(at - saved_.begin())]);
      TORCH_CHECK(at != saved_.end(), "vitrify: a gradient of a gradient needs random numbers that were not kept");
    }
    variable_list all;
    next->run(given, all);
    return all;
  }

  const std::vector<Saved>& saved() const { return saved_; }
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
    BackwardProgram program;
    std::shared_ptr<CompiledGraph> plan;  // made when first needed
  };

  // What the backward reads in eager and is not among what is saved here.
  void find_watched(const BackwardProgram& b) {
    const std::vector<char> returned = returned_outputs(joint_.program, joint_.num_forward);
    std::vector<char> written(joint_.given.size());
    for (const Mutation& m : joint_.program.mutations) written[m.input] = 1;  // what it was before is what eager read
    auto kept = [&](Saved::Kind kind, uint32_t index) {
      return std::any_of(saved_.begin(), saved_.end(), [&](const Saved& s) { return s.kind == kind && s.index == index; });
    };
    for (uint32_t i : b.reads_given)
      if (!written[i] && !kept(Saved::Kind::Given, i)) watched_given_.push_back(i);
    for (uint32_t o : b.reads_outputs)
      if (returned[o] && !kept(Saved::Kind::Result, o)) watched_outputs_.push_back(o);
  }

  static std::vector<char> defined_of(const variable_list& tangents) {
    std::vector<char> r;
    for (const at::Tensor& t : tangents) r.push_back(t.defined());
    return r;
  }

  // `t` was written in place, in a way that gradients follow: eager's history for it. `before`: where its gradient went.
  static void rebase(const at::Tensor& t, Edge region, const Edge& before) {
    auto part = compat::make_node<WriteNode>();
    if (t.is_view() && before.function) part->add_next_edge(before);
    part->add_next_edge(std::move(region));
    part->add_input_metadata(t);
    torch::autograd::impl::rebase_history(t, Edge(std::move(part), 0));
  }

  std::shared_ptr<const Backward> backward_for(const std::vector<char>& defined) const {
    std::lock_guard lock(mutex_);
    auto& b = backwards_[defined];
    if (!b) {
      std::vector<Value> values;
      const uint32_t first = joint_.program.graph->next_id();
      std::vector<Gradient> gradients = trace_->differentiate(joint_, defined, values);
      b = std::make_shared<Backward>(Backward{backward_from(joint_, saved_, defined, std::move(gradients), values, first), nullptr});
    }
    if (b->plan) return b;
    const ir::Graph& g = *b->program.graph;
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
    const sym::Context& ctx = joint_.program.graph->ctx();
    const size_t guards = ctx.guards().size();
    b->plan = CompiledGraph::compile(std::move(p), options_);
    TORCH_CHECK(!built_ || ctx.guards().size() == guards,
                "vitrify: the gradients through some of the results hold for these sizes only; compile with dynamic=False");
    return b;
  }

  std::shared_ptr<Training> next_level(const std::vector<char>& defined) const {
    std::lock_guard lock(mutex_);
    auto& next = next_[defined];
    if (!next) next = std::make_shared<Training>(trace_->deepen(joint_, defined), trace_, options_);
    return next;
  }

  // Of the strides that the plan was made for.
  at::Tensor as_recorded(const at::Tensor& t, size_t k) const {
    const ir::TensorType& type = joint_.roots[k].tangent.type();
    std::vector<int64_t> strides;
    for (size_t d = 0; d < type.dim(); ++d) {
      if (!type.strides[d].is_const()) return t.contiguous();
      strides.push_back(type.strides[d].value());
    }
    bool same = t.layout() == at::kStrided && !t.is_conj() && !t.is_neg() && !t._is_zerotensor() && t.dim() == static_cast<int64_t>(type.dim());
    for (size_t d = 0; same && d < strides.size(); ++d)
      same = t.size(static_cast<int64_t>(d)) == 1 || t.stride(static_cast<int64_t>(d)) == strides[d];
    return same ? t : at::empty_strided(t.sizes(), strides, t.options().layout(at::kStrided)).copy_(t);
  }

  JointProgram joint_;
  std::shared_ptr<Tracer> trace_;
  Options options_;
  std::shared_ptr<CompiledGraph> forward_;
  ResultMaker results_{{}};
  std::vector<Saved> saved_;
  std::vector<uint32_t> watched_given_, watched_outputs_;
  mutable std::mutex mutex_;
  mutable std::map<std::vector<char>, std::shared_ptr<Backward>> backwards_;  // by which tangents are defined
  mutable std::map<std::vector<char>, std::shared_ptr<Training>> next_;
  int64_t kept_bytes_ = 0;
  mutable int renewals_ = 0;
  bool built_ = false;
};

// `which`: in ascending order.
std::vector<at::Tensor> RegionNode::unpack(const std::vector<uint32_t>& which) {
  std::vector<at::Tensor> saved;
  size_t visible = 0, own = 0, next = 0;
  for (uint32_t k = 0; k < region_->saved().size(); ++k) {
    const Saved& s = region_->saved()[k];
    const bool is_own = s.kind == Saved::Kind::Sizes || (s.kind == Saved::Kind::Private && !hooked_);
    if (next < which.size() && which[next] == k) {
      saved.push_back(is_own ? own_[own] : visible_[visible].unpack(shared_from_this()));
      ++next;
    }
    ++(is_own ? own : visible);
  }
  return saved;
}

void RegionNode::check_versions(const BackwardProgram& b) const {
  for (const Watched& w : watched_) {
    const std::vector<uint32_t>& reads = w.is_output ? b.reads_outputs : b.reads_given;
    if (static_cast<int64_t>(w.version.current_version()) == w.expected || std::find(reads.begin(), reads.end(), w.index) == reads.end()) continue;
    const ir::TensorType& type = region_->type_of_watched(w.is_output, w.index);
    std::vector<std::string> sizes;
    for (sym::Int i : type.sizes) sizes.push_back(i.is_const() ? std::to_string(i.value()) : "?");
    TORCH_CHECK(false, "one of the variables needed for gradient computation has been modified by an inplace operation: [torch.",
                c10::toString(scalar_type_of(type)), "Tensor [", fmt::format("{}", fmt::join(sizes, ", ")), "]]",
                w.is_output ? ", which is output " + std::to_string(w.index) + " of " + name() + "," : "", " is at version ",
                w.version.current_version(), "; expected version ", w.expected,
                " instead. Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
                "torch.autograd.set_detect_anomaly(True, check_nan=False).");
  }
}

variable_list RegionNode::apply(variable_list&& tangents) {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(!released_, torch::autograd::ERR_BACKWARD_TWICE);
  if (!c10::GradMode::is_enabled()) {
    auto needed = [&](const BackwardProgram& b) {
      check_versions(b);
      std::vector<at::Tensor> saved = unpack(b.saved);
      if (!torch::autograd::get_current_graph_task_keep_graph()) forget();  // the plan drops each as it goes
      return saved;
    };
    return region_->backward(needed, std::move(tangents));
  }
  std::vector<uint32_t> all(region_->saved().size());
  std::iota(all.begin(), all.end(), 0);
  const std::vector<at::Tensor> saved = unpack(all);
  for (size_t i = 0; i < given_.size(); ++i)
    TORCH_CHECK(given_[i].defined(), "vitrify: a gradient of a gradient of a program that writes to its arguments");
  for (size_t i = 0; i < given_.size(); ++i)
    TORCH_CHECK(given_[i].is_inference() || static_cast<int64_t>(given_[i]._version()) == versions_[i],
                "one of the variables needed for gradient computation has been modified by an inplace operation: an input of a compiled program is "
                "at version ",
                given_[i]._version(), "; expected version ", versions_[i], " instead");
  return region_->differentiable_backward(given_, saved, tangents);
}

void RegionNode::release_variables() {
  std::lock_guard<std::mutex> lock(mutex_);
  forget();
}

void RegionNode::forget() {
  for (SavedVariable& v : visible_) v.reset_data();
  own_.clear();
  given_.clear();
  watched_.clear();
  released_ = true;
}

}  // namespace

std::shared_ptr<CompiledGraph> compile_training(JointProgram j, std::shared_ptr<Tracer> trace, const Options& options) {
  return std::make_shared<Training>(std::move(j), std::move(trace), options);
}

}  // namespace vitrify
