// The machine code is made for: CPU, features and what the emitter needs to know of them.
#pragma once
#include <llvm/Target/TargetMachine.h>

#include <memory>
#include <string>

namespace vitrify::codegen::x86 {

struct Target {
  std::string cpu, features;
  bool avx512 = false;  // F, BW, DQ, VL
  bool avx2 = false;    // with FMA and F16C
  // Prefetching in hardware keeps up with eight rows read at once, and in software is in its way; stores past the caches do not hold up loads
  // (measured: Zen 4; Cascade Lake is the other kind).
  bool follows_streams = false;
  int lanes = 4;  // f32 values in the widest register
  std::string id() const { return cpu + " " + features; }
  // Contiguous masked access of elements this wide is one instruction.
  bool masked_access(size_t bytes) const { return avx512 || (avx2 && bytes >= 4); }
  bool native_gather(size_t bytes) const { return (avx512 || avx2) && bytes >= 4; }
};

// "native" or "x86-64-v2".."x86-64-v4". Throws InternalError for another name or one the host cannot run.
Target resolve_target(const std::string& name);
std::unique_ptr<llvm::TargetMachine> make_target_machine(const Target&);

}  // namespace vitrify::codegen::x86
