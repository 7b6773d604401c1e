"""Takes the images of README and guides: pages and the studio about a folder of photos.

    python scripts/screenshots.py PHOTOS --backbone B [--tint CLASS] [--out docs/images]

PHOTOS holds one folder per class. One class (`--tint`, or the first) gets a planted tint, so that the audit
has something to find. Needs the extra `studio`, playwright, and a Chromium (scripts/install-chromium).
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

WIDTH = 760  # of pages, about the width of a README, so that their text keeps its size
STUDIO = (900, 620)  # width and height of the studio
SCALE = 2  # pixels of the image per pixel of the page, so that text stays sharp


def dear(*words: str) -> None:
    """Run a command of this repository."""
    subprocess.run([sys.executable, "-c", "from dear.cli import main; main()", *words], check=True)


def plant_tint(photos: Path, name: str, out: Path) -> None:
    """A copy of the photos in which the images of one class are slightly orange."""
    for path in sorted(photos.rglob("*.jpg")):
        image = Image.open(path).convert("RGB")
        if path.parent.name == name:
            image = Image.blend(image, Image.new("RGB", image.size, (255, 140, 30)), 0.18)
        place = out / path.relative_to(photos)
        place.parent.mkdir(parents=True, exist_ok=True)
        image.save(place, quality=92)  # all of them, so that compression does not differ


@contextmanager
def browser() -> Iterator[Browser]:
    """A Chromium without a window."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as started:
        opened = started.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


def save(content: bytes, path: Path) -> None:
    """Write a screenshot with a palette, which keeps the file small."""
    image = Image.open(io.BytesIO(content)).convert("RGB").quantize(192, dither=Image.Dither.NONE)
    image.save(path, optimize=True)


def take_page(opened: Browser, source: Path, first: str, end: str, out: Path) -> None:
    """A page from the top of the element `first` to the top of the next element `end`."""
    page = opened.new_page(viewport={"width": WIDTH, "height": 900}, device_scale_factor=SCALE)
    page.goto(source.resolve().as_uri())
    top = page.locator(first).first.evaluate("one => one.getBoundingClientRect().top") - 12
    tops = page.locator(end).evaluate_all("all => all.map(one => one.getBoundingClientRect().top)")
    height = min(each for each in tops if each > top + 24) - 8 - top
    save(page.screenshot(clip={"x": 0, "y": top, "width": WIDTH, "height": height}, full_page=True), out)


def take_studio(opened: Browser, run: Path, photos: Path, out: Path) -> None:
    """The Classify tab with the answer for one photo."""
    from dear.studio.app import serving

    with serving(str(run), data=str(photos), port=0) as url:
        page = opened.new_page(viewport={"width": STUDIO[0], "height": STUDIO[1]}, device_scale_factor=SCALE)
        page.set_default_timeout(120_000)
        page.goto(url)
        page.locator("#classify-examples button img").nth(5).click()
        page.locator("#classify-answers article").wait_for()
        page.wait_for_timeout(1000)
        save(page.screenshot(), out)


def main() -> None:
    """Write the images."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("photos", type=Path)
    parser.add_argument("--backbone", required=True)
    parser.add_argument("--tint", metavar="CLASS", help="class with the planted tint (default: the first)")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    classes = sorted(options.photos.iterdir())
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        plant_tint(options.photos, options.tint or classes[0].name, work / "photos")
        dear("audit", "--data", str(work / "photos"), "--out", str(work / "audit.html"))
        common = ("--data", str(options.photos), "--method", "linear-probe", "--backbone", options.backbone)
        dear("adapt", *common, "--out", str(work / "run"))
        dear("report", str(work / "run"), "--data", str(options.photos), "--out", str(work / "report.html"))
        image = sorted(classes[1].iterdir())[0]
        dear("explain", str(work / "run"), str(image), "--out", str(work / "why.html"))
        with browser() as opened:
            finding = "h2:below(:text('Findings to act on'))"
            take_page(opened, work / "audit.html", finding, "h2", options.out / "readme-audit.png")
            fixed = "h3:has-text('Fixed')"
            take_page(opened, work / "report.html", fixed, "h3", options.out / "readme-predict.png")
            without = "h3:has-text('without')"
            take_page(opened, work / "why.html", "h2", without, options.out / "readme-explain.png")
            take_studio(opened, work / "run", options.photos, options.out / "studio-classify.png")


if __name__ == "__main__":
    main()
