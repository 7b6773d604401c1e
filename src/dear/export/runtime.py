"""Answers from an exported model with numpy, Pillow and onnxruntime alone; PyTorch is not imported."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray
from PIL.Image import Image

from dear.errors import DearError, UsageError
from dear.images.views import View, view_pixels
from dear.runs.answer import Answer
from dear.utils.extras import missing_extra
from dear.utils.text import Line, Strict, check, check_name, parse_json

ImageLike = str | os.PathLike[str] | bytes | Image
_AT_ONCE = 32
# How a tensor of an ONNX file names the other file that its numbers lie in: the key "location" of protobuf.
_ELSEWHERE = b"\x0a\x08location"


Channel = Annotated[float, Meta(ge=-1e6, le=1e6)]
Spread = Annotated[float, Meta(gt=1e-6, le=1e6)]
Names = tuple[Line, ...]
_AS_JSON = ("classes", "attributes", "modes", "outputs", "preprocessing")


class Preprocessing(Strict, frozen=True):
    """How an image becomes pixels."""

    size: Annotated[int, Meta(ge=1, le=4096)]
    mean: tuple[Channel, Channel, Channel]
    std: tuple[Spread, Spread, Spread]
    color: Line = "RGB"
    resize: Line = ""
    crop: Line = ""
    scale: Line = ""
    layout: Line = "NCHW"


class Description(Strict, frozen=True):
    """What an exported model says about itself; lists and objects are JSON in the file."""

    format: Literal["dear onnx"]
    schema: Literal["1"]
    modes: Annotated[Names, Meta(min_length=1)]
    outputs: Annotated[Names, Meta(min_length=1)]
    preprocessing: Preprocessing
    classes: tuple[str, ...] = ()
    attributes: Names = ()
    dear: Line = ""
    method: Line = ""
    template: Line = ""
    backbone: Line = ""
    fingerprint: Line = ""

    def __post_init__(self) -> None:
        if self.classes and len(self.outputs) != len(self.modes):
            raise ValueError(f"{len(self.outputs)} outputs for {len(self.modes)} modes")


class OnnxModel:
    """A file written by `dear export`, ready to answer.

    Args:
        path: the file.
        threads: of onnxruntime; 0 lets it choose.

    Raises:
        UsageError: onnxruntime is not installed.
        DearError: the file is missing, damaged, or was not written by `dear export`.
    """

    def __init__(self, path: str | os.PathLike[str], threads: int = 0) -> None:
        try:
            import onnxruntime
        except ImportError:
            raise missing_extra("running an ONNX model", "onnx") from None
        self.path = Path(path)
        if not os.path.isfile(self.path):
            raise DearError(
                f"{path}: no such ONNX model; dear.export.onnx.export_onnx writes one", hint="export"
            )
        options = quiet_session()
        options.intra_op_num_threads = threads
        try:
            data = self.path.read_bytes()
            if _ELSEWHERE in data:
                raise ValueError("it keeps numbers in another file, which an exported model never does")
            self._session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's errors share no public class
            raise DearError(
                f"{path}: is not a whole ONNX model ({_first_line(error)}); export it again"
            ) from None
        try:
            raw = self._session.get_modelmeta().custom_metadata_map
        except UnicodeDecodeError:
            raise DearError(f"{path}: its description is damaged (it is not UTF-8)") from None
        self.metadata = _parse(raw, self.path)
        self.outputs, self.classes, self.modes = (
            self.metadata.outputs,
            self.metadata.classes,
            self.metadata.modes,
        )
        self.size = self.metadata.preprocessing.size
        resize = self.metadata.preprocessing.resize
        self._view = View(self.size, resize.startswith("both sides"), "bilinear" in resize)
        self._mean = np.asarray(self.metadata.preprocessing.mean, dtype=np.float32).reshape(3, 1, 1)
        self._std = np.asarray(self.metadata.preprocessing.std, dtype=np.float32).reshape(3, 1, 1)
        takes = [value.name for value in self._session.get_inputs()]
        gives = {value.name for value in self._session.get_outputs()}
        if takes != ["pixels"] or not set(self.outputs) <= gives:
            raise DearError(f"{path}: its description does not fit its graph; export it again")

    def preprocess(self, image: ImageLike) -> NDArray[np.float32]:
        """An image to normalized pixels [3, S, S], as the model was trained.

        Raises:
            InputError: it is not an image that can be read.
        """
        view = view_pixels(image, self._view).astype(np.float32)  # [S, S, 3]
        pixels: NDArray[np.float32] = (view.transpose(2, 0, 1) / np.float32(255) - self._mean) / self._std
        return pixels

    def run(self, pixels: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
        """All outputs, by name, of normalized pixels [B, 3, S, S]."""
        try:
            values = self._session.run(list(self.outputs), {"pixels": pixels})
        except Exception as error:  # see `__init__`
            raise DearError(f"{self.path}: its graph cannot be run ({_first_line(error)})") from None
        return dict(zip(self.outputs, values, strict=True))

    def probabilities(self, images: Sequence[ImageLike], mode: str | None = None) -> NDArray[np.float32]:
        """Probability of every class, [n, C]: calibrated if the run was, else under CLIP's temperature.

        Raises:
            UsageError: the file holds the encoder alone, or has no such mode.
            InputError: an image cannot be read.
        """
        if not self.classes:
            raise UsageError(
                f"{self.path}: holds an encoder alone; export the whole model", hint="encoder-only"
            )
        if mode is not None and mode not in self.modes:
            raise UsageError(f"{self.path}: has no mode {mode!r}; it has {', '.join(self.modes)}")
        output = self.outputs[0 if mode is None else self.modes.index(mode)]
        parts = [np.empty((0, len(self.classes)), dtype=np.float32)]
        for start in range(0, len(images), _AT_ONCE):
            pixels = np.stack([self.preprocess(p) for p in images[start : start + _AT_ONCE]])
            scores = self.run(pixels)[output]
            if np.shape(scores) != (len(pixels), len(self.classes)) or not np.isfinite(scores).all():
                raise DearError(
                    f"{self.path}: its graph does not give a finite score for each of its "
                    f"{len(self.classes)} classes; export it again"
                )
            parts.append(_softmax(scores))
        return np.concatenate(parts)

    def predict(self, images: Sequence[ImageLike], top: int = 5, mode: str | None = None) -> list[Answer]:
        """The `top` likeliest classes of each image.

        Raises:
            UsageError: `top` is less than 1; or as `probabilities`.
        """
        if top < 1:
            raise UsageError(f"top = {top}: ask for at least one answer per image")
        answers = []
        for image, row in zip(images, self.probabilities(images, mode), strict=True):
            order = np.argsort(-row, kind="stable")[:top]
            name = os.fspath(image) if isinstance(image, str | os.PathLike) else "image"
            answers.append(Answer(name, tuple((self.classes[i], float(row[i])) for i in order)))
        return answers


def predict(
    onnx_path: str | os.PathLike[str], image_paths: Sequence[ImageLike], top: int = 5, mode: str | None = None
) -> list[Answer]:
    """The `top` likeliest classes of each image, from a file written by `dear export`."""
    return OnnxModel(onnx_path).predict(image_paths, top, mode)


def quiet_session() -> Any:
    """Session options that keep onnxruntime's remarks about the graph to itself."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return options


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _softmax(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    result: NDArray[np.float32] = powers / powers.sum(axis=1, keepdims=True)
    return result


def _parse(raw: dict[str, str], path: Path) -> Description:
    """The file's metadata, checked."""
    if raw.get("format") != "dear onnx":
        raise DearError(f"{path}: is an ONNX model, but not one that dear exported")
    if raw.get("schema") != "1":
        raise DearError(f"{path}: has schema {raw.get('schema')!r}; this version of dear reads 1")
    try:
        values = {key: parse_json(value, key) if key in _AS_JSON else value for key, value in raw.items()}
        description = check(values, Description, "metadata", "description")
        for name in description.classes:
            check_name(name)
    except DearError as error:
        raise DearError(f"{path}: its description is damaged ({error})") from None
    return description
