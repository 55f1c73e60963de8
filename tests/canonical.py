"""LRPE's canonical form of every relative scheme as dense matrices, without using the scheme's operations.

    score(q at x, k at y) = sum_l q̂_l^H W_l(x^-1 y) k̂_l,    q̂ = A q + a,  k̂ = B k + b            (LRPE, Eq. 6)

Each W is computed from the scheme's parameters as in its paper, by exponentials and powers of generators in float64, one
relative position at a time. The code is slow and meant to be read. The tests compare it with fast isometries, terms and
decays.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial, reduce
from typing import Any

import torch
from torch import Tensor

from isopos import bases, biases, contragredient, couplings, encodings, feature_maps, generators
from isopos.encodings import Coupling, Encoding
from isopos.exact import constant
from isopos.feature_maps import Phi, undivided
from isopos.poses import Projective
from isopos.positions import Group, Line, Product, Ring, Tree
from isopos.scheme import Scheme

__all__ = ["Primitive", "canonical", "score"]

# x^-1 y: a number on a line or ring, a reduced word ((branch, 1 or -1), ...) in a tree, the 16 numbers of a matrix between
# cameras, a tuple of these in a product
Relative = Any
Kernel = Callable[[Relative], Tensor]  # a matrix [h d1 d2] of one relative position; h = 1 where heads are alike
Side = tuple[Tensor, Tensor]  # A [h d1 d] and a [h d1], or B and b


@dataclass(frozen=True, eq=False)
class Primitive:
    """One term q̂^H W(x^-1 y) k̂ with q̂ = A q + a and k̂ = B k + b, for h heads; what is constant has A = 0 or B = 0."""

    group: Group  # of positions
    A: Tensor  # [h d1 d], float64
    a: Tensor  # [h d1]
    B: Tensor  # [h d2 d]
    b: Tensor  # [h d2]
    kernel: Kernel  # W [h d1 d2] of one relative position, as `relative` gives it; scale, locality and decay are in it
    outside: int = 0  # first rows of positions that are class tokens, which have no relative position for W
    classes: tuple[Tensor, ...] = ()  # W of pairs whose key, and of those whose query alone, is a class token

    def relative(self, x: Tensor, y: Tensor) -> list[list[Relative]]:
        """x_i^-1 y_j of each row of x ``[t c]`` and of y ``[s c]``, which is all that W sees of positions.

        A number on a line or a ring, a reduced word of (branch, 1 down or -1 up) in a tree, a tuple of these in a product.
        """
        rows = _rows(self.group, y)
        return [[_between(self.group, a, b) for b in rows] for a in _rows(self.group, x)]

    def matrix(self, x: Tensor, y: Tensor) -> Tensor:
        """W for each query position of x ``[t c]`` and key position of y ``[s c]``: ``[h t s d1 d2]``, float64."""
        kernel, n = cache(self.kernel), self.outside
        rows = []
        for i, row in enumerate(self.relative(x, y)):
            found = [self.classes[0] if j < n else self.classes[1] if i < n else kernel(t) for j, t in enumerate(row)]
            rows.append(torch.stack([w.expand(len(self.A), -1, -1) for w in found], 1))
        return torch.stack(rows, 1)

    def score(self, q: Tensor, k: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Scores of queries ``[*b h t d]`` at x ``[t c]``, keys ``[*b h s d]`` at y ``[s c]``: ``[*b h t s]``, float64."""
        query = q.double() @ self.A.mT + self.a[:, None]
        key = k.double() @ self.B.mT + self.b[:, None]
        return torch.einsum("...hti,htsij,...hsj->...hts", query, self.matrix(x, y), key)


def score(primitives: Sequence[Primitive], q: Tensor, k: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The sum of the primitives' scores (LRPE, Eq. 6); shapes as in `Primitive.score`."""
    return torch.stack([primitive.score(q, k, x, y) for primitive in primitives]).sum(0)


def canonical(scheme: Scheme) -> tuple[Primitive, ...]:
    """The primitives of a scheme's scores, from a snapshot of its parameters (LRPE, Eq. 6-12 and 31-36).

    Scores are the weights of linear attention before any division, where q and k stand for phi(q) and phi(k), and the logits
    of softmax attention with their scale. Denominators, masks and what Shaw's scheme adds to values are no part of them.

    - An encoding is one primitive, W(t) = rho(1)^H rho(t) (Eq. 9). Complex features are pairs of real ones; the score is the
      real part of Eq. 12's. LRPE's unitary type on real vectors has Re W.
    - A decay is a factor of W in linear attention, and one more primitive with q̂ = k̂ = 1 in softmax attention. Locality is
      a factor of W.
    - A bias is a primitive for each of its terms of scores. Constants are 1 where Eq. 8, 32 and 34 print I_d, which makes no
      number, and Eq. 32's last W is transposed. Transformer-XL is four primitives, Horn's first scheme two.
    - Where a coupling acts ahead of phi (SPE in linear attention, Horn's first scheme with `inside`), q and k are those
      ahead of phi, and the primitives give the products of what phi takes: scores where phi is the identity. Another phi
      leaves no bilinear form.
    - Where softmax attention has magnitudes (PoPE), q and k stand for them.
    - Stochastic encodings are relative in expectation over their noise; W is the expectation's.
    - Pairs with class tokens have a constant W where a term treats them apart.

    Raises:
        ValueError: For embeddings and steps of keys.
        TypeError: For unknown parts, such as absolute encodings.

    Examples:
        >>> import isopos
        >>> from isopos.positions import sequence
        >>> content, to_position, to_content = canonical(isopos.deberta(8, 2))
        >>> [list(to_position.A.shape), list(to_position.B.shape), list(to_position.matrix(sequence(3), sequence(4)).shape)]
        [[2, 8, 8], [2, 1, 8], [2, 3, 4, 8, 1]]
    """
    if scheme.embedding is not None or scheme.phases:
        raise ValueError("scheme: expected scores of relative positions, no embeddings and no steps that keys take")
    coupling, group, softmax = scheme.encoding, scheme.group, scheme.attention == "softmax"
    scale = 1.0 if not softmax else coupling.features**-0.5 if scheme.scale is None else scheme.scale
    scale *= scheme.sharpness if softmax else 1.0
    locality = 1.0 if scheme.locality is None else scheme.locality
    rate = torch.zeros(1, dtype=torch.float64) if scheme.decay is None else constant(scheme.decay.rate)
    rate = rate[:, None, None]  # nats a step
    inner = torch.zeros_like(rate) if softmax else rate

    def scaled(kernel: Kernel) -> Kernel:
        far = partial(_length, group) if scheme.metric is None else _straight
        return lambda t: kernel(t) * (scale * locality ** far(t) * torch.exp(-inner * _length(group, t)))

    parts = _of_coupling(coupling, scheme.rotary_factor**2 if softmax else 1.0)
    primitives = [replace(primitive, kernel=scaled(primitive.kernel)) for primitive in parts]
    if scheme.bias is not None:
        phi = undivided(feature_maps.identity if softmax else scheme.feature_map)
        primitives += _of_bias(scheme.bias, coupling.features, scale, phi)
    if softmax and scheme.decay is not None:
        one = _one(coupling.features)
        primitives.append(Primitive(group, *one, *one, lambda t: -rate * _length(group, t)))
    return tuple(
        replace(p, **{name: getattr(p, name).expand(scheme.heads, *getattr(p, name).shape[1:]) for name in "AaBb"})
        for p in primitives
    )


def _content(d: int) -> Side:
    """q̂ = q."""
    return _eye(d), torch.zeros(1, d, dtype=torch.float64)


def _constant(value: Tensor, d: int) -> Side:
    """q̂ = a constant ``[h d1]``."""
    return value.new_zeros(*value.shape, d), value


def _one(d: int) -> Side:
    """q̂ = 1."""
    return _constant(torch.ones(1, 1, dtype=torch.float64), d)


def _eye(d: int) -> Tensor:
    return torch.eye(d, dtype=torch.float64)[None]


def _rows(group: Group, x: Tensor) -> list[Any]:
    """Positions ``[t c]`` one by one: numbers, words of branches from the root, or tuples of these."""
    match group:
        case Line() | Ring():
            return x[:, 0].tolist()
        case Projective():
            return [tuple(row) for row in x.tolist()]
        case Tree():
            nodes = x.tolist()
            return [_word(nodes, row) for row in range(len(nodes))]
        case Product():
            return list(zip(*(_rows(part, a) for part, a in zip(group.parts, group.split(x), strict=True)), strict=True))
    raise TypeError(f"group: expected lines, rings, trees or products of them, got {type(group).__name__}")


def _word(nodes: list[list[int]], row: int) -> tuple[int, ...]:
    word = []
    while nodes[row][0] >= 0:
        row, branch = nodes[row]
        word.append(branch)
    return tuple(reversed(word))


def _between(group: Group, a: Any, b: Any) -> Relative:
    """a^-1 b; in a tree the path from a up to the nearest common ancestor, then down to b."""
    match group:
        case Ring():
            return (b - a) % group.period
        case Projective():
            start, end = (torch.tensor(z, dtype=torch.float64).view(4, 4) for z in (a, b))
            return tuple((torch.linalg.inv(start) @ end).flatten().tolist())
        case Tree():
            common = 0
            while common < min(len(a), len(b)) and a[common] == b[common]:
                common += 1
            return (*((branch, -1) for branch in reversed(a[common:])), *((branch, 1) for branch in b[common:]))
        case Product():
            return tuple(_between(*each) for each in zip(group.parts, a, b, strict=True))
    return b - a


def _length(group: Group, t: Relative) -> float:
    """Number of steps of a relative position."""
    match group:
        case Ring():
            return min(t, group.period - t)
        case Tree():
            return len(t)
        case Projective():
            return group.distance(group.origin(1), torch.tensor([t], dtype=torch.float64)).item()
        case Product():
            return sum(_length(part, a) for part, a in zip(group.parts, t, strict=True))
    return abs(t)


def _straight(t: Relative) -> int:
    """The distance over a grid, rounded down."""
    return math.floor(math.hypot(*_numbers(t)))


def _numbers(t: Relative) -> tuple[float, ...]:
    return t if isinstance(t, tuple) else (t,)


def _of_coupling(coupling: Coupling, factor: float) -> list[Primitive]:
    """Primitives of <query(x) q, key(y) k>; features whose frequencies an extension changes have a factor."""
    group, d = coupling.group, coupling.features
    content, one = _content(d), _one(d)
    match coupling:
        case Encoding():
            return [Primitive(group, *content, *content, _of_encoding(coupling, factor))]
        case contragredient.Contragredient():
            return [Primitive(group, *content, *content, _of_pair(coupling, factor))]
        case couplings.Polar():  # (Gopalakrishnan et al.) of magnitudes
            angle, phase = partial(_angles, frequency=coupling.extended(coupling.frequency)), constant(coupling.parameter)
            return [Primitive(group, *content, *content, lambda t: torch.diag_embed((angle(t) + phase).cos()))]
        case couplings.Adapted():  # (Li et al. 2025, HARoPE)
            inner, (A, B) = _of_encoding(coupling.encoding, factor), _stretched(coupling)
            return [Primitive(group, *content, *content, lambda t: A.mT @ inner(t) @ B)]
        case couplings.Constrained():
            nothing, outside = torch.zeros(1, 1, 1, dtype=torch.float64), coupling.outside
            added = Primitive(group, *one, *one, _cosines(coupling), outside=outside, classes=(nothing, nothing))
            return [Primitive(group, *content, *content, lambda t: _eye(d)), added]
        case couplings.TransformerXL():
            return _of_transformer_xl(coupling)
        case couplings.SineSPE() | couplings.ConvSPE():
            own = _waves(coupling) if isinstance(coupling, couplings.SineSPE) else _filters(coupling)
            gate = 0.0 if coupling.gate is None else constant(coupling.gate.parameter).sigmoid()
            return [Primitive(group, *content, *content, lambda t: torch.diag_embed(gate + (1 - gate) * own(t)))]
    raise TypeError(f"coupling: expected one of isopos.encodings or isopos.couplings, got {type(coupling).__name__}")


def _stretched(coupling: couplings.Adapted) -> tuple[Tensor, Tensor]:
    """A = U diag(s) V^T of queries and the map of keys, A or A^-T, ``[h d d]``."""
    generator = constant(coupling.parameter)
    U, V = (_exp(own - own.mT) for own in generator.unbind(1))
    A = U @ torch.diag_embed(constant(coupling.stretch.parameter).exp()) @ V.mT
    return A, torch.linalg.inv(A).mT if coupling.dual else A


def _of_pair(pair: Coupling, factor: float = 1.0) -> Kernel:
    """W(t) = rho(1)^-1 rho(t) of a representation that need not be unitary, ``[h d d]``; the factor as in `_of_encoding`."""
    match pair:
        case contragredient.Jordan():  # (Sun et al., Algorithm 1, and the real Jordan form)
            links = torch.ones(pair.features - pair.features // pair.order, dtype=torch.float64) / pair.length
            generator = torch.diag(pair.growth) + torch.diag(links, pair.features // pair.order)
            if pair.frequency is not None:
                generator = generator + _skew(pair.extended(pair.frequency)[0])
            scale = factor if pair.extensible else 1.0
            return lambda t: scale * _exp(t * generator)
        case contragredient.Projection():  # (Li et al. 2025)
            unit = _eye(pair.features // 4)[0]
            return lambda t: torch.kron(unit, torch.tensor(t, dtype=torch.float64).view(4, 4))[None]
        case contragredient.ContragredientSum():
            parts = [_of_pair(part, factor) for part in pair.parts]  # pyright: ignore[reportArgumentType]
            return lambda t: _blocks([part(t if pair.shared else t[n]) for n, part in enumerate(parts)])
        case Encoding():
            return _of_encoding(pair)
    raise TypeError(f"coupling: expected one of isopos.contragredient, got {type(pair).__name__}")


def _of_encoding(encoding: Coupling, factor: float = 1.0) -> Kernel:
    """W(t) = rho(1)^H rho(t), ``[h d d]``, with a factor of features whose frequencies an extension changes."""
    match encoding:
        case encodings.Identity():
            return lambda t: _eye(encoding.features)
        case encodings.InBasis():  # (LRPE, Eq. 22-24)
            inner, P = _of_encoding(encoding.encoding, factor), _of_basis(encoding.basis)
            return lambda t: P.mT @ inner(t) @ P
        case encodings.DirectSum():
            parts = [_of_encoding(part, factor) for part in encoding.parts]  # pyright: ignore[reportArgumentType]
            return lambda t: _blocks([part(t if encoding.shared else t[n]) for n, part in enumerate(parts)])
        case encodings.Partial():
            inner, rest = _of_encoding(encoding.encoding, factor), encoding.rest
            return lambda t: _blocks([inner(t), _eye(rest)])
    whole = _of_whole(encoding)
    return lambda t: (factor if encoding.extensible else 1.0) * whole(t)


def _of_whole(encoding: Coupling) -> Kernel:
    """W(t) of an encoding without parts."""
    d = encoding.features
    match encoding:
        case encodings.Rotary():
            frequency = encoding.extended(constant(encoding.parameter))  # [h c f]
            if encoding.is_lift:  # Re exp(i angle) (LRPE, Eq. 22; cosFormer: Eq. 36)
                return lambda t: torch.diag_embed(_angles(t, frequency).cos())
            return lambda t: _exp(_skew(_angles(t, frequency)))
        case encodings.Permutation():
            maps = _permutation_matrices(encoding)
            return lambda t: reduce(torch.matmul, (_power(maps[:, c], steps) for c, steps in enumerate(_numbers(t))))
        case encodings.Exponential():
            generator = constant(encoding.parameter)
            skew = _extended(encoding, (generator - generator.mT)[:, None])[:, 0]
            return lambda t: _exp(t * skew)
        case generators.Circulant() | generators.Commuting() | generators.RankTwo():
            axes = _extended(encoding, _skew_of_axes(encoding))  # [h c d d]
            return lambda t: _exp((torch.tensor(_numbers(t), dtype=torch.float64)[:, None, None] * axes).sum(1))
        case encodings.TreePath():
            generator = constant(encoding.parameter)  # [h b d d]
            step = _exp(generator - generator.mT)
            return lambda t: reduce(torch.matmul, (_power(step[:, branch], sign) for branch, sign in t), _eye(d))
    raise TypeError(f"encoding: expected one of isopos.encodings, got {type(encoding).__name__}")


def _skew_of_axes(encoding: generators.Circulant | generators.Commuting | generators.RankTwo) -> Tensor:
    """The skew generator L_c of each axis, ``[h c d d]``, with W(t) = exp(sum_c t_c L_c)."""
    value, d = constant(encoding.parameter), encoding.features
    match encoding:
        case generators.Circulant():  # (STRING, Eq. 11) C_ij = c_(i - j)
            place = torch.arange(d)
            half = value[..., (place[:, None] - place) % d]
        case generators.Commuting():  # (Yu et al.) multiples of one matrix in each block
            direction = constant(encoding.directions()).expand(len(value), -1, -1)
            half = torch.stack(
                [
                    torch.stack([torch.block_diag(*(w * A for w, A in zip(row, blocks, strict=True))) for row in rows])
                    for rows, blocks in zip(direction, value, strict=True)
                ]
            )
        case generators.RankTwo():  # (Zhang et al.) a b^T
            half = value[:, :1, :, None] * value[:, 1:, None, :]
    return half - half.mT


def _extended(encoding: encodings.Encoding, axes: Tensor) -> Tensor:
    """Commuting skew matrices ``[h c d d]``, with the rotation rates of an encoding's extension."""
    if encoding.extension is None:
        return axes
    mix = torch.arange(1.0, axes.shape[1] + 1, dtype=torch.float64).sqrt()[:, None, None]
    planes = torch.linalg.eigh(1j * (mix * axes).sum(1)).eigenvectors[:, None]  # those of all axes: -w, ..., w
    turns = (planes.mH @ (1j * axes) @ planes).diagonal(dim1=-2, dim2=-1).real
    turns = turns.where(turns.abs() > 1e-9 * turns.abs().amax(), 0)  # where none turns, up to rounding
    fast = encoding.extended(turns[..., turns.shape[-1] // 2 :])
    return (planes @ torch.diag_embed(-1j * torch.cat((-fast.flip(-1), fast), -1).to(planes)) @ planes.mH).real


def _angles(t: Relative, frequency: Tensor) -> Tensor:
    """Radians, the sum over coordinates of steps times frequencies ``[h c f]``: ``[h f]``."""
    return (torch.tensor(_numbers(t), dtype=torch.float64)[:, None] * frequency).sum(-2)


def _skew(angle: Tensor) -> Tensor:
    """Blocks [[0, -a], [a, 0]] of angles ``[h f]``: ``[h 2f 2f]``, whose exponential rotates pairs (RoFormer, Eq. 14-15)."""
    lower = torch.diag_embed(torch.stack((angle, torch.zeros_like(angle)), -1).flatten(-2)[..., :-1], offset=-1)
    return lower - lower.mT


def _exp(generator: Tensor) -> Tensor:
    """exp of ``[... d d]``: the series of a small fraction, to the power that makes it whole.

    `torch.linalg.matrix_exp` of one matrix, not a batch, has errors up to 3e-10 in float64 (at norms just below 0.05).
    """
    squarings = max(0, math.ceil(math.log2(1 + generator.abs().sum(-1).max().item())))
    total = term = torch.eye(generator.shape[-1], dtype=torch.float64).expand(generator.shape)
    for n in range(1, 25):
        term = term @ generator / 2**squarings / n
        total = total + term
    return torch.linalg.matrix_power(total, 2**squarings)


def _permutation_matrices(encoding: encodings.Permutation) -> Tensor:
    """Matrices M of (M v)_i = v_{pi(i)} per head and axis, ``[h c d d]``: pi(i) comes after i in its cycle."""
    row, first, rank, length = encoding.table  # [c h d]
    after = row.gather(-1, first + (rank + 1) % length)
    return _eye(after.shape[-1])[0, after].transpose(0, 1)


def _power(orthogonal: Tensor, n: float) -> Tensor:
    return torch.linalg.matrix_power(orthogonal if n >= 0 else orthogonal.mT, abs(int(n)))


def _blocks(parts: Sequence[Tensor]) -> Tensor:
    """Blocks ``[h d_n d_n]`` along the diagonal, head by head."""
    heads = max(map(len, parts))
    return torch.stack([torch.block_diag(*(part.expand(heads, -1, -1)[h] for part in parts)) for h in range(heads)])


def _of_basis(basis: bases.Basis) -> Tensor:
    """P, ``[h d d]``."""
    d = basis.features
    match basis:
        case bases.Householder():  # (LRPE, Appendix D.1)
            v = constant(basis.parameter)
            return _eye(d) - 2 * v[:, :, None] * v[:, None, :] / v.square().sum(-1)[:, None, None]
        case bases.Orthogonal():
            generator = constant(basis.parameter)
            return _exp(generator - generator.mT)
        case bases.Cayley():  # (STRING, Eq. 10)
            skew = constant(basis.parameter) - constant(basis.parameter).mT
            return (_eye(d) - skew) @ torch.linalg.inv(_eye(d) + skew)
        case bases.OddEven():  # row 2k is e_k, row 2k + 1 is e_{ceil(d/2) + k} (LRPE, Eq. 74, zero-based)
            return _eye(d)[:, [i // 2 if i % 2 == 0 else math.ceil(d / 2) + i // 2 for i in range(d)]]
        case bases.Fourier():  # the unitary transform's rows k = 0, d/2, 1, 2, ...: cosines, then sines of the latter
            cos, sin = _fourier(d).real, -_fourier(d).imag
            pairs = [2**0.5 * wave[k] for k in range(1, (d + 1) // 2) for wave in (cos, sin)]
            return torch.stack([cos[0], *([cos[d // 2]] if d % 2 == 0 else []), *pairs])[None]
        case bases.Spectrum():  # each row a real and an imaginary one
            F = _fourier(d)
            return torch.stack((F.real, F.imag), 1).flatten(0, 1)[None]
        case bases.ComplexFourier():
            F = _fourier(d // 2)
            i = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)  # on pairs
            return (torch.kron(F.real, _eye(2)[0]) + torch.kron(F.imag, i))[None]
        case bases.Pairs():
            return torch.stack([torch.kron(P, _eye(2)[0]) for P in _of_basis(basis.basis)])
    raise TypeError(f"basis: expected one of isopos.bases, got {type(basis).__name__}")


def _fourier(n: int) -> Tensor:
    """The unitary discrete Fourier transform, complex ``[n n]``: powers of its first row after the constant one."""
    root = torch.exp(-2j * math.pi / n * torch.arange(n, dtype=torch.float64))
    return torch.stack([root**k for k in range(n)]) / n**0.5


def _cosines(coupling: couplings.Constrained) -> Kernel:
    """Horn's relative term: sum_m a_m cos(w_m (x - y)) + b_m sin(w_m (x - y)), over the axes."""
    a, b = constant(coupling.parameter).unbind(-1)
    angle = partial(_angles, frequency=-constant(coupling.frequencies))  # of x - y; zero where the sinusoid is another axis'
    return lambda t: (a * torch.cos(angle(t)) + b * torch.sin(angle(t))).sum(-1)[:, None, None]


def _of_transformer_xl(coupling: couplings.TransformerXL) -> list[Primitive]:
    """q^T k + q^T U^T p + u^T k + v^T U^T p with sinusoids p of the offset and a projection U (RoFormer, Eq. 7)."""
    group, d, U = coupling.group, coupling.features, constant(coupling.parameter)  # [h width d]
    u, v = (constant(one.parameter)[:, 0] for one in (coupling.content, coupling.location))
    content, one, projected = _content(d), _one(d), torch.einsum("hwd,hd->hw", U, v)

    def sinusoids(t: Relative) -> Tensor:
        angle = _angles(t, coupling.frequency)
        return torch.stack((angle.cos(), angle.sin()), -1).reshape(1, -1, 1)

    return [
        Primitive(group, *content, *content, lambda t: _eye(d)),
        Primitive(group, U, torch.zeros_like(projected), *one, sinusoids),
        Primitive(group, *_constant(u, d), *content, lambda t: _eye(d)),
        Primitive(group, *_constant(projected, d), *one, sinusoids),
    ]


def _waves(coupling: couplings.SineSPE) -> Kernel:
    """P_d(x - y) = sum_k gain_dk^2 cos(w_dk (x - y) + phase_dk) of each feature, ``[h d]``."""
    frequency, gain, phase = (
        constant(learned) for learned in (coupling.parameter, coupling.gain.parameter, coupling.phase.parameter)
    )
    return lambda t: (gain.square() * torch.cos(phase - frequency * t)).sum(-1)


def _filters(coupling: couplings.ConvSPE) -> Kernel:
    """sum_p f_d(p) g_d(p + t) of the filters f of queries and g of keys, which meet in the noise at x - p = y - (p + t)."""
    query, key = constant(coupling.parameter).unbind(2)  # [h d p]
    meeting = [[query[..., p] * key[..., s] for s in range(coupling.reach)] for p in range(coupling.reach)]
    nothing = torch.zeros_like(query[..., 0])
    return lambda t: sum((row[p + t] for p, row in enumerate(meeting) if 0 <= p + t < len(row)), nothing)


def _of_bias(bias: biases.RelativeBias, d: int, scale: float, phi: Phi) -> list[Primitive]:
    """Primitives of terms of scores; rows of tables are scaled like content, numbers are not."""
    group, content, one = bias.group, _content(d), _one(d)
    match bias:
        case biases.T5():
            weight = constant(bias.parameter)  # [h n]
            return [Primitive(group, *one, *one, lambda t: weight[:, _t5_bucket(bias, t), None, None])]
        case biases.Kerple():  # (Chi et al., the logarithmic and the power variant)
            r1, r2 = (constant(a)[:, None, None] for a in bias.numbers())
            if bias.kernel == "log":
                return [Primitive(group, *one, *one, lambda t: -r1 * torch.log(1 + r2 * abs(t)))]
            return [Primitive(group, *one, *one, lambda t: -r1 * torch.pow(abs(t), r2))]
        case biases.DeBERTa():  # (LRPE, Eq. 31 and 32) with g(x - y) = the row of t = y - x
            keys, queries = (scale * constant(rows.parameter) for rows in (bias.keys, bias.queries))
            back = -1 if bias.released else 1
            to_position = Primitive(group, *content, *one, lambda t: keys[:, _deberta_row(bias, -t), :, None])
            to_content = Primitive(group, *one, *content, lambda t: queries[:, _deberta_row(bias, back * t), None, :])
            return [to_position, to_content]
        case biases.Shaw():  # (LRPE, Eq. 33 and 34)
            rows = scale * constant(bias.keys.parameter)
            return [Primitive(group, *content, *one, lambda t: rows[:, _clipped(bias.reach, t), :, None])]
        case biases.ClippedKeys():
            rows = scale * phi(constant(bias.parameter))
            last = (2 * bias.reach + 1) ** group.columns
            classes = tuple(rows[:, n, :, None] for n in range(last, rows.shape[1]))
            kernel: Kernel = lambda t: rows[:, _clipped(bias.reach, t), :, None]  # noqa: E731
            return [Primitive(group, *content, *one, kernel, outside=bias.outside, classes=classes)]
    raise TypeError(f"bias: expected one of isopos.biases, got {type(bias).__name__}")


def _t5_bucket(bias: biases.T5, t: int) -> int:
    """Bucket of Raffel et al.: count the bucket starts up to the distance; the other direction's buckets come first."""
    after = bias.parameter.shape[-1] // 2 if bias.bidirectional and t > 0 else 0
    return after + _begun(bias.starts, abs(t) if bias.bidirectional else max(-t, 0))


def _deberta_row(bias: biases.DeBERTa, t: int) -> int:
    """k + t for t steps, clipped to 0, ..., 2k - 1; far steps are shortened (LRPE, Eq. 31, with c = k)."""
    steps = _begun(bias.starts, abs(t))
    return min(max(bias.buckets + (steps if t > 0 else -steps), 0), 2 * bias.buckets - 1)


def _begun(starts: Tensor, distance: int) -> int:
    return sum(start <= distance for start in starts.tolist())


def _clipped(reach: int, t: Relative) -> int:
    """The number with the digits clip(t_c) + R on each axis, in base 2R + 1 (LRPE, Eq. 33); real offsets are rounded."""
    row = 0
    for steps in _numbers(t):
        row = (2 * reach + 1) * row + max(-reach, min(reach, math.floor(steps + 0.5))) + reach
    return row
