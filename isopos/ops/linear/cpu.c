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

#ifdef __AVX512F__
#define LANES 16
#define ROWS 8 /* of a block, whose ROWS * WIDE sums stay in registers: enough of them to hide that a sum takes four cycles */
#define WIDE 2 /* vectors of a row of a block */
#define LANES_LIST(f) {f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), f(10), f(11), f(12), f(13), f(14), f(15)}
#else
#define LANES 8
#define ROWS 4
#define WIDE 2
#define LANES_LIST(f) {f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7)}
#endif
#define CHUNK 64 /* the most tokens of a chunk */
#define STEPS (64 / LANES) /* of a product, between lines of memory that it asks for */
#define GROUP 4  /* chunks between states that the backward pass gets: it computes those between again */
#define MOST 256 /* the most features */
#define PAST (1 << 20) /* numbers of a result that is written past the caches */
#define SMALL 1e-6f
#define STEEP 64 /* the most that a log decay falls by inside a chunk whose weights are products */
#define INLINE static inline __attribute__((always_inline))
#define ALIGNED __attribute__((aligned(64)))

typedef float lanes __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int order __attribute__((vector_size(LANES * 4)));
typedef double doubles __attribute__((vector_size(LANES * 8), aligned(8), may_alias));

/* Rows of tokens, contiguous features: strides in numbers; those of samples and heads may be zero. */
typedef struct {
    void *first;
    long sample, head, token;
} View;

enum { IDENTITY, ELU1, RELU, RELU2, EXP };
enum { NONE, ROTATION, LIFT, GATHER };
enum { FLOAT32, BFLOAT16, FLOAT16 };
enum { OUT_OF_RANGE = 1, NOT_FINITE = 2 }; /* an index of a gather that is no feature's; NaN or infinite sums */

/* An input x, and what makes features of it: phi, a reflection, then a table. `own` are features for the denominator. x and its
   gradient are `numbers` of a type, all others float32. */
typedef struct {
    View x, own, grad, grad_own, mask, normal, table, grad_table; /* mask: bytes, tokens that take part; any may be null but x */
    long type, numbers, width;                                    /* width: the numbers up to whole vectors */
    long phi, kind, add, past;                                    /* add: to gradients that are there; past: see `run` */
    double *grad_decay;                                           /* [all length] or null */
} Input;

/* States [all . .] hold those before these tokens and end as those after them, gradients of states the reverse. */
typedef struct {
    long all, heads, length, keys, parts, d, e, own, values, threads, denominated, divide, begins, ends, reverse, start;
    /* heads of all samples and of one; tokens, of queries and of keys where sums are over all; parts of a head; features of keys,
       values and the denominator alone or 0, up to whole vectors; numbers of sums; begins, ends: no token comes before, or after;
       reverse: sums over later tokens, added to those that are there; start: of a step, its token's place in tables and weights */
    View g_q, g_k;      /* log decays, double, or null */
    float *state, *row; /* sums of k v^T and of a denominator's k; in a step those before it */
    float *saved, *saved_rows, *across; /* those before each group of chunks, or null; in a step those after it, and weights */
    View out, denominator; /* sums, divided or not, and denominators */
    View grad;
    float *grad_state, *grad_row;
    float *totals, *scratch; /* buffers [all parts total_size] and [threads scratch_size]: threads may have small stacks */
    long total_size, scratch_size, past, *found; /* past: see `run`; found: what is found on the way */
    Input q, k, v;
} Call;

/* c tokens of a head, from `start` on; the head is one of all, and the one `place` of a sample. */
typedef struct {
    long head, sample, place, start, c;
} Chunk;

typedef struct {
    const float *at;
    long stride;
} Rows;

INLINE Chunk chunk_of(const Call *call, long head, long start, long to)
{
    return (Chunk){head, head / call->heads, head % call->heads, start, to - start < CHUNK ? to - start : CHUNK};
}

INLINE long index_of(const View *view, Chunk n)
{
    return n.sample * view->sample + n.place * view->head + n.start * view->token;
}

INLINE char *place_of(const View *view, Chunk n, long i, long type)
{
    return (char *)view->first + (index_of(view, n) + i * view->token) * (type == FLOAT32 ? 4 : 2);
}

INLINE float *rows_of(const View *view, Chunk n)
{
    return (float *)view->first + index_of(view, n);
}

INLINE void find(const Call *call, long what)
{
    __atomic_fetch_or(call->found, what, __ATOMIC_RELAXED);
}

INLINE long blocks(long c)
{
    return (c + ROWS - 1) / ROWS * ROWS;
}

/* --- products --- */

/* a [rows depth] times b [depth columns]; a's strides let it be a transpose. */
typedef struct {
    const float *a;
    long row, column;
    const float *b;
    long stride, depth;
} Product;

/* Tokens of a chunk that is further than a processor looks ahead: asked for line by line while products are made, as all at once
   would take the buffers that other lines need. Of k, v, q, the gradient and the output of sums, and gradients of k, v and q
   some that follow each other. */
typedef struct {
    const Call *call;
    Chunk n;
    int tensor, tensors;   /* the next one, and the end */
    const char *at, *stop; /* the next line, and the end of its row */
    long stride, gap;      /* from row to row, and from the end of one to the next, in bytes */
    long left, twice;      /* lines of this tensor; whether two are asked for at a time, not one */
} Ahead;

/* To the next tensor that there is, when one is done. */
static void go_on(Ahead *ahead)
{
    const Call *call = ahead->call;
    while (!ahead->left && ahead->tensor < ahead->tensors) {
        const int m = ahead->tensor++;
        const Input *inputs[] = {&call->k, &call->v, &call->q}, *o = m < 3 ? inputs[m] : m < 5 ? 0 : inputs[m - 5];
        const View *view = m < 3 ? &o->x : m == 3 ? &call->grad : m == 4 ? &call->out : &o->grad;
        const long type = o ? o->type : FLOAT32, numbers = o ? o->numbers : call->values, size = type == FLOAT32 ? 4 : 2;
        const long together = view->token == numbers ? ahead->n.c : 1, lines = (together * numbers * size + 63) / 64;
        if (!view->first)
            continue;
        ahead->at = place_of(view, ahead->n, 0, type), ahead->stop = ahead->at + lines * 64;
        ahead->stride = view->token * size, ahead->gap = ahead->stride - lines * 64;
        ahead->left = ahead->n.c / together * lines;
    }
}

INLINE Ahead ahead_of(const Call *call, Chunk n, int tensor, int tensors)
{
    Ahead ahead = {call, n, tensor, n.c > 0 ? tensors : 0};
    ahead.twice = call->d <= 32 || call->reverse; /* by which about all are asked for */
    return ahead;
}

INLINE void add_step(lanes sum[ROWS][WIDE], const int wide, const Product *p, long j, long m)
{
    lanes b[WIDE];
    for (int w = 0; w < wide; w++)
        b[w] = *(const lanes *)(p->b + m * p->stride + j + w * LANES);
    for (int r = 0; r < ROWS; r++) {
        const float a = p->a[r * p->row + m * p->column];
        for (int w = 0; w < wide; w++)
            sum[r][w] += a * b[w];
    }
}

/* Columns of b from j on. */
INLINE void add_product(lanes sum[ROWS][WIDE], const int wide, const Product *p, long j, Ahead *ahead)
{
    const char *at = ahead->at, *stop = ahead->stop;
    long left = ahead->left, m = 0;
    for (; m + STEPS <= p->depth; m += STEPS) {
        for (int n = 0; n < 2 && (n == 0 || ahead->twice) && left > 0; n++) {
            __builtin_prefetch(at, 0, 2);
            left--, at += 64;
            if (at == stop)
                at += ahead->gap, stop += ahead->stride;
        }
        for (int n = 0; n < STEPS; n++)
            add_step(sum, wide, p, j, m + n);
    }
    for (; m < p->depth; m++)
        add_step(sum, wide, p, j, m);
    ahead->at = at, ahead->stop = stop, ahead->left = left;
}

/* Writes a vector, with `past` to memory without reading what is overwritten: an aligned one then. */
INLINE void put(float *out, lanes x, int past)
{
    if (!past)
        *(lanes *)out = x;
    else
#if LANES == 16
        _mm512_stream_ps(out, (__m512)x);
#else
        _mm256_stream_ps(out, (__m256)x);
#endif
}

/* Where ROWS rows of a block go, and what they are multiplied by at the end, or null; `past` as `put` has it. Zero times every
   number is added to `zeros`, if it is given: they stay zeros where all are finite. */
typedef struct {
    float *at;
    long stride;
    const float *last;
    int past;
    lanes *zeros;
} Out;

INLINE void scale_rows(lanes sum[ROWS][WIDE], const int wide, const float *by)
{
    for (int r = 0; r < ROWS; r++)
        for (int w = 0; w < wide; w++)
            sum[r][w] *= by[r];
}

INLINE void panel(const int wide, const Out *out, long j, const Product *p, const float *scale, const Product *more,
                  Ahead *ahead)
{
    lanes sum[ROWS][WIDE], zeros[WIDE] = {0};
    float *at = out->at + j;
    go_on(ahead);
    for (int r = 0; r < ROWS; r++)
        for (int w = 0; w < wide; w++)
            sum[r][w] = (lanes){0};
    add_product(sum, wide, p, j, ahead);
    if (scale)
        scale_rows(sum, wide, scale);
    add_product(sum, wide, more, j, ahead);
    if (out->last)
        scale_rows(sum, wide, out->last);
    for (int r = 0; r < ROWS; r++)
        for (int w = 0; w < wide; w++)
            put(at + r * out->stride + w * LANES, sum[r][w], out->past);
    for (int r = 0; out->zeros && r < ROWS; r++)
        for (int w = 0; w < wide; w++)
            zeros[w] += 0 * sum[r][w];
    for (int w = 0; out->zeros && w < wide; w++)
        *out->zeros += zeros[w];
}

/* out [ROWS columns] = last * (scale * p + more); a scale that is null is 1. */
static void block(const Out *out, long columns, const Product *p, const float *scale, const Product *more, Ahead *ahead)
{
    long j = 0;
    for (; j + WIDE * LANES <= columns; j += WIDE * LANES)
        panel(WIDE, out, j, p, scale, more, ahead);
    if (j < columns)
        panel(1, out, j, p, scale, more, ahead);
}

/* to [rows columns] = across * from + p, of whole blocks of rows: a chunk's own sum, as sums of all tokens one by one would lose
   digits. */
INLINE void state_panel(const int wide, const float *from, float *to, long stride, float across, const Product *p, long j,
                        Ahead *ahead)
{
    lanes sum[ROWS][WIDE];
    go_on(ahead);
    for (int r = 0; r < ROWS; r++)
        for (int w = 0; w < wide; w++)
            sum[r][w] = (lanes){0};
    add_product(sum, wide, p, j, ahead);
    for (int r = 0; r < ROWS; r++)
        for (int w = 0; w < wide; w++)
            *(lanes *)(to + r * stride + j + w * LANES) = across * *(const lanes *)(from + r * stride + j + w * LANES) + sum[r][w];
}

static void add_to_state(const float *from, float *to, long rows, long columns, float across, Product p, Ahead *ahead)
{
    for (long i = 0; i < rows; i += ROWS, p.a += ROWS * p.row, from += ROWS * columns, to += ROWS * columns) {
        long j = 0;
        for (; j + WIDE * LANES <= columns; j += WIDE * LANES)
            state_panel(WIDE, from, to, columns, across, &p, j, ahead);
        if (j < columns)
            state_panel(1, from, to, columns, across, &p, j, ahead);
    }
}

/* x [rows columns] into out [columns stride], with zeros for the rows up to the stride. */
static void transpose(Rows x, long rows, long columns, float *out, long stride)
{
#define LOW(s, l) ((l) & (s) ? LANES + (l) - (s) : (l))
#define HIGH(s, l) ((l) & (s) ? LANES + (l) : (l) + (s))
#define LOW1(l) LOW(1, l)
#define LOW2(l) LOW(2, l)
#define LOW4(l) LOW(4, l)
#define LOW8(l) LOW(8, l)
#define HIGH1(l) HIGH(1, l)
#define HIGH2(l) HIGH(2, l)
#define HIGH4(l) HIGH(4, l)
#define HIGH8(l) HIGH(8, l)
#define SWAP(s, low, high)                                                            \
    _Pragma("GCC unroll 16") for (int r = 0; r < LANES; r++) if (!(r & s))            \
    {                                                                                 \
        const lanes a = row[r], b = row[r + s];                                       \
        row[r] = __builtin_shuffle(a, b, (order)LANES_LIST(low));                     \
        row[r + s] = __builtin_shuffle(a, b, (order)LANES_LIST(high));                \
    }
    for (long i = 0; i < stride; i += LANES)
        for (long j = 0; j < columns; j += LANES) {
            lanes row[LANES];
            for (int r = 0; r < LANES; r++)
                row[r] = i + r < rows ? *(const lanes *)(x.at + (i + r) * x.stride + j) : (lanes){0};
            SWAP(1, LOW1, HIGH1)
            SWAP(2, LOW2, HIGH2)
            SWAP(4, LOW4, HIGH4)
#if LANES == 16
            SWAP(8, LOW8, HIGH8)
#endif
            for (int r = 0; r < LANES; r++)
                *(lanes *)(out + (j + r) * stride + i) = row[r];
        }
}

INLINE float total(lanes x)
{
#define HALF8(l) ((l) ^ 8)
#define HALF4(l) ((l) ^ 4)
#define HALF2(l) ((l) ^ 2)
#define HALF1(l) ((l) ^ 1)
#if LANES == 16
    x += __builtin_shuffle(x, (order)LANES_LIST(HALF8));
#endif
    x += __builtin_shuffle(x, (order)LANES_LIST(HALF4));
    x += __builtin_shuffle(x, (order)LANES_LIST(HALF2));
    x += __builtin_shuffle(x, (order)LANES_LIST(HALF1));
    return x[0];
}

INLINE float dot(const float *x, const float *y, long width)
{
    lanes sum = {0};
    for (long m = 0; m < width; m += LANES)
        sum += *(const lanes *)(x + m) * *(const lanes *)(y + m);
    return total(sum);
}

INLINE float *scratch_of(const Call *call)
{
    return call->scratch + omp_get_thread_num() * call->scratch_size;
}

INLINE float *take(float **buffer, long count)
{
    float *taken = *buffer;
    *buffer += count;
    return taken;
}

/* --- numbers --- */

INLINE lanes widen(const void *from, long type)
{
#if LANES == 16
    const __m256i x = _mm256_loadu_si256(from);
    return type == FLOAT16 ? (lanes)_mm512_cvtph_ps(x) : (lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16);
#else
    const __m128i x = _mm_loadu_si128(from);
    return type == FLOAT16 ? (lanes)_mm256_cvtph_ps(x) : (lanes)_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16);
#endif
}

/* To the nearest of a type, and to the even one of two. */
INLINE void narrow(lanes x, long type, void *to)
{
    const order bits = (order)x, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const order half = ((x == x) & rounded) | ((x != x) & 0x7fc0);
#if LANES == 16
    _mm256_storeu_si256(to, type == FLOAT16 ? _mm512_cvtps_ph((__m512)x, 0) : _mm512_cvtepi32_epi16((__m512i)half));
#else
    const __m256i low = _mm256_and_si256((__m256i)half, _mm256_set1_epi32(0xffff));
    const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    _mm_storeu_si128(to, type == FLOAT16 ? _mm256_cvtps_ph((__m256)x, 0) : packed);
#endif
}

/* Some numbers as float32 with zeros up to a width: where they are, or in the buffer. */
INLINE const float *load(const void *from, long type, long numbers, long width, float *buffer)
{
    if (type == FLOAT32 && numbers == width)
        return from;
    const long size = type == FLOAT32 ? 4 : 2;
    for (long m = 0; m < width; m += LANES) {
        const char *part = (const char *)from + m * size;
        char room[LANES * 4] = {0};
        if (m + LANES > numbers)
            part = m < numbers ? memcpy(room, part, (numbers - m) * size) : room;
        *(lanes *)(buffer + m) = type == FLOAT32 ? *(const lanes *)part : widen(part, type);
    }
    return buffer;
}

/* The row i of an input. */
INLINE const float *load_row(const Input *o, Chunk n, long i, float *buffer)
{
    return load(place_of(&o->x, n, i, o->type), o->type, o->numbers, o->width, buffer);
}

INLINE void store(const float *x, long type, long numbers, void *to)
{
    const long whole = numbers / LANES * LANES;
    char room[LANES * 2];
    if (type == FLOAT32) {
        memcpy(to, x, numbers * 4);
        return;
    }
    for (long m = 0; m < whole; m += LANES)
        narrow(*(const lanes *)(x + m), type, (char *)to + m * 2);
    if (whole < numbers) {
        narrow(*(const lanes *)(x + whole), type, room);
        memcpy((char *)to + whole * 2, room, (numbers - whole) * 2);
    }
}

/* --- features --- */

INLINE lanes choose(order where, lanes a, lanes b)
{
    return (lanes)((where & (order)a) | (~where & (order)b));
}

/* The smaller and the larger one; NaN where x is. */
INLINE lanes at_most(lanes x, float most)
{
#if LANES == 16
    return (lanes)_mm512_min_ps(_mm512_set1_ps(most), (__m512)x);
#else
    return (lanes)_mm256_min_ps(_mm256_set1_ps(most), (__m256)x);
#endif
}

INLINE lanes at_least(lanes x, float least)
{
#if LANES == 16
    return (lanes)_mm512_max_ps(_mm512_set1_ps(least), (__m512)x);
#else
    return (lanes)_mm256_max_ps(_mm256_set1_ps(least), (__m256)x);
#endif
}

/* exp of the smaller one of x and `most`, to about one unit in the last place; with infinities and NaN as they should be. */
INLINE lanes exponential(lanes x, float most)
{
    const float log2 = 1.44269504f, high = 0.693359375f, low = -2.12194440e-4f; /* high + low = log 2 */
    x = at_least(at_most(x, most), -104);
#if LANES == 16
    /* x = log(2) n + r, where n has four binary places: 2^n is a number of a table times a power of 2 */
    static const float powers[16] ALIGNED = {1.0f, 1.0442737824f, 1.0905077327f, 1.1387886348f, 1.1892071150f, 1.2418578121f,
                                             1.2968395547f, 1.3542555469f, 1.4142135624f, 1.4768261459f, 1.5422108254f,
                                             1.6104903319f, 1.6817928305f, 1.7562521604f, 1.8340080864f, 1.9152065614f};
    const lanes shift = (lanes){0} + 0x1.8p19f, shifted = x * log2 + shift, n = shifted - shift;
    const lanes r = (x - n * high) - n * low, s = r * 1.6666667163e-1f + 0.5f, y = (s * r) * r + r;
    const lanes power = __builtin_shuffle(*(const lanes *)powers, (order)shifted & 15);
    return (lanes)_mm512_scalef_ps((__m512)(power * y + power), (__m512)n);
#else
    const lanes power = (lanes)_mm256_round_ps((__m256)(x * log2), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const lanes r = (x - power * high) - power * low;
    lanes y = (lanes){0} + 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    const order whole = (order)_mm256_cvtps_epi32((__m256)power), half = whole >> 1;
    return y * (lanes)((half + 127) << 23) * (lanes)((whole - half + 127) << 23);
#endif
}

/* exp(g_i - g_j) from the token before a chunk to each (before), from each to its last one (after), from token to token (step)
   and across it. No exponent of these exceeds zero: r^i and r^-j, which overflow, are not formed. But where a log decay falls by
   at most STEEP inside a chunk, weights there are row_i * column_j, with the first key between them. */
typedef struct {
    float before[CHUNK], after[CHUNK], step[CHUNK], row[CHUNK], column[CHUNK], across;
    double query[CHUNK], key[CHUNK];
    int fades, steep; /* whether any weight is not 1, and whether there are no rows and columns */
} Weights;

/* With what float32 leaves of x, by which products of exponentials are as exact as they are. */
INLINE lanes exponentials(doubles x)
{
    const lanes most = __builtin_convertvector(x, lanes), power = exponential(most, 89);
    const lanes rest = __builtin_convertvector(x - __builtin_convertvector(most, doubles), lanes);
    return power + power * choose(rest * rest < 1, rest, (lanes){0}); /* infinity has none */
}

static void make_weights(const Call *call, Chunk n, Weights *w)
{
    const long c = n.c;
    double step[CHUNK], start = 0, end = 0;
    w->fades = 0;
    if (call->g_q.first) {
        const double *query = (const double *)call->g_q.first + index_of(&call->g_q, n);
        const double *key = (const double *)call->g_k.first + index_of(&call->g_k, n);
        const int first = call->begins && n.start == 0; /* then the state before is zero */
        const double sign = call->reverse ? -1 : 1; /* tokens that are further away have less weight in either direction */
        start = sign * key[first ? 0 : -call->g_k.token], end = sign * key[(c - 1) * call->g_k.token];
        if (first && start < sign * *query) /* that token has no key before it, from which to fall */
            start = sign * *query;
        for (long i = 0; i < c; i++) {
            w->query[i] = sign * query[i * call->g_q.token];
            w->key[i] = sign * key[i * call->g_k.token];
            w->fades |= w->query[i] != start || w->key[i] != start;
            step[i] = w->query[i] - (i ? w->query[i - 1] : start);
        }
    }
    if (!w->fades) {
        for (long i = 0; i < CHUNK; i++)
            w->before[i] = w->after[i] = w->step[i] = 1;
        w->across = 1;
        return;
    }
    for (long i = c; i % LANES; i++)
        w->query[i] = w->key[i] = end, step[i] = 0;
    w->steep = !(w->query[c - 1] - w->key[0] >= -STEEP && end - w->key[0] >= -STEEP);
    w->across = exponentials((doubles){end - start})[0];
    for (long i = 0; i < c; i += LANES) {
        const doubles query = *(const doubles *)(w->query + i), key = *(const doubles *)(w->key + i);
        *(lanes *)(w->before + i) = exponentials(query - start);
        *(lanes *)(w->after + i) = exponentials(end - key);
        *(lanes *)(w->step + i) = exponentials(*(const doubles *)(step + i));
        *(lanes *)(w->row + i) = exponentials(query - w->key[0]);
        *(lanes *)(w->column + i) = exponentials(w->key[0] - key);
    }
}

/* The weight of a token's own key, and that of the key before it. */
INLINE float own_weight(const Weights *w, long i)
{
    return w->fades && w->query[i] != w->key[i] ? exponentials((doubles){w->query[i] - w->key[i]})[0] : 1;
}

INLINE float next_weight(const Weights *w, long i)
{
    return w->fades && w->query[i - 1] != w->key[i - 1] ? exponentials((doubles){w->query[i] - w->key[i - 1]})[0] : w->step[i];
}

/* The weight of the last key that token i of a chunk sees, its own one or in `reverse` that before it; 0 where another chunk has
   it. */
INLINE float last_weight(const Weights *w, long i, long reverse)
{
    return !reverse ? own_weight(w, i) : i ? next_weight(w, i) : 0;
}

/* Weights inside a chunk [c CHUNK], for those that a query sees; null where they are products of rows and columns, or 1. */
static const float *make_inside(const Weights *w, long c, float *out)
{
    if (!w->fades || !w->steep)
        return 0;
    for (long i = 0; i < c; i++)
        for (long j = 0; j <= i; j += LANES)
            *(lanes *)(out + i * CHUNK + j) = exponentials(w->query[i] - *(const doubles *)(w->key + j));
    return out;
}

INLINE lanes feature(long phi, lanes x)
{
    const lanes positive = at_least(x, 0);
    if (phi == ELU1)
        return exponential(x, 0) + positive;
    if (phi == RELU)
        return positive + 1e-3f;
    if (phi == RELU2)
        return positive * positive;
    return phi == EXP ? exponential(x, 89) : x;
}

/* Of x and its feature y. */
INLINE lanes slope(long phi, lanes x, lanes y)
{
    const lanes zero = {0}, one = zero + 1.0f;
    if (phi == ELU1)
        return at_most(y, 1);
    if (phi == RELU)
        return choose(x > zero, one, zero);
    if (phi == RELU2)
        return choose(x > zero, x + x, zero);
    return phi == EXP ? y : one;
}

/* A call with each feature map as a constant, by which loops have no choices. */
#define BY_MAP(phi, call)         \
    switch (phi) {                \
    case ELU1:                    \
        call(ELU1);               \
        break;                    \
    case RELU:                    \
        call(RELU);               \
        break;                    \
    case RELU2:                   \
        call(RELU2);              \
        break;                    \
    case EXP:                     \
        call(EXP);                \
        break;                    \
    default:                      \
        call(IDENTITY);           \
    }

static void map(long phi, const float *x, float *y, long width)
{
#define MAP(phi)                              \
    for (long m = 0; m < width; m += LANES)   \
    *(lanes *)(y + m) = feature(phi, *(const lanes *)(x + m))
    BY_MAP(phi, MAP)
}

/* a * b, less c in even lanes and c more in odd ones; with sign -1 the reverse. */
INLINE lanes alternate(lanes a, lanes b, lanes c, float sign)
{
#if LANES == 16
    const __m512 x = (__m512)a, y = (__m512)b, z = (__m512)c;
    return (lanes)(sign > 0 ? _mm512_fmaddsub_ps(x, y, z) : _mm512_fmsubadd_ps(x, y, z));
#else
    const __m256 x = (__m256)a, y = (__m256)b, z = (__m256)c;
    return (lanes)(sign > 0 ? _mm256_fmaddsub_ps(x, y, z) : _mm256_fmsubadd_ps(x, y, z));
#endif
}

/* Pairs times cos + i sin, or with sign -1 times cos - i sin; x may be y. */
INLINE void rotate(const float *x, const float *table, float sign, float *y, long width)
{
#define OTHER(l) ((l) ^ 1)
#define EVEN(l) ((l) & ~1)
#define ODD(l) ((l) | 1)
    for (long m = 0; m < width; m += LANES) {
        const lanes a = *(const lanes *)(x + m), t = *(const lanes *)(table + m);
        const lanes cosine = __builtin_shuffle(t, (order)LANES_LIST(EVEN)), sine = __builtin_shuffle(t, (order)LANES_LIST(ODD));
        *(lanes *)(y + m) = alternate(a, cosine, __builtin_shuffle(a, (order)LANES_LIST(OTHER)) * sine, sign);
    }
}

INLINE void split_table(const float *table, lanes *cosine, lanes *sine)
{
#define FIRST(l) (2 * (l))
#define SECOND(l) (2 * (l) + 1)
    const lanes a = *(const lanes *)table, b = *(const lanes *)(table + LANES);
    *cosine = __builtin_shuffle(a, b, (order)LANES_LIST(FIRST));
    *sine = __builtin_shuffle(a, b, (order)LANES_LIST(SECOND));
}

/* The reflection of x, which may be y. */
INLINE void reflect(const float *normal, const float *x, float *y, long width)
{
    const float twice = 2 * dot(x, normal, width);
    for (long m = 0; m < width; m += LANES)
        *(lanes *)(y + m) = *(const lanes *)(x + m) - twice * *(const lanes *)(normal + m);
}

INLINE int in_range(const unsigned char *index, long width)
{
    unsigned char most = 0;
    for (long m = 0; m < width; m++)
        most = index[m] > most ? index[m] : most;
    return most < width;
}

INLINE void gather(const float *x, const unsigned char *index, float *y, long width)
{
    if (width % (2 * LANES) == 0 && width <= 8 * LANES) { /* out of every two registers, which the bits above those say */
        for (long m = 0; m < width; m += LANES) {
            order at;
            for (int l = 0; l < LANES; l++)
                at[l] = index[m + l];
            lanes found = __builtin_shuffle(*(const lanes *)x, *(const lanes *)(x + LANES), at);
            for (long n = 2 * LANES; n < width; n += 2 * LANES) {
                const lanes other = __builtin_shuffle(*(const lanes *)(x + n), *(const lanes *)(x + n + LANES), at);
                found = choose(at >= (int)n, other, found);
            }
            *(lanes *)(y + m) = found;
        }
        return;
    }
    for (long m = 0; m < width; m++)
        y[m] = x[index[m]];
}

/* The table of an isometry applied to features x [width], which are not y. */
INLINE void move(const Input *o, const float *x, const void *table, float *y)
{
    if (o->kind == ROTATION)
        rotate(x, table, 1, y, o->width);
    else if (o->kind == GATHER)
        gather(x, table, y, o->numbers);
    else
        for (long m = 0; m < o->width; m += LANES) {
            lanes cosine, sine;
            split_table((const float *)table + 2 * m, &cosine, &sine);
            *(lanes *)(y + m) = *(const lanes *)(x + m) * cosine;
            *(lanes *)(y + o->width + m) = *(const lanes *)(x + m) * sine;
        }
}

/* Its adjoint. */
INLINE void move_adjoint(const Input *o, const float *y, const void *table, float *x)
{
    if (o->kind == ROTATION)
        rotate(y, table, -1, x, o->width);
    else if (o->kind == GATHER) {
        for (long m = 0; m < o->numbers; m++)
            x[((const unsigned char *)table)[m]] = y[m];
        for (long m = o->numbers; m < o->width; m++)
            x[m] = 0;
    } else
        for (long m = 0; m < o->width; m += LANES) {
            lanes cosine, sine;
            split_table((const float *)table + 2 * m, &cosine, &sine);
            *(lanes *)(x + m) = *(const lanes *)(y + m) * cosine + *(const lanes *)(y + o->width + m) * sine;
        }
}

/* The gradient of a token's table [2 a pair], from features before it and gradients after it. */
INLINE void pull_table(const Input *o, const float *x, const float *grad, float *out)
{
#define SIGN(l) ((l) & 1 ? 1 : -1)
#define ODD_OF_SECOND(l) ((l) & 1 ? LANES + (l) : (l))
#define FROM_LOW(l) (((l) & 1 ? LANES : 0) + (l) / 2)
#define FROM_HIGH(l) (((l) & 1 ? LANES : 0) + LANES / 2 + (l) / 2)
    const lanes signs = LANES_LIST(SIGN);
    for (long m = 0; m < o->width; m += LANES) {
        const lanes a = *(const lanes *)(x + m), g = *(const lanes *)(grad + m);
        if (o->kind == ROTATION) {
            const lanes same = a * g, crossed = __builtin_shuffle(a, (order)LANES_LIST(OTHER)) * g * signs;
            const lanes cosine = same + __builtin_shuffle(same, (order)LANES_LIST(OTHER));
            const lanes sine = crossed + __builtin_shuffle(crossed, (order)LANES_LIST(OTHER));
            *(lanes *)(out + m) = __builtin_shuffle(cosine, sine, (order)LANES_LIST(ODD_OF_SECOND));
        } else {
            const lanes cosine = a * g, sine = a * *(const lanes *)(grad + o->width + m);
            *(lanes *)(out + 2 * m) = __builtin_shuffle(cosine, sine, (order)LANES_LIST(FROM_LOW));
            *(lanes *)(out + 2 * m + LANES) = __builtin_shuffle(cosine, sine, (order)LANES_LIST(FROM_HIGH));
        }
    }
}

/* The token i of a chunk in the table of an input, in the buffer if need be: indices of a byte, or float32. */
INLINE const void *table_of(const Input *o, Chunk n, long i, float *buffer)
{
    const long at = index_of(&o->table, n) + i * o->table.token;
    if (o->kind == GATHER)
        return (const unsigned char *)o->table.first + at;
    const long each = o->kind == LIFT ? 2 : 1;
    return load((const float *)o->table.first + at, FLOAT32, each * o->numbers, each * o->width, buffer);
}

/* The normal of a head, in the buffer if need be, or null. */
INLINE const float *normal_of(const Input *o, Chunk n, float *buffer)
{
    return o->normal.first ? load(rows_of(&o->normal, n), FLOAT32, o->numbers, o->width, buffer) : 0;
}

INLINE int whole(const Input *o)
{
    return o->type == FLOAT32 && o->numbers == o->width;
}

INLINE int ready(const Input *o, long c)
{
    return o->phi == IDENTITY && o->kind == NONE && !o->normal.first && !o->mask.first && c % ROWS == 0 && whole(o);
}

INLINE int dropped(const Input *o, Chunk n, long i)
{
    return o->mask.first && !((const char *)o->mask.first)[index_of(&o->mask, n) + i * o->mask.token];
}

/* What is known of an input's chunk: features [c d], those of its denominator alone [c own], and phi's [c width] or null. */
typedef struct {
    Rows features, own;
    const float *plain;
} Made;

INLINE int moves(const Input *o)
{
    return o->kind != NONE || o->normal.first;
}

/* The features of token i of a chunk, phi's own on the way: where nothing moves them these are the same. */
INLINE void make_token(const Call *call, const Input *o, Chunk n, long i, long d, float *plain, float *features)
{
    const long width = o->width;
    if (dropped(o, n, i)) { /* whatever it holds */
        memset(plain, 0, width * sizeof(float));
        memset(features, 0, d * sizeof(float));
        return;
    }
    float buffer[MOST] ALIGNED, room[2 * MOST] ALIGNED;
    map(o->phi, load_row(o, n, i, buffer), plain, width);
    for (long m = o->numbers; m < width; m++)
        plain[m] = 0; /* whatever phi makes of zero */
    if (!moves(o))
        return;
    const float *y = plain;
    if (o->normal.first) {
        float *reflected = o->kind == NONE ? features : buffer;
        reflect(normal_of(o, n, room), plain, reflected, width);
        y = reflected;
    }
    if (o->kind == NONE)
        return;
    const void *table = table_of(o, n, i, room);
    if (o->kind == GATHER && !in_range(table, o->numbers)) {
        find(call, OUT_OF_RANGE);
        memset(features, 0, d * sizeof(float));
        return;
    }
    move(o, y, table, features);
    for (long m = o->numbers; o->kind == GATHER && m < width; m++)
        features[m] = 0;
}

/* The features of a chunk, in the buffer or where they are; their buffer ends with zeros up to a whole block. */
static Made make_features(const Call *call, const Input *o, Chunk n, long d, float **buffer)
{
    const long c = n.c;
    const int own = call->own && o != &call->v;
    Made made = {{rows_of(&o->x, n), o->x.token}, {0, 0}, 0};
    if (!ready(o, c)) {
        const int apart = moves(o) && own && !o->own.first;
        float *rows = take(buffer, CHUNK * d), *plains = apart ? take(buffer, CHUNK * o->width) : 0, room[MOST] ALIGNED;
        for (long i = 0; i < c; i++) {
            float *features = rows + i * d, *plain = moves(o) ? apart ? plains + i * o->width : room : features;
            make_token(call, o, n, i, d, plain, features);
        }
        memset(rows + c * d, 0, (blocks(c) - c) * d * sizeof(float));
        made = (Made){{rows, d}, {plains, o->width}, apart ? plains : moves(o) ? 0 : rows};
    }
    if (own && o->own.first)
        made.own = (Rows){rows_of(&o->own, n), o->own.token};
    else if (!made.own.at)
        made.own = made.features; /* of maps that move nothing, and where denominators have none of their own */
    return made;
}

/* Gradients of a learned table from those of features [c d], given phi's own where they are. */
static void pull_tables(const Call *call, const Input *o, Chunk n, long d, const float *grad, const float *saved)
{
    const long numbers = (o->kind == LIFT ? 2 : 1) * o->numbers;
    float *out = rows_of(&o->grad_table, n), buffer[MOST] ALIGNED, room[2 * MOST] ALIGNED;
    for (long i = 0; i < n.c; i++, grad += d, out += o->grad_table.token) {
        if (dropped(o, n, i)) {
            memset(out, 0, numbers * sizeof(float));
            continue;
        }
        if (saved)
            memcpy(buffer, saved + i * o->width, o->width * sizeof(float));
        else
            map(o->phi, load_row(o, n, i, room), buffer, o->width);
        if (o->normal.first)
            reflect(normal_of(o, n, room), buffer, buffer, o->width);
        pull_table(o, buffer, grad, room);
        memcpy(out, room, numbers * sizeof(float));
    }
}

/* The gradient of a token x, from that of phi's features and phi's features y, or null. */
static void pull_token(long phi, const float *x, const float *y, const float *grad, const float *more, long width, long add,
                       int past, float *out)
{
#define PULL(phi)                                                                                    \
    for (long m = 0; m < width; m += LANES) {                                                        \
        lanes g = *(const lanes *)(grad + m);                                                        \
        if (more)                                                                                    \
            g += *(const lanes *)(more + m);                                                         \
        if (phi != IDENTITY) {                                                                       \
            const lanes a = *(const lanes *)(x + m);                                                 \
            g *= slope(phi, a, y ? *(const lanes *)(y + m) : feature(phi, a));                       \
        }                                                                                            \
        if (add)                                                                                     \
            g += *(const lanes *)(out + m);                                                          \
        put(out + m, g, past);                                                                       \
    }
    BY_MAP(phi, PULL)
}

/* Gradients of x from those of its features [c d] and of its own ones [c own]; saved are phi's features or null. */
static void pull(const Call *call, const Input *o, Chunk n, long d, const float *saved, float *grad, float *grad_own)
{
    const long width = o->width, size = o->numbers * (o->type == FLOAT32 ? 4 : 2);
    float buffer[MOST] ALIGNED, room[2 * MOST] ALIGNED, sum[MOST] ALIGNED;
    if (o->grad_own.first) {
        for (long i = 0; i < n.c; i++)
            memcpy(rows_of(&o->grad_own, n) + i * o->grad_own.token, grad_own + i * call->own, call->own * sizeof(float));
        grad_own = 0;
    }
    if (o->grad_table.first)
        pull_tables(call, o, n, d, grad, saved);
    for (long i = 0; i < n.c; i++, grad += d) {
        const float *from = grad;
        char *out = place_of(&o->grad, n, i, o->type);
        if (dropped(o, n, i)) { /* whatever it holds */
            if (!o->add)
                memset(out, 0, size);
            continue;
        }
        if (o->kind != NONE && !(__atomic_load_n(call->found, __ATOMIC_RELAXED) & OUT_OF_RANGE)) {
            move_adjoint(o, grad, table_of(o, n, i, room), buffer);
            from = buffer;
        }
        if (o->normal.first) {
            reflect(normal_of(o, n, room), from, buffer, width);
            from = buffer;
        }
        const float *x = load_row(o, n, i, room);
        const float *y = saved ? saved + i * width : 0, *more = grad_own ? grad_own + i * call->own : 0;
        if (whole(o)) {
            pull_token(o->phi, x, y, from, more, width, o->add, o->past, (float *)out);
            continue;
        }
        if (o->add)
            load(out, o->type, o->numbers, width, sum); /* into it, as they are not whole */
        pull_token(o->phi, x, y, from, more, width, o->add, 0, sum);
        store(sum, o->type, o->numbers, out);
    }
}

/* --- states --- */

/* across * out + rows of x by weights, and by others if they are given: a chunk's own sum, as above. */
static void add_rows(Rows x, const float *weight, const float *other, long c, long width, float across, float *out)
{
    float weights[CHUNK];
    for (long i = 0; i < c; i++)
        weights[i] = other ? weight[i] * other[i] : weight[i];
    for (long m = 0; m < width; m += LANES) {
        lanes even = {0}, odd = {0};
        for (long i = 0; i + 1 < c; i += 2) {
            even += weights[i] * *(const lanes *)(x.at + i * x.stride + m);
            odd += weights[i + 1] * *(const lanes *)(x.at + (i + 1) * x.stride + m);
        }
        if (c % 2)
            even += weights[c - 1] * *(const lanes *)(x.at + (c - 1) * x.stride + m);
        *(lanes *)(out + m) = across * *(const lanes *)(out + m) + (even + odd);
    }
}

/* to [x y] = across * from + a [c x]^T times weight * b [c y]: a state after a chunk, from that before it. */
static void outer(Rows a, Rows b, const Weights *w, const float *weight, long c, long x, long y, float *scaled,
                  const float *from, float *to, Ahead *ahead)
{
    if (w->fades) {
        for (long i = 0; i < c; i++)
            for (long m = 0; m < y; m += LANES)
                *(lanes *)(scaled + i * y + m) = weight[i] * *(const lanes *)(b.at + i * b.stride + m);
        b = (Rows){scaled, y};
    }
    add_to_state(from, to, x, y, w->across, (Product){a.at, 1, a.stride, b.at, b.stride, c}, ahead);
}

/* Numbers of a state, and those of a denominator's. */
INLINE long state_size(const Call *call)
{
    return call->d * call->e;
}

INLINE long row_size(const Call *call)
{
    return !call->denominated ? 0 : call->own ? call->own : call->d;
}

/* Groups of chunks that so many tokens are, before each of which states are saved. */
long isopos_groups(long length)
{
    return (length + GROUP * CHUNK - 1) / (GROUP * CHUNK);
}

/* Where a part of a head begins, with whole groups. Of two parts the one that sums up the other one is shorter, by what that
   takes: a third of a forward pass, and a sixth of a backward one. */
static long begin_of(const Call *call, long part, int back)
{
    const long groups = isopos_groups(call->length), first = back ? (groups * 5 + 5) / 11 : (groups * 3 + 2) / 5;
    const long group = call->parts != 2 ? part * groups / call->parts : part == 1 ? first : part * groups / 2;
    return group * GROUP * CHUNK < call->length ? group * GROUP * CHUNK : call->length;
}

/* A part's total: a state, a denominator's, and the weight across the part. */
INLINE float *total_of(const Call *call, long head, long part)
{
    return call->totals + (head * call->parts + part) * call->total_size;
}

/* Where a state of a part begins: with that of the head, or with what the other parts add up to. */
static void start_part(const Call *call, long head, long part, const float *state, const float *row, float *own, float *own_row)
{
    const long size = state_size(call), rows = row_size(call);
    if (call->parts > 1)
        state = total_of(call, head, part), row = state + size;
    else
        state += head * size, row += head * rows;
    memcpy(own, state, size * sizeof(float));
    memcpy(own_row, row, rows * sizeof(float));
}

/* --- sums of a chunk --- */

/* What products of a chunk's rows become: less a number a row, weighted, and zero where a query does not see; with `own` it sees
   itself. */
typedef struct {
    const Weights *w;
    const float *inside, *less; /* or null */
    long c, own;
} Seen;

/* Products of ROWS rows, from row i on, and of columns from j on. */
INLINE void score_panel(const int wide, const Product *p, const Seen *seen, long i, long j, float *out, Ahead *ahead)
{
    const float *inside = seen->inside, *row = seen->w->fades && !inside ? seen->w->row : 0;
    lanes sum[ROWS][WIDE];
    order column;
    go_on(ahead);
    for (int l = 0; l < LANES; l++)
        column[l] = j + l;
    for (int r = 0; r < ROWS; r++)
        for (int w = 0; w < wide; w++)
            sum[r][w] = (lanes){0};
    add_product(sum, wide, p, j, ahead);
    for (int r = 0; seen->less && r < ROWS; r++)
        for (int w = 0; w < wide; w++)
            sum[r][w] -= seen->less[i + r];
    for (int r = 0; row && r < ROWS; r++)
        for (int w = 0; w < wide; w++)
            sum[r][w] *= row[i + r] * *(const lanes *)(seen->w->column + j + w * LANES);
    for (int r = 0; inside && r < ROWS; r++)
        for (int w = 0; w < wide; w++)
            sum[r][w] *= *(const lanes *)(inside + (i + r) * CHUNK + j + w * LANES);
    for (int r = 0; r < ROWS; r++) {
        const int last = i + r < seen->c ? i + r + seen->own : 0;
        for (int w = 0; w < wide; w++)
            *(lanes *)(out + (i + r) * CHUNK + j + w * LANES) = (lanes)((column + w * LANES < last) & (order)sum[r][w]);
    }
}

/* Weighted products of rows a and columns b [width CHUNK]. */
static void weigh(Rows a, const float *b, long width, const Seen *seen, float *out, Ahead *ahead)
{
    for (long i = 0; i < seen->c; i += ROWS) {
        const Product p = {a.at + i * a.stride, a.stride, 1, b, CHUNK, width};
        for (long j = 0; j < i + ROWS; j += WIDE * LANES)
            if (i + ROWS - j > LANES)
                score_panel(WIDE, &p, seen, i, j, out, ahead);
            else
                score_panel(1, &p, seen, i, j, out, ahead);
    }
}

/* Denominators of a chunk, as they are, given the sum of keys before it. */
static void denominators(const Call *call, long c, const Weights *w, const Made *q, const Made *k, const float *row,
                         const float *scores, float *denominator)
{
    const long own = call->own, d = call->d;
    if (!own) {
        for (long i = 0; i < c; i++) {
            lanes sum = {0};
            for (long m = 0; m < d; m += LANES)
                sum += *(const lanes *)(q->features.at + i * q->features.stride + m) * *(const lanes *)(row + m);
            sum *= w->before[i];
            for (long j = 0; j <= i; j += LANES) /* zeros follow */
                sum += *(const lanes *)(scores + i * CHUNK + j);
            denominator[i] = total(sum);
        }
        return;
    }
    const Rows queries = q->own, keys = k->own;
    memset(denominator, 0, c * sizeof(float));
    for (long m = 0; m < own; m += WIDE * LANES) {
        lanes seen[WIDE];
        const int wide = own - m < WIDE * LANES ? (own - m) / LANES : WIDE;
        for (int v = 0; v < wide; v++)
            seen[v] = *(const lanes *)(row + m + v * LANES);
        for (long i = 0; i < c; i++) {
            const float s = w->step[i], last = last_weight(w, i, call->reverse);
            const float *key = keys.at + (call->reverse && i ? i - 1 : i) * keys.stride + m;
            const float *query = queries.at + i * queries.stride + m;
            lanes sum = {0};
            for (int v = 0; v < wide; v++) {
                seen[v] = s * seen[v] + last * *(const lanes *)(key + v * LANES);
                sum += seen[v] * *(const lanes *)(query + v * LANES);
            }
            denominator[i] += total(sum);
        }
    }
}

/* Gradients of the own features of a chunk [c own]; `row` sums up keys before it, `later` queries after it. */
static void pull_denominators(const Call *call, long c, const Weights *w, const Made *q, const Made *k, const float *less,
                              const float *row, const float *later, float *dq, float *dk)
{
    const long own = call->own;
    const Rows queries = q->own, keys = k->own;
    for (long m = 0; m < own; m += WIDE * LANES) {
        lanes sum[WIDE], end[WIDE];
        const int wide = own - m < WIDE * LANES ? (own - m) / LANES : WIDE;
        for (int v = 0; v < wide; v++)
            sum[v] = *(const lanes *)(row + m + v * LANES);
        for (long i = 0; i < c; i++) {
            const float s = w->step[i], last = last_weight(w, i, call->reverse), l = -less[i];
            const float *key = keys.at + (call->reverse && i ? i - 1 : i) * keys.stride + m;
            for (int v = 0; v < wide; v++) {
                sum[v] = s * sum[v] + last * *(const lanes *)(key + v * LANES);
                *(lanes *)(dq + i * own + m + v * LANES) = l * sum[v];
            }
        }
        for (int v = 0; v < wide; v++)
            sum[v] = (lanes){0}, end[v] = *(const lanes *)(later + m + v * LANES);
        for (long i = c - 1; i >= 0; i--) {
            const float s = i + 1 < c ? w->step[i + 1] : 0, a = w->after[i], l = less[i];
            const float first = !call->reverse ? own_weight(w, i) : i + 1 < c ? next_weight(w, i + 1) : 0; /* to see it */
            for (int v = 0; v < wide; v++) {
                const lanes after = sum[v];
                sum[v] = s * after + l * *(const lanes *)(queries.at + i * queries.stride + m + v * LANES);
                *(lanes *)(dk + i * own + m + v * LANES) = -(first * (call->reverse ? after : sum[v]) + a * end[v]);
            }
        }
    }
}

/* What a pass knows of a chunk. */
typedef struct {
    Chunk n;
    Weights w;
    Made q, k, v;
    float *grads, *less, *state, *row; /* backward: gradients of sums [c e], less those of denominators, and states before */
} Step;

#define STEP ((long)(sizeof(Step) + 63) / 64 * 16) /* numbers that one takes, of whole lines of memory */

static void begin_step(const Call *call, Chunk n, Step *step, float **buffer)
{
    step->n = n;
    make_weights(call, n, &step->w);
    step->q = make_features(call, &call->q, n, call->d, buffer);
    step->k = make_features(call, &call->k, n, call->d, buffer);
    step->v = make_features(call, &call->v, n, call->e, buffer);
}

static void forward_chunk(const Call *call, const Step *step, Ahead *ahead, const float *state, const float *row, float *rest)
{
    const Chunk n = step->n;
    const long c = n.c, d = call->d, e = call->e, reach = call->begins && n.start == 0 ? 0 : d;
    const Rows q = step->q.features, v = step->v.features;
    float *transposed = take(&rest, d * CHUNK), *buffer = take(&rest, CHUNK * CHUNK), *scores = take(&rest, CHUNK * CHUNK);
    float *aside = take(&rest, ROWS * e);
    lanes zeros = {0};
    float denominator[CHUNK], inverse[CHUNK + ROWS], *out = rows_of(&call->out, n);
    const Seen seen = {&step->w, make_inside(&step->w, c, buffer), 0, c, !call->reverse};
    transpose(step->k.features, c, d, transposed, CHUNK);
    weigh(q, transposed, d, &seen, scores, ahead);
    if (call->denominated) {
        float *into = rows_of(&call->denominator, n);
        denominators(call, c, &step->w, &step->q, &step->k, row, scores, denominator);
        for (long i = 0; i < c; i++) {
            if (call->reverse)
                denominator[i] += into[i * call->denominator.token];
            if (call->divide && __builtin_fabsf(denominator[i]) < SMALL)
                denominator[i] = __builtin_copysignf(SMALL, denominator[i]);
            into[i * call->denominator.token] = denominator[i];
            zeros[0] += 0 * denominator[i];
            inverse[i] = 1 / denominator[i];
        }
    }
    for (long i = 0; i < c; i += ROWS) {
        const long to = i + ROWS < c ? i + ROWS : c;
        const int direct = to - i == ROWS && call->values == e && !call->reverse;
        const Out there = {out + i * call->out.token, call->out.token, call->divide ? inverse + i : 0, call->past, &zeros};
        const Product of_state = {q.at + i * q.stride, q.stride, 1, state, e, reach};
        const Product inside = {scores + i * CHUNK, CHUNK, 1, v.at, v.stride, to};
        block(direct ? &there : &(Out){aside, e}, e, &of_state, step->w.fades ? step->w.before + i : 0, &inside, ahead);
        for (long r = i; !direct && r < to; r++) {
            float *sum = aside + (r - i) * e, *to_row = out + r * call->out.token, room[MOST] ALIGNED;
            const float *more = call->reverse ? load(to_row, FLOAT32, call->values, e, room) : 0;
            for (long m = 0; m < e; m += LANES) {
                lanes x = *(const lanes *)(sum + m);
                if (more)
                    x += *(const lanes *)(more + m);
                if (call->divide)
                    x *= inverse[r];
                *(lanes *)(sum + m) = x;
                zeros += 0 * x;
            }
            store(sum, FLOAT32, call->values, to_row);
        }
    }
    if (total(zeros) != 0)
        find(call, NOT_FINITE);
}

/* Gradients of a chunk's sums [c e], with zeros up to a whole block, and less those of its denominators. */
static void make_grads(const Call *call, Step *step, float **buffer)
{
    const long c = step->n.c, e = call->e;
    const float *grad = rows_of(&call->grad, step->n);
    float buffers[2][MOST] ALIGNED;
    step->grads = take(buffer, CHUNK * e), step->less = take(buffer, CHUNK); /* of rows up to a whole block, too */
    for (long i = 0; i < c; i++) {
        const float *row = grad + i * call->grad.token, *from = load(row, FLOAT32, call->values, e, buffers[0]);
        float *to = step->grads + i * e;
        if (!call->divide) {
            memcpy(to, from, e * sizeof(float));
            if (call->denominated)
                step->less[i] = -row[call->values];
            continue;
        }
        const float *out = load(rows_of(&call->out, step->n) + i * call->out.token, FLOAT32, call->values, e, buffers[1]);
        const float denominator = rows_of(&call->denominator, step->n)[i * call->denominator.token];
        const float inverse = 1 / denominator;
        lanes sum = {0};
        for (long m = 0; m < e; m += LANES) {
            const lanes g = *(const lanes *)(from + m) * inverse;
            sum += g * *(const lanes *)(out + m);
            *(lanes *)(to + m) = g;
        }
        step->less[i] = __builtin_fabsf(denominator) <= SMALL ? 0 : total(sum);
    }
    memset(step->grads + c * e, 0, (blocks(c) - c) * e * sizeof(float));
}

/* Gradients of a chunk's inputs, given those of the states after it; its own states have keys as columns. */
static void backward_chunk(const Call *call, const Step *step, Ahead *ahead, const float *grad_state, const float *grad_row,
                           float *rest)
{
    const Chunk n = step->n;
    const Weights *w = &step->w;
    const long c = n.c, d = call->d, e = call->e, own = call->own;
    const long earlier = call->begins && n.start == 0 ? 0 : e, later = call->ends && n.start + c == call->length ? 0 : 1;
    const float *less = call->denominated ? step->less : 0;
    const Rows q = step->q.features, k = step->k.features, v = step->v.features, grad = {step->grads, e};
    float *transposed = take(&rest, (d > CHUNK ? d : CHUNK) * (d > e ? d : e));
    float *scores = take(&rest, CHUNK * CHUNK), *grad_scores = take(&rest, CHUNK * CHUNK), *buffer = take(&rest, CHUNK * CHUNK);
    float *dq = take(&rest, CHUNK * d), *dk = take(&rest, CHUNK * d), *dv = take(&rest, CHUNK * e);
    float *dq_own = take(&rest, CHUNK * own), *dk_own = take(&rest, CHUNK * own);
    const Seen seen = {w, make_inside(w, c, buffer), 0, c, !call->reverse};
    const Seen less_seen = {w, seen.inside, own ? 0 : less, c, seen.own};
    const float *before = w->fades ? w->before : 0, *after = w->fades ? w->after : 0;
    transpose(k, c, d, transposed, CHUNK);
    weigh(q, transposed, d, &seen, scores, ahead);
    transpose(v, c, e, transposed, CHUNK);
    weigh(grad, transposed, e, &less_seen, grad_scores, ahead);
    if (later)
        transpose((Rows){grad_state, e}, d, e, transposed, d);
    for (long i = 0; i < c; i += ROWS) { /* a product after the other, by which what one reads stays in the nearest cache */
        const long to = i + ROWS < c ? i + ROWS : c;
        const Product of_state = {grad.at + i * e, e, 1, step->state, d, earlier};
        const Product inside = {grad_scores + i * CHUNK, CHUNK, 1, k.at, k.stride, to};
        block(&(Out){dq + i * d, d}, d, &of_state, before ? before + i : 0, &inside, ahead);
    }
    for (long i = 0; i < c; i += ROWS) {
        const Product of_state = {v.at + i * v.stride, v.stride, 1, transposed, d, later * e};
        const Product inside = {grad_scores + i * CHUNK + i, 1, CHUNK, q.at + i * q.stride, q.stride, c - i};
        block(&(Out){dk + i * d, d}, d, &of_state, after ? after + i : 0, &inside, ahead);
    }
    for (long i = 0; i < c; i += ROWS) {
        const Product of_state = {k.at + i * k.stride, k.stride, 1, grad_state, e, later * d};
        const Product inside = {scores + i * CHUNK + i, 1, CHUNK, grad.at + i * e, e, c - i};
        block(&(Out){dv + i * e, e}, e, &of_state, after ? after + i : 0, &inside, ahead);
    }
    if (less && own)
        pull_denominators(call, c, w, &step->q, &step->k, less, step->row, grad_row, dq_own, dk_own);
    else if (less)
        for (long i = 0; i < c; i++)
            for (long m = 0; m < d; m += LANES) {
                *(lanes *)(dq + i * d + m) -= w->before[i] * less[i] * *(const lanes *)(step->row + m);
                *(lanes *)(dk + i * d + m) -= w->after[i] * *(const lanes *)(grad_row + m);
            }
    if (call->q.grad_decay) /* weights <q, k> exp(g_q - g_k): as if q and k were scaled */
        for (long i = 0; i < c; i++) {
            double of_q = dot(dq + i * d, q.at + i * q.stride, d), of_k = dot(dk + i * d, k.at + i * k.stride, d);
            if (less && own) {
                const Rows queries = step->q.own, keys = step->k.own;
                of_q += dot(dq_own + i * own, queries.at + i * queries.stride, own);
                of_k += dot(dk_own + i * own, keys.at + i * keys.stride, own);
            }
            const long at = n.head * call->length + n.start + i;
            call->q.grad_decay[at] = of_q, call->k.grad_decay[at] = -of_k;
        }
    pull(call, &call->q, n, d, step->q.plain, dq, less && own ? dq_own : 0);
    pull(call, &call->k, n, d, step->k.plain, dk, less && own ? dk_own : 0);
    pull(call, &call->v, n, e, step->v.plain, dv, 0);
}

/* --- heads and their parts --- */

long isopos_call_size(void)
{
    return sizeof(Call);
}

/* Numbers that a thread needs at most, as the functions here take them. */
long isopos_scratch_size(long d, long e, long own)
{
    const long row = own > d ? own : d, step = CHUNK * (2 * d + 2 * e + 2 * own + 1) + d * e + row, most = d > e ? d : e;
    const long chunk = CHUNK * (3 * CHUNK + 2 * d + e + 2 * own);
    return GROUP * (step + STEP) + d * e + row + CHUNK * most + (d > CHUNK ? d : CHUNK) * most + chunk;
}

static void forward_part(const Call *call, long head, long part)
{
    const long d = call->d, e = call->e, size = state_size(call), rows = row_size(call), group = GROUP * CHUNK;
    const long groups = isopos_groups(call->length);
    float *rest = scratch_of(call), *state = take(&rest, size), *row = take(&rest, d > call->own ? d : call->own);
    float *scaled = take(&rest, CHUNK * (d > e ? d : e));
    const long from = begin_of(call, part, 0), to = begin_of(call, part + 1, 0);
    start_part(call, head, part, call->state, call->row, state, row);
    const int kept = to == call->length && !call->ends; /* whether a state after the last chunk is wanted */
    for (long start = from; start < to; start += CHUNK) {
        float *buffer = rest;
        Step step;
        if (call->saved && start % group == 0) {
            const long at = head * groups + start / group;
            memcpy(call->saved + at * size, state, size * sizeof(float));
            memcpy(call->saved_rows + at * rows, row, rows * sizeof(float));
        }
        begin_step(call, chunk_of(call, head, start, to), &step, &buffer);
        Ahead ahead = ahead_of(call, chunk_of(call, head, start + CHUNK, to), 0, call->reverse ? 5 : 3);
        forward_chunk(call, &step, &ahead, state, row, buffer);
        if (start + CHUNK >= to && !kept)
            continue;
        outer(step.k.features, step.v.features, &step.w, step.w.after, step.n.c, d, e, scaled, state, state, &ahead);
        if (rows)
            add_rows(step.k.own, step.w.after, 0, step.n.c, rows, step.w.across, row);
    }
    if (kept) {
        memcpy(call->state + head * size, state, size * sizeof(float));
        memcpy(call->row + head * rows, row, rows * sizeof(float));
    }
}

/* A group of chunks, given gradients of the states after it, which become those before it. */
static void backward_group(const Call *call, long head, long start, long to, float *grad_state, float *grad_row, float *scaled,
                           float *rest)
{
    const long d = call->d, e = call->e, size = state_size(call), rows = row_size(call);
    const long at = head * isopos_groups(call->length) + start / (GROUP * CHUNK);
    Step *steps = (Step *)take(&rest, GROUP * STEP), *step = steps; /* too much for a small stack */
    Ahead none = {0};
    for (long n = start; n < to; n += CHUNK, step++) {
        begin_step(call, chunk_of(call, head, n, to), step, &rest);
        make_grads(call, step, &rest);
        step->state = take(&rest, size), step->row = take(&rest, d > call->own ? d : call->own);
        if (n == start) {
            transpose((Rows){call->saved + at * size, e}, d, e, step->state, d);
            memcpy(step->row, call->saved_rows + at * rows, rows * sizeof(float));
            continue;
        }
        const Step *last = step - 1;
        outer(last->v.features, last->k.features, &last->w, last->w.after, last->n.c, e, d, scaled, last->state, step->state,
              &none);
        memcpy(step->row, last->row, rows * sizeof(float));
        if (rows)
            add_rows(last->k.own, last->w.after, 0, last->n.c, rows, last->w.across, step->row);
    }
    while (step-- > steps) {
        const long earlier = step->n.start - GROUP * CHUNK;
        Ahead ahead = earlier < 0 ? none : ahead_of(call, chunk_of(call, head, earlier, to), 0, call->q.add ? 8 : 5);
        backward_chunk(call, step, &ahead, grad_state, grad_row, rest);
        outer(step->q.features, (Rows){step->grads, e}, &step->w, step->w.before, step->n.c, d, e, scaled, grad_state, grad_state,
              &ahead);
        if (rows)
            add_rows(step->q.own, step->w.before, step->less, step->n.c, rows, step->w.across, grad_row);
    }
}

static void backward_part(const Call *call, long head, long part)
{
    const long d = call->d, e = call->e, size = state_size(call), rows = row_size(call), group = GROUP * CHUNK;
    float *rest = scratch_of(call), *grad_state = take(&rest, size), *grad_row = take(&rest, d > call->own ? d : call->own);
    float *scaled = take(&rest, CHUNK * (d > e ? d : e));
    const long from = begin_of(call, part, 1), to = begin_of(call, part + 1, 1);
    start_part(call, head, part, call->grad_state, call->grad_row, grad_state, grad_row);
    for (long start = (to - 1) / group * group; start >= from; start -= group)
        backward_group(call, head, start, start + group < to ? start + group : to, grad_state, grad_row, scaled, rest);
    if (from == 0 && !call->begins) {
        memcpy(call->grad_state + head * size, grad_state, size * sizeof(float));
        memcpy(call->grad_row + head * rows, grad_row, rows * sizeof(float));
    }
}

/* Adds a part to a total, and to the weight across it: of the state before it, or with `back` of the gradient of that after it. */
static void sum_part(const Call *call, long head, long part, float *state, int back)
{
    const long d = call->d, e = call->e, rows = row_size(call);
    float *rest = scratch_of(call), *scaled = take(&rest, CHUNK * (d > e ? d : e));
    float *row = state + state_size(call), *across = row + rows;
    const long from = begin_of(call, part, back), to = begin_of(call, part + 1, back);
    for (long m = 0, start; m < to - from; m += CHUNK) {
        float *buffer = rest;
        Step step;
        start = back ? from + (to - from - 1) / CHUNK * CHUNK - m : from + m;
        step.n = chunk_of(call, head, start, to);
        make_weights(call, step.n, &step.w);
        const Made keys = make_features(call, back ? &call->q : &call->k, step.n, d, &buffer);
        const float *weight = back ? step.w.before : step.w.after, *less = 0;
        Rows values;
        if (back) {
            make_grads(call, &step, &buffer);
            values = (Rows){step.grads, e}, less = step.less;
        } else
            values = make_features(call, &call->v, step.n, e, &buffer).features;
        const Chunk next = chunk_of(call, head, back ? start - CHUNK : start + CHUNK, back ? start : to);
        Ahead ahead = ahead_of(call, next, back ? 2 : 0, back ? 5 : 2);
        ahead.twice = 1; /* with one product alone */
        outer(keys.features, values, &step.w, weight, step.n.c, d, e, scaled, state, state, &ahead);
        if (rows)
            add_rows(keys.own, weight, less, step.n.c, rows, step.w.across, row);
        *across *= step.w.across;
    }
}

/* Totals of parts begin with nothing; those of two with the state of the head, by which they are what each part starts with. */
static void begin_totals(const Call *call, long head, int back)
{
    const long size = state_size(call), rows = row_size(call);
    for (long part = 0; part < call->parts; part++) {
        float *total = total_of(call, head, part);
        memset(total, 0, (size + rows) * sizeof(float));
        total[size + rows] = 1;
        if (call->parts == 2) {
            memcpy(total, (back ? call->grad_state : call->state) + head * size, size * sizeof(float));
            memcpy(total + size, (back ? call->grad_row : call->row) + head * rows, rows * sizeof(float));
        }
    }
}

/* Totals of parts become the states that they start with; that of the head goes through them. */
static void join_parts(const Call *call, long head, int back)
{
    const long size = state_size(call), rows = row_size(call);
    float *state = (back ? call->grad_state : call->state) + head * size, *row = (back ? call->grad_row : call->row) + head * rows;
    for (long m = 0; m < call->parts; m++) {
        float *own = total_of(call, head, back ? call->parts - 1 - m : m), across = own[size + rows];
        for (long i = 0; i < size + rows; i++) {
            float *through = i < size ? state + i : row + i - size;
            const float added = own[i];
            own[i] = *through;
            if (m + 1 < call->parts)
                *through = across * own[i] + added;
        }
    }
}

/* Whether rows [width] of all tokens are written past the caches: where they are many, and whole lines of memory that has been
   in use (what the system has cleared just now is in a cache). */
static int streams(const Call *call, const View *view, long length, long width)
{
    const long strides = view->sample | view->head | view->token | width;
    const unsigned long first = (unsigned long)view->first, inside = (first + length / 2 * view->token * 4) & -4096;
    unsigned char used;
    return call->all * length * width >= PAST && strides % 16 == 0 && first % 64 == 0 &&
           !mincore((void *)inside, 1, &used) && used & 1;
}

/* Makes tokens go from the last one to the first. */
static void turn(View *view, long length, long size)
{
    view->first = view->first ? (char *)view->first + (length - 1) * view->token * size : 0;
    view->token = -view->token;
}

static void turn_all(Call *call)
{
    const long length = call->length;
    for (Input *o = &call->q; o <= &call->v; o++) {
        const long size = o->type == FLOAT32 ? 4 : 2;
        turn(&o->x, length, size), turn(&o->grad, length, size);
        turn(&o->own, length, 4), turn(&o->grad_own, length, 4);
        turn(&o->table, length, o->kind == GATHER ? 1 : 4), turn(&o->grad_table, length, 4);
        turn(&o->mask, length, 1);
    }
    turn(&call->g_q, length, 8), turn(&call->g_k, length, 8);
    turn(&call->out, length, 4), turn(&call->denominator, length, 4), turn(&call->grad, length, 4);
}

/* Every head, by whoever is free. */
static void run(Call *call, int back)
{
    if (call->reverse)
        turn_all(call);
    const long all = call->all * call->parts;
    call->past = !back && !call->reverse && call->values == call->e && streams(call, &call->out, call->length, call->e);
    for (Input *o = &call->q; back && o <= &call->v; o++)
        o->past = !o->add && whole(o) && streams(call, &o->grad, call->length, o->width);
    for (long head = 0; call->parts > 1 && head < call->all; head++)
        begin_totals(call, head, back);
#pragma omp parallel num_threads(call->threads)
    {
        if (call->parts > 2) {
#pragma omp for schedule(dynamic, 1)
            for (long n = 0; n < all; n++)
                if (n % call->parts != (back ? 0 : call->parts - 1))
                    sum_part(call, n / call->parts, n % call->parts, total_of(call, n / call->parts, n % call->parts), back);
#pragma omp for
            for (long head = 0; head < call->all; head++)
                join_parts(call, head, back);
        }
#pragma omp for schedule(dynamic, 1)
        for (long n = 0; n < all; n++) {
            const long head = n / call->parts, part = n % call->parts;
            if (call->parts == 2 && part == !back) /* rather than to wait for the other one */
                sum_part(call, head, !part, total_of(call, head, part), back);
            if (back)
                backward_part(call, head, part);
            else
                forward_part(call, head, part);
            _mm_sfence(); /* what is written past the caches is there before others read it */
        }
    }
}

void isopos_forward(Call *call)
{
    run(call, 0);
}

void isopos_backward(Call *call)
{
    run(call, 1);
}

/* --- sums over all keys --- */

/* The tokens of a part of a head, whole chunks but for the last one's. */
static void share_of(const Call *call, long length, long part, long *from, long *to)
{
    const long chunks = (length + CHUNK - 1) / CHUNK;
    *from = part * chunks / call->parts * CHUNK;
    *to = (part + 1) * chunks / call->parts * CHUNK;
    if (*to > length)
        *to = length;
}

static const float ONES[CHUNK] = {[0 ... CHUNK - 1] = 1};

/* a [c x]^T times b [c y], added to a state. */
static void add_outer(Rows a, Rows b, long c, long x, long y, float *state, Ahead *ahead)
{
    add_to_state(state, state, x, y, 1, (Product){a.at, 1, a.stride, b.at, b.stride, c}, ahead);
}

/* The next chunk of a part, some tensors of which are asked for during fewer products than in causal sums. */
static Ahead after_chunk(const Call *call, Chunk n, long to, int tensor, int tensors)
{
    Ahead ahead = ahead_of(call, chunk_of(call, n.head, n.start + CHUNK, to), tensor, tensors);
    ahead.twice = 1;
    return ahead;
}

/* Adds keys times values of a part's tokens to a state, and keys to a denominator's. */
static void sum_keys(const Call *call, long head, long part, float *state, float *row)
{
    const long d = call->d, e = call->e, rows = row_size(call);
    long from, to;
    share_of(call, call->keys, part, &from, &to);
    for (long start = from; start < to; start += CHUNK) {
        float *buffer = scratch_of(call);
        const Chunk n = chunk_of(call, head, start, to);
        const Made k = make_features(call, &call->k, n, d, &buffer), v = make_features(call, &call->v, n, e, &buffer);
        Ahead ahead = after_chunk(call, n, to, 0, 2);
        add_outer(k.features, v.features, n.c, d, e, state, &ahead);
        if (rows)
            add_rows(k.own, ONES, 0, n.c, rows, 1, row);
    }
}

/* Sums of a part's queries, from the state of all keys. */
static void read_out(const Call *call, long head, long part, const float *state, const float *row)
{
    const long d = call->d, e = call->e, rows = row_size(call);
    float *rest = scratch_of(call), *aside = take(&rest, ROWS * e), inverse[CHUNK + ROWS] = {0};
    lanes zeros = {0};
    long from, to;
    share_of(call, call->length, part, &from, &to);
    for (long start = from; start < to; start += CHUNK) {
        float *buffer = rest;
        const Chunk n = chunk_of(call, head, start, to);
        const Made q = make_features(call, &call->q, n, d, &buffer);
        for (long i = 0; rows && i < n.c; i++) {
            float denominator = dot(q.own.at + i * q.own.stride, row, rows);
            if (call->divide && __builtin_fabsf(denominator) < SMALL)
                denominator = __builtin_copysignf(SMALL, denominator);
            rows_of(&call->denominator, n)[i * call->denominator.token] = denominator;
            zeros[0] += 0 * denominator;
            inverse[i] = 1 / denominator;
        }
        Ahead ahead = after_chunk(call, n, to, 2, 3);
        for (long i = 0; i < n.c; i += ROWS) {
            const long many = i + ROWS < n.c ? ROWS : n.c - i;
            const int direct = many == ROWS && call->values == e; /* whole vectors of as many rows */
            const Product p = {q.features.at + i * q.features.stride, q.features.stride, 1, state, e, d}, none = {p.a, 0, 0, p.b};
            float *out = rows_of(&call->out, n) + i * call->out.token;
            Out there = {out, call->out.token, call->divide ? inverse + i : 0, call->past, &zeros};
            if (!direct)
                there.at = aside, there.stride = e, there.past = 0;
            block(&there, e, &p, 0, &none, &ahead);
            for (long r = 0; !direct && r < many; r++)
                store(aside + r * e, FLOAT32, call->values, out + r * call->out.token);
        }
    }
    if (total(zeros) != 0)
        find(call, NOT_FINITE);
}

/* out [c y]: a [c x] times a state [x y], and a row by weights, or by 1 where these are null, if it is given. */
static void read_state(Rows a, const float *state, long c, long x, long y, const float *weight, const float *row, float *out,
                       Ahead *ahead)
{
    for (long i = 0; i < c; i += ROWS) {
        const Product p = {a.at + i * a.stride, a.stride, 1, state, y, x};
        const Product more = {weight ? weight + i : ONES, 1, 0, row ? row : state, y, row ? 1 : 0};
        block(&(Out){out + i * y, y}, y, &p, 0, &more, ahead);
    }
}

/* A state [x y] with keys as columns, and a row [rows] less than nothing, in the buffer. */
static const float *turned(const float *state, long x, long y, float **buffer)
{
    float *out = take(buffer, x * y);
    transpose((Rows){state, y}, x, y, out, x);
    return out;
}

static const float *negative(const float *row, long rows, float **buffer)
{
    float *out = take(buffer, rows);
    for (long m = 0; m < rows; m += LANES)
        *(lanes *)(out + m) = -*(const lanes *)(row + m);
    return rows ? out : 0;
}

/* Gradients of a part's queries, given the state of all keys, and what they add to the gradient of that. */
static void pull_queries(const Call *call, long head, long part, float *grad_state, float *grad_row)
{
    const long d = call->d, e = call->e, own = call->denominated ? call->own : 0, rows = row_size(call);
    float *rest = scratch_of(call), *dq = take(&rest, CHUNK * d), *dq_own = take(&rest, CHUNK * own);
    const float *state = turned(call->saved + head * d * e, d, e, &rest);
    const float *row = negative(call->saved_rows + head * rows, rows, &rest);
    long from, to;
    share_of(call, call->length, part, &from, &to);
    for (long start = from; start < to; start += CHUNK) {
        float *buffer = rest;
        Step step = {.n = chunk_of(call, head, start, to)};
        const long c = step.n.c;
        const Made q = make_features(call, &call->q, step.n, d, &buffer);
        make_grads(call, &step, &buffer);
        Ahead ahead = after_chunk(call, step.n, to, 2, call->divide ? 5 : 4);
        add_outer(q.features, (Rows){step.grads, e}, c, d, e, grad_state, &ahead);
        read_state((Rows){step.grads, e}, state, c, e, d, step.less, own ? 0 : row, dq, &ahead);
        if (own)
            read_state((Rows){step.grads, e}, state, c, 0, own, step.less, row, dq_own, &ahead);
        if (rows)
            add_rows(q.own, step.less, 0, c, rows, 1, grad_row);
        pull(call, &call->q, step.n, d, q.plain, dq, own ? dq_own : 0);
    }
}

/* Gradients of a part's keys and values, given that of the state of all keys. */
static void pull_keys(const Call *call, long head, long part)
{
    const long d = call->d, e = call->e, own = call->denominated ? call->own : 0, rows = row_size(call);
    float *rest = scratch_of(call), *dk = take(&rest, CHUNK * d), *dv = take(&rest, CHUNK * e), *dk_own = take(&rest, CHUNK * own);
    const float *grad_state = call->grad_state + head * d * e, *state = turned(grad_state, d, e, &rest);
    const float *row = negative(call->grad_row + head * rows, rows, &rest);
    long from, to;
    share_of(call, call->keys, part, &from, &to);
    for (long start = from; start < to; start += CHUNK) {
        float *buffer = rest;
        const Chunk n = chunk_of(call, head, start, to);
        const Made k = make_features(call, &call->k, n, d, &buffer), v = make_features(call, &call->v, n, e, &buffer);
        Ahead ahead = after_chunk(call, n, to, 0, 2);
        read_state(v.features, state, n.c, e, d, 0, own ? 0 : row, dk, &ahead);
        if (own)
            read_state(v.features, state, n.c, 0, own, 0, row, dk_own, &ahead);
        read_state(k.features, grad_state, n.c, d, e, 0, 0, dv, &ahead);
        pull(call, &call->k, n, d, k.plain, dk, own ? dk_own : 0);
        pull(call, &call->v, n, e, v.plain, dv, 0);
    }
}

/* How many parts of a head are summed up, in what a causal part's total has for the weight across it. */
INLINE int *counter_of(const Call *call, long head)
{
    return (int *)(total_of(call, head, 0) + state_size(call) + row_size(call));
}

/* What a part's tokens add to the state of a head, or with `back` to the gradient of that; who sums up the last part joins them. */
static void sum_up(const Call *call, long head, long part, int back)
{
    const long size = state_size(call), rows = row_size(call);
    float *state = (back ? call->grad_state : call->state) + head * size, *row = (back ? call->grad_row : call->row) + head * rows;
    float *own = state, *own_row = row;
    if (call->parts > 1) {
        own = total_of(call, head, part), own_row = own + size;
        memset(own, 0, (size + rows) * sizeof(float));
    }
    if (back)
        pull_queries(call, head, part, own, own_row);
    else
        sum_keys(call, head, part, own, own_row);
    if (call->parts == 1 || __atomic_add_fetch(counter_of(call, head), 1, __ATOMIC_ACQ_REL) < call->parts)
        return;
    for (long m = 0; m < call->parts; m++) {
        own = total_of(call, head, m), own_row = own + size;
        for (long i = 0; i < size; i++)
            state[i] += own[i];
        for (long i = 0; i < rows; i++)
            row[i] += own_row[i];
    }
}

/* What comes of a state for a part's tokens. */
static void spread(const Call *call, long head, long part, int back)
{
    if (back)
        pull_keys(call, head, part);
    else
        read_out(call, head, part, call->state + head * state_size(call), call->row + head * row_size(call));
    _mm_sfence(); /* what is written past the caches is there before others read it */
}

/* States and their gradients are sums of all tokens; backward, states are the saved ones. */
static void run_all(Call *call, int back)
{
    const long parts = call->parts, all = call->all * parts;
    call->past = !back && call->values == call->e && streams(call, &call->out, call->length, call->e);
    for (Input *o = &call->q; back && o <= &call->v; o++)
        o->past = !o->add && whole(o) && streams(call, &o->grad, o == &call->q ? call->length : call->keys, o->width);
    for (long head = 0; parts > 1 && head < call->all; head++)
        *counter_of(call, head) = 0;
#pragma omp parallel num_threads(call->threads)
    {
#pragma omp for schedule(dynamic, 1)
        for (long n = 0; n < all; n++) {
            sum_up(call, n / parts, n % parts, back);
            if (parts == 1)
                spread(call, n, 0, back);
        }
        if (parts > 1) {
#pragma omp for schedule(dynamic, 1)
            for (long n = 0; n < all; n++)
                spread(call, n / parts, n % parts, back);
        }
    }
}

void isopos_forward_all(Call *call)
{
    run_all(call, 0);
}

void isopos_backward_all(Call *call)
{
    run_all(call, 1);
}

/* A token a head, of a stream: states [heads d e], of one column more where that is the sum of k, into `saved`, which may be
   the same. `across` holds weights of the states before [. all], or is null; `row` and `saved_rows` are sums of own k. */
void isopos_step(const Call *call)
{
    const long d = call->d, e = call->e, own = call->own, columns = e + (call->denominated && !own);
    for (long n = 0; n < call->all; n++) /* before a state is written over */
        for (const Input *o = &call->q; o <= &call->v; o++)
            if (o->kind == GATHER && !in_range(table_of(o, chunk_of(call, n, call->start, call->start + 1), 0, 0), o->numbers)) {
                find(call, OUT_OF_RANGE);
                return;
            }
#pragma omp parallel for num_threads(call->threads) if (call->all * d * columns > 1 << 17)
    for (long n = 0; n < call->all; n++) {
        const Chunk token = chunk_of(call, n, call->start, call->start + 1);
        float q[MOST] ALIGNED, k[MOST] ALIGNED, v[MOST + 1] ALIGNED, sum[MOST + 1] ALIGNED;
        float q_plain[MOST] ALIGNED, k_plain[MOST] ALIGNED, *out = rows_of(&call->out, token);
        const float across = call->across ? call->across[call->start * call->all + n] : 1;
        make_token(call, &call->q, token, 0, d, moves(&call->q) ? q_plain : q, q);
        make_token(call, &call->k, token, 0, d, moves(&call->k) ? k_plain : k, k);
        make_token(call, &call->v, token, 0, e, v, v);
        v[e] = 1;
        memset(sum, 0, sizeof sum);
        for (long i = 0; i < d; i++) {
            const float *from = call->state + (n * d + i) * columns, a = k[i], b = q[i];
            float *to = call->saved + (n * d + i) * columns;
#pragma omp simd
            for (long j = 0; j < columns; j++) {
                const float x = (across == 0 ? 0 : across * from[j]) + a * v[j]; /* whatever a state that is over holds */
                to[j] = x;
                sum[j] += b * x;
            }
        }
        float denominator = sum[e];
        if (own) {
            const float *key = moves(&call->k) ? k_plain : k, *query = moves(&call->q) ? q_plain : q;
            denominator = 0;
            for (long m = 0; m < own; m++) {
                const float x = (across == 0 ? 0 : across * call->row[n * own + m]) + key[m];
                call->saved_rows[n * own + m] = x;
                denominator += query[m] * x;
            }
        }
        if (__builtin_fabsf(denominator) < SMALL)
            denominator = __builtin_copysignf(SMALL, denominator);
        if (call->denominator.first)
            *rows_of(&call->denominator, token) = denominator;
        for (long j = 0; j < e; j++)
            out[j] = call->denominated ? sum[j] / denominator : sum[j];
    }
}

/* --- rotations alone --- */

/* Tokens of x times their rows of a table, or of its adjoint, into out [all tokens .]: heads of all samples. */
typedef struct {
    View x, table;
    float *out;
    long all, heads, tokens, adjoint, threads;
    Input input; /* its kind and width */
} Rotate;

long isopos_rotate_size(void)
{
    return sizeof(Rotate);
}

static void rotate_tokens(const Rotate *call, long head, long from, long to)
{
    const Input *o = &call->input;
    const long width = o->kind == LIFT && !call->adjoint ? 2 * o->width : o->width;
    const long sample = head / call->heads, own = head % call->heads;
    const float *x = (const float *)call->x.first + sample * call->x.sample + own * call->x.head + from * call->x.token;
    const float *table = (const float *)call->table.first + sample * call->table.sample + own * call->table.head;
    float *out = call->out + (head * call->tokens + from) * width, buffer[2 * MOST] ALIGNED;
    table += from * call->table.token;
    for (long i = from; i < to; i++, x += call->x.token, table += call->table.token, out += width) {
        if (call->adjoint)
            move_adjoint(o, x, table, buffer);
        else
            move(o, x, table, buffer);
        for (long m = 0; m < width; m += LANES)
            put(out + m, *(const lanes *)(buffer + m), 1);
    }
}

void isopos_rotate(const Rotate *call)
{
    const long pieces = (call->tokens + CHUNK - 1) / CHUNK;
#pragma omp parallel for num_threads(call->threads)
    for (long n = 0; n < call->all * pieces; n++) {
        const long from = n % pieces * CHUNK, to = from + CHUNK < call->tokens ? from + CHUNK : call->tokens;
        rotate_tokens(call, n / pieces, from, to);
        _mm_sfence();
    }
}
