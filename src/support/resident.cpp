#include "support/resident.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <vector>

#ifdef __GLIBC__
#include <fcntl.h>
#include <link.h>
#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

namespace vitrify {

namespace {

constexpr uintptr_t kPage = 4096;

// Of a range that nobody writes to: the pages that are still the file's. A page that was written, by relocation or a debugger's breakpoint, is
// private to this process and stays.
void drop(int pagemap, uintptr_t from, uintptr_t to) {
  constexpr uint64_t kOfFile = uint64_t{1} << 61;
  std::vector<uint64_t> pages((to - from) / kPage);
  const ssize_t read = pread(pagemap, pages.data(), pages.size() * 8, off_t(from / kPage * 8));
  pages.resize(read > 0 ? read / 8 : 0);
  for (auto i = pages.begin(); i != pages.end();) {
    const auto of_file = [](uint64_t p) { return (p & kOfFile) != 0; };
    const auto begin = std::find_if(i, pages.end(), of_file);
    i = std::find_if_not(begin, pages.end(), of_file);
    if (begin != i) madvise(reinterpret_cast<void*>(from + uintptr_t(begin - pages.begin()) * kPage), uintptr_t(i - begin) * kPage, MADV_DONTNEED);
  }
}

int drop_object(dl_phdr_info* object, size_t, void* inside) {
  const auto here = reinterpret_cast<uintptr_t>(inside);
  const auto segments = [&](auto&& visit) {
    for (int i = 0; i < object->dlpi_phnum; ++i) visit(object->dlpi_phdr[i]);
  };
  bool found = false;
  segments([&](const auto& s) { found = found || (s.p_type == PT_LOAD && here - object->dlpi_addr - s.p_vaddr < s.p_memsz); });
  if (!found) return 0;
  const int pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  if (pagemap < 0) return 1;
  segments([&](const auto& s) {
    if (!(s.p_type == PT_LOAD && !(s.p_flags & PF_W)) && s.p_type != PT_GNU_RELRO) return;
    const uintptr_t from = (object->dlpi_addr + s.p_vaddr + kPage - 1) & -kPage, to = (object->dlpi_addr + s.p_vaddr + s.p_memsz) & -kPage;
    if (from < to) drop(pagemap, from, to);
  });
  close(pagemap);
  return 1;
}

}  // namespace

void return_code_pages(const void* inside) { dl_iterate_phdr(&drop_object, const_cast<void*>(inside)); }

void return_free_memory() { malloc_trim(0); }

void return_thread_memory() {
  // Blocks that cover what is free: their pages are ours to return. Smaller than what malloc() would map, so that they come from the arena; when as
  // much as a MiB of them was not in memory, none is left that is.
  constexpr size_t kBlock = 120 << 10, kEnough = (1 << 20) / kBlock, kMost = (64 << 20) / kBlock;
  std::vector<void*> blocks;
  blocks.reserve(kMost);
  for (size_t absent = 0; absent < kEnough && blocks.size() < kMost;) {
    void* block = malloc(kBlock);
    if (!block) break;
    blocks.push_back(block);
    const uintptr_t from = (reinterpret_cast<uintptr_t>(block) + kPage - 1) & -kPage, to = (reinterpret_cast<uintptr_t>(block) + kBlock) & -kPage;
    std::array<unsigned char, kBlock / kPage> present{};
    void* pages = reinterpret_cast<void*>(from);
    if (mincore(pages, to - from, present.data())) break;
    const bool any = std::any_of(present.begin(), present.end(), [](unsigned char p) { return p & 1; });
    absent = any ? 0 : absent + 1;
    if (any) madvise(pages, to - from, MADV_DONTNEED);
  }
  for (void* block : blocks) free(block);
}

}  // namespace vitrify
#else
namespace vitrify {
void return_code_pages(const void*) {}
void return_free_memory() {}
void return_thread_memory() {}
}  // namespace vitrify
#endif
