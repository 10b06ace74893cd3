// Memory of a plan: private intermediates share one arena by liveness; extern results are freed after their last use.
#pragma once
#include "runtime/plan.h"

namespace vitrify::schedule {

// Fills arena offsets (when sizes are constant), lifetimes, arena_bytes and Free steps.
void place_memory(runtime::Plan&);

}  // namespace vitrify::schedule
