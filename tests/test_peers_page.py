"""Test that docs/peers.md equals its command's output up to rounding errors. test_oracles.py runs its comparisons."""

import pytest
import torch

import isopos
from benchmarks import peers_page
from isopos.catalog import CATALOG

PAGE = peers_page.ROOT / "docs" / "peers.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="docs/ is part of the repository only")


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_committed_page_has_every_comparison_with_its_reason():
    head, tail = PAGE.read_text(encoding="utf-8").split("## By formula")
    rows = [cells(line) for line in head.splitlines() if line.startswith("| `")]
    expected = [peers_page.row(one, "") for one in peers_page.ordered()]
    assert [(*row[:3], "", row[4]) for row in rows] == expected
    for row, one in zip(rows, peers_page.ordered(), strict=True):
        assert float(row[3]) > 1e-3 if one.differs else float(row[3]) < one.bound
    formulas = [cells(line) for line in tail.splitlines() if line.startswith("| `")]
    assert [row[0] for row in formulas] == [f"`{name}`" for name in CATALOG]
    assert all(row[3].startswith("- (") or float(row[3]) < 1e-12 for row in formulas)


def test_what_is_larger_than_rounding_has_a_reason():
    for one in peers_page.COMPARISONS:
        assert bool(one.why or one.differs) == (one.bound > 1e-12 or bool(one.differs)), one


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_a_wrong_formula_shows(attention, monkeypatch):
    scheme = isopos.rope(16, 2, attention=attention)
    assert peers_page.by_formula(scheme) < 1e-13
    other = isopos.rope(16, 2, attention=attention, base=9000.0)
    canonical = peers_page.canonical
    monkeypatch.setattr(peers_page, "canonical", lambda _: canonical(other))
    assert peers_page.by_formula(scheme) > 1e-3


def test_a_difference_is_relative_to_large_values_only():
    assert peers_page.error(torch.tensor([3.0]), torch.tensor([4.0])) == 0.25
    assert peers_page.error(torch.tensor([0.0]), torch.tensor([0.5])) == 0.5
