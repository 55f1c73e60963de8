/* Weights from log decays: of the tokens of a chunk, and of the states before and after it. */

#define STEEP 64 /* largest fall of a log decay inside a chunk whose weights are products of rows and columns */

/* exp(g_i - g_j) from the token before the chunk to token i (before), from token j to the last one (after), from token to token
   (step), and across the chunk. No exponent exceeds zero: r^i and r^-j, which overflow, are not formed. If a log decay falls by at
   most STEEP inside a chunk, weights there are row_i * column_j, relative to the first key. */
typedef struct {
    float before[CHUNK], after[CHUNK], step[CHUNK], row[CHUNK], column[CHUNK], across;
    double query[CHUNK], key[CHUNK];
    int fades, steep; /* whether any weight differs from 1; whether row and column are unusable */
} Weights;

static void make_weights(const Call *call, Chunk n, Weights *w)
{
    const int64_t c = n.c;
    double step[CHUNK], start = 0, end = 0;
    w->fades = 0;
    if (call->decay.query.first) {
        const double *query = (const double *)call->decay.query.first + index_of(&call->decay.query, n);
        const double *key = (const double *)call->decay.key.first + index_of(&call->decay.key, n);
        const int first = call->flags.begins && n.start == 0; /* the state before is zero */
        const double sign = call->flags.reverse ? -1 : 1; /* weights fall with distance in either direction */
        start = sign * key[first ? 0 : -call->decay.key.token], end = sign * key[(c - 1) * call->decay.key.token];
        if (first && start < sign * *query) /* no key precedes the first query */
            start = sign * *query;
        for (int64_t i = 0; i < c; i++) {
            w->query[i] = sign * query[i * call->decay.query.token];
            w->key[i] = sign * key[i * call->decay.key.token];
            w->fades |= w->query[i] != start || w->key[i] != start;
            step[i] = w->query[i] - (i ? w->query[i - 1] : start);
        }
    }
    if (!w->fades) {
        for (int64_t i = 0; i < CHUNK; i++)
            w->before[i] = w->after[i] = w->step[i] = 1;
        w->across = 1;
        return;
    }
    for (int64_t i = c; i % LANES; i++)
        w->query[i] = w->key[i] = end, step[i] = 0;
    w->steep = !(w->query[c - 1] - w->key[0] >= -STEEP && end - w->key[0] >= -STEEP);
    w->across = exponentials((doubles){end - start})[0];
    for (int64_t i = 0; i < c; i += LANES) {
        const doubles query = *(const doubles *)(w->query + i), key = *(const doubles *)(w->key + i);
        *(lanes *)(w->before + i) = exponentials(query - start);
        *(lanes *)(w->after + i) = exponentials(end - key);
        *(lanes *)(w->step + i) = exponentials(*(const doubles *)(step + i));
        *(lanes *)(w->row + i) = exponentials(query - w->key[0]);
        *(lanes *)(w->column + i) = exponentials(w->key[0] - key);
    }
}

/* The weight that query i gives to key i. */
INLINE float diagonal_weight(const Weights *w, int64_t i)
{
    return w->fades && w->query[i] != w->key[i] ? exponentials((doubles){w->query[i] - w->key[i]})[0] : 1;
}

/* The weight that query i gives to key i - 1. */
INLINE float next_weight(const Weights *w, int64_t i)
{
    return w->fades && w->query[i - 1] != w->key[i - 1] ? exponentials((doubles){w->query[i] - w->key[i - 1]})[0] : w->step[i];
}

/* The weight of the last key that query i of a chunk sees: key i, or with `reverse` key i - 1; 0 outside the chunk. */
INLINE float last_weight(const Weights *w, int64_t i, int64_t reverse)
{
    return !reverse ? diagonal_weight(w, i) : i ? next_weight(w, i) : 0;
}

/* Weights inside a chunk [c CHUNK], for keys that a query sees; null if they are products of rows and columns, or 1. */
static const float *make_inside(const Weights *w, int64_t c, float *out)
{
    if (!w->fades || !w->steep)
        return 0;
    for (int64_t i = 0; i < c; i++)
        for (int64_t j = 0; j <= i; j += LANES)
            *(lanes *)(out + i * CHUNK + j) = exponentials(w->query[i] - *(const doubles *)(w->key + j));
    return out;
}
