#include <bit>
#include <cmath>

#include "ir/text.h"

namespace vitrify::ir {

namespace {

class Writer {
 public:
  std::string out;

  void quoted(std::string_view s) {
    out += '"';
    for (unsigned char c : s) {
      if (c == '"' || c == '\\')
        (out += '\\') += static_cast<char>(c);
      else if (c == '\n')
        out += "\\n";
      else if (c < 0x20 || c == 0x7f)
        out += fmt::format("\\x{:02x}", c);
      else
        out += static_cast<char>(c);
    }
    out += '"';
  }

  // The shortest text that reads back as the same bits, and never as an integer.
  void number(double v) {
    if (std::isnan(v)) {
      const uint64_t bits = std::bit_cast<uint64_t>(v);
      if (bits == 0x7ff8000000000000)
        out += "nan";
      else
        out += fmt::format("nan({:#x})", bits);
      return;
    }
    std::string s = fmt::format("{}", v);
    if (s.find_first_of(".ein") == std::string::npos) s += ".0";
    out += s;
  }

  void dims(const Dims& d, char open, char close) {
    out += open;
    for (size_t i = 0; i < d.size(); ++i) {
      if (i) out += ',';
      out += sym::str(d[i]);
    }
    out += close;
  }

  void device(const Device& d) {
    out += name_of(kDeviceNames, d.kind);
    if (d.index != -1) out += fmt::format(":{}", d.index);
  }

  void type(const TensorType& t) {
    out += to_string(t.dtype);
    if (t.opaque_scalar_type) out += fmt::format("<{}>", t.opaque_scalar_type);
    dims(t.sizes, '[', ']');
    if (t.strides != contiguous_strides(t.sizes)) dims(t.strides, '{', '}');
    if (!(t.device == Device{})) {
      out += ' ';
      device(t.device);
    }
    if (t.wrapped_number) out += " wrapped";
  }

  void value(const Value& v) {
    if (!v) {
      out += "undefined";
      return;
    }
    out += fmt::format("%{}", v.node->id);
    if (v.index) out += fmt::format(".{}", v.index);
  }

  void integer(Int i) {
    const std::string s = sym::str(i);
    DType t;
    // A symbol such as u8 or i32 is spelled like a dtype.
    out += parse_dtype(s, t) ? "(" + s + ")" : s;
  }

  void complex(const Complex& c) {
    out += "complex(";
    number(c.re);
    out += ", ";
    number(c.im);
    out += ')';
  }

  template <class T, class F>
  void list(const std::vector<T>& l, char kind, F&& item) {
    out += '[';
    for (size_t i = 0; i < l.size(); ++i) {
      if (i) out += ", ";
      item(l[i]);
    }
    out += ']';
    if (l.empty()) out += kind;
  }

  void boolean(bool b) { out += b ? "true" : "false"; }

  void arg(const Arg& a) {
    std::visit(
        [&](const auto& v) {
          using T = std::decay_t<decltype(v)>;
          if constexpr (std::is_same_v<T, None>)
            out += "none";
          else if constexpr (std::is_same_v<T, Value>)
            value(v);
          else if constexpr (std::is_same_v<T, std::vector<Value>>)
            list(v, 't', [&](const Value& x) { value(x); });
          else if constexpr (std::is_same_v<T, Int>)
            integer(v);
          else if constexpr (std::is_same_v<T, std::vector<Int>>)
            list(v, 'i', [&](Int x) { out += sym::str(x); });
          else if constexpr (std::is_same_v<T, double>)
            number(v);
          else if constexpr (std::is_same_v<T, std::vector<double>>)
            list(v, 'f', [&](double x) { number(x); });
          else if constexpr (std::is_same_v<T, bool>)
            boolean(v);
          else if constexpr (std::is_same_v<T, std::vector<bool>>)
            list(v, 'b', [&](bool x) { boolean(x); });
          else if constexpr (std::is_same_v<T, std::string>)
            quoted(v);
          else if constexpr (std::is_same_v<T, std::vector<Complex>>)
            list(v, 'c', [&](const Complex& x) { complex(x); });
          else if constexpr (std::is_same_v<T, Complex>)
            complex(v);
          else if constexpr (std::is_same_v<T, DType>)
            out += to_string(v);
          else if constexpr (std::is_same_v<T, Device>)
            device(v);
          else if constexpr (std::is_same_v<T, MemoryFormat>)
            out += name_of(kMemoryFormatNames, v);
          else if constexpr (std::is_same_v<T, Layout>)
            out += name_of(kLayoutNames, v);
          else
            out += fmt::format("opaque({})", v.index);
        },
        a);
  }

  void node(const Node& n) {
    out += fmt::format("%{}: ", n.id);
    const bool tuple = n.outs.size() != 1;
    if (tuple) out += '(';
    for (size_t i = 0; i < n.outs.size(); ++i) {
      if (i) out += ", ";
      type(n.outs[i]);
    }
    if (tuple) out += ')';
    out += " = ";
    out += n.op->name;
    out += '(';
    for (size_t i = 0; i < n.args.size(); ++i) {
      if (i) out += ", ";
      arg(n.args[i]);
    }
    out += ')';
    for (const auto& [bit, name] : kFlagNames)
      if (n.op->flags & bit) (out += " !") += name;
    if (n.as_contiguous) out += " @contiguous";
  }

  void range_end(int64_t v, int64_t unbounded) { out += v == unbounded ? "*" : std::to_string(v); }

  void symbol(Int s, const sym::Symbol& info) {
    out += sym::str(s);
    if (info.hint) out += fmt::format(" hint={}", *info.hint);
    const sym::Range all;
    if (info.range.lo != all.lo || info.range.hi != all.hi) {
      out += " range=[";
      range_end(info.range.lo, all.lo);
      out += ',';
      range_end(info.range.hi, all.hi);
      out += ']';
    }
    if (info.multiple_of != 1) out += fmt::format(" multiple={}", info.multiple_of);
  }
};

// One past the highest symbol id the graph mentions: symbols are dense, so that all below it are printed.
size_t symbols_used(const Graph& g, sym::Context& ctx) {
  size_t n = 0;
  std::vector<Int> found;
  auto look = [&](Int e) {
    if (e.is_const()) return;
    found.clear();
    sym::free_symbols(e, found);
    for (Int s : found) n = std::max(n, static_cast<size_t>(ctx.symbol_info(s).id) + 1);
  };
  for (const Node* node : g.nodes()) {
    for (const TensorType& t : node->outs) {
      for (Int s : t.sizes) look(s);
      for (Int s : t.strides) look(s);
    }
    for (const Arg& a : node->args) {
      if (auto* i = std::get_if<Int>(&a)) look(*i);
      if (auto* l = std::get_if<std::vector<Int>>(&a))
        for (Int i : *l) look(i);
    }
  }
  return n;
}

}  // namespace

std::string print(const Node& n) {
  Writer w;
  w.node(n);
  return std::move(w.out);
}

std::string print(const Graph& g) {
  Writer w;
  w.out += "graph @";
  const bool plain =
      !g.name.empty() && std::all_of(g.name.begin(), g.name.end(), [](unsigned char c) { return std::isalnum(c) || c == '_' || c == '.'; });
  if (plain)
    w.out += g.name;
  else
    w.quoted(g.name);
  w.out += '(';
  for (size_t i = 0; i < g.inputs.size(); ++i) {
    const Input& in = g.inputs[i];
    if (i) w.out += ", ";
    w.value(in.value);
    w.out += ": ";
    w.type(in.value.type());
    w.out += ' ';
    w.out += name_of(kInputKindNames, in.kind);
    w.out += ' ';
    w.quoted(in.name);
  }
  w.out += ')';
  const auto shared = g.shared_ctx();
  if (const size_t n = symbols_used(g, *shared)) {
    w.out += " syms(";
    for (uint32_t i = 0; i < n; ++i) {
      if (i) w.out += ", ";
      const Int s = shared->symbol_at(i);
      w.symbol(s, shared->symbol_info(s));
    }
    w.out += ')';
  }
  if (!g.constants.empty()) w.out += fmt::format(" constants({})", g.constants.size());
  w.out += " {\n";
  for (const Node* n : g.nodes()) {
    if (is_input(*n)) continue;
    w.out += "  ";
    w.node(*n);
    if (n->source < g.sources.size() && !g.sources[n->source].empty()) {
      w.out += "  # ";
      for (char c : g.sources[n->source]) {
        if (c == '\n')
          w.out += "\\n";
        else if (c == '\\')
          w.out += "\\\\";
        else
          w.out += c;
      }
    }
    w.out += '\n';
  }
  w.out += "  return";
  for (size_t i = 0; i < g.outputs.size(); ++i) {
    w.out += i ? ", " : " ";
    w.value(g.outputs[i]);
  }
  w.out += "\n}\n";
  return std::move(w.out);
}

}  // namespace vitrify::ir
