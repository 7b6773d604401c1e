"""The public names: every command is one function with the same parameters and defaults as its options."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from PIL import Image

import dear
from dear.cli import COMMANDS, build_app
from dear.clip.model import Clip
from dear.errors import DearError, InputError, UsageError
from dear.methods.zeroshot import ZeroShot
from dear.runs.model import Model
from dear.serve.task import serve
from dear.studio import app as studio
from dear.tasks.check import check
from dear.tasks.labeling.exchange import add_labels
from dear.tasks.labeling.start import start_session
from dear.tasks.mini.measure import measure_mini
from dear.tasks.mini.pretrain import pretrain_mini
from dear.tasks.roles.task import discover, report
from dear.tasks.speed import measure_speed

#: Command -> its public function, where the name differs or lies in a package.
NAMES = {"bench": "bench.run", "ablate": "bench.ablate", "export": "export_run", "report": "report_run"}
#: Commands without a public name -> their functions: those of groups and of this repository, and servers.
OTHERS: dict[str, Any] = {
    "data check": check,
    "label import": add_labels,
    "label next": dear.label_next,
    "label start": start_session,
    "mini": measure_mini,
    "pretrain": pretrain_mini,
    "roles discover": discover,
    "roles report": report,
    "serve": serve,
    "speed": measure_speed,
    "studio": studio.serving,
}
#: Commands that only list or show what is there.
NO_FUNCTION = {*("backbones", "methods", "cache"), *("data list", "roles show", "cache clear")}
GROUPS = ("data", "label", "roles", "cache")
#: Options of the command line alone: how results are printed, and what Python callers set elsewhere.
CLI_ONLY = {"as_json", "threads", "help"}
WITH_THREADS = {"bench", "ablate", "serve"}  #: `threads` is a parameter of their functions
CLI_ONLY_OF = {
    "adapt": {"extend"},  # a function: `dear.extend`
    "export": {"classes_file"},
    "label next": {"classes_file"},
    "label start": {"classes_file", "host", "port"},  # parameters of the server
    "serve": {"config"},  # a file of its options
    "predict": {"onnx", "classes_file"},  # an exported model is passed as the run; a list is a list
}
#: Parameters of Python alone: callbacks, and objects that no option can hold.
PYTHON_ONLY = {"progress", "stop", "report"}
PYTHON_ONLY_OF = {
    "adapt": {"mode"},
    "audit": {"held_out", "properties"},
    "choose": {"roles", "recipe"},
    "label next": {"seed"},
    "repair": {"test"},
    "bench": {"command"},
    "ablate": {"command"},
    "push": {"endpoint"},
    "serve": {"limits"},
    "pull": {"endpoint"},
}


def function_of(command: str) -> Any:
    if command in OTHERS:
        return OTHERS[command]
    function: Any = dear
    for part in NAMES.get(command, command).split("."):
        function = getattr(function, part)
    return function


def plain(value: Any) -> Any:
    """Defaults are compared as values: an empty list of options is None in both."""
    return None if value in ((), [], "") else str(value) if isinstance(value, Path) else value


def all_commands() -> list[str]:
    """Every command, those of groups included."""
    app: Any = typer.main.get_command(build_app())
    names = [name for name in COMMANDS if name not in GROUPS]
    return [*names, *(f"{group} {name}" for group in GROUPS for name in app.commands[group].commands)]


@pytest.mark.parametrize("command", [name for name in all_commands() if name not in NO_FUNCTION])
def test_a_command_is_one_function_with_the_same_parameters(command: str) -> None:
    parser: Any = typer.main.get_command(build_app())
    for word in command.split():
        parser = parser.commands[word]
    options = {p.name: p for p in parser.params}
    parameters = inspect.signature(function_of(command)).parameters
    cli_only = CLI_ONLY - {"threads"} if command in WITH_THREADS else CLI_ONLY
    expected = set(options) - cli_only - CLI_ONLY_OF.get(command, set())
    actual = set(parameters) - PYTHON_ONLY - PYTHON_ONLY_OF.get(command, set())
    assert actual == expected
    for name in expected:
        default = parameters[name].default
        if default is not inspect.Parameter.empty and not options[name].required:
            assert plain(default) == plain(options[name].default), name


def test_dir_lists_public_names_only() -> None:
    assert {*dir(dear)} == {*dear.__all__, "__version__"}
    for name in dear.__all__:
        assert callable(getattr(dear, name)) or inspect.ismodule(getattr(dear, name)), name
    with pytest.raises(AttributeError, match=r"dear\.load"):
        _ = dear.from_pretrained


def test_habits_of_other_libraries_meet_a_remedy() -> None:
    clip = dear.load("mini")
    with pytest.raises(AttributeError, match=r"dear\.zeroshot"):
        _ = clip.predict
    for wrong in (lambda: dear.Model("mini"), lambda: dear.Clip("mini")):
        with pytest.raises(UsageError, match=r"dear\.load"):
            wrong()
    pixels = clip.preprocess(Image.new("RGB", (64, 64)))[None]
    assert np.array_equal(clip(pixels), clip.encode_image(pixels))
    for wrong in (lambda: dear.DeAR("mini", ["a"]), lambda: dear.discover_roles("mini", [])):
        with pytest.raises(UsageError, match=r"dear\.load"):
            wrong()
    for run in (clip, "mini"):
        with pytest.raises(DearError, match=r"dear\.zeroshot"):
            dear.predict(run, Image.new("RGB", (64, 64)))
    for data in (lambda: dear.adapt(["a.jpg"]), lambda: dear.open_data(["a.jpg"])):
        with pytest.raises(DearError, match=r"dear\.Classifier"):
            data()


def test_arrays_files_and_pillow_images_are_the_same_image(tmp_path: Path) -> None:
    clip = dear.load("mini")
    picture = Image.effect_noise((80, 70), 60).convert("RGB")
    picture.save(tmp_path / "a.png")
    images = [np.asarray(picture), tmp_path / "a.png", picture]
    features = clip.encode_image(images)
    assert all(np.allclose(clip.encode_image(image)[0], features[1], atol=1e-4) for image in images)
    parts = dear.heads.decompose(clip, images)
    assert np.allclose(parts.total(), features, atol=1e-4)
    model = ZeroShot(clip, ["cat", "dog"])
    assert np.array_equal(model.logits(images), model.logits(clip.pixels(images)))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("colors")
    for split in ("train", "test"):
        for name, color in (("red", (210, 30, 30)), ("blue", (30, 60, 210))):
            (folder / split / name).mkdir(parents=True)
            for number in range(6):
                tone = tuple(min(255, part + 7 * number) for part in color)
                Image.new("RGB", (64, 64), tone).save(folder / split / name / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    model = dear.adapt(photos, out, method="clip-adapter", epochs=2)
    assert model.metrics[f"evaluation of {photos} (held out)"]["images"] == 12
    return out


def test_load_opens_runs_archives_and_backbones(run: Path, tmp_path: Path) -> None:
    assert isinstance(dear.load("mini"), Clip)
    assert isinstance(dear.load(run), Model)
    model = dear.load(run)
    assert "2 classes" in repr(model)
    assert "(held out)" in model._repr_html_()
    archive = dear.bundle(run, tmp_path / "run.zip")
    assert dear.load(archive).classes == ("blue", "red")


def test_what_people_guess(run: Path, photos: Path, tmp_path: Path) -> None:
    files = sorted((photos / "test" / "red").iterdir())
    answers = dear.predict(run, photos / "test" / "red", csv=tmp_path / "a.csv", jsonl=tmp_path / "a.jsonl")
    assert answers.labels == ["red"] * 6
    assert list(answers.to_frame()["answer"]) == answers.labels
    assert "red" in answers._repr_html_()
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 6
    assert dear.predict(run, [Image.open(files[0])], top=1)[0].classes[0][0] == "red"
    assert dear.predict(run, files[0].read_bytes(), classes="+yellow").labels == ["red"]
    with pytest.raises(UsageError, match="list"):  # images and run in the wrong order
        dear.predict([str(file) for file in files], run)
    words = ["something red", "something blue"]
    assert dear.zeroshot(files[:2], words).labels == ["something red"] * 2
    assert dear.zeroshot(photos, template="something {}").accuracy == {"default": 1.0}
    report = dear.evaluate(run, photos)
    assert report.to_frame()["images"].tolist() == [6, 6]
    assert "accuracy" in report._repr_html_()
    model = dear.load(run)
    assert model.probabilities(str(files[0])).shape == (1, 2)
    assert model.answers(files[0])[0].classes[0][0] == "red"
    with pytest.raises(UsageError, match=r"dear\.evaluate"):
        model.evaluate(photos)
    images = dear.open_data(photos, "test")
    assert len(repr(images)) < 100
    with pytest.raises(UsageError, match="'train'"):
        images["train"]
    image, label = images[-1]
    assert (image.size, images.classes[label]) == ((64, 64), "red")
    with pytest.raises(IndexError):
        images[12]


def test_cells_of_the_table_are_safe(photos: Path, run: Path, tmp_path: Path) -> None:
    odd = tmp_path / "=1+1\nb.png"
    odd.write_bytes((photos / "test" / "red" / "0.png").read_bytes())
    import csv

    folder = str(tmp_path)
    dear.predict(run, folder, csv=tmp_path / "answers.csv")
    rows = list(csv.DictReader((tmp_path / "answers.csv").open(newline="")))
    assert len(rows) == 1
    assert rows[0]["image"] == str(odd)
    relative = dear.predict(run, [str(odd)])
    assert "'=" in _first_cell(type(relative)((_renamed(relative[0], "=cmd|x"),)), tmp_path)


def _renamed(answer: Any, name: str) -> Any:
    return type(answer)(name, answer.classes)


def _first_cell(predictions: Any, folder: Path) -> str:
    predictions.write_csv(folder / "cell.csv")
    return (folder / "cell.csv").read_text().splitlines()[1].split(",")[0]


def test_classifier_transforms_names_new_classes_and_takes_keywords_only(photos: Path) -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    files = sorted((photos / "train").rglob("*.png"))
    y = [path.parent.name for path in files]
    with pytest.raises(TypeError):
        dear.Classifier("path/to/backbone")
    frozen = dear.Classifier(method="zeroshot", calibrate=False)
    pipeline = make_pipeline(frozen, LogisticRegression()).fit(files, y)
    assert pipeline.score(files, y) == 1.0
    features = frozen.transform(files[:2])
    assert np.allclose(np.linalg.norm(features, axis=1), 1)
    clf = dear.Classifier(method="clip-adapter", epochs=2).fit(files, y)
    assert set(clf.predict(files[:1], classes="green, yellow")) <= {"green", "yellow"}
    assert clf.predict(files[:1], classes=["+yellow"])[0] == y[0]
    assert set(clf.predict(files, reject=0.5)) <= {*y, "none of these"}
    explanation = clf.explain([files[0]])[0]
    assert explanation.answer == y[0]
    with pytest.raises(InputError, match="image 0"):
        clf.predict([b"no image"])
