/* The functions of OpenMP that the C kernel calls, with threads of POSIX: a sanitizer knows how these wait for each other. */

#include <pthread.h>
#include <stdlib.h>

typedef struct {
    pthread_barrier_t barrier;
    pthread_mutex_t lock;
    void (*work)(void *);
    void *data;
    long threads, next, end, step, chunk, entered; /* entered: how many threads have entered the loop */
} Team;

typedef struct {
    Team *team;
    long number;
    pthread_t thread;
} Member;

static __thread Member *self;

int omp_get_thread_num(void)
{
    return self ? self->number : 0;
}

int omp_get_num_threads(void)
{
    return self ? self->team->threads : 1;
}

void GOMP_barrier(void)
{
    pthread_barrier_wait(&self->team->barrier);
}

int GOMP_loop_nonmonotonic_dynamic_next(long *start, long *end)
{
    Team *team = self->team;
    pthread_mutex_lock(&team->lock);
    *start = team->next;
    *end = *start + team->chunk < team->end ? *start + team->chunk : team->end;
    team->next = *end;
    pthread_mutex_unlock(&team->lock);
    return *start < *end;
}

int GOMP_loop_nonmonotonic_dynamic_start(long from, long to, long step, long chunk, long *start, long *end)
{
    Team *team = self->team;
    pthread_mutex_lock(&team->lock);
    if (team->entered++ % team->threads == 0) /* the loops of a team have barriers between them */
        team->next = from, team->end = to, team->chunk = chunk * step;
    pthread_mutex_unlock(&team->lock);
    return GOMP_loop_nonmonotonic_dynamic_next(start, end);
}

void GOMP_loop_end(void)
{
    GOMP_barrier();
}

void GOMP_loop_end_nowait(void)
{
}

static void *enter(void *member)
{
    Member *outer = self;
    self = member;
    self->team->work(self->team->data);
    self = outer;
    return 0;
}

void GOMP_parallel(void (*work)(void *), void *data, unsigned threads, unsigned flags)
{
    (void)flags;
    Team team = {.work = work, .data = data, .threads = threads};
    Member *members = calloc(threads, sizeof(Member));
    pthread_barrier_init(&team.barrier, 0, threads);
    pthread_mutex_init(&team.lock, 0);
    for (unsigned n = 0; n < threads; n++)
        members[n].team = &team, members[n].number = n;
    for (unsigned n = 1; n < threads; n++)
        if (pthread_create(&members[n].thread, 0, enter, members + n))
            abort();
    enter(members);
    for (unsigned n = 1; n < threads; n++)
        pthread_join(members[n].thread, 0);
    pthread_mutex_destroy(&team.lock);
    pthread_barrier_destroy(&team.barrier);
    free(members);
}
