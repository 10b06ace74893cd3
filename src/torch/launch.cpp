// Kernels of a plan run, on the threads that there are.
#include <algorithm>
#include <atomic>
#include <exception>

#include "torch/compiled.h"
#include "torch/executor.h"
#include "torch/team.h"

namespace vitrify {

namespace {

// Kernels write whole lines: chunk borders between threads fall on multiples of this.
constexpr int64_t kChunkMultiple = 16;

// How a launch is cut for at most `limit` threads.
struct Cut {
  int64_t threads, chunk;
};
Cut cut(int64_t n, int64_t grain, int64_t limit) {
  const int64_t threads = std::clamp<int64_t>(n / std::max<int64_t>(grain, 1), 1, limit);
  int64_t chunk = (n + threads - 1) / threads;
  if (threads > 1 && chunk >= 8 * kChunkMultiple) chunk = (chunk + kChunkMultiple - 1) / kChunkMultiple * kChunkMultiple;
  return {threads, std::max<int64_t>(chunk, 1)};
}

[[noreturn]] void raise_fault(int32_t fault) {
  switch (static_cast<KernelFault>(fault)) {
    case KernelFault::IndexOutOfRange:
      throw IndexFault({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, "index out of range in self");
    case KernelFault::DivisionByZero:
      throw DivisionFault({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, "ZeroDivisionError");
    case KernelFault::None:
      break;
  }
  VT_UNREACHABLE("fault {}", fault);
}

}  // namespace

void PlanRun::run_launch(Frame& f, uint32_t i) {
  const runtime::Launch& l = plan_->launches[i];
  LaunchState& s = f.launches[i];
  const runtime::KernelRef& k = plan_->kernels[l.kernel];
  if (late_ && !s.ready) {
    start_late(f, l.slots);
    VT_CHECK(prepare_launch(f, i, false), "sizes of a launch are unknown");
  }
  if (s.iterations == 0) return;
  const int64_t limit = team_size();
  reserve_scratch(limit);
  const Cut c = cut(s.iterations, l.grain, limit);
  if (c.threads == 1) {
    run_chunk(f, i, 0, 0, s.iterations);
  } else {
    on_team(c.threads, [&](int64_t me, int64_t team) {
      for (int64_t t = me; t * c.chunk < s.iterations; t += team)
        run_chunk(f, i, static_cast<int>(me), t * c.chunk, std::min(s.iterations, (t + 1) * c.chunk));
    });
  }
  if (k.may_fault && fault_ != 0) raise_fault(std::exchange(fault_, 0));
}

void PlanRun::reserve_scratch(int64_t threads) {
  if (scratch_stride_ == 0 || static_cast<size_t>(threads) <= scratch_threads_) return;
  scratch_threads_ = static_cast<size_t>(threads);
  scratch_ = runtime::Arena(scratch_threads_ * scratch_stride_);
}

// Iterations [b, e) of a launch, on one thread.
void PlanRun::run_chunk(Frame& f, uint32_t i, int thread, int64_t b, int64_t e) {
  const runtime::Launch& l = plan_->launches[i];
  LaunchState& s = f.launches[i];
  const runtime::KernelRef& k = plan_->kernels[l.kernel];
  if (!k.scratch_bytes) return k.fn(s.args.data(), s.sizes.data(), b, e);
  const size_t at = l.slots.size() + k.may_fault;
  // The thread's arguments lie behind its scratch: nothing may fail here, inside of a parallel region.
  char* scratch = scratch_.data() + static_cast<size_t>(thread) * scratch_stride_;
  void** args = reinterpret_cast<void**>(scratch + scratch_stride_ - arguments_bytes(l));
  std::copy_n(s.args.data(), at, args);
  args[at] = scratch;
  k.fn(args, s.sizes.data(), b, e);
}

// Consecutive launches in one parallel region, with a barrier before each that waits: the team is woken once. False when they are better run one by
// one.
bool PlanRun::run_together(Frame& f, size_t step, size_t count, std::vector<at::Tensor>* owned) {
  const int64_t limit = team_size();
  if (limit == 1) return false;
  int64_t threads = 1, shared = 0;
  double together = 0, most = 0;  // threads that launches between barriers are worth
  for (size_t k = step; k < step + count; ++k) {
    const uint32_t i = plan_->steps[k].index;
    const int64_t n = f.launches[i].iterations, grain = std::max<int64_t>(plan_->launches[i].grain, 1);
    const int64_t t = cut(n, grain, limit).threads;
    threads = std::max(threads, t);
    shared += t > 1;
    if (waits_[k]) together = 0;
    together += static_cast<double>(n) / static_cast<double>(grain);
    most = std::max(most, together);
  }
  if (shared < 2 && most < 2) return false;
  threads = std::max(threads, std::min(limit, static_cast<int64_t>(most)));
  reserve_scratch(limit);
  // Between two barriers the caller's thread makes the results of what follows, and gives back what has been read for the last time.
  size_t begun = step, ended = step;
  std::exception_ptr failure;  // none may leave the region
  std::atomic<size_t> failed_at{step};
  auto begin_until_next_wait = [&] {
    do begin_step(f, begun++);
    while (begun < step + count && !waits_[begun]);
  };
  auto end_until = [&](size_t k) {
    while (ended < k) end_step(ended++, owned);
  };
  begin_until_next_wait();
  on_team(threads, [&](int64_t me, int64_t team) {
    int64_t first = 0;  // whose turn it is: small launches go round
    for (size_t k = step; k < step + count; ++k) {
      if (waits_[k] && k > step) {
        if (me == 0) {
          try {
            begin_until_next_wait();
          } catch (...) {
            failure = std::current_exception();
            failed_at = k;
          }
        }
        wait_for_team();
        if (failed_at == k) break;
        if (me == 0) end_until(k);
      }
      const uint32_t i = plan_->steps[k].index;
      const int64_t n = f.launches[i].iterations;
      const Cut c = cut(n, plan_->launches[i].grain, threads);
      for (int64_t t = (me + team - first) % team; t * c.chunk < n; t += team)
        run_chunk(f, i, static_cast<int>(me), t * c.chunk, std::min(n, (t + 1) * c.chunk));
      first = (first + (n + c.chunk - 1) / c.chunk) % team;
    }
  });
  if (failure) std::rethrow_exception(failure);
  if (fault_ != 0) raise_fault(std::exchange(fault_, 0));
  end_until(step + count);
  return true;
}

}  // namespace vitrify
