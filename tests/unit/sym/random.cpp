// Properties on random expressions: what is simplified, substituted, bounded, proved and printed agrees with plain evaluation.
#include <gtest/gtest.h>

#include <random>

#include "support/error.h"
#include "sym/sym.h"

using namespace vitrify;
using namespace vitrify::sym;

namespace {

int64_t plain_div(int64_t a, int64_t b) { return static_cast<int64_t>(std::floor(static_cast<long double>(a) / b)); }

// An unsimplified expression next to the Int built by the same operations.
struct Tree {
  char op = 'c';
  int64_t value = 0;
  int l = -1, r = -1;
  Int sym;
};

struct Gen {
  std::mt19937_64 rng;
  Context c;
  std::vector<Int> symbols;
  std::vector<Int> extents;
  std::vector<Tree> trees;

  explicit Gen(uint64_t seed) : rng(seed) {
    for (int i = 0; i < 2; ++i) {
      symbols.push_back(c.symbol(SymbolKind::Size, 3, {1, 5}));
      extents.push_back(0);
    }
    Int products[] = {symbols[0], symbols[1], symbols[0] * symbols[1], symbols[0] + 1, Int(3), Int(6)};
    for (int i = 0; i < 3; ++i) {
      Int e = products[rng() % 6];
      symbols.push_back(c.symbol(SymbolKind::Loop));
      c.set_loop_extent(symbols.back(), e);
      extents.push_back(e);
    }
  }
  int64_t pick(int64_t lo, int64_t hi) { return lo + static_cast<int64_t>(rng() % static_cast<uint64_t>(hi - lo + 1)); }

  static Tree constant(int64_t v) { return {'c', v, -1, -1, v}; }
  int keep(Tree t) {
    trees.push_back(t);
    return static_cast<int>(trees.size()) - 1;
  }
  Tree node(char op, int l, int r) const {
    const Int a = trees[static_cast<size_t>(l)].sym, b = trees[static_cast<size_t>(r)].sym;
    return {op, 0, l, r, op == '*' ? a * b : a + b};
  }
  // 2 * size + an odd number
  Tree odd(int64_t k) {
    const int twice = keep(node('*', keep({'s', 0, -1, -1, symbols[0]}), keep(constant(2))));
    return node('+', twice, keep(constant(2 * k + 1)));
  }

  int make(int depth) {
    Tree t;
    const int64_t k = depth == 0 ? pick(0, 1) : pick(0, 9);
    if (k == 0) {
      t.value = pick(-6, 12);
      t.sym = t.value;
    } else if (k == 1) {
      t.op = 's';
      t.value = pick(0, static_cast<int64_t>(symbols.size()) - 1);
      t.sym = symbols[static_cast<size_t>(t.value)];
    } else {
      t.l = make(depth - 1);
      Int a = trees[static_cast<size_t>(t.l)].sym;
      if (k >= 6) {  // divisors: constants, sizes, their products, and sums that may be negative but are never zero
        Tree d;
        const int64_t which = pick(0, 5);
        if (which <= 1) {
          d.value = pick(0, 9) == 0 ? -pick(1, 4) : pick(1, 12);
          d.sym = d.value;
        } else if (which == 2) {
          d.op = 's';
          d.value = pick(0, 1);
          d.sym = symbols[static_cast<size_t>(d.value)];
        } else if (which >= 4) {
          d = odd(pick(-9, 5));
          if (which == 5) d = node('*', keep(d), keep(constant(pick(0, 1) ? 2 : -3)));
        } else {
          Tree x{'s', 0, -1, -1, symbols[0]}, y{'s', 1, -1, -1, symbols[1]};
          trees.push_back(x);
          trees.push_back(y);
          d = {'*', 0, static_cast<int>(trees.size()) - 2, static_cast<int>(trees.size()) - 1, symbols[0] * symbols[1]};
        }
        trees.push_back(d);
        t.r = static_cast<int>(trees.size()) - 1;
        t.op = k < 8 ? '/' : '%';
        t.sym = t.op == '/' ? floordiv(a, d.sym) : sym::mod(a, d.sym);
      } else {
        t.r = make(depth - 1);
        Int b = trees[static_cast<size_t>(t.r)].sym;
        t.op = k == 2 ? '+' : k == 3 ? '-' : k == 4 ? '*' : (rng() & 1) ? '<' : '>';
        t.sym = t.op == '+' ? a + b : t.op == '-' ? a - b : t.op == '*' ? a * b : t.op == '<' ? min(a, b) : max(a, b);
      }
    }
    trees.push_back(t);
    return static_cast<int>(trees.size()) - 1;
  }

  int64_t value(int i, const std::vector<int64_t>& at) const {
    const Tree& t = trees[static_cast<size_t>(i)];
    if (t.op == 'c') return t.value;
    if (t.op == 's') return at[static_cast<size_t>(t.value)];
    const int64_t a = value(t.l, at), b = value(t.r, at);
    switch (t.op) {
      case '+':
        return a + b;
      case '-':
        return a - b;
      case '*':
        return a * b;
      case '/':
        return plain_div(a, b);
      case '%':
        return a - b * plain_div(a, b);
      case '<':
        return std::min(a, b);
      default:
        return std::max(a, b);
    }
  }

  // A random point where every fact holds.
  std::vector<int64_t> point() {
    std::vector<int64_t> at(symbols.size());
    for (size_t i = 0; i < symbols.size(); ++i) {
      const int64_t extent = i < 2 ? 0 : eval(extents[i], [&](uint32_t id) { return at[id]; });
      at[i] = i < 2 ? pick(1, 5) : pick(0, extent - 1);
    }
    return at;
  }
};

uint64_t base_seed() {
  if (const char* s = std::getenv("VITRIFY_TEST_SEED")) return std::strtoull(s, nullptr, 10);
  return 20240229;
}

TEST(SymRandom, agrees_with_plain_evaluation) {
  const uint64_t base = base_seed();
  printf("seed %llu\n", static_cast<unsigned long long>(base));
  for (uint64_t n = 0; n < 6000; ++n) {
    Gen g(base + n);
    const int root = g.make(static_cast<int>(g.pick(1, 5)));
    const int other = g.make(2);
    const Int e = g.trees[static_cast<size_t>(root)].sym, f = g.trees[static_cast<size_t>(other)].sym;
    const std::string text = str(e);
    // text
    auto back = parse(g.c, text);
    ASSERT_TRUE(back) << text;
    ASSERT_EQ(*back, e) << text << " became " << str(*back) << ", seed " << base + n;
    const auto range = bounds(e);
    const auto eq = known_eq(e, f), le = known_le(e, f), lt = known_lt(e, f);
    const size_t var = g.rng() % g.symbols.size();
    const std::pair<Int, Int> map[] = {{g.symbols[var], f}};
    std::optional<Int> substituted;
    // f may be zero where a size is a divisor
    if (var >= 2) substituted = substitute(e, map);
    const auto affine = affine_in(e, g.symbols[var]);
    for (int p = 0; p < 12; ++p) {
      const auto at = g.point();
      auto look = [&](uint32_t id) { return at[id]; };
      const int64_t expect = g.value(root, at), expect_f = g.value(other, at);
      ASSERT_EQ(eval(e, look), expect) << text << ", seed " << base + n;
      if (range) {
        ASSERT_LE(range->lo, expect) << text << ", seed " << base + n;
        ASSERT_GE(range->hi, expect) << text << ", seed " << base + n;
      }
      if (eq) {
        ASSERT_EQ(*eq, expect == expect_f) << text << " == " << str(f) << ", seed " << base + n;
      }
      if (le) {
        ASSERT_EQ(*le, expect <= expect_f) << text << " <= " << str(f) << ", seed " << base + n;
      }
      if (lt) {
        ASSERT_EQ(*lt, expect < expect_f) << text << " < " << str(f) << ", seed " << base + n;
      }
      for (int64_t k : {2, 3, 4, 6}) {
        if (known_multiple(e, k)) {
          ASSERT_EQ(expect % k, 0) << text << ", seed " << base + n;
        }
      }
      if (affine) {
        ASSERT_EQ(eval(affine->first, look) * at[var] + eval(affine->second, look), expect) << text << ", seed " << base + n;
      }
    }
    if (!substituted) continue;
    for (int p = 0; p < 6; ++p) {
      auto at = g.point();
      const int64_t expect_sub = eval(*substituted, [&](uint32_t id) { return at[id]; });
      auto moved = at;
      moved[var] = g.value(other, at);
      // Only where the replacement obeys the facts of what it replaces.
      const int64_t extent = eval(g.extents[var], [&](uint32_t id) { return at[id]; });
      if (moved[var] < 0 || moved[var] >= extent) continue;
      ASSERT_EQ(expect_sub, g.value(root, moved)) << text << " with " << str(g.symbols[var]) << " = " << str(f) << ", seed " << base + n;
    }
  }
}

// A flat index cut into coordinates and put together again, as chains of views do, comes back as it was.
TEST(SymRandom, reshapes_compose) {
  std::mt19937_64 rng(base_seed());
  for (int n = 0; n < 500; ++n) {
    Context c;
    Int s = c.symbol(SymbolKind::Size, 8, {2, 1 << 16}), t = c.symbol(SymbolKind::Size, 8, {2, 1 << 16});
    const bool symbolic = n % 2;
    std::vector<Int> dims, vars;
    const size_t rank = 2 + rng() % 3;
    for (size_t i = 0; i < rank; ++i) {
      const uint64_t k = rng() % 4;
      dims.push_back(symbolic && k == 0 ? s : symbolic && k == 1 ? t : Int(static_cast<int64_t>(2 + rng() % 7)));
      vars.push_back(c.symbol(SymbolKind::Loop));
      c.set_loop_extent(vars.back(), dims.back());
    }
    Int flat = 0, total = 1;
    for (size_t i = 0; i < rank; ++i) flat = flat * dims[i] + vars[i], total = total * dims[i];
    // cut back into the same coordinates
    Int stride = 1;
    for (size_t i = rank; i-- > 0;) {
      ASSERT_EQ(str(sym::mod(floordiv(flat, stride), dims[i])), str(vars[i])) << str(flat) << " by " << str(stride);
      stride = stride * dims[i];
    }
    // one loop over everything, cut and joined
    Int f = c.symbol(SymbolKind::Loop);
    c.set_loop_extent(f, total);
    Int joined = 0;
    stride = 1;
    for (size_t i = rank; i-- > 0;) {
      joined = joined + sym::mod(floordiv(f, stride), dims[i]) * stride;
      stride = stride * dims[i];
    }
    ASSERT_EQ(str(joined), str(f));
  }
}

}  // namespace
