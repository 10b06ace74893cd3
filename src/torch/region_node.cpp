#include "torch/region_node.h"

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "torch/convert.h"
#include "torch/graph_task.h"
#include "torch/sym_node.h"
#include "torch/versions.h"

namespace vitrify {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::GraphTask;
using torch::autograd::Node;

void RegionCall::watch(const at::Tensor& t, int64_t expected, bool is_output, uint32_t index) {
  if (t.defined() && counts_versions(t))
    watched.push_back({t.unsafeGetTensorImpl()->version_counter(), Seen(t.getIntrusivePtr()), expected, is_output, !t.is_leaf(), index});
}

at::Tensor RegionCall::seen(ir::Value v) const {
  const auto guard = lock();
  for (const Watched& w : watched)
    if ((w.is_output ? joint.outputs[w.index] : joint.given[w.index]) == v)
      if (at::Tensor now(w.tensor.lock()); now.defined()) return now;
  return {};
}

void RegionCall::add_view(uint32_t root, uint32_t view, const at::Tensor& t) {
  if (const torch::autograd::Node* n = t.grad_fn().get()) views.push_back({root, view, n, n->sequence_nr()});
}

void RegionCall::find_views(Layouts& how) const {
  for (const View& v : views)
    if (how[v.root].defined && comes_to_node(v.node) && v.node->sequence_nr() == v.number) how[v.root].view = static_cast<int32_t>(v.view);
}

void RegionCall::note_memory(uint32_t result, int32_t output, const at::Tensor& t, const at::Tensor& recorded) {
  if (!t.defined() || t.layout() != at::kStrided || !t.has_storage()) return;
  in_memory.push_back({result, output, Followed(t), recorded.defined() ? recorded : Kept::sizes_of(t).tensor});
}

void RegionCall::check_unfollowed(const Path& path) const {
  for (const Unfollowed& u : unfollowed)
    TORCH_CHECK(!u.tensor.elsewhere().defined() || !joint.tape->reads(path, u.is_output, u.index),
                "vitrify: the .data of a gradient was assigned to between it and its own gradient, which reads it: write to it in place instead "
                "(t.data.copy_(...))");
}

RegionCall::Assigned RegionCall::assigned(bool all) const {
  Assigned r;
  for (const InMemory& m : in_memory) {
    if (m.output >= 0 && !all) continue;
    if (const at::Tensor now = m.tensor.elsewhere(); now.defined()) r.emplace(m.result, Other{now.tensor_data(), m.recorded, m.output});
  }
  return r;
}

std::vector<uint32_t> RegionCall::numbers_of(const Assigned& assigned) {
  std::vector<uint32_t> r;
  for (const auto& [result, _] : assigned) r.push_back(result);
  return r;
}

// What can still run has saved nothing. Nobody swaps a tensor that something refers to, though it holds nothing.
void RegionCall::all_freed() {
  computed_again.clear();
  watched.clear();
  std::erase_if(raised, [](const Raised& r) { return r.tensor.has_value(); });
}

Tracer::Needs RegionCall::needs_now() const {
  const auto guard = lock();
  Tracer::Needs r;
  for (const Given& g : computed_again)
    if (const at::Tensor now(g.tensor.lock()); now.defined() && now.requires_grad() != g.needs_grad) r.emplace_back(g.index, !g.needs_grad);
  return r;
}

bool RegionCall::made(const at::Tensor& t) const {
  const auto* node = dynamic_cast<const CallNode*>(t.grad_fn().get());
  return node && &node->call() == this;
}

void RegionCall::add_place(const torch::autograd::Edge& e) { places_.emplace_back(e.function, e.input_nr); }

std::vector<torch::autograd::Edge> RegionCall::places() const {
  std::vector<torch::autograd::Edge> r;
  for (const auto& [node, input] : places_) r.emplace_back(compat::lock(node), input);
  return r;
}

torch::autograd::variable_list ResultNode::apply(torch::autograd::variable_list&& tangents) {
  for (size_t i = 0; i < tangents.size(); ++i) {
    const torch::autograd::Edge& e = next_edge(i);
    if (!e.function) continue;
    if (!comes_to(e))
      static_cast<const RegionNode&>(*e.function).end_at(e.input_nr);
    else if (!tangents[i].defined())
      static_cast<RegionNode&>(*e.function).note_come(e.input_nr);
  }
  return std::move(tangents);
}

void RegionNode::end_at(size_t input) const {
  const Tape& tape = *call_->joint.tape;
  const int32_t step = tape.step_of(place_of(input));
  if (step < 0) return;
  Path path(tape.steps.size());
  path[static_cast<size_t>(step)] = 1;
  TORCH_CHECK(!call_->spent(path), torch::autograd::ERR_BACKWARD_TWICE);
  if (!torch::autograd::get_current_graph_task_keep_graph()) call_->free(path);
}

edge_list RegionNode::edges_behind(size_t input) const {
  const JointProgram& j = call_->joint;
  const std::vector<Tape::Step>& steps = j.tape->steps;
  const size_t place = place_of(input);
  const Path path = j.tape->path([&](size_t k) { return k == place; }, nullptr);
  edge_list r;
  for (size_t i = 0; i < steps.size(); ++i)
    for (uint32_t g : steps[i].gradients)
      if (path[i]) r.push_back(next_edge(g));
  for (size_t k = 0; k < j.places() && !j.parts.empty(); ++k)
    if (j.tape->comes_to_place(path, k)) r.push_back(next_edge(j.edge_to(k)));
  return r;
}

bool RegionNode::is_of_one(size_t input, size_t other) const {
  const size_t k = place_of(input), l = place_of(other);
  return k == l || (call_->joint.tape->step_of(k) >= 0 && call_->joint.tape->step_of(k) == call_->joint.tape->step_of(l));
}

namespace {

struct Inputs {  // of nodes, by the backward under way
  struct Hash {
    size_t operator()(const std::pair<const Node*, uint32_t>& i) const { return std::hash<const Node*>()(i.first) * 31 + i.second; }
  };
  int task = -1;
  std::unordered_map<std::pair<const Node*, uint32_t>, bool, Hash> asked;
};

// It is asked for what comes there itself.
bool is_end(const Edge& e, const GraphTask::ExecInfo& task) {
  const auto* node = dynamic_cast<const RegionNode*>(e.function.get());
  if (!node) {
    const auto goes_on = [](const Edge& next) { return comes_to(next); };
    return task.captures_ || !e.function->retains_grad_hooks().empty() || std::ranges::none_of(e.function->next_edges(), goes_on);
  }
  if (!task.captures_) return std::ranges::none_of(node->next_edges(), comes_to);
  return std::ranges::any_of(*task.captures_, [&](const auto& c) { return node->is_of_one(e.input_nr, static_cast<size_t>(c.input_idx_)); });
}

}  // namespace

bool is_asked(const Edge& e) {
  if (!comes_to(e) || !is_of_grad()) return comes_to(e);
  static thread_local Inputs inputs;
  if (const int now = torch::autograd::get_current_graph_task_id(); inputs.task != now) inputs = {now, {}};
  const auto& tasks = *torch::autograd::get_current_graph_task_exec_info();
  struct Visit {
    std::pair<const Node*, uint32_t> input;
    edge_list next;
    size_t at = 0;
  };
  std::vector<Visit> way;  // chains may be longer than the stack is deep
  bool found = false;
  const auto enter = [&](const Edge& to) {
    const std::pair<const Node*, uint32_t> input(to.function.get(), to.input_nr);
    const auto [known, fresh] = inputs.asked.try_emplace(input, false);
    found = known->second;
    if (!fresh) return;
    const auto task = tasks.find(to.function.get());
    found = known->second = task != tasks.end() && is_end(to, task->second);
    if (found) return;
    const auto* node = dynamic_cast<const RegionNode*>(to.function.get());
    way.push_back({input, node ? node->edges_behind(to.input_nr) : to.function->next_edges()});
  };
  enter(e);
  while (!way.empty()) {
    if (found) {
      inputs.asked[way.back().input] = true;
      way.pop_back();
    } else if (Visit& v = way.back(); v.at == v.next.size()) {
      way.pop_back();
    } else if (const Edge next = v.next[v.at++]; comes_to(next)) {
      enter(next);
    }
  }
  return inputs.asked.at({e.function.get(), e.input_nr});
}

void RegionNode::note_come(size_t input) {
  std::lock_guard<std::mutex> lock(mutex_);
  came_.at(input) = torch::autograd::get_current_graph_task_id();
}

std::vector<char> which_defined(const torch::autograd::variable_list& tangents) {
  std::vector<char> r(tangents.size());
  for (size_t k = 0; k < r.size(); ++k) r[k] = tangents[k].defined();
  return r;
}

// Without ResultNodes all of its inputs are of one of eager's nodes.
std::vector<char> RegionNode::places_come(const torch::autograd::variable_list& tangents) const {
  std::vector<char> r = which_defined(tangents);
  const JointProgram& j = call_->joint;
  for (size_t i = 0; i < num_inputs() && j.level == 0; ++i)
    if (came_.empty() || came_[i] == torch::autograd::get_current_graph_task_id()) r[j.parts.empty() ? i : j.parts[part_].places[i]] = 1;
  return r;
}

// Where the gradients that this gives have to be seen on their way; what has come to those through which it goes itself is taken along.
void RegionNode::find_stops(torch::autograd::variable_list& tangents, const std::vector<char>& come) {
  stops_.clear();
  const JointProgram& j = call_->joint;
  if (j.parts.empty() || j.parts[part_].stops.empty()) return;
  const auto stop_behind = [&] {
    std::vector<char> behind(stops_.size());
    for (size_t k = 0; k < tangents.size(); ++k)
      if (tangents[k].defined() || (!without_.empty() && without_[k]))
        for (uint32_t p : j.way(k).behind) behind[p] = 1;
    for (size_t p = 0; p < behind.size(); ++p) stops_[p] = stops_[p] && behind[p];
    if (std::ranges::find(stops_, 1) == stops_.end()) stops_.clear();
  };
  if (j.level) {  // gradients go on in the place of the nodes below, where nobody looks and nothing is drawn
    stops_.resize(j.places());
    for (uint32_t p : j.parts[part_].stops) {
      const torch::autograd::Edge& e = next_edge(j.edge_to(p));
      const int32_t step = j.tape->places[p].first;
      stops_[p] = is_observed(e) || (step >= 0 && j.tape->take_whole[static_cast<size_t>(step)] && is_shared(*this, e));
    }
    return stop_behind();
  }
  Ahead ahead;
  ahead.first = j.edge_to(0);
  ahead.oldest = call_->oldest;
  ahead.is_part = [&](const torch::autograd::Node& n) {
    const auto* node = dynamic_cast<const RegionNode*>(&n);
    return node && node->call_ == call_;
  };
  ahead.is_reached = [&](const torch::autograd::Node& n) {
    for (size_t k = 0; k < tangents.size(); ++k)
      if ((tangents[k].defined() || come[k]) &&
          std::ranges::any_of(j.way(k).behind, [&](uint32_t p) { return next_edge(j.edge_to(p)).function.get() == &n; }))
        return true;
    return false;
  };
  ahead.take = [&](const torch::autograd::Node& n, std::vector<at::Tensor>& come) {
    const auto& places = j.parts[static_cast<const RegionNode&>(n).part_].places;
    if (has_dims_of_one(come)) return false;  // the engine adds in place where it may: only then do those keep their strides
    for (size_t i = 0; i < come.size(); ++i)
      if (come[i].defined()) tangents[places[i]] = std::exchange(come[i], {});
    return true;
  };
  const std::vector<char> give = to_be_given(*this, ahead);
  if (std::ranges::find(give, 1) == give.end()) return;
  stops_ = give;
  stop_behind();
}

torch::autograd::variable_list RegionNode::by_place(torch::autograd::variable_list given) const {
  const JointProgram& j = call_->joint;
  if (j.parts.empty()) return given;
  torch::autograd::variable_list r(j.places());
  for (size_t i = 0; i < given.size(); ++i) r[j.parts[part_].places[i]] = std::move(given[i]);
  return r;
}

Layouts RegionNode::layouts(const torch::autograd::variable_list& tangents) const {
  Layouts how(tangents.size());
  const auto autocast = at::autocast::is_autocast_enabled(at::kCPU) ? static_cast<int8_t>(at::autocast::get_autocast_dtype(at::kCPU)) + 1 : 0;
  const c10::ScalarType now = c10::get_default_dtype_as_scalartype();
  const auto default_dtype = now == call_->joint.default_dtype ? int8_t{-1} : static_cast<int8_t>(now);
  for (size_t k = 0; k < how.size(); ++k) {
    how[k].defined = tangents[k].defined();
    how[k].without = !without_.empty() && without_[k];
    const bool runs = how[k].defined || how[k].without;
    how[k].autocast = static_cast<int8_t>(runs ? autocast : 0);
    how[k].default_dtype = runs ? default_dtype : int8_t{-1};
    how[k].stops = !stops_.empty() && stops_[k];
  }
  return how;
}

size_t RegionNode::edges_out() const { return call_->joint.parts.empty() ? num_outputs() : call_->joint.edge_to(0); }
size_t RegionNode::edges_shown() const { return stops_.empty() ? edges_out() : num_outputs(); }

void add_inner(torch::autograd::Node& node, const ir::TensorType& type) {
  if (capture::is_static(type))
    node.add_input_metadata(
        at::zeros({}, at::TensorOptions(scalar_type_of(type)).device(to_torch_device(type.device))).expand(values_of(type.sizes)));
  else
    node.add_input_metadata(torch::autograd::Node::undefined_input());  // known when there is a gradient
}

void RegionNode::describe_inner(const torch::autograd::variable_list& grads) {
  const JointProgram& j = call_->joint;
  for (size_t k = j.roots.size(); k < j.places(); ++k)
    if (const at::Tensor& g = grads[j.edge_to(k)]; g.defined() && j.inner[k - j.roots.size()].view < 0 && !capture::is_static(j.tangent(k).type())) {
      const torch::autograd::Edge& e = next_edge(j.edge_to(k));
      auto& metadata = e.function->mutable_input_metadata(e.input_nr);
      std::destroy_at(&metadata);
      std::construct_at(&metadata, g);
    }
}

}  // namespace vitrify
