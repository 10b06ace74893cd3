// Why calls ran eagerly, and what the counters have counted since the process began. No reset touches either: tests look here for what they did not
// expect.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace vitrify {

// One event: a call, or a signature, that eager runs. Not what raises in eager too: that has nothing to run.
void note_eager(std::string_view why);
std::map<std::string, uint64_t> eager_reasons();
std::vector<std::pair<std::string, uint64_t>> lifetime_counters();

}  // namespace vitrify
