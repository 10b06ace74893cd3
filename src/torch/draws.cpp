// What a program draws while it is captured: the generators move on with each draw, so that whatever takes them back is seen, and draws that are
// taken back are known by the state that they were made from.
#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/function.h>

#include "torch/slice.h"
#include "torch/tracer_impl.h"

namespace vitrify {

using capture::fail;
using capture::OpInfo;
using ir::Arg;
using ir::TensorType;
using ir::Value;

namespace {

bool alike(sym::Context& ctx, const auto& a, const auto& b) {
  return a.size() == b.size() && std::ranges::equal(a, b, [&](sym::Int p, sym::Int q) { return ctx.guard_eq(p, q); });
}

// Whether the results have the types of those, with sizes that may be known by now (a derivative of a derivative may have fixed them).
bool has_types(sym::Context& ctx, const decltype(ir::Node::outs)& drawn, const decltype(ir::Node::outs)& now) {
  return std::ranges::equal(drawn, now, [&](const TensorType& a, const TensorType& b) {
    if (!alike(ctx, a.sizes, b.sizes) || !alike(ctx, a.strides, b.strides)) return false;
    TensorType same = a;
    same.sizes = b.sizes;
    same.strides = b.strides;
    return same == b;
  });
}

// Whether a draw has the numbers of that one: probabilities, bounds, sizes.
bool has_numbers(sym::Context& ctx, const ir::Node& drawn, const std::vector<Arg>& args) {
  return std::ranges::equal(drawn.args, args, [&](const Arg& a, const Arg& b) {
    if (a.index() != b.index()) return false;
    if (const auto* n = std::get_if<sym::Int>(&a)) return ctx.guard_eq(*n, std::get<sym::Int>(b));
    if (const auto* n = std::get_if<std::vector<sym::Int>>(&a)) return alike(ctx, *n, std::get<std::vector<sym::Int>>(b));
    return std::holds_alternative<Value>(a) || std::holds_alternative<std::vector<Value>>(a) || a == b;
  });
}

// Whether the op draws once more what it drew: what its operands hold may have been written since.
bool draws_alike(const ir::Graph& g, const ir::Node& drawn, const capture::OpInfo& info, const std::vector<Arg>& args) {
  const ops::OpRow* row = info.functional ? info.functional->row : info.row;
  if (row && row->draws_by_size) return true;
  std::vector<Value> before, now;
  ir::for_each_input(const_cast<ir::Node&>(drawn), [&](Value& v) { before.push_back(v); });
  for (const Arg& a : args) {
    if (const auto* v = std::get_if<Value>(&a); v && *v) now.push_back(*v);
    if (const auto* l = std::get_if<std::vector<Value>>(&a))
      std::ranges::copy_if(*l, std::back_inserter(now), [](Value v) { return static_cast<bool>(v); });
  }
  const ir::NodeSet behind = nodes_behind(g, now);
  return std::ranges::none_of(g.inputs, [&](const ir::Input& in) { return behind.contains(in.value.node); }) &&
         std::ranges::equal(before, now, [](Value a, Value b) { return same_computation(a, b); });
}

}  // namespace

// By its lock: others may draw.
void Tracer::Impl::go_on(Saved::Generator& s, const at::mt19937* to) {
  auto* cpu = at::check_generator<at::CPUGeneratorImpl>(s.g);
  at::mt19937 engine = to ? *to : cpu->engine();
  if (!to) engine();
  cpu->set_engine(saved->cpu_engine = engine);
  s.during = s.g.get_state();
  saved->drew = true;
}

void Tracer::Impl::go_to(const at::mt19937& engine) {
  for (auto& s : saved->generators) {
    if (!s.g.device().is_cpu()) continue;
    std::lock_guard<std::mutex> lock(s.g.mutex());
    go_on(s, &engine);
  }
}

// As eager would have moved on: a program that takes the generator back to an earlier state is seen.
void Tracer::Impl::draw() {
  if (!saved->marks.front().there()) fail("sets the state of a random number generator");  // another thread, perhaps: its state is not ours to move
  do {
    for (size_t i = 0; i < saved->generators.size(); ++i) {
      Saved::Generator& s = saved->generators[i];
      if (!s.g.device().is_cpu()) continue;
      std::lock_guard<std::mutex> lock(s.g.mutex());
      const at::Tensor now = s.g.get_state();
      const bool put_there = rewound && i < last_forward_states.size() && same_bytes(now, last_forward_states[i]);  // by a checkpoint
      saved->others_drew = saved->others_drew || !(put_there || same_bytes(now, s.during));
      go_on(s, nullptr);
    }
  } while (moved_on_from(state_key()));
}

std::vector<at::Tensor> Tracer::Impl::states() const {
  std::vector<at::Tensor> r;
  for (const auto& s : saved->generators) {
    std::lock_guard<std::mutex> lock(s.g.mutex());
    r.push_back(s.g.get_state());
  }
  return r;
}

std::string Tracer::Impl::state_key() const {
  std::string key;
  for (const at::Tensor& t : states()) key.append(static_cast<const char*>(t.const_data_ptr()), t.nbytes());
  return key;
}

// A checkpoint draws the same numbers again.
ir::Node* Tracer::Impl::drawn_before(const std::string& state, const OpInfo& info, const std::vector<Arg>& args, const Types& outs) {
  const auto it = draws.find(state);
  if (it == draws.end()) return nullptr;
  ir::Node& n = *it->second.node;
  if (n.op->name != info.name || !has_types(graph->ctx(), n.outs, outs) || !has_numbers(graph->ctx(), n, args)) return nullptr;
  if (!draws_alike(*graph, n, info, args)) fail(fmt::format("{} draws once more, by what its operands hold then", info.name));
  rewound = true;
  go_to(it->second.after);
  return &n;
}

// A call that is itself made in a backward (as a checkpoint's function that is computed again) is no different for that.
bool Tracer::Impl::goes_back() const {
  const auto now = torch::autograd::get_current_node();
  return in_backward || (now && now.get() != outer_node);
}

// Eager's checkpoint computes once for each backward, whatever of it that comes to. A derivative that is differentiated again goes through it twice:
// by what it gave, and by its gradients. A backward that keeps no history runs with one, or with hooks, only while a checkpoint is computed again.
void Tracer::Impl::refuse_other_draws() const {
  const bool again = c10::GradMode::is_enabled() || capture::hooks_on_saved();
  if (in_backward && !done && again) fail("draws other numbers when a checkpoint is computed again");
}

ir::Node* Tracer::Impl::append_custom(const OpInfo& info, std::vector<Arg> args, Types outs) {
  check_surroundings(info);
  if (in_batch) fail(fmt::format("calls {} for a batch, for which it may draw", info.name));
  size_t lists = 0;
  for (const c10::Argument& r : info.op.schema().returns())
    if (r.type()->kind() == c10::TypeKind::ListType) lists += r.alias_info() ? 2 : 1;
  if (lists > 1) fail(fmt::format("calls {}, which gives several lists of tensors, or one that it was given", info.name));  // Resumed::give
  TensorType type;
  type.dtype = DType::U8;
  type.sizes = {static_cast<int64_t>(saved->generators.front().before.numel())};
  type.strides = {1};
  const auto of_state = [&](std::string_view name, std::vector<Arg> given) {
    return graph->append(graph->op(name, ir::kRandom), std::move(given), {type})->out();
  };
  std::string state = state_key();
  const auto again = goes_back() ? called.find(state) : called.end();
  Value now;  // where the generator goes on
  if (again != called.end()) {
    rewound = true;
    go_to(again->second.after);
    now = of_state("vitrify::set_random_state", {again->second.state, false});
  } else {
    if (generators_moved()) fail("sets the state of a random number generator");
    refuse_other_draws();
    const Value before = of_state("vitrify::random_state", {});
    draw();
    last_forward_states = states();
    called.try_emplace(std::move(state), Called{before, saved->cpu_engine});
  }
  ir::Node* n = graph->append(graph->op(info.name, info.flags), std::move(args), std::move(outs));
  n->source = source;
  if (now) of_state("vitrify::set_random_state", {now, true});
  if (is_side_effect(*n)) know_effect(*n);
  return n;
}

// Most are called once.
void Tracer::Impl::drop_unread_states() {
  if (called.empty()) return;
  const auto uses = ir::count_uses(*graph);
  std::erase_if(called, [&](const auto& c) {
    const Value state = c.second.state;
    const bool unread = !uses.at(state.node)[0];
    if (unread) graph->erase(state.node);
    return unread;
  });
}

}  // namespace vitrify
