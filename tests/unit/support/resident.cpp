#include "support/resident.h"

#include <gtest/gtest.h>

#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace vitrify {
namespace {

// KiB of this program's code that are in memory.
int64_t resident_code() {
  std::ifstream maps("/proc/self/smaps");
  std::string line, name = testing::internal::GetArgvs()[0];
  name = name.substr(name.rfind('/') + 1);
  int64_t kib = 0;
  bool code = false;
  while (std::getline(maps, line)) {
    if (line.find("-") < line.find(" ")) code = line.find(" r-xp ") != std::string::npos && line.ends_with("/" + name);
    if (code && line.starts_with("Rss:")) kib += std::stoll(line.substr(4));
  }
  return kib;
}

TEST(Resident, CodePagesLeaveAndComeBack) {
  const int64_t before = resident_code();
  ASSERT_GT(before, 0);
  return_code_pages(reinterpret_cast<const void*>(&resident_code));
  EXPECT_LT(resident_code(), before);  // counting brought some back
  return_code_pages(&before);          // on the stack: of no file
}

// KiB of this process that are in memory.
int64_t resident() {
  std::ifstream status("/proc/self/status");
  std::string line;
  while (std::getline(status, line))
    if (line.starts_with("VmRSS:")) return std::stoll(line.substr(6));
  return 0;
}

TEST(Resident, MemoryOfAThreadLeaves) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer's malloc() is not glibc's";
#endif
  // Where large blocks come and go, glibc keeps as much as twice their size at the end of each arena.
  for (volatile char* large : {new char[24 << 20]}) {
    large[0] = 1;
    delete[] large;
  }
  int64_t full = 0, returned = 0;
  std::thread([&] {
    std::vector<std::unique_ptr<char[]>> blocks(16384);
    for (auto& b : blocks) {
      b = std::make_unique<char[]>(1024);
      b[512] = 1;
    }
    blocks.clear();
    full = resident();
    return_free_memory();
    EXPECT_GT(resident(), full - 1024);  // not enough
    return_thread_memory();
    returned = resident();
  }).join();
  EXPECT_LT(returned, full - 12 * 1024);
}

}  // namespace
}  // namespace vitrify
