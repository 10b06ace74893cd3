// Code that nobody needs for now leaves memory.
#pragma once

namespace vitrify {

// Pages of code and constants of the shared object around the address `inside` leave this process: only what its file has too, so that the next
// to run there finds them in the page cache. Linux only.
void return_code_pages(const void* inside);

}  // namespace vitrify
