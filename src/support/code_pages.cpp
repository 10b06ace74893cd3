#include "support/code_pages.h"

// With assertions, none does: a page that a debugger has written a breakpoint to would be the file's again.
#if defined(__linux__) && defined(NDEBUG)
#include <link.h>
#include <sys/mman.h>

#include <cstdint>

namespace vitrify {

namespace {

int drop(dl_phdr_info* object, size_t, void* inside) {
  const auto here = reinterpret_cast<uintptr_t>(inside);
  bool found = false;
  for (int i = 0; i < object->dlpi_phnum; ++i) {
    const auto& h = object->dlpi_phdr[i];
    found = found || (h.p_type == PT_LOAD && here - object->dlpi_addr - h.p_vaddr < h.p_memsz);
  }
  if (!found) return 0;
  const uintptr_t page = 4096;
  for (int i = 0; i < object->dlpi_phnum; ++i) {
    const auto& h = object->dlpi_phdr[i];
    if (h.p_type != PT_LOAD || (h.p_flags & PF_W)) continue;  // only what the file has too
    const uintptr_t from = (object->dlpi_addr + h.p_vaddr + page - 1) & -page, to = (object->dlpi_addr + h.p_vaddr + h.p_memsz) & -page;
    if (from < to) madvise(reinterpret_cast<void*>(from), to - from, MADV_DONTNEED);
  }
  return 1;
}

}  // namespace

void return_code_pages(const void* inside) { dl_iterate_phdr(&drop, const_cast<void*>(inside)); }

}  // namespace vitrify
#else
namespace vitrify {
void return_code_pages(const void*) {}
}  // namespace vitrify
#endif
