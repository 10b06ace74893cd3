// Hooks on saved tensors that are on in this thread.
#pragma once

namespace vitrify {

// Whether they may give back something else than they are given. Python knows what they are; without it they are nobody's.
bool saved_hooks_may_change();
// Whether they are a checkpoint's: they give back what its function saves when it is called again, by number.
bool saved_hooks_compute_again();
void ask_saved_hooks(bool (*may_change)(), bool (*compute_again)());

}  // namespace vitrify
