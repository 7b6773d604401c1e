"""An exported file gives PyTorch's scores, says how to use it, and is refused when it is something else."""

import copy
import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import images, mixed_roles, tiny_clip, token_ids

import dear
from dear.calibration.calibration import Calibration, ModeCalibration
from dear.calibration.reference import Reference
from dear.data.images import ListedImages
from dear.errors import DearError, InputError, UsageError
from dear.heads.roles import RoleMap
from dear.methods import DeAR, ZeroShot, build_method
from dear.runs.model import Model

pytest.importorskip("onnxscript", reason="the extra `onnx` is not installed")
if torch.__version__.startswith("2.6."):
    pytest.skip("PyTorch 2.6 loses the names of outputs; exporting refuses", allow_module_level=True)

from dear.export.graph import traceable_method
from dear.export.onnx import export_onnx
from dear.export.runtime import Loss, OnnxModel, predict

CLASSES = ["a cat", 'a "dog"', "ein Vögelchen"]


def trained_dear(clip, **options):
    """A DeAR whose learned tensors are far from their start."""
    model = DeAR(clip, CLASSES, ids=token_ids(), **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)) * 0.1)
    return model


@pytest.fixture(scope="module")
def clip():
    return tiny_clip(dtype=torch.float32)


@pytest.fixture(scope="module")
def model(clip):
    return trained_dear(clip, roles=mixed_roles())


def shallow(clip):
    """Zero-shot CLIP on random towers of two layers, otherwise of the shape of `clip`: quick to trace."""
    vision, text = (replace(tower, layers=2) for tower in (clip.config.vision, clip.config.text))
    config = replace(clip.config, vision=vision, text=text)
    torch.manual_seed(1)
    return ZeroShot(dear.Clip(config), CLASSES, ids=token_ids())


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("onnx") / "model.onnx"
    export_onnx(model, path)
    return path


def noise(size, seed=0, mode="RGB"):
    shape = (*size[::-1], 3)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)).convert(mode)


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_scores_of_every_mode_equal_pytorch_for_any_batch(model, exported, batch):
    pixels = images(batch, dtype=torch.float32, seed=batch)
    got = OnnxModel(exported).run(pixels.numpy())
    wanted = model.all_logits(pixels)
    assert list(got) == ["scores", "decoupled"]
    assert not torch.allclose(wanted["fused"], wanted["decoupled"], atol=1e-2)
    for name, mode in (("scores", "fused"), ("decoupled", "decoupled")):
        assert np.abs(got[name] - wanted[mode].numpy()).max() < 1e-3


def test_exporting_leaves_the_method_as_it_was(clip, model, exported):
    assert type(clip).__name__ == "Clip"
    assert clip.visual.fused
    assert model.clip is clip
    assert "cached" not in model.__dict__


def test_the_file_says_how_to_use_it_and_nothing_of_this_machine(clip, exported):
    meta = OnnxModel(exported).metadata
    assert meta.classes == tuple(CLASSES)
    assert meta.fingerprint == clip.fingerprint
    assert meta.method == "dear"
    assert meta.modes == ("fused", "decoupled")
    assert meta.preprocessing.size == 24
    assert meta.preprocessing.mean == tuple(clip.config.mean)
    content = exported.read_bytes()
    assert b".py" not in content
    assert b"site-packages" not in content
    assert [p.name for p in exported.parent.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize(
    ("size", "mode"), [((24, 24), "RGB"), ((61, 40), "RGB"), ((30, 97), "L"), ((50, 33), "RGBA")]
)
def test_pixels_without_pytorch_equal_the_backbones(clip, exported, size, mode):
    image = noise(size, mode=mode)
    got = OnnxModel(exported).preprocess(image)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, clip.preprocess(image).numpy(), atol=1e-6)


def test_predictions_equal_pytorchs(clip, model, exported, tmp_path):
    paths = []
    for number in range(3):
        paths.append(tmp_path / f"{number}.png")
        noise((40, 50), seed=number).save(paths[-1])
    batch = torch.stack([clip.preprocess(Image.open(path)) for path in paths])
    for mode in ("fused", "decoupled", None):
        wanted = model.logits(batch, mode).softmax(-1)
        for row, answer in zip(wanted, predict(exported, paths, top=2, mode=mode), strict=True):
            assert len(answer.classes) == 2
            assert answer.classes[0][0] == CLASSES[int(row.argmax())]
            assert answer.classes[0][1] == pytest.approx(float(row.max()), abs=1e-4)


def test_answering_does_not_import_pytorch(exported, tmp_path):
    noise((30, 30)).save(tmp_path / "x.png")
    code = (
        "import sys\n"
        "from dear.export.runtime import predict\n"
        f"print(predict({str(exported)!r}, [{str(tmp_path / 'x.png')!r}])[0].classes[0][0])\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in CLASSES


def test_the_encoder_alone_gives_features(clip, tmp_path):
    model = trained_dear(shallow(clip).clip, roles=mixed_roles(range(2, 3)))
    written = export_onnx(model, tmp_path / "e.onnx", encoder_only=True)
    assert written.outputs == ("features", "attributes")
    runtime = OnnxModel(tmp_path / "e.onnx")
    pixels = images(3, dtype=torch.float32, seed=9)
    got = runtime.run(pixels.numpy())
    f_cls, f_attr = model.image_features(pixels)
    np.testing.assert_allclose(got["features"], f_cls.numpy(), atol=1e-4)
    np.testing.assert_allclose(got["attributes"], f_attr.numpy(), atol=1e-4)
    assert runtime.metadata.attributes == tuple(model.attributes)
    with pytest.raises(UsageError, match=r"e\.onnx"):
        runtime.predict([noise((30, 30))])


def test_a_half_precision_zero_shot_model_is_exported_in_float32(clip, tmp_path):
    half = copy.deepcopy(shallow(clip).clip).to(torch.bfloat16)
    method = ZeroShot(half, CLASSES, ids=token_ids())
    export_onnx(method, tmp_path / "z.onnx")
    pixels = images(2, dtype=torch.float32)
    full = copy.deepcopy(half).to(torch.float32)
    wanted = (
        full.logit_scale
        * torch.nn.functional.normalize(full.encode_image(pixels), dim=-1)
        @ method.prompts.frozen.T
    )
    got = OnnxModel(tmp_path / "z.onnx").run(pixels.numpy())["scores"]
    np.testing.assert_allclose(got, wanted.numpy(), atol=1e-3)
    assert half.dtype == torch.bfloat16


@pytest.mark.parametrize("thin", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_dear_with_table_2_on_a_vit_b_16_agrees(tmp_path, thin):
    """With ViT-B/16's layers, heads and tokens; in the quick case a head has 8 channels instead of 64."""
    torch.manual_seed(0)
    config = dear.ClipConfig.named("ViT-B-16")
    if thin:
        vision, text = (
            replace(tower, width=8 * tower.heads, mlp=32 * tower.heads)
            for tower in (config.vision, config.text)
        )
        config = replace(config, vision=vision, text=text, embed_dim=64)
    model = trained_dear(dear.Clip(config), roles=RoleMap.table2())
    export_onnx(model, tmp_path / "b16.onnx")
    pixels = images(1, 224, dtype=torch.float32)
    got = OnnxModel(tmp_path / "b16.onnx", threads=1).run(pixels.numpy())
    wanted = model.all_logits(pixels)
    assert np.abs(got["scores"] - wanted["fused"].numpy()).max() < 1e-3
    assert np.abs(got["decoupled"] - wanted["decoupled"].numpy()).max() < 1e-3


@pytest.mark.parametrize("name", ["mmrl"])
def test_other_methods_are_exported_too(clip, name, tmp_path):
    method = build_method(name, shallow(clip).clip, CLASSES, ids=token_ids())
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) * 0.05)
    export_onnx(method, tmp_path / "m.onnx")
    pixels = images(3, dtype=torch.float32, seed=4)
    got = OnnxModel(tmp_path / "m.onnx").run(pixels.numpy())["scores"]
    np.testing.assert_allclose(got, method.logits(pixels).numpy(), atol=1e-3)


def test_a_method_with_a_focus_is_traced_without_fused_attention(clip):
    heads = ((clip.config.vision.layers, 0), (clip.config.vision.layers, 2))
    method = build_method("linear-probe", clip, CLASSES, ids=token_ids(), focus=heads)
    copied = traceable_method(method)
    assert clip.visual.fused
    assert not copied.clip.visual.fused
    assert copied.focus == heads
    pixels = images(2, dtype=torch.float32)
    for one, other in zip(copied.inference_stage(pixels), method.inference_stage(pixels), strict=True):
        torch.testing.assert_close(one, other)


def test_a_method_that_works_image_by_image_is_refused(clip, tmp_path):
    method = build_method("cocoop", shallow(clip).clip, CLASSES)
    with pytest.raises(DearError, match="cocoop"):
        export_onnx(method, tmp_path / "m.onnx")
    with pytest.raises(UsageError, match="encoder"):
        export_onnx(method, tmp_path / "m.onnx", encoder_only=True)
    assert not (tmp_path / "m.onnx").exists()


def test_an_old_file_survives_a_failed_export(clip, exported, tmp_path, monkeypatch):
    import onnx_ir

    traced = SimpleNamespace(model=onnx_ir.load(exported))
    monkeypatch.setattr("dear.export.onnx._trace", lambda *_: traced)
    path = tmp_path / "m.onnx"
    path.write_bytes(b"old")
    monkeypatch.setattr("dear.export.onnx._difference", lambda *_: 0.5)
    with pytest.raises(DearError, match=r"0\.5"):
        export_onnx(shallow(clip), path)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


def test_files_that_are_no_export_get_a_sentence(exported, tmp_path):
    import onnx

    with pytest.raises(DearError, match=r"missing\.onnx"):
        OnnxModel(tmp_path / "missing.onnx")
    (tmp_path / "text.onnx").write_text("hello")
    with pytest.raises(DearError, match=r"text\.onnx"):
        OnnxModel(tmp_path / "text.onnx")
    (tmp_path / "cut.onnx").write_bytes(exported.read_bytes()[:2000])
    with pytest.raises(DearError, match=r"cut\.onnx"):
        OnnxModel(tmp_path / "cut.onnx")
    model = onnx.load(exported)
    for changes, item in (
        ({"format": "other"}, ""),
        ({"schema": "9"}, "'9'"),
        ({"classes": "not json"}, "classes"),
        ({"classes": "[1, 2]"}, "classes"),
        (
            {"preprocessing": json.dumps({"size": 10**9, "mean": [0, 0, 0], "std": [1, 1, 1]})},
            "preprocessing",
        ),
    ):
        words = {p.key: p.value for p in model.metadata_props} | changes
        other = onnx.ModelProto()
        other.CopyFrom(model)
        del other.metadata_props[:]
        onnx.helper.set_model_props(other, words)
        (tmp_path / "other.onnx").write_bytes(other.SerializeToString())
        with pytest.raises(DearError, match=rf"other\.onnx.*{item}"):
            OnnxModel(tmp_path / "other.onnx")


@pytest.fixture(scope="module")
def rejecting(clip, tmp_path_factory):
    """Zero-shot CLIP with a calibration and features of training images, and its exported file."""
    method = shallow(clip)
    reference = Reference.of(
        method.clip.encode_image(images(12, dtype=torch.float32, seed=3)).detach(), torch.arange(12) % 3
    )
    largest = method.logits(images(12, dtype=torch.float32, seed=4)).amax(dim=-1) / 3
    own = ModeCalibration(temperature=3.0, logits=tuple(largest.tolist()))
    nearness = tuple(reference.mutual_nearness.tolist())
    model = Model(method, Calibration(modes={"default": own}, nearness=nearness), reference=reference)
    path = tmp_path_factory.mktemp("rejecting") / "full.onnx"
    assert export_onnx(model, path).rejects
    return model, path


@pytest.fixture
def traced(rejecting, monkeypatch):
    """The model of `rejecting`, whose graph is read from its file instead of being traced again."""
    import onnx_ir

    model, path = rejecting
    monkeypatch.setattr("dear.export.onnx._trace", lambda *_: SimpleNamespace(model=onnx_ir.load(path)))
    return model


def test_none_of_these_agrees_with_the_run(rejecting):
    model, path = rejecting
    runtime = OnnxModel(path)
    photos = [noise((40, 50), seed=number) for number in range(6)] + [Image.new("RGB", (30, 30), "red")]
    pixels = np.stack([runtime.preprocess(photo) for photo in photos])
    np.testing.assert_allclose(runtime.run(pixels)["known"], model.scores(photos), rtol=1e-3, atol=1e-3)
    flags = set()
    for share in (0.05, 0.3, 0.5):
        expected = [answer.rejected for answer in model.answers(photos, reject=share)]
        assert [answer.rejected for answer in runtime.predict(photos, reject=share)] == expected
        flags |= set(expected)
    assert flags == {True, False}
    assert [answer.rejected for answer in runtime.predict(photos)] == [None] * 7
    with pytest.raises(UsageError, match=r"0\.6"):
        runtime.predict(photos, reject=0.6)


def test_a_file_without_held_out_scores_rejects_nothing(exported):
    with pytest.raises(UsageError, match="reject"):
        OnnxModel(exported).predict([noise((30, 30))], reject=0.05)


def labeled(method, count=9):
    """Images with the answers of the method as labels."""
    photos = tuple(noise((40, 50), seed=number) for number in range(count))
    labels = method.logits(torch.stack([method.clip.preprocess(photo) for photo in photos])).argmax(dim=-1)
    return ListedImages(photos, labels, tuple(CLASSES), name="noise")


@pytest.mark.parametrize("precision", ["float16", "int8"])
def test_a_smaller_file_stores_what_it_loses(rejecting, traced, tmp_path, precision):
    full, data = rejecting[1], labeled(traced.method)
    small = export_onnx(traced, tmp_path / "m.onnx", precision=precision, images=data, max_loss=100)
    assert small.bytes < full.stat().st_size * 0.8  # per-image parts stay in float32
    assert (small.loss.images, small.loss.float32) == (9, 1)
    runtime = OnnxModel(tmp_path / "m.onnx")
    assert runtime.metadata.precision == precision
    assert runtime.metadata.loss == small.loss
    new, old = (which.probabilities(data.items) for which in (runtime, OnnxModel(full)))
    assert 0 < np.abs(new - old).max() < 0.1
    assert small.loss.same == pytest.approx((new.argmax(1) == old.argmax(1)).mean())
    assert runtime.predict(data.items[:1], reject=0.5)[0].rejected is not None


def test_a_file_that_loses_too_much_is_not_written(traced, tmp_path, monkeypatch):
    loss = Loss(data="noise", images=9, float32=0.9, reduced=0.85, same=0.9)
    monkeypatch.setattr("dear.export.onnx.measure_loss", lambda *_: loss)
    (tmp_path / "m.onnx").write_bytes(b"old")
    with pytest.raises(DearError, match=r"\b5\.0"):
        export_onnx(traced, tmp_path / "m.onnx", precision="int8", images=labeled(traced.method))
    assert (tmp_path / "m.onnx").read_bytes() == b"old"


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"precision": "int4"}, "int4"),
        ({"precision": "int8", "encoder_only": True}, "encoder_only"),
        ({"precision": "int8"}, "images"),
        ({"precision": "int8", "max_loss": -1}, "-1"),
        ({"precision": "int8", "images": ListedImages((), torch.zeros(0), ("a fish",))}, "a fish"),
    ],
)
def test_a_precision_that_cannot_be_measured_is_rejected_first(clip, tmp_path, options, word):
    with pytest.raises(UsageError, match=word):
        export_onnx(shallow(clip), tmp_path / "m.onnx", **options)
    assert not list(tmp_path.iterdir())


def test_a_wrong_image_or_mode_gets_a_sentence(exported, tmp_path):
    (tmp_path / "note.txt").write_text("no image")
    with pytest.raises(InputError, match=r"note\.txt"):
        predict(exported, [tmp_path / "note.txt"])
    with pytest.raises(UsageError, match="'best'"):
        predict(exported, [noise((30, 30))], mode="best")
    assert predict(exported, []) == []


@pytest.mark.parametrize("top", [0, -3])
def test_fewer_than_one_answer_is_refused(exported, top):
    with pytest.raises(UsageError, match=str(top)):
        OnnxModel(exported).predict([Image.new("RGB", (9, 9))], top=top)


def test_a_calibration_is_built_into_the_scores(clip, tmp_path):
    """An exported model divides by the temperature; new classes take the common scale."""
    method = shallow(clip)
    own = ModeCalibration(temperature=3.0, new_temperature=5.0)
    model = Model(method, Calibration(modes={"default": own}))
    image = noise((40, 30))
    pixels = torch.stack([method.clip.preprocess(image)])
    raw = method.logits(pixels)
    export_onnx(model, tmp_path / "trained.onnx")
    got = OnnxModel(tmp_path / "trained.onnx").probabilities([image])
    np.testing.assert_allclose(got, (raw / 3).softmax(-1).numpy(), atol=1e-4)
    method.trained_classes = ("something else",)
    wanted = raw / 5
    export_onnx(Model(method, model.calibration), tmp_path / "mixed.onnx")
    got = OnnxModel(tmp_path / "mixed.onnx").probabilities([image])
    np.testing.assert_allclose(got, wanted.softmax(-1).numpy(), atol=1e-4)
