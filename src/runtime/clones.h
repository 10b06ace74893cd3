// VT_CLONES: a function is compiled for AVX-512, for AVX2 and for any x86-64, and the loader picks one.
#pragma once

#ifdef __SANITIZE_THREAD__  // the loader's choice is instrumented, and runs before tsan does
#define VT_CLONES
#else
#define VT_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#endif
