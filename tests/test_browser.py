"""Test the report and the site in a headless browser, at the widths of a phone and a desktop, in light and dark mode."""

import http.server
import os
import shutil
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

SITE = Path(__file__).parents[1] / "site"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed; on Debian: apt install chromium"),
]
WIDTHS = {"phone": 390, "desk": 1280}
# what is wider than the page, and neither scrolls nor lies in something that does
WIDE = """() => [...document.querySelectorAll("body *")].filter(one => {
  if (one.getBoundingClientRect().right <= document.documentElement.clientWidth + 1) return false;
  if (!one.checkVisibility() || getComputedStyle(one).position === "fixed") return false;
  for (let up = one; up; up = up.parentElement)
    if (["auto", "scroll", "hidden", "clip"].includes(getComputedStyle(up).overflowX)) return false;
  return true;
}).map(one => one.outerHTML.slice(0, 120))"""
EMPTY = """() => [...document.images].filter(one => !one.complete || !one.naturalWidth).map(one => one.src)"""
CONTRAST = """() => {
  const light = colour => { const [r, g, b] = colour.match(/[0-9.]+/g).map(Number); return 0.3 * r + 0.6 * g + 0.1 * b; };
  const style = getComputedStyle(document.body);
  return [light(style.color), light(style.backgroundColor)];
}"""


@pytest.fixture(scope="module")
def browser():
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install 'isopos[docs]'")
    with driver.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser):
    """Open a page. Missing files, failed requests, script errors and requests to other hosts fail the test."""
    pages, wrong = [], []

    def seen(request, host):
        if not request.url.startswith((host, "data:", "blob:")):
            wrong.append(f"from outside: {request.url}")

    def opened(address, width="desk", night=False):
        page = browser.new_page(viewport={"width": WIDTHS[width], "height": 900}, color_scheme="dark" if night else "light")
        host = address.split("/", 3)[0] + "//" + address.split("/", 3)[2]
        page.on("request", partial(seen, host=host))
        page.on("requestfailed", lambda request: wrong.append(f"failed: {request.url}"))
        page.on("response", lambda answer: answer.status < 400 or wrong.append(f"{answer.status}: {answer.url}"))
        page.on("pageerror", lambda error: wrong.append(f"script: {error}"))
        page.goto(address, wait_until="networkidle")
        pages.append(page)
        return page

    yield opened
    for page in pages:
        page.close()
    assert wrong == []


def looks_right(page, night):
    """Assert that nothing is cut off or empty, and that text contrasts with its background."""
    assert page.evaluate(WIDE) == []
    for image in page.locator("img[loading=lazy]").all():
        image.scroll_into_view_if_needed()
    page.wait_for_load_state("networkidle")
    assert page.evaluate(EMPTY) == []
    text, behind = page.evaluate(CONTRAST)
    assert text > behind + 100 if night else behind > text + 100


BOTH = pytest.mark.parametrize(("width", "night"), [("phone", True), ("desk", False)])


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The report of a comparison of two schemes, trained for a few steps."""
    folder = tmp_path_factory.mktemp("report")
    small = "--schemes none,rope:decay=retnet --steps 20 --layers 1 --model-dim 32 --heads 2 --batch 4 --length 32 --name r"
    command = [sys.executable, "-m", "isopos", "compare", *small.split()]
    subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": str(SITE.parent)}, check=True, capture_output=True)
    return f"file://{folder}/runs/r/report.html"


@BOTH
def test_the_report_renders_and_loads_nothing(visit, report, width, night):
    page = visit(report, width, night)
    looks_right(page, night)
    assert page.locator("h3").count() == 2
    for picture in page.locator("figure > svg").all():
        assert picture.get_attribute("aria-label")
        assert picture.bounding_box()["height"] > 100


def test_the_report_s_table_sorts(visit, report):
    page = visit(report)
    head = page.get_by_role("columnheader").filter(has_text="scheme").first
    names = page.locator("tbody").first.locator("tr td:first-child")
    ranked = names.all_inner_texts()
    head.get_by_role("button").click()
    assert names.all_inner_texts() == sorted(ranked)
    assert head.get_attribute("aria-sort") == "ascending"
    page.keyboard.press("Enter")  # the button has the focus
    assert names.all_inner_texts() == sorted(ranked, reverse=True)
    score = page.get_by_role("button", name="bits/byte", exact=True)
    score.click()
    assert names.all_inner_texts() == ranked  # the best has the lowest


def test_the_report_s_curves_are_switched_on_and_off(visit, report):
    page = visit(report)
    curve, box = page.locator("[id='curve-rope:decay=retnet-seed0']"), page.get_by_role("checkbox", name="rope:decay=retnet")
    assert curve.is_visible()
    box.click()
    assert not curve.is_visible()
    assert page.locator("#curve-none-seed0").is_visible()
    box.focus()
    page.keyboard.press("Space")
    assert curve.is_visible()


@pytest.fixture(scope="module")
def files():
    """The file address of the site."""
    if not (SITE / "index.html").exists():
        pytest.skip("no site is built: make docs")
    return SITE.as_uri()


@pytest.fixture(scope="module")
def site(files):
    """The address of the site on a local server."""
    handler = partial(
        type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *_: None}), directory=SITE
    )
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


PAGES = (
    *("index", "tutorials/rope", "uses", "algebra", "schemes", "results/index", "performance", "api/attention"),
    "CONTRIBUTING",
)


@BOTH
@pytest.mark.parametrize("name", PAGES)
def test_the_site_is_whole(visit, site, name, width, night):
    page = visit(f"{site}/{name}.html", width, night)
    looks_right(page, night)
    assert page.locator("h1").count() == 1


def test_formulas_are_drawn(visit, site):
    page = visit(f"{site}/algebra.html")
    formulas = page.locator("math")
    assert formulas.count() > 20
    assert all(formula.bounding_box()["width"] > 1 for formula in formulas.all())
    assert "\\rho" not in page.locator("article").inner_text()


@pytest.mark.parametrize("served", [True, False], ids=["served", "as files"])
def test_the_site_is_searched(visit, site, files, served):
    """The search field receives all typed letters, including keyboard shortcuts, and a result opens its page."""
    page = visit(f"{site if served else files}/algebra.html")
    page.locator("dialog").wait_for(state="attached")
    page.keyboard.press("Control+k")
    page.keyboard.type("permutation n p s f")
    field = page.get_by_role("combobox", name="Search")
    assert field.input_value() == "permutation n p s f"
    assert page.url.endswith("/algebra.html")
    field.fill("permuteformer")
    found = page.locator("a[href*='schemes.html'], a[href*='tutorials/']").filter(has_text="ermute").first
    found.wait_for(timeout=120_000)
    address = found.get_attribute("href")
    found.click()
    page.wait_for_url(address.split("?")[0].split("#")[0] + "*")
    assert "permuteformer" in page.locator("article").inner_text().lower()


def test_letters_turn_no_pages(visit, files):
    """A reader may type before the search has loaded."""
    page = visit(f"{files}/algebra.html")
    for key in "np,.":
        page.keyboard.press(key)
        page.wait_for_timeout(200)
        assert page.url.endswith("/algebra.html")


def test_the_site_s_links_lead_to_pages_without_a_server(visit, files):
    page = visit(f"{files}/index.html")
    page.locator("article a[href*='tutorials/rope']").first.click()
    page.wait_for_url(f"{files}/tutorials/rope.html*")
    assert page.locator("h1").count() == 1
