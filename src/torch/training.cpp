#include "torch/training.h"

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <numeric>
#include <ranges>
#include <set>
#include <unordered_set>

#include "ops/lowering.h"
#include "support/counters.h"
#include "torch/absent.h"
#include "torch/convert.h"
#include "torch/formulas.h"
#include "torch/graph_task.h"
#include "torch/learned.h"
#include "torch/slice.h"
#include "torch/split.h"
#include "torch/tangents.h"
#include "torch/view_path.h"

namespace vitrify {

namespace {

using ir::Value;
using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

constexpr int kMaxRenewals = 4;    // derivatives taken again, with more learned
constexpr size_t kMaxLayouts = 8;  // of tangents in strides of their own

class Training;

// What autograd sees of a compiled call.
class RegionNode final : public Node {
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
  // The views of root `root`, each after those that gradients come through later.
  void add_view(uint32_t root, uint32_t view, const at::Tensor& t) {
    if (const Node* n = t.grad_fn().get()) views_.push_back({root, view, n, n->sequence_nr()});
  }
  // Through which of them the backward under way comes.
  void find_views(Layouts& how) const;

 private:
  struct View {
    uint32_t root, view;
    const Node* node;  // it may be gone, and
    uint64_t number;   // another in its place
  };
  struct Watched {
    c10::VariableVersion version;
    int64_t expected;
    bool is_output;
    uint32_t index;
  };
  std::vector<at::Tensor> unpack(const std::vector<uint32_t>& which);
  void forget();
  void skip_unreached(const variable_list& grads);
  void check_versions(const BackwardProgram&) const;
  std::shared_ptr<const Training> region_;
  std::vector<SavedVariable> visible_;  // in the order of Training::saved(), those that users can reach
  std::vector<at::Tensor> own_;         // the others
  std::vector<at::Tensor> given_;       // what the call was given: for gradients of gradients
  std::vector<int64_t> versions_;
  std::vector<Watched> watched_;
  std::vector<View> views_;
  bool hooked_;  // private ones are among the visible: hooks may want to move them
  bool released_ = false;
};

// Gradients reach an input that was written through the region; what a view's base held there gets none.
class WriteNode final : public Node {
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
    Split s = [&] {
      StageTimer timer("split");
      return split(joint_, options_);
    }();
    saved_ = std::move(s.saved);
    kept_bytes_ = s.kept_bytes;
    forward_ = CompiledGraph::compile(std::move(s.forward), options_);
    results_ = ResultMaker(joint_.program.results);
    const Layouts all(joint_.roots.size());
    find_watched(s.backward);
    backwards_[all] = std::make_shared<Backward>(std::move(s.backward), all);
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
    if (joint_.failed)  // it is raised when autograd comes here on its way to any of them
      for (const at::Tensor* t : given)
        if (t->defined() && t->requires_grad()) edges.push_back(torch::autograd::impl::gradient_edge(*t));
    std::vector<Edge> before(joint_.roots.size());
    for (size_t k = 0; k < before.size(); ++k)
      if (joint_.roots[k].written >= 0 && given[joint_.roots[k].written]->requires_grad())
        before[k] = torch::autograd::impl::gradient_edge(*given[joint_.roots[k].written]);
    std::vector<at::Tensor> values;
    forward_->run(args, values);
    out.clear();
    results_.make(values, given, out, /*first=*/true);

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
    for (uint32_t k = 0; k < joint_.roots.size(); ++k)
      if (const auto& views = joint_.roots[k].views; views.size() > 1)
        for (uint32_t v = 0; v < views.size(); ++v) node->add_view(k, v, out[views[v]]);
  }

  // Gradients for the defined tangents: one per edge, undefined where there is none. `unpack` gives what that derivative needs of what was saved.
  template <class F>
  variable_list backward(F&& unpack, variable_list tangents, const RegionNode& node) const {
    if (joint_.failed) std::rethrow_exception(joint_.failed);
    if (!is_of_grad())
      for (size_t k = 0; k < tangents.size(); ++k)
        if (tangents[k].defined() && !joint_.roots[k].refuses.empty()) throw std::runtime_error(joint_.roots[k].refuses);
    Layouts how = layouts_of(tangents, node);
    pass_checkpoints(how, node);
    std::shared_ptr<const Backward> b;
    variable_list grads;
    for (int refused = 0;;) {
      b = backward_for(how);
      const bool last = b->proven || (b->certain && !strides_show(node));  // it will not be run again
      std::vector<at::Tensor> saved = unpack(b->program, last);
      for (size_t k = 0; k < tangents.size(); ++k)
        if (tangents[k].defined()) saved.push_back(laid_out(tangents[k], type_of_tangent(k), b->tangents[k]));
      try {
        if (last) {
          tangents.clear();
          b->plan->run_consuming(saved, grads);
        } else {
          b->plan->run(saved, grads);
        }
        if (last || !b->plan->learned() || draws(*b->program.graph) || !strides_show(node) || refused++ == kMaxRenewals) break;
        forget(b);
      } catch (const capture::PlanRefused&) {  // a kernel gave something else than was recorded: what it gives is known now
        if (last || refused++ == kMaxRenewals) throw;
        forget(b);
      }
    }
    b->proven = true;
    if (b->plan->learned()) forget(b, true);  // a layout was not as recorded: the next derivative knows better
    variable_list all(joint_.gradients.size());
    for (size_t k = 0; k < grads.size(); ++k) all[b->program.gradients[k]] = std::move(grads[k]);
    return all;
  }

  // The same as a compiled call of its own, which has gradients too. `saved` is asked for values that the program drew.
  variable_list differentiable_backward(std::vector<at::Tensor> given, const std::vector<at::Tensor>& saved, const variable_list& tangents,
                                        const RegionNode& node) const {
    if (joint_.failed) std::rethrow_exception(joint_.failed);
    Layouts how = layouts_of(tangents, node);
    pass_checkpoints(how, node);
    for (size_t k = 0; k < tangents.size(); ++k) how[k].needs_grad = tangents[k].defined() && tangents[k].requires_grad();
    const size_t own = given.size();
    for (int refused = 0;;) {
      const auto [next, why] = next_level(how);
      if (!next) {
        for (size_t k = 0; k < how.size(); ++k)
          TORCH_CHECK(!how[k].defined || !joint_.roots[k].checkpointed,
                      "vitrify: gradients of gradients that a reentrant checkpoint gives cannot be compiled: ", why);
        warn_once(why);
        return by_formulas(joint_, saved_, given, saved, tangents, mutex_);
      }
      given.resize(own);
      const std::vector<Value>& wanted = next->joint_.given;
      size_t k = 0;
      for (size_t i = own; i < wanted.size(); ++i) {
        if (is_input(*wanted[i].node)) {
          while (!how[k].defined) ++k;
          given.push_back(laid_out(tangents[k], type_of_tangent(k), how[k]));
          ++k;
          continue;
        }
        const auto at = std::find_if(saved_.begin(), saved_.end(), [&](const Saved& s) { return s.value == wanted[i]; });
        given.push_back(at == saved_.end() ? at::Tensor() : saved[static_cast<size_t>(at - saved_.begin())]);
        TORCH_CHECK(at != saved_.end(), "vitrify: a gradient of a gradient needs random numbers that were not kept");
      }
      try {
        variable_list all;
        next->run(given, all);
        return all;
      } catch (const capture::PlanRefused& e) {  // as in backward()
        std::lock_guard lock(mutex_);
        if (refused++ == kMaxRenewals)
          next_[how] = {nullptr, e.what()};
        else if (auto at = next_.find(how); at != next_.end() && at->second.program == next)
          next_.erase(at);
        given.resize(own);
      }
    }
  }

  const std::vector<Saved>& saved() const { return saved_; }
  const std::vector<JointProgram::Root>& roots() const { return joint_.roots; }
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

  const ir::TensorType& type_of_tangent(size_t k) const { return joint_.roots[k].tangent.type(); }

  void forget(const std::shared_ptr<const Backward>& b, bool counted = false) const {
    std::lock_guard lock(mutex_);
    learned_ = true;
    if (!counted || renewals_++ < kMaxRenewals) std::erase_if(backwards_, [&](const auto& known) { return known.second == b; });
  }

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

  // Eager's gradients are strided as their tangents are, and as the first where several are added: where that shows, each way in which tangents come
  // has a plan of its own.
  Layouts layouts_of(const variable_list& tangents, const RegionNode& node) const {
    Layouts how(tangents.size());
    bool other = false;
    for (size_t k = 0; k < tangents.size(); ++k) {
      how[k].defined = tangents[k].defined();
      other = other || (how[k].defined && (joint_.roots[k].views.size() > 1 || !is_recorded(tangents[k], type_of_tangent(k), true)));
    }
    if (!other || !strides_show(node)) return how;
    for (size_t k = 0; k < tangents.size(); ++k)
      if (how[k].defined) take_strides(tangents[k], type_of_tangent(k), how[k]);
    node.find_views(how);
    return how;
  }

  // grad() raises where eager's would come to a reentrant checkpoint, and goes past those that lead to nothing it asks for.
  void pass_checkpoints(Layouts& how, const Node& node) const {
    if (joint_.no_grad.empty() || !is_of_grad()) return;
    std::unordered_set<uint32_t> asked;
    for (size_t i = 0; i < joint_.gradients.size(); ++i)
      if (comes_to(node.next_edge(i))) asked.insert(joint_.gradients[i].given);
    for (size_t k = 0; k < how.size(); ++k) {
      if (!how[k].defined || !joint_.roots[k].checkpointed) continue;
      if (std::ranges::any_of(joint_.roots[k].barred, [&](uint32_t i) { return asked.contains(i); })) throw std::runtime_error(joint_.no_grad);
      how[k].past_checkpoints = true;
    }
  }

  // `t` was written in place, in a way that gradients follow: eager's history for it. `before`: where its gradient went.
  static void rebase(const at::Tensor& t, Edge region, const Edge& before) {
    auto part = compat::make_node<WriteNode>();
    if (t.is_view() && before.function) part->add_next_edge(before);
    part->add_next_edge(std::move(region));
    part->add_input_metadata(t);
    torch::autograd::impl::rebase_history(t, Edge(std::move(part), 0));
  }

  std::shared_ptr<const Backward> backward_for(const Layouts& how) const {
    std::lock_guard lock(mutex_);
    std::shared_ptr<Backward>& b = backward_known(how);
    if (b->plan) return b;
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
    const sym::Context& ctx = joint_.program.graph->ctx();
    const size_t guards = ctx.guards().size();
    b->plan = CompiledGraph::compile(std::move(p), options_);
    TORCH_CHECK(!built_ || ctx.guards().size() == guards,
                "vitrify: the gradients through some of the results hold for these sizes only; compile with dynamic=False");
    return b;
  }

  std::shared_ptr<Backward>& backward_known(const Layouts& how) const {
    if (auto known = backwards_.find(how); known != backwards_.end()) return known->second;
    if (is_other(how) && layouts_++ >= kMaxLayouts) return backward_known(as_recorded(how));
    if (auto b = made_of_all(how)) return backwards_[how] = std::move(b);
    StageTimer timer("derivative");
    std::vector<Value> tangents, values;
    const uint32_t first = joint_.program.graph->next_id();
    std::vector<Gradient> gradients = trace_->differentiate(joint_, how, tangents, values);
    auto b = std::make_shared<Backward>(backward_from(joint_, saved_, tangents, std::move(gradients), values, first), how);
    if (is_other(how))  // many gradients do not follow their tangents
      if (auto plain = backwards_.find(as_recorded(how)); plain != backwards_.end() && plain->second->program.types == b->program.types)
        b = plain->second;
    return backwards_[how] = std::move(b);
  }

  // Where all is as in the derivative through all results but for what some of them add to it.
  std::shared_ptr<Backward> made_of_all(const Layouts& how) const {
    const auto all = backwards_.find(Layouts(how.size()));
    if (all == backwards_.end() || learned_) return nullptr;
    std::vector<size_t> absent;
    for (size_t k = 0; k < how.size(); ++k) {
      if (!how[k].defined) absent.push_back(k);
      if (how[k] != TangentLayout{.defined = how[k].defined} || joint_.roots[k].checkpointed) return nullptr;
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
    for (TangentLayout& l : how)  // the gradient of each of its elements is another
      if (!l.expanded.empty()) l = {.needs_grad = l.needs_grad};
    if (is_other(how) && !next_.contains(how) && layouts_++ >= kMaxLayouts) how = as_recorded(how);
    auto [at, fresh] = next_.try_emplace(how);
    if (fresh) try {
        at->second.program = std::make_shared<Training>(trace_->deepen(joint_, how), trace_, options_);
      } catch (const CaptureError& e) {
        at->second.why = e.what();
      } catch (...) {
        next_.erase(at);
        throw;
      }
    return at->second;
  }

  void warn_once(const std::string& why) const {
    {
      std::lock_guard lock(mutex_);
      if (!warned_.insert(why).second) return;
    }
    trace_->warn_eager("gradients of the gradients", why);
  }

  JointProgram joint_;
  std::shared_ptr<Tracer> trace_;
  Options options_;
  std::shared_ptr<CompiledGraph> forward_;
  ResultMaker results_{{}};
  std::vector<Saved> saved_;
  std::vector<uint32_t> watched_given_, watched_outputs_;
  mutable std::mutex mutex_;
  mutable std::map<Layouts, std::shared_ptr<Backward>> backwards_;
  mutable std::map<Layouts, Next> next_;
  mutable std::set<std::string> warned_;
  mutable size_t layouts_ = 0;
  int64_t kept_bytes_ = 0;
  mutable int renewals_ = 0;
  mutable bool learned_ = false;  // something that the first derivative recorded otherwise
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
      saved.push_back(is_own ? own_[own] : visible_[visible].unpack(getptr()));
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

void RegionNode::find_views(Layouts& how) const {
  for (const View& v : views_)
    if (how[v.root].defined && comes_to_node(v.node) && v.node->sequence_nr() == v.number) how[v.root].view = static_cast<int32_t>(v.view);
  for (size_t k = 0; k < how.size(); ++k)
    if (how[k].view + 1 == static_cast<int32_t>(region_->roots()[k].views.size())) how[k].view = -1;
}

variable_list RegionNode::apply(variable_list&& tangents) {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(!released_, torch::autograd::ERR_BACKWARD_TWICE);
  if (!c10::GradMode::is_enabled()) {
    auto needed = [&](const BackwardProgram& b, bool last) {
      check_versions(b);
      std::vector<at::Tensor> saved = unpack(b.saved);
      if (last && !torch::autograd::get_current_graph_task_keep_graph()) forget();  // the plan drops each as it goes
      return saved;
    };
    variable_list grads = region_->backward(needed, std::move(tangents), *this);
    skip_unreached(grads);
    return grads;
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
  variable_list grads = region_->differentiable_backward(given_, saved, tangents, *this);
  skip_unreached(grads);
  return grads;
}

// Eager never comes to what no gradient leads to: nor does the engine from here, where someone would notice. The edges are back when it is done.
void RegionNode::skip_unreached(const variable_list& grads) {
  struct Cut {
    compat::NodePtr node;
    std::vector<std::pair<size_t, Edge>> edges;
    ~Cut() {
      for (auto& [i, e] : edges) node->next_edges()[i] = std::move(e);
    }
  };
  auto cut = std::make_shared<Cut>();
  for (size_t i = 0; i < grads.size(); ++i) {
    const Edge& e = next_edges_[i];
    if (grads[i].defined() || !e.is_valid() || is_silent(*e.function) || !only_from(*this, i)) continue;
    cut->edges.emplace_back(i, std::exchange(next_edges_[i], Edge()));
  }
  if (cut->edges.empty()) return;
  cut->node = getptr();
  torch::autograd::Engine::get_default_engine().queue_callback([cut] {});
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
