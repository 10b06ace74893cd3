#include "torch/process_state.h"

#include <ATen/Context.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace vitrify {

uint64_t library_state() {
  at::Context& c = at::globalContext();
  uint64_t state = 0;
  for (bool b :
       {c.userEnabledMkldnn(), c.deterministicMkldnn(), c.userEnabledNNPACK(), c.deterministicAlgorithms(), c.deterministicAlgorithmsWarnOnly(),
        c.deterministicFillUninitializedMemory(), c.userEnabledFlashSDP(), c.userEnabledMemEfficientSDP(), c.userEnabledMathSDP(),
        c.userEnabledOverrideableSDP(), c.allowFP16BF16ReductionMathSDP(), c.allowFP16ReductionCPU()})
    state = state << 1 | static_cast<uint64_t>(b);
#if defined(__x86_64__)
  constexpr unsigned kDenormalsAreZero = 1 << 6, kFlushToZero = 1 << 15;  // they change frozen values
  const unsigned control = _mm_getcsr();
  state = state << 2 | static_cast<uint64_t>((control & kFlushToZero) != 0) << 1 | static_cast<uint64_t>((control & kDenormalsAreZero) != 0);
#endif
  for (at::SDPBackend b : c.sDPPriorityOrder()) state = state * 8 + (static_cast<uint64_t>(b) & 7);
  return state;
}

}  // namespace vitrify
