/* Features of tokens and their gradients: phi, a reflection, then the table of an isometry. */

INLINE lanes feature(int64_t phi, lanes x)
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

/* The derivative phi'(x), from x and its feature y = phi(x). */
INLINE lanes derivative(int64_t phi, lanes x, lanes y)
{
    const lanes zero = {0}, one = zero + 1.0f;
    if (phi == ELU1)
        return at_most(y, 1);
    if (phi == RELU)
        return choose((order)(x > zero), one, zero);
    if (phi == RELU2)
        return choose((order)(x > zero), x + x, zero);
    return phi == EXP ? y : one;
}

/* A call with the feature map as a constant, so that its loops have no branches. */
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

static void map(int64_t phi, const float *x, float *y, int64_t width)
{
#define MAP(phi)                              \
    for (int64_t m = 0; m < width; m += LANES)   \
    *(lanes *)(y + m) = feature(phi, *(const lanes *)(x + m))
    BY_MAP(phi, MAP)
}

/* phi(x) and phi'(x) of whole vectors of numbers, for tests against feature_maps.py. */
EXPORT void isopos_features(int64_t phi, const float *x, float *y, float *derivatives, int64_t count)
{
    map(phi, x, y, count);
    for (int64_t m = 0; m < count; m += LANES)
        *(lanes *)(derivatives + m) = derivative(phi, *(const lanes *)(x + m), *(const lanes *)(y + m));
}

#define OTHER(l) HALF1(l)
#define EVEN(l) ((l) & ~1)
#define ODD(l) ((l) | 1)
#define SIGN(l) ((l) & 1 ? 1 : -1)

/* a * b - c in even lanes, a * b + c in odd lanes; with sign -1 the reverse. */
INLINE lanes alternate(lanes a, lanes b, lanes c, float sign)
{
#ifdef __FMA__
    const native x = (native)a, y = (native)b, z = (native)c;
    return (lanes)(sign > 0 ? X86(fmaddsub_ps)(x, y, z) : X86(fmsubadd_ps)(x, y, z));
#else
    const lanes signs = {LIST(SIGN)};
    return a * b + sign * signs * c;
#endif
}

/* Pairs times cos + i sin, or with sign -1 times cos - i sin; x may be y. */
INLINE void rotate(const float *x, const float *table, float sign, float *y, int64_t width)
{
    for (int64_t m = 0; m < width; m += LANES) {
        const lanes a = *(const lanes *)(x + m), t = *(const lanes *)(table + m);
        const lanes cosine = SHUFFLE(t, t, EVEN), sine = SHUFFLE(t, t, ODD);
        *(lanes *)(y + m) = alternate(a, cosine, SHUFFLE(a, a, OTHER) * sine, sign);
    }
}

INLINE void split_table(const float *table, lanes *cosine, lanes *sine)
{
#define FIRST(l) (2 * (l))
#define SECOND(l) (2 * (l) + 1)
    const lanes a = *(const lanes *)table, b = *(const lanes *)(table + LANES);
    *cosine = SHUFFLE(a, b, FIRST);
    *sine = SHUFFLE(a, b, SECOND);
}

/* y = the reflection of x; x may be y. */
INLINE void reflect(const float *normal, const float *x, float *y, int64_t width)
{
    const float twice = 2 * dot(x, normal, width);
    for (int64_t m = 0; m < width; m += LANES)
        *(lanes *)(y + m) = *(const lanes *)(x + m) - twice * *(const lanes *)(normal + m);
}

INLINE int in_range(const unsigned char *index, int64_t width)
{
    unsigned char most = 0;
    for (int64_t m = 0; m < width; m++)
        most = index[m] > most ? index[m] : most;
    return most < width;
}

INLINE void gather(const float *x, const unsigned char *index, float *y, int64_t width)
{
#ifdef LOOKS_UP
    if (width % (2 * LANES) == 0 && width <= 8 * LANES) { /* from pairs of registers, selected by higher bits of the index */
        for (int64_t m = 0; m < width; m += LANES) {
            order at;
            for (int l = 0; l < LANES; l++)
                at[l] = index[m + l];
            lanes found = look_up(*(const lanes *)x, *(const lanes *)(x + LANES), at);
            for (int64_t n = 2 * LANES; n < width; n += 2 * LANES) {
                const lanes other = look_up(*(const lanes *)(x + n), *(const lanes *)(x + n + LANES), at);
                found = choose((order)(at >= (int32_t)n), other, found);
            }
            *(lanes *)(y + m) = found;
        }
        return;
    }
#endif
    for (int64_t m = 0; m < width; m++)
        y[m] = x[index[m]];
}

/* y = the table of an isometry applied to features x [width]; x must not be y. */
INLINE void move(const Input *o, const float *x, const void *table, float *y)
{
    if (o->kind == ROTATION)
        rotate(x, table, 1, y, o->width);
    else if (o->kind == GATHER)
        gather(x, table, y, o->numbers);
    else
        for (int64_t m = 0; m < o->width; m += LANES) {
            lanes cosine, sine;
            split_table((const float *)table + 2 * m, &cosine, &sine);
            *(lanes *)(y + m) = *(const lanes *)(x + m) * cosine;
            *(lanes *)(y + o->width + m) = *(const lanes *)(x + m) * sine;
        }
}

/* The adjoint of `move`. */
INLINE void move_adjoint(const Input *o, const float *y, const void *table, float *x)
{
    if (o->kind == ROTATION)
        rotate(y, table, -1, x, o->width);
    else if (o->kind == GATHER) {
        for (int64_t m = 0; m < o->numbers; m++)
            x[((const unsigned char *)table)[m]] = y[m];
        for (int64_t m = o->numbers; m < o->width; m++)
            x[m] = 0;
    } else
        for (int64_t m = 0; m < o->width; m += LANES) {
            lanes cosine, sine;
            split_table((const float *)table + 2 * m, &cosine, &sine);
            *(lanes *)(x + m) = *(const lanes *)(y + m) * cosine + *(const lanes *)(y + o->width + m) * sine;
        }
}

/* The gradient of the table of one token, from the features before it and the gradient after it. */
INLINE void vjp_table(const Input *o, const float *x, const float *grad, float *out)
{
#define ODD_OF_SECOND(l) ((l) & 1 ? LANES + (l) : (l))
#define FROM_LOW(l) (((l) & 1 ? LANES : 0) + (l) / 2)
#define FROM_HIGH(l) (((l) & 1 ? LANES : 0) + LANES / 2 + (l) / 2)
    const lanes signs = {LIST(SIGN)};
    for (int64_t m = 0; m < o->width; m += LANES) {
        const lanes a = *(const lanes *)(x + m), g = *(const lanes *)(grad + m);
        if (o->kind == ROTATION) {
            const lanes same = a * g, crossed = SHUFFLE(a, a, OTHER) * g * signs;
            const lanes cosine = same + SHUFFLE(same, same, OTHER);
            const lanes sine = crossed + SHUFFLE(crossed, crossed, OTHER);
            *(lanes *)(out + m) = SHUFFLE(cosine, sine, ODD_OF_SECOND);
        } else {
            const lanes cosine = a * g, sine = a * *(const lanes *)(grad + o->width + m);
            *(lanes *)(out + 2 * m) = SHUFFLE(cosine, sine, FROM_LOW);
            *(lanes *)(out + 2 * m + LANES) = SHUFFLE(cosine, sine, FROM_HIGH);
        }
    }
}

/* The table row of token i of a chunk, in the buffer if needed: indices of one byte each, or float32. */
INLINE const void *table_of(const Input *o, Chunk n, int64_t i, float *buffer)
{
    const int64_t at = index_of(&o->table, n) + i * o->table.token;
    if (o->kind == GATHER)
        return (const unsigned char *)o->table.first + at;
    const int64_t each = o->kind == LIFT ? 2 : 1;
    return load((const float *)o->table.first + at, FLOAT32, each * o->numbers, each * o->width, buffer);
}

/* The normal of a head, in the buffer if needed, or null. */
INLINE const float *normal_of(const Input *o, Chunk n, float *buffer)
{
    return o->normal.first ? load(rows_of(&o->normal, n), FLOAT32, o->numbers, o->width, buffer) : 0;
}

INLINE int whole(const Input *o)
{
    return o->type == FLOAT32 && o->numbers == o->width;
}

INLINE int ready(const Input *o, int64_t c)
{
    return o->phi == IDENTITY && o->kind == NONE && !o->normal.first && !o->mask.first && c % ROWS == 0 && whole(o);
}

INLINE int dropped(const Input *o, Chunk n, int64_t i)
{
    return o->mask.first && !((const char *)o->mask.first)[index_of(&o->mask, n) + i * o->mask.token];
}

/* Features of a chunk [c d], unrotated features for the denominator [c unrotated], and phi(x) [c width] or null. */
typedef struct {
    Rows features, unrotated;
    const float *plain;
} Made;

INLINE int moves(const Input *o)
{
    return o->kind != NONE || o->normal.first;
}

/* The features of token i of a chunk, phi's unrotated on the way: where nothing moves them these are the same. */
INLINE void make_token(const Call *call, const Input *o, Chunk n, int64_t i, int64_t d, float *plain, float *features)
{
    const int64_t width = o->width;
    if (dropped(o, n, i)) { /* masked: its gradient is zero, even of NaN */
        memset(plain, 0, width * sizeof(float));
        memset(features, 0, d * sizeof(float));
        return;
    }
    float buffer[MOST] ALIGNED, room[2 * MOST] ALIGNED;
    map(o->phi, load_row(o, n, i, buffer), plain, width);
    for (int64_t m = o->numbers; m < width; m++)
        plain[m] = 0; /* phi(0) may differ from zero */
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
        report(call, OUT_OF_RANGE);
        memset(features, 0, d * sizeof(float));
        return;
    }
    move(o, y, table, features);
    for (int64_t m = o->numbers; o->kind == GATHER && m < width; m++)
        features[m] = 0;
}

/* The features of a chunk, in place or in the buffer, which ends with zeros up to a whole block. */
static Made make_features(const Call *call, const Input *o, Chunk n, int64_t d, float **buffer)
{
    const int64_t c = n.c;
    const int needed = call->size.unrotated && o != &call->v;
    Made made = {{rows_of(&o->x, n), o->x.token}, {0, 0}, 0};
    if (!ready(o, c)) {
        const int apart = moves(o) && needed && !o->unrotated.first;
        float *rows = take(buffer, CHUNK * d), *plains = apart ? take(buffer, CHUNK * o->width) : 0, room[MOST] ALIGNED;
        for (int64_t i = 0; i < c; i++) {
            float *features = rows + i * d, *plain = moves(o) ? apart ? plains + i * o->width : room : features;
            make_token(call, o, n, i, d, plain, features);
        }
        memset(rows + c * d, 0, (blocks(c) - c) * d * sizeof(float));
        made = (Made){{rows, d}, {plains, o->width}, apart ? plains : moves(o) ? 0 : rows};
    }
    if (needed && o->unrotated.first)
        made.unrotated = (Rows){rows_of(&o->unrotated, n), o->unrotated.token};
    else if (!made.unrotated.at)
        made.unrotated = made.features; /* without a map, or if the denominator takes the mapped features */
    return made;
}

/* Gradients of a learned table from gradients of features [c d]; `saved` is phi(x) [c width] or null. */
static void vjp_tables(const Call *call, const Input *o, Chunk n, int64_t d, const float *grad, const float *saved)
{
    const int64_t numbers = (o->kind == LIFT ? 2 : 1) * o->numbers;
    float *out = rows_of(&o->grad_table, n), buffer[MOST] ALIGNED, room[2 * MOST] ALIGNED;
    for (int64_t i = 0; i < n.c; i++, grad += d, out += o->grad_table.token) {
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
        vjp_table(o, buffer, grad, room);
        memcpy(out, room, numbers * sizeof(float));
    }
}

/* The gradient of a token x, from the gradient of phi(x) in one or two terms, and y = phi(x) or null. */
static void vjp_token(int64_t phi, const float *x, const float *y, const float *grad, const float *more, int64_t width,
                       int64_t add, int uncached, float *out)
{
#define VJP(phi)                                                                                    \
    for (int64_t m = 0; m < width; m += LANES) {                                                        \
        lanes g = *(const lanes *)(grad + m);                                                        \
        if (more)                                                                                    \
            g += *(const lanes *)(more + m);                                                         \
        if (phi != IDENTITY) {                                                                       \
            const lanes a = *(const lanes *)(x + m);                                                 \
            g *= derivative(phi, a, y ? *(const lanes *)(y + m) : feature(phi, a));                  \
        }                                                                                            \
        if (add)                                                                                     \
            g += *(const lanes *)(out + m);                                                          \
        put(out + m, g, uncached);                                                                       \
    }
    BY_MAP(phi, VJP)
}

/* Gradients of x from gradients of its features [c d] and unrotated features [c unrotated]; `saved` is phi(x) or null. */
static void vjp(const Call *call, const Input *o, Chunk n, int64_t d, const float *saved, float *grad, float *grad_unrotated)
{
    const int64_t width = o->width, size = o->numbers * (o->type == FLOAT32 ? 4 : 2);
    float buffer[MOST] ALIGNED, room[2 * MOST] ALIGNED, sum[MOST] ALIGNED;
    if (o->grad_unrotated.first) {
        const int64_t numbers = call->size.unrotated;
        for (int64_t i = 0; i < n.c; i++)
            memcpy(rows_of(&o->grad_unrotated, n) + i * o->grad_unrotated.token, grad_unrotated + i * numbers,
                   numbers * sizeof(float));
        grad_unrotated = 0;
    }
    if (o->grad_table.first)
        vjp_tables(call, o, n, d, grad, saved);
    for (int64_t i = 0; i < n.c; i++, grad += d) {
        const float *from = grad;
        char *out = address_of(&o->grad, n, i, o->type);
        if (dropped(o, n, i)) { /* masked: its gradient is zero, even of NaN */
            if (!o->add)
                memset(out, 0, size);
            continue;
        }
        if (o->kind != NONE && !(__atomic_load_n(call->status, __ATOMIC_RELAXED) & OUT_OF_RANGE)) {
            move_adjoint(o, grad, table_of(o, n, i, room), buffer);
            from = buffer;
        }
        if (o->normal.first) {
            reflect(normal_of(o, n, room), from, buffer, width);
            from = buffer;
        }
        const float *x = load_row(o, n, i, room);
        const float *y = saved ? saved + i * width : 0, *more = grad_unrotated ? grad_unrotated + i * call->size.unrotated : 0;
        if (whole(o)) {
            vjp_token(o->phi, x, y, from, more, width, o->add, o->uncached, (float *)out);
            continue;
        }
        if (o->add)
            load(out, o->type, o->numbers, width, sum); /* into `sum`, since rows are not whole vectors */
        vjp_token(o->phi, x, y, from, more, width, o->add, 0, sum);
        store(sum, o->type, o->numbers, out);
    }
}
