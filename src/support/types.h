// Scalar types and devices, as the compiler sees them. Knows no tensor library.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace vitrify {

// name, text spelling in IR, bytes per element
#define VT_DTYPES(_)  \
  _(Bool, "b8", 1)    \
  _(U8, "u8", 1)      \
  _(I8, "i8", 1)      \
  _(I16, "i16", 2)    \
  _(I32, "i32", 4)    \
  _(I64, "i64", 8)    \
  _(F16, "f16", 2)    \
  _(BF16, "bf16", 2)  \
  _(F32, "f32", 4)    \
  _(F64, "f64", 8)    \
  _(C64, "c64", 8)    \
  _(C128, "c128", 16) \
  _(Opaque, "opaque", 0) /* anything else (fp8, quantised, u16..u64, c32): only extern calls may touch it */

enum class DType : uint8_t {
#define _(n, s, b) n,
  VT_DTYPES(_)
#undef _
};

size_t size_of(DType);                       // bytes per element; 0 for Opaque
std::string_view to_string(DType);           // "f32"
bool parse_dtype(std::string_view, DType&);  // false when unknown

constexpr bool is_float(DType t) { return t == DType::F16 || t == DType::BF16 || t == DType::F32 || t == DType::F64; }
constexpr bool is_int(DType t) { return t == DType::U8 || t == DType::I8 || t == DType::I16 || t == DType::I32 || t == DType::I64; }
constexpr bool is_complex(DType t) { return t == DType::C64 || t == DType::C128; }
// True when generated kernels may load, compute and store this type.
constexpr bool is_native(DType t) { return t == DType::Bool || is_int(t) || is_float(t); }
// Type in which kernels hold a value of storage type t: half types are held in f32.
constexpr DType compute_type(DType t) { return t == DType::F16 || t == DType::BF16 ? DType::F32 : t; }

enum class DeviceKind : uint8_t { CPU, CUDA, Other };
struct Device {
  DeviceKind kind = DeviceKind::CPU;
  int8_t index = -1;
  bool operator==(const Device&) const = default;
};

}  // namespace vitrify
