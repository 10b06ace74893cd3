// What a sanitizer is told of the memory that kernels use. Nothing, in builds without one.
#pragma once

#include <llvm/IR/Module.h>

#include <string_view>

namespace vitrify::codegen::x86 {

void instrument(llvm::Module& m);
void* sanitizer_function(std::string_view name);  // what instrumented code calls; null if it is none of those

}  // namespace vitrify::codegen::x86
