"""Smaller and faster files: an ONNX graph in float16 or int8, and the accuracy that it loses.

Both change what every token passes, where nearly all weights and time are. Per-image work (pooling, class
scores, "none of these") stays in float32.

- int8: weights per output channel, activations by their range in the batch (`MatMulInteger`); no calibration
  images are needed. Weights use 7 of the 8 bits: products of 8 overflow on CPUs without VNNI instructions.
  Attention between tokens, norms, and the patch embedding stay in float32.
- float16: everything but norms and softmax. A CPU computes it no faster; the file is half as large.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from dear.clip.model import Clip
from dear.data.batches import over_batches, pixels_for
from dear.data.images import ImageSet
from dear.errors import DataError
from dear.export.runtime import Loss, quiet_session
from dear.utils.progress import Progress

PRECISIONS = ("float32", "float16", "int8")
_IN_FLOAT32 = ("LayerNormalization", "Softmax", "ReduceL2", "ReduceMean")


def reduce_precision(graph: Any, proto: Any, precision: str) -> Any:
    """A graph in another precision.

    Args:
        graph: the graph of `onnx_ir`, with shapes.
        proto: the same as a `ModelProto`; it may be changed.
        precision: "float16" or "int8".

    Returns:
        The new `ModelProto`.
    """
    nodes = list(graph.all_nodes())
    if precision == "float16":
        from onnxruntime.transformers import float16

        per_image = [node.name for node in nodes if not any(_rank(value) >= 3 for value in node.outputs)]
        blocked = [*float16.DEFAULT_OP_BLOCK_LIST, *_IN_FLOAT32]
        with _quiet():
            halved = float16.convert_float_to_float16(
                proto, keep_io_types=True, op_block_list=blocked, node_block_list=per_image
            )
        casts = set()  # the converter adds a cast once per reader of a value, all with the same output
        for node in list(halved.graph.node):
            if node.op_type == "Cast" and node.output[0] in casts:
                halved.graph.node.remove(node)
            casts |= {node.output[0]} if node.op_type == "Cast" else set()
        return halved
    from onnxruntime.quantization import QuantType, quantize_dynamic

    _fold_transposes(proto)
    weights = {tensor.name for tensor in proto.graph.initializer}
    of_tokens = {node.name for node in nodes if node.op_type == "MatMul" and _rank(node.inputs[0]) >= 3}
    matrices = [node.name for node in proto.graph.node if node.name in of_tokens and node.input[1] in weights]
    with tempfile.TemporaryDirectory() as folder, _quiet():
        import onnx

        path = Path(folder) / "int8.onnx"
        quantize_dynamic(
            proto,
            path,
            nodes_to_quantize=matrices,
            per_channel=True,
            reduce_range=True,
            weight_type=QuantType.QInt8,
        )
        return onnx.load(path)


def _fold_transposes(proto: Any) -> None:
    """Store weights as they are multiplied; the exporter leaves those that are read twice transposed."""
    from onnx import numpy_helper

    graph = proto.graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    names: dict[str, str] = {}  # of the output of a transpose: the folded weight
    for node in list(graph.node):
        if node.op_type == "Transpose" and node.input[0] in weights:
            order = next((list(each.ints) for each in node.attribute if each.name == "perm"), None)
            name = f"{node.input[0]}.{'' if order is None else '_'.join(map(str, order))}"
            if name not in weights:
                values = numpy_helper.to_array(weights[node.input[0]]).transpose(order)
                weights[name] = numpy_helper.from_array(np.ascontiguousarray(values), name)
                graph.initializer.append(weights[name])
            names[node.output[0]] = name
            graph.node.remove(node)
    for node in graph.node:
        for place, value in enumerate(node.input):
            node.input[place] = names.get(value, value)
    read = {value for node in graph.node for value in node.input}
    for tensor in list(graph.initializer):
        if tensor.name not in read:
            graph.initializer.remove(tensor)


def _rank(value: Any) -> int:
    return -1 if value is None or value.shape is None else len(value.shape)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the converters' remarks off the user's terminal; they log to the root logger."""
    logger = logging.getLogger()
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def measure_loss(
    before: bytes,
    after: bytes,
    clip: Clip,
    images: ImageSet,
    labels: Tensor,
    progress: Progress | None = None,
) -> Loss:
    """Accuracy of two files on labeled images, with the usual mode.

    Args:
        before: the file in float32.
        after: the file in another precision.
        clip: the backbone, for its view of an image.
        images: n images; unreadable ones are left out.
        labels: their labels [n] among the classes of the file.
        progress: called with ("comparing", images done, images in all).

    Raises:
        DataError: none of the images can be read.
    """
    import onnxruntime

    sessions = [
        onnxruntime.InferenceSession(data, quiet_session(), providers=["CPUExecutionProvider"])
        for data in (before, after)
    ]

    def compute(some: ImageSet, rows: list[int]) -> list[np.ndarray[Any, Any]]:
        pixels = pixels_for(clip, some, rows).cpu().numpy()
        return [session.run(["scores"], {"pixels": pixels})[0].argmax(axis=1) for session in sessions]

    parts, problems = over_batches(
        images, compute, clip, unreadable="skip", progress=progress, stage="comparing"
    )
    keep = [row for row in range(len(images)) if row not in problems]
    if not keep:
        raise DataError(f"{images.name}: has no image to measure the loss of accuracy on")
    old, new = (np.concatenate([part[which] for part in parts])[keep] for which in (0, 1))
    right = labels.cpu().numpy()[keep]
    return Loss(
        data=images.name,
        images=len(keep),
        float32=float((old == right).mean()),
        reduced=float((new == right).mean()),
        same=float((old == new).mean()),
    )
