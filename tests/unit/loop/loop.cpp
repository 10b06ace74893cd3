#include "loop/loop.h"

#include <gtest/gtest.h>

using namespace vitrify;

namespace {

std::shared_ptr<sym::Context> context(const std::string& kinds) {
  auto c = std::make_shared<sym::Context>();
  for (char k : kinds) {
    if (k == 's') c->symbol(sym::SymbolKind::Size, 7);
    if (k == 'i') c->symbol(sym::SymbolKind::Loop);
    if (k == 'v') c->symbol(sym::SymbolKind::Indirect);
  }
  return c;
}

const char* kRows =
    R"(kernel rows(in bf16* b0 extent(s0*1024), in i64* b1 extent(s0), out f32* b2 extent(s0*1024) inplace(b0), scratch f32* b3 extent(1024); s0) outer(i1 < s0) axis(inner) fault indirect(v4 = %6):
  stage inner(i2 < 1024) acc(welford f32 -> %2 %3) acc(argmax f32 -> %4 _):
    %0 = load f32 b0[i1*1024 + i2]
    %1 = index i64 [i2]
    reduce f32 acc0 %0
    reduce f32 acc1 %0 at %1
    store f32 b3[i2] = %0
  stage inner():
    %5 = load i64 b1[i1]
    %6 = check_index i64 %5 < [s0]
    %7 = constant f32 -0.1
  stage inner(i3 < 1024):
    %8 = load f32 b3[i3]
    %9 = lt f32 %8 %2
    %10 = load f32 b0[v4*1024 + i3] mask %9 else %7
    %11 = add f32 %10 %3
    store f32 b2[i1*1024 + i3] = %11 mask %9
)";

TEST(Loop, TextRoundTrip) {
  auto ctx = context("siiiv");
  auto k = loop::parse(kRows, ctx);
  loop::verify(k);
  EXPECT_EQ(k.num_values, 12);
  EXPECT_EQ(k.stages.size(), 3u);
  EXPECT_EQ(k.stages[1].body[2].fimm, -0.1);
  std::string text = loop::print(k);
  auto again = loop::parse(text, ctx);
  EXPECT_EQ(loop::print(again), text);
  EXPECT_EQ(loop::canonical_form(k), loop::canonical_form(again));
}

TEST(Loop, ParseErrorsNameTheLine) {
  try {
    loop::parse("kernel k(in f32* b0 extent(4);) outer() axis(inner):\n  stage inner():\n    %0 = frobnicate f32 %1\n", context(""));
    FAIL();
  } catch (const InternalError& e) {
    EXPECT_NE(std::string(e.what()).find("line 3"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("frobnicate"), std::string::npos) << e.what();
  }
}

std::string broken(std::string from, std::string to) {
  std::string text = kRows;
  size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  text.replace(at, from.size(), to);
  try {
    loop::verify(loop::parse(text, context("siiiv")));
  } catch (const InternalError& e) {
    return e.what();
  }
  return "";
}

TEST(Loop, VerifierRefuses) {
  auto has = [](const std::string& s, const char* part) { return s.find(part) != std::string::npos; };
  EXPECT_EQ(broken("kernel rows", "kernel fine"), "");
  EXPECT_TRUE(has(broken("%8 = load f32 b3[i3]", "%7 = load f32 b3[i3]"), "defined twice"));
  EXPECT_TRUE(has(broken("lt f32 %8 %2", "lt f32 %0 %2"), "not in scope"));
  EXPECT_TRUE(has(broken("b3[i3]", "b3[i2]"), "not in scope"));
  EXPECT_TRUE(has(broken("lt f32 %8 %2", "lt f32 %8 %5"), "is i64"));
  EXPECT_TRUE(has(broken("store f32 b2", "store f32 b0"), "In buffer"));
  EXPECT_TRUE(has(broken("load f32 b3", "load f32 b9"), "does not exist"));
  EXPECT_TRUE(has(broken("load f32 b3", "load i32 b3"), "holds f32"));
  EXPECT_TRUE(has(broken("acc1 %0", "acc2 %0"), "accumulator 2"));
  EXPECT_TRUE(has(broken(" fault", ""), "may_fault"));
  EXPECT_TRUE(has(broken("v4 = %6", "v4 = %7"), "not i64"));
  EXPECT_TRUE(has(broken("outer(i1 < s0)", "outer()"), "no outer loops"));
  EXPECT_TRUE(has(broken("store f32 b2[i1*1024 + i3] = %11 mask %9", ""), "never stored"));
}

TEST(Loop, CanonicalFormIgnoresNamesOnly) {
  auto a = loop::parse(kRows, context("siiiv"));
  // the same with three more symbols made before, so that every number differs
  std::string text;
  for (const char* p = kRows; *p; ++p) {
    text += *p;
    bool symbol = (*p == 's' || *p == 'i' || *p == 'v') && isdigit(p[1]) && !isdigit(p[2]) && !isalnum(p[-1]);
    if (symbol) text += std::to_string(*++p - '0' + 3);
  }
  text.replace(text.find("kernel rows"), 11, "kernel othr");
  auto b = loop::parse(text, context("ssssiiiv"));
  EXPECT_EQ(loop::canonical_form(a), loop::canonical_form(b)) << loop::print(b);
  for (auto [from, to] : {std::pair<const char*, const char*>{"1024*", "512*"},
                          {"add f32", "sub f32"},
                          {"-0.1", "-0.2"},
                          {"argmax", "argmin"},
                          {"%10 %3", "%3 %10"},
                          {"inplace(b0)", ""},
                          {"axis(inner)", "axis(none)"}}) {
    std::string changed = loop::print(a);
    size_t at = changed.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    changed.replace(at, std::string(from).size(), to);
    auto c = loop::parse(changed, a.ctx);
    EXPECT_NE(loop::canonical_form(a), loop::canonical_form(c)) << from;
  }
}

TEST(Loop, ScratchIsRoundedPerBuffer) {
  auto k = loop::parse(
      "kernel k(scratch u8* b0 extent(s0), scratch f64* b1 extent(9), out f32* b2 extent(1); s0) outer() axis(none):\n  stage inner():\n    %0 = "
      "constant f32 1\n    store f32 b2[0] = %0\n",
      context("s"));
  EXPECT_EQ(loop::scratch_bytes(k, [](uint32_t) { return 65; }), 128u + 128u);
}

}  // namespace
