# pyright: reportInvalidTypeForm=false
"""The kernel of `isopos.ops.linear.triton_step`: one program per head and sample.

It computes the features of the token, adds them to the sums block by block, and reads the output from the updated blocks.

Sums may be updated in place. A block with fewer numbers than a program has threads is loaded by several warps and stored by
one of them, so a barrier stands in between: without it a slow warp would load numbers that are already updated.
"""

from functools import partial

from isopos.ops import gpu
from isopos.ops.linear.triton_tiles import clamped, phi

jit, tl = gpu.language()


@jit
def _at(x, normal, dot, place, seen, WAY: tl.constexpr, REFLECTED: tl.constexpr):
    """Features at indices `place`, after a reflection with <phi(x), normal> = dot; zero unless `seen`."""
    PHI: tl.constexpr = WAY[0]  # Triton 3.6 accepts no string from a tuple as an argument
    value = tl.where(seen, phi(tl.load(x + place, mask=seen, other=0.0).to(tl.float32), PHI), 0.0)
    if REFLECTED:
        value -= 2 * dot * tl.load(normal + place, mask=seen, other=0.0)
    return value


@jit
def _row(side, sample, head, n, WAY: tl.constexpr, W: tl.constexpr, WP: tl.constexpr):
    """Addresses of x, of row n of the table and of the normal; <phi(x), normal>; whether the token takes part."""
    x, dot, takes_part = side.x + sample * side.of_x[0] + head * side.of_x[1], 0.0, True
    table, normal = x, x  # placeholders, since Triton 3.6 returns no None
    if WAY[1] != "none":
        table = side.table + sample * side.of_table[0] + head * side.of_table[1] + n * side.of_table[2]
    if WAY[2]:
        normal = side.normal + head * side.of_normal[1]
        place = tl.arange(0, WP)
        unit = tl.load(normal + place, mask=place < W, other=0.0)
        dot = tl.sum(_at(x, normal, 0.0, place, place < W, WAY, False) * unit)
    if WAY[3]:
        takes_part = tl.load(side.mask + sample * side.of_mask[0]) != 0
    return x, table, normal, dot, takes_part


@jit
def _features(row, place, D: tl.constexpr, W: tl.constexpr, WAY: tl.constexpr):
    """Features at indices `place` of D, mapped from W numbers by the table; NaN if an index is out of range."""
    x, table, normal, dot, takes_part = row
    seen = (place < D) & takes_part
    if WAY[1] == "rotation":
        cos = tl.load(table + place // 2 * 2, mask=seen, other=0.0)
        sin = tl.load(table + place // 2 * 2 + 1, mask=seen, other=0.0)
        other = _at(x, normal, dot, place ^ 1, seen, WAY, WAY[2])
        value = _at(x, normal, dot, place, seen, WAY, WAY[2]) * cos + tl.where(place % 2 == 0, -other, other) * sin
    elif WAY[1] == "lift":
        turn = tl.load(table + place % W * 2 + place // W, mask=seen, other=0.0)
        value = _at(x, normal, dot, place % W, seen, WAY, WAY[2]) * turn
    elif WAY[1] == "gather":
        index = tl.load(table + place, mask=seen, other=0).to(tl.int32)
        known = (index >= 0) & (index < W)
        value = _at(x, normal, dot, index, seen & known, WAY, WAY[2])
        value = tl.where(seen & (known == 0), float("nan"), value)
    else:
        value = _at(x, normal, dot, place, seen, WAY, WAY[2])
    return value


@jit
def _weighed(sums, place, seen, weight, DECAYS: tl.constexpr):
    """Sums at indices `place` times their weight; weight 0 gives 0, even for NaN."""
    total = tl.load(sums + place, mask=seen, other=0.0)
    if DECAYS:
        total = tl.where(weight == 0, 0.0, total * weight)
    return total


@jit
def _unrotated_denominator(
    query,
    key,
    masked,
    rows,
    weight,
    W: tl.constexpr,
    WP: tl.constexpr,
    OF_Q: tl.constexpr,
    OF_K: tl.constexpr,
    DECAYS: tl.constexpr,
):
    """The denominator of unrotated features: their sums are loaded from rows[0] and stored to rows[1]."""
    place = tl.arange(0, WP)
    of_query = _at(query[0], query[2], 0.0, place, (place < W) & query[4], OF_Q, False)
    of_key = _at(key[0], key[2], 0.0, place, (place < W) & key[4] & masked, OF_K, False)
    total = _weighed(rows[0], place, place < W, weight, DECAYS) + of_key
    tl.debug_barrier()
    tl.store(rows[1] + place, total, mask=place < W)
    return tl.sum(of_query * total)


@jit
def _finish(out, total, mask, rows, pid, number, length):
    """Write the output, NaN after the last row, and count up the row.

    Barriers lie between the load of the row and this, since a program has one block or more.
    """
    total = tl.where(number < length, total, float("nan"))
    tl.store(out, total.to(out.dtype.element_ty), mask=mask)
    if rows is not None:
        tl.store(rows + pid, number + 1)


@partial(jit, do_not_specialize=("across", "length"))  # one variant for all batches
def step(
    q,
    k,
    v,
    before,
    after,
    weights,
    out,
    denominators,
    heads,
    rows,
    length,
    across,
    D: tl.constexpr,
    W: tl.constexpr,
    WP: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    C: tl.constexpr,
    OF_Q: tl.constexpr,
    OF_K: tl.constexpr,
    OF_V: tl.constexpr,
    DECAYS: tl.constexpr,
    DENOMINATED: tl.constexpr,
    UNROTATED: tl.constexpr,
    COUNTED: tl.constexpr,
):
    """Update the sums of one head by the token with row n of tables and `weights`, and write its output.

    n is this program's entry of `rows`, which is counted up, so that a repeated launch, as of a captured graph, is the next
    token; None stands for row 0. After the last one of `length` rows outputs are NaN. `before` and `after` are pairs: sums
    of k v^T, and with UNROTATED sums of unrotated features for the denominator; otherwise these are one more column of the
    sums. C features are added at a time.
    """
    pid = tl.program_id(0).to(tl.int64)
    sample, head, columns, values = pid // heads, pid % heads, E + (DENOMINATED and not UNROTATED), tl.arange(0, EP)
    number = 0 if rows is None else tl.load(rows + pid)
    n = tl.minimum(number, length - 1)
    query, key = _row(q, sample, head, n, OF_Q, W, WP), _row(k, sample, head, n, OF_K, W, WP)
    value = _row(v, sample, head, n, OF_V, E, EP)
    weight = tl.load(weights + n * across + pid) if DECAYS else 1.0
    added = _features(value, values, E, E, OF_V)
    total, denominator = tl.zeros([EP], tl.float32), tl.full((), 0.0, tl.float32)
    for start in range(0, D, C):
        place = start + tl.arange(0, C)
        of_query, of_key = _features(query, place, D, W, OF_Q), _features(key, place, D, W, OF_K)
        at, seen = pid * D * columns + place * columns, place < D
        both = seen[:, None] & (values[None, :] < E)
        tile = at[:, None] + values[None, :]
        state = _weighed(before[0], tile, both, weight, DECAYS) + of_key[:, None] * added[None, :]
        column = tl.zeros([C], tl.float32)
        if DENOMINATED and not UNROTATED:
            column = _weighed(before[0], at + E, seen, weight, DECAYS) + tl.where(value[4], of_key, 0.0)
        tl.debug_barrier()
        tl.store(after[0] + tile, state, mask=both)
        total += tl.sum(of_query[:, None] * state, 0)
        if DENOMINATED and not UNROTATED:
            tl.store(after[0] + at + E, column, mask=seen)
            denominator += tl.sum(of_query * column)
    if DENOMINATED:
        if UNROTATED:
            own = before[1] + pid * W, after[1] + pid * W
            denominator = _unrotated_denominator(query, key, value[4], own, weight, W, WP, OF_Q, OF_K, DECAYS)
        if COUNTED:
            tl.store(denominators + pid, denominator)
        total /= clamped(denominator)
    _finish(out + pid * E + values, total, values < E, rows, pid, number, length)
