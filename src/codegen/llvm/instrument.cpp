// In builds with a sanitizer kernels tell it what they read and write, as compilers do for C++: the thread sanitizer sees two chunks that write the
// same element, the address sanitizer one that reads beyond a tensor.
#include "codegen/llvm/instrument.h"

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)

#include <llvm/Analysis/ValueTracking.h>
#include <llvm/IR/IRBuilder.h>
#include <llvm/IR/InstIterator.h>
#include <llvm/IR/IntrinsicInst.h>

#ifdef __SANITIZE_THREAD__
#define VT_READS __tsan_read_range
#define VT_WRITES __tsan_write_range
#else
#define VT_READS __asan_loadN
#define VT_WRITES __asan_storeN
#endif
extern "C" {
void VT_READS(void*, unsigned long);
void VT_WRITES(void*, unsigned long);
}

namespace vitrify::codegen::x86 {
namespace {

constexpr const char *kReads = "vt_sanitizer_reads", *kWrites = "vt_sanitizer_writes";

class Instrument {
 public:
  explicit Instrument(llvm::Module& m) : m_(m), layout_(m.getDataLayout()) {}

  void run() {
    std::vector<llvm::Instruction*> all;
    for (llvm::Function& f : m_)
      for (llvm::Instruction& i : llvm::instructions(f)) all.push_back(&i);
    for (llvm::Instruction* i : all) note(*i);
  }

 private:
  void note(llvm::Instruction& i) {
    llvm::IRBuilder<> b(&i);
    if (auto* l = llvm::dyn_cast<llvm::LoadInst>(&i)) {
      if (!l->isAtomic()) tell(b, kReads, l->getPointerOperand(), b.getInt64(bytes(l->getType())));
    } else if (auto* s = llvm::dyn_cast<llvm::StoreInst>(&i)) {
      if (!s->isAtomic()) tell(b, kWrites, s->getPointerOperand(), b.getInt64(bytes(s->getValueOperand()->getType())));
    } else if (auto* set = llvm::dyn_cast<llvm::MemSetInst>(&i)) {
      tell(b, kWrites, set->getDest(), b.CreateZExtOrTrunc(set->getLength(), b.getInt64Ty()));
    } else if (auto* call = llvm::dyn_cast<llvm::IntrinsicInst>(&i)) {
      switch (call->getIntrinsicID()) {
        case llvm::Intrinsic::masked_load:
        case llvm::Intrinsic::masked_gather:
          return lanes(b, kReads, call->getType(), call->getArgOperand(0), call->getArgOperand(2));
        case llvm::Intrinsic::masked_store:
        case llvm::Intrinsic::masked_scatter:
          return lanes(b, kWrites, call->getArgOperand(0)->getType(), call->getArgOperand(1), call->getArgOperand(3));
        default:
          break;
      }
    }
  }

  // `at`: where all lanes lie, or a pointer for each. Nothing is told of lanes that the mask leaves out: their size is 0.
  void lanes(llvm::IRBuilder<>& b, const char* what, llvm::Type* type, llvm::Value* at, llvm::Value* mask) {
    auto* vector = llvm::cast<llvm::FixedVectorType>(type);
    const uint64_t size = bytes(vector->getElementType());
    for (unsigned l = 0; l < vector->getNumElements(); ++l) {
      llvm::Value* p = at->getType()->isVectorTy() ? b.CreateExtractElement(at, uint64_t(l)) : b.CreateConstGEP1_64(vector->getElementType(), at, l);
      tell(b, what, p, b.CreateSelect(b.CreateExtractElement(mask, uint64_t(l)), b.getInt64(size), b.getInt64(0)));
    }
  }

  void tell(llvm::IRBuilder<>& b, const char* what, llvm::Value* p, llvm::Value* size) {
    const llvm::Value* of = llvm::getUnderlyingObject(p);
    if (llvm::isa<llvm::AllocaInst>(of) || llvm::isa<llvm::GlobalVariable>(of)) return;
    b.CreateCall(m_.getOrInsertFunction(what, b.getVoidTy(), b.getPtrTy(), b.getInt64Ty()), {p, size});
  }

  uint64_t bytes(llvm::Type* t) const { return layout_.getTypeStoreSize(t).getFixedValue(); }

  llvm::Module& m_;
  const llvm::DataLayout& layout_;
};

}  // namespace

void instrument(llvm::Module& m) { Instrument(m).run(); }

void* sanitizer_function(std::string_view name) {
  if (name == kReads) return reinterpret_cast<void*>(&VT_READS);
  if (name == kWrites) return reinterpret_cast<void*>(&VT_WRITES);
  return nullptr;
}

}  // namespace vitrify::codegen::x86

#else

namespace vitrify::codegen::x86 {

void instrument(llvm::Module&) {}
void* sanitizer_function(std::string_view) { return nullptr; }

}  // namespace vitrify::codegen::x86

#endif
