// Runs text kernels on a backend over byte buffers.
#pragma once
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <random>

#include "codegen/backend.h"

namespace vitrify::codegen::test {

using Bytes = std::vector<uint8_t>;

template <class T>
Bytes bytes(const std::vector<T>& v) {
  Bytes b(v.size() * sizeof(T));
  if (!v.empty()) memcpy(b.data(), v.data(), b.size());
  return b;
}
template <class T>
std::vector<T> as(const Bytes& b) {
  std::vector<T> v(b.size() / sizeof(T));
  if (!v.empty()) memcpy(v.data(), b.data(), v.size() * sizeof(T));
  return v;
}

inline Backend& llvm() {
  setenv("VITRIFY_LLVM_PATH", VT_BINARY_DIR "/libvitrify_llvm.so", 0);
  return llvm_backend();
}
inline bool host_has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}
inline std::vector<std::string> targets() {
  std::vector<std::string> t = {"x86-64-v2"};
  if (__builtin_cpu_supports("avx2")) t.push_back("x86-64-v3");
  if (host_has_avx512()) t.push_back("x86-64-v4");
  t.push_back("native");
  return t;
}

// A context with symbols numbered from 0: s for sizes, i for loop variables, v for indirects, as in "ssiiiv".
inline std::shared_ptr<sym::Context> context(const std::string& kinds) {
  auto c = std::make_shared<sym::Context>();
  for (char k : kinds) {
    if (k == 's') c->symbol(sym::SymbolKind::Size, 7, sym::Range{0, 1 << 30});
    if (k == 'i') c->symbol(sym::SymbolKind::Loop);
    if (k == 'v') c->symbol(sym::SymbolKind::Indirect);
  }
  return c;
}

struct Outcome {
  std::vector<Bytes> buffers;
  int32_t fault = 0;
};

// `buffers` holds one entry per non-scratch buffer; every buffer is followed by guard bytes that must survive.
inline Outcome call(loop::KernelFn fn, const loop::Kernel& k, std::vector<Bytes> buffers, const std::vector<int64_t>& sizes, int64_t begin,
                    int64_t end) {
  Outcome out;
  constexpr size_t kGuard = 64;
  std::vector<void*> pointers;
  size_t next = 0;
  std::vector<int> parent(buffers.size(), -1);
  for (auto& b : k.buffers)
    if (b.kind != loop::BufferKind::Scratch) {
      parent[next] = b.inplace_of;
      ++next;
    }
  for (auto& b : buffers) b.resize(b.size() + kGuard, 0xA5);
  for (size_t i = 0; i < buffers.size(); ++i) pointers.push_back(parent[i] >= 0 ? pointers[parent[i]] : buffers[i].data());
  if (k.may_fault) pointers.push_back(&out.fault);
  std::vector<uint8_t> scratch(loop::scratch_bytes(k,
                                                   [&](uint32_t id) {
                                                     for (size_t i = 0; i < k.sizes.size(); ++i)
                                                       if (sym::view(k.sizes[i]).symbol->id == id) return sizes[i];
                                                     return int64_t(0);
                                                   }) +
                               64);
  pointers.push_back(scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64) % 64);
  fn(pointers.data(), sizes.data(), begin, end);
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (parent[i] >= 0) buffers[i] = buffers[parent[i]];
    for (size_t g = buffers[i].size() - kGuard; parent[i] < 0 && g < buffers[i].size(); ++g)
      EXPECT_EQ(buffers[i][g], 0xA5) << "guard after buffer " << i;
  }
  for (auto& b : buffers) {
    if (b.size() >= kGuard) b.resize(b.size() - kGuard);
  }
  out.buffers = std::move(buffers);
  return out;
}

inline Outcome run(Backend& backend, const std::string& target, const loop::Kernel& k, const std::vector<Bytes>& buffers,
                   const std::vector<int64_t>& sizes, int64_t begin, int64_t end) {
  TargetOptions options;
  options.target = target;
  options.threads = 1;
  auto code = backend.compile({&k}, options);
  return call(code->functions[0], k, buffers, sizes, begin, end);
}

inline std::vector<float> random_floats(size_t n, uint32_t seed, float lo = -3, float hi = 3) {
  std::mt19937 g(seed);
  std::uniform_real_distribution<float> d(lo, hi);
  std::vector<float> v(n);
  for (auto& x : v) x = d(g);
  return v;
}

}  // namespace vitrify::codegen::test
