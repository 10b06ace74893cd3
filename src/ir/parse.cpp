// Reader of the text form (docs/text-ir.md).
#include <bit>
#include <charconv>
#include <cmath>
#include <limits>

#include "ir/text.h"

namespace vitrify::ir {

using Outs = boost::container::small_vector<TensorType, 1>;

namespace {
struct LocatedError : Error {
  using Error::Error;
};
}  // namespace

class TextReader {
 public:
  explicit TextReader(std::string_view text) : s_(text) {}

  Graph run() {
    while (s_.substr(i_, 1) == "#") {  // what a reproducer says about itself
      const size_t end = s_.find('\n', i_);
      i_ = end == std::string_view::npos ? s_.size() : end + 1;
    }
    try {
      return graph();
    } catch (const LocatedError&) {
      throw;
    } catch (const Error& e) {
      fail(e.what());  // from below: a size that overflows
    }
  }

 private:
  Graph graph() {
    space();
    want("graph");
    want("@");
    g_.name = peek() == '"' ? quoted() : std::string(word());
    // Types of inputs mention symbols that are declared after them.
    const size_t inputs_at = i_;
    skip_parentheses();
    const size_t after_inputs = i_;
    if (eat("syms")) symbols();
    const size_t body_at = i_;
    i_ = inputs_at;
    inputs();
    if (i_ != after_inputs) fail("misplaced parenthesis in the inputs");
    i_ = body_at;
    if (eat("constants")) {
      want("(");
      const int64_t n = integer_literal();
      if (n < 0 || n > 1'000'000) fail("not a number of constants");
      g_.constants.resize(static_cast<size_t>(n));
      want(")");
    }
    want("{");
    body();
    want("}");
    space();
    if (i_ != s_.size()) fail("text after the graph");
    return std::move(g_);
  }

  [[noreturn]] void fail(const std::string& what) const { fail_at(i_, what); }
  [[noreturn]] void fail_at(size_t at, const std::string& what) const {
    size_t line = 1, column = 1;
    for (size_t i = 0; i < at && i < s_.size(); ++i) {
      if (s_[i] == '\n')
        ++line, column = 1;
      else
        ++column;
    }
    throw LocatedError(fmt::format("{}:{}: {}", line, column, what));
  }

  // --- tokens
  void space() {
    while (i_ < s_.size() && (s_[i_] == ' ' || s_[i_] == '\t' || s_[i_] == '\n' || s_[i_] == '\r')) ++i_;
  }
  char peek() {
    space();
    return i_ < s_.size() ? s_[i_] : '\0';
  }
  static bool word_char(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '.' || c == ':'; }
  bool eat(std::string_view t) {
    space();
    if (s_.substr(i_, t.size()) != t) return false;
    // a word must end where t ends
    if (std::isalpha(static_cast<unsigned char>(t.back())) && i_ + t.size() < s_.size() && word_char(s_[i_ + t.size()])) return false;
    i_ += t.size();
    return true;
  }
  void want(std::string_view t) {
    if (!eat(t)) fail(fmt::format("'{}' expected", t));
  }
  std::string_view word() {
    space();
    const size_t b = i_;
    while (i_ < s_.size() && word_char(s_[i_])) ++i_;
    if (b == i_) fail("a name expected");
    return s_.substr(b, i_ - b);
  }
  int64_t integer_literal() {
    space();
    int64_t v = 0;
    auto [end, err] = std::from_chars(s_.data() + i_, s_.data() + s_.size(), v);
    if (err != std::errc()) fail("an integer expected");
    i_ = static_cast<size_t>(end - s_.data());
    return v;
  }
  uint32_t small_literal(int64_t limit) {
    const size_t at = i_;
    const int64_t v = integer_literal();
    if (v < 0 || v > limit) fail_at(at, "number out of range");
    return static_cast<uint32_t>(v);
  }
  std::string quoted() {
    want("\"");
    std::string out;
    for (;;) {
      if (i_ >= s_.size() || s_[i_] == '\n') fail("unfinished string");
      const char c = s_[i_++];
      if (c == '"') return out;
      if (c != '\\') {
        out += c;
        continue;
      }
      const char e = i_ < s_.size() ? s_[i_++] : '\0';
      if (e == 'n') {
        out += '\n';
      } else if (e == '"' || e == '\\') {
        out += e;
      } else if (e == 'x') {
        uint8_t v = 0;
        const size_t end = std::min(i_ + 2, s_.size());
        auto r = std::from_chars(s_.data() + i_, s_.data() + end, v, 16);
        if (r.ec != std::errc() || r.ptr != s_.data() + i_ + 2) fail("two hexadecimal digits expected");
        i_ += 2;
        out += static_cast<char>(v);
      } else {
        fail("unknown escape");
      }
    }
  }
  void skip_parentheses() {
    want("(");
    for (int depth = 1; depth > 0;) {
      if (i_ >= s_.size()) fail("')' expected");
      const char c = s_[i_];
      if (c == '"') {
        quoted();
        continue;
      }
      depth += (c == '(') - (c == ')');
      ++i_;
    }
  }
  // Text up to the next separator outside parentheses, without the blanks around it.
  std::string_view until_separator() {
    space();
    const size_t b = i_;
    int depth = 0;
    for (; i_ < s_.size(); ++i_) {
      const char c = s_[i_];
      if (c == '(') ++depth;
      if (depth == 0 && (c == ',' || c == ')' || c == ']' || c == '}' || c == '#')) break;
      if (c == ')') --depth;
      if (c == '\n' || c == '"') break;
    }
    size_t e = i_;
    while (e > b && (s_[e - 1] == ' ' || s_[e - 1] == '\t')) --e;
    if (e == b) fail("a value expected");
    return s_.substr(b, e - b);
  }

  // --- pieces
  Int expression() {
    space();
    const size_t at = i_;
    const std::string_view t = until_separator();
    auto e = sym::parse(g_.ctx(), t);
    if (!e) fail_at(at, fmt::format("'{}' is not an integer expression", t.substr(0, 60)));
    return *e;
  }
  Dims dims(std::string_view open, std::string_view close) {
    want(open);
    Dims d;
    if (eat(close)) return d;
    do d.push_back(expression());
    while (eat(","));
    want(close);
    return d;
  }
  bool device_name(std::string_view w, Device& d) {
    const size_t colon = w.find(':');
    if (!find_name(kDeviceNames, w.substr(0, colon), d.kind)) return false;
    d.index = -1;
    if (colon == std::string_view::npos) return true;
    const std::string_view digits = w.substr(colon + 1);
    auto r = std::from_chars(digits.data(), digits.data() + digits.size(), d.index);
    return r.ec == std::errc() && r.ptr == digits.data() + digits.size();
  }
  TensorType type() {
    TensorType t;
    space();
    const size_t at = i_;
    const std::string_view name = word();
    if (!parse_dtype(name, t.dtype)) fail_at(at, fmt::format("unknown dtype '{}'", name.substr(0, 60)));
    if (eat("<")) {
      t.opaque_scalar_type = static_cast<uint8_t>(small_literal(255));
      want(">");
    }
    t.sizes = dims("[", "]");
    t.strides = peek() == '{' ? dims("{", "}") : contiguous_strides(t.sizes);
    if (t.strides.size() != t.sizes.size()) fail_at(at, "sizes and strides differ in length");
    const size_t next = i_;
    if (std::isalpha(static_cast<unsigned char>(peek()))) {
      if (!device_name(word(), t.device)) t.device = {}, i_ = next;
    }
    t.wrapped_number = eat("wrapped");
    return t;
  }
  uint32_t id() {
    want("%");
    return small_literal(std::numeric_limits<uint32_t>::max() - 1);
  }
  Value value() {
    if (eat("undefined")) return {};
    space();
    const size_t at = i_;
    const uint32_t n = id();
    Value v;
    if (auto it = values_.find(n); it != values_.end()) v.node = it->second;
    if (!v) fail_at(at, fmt::format("%{} is not defined", n));
    if (i_ < s_.size() && s_[i_] == '.') {
      ++i_;
      v.index = small_literal(1 << 20);
    }
    if (v.index >= v.node->outs.size()) fail_at(at, fmt::format("%{} has no result {}", n, v.index));
    return v;
  }
  void symbols() {
    want("(");
    do {
      space();
      const size_t at = i_;
      const std::string_view name = word();
      constexpr std::pair<sym::SymbolKind, std::string_view> kinds[] = {
          {sym::SymbolKind::Size, "s"}, {sym::SymbolKind::Unbacked, "u"}, {sym::SymbolKind::Loop, "i"}, {sym::SymbolKind::Indirect, "v"}};
      sym::SymbolKind kind;
      if (!find_name(kinds, name.substr(0, 1), kind) || name.substr(1) != std::to_string(g_.ctx().num_symbols()))
        fail_at(at, fmt::format("symbol number {} expected", g_.ctx().num_symbols()));
      std::optional<int64_t> hint;
      sym::Range range;
      int64_t multiple = 1;
      if (eat("hint=")) hint = integer_literal();
      if (eat("range=")) {
        want("[");
        if (!eat("*")) range.lo = integer_literal();
        want(",");
        if (!eat("*")) range.hi = integer_literal();
        want("]");
        if (range.lo > range.hi) fail_at(at, "empty range");
      }
      if (eat("multiple=")) multiple = integer_literal();
      if (multiple < 1) fail_at(at, "a multiple is at least 1");
      Int s = g_.ctx().symbol(kind, hint, range);
      g_.ctx().mutable_symbol_info(s).multiple_of = multiple;
    } while (eat(","));
    want(")");
  }
  Node* make(size_t at, uint32_t n, const Op* op, std::vector<Arg> args, Outs outs) {
    if (values_.contains(n)) fail_at(at, fmt::format("%{} is defined twice", n));
    Node* node = g_.make(n, op, std::move(args), std::move(outs));
    values_.emplace(n, node);
    return node;
  }
  void inputs() {
    want("(");
    if (eat(")")) return;
    do {
      space();
      const size_t at = i_;
      const uint32_t n = id();
      want(":");
      TensorType t = type();
      Input in;
      const std::string_view kind = word();
      if (!find_name(kInputKindNames, kind, in.kind)) fail(fmt::format("unknown kind of input '{}'", kind.substr(0, 60)));
      in.name = quoted();
      Node* node = make(at, n, g_.op("graph::input"), {Int(static_cast<int64_t>(g_.inputs.size()))}, {std::move(t)});
      in.value = node->out();
      g_.add_header(node);
      g_.inputs.push_back(std::move(in));
    } while (eat(","));
    want(")");
  }

  // --- arguments
  std::optional<double> number(std::string_view t) {
    double v = 0;
    auto r = std::from_chars(t.data(), t.data() + t.size(), v);
    if (r.ptr == t.data() + t.size() && r.ec == std::errc() && t.find_first_of(".ein") != std::string_view::npos && !std::isnan(v)) return v;
    if (t == "nan") return std::bit_cast<double>(uint64_t{0x7ff8000000000000});
    if (t.starts_with("nan(0x") && t.ends_with(")")) {
      uint64_t bits = 0;
      const char* end = t.data() + t.size() - 1;
      auto b = std::from_chars(t.data() + 6, end, bits, 16);
      if (b.ec == std::errc() && b.ptr == end && std::isnan(std::bit_cast<double>(bits))) return std::bit_cast<double>(bits);
    }
    return {};
  }
  double want_number() {
    space();
    const size_t at = i_;
    auto v = number(until_separator());
    if (!v) fail_at(at, "a number with a point or exponent expected");
    return *v;
  }
  Arg list() {
    want("[");
    space();
    if (eat("]")) {
      const char kind = i_ < s_.size() ? s_[i_] : '\0';
      ++i_;
      switch (kind) {
        case 't':
          return std::vector<Value>{};
        case 'i':
          return std::vector<Int>{};
        case 'f':
          return std::vector<double>{};
        case 'b':
          return std::vector<bool>{};
        case 'c':
          return std::vector<Complex>{};
        default:
          --i_;
          fail("an empty list names its kind: []t, []i, []f, []b or []c");
      }
    }
    Arg out;
    const size_t at = i_;
    if (peek() == '%' || eat("undefined")) {
      i_ = at;
      items<Value>(out, [&] { return value(); });
    } else if (eat("true") || eat("false")) {
      i_ = at;
      items<bool>(out, [&] {
        if (eat("true")) return true;
        want("false");
        return false;
      });
    } else if (eat("complex")) {
      i_ = at;
      items<Complex>(out, [&] { return complex(); });
    } else if (number(until_separator())) {
      i_ = at;
      items<double>(out, [&] { return want_number(); });
    } else {
      i_ = at;
      items<Int>(out, [&] { return expression(); });
    }
    want("]");
    return out;
  }
  template <class T, class F>
  void items(Arg& out, F&& item) {
    std::vector<T> v;
    do v.push_back(item());
    while (eat(","));
    out = std::move(v);
  }
  Complex complex() {
    want("complex");
    want("(");
    Complex c{};
    c.re = want_number();
    want(",");
    c.im = want_number();
    want(")");
    return c;
  }
  Arg arg() {
    const char c = peek();
    if (c == '%') return value();
    if (c == '[') return list();
    if (c == '"') return quoted();
    const size_t at = i_;
    if (eat("none")) return None{};
    if (eat("undefined")) return Value{};
    if (eat("true")) return true;
    if (eat("false")) return false;
    if (eat("complex")) {
      i_ = at;
      return complex();
    }
    if (eat("opaque") && eat("(")) {
      OpaqueArg o{small_literal(std::numeric_limits<uint32_t>::max() - 1)};
      if (o.index >= g_.constants.size()) fail_at(at, fmt::format("there is no constant {}", o.index));
      want(")");
      return o;
    }
    i_ = at;
    const std::string_view t = until_separator();
    DType dtype;
    if (parse_dtype(t, dtype)) return dtype;
    Device device;
    if (device_name(t, device)) return device;
    MemoryFormat format;
    if (find_name(kMemoryFormatNames, t, format)) return format;
    Layout layout;
    if (find_name(kLayoutNames, t, layout)) return layout;
    if (auto v = number(t)) return *v;
    i_ = at;
    return expression();
  }

  // --- body
  void body() {
    for (;;) {
      if (eat("return")) break;
      node();
    }
    const size_t line_end = std::min(s_.find('\n', i_), s_.size());
    if (peek() == '%' || (i_ < line_end && s_.substr(i_).starts_with("undefined"))) {
      do g_.outputs.push_back(value());
      while (eat(","));
    }
  }
  void node() {
    space();
    const size_t at = i_;
    const uint32_t n = id();
    want(":");
    Outs outs;
    if (eat("(")) {
      if (!eat(")")) {
        do outs.push_back(type());
        while (eat(","));
        want(")");
      }
    } else {
      outs.push_back(type());
    }
    want("=");
    space();
    const size_t name_at = i_;
    const std::string_view name = word();
    want("(");
    std::vector<Arg> args;
    if (!eat(")")) {
      do args.push_back(arg());
      while (eat(","));
      want(")");
    }
    uint32_t flags = 0;
    while (eat("!")) {
      const std::string_view f = word();
      uint32_t bit;
      if (!find_name(kFlagNames, f, bit)) fail(fmt::format("unknown flag '{}'", f.substr(0, 60)));
      flags |= bit;
    }
    const bool as_contiguous = eat("@contiguous");
    const bool constant = name == "graph::constant";
    if (name.starts_with("graph::")) {
      const Int* i = constant && args.size() == 1 && outs.size() == 1 ? std::get_if<Int>(&args[0]) : nullptr;
      if (!i || !i->is_const() || i->value() < 0 || i->value() >= static_cast<int64_t>(g_.constants.size()))
        fail_at(name_at, "only graph::constant(i), with i below the number of constants, may stand here");
      if (g_.header_ != g_.order_.size()) fail_at(name_at, "constants come first");
    }
    const Op* op = g_.op(name, flags);
    if (op->flags != flags) fail_at(name_at, fmt::format("{} has other flags than before", name));
    Node* node = make(at, n, op, std::move(args), std::move(outs));
    node->as_contiguous = as_contiguous;
    if (constant)
      g_.add_header(node);
    else
      g_.order_.push_back(node);
    while (i_ < s_.size() && (s_[i_] == ' ' || s_[i_] == '\t')) ++i_;
    if (i_ < s_.size() && s_[i_] == '#') node->source = source();
  }
  uint32_t source() {
    ++i_;
    if (i_ < s_.size() && s_[i_] == ' ') ++i_;
    std::string text;
    for (; i_ < s_.size() && s_[i_] != '\n'; ++i_) {
      if (s_[i_] == '\\' && i_ + 1 < s_.size() && (s_[i_ + 1] == 'n' || s_[i_ + 1] == '\\')) {
        text += s_[++i_] == 'n' ? '\n' : '\\';
      } else {
        text += s_[i_];
      }
    }
    if (text.empty()) return 0;
    auto [it, fresh] = sources_.try_emplace(text, static_cast<uint32_t>(g_.sources.size()));
    if (fresh) g_.sources.push_back(std::move(text));
    return it->second;
  }

  std::string_view s_;
  size_t i_ = 0;
  Graph g_;
  std::unordered_map<uint32_t, Node*> values_;
  std::unordered_map<std::string, uint32_t> sources_;
};

Graph parse(std::string_view text) { return TextReader(text).run(); }

}  // namespace vitrify::ir
