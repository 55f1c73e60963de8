/* Rotations alone. */

/* out [all tokens .] = tokens of x, mapped by their rows of a table or by the adjoint; `all` counts heads of all samples. */
typedef struct {
    View x, table;
    float *out;
    int64_t all, heads, tokens, adjoint, threads;
    Input input; /* only its kind, numbers and width are used */
} Rotate;

EXPORT int64_t isopos_rotate_size(void)
{
    return sizeof(Rotate);
}

static void rotate_tokens(const Rotate *call, int64_t head, int64_t from, int64_t to)
{
    const Input *o = &call->input;
    const int64_t width = o->kind == LIFT && !call->adjoint ? 2 * o->width : o->width;
    const int64_t sample = head / call->heads, in_sample = head % call->heads;
    const float *x = (const float *)call->x.first + sample * call->x.sample + in_sample * call->x.head + from * call->x.token;
    const float *table = (const float *)call->table.first + sample * call->table.sample + in_sample * call->table.head;
    float *out = call->out + (head * call->tokens + from) * width, buffer[2 * MOST] ALIGNED;
    table += from * call->table.token;
    for (int64_t i = from; i < to; i++, x += call->x.token, table += call->table.token, out += width) {
        if (call->adjoint)
            move_adjoint(o, x, table, buffer);
        else
            move(o, x, table, buffer);
        for (int64_t m = 0; m < width; m += LANES)
            put(out + m, *(const lanes *)(buffer + m), 1);
    }
}

static void rotate_piece(const void *of, int64_t n, int64_t worker)
{
    const Rotate *call = of;
    const int64_t pieces = (call->tokens + CHUNK - 1) / CHUNK;
    const int64_t from = n % pieces * CHUNK, to = from + CHUNK < call->tokens ? from + CHUNK : call->tokens;
    (void)worker;
    rotate_tokens(call, n / pieces, from, to);
    fence();
}

EXPORT void isopos_rotate(const Rotate *call)
{
    share_work(call, rotate_piece, call->all * ((call->tokens + CHUNK - 1) / CHUNK), call->threads);
}
