"""The studio in a real browser: every tab, wide and on a phone."""

import contextlib
import shutil
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import pytest

pytest.importorskip("gradio", reason="the extra `studio` is not installed")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from studio_state import images, state  # noqa: E402

import dear.studio.classify as studio_classify  # noqa: E402
from dear.data import open_data  # noqa: E402
from dear.studio.app import TABS, serving_state  # noqa: E402

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here; scripts/install-chromium gets one"
)
PATIENCE = 60_000  # milliseconds


@contextlib.contextmanager
def browser():
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def url():
    """A studio whose data is small, so that a training takes seconds."""
    with TemporaryDirectory() as folder:
        photos = Path(folder, "photos")
        data = open_data("world:vehicles", "test")
        for index in range(len(data)):
            name = data.classes[int(data.labels[index])]
            target = photos / name
            target.mkdir(parents=True, exist_ok=True)
            if name in data.classes[:3] and len(list(target.iterdir())) < 5:
                data.image(index).save(target / f"{index}.png")
        for empty in [each for each in photos.iterdir() if not list(each.iterdir())]:
            empty.rmdir()
        opened = state(Path(folder))
        opened.data = str(photos)
        with serving_state(opened, max_upload_mb=1) as address:
            yield address


@pytest.fixture(scope="module")
def chromium():
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def visited(url, chromium):
    """One page for all tests, the addresses it asked, and its errors."""
    page = chromium.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(PATIENCE)
    addresses, faults = [], []
    page.on("request", lambda request: addresses.append(request.url))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda note: faults.append(note.text) if note.type == "error" else None)
    page.goto(url)
    page.locator("#studio-header", has_text="a model of the tests").wait_for()
    return page, addresses, faults


@pytest.fixture
def page(visited):
    return visited[0]


def open_tab(page, name):
    tab = page.get_by_role("tab", name=name)
    if not tab.is_visible():  # narrow screens fold the last tabs into a menu
        page.locator(".overflow-menu > button").click()
        tab = page.locator(".overflow-dropdown button", has_text=name)
    tab.click()
    frames(page)


def frames(page, count=3):
    """Wait until the page was drawn `count` times: gradio sets values one frame after a part opens."""
    page.evaluate(
        "async (count) => { for (let i = 0; i < count; i++) await new Promise(requestAnimationFrame); }",
        count,
    )


def open_options(page, where):
    page.locator(f"{where} button").first.click()
    frames(page)


def enter(page, where, text):
    """Fill a field, again if an update of the page replaced the text, until the field keeps it."""
    field = page.locator(where)
    for _ in range(20):
        field.fill(text)
        frames(page)
        if field.input_value() == text:
            return
    raise AssertionError(f"{where} does not keep {text!r}, got {field.input_value()!r}")


def upload(page, where, path, image=None):
    if image is not None:
        image.save(path)
    page.locator(f"{where} input[type=file]").set_input_files(str(path))


def test_a_dropped_image_is_answered_at_once_where_the_user_looks(page, tmp_path):
    upload(page, "#classify-files", tmp_path / "mine.png", images().image(2))
    card = page.locator("#classify-answers article")
    card.wait_for()
    assert "mine.png" in card.inner_text()
    button, answer = page.locator("#classify-go").bounding_box(), card.bounding_box()
    assert button["y"] + button["height"] < 900
    assert answer["y"] + answer["height"] < 900
    assert answer["x"] > button["x"] + button["width"]


def test_an_image_is_classified_among_edited_classes(page):
    open_options(page, "#classify-options")
    enter(page, "#classify-names textarea", "car\nbeach ball\nzeppelin <b>x</b>")
    page.locator("#classify-go").click()
    page.locator("#classify-answers", has_text="zeppelin <b>x</b>").wait_for()
    words = page.locator("#classify-answers").inner_text()
    assert "decoupled:" in words
    assert "before training:" in words


def test_a_click_during_a_classification_is_answered_with_the_classes_typed_meanwhile(page, monkeypatch):
    started, go_on, classify = threading.Event(), threading.Event(), studio_classify.classify

    def wait_and_classify(*args, **options):
        started.set()
        assert go_on.wait(PATIENCE / 1000)
        return classify(*args, **options)

    monkeypatch.setattr(studio_classify, "classify", wait_and_classify)
    page.locator("#classify-go").click()
    assert started.wait(PATIENCE / 1000)
    enter(page, "#classify-names textarea", "car\nairship")
    page.locator("#classify-go").click()
    go_on.set()
    page.locator("#classify-answers", has_text="airship").wait_for()


def test_an_unreadable_file_is_named_next_to_the_answers(page, tmp_path):
    (tmp_path / "letter.png").write_text("dear sir")
    upload(page, "#classify-files", tmp_path / "letter.png")
    page.locator("#classify-answers .dear-failed", has_text="letter.png").wait_for()
    assert page.locator("#classify-answers article").count() == 1  # the readable image is answered
    enter(page, "#classify-names textarea", "car")
    page.locator("#classify-go").click()
    page.locator("#classify-answers .dear-status.dear-failed").wait_for()
    assert page.locator("#classify-answers article").count() == 0  # no old answers under an error
    assert "Traceback" not in page.content()


def test_heads_are_shown_when_their_tab_opens(page):
    open_tab(page, "Heads")
    page.locator('.dear-map button[data-head="11-4"]').click()
    page.locator("#head-about h3", has_text="Layer 11, head 4").wait_for()
    page.locator("#head-most img").first.wait_for()
    page.locator("#head-attention img").first.wait_for()
    assert page.locator('.dear-map button[aria-pressed="true"]').get_attribute("data-head") == "11-4"


def test_arrow_keys_move_between_heads_and_enter_chooses(page):
    page.locator('.dear-map button[data-head="11-4"]').focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowUp")
    assert page.evaluate("document.activeElement.dataset.head") == "12-5"
    page.keyboard.press("Enter")
    page.locator("#head-about h3", has_text="Layer 12, head 5").wait_for()


def test_an_image_is_retrieved_by_an_attribute(page):
    open_tab(page, "Retrieve")
    page.locator("#retrieve-attribute").get_by_text("Texture").click()
    playwright.expect(page.locator("#retrieve-attribute").get_by_label("Texture")).to_be_checked()
    page.locator("#retrieve-examples button img").nth(3).click()
    page.locator("#retrieve-images img").nth(3).wait_for()
    assert "1.000" in page.locator("#retrieve-images").inner_text()


def test_every_image_has_an_alternative_text(page):
    for name in ("Heads", "Classify", "Retrieve"):
        open_tab(page, name)
        texts = page.locator("main img:visible").evaluate_all("all => all.map((one) => one.alt)")
        assert texts, name
        assert all(texts), name


def test_options_follow_the_method_and_a_training_is_reported(page):
    open_tab(page, "Train")
    open_options(page, "#train-options")
    page.locator("#train-roles input").wait_for(state="hidden")  # ProKeR uses no roles
    enter(page, "#train-shots input[type=number]", "2")
    page.locator("#train-start").click()
    page.locator('#train-status [data-state="finished"]').wait_for()
    words = page.locator("#train-status").inner_text()
    assert "accuracy before training" in words
    assert "accuracy after training" in words
    assert "6 of 12 images" in words
    with page.expect_download() as waiting:
        page.locator("#train-download").click()
    assert waiting.value.suggested_filename.endswith(".zip")
    page.locator("#train-method input").click()
    page.locator("#train-method").get_by_role("option", name="dear", exact=True).click()
    page.locator("#train-roles input").wait_for()


def test_after_a_training_all_tabs_show_the_new_model(page):
    page.locator("#studio-header", has_text="trained on photos").wait_for()
    page.locator('#train-status a[data-tab="Classify"]').click()
    names = page.locator("#classify-names textarea")
    names.wait_for()
    assert len(names.input_value().split("\n")) == 3
    assert names.is_disabled()  # ProKeR learns its classes
    page.locator("#classify-template").wait_for(state="hidden")
    open_tab(page, "Compare")
    page.locator("#runs-go").click()
    page.locator("#runs-answer table").first.wait_for()
    assert "trained on photos" in page.locator("#runs-answer").inner_text()


def test_a_concept_is_audited_and_own_images_answered_without_it(page, tmp_path):
    open_tab(page, "Audit")
    page.locator("#audit-go").click()
    page.locator("#audit-evidence h4", has_text="Location").first.wait_for()
    open_options(page, "#audit-images")
    upload(page, "#audit-files", tmp_path / "own.png", images().image(2))
    page.locator("#audit-answers", has_text="without:").wait_for()


def test_the_page_asks_its_own_server_only_and_has_no_errors(visited, url):
    _, addresses, faults = visited
    home = urlsplit(url).netloc
    assert {urlsplit(address).netloc for address in addresses if address.startswith("http")} == {home}
    assert faults == []


def test_too_large_an_upload_is_rejected_by_page_and_server(page, url, tmp_path):
    import httpx

    open_tab(page, "Classify")
    (tmp_path / "big.png").write_bytes(b"\0" * (2 * 2**20))
    upload(page, "#classify-files", tmp_path / "big.png")
    page.get_by_text("exceed the maximum allowed size").first.wait_for()
    answer = httpx.post(f"{url}gradio_api/upload", files={"files": ("big.png", b"\0" * (2 * 2**20))})
    assert answer.status_code == 413


def test_files_outside_the_studios_folder_are_not_served(url):
    import httpx

    for path in ("/etc/passwd", str(Path(__file__).resolve()), "../../../../etc/passwd"):
        answer = httpx.get(f"{url}gradio_api/file={path}")
        assert answer.status_code in (403, 404), path
    assert "default-src 'self'" in httpx.get(url).headers["content-security-policy"]


def test_on_a_phone_nothing_is_wider_than_the_screen_and_the_answer_follows_the_button(chromium, url):
    page = chromium.new_page(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page.set_default_timeout(PATIENCE)
    page.goto(url)
    page.locator("#studio-header", has_text="ProKeR").wait_for()  # of the training above
    page.locator("#classify-examples button img").first.click()
    card = page.locator("#classify-answers article")
    card.wait_for()
    button = page.locator("#classify-go").bounding_box()
    assert button["y"] + button["height"] < 844
    assert card.bounding_box()["y"] < 844
    for name, _, _ in TABS:
        if name != "Retrieve":  # ProKeR has no attributes
            open_tab(page, name)
            page.wait_for_timeout(200)
        assert page.evaluate("document.documentElement.scrollWidth") <= 392, name
