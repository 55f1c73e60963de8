"""Test the report of laws: all schemes keep their promises, and broken encodings give counterexamples."""

import pytest
import torch
from cases import COMPOSED, SCHEMES, each, ids, over_rows, scheme_case, tree_generator
from structures import over_structures

import isopos
from isopos import contragredient, couplings, encodings, laws, maps
from isopos.attention import problem
from isopos.positions import Line, Ring, Tree

OF_SCORES = {"width", "relative", "precision", "batch", "gradient"}
OF_PAIRS = OF_SCORES | {"homomorphism", "identity", "decomposable"}
OF_ENCODINGS = OF_SCORES | {"bounded", "unitary", "homomorphism", "identity", "decomposable"}
PROPERTIES = {"directional", "periodic", "positive"}


def broken_of(case):
    """Names of the laws that a scheme does not promise."""
    seen = {
        "ape-absolute",
        "spe-sine",
        "spe-conv",
        "liere",
    }  # in scores, not only by way of embeddings or of the feature map
    return [] if case.relative else ["relative", "attention"] if case.name in seen else ["attention"]


@over_rows(SCHEMES)
def test_every_scheme_obeys_what_it_promises(case):
    scheme = case.build()
    report = laws.check(scheme)
    assert report.broken == broken_of(case), report
    assert ("shifted by" in str(report)) == (not case.relative)
    names = {finding.name for finding in report.findings if finding.is_law}
    assert ("seen" in names) == (case.name != "none")
    assert ("path" in names) == (not case.both_ways)
    names -= {"seen", "path"}
    if isinstance(scheme.encoding, encodings.Encoding):
        property_only = {"unitary"} if case.name == "path" and "strength" not in case.options else set()
        unlimited = scheme.group.is_grid and scheme.encoding.max_length is None
        assert names == (OF_ENCODINGS - property_only) | {"attention"} | ({"exact"} if unlimited else set())
        if scheme.embedding is scheme.bias is None and case.both_ways:
            assert report["directional"].holds == case.directed
    elif isinstance(scheme.encoding, contragredient.Contragredient):
        assert names == OF_PAIRS | {"attention"}
        assert not report["unitary"].holds
    else:
        assert names == OF_SCORES | {"attention"}
    assert {finding.name for finding in report.findings} - names <= PROPERTIES | {"seen", "path", "unitary"}


@over_structures(lambda case, kind: kind == "softmax" and len(case.kinds) == 2)
def test_softmax_attention_obeys_too(case, kind):
    report = laws.check(case.build(attention=kind))
    assert report.broken == broken_of(case), report
    assert "positive" not in {finding.name for finding in report.findings}


@each("case", COMPOSED, ids=ids)
def test_every_encoding_obeys(case):
    assert laws.check(case.make).holds


@each("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_precision_is_of_the_dtype(dtype):
    finding = laws.check(isopos.rope(8, 2), dtype=dtype)["precision"]
    assert finding.holds
    assert str(dtype).removeprefix("torch.") in finding.note
    assert torch.finfo(dtype).eps / 64 < finding.figure


# What is broken is found


class _Broken(encodings.Encoding):
    """Rotation by the square of the position: an isometry, but not relative."""

    def __init__(self):
        super().__init__()
        self.inner = encodings.Rotary(torch.full((1, 1, 2), 1e-3))
        self.group, self.features, self.out_features = self.inner.group, 4, 4

    def forward(self, x, dtype=torch.float32):
        return self.inner(x**2, dtype)


class _Growing(_Broken):
    """Rotation times 2: not an isometry."""

    def forward(self, x, dtype=torch.float32):
        return maps.Chain(self.inner(x, dtype), maps.Matrix(2 * torch.eye(4, dtype=dtype)[None]))


class _Late(_Broken):
    """Rotation at positions clamped to -400 from below: not a homomorphism."""

    def forward(self, x, dtype=torch.float32):
        return self.inner(x.clamp_min(-400), dtype)


class _Rounded(_Broken):
    """Rotation with angles in float32: inexact far from zero."""

    def forward(self, x, dtype=torch.float32):
        angle = (0.3 * x.to(dtype))[..., None, :, :].expand(*x.shape[:-2], 1, -1, 2)
        return maps.Rotation(torch.stack((angle.cos(), angle.sin()), -1))


class _Coarse(_Broken):
    """Tables rounded to bfloat16 if float32 is requested."""

    def forward(self, x, dtype=torch.float32):
        rho = self.inner(x, dtype)
        return maps.Rotation(rho.table.bfloat16().to(dtype) if dtype == torch.float32 else rho.table)


class _Dead(_Broken):
    """An encoding with an unused parameter."""

    def __init__(self):
        super().__init__()
        self.unused = torch.nn.Parameter(torch.ones(2, 3))

    def forward(self, x, dtype=torch.float32):
        return self.inner(x, dtype)


class _Headless(_Broken):
    """Tables without a head axis."""

    def forward(self, x, dtype=torch.float32):
        rho = self.inner(x, dtype)
        return maps.Rotation(rho.table.squeeze(-4))


class _TokenMatrix(_Broken):
    """Matrices with the token axis in the place of the head axis."""

    def forward(self, x, dtype=torch.float32):
        return maps.Matrix(torch.eye(4, dtype=dtype).expand(*x.shape[:-1], 4, 4))


class _OneAxis(_Dead):
    """An encoding that uses a parameter with one axis."""

    def __init__(self):
        super().__init__()
        self.unused = torch.nn.Parameter(torch.ones(2))

    def forward(self, x, dtype=torch.float32):
        angle = x.double()[..., None, :, :] * self.unused.double()
        return maps.Rotation(torch.stack((angle.cos(), angle.sin()), -1).to(dtype))


class _DeadHead(_OneAxis):
    """An encoding that uses one head of a parameter with two heads."""

    def __init__(self):
        super().__init__()
        self.of_heads = torch.nn.Parameter(torch.ones(2, 2))

    def forward(self, x, dtype=torch.float32):
        angle = x.double()[..., None, :, :] * (self.unused + self.of_heads[0]).double()
        return maps.Rotation(torch.stack((angle.cos(), angle.sin()), -1).to(dtype))


class _ByLength(_Broken):
    """Angles divided by the number of tokens."""

    def forward(self, x, dtype=torch.float32):
        angle = x.double()[..., None, :, :] * torch.tensor([1.0, 0.1], dtype=torch.float64) / x.shape[-2]
        return maps.Rotation(torch.stack((angle.cos(), angle.sin()), -1).to(dtype))


class _NaNGradient(_OneAxis):
    """An encoding whose parameter is where a root has no gradient."""

    def forward(self, x, dtype=torch.float32):
        angle = x.double()[..., None, :, :] * ((self.unused.double() - 1).abs().sqrt() + 1)
        return maps.Rotation(torch.stack((angle.cos(), angle.sin()), -1).to(dtype))


class _Backwards(encodings.Encoding):
    """Products along a path of a tree with the last branch first. A shift then multiplies them from the wrong side."""

    def __init__(self):
        super().__init__()
        self.generators = torch.matrix_exp(tree_generator() - tree_generator().mT)
        self.group, self.features, self.out_features = Tree(2), 8, 8

    def forward(self, x, dtype=torch.float32):
        generators, nodes = self.generators.to(dtype), x.flatten(0, -3).tolist() if x.ndim > 2 else [x.tolist()]
        samples = [torch.stack([self.operator(generators, rows, row) for row in rows], 1) for rows in nodes]
        matrices = torch.stack(samples)
        return maps.Matrices(matrices if x.ndim > 2 else matrices[0])

    def operator(self, generators, rows, row):
        parent, branch = row
        if parent < 0:
            return torch.eye(8, dtype=generators.dtype).expand(2, 8, 8)
        return generators[:, branch] @ self.operator(generators, rows, rows[parent])


class _OneSided(couplings.Absolute):
    """A map of keys without a map of queries."""

    def __init__(self):
        super().__init__(encodings.Rotary(torch.rand(1, 1, 4)))


@each(
    ("broken", "law"),
    [
        (_Headless, "batch"),
        (_TokenMatrix, "batch"),
        (_ByLength, "batch"),
        (_NaNGradient, "gradient"),
        (_Broken, "relative"),
        (_Backwards, "relative"),
        (_Backwards, "homomorphism"),
        (_OneSided, "relative"),
        (_Growing, "unitary"),
        (_Growing, "bounded"),
        (_Growing, "decomposable"),
        (_Late, "homomorphism"),
        (_Rounded, "exact"),
        (_Coarse, "precision"),
        (_Dead, "gradient"),
        (_DeadHead, "gradient"),
    ],
)
def test_a_broken_encoding_is_found(broken, law):
    report = laws.check(broken)
    assert law in report.broken
    assert not report.holds
    assert "BROKEN" in str(report)
    if law == "relative":
        assert "x = [" in report[law].counterexample
        assert "shifted by [" in report[law].counterexample
        assert report[law].counterexample in str(report)


@each("name", ["sinusoidal", "learned", "shiv-quirk"])
def test_absolute_embeddings_are_found_with_a_counterexample(name):
    finding = laws.check(scheme_case(name).build())["attention"]
    assert not finding.holds
    assert "shifted by [" in finding.counterexample


def test_a_parameter_of_one_axis_is_measured():
    assert laws.check(_OneAxis).holds


# What an encoding's own code keeps from being measured


class _Raising(_Broken):
    """An encoding that raises an error at positions beyond a limit."""

    def __init__(self, error=None, limit=0):
        super().__init__()
        self.error, self.limit = error or LookupError("no such row"), limit

    def forward(self, x, dtype=torch.float32):
        if (x > self.limit).any():
            raise self.error
        return self.inner(x, dtype)


@each("error", [LookupError("no such row"), SystemExit(0), SystemExit("bye"), torch.OutOfMemoryError("x")])
def test_what_raises_could_not_be_measured(error):
    report = laws.check(_Raising(error))
    assert not report.holds
    assert report.unmeasured == ["width"]
    assert report.broken == []
    assert f"could not be measured: {type(error).__name__}: {error} ({__file__}, line " in str(report)
    assert report["width"].note.endswith(": raise self.error)")
    assert "every law holds" not in str(report)


def test_what_raises_far_out_is_measured_near():
    report = laws.check(_Raising(limit=2000))
    assert report.unmeasured == ["exact"]
    assert "LookupError: no such row" in report["exact"].note
    assert report["relative"].holds
    assert report["batch"].holds
    assert not report.holds


def test_what_a_scheme_raises_could_not_be_measured():
    scheme = isopos.schemes.compose(_Raising(limit=2000), 1, {})
    scheme.decay = _Raising()  # a part that only attention takes
    report = laws.check(scheme)
    assert report.unmeasured == ["exact", "attention", "positive", "seen"]
    assert report["relative"].holds


def test_an_interrupt_is_none():
    with pytest.raises(KeyboardInterrupt):
        laws.check(_Raising(KeyboardInterrupt()))


def _of_width(features, out_features, forward):
    encoding = type("Declared", (encodings.Encoding,), {"forward": forward})()
    encoding.group, encoding.features, encoding.out_features = Line(real=True), features, out_features
    return encoding


def _rotate(_, x, dtype=torch.float32):
    return encodings.Rotary(torch.full((1, 1, 2), 1e-3))(x, dtype)


def test_widths_are_compared_with_what_is_declared():
    assert laws.check(_of_width(4, 4, _rotate)).holds
    for features, out_features, found in (
        (4, 8, "it declares 4 and 8"),
        (6, 6, "it declares 6 and 6"),
        (6, 4, "it declares 6 and 4"),
    ):
        report = laws.check(_of_width(features, out_features, _rotate))
        assert "width" in report.broken
        assert not report.holds
        assert report["width"].note == f"its maps take 4 features and return 4; {found}"


def test_real_positions_are_tried():
    """An encoding of a real line that rounds its positions is relative at integers only."""
    rounding = _of_width(4, 4, lambda self, x, dtype=torch.float32: _rotate(self, x.long(), dtype))
    assert "relative" in laws.check(rounding).broken
    rounding.group = Line()
    assert laws.check(rounding).holds


def test_a_sum_with_a_tree_has_no_inverse_and_every_other_law():
    rotary = encodings.Rotary(encodings.rope_frequencies(2)[None, None])
    report = laws.check(contragredient.ContragredientSum([rotary, encodings.TreePath(tree_generator())]))
    assert report.holds
    assert {"homomorphism", "identity", "relative"} <= {finding.name for finding in report.findings}
    assert "decomposable" not in {finding.name for finding in report.findings}


def test_what_returns_no_map_could_not_be_measured():
    report = laws.check(_of_width(4, 4, lambda self, x, dtype=torch.float32: x))
    assert report.unmeasured == ["width"]
    assert "expected a map of isopos.maps at positions, got Tensor" in str(report)


def test_an_encoding_that_does_not_say_what_it_is_is_refused():
    class Silent(_Broken):
        def __init__(self):
            encodings.Encoding.__init__(self)

    with pytest.raises(ValueError, match="group, features, out_features"):
        laws.check(Silent)


@each("subject", [3, lambda: 3, torch.nn.Linear(2, 2)])
def test_what_is_no_encoding_is_refused(subject):
    with pytest.raises(TypeError):
        laws.check(subject)


# Properties


def test_direction_and_positivity_are_properties_not_laws():
    unitary, rope = laws.check(isopos.lrpe_unitary(8, 2)), laws.check(isopos.rope(8, 2))
    assert unitary.holds
    assert not unitary["directional"].holds
    assert "symmetric in the direction" in str(unitary)
    assert rope["directional"].holds
    encoded = [laws.check(isopos.rope(2, 8, denominator="encoded"), seed=seed)["positive"].holds for seed in range(5)]
    assert not all(encoded)  # a rotated denominator at d = 2 is often negative


@each("seed", range(3))
def test_random_orthogonal_powers_do_not_keep_denominators_positive(seed):
    """Permutations keep denominators positive; their replacement by orthogonal matrices is PermuteFormer's ablation."""
    assert laws.check(isopos.permuteformer(8, 2, seed=seed))["positive"].holds
    orthogonal = laws.check(isopos.permuteformer(8, 2, matrix="orthogonal", decay="none", seed=seed), seed=seed)
    assert orthogonal.holds
    assert not orthogonal["positive"].holds


@each(
    ("scheme", "order"),
    [
        (isopos.ape_ring(8, 2, period=7), 7),
        (isopos.permuteformer(8, 1, orders="long"), 15),
        (isopos.lrpe_permutation(8, 1, seed=1), None),
        (isopos.rope(8, 2), float("inf")),
        (isopos.ape_tree(8, 2), float("inf")),
    ],
)
def test_periods_are_reported(scheme, order):
    order = scheme.encoding.encoding.common_order if order is None else order
    finding = laws.check(scheme)["periodic"]
    assert finding.figure == order
    assert finding.holds == (order < float("inf"))


@each("seed", range(3))
@each("denominator", ["plain", "encoded", "complex"])
def test_a_denominator_near_zero_breaks_no_law(seed, denominator):
    scheme = isopos.rope(8, 2, denominator=denominator, feature_map="identity", decay="retnet")
    assert laws.check(scheme, seed=seed).holds


def test_lifts_side_by_side_are_not_taken_for_one():
    lifts = [encodings.Rotary(torch.rand(1, 1, 2), lift=True) for _ in range(2)]
    assert laws.check(encodings.DirectSum(lifts)).holds


def test_a_ring_of_one_place_has_nothing_to_shift():
    assert laws.check(encodings.Identity(4, Ring(1))).holds


def test_the_report_prints_a_line_a_finding():
    report = laws.check(isopos.rope(8, 2))
    assert len(str(report).splitlines()) == 1 + len(report.findings)
    assert "every law holds" in str(report)
    assert {finding.name for finding in report.findings} == OF_ENCODINGS | {"exact", "attention", "seen"} | PROPERTIES


class _Coarse(_Broken):
    """Rotation with angles in float32: relative near zero up to rounding, inexact far from zero."""

    def forward(self, x, dtype=torch.float32):
        angle = x.float()[..., None, :, :] * torch.tensor([1.0, 0.1])
        return maps.Rotation(torch.stack((angle.cos(), angle.sin()), -1).to(dtype))


class _Clamped(_Broken):
    """Rotation at positions clamped to [-1500, 1500]."""

    def forward(self, x, dtype=torch.float32):
        return self.inner(x.clamp(-1500, 1500), dtype)


@each("broken", [_Coarse, _Clamped])
def test_exactness_is_that_of_offsets_far_out(broken):
    assert "exact" in laws.check(broken).broken


@each("causal", [True, False])
def test_the_attention_law_is_measured_both_ways(monkeypatch, causal):
    from isopos.laws import checks

    def attend(*inputs, **options):
        out = isopos.linear_attention(*inputs, **options)
        return out + options["isometry"].table.sum() if options["isometry"] and options["causal"] == causal else out

    assert laws.check(isopos.rope(8, 2)).holds
    monkeypatch.setattr(checks, "linear_attention", attend)
    assert laws.check(isopos.rope(8, 2)).broken == ["attention"]


def test_positions_that_change_nothing_are_found(monkeypatch):
    assert laws.check(isopos.horn_constrained(8, 2, feature_map="favor")).holds
    scheme = isopos.horn_constrained(8, 2, feature_map="favor")
    monkeypatch.setattr(problem, "undivided", lambda phi: phi)  # scales drown what is added
    assert laws.check(scheme).broken == ["seen"]
    assert laws.check(isopos.t5(8, 2))["seen"].holds, "tables that start at zero are seen by what they learn"


class _Noting(_Broken):
    """An encoding that records the largest position of each call."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def forward(self, x, dtype=torch.float32):
        self.asked.append(x.abs().max().item())
        return self.inner(x, dtype)


def test_exactness_is_measured_at_a_million_and_as_far_as_is_promised():
    noting = _Noting()
    assert laws.check(noting)["exact"].holds
    assert max(noting.asked) < 2**31
    assert any(far > 2**31 - 4000 for far in noting.asked)
    assert any(10**6 < far < 2**21 for far in noting.asked)


@each(("size", "change", "holds"), [(1e6, 1e-6, True), (1e6, 1e-1, False), (1e-6, 1e-10, True), (1e-2, 1e-5, False)])
def test_a_change_is_one_of_large_numbers_or_of_one(size, change, holds):
    """The tolerance is relative for large scores and absolute for scores below 1."""
    from isopos.laws import checks

    here, shift = torch.full((1, 2), size, dtype=torch.float64), torch.zeros(1, 1)
    found = checks._unmoved("law", "a score", [(here, here + change)], (), shift, x=torch.zeros(2, 1))
    assert found.holds == holds


@each("row", [0, -1])
def test_positions_that_count_from_a_token_of_the_call_are_found(row):
    class Counting(encodings.Rotary):
        def forward(self, x, dtype=torch.float32):
            return super().forward(x - x[..., row, None, :], dtype)

    assert "batch" in isopos.laws.check(Counting(torch.rand(1, 1, 4))).broken


@each("extreme", [isopos.wire(8, 2, axes=64), isopos.xpos(8, 2, length=1e300)])
def test_extreme_options_are_measured(extreme):
    """A grid of 64 axes, of which a side of 2 has 2^64 positions, and positions up to a limit beyond int64."""
    assert isopos.laws.check(extreme).holds


def test_scores_that_are_not_numbers_hold_nothing():
    class Powers(isopos.encodings.Encoding):
        def __init__(self):
            super().__init__()
            self.group, self.features, self.out_features = isopos.positions.Line(), 8, 8

        def forward(self, x, dtype=torch.float32):
            angle = (x.double() ** 1.1)[..., None, :, :] * torch.ones(4, dtype=torch.float64)  # NaN below zero
            return isopos.maps.Rotation(torch.stack((angle.cos(), angle.sin()), -1).to(dtype))

    report = isopos.laws.check(Powers())
    found = {finding.name: finding for finding in report.findings}
    assert not found["directional"].holds
    assert found["directional"].note == "scores are not numbers"
    assert "relative" in report.broken
