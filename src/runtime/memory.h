// Memory of running plans: arenas for private intermediates and recycled blocks for large results.
#pragma once
#include <cstddef>
#include <utility>

namespace vitrify::runtime {

constexpr size_t kAlignment = 64;
constexpr size_t kHugePage = size_t{2} << 20;

// An aligned block whose pages are already present: the steady call takes no page fault in it.
class Arena {
 public:
  Arena() = default;
  explicit Arena(size_t bytes);
  Arena(Arena&& o) noexcept
      : data_(std::exchange(o.data_, nullptr)), bytes_(std::exchange(o.bytes_, 0)), mapped_(std::exchange(o.mapped_, 0)), base_(o.base_) {}
  Arena& operator=(Arena&& o) noexcept {
    std::swap(data_, o.data_);
    std::swap(bytes_, o.bytes_);
    std::swap(mapped_, o.mapped_);
    std::swap(base_, o.base_);
    return *this;
  }
  ~Arena();
  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  char* data_ = nullptr;
  size_t bytes_ = 0;
  size_t mapped_ = 0;     // bytes of the mapping; 0: from the heap
  void* base_ = nullptr;  // start of the mapping
};

// Plans that do not run at the same time share one arena: of those of a forward and its backward, or of a chain of plans, the largest is all there
// is.
class ArenaPool {
 public:
  static ArenaPool& instance();
  Arena take(size_t bytes);
  void give_back(Arena);
  // Memory is kept between runs for as long as a plan may want as much.
  void expect(size_t bytes);
  void forget(size_t bytes);
  size_t idle_bytes() const;

  static constexpr size_t kMinBytes = size_t{1} << 20;  // plans that need less have it to themselves

 private:
  struct State;
  State& state() const;
};

// Blocks for results a caller takes away. A fresh mapping costs more than filling it, so blocks that come back are kept, up to a limit.
class BlockCache {
 public:
  static BlockCache& instance();
  void* take(size_t bytes);  // aligned, contents undefined
  void give_back(void*);     // from any thread
  size_t idle_bytes() const;
  void trim();  // frees every idle block

  // Below, malloc is faster: it gives memory of one size to requests of another (activations' to gradients), where more than kIdleLimit of blocks
  // here is unmapped, mapped and cleared again in each step. Above, it maps each time (mallopt(3), M_MMAP_THRESHOLD).
  static constexpr size_t kMinBytes = size_t{32} << 20;
  // Of inference, whose results come back before the next ones: malloc carves small blocks out of what they leave and puts the next at the heap's
  // end.
  static constexpr size_t kMinBytesOfInference = size_t{4} << 20;
  static constexpr size_t kIdleLimit = size_t{96} << 20;

 private:
  struct State;
  State& state() const;
};

}  // namespace vitrify::runtime
