// Allocations that fail: the n-th that is asked for, once or from then on.
#pragma once
#include <cstdint>

namespace failing {

enum class Which { Memory, Tensors };  // operator new as our libraries call it (the code generator's too), or the memory of tensors
enum class Often { Once, FromThenOn };

void arm(Which, Often, int64_t nth);  // counts from 1
int64_t disarm();                     // how many were asked for

}  // namespace failing
