// The one place that makes threads work together: torch's OpenMP team. What that does to hand over work is invisible to the thread sanitizer, which
// would call every region a race or, told not to, none: in its builds a team is made of threads that it knows, and is one even where torch's own
// regions are none (OMP_NUM_THREADS=1).
#pragma once

#include <ATen/Parallel.h>
#include <omp.h>

#ifdef __SANITIZE_THREAD__
#include <barrier>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>
#endif

namespace vitrify {

#ifdef __SANITIZE_THREAD__

inline thread_local std::barrier<>* barrier_of_team = nullptr;

inline int64_t team_size() { return at::in_parallel_region() || barrier_of_team ? 1 : 4; }

template <class F>
void on_team(int64_t threads, F&& body) {
  std::barrier<> barrier(threads);
  auto member = [&](int64_t me) {
    barrier_of_team = &barrier;
    body(me, threads);
    barrier_of_team = nullptr;
  };
  std::vector<std::thread> others;
  for (int64_t me = 1; me < threads; ++me) others.emplace_back(member, me);
  member(0);
  for (std::thread& t : others) t.join();
}

inline void wait_for_team() { barrier_of_team->arrive_and_wait(); }

template <class F>
void for_parts(int64_t parts, F&& body) {
  const int64_t threads = std::min<int64_t>(parts, team_size());
  if (threads < 2) {
    for (int64_t p = 0; p < parts; ++p) body(p);
    return;
  }
  std::exception_ptr failure;
  std::mutex failing;
  on_team(threads, [&](int64_t me, int64_t team) {
    try {
      for (int64_t p = me; p < parts; p += team) body(p);
    } catch (...) {
      std::lock_guard lock(failing);
      failure = std::current_exception();
    }
  });
  if (failure) std::rethrow_exception(failure);
}

#else

// How many threads may work for the caller.
inline int64_t team_size() { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

// body(me, size) on a team of up to `threads`, of which the caller is number 0. It throws nothing.
template <class F>
void on_team(int64_t threads, F&& body) {
#pragma omp parallel num_threads(static_cast<int>(threads))
  body(static_cast<int64_t>(omp_get_thread_num()), static_cast<int64_t>(omp_get_num_threads()));  // the runtime may give fewer than asked for
}

// Waits for all of the team that the caller's body runs in.
inline void wait_for_team() {
#pragma omp barrier
}

// body(part) for each of [0, parts).
template <class F>
void for_parts(int64_t parts, F&& body) {
  at::parallel_for(0, parts, 1, [&](int64_t part, int64_t end) {
    for (; part < end; ++part) body(part);
  });
}

#endif

// Whether check() is true on one of the threads that torch's libraries compute on: always OpenMP's.
template <class F>
bool on_any_library_thread(int64_t threads, F&& check) {
  bool any = false;
#pragma omp parallel num_threads(static_cast<int>(threads)) reduction(|| : any)
  any = check() || any;
  return any;
}

}  // namespace vitrify
