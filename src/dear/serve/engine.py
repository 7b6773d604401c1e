"""From decoded images to answers: one batch, many adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dear.clip.gpu import Recorder
from dear.clip.model import Clip
from dear.clip.variant import matrix_dtype
from dear.errors import DearError
from dear.heads.contributions import head_outputs
from dear.images.views import normalize
from dear.methods.base import Method
from dear.methods.dear import DeAR
from dear.methods.tensors import unit
from dear.runs.answer import Answer
from dear.runs.model import Model
from dear.runs.ranking import Ranking
from dear.serve import mixed_batch
from dear.serve.errors import Refused
from dear.tasks.explain.explainer import Explainer
from dear.tasks.explain.scores import ScoreParts

_MOST_RANKINGS = 4  # of an answerer that are cached


class Answerer:
    """A model that answers images. It does not change, so what every image needs is looked up once."""

    def __init__(self, model: Model) -> None:
        self.model, self.method = model, model.bound
        self.member = mixed_batch.Member(self.method)
        self.rankings: dict[tuple[int, float | None, float | None], Ranking] = {}  #: by the options

    def ranking(self, top: int = 5, reject: float | None = None, certain: float | None = None) -> Ranking:
        """How it answers with these options (`Ranking`); a long list of classes takes a moment."""
        ranking = Ranking(self.model, top, self.method.modes[0], reject, certain)
        if len(self.rankings) >= _MOST_RANKINGS:
            self.rankings = {}
        self.rankings[top, reject, certain] = ranking
        return ranking


class ImageJob(NamedTuple):
    """One image of a request."""

    pixels: Tensor  #: uint8 [3, S, S]
    answerer: Answerer | None  #: the adapter; None: the result is the frozen image feature
    ranking: Ranking | None = None  #: of the answerer: the result is an answer instead of logits
    spaces: bool = False  #: the result is unit features in the adapter's spaces [A, E] instead of logits
    #: the result is the frozen image feature followed by the outputs of these layers' heads, [E + L · H · d]
    layers: tuple[int, ...] = ()


Result = Tensor | Answer


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
        """Answers of each image under its adapter, logits [C_i], or unit features [E] or [A, E], on the CPU.

        An answer has no classes where the logits are not finite.
        """
        return self._launch(jobs)()

    def begin(self, jobs: Sequence[ImageJob]) -> list[Result] | Callable[[], list[Result]]:
        """What `compute` returns; on a GPU a function that waits for it, so that the next batch may begin."""
        finish = self._launch(jobs)
        return finish if self.clip.device.type == "cuda" else finish()

    @torch.inference_mode()
    def _launch(self, jobs: Sequence[ImageJob]) -> Callable[[], list[Result]]:
        """Start the computation of a batch; the function that is returned waits for the logits."""
        config = self.clip.config
        pinned = self.clip.device.type == "cuda"
        raw = torch.empty((len(jobs), *jobs[0].pixels.shape), dtype=torch.uint8, pin_memory=pinned)
        torch.stack([job.pixels for job in jobs], out=raw)
        pixels = normalize(raw.to(self.clip.device, non_blocking=True), config.mean, config.std)
        results: dict[int, Result] = {}
        plain = [row for row, job in enumerate(jobs) if job.answerer is None and not job.layers]
        if plain:
            (features,) = self.run(("image", id(self.tower)), partial(_encode, self.tower), pixels[plain])
            results.update(zip(plain, features.cpu(), strict=True))
        results |= self._in_spaces(jobs, pixels) | self._in_heads(jobs, pixels)
        adapted = [(row, job.answerer) for row, job in enumerate(jobs) if job.answerer and not job.spaces]
        if not adapted:
            return lambda: [results[row] for row in range(len(jobs))]
        part = pixels if len(adapted) == len(jobs) else pixels[[row for row, _ in adapted]]
        rankings = [jobs[row].ranking for row, _ in adapted]
        near = [index for index, one in enumerate(rankings) if one is not None and one.needs_nearness]
        logits, frozen = mixed_batch.logits_and_features(
            [answerer.member for _, answerer in adapted], part, near, run=self.run
        )
        on_cpu = _to_cpu(logits)
        nearness = {
            index: ranking.nearness(frozen[index][None])
            for index, ranking in enumerate(rankings) if ranking is not None and index in frozen
        }  # fmt: skip

        @torch.inference_mode()
        def finish() -> list[Result]:
            answers = _rank(rankings, on_cpu(), nearness)
            results.update((row, answer) for (row, _), answer in zip(adapted, answers, strict=True))
            return [results[row] for row in range(len(jobs))]

        return finish

    def _in_spaces(self, jobs: Sequence[ImageJob], pixels: Tensor) -> dict[int, Tensor]:
        """Unit features [A, E] of the jobs with `spaces`, by their index."""
        groups: dict[Method, list[int]] = {}
        for row, job in enumerate(jobs):
            if job.spaces and job.answerer is not None:
                groups.setdefault(job.answerer.method, []).append(row)
        results: dict[int, Tensor] = {}
        for method, rows in groups.items():
            if isinstance(method, DeAR):
                features = unit(method.attribute_features(pixels[rows]).float())  # [b, A, E]
            else:
                features = unit(method.clip.encode_image(pixels[rows]).float())[:, None]
            results.update(zip(rows, features.cpu(), strict=True))
        return results

    def _in_heads(self, jobs: Sequence[ImageJob], pixels: Tensor) -> dict[int, Tensor]:
        """Image features and head outputs [E + L · H · d] of the jobs with `layers`, by their index."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for row, job in enumerate(jobs):
            if job.layers:
                groups.setdefault(job.layers, []).append(row)
        results: dict[int, Tensor] = {}
        for layers, rows in groups.items():
            heads = head_outputs(self.clip, pixels[rows], layers)
            together = torch.cat([heads.features, heads.outputs.flatten(1)], dim=1)
            results.update(zip(rows, together.cpu(), strict=True))
        return results


def _encode(clip: Clip, pixels: Tensor) -> tuple[Tensor]:
    return (unit(clip.encode_image(pixels).float()),)


def _rank(
    rankings: Sequence[Ranking | None], logits: Sequence[Tensor], nearness: Mapping[int, Tensor]
) -> list[Result]:
    """Answers of logits [C_i] by their rankings, those of one ranking at once; without one the logits."""
    results: list[Result] = list(logits)
    groups: dict[Ranking, list[int]] = {}
    for index, ranking in enumerate(rankings):
        if ranking is not None:
            groups.setdefault(ranking, []).append(index)
    for ranking, indices in groups.items():
        rows = torch.stack([logits[index] for index in indices])  # [b, C]
        near = torch.cat([nearness[index] for index in indices]) if ranking.needs_nearness else None
        finite = rows.isfinite().all(dim=-1).tolist()
        for index, answer, usable in zip(indices, ranking.answers(rows, near), finite, strict=True):
            results[index] = answer if usable else Answer("", ())
    return results


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


def role_bars(model: Model, raw: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Answer, runner-up, and the score as a sum over roles, of images uint8 [3, S, S]."""
    if len(model.classes) < 2:
        raise Refused(400, "an explanation needs at least 2 classes, got 1")
    with torch.inference_mode(False):
        bound = model.bound.bind(model.bound.clip)
        if bound.prompts.cached_frozen is not None:  # in inference mode: no gradient can be taken from it
            bound.prompts.set_frozen(bound.prompts.cached_frozen.clone())
        config = bound.clip.config
        pixels = normalize(torch.stack(list(raw)).to(bound.clip.device), config.mean, config.std)
        try:
            results = Explainer(ScoreParts(Model(bound, model.calibration))).bars(pixels)
        except DearError as error:
            raise Refused(400, str(error)) from None
    return [
        {"answer": answer, "against": other, "bars": [bar.to_dict() for bar in bars]}
        for answer, other, bars in results
    ]
