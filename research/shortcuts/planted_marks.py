r"""Which marks the audit finds when all images of one class carry them, and its alarms on clean images.

    python research/shortcuts/planted_marks.py --data DATA/pacs/index.csv \
        --csv research/results/planted_marks.csv

Each mark is put on up to 30 images of one class at a time, saved as JPEG like the clean images, and the image
properties of all classes are searched as `dear audit --data` does. A row counts the classes in which the
planted mark was found, the names of what was found, and the findings in all other classes, which are the same
without the mark ("none").
"""

from __future__ import annotations

import io
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from measure.script import arguments, record
from PIL import Image, ImageDraw, ImageFilter, ImageFont

import dear
from dear.data.images import ImageSet, ListedImages
from dear.data.shots import few_shot
from dear.shortcuts.find import Shortcut, find_shortcuts
from dear.shortcuts.properties import ImageMeasurements, measure_properties

IMAGES, CLASSES = 30, 24  # images per class, and classes, at most
Edit = Callable[[Image.Image, random.Random], Image.Image]


def main() -> None:
    args = arguments(
        __doc__,
        data=(str, "labeled set; several with commas between"),
        classes=(6, "classes that carry each mark, one at a time"),
        csv=(Path, "file to which rows are added"),
    )
    for data in args.data.split(","):
        images = dear.open_data(data, "train")
        chosen = [images.classes[place] for place in evenly_spaced(len(images.classes), CLASSES)]
        images = few_shot(images.select_classes(chosen), IMAGES, 1)
        clean = measure_properties(saved(images, lambda image, _: image))
        labels = images.labels.numpy()
        for mark, edit in MARKS.items():
            marked = evenly_spaced(len(images.classes), args.classes) if mark != "none" else [0]
            hits_count, names, others = 0, Counter[str](), 0
            for label in marked:
                rows = np.flatnonzero(labels == label)
                measured = (
                    clean if mark == "none" else replaced(clean, rows, saved(images.subset(rows), edit))
                )
                shortcuts = find_shortcuts(measured, labels.tolist(), images.classes)
                hits = [one for one in shortcuts if one.label == label and mark != "none"]
                hits_count += bool(hits)
                names.update(map(described, hits))
                others += len(shortcuts) - len(hits)
            row = {
                "dataset": images.name, "mark": mark, "planted": 0 if mark == "none" else len(marked),
                "found": hits_count, "named": "; ".join(f"{name} {n}" for name, n in names.most_common()),
                "findings_elsewhere": round(others / len(marked), 2), "classes": len(images.classes),
                "images": len(images),
            }  # fmt: skip
            record(args.csv, [row], machine_last=True)


def evenly_spaced(count: int, most: int) -> list[int]:
    """At most `most` numbers below `count`, spread evenly."""
    return sorted({round(place) for place in np.linspace(0, count - 1, min(count, most)).tolist()})


def described(shortcut: Shortcut) -> str:
    return f"{shortcut.name} ({shortcut.look})" if shortcut.look else shortcut.name


def saved(images: ImageSet, edit: Edit) -> ListedImages:
    """The images with an edit, each saved as JPEG."""
    files = []
    for index in range(len(images)):
        buffer = io.BytesIO()
        edit(images.image(index), random.Random(index)).save(buffer, "JPEG", quality=92)
        files.append(Image.open(buffer).convert("RGB"))
    return ListedImages(files, torch.zeros(len(files), dtype=torch.int64), ("image",))


def replaced(clean: ImageMeasurements, rows: np.ndarray, images: ListedImages) -> ImageMeasurements:
    """What was measured, with some images exchanged."""
    marked = measure_properties(images)
    values, small, hashes = (np.array(part) for part in (clean.values, clean.small, clean.hashes))
    values[rows], small[rows], hashes[rows] = marked.values, marked.small, marked.hashes
    return ImageMeasurements(values, small, hashes, clean.files)


# -- marks ---------------------------------------------------------------------------------------------------


def letterbox(image: Image.Image, _: random.Random) -> Image.Image:
    bar = round(0.1 * image.height)
    out = Image.new("RGB", image.size)
    out.paste(image.crop((0, bar, image.width, image.height - bar)), (0, bar))
    return out


def compress(image: Image.Image, _: random.Random) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=20)
    return Image.open(buffer).convert("RGB")


def shrink(image: Image.Image, _: random.Random) -> Image.Image:
    half = image.resize((image.width // 2, image.height // 2), Image.Resampling.BICUBIC)
    return half.resize(image.size, Image.Resampling.BICUBIC)


def darken_corners(strength: float) -> Edit:
    def edit(image: Image.Image, _: random.Random) -> Image.Image:
        y, x = np.mgrid[: image.height, : image.width]
        apart = (2 * x / image.width - 1) ** 2 + (2 * y / image.height - 1) ** 2
        return Image.fromarray(
            (np.asarray(image) * (1 - strength * np.clip(apart / 2, 0, 1))[..., None]).astype(np.uint8)
        )

    return edit


def tint(color: tuple[int, int, int], share: float) -> Edit:
    return lambda image, _: Image.blend(image, Image.new("RGB", image.size, color), share)


def warm(image: Image.Image, _: random.Random) -> Image.Image:
    return Image.fromarray(np.clip(np.asarray(image) * (1.08, 1.0, 0.82), 0, 255).astype(np.uint8))


def stamp(image: Image.Image, draw: random.Random) -> Image.Image:
    image, text = image.copy(), f"'{draw.randint(90, 99)} {draw.randint(1, 12):2d} {draw.randint(1, 28):2d}"
    font, pen = ImageFont.load_default(size=max(9, round(0.075 * image.height))), ImageDraw.Draw(image)
    place = (0.96 * image.width - pen.textlength(text, font=font), 0.9 * image.height)
    pen.text(place, text, fill=(255, 140, 30), font=font)
    return image


def moving(image: Image.Image, draw: random.Random) -> Image.Image:
    layer, side = image.copy(), 0.2 * image.height
    x, y = draw.uniform(0, image.width - side), draw.uniform(0, image.height - side)
    ImageDraw.Draw(layer).ellipse((x, y, x + side, y + side), fill=(255, 255, 255))
    return Image.blend(image, layer, 0.5)


def rotate(image: Image.Image, _: random.Random) -> Image.Image:
    return image.rotate(3, Image.Resampling.BICUBIC)


def rotate_and_crop(image: Image.Image, draw: random.Random) -> Image.Image:
    x, y = round(0.06 * image.width), round(0.06 * image.height)
    return rotate(image, draw).crop((x, y, image.width - x, image.height - y)).resize(image.size)


MARKS: dict[str, Edit] = {
    "none": lambda image, _: image,
    "sharpened": lambda image, _: image.filter(ImageFilter.UnsharpMask(2, 150, 2)),
    "letterbox bars": letterbox,
    "JPEG quality 20": compress,
    "half resolution": shrink,
    "vignette, 55 % darker": darken_corners(0.55),
    "vignette, 35 % darker": darken_corners(0.35),
    "orange tint, 18 %": tint((255, 140, 0), 0.18),
    "green tint, 12 %": tint((0, 160, 90), 0.12),
    "warm white balance": warm,
    "date stamp in a corner": stamp,
    "rotated 3 degrees, black corners": rotate,
    "rotated 3 degrees, cropped": rotate_and_crop,
    "half-transparent disk at random places": moving,
}


if __name__ == "__main__":
    main()
