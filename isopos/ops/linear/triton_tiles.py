"""Parts of the Triton kernels of linear attention: rows, features of tiles with gradients, decays, states.

Features are computed as tiles are loaded, by phi, a reflection and a table; they are never written to memory. A lift orders
them as (x_0 cos, x_0 sin, x_1 cos, ...), which only states show.
"""

# pyright: reportInvalidTypeForm=false, reportPossiblyUnboundVariable=false

from isopos.ops.gpu import language
from isopos.ops.linear.division import EPS
from isopos.ops.linear.triton_arguments import LaunchShape

jit, tl = language()
FLOOR = tl.constexpr(EPS)  # of denominators
STEEP = tl.constexpr(8.0)  # largest fall x of a log decay in a chunk if features are scaled, which then err by x 6e-8
STEEP_OF_BF16 = tl.constexpr(64.0)  # the same for bfloat16
TOGETHER = tl.constexpr(32)  # chunks whose log decays are read together
LOG2_E = tl.constexpr(1.4426950408889634)


@jit
def shape_of(sizes, blocks, length, inner, chunks, segments, states):
    """All sizes of a launch; Triton specialises all numbers inside of a tuple, so these arrive as separate arguments."""
    width, features, columns, feature_sum, heads, _, part = sizes
    return LaunchShape(width, features, columns, feature_sum, heads, blocks, part, length, inner, chunks, segments, states)


@jit
def place_of(shape):
    """Indices of this program: outer and inner sample, and head."""
    n = tl.program_id(0).to(tl.int64) // shape.blocks
    return n // shape.heads // shape.inner, n // shape.heads % shape.inner, n % shape.heads


@jit
def address(rows, place, token):
    """Addresses of rows of tokens."""
    outer, inner, head = place
    return rows.first + outer * rows.outer + inner * rows.inner + head * rows.head + token * rows.token


@jit
def tokens_of(shape, chunk, C: tl.constexpr):
    """The tokens of a chunk, and which of them exist."""
    token = tl.cast(chunk, tl.int64) * C + tl.arange(0, C)
    return token, token < shape.length


@jit
def taking_part(mask, place, token, ok):
    """Whether each token exists and is not masked."""
    if mask is not None:
        ok = ok & (tl.load(address(mask, place, token), mask=ok, other=0) != 0)
    return ok


@jit
def load_tile(rows, place, token, ok, column, width):
    """Columns of rows; zero outside."""
    both = ok[:, None] & (column < width)[None, :]
    return tl.load(address(rows, place, token)[:, None] + column[None, :], mask=both, other=0)


@jit
def rounded(x, PRECISION: tl.constexpr):
    """An operand of matrix products, rounded early, since it then takes half of the registers."""
    y = x.to(tl.bfloat16 if PRECISION == "bf16" else tl.float32)
    if PRECISION == "tf32":  # rounds away the 13 bits that tensor cores would truncate; NaN stays NaN
        y = tl.where(y == y, ((y.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True), y)
    return y


@jit
def load_values(values, place, token, ok, column, width, PRECISION: tl.constexpr):
    """Values ``[C E]``, rounded as for `dot`."""
    ok = taking_part(values.mask, place, token, ok)
    return rounded(load_tile(values.x, place, token, ok, column, width), PRECISION)


@jit
def exp(x):
    """e^x as a power of two, by two instructions instead of five; numbers below 1e-38 become zero."""
    return tl.exp2(x * LOG2_E)


@jit
def phi(x, PHI: tl.constexpr):
    """The feature maps of `isopos.feature_maps`; NaN stays NaN."""
    if PHI == "elu+1":
        y = tl.where(x > 0, x + 1, exp(x))
    elif PHI == "relu":
        y = tl.where(x < 0, 0, x) + 1e-3
    elif PHI == "relu2":
        y = tl.where(x < 0, 0, x * x)
    elif PHI == "exp":
        y = exp(x)
    else:
        y = x
    return y


@jit
def derivative(x, y, PHI: tl.constexpr):
    """The derivative of y = phi(x)."""
    if PHI == "elu+1":
        z = tl.where(x > 0, 1.0, y)
    elif PHI == "relu":
        z = tl.where(x > 0, 1.0, 0.0)
    elif PHI == "relu2":
        z = tl.where(x > 0, 2 * x, 0.0)
    elif PHI == "exp":
        z = y
    else:
        z = tl.full(x.shape, 1.0, tl.float32)
    return z


@jit
def load_plain(inputs, table, place, token, ok, column, width, PHI: tl.constexpr, KIND: tl.constexpr):
    """phi(x), x, their columns in memory, and which of them exist; in the order of the index for a gather."""
    inside = (column < width)[None, :]
    at = column[None, :]
    if KIND == "gather":
        index = address(table, place, token)[:, None] + at
        at = tl.load(index, mask=ok[:, None] & inside, other=0).to(tl.int32)
    both = taking_part(inputs.mask, place, token, ok)[:, None] & inside
    x = tl.load(address(inputs.x, place, token)[:, None] + at, mask=both, other=0).to(tl.float32)
    y = phi(x, PHI)
    if PHI != "identity" and PHI != "relu2":  # these maps keep zero, so the loaded tile is already right
        y = tl.where(both, y, 0)
    return y, x, at, both


@jit
def load_normal(inputs, place, at, both, width):
    """The normal of a reflection, in the order of the tile."""
    return tl.where(both, tl.load(address(inputs.normal, place, 0) + at, mask=at < width, other=0).to(tl.float32), 0)


@jit
def reflected(y, normal):
    """The Householder reflection of y, which is self-adjoint, and <y, normal>."""
    product = tl.sum(y * normal, 1)[:, None]
    return y - 2 * product * normal, product


@jit
def load_angles(table, place, token, ok, first, width, C: tl.constexpr, X: tl.constexpr, KIND: tl.constexpr):
    """Cosines and sines of a tile, of pairs of features or, for a lift, of features."""
    PAIRS: tl.constexpr = X if KIND == "lift" else X // 2
    step: tl.constexpr = 2 if KIND == "lift" else 1
    pairs = load_tile(table, place, token, ok, step * first + tl.arange(0, 2 * PAIRS), step * width)
    return tl.split(tl.reshape(pairs.to(tl.float32), (C, PAIRS, 2)))


@jit
def rotated(y, cos, sin, C: tl.constexpr, X: tl.constexpr, KIND: tl.constexpr):
    """A rotation of pairs (2i, 2i + 1), or a lift x -> (x cos, x sin) with adjacent results."""
    if KIND == "lift":
        out = tl.reshape(tl.join(y * cos, y * sin), (C, 2 * X))
    else:
        even, odd = tl.split(tl.reshape(y, (C, X // 2, 2)))
        out = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (C, X))
    return out


@jit
def rotated_vjp(y, grad, cos, sin, C: tl.constexpr, X: tl.constexpr, KIND: tl.constexpr):
    """VJP of `rotated`: gradients of y and of the table's pairs."""
    if KIND == "lift":
        first, second = tl.split(tl.reshape(grad, (C, X, 2)))
        of_table = tl.reshape(tl.join(first * y, second * y), (C, 2 * X))
        back = first * cos + second * sin
    else:
        first, second = tl.split(tl.reshape(grad, (C, X // 2, 2)))
        even, odd = tl.split(tl.reshape(y, (C, X // 2, 2)))
        of_table = tl.reshape(tl.join(first * even + second * odd, second * even - first * odd), (C, X))
        back = tl.reshape(tl.join(first * cos + second * sin, second * cos - first * sin), (C, X))
    return back, of_table


@jit
def scaled(rows, scales):
    """Rows times weights ``[C]``, if given."""
    return rows * scales[0][:, None] if len(scales) == 1 else rows


@jit
def features(
    inputs,
    table,
    place,
    token,
    ok,
    scales,
    first,
    width,
    C: tl.constexpr,
    X: tl.constexpr,
    PHI: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Features ``[C D]``, rounded for `dot`, and unrotated features ``[C X]`` in the order of x, rounded if the same.

    `scales` are empty, or weights ``[C]`` that multiply both.
    """
    column = first + tl.arange(0, X)
    plain, _, at, both = load_plain(inputs, table, place, token, ok, column, width, PHI, KIND)
    plain = scaled(plain, scales)
    y = plain
    if inputs.normal is not None:
        y, _ = reflected(y, load_normal(inputs, place, at, both, width))
    if KIND == "rotation" or KIND == "lift":
        cos, sin = load_angles(table, place, token, ok, first, width, C, X, KIND)
        y = rotated(y, cos, sin, C, X, KIND)
    if KIND == "gather":
        plain, _, _, _ = load_plain(inputs, table, place, token, ok, column, width, PHI, "none")
        plain = scaled(plain, scales)
    if inputs.normal is None and KIND == "none":
        plain = rounded(plain, PRECISION)
    return rounded(y, PRECISION), plain


@jit
def dot(a, b, PRECISION: tl.constexpr):
    """A matrix product with float32 sums."""
    exact: tl.constexpr = "ieee" if PRECISION == "bf16" else PRECISION
    return tl.dot(rounded(a, PRECISION), rounded(b, PRECISION), input_precision=exact)


@jit
def dot_halves(a, b, HALVES: tl.constexpr, PRECISION: tl.constexpr):
    """The same; with HALVES and bfloat16, b is the sum of its first digits and the rest."""
    if HALVES and PRECISION == "bf16":
        first = (b.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)
        product = dot(a, first, PRECISION) + dot(a, b - first, PRECISION)
    else:
        product = dot(a, b, PRECISION)
    return product


@jit
def load_decays(inputs, place, token, shape):
    """Log decays of tokens; tokens beyond the last one have its log decay."""
    return tl.load(address(inputs.g, place, tl.minimum(token, shape.length - 1)))


@jit
def load_border(borders, place, chunk, shape, C: tl.constexpr, STRICT: tl.constexpr):
    """Log decay of the state before a chunk: of the last key before it, or with STRICT of its first key."""
    token = tl.cast(chunk, tl.int64) * C - (0 if STRICT else 1)
    return tl.load(address(borders, place, tl.minimum(tl.maximum(token, 0), shape.length - 1)))


@jit
def borders_of(borders, place, chunk, shape, C: tl.constexpr, REVERSE: tl.constexpr, STRICT: tl.constexpr):
    """Log decays of the states before and after a chunk of the scan."""
    start, end = chunk + (1 if REVERSE else 0), chunk + (0 if REVERSE else 1)
    return load_border(borders, place, start, shape, C, STRICT), load_border(borders, place, end, shape, C, STRICT)


@jit
def fall(later, earlier, REVERSE: tl.constexpr):
    """The weight exp(later - earlier) of two log decays, or with REVERSE exp(earlier - later)."""
    return exp((earlier - later if REVERSE else later - earlier).to(tl.float32))


@jit
def halves(x):
    """Two float32 numbers with almost the sum x of float64: their differences are as exact, and 64-bit tiles are slow."""
    first = x.to(tl.float32)
    return first, (x - first.to(tl.float64)).to(tl.float32)


@jit
def weights_inside(targets, sources, start, C: tl.constexpr, REVERSE: tl.constexpr, STRICT: tl.constexpr):
    """Weights inside a chunk from log decays of targets, sources and a border, which are None without decays."""
    target, source = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    ahead = source - target if REVERSE else target - source
    seen = ahead > 0 if STRICT else ahead >= 0
    if targets is None:
        weights = tl.where(seen, 1.0, 0.0)
    else:
        first, rest = halves(start - targets if REVERSE else targets - start)
        of_sources, of_rest = halves(start - sources if REVERSE else sources - start)
        exponent = (first[:, None] - of_sources[None, :]) + (rest[:, None] - of_rest[None, :])
        weights = exp(tl.where(seen, exponent, -float("inf")))
    return weights


@jit
def load_weights(
    borders, sources, targets, place, chunk, token, shape, C: tl.constexpr, REVERSE: tl.constexpr, STRICT: tl.constexpr
):
    """Weights inside a chunk, and (state to target, source to the next state, state to state) across its borders.

    Without decays the latter is an empty tuple, since Triton 3.6 returns no None. If borders only separate segments, it is
    (addresses of the tokens' numbers, the state's number, that of the next state, whether these differ), of which equal
    ones are one segment. A chunk inside of a segment then has the work of none but a comparison.
    """
    inside = weights_inside(None, None, None, C, REVERSE, STRICT)
    falls = ()
    if borders is not None:
        start, end = borders_of(borders, place, chunk, shape, C, REVERSE, STRICT)
        if targets.g is None:
            falls = address(borders, place, tl.minimum(token, shape.length - 1)), start, end, start != end
        else:
            of_targets, of_sources = load_decays(targets, place, token, shape), load_decays(sources, place, token, shape)
            inside = weights_inside(of_targets, of_sources, start, C, REVERSE, STRICT)
            falls = fall(of_targets, start, REVERSE), fall(end, of_sources, REVERSE), fall(end, start, REVERSE)
    return inside, falls


@jit
def scales_of_sources(
    borders, sources, place, chunk, token, shape, C: tl.constexpr, REVERSE: tl.constexpr, STRICT: tl.constexpr
):
    """Weights in the state after a chunk: of its sources ``[C]``, and of the state before it."""
    start, end = borders_of(borders, place, chunk, shape, C, REVERSE, STRICT)
    return fall(end, load_decays(sources, place, token, shape), REVERSE), fall(end, start, REVERSE)


@jit
def scaled_back(
    sums, borders, targets, place, chunk, token, shape, C: tl.constexpr, REVERSE: tl.constexpr, STRICT: tl.constexpr
):
    """Sums ``[C]`` or ``[C .]`` over scaled sources times the weights by which targets see them, which are at least 1."""
    _, end = borders_of(borders, place, chunk, shape, C, REVERSE, STRICT)
    scale = fall(load_decays(targets, place, token, shape), end, REVERSE)
    return sums * (scale[:, None] if len(sums.shape) == 2 else scale)


@jit
def scalable(borders, targets, shape, C: tl.constexpr, REVERSE: tl.constexpr, STRICT: tl.constexpr, PRECISION: tl.constexpr):
    """Whether the log decay falls by less than `STEEP` in each chunk of this program, whose features then are scaled."""
    place, steep = place_of(shape), tl.full((), 0, tl.int32)
    most: tl.constexpr = STEEP_OF_BF16 if PRECISION == "bf16" else STEEP
    for first in range(0, shape.chunks, TOGETHER):
        chunk = tl.program_id(1) * shape.chunks + tl.minimum(first + tl.arange(0, TOGETHER), shape.chunks - 1)
        start, end = borders_of(borders, place, chunk, shape, C, REVERSE, STRICT)
        target = load_decays(targets, place, tl.cast(chunk, tl.int64) * C + (C - 1 if REVERSE else 0), shape)
        of_state, of_target = end - start if REVERSE else start - end, end - target if REVERSE else target - end
        steep = tl.maximum(steep, tl.max(tl.where((of_state < most) & (of_target < most), 0, 1)))
    return steep == 0


@jit
def chunk_of(i, shape, REVERSE: tl.constexpr):
    """The i-th chunk in the scan of this program."""
    first = tl.program_id(1) * shape.chunks
    return first + (shape.chunks - 1 - i if REVERSE else i)


@jit
def block_of(shape):
    """The block index of this program."""
    return tl.program_id(0) % shape.blocks


@jit
def segment_of(shape):
    """The segment index of this program over all heads."""
    return tl.program_id(0).to(tl.int64) // shape.blocks * shape.segments + tl.program_id(1)


@jit
def state_address(states, shape):
    """Address of the state of this segment: sums ``[features values]``, then the sum of features for a denominator."""
    head = tl.program_id(0).to(tl.int64) // shape.blocks
    state = head * shape.states + tl.minimum(tl.program_id(1), shape.states - 1)
    return states + state * (shape.features * shape.columns + shape.feature_sum)


@jit
def load_state(states, shape, row, column):
    """The state before this segment."""
    both = (row < shape.features)[:, None] & (column < shape.columns)[None, :]
    at = state_address(states, shape) + row[:, None] * shape.columns + column[None, :]
    return tl.load(at, mask=both, other=0)


@jit
def load_feature_sum(states, shape, row):
    """The sum of features for a denominator before this segment."""
    at = state_address(states, shape) + shape.features * shape.columns + row
    return tl.load(at, mask=row < shape.feature_sum, other=0)


@jit
def weighed(rows, inputs, place, token, ok):
    """Rows times negative gradients of denominators, if given."""
    if inputs.neg_grad is not None:
        rows = rows.to(tl.float32) * tl.load(address(inputs.neg_grad, place, token), mask=ok, other=0)[:, None]
    return rows


@jit
def apart(scores, falls):
    """Scores inside a chunk, zero between segments."""
    if len(falls) == 4:  # noqa: SIM102 - a constant, and a number
        if falls[3]:
            number = tl.load(falls[0])
            scores = tl.where(number[:, None] == number[None, :], scores, 0)
    return scores


@jit
def fallen(total, falls):
    """Sums over the state before a chunk, ``[C]`` or ``[C .]``, as targets see them."""
    if len(falls) == 4:
        if falls[3]:
            seen = tl.load(falls[0]) == falls[1]
            total = tl.where(seen[:, None] if len(total.shape) == 2 else seen, total, 0)
    elif len(falls) == 3:
        total *= falls[0][:, None] if len(total.shape) == 2 else falls[0]
    return total


@jit
def advanced_sum(feature_sum, summed, falls):
    """The sum of features after a chunk."""
    summed = summed.to(tl.float32)
    if len(falls) == 4:
        if falls[3]:
            feature_sum = tl.sum(tl.where((tl.load(falls[0]) == falls[2])[:, None], summed, 0), 0)
        else:
            feature_sum += tl.sum(summed, 0)
    else:
        if len(falls) == 3:
            feature_sum, summed = feature_sum * falls[2], summed * falls[1][:, None]
        feature_sum += tl.sum(summed, 0)
    return feature_sum


@jit
def advanced(state, rows, tile, falls, ALONE: tl.constexpr, PRECISION: tl.constexpr):
    """The state after a chunk. ALONE: no other product reads the tile; one outside of branches prefetches it."""
    if len(falls) == 4 and ALONE:
        if falls[3]:
            state, rows = tl.zeros_like(state), tl.where((tl.load(falls[0]) == falls[2])[:, None], rows, 0)
        state += dot(tl.trans(rows), tile, PRECISION)
    elif len(falls) == 4:
        if falls[3]:
            own = tl.where((tl.load(falls[0]) == falls[2])[:, None], rows, 0)
            state = dot(tl.trans(own), tile, PRECISION)
        else:
            state += dot(tl.trans(rows), tile, PRECISION)
    else:
        if len(falls) == 3:
            state, tile = state * falls[2], tile.to(tl.float32) * falls[1][:, None]
        state += dot(tl.trans(rows), tile, PRECISION)
    return state


@jit
def clamped(x):
    """A denominator with its magnitude clamped to at least the floor; the sign is kept, even of -0."""
    least = tl.where(x.to(tl.int32, bitcast=True) < 0, -FLOOR, FLOOR)
    return tl.where(tl.abs(x) < FLOOR, least, x)
