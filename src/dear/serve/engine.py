"""From decoded images to answers: one batch, many adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dear._io.image_file import normalize
from dear.clip.gpu.recorded import Recorder
from dear.clip.model import Clip
from dear.clip.precision import cached_cast, matrix_dtype
from dear.heads.contributions import head_outputs
from dear.methods import mixed_batch
from dear.methods.base import Method, unit
from dear.methods.calibration import apply_scales
from dear.methods.dear import DeAR


@dataclass(frozen=True)
class ImageJob:
    """One image of a request.

    Attributes:
        pixels: uint8 [3, S, S].
        method: the adapter that answers; None asks for the frozen image feature.
        spaces: asks for unit features in the adapter's spaces [A, E] instead of logits.
        layers: asks for the frozen image feature and the outputs of the heads of these layers behind it,
            [E + L · H · d], instead.
    """

    pixels: Tensor
    method: Method | None
    spaces: bool = False
    layers: tuple[int, ...] = ()


class Engine:
    """Computes batches of jobs on one backbone; on a GPU by recorded runs.

    Args:
        clip: the backbone, on its device.
        precision: of its matrices, for features; adapters come bound to theirs.
        run: records what comes again; None: a recorder for GPUs.
    """

    def __init__(self, clip: Clip, precision: str = "auto", run: Recorder | None = None) -> None:
        self.clip = clip
        kept = precision == "auto" and clip.dtype != torch.float32
        self.tower = clip if kept else cached_cast(clip, matrix_dtype(precision, clip.device))
        self.run = Recorder() if run is None else run  # an empty one counts as false

    def prepare(self, methods: Sequence[Method], largest: int) -> int:
        """Record features and answers of adapters for all batches of up to `largest` images.

        Returns how many recordings there are; none where nothing is recorded (on a CPU).
        """
        if self.run.records(self.clip.device):
            side = self.clip.config.vision.image_size
            blank = torch.zeros(3, side, side, dtype=torch.uint8)
            with self.run.at_once():
                for size in self.run.sizes(largest):
                    for method in (None, *methods):
                        self.compute([ImageJob(blank, method)] * size)
        return len(self.run)

    @torch.inference_mode()
    def compute(self, jobs: Sequence[ImageJob]) -> list[Tensor]:
        """Calibrated logits [C_i] of each image under its adapter, or unit features [E] or [A, E].

        All on the CPU.
        """
        config = self.clip.config
        pinned = self.clip.device.type == "cuda"
        raw = torch.empty((len(jobs), *jobs[0].pixels.shape), dtype=torch.uint8, pin_memory=pinned)
        torch.stack([job.pixels for job in jobs], out=raw)
        pixels = normalize(raw.to(self.clip.device, non_blocking=True), config.mean, config.std)
        found: list[Tensor | None] = [None] * len(jobs)
        plain = [row for row, job in enumerate(jobs) if job.method is None and not job.layers]
        if plain:
            (features,) = self.run(("image", id(self.tower)), self._encode, pixels[plain])
            for row, feature in zip(plain, features.cpu(), strict=True):
                found[row] = feature
        for row, own in (self._in_spaces(jobs, pixels) | self._in_heads(jobs, pixels)).items():
            found[row] = own
        asked = [row for row, job in enumerate(jobs) if job.method is not None and not job.spaces]
        if asked:
            methods = [method for row in asked if (method := jobs[row].method) is not None]
            part = pixels if len(asked) == len(jobs) else pixels[asked]
            logits = mixed_batch.logits(methods, part, run=self.run)
            for row, own in zip(asked, _calibrated(methods, logits), strict=True):
                found[row] = own
        return [one for one in found if one is not None]

    def _in_spaces(self, jobs: Sequence[ImageJob], pixels: Tensor) -> dict[int, Tensor]:
        """Unit features [A, E] of the jobs that ask for them, by their place."""
        groups: dict[Method, list[int]] = {}
        for row, job in enumerate(jobs):
            if job.spaces and job.method is not None:
                groups.setdefault(job.method, []).append(row)
        found: dict[int, Tensor] = {}
        for method, rows in groups.items():
            if isinstance(method, DeAR):
                features = unit(method.attribute_features(pixels[rows]).float())  # [b, A, E]
            else:
                features = unit(method.clip.encode_image(pixels[rows]).float())[:, None]
            found.update(zip(rows, features.cpu(), strict=True))
        return found

    def _in_heads(self, jobs: Sequence[ImageJob], pixels: Tensor) -> dict[int, Tensor]:
        """Image features and head outputs [E + L · H · d] of the jobs that ask for them, by their place."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for row, job in enumerate(jobs):
            if job.layers:
                groups.setdefault(job.layers, []).append(row)
        found: dict[int, Tensor] = {}
        for layers, rows in groups.items():
            own = head_outputs(self.clip, pixels[rows], layers)
            together = torch.cat([own.features, own.outputs.flatten(1)], dim=1)
            found.update(zip(rows, together.cpu(), strict=True))
        return found

    def _encode(self, pixels: Tensor) -> tuple[Tensor]:
        return (unit(self.tower.encode_image(pixels).float()),)


def _calibrated(methods: Sequence[Method], logits: Sequence[Tensor]) -> list[Tensor]:
    """Calibrated logits [C_i] on the CPU: on a GPU a few launches per image would outlast the batch."""
    found = []
    for method, row in zip(methods, _to_cpu(logits), strict=True):
        scales = None if method.calibration is None else method.cached("served scales", _scales(method))
        found.append(row if scales is None or not len(scales) else apply_scales(row[None], scales)[0])
    return found


def _scales(method: Method) -> Callable[[], Tensor]:
    """Computes the calibration of each class [2, C] on the CPU; empty where the usual mode has none."""

    def compute() -> Tensor:
        scales = method.calibration_scales()
        return torch.empty(0) if scales is None else scales.float().cpu()

    return compute


def _to_cpu(rows: Sequence[Tensor]) -> list[Tensor]:
    """All rows on the CPU, moved at once."""
    together = torch.cat([row.float() for row in rows]).cpu()
    return list(together.split([len(row) for row in rows]))
