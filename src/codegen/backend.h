// What the pipeline asks of a code generator. The LLVM backend lives in libvitrify_llvm.so, opened on the first compile;
// src/codegen/interp runs the loop IR directly and is the oracle.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "loop/loop.h"

namespace vitrify::codegen {

struct TargetOptions {
  std::string target = "native";        // "native", "x86-64-v2", "x86-64-v3", "x86-64-v4"
  int threads = 0;                      // compile threads; 0: all cores
  bool keep_asm = false;                // fill Compiled::listing
  bool verify = false;                  // verify what is given to the code generator
  std::function<void(uint64_t)> spend;  // called now and then by the thread that compiles, with the work since; may throw
};

// Owns the code: functions stay valid while it lives.
struct Compiled {
  std::vector<loop::KernelFn> functions;  // by kernel, in order
  std::string listing;                    // IR text, when asked for
  size_t code_bytes = 0;
  virtual ~Compiled() = default;
};

struct Backend {
  virtual ~Backend() = default;
  virtual std::string_view name() const = 0;  // "llvm", "interp"
  virtual std::string target_id() const = 0;  // cpu and features: enters cache keys
  // Kernels are distinct (already deduplicated). Throws InternalError.
  virtual std::unique_ptr<Compiled> compile(const std::vector<const loop::Kernel*>&, const TargetOptions&) = 0;
};

Backend& interp_backend();
// Opens libvitrify_llvm.so beside this library on first use (thread-safe). Throws Error with the reason when it cannot.
Backend& llvm_backend();
// Its code leaves memory (support/resident.h), if it was ever opened.
void return_llvm_pages();

// Symbol exported by libvitrify_llvm.so. `resolve` returns the address of a symbol of the host process (vector math of libtorch), or null.
extern "C" using MakeLlvmBackend = Backend * (*)(void* (*resolve)(const char*));
constexpr const char* kMakeLlvmBackend = "vitrify_make_llvm_backend";

}  // namespace vitrify::codegen
