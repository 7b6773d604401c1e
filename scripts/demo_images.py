"""Takes the README's images of a demo: `python scripts/demo_images.py demo docs/images` after `make demo`.

Needs playwright and a Chromium (scripts/install-chromium).
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

WIDTH = 1000
# Image, what it starts with and what it ends before, as CSS selectors of the page.
PARTS = {
    "demo-heads": (".dear-map", ".dear-legend + *"),
    "demo-task": ("section:has(figure) >> nth=0", "section:has(figure) .two >> nth=0"),
    "demo-shortcut": ("section:has-text('A shortcut') >> nth=0", "section:has-text('4. Why')"),
    "demo-why": ("section:has-text('4. Why') h3 >> nth=-2", "section:has-text('4. Why') details >> nth=-1"),
    "demo-focus": ("section:has-text('5. One')", "section:has-text('6. Similar')"),
    "demo-retrieval": ("section:has-text('6. Similar')", "section:has-text('6. Similar') h3 >> nth=0"),
}


def take(page: Page, start: str, end: str, path: Path) -> None:
    """An image of the page from the top of one element to the top of another."""
    top = page.locator(start).first.bounding_box()
    bottom = page.locator(end).first.bounding_box()
    if top is None or bottom is None:
        raise SystemExit(f"the page has no {start} or no {end}")
    clip = {"x": 0, "y": top["y"] - 8, "width": WIDTH, "height": bottom["y"] - top["y"]}
    page.screenshot(path=path, clip=clip, full_page=True)


def main(demo: Path, out: Path) -> None:
    """Write an image per part."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 900})
        page.goto((demo / "index.html").resolve().as_uri())
        page.wait_for_timeout(3000)  # figures are drawn
        for name, (start, end) in PARTS.items():
            take(page, start, end, out / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
