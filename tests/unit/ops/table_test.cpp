// The table itself, and shape rules on facts that are easy to state. Agreement with ATen is tested from Python.
#include <gtest/gtest.h>

#include <set>

#include "ops/lowering.h"
#include "ops/shapes.h"

namespace vitrify::ops {
namespace {

using ir::Arg;

struct Shapes : testing::Test {
  ir::Graph g;
  ir::Value tensor(DType t, Dims sizes, Dims strides = {}, bool number = false) {
    ir::TensorType type = contiguous_type(t, {}, sizes);
    if (!strides.empty()) type.strides = strides;
    type.wrapped_number = number;
    return g.add_input(ir::InputKind::Argument, "x", type);
  }
  Shape shape(const char* op, std::vector<Arg> args) {
    const OpRow* row = find_op(op);
    if (!row || !row->shape) return std::nullopt;
    return row->shape(g.ctx(), args);
  }
};

TEST(Table, NamesAreUniqueAndFound) {
  std::set<std::string> names;
  for (auto* row : all_ops()) {
    EXPECT_TRUE(names.insert(row->name).second) << row->name;
    EXPECT_EQ(find_op(row->name), row);
    EXPECT_TRUE(std::string_view(row->name).starts_with("aten::") || std::string_view(row->name).starts_with("vitrify::"));
  }
  EXPECT_GT(names.size(), 350u);
  EXPECT_EQ(find_op("aten::no_such_op"), nullptr);
}

TEST(Table, ViewsAndRandomOpsAreMarked) {
  EXPECT_TRUE(find_op("aten::transpose.int")->flags & ir::kView);
  EXPECT_TRUE(find_op("aten::bernoulli")->flags & ir::kRandom);
  EXPECT_EQ(find_op("aten::bernoulli")->lower, nullptr);
  EXPECT_TRUE(find_op("aten::nonzero")->flags & ir::kDataDependent);
}

TEST(Promotion, FollowsCategories) {
  EXPECT_EQ(promote_types(DType::F16, DType::BF16), DType::F32);
  EXPECT_EQ(promote_types(DType::U8, DType::I8), DType::I16);
  EXPECT_EQ(promote_types(DType::I64, DType::F16), DType::F16);
  EXPECT_EQ(promote_types(DType::Bool, DType::U8), DType::U8);
  EXPECT_EQ(promote_types(DType::F64, DType::C64), DType::C128);
}

TEST_F(Shapes, NumbersDoNotWiden) {
  Arg x = tensor(DType::BF16, {4}), n = tensor(DType::F64, {}, {}, true), zero_d = tensor(DType::F64, {}), i = tensor(DType::I32, {4});
  EXPECT_EQ(result_type({&x, &n}), DType::BF16);
  EXPECT_EQ(result_type({&x, &zero_d}), DType::BF16);
  EXPECT_EQ(result_type({&i, &n}), DType::F32);
  EXPECT_EQ(result_type({&i, &zero_d}), DType::F64);
}

TEST_F(Shapes, ElementwiseKeepsThePermutation) {
  auto x = tensor(DType::F32, {2, 3, 4}, {12, 1, 3});
  auto r = shape("aten::add.Tensor", {x, x, Int(1)});
  ASSERT_TRUE(r);
  EXPECT_EQ((*r)[0].strides, (Dims{12, 1, 3}));
  auto row = tensor(DType::F32, {4});
  r = shape("aten::add.Tensor", {x, row, Int(1)});
  EXPECT_EQ((*r)[0].strides, (Dims{12, 1, 3}));
  // A gap in memory is not kept.
  auto gap = tensor(DType::F32, {2, 3, 4}, {24, 1, 6});
  EXPECT_EQ((*shape("aten::exp", {gap}))[0].strides, (Dims{12, 1, 3}));
}

TEST_F(Shapes, ChannelsLastSurvives) {
  auto x = tensor(DType::F32, {2, 3, 4, 4}, {48, 1, 12, 3});
  EXPECT_EQ((*shape("aten::relu", {x}))[0].strides, (Dims{48, 1, 12, 3}));
  std::vector<Int> two{2, 2}, zero{0, 0}, one{1, 1};
  auto p = shape("aten::max_pool2d_with_indices", {x, two, two, zero, one, false});
  EXPECT_EQ((*p)[0].strides, (Dims{12, 1, 6, 3}));
  EXPECT_EQ((*p)[1].dtype, DType::I64);
  auto w = tensor(DType::F32, {5, 3, 1, 1});
  auto c = shape("aten::convolution", {x, w, ir::None{}, one, zero, one, false, zero, Int(1)});
  EXPECT_EQ((*c)[0].strides, (Dims{80, 1, 20, 5}));
}

TEST_F(Shapes, SymbolicSizesStaySymbolic) {
  Int s = g.ctx().symbol(sym::SymbolKind::Size, 8, {2, 1 << 20});
  auto x = tensor(DType::F32, {s, 16});
  auto r = shape("aten::add.Tensor", {x, tensor(DType::F32, {16}), Int(1)});
  ASSERT_TRUE(r);
  EXPECT_EQ((*r)[0].sizes[0], s);
  auto v = shape("aten::view", {x, std::vector<Int>{-1}});
  ASSERT_TRUE(v);
  EXPECT_EQ((*v)[0].sizes[0], 16 * s);
  auto c = shape("aten::cat", {std::vector<ir::Value>{x, x}, Int(0)});
  EXPECT_EQ((*c)[0].sizes[0], 2 * s);
  EXPECT_EQ((*shape("aten::mm", {x, tensor(DType::F32, {16, 3})}))[0].sizes[0], s);
  EXPECT_EQ((*shape("aten::sum.dim_IntList", {x, std::vector<Int>{1}, false, ir::None{}}))[0].sizes[0], s);
  EXPECT_TRUE(g.ctx().guards().empty());
}

TEST_F(Shapes, ErrorsAreLeftToEager) {
  auto x = tensor(DType::F32, {2, 3});
  EXPECT_FALSE(shape("aten::add.Tensor", {x, tensor(DType::F32, {2, 4}), Int(1)}));
  EXPECT_FALSE(shape("aten::mm", {x, x}));
  EXPECT_FALSE(shape("aten::view", {x, std::vector<Int>{5}}));
  EXPECT_FALSE(shape("aten::sum.dim_IntList", {x, std::vector<Int>{2}, false, ir::None{}}));
  EXPECT_FALSE(shape("aten::gelu", {tensor(DType::I64, {2}), std::string("none")}));
  EXPECT_FALSE(shape("aten::amax", {tensor(DType::F32, {0}), std::vector<Int>{}, false}));
}

TEST_F(Shapes, SlicesClampAsPythonDoes) {
  auto x = tensor(DType::F32, {10, 4});
  auto size = [&](Arg start, Arg end, Int step) { return (*shape("aten::slice.Tensor", {x, Int(0), start, end, step}))[0]; };
  EXPECT_EQ(size(ir::None{}, Int(INT64_MAX), 1).sizes[0], Int(10));
  EXPECT_EQ(size(Int(-3), Int(INT64_MAX), 1).sizes[0], Int(3));
  EXPECT_EQ(size(Int(8), Int(2), 1).sizes[0], Int(0));
  EXPECT_EQ(size(Int(1), Int(100), 4).sizes[0], Int(3));
  EXPECT_EQ(size(Int(1), Int(100), 4).strides[0], Int(16));
}

}  // namespace
}  // namespace vitrify::ops
