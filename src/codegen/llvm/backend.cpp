// The LLVM backend: kernels -> IR -> object -> memory. Kernels are split over threads, each with its own context and target machine.
#include "codegen/backend.h"

#include <llvm/Analysis/ScopedNoAliasAA.h>
#include <llvm/Analysis/TargetTransformInfo.h>
#include <llvm/ExecutionEngine/RTDyldMemoryManager.h>
#include <llvm/ExecutionEngine/RuntimeDyld.h>
#include <llvm/IR/LegacyPassManager.h>
#include <llvm/IR/Verifier.h>
#include <llvm/Object/ObjectFile.h>
#include <llvm/Support/raw_ostream.h>
#include <llvm/Target/TargetMachine.h>
#include <llvm/Transforms/InstCombine/InstCombine.h>
#include <llvm/Transforms/Scalar.h>
#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>

#include "codegen/llvm/emitter.h"
#include "codegen/llvm/instrument.h"
#include "support/budget.h"
#include "support/resident.h"

namespace vitrify::codegen::x86 {
namespace {

// One mapping per unit: written first and then made executable or read-only, never both writable and executable.
class Memory final : public llvm::RTDyldMemoryManager {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  ~Memory() override {
    if (base_) munmap(base_, total_);
  }
  bool needsToReserveAllocationSpace() override { return true; }
  void reserveAllocationSpace(uintptr_t code, llvm::Align, uintptr_t ro, llvm::Align, uintptr_t rw, llvm::Align) override {
    auto pages = [](size_t n) { return (n + 4095 + 64) & ~size_t(4095); };
    size_[0] = pages(code);
    size_[1] = pages(ro);
    size_[2] = pages(rw);
    total_ = size_[0] + size_[1] + size_[2];
    void* p = mmap(nullptr, total_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    VT_CHECK(p != MAP_FAILED, "no memory for code");
    base_ = static_cast<uint8_t*>(p);
    next_[0] = base_;
    next_[1] = next_[0] + size_[0];
    next_[2] = next_[1] + size_[1];
  }
  uint8_t* allocateCodeSection(uintptr_t n, unsigned align, unsigned, llvm::StringRef) override { return take(0, n, align); }
  uint8_t* allocateDataSection(uintptr_t n, unsigned align, unsigned, llvm::StringRef, bool read_only) override {
    return take(read_only ? 1 : 2, n, align);
  }
  bool finalizeMemory(std::string* error) override {
    bool bad = mprotect(base_, size_[0], PROT_READ | PROT_EXEC) || (size_[1] && mprotect(base_ + size_[0], size_[1], PROT_READ));
    if (bad && error) *error = "mprotect failed";
    return bad;
  }
  void registerEHFrames(uint8_t*, uint64_t, size_t) override {}
  void deregisterEHFrames() override {}

 private:
  uint8_t* take(int kind, size_t n, size_t align) {
    align = std::max<size_t>(align, 1);
    auto p = (reinterpret_cast<uintptr_t>(next_[kind]) + align - 1) & ~(align - 1);
    uint8_t* end = base_;
    for (int k = 0; k <= kind; ++k) end += size_[k];
    VT_CHECK(p + n <= reinterpret_cast<uintptr_t>(end), "sections larger than announced");
    next_[kind] = reinterpret_cast<uint8_t*>(p + n);
    return reinterpret_cast<uint8_t*>(p);
  }
  uint8_t* base_ = nullptr;
  uint8_t* next_[3] = {};
  size_t size_[3] = {}, total_ = 0;
};

class HostSymbols : public llvm::JITSymbolResolver {
 public:
  HostSymbols(VectorMath::Resolve resolve) : resolve_(resolve) {}
  void lookup(const LookupSet& names, OnResolvedFunction done) override {
    LookupResult found;
    for (auto name : names) {
      void* p = host_function(name.str());
      if (!p && resolve_) p = resolve_(name.str().c_str());
      if (!p) p = libc(name);
      if (!p) p = sanitizer_function(name);
      if (!p) return done(llvm::make_error<llvm::StringError>("generated code calls unknown symbol " + name.str(), llvm::inconvertibleErrorCode()));
      found[name] = llvm::JITEvaluatedSymbol(uint64_t(uintptr_t(p)), llvm::JITSymbolFlags::Exported);
    }
    done(std::move(found));
  }
  llvm::Expected<LookupSet> getResponsibilitySet(const LookupSet&) override { return LookupSet(); }

 private:
  // what instruction selection may call on its own
  static void* libc(llvm::StringRef n) {
    if (n == "memcpy") return reinterpret_cast<void*>(&::memcpy);
    if (n == "memset") return reinterpret_cast<void*>(&::memset);
    if (n == "memmove") return reinterpret_cast<void*>(&::memmove);
    return nullptr;
  }
  VectorMath::Resolve resolve_;
};

struct JitCode final : Compiled {
  std::vector<std::unique_ptr<Memory>> units;
};

// The legacy pass manager, as the code generator has: PassBuilder would link every pass of LLVM.
void optimize(llvm::Module& m, llvm::TargetMachine& tm) {
  llvm::legacy::FunctionPassManager fpm(&m);
  fpm.add(llvm::createTargetTransformInfoWrapperPass(tm.getTargetIRAnalysis()));
  fpm.add(llvm::createScopedNoAliasAAWrapperPass());
  fpm.add(llvm::createSROAPass(false));
  fpm.add(llvm::createEarlyCSEPass(true));
  fpm.add(llvm::createInstructionCombiningPass());
  fpm.add(llvm::createLICMPass());
  fpm.add(llvm::createCFGSimplificationPass());
  fpm.doInitialization();
  for (auto& f : m)
    if (!f.isDeclaration()) fpm.run(f);
  fpm.doFinalization();
}

class LlvmBackend final : public Backend {
 public:
  explicit LlvmBackend(VectorMath::Resolve resolve) : resolve_(resolve), native_(resolve_target("native")) {}
  std::string_view name() const override { return "llvm"; }
  std::string target_id() const override { return native_.id(); }

  std::unique_ptr<Compiled> compile(const std::vector<const loop::Kernel*>& kernels, const TargetOptions& options) override {
    Target target = options.target == "native" ? native_ : resolve_target(options.target);
    auto code = std::make_unique<JitCode>();
    code->functions.resize(kernels.size());
    if (kernels.empty()) return code;
    int threads = options.threads > 0 ? options.threads : std::max(1u, std::thread::hardware_concurrency());
    threads = std::min<int>(threads, int(kernels.size()));
    std::vector<std::string> listings(threads + 1);
    std::vector<size_t> bytes(threads + 1);
    std::vector<std::exception_ptr> errors(threads);
    std::mutex units;
    std::atomic<bool> stop{false};
    auto build_unit = [&](int thread, const std::vector<size_t>& mine) {
      auto memory = std::make_unique<Memory>();
      const size_t work =
          build(kernels, mine, target, options.verify, *memory, code->functions, options.keep_asm ? &listings[thread] : nullptr, bytes[thread]);
      {
        std::lock_guard lock(units);
        code->units.push_back(std::move(memory));
      }
      if ((thread == 0 || thread == threads) && options.spend) options.spend(work);
    };
    // What LLVM keeps for good is allocated by the caller's thread: for little else the arena of another would stay in memory.
    size_t first = 0;
    if (threads > 1)
      std::call_once(opened_, [&] {
        build_unit(threads, {0});
        first = 1;
      });
    auto work = [&](int t) {
      try {
        std::vector<size_t> mine;
        for (size_t i = first + t; i < kernels.size() && !stop; i += threads) {
          mine.push_back(i);
          if (mine.size() < kUnit && i + threads < kernels.size()) continue;
          build_unit(t, mine);
          mine.clear();
        }
      } catch (...) {
        errors[t] = std::current_exception();
        stop = true;
      }
    };
    {
      std::vector<std::jthread> pool;  // joins those that have started where one cannot be
      for (int t = 1; t < threads; ++t)
        pool.emplace_back([&work, t] {
          work(t);
          return_thread_memory();
        });
      work(0);
    }
    for (auto& e : errors)
      if (e) std::rethrow_exception(e);
    for (auto& l : listings) code->listing += l;
    for (size_t b : bytes) code->code_bytes += b;
    return code;
  }

 private:
  static constexpr size_t kUnit = 48;                // kernels that are compiled without a look at what else goes on
  static constexpr size_t kLargestKernel = 150'000;  // instructions; passes over larger ones take minutes
  static constexpr size_t kInstructionCost = 15;     // units of support/budget.h

  // Returns what it cost.
  size_t build(const std::vector<const loop::Kernel*>& kernels, const std::vector<size_t>& mine, const Target& target, bool verify, Memory& memory,
               std::vector<loop::KernelFn>& out, std::string* listing, size_t& bytes) {
    auto tm = make_target_machine(target);
    llvm::LLVMContext cx;
    llvm::Module m("kernels", cx);
    m.setDataLayout(tm->createDataLayout());
    m.setTargetTriple(tm->getTargetTriple().str());
    std::set<std::string> symbols;
    {
      // kernels may share a symbol context, which is not thread-safe; emission is a small part of the time
      static std::mutex emitting;
      std::lock_guard lock(emitting);
      for (size_t i : mine) KernelEmitter(*kernels[i], m, target, resolve_, symbols).emit("k" + std::to_string(i));
    }
    size_t instructions = 0;
    for (const llvm::Function& f : m) {
      const size_t n = f.getInstructionCount();
      if (n > kLargestKernel) throw BudgetError(fmt::format("one of its kernels would have {} instructions", n));
      instructions += n;
    }
    std::string problem;
    llvm::raw_string_ostream os(problem);
#ifndef NDEBUG
    verify = true;
#endif
    VT_CHECK(!verify || !llvm::verifyModule(m, &os), "invalid IR: {}", problem);
    optimize(m, *tm);
    instrument(m);
    if (listing) {
      llvm::raw_string_ostream text(*listing);
      m.print(text, nullptr);
    }
    llvm::SmallVector<char, 0> object;
    {
      llvm::raw_svector_ostream stream(object);
      llvm::legacy::PassManager pm;
      llvm::MCContext* mc = nullptr;
      VT_CHECK(!tm->addPassesToEmitMC(pm, mc, stream), "no object emission for this target");
      pm.run(m);
    }
    auto file = llvm::object::ObjectFile::createObjectFile(llvm::MemoryBufferRef(llvm::StringRef(object.data(), object.size()), "kernels"));
    if (!file) VT_UNREACHABLE("{}", llvm::toString(file.takeError()));
    HostSymbols host(resolve_);
    llvm::RuntimeDyld dyld(memory, host);
    dyld.loadObject(**file);
    dyld.resolveRelocations();
    VT_CHECK(!dyld.hasError(), "{}", dyld.getErrorString().str());
    std::string error;
    VT_CHECK(!memory.finalizeMemory(&error), "{}", error);
    for (size_t i : mine) {
      auto symbol = dyld.getSymbol("k" + std::to_string(i));
      VT_CHECK(symbol.getAddress(), "kernel {} was not linked", kernels[i]->name);
      out[i] = reinterpret_cast<loop::KernelFn>(symbol.getAddress());
    }
    for (auto& s : (*file)->sections())
      if (s.isText()) bytes += s.getSize();
    return instructions * kInstructionCost;
  }

  VectorMath::Resolve resolve_;
  Target native_;
  std::once_flag opened_;
};

}  // namespace
}  // namespace vitrify::codegen::x86

extern "C" __attribute__((visibility("default"))) vitrify::codegen::Backend* vitrify_make_llvm_backend(void* (*resolve)(const char*)) {
  return new vitrify::codegen::x86::LlvmBackend(resolve);
}
