#include "support/options.h"

#include <gtest/gtest.h>

#include <thread>

#include "support/counters.h"
#include "support/error.h"

using namespace vitrify;

namespace {

std::string message(std::string_view name, const OptionValue& v) {
  Options o;
  try {
    set_option(o, name, v);
    return "";
  } catch (const OptionError& e) {
    return e.what();
  }
}

TEST(Options, set_and_get) {
  Options o;
  set_option(o, "threads", int64_t{3});
  set_option(o, "fusion", std::string("off"));
  set_option(o, "disable", std::vector<std::string>{"cse", "dce"});
  EXPECT_EQ(o.threads, 3);
  EXPECT_EQ(std::get<std::string>(get_option(o, "fusion")), "off");
  EXPECT_TRUE(o.disabled("cse"));
  EXPECT_FALSE(o.disabled("c"));
  set_option(o, "dump", std::string("graph, llvm"));
  EXPECT_EQ(o.dump, (std::vector<std::string>{"graph", "llvm"}));
  for (const OptionInfo& i : option_table()) EXPECT_NO_THROW(set_option(o, i.name, get_option(Options(), i.name)));
}

TEST(Options, messages) {
  EXPECT_EQ(message("fusoin", true), "unknown option 'fusoin': did you mean 'fusion'?");
  EXPECT_NE(message("thread", true).find("'threads'"), std::string::npos);
  EXPECT_NE(message("qqqqqqqqqqqqqqq", true).find("valid are: recompile_limit, "), std::string::npos);
  EXPECT_EQ(message("threads", std::string("4")), "option 'threads' takes a value of type int, got str");
  EXPECT_EQ(message("threads", true), "option 'threads' takes a value of type int, got bool");
  EXPECT_EQ(message("verify", int64_t{1}), "option 'verify' takes a value of type bool, got int");
  EXPECT_EQ(message("threads", int64_t{-1}), "option 'threads' cannot be negative, got -1");
  EXPECT_EQ(message("fusion", std::string("aggressive")), "option 'fusion' cannot be \"aggressive\": valid are default, off");
  EXPECT_NE(message("compile_budget_s", 0.0), "");
  EXPECT_NE(message("backend", std::string("gcc")), "");
  EXPECT_NE(message("dump", std::vector<std::string>{"graph", "loop"}).find("valid are graph, loops, llvm"), std::string::npos);
  EXPECT_THROW(get_option(Options(), "nothing"), OptionError);
}

TEST(Options, names_to_disable_are_those_of_stages) {
  const auto before = stage_names();
  add_stage_names({"fuse", "cse"});
  EXPECT_EQ(message("disable", std::vector<std::string>{"cse"}), "");
  EXPECT_EQ(message("disable", std::vector<std::string>{"cs"}), "option 'disable' cannot be \"cs\": valid are fuse, cse");
  stage_names() = before;
}

TEST(Options, a_refused_value_changes_nothing) {
  Options o;
  EXPECT_THROW(set_option(o, "fusion", std::string("x")), OptionError);
  EXPECT_EQ(o.fusion, "default");
}

TEST(Options, key_covers_what_changes_the_output) {
  const uint64_t base = Options().key();
  for (const OptionInfo& i : option_table()) {
    Options o;
    OptionValue v = get_option(o, i.name);
    if (auto* b = std::get_if<bool>(&v)) v = !*b;
    if (auto* n = std::get_if<int64_t>(&v)) v = *n + 1;
    if (auto* d = std::get_if<double>(&v)) v = *d / 2;
    if (i.name == "gemm") v = std::string("aten");
    if (i.name == "fusion") v = std::string("off");
    if (i.name == "backend") v = std::string("interp");
    if (i.name == "target") v = std::string("x86-64-v3");
    if (i.name == "dump_dir") v = std::string("/d");
    if (i.name == "dump") v = std::vector<std::string>{"graph"};
    if (i.name == "disable") v = std::vector<std::string>{"cse"};
    set_option(o, i.name, v);
    EXPECT_EQ(o.key() != base, i.in_key) << i.name;
  }
  Options a, b;
  a.disable = {"x", "y"};
  b.disable = {"y", "x", "x"};
  EXPECT_EQ(a.key(), b.key());
}

TEST(Options, environment) {
  setenv("VITRIFY_DISABLE", "cse,dce", 1);
  setenv("VITRIFY_VERIFY", "1", 1);
  setenv("VITRIFY_BACKEND", "interp", 1);
  Options o = Options::from_environment();
  EXPECT_TRUE(o.disabled("dce"));
  EXPECT_TRUE(o.verify);
  EXPECT_EQ(o.backend, "interp");
  for (const char* on : {"1", "true", "Yes", "ON"}) {
    setenv("VITRIFY_VERIFY", on, 1);
    EXPECT_TRUE(Options::from_environment().verify) << on;
  }
  for (const char* off : {"", "0", "false", "No", "OFF"}) {
    setenv("VITRIFY_VERIFY", off, 1);
    EXPECT_FALSE(Options::from_environment().verify) << off;
  }
  setenv("VITRIFY_VERIFY", "2", 1);
  EXPECT_THROW(Options::from_environment(), OptionError);
  for (const char* v : {"VITRIFY_DISABLE", "VITRIFY_VERIFY", "VITRIFY_BACKEND"}) unsetenv(v);
  EXPECT_EQ(Options::from_environment().key(), Options().key());
}

TEST(Counters, count_from_threads) {
  counters().reset();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([] {
      for (int i = 0; i < 1000; ++i) ++counters().captures, add_stage_time("cse", 2);
    });
  for (auto& t : threads) t.join();
  EXPECT_EQ(counters().snapshot()[0], (std::pair<std::string, uint64_t>("captures", 4000)));
  EXPECT_EQ(stage_times(), (std::vector<std::pair<std::string, uint64_t>>{{"cse", 8000}}));
  counters().reset();
  reset_stage_times();
  EXPECT_EQ(counters().captures, 0u);
  EXPECT_TRUE(stage_times().empty());
}

}  // namespace
