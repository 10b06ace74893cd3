// Memory that ends where nothing can be read.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <random>

// Floats of which the last is the last of its page, and the page after it cannot be touched.
class Guarded {
 public:
  explicit Guarded(size_t n, float fill = 0) : n_(n) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    mapped_ = (n * sizeof(float) + page - 1) / page * page + page;
    base_ = static_cast<char*>(mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    EXPECT_NE(base_, MAP_FAILED);
    EXPECT_EQ(mprotect(base_ + mapped_ - page, page, PROT_NONE), 0);
    data_ = reinterpret_cast<float*>(base_ + mapped_ - page) - n;
    std::fill(data_, data_ + n, fill);
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  ~Guarded() { munmap(base_, mapped_); }
  float* data() { return data_; }
  void randomize(uint32_t seed) {
    std::mt19937 g(seed);
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < n_; ++i) data_[i] = normal(g);
  }
  size_t size() const { return n_; }

 private:
  size_t n_, mapped_;
  char* base_;
  float* data_;
};
