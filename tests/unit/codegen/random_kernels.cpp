// Random kernels: generated code against the interpreter. VITRIFY_FUZZ_SEED and VITRIFY_FUZZ_COUNT choose which and how many.
#include <cmath>

#include "harness.h"

using namespace vitrify;
using namespace vitrify::codegen;
using namespace vitrify::codegen::test;

namespace {

struct Generated {
  std::string text;
  std::vector<int64_t> sizes;
  std::vector<std::string> types;  // per buffer
  std::vector<int64_t> extents;
  int64_t iterations = 0;
};

class Generator {
 public:
  explicit Generator(uint32_t seed) : g_(seed) {}

  Generated make() {
    static const char* axes[] = {"inner", "outer", "none", "inner"};
    bool flat = pick(3) == 0;
    int outer = flat ? 0 : 1 + pick(3), inner = flat ? 1 + pick(3) : pick(3);
    Generated k;
    // s0..s2 sizes; loops i3...
    for (int i = 0; i < 3; ++i) k.sizes.push_back(i == 2 ? std::vector<int64_t>{1, 5, 16, 33, 70}[pick(5)] : 1 + pick(6));
    std::vector<int64_t> extent;
    std::string outer_text, inner_text[3];
    int stages = flat ? 1 : 1 + pick(3);
    int next = 3;
    auto loops = [&](int n, std::string& text, std::vector<std::string>& vars, std::vector<int64_t>& ext, std::vector<std::string>& ext_text) {
      for (int i = 0; i < n; ++i) {
        bool symbolic = pick(2);
        int s = i + 1 == n ? 2 : pick(2);
        int64_t e = symbolic ? k.sizes[s] : std::vector<int64_t>{1, 2, 3, 8, 17, 35}[pick(i + 1 == n ? 6 : 4)];
        vars.push_back("i" + std::to_string(next++));
        ext.push_back(e);
        ext_text.push_back(symbolic ? "s" + std::to_string(s) : std::to_string(e));
        text += (text.empty() ? "" : ", ") + vars.back() + " < " + ext_text.back();
      }
    };
    std::vector<std::string> ovars, oext_text;
    std::vector<int64_t> oext;
    loops(outer, outer_text, ovars, oext, oext_text);
    k.iterations = 1;
    for (auto e : oext) k.iterations *= e;
    static const char* types[] = {"f32", "f32", "bf16", "f16", "f64", "i32", "i64", "u8", "b8"};
    std::string body;
    std::vector<std::pair<std::string, std::string>> scope;  // id, compute type; visible to all later stages
    std::vector<std::string> buffers;
    for (int st = 0; st < stages; ++st) {
      std::vector<std::string> vars = ovars, ext_text = oext_text;
      std::vector<int64_t> ext = oext;
      std::string text;
      int n = flat ? inner : pick(3) == 0 ? 0 : inner;
      loops(n, text, vars, ext, ext_text);
      if (flat)
        for (auto e : ext) k.iterations *= e;
      auto local = scope;
      std::string code;
      auto emit = [&](const std::string& type, const std::string& rhs) {
        std::string id = "%" + std::to_string(values_++);
        code += "      " + id + " = " + rhs + "\n";
        local.emplace_back(id, type);
        return id;
      };
      auto compute = [](const std::string& t) { return t == "bf16" || t == "f16" ? std::string("f32") : t; };
      auto buffer = [&](const std::string& kind, const std::string& type, int64_t extent) {
        buffers.push_back(kind + " " + type + "* b" + std::to_string(buffers.size()) + " extent(" + std::to_string(extent) + ")");
        k.types.push_back(type);
        k.extents.push_back(extent);
        return buffers.size() - 1;
      };
      // an index into a buffer of its own: a permutation of some of the loops, dense when `dense`
      auto place = [&](bool dense, size_t count, int64_t& extent) {
        std::vector<size_t> order(count);
        for (size_t i = 0; i < count; ++i) order[i] = i;
        if (pick(3) == 0) std::shuffle(order.begin(), order.end(), g_);
        std::string at;
        extent = 1;
        for (size_t i = count; i-- > 0;) {
          size_t v = order[i];
          if (!dense && pick(4) == 0) continue;
          std::string term = vars[v];
          int64_t e = ext[v];
          if (!dense && pick(5) == 0) {
            int d = 2 + pick(3);
            term = pick(2) ? "(" + vars[v] + "//" + std::to_string(d) + ")" : "((" + vars[v] + " + 1) % " + std::to_string(d) + ")";
            e = std::max<int64_t>(d, (e - 1) / d + 1);
          }
          if (!dense && pick(6) == 0) term = "(" + std::to_string(e - 1) + " - " + term + ")";
          at += (at.empty() ? "" : " + ") + std::to_string(extent) + "*" + term;
          extent *= e;
        }
        return at.empty() ? "0" : at;
      };
      int loads = 1 + pick(3);
      for (int i = 0; i < loads; ++i) {
        std::string t = types[pick(9)];
        int64_t e;
        std::string at = place(false, vars.size(), e);
        auto b = buffer("in", t, std::max<int64_t>(e, 1));
        emit(compute(t), "load " + compute(t) + " b" + std::to_string(b) + "[" + at + "]");
      }
      auto some = [&](const std::string& type) -> std::string {
        std::vector<std::string> fit;
        for (auto& [id, t] : local)
          if (t == type) fit.push_back(id);
        if (fit.empty() || pick(8) == 0)
          return emit(type, "constant " + type + " " + (type == "b8" ? std::to_string(pick(2)) : std::to_string(1 + pick(5))));
        return fit[pick(fit.size())];
      };
      int ops = 1 + pick(7);
      for (int i = 0; i < ops; ++i) {
        std::string t = local[pick(local.size())].second;
        bool f = t == "f32" || t == "f64";
        switch (pick(7)) {
          case 0: {
            static const char* targets[] = {"f32", "f64", "i32", "i64", "b8", "bf16", "u8"};
            std::string to = targets[pick(7)], a = some(t);
            emit(compute(to), "cast " + to + " " + a);
            break;
          }
          case 1: {
            std::string a = some(t), b = some(t);
            emit("b8", std::string(std::vector<const char*>{"lt", "le", "eq", "ne"}[pick(4)]) + " " + t + " " + a + " " + b);
            break;
          }
          case 2: {
            std::string c = some("b8"), a = some(t), b = some(t);
            emit(t, "where " + t + " " + c + " " + a + " " + b);
            break;
          }
          case 3: {
            if (!f) break;
            std::string a = some(t);
            emit(t, std::string(std::vector<const char*>{"floor", "neg", "abs", "round", "sign"}[pick(5)]) + " " + t + " " + a);
            break;
          }
          case 4:
            if (t != "b8") {
              std::string a = some(t), b = some(t);
              emit(t, std::string(std::vector<const char*>{"add", "sub", "min", "max"}[pick(4)]) + " " + t + " " + a + " " + b);
              break;
            }
            [[fallthrough]];
          case 5:
            if (!f) {
              std::string a = some(t), b = some(t);
              emit(t, std::string(std::vector<const char*>{"and_", "or_", "xor_"}[pick(3)]) + " " + t + " " + a + " " + b);
            }
            break;
          default: {
            int64_t e;
            std::string at = place(false, vars.size(), e), m = some("b8"), other = some("f32");
            auto b = buffer("in", "f32", std::max<int64_t>(e, 1));
            emit("f32", "load f32 b" + std::to_string(b) + "[" + at + "] mask " + m + " else " + other);
          }
        }
      }
      std::string accs;
      bool reduce = !flat && n > 0 && pick(3) > 0;
      std::vector<std::pair<std::string, std::string>> results;
      if (reduce) {
        auto [id, t] = local[pick(local.size())];
        std::string kind = t == "b8"                    ? (pick(2) ? "any" : "all")
                           : (t == "f32" || t == "f64") ? (pick(2) ? "min" : "max")
                                                        : std::vector<const char*>{"sum", "min", "max"}[pick(3)];
        std::string r = "%" + std::to_string(values_++);
        code += "      reduce " + t + " acc0 " + id + "\n";
        accs = " acc(" + kind + " " + t + " -> " + r + ")";
        results.emplace_back(r, t);
      }
      if (!reduce || pick(2)) {
        auto [id, t] = local[pick(local.size())];
        int64_t e;
        std::string at = place(true, vars.size(), e);
        auto b = buffer("out", t, std::max<int64_t>(e, 1));
        code += "      store " + t + " b" + std::to_string(b) + "[" + at + "] = " + id + "\n";
      }
      body += "    stage inner(" + text + ")" + accs + ":\n" + code;
      if (n == 0 && !flat) scope = local;
      for (auto& r : results) scope.push_back(r);
    }
    if (!flat) {  // the last stage makes every result visible
      body += "    stage inner():\n";
      for (auto& [id, t] : scope) {
        if (pick(2)) continue;
        std::string at;
        int64_t e = 1;
        for (size_t i = ovars.size(); i-- > 0;) at += (at.empty() ? "" : " + ") + std::to_string(e) + "*" + ovars[i], e *= oext[i];
        buffers.push_back("out " + t + "* b" + std::to_string(buffers.size()) + " extent(" + std::to_string(e) + ")");
        k.types.push_back(t);
        k.extents.push_back(e);
        body += "      store " + t + " b" + std::to_string(buffers.size() - 1) + "[" + at + "] = " + id + "\n";
      }
    }
    k.text = "kernel f(";
    for (size_t i = 0; i < buffers.size(); ++i) k.text += (i ? ", " : "") + buffers[i];
    k.text += "; s0, s1, s2) outer(" + outer_text + ") axis(" + (flat ? axes[0] : axes[pick(4)]) + "):\n" + body;
    return k;
  }

 private:
  size_t pick(size_t n) { return g_() % n; }
  std::mt19937 g_;
  int values_ = 0;
};

Bytes random_bytes(const std::string& type, int64_t n, std::mt19937& g) {
  DType t;
  parse_dtype(type, t);
  Bytes b(n * size_of(t));
  for (int64_t i = 0; i < n; ++i) {
    float f = float(int(g() % 4001) - 2000) / 64;
    double d = f;
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint16_t h = uint16_t(bits >> 16), half = uint16_t(0x3000 + g() % 0x2000);
    uint8_t bit = g() & 1;
    uint64_t raw = uint64_t(g()) << 32 | g();
    const void* from = t == DType::F32    ? static_cast<void*>(&f)
                       : t == DType::F64  ? &d
                       : t == DType::BF16 ? static_cast<void*>(&h)
                       : t == DType::F16  ? &half
                       : t == DType::Bool ? static_cast<void*>(&bit)
                                          : &raw;
    memcpy(&b[i * size_of(t)], from, size_of(t));
  }
  return b;
}

TEST(RandomKernels, MatchTheInterpreter) {
  const char* s = std::getenv("VITRIFY_FUZZ_SEED");
  const char* c = std::getenv("VITRIFY_FUZZ_COUNT");
  uint32_t first = s ? uint32_t(std::atoi(s)) : std::random_device{}();
  int count = c ? std::atoi(c) : 300;
  printf("seed %u\n", first);
  auto all = targets();
  int tiles = 0;
  for (int i = 0; i < count || (!s && !c && !tiles); ++i) {  // some are walked in tiles: one in a hundred
    auto gen = Generator(first + i).make();
    SCOPED_TRACE(fmt::format("VITRIFY_FUZZ_SEED={} VITRIFY_FUZZ_COUNT=1\n{}", first + i, gen.text));
    auto k = loop::parse(gen.text, context("sssiiiiiiiiiiii"));
    std::erase_if(k.stages, [](auto& s) { return s.body.empty() && s.accums.empty(); });
    if (i % 2 && !k.outer.empty() && k.stages.size() == 1 && k.stages[0].inner.size() == 1 && k.stages[0].accums.empty()) {
      k.vector_axis = loop::VectorAxis::Tile;
      ++tiles;
    }
    loop::verify(k);
    std::mt19937 g(i);
    std::vector<Bytes> in;
    for (size_t b = 0; b < gen.types.size(); ++b) in.push_back(random_bytes(gen.types[b], gen.extents[b], g));
    int64_t begin = g() % 2 ? 0 : gen.iterations / 3, end = g() % 2 ? gen.iterations : gen.iterations - gen.iterations / 4;
    auto want = run(interp_backend(), "native", k, in, gen.sizes, begin, end);
    auto got = run(llvm(), all[i % all.size()], k, in, gen.sizes, begin, end);
    for (size_t b = 0; b < in.size(); ++b) {
      // any NaN equals any other
      if (gen.types[b] == "f32" || gen.types[b] == "f64") {
        auto check = [&](auto x, auto y) {
          for (size_t j = 0; j < x.size(); ++j)
            ASSERT_TRUE(x[j] == y[j] || (x[j] != x[j] && y[j] != y[j])) << "buffer " << b << " at " << j << ": " << x[j] << ", not " << y[j];
        };
        gen.types[b] == "f32" ? check(as<float>(got.buffers[b]), as<float>(want.buffers[b]))
                              : check(as<double>(got.buffers[b]), as<double>(want.buffers[b]));
      } else {
        ASSERT_EQ(got.buffers[b], want.buffers[b]) << "buffer " << b;
      }
      if (HasFatalFailure()) return;
    }
  }
}

}  // namespace
