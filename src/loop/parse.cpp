#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <unordered_map>

#include "loop/loop.h"

namespace vitrify::loop {
namespace {

class Parser {
 public:
  Parser(std::string_view text, std::shared_ptr<sym::Context> ctx) : s_(text), ctx_(std::move(ctx)) {}

  Kernel run() {
    Kernel k;
    k.ctx = ctx_;
    expect("kernel");
    k.name = word("(");
    expect("(");
    while (!eat(";") && !peek(")")) {
      if (!k.buffers.empty()) expect(",");
      k.buffers.push_back(buffer());
    }
    while (!eat(")")) {
      if (!k.sizes.empty()) expect(",");
      k.sizes.push_back(expr(",)"));
    }
    expect("outer");
    for (auto& l : loops()) k.outer.push_back(l);
    expect("axis");
    expect("(");
    auto axis = word(")");
    expect(")");
    k.vector_axis = axis == "inner"   ? VectorAxis::Inner
                    : axis == "outer" ? VectorAxis::Outer
                    : axis == "none"  ? VectorAxis::None
                    : axis == "tile"  ? VectorAxis::Tile
                                      : fail<VectorAxis>("an axis");
    k.may_fault = eat("fault");
    k.serial = eat("serial");
    while (eat("indirect")) {
      expect("(");
      Int v = expr("=");
      expect("=");
      k.indirect.emplace_back(v, value());
      expect(")");
    }
    expect(":");
    while (eat("stage")) k.stages.push_back(stage());
    skip();
    if (p_ != s_.size()) fail<int>("the end");
    k.num_values = max_value_ + 1;
    return k;
  }

 private:
  template <class T>
  T fail(std::string_view wanted) {
    size_t line = 1 + std::count(s_.begin(), s_.begin() + p_, '\n');
    throw InternalError(fmt::format("loop IR, line {}: expected {} at '{}'", line, wanted, s_.substr(p_, 30)));
  }
  void skip() {
    while (p_ < s_.size() && isspace(static_cast<unsigned char>(s_[p_]))) ++p_;
  }
  bool eat(std::string_view t) {
    skip();
    if (s_.substr(p_, t.size()) != t) return false;
    bool letter = isalnum(static_cast<unsigned char>(t.back()));
    if (letter && p_ + t.size() < s_.size() && (isalnum(static_cast<unsigned char>(s_[p_ + t.size()])) || s_[p_ + t.size()] == '_')) return false;
    p_ += t.size();
    return true;
  }
  void expect(std::string_view t) {
    if (!eat(t)) fail<int>(fmt::format("'{}'", t));
  }
  std::string word(std::string_view stops) {
    skip();
    size_t b = p_;
    while (p_ < s_.size() && !isspace(static_cast<unsigned char>(s_[p_])) && stops.find(s_[p_]) == stops.npos) ++p_;
    if (b == p_) fail<int>("a word");
    return std::string(s_.substr(b, p_ - b));
  }
  // An expression up to one of `stops` outside parentheses.
  Int expr(std::string_view stops) {
    skip();
    size_t b = p_;
    for (int depth = 0; p_ < s_.size(); ++p_) {
      char c = s_[p_];
      if (depth == 0 && stops.find(c) != stops.npos) break;
      depth += c == '(' ? 1 : c == ')' ? -1 : 0;
    }
    auto text = s_.substr(b, p_ - b);
    while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
    auto e = sym::parse(*ctx_, text);
    if (!e) {
      p_ = b;
      fail<int>("an expression");
    }
    return *e;
  }
  DType dtype() {
    DType t;
    if (!parse_dtype(word("*,)"), t)) fail<int>("a type");
    return t;
  }
  int64_t integer() {
    skip();
    int64_t v = 0;
    auto [end, ec] = std::from_chars(s_.data() + p_, s_.data() + s_.size(), v);
    if (ec != std::errc()) fail<int>("an integer");
    p_ = end - s_.data();
    return v;
  }
  int32_t value() {
    expect("%");
    int32_t v = int32_t(integer());
    max_value_ = std::max(max_value_, v);
    return v;
  }
  Buffer buffer() {
    Buffer b;
    auto kind = word("*");
    b.kind = kind == "in"        ? BufferKind::In
             : kind == "out"     ? BufferKind::Out
             : kind == "inout"   ? BufferKind::InOut
             : kind == "scratch" ? BufferKind::Scratch
                                 : fail<BufferKind>("a buffer kind");
    b.dtype = dtype();
    expect("*");
    word("");
    expect("extent");
    expect("(");
    b.extent = expr(")");
    expect(")");
    if (eat("inplace")) {
      expect("(");
      skip();
      if (p_ < s_.size() && s_[p_] == 'b') ++p_;
      fail_unless_digit();
      b.inplace_of = int32_t(integer());
      expect(")");
    }
    return b;
  }
  std::vector<Loop> loops() {
    std::vector<Loop> list;
    expect("(");
    while (!eat(")")) {
      if (!list.empty()) expect(",");
      Loop l;
      l.var = expr("<");
      expect("<");
      l.extent = expr(",)");
      list.push_back(l);
    }
    return list;
  }
  Stage stage() {
    Stage st;
    expect("inner");
    for (auto& l : loops()) st.inner.push_back(l);
    while (eat("acc")) {
      expect("(");
      Accum a;
      auto name = word(" ");
      int kind = 0;
      while (kind <= int(AccumKind::Moments) && to_string(AccumKind(kind)) != name) ++kind;
      if (kind > int(AccumKind::Moments)) fail<int>("an accumulator kind");
      a.kind = AccumKind(kind);
      a.type = dtype();
      expect("->");
      for (int r = 0; r < num_results(a.kind); ++r)
        if (!eat("_")) a.results[r] = value();
      expect(")");
      st.accums.push_back(a);
    }
    expect(":");
    for (skip(); p_ < s_.size() && !peek("stage"); skip()) st.body.push_back(instr());
    return st;
  }
  bool peek(std::string_view t) {
    size_t at = p_;
    bool r = eat(t);
    p_ = at;
    return r;
  }
  void fail_unless_digit() {
    if (p_ >= s_.size() || !isdigit(static_cast<unsigned char>(s_[p_]))) fail<int>("a buffer");
  }
  Instr instr() {
    Instr i{};
    if (peek("%")) {
      i.result = value();
      expect("=");
    }
    auto name = word(" ");
    static const auto table = [] {
      std::unordered_map<std::string, Op> t;
#define _(n, a, c) t[#n] = Op::n;
      VT_LOOP_OPS(_)
#undef _
      return t;
    }();
    auto it = table.find(name);
    if (it == table.end()) fail<int>(fmt::format("an operation, not '{}',", name));
    i.op = it->second;
    i.type = dtype();
    switch (i.op) {
      case Op::constant:
        if (is_float(i.type)) {
          i.fimm = std::strtod(word("").c_str(), nullptr);
        } else {
          i.iimm = integer();
        }
        return i;
      case Op::index:
        expect("[");
        i.at = expr("]");
        expect("]");
        return i;
      case Op::load:
      case Op::load_bit:
        place_buffer(i);
        if (eat("mask")) {
          i.a = value();
          expect("else");
          i.b = value();
        }
        return i;
      case Op::store:
      case Op::store_add:
        place_buffer(i);
        expect("=");
        i.a = value();
        if (eat("mask")) i.b = value();
        return i;
      case Op::check_index:
        i.a = value();
        expect("<");
        expect("[");
        i.at = expr("]");
        expect("]");
        if (eat("mask")) i.b = value();
        return i;
      case Op::reduce:
        skip();
        if (s_.substr(p_, 3) != "acc") fail<int>("an accumulator");
        p_ += 3;
        i.iimm = integer();
        i.a = value();
        if (eat("at")) i.b = value();
        if (eat("mask")) i.c = value();
        return i;
      default:
        break;
    }
    int32_t* operands[] = {&i.a, &i.b, &i.c};
    for (int n = 0; n < arity(i.op); ++n) *operands[n] = value();
    return i;
  }
  void place_buffer(Instr& i) {
    skip();
    if (p_ >= s_.size() || s_[p_] != 'b') fail<int>("a buffer");
    ++p_;
    fail_unless_digit();
    i.buf = uint32_t(integer());
    expect("[");
    i.at = expr("]");
    expect("]");
  }

  std::string_view s_;
  std::shared_ptr<sym::Context> ctx_;
  size_t p_ = 0;
  int32_t max_value_ = -1;
};

}  // namespace

Kernel parse(std::string_view text, std::shared_ptr<sym::Context> ctx) { return Parser(text, std::move(ctx)).run(); }

}  // namespace vitrify::loop
