// Which results of a program lie behind others: autograd sees nodes of their own for them (JointProgram::parts).
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "torch/convert.h"
#include "torch/derivatives.h"
#include "torch/sym_node.h"
#include "torch/tracer_impl.h"

namespace vitrify {

using torch::autograd::Edge;
using torch::autograd::Node;

namespace {

using Input = std::pair<const Node*, uint32_t>;

// Nodes behind some edges, each after those behind it, and which of their inputs others lead to.
struct Behind {
  std::vector<const Node*> order;
  std::map<Input, bool> entered;
  std::unordered_map<const Node*, char> met;

  Behind(const std::vector<Edge>& from, const std::unordered_map<const Node*, char>& ends) : met(ends) {
    std::vector<std::pair<const Node*, size_t>> open;
    auto enter = [&](const Edge& e) {
      if (e.function && met.try_emplace(e.function.get(), 1).second) open.emplace_back(e.function.get(), 0);
    };
    for (const Edge& root : from) {
      enter(root);
      while (!open.empty()) {
        auto& [node, edge] = open.back();
        if (edge < node->num_outputs()) {
          const Edge next = node->next_edge(edge++);
          if (next.function) entered[{next.function.get(), next.input_nr}] = true;
          enter(next);
          continue;
        }
        order.push_back(node);
        open.pop_back();
      }
    }
  }
};

class Bits {
 public:
  explicit Bits(size_t n = 0) : words_((n + 63) / 64) {}
  void set(size_t i) { words_[i / 64] |= uint64_t{1} << (i % 64); }
  bool operator[](size_t i) const { return words_[i / 64] >> (i % 64) & 1; }
  void add(const Bits& other) {
    for (size_t w = 0; w < other.words_.size(); ++w) words_[w] |= other.words_[w];
  }
  bool operator==(const Bits&) const = default;

 private:
  std::vector<uint64_t> words_;
};

ir::TensorType type_of_input(const Node& n, uint32_t input) {
  const auto& metadata = n.input_metadata(input);
  ir::TensorType t;
  t.dtype = to_dtype(c10::typeMetaToScalarType(metadata.dtype()));
  t.device = to_device(metadata.device());
  for (const c10::SymInt& s : metadata.shape_as_dim_vector()) t.sizes.push_back(capture::from_sym_int(s));
  t.strides = ir::contiguous_strides(t.sizes);
  if (t.dtype == DType::Opaque) t.opaque_scalar_type = static_cast<uint8_t>(c10::typeMetaToScalarType(metadata.dtype()));
  return t;
}

// Views of what parts lead to, and of inputs that autograd would hear of before the program, are made between its parts, where eager's were: their
// gradients are then added in that order. None of the parts before leads to them.
void place_views(JointProgram& j, const Tracer::Impl::Level& level, const std::function<capture::Chain(uint32_t)>& chain_of) {
  std::vector<std::pair<uint64_t, uint32_t>> in_turn;
  for (uint32_t p = 0; p < j.parts.size(); ++p) {
    uint64_t made = 0;
    for (uint32_t k : j.parts[p].places) made = std::max(made, level.at(k).function->sequence_nr());
    in_turn.emplace_back(made, p);
  }
  std::ranges::sort(in_turn);
  const std::vector<ResultSpec>& results = j.program.results;
  for (uint32_t i = 0; i < results.size(); ++i) {
    ResultSpec& r = j.program.results[i];
    const bool is_view = r.turn && (r.kind == ResultSpec::Kind::ViewOfInput ? *r.turn == 0 : r.kind != ResultSpec::Kind::Value);
    const bool calls = std::ranges::any_of(r.path, [](const auto& v) { return v.call != 0; });
    if (!is_view || calls || std::ranges::any_of(results, [&](const auto& o) { return o.kind == ResultSpec::Kind::ViewOfValue && o.index == i; }))
      continue;
    const capture::Chain chain = chain_of(i);
    if (chain.empty()) continue;
    bool after = *r.turn == 0;
    for (const auto& [made, p] : in_turn) {
      const auto leads = [&](uint32_t k) { return k >= j.roots.size() && j.inner[k - j.roots.size()].view == static_cast<int32_t>(i); };
      if (!std::exchange(after, after || p + 1 == *r.turn)) continue;
      if (made >= chain[0]->sequence_nr() || std::ranges::any_of(j.parts[p].stops, leads)) break;
      r.turn = p + 1;
    }
  }
}

}  // namespace

void Tracer::Impl::find_parts(JointProgram& j, Level& level, const std::vector<at::Tensor>& outputs) {
  const auto base_of = [&](uint32_t i) {
    while (j.program.results[i].kind == ResultSpec::Kind::ViewOfValue) i = j.program.results[i].index;
    return i;
  };
  const auto is_view = [&](size_t i) {
    const ResultSpec& r = j.program.results[i];
    const bool made = r.kind == ResultSpec::Kind::ViewOfInput || r.kind == ResultSpec::Kind::ViewOfValue || r.kind == ResultSpec::Kind::ViewOfOutput;
    return made && !r.path.empty() && outputs[i].defined() && fake_of(outputs[i]).requires_grad();
  };
  size_t views = 0;
  for (size_t i = 0; i < outputs.size(); ++i) views += is_view(i);
  if (j.roots.empty()) return;
  std::unordered_map<const Node*, char> leave;
  for (const Edge& e : level.to) leave.emplace(e.function.get(), 0);
  const Behind behind(level.from, leave);
  // All gradients come to it at once: it draws, has effects, or is a user's derivative, which need not be linear.
  std::unordered_set<const Node*> whole;
  for (const ir::Node* n : graph->nodes())
    if (n->id >= j.backward && ((n->op->flags & ir::kRandom) || is_side_effect(*n)))
      if (const auto ran = std::ranges::upper_bound(ends, n->id, {}, [](const auto& e) { return e.second; }); ran != ends.end())
        whole.insert(ran->first);
  for (const Node* n : behind.order)
    if (capture::of_users(*n)) whole.insert(n);
  if (j.roots.size() + views < 2 && whole.empty()) return;

  std::unordered_map<const Node*, uint32_t> finished;
  for (uint32_t i = 0; i < behind.order.size(); ++i) finished[behind.order[i]] = i;
  std::map<const Node*, std::vector<uint32_t>> roots;  // by eager's node
  for (uint32_t k = 0; k < j.roots.size(); ++k)
    if (const Node* n = level.from[k].function.get(); finished.contains(n)) roots[n].push_back(k);

  std::map<uint32_t, const Node*> begins;  // by when it is finished
  std::map<Input, uint32_t> places;
  for (const auto& [n, of] : roots)
    for (uint32_t k : of) places.emplace(Input(n, level.from[k].input_nr), k);
  auto add_inner = [&](const Edge& e, int32_t view, const ir::TensorType& type) {
    places.emplace(Input(e.function.get(), e.input_nr), static_cast<uint32_t>(j.places()));
    const ir::Value tangent = add_tangent(fmt::format("inner{}", j.inner.size()), type);
    j.inner.emplace_back();
    j.inner.back().tangent = tangent;
    j.inner.back().view = view;
    level.inner.push_back(e);
    level.inner_tangents.push_back(new_tensor(tangent));
  };
  for (const auto& [input, _] : behind.entered)
    if (roots.contains(input.first) || whole.contains(input.first)) begins[finished.at(input.first)] = input.first;
  std::unordered_map<const Node*, const Node*> part;  // by the node where it begins; null: one of those in front
  std::unordered_set<const Node*> views_made;         // they are nodes by themselves, in front of what they are views of
  std::set<Input> views_given;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!is_view(i)) continue;
    const Edge e = torch::autograd::impl::gradient_edge(fake_of(outputs[i]));
    views_made.insert(e.function.get());
    views_given.emplace(e.function.get(), e.input_nr);
  }
  const auto is_apart = [&](const Node* n) {  // to the program as well: all that leads there leads to a view that is given
    if (!views_made.contains(n)) return false;
    for (auto at = behind.entered.lower_bound({n, 0}); at != behind.entered.end() && at->first.first == n; ++at)
      if (!views_given.contains(at->first)) return false;
    return true;
  };
  const auto find_part = [&] {
    part.clear();
    std::unordered_set<const Node*> meets;
    for (size_t i = behind.order.size(); i-- > 0;) {
      const Node* n = behind.order[i];
      if (meets.contains(n) && !views_made.contains(n)) begins[static_cast<uint32_t>(i)] = n;
      const auto own = begins.find(static_cast<uint32_t>(i));
      const Node* of = part[n] = own != begins.end() ? n : part[n];
      for (const Edge& e : n->next_edges())
        if (const Node* next = e.function.get(); next && finished.contains(next))
          if (const auto [at, fresh] = part.try_emplace(next, of); !fresh && at->second != of) meets.insert(next);
    }
  };
  // Those in front, to which none leads: where gradients of two meet, they go on together.
  std::vector<uint32_t> front, together;
  std::unordered_map<const Node*, uint32_t> met_by;
  const auto find_front = [&] {
    front.clear(), together.clear(), met_by.clear();
    for (uint32_t k = 0; k < j.roots.size(); ++k)
      if (const auto at = finished.find(level.from[k].function.get()); at == finished.end() || !begins.contains(at->second)) front.push_back(k);
    for (uint32_t f = 0; f < front.size(); ++f) {
      together.push_back(f);
      std::vector<const Node*> todo{level.from[front[f]].function.get()};
      while (!todo.empty()) {
        const Node* n = todo.back();
        todo.pop_back();
        if (!n || !finished.contains(n)) continue;
        if (const auto of = part.find(n); of != part.end() && of->second) continue;
        if (n != level.from[front[f]].function.get() && is_apart(n)) continue;
        if (const auto [at, fresh] = met_by.try_emplace(n, f); !fresh) {
          const uint32_t from = together[at->second];
          for (uint32_t& t : together)
            if (t == from) t = together[f];
          continue;
        }
        for (const Edge& e : n->next_edges()) todo.push_back(e.function.get());
      }
    }
  };
  const auto made_last = [&](uint32_t group) {
    uint64_t last = 0;
    for (uint32_t f = 0; f < front.size(); ++f)
      if (together[f] == group) last = std::max(last, level.from[front[f]].function->sequence_nr());
    return last;
  };
  const auto begins_part = [&](const Node* n) {
    const auto at = finished.find(n);
    return at != finished.end() && begins.contains(at->second);
  };
  // The gradients of an input, or of a node where a part begins, are added in eager's order: where a node gives one after nodes of a part that runs
  // later, or after a view, it begins a part of its own.
  struct Giver {
    uint64_t runs;  // its part
    const Node* node;
    bool in_front;
    const Bits* leads = nullptr;  // of one in front: to what its results lead
  };
  std::map<Input, std::vector<Giver>> views_give;
  for (uint32_t i = 0; i < outputs.size(); ++i) {
    if (!is_view(i)) continue;
    const ResultSpec& base = j.program.results[base_of(i)];
    const auto root = std::ranges::find(j.roots, base.index, &JointProgram::Root::output);
    const bool of_input = base.kind == ResultSpec::Kind::ViewOfInput;
    if (!of_input && root == j.roots.end()) continue;
    const Edge& to = of_input ? inputs[base.index]->edge : level.from[static_cast<size_t>(root - j.roots.begin())];
    if (const capture::Chain chain = capture::views_between(to, fake_of(outputs[i])); !chain.empty())
      views_give[{to.function.get(), to.input_nr}].push_back({chain[0]->sequence_nr(), chain[0].get(), false});
  }
  std::unordered_map<const Node*, Bits> leads_out;
  std::map<Input, size_t> out;
  for (const Edge& e : level.to) out.emplace(Input(e.function.get(), e.input_nr), out.size());
  if (j.roots.size() > 1)
    for (const Node* n : behind.order) {
      Bits& bits = leads_out.emplace(n, Bits(out.size())).first->second;
      for (const Edge& e : n->next_edges()) {
        if (const auto at = out.find({e.function.get(), e.input_nr}); at != out.end()) bits.set(at->second);
        if (const auto at = leads_out.find(e.function.get()); at != leads_out.end()) bits.add(at->second);
      }
    }
  const auto cut_before_late_givers = [&] {
    std::map<Input, std::vector<Giver>> givers = views_give;
    for (const Node* n : behind.order) {
      const auto of = part.find(n);
      const bool in_front = of == part.end() || !of->second;
      const auto met = met_by.find(n);
      if ((in_front && met == met_by.end()) || views_made.contains(n)) continue;
      const uint64_t runs = in_front ? made_last(together[met->second]) : of->second->sequence_nr();
      const Bits* leads = nullptr;
      if (in_front && front.size() > 1)
        if (const Node* from = level.from[front[met->second]].function.get(); leads_out.contains(from)) leads = &leads_out.at(from);
      for (const Edge& e : n->next_edges())
        if (e.function && (leave.contains(e.function.get()) || begins_part(e.function.get()) || is_apart(e.function.get())))
          givers[{e.function.get(), e.input_nr}].push_back({runs, n, in_front, leads});
    }
    bool any = false;
    for (auto& [_, all] : givers) {
      std::ranges::stable_sort(all, {}, &Giver::runs);
      uint64_t last[2] = {0, 0};                                            // of those that run later: in parts, in front
      const auto is_late_in_front = [&](const Giver& g, uint64_t number) {  // alike ones are made one below
        return g.leads && std::ranges::any_of(all.begin(), std::ranges::find(all, g.runs, &Giver::runs),
                                              [&](const Giver& o) { return o.leads && *o.leads != *g.leads && o.node->sequence_nr() > number; });
      };
      for (auto at = all.begin(); at != all.end();) {
        const auto same = std::find_if(at, all.end(), [&](const Giver& g) { return g.runs != at->runs; });
        for (auto g = at; g != same; ++g)
          if (const uint64_t number = g->node->sequence_nr(); number < last[0] || (!g->in_front && number < last[1]) || is_late_in_front(*g, number))
            if (const auto when = finished.find(g->node); when != finished.end() && !views_made.contains(g->node))
              any = begins.try_emplace(when->second, g->node).second || any;
        for (; at != same; ++at) last[at->in_front] = std::max(last[at->in_front], at->node->sequence_nr());
      }
    }
    return any;
  };
  // The engine knows nodes only: where results lead to different inputs, a node that has both would lead from each to all of them. One begins where
  // they meet.
  const auto cut_where_they_meet = [&] {
    if (front.size() < 2) return false;
    std::unordered_map<const Node*, const Bits*> from;  // what a result in front leads to that leads there
    for (uint32_t k : front)
      if (const Node* n = level.from[k].function.get(); finished.contains(n)) from.emplace(n, &leads_out.at(n));
    bool any = false;
    for (size_t i = behind.order.size(); i-- > 0;) {
      const Node* n = behind.order[i];
      const auto of = from.find(n);
      if (of == from.end() || begins_part(n)) continue;
      for (const Edge& e : n->next_edges())
        if (const Node* next = e.function.get(); next && finished.contains(next) && !begins_part(next) && !is_apart(next))
          if (const auto [at, fresh] = from.try_emplace(next, of->second); !fresh && *at->second != *of->second)
            any = begins.try_emplace(finished.at(next), next).second || any;
    }
    return any;
  };
  do {
    if (!begins.empty()) find_part();
    find_front();
  } while (cut_where_they_meet() || ((!begins.empty() || front.size() > 1) && cut_before_late_givers()));
  std::vector<JointProgram::Part> parts;
  std::unordered_map<uint32_t, uint32_t> part_of;  // by root
  for (const auto& [when, n] : begins) {
    JointProgram::Part& part = parts.emplace_back();
    if (const auto of = roots.find(n); of != roots.end()) part.places = of->second;
    for (uint32_t k : part.places) part_of[k] = static_cast<uint32_t>(parts.size()) - 1;
    for (auto at = behind.entered.lower_bound({n, 0}); at != behind.entered.end() && at->first.first == n; ++at) {
      if (places.contains(at->first)) continue;
      part.places.push_back(static_cast<uint32_t>(j.places()));
      add_inner(Edge(const_cast<Node*>(n)->getptr(), at->first.second), -1, type_of_input(*n, at->first.second));
    }
    // A user's node may have saved results that the program does not use: there a derivative of the derivative comes, and it runs once.
    for (uint32_t i = 0; capture::of_users(*n) && i < n->num_inputs(); ++i) {
      if (places.contains({n, i}) || n->input_metadata(i).was_default_constructed()) continue;
      part.places.push_back(static_cast<uint32_t>(j.places()));
      add_inner(Edge(const_cast<Node*>(n)->getptr(), i), -1, type_of_input(*n, i));
    }
  }
  // Views of what others lead to are made when that is, and not at the end, but for those through which its gradients come first.
  const capture::LastUsers last_users = capture::last_users(level.from, level.to);
  for (uint32_t i = 0; i < outputs.size(); ++i) {
    if (!is_view(i)) continue;
    const Edge e = torch::autograd::impl::gradient_edge(fake_of(outputs[i]));
    const Input input(e.function.get(), e.input_nr);
    const bool seen = behind.entered.contains(input) && !places.contains(input) && !roots.contains(input.first) && !leave.contains(input.first);
    // Gradients would go to the view by the node that users have, and round it by the part's.
    if (behind.entered.contains(input) && begins_part(input.first) && !roots.contains(input.first) && input.first->num_inputs() > 1)
      capture::fail("returns a part of what it splits, beside independent results of which one goes back by another part");
    const ResultSpec& base = j.program.results[base_of(i)];
    const bool of_input = base.kind == ResultSpec::Kind::ViewOfInput;
    std::optional<uint32_t> turn;
    for (uint32_t k = 0; k < j.roots.size(); ++k) {
      const bool its = of_input ? j.roots[k].written == static_cast<int32_t>(base.index) : j.roots[k].output == base.index;
      const auto at = part_of.find(k);
      if (!its || at == part_of.end()) continue;
      capture::Chain chain = capture::views_between(level.from[k], fake_of(outputs[i]));
      if (!chain.empty()) chain.insert(chain.begin(), level.from[k].function);
      if (seen || (!chain.empty() && !capture::comes_first(chain, last_users))) turn = at->second + 1;
    }
    if (!turn && seen && of_input && std::ranges::none_of(j.roots, [&](const auto& r) { return r.written == static_cast<int32_t>(base.index); }))
      turn = 0;
    if (!turn) continue;
    std::vector<uint32_t> todo{i};
    while (!todo.empty()) {
      const uint32_t made = todo.back();
      todo.pop_back();
      ResultSpec& r = j.program.results[made];
      if (r.turn == turn || (r.kind == ResultSpec::Kind::Value && r.path.empty())) continue;
      r.turn = turn;
      if (r.kind == ResultSpec::Kind::ViewOfValue) todo.push_back(r.index);
      for (uint32_t other = 0; other < j.program.results.size(); ++other) {  // of one call
        const ResultSpec& o = j.program.results[other];
        const bool calls = std::ranges::any_of(
            r.path, [&](const auto& v) { return v.call && std::ranges::any_of(o.path, [&](const auto& w) { return w.call == v.call; }); });
        if (o.kind == r.kind && o.index == r.index && calls) todo.push_back(other);
      }
    }
    if (seen) add_inner(e, static_cast<int32_t>(i), capture::as_fake(fake_of(outputs[i]))->view->type);
  }
  // They are so as well where those of two in front come by turns, or in another order than they were made in.
  std::map<Input, std::map<uint64_t, uint32_t, std::greater<>>> givers;  // by sequence number: of front
  for (const auto& [n, f] : met_by)
    for (const Edge& e : n->next_edges())
      if (e.function && (leave.contains(e.function.get()) || begins_part(e.function.get())))
        givers[{e.function.get(), e.input_nr}].emplace(n->sequence_nr(), f);
  for (bool changed = true; changed;) {
    changed = false;
    for (const auto& [_, by] : givers)
      for (auto at = by.begin(); at != by.end() && std::next(at) != by.end(); ++at) {
        const uint32_t first = together[at->second], then = together[std::next(at)->second];
        if (first == then || made_last(first) > made_last(then)) continue;
        std::ranges::replace(together, first, then);
        changed = true;
      }
  }
  std::map<uint32_t, std::vector<uint32_t>> apart;
  for (uint32_t f = 0; f < front.size(); ++f) apart[together[f]].push_back(front[f]);
  if (parts.empty() && j.inner.empty() && apart.size() < 2) return;

  std::vector<std::pair<uint64_t, JointProgram::Part>> in_front;
  for (auto& [_, of] : apart) {
    uint64_t made = 0;
    for (uint32_t k : of) made = std::max(made, level.from[k].function->sequence_nr());
    in_front.emplace_back(made, JointProgram::Part{std::move(of), {}, {}});
  }
  std::ranges::stable_sort(in_front, {}, [](const auto& p) { return p.first; });
  j.first_front = static_cast<uint32_t>(parts.size());
  for (auto& [_, p] : in_front) parts.push_back(std::move(p));
  const size_t first_edge = j.places();
  std::unordered_map<const Node*, Bits> leads_to;  // places, then edges
  std::map<Input, std::vector<uint32_t>> edges;
  for (size_t i = 0; i < level.to.size(); ++i) {
    const uint32_t given = j.place_of(level.of[i]);
    const auto at = std::ranges::find(j.gradients, given, &Gradient::given);
    const auto past = std::ranges::find(j.past_raising, given);
    auto& of = edges[{level.to[i].function.get(), level.to[i].input_nr}];
    if (at != j.gradients.end())
      of.push_back(static_cast<uint32_t>(at - j.gradients.begin()));
    else if (past != j.past_raising.end())
      of.push_back(static_cast<uint32_t>(j.gradients.size()) + static_cast<uint32_t>(past - j.past_raising.begin()));
  }
  const size_t num_edges = j.gradients.size() + j.past_raising.size();
  for (const Node* n : behind.order) {
    Bits& bits = leads_to.emplace(n, Bits(first_edge + num_edges)).first->second;
    for (const Edge& e : n->next_edges()) {
      const Input input(e.function.get(), e.input_nr);
      if (const auto at = places.find(input); at != places.end()) bits.set(at->second);
      if (const auto at = edges.find(input); at != edges.end())
        for (uint32_t i : at->second) bits.set(first_edge + i);
      if (const auto at = leads_to.find(input.first); at != leads_to.end()) bits.add(at->second);
    }
  }
  for (JointProgram::Part& part : parts) {
    Bits all(first_edge + num_edges);
    for (uint32_t k : part.places) {
      if (const auto to = edges.find({level.at(k).function.get(), level.at(k).input_nr}); to != edges.end())  // it is that of an input
        for (uint32_t i : to->second) all.set(first_edge + i);
      const auto at = leads_to.find(level.at(k).function.get());
      if (at == leads_to.end()) continue;
      all.add(at->second);
      for (uint32_t p = 0; p < first_edge; ++p)
        if (at->second[p]) j.way(k).behind.push_back(p);
    }
    for (uint32_t p = 0; p < first_edge; ++p)
      if (all[p]) part.stops.push_back(p);
    for (uint32_t i = 0; i < num_edges; ++i)
      if (all[first_edge + i]) part.edges.push_back(i);
  }
  j.parts = std::move(parts);
  place_views(j, level, [&](uint32_t i) {
    const ResultSpec& base = j.program.results[base_of(i)];
    if (base.kind == ResultSpec::Kind::ViewOfInput) return capture::views_between(inputs[base.index]->edge, fake_of(outputs[i]));
    const auto root = std::ranges::find(j.roots, base.index, &JointProgram::Root::output);
    if (root == j.roots.end() || root->written >= 0) return capture::Chain();
    return capture::views_between(level.from[static_cast<size_t>(root - j.roots.begin())], fake_of(outputs[i]));
  });
}

// Results that share a part have a node each in front of it, since eager's backward comes to those only that are given gradients.
void Tracer::Impl::find_nodes(JointProgram& j, const Level& level) const {
  std::vector<uint32_t> all(j.roots.size());
  std::iota(all.begin(), all.end(), 0);
  const auto find = [&](const std::vector<uint32_t>& places) {
    std::map<std::pair<uint64_t, const Node*>, std::vector<uint32_t>> nodes;
    for (uint32_t k : places)
      if (const Node* n = k < j.roots.size() ? level.from[k].function.get() : nullptr) nodes[{n->sequence_nr(), n}].push_back(k);
    if (nodes.size() > 1)
      for (auto& [n, of] : nodes) j.nodes.push_back(std::move(of));
  };
  if (j.parts.empty()) find(all);
  for (size_t p = j.first_front; p < j.parts.size(); ++p) find(j.parts[p].places);
}

// Gradients of gradients come to results of the level below, which derivatives have saved.
void Tracer::Impl::find_below(JointProgram& j, Level& level, const JointProgram& below, const Level& of_below) const {
  std::map<Input, uint32_t> places;
  for (uint32_t p = 0; p < below.places(); ++p) places.emplace(Input(of_below.at(p).function.get(), of_below.at(p).input_nr), p);
  std::unordered_map<const Node*, char> leave;
  for (const Edge& e : level.to) leave.emplace(e.function.get(), 0);
  const Behind behind(level.from, leave);
  std::unordered_map<const Node*, Bits> leads_to;
  for (const Node* n : behind.order) {
    Bits& bits = leads_to.emplace(n, Bits(below.places())).first->second;
    for (const Edge& e : n->next_edges()) {
      if (const auto at = places.find({e.function.get(), e.input_nr}); at != places.end()) bits.set(at->second);
      if (const auto at = leads_to.find(e.function.get()); at != leads_to.end()) bits.add(at->second);
    }
  }
  for (uint32_t p = 0; p < below.places(); ++p) {
    const auto at = static_cast<uint32_t>(j.places());
    for (uint32_t k = 0; k < j.roots.size(); ++k)
      if (const auto of = leads_to.find(level.from[k].function.get()); of != leads_to.end() && of->second[p]) j.roots[k].behind.push_back(at);
    if (std::ranges::none_of(j.roots, [&](const JointProgram::Root& r) { return !r.behind.empty() && r.behind.back() == at; })) continue;
    j.inner.emplace_back();
    j.inner.back().tangent = below.tangent(p);
    j.inner.back().below = static_cast<int32_t>(p);
    level.inner.push_back(of_below.at(p));
    level.inner_tangents.push_back(of_below.tangent(p));
  }
}

}  // namespace vitrify
