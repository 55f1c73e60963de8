/* The compiled kernel in a process of its own, maybe of another machine under an emulator: calls come on stdin with all memory
   that they point to, and that memory goes back on stdout. tests/emulated.py has the other end. */

#include <stdio.h>
#include <stdlib.h>

#include "../isopos/ops/linear/cpu/kernel.c"

/* Where an address stands, and what it is that of: blocks of memory, and offsets in them. */
typedef struct {
    int64_t block, at, target, offset;
} Pointer;

static void call_function(int64_t function, void *argument)
{
    int64_t *numbers = argument;
    switch (function) {
    case 0:
        numbers[0] = LANES, numbers[1] = isopos_call_size(), numbers[2] = isopos_rotate_size();
        break;
    case 1:
        numbers[0] = isopos_groups(numbers[0]);
        break;
    case 2:
        numbers[0] = isopos_scratch_size(numbers[0], numbers[1], numbers[2]);
        break;
    case 3: /* phi, how many, and addresses */
        isopos_features(numbers[0], ((float **)argument)[2], ((float **)argument)[3], ((float **)argument)[4], numbers[1]);
        break;
    case 4:
        isopos_forward(argument);
        break;
    case 5:
        isopos_backward(argument);
        break;
    case 6:
        isopos_forward_all(argument);
        break;
    case 7:
        isopos_backward_all(argument);
        break;
    case 8:
        isopos_step(argument);
        break;
    case 9:
        isopos_rotate(argument);
        break;
    default:
        exit(2);
    }
}

static void receive(void *to, size_t size)
{
    if (size && fread(to, size, 1, stdin) != 1)
        exit(feof(stdin) ? 0 : 1);
}

int main(void)
{
    for (;;) {
        int64_t head[3]; /* the function, blocks and pointers */
        receive(head, sizeof head);
        int64_t *sizes = malloc(head[1] * sizeof *sizes);
        char **blocks = malloc(head[1] * sizeof *blocks);
        receive(sizes, head[1] * sizeof *sizes);
        for (int64_t n = 0; n < head[1]; n++) {
            if (posix_memalign((void **)&blocks[n], 64, sizes[n] + 1))
                return 1;
            receive(blocks[n], sizes[n]);
        }
        for (int64_t n = 0; n < head[2]; n++) {
            Pointer own;
            receive(&own, sizeof own);
            *(char **)(blocks[own.block] + own.at) = blocks[own.target] + own.offset;
        }
        call_function(head[0], blocks[0]);
        for (int64_t n = 0; n < head[1]; n++) {
            fwrite(blocks[n], sizes[n], 1, stdout);
            free(blocks[n]);
        }
        fflush(stdout);
        free(sizes), free(blocks);
    }
}
