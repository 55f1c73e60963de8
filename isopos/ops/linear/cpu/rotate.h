/* Rotations alone. */

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
        for (long m = 0; m < width; m += LANES)
            put(out + m, *(const lanes *)(buffer + m), 1);
    }
}

void isopos_rotate(const Rotate *call)
{
    const long pieces = (call->tokens + CHUNK - 1) / CHUNK;
#pragma omp parallel for num_threads(call->threads)
    for (long n = 0; n < call->all * pieces; n++) {
        const long from = n % pieces * CHUNK, to = from + CHUNK < call->tokens ? from + CHUNK : call->tokens;
        rotate_tokens(call, n / pieces, from, to);
        _mm_sfence();
    }
}
