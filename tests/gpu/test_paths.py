"""What a GPU computes by another path: kernels, 16 bits, recorded inference, views, rendered images."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from crops import generator, photo, tensor
from device_files import file_of
from kernel_runs import run_checks
from PIL import Image
from recorded import batch, gradients, model
from stacks import alone, dear_adapters
from tiny import images, tiny_clip

from dear import world
from dear.clip.gpu import Recorder, Recording
from dear.clip.gpu import tower as fast
from dear.errors import InputError
from dear.images.views import View, read_views
from dear.serve import mixed_batch
from dear.train.crops import augment_batch

pytestmark = pytest.mark.gpu


def test_every_kernel_on_the_gpu() -> None:
    run_checks(TRITON_INTERPRET="0")


@pytest.mark.parametrize("size", ["tiny", "ViT-B-32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_fast_path_is_as_near_to_float32_as_the_plain_one(
    size: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits and the gradient of every learned tensor, in 16 bits."""
    exact, half = model(size), model(size, dtype)
    pixels, labels = batch(exact, 0)
    assert fast.is_supported(half.clip.visual, pixels, half.attribute_edit(half.tokens, None))

    def answers(method) -> dict[str, torch.Tensor]:
        names = [name for name, _ in method.named_parameters()]
        grads = dict(zip(names, gradients(method, pixels, labels), strict=True))
        return {**grads, **method.all_logits(pixels)}

    expected, actual = answers(exact), answers(half)
    monkeypatch.setenv("DEAR_KERNELS", "0")
    plain = answers(half)
    for name, true in expected.items():
        error, plain_error = (float((g[name] - true).norm() / true.norm()) for g in (actual, plain))
        assert error < 1.5 * plain_error + 2e-3, (name, error, plain_error)
        assert name in half.modes or error < 0.05, (name, error)


def test_recorded_inference_of_many_adapters_gives_the_answers_of_each() -> None:
    clip = tiny_clip(dtype=torch.float32).cuda()
    models = dear_adapters(5, clip)
    pixels = images(5, dtype=torch.float32).cuda()
    expected = alone(models, pixels)
    recorder = Recorder()
    with torch.inference_mode():
        for order in ([0, 1, 2], [3, 4, 0], [2, 2, 1], [4], [4], [1]):
            answers = mixed_batch.logits([models[i] for i in order], pixels[order], run=recorder)
            for place, one in zip(order, answers, strict=True):
                torch.testing.assert_close(one, expected[place], rtol=1e-4, atol=1e-4)
    assert len(recorder) == 4
    assert all(isinstance(one, Recording) for one in recorder._recordings.values())


def test_views_are_those_of_a_cpu() -> None:
    pixels = torch.stack([tensor(photo(150, 120, seed)) for seed in range(8)])
    here = augment_batch(pixels, 96, generator(5))
    there = augment_batch(pixels.cuda(), 96, generator(5)).cpu()
    assert (here - there).abs().max() * 255 <= 1.001
    assert ((here - there).abs() * 255 > 0.5).float().mean() < 0.01


def test_files_read_to_the_gpu_are_those_of_the_cpu(tmp_path: Path) -> None:
    """By its own decoder where nvImageCodec is installed, else by the CPU."""
    files: list[bytes] = []
    for number, (width, height) in enumerate([(150, 120), (97, 203), (64, 64), (33, 31), (640, 480)]):
        files += [
            file_of(photo(width, height, number), subsampling=way, quality=70 + 7 * way) for way in range(3)
        ]
        files.append(file_of(photo(width, height, number).convert("L")))
        files.append(file_of(photo(width, height, number), "PNG"))
    exif = Image.Exif()
    for orientation in range(1, 9):
        exif[0x112] = orientation
        files.append(file_of(photo(90, 60), exif=exif.tobytes()))
    for size in (48, View(48, squash=True, bilinear=True)):
        there, here = read_views(files, size, torch.device("cuda")), read_views(files, size)
        off = (there.cpu().int() - here.int()).abs()
        assert there.is_cuda
        assert off.max() <= 1
        assert (off > 0).float().mean() < 0.05
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(files[0][:-200])
    with pytest.raises(InputError, match=r"bad\.jpg"):
        read_views([bad, *files], 48, torch.device("cuda"))


def test_rendered_images_are_those_of_a_cpu_up_to_rounding() -> None:
    scenes = world.sample(128, torch.Generator().manual_seed(1))
    difference = world.render(scenes).int() - world.render(scenes.to("cuda")).cpu().int()
    assert difference.abs().max() <= 1
