// Random numbers of the CPU in bulk: the numbers, and the state of the generator afterwards, are those of ATen's kernels.
#pragma once

#include <cstddef>

namespace vitrify {

// What vitrify::bernoulli and vitrify::uniform draw is what ATen draws here. Tried once; elsewhere (other hosts, builds with other generators) the
// ops of ATen stay.
bool draws_as_aten();

// Around custom ops that are called as in a forward, vitrify::set_random_state leaves the state of now and goes back to it. Where such an op raises,
// eager has gone back as well: to the first that was left since there were `first` of them on this thread.
size_t random_states_left();
void go_back_to_random_state(size_t first);

}  // namespace vitrify
