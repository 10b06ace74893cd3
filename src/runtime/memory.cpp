#include "runtime/memory.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <set>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace vitrify::runtime {

namespace {

constexpr size_t kPage = 4096;

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

struct Mapping {
  void* base;
  size_t mapped;
  char* data;
};

// Huge pages make first touch five times cheaper; alignment is what lets the kernel use them. The end is a huge page where little of it is wasted.
Mapping map_pages(size_t bytes) {
  size_t want = round_up(bytes, kHugePage), mapped = want + kHugePage;
  void* base = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) throw std::bad_alloc();
  char* data = reinterpret_cast<char*>(round_up(reinterpret_cast<uintptr_t>(base), kHugePage));
  const size_t huge = want - bytes > bytes / 8 ? want - kHugePage : want;
  if (huge) madvise(data, huge, MADV_HUGEPAGE);
  return {base, mapped, data};
}

void touch(char* data, size_t bytes) {
#ifdef MADV_POPULATE_WRITE
  if (madvise(data, round_up(bytes, kPage), MADV_POPULATE_WRITE) == 0) return;
#endif
  for (size_t i = 0; i < bytes; i += kPage) static_cast<volatile char*>(data)[i] = 0;
}

}  // namespace

Arena::Arena(size_t bytes) : bytes_(bytes) {
  if (!bytes) return;
  if (bytes < kHugePage) {
    data_ = static_cast<char*>(std::aligned_alloc(kAlignment, round_up(bytes, kAlignment)));
    if (!data_) throw std::bad_alloc();
  } else {
    auto m = map_pages(bytes);
    base_ = m.base;
    mapped_ = m.mapped;
    data_ = m.data;
  }
  touch(data_, mapped_ ? bytes : 0);
}

Arena::~Arena() {
  if (mapped_)
    munmap(base_, mapped_);
  else
    std::free(data_);
}

struct ArenaPool::State {
  std::mutex mutex;
  std::vector<Arena> idle;         // the last one used is the last
  std::multiset<size_t> expected;  // bytes, one for each plan that may run
};

ArenaPool& ArenaPool::instance() {
  static ArenaPool pool;
  return pool;
}

// Never destroyed: plans may outlive static destructors.
ArenaPool::State& ArenaPool::state() const {
  static State* s = new State;
  return *s;
}

Arena ArenaPool::take(size_t bytes) {
  State& s = state();
  Arena small;  // unmapped without the lock, before another is mapped
  {
    std::lock_guard lock(s.mutex);
    for (size_t i = s.idle.size(); i-- > 0;)
      if (s.idle[i].bytes() >= bytes) {
        Arena a = std::move(s.idle[i]);
        s.idle.erase(s.idle.begin() + static_cast<std::ptrdiff_t>(i));
        return a;
      }
    if (!s.idle.empty()) {
      small = std::move(s.idle.back());
      s.idle.pop_back();
    }
  }
  small = Arena();
  return Arena(bytes);
}

void ArenaPool::give_back(Arena a) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  if (!s.expected.empty() && a.bytes() <= *s.expected.rbegin()) s.idle.push_back(std::move(a));
}

void ArenaPool::expect(size_t bytes) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  s.expected.insert(bytes);
}

void ArenaPool::forget(size_t bytes) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  s.expected.erase(s.expected.find(bytes));
  const size_t most = s.expected.empty() ? 0 : *s.expected.rbegin();
  std::erase_if(s.idle, [&](const Arena& a) { return a.bytes() > most; });
}

size_t ArenaPool::idle_bytes() const {
  std::lock_guard lock(state().mutex);
  size_t n = 0;
  for (const Arena& a : state().idle) n += a.bytes();
  return n;
}

struct BlockCache::State {
  std::mutex mutex;
  std::unordered_map<void*, std::pair<Mapping, size_t>> live;  // handed out, by address, with their rounded size
  std::unordered_map<size_t, std::vector<Mapping>> idle;
  size_t idle_bytes = 0;
};

BlockCache& BlockCache::instance() {
  static BlockCache cache;
  return cache;
}

// Never destroyed: results may outlive static destructors.
BlockCache::State& BlockCache::state() const {
  static State* s = new State;
  return *s;
}

void* BlockCache::take(size_t bytes) {
  State& s = state();
  size_t size = round_up(bytes, kPage);
  {
    std::lock_guard lock(s.mutex);
    auto it = s.idle.find(size);
    if (it != s.idle.end() && !it->second.empty()) {
      Mapping m = it->second.back();
      it->second.pop_back();
      s.idle_bytes -= size;
      s.live.emplace(m.data, std::pair(m, size));
      return m.data;
    }
  }
  Mapping m = map_pages(bytes);
  std::lock_guard lock(s.mutex);
  s.live.emplace(m.data, std::pair(m, size));
  return m.data;
}

void BlockCache::give_back(void* p) {
  State& s = state();
  Mapping m;
  {
    std::lock_guard lock(s.mutex);
    auto it = s.live.find(p);
    size_t size = 0;
    std::tie(m, size) = it->second;
    s.live.erase(it);
    if (s.idle_bytes + size <= kIdleLimit) {
      s.idle[size].push_back(m);
      s.idle_bytes += size;
      return;
    }
  }
  munmap(m.base, m.mapped);
}

size_t BlockCache::idle_bytes() const {
  std::lock_guard lock(state().mutex);
  return state().idle_bytes;
}

void BlockCache::trim() {
  State& s = state();
  std::lock_guard lock(s.mutex);
  for (auto& [size, blocks] : s.idle)
    for (Mapping& m : blocks) munmap(m.base, m.mapped);
  s.idle.clear();
  s.idle_bytes = 0;
}

}  // namespace vitrify::runtime
