// Runs loop IR as written, one element at a time. Every access is checked against the buffer's extent.
#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <mutex>
#include <utility>

#include "codegen/backend.h"
#include "codegen/interp/value.h"

namespace vitrify::codegen {
namespace {

using interp::Scalar;
using loop::AccumKind;
using loop::Instr;
using loop::Op;
using sym::Int;

struct Accumulator {
  double sum = 0, product = 1;  // of floats, in double whatever the type
  int64_t isum = 0, iproduct = 1;
  Scalar best;
  int64_t best_index = 0;
  bool any = false, all = true, seen = false;
  std::vector<double> elements;  // Welford: two passes at the end
};

class Run {
 public:
  Run(const loop::Kernel& k, void* const* bufs, const int64_t* sizes) : k_(k), values_(k.num_values), types_(k.num_values, DType::F32) {
    symbols_.resize(k.ctx ? k.ctx->num_symbols() : 0);
    for (size_t i = 0; i < k.sizes.size(); ++i) set(k.sizes[i], sizes[i]);
    for (auto& [s, id] : k.indirect) indirect_.emplace_back(id_of(s), id);
    size_t next = 0;
    buffers_.resize(k.buffers.size());
    for (size_t i = 0; i < k.buffers.size(); ++i) {
      if (k.buffers[i].kind != loop::BufferKind::Scratch) buffers_[i] = bufs[next++];
      extents_.push_back(eval(k.buffers[i].extent));
    }
    if (k.may_fault) fault_ = static_cast<int32_t*>(bufs[next++]);
    char* scratch = nullptr;
    for (size_t i = 0; i < k.buffers.size(); ++i) {
      if (k.buffers[i].kind != loop::BufferKind::Scratch) continue;
      if (!scratch) scratch = static_cast<char*>(bufs[next]);
      buffers_[i] = scratch;
      scratch += (size_t(extents_[i]) * size_of(k.buffers[i].dtype) + 63) & ~size_t(63);
    }
  }

  void run(int64_t begin, int64_t end) try {
    bool flat = k_.outer.empty();
    for (int64_t o = begin; o < end; ++o) {
      if (flat) {
        locate(k_.stages[0].inner, o);
        body(k_.stages[0], nullptr);
      } else {
        locate(k_.outer, o);
        for (auto& s : k_.stages) stage(s);
      }
    }
  } catch (const Left&) {
  }

 private:
  struct Left {};  // by a fault after which there is no element to go on with
  static uint32_t id_of(Int s) { return sym::view(s).symbol->id; }
  void set(Int s, int64_t v) {
    if (id_of(s) >= symbols_.size()) symbols_.resize(id_of(s) + 1);
    symbols_[id_of(s)] = v;
  }
  int64_t eval(Int e) const {
    if (e.is_const()) return e.value();
    return sym::eval(e, [&](uint32_t id) {
      for (auto& [s, v] : indirect_)
        if (s == id) return values_[v].i;
      VT_CHECK(id < symbols_.size(), "symbol without a value");
      return symbols_[id];
    });
  }
  template <class Loops>
  void locate(const Loops& loops, int64_t flat) {
    for (size_t d = loops.size(); d-- > 0;) {
      int64_t n = eval(loops[d].extent);
      set(loops[d].var, flat % n);
      flat /= n;
    }
  }
  void stage(const loop::Stage& s) {
    std::vector<Accumulator> acc(s.accums.size());
    nest(s, 0, acc.data());
    for (size_t i = 0; i < acc.size(); ++i) finish(s.accums[i], acc[i]);
  }
  void nest(const loop::Stage& s, size_t depth, Accumulator* acc) {
    if (depth == s.inner.size()) return body(s, acc);
    int64_t n = eval(s.inner[depth].extent);
    for (int64_t i = 0; i < n; ++i) {
      set(s.inner[depth].var, i);
      nest(s, depth + 1, acc);
    }
  }
  void fail(KernelFault f) {
    VT_CHECK(fault_, "kernel {} may fault but does not say so", k_.name);
    std::atomic_ref<int32_t>(*fault_).store(int32_t(f), std::memory_order_relaxed);
  }
  int64_t place(const Instr& i) const {
    int64_t at = i.op == Op::load_bit ? eval(i.at) >> 3 : eval(i.at);
    VT_CHECK(at >= 0 && at < extents_[i.buf], "kernel {}: {} of b{}[{}] = {} outside {}", k_.name, to_string(i.op), i.buf, sym::str(i.at), at,
             extents_[i.buf]);
    return at;
  }
  void define(int32_t id, DType t, Scalar s) {
    types_[id] = compute_type(t);
    values_[id] = s;
  }

  void body(const loop::Stage& s, Accumulator* acc) {
    for (auto& i : s.body) instr(s, i, acc);
  }
  void instr(const loop::Stage& s, const Instr& i, Accumulator* acc) {
    auto v = [&](int32_t id) { return values_[id]; };
    switch (i.op) {
      case Op::constant: {
        Scalar c;
        c.f = i.fimm;
        c.i = i.iimm;
        return define(i.result, i.type, interp::wrap(c, compute_type(i.type)));
      }
      case Op::index: {
        Scalar c;
        c.i = eval(i.at);
        return define(i.result, DType::I64, c);
      }
      case Op::load: {
        if (i.a >= 0 && !v(i.a).i) return define(i.result, i.type, v(i.b));
        return define(i.result, i.type, interp::load(buffers_[i.buf], place(i), k_.buffers[i.buf].dtype));
      }
      case Op::load_bit: {
        if (i.a >= 0 && !v(i.a).i) return define(i.result, i.type, v(i.b));
        Scalar byte = interp::load(buffers_[i.buf], place(i), DType::U8);
        byte.i = byte.i >> (eval(i.at) & 7) & 1;
        return define(i.result, i.type, byte);
      }
      case Op::store:
        if (i.b >= 0 && !v(i.b).i) return;
        return interp::store(buffers_[i.buf], place(i), k_.buffers[i.buf].dtype, v(i.a));
      case Op::store_add: {
        if (i.b >= 0 && !v(i.b).i) return;
        static std::mutex mutex;
        std::lock_guard lock(mutex);
        DType st = k_.buffers[i.buf].dtype;
        int64_t at = place(i);
        KernelFault none{};
        return interp::store(buffers_[i.buf], at, st, interp::apply(Op::add, compute_type(st), interp::load(buffers_[i.buf], at, st), v(i.a), none));
      }
      case Op::check_index: {
        Scalar a = v(i.a);
        if (a.i < 0 || a.i >= eval(i.at)) {
          if (i.b < 0 || v(i.b).i) {
            fail(KernelFault::IndexOutOfRange);
            if (eval(i.at) <= 0) throw Left();
          }
          a.i = 0;
        }
        return define(i.result, DType::I64, a);
      }
      case Op::cast:
        return define(i.result, i.type, interp::cast(v(i.a), types_[i.a], i.type));
      case Op::bitcast:
        return define(i.result, i.type, interp::bitcast(v(i.a), types_[i.a], i.type));
      case Op::where:
        return define(i.result, i.type, v(i.a).i ? v(i.b) : v(i.c));
      case Op::fma: {
        const double x = v(i.a).f, y = v(i.b).f, z = v(i.c).f;
        Scalar r;
        r.f = compute_type(i.type) == DType::F64 ? std::fma(x, y, z) : std::fma(float(x), float(y), float(z));
        return define(i.result, i.type, r);
      }
      case Op::reduce:
        VT_CHECK(acc, "kernel {}: a reduce where nothing is reduced", k_.name);
        if (i.c >= 0 && !v(i.c).i) return;
        if (s.accums[i.iimm].kind == AccumKind::Sum && i.b >= 0) {  // floats of a product
          acc[i.iimm].sum = std::fma(v(i.a).f, v(i.b).f, acc[i.iimm].sum);
          return;
        }
        return feed(s.accums[i.iimm], acc[i.iimm], v(i.a), i.b >= 0 ? v(i.b).i : 0, types_[i.a]);
      default:
        break;
    }
    Scalar a = v(i.a), b = i.b >= 0 ? v(i.b) : Scalar{};
    if (i.op >= Op::lt) {
      Scalar r;
      r.i = interp::compare(i.op, types_[i.a], a, b);
      return define(i.result, DType::Bool, r);
    }
    KernelFault fault = KernelFault::None;
    Scalar r = interp::apply(i.op, compute_type(i.type), a, b, fault);
    if (fault != KernelFault::None) fail(fault);
    define(i.result, i.type, r);
  }

  void feed(const loop::Accum& a, Accumulator& x, Scalar v, int64_t index, DType type) {
    bool f = is_float(a.type), nan = f && v.f != v.f;
    switch (a.kind) {
      case AccumKind::Sum:
      case AccumKind::Prod:
        x.sum += v.f;
        x.product *= v.f;
        x.isum = a.type == DType::Bool ? (x.isum | v.i) : int64_t(uint64_t(x.isum) + uint64_t(v.i));
        x.iproduct = int64_t(uint64_t(x.iproduct) * uint64_t(v.i));
        return;
      case AccumKind::Any:
      case AccumKind::All: {
        bool on = is_float(type) ? v.f != 0 : v.i != 0;
        x.any |= on;
        x.all &= on;
        return;
      }
      case AccumKind::Welford:
      case AccumKind::Moments:
        x.elements.push_back(v.f);
        return;
      default:
        break;
    }
    bool least = a.kind == AccumKind::Min || a.kind == AccumKind::ArgMin;
    bool better = !x.seen || (f && x.best.f != x.best.f ? false : nan || interp::compare(least ? Op::lt : Op::gt, a.type, v, x.best));
    if (better) {
      x.best = v;
      x.best_index = index;
    }
    x.seen = true;
  }

  void finish(const loop::Accum& a, Accumulator& x) {
    Scalar r0, r1;
    DType t0 = a.type, t1 = a.type;
    bool least = a.kind == AccumKind::Min || a.kind == AccumKind::ArgMin;
    switch (a.kind) {
      case AccumKind::Sum:
        r0.f = x.sum;
        r0.i = x.isum;
        break;
      case AccumKind::Prod:
        r0.f = x.product;
        r0.i = x.iproduct;
        break;
      case AccumKind::Any:
        r0.i = x.any;
        t0 = DType::Bool;
        break;
      case AccumKind::All:
        r0.i = x.all;
        t0 = DType::Bool;
        break;
      case AccumKind::Min:
      case AccumKind::Max:
      case AccumKind::ArgMin:
      case AccumKind::ArgMax:
        r0 = x.best;
        r1.i = x.best_index;
        t1 = DType::I64;
        if (!x.seen) r0 = worst(a.type, least);
        break;
      case AccumKind::Welford:
      case AccumKind::Moments: {
        double n = double(x.elements.size()), mean = 0, m2 = 0;
        for (double e : x.elements) mean += e / n;
        for (double e : x.elements) m2 += (e - mean) * (e - mean);
        r0.f = mean;
        r1.f = m2;
        break;
      }
    }
    if (a.results[0] >= 0) define(a.results[0], t0, interp::wrap(r0, t0));
    if (a.results[1] >= 0) define(a.results[1], t1, interp::wrap(r1, t1));
  }
  static Scalar worst(DType t, bool least) {
    Scalar s;
    int bits = int(size_of(t)) * 8;
    bool is_unsigned = t == DType::U8 || t == DType::Bool;
    s.f = least ? INFINITY : -INFINITY;
    int64_t hi = t == DType::Bool ? 1 : is_unsigned ? 255 : int64_t((uint64_t(1) << (bits - 1)) - 1);
    s.i = least ? hi : is_unsigned ? 0 : -hi - 1;
    return s;
  }

  const loop::Kernel& k_;
  std::vector<Scalar> values_;
  std::vector<DType> types_;
  std::vector<int64_t> symbols_, extents_;
  std::vector<std::pair<uint32_t, int32_t>> indirect_;
  std::vector<void*> buffers_;
  int32_t* fault_ = nullptr;
};

// A KernelFn has no room for a closure, so each live kernel takes a numbered slot with a function of its own.
constexpr size_t kSlots = 2048;
std::array<std::atomic<const loop::Kernel*>, kSlots> slots;
std::mutex slots_mutex;

template <size_t I>
void thunk(void* const* bufs, const int64_t* sizes, int64_t begin, int64_t end) {
  Run(*slots[I].load(std::memory_order_acquire), bufs, sizes).run(begin, end);
}
template <size_t... I>
constexpr std::array<loop::KernelFn, kSlots> make_thunks(std::index_sequence<I...>) {
  return {&thunk<I>...};
}
constexpr auto thunks = make_thunks(std::make_index_sequence<kSlots>());

struct Interpreted final : Compiled {
  std::vector<size_t> taken;
  std::vector<std::unique_ptr<loop::Kernel>> kernels;
  ~Interpreted() override {
    for (size_t s : taken) slots[s].store(nullptr, std::memory_order_release);
  }
};

class InterpBackend final : public Backend {
 public:
  std::string_view name() const override { return "interp"; }
  std::string target_id() const override { return "interp"; }
  std::unique_ptr<Compiled> compile(const std::vector<const loop::Kernel*>& kernels, const TargetOptions& options) override {
    auto out = std::make_unique<Interpreted>();
    std::lock_guard lock(slots_mutex);
    size_t slot = 0;
    for (auto* k : kernels) {
      loop::verify(*k);
      while (slot < kSlots && slots[slot].load(std::memory_order_relaxed)) ++slot;
      VT_CHECK(slot < kSlots, "more than {} interpreted kernels are alive", kSlots);
      out->kernels.push_back(std::make_unique<loop::Kernel>(*k));
      slots[slot].store(out->kernels.back().get(), std::memory_order_release);
      out->taken.push_back(slot);
      out->functions.push_back(thunks[slot]);
      if (options.keep_asm) out->listing += loop::print(*k);
    }
    return out;
  }
};

}  // namespace

Backend& interp_backend() {
  static InterpBackend backend;
  return backend;
}

}  // namespace vitrify::codegen
