/* The structure of a call, equal to the one in library.py, and how its tokens are addressed, read and written. */

#define CHUNK 64 /* tokens of a chunk, at most */
#define MOST 256 /* features, at most */

/* Rows of tokens with contiguous features. Strides count numbers; strides of samples and heads may be zero. */
typedef struct {
    void *first;
    int64_t sample, head, token;
} View;

enum { IDENTITY, ELU1, RELU, RELU2, EXP }; /* COMPILED of feature_maps.py */
enum { NONE, ROTATION, LIFT, GATHER };
enum { OUT_OF_RANGE = 1, NOT_FINITE = 2 }; /* an index of a gather is out of range; a sum is NaN or infinite */

/* An input x and its feature map: phi, a reflection, then a table. `unrotated` holds phi(x) for the denominator, if PyTorch has
   computed the features. x and its gradient are `numbers` numbers of a type per token; all else is float32. */
typedef struct {
    View x, unrotated, grad, grad_unrotated, mask, normal, table, grad_table; /* all but x may be null; mask: bytes, 0 or 1 */
    int64_t type, numbers, width; /* width: numbers, rounded up to whole vectors */
    int64_t phi, kind, add;       /* add: whether gradients are added to the existing ones */
    int64_t uncached;             /* whether gradients are written past the caches */
    double *grad_decay;           /* [all length] or null */
} Input;

/* Sums of k v^T [all groups d e], and of keys for a denominator [all groups unrotated or d]. */
typedef struct {
    float *sums, *row;
} State;

typedef struct {
    int64_t all, heads;      /* heads of all samples, heads of one sample */
    int64_t length, keys;    /* queries, and keys if sums are over all keys */
    int64_t d, e, unrotated; /* features of keys, of values, of the unrotated denominator or 0: rounded up to whole vectors */
    int64_t values;          /* numbers of a sum */
} Sizes;

typedef struct {
    int64_t denominated, divide;
    int64_t begins, ends; /* whether no token precedes these; whether none follows */
    int64_t reverse;      /* sums over later tokens, added to the existing sums */
    int64_t back;         /* whether this is a backward pass; set by the library itself */
} Flags;

typedef struct {
    View query, key; /* log decays, double, or null */
    float *across;   /* of a step: weights of the states before it [. all], or null */
} Decay;

typedef struct {
    View sums, denominator, grad; /* sums: divided or not */
    int64_t uncached;             /* whether sums are written past the caches */
} Output;

/* Parts of heads, and buffers, since threads may have small stacks. */
typedef struct {
    int64_t parts, threads, total_size, scratch_size;
    float *totals, *scratch; /* [all parts total_size] and [threads scratch_size] */
} Split;

/* `state` is the state before these tokens and becomes the state after them; `grad_state` the reverse. `saved` has the state
   before each group of chunks, or is null. A step reads `state` and writes `saved`, which may be the same memory. */
typedef struct {
    Sizes size;
    Flags flags;
    Decay decay;
    State state, saved, grad_state;
    Output out;
    Split split;
    Input q, k, v;
    int64_t token;   /* of a step: its row in tables and weights */
    int64_t *status; /* bits of errors */
    float floor;  /* smallest magnitude of a denominator */
} Call;

/* c tokens of a head, from `start` on. `head` counts over all samples, `in_sample` within one. */
typedef struct {
    int64_t head, sample, in_sample, start, c;
} Chunk;

typedef struct {
    const float *at;
    int64_t stride;
} Rows;

INLINE Chunk chunk_of(const Call *call, int64_t head, int64_t start, int64_t to)
{
    return (Chunk){head, head / call->size.heads, head % call->size.heads, start, to - start < CHUNK ? to - start : CHUNK};
}

INLINE int64_t index_of(const View *view, Chunk n)
{
    return n.sample * view->sample + n.in_sample * view->head + n.start * view->token;
}

INLINE char *address_of(const View *view, Chunk n, int64_t i, int64_t type)
{
    return (char *)view->first + (index_of(view, n) + i * view->token) * (type == FLOAT32 ? 4 : 2);
}

INLINE float *rows_of(const View *view, Chunk n)
{
    return (float *)view->first + index_of(view, n);
}

INLINE void report(const Call *call, int64_t what)
{
    __atomic_fetch_or(call->status, what, __ATOMIC_RELAXED);
}

/* A denominator with its magnitude clamped to at least the floor; the sign is kept. */
INLINE float clamped(const Call *call, float denominator)
{
    return __builtin_fabsf(denominator) < call->floor ? __builtin_copysignf(call->floor, denominator) : denominator;
}

INLINE int64_t blocks(int64_t c)
{
    return (c + ROWS - 1) / ROWS * ROWS;
}

INLINE float *scratch_of(const Call *call, int64_t worker)
{
    return call->split.scratch + worker * call->split.scratch_size;
}

INLINE float *take(float **buffer, int64_t count)
{
    float *taken = *buffer;
    *buffer += count;
    return taken;
}

/* Numbers as float32 with zeros up to a width: in place if they have this form, otherwise in the buffer. */
INLINE const float *load(const void *from, int64_t type, int64_t numbers, int64_t width, float *buffer)
{
    if (type == FLOAT32 && numbers == width)
        return from;
    const int64_t size = type == FLOAT32 ? 4 : 2;
    for (int64_t m = 0; m < width; m += LANES) {
        const char *part = (const char *)from + m * size;
        char room[LANES * 4] = {0};
        if (m + LANES > numbers)
            part = m < numbers ? memcpy(room, part, (numbers - m) * size) : room;
        *(lanes *)(buffer + m) = type == FLOAT32 ? *(const lanes *)part : widen(part, type);
    }
    return buffer;
}

/* Row i of an input. */
INLINE const float *load_row(const Input *o, Chunk n, int64_t i, float *buffer)
{
    return load(address_of(&o->x, n, i, o->type), o->type, o->numbers, o->width, buffer);
}

INLINE void store(const float *x, int64_t type, int64_t numbers, void *to)
{
    const int64_t whole = numbers / LANES * LANES;
    char room[LANES * 2];
    if (type == FLOAT32) {
        memcpy(to, x, numbers * 4);
        return;
    }
    for (int64_t m = 0; m < whole; m += LANES)
        narrow(*(const lanes *)(x + m), type, (char *)to + m * 2);
    if (whole < numbers) {
        narrow(*(const lanes *)(x + whole), type, room);
        memcpy((char *)to + whole * 2, room, (numbers - whole) * 2);
    }
}
