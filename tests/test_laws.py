import pytest
import torch
from cases import ENCODINGS, SCHEMES

import isopos
from isopos import encodings, isometries, laws


@pytest.mark.parametrize("case", SCHEMES, ids=lambda case: case.id)
def test_every_scheme_obeys_what_it_promises(case):
    report = laws.check(case.build())
    assert report.broken == ([] if case.relative else ["attention"]), report


@pytest.mark.parametrize("case", ENCODINGS, ids=lambda case: case.id)
def test_every_encoding_obeys(case):
    assert laws.check(case.make).holds


class _Broken(encodings.Encoding):
    """A rotation by the square of the position: isometric, not relative."""

    def __init__(self):
        super().__init__()
        self.inner = encodings.Rotary(torch.full((1, 1, 2), 1e-3))
        self.group, self.features, self.out_features = self.inner.group, 4, 4

    def forward(self, x, dtype=torch.float32):
        return self.inner(x**2, dtype)


class _Growing(_Broken):
    """Scaled by the position: not an isometry."""

    def forward(self, x, dtype=torch.float32):
        return isometries.Chain(self.inner(x, dtype), isometries.Matrix(2 * torch.eye(4, dtype=dtype)[None]))


class _Dead(_Broken):
    """With a parameter that nothing uses."""

    def __init__(self):
        super().__init__()
        self.unused = torch.nn.Parameter(torch.ones(2, 3))

    def forward(self, x, dtype=torch.float32):
        return self.inner(x, dtype)


class _Headless(_Broken):
    """Tables without an axis of heads."""

    def forward(self, x, dtype=torch.float32):
        rho = self.inner(x, dtype)
        return isometries.Rotation(rho.table.squeeze(-4))


class _TokenMatrix(_Broken):
    """A matrix a token, whose tokens stand where heads belong."""

    def forward(self, x, dtype=torch.float32):
        return isometries.Matrix(torch.eye(4, dtype=dtype).expand(*x.shape[:-1], 4, 4))


class _OneAxis(_Dead):
    """With a parameter of one axis that is used."""

    def __init__(self):
        super().__init__()
        self.unused = torch.nn.Parameter(torch.ones(2))

    def forward(self, x, dtype=torch.float32):
        angle = x.double()[..., None, :, :] * self.unused.double()
        return isometries.Rotation(torch.stack((angle.cos(), angle.sin()), -1).to(dtype))


def test_a_parameter_of_one_axis_is_measured():
    assert laws.check(_OneAxis).holds


def test_an_encoding_that_does_not_say_what_it_is_is_refused():
    class Silent(_Broken):
        def __init__(self):
            encodings.Encoding.__init__(self)

    with pytest.raises(ValueError, match="group, features, out_features"):
        laws.check(Silent)


@pytest.mark.parametrize(
    ("broken", "law"),
    [(_Headless, "batch"), (_TokenMatrix, "batch"), (_Broken, "relative"), (_Growing, "isometry"), (_Dead, "gradient")],
)
def test_a_broken_encoding_is_found(broken, law):
    report = laws.check(broken)
    assert law in report.broken
    assert "BROKEN" in str(report)
    assert ("shifted by" in str(report)) == (law == "relative")


@pytest.mark.parametrize("subject", [3, lambda: 3, torch.nn.Linear(2, 2)])
def test_what_is_no_encoding_is_refused(subject):
    with pytest.raises(TypeError):
        laws.check(subject)


def test_direction_and_positivity_are_properties_not_laws():
    unitary, rope = laws.check(isopos.lrpe_unitary(8, 2)), laws.check(isopos.rope(8, 2))
    assert unitary.holds
    assert not unitary["directional"].holds
    assert rope["directional"].holds
    assert laws.check(isopos.permuteformer(8, 2))["positive"].holds
    encoded = [laws.check(isopos.rope(2, 8, denominator="encoded"), seed=seed)["positive"].holds for seed in range(5)]
    assert not all(encoded)  # a rotated denominator at d = 2 is often negative


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("denominator", ["plain", "encoded"])
def test_a_denominator_near_zero_breaks_no_law(seed, denominator):
    scheme = isopos.rope(8, 2, denominator=denominator, feature_map="identity", decay="retnet")
    assert laws.check(scheme, seed=seed).holds


def test_lifts_side_by_side_are_not_taken_for_one():
    lifts = [encodings.Rotary(torch.rand(1, 1, 2), lift=True) for _ in range(2)]
    assert laws.check(encodings.DirectSum(lifts)).holds


def test_the_report_prints_a_line_a_finding():
    report = laws.check(isopos.rope(8, 2))
    assert len(str(report).splitlines()) == 1 + len(report.findings)
    assert "every law holds" in str(report)
