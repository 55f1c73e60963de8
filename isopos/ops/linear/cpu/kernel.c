/* Linear attention with float32 sums, causal ones and those over all keys: what chunks.py says with separate PyTorch operations.

   A thread takes a head and goes through its chunks, with states, features and scores in its own cache; threads meet once, at
   the end. Where there are fewer heads than threads, heads are cut into parts: what each part adds to the states is summed up
   first. Products leave out what a query does not see. Features are made on the way, so that nothing is written that only the
   next pass would read: float32 ones of narrower numbers, with zeros up to whole vectors where a width is no multiple of them.
   Sums over later tokens are those over earlier ones of the tokens in reverse, without a token's own key. Sums over all keys are
   one state, that of all of them, and a product with it; then gradients of that state come before those of keys and values.

   Built once per instruction set: AVX512, AVX2 and what every x86-64 has, and NEON on ARM, by GCC or Clang; library.py picks one.
   It takes nothing but the C library: no symbols of Python or PyTorch, and the threads of whoever calls. */

#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <immintrin.h>
#ifdef __linux__
#include <sys/mman.h>
#define RESIDENT /* mincore says whether a page is in memory */
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
