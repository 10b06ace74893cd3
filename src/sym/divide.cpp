// floordiv, mod, min, max and their simplification.
#include <algorithm>
#include <numeric>

#include "sym/node.h"

namespace vitrify::sym {

namespace {

// a = b*q + g*u + rest with b = g*b2 and either rest = 0, or 0 <= rest < g and b2 > 0, so that
//   a // b = q + u // b2   and   a % b = g*(u % b2) + rest.
// A negative b2 would round the rest the other way.
struct Reduced {
  Int q, u, b2, g = 1, rest = 0;
  bool factored() const { return !g.is(1); }
};

Term gcd_terms(const Term& x, const Term& y) {
  Term g{x.coef == kNegInf || y.coef == kNegInf ? 1 : std::gcd(x.coef, y.coef), {}};  // |kNegInf| has no int64
  size_t i = 0, j = 0;
  while (i < x.atoms.size() && j < y.atoms.size()) {
    if (x.atoms[i] == y.atoms[j]) {
      g.atoms.push_back(x.atoms[i]);
      ++i, ++j;
    } else if (compare(Int(x.atoms[i]), Int(y.atoms[j])) < 0) {
      ++i;
    } else {
      ++j;
    }
  }
  return g;
}

bool divide_term(const Term& a, const Term& b, Term& q) {
  if (b.coef == 0 || a.coef % b.coef != 0) return false;
  q.coef = a.coef / b.coef;
  return divide_atoms(a.atoms, b.atoms, q.atoms);
}

// Divides by the monomial g the terms it divides; the others go to rest. A constant is split only by a constant g, leaving rest.k in [0, g).
void split_by(const Poly& a, const Term& g, Poly& quotient, Poly& rest) {
  Term t;
  for (const Term& x : a.terms) {
    if (divide_term(x, g, t))
      add_term(quotient, t);
    else
      add_term(rest, x);
  }
  if (g.atoms.empty()) {
    quotient.k = checked_add(quotient.k, floordiv_const(a.k, g.coef));
    rest.k = mod_const(a.k, g.coef);
  } else {
    rest.k = a.k;
  }
}

// e in [k*g, (k+1)*g) for one k: that k.
std::optional<int64_t> constant_quotient(Int e, Int g) {
  if (e.is(0)) return 0;
  if (g.is_const()) {
    Range r = range_of(e);
    if (r.lo == kNegInf || r.hi == kPosInf) return {};
    int64_t k = floordiv_const(r.lo, g.value());
    if (k == floordiv_const(r.hi, g.value())) return k;
    return {};
  }
  Range r = range_of(e);
  if (r.hi < 0) return prove_in(e + g, g) ? std::optional<int64_t>(-1) : std::nullopt;
  return prove_in(e, g) ? std::optional<int64_t>(0) : std::nullopt;
}

// Polynomial long division by a sum; succeeds only when the remainder is proved to lie in [0, b).
std::optional<Reduced> divide_by_sum(Context::Impl* ctx, Int a, Int b) {
  const Poly pb = poly(b);
  auto before = [](const Term& x, const Term& y) {
    return x.atoms.size() != y.atoms.size() ? x.atoms.size() > y.atoms.size() : compare_atoms(x.atoms, y.atoms) < 0;
  };
  const Term lead = *std::min_element(pb.terms.begin(), pb.terms.end(), before);
  Int q = 0, r = a;
  for (int step = 0; step < 16 && !r.is_const(); ++step) {
    bool progress = false;
    for (const Term& t : poly(r).terms) {
      Term x;
      if (!divide_term(t, lead, x)) continue;
      Int part = from_term(ctx, x);
      q = q + part;
      r = r - part * b;
      progress = true;
      break;
    }
    if (!progress) break;
  }
  if (q.is(0)) return {};
  if (r.is(0)) return Reduced{q, 0, 1, b, 0};
  if (auto k = constant_quotient(r, b)) return Reduced{q + *k, 0, 1, b, r - b * *k};
  return {};
}

Reduced reduce(Int a, Int b) {
  Context::Impl* ctx = context_of(a, b);
  const Poly pb = poly(b);
  const bool monomial = b.is_const() || (pb.terms.size() == 1 && pb.k == 0);
  Reduced out{0, a, b};
  Poly pa = poly(a);
  if (monomial) {
    const Term tb = b.is_const() ? Term{b.value(), {}} : pb.terms[0];
    Poly q, r;
    split_by(pa, tb, q, r);
    out.q = from_poly(ctx, std::move(q));
    out.u = from_poly(ctx, std::move(r));
    pa = poly(out.u);
    if (auto k = constant_quotient(out.u, b)) return {out.q + *k, 0, 1, b, out.u - b * *k};
  } else {
    if (auto k = constant_quotient(a, b)) return {*k, 0, 1, b, a - b * *k};
    if (auto r = divide_by_sum(ctx, a, b)) return *r;
  }
  // A common factor g of b and some terms, the other terms together staying below it.
  std::vector<Term> factors;
  Term content = b.is_const() ? Term{b.value(), {}} : pb.terms[0];
  for (const Term& t : pb.terms) content = gcd_terms(content, t);
  if (!b.is_const() && pb.k) content = gcd_terms(content, {pb.k, {}});
  for (const Term& t : pa.terms) {
    Term g = gcd_terms(content, t);
    if (g.coef == 1 && g.atoms.empty()) continue;
    if (std::none_of(factors.begin(), factors.end(), [&](const Term& f) { return f.coef == g.coef && f.atoms == g.atoms; }))
      factors.push_back(std::move(g));
  }
  std::sort(factors.begin(), factors.end(), [](const Term& x, const Term& y) {
    if (x.atoms.size() != y.atoms.size()) return x.atoms.size() > y.atoms.size();
    return x.coef != y.coef ? x.coef > y.coef : compare_atoms(x.atoms, y.atoms) < 0;
  });
  for (const Term& f : factors) {
    Poly q, r, bq, br;
    split_by(pa, f, q, r);
    Int rest = from_poly(ctx, std::move(r)), g = from_term(ctx, f);
    auto k = constant_quotient(rest, g);
    if (!k) continue;
    split_by(pb, f, bq, br);
    rest = rest - g * *k;
    const Int b2 = from_poly(ctx, std::move(bq));
    if (!rest.is(0) && !prove_nonneg(b2)) continue;  // no divisor is zero
    q.k = checked_add(q.k, *k);
    return {out.q, from_poly(ctx, std::move(q)), b2, g, rest};
  }
  return out;
}

// x % m inside (...) % b is x when b divides its coefficient times m. Where one is in another many times over, the factors would grow without end,
// and powers of sizes pass 64 bits.
std::optional<Int> drop_inner_mod(Context::Impl* ctx, Int a, Int b) {
  const Poly p = poly(a);
  const auto large = [](int64_t k) { return k > INT32_MAX || k < INT32_MIN; };
  const auto grown = [&](Int e) {
    if (e.is_const()) return large(e.value());
    const Poly q = poly(e);
    return large(q.k) || std::ranges::any_of(q.terms, [&](const Term& t) { return large(t.coef); });
  };
  const auto has_powers = [&](Int e) {
    if (e.is_const()) return false;
    const Poly q = poly(e);
    return std::ranges::any_of(q.terms, [](const Term& t) {
      for (size_t i = 1; i < t.atoms.size(); ++i)
        if (t.atoms[i] == t.atoms[i - 1] && t.atoms[i]->kind == Kind::Symbol) return true;
      return false;
    });
  };
  for (const Term& t : p.terms) {
    for (const Node* n : t.atoms) {
      if (n->kind != Kind::Mod) continue;
      Term rest{t.coef, {}};
      divide_atom(t.atoms, n, rest.atoms);
      Int c = from_term(ctx, rest);
      if (grown(c) || grown(n->a)) continue;
      const Int whole = c * n->a;
      if (const auto times = exact_quotient(c * n->b, b); times && (times->is_const() || !has_powers(whole))) return a - from_term(ctx, t) + whole;
    }
  }
  return {};
}

}  // namespace

std::optional<Int> exact_quotient(Int a, Int b) {
  if (a.is_const() && b.is_const())
    return mod_const(a.value(), b.value()) == 0 ? std::optional<Int>(floordiv_const(a.value(), b.value())) : std::nullopt;
  Context::Impl* ctx = context_of(a, b);
  const Poly pb = poly(b);
  if (!b.is_const() && (pb.terms.size() != 1 || pb.k != 0)) return a == b ? std::optional<Int>(1) : std::nullopt;
  Poly q, r;
  split_by(poly(a), b.is_const() ? Term{b.value(), {}} : pb.terms[0], q, r);
  if (!r.terms.empty() || r.k != 0) return {};
  return from_poly(ctx, std::move(q));
}

namespace {

Int make_floordiv(Int a, Int b) {
  Reduced r = reduce(a, b);
  if (r.u.is(0)) return r.q;
  if (r.factored()) return r.q + floordiv(r.u, r.b2);
  Context::Impl* ctx = context_of(r.u, b);
  if (!r.u.is_const()) {
    const Poly p = poly(r.u);
    if (p.terms.size() == 1 && p.terms[0].coef == 1 && p.terms[0].atoms.size() == 1) {
      const Node* n = p.terms[0].atoms[0];
      if (n->kind == Kind::FloorDiv && prove_positive(b)) return r.q + floordiv(n->a + n->b * p.k, n->b * b);
      if (n->kind == Kind::Mod && p.k == 0) {
        auto c = exact_quotient(n->b, b);
        if (c && prove_positive(*c) && prove_positive(b)) return r.q + mod(floordiv(n->a, b), *c);
      }
    }
  }
  return r.q + ctx->atom(Kind::FloorDiv, r.u, b);
}

Int make_mod(Int a, Int b) {
  if (b.is_const() && known_multiple(a, b.value())) return 0;
  Reduced r = reduce(a, b);
  if (r.u.is(0)) return r.rest;
  if (r.factored()) return r.g * mod(r.u, r.b2) + r.rest;
  Context::Impl* ctx = context_of(r.u, b);
  if (!r.u.is_const())
    if (auto inner = drop_inner_mod(ctx, r.u, b)) return mod(*inner, b);
  return ctx->atom(Kind::Mod, r.u, b);
}

// What was made of the same operands from the same facts.
Int once(Kind kind, Int a, Int b, Int (*make)(Int, Int)) {
  Context::Impl* ctx = context_of(a, b);
  if (ctx->divisions_epoch != ctx->epoch) {
    ctx->divisions.clear();
    ctx->divisions_epoch = ctx->epoch;
  }
  const Context::Impl::Division d{kind, a, b};
  if (auto it = ctx->divisions.find(d); it != ctx->divisions.end()) return it->second;
  const Int r = make(a, b);
  if (ctx->divisions_epoch == ctx->epoch && ctx->proof_depth == 0) ctx->divisions.emplace(d, r);  // a proof inside another gives up earlier
  return r;
}

}  // namespace

// By 0 is divided only in indices into what turns out to have no elements, which nobody computes: of programs' own divisions sym_node.cpp raises.
Int floordiv(Int a, Int b) {
  if (b.is(0)) return 0;
  if (a.is_const() && b.is_const()) return floordiv_const(a.value(), b.value());
  if (a.is(0) || b.is(1)) return a;
  if (a == b) return 1;
  if (b.is_const() && b.value() < 0) return floordiv(-a, -b);
  return once(Kind::FloorDiv, a, b, make_floordiv);
}

Int mod(Int a, Int b) {
  if (b.is(0)) return 0;
  if (a.is_const() && b.is_const()) return mod_const(a.value(), b.value());
  if (a.is(0) || b.is(1) || a == b) return 0;
  if (b.is_const() && b.value() < 0) return -mod(-a, -b);
  return once(Kind::Mod, a, b, make_mod);
}

Int ceildiv(Int a, Int b) {
  if (b.is_const() && b.value() > 0) return floordiv(a + (b - 1), b);
  return -floordiv(-a, b);
}

namespace {
Int extremum(Kind kind, Int a, Int b) {
  if (a == b) return a;
  if (auto le = known_le(a, b)) return *le == (kind == Kind::Min) ? a : b;
  if (auto le = known_le(b, a)) return *le == (kind == Kind::Min) ? b : a;
  auto absorbs = [&](Int x, Int y) { return !x.is_const() && x.node()->kind == kind && (x.node()->a == y || x.node()->b == y); };
  if (absorbs(a, b)) return a;
  if (absorbs(b, a)) return b;
  if (compare(b, a) < 0) std::swap(a, b);
  return context_of(a, b)->atom(kind, a, b);
}
}  // namespace

Int min(Int a, Int b) {
  if (a.is_const() && b.is_const()) return std::min(a.value(), b.value());
  return extremum(Kind::Min, a, b);
}
Int max(Int a, Int b) {
  if (a.is_const() && b.is_const()) return std::max(a.value(), b.value());
  return extremum(Kind::Max, a, b);
}

}  // namespace vitrify::sym
