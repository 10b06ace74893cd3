#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "ir/graph.h"

using namespace vitrify;
using namespace vitrify::ir;
using sym::Int;
using Outs = boost::container::small_vector<TensorType, 1>;

namespace {

uint64_t base_seed() {
  if (const char* s = std::getenv("VITRIFY_TEST_SEED")) return std::strtoull(s, nullptr, 10);
  return 7;
}

struct Random {
  std::mt19937_64 rng;
  Graph g;
  std::vector<Int> symbols;
  std::vector<Value> values;

  uint64_t below(uint64_t n) { return rng() % n; }
  Int integer() {
    switch (below(5)) {
      case 0:
        return symbols[below(symbols.size())];
      case 1:
        return symbols[below(symbols.size())] * static_cast<int64_t>(below(5)) + 3;
      case 2:
        return sym::floordiv(symbols[below(symbols.size())] + 5, 2 + static_cast<int64_t>(below(3)));
      case 3:
        return sym::min(symbols[below(symbols.size())] * symbols[below(symbols.size())], sym::mod(symbols[0], 7) + 1);
      default:
        return static_cast<int64_t>(below(9));
    }
  }
  double number() {
    const double special[] = {0.0, -0.0, 1.0, 1e-5, 1e300, 0.1, INFINITY, -INFINITY, std::nan(""), 3.0, 123456789012345680.0, 5e-324, -std::nan("7")};
    return below(3) ? special[below(std::size(special))] : std::ldexp(static_cast<double>(rng()), static_cast<int>(below(200)) - 150);
  }
  TensorType type() {
    TensorType t;
    t.dtype = static_cast<DType>(below(13));
    if (t.dtype == DType::Opaque) t.opaque_scalar_type = static_cast<uint8_t>(below(40));
    for (uint64_t i = below(4); i > 0; --i) t.sizes.push_back(sym::max(integer(), 0));
    t.strides = contiguous_strides(t.sizes);
    if (below(4) == 0)
      for (Int& s : t.strides) s = s * 2;
    if (below(4) == 0) t.device = {static_cast<DeviceKind>(below(3)), static_cast<int8_t>(static_cast<int>(below(3)) - 1)};
    t.wrapped_number = t.sizes.empty() && below(2);
    return t;
  }
  Value value() { return below(8) ? values[below(values.size())] : Value{}; }
  Complex complex() {
    const double re = number();
    return {re, number()};
  }
  template <class T, class F>
  std::vector<T> list(F&& f) {
    std::vector<T> v;
    for (uint64_t i = below(4); i > 0; --i) v.push_back(f());
    return v;
  }
  Arg arg() {
    switch (below(17)) {
      case 0:
        return None{};
      case 1:
        return value();
      case 2:
        return list<Value>([&] { return value(); });
      case 3:
        return integer();
      case 4:
        return list<Int>([&] { return integer(); });
      case 5:
        return number();
      case 6:
        return list<double>([&] { return number(); });
      case 7:
        return below(2) == 0;
      case 8:
        return list<bool>([&] { return below(2) == 0; });
      case 9:
        return std::string("a \"b\"\\ \n\t)#,\x01 ") + std::string(below(3), 'x');
      case 10:
        return list<Complex>([&] { return complex(); });
      case 11:
        return complex();
      case 12:
        return static_cast<DType>(below(13));
      case 13:
        return Device{static_cast<DeviceKind>(below(3)), static_cast<int8_t>(static_cast<int>(below(3)) - 1)};
      case 14:
        return static_cast<MemoryFormat>(below(4));
      case 15:
        return static_cast<Layout>(below(2));
      default:
        return OpaqueArg{static_cast<uint32_t>(below(g.constants.size()))};
    }
  }
  explicit Random(uint64_t seed) : rng(seed) {
    g.name = below(2) ? "f.1" : "odd name";
    symbols.push_back(g.ctx().symbol(sym::SymbolKind::Size, 8, {2, 1024}));
    symbols.push_back(g.ctx().symbol(sym::SymbolKind::Unbacked, {}, {0, INT64_MAX}));
    symbols.push_back(g.ctx().symbol(sym::SymbolKind::Size, 16));
    g.ctx().mutable_symbol_info(symbols[2]).multiple_of = 8;
    for (int i = 0; i < 6; ++i) symbols.push_back(g.ctx().symbol(sym::SymbolKind::Unbacked));
    for (uint64_t i = 1 + below(3); i > 0; --i) values.push_back(g.add_input(static_cast<InputKind>(below(4)), "x\"" + std::to_string(i), type()));
    for (uint64_t i = 1 + below(2); i > 0; --i) values.push_back(g.add_constant(type(), std::make_shared<int>(3)));
    g.sources = {"", "a.py:1 in f", "odd \\ source\nof two lines # x"};
    for (uint64_t i = below(12); i > 0; --i) {
      std::vector<Arg> args;
      for (uint64_t k = below(6); k > 0; --k) args.push_back(arg());
      Outs outs;
      for (uint64_t k = below(4) ? 1 : below(4); k > 0; --k) outs.push_back(type());
      const uint64_t which = below(40);
      Node* n = g.append(g.op("aten::op" + std::to_string(which) + ".x", static_cast<uint32_t>(which % 16)), std::move(args), std::move(outs));
      n->source = static_cast<uint32_t>(below(3));
      n->as_contiguous = below(4) == 0;
      for (uint32_t k = 0; k < n->outs.size(); ++k) values.push_back(n->out(k));
    }
    for (uint64_t i = below(4); i > 0; --i) g.outputs.push_back(value());
    if (below(2)) g.remove_dead();  // ids with gaps
  }
};

TEST(Text, LinesOfCommentBeforeTheGraph) {
  const std::string graph = "graph @g() {\n  return undefined\n}\n";
  EXPECT_EQ(print(parse("# options: {}\n# inputs: []\n" + graph)), print(parse(graph)));
}

TEST(IrText, example) {
  const char* text =
      "graph @name(%0: f32[2,s0*3] arg \"x\", %1: f32[4,3]{1,4} cuda:0 param \"w\") syms(s0 hint=8 range=[2,1024]) {\n"
      "  %2: f32[2,4] = aten::linear(%0, %1, none)  # file.py:12\n"
      "  %3: (f32[2], i64[2]) = aten::max.dim(%2, 1, false) !random\n"
      "  %5: f32[] wrapped = aten::odd(1.0, 1e-05, [1, s0], [%2, undefined, %3.1], []i, []t, [true], f32, cpu, preserve, inf, nan, complex(1.0, "
      "-0.0), \"s\")\n"
      "  return %3.1, undefined\n"
      "}\n";
  Graph g = parse(text);
  const Graph again = parse(print(g));
  EXPECT_EQ(print(g), print(again));
  verify(g);
  ASSERT_EQ(g.nodes().size(), 5u);
  const Node& odd = *g.nodes()[4];
  EXPECT_TRUE(std::holds_alternative<double>(odd.args[0]));
  EXPECT_EQ(std::get<std::vector<Value>>(odd.args[3]).size(), 3u);
  EXPECT_TRUE(odd.outs[0].wrapped_number);
  EXPECT_EQ(g.sources[g.nodes()[2]->source], "file.py:12");
  EXPECT_EQ(g.nodes()[3]->op->flags, kRandom);
  EXPECT_EQ(g.inputs[1].value.type().strides, (Dims{1, 4}));
  EXPECT_EQ(odd.id, 5u);
}

TEST(IrText, random_graphs_survive_the_round_trip) {
  const uint64_t base = base_seed();
  printf("seed %llu\n", static_cast<unsigned long long>(base));
  for (uint64_t i = 0; i < 1500; ++i) {
    Random r(base + i);
    const std::string text = print(r.g);
    Graph back;
    ASSERT_NO_THROW(back = parse(text)) << text << "seed " << base + i;
    ASSERT_EQ(print(back), text) << "seed " << base + i;
    ASSERT_EQ(back.nodes().size(), r.g.nodes().size());
    for (size_t k = 0; k < back.nodes().size(); ++k)
      for (size_t a = 0; a < back.nodes()[k]->args.size(); ++a) ASSERT_EQ(back.nodes()[k]->args[a].index(), r.g.nodes()[k]->args[a].index()) << text;
  }
}

// Garbage is refused with a place, or read as some graph; never anything else.
TEST(IrText, mutated_texts_never_crash) {
  const uint64_t base = base_seed();
  printf("seed %llu\n", static_cast<unsigned long long>(base));
  std::mt19937_64 rng(base);
  size_t refused = 0;
  for (uint64_t i = 0; i < 4000; ++i) {
    std::string text = print(Random(base + i % 100).g);
    for (uint64_t k = 1 + rng() % 4; k > 0 && !text.empty(); --k) {
      const size_t at = rng() % text.size(), n = 1 + rng() % 12;
      switch (rng() % 5) {
        case 0:
          text.erase(at, n);
          break;
        case 1:
          text[at] = static_cast<char>(rng());
          break;
        case 2:
          text.insert(at, text.substr(rng() % text.size(), n));
          break;
        case 3:
          text.insert(at, 1, "%([{}])\"#!.,:-9es"[rng() % 17]);
          break;
        default:
          text.resize(at);
          break;
      }
    }
    try {
      Graph g = parse(text);
      print(g);
    } catch (const Error& e) {
      ++refused;
      int line = 0, column = 0;
      ASSERT_EQ(sscanf(e.what(), "%d:%d: ", &line, &column), 2) << e.what() << "\n" << text;
      ASSERT_GE(line, 1);
    }
  }
  EXPECT_GT(refused, 2000u);
}

TEST(IrText, errors_name_the_place) {
  auto message = [](const char* text) -> std::string {
    try {
      parse(text);
      return "";
    } catch (const Error& e) {
      return e.what();
    }
  };
  EXPECT_EQ(message("graph @g(%0: f32[2] arg \"x\") {\n  return %1\n}"), "2:10: %1 is not defined");
  EXPECT_EQ(message("graph @g(%0: f33[2] arg \"x\") {\n  return\n}"), "1:14: unknown dtype 'f33'");
  EXPECT_EQ(message("graph @g(%0: f32[s0] arg \"x\") {\n  return\n}"), "1:18: 's0' is not an integer expression");
  EXPECT_EQ(message("graph @g() {\n  %1: f32[] = a::b([])\n  return\n}"), "2:22: an empty list names its kind: []t, []i, []f, []b or []c");
  EXPECT_EQ(message("graph @g() {\n  %1: f32[] = a::b()\n  %1: f32[] = a::b()\n  return\n}"), "3:3: %1 is defined twice");
  EXPECT_NE(message("graph @g(%0: f32[9223372036854775807,9223372036854775807,2] arg \"x\") {\n  return\n}"), "");
}

}  // namespace
