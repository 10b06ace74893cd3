#include "torch/split.h"

#include <algorithm>
#include <array>
#include <functional>
#include <iterator>
#include <limits>
#include <numeric>
#include <span>
#include <unordered_map>
#include <unordered_set>

#include "ir/faults.h"
#include "ops/lowering.h"
#include "ops/shapes.h"
#include "passes/cse.h"
#include "passes/dce.h"
#include "passes/partition.h"
#include "pipeline/pipeline.h"
#include "torch/as_it_was.h"
#include "torch/bits.h"
#include "torch/convert.h"
#include "torch/derivatives.h"
#include "torch/passes/layout.h"
#include "torch/slice.h"
#include "torch/snapshots.h"
#include "torch/tangents.h"
#include "torch/tape.h"

namespace vitrify {

namespace {

const bool named = add_stage_names({"conv_layout"});

using ir::Value;

constexpr uint32_t kUnordered = ir::kRandom | ir::kEffect;

// How many products each number of a result is the sum of, for products and convolutions.
double depth_of(const ir::Node& n) {
  double depth = 1;
  const bool convolution = n.op->name == "aten::convolution";
  ir::for_each_input(const_cast<ir::Node&>(n), [&](Value& v) {
    const ir::Dims& sizes = v.type().sizes;
    if (sizes.size() < 2) return;
    if (!convolution)
      depth = std::max(depth, static_cast<double>(passes::likely(sizes.back())));
    else if (v == std::get<Value>(n.args[1]))
      depth = static_cast<double>(passes::likely_bytes(v.type())) / static_cast<double>(size_of(v.type().dtype)) /
              static_cast<double>(passes::likely(sizes[0]));
  });
  return depth;
}

// Rows that a layer norm made, by which values: (x - mean) * rstd * weight + bias.
struct Normalized {
  Value x, mean, rstd, weight, bias;

  explicit Normalized(Value v) {
    ir::Node* n = v.node;
    if (n->op->name != "aten::native_layer_norm" || v.index != 0 || n->outs.size() != 3) return;
    auto given = [&](size_t i) { return std::holds_alternative<Value>(n->args[i]) ? std::get<Value>(n->args[i]) : Value(); };
    auto alike = [&](Value o) { return !o || o.type().dtype == v.type().dtype; };
    if (!alike(given(0)) || !alike(n->out(1)) || !alike(n->out(2)) || !alike(given(2)) || !alike(given(3))) return;
    x = given(0), mean = n->out(1), rstd = n->out(2), weight = given(2), bias = given(3);
  }
  std::vector<Value> operands() const {
    std::vector<Value> r;
    std::ranges::copy_if(std::array{x, mean, rstd, weight, bias}, std::back_inserter(r), [](Value v) { return static_cast<bool>(v); });
    return r;
  }
  Value again(ir::Graph& g, ir::Node* before, const ir::TensorType& type) const {
    auto make = [&](const char* op, std::vector<ir::Arg> args) { return g.insert_before(before, g.op(op), std::move(args), {type})->out(); };
    Value v = make("aten::mul.Tensor", {make("aten::sub.Tensor", {x, mean, sym::Int(1)}), rstd});
    if (weight) v = make("aten::mul.Tensor", {v, weight});
    if (bias) v = make("aten::add.Tensor", {v, bias, sym::Int(1)});
    return v;
  }
};

// What the nodes of a derivative read, as far as users can change it.
void find_reads(const JointProgram& j, uint32_t first, BackwardProgram& b) {
  ir::ValueMap<char> read(*j.program.graph);
  for (const ir::Node* n : j.program.graph->nodes())
    if (n->id >= first) ir::for_each_input(const_cast<ir::Node&>(*n), [&](Value& v) { read.emplace(root_of(v), 1); });
  for (uint32_t i = 0; i < j.given.size(); ++i)
    if (read.contains(j.given[i])) b.reads_given.push_back(i);
  for (uint32_t o = 0; o < j.num_forward; ++o)
    if (j.outputs[o] && read.contains(root_of(j.outputs[o]))) b.reads_outputs.push_back(o);
}

constexpr int64_t kPacked = 4096;  // elements of a mask from which on it is kept as bits

// Input `i` comes as it was kept; those that read it were recorded with something else.
void take_as(ir::Graph& g, size_t i, const Saved& kept) {
  const Value v = g.inputs[i].value;
  const ir::TensorType recorded = v.type();
  if (recorded.strides == kept.strides && !kept.bits) return;
  ir::TensorType dense = recorded;
  dense.strides = kept.strides;
  v.node->outs[v.index] = kept.bits ? bits_of(dense) : dense;
  const auto at = std::find_if(g.nodes().begin(), g.nodes().end(), [](const ir::Node* n) { return !n->op->name.starts_with("graph::"); });
  ir::Node *const first = at == g.nodes().end() ? nullptr : *at, *reads_input = nullptr;
  Value made = v;
  auto add = [&](const char* op, std::vector<ir::Arg> args, const ir::TensorType& type) {
    ir::Node* n = first ? g.insert_before(first, g.op(op), std::move(args), {type}) : g.append(g.op(op), std::move(args), {type});
    if (!reads_input) reads_input = n;
    made = n->out();
  };
  auto ints = [](const ir::Dims& d) { return std::vector<sym::Int>(d.begin(), d.end()); };
  if (kept.bits) add("vitrify::unpack_bits", {made, ints(dense.sizes), ints(dense.strides)}, dense);
  if (recorded.strides != dense.strides) add("aten::clone", {made, ir::MemoryFormat::Contiguous}, recorded);
  g.replace_uses(v, made);
  reads_input->args[0] = v;
}

// Of what a derivative could be given - `kept` values and the tangents - that which `g` reads, and whose sizes it may read, which the first `sized`
// have. What is not read may have been changed since.
std::vector<Value> needed_of(const ir::Graph& g, const std::vector<Value>& given, size_t sized, size_t kept, std::vector<uint32_t>& saved) {
  ir::NodeSet read(g);
  for (Value v : g.outputs)
    if (v) read.insert(v.node);
  for (ir::Node* n : g.nodes()) ir::for_each_input(*n, [&](Value& v) { read.insert(v.node); });
  std::vector<Value> needed;
  saved.clear();
  for (uint32_t k = 0; k < given.size(); ++k) {
    const auto& sizes = given[k].type().sizes;
    const bool tangent = k >= kept, symbolic = std::any_of(sizes.begin(), sizes.end(), [](sym::Int i) { return !i.is_const(); });
    if (!tangent && !(symbolic && k < sized) && !read.contains(g.inputs[k].value.node)) continue;
    needed.push_back(given[k]);
    if (!tangent) saved.push_back(k);
  }
  return needed;
}

// Which derivative, of those that this one differentiates, has computed it: each reads what was kept as it is by its time. A view is of the value
// that it is of, whoever made it.
constexpr int kOwn = std::numeric_limits<int>::max();
int computed_by(const JointProgram& j, const ir::Node& recorded) {
  if (recorded.op->flags & ir::kView) return 0;
  return static_cast<int>(std::ranges::upper_bound(j.begins, recorded.id) - j.begins.begin());
}

// What the program has returned or written, of what it has computed, and the derivatives that are differentiated here. In eager it is no other
// value's memory, be that computed alike: users can change the one, and what a derivative reads is the other.
std::unordered_set<const ir::Node*> shown_to_users(const JointProgram& j) {
  std::unordered_set<const ir::Node*> r;
  const auto show = [&](Value v) {
    if (const Value of = v ? root_of(v) : Value(); of && !is_input(*of.node)) r.insert(of.node);
  };
  std::ranges::for_each(std::span(j.outputs).first(j.num_forward), show);
  std::ranges::for_each(j.results, show);
  return r;
}

// Copies of those, given what each is a copy of.
ir::NodeSet copies_of(const std::unordered_set<const ir::Node*>& nodes, const ir::Graph& g, const ir::ValueMap<Value>& copies) {
  ir::NodeSet r(g);
  for (auto& [from, to] : copies)
    if (nodes.contains(from.node)) r.insert(to.node);
  return r;
}

struct Splitter {
  const JointProgram& j;
  const Options& options;
  Split out;

  std::shared_ptr<ir::Graph> joint;  // a copy to work on: the trace may go on
  ir::ValueMap<Value> recorded_as;   // from values of the copy
  ir::NodeSet late;                  // of the copy: recorded while gradients were computed
  ir::NodeSet layouts;               // of the copy: copies that change the layout of what they read
  std::vector<char> written;         // by what is given: the program writes to it
  std::vector<char> returned;        // by output: it is given to users
  std::vector<char> seen;            // and what is written to what they have, as all of it
  std::unordered_set<Value> fixed;   // users see it, and eager's backward would not keep it
  std::unordered_set<Value> sizes_only;
  ir::ValueMap<Value> snapshots;  // of what users can change, as the backward computes again with it: what it is in the forward
  ir::NodeSet held;               // of the copy: not computed again, since eager has saved the result itself, or since it is a copy to be kept
  ir::ValueMap<Normalized> rows;  // what rows of layer norms can be made of
  ir::ValueMap<Value> memories;   // of what is given, where eager reads it as it is by then and by way of views of what it was: those
  passes::Partition parts;
  std::vector<Value> forward_outputs, saved_values;
  std::vector<std::pair<uint32_t, uint32_t>> now;  // Whole::Snapshots
  std::vector<Value> others;                       // of the trace: what the derivative through all does not need, and others may

  size_t num_given() const { return j.given.size(); }
  Value given(size_t i) const { return joint->inputs[i].value; }
  Value tangent(size_t k) const { return joint->inputs[num_given() + k].value; }

  // What may raise is the program's to run though nothing reads it. A derivative that is differentiated again is no program: it checks what it reads,
  // as where it is not.
  bool checks(const ir::Node& n) const { return j.level == 0 && ir::may_fault(n); }

  void copy() {
    std::vector<Value> inputs = j.given;
    for (const JointProgram::Root& r : j.roots) inputs.push_back(r.tangent);
    std::vector<ir::Node*> unordered;
    const std::unordered_set<Value> known(inputs.begin(), inputs.end());
    for (ir::Node* n : j.program.graph->nodes())
      if (((n->op->flags & kUnordered) || (n->id < j.backward && checks(*n))) && n->id >= j.begin && n->id < j.end &&
          (n->outs.empty() || !known.contains(n->out())))
        unordered.push_back(n);
    find_others(known);
    if (j.level && !others.empty()) leave_out_unkept(inputs);
    std::vector<Value> wanted = j.outputs;
    wanted.insert(wanted.end(), others.begin(), others.end());
    seen = returned = returned_outputs(j.program, j.num_forward);
    for (const Mutation& m : j.program.mutations)
      if (!m.metadata_only && j.outputs[m.output] && has_memory(j.outputs[m.output].type(), j.given[m.input].type())) seen[m.output] = 1;
    find_reads(j, j.backward, out.backward);
    ir::ValueMap<Value> copies;
    if (j.level) {
      extract_from_kept(wanted, inputs, unordered, copies);
    } else {
      joint = extract(*j.program.graph, wanted, inputs, unordered, &copies);
    }
    ir::NodeMap<int> group(*joint);
    for (auto& [from, to] : copies) {
      recorded_as.emplace(to, from);
      group[to.node] = computed_by(j, *from.node);
      if (from.node->id >= j.backward && !is_input(*to.node)) late.insert(to.node);
    }
    for (ir::Node* n : joint->nodes())  // checks, which give nothing
      if (n->outs.empty())
        ir::for_each_input(*n, [&](Value& v) {
          if (late.contains(v.node)) late.insert(n);
        });
    const ir::NodeSet users = users_own(*joint);
    const ir::NodeSet shown = copies_of(shown_to_users(j), *joint, copies);
    // What a checkpoint repeats in the backward is not the forward's.
    passes::cse(*joint, options, [&](const ir::Node& n) {
      return users.contains(&n) || shown.contains(&n) ? -1 : late.contains(&n) ? kOwn : group.at(&n);
    });
    passes::dce(*joint, options);
    if (j.level == 0)
      pipeline::run_stage(
          {"conv_layout", "before the cut: what is kept is kept in this layout", [&](ir::Graph& g, const Options&) { return lay_out(g); }}, *joint,
          options);
  }

  // Gradients may end at a place behind which nothing reads them, and a user's own formula may read what it does not read where all results have
  // gradients. Numbers that were drawn cannot be made again for those.
  void find_others(const std::unordered_set<Value>& known) {
    const ir::Graph& g = *j.program.graph;
    if (!j.parts.empty()) {
      ir::NodeSet read(g);
      for (Value v : j.outputs)
        if (v) read.insert(v.node);
      for (ir::Node* n : g.nodes()) ir::for_each_input(*n, [&](Value& v) { read.insert(v.node); });
      for (ir::Node* n : g.nodes())
        if (n->id >= j.backward && n->id < j.end && !is_input(*n) && !read.contains(n) && !(n->op->flags & kUnordered))
          for (uint32_t i = 0; i < n->outs.size(); ++i)
            if (!is_undefined(n->outs[i])) others.push_back(n->out(i));
    }
    if (j.tape)
      for (Value v : j.tape->unread)
        if (!known.contains(v)) others.push_back(v);
    if (j.places() < 2 || !j.tape) return;
    const bool chooses = std::ranges::any_of(j.tape->steps, [](const Tape::Step& s) { return capture::of_python(*s.node); });
    if (!chooses && !ends_between(j)) return;
    std::unordered_set<Value> results;
    for (uint32_t o = 0; o < j.num_forward; ++o)
      if (j.outputs[o]) results.insert(root_of(j.outputs[o]));
    for (ir::Node* n : g.nodes())
      if ((n->op->flags & ir::kRandom) && n->id >= j.begin && n->id < j.backward)
        for (uint32_t i = 0; i < n->outs.size(); ++i)
          if (!known.contains(n->out(i)) && !results.contains(n->out(i))) others.push_back(n->out(i));
  }

  // The level below has kept what its derivative reads: what is made of anything else has nothing to be made of.
  void leave_out_unkept(const std::vector<Value>& inputs) {
    const ir::Graph& g = *j.program.graph;
    const auto read = extract(g, j.outputs, inputs, {});
    const auto uses = ir::count_uses(*read);
    ir::NodeMap<int> given(g), made(g);
    for (size_t i = 0; i < inputs.size(); ++i) given[inputs[i].node] = uses.at(read->inputs[i].value.node)[0] ? 1 : -1;
    for (ir::Node* n : g.nodes()) {
      made[n] = given.at(n) >= 0;
      if (!given.at(n)) ir::for_each_input(*n, [&](Value& v) { made[n] = made.at(n) && made.at(v.node); });
    }
    std::erase_if(others, [&](Value v) { return !made.at(v.node); });
  }

  // Some of the inputs are values that the trace computes, and computes again for each use: what is given is the first of them.
  void extract_from_kept(std::vector<Value> wanted, const std::vector<Value>& inputs, const std::vector<ir::Node*>& unordered,
                         ir::ValueMap<Value>& copies) {
    const ir::Graph& g = *j.program.graph;
    const auto num_wanted = static_cast<std::ptrdiff_t>(wanted.size());
    std::vector<Value> all;
    for (const ir::Input& in : g.inputs) all.push_back(in.value);
    wanted.insert(wanted.end(), inputs.begin(), inputs.end());
    for (const JointProgram::Was& w : j.was) wanted.push_back(w.now);
    ir::ValueMap<Value> first;
    const auto whole = extract(g, wanted, all, unordered, &first);
    ir::NodeSet draw(*whole);
    ir::NodeMap<int> group(*whole);
    ir::ValueMap<Value> recorded(*whole);
    for (auto& [from, to] : first) {
      recorded.emplace(to, from);
      group[to.node] = from.node->id >= j.backward && !is_input(*to.node) ? kOwn : computed_by(j, *from.node);
    }
    const std::unordered_set<const ir::Node*> drawn(unordered.begin(), unordered.end());
    for (auto& [to, from] : recorded)
      if (drawn.contains(from.node)) draw.insert(to.node);
    ir::NodeSet is_given(*whole);
    for (Value v : std::span(whole->outputs).subspan(static_cast<size_t>(num_wanted), inputs.size()))
      if (v) is_given.insert(v.node);
    const ir::NodeSet users = users_own(*whole);
    const ir::NodeSet shown = copies_of(shown_to_users(j), *whole, first);
    passes::cse(*whole, {},
                [&](const ir::Node& n) { return (users.contains(&n) && !is_given.contains(&n)) || shown.contains(&n) ? -1 : group.at(&n); });
    const auto end = whole->outputs.begin() + num_wanted, given_end = end + static_cast<std::ptrdiff_t>(inputs.size());
    const std::vector<Value> outs(whole->outputs.begin(), end), given(end, given_end), now(given_end, whole->outputs.end());
    read_as_was(*whole, j, now, given, [&](const ir::Node& n) { return group.at(&n); });
    std::vector<ir::Node*> draws;
    for (ir::Node* n : whole->nodes())
      if (draw.contains(n) || n->outs.empty()) draws.push_back(n);
    ir::ValueMap<Value> second;
    joint = extract(*whole, outs, given, draws, &second);
    for (size_t i = 0; i < inputs.size(); ++i) copies.emplace(inputs[i], joint->inputs[i].value);
    for (auto& [from, to] : second)
      if (const Value* r = recorded.find(from)) copies.emplace(*r, to);
  }

  bool lay_out(ir::Graph& g) {
    return convolve_channels_last(g, [&](ir::Node* copy, const ir::Node* reader) {
      if (late.contains(reader)) late.insert(copy);
      layouts.insert(copy);
      const Value of = std::get<Value>(copy->args[0]);
      if (const Value* known = recorded_as.find(of); known && of.type().is_contiguous() && !(of.node->op->flags & kUnordered))
        recorded_as.emplace(copy->out(), Value(*known));
    });
  }

  static bool has_memory(const ir::TensorType& value, const ir::TensorType& given) {
    return value.dtype == given.dtype && value.sizes == given.sizes && value.strides == given.strides;
  }

  template <class F>
  void for_each_unread(const ir::Graph& g, F&& f) const {
    const std::unordered_set<uint32_t> read(out.backward.reads_outputs.begin(), out.backward.reads_outputs.end());
    for (uint32_t o = 0; o < j.num_forward; ++o)
      if (seen[o] && j.outputs[o] && !read.contains(o)) f(g.outputs[o]);
  }

  // Results of which eager keeps nothing: what computes the same may be kept, and so is another value.
  ir::NodeSet users_own(const ir::Graph& g) const {
    ir::NodeSet users(g);
    for_each_unread(g, [&](Value v) {
      users.insert(v.node);
      users.insert(root_of(v).node);
    });
    return users;
  }

  // Users can change inputs and results; eager notices when it had saved them, and nothing is lost when it had not.
  void find_fixed() {
    const std::unordered_set<uint32_t> of_given(out.backward.reads_given.begin(), out.backward.reads_given.end());
    for (uint32_t i = 0; i < num_given(); ++i)
      if (!of_given.contains(i) && !j.level) fixed.insert(given(i));
    for_each_unread(*joint, [&](Value v) { fixed.insert({v, root_of(v)}); });
  }

  // What is computed again reads inputs and results as they were, whatever is written to them unseen by versions in between. But for calls that only
  // a memory budget lets run twice: copies of their weights would be what it saves.
  void find_snapshots() {
    ir::NodeSet visible(*joint);
    for (size_t i = 0; i < num_given(); ++i)
      if (!written[i] && is_visible(j, j.given[i])) visible.insert(given(i).node);
    for (uint32_t o = 0; o < j.num_forward; ++o)
      if (const Value v = joint->outputs[o]; v && seen[o] && !fixed.contains(v) && v == root_of(v) && !is_input(*v.node) && recorded_as.contains(v)) {
        visible.insert(v.node);
        held.insert(v.node);
      }
    Snapshots as_it_was(*joint, layouts, [&](Value v, ir::Node* before) -> Value {
      if (!visible.contains(v.node) || (held.contains(v.node) && result_of(v) == j.num_forward) || v.type().dtype == DType::Opaque) return {};
      const bool made = !is_input(*v.node) && recomputable(*v.node);
      const Value w = made ? again_before(*joint, before, v) : copy_before(*joint, before, v);
      snapshots.emplace(w, v);
      if (!made) held.insert(w.node);
      // A copy of another has strides of its own.
      if (ops::is_dense(joint->ctx(), v.type())) recorded_as.emplace(w, Value(recorded_as.at(v)));
      if (const Normalized* of = rows.find(v)) rows.emplace(w, Normalized(*of));
      return w;
    });
    const std::vector<ir::Node*> order = joint->nodes();
    for (ir::Node* n : order) {
      if (late.contains(n)) continue;
      if (Normalized of(n->out(0)); of.x) {
        for (Value* v : {&of.x, &of.weight, &of.bias})
          if (*v) *v = as_it_was.of(*v, n);
        rows.emplace(n->out(0), of);
      }
      if (recomputable(*n)) as_it_was.redirect(n);
    }
    find_memories(order);
  }

  Lost find_lost() const {
    std::vector<Value> r;
    for (size_t i = 0; i < num_given(); ++i)
      if (written[i] || j.unkept.contains(j.given[i])) r.push_back(given(i));
    return {*joint, {}, r};
  }

  // Assigning to the .data of a tensor changes neither what was made of it nor views of it.
  void find_memories(const std::vector<ir::Node*>& order) {
    if (!j.tape) return;
    const std::vector<Hold>&holds = j.tape->holds, &results = j.tape->holds_results;
    const bool twice = options.memory_budget < 1;  // calls read it too
    const auto matters = [&](Hold h) { return h == Hold::Both || (twice && h == Hold::Tensor); };
    if (std::ranges::none_of(holds, matters) && std::ranges::none_of(results, matters)) return;
    const auto how = [&](Value v) {
      if (!is_input(*v.node)) return result_of(v) < results.size() ? results[result_of(v)] : Hold::Memory;
      return input_index(*v.node) < holds.size() ? holds[input_index(*v.node)] : Hold::Memory;
    };
    Lost lost = find_lost();
    Snapshots of_memory(*joint, {}, [&](Value v, ir::Node* before) -> Value {
      if (how(v) == Hold::Memory || (twice && lost.contains(v))) return {};  // it is kept itself, and so given to the next order: nothing can make it
      const Value w = copy_before(*joint, before, v);
      memories.emplace(w, v);
      held.insert(w.node);
      recorded_as.emplace(w, Value(recorded_as.at(v)));
      return w;
    });
    for (ir::Node* n : order)
      if (late.contains(n))
        read_early_views(of_memory, n, late);
      else if (twice && !recomputable(*n) && !n->op->name.starts_with("graph::"))
        of_memory.redirect(n);
  }

  // Of values that are neither given nor results.
  double kept_bytes(const passes::Partition& p) const {
    double bytes = 0;
    for (Value v : p.saved)
      if (memories.contains(v))
        continue;
      else if (fixed.contains(v) || (!is_input(*v.node) && std::find(joint->outputs.begin(), joint->outputs.begin() + j.num_forward, v) ==
                                                               joint->outputs.begin() + j.num_forward))
        bytes += static_cast<double>(passes::likely_bytes(type_kept(v)));
    return bytes;
  }

  // Which of the forward's outputs it is, as far as users see them; num_forward: none.
  uint32_t result_of(Value v) const {
    uint32_t o = 0;
    while (o < j.num_forward && !(joint->outputs[o] == v && seen[o])) ++o;
    return o;
  }
  bool keeps_bits(Value v) const {
    const ir::TensorType& t = v.type();
    return t.dtype == DType::Bool && t.device.kind == DeviceKind::CPU && passes::likely_bytes(t) >= kPacked && !is_input(*v.node) &&
           !(v.node->op->flags & (kUnordered | ir::kDataDependent)) && result_of(v) == j.num_forward && ops::is_dense(joint->ctx(), t);
  }
  ir::TensorType type_kept(Value v) const { return keeps_bits(v) ? bits_of(v.type()) : v.type(); }
  Value packed(Value v) {
    const ir::Dims& strides = v.type().strides;
    return joint->append(joint->op("vitrify::pack_bits"), {v, std::vector<sym::Int>(strides.begin(), strides.end())}, {bits_of(v.type())})->out();
  }

  // What the forward computes and could compute again, by time for each byte that need not be kept.
  std::vector<const ir::Node*> by_price() const {
    std::vector<std::pair<double, const ir::Node*>> all;
    for (ir::Node* n : joint->nodes()) {
      if (late.contains(n) || n->op->name.starts_with("graph::") || n->outs.empty() || (n->op->flags & (kUnordered | ir::kDataDependent | ir::kView)))
        continue;
      double out = 0, in = 0;
      for (const ir::TensorType& t : n->outs) out += static_cast<double>(passes::likely_bytes(t));
      ir::for_each_input(*n, [&](Value& v) { in += static_cast<double>(passes::likely_bytes(v.type())); });
      const double moved = (in + out) / 10e9, computed = ops::is_extern(n->op->name) ? out / 4 * depth_of(*n) * 2 / 100e9 : 0;  // seconds, roughly
      all.emplace_back((moved + computed) / std::max(out, 1.0), n);
    }
    std::stable_sort(all.begin(), all.end(), [](auto& a, auto& b) { return a.first < b.first; });
    std::vector<const ir::Node*> r;
    for (auto& [price, n] : all) r.push_back(n);
    return r;
  }

  void cut() {
    ir::NodeSet read_by_calls(*joint), read_by_late_calls(*joint);
    for (ir::Node* n : joint->nodes())
      if (ops::is_extern(n->op->name))
        ir::for_each_input(*n, [&](Value& v) { (late.contains(n) ? read_by_late_calls : read_by_calls).insert(root_of(v).node); });
    auto cut_with = [&](std::span<const ir::Node* const> again) {
      ir::NodeSet twice(*joint);
      for (const ir::Node* n : again) twice.insert(n);
      return passes::partition({
          .graph = *joint,
          .num_forward = j.num_forward,
          .first_tangent = num_given(),
          .in_backward = [&](const ir::Node& n) { return late.contains(&n); },
          // What a call reads in the forward and in the backward is cheaper kept than made twice.
          .recomputable =
              [&](const ir::Node& n) {
                if (held.contains(&n)) return false;
                return twice.contains(&n) || layouts.contains(&n) ||
                       (recomputable(n) && !(read_by_calls.contains(&n) && read_by_late_calls.contains(&n)));
              },
          .materialized = [&](const ir::Node& n) { return ops::is_extern(n.op->name) || read_by_calls.contains(&n); },
          .may_save = [&](Value v) { return !fixed.contains(v) && recorded_as.contains(v); },
          // A bias is often all that is missing to make a large value again.
          .may_copy =
              [&](Value v) {
                if (!recorded_as.contains(v) || v.type().dtype == DType::Opaque) return false;
                return !memories.contains(v) && (snapshots.contains(v) || (is_input(*v.node) && v.type().is_contiguous()));
              },
          .is_held = [&](Value v) { return memories.contains(v); },
          .made_of =
              [&](Value v) {
                const bool called = read_by_calls.contains(v.node) && read_by_late_calls.contains(v.node);
                const Normalized* of = rows.find(v);
                return !of || called || (held.contains(v.node) && !snapshots.contains(v)) ? std::vector<Value>() : of->operands();
              },
      });
    };
    parts = cut_with({});
    if (options.memory_budget < 1) {
      // The cheapest to make again for what they weigh, as few as bring the cut under the budget.
      const std::vector<const ir::Node*> candidates = by_price();
      const double limit = options.memory_budget * kept_bytes(parts);
      auto with = [&](size_t n) { return cut_with(std::span(candidates).first(n)); };
      size_t low = 0, high = candidates.size();
      while (low < high) {
        const size_t middle = (low + high) / 2;
        if (kept_bytes(with(middle)) <= limit)
          high = middle;
        else
          low = middle + 1;
      }
      parts = with(low);
    }
    // Symbols that the backward could not read from anything else.
    std::vector<Value> known;
    std::ranges::copy_if(parts.saved, std::back_inserter(known), [&](Value v) { return !keeps_bits(v); });
    if (j.places() == 1) known.push_back(tangent(0));  // of several some may be missing
    const auto of_forward = [&](Value v) { return !parts.backward[v.node->id] && recorded_as.contains(v) && !j.unkept.contains(recorded_as.at(v)); };
    for (Value v : carriers(*joint, known, symbols_of_backward(), of_forward)) {
      sizes_only.insert(v);
      parts.saved.push_back(v);
    }
  }

  std::unordered_set<uint32_t> symbols_of_backward() const {
    const std::vector<Value> grads(joint->outputs.begin() + j.num_forward, joint->outputs.end());
    const std::vector<ir::Node*> also = unordered(true);
    std::vector<Value> inputs = parts.saved;
    for (const ir::Input& in : joint->inputs) inputs.push_back(in.value);
    return symbols_in(*extract(*joint, grads, inputs, also));
  }

  Value copy_of(Value v) {
    ir::TensorType type = v.type();
    type.wrapped_number = false;
    return joint->append(joint->op("aten::clone"), {v, ir::MemoryFormat::Preserve}, {type})->out();
  }

  void keep() {
    forward_outputs.assign(joint->outputs.begin(), joint->outputs.begin() + j.num_forward);
    for (Value v : parts.saved) {
      Saved s{Saved::Kind::Private, 0, recorded_as.at(v), v.type().strides};
      const uint32_t output = result_of(v);
      if (is_input(*v.node)) {
        s.index = input_index(*v.node);
        if (sizes_only.contains(v))
          s.kind = Saved::Kind::Sizes;
        else if (!written[s.index] && !fixed.contains(v))
          s.kind = Saved::Kind::Given;  // else: what it was before
      } else if (const Value* of = memories.find(v)) {
        const bool input = is_input(*of->node);
        s.kind = input ? Saved::Kind::Given : Saved::Kind::Result;
        s.index = input ? input_index(*of->node) : result_of(*of);
        s.snapshot = true;
      } else if (output < j.num_forward) {
        s.kind = Saved::Kind::Result;
        s.index = output;
      }
      if (s.kind == Saved::Kind::Private) {
        s.index = static_cast<uint32_t>(forward_outputs.size()) - j.num_forward;
        out.kept_bytes += passes::likely_bytes(type_kept(v));
        s.bits = keeps_bits(v);
        const Value* now = snapshots.find(v);
        s.snapshot = now && !fixed.contains(*now);
        forward_outputs.push_back(s.bits ? packed(v) : now ? copy_of(*now) : fixed.contains(v) ? copy_of(v) : v);
      }
      out.saved.push_back(s);
      saved_values.push_back(v);
    }
    for (uint32_t k = 0; k < parts.saved.size(); ++k) {
      const Value *memory = memories.find(parts.saved[k]), *of = memory ? memory : snapshots.find(parts.saved[k]);
      const auto at = of ? std::ranges::find(parts.saved, *of) : parts.saved.end();
      if (at != parts.saved.end()) now.emplace_back(k, static_cast<uint32_t>(at - parts.saved.begin()));
    }
    if (!ends_between(j)) return;
    for (const JointProgram::Root& r : j.roots) {
      const Value v = joint->outputs[r.output];
      if (is_input(*v.node) || !recorded_as.contains(v) || std::ranges::find(saved_values, v) != saved_values.end()) continue;
      out.saved.push_back({Saved::Kind::Result, r.output, recorded_as.at(v), v.type().strides});
      saved_values.push_back(v);
    }
  }

  std::vector<ir::Node*> unordered(bool backward) const {
    std::vector<ir::Node*> r;
    for (ir::Node* n : joint->nodes())
      if (((n->op->flags & kUnordered) || (!backward && checks(*n))) && static_cast<bool>(parts.backward[n->id]) == backward) r.push_back(n);
    return r;
  }

  void make_forward() {
    Program& f = out.forward;
    std::vector<Value> inputs;
    for (size_t i = 0; i < num_given(); ++i) inputs.push_back(given(i));
    f.num_args = j.program.num_args;
    f.captured = j.program.captured;
    ir::ValueMap<Value> copies, now;
    f.graph = extract(*joint, forward_outputs, inputs, unordered(false), &copies);
    for (auto& [was, is] : snapshots)
      if (const Value* copy = copies.find(was)) now.emplace(*copy, Value(copies.at(is)));
    for (auto& [was, is] : memories)
      if (const Value* copy = copies.find(was)) now.emplace(*copy, Value(copies.at(is)));
    f.graph->replace_uses(now);
    f.graph->remove_dead();
    for (uint32_t o = 0; o < forward_outputs.size(); ++o) {
      ResultSpec r;
      r.index = o;
      if (o < j.num_forward && !returned[o]) r.kind = ResultSpec::Kind::Undefined;
      f.results.push_back(r);
    }
    f.mutations = j.program.mutations;
    f.trained = true;
    f.resumes = j.program.resumes;
  }

  void remake() {
    for (Value v : parts.remade) {
      const auto& order = joint->nodes();
      ir::Node* after = *std::next(std::find(order.begin(), order.end(), v.node));
      joint->replace_uses(v, rows.find(v)->again(*joint, after, v.type()));
    }
    parts.backward.resize(joint->next_id());
  }

  void make_backward() {
    const auto first = joint->outputs.begin();
    const std::vector<Value> grads(first + j.num_forward, first + static_cast<std::ptrdiff_t>(j.outputs.size()));
    std::vector<Value> given = saved_values;
    for (size_t k = 0; k < j.roots.size(); ++k) given.push_back(tangent(k));
    ir::ValueMap<Value> copies;
    out.backward.graph = extract(*joint, grads, given, unordered(true), &copies);
    std::shared_ptr<const ir::Graph> whole = out.backward.graph;
    out.backward.saved.resize(saved_values.size());
    std::iota(out.backward.saved.begin(), out.backward.saved.end(), 0);
    if (!others.empty()) {
      const std::vector<Value> needed = needed_of(*whole, given, saved_values.size(), saved_values.size(), out.backward.saved);
      out.backward.graph = extract(*joint, grads, needed, unordered(true), &copies);
      std::vector<Value> all = grads;
      for (size_t o = j.outputs.size(); o < joint->outputs.size(); ++o)
        if (parts.backward[joint->outputs[o].node->id]) all.push_back(joint->outputs[o]);
      whole = extract(*joint, all, given, unordered(true));
    }
    out.whole = std::make_shared<Whole>(std::move(whole), std::move(now));
    ir::NodeSet again(*out.backward.graph);
    for (auto& [from, to] : copies)
      if (!parts.backward[from.node->id]) again.insert(to.node);
    compute_late(*out.backward.graph, again);
    for (size_t i = 0; i < out.backward.saved.size(); ++i) take_as(*out.backward.graph, i, out.saved[out.backward.saved[i]]);
    for (const Gradient& g : j.gradients) {
      out.backward.gradients.push_back(static_cast<uint32_t>(out.backward.gradients.size()));
      out.backward.types.push_back(g.type);
      out.backward.batch_dims.push_back(-1);
      out.backward.results.push_back(g.how);
      if (!is_of_tangent(g.how)) out.backward.results.back().index -= j.num_forward;
    }
  }

  Split run() {
    written.resize(num_given());
    for (const Mutation& m : j.program.mutations) written[m.input] = 1;
    copy();
    find_fixed();
    find_snapshots();
    cut();
    keep();
    make_forward();
    remake();
    make_backward();
    return std::move(out);
  }
};

}  // namespace

Split split(const JointProgram& j, const Options& options) { return Splitter{j, options}.run(); }

bool ends_between(const JointProgram& j) {
  if (j.parts.empty() || !j.tape) return false;
  const Tape& tape = *j.tape;
  if (std::ranges::any_of(tape.steps, [](const Tape::Step& s) { return !s.raises.empty(); })) return true;
  // A leaf that the program makes takes its gradient with it: nothing behind the results that follow from it is in the derivative through all.
  const std::vector<char> leads = tape.gives_gradients();
  return std::ranges::any_of(j.parts, [&](const JointProgram::Part& p) {
    return std::ranges::any_of(p.stops, [&](uint32_t k) { return tape.step_of(k) >= 0 && !leads[static_cast<size_t>(tape.step_of(k))]; });
  });
}

BackwardProgram backward_from(const JointProgram& j, const std::vector<Saved>& saved, const std::vector<Value>& tangents,
                              std::vector<Gradient> gradients, const std::vector<Value>& values, uint32_t first) {
  BackwardProgram b;
  for (Gradient& made : gradients) {
    const auto at = std::find_if(j.gradients.begin(), j.gradients.end(), [&](const Gradient& k) { return k.given == made.given; });
    const auto past = std::ranges::find(j.past_raising, made.given);
    const bool past_all = made.place < 0 && at == j.gradients.end();
    VT_CHECK(!past_all || past != j.past_raising.end(), "a gradient of what no step leads to");
    b.gradients.push_back(made.place >= 0 ? j.edge_to(static_cast<size_t>(made.place)) : static_cast<uint32_t>(at - j.gradients.begin()));
    if (past_all) b.gradients.back() += static_cast<uint32_t>(past - j.past_raising.begin());
    b.results.push_back(std::move(made.how));
    b.types.push_back(std::move(made.type));
    b.batch_dims.push_back(made.batch_dim);
  }
  find_reads(j, first, b);
  // The trace has what is computed alike once for each use; what is kept is kept of the first.
  std::vector<Value> inputs, wanted = values;
  for (const ir::Input& in : j.program.graph->inputs) inputs.push_back(in.value);
  for (Value v : tangents)
    if (v && !is_input(*v.node)) inputs.push_back(v);
  for (const Saved& s : saved) wanted.push_back(s.value);
  wanted.insert(wanted.end(), j.given.begin(), j.given.end());
  for (const JointProgram::Was& w : j.was) wanted.push_back(w.now);
  std::vector<ir::Node*> drawn;
  for (ir::Node* n : j.program.graph->nodes())
    if (n->id >= first && (n->op->flags & kUnordered)) drawn.push_back(n);
  ir::ValueMap<Value> copies;
  const auto whole = extract(*j.program.graph, wanted, inputs, drawn, &copies);
  ir::NodeSet late(*whole);
  ir::NodeMap<int> group(*whole);
  for (auto& [from, to] : copies) {
    group[to.node] = computed_by(j, *from.node);
    if (from.node->id >= first && !is_input(*to.node)) late.insert(to.node);
  }
  const ir::NodeSet shown = copies_of(shown_to_users(j), *whole, copies);
  passes::cse(*whole, {}, [&](const ir::Node& n) { return shown.contains(&n) ? -1 : late.contains(&n) ? kOwn : group.at(&n); });
  const std::vector<Value> made(whole->outputs.begin(), whole->outputs.begin() + static_cast<std::ptrdiff_t>(values.size()));
  const auto given_end = whole->outputs.end() - static_cast<std::ptrdiff_t>(j.was.size());
  std::vector<Value> given(whole->outputs.begin() + static_cast<std::ptrdiff_t>(values.size()), given_end);
  if (j.level) {
    const std::vector<Value> now(given_end, whole->outputs.end()), all(given.begin() + static_cast<std::ptrdiff_t>(saved.size()), given.end());
    read_as_was(*whole, j, now, all, [&](const ir::Node& n) { return late.contains(&n) ? kOwn : group.at(&n); });
  }
  // A user's own formula may read what it does not read where all results have gradients.
  const size_t kept = saved.size() + j.given.size();
  read_snapshots(*whole, j, saved, given, late);
  for (Value v : tangents)
    if (v) given.push_back(copies.at(v));
  std::vector<ir::Node*> unordered;
  for (ir::Node* n : whole->nodes())
    if ((late.contains(n) || n->outs.empty()) && (n->op->flags & kUnordered)) unordered.push_back(n);
  ir::ValueMap<Value> taken;
  b.graph = extract(*whole, made, given, unordered, &taken);
  const std::vector<Value> needed = needed_of(*b.graph, given, saved.size(), kept, b.saved);
  if (needed.size() < given.size()) b.graph = extract(*whole, made, needed, unordered, &taken);
  const auto uses = ir::count_uses(*b.graph);
  for (size_t i = 0; i < b.saved.size(); ++i)  // only its sizes were kept for the derivative through all, and this one reads it
    if (uint32_t& k = b.saved[i]; k < saved.size() && saved[k].kind == Saved::Kind::Sizes && uses.at(b.graph->inputs[i].value.node)[0])
      k = static_cast<uint32_t>(saved.size()) + j.place_of(saved[k].value);
  ir::NodeSet again(*b.graph);
  for (auto& [from, to] : taken)
    if (!late.contains(from.node) && !is_input(*to.node)) {
      if (from.node->op->flags & ir::kRandom) throw CaptureError("vitrify: a gradient needs random numbers that were not kept");
      again.insert(to.node);
    }
  compute_late(*b.graph, again);
  for (size_t i = 0; i < b.saved.size(); ++i)
    if (b.saved[i] < saved.size()) take_as(*b.graph, i, saved[b.saved[i]]);
  return b;
}

}  // namespace vitrify
