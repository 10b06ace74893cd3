#include "torch/ask_kernel.h"

#include <algorithm>

#include "ir/faults.h"
#include "ops/lowering.h"
#include "ops/rules.h"
#include "torch/convert.h"

namespace vitrify {

using ir::Arg;
using ir::TensorType;
using ir::Value;

// What they keep for their backward is of a size that the kernel alone knows: Meta says another, or none.
bool hides_sizes(const std::string& name) {
  return name == "aten::_embedding_bag" || name == "aten::_embedding_bag_forward_only" || name == "aten::mkldnn_rnn_layer";
}

// Meta says other strides than the kernel gives. What is large is left to the run to find out.
bool hides_strides(const std::string& name, const std::vector<at::Tensor>& results, c10::Device device) {
  constexpr int64_t kMostElements = 1 << 16;
  return (name == "aten::_fft_r2c" || name == "aten::_linalg_svd" || name == "aten::linalg_eig") && device.is_cpu() &&
         std::ranges::all_of(results, [&](const at::Tensor& t) {
           const bool one = t.defined() && name == "aten::_fft_r2c" && std::count(t.sizes().begin(), t.sizes().end(), 1);
           return !t.defined() || one || t.numel() <= kMostElements;
         });
}

Operands look_at(const std::vector<Arg>& args) {
  Operands r;
  bool ints = false, floats = false;
  auto look = [&](const Value& v) {
    if (!v) return;
    const TensorType& t = v.type();
    r.other = r.other || !(t.strides == ir::contiguous_strides(t.sizes));  // those of one element too
    ints = ints || t.dtype == DType::I32;                                  // LAPACK's own: kernels look at those of torch, which are int64
    floats = floats || is_float(t.dtype) || is_complex(t.dtype);
    r.here = r.here && t.device.kind == DeviceKind::CPU;
    double n = 1;
    for (sym::Int s : t.sizes) n *= static_cast<double>(value_of(s));
    r.elements += n;
  };
  for (const Arg& a : args) {
    if (auto* v = std::get_if<Value>(&a)) look(*v);
    if (auto* l = std::get_if<std::vector<Value>>(&a)) std::ranges::for_each(*l, look);
  }
  r.places = ints && floats;
  return r;
}

bool checks_operands(const capture::OpInfo& info) {
  return info.row && info.row->shape && ops::is_elementwise(info.name) && !(info.flags & ir::kDivides);
}

// Meta kernels lay results out by rules of their own where operands are not row-major (channels-last images). They are written in Python: the first
// of them that runs has torch import its own compiler, which takes longer than most captures. The kernel takes about as long as in a call.
bool asks_kernel(const capture::OpInfo& info, const std::vector<Arg>& args) {
  if (!info.name.starts_with("aten::") || info.op.schema().is_mutable() || info.flags & (ir::kEffect | ir::kDataDependent)) return false;
  const Operands o = look_at(args);
  return o.here && !o.places && o.elements <= kMostZeros;
}
}  // namespace vitrify
