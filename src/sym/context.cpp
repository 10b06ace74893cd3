// Symbols, facts and guards.
#include <numeric>
#include <tuple>

#include "sym/known.h"
#include "sym/node.h"

namespace vitrify::sym {

Context::Context() : impl_(std::make_unique<Impl>()) {}
Context::~Context() = default;

Int Context::symbol(SymbolKind kind, std::optional<int64_t> hint, Range range) {
  Impl& c = *impl_;
  const uint32_t id = static_cast<uint32_t>(c.symbols.size());
  VT_CHECK(range.lo <= range.hi, "empty range of s{}", id);
  c.symbols.push_back({id, kind, hint, range, 1});
  try {
    c.extents.emplace_back();
    c.symbol_nodes.push_back(nullptr);
    Node n;
    n.kind = Kind::Symbol;
    n.symbol = id;
    n.info = &c.symbols.back();
    c.symbol_nodes.back() = c.intern(std::move(n));
  } catch (...) {  // without memory there is no such symbol, and the next one has its place
    c.symbols.resize(id);
    c.extents.resize(id);
    c.symbol_nodes.resize(id);
    throw;
  }
  if (kind == SymbolKind::Size || kind == SymbolKind::Unbacked) c.dynamic = true;
  return Int(c.symbol_nodes.back());
}

const Symbol& Context::symbol_info(Int s) const {
  VT_CHECK(is_symbol(s) && s.node()->ctx == impl_.get(), "not a symbol of this context");
  return impl_->symbols[s.node()->symbol];
}
Symbol& Context::mutable_symbol_info(Int s) {
  VT_CHECK(is_symbol(s) && s.node()->ctx == impl_.get(), "not a symbol of this context");
  ++impl_->epoch;
  return impl_->symbols[s.node()->symbol];
}

void Context::set_loop_extent(Int s, Int extent) {
  Symbol& info = mutable_symbol_info(s);
  VT_CHECK(info.kind == SymbolKind::Loop || info.kind == SymbolKind::Indirect, "an extent belongs to a loop or indirect symbol");
  VT_CHECK(!contains(extent, s), "extent contains its own symbol");
  info.range.lo = std::max<int64_t>(info.range.lo, 0);
  // An empty loop runs no body, so that any fact holds in it.
  if (extent.is_const()) info.range.hi = std::max(std::min(info.range.hi, std::max<int64_t>(extent.value(), 1) - 1), info.range.lo);
  impl_->extents[info.id] = extent;
}

size_t Context::num_symbols() const { return impl_->symbols.size(); }
bool Context::dynamic() const { return impl_->dynamic; }
Int Context::symbol_at(uint32_t id) const {
  VT_CHECK(id < impl_->symbol_nodes.size(), "no symbol {}", id);
  return Int(impl_->symbol_nodes[id]);
}
const std::vector<Guard>& Context::guards() const { return impl_->guards; }

namespace {

void require_hints(Int e) {
  if (!has_hint(e)) throw CaptureError(fmt::format("a decision depends on the value of {}, which is known only when the program runs", str(e)));
}

// Divides by the common factor; the leading coefficient of an equation is made positive.
Guard normal_guard(Guard::Kind kind, Int e) {
  Poly p = poly(e);
  int64_t g = 0;
  for (const Term& t : p.terms) g = t.coef == kNegInf ? 1 : std::gcd(g, t.coef);
  Context::Impl* ctx = e.node()->ctx;
  const bool equation = kind != Guard::Kind::GeZero;
  if (g > 1 && (!equation || (p.k % g == 0))) {
    for (Term& t : p.terms) t.coef /= g;
    p.k = floordiv_const(p.k, g);
  }
  e = from_poly(ctx, std::move(p));
  if (equation && !e.is_const() && poly(e).terms[0].coef < 0) e = -e;
  return {kind, e};
}

// What range the symbol of a lone one has left.
bool narrow(Context::Impl& c, const Node* symbol, Range n) {
  Range& r = c.symbols[symbol->symbol].range;
  n = {std::max(n.lo, r.lo), std::min(n.hi, r.hi)};
  if (n.lo > n.hi || (n.lo == r.lo && n.hi == r.hi)) return false;
  r = n;
  ++c.epoch;
  return true;
}

Range moved(Range r, int64_t by) {
  if (r.lo == Range().lo || __builtin_add_overflow(r.lo, by, &r.lo)) r.lo = Range().lo;
  if (r.hi == Range().hi || __builtin_add_overflow(r.hi, by, &r.hi)) r.hi = Range().hi;
  return r;
}

// Of two symbols whose difference is known, each has the other's range.
bool narrow_equals(Context::Impl& c, const Guard& g) {
  if (g.kind != Guard::Kind::EqZero) return false;
  const Poly p = poly(g.expr);
  if (p.terms.size() != 2 || p.k == kNegInf || p.terms[0].coef != 1 || p.terms[1].coef != -1) return false;
  const Node* of[2];
  for (size_t i = 0; i < 2; ++i) {
    if (p.terms[i].atoms.size() != 1 || p.terms[i].atoms[0]->kind != Kind::Symbol) return false;
    of[i] = p.terms[i].atoms[0];
  }
  const bool first = narrow(c, of[0], moved(c.symbols[of[1]->symbol].range, -p.k));
  return narrow(c, of[1], moved(c.symbols[of[0]->symbol].range, p.k)) || first;
}

// A guard holds in everything compiled after it: narrow the range of a lone symbol, and of those that are equal to it.
void learn(Context::Impl& c, const Guard& g) {
  Poly p = poly(g.expr);
  if (p.terms.size() == 1 && p.terms[0].atoms.size() == 1 && p.terms[0].atoms[0]->kind == Kind::Symbol && p.k != kNegInf) {
    const int64_t coef = p.terms[0].coef;
    if (coef != 1 && coef != -1) return;
    const Node* symbol = p.terms[0].atoms[0];
    const int64_t v = coef == 1 ? -p.k : p.k;  // where the expression is zero
    Range n = c.symbols[symbol->symbol].range;
    switch (g.kind) {
      case Guard::Kind::EqZero:
        n = {v, v};
        break;
      case Guard::Kind::NeZero:
        if (n.lo == v) ++n.lo;
        if (n.hi == v) --n.hi;
        break;
      case Guard::Kind::GeZero:
        (coef == 1 ? n.lo : n.hi) = v;
        break;
    }
    if (!narrow(c, symbol, n)) return;
  }
  for (bool more = true; more;) {
    more = false;
    for (const Guard& equal : c.guards) more = narrow_equals(c, equal) || more;
  }
}

void record(Context::Impl& c, Guard::Kind kind, Int e) {
  Guard g = normal_guard(kind, e);
  for (const Guard& old : c.guards)
    if (old.kind == g.kind && old.expr == g.expr) return;
  c.guards.push_back(g);
  ++c.epoch;
  learn(c, g);
}

}  // namespace

bool Context::guard_eq(Int a, Int b) {
  if (auto k = known_eq(a, b)) return *k;
  Int d = a - b;
  require_hints(d);
  const bool equal = hint(d) == 0;
  record(*impl_, equal ? Guard::Kind::EqZero : Guard::Kind::NeZero, d);
  return equal;
}

bool Context::guard_le(Int a, Int b) {
  if (auto k = known_le(a, b)) return *k;
  Int d = b - a;
  require_hints(d);
  const bool le = hint(d) >= 0;
  record(*impl_, Guard::Kind::GeZero, le ? d : -d - 1);
  return le;
}

bool Context::guard_lt(Int a, Int b) { return !guard_le(b, a); }

int64_t Context::specialize(Int a) {
  if (a.is_const()) return a.value();
  Range r = range_of(a);
  if (r.lo == r.hi) return r.lo;
  require_hints(a);
  const int64_t v = hint(a);
  VT_CHECK(guard_eq(a, v), "hint of {} contradicts its facts", str(a));
  return v;
}

Int Context::settled(Int e) const {
  if (e.is_const()) return e;
  std::vector<Int> symbols;
  free_symbols(e, symbols);
  std::vector<std::pair<Int, Int>> fixed;
  for (Int s : symbols)
    if (const Range& r = impl_->symbols[s.node()->symbol].range; r.lo == r.hi) fixed.emplace_back(s, Int(r.lo));
  if (!fixed.empty()) e = substitute(e, fixed);
  if (e.is_const()) return e;
  if (const Range r = range_of(e); r.lo == r.hi) return r.lo;
  for (const Guard& g : impl_->guards) {
    // What is left of a sum is a number only if both have the same symbols.
    if (g.kind != Guard::Kind::EqZero || g.expr.is_const() || g.expr.node()->symbols_mask != e.node()->symbols_mask) continue;
    if (const Int d = e - g.expr; d.is_const()) return d;
    if (const Int d = e + g.expr; d.is_const()) return d;
  }
  return e;
}

Known known(const Context& ctx) {
  const Context::Impl& c = const_cast<Context&>(ctx).impl();
  Known k{c.guards, {}};
  for (const Symbol& s : c.symbols) k.symbols.emplace_back(s.range, s.multiple_of);
  return k;
}

void go_back(Context& ctx, const Known& k) {
  Context::Impl& c = ctx.impl();
  c.guards = k.guards;
  for (size_t i = 0; i < k.symbols.size(); ++i) std::tie(c.symbols[i].range, c.symbols[i].multiple_of) = k.symbols[i];
  ++c.epoch;
}

Hints::Hints(Context& ctx, const std::vector<std::optional<int64_t>>& sizes) : ctx_(ctx) {
  auto& symbols = ctx.impl().symbols;
  for (uint32_t id = 0; id < symbols.size() && id < sizes.size(); ++id) {
    if (!sizes[id] || !symbols[id].hint || *symbols[id].hint == *sizes[id]) continue;
    before_.emplace_back(id, *symbols[id].hint);
    symbols[id].hint = sizes[id];
  }
  if (!before_.empty()) ++ctx.impl().hinted;
}

Hints::~Hints() {
  for (const auto& [id, hint] : before_) ctx_.impl().symbols[id].hint = hint;
  if (!before_.empty()) ++ctx_.impl().hinted;
}

uint64_t hinted(const Context& ctx) { return const_cast<Context&>(ctx).impl().hinted; }

}  // namespace vitrify::sym
