"""The labeling page in a browser: keys, groups, and a phone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tiny import Colors, tiny_clip

from dear.tasks.labeling.answers import read_labels
from dear.tasks.labeling.server import serving
from dear.tasks.labeling.start import start_session

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here; scripts/install-chromium gets one"
)


def test_label_by_keyboard(tmp_path: Path) -> None:
    images = Colors(each=6, seed=1)
    (tmp_path / "pool").mkdir()
    for place in range(len(images)):
        images.image(place).save(tmp_path / "pool" / f"{place}.png")
    clip = tiny_clip(dtype=torch.float32)
    names = ["red", "سيارة", *(f"color {number}" for number in range(30))]  # more than there are keys
    session, _ = start_session(tmp_path / "pool", tmp_path / "labels.csv", classes=names, backbone=clip)
    with serving(session) as server, playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 390, "height": 800})
        page.set_default_timeout(60_000)  # a busy machine
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(server.url)
        page.wait_for_selector("#question img")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")  # a phone
        answered = []
        for key in ("1", "2", "Enter", "0", " "):
            path = page.inner_text("#question .soft")
            answered.append(path)
            page.keyboard.press(key)
            page.wait_for_function(
                "path => document.querySelector('#question .soft').innerText !== path", arg=path
            )
        labels = read_labels(tmp_path / "labels.csv")
        assert (labels[answered[0]], labels[answered[1]]) == ("red", "سيارة")
        assert set(labels) == set(answered[:3])
        page.keyboard.press("u")  # takes back the skip
        page.wait_for_function(
            "path => document.querySelector('#question .soft').innerText === path", arg=answered[4]
        )
        page.keyboard.press("n")
        page.keyboard.type("blue")
        page.keyboard.press("Enter")
        page.wait_for_function("() => document.querySelectorAll('#choices button').length === 33")
        path = page.inner_text("#question .soft")
        page.keyboard.press("/")
        page.keyboard.type("color 29")
        page.keyboard.press("Enter")
        page.wait_for_function(
            "path => document.querySelector('#question .soft').innerText !== path", arg=path
        )
        assert read_labels(tmp_path / "labels.csv")[path] == "color 29"
        assert not errors
        browser.close()


def test_few_classes_on_a_phone(tmp_path: Path) -> None:
    images = Colors(each=3, seed=1)
    (tmp_path / "pool").mkdir()
    for place in range(len(images)):
        images.image(place).save(tmp_path / "pool" / f"{place}.png")
    clip = tiny_clip(dtype=torch.float32)
    session, _ = start_session(
        tmp_path / "pool", tmp_path / "labels.csv", classes=["red", "green"], backbone=clip
    )
    with serving(session) as server, playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 390, "height": 800})
        page.set_default_timeout(60_000)
        refused: list[str] = []
        page.on("response", lambda answer: refused.append(answer.url) if answer.status >= 400 else None)
        page.goto(server.url)
        page.wait_for_selector("#question img")
        assert not page.is_visible("#class-part")  # every class has a key
        assert page.locator("#question img").bounding_box()["width"] > 300  # small images are enlarged
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert not refused
        browser.close()
