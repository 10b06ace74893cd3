// Addressing: strides, broadcasts, gathers, masks, in-place, faults, scatter-add.
#include <sys/mman.h>

#include <thread>

#include "harness.h"

using namespace vitrify;
using namespace vitrify::codegen;
using namespace vitrify::codegen::test;

namespace {

// Bitwise equal to the interpreter on every target, for the whole range and a partial one.
void same(const loop::Kernel& k, const std::vector<Bytes>& in, const std::vector<int64_t>& sizes, int64_t n, int32_t fault = 0) {
  loop::verify(k);
  for (auto [b, e] : {std::pair<int64_t, int64_t>{0, n}, {n / 3, n - n / 5}}) {
    auto want = run(interp_backend(), "native", k, in, sizes, b, e);
    for (auto& target : targets()) {
      auto got = run(llvm(), target, k, in, sizes, b, e);
      for (size_t i = 0; i < got.buffers.size(); ++i)
        ASSERT_EQ(got.buffers[i], want.buffers[i]) << target << " buffer " << i << " of " << k.name << " range " << b << ".." << e;
      EXPECT_EQ(got.fault, want.fault) << target;
      if (e == n) EXPECT_EQ(got.fault, fault) << target;
    }
  }
}

TEST(Memory, TransposeBroadcastAndReverse) {
  for (const char* type : {"f32", "f64", "bf16", "u8", "i64"}) {
    auto k = loop::parse(
        fmt::format(
            R"(kernel t(in {0}* b0 extent(s0*s1), in {0}* b1 extent(s1), in {0}* b2 extent(s0), out {0}* b3 extent(s0*s1); s0, s1) outer() axis(inner):
    stage inner(i2 < s0, i3 < s1):
      %0 = load {1} b0[i3*s0 + i2]
      %1 = load {1} b1[s1 - 1 - i3]
      %2 = load {1} b2[i2]
      %3 = max {1} %0 %1
      %4 = min {1} %3 %2
      store {0} b3[i2*s1 + i3] = %4)",
            type, std::string(type) == "bf16" ? "f32" : type),
        context("ssii"));
    DType t;
    parse_dtype(type, t);
    for (auto [r, c] : {std::pair<int64_t, int64_t>{3, 5}, {7, 40}, {33, 16}, {1, 100}, {0, 4}}) {
      std::mt19937 g(9);
      auto fill = [&](size_t n) {
        Bytes b(n * size_of(t));
        for (auto& x : b) x = g() % 100;
        return b;
      };
      same(k, {fill(r * c), fill(c), fill(r), fill(r * c)}, {r, c}, r * c);
    }
  }
}

TEST(Memory, SquaresTransposedInRegisters) {
  for (const char* type : {"f32", "f64", "bf16", "u8", "i64"}) {
    // read down and across, written across and down, for several batches
    auto k = loop::parse(
        fmt::format(
            R"(kernel t(in {0}* b0 extent(3*s0*s1), in {0}* b1 extent(3*s0*s1), in {0}* b2 extent(s0), out {0}* b3 extent(3*s0*s1), out {0}* b4 extent(3*s0*s1); s0, s1) outer(i2 < 3, i3 < s0) axis(tile):
    stage inner(i4 < s1):
      %0 = load {1} b0[i2*s0*s1 + i4*s0 + i3]
      %1 = load {1} b1[i2*s0*s1 + i3*s1 + i4]
      %2 = load {1} b2[i3]
      %3 = max {1} %0 %1
      %4 = min {1} %3 %2
      store {0} b3[i2*s0*s1 + i3*s1 + i4] = %4
      store {0} b4[i2*s0*s1 + i4*s0 + i3] = %3)",
            type, std::string(type) == "bf16" ? "f32" : type),
        context("ssiii"));
    EXPECT_NE(loop::print(k).find("axis(tile)"), std::string::npos);
    DType t;
    parse_dtype(type, t);
    for (auto [r, c] : {std::pair<int64_t, int64_t>{3, 5}, {16, 16}, {70, 33}, {33, 64}, {200, 17}, {1, 100}, {0, 4}}) {
      std::mt19937 g(9);
      auto fill = [&](size_t n) {
        Bytes b(n * size_of(t));
        for (auto& x : b) x = g() % 100;
        return b;
      };
      same(k, {fill(3 * r * c), fill(3 * r * c), fill(r), fill(3 * r * c), fill(3 * r * c)}, {r, c}, 3 * r);
    }
  }
}

TEST(Memory, LargeResultsAreStoredPastTheCaches) {
  constexpr int64_t n = int64_t(8) << 20, cols = 4096;  // 32 MiB
  auto flat =
      loop::parse(fmt::format("kernel a(in f32* b0 extent({0}), out f32* b1 extent({0});) outer() axis(inner):\n"
                              "    stage inner(i0 < {0}):\n      %0 = load f32 b0[i0]\n      %1 = add f32 %0 %0\n      store f32 b1[i0] = %1\n",
                              n),
                  context("i"));
  auto turned = loop::parse(
      fmt::format("kernel b(in f32* b0 extent({0}), out f32* b1 extent({0});) outer(i0 < {1}) axis(tile):\n"
                  "    stage inner(i1 < {2}):\n      %0 = load f32 b0[i0 + {1}*i1]\n      %1 = add f32 %0 %0\n      store f32 b1[{2}*i0 + i1] = %1\n",
                  n, cols, n / cols),
      context("ii"));
  std::vector<float> x(n);
  for (int64_t i = 0; i < n; ++i) x[i] = float(i % 1000003);
  for (auto& target : targets())
    for (auto* k : {&flat, &turned})
      for (int shift : {0, 4}) {  // on a cache line, and not
        auto code = llvm().compile({k}, {.target = target, .threads = 1});
        std::vector<float> memory(n + 64, -1);
        float* out = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) / 4 + shift / 4;
        void* bufs[] = {x.data(), out};
        const int64_t end = k == &flat ? n : cols;
        code->functions[0](bufs, nullptr, 0, 5);
        code->functions[0](bufs, nullptr, 5, end);
        for (int64_t i = 0; i < n; ++i) {
          const float want = 2 * (k == &flat ? x[i] : x[i / (n / cols) + cols * (i % (n / cols))]);
          if (out[i] != want) FAIL() << target << " " << k->name << " at " << i << ": " << out[i] << ", not " << want;
        }
        EXPECT_EQ(out[n], -1.f);
      }
}

TEST(Memory, DividedIndices) {
  // a flat loop over a repeated and a channel-shuffled buffer
  auto k =
      loop::parse(R"(kernel d(in f32* b0 extent(600), in i16* b1 extent(600), out f32* b2 extent(600), out i64* b3 extent(600)) outer() axis(inner):
    stage inner(i0 < 600):
      %0 = load f32 b0[i0//7]
      %1 = load f32 b0[(i0 % 20)*30 + i0//20]
      %2 = add f32 %0 %1
      store f32 b2[i0] = %2
      %3 = load i16 b1[(i0 + 5) % 600]
      %4 = cast i64 %3
      %5 = index i64 [i0//3 - i0 % 3]
      %6 = add i64 %4 %5
      store i64 b3[i0] = %6)",
                  context("i"));
  std::mt19937 g(3);
  Bytes shorts(1200);
  for (auto& x : shorts) x = uint8_t(g());
  same(k, {bytes(random_floats(600, 1)), shorts, Bytes(2400), Bytes(4800)}, {}, 600);
}

TEST(Memory, MasksNeverTouchWhatTheyHide) {
  // a window shifted over the ends of the buffer
  auto k = loop::parse(R"(kernel pad(in f32* b0 extent(s0), out f32* b1 extent(s0 + 40); s0) outer() axis(inner):
    stage inner(i1 < s0 + 40):
      %0 = index i64 [i1 - 20]
      %1 = constant i64 0
      %2 = ge i64 %0 %1
      %3 = index i64 [s0]
      %4 = lt i64 %0 %3
      %5 = and_ b8 %2 %4
      %6 = constant f32 9
      %7 = load f32 b0[i1 - 20] mask %5 else %6
      store f32 b1[i1] = %7 mask %2)",
                       context("si"));
  for (int64_t n : {0, 1, 16, 33, 1000}) same(k, {bytes(random_floats(n, 1)), bytes(std::vector<float>(n + 40, 5))}, {n}, n + 40);
  // the neighbours of the buffer may not be touched
  size_t page = 4096;
  auto* raw = static_cast<char*>(mmap(nullptr, 3 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(raw, MAP_FAILED);
  ASSERT_EQ(mprotect(raw + page, page, PROT_READ | PROT_WRITE), 0);
  std::vector<float> out(1024 + 40);
  for (auto& target : targets()) {
    TargetOptions o;
    o.target = target;
    auto code = llvm().compile({&k}, o);
    void* bufs[] = {raw + page, out.data()};
    int64_t size = 1024;
    std::fill_n(reinterpret_cast<float*>(raw + page), 1024, 3.f);
    code->functions[0](bufs, &size, 0, 1024 + 40);
    EXPECT_EQ(out[20], 3);
    EXPECT_EQ(out[1043], 3);
    EXPECT_EQ(out[1044], 9);
  }
  munmap(raw, 3 * page);
}

// Rows that start in the middle of a byte, neighbours, strides, one bit for a row, and masks that hide what is not there.
const char* kBits =
    R"(kernel bits(in u8* b0 extent((s0*s1 + 7)//8 + 8), in {0}* b1 extent(s0*s1), out {0}* b2 extent(s0*s1), out b8* b3 extent(s0*s1); s0, s1) outer({1}) axis({2}):
    stage inner({3}):
      %0 = load_bit b8 b0[i2*s1 + i3]
      %1 = load {4} b1[i2*s1 + i3]
      %2 = constant {4} 0
      %3 = where {4} %0 %1 %2
      store {0} b2[i2*s1 + i3] = %3
      %4 = load_bit b8 b0[i3*s0 + i2]
      %5 = load_bit b8 b0[i2]
      %6 = index i64 [i2*s1 + i3]
      %7 = constant i64 3
      %8 = ge i64 %6 %7
      %9 = constant b8 1
      %10 = load_bit b8 b0[i2*s1 + i3 - 3] mask %8 else %9
      %11 = xor_ b8 %0 %4
      %12 = xor_ b8 %11 %5
      %13 = xor_ b8 %12 %10
      store b8 b3[i2*s1 + i3] = %13)";

TEST(Memory, BitsOfMasks) {
  for (const char* type : {"f32", "u8"})
    for (int form = 0; form < 3; ++form) {
      auto k = loop::parse(fmt::format(fmt::runtime(kBits), type, form == 0 ? "" : "i2 < s0", form == 2 ? "outer" : "inner",
                                       form == 0 ? "i2 < s0, i3 < s1" : "i3 < s1", type),
                           context("ssii"));
      EXPECT_EQ(loop::print(loop::parse(loop::print(k), k.ctx)), loop::print(k));
      DType t;
      parse_dtype(type, t);
      for (auto [r, c] : {std::pair<int64_t, int64_t>{3, 5}, {5, 131}, {70, 64}, {0, 4}}) {
        std::mt19937 g(9);
        auto fill = [&](size_t n) {
          Bytes b(n);
          for (auto& x : b) x = g() % 100;
          return b;
        };
        const size_t n = static_cast<size_t>(r * c);
        Bytes packed = fill((n + 7) / 8 + 8);
        for (auto& x : packed) x = uint8_t(g());
        same(k, {packed, fill(n * size_of(t)), fill(n * size_of(t)), Bytes(n)}, {r, c}, form == 0 ? r * c : r);
      }
    }
}

TEST(Memory, BitsAreReadNoFartherThanTheirBytesGo) {
  auto k = loop::parse(R"(kernel bits(in u8* b0 extent((s0 + 7)//8 + 8), out u8* b1 extent(s0); s0) outer() axis(inner):
    stage inner(i1 < s0):
      %0 = load_bit b8 b0[i1]
      %1 = cast u8 %0
      store u8 b1[i1] = %1)",
                       context("si"));
  const size_t page = 4096;
  auto* raw = static_cast<char*>(mmap(nullptr, 3 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(raw, MAP_FAILED);
  ASSERT_EQ(mprotect(raw + page, page, PROT_READ | PROT_WRITE), 0);
  for (auto& target : targets()) {
    auto code = llvm().compile({&k}, {.target = target, .threads = 1});
    for (int64_t n : {1, 8, 63, 64, 65, 1000, 1023}) {
      const auto size = static_cast<size_t>(loop::bytes_of_bits(n).value());
      char* bits = raw + 2 * page - size;  // what follows cannot be read
      for (size_t i = 0; i < size; ++i) bits[i] = char(37 * i + 11);
      std::vector<uint8_t> out(n);
      void* bufs[] = {bits, out.data()};
      code->functions[0](bufs, &n, 0, n);
      for (int64_t i = 0; i < n; ++i) ASSERT_EQ(out[i], uint8_t(bits[i / 8]) >> (i % 8) & 1) << target << " " << n << " " << i;
    }
  }
  munmap(raw, 3 * page);
}

const char* kGather =
    R"(kernel gather(in {0}* b0 extent(s0*s1), in i64* b1 extent(s2), out {0}* b2 extent(s1*s2); s0, s1, s2) outer({1}) axis({2}) fault indirect(v5 = %1):
    stage inner({3}):
      %0 = load i64 b1[i3]
      %1 = check_index i64 %0 < [s0]
      %2 = load {4} b0[v5*s1 + i4]
      store {4} b2[i3*s1 + i4] = %2)";

TEST(Memory, GatherRowsAndFaults) {
  for (const char* type : {"f32", "bf16", "u8", "f64"})
    for (int form = 0; form < 3; ++form) {
      std::string compute = std::string(type) == "bf16" ? "f32" : type;
      auto k = loop::parse(fmt::format(fmt::runtime(kGather), type, form == 0 ? "" : "i3 < s2", form == 2 ? "outer" : "inner",
                                       form == 0 ? "i3 < s2, i4 < s1" : "i4 < s1", compute),
                           context("sssiiv"));
      DType t;
      parse_dtype(type, t);
      std::mt19937 g(3);
      for (bool bad : {false, true}) {
        int64_t rows = 13, width = 21, picks = 37;
        std::vector<int64_t> index(picks);
        for (auto& i : index) i = g() % rows;
        if (bad) index[20] = -1, index[21] = rows, index[22] = INT64_MAX;
        Bytes data(rows * width * size_of(t));
        for (auto& x : data) x = g() % 100;
        same(k, {data, bytes(index), Bytes(picks * width * size_of(t))}, {rows, width, picks}, form == 0 ? picks * width : picks,
             bad ? int32_t(KernelFault::IndexOutOfRange) : 0);
      }
    }
}

TEST(Memory, GatherOneElementPerLane) {
  auto k = loop::parse(
      R"(kernel take(in f32* b0 extent(s0), in i64* b1 extent(s1), in b8* b2 extent(s1), out f32* b3 extent(s1); s0, s1) outer() axis(inner) fault indirect(v3 = %3):
    stage inner(i2 < s1):
      %0 = load i64 b1[i2]
      %1 = load b8 b2[i2]
      %2 = constant f32 -1
      %3 = check_index i64 %0 < [s0] mask %1
      %4 = load f32 b0[v3] mask %1 else %2
      store f32 b3[i2] = %4)",
      context("ssiv"));
  std::mt19937 g(3);
  int64_t n = 50, m = 333;
  std::vector<int64_t> index(m);
  Bytes mask(m);
  for (int64_t i = 0; i < m; ++i) {
    mask[i] = g() % 3 != 0;
    index[i] = mask[i] ? int64_t(g() % n) : int64_t(g()) - (1 << 30);
  }
  same(k, {bytes(random_floats(n, 1)), bytes(index), mask, Bytes(m * 4)}, {n, m}, m);
  mask[200] = 1;
  index[200] = n;
  same(k, {bytes(random_floats(n, 1)), bytes(index), mask, Bytes(m * 4)}, {n, m}, m, int32_t(KernelFault::IndexOutOfRange));
}

TEST(Memory, InPlace) {
  auto k = loop::parse(R"(kernel relu(in f32* b0 extent(s0), in f32* b1 extent(s0), out f32* b2 extent(s0) inplace(b0); s0) outer() axis(inner):
    stage inner(i1 < s0):
      %0 = load f32 b0[i1]
      %1 = load f32 b1[i1]
      %2 = add f32 %0 %1
      %3 = constant f32 0
      %4 = max f32 %2 %3
      store f32 b2[i1] = %4)",
                       context("si"));
  for (int64_t n : {5, 64, 1000}) same(k, {bytes(random_floats(n, 1)), bytes(random_floats(n, 2)), Bytes(n * 4)}, {n}, n);
}

TEST(Memory, ScatterAddFromSeveralThreads) {
  for (const char* type : {"f32", "bf16", "i64", "f16", "f64"}) {
    auto k = loop::parse(
        fmt::format(R"(kernel scatter(in i64* b0 extent(s0), inout {0}* b1 extent(s1*8); s0, s1) outer(i2 < s0) axis(inner) fault indirect(v4 = %1):
    stage inner(i3 < 8):
      %0 = load i64 b0[i2]
      %1 = check_index i64 %0 < [s1]
      %2 = constant {1} 1
      store_add {1} b1[v4*8 + i3] = %2)",
                    type, std::string(type).find("f16") != std::string::npos ? "f32" : type),
        context("ssiiv"));
    loop::verify(k);
    int64_t n = 600, m = 6;
    std::vector<int64_t> index(n);
    std::mt19937 g(3);
    for (auto& i : index) i = g() % m;
    DType t;
    parse_dtype(type, t);
    std::vector<Bytes> in = {bytes(index), Bytes(m * 8 * size_of(t))};
    auto want = run(interp_backend(), "native", k, in, {n, m}, 0, n);
    for (auto& target : targets()) {
      TargetOptions o;
      o.target = target;
      auto code = llvm().compile({&k}, o);
      Bytes out(in[1]);
      int32_t fault = 0;
      void* bufs[] = {in[0].data(), out.data(), &fault};
      int64_t sizes[] = {n, m};
      std::vector<std::thread> threads;
      for (int i = 0; i < 3; ++i) threads.emplace_back([&, i] { code->functions[0](bufs, sizes, i * n / 3, (i + 1) * n / 3); });
      for (auto& th : threads) th.join();
      EXPECT_EQ(out, want.buffers[1]) << type << " " << target;
    }
  }
}

// A later loop asks for the next row of what the first has read, where both walk along the same.
TEST(Memory, RowsAheadOfUnlikeLoops) {
  for (const char* axis : {"inner", "none"})
    for (const char* second : {"i2 < 400", "i3 < 400", "i3 < 100", "i3 < 2, i2 < 100"}) {
      const std::string last = std::string(second).substr(std::string(second).rfind('i'), 2);
      auto k = loop::parse(fmt::format(R"(kernel r(in i32* b0 extent(s0*400), out i32* b1 extent(s0*400); s0) outer(i1 < s0) axis({0}):
    stage inner(i2 < 400) acc(sum i32 -> %2):
      %0 = load i32 b0[i1*400 + i2]
      reduce i32 acc0 %0
    stage inner({1}):
      %3 = index i64 [{2}]
      %4 = cast i32 %3
      %5 = add i32 %2 %4
      store i32 b1[i1*400 + {2}] = %5)",
                                       axis, second, last),
                           context("siii"));
      std::mt19937 g(3);
      std::vector<int32_t> data(7 * 400);
      for (auto& x : data) x = int32_t(g() % 1000);
      same(k, {bytes(data), Bytes(7 * 400 * 4)}, {7}, 7);
    }
}

TEST(Memory, OuterLoopsByOdometer) {
  for (const char* axis : {"inner", "outer", "none"}) {
    auto k = loop::parse(
        fmt::format(
            R"(kernel o(in i32* b0 extent(s0*s1*s2*3), out i32* b1 extent(s0*s1*s2), scratch i32* b2 extent(3); s0, s1, s2) outer(i3 < s0, i4 < s1, i5 < s2) axis({}):
    stage inner(i6 < 3):
      %0 = load i32 b0[((i3*s1 + i4)*s2 + i5)*3 + i6]
      store i32 b2[2 - i6] = %0
    stage inner(i7 < 3) acc(sum i32 -> %4):
      %1 = load i32 b2[i7]
      %2 = index i64 [i7 + 1]
      %5 = cast i32 %2
      %3 = mul i32 %1 %5
      reduce i32 acc0 %3
    stage inner():
      store i32 b1[(i3*s1 + i4)*s2 + i5] = %4)",
            axis),
        context("sssiiiii"));
    std::mt19937 g(3);
    std::vector<int32_t> data(4 * 5 * 19 * 3);
    for (auto& x : data) x = int32_t(g());
    same(k, {bytes(data), Bytes(4 * 5 * 19 * 4)}, {4, 5, 19}, 4 * 5 * 19);
  }
}

}  // namespace
