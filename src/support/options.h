// Options of one compile, from the table options.def. Environment variables are read once, in from_environment().
#pragma once
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace vitrify {

struct Options {
#define OPTION(name, type, def, key, help) type name = def;
#include "support/options.def"
#undef OPTION
  static Options from_environment();  // VITRIFY_DISABLE, VITRIFY_DUMP, VITRIFY_DUMP_DIR, VITRIFY_VERIFY, VITRIFY_BACKEND
  bool disabled(std::string_view stage) const;
  uint64_t key() const;  // hash of the options that change the output
};

using OptionValue = std::variant<bool, int64_t, double, std::string, std::vector<std::string>>;
struct OptionInfo {
  std::string name, type, default_text, help;
  bool in_key;
};
const std::vector<OptionInfo>& option_table();
// Throws OptionError naming the option and the nearest valid names (or the type expected).
void set_option(Options&, std::string_view name, const OptionValue&);
OptionValue get_option(const Options&, std::string_view name);

// What `disable` may name: each list of stages adds its own while the process starts.
std::vector<std::string>& stage_names();
inline bool add_stage_names(std::initializer_list<const char*> names) {
  return stage_names().insert(stage_names().end(), names.begin(), names.end()), true;
}
// A variable that is on or off. Throws OptionError for anything else.
bool environment_flag(const char* variable);

}  // namespace vitrify
