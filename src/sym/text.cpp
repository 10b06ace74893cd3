// str and parse.
#include <cctype>

#include "sym/node.h"

namespace vitrify::sym {

namespace {

char letter(SymbolKind k) {
  switch (k) {
    case SymbolKind::Size:
      return 's';
    case SymbolKind::Unbacked:
      return 'u';
    case SymbolKind::Loop:
      return 'i';
    default:
      return 'v';
  }
}

void print(Int e, std::string& out);

// As the operand of // or %, or as a factor: anything but a symbol and a plain number goes into parentheses.
void print_operand(Int e, std::string& out) {
  const bool plain = e.is_const() ? e.value() >= 0 : e.node()->kind == Kind::Symbol || e.node()->kind == Kind::Min || e.node()->kind == Kind::Max;
  if (!plain) out += '(';
  print(e, out);
  if (!plain) out += ')';
}

void print_atom(const Node* n, std::string& out) {
  switch (n->kind) {
    case Kind::Symbol:
      out += letter(n->ctx->symbols[n->symbol].kind);
      out += std::to_string(n->symbol);
      return;
    case Kind::FloorDiv:
    case Kind::Mod:
      print_operand(n->a, out);
      out += n->kind == Kind::Mod ? "%" : "//";
      print_operand(n->b, out);
      return;
    default:
      out += n->kind == Kind::Min ? "min(" : "max(";
      print(n->a, out);
      out += ", ";
      print(n->b, out);
      out += ')';
  }
}

// Nobody reads more, and an expression whose parts repeat may stand for a text without end.
constexpr size_t kLongest = 1 << 20;

void print(Int e, std::string& out) {
  if (out.size() > kLongest) return;
  if (e.is_const()) {
    out += std::to_string(e.value());
    return;
  }
  if (e.node()->kind != Kind::Sum) return print_atom(e.node(), out);
  const Poly& p = e.node()->sum;
  bool first = true;
  for (const Term& t : p.terms) {
    uint64_t magnitude = t.coef < 0 ? 0 - static_cast<uint64_t>(t.coef) : static_cast<uint64_t>(t.coef);
    if (first)
      out += t.coef < 0 ? "-" : "";
    else
      out += t.coef < 0 ? " - " : " + ";
    first = false;
    bool star = magnitude != 1;
    if (star) out += std::to_string(magnitude);
    for (const Node* a : t.atoms) {
      if (star) out += '*';
      star = true;
      if (magnitude == 1 && t.atoms.size() == 1 && t.coef > 0)
        print_atom(a, out);
      else
        print_operand(Int(a), out);
    }
  }
  if (p.k) {
    uint64_t magnitude = p.k < 0 ? 0 - static_cast<uint64_t>(p.k) : static_cast<uint64_t>(p.k);
    out += p.k < 0 ? " - " : " + ";
    out += std::to_string(magnitude);
  }
}

class Parser {
 public:
  Parser(Context& ctx, std::string_view s) : ctx_(ctx), s_(s) {}
  std::optional<Int> run() {
    auto e = sum();
    skip();
    return e && i_ == s_.size() ? e : std::nullopt;
  }

 private:
  void skip() {
    while (i_ < s_.size() && (s_[i_] == ' ' || s_[i_] == '\t')) ++i_;
  }
  bool eat(std::string_view t) {
    skip();
    if (s_.substr(i_).substr(0, t.size()) != t) return false;
    i_ += t.size();
    return true;
  }
  // The least int64 has no positive counterpart: a number that long is read together with its sign.
  bool long_number() {
    skip();
    size_t j = i_;
    while (j < s_.size() && std::isdigit(static_cast<unsigned char>(s_[j]))) ++j;
    return j - i_ >= 19;
  }
  std::optional<Int> sum() {
    if (++depth_ > 200) return {};
    auto signed_product = [&]() -> std::optional<Int> {
      if (long_number()) return product(true);
      auto e = product(false);
      return e ? std::optional<Int>(-*e) : e;
    };
    std::optional<Int> a = eat("-") ? signed_product() : product(false);
    while (a) {
      const bool plus = eat("+");
      if (!plus && !eat("-")) break;
      auto b = plus ? product(false) : signed_product();
      if (!b) return {};
      a = *a + *b;
    }
    --depth_;
    return a;
  }
  std::optional<Int> product(bool negative) {
    auto a = factor(negative);
    while (a) {
      const bool mul = eat("*"), div = !mul && eat("//"), rem = !mul && !div && eat("%");
      if (!mul && !div && !rem) break;
      auto b = factor(false);
      if (!b || (!mul && b->is(0))) return {};
      a = mul ? *a * *b : div ? floordiv(*a, *b) : sym::mod(*a, *b);
    }
    return a;
  }
  std::optional<Int> factor(bool negative) {
    skip();
    if (i_ >= s_.size()) return {};
    const char c = s_[i_];
    if (std::isdigit(static_cast<unsigned char>(c))) return number(negative);
    if (eat("(")) {
      auto e = sum();
      return e && eat(")") ? e : std::nullopt;
    }
    for (bool is_min : {true, false}) {
      if (!eat(is_min ? "min(" : "max(")) continue;
      auto a = sum();
      if (!a || !eat(",")) return {};
      auto b = sum();
      if (!b || !eat(")")) return {};
      return is_min ? sym::min(*a, *b) : sym::max(*a, *b);
    }
    if (c != 's' && c != 'u' && c != 'i' && c != 'v') return {};
    ++i_;
    if (i_ >= s_.size() || !std::isdigit(static_cast<unsigned char>(s_[i_]))) return {};
    auto id = number(false);
    if (!id || id->value() >= static_cast<int64_t>(ctx_.num_symbols())) return {};
    Int s = ctx_.symbol_at(static_cast<uint32_t>(id->value()));
    return letter(ctx_.symbol_info(s).kind) == c ? std::optional<Int>(s) : std::nullopt;
  }
  std::optional<Int> number(bool negative) {
    int64_t v = 0;
    for (; i_ < s_.size() && std::isdigit(static_cast<unsigned char>(s_[i_])); ++i_) {
      const int64_t d = s_[i_] - '0';
      if (__builtin_mul_overflow(v, 10, &v) || __builtin_add_overflow(v, negative ? -d : d, &v)) return {};
    }
    return v;
  }

  Context& ctx_;
  std::string_view s_;
  size_t i_ = 0;
  int depth_ = 0;
};

}  // namespace

std::string str(Int e) {
  std::string out;
  print(e, out);
  return out;
}

std::optional<Int> parse(Context& ctx, std::string_view text) {
  try {
    return Parser(ctx, text).run();
  } catch (const Error&) {
    return {};  // a number that does not fit
  }
}

}  // namespace vitrify::sym
