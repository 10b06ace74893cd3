// Spellings shared by print.cpp and parse.cpp; private to src/ir.
#pragma once
#include <string_view>

#include "ir/faults.h"
#include "ir/views.h"

namespace vitrify::ir {

constexpr std::pair<uint32_t, std::string_view> kFlagNames[] = {{kRandom, "random"},
                                                                {kEffect, "effect"},
                                                                {kView, "view"},
                                                                {kDataDependent, "data_dependent"},
                                                                {kFaults, "faults"},
                                                                {kDivides, "divides"},
                                                                {kNamesDims, "names_dims"},
                                                                {kNarrows, "narrows"},
                                                                {kCopiesMemory, "copies_memory"},
                                                                {kOneDtype, "one_dtype"},
                                                                {kGivesContiguous, "gives_contiguous"},
                                                                {kLooksAtOffset, "looks_at_offset"},
                                                                {kStartsAligned, "starts_aligned"},
                                                                {kChecksIndex, "checks_index"},
                                                                {kMakesBits, "makes_bits"}};
constexpr std::pair<InputKind, std::string_view> kInputKindNames[] = {{InputKind::Argument, "arg"},    {InputKind::Parameter, "param"},
                                                                      {InputKind::Buffer, "buffer"},   {InputKind::Captured, "captured"},
                                                                      {InputKind::Tangent, "tangent"}, {InputKind::Saved, "saved"}};
constexpr std::pair<MemoryFormat, std::string_view> kMemoryFormatNames[] = {{MemoryFormat::Contiguous, "contiguous"},
                                                                            {MemoryFormat::Preserve, "preserve"},
                                                                            {MemoryFormat::ChannelsLast, "channels_last"},
                                                                            {MemoryFormat::ChannelsLast3d, "channels_last_3d"}};
constexpr std::pair<Layout, std::string_view> kLayoutNames[] = {{Layout::Strided, "strided"}, {Layout::Other, "other_layout"}};
constexpr std::pair<DeviceKind, std::string_view> kDeviceNames[] = {
    {DeviceKind::CPU, "cpu"}, {DeviceKind::CUDA, "cuda"}, {DeviceKind::Other, "other"}};

template <class T, size_t N>
std::string_view name_of(const std::pair<T, std::string_view> (&table)[N], T value) {
  for (const auto& [v, s] : table)
    if (v == value) return s;
  return "?";
}
template <class T, size_t N>
bool find_name(const std::pair<T, std::string_view> (&table)[N], std::string_view name, T& out) {
  for (const auto& [v, s] : table)
    if (s == name) return out = v, true;
  return false;
}

}  // namespace vitrify::ir
