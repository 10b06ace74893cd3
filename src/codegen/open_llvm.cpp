// Opens libvitrify_llvm.so on the first compile.
#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>

#include "codegen/backend.h"
#include "support/resident.h"

namespace vitrify::codegen {
namespace {

std::atomic<const void*> inside{nullptr};  // the code generator's library

void* resolve(const char* name) { return dlsym(RTLD_DEFAULT, name); }

Backend* open() {
  std::string reason;
  auto attempt = [&](const std::string& path) -> Backend* {
    void* lib = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!lib) {
      if (const char* e = dlerror()) reason += std::string(reason.empty() ? "" : "; ") + e;
      return nullptr;
    }
    auto make = reinterpret_cast<MakeLlvmBackend>(dlsym(lib, kMakeLlvmBackend));
    if (!make) {
      reason += path + " has no " + kMakeLlvmBackend;
      return nullptr;
    }
    inside = reinterpret_cast<const void*>(make);
    return make(&resolve);
  };
  Dl_info info;
  if (dladdr(reinterpret_cast<void*>(&resolve), &info) && info.dli_fname) {
    auto beside = std::filesystem::path(info.dli_fname).parent_path() / "libvitrify_llvm.so";
    std::error_code ec;
    if (std::filesystem::exists(beside, ec)) {
      if (Backend* b = attempt(beside.string())) return b;
    } else {
      reason = beside.string() + " does not exist";
    }
  }
  if (const char* path = std::getenv("VITRIFY_LLVM_PATH"))
    if (Backend* b = attempt(path)) return b;
  throw Error("the CPU code generator cannot be opened: " + reason);
}

}  // namespace

Backend& llvm_backend() {
  static Backend* backend = open();  // never closed: its code may run until the process ends
  return *backend;
}

void return_llvm_pages() {
  if (const void* p = inside) return_code_pages(p);
}

}  // namespace vitrify::codegen
