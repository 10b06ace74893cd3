#include "passes/canonicalize.h"

#include <gtest/gtest.h>

#include "passes/dce.h"

using namespace vitrify;
using namespace vitrify::passes;

namespace {

// A graph with inputs %0: f32[2,3], %1: i64[4], %2: f32[s0,3] and the given body.
std::string run(const std::string& body) {
  const std::string head = "graph @g(%0: f32[2,3] arg \"x\", %1: i64[4] arg \"n\", %2: f32[s0,3] arg \"d\") syms(s0 hint=8 range=[2,1024]) {\n";
  ir::Graph g = ir::parse(head + body + "}\n");
  const std::string before = ir::print(g);
  ir::verify(g);
  const auto order = ir::effect_order(g);
  const bool changed = canonicalize(g, Options());
  ir::verify(g, &order);
  std::string text = ir::print(g);
  EXPECT_EQ(changed, text != before) << text;
  EXPECT_FALSE(canonicalize(g, Options())) << ir::print(g);
  return text.substr(text.find('\n') + 1, text.size() - text.find('\n') - 3);
}
#define UNCHANGED(body) EXPECT_EQ(run(body), body)

const char* kRelu0 = "  %9: f32[2,3] = aten::relu(%0)\n  return %9\n";

TEST(Canonicalize, copies_that_change_nothing) {
  for (const char* op :
       {"aten::clone(%0, none)", "aten::alias(%0)", "aten::detach(%0)", "aten::contiguous(%0, contiguous)",
        "aten::_to_copy(%0, f32, none, none, none, false, none)", "aten::to.dtype(%0, f32, false, false, none)", "aten::lift_fresh(%0)",
        "aten::expand(%0, [2, 3], false)", "aten::view(%0, [2, 3])", "aten::reshape(%0, [2, -1])", "aten::permute(%0, [0, 1])",
        "aten::dropout(%0, 0.5, false) !random", "aten::mul.Tensor(%0, 1)", "aten::mul.Scalar(%0, 1.0)", "aten::div.Tensor(%0, 1.0)"})
    EXPECT_EQ(run(std::string("  %3: f32[2,3] = ") + op + "\n  %9: f32[2,3] = aten::relu(%3)\n  return %9\n"), kRelu0) << op;
}

TEST(Canonicalize, what_changes_type_or_value_stays) {
  UNCHANGED("  %3: f32[2,3]{1,2} = aten::clone(%0, none)\n  %4: f32[2,3] = aten::relu(%3)\n  return %4\n");
  UNCHANGED("  %3: bf16[2,3] = aten::_to_copy(%0, bf16, none, none, none, false, none)\n  %4: bf16[2,3] = aten::relu(%3)\n  return %4\n");
  UNCHANGED("  %3: f32[2,3] = aten::add.Tensor(%0, 0, 1)\n  %4: f32[2,3] = aten::relu(%3)\n  return %4\n");  // -0.0
  UNCHANGED("  %3: f32[2,3] = aten::mul.Tensor(%0, 2)\n  %4: f32[2,3] = aten::relu(%3)\n  return %4\n");
  UNCHANGED("  %3: f32[2,3] = aten::dropout(%0, 0.5, true) !random\n  %4: f32[2,3] = aten::relu(%3)\n  return %4\n");
  UNCHANGED("  %3: i32[2,3] = aten::view.dtype(%0, i32)\n  %4: i32[2,3] = aten::relu(%3)\n  return %4\n");
  UNCHANGED("  %3: f32[2,3] = my::clone(%0)\n  %4: f32[2,3] = aten::relu(%3)\n  return %4\n");
  UNCHANGED("  %3: f32[2,3] = aten::flip(%0, [0])\n  %4: f32[2,3] = aten::relu(%3)\n  return %4\n");
}

TEST(Canonicalize, integers) {
  const char* expect = "  %9: i64[4] = aten::neg(%1)\n  return %9\n";
  for (const char* op : {"aten::add.Tensor(%1, 0, 1)", "aten::sub.Tensor(%1, 0, 3)", "aten::mul.Tensor(%1, 1)"})
    EXPECT_EQ(run(std::string("  %3: i64[4] = ") + op + "\n  %9: i64[4] = aten::neg(%3)\n  return %9\n"), expect) << op;
  EXPECT_EQ(run("  %3: i64[] wrapped = aten::scalar_tensor(1, i64, none, none, none)\n  %4: i64[4] = aten::mul.Tensor(%3, %1)\n  %9: i64[4] = "
                "aten::neg(%4)\n  return %9\n"),
            expect);
}

TEST(Canonicalize, views_of_views) {
  EXPECT_EQ(
      run("  %3: f32[6] = aten::view(%0, [6])\n  %4: f32[3,2] = aten::_unsafe_view(%3, [3, 2])\n  %5: f32[3,2] = aten::relu(%4)\n  return %5\n"),
      "  %4: f32[3,2] = aten::_unsafe_view(%0, [3, 2])\n  %5: f32[3,2] = aten::relu(%4)\n  return %5\n");
  EXPECT_EQ(run("  %3: f32[6] = aten::view(%0, [6])\n  %4: f32[3,2] = aten::reshape(%3, [3, 2])\n  %5: f32[2,3] = aten::view(%4, [2, 3])\n  %9: "
                "f32[2,3] = aten::relu(%5)\n  return %9\n"),
            kRelu0);
  EXPECT_EQ(
      run("  %3: f32[s0*3] = aten::view(%2, [s0*3])\n  %4: f32[s0,3] = aten::view(%3, [s0, 3])\n  %9: f32[s0,3] = aten::relu(%4)\n  return %9\n"),
      "  %9: f32[s0,3] = aten::relu(%2)\n  return %9\n");
  // Not contiguous: a view of the base may be impossible.
  UNCHANGED(
      "  %3: f32[3,2]{1,3} = aten::t(%0)\n  %4: f32[6] = aten::reshape(%3, [6])\n  %5: f32[3,2] = aten::view(%4, [3, 2])\n  %6: f32[2,3]{1,2} = "
      "aten::t(%5)\n  %7: f32[2,3]{1,2} = aten::relu(%6)\n  return %7\n");
}

TEST(Canonicalize, transposes) {
  EXPECT_EQ(run("  %3: f32[3,2]{1,3} = aten::t(%0)\n  %4: f32[2,3] = aten::transpose.int(%3, 0, -1)\n  %9: f32[2,3] = aten::relu(%4)\n  return %9\n"),
            kRelu0);
  EXPECT_EQ(run("  %3: f32[2,1,3] = aten::unsqueeze(%0, 1)\n  %4: f32[3,1,2]{1,3,3} = aten::transpose.int(%3, 0, 2)\n  %5: f32[1,2,3]{3,3,1} = "
                "aten::permute(%4, [1, 2, 0]) !view\n"
                "  %6: f32[1,2,3] = aten::relu(%5)\n  return %6\n"),
            "  %3: f32[2,1,3] = aten::unsqueeze(%0, 1)\n  %5: f32[1,2,3]{3,3,1} = aten::permute(%3, [1, 0, 2]) !view\n  %6: f32[1,2,3] = "
            "aten::relu(%5)\n  return %6\n");
}

TEST(Canonicalize, outputs_keep_their_own_memory) {
  UNCHANGED("  %3: f32[2,3] = aten::clone(%0, none)\n  return %3\n");
  UNCHANGED("  %3: f32[2,3] = aten::clone(%0, none)\n  %4: f32[6] = aten::view(%3, [6])\n  return %4\n");
  UNCHANGED("  %3: f32[2,3] = aten::relu(%0)\n  %4: f32[2,3] = aten::clone(%3, none)\n  return %3, %4\n");
  UNCHANGED("  %3: f32[2,3] = aten::relu(%0)\n  %4: f32[6] = aten::view(%3, [6])\n  %5: f32[6] = aten::clone(%4, none)\n  return %3, %5\n");
  UNCHANGED("  %3: f32[2,3] = aten::relu(%0)\n  %4: f32[2,3] = aten::detach(%3)\n  return %3, %4\n");
  // One of two clones may go, not both.
  EXPECT_EQ(run("  %3: f32[2,3] = aten::relu(%0)\n  %4: f32[2,3] = aten::clone(%3, none)\n  %5: f32[2,3] = aten::clone(%3, none)\n  return %4, %5\n"),
            "  %3: f32[2,3] = aten::relu(%0)\n  %5: f32[2,3] = aten::clone(%3, none)\n  return %3, %5\n");
  EXPECT_EQ(
      run("  %3: f32[2,3] = aten::relu(%0)\n  %4: f32[2,3] = aten::contiguous(%3, contiguous)\n  %5: f32[6] = aten::view(%4, [6])\n  return %5\n"),
      "  %3: f32[2,3] = aten::relu(%0)\n  %5: f32[6] = aten::view(%3, [6])\n  return %5\n");
}

TEST(Dce, keeps_effects) {
  ir::Graph g = ir::parse(
      "graph @g(%0: f32[2] arg \"x\") {\n  %1: f32[2] = aten::relu(%0)\n  %2: f32[2] = aten::rand_like(%0) !random\n  %3: () = aten::_assert(%1) "
      "!effect\n  %4: f32[2] = aten::exp(%1)\n  return %0\n}\n");
  EXPECT_TRUE(dce(g, Options()));
  EXPECT_FALSE(dce(g, Options()));
  EXPECT_EQ(g.nodes().size(), 4u);
}

}  // namespace
