/* Work runs on threads of the caller, through a function that the caller sets. No thread is started here. */

typedef int32_t (*ParallelFor)(int64_t from, int64_t to, int64_t grain, void (*body)(int64_t, int64_t, void *), void *work);

static ParallelFor parallel_for; /* torch_parallel_for of PyTorch's stable C interface; null: only the calling thread works */

EXPORT void isopos_use_threads(ParallelFor function)
{
    parallel_for = function;
}

/* One piece of the work of a call; `worker` selects the scratch memory. */
typedef void (*Piece)(const void *call, int64_t n, int64_t worker);

typedef struct {
    Piece piece;
    const void *call;
    int64_t count, next;
} Work;

/* Takes the remaining pieces one by one; a worker that starts late may find none. */
static void take_pieces(int64_t from, int64_t to, void *of)
{
    Work *work = of;
    for (int64_t worker = from; worker < to; worker++)
        for (int64_t n; (n = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED)) < work->count;)
            work->piece(work->call, n, worker);
}

/* Runs all pieces; returns when they are done. */
static void share_work(const void *call, Piece piece, int64_t count, int64_t workers)
{
    Work work = {piece, call, count, 0};
    if (workers < 2 || count < 2 || !parallel_for || parallel_for(0, workers, 1, take_pieces, &work))
        take_pieces(0, 1, &work);
}
