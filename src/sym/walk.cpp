// Walks: evaluation, substitution, structure.
#include <unordered_map>

#include "sym/holds.h"
#include "sym/measure.h"
#include "sym/node.h"

namespace vitrify::sym {

bool is_symbol(Int e) { return !e.is_const() && e.node()->kind == Kind::Symbol; }

namespace {

template <class F>
bool any_symbol(const Node* n, Seen& seen, F&& f) {
  if (n->kind == Kind::Symbol) return f(n);
  if (seen.again(n)) return false;
  if (n->kind != Kind::Sum) return (!n->a.is_const() && any_symbol(n->a.node(), seen, f)) || (!n->b.is_const() && any_symbol(n->b.node(), seen, f));
  for (const Term& t : n->sum.terms)
    for (const Node* a : t.atoms)
      if (any_symbol(a, seen, f)) return true;
  return false;
}
template <class F>
bool any_symbol(Int e, F&& f) {
  if (e.is_const()) return false;
  Seen seen(e.node());
  return any_symbol(e.node(), seen, f);
}

int64_t wrap_mul(int64_t a, int64_t b) { return static_cast<int64_t>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b)); }
int64_t wrap_add(int64_t a, int64_t b) { return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b)); }

// Values of the nodes of a large expression; a small one is walked as a tree.
using Values = std::unordered_map<const Node*, int64_t>;

// Wraps like the machine code it stands for when `checked` is false; throws on overflow otherwise.
template <bool checked, class F>
int64_t eval_node(Int e, const F& value, Values* known) {
  if (e.is_const()) return e.value();
  const Node* n = e.node();
  if (n->kind == Kind::Symbol) return value(n->symbol);
  if (known)
    if (auto it = known->find(n); it != known->end()) return it->second;
  const int64_t v = [&]() -> int64_t {
    if (n->kind == Kind::Sum) {
      int64_t sum = n->sum.k;
      for (const Term& t : n->sum.terms) {
        int64_t m = t.coef;
        for (const Node* a : t.atoms) {
          int64_t x = eval_node<checked>(Int(a), value, known);
          m = checked ? checked_mul(m, x) : wrap_mul(m, x);
        }
        sum = checked ? checked_add(sum, m) : wrap_add(sum, m);
      }
      return sum;
    }
    int64_t a = eval_node<checked>(n->a, value, known), b = eval_node<checked>(n->b, value, known);
    switch (n->kind) {
      case Kind::FloorDiv:
        return !checked && b == -1 ? wrap_mul(a, -1) : floordiv_const(a, b);
      case Kind::Mod:
        return mod_const(a, b);
      case Kind::Min:
        return std::min(a, b);
      default:
        return std::max(a, b);
    }
  }();
  if (known) known->emplace(n, v);
  return v;
}
template <bool checked, class F>
int64_t eval_all(Int e, const F& value) {
  if (e.is_const() || e.node()->weight <= kLight) return eval_node<checked>(e, value, nullptr);
  Values known;
  return eval_node<checked>(e, value, &known);
}

}  // namespace

int64_t eval(Int e, const std::function<int64_t(uint32_t)>& value) { return eval_all<false>(e, value); }

std::optional<bool> holds(const Guard& g, const std::function<std::optional<int64_t>(uint32_t)>& value) {
  if (any_symbol(g.expr, [&](const Node* n) { return !value(n->symbol); })) return std::nullopt;
  const int64_t v = eval_all<false>(g.expr, [&](uint32_t id) { return *value(id); });
  return g.kind == Guard::Kind::EqZero ? v == 0 : g.kind == Guard::Kind::NeZero ? v != 0 : v >= 0;
}

bool has_hint(Int e) {
  return !any_symbol(e, [](const Node* n) { return !n->ctx->symbols[n->symbol].hint; });
}

int64_t hint(Int e) {
  if (e.is_const()) return e.value();
  const auto& symbols = e.node()->ctx->symbols;
  return eval_all<true>(e, [&](uint32_t id) {
    VT_CHECK(symbols[id].hint.has_value(), "symbol {} has no hint", id);
    return *symbols[id].hint;
  });
}

bool contains(Int e, Int s) {
  VT_CHECK(is_symbol(s), "contains() asks about symbols");
  if (e.is_const() || !(e.node()->symbols_mask & s.node()->symbols_mask)) return false;
  return any_symbol(e, [&](const Node* n) { return n == s.node(); });
}

uint32_t weight(Int e) { return e.is_const() ? 1 : e.node()->weight; }

namespace {
void collect_divisions(Int e, std::unordered_set<Int>& out, Seen& seen) {
  if (e.is_const() || e.node()->kind == Kind::Symbol || seen.again(e.node())) return;
  const Node* n = e.node();
  if (n->kind == Kind::Sum) {
    for (const Term& t : n->sum.terms)
      for (const Node* a : t.atoms) collect_divisions(Int(a), out, seen);
    return;
  }
  if (n->has_loops) out.insert(e);
  collect_divisions(n->a, out, seen);
  collect_divisions(n->b, out, seen);
}
}  // namespace

void divisions(Int e, std::unordered_set<Int>& out) {
  if (e.is_const() || !e.node()->has_loops) return;
  Seen seen(e.node());
  collect_divisions(e, out, seen);
}

void free_symbols(Int e, std::vector<Int>& out) {
  any_symbol(e, [&](const Node* n) {
    if (std::find(out.begin(), out.end(), Int(n)) == out.end()) out.push_back(Int(n));
    return false;
  });
}

Int substitute(Int e, std::span<const std::pair<Int, Int>> map) {
  if (e.is_const() || map.empty()) return e;
  uint64_t mask = 0;
  for (const auto& [s, to] : map) {
    VT_CHECK(is_symbol(s), "only symbols can be substituted");
    mask |= s.node()->symbols_mask;
  }
  std::unordered_map<const Node*, Int> done;
  std::function<Int(Int)> go = [&](Int x) -> Int {
    if (x.is_const() || !(x.node()->symbols_mask & mask)) return x;
    const Node* n = x.node();
    if (n->kind == Kind::Symbol) {
      for (const auto& [s, to] : map)
        if (s == x) return to;
      return x;
    }
    if (auto it = done.find(n); it != done.end()) return it->second;
    Int r;
    switch (n->kind) {
      case Kind::FloorDiv:
        r = floordiv(go(n->a), go(n->b));
        break;
      case Kind::Mod:
        r = mod(go(n->a), go(n->b));
        break;
      case Kind::Min:
        r = min(go(n->a), go(n->b));
        break;
      case Kind::Max:
        r = max(go(n->a), go(n->b));
        break;
      default:
        r = n->sum.k;
        for (const Term& t : n->sum.terms) {
          Int m = t.coef;
          for (const Node* a : t.atoms) m = m * go(Int(a));
          r = r + m;
        }
    }
    done.emplace(n, r);
    return r;
  };
  return go(e);
}

std::optional<std::pair<Int, Int>> affine_in(Int e, Int s) {
  VT_CHECK(is_symbol(s), "affine_in() asks about symbols");
  if (!contains(e, s)) return std::pair{Int(0), e};
  Poly coef, rest;
  const Poly p = poly(e);
  rest.k = p.k;
  for (const Term& t : p.terms) {
    Term c{t.coef, {}};
    const bool has = divide_atom(t.atoms, s.node(), c.atoms);
    for (const Node* a : c.atoms)
      if (contains(Int(a), s)) return {};
    add_term(has ? coef : rest, has ? c : t);
  }
  Context::Impl* ctx = e.node()->ctx;
  return std::pair{from_poly(ctx, std::move(coef)), from_poly(ctx, std::move(rest))};
}

View view(Int e) {
  if (e.is_const()) return {ExprOp::Const, e.value(), nullptr, {}};
  const Node* n = e.node();
  switch (n->kind) {
    case Kind::Symbol:
      return {ExprOp::Symbol, 0, n->info, {}};
    case Kind::FloorDiv:
      return {ExprOp::FloorDiv, 0, nullptr, {n->a, n->b}};
    case Kind::Mod:
      return {ExprOp::Mod, 0, nullptr, {n->a, n->b}};
    case Kind::Min:
      return {ExprOp::Min, 0, nullptr, {n->a, n->b}};
    case Kind::Max:
      return {ExprOp::Max, 0, nullptr, {n->a, n->b}};
    case Kind::Sum:
      break;
  }
  View v;
  if (n->sum.terms.size() == 1 && n->sum.k == 0) {
    const Term& t = n->sum.terms[0];
    v.op = ExprOp::Mul;
    if (t.coef != 1) v.args.push_back(t.coef);
    for (const Node* a : t.atoms) v.args.push_back(Int(a));
    return v;
  }
  v.op = ExprOp::Add;
  for (const Term& t : n->sum.terms) {
    // Built directly: a term of a normal form is one itself.
    Poly p;
    p.terms.push_back(t);
    v.args.push_back(from_poly(n->ctx, std::move(p)));
  }
  if (n->sum.k) v.args.push_back(n->sum.k);
  return v;
}

}  // namespace vitrify::sym
