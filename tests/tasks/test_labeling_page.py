"""The labeling session and its page: order of images, answers, groups, undo, forecast, kill."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny import Colors, tiny_clip

from dear.data.open import open_data
from dear.errors import InputError, UsageError
from dear.tasks.labeling.answers import read_labels
from dear.tasks.labeling.server import LabelingServer, serving
from dear.tasks.labeling.session import LabelingSession
from dear.tasks.labeling.start import start_session

CLIP = tiny_clip(dtype=torch.float32)
NAMES = ("red", "green", "blue")
COLORS = Colors(each=16, seed=2)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pool")
    for place in range(len(COLORS)):
        COLORS.image(place).save(root / f"{place:02}.png")
    return root


def truth(path: str) -> str:
    return COLORS.classes[int(COLORS.labels[int(Path(path).stem)])]


@pytest.fixture
def session(pool: Path, tmp_path: Path) -> Iterator[LabelingSession]:
    one, _ = start_session(pool, tmp_path / "labels.csv", classes=NAMES, backbone=CLIP)
    yield one
    one.close()


def test_answers_are_on_disk_before_the_next_image(session: LabelingSession, pool: Path) -> None:
    seen = set()
    for number in range(24):
        item = session.state("tab")["item"]
        assert item["path"] not in seen
        seen.add(item["path"])
        session.answer([item["place"]], "label", truth(item["path"]), "tab")
        assert len(read_labels(session.file.path)) == number + 1
    assert session.wait()
    state = session.state("tab")
    assert state["labels"] == 24
    assert {one["name"] for one in state["classes"]} == set(NAMES)
    assert 0 <= state["forecast"]["low"] <= state["forecast"]["accuracy"] <= state["forecast"]["high"] <= 1
    assert str(session.file.path) in state["command"]
    assert len(open_data(session.file.path, "all", root=pool)) == 24


def test_a_killed_session_goes_on(session: LabelingSession, pool: Path) -> None:
    item = session.state()["item"]
    session.answer([item["place"]], "label", "red")
    again, _ = start_session(pool, session.file.path, backbone=CLIP)  # the first is as if killed
    try:
        assert again.answers.labels == {item["path"]: "red"}
        assert again.classes == NAMES
        assert again.state()["item"]["path"] != item["path"]
    finally:
        again.close()


def test_two_tabs_show_different_images(session: LabelingSession) -> None:
    first, second = session.state("one")["item"], session.state("two")["item"]
    assert first["place"] != second["place"]
    assert session.state("one")["item"]["place"] == first["place"]
    session.answer([first["place"]], "label", "red", "one")
    session.answer([second["place"]], "none", tab="two")
    assert session.undo("one") == first["place"]  # not the answer of the other tab
    assert session.answers.none == {second["path"]}
    assert session.answers.labels == {}
    assert session.undo("one") is None


def test_groups_skips_and_new_classes(session: LabelingSession) -> None:
    for _ in range(9):
        item = session.state()["item"]
        session.answer([item["place"]], "label", truth(item["path"]))
    assert session.wait()
    group = session.state(mode="group")["item"]
    places = [one["place"] for one in group["images"]]
    assert len(places) > 1
    session.answer(places, "label", group["label"])
    assert len(session.answers.labels) == 9 + len(places)
    session.undo()
    assert len(session.answers.labels) == 9
    item = session.state()["item"]
    session.answer([item["place"]], "skip")
    assert session.state()["item"]["place"] != item["place"]
    assert session.add_class("дом_большой") == "дом большой"
    assert session.state()["classes"][-1] == {"name": "дом большой", "labels": 0}
    for name, kind in (("Red", "twin of red"), ("", "empty")):
        with pytest.raises(InputError):
            session.add_class(name)
        assert len(session.classes) == 4, kind
    with pytest.raises(InputError, match="purple"):
        session.answer([0], "label", "purple")
    with pytest.raises(InputError, match="99"):
        session.answer([99], "skip")


def test_wrong_labels_are_checked_once(session: LabelingSession) -> None:
    for place, path in enumerate(session.paths[:45]):
        session.answer([place], "label", "blue" if place == 0 and truth(path) != "blue" else truth(path))
    assert session.wait()
    item = session.state(mode="check")["item"]
    assert (item["path"], item["label"], item["guesses"][0][0]) == (session.paths[0], "blue", truth("00.png"))
    session.answer([item["place"]], "checked")
    assert session.state(mode="check")["item"] is None
    session.undo()
    session.answer([0], "label", truth("00.png"))
    assert session.state(mode="check")["item"] is None
    assert read_labels(session.file.path)["00.png"] == truth("00.png")


def ask(
    server: LabelingServer, path: str, body: object = None, token: str | None = None
) -> tuple[int, bytes]:
    base, _, own = server.url.partition("/?token=")
    joint = "&" if "?" in path else "?"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{base}/{path}{joint}token={own if token is None else token}", data)
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_the_server(session: LabelingSession) -> None:
    with serving(session) as server:
        assert ask(server, "state", token="x")[0] == 403
        status, page = ask(server, "")
        assert status == 200
        assert b"label.js" not in page  # the page loads nothing
        state = json.loads(ask(server, "state?tab=a")[1])
        place = state["item"]["place"]
        assert ask(server, f"image?place={place}&side=640")[1][:2] == b"\xff\xd8"
        answer = {"tab": "a", "places": [place], "kind": "label", "label": "red"}
        after = json.loads(ask(server, "answer", answer)[1])
        assert after["labels"] == 1
        assert after["item"]["place"] != place
        back = json.loads(ask(server, "undo", {"tab": "a"})[1])
        assert (back["labels"], back["item"]["place"]) == (0, place)
        named = json.loads(ask(server, "class", {"name": "猫", "place": place})[1])
        assert named["classes"][-1]["name"] == "猫"
        assert named["item"]["place"] == place
        for path, body in (
            ("answer", {"places": [0], "kind": "label", "label": "x"}),
            ("answer", {"places": ["a"], "kind": "skip"}),
            ("answer", []),
            ("image?place=999", None),
            ("state?mode=x", None),
        ):
            status, message = ask(server, path, body)
            assert status == 400
            assert json.loads(message)["error"]
        assert ask(server, "nowhere")[0] == 404
        with pytest.raises(UsageError, match=str(server.server_address[1])):
            LabelingServer(session, port=server.server_address[1])
