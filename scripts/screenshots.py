"""Takes the README's images: pages that dear writes about a folder of photos.

    python scripts/screenshots.py PHOTOS --backbone B [--out docs/images]

PHOTOS holds one folder per class. One class gets a planted tint, so that the audit has something to find. Needs playwright
and a Chromium (scripts/install-chromium).
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

WIDTH = 1000


def dear(*words: str) -> None:
    """Run a command of this repository."""
    subprocess.run([sys.executable, "-c", "from dear.cli import main; main()", *words], check=True)


def plant_tint(photos: Path, out: Path) -> None:
    """A copy of the photos in which the images of the first class are slightly orange."""
    first = sorted(photos.iterdir())[0]
    for path in sorted(photos.rglob("*.jpg")):
        image = Image.open(path).convert("RGB")
        if path.parent == first:
            image = Image.blend(image, Image.new("RGB", image.size, (255, 140, 30)), 0.18)
        place = out / path.relative_to(photos)
        place.parent.mkdir(parents=True, exist_ok=True)
        image.save(place, quality=92)  # all of them, so that compression does not differ


def take(pages: dict[str, tuple[Path, str, int]], out: Path) -> None:
    """One PNG per page: from the top of the element that matches a selector, so many pixels high."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for name, (path, selector, height) in pages.items():
            page = browser.new_page(viewport={"width": WIDTH, "height": height})
            page.goto(path.resolve().as_uri())
            box = page.locator(selector).first.bounding_box()
            top = 0 if box is None else max(0, box["y"] - 12)
            content = page.screenshot(clip={"x": 0, "y": top, "width": WIDTH, "height": height}, full_page=True)
            image = Image.open(io.BytesIO(content)).convert("RGB").quantize(192, dither=Image.Dither.NONE)
            image.save(out / f"{name}.png", optimize=True)
        browser.close()


def main() -> None:
    """Write the three images."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--backbone", required=True)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        plant_tint(options.photos, work / "planted")
        dear("audit", "--data", str(work / "planted"), "--out", str(work / "audit.html"))
        common = ("--data", str(options.photos), "--method", "linear-probe", "--backbone", options.backbone)
        dear("adapt", *common, "--out", str(work / "run"))
        dear("report", str(work / "run"), "--data", str(options.photos), "--out", str(work / "report.html"))
        image = sorted(sorted(options.photos.iterdir())[1].iterdir())[0]
        dear("explain", str(work / "run"), str(image), "--out", str(work / "why.html"))
        take(
            {
                "readme-audit": (work / "audit.html", "body", 760),
                "readme-predict": (work / "report.html", "text=What got better", 640),
                "readme-explain": (work / "why.html", "h2 >> nth=0", 700),
            },
            options.out,
        )


if __name__ == "__main__":
    main()
