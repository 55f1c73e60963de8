"""What Triton kernels of linear attention are made of: rows, features of tiles with their gradients, decays, states.

Features are made of tiles as they are loaded, with phi, a reflection and a table; they are never written. Those of a lift
are (x_0 cos, x_0 sin, x_1 cos, ...): their order is nobody's business but a state's.
"""

# pyright: reportInvalidTypeForm=false, reportPossiblyUnboundVariable=false

from isopos.ops.gpu import language
from isopos.ops.linear.division import EPS

jit, tl = language()
FLOOR = tl.constexpr(EPS)  # of denominators


@jit
def place_of(shape):
    """Sample, sample and head of this program."""
    n = tl.program_id(0).to(tl.int64) // shape.blocks
    return n // shape.heads // shape.inner, n // shape.heads % shape.inner, n % shape.heads


@jit
def address(rows, place, token):
    """Where rows begin."""
    outer, inner, head = place
    return rows.first + outer * rows.outer + inner * rows.inner + head * rows.head + token * rows.token


@jit
def tokens_of(shape, chunk, C: tl.constexpr):
    """The tokens of a chunk, and which of them are there."""
    token = tl.cast(chunk, tl.int64) * C + tl.arange(0, C)
    return token, token < shape.length


@jit
def taking_part(mask, place, token, ok):
    """Which tokens take part."""
    if mask is not None:
        ok = ok & (tl.load(address(mask, place, token), mask=ok, other=0) != 0)
    return ok


@jit
def load_tile(rows, place, token, ok, column, width):
    """Some columns of rows."""
    both = ok[:, None] & (column < width)[None, :]
    return tl.load(address(rows, place, token)[:, None] + column[None, :], mask=both, other=0)


@jit
def rounded(x, PRECISION: tl.constexpr):
    """What products of matrices are made of: early, since it takes half of the registers."""
    y = x.to(tl.bfloat16 if PRECISION == "bf16" else tl.float32)
    if PRECISION == "tf32":  # without the 13 bits that cores would cut off: what is rounded stays as it is, NaN stays NaN
        y = tl.where(y == y, ((y.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True), y)
    return y


@jit
def load_values(values, place, token, ok, column, width, PRECISION: tl.constexpr):
    """Values ``[C E]``, rounded as for `dot`."""
    ok = taking_part(values.mask, place, token, ok)
    return rounded(load_tile(values.x, place, token, ok, column, width), PRECISION)


@jit
def phi(x, PHI: tl.constexpr):
    """The feature maps of `isopos.feature_maps`; NaN stays NaN."""
    if PHI == "elu+1":
        y = tl.where(x > 0, x + 1, tl.exp(x))
    elif PHI == "relu":
        y = tl.where(x < 0, 0, x) + 1e-3
    elif PHI == "relu2":
        y = tl.where(x < 0, 0, x * x)
    elif PHI == "exp":
        y = tl.exp(x)
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
    """phi(x), x, the columns that they have in memory, and which are there: those of a gather in its order."""
    inside = (column < width)[None, :]
    at = column[None, :]
    if KIND == "gather":
        index = address(table, place, token)[:, None] + at
        at = tl.load(index, mask=ok[:, None] & inside, other=0).to(tl.int32)
    both = taking_part(inputs.mask, place, token, ok)[:, None] & inside
    x = tl.load(address(inputs.x, place, token)[:, None] + at, mask=both, other=0).to(tl.float32)
    y = phi(x, PHI)
    if PHI != "identity" and PHI != "relu2":  # these leave zero as it is, and the tile where it was copied to
        y = tl.where(both, y, 0)
    return y, x, at, both


@jit
def load_normal(inputs, place, at, both, width):
    """The normal of a reflection, in the order of the tile."""
    return tl.where(both, tl.load(address(inputs.normal, place, 0) + at, mask=at < width, other=0).to(tl.float32), 0)


@jit
def reflected(y, normal):
    """Householder's reflection, which is its own adjoint; and the product with the normal."""
    along = tl.sum(y * normal, 1)[:, None]
    return y - 2 * along * normal, along


@jit
def load_angles(table, place, token, ok, first, width, C: tl.constexpr, X: tl.constexpr, KIND: tl.constexpr):
    """Cosines and sines of a tile, of pairs of features or, for a lift, of features."""
    PAIRS: tl.constexpr = X if KIND == "lift" else X // 2
    step: tl.constexpr = 2 if KIND == "lift" else 1
    pairs = load_tile(table, place, token, ok, step * first + tl.arange(0, 2 * PAIRS), step * width)
    return tl.split(tl.reshape(pairs.to(tl.float32), (C, PAIRS, 2)))


@jit
def turned(y, cos, sin, C: tl.constexpr, X: tl.constexpr, KIND: tl.constexpr):
    """A rotation of pairs (2i, 2i + 1), or x -> (x cos, x sin) with these two next to each other."""
    if KIND == "lift":
        out = tl.reshape(tl.join(y * cos, y * sin), (C, 2 * X))
    else:
        even, odd = tl.split(tl.reshape(y, (C, X // 2, 2)))
        out = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (C, X))
    return out


@jit
def turned_back(y, grad, cos, sin, C: tl.constexpr, X: tl.constexpr, KIND: tl.constexpr):
    """Gradients of y and of the table's pairs, from that of `turned`."""
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
def features(
    inputs,
    table,
    place,
    token,
    ok,
    first,
    width,
    C: tl.constexpr,
    X: tl.constexpr,
    PHI: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Features ``[C D]``, and phi's own ``[C X]`` in the order of x; rounded as for `dot`."""
    column = first + tl.arange(0, X)
    plain, _, at, both = load_plain(inputs, table, place, token, ok, column, width, PHI, KIND)
    y = plain
    if inputs.normal is not None:
        y, _ = reflected(y, load_normal(inputs, place, at, both, width))
    if KIND == "rotation" or KIND == "lift":
        cos, sin = load_angles(table, place, token, ok, first, width, C, X, KIND)
        y = turned(y, cos, sin, C, X, KIND)
    if KIND == "gather":
        plain, _, _, _ = load_plain(inputs, table, place, token, ok, column, width, PHI, "none")
    return rounded(y, PRECISION), rounded(plain, PRECISION)


@jit
def dot(a, b, PRECISION: tl.constexpr):
    """A product of matrices, in float32."""
    exact: tl.constexpr = "ieee" if PRECISION == "bf16" else PRECISION
    return tl.dot(rounded(a, PRECISION), rounded(b, PRECISION), input_precision=exact)


@jit
def load_decays(inputs, place, token, shape):
    """Log decays of tokens; those after the last are like it."""
    return tl.load(address(inputs.g, place, tl.minimum(token, shape.length - 1)))


@jit
def load_border(borders, place, chunk, shape, C: tl.constexpr, STRICT: tl.constexpr):
    """The log decay that states have between a chunk and the one before it: of the last key there, or of the first after."""
    token = tl.cast(chunk, tl.int64) * C - (0 if STRICT else 1)
    return tl.load(address(borders, place, tl.minimum(tl.maximum(token, 0), shape.length - 1)))


@jit
def fall(later, earlier, REVERSE: tl.constexpr):
    """A weight from a difference of log decays, which REVERSE has the other way round."""
    return tl.exp((earlier - later if REVERSE else later - earlier).to(tl.float32))


@jit
def weights_inside(readers, feeders, C: tl.constexpr, REVERSE: tl.constexpr, STRICT: tl.constexpr):
    """The weights inside a chunk; log decays are None where there are none."""
    reader, feeder = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    ahead = feeder - reader if REVERSE else reader - feeder
    seen = ahead > 0 if STRICT else ahead >= 0
    if readers is None:
        weights = tl.where(seen, 1.0, 0.0)
    else:
        exponent = feeders[None, :] - readers[:, None] if REVERSE else readers[:, None] - feeders[None, :]
        weights = tl.exp(tl.where(seen, exponent.to(tl.float32), -float("inf")))
    return weights


@jit
def load_weights(
    borders, feeders, readers, place, chunk, token, shape, C: tl.constexpr, REVERSE: tl.constexpr, STRICT: tl.constexpr
):
    """Weights inside a chunk, and how far states fall: before for readers, of feeders for the state after, and across.

    Without decays the latter are an empty tuple: Triton 3.6 returns no None.
    """
    if readers.g is None:
        inside = weights_inside(None, None, C, REVERSE, STRICT)
        falls = ()
    else:
        start, end = chunk + (1 if REVERSE else 0), chunk + (0 if REVERSE else 1)
        start = load_border(borders, place, start, shape, C, STRICT)
        end = load_border(borders, place, end, shape, C, STRICT)
        of_readers, of_feeders = load_decays(readers, place, token, shape), load_decays(feeders, place, token, shape)
        inside = weights_inside(of_readers, of_feeders, C, REVERSE, STRICT)
        falls = fall(of_readers, start, REVERSE), fall(end, of_feeders, REVERSE), fall(end, start, REVERSE)
    return inside, falls


@jit
def chunk_of(i, shape, REVERSE: tl.constexpr):
    """The chunk that this program meets as its i-th."""
    first = tl.program_id(1) * shape.chunks
    return first + (shape.chunks - 1 - i if REVERSE else i)


@jit
def block_of(shape):
    """The block of this program."""
    return tl.program_id(0) % shape.blocks


@jit
def segment_of(shape):
    """The segment of this program, among those of all heads."""
    return tl.program_id(0).to(tl.int64) // shape.blocks * shape.segments + tl.program_id(1)


@jit
def state_address(states, shape, count):
    """Where the state of this program's segment is: sums ``[features values]``, then those of a denominator.

    A head has `count` of them, one a segment or one.
    """
    head = tl.program_id(0).to(tl.int64) // shape.blocks
    state = head * count + tl.minimum(tl.program_id(1), count - 1)
    return states + state * (shape.features * shape.columns + shape.own)


@jit
def load_state(states, shape, row, column):
    """The state before this segment."""
    both = (row < shape.features)[:, None] & (column < shape.columns)[None, :]
    at = state_address(states, shape, shape.states) + row[:, None] * shape.columns + column[None, :]
    return tl.load(at, mask=both, other=0)


@jit
def load_own_state(states, shape, row):
    """The sum of features before this segment."""
    at = state_address(states, shape, shape.states) + shape.features * shape.columns + row
    return tl.load(at, mask=row < shape.own, other=0)


@jit
def weighed(rows, inputs, place, token, ok):
    """Rows times weights, if they have any."""
    if inputs.less is not None:
        rows = rows.to(tl.float32) * tl.load(address(inputs.less, place, token), mask=ok, other=0)[:, None]
    return rows


@jit
def advanced(state, own, rows, summed, tile, falls, PRECISION: tl.constexpr):
    """The state after a chunk, and the sum of features after it."""
    summed = summed.to(tl.float32)
    if len(falls) > 0:
        _, after, across = falls
        state, own = state * across, own * across
        tile, summed = tile.to(tl.float32) * after[:, None], summed * after[:, None]
    return state + dot(tl.trans(rows), tile, PRECISION), own + tl.sum(summed, 0)


@jit
def clamped(x):
    """A denominator with a magnitude of at least the floor and its own sign, that of -0, too."""
    least = tl.where(x.to(tl.int32, bitcast=True) < 0, -FLOOR, FLOOR)
    return tl.where(tl.abs(x) < FLOOR, least, x)
