/* One token of a stream. */

static void step_head(const void *of, int64_t n, int64_t worker)
{
    const Call *call = of;
    const int64_t d = call->size.d, e = call->size.e, unrotated = call->size.unrotated;
    const int64_t columns = e + (call->flags.denominated && !unrotated);
    (void)worker;
    const Chunk token = chunk_of(call, n, call->token, call->token + 1);
    float q[MOST] ALIGNED, k[MOST] ALIGNED, v[MOST + 1] ALIGNED, sum[MOST + 1] ALIGNED;
    float q_plain[MOST] ALIGNED, k_plain[MOST] ALIGNED, *out = rows_of(&call->out.sums, token);
    const float across = call->decay.across ? call->decay.across[call->token * call->size.all + n] : 1;
    make_token(call, &call->q, token, 0, d, moves(&call->q) ? q_plain : q, q);
    make_token(call, &call->k, token, 0, d, moves(&call->k) ? k_plain : k, k);
    make_token(call, &call->v, token, 0, e, v, v);
    v[e] = 1;
    memset(sum, 0, sizeof sum);
    for (int64_t i = 0; i < d; i++) {
        const float *from = call->state.sums + (n * d + i) * columns, a = k[i], b = q[i];
        float *to = call->saved.sums + (n * d + i) * columns;
#pragma omp simd
        for (int64_t j = 0; j < columns; j++) {
            const float x = (across == 0 ? 0 : across * from[j]) + a * v[j]; /* weight 0 also drops NaN */
            to[j] = x;
            sum[j] += b * x;
        }
    }
    float denominator = sum[e];
    if (unrotated) {
        const float *key = moves(&call->k) ? k_plain : k, *query = moves(&call->q) ? q_plain : q;
        denominator = 0;
        for (int64_t m = 0; m < unrotated; m++) {
            const float x = (across == 0 ? 0 : across * call->state.row[n * unrotated + m]) + key[m];
            call->saved.row[n * unrotated + m] = x;
            denominator += query[m] * x;
        }
    }
    denominator = clamped(call, denominator);
    if (call->out.denominator.first)
        *rows_of(&call->out.denominator, token) = denominator;
    for (int64_t j = 0; j < e; j++)
        out[j] = call->flags.denominated ? sum[j] / denominator : sum[j];
}

/* One token per head of a stream. States are [heads d e], with one more column for the sum of k unless rows hold the sum of the
   unrotated k. */
EXPORT void isopos_step(const Call *call)
{
    const int64_t columns = call->size.e + (call->flags.denominated && !call->size.unrotated);
    for (int64_t n = 0; n < call->size.all; n++) /* before any state is overwritten */
        for (const Input *o = &call->q; o <= &call->v; o++)
            if (o->kind == GATHER && !in_range(table_of(o, chunk_of(call, n, call->token, call->token + 1), 0, 0), o->numbers)) {
                report(call, OUT_OF_RANGE);
                return;
            }
    share_work(call, step_head, call->size.all, call->size.all * call->size.d * columns > 1 << 17 ? call->split.threads : 1);
}
