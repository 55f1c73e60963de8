/* Matrix products: blocks of rows stay in registers, and the next chunk is prefetched meanwhile. */

#define STEPS (64 / LANES) /* steps of a product per prefetched line of memory */

/* a [rows depth] times b [depth columns]; with swapped strides a is a transpose. */
typedef struct {
    const float *a;
    int64_t row, column;
    const float *b;
    int64_t stride, depth;
} Product;

/* A later chunk, further away than processors prefetch by themselves. It is prefetched line by line during products: all at once
   would take the buffers that other lines need. Tensors are k, v, q, the gradient of sums, sums, and gradients of k, v, q. */
typedef struct {
    const Call *call;
    Chunk n;
    int tensor, tensors;   /* the next tensor, and the end */
    const char *at, *stop; /* the next line, and the end of its row */
    int64_t stride, gap;      /* in bytes: from row to row, and from the end of a row to the next row */
    int64_t left, twice;      /* remaining lines of this tensor; whether two lines are prefetched at a time */
} Ahead;

/* Continues with the next tensor that exists when one is done. */
static void go_on(Ahead *ahead)
{
    const Call *call = ahead->call;
    while (!ahead->left && ahead->tensor < ahead->tensors) {
        const int m = ahead->tensor++;
        const Input *inputs[] = {&call->k, &call->v, &call->q}, *o = m < 3 ? inputs[m] : m < 5 ? 0 : inputs[m - 5];
        const View *view = m < 3 ? &o->x : m == 3 ? &call->out.grad : m == 4 ? &call->out.sums : &o->grad;
        const int64_t type = o ? o->type : FLOAT32, numbers = o ? o->numbers : call->size.values, size = type == FLOAT32 ? 4 : 2;
        const int64_t together = view->token == numbers ? ahead->n.c : 1, lines = (together * numbers * size + 63) / 64;
        if (!view->first)
            continue;
        ahead->at = address_of(view, ahead->n, 0, type), ahead->stop = ahead->at + lines * 64;
        ahead->stride = view->token * size, ahead->gap = ahead->stride - lines * 64;
        ahead->left = ahead->n.c / together * lines;
    }
}

INLINE Ahead ahead_of(const Call *call, Chunk n, int tensor, int tensors)
{
    Ahead ahead = {call, n, tensor, n.c > 0 ? tensors : 0};
    ahead.twice = call->size.d <= 32 || call->flags.reverse; /* so that about all lines are prefetched */
    return ahead;
}

INLINE void add_step(lanes sum[ROWS][WIDE], const int wide, const Product *p, int64_t j, int64_t m)
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

/* Adds the product with columns of b from j on. */
INLINE void add_product(lanes sum[ROWS][WIDE], const int wide, const Product *p, int64_t j, Ahead *ahead)
{
    const char *at = ahead->at, *stop = ahead->stop;
    int64_t left = ahead->left, m = 0;
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

/* Destination of ROWS rows of a block, and their final factors or null; `uncached` as in `put`. Zero times every number is added
   to `zeros`, unless it is null: it stays zero if all numbers are finite. */
typedef struct {
    float *at;
    int64_t stride;
    const float *last;
    int uncached;
    lanes *zeros;
} Out;

INLINE void scale_rows(lanes sum[ROWS][WIDE], const int wide, const float *by)
{
    for (int r = 0; r < ROWS; r++)
        for (int w = 0; w < wide; w++)
            sum[r][w] *= by[r];
}

INLINE void panel(const int wide, const Out *out, int64_t j, const Product *p, const float *scale, const Product *more,
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
            put(at + r * out->stride + w * LANES, sum[r][w], out->uncached);
    for (int r = 0; out->zeros && r < ROWS; r++)
        for (int w = 0; w < wide; w++)
            zeros[w] += 0 * sum[r][w];
    for (int w = 0; out->zeros && w < wide; w++)
        *out->zeros += zeros[w];
}

/* out [ROWS columns] = last * (scale * p + more); a null scale is 1. */
static void block(const Out *out, int64_t columns, const Product *p, const float *scale, const Product *more, Ahead *ahead)
{
    int64_t j = 0;
    for (; j + WIDE * LANES <= columns; j += WIDE * LANES)
        panel(WIDE, out, j, p, scale, more, ahead);
    for (; j < columns; j += LANES)
        panel(1, out, j, p, scale, more, ahead);
}

/* to [rows columns] = across * from + p, for whole blocks of rows. The sum p over the chunk is formed first: adding tokens one by
   one would lose digits. */
INLINE void state_panel(const int wide, const float *from, float *to, int64_t stride, float across, const Product *p, int64_t j,
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

static void add_to_state(const float *from, float *to, int64_t rows, int64_t columns, float across, Product p, Ahead *ahead)
{
    for (int64_t i = 0; i < rows; i += ROWS, p.a += ROWS * p.row, from += ROWS * columns, to += ROWS * columns) {
        int64_t j = 0;
        for (; j + WIDE * LANES <= columns; j += WIDE * LANES)
            state_panel(WIDE, from, to, columns, across, &p, j, ahead);
        for (; j < columns; j += LANES)
            state_panel(1, from, to, columns, across, &p, j, ahead);
    }
}

/* out [columns stride] = x [rows columns] transposed, with zeros up to the stride. */
static void transpose(Rows x, int64_t rows, int64_t columns, float *out, int64_t stride)
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
        row[r] = SHUFFLE(a, b, low);                                                  \
        row[r + s] = SHUFFLE(a, b, high);                                             \
    }
    for (int64_t i = 0; i < stride; i += LANES)
        for (int64_t j = 0; j < columns; j += LANES) {
            lanes row[LANES];
            for (int r = 0; r < LANES; r++)
                row[r] = i + r < rows ? *(const lanes *)(x.at + (i + r) * x.stride + j) : (lanes){0};
            SWAP(1, LOW1, HIGH1)
            SWAP(2, LOW2, HIGH2)
#if LANES >= 8
            SWAP(4, LOW4, HIGH4)
#endif
#if LANES == 16
            SWAP(8, LOW8, HIGH8)
#endif
            for (int r = 0; r < LANES; r++)
                *(lanes *)(out + (j + r) * stride + i) = row[r];
        }
}
