#include "codegen/llvm/target.h"

#include <llvm/ADT/StringMap.h>
#include <llvm/MC/TargetRegistry.h>
#include <llvm/Support/CommandLine.h>
#include <llvm/Support/TargetSelect.h>
#include <llvm/TargetParser/Host.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "support/error.h"

namespace vitrify::codegen::x86 {

Target resolve_target(const std::string& name) {
  Target t;
  llvm::StringMap<bool> host = llvm::sys::getHostCPUFeatures();
  auto has = [&](const char* f) {
    auto it = host.find(f);
    return it != host.end() && it->second;
  };
  bool host512 = has("avx512f") && has("avx512bw") && has("avx512dq") && has("avx512vl");
  bool host2 = has("avx2") && has("fma") && has("f16c");
  if (name == "native" || name.empty()) {
    t.cpu = llvm::sys::getHostCPUName().str();
    // LLVM 19 turns a masked comparison of halves around when it reads an operand from the stack, and keeps its predicate (llvm/llvm-project#159723).
    host["avx512fp16"] = false;
    std::vector<std::string> on;
    for (auto& f : host) on.push_back((f.second ? "+" : "-") + f.first().str());
    std::sort(on.begin(), on.end());
    for (auto& f : on) t.features += (t.features.empty() ? "" : ",") + f;
    t.avx512 = host512;
    t.avx2 = host2;
    t.follows_streams = t.cpu.starts_with("znver");
  } else if (name == "x86-64-v4") {
    VT_CHECK(host512, "this CPU has no AVX-512");
    t.cpu = name;
    t.avx512 = t.avx2 = true;
  } else if (name == "x86-64-v3") {
    VT_CHECK(host2, "this CPU has no AVX2");
    t.cpu = name;
    t.avx2 = t.follows_streams = true;  // the kind that most makers' are; also, tests on any machine run both
  } else {
    VT_CHECK(name == "x86-64-v2", "unknown target '{}'", name);
    t.cpu = name;
  }
  t.lanes = t.avx512 ? 16 : t.avx2 ? 8 : 4;
  return t;
}

namespace {
// LLVM's schedulers compare each access to memory with up to a thousand before it, and each edge they find with a node's others: a block of hundreds
// of stores takes longer than all else.
void compare_fewer_accesses() {
  auto& options = llvm::cl::getRegisteredOptions();
  const auto at = options.find("dag-maps-huge-region");
  VT_CHECK(at != options.end() && !at->second->addOccurrence(0, at->first(), "128"), "LLVM's schedulers have no such limit");
}
}  // namespace

std::unique_ptr<llvm::TargetMachine> make_target_machine(const Target& t) {
  static std::once_flag once;
  std::call_once(once, [] {
    llvm::InitializeNativeTarget();
    llvm::InitializeNativeTargetAsmPrinter();
    compare_fewer_accesses();
  });
  std::string triple = llvm::sys::getProcessTriple(), error;
  const llvm::Target* target = llvm::TargetRegistry::lookupTarget(triple, error);
  VT_CHECK(target, "{}", error);
  llvm::TargetOptions options;
  std::unique_ptr<llvm::TargetMachine> tm(target->createTargetMachine(triple, t.cpu, t.features, options, llvm::Reloc::PIC_, llvm::CodeModel::Small,
                                                                      llvm::CodeGenOptLevel::Default, true));
  VT_CHECK(tm, "no target machine for {}", triple);
  return tm;
}

}  // namespace vitrify::codegen::x86
