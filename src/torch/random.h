// Random numbers of the CPU in bulk: the numbers, and the state of the generator afterwards, are those of ATen's kernels.
#pragma once

namespace vitrify {

// What vitrify::bernoulli and vitrify::uniform draw is what ATen draws here. Tried once; elsewhere (other hosts, builds with other generators) the
// ops of ATen stay.
bool draws_as_aten();

}  // namespace vitrify
