/* Threads of POSIX in place of PyTorch's pool: a sanitizer knows how these wait for each other. */

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

typedef struct {
    void (*body)(int64_t, int64_t, void *);
    void *work;
    int64_t number;
    pthread_t thread;
} Member;

static void *enter(void *of)
{
    const Member *member = of;
    member->body(member->number, member->number + 1, member->work);
    return 0;
}

int32_t sanitize_parallel_for(int64_t from, int64_t to, int64_t grain, void (*body)(int64_t, int64_t, void *), void *work)
{
    Member *members = calloc(to - from, sizeof(Member));
    (void)grain;
    for (int64_t n = from; n < to; n++) {
        members[n - from] = (Member){body, work, n, 0};
        if (pthread_create(&members[n - from].thread, 0, enter, &members[n - from]))
            abort();
    }
    for (int64_t n = from; n < to; n++)
        pthread_join(members[n - from].thread, 0);
    free(members);
    return 0;
}
