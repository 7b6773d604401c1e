"""From decoded images to answers: one batch, many adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dear.calibration.scales import apply_scales
from dear.clip.gpu import Recorder
from dear.clip.model import Clip
from dear.clip.variant import matrix_dtype
from dear.heads.contributions import head_outputs
from dear.images.views import normalize
from dear.methods.base import Method, unit
from dear.methods.dear import DeAR
from dear.runs.model import Model
from dear.serve import mixed_batch


class Answerer:
    """A model as the engine asks it: it does not change, so what every image needs is looked up once."""

    def __init__(self, model: Model) -> None:
        self.model, self.method = model, model.bound
        self._scales: Tensor | None = None
        self._known = False

    @property
    def scales(self) -> Tensor | None:
        """The calibration of each class on the CPU; None where there is none."""
        if not self._known:
            scales = self.model.scale.factors(self.method.modes[0])
            self._scales = None if scales is None else scales.float().cpu()
            self._known = True
        return self._scales


class ImageJob(NamedTuple):
    """One image of a request."""

    pixels: Tensor  #: uint8 [3, S, S]
    answerer: Answerer | None  #: the adapter; None asks for the frozen image feature
    spaces: bool = False  #: asks for unit features in the adapter's spaces [A, E] instead of logits
    #: asks for the frozen image feature and the outputs of these layers' heads behind it, [E + L · H · d]
    layers: tuple[int, ...] = ()
    nearness: bool = False  #: also asks how near it is to the adapter's training images, behind the logits
    top: int = 0  #: asks for the likeliest so many classes instead of logits


class Likeliest(NamedTuple):
    """The likeliest classes of an image; empty where its scores are not finite."""

    numbers: list[int]
    probabilities: list[float]

    def first(self, count: int) -> Likeliest:
        """Of these the first so many."""
        return Likeliest(self.numbers[:count], self.probabilities[:count])


Result = Tensor | Likeliest


class Engine:
    """Computes batches of jobs on one backbone; on a GPU by recorded runs.

    `precision` is that of features; adapters come bound to theirs.
    """

    def __init__(self, clip: Clip, precision: str = "auto", run: Recorder | None = None) -> None:
        self.clip = clip
        as_loaded = precision == "auto" and clip.dtype != torch.float32
        self.tower = clip if as_loaded else clip.cast(matrix_dtype(precision, clip.device))
        self.run = Recorder() if run is None else run  # an empty one counts as false

    def prepare(self, answerers: Sequence[Answerer], largest: int) -> int:
        """Record features and answers of adapters for all batches of up to `largest` images.

        Returns how many recordings there are; none where nothing is recorded (on a CPU).
        """
        if self.run.records(self.clip.device):
            side = self.clip.config.vision.image_size
            blank = torch.zeros(3, side, side, dtype=torch.uint8)
            with self.run.record_immediately():
                for size in self.run.sizes(largest):
                    for answerer in (None, *answerers):
                        self.compute([ImageJob(blank, answerer)] * size)
        return len(self.run)

    def compute(self, jobs: Sequence[ImageJob]) -> list[Result]:
        """Calibrated logits [C_i] of each image under its adapter, or unit features [E] or [A, E].

        All on the CPU. Jobs with `top` get the likeliest classes in the place of logits.
        """
        return self._launch(jobs)()

    def begin(self, jobs: Sequence[ImageJob]) -> list[Result] | Callable[[], list[Result]]:
        """What `compute` returns; on a GPU a function that waits for it, so that the next batch may begin."""
        found = self._launch(jobs)
        return found if self.clip.device.type == "cuda" else found()

    @torch.inference_mode()
    def _launch(self, jobs: Sequence[ImageJob]) -> Callable[[], list[Result]]:
        """Ask the device for all of a batch; the function waits for the logits, all else is there."""
        config = self.clip.config
        pinned = self.clip.device.type == "cuda"
        raw = torch.empty((len(jobs), *jobs[0].pixels.shape), dtype=torch.uint8, pin_memory=pinned)
        torch.stack([job.pixels for job in jobs], out=raw)
        pixels = normalize(raw.to(self.clip.device, non_blocking=True), config.mean, config.std)
        found: dict[int, Result] = {}
        plain = [row for row, job in enumerate(jobs) if job.answerer is None and not job.layers]
        if plain:
            (features,) = self.run(("image", id(self.tower)), partial(_encode, self.tower), pixels[plain])
            found.update(zip(plain, features.cpu(), strict=True))
        found |= self._in_spaces(jobs, pixels) | self._in_heads(jobs, pixels)
        asked = [(row, job.answerer) for row, job in enumerate(jobs) if job.answerer and not job.spaces]
        if not asked:
            return lambda: [found[row] for row in range(len(jobs))]
        part = pixels if len(asked) == len(jobs) else pixels[[row for row, _ in asked]]
        near = [place for place, (row, _) in enumerate(asked) if jobs[row].nearness]
        logits, frozen = mixed_batch.logits_and_features(
            [answerer.method for _, answerer in asked], part, near, run=self.run
        )
        on_cpu = _to_cpu(logits)
        nearness = {place: asked[place][1].model.scale.nearness(own[None]) for place, own in frozen.items()}

        @torch.inference_mode()
        def finish() -> list[Result]:
            answers = _answers([(jobs[row], answerer) for row, answerer in asked], on_cpu())
            for place, ((row, _), answer) in enumerate(zip(asked, answers, strict=True)):
                found[row] = answer
                if place in nearness and isinstance(answer, Tensor):
                    found[row] = torch.cat([answer, nearness[place]])
            return [found[row] for row in range(len(jobs))]

        return finish

    def _in_spaces(self, jobs: Sequence[ImageJob], pixels: Tensor) -> dict[int, Tensor]:
        """Unit features [A, E] of the jobs that ask for them, by their place."""
        groups: dict[Method, list[int]] = {}
        for row, job in enumerate(jobs):
            if job.spaces and job.answerer is not None:
                groups.setdefault(job.answerer.method, []).append(row)
        found: dict[int, Tensor] = {}
        for method, rows in groups.items():
            if isinstance(method, DeAR):
                features = unit(method.attribute_features(pixels[rows]).float())  # [b, A, E]
            else:
                features = unit(method.clip.focused(()).encode_image(pixels[rows]).float())[:, None]
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


def _encode(clip: Clip, pixels: Tensor) -> tuple[Tensor]:
    return (unit(clip.encode_image(pixels).float()),)


def _answers(asked: Sequence[tuple[ImageJob, Answerer]], logits: Sequence[Tensor]) -> list[Result]:
    """Logits [C_i] of each image, calibrated, or the likeliest classes by them; those of a length at once."""
    found: list[Result] = list(logits)
    places: dict[int, list[int]] = {}
    for place, row in enumerate(logits):
        places.setdefault(row.shape[0], []).append(place)
    for same in places.values():
        rows = _calibrated(torch.stack([logits[one] for one in same]), [asked[one][1] for one in same])
        tops = [asked[one][0].top for one in same]
        ranked = likeliest(rows, max(tops)) if any(tops) else None
        for number, (place, top) in enumerate(zip(same, tops, strict=True)):
            found[place] = ranked[number].first(top) if ranked and top else rows[number]
    return found


def _calibrated(logits: Tensor, answerers: Sequence[Answerer]) -> Tensor:
    """Logits [B, C] of images of different adapters on the scale of each."""
    scales = [answerer.scales for answerer in answerers]
    if all(one is None for one in scales):
        return logits
    as_is = torch.stack([torch.ones(logits.shape[1]), torch.zeros(logits.shape[1])])
    return apply_scales(logits, torch.stack([as_is if one is None else one for one in scales], dim=1))


def likeliest(logits: Tensor, top: int) -> list[Likeliest]:
    """The likeliest classes of images by their logits [B, C]."""
    best = logits.softmax(dim=-1).topk(min(top, logits.shape[1]))
    finite = logits.isfinite().all(dim=-1)
    columns = zip(best.indices.tolist(), best.values.tolist(), finite.tolist(), strict=True)
    return [Likeliest(which, values) if right else Likeliest([], []) for which, values, right in columns]


def _to_cpu(rows: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """All rows on the CPU in float32, moved at once; the function waits until they are there."""
    together, sizes = torch.cat(list(rows)).float(), [row.shape[0] for row in rows]
    if not together.is_cuda:
        return lambda: list(together.split(sizes))
    host = torch.empty(together.shape, pin_memory=True)
    host.copy_(together, non_blocking=True)
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(together.device))

    def wait() -> list[Tensor]:
        done.synchronize()
        return list(host.split(sizes))

    return wait
