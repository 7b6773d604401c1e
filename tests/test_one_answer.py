"""A run says the same of an image on every surface: probabilities to 1e-5, classes in the same order.

What is right is computed here by a plain loop: Pillow, the backbone's own view, the method, the temperature.
"""

from __future__ import annotations

import csv
import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tiny import shallow_mini, shallow_roles
from typer.testing import CliRunner

import dear
from dear.calibration.calibration import Calibration, ModeCalibration
from dear.calibration.reference import Reference
from dear.cli import build_app
from dear.clip.checkpoint import save_hf
from dear.clip.correction import Correction
from dear.clip.model import Clip
from dear.data import open_data
from dear.data.shots import few_shot
from dear.images.names import find_images
from dear.images.views import square
from dear.methods import build_method, list_methods
from dear.runs.folder import load_run, write_calibration
from dear.runs.model import Model
from dear.runs.recipe import Recipe
from dear.train.run import train
from dear.utils.progress import silent

METHODS = (
    "dear", "mmrl", "linear-probe", "clip-lora", "tip-adapter-f", "prolip", "two-stage", "purify", "zeroshot",
)  # fmt: skip
TASK, TEMPERATURE = "world:textures", 2.6
REMOVED = ("nothing", "heads", "words")
FOCUSED = ((3, 6), (4, 10), (5, 5))  # heads, for methods written "+focus"
Surface = Callable[[Path, "Photos", str], np.ndarray]


@dataclass
class Photos:
    """Four images in class folders, as files."""

    folder: Path
    files: list[str]
    classes: tuple[str, ...]
    clip: Clip


@pytest.fixture(scope="module")
def few():
    images = open_data(TASK, "train")
    return few_shot(images.select_classes(images.classes[:4]), 2, 1)


@pytest.fixture(scope="module")
def backbones(tmp_path_factory) -> dict[str, str]:
    """What `dear.load` takes: a backbone that crops, and the same weights squashing images."""
    clip = shallow_mini()
    crop, squash = tmp_path_factory.mktemp("crop"), tmp_path_factory.mktemp("squash")
    save_hf(clip, crop)
    save_hf(clip, squash)
    side = clip.config.vision.image_size
    images = {"size": {"height": side, "width": side}, "resample": 2}
    (squash / "preprocessor_config.json").write_text(json.dumps(images))
    assert dear.load(squash).config.view != dear.load(crop).config.view == dear.load("mini").config.view
    return {"crop": str(crop), "squash": str(squash)}


@pytest.fixture(scope="module")
def photos(tmp_path_factory, few) -> Photos:
    """Wide, turned by EXIF, transparent, gray."""
    folder = tmp_path_factory.mktemp("photos")
    random = np.random.default_rng(0)
    task = open_data(TASK, "test")
    shots = [task.image(index) for index in range(0, 40, 10)]
    for name in few.classes[:2]:
        (folder / name).mkdir()
    first, second = (folder / name for name in few.classes[:2])
    wide = np.concatenate([np.asarray(shots[0]), random.integers(0, 256, (*shots[0].size, 3), np.uint8)], 1)
    Image.fromarray(wide).save(first / "wide.png")
    turned = Image.fromarray(np.asarray(shots[1])[:40])
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.save(first / "turned.jpg", exif=exif)
    clear = shots[2].convert("RGBA")
    clear.putalpha(Image.fromarray(random.integers(0, 256, clear.size, np.uint8)))
    clear.save(second / "clear.png")
    shots[3].convert("L").resize((70, 50)).save(second / "gray.png")
    (first / "@eaDir").mkdir()  # left behind by a network drive: no surface answers it
    shots[3].save(first / "@eaDir" / "thumb.png")
    files = find_images([str(folder)])
    assert len(files) == 4
    return Photos(folder, files, few.classes, shallow_mini())


def removal(clip: Clip, what: str) -> Correction | None:
    width = clip.config.embed_dim
    if what == "nothing":
        return None
    if what == "heads":
        return Correction(torch.eye(width), torch.zeros(width), ((clip.config.vision.layers, 1),), "test")
    direction = torch.nn.functional.normalize(clip.encode_text(["a photo at night"]).detach().float(), dim=1)[
        0
    ]
    return Correction(torch.eye(width) - torch.outer(direction, direction), torch.full((width,), 0.01))


def refusing_half(model: Model, files: list[str]) -> Calibration:
    """A calibration whose threshold lies amid the scores of the photos."""

    def around(values: torch.Tensor) -> tuple[float, ...]:
        middle, spread = float(values.quantile(0.5)), float(values.std())
        return tuple(np.linspace(middle - 0.1 * spread, middle + 2 * spread, 100).tolist())

    near = around(model.calibrator.nearness(model.features(files, cached=False)))
    return Calibration(
        nearness=near,
        modes={
            mode: ModeCalibration(TEMPERATURE, 1.7, logits=around((logits / TEMPERATURE).amax(1)))
            for mode, logits in model.logits(files).items()
        },
    )


_made: dict[tuple[str, str, str], tuple[Path, Photos]] = {}


@pytest.fixture
def run(request, tmp_path_factory, few, backbones, photos) -> tuple[Path, Photos]:
    """A run folder that was trained for a moment, made once, and the photos with its backbone."""
    name, backbone, removed = request.param
    if request.param not in _made:
        clip = dear.load(backbones[backbone])
        name, _, focus = name.partition("+")
        roles = {"roles": shallow_roles()} if name == "dear" else {}
        corrected = clip.with_correction(removal(clip, removed))
        more = {**roles, **({"focus": FOCUSED} if focus else {})}
        model = build_method(name, corrected, few.classes, template=few.template, **more)
        folder = tmp_path_factory.mktemp("runs") / "run"
        trained = train(model, few, Recipe.of(model, epochs=1, batch=8), folder)
        trained.reference = Reference.of(trained.features(few), few.labels)
        trained.calibration = refusing_half(trained, photos.files)
        write_calibration(folder, trained.calibration, trained.reference)
        _made[request.param] = folder, replace(photos, clip=clip)
    return _made[request.param]


def table(methods: tuple[str, ...]) -> list[tuple[str, str, str]]:
    return list(itertools.product(methods, ("crop", "squash"), REMOVED))


QUICK = [(name, "crop", "nothing") for name in METHODS]
OTHERS = [("crop", "heads"), ("squash", "nothing"), ("squash", "words")]
QUICK += [(name, *other) for name in ("dear", "linear-probe") for other in OTHERS]
QUICK += [("linear-probe+focus", "crop", "heads"), ("tip-adapter+focus", "squash", "words")]
QUICK += [("dear+focus", "crop", "heads"), ("dear+focus", "squash", "words")]
SLOW = [row for row in table(tuple(list_methods())) if row not in QUICK]


@torch.no_grad()
def literal(run: Path, photos: Photos) -> np.ndarray:
    """Probabilities [n, C] without any of the library's loops."""
    method, config = load_run(run, photos.clip), photos.clip.config
    rows = []
    for file in photos.files:
        view = np.asarray(square(file, config.view)) / 255
        pixels = torch.from_numpy((view - config.mean) / config.std).permute(2, 0, 1)
        logits = method(pixels[None].float())[method.modes[0]][0]
        rows.append((logits.double() / TEMPERATURE).softmax(-1).numpy())
    return np.stack(rows)


# -- surfaces: probabilities [n, C], of those that tell the likeliest class alone NaN elsewhere -------------


def in_order(answers: list[tuple[tuple[str, float], ...]], classes: tuple[str, ...]) -> np.ndarray:
    found = np.full((len(answers), len(classes)), np.nan)
    for row, named in enumerate(answers):
        values = [value for _, value in named]
        assert values == sorted(values, reverse=True)
        for name, value in named:
            found[row, classes.index(name)] = value
    return found


def by_predict(run: Path, photos: Photos, backbone: str) -> np.ndarray:
    words = ["predict", str(run), *map(str, photos.files), "--backbone", backbone, "--top", "4"]
    result = CliRunner().invoke(build_app(), [*words, "--device", "cpu", "--json"])
    found = json.loads(result.stdout)["predictions"]
    answers = [tuple((one["name"], one["probability"]) for one in each["classes"]) for each in found]
    return in_order(answers, photos.classes)


def likeliest(names: list[str], values: list[float], classes: tuple[str, ...]) -> np.ndarray:
    return in_order([((name, value),) for name, value in zip(names, values, strict=True)], classes)


def by_evaluate(run: Path, photos: Photos, backbone: str) -> np.ndarray:
    from dear.tasks.evaluate import evaluate

    images = open_data(photos.folder, "all")
    assert [str(images.path(index)) for index in range(len(images))] == photos.files
    for _ in range(2):  # the second time from the cache
        found = evaluate(run, images, backbone=backbone, device="cpu")
    mode = next(iter(found.answers))
    names = [found.classes[answer] for answer in found.answers[mode].tolist()]
    return likeliest(names, found.confidence[mode].tolist(), photos.classes)


def by_embed(run: Path, photos: Photos, backbone: str) -> np.ndarray:
    import pyarrow.parquet

    from dear.tasks.embed.task import embed

    out = run.parent / "embedded"
    if not out.exists():
        embed(photos.folder, out, run=str(run), backbone=backbone)
    rows = pyarrow.parquet.read_table(out).to_pydict()
    assert rows["path"] == photos.files
    return likeliest(rows["answer"], rows["probability"], photos.classes)


def by_classifier(run: Path, photos: Photos, backbone: str) -> np.ndarray:
    found = dear.Classifier.load(run, backbone, device="cpu")
    assert tuple(found.classes_) == photos.classes
    return found.predict_proba(photos.files)


def by_studio(run: Path, photos: Photos, backbone: str) -> np.ndarray:
    from dear.studio.classify import classify, open_uploads
    from dear.studio.state import open_state

    state = open_state(run.parent, str(run), backbone, data=str(photos.folder))
    verdicts = classify(
        state, open_uploads(photos.files), photos.classes, open_data(TASK, "test").template, 4
    )
    return in_order([next(iter(one.answers.values())) for one in verdicts], photos.classes)


def by_service(run: Path, photos: Photos, backbone: str) -> np.ndarray:
    from fastapi.testclient import TestClient

    from dear.serve.app import make_app
    from dear.serve.service import Service

    with TestClient(make_app(Service(run.parent, photos.clip))) as client:
        files = [("files", (Path(file).name, Path(file).read_bytes())) for file in photos.files]
        reply = client.post("/v1/models/run/classify", files=files, data={"top": "4"})
    assert reply.status_code == 200, reply.text
    answers = [tuple((o["name"], o["probability"]) for o in a["classes"]) for a in reply.json()["answers"]]
    return in_order(answers, photos.classes)


def by_audit(run: Path, photos: Photos, backbone: str) -> np.ndarray:
    from dear.tasks.audit.held_out import HeldOutScores

    method, images = load_run(run, photos.clip), open_data(photos.folder, "all")
    found = HeldOutScores.of(Model(method), images, photos.clip.config.vision.last_third, None, silent)
    return (found.scores.double() / TEMPERATURE).softmax(-1).numpy()


def by_report(run: Path, photos: Photos, backbone: str) -> np.ndarray:
    from dear.tasks.run_report.examine import examine

    facts = examine(Model.load(run, photos.clip), open_data(photos.folder, "all"))
    found = facts.trained.adapted
    names = [found.classes[answer] for answer in found.answers[facts.trained.mode].tolist()]
    return likeliest(names, found.confidence[facts.trained.mode].tolist(), photos.classes)


SURFACES = (
    by_predict, by_evaluate, by_embed, by_classifier, by_studio, by_service, by_audit, by_report,
)  # fmt: skip


def compare(found: np.ndarray, wanted: np.ndarray, tolerance: float = 1e-5) -> None:
    told = ~np.isnan(found)
    assert told.any(axis=1).all()
    np.testing.assert_allclose(found[told], wanted[told], atol=tolerance)
    np.testing.assert_array_equal(np.nanargmax(found, axis=1), wanted.argmax(axis=1))


# -- none of these: whether each image is refused, at the share that the service has ------------------------

SHARE = 0.05


@torch.no_grad()
def literal_refusals(run: Path, photos: Photos) -> list[bool]:
    """By standard scores of the largest logit and of the mean cosine with five training images."""
    method, config = load_run(run, photos.clip), photos.clip.config
    stored = json.loads((run / "calibration.json").read_text())
    held = np.array(stored["modes"][method.modes[0]]["logits"]), np.array(stored["nearness"])
    reference = load_file(run / "reference.safetensors")["features"].double().numpy()
    scores = []
    for file in photos.files:
        view = np.asarray(square(file, config.view)) / 255
        pixels = torch.from_numpy((view - config.mean) / config.std).permute(2, 0, 1)[None].float()
        largest = float(method(pixels)[method.modes[0]].max()) / TEMPERATURE
        feature = method.clip.encode_image(pixels)[0].double().numpy()
        near = np.sort(reference @ feature / np.linalg.norm(feature))[-5:].mean()
        scores.append([(x - own.mean()) / own.std() for x, own in zip((largest, near), held, strict=True)])
    held_scores = np.stack([(own - own.mean()) / own.std() for own in held], axis=1)
    found, known = (z[:, 0] - np.minimum(z[:, 1], 0) ** 2 for z in (np.array(scores), held_scores))
    return (found < np.sort(known)[4]).tolist()  # the fifth of a hundred


def refused_by_predict(run: Path, photos: Photos, backbone: str) -> list[bool]:
    out = run.parent / "answers.csv"
    words = ["predict", str(run), *photos.files, "--reject", "--backbone", backbone, "--csv", str(out)]
    result = CliRunner().invoke(build_app(), words)
    assert result.exit_code == 0, result.output
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert all((row["answer"] == "none of these") == (row["rejected"] == "yes") for row in rows)
    return [row["rejected"] == "yes" for row in rows]


def refused_by_evaluate(run: Path, photos: Photos, backbone: str) -> list[bool]:
    model = Model.load(run, backbone)
    for cached in (True, True, False):  # the second time from the cache
        found = model.evaluate(open_data(photos.folder, "all"), scores=True, cached=cached)
    return (found.scores[model.modes[0]] < model.calibrator.threshold(SHARE, model.modes[0]).value).tolist()


def refused_by_unknown(run: Path, photos: Photos, backbone: str) -> list[bool]:
    model = Model.load(run, backbone)
    return (model.scores(photos.files) < model.calibrator.threshold(SHARE, model.modes[0]).value).tolist()


def refused_by_classifier(run: Path, photos: Photos, backbone: str) -> list[bool]:
    found = dear.Classifier.load(run, backbone, device="cpu").set_params(reject=SHARE)
    return (found.predict(photos.files) == "none of these").tolist()


def refused_by_studio(run: Path, photos: Photos, backbone: str) -> list[bool]:
    from dear.studio.classify import classify, open_uploads
    from dear.studio.state import open_state

    state = open_state(run.parent, str(run), backbone, data=str(photos.folder))
    template = open_data(TASK, "test").template
    verdicts = classify(state, open_uploads(photos.files), photos.classes, template, 4, reject=SHARE)
    return [state.model.modes[0] in verdict.rejected for verdict in verdicts]


def refused_by_service(run: Path, photos: Photos, backbone: str) -> list[bool]:
    from fastapi.testclient import TestClient

    from dear.serve.app import make_app
    from dear.serve.service import Service

    with TestClient(make_app(Service(run.parent, photos.clip))) as client:
        files = [("files", (Path(file).name, Path(file).read_bytes())) for file in photos.files]
        reply = client.post("/v1/models/run/classify", files=files, data={"reject": "true"})
    assert reply.status_code == 200, reply.text
    return [answer["rejected"] for answer in reply.json()["answers"]]


@pytest.mark.parametrize(
    "run",
    [
        ("dear", "crop", "nothing"),
        ("clip-lora", "crop", "nothing"),
        ("prolip", "crop", "nothing"),
        ("linear-probe+focus", "crop", "heads"),
        ("linear-probe", "squash", "words"),
    ],
    indirect=True,
    ids="-".join,
)
def test_every_surface_refuses_the_same_images(run, backbones) -> None:
    folder, photos = run
    backbone = next(b for b in backbones.values() if dear.load(b).config.view == photos.clip.config.view)
    wanted = literal_refusals(folder, photos)
    assert 0 < sum(wanted) < len(wanted)
    surfaces = (
        refused_by_predict, refused_by_evaluate, refused_by_unknown, refused_by_classifier,
        refused_by_studio, refused_by_service,
    )  # fmt: skip
    assert {surface.__name__: surface(folder, photos, backbone) for surface in surfaces} == {
        surface.__name__: wanted for surface in surfaces
    }


def check_all(run: tuple[Path, Photos], backbones: dict[str, str]) -> None:
    folder, photos = run
    backbone = next(b for b in backbones.values() if dear.load(b).config.view == photos.clip.config.view)
    wanted = literal(folder, photos)
    different = {}
    for surface in SURFACES:
        try:
            compare(surface(folder, photos, backbone), wanted)
        except AssertionError as error:
            different[surface.__name__] = str(error)
    assert not different


@pytest.mark.parametrize("run", QUICK, indirect=True, ids="-".join)
def test_every_surface_gives_the_same_probabilities(run, backbones) -> None:
    check_all(run, backbones)


def test_loss_and_logits_take_images_or_pixels(photos) -> None:
    method = build_method("clip-adapter", photos.clip, photos.classes)
    pixels, labels = photos.clip.pixels(photos.files), torch.zeros(len(photos.files), dtype=torch.int64)
    torch.testing.assert_close(method.logits(photos.files), method.logits(pixels))
    torch.testing.assert_close(method.loss(photos.files, labels).total, method.loss(pixels, labels).total)


ORDER = (3, 0, 2, 1, 0, 3)  # other order, and two images twice
NAMES = ("ü (1)", "+a", "-b", "0", "🙂", "c'd e")


def asked_otherwise(photos: Photos, folder: Path) -> Photos:
    """The same images in another order, some twice, under other names."""
    files = []
    for name, place in zip(NAMES, ORDER, strict=True):
        source = Path(photos.files[place])
        files.append(str(folder / f"{name}{source.suffix}"))
        shutil.copy(source, files[-1])
    return replace(photos, files=files)


def by_model(run: Path, photos: Photos, backbone: str) -> np.ndarray:
    return Model.load(run, photos.clip).probabilities(photos.files).numpy()


@pytest.mark.parametrize("run", [(name, "crop", "nothing") for name in METHODS], indirect=True, ids="-".join)
def test_order_copies_and_names_of_images_threads_and_a_moved_run_change_no_surface(
    run, backbones, tmp_path
) -> None:
    folder, photos = run
    wanted = literal(folder, photos)[list(ORDER)]
    moved = tmp_path / "moved" / "run"
    shutil.copytree(folder, moved)
    questions, before = asked_otherwise(photos, tmp_path), torch.get_num_threads()
    different = {}
    try:
        torch.set_num_threads(3 - min(before, 2))  # one or two: not as many as before
        for surface in (by_model, by_predict, by_classifier, by_studio, by_service):
            try:
                compare(surface(moved, questions, backbones["crop"]), wanted)
            except AssertionError as error:
                different[surface.__name__] = str(error)
    finally:
        torch.set_num_threads(before)
    assert not different


@pytest.mark.slow
@pytest.mark.parametrize("run", SLOW, indirect=True, ids="-".join)
def test_every_surface_gives_the_same_probabilities_for_every_method(run, backbones) -> None:
    check_all(run, backbones)


@pytest.mark.parametrize(
    "run",
    [
        ("dear", "squash", "words"),
        ("linear-probe+focus", "crop", "heads"),
        pytest.param(("dear+focus", "crop", "heads"), marks=pytest.mark.slow),
        pytest.param(("linear-probe", "crop", "heads"), marks=pytest.mark.slow),
        pytest.param(("zeroshot", "crop", "nothing"), marks=pytest.mark.slow),
    ],
    indirect=True,
    ids="-".join,
)
def test_an_exported_model_gives_the_same_probabilities(run, tmp_path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from dear.export.onnx import export_onnx
    from dear.export.runtime import OnnxModel

    folder, photos = run
    export_onnx(Model.load(folder, photos.clip), tmp_path / "model.onnx")
    found = OnnxModel(tmp_path / "model.onnx")
    assert found.classes == photos.classes
    wanted = literal(folder, photos)
    compare(found.probabilities(photos.files), wanted, 1e-4)
    again = found.probabilities(asked_otherwise(photos, tmp_path).files)
    compare(again, wanted[list(ORDER)], 1e-4)
