#include <gtest/gtest.h>

#include "support/budget.h"
#include "support/error.h"
#include "sym/sym.h"

using namespace vitrify;
using namespace vitrify::sym;

namespace {

struct Sym : testing::Test {
  Context c;
  Int loop(Int extent) {
    Int s = c.symbol(SymbolKind::Loop);
    c.set_loop_extent(s, extent);
    return s;
  }
  Int size(int64_t hint = 8, int64_t lo = 2) { return c.symbol(SymbolKind::Size, hint, {lo, 1 << 20}); }
};
#define EXPECT_INT(a, b) EXPECT_EQ(str(a), str(b))

TEST_F(Sym, constants_need_no_context) {
  EXPECT_INT(floordiv(-7, 2), Int(-4));
  EXPECT_INT(sym::mod(-7, 2), Int(1));
  EXPECT_INT(sym::mod(7, -2), Int(-1));
  EXPECT_INT(ceildiv(7, 2), Int(4));
  EXPECT_INT(ceildiv(-7, 2), Int(-3));
  EXPECT_INT(floordiv(1, 0), Int(0));  // in an index into nothing
  EXPECT_INT(sym::mod(1, 0), Int(0));
  EXPECT_THROW(Int(INT64_MAX) + 1, Error);
  EXPECT_THROW(Int(INT64_MAX) * 2, Error);
}

TEST_F(Sym, equality_is_structural) {
  Int a = size(), b = size();
  EXPECT_EQ((a + b) * (a - b), a * a - b * b);
  EXPECT_EQ(a + b - b, a);
  EXPECT_TRUE((a - a).is(0));
  EXPECT_EQ(2 * a * b, b * a + a * b);
}

TEST_F(Sym, rows_and_columns) {
  Int i = loop(10), j = loop(7), k = loop(2);
  EXPECT_INT(floordiv(i * 7 + j, 7), i);
  EXPECT_INT(sym::mod(i * 7 + j, 7), j);
  EXPECT_INT(floordiv(i * 6 + j * 2 + k, 2), 3 * i + j);
  EXPECT_INT(sym::mod(i * 12 + j, 4), sym::mod(j, 4));
  EXPECT_INT(floordiv(i, 10), Int(0));
  EXPECT_INT(sym::mod(i, 10), i);
  EXPECT_INT(floordiv(i, 1), i);
  EXPECT_INT(sym::mod(i, 1), Int(0));
  EXPECT_INT(floordiv(i * 4 + k, 8), floordiv(i, 2));
  EXPECT_INT(sym::mod(i * 4 + k, 8), 4 * sym::mod(i, 2) + k);
  EXPECT_INT(floordiv(i + 20, 10), Int(2));
  EXPECT_INT(floordiv(2 * i, 4), floordiv(i, 2));
}

TEST_F(Sym, nested) {
  Int x = loop(1000);
  EXPECT_INT(floordiv(floordiv(x, 3), 5), floordiv(x, 15));
  EXPECT_INT(floordiv(floordiv(x, 3) + 1, 5), floordiv(x + 3, 15));
  EXPECT_INT(sym::mod(sym::mod(x, 12), 4), sym::mod(x, 4));
  EXPECT_INT(floordiv(x, 4) * 4 + sym::mod(x, 4), x);
  EXPECT_INT(floordiv(x, 12) * 12 + sym::mod(floordiv(x, 4), 3) * 4 + sym::mod(x, 4), x);
  EXPECT_INT(floordiv(sym::mod(x, 12), 4), sym::mod(floordiv(x, 4), 3));
  Int s = size();
  EXPECT_INT((floordiv(x, 4) * 4 + sym::mod(x, 4)) * s, s * x);
  EXPECT_INT(floordiv(x, 4) * s * 4 + sym::mod(x, 4) * s, s * x);
}

TEST_F(Sym, symbolic_divisors) {
  Int n = size(), m = size(), h = size();
  Int i = loop(n), j = loop(m), k = loop(h);
  EXPECT_INT(floordiv(i * m + j, m), i);
  EXPECT_INT(sym::mod(i * m + j, m), j);
  EXPECT_INT(floordiv(i * m * h + j * h + k, m * h), i);
  EXPECT_INT(sym::mod(i * m * h + j * h + k, m * h), j * h + k);
  EXPECT_INT(sym::mod(floordiv(i * m * h + j * h + k, h), m), j);
  EXPECT_INT(floordiv(i * m * h + j * h + k, h), i * m + j);
  EXPECT_INT(floordiv(i * 4 * m + j, 4 * m), i);
  EXPECT_INT(floordiv(n * m, m), n);
  EXPECT_INT(ceildiv(n * m, m), n);
  EXPECT_INT(sym::mod(n * m, m), Int(0));
  EXPECT_INT(floordiv(6 * n * i, 4 * n), floordiv(3 * i, 2));
  Int f = loop(n * m);
  EXPECT_INT(floordiv(f, m) * m + sym::mod(f, m), f);
  EXPECT_INT(floordiv(f, n * m), Int(0));
  EXPECT_INT(floordiv(floordiv(f, m), n), Int(0));
  EXPECT_INT(sym::mod(floordiv(f, m), n), floordiv(f, m));
  EXPECT_INT(floordiv(k * m + sym::mod(f, m), m), k);
  EXPECT_INT(floordiv(i * (m + 1) + j, m + 1), i);
  EXPECT_INT(sym::mod(i * (m + 1) + j, m + 1), j);
  EXPECT_INT(floordiv(n - 1, n), Int(0));
  EXPECT_INT(sym::mod(Int(-1), n), n - 1);
  // j may reach m - 1 >= n: not decided
  EXPECT_NE(floordiv(j, n), Int(0));
}

TEST_F(Sym, divisibility) {
  Int n = size(64);
  c.mutable_symbol_info(n).multiple_of = 8;
  Int i = loop(4);
  EXPECT_TRUE(known_multiple(n * i + 16, 8));
  EXPECT_FALSE(known_multiple(n + 4, 8));
  EXPECT_TRUE(known_multiple(2 * n, 16));
  EXPECT_TRUE(known_multiple(floordiv(n, 2), 4));
  EXPECT_INT(floordiv(n, 4) * 4, n);
  EXPECT_INT(sym::mod(n, 4), Int(0));
  EXPECT_EQ(known_eq(n, 3), false);
  EXPECT_EQ(known_eq(2 * size(), 3), false);
}

TEST_F(Sym, min_and_max) {
  Int i = loop(10), n = size();
  EXPECT_INT(min(i, 9), i);
  EXPECT_INT(max(i, 0), i);
  EXPECT_INT(max(min(i + 3, 100), 0), i + 3);
  EXPECT_EQ(min(i, n), min(n, i));
  EXPECT_INT(min(min(i, n), n), min(i, n));
  Int j = loop(n);
  EXPECT_INT(min(j, n - 1), j);
}

TEST_F(Sym, bounds_are_sound_at_the_edges) {
  Int i = loop(10), n = c.symbol(SymbolKind::Size, 3), u = c.symbol(SymbolKind::Unbacked, {}, {0, INT64_MAX});
  EXPECT_EQ(bounds(3 * i - 2)->lo, -2);
  EXPECT_EQ(bounds(3 * i - 2)->hi, 25);
  EXPECT_FALSE(bounds(n));
  EXPECT_FALSE(bounds(n * i));
  EXPECT_EQ(bounds(u * u)->lo, 0);
  EXPECT_EQ(bounds(u * u)->hi, INT64_MAX);
  Int big = c.symbol(SymbolKind::Size, 3, {0, INT64_MAX / 2});
  EXPECT_EQ(bounds(4 * big)->hi, INT64_MAX);
  EXPECT_EQ(bounds(-4 * big)->lo, INT64_MIN);
  EXPECT_FALSE(bounds(4 * big + -4 * u));
  EXPECT_EQ(bounds(sym::mod(n, 5))->hi, 4);
}

TEST_F(Sym, comparisons) {
  Int n = size(), m = size(), i = loop(n);
  EXPECT_EQ(known_lt(i, n), true);
  EXPECT_EQ(known_le(n, i), false);
  EXPECT_EQ(known_eq(i, n), false);
  EXPECT_EQ(known_le(n, n * m), true);
  EXPECT_FALSE(known_le(n, m));
  EXPECT_FALSE(known_eq(n, m));
  EXPECT_EQ(known_eq(n, 1), false);
}

TEST_F(Sym, guards) {
  Int n = size(8), m = size(8), u = c.symbol(SymbolKind::Unbacked);
  EXPECT_FALSE(c.guard_eq(n, 1));
  EXPECT_EQ(c.guards().size(), 0u);
  EXPECT_TRUE(c.guard_eq(n, m));
  EXPECT_TRUE(c.guard_eq(m, n));
  EXPECT_TRUE(c.guard_eq(2 * m, 2 * n));
  ASSERT_EQ(c.guards().size(), 1u);
  EXPECT_EQ(c.guards()[0].kind, Guard::Kind::EqZero);
  EXPECT_TRUE(c.guard_lt(n, 100));
  EXPECT_TRUE(c.guard_lt(n, 200));  // follows
  EXPECT_FALSE(c.guard_le(n, 4));
  EXPECT_EQ(c.guards().size(), 3u);
  EXPECT_EQ(c.specialize(n), 8);
  EXPECT_EQ(c.guards().size(), 4u);
  EXPECT_EQ(c.specialize(n), 8);
  EXPECT_EQ(c.guards().size(), 4u);
  EXPECT_THROW(c.guard_eq(u, 3), CaptureError);
  EXPECT_THROW(hint(u), InternalError);
  for (const Guard& g : c.guards()) {
    const int64_t v = hint(g.expr);
    EXPECT_TRUE(g.kind == Guard::Kind::EqZero ? v == 0 : g.kind == Guard::Kind::NeZero ? v != 0 : v >= 0);
  }
}

TEST_F(Sym, structure) {
  Int n = size(), i = loop(5), j = loop(n);
  auto a = affine_in(3 * n * i + j + 2, i);
  ASSERT_TRUE(a);
  EXPECT_INT(a->first, 3 * n);
  EXPECT_INT(a->second, j + 2);
  EXPECT_FALSE(affine_in(i * i, i));
  EXPECT_FALSE(affine_in(floordiv(i, 2), i));
  EXPECT_TRUE(contains(floordiv(i, 2), i));
  EXPECT_FALSE(contains(floordiv(i, 2), j));
  std::vector<Int> s;
  free_symbols(floordiv(j, 2) + n * i, s);
  EXPECT_EQ(s.size(), 3u);
  View v = view(4 * i + 1);
  EXPECT_EQ(v.op, ExprOp::Add);
  ASSERT_EQ(v.args.size(), 2u);
  EXPECT_EQ(view(v.args[0]).op, ExprOp::Mul);
  EXPECT_EQ(view(i).symbol->id, c.symbol_info(i).id);
  // simultaneous
  std::pair<Int, Int> swap[] = {{i, j}, {j, i}};
  EXPECT_INT(substitute(2 * i + j, swap), 2 * j + i);
  Context other;
  EXPECT_THROW(other.symbol(SymbolKind::Size, 1) + n, InternalError);
}

TEST_F(Sym, one_that_is_not_made_leaves_nothing) {
  size();
  {
    Budget none(1e-9, false);
    EXPECT_THROW(size(), BudgetError);
  }
  Int n = size();
  EXPECT_EQ(c.num_symbols(), 2u);
  EXPECT_INT(n, c.symbol_at(1));
  EXPECT_INT(n, parse(c, "s1").value());
}

TEST_F(Sym, text) {
  Int n = size(), i = loop(50);
  EXPECT_EQ(str(4 * n + floordiv(i, 8)), "4*s0 + i1//8");
  EXPECT_EQ(str(3 * floordiv(i, 8) - n), "-s0 + 3*(i1//8)");
  for (const char* bad : {"", "s", "s9", "i0", "4*", "(s0", "s0 s0", "1//0", "99999999999999999999", "s0 + ", "min(s0)", "s0)"})
    EXPECT_FALSE(parse(c, bad)) << bad;
  EXPECT_EQ(parse(c, "-9223372036854775808"), Int(INT64_MIN));
  EXPECT_FALSE(parse(c, std::string(100000, '(')));
  EXPECT_EQ(parse(c, "s0 - 7//2"), n - 3);
}

}  // namespace
