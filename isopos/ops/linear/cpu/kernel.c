/* Linear attention with float32 sums, causal ones and those over all keys: what chunks.py says with separate PyTorch operations.

   A thread takes a head and goes through its chunks, with states, features and scores in its own cache; threads meet once, at
   the end. Where there are fewer heads than threads, heads are cut into parts: what each part adds to the states is summed up
   first. Products leave out what a query does not see. Features are made on the way, so that nothing is written that only the
   next pass would read: float32 ones of narrower numbers, with zeros up to whole vectors where a width is no multiple of them.
   Sums over later tokens are those over earlier ones of the tokens in reverse, without a token's own key. Sums over all keys are
   one state, that of all of them, and a product with it; then gradients of that state come before those of keys and values.

   Built once per instruction set; library.py picks the one that PyTorch picked for itself. OpenMP is PyTorch's own. */

#include <immintrin.h>
#include <omp.h>
#include <string.h>
#include <sys/mman.h>

#include "simd.h"
#include "call.h"
#include "gemm.h"
#include "features.h"
#include "decay.h"
#include "states.h"
#include "causal.h"
#include "all_keys.h"
#include "step.h"
#include "rotate.h"
