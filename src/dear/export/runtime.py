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

from dear.calibration.rank import threshold_rank
from dear.errors import DearError, UsageError
from dear.images.views import View, view_pixels
from dear.runs.answer import Answer
from dear.runs.tree import REJECTED, Tree, check_certain
from dear.utils.extras import missing_extra
from dear.utils.schema import Line, Strict, check, parse_json
from dear.utils.text import check_name

ImageLike = str | os.PathLike[str] | bytes | Image
_AT_ONCE = 32
# How a tensor of an ONNX file names the other file that its numbers lie in: the key "location" of protobuf.
_ELSEWHERE = b"\x0a\x08location"


Channel = Annotated[float, Meta(ge=-1e6, le=1e6)]
Spread = Annotated[float, Meta(gt=1e-6, le=1e6)]
Chance = Annotated[float, Meta(ge=0, le=1)]
Finite = Annotated[float, Meta(ge=-1e30, le=1e30)]
Names = tuple[Line, ...]
_AS_JSON = (
    "classes", "attributes", "modes", "outputs", "preprocessing", "thresholds", "held_out", "loss", "tree"
)  # fmt: skip


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


class Loss(Strict, frozen=True):
    """What a file in float16 or int8 loses, measured when it was written."""

    data: Line  #: dataset
    images: Annotated[int, Meta(ge=1)]
    float32: Chance  #: accuracy of the file in float32
    reduced: Chance  #: accuracy of this file on the same images
    same: Chance  #: share of images with the same answer

    @property
    def points(self) -> float:
        """Lost accuracy in percentage points; below 0 where the file is better."""
        return 100 * (self.float32 - self.reduced)


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
    task: Literal["one label", "several labels"] = "one label"
    thresholds: dict[str, tuple[Chance, ...]] = {}  # noqa: RUF012 - msgspec copies it
    #: by mode, sorted: scores of held-out images, from which the threshold of "none of these" is read
    held_out: dict[str, tuple[Finite, ...]] = {}  # noqa: RUF012 - msgspec copies it
    #: the parent of each class and inner node that has one
    tree: dict[str, str] = {}  # noqa: RUF012 - msgspec copies it
    precision: Literal["float32", "float16", "int8"] = "float32"
    loss: Loss | None = None

    def __post_init__(self) -> None:
        expected = len(self.modes) * (2 if self.held_out else 1)
        if self.classes and len(self.outputs) != expected:
            raise ValueError(f"{len(self.outputs)} outputs where {len(self.modes)} modes need {expected}")
        if self.held_out and set(self.held_out) != set(self.modes):
            raise ValueError("held_out must name each mode")
        for node in self.tree:
            above = self.tree[node]
            for _ in self.tree:
                above = self.tree.get(above, "")
            if above:
                raise ValueError(f"tree: {node!r} is in a cycle")
        if self.task == "several labels":
            for mode in self.modes:
                if len(self.thresholds.get(mode, ())) != len(self.classes):
                    raise ValueError(f"mode {mode}: needs a threshold for each of its classes")


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
        return self._answers(images, mode)[0]

    def _answers(
        self, images: Sequence[ImageLike], mode: str | None, reject: float | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        """Probabilities [n, C] and, with `reject`, the scores [n] that its thresholds are compared with."""
        if not self.classes:
            raise UsageError(
                f"{self.path}: contains only the encoder; export the whole model", hint="encoder-only"
            )
        if mode is not None and mode not in self.modes:
            raise UsageError(f"{self.path}: has no mode {mode!r}; it has {', '.join(self.modes)}")
        place = 0 if mode is None else self.modes.index(mode)
        if reject is not None:
            self._threshold(reject, self.modes[place])  # before any image is read
        parts = [np.empty((0, len(self.classes)), dtype=np.float32)]
        known = [np.empty(0, dtype=np.float32)]
        for start in range(0, len(images), _AT_ONCE):
            pixels = np.stack([self.preprocess(p) for p in images[start : start + _AT_ONCE]])
            values = self.run(pixels)
            scores = self._finite(values[self.outputs[place]], (len(pixels), len(self.classes)))
            parts.append(_sigmoid(scores) if self.metadata.task == "several labels" else _softmax(scores))
            if reject is not None:
                known.append(self._finite(values[self.outputs[len(self.modes) + place]], (len(pixels),)))
        return np.concatenate(parts), None if reject is None else np.concatenate(known)

    def _finite(self, values: NDArray[np.float32], shape: tuple[int, ...]) -> NDArray[np.float32]:
        if np.shape(values) != shape or not np.isfinite(values).all():
            raise DearError(
                f"{self.path}: its graph must return a finite score for each of its {len(self.classes)} "
                "classes, and does not; export it again"
            )
        return values

    def _threshold(self, share: float, mode: str) -> float:
        """The score below which an image is answered with "none of these"."""
        scores = self.metadata.held_out.get(mode, ())
        if not scores:
            raise UsageError(
                f"reject: {self.path} has no scores of held-out images; export a calibrated run with one "
                "label per image, on classes that were trained"
            )
        return sorted(scores)[threshold_rank(share, len(scores)) - 1]

    def predict(
        self,
        images: Sequence[ImageLike],
        top: int = 5,
        mode: str | None = None,
        reject: float | None = None,
        certain: float | None = None,
    ) -> list[Answer]:
        """The `top` likeliest classes of each image.

        Args:
            images: files, bytes, or Pillow images.
            top: classes per image.
            mode: way to predict; None: the usual one.
            reject: share of images of trained classes that may be answered with "none of these"; None: no
                image is.
            certain: of a file with a tree of classes: the probability that the answered node has at least;
                None: 0.8.

        Raises:
            UsageError: `top` is less than 1, the file cannot reject; or as `probabilities`.
        """
        if top < 1:
            raise UsageError(f"top must be at least 1, got {top}")
        tree = Tree(self.metadata.tree, self.classes) if self.metadata.tree else None
        certain = check_certain(certain, tree)
        probabilities, known = self._answers(images, mode, reject)
        used = mode or self.modes[0]
        rejected = nodes = below_none = None
        if known is not None and reject is not None:
            rejected = known < self._threshold(reject, used)
            below_none = known < self._threshold(reject * REJECTED, used)
        if tree is not None:
            nodes, rejected = tree.answers(probabilities, certain, rejected, below_none)
        answers = []
        for place, (image, row) in enumerate(zip(images, probabilities, strict=True)):
            order = np.argsort(-row, kind="stable")[:top]
            name = os.fspath(image) if isinstance(image, str | os.PathLike) else "image"
            named = tuple((self.classes[i], float(row[i])) for i in order)
            refused = None if rejected is None else bool(rejected[place])
            node = None if nodes is None or refused else nodes[place]
            answers.append(Answer(name, named, rejected=refused, node=node, labels=self._labels(row, mode)))
        return answers

    def _labels(self, row: NDArray[np.float32], mode: str | None) -> tuple[str, ...] | None:
        """The classes that an image has, of a model with several labels."""
        if self.metadata.task == "one label":
            return None
        limits = np.asarray(self.metadata.thresholds[mode or self.modes[0]], dtype=np.float32)
        return tuple(self.classes[i] for i in np.flatnonzero(row >= limits))


def predict(
    onnx_path: str | os.PathLike[str],
    image_paths: Sequence[ImageLike],
    top: int = 5,
    mode: str | None = None,
    reject: float | None = None,
    certain: float | None = None,
) -> list[Answer]:
    """The `top` likeliest classes of each image, from a file written by `dear export`."""
    return OnnxModel(onnx_path).predict(image_paths, top, mode, reject, certain)


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


def _sigmoid(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    result: NDArray[np.float32] = (1 / (1 + np.exp(-np.clip(scores, -80, 80)))).astype(np.float32)
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
