/* Sums over all keys, and their gradients. */

/* First and last token of a part of a head: whole chunks, except at the end. */
static void share_of(const Call *call, int64_t length, int64_t part, int64_t *from, int64_t *to)
{
    const int64_t chunks = (length + CHUNK - 1) / CHUNK;
    *from = part * chunks / call->split.parts * CHUNK;
    *to = (part + 1) * chunks / call->split.parts * CHUNK;
    if (*to > length)
        *to = length;
}

static const float ONES[CHUNK] = {[0 ... CHUNK - 1] = 1};

/* Adds a [c x]^T times b [c y] to a state. */
static void add_outer(Rows a, Rows b, int64_t c, int64_t x, int64_t y, float *state, Ahead *ahead)
{
    add_to_state(state, state, x, y, 1, (Product){a.at, 1, a.stride, b.at, b.stride, c}, ahead);
}

/* The next chunk of a part, prefetched at twice the rate, since there are fewer products than in causal sums. */
static Ahead after_chunk(const Call *call, Chunk n, int64_t to, int tensor, int tensors)
{
    Ahead ahead = ahead_of(call, chunk_of(call, n.head, n.start + CHUNK, to), tensor, tensors);
    ahead.twice = 1;
    return ahead;
}

/* Adds k v^T of the tokens of a part to a state, and k to the row of a denominator. */
static void sum_keys(const Call *call, int64_t head, int64_t part, float *state, float *row, float *rest)
{
    const int64_t d = call->size.d, e = call->size.e, rows = row_size(call);
    int64_t from, to;
    share_of(call, call->size.keys, part, &from, &to);
    for (int64_t start = from; start < to; start += CHUNK) {
        float *buffer = rest;
        const Chunk n = chunk_of(call, head, start, to);
        const Made k = make_features(call, &call->k, n, d, &buffer), v = make_features(call, &call->v, n, e, &buffer);
        Ahead ahead = after_chunk(call, n, to, 0, 2);
        add_outer(k.features, v.features, n.c, d, e, state, &ahead);
        if (rows)
            add_rows(k.unrotated, ONES, 0, n.c, rows, 1, row);
    }
}

/* Sums for the queries of a part, from the state of all keys. */
static void read_out(const Call *call, int64_t head, int64_t part, const float *state, const float *row, float *rest)
{
    const int64_t d = call->size.d, e = call->size.e, rows = row_size(call);
    float *aside = take(&rest, ROWS * e), inverse[CHUNK + ROWS] = {0};
    lanes zeros = {0};
    int64_t from, to;
    share_of(call, call->size.length, part, &from, &to);
    for (int64_t start = from; start < to; start += CHUNK) {
        float *buffer = rest;
        const Chunk n = chunk_of(call, head, start, to);
        const Made q = make_features(call, &call->q, n, d, &buffer);
        for (int64_t i = 0; rows && i < n.c; i++) {
            float denominator = dot(q.unrotated.at + i * q.unrotated.stride, row, rows);
            if (call->flags.divide)
                denominator = clamped(call, denominator);
            rows_of(&call->out.denominator, n)[i * call->out.denominator.token] = denominator;
            zeros[0] += 0 * denominator;
            inverse[i] = 1 / denominator;
        }
        Ahead ahead = after_chunk(call, n, to, 2, 3);
        for (int64_t i = 0; i < n.c; i += ROWS) {
            const int64_t many = i + ROWS < n.c ? ROWS : n.c - i;
            const int direct = many == ROWS && call->size.values == e; /* written without a copy */
            const Product p = {q.features.at + i * q.features.stride, q.features.stride, 1, state, e, d}, none = {p.a, 0, 0, p.b};
            float *out = rows_of(&call->out.sums, n) + i * call->out.sums.token;
            Out there = {out, call->out.sums.token, call->flags.divide ? inverse + i : 0, call->out.uncached, &zeros};
            if (!direct)
                there.at = aside, there.stride = e, there.uncached = 0;
            block(&there, e, &p, 0, &none, &ahead);
            for (int64_t r = 0; !direct && r < many; r++)
                store(aside + r * e, FLOAT32, call->size.values, out + r * call->out.sums.token);
        }
    }
    if (total(zeros) != 0)
        report(call, NOT_FINITE);
}

/* out [c y] = a [c x] times a state [x y] + weight [c] times row [y]. A null weight is 1; a null row adds nothing. */
static void read_state(Rows a, const float *state, int64_t c, int64_t x, int64_t y, const float *weight, const float *row,
                       float *out, Ahead *ahead)
{
    for (int64_t i = 0; i < c; i += ROWS) {
        const Product p = {a.at + i * a.stride, a.stride, 1, state, y, x};
        const Product more = {weight ? weight + i : ONES, 1, 0, row ? row : state, y, row ? 1 : 0};
        block(&(Out){out + i * y, y}, y, &p, 0, &more, ahead);
    }
}

/* The transpose of a state [x y], in the buffer. */
static const float *transposed_state(const float *state, int64_t x, int64_t y, float **buffer)
{
    float *out = take(buffer, x * y);
    transpose((Rows){state, y}, x, y, out, x);
    return out;
}

/* The negative of a row [rows], in the buffer; null if it is empty. */
static const float *negative(const float *row, int64_t rows, float **buffer)
{
    float *out = take(buffer, rows);
    for (int64_t m = 0; m < rows; m += LANES)
        *(lanes *)(out + m) = -*(const lanes *)(row + m);
    return rows ? out : 0;
}

/* Gradients of the queries of a part, given the state of all keys; adds their share of the gradient of this state. */
static void vjp_queries(const Call *call, int64_t head, int64_t part, float *grad_state, float *grad_row, float *rest)
{
    const int64_t d = call->size.d, e = call->size.e, rows = row_size(call);
    const int64_t unrotated = call->flags.denominated ? call->size.unrotated : 0;
    float *dq = take(&rest, CHUNK * d), *dq_unrotated = take(&rest, CHUNK * unrotated);
    const float *state = transposed_state(call->saved.sums + head * d * e, d, e, &rest);
    const float *row = negative(call->saved.row + head * rows, rows, &rest);
    int64_t from, to;
    share_of(call, call->size.length, part, &from, &to);
    for (int64_t start = from; start < to; start += CHUNK) {
        float *buffer = rest;
        Step step = {.n = chunk_of(call, head, start, to)};
        const int64_t c = step.n.c;
        const Made q = make_features(call, &call->q, step.n, d, &buffer);
        make_grads(call, &step, &buffer);
        Ahead ahead = after_chunk(call, step.n, to, 2, call->flags.divide ? 5 : 4);
        add_outer(q.features, (Rows){step.grads, e}, c, d, e, grad_state, &ahead);
        read_state((Rows){step.grads, e}, state, c, e, d, step.neg_grad, unrotated ? 0 : row, dq, &ahead);
        if (unrotated)
            read_state((Rows){step.grads, e}, state, c, 0, unrotated, step.neg_grad, row, dq_unrotated, &ahead);
        if (rows)
            add_rows(q.unrotated, step.neg_grad, 0, c, rows, 1, grad_row);
        vjp(call, &call->q, step.n, d, q.plain, dq, unrotated ? dq_unrotated : 0);
    }
}

/* Gradients of the keys and values of a part, given the gradient of the state of all keys. */
static void vjp_keys(const Call *call, int64_t head, int64_t part, float *rest)
{
    const int64_t d = call->size.d, e = call->size.e, rows = row_size(call);
    const int64_t unrotated = call->flags.denominated ? call->size.unrotated : 0;
    float *dk = take(&rest, CHUNK * d), *dv = take(&rest, CHUNK * e), *dk_unrotated = take(&rest, CHUNK * unrotated);
    const float *grad_state = call->grad_state.sums + head * d * e, *state = transposed_state(grad_state, d, e, &rest);
    const float *row = negative(call->grad_state.row + head * rows, rows, &rest);
    int64_t from, to;
    share_of(call, call->size.keys, part, &from, &to);
    for (int64_t start = from; start < to; start += CHUNK) {
        float *buffer = rest;
        const Chunk n = chunk_of(call, head, start, to);
        const Made k = make_features(call, &call->k, n, d, &buffer), v = make_features(call, &call->v, n, e, &buffer);
        Ahead ahead = after_chunk(call, n, to, 0, 2);
        read_state(v.features, state, n.c, e, d, 0, unrotated ? 0 : row, dk, &ahead);
        if (unrotated)
            read_state(v.features, state, n.c, 0, unrotated, 0, row, dk_unrotated, &ahead);
        read_state(k.features, grad_state, n.c, d, e, 0, 0, dv, &ahead);
        vjp(call, &call->k, n, d, k.plain, dk, unrotated ? dk_unrotated : 0);
        vjp(call, &call->v, n, e, v.plain, dv, 0);
    }
}

/* Number of finished parts of a head. It is stored where the total of a causal part has the weight across the part. */
INLINE int *counter_of(const Call *call, int64_t head)
{
    return (int *)(total_of(call, head, 0) + state_size(call) + row_size(call));
}

/* Sums the tokens of a part into the state of a head, or with `back` into its gradient. The last part to finish adds up all. */
static void sum_up(const Call *call, int64_t head, int64_t part, int back, float *rest)
{
    const int64_t size = state_size(call), rows = row_size(call);
    const State *of_heads = back ? &call->grad_state : &call->state;
    float *state = of_heads->sums + head * size, *row = of_heads->row + head * rows;
    float *sums = state, *sum_row = row;
    if (call->split.parts > 1) {
        sums = total_of(call, head, part), sum_row = sums + size;
        memset(sums, 0, (size + rows) * sizeof(float));
    }
    if (back)
        vjp_queries(call, head, part, sums, sum_row, rest);
    else
        sum_keys(call, head, part, sums, sum_row, rest);
    if (call->split.parts == 1 || __atomic_add_fetch(counter_of(call, head), 1, __ATOMIC_ACQ_REL) < call->split.parts)
        return;
    for (int64_t m = 0; m < call->split.parts; m++) {
        sums = total_of(call, head, m), sum_row = sums + size;
        for (int64_t i = 0; i < size; i++)
            state[i] += sums[i];
        for (int64_t i = 0; i < rows; i++)
            row[i] += sum_row[i];
    }
}

/* The results of a state for the tokens of a part: sums, or with `back` gradients. */
static void spread(const Call *call, int64_t head, int64_t part, int back, float *rest)
{
    if (back)
        vjp_keys(call, head, part, rest);
    else
        read_out(call, head, part, call->state.sums + head * state_size(call), call->state.row + head * row_size(call), rest);
    fence(); /* writes past the caches are visible before others read them */
}

static void sum_up_piece(const void *of, int64_t n, int64_t worker)
{
    const Call *call = of;
    const int64_t parts = call->split.parts;
    sum_up(call, n / parts, n % parts, call->flags.back, scratch_of(call, worker));
    if (parts == 1)
        spread(call, n, 0, call->flags.back, scratch_of(call, worker));
}

static void spread_piece(const void *of, int64_t n, int64_t worker)
{
    const Call *call = of;
    spread(call, n / call->split.parts, n % call->split.parts, call->flags.back, scratch_of(call, worker));
}

/* Sums up the tokens of all parts, then computes the results; the backward pass reads the saved states. */
static void run_all(Call *call, int back)
{
    call->flags.back = back;
    const int64_t parts = call->split.parts, all = call->size.all * parts;
    const Sizes *size = &call->size;
    call->out.uncached = !back && size->values == size->e && streams(call, &call->out.sums, size->length, size->e);
    for (Input *o = &call->q; back && o <= &call->v; o++)
        o->uncached = !o->add && whole(o) && streams(call, &o->grad, o == &call->q ? size->length : size->keys, o->width);
    for (int64_t head = 0; parts > 1 && head < call->size.all; head++)
        *counter_of(call, head) = 0;
    share_work(call, sum_up_piece, all, call->split.threads);
    if (parts > 1)
        share_work(call, spread_piece, all, call->split.threads);
}

EXPORT void isopos_forward_all(Call *call)
{
    run_all(call, 0);
}

EXPORT void isopos_backward_all(Call *call)
{
    run_all(call, 1);
}
