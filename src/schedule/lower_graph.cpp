#include "schedule/lower_graph.h"

#include <algorithm>
#include <ranges>
#include <unordered_set>

#include "ir/faults.h"
#include "ir/node_map.h"
#include "ir/views.h"
#include "ops/reads.h"
#include "ops/rules.h"
#include "ops/shapes.h"
#include "runtime/extern_table.h"
#include "schedule/nests.h"

namespace vitrify::schedule {

using ir::Value;

namespace {

constexpr int kMaxInlineOps = 64, kMaxInlineReads = 8;  // beyond, an expression is realised even for one reader
constexpr int kMaxDivisions = 12;                       // the same, of index arithmetic, which takes longer than the memory that it spares
constexpr uint32_t kMaxWeight = 1000;
constexpr int kMaxDepth = 200;  // maps that read each other recurse
constexpr int kManySteps = 12;  // ops since the last look at how large the indices are

class GraphLowering final : public Nests {
 public:
  GraphLowering(const ir::Graph& g, const LowerOptions& o) : Nests(g.shared_ctx(), o), graph_(g), values_(g), uses_(ir::count_uses(g)) {}

  LoopProgram run() {
    program_.constants.resize(graph_.constants.size());
    find_whole();
    for (const ir::Node* n : graph_.nodes()) lower_node(*n);
    finish_outputs();
    return std::move(program_);
  }

  Tensor get(const Value& v) override {
    const Tensor* t = values_.find(v);
    VT_CHECK(t, "value %{}.{} used before it was lowered", v.node->id, v.index);
    if (t->lazy >= 0 && lazies_[t->lazy].realized) return *lazies_[t->lazy].realized;
    return *t;
  }
  uint32_t uses(const Value& v) const override {
    const ir::UseCounts& counts = uses_.at(v.node);
    return v.index < counts.size() ? counts[v.index] : 0;
  }

 private:
  // What is surely computed in full: what an op that may fault makes must be, or its fault would be lost where it is cut away.
  void find_whole() {
    for (const Value& v : graph_.outputs)
      if (v) whole_.insert(v);
    for (auto it = graph_.nodes().rbegin(); it != graph_.nodes().rend(); ++it) {
      ir::Node& n = **it;
      const Reads reads = reads_of(n.op->name);
      const bool none = std::all_of(n.outs.begin(), n.outs.end(), [](auto& o) { return known_empty(o.sizes); });
      bool all = (reads == Reads::All && !none) || may_fault(n);
      for (uint32_t i = 0; i < n.outs.size() && !all && !none; ++i) all = whole_.contains(n.out(i));
      if (all && reads != Reads::Some) ir::for_each_input(n, [&](Value& v) { whole_.insert(v); });
      // A custom op may look at how a view lies in the memory that it is of, and keep it: that memory is its own, as in eager. A view as another
      // dtype is a call, and has the strides of what it is given.
      const auto other_dtype = [&] {
        const Value* x = n.args.empty() ? nullptr : std::get_if<Value>(&n.args[0]);
        return x && *x && (n.op->flags & ir::kView) && n.outs[0].dtype != x->type().dtype;
      };
      const bool custom = is_custom(n);
      if (custom || other_dtype())
        ir::for_each_input(n, [&](Value& v) {
          Value root = v;
          for (; root.node->op->flags & ir::kView; root = std::get<Value>(root.node->args[0]))
            if (custom) shown_.insert(root);
          if (custom || !(root == v)) in_memory_.insert(root);
        });
    }
  }

  // ---- nodes
  void lower_node(const ir::Node& n) {
    current_ = &n;
    if (ops::is_custom(n)) {  // what eager raises before it runs keeps it from running
      for (const Value& v : faulting_) values_[v] = realize(get(v));
      faulting_.clear();
    }
    if (ir::is_input(n) || ir::is_constant(n)) {
      const Value v{const_cast<ir::Node*>(&n), 0};
      const ir::TensorType& t = n.outs[0];
      const uint32_t buf = new_buffer(t.dtype, t.sizes, t.strides);
      program_.buffers[buf].device = t.device;
      const int64_t index = std::get<Int>(n.args[0]).value();
      if (ir::is_input(n)) {
        program_.buffers[buf].role = BufferRole::Input;
        if (program_.inputs.size() <= static_cast<size_t>(index)) program_.inputs.resize(index + 1, UINT32_MAX);
        program_.inputs[index] = buf;
      } else {
        program_.buffers[buf].role = BufferRole::Constant;
        program_.constants[index] = buf;
      }
      values_[v] = buffer_tensor(buf);
      return;
    }
    bool native = true;
    for (auto& o : n.outs) native = native && is_native(o.dtype) && o.device.kind == DeviceKind::CPU;
    ir::for_each_input(const_cast<ir::Node&>(n),
                       [&](Value& v) { native = native && is_native(v.type().dtype) && v.type().device.kind == DeviceKind::CPU; });
    const OpRow* row = native ? find_op(n.op->name) : nullptr;
    std::vector<Tensor> results;
    const bool empty =
        std::all_of(n.outs.begin(), n.outs.end(), [](auto& o) { return std::any_of(o.sizes.begin(), o.sizes.end(), [](Int s) { return s.is(0); }); });
    if (row && row->lower && empty && !(row->flags & ir::kChecksIndex) &&
        !(n.op->flags & (ir::kRandom | ir::kEffect))) {  // nothing to compute, and no index arithmetic modulo a size of zero
      // Eager may refuse it: an elementwise op, if for its types.
      if (!(n.op->flags & ir::kView) && (!is_elementwise(n.op->name) || may_fault(n) || !lowers(*row, n, results))) return lower_extern(n);
      if (shows_none(n, *row)) return;
      for (uint32_t i = 0; i < n.outs.size(); ++i) define({const_cast<ir::Node*>(&n), i}, full(n.outs[i].dtype, n.outs[i].sizes, 0));
      return;
    }
    if (row && row->lower && !n.outs.empty()) {
      concat_strides_ = n.outs[0].strides;
      if (lowers(*row, n, results)) {
        VT_CHECK(results.size() == n.outs.size(), "{} lowered to {} results instead of {}", n.op->name, results.size(), n.outs.size());
        for (uint32_t i = 0; i < results.size(); ++i) {
          const Value v{const_cast<ir::Node*>(&n), i};
          define(v, results[i]);
          if (!results[i] || !may_fault(n)) continue;
          if (whole_.contains(v))
            faulting_.push_back(v);
          else
            values_[v] = realize(get(v));
        }
        return;
      }
    }
    lower_extern(n);
  }

  // A view of no elements lies somewhere too, where a custom op sees it: in the memory of what has elements, or where something without any lies.
  bool shows_none(const ir::Node& n, const OpRow& row) {
    std::vector<Tensor> results;
    const Value* of = std::get_if<Value>(&n.args[0]);
    const bool shown = of && *of && std::ranges::any_of(std::views::iota(0u, static_cast<uint32_t>(n.outs.size())), [&](uint32_t i) {
                         return shown_.contains(Value{const_cast<ir::Node*>(&n), i});
                       });
    if (!shown) return false;
    const Tensor base = get(*of);
    if (base.buffer < 0) return false;
    if (known_empty(base.sizes)) {
      for (auto& o : n.outs) {
        Tensor& t = results.emplace_back(base);
        t.sizes = o.sizes, t.strides = o.strides;
        t.at = full(o.dtype, o.sizes, 0).at;
      }
    } else if (!lowers(row, n, results) || results.size() != n.outs.size()) {
      return false;
    }
    for (uint32_t i = 0; i < n.outs.size(); ++i) define({const_cast<ir::Node*>(&n), i}, results[i]);
    return true;
  }

  bool lowers(const OpRow& row, const ir::Node& n, std::vector<Tensor>& results) {
    try {
      return row.lower(Args{n, *this}, results);
    } catch (const ops::NoSuchDim&) {
      return false;
    }
  }

  bool same_by_guards(const Dims& a, const Dims& b) {
    if (a.size() != b.size()) return false;
    auto equal = [&](Int p, Int q) { return p == q || (sym::has_hint(p) && sym::has_hint(q) && ctx_->guard_eq(p, q)); };
    for (size_t i = 0; i < a.size(); ++i)
      if (!equal(a[i], b[i])) return false;
    return true;
  }

  Dims settled(Dims d) const {
    for (Int& i : d) i = ctx_->settled(i);
    return d;
  }
  ir::TensorType settled(ir::TensorType t) const {
    t.sizes = settled(std::move(t.sizes));
    t.strides = settled(std::move(t.strides));
    return t;
  }

  void define(Value v, Tensor t) {
    const ir::TensorType type = settled(v.type());
    if (!t) {  // a result nobody uses may be left out
      VT_CHECK(uses(v) == 0, "{} left out a result that is used", v.node->op->name);
      return;
    }
    t.sizes = settled(std::move(t.sizes));
    if (same_by_guards(t.sizes, type.sizes)) t.sizes = type.sizes;  // of another operand, with symbols of its own
    VT_CHECK(t.dtype == type.dtype && t.sizes == type.sizes, "{} lowered to {}[{}] instead of {}[{}]", v.node->op->name, to_string(t.dtype),
             show(t.sizes), to_string(type.dtype), show(type.sizes));
    int steps = 1;
    if (t.buffer < 0 && t.lazy < 0) {
      // a view of a map: give it an identity, so that realising it happens once
      t = map(t.dtype, t.sizes, t.at, t.cost, t.reads);
      steps = 3;
    }
    if (t.lazy >= 0 && !lazies_[t.lazy].realized) {
      if (lazies_[t.lazy].strides.empty() && is_dense(type)) lazies_[t.lazy].strides = type.strides;
      const bool again = uses(v) >= 2;
      count_steps(v, t, steps);
      if (in_memory_.contains(v)) {
        t = realize(t);
      } else if (again || t.cost > kMaxInlineOps / 4 || t.reads > kMaxInlineReads / 2) {  // estimates: far from the limits it need not be known
        const Price p = price(t);
        const bool many = again && (p.reads >= 2 || p.heavy || p.ops > 4);
        if (many || p.ops > kMaxInlineOps || p.reads > kMaxInlineReads || large(p, t)) t = realize(t);
      } else if (lazies_[t.lazy].steps > kManySteps) {
        lazies_[t.lazy].steps = 0;  // looked at
        if (large(price(t), t)) t = realize(t);
      }
    }
    if (t.buffer < 0 && (t.dtype == DType::F16 || t.dtype == DType::BF16) && !(v.node->op->flags & ir::kView)) {
      // As eager rounds it. What the backward computes again is the number that the forward had, whatever each of them writes to memory.
      Tensor rounded = map(t.dtype, t.sizes, [t](Body& b, const Index& i) { return stored(t, t.at(b, i)); }, t.cost, t.reads);
      lazies_[rounded.lazy].strides = lazies_[t.lazy].strides;
      lazies_[rounded.lazy].steps = lazies_[t.lazy].steps;
      t = rounded;
    }
    if (in_memory_.contains(v) && !(v.node->op->flags & ir::kView)) t = in_own_memory(t, type);
    values_[v] = t;
  }

  // Eager has made this afresh, and so nothing else lies where it does.
  Tensor in_own_memory(const Tensor& t, const ir::TensorType& type) {
    const Dims& strides = is_dense(type) ? type.strides : ir::contiguous_strides(type.sizes);
    const bool intermediate = t.buffer >= 0 && program_.buffers[t.buffer].role == BufferRole::Intermediate;
    if (intermediate && t.offset.is(0) && same_strides(t, strides) && looked_at_.insert(t.buffer).second) return t;
    const Tensor r = realize_as(t, strides);
    looked_at_.insert(r.buffer);
    return r;
  }

  // Views cost nothing at first; what has gone through many of them may have indices that cost more than the value.
  void count_steps(const Value& v, const Tensor& t, int own) {
    int steps = own;
    ir::for_each_input(*v.node, [&](Value& in) {
      const Tensor* x = values_.find(in);
      if (x && x->lazy >= 0 && !lazies_[x->lazy].realized) steps += lazies_[x->lazy].steps;
    });
    lazies_[t.lazy].steps = std::max(lazies_[t.lazy].steps, std::min(steps, 1 << 20));
  }
  bool large(Price p, const Tensor& t) {
    const auto over = [&] { return p.divisions > kMaxDivisions || p.weight > kMaxWeight; };
    if (over()) price_indices(probe_in_nest(t), p);
    return over() || p.depth > kMaxDepth;
  }

  static std::string show(const Dims& d) {
    std::string s;
    for (auto& x : d) s += (s.empty() ? "" : ",") + sym::str(x);
    return s;
  }

  static bool is_fixed(const ir::TensorType& t) {
    auto constant = [](Int i) { return i.is_const(); };
    return std::all_of(t.sizes.begin(), t.sizes.end(), constant) && std::all_of(t.strides.begin(), t.strides.end(), constant);
  }

  // An input's memory in eager.
  bool of_input(Value v) const {
    return std::ranges::any_of(graph_.inputs, [root = ir::root_of(v).node](const ir::Input& i) { return i.value.node == root; });
  }

  // The plan reads a copy of a view that is a call. A custom op gets the view.
  Tensor where_it_shows(const Tensor& t) const {
    const auto it = copied_.find(t.buffer);
    if (it == copied_.end()) return t;
    const Tensor& view = it->second;
    const bool whole = t.offset.is(0) && t.sizes == view.sizes;
    if (!whole && !(program_.buffers[t.buffer].strides == view.strides)) return t;
    Tensor r = view;
    if (!whole) r.sizes = t.sizes, r.strides = t.strides, r.offset = t.offset;
    return r;
  }

  void lower_extern(const ir::Node& n) {
    ExternNode e;
    e.node = &n;
    // A pass laid out what an op reads whose rule it trusted, and which declines: its results lie as eager's.
    const bool as_eager = !is_extern(n.op->name) && !n.outs.empty() && n.outs[0].strides == ir::contiguous_strides(n.outs[0].sizes);
    ir::for_each_input(const_cast<ir::Node&>(n), [&](Value& v) {
      Tensor t = realize(get(v));
      const ir::TensorType type = settled(v.type());
      Dims strides = type.strides;
      const bool here = type.device.kind == DeviceKind::CPU;
      if (here && sees_layout(n.op->name) && is_native(t.dtype) && !same_strides(t, strides)) {
        // Results of ATen's ops follow the order of its dims; a custom op may look at gaps too.
        const bool gaps = is_custom(n) && std::ranges::none_of(strides, [](Int s) { return s.is(0); });
        if (!is_dense(type) && !gaps) strides = is_fixed(type) ? preserved_strides(*ctx_, type) : likely_preserved_strides(*ctx_, type);
        t = realize_as(t, strides);
      } else if (as_eager && v.node->as_contiguous && v.index == 0 && is_native(t.dtype)) {
        strides = ir::contiguous_strides(type.sizes);
        if (!same_strides(t, strides)) t = realize_as(t, strides);
      }
      // Libraries read biases as dense.
      if (here && !sees_layout(n.op->name) && !(n.op->flags & ir::kLooksAtOffset) && t.sizes.size() == 1 && is_native(t.dtype) &&
          !t.strides[0].is(1) && !t.sizes[0].is(1))
        t = realize_as(t, {1});
      // What eager has copied begins elsewhere than what it was copied from.
      if ((n.op->flags & ir::kStartsAligned) && program_.buffers[t.buffer].role == BufferRole::Input && !of_input(v))
        t = realize(map(t.dtype, t.sizes, t.at, t.cost, t.reads));
      for (size_t d = 0; d < t.sizes.size(); ++d)  // free, but results may repeat them
        if (t.sizes[d].is(1)) t.strides[d] = strides[d];
      if (is_custom(n)) t = where_it_shows(t);
      e.operands.push_back(t);
    });
    if (lies_as_second(n.op->name) && n.outs[0].device.kind == DeviceKind::CPU && !same_strides(e.operands[0], e.operands[1].strides))
      e.operands[0] = realize_as(e.operands[0], e.operands[1].strides);
    const bool view = n.op->flags & ir::kView;
    for (uint32_t i = 0; i < n.outs.size(); ++i) {
      const ir::TensorType& t = n.outs[i];
      const uint32_t buf = new_buffer(t.dtype, t.sizes, t.strides);
      program_.buffers[buf].device = t.device;
      const bool placed = is_native(t.dtype) && is_fixed(t) && runtime::writes_into_slot(n.op->name);
      program_.buffers[buf].made_by = placed ? MadeBy::PlacedCall : MadeBy::Call;
      e.results.push_back(buf);
    }
    const std::vector<uint32_t> raw = e.results;
    const std::vector<Tensor> operands = e.operands;
    program_.items.push_back({std::nullopt, std::move(e)});
    for (uint32_t i = 0; i < n.outs.size(); ++i) {
      Tensor t = buffer_tensor(raw[i]);
      if (view && is_native(n.outs[i].dtype) && uses({const_cast<ir::Node*>(&n), i})) {
        // the result shares its operand's memory: copy it out while the operand lives
        t = realize_as(t, is_dense(n.outs[i]) ? n.outs[i].strides : ir::contiguous_strides(n.outs[i].sizes));
        if (auto& copy = program_.items.back().loop)  // of no elements there is none
          for (auto& o : operands) copy->reads.push_back(static_cast<uint32_t>(o.buffer));
        if (shown_.contains({const_cast<ir::Node*>(&n), i})) copied_.emplace(t.buffer, buffer_tensor(raw[i]));
      }
      values_[{const_cast<ir::Node*>(&n), i}] = t;
    }
  }

  void finish_outputs() {
    current_ = nullptr;
    std::vector<bool> taken(program_.buffers.size());
    for (const Value& v : graph_.outputs) {
      if (!v) {
        program_.outputs.push_back(std::nullopt);
        continue;
      }
      Tensor t = get(v);
      const ir::TensorType type = settled(v.type());
      Dims want = type.strides;
      if (!is_dense(type) && is_native(type.dtype))  // an expanded result of its own becomes dense
        for (size_t d = 0; d < type.dim(); ++d)
          if (!type.sizes[d].is(1) && type.strides[d].is(0))
            want = ir::contiguous_strides(type.sizes);  // a product of sizes is 0 only where there are no elements
      bool reuse = false;
      if (t.buffer >= 0) {
        const BufferInfo& b = program_.buffers[t.buffer];
        Int n = 1;
        for (Int s : t.sizes) n = n * s;
        const bool covers = t.offset.is(0) && b.extent == n;
        reuse = b.role == BufferRole::Intermediate && covers && (same_strides(t, want)) &&
                (static_cast<size_t>(t.buffer) >= taken.size() || !taken[t.buffer]);
        if (!is_native(type.dtype) || type.device.kind != DeviceKind::CPU) reuse = true;  // no kernel of ours may touch it
      }
      if (!reuse) t = t.buffer < 0 && t.lazy >= 0 && !lazies_[t.lazy].realized ? realize_output(t, want) : realize_as(t, want);
      taken.resize(program_.buffers.size());
      taken[t.buffer] = true;
      BufferInfo& b = program_.buffers[t.buffer];
      if (b.made_by != MadeBy::Kernel)
        b.made_by = MadeBy::Call;  // the caller gets the tensor that the call returns
      else if (b.role == BufferRole::Intermediate)
        b.role = BufferRole::Output;
      t.strides = reuse && !is_native(type.dtype) ? t.strides : want;
      program_.outputs.push_back(t);
    }
  }
  Tensor realize_output(const Tensor& t, const Dims& want) {
    lazies_[t.lazy].strides = want;
    return realize(t);
  }
  // Equal where it matters: strides of dims of size 1 are free.
  static bool same_strides(const Tensor& t, const Dims& want) {
    for (size_t d = 0; d < want.size(); ++d)
      if (!t.sizes[d].is(1) && !(t.strides[d] == want[d])) return false;
    return true;
  }

  const ir::Graph& graph_;
  ir::ValueMap<Tensor> values_;
  std::vector<Value> faulting_;  // may raise, and perhaps are not made yet
  ir::NodeMap<ir::UseCounts> uses_;
  std::unordered_set<Value> whole_, in_memory_, shown_;  // shown: views on the way to a custom op
  std::unordered_map<int32_t, Tensor> copied_;           // views that are calls, by the buffer of the copy
  std::unordered_set<int32_t> looked_at_;                // buffers that custom ops see whole
};

}  // namespace

LoopProgram lower_graph(const ir::Graph& g, const LowerOptions& o) { return GraphLowering(g, o).run(); }

std::string print(const LoopProgram& p) {
  std::string s;
  for (size_t k = 0; k < p.items.size(); ++k) {
    const Item& it = p.items[k];
    if (it.ext) {
      s += fmt::format("{}: extern {}", k, it.ext->node->op->name);
      for (auto& t : it.ext->operands) s += fmt::format(" b{}", t.buffer);
      s += " ->";
      for (uint32_t b : it.ext->results) s += fmt::format(" b{}", b);
      s += "\n";
      continue;
    }
    const LoopNode& n = *it.loop;
    s += fmt::format("{}: {} [", k, n.rranges.empty() ? "map" : "reduce");
    for (auto& l : n.ranges) s += fmt::format("{}<{} ", sym::str(l.var), sym::str(l.extent));
    s += "] [";
    for (auto& l : n.rranges) s += fmt::format("{}<{} ", sym::str(l.var), sym::str(l.extent));
    s += fmt::format("] {} instrs reads", n.body.instrs.size());
    for (uint32_t b : n.reads) s += fmt::format(" b{}", b);
    s += " writes";
    for (uint32_t b : n.writes) s += fmt::format(" b{}", b);
    s += fmt::format("  # {}\n", n.origin ? n.origin->op->name : "output");
  }
  return s;
}

}  // namespace vitrify::schedule
