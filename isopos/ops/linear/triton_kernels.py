"""Linear attention by Triton: outputs and gradients are three scans over chunks with the same structure.

    out_i = sum_j w_ij <q_i, k_j> v_j       dq_i = sum_j w_ij <grad_i, v_j> k_j       dk_j, dv_j: the same, from j to i

In each scan *targets* sum over *sources*, through a state of features times values that decays from chunk to chunk. Targets
are queries in the first two, keys in the last. A scan visits tokens in order, or with `REVERSE` backwards. A program scans a
*segment*, some chunks of one head, and holds the state in registers. The state before each segment is computed beforehand:
`states` sums up each segment alone, and `scan` adds these sums up. For sums over all keys without a decay there is one
state, the sum over all segments, and sources are None.

Where the log decay falls by less than `triton_tiles.STEEP` in each chunk of a segment, features of sources are multiplied by
their weights in the state after the chunk, and sums by what targets see of it (SCALED), so that a chunk has the work of no
decay. In other segments weights inside a chunk are exponentials of differences.

Matrix products of bfloat16 inputs round features, weights and states to bfloat16; other products are "tf32x3" or "tf32", as
set by the host. Sums are float32. Decays are float64 until differences are taken.
"""

# pyright: reportInvalidTypeForm=false, reportPossiblyUnboundVariable=false

from functools import partial

from isopos.ops.gpu import language
from isopos.ops.linear import triton_tiles as tiles

jit, tl = language()
VARYING = ("length", "inner", "chunks", "segments")
kernel = partial(jit, do_not_specialize=VARYING)  # one variant for all lengths and batches


@kernel
def states(
    inputs,
    values,
    borders,
    out,
    sizes,
    length,
    inner,
    chunks,
    segments,
    C: tl.constexpr,
    X: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    PHI: tl.constexpr,
    KIND: tl.constexpr,
    DENOMINATOR: tl.constexpr,
    ALL: tl.constexpr,
    REVERSE: tl.constexpr,
    STRICT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The state of each segment alone. Programs: (heads, blocks of features, blocks of values); segments.

    The last segment of the scan is skipped, since no later one reads it, unless ALL.
    """
    shape = tiles.shape_of(sizes, sizes.blocks, length, inner, chunks, segments, segments)
    place, parts = tiles.place_of(shape), tl.cdiv(shape.columns, E)
    block, part = tiles.block_of(shape) // parts, tiles.block_of(shape) % parts
    column = part * E + tl.arange(0, E)
    state = tl.zeros((D, E), tl.float32)
    feature_sum = tl.zeros((X if DENOMINATOR == "plain" else D,), tl.float32)
    read = ALL or tl.program_id(1) != (0 if REVERSE else shape.segments - 1)
    for i in range(shape.chunks if read else 0):
        chunk = tiles.chunk_of(i, shape, REVERSE)
        token, ok = tiles.tokens_of(shape, chunk, C)
        scales = ()
        if inputs.g is not None:
            scale, across = tiles.scales_of_sources(borders, inputs, place, chunk, token, shape, C, REVERSE, STRICT)
            scales = (scale,)
            state, feature_sum = state * across, feature_sum * across
        y, plain = tiles.features(
            inputs, inputs.table, place, token, ok, scales, block * X, shape.width, C, X, PHI, KIND, PRECISION
        )
        summed = tiles.weighed(plain if DENOMINATOR == "plain" else y, inputs, place, token, ok)
        tile = tiles.load_values(values, place, token, ok, column, shape.columns, PRECISION)
        of_segments = borders if inputs.g is None else None
        _, falls = tiles.load_weights(of_segments, inputs, inputs, place, chunk, token, shape, C, REVERSE, STRICT)
        feature_sum = tiles.advanced_sum(feature_sum, summed, falls)
        state = tiles.advanced(state, y, tile, falls, True, PRECISION)
    row = block * D + tl.arange(0, D)
    both = (row < shape.features)[:, None] & (column < shape.columns)[None, :]
    first = tiles.state_address(out, shape)
    tl.store(first + row[:, None] * shape.columns + column[None, :], state, mask=both)
    if DENOMINATOR != "none":
        row = block * feature_sum.shape[0] + tl.arange(0, feature_sum.shape[0])
        tl.store(first + shape.features * shape.columns + row, feature_sum, mask=(row < shape.feature_sum) & (part == 0))


@kernel
def scan(
    states,
    first,
    last,
    borders,
    sizes,
    length,
    inner,
    chunks,
    segments,
    SIZE: tl.constexpr,
    C: tl.constexpr,
    DECAY: tl.constexpr,
    REVERSE: tl.constexpr,
    STRICT: tl.constexpr,
):
    """Replace the states of segments by the states before them, in place. Programs: heads; blocks of numbers.

    `first` are states before all segments (None: zero); states after all segments go to `last` (None: nowhere).
    """
    shape = tiles.shape_of(sizes, sizes.blocks, length, inner, chunks, segments, segments)
    place, size = tiles.place_of(shape), shape.features * shape.columns + shape.feature_sum
    number, head = tl.program_id(1) * SIZE + tl.arange(0, SIZE), tl.program_id(0).to(tl.int64)
    own = states + head * shape.segments * size + number
    before = tl.zeros((SIZE,), tl.float32)
    if first is not None:
        before = tl.load(first + head * size + number, mask=number < size, other=0)
    for i in range(shape.segments):
        segment = shape.segments - 1 - i if REVERSE else i
        at = own + tl.cast(segment, tl.int64) * size
        added = tl.load(at, mask=number < size, other=0)
        tl.store(at, before, mask=number < size)
        if DECAY:
            start, end = (segment + 1, segment) if REVERSE else (segment, segment + 1)
            start = tiles.load_border(borders, place, start * shape.chunks, shape, C, STRICT)
            before = before * tiles.fall(
                tiles.load_border(borders, place, end * shape.chunks, shape, C, STRICT), start, REVERSE
            )
        before += added
    if last is not None:
        tl.store(last + head * size + number, before, mask=number < size)


@jit
def _before(prefixes, shape, block, column, X: tl.constexpr, D: tl.constexpr, E: tl.constexpr, DENOMINATOR: tl.constexpr):
    """The state before a segment for a block of features: sums ``[D E]``, and the sum of features for a denominator."""
    state, feature_sum = tl.zeros((D, E), tl.float32), tl.zeros((X if DENOMINATOR == "plain" else D,), tl.float32)
    if prefixes is not None:
        state = tiles.load_state(prefixes, shape, block * D + tl.arange(0, D), column)
        if DENOMINATOR != "none":
            feature_sum = tiles.load_feature_sum(
                prefixes, shape, block * feature_sum.shape[0] + tl.arange(0, feature_sum.shape[0])
            )
    return state, feature_sum


@jit
def _finish(
    out,
    low,
    earlier,
    denominators,
    total,
    denominator,
    place,
    token,
    column,
    shape,
    DENOMINATOR: tl.constexpr,
    DIVIDE: tl.constexpr,
    ADD: tl.constexpr,
):
    """Write sums ``[C E]`` or quotients, what rounding takes from them to `low` if given, and denominators ``[C]``."""
    ok = token < shape.length
    both = ok[:, None] & (column < shape.columns)[None, :]
    at = tiles.address(out, place, token)[:, None] + column[None, :]
    if ADD:
        total += tl.load(at, mask=both, other=0).to(tl.float32)
    if DENOMINATOR != "none":
        if ADD:
            denominator += tl.load(tiles.address(earlier, place, token), mask=ok, other=0)
        if DIVIDE:
            denominator = tiles.clamped(denominator)
            total = total / denominator[:, None]
        tl.store(tiles.address(denominators, place, token), denominator, mask=ok & (tiles.block_of(shape) == 0))
    written = total.to(out.first.dtype.element_ty)
    tl.store(at, written, mask=both)
    if low is not None:
        at = tiles.address(low, place, token)[:, None] + column[None, :]
        tl.store(at, (total - written.to(tl.float32)).to(low.first.dtype.element_ty), mask=both)


@jit
def _of_sources(
    targets,
    sources,
    place,
    token,
    ok,
    scales,
    first,
    shape,
    C: tl.constexpr,
    X: tl.constexpr,
    PHI: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Features of sources, which may share the table of targets; see `triton_tiles.features`."""
    table = targets.table if sources.table is None else sources.table
    return tiles.features(sources, table, place, token, ok, scales, first, shape.width, C, X, PHI, KIND, PRECISION)


@jit
def _weights(q, k, inside, falls, PRECISION: tl.constexpr):
    """Weighted products of the rows of a chunk."""
    return tiles.apart(tiles.dot(q, tl.trans(k), PRECISION) * inside, falls)


@jit
def _near(q, k, rows, summed, inside, falls, DENOMINATOR: tl.constexpr, PRECISION: tl.constexpr):
    """Scores inside a chunk, and those of a denominator."""
    scores = _weights(q, k, inside, falls, PRECISION)
    of_denominator = scores
    if DENOMINATOR == "plain":
        of_denominator = _weights(rows, summed, inside, falls, PRECISION)
    return scores, of_denominator


@jit
def _with_chunk(total, weights, rows, falls, PRECISION: tl.constexpr):
    """The total from the decayed state plus the sum over sources of the chunk."""
    return tiles.fallen(total, falls) + tiles.dot(weights, rows, PRECISION)


@kernel
def outputs(
    targets,
    sources,
    values,
    borders,
    prefixes,
    out,
    low,
    earlier,
    denominators,
    sizes,
    length,
    inner,
    chunks,
    segments,
    C: tl.constexpr,
    X: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    PHI: tl.constexpr,
    KIND: tl.constexpr,
    SOURCE_PHI: tl.constexpr,
    SOURCE_KIND: tl.constexpr,
    DENOMINATOR: tl.constexpr,
    DIVIDE: tl.constexpr,
    ADD: tl.constexpr,
    REVERSE: tl.constexpr,
    STRICT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sums of targets over sources, and denominators, for a part of features. Programs: (heads, blocks of values); segments.

    ADD adds to existing sums and to `earlier` denominators. DIVIDE writes quotients.
    """
    shape = tiles.shape_of(sizes, sizes.blocks, length, inner, chunks, segments, 1 if sources.x is None else segments)
    scalable = False if targets.g is None else tiles.scalable(borders, targets, shape, C, REVERSE, STRICT, PRECISION)
    for SCALED in tl.static_range(1 if targets.g is None else 2):  # two loops in the code, of which a program runs one
        if scalable == SCALED:
            exact = None if SCALED else borders
            place, first, column = tiles.place_of(shape), shape.part * X, tiles.block_of(shape) * E + tl.arange(0, E)
            state, feature_sum = _before(prefixes, shape, shape.part, column, X, D, E, DENOMINATOR)
            HALVES: tl.constexpr = DENOMINATOR == "encoded"
            for i in range(shape.chunks):
                chunk = tiles.chunk_of(i, shape, REVERSE)
                token, ok = tiles.tokens_of(shape, chunk, C)
                q, rows = tiles.features(
                    targets, targets.table, place, token, ok, (), first, shape.width, C, X, PHI, KIND, PRECISION
                )
                rows = rows if DENOMINATOR == "plain" else q
                denominator = tl.sum(rows.to(tl.float32) * feature_sum[None, :], 1)
                if sources.x is None:
                    sums = tiles.dot_halves(q, state, HALVES, PRECISION)
                else:
                    rows = tiles.rounded(rows, PRECISION)
                    scales = ()
                    if SCALED:
                        scale, across = tiles.scales_of_sources(
                            borders, sources, place, chunk, token, shape, C, REVERSE, STRICT
                        )
                        state, feature_sum, denominator = state * across, feature_sum * across, denominator * across
                        scales = (scale,)
                    k, summed = _of_sources(
                        targets, sources, place, token, ok, scales, first, shape, C, X, SOURCE_PHI, SOURCE_KIND, PRECISION
                    )
                    summed = summed if DENOMINATOR == "plain" else k
                    tile = tiles.load_values(values, place, token, ok, column, shape.columns, PRECISION)
                    inside, falls = tiles.load_weights(
                        exact, sources, targets, place, chunk, token, shape, C, REVERSE, STRICT
                    )
                    feature_sum = tiles.advanced_sum(feature_sum, summed, falls)
                    scores, near = _near(q, k, rows, summed, inside, falls, DENOMINATOR, PRECISION)
                    sums = tiles.dot_halves(q, state, HALVES, PRECISION)
                    denominator = tiles.fallen(denominator, falls)
                    sums, denominator = _with_chunk(sums, scores, tile, falls, PRECISION), denominator + tl.sum(near, 1)
                    state = tiles.advanced(state, k, tile, falls, False, PRECISION)
                    if SCALED:
                        sums = tiles.scaled_back(sums, borders, targets, place, chunk, token, shape, C, REVERSE, STRICT)
                        denominator = tiles.scaled_back(
                            denominator, borders, targets, place, chunk, token, shape, C, REVERSE, STRICT
                        )
                _finish(
                    out, low, earlier, denominators, sums, denominator, place, token, column, shape, DENOMINATOR, DIVIDE, ADD
                )


@kernel
def quotients(grad, out, low, denominators, grad_sums, neg_grad, sizes, length, inner, C: tl.constexpr, E: tl.constexpr):
    """Gradients of sums and negative gradients of denominators, given gradients of quotients. Programs: (heads, chunks).

    Quotients are the sum of `out` and `low`, if given. Clamped denominators have gradient zero.
    """
    shape = tiles.shape_of(sizes, tl.cdiv(length, C), length, inner, 1, 1, 1)
    place, column = tiles.place_of(shape), tl.arange(0, E)
    token, ok = tiles.tokens_of(shape, tiles.block_of(shape), C)
    denominator = tl.load(tiles.address(denominators, place, token), mask=ok, other=1)
    of_sums = tiles.load_tile(grad, place, token, ok, column, shape.columns).to(tl.float32) / denominator[:, None]
    of_sums = of_sums.to(grad_sums.first.dtype.element_ty).to(tl.float32)  # rounded as stored, so that errors cancel
    quotient = tiles.load_tile(out, place, token, ok, column, shape.columns).to(tl.float32)
    if low is not None:
        quotient += tiles.load_tile(low, place, token, ok, column, shape.columns).to(tl.float32)
    found = tl.sum(of_sums * quotient, 1)
    tl.store(tiles.address(neg_grad, place, token), tl.where(tl.abs(denominator) <= tiles.FLOOR, 0, found), mask=ok)
    both = ok[:, None] & (column < shape.columns)[None, :]
    to = tiles.address(grad_sums, place, token)[:, None] + column[None, :]
    tl.store(to, of_sums.to(grad_sums.first.dtype.element_ty), mask=both)


@jit
def _scores(
    targets, sources, near, far, inside, falls, place, token, ok, DENOMINATOR: tl.constexpr, PRECISION: tl.constexpr
):
    """Gradients of scores, times the weights inside a chunk."""
    scores = tiles.dot(near, tl.trans(far), PRECISION)
    if DENOMINATOR == "encoded":
        if targets.neg_grad is not None:
            scores -= tl.load(tiles.address(targets.neg_grad, place, token), mask=ok, other=0)[:, None]
        if sources.neg_grad is not None:
            scores -= tl.load(tiles.address(sources.neg_grad, place, token), mask=ok, other=0)[None, :]
    return tiles.apart(scores * inside, falls)


@jit
def _fed(y, plain, sources, summed, falls, place, token, ok, DENOMINATOR: tl.constexpr, PRECISION: tl.constexpr):
    """Weighed features for denominators, rounded early to take half of the registers, and their sum after a chunk."""
    rows = tiles.weighed(plain if DENOMINATOR == "plain" else y, sources, place, token, ok)
    return tiles.rounded(rows, PRECISION), tiles.advanced_sum(summed, rows, falls)


@jit
def _down(before, inside, fed, falls, DENOMINATOR: tl.constexpr, PRECISION: tl.constexpr):
    """Sums of features: for unrotated denominators with those of the chunk, otherwise before it."""
    if DENOMINATOR == "plain":
        before = _with_chunk(before, tiles.apart(inside, falls), fed, falls, PRECISION)
    return before


@jit
def _without(dy, before, inputs, place, token, ok, falls, DENOMINATOR: tl.constexpr):
    """Gradients of features less those of an encoded denominator, given sums of features before a chunk ``[C D]``."""
    if DENOMINATOR == "encoded":
        before = tiles.weighed(before, inputs, place, token, ok)
    if DENOMINATOR == "encoded" and len(falls) == 4:
        if falls[3]:
            dy -= tl.where((tl.load(falls[0]) == falls[1])[:, None], before, 0)
        else:
            dy -= before
    elif DENOMINATOR == "encoded":
        dy -= tiles.fallen(before, falls)
    return dy


@jit
def _write(grad, place, token, ok, at, inside, value, ADD: tl.constexpr):
    """Write a tile, or with ADD add it to the existing one."""
    both = ok[:, None] & inside
    to = tiles.address(grad, place, token)[:, None] + at
    if ADD:
        value += tl.load(to, mask=both, other=0).to(tl.float32)
    tl.store(to, value.to(grad.first.dtype.element_ty), mask=both)


@jit
def _vjp(
    inputs,
    grads,
    dy,
    down,
    place,
    token,
    ok,
    shape,
    C: tl.constexpr,
    X: tl.constexpr,
    PHI: tl.constexpr,
    KIND: tl.constexpr,
    DENOMINATOR: tl.constexpr,
    ADD: tl.constexpr,
):
    """VJP of features: write gradients of x, its table and log decays, given gradients of features ``[C D]``.

    `down` are sums of features ``[C X]`` for unrotated denominators. Returns the gradient of the
    normal ``[X]``, summed over tokens.
    """
    if DENOMINATOR == "plain":
        down = tiles.weighed(down, inputs, place, token, ok)
    width, first = shape.width, tiles.block_of(shape) * X
    column = first + tl.arange(0, X)
    inside = (column < width)[None, :]
    plain, x, at, both = tiles.load_plain(inputs, inputs.table, place, token, ok, column, width, PHI, KIND)
    y, of_normal = plain, tl.zeros((X,), tl.float32)
    if inputs.normal is not None:
        normal = tiles.load_normal(inputs, place, at, both, width)
        y, product = tiles.reflected(y, normal)
    back = dy
    if KIND == "rotation" or KIND == "lift":
        cos, sin = tiles.load_angles(inputs.table, place, token, ok, first, width, C, X, KIND)
        back, of_table = tiles.rotated_vjp(y, dy, cos, sin, C, X, KIND)
        if grads.table is not None:
            step: tl.constexpr = 2 if KIND == "lift" else 1
            pairs = step * first + tl.arange(0, step * X)
            _write(grads.table, place, token, ok, pairs[None, :], (pairs < step * width)[None, :], of_table, ADD)
    if inputs.normal is not None:
        back, of_product = tiles.reflected(back, normal)
        of_normal -= 2 * tl.sum(tl.where(both, product * (back + 2 * of_product * normal) + of_product * plain, 0), 0)
    of_decay = tl.zeros((C,), tl.float32)
    if DENOMINATOR == "plain":
        if KIND == "gather":  # unrotated features are in another order, that of other programs
            unrotated, unrotated_x, _, unrotated_both = tiles.load_plain(
                inputs, inputs.table, place, token, ok, column, width, PHI, "none"
            )
            of_decay -= tl.sum(unrotated * down, 1)
            value = tl.where(unrotated_both, -down * tiles.derivative(unrotated_x, unrotated, PHI), 0)
            _write(grads.plain, place, token, ok, column[None, :], inside, value, ADD)
        else:
            back -= down
    of_decay += tl.sum(plain * back, 1)  # <R y, dy> = <y, R^T dy>
    value = tl.where(both, back * tiles.derivative(x, plain, PHI), 0)
    _write(grads.x, place, token, ok, at, inside, value, ADD)
    if grads.decay is not None:
        tl.store(tiles.address(grads.decay, place, token) + tiles.block_of(shape), of_decay, mask=ok)
    return of_normal


@jit
def _write_normal(grads, of_normal, shape, X: tl.constexpr):
    """Write the gradient of the normal of a segment, if it is needed."""
    if grads.normal is not None:
        at = grads.normal + tiles.segment_of(shape) * shape.width + tl.arange(0, X)
        tl.store(at, of_normal, mask=tl.arange(0, X) < shape.width)


@kernel
def gradients(
    targets,
    sources,
    of_targets,
    of_sources,
    borders,
    prefixes,
    grads,
    sizes,
    length,
    inner,
    chunks,
    segments,
    C: tl.constexpr,
    X: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    PHI: tl.constexpr,
    KIND: tl.constexpr,
    SOURCE_PHI: tl.constexpr,
    SOURCE_KIND: tl.constexpr,
    DENOMINATOR: tl.constexpr,
    ADD: tl.constexpr,
    REVERSE: tl.constexpr,
    STRICT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of the inputs of targets, for a part of values. Programs: (heads, blocks of features); segments.

    Scores are products of values of keys with gradients of outputs. With `grads.v`, keys also sum up gradients of their
    values; then features are a single block.
    """
    whole = tiles.shape_of(sizes, sizes.blocks, length, inner, chunks, segments, 1 if sources.x is None else segments)
    scalable = False if targets.g is None else tiles.scalable(borders, targets, whole, C, REVERSE, STRICT, PRECISION)
    for SCALED in tl.static_range(1 if targets.g is None else 2):  # two loops in the code, of which a program runs one
        if scalable == SCALED:
            exact = None if SCALED else borders
            N: tl.constexpr = C if SCALED or targets.g is None else min(C, 32)  # weights take registers
            shape = tiles.shape_of(sizes, sizes.blocks, length, inner, chunks * (C // N), segments, whole.states)
            place, first, column = tiles.place_of(shape), tiles.block_of(shape) * X, shape.part * E + tl.arange(0, E)
            state, summed = _before(prefixes, shape, tiles.block_of(shape), column, X, D, E, DENOMINATOR)
            of_normal = tl.zeros((X,), tl.float32)
            HALVES: tl.constexpr = DENOMINATOR == "encoded" and targets.neg_grad is not None
            for i in range(shape.chunks):
                chunk = tiles.chunk_of(i, shape, REVERSE)
                token, ok = tiles.tokens_of(shape, chunk, N)
                scales = ()
                if SCALED:
                    scale, across = tiles.scales_of_sources(borders, sources, place, chunk, token, shape, N, REVERSE, STRICT)
                    state, summed, scales = state * across, summed * across, (scale,)
                down, falls = tl.broadcast_to(summed[None, :], (N, summed.shape[0])), ()
                if sources.x is not None:
                    y, plain = _of_sources(
                        targets, sources, place, token, ok, scales, first, shape, N, X, SOURCE_PHI, SOURCE_KIND, PRECISION
                    )
                    far = tiles.load_values(of_sources, place, token, ok, column, shape.columns, PRECISION)
                    inside, falls = tiles.load_weights(
                        exact, sources, targets, place, chunk, token, shape, N, REVERSE, STRICT
                    )
                    fed, summed = _fed(y, plain, sources, summed, falls, place, token, ok, DENOMINATOR, PRECISION)
                if grads.v is not None:
                    x, _ = tiles.features(
                        targets, targets.table, place, token, ok, (), first, shape.width, N, X, PHI, KIND, PRECISION
                    )
                    dv = tiles.dot(x, state, PRECISION)
                    if sources.x is not None:
                        dv = _with_chunk(dv, _weights(x, y, inside, falls, PRECISION), far, falls, PRECISION)
                    if SCALED:
                        dv = tiles.scaled_back(dv, borders, targets, place, chunk, token, shape, N, REVERSE, STRICT)
                    dv = dv.to(grads.v.first.dtype.element_ty)  # rounded early, since it then takes half of the registers
                near = tiles.load_values(of_targets, place, token, ok, column, shape.columns, PRECISION)
                dy = tiles.dot_halves(near, tl.trans(state), HALVES, PRECISION)
                if sources.x is not None:
                    scores = _scores(targets, sources, near, far, inside, falls, place, token, ok, DENOMINATOR, PRECISION)
                    dy = _with_chunk(dy, scores, y, falls, PRECISION)
                    state = tiles.advanced(state, y, far, falls, False, PRECISION)
                    down = _down(down, inside, fed, falls, DENOMINATOR, PRECISION)
                dy = _without(dy, down, targets, place, token, ok, falls, DENOMINATOR)
                if SCALED:
                    dy = tiles.scaled_back(dy, borders, targets, place, chunk, token, shape, N, REVERSE, STRICT)
                    down = tiles.scaled_back(down, borders, targets, place, chunk, token, shape, N, REVERSE, STRICT)
                of_normal += _vjp(targets, grads, dy, down, place, token, ok, shape, N, X, PHI, KIND, DENOMINATOR, ADD)
                if grads.v is not None:
                    _write(grads.v, place, token, ok, column[None, :], (column < shape.columns)[None, :], dv, ADD)
            _write_normal(grads, of_normal, shape, X)
