#include "schedule/nests.h"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <unordered_set>

#include "ops/rules.h"
#include "ops/shapes.h"
#include "sym/measure.h"

namespace vitrify::schedule {

using loop::AccumKind;
using loop::Instr;

namespace {

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
    case Op::ndtr:
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

constexpr int64_t kSplitReduction = 32768;  // elements per output from which a reduction is worth two stages

std::vector<size_t> iota_order(size_t n) {
  std::vector<size_t> o(n);
  std::iota(o.begin(), o.end(), 0);
  return o;
}

constexpr int64_t kParts = 16;

int64_t int_limit(DType t, bool max) {
  if (t == DType::U8) return max ? 255 : 0;
  const int bits = static_cast<int>(size_of(t)) * 8;
  const int64_t hi = bits == 64 ? std::numeric_limits<int64_t>::max() : (int64_t{1} << (bits - 1)) - 1;
  return max ? hi : -hi - 1;
}

Val neutral(Body& b, AccumKind kind, DType acc) {
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

}  // namespace

Tensor Nests::map(DType dtype, Dims sizes, Elem f, int cost, int reads) {
  const int32_t id = static_cast<int32_t>(lazies_.size());
  lazies_.push_back({std::move(f), {}, {}});
  Tensor t;
  t.dtype = dtype;
  t.sizes = std::move(sizes);
  t.lazy = id;
  t.cost = cost;
  t.reads = reads;
  t.at = [this, id](Body& b, const Index& i) {
    if (lazies_[id].realized) return lazies_[id].realized->at(b, i);
    if (const auto v = b.given(id, i)) return *v;
    deepest_ = std::max(deepest_, ++depth_);
    struct Leave {
      int& depth;
      ~Leave() { --depth; }
    } leave{depth_};
    const Val v = lazies_[id].f(b, i);
    b.give(id, i, v);
    return v;
  };
  return t;
}

Tensor Nests::realize(const Tensor& t) {
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

Tensor Nests::realize_as(const Tensor& t, const Dims& strides) {
  const uint32_t buf = new_buffer(t.dtype, t.sizes, strides);
  Tensor target = buffer_tensor(buf);
  write_map(t, target);
  return target;
}

std::vector<Tensor> Nests::reduce(AccumKind kind, const Tensor& x0, std::span<const int64_t> dims, bool keepdim, DType acc, DType out,
                                  const std::function<Val(Val)>& f) {
  const bool split = kind != AccumKind::ArgMin && kind != AccumKind::ArgMax && should_split(x0, dims);
  if (split && loop::is_moments(kind)) return split_moments(kind, x0, dims, keepdim, acc, out, f);
  if (split) {
    int64_t elements = 1;
    for (int64_t d : dims) elements *= x0.sizes[d].value();
    const int64_t parts = parts_of(elements).first;
    const Tensor rows = in_parts(x0, dims, 0, parts, (elements + parts - 1) / parts, kind, acc, f);
    const int64_t within = static_cast<int64_t>(rows.sizes.size()) - 1, last = within - 1;
    auto first = reduce_nest(kind, rows, {&within, 1}, false, acc, acc, {});
    auto second = reduce_nest(kind, first[0], {&last, 1}, false, acc, out, {});
    return {keepdim ? keep_dims(second[0], dims) : second[0]};
  }
  return reduce_nest(kind, x0, dims, keepdim, acc, out, f);
}

Tensor Nests::sum_of_products(const Tensor& a, const Tensor& b, std::span<const int64_t> dims, DType type) {
  const Tensor factor = realize(b);
  return reduce_nest(AccumKind::Sum, realize(a), dims, false, type, type, {}, &factor)[0];
}

Tensor Nests::scatter(const Tensor& init, Dims space, bool accumulate, const std::function<Write(Body&, const Index&)>& f) {
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

Tensor Nests::concat(const std::vector<Tensor>& parts, int64_t dim) {
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

uint32_t Nests::new_buffer(DType dtype, const Dims& sizes, const Dims& strides) {
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

Tensor Nests::buffer_tensor(uint32_t buf) {
  const BufferInfo& b = program_.buffers[buf];
  Tensor t;
  t.dtype = b.dtype;
  t.sizes = b.sizes;
  t.buffer = static_cast<int32_t>(buf);
  t.strides = b.strides;
  for (Dims* dims : {&t.sizes, &t.strides})
    for (Int& i : *dims) i = ctx_->settled(i);
  t.at = [buf, dtype = b.dtype, strides = b.strides](Body& body, const Index& i) {
    Int at = 0;
    for (size_t d = 0; d < i.size(); ++d) at += i[d] * strides[d];
    return body.load(buf, dtype, at);
  };
  return t;
}

LoopNode Nests::nest(const Dims& sizes, const std::vector<size_t>& order) {
  LoopNode n;
  n.body.ctx = ctx_;
  n.origin = current_;
  for (size_t d : order) {
    if (sizes[d].is(1)) continue;
    n.ranges.push_back(vars_.at(LoopSide::Outer, n.ranges.size(), sizes[d]));
    loop_dim_[n.ranges.back().var] = d;
  }
  return n;
}

Index Nests::index_of(const LoopNode& n, const Dims& sizes) {
  Index i(sizes.size(), Int(0));
  for (auto& l : n.ranges) i[loop_dim_.at(l.var)] = l.var;
  return i;
}

std::vector<size_t> Nests::memory_order(const Dims& sizes, const Dims& strides) {
  auto order = iota_order(sizes.size());
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return sym::known_lt(strides[b], strides[a]).value_or(false); });
  return order;
}

void Nests::write_map(const Tensor& from, const Tensor& to) {
  LoopNode n = nest(to.sizes, memory_order(to.sizes, to.strides));
  const Index i = index_of(n, to.sizes);
  Val v = ops::cast(from.at(n.body, i), compute_type(to.dtype));
  Int at = to.offset;
  for (size_t d = 0; d < i.size(); ++d) at += i[d] * to.strides[d];
  n.body.instrs.push_back({.op = loop::Op::store, .type = v.type, .a = v.id, .buf = static_cast<uint32_t>(to.buffer), .at = at});
  push(std::move(n));
}

void Nests::push(LoopNode n) {
  for (const loop::Loop& l : n.ranges)
    if (l.extent.is(0)) return;  // runs never
  n.body.close();
  collect_accesses(n);
  program_.items.push_back({std::move(n), std::nullopt});
}

Body Nests::probe(const Tensor& t) {
  Body b;
  b.ctx = ctx_;
  while (probe_.size() < t.sizes.size()) probe_.push_back(ctx_->symbol(sym::SymbolKind::Loop, {}, {0, std::numeric_limits<int64_t>::max() >> 20}));
  Index i;
  for (size_t d = 0; d < t.sizes.size(); ++d) i.push_back(t.sizes[d].is(1) ? Int(0) : probe_[d]);
  t.at(b, i);
  return b;
}

Dims Nests::natural_strides(const Tensor& t) {
  const Dims plain = ir::contiguous_strides(t.sizes);
  if (t.sizes.size() < 2) return plain;
  for (const Instr& in : probe(t).instrs) {
    if (!loop::is_load(in.op)) continue;
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

Body Nests::probe_in_nest(const Tensor& t) {
  Body b;
  b.ctx = ctx_;
  Index i;
  for (Int s : t.sizes) {
    const size_t place = i.size();
    i.push_back(s.is(1) ? Int(0) : vars_.at(LoopSide::Outer, place, s).var);
  }
  t.at(b, i);
  return b;
}

void Nests::price_indices(const Body& b, Price& p) {
  std::unordered_set<Int> seen;
  p.weight = 0;
  for (auto& in : b.instrs) {
    sym::divisions(in.at, seen);
    p.weight = std::max(p.weight, sym::weight(in.at));
  }
  p.divisions = static_cast<int>(seen.size());
}

Nests::Price Nests::price(const Tensor& t) {
  if (t.buffer >= 0) return {0, 1, false};
  deepest_ = 0;
  const Body b = probe(t);
  Price p;
  p.depth = deepest_;
  price_indices(b, p);
  for (auto& in : b.instrs) {
    if (loop::is_load(in.op))
      ++p.reads;
    else if (in.op != loop::Op::constant && in.op != loop::Op::index)
      ++p.ops;
    p.heavy = p.heavy || is_heavy(in.op);
  }
  return p;
}

bool Nests::should_split(const Tensor& x, std::span<const int64_t> dims) {
  Int r = 1, all = 1;
  for (Int s : x.sizes) all = all * s;
  for (int64_t d : dims) r = r * x.sizes[d];
  if (!r.is_const() || !all.is_const() || r.value() < kSplitReduction) return false;
  return all.value() / r.value() < 4 * options_.threads;
}

std::pair<int64_t, int64_t> Nests::parts_of(int64_t elements) {
  for (int64_t p : {16, 12, 14, 15, 18, 20, 24, 28, 32, 8, 9, 10, 11, 13})
    if (elements % p == 0) return {p, elements / p};
  return {kParts, elements / kParts};
}

Tensor Nests::in_parts(const Tensor& x, std::span<const int64_t> dims, int64_t first, int64_t parts, int64_t chunk, AccumKind kind, DType acc,
                       const std::function<Val(Val)>& f) {
  int64_t rn = 1;
  for (int64_t d : dims) rn *= x.sizes[d].value();
  std::vector<int64_t> kept, red(dims.begin(), dims.end());
  for (size_t d = 0; d < x.sizes.size(); ++d)
    if (std::find(red.begin(), red.end(), static_cast<int64_t>(d)) == red.end()) kept.push_back(static_cast<int64_t>(d));
  std::sort(red.begin(), red.end());
  // As they lie: what is next to each other goes in vectors, with a sum for each lane, and in one chain of sums otherwise.
  if (const Dims strides = natural_strides(x); std::ranges::all_of(red, [&](int64_t d) { return strides[d].is_const(); }))
    std::ranges::stable_sort(red, std::greater(), [&](int64_t d) { return strides[d].value(); });
  Dims sizes;
  for (int64_t d : kept) sizes.push_back(x.sizes[d]);
  sizes.push_back(parts);
  sizes.push_back(chunk);
  const bool inside = first + parts * chunk <= rn;
  return map(acc, sizes, [=, src = x.at, xs = x.sizes](Body& b, const Index& i) {
    Index j(xs.size());
    for (size_t k = 0; k < kept.size(); ++k) j[kept[k]] = i[k];
    Int lin = i[kept.size()] * chunk + i[kept.size() + 1] + first;
    Int rest = lin;
    for (size_t k = red.size(); k-- > 0;) {
      j[red[k]] = k == 0 ? rest : sym::mod(rest, xs[red[k]]);
      rest = sym::floordiv(rest, xs[red[k]]);
    }
    auto value = [&] {
      const Val v = src(b, j);
      return ops::cast(f ? f(v) : v, acc);
    };
    if (inside) return value();
    return b.masked(b.index(lin) < b.constant_int(DType::I64, rn), value, neutral(b, kind, acc));
  });
}

Tensor Nests::keep_dims(Tensor t, std::span<const int64_t> dims) {
  std::vector<int64_t> d(dims.begin(), dims.end());
  std::sort(d.begin(), d.end());
  for (int64_t k : d) t = unsqueeze(t, k);
  return t;
}

// Moments of parts, which are joined: a sum of all would overflow where their mean does not, and round the mean of equal numbers to another one.
std::pair<Tensor, Tensor> Nests::joined_moments(AccumKind kind, const Tensor& x, std::span<const int64_t> dims, DType acc,
                                                const std::function<Val(Val)>& f) {
  int64_t rn = 1;
  for (int64_t d : dims) rn *= x.sizes[d].value();
  const auto [parts, chunk] = parts_of(rn);
  const int64_t rest = rn - parts * chunk;
  auto moments = [&](const Tensor& t) {
    const int64_t last = static_cast<int64_t>(t.sizes.size()) - 1;
    return reduce_nest(kind, t, {&last, 1}, false, acc, acc, {});
  };
  const auto each = moments(in_parts(x, dims, 0, parts, chunk, kind, acc, f)), among = moments(each[0]);
  const int64_t last = static_cast<int64_t>(each[1].sizes.size()) - 1;
  const Tensor within = reduce_nest(AccumKind::Sum, each[1], {&last, 1}, false, acc, acc, {})[0];
  Tensor mean = among[0];
  Tensor m2 = map(acc, mean.sizes, [within = within.at, among = among[1].at, n = static_cast<double>(chunk)](Body& b, const Index& i) {
    return within(b, i) + among(b, i) * n;
  });
  if (rest > 0) {  // fewer than there are parts
    const auto others = moments(squeeze(in_parts(x, dims, parts * chunk, 1, rest, kind, acc, f), static_cast<int64_t>(mean.sizes.size())));
    const double share = static_cast<double>(rest) / static_cast<double>(rn), before = static_cast<double>(parts * chunk);
    m2 = map(acc, mean.sizes, [m2 = m2.at, more = others[1].at, x = mean.at, y = others[0].at, share, before](Body& b, const Index& i) {
      const Val apart = y(b, i) - x(b, i);
      return m2(b, i) + more(b, i) + apart * (before * share) * apart;
    });
    mean = map(acc, mean.sizes, [x = mean.at, y = others[0].at, share](Body& b, const Index& i) {
      const Val v = x(b, i), w = y(b, i), apart = w - v;
      return where(finite(apart), v + apart * share, v * (1 - share) + w * share);  // an infinity stays what it is
    });
  }
  return {realize(mean), realize(m2)};
}

std::vector<Tensor> Nests::split_moments(AccumKind kind, const Tensor& x, std::span<const int64_t> dims, bool keepdim, DType acc, DType out,
                                         const std::function<Val(Val)>& f) {
  auto [mean, m2] = joined_moments(kind, x, dims, acc, f);
  if (acc == DType::F32) {
    // The mean of many numbers that lie far from zero stands still where what one adds to it is less than its last bit. Those of what they are apart
    // from it do not.
    const Tensor around = realize(map(acc, mean.sizes, [m = mean.at](Body& b, const Index& i) {
      const Val v = m(b, i);
      return where(finite(v), v, v.lit(0));
    }));
    const Tensor wide = expand(keep_dims(around, dims), x.sizes);
    const Tensor apart = map(acc, x.sizes, [src = x.at, m = wide.at, acc, f](Body& b, const Index& i) {
      const Val v = src(b, i);
      return ops::cast(f ? f(v) : v, acc) - m(b, i);
    });
    Tensor more;
    std::tie(more, m2) = joined_moments(kind, apart, dims, acc, {});
    mean = map(acc, around.sizes, [x = around.at, y = more.at](Body& b, const Index& i) { return x(b, i) + y(b, i); });
  }
  std::vector<Tensor> results{realize(cast(mean, out)), realize(cast(m2, out))};
  if (keepdim)
    for (Tensor& t : results) t = keep_dims(t, dims);
  return results;
}

std::vector<Tensor> Nests::reduce_nest(AccumKind kind, const Tensor& x0, std::span<const int64_t> dims, bool keepdim, DType acc, DType out,
                                       const std::function<Val(Val)>& f, const Tensor* factor) {
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
        n.ranges.push_back(vars_.at(LoopSide::Outer, n.ranges.size(), x.sizes[d]));
        idx[d] = n.ranges.back().var;
      }
    }
  for (size_t d : order)
    if (reduced[d] && !x.sizes[d].is(1)) {
      n.rranges.push_back(vars_.at(LoopSide::Inner, n.rranges.size(), x.sizes[d]));
      idx[d] = n.rranges.back().var;
    }
  Val v = x.at(n.body, idx);
  v = ops::cast(f ? f(v) : v, acc);
  loop::Accum a{kind, acc, {loop::kNoValue, loop::kNoValue}};
  int32_t with = factor ? ops::cast(factor->at(n.body, idx), acc).id : loop::kNoValue;
  if (kind == AccumKind::ArgMin || kind == AccumKind::ArgMax) {
    Int lin = 0;
    for (size_t d = 0; d < x.sizes.size(); ++d)
      if (reduced[d]) lin = lin * x.sizes[d] + idx[d];
    with = n.body.index(lin).id;
  }
  n.body.instrs.push_back({.op = loop::Op::reduce, .type = acc, .a = v.id, .b = with, .iimm = 0});
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
    for (auto& t : results) t = keep_dims(t, dims);
  return results;
}

bool Nests::is_dense(const ir::TensorType& t) {
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

void collect_accesses(LoopNode& n) {
  n.reads.clear();
  n.writes.clear();
  auto add = [](std::vector<uint32_t>& v, uint32_t b) {
    if (std::find(v.begin(), v.end(), b) == v.end()) v.push_back(b);
  };
  for (auto* list : {&n.body.instrs, &n.epilogue})
    for (const Instr& i : *list) {
      if (loop::is_load(i.op)) add(n.reads, i.buf);
      if (i.op == loop::Op::store || i.op == loop::Op::store_add) add(n.writes, i.buf);
      if (i.op == loop::Op::store_add || (n.scatter && i.op == loop::Op::store)) add(n.reads, i.buf);
    }
}

}  // namespace vitrify::schedule
