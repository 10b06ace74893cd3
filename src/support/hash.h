// Content hashing (xxh3) for deduplication and cache keys; 128 bits where equal hashes stand for equal content.
#pragma once
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstdint>
#include <string_view>

namespace vitrify {

inline uint64_t hash_bytes(const void* p, size_t n, uint64_t seed = 0) { return XXH3_64bits_withSeed(p, n, seed); }
inline uint64_t hash_string(std::string_view s, uint64_t seed = 0) { return hash_bytes(s.data(), s.size(), seed); }
struct Hash128 {
  uint64_t low = 0, high = 0;
  bool operator==(const Hash128&) const = default;
};
inline Hash128 hash128(const void* p, size_t n, uint64_t seed) {
  const XXH128_hash_t h = XXH3_128bits_withSeed(p, n, seed);
  return {h.low64, h.high64};
}
inline uint64_t hash_mix(uint64_t h, uint64_t v) { return hash_bytes(&v, sizeof v, h); }

}  // namespace vitrify
