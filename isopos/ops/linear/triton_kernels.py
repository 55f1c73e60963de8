"""Linear attention by Triton: three scans over chunks of tokens that are one and the same.

    out_i = sum_j w_ij <q_i, k_j> v_j       dq_i = sum_j w_ij <grad_i, v_j> k_j       dk_j, dv_j: the same, from j to i

In each of them *readers* gather what *feeders* left in a state: sums of features times values, from chunk to chunk times a
decay. A scan goes through the tokens in order or, `REVERSE`, back; a program takes a *segment* of it, some chunks of one
head, and holds the state in registers. What all segments before it have left is found first: `states` sums up each segment
by itself, and `scan` adds these up. Of all keys without a decay the state is one, the sum over all segments: readers gather
from it alone, and have no feeders (None).

Dots of bfloat16 inputs round features, weights and states to bfloat16; those of others are "tf32x3" or "tf32", as the host
says. Sums are float32. Decays are float64 until their difference is taken.
"""

# pyright: reportInvalidTypeForm=false, reportPossiblyUnboundVariable=false

from isopos.ops.gpu import language
from isopos.ops.linear import triton_tiles as tiles

jit, tl = language()


@jit
def states(
    inputs,
    values,
    borders,
    out,
    shape,
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
    """What each segment alone leaves in the state. Programs: blocks of features, by those of values, of heads; segments.

    Zero for the segment that the scan meets last, which nobody reads, but with ALL.
    """
    place, parts = tiles.place_of(shape), tl.cdiv(shape.columns, E)
    block, part = tiles.block_of(shape) // parts, tiles.block_of(shape) % parts
    column = part * E + tl.arange(0, E)
    state = tl.zeros((D, E), tl.float32)
    own = tl.zeros((X if DENOMINATOR == "plain" else D,), tl.float32)
    read = ALL or tl.program_id(1) != (0 if REVERSE else shape.segments - 1)
    for i in range(shape.chunks if read else 0):
        chunk = tiles.chunk_of(i, shape, REVERSE)
        token, ok = tiles.tokens_of(shape, chunk, C)
        y, plain = tiles.features(inputs, inputs.table, place, token, ok, block * X, shape.width, C, X, PHI, KIND, PRECISION)
        summed = tiles.weighed(plain if DENOMINATOR == "plain" else y, inputs, place, token, ok)
        tile = tiles.load_values(values, place, token, ok, column, shape.columns, PRECISION)
        _, falls = tiles.load_weights(borders, inputs, inputs, place, chunk, token, shape, C, REVERSE, STRICT)
        state, own = tiles.advanced(state, own, y, summed, tile, falls, PRECISION)
    row = block * D + tl.arange(0, D)
    both = (row < shape.features)[:, None] & (column < shape.columns)[None, :]
    first = tiles.state_address(out, shape, shape.segments)
    tl.store(first + row[:, None] * shape.columns + column[None, :], state, mask=both)
    if DENOMINATOR != "none":
        row = block * own.shape[0] + tl.arange(0, own.shape[0])
        tl.store(first + shape.features * shape.columns + row, own, mask=(row < shape.own) & (part == 0))


@jit
def scan(
    states,
    first,
    last,
    borders,
    shape,
    SIZE: tl.constexpr,
    C: tl.constexpr,
    DECAY: tl.constexpr,
    REVERSE: tl.constexpr,
    STRICT: tl.constexpr,
):
    """States of segments become the states before them, in place. Programs: heads; blocks of numbers.

    `first` are those before all segments, and `last` is where those after them go; None for zero, and for nowhere.
    """
    place, size = tiles.place_of(shape), shape.features * shape.columns + shape.own
    number, head = tl.program_id(1) * SIZE + tl.arange(0, SIZE), tl.program_id(0).to(tl.int64)
    own_first = states + head * shape.segments * size + number
    before = tl.zeros((SIZE,), tl.float32)
    if first is not None:
        before = tl.load(first + head * size + number, mask=number < size, other=0)
    for i in range(shape.segments):
        segment = shape.segments - 1 - i if REVERSE else i
        at = own_first + tl.cast(segment, tl.int64) * size
        own = tl.load(at, mask=number < size, other=0)
        tl.store(at, before, mask=number < size)
        if DECAY:
            start, end = (segment + 1, segment) if REVERSE else (segment, segment + 1)
            start = tiles.load_border(borders, place, start * shape.chunks, shape, C, STRICT)
            before = before * tiles.fall(
                tiles.load_border(borders, place, end * shape.chunks, shape, C, STRICT), start, REVERSE
            )
        before += own
    if last is not None:
        tl.store(last + head * size + number, before, mask=number < size)


@jit
def _before(prefixes, shape, block, column, X: tl.constexpr, D: tl.constexpr, E: tl.constexpr, DENOMINATOR: tl.constexpr):
    """The state that a segment begins with, of a block of features: sums ``[D E]`` and those of a denominator."""
    state, own = tl.zeros((D, E), tl.float32), tl.zeros((X if DENOMINATOR == "plain" else D,), tl.float32)
    if prefixes is not None:
        state = tiles.load_state(prefixes, shape, block * D + tl.arange(0, D), column)
        if DENOMINATOR != "none":
            own = tiles.load_own_state(prefixes, shape, block * own.shape[0] + tl.arange(0, own.shape[0]))
    return state, own


@jit
def _sum(q, own_q, own_k, tile, state, own, scores, inside, falls, DENOMINATOR: tl.constexpr, PRECISION: tl.constexpr):
    """Sums of a chunk ``[C E]`` and their denominators ``[C]``, which without any are zero."""
    total = tiles.dot(q, state, PRECISION)
    if DENOMINATOR == "plain":
        far, near = own_q, tiles.dot(own_q, tl.trans(own_k), PRECISION) * inside
    else:
        far, near = q, scores
    denominator = tl.sum(far.to(tl.float32) * own[None, :], 1)
    if len(falls) > 0:
        total, denominator = total * falls[0][:, None], denominator * falls[0]
    return total + tiles.dot(scores, tile, PRECISION), denominator + tl.sum(near, 1)


@jit
def _finish(
    out,
    earlier,
    denominators,
    total,
    denominator,
    place,
    token,
    ok,
    column,
    shape,
    DENOMINATOR: tl.constexpr,
    DIVIDE: tl.constexpr,
    ADD: tl.constexpr,
):
    """Write sums ``[C E]`` or quotients, and denominators ``[C]``."""
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
    tl.store(at, total.to(out.first.dtype.element_ty), mask=both)


@jit
def outputs(
    readers,
    feeders,
    values,
    borders,
    prefixes,
    out,
    earlier,
    denominators,
    shape,
    C: tl.constexpr,
    X: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    PHI: tl.constexpr,
    KIND: tl.constexpr,
    PHI_OF_FEEDERS: tl.constexpr,
    KIND_OF_FEEDERS: tl.constexpr,
    DENOMINATOR: tl.constexpr,
    DIVIDE: tl.constexpr,
    ADD: tl.constexpr,
    REVERSE: tl.constexpr,
    STRICT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sums over what readers see, and denominators, of a part of features. Programs: blocks of values, of heads; segments.

    ADD adds to the sums that are there, and to `earlier` denominators. DIVIDE writes quotients. Without
    feeders the state is all.
    """
    place, first = tiles.place_of(shape), shape.part * X
    column = tiles.block_of(shape) * E + tl.arange(0, E)
    state, own = _before(prefixes, shape, shape.part, column, X, D, E, DENOMINATOR)
    for i in range(shape.chunks):
        chunk = tiles.chunk_of(i, shape, REVERSE)
        token, ok = tiles.tokens_of(shape, chunk, C)
        q, own_q = tiles.features(readers, readers.table, place, token, ok, first, shape.width, C, X, PHI, KIND, PRECISION)
        if feeders.x is None:
            rows = own_q if DENOMINATOR == "plain" else q
            total, denominator = tiles.dot(q, state, PRECISION), tl.sum(rows.to(tl.float32) * own[None, :], 1)
        else:
            table = readers.table if feeders.table is None else feeders.table
            k, own_k = tiles.features(
                feeders, table, place, token, ok, first, shape.width, C, X, PHI_OF_FEEDERS, KIND_OF_FEEDERS, PRECISION
            )
            tile = tiles.load_values(values, place, token, ok, column, shape.columns, PRECISION)
            inside, falls = tiles.load_weights(borders, feeders, readers, place, chunk, token, shape, C, REVERSE, STRICT)
            scores = tiles.dot(q, tl.trans(k), PRECISION) * inside
            total, denominator = _sum(q, own_q, own_k, tile, state, own, scores, inside, falls, DENOMINATOR, PRECISION)
            summed = own_k if DENOMINATOR == "plain" else k
            state, own = tiles.advanced(state, own, k, summed, tile, falls, PRECISION)
        _finish(out, earlier, denominators, total, denominator, place, token, ok, column, shape, DENOMINATOR, DIVIDE, ADD)


@jit
def quotients(grad, out, denominators, own, less, shape, C: tl.constexpr, E: tl.constexpr):
    """Gradients of sums, and less those of denominators, from those of quotients. Programs: chunks, of heads.

    Those of denominators are zero where these were clamped.
    """
    place, column = tiles.place_of(shape), tl.arange(0, E)
    token, ok = tiles.tokens_of(shape, tiles.block_of(shape), C)
    denominator = tl.load(tiles.address(denominators, place, token), mask=ok, other=1)
    of_sums = tiles.load_tile(grad, place, token, ok, column, shape.columns).to(tl.float32) / denominator[:, None]
    of_sums = of_sums.to(own.first.dtype.element_ty).to(tl.float32)  # as others will read them, so that errors cancel
    found = tl.sum(of_sums * tiles.load_tile(out, place, token, ok, column, shape.columns).to(tl.float32), 1)
    tl.store(tiles.address(less, place, token), tl.where(tl.abs(denominator) <= tiles.FLOOR, 0, found), mask=ok)
    both = ok[:, None] & (column < shape.columns)[None, :]
    to = tiles.address(own, place, token)[:, None] + column[None, :]
    tl.store(to, of_sums.to(own.first.dtype.element_ty), mask=both)


@jit
def _with_chunk(total, weights, rows, falls, PRECISION: tl.constexpr):
    """What is read from the state, as it has fallen, and what feeders of the chunk itself have."""
    if len(falls) > 0:
        total = total * falls[0][:, None]
    return total + tiles.dot(weights, rows, PRECISION)


@jit
def _scores(readers, feeders, near, far, inside, place, token, ok, DENOMINATOR: tl.constexpr, PRECISION: tl.constexpr):
    """Gradients of scores, with the weights inside a chunk."""
    scores = tiles.dot(near, tl.trans(far), PRECISION)
    if DENOMINATOR == "encoded":
        if readers.less is not None:
            scores -= tl.load(tiles.address(readers.less, place, token), mask=ok, other=0)[:, None]
        if feeders.less is not None:
            scores -= tl.load(tiles.address(feeders.less, place, token), mask=ok, other=0)[None, :]
    return scores * inside


@jit
def _write(grad, place, token, ok, at, inside, value, ADD: tl.constexpr):
    """Write a tile, or with ADD its sum with what is there."""
    both = ok[:, None] & inside
    to = tiles.address(grad, place, token)[:, None] + at
    if ADD:
        value += tl.load(to, mask=both, other=0).to(tl.float32)
    tl.store(to, value.to(grad.first.dtype.element_ty), mask=both)


@jit
def _pull(
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
    """Write gradients of x, of its table and log decays from those of features ``[C D]``.

    `down` are sums of features that denominators have: encoded ones ``[C D]``, or phi's own ``[C X]``. Returns the
    gradient of the normal ``[X]``, summed over tokens.
    """
    if DENOMINATOR == "plain":
        down = -tiles.weighed(down, inputs, place, token, ok)
    elif DENOMINATOR == "encoded":
        dy -= tiles.weighed(down, inputs, place, token, ok)
    width, first = shape.width, tiles.block_of(shape) * X
    column = first + tl.arange(0, X)
    inside = (column < width)[None, :]
    plain, x, at, both = tiles.load_plain(inputs, inputs.table, place, token, ok, column, width, PHI, KIND)
    y, of_normal = plain, tl.zeros((X,), tl.float32)
    if inputs.normal is not None:
        normal = tiles.load_normal(inputs, place, at, both, width)
        y, along = tiles.reflected(y, normal)
    back, mapped = dy, y
    if KIND == "rotation" or KIND == "lift":
        cos, sin = tiles.load_angles(inputs.table, place, token, ok, first, width, C, X, KIND)
        mapped = tiles.turned(y, cos, sin, C, X, KIND)
        back, of_table = tiles.turned_back(y, dy, cos, sin, C, X, KIND)
        if grads.table is not None:
            step: tl.constexpr = 2 if KIND == "lift" else 1
            pairs = step * first + tl.arange(0, step * X)
            _write(grads.table, place, token, ok, pairs[None, :], (pairs < step * width)[None, :], of_table, ADD)
    of_decay = tl.sum(mapped * dy, 1)
    if inputs.normal is not None:
        back, of_along = tiles.reflected(back, normal)
        of_normal -= 2 * tl.sum(tl.where(both, along * (back + 2 * of_along * normal) + of_along * plain, 0), 0)
    if DENOMINATOR == "plain":
        if KIND == "gather":  # what is not gathered is in another order, which other programs have
            own, own_x, _, own_both = tiles.load_plain(inputs, inputs.table, place, token, ok, column, width, PHI, "none")
            of_decay += tl.sum(own * down, 1)
            value = tl.where(own_both, down * tiles.derivative(own_x, own, PHI), 0)
            _write(grads.plain, place, token, ok, column[None, :], inside, value, ADD)
        else:
            of_decay += tl.sum(plain * down, 1)
            back += down
    value = tl.where(both, back * tiles.derivative(x, plain, PHI), 0)
    _write(grads.x, place, token, ok, at, inside, value, ADD)
    if grads.decay is not None:
        tl.store(tiles.address(grads.decay, place, token) + tiles.block_of(shape), of_decay, mask=ok)
    return of_normal


@jit
def gradients(
    readers,
    feeders,
    of_readers,
    of_feeders,
    borders,
    prefixes,
    grads,
    shape,
    C: tl.constexpr,
    X: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    PHI: tl.constexpr,
    KIND: tl.constexpr,
    PHI_OF_FEEDERS: tl.constexpr,
    KIND_OF_FEEDERS: tl.constexpr,
    DENOMINATOR: tl.constexpr,
    ADD: tl.constexpr,
    REVERSE: tl.constexpr,
    STRICT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of readers' inputs, by a part of values. Programs: blocks of features, of heads; segments.

    Scores are products of values: those of keys, and gradients of outputs. Without feeders the state is all. Keys gather
    gradients of their values, too, where `grads` has a place for them: then the features are no blocks.
    """
    place, first = tiles.place_of(shape), tiles.block_of(shape) * X
    column = shape.part * E + tl.arange(0, E)
    state, own = _before(prefixes, shape, tiles.block_of(shape), column, X, D, E, DENOMINATOR)
    of_normal = tl.zeros((X,), tl.float32)
    for i in range(shape.chunks):
        chunk = tiles.chunk_of(i, shape, REVERSE)
        token, ok = tiles.tokens_of(shape, chunk, C)
        if feeders.x is not None:
            table = readers.table if feeders.table is None else feeders.table
            y, plain = tiles.features(
                feeders, table, place, token, ok, first, shape.width, C, X, PHI_OF_FEEDERS, KIND_OF_FEEDERS, PRECISION
            )
            far = tiles.load_values(of_feeders, place, token, ok, column, shape.columns, PRECISION)
            inside, falls = tiles.load_weights(borders, feeders, readers, place, chunk, token, shape, C, REVERSE, STRICT)
        if grads.v is not None:
            x, _ = tiles.features(readers, readers.table, place, token, ok, first, shape.width, C, X, PHI, KIND, PRECISION)
            dv = tiles.dot(x, state, PRECISION)
            if feeders.x is not None:
                dv = _with_chunk(dv, tiles.dot(x, tl.trans(y), PRECISION) * inside, far, falls, PRECISION)
            dv = dv.to(grads.v.first.dtype.element_ty)  # at once: it takes half of the registers
        near = tiles.load_values(of_readers, place, token, ok, column, shape.columns, PRECISION)
        dy, down = tiles.dot(near, tl.trans(state), PRECISION), tl.broadcast_to(own[None, :], (C, own.shape[0]))
        if feeders.x is not None:
            fed = tiles.weighed(plain if DENOMINATOR == "plain" else y, feeders, place, token, ok)
            scores = _scores(readers, feeders, near, far, inside, place, token, ok, DENOMINATOR, PRECISION)
            dy = _with_chunk(dy, scores, y, falls, PRECISION)
            if DENOMINATOR == "plain":
                down = _with_chunk(down, inside, fed, falls, PRECISION)
            elif len(falls) > 0:
                down *= falls[0][:, None]
            state, own = tiles.advanced(state, own, y, fed, far, falls, PRECISION)
        of_normal += _pull(readers, grads, dy, down, place, token, ok, shape, C, X, PHI, KIND, DENOMINATOR, ADD)
        if grads.v is not None:
            _write(grads.v, place, token, ok, column[None, :], (column < shape.columns)[None, :], dv, ADD)
    if grads.normal is not None:
        at = grads.normal + tiles.segment_of(shape) * shape.width + tl.arange(0, X)
        tl.store(at, of_normal, mask=tl.arange(0, X) < shape.width)
