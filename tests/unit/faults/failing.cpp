// The program's own operator new, which all shared objects take, and a wrapper around torch's allocator of CPU memory.
#include "failing.h"

#include <c10/core/CPUAllocator.h>
#include <link.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

namespace failing {
namespace {

std::atomic<bool> armed{false};
std::atomic<int64_t> asked{0};
int64_t due_at = 0;
Which which = Which::Memory;
Often often = Often::Once;

// Where libvitrify lies. Not the code generator: LLVM is built without exceptions and frees nothing on the way of one, so that memory which fails
// inside of it ends the process, or worse.
struct Range {
  uintptr_t begin, end;
};
Range ranges[16];
size_t range_count = 0;

int note_library(dl_phdr_info* info, size_t, void*) {
  if (!info->dlpi_name || !std::strstr(info->dlpi_name, "libvitrify.so")) return 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& h = info->dlpi_phdr[i];
    if (h.p_type == PT_LOAD && (h.p_flags & PF_X) && range_count < 16)
      ranges[range_count++] = {info->dlpi_addr + h.p_vaddr, info->dlpi_addr + h.p_vaddr + h.p_memsz};
  }
  return 0;
}

bool is_due(Which kind, const void* caller) {
  if (!armed.load(std::memory_order_relaxed) || kind != which) return false;
  if (caller) {
    const auto at = reinterpret_cast<uintptr_t>(caller);
    size_t i = 0;
    while (i < range_count && !(at >= ranges[i].begin && at < ranges[i].end)) ++i;
    if (i == range_count) return false;
  }
  const int64_t n = ++asked;
  return often == Often::Once ? n == due_at : n >= due_at;
}

class Allocator final : public c10::Allocator {
 public:
  explicit Allocator(c10::Allocator* real) : real_(real) {}
  c10::DataPtr allocate(size_t n) override {
    if (is_due(Which::Tensors, nullptr)) TORCH_CHECK(false, "a planted failure to allocate ", n, " bytes");
    return real_->allocate(n);
  }
  c10::DeleterFnPtr raw_deleter() const override { return real_->raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t n) const override { real_->copy_data(to, from, n); }

 private:
  c10::Allocator* real_;
};

void* allocate(size_t n, size_t align, const void* caller) {
  void* p = nullptr;
  if (!is_due(Which::Memory, caller)) p = align ? std::aligned_alloc(align, (n + align - 1) / align * align) : std::malloc(n ? n : 1);
  return p;
}
void* must(void* p) {
  if (!p) throw std::bad_alloc();
  return p;
}

}  // namespace

void arm(Which kind, Often how, int64_t nth) {
  static Allocator* const ours = [] {
    auto* a = new Allocator(c10::GetCPUAllocator());
    c10::SetCPUAllocator(a, 255);
    return a;
  }();
  (void)ours;
  range_count = 0;
  dl_iterate_phdr(note_library, nullptr);
  which = kind, often = how, due_at = nth, asked = 0;
  armed = true;
}

int64_t disarm() {
  armed = false;
  return asked;
}

}  // namespace failing

#define CALLER __builtin_return_address(0)
void* operator new(size_t n) { return failing::must(failing::allocate(n, 0, CALLER)); }
void* operator new[](size_t n) { return failing::must(failing::allocate(n, 0, CALLER)); }
void* operator new(size_t n, std::align_val_t a) { return failing::must(failing::allocate(n, size_t(a), CALLER)); }
void* operator new[](size_t n, std::align_val_t a) { return failing::must(failing::allocate(n, size_t(a), CALLER)); }
void* operator new(size_t n, const std::nothrow_t&) noexcept { return failing::allocate(n, 0, CALLER); }
void* operator new[](size_t n, const std::nothrow_t&) noexcept { return failing::allocate(n, 0, CALLER); }
void operator delete(void* p) noexcept { std::free(p); }
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }
void operator delete[](void* p, size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, size_t, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, size_t, std::align_val_t) noexcept { std::free(p); }
