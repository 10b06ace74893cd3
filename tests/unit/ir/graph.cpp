#include "ir/graph.h"

#include <gtest/gtest.h>

#include "ir/node_map.h"

using namespace vitrify;
using namespace vitrify::ir;
using sym::Int;
using Outs = boost::container::small_vector<TensorType, 1>;

namespace {

TensorType f32(Dims sizes) {
  TensorType t;
  t.strides = contiguous_strides(sizes);
  t.sizes = std::move(sizes);
  return t;
}

TEST(IrType, contiguity) {
  sym::Context c;
  Int n = c.symbol(sym::SymbolKind::Size, 8, {2, 100});
  TensorType t = f32({n, 3});
  EXPECT_TRUE(t.is_contiguous());
  EXPECT_EQ(t.numel(), 3 * n);
  t.strides = {1, n};
  EXPECT_FALSE(t.is_contiguous());
  t = f32({1, 4});
  t.strides = {77, 1};
  EXPECT_TRUE(t.is_contiguous());
  t = f32({0, 4});
  t.strides = {9, 9};
  EXPECT_TRUE(t.is_contiguous());
  EXPECT_EQ(contiguous_strides({2, 0, 3}), (Dims{3, 3, 1}));
}

TEST(IrGraph, refuses_malformed_nodes) {
  Graph g, other;
  Value x = g.add_input(InputKind::Argument, "x", f32({2}));
  Value y = other.add_input(InputKind::Argument, "y", f32({2}));
  const Op* relu = g.op("aten::relu");
  EXPECT_THROW(g.append(relu, {y}, {f32({2})}), InternalError);
  EXPECT_THROW(g.append(relu, {Value{x.node, 1}}, {f32({2})}), InternalError);
  EXPECT_THROW(g.append(other.op("aten::relu"), {x}, {f32({2})}), InternalError);
  EXPECT_THROW(g.append(nullptr, {x}, {f32({2})}), InternalError);
  EXPECT_THROW(g.append(g.op("graph::input"), {Int(0)}, {f32({2})}), InternalError);
  EXPECT_THROW(g.append(relu, {OpaqueArg{0}}, {f32({2})}), InternalError);
  EXPECT_THROW(g.op("no spaces"), InternalError);
  EXPECT_THROW(g.op(""), InternalError);
  TensorType bad = f32({2});
  bad.strides.clear();
  EXPECT_THROW(g.append(relu, {x}, {bad}), InternalError);
  Node* a = g.append(relu, {x}, {f32({2})});
  Node* b = g.append(relu, {a->out()}, {f32({2})});
  EXPECT_THROW(g.insert_before(a, relu, {b->out()}, {f32({2})}), InternalError);
  EXPECT_THROW(g.insert_before(x.node, relu, {}, {f32({2})}), InternalError);
  Node* c = g.insert_before(b, relu, {a->out()}, {f32({2})});
  EXPECT_EQ(g.nodes()[2], c);
  EXPECT_THROW(g.erase(a), InternalError);
  g.erase(b);
  EXPECT_THROW(g.append(relu, {b->out()}, {f32({2})}), InternalError);
  verify(g);
}

TEST(IrGraph, survives_moves) {
  Graph g;
  Value x = g.add_input(InputKind::Argument, "x", f32({2}));
  Graph h = std::move(g);
  Node* n = h.append(h.op("aten::relu"), {x}, {f32({2})});
  h.outputs = {n->out()};
  verify(h);
}

TEST(IrGraph, replaces_in_one_sweep) {
  Graph g;
  Value x = g.add_input(InputKind::Argument, "x", f32({2}));
  const Op* relu = g.op("aten::relu");
  Value a = g.append(relu, {x}, {f32({2})})->out(), b = g.append(relu, {a}, {f32({2})})->out();
  Node* c = g.append(g.op("aten::cat"), {std::vector<Value>{b, a, Value{}}}, {f32({4})});
  g.outputs = {c->out(), b, Value{}};
  g.replace_uses({{b, a}, {a, x}});
  EXPECT_EQ(std::get<std::vector<Value>>(c->args[0]), (std::vector<Value>{x, x, {}}));
  EXPECT_EQ(g.outputs[1], x);
  g.outputs[1] = b;
  EXPECT_THROW(g.replace_uses({{b, a}, {a, b}}), InternalError);
}

TEST(IrGraph, maps_nodes_and_values) {
  Graph g;
  Value x = g.add_input(InputKind::Argument, "x", f32({2}));
  NodeSet set(g);
  ValueMap<int> map(g);
  Node* n = g.append(g.op("aten::aminmax"), {x}, {f32({}), f32({})});  // made after the set and the map
  EXPECT_FALSE(set.contains(n));
  EXPECT_TRUE(set.insert(n));
  EXPECT_FALSE(set.insert(n));
  EXPECT_TRUE(set.contains(n));
  EXPECT_FALSE(set.contains(x.node));
  EXPECT_TRUE(map.emplace(n->out(1), 5));
  EXPECT_FALSE(map.emplace(n->out(1), 6));
  map[x] = 7;
  EXPECT_FALSE(map.contains(n->out(0)));
  EXPECT_EQ(map.find(n->out(0)), nullptr);
  EXPECT_EQ(map.at(n->out(1)), 5);
  EXPECT_EQ(map.at(x), 7);
  EXPECT_THROW(map.at(n->out(0)), InternalError);
  EXPECT_EQ(map.begin()->first, n->out(1));  // in the order in which they were put
  NodeMap<int> of;
  EXPECT_EQ(of.at(n), 0);
  of[n] = 3;
  EXPECT_EQ(of.at(n), 3);
}

TEST(IrGraph, removes_what_is_dead) {
  Graph g;
  Value x = g.add_input(InputKind::Argument, "x", f32({2}));
  g.add_input(InputKind::Argument, "unused", f32({2}));
  g.add_constant(f32({2}), nullptr);
  const Op* relu = g.op("aten::relu");
  Value v = x;
  for (int i = 0; i < 100000; ++i) v = g.append(relu, {v}, {f32({2})})->out();
  g.append(g.op("aten::rand", kRandom), {v}, {f32({2})});
  EXPECT_EQ(g.remove_dead(), 1u);  // the constant; the random op keeps its chain alive
  Graph h;
  x = h.add_input(InputKind::Argument, "x", f32({2}));
  v = x;
  for (int i = 0; i < 100000; ++i) v = h.append(h.op("aten::relu"), {v}, {f32({2})})->out();
  h.append(h.op("aten::_assert", kEffect), {x}, {});
  h.outputs = {x};
  EXPECT_EQ(h.remove_dead(), 100000u);
  EXPECT_EQ(h.nodes().size(), 2u);
  EXPECT_EQ(count_uses(h)[x.node][0], 2u);
  verify(h);
  // headers added later still come first
  h.add_constant(f32({1}), nullptr);
  h.add_input(InputKind::Captured, "late", f32({1}));
  verify(h);
}

TEST(IrVerify, finds_each_broken_rule) {
  auto make = [](Graph& g) {
    Value x = g.add_input(InputKind::Argument, "x", f32({2}));
    Node* a = g.append(g.op("aten::relu"), {x}, {f32({2})});
    Node* b = g.append(g.op("aten::rand", kRandom), {a->out()}, {f32({2})});
    Node* c = g.append(g.op("aten::_print", kEffect), {x}, {f32({2})});
    g.outputs = {c->out()};
    return std::array<Node*, 3>{a, b, c};
  };
  {
    Graph g;
    auto [a, b, c] = make(g);
    verify(g);
    a->args[0] = b->out();
    EXPECT_THROW(verify(g), InternalError);
  }
  {
    Graph g, other;
    auto [a, b, c] = make(g);
    make(other);
    a->args[0] = other.inputs[0].value;
    EXPECT_THROW(verify(g), InternalError);
  }
  {
    Graph g;
    auto [a, b, c] = make(g);
    a->outs[0].strides.clear();
    EXPECT_THROW(verify(g), InternalError);
    a->outs[0] = f32({-1});
    EXPECT_THROW(verify(g), InternalError);
    Int u = g.ctx().symbol(sym::SymbolKind::Unbacked, {}, {0, 10});
    a->outs[0] = f32({u});
    verify(g);
    a->outs[0] = f32({u - 1});
    EXPECT_THROW(verify(g), InternalError);
  }
  {
    Graph g;
    auto [a, b, c] = make(g);
    g.inputs[0].value = a->out();
    EXPECT_THROW(verify(g), InternalError);
    g.inputs.clear();
    EXPECT_THROW(verify(g), InternalError);
  }
  {
    Graph g;
    auto [a, b, c] = make(g);
    g.outputs.push_back({a, 1});
    EXPECT_THROW(verify(g), InternalError);
    g.outputs.pop_back();
    b->id = a->id;
    EXPECT_THROW(verify(g), InternalError);
  }
  {
    Graph g;
    auto [a, b, c] = make(g);
    const auto before = effect_order(g);
    verify(g, &before);
    g.set_order({g.inputs[0].value.node, c, a, b});
    EXPECT_THROW(verify(g, &before), InternalError);
    EXPECT_THROW(g.set_order({g.inputs[0].value.node, b, a, c}), InternalError);
    EXPECT_THROW(g.set_order({a, b, c}), InternalError);
  }
}

}  // namespace
