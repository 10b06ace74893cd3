// What others than captures see of CPU generators that are marked (seed_mark.h), and who sets their states.
#pragma once
#include <ATen/ATen.h>

namespace vitrify {

bool is_marked(const at::Generator&);
uint64_t seed_seen(const at::Generator&);     // without the mark
at::Tensor state_seen(const at::Generator&);  // without the mark

// Of which generators this thread has set the state since its capture began, as far as the language it is written in tells us.
void forget_states_set();
void note_state_set(const at::Generator&);
bool state_set_here(const at::Generator&);

}  // namespace vitrify
