"""Export to ONNX: image in, class scores out, in one file whose metadata describe its use.

The input `pixels` is normalized, [batch, 3, S, S] with any batch; the file's metadata contain the
preprocessing, the classes in the order of the scores, the weights' fingerprint, scores of held-out images for
"none of these", and what a smaller precision loses. `dear.export.runtime` reads such a file without PyTorch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from dear.data.images import ImageSet
from dear.errors import DearError, UsageError
from dear.export.graph import Features, Scores, blank
from dear.export.precision import PRECISIONS, measure_loss, reduce_precision
from dear.export.runtime import Loss, quiet_session
from dear.methods.base import Method
from dear.runs.model import Model, Run
from dear.utils.extras import missing_extra
from dear.utils.files import write_atomic
from dear.utils.progress import Progress

FORMAT, SCHEMA = "dear onnx", "1"
MAX_LOSS = 1.0  #: points of accuracy that a file in a smaller precision may lose
_LIMIT = 2**31 - 2**20  # protobuf rejects messages of 2 GiB; the graph needs some space next to the weights


@dataclass(frozen=True)
class ExportResult:
    """What was written."""

    path: Path
    outputs: tuple[str, ...] = ()  #: of an ONNX file
    bytes: int = 0  #: size of an ONNX file
    difference: float | None = None  #: largest difference of its scores from PyTorch
    parameters: int = 0  #: of a plain CLIP
    template: str = ""  #: prompt that a plain CLIP was adapted with
    rejects: bool = False  #: whether the file can answer "none of these"
    several: bool = False  #: whether it answers with sets of labels, which may be empty
    precision: str = "float32"
    loss: Loss | None = None  #: measured loss of accuracy in float16 or int8

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        if self.parameters:
            return {"path": str(self.path), "numbers": self.parameters, "template": self.template}
        return {
            "path": str(self.path),
            "outputs": list(self.outputs),
            "bytes": self.bytes,
            "difference": self.difference,
            "rejects": self.rejects,
            "precision": self.precision,
            "loss": None if self.loss is None else msgspec.to_builtins(self.loss),
        }


def export_onnx(
    run: Run,
    path: str | os.PathLike[str],
    encoder_only: bool = False,
    *,
    precision: str = "float32",
    images: ImageSet | None = None,
    max_loss: float = MAX_LOSS,
    progress: Progress | None = None,
) -> ExportResult:
    """Write a model as one ONNX file, whole or not at all, if onnxruntime agrees with PyTorch to 1e-3.

    Args:
        run: a run folder, a method or a model; everything it learned goes into the file.
        path: the file to write.
        encoder_only: the adapted image encoder alone (features, not scores).
        precision: "float32", "float16" (half the size), or "int8" (a quarter, and faster on a CPU).
        images: labeled images to measure the loss of accuracy on, for float16 and int8.
        max_loss: points of accuracy that the file may lose on them.
        progress: called with ("comparing", images done, images in all).

    Raises:
        UsageError: the extra `onnx` is not installed, the method has no encoder of its own, or a smaller
            precision cannot be measured.
        DearError: the model cannot be exported, the file loses too much, or it cannot be written.
    """
    _require_onnx()
    check_precision(precision, encoder_only, max_loss)
    model = Model.of(run, device="cpu")
    method = model.method
    labels = None
    if precision != "float32":
        model.require_one_label(f"precision {precision}")
        if images is None:
            raise UsageError(f"precision {precision} needs labeled images, to measure the loss of accuracy")
        labels = _labels(model, images)
    graph = Features(model) if encoder_only else Scores(model)
    program = _trace(graph, method)
    written = program.model
    if isinstance(written.graph.inputs[0].shape[0], int):
        raise DearError(
            f"the method {method.name!r} answers image by image; it cannot be written for any batch"
        )
    for node in written.graph.all_nodes():
        node.metadata_props.clear()  # the exporter notes stack traces there: paths of this machine
        node.doc_string = None
    written.metadata_props.clear()
    written.producer_name = "dear"
    import onnx
    import onnx_ir

    proto = onnx_ir.to_proto(written)
    data = proto.SerializeToString()
    difference = _difference(data, graph, method)
    if difference > 1e-3:
        raise DearError(
            f"{path}: not written: onnxruntime differs from PyTorch by {difference:.2g} on this model"
        )
    loss = None
    if images is not None and labels is not None:
        proto = reduce_precision(written.graph, proto, precision)
        loss = measure_loss(data, proto.SerializeToString(), method.clip, images, labels, progress)
        if loss.points > max_loss:
            raise DearError(
                f"{path}: not written: {precision} loses {loss.points:.1f} points of accuracy "
                f"({loss.float32:.1%} to {loss.reduced:.1%} on {loss.images} images of {loss.data}), at most "
                f"{max_loss:g} are allowed; use another precision, or raise max_loss"
            )
    onnx.helper.set_model_props(
        proto, metadata(method, graph, None if encoder_only else model, precision, loss)
    )
    proto.producer_name = "dear"
    data = proto.SerializeToString()
    write_atomic(path, data)
    return ExportResult(
        Path(path),
        graph.names,
        len(data),
        difference,
        rejects=isinstance(graph, Scores) and bool(graph.held_out),
        several=method.several,
        precision=precision,
        loss=loss,
    )


def _labels(model: Model, images: ImageSet) -> Tensor:
    """The labels [n] of images among the classes of a model."""
    numbers = {name: number for number, name in enumerate(model.classes)}
    unknown = next((name for name in images.classes if name not in numbers), None)
    if unknown is not None:
        raise UsageError(
            f"{images.name}: has the class {unknown!r}, which the exported model does not have; measure the "
            "loss of accuracy on images of its classes"
        )
    return torch.tensor([numbers[name] for name in images.classes])[images.labels]


def check_precision(precision: str, encoder_only: bool, max_loss: float) -> None:
    """Raise a UsageError for a precision that is not known or cannot be measured."""
    if precision not in PRECISIONS:
        raise UsageError(f"precision must be {', '.join(PRECISIONS)}, got {precision!r}")
    if precision != "float32" and encoder_only:
        raise UsageError(
            f"precision {precision}: features alone have no accuracy to measure; leave out encoder_only"
        )
    if not 0 <= max_loss <= 100:
        raise UsageError(f"max_loss must be from 0 to 100 points, got {max_loss}")


def metadata(
    method: Method,
    graph: Scores | Features,
    model: Model | None = None,
    precision: str = "float32",
    loss: Loss | None = None,
) -> dict[str, str]:
    """The file's description of itself: plain strings, lists and objects as JSON."""
    from dear import __version__

    config = method.clip.config
    preprocessing = {
        "color": "RGB",
        "size": config.vision.image_size,
        "resize": f"{'both sides' if config.resize == 'squash' else 'short side'}, {config.interpolation}",
        "crop": "none" if config.resize == "squash" else "center",
        "scale": "1/255",
        "mean": list(config.mean),
        "std": list(config.std),
        "layout": "NCHW",
    }
    values: dict[str, Any] = {
        "format": FORMAT,
        "schema": SCHEMA,
        "dear": __version__,
        "method": method.name,
        "modes": list(method.modes),
        "outputs": list(graph.names),
        "template": method.template,
        "backbone": method.clip.name,
        "fingerprint": method.clip.fingerprint,
        "preprocessing": preprocessing,
        "precision": precision,
    }
    if loss is not None:
        values["loss"] = msgspec.to_builtins(loss)
    if isinstance(graph, Scores):
        values["classes"] = list(method.classes)
        if model is not None and model.tree is not None:
            values["tree"] = dict(model.tree.parents)
        if graph.held_out:
            values["held_out"] = graph.held_out
        if method.several and model is not None:
            values["task"] = "several labels"
            values["thresholds"] = {
                mode: model.calibrator.label_thresholds(mode).tolist() for mode in method.modes
            }
    elif graph.attributes:
        values["attributes"] = list(graph.attributes)
    return {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in values.items()
    }


def _require_onnx() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError:
        raise missing_extra("exporting", "onnx") from None


def _trace(graph: Scores | Features, method: Method) -> Any:
    size = sum(t.numel() * t.element_size() for t in graph.state_dict().values())
    if size > _LIMIT:
        raise DearError(f"this model is {size / 2**30:.1f} GiB in float32; one ONNX file holds less than 2")
    batch = torch.export.Dim("batch", min=1, max=65_535)
    try:
        with _quiet(), torch.no_grad():
            program: Any = torch.onnx.export(
                graph.eval(),
                (blank(method.clip),),
                input_names=["pixels"],
                output_names=list(graph.names),
                dynamic_shapes={"pixels": {0: batch}},
                dynamo=True,
                verbose=False,
            )
    except (torch.onnx.OnnxExporterError, NotImplementedError) as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise DearError(f"the method {method.name!r} cannot be written as ONNX ({reason})") from error
    outputs = program.model.graph.outputs
    if len({id(value) for value in outputs}) < len(graph.names):
        raise DearError(
            f"PyTorch {torch.__version__} merges scores when it writes ONNX; export with a newer PyTorch "
            "(2.13 is tested)"
        )
    for value, name in zip(outputs, graph.names, strict=True):
        value.name = name  # PyTorch 2.10 names equal scores of two modes itself
    return program


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's remarks (a missing torchvision, deprecations inside it) off the user's terminal."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _difference(data: bytes, graph: Scores | Features, method: Method) -> float:
    """Largest difference of any output on noise, with another batch size than the traced one.

    The score of "none of these" has no upper limit, so its differences are relative above 1.
    """
    import onnxruntime

    size = method.clip.config.vision.image_size
    pixels = torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = graph(pixels)
    session = onnxruntime.InferenceSession(data, quiet_session(), providers=["CPUExecutionProvider"])
    values = session.run(list(graph.names), {"pixels": pixels.numpy()})
    largest = 0.0
    for name, value, tensor in zip(graph.names, values, expected, strict=True):
        difference = (torch.from_numpy(value) - tensor).abs()
        if name.startswith("known"):
            difference = difference / tensor.abs().clamp(min=1)
        largest = max(largest, float(difference.max()))
    return largest
