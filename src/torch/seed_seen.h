// What others than captures see of CPU generators that are marked (seed_mark.h), and who sets their states.
#pragma once
#include <ATen/ATen.h>

namespace vitrify {

bool is_marked(const at::Generator&);
uint64_t seed_seen(const at::Generator&);     // without the mark
at::Tensor state_seen(const at::Generator&);  // without the mark

// Whether this thread has set the state of a marked generator since its capture began, as far as the language it is written in tells us.
void note_state_set(bool yes);
bool state_set_here();

}  // namespace vitrify
