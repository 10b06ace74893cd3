#include "torch/plan_cache.h"

#include <ATen/Parallel.h>
#include <c10/core/DefaultDtype.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "torch/executor.h"
#include "torch/process_state.h"

namespace vitrify {

namespace {

constexpr size_t kMaxConstantBytes = 1 << 20;

struct Plans {
  std::mutex mutex;
  std::unordered_map<std::string, std::weak_ptr<const SharedPlan>> by_key;
};
Plans& plans() {
  static Plans p;
  return p;
}

bool constant(const ir::Dims& d) {
  return std::all_of(d.begin(), d.end(), [](sym::Int i) { return i.is_const(); });
}
bool constant(const ir::Arg& a) {
  if (auto* i = std::get_if<sym::Int>(&a)) return i->is_const();
  if (auto* l = std::get_if<std::vector<sym::Int>>(&a)) return std::all_of(l->begin(), l->end(), [](sym::Int i) { return i.is_const(); });
  return !std::holds_alternative<ir::OpaqueArg>(a);
}

// Names are for people: inputs have others in every block.
bool add_graph(std::string& key, const ir::Graph& g) {
  for (const ir::Node* n : g.nodes()) {
    for (const ir::Arg& a : n->args)
      if (!constant(a)) return false;
    for (const ir::TensorType& t : n->outs)
      if (!constant(t.sizes) || !constant(t.strides)) return false;
    (key += ir::print(*n)) += '\n';
    if (!ir::is_constant(*n)) continue;
    const at::Tensor& t = constant_tensor(g, static_cast<uint32_t>(std::get<sym::Int>(n->args[0]).value()));
    if (!t.device().is_cpu() || !t.is_non_overlapping_and_dense() || t.nbytes() > kMaxConstantBytes) return false;
    key.append(static_cast<const char*>(t.const_data_ptr()), t.nbytes());
  }
  for (const ir::Value& v : g.outputs) key += v ? fmt::format("{}.{} ", v.node->id, v.index) : "- ";
  return true;
}

}  // namespace

std::optional<std::string> plan_key(const ir::Graph& g, const PassState& state, const schedule::Destinations& to, const Options& o) {
  const sym::Context& ctx = const_cast<ir::Graph&>(g).ctx();
  if (!o.dump.empty() || ctx.dynamic() || !ctx.guards().empty()) return std::nullopt;  // conditions on sizes belong to one program
  // Compared whole: another program's plan would be a wrong result.
  std::string key;
#define OPTION(name, type, def, in_key, help) \
  if constexpr (in_key) key += fmt::format(#name "={} ", o.name);
#include "support/options.def"
#undef OPTION
  key += fmt::format("{} {} {} {} {}\n", state.num_args, static_cast<int>(c10::get_default_dtype_as_scalartype()), o.threads, at::get_num_threads(),
                     library_state());
  key.append(state.written.begin(), state.written.end());
  for (int32_t d : to) key += fmt::format(" {}", d);
  key += '\n';
  if (!add_graph(key, g)) return std::nullopt;
  return key;
}

std::shared_ptr<const SharedPlan> find_plan(const std::string& key) {
  Plans& p = plans();
  std::lock_guard lock(p.mutex);
  auto it = p.by_key.find(key);
  return it == p.by_key.end() ? nullptr : it->second.lock();
}

void keep_plan(const std::string& key, const std::shared_ptr<const SharedPlan>& plan) {
  Plans& p = plans();
  std::lock_guard lock(p.mutex);
  std::erase_if(p.by_key, [](const auto& e) { return e.second.expired(); });
  p.by_key[key] = plan;
}

}  // namespace vitrify
