// Normal forms: construction, order, + - *.
#include "support/budget.h"
#include "support/hash.h"
#include "sym/node.h"

namespace vitrify::sym {

int64_t checked_add(int64_t a, int64_t b) {
  int64_t r;
  if (__builtin_add_overflow(a, b, &r)) throw Overflow(fmt::format("integer overflow in a size: {} + {}", a, b));
  return r;
}
int64_t checked_mul(int64_t a, int64_t b) {
  int64_t r;
  if (__builtin_mul_overflow(a, b, &r)) throw Overflow(fmt::format("integer overflow in a size: {} * {}", a, b));
  return r;
}
int64_t floordiv_const(int64_t a, int64_t b) {
  VT_CHECK(b != 0, "division by zero");
  if (b == -1) return checked_mul(a, -1);
  int64_t q = a / b;
  return q - ((a % b != 0) && ((a < 0) != (b < 0)));
}
int64_t mod_const(int64_t a, int64_t b) {
  VT_CHECK(b != 0, "division by zero");
  if (b == -1) return 0;
  int64_t r = a % b;
  return r != 0 && ((r < 0) != (b < 0)) ? r + b : r;
}

namespace {

int compare_nodes(const Node* x, const Node* y);

int compare_polys(const Poly& x, const Poly& y) {
  size_t n = std::min(x.terms.size(), y.terms.size());
  for (size_t i = 0; i < n; ++i) {
    if (int c = compare_atoms(x.terms[i].atoms, y.terms[i].atoms)) return c;
    if (x.terms[i].coef != y.terms[i].coef) return x.terms[i].coef < y.terms[i].coef ? -1 : 1;
  }
  if (x.terms.size() != y.terms.size()) return x.terms.size() > y.terms.size() ? -1 : 1;
  return x.k == y.k ? 0 : x.k < y.k ? -1 : 1;
}

int compare_nodes(const Node* x, const Node* y) {
  if (x == y) return 0;
  if (x->kind != y->kind) return x->kind < y->kind ? -1 : 1;
  if (x->kind == Kind::Symbol) return x->symbol < y->symbol ? -1 : 1;
  if (x->kind == Kind::Sum) return compare_polys(x->sum, y->sum);
  if (int c = compare(x->a, y->a)) return c;
  return compare(x->b, y->b);
}

uint64_t hash_int(Int i, uint64_t seed) {
  return i.is_const() ? hash_mix(seed, static_cast<uint64_t>(i.value())) : hash_mix(seed, i.node()->hash + 1);
}

uint64_t hash_node(const Node& n) {
  uint64_t h = hash_mix(static_cast<uint64_t>(n.kind), n.symbol);
  if (n.kind == Kind::Sum) {
    for (const Term& t : n.sum.terms) {
      h = hash_mix(h, static_cast<uint64_t>(t.coef));
      for (const Node* a : t.atoms) h = hash_mix(h, a->hash);
    }
    return hash_mix(h, static_cast<uint64_t>(n.sum.k));
  }
  return hash_int(n.b, hash_int(n.a, h));
}

const Node* find_kind(const Term& t, Kind k) {
  for (const Node* a : t.atoms)
    if (a->kind == k) return a;
  return nullptr;
}

// c*b*(x//b) + c*(x%b) -> c*x and c*a*((x//a)%b) + c*(x%a) -> c*(x%(a*b)), with c any monomial. True when p changed.
bool recombine(Context::Impl* ctx, Poly& p) {
  size_t candidates = 0;
  for (const Term& t : p.terms) candidates += find_kind(t, Kind::Mod) || find_kind(t, Kind::FloorDiv);
  if (candidates < 2) return false;
  for (size_t i = 0; i < p.terms.size(); ++i) {
    const Node* m = find_kind(p.terms[i], Kind::Mod);
    if (!m) continue;
    Term factor{p.terms[i].coef, {}};
    divide_atom(p.terms[i].atoms, m, factor.atoms);
    Int c = from_term(ctx, factor), quotient = floordiv(m->a, m->b);
    Poly target = poly(c * m->b * quotient);
    bool division = target.terms.size() == 1 && target.k == 0;
    for (size_t j = 0; j < p.terms.size(); ++j) {
      if (j == i) continue;
      const Term& other = p.terms[j];
      Int merged;
      if (division && other.coef == target.terms[0].coef && other.atoms == target.terms[0].atoms) {
        merged = c * m->a;
      } else if (const Node* m2 = find_kind(other, Kind::Mod); m2 && m2->a == quotient) {
        Term factor2{other.coef, {}};
        divide_atom(other.atoms, m2, factor2.atoms);
        if (from_term(ctx, factor2) != c * m->b || !prove_positive(m->b) || !prove_positive(m2->b)) continue;
        merged = c * mod(m->a, m->b * m2->b);
      } else {
        continue;
      }
      p.terms.erase(p.terms.begin() + std::max(i, j));
      p.terms.erase(p.terms.begin() + std::min(i, j));
      Poly add = poly(merged);
      for (const Term& t : add.terms) add_term(p, t);
      p.k = checked_add(p.k, add.k);
      return true;
    }
  }
  return false;
}

}  // namespace

int compare(Int x, Int y) {
  if (x == y) return 0;
  if (x.is_const() != y.is_const()) return x.is_const() ? -1 : 1;
  if (x.is_const()) return x.value() < y.value() ? -1 : 1;
  return compare_nodes(x.node(), y.node());
}

int compare_atoms(const Atoms& x, const Atoms& y) {
  size_t n = std::min(x.size(), y.size());
  for (size_t i = 0; i < n; ++i)
    if (int c = compare_nodes(x[i], y[i])) return c;
  return x.size() == y.size() ? 0 : x.size() > y.size() ? -1 : 1;
}

bool NodeEqual::operator()(const Node* x, const Node* y) const {
  if (x->kind != y->kind || x->symbol != y->symbol || !(x->a == y->a) || !(x->b == y->b)) return false;
  if (x->sum.k != y->sum.k || x->sum.terms.size() != y->sum.terms.size()) return false;
  for (size_t i = 0; i < x->sum.terms.size(); ++i)
    if (x->sum.terms[i].coef != y->sum.terms[i].coef || x->sum.terms[i].atoms != y->sum.terms[i].atoms) return false;
  return true;
}

namespace {
constexpr uint16_t kDeepest = 400;
constexpr size_t kMostTerms = 1000;

void include(Node& n, const Node* part) {
  n.symbols_mask |= part->symbols_mask;
  n.has_loops = n.has_loops || part->has_loops;
  n.depth = std::max<uint16_t>(n.depth, part->depth + 1);
  n.weight = std::min(n.weight + part->weight, kHeavy);
}
}  // namespace

const Node* Context::Impl::intern(Node&& n) {
  n.ctx = this;
  n.hash = hash_node(n);
  Budget::spend(1);
  if (auto it = table.find(&n); it != table.end()) return *it;
  if (n.kind == Kind::Symbol) {
    n.symbols_mask = uint64_t{1} << (n.symbol % 64);
    const SymbolKind k = symbols[n.symbol].kind;
    n.has_loops = k == SymbolKind::Loop || k == SymbolKind::Indirect;
  } else {
    for (Int i : {n.a, n.b})
      if (!i.is_const()) include(n, i.node());
    for (const Term& t : n.sum.terms)
      for (const Node* a : t.atoms) include(n, a);
    // Walks recurse, and a product has the terms of its factors times each other.
    if (n.depth > kDeepest || n.sum.terms.size() > kMostTerms) throw CaptureError("its sizes are expressions too large to reason about");
  }
  nodes.push_back(std::move(n));
  table.insert(&nodes.back());
  return &nodes.back();
}

Int Context::Impl::atom(Kind kind, Int a, Int b) {
  Node n;
  n.kind = kind;
  n.a = a;
  n.b = b;
  n.exact = kind == Kind::FloorDiv && b.is_const() && known_multiple(a, b.value());
  return Int(intern(std::move(n)));
}

Context::Impl* context_of(Int a, Int b) {
  Context::Impl* x = a.is_const() ? nullptr : a.node()->ctx;
  Context::Impl* y = b.is_const() ? nullptr : b.node()->ctx;
  VT_CHECK(!x || !y || x == y, "expressions of two contexts");
  return x ? x : y;
}

Poly poly(Int e) {
  if (e.is_const()) return {{}, e.value()};
  if (e.node()->kind == Kind::Sum) return e.node()->sum;
  Poly p;
  p.terms.push_back({1, {e.node()}});
  return p;
}

Atoms multiply_atoms(const Atoms& a, const Atoms& b) {
  Atoms out;
  out.reserve(a.size() + b.size());
  std::merge(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(out), [](const Node* x, const Node* y) { return compare_nodes(x, y) < 0; });
  return out;
}

bool divide_atoms(const Atoms& a, const Atoms& b, Atoms& q) {
  q.clear();
  size_t j = 0;
  for (const Node* x : a) {
    if (j < b.size() && b[j] == x)
      ++j;
    else
      q.push_back(x);
  }
  return j == b.size();
}

bool divide_atom(const Atoms& a, const Node* by, Atoms& q) {
  q = a;
  auto it = std::find(q.begin(), q.end(), by);
  if (it == q.end()) return false;
  q.erase(it);
  return true;
}

void add_term(Poly& p, const Term& t) {
  if (t.coef == 0) return;
  if (t.atoms.empty()) {
    p.k = checked_add(p.k, t.coef);
    return;
  }
  auto it = std::lower_bound(p.terms.begin(), p.terms.end(), t, [](const Term& x, const Term& y) { return compare_atoms(x.atoms, y.atoms) < 0; });
  if (it != p.terms.end() && it->atoms == t.atoms) {
    it->coef = checked_add(it->coef, t.coef);
    if (it->coef == 0) p.terms.erase(it);
  } else {
    p.terms.insert(it, t);
  }
}

Int from_poly(Context::Impl* ctx, Poly&& p) {
  while (p.terms.size() >= 2 && recombine(ctx, p)) {
  }
  if (p.terms.empty()) return p.k;
  if (p.terms.size() == 1 && p.k == 0 && p.terms[0].coef == 1 && p.terms[0].atoms.size() == 1) return Int(p.terms[0].atoms[0]);
  Node n;
  n.kind = Kind::Sum;
  n.sum = std::move(p);
  return Int(ctx->intern(std::move(n)));
}

Int from_term(Context::Impl* ctx, const Term& t) {
  Poly p;
  add_term(p, t);
  return from_poly(ctx, std::move(p));
}

Int operator+(Int a, Int b) {
  if (a.is_const() && b.is_const()) return checked_add(a.value(), b.value());
  if (a.is(0)) return b;
  if (b.is(0)) return a;
  Context::Impl* ctx = context_of(a, b);
  Poly p = poly(a), q = poly(b);
  if (p.terms.size() < q.terms.size()) std::swap(p, q);
  for (const Term& t : q.terms) add_term(p, t);
  p.k = checked_add(p.k, q.k);
  return from_poly(ctx, std::move(p));
}

Int operator-(Int a) { return a * Int(-1); }
Int operator-(Int a, Int b) {
  if (a == b) return 0;
  if (a.is_const() && b.is_const()) {
    int64_t r;
    if (__builtin_sub_overflow(a.value(), b.value(), &r)) throw Overflow(fmt::format("integer overflow in a size: {} - {}", a.value(), b.value()));
    return r;
  }
  return a + -b;
}

Int operator*(Int a, Int b) {
  if (a.is_const() && b.is_const()) return checked_mul(a.value(), b.value());
  if (a.is(0) || b.is(0)) return 0;
  if (a.is(1)) return b;
  if (b.is(1)) return a;
  Context::Impl* ctx = context_of(a, b);
  Poly p = poly(a), q = poly(b), out;
  out.k = checked_mul(p.k, q.k);
  std::vector<Term> exact;
  auto add_product = [&](int64_t coef, Atoms atoms) {
    // b*(x//b) -> x when b divides x
    for (const Node* n : atoms)
      if (n->exact && coef % n->b.value() == 0) return exact.push_back({coef, std::move(atoms)});
    add_term(out, {coef, std::move(atoms)});
  };
  for (const Term& s : p.terms) {
    for (const Term& t : q.terms) add_product(checked_mul(s.coef, t.coef), multiply_atoms(s.atoms, t.atoms));
    if (q.k) add_product(checked_mul(s.coef, q.k), s.atoms);
  }
  if (p.k)
    for (const Term& t : q.terms) add_product(checked_mul(p.k, t.coef), t.atoms);
  Int sum = from_poly(ctx, std::move(out));
  for (const Term& t : exact) {
    const Node* d = *std::find_if(t.atoms.begin(), t.atoms.end(), [&](const Node* n) { return n->exact && t.coef % n->b.value() == 0; });
    Term rest{t.coef / d->b.value(), {}};
    divide_atom(t.atoms, d, rest.atoms);
    sum = sum + from_term(ctx, rest) * d->a;
  }
  return sum;
}

}  // namespace vitrify::sym
