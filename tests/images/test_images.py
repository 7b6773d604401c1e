"""Images of every kind become the RGB that is meant, and CLIP's view of them is the reference's."""

import contextlib
import io
import re
import warnings
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence

from dear.clip.config import CLIP_MEAN, CLIP_STD
from dear.errors import InputError
from dear.images.open import MAX_PIXELS, open_image
from dear.images.views import normalize, resize_crop, resize_short


def noise(width, height, seed=0, channels=3):
    rng = np.random.default_rng(seed)
    shape = (height, width, channels) if channels > 1 else (height, width)
    small = rng.integers(0, 256, shape, dtype=np.uint8)
    return Image.fromarray(small)


def encoded(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


# --- CLIP's view ---------------------------------------------------------------------------------------


def reference(size):
    from transformers.models.clip import image_processing_pil_clip as module

    return module.CLIPImageProcessorPil(
        size={"shortest_edge": size}, crop_size={"height": size, "width": size}
    )


@pytest.mark.parametrize(
    "shape", [(224, 224), (300, 200), (200, 301), (640, 480), (61, 90), (225, 224), (7, 5)]
)
@pytest.mark.parametrize("size", [224, 112])
def test_preprocess_equals_transformers(shape, size):
    """Equal to one step of 255 where both round the crop's corner alike, as for these shapes.

    For margins of 3, 7, 11, … pixels transformers rounds the corner down and CLIP's own transform rounds half
    to even, so the views are one pixel apart: see test_the_corner_is_rounded_half_to_even.
    """
    image = noise(*shape)
    expected = torch.from_numpy(reference(size)(image)["pixel_values"][0])
    got = normalize(resize_crop(image, size), CLIP_MEAN, CLIP_STD)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, atol=1 / 255 / min(CLIP_STD) + 1e-5, rtol=0)
    assert (got - expected).abs().mean() < 1e-4


def test_the_corner_is_rounded_half_to_even():
    """The rule of the transform that CLIP was published with: margin 1 -> 0, 3 -> 2, 5 -> 2, 7 -> 4."""
    for margin, corner in [(0, 0), (1, 0), (2, 1), (3, 2), (4, 2), (5, 2), (6, 3), (7, 4)]:
        image = Image.fromarray(np.tile(np.arange(8 + margin, dtype=np.uint8)[None, :, None], (8, 1, 3)))
        assert resize_crop(image, 8)[0, 0, 0] == corner


def test_the_long_side_is_rounded_down():
    for size, short, expected in [
        ((100, 33), 10, (10, 30)),
        ((33, 100), 10, (30, 10)),
        ((500, 375), 224, (224, 298)),
    ]:
        assert resize_short(np.array(noise(*size)), short).shape[:2] == expected


def test_normalize_takes_bytes_and_fractions():
    pixels = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    expected = (pixels.double() / 255 - torch.tensor(CLIP_MEAN).double().view(3, 1, 1)) / torch.tensor(
        CLIP_STD
    ).double().view(3, 1, 1)
    torch.testing.assert_close(normalize(pixels, CLIP_MEAN, CLIP_STD), expected.float())
    torch.testing.assert_close(normalize(pixels / 255, CLIP_MEAN, CLIP_STD), expected.float())


def test_an_absurdly_long_image_costs_no_memory():
    line = Image.new("RGB", (60_000, 1), (9, 9, 9))
    assert resize_crop(line, 32).unique().tolist() == [9]
    assert resize_crop(line.rotate(90, expand=True), 32).shape == (3, 32, 32)


# --- kinds of images -----------------------------------------------------------------------------------


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_applied(orientation):
    upright = Image.new("RGB", (40, 20), "black")
    upright.paste("red", (0, 0, 16, 8))  # red in the top left corner
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored = upright if orientation == 1 else upright.transpose(undo[orientation])
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = open_image(encoded(stored, "PNG", exif=exif))
    assert image.size == (40, 20)
    assert np.array_equal(np.asarray(image), np.asarray(upright))


def test_a_broken_exif_block_does_not_lose_the_image():
    data = encoded(noise(16, 8), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\x01\x12\0\x03junk")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert open_image(data).size == (16, 8)


def test_gray_and_one_bit():
    assert open_image(encoded(Image.new("L", (3, 3), 77), "PNG")).getpixel((1, 1)) == (77, 77, 77)
    assert open_image(encoded(Image.new("1", (3, 3), 1), "PNG")).getpixel((1, 1)) == (255, 255, 255)


def test_palette():
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.putpixel((1, 0), 1)
    opened = open_image(encoded(image, "PNG"))
    assert [opened.getpixel((x, 0)) for x in (0, 1)] == [(10, 20, 30), (200, 100, 50)]


def test_cmyk_jpeg():
    opened = open_image(encoded(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=95))
    red, green, blue = opened.getpixel((8, 8))
    assert red > 245
    assert green < 10
    assert blue < 10


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_sixteen_bit_gray_is_scaled(kind):
    values = np.array([[0, 257, 128 * 257, 65535, 30000]], dtype=np.uint16)
    opened = open_image(encoded(Image.fromarray(values), kind))
    expected = np.round(values / 65535 * 255).astype(np.uint8)
    assert np.array_equal(np.asarray(opened)[..., 0], expected)


def test_numbers_without_a_white_are_refused():
    with pytest.raises(InputError, match="floating-point"):
        open_image(encoded(Image.fromarray(np.ones((2, 2), dtype=np.float32)), "TIFF"))
    with pytest.raises(InputError, match="32-bit"):
        open_image(encoded(Image.fromarray(np.full((2, 2), 1 << 20, dtype=np.int32)), "TIFF"))


def test_transparent_images_lie_on_white():
    rgba = Image.new("RGBA", (3, 1), (0, 0, 0, 0))  # black under full transparency
    rgba.putpixel((1, 0), (255, 0, 0, 255))
    rgba.putpixel((2, 0), (0, 0, 0, 51))
    for kind in ("PNG", "TIFF"):
        opened = open_image(encoded(rgba, kind))
        assert [opened.getpixel((x, 0)) for x in range(3)] == [(255, 255, 255), (255, 0, 0), (204, 204, 204)]
    gray = Image.new("LA", (1, 1), (0, 0))
    assert open_image(encoded(gray, "PNG")).getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("mode", ["P", "L", "RGB"])
def test_a_color_marked_transparent_becomes_white(mode):
    image = Image.new(mode, (2, 1), 0)
    if mode == "P":
        image.putpalette([0, 0, 0, 9, 9, 9])
    image.putpixel((1, 0), {"P": 1, "L": 9, "RGB": (9, 9, 9)}[mode])
    data = encoded(image, "PNG", transparency=(0, 0, 0) if mode == "RGB" else 0)
    opened = open_image(data)
    assert [opened.getpixel((x, 0)) for x in (0, 1)] == [(255, 255, 255), (9, 9, 9)]


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_frame(kind):
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "lime", "blue")]
    data = encoded(
        frames[0],
        kind,
        save_all=True,
        append_images=frames[1:],
        **({"lossless": True} if kind == "WEBP" else {}),
    )
    assert len(list(ImageSequence.Iterator(Image.open(io.BytesIO(data))))) == 3
    assert open_image(data).getpixel((4, 4)) == (255, 0, 0)


def test_a_given_image_is_left_alone(tmp_path):
    given = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    assert open_image(given).mode == "RGB"
    assert given.mode == "RGBA"
    noise(9, 9).save(tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as lazy:
        assert open_image(lazy).size == (9, 9)
        lazy.load()


# --- what is refused -----------------------------------------------------------------------------------


def refused(path):
    with pytest.raises(InputError, match=re.escape(str(path))):
        open_image(path)


def test_files_that_are_no_images_are_named(tmp_path):
    text = tmp_path / "note.jpg"
    text.write_text("this is not an image\n")
    refused(text)
    empty = tmp_path / "empty.png"
    empty.touch()
    refused(empty)
    junk = tmp_path / "junk.png"
    junk.write_bytes(bytes(range(256)) * 4)
    refused(junk)
    refused(tmp_path / "absent.png")
    refused("https://example.org/a.jpg")
    refused(tmp_path)
    with pytest.raises(InputError, match="3 bytes"):
        open_image(b"abc")


def test_a_postscript_file_is_never_handed_to_an_interpreter(tmp_path):
    path = tmp_path / "a.jpg"
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n")
    refused(path)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF"])
def test_cut_files_are_named(tmp_path, kind):
    data = encoded(noise(64, 64), kind)
    for part in (2, 3, 10):
        path = tmp_path / f"cut{part}.{kind.lower()}"
        path.write_bytes(data[: len(data) // part])
        refused(path)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [10_001, 60_000])
def test_decompression_bombs_are_refused_before_decoding(tmp_path, side):
    """A PNG header that promises an image of `side` squared and holds almost nothing."""

    def chunk(kind, body):
        return len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")

    header = side.to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    path = tmp_path / "bomb.png"
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 100_000))
        + chunk(b"IEND", b"")
    )
    assert side * side > MAX_PIXELS
    refused(path)


def test_random_damage_never_escapes_as_another_error():
    rng = np.random.default_rng(0)
    for kind in ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF"):
        whole = np.frombuffer(encoded(noise(24, 24), kind), dtype=np.uint8)
        for _ in range(40):
            data = whole.copy()
            places = rng.integers(0, len(data), 6)
            data[places] = rng.integers(0, 256, 6, dtype=np.uint8)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with contextlib.suppress(InputError):
                    assert open_image(data.tobytes()).mode == "RGB"
