"""Random views: the same for one image and for a batch, Pillow's pixels, torchvision's distribution."""

import math

import numpy as np
import pytest
import torch
from crops import generator, photo, tensor
from PIL import Image

from dear.errors import InputError
from dear.images.resample_tensors import resampling_weights
from dear.train.crops import augment_batch, augment_image, crop_batch, sample_boxes


@pytest.mark.parametrize(
    ("shape", "size"), [((90, 70), 32), ((40, 60), 64), ((33, 33), 33), ((317, 421), 224)]
)
def test_a_batch_is_cropped_as_pillow_does(shape, size):
    """Oracle: Pillow's crop and resize on the same boxes; at most one step of 255 apart, and rarely.

    In one call Pillow may resize down before across, which clips other overshoots at sharp edges: still the
    same photo, but for a few pixels by a few steps.
    """
    width, height = shape
    images = [photo(width, height, seed) for seed in range(4)]
    boxes, flips = sample_boxes(torch.tensor([[height, width]] * 4), generator(1))
    flips = torch.tensor([True, False, True, False])
    views = crop_batch(torch.stack([tensor(i) for i in images]), boxes, flips, size)
    for image, box, flip, view in zip(images, boxes.tolist(), flips.tolist(), views, strict=True):
        top, left, tall, wide = box
        crop = image.crop((left, top, left + wide, top + tall))
        steps = (view.flip(-1) if flip else view) * 255
        passes = crop.resize((size, tall), Image.Resampling.BICUBIC).resize(
            (size, size), Image.Resampling.BICUBIC
        )
        difference = (steps - tensor(passes)).abs()
        assert difference.max() <= 1.001
        assert (difference > 0.5).float().mean() < 0.005
        whole = (steps - tensor(crop.resize((size, size), Image.Resampling.BICUBIC))).abs()
        assert whole.max() < 10
        assert (whole > 0.5).float().mean() < 0.03


def test_one_by_one_and_as_a_batch_are_the_same_views():
    shapes = [(50, 40), (40, 50), (61, 33), (48, 48), (20, 64)]
    images = [photo(w, h, seed) for seed, (w, h) in enumerate(shapes)]
    one = generator(3)
    singles = torch.stack([augment_image(image, 24, one) for image in images])

    padded = torch.zeros(len(images), 3, 64, 64, dtype=torch.uint8)
    for row, image in zip(padded, images, strict=True):
        row[:, : image.height, : image.width] = tensor(image)
    padded[:, :, 63, 63] = 255  # padding is never seen
    sizes = torch.tensor([[h, w] for w, h in shapes])
    padded_generator = generator(3)
    batch = augment_batch(padded, 24, padded_generator, sizes=sizes)
    assert batch.dtype == torch.float32
    assert (batch * 255 - singles).abs().max() <= 1.001
    assert torch.equal(one.get_state(), padded_generator.get_state())


def test_the_generator_decides_everything():
    batch = torch.stack([tensor(photo(48, 40, seed)) for seed in range(3)])
    torch.manual_seed(0)
    first = augment_batch(batch, 16, generator(5))
    torch.manual_seed(1)
    assert torch.equal(first, augment_batch(batch, 16, generator(5)))
    assert not torch.equal(first, augment_batch(batch, 16, generator(6)))


def test_mixed_precision_around_it_changes_nothing():
    batch = tensor(photo(48, 40))[None]
    plain = augment_batch(batch, 16, generator(5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(plain, augment_batch(batch, 16, generator(5)))


def test_boxes_follow_the_recipe():
    """Areas uniform in 0.5-1, aspects log-uniform in 3/4-4/3 among those that fit, flips one half."""
    n, side = 20_000, 1000
    boxes, flips = sample_boxes(torch.full((n, 2), side), generator())
    top, left, height, width = boxes.double().unbind(1)
    assert min(float(top.min()), float(left.min())) >= 0
    assert max(float((top + height).max()), float((left + width).max())) <= side
    area, aspect = height * width / side**2, width / height
    assert 0.498 < area.min() < 0.51
    assert 0.99 < area.max() <= 1
    assert 0.749 < aspect.min() < 0.76
    assert 1.32 < aspect.max() < 1.335
    assert abs(aspect.log().mean()) < 0.01
    assert abs(flips.double().mean() - 0.5) < 0.02
    # Oracle: the published loop, one image at a time, with other random numbers.
    rng = np.random.default_rng(0)
    plain = []
    for _ in range(5000):
        for _ in range(10):
            share, ratio = rng.uniform(0.5, 1), math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
            w, h = (
                round(math.sqrt(share * side * side * ratio)),
                round(math.sqrt(share * side * side / ratio)),
            )
            if w <= side and h <= side:
                plain.append((w * h / side**2, rng.integers(0, side - h + 1)))
                break
    shares, tops = np.array(plain).T
    assert abs(area.mean() - shares.mean()) < 0.006
    assert abs(area.std() - shares.std()) < 0.006
    assert abs(top.mean() - tops.mean()) < 6


@pytest.mark.parametrize("shape", [(1, 1), (1, 500), (500, 1), (3, 2), (1000, 10)])
def test_odd_shapes_get_a_box_inside(shape):
    boxes, _ = sample_boxes(torch.tensor([shape] * 200), generator())
    top, left, height, width = boxes.unbind(1)
    assert int(height.min()) >= 1
    assert int(width.min()) >= 1
    assert int(top.min()) >= 0
    assert int((top + height).max()) <= shape[0]
    assert int((left + width).max()) <= shape[1]
    assert augment_image(Image.new("RGB", shape, "red"), 8, generator()).shape == (3, 8, 8)


def test_a_image_too_long_for_any_crop_gets_the_largest_centered_one():
    boxes, _ = sample_boxes(torch.tensor([[10, 1000]]), generator())
    assert boxes.tolist() == [[0, (1000 - 13) // 2, 10, 13]]


def test_weights_sum_to_one_and_stay_inside():
    weights = resampling_weights(torch.tensor([3, 0]), torch.tensor([7, 20]), 20, 5)
    assert weights.shape == (2, 5, 20)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 5))
    assert float(weights[0, :, :3].abs().max()) == 0
    assert float(weights[0, :, 10:].abs().max()) == 0
    same = resampling_weights(torch.tensor([0]), torch.tensor([6]), 6, 6)[0]
    torch.testing.assert_close(same, torch.eye(6))


def test_nonsense_ranges_are_refused():
    with pytest.raises(InputError, match="scale"):
        augment_image(Image.new("RGB", (8, 8)), 4, generator(), scale=(0.0, 1.0))
    with pytest.raises(InputError, match="ratio"):
        augment_image(Image.new("RGB", (8, 8)), 4, generator(), ratio=(2.0, 1.0))
