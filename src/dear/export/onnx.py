"""Export to ONNX: image in, class scores out, in one file whose metadata describe its use.

The input `pixels` is normalized, [batch, 3, S, S] with any batch; how an image becomes pixels, the classes
in the order of the scores, and the weights' fingerprint stand in the file's metadata. `dear.export.runtime`
reads such a file without PyTorch.
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

import torch

from dear.errors import DearError
from dear.export.graph import Features, Scores, blank
from dear.methods.base import Method
from dear.runs.model import Model, Run
from dear.utils.extras import missing_extra
from dear.utils.files import write_atomic

FORMAT, SCHEMA = "dear onnx", "1"
_LIMIT = 2**31 - 2**20  # protobuf refuses messages of 2 GiB; the graph needs a little beside the weights


@dataclass(frozen=True)
class Exported:
    """What was written."""

    path: Path  #: the file
    outputs: tuple[str, ...]  #: names of the graph's outputs, the usual one first
    size: int  #: bytes
    #: largest difference between onnxruntime's scores and PyTorch's; None if not compared
    difference: float | None


def export_onnx(
    run: Run, path: str | os.PathLike[str], encoder_only: bool = False, check: bool = True
) -> Exported:
    """Write a model as one ONNX file, whole or not at all.

    Args:
        run: a run folder, a method or a model; everything it learned goes into the file.
        path: the file to write.
        encoder_only: the adapted image encoder alone (features, not scores).
        check: run the file in onnxruntime and refuse it unless it agrees with PyTorch to 1e-3.

    Raises:
        UsageError: the extra `onnx` is not installed, or the method has no encoder of its own.
        DearError: the model cannot be exported, or the file cannot be written.
    """
    _require_onnx()
    model = Model.of(run, device="cpu")
    method = model.method
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
    written.metadata_props.update(metadata(method, graph))
    written.producer_name = "dear"
    import onnx_ir

    data = onnx_ir.to_proto(written).SerializeToString()
    difference = _difference(data, graph, method) if check else None
    if difference is not None and difference > 1e-3:
        raise DearError(
            f"{path}: not written: onnxruntime differs from PyTorch by {difference:.2g} on this model"
        )
    write_atomic(path, data)
    return Exported(Path(path), graph.names, len(data), difference)


def metadata(method: Method, graph: Scores | Features) -> dict[str, str]:
    """What the file says about itself: plain strings, lists and objects as JSON."""
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
    }
    if isinstance(graph, Scores):
        values["classes"] = list(method.classes)
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
    if [value.name for value in program.model.graph.outputs] != list(graph.names):
        raise DearError(
            f"PyTorch {torch.__version__} loses the names of the scores when it writes ONNX; export with a "
            "newer PyTorch (2.13 is tested)"
        )
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
    """Largest difference of any output on noise, another batch size than the traced one."""
    import onnxruntime

    from dear.export.runtime import quiet_session

    size = method.clip.config.vision.image_size
    pixels = torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = graph(pixels)
    session = onnxruntime.InferenceSession(data, quiet_session(), providers=["CPUExecutionProvider"])
    got = session.run(list(graph.names), {"pixels": pixels.numpy()})
    return max(float((torch.from_numpy(a) - b).abs().max()) for a, b in zip(got, wanted, strict=True))
