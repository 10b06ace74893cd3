#include "torch/tape.h"

#include <torch/csrc/autograd/edge.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "torch/derivatives.h"
#include "torch/slice.h"
#include "torch/tracer_impl.h"

namespace vitrify {

using ir::Value;
using torch::autograd::Edge;
using torch::autograd::Node;

Path Tape::path(const std::function<bool(size_t)>& has_gradient, const std::function<bool(size_t)>* asked, const std::vector<char>& stops) const {
  std::vector<std::pair<int32_t, uint32_t>> ends;
  for (size_t k = 0; k < stops.size(); ++k)
    if (stops[k]) ends.push_back(places[k]);
  const auto goes_on = [&](const Step& s, size_t e) {
    return ends.empty() || std::ranges::find(ends, std::pair(static_cast<int32_t>(s.next[e]), s.next_input[e])) == ends.end();
  };
  std::vector<char> leads(steps.size(), !asked);
  for (size_t i = steps.size(); asked && i-- > 0;) {
    leads[i] = std::ranges::any_of(steps[i].gradients, *asked);
    for (size_t e = 0; e < steps[i].next.size() && !leads[i]; ++e) leads[i] = leads[steps[i].next[e]] || !goes_on(steps[i], e);
  }
  Path path(steps.size());
  const auto begin = [&](size_t k, int32_t step) {
    if (step >= 0 && has_gradient(k)) path[static_cast<size_t>(step)] = leads[static_cast<size_t>(step)];
  };
  for (size_t k = 0; k < roots.size(); ++k) begin(k, roots[k]);
  for (size_t k = roots.size(); k < places.size(); ++k) begin(k, places[k].first);
  for (size_t i = 0; i < steps.size(); ++i)
    for (size_t e = 0; e < steps[i].next.size(); ++e)
      if (const uint32_t n = steps[i].next[e]; path[i] && leads[n] && !path[n]) path[n] = goes_on(steps[i], e);
  return path;
}

std::vector<char> Tape::edges_on(const Path& path, size_t edges) const {
  std::vector<char> r(edges);
  for (size_t i = 0; i < steps.size(); ++i)
    for (uint32_t g : steps[i].gradients)
      if (on(path, i) && g < edges) r[g] = 1;
  return r;
}

bool Tape::comes_to_place(const Path& path, size_t place) const {
  const auto leads = [&](const Step& s) {
    for (size_t e = 0; e < s.next.size(); ++e)
      if (std::pair(static_cast<int32_t>(s.next[e]), s.next_input[e]) == places[place]) return true;
    return false;
  };
  for (size_t i = 0; i < steps.size(); ++i)
    if (on(path, i) && leads(steps[i])) return true;
  return false;
}

bool Tape::finds(const Path& path, bool is_output, uint32_t index) const {
  bool found = false;
  for (size_t i = 0; i < steps.size(); ++i)
    if (const auto& all = is_output ? steps[i].found_outputs : steps[i].found_given; on(path, i))
      found = found || std::ranges::find(all, index) != all.end();
  return found && !reads(path, is_output, index);
}

static bool has(const std::vector<uint32_t>& all, uint32_t index) { return std::ranges::find(all, index) != all.end(); }

std::vector<char> Tape::gives_gradients() const {
  std::vector<char> r(steps.size());
  for (size_t i = r.size(); i-- > 0;) r[i] = !steps[i].gradients.empty() || std::ranges::any_of(steps[i].next, [&](uint32_t n) { return r[n] != 0; });
  return r;
}

void Tape::find_whole() {
  std::vector<char> calls_python(steps.size());
  take_whole.resize(steps.size());
  for (size_t i = steps.size(); i-- > 0;) {
    calls_python[i] = steps[i].own || steps[i].python || std::ranges::any_of(steps[i].next, [&](uint32_t n) { return calls_python[n]; });
    take_whole[i] = steps[i].draws || calls_python[i];
  }
}

std::optional<size_t> Tape::first(const Path& path, const std::function<bool(const Step&)>& is) const {
  std::optional<size_t> r;
  for (size_t i = 0; i < steps.size(); ++i)
    if (on(path, i) && (!r || steps[i].number > steps[*r].number) && is(steps[i])) r = i;
  return r;
}

std::optional<size_t> Tape::first_reading(const Path& path, bool is_output, uint32_t index) const {
  return first(path, [&](const Step& s) { return has(is_output ? s.reads_outputs : s.reads_given, index); });
}

std::optional<size_t> Tape::first_reading_itself(const Path& path, bool is_output, uint32_t index) const {
  return first(path, [&](const Step& s) { return has(is_output ? s.itself_outputs : s.itself_given, index); });
}

namespace {

// What nodes of the graph follow from, as far as a derivative tells them apart.
class Sources {
 public:
  Sources(const ir::Graph& g, const JointProgram& j) : backward_(j.backward), of_tangent_(g.next_id()), of_forward_(g.next_id()) {
    for (const JointProgram::Root& r : j.roots) of_tangent_[r.tangent.node->id] = 1;
    for (const ir::Node* n : g.nodes()) {
      const bool number = n->op->name == "aten::scalar_tensor" && n->outs[0].wrapped_number;
      if (n->id < backward_) of_forward_[n->id] = !number && !of_tangent_[n->id];
      if (n->id < backward_) continue;
      ir::for_each_input(const_cast<ir::Node&>(*n), [&](Value& v) {
        of_tangent_[n->id] |= of_tangent_[v.node->id];
        of_forward_[n->id] |= of_forward_[v.node->id];
      });
    }
  }
  // It was there before the gradients were.
  bool is_saved(Value v) const { return of_forward_[v.node->id] && !of_tangent_[v.node->id]; }

 private:
  uint32_t backward_;
  std::vector<char> of_tangent_, of_forward_;
};

}  // namespace

// Of a tensor that is read while gradients are computed. One that was detached before is another tensor, of the same elements.
Value Tracer::Impl::read_noted(View& v) {
  const Value value = read(v);
  if (!in_backward) return value;
  const View* const early = before_backwards(v);
  if (const auto result = std::ranges::find(result_views, early, [](const auto& r) { return r.first.get(); }); result != result_views.end())
    read_views.insert(result->second);
  const int32_t key = assigned.contains(early) ? -1 : memory_key(v.storage);
  if (key == -1) return value;
  (counts_writes(v, round) ? read_counted : read_uncounted).emplace(running.get(), key);
  const View* at = &v;
  while (at->parent && at->round == round) at = at->parent.get();
  (at->parent ? read_memory : read_itself).insert(key);
  if (!at->parent || (value.node->op->flags & ir::kView)) return value;
  auto [known, fresh] = detached.try_emplace(key);
  if (fresh) known->second = append("aten::alias", {value}, {value.type()})->out();
  return known->second;
}

int32_t Tracer::Impl::memory_key(const std::shared_ptr<StorageState>& s) const {
  if (s->input >= 0) return s->input;
  if (const auto tangent = tangent_memory.find(s); tangent != tangent_memory.end()) return tangent->second;
  const auto at = result_memory.find(s);
  return at == result_memory.end() ? -1 : result_key(at->second);
}

bool Tracer::Impl::counts_writes(const View& v, uint32_t round) {
  for (const View* at = &v; at; at = at->parent.get())
    if ((at->apart || at->own_versions) && (!round || at->round != round)) return false;
  return true;
}

void Tracer::note_unpacked(const Node& n) {
  if (impl_->running.get() == &n) impl_->read_counted.emplace(&n, Impl::kAllSaved);  // checkpoints have their arguments in nodes that never run
}

// An argument stays what its tensor was first known as.
const Tracer::Impl::Source* Tracer::Impl::found_itself(const at::Tensor& real) const {
  const auto known = by_real.find(real.unsafeGetTensorImpl());
  if (known == by_real.end() || !is_argument(*known->second)) return known == by_real.end() ? nullptr : known->second;
  const auto own = std::ranges::find_if(sources, [&](const Source& s) { return s.real.is_same(real) && !is_argument(s); });
  return own == sources.end() ? known->second : &*own;
}

// A step has saved what its formula read of the program; a checkpoint's are made again by the first that reads them.
std::shared_ptr<const Tape> Tracer::Impl::tape_of(const JointProgram& j, const Level& level) const {
  auto tape = std::make_shared<Tape>();
  std::unordered_map<const Node*, std::vector<std::pair<uint32_t, int32_t>>> leaves;  // by function: (input of it, gradient)
  for (size_t i = 0; i < level.to.size(); ++i) {
    const uint32_t given = j.place_of(level.of[i]);
    const auto at = std::ranges::find(j.gradients, given, &Gradient::given);
    const auto past = std::ranges::find(j.past_raising, given);
    auto place = static_cast<int32_t>(at - j.gradients.begin());
    if (at == j.gradients.end()) place = past == j.past_raising.end() ? -1 : place + static_cast<int32_t>(past - j.past_raising.begin());
    leaves[level.to[i].function.get()].emplace_back(level.to[i].input_nr, place);
  }
  // In the order in which nodes are left, the last first.
  std::unordered_map<const Node*, uint32_t> known;
  std::vector<std::pair<const Node*, size_t>> open;
  auto enter = [&](const Edge& e) {
    if (e.function && !leaves.contains(e.function.get()) && known.try_emplace(e.function.get(), 0).second) open.emplace_back(e.function.get(), 0);
  };
  for (const Edge& root : level.from) {
    enter(root);
    while (!open.empty()) {
      auto& [node, edge] = open.back();
      if (edge < node->num_outputs()) {
        const Edge next = node->next_edge(edge++);
        enter(next);
        continue;
      }
      tape->steps.push_back({node});
      open.pop_back();
    }
  }
  std::ranges::reverse(tape->steps);
  for (uint32_t i = 0; i < tape->steps.size(); ++i) known[tape->steps[i].node] = i;
  for (const Edge& root : level.from) {
    const auto at = known.find(root.function.get());
    tape->roots.push_back(at == known.end() ? -1 : static_cast<int32_t>(at->second));
  }
  for (size_t k = 0; k < j.places() && !j.parts.empty(); ++k) {
    const auto at = known.find(level.at(k).function.get());
    tape->places.emplace_back(at == known.end() ? -1 : static_cast<int32_t>(at->second), level.at(k).input_nr);
  }
  for (Tape::Step& s : tape->steps) {
    for (const Edge& e : s.node->next_edges()) {
      if (const auto at = known.find(e.function.get()); at != known.end()) {
        s.next.push_back(at->second);
        s.next_input.push_back(e.input_nr);
      }
      if (const auto at = leaves.find(e.function.get()); at != leaves.end())
        for (auto [input, gradient] : at->second)
          if (input == e.input_nr && gradient >= 0) s.gradients.push_back(static_cast<uint32_t>(gradient));
    }
    s.number = s.node->sequence_nr();
    s.saves = capture::saves(*s.node);
    s.own = capture::of_users(*s.node);
    tape->own = tape->own || s.own;
    s.python = capture::of_python(*s.node) || hooked.contains(s.node->sequence_nr());
    if (s.saves && hooked.contains(s.node->sequence_nr()) && !capture::of_python(*s.node))
      if (const auto c = std::ranges::find_if(cached, [n = s.node->sequence_nr()](const Cached& c) { return c.once && c.from <= n && n < c.to; });
          c != cached.end())
        s.once = static_cast<int32_t>(c - cached.begin());
  }
  bool saves_after_write = false;
  for (const Tape::Step& s : tape->steps) {
    const bool python = s.saves && capture::of_python(*s.node);
    bool any = python, late = python;  // what Python code has saved is handed out when it has returned
    for (const at::Tensor& t : python ? std::vector<at::Tensor>() : capture::saved_by(*s.node)) {
      if (!t.defined() || t.unsafeGetTensorImpl()->is_wrapped_number()) continue;
      const auto* f = capture::as_fake(t);
      any = any || !f || !f->view->type.wrapped_number;
      late = late || (f && last_write && f->view->storage->base.node->id >= last_write->first);  // a result
    }
    tape->hands_out = tape->hands_out || any;
    saves_after_write = saves_after_write || (any && last_write && (s.number > last_write->number || (s.number == last_write->number && late)));
  }
  tape->writes_last = j.level == 0 && last_write && !saves_after_write;
  for (const Tape::Step& s : tape->steps)  // what raises has no number of its own
    for (uint32_t n : s.next) tape->steps[n].number = std::min(tape->steps[n].number, s.number);
  for (const Raising& r : raising)
    if (const auto at = known.find(r.node.get()); at != known.end()) {
      Tape::Step& s = tape->steps[at->second];
      s.raises = r.says;
      s.expected = r.expected;
      for (const auto& [view, i] : result_views)
        if (r.memory && j.level == 0 && view->storage == r.memory && counts_writes(*view, 0) &&
            (s.stale_result < 0 || static_cast<int32_t>(i) < s.stale_result))
          s.stale_result = static_cast<int32_t>(i);
      if (r.input >= 0) s.stale = static_cast<int32_t>(j.place_of(graph->inputs[static_cast<size_t>(r.input)].value));
    }
  for (const Raising& r : level.raising) {
    const auto at = known.find(r.node.get());
    if (at == known.end()) continue;
    Tape::Failing& f = tape->failing.emplace_back(Tape::Failing{at->second, r.edges.empty(), {}, {}, r.raise});
    for (size_t i : r.edges) {
      const Edge& e = r.node->next_edge(i);
      if (const auto next = known.find(e.function.get()); next != known.end()) f.next.push_back(next->second);
      if (const auto of = leaves.find(e.function.get()); of != leaves.end())
        for (auto [input, gradient] : of->second)
          if (input == e.input_nr && gradient >= 0) f.gradients.push_back(static_cast<uint32_t>(gradient));
    }
  }

  const Sources sources(*graph, j);
  ir::ValueMap<std::vector<uint32_t>> given(*graph), outputs(*graph);
  for (uint32_t i = 0; i < j.given.size(); ++i) given[j.given[i]].push_back(i);
  for (uint32_t o = 0; o < j.num_forward; ++o)
    if (j.outputs[o]) outputs[root_of(j.outputs[o])].push_back(o);
  for (ir::Node* n : graph->nodes()) {
    if (n->id < std::max(j.backward, backward_begin)) continue;
    const auto ran = std::ranges::upper_bound(ends, n->id, {}, [](const auto& e) { return e.second; });
    if (ran == ends.end()) continue;
    const auto at = known.find(ran->first);
    if (at == known.end()) continue;
    const uint32_t begin = ran == ends.begin() ? std::max(j.backward, backward_begin) : std::prev(ran)->second;
    Tape::Step& s = tape->steps[at->second];
    s.draws = s.draws || (n->op->flags & ir::kRandom) || is_side_effect(*n);
    if (sums.contains(n->id)) continue;
    const auto gradients = came.find(ran->first);  // some formulas give the same whatever they are given: that is not saved by whom they give it to
    ir::for_each_input(*n, [&](Value& v) {
      if (v.node->id >= begin || !sources.is_saved(v)) return;
      if (gradients != came.end() && gradients->second.contains(root_of(v).node->id)) return;
      s.saves = true;
      if (const auto* which = given.find(root_of(v))) s.reads_given.insert(s.reads_given.end(), which->begin(), which->end());
      if (const auto* which = outputs.find(root_of(v))) s.reads_outputs.insert(s.reads_outputs.end(), which->begin(), which->end());
    });
  }
  const auto key_of = [&](uint32_t i) { return is_input(*j.given[i].node) ? static_cast<int32_t>(input_index(*j.given[i].node)) : -1; };
  const auto add_itself = [&](Tape::Step& s, int32_t key) {
    for (uint32_t i = 0; i < j.given.size() && key >= 0; ++i)
      if (key_of(i) == key) s.itself_given.push_back(i);
    for (const Mutation& m : j.program.mutations)
      if (!m.metadata_only && key >= 0 && key_of(m.input) == key) s.itself_outputs.push_back(m.output);
    if (key < -1 && j.level == 0) s.itself_outputs.push_back(static_cast<uint32_t>(result_key(0) - key));
  };
  auto counted = read_counted, uncounted = read_uncounted;
  std::set<std::pair<const Node*, uint32_t>> said_given, said_outputs;  // what nodes of Python code have said to save
  std::set<uint32_t> views = read_views;
  std::unordered_set<int32_t> itself = read_itself;
  std::unordered_set<const ir::Node*> read;
  for (ir::Node* n : graph->nodes())
    if (n->id >= std::max(j.backward, backward_begin)) ir::for_each_input(*n, [&](Value& v) { read.insert(root_of(v).node); });
  const auto note_unread = [&](const at::Tensor& saved) {
    const auto* f = saved.defined() ? capture::as_fake(saved) : nullptr;
    if (!f || f->view->storage->input >= 0) return;
    const Value v = root_of(f->view->storage->base);
    const bool made = v.node->id < j.backward && !is_input(*v.node) && !ir::is_constant(*v.node) && v.node->op->name != "aten::scalar_tensor";
    if (made && !given.find(v) && !outputs.find(v) && read.insert(v.node).second) tape->unread.push_back(v);
  };
  const auto is_come_to = [&](const Tape::Step& s) { return std::ranges::find(ends, s.node, [](const auto& e) { return e.first; }) != ends.end(); };
  // What leads to a leaf of the program's own alone has not run.
  const auto has_run = [&](const Tape::Step& s) {
    return std::ranges::any_of(ends, [&](const auto& e) { return e.first == s.node && e.second > j.backward; });
  };
  for (Tape::Step& s : tape->steps) {
    if (goes_round(level, s.node)) continue;
    std::vector<at::Tensor> all = capture::saved_by(*s.node);
    if (has_run(s))
      std::ranges::for_each(capture::of_python(*s.node) && options.saved_tensors ? options.saved_tensors(*s.node) : all, note_unread);
    else
      s.saves = s.saves || std::ranges::any_of(all, [](const at::Tensor& t) { return t.defined(); });
    const bool unpacks = read_counted.contains({s.node, kAllSaved}) || (capture::of_python(*s.node) && !is_come_to(s));
    if (unpacks && options.saved_tensors) all = options.saved_tensors(*s.node);
    for (const at::Tensor& saved : all) {
      if (!saved.defined()) continue;
      const auto* f = capture::as_fake(saved);
      const Source* met = f ? nullptr : found_itself(saved);  // what the program reaches by itself it saves so
      if (met) f = capture::as_fake(met->fake);
      if (f) (counts_writes(*f->view, 0) ? counted : uncounted).emplace(s.node, memory_key(f->view->storage));
      const int32_t input = f ? f->view->storage->input : met ? met->input : -1;
      const Value memory = input >= 0 ? graph->inputs[static_cast<size_t>(input)].value : f ? root_of(f->view->storage->base) : Value();
      if (const auto* which = memory ? given.find(memory) : nullptr)
        for (uint32_t i : *which) s.reads_given.push_back(i), said_given.emplace(s.node, i);
      if (const auto* which = f ? outputs.find(root_of(f->view->storage->base)) : nullptr)
        for (uint32_t o : *which) s.reads_outputs.push_back(o), said_outputs.emplace(s.node, o);
      if (const auto result = f ? result_views.find(f->view) : result_views.end(); result != result_views.end()) views.insert(result->second);
      const View* at = f ? f->view.get() : nullptr;
      while (at && at->in_place) at = at->parent.get();
      // A node's own result is saved without a history; what Python's hold is known of what it has said.
      if ((at && at->parent) || !saved.requires_grad() || capture::of_python(*s.node)) continue;
      const int32_t key = f ? memory_key(f->view->storage) : input;
      add_itself(s, key);
      if (key != -1 && !read_memory.contains(key)) itself.insert(key);  // a formula that is differentiated again may read it
      if (const auto* which = j.level && f && f->view->storage->input < 0 ? given.find(memory) : nullptr)  // a result of the program below
        s.itself_given.insert(s.itself_given.end(), which->begin(), which->end());
    }
  }
  if (j.level == 0) tape->views.assign(views.begin(), views.end());
  const auto held = [&](int32_t key) {
    if (!itself.contains(key)) return Hold::Memory;
    return read_memory.contains(key) ? Hold::Both : Hold::Tensor;
  };
  tape->holds.resize(j.given.size(), Hold::Memory);
  tape->holds_results.resize(j.num_forward, Hold::Memory);
  for (uint32_t i = 0; i < j.given.size(); ++i) tape->holds[i] = held(key_of(i));
  if (j.level == 0)
    for (const auto& [memory, o] : result_memory) tape->holds_results[o] = held(result_key(o));
  for (const Mutation& m : j.program.mutations)  // what it is by now is what is read
    if (!m.metadata_only) tape->holds_results[m.output] = std::exchange(tape->holds[m.input], Hold::Memory);
  const auto part = [](std::vector<uint32_t>& reads, std::vector<uint32_t>& found, auto&& is_read) {
    const auto rest = std::ranges::stable_partition(reads, is_read);
    found.assign(rest.begin(), rest.end());
    reads.erase(rest.begin(), rest.end());
  };
  for (Tape::Step& s : tape->steps) {
    if (!hooked.contains(s.node->sequence_nr()) || capture::of_python(*s.node)) continue;
    s.again = true;
    const auto next = std::ranges::upper_bound(saved_arguments, s.node->sequence_nr(), {}, &SavedArguments::from);
    const auto passed = [&](Value v) {
      return next != saved_arguments.begin() && std::ranges::find(std::prev(next)->values, root_of(v)) != std::prev(next)->values.end();
    };
    part(s.reads_given, s.found_given, [&](uint32_t i) { return passed(j.given[i]); });
    part(s.reads_outputs, s.found_outputs, [&](uint32_t o) { return passed(j.outputs[o]); });
  }
  // A user's own node is asked: it may hold on to tensors otherwise. What it has saved is missed where it looks at that, and not before.
  for (Tape::Step& s : tape->steps)
    if (options.saved_tensors && capture::of_python(*s.node)) {
      const bool reads = s.saves;
      s.saves = !options.saved_tensors(*s.node).empty() && (!is_come_to(s) || read_counted.contains({s.node, kAllSaved}));
      s.holds = reads && !s.saves;
      if (s.holds) {  // nobody looks at versions of attributes
        s.found_given = std::exchange(s.reads_given, {});
        s.found_outputs = std::exchange(s.reads_outputs, {});
      }
    }
  for (Tape::Step& s : tape->steps) {
    const bool asked = s.saves && options.saved_tensors && capture::of_python(*s.node);  // what else it reads nobody looks at versions of
    const auto take_out = [&](std::vector<uint32_t>& reads, std::vector<uint32_t>& found, const auto& said, auto&& key) {
      const auto rest = std::ranges::stable_partition(reads, [&](uint32_t i) {
        if (asked && !said.contains({s.node, i})) return false;
        return counted.contains({s.node, key(i)}) || !uncounted.contains({s.node, key(i)});
      });
      found.insert(found.end(), rest.begin(), rest.end());
      reads.erase(rest.begin(), rest.end());
    };
    take_out(s.reads_given, s.found_given, said_given, key_of);
    take_out(s.reads_outputs, s.found_outputs, said_outputs, [&](uint32_t o) {
      const auto write = std::ranges::find(j.program.mutations, o, &Mutation::output);
      return write == j.program.mutations.end() ? result_key(o) : key_of(write->input);
    });
  }
  // Checkpoints have saved their arguments. A user's own node may hold on to what has lost its history.
  for (Tape::Step& s : tape->steps)
    if (s.again) s.itself_outputs.insert(s.itself_outputs.end(), s.reads_outputs.begin(), s.reads_outputs.end());
  tape->find_whole();
  if (j.roots.size() > 1)
    for (const JointProgram::Root& r : j.roots) {
      const ir::NodeSet behind = nodes_behind(*graph, {j.outputs[r.output]});
      auto& given_behind = tape->behind.emplace_back();
      for (uint32_t i = 0; i < j.given.size(); ++i)
        if (behind.contains(j.given[i].node)) given_behind.push_back(i);
    }
  if (j.level == 0 || !j.below) return tape;
  std::unordered_map<const Node*, int32_t> of_below;
  for (size_t i = 0; i < j.below->steps.size(); ++i) of_below[j.below->steps[i].node] = static_cast<int32_t>(i);
  for (Tape::Step& s : tape->steps)
    if (const auto at = of_below.find(s.node); at != of_below.end()) s.below = at->second;
  return tape;
}

}  // namespace vitrify
