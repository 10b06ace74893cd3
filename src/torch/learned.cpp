#include "torch/learned.h"

#include <fmt/ranges.h>

#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <tuple>

namespace vitrify::capture {
namespace {

std::mutex mutex;
std::atomic<bool> any{false};
std::map<std::string, std::map<uint32_t, ir::TensorType>>& table() {
  static std::map<std::string, std::map<uint32_t, ir::TensorType>> t;
  return t;
}

std::set<std::tuple<std::string, uint32_t, Given>>& given() {
  static std::set<std::tuple<std::string, uint32_t, Given>> g;
  return g;
}

struct KeyWriter {
  std::string out;
  bool exact = true;

  void add(sym::Int i) {
    exact = exact && i.is_const();
    if (i.is_const()) fmt::format_to(std::back_inserter(out), "{},", i.value());
  }
  void add(const ir::Value& v) {
    if (!v) {
      out += "-;";
      return;
    }
    const ir::TensorType& t = v.type();
    fmt::format_to(std::back_inserter(out), "{}{}[", static_cast<int>(t.dtype), t.wrapped_number ? "w" : "");
    for (auto s : t.sizes) add(s);
    out += '/';
    for (auto s : t.strides) add(s);
    out += "];";
  }
  void add(double d) { fmt::format_to(std::back_inserter(out), "{},", d); }
  void add(bool b) { out += b ? "t," : "f,"; }
  void add(const std::string& s) { out += s + ","; }
  void add(const ir::Complex& c) { fmt::format_to(std::back_inserter(out), "{}+{}i,", c.re, c.im); }
  void add(ir::None) { out += "n"; }
  void add(DType t) { fmt::format_to(std::back_inserter(out), "{},", static_cast<int>(t)); }
  void add(Device d) { fmt::format_to(std::back_inserter(out), "{}:{},", static_cast<int>(d.kind), static_cast<int>(d.index)); }
  void add(ir::MemoryFormat f) { fmt::format_to(std::back_inserter(out), "{},", static_cast<int>(f)); }
  void add(ir::Layout l) { fmt::format_to(std::back_inserter(out), "{},", static_cast<int>(l)); }
  void add(ir::OpaqueArg) { exact = false; }
  template <class T>
  void add(const std::vector<T>& l) {
    for (const auto& x : l) add(static_cast<const T&>(x));
    out += ']';
  }
};

}  // namespace

std::string call_key(const std::string& op, std::span<const ir::Arg> args) {
  KeyWriter w;
  w.out = op + "(";
  for (const ir::Arg& a : args) {
    fmt::format_to(std::back_inserter(w.out), "{}:", a.index());
    std::visit([&](const auto& x) { w.add(x); }, a);
  }
  return w.exact ? w.out : std::string();
}

void learn(const std::string& key, uint32_t result, const ir::TensorType& type) {
  if (key.empty()) return;
  std::lock_guard lock(mutex);
  table()[key][result] = type;
  any = true;
}

void apply_learned(const std::string& op, std::span<const ir::Arg> args, std::span<ir::TensorType> outs) {
  if (!any) return;
  const std::string key = call_key(op, args);
  std::lock_guard lock(mutex);
  auto it = table().find(key);
  if (it == table().end()) return;
  for (auto& [i, type] : it->second)
    if (i < outs.size()) outs[i] = type;
}

void learn(const std::string& op, uint32_t result, Given what) {
  std::lock_guard lock(mutex);
  given().emplace(op, result, what);
}

bool is_known(const std::string& op, uint32_t result, Given what) {
  std::lock_guard lock(mutex);
  return given().contains({op, result, what});
}

}  // namespace vitrify::capture
