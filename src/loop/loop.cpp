#include "loop/loop.h"

#include <unordered_map>

#include "sym/measure.h"

namespace vitrify::loop {

std::string_view to_string(Op op) {
  switch (op) {
#define _(n, a, c) \
  case Op::n:      \
    return #n;
    VT_LOOP_OPS(_)
#undef _
  }
  return "?";
}

int arity(Op op) {
  switch (op) {
#define _(n, a, c) \
  case Op::n:      \
    return a;
    VT_LOOP_OPS(_)
#undef _
  }
  return 0;
}

std::string_view to_string(AccumKind k) {
  constexpr std::string_view names[] = {"sum", "prod", "min", "max", "any", "all", "argmin", "argmax", "welford", "moments"};
  return names[int(k)];
}

int num_results(AccumKind k) { return k >= AccumKind::ArgMin ? 2 : 1; }

bool lies_along(Int at, Int down, Int across) {
  auto d = sym::affine_in(at, down);
  if (!d || !d->first.is(1)) return false;
  auto a = sym::affine_in(d->second, across);
  return a && !a->first.is(0) && !a->first.is(1);
}

Int Kernel::outer_numel() const {
  Int n = 1;
  for (auto& l : outer) n *= l.extent;
  return n;
}

size_t scratch_bytes(const Kernel& k, const std::function<int64_t(uint32_t)>& symbol_values) {
  size_t total = 0;
  for (auto& b : k.buffers)
    if (b.kind == BufferKind::Scratch) total += (size_t(sym::eval(b.extent, symbol_values)) * size_of(b.dtype) + 63) & ~size_t(63);
  return total;
}

namespace {

// Kernels renamed to a common form: symbols by order of first appearance, SSA ids likewise. Two kernels are equal when these streams of words are.
class Canon {
 public:
  explicit Canon(const Kernel& k) : k_(k) {}

  std::vector<uint64_t> run() {
    put(k_.buffers.size());
    for (auto& b : k_.buffers) put(uint64_t(b.dtype) | uint64_t(b.kind) << 8 | uint64_t(uint32_t(b.inplace_of)) << 16);
    put(k_.sizes.size());
    for (Int s : k_.sizes) symbol(s);
    put(uint64_t(k_.vector_axis) << 2 | uint64_t(k_.serial) << 1 | k_.may_fault);
    for (auto& [s, id] : k_.indirect) paired_.emplace(sym::view(s).symbol->id, id);
    put(k_.outer.size());
    for (auto& l : k_.outer) loop(l);
    for (auto& b : k_.buffers) expr(b.extent);
    put(k_.stages.size());
    for (auto& s : k_.stages) {
      put(s.inner.size());
      for (auto& l : s.inner) loop(l);
      put(s.accums.size());
      for (auto& a : s.accums) {
        put(uint64_t(a.kind) | uint64_t(a.type) << 8);
        value(a.results[0]);
        value(a.results[1]);
      }
      put(s.body.size());
      for (auto& i : s.body) instr(i);
    }
    return std::move(words_);
  }

 private:
  void put(uint64_t w) { words_.push_back(w); }
  void loop(const Loop& l) {
    expr(l.extent);
    symbol(l.var);
  }
  void symbol(Int s) {
    auto* info = sym::view(s).symbol;
    auto [it, fresh] = symbols_.emplace(info->id, symbols_.size());
    put(it->second | uint64_t(info->kind) << 32);
    if (!fresh) return;
    // facts that change the code made from an expression
    put(uint64_t(info->range.lo));
    put(uint64_t(info->range.hi));
    put(uint64_t(info->multiple_of));
    auto p = paired_.find(info->id);
    if (p != paired_.end()) value(p->second);
  }
  // Terms keep the order of their context: kernels built alike compare equal, others may be found different, never falsely equal.
  void expr(Int e) {
    if (e.is_const()) {
      put(0);
      put(uint64_t(e.value()));
      return;
    }
    sym::View v = sym::view(e);
    if (v.op == sym::ExprOp::Symbol) {
      put(1 + uint64_t(v.op));
      return symbol(e);
    }
    if (sym::weight(e) > 16) {  // written once: its parts may repeat in each other
      const auto [it, fresh] = exprs_.emplace(e, exprs_.size());
      if (!fresh) return put(it->second << 8 | 0xff);
    }
    put(1 + uint64_t(v.op));
    put(v.args.size());
    for (Int a : v.args) expr(a);
  }
  void value(int32_t id) {
    if (id < 0) return put(~uint64_t(0));
    put(values_.emplace(id, values_.size()).first->second);
  }
  void instr(const Instr& i) {
    uint64_t f;
    static_assert(sizeof f == sizeof i.fimm);
    __builtin_memcpy(&f, &i.fimm, 8);
    put(uint64_t(i.op) | uint64_t(i.type) << 8 | uint64_t(i.buf) << 16);
    for (int32_t o : {i.a, i.b, i.c}) value(o);
    if (i.op == Op::constant) put(is_float(i.type) ? f : uint64_t(i.iimm));
    if (i.op == Op::reduce) put(uint64_t(i.iimm));
    if (is_load(i.op) || i.op == Op::store || i.op == Op::store_add || i.op == Op::index || i.op == Op::check_index) expr(i.at);
    value(i.result);
  }

  const Kernel& k_;
  std::vector<uint64_t> words_;
  std::unordered_map<uint32_t, uint64_t> symbols_;
  std::unordered_map<Int, uint64_t> exprs_;
  std::unordered_map<uint32_t, int32_t> paired_;
  std::unordered_map<int32_t, uint64_t> values_;
};

}  // namespace

std::vector<uint64_t> canonical_form(const Kernel& k) { return Canon(k).run(); }

}  // namespace vitrify::loop
