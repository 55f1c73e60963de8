/* Threads: those of whoever calls, by a function of theirs. No thread is started here, and no second pool is loaded. */

typedef int32_t (*ParallelFor)(int64_t from, int64_t to, int64_t grain, void (*body)(int64_t, int64_t, void *), void *work);

static ParallelFor parallel_for; /* torch_parallel_for of PyTorch's stable C interface; null: the caller's thread does all */

EXPORT void isopos_use_threads(ParallelFor function)
{
    parallel_for = function;
}

/* A piece of the work of a call, by one of its workers, which has memory of its own. */
typedef void (*Piece)(const void *call, int64_t n, int64_t worker);

typedef struct {
    Piece piece;
    const void *call;
    int64_t count, next;
} Work;

/* The pieces that are left, one after the other: workers that begin late find none, in whatever order a pool runs them. */
static void take_pieces(int64_t from, int64_t to, void *of)
{
    Work *work = of;
    for (int64_t worker = from; worker < to; worker++)
        for (int64_t n; (n = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED)) < work->count;)
            work->piece(work->call, n, worker);
}

/* All pieces of some work, which are done when this returns. */
static void share_work(const void *call, Piece piece, int64_t count, int64_t workers)
{
    Work work = {piece, call, count, 0};
    if (workers < 2 || count < 2 || !parallel_for || parallel_for(0, workers, 1, take_pieces, &work))
        take_pieces(0, 1, &work);
}
