"""How long the built page `explorer` takes to load in a headless browser: `python -m tools.explorer_load` prints it.

It opens the file of the site at 390 pixels several times, until all scripts have run and everything is drawn, and prints the
time and the processor time of the page's main thread, which other programs on the machine do not change. `make docs` builds
the site; it needs Chromium and playwright.
"""

import shutil
import statistics
import sys

from tools.pages import ROOT

LOADS = 5
TIME = "() => performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"  # deferred scripts have run


def main() -> None:
    """Print the median time of the loads, and the size of the page's files."""
    from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]

    page, chromium = ROOT / "site" / "explorer.html", shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None or not page.exists():
        sys.exit(f"explorer: expected Chromium and {page}, got {chromium} and {page.exists()}; make docs builds the site")
    files = [page, *(page.parent / "assets").glob("explorer*")]
    print(f"files of the page: {len(files)}, {sum(file.stat().st_size for file in files) / 1000:.0f} kB")
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        times, busy = [], []
        for _ in range(LOADS):
            opened = browser.new_page(viewport={"width": 390, "height": 844})
            session = opened.context.new_cdp_session(opened)
            session.send("Performance.enable", {"timeDomain": "threadTicks"})
            opened.goto(page.as_uri())
            times.append(opened.evaluate(TIME))
            metrics = {entry["name"]: entry["value"] for entry in session.send("Performance.getMetrics")["metrics"]}
            busy.append(1000 * metrics["TaskDuration"])
            opened.close()
        for name, found in (("until it is drawn", times), ("processor time of its main thread", busy)):
            print(f"{name}: {statistics.median(found):.0f} ms, {min(found):.0f} to {max(found):.0f} ms in {LOADS} loads")
        browser.close()


if __name__ == "__main__":
    main()
