#include "torch/seed_mark.h"

#include <ATen/CPUGeneratorImpl.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>
#include <semaphore>
#include <thread>
#include <vector>

#include "torch/seed_seen.h"

namespace vitrify {

namespace {

// The same for all captures: what a checkpoint has kept of a state in one of them it sets in that of the backward.
constexpr uint64_t kMark = 0x9e3779b97f4a7c15;

struct Entry {
  at::Generator g;
  uint64_t seed, mark;
  int captures;
};

struct Marked {
  std::mutex mutex;  // before a generator's own
  std::vector<Entry> entries;
};

Marked& marked() {
  static auto* m = new Marked;  // threads may capture while the process ends
  return *m;
}

std::atomic<std::thread::id> has_turn;

std::binary_semaphore*& turn() {  // a capture may end on another thread than it began on
  static auto* t = [] {
    pthread_atfork(nullptr, nullptr, [] {  // who had it is not in the child
      turn() = new std::binary_semaphore(1);
      has_turn = std::thread::id();
    });
    return new std::binary_semaphore(1);
  }();
  return t;
}

at::CPUGeneratorImpl& cpu(const at::Generator& g) { return *at::check_generator<at::CPUGeneratorImpl>(g); }

void set_seed(at::CPUGeneratorImpl& g, uint64_t seed) {
  at::mt19937 engine = g.engine();
  at::mt19937_data_pod data = engine.data();
  data.seed_ = seed;
  engine.set_data(data);
  g.set_engine(engine);
}

}  // namespace

void CaptureTurn::take() {
  if (mine_ || has_turn == std::this_thread::get_id()) return;
  mine_ = turn()->try_acquire_for(std::chrono::seconds(1));
  if (mine_) has_turn = std::this_thread::get_id();
}

void CaptureTurn::give_back() {
  if (!std::exchange(mine_, false)) return;
  has_turn = std::thread::id();
  turn()->release();
}

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() && std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

SeedMark::SeedMark(const at::Generator& generator) : g_(generator) {
  std::lock_guard<std::mutex> all(marked().mutex);
  std::lock_guard<std::mutex> one(g_.mutex());
  auto& entries = marked().entries;
  auto& impl = cpu(g_);
  const uint64_t seed = impl.current_seed();
  entries.reserve(entries.size() + 1);
  auto shared = std::ranges::find_if(entries, [&](const Entry& e) { return e.g == g_ && e.mark == seed; });
  if (shared != entries.end()) set_seed(impl, shared->seed);
  try {
    before_ = g_.get_state();
  } catch (...) {
    set_seed(impl, seed);
    throw;
  }
  if (shared == entries.end()) {
    shared = entries.insert(shared, {g_, seed, kMark + (seed == kMark), 0});
  }
  ++shared->captures;
  set_seed(impl, mark_ = shared->mark);
}

SeedMark::~SeedMark() {
  if (!g_.defined()) return;
  std::lock_guard<std::mutex> all(marked().mutex);
  std::lock_guard<std::mutex> one(g_.mutex());
  auto& entries = marked().entries;
  auto e = std::ranges::find_if(entries, [&](const Entry& e) { return e.g == g_ && e.mark == mark_; });
  if (--e->captures) return;
  if (cpu(g_).current_seed() == mark_) set_seed(cpu(g_), e->seed);
  entries.erase(e);
}

bool SeedMark::there() const {
  std::lock_guard<std::mutex> one(g_.mutex());
  return cpu(g_).current_seed() == mark_;
}

void SeedMark::put_back(const at::Tensor& where) const {
  std::lock_guard<std::mutex> all(marked().mutex);
  std::lock_guard<std::mutex> one(g_.mutex());
  if (where.defined() && !same_bytes(g_.get_state(), where)) return;
  g_.set_state(before_);
  set_seed(cpu(g_), mark_);
}

namespace {

thread_local std::vector<at::Generator> set_here;

// f(what is known of its mark, or null), while nobody else reads or sets it.
template <class F>
auto look_at(const at::Generator& of, F&& f) {
  at::Generator g = of;  // for its mutex
  std::lock_guard<std::mutex> all(marked().mutex);
  std::lock_guard<std::mutex> one(g.mutex());
  auto& entries = marked().entries;
  const auto e = std::ranges::find_if(entries, [&](const Entry& e) { return e.g == g && cpu(g).current_seed() == e.mark; });
  return f(cpu(g), e == entries.end() ? nullptr : &*e);
}

}  // namespace

bool is_marked(const at::Generator& of) {
  return of.device().is_cpu() && look_at(of, [](at::CPUGeneratorImpl&, const Entry* e) { return e != nullptr; });
}

uint64_t seed_seen(const at::Generator& of) {
  return look_at(of, [](at::CPUGeneratorImpl& g, const Entry* e) { return e ? e->seed : g.current_seed(); });
}

at::Tensor state_seen(const at::Generator& of) {
  return look_at(of, [&](at::CPUGeneratorImpl& g, const Entry* e) {
    struct Unmarked {
      at::CPUGeneratorImpl& g;
      const Entry* e;
      Unmarked(at::CPUGeneratorImpl& g, const Entry* e) : g(g), e(e) {
        if (e) set_seed(g, e->seed);
      }
      ~Unmarked() {
        if (e) set_seed(g, e->mark);
      }
    } unmarked(g, e);
    return of.get_state();
  });
}

void forget_states_set() { set_here.clear(); }
void note_state_set(const at::Generator& g) {
  if (!state_set_here(g)) set_here.push_back(g);
}
bool state_set_here(const at::Generator& g) { return std::ranges::find(set_here, g) != set_here.end(); }

}  // namespace vitrify
