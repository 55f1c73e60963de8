/* Linear attention with float32 sums, causal or over all keys: the algorithm of chunks.py without separate PyTorch operations.

   A thread takes a head and scans its chunks, with states, features and scores in its cache; threads synchronise once, at the
   end. If there are fewer heads than threads, heads are cut into parts, and the contribution of each part to the states is summed
   up first. Products leave out keys that a query does not see. Features are computed per chunk and never written to memory: they
   are float32, with zeros up to whole vectors. Sums over later tokens are sums over earlier ones with the tokens in reverse order,
   without the diagonal. Sums over all keys are products with one state, whose gradient comes before those of keys and values.

   It is built once per instruction set (AVX512, AVX2, SSE2 for any x86-64; NEON on ARM) by GCC or Clang; library.py picks one. It
   needs only the C library: no symbols of Python or PyTorch, and it runs on the threads of the caller. */

#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <immintrin.h>
#ifdef __linux__
#include <sys/mman.h>
#define RESIDENT /* mincore tells whether a page is in memory */
#endif
#endif

#ifdef _WIN32
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

#include "simd.h"
#include "threads.h"
#include "call.h"
#include "gemm.h"
#include "features.h"
#include "decay.h"
#include "states.h"
#include "causal.h"
#include "all_keys.h"
#include "step.h"
#include "rotate.h"
