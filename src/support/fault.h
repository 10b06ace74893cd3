// Faults that tests plant: the next time that work comes to a point of this name, it throws an InternalError there.
#pragma once
#include <atomic>
#include <string>

namespace vitrify {

// `point`: a stage of the pipeline, "schedule", "codegen", or "run" (of a plan, before it has written anything). Empty: takes back what is planted.
void plant_fault(const std::string& point);

extern std::atomic<bool> fault_is_planted;
void fall_into_fault(const std::string& point);
inline void fault_point(const char* point) {
  if (fault_is_planted.load(std::memory_order_relaxed)) [[unlikely]]
    fall_into_fault(point);
}

}  // namespace vitrify
