"""The studio in a real browser: every tab, a head, answers, a retrieval, a training, a wrong file.

`python tests/studio/test_browser.py docs/images` takes the screenshots of the documentation.
"""

import contextlib
import io
import shutil
import sys
import tempfile
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import pytest
from PIL import Image

pytest.importorskip("gradio", reason="the extra `studio` is not installed")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from studio_state import images, state  # noqa: E402
from test_actions import cell_file  # noqa: E402

from dear.studio.app import serving_state  # noqa: E402
from dear.studio.state import examples  # noqa: E402

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here; scripts/install-chromium gets one"
)
PATIENCE = 400_000  # milliseconds: the machine may be busy


@contextlib.contextmanager
def browser():
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def url():
    with TemporaryDirectory() as folder, serving_state(state(Path(folder)), max_upload_mb=1) as address:
        yield address


@pytest.fixture(scope="module")
def chromium():
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def visited(url, chromium):
    """One page for all tests, as a person would use it, and what it did that it should not."""
    page = chromium.new_page(viewport={"width": 1200, "height": 900})
    page.set_default_timeout(PATIENCE)
    elsewhere, faults = [], []
    page.on("request", lambda request: elsewhere.append(request.url))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda note: faults.append(note.text) if note.type == "error" else None)
    page.goto(url)
    page.wait_for_selector(".dear-map button")
    return page, elsewhere, faults


@pytest.fixture
def page(visited):
    return visited[0]


def open_tab(page, name):
    page.get_by_role("tab", name=name).click()
    return (
        page.get_by_role("tabpanel", name=name) if page.get_by_role("tabpanel", name=name).count() else page
    )


def save(image, path):
    image.save(path)
    return str(path)


def test_a_clicked_head_shows_its_role_and_images(page):
    open_tab(page, "Heads")
    page.locator('.dear-map button[data-head="11-4"]').click()
    page.wait_for_function(
        "document.querySelector('#head-about h3')?.innerText.startsWith('Layer 11, head 4')"
    )
    page.locator("#head-most img").first.wait_for()
    page.locator("#head-attention img").first.wait_for()
    assert page.locator('.dear-map button[aria-pressed="true"]').get_attribute("data-head") == "11-4"


def test_arrow_keys_move_between_heads_and_enter_chooses(page):
    open_tab(page, "Heads")
    page.locator('.dear-map button[data-head="11-4"]').focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowUp")
    assert page.evaluate("document.activeElement.dataset.head") == "12-5"
    page.keyboard.press("Enter")
    page.wait_for_function(
        "document.querySelector('#head-about h3')?.innerText.startsWith('Layer 12, head 5')"
    )


def test_a_image_is_classified_among_edited_classes(page, tmp_path):
    open_tab(page, "Classify")
    page.locator("#classify-files input[type=file]").set_input_files(
        save(images().image(2), tmp_path / "mine.png")
    )
    page.locator("#classify-names textarea").fill("car\nbeach ball\nzeppelin <b>x</b>")
    page.wait_for_function("document.querySelector('#classify-files').innerText.includes('mine')")
    page.locator("#classify-go").click()
    card = page.locator("#classify-answers article")
    card.wait_for()
    words = card.inner_text()
    for part in ("zero-shot CLIP", "adapted, fused", "adapted, decoupled", "zeppelin <b>x</b>"):
        assert part in words
    assert "trust this one" in card.locator(".trusted").inner_text()
    assert "are new to the model" in page.locator("#classify-answers .dear-advice").inner_text()
    page.locator("#classify-shares .js-plotly-plot").wait_for()


def test_a_wrong_file_gets_a_sentence(page, tmp_path):
    open_tab(page, "Classify")
    (tmp_path / "letter.png").write_text("dear sir")
    page.locator("#classify-files input[type=file]").set_input_files(str(tmp_path / "letter.png"))
    page.wait_for_function("document.querySelector('#classify-files').innerText.includes('letter')")
    page.locator("#classify-go").click()
    page.locator("#classify-answers").get_by_text("letter.png: is a text file, not an image").wait_for()
    assert page.locator("#classify-answers article").count() == 1  # the image from before is answered again
    page.locator("#classify-names textarea").fill("car")
    page.locator("#classify-go").click()
    page.locator("#classify-answers").get_by_text("at least two class names").wait_for()
    assert page.locator("#classify-answers article").count() == 0  # no answers from before under an error
    page.locator("#classify-shares .js-plotly-plot").wait_for(state="hidden")
    assert "Traceback" not in page.content()


def test_a_image_is_retrieved_by_an_attribute(page):
    open_tab(page, "Retrieve")
    page.locator("#retrieve-attribute").get_by_text("Texture").click()
    page.locator("#retrieve-examples button img").nth(3).click()
    page.locator("#retrieve-found img").nth(3).wait_for()
    assert "1.000" in page.locator("#retrieve-found").inner_text()


def test_a_concept_is_audited_and_own_images_answered_without_it(page, tmp_path):
    open_tab(page, "Audit")
    page.locator("#audit-go").click()
    page.locator("#audit-files input[type=file]").set_input_files(
        save(images().image(2), tmp_path / "own.png")
    )
    page.locator("#audit-answers", has_text="with:").wait_for()
    page.locator("#audit-without input").check()
    page.locator("#audit-answers", has_text="without:").wait_for()
    page.locator("#audit-found", has_text="normalized mutual information").wait_for()


def test_a_training_is_started_stopped_and_resumed(page):
    open_tab(page, "Train")
    page.locator("#train-shots input[type=number]").fill("2")
    page.locator("#train-epochs input[type=number]").fill("12")
    page.locator("#train-start").click()
    page.wait_for_function("/Step [1-9]/.test(document.querySelector('#train-status').innerText)")
    page.locator("#train-stop").click()
    page.locator('#train-status [data-state="stopped"]').wait_for()
    page.locator("#train-resume").click()
    page.locator('#train-status [data-state="finished"]').wait_for()
    page.locator("#train-loss .js-plotly-plot").wait_for()
    with page.expect_download() as waiting:
        page.locator("#train-download").click()
    assert waiting.value.suggested_filename.endswith(".zip")


def test_after_a_training_all_tabs_show_the_new_model(page):
    from dear.data import open_data

    classes = open_data(page.locator("#train-data input").input_value(), "test").classes
    header = page.locator("#studio-header")
    header.get_by_text("trained here on").wait_for()
    assert classes[0] in header.inner_text()
    open_tab(page, "Classify")
    assert page.locator("#classify-names textarea").input_value().split("\n") == list(classes)
    open_tab(page, "Compare")
    page.locator("#runs-go").click()
    page.locator("#runs-answer table").first.wait_for()
    words = page.locator("#runs-answer").inner_text()
    assert "against zero-shot CLIP" in words
    assert "trained here on" in words


def test_every_image_has_an_alternative_text(page):
    for name in ("Heads", "Classify", "Retrieve"):
        open_tab(page, name)
        texts = page.locator("main img:visible").evaluate_all("all => all.map((one) => one.alt)")
        assert texts, name
        assert all(texts), name


def test_results_are_compared(page, tmp_path):
    open_tab(page, "Compare")
    files = [cell_file(tmp_path, "zeroshot", 0.5, 0.6), cell_file(tmp_path, "coop", 0.8, 0.4)]
    page.locator("#compare-files input[type=file]").set_input_files([str(path) for path in files])
    page.wait_for_function("document.querySelector('#compare-files').innerText.includes('coop')")
    page.locator("#compare-go").click()
    page.locator("#compare-table table").wait_for()
    assert "80.00" in page.locator("#compare-table").inner_text()
    page.locator("#compare-plot-0 .js-plotly-plot").wait_for()


def test_the_page_stayed_at_home_and_made_no_faults(visited, url):
    _, elsewhere, faults = visited
    home = urlsplit(url).netloc
    assert {urlsplit(address).netloc for address in elsewhere if address.startswith("http")} == {home}
    assert faults == []


def test_too_large_an_upload_is_refused_by_page_and_server(page, url, tmp_path):
    import httpx

    open_tab(page, "Classify")
    (tmp_path / "big.png").write_bytes(b"\0" * (2 * 2**20))
    page.locator("#classify-files input[type=file]").set_input_files(str(tmp_path / "big.png"))
    page.get_by_text("exceed the maximum allowed size").first.wait_for()
    answer = httpx.post(f"{url}gradio_api/upload", files={"files": ("big.png", b"\0" * (2 * 2**20))})
    assert answer.status_code == 413


def test_files_outside_the_studios_folder_are_not_served(url):
    import httpx

    for path in ("/etc/passwd", str(Path(__file__).resolve()), "../../../../etc/passwd"):
        answer = httpx.get(f"{url}gradio_api/file={path}")
        assert answer.status_code in (403, 404), path
    assert "default-src 'self'" in httpx.get(url).headers["content-security-policy"]


def test_on_a_phone_nothing_is_wider_than_the_screen(chromium, url):
    page = chromium.new_page(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page.set_default_timeout(PATIENCE)
    page.goto(url)
    page.wait_for_selector(".dear-map button")
    for name in ("Heads", "Classify", "Retrieve", "Audit", "Train", "Compare"):
        tab = page.get_by_role("tab", name=name)
        if not tab.is_visible():  # narrow screens fold the last tabs into a menu
            page.locator(".overflow-menu > button").click()
            tab = page.locator(".overflow-dropdown button", has_text=name)
        tab.click()
        page.wait_for_timeout(200)
        assert page.evaluate("document.documentElement.scrollWidth") <= 392, name


def take_screenshots(folder):
    """The images of the documentation; a palette keeps the files small."""
    scratch = Path(tempfile.mkdtemp())

    def shoot(name):
        page.evaluate("window.scrollTo(0, 0)")
        page.wait_for_timeout(1000)
        shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        shot.quantize(255, kmeans=2, dither=Image.Dither.NONE).save(
            folder / f"studio-{name}.png", optimize=True
        )

    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as private, browser() as opened:
        own = state(Path(private), trained=False)
        own.images = examples()
        own.find_model()
        with serving_state(own) as address:
            page = opened.new_page(viewport={"width": 1120, "height": 860})
            page.set_default_timeout(PATIENCE)
            page.goto(address)
            page.wait_for_selector(".dear-map button")
            page.locator("#head-attention img").first.wait_for()
            shoot("heads")
            open_tab(page, "Classify")
            page.locator("#classify-examples button img").nth(0).click()
            page.locator("#classify-answers article").wait_for()
            page.locator("#classify-shares .js-plotly-plot").wait_for()
            shoot("classify")
            test_a_image_is_retrieved_by_an_attribute(page)
            shoot("retrieve")
            test_a_training_is_started_stopped_and_resumed(page)
            shoot("train")
            test_results_are_compared(page, scratch)
            shoot("compare")
    shutil.rmtree(scratch)


if __name__ == "__main__":
    take_screenshots(Path(sys.argv[1]))
