#include "passes/partition.h"

#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

using namespace vitrify;

namespace {

bool elementwise(const ir::Node& n) {
  static const std::set<std::string, std::less<>> names{"aten::sin", "aten::cos",  "aten::mul.Tensor", "aten::add.Tensor",
                                                        "aten::exp", "aten::relu", "aten::gt.Scalar",  "aten::_to_copy"};
  return names.contains(n.op->name);
}

struct Given {
  std::set<uint32_t> never = {};        // ids of nodes whose results may not be kept
  std::set<uint32_t> in_backward = {};  // that the backward recorded, and needs no tangent for
  uint32_t outputs = 1;
  std::set<uint32_t> copied = {};  // of those that may not be kept: a copy may
  std::map<uint32_t, std::vector<uint32_t>> made_of = {};
};

// Ids of the nodes that are kept, of a graph with inputs %0: x, %1: w, %2: the tangent.
std::vector<uint32_t> kept(const std::string& body, Given given = {}) {
  ir::Graph g = ir::parse("graph @g(%0: f32[8,8] arg \"x\", %1: f32[8,8] param \"w\", %2: f32[8,8] tangent \"t\") {\n" + body + "}\n");
  ir::verify(g);
  const passes::Partition p = passes::partition({
      .graph = g,
      .num_forward = given.outputs,
      .first_tangent = 2,
      .in_backward = [&](const ir::Node& n) { return given.in_backward.contains(n.id); },
      .recomputable = [](const ir::Node& n) { return (n.op->flags & ir::kView) || (!(n.op->flags & (ir::kRandom | ir::kEffect)) && elementwise(n)); },
      .materialized = [](const ir::Node& n) { return !elementwise(n) && !(n.op->flags & ir::kView); },
      .may_save = [&](ir::Value v) { return !given.never.contains(v.node->id); },
      .may_copy = [&](ir::Value v) { return given.copied.contains(v.node->id); },
      .made_of =
          [&](ir::Value v) {
            std::vector<ir::Value> parts;
            if (const auto of = given.made_of.find(v.node->id); of != given.made_of.end())
              for (ir::Node* n : g.nodes())
                if (std::ranges::count(of->second, n->id)) parts.push_back(n->out());
            return parts;
          },
  });
  // Everything the backward reads is its own, kept, a constant, or computed again from such by what may run again.
  std::unordered_set<ir::Value> have(p.saved.begin(), p.saved.end());
  std::function<void(ir::Value)> reach = [&](ir::Value v) {
    if (have.contains(v) || p.backward[v.node->id] || v.node->op->name == "graph::constant") return;
    if (std::ranges::count(p.remade, v)) {
      for (ir::Node* n : g.nodes())
        if (std::ranges::count(given.made_of.at(v.node->id), n->id)) reach(n->out());
      return;
    }
    ASSERT_NE(v.node->op->name, "graph::input") << "input " << v.node->id << " is needed and not kept";
    ASSERT_TRUE((v.node->op->flags & ir::kView) || elementwise(*v.node)) << v.node->op->name << " would run again";
    ASSERT_FALSE(v.node->op->flags & ir::kRandom);
    ir::for_each_input(*v.node, [&](ir::Value& a) { reach(a); });
  };
  for (ir::Node* n : g.nodes())
    if (p.backward[n->id]) ir::for_each_input(*n, [&](ir::Value& v) { reach(v); });
  for (size_t o = given.outputs; o < g.outputs.size(); ++o) reach(g.outputs[o]);
  std::vector<uint32_t> ids;
  for (const ir::Value& v : p.saved) ids.push_back(v.node->id);
  return ids;
}
using Ids = std::vector<uint32_t>;

TEST(Partition, inputs_are_kept_and_pointwise_work_runs_again) {
  EXPECT_EQ(kept("  %3: f32[8,8] = aten::sin(%0)\n  %4: f32[8,8] = aten::cos(%0)\n  %5: f32[8,8] = aten::mul.Tensor(%2, %4)\n  return %3, %5\n"),
            Ids{0});
  // a chain is as free as its first link
  EXPECT_EQ(kept("  %3: f32[8,8] = aten::sin(%0)\n  %4: f32[8,8] = aten::exp(%3)\n  %5: f32[8,8] = aten::cos(%4)\n  %6: f32[8,8] = "
                 "aten::mul.Tensor(%2, %5)\n  return %5, %6\n"),
            Ids{0});
  EXPECT_EQ(kept("  %3: f32[8,8] = aten::mul.Tensor(%0, %1)\n  %4: f32[8,8] = aten::mul.Tensor(%2, %1)\n  %5: f32[8,8] = aten::mul.Tensor(%2, %0)\n  "
                 "return %3, %4, %5\n"),
            (Ids{0, 1}));
}

TEST(Partition, nothing_is_kept_for_a_backward_that_reads_nothing) {
  EXPECT_EQ(kept("  %3: f32[8,8] = aten::add.Tensor(%0, %1, 1)\n  return %3, %2\n"), Ids{});
  EXPECT_EQ(kept("  %3: f32[8,8] = aten::sin(%0)\n  %4: f32[8,8] = aten::relu(%2)\n  return %3, %4\n"), Ids{});
}

TEST(Partition, what_is_not_pointwise_runs_once) {
  const char* body =
      "  %3: f32[8,8] = aten::mm(%0, %1)\n  %4: f32[8,8] = aten::sin(%3)\n  %5: f32[8,8] = aten::cos(%3)\n  %6: f32[8,8] = aten::mul.Tensor(%2, "
      "%5)\n  "
      "return %4, %6\n";
  EXPECT_EQ(kept(body), Ids{3});
  // a product whose result may not be kept is kept as what is made of it
  EXPECT_EQ(kept(body, {.never = {3}}), Ids{5});
}

TEST(Partition, what_may_not_be_kept_is_not) {
  const char* body = "  %3: f32[8,8] = aten::sin(%0)\n  %4: f32[8,8] = aten::cos(%0)\n  %5: f32[8,8] = aten::mul.Tensor(%2, %4)\n  return %3, %5\n";
  EXPECT_EQ(kept(body, {.never = {0}}), Ids{4});
  // the result of the program, when eager keeps something else
  const char* result =
      "  %3: f32[8,8] = aten::add.Tensor(%0, %1, 1)\n  %4: f32[8,8] = aten::exp(%3)\n  %5: f32[8,8] = aten::mul.Tensor(%2, %4)\n  return %3, %5\n";
  EXPECT_EQ(kept(result, {.never = {0, 3}}), Ids{4});
  EXPECT_EQ(kept(result, {.never = {3, 4}}), (Ids{0, 1}));
}

TEST(Partition, an_input_that_may_change_is_copied_where_that_is_cheaper) {
  const char* small =
      "  %3: f32[8,8] = aten::mm(%0, %0)\n  %4: f32[8,8] = aten::mul.Tensor(%2, %3)\n  %5: f32[8,8] = aten::mul.Tensor(%4, %1)\n  return %3, %5\n";
  EXPECT_THROW(kept(small, {.never = {1}}), Error);
  EXPECT_EQ(kept(small, {.never = {1}, .copied = {1}}), (Ids{1, 3}));
  // as wide as what is made of it: that is in memory, a copy would not be
  EXPECT_EQ(kept("  %3: f32[8,8] = aten::sin(%0)\n  %4: f32[8,8] = aten::mul.Tensor(%2, %3)\n  return %3, %4\n", {.never = {0}, .copied = {0}}),
            Ids{3});
}

TEST(Partition, the_narrower_value_is_kept) {
  // the mask, not what it is made of
  EXPECT_EQ(kept("  %3: f32[8,8] = aten::mm(%0, %1)\n  %4: f32[8,8] = aten::relu(%3)\n  %5: b8[8,8] = aten::gt.Scalar(%3, 0)\n  %6: f32[8,8] = "
                 "aten::mul.Tensor(%2, %5)\n  return %4, %6\n",
                 {.never = {3, 4}}),
            Ids{5});
  // one of them already is in memory: keeping it costs that it stays
  EXPECT_EQ(kept("  %3: f32[8,8] = aten::mm(%0, %1)\n  %4: f32[8,8] = aten::sin(%3)\n  %5: f32[8,8] = aten::mul.Tensor(%2, %4)\n  %6: f32[8,8] = "
                 "aten::mul.Tensor(%5, %3)\n  return %4, %6\n"),
            Ids{3});
  // bytes: half the size wins over a bigger one, though it must be written
  EXPECT_EQ(
      kept("  %3: f32[8,8] = aten::mm(%0, %1)\n  %4: f32[] = aten::sum(%3, none)\n  %5: f32[8,8] = aten::mul.Tensor(%2, %4)\n  return %3, %5\n"),
      Ids{4});
}

TEST(Partition, a_result_is_made_again_of_others) {
  // a mean by rows, and what is made of it and the product: where a bias is added before the derivative reads it
  const char* body =
      "  %3: f32[8,8] = aten::mm(%0, %1)\n  %4: f32[8,1] = aten::sum.dim_IntList(%3, [1], true, none)\n  %5: f32[8,8] = aten::cumsum(%3, 1, none)\n"
      "  %6: f32[8,8] = aten::add.Tensor(%5, %1, 1)\n  %7: f32[8,8] = aten::sin(%6)\n  %8: f32[8,8] = aten::mul.Tensor(%2, %6)\n"
      "  %9: f32[8,8] = aten::mul.Tensor(%8, %3)\n  return %7, %9\n";
  EXPECT_EQ(kept(body), (Ids{1, 3, 5}));
  EXPECT_EQ(kept(body, {.made_of = {{5, {3, 4}}}}), (Ids{1, 3, 4}));
  // not of what is dearer
  EXPECT_EQ(kept("  %3: f32[8,8] = aten::mm(%0, %1)\n  %4: f32[8,8] = aten::mm(%3, %1)\n  %5: f32[8,8] = aten::cumsum(%3, 1, none)\n"
                 "  %6: f32[8,8] = aten::mul.Tensor(%2, %5)\n  return %3, %4, %6\n",
                 {.outputs = 2, .made_of = {{5, {3, 4}}}}),
            Ids{5});
}

TEST(Partition, views_are_kept_as_what_they_look_at) {
  EXPECT_EQ(kept("  %3: f32[8,8] = aten::mm(%0, %1)\n  %4: f32[8,8]{1,8} = aten::t(%3) !view\n  %5: f32[8,8] = aten::mm(%2, %4)\n  return %3, %5\n"),
            Ids{3});
  EXPECT_EQ(kept("  %3: f32[8,8]{1,8} = aten::t(%0) !view\n  %4: f32[8,8] = aten::mm(%3, %1)\n  %5: f32[8,8] = aten::mm(%2, %3)\n  return %4, %5\n"),
            Ids{0});
}

TEST(Partition, draws_happen_once) {
  EXPECT_EQ(kept("  %3: f32[8,8] = aten::bernoulli.p(%0, 0.5, none) !random\n  %4: f32[8,8] = aten::mul.Tensor(%0, %3)\n  %5: f32[8,8] = "
                 "aten::mul.Tensor(%2, %3)\n  return %4, %5\n"),
            Ids{3});
  EXPECT_EQ(kept("  %3: f32[8,8] = aten::rand_like(%0, none, none, none, none, none) !random\n  %4: b8[8,8] = aten::gt.Scalar(%3, 0.5)\n  %5: "
                 "f32[8,8] = aten::mul.Tensor(%0, %4)\n  %6: f32[8,8] = "
                 "aten::mul.Tensor(%2, %4)\n  return %5, %6\n"),
            Ids{4});
  // a draw of the backward is its own
  EXPECT_EQ(kept("  %3: f32[8,8] = aten::sin(%0)\n  %4: f32[8,8] = aten::rand_like(%0, none, none, none, none, none) !random\n  %5: f32[8,8] = "
                 "aten::mul.Tensor(%2, %4)\n  return %3, %5\n",
                 {.in_backward = {4}}),
            Ids{0});
}

TEST(Partition, what_is_made_of_nothing_is_made_again) {
  EXPECT_EQ(kept("  %3: f32[8,8] = aten::sin(%0)\n  %4: f32[] wrapped = aten::scalar_tensor(2, f32, none, none, none)\n  %5: f32[8,8] = "
                 "aten::mul.Tensor(%2, %4)\n  return %3, %5\n"),
            Ids{4});
}

TEST(Partition, what_can_be_had_in_no_way_is_an_error) {
  EXPECT_THROW(kept("  %3: f32[8,8] = aten::sin(%0)\n  %4: f32[8,8] = aten::mul.Tensor(%2, %0)\n  return %3, %4\n", {.never = {0}}), Error);
}

TEST(Partition, a_gradient_that_needs_no_tangent) {
  EXPECT_EQ(kept("  %3: f32[8,8] = aten::mm(%0, %1)\n  %4: f32[8,8] = aten::sin(%3)\n  return %4, %3\n"), Ids{3});
}

}  // namespace
