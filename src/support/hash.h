// 64-bit content hashing (xxh3) for deduplication and cache keys.
#pragma once
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstdint>
#include <string_view>

namespace vitrify {

inline uint64_t hash_bytes(const void* p, size_t n, uint64_t seed = 0) { return XXH3_64bits_withSeed(p, n, seed); }
inline uint64_t hash_string(std::string_view s, uint64_t seed = 0) { return hash_bytes(s.data(), s.size(), seed); }
inline uint64_t hash_mix(uint64_t h, uint64_t v) { return hash_bytes(&v, sizeof v, h); }

}  // namespace vitrify
