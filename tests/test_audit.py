"""Test the audit of torch modules: reports, every layer fault of faults.py, sound layers, and the command line."""

import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import faults
import pytest
import torch
from rich.console import Console

import isopos
from isopos.audit import CHECKS, Finding, Report, Unmeasured, audit, check
from isopos.audit.checks import compared
from isopos.audit.declared import declared_factor, declared_frequencies, diagnosis
from isopos.audit.learning import _dead
from isopos.audit.report import merged
from isopos.audit.subject import Skip, Subject, relative_error
from isopos.encodings import rope_frequencies

BROKEN = {  # all that an audit finds of each fault, and no more
    "a batch keeps the first sample's positions": "positions",
    "interleaved table, half rotation": "shift, left padding, precision",
    "keys are not rotated": "shift, left padding, precision",
    "keys turn the other way": "shift, left padding, precision",
    "positions in the dtype of activations": "precision",
    "a table that ends early": "shift, precision",
    "positions accepted and ignored": "positions",
    "frequencies go by the longest sample": "batch, packing",
    "angles divided by the padded length": "left padding, right padding, batch, packing",
    "a convolution runs over packed samples": "left padding, padding content, packing",
    "packed samples attend to each other": "packing",
    "padding counts in the denominator": "left padding, padding content, packing",
    "a mask that only weakens": "left padding, right padding, batch, padding content",
    "learned frequencies without a gradient": "gradient",
    "one head's frequencies serve all": "gradient",
    "no positions in an encoder": "positions, order, direction",
    "scores are even in the offset": "direction",
}
OTHER = [  # results of every layer but for those of what it is
    ("meta device", "outputs are the same after to_empty and load_state_dict"),
    ("encoding", "an encoding of a known family"),
    ("shift", "positions + 37 give the same outputs up to rounding"),
    ("positions", "two samples of a batch keep separate positions"),
    ("positions", "other positions give other outputs"),
    ("left padding", "a left-padded sample gives what it gives alone, positions counted from the first real token"),
    ("left padding", "a left-padded sample gives what it gives alone, positions left to the model"),
    *2 * [("right padding", "a right-padded sample gives what it gives alone")],
    *(("batch", f"sample {n} of 3 gives what it gives alone") for n in (1, 2, 3)),
    ("padding content", "two paddings give the same outputs"),
    ("padded rows", "a row of padding alone leaves the other rows as they are"),
    ("padded rows", "NaN in padded positions stays there"),
    ("precision", "bfloat16 at positions + 1024 is as exact as near zero"),
    ("precision", "float16 at positions + 1024 is as exact as near zero"),
]
PACKED = [
    ("packing", "samples in one row, positions restarting, give what they give alone"),
    ("packing", "a mask of ones changes nothing of that"),
]
WHOLE = {
    faults.Rope: OTHER + PACKED,
    faults.Encoder: [
        *OTHER,
        ("order", "permuted tokens give other outputs"),
        ("direction", "reversed tokens give other outputs"),
    ],
    faults.Learned: [*OTHER, *PACKED, ("gradient", "a finite gradient reaches every head")],
}
NO_TABLE = "no rotary module with declared parameters was found"
TABLES = ("frequencies", "attention factor", "tables", "far positions", "autocast", "order of calls", "casts")
LACKING = dict.fromkeys(TABLES, NO_TABLE) | {
    "layout": "it needs text, and got none",
    "saving": "it has no save_pretrained",
    "order": "it is causal",
    "direction": "it is causal",
    "decoding": "its call keeps no keys and values",
    "chunked prefill": "its call keeps no keys and values",
    "static cache": "it has no static cache",
    "beam reorder": "its call keeps no keys and values",
    "generation": "it does not generate",
    "packing": "it is not causal",
    "gradient": "no parameter named after frequencies, rotations or biases of positions was found",
}
SOURCE = re.compile(r"[\w.-]+(/[\w.-]+)?(#\d+)?$")


@pytest.mark.parametrize("fault", faults.LAYERS, ids=lambda fault: fault.name)
def test_the_fault_of_a_layer_is_named(fault):
    report = audit(**fault.make())
    hits = [a for a in report.findings if a.check == fault.check and a.severity == "broken"]
    assert hits, report
    assert any(fault.words in a.measured for a in hits), hits
    assert not report.sound
    assert report.status == 1
    assert report.broken == tuple(BROKEN[fault.name].split(", "))
    assert report.verdict == f"{report.subject}: positions are BROKEN: {BROKEN[fault.name]}"
    assert all(a.remedy and a.line for a in report.findings if a.severity == "broken")
    assert all(a.severity == "broken" or (a.check, a.severity) == ("padded rows", "note") for a in report.findings)


@pytest.mark.parametrize("cls", [faults.Rope, faults.Encoder, faults.Learned])
def test_a_sound_layer_is_called_sound(cls):
    report = audit(**faults.layer(cls))
    assert report.sound, report
    assert [(a.check, a.severity, a.measured) for a in report.findings] == [
        ("padded rows", "note", "it reaches other tokens")
    ]
    assert [(a.check, a.expected.partition(" (")[0]) for a in report.results] == WHOLE[cls]
    left_out = {a.check: a.reason for a in report.unmeasured}
    assert left_out == {name: LACKING[name] for name in CHECKS if name not in {check for check, _ in WHOLE[cls]}}
    assert not any(a.failed for a in report.unmeasured)
    assert report.verdict == f"{cls.__name__}: positions are sound ({len(WHOLE[cls])} results, 1 note)"


def test_faults_have_names_sources_and_checks():
    known = faults.LAYERS + faults.MODELS + faults.HELD
    assert len({fault.name for fault in known}) == len(known)
    for fault in known:
        assert not fault.source or SOURCE.match(fault.source), fault
        assert not fault.check or fault.check in CHECKS, fault


@pytest.mark.parametrize("name", ["rope", "alibi", "t5", "xpos", "none"])
def test_layers_of_isopos_are_sound(name):
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
    assert report.findings[0].where.startswith("second (SegmentsIgnored, relative difference ")
    curves = dict(report.findings[0].curves)
    errors = [error for _, error in curves["outputs"]]
    assert max(errors[:4]) < 1e-9
    assert max(errors[4:7]) > 1e-3 < max(errors[7:])


def test_modules_that_return_weights_of_attention_hide_no_leak():
    class Dropped(faults.SegmentsIgnored):
        def __init__(self):
            super().__init__()
            self.dropout = torch.nn.Dropout(0.1)

        def weighted(self, scores, allowed, v):
            return self.dropout(scores.masked_fill(~allowed, -torch.inf).softmax(-1)) @ v

    report = audit(Dropped(), example=torch.randn(1, 12, 16), checks=["packing"])
    assert report.broken == ("packing",)
    assert not [one for one in report.unmeasured if one.failed]


@pytest.mark.parametrize("count", [20, 512])
def test_tables_may_end(count):
    """A table of so many positions is an error in the model's code beyond; it is measured within."""

    class Table(faults.Rope):
        def angles(self, positions, x, mask):
            return (torch.arange(count)[:, None, None].double() * self.frequency.double())[positions].movedim(2, 1)

    report = audit(Table(), example=torch.randn(1, 12, 16), relative=True)
    assert report.sound, report
    assert not [one for one in report.unmeasured if one.failed]


def test_a_bias_of_distances_alone_is_no_fault_in_both_directions():
    scheme = isopos.alibi(8, 2, attention="softmax")

    def call(layer, x, positions=None, mask=None):
        positions = torch.arange(x.shape[1]) if positions is None else positions
        return layer(x, scheme.at(positions[..., None]), mask=mask)

    report = audit(isopos.Attention(16, scheme), call, torch.randn(1, 12, 16), relative=True)
    assert report.sound, report
    assert [(a.check, a.severity) for a in report.findings if a.check == "direction"] == [("direction", "note")]


def test_every_layer_that_leaks_is_named_not_only_the_first():
    class Three(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([faults.SegmentsIgnored(), faults.Rope(), faults.ConvolutionLeaks()])

        def forward(self, x, segments=None, positions=None):
            for layer in self.layers:
                x = layer(x, positions, None, segments)
            return x

    (found,) = audit(Three(), example=torch.randn(1, 12, 16), checks=["packing"]).findings
    first, second = found.where.split(" and ")
    assert first.startswith("layers.0 (SegmentsIgnored, relative difference ")
    assert second.startswith("layers.2 (ConvolutionLeaks, relative difference ")
    assert [name for name, _ in found.curves] == ["outputs", "layers.0", "layers.1", "layers.2"]
    assert max(error for _, error in dict(found.curves)["layers.1"]) < 1e-12


def test_what_padding_and_the_meta_device_leave_is_named():
    class OneScale(faults.Rope):  # as of activations that are quantised with one scale for a tensor
        def allowed(self, b, t, mask, segments):
            return super().allowed(b, t, mask, segments) & (True if mask is None else mask[:, None, None])

        def weighted(self, scores, allowed, v):
            y = super().weighted(scores, allowed, v)
            return y / y.detach().abs().amax() if y.isnan().all((1, 2, 3)).any() else y

    class Zeroed(faults.Rope):
        def forward(self, x, positions=None, mask=None, segments=None):
            return super().forward(x if mask is None else x.where(mask[..., None], 0), positions, mask, segments)

    class Forgets(faults.Rope):
        def __init__(self):
            super().__init__()
            self.register_buffer("frequency", self.frequency, persistent=False)

    found = {
        cls: [
            (a.severity, a.where, a.measured)
            for a in audit(**faults.layer(cls), checks=["meta device", "padded rows"]).results
        ]
        for cls in (OneScale, Zeroed, Forgets)
    }
    assert found[OneScale][1] == ("broken", "", "outputs are not finite")
    assert found[Zeroed][2] == ("sound", "", "it does")
    assert found[Forgets][0] == ("risk", "", "frequency stays empty")
    assert [a[0] for a in found[Zeroed]] == 3 * ["sound"]


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


def test_numbers_that_are_not_finite_are_no_json_numbers():
    curves = (("layer 0", (0.5, float("inf"), float("nan"))),)
    said = Report("m", (Finding("a", "1", "broken", curves=curves, check="mask"),), ()).to_dict()
    assert json.loads(json.dumps(said, allow_nan=False))["results"][0]["curves"] == [["layer 0", [0.5, None, None]]]


def test_a_report_in_full():
    report = Report(
        "m",
        (
            Finding("a", "1", "sound", check="batch"),
            Finding("b", "2", "note", "in [x]", check="shift"),
            Finding("c", "3", "risk", "", "cast later", "some/one#1", check="casts"),
            Finding("d", "4", "broken", "y", "mend it", "some/one#2", check="order"),
            Finding("e", "5", "sound", check="order"),
            Finding("f", "6", "note", check="tables"),
        ),
        (Unmeasured("packing", "it is not causal", False), Unmeasured("saving", "OSError: full", True)),
    )
    assert (
        str(report)
        == """m: positions are BROKEN: order
  broken: order at y
    expected: d
    measured: 4
    remedy: mend it
    issue: some/one#2
  risk: casts
    expected: c
    measured: 3
    remedy: cast later
    issue: some/one#1
  note: shift at in [x]
    expected: b
    measured: 2
  note: tables
    expected: f
    measured: 6
  sound: batch
  not measured: packing: it is not causal
  failed: saving: OSError: full"""
    )
    head = [" severity  check  expected  measured  where   remedy", "-"]
    broken, risk, first, second, sound, other = (
        "broken order d 4 y mend it (some/one#2)",
        "risk casts c 3 cast later (some/one#1)",
        "note shift b 2 in [x]",
        "note tables f 6",
        "sound batch a 1",
        "sound order e 5",
    )
    for whole, rows in ((False, [broken, risk, first, second]), (True, [broken, risk, first, second, sound, other])):
        console = Console(record=True, width=150)
        report.show(console, whole)
        lines = [" ".join(re.sub("[│┃]", " ", line).split()) for line in console.export_text().splitlines()]
        lines = [line for line in lines if line and line[0].isascii()]
        ends = ["not measured: packing: it is not causal", "failed: saving: OSError: full"]
        expected = [report.verdict, " ".join(head[0].split()), *rows, *["sound: batch"] * (not whole), *ends]
        assert lines == expected
    calm = Report("m", report.results[:3])
    assert calm.verdict == "m: positions are sound (3 results, 1 risk, 1 note)"
    assert (
        Report("m", (*calm.results[1:], *calm.results[1:])).verdict == "m: positions are sound (4 results, 2 risks, 2 notes)"
    )
    assert Report("m", ()).verdict == "m: positions could not be measured: no check of positions applies"
    assert report.to_dict() == {
        "subject": "m",
        "sound": False,
        "status": 1,
        "verdict": report.verdict,
        "results": [vars(a) for a in report.results],
        "unmeasured": [vars(a) for a in report.unmeasured],
    }
    failed = merged("two", [("encoder", Report("e", (), report.unmeasured)), ("decoder", Report("d", calm.results[:1]))])
    assert failed.status == 3
    assert failed.verdict == "two: positions could not be measured: saving"
    assert [(a.reason, a.failed) for a in failed.unmeasured] == [
        ("encoder: it is not causal", False),
        ("encoder: OSError: full", True),
    ]


def test_a_comparison_is_up_to_measured_rounding():
    subject = SimpleNamespace(tolerance=1e-2, rounding=1e-4)
    one = torch.ones(1, 2, 3)
    for difference, slack, severity in (
        (9e-3, 1, "sound"),
        (1.1e-2, 1, "broken"),
        (1.9e-2, 2, "sound"),
        (2.1e-2, 2, "broken"),
    ):
        found = compared(
            subject,
            one + difference,
            one,
            "equal",
            slack=slack,
            remedy="r",
            issue="i",
            fault=lambda: ("y", (("layer", ()),)),
        )
        measured = f"relative difference {difference:.1e}, rounding 1e-04"
        assert [name for name, _ in found.curves] == ["outputs", "layer"][: 1 + (severity == "broken")]
        broken = Finding("equal", measured, "broken", "y", "r", "i")
        assert replace(found, curves=()) == (broken if severity == "broken" else Finding("equal", measured, "sound"))
    for got, expected in ((one * math.nan, one), (one, one * math.inf)):
        assert compared(subject, got, expected, "equal").measured == "outputs are not finite"


@pytest.mark.parametrize(
    ("parameters", "trained", "message"),
    [
        ({"rope_type": "yarn"}, None, "expected the parameters of yarn, got no number of trained positions"),
        ({"rope_type": "llama3", "factor": 8.0}, 8, "expected the parameters of llama3, got no 'high_freq_factor'"),
        ({"rope_type": "linear", "factor": "2"}, 8, "expected the parameters of linear, got factor: expected a number"),
    ],
)
def test_declared_parameters_that_cannot_be(parameters, trained, message):
    with pytest.raises(ValueError, match=message):
        declared_frequencies(parameters | {"rope_theta": 100.0}, 4, trained)


def test_one_check_is_chosen_by_its_name():
    one, some = (isopos.audit(torch.nn.Linear(4, 4), example=torch.ones(1, 12, 4), checks=a) for a in ("shift", ["shift"]))
    assert str(one) == str(some)


@pytest.mark.parametrize(("limit", "shift"), [(None, 37), (12, 0), (24, 0), (25, 1), (50, 26), (61, 37), (4096, 37)])
def test_a_shift_stays_within_the_positions_of_a_model(limit, shift):
    subject = Sums(torch.nn.Embedding(9, 4), "sums", limit=limit)
    assert subject.shift == shift
    subject.rounding = 1e-2
    with pytest.raises(Skip, match=r"rounding changes its outputs by 1.0e-02, so that nothing can be told from it"):
        assert subject.tolerance
    subject.rounding = 1e-4
    assert subject.tolerance == pytest.approx(32e-4)


class Sums(Subject):
    """A model of position-weighted cumulative sums. Each fault affects one way of calling it."""

    fault = ""

    def tokens(self, rows, count, seed=0):
        return torch.randint(9, (rows, count), generator=torch.Generator().manual_seed(seed))

    def call(self, module, tokens, positions=None, mask=None):
        x = torch.arange(tokens.shape[1]).expand(tokens.shape) if positions is None else positions.expand(tokens.shape)
        if mask is not None and self.fault != "mask":
            tokens = tokens.where(mask, 0)
        weight = module.weight.index_fill(0, torch.tensor(0), 0)[tokens]  # token 0 is nothing
        return (weight / (x[..., None] + 1)).cumsum(1)

    def stream(self, chunks, kind="dynamic", order=None):
        outputs, count, total = [], 0, 0
        for n, chunk in enumerate(chunks):
            if order is not None and n == len(chunks) - 1 and self.fault != "order":
                total = total[order]
            restarts = {"chunks": chunk.shape[1] > 1, "static": kind == "static", "late": count >= 7}.get(self.fault, False)
            y = total + self.call(self.exact, chunk, torch.arange(chunk.shape[1]) + (0 if restarts else count))
            outputs, count, total = [*outputs, y], count + chunk.shape[1], y[:, -1:]
        return torch.cat(outputs, 1)

    def generated(self, tokens, mask, count):
        x = (mask.long().cumsum(-1) - 1).clamp_min(0)
        found = []
        for _ in range(count):
            found.append(self.call(self.exact, tokens, x, mask)[:, -1])
            following = x[:, -1:] + 1 if self.fault != "shared" else (x[:, -1:] + 1).amax(0).expand(len(x), 1)
            tokens, x = torch.cat((tokens, 1 + found[-1].argmax(-1)[:, None]), 1), torch.cat((x, following), 1)
            mask = torch.cat((mask, mask[:, -1:]), 1)
        return torch.stack(found, 1)

    def packed(self, tokens, lengths, masked=False):
        parts = [self.call(self.exact, part) for part in tokens.split(lengths, 1)]
        if self.fault == "leak" or (self.fault == "masked" and masked):
            parts[-1] = parts[-1] + 0.1 * parts[-2][:, -1:]
        return torch.cat(parts, 1)


STREAMS = {
    "": {},
    "chunks": {
        "chunked prefill": ("broken", "from token 5 on"),
        "beam reorder": ("broken", ""),
    },
    "late": {
        "decoding": ("broken", "from token 7 on"),
        "chunked prefill": ("broken", "from token 8 on"),
        "static cache": ("broken", "from token 7 on"),
        "beam reorder": ("broken", ""),
    },
    "static": {"static cache": ("broken", "from token 5 on")},
    "order": {"beam reorder": ("broken", "")},
    "shared": {"generation": ("broken", "")},
    "leak": {"packing": ("broken", "")},
    "masked": {"packing": ("risk", "")},
    "mask": dict.fromkeys(("left padding", "padding content", "generation"), ("broken", "")),
}


@pytest.mark.parametrize("fault", STREAMS)
def test_what_is_wrong_with_a_stream_is_named_and_where_it_begins(fault):
    torch.manual_seed(0)
    abilities = frozenset({"cache", "causal", "static", "generate", "packing", "mask", "positions"})
    subject = Sums(torch.nn.Embedding(9, 9), "sums", abilities, is_relative=False, encoding="absolute table wpe")
    subject.fault = fault
    report = audit(subject)
    found = {a.check: (a.severity, a.where) for a in report.findings if a.check != "shift"}
    assert found == STREAMS[fault]
    assert [(a.check, a.severity) for a in report.results if a.check == "shift"] == [("shift", "note")]
    left_out = {a.check for a in report.unmeasured}
    assert left_out >= {"order", "direction", "saving", "precision", "gradient"}
    assert not any(a.failed for a in report.unmeasured), report
    subject.limit = 15
    report = audit(subject, checks=["positions", "generation", "left padding", "shift", "padding content"])
    assert {a.check: a.reason for a in report.unmeasured} == {
        "generation": "it has 15 positions only",
        "shift": "its 15 positions leave no room for a shift",
        "left padding": "it has 15 positions only",
        "padding content": "it has 15 positions only",
        "positions": "it has 15 positions only",
    }


@pytest.mark.parametrize(
    ("encoding", "relative", "severity"),
    [
        ("unknown", None, "note"),
        ("rotary", None, "broken"),
        ("absolute table wpe", False, "broken"),
        ("ALiBi", True, "broken"),
    ],
)
def test_positions_that_are_ignored_are_a_fault_where_something_tells(encoding, relative, severity):
    class Ignoring(Sums):
        def call(self, module, tokens, positions=None, mask=None):
            return super().call(module, tokens, None, mask)

    abilities = frozenset({"causal", "positions"})
    subject = Ignoring(torch.nn.Embedding(9, 9), "sums", abilities, is_relative=relative, encoding=encoding)
    report = audit(subject, checks=["positions"])
    assert [(a.severity, a.where) for a in report.results] == [("sound", ""), (severity, encoding)]


class OtherNames(torch.nn.Module):
    """A model of token ids with unusual argument names, tuple outputs, and dropout."""

    def __init__(self):
        super().__init__()
        self.table, self.layer, self.dropout = torch.nn.Embedding(9, 16), faults.Rope(), torch.nn.Dropout(0.5)

    def forward(self, tokens, position_ids=None, attention_mask=None, segment_ids=None):
        return self.dropout(self.layer(self.table(tokens), position_ids, attention_mask, segment_ids)), None


def test_a_module_of_tokens_with_other_names_is_measured_as_well():
    report = audit(OtherNames().train(), example=torch.arange(9).repeat(4)[None], relative=True)
    assert report.sound, report
    nan = ("padded rows", "NaN in padded positions stays there")  # of features alone
    assert [(a.check, a.expected.partition(" (")[0]) for a in report.results] == [a for a in WHOLE[faults.Rope] if a != nan]
    halved = {"model": faults.Rope().half(), "example": torch.randn(1, 40, 16), "checks": ["shift", "batch"]}
    assert [a.severity for a in audit(**halved, relative=True).results] == ["sound"] * 4
    rotary = type("RotaryLayer", (faults.KeysUnrotated,), {})
    assert audit(torch.nn.Sequential(rotary()), example=torch.randn(1, 12, 16), checks=["batch"]).unmeasured
    outer = type("Outer", (faults.KeysUnrotated,), {})()
    outer.rope = rotary()  # by whose name it is relative
    for relative, status in ((None, 1), (False, 0), (True, 1)):
        assert audit(outer, example=torch.randn(1, 12, 16), checks=["shift"], relative=relative).status == status


def test_a_gradient_in_words():
    def dead(grad, name="freq", heads=2):
        parameter = torch.nn.Parameter(torch.zeros(grad.shape))
        parameter.grad = grad
        return _dead(name, parameter, heads)

    one, first = torch.ones(2, 3), torch.tensor([[1.0, 0, 0], [0, 0, 0]])
    assert _dead("freq", torch.nn.Parameter(one), 2) == dead(0 * one) == "no gradient at all"
    assert dead(one) == dead(first, heads=7) == dead(torch.ones(2)) == dead(first, "bias", None) == ""
    assert dead(first) == dead(first, heads=None) == dead(torch.tensor([1.0, 0])) == "no gradient in head 1"
    assert dead(first.T, heads=2) == "no gradient in head 1"
    assert dead(torch.eye(5)[2:3].T, heads=5) == "no gradient in head 0, 1, 3, 4"


@pytest.mark.parametrize(
    ("name", "positional"),
    [("property_emb", False), ("angle", True), ("rotary_emb", True), ("inv_freq", True), ("block_slopes", True)],
)
def test_parameters_are_positional_by_the_words_of_their_names(name, positional):
    class Named(faults.Rope):
        def __init__(self):
            super().__init__()
            self.register_parameter(name, torch.nn.Parameter(torch.ones(7, 16)))

    (reason,) = audit(Named(), example=torch.randn(1, 12, 16), checks=["gradient"]).unmeasured or (None,)
    assert (reason is None) == positional


def test_a_gradient_that_is_not_finite_is_named():
    class Infinite(faults.Learned):
        def angles(self, positions, x, mask):
            zero = (self.frequency - self.frequency.detach()).flatten()[0]  # of one number of them
            return super().angles(positions, x, mask) + 0 * zero.sqrt()

    report = audit(**faults.layer(Infinite), checks=["gradient"])
    assert [(a.measured, a.where) for a in report.findings] == [("a gradient is not finite", "frequency")]


def test_a_custom_check():
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
    assert declared_frequencies(plain, 4, None).tolist() == [1.0, 0.1]
    proportional = plain | {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0}
    assert declared_frequencies(proportional, 8, None).tolist() == [0.5, 0.5 * 100**-0.25, 0, 0]
    dynamic = plain | {"rope_type": "dynamic", "factor": 2.0}
    assert declared_frequencies(dynamic, 8, 64, 64).equal(declared_frequencies(plain, 8, None))
    assert declared_frequencies(dynamic, 8, 64, 128)[-1] == pytest.approx(100**-0.75 / 3)
    yarn = plain | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert declared_factor(yarn, 256) == pytest.approx(0.1 * math.log(4) + 1)
    assert declared_factor(yarn | {"mscale": 1.0, "mscale_all_dim": 1.0}, 256) == 1
    assert declared_factor(plain, 256) == 1
    factors = {"short_factor": [1.0, 1.0], "long_factor": [1.0, 4.0], "original_max_position_embeddings": 64}
    longrope = [declared_frequencies(plain | factors | {"rope_type": "longrope"}, 4, 256, t).tolist() for t in (0, 64, 65)]
    assert longrope == [[1.0, 0.1], [1.0, 0.1], [1.0, 0.025]]  # the trained length itself is a short one
    with pytest.raises(ValueError, match=r"rope_type: expected one of default, .*, got 'swirl'"):
        declared_frequencies(plain | {"rope_type": "swirl"}, 4, None)


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
        (lambda w: w * 1.001, "the declared frequencies within 1e-03, rounded on the way"),
        (
            lambda w: rope_frequencies(3, 500.0),
            "6 features rotate of the declared base, 8 are declared: the partial share or",
        ),
        (lambda w: torch.cat((w / 4 * 1.0, w[:0])), "frequencies of base 500, divided by 8"),
    ],
)
def test_a_diagnosis_in_words(own, words):
    parameters = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
    assert words in diagnosis(own(declared_frequencies(parameters, 8, None)), parameters, 8, None)


def test_a_diagnosis_of_another_factor():
    parameters = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    parameters["original_max_position_embeddings"] = 64
    for factor in (4, 32):
        own = declared_frequencies(parameters | {"factor": float(factor)}, 16, 64)
        assert diagnosis(own, parameters, 16, 64) == f"the declared type with factor {factor}"


MINE = """
import torch, faults
def sound(): return faults.layer(faults.Rope)
def broken(): return faults.KeysUnrotated(), None, torch.zeros(1, 12, 16), True
def causal(): return faults.Encoder(), None, torch.randn(1, 12, 16), True, True
def absolute(): return faults.KeysUnrotated(), None, torch.randn(1, 12, 16), False, True
def subject(): return dict(model=faults.KeysUnrotated(), example=torch.randn(1, 12, 16))
def raises(): raise KeyError("mine")
def needs(size): return size
def nothing(): return None
def other(): return dict(model=faults.KeysUnrotated(), size=1)
def runs():
    class Raises(faults.Rope):
        def angles(self, positions, x, mask):
            if mask is not None and not mask.all():
                raise RuntimeError()
            return super().angles(positions, x, mask)
    return faults.layer(Raises)
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
    for name, checks, severities in (
        ("causal", "packing,order", ["sound", "sound"]),  # as it is told, without a result of order
        ("absolute", "shift", ["note"]),
        ("subject", "shift", ["note"]),
        ("broken", "shift", ["broken"]),
    ):
        found = json.loads(isopos("audit", f"mine_audited:{name}", "--checks", checks, "--json")[1])
        assert [a["severity"] for a in found["results"]] == severities, name
    found = json.loads(isopos("audit", "mine_audited:runs", "--checks=right padding", "--json")[1])
    assert found["unmeasured"] == [{"check": "right padding", "reason": "RuntimeError: ", "failed": True}]
    code, out, _ = isopos("audit", "mine_audited:broken", "--json")
    assert code == json.loads(out)["status"] == 1
    page = tmp_path / "page.html"
    isopos("audit", "mine_audited:broken", "--checks", "shift", "--html", str(page))
    html = page.read_text()
    assert "<h1>KeysUnrotated: positions are BROKEN: shift</h1>" in html
    assert "<h3>shift: positions + 37 give the same outputs up to rounding (broken)</h3>" in html
    assert html.count("<svg") == 1
    code, out, err = isopos("audit", "mine_audited:broken", "--html", str(tmp_path / "no" / "page.html"))
    assert (code, out) == (2, "")
    assert "html: expected a file in a folder that exists" in err
    (tmp_path / "latin").write_bytes(b"\xff")
    assert "latin: 'utf-8' codec" in isopos("audit", "mine_audited:broken", "--text", str(tmp_path / "latin"))[2]
    code, _, err = isopos("audit", "mine_audited:broken", "--text", str(tmp_path / "mine_audited.py"))
    assert code == 2
    assert "text: expected tokens [b t] for a model without a folder" in err
    code, out, _ = isopos("audit", "mine_audited:raises")
    assert code == 3
    assert "KeyError: 'mine'" in out
    for argument, message in (
        ("nowhere", "model: expected a folder with config.json, or MODULE:FUNCTION, got 'nowhere'"),
        (str(tmp_path), "model: expected a folder with config.json, got"),
        ("mine_audited:absent", "model: expected mine_audited to have a function absent, got None"),
        ("mine_audited:needs", "model: expected needs without arguments, got missing a required argument: 'size'"),
        ("mine_audited:nothing", "model: expected nothing to return a model, got NoneType"),
        ("mine_audited:other", "model: expected other to return model, call, example, relative, causal or text, got 'size'"),
    ):
        code, _, err = isopos("audit", argument)
        assert code == 2
        assert message in err


def test_a_module_without_positions_is_not_called_sound():
    report = isopos.audit(torch.nn.Linear(3, 3), example=torch.randn(1, 3))
    assert (report.status, report.sound) == (3, False)
    assert report.verdict == "Linear: positions could not be measured: no check of positions applies"
