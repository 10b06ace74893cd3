#include "torch/passes/layout.h"

#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "ops/lowering.h"
#include "ops/pool.h"
#include "ops/reads.h"
#include "ops/shapes.h"
#include "torch/learned.h"
#include "torch/mode.h"
#include "torch/passes/match.h"

namespace vitrify {

using namespace match;
using ir::MemoryFormat;

namespace {

constexpr uint32_t kUnordered = ir::kRandom | ir::kEffect;

bool is_image(const ir::TensorType& t) { return t.dim() == 4; }
bool is_pixel(const ir::TensorType& t) { return is_image(t) && t.sizes[2].is(1) && t.sizes[3].is(1); }

// Norms of channels, and windows that move over the last two dims: computed in any layout alike.
bool follows_layout(const Node& n) {
  static const std::unordered_set<std::string_view> ops{"aten::max_pool2d_with_indices",
                                                        "aten::max_pool2d_with_indices_backward",
                                                        "aten::avg_pool2d",
                                                        "aten::avg_pool2d_backward",
                                                        "aten::_adaptive_avg_pool2d",
                                                        "aten::_adaptive_avg_pool2d_backward",
                                                        "aten::upsample_nearest2d",
                                                        "aten::upsample_nearest2d_backward",
                                                        "aten::upsample_bilinear2d",
                                                        "aten::upsample_bilinear2d_backward",
                                                        "aten::cat",
                                                        "aten::native_batch_norm",
                                                        "aten::native_batch_norm_backward",
                                                        "aten::native_group_norm",
                                                        "aten::native_group_norm_backward",
                                                        "aten::_native_batch_norm_legit_functional",
                                                        "aten::_native_batch_norm_legit.no_stats",
                                                        "aten::_native_batch_norm_legit_no_training"};
  if (is(n, "aten::upsample_nearest2d") && ops::nearest_looks_at_strides(n)) return false;
  return ops.contains(n.op->name) && !ops::is_extern(n.op->name);
}
bool is_pointwise(const Node& n) {
  return n.outs.size() == 1 && is_image(n.outs[0]) && !(n.op->flags & (ir::kView | kUnordered)) && ops::is_elementwise(n.op->name);
}

bool ones(const ir::Arg& a) {
  const auto* of = std::get_if<std::vector<sym::Int>>(&a);
  return of && std::all_of(of->begin(), of->end(), [](sym::Int i) { return i.is(1); });
}

// Neither wrong nor much less exact there. oneDNN's derivative of a strided 1x1 convolution writes past its memory where fewer than 16 channels lie
// closest (PyTorch 2.11 dies of it too).
bool is_safe(const Node& n, size_t input) {
  const ir::Dims& w = tensor(n, input + 1).type().sizes;
  return !adds_long_sums(tensor(n, input + 1).type()) && (ones(n.args[input + 3]) || !w[2].is(1) || !w[3].is(1) || w[1].value() >= 16);
}
bool is_forward(const Node& n) {
  return is(n, "aten::convolution") && !flag(n, 6) && is_f32_cpu(n.outs[0]) && taken_by_onednn(n.args, 0) && is_safe(n, 0);
}
bool is_backward(const Node& n) {
  return is(n, "aten::convolution_backward") && !flag(n, 7) && is_f32_cpu(tensor(n, 1).type()) && taken_by_onednn(n.args, 1) && is_safe(n, 1);
}

// What ATen asks of the processor before it gives tensors of a half type to oneDNN.
bool takes_half(DType t) {
  const auto ask = [](const char* name) {
    capture::Paused paused;
    return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<bool()>().call();
  };
  static const bool bfloat16 = ask("mkldnn::_is_mkldnn_bf16_supported"), float16 = ask("mkldnn::_is_mkldnn_fp16_supported");
  return t == DType::BF16 ? bfloat16 : t == DType::F16 && float16;
}

// One convolution reads what another gave, more or less: not worth the copies otherwise.
bool has_chain(const Graph& g) {
  std::unordered_set<Value> from;
  for (Node* n : g.nodes()) {
    const bool convolution = is_forward(*n);
    if (convolution && from.contains(tensor(*n, 0))) return true;
    bool any = convolution;
    if (!any && (is_pointwise(*n) || follows_layout(*n))) ir::for_each_input(*n, [&](Value& v) { any = any || from.contains(v); });
    if (any) from.insert(n->out());
  }
  return false;
}

}  // namespace

bool taken_by_onednn(std::span<const ir::Arg> args, size_t input) {
  const auto *x = std::get_if<Value>(&args[input]), *w = std::get_if<Value>(&args[input + 1]);
  if (!x || !w || !*x || !*w || !at::globalContext().userEnabledMkldnn()) return false;
  const ir::TensorType &image = x->type(), &weight = w->type();
  if (!is_image(image) || !is_image(weight) || image.device.kind != DeviceKind::CPU || image.dtype != weight.dtype) return false;
  if (takes_half(image.dtype)) return true;
  if (image.dtype != DType::F32) return false;
  if (!is_static(image.sizes) || !is_static(weight.sizes) || !is_static(image.strides)) return false;
  const auto* groups = std::get_if<sym::Int>(&args[input + 8]);
  // On one thread ATen multiplies these itself.
  const bool plain_pixels = is_pixel(weight) && ones(args[input + 3]) && ones(args[input + 5]) && image.sizes[0].value() < 16;
  if (plain_pixels && at::get_num_threads() == 1) return false;
  return (groups && !groups->is(1)) || (weight.sizes[2].value() > 3 && weight.sizes[3].value() > 3) || image.sizes[0].value() > 1 ||
         image.numel().value() > 20480;
}

bool adds_long_sums(const ir::TensorType& weight) {
  constexpr int64_t kLong = int64_t(1) << 14;
  const sym::Int products = weight.sizes[1] * weight.sizes[2] * weight.sizes[3];
  return products.is_const() && products.value() >= kLong;
}

ChannelsLast::ChannelsLast(Graph& g) {
  for (Value v : g.outputs)
    if (v) outputs_.insert(v);
  for (Node* n : g.nodes())
    if (ops::is_custom(*n))
      ir::for_each_input(*n, [&](Value& v) {
        for (Node* of = v.node; of->op->flags & ir::kView; of = std::get<Value>(of->args[0]).node) shown_.insert(of);
      });
}

bool ChannelsLast::is_neutral(Value v) const { return !is_image(v.type()) || is_pixel(v.type()) || neutral_.contains(v); }

void ChannelsLast::follow(Node& n) {
  const bool pointwise = is_pointwise(n);
  bool any = false, all = true, spread = true;
  ir::for_each_input(n, [&](Value& v) {
    any = any || has(v);
    all = all && (has(v) || is_neutral(v));
    spread = spread && is_neutral(v);
  });
  if (spread && (pointwise || is(n, "aten::expand")) && n.outs.size() == 1) neutral_.insert(n.out());
  if (!any || !all || std::ranges::any_of(n.outs, [](const ir::TensorType& t) { return !is_native(t.dtype); })) return;  // ATen's, as eager's
  if (pointwise) {
    bool same = false;
    ir::for_each_input(n, [&](Value& v) { same = same || (has(v) && v.type().sizes == n.outs[0].sizes); });
    if (!same) return;
  } else if (!follows_layout(n)) {
    return;
  }
  n.as_contiguous = n.as_contiguous || n.outs[0].strides == ir::contiguous_strides(n.outs[0].sizes);
  for (uint32_t i = 0; i < n.outs.size(); ++i) {
    if (!is_image(n.outs[i]) || is_output(n.out(i))) continue;
    const ir::TensorType recorded = n.outs[i];
    n.outs[i].strides = ops::strides_for(MemoryFormat::ChannelsLast, n.outs[i].sizes);
    add(n.out(i));
    changed(n.out(i), recorded);
  }
}

void ChannelsLast::changed(Value v, const ir::TensorType& recorded) {
  if (v.type() == recorded) return;
  recorded_.try_emplace(v, recorded);
  if (v.index == 0) v.node->as_contiguous = recorded.strides == ir::contiguous_strides(recorded.sizes);
}

void ChannelsLast::restore(Graph& g, Node& n, const std::function<void(Node*, const Node*)>& made) {
  const std::string& name = n.op->name;
  const bool sees = ops::sees_layout(name) && (ops::is_extern(name) || name == "aten::view.dtype" || n.op->flags & kUnordered);
  if (!sees && !shown_.contains(&n)) return;
  ir::for_each_input(n, [&](Value& v) {
    const auto it = recorded_.find(v);
    if (it == recorded_.end()) return;
    auto [at, fresh] = restored_.try_emplace(v);
    if (fresh) {
      const ir::TensorType& type = it->second;
      std::optional<MemoryFormat> format;
      for (MemoryFormat f : {MemoryFormat::Contiguous, MemoryFormat::ChannelsLast})
        if (!format && type.strides == ops::strides_for(f, type.sizes)) format = f;
      if (format) {
        at->second = insert(g, &n, "aten::clone", {v, *format}, type)->out();
      } else {
        const std::vector<sym::Int> sizes(type.sizes.begin(), type.sizes.end()), strides(type.strides.begin(), type.strides.end());
        Node* empty = insert(g, &n, "aten::empty_strided", {sizes, strides, type.dtype, ir::None{}, type.device, ir::None{}}, type);
        at->second = insert(g, &n, "aten::copy", {empty->out(), v, false}, type)->out();
      }
      if (made) made(at->second.node, &n);
    }
    v = at->second;
  });
}

namespace {

class ConvolutionLayout {
 public:
  ConvolutionLayout(Graph& g, const std::function<void(Node*, const Node*)>& made) : g_(g), made_(made), last_(g) {}

  void run() {
    const std::vector<Node*> nodes = g_.nodes();
    for (size_t k = 0; k < nodes.size(); ++k) {
      Node* n = nodes[k];
      next_ = k + 1 < nodes.size() ? nodes[k + 1] : nullptr;
      if (n->op->name.starts_with("graph::"))
        find_given(n);
      else if (is_forward(*n))
        convolve(n, 0, {0});
      else if (is_backward(*n))
        convolve(n, 1, {0, 1});
      else if (ops::is_extern(n->op->name))
        last_.restore(g_, *n, made_);
      else
        last_.restore(g_, *n, made_), last_.follow(*n);
    }
  }

 private:
  bool is_last(Value v) { return ops::suggest_memory_format(g_.ctx(), v.type()) == MemoryFormat::ChannelsLast; }

  void find_given(Node* n) {
    if (is_image(n->outs[0]) && is_static(n->outs[0].sizes) && is_static(n->outs[0].strides) && is_last(n->out())) last_.add(n->out());
  }

  static int64_t bytes(const ir::TensorType& t) { return t.numel().value() * 4; }

  // Kernels of one pixel take either layout. Others have their weights copied, forward and backward, and the gradient of those copied back.
  bool is_worth_it(const Value& x, const Value& w, const ir::TensorType& out) {
    if (is_last(x) && !last_.is_changed(x)) return true;  // users gave it so
    return is_pixel(w.type()) ? is_last(x) : 2 * (bytes(x.type()) + bytes(out)) >= bytes(w.type());
  }

  void convolve(Node* n, size_t input, std::initializer_list<uint32_t> results) {
    const Value x = tensor(*n, input), w = tensor(*n, input + 1);
    const bool last = is_worth_it(x, w, input == 0 ? n->outs[0] : tensor(*n, 0).type());
    const MemoryFormat format = last ? MemoryFormat::ChannelsLast : MemoryFormat::Contiguous;
    auto take = [&](size_t i) {  // ATen would copy it, slowly
      const Value v = tensor(*n, i);
      if (is_last(v) != last && (last ? !is_pixel(v.type()) : last_.is_changed(v))) n->args[i] = copied(n, v, format);
    };
    for (size_t i = 0; i <= input + 1; ++i) take(i);
    if (!last || !is_last(tensor(*n, input))) return;  // one channel: either
    last_.add(tensor(*n, input));
    const auto recorded = n->outs;
    for (uint32_t i : results)
      if (is_image(recorded[i]) && !(i == 1 && is_pixel(recorded[i])))  // asked for, and not a gradient of weights that is the same in either layout
        n->outs[i].strides = ops::strides_for(MemoryFormat::ChannelsLast, recorded[i].sizes);
    capture::apply_learned(n->op->name, n->args, {n->outs.data(), n->outs.size()});
    for (uint32_t i : results) {
      const Value v = n->out(i);
      const ir::TensorType& seen = recorded[i];
      if (!is_image(seen)) continue;
      if (v.type() == seen) {
        if (is_last(v)) last_.add(v);
        continue;
      }
      if (last_.is_output(v)) {
        Node* theirs = next_ ? g_.insert_before(next_, g_.op("aten::clone"), {v, MemoryFormat::Contiguous}, {seen})
                             : g_.append(g_.op("aten::clone"), {v, MemoryFormat::Contiguous}, {seen});
        made_(theirs, n);
        for (Value& o : g_.outputs)
          if (o == v) o = theirs->out();
      }
      last_.add(v);
      last_.changed(v, seen);
    }
  }

  // One copy serves all that read it from here on.
  Value copied(Node* reader, Value v, MemoryFormat f) {
    auto [at, fresh] = copies_[f == MemoryFormat::ChannelsLast].try_emplace(v);
    if (fresh) {
      ir::TensorType type = v.type();
      type.strides = ops::strides_for(f, type.sizes);
      at->second = insert(g_, reader, "aten::clone", {v, f}, std::move(type))->out();
      made_(at->second.node, reader);
      if (f == MemoryFormat::ChannelsLast) last_.add(at->second);
    }
    return at->second;
  }

  Graph& g_;
  const std::function<void(Node*, const Node*)>& made_;
  ChannelsLast last_;
  std::unordered_map<Value, Value> copies_[2];
  Node* next_ = nullptr;
};

}  // namespace

bool convolve_channels_last(Graph& g, const std::function<void(Node*, const Node*)>& made) {
  if (!has_chain(g)) return false;
  ConvolutionLayout(g, made).run();
  return true;
}

}  // namespace vitrify
