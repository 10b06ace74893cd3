#include "support/fault.h"

#include <mutex>

#include "support/error.h"

namespace vitrify {

std::atomic<bool> fault_is_planted{false};

namespace {
std::mutex mutex;
std::string& planted() {
  static auto* p = new std::string;
  return *p;
}
}  // namespace

void plant_fault(const std::string& point) {
  std::lock_guard lock(mutex);
  planted() = point;
  fault_is_planted = !point.empty();
}

void fall_into_fault(const std::string& point) {
  std::lock_guard lock(mutex);
  if (planted() != point) return;
  planted().clear();
  fault_is_planted = false;
  VT_UNREACHABLE("a planted fault in {}", point);
}

}  // namespace vitrify
