// What nobody needs for now leaves memory: a compile leaves much that the steps after it have no use for. Linux with glibc; elsewhere nothing
// happens.
#pragma once

namespace vitrify {

// Pages of code and constants of the shared object around the address `inside`: only what its file has too, so that the next to run there finds them
// in the page cache.
void return_code_pages(const void* inside);

// What malloc() holds for nobody, but for the ends of the arenas of other threads. Milliseconds.
void return_free_memory();

// For a thread at its end: what its own arena holds for nobody, the end included.
void return_thread_memory();

}  // namespace vitrify
