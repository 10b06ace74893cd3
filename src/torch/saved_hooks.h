// Hooks on saved tensors that are on in this thread.
#pragma once

namespace vitrify {

// Whether they may give back something else than they are given. Python knows what they are; without it they are nobody's.
bool saved_hooks_may_change();
void ask_saved_hooks(bool (*may_change)());

}  // namespace vitrify
