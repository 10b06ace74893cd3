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
        c.userEnabledOverrideableSDP(), c.allowFP16BF16ReductionMathSDP(), c.allowFP16ReductionCPU(),
        // what computes nothing on a CPU, but programs may ask for it
        c.userEnabledCuDNN(), c.benchmarkCuDNN(), c.deterministicCuDNN(), c.userEnabledCuDNNSDP(), c10::WarningUtils::get_warnAlways()})
    state = state << 1 | static_cast<uint64_t>(b);
  using Backend = at::Float32Backend;
  using Op = at::Float32Op;
  for (auto [backend, op] : {std::pair(Backend::MKLDNN, Op::MATMUL), std::pair(Backend::MKLDNN, Op::CONV), std::pair(Backend::CUDA, Op::MATMUL)})
    state = state << 2 | static_cast<uint64_t>(c.float32Precision(backend, op));
#if defined(__x86_64__)
  constexpr unsigned kDenormalsAreZero = 1 << 6, kFlushToZero = 1 << 15;  // they change frozen values
  const unsigned control = _mm_getcsr();
  state = state << 2 | static_cast<uint64_t>((control & kFlushToZero) != 0) << 1 | static_cast<uint64_t>((control & kDenormalsAreZero) != 0);
#endif
  for (at::SDPBackend b : c.sDPPriorityOrder()) state = state * 8 + (static_cast<uint64_t>(b) & 7);
  return state;
}

}  // namespace vitrify
