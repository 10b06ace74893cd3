// Runs graphs op by op through ATen: what a graph means, by definition.
#include <ATen/LegacyBatchedTensorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <exception>
#include <unordered_map>

#include "ir/node_map.h"
#include "runtime/extern_table.h"
#include "torch/convert.h"
#include "torch/extern_call.h"
#include "torch/learned.h"
#include "torch/random.h"
#include "torch/tangents.h"
#include "torch/tracer.h"
#include "torch/transforms.h"
#include "torch/versions.h"
#include "torch/view_path.h"

namespace vitrify {
namespace {

struct OpCall {
  c10::OperatorHandle op;
  std::vector<ArgKind> kinds;
};

bool takes_plain(const compat::Stack& stack) {
  return std::ranges::all_of(stack, [](const c10::IValue& v) {
    if (v.isTensorList()) return all_plain(v.toTensorVector());
    if (v.isOptionalTensorList())
      return std::ranges::all_of(v.toOptionalTensorVector(), [](const auto& t) { return !t || !t->defined() || is_plain(*t); });
    return !v.isTensor() || !v.toTensor().defined() || is_plain(v.toTensor());
  });
}

bool same_type(const ir::TensorType& want, const at::Tensor& t) {
  if (is_undefined(want) || !t.defined()) return true;
  ir::TensorType got = type_of(t);
  bool same = got.dtype == want.dtype && got.device == want.device && values_of(got.sizes) == values_of(want.sizes);
  auto gs = values_of(got.strides), ws = values_of(want.strides), sizes = values_of(want.sizes);
  for (size_t d = 0; same && d < ws.size() && t.numel() > 0; ++d) same = sizes[d] == 1 || gs[d] == ws[d];
  return same;
}

void check_result(const ir::Node& n, size_t i, const at::Tensor& t) {
  const ir::TensorType& want = n.outs[i];
  auto text = [](const ir::TensorType& x) {
    return fmt::format("{} [{}] strides [{}]", to_string(x.dtype), fmt::join(values_of(x.sizes), ","), fmt::join(values_of(x.strides), ","));
  };
  VT_CHECK(same_type(want, t), "%{} {} result {}: recorded {}, ATen gives {}", n.id, n.op->name, i, text(want), text(type_of(t)));
}

// Where an op raises, the generator goes on from where it was.
struct StatesLeft {
  ~StatesLeft() {
    if (std::uncaught_exceptions() > flying) go_back_to_random_state(left);
  }
  const size_t left = random_states_left();
  const int flying = std::uncaught_exceptions();
};

}  // namespace

std::vector<at::Tensor> interpret(const ir::Graph& g, const std::vector<at::Tensor>& inputs, bool check) {
  const c10::AutoGradMode no_grad(false);
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const StatesLeft states;
  VT_CHECK(inputs.size() == g.inputs.size(), "{} inputs given, {} expected", inputs.size(), g.inputs.size());
  std::unordered_map<const ir::Node*, std::vector<at::Tensor>> values;
  std::unordered_map<const ir::Op*, OpCall> calls;
  std::unordered_map<const ir::Node*, uint32_t> uses;
  auto result_uses = ir::count_uses(g);  // nobody sees the metadata of an unused result
  for (const ir::Node* n : g.nodes())
    for (uint32_t c : result_uses.at(n)) uses[n] += c;

  const bool transformed = any_transform();
  std::unordered_map<uint32_t, int64_t> symbols;  // a symbol's value is the size it was made for
  for (const ir::Input& in : g.inputs) {
    const ir::TensorType& type = in.value.type();
    const at::Tensor& real = inputs.at(static_cast<size_t>(&in - g.inputs.data()));
    for (size_t d = 0; d < type.dim(); ++d)
      if (!type.sizes[d].is_const() && sym::is_symbol(type.sizes[d])) symbols.emplace(sym::view(type.sizes[d]).symbol->id, real.size(d));
  }
  auto int_of = [&](sym::Int i) {
    return i.is_const() ? i.value() : sym::eval(i, [&](uint32_t id) {
      auto it = symbols.find(id);
      VT_CHECK(it != symbols.end(), "s{} is the size of no input", id);
      return it->second;
    });
  };
  auto tensor_of = [&](const ir::Value& v) { return values.at(v.node).at(v.index); };

  for (ir::Node* n : g.nodes()) {
    const std::string& name = n->op->name;
    if (name == "graph::input") {
      int64_t index = value_of(std::get<sym::Int>(n->args[0]));
      values[n] = {inputs.at(index)};
      if (check) check_result(*n, 0, inputs.at(index));
      continue;
    }
    if (name == "graph::constant") {
      values[n] = {*std::static_pointer_cast<at::Tensor>(g.constants.at(value_of(std::get<sym::Int>(n->args[0]))))};
      continue;
    }
    auto it = calls.find(n->op);
    if (it == calls.end()) {
      // A value's strides may differ from those its view was recorded with: reshape gives the same elements, and a view where one is possible.
      auto op = find_operator(name == "aten::view" || name == "aten::_unsafe_view" ? "aten::reshape" : name);
      VT_CHECK(op, "torch has no {}", name);
      it = calls.emplace(n->op, OpCall{*op, arg_kinds(op->schema())}).first;
    }
    const OpCall& call = it->second;
    VT_CHECK(n->args.size() == call.kinds.size(), "%{} {}: {} arguments, the schema has {}", n->id, name, n->args.size(), call.kinds.size());
    compat::Stack stack;
    for (size_t i = 0; i < n->args.size(); ++i) stack.push_back(to_ivalue(g, n->args[i], call.kinds[i], tensor_of, int_of));
    if (name == "aten::clone" && stack[0].toTensor().layout() != at::kStrided) stack[1] = c10::IValue();  // it takes no format
    if (runtime::writes_what_is_left_out(name)) ask_for_first(stack.back());
    std::vector<at::Tensor>& results = values[n];
    std::optional<WithoutTransforms> none;  // packed masks are read by address, and some ops have rules for what is wrapped only
    if (transformed && !(n->op->flags & ir::kRandom) && takes_plain(stack)) none.emplace();
    if (name == "aten::alias") {  // values have no memory, and ATen has no rule for it where they are batches
      results = {stack[0].toTensor()};
    } else if (name == "aten::copy" &&
               at::maybeGetBatchedImpl(stack[0].toTensor())) {  // it lies as what is written, which ATen's rule for batches forgets
      results = {stack[0].toTensor().clone().copy_(stack[1].toTensor())};
    } else if (writes_copies(*n, call.op.schema())) {
      call_on_copies(*n, call.op, stack, results);
    } else {
      if (writes_first(call.op.schema())) {  // a copy, in the strides that eager's has
        const at::Tensor self = stack[0].toTensor();
        stack[0] = at::empty_strided(self.sizes(), values_of(std::get<ir::Value>(n->args[0]).type().strides), self.options()).copy_(self);
        share_copy(call.kinds, stack);
      }
      call.op.callBoxed(&stack);
      flatten_results(stack, results);
    }
    if (results.size() < n->outs.size())
      throw capture::OtherResults(fmt::format("{} gives {} results, of which {} were recorded", name, results.size(), n->outs.size()));
    for (size_t i = 0; i < n->outs.size(); ++i) {
      if (results[i].defined() && results[i].dim() == static_cast<int64_t>(n->outs[i].dim()))  // sizes found while running
        for (size_t d = 0; d < n->outs[i].dim(); ++d)
          if (const sym::Int e = n->outs[i].sizes[d]; !e.is_const() && sym::is_symbol(e))
            symbols.emplace(sym::view(e).symbol->id, results[i].size(static_cast<int64_t>(d)));
      if (n->outs[i].wrapped_number) results[i].unsafeGetTensorImpl()->set_wrapped_number(true);
      if (check && result_uses.at(n)[i]) check_result(*n, i, results[i]);
    }
    stack.clear();
    ir::for_each_input(*n, [&](ir::Value& v) {
      if (--uses[v.node] == 0) values.erase(v.node);
    });
  }
  std::vector<at::Tensor> outputs;
  for (const ir::Value& v : g.outputs) outputs.push_back(v ? tensor_of(v) : at::Tensor());
  return outputs;
}

std::vector<at::Tensor> interpret(const Program& p, const std::vector<at::Tensor>& args, bool check) {
  VT_CHECK(args.size() == p.num_args);
  std::vector<at::Tensor> inputs = all_inputs(p, args);
  std::vector<at::Tensor> outputs = interpret(*p.graph, inputs, check);
  for (at::Tensor& t : outputs)
    for (const at::Tensor& in : inputs)
      if (t.defined() && t.storage().is_alias_of(in.storage())) {
        t = t.clone();
        break;
      }
  for (const Mutation& m : p.mutations) {
    at::Tensor& in = inputs.at(m.input);
    if (m.metadata_only) continue;
    {
      at::NoGradGuard no_grad;
      at::AutoDispatchBelowADInplaceOrView below;
      follow(resolve(m.path), in);
      in.copy_(outputs.at(m.output));
    }
    if (counts_versions(in))
      for (int64_t i = 0, n = m.version_bumps + (m.counted < 0 ? 0 : outputs.at(static_cast<size_t>(m.counted)).item<int64_t>()); i < n; ++i)
        in.unsafeGetTensorImpl()->bump_version();
  }
  std::vector<const at::Tensor*> pointers;
  for (const at::Tensor& t : inputs) pointers.push_back(&t);
  std::vector<at::Tensor> results;
  ResultMaker(p.results).make(outputs, pointers, results);
  for (const Mutation& m : p.mutations)  // views of what they reshape are made of what it was
    if (m.metadata_only) follow(resolve(m.path), inputs.at(m.input));
  take_grads(p, pointers.data(), results);
  return results;
}

}  // namespace vitrify
