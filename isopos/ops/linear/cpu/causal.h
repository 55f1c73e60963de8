/* Causal sums, or those over later tokens, and their gradients: chunks, then groups of them, parts and heads. */

#define UNCACHED (1 << 20) /* numbers of a result that is written past the caches */

/* What becomes of products of the rows of a chunk: minus one number per row (neg_grad), weighted, and zero for keys that a query
   does not see. With `diagonal` query i sees key i. */
typedef struct {
    const Weights *w;
    const float *inside, *neg_grad; /* or null */
    int64_t c, diagonal;
} Seen;

/* Products of ROWS rows from row i on with columns from j on. */
INLINE void score_panel(const int wide, const Product *p, const Seen *seen, int64_t i, int64_t j, float *out, Ahead *ahead)
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
    for (int r = 0; seen->neg_grad && r < ROWS; r++)
        for (int w = 0; w < wide; w++)
            sum[r][w] -= seen->neg_grad[i + r];
    for (int r = 0; row && r < ROWS; r++)
        for (int w = 0; w < wide; w++)
            sum[r][w] *= row[i + r] * *(const lanes *)(seen->w->column + j + w * LANES);
    for (int r = 0; inside && r < ROWS; r++)
        for (int w = 0; w < wide; w++)
            sum[r][w] *= *(const lanes *)(inside + (i + r) * CHUNK + j + w * LANES);
    for (int r = 0; r < ROWS; r++) {
        const int last = i + r < seen->c ? i + r + seen->diagonal : 0;
        for (int w = 0; w < wide; w++)
            *(lanes *)(out + (i + r) * CHUNK + j + w * LANES) = (lanes)((column + w * (int32_t)LANES < last) & (order)sum[r][w]);
    }
}

/* Weighted products of rows a and columns b [width CHUNK]. */
static void weigh(Rows a, const float *b, int64_t width, const Seen *seen, float *out, Ahead *ahead)
{
    for (int64_t i = 0; i < seen->c; i += ROWS) {
        const Product p = {a.at + i * a.stride, a.stride, 1, b, CHUNK, width};
        for (int64_t j = 0; j < i + ROWS; j += WIDE * LANES)
            if (i + ROWS - j > LANES)
                score_panel(WIDE, &p, seen, i, j, out, ahead);
            else
                score_panel(1, &p, seen, i, j, out, ahead);
    }
}

/* Denominators of a chunk before clamping, given the sum of keys before it. */
static void denominators(const Call *call, int64_t c, const Weights *w, const Made *q, const Made *k, const float *row,
                         const float *scores, float *denominator)
{
    const int64_t unrotated = call->size.unrotated, d = call->size.d;
    if (!unrotated) {
        for (int64_t i = 0; i < c; i++) {
            lanes sum = {0};
            for (int64_t m = 0; m < d; m += LANES)
                sum += *(const lanes *)(q->features.at + i * q->features.stride + m) * *(const lanes *)(row + m);
            sum *= w->before[i];
            for (int64_t j = 0; j <= i; j += LANES) /* zeros follow */
                sum += *(const lanes *)(scores + i * CHUNK + j);
            denominator[i] = total(sum);
        }
        return;
    }
    const Rows queries = q->unrotated, keys = k->unrotated;
    memset(denominator, 0, c * sizeof(float));
    for (int64_t m = 0; m < unrotated; m += WIDE * LANES) {
        lanes seen[WIDE];
        const int wide = unrotated - m < WIDE * LANES ? (unrotated - m) / LANES : WIDE;
        for (int v = 0; v < wide; v++)
            seen[v] = *(const lanes *)(row + m + v * LANES);
        for (int64_t i = 0; i < c; i++) {
            const float s = w->step[i], last = last_weight(w, i, call->flags.reverse);
            const float *key = keys.at + (call->flags.reverse && i ? i - 1 : i) * keys.stride + m;
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

/* Gradients of the unrotated features of a chunk [c unrotated]; `row` sums up keys before it, `later` queries after it. */
static void vjp_denominators(const Call *call, int64_t c, const Weights *w, const Made *q, const Made *k, const float *neg_grad,
                              const float *row, const float *later, float *dq, float *dk)
{
    const int64_t unrotated = call->size.unrotated;
    const Rows queries = q->unrotated, keys = k->unrotated;
    for (int64_t m = 0; m < unrotated; m += WIDE * LANES) {
        lanes sum[WIDE], end[WIDE];
        const int wide = unrotated - m < WIDE * LANES ? (unrotated - m) / LANES : WIDE;
        for (int v = 0; v < wide; v++)
            sum[v] = *(const lanes *)(row + m + v * LANES);
        for (int64_t i = 0; i < c; i++) {
            const float s = w->step[i], last = last_weight(w, i, call->flags.reverse), l = -neg_grad[i];
            const float *key = keys.at + (call->flags.reverse && i ? i - 1 : i) * keys.stride + m;
            for (int v = 0; v < wide; v++) {
                sum[v] = s * sum[v] + last * *(const lanes *)(key + v * LANES);
                *(lanes *)(dq + i * unrotated + m + v * LANES) = l * sum[v];
            }
        }
        for (int v = 0; v < wide; v++)
            sum[v] = (lanes){0}, end[v] = *(const lanes *)(later + m + v * LANES);
        for (int64_t i = c - 1; i >= 0; i--) {
            const float s = i + 1 < c ? w->step[i + 1] : 0, a = w->after[i], l = neg_grad[i];
            const int64_t reverse = call->flags.reverse; /* first: the weight that the first query gives to key i */
            const float first = !reverse ? diagonal_weight(w, i) : i + 1 < c ? next_weight(w, i + 1) : 0;
            for (int v = 0; v < wide; v++) {
                const lanes after = sum[v];
                sum[v] = s * after + l * *(const lanes *)(queries.at + i * queries.stride + m + v * LANES);
                *(lanes *)(dk + i * unrotated + m + v * LANES) = -(first * (call->flags.reverse ? after : sum[v]) + a * end[v]);
            }
        }
    }
}

/* A chunk in a pass. */
typedef struct {
    Chunk n;
    Weights w;
    Made q, k, v;
    float *grads, *neg_grad, *state, *row; /* backward: gradients of sums [c e], of denominators (negative), states before */
} Step;

#define STEP ((int64_t)(sizeof(Step) + 63) / 64 * 16) /* numbers per step, in whole lines of memory */

static void begin_step(const Call *call, Chunk n, Step *step, float **buffer)
{
    step->n = n;
    make_weights(call, n, &step->w);
    step->q = make_features(call, &call->q, n, call->size.d, buffer);
    step->k = make_features(call, &call->k, n, call->size.d, buffer);
    step->v = make_features(call, &call->v, n, call->size.e, buffer);
}

static void forward_chunk(const Call *call, const Step *step, Ahead *ahead, const float *state, const float *row, float *rest)
{
    const Chunk n = step->n;
    const int64_t c = n.c, d = call->size.d, e = call->size.e, reach = call->flags.begins && n.start == 0 ? 0 : d;
    const Rows q = step->q.features, v = step->v.features;
    float *transposed = take(&rest, d * CHUNK), *buffer = take(&rest, CHUNK * CHUNK), *scores = take(&rest, CHUNK * CHUNK);
    float *aside = take(&rest, ROWS * e);
    lanes zeros = {0};
    float denominator[CHUNK], inverse[CHUNK + ROWS], *out = rows_of(&call->out.sums, n);
    const Seen seen = {&step->w, make_inside(&step->w, c, buffer), 0, c, !call->flags.reverse};
    transpose(step->k.features, c, d, transposed, CHUNK);
    weigh(q, transposed, d, &seen, scores, ahead);
    if (call->flags.denominated) {
        float *into = rows_of(&call->out.denominator, n);
        denominators(call, c, &step->w, &step->q, &step->k, row, scores, denominator);
        for (int64_t i = 0; i < c; i++) {
            if (call->flags.reverse)
                denominator[i] += into[i * call->out.denominator.token];
            if (call->flags.divide)
                denominator[i] = clamped(call, denominator[i]);
            into[i * call->out.denominator.token] = denominator[i];
            zeros[0] += 0 * denominator[i];
            inverse[i] = 1 / denominator[i];
        }
    }
    for (int64_t i = 0; i < c; i += ROWS) {
        const int64_t to = i + ROWS < c ? i + ROWS : c;
        const int direct = to - i == ROWS && call->size.values == e && !call->flags.reverse;
        const Out there = {out + i * call->out.sums.token, call->out.sums.token, call->flags.divide ? inverse + i : 0,
                           call->out.uncached, &zeros};
        const Product of_state = {q.at + i * q.stride, q.stride, 1, state, e, reach};
        const Product inside = {scores + i * CHUNK, CHUNK, 1, v.at, v.stride, to};
        block(direct ? &there : &(Out){aside, e}, e, &of_state, step->w.fades ? step->w.before + i : 0, &inside, ahead);
        for (int64_t r = i; !direct && r < to; r++) {
            float *sum = aside + (r - i) * e, *to_row = out + r * call->out.sums.token, room[MOST] ALIGNED;
            const float *more = call->flags.reverse ? load(to_row, FLOAT32, call->size.values, e, room) : 0;
            for (int64_t m = 0; m < e; m += LANES) {
                lanes x = *(const lanes *)(sum + m);
                if (more)
                    x += *(const lanes *)(more + m);
                if (call->flags.divide)
                    x *= inverse[r];
                *(lanes *)(sum + m) = x;
                zeros += 0 * x;
            }
            store(sum, FLOAT32, call->size.values, to_row);
        }
    }
    if (total(zeros) != 0)
        report(call, NOT_FINITE);
}

/* Gradients of the sums of a chunk [c e], with zeros up to a whole block, and minus the gradients of its denominators. */
static void make_grads(const Call *call, Step *step, float **buffer)
{
    const int64_t c = step->n.c, e = call->size.e;
    const float *grad = rows_of(&call->out.grad, step->n);
    float buffers[2][MOST] ALIGNED;
    step->grads = take(buffer, CHUNK * e), step->neg_grad = take(buffer, CHUNK); /* of rows up to a whole block, too */
    for (int64_t i = 0; i < c; i++) {
        const float *row = grad + i * call->out.grad.token, *from = load(row, FLOAT32, call->size.values, e, buffers[0]);
        float *to = step->grads + i * e;
        if (!call->flags.divide) {
            memcpy(to, from, e * sizeof(float));
            if (call->flags.denominated)
                step->neg_grad[i] = -row[call->size.values];
            continue;
        }
        const float *sums = rows_of(&call->out.sums, step->n) + i * call->out.sums.token;
        const float *out = load(sums, FLOAT32, call->size.values, e, buffers[1]);
        const float denominator = rows_of(&call->out.denominator, step->n)[i * call->out.denominator.token];
        const float inverse = 1 / denominator;
        lanes sum = {0};
        for (int64_t m = 0; m < e; m += LANES) {
            const lanes g = *(const lanes *)(from + m) * inverse;
            sum += g * *(const lanes *)(out + m);
            *(lanes *)(to + m) = g;
        }
        step->neg_grad[i] = __builtin_fabsf(denominator) <= call->floor ? 0 : total(sum);
    }
    memset(step->grads + c * e, 0, (blocks(c) - c) * e * sizeof(float));
}

/* Gradients of the inputs of a chunk, given the gradients of the states after it; step->state is transposed. */
static void backward_chunk(const Call *call, const Step *step, Ahead *ahead, const float *grad_state, const float *grad_row,
                           float *rest)
{
    const Chunk n = step->n;
    const Weights *w = &step->w;
    const int64_t c = n.c, d = call->size.d, e = call->size.e, unrotated = call->size.unrotated;
    const int64_t earlier = call->flags.begins && n.start == 0 ? 0 : e;
    const int64_t later = call->flags.ends && n.start + c == call->size.length ? 0 : 1;
    const float *neg_grad = call->flags.denominated ? step->neg_grad : 0;
    const Rows q = step->q.features, k = step->k.features, v = step->v.features, grad = {step->grads, e};
    float *transposed = take(&rest, (d > CHUNK ? d : CHUNK) * (d > e ? d : e));
    float *scores = take(&rest, CHUNK * CHUNK), *grad_scores = take(&rest, CHUNK * CHUNK), *buffer = take(&rest, CHUNK * CHUNK);
    float *dq = take(&rest, CHUNK * d), *dk = take(&rest, CHUNK * d), *dv = take(&rest, CHUNK * e);
    float *dq_unrotated = take(&rest, CHUNK * unrotated), *dk_unrotated = take(&rest, CHUNK * unrotated);
    const Seen seen = {w, make_inside(w, c, buffer), 0, c, !call->flags.reverse};
    const Seen seen_grads = {w, seen.inside, unrotated ? 0 : neg_grad, c, seen.diagonal};
    const float *before = w->fades ? w->before : 0, *after = w->fades ? w->after : 0;
    transpose(k, c, d, transposed, CHUNK);
    weigh(q, transposed, d, &seen, scores, ahead);
    transpose(v, c, e, transposed, CHUNK);
    weigh(grad, transposed, e, &seen_grads, grad_scores, ahead);
    if (later)
        transpose((Rows){grad_state, e}, d, e, transposed, d);
    for (int64_t i = 0; i < c; i += ROWS) { /* one product after another, so that its operands stay in the nearest cache */
        const int64_t to = i + ROWS < c ? i + ROWS : c;
        const Product of_state = {grad.at + i * e, e, 1, step->state, d, earlier};
        const Product inside = {grad_scores + i * CHUNK, CHUNK, 1, k.at, k.stride, to};
        block(&(Out){dq + i * d, d}, d, &of_state, before ? before + i : 0, &inside, ahead);
    }
    for (int64_t i = 0; i < c; i += ROWS) {
        const Product of_state = {v.at + i * v.stride, v.stride, 1, transposed, d, later * e};
        const Product inside = {grad_scores + i * CHUNK + i, 1, CHUNK, q.at + i * q.stride, q.stride, c - i};
        block(&(Out){dk + i * d, d}, d, &of_state, after ? after + i : 0, &inside, ahead);
    }
    for (int64_t i = 0; i < c; i += ROWS) {
        const Product of_state = {k.at + i * k.stride, k.stride, 1, grad_state, e, later * d};
        const Product inside = {scores + i * CHUNK + i, 1, CHUNK, grad.at + i * e, e, c - i};
        block(&(Out){dv + i * e, e}, e, &of_state, after ? after + i : 0, &inside, ahead);
    }
    if (neg_grad && unrotated)
        vjp_denominators(call, c, w, &step->q, &step->k, neg_grad, step->row, grad_row, dq_unrotated, dk_unrotated);
    else if (neg_grad)
        for (int64_t i = 0; i < c; i++)
            for (int64_t m = 0; m < d; m += LANES) {
                *(lanes *)(dq + i * d + m) -= w->before[i] * neg_grad[i] * *(const lanes *)(step->row + m);
                *(lanes *)(dk + i * d + m) -= w->after[i] * *(const lanes *)(grad_row + m);
            }
    if (call->q.grad_decay) /* weights <q, k> exp(g_q - g_k): as if q and k were scaled */
        for (int64_t i = 0; i < c; i++) {
            double of_q = dot(dq + i * d, q.at + i * q.stride, d), of_k = dot(dk + i * d, k.at + i * k.stride, d);
            if (neg_grad && unrotated) {
                const Rows queries = step->q.unrotated, keys = step->k.unrotated;
                of_q += dot(dq_unrotated + i * unrotated, queries.at + i * queries.stride, unrotated);
                of_k += dot(dk_unrotated + i * unrotated, keys.at + i * keys.stride, unrotated);
            }
            const int64_t at = n.head * call->size.length + n.start + i;
            call->q.grad_decay[at] = of_q, call->k.grad_decay[at] = -of_k;
        }
    vjp(call, &call->q, n, d, step->q.plain, dq, neg_grad && unrotated ? dq_unrotated : 0);
    vjp(call, &call->k, n, d, step->k.plain, dk, neg_grad && unrotated ? dk_unrotated : 0);
    vjp(call, &call->v, n, e, step->v.plain, dv, 0);
}

/* --- heads and their parts --- */

EXPORT int64_t isopos_call_size(void)
{
    return sizeof(Call);
}

/* The most numbers that a thread takes from its buffer. */
EXPORT int64_t isopos_scratch_size(int64_t d, int64_t e, int64_t unrotated)
{
    const int64_t row = unrotated > d ? unrotated : d, most = d > e ? d : e;
    const int64_t step = CHUNK * (2 * d + 2 * e + 2 * unrotated + 1) + d * e + row;
    const int64_t chunk = CHUNK * (3 * CHUNK + 2 * d + e + 2 * unrotated);
    return GROUP * (step + STEP) + d * e + row + CHUNK * most + (d > CHUNK ? d : CHUNK) * most + chunk;
}

static void forward_part(const Call *call, int64_t head, int64_t part, float *rest)
{
    const int64_t d = call->size.d, e = call->size.e, size = state_size(call), rows = row_size(call), group = GROUP * CHUNK;
    const int64_t groups = isopos_groups(call->size.length);
    float *state = take(&rest, size), *row = take(&rest, d > call->size.unrotated ? d : call->size.unrotated);
    float *scaled = take(&rest, CHUNK * (d > e ? d : e));
    const int64_t from = begin_of(call, part, 0), to = begin_of(call, part + 1, 0);
    start_part(call, head, part, call->state.sums, call->state.row, state, row);
    const int kept = to == call->size.length && !call->flags.ends; /* whether the state after the last chunk is needed */
    for (int64_t start = from; start < to; start += CHUNK) {
        float *buffer = rest;
        Step step;
        if (call->saved.sums && start % group == 0) {
            const int64_t at = head * groups + start / group;
            memcpy(call->saved.sums + at * size, state, size * sizeof(float));
            memcpy(call->saved.row + at * rows, row, rows * sizeof(float));
        }
        begin_step(call, chunk_of(call, head, start, to), &step, &buffer);
        Ahead ahead = ahead_of(call, chunk_of(call, head, start + CHUNK, to), 0, call->flags.reverse ? 5 : 3);
        forward_chunk(call, &step, &ahead, state, row, buffer);
        if (start + CHUNK >= to && !kept)
            continue;
        outer(step.k.features, step.v.features, &step.w, step.w.after, step.n.c, d, e, scaled, state, state, &ahead);
        if (rows)
            add_rows(step.k.unrotated, step.w.after, 0, step.n.c, rows, step.w.across, row);
    }
    if (kept) {
        memcpy(call->state.sums + head * size, state, size * sizeof(float));
        memcpy(call->state.row + head * rows, row, rows * sizeof(float));
    }
}

/* Gradients of a group of chunks; replaces the gradients of the states after it by the gradients of the states before it. */
static void backward_group(const Call *call, int64_t head, int64_t start, int64_t to, float *grad_state, float *grad_row,
                           float *scaled, float *rest)
{
    const int64_t d = call->size.d, e = call->size.e, size = state_size(call), rows = row_size(call);
    const int64_t at = head * isopos_groups(call->size.length) + start / (GROUP * CHUNK);
    Step *steps = (Step *)take(&rest, GROUP * STEP), *step = steps; /* too large for a small stack */
    Ahead none = {0};
    for (int64_t n = start; n < to; n += CHUNK, step++) {
        begin_step(call, chunk_of(call, head, n, to), step, &rest);
        make_grads(call, step, &rest);
        step->state = take(&rest, size), step->row = take(&rest, d > call->size.unrotated ? d : call->size.unrotated);
        if (n == start) {
            transpose((Rows){call->saved.sums + at * size, e}, d, e, step->state, d);
            memcpy(step->row, call->saved.row + at * rows, rows * sizeof(float));
            continue;
        }
        const Step *last = step - 1;
        outer(last->v.features, last->k.features, &last->w, last->w.after, last->n.c, e, d, scaled, last->state, step->state,
              &none);
        memcpy(step->row, last->row, rows * sizeof(float));
        if (rows)
            add_rows(last->k.unrotated, last->w.after, 0, last->n.c, rows, last->w.across, step->row);
    }
    while (step-- > steps) {
        const int64_t earlier = step->n.start - GROUP * CHUNK;
        Ahead ahead = earlier < 0 ? none : ahead_of(call, chunk_of(call, head, earlier, to), 0, call->q.add ? 8 : 5);
        backward_chunk(call, step, &ahead, grad_state, grad_row, rest);
        outer(step->q.features, (Rows){step->grads, e}, &step->w, step->w.before, step->n.c, d, e, scaled, grad_state, grad_state,
              &ahead);
        if (rows)
            add_rows(step->q.unrotated, step->w.before, step->neg_grad, step->n.c, rows, step->w.across, grad_row);
    }
}

static void backward_part(const Call *call, int64_t head, int64_t part, float *rest)
{
    const int64_t d = call->size.d, e = call->size.e, size = state_size(call), rows = row_size(call), group = GROUP * CHUNK;
    float *grad_state = take(&rest, size), *grad_row = take(&rest, d > call->size.unrotated ? d : call->size.unrotated);
    float *scaled = take(&rest, CHUNK * (d > e ? d : e));
    const int64_t from = begin_of(call, part, 1), to = begin_of(call, part + 1, 1);
    start_part(call, head, part, call->grad_state.sums, call->grad_state.row, grad_state, grad_row);
    for (int64_t start = (to - 1) / group * group; start >= from; start -= group)
        backward_group(call, head, start, start + group < to ? start + group : to, grad_state, grad_row, scaled, rest);
    if (from == 0 && !call->flags.begins) {
        memcpy(call->grad_state.sums + head * size, grad_state, size * sizeof(float));
        memcpy(call->grad_state.row + head * rows, grad_row, rows * sizeof(float));
    }
}

/* Adds a part to its total and multiplies the weight across it; with `back`, for gradients of the states after the part. */
static void sum_part(const Call *call, int64_t head, int64_t part, float *state, int back, float *rest)
{
    const int64_t d = call->size.d, e = call->size.e, rows = row_size(call);
    float *scaled = take(&rest, CHUNK * (d > e ? d : e));
    float *row = state + state_size(call), *across = row + rows;
    const int64_t from = begin_of(call, part, back), to = begin_of(call, part + 1, back);
    for (int64_t m = 0, start; m < to - from; m += CHUNK) {
        float *buffer = rest;
        Step step;
        start = back ? from + (to - from - 1) / CHUNK * CHUNK - m : from + m;
        step.n = chunk_of(call, head, start, to);
        make_weights(call, step.n, &step.w);
        const Made keys = make_features(call, back ? &call->q : &call->k, step.n, d, &buffer);
        const float *weight = back ? step.w.before : step.w.after, *neg_grad = 0;
        Rows values;
        if (back) {
            make_grads(call, &step, &buffer);
            values = (Rows){step.grads, e}, neg_grad = step.neg_grad;
        } else
            values = make_features(call, &call->v, step.n, e, &buffer).features;
        const Chunk next = chunk_of(call, head, back ? start - CHUNK : start + CHUNK, back ? start : to);
        Ahead ahead = ahead_of(call, next, back ? 2 : 0, back ? 5 : 2);
        ahead.twice = 1; /* with one product alone */
        outer(keys.features, values, &step.w, weight, step.n.c, d, e, scaled, state, state, &ahead);
        if (rows)
            add_rows(keys.unrotated, weight, neg_grad, step.n.c, rows, step.w.across, row);
        *across *= step.w.across;
    }
}

/* Initial totals of parts: zero, or of two parts the state of the head, so that totals are the states that parts start with. */
static void begin_totals(const Call *call, int64_t head, int back)
{
    const int64_t size = state_size(call), rows = row_size(call);
    for (int64_t part = 0; part < call->split.parts; part++) {
        float *total = total_of(call, head, part);
        memset(total, 0, (size + rows) * sizeof(float));
        total[size + rows] = 1;
        if (call->split.parts == 2) {
            memcpy(total, (back ? call->grad_state.sums : call->state.sums) + head * size, size * sizeof(float));
            memcpy(total + size, (back ? call->grad_state.row : call->state.row) + head * rows, rows * sizeof(float));
        }
    }
}

/* Replaces the total of each part by the state that the part starts with. */
static void join_parts(const Call *call, int64_t head, int back)
{
    const int64_t size = state_size(call), rows = row_size(call);
    const State *of_heads = back ? &call->grad_state : &call->state;
    float *state = of_heads->sums + head * size, *row = of_heads->row + head * rows;
    for (int64_t m = 0; m < call->split.parts; m++) {
        float *sums = total_of(call, head, back ? call->split.parts - 1 - m : m), across = sums[size + rows];
        for (int64_t i = 0; i < size + rows; i++) {
            float *through = i < size ? state + i : row + i - size;
            const float added = sums[i];
            sums[i] = *through;
            if (m + 1 < call->split.parts)
                *through = across * sums[i] + added;
        }
    }
}

/* Whether rows [width] of all tokens are written past the caches: many of them, in whole lines of memory that was in use before
   (memory that the system has just cleared is in a cache). */
static int streams(const Call *call, const View *view, int64_t length, int64_t width)
{
#ifdef RESIDENT
    const int64_t strides = view->sample | view->head | view->token | width;
    const uintptr_t first = (uintptr_t)view->first, inside = (first + length / 2 * view->token * 4) & ~(uintptr_t)4095;
    unsigned char used;
    return call->size.all * length * width >= UNCACHED && strides % 16 == 0 && first % 64 == 0 &&
           !mincore((void *)inside, 1, &used) && used & 1;
#else
    (void)call, (void)view, (void)length, (void)width;
    return 0;
#endif
}

/* Reverses the order of tokens. */
static void reverse_view(View *view, int64_t length, int64_t size)
{
    view->first = view->first ? (char *)view->first + (length - 1) * view->token * size : 0;
    view->token = -view->token;
}

static void reverse_tokens(Call *call)
{
    const int64_t length = call->size.length;
    for (Input *o = &call->q; o <= &call->v; o++) {
        const int64_t size = o->type == FLOAT32 ? 4 : 2;
        reverse_view(&o->x, length, size), reverse_view(&o->grad, length, size);
        reverse_view(&o->unrotated, length, 4), reverse_view(&o->grad_unrotated, length, 4);
        reverse_view(&o->table, length, o->kind == GATHER ? 1 : 4), reverse_view(&o->grad_table, length, 4);
        reverse_view(&o->mask, length, 1);
    }
    reverse_view(&call->decay.query, length, 8), reverse_view(&call->decay.key, length, 8);
    reverse_view(&call->out.sums, length, 4), reverse_view(&call->out.grad, length, 4);
    reverse_view(&call->out.denominator, length, 4);
}

/* Pieces of a call are heads or parts of heads. */
static void sum_piece(const void *of, int64_t n, int64_t worker)
{
    const Call *call = of;
    const int64_t back = call->flags.back, parts = call->split.parts, head = n / parts, part = n % parts;
    if (part != (back ? 0 : parts - 1))
        sum_part(call, head, part, total_of(call, head, part), back, scratch_of(call, worker));
}

static void join_piece(const void *call, int64_t n, int64_t worker)
{
    (void)worker;
    join_parts(call, n, ((const Call *)call)->flags.back);
}

static void causal_piece(const void *of, int64_t n, int64_t worker)
{
    const Call *call = of;
    const int64_t back = call->flags.back, parts = call->split.parts, head = n / parts, part = n % parts;
    float *scratch = scratch_of(call, worker);
    if (parts == 2 && part == !back) /* instead of waiting for the other part */
        sum_part(call, head, !part, total_of(call, head, part), back, scratch);
    if (back)
        backward_part(call, head, part, scratch);
    else
        forward_part(call, head, part, scratch);
    fence(); /* writes past the caches are visible before others read them */
}

static void run(Call *call, int back)
{
    call->flags.back = back;
    if (call->flags.reverse)
        reverse_tokens(call);
    const Sizes *size = &call->size;
    const int64_t parts = call->split.parts, all = size->all * parts;
    call->out.uncached = !back && !call->flags.reverse && size->values == size->e &&
                         streams(call, &call->out.sums, size->length, size->e);
    for (Input *o = &call->q; back && o <= &call->v; o++)
        o->uncached = !o->add && whole(o) && streams(call, &o->grad, size->length, o->width);
    for (int64_t head = 0; parts > 1 && head < size->all; head++)
        begin_totals(call, head, back);
    if (parts > 2) {
        share_work(call, sum_piece, all, call->split.threads);
        share_work(call, join_piece, size->all, call->split.threads);
    }
    share_work(call, causal_piece, all, call->split.threads);
}

EXPORT void isopos_forward(Call *call)
{
    run(call, 0);
}

EXPORT void isopos_backward(Call *call)
{
    run(call, 1);
}
