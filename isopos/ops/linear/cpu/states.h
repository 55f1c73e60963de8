/* States, and what the chunks of a head and its parts add to them. */

#define GROUP 4  /* chunks per saved state; the backward pass recomputes the states in between */

/* out = across * out + sum_i weight[i] * other[i] * x[i]; other may be null. The sum of the chunk is formed first, as above. */
static void add_rows(Rows x, const float *weight, const float *other, int64_t c, int64_t width, float across, float *out)
{
    float weights[CHUNK];
    for (int64_t i = 0; i < c; i++)
        weights[i] = other ? weight[i] * other[i] : weight[i];
    for (int64_t m = 0; m < width; m += LANES) {
        lanes even = {0}, odd = {0};
        for (int64_t i = 0; i + 1 < c; i += 2) {
            even += weights[i] * *(const lanes *)(x.at + i * x.stride + m);
            odd += weights[i + 1] * *(const lanes *)(x.at + (i + 1) * x.stride + m);
        }
        if (c % 2)
            even += weights[c - 1] * *(const lanes *)(x.at + (c - 1) * x.stride + m);
        *(lanes *)(out + m) = across * *(const lanes *)(out + m) + (even + odd);
    }
}

/* to [x y] = across * from + a [c x]^T times weight * b [c y]: the state after a chunk from the state before it. */
static void outer(Rows a, Rows b, const Weights *w, const float *weight, int64_t c, int64_t x, int64_t y, float *scaled,
                  const float *from, float *to, Ahead *ahead)
{
    if (w->fades) {
        for (int64_t i = 0; i < c; i++)
            for (int64_t m = 0; m < y; m += LANES)
                *(lanes *)(scaled + i * y + m) = weight[i] * *(const lanes *)(b.at + i * b.stride + m);
        b = (Rows){scaled, y};
    }
    add_to_state(from, to, x, y, w->across, (Product){a.at, 1, a.stride, b.at, b.stride, c}, ahead);
}

/* Numbers of a state, and numbers of the sum of keys for a denominator. */
INLINE int64_t state_size(const Call *call)
{
    return call->size.d * call->size.e;
}

INLINE int64_t row_size(const Call *call)
{
    return !call->flags.denominated ? 0 : call->size.unrotated ? call->size.unrotated : call->size.d;
}

/* Number of chunk groups of `length` tokens; the state before each group is saved. */
EXPORT int64_t isopos_groups(int64_t length)
{
    return (length + GROUP * CHUNK - 1) / (GROUP * CHUNK);
}

/* First token of a part of a head; parts consist of whole groups. Of two parts, the one that also sums up the other is shorter
   by the cost of that: a third of a forward pass, a sixth of a backward pass. */
static int64_t begin_of(const Call *call, int64_t part, int back)
{
    const int64_t groups = isopos_groups(call->size.length), first = back ? (groups * 5 + 5) / 11 : (groups * 3 + 2) / 5;
    const int64_t group = call->split.parts != 2 ? part * groups / call->split.parts : part == 1 ? first : part * groups / 2;
    return group * GROUP * CHUNK < call->size.length ? group * GROUP * CHUNK : call->size.length;
}

/* Total of a part: a state, the sum of keys for a denominator, and the weight across the part. */
INLINE float *total_of(const Call *call, int64_t head, int64_t part)
{
    return call->split.totals + (head * call->split.parts + part) * call->split.total_size;
}

/* Copies the state that a part starts with: the state of the head, or the total of the parts before it. */
static void start_part(const Call *call, int64_t head, int64_t part, const float *state, const float *row, float *into,
                       float *into_row)
{
    const int64_t size = state_size(call), rows = row_size(call);
    if (call->split.parts > 1)
        state = total_of(call, head, part), row = state + size;
    else
        state += head * size, row += head * rows;
    memcpy(into, state, size * sizeof(float));
    memcpy(into_row, row, rows * sizeof(float));
}
