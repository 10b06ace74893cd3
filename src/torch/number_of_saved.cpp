// What a checkpoint's function saves is told apart from what it saved before: two programs whose saved values follow alike from what they are given,
// by the same constants and sizes, save the same.
#include "torch/slice.h"
#include "torch/training_impl.h"

namespace vitrify {

namespace {

// Two of the process that were made alike have one number.
int64_t number(std::string by, std::vector<int64_t> of) {
  using Made = std::pair<std::string, std::vector<int64_t>>;
  static std::mutex mutex;
  static auto* numbers = new std::map<Made, int64_t>;
  const std::lock_guard lock(mutex);
  return numbers->try_emplace(Made(std::move(by), std::move(of)), static_cast<int64_t>(numbers->size()) + 1).first->second;
}

size_t index_of_constant(const ir::Node& n) { return static_cast<size_t>(value_of(std::get<sym::Int>(n.args[0]))); }

// The arguments of a call that are no values.
struct Spelled {
  const std::function<int64_t(sym::Int)>& size;
  int64_t own;  // of nothing else in the process: an address may come to be another's
  std::string text{};

  void put(const std::string& s) { text += fmt::format("{}:{},", s.size(), s); }
  void add(const ir::Value&) { text += "v,"; }
  void add(sym::Int i) { text += fmt::format("{},", size(i)); }
  void add(double d) { text += fmt::format("{:a},", d); }
  void add(bool b) { text += b ? "t," : "f,"; }
  void add(const std::string& s) { put(s); }
  void add(const ir::Complex& c) { text += fmt::format("{:a}+{:a}i,", c.re, c.im); }
  void add(ir::None) { text += "-,"; }
  void add(Device d) { text += fmt::format("{}/{},", static_cast<int>(d.kind), d.index); }
  void add(DType t) { text += fmt::format("{},", static_cast<int>(t)); }
  void add(ir::MemoryFormat f) { text += fmt::format("{},", static_cast<int>(f)); }
  void add(ir::Layout l) { text += fmt::format("{},", static_cast<int>(l)); }
  void add(ir::OpaqueArg o) { text += fmt::format("{}/{},", own, o.index); }
  template <class T>
  void add(const std::vector<T>& all) {
    for (const auto& x : all) add(static_cast<const T&>(x));
    text += ']';
  }
  void add_constant(int64_t index, const at::Tensor& t) {
    constexpr int64_t kFew = 1024;  // elements: no content of a larger one is kept here
    if (!t.has_storage() || t.numel() > kFew) return put(fmt::format("{}/{}", own, index));
    const at::Tensor all = t.detach().resolve_conj().resolve_neg().contiguous();
    put(fmt::format("{}[{}]", static_cast<int>(all.scalar_type()), fmt::join(all.sizes(), ",")));
    put(std::string(static_cast<const char*>(all.const_data_ptr()), all.nbytes()));
  }
};

}  // namespace

void Training::find_made() {
  const ir::Graph& g = *joint_.program.graph;
  std::vector<Value> kept;
  for (const Saved& s : saved_)
    if (s.kind == Saved::Kind::Private) kept.push_back(s.value);
  const ir::NodeSet behind = nodes_behind(g, kept);
  for (const ir::Node* n : g.nodes())
    if (behind.contains(n)) saved_of_.push_back({n, ir::is_constant(*n) ? g.constants.at(index_of_constant(*n)) : nullptr});
}

int64_t Training::number_of_saved(const CallSizes& sizes) const {
  static const std::vector<std::optional<int64_t>> none;
  const bool dynamic = ctx().dynamic();
  const std::vector<std::optional<int64_t>>& known = dynamic ? sizes.by_symbol() : none;
  {
    const std::lock_guard lock(numbers_mutex_);
    if (const auto at = numbers_.find(known); at != numbers_.end()) return at->second;
  }
  const std::function<int64_t(sym::Int)> size = [&](sym::Int i) {
    return i.is_const() ? i.value() : sym::eval(i, [&](uint32_t id) { return id < known.size() ? known[id].value_or(-1) : -1; });
  };
  static std::atomic<int64_t> computed{0};
  const int64_t own = ++computed;
  std::unordered_map<Value, int64_t> given;
  for (size_t i = 0; i < joint_.given.size(); ++i) given.emplace(joint_.given[i], number("given", {static_cast<int64_t>(i)}));
  std::unordered_map<const ir::Node*, int64_t> made;
  const auto of_value = [&](Value v) {
    const auto at = given.find(v);
    return at != given.end() ? at->second : number("value", {made[v.node], v.index});
  };
  for (const auto& [n, constant] : saved_of_) {
    std::vector<int64_t> of;
    ir::for_each_input(const_cast<ir::Node&>(*n), [&](Value& v) { of.push_back(v ? of_value(v) : 0); });
    Spelled spelled{size, own};
    if (ir::is_constant(*n))
      spelled.add_constant(static_cast<int64_t>(index_of_constant(*n)), *std::static_pointer_cast<at::Tensor>(constant));
    else if (!is_input(*n))
      for (const ir::Arg& a : n->args) std::visit([&](const auto& x) { spelled.add(x); }, a.any());
    made[n] = number(n->op->name + "(" + spelled.text, std::move(of));
  }
  std::vector<int64_t> all;
  for (size_t k = 0; k < saved_.size(); ++k) {
    const Saved& s = saved_[k];
    if (!given_to_hooks_[k]) continue;
    all.push_back(static_cast<int64_t>(s.kind));
    all.push_back(s.kind == Saved::Kind::Private ? of_value(s.value) : s.index);
  }
  const int64_t r = number("saved", std::move(all));
  constexpr size_t kMost = 256;  // sizes that are kept in mind
  const std::lock_guard lock(numbers_mutex_);
  if (numbers_.size() >= kMost) numbers_.clear();
  return numbers_.emplace(known, r).first->second;  // another thread may have been first
}

}  // namespace vitrify
