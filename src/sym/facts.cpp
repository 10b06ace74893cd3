// What is known of an expression: intervals, divisibility, and proofs of e >= 0.
#include <numeric>

#include "support/budget.h"
#include "sym/node.h"

namespace vitrify::sym {

namespace {

// End points of intervals. kNegInf as a lower and kPosInf as an upper end mean unbounded; sums and products go through i128.
constexpr i128 kBig = static_cast<i128>(1) << 126;
i128 wide_lo(Range r) { return r.lo == kNegInf ? -kBig : r.lo; }
i128 wide_hi(Range r) { return r.hi == kPosInf ? kBig : r.hi; }
bool infinite(i128 v) { return v >= kBig || v <= -kBig; }
Range narrow(i128 lo, i128 hi) {
  auto clamp = [](i128 v) { return v < kNegInf ? kNegInf : v > kPosInf ? kPosInf : static_cast<int64_t>(v); };
  return {clamp(lo), clamp(hi)};
}
i128 wide_mul(i128 a, i128 b) {
  if (a == 0 || b == 0) return 0;
  if (infinite(a) || infinite(b)) return (a < 0) == (b < 0) ? kBig : -kBig;
  return a * b;
}
Range add(Range a, Range b) {
  i128 l0 = wide_lo(a), l1 = wide_lo(b), h0 = wide_hi(a), h1 = wide_hi(b);
  return narrow(infinite(l0) || infinite(l1) ? -kBig : l0 + l1, infinite(h0) || infinite(h1) ? kBig : h0 + h1);
}
Range multiply(Range a, Range b) {
  i128 c[] = {wide_mul(wide_lo(a), wide_lo(b)), wide_mul(wide_lo(a), wide_hi(b)), wide_mul(wide_hi(a), wide_lo(b)), wide_mul(wide_hi(a), wide_hi(b))};
  return narrow(*std::min_element(c, c + 4), *std::max_element(c, c + 4));
}
Range divide(Range a, Range b) {  // b.lo >= 1
  auto quotient = [](i128 x, i128 y) -> i128 {
    if (infinite(x)) return x;
    if (infinite(y)) return x < 0 ? -1 : 0;
    i128 q = x / y;
    return q - (x % y != 0 && x < 0);
  };
  i128 c[] = {quotient(wide_lo(a), wide_lo(b)), quotient(wide_lo(a), wide_hi(b)), quotient(wide_hi(a), wide_lo(b)), quotient(wide_hi(a), wide_hi(b))};
  return narrow(*std::min_element(c, c + 4), *std::max_element(c, c + 4));
}
Range intersect(Range a, Range b) { return {std::max(a.lo, b.lo), std::min(a.hi, b.hi)}; }

Range node_range(const Node* n) {
  Context::Impl* ctx = n->ctx;
  if (n->range_epoch == ctx->epoch) return n->range;
  const uint32_t epoch = ctx->epoch;
  Range r;
  switch (n->kind) {
    case Kind::Symbol:
      r = ctx->symbols[n->symbol].range;
      if (auto& e = ctx->extents[n->symbol]) {
        Range x = range_of(*e);
        r = intersect(r, {0, x.hi == kPosInf ? kPosInf : std::max<int64_t>(x.hi, 1) - 1});
      }
      break;
    case Kind::FloorDiv: {
      Range b = range_of(n->b);
      if (b.lo >= 1) r = divide(range_of(n->a), b);
      break;
    }
    case Kind::Mod: {
      Range a = range_of(n->a), b = range_of(n->b);
      if (b.lo >= 1) {
        r = {0, b.hi == kPosInf ? kPosInf : b.hi - 1};
        if (a.lo >= 0) r.hi = std::min(r.hi, a.hi);
      }
      break;
    }
    case Kind::Min: {
      Range a = range_of(n->a), b = range_of(n->b);
      r = {std::min(a.lo, b.lo), std::min(a.hi, b.hi)};
      break;
    }
    case Kind::Max: {
      Range a = range_of(n->a), b = range_of(n->b);
      r = {std::max(a.lo, b.lo), std::max(a.hi, b.hi)};
      break;
    }
    case Kind::Sum:
      r = {n->sum.k, n->sum.k};
      for (const Term& t : n->sum.terms) {
        Range m{t.coef, t.coef};
        for (size_t i = 0; i < t.atoms.size(); ++i) {
          Range x = node_range(t.atoms[i]);
          if (i + 1 < t.atoms.size() && t.atoms[i] == t.atoms[i + 1]) {  // a square
            x = multiply(x, x);
            x.lo = std::max<int64_t>(x.lo, 0);
            ++i;
          }
          m = multiply(m, x);
        }
        r = add(r, m);
      }
      break;
  }
  n->range = r;
  n->range_epoch = epoch;
  return r;
}

// Some divisor of k that divides e.
int64_t divisor(Int e, int64_t k);
int64_t node_divisor(const Node* n, int64_t k) {
  if (k == 1 || n->weight > 4 * kLight) return 1;
  switch (n->kind) {
    case Kind::Symbol:
      return std::gcd(std::max<int64_t>(n->ctx->symbols[n->symbol].multiple_of, 1), k);
    case Kind::FloorDiv: {
      int64_t wanted;
      if (!n->b.is_const() || n->b.value() <= 0 || __builtin_mul_overflow(k, n->b.value(), &wanted)) return 1;
      int64_t d = divisor(n->a, wanted);
      return d % n->b.value() == 0 ? std::gcd(d / n->b.value(), k) : 1;
    }
    case Kind::Sum:
      return divisor(Int(n), k);
    default:
      return std::gcd(divisor(n->a, k), divisor(n->b, k));
  }
}
int64_t divisor(Int e, int64_t k) {
  const Poly p = poly(e);
  int64_t d = p.k == kNegInf ? std::gcd(kNegInf / 2, k) : std::gcd(p.k, k);
  for (const Term& t : p.terms) {
    int64_t left = k;
    left /= std::gcd(t.coef == kNegInf ? kNegInf / 2 : t.coef, left);
    for (const Node* a : t.atoms) left /= node_divisor(a, left);
    d = std::gcd(d, k / left);
    if (d == 1) break;
  }
  return d;
}

bool has_loops(Int e) { return !e.is_const() && e.node()->has_loops; }

// One step of a proof; false when it has taken enough. Proofs go through the parts of an expression again and again.
constexpr int kProofSteps = 3000;
bool step(Context::Impl* ctx) {
  if (ctx->proof_steps >= kProofSteps) return false;
  ++ctx->proof_steps;
  Budget::spend(1);
  return true;
}
// Proofs inside this one share its steps.
class Proof {
 public:
  explicit Proof(Context::Impl* ctx) : ctx_(ctx) { ++ctx->proof_depth; }
  ~Proof() {
    if (--ctx_->proof_depth == 0) ctx_->proof_steps = 0;
  }

 private:
  Context::Impl* ctx_;
};

// The sign of e where it is proved: 1 for e >= 0, -1 for e <= 0, 0 for unknown.
int sign(Int e) {
  Range r = range_of(e);
  if (r.lo >= 0) return 1;
  if (r.hi <= 0) return -1;
  if (prove_nonneg(e)) return 1;
  return prove_nonneg(-e) ? -1 : 0;
}

std::optional<Int> atom_bound(const Node* n, bool upper);

// e = coef * n + rest, with n linear wherever it is a factor of a term. nullopt when n occurs squared.
std::optional<std::pair<Int, Int>> collect(const Poly& p, const Node* n) {
  Poly coef, rest;
  for (const Term& t : p.terms) {
    Term c{t.coef, {}};
    if (!divide_atom(t.atoms, n, c.atoms)) {
      add_term(rest, t);
      continue;
    }
    if (std::find(c.atoms.begin(), c.atoms.end(), n) != c.atoms.end()) return {};
    add_term(coef, c);
  }
  rest.k = p.k;
  return std::pair{from_poly(n->ctx, std::move(coef)), from_poly(n->ctx, std::move(rest))};
}

// A bound of e that mentions fewer atoms with bounds of their own: each is replaced by its extreme where its factor has a known sign.
// Loops go first: their bounds are sizes, which cancel against the sizes already there.
Int extreme(Int e, bool upper, bool stop_when_nonneg) {
  std::vector<const Node*> tried;
  auto replace = [&](const Poly& p, bool loops) -> std::optional<Int> {
    for (const Term& t : p.terms) {
      for (const Node* n : t.atoms) {
        if (!step(n->ctx)) return {};
        if (has_loops(Int(n)) != loops || std::find(tried.begin(), tried.end(), n) != tried.end()) continue;
        tried.push_back(n);
        const bool nonlinear = std::any_of(p.terms.begin(), p.terms.end(), [&](const Term& x) {
          return x.atoms.size() > 1 && std::find(x.atoms.begin(), x.atoms.end(), n) != x.atoms.end();
        });
        auto split = collect(p, n);
        if (!split) continue;
        const int s = sign(split->first);
        if (s == 0) continue;
        auto bound = atom_bound(n, (s > 0) == upper);
        // A constant bound gains nothing in a linear term: interval arithmetic has used it already.
        if (bound && (!bound->is_const() || nonlinear || !stop_when_nonneg)) return split->first * *bound + split->second;
      }
    }
    return {};
  };
  for (int i = 0; i < 16 && !e.is_const(); ++i) {
    if (stop_when_nonneg && range_of(e).lo >= 0) return e;
    const Poly p = poly(e);
    auto next = replace(p, true);
    if (!next && stop_when_nonneg) next = replace(p, false);
    if (!next) break;
    e = *next;
  }
  return e;
}

std::optional<Int> constant_bound(const Node* n, bool upper) {
  Range r = node_range(n);
  int64_t v = upper ? r.hi : r.lo;
  return v == (upper ? kPosInf : kNegInf) ? std::nullopt : std::optional<Int>(v);
}

std::optional<Int> atom_bound(const Node* n, bool upper) {
  Context::Impl* ctx = n->ctx;
  switch (n->kind) {
    case Kind::Symbol:
      if (upper && ctx->extents[n->symbol] && !ctx->extents[n->symbol]->is_const()) return *ctx->extents[n->symbol] - 1;
      break;
    case Kind::Mod:
      if (!n->b.is_const() && prove_positive(n->b)) return upper ? n->b - 1 : Int(0);
      break;
    case Kind::FloorDiv:
      if (prove_positive(n->b) && !has_loops(n->b)) {
        Int x = extreme(n->a, upper, false);
        if (x != n->a) return floordiv(x, n->b);
      }
      break;
    case Kind::Min:
      if (upper && has_loops(n->a) != has_loops(n->b)) return has_loops(n->a) ? n->b : n->a;
      break;
    case Kind::Max:
      if (!upper && has_loops(n->a) != has_loops(n->b)) return has_loops(n->a) ? n->b : n->a;
      break;
    case Kind::Sum:
      break;
  }
  return constant_bound(n, upper);
}

}  // namespace

Range range_of(Int e) { return e.is_const() ? Range{e.value(), e.value()} : node_range(e.node()); }

bool prove_nonneg(Int e) {
  if (e.is_const()) return e.value() >= 0;
  Range r = node_range(e.node());
  if (r.lo >= 0) return true;
  if (r.hi < 0) return false;
  Context::Impl* ctx = e.node()->ctx;
  if (ctx->proof_depth > 4) return false;
  Proof proof(ctx);  // around the guards too: the sums with them may hold quotients, which ask for proofs
  try {
    for (const Guard& g : ctx->guards) {
      if (g.kind == Guard::Kind::NeZero || g.expr.is_const()) continue;
      const uint64_t mask = g.expr.node()->symbols_mask;
      if (mask != e.node()->symbols_mask) continue;
      Int d = e - g.expr;
      if (d.is_const() && d.value() >= 0) return true;
      if (g.kind == Guard::Kind::EqZero && (d = e + g.expr).is_const() && d.value() >= 0) return true;
    }
    return ctx->proof_depth <= 4 && range_of(extreme(e, false, true)).lo >= 0;
  } catch (const Overflow&) {  // a bound of more than 64 bits is none
    return false;
  }
}

std::optional<Range> bounds(Int e) {
  Range r = range_of(e);
  if (!e.is_const() && r.lo == kNegInf && r.hi == kPosInf) return {};
  return r;
}

namespace {

// None of more than 64 bits.
std::optional<Int> difference_of(Int a, Int b) {
  try {
    return a - b;
  } catch (const Overflow&) {
    return {};
  }
}

}  // namespace

std::optional<bool> known_eq(Int a, Int b) {
  if (a == b) return true;
  if (a.is_const() && b.is_const()) return false;
  const Range of_a = range_of(a), of_b = range_of(b);
  if (of_a.lo > of_b.hi || of_a.hi < of_b.lo) return false;
  const std::optional<Int> difference = difference_of(a, b);
  if (!difference) return {};
  Int d = *difference;
  if (d.is_const()) return d.is(0);
  Range r = range_of(d);
  if (r.lo == 0 && r.hi == 0) return true;
  if (r.lo > 0 || r.hi < 0) return false;
  // A constant that a common factor of the rest does not divide.
  if (!is_symbol(d) && d.node()->kind == Kind::Sum && d.node()->sum.k != 0 && d.node()->sum.k != kNegInf) {
    const int64_t k = d.node()->sum.k;
    const Int rest = d - k;
    int64_t g = 0;
    for (const Term& t : poly(rest).terms) g = t.coef == kNegInf ? 1 : std::gcd(g, t.coef);
    for (int64_t f : {g, int64_t{2}, int64_t{16}})
      if (f > 1 && k % f != 0 && known_multiple(rest, f)) return false;
  }
  if (prove_positive(d) || prove_positive(-d)) return false;
  return {};
}

std::optional<bool> known_le(Int a, Int b) {
  if (a == b) return true;
  if (a.is_const() && b.is_const()) return a.value() <= b.value();
  const Range of_a = range_of(a), of_b = range_of(b);
  if (of_a.hi <= of_b.lo) return true;
  if (of_a.lo > of_b.hi) return false;
  const std::optional<Int> d = difference_of(b, a);
  if (!d) return {};
  if (prove_nonneg(*d)) return true;
  if (prove_nonneg(-*d - 1)) return false;
  return {};
}

std::optional<bool> known_lt(Int a, Int b) {
  auto r = known_le(b, a);
  return r ? std::optional<bool>(!*r) : std::nullopt;
}

bool known_multiple(Int e, int64_t k) {
  if (k == 0) return e.is(0);
  if (k == kNegInf) return e.is(0) || e.is(kNegInf);
  k = k < 0 ? -k : k;
  if (e.is_const()) return e.value() % k == 0;
  return k == 1 || divisor(e, k) == k;
}

}  // namespace vitrify::sym
