#include "support/options.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>

#include "support/error.h"
#include "support/hash.h"

namespace vitrify {

namespace {

std::string join(const std::vector<std::string>& l) {
  std::string out;
  for (const std::string& s : l) (out += out.empty() ? "" : ", ") += s;
  return out;
}

std::vector<std::string> split(std::string_view s) {
  std::vector<std::string> out;
  while (!s.empty()) {
    const size_t comma = s.find(',');
    std::string_view item = s.substr(0, comma);
    while (!item.empty() && item.front() == ' ') item.remove_prefix(1);
    while (!item.empty() && item.back() == ' ') item.remove_suffix(1);
    if (!item.empty()) out.emplace_back(item);
    s = comma == std::string_view::npos ? std::string_view() : s.substr(comma + 1);
  }
  return out;
}

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t next = std::min({row[j] + 1, row[j - 1] + 1, diagonal + (a[i - 1] != b[j - 1])});
      diagonal = row[j];
      row[j] = next;
    }
  }
  return row[b.size()];
}

// Names that could have been meant, nearest first; all of them when none is near.
std::string suggestion(std::string_view name, const std::vector<std::string>& valid) {
  std::vector<std::pair<size_t, std::string>> near;
  for (const std::string& v : valid) {
    const size_t d = edit_distance(name, v);
    const bool part = name.size() >= 3 && (v.find(name) != std::string::npos || name.find(v) != std::string_view::npos);
    if (part || d <= std::max<size_t>(2, v.size() / 3)) near.emplace_back(d, v);
  }
  std::sort(near.begin(), near.end());
  if (near.size() > 3) near.resize(3);
  if (near.empty()) return "valid are: " + join(valid);
  std::string out = "did you mean ";
  for (size_t i = 0; i < near.size(); ++i) out += (i == 0 ? "'" : i + 1 == near.size() ? " or '" : ", '") + near[i].second + "'";
  return out + "?";
}

template <class T>
constexpr const char* type_name() {
  if constexpr (std::is_same_v<T, bool>)
    return "bool";
  else if constexpr (std::is_same_v<T, int64_t>)
    return "int";
  else if constexpr (std::is_same_v<T, double>)
    return "float";
  else if constexpr (std::is_same_v<T, std::string>)
    return "str";
  else
    return "list of str";
}
const char* type_name(const OptionValue& v) {
  return std::visit([](const auto& x) { return type_name<std::decay_t<decltype(x)>>(); }, v);
}

std::string text(bool v) { return v ? "True" : "False"; }
std::string text(int64_t v) { return std::to_string(v); }
[[maybe_unused]] std::string text(double v) { return fmt::format("{}", v); }
std::string text(const std::string& v) { return fmt::format("\"{}\"", v); }
std::string text(const std::vector<std::string>& v) { return "[" + join(v) + "]"; }

uint64_t mix(uint64_t h, const std::string& v) { return hash_string(v, hash_mix(h, v.size())); }
uint64_t mix(uint64_t h, const std::vector<std::string>& v) {
  // Sets of names: their order says nothing.
  std::vector<std::string> sorted = v;
  std::sort(sorted.begin(), sorted.end());
  sorted.erase(std::unique(sorted.begin(), sorted.end()), sorted.end());
  h = hash_mix(h, sorted.size());
  for (const std::string& s : sorted) h = mix(h, s);
  return h;
}
[[maybe_unused]] uint64_t mix(uint64_t h, double v) { return hash_bytes(&v, sizeof v, h); }
[[maybe_unused]] uint64_t mix(uint64_t h, bool v) { return hash_mix(h, v); }
uint64_t mix(uint64_t h, int64_t v) { return hash_mix(h, static_cast<uint64_t>(v)); }

// Values an option of type str, or each item of a list, may have; empty: any.
std::vector<std::string> choices(std::string_view name) {
  if (name == "disable") return stage_names();
  if (name == "fusion") return {"default", "off"};
  if (name == "gemm") return {"auto", "onednn", "mkl", "vitrify", "aten"};
  if (name == "backend") return {"llvm", "interp"};
  if (name == "dump") return {"graph", "loops", "llvm"};
  if (name == "target") return {"native", "x86-64-v2", "x86-64-v3", "x86-64-v4"};
  return {};
}

void check_choice(std::string_view name, const std::string& v) {
  const auto valid = choices(name);
  if (!valid.empty() && std::find(valid.begin(), valid.end(), v) == valid.end())
    throw OptionError(fmt::format("option '{}' cannot be \"{}\": valid are {}", name, v, join(valid)));
}
void check(std::string_view, bool) {}
void check(std::string_view name, double v) {
  if (name == "compile_budget_s" && !(v > 0)) throw OptionError(fmt::format("option '{}' is a time above 0, got {}", name, v));
  if (name == "memory_budget" && !(v >= 0 && v <= 1)) throw OptionError(fmt::format("option '{}' is a share, from 0 to 1, got {}", name, v));
}
void check(std::string_view name, int64_t v) {
  if (v < 0) throw OptionError(fmt::format("option '{}' cannot be negative, got {}", name, v));
}
void check(std::string_view name, const std::string& v) { check_choice(name, v); }
void check(std::string_view name, const std::vector<std::string>& v) {
  for (const std::string& s : v) check_choice(name, s);
}

template <class T>
void assign(T& field, std::string_view name, const OptionValue& value) {
  const T* v = std::get_if<T>(&value);
  T converted;
  // An int is a float; one string is a list of its comma-separated items.
  if constexpr (std::is_same_v<T, double>) {
    if (auto* i = std::get_if<int64_t>(&value)) v = &(converted = static_cast<double>(*i));
  } else if constexpr (std::is_same_v<T, std::vector<std::string>>) {
    if (auto* s = std::get_if<std::string>(&value)) v = &(converted = split(*s));
  }
  if (!v) throw OptionError(fmt::format("option '{}' takes a value of type {}, got {}", name, type_name<T>(), type_name(value)));
  check(name, *v);
  field = *v;
}

[[noreturn]] void unknown(std::string_view name) {
  std::vector<std::string> names;
  for (const OptionInfo& o : option_table()) names.push_back(o.name);
  throw OptionError(fmt::format("unknown option '{}': {}", name, suggestion(name, names)));
}

}  // namespace

const std::vector<OptionInfo>& option_table() {
  static const std::vector<OptionInfo> table = [] {
    const Options defaults;
    return std::vector<OptionInfo>{
#define OPTION(name, type, def, key, help) {#name, type_name<type>(), text(defaults.name), help, key},
#include "support/options.def"
#undef OPTION
    };
  }();
  return table;
}

void set_option(Options& o, std::string_view name, const OptionValue& value) {
#define OPTION(n, type, def, key, help) \
  if (name == #n) return assign<type>(o.n, name, value);
#include "support/options.def"
#undef OPTION
  unknown(name);
}

OptionValue get_option(const Options& o, std::string_view name) {
#define OPTION(n, type, def, key, help) \
  if (name == #n) return o.n;
#include "support/options.def"
#undef OPTION
  unknown(name);
}

std::vector<std::string>& stage_names() {
  static auto* names = new std::vector<std::string>;
  return *names;
}

bool environment_flag(const char* variable) {
  const char* v = std::getenv(variable);
  std::string s = v ? v : "";
  for (char& c : s) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  for (const char* off : {"", "0", "false", "no", "off"})
    if (s == off) return false;
  for (const char* on : {"1", "true", "yes", "on"})
    if (s == on) return true;
  throw OptionError(fmt::format("environment variable {} cannot be \"{}\": valid are 1, true, yes, on, 0, false, no, off", variable, v));
}

Options Options::from_environment() {
  Options o;
  auto read = [&](const char* variable, std::string_view option) {
    const char* v = std::getenv(variable);
    if (!v || !*v) return;
    try {
      set_option(o, option, std::string(v));
    } catch (const OptionError& e) {
      throw OptionError(fmt::format("environment variable {}: {}", variable, e.what()));
    }
  };
  if (environment_flag("VITRIFY_VERIFY")) o.verify = true;
  read("VITRIFY_DISABLE", "disable");
  read("VITRIFY_DUMP", "dump");
  read("VITRIFY_DUMP_DIR", "dump_dir");
  read("VITRIFY_BACKEND", "backend");
  return o;
}

bool Options::disabled(std::string_view stage) const { return std::find(disable.begin(), disable.end(), stage) != disable.end(); }

uint64_t Options::key() const {
  uint64_t h = 0;
#define OPTION(n, type, def, in_key, help) \
  if constexpr (in_key) h = mix(hash_string(#n, h), n);
#include "support/options.def"
#undef OPTION
  return h;
}

}  // namespace vitrify
