"""The audit of torch modules: reports, every fault of a layer by name, sound layers, and the command line."""

import json
import math
import re

import faults
import pytest
import torch

import isopos
from isopos.audit import CHECKS, Finding, Report, Unmeasured, audit, check
from isopos.audit.declared import attention_factor, diagnosis, frequencies
from isopos.audit.report import merged
from isopos.audit.subject import relative_error

SOURCE = re.compile(r"[\w.-]+(/[\w.-]+)?(#\d+)?$")


@pytest.mark.parametrize("fault", faults.LAYERS, ids=lambda fault: fault.name)
def test_the_fault_of_a_layer_is_named(fault):
    report = audit(**fault.make())
    hits = [a for a in report.findings if a.check == fault.check and a.severity == "broken"]
    assert hits, report
    assert any(fault.words in a.measured for a in hits), hits
    assert not report.sound
    assert report.status == 1
    assert fault.check in report.verdict


@pytest.mark.parametrize("cls", [faults.Rope, faults.Encoder, faults.Learned])
def test_a_sound_layer_is_called_sound(cls):
    report = audit(**faults.layer(cls))
    assert report.sound, report
    assert not report.findings
    assert "positions are sound" in report.verdict


def test_faults_have_names_sources_and_checks():
    known = faults.LAYERS + faults.MODELS + faults.HELD
    assert len({fault.name for fault in known}) == len(known)
    for fault in known:
        assert not fault.source or SOURCE.match(fault.source), fault
        assert not fault.check or fault.check in CHECKS, fault


@pytest.mark.parametrize("name", ["rope", "alibi", "t5", "xpos", "none"])
def test_our_own_layers_are_sound(name):
    scheme = getattr(isopos, name)(8, 2, attention="softmax")
    with torch.no_grad():
        [parameter.normal_() for parameter in scheme.parameters()]

    def call(layer, x, positions=None, mask=None):
        positions = torch.arange(x.shape[1]) if positions is None else positions
        return layer(x, scheme.at(positions[..., None]), causal=True, mask=mask)

    report = audit(isopos.Attention(16, scheme), call, torch.randn(1, 12, 16), relative=name != "none")
    assert report.sound, report


def test_positions_that_are_added_are_named_and_no_fault():
    class Added(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.table, self.layer = torch.nn.Embedding(64, 16), faults.Rope()

        def forward(self, x, positions=None):
            positions = torch.arange(x.shape[1])[None] if positions is None else positions
            return self.layer(x + self.table(positions), 0 * positions.expand(x.shape[:2]))

    report = audit(Added(), example=torch.randn(1, 12, 16), checks=["shift", "positions"], relative=False)
    assert report.sound
    assert [(a.check, a.severity) for a in report.findings] == [("shift", "note")]


def test_the_layer_that_leaks_is_named():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = faults.Rope(), faults.SegmentsIgnored()

        def forward(self, x, segments=None, positions=None):
            return self.second(self.first(x, positions, None, segments), positions, None, segments)

    report = audit(Two(), example=torch.randn(1, 12, 16), checks=["packing"])
    assert report.broken == ("packing",)
    assert report.findings[0].where.startswith("first at second ")


def test_other_projects_assert_positions():
    isopos.testing.assert_positions(**faults.layer(faults.Rope))
    with pytest.raises(AssertionError, match="KeysUnrotated: positions are BROKEN: shift"):
        isopos.testing.assert_positions(**faults.layer(faults.KeysUnrotated))


def test_what_raises_is_not_measured():
    class Raises(faults.Rope):
        def angles(self, positions, x, mask):
            if mask is not None and not mask.all():
                raise RuntimeError("no masks here")
            return super().angles(positions, x, mask)

    report = audit(**faults.layer(Raises), checks=["shift", "right padding"])
    assert report.status == 3
    assert [(a.check, a.failed) for a in report.unmeasured] == [("right padding", True)]
    assert "no masks here" in report.unmeasured[0].reason
    assert "could not be measured: right padding" in report.verdict


def test_reports():
    broken = Finding("a", "b", "broken", "x", check="shift")
    report = Report("m", (Finding("a", "a", "sound", check="batch"), Finding("a", "b", "note", check="order"), broken))
    assert [a.check for a in report.findings] == ["shift", "order"]
    assert (report.status, report.broken) == (1, ("shift",))
    assert json.loads(json.dumps(report.to_dict()))["results"][2]["where"] == "x"
    assert Report("m", ()).status == 3
    assert Report("m", report.results[:2], (Unmeasured("shift", "none", False),)).status == 0
    assert Report("m", report.results[:2], (Unmeasured("shift", "none", True),)).status == 3
    whole = merged("m", [("encoder", report), ("decoder", Report("d", (), (Unmeasured("shift", "none", True),)))])
    assert whole.results[2].where == "encoder: x"
    assert whole.unmeasured[0].reason == "decoder: none"
    assert str(whole).startswith("m: positions are BROKEN: shift")


def test_a_check_of_ones_own():
    @check("zeros", "Are outputs zero?", "causal")
    def zeros(subject):
        error = float(subject.outputs(subject.tokens(1, 4)).abs().max())
        yield Finding("0", f"{error:.1e}", "sound" if error == 0 else "broken")

    try:
        assert audit(**faults.layer(faults.Rope), checks=["zeros"]).broken == ("zeros",)
        assert audit(**faults.layer(faults.Encoder), checks=["zeros"]).unmeasured[0].reason == "it is not causal"
    finally:
        del CHECKS["zeros"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": 3}, "model: expected a folder, a model of transformers or a torch module, got int"),
        ({"model": faults.Rope()}, "example: expected tokens"),
        ({"model": faults.Rope().to("meta"), "example": torch.zeros(1, 12, 16)}, "model: expected one with values"),
        ({"model": faults.Rope(), "example": torch.zeros(1, 12, 16), "checks": ["shft"]}, "checks: expected names among"),
        (
            {"model": faults.Rope(), "call": lambda m, x: m(x).sum(-1), "example": torch.zeros(1, 12, 16)},
            r"call: expected outputs \[b t v\]",
        ),
    ],
)
def test_what_cannot_be_audited(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        audit(**options)


def test_differences_are_relative_and_see_what_is_not_finite():
    a = torch.tensor([1.0, -4.0])
    assert relative_error(a, a) == 0
    assert relative_error(torch.tensor([1.0, -3.0]), a) == 0.25
    assert relative_error(torch.tensor([math.nan, -4.0]), a) == math.inf
    with pytest.raises(ValueError, match="expected shape"):
        relative_error(a, a[:1])


def test_declared_frequencies():
    plain = {"rope_type": "default", "rope_theta": 100.0}
    assert frequencies(plain, 4, None).tolist() == [1.0, 0.1]
    proportional = plain | {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0}
    assert frequencies(proportional, 8, None).tolist() == [0.5, 0.5 * 100**-0.25, 0, 0]
    dynamic = plain | {"rope_type": "dynamic", "factor": 2.0}
    assert frequencies(dynamic, 8, 64, 64).equal(frequencies(plain, 8, None))
    assert frequencies(dynamic, 8, 64, 128)[-1] == pytest.approx(100**-0.75 / 3)
    yarn = plain | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert attention_factor(yarn, 256) == pytest.approx(0.1 * math.log(4) + 1)
    assert attention_factor(yarn | {"mscale": 1.0, "mscale_all_dim": 1.0}, 256) == 1
    assert attention_factor(plain, 256) == 1
    with pytest.raises(ValueError, match=r"rope_type: expected one of default, .*, got 'swirl'"):
        frequencies(plain | {"rope_type": "swirl"}, 4, None)


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (lambda w: w.float().bfloat16(), "rounded to bfloat16"),
        (lambda w: w.float().half(), "rounded to float16"),
        (lambda w: 0 * w, "not initialised"),
        (lambda w: w * math.nan, "not initialised"),
        (lambda w: 2 * w, "'linear' is missing"),
        (lambda w: 2 * w[:3], "6 features rotate"),
        (lambda w: torch.tensor([1, 0.1, 0.01, 0.001]), "frequencies of base 10000"),
        (lambda w: w / 4, "divided by 8"),
        (lambda w: w * torch.tensor([1.0, 1.5, 1.0, 1.2]), "1 to 1.5 times the declared"),
    ],
)
def test_a_diagnosis_in_words(own, words):
    parameters = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
    assert words in diagnosis(own(frequencies(parameters, 8, None)), parameters, 8, None)


MINE = """
import torch, faults
def sound(): return faults.layer(faults.Rope)
def broken(): return faults.KeysUnrotated(), None, torch.zeros(1, 12, 16), True
def raises(): raise KeyError("mine")
"""


def test_the_command_line(isopos, monkeypatch, tmp_path):
    (tmp_path / "mine_audited.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    code, out, _ = isopos("audit", "mine_audited:sound")
    assert code == 0
    assert out.startswith("Rope: positions are sound")
    code, out, _ = isopos("audit", "mine_audited:broken", "--checks", "shift, packing")
    assert code == 1
    assert out.startswith("KeysUnrotated: positions are BROKEN: shift")
    assert "sound: packing" in " ".join(out.split())
    assert len(isopos("audit", "mine_audited:sound", "--whole")[1].splitlines()) > 14
    code, out, _ = isopos("audit", "mine_audited:broken", "--json")
    assert code == json.loads(out)["status"] == 1
    code, out, _ = isopos("audit", "mine_audited:raises")
    assert code == 3
    assert "KeyError: 'mine'" in out
    for argument, message in (
        ("nowhere", "model: expected a folder with config.json, or MODULE:FUNCTION, got 'nowhere'"),
        (str(tmp_path), "model: expected a folder with config.json, got"),
        ("mine_audited:absent", "model: expected mine_audited to have a function absent, got None"),
    ):
        code, _, err = isopos("audit", argument)
        assert code == 2
        assert message in err
