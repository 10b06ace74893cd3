#include "torch/compiled.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <thread>

#include "ops/shapes.h"
#include "pipeline/pipeline.h"
#include "schedule/schedule.h"
#include "support/counters.h"
#include "sym/holds.h"
#include "torch/executor.h"
#include "torch/learned.h"
#include "torch/overlap.h"
#include "torch/passes/passes.h"
#include "torch/plan_cache.h"
#include "torch/slice.h"
#include "torch/versions.h"
#include "torch/view_path.h"

namespace vitrify {

namespace {

using runtime::SlotKind;

struct Context {
  Context(std::shared_ptr<const runtime::Plan> plan, std::shared_ptr<const Originals> originals, uint32_t num_args)
      : run(std::move(plan), std::move(originals), num_args) {}
  PlanRun run;
  std::vector<const at::Tensor*> inputs;
  std::vector<at::Tensor> outputs;
  std::vector<at::Tensor> live;  // one per Program::live
  std::vector<double> numbers;
  std::vector<std::shared_ptr<const FrozenValues>> frozen;
  std::vector<const void*> addresses;  // of the inputs, when it was last seen that those written overlap no other
  std::vector<at::Tensor> stand_ins;   // copies of those that are negative
};

// Contexts not in use. The common case, one caller at a time, is one atomic exchange.
class ContextPool {
 public:
  std::unique_ptr<Context> take() {
    if (Context* c = hot_.exchange(nullptr, std::memory_order_acquire)) return std::unique_ptr<Context>(c);
    std::lock_guard lock(mutex_);
    if (idle_.empty()) return nullptr;
    auto c = std::move(idle_.back());
    idle_.pop_back();
    return c;
  }
  void give_back(std::unique_ptr<Context> c) {
    Context* expected = nullptr;
    if (hot_.compare_exchange_strong(expected, c.get(), std::memory_order_release)) {
      (void)c.release();
      return;
    }
    static const size_t most = std::max(8u, 2 * std::thread::hardware_concurrency());  // each holds the memory of a run
    std::lock_guard lock(mutex_);
    if (idle_.size() < most) idle_.push_back(std::move(c));
  }
  ~ContextPool() { delete hot_.load(); }

 private:
  std::atomic<Context*> hot_{nullptr};
  std::mutex mutex_;
  std::vector<std::unique_ptr<Context>> idle_;
};

// Microseconds, to a factor of a few: callers only ask whether it is long.
double estimate(const runtime::Plan& plan) {
  auto value = [](sym::Int e) { return e.is_const() ? double(e.value()) : sym::has_hint(e) ? double(sym::hint(e)) : 1024.0; };
  auto numel = [&](const ir::Dims& sizes) {
    double n = 1;
    for (auto s : sizes) n *= value(s);
    return n;
  };
  double us = 0.2;
  for (const auto& l : plan.launches) {
    double bytes = 0;
    for (uint32_t s : l.slots) bytes += value(plan.slots[s].bytes);
    us += 0.5 + bytes / 2e4;
  }
  for (const auto& e : plan.externs) {
    double out = 0, in = 0, inner = 1;
    for (auto& t : e.node->outs) out += numel(t.sizes);
    ir::for_each_input(const_cast<ir::Node&>(*e.node), [&](ir::Value& v) {
      in += numel(v.type().sizes);
      if (v.type().dim() >= 2) inner = std::max(inner, numel(v.type().sizes) / std::max(1.0, value(v.type().sizes[0])));
    });
    const std::string& n = e.node->op->name;
    const bool product = n.find("mm") != std::string::npos || n.find("linear") != std::string::npos || n.find("conv") != std::string::npos ||
                         n.find("attention") != std::string::npos;
    us += 2 + (in + out) / 5e3 + (product ? out * inner / 5e4 : 0);
  }
  return us;
}

// Values written back may be made where they go to, unless they are results as well.
schedule::Destinations destinations_of(const Program& p) {
  std::vector<int32_t> times(p.graph->outputs.size());
  for (const Mutation& m : p.mutations)
    if (!m.metadata_only) ++times[m.output];
  const std::vector<char> returned = returned_outputs(p, times.size());
  schedule::Destinations to(times.size(), -1);
  for (const Mutation& m : p.mutations)
    if (!m.metadata_only && m.path.empty() && times[m.output] == 1 && !returned[m.output]) to[m.output] = static_cast<int32_t>(m.input);
  return to;
}

class Compiled final : public CompiledGraph {
 public:
  Compiled(Program program, const Options& options) : program_(std::move(program)) {
    auto& graph = *program_.graph;
    VT_CHECK(graph.inputs.size() == program_.num_args + program_.captured.size(), "{} graph inputs, {} arguments, {} captured", graph.inputs.size(),
             program_.num_args, program_.captured.size());
    auto state = std::make_shared<PassState>();
    state->num_args = program_.num_args;
    state->captured = &program_.captured;
    state->written.resize(graph.inputs.size());
    for (const Mutation& m : program_.mutations) state->written[m.input] = 1;
    for (const LiveInput& in : program_.live) state->written[in.input] = 1;
    for (uint32_t i = 0; program_.trained && i < program_.captured.size(); ++i)
      if (program_.captured[i].requires_grad()) state->written[program_.num_args + i] = 1;  // between any two calls
    // Sizes that follow from the content of arguments, before the compiler adds symbols of its own.
    std::vector<sym::Int> found;
    const std::unordered_set<uint32_t> mentioned = symbols_in(graph);  // a derivative has symbols that its program has not
    for (uint32_t i = 0; i < graph.ctx().num_symbols(); ++i)
      if (sym::Int s = graph.ctx().symbol_at(i);
          mentioned.contains(i) && graph.ctx().symbol_info(s).kind == sym::SymbolKind::Size && !size_of_input(graph, s, 0, program_.num_args))
        found.push_back(s);
    const schedule::Destinations destinations = destinations_of(program_);
    const std::optional<std::string> key = plan_key(graph, *state, destinations, options);
    alone_ = !key;
    if (key) shared_ = find_plan(*key);
    if (shared_) {
      program_.graph = shared_->graph;
      counters().plans_shared++;
    } else {
      struct DefaultFloat {  // rules of types ask for it while lowering too
        DType before = std::exchange(ops::default_float(), to_dtype(c10::get_default_dtype_as_scalartype()));
        ~DefaultFloat() { ops::default_float() = before; }
      } default_float;
      auto plan = pipeline::compile(program_.graph, options, torch_stages(state), destinations);
      shared_ = std::make_shared<SharedPlan>(SharedPlan{program_.graph, std::move(plan), std::move(state->groups), std::move(state->originals)});
      if (key) keep_plan(*key, shared_);
    }
    plan_ = shared_->plan;
    const ir::Graph& finished = *program_.graph;  // perhaps another's
    if (has_side_effects(finished) && !program_.resumes) check_found();
    for (sym::Int s : found)  // others the run finds
      if (auto at = size_of_input(finished, s, program_.num_args, static_cast<uint32_t>(finished.inputs.size()))) found_.push_back({s, *at});
    if (!found_.empty()) guards_ = plan_->known.guards;
    compares_found_ = std::ranges::any_of(guards_, [&](const sym::Guard& g) {
      std::vector<sym::Int> symbols;
      sym::free_symbols(g.expr, symbols);
      const auto is_found = [&](sym::Int s) { return std::ranges::find(found_, s, &std::pair<sym::Int, InputDim>::first) != found_.end(); };
      return std::ranges::any_of(symbols, is_found) && !std::ranges::all_of(symbols, is_found);
    });
    for (const FrozenGroup& g : shared_->groups) frozen_.push_back(std::make_unique<FrozenCache>(g));

    for (const ResultSpec& r : program_.results)
      VT_CHECK((r.kind != ResultSpec::Kind::Value && r.kind != ResultSpec::Kind::ViewOfOutput) || r.index < plan_->outputs.size());
    results_ = ResultMaker(program_.results);
    for (const Mutation& m : program_.mutations) mutation_paths_.push_back(resolve(m.path));
    find_copies();
    for (size_t i = 0; i < program_.live.size(); ++i)
      if (program_.live[i].grad_of >= 0) grads_.push_back(i);
    for (const Mutation& m : program_.mutations)
      if (!m.metadata_only) written_.push_back(m.input);
    reshapes_ = std::ranges::any_of(program_.mutations, &Mutation::metadata_only);
    estimated_us_ = estimate(*plan_);
  }

  std::vector<at::Tensor> run(at::ArrayRef<at::Tensor> args) override {
    std::vector<at::Tensor> out;
    run(args, out);
    return out;
  }

  void run(at::ArrayRef<at::Tensor> args, std::vector<at::Tensor>& out) override { run(args, out, nullptr, {}); }
  void run_consuming(std::vector<at::Tensor>& args, std::vector<at::Tensor>& out, bool unseen) override { run(args, out, &args, {}, unseen); }
  void run_live(at::ArrayRef<at::Tensor> args, std::vector<at::Tensor>& out, at::ArrayRef<double> live) override { run(args, out, nullptr, live); }
  bool learned() const override { return learned_; }

  void run(at::ArrayRef<at::Tensor> args, std::vector<at::Tensor>& out, std::vector<at::Tensor>* owned, at::ArrayRef<double> live,
           bool unseen = false) {
    VT_CHECK(args.size() == program_.num_args, "{} arguments, {} expected", args.size(), program_.num_args);
    out.clear();
    struct Lease {
      ContextPool& pool;
      std::unique_ptr<Context> c;
      ~Lease() {
        c->outputs.clear();
        for (size_t i : grads_) c->live[i].reset();
        c->stand_ins.clear();
        pool.give_back(std::move(c));
      }
      const std::vector<size_t>& grads_;
    } lease{pool_, context(), grads_};
    Context& c = *lease.c;
    for (size_t i = 0; i < args.size(); ++i) c.inputs[i] = &args[i];
    if (!program_.live.empty()) find_live(c, live);
    if (!program_.facts.empty()) check_histories(program_, c.inputs.data());
    check_own_backward(program_, c.inputs);
    std::optional<c10::InferenceMode> mode;
    if (program_.inference) mode.emplace(*program_.inference);
    {
      PlanGuard guard;
      if (!frozen_.empty()) refresh(c);
      if (!written_.empty() && !apart(c)) throw capture::CallRefused("an argument shares memory with one that is written");
      StandIns stand_ins(c);
      c.run.run(c.inputs.data(), c.outputs, owned);
      if (c.run.learned) learned_ = true;
      for (uint32_t i : copies_) c.outputs[i] = c.outputs[i].clone();
      stand_ins.put_back();
      if (!written_.empty()) note_effect();
      write_back(c);
    }
    mode.reset();
    results_.make(c.outputs, c.inputs, out, {}, unseen);
    if (reshapes_) change_shapes(c);
    if (!program_.grad_writes.empty() || !program_.spent.empty()) take_grads(program_, c.inputs.data(), out);
    counters().compiled_calls.fetch_add(1, std::memory_order_relaxed);
    if (!has_run_.load(std::memory_order_relaxed) && !has_run_.exchange(true)) pipeline::return_code_pages();
  }

  void let_go() override {
    for (at::Tensor& t : program_.captured) t.reset();
  }
  void settle() override {
    if (alone_) shared_->plan->known = sym::known(program_.graph->ctx());  // of others nothing is assumed: their sizes are constants
  }

  const Program& program() const override { return program_; }
  Stats stats() const override {
    return {static_cast<uint32_t>(plan_->kernels.size()), static_cast<uint32_t>(plan_->launches.size()), static_cast<uint32_t>(plan_->externs.size()),
            plan_->arena_bytes};
  }
  double estimated_us() const override { return estimated_us_; }
  std::string describe() const override {
    std::string s = ir::print(*program_.graph);
    for (const auto& f : frozen_) s += "\nonce per weights:\n" + ir::print(*f->group().graph);
    return s + "\n" + schedule::print(*plan_);
  }

 private:
  std::unique_ptr<Context> context() {
    if (auto c = pool_.take()) return c;
    auto c = std::make_unique<Context>(plan_, shared_->originals, program_.num_args);
    c->run.lenient = program_.lenient;
    c->run.gives_ordinary = program_.gives_ordinary;
    if (program_.resumes) c->run.keep_effects();
    if (program_.trained) c->run.cached_from = runtime::BlockCache::kMinBytes;
    c->inputs.resize(program_.graph->inputs.size());
    for (size_t i = 0; i < program_.captured.size(); ++i) c->inputs[program_.num_args + i] = &program_.captured[i];
    c->frozen.resize(frozen_.size());
    for (const LiveInput& in : program_.live) c->live.push_back(in.grad_of < 0 ? number_tensor(0) : at::Tensor());
    for (size_t i = 0; i < program_.live.size(); ++i) c->inputs[program_.live[i].input] = &c->live[i];
    return c;
  }

  void find_live(Context& c, at::ArrayRef<double> live) {
    for (size_t i : grads_) {
      c.live[i] = c.inputs[static_cast<size_t>(program_.live[i].grad_of)]->grad();
      if (!c.live[i].defined()) throw capture::CallRefused("a .grad is gone");
    }
    if (!program_.numbers) return;
    VT_CHECK(live.size() >= program_.numbers->num_live, "{} numbers, {} expected", live.size(), program_.numbers->num_live);
    if (!program_.numbers->eval(live.data(), c.inputs.data(), c.numbers)) throw capture::CallRefused("a number leads another way");
    for (size_t i = 0; i < program_.live.size(); ++i)
      if (program_.live[i].grad_of < 0) *static_cast<double*>(c.live[i].data_ptr()) = c.numbers[program_.live[i].number];
  }

  using InputDim = std::pair<uint32_t, uint32_t>;
  // Which of the inputs [from, to) has size s, and where.
  static std::optional<InputDim> size_of_input(const ir::Graph& g, sym::Int s, uint32_t from, uint32_t to) {
    for (uint32_t i = from; i < to; ++i)
      for (uint32_t d = 0; d < g.inputs[i].value.type().dim(); ++d)
        if (g.inputs[i].value.type().sizes[d] == s) return InputDim{i, d};
    return {};
  }

  // Guards of the compile's own on sizes that the run finds: eager could not begin anew by then.
  void check_found() const {
    const ir::Graph& g = *program_.graph;
    const std::unordered_set<uint32_t> of_inputs = [&] {
      std::unordered_set<uint32_t> r;
      for (const ir::Input& in : g.inputs)
        for (const ir::Dims& dims : {in.value.type().sizes, in.value.type().strides})
          for (sym::Int i : dims)
            if (sym::is_symbol(i)) r.insert(sym::view(i).symbol->id);
      return r;
    }();
    for (const sym::Guard& guard : plan_->known.guards) {
      std::vector<sym::Int> symbols;
      sym::free_symbols(guard.expr, symbols);
      for (sym::Int s : symbols)
        if (!of_inputs.contains(sym::view(s).symbol->id))
          throw CaptureError("decides by a size that follows from content, beside calls that may have effects");
    }
  }

  // What the compile assumed of sizes that follow from content: the door has not checked it.
  bool content_fits(const Context& c) const {
    const auto& graph = *program_.graph;
    std::unordered_map<uint32_t, int64_t> values;
    for (auto& [s, at] : found_) {
      const uint32_t id = sym::view(s).symbol->id;
      const auto& [range, multiple_of] = plan_->known.symbols[id];
      const int64_t v = c.inputs[at.first]->size(at.second);
      if (v < range.lo || v > range.hi || v % multiple_of) return false;
      values[id] = v;
    }
    for (uint32_t i = 0; i < graph.inputs.size(); ++i) {  // conditions may name sizes of any input
      const ir::TensorType& type = graph.inputs[i].value.type();
      for (uint32_t d = 0; d < type.dim() && d < c.inputs[i]->dim(); ++d)
        if (sym::is_symbol(type.sizes[d])) values.try_emplace(sym::view(type.sizes[d]).symbol->id, c.inputs[i]->size(d));
    }
    bool all_known = true;
    const auto known = [&](uint32_t id) {
      auto it = values.find(id);
      return it != values.end() ? std::optional(it->second) : std::nullopt;
    };
    for (const sym::Guard& g : guards_)  // others are looked at by the run
      if (!sym::holds(g, known).value_or(true)) return false;
    auto value = [&](uint32_t id) {
      const auto v = known(id);
      all_known = all_known && v;
      return v.value_or(1);
    };
    for (auto& f : frozen_) {
      const FrozenGroup& group = f->group();
      if (std::none_of(group.sources.begin(), group.sources.end(), [&](uint32_t i) { return i < program_.num_args; })) continue;
      for (uint32_t r : group.results) {
        const ir::TensorType& type = graph.inputs[r].value.type();
        const at::Tensor& t = *c.inputs[r];
        if (t.dim() != static_cast<int64_t>(type.dim())) return false;
        for (size_t d = 0; d < type.dim(); ++d) {
          const auto k = static_cast<int64_t>(d);
          if (t.size(k) != sym::eval(type.sizes[d], value) || (t.size(k) > 1 && t.stride(k) != sym::eval(type.strides[d], value))) return false;
        }
      }
    }
    return all_known;
  }

  void refresh(Context& c) {
    bool fresh = false;
    refresh(c, fresh);
    if ((!fresh && !compares_found_) || found_.empty() || content_fits(c)) return;
    for (auto& f : c.frozen) f = nullptr;
    throw capture::CallRefused("the content of an argument is not what the plan is for");
  }
  void refresh(Context& c, bool& fresh) {
    for (size_t i = 0; i < frozen_.size(); ++i) {
      if (c.frozen[i] && c.frozen[i]->valid(c.inputs.data())) continue;
      c.frozen[i] = frozen_[i]->get(std::span(c.inputs).first(program_.num_args + program_.captured.size()), c.frozen[i].get());
      fresh = true;
      const FrozenGroup& g = frozen_[i]->group();
      for (size_t k = 0; k < g.results.size(); ++k) c.inputs[g.results[k]] = &c.frozen[i]->values[k];
    }
  }

  // Values that must have memory of their own but do not: parts of inputs and constants, and a slot given out twice.
  void find_copies() {
    const std::vector<char> returned = returned_outputs(program_, plan_->outputs.size());
    std::vector<char> used(plan_->slots.size());
    std::vector<char> written(program_.graph->inputs.size());
    for (const Mutation& m : program_.mutations) written[m.input] = 1;
    for (uint32_t o = 0; o < plan_->outputs.size(); ++o) {
      if (!plan_->outputs[o].defined || plan_->outputs[o].in_place) continue;
      const uint32_t slot = plan_->outputs[o].ref.slot;
      const runtime::Slot& s = plan_->slots[slot];
      bool copy = false;
      if (s.kind == SlotKind::Input) copy = returned[o] || written[s.index];
      if (s.kind == SlotKind::Constant) copy = returned[o];
      if (returned[o]) {
        copy = copy || used[slot];
        used[slot] = 1;
      }
      if (copy) copies_.push_back(o);
    }
  }

  // Kernels read memory, where a negative bit is not: such inputs are stood in for by copies.
  class StandIns {
   public:
    explicit StandIns(Context& c) : c_(c) {
      for (size_t i = 0; i < c.inputs.size(); ++i)
        if (c.inputs[i]->is_neg() && is_native(to_dtype(c.inputs[i]->scalar_type()))) real_.emplace_back(i, c.inputs[i]);
      for (auto [i, t] : real_) c.stand_ins.push_back(without_bits(*t));
      for (size_t k = 0; k < real_.size(); ++k) c.inputs[real_[k].first] = &c.stand_ins[k];
    }
    void put_back() {
      for (auto [i, t] : real_) c_.inputs[i] = t;
      real_.clear();
    }
    ~StandIns() { put_back(); }
    StandIns(const StandIns&) = delete;

   private:
    Context& c_;
    std::vector<std::pair<size_t, const at::Tensor*>> real_;
  };

  // Values of a program say nothing of what shares memory with what it writes: eager's order decides there. True: nothing does.
  bool apart(Context& c) const {
    bool known = !plan_->dynamic && c.addresses.size() == c.inputs.size();
    c.addresses.resize(c.inputs.size());
    for (size_t i = 0; i < c.inputs.size(); ++i) {
      const void* p = c.inputs[i]->has_storage() ? c.inputs[i]->const_data_ptr() : nullptr;
      known = known && c.addresses[i] == p;
      c.addresses[i] = p;
    }
    if (known) return true;
    struct Span {
      const char *begin, *end;
      const at::Tensor* tensor;
      bool written;
    };
    std::vector<Span> spans;
    std::vector<char> written(c.inputs.size());
    for (uint32_t w : written_) written[w] = 1;
    for (size_t i = 0; i < c.inputs.size(); ++i) {
      const at::Tensor& t = *c.inputs[i];
      if (!c.addresses[i] || t.numel() == 0) continue;
      int64_t extent = 1;
      for (int64_t d = 0; d < t.dim(); ++d) extent += (t.size(d) - 1) * t.stride(d);
      const char* p = static_cast<const char*>(c.addresses[i]);
      spans.push_back({p, p + extent * static_cast<int64_t>(t.element_size()), &t, written[i] != 0});
    }
    std::ranges::sort(spans, {}, &Span::begin);
    const auto meet = [](const Span& a, const Span& b) {
      return (a.written || b.written) && !a.tensor->is_same(*b.tensor) && may_share(*a.tensor, *b.tensor);
    };
    const char *end = nullptr, *written_end = nullptr;  // most calls need no more than these
    bool clear = true;
    for (const Span& s : spans) {
      clear = clear && s.begin >= written_end && !(s.written && s.begin < end);
      end = std::max(end, s.end);
      if (s.written) written_end = std::max(written_end, s.end);
    }
    for (size_t k = 0; !clear && k < spans.size(); ++k)
      for (size_t j = k + 1; j < spans.size() && spans[j].begin < spans[k].end; ++j)
        if (meet(spans[k], spans[j])) {
          c.addresses.clear();
          return false;
        }
    return true;
  }

  void write_back(Context& c) {
    for (size_t i = 0; i < program_.mutations.size(); ++i) {
      const Mutation& m = program_.mutations[i];
      const at::Tensor& real = *c.inputs[m.input];
      if (m.metadata_only) continue;
      vitrify::write_back(m, mutation_paths_[i], real, c.outputs, !plan_->outputs[m.output].in_place || !c.stand_ins.empty());
    }
    c.stand_ins.clear();
  }

  // After results that are views of them were made.
  void change_shapes(Context& c) {
    const PlanGuard guard;
    for (size_t i = 0; i < program_.mutations.size(); ++i) {
      const Mutation& m = program_.mutations[i];
      if (!m.metadata_only) continue;
      const at::Tensor& real = *c.inputs[m.input];
      follow(mutation_paths_[i], real);
      count_writes(m, real);
    }
  }

  Program program_;
  std::shared_ptr<const SharedPlan> shared_;  // other programs may run it too, but for one that is alone
  bool alone_ = false;
  std::shared_ptr<const runtime::Plan> plan_;
  std::vector<std::unique_ptr<FrozenCache>> frozen_;
  std::vector<std::pair<sym::Int, InputDim>> found_;
  bool compares_found_ = false;     // with sizes of other arguments, which change while content stays
  std::vector<sym::Guard> guards_;  // checked here: they may speak of found sizes
  ResultMaker results_{{}};
  std::vector<ViewPath> mutation_paths_;
  std::vector<size_t> grads_;      // which of Program::live are gradients
  std::vector<uint32_t> copies_;   // outputs to be given memory of their own
  std::vector<uint32_t> written_;  // inputs that calls write
  double estimated_us_ = 0;
  bool reshapes_ = false;
  std::atomic<bool> learned_{false};
  std::atomic<bool> has_run_{false};
  ContextPool pool_;
};

}  // namespace

std::shared_ptr<CompiledGraph> CompiledGraph::compile(Program program, const Options& options) {
  return std::make_shared<Compiled>(std::move(program), options);
}

}  // namespace vitrify
