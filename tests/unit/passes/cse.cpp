#include "passes/cse.h"

#include <gtest/gtest.h>

using namespace vitrify;
using namespace vitrify::passes;

namespace {

std::string run(const std::string& body) {
  ir::Graph g = ir::parse("graph @g(%0: f32[2,3] arg \"x\", %1: f32[2,3] arg \"y\") {\n" + body + "}\n");
  const std::string before = ir::print(g);
  const bool changed = cse(g, Options());
  ir::verify(g);
  std::string text = ir::print(g);
  EXPECT_EQ(changed, text != before) << text;
  EXPECT_FALSE(cse(g, Options())) << ir::print(g);
  return text.substr(text.find('\n') + 1, text.size() - text.find('\n') - 3);
}
#define UNCHANGED(body) EXPECT_EQ(run(body), body)

TEST(Cse, merges_chains) {
  EXPECT_EQ(run("  %2: f32[2,3] = aten::relu(%0)\n  %3: f32[2,3] = aten::relu(%0)\n  %4: f32[2,3] = aten::exp(%2)\n  %5: f32[2,3] = aten::exp(%3)\n"
                "  %6: f32[2,3] = aten::add.Tensor(%4, %5, 1)\n  return %6\n"),
            "  %2: f32[2,3] = aten::relu(%0)\n  %4: f32[2,3] = aten::exp(%2)\n  %6: f32[2,3] = aten::add.Tensor(%4, %4, 1)\n  return %6\n");
  EXPECT_EQ(run("  %2: (f32[2], i64[2]) = aten::max.dim(%0, 1, false)\n  %3: (f32[2], i64[2]) = aten::max.dim(%0, 1, false)\n  %4: f32[2] = "
                "aten::take(%2, %3.1)\n  return %4\n"),
            "  %2: (f32[2], i64[2]) = aten::max.dim(%0, 1, false)\n  %4: f32[2] = aten::take(%2, %2.1)\n  return %4\n");
  EXPECT_EQ(run("  %2: f32[2,3] = aten::mul.Scalar(%0, nan)\n  %3: f32[2,3] = aten::mul.Scalar(%0, nan)\n  %4: f32[2,3] = aten::add.Tensor(%2, %3, "
                "1)\n  return %4\n"),
            "  %2: f32[2,3] = aten::mul.Scalar(%0, nan)\n  %4: f32[2,3] = aten::add.Tensor(%2, %2, 1)\n  return %4\n");
}

TEST(Cse, keeps_what_differs) {
  UNCHANGED(
      "  %2: f32[2,3] = aten::rand_like(%0) !random\n  %3: f32[2,3] = aten::rand_like(%0) !random\n  %4: f32[2,3] = aten::add.Tensor(%2, %3, 1)\n  "
      "return %4\n");
  UNCHANGED("  %2: f32[2,3] = my::op(%0) !effect\n  %3: f32[2,3] = my::op(%0) !effect\n  %4: f32[2,3] = aten::add.Tensor(%2, %3, 1)\n  return %4\n");
  UNCHANGED(
      "  %2: f32[2,3] = aten::add.Scalar(%0, 0.0)\n  %3: f32[2,3] = aten::add.Scalar(%0, -0.0)\n  %4: f32[2,3] = aten::add.Tensor(%2, %3, 1)\n  "
      "return %4\n");
  UNCHANGED(
      "  %2: f32[2,3] = aten::add.Scalar(%0, 1.0)\n  %3: f32[2,3] = aten::add.Scalar(%0, 1)\n  %4: f32[2,3] = aten::add.Tensor(%2, %3, 1)\n  return "
      "%4\n");
  UNCHANGED(
      "  %2: f32[2,3] = aten::clone(%0, none)\n  %3: f32[2,3]{1,2} = aten::clone(%0, none)\n  %4: f32[2,3] = aten::add.Tensor(%2, %3, 1)\n  return "
      "%4\n");
  UNCHANGED("  %2: f32[2,3] = aten::relu(%0)\n  %3: f32[2,3] = aten::relu(%1)\n  %4: f32[2,3] = aten::add.Tensor(%2, %3, 1)\n  return %4\n");
}

TEST(Cse, outputs_keep_their_own_memory) {
  UNCHANGED("  %2: f32[2,3] = aten::relu(%0)\n  %3: f32[2,3] = aten::relu(%0)\n  return %2, %3\n");
  UNCHANGED("  %2: f32[2,3] = aten::relu(%0)\n  %3: f32[6] = aten::view(%2, [6])\n  %4: f32[2,3] = aten::relu(%0)\n  return %3, %4\n");
  EXPECT_EQ(run("  %2: f32[2,3] = aten::relu(%0)\n  %3: f32[2,3] = aten::exp(%2)\n  %4: f32[2,3] = aten::relu(%0)\n  return %3, %4\n"),
            "  %2: f32[2,3] = aten::relu(%0)\n  %3: f32[2,3] = aten::exp(%2)\n  return %3, %2\n");
  // Views of one base share its memory anyway; each output stays a value of its own.
  UNCHANGED("  %2: f32[2,3] = aten::relu(%0)\n  %3: f32[6] = aten::view(%2, [6])\n  %4: f32[6] = aten::view(%2, [6])\n  return %3, %4\n");
}

}  // namespace
