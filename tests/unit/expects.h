// What every C++ test of the door is held to, as Python's are (tests/expects.py): it launches kernels of ours, and no call runs eagerly that the test
// has not announced.
#pragma once
#include <string>

namespace expects {

void eager(const std::string& part);      // of the reason that the engine gives; some call must run eagerly for it
void no_kernels(const std::string& why);  // nothing launches one

}  // namespace expects
