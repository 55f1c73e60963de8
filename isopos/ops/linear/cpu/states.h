/* States, and what the chunks of a head and its parts add to them. */

#define GROUP 4  /* chunks between states that the backward pass gets: it computes those between again */

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
    return call->size.d * call->size.e;
}

INLINE long row_size(const Call *call)
{
    return !call->flags.denominated ? 0 : call->size.own ? call->size.own : call->size.d;
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
    const long groups = isopos_groups(call->size.length), first = back ? (groups * 5 + 5) / 11 : (groups * 3 + 2) / 5;
    const long group = call->split.parts != 2 ? part * groups / call->split.parts : part == 1 ? first : part * groups / 2;
    return group * GROUP * CHUNK < call->size.length ? group * GROUP * CHUNK : call->size.length;
}

/* A part's total: a state, a denominator's, and the weight across the part. */
INLINE float *total_of(const Call *call, long head, long part)
{
    return call->split.totals + (head * call->split.parts + part) * call->split.total_size;
}

/* Where a state of a part begins: with that of the head, or with what the other parts add up to. */
static void start_part(const Call *call, long head, long part, const float *state, const float *row, float *own, float *own_row)
{
    const long size = state_size(call), rows = row_size(call);
    if (call->split.parts > 1)
        state = total_of(call, head, part), row = state + size;
    else
        state += head * size, row += head * rows;
    memcpy(own, state, size * sizeof(float));
    memcpy(own_row, row, rows * sizeof(float));
}
