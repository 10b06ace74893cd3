// A compiled program with gradients: the forward (training.cpp), first derivatives (backwards.cpp), and those that are differentiated again
// (levels.cpp).
#pragma once
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <set>

#include "support/counters.h"
#include "torch/call_sizes.h"
#include "torch/convert.h"
#include "torch/derivatives.h"
#include "torch/graph_task.h"
#include "torch/learned.h"
#include "torch/region_node.h"
#include "torch/slice.h"
#include "torch/split.h"
#include "torch/sym_node.h"
#include "torch/training.h"
#include "torch/transforms.h"
#include "torch/versions.h"
#include "torch/view_path.h"
#include "torch/write_history.h"

namespace vitrify {

using ir::Value;
using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::variable_list;

constexpr size_t kMaxLayouts = 8;   // of tangents in strides of their own
constexpr size_t kMaxAsks = 32;     // programs of gradients that compute some, as they are asked for: all are let go of for the next
constexpr int kMostStale = 64;      // derivatives of what was changed behind the forward: the trace keeps what each was made of
constexpr size_t kMaxVariants = 8;  // of one derivative, for different sizes, or for what it looks at

// What a derivative needs of what was saved, and whether plans can read it; the last one to ask leaves nothing.
using Unpack = std::function<std::pair<std::vector<at::Tensor>, Fit>(const BackwardProgram&, bool last)>;

// Those views can be made of it in whatever strides it comes.
inline bool any_strides(const std::vector<ResultSpec::ViewOp>& path) {
  return std::ranges::none_of(path, [](const ResultSpec::ViewOp& v) {
    return v.op.find("view") != std::string::npos || v.op == "aten::_reshape_alias" || v.op == "aten::as_strided";
  });
}

// A lazily conjugated or negated tensor can go along that path, and what comes of it is one: no view looks at the numbers of its memory as others.
inline bool any_bits(const std::vector<ResultSpec::ViewOp>& path) {
  return std::ranges::none_of(path, [](const ResultSpec::ViewOp& v) {
    return v.op == "aten::view_as_real" || v.op == "aten::view_as_complex" || v.op == "aten::view.dtype";
  });
}

// Why calls of a program run eagerly from now on: its gradients cannot be differentiated.
struct GaveUp {
  std::atomic<bool> is{false};
  std::string why;  // written before
};

class Training final : public CompiledGraph, public std::enable_shared_from_this<Training> {
 public:
  // `gave_up`: of the program whose gradients this computes.
  Training(JointProgram j, std::shared_ptr<Tracer> trace, const Options& options, std::shared_ptr<GaveUp> gave_up = std::make_shared<GaveUp>())
      : joint_(std::move(j)), trace_(std::move(trace)), options_(options), gave_up_(std::move(gave_up)) {
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
      own_backward_ = own_backward_ || joint_.tape->steps[i].own;
    }
    whole_ = s.whole;
    for (const ir::Node* n : whole_->graph().nodes())
      for (const ir::TensorType& t : n->outs) static_ = static_ && (is_undefined(t) || capture::is_static(t));
    forward_ = CompiledGraph::compile(std::move(s.forward), options_);
    for (size_t k = 0; k < joint_.places(); ++k)
      for (uint32_t p : joint_.way(k).behind) find_viewed(p);
    std::vector<ResultSpec> results = joint_.program.results;
    for (ResultSpec& r : results)  // views in sizes of the call are made of its tangents
      if (has_sizes(r.path)) r = {.kind = ResultSpec::Kind::Undefined};
    results_ = ResultMaker(results);
    const Layouts all = all_results();
    std::vector<uint64_t> made(joint_.parts.size());
    for (uint32_t p = 0; p < joint_.parts.size(); ++p) {
      const std::vector<uint32_t>& places = joint_.parts[p].places;
      for (uint32_t i = 0; i < places.size(); ++i) {
        input_of_[places[i]] = {p, i};
        if (const int32_t step = joint_.tape->places.at(places[i]).first; step >= 0)
          made[p] = std::max(made[p], joint_.tape->steps[static_cast<size_t>(step)].number);
      }
      in_turn_.push_back(p);
    }
    std::ranges::stable_sort(in_turn_, {}, [&](uint32_t p) { return made[p]; });
    const auto first = std::make_shared<Backward>(std::move(s.backward), all, Assumed());
    if (!joint_.tape->stopped) backwards_[all].push_back(first);
    // What its passes assume of sizes must be among the guards that the door reads now.
    if (ctx().dynamic() && !joint_.tape->stopped) backward_for(all, {});
    assumed_ = sym::known(ctx());
    forward_->settle();
    first->known = {assumed_, {}};
    built_ = true;
    options_.compile_budget_s = 1e9;  // a backward is needed once its forward has run
  }

  std::vector<at::Tensor> run(at::ArrayRef<at::Tensor> args) override {
    std::vector<at::Tensor> out;
    run(args, out);
    return out;
  }

  void run(at::ArrayRef<at::Tensor> args, std::vector<at::Tensor>& out) override {
    if (gave_up_->is) throw capture::CallRefused(gave_up_->why);
    run(args, out, nullptr);
  }

  void run(at::ArrayRef<at::Tensor> args, std::vector<at::Tensor>& out, const Origin* origin);

  // Gradients for the defined tangents: one per edge, undefined where there is none. `unpack` gives what that derivative needs of what was saved.
  variable_list backward(const Unpack& unpack, variable_list tangents, const RegionNode& node) const;

  // Those of a batch that no plan has whole: its formulas fix sizes, or look at values.
  variable_list one_by_one(const Unpack& unpack, const variable_list& tangents, const RegionNode& node, const std::string& why = "") const;

  // As transforms of torch.func take it.
  TransformedOp as_transformed(std::function<variable_list(variable_list)> run) const;

  // The same through ATen, for tangents that kernels cannot read.
  variable_list op_by_op(const Unpack& unpack, const variable_list& tangents, const RegionNode& node, const std::string& why) const;

  Layouts batches_of(const variable_list& tangents, const RegionNode& node) const;

  // The same as a compiled call of its own, which has gradients too.
  variable_list differentiable_backward(const std::shared_ptr<Call>& call, const variable_list& tangents, RegionNode& node) const;

  // Which steps of eager's backward the one under way, which has come to these places, stands for, and where gradients stop on the way of it: those
  // behind too, if `on`.
  Path path_of(const std::vector<char>& come, const RegionNode& node, bool on = false) const {
    const bool some = is_of_grad();
    if (!some && joint_.parts.empty() && std::ranges::find(come, 0) == come.end()) return {};
    const std::function<bool(size_t)> asked = [&](size_t g) { return is_asked(node.next_edge(g)); };
    const auto comes = [&](size_t k) { return come[k] != 0; };
    Path path = joint_.tape->path(comes, some ? &asked : nullptr, on ? std::vector<char>() : node.stops());
    // backward(inputs=) of results: eager's nodes of those run, for nothing.
    if (some && std::ranges::find(path, 1) == path.end() && std::ranges::none_of(node.next_edges(), comes_to))
      for (size_t k = 0; k < std::max(tape().roots.size(), tape().places.size()); ++k)
        if (const int32_t step = tape().step_of(k); comes(k) && step >= 0) path[static_cast<size_t>(step)] = 1;
    return path;
  }
  const Tape& tape() const { return *joint_.tape; }
  // Where a checkpoint's function, or a ctx, reads this one of RegionCall::computed_again as it is.
  std::optional<size_t> first_finding(const Path&, uint32_t index) const;

  std::vector<Value> asked_of(const BackwardProgram&, const Node&) const;

  // What of it a derivative reads was changed, but not what eager reads on that path: it may not matter.
  // `before`: raises what eager's nodes do that come before the one that reads it.
  void check_changed(const BackwardProgram& b, const std::vector<Kept>& saved, const Node& node, const Path& path,
                     const std::function<void()>& before) const;

  const ir::TensorType& type_of_watched(bool is_output, uint32_t index) const {
    return (is_output ? joint_.outputs[index] : joint_.given[index]).type();
  }
  void let_go() override;
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
    for (auto& [mask, all] : backwards_)
      for (auto& b : all) s += "\nbackward:\n" + (b->plan ? b->plan->describe() : ir::print(*b->program.graph));
    return s;
  }

 private:
  struct Backward {
    Backward(BackwardProgram p, Layouts how, Assumed known) : program(std::move(p)), tangents(std::move(how)), known(std::move(known)) {}
    BackwardProgram program;
    std::shared_ptr<CompiledGraph> plan;  // made when first needed
    Layouts tangents;
    Assumed known;                            // it is for calls of which that holds
    bool certain = false;                     // no kernel can give a size that was not recorded: there is a rule for each
    mutable std::atomic<bool> proven{false};  // has run to the end once
  };

  // Through ATen, of `inputs` as the derivative's graph has them without the tangents.
  variable_list interpreted(const Backward& b, const RegionNode* to, std::vector<at::Tensor> inputs, const variable_list& tangents,
                            const CallSizes& sizes, const RegionCall::Assigned& assigned = {}) const;

  // While something is taken from the trace for a call: under what is known of sizes, which its own are among.
  class Taking {
   public:
    Taking(const Training& of, const sym::Known& known, const CallSizes& sizes) : of_(of), ctx_(of.ctx()) {
      if (!of.built_) return;
      before_ = sym::known(ctx_);
      sym::go_back(ctx_, known);
      hints_.emplace(ctx_, sizes.by_symbol());
    }
    ~Taking() {
      if (before_) sym::go_back(ctx_, *before_);
    }
    Taking(const Taking&) = delete;
    // What is known by now, for what computes `outputs` of what is `given`.
    Assumed known(const CallSizes& sizes, const ir::Graph& g, const std::vector<Value>& outputs, const std::vector<Value>& given) const {
      Assumed r{sym::known(ctx_), {}};
      if (r.guards.size() <= of_.assumed_.guards.size()) return r;
      std::vector<Value> made;
      std::ranges::copy_if(outputs, std::back_inserter(made), [](Value v) { return static_cast<bool>(v); });
      const ir::NodeSet runs = nodes_behind(g, made, given);
      for (const ir::Node* n : g.nodes())
        if (runs.contains(n) && !is_input(*n))
          for (const ir::TensorType& t : n->outs)
            for (sym::Int i : t.sizes)
              if (!i.is_const() && sym::is_symbol(i)) r.found.push_back(sym::view(i).symbol->id);
      if (!sizes.hold(r, of_.assumed_)) throw CaptureError("a derivative decides by a size that is not known any more");
      return r;
    }

   private:
    const Training& of_;
    sym::Context& ctx_;
    std::optional<sym::Known> before_;
    std::optional<sym::Hints> hints_;
  };

  sym::Context& ctx() const { return joint_.program.graph->ctx(); }
  bool holds(const Assumed& a, const CallSizes& sizes) const { return sizes.hold(a, assumed_); }
  CallSizes sizes_of(const Call& call, const variable_list& tangents) const {
    if (!ctx().dynamic()) return {};
    return CallSizes(ctx(), [this, &call, &tangents](const CallSizes::Note& note) {
      for (size_t i = 0; i < call.given.size(); ++i) note(joint_.given[i], call.given[i].tensor);
      for (size_t s = 0; s < call.kept.size(); ++s)
        if (!saved_[s].bits) note(saved_[s].value, call.with_sizes(s).tensor);
      for (size_t k = 0; k < tangents.size(); ++k) note(joint_.tangent(k), tangents[k]);
    });
  }
  [[noreturn]] void give_up(const std::string& why) const;
  std::string leave_to_eager(const std::string& why, const char* what = "gradients of the gradients") const;  // calls from now on; mutex_ is held
  void note_stale() const;                                                                                    // so too
  std::shared_ptr<Tracer> trace() const;
  const ir::TensorType& type_of_tangent(size_t k) const { return joint_.tangent(k).type(); }
  size_t num_edges() const { return joint_.edge_to(joint_.parts.empty() ? 0 : joint_.places()); }
  Layouts all_results() const {
    Layouts how(joint_.places());
    for (size_t k = joint_.roots.size(); k < how.size(); ++k) how[k].defined = false;
    return how;
  }
  Edge edge_to_place(size_t place, const std::vector<compat::NodePtr>& nodes, const std::vector<at::Tensor>& values,
                     const std::vector<const at::Tensor*>& given, const std::vector<at::Tensor>& results, const Origin* origin) const {
    if (place >= joint_.roots.size()) {
      const JointProgram::Inner& inner = joint_.inner[place - joint_.roots.size()];
      if (inner.view >= 0) return torch::autograd::impl::gradient_edge(results[static_cast<size_t>(inner.view)]);
      if (inner.below >= 0) return origin->places[static_cast<size_t>(inner.below)];
      const auto [part, input] = input_of_.at(place);
      return Edge(nodes[part], input);
    }
    const JointProgram::Root& r = joint_.roots[place];
    if (const auto view = viewed_.find(place); view != viewed_.end()) return torch::autograd::impl::gradient_edge(results[view->second]);
    return torch::autograd::impl::gradient_edge(r.written < 0 ? values[r.output] : *given[static_cast<size_t>(r.written)]);
  }

  // Users have a view of what is there: gradients that come from other results come to that, which is made before those are.
  void find_viewed(uint32_t place) {
    if (place >= joint_.roots.size() || joint_.roots[place].written >= 0) return;
    for (uint32_t i = 0; i < joint_.program.results.size(); ++i) {
      ResultSpec& r = joint_.program.results[i];
      if (r.kind != ResultSpec::Kind::Value || r.path.empty() || r.index != joint_.roots[place].output) continue;
      const auto part = std::ranges::find_if(joint_.parts, [&](const auto& p) { return std::ranges::find(p.places, place) != p.places.end(); });
      if (part == joint_.parts.end() || r.path[0].creation == static_cast<int8_t>(torch::autograd::CreationMeta::DEFAULT)) {
        r.path.clear();  // what is written to it goes on from the value itself
        continue;
      }
      r.turn = static_cast<uint32_t>(part - joint_.parts.begin()) + 1;
      viewed_[place] = i;
    }
  }

  void forget(const std::shared_ptr<const Backward>& b, bool counted = false) const {
    std::lock_guard lock(mutex_);
    learned_ = true;
    if (!counted || renewals_++ < kMaxRenewals)
      for (auto& [how, all] : backwards_) std::erase(all, b);
  }

  [[noreturn]] static void refuse(const Kept& k, const ir::TensorType& type) {
    refuse_changed(type, k.tensor, "", static_cast<int64_t>(k.tensor._version()), k.version);
  }

  void find_read(const ir::Graph& forward);
  void find_written_beside(const std::vector<char>& given, const std::vector<char>& outputs);

  // Of all that is saved, by how it follows from what is given: the same of all programs of the process that save the same.
  int64_t number_of_saved(const CallSizes&) const;
  void find_made();
  // `hooks`: they may want to move what is kept.
  void keep(Call& call, const std::vector<const at::Tensor*>& given, std::vector<at::Tensor>& values, bool hooks, const Origin* origin) const;

  // Of what a call of this program, which computes the gradients of the program below, is given.
  Origin origin(const Training& below, const std::shared_ptr<Call>& call, const variable_list& tangents, const Layouts& how, RegionNode& node) const;

  // Whether a gradient that is asked for follows from what this is given there.
  bool reads_for(const Training& below, const Node& node, size_t given) const;

  // Eager's gradients are strided as their tangents are, and as the first where several are added: where that shows, each way in which tangents come
  // has a plan of its own.
  Layouts layouts_of(const variable_list& tangents, const RegionNode& node) const;
  Layouts layouts_as_asked(const variable_list& tangents, const RegionNode& node) const;
  void note_unasked(Layouts& how, const RegionNode& node) const;  // which gradients the backward under way does not ask for
  void leave_out_unasked(Layouts& how, const RegionNode& node) const;

  // A gradient that is a view of its tangent is one of that as it comes: so its strides count, whoever sees them.
  void take_viewed(Layouts& how, const variable_list& tangents, const CallSizes& sizes) const;

  std::shared_ptr<const Backward> backward_for(const Layouts& how, const CallSizes& sizes) const {
    std::lock_guard lock(mutex_);
    return planned(how, sizes);
  }

  std::shared_ptr<Backward> planned(const Layouts& how, const CallSizes& sizes) const;

  // Null: it is known for too many other sizes.
  std::shared_ptr<Backward> backward_known(const Layouts& how, const CallSizes& sizes) const;

  std::shared_ptr<Backward> derivative(const Layouts& how, const CallSizes& sizes, const Tracer::Needs& needs = {},
                                       const std::vector<uint32_t>& assigned = {}, bool* once = nullptr) const;

  // What Python code in the backward reads is not as it was: no derivative that was taken before holds.
  bool is_stale() const { return reads_state_ && !trace()->state_holds(); }

  // Where all is as in the derivative through all results but for what some of them add to it.
  std::shared_ptr<Backward> made_of_all(const Layouts& how, const CallSizes& sizes) const;

  struct Next {
    std::shared_ptr<Training> program;
    Assumed known;                   // as Backward's
    std::vector<uint32_t> assigned;  // of Tape::views, those whose .data is another tensor
    Tracer::Needs needs;             // what needs gradients unlike in the forward
  };

  static Tracer::Needs needs_now(const Call&, const RegionNode&);

  std::shared_ptr<Training> next_level(Layouts& how, const Call& call, const variable_list& tangents, RegionNode& node, const CallSizes& sizes,
                                       const std::vector<std::shared_ptr<Training>>& refused) const;

  // What a formula that looks at values finds in a call.
  Tracer::Look look_at(const Call& call, const variable_list& tangents, const Layouts& how, RegionNode& node) const;

  void warn_once(const std::string& part, const std::string& why) const {
    {
      std::lock_guard lock(mutex_);
      if (!warned_.insert(why).second) return;
    }
    trace()->warn_eager(part, why);
  }

  JointProgram joint_;
  mutable std::mutex trace_mutex_;
  std::shared_ptr<Tracer> trace_;  // null: let go of
  Options options_;
  std::shared_ptr<CompiledGraph> forward_;
  ResultMaker results_{{}};
  std::vector<Saved> saved_;
  std::vector<uint32_t> in_turn_;                             // parts in the order in which eager's nodes are made: the last made runs first
  std::map<size_t, std::pair<uint32_t, uint32_t>> input_of_;  // by place: the part whose node has it, and as which input
  std::map<size_t, uint32_t> viewed_;                         // by place to which others lead: the result by which users have a view of what is there
  std::vector<uint32_t> read_given_, read_outputs_;           // that steps of eager's backward have saved and users can change
  std::vector<uint32_t> saved_results_;                       // of JointProgram::program.results: eager has saved the tensor itself
  std::vector<int32_t> written_;                              // by output of the forward: which of `given` it is written to, or -1
  std::vector<std::pair<uint32_t, uint32_t>> written_beside_;  // of given: one that is written, and one that gradients have to do with
  std::vector<size_t> raising_;                                // steps of eager's backward that raise
  std::vector<uint32_t> reshaped_;                             // of given: calls change how they lie, not what they hold
  std::vector<uint32_t> kept_given_;                           // that gradients follow from, as they were
  std::vector<char> needs_;                                    // by given: its elements are read
  std::vector<std::vector<char>> reads_;                       // above level 0: by output of the forward, whether it reads each of what is given
  std::shared_ptr<const Whole> whole_;
  mutable std::mutex mutex_;
  mutable std::map<Layouts, std::vector<std::shared_ptr<Backward>>> backwards_;
  struct Other {  // as in Next
    Layouts how;
    std::vector<uint32_t> assigned;
    Tracer::Needs needs;
    auto operator<=>(const Other&) const = default;
  };
  mutable std::map<Other, std::vector<std::shared_ptr<Backward>>> of_others_;
  mutable std::map<Layouts, std::vector<Next>> next_;
  sym::Known assumed_;  // of sizes, by the forward and the first derivative
  std::shared_ptr<GaveUp> gave_up_;
  mutable std::set<std::string> warned_;
  mutable size_t layouts_ = 0;
  mutable size_t asks_ = 0, asked_anew_ = 0;
  mutable size_t replaced_ = 0;                         // in next_
  mutable int stale_ = 0;                               // derivatives of what was changed behind the forward
  mutable std::atomic<bool> no_whole_batches_ = false;  // a derivative of one could not be recorded
  int64_t kept_bytes_ = 0;
  static constexpr int kMaxRenewals = 4;  // derivatives taken again, with more learned
  mutable int renewals_ = 0;
  mutable bool learned_ = false;  // something that the first derivative recorded otherwise
  bool built_ = false;
  bool writes_behind_hooks_ = false;
  bool finds_what_hooks_take_ = false;
  std::vector<char> given_to_hooks_;  // by saved_: not what only a checkpoint's function, or a user's ctx, has
  bool gives_hooks_ = false;          // any of it
  // number_of_saved(), by sizes, and what it goes through, in its order. A checkpoint's function is called again, with the interpreter's lock, while
  // mutex_ is held; so another thread may be adding to the graph.
  struct Made {
    const ir::Node* node;
    std::shared_ptr<void> constant;
  };
  std::vector<Made> saved_of_;
  mutable std::mutex numbers_mutex_;
  mutable std::map<std::vector<std::optional<int64_t>>, int64_t> numbers_;
  bool reads_state_ = false;   // its backward runs Python code
  bool own_backward_ = false;  // that of a derivative of the user's, which may look at how what comes to it lies
  bool static_ = true;         // no size in the derivative differs from call to call
};

}  // namespace vitrify
