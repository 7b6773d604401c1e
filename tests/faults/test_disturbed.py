"""Images that go while they are read, memory that runs out, temporary files of dead writers."""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from PIL import Image
from tiny import mixed_roles, tiny_clip, token_ids

from dear.bench.engines import exit_with_parent
from dear.data import open_data
from dear.errors import DataError, DearError, OutOfMemory
from dear.heads.corpus.build import Phrase
from dear.heads.corpus.load import Corpus
from dear.heads.discover import discover_roles
from dear.heads.moments import resume_path
from dear.methods import DeAR, ZeroShot
from dear.runs.folder import load_run
from dear.runs.model import Model
from dear.runs.recipe import Recipe
from dear.train.run import train
from dear.utils.files import write_atomic
from dear.utils.memory import trim_memory

RECIPE = Recipe(epochs=4, batch=5, lr=3e-2, warmup_epochs=1)
CLASSES = ("blue", "green", "red")
WORDS = Corpus("words", tuple(Phrase(word, "Color") for word in ("red", "green", "blue", "a dark one")))


def clip():
    return tiny_clip(dtype=torch.float32)


def method(kind=DeAR):
    roles = mixed_roles() if kind is DeAR else None
    return kind(clip(), CLASSES, roles=roles, ids=token_ids(), seed=1)


@pytest.fixture
def photos(tmp_path):
    for name in CLASSES:
        for number in range(4):
            path = tmp_path / "photos" / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (30, 26), name).save(path)
    return open_data(tmp_path / "photos", "all")


def gone(path):
    path.unlink()


def turned_into_text(path):
    path.write_text("no longer an image")


def cut(path):
    path.write_bytes(path.read_bytes()[:-30])


def turned_into_a_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("change", [gone, turned_into_text, cut, turned_into_a_folder])
def test_an_image_that_changes_after_listing_is_named(photos, tmp_path, change):
    change(photos.path(5))
    for work in (
        lambda: train(method(), photos, RECIPE, tmp_path / "run"),
        lambda: Model(method(ZeroShot)).evaluate(photos),
        lambda: discover_roles(clip(), photos, corpus=WORDS, concepts="tags", keep=tmp_path / "keep"),
        lambda: Model(method(ZeroShot)).probabilities([photos.path(i) for i in range(len(photos))]),
    ):
        with pytest.raises(DearError, match=re.escape(str(photos.path(5)))):
            work()


def test_a_image_replaced_by_another_is_taken_as_it_is_now(photos, tmp_path):
    Image.new("RGB", (50, 200), "blue").save(photos.path(5))
    assert train(method(), photos, RECIPE, tmp_path / "run").steps == 12


def test_a_run_does_not_continue_on_other_images(photos, tmp_path):
    with pytest.raises(DearError):
        train(method(), photos, RECIPE, tmp_path / "run", stop=lambda: True)
    photos.path(0).rename(photos.path(0).with_name("new.png"))
    with pytest.raises(DearError, match="training images"):
        train(method(), open_data(tmp_path / "photos", "all"), RECIPE, tmp_path / "run", resume=True)


class Small:
    """A device with room for few images."""

    def __init__(self, monkeypatch, kind, names, room):
        self.sizes = []
        for name in names:
            real = getattr(kind, name)

            def limited(this, pixels, *args, real=real, **options):
                self.sizes.append(len(pixels))
                if len(pixels) > room:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
                return real(this, pixels, *args, **options)

            monkeypatch.setattr(kind, name, limited)


def test_evaluation_and_prediction_halve_the_batch_and_say_so(photos, monkeypatch, caplog):
    expected = Model(method(DeAR)).evaluate(photos)
    paths = [photos.path(i) for i in range(len(photos))]
    sure = Model(method(DeAR)).probabilities(paths)
    small = Small(monkeypatch, DeAR, ["all_logits", "logits"], room=4)
    with caplog.at_level(logging.WARNING, "dear"):
        found = Model(method(DeAR)).evaluate(photos)
    assert max(small.sizes) == 12
    assert [re.findall(r"\d+", message) for message in caplog.messages] == [["12", "6"], ["6", "3"]]
    assert torch.equal(found.answers["fused"], expected.answers["fused"])
    torch.testing.assert_close(found.confidence["fused"], expected.confidence["fused"])
    torch.testing.assert_close(Model(method(DeAR)).probabilities(paths), sure)
    Small(monkeypatch, DeAR, ["all_logits"], room=0)
    with pytest.raises(OutOfMemory):
        Model(method(DeAR)).evaluate(photos)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_training_stops_with_a_sentence_and_can_be_continued(photos, tmp_path, monkeypatch, error):
    train(method(), photos, RECIPE, tmp_path / "whole")
    real, calls = DeAR.backward, 0

    def full(self, loss, scale):
        nonlocal calls
        calls += 1
        if calls == 8:
            raise error
        real(self, loss, scale)

    monkeypatch.setattr(DeAR, "backward", full)
    with pytest.raises(OutOfMemory, match=r"\b8 .*batch"):
        train(method(), photos, RECIPE, tmp_path / "run")
    train(method(), photos, RECIPE, tmp_path / "run", resume=True)  # memory is free again
    for name in ("adapter.safetensors", "log.jsonl"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_other_errors_are_not_taken_for_missing_memory(photos, monkeypatch):
    def broken(self, pixels):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(DeAR, "all_logits", broken)
    with pytest.raises(RuntimeError, match="shapes"):
        Model(method(DeAR)).evaluate(photos)


def test_discovery_continues_where_it_was_and_reads_only_the_rest(photos, tmp_path):
    def discover(images, keep):
        return discover_roles(
            clip(), images, corpus=WORDS, phrases=2, concepts="tags", batch_size=1, keep=keep
        )

    expected = discover(photos, None)
    keep, read = resume_path(tmp_path / "roles.json"), []

    class Watched(type(photos)):
        def pixels(self, indices, size):
            read.extend(self.paths[i] for i in indices)
            if len(read) == 12:
                raise KeyboardInterrupt
            return super().pixels(indices, size)

    fields = ("name", "classes", "template", "root", "paths", "labels")
    watched = Watched(**{name: getattr(photos, name) for name in fields})
    with pytest.raises(KeyboardInterrupt):
        discover(watched, keep)
    assert keep.exists()
    again = discover(watched, keep)
    assert read[12:] == list(photos.paths[10:])
    again.save(tmp_path / "again.json")
    expected.save(tmp_path / "whole.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "whole.json").read_bytes()
    assert not keep.exists()


@pytest.mark.parametrize("change", [b"", b"not safetensors", None])
def test_discovery_does_not_continue_from_something_else(photos, tmp_path, change):
    keep = tmp_path / "keep"
    expected = discover_roles(clip(), photos, corpus=WORDS, phrases=2, concepts="tags", batch_size=1)
    if change is None:  # of other images
        shutil.copytree(tmp_path / "photos", tmp_path / "other")
        others = open_data(tmp_path / "other", "all")
        others.path(11).unlink()
        with pytest.raises(DataError, match=others.paths[11]):
            discover_roles(clip(), others.subset(range(1, 12)), corpus=WORDS, batch_size=1, keep=keep)
        assert keep.exists()
    else:
        keep.write_bytes(change)
    found = discover_roles(clip(), photos, corpus=WORDS, phrases=2, concepts="tags", batch_size=1, keep=keep)
    assert found.evidence == expected.evidence


def test_what_a_dead_writer_left_is_removed_and_a_living_ones_is_not(tmp_path: Path):
    for name in (".a.json.x1.part", ".a.json.x2.part", ".b.json.x3.part"):
        (tmp_path / name).write_text("half")
    with (tmp_path / ".a.json.x2.part").open("rb") as living:
        fcntl.flock(living, fcntl.LOCK_EX)
        write_atomic(tmp_path / "a.json", "{}")
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", ".a.json.x2.part", ".b.json.x3.part"}


def test_two_writers_of_one_file_leave_one_of_theirs(tmp_path: Path):
    from concurrent.futures import ThreadPoolExecutor

    texts = [str(number) * 20_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda text: write_atomic(tmp_path / "one.txt", text), texts * 25))
    assert (tmp_path / "one.txt").read_text() in texts
    assert [path.name for path in tmp_path.iterdir()] == ["one.txt"]


def test_an_unfinished_run_answers_nothing(photos, tmp_path):
    with pytest.raises(DearError):
        train(method(), photos, RECIPE, tmp_path / "run", stop=lambda: True)
    with pytest.raises(DearError, match=re.escape(str(tmp_path / "run"))):
        load_run(tmp_path / "run", clip())


def test_training_learns_though_its_caller_only_wants_answers(photos, tmp_path):
    with torch.no_grad():
        inside = train(method(), photos, RECIPE, tmp_path / "inside")
    outside = train(method(), photos, RECIPE, tmp_path / "outside")
    assert torch.equal(inside.method.tokens, outside.method.tokens)


def _worker(path: Path) -> None:
    exit_with_parent()
    path.write_text(str(os.getpid()))
    time.sleep(60)


def _parent(path: Path) -> None:
    multiprocessing.get_context("fork").Process(target=_worker, args=(path,)).start()
    time.sleep(60)


def test_workers_of_a_killed_grid_do_not_go_on_alone(tmp_path):
    parent = multiprocessing.get_context("fork").Process(target=_parent, args=(tmp_path / "pid",))
    parent.start()
    deadline = time.monotonic() + 30
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    worker = int((tmp_path / "pid").read_text())
    os.kill(parent.pid, signal.SIGKILL)
    parent.join()
    while Path(f"/proc/{worker}").exists() and " Z " not in Path(f"/proc/{worker}/stat").read_text():
        assert time.monotonic() < deadline, "the worker is still there"
        time.sleep(0.01)


LEAVE = """
import sys
import threading
from dear.cli import main
try:
    main()
except SystemExit:
    print("torch" in sys.modules)
"""


@pytest.mark.parametrize(
    "arguments",
    [["--version"], ["--help"], ["predict", "nowhere", "a.jpg"], ["predict", "nowhere.zip", "a.jpg"]],
    ids=" ".join,
)
def test_leaving_early_does_not_read_pytorch(arguments):
    command = [sys.executable, "-c", LEAVE, *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    assert finished.stdout.splitlines()[-1] == "False"
    assert "nowhere" not in arguments or "nowhere: no such run folder" in finished.stderr


def test_a_server_that_ends_leaves_no_thread_behind():
    before = threading.active_count()
    with trim_memory(seconds=0.01):
        time.sleep(0.05)
    assert threading.active_count() == before
