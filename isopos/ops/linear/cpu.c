/* A group of chunks of causal linear attention, in float32: what chunks.py says with separate PyTorch operations.

   Three rounds over the chunks of a group, which threads share: features of a chunk and what it adds to the states; the states
   from chunk to chunk; the sums of a chunk, divided. Matrices of a chunk stay in a thread's cache, and products leave out what
   a query does not see. Features are made on the way, so that nothing is written that only the next pass would read.

   Built once per instruction set; library.py picks the one that PyTorch picked for itself. OpenMP is PyTorch's own. */

#include <immintrin.h>
#include <omp.h>
#include <string.h>

#ifdef __AVX512F__
#define LANES 16
#define WIDE 4 /* vectors of a row of a block: ROWS * WIDE sums stay in registers */
#define LANES_LIST(f) {f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), f(10), f(11), f(12), f(13), f(14), f(15)}
#else
#define LANES 8
#define WIDE 2
#define LANES_LIST(f) {f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7)}
#endif
#define ROWS 4
#define CHUNK 64 /* the most tokens of a chunk */
#define MOST 256 /* the most features */
#define SMALL 1e-6f
#define INLINE static inline __attribute__((always_inline))
#define ALIGNED __attribute__((aligned(64)))

typedef float lanes __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int order __attribute__((vector_size(LANES * 4)));

/* Rows of tokens, contiguous features: strides in numbers; those of samples and heads may be zero. */
typedef struct {
    void *first;
    long sample, head, token;
} View;

enum { IDENTITY, ELU1, RELU, RELU2, EXP };
enum { NONE, ROTATION, LIFT, GATHER };

/* An input x, and what makes features of it: phi, a reflection, then a table. `own` are features for the denominator. */
typedef struct {
    View x, own, grad, grad_own, mask, normal, table, grad_table; /* mask: bytes, tokens that take part; or null, as others may be */
    long phi, kind, width, add; /* add: to gradients that are there */
    float *rows, *own_rows;     /* buffers [n, tokens up to whole blocks, .] */
    double *grad_decay;         /* [n c] or null */
} Input;

/* States [heads . .] hold those before the group and end as those after it, gradients of states the reverse. */
typedef struct {
    long chunks, count, heads, c, d, e, own, threads, denominated, divide, begins;
    /* chunks of a group and of a head; heads of a sample; tokens; features of keys, values and the denominator alone or 0;
       begins: no token comes before the group */
    View g_q, g_k; /* log decays, double, or null */
    float *state, *row;   /* sums of k v^T, or v k^T in the backward pass; sums of a denominator's k */
    float *states, *rows, *across; /* buffers for those before each chunk, and for weights across it */
    View out, denominator; /* sums, divided or not, and denominators */
    View grad;
    float *grad_state, *grad_row, *grad_states, *grad_rows, *grads, *less; /* less: [n c], minus gradients of denominators */
    float *scratch; /* a buffer [threads scratch_size]: threads may have small stacks */
    long scratch_size, *out_of_range; /* becomes 1 where an index of a gather is no feature's */
    Input q, k, v;
} Call;

typedef struct {
    const float *at;
    long stride;
} Rows;

INLINE long index_of(const Call *call, const View *view, long n)
{
    const long head = n / call->count, token = n % call->count * call->c;
    return head / call->heads * view->sample + head % call->heads * view->head + token * view->token;
}

INLINE float *rows_of(const Call *call, const View *view, long n)
{
    return (float *)view->first + index_of(call, view, n);
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

static const Product NOTHING = {0, 0, 0, 0, 0, 0};

INLINE void add_product(lanes sum[ROWS][WIDE], const int wide, Product p)
{
    for (long m = 0; m < p.depth; m++) {
        lanes b[WIDE];
        for (int w = 0; w < wide; w++)
            b[w] = *(const lanes *)(p.b + m * p.stride + w * LANES);
        for (int r = 0; r < ROWS; r++) {
            const float a = p.a[r * p.row + m * p.column];
            for (int w = 0; w < wide; w++)
                sum[r][w] += a * b[w];
        }
    }
}

INLINE void panel(const int wide, float *out, long stride, long rows, Product p, const float *scale, Product more)
{
    lanes sum[ROWS][WIDE];
    for (int r = 0; r < ROWS; r++)
        for (int w = 0; w < wide; w++)
            sum[r][w] = (lanes){0};
    add_product(sum, wide, p);
    if (scale)
        for (int r = 0; r < ROWS; r++)
            for (int w = 0; w < wide; w++)
                sum[r][w] *= scale[r];
    add_product(sum, wide, more);
    for (int r = 0; r < ROWS; r++)
        if (r < rows)
            for (int w = 0; w < wide; w++)
                *(lanes *)(out + r * stride + w * LANES) = sum[r][w];
}

/* out [rows columns] = scale * p + more, at most ROWS rows. */
static void block(float *out, long stride, long rows, long columns, Product p, const float *scale, Product more)
{
    for (; columns >= WIDE * LANES; columns -= WIDE * LANES) {
        panel(WIDE, out, stride, rows, p, scale, more);
        out += WIDE * LANES, p.b += WIDE * LANES, more.b += WIDE * LANES;
    }
    if (columns >= 3 * LANES)
        panel(WIDE > 2 ? 3 : 1, out, stride, rows, p, scale, more);
    else if (columns >= 2 * LANES)
        panel(WIDE > 2 ? 2 : 1, out, stride, rows, p, scale, more);
    else if (columns >= LANES)
        panel(1, out, stride, rows, p, scale, more);
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

/* --- features --- */

INLINE lanes choose(order where, lanes a, lanes b)
{
    return (lanes)((where & (order)a) | (~where & (order)b));
}

/* To about one unit in the last place; with infinities and NaN as they should be. */
INLINE lanes exponential(lanes x)
{
    const lanes zero = {0}, shift = zero + 12582912.0f;
    x = choose(x > 89.0f, zero + 89.0f, choose(x < -104.0f, zero - 104.0f, x));
    const lanes shifted = x * 1.44269504f + shift, power = shifted - shift;
    const order whole = (order)shifted - (order)shift, half = whole >> 1;
    const lanes r = (x - power * 0.693359375f) + power * 2.12194440e-4f;
    lanes y = zero + 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    return y * (lanes)((half + 127) << 23) * (lanes)((whole - half + 127) << 23);
}

/* exp(g_i - g_j) from the token before a chunk to each (before), from each to its last one (after), from token to token (step)
   and across it. No exponent exceeds zero: r^i and r^-j, which overflow, are never formed. */
typedef struct {
    float before[CHUNK], after[CHUNK], step[CHUNK], across;
    double query[CHUNK], key[CHUNK];
    int fades; /* whether any weight is not 1 */
} Weights;

/* The exponentials of x, and of zeros up to a whole vector. */
static void raise_all(float *x, long count)
{
    for (long i = count; i % LANES; i++)
        x[i] = 0;
    for (long i = 0; i < count; i += LANES)
        *(lanes *)(x + i) = exponential(*(const lanes *)(x + i));
}

static void make_weights(const Call *call, long n, Weights *w)
{
    const long c = call->c;
    w->fades = 0;
    if (call->g_q.first) {
        const double *query = (const double *)call->g_q.first + index_of(call, &call->g_q, n);
        const double *key = (const double *)call->g_k.first + index_of(call, &call->g_k, n);
        const int first = call->begins && n % call->count == 0; /* then the state before is zero */
        const double start = key[first ? 0 : -call->g_k.token], end = key[(c - 1) * call->g_k.token];
        for (long i = 0; i < c; i++) {
            w->query[i] = query[i * call->g_q.token];
            w->key[i] = key[i * call->g_k.token];
            w->fades |= w->query[i] != start || w->key[i] != start;
        }
        for (long i = 0; w->fades && i < c; i++) {
            w->before[i] = w->query[i] - start;
            w->after[i] = end - w->key[i];
            w->step[i] = w->query[i] - (i ? w->query[i - 1] : start);
        }
        w->across = end - start;
    }
    if (w->fades) {
        raise_all(w->before, c);
        raise_all(w->after, c);
        raise_all(w->step, c);
        w->across = exponential((lanes){w->across})[0];
        return;
    }
    for (long i = 0; i < CHUNK; i++)
        w->before[i] = w->after[i] = w->step[i] = 1;
    w->across = 1;
}

/* The weight of a token's own key. */
INLINE float own_weight(const Weights *w, long i)
{
    return w->fades && w->query[i] != w->key[i] ? exponential((lanes){w->query[i] - w->key[i]})[0] : 1;
}

/* Weights inside a chunk [c CHUNK], for those that a query sees; null where all are 1. */
static const float *make_inside(const Weights *w, long c, float *out)
{
    if (!w->fades)
        return 0;
    for (long i = 0; i < c; i++) {
        for (long j = 0; j <= i; j++)
            out[i * CHUNK + j] = w->query[i] - w->key[j];
        raise_all(out + i * CHUNK, i + 1);
    }
    return out;
}

INLINE lanes feature(long phi, lanes x)
{
    const lanes zero = {0}, positive = choose(x < zero, zero, x); /* comparisons that keep NaN */
    if (phi == ELU1)
        return exponential(choose(x > zero, zero, x)) + positive;
    if (phi == RELU)
        return positive + 1e-3f;
    if (phi == RELU2)
        return positive * positive;
    return phi == EXP ? exponential(x) : x;
}

/* Of x and its feature y. */
INLINE lanes slope(long phi, lanes x, lanes y)
{
    const lanes zero = {0}, one = zero + 1.0f;
    if (phi == ELU1)
        return choose(y > one, one, y);
    if (phi == RELU)
        return choose(x > zero, one, zero);
    if (phi == RELU2)
        return choose(x > zero, x + x, zero);
    return phi == EXP ? y : one;
}

static void map(long phi, const float *x, float *y, long width)
{
    for (long m = 0; m < width; m += LANES)
        *(lanes *)(y + m) = feature(phi, *(const lanes *)(x + m));
}

/* Pairs times cos + i sin, or with sign -1 times cos - i sin; x may be y. */
INLINE void rotate(const float *x, const float *table, float sign, float *y, long width)
{
#define OTHER(l) ((l) ^ 1)
#define EVEN(l) ((l) & ~1)
#define ODD(l) ((l) | 1)
#define SIGN(l) ((l) & 1 ? 1 : -1)
    const lanes signs = sign * (lanes)LANES_LIST(SIGN);
    for (long m = 0; m < width; m += LANES) {
        const lanes a = *(const lanes *)(x + m), t = *(const lanes *)(table + m);
        const lanes cosine = __builtin_shuffle(t, (order)LANES_LIST(EVEN)), sine = __builtin_shuffle(t, (order)LANES_LIST(ODD));
        *(lanes *)(y + m) = a * cosine + __builtin_shuffle(a, (order)LANES_LIST(OTHER)) * (sine * signs);
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

INLINE void reflect(const float *normal, float *x, long width)
{
    const float twice = 2 * dot(x, normal, width);
    for (long m = 0; m < width; m += LANES)
        *(lanes *)(x + m) -= twice * *(const lanes *)(normal + m);
}

INLINE int in_range(const long *index, long width)
{
    int bad = 0;
    for (long m = 0; m < width; m++)
        bad |= (unsigned long)index[m] >= (unsigned long)width;
    return !bad;
}

INLINE void gather(const float *x, const long *index, float *y, long width)
{
#if LANES == 16
    if (width == 64) { /* two registers a half, and the half by the sixth bit */
        const lanes a = *(const lanes *)x, b = *(const lanes *)(x + 16), c = *(const lanes *)(x + 32), d = *(const lanes *)(x + 48);
        for (long m = 0; m < width; m += LANES) {
            order at;
            for (int l = 0; l < LANES; l++)
                at[l] = (int)index[m + l];
            *(lanes *)(y + m) = choose((at & 32) != 0, __builtin_shuffle(c, d, at), __builtin_shuffle(a, b, at));
        }
        return;
    }
#endif
    for (long m = 0; m < width; m++)
        y[m] = x[index[m]];
}

/* The table of an isometry applied to features x [width], which are not y. */
INLINE void move(const Input *o, const float *x, const void *table, float *y)
{
    if (o->kind == ROTATION)
        rotate(x, table, 1, y, o->width);
    else if (o->kind == GATHER)
        gather(x, table, y, o->width);
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
    else if (o->kind == GATHER)
        for (long m = 0; m < o->width; m++)
            x[((const long *)table)[m]] = y[m];
    else
        for (long m = 0; m < o->width; m += LANES) {
            lanes cosine, sine;
            split_table((const float *)table + 2 * m, &cosine, &sine);
            *(lanes *)(x + m) = *(const lanes *)(y + m) * cosine + *(const lanes *)(y + o->width + m) * sine;
        }
}

/* The gradient of a token's table [2 a pair], from features before it and gradients after it. */
INLINE void pull_table(const Input *o, const float *x, const float *grad, float *out)
{
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

/* The token i of a chunk in the table of an input: numbers are of 4 bytes, indices of 8. */
INLINE const void *table_of(const Call *call, const Input *o, long n, long i)
{
    const long at = index_of(call, &o->table, n) + i * o->table.token;
    return (const char *)o->table.first + at * (o->kind == GATHER ? 8 : 4);
}

INLINE int ready(const Input *o, long c)
{
    return o->phi == IDENTITY && o->kind == NONE && !o->normal.first && !o->mask.first && c % ROWS == 0;
}

INLINE int dropped(const Call *call, const Input *o, long n, long i)
{
    return o->mask.first && !((const char *)o->mask.first)[index_of(call, &o->mask, n) + i * o->mask.token];
}

/* Features of a chunk, [d] a token, where they are or will be. */
static Rows features_at(const Call *call, const Input *o, long n, long d)
{
    if (ready(o, call->c))
        return (Rows){rows_of(call, &o->x, n), o->x.token};
    return (Rows){o->rows + n * blocks(call->c) * d, d};
}

/* Those of its denominator alone. */
static Rows own_at(const Call *call, const Input *o, long n)
{
    if (o->own.first)
        return (Rows){rows_of(call, &o->own, n), o->own.token};
    return (Rows){o->own_rows + n * blocks(call->c) * call->own, call->own};
}

INLINE int moves(const Input *o)
{
    return o->kind != NONE || o->normal.first;
}

/* The features of token i of a chunk, phi's own on the way: where nothing moves them these are the same. */
INLINE void make_token(const Call *call, const Input *o, long n, long i, long d, float *plain, float *features)
{
    const long width = o->width;
    if (dropped(call, o, n, i)) { /* whatever it holds */
        memset(plain, 0, width * sizeof(float));
        memset(features, 0, d * sizeof(float));
        return;
    }
    map(o->phi, rows_of(call, &o->x, n) + i * o->x.token, plain, width);
    if (!moves(o))
        return;
    const float *y = plain;
    float buffer[MOST] ALIGNED;
    if (o->normal.first) {
        float *reflected = o->kind == NONE ? features : buffer;
        memcpy(reflected, plain, width * sizeof(float));
        reflect((const float *)o->normal.first + index_of(call, &o->normal, n), reflected, width);
        y = reflected;
    }
    if (o->kind == GATHER && !in_range(table_of(call, o, n, i), width)) {
        *call->out_of_range = 1;
        memset(features, 0, d * sizeof(float));
    } else if (o->kind != NONE)
        move(o, y, table_of(call, o, n, i), features);
}

static void make_features(const Call *call, const Input *o, long n, long d)
{
    const long c = call->c;
    if (ready(o, c))
        return;
    const int own = o->own_rows && !o->own.first;
    float *rows = o->rows + n * blocks(c) * d, buffer[MOST] ALIGNED;
    for (long i = 0; i < c; i++) {
        float *features = rows + i * d, *plain = own ? o->own_rows + (n * blocks(c) + i) * call->own : buffer;
        make_token(call, o, n, i, d, moves(o) ? plain : features, features);
    }
    memset(rows + c * d, 0, (blocks(c) - c) * d * sizeof(float));
}

/* Gradients of a learned table from those of features [c d], given phi's own where they are. */
static void pull_tables(const Call *call, const Input *o, long n, long d, const float *grad, const float *saved)
{
    const float *normal = o->normal.first ? (const float *)o->normal.first + index_of(call, &o->normal, n) : 0;
    float *out = rows_of(call, &o->grad_table, n), buffer[MOST] ALIGNED;
    for (long i = 0; i < call->c; i++, grad += d, out += o->grad_table.token) {
        if (dropped(call, o, n, i)) {
            memset(out, 0, (o->kind == LIFT ? 2 : 1) * o->width * sizeof(float));
            continue;
        }
        if (saved)
            memcpy(buffer, saved + i * o->width, o->width * sizeof(float));
        else
            map(o->phi, rows_of(call, &o->x, n) + i * o->x.token, buffer, o->width);
        if (normal)
            reflect(normal, buffer, o->width);
        pull_table(o, buffer, grad, out);
    }
}

/* Gradients of x from those of its features [c d] and of its own ones [c own], which are overwritten. */
static void pull(const Call *call, const Input *o, long n, long d, float *grad, float *grad_own)
{
    const float *normal = o->normal.first ? (const float *)o->normal.first + index_of(call, &o->normal, n) : 0;
    if (o->grad_own.first) {
        for (long i = 0; i < call->c; i++)
            memcpy(rows_of(call, &o->grad_own, n) + i * o->grad_own.token, grad_own + i * call->own, call->own * sizeof(float));
        grad_own = 0;
    }
    const float *saved = moves(o) ? o->own_rows : o->rows; /* phi's features, if they were */
    saved = saved ? saved + n * blocks(call->c) * o->width : 0;
    if (o->grad_table.first)
        pull_tables(call, o, n, d, grad, saved);
    for (long i = 0; i < call->c; i++, grad += d) {
        const float *x = rows_of(call, &o->x, n) + i * o->x.token, *from = grad;
        float *out = rows_of(call, &o->grad, n) + i * o->grad.token, buffer[MOST] ALIGNED;
        if (o->kind != NONE && !*call->out_of_range) {
            move_adjoint(o, grad, table_of(call, o, n, i), buffer);
            from = buffer;
        }
        if (normal) {
            if (from != buffer)
                memcpy(buffer, from, o->width * sizeof(float));
            reflect(normal, buffer, o->width);
            from = buffer;
        }
        for (long m = 0; m < o->width; m += LANES) {
            lanes g = *(const lanes *)(from + m);
            if (grad_own)
                g += *(const lanes *)(grad_own + i * call->own + m);
            if (dropped(call, o, n, i))
                g = (lanes){0};
            else if (o->phi != IDENTITY) {
                const lanes a = *(const lanes *)(x + m);
                g *= slope(o->phi, a, saved ? *(const lanes *)(saved + i * o->width + m) : feature(o->phi, a));
            }
            if (o->add)
                g += *(const lanes *)(out + m);
            *(lanes *)(out + m) = g;
        }
    }
}

/* --- states --- */

/* Sums of rows of x by weights, and by others if they are given. */
static void sum_rows(Rows x, const float *weight, const float *other, long c, long width, float *out)
{
    memset(out, 0, width * sizeof(float));
    for (long i = 0; i < c; i++) {
        const float w = other ? weight[i] * other[i] : weight[i];
        for (long m = 0; m < width; m += LANES)
            *(lanes *)(out + m) += w * *(const lanes *)(x.at + i * x.stride + m);
    }
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

/* a [c x]^T times weight * b [c y]: what a chunk adds to a state [x y]. */
static void outer(Rows a, Rows b, const float *weight, long c, long x, long y, float *scaled, float *out)
{
    for (long i = 0; i < c; i++)
        for (long m = 0; m < y; m += LANES)
            *(lanes *)(scaled + i * y + m) = weight[i] * *(const lanes *)(b.at + i * b.stride + m);
    for (long i = 0; i < x; i += ROWS)
        block(out + i * y, y, ROWS, y, (Product){a.at + i, 1, a.stride, scaled, y, c}, 0, NOTHING);
}

/* Each head's state goes through its chunks, which hold what they add and get what came before. */
static void scan(const Call *call, long head, const float *weight, float *state, float *chunks, long size, int back)
{
    state += head * size;
    for (long m = 0; m < call->count; m++) {
        const long n = head * call->count + (back ? call->count - 1 - m : m);
        const float across = weight[n];
        float *chunk = chunks + n * size;
        for (long i = 0; i < size; i += LANES) {
            const lanes added = *(const lanes *)(chunk + i), before = *(const lanes *)(state + i);
            *(lanes *)(chunk + i) = before;
            *(lanes *)(state + i) = across * before + added;
        }
    }
}

/* --- sums of a chunk --- */

/* Weighted products of rows a and columns b [width CHUNK], less a number a row: zero where a query does not see. */
static void weigh(Rows a, const float *b, long width, const float *inside, const float *less, long c, float *out)
{
    for (long i = 0; i < c; i += ROWS) {
        const long seen = (i + ROWS + LANES - 1) / LANES * LANES;
        const Product p = {a.at + i * a.stride, a.stride, 1, b, CHUNK, width};
        block(out + i * CHUNK, CHUNK, ROWS, seen, p, 0, NOTHING);
        for (long r = i; r < i + ROWS; r++) {
            const long some = r < c ? r + 1 : 0;
            const float of_row = less && r < c ? less[r] : 0;
            if (of_row != 0)
                for (long j = 0; j < some; j++)
                    out[r * CHUNK + j] -= of_row;
            if (inside)
                for (long j = 0; j < some; j++)
                    out[r * CHUNK + j] *= inside[r * CHUNK + j];
            for (long j = some; j < seen; j++)
                out[r * CHUNK + j] = 0;
        }
    }
}

/* Denominators of a chunk, as they are. */
static void denominators(const Call *call, long n, const Weights *w, Rows q, const float *scores, float *denominator)
{
    const long c = call->c, own = call->own, d = call->d;
    if (!own) {
        const float *row = call->rows + n * d;
        for (long i = 0; i < c; i++) {
            lanes sum = {0};
            for (long j = 0; j <= i; j += LANES) /* zeros follow */
                sum += *(const lanes *)(scores + i * CHUNK + j);
            denominator[i] = w->before[i] * dot(q.at + i * q.stride, row, d) + total(sum);
        }
        return;
    }
    const Rows queries = own_at(call, &call->q, n), keys = own_at(call, &call->k, n);
    memset(denominator, 0, c * sizeof(float));
    for (long m = 0; m < own; m += WIDE * LANES) {
        lanes seen[WIDE];
        const int wide = own - m < WIDE * LANES ? (own - m) / LANES : WIDE;
        for (int v = 0; v < wide; v++)
            seen[v] = *(const lanes *)(call->rows + n * own + m + v * LANES);
        for (long i = 0; i < c; i++) {
            const float s = w->step[i], here = own_weight(w, i);
            const float *key = keys.at + i * keys.stride + m, *query = queries.at + i * queries.stride + m;
            lanes sum = {0};
            for (int v = 0; v < wide; v++) {
                seen[v] = s * seen[v] + here * *(const lanes *)(key + v * LANES);
                sum += seen[v] * *(const lanes *)(query + v * LANES);
            }
            denominator[i] += total(sum);
        }
    }
}

/* Gradients of the own features of a chunk [c own]. */
static void pull_denominators(const Call *call, long n, const Weights *w, float *dq, float *dk)
{
    const long c = call->c, own = call->own;
    const float *less = call->less + n * c, *later = call->grad_rows + n * own;
    const Rows queries = own_at(call, &call->q, n), keys = own_at(call, &call->k, n);
    for (long m = 0; m < own; m += WIDE * LANES) {
        lanes sum[WIDE], end[WIDE];
        const int wide = own - m < WIDE * LANES ? (own - m) / LANES : WIDE;
        for (int v = 0; v < wide; v++)
            sum[v] = *(const lanes *)(call->rows + n * own + m + v * LANES);
        for (long i = 0; i < c; i++) {
            const float s = w->step[i], here = own_weight(w, i), l = -less[i];
            for (int v = 0; v < wide; v++) {
                sum[v] = s * sum[v] + here * *(const lanes *)(keys.at + i * keys.stride + m + v * LANES);
                *(lanes *)(dq + i * own + m + v * LANES) = l * sum[v];
            }
        }
        for (int v = 0; v < wide; v++)
            sum[v] = (lanes){0}, end[v] = *(const lanes *)(later + m + v * LANES);
        for (long i = c - 1; i >= 0; i--) {
            const float s = i + 1 < c ? w->step[i + 1] : 0, here = own_weight(w, i), a = w->after[i], l = less[i];
            for (int v = 0; v < wide; v++) {
                sum[v] = s * sum[v] + l * *(const lanes *)(queries.at + i * queries.stride + m + v * LANES);
                *(lanes *)(dk + i * own + m + v * LANES) = -(here * sum[v] + a * end[v]);
            }
        }
    }
}

static void forward_chunk(const Call *call, long n)
{
    const long c = call->c, d = call->d, e = call->e;
    const float *state = call->states + n * d * e;
    const Rows q = features_at(call, &call->q, n, d), k = features_at(call, &call->k, n, d), v = features_at(call, &call->v, n, e);
    float *rest = scratch_of(call), *transposed = take(&rest, d * CHUNK), *buffer = take(&rest, CHUNK * CHUNK);
    float *scores = take(&rest, CHUNK * CHUNK), denominator[CHUNK];
    float *out = rows_of(call, &call->out, n);
    Weights w;
    make_weights(call, n, &w);
    const float *inside = make_inside(&w, c, buffer);
    transpose(k, c, d, transposed, CHUNK);
    weigh(q, transposed, d, inside, 0, c, scores);
    if (call->denominated) {
        float *into = rows_of(call, &call->denominator, n);
        denominators(call, n, &w, q, scores, denominator);
        for (long i = 0; i < c; i++) {
            if (call->divide && __builtin_fabsf(denominator[i]) < SMALL)
                denominator[i] = __builtin_copysignf(SMALL, denominator[i]);
            into[i * call->denominator.token] = denominator[i];
        }
    }
    for (long i = 0; i < c; i += ROWS) {
        const long to = i + ROWS < c ? i + ROWS : c;
        float weight[ROWS] = {0};
        for (long r = i; r < to; r++)
            weight[r - i] = w.before[r];
        block(out + i * call->out.token, call->out.token, to - i, e, (Product){q.at + i * q.stride, q.stride, 1, state, e, d}, weight,
              (Product){scores + i * CHUNK, CHUNK, 1, v.at, v.stride, to});
        if (call->divide)
            for (long r = i; r < to; r++)
                for (long m = 0; m < e; m += LANES)
                    *(lanes *)(out + r * call->out.token + m) /= denominator[r];
    }
}

/* Gradients of a chunk's sums [c e], and of its denominators. */
static void make_grads(const Call *call, long n)
{
    const long c = call->c, e = call->e;
    const float *grad = rows_of(call, &call->grad, n);
    float *grads = call->grads + n * blocks(c) * e;
    for (long i = 0; i < c; i++) {
        const float *from = grad + i * call->grad.token;
        float *to = grads + i * e;
        if (!call->divide) {
            memcpy(to, from, e * sizeof(float));
            if (call->denominated)
                call->less[n * c + i] = -from[e];
            continue;
        }
        const float *out = rows_of(call, &call->out, n) + i * call->out.token;
        const float denominator = rows_of(call, &call->denominator, n)[i * call->denominator.token];
        lanes sum = {0};
        for (long m = 0; m < e; m += LANES) {
            const lanes g = *(const lanes *)(from + m) / denominator;
            sum += g * *(const lanes *)(out + m);
            *(lanes *)(to + m) = g;
        }
        call->less[n * c + i] = __builtin_fabsf(denominator) <= SMALL ? 0 : total(sum);
    }
    memset(grads + c * e, 0, (blocks(c) - c) * e * sizeof(float));
}

static void backward_chunk(const Call *call, long n)
{
    const long c = call->c, d = call->d, e = call->e, own = call->own;
    const float *less = call->denominated ? call->less + n * c : 0;
    const float *state = call->states + n * d * e, *grad_state = call->grad_states + n * d * e;
    const Rows q = features_at(call, &call->q, n, d), k = features_at(call, &call->k, n, d), v = features_at(call, &call->v, n, e);
    const Rows grad = {call->grads + n * blocks(c) * e, e};
    float *rest = scratch_of(call), *transposed = take(&rest, (d > CHUNK ? d : CHUNK) * (d > e ? d : e));
    float *scores = take(&rest, CHUNK * CHUNK), *grad_scores = take(&rest, CHUNK * CHUNK), *buffer = take(&rest, CHUNK * CHUNK);
    float *dq = take(&rest, CHUNK * d), *dk = take(&rest, CHUNK * d), *dv = take(&rest, CHUNK * e);
    float *dq_own = take(&rest, CHUNK * own), *dk_own = take(&rest, CHUNK * own);
    Weights w;
    make_weights(call, n, &w);
    const float *inside = make_inside(&w, c, buffer);
    transpose(k, c, d, transposed, CHUNK);
    weigh(q, transposed, d, inside, 0, c, scores);
    transpose(v, c, e, transposed, CHUNK);
    weigh(grad, transposed, e, inside, own ? 0 : less, c, grad_scores);
    transpose((Rows){grad_state, e}, d, e, transposed, d);
    for (long i = 0; i < c; i += ROWS) {
        const long to = i + ROWS < c ? i + ROWS : c, from = i * CHUNK + i, rows = to - i;
        float near[ROWS] = {0}, far[ROWS] = {0};
        for (long r = i; r < to; r++)
            near[r - i] = w.before[r], far[r - i] = w.after[r];
        block(dq + i * d, d, rows, d, (Product){grad.at + i * e, e, 1, state, d, e}, near,
              (Product){grad_scores + i * CHUNK, CHUNK, 1, k.at, k.stride, to});
        block(dk + i * d, d, rows, d, (Product){v.at + i * v.stride, v.stride, 1, transposed, d, e}, far,
              (Product){grad_scores + from, 1, CHUNK, q.at + i * q.stride, q.stride, c - i});
        block(dv + i * e, e, rows, e, (Product){k.at + i * k.stride, k.stride, 1, grad_state, e, d}, far,
              (Product){scores + from, 1, CHUNK, grad.at + i * e, e, c - i});
    }
    if (less && own)
        pull_denominators(call, n, &w, dq_own, dk_own);
    else if (less) {
        const float *row = call->rows + n * d, *later = call->grad_rows + n * d;
        for (long i = 0; i < c; i++)
            for (long m = 0; m < d; m += LANES) {
                *(lanes *)(dq + i * d + m) -= w.before[i] * less[i] * *(const lanes *)(row + m);
                *(lanes *)(dk + i * d + m) -= w.after[i] * *(const lanes *)(later + m);
            }
    }
    if (call->q.grad_decay) /* weights <q, k> exp(g_q - g_k): as if q and k were scaled */
        for (long i = 0; i < c; i++) {
            double of_q = dot(dq + i * d, q.at + i * q.stride, d), of_k = dot(dk + i * d, k.at + i * k.stride, d);
            if (less && own) {
                const Rows queries = own_at(call, &call->q, n), keys = own_at(call, &call->k, n);
                of_q += dot(dq_own + i * own, queries.at + i * queries.stride, own);
                of_k += dot(dk_own + i * own, keys.at + i * keys.stride, own);
            }
            call->q.grad_decay[n * c + i] = of_q, call->k.grad_decay[n * c + i] = -of_k;
        }
    pull(call, &call->q, n, d, dq, less && own ? dq_own : 0);
    pull(call, &call->k, n, d, dk, less && own ? dk_own : 0);
    pull(call, &call->v, n, e, dv, 0);
}

/* --- groups of chunks --- */

long isopos_call_size(void)
{
    return sizeof(Call);
}

/* What both passes do first with a chunk. */
static void begin_chunk(const Call *call, long n, Weights *w)
{
    make_weights(call, n, w);
    call->across[n] = w->across;
    make_features(call, &call->q, n, call->d);
    make_features(call, &call->k, n, call->d);
    make_features(call, &call->v, n, call->e);
}

static Rows denominator_features(const Call *call, const Input *o, long n)
{
    return call->own ? own_at(call, o, n) : features_at(call, o, n, call->d);
}

/* Both states of a head, or their gradients the other way. */
static void scan_head(const Call *call, long head, int back)
{
    scan(call, head, call->across, back ? call->grad_state : call->state, back ? call->grad_states : call->states,
         call->d * call->e, back);
    if (call->denominated)
        scan(call, head, call->across, back ? call->grad_row : call->row, back ? call->grad_rows : call->rows,
             call->own ? call->own : call->d, back);
}

void isopos_forward(const Call *call)
{
    const long c = call->c, d = call->d, e = call->e, size = call->own ? call->own : d;
#pragma omp parallel num_threads(call->threads)
    {
#pragma omp for
        for (long n = 0; n < call->chunks; n++) {
            Weights w;
            begin_chunk(call, n, &w);
            outer(features_at(call, &call->k, n, d), features_at(call, &call->v, n, e), w.after, c, d, e, scratch_of(call), call->states + n * d * e);
            if (call->denominated)
                sum_rows(denominator_features(call, &call->k, n), w.after, 0, c, size, call->rows + n * size);
        }
#pragma omp for
        for (long head = 0; head < call->chunks / call->count; head++)
            scan_head(call, head, 0);
#pragma omp for
        for (long n = 0; n < call->chunks; n++)
            forward_chunk(call, n);
    }
}

void isopos_backward(const Call *call)
{
    const long c = call->c, d = call->d, e = call->e, size = call->own ? call->own : d;
#pragma omp parallel num_threads(call->threads)
    {
#pragma omp for
        for (long n = 0; n < call->chunks; n++) {
            Weights w;
            begin_chunk(call, n, &w);
            make_grads(call, n);
            const Rows q = features_at(call, &call->q, n, d), k = features_at(call, &call->k, n, d);
            const Rows v = features_at(call, &call->v, n, e), grad = {call->grads + n * blocks(c) * e, e};
            outer(v, k, w.after, c, e, d, scratch_of(call), call->states + n * d * e);
            outer(q, grad, w.before, c, d, e, scratch_of(call), call->grad_states + n * d * e);
            if (call->denominated) {
                sum_rows(denominator_features(call, &call->k, n), w.after, 0, c, size, call->rows + n * size);
                sum_rows(denominator_features(call, &call->q, n), w.before, call->less + n * c, c, size, call->grad_rows + n * size);
            }
        }
#pragma omp for
        for (long head = 0; head < call->chunks / call->count; head++) {
            scan_head(call, head, 0);
            scan_head(call, head, 1);
        }
#pragma omp for
        for (long n = 0; n < call->chunks; n++)
            backward_chunk(call, n);
    }
}

/* A token a head, of a stream: states [heads d e], of one column more where that is the sum of k, into `states`, which may be
   the same. `across` holds weights of the states before, or is null; `row` and `rows` are sums of own k. */
void isopos_step(const Call *call)
{
    const long d = call->d, e = call->e, own = call->own, columns = e + (call->denominated && !own);
    for (long n = 0; n < call->chunks; n++) /* before a state is written over */
        for (const Input *o = &call->q; o <= &call->v; o++)
            if (o->kind == GATHER && !in_range(table_of(call, o, n, 0), o->width)) {
                *call->out_of_range = 1;
                return;
            }
#pragma omp parallel for num_threads(call->threads) if (call->chunks * d * columns > 1 << 17)
    for (long n = 0; n < call->chunks; n++) {
        float q[MOST] ALIGNED, k[MOST] ALIGNED, v[MOST + 1] ALIGNED, sum[MOST + 1] ALIGNED;
        float q_plain[MOST] ALIGNED, k_plain[MOST] ALIGNED, *out = rows_of(call, &call->out, n);
        const float across = call->across ? call->across[n] : 1;
        make_token(call, &call->q, n, 0, d, moves(&call->q) ? q_plain : q, q);
        make_token(call, &call->k, n, 0, d, moves(&call->k) ? k_plain : k, k);
        make_token(call, &call->v, n, 0, e, v, v);
        v[e] = 1;
        memset(sum, 0, sizeof sum);
        for (long i = 0; i < d; i++) {
            const float *from = call->state + (n * d + i) * columns, a = k[i], b = q[i];
            float *to = call->states + (n * d + i) * columns;
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
                call->rows[n * own + m] = x;
                denominator += query[m] * x;
            }
        }
        if (__builtin_fabsf(denominator) < SMALL)
            denominator = __builtin_copysignf(SMALL, denominator);
        if (call->denominator.first)
            *rows_of(call, &call->denominator, n) = denominator;
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

/* Past the cache, which could not hold the result: without reading what is overwritten. */
INLINE void stream(const float *x, float *out, long width)
{
    for (long m = 0; m < width; m += LANES)
#if LANES == 16
        _mm512_stream_ps(out + m, (__m512) * (const lanes *)(x + m));
#else
        _mm256_stream_ps(out + m, (__m256) * (const lanes *)(x + m));
#endif
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
        stream(buffer, out, width);
    }
}

void isopos_rotate(const Rotate *call)
{
    const long pieces = (call->tokens + CHUNK - 1) / CHUNK;
#pragma omp parallel for num_threads(call->threads)
    for (long n = 0; n < call->all * pieces; n++) {
        const long from = n % pieces * CHUNK, to = from + CHUNK < call->tokens ? from + CHUNK : call->tokens;
        rotate_tokens(call, n / pieces, from, to);
    }
}
