// The C++ door's training step: loss, gradients and update as one program, or the update by itself.
#include "vitrify/step.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/optim/lbfgs.h>

#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "torch/leaf_gradient.h"
#include "torch/mode.h"
#include "torch/tracer.h"
#include "torch/update.h"

namespace vitrify::detail {

namespace {

using torch::autograd::Node;
using update::ParamState;
using update::Rule;
using update::Update;

struct Parameter {
  at::Tensor tensor;
  size_t group;
};

// A compiled update. Parameters of one class have the same numbers: they are of one group and were updated as often.
struct Plan {
  struct Class {
    size_t group;
    int64_t steps;
    bool first;
  };
  struct Member {
    at::Tensor tensor;
    size_t group, of;  // of: which class
    std::vector<at::Tensor> state;
  };
  std::vector<Class> classes;
  std::vector<Member> members;
};

bool same_tensors(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const at::Tensor& x, const at::Tensor& y) { return x.is_same(y); });
}

// backward() would add to the .grad of tensors that no plan knows.
void refuse_other_leaves(const at::Tensor& loss, const std::unordered_set<const void*>& known) {
  std::vector<Node*> todo;
  std::unordered_set<Node*> seen;
  auto add = [&](Node* n) {
    if (n && seen.insert(n).second) todo.push_back(n);
  };
  add(loss.grad_fn().get());
  while (!todo.empty()) {
    Node* n = todo.back();
    todo.pop_back();
    if (auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(n); leaf && !known.contains(leaf->variable.unsafeGetTensorImpl()))
      throw CaptureError("gradients reach a tensor that is neither a parameter of the net nor of the optimizer");
    for (const auto& e : n->next_edges()) add(e.function.get());
  }
}

// Gradients as backward() leaves them; undefined where none arrives. Parameters have no .grad before and after.
std::vector<at::Tensor> gradients_of(const at::Tensor& loss, const std::vector<Parameter>& parameters) {
  std::vector<at::Tensor> leaves, grads;
  std::unordered_set<const void*> known;
  for (const Parameter& p : parameters)
    if (p.tensor.requires_grad() && known.insert(p.tensor.unsafeGetTensorImpl()).second) leaves.push_back(p.tensor);
  refuse_other_leaves(loss, known);
  struct Clean {
    const std::vector<Parameter>& parameters;
    ~Clean() {
      for (const Parameter& p : parameters) p.tensor.mutable_grad().reset();
    }
  } clean{parameters};
  loss.backward({}, std::nullopt, /*create_graph=*/false, leaves);
  for (const Parameter& p : parameters) grads.push_back(p.tensor.grad());
  return grads;
}

CompileOptions named(CompileOptions o, const char* suffix) {
  if (o.name == CompileOptions().name) o.name = "compiled step";
  o.name += suffix;
  return o;
}

}  // namespace

struct StepEngine::Impl {
  std::shared_ptr<torch::nn::Module> module;
  torch::optim::Optimizer& optimizer;
  const std::optional<Rule> rule;
  Engine whole, alone;  // everything in one program; the update alone

  std::mutex mutex;
  std::unordered_map<const void*, std::unique_ptr<ParamState>> made;  // by parameter: states until the first update has run
  std::vector<at::Tensor> net_parameters;

  Impl(const CompileOptions& o, std::shared_ptr<torch::nn::Module> m, torch::optim::Optimizer& opt)
      : module(std::move(m)), optimizer(opt), rule(update::rule_of(opt)), whole(named(o, ""), module), alone(named(o, ", its update"), nullptr) {
    net_parameters = module->parameters();
    std::unordered_set<const void*> of_net;
    for (const at::Tensor& p : net_parameters) of_net.insert(p.unsafeGetTensorImpl());
    for (const auto& group : opt.param_groups())
      for (const at::Tensor& p : group.params())
        if (of_net.contains(p.unsafeGetTensorImpl())) return;
    throw OptionError("compile_step: `optimizer` holds none of the parameters of `net`");
  }

  // A parameter that a group lists twice is updated once for each: those are left to step(). Empty then.
  std::vector<Parameter> parameters() const {
    std::vector<Parameter> r;
    std::unordered_set<const void*> seen;
    for (size_t g = 0; g < optimizer.param_groups().size(); ++g)
      for (const at::Tensor& p : optimizer.param_groups()[g].params()) {
        if (!seen.insert(p.unsafeGetTensorImpl()).second) return {};
        r.push_back({p, g});
      }
    return r;
  }
  Update read(size_t group, int64_t steps_done, bool first) const {
    return update::read(*rule, optimizer.param_groups()[group].options(), steps_done + 1, first);
  }
  ParamState* state_of(const at::Tensor& p) const {
    auto it = optimizer.state().find(p.unsafeGetTensorImpl());
    return it == optimizer.state().end() ? nullptr : it->second.get();
  }

  std::vector<at::Tensor> tensors_of(const at::Tensor& p) const {
    const ParamState* state = state_of(p);
    if (auto it = made.find(p.unsafeGetTensorImpl()); !state && it != made.end()) state = it->second.get();
    return state ? update::tensors_of(*rule, *state) : std::vector<at::Tensor>();
  }

  void reset() {
    whole.reset(), alone.reset();
    made.clear();
    net_parameters = module->parameters();
  }

  // While a program is captured: updates the parameters that have a gradient.
  std::shared_ptr<Plan> update_all(const std::vector<Parameter>& all, const std::vector<at::Tensor>& grads) {
    auto plan = std::make_shared<Plan>();
    std::vector<Update> updates;                   // by class
    std::vector<std::vector<at::Tensor>> numbers;  // by class, as operands
    uint32_t next = 0;
    at::NoGradGuard no_grad;
    for (size_t i = 0; i < all.size(); ++i) {
      if (!grads[i].defined()) continue;
      const Parameter& p = all[i];
      const ParamState* state = state_of(p.tensor);
      const Plan::Class c{p.group, state ? update::steps_of(*rule, *state) : 0, !state};
      size_t k = 0;
      while (k < plan->classes.size() &&
             !(plan->classes[k].group == c.group && plan->classes[k].steps == c.steps && plan->classes[k].first == c.first))
        ++k;
      if (k == plan->classes.size()) {
        plan->classes.push_back(c);
        updates.push_back(read(c.group, c.steps, c.first));
        auto& operands = numbers.emplace_back();
        for (double v : updates.back().numbers) operands.push_back(Tracer::current()->live_tensor(next++, v));
      }
      if (auto& own = made[p.tensor.unsafeGetTensorImpl()]; !state && !own) {
        capture::Paused paused;
        own = update::new_state(updates[k], p.tensor);
      }
      plan->members.push_back({p.tensor, p.group, k, tensors_of(p.tensor)});
      update::apply(updates[k], p.tensor, grads[i], plan->members.back().state, numbers[k]);
    }
    return plan;
  }

  // The numbers of this call. False: the plan is not for the states as they are, because they were loaded, cleared or made by the optimizer's own
  // step(), or because the members of a class were not updated as often as each other.
  bool numbers_of(const Plan& plan, std::vector<double>& numbers) const {
    std::vector<Plan::Class> now = plan.classes;
    std::vector<char> seen(now.size());
    for (const Plan::Member& m : plan.members) {
      if (!same_tensors(m.state, tensors_of(m.tensor))) return false;
      const ParamState* state = state_of(m.tensor);
      const Plan::Class c{m.group, state ? update::steps_of(*rule, *state) : 0, !state};
      if (std::exchange(seen[m.of], 1) && (now[m.of].steps != c.steps || now[m.of].first != c.first)) return false;
      now[m.of] = c;
    }
    for (const Plan::Class& c : now)
      for (double v : read(c.group, c.steps, c.first).numbers) numbers.push_back(v);
    return true;
  }

  // What decides about the ops of an update, besides which gradients there are.
  void add_key(Flat& k, const std::vector<Parameter>& all) const {
    for (size_t g = 0; g < optimizer.param_groups().size(); ++g) k.bytes(read(g, 0, false).kind());
    for (const Parameter& p : all) k.bytes(p.tensor.unsafeGetTensorImpl()), k.bytes(p.group);
  }

  // False: nothing was done.
  bool run(Engine& engine, const Flat& call, const Engine::Trace& trace, std::vector<at::Tensor>& out, std::shared_ptr<Plan>& plan,
           Engine::Rest& rest) {
    std::shared_ptr<Engine::Entry> entry;
    std::vector<double> numbers;
    for (int attempt = 0;; ++attempt) {
      entry = engine.find(call, trace);
      if (!entry || attempt == 2) {
        made.clear();
        return false;
      }
      plan = std::any_cast<std::shared_ptr<Plan>>(engine.blueprint(*entry));
      numbers.clear();
      if (numbers_of(*plan, numbers)) break;
      engine.reset();
    }
    if (!engine.run(entry, call.tensors, out, rest, numbers)) return false;
    for (const Plan::Member& m : plan->members) {
      void* key = m.tensor.unsafeGetTensorImpl();
      if (auto it = made.find(key); it != made.end()) {
        if (it->second && !state_of(m.tensor)) optimizer.state()[key] = std::move(it->second);
        made.erase(it);
      }
      if (ParamState* state = state_of(m.tensor)) update::set_steps(*rule, *state, update::steps_of(*rule, *state) + 1);
    }
    return true;
  }

  // In one program, gradients go nowhere but to the optimizer's parameters, and nobody watches them come.
  bool fits_one_program(const Flat& call, const std::vector<Parameter>& all) const {
    if (all.empty() || !c10::GradMode::is_enabled() || torch::autograd::AnomalyMode::is_enabled()) return false;
    if (std::any_of(call.tensors.begin(), call.tensors.end(), [](const at::Tensor& t) { return t.defined() && t.requires_grad(); })) return false;
    std::unordered_set<const void*> held;
    for (const Parameter& p : all) {
      if (!p.tensor.is_leaf() || has_leaf_hooks(p.tensor)) return false;
      held.insert(p.tensor.unsafeGetTensorImpl());
    }
    return std::all_of(net_parameters.begin(), net_parameters.end(),
                       [&](const at::Tensor& p) { return !p.requires_grad() || held.contains(p.unsafeGetTensorImpl()); });
  }

  // Undefined: nothing was done.
  at::Tensor whole_step(const Flat& given, const std::vector<Parameter>& all, const TracedLoss& traced, Engine::Rest& rest) {
    Flat call = given;
    add_key(call, all);
    std::vector<at::Tensor> out;
    std::shared_ptr<Plan> plan;
    const bool done = run(
        whole, call,
        [&](const std::vector<at::Tensor>& placeholders, std::any& blueprint) {
          const at::Tensor loss = traced(placeholders);
          const std::vector<at::Tensor> grads = gradients_of(loss, all);
          blueprint = update_all(all, grads);
          std::vector<at::Tensor> results{loss.detach()};
          std::copy_if(grads.begin(), grads.end(), std::back_inserter(results), [](const at::Tensor& g) { return g.defined(); });
          return results;
        },
        out, plan, rest);
    if (!done) return {};
    for (size_t i = 0; i < plan->members.size(); ++i) plan->members[i].tensor.mutable_grad() = std::move(out[i + 1]);
    return out[0];
  }

  // False: nothing was done.
  bool update_alone(const std::vector<Parameter>& all, Engine::Rest& rest) {
    Flat call;
    add_key(call, all);
    std::vector<char> which;
    for (const Parameter& p : all) {
      const at::Tensor g = p.tensor.grad();
      which.push_back(g.defined());
      call.bytes(g.defined());
      if (!g.defined()) continue;
      if (g.layout() != at::kStrided || g.requires_grad()) return false;
      call.tensors.push_back(g);
    }
    at::NoGradGuard no_grad;
    std::vector<at::Tensor> out;
    std::shared_ptr<Plan> plan;
    return run(
        alone, call,
        [&](const std::vector<at::Tensor>& placeholders, std::any& blueprint) {
          std::vector<at::Tensor> grads(all.size());
          size_t next = 0;
          for (size_t i = 0; i < all.size(); ++i)
            if (which[i]) grads[i] = placeholders[next++];
          blueprint = update_all(all, grads);
          return std::vector<at::Tensor>();
        },
        out, plan, rest);
  }
};

StepEngine::StepEngine(CompileOptions o, std::shared_ptr<torch::nn::Module> m, torch::optim::Optimizer& optimizer)
    : impl_(std::make_shared<Impl>(o, std::move(m), optimizer)) {}

at::Tensor StepEngine::run(const Flat& call, const TracedLoss& traced, const Loss& loss) {
  Impl& im = *impl_;
  std::lock_guard lock(im.mutex);
  Engine::Rest rest;
  torch::optim::Optimizer& optimizer = im.optimizer;
  auto gradients = [&] {
    optimizer.zero_grad();
    at::Tensor l = loss();
    l.backward();
    return l.detach();
  };
  if (typeid(optimizer) == typeid(torch::optim::LBFGS)) return optimizer.step(gradients);
  if (im.rule) {
    const std::vector<Parameter> all = im.parameters();
    optimizer.zero_grad();
    if (im.fits_one_program(call, all))
      if (at::Tensor l = im.whole_step(call, all, traced, rest); l.defined()) return l;
    at::Tensor l = gradients();
    if (all.empty() || !im.update_alone(all, rest)) optimizer.step();
    return l;
  }
  at::Tensor l = gradients();
  optimizer.step();
  return l;
}

void StepEngine::reset() {
  std::lock_guard lock(impl_->mutex);
  impl_->reset();
}
std::string StepEngine::explain() const { return impl_->whole.explain() + impl_->alone.explain(); }

}  // namespace vitrify::detail
