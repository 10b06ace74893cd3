// Text form of kernels, as parse.cpp reads it.
//
//   kernel name(in f32* b0 extent(4096), out f32* b1 extent(4096) inplace(b0), scratch f32* b2 extent(64); s0) outer(i2 < 4, i3 < s0) axis(inner)
//   fault:
//     stage inner(i4 < 1024) acc(sum f32 -> %3; welford f32 -> %4 %5):
//       %0 = load f32 b0[1024*i2 + i4] mask %7 else %8
//       indirect v5 = %9
#include <fmt/format.h>

#include "loop/loop.h"

namespace vitrify::loop {
namespace {

std::string loops(const auto& list) {
  std::string s;
  for (auto& l : list) s += fmt::format("{}{} < {}", s.empty() ? "" : ", ", sym::str(l.var), sym::str(l.extent));
  return s;
}

std::string number(double v) {
  if (v != v) return "nan";
  if (v - v != 0) return v > 0 ? "inf" : "-inf";
  return fmt::format("{}", v);  // shortest text that reads back exactly
}

std::string text(const Instr& i) {
  std::string s;
  if (i.result >= 0) s = fmt::format("%{} = ", i.result);
  s += fmt::format("{} {}", to_string(i.op), to_string(i.type));
  auto operand = [](int32_t id) { return fmt::format("%{}", id); };
  switch (i.op) {
    case Op::constant:
      return s + " " + (is_float(i.type) ? number(i.fimm) : fmt::format("{}", i.iimm));
    case Op::index:
      return s + fmt::format(" [{}]", sym::str(i.at));
    case Op::load:
    case Op::load_bit:
      s += fmt::format(" b{}[{}]", i.buf, sym::str(i.at));
      return i.a >= 0 ? s + fmt::format(" mask {} else {}", operand(i.a), operand(i.b)) : s;
    case Op::store:
    case Op::store_add:
      s += fmt::format(" b{}[{}] = {}", i.buf, sym::str(i.at), operand(i.a));
      return i.b >= 0 ? s + " mask " + operand(i.b) : s;
    case Op::check_index:
      s += fmt::format(" {} < [{}]", operand(i.a), sym::str(i.at));
      return i.b >= 0 ? s + " mask " + operand(i.b) : s;
    case Op::reduce:
      s += fmt::format(" acc{} {}", i.iimm, operand(i.a));
      if (i.b >= 0) s += " at " + operand(i.b);
      return i.c >= 0 ? s + " mask " + operand(i.c) : s;
    default:
      break;
  }
  for (int32_t o : {i.a, i.b, i.c})
    if (o >= 0) s += " " + operand(o);
  return s;
}

}  // namespace

std::string print(const Kernel& k) {
  constexpr std::string_view kinds[] = {"in", "out", "inout", "scratch"}, axes[] = {"inner", "outer", "none", "tile"};
  std::string s = fmt::format("kernel {}(", k.name);
  for (size_t i = 0; i < k.buffers.size(); ++i) {
    auto& b = k.buffers[i];
    s += fmt::format("{}{} {}* b{} extent({})", i ? ", " : "", kinds[int(b.kind)], to_string(b.dtype), i, sym::str(b.extent));
    if (b.inplace_of >= 0) s += fmt::format(" inplace(b{})", b.inplace_of);
  }
  s += ";";
  for (size_t i = 0; i < k.sizes.size(); ++i) s += fmt::format("{}{}", i ? ", " : " ", sym::str(k.sizes[i]));
  s += fmt::format(") outer({}) axis({})", loops(k.outer), axes[int(k.vector_axis)]);
  if (k.may_fault) s += " fault";
  if (k.serial) s += " serial";
  for (auto& [v, id] : k.indirect) s += fmt::format(" indirect({} = %{})", sym::str(v), id);
  s += ":\n";
  for (auto& st : k.stages) {
    s += fmt::format("  stage inner({})", loops(st.inner));
    for (auto& a : st.accums) {
      s += fmt::format(" acc({} {} ->", to_string(a.kind), to_string(a.type));
      for (int r = 0; r < num_results(a.kind); ++r) s += a.results[r] >= 0 ? fmt::format(" %{}", a.results[r]) : " _";
      s += ")";
    }
    s += ":\n";
    for (auto& i : st.body) s += "    " + text(i) + "\n";
  }
  return s;
}

}  // namespace vitrify::loop
