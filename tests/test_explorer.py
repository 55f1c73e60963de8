"""Test the page `explorer`: its catalogue against the registry, and its numbers against Python."""

import itertools

import numpy as np
import pytest
import torch
from test_browser import BOTH, CHROMIUM, browser, files, looks_right, site, visit  # noqa: F401

import isopos
from isopos.attention import softmax_attention
from isopos.catalog import CATALOG
from isopos.encodings import Coupling
from isopos.lengths import EXTENSIONS, extension
from isopos.schemes import REGISTRY
from tools import explorer
from tools.pages import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / "docs").exists(), reason="docs/ is part of the repository only"),
]
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed; on Debian: apt install chromium")
DOCS = ROOT / "docs"
SCRIPTS = ("explorer-data.js", "explorer-numbers.js", "explorer-draw.js", "explorer.js")
START = {"variant": 0, "base": None, "kind": None, "decay": None}
OFFSETS = ([-1, 0, 0], [-7, 3, 0], [12, -5, 2], [-64, 0, 9])
FIXED = ("none", "rope-axial", "mrope", "clock", "horn-constrained", "permuteformer", "permuteformer-2d", "pope", "rope")
FIXED += ("p-rope", "retnet", "xpos", "jordan", "cosformer")  # whose features stand in no basis


@pytest.fixture(scope="module")
def data():
    return explorer.catalogue()


@pytest.fixture(scope="module")
def page(browser, data, tmp_path_factory):  # noqa: F811
    """The page without the site's theme, opened as a file."""
    folder, wrong, loaded = tmp_path_factory.mktemp("explorer"), [], []
    (folder / "assets").mkdir()
    for path in (DOCS / "assets").glob("explorer*"):
        (folder / "assets" / path.name).write_text(path.read_text())
    (folder / "assets" / SCRIPTS[0]).write_text(explorer.script(data))
    (folder / "explorer.html").write_text("<!doctype html><meta charset=utf-8><body>" + (DOCS / "explorer.md").read_text())
    opened = browser.new_page(viewport={"width": 390, "height": 800})
    opened.on("pageerror", lambda error: wrong.append(f"{error}"))
    opened.on("request", lambda request: loaded.append(request.url))
    opened.goto((folder / "explorer.html").as_uri())
    yield opened
    assert wrong == []
    assert {url.split("#")[0] for url in loaded} == {path.as_uri() for path in folder.rglob("*.*")}  # and nothing else


def variants(data):
    """Name, number, options and smallest size of every variant."""
    for name, entry in data["schemes"].items():
        for number, variant in enumerate(entry["variants"]):
            yield name, number, variant["options"], min(variant["sizes"])


def product(scheme, x, y, q, k):
    """<rho(x) q, rho(y) k> for each head, summed over the rows of q and k."""
    x, y = (torch.as_tensor(position).expand(1, -1) for position in (x, y))
    encoding = scheme.encoding
    at_x, at_y = (side(position, torch.float64) for side, position in ((encoding.query, x), (encoding.key, y)))
    left, right = (rho(a[:, None, None].expand(-1, scheme.heads, -1, -1)) for rho, a in ((at_x, q), (at_y, k)))
    return (left * right).sum((0, 2, 3))


def offset_of(scheme, offset):
    """An offset with as many coordinates as positions have; nodes of trees are the root."""
    leaves, x, column = scheme.group.leaves, [], 0
    for leaf in leaves:
        tree = leaf.columns == 2
        x += [-1, -1] if tree else [offset[column] if column < len(offset) else 0]
        column += leaf.columns
    return x


def test_every_scheme_is_drawn_or_has_a_reason(data):
    assert set(data["schemes"]) | set(data["missing"]) == set(CATALOG)
    assert not set(data["schemes"]) & set(data["missing"])
    assert all(len(reason) > 20 for reason in data["missing"].values())
    assert len(data["schemes"]) > 30


def test_a_script_of_the_page_is_small(data):
    sizes = [
        len(explorer.script(data)),
        *(len((DOCS / "assets" / name).read_text()) for name in (*SCRIPTS[1:], "explorer.css")),
    ]
    assert sum(sizes) < 250_000  # 194,000 with 34 schemes drawn
    assert all(len((DOCS / "assets" / name).read_text().splitlines()) < 400 for name in SCRIPTS[1:])


@in_browser
def test_kernels_equal_python(page, data):
    for name, number, options, size in variants(data):
        scheme = REGISTRY[name](size, explorer.HEADS, **options).double()
        code = """([name, number, size, offsets]) => [0, 1].map(head => {
            const { base, variants } = CATALOGUE.schemes[name];
            const kernel = Numbers.kernel(variants[number].sizes[size], head, base, null, "mean");
            return offsets.map(kernel);
        })"""
        offsets = [one for one in OFFSETS if scheme.max_length is None or max(map(abs, one)) < scheme.max_length]
        got = torch.tensor(page.evaluate(code, [name, number, size, offsets]), dtype=torch.float64)
        if scheme.embedding is not None:
            table = scheme.embedding(torch.tensor([[0], *([one[0]] for one in offsets)]), torch.float64)
            expected = (table[0] @ table[1:].T / table[0].square().sum()).expand(2, -1)
        else:
            expected = torch.stack([mean(scheme, one) for one in offsets], 1)[:2]
        assert torch.allclose(got, expected.detach(), rtol=0, atol=1e-6), (name, options)


def mean(scheme, offset):
    """Mean score over unit vectors q = k per head, plus the scheme's bias."""
    unit = torch.eye(scheme.encoding.features, dtype=torch.float64)
    origin, at = offset_of(scheme, [0] * 9), offset_of(scheme, offset)
    added = product(scheme, origin, at, 0 * unit[:1], 0 * unit[:1])
    return added + (product(scheme, origin, at, unit, unit) - len(unit) * added) / len(unit)


@in_browser
@pytest.mark.parametrize("kind", ["same", "other"])
def test_kernels_of_fixed_vectors_equal_python(page, data, kind):
    for name, number, options, size in variants(data):
        if name not in FIXED or "matrix" in options:  # an orthogonal matrix has a basis
            continue
        scheme = REGISTRY[name](size, explorer.HEADS, **options).double()
        code = """([name, number, size, kind, offsets]) => {
            const { base, variants } = CATALOGUE.schemes[name], chosen = variants[number].sizes[size];
            const scores = head => offsets.map(Numbers.kernel(chosen, head, base, null, kind));
            return [Numbers.content(kind, size), [0, 1].map(scores)];
        }"""
        vectors, got = page.evaluate(code, [name, number, size, kind, OFFSETS])
        q, k = (torch.tensor(vectors[side], dtype=torch.float64)[None] for side in "qk")
        assert torch.allclose(torch.stack((q, k)).norm(dim=-1), torch.ones(2, 1, dtype=torch.float64))
        origin = offset_of(scheme, [0] * 9)
        expected = torch.stack([product(scheme, origin, offset_of(scheme, one), q, k) for one in OFFSETS], 1)
        expected = expected.expand(explorer.HEADS, -1)[:2]
        assert torch.allclose(torch.tensor(got, dtype=torch.float64), expected.detach(), rtol=0, atol=1e-6), (name, options)


@in_browser
def test_logits_with_biases_and_decays_equal_python(page, data):
    cases = (("rope", {"decay": "retnet"}, {"decay": "retnet", "kind": "softmax"}), ("alibi", {}, {"kind": "softmax"}))
    for name, options, chosen in (
        *cases,
        ("kerple", {}, {}),
        ("kerple", {"kernel": "power"}, {"variant": 1}),
        ("t5", {}, {}),
    ):
        code = """([choice, offsets]) => {
            Object.assign(Explorer.state, { content: "same", head: "2" });
            const score = Explorer.score(Explorer.resolve(choice));
            return [Numbers.content("same", 16).q, offsets.map(t => score([t, 0, 0]) - score([0, 0, 0]))];
        }"""
        offsets = [-40, -9, -1, 3, 20]
        vector, got = page.evaluate(code, [START | {"name": name, "size": 16} | chosen, offsets])
        scheme = REGISTRY[name](16, explorer.HEADS, **{"attention": "softmax"} | options).double()
        if name == "t5":
            scheme.bias.parameter.data = torch.tensor(
                data["schemes"]["t5"]["variants"][0]["bias"]["numbers"], dtype=torch.float64
            )
        q = 4 * torch.tensor(vector, dtype=torch.float64).expand(1, explorer.HEADS, 81, -1)
        values = torch.eye(81, dtype=torch.float64).expand(1, explorer.HEADS, -1, -1)
        x = torch.arange(-40, 41)[:, None]
        weights = softmax_attention(q, q, values, **scheme.at(x, dtype=torch.float64))[0, 2, 40].log()
        expected = torch.stack([weights[40 + t] - weights[40] for t in offsets])
        assert torch.allclose(torch.tensor(got, dtype=torch.float64), expected.detach(), rtol=0, atol=1e-6), name


@in_browser
def test_scores_of_a_tree_equal_python(page):
    paths = ["", "0", "1", "00", "01", "10", "11", "101"]
    code = """paths => ["mean", "other"].map(kind =>
        Numbers.treeScores(CATALOGUE.schemes["ape-tree"].variants[0].sizes[16], kind, paths))"""
    got, fixed = page.evaluate(code, paths)
    nodes = torch.tensor([[-1, -1], *([paths.index(path[:-1]), int(path[-1])] for path in paths[1:])])
    scheme = isopos.ape_tree(16, explorer.HEADS).double()
    matrices = scheme.encoding(nodes, torch.float64)(torch.eye(16, dtype=torch.float64)[:, None, None].expand(-1, 4, 8, -1))[
        :, 0
    ]
    expected = torch.einsum("itd,isd->ts", matrices, matrices) / 16
    assert torch.allclose(torch.tensor(got, dtype=torch.float64), expected.detach(), rtol=0, atol=1e-6)
    vectors = page.evaluate("() => Numbers.content('other', 16)")
    q, k = (torch.einsum("itd,i->td", matrices, torch.tensor(vectors[side], dtype=torch.float64)) for side in "qk")
    assert torch.allclose(torch.tensor(fixed, dtype=torch.float64), (q @ k.T).detach(), rtol=0, atol=1e-6)


RULED = (
    ("rope", 64, {}, 0),
    ("rope", 64, {"base": 500000.0}, 0),
    ("rope", 128, {"rotary_dim": 8}, 1),
    ("p-rope", 64, {}, 0),
)
RULED += (
    ("mrope", 64, {}, 0),
    ("rope-axial", 64, {}, 0),
    ("rope-golden", 64, {}, 0),
    ("lrpe-orthogonal", 64, {}, 0),
    ("ape-sequence", 16, {}, 0),
)


@in_browser
@pytest.mark.parametrize(("name", "size", "options", "variant"), RULED)
def test_extended_frequencies_equal_python(page, name, size, options, variant):
    code = """([name, size, variant, base, rule]) => {
        const block = CATALOGUE.schemes[name].variants[variant].sizes[size].blocks[0];
        const count = Numbers.frequencies(block, 1, base, null)[0].length;
        const sharp = rule ? Numbers.attentionFactor(rule) : 1;
        return [Numbers.frequencies(block, 1, base, rule), sharp, Numbers.rescale(rule?.factor ?? 1, count)];
    }"""
    scheme = REGISTRY[name](size, explorer.HEADS, **options)
    part = next(part for part in scheme.encoding.modules() if isinstance(part, Coupling) and part.extensible)
    plain = part.frequency()[:, None] if callable(getattr(part, "frequency", None)) else part.parameter
    plain = plain.detach().double()
    base = options.get("base", REGISTRY[name](16, 4).origin[1].get("base", 10000.0))
    for rule, factor in itertools.product((None, *EXTENSIONS), (1, 4, 32)):
        sent = rule and {"name": rule, "factor": factor, "trained": 4096}
        got, sharp, rescale = page.evaluate(code, [name, size, variant, base, sent])
        made = rule and extension(rule, factor, 4096, **({"rescale": rescale} if rule == "longrope" else {}))
        expected = made(plain) if made else plain
        expected = expected[1 % len(expected)][:3]
        assert torch.allclose(torch.tensor(got, dtype=torch.float64), expected, rtol=1e-6, atol=1e-12), (rule, factor)
        assert sharp == pytest.approx(made.attention_factor if made else 1, abs=1e-12)


@in_browser
def test_errors_over_position_equal_python(page, data):
    for name, size, base in (("rope", 64, 10000.0), ("rope", 128, 500000.0), ("rope-golden", 16, 100.0)):
        frequency = REGISTRY[name](size, explorer.HEADS, base=base).encoding.parameter[0, 0].abs()
        wide = frequency.numpy().astype(np.longdouble)
        if name == "rope":
            wide = np.longdouble(base) ** (-np.arange(size // 2, dtype=np.longdouble) / (size // 2))
        for power in (0, 10, 20, 31):
            x = torch.arange(2**power, 2**power + 4)
            got = page.evaluate(
                """([name, size, base, x]) =>
                    Numbers.errors(CATALOGUE.schemes[name].variants[0].sizes[size].blocks[0], 0, base, x)""",
                [name, size, base, x.tolist()],
            )
            angle = x.numpy().astype(np.longdouble)[:, None] * wide
            right = torch.from_numpy(np.stack((np.cos(angle), np.sin(angle))).astype(np.float64))
            for label, dtype, table in (
                ("isopos, float64 table", torch.float64, torch.float64),
                ("isopos, float32 table", torch.float64, torch.float32),
                ("exact angle, bfloat16 table", torch.float64, torch.bfloat16),
                ("float32 product", torch.float32, torch.float32),
                ("bfloat16 product", torch.bfloat16, torch.bfloat16),
            ):
                turned = (x[:, None].to(dtype) * frequency.to(dtype)).double()
                made = torch.stack((turned.cos(), turned.sin())).to(table).double()
                assert got[label] == pytest.approx((made - right).abs().max().item(), abs=1e-6), (name, power, label)
            if name == "rope":
                unit = torch.tensor([1.0, 0.0]).repeat(size // 2).expand(1, 1, 4, -1)
                made = (
                    isopos.rope(size, base=base)
                    .encoding(x[:, None])(unit)[0, 0]
                    .double()
                    .unflatten(-1, (-1, 2))
                    .movedim(-1, 0)
                )
                assert got["isopos, float32 table"] == pytest.approx((made - right).abs().max().item(), abs=1e-6)


@in_browser
def test_the_code_of_every_choice_runs(page, data):
    choices = [({"name": name, "variant": number, "size": 64}, "none") for name, number, _, _ in variants(data)]
    choices += [
        ({"name": name, "size": 64}, rule)
        for name in data["schemes"]
        for rule in data["schemes"][name]["variants"][0]["rules"]
    ]
    choices += [({"name": "rope", "size": 32, "base": 500000, "kind": "softmax", "decay": "alibi"}, "yarn")]
    code = """([choice, rule]) => {
        Explorer.state.rule = rule;
        const scheme = Explorer.resolve(choice);
        return [Explorer.code(scheme), scheme.named, scheme.width];
    }"""
    for choice, rule in choices:
        text, options, width = page.evaluate(code, [START | choice, rule])
        scope = {}
        exec(text, scope)
        assert scope["y"].shape == (1, explorer.HEADS, 64, width)
        assert scope["y"].isfinite().all()
        name, arguments = scope["scheme"].origin
        assert name == choice["name"]
        assert all(arguments[option] == value for option, value in options.items())
        assert (scope["scheme"].extension.name if scope["scheme"].extension else "none") == rule
    page.evaluate("() => { Explorer.state.rule = 'none'; }")


@in_browser
def test_choices_are_labelled_drawn_and_kept(page):
    page.evaluate("() => { Explorer.state.content = 'mean'; Explorer.state.head = '0'; }")
    page.reload()
    page.locator("#explorer-name-1").select_option("ape-tree")
    page.get_by_role("button", name="Add a scheme").click()
    assert page.locator("#explorer-kernels canvas").count() == 1
    assert page.locator("#explorer-kernels canvas").get_attribute("aria-label").startswith("Map of ape-grid 64")
    node = page.locator("#explorer-kernels [role=button]").nth(3)
    node.focus()
    page.keyboard.press("Enter")
    assert page.locator("#explorer-kernels [role=button]").nth(3).get_attribute("aria-pressed") == "true"
    base = page.get_by_label("base").first
    base.fill("500000")
    base.press("Tab")
    assert "base=500000" in page.locator("#explorer-code-0").inner_text()
    copy = page.locator("#explorer-code button").first
    copy.click()
    page.wait_for_function("one => one.textContent !== 'Copy'", arg=copy.element_handle())
    unnamed = """() => [...document.querySelectorAll(".explorer :is(select, input, canvas, button, svg)")].filter(one =>
        !one.labels?.length && !one.getAttribute("aria-label") && !one.textContent && !one.ariaHidden
    ).map(one => one.outerHTML)"""
    assert page.evaluate(unnamed) == []
    page.reload()
    assert page.locator("#explorer-code-2").inner_text().count("isopos.ape_grid(64, 4)") == 1
    assert "base=500000" in page.locator("#explorer-code-0").inner_text()
    address = page.url.split("#")[0]
    for wrong in (
        "what-is-not-drawn",
        "%7B",
        "null",
        '{"schemes":[{"name":"rope","size":"x"},{"name":"no"}],"reach":"far","head":7}',
    ):
        page.goto("about:blank")
        page.goto(f"{address}#{wrong}")
        assert page.locator("#explorer-kernels svg.chart").count() == 1


@in_browser
@BOTH
def test_the_page_of_the_site_fits(visit, files, width, night):  # noqa: F811
    page = visit(f"{files}/explorer.html", width, night)
    looks_right(page, night)
    assert page.locator("#explorer-kernels svg.chart").count() == 1
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    page.locator("#explorer-name-1").select_option("ape-tree")
    for _ in range(2):
        page.get_by_role("button", name="Add a scheme").click()
    looks_right(page, night)
