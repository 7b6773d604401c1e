"""`Model`: a trained method, its backbone and its calibration; the only thing that answers images.

Every surface (command line, `Classifier`, studio, service, export, audit, report) asks a `Model`, so that the
same run says the same everywhere. It knows no training.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Union

import msgspec
import torch
from torch import Tensor

from dear._io.files import write_json, write_safetensors
from dear._io.image_file import Size
from dear._io.progress import Progress
from dear.clip.factory import pick_device
from dear.clip.gpu.recorded import recorder_of
from dear.clip.model import Clip
from dear.data.images import ImageSet, group_names
from dear.errors import DataError, TrainingError, UsageError
from dear.methods.base import Frozen, Method, frozen_feature, in_precision, unit
from dear.methods.calibration import (
    Calibration,
    Threshold,
    apply_scales,
    class_scales,
    distance_ratio,
    threshold,
)
from dear.methods.zeroshot import ZeroShot
from dear.runs.answer import Answer
from dear.runs.batches import GPU_BATCH, ImageLike, Images, image_set, name_of, over_batches, pixels_for
from dear.runs.evaluate import Evaluation
from dear.runs.feature_cache import FeatureCache, learned_digest
from dear.runs.folder import (
    load_run,
    locked,
    read_calibration,
    read_config,
    read_log,
    read_metrics,
    write_calibration,
    write_log,
    write_spec,
)
from dear.runs.recipe import Line
from dear.runs.reference import REFERENCE, Reference
from dear.runs.spec import Spec, digest, plain

if TYPE_CHECKING:
    from dear.runs.explanation import Explanation

Logits = dict[str, Tensor]  #: mode -> [n, C]
Result = TypeVar("Result")
Run = Union[str, "os.PathLike[str]", Method, "Model"]  #: a run folder, a method or a model


class Model:
    """A method with its calibration, on its backbone in one precision.

    Args:
        method: trained or not; it may go on learning, the model answers with what it is at the time.
        calibration: from scores to probabilities; None: CLIP's own temperature.
        reference: features of its training images, to tell images of no class; None: their logits tell them.
        spec: what was trained, for `save`.
        metrics: of the training, for `save`.
        lines: the training's log, for `save`.
        path: the run folder it was read from.
        precision: of the backbone's matrices.
    """

    def __init__(
        self,
        method: Method,
        calibration: Calibration | None = None,
        *,
        reference: Reference | None = None,
        spec: Spec | None = None,
        metrics: dict[str, Any] | None = None,
        lines: list[Line] | None = None,
        path: Path | None = None,
        precision: str = "auto",
    ) -> None:
        self.method = method
        self.calibration = calibration
        self.reference = reference
        self.spec = spec
        self.path = path
        self.precision = precision
        self._metrics, self._lines = metrics, lines
        self._scales: dict[str, tuple[Any, Tensor | None]] = {}

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        backbone: Any = None,
        device: str | torch.device = "cpu",
        *,
        allow_other: bool = False,
        precision: str = "auto",
    ) -> Model:
        """The model of a finished run folder.

        Args:
            path: the run folder.
            backbone: a `Clip`, or what `dear.load` takes; None: the one the run names.
            device: where to load the backbone.
            allow_other: accept a backbone with other weights of the same shape.
            precision: of the backbone's matrices.

        Raises:
            RunError: the folder holds no finished run, or the backbone or the tensors do not fit it.
        """
        method = load_run(path, backbone, device, allow_other)
        spec = read_config(path)
        return cls(
            method,
            read_calibration(path),
            reference=Reference.load(path, method.clip.config.embed_dim),
            spec=spec,
            path=Path(path),
            precision=precision,
        )

    @classmethod
    def of(cls, run: Run, backbone: Any = None, device: str = "auto") -> Model:
        """The model that is meant by a run folder, a method or a model.

        Args:
            run: what to answer with.
            backbone: for a run folder whose backbone moved.
            device: for a run folder: "auto", "cpu", "cuda", …
        """
        if isinstance(run, Model):
            return run
        return cls(run) if isinstance(run, Method) else cls.load(run, backbone, pick_device(device))

    def save(self, folder: str | os.PathLike[str], **extra: Any) -> None:
        """Leave the run in a folder; `extra` goes into its `config.json`.

        Raises:
            RunError: another process is using the folder.
            UsageError: the model was not trained, so there is no run to save.
        """
        if self.spec is None:
            raise UsageError("this model was not trained, so there is no run to save")
        with locked(Path(folder)):
            spec = msgspec.structs.replace(self.spec, extra={**self.spec.extra, **plain(extra)})
            write_spec(Path(folder), self.method, spec)
            self.write(Path(folder))

    def write(self, folder: Path) -> None:
        """Write what was learned into a run folder that has its `config.json` and is locked."""
        method = self.method
        write_log(folder, self.lines)
        # One key: safetensors writes several in an order that changes from run to run.
        words = {"dear": f"{method.name} on {method.clip.fingerprint}"}
        write_safetensors(folder / "adapter.safetensors", method.adapter_state(), words)
        write_json(folder / "metrics.json", plain(self.metrics))
        self.write_answers(folder)

    def write_answers(self, folder: Path) -> None:
        """Write the calibration and the features that belong to it; None removes older ones."""
        write_calibration(folder, self.calibration)
        if self.reference is not None:
            self.reference.save(folder)
        else:
            (folder / REFERENCE).unlink(missing_ok=True)

    # -- what it is -------------------------------------------------------------------------------

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """What `metrics.json` holds: steps, seconds, evaluations."""
        if self._metrics is not None:
            return self._metrics
        return {"steps": 0} if self.path is None else read_metrics(self.path)

    @cached_property
    def lines(self) -> list[Line]:
        """The training's log."""
        if self._lines is not None:
            return self._lines
        return [] if self.path is None else read_log(self.path)

    @property
    def steps(self) -> int:
        """Training steps."""
        return int(self.metrics["steps"])

    @property
    def seconds(self) -> float:
        """Seconds of training, of all processes that trained it."""
        return float(self.metrics.get("seconds", 0.0))

    @property
    def clip(self) -> Clip:
        """The backbone, with its correction, as it was loaded."""
        return self.method.clip

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names, in the order of logits and probabilities."""
        return self.method.classes

    @property
    def template(self) -> str:
        """The sentence around a class name."""
        return self.method.template

    @property
    def modes(self) -> tuple[str, ...]:
        """Ways to predict, the usual one first."""
        return self.method.modes

    @property
    def trained(self) -> tuple[bool, ...]:
        """Whether each class was trained."""
        known = set(self.method.trained_classes)
        return tuple(name in known for name in self.classes)

    @property
    def view(self) -> Size:
        """How an image becomes a square of pixels."""
        return self.clip.config.view

    @property
    def identity(self) -> str:
        """Changes with anything that decides an answer: backbone, correction, adapter, calibration."""
        found = hashlib.sha256(learned_digest("answers", self.method, *self.classes, self.template))
        calibration = None if self.calibration is None else msgspec.to_builtins(self.calibration)
        found.update(digest(calibration).encode())
        found.update(b"" if self.reference is None else self.reference.digest.encode())
        return f"sha256:{found.hexdigest()}"

    def pick_mode(self, mode: str | None) -> str:
        """The mode that is meant: the usual one for None."""
        return self.method.pick_mode(mode)

    @cached_property
    def bound(self) -> Method:
        """The method on the backbone in the model's precision; it shares everything learned."""
        return in_precision(self.method, self.precision)

    # -- other models of the same run -------------------------------------------------------------

    def with_classes(
        self, classes: Sequence[str] | None = None, template: str | None = None, *, add: bool = False
    ) -> Model:
        """The model on other classes, with another template, or both; what is None stays as trained.

        Args:
            classes: names; None: its own.
            template: prompt with `{}`; None: the one it was trained with.
            add: the classes are added to its own; one that it has already stays once.

        Raises:
            UsageError: a class is named twice, or the method cannot name other classes.
        """
        if classes is None and template is None:
            return self
        names = self.classes if classes is None else tuple(classes)
        if add and classes is not None:
            names = (*self.classes, *(name for name in names if name not in self.classes))
        twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
        if classes is not None and twice is not None:
            raise UsageError(f"the class {twice!r} is named twice; name it once")
        return self._on(self.method.with_classes(names, template))

    def _on(self, method: Method) -> Model:
        return Model(
            method,
            self.calibration,
            reference=self.reference,
            spec=self.spec,
            path=self.path,
            precision=self.precision,
        )

    def corrected(self, correction: Any) -> Model:
        """The model as it is with something removed from its image feature; nothing is trained again."""
        return self._on(self.method.bound(self.clip.corrected(correction)))

    def frozen(self) -> Model:
        """The frozen backbone on the same classes: zero-shot, uncalibrated."""
        ids = self.method.prompts.given
        return Model(
            ZeroShot(self.clip, self.classes, template=self.template, ids=ids), precision=self.precision
        )

    # -- answers ----------------------------------------------------------------------------------

    def forward(self, pixels: Tensor) -> Logits:
        """Logits [b, C] in every mode of normalized pixels [b, 3, S, S], uncalibrated, without gradient.

        On a GPU small batches that come again are replayed from a recording of the whole way to the scores.
        """
        method = self.bound
        with torch.no_grad():
            pixels = pixels.to(method.clip.device)
            if not pixels.is_cuda:
                return method.all_logits(pixels)
            key = (type(method).__name__, id(method.clip), id(method.prompts), method._stamp())
            found = recorder_of(method.clip)(
                key, lambda given: tuple(method.all_logits(given).values()), pixels
            )
        return dict(zip(method.modes, found, strict=True))

    def logits(
        self,
        images: Images,
        *,
        unreadable: str = "stop",
        cached: bool = False,
        frozen: Frozen | None = None,
        progress: Progress | None = None,
    ) -> Logits:
        """Logits [n, C] in every mode on the CPU, uncalibrated.

        Args:
            images: an image set, or files and Pillow images in a list.
            unreadable: "stop" raises at an image that cannot be read, "skip" gives it rows of NaN.
            cached: keep answers for image files in the user's cache, and take those that are there.
            frozen: `Method.inference_stage` of all images, where it is known: no image is read.
            progress: called with ("images", images done, images in all).
        """
        parts, problems = self._each(images, lambda logits, _: logits, unreadable, cached, frozen, progress)
        empty = torch.empty(0, len(self.classes))
        found = {mode: torch.cat([empty, *(part[mode] for part in parts)]) for mode in self.modes}
        for rows in found.values():
            rows[list(problems)] = float("nan")
        return found

    def _each(
        self,
        images: Images,
        use: Callable[[Logits, Tensor | None], Result],
        unreadable: str = "stop",
        cached: bool = False,
        frozen: Frozen | None = None,
        progress: Progress | None = None,
        nearness: bool = False,
    ) -> tuple[list[Result], dict[int, str]]:
        """`use` of the logits [b, C] of every batch, on the CPU, and why some images could not be read.

        The latter are named by their place; what is computed of them means nothing. With `nearness`, `use`
        also gets how near the images are to the training images, [b], where the model knows these.
        """
        cache = FeatureCache() if cached else None
        method = self.bound
        reference = self.reference if nearness else None

        def compute(some: ImageSet, rows: list[int]) -> Result:
            features = None
            if frozen is not None:
                found = method.logits_from_frozen(tuple(part[rows].to(method.clip.device) for part in frozen))
            elif cache is None and reference is None:
                found = self.forward(pixels_for(method.clip, some, rows))
            elif cache is None:
                stage, last, cut = method.stages(pixels_for(method.clip, some, rows))
                found, features = method.logits_from_frozen(stage), frozen_feature(method.clip, cut, last)
            else:
                found = cache.logits(method, some, rows)
                if reference is not None:
                    features = cache.features(method.clip, some, rows)
            near = None if reference is None or features is None else self.nearness(features)
            logits = {mode: own.float().cpu() for mode, own in found.items()}
            for mode, own in logits.items():
                broken = (~own.isfinite().all(dim=-1)).nonzero()[:, 0].tolist()
                if broken:
                    raise TrainingError(
                        f"{some.key(rows[broken[0]])}: the scores are not finite numbers (mode {mode}, "
                        f"precision {self.precision}); use precision float32, or train with a lower lr",
                        hint="recipe",
                    )
            return use(logits, near)

        return over_batches(
            images,
            compute,
            method.clip.device,
            unreadable=unreadable,
            progress=progress,
            batch=None if frozen is None else GPU_BATCH,
        )

    def calibrated(self, logits: Tensor, mode: str | None = None) -> Tensor:
        """Logits [b, C] of a mode on the scale where their softmax says how sure the answer is.

        Without a calibration, or for a mode that it does not hold, they stay on CLIP's own scale.
        """
        scales = self.scales(mode)
        return logits if scales is None else apply_scales(logits, scales.to(logits))

    def scales(self, mode: str | None = None) -> Tensor | None:
        """What `calibrated` does with each class's logits (`class_scales`), [2, C]; None: nothing."""
        mode = self.pick_mode(mode)
        own = None if self.calibration is None else self.calibration.modes.get(mode)
        if own is None:
            return None
        stamp = (id(own), self.method._stamp())
        if mode not in self._scales or self._scales[mode][0] != stamp:
            gamma = torch.ones(len(self.classes)) if all(self.trained) else self.text_distances()
            self._scales[mode] = (stamp, class_scales(own, self.trained, gamma))
        return self._scales[mode][1]

    @torch.no_grad()
    def text_distances(self) -> Tensor:
        """How training changed each class's distance from the trained ones in text space, [C]; 1: not."""
        own = self.bound
        base = own.with_classes(own.trained_classes)
        tuned, frozen = (unit(f).float() for f in (own.texts(), own.prompts.frozen))
        base_tuned, base_frozen = (unit(f).float() for f in (base.texts(), base.prompts.frozen))
        return distance_ratio(tuned, frozen, base_tuned, base_frozen).float().cpu()

    def nearness(self, features: Tensor) -> Tensor:
        """Mean cosine [b] of frozen features [b, W] with the nearest training images, on the CPU."""
        if self.reference is None:
            raise UsageError("this model does not know its training images")
        own = features[..., : self.clip.config.embed_dim]  # a focus stands behind it
        return self.reference.nearness(own.float().cpu())

    @property
    def needs_nearness(self) -> bool:
        """Whether the score of "none of these" counts how near images are to the training images.

        Not in a list with classes that were not trained: images of those need not be near.
        """
        known = self.calibration is not None and bool(self.calibration.nearness)
        return known and self.reference is not None and all(self.trained)

    def score(self, scaled: Tensor, nearness: Tensor | None = None, mode: str | None = None) -> Tensor:
        """The score [b] that `threshold` is compared with.

        Args:
            scaled: calibrated logits, [b, C].
            nearness: of the same images, [b]; may be None where `needs_nearness` is not True.
            mode: way to predict; None: the usual one.
        """
        mode, largest = self.pick_mode(mode), scaled.amax(dim=-1)
        if self.calibration is None or mode not in self.calibration.modes:
            return largest
        return self.calibration.score(mode, largest, nearness if self.needs_nearness else None)

    def scores(self, images: Images, mode: str | None = None, *, progress: Progress | None = None) -> Tensor:
        """The score [n] of each image that `threshold` is compared with."""
        mode = self.pick_mode(mode)
        parts, _ = self._each(
            images,
            lambda logits, near: self.score(self.calibrated(logits[mode], mode), near, mode),
            progress=progress,
            nearness=self.needs_nearness,
        )
        return torch.cat([torch.empty(0), *parts])

    def threshold(self, share: float, mode: str | None = None) -> Threshold:
        """The score below which an image is none of the classes; it refuses a share of known images at most.

        Raises:
            UsageError: the model has no calibration, the share is no share, or no class was trained, so that
                nothing is known of how images of these classes score.
        """
        mode = self.pick_mode(mode)
        if self.calibration is None or mode not in self.calibration.modes:
            raise UsageError(
                "this run has no calibration, so it cannot say when an image is none of its classes; train "
                "it with calibration, on at least 10 images of classes that have two or more",
                hint="calibrate",
            )
        if not any(self.trained):
            raise UsageError(
                f"none of the classes ({', '.join(self.classes[:3])}, …) was trained, so it is not known how "
                "their images score and none can be refused; add the classes to the trained ones, or do not "
                "refuse images"
            )
        return threshold(self.calibration.held_out(mode, self.needs_nearness), share)

    def probabilities(
        self,
        images: Images,
        mode: str | None = None,
        *,
        unreadable: str = "stop",
        progress: Progress | None = None,
    ) -> Tensor:
        """Probabilities [n, C] on the CPU, calibrated where the model is; rows of skipped images are NaN."""
        mode = self.pick_mode(mode)
        scaled = self.calibrated(self.logits(images, unreadable=unreadable, progress=progress)[mode], mode)
        return scaled.softmax(dim=-1)

    def answers(
        self,
        images: Images,
        *,
        top: int = 5,
        mode: str | None = None,
        classes: Sequence[str] | None = None,
        template: str | None = None,
        add: bool = False,
        reject: float | None = None,
        unreadable: str = "stop",
        progress: Progress | None = None,
    ) -> list[Answer]:
        """The likeliest classes of each image.

        Args:
            images: an image set, or files and Pillow images in a list.
            top: classes per image.
            mode: way to predict; None: the usual one.
            classes: see `with_classes`.
            template: see `with_classes`.
            add: see `with_classes`.
            reject: share of images of trained classes that may be refused (0.05, say), so that images of no
                class are marked as rejected; None refuses none.
            unreadable: "stop" raises at an image that cannot be read, "skip" answers it with an error.
            progress: called with ("images", images done, images in all).
        """
        if top < 1:
            raise UsageError(f"top = {top}: ask for at least one answer per image")
        mode = self.pick_mode(mode)
        model = self.with_classes(classes, template, add=add)
        limit = None if reject is None else model.threshold(reject, mode)
        count = min(top, len(model.classes))

        def rank(logits: Logits, near: Tensor | None) -> list[tuple[list[int], list[float], bool | None]]:
            scaled = model.calibrated(logits[mode], mode)
            best = scaled.softmax(dim=-1).topk(count, dim=-1)
            refused = [None] * len(scaled)
            if limit is not None:
                refused = (model.score(scaled, near, mode) < limit.value).tolist()
            return list(zip(best.indices.tolist(), best.values.tolist(), refused, strict=True))

        near = limit is not None and model.needs_nearness
        parts, problems = model._each(images, rank, unreadable, progress=progress, nearness=near)
        answers = []
        for place, (which, values, refused) in enumerate(row for part in parts for row in part):
            name = images.key(place) if isinstance(images, ImageSet) else name_of(images[place])
            if place in problems:
                answers.append(Answer(name, (), problems[place]))
            else:
                named = tuple((model.classes[c], value) for c, value in zip(which, values, strict=True))
                answers.append(Answer(name, named, rejected=refused))
        return answers

    def evaluate(
        self,
        images: ImageSet,
        *,
        scores: bool = False,
        unreadable: str = "stop",
        cached: bool = False,
        progress: Progress | None = None,
    ) -> Evaluation:
        """Answer every image of a labeled set in every mode.

        When the model knows all the set's classes, it chooses among all of its own; otherwise it is put on
        the set's classes.

        Args:
            images: the labeled set.
            scores: also those that thresholds for "none of these" are compared with.
            unreadable: "stop" refuses a set with images that cannot be read, "skip" leaves those out.
            cached: keep answers for image files in the user's cache, and take those that are there.
            progress: called with ("images", images done, images in all).

        Raises:
            DataError: the set is empty.
            TrainingError: a score is not a finite number.
        """
        if len(images) == 0:
            raise DataError(f"{images.name}: there is no image to evaluate on")
        model, labels = self.for_labels(images)

        def best(logits: Logits, near: Tensor | None) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
            found = {}
            for mode, own in logits.items():
                scaled = model.calibrated(own, mode)
                top = scaled.softmax(dim=-1).max(dim=-1)
                score = model.score(scaled, near, mode) if scores else top.values
                found[mode] = (top.indices, top.values, score)
            return found

        wanted = scores and model.needs_nearness
        parts, problems = model._each(images, best, unreadable, cached, progress=progress, nearness=wanted)
        keep = [row for row in range(len(images)) if row not in problems]
        indices, values, found = (
            {mode: torch.cat([part[mode][column] for part in parts])[keep] for mode in model.modes}
            for column in range(3)
        )
        groups = group_names(images)
        return Evaluation(
            model.classes,
            labels.cpu()[keep],
            indices,
            values,
            unreadable=tuple(problems[place] for place in sorted(problems)),
            groups=None if groups is None else tuple(groups[row] for row in keep),
            trained=() if isinstance(model.method, ZeroShot) else model.trained,
            scores=found if scores and model.calibration is not None else None,
        )

    def explain(
        self,
        image: ImageLike,
        *,
        answer: str | None = None,
        against: str | None = None,
        reference: ImageSet | None = None,
        mode: str | None = None,
    ) -> Explanation:
        """Why the image is answered as it is: the score as a sum over heads, tokens and patches.

        Args:
            image: a file or a Pillow image.
            answer: the class to explain; None: the answer.
            against: the class to compare with; None: the runner-up.
            reference: images for answers without a role or concept, usually the training images.
            mode: way to predict; None: the usual one.
        """
        from dear.runs.explain import Explainer

        return Explainer(self, reference, mode=mode).explain([image], answer, against)[0]

    def for_labels(self, images: ImageSet) -> tuple[Model, Tensor]:
        """The model that can answer for a labeled set, and the set's labels in that model's numbering [n]."""
        if tuple(images.classes) == self.classes:  # also where two classes share a name
            return self, images.labels
        known = {name: number for number, name in enumerate(self.classes)}
        if all(name in known for name in images.classes):
            numbers = torch.tensor([known[name] for name in images.classes], dtype=torch.long)
            return self, numbers[images.labels]
        return self._on(self.method.with_classes(images.classes)), images.labels

    def features(self, images: Images, *, cached: bool = True, progress: Progress | None = None) -> Tensor:
        """Frozen image features [n, E] of the backbone, on the CPU; the images' files are cached."""
        found = image_set(images)
        clip = self.bound.clip.focused(())
        if cached:
            return FeatureCache().image_features(clip, found, progress)
        return frozen_features(clip, found, progress)


def frozen_features(clip: Clip, images: Images, progress: Progress | None = None) -> Tensor:
    """Image features [n, E] of a backbone, on the CPU."""
    parts, _ = over_batches(
        images,
        lambda some, rows: clip.encode_image(pixels_for(clip, some, rows)).float().cpu(),
        clip.device,
        progress=progress,
    )
    return torch.cat([torch.empty(0, clip.config.embed_dim), *parts])
