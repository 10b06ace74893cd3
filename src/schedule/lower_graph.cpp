#include "schedule/lower_graph.h"

#include <algorithm>
#include <numeric>

#include "ops/shapes.h"

namespace vitrify::schedule {

using namespace ops;
using ir::Value;
using loop::AccumKind;
using loop::Instr;

namespace {

struct ValueHash {
  size_t operator()(const Value& v) const { return std::hash<const void*>()(v.node) * 31 + v.index; }
};

// How much an expression costs per element.
struct Price {
  int ops = 0, reads = 0;
  bool heavy = false;
};

bool is_heavy(loop::Op o) {
  using loop::Op;
  switch (o) {
    case Op::exp:
    case Op::exp2:
    case Op::expm1:
    case Op::log:
    case Op::log2:
    case Op::log10:
    case Op::log1p:
    case Op::sin:
    case Op::cos:
    case Op::tan:
    case Op::asin:
    case Op::acos:
    case Op::atan:
    case Op::sinh:
    case Op::cosh:
    case Op::tanh:
    case Op::asinh:
    case Op::acosh:
    case Op::atanh:
    case Op::erf:
    case Op::erfc:
    case Op::erfinv:
    case Op::lgamma:
    case Op::sigmoid:
    case Op::pow:
    case Op::atan2:
    case Op::hypot:
    case Op::fmod:
    case Op::remainder:
      return true;
    default:
      return false;
  }
}

constexpr int kMaxInlineOps = 64, kMaxInlineReads = 8;  // beyond, an expression is realised even for one reader
constexpr int64_t kSplitReduction = 32768;              // elements per output from which a reduction is worth two stages

class GraphLowering final : public Lowering {
 public:
  GraphLowering(const ir::Graph& g, const LowerOptions& o) : graph_(g), options_(o) {
    ctx_ = g.shared_ctx();
    program_.ctx = ctx_;
    for (auto& [n, u] : ir::count_uses(g)) uses_[n] = u;
  }

  LoopProgram run() {
    program_.constants.resize(graph_.constants.size());
    for (const ir::Node* n : graph_.nodes()) lower_node(*n);
    finish_outputs();
    return std::move(program_);
  }

  Tensor get(const Value& v) override {
    auto it = values_.find(v);
    VT_CHECK(it != values_.end(), "value %{}.{} used before it was lowered", v.node->id, v.index);
    const Tensor& t = it->second;
    if (t.lazy >= 0 && lazies_[t.lazy].realized) return *lazies_[t.lazy].realized;
    return t;
  }
  uint32_t uses(const Value& v) const override {
    auto it = uses_.find(v.node);
    return it == uses_.end() || v.index >= it->second.size() ? 0 : it->second[v.index];
  }

  Tensor map(DType dtype, Dims sizes, Elem f, int cost = 1, int reads = 1) override {
    const int32_t id = static_cast<int32_t>(lazies_.size());
    lazies_.push_back({std::move(f), {}, {}});
    Tensor t;
    t.dtype = dtype;
    t.sizes = std::move(sizes);
    t.lazy = id;
    t.cost = cost;
    t.reads = reads;
    t.at = [this, id](Body& b, const Index& i) { return lazies_[id].realized ? lazies_[id].realized->at(b, i) : lazies_[id].f(b, i); };
    return t;
  }

  Tensor realize(const Tensor& t) override {
    if (t.buffer >= 0) return t;
    if (t.lazy >= 0) {
      if (lazies_[t.lazy].realized) return *lazies_[t.lazy].realized;
      const Dims strides = lazies_[t.lazy].strides.size() == t.sizes.size() ? lazies_[t.lazy].strides : natural_strides(t);
      Tensor r = realize_as(t, strides);
      lazies_[t.lazy].realized = r;
      return r;
    }
    return realize_as(t, ir::contiguous_strides(t.sizes));
  }

  Tensor realize_as(const Tensor& t, const Dims& strides) override {
    const uint32_t buf = new_buffer(t.dtype, t.sizes, strides);
    Tensor target = buffer_tensor(buf);
    write_map(t, target);
    return target;
  }

  std::vector<Tensor> reduce(AccumKind kind, const Tensor& x0, std::span<const int64_t> dims, bool keepdim, DType acc, DType out,
                             const std::function<Val(Val)>& f) override {
    const bool split = kind != AccumKind::ArgMin && kind != AccumKind::ArgMax && should_split(x0, dims);
    if (split && kind == AccumKind::Welford) return split_welford(x0, dims, keepdim, acc, out, f);
    if (split && kind != AccumKind::OnlineSoftmax) {
      auto [parts, part_dims] = split_view(x0, dims, kind, acc, f);
      auto first = reduce_nest(kind, parts, part_dims, false, acc, acc_storage(acc), {});
      std::vector<int64_t> last{static_cast<int64_t>(first[0].sizes.size()) - 1};
      auto second = reduce_nest(kind, first[0], last, false, acc, out, {});
      return {keepdim ? keep(second[0], x0, dims) : second[0]};
    }
    return reduce_nest(kind, x0, dims, keepdim, acc, out, f);
  }

  Tensor scatter(const Tensor& init, Dims space, bool accumulate, const std::function<Write(Body&, const Index&)>& f) override {
    const uint32_t buf = new_buffer(init.dtype, init.sizes, ir::contiguous_strides(init.sizes));
    Tensor target = buffer_tensor(buf);
    write_map(init, target);
    LoopNode n = nest(space, iota_order(space.size()));
    Index idx = index_of(n, space);
    Write w = f(n.body, idx);
    Val v = ops::cast(w.value, compute_type(init.dtype));
    Int at = 0;
    for (size_t d = 0; d < w.target.size(); ++d) at += w.target[d] * target.strides[d];
    n.body.instrs.push_back({.op = accumulate ? loop::Op::store_add : loop::Op::store,
                             .type = v.type,
                             .a = v.id,
                             .b = w.mask.body ? w.mask.id : loop::kNoValue,
                             .buf = buf,
                             .at = at});
    n.scatter = true;
    push(std::move(n));
    return target;
  }

  Tensor concat(const std::vector<Tensor>& parts, int64_t dim) override {
    Dims sizes = parts[0].sizes;
    Int total = 0;
    for (auto& p : parts) total += p.sizes[dim];
    sizes[dim] = total;
    const Dims strides = concat_strides_.size() == sizes.size() ? concat_strides_ : ir::contiguous_strides(sizes);
    Tensor whole = buffer_tensor(new_buffer(parts[0].dtype, sizes, strides));
    Int start = 0;
    for (auto& p : parts) {
      write_map(p, slice(whole, dim, start, p.sizes[dim], 1));
      start += p.sizes[dim];
    }
    return whole;
  }

 private:
  struct Lazy {
    Elem f;
    std::optional<Tensor> realized;
    Dims strides;  // wanted when realised
  };

  static DType acc_storage(DType compute) { return compute; }
  static std::vector<size_t> iota_order(size_t n) {
    std::vector<size_t> o(n);
    std::iota(o.begin(), o.end(), 0);
    return o;
  }

  uint32_t new_buffer(DType dtype, const Dims& sizes, const Dims& strides) {
    BufferInfo b;
    b.dtype = dtype;
    b.sizes = sizes;
    b.strides = strides;
    Int extent = 1;
    bool empty = false;
    for (size_t d = 0; d < sizes.size(); ++d) {
      extent += (sizes[d] - 1) * strides[d];
      empty = empty || sizes[d].is(0);
    }
    b.extent = empty ? Int(0) : extent;
    program_.buffers.push_back(std::move(b));
    return static_cast<uint32_t>(program_.buffers.size() - 1);
  }

  Tensor buffer_tensor(uint32_t buf) {
    const BufferInfo& b = program_.buffers[buf];
    Tensor t;
    t.dtype = b.dtype;
    t.sizes = b.sizes;
    t.buffer = static_cast<int32_t>(buf);
    t.strides = b.strides;
    t.at = [buf, dtype = b.dtype, strides = b.strides](Body& body, const Index& i) {
      Int at = 0;
      for (size_t d = 0; d < i.size(); ++d) at += i[d] * strides[d];
      return body.load(buf, dtype, at);
    };
    return t;
  }

  loop::Loop make_loop(Int extent) {
    sym::Range r{0, std::numeric_limits<int64_t>::max()};
    if (extent.is_const()) r.hi = std::max<int64_t>(extent.value() - 1, 0);
    Int v = ctx_->symbol(sym::SymbolKind::Loop, {}, r);
    if (!extent.is_const()) ctx_->set_loop_extent(v, extent);
    return {v, extent};
  }

  // A nest over the dims of `sizes` in the given order (outermost first); dims of size 1 get no loop.
  LoopNode nest(const Dims& sizes, const std::vector<size_t>& order) {
    LoopNode n;
    n.body.ctx = ctx_;
    n.origin = current_;
    for (size_t d : order) {
      if (sizes[d].is(1)) continue;
      n.ranges.push_back(make_loop(sizes[d]));
      loop_dim_[n.ranges.back().var] = d;
    }
    return n;
  }
  Index index_of(const LoopNode& n, const Dims& sizes) {
    Index i(sizes.size(), Int(0));
    for (auto& l : n.ranges) i[loop_dim_.at(l.var)] = l.var;
    return i;
  }

  static std::vector<size_t> memory_order(const Dims& sizes, const Dims& strides) {
    auto order = iota_order(sizes.size());
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return sym::known_lt(strides[b], strides[a]).value_or(false); });
    return order;
  }

  void write_map(const Tensor& from, const Tensor& to) {
    LoopNode n = nest(to.sizes, memory_order(to.sizes, to.strides));
    const Index i = index_of(n, to.sizes);
    Val v = ops::cast(from.at(n.body, i), compute_type(to.dtype));
    Int at = to.offset;
    for (size_t d = 0; d < i.size(); ++d) at += i[d] * to.strides[d];
    n.body.instrs.push_back({.op = loop::Op::store, .type = v.type, .a = v.id, .buf = static_cast<uint32_t>(to.buffer), .at = at});
    push(std::move(n));
  }

  void push(LoopNode n) {
    for (const loop::Loop& l : n.ranges)
      if (l.extent.is(0)) return;  // runs never
    collect_accesses(n);
    program_.items.push_back({std::move(n), std::nullopt});
  }

  // One element of t, in a body of its own: dim d of its index is probe_[d].
  Body probe(const Tensor& t) {
    Body b;
    b.ctx = ctx_;
    while (probe_.size() < t.sizes.size()) probe_.push_back(ctx_->symbol(sym::SymbolKind::Loop, {}, {0, std::numeric_limits<int64_t>::max() >> 20}));
    Index i;
    for (size_t d = 0; d < t.sizes.size(); ++d) i.push_back(t.sizes[d].is(1) ? Int(0) : probe_[d]);
    t.at(b, i);
    return b;
  }

  // Dense strides in the order of what t is made of: nests that read both walk them alike, and fuse.
  Dims natural_strides(const Tensor& t) {
    const Dims plain = ir::contiguous_strides(t.sizes);
    if (t.sizes.size() < 2) return plain;
    for (const Instr& in : probe(t).instrs) {
      if (in.op != loop::Op::load) continue;
      ir::TensorType type;
      type.sizes = t.sizes;
      for (size_t d = 0; d < t.sizes.size(); ++d) {
        const auto along = t.sizes[d].is(1) ? std::nullopt : sym::affine_in(in.at, probe_[d]);
        type.strides.push_back(t.sizes[d].is(1) ? plain[d] : along ? along->first : Int(0));
      }
      if (is_dense(type)) return type.strides;
    }
    return plain;
  }

  Price price(const Tensor& t) {
    if (t.buffer >= 0) return {0, 1, false};
    const Body b = probe(t);
    Price p;
    for (auto& in : b.instrs) {
      if (in.op == loop::Op::load)
        ++p.reads;
      else if (in.op != loop::Op::constant && in.op != loop::Op::index)
        ++p.ops;
      p.heavy = p.heavy || is_heavy(in.op);
    }
    return p;
  }

  bool should_split(const Tensor& x, std::span<const int64_t> dims) {
    Int r = 1, all = 1;
    for (Int s : x.sizes) all = all * s;
    for (int64_t d : dims) r = r * x.sizes[d];
    if (!r.is_const() || !all.is_const() || r.value() < kSplitReduction) return false;
    return all.value() / r.value() < 4 * options_.threads;
  }

  static constexpr int64_t kParts = 16;

  // x with its reduced dims as two: [kept..., part, within]; elements past the end read as the accumulator's neutral value.
  std::pair<Tensor, std::vector<int64_t>> split_view(const Tensor& x, std::span<const int64_t> dims, AccumKind kind, DType acc,
                                                     const std::function<Val(Val)>& f) {
    int64_t rn = 1;
    for (int64_t d : dims) rn *= x.sizes[d].value();
    int64_t parts = kParts;
    for (int64_t p : {16, 12, 14, 15, 18, 20, 24, 28, 32, 8, 9, 10, 11, 13})
      if (rn % p == 0) {
        parts = p;
        break;
      }
    const int64_t chunk = (rn + parts - 1) / parts;
    std::vector<int64_t> kept, red(dims.begin(), dims.end());
    for (size_t d = 0; d < x.sizes.size(); ++d)
      if (std::find(red.begin(), red.end(), static_cast<int64_t>(d)) == red.end()) kept.push_back(static_cast<int64_t>(d));
    std::sort(red.begin(), red.end());
    Dims sizes;
    for (int64_t d : kept) sizes.push_back(x.sizes[d]);
    sizes.push_back(parts);
    sizes.push_back(chunk);
    const bool exact = parts * chunk == rn;
    Tensor t = map(acc, sizes, [=, src = x.at, xs = x.sizes](Body& b, const Index& i) {
      Index j(xs.size());
      for (size_t k = 0; k < kept.size(); ++k) j[kept[k]] = i[k];
      Int lin = i[kept.size()] * chunk + i[kept.size() + 1];
      Int rest = lin;
      for (size_t k = red.size(); k-- > 0;) {
        j[red[k]] = k == 0 ? rest : sym::mod(rest, xs[red[k]]);
        rest = sym::floordiv(rest, xs[red[k]]);
      }
      auto value = [&] {
        Val v = ops::cast(src(b, j), acc);
        return f ? f(v) : v;
      };
      if (exact) return value();
      return b.masked(b.index(lin) < b.constant_int(DType::I64, rn), value, neutral(b, kind, acc));
    });
    return {t, {static_cast<int64_t>(sizes.size()) - 1}};
  }

  static Val neutral(Body& b, AccumKind kind, DType acc) {
    switch (kind) {
      case AccumKind::Prod:
      case AccumKind::All:
        return b.constant(acc, 1);
      case AccumKind::Min:
        return is_float(acc) ? b.constant(acc, INFINITY) : b.constant_int(acc, acc == DType::Bool ? 1 : int_limit(acc, true));
      case AccumKind::Max:
        return is_float(acc) ? b.constant(acc, -INFINITY) : b.constant_int(acc, acc == DType::Bool ? 0 : int_limit(acc, false));
      default:
        return b.constant(acc, 0);
    }
  }
  static int64_t int_limit(DType t, bool max) {
    if (t == DType::U8) return max ? 255 : 0;
    const int bits = static_cast<int>(size_of(t)) * 8;
    const int64_t hi = bits == 64 ? std::numeric_limits<int64_t>::max() : (int64_t{1} << (bits - 1)) - 1;
    return max ? hi : -hi - 1;
  }

  Tensor keep(const Tensor& t, const Tensor& x, std::span<const int64_t> dims) {
    Tensor r = t;
    std::vector<int64_t> d(dims.begin(), dims.end());
    std::sort(d.begin(), d.end());
    for (int64_t k : d) r = unsqueeze(r, k);
    (void)x;
    return r;
  }

  std::vector<Tensor> split_welford(const Tensor& x, std::span<const int64_t> dims, bool keepdim, DType acc, DType out,
                                    const std::function<Val(Val)>& f) {
    Int n = 1;
    for (int64_t d : dims) n = n * x.sizes[d];
    const double count = static_cast<double>(n.value());
    Tensor sum = reduce(AccumKind::Sum, x, dims, true, acc, acc, f)[0];
    Tensor mean = map(acc, sum.sizes, [at = sum.at, count](Body& b, const Index& i) { return at(b, i) / count; });
    mean = realize(mean);
    Tensor wide = expand(mean, x.sizes);
    Tensor centred = map(acc, x.sizes, [src = x.at, m = wide.at, acc, f](Body& b, const Index& i) {
      Val v = ops::cast(src(b, i), acc);
      if (f) v = f(v);
      Val d = v - m(b, i);
      return d * d;
    });
    Tensor m2 = reduce(AccumKind::Sum, centred, dims, keepdim, acc, out, {})[0];
    Tensor m = mean;
    if (!keepdim) {
      std::vector<int64_t> d(dims.begin(), dims.end());
      std::sort(d.rbegin(), d.rend());
      for (int64_t k : d) m = squeeze(m, k);
    }
    return {cast(m, out), m2};
  }

  std::vector<Tensor> reduce_nest(AccumKind kind, const Tensor& x0, std::span<const int64_t> dims, bool keepdim, DType acc, DType out,
                                  const std::function<Val(Val)>& f) {
    Tensor x = x0;
    if (x.buffer < 0) {  // rules read x again after the reduction (softmax, norms): compute it once, the scheduler keeps it in registers or scratch
      const Price p = price(x);
      if (p.heavy || p.reads > 2) x = realize(x);
    }
    std::vector<bool> reduced(x.sizes.size());
    for (int64_t d : dims) reduced[d] = true;
    LoopNode n;
    n.body.ctx = ctx_;
    n.origin = current_;
    Index idx(x.sizes.size(), Int(0));
    Dims kept;
    // outer loops in logical order; inner loops too, unless memory says otherwise
    auto order =
        x.buffer >= 0 && kind != AccumKind::ArgMin && kind != AccumKind::ArgMax ? memory_order(x.sizes, x.strides) : iota_order(x.sizes.size());
    for (size_t d = 0; d < x.sizes.size(); ++d)
      if (!reduced[d]) {
        kept.push_back(x.sizes[d]);
        if (!x.sizes[d].is(1)) {
          n.ranges.push_back(make_loop(x.sizes[d]));
          idx[d] = n.ranges.back().var;
        }
      }
    for (size_t d : order)
      if (reduced[d] && !x.sizes[d].is(1)) {
        n.rranges.push_back(make_loop(x.sizes[d]));
        idx[d] = n.rranges.back().var;
      }
    Val v = ops::cast(x.at(n.body, idx), acc);
    if (f) v = f(v);
    loop::Accum a{kind, acc, {loop::kNoValue, loop::kNoValue}};
    int32_t position = loop::kNoValue;
    if (kind == AccumKind::ArgMin || kind == AccumKind::ArgMax) {
      Int lin = 0;
      for (size_t d = 0; d < x.sizes.size(); ++d)
        if (reduced[d]) lin = lin * x.sizes[d] + idx[d];
      position = n.body.index(lin).id;
    }
    n.body.instrs.push_back({.op = loop::Op::reduce, .type = acc, .a = v.id, .b = position, .iimm = 0});
    std::vector<Tensor> results;
    for (int r = 0; r < loop::num_results(kind); ++r) {
      const bool index_result = r == 1 && (kind == AccumKind::ArgMin || kind == AccumKind::ArgMax);
      a.results[r] = n.body.num_values++;
      const DType dtype = index_result ? DType::I64 : out;
      const uint32_t buf = new_buffer(dtype, kept, ir::contiguous_strides(kept));
      Tensor t = buffer_tensor(buf);
      Int at = 0;
      size_t k = 0;
      for (size_t d = 0; d < x.sizes.size(); ++d)
        if (!reduced[d]) at += idx[d] * t.strides[k++];
      int32_t value = a.results[r];
      const DType have = index_result ? DType::I64 : acc, want = compute_type(dtype);
      if (have != want) {
        const int32_t c = n.body.num_values++;
        if (want == DType::Bool) {
          const int32_t zero = n.body.num_values++;
          n.epilogue.push_back({.op = loop::Op::constant, .type = have, .result = zero});
          n.epilogue.push_back({.op = loop::Op::ne, .type = have, .a = value, .b = zero, .result = c});
        } else {
          n.epilogue.push_back({.op = loop::Op::cast, .type = want, .a = value, .result = c});
        }
        value = c;
      }
      n.epilogue.push_back({.op = loop::Op::store, .type = want, .a = value, .buf = buf, .at = at});
      results.push_back(t);
    }
    n.accums.push_back(a);
    push(std::move(n));
    if (keepdim)
      for (auto& t : results) t = keep(t, x, dims);
    return results;
  }

  // ---- nodes
  void lower_node(const ir::Node& n) {
    current_ = &n;
    if (n.op->name == "graph::input" || n.op->name == "graph::constant") {
      const Value v{const_cast<ir::Node*>(&n), 0};
      const ir::TensorType& t = n.outs[0];
      const uint32_t buf = new_buffer(t.dtype, t.sizes, t.strides);
      program_.buffers[buf].device = t.device;
      const int64_t index = std::get<Int>(n.args[0]).value();
      if (n.op->name == "graph::input") {
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
    const bool indexes = n.op->name.find("index") != std::string::npos;  // may be out of range all the same: their rules know
    if (row && row->lower && empty && !indexes &&
        !(n.op->flags & (ir::kRandom | ir::kEffect))) {  // nothing to compute, and no index arithmetic modulo a size of zero
      for (uint32_t i = 0; i < n.outs.size(); ++i) define({const_cast<ir::Node*>(&n), i}, full(n.outs[i].dtype, n.outs[i].sizes, 0));
      return;
    }
    if (row && row->lower && !n.outs.empty()) {
      concat_strides_ = n.outs[0].strides;
      if (row->lower(Args{n, *this}, results)) {
        VT_CHECK(results.size() == n.outs.size(), "{} lowered to {} results instead of {}", n.op->name, results.size(), n.outs.size());
        for (uint32_t i = 0; i < results.size(); ++i) define({const_cast<ir::Node*>(&n), i}, results[i]);
        return;
      }
    }
    lower_extern(n);
  }

  bool same_by_guards(const Dims& a, const Dims& b) {
    if (a.size() != b.size()) return false;
    auto equal = [&](Int p, Int q) { return p == q || (sym::has_hint(p) && sym::has_hint(q) && ctx_->guard_eq(p, q)); };
    for (size_t i = 0; i < a.size(); ++i)
      if (!equal(a[i], b[i])) return false;
    return true;
  }

  void define(Value v, Tensor t) {
    const ir::TensorType& type = v.type();
    if (!t) {  // a result nobody uses may be left out
      VT_CHECK(uses(v) == 0, "{} left out a result that is used", v.node->op->name);
      return;
    }
    if (same_by_guards(t.sizes, type.sizes)) t.sizes = type.sizes;  // of another operand, with symbols of its own
    VT_CHECK(t.dtype == type.dtype && t.sizes == type.sizes, "{} lowered to {}[{}] instead of {}[{}]", v.node->op->name, to_string(t.dtype),
             show(t.sizes), to_string(type.dtype), show(type.sizes));
    if (t.buffer < 0 && t.lazy < 0) {
      // a view of a map: give it an identity, so that realising it happens once
      t = map(t.dtype, t.sizes, t.at, t.cost, t.reads);
    }
    if (t.lazy >= 0 && !lazies_[t.lazy].realized) {
      if (lazies_[t.lazy].strides.empty() && is_dense(type)) lazies_[t.lazy].strides = type.strides;
      const Price p = price(t);
      const bool many = uses(v) >= 2 && (p.reads >= 2 || p.heavy || p.ops > 4);
      if (many || p.ops > kMaxInlineOps || p.reads > kMaxInlineReads) t = realize(t);
    }
    values_[v] = t;
  }

  static std::string show(const Dims& d) {
    std::string s;
    for (auto& x : d) s += (s.empty() ? "" : ",") + sym::str(x);
    return s;
  }

  // Non-overlapping and dense, provably: some order of the dims makes it contiguous.
  static bool is_dense(const ir::TensorType& t) {
    for (Int s : t.sizes)
      if (s.is(0)) return true;
    auto order = memory_order(t.sizes, t.strides);
    Int expect = 1;
    for (size_t k = order.size(); k-- > 0;) {
      const size_t d = order[k];
      if (t.sizes[d].is(1)) continue;
      if (!(t.strides[d] == expect)) return false;
      expect = expect * t.sizes[d];
    }
    return true;
  }

  static bool is_fixed(const ir::TensorType& t) {
    auto constant = [](Int i) { return i.is_const(); };
    return std::all_of(t.sizes.begin(), t.sizes.end(), constant) && std::all_of(t.strides.begin(), t.strides.end(), constant);
  }

  static bool takes_any_strides(std::string_view op) {
    if (!op.starts_with("aten::")) return true;
    for (std::string_view s :
         {"mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "_convolution", "mkldnn_convolution", "convolution_overrideable"})
      if (op.substr(6) == s) return true;
    return false;
  }

  void lower_extern(const ir::Node& n) {
    ExternNode e;
    e.node = &n;
    ir::for_each_input(const_cast<ir::Node&>(n), [&](Value& v) {
      Tensor t = realize(get(v));
      // Kernels of ATen may rely on what was made contiguous before them.
      Dims strides = v.type().strides;
      if (!takes_any_strides(n.op->name) && is_native(t.dtype) && !same_strides(t, strides)) {
        if (!is_dense(v.type()) && is_fixed(v.type())) strides = preserved_strides(*ctx_, v.type());  // results follow the order of its dims
        if (is_dense(v.type()) || is_fixed(v.type())) t = realize_as(t, strides);
      }
      for (size_t d = 0; d < t.sizes.size(); ++d)  // free, but results may repeat them
        if (t.sizes[d].is(1) && strides[d].is_const()) t.strides[d] = strides[d];
      e.operands.push_back(t);
    });
    const bool view = n.op->flags & ir::kView;
    for (uint32_t i = 0; i < n.outs.size(); ++i) {
      const ir::TensorType& t = n.outs[i];
      const uint32_t buf = new_buffer(t.dtype, t.sizes, t.strides);
      program_.buffers[buf].device = t.device;
      program_.buffers[buf].from_extern = true;
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
        LoopNode& copy = *program_.items.back().loop;
        for (auto& o : operands) copy.reads.push_back(static_cast<uint32_t>(o.buffer));
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
      const ir::TensorType& type = v.type();
      Dims want = type.strides;
      if (!is_dense(type) && is_native(type.dtype))  // an expanded result of its own becomes dense
        for (size_t d = 0; d < type.dim(); ++d)
          if (!type.sizes[d].is(1) && !sym::known_lt(Int(0), type.strides[d]).value_or(false)) want = ir::contiguous_strides(type.sizes);
      bool reuse = false;
      if (t.buffer >= 0) {
        const BufferInfo& b = program_.buffers[t.buffer];
        Int n = 1;
        for (Int s : t.sizes) n = n * s;
        const bool covers = t.offset.is(0) && b.extent == n;
        reuse = b.role == BufferRole::Intermediate && covers && (same_strides(t, want)) &&
                (static_cast<size_t>(t.buffer) >= taken.size() || !taken[t.buffer]);
        if (!is_native(type.dtype)) reuse = true;
      }
      if (!reuse) t = t.buffer < 0 && t.lazy >= 0 && !lazies_[t.lazy].realized ? realize_output(t, want) : realize_as(t, want);
      taken.resize(program_.buffers.size());
      taken[t.buffer] = true;
      BufferInfo& b = program_.buffers[t.buffer];
      if (b.role == BufferRole::Intermediate && !b.from_extern) b.role = BufferRole::Output;
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
  LowerOptions options_;
  LoopProgram program_;
  std::unordered_map<Value, Tensor, ValueHash> values_;
  std::unordered_map<const ir::Node*, boost::container::small_vector<uint32_t, 1>> uses_;
  std::deque<Lazy> lazies_;
  std::unordered_map<Int, size_t> loop_dim_;
  std::vector<Int> probe_;
  Dims concat_strides_;
  const ir::Node* current_ = nullptr;
};

}  // namespace

void collect_accesses(LoopNode& n) {
  n.reads.clear();
  n.writes.clear();
  auto add = [](std::vector<uint32_t>& v, uint32_t b) {
    if (std::find(v.begin(), v.end(), b) == v.end()) v.push_back(b);
  };
  for (auto* list : {&n.body.instrs, &n.epilogue})
    for (const Instr& i : *list) {
      if (i.op == loop::Op::load) add(n.reads, i.buf);
      if (i.op == loop::Op::store || i.op == loop::Op::store_add) add(n.writes, i.buf);
      if (i.op == loop::Op::store_add || (n.scatter && i.op == loop::Op::store)) add(n.reads, i.buf);
    }
}

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
