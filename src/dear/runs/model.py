"""`Model`: a trained method, its backbone and its calibration; the only thing that answers images.

Every surface (command line, `Classifier`, studio, service, export, audit, report) uses a `Model`, so that a
run returns the same probabilities everywhere. It does not depend on training.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, Union

import msgspec
import torch
from torch import Tensor

from dear.calibration.calibration import Calibration
from dear.calibration.calibrator import Calibrator
from dear.calibration.reference import Reference
from dear.clip.factory import pick_device
from dear.clip.model import Clip
from dear.data.batches import GPU_BATCH, Images, image_set, name_of, over_batches, pixels_for
from dear.data.images import ImageSet
from dear.data.inputs import find_inputs
from dear.errors import TrainingError, UsageError
from dear.methods.base import Method
from dear.methods.frozen import Frozen
from dear.methods.zeroshot import ZeroShot
from dear.runs.answer import Answer, share_of_rejected
from dear.runs.class_lists import combine_classes, resolve_classes, split_class_list
from dear.runs.evaluate import evaluate
from dear.runs.evaluation import Evaluation
from dear.runs.feature_cache import FeatureCache, frozen_features, learned_digest
from dear.runs.folder import (
    load_run,
    locked,
    read_calibration,
    read_config,
    read_log,
    read_metrics,
    write_calibration,
    write_learned,
    write_spec,
)
from dear.runs.predictions import Predictions
from dear.runs.ranking import Ranking
from dear.runs.recipe import Line
from dear.runs.spec import Spec, digest, plain
from dear.runs.tree import Tree
from dear.utils.digest import of_parts
from dear.utils.progress import Progress

Logits = dict[str, Tensor]  #: mode -> [n, C]
Result = TypeVar("Result")
#: names in other libraries -> the equivalent here
_ALTERNATIVES = {
    "predict_proba": "model.probabilities(images)",
    "score": "dear.evaluate(model, data)",
    "fit": "dear.adapt(data, method=...)",
    "transform": "model.features(images)",
    "explain": "dear.explain(model, images)",
}
Run = Union[str, "os.PathLike[str]", Method, "Model"]  #: a run folder, a method or a model


class Model:
    """A method with its calibration, on its backbone in one precision, that answers images.

    Args:
        method: trained or not; if it is trained further, the model uses the current tensors.
        calibration: maps logits to probabilities; None: CLIP's temperature.
        reference: features of its training images, to detect images of no class; None: by their logits.
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
        if not isinstance(method, Method):
            raise UsageError(f"method must be a Method, got {method!r}; use dear.load for a run folder")
        self.method = method
        self.calibration = calibration
        self.reference = reference
        self.spec = spec
        self.path = path
        self.precision = precision
        self._metrics, self._lines = metrics, lines

    @classmethod
    def of(cls, run: Run, backbone: Any = None, device: str = "auto") -> Model:
        """The model of a run folder, a method, a model, or a fitted `Classifier`.

        `backbone` replaces the backbone that a run folder names.
        """
        run = getattr(run, "run_", run)  # of a fitted Classifier
        if isinstance(run, Model):
            return run
        if isinstance(run, Method):
            return cls(run)
        if isinstance(run, Clip):
            raise UsageError(
                f"run must be a trained run, got the backbone {run.name!r}; for its own answers use "
                "dear.zeroshot(images, classes, backbone=clip)"
            )
        if not isinstance(run, str | os.PathLike):
            raise UsageError(
                "run must be a run folder, a Model, a Method, or a fitted Classifier, got "
                f"{type(run).__name__}; train one with dear.adapt"
            )
        return cls.load(run, backbone, pick_device(device))

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
        spec = read_config(path)
        method = load_run(path, backbone, device, allow_other, spec)
        return cls(
            method,
            read_calibration(path),
            reference=Reference.load(path, method.clip.config.embed_dim),
            spec=spec,
            path=Path(path),
            precision=precision,
        )

    # -- its parts ----------------------------------------------------------------------------------

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
        """Prompt with `{}` for the class name."""
        return self.method.template

    @property
    def modes(self) -> tuple[str, ...]:
        """Ways to predict, the default first."""
        return self.method.modes

    @property
    def trained(self) -> tuple[bool, ...]:
        """Whether each class was trained."""
        known = set(self.method.trained_classes)
        return tuple(name in known for name in self.classes)

    def __getattr__(self, name: str) -> Any:
        """The error for a name known from another library contains the alternative."""
        remedy = f"; use {_ALTERNATIVES[name]}" if name in _ALTERNATIVES else ""
        raise AttributeError(f"'Model' object has no attribute {name!r}{remedy}")

    def __repr__(self) -> str:
        where = "" if self.path is None else f" in {self.path}"
        return f"<Model: {self.method.title} on {self.clip.name}, {len(self.classes)} classes{where}>"

    def _repr_html_(self) -> str:
        facts = {
            "method": self.method.title,
            "backbone": self.clip.name,
            "classes": ", ".join(self.classes[:20]) + (" …" if len(self.classes) > 20 else ""),
            "learned parameters": f"{self.method.learned_parameters:,}",
        }
        if self.spec is not None:
            facts["training images"] = f"{self.spec.images:,} of {self.spec.dataset}"
        for name, entry in self.metrics.items():
            if isinstance(entry, dict) and isinstance(entry.get("accuracy"), dict):
                modes = ", ".join(f"{mode} {value:.1%}" for mode, value in entry["accuracy"].items())
                before = f" (zero-shot {entry['zero_shot']:.1%})" if "zero_shot" in entry else ""
                facts[name] = f"{modes}{before} of {entry.get('images')} images"
        rows = "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in facts.items())
        return f"<table>{rows}</table>"

    @property
    def identity(self) -> str:
        """Hash of everything that determines answers: backbone, correction, adapter, calibration."""
        adapter = learned_digest("answers", self.method, *self.classes, self.template)
        calibration = None if self.calibration is None else msgspec.to_builtins(self.calibration)
        reference = "" if self.reference is None else self.reference.digest
        return f"sha256:{of_parts(adapter, digest(calibration), reference).hex()}"

    @property
    def tree(self) -> Tree | None:
        """The tree of its classes; None if there is none."""
        parents = {} if self.spec is None else self.spec.tree
        return Tree(parents, self.classes) if any(name in parents for name in self.classes) else None

    def require_one_label(self, task: str) -> None:
        """Raise a UsageError where images have several labels, which `task` does not support."""
        if self.method.several:
            raise UsageError(f"{task} needs a run with one label per image; this one has several (labels)")

    def pick_mode(self, mode: str | None) -> str:
        """`mode`, checked; None returns the default mode."""
        return self.method.pick_mode(mode)

    @cached_property
    def bound(self) -> Method:
        """The method on the backbone in the model's precision, with shared learned tensors."""
        return self.method.in_precision(self.precision)

    @property
    def calibrator(self) -> Calibrator:
        """The calibration for its classes: logits to probabilities, and the rejection of images."""
        method = self.method
        return Calibrator(
            self.calibration,
            self.reference,
            self.classes,
            self.trained,
            method.trained_classes,
            method.several,
        )

    def with_classes(
        self, classes: Sequence[str] | None = None, template: str | None = None, *, add: bool = False
    ) -> Model:
        """The model on other classes, with another template, or both; what is None stays as trained.

        Args:
            classes: names, used verbatim (`dear.runs.class_lists` parses `+`); None: those of the model.
            template: prompt with `{}`; None: the one it was trained with.
            add: add the classes to those of the model; a class that it has already is not repeated.

        Raises:
            UsageError: a class is named twice, or differs from another one only in case or spaces, which CLIP
                ignores; or the method cannot name new classes.
        """
        if classes is None and template is None:
            return self
        names = self.classes
        if classes is not None and tuple(classes) != self.classes:
            names = combine_classes(classes, self.classes, add=add)
        return self.with_method(self.method.with_classes(names, template))

    def with_method(self, method: Method) -> Model:
        """The model with another method, with the same calibration."""
        return Model(
            method,
            self.calibration,
            reference=self.reference,
            spec=self.spec,
            path=self.path,
            precision=self.precision,
        )

    def with_correction(self, correction: Any) -> Model:
        """The model with a correction of its image feature; nothing is trained again."""
        return self.with_method(self.method.bind(self.clip.with_correction(correction)))

    def zero_shot(self) -> Model:
        """The plain backbone on the same classes: zero-shot, uncalibrated, without corrections."""
        ids = self.method.prompts.token_ids
        return Model(
            ZeroShot(
                self.clip.plain,
                self.classes,
                template=self.template,
                ids=ids,
                texts=self.method.prompts.texts,
                several=self.method.several,
            ),
            precision=self.precision,
        )

    # -- answers ----------------------------------------------------------------------------------

    def forward(self, pixels: Tensor) -> Logits:
        """Logits [b, C] in every mode of normalized pixels [b, 3, S, S], uncalibrated, without gradient.

        On a GPU the forward pass of a small batch size is recorded at its second batch, and then replayed.
        """
        method = self.bound
        with torch.no_grad():
            pixels = pixels.to(method.clip.device)
            if not pixels.is_cuda:
                return method.all_logits(pixels)
            key = (type(method).__name__, id(method.clip), id(method.prompts), method.stamp())
            parts = method.clip.recorder(key, lambda batch: tuple(method.all_logits(batch).values()), pixels)
        return dict(zip(method.modes, parts, strict=True))

    def logits(
        self,
        images: Images,
        *,
        unreadable: str = "stop",
        cached: bool = True,
        frozen: Frozen | None = None,
        progress: Progress | None = None,
    ) -> Logits:
        """Logits [n, C] in every mode on the CPU, uncalibrated.

        Args:
            images: an image set, or files and Pillow images in a list.
            unreadable: "stop" raises at an image that cannot be read, "skip" returns rows of NaN for it.
            cached: use the cache of frozen features of image files, for methods that read nothing else.
            frozen: `Method.inference_stage` of all images, if it is known; no image is read then.
            progress: called with ("images", images done, images in all).
        """
        parts, problems = self.map_logits(
            images, lambda logits, _: logits, unreadable, cached, frozen, progress
        )
        empty = torch.empty(0, len(self.classes))
        logits = {mode: torch.cat([empty, *(part[mode] for part in parts)]) for mode in self.modes}
        for rows in logits.values():
            rows[list(problems)] = float("nan")
        return logits

    def map_logits(
        self,
        images: Images,
        use: Callable[[Logits, Tensor | None], Result],
        unreadable: str = "stop",
        cached: bool = True,
        frozen: Frozen | None = None,
        progress: Progress | None = None,
        nearness: bool = False,
    ) -> tuple[list[Result], dict[int, str]]:
        """`use(logits, nearness)` for every batch, and the errors of unreadable images by their index.

        Logits are [b, C] on the CPU; those of unreadable images have no meaning. With `nearness`, and if the
        model has a reference, the second argument is the nearness [b] to the training images, else None.
        """
        cache, method, calibrator = FeatureCache() if cached else None, self.bound, self.calibrator

        def compute(source: ImageSet, rows: list[int]) -> Result:
            features = None
            if frozen is not None:
                stage = frozen.rows(rows).map(lambda part: part.to(method.clip.device))
                scores = method.logits_from_frozen(stage)
            elif cache is not None and method.cut == "feature":
                stage = cache.some_frozen(method.clip, source, rows, method.focus)
                features = stage.x
                with torch.no_grad():
                    scores = method.logits_from_frozen(stage.map(lambda part: part.to(method.clip.device)))
            elif not nearness:
                scores = self.forward(pixels_for(method.clip, source, rows))
            else:
                stage = method.inference_stage(pixels_for(method.clip, source, rows), method.clip)
                scores, features = method.logits_from_frozen(stage), stage.feature
            near = calibrator.nearness(features) if nearness and features is not None else None
            logits = {mode: part.float().cpu() for mode, part in scores.items()}
            for mode, part in logits.items():
                broken = (~part.isfinite().all(dim=-1)).nonzero()[:, 0].tolist()
                if broken:
                    raise TrainingError(
                        f"{source.key(rows[broken[0]])}: the scores are not finite numbers (mode {mode}, "
                        f"precision {self.precision}); use precision float32, or train with a lower lr",
                        hint="recipe",
                    )
            return use(logits, near)

        return over_batches(
            images,
            compute,
            method.clip,
            unreadable=unreadable,
            progress=progress,
            batch=None if frozen is None else GPU_BATCH,
        )

    def scores(self, images: Images, mode: str | None = None, *, progress: Progress | None = None) -> Tensor:
        """The score [n] of each image that `threshold` is compared with."""
        mode, calibrator = self.pick_mode(mode), self.calibrator
        parts, _ = self.map_logits(
            images,
            lambda logits, near: calibrator.score(calibrator.calibrate(logits[mode], mode), near, mode),
            progress=progress,
            nearness=calibrator.needs_nearness,
        )
        return torch.cat([torch.empty(0), *parts])

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
        scaled = self.calibrator.calibrate(
            self.logits(images, unreadable=unreadable, progress=progress)[mode], mode
        )
        return self.calibrator.probabilities(scaled)

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
        certain: float | None = None,
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
            certain: of a run with a tree: the least probability of a named node; None: 0.8. See
                `dear.runs.tree`.
            unreadable: "stop" raises at an image that cannot be read, "skip" answers it with an error.
            progress: called with ("images", images done, images in all).
        """
        if isinstance(images, str | os.PathLike):
            images = [images]
        model = self.with_classes(classes, template, add=add)
        ranking = Ranking(model, top, mode, reject, certain)
        parts, problems = model.map_logits(
            images,
            lambda logits, near: ranking.answers(logits[ranking.mode], near),
            unreadable,
            progress=progress,
            nearness=ranking.needs_nearness,
        )
        answers = []
        for index, answer in enumerate(chain.from_iterable(parts)):
            name = images.key(index) if isinstance(images, ImageSet) else name_of(images[index])
            error = problems.get(index)
            answers.append(replace(answer, image=name) if error is None else Answer(name, (), error))
        return answers

    def parse_classes(self, classes: str | Sequence[str]) -> tuple[str, ...]:
        """Class names from a list, or from a text with commas; a `+` before any name adds them to its own."""
        names = split_class_list(classes) if isinstance(classes, str) else classes
        return resolve_classes(names, self.classes)

    def predict(
        self,
        images: Any,
        *,
        classes: str | Sequence[str] | None = None,
        reject: bool | float = False,
        top: int = 5,
        mode: str | None = None,
        unreadable: str = "skip",
        progress: Progress | None = None,
    ) -> Predictions:
        """The likeliest classes of each image, with probabilities, as `dear.predict` returns them.

        Args:
            images: an image, a folder, a pattern, or a list of them; Pillow images and arrays; an image set.
            classes: other classes than the trained ones, see `parse_classes`.
            reject: mark images that belong to none of the classes; a number is the share of images of known
                classes that may be rejected, True means 0.05.
            top: classes per image.
            mode: way to predict; None: the usual one.
            unreadable: "skip" answers an image that cannot be read with an error, "stop" raises.
            progress: called with ("images", images done, images in all).

        Raises:
            InputError: none of the images can be read.
        """
        predictions = Predictions(
            tuple(
                self.answers(
                    find_inputs(images),
                    classes=None if classes is None else self.parse_classes(classes),
                    reject=share_of_rejected(reject),
                    top=top,
                    mode=mode,
                    unreadable=unreadable,
                    progress=progress,
                )
            )
        )
        predictions.require_readable()
        return predictions

    def evaluate(
        self,
        images: ImageSet,
        *,
        scores: bool = False,
        unreadable: str = "stop",
        cached: bool = True,
        progress: Progress | None = None,
    ) -> Evaluation:
        """Answer every image of a labeled set in every mode.

        If the model has all classes of the set, it chooses among all of its classes; otherwise its classes
        are replaced by those of the set.

        Args:
            images: the labeled set.
            scores: also return the scores that thresholds for "none of these" are compared with.
            unreadable: "stop" refuses a set with images that cannot be read, "skip" leaves those out.
            cached: use the cache of frozen features of image files, for methods that read nothing else.
            progress: called with ("images", images done, images in all).
        """
        return evaluate(self, images, scores, unreadable, cached, progress)

    def for_labels(self, images: ImageSet) -> tuple[Model, Tensor]:
        """The model that can answer for a labeled set, and the set's labels in that model's numbering [n].

        Raises:
            UsageError: a class differs from a trained one only in case or spaces, or is new to a method that
                learns its classes.
        """
        if tuple(images.classes) == self.classes:  # also where two classes share a name
            return self, images.labels
        known = {name: number for number, name in enumerate(self.classes)}
        if all(name in known for name in images.classes):
            numbers = torch.tensor([known[name] for name in images.classes], dtype=torch.long)
            return self, numbers[images.labels]
        return self.with_classes(images.classes), images.labels

    def features(self, images: Images, *, cached: bool = True, progress: Progress | None = None) -> Tensor:
        """Frozen image features [n, E] of the backbone, on the CPU; the images' files are cached."""
        source = image_set(images)
        clip = self.bound.clip
        if cached:
            return FeatureCache().image_features(clip, source, progress)
        return frozen_features(clip, source, progress)

    # -- the run folder -----------------------------------------------------------------------------

    def save(self, folder: str | os.PathLike[str], **extra: Any) -> None:
        """Write the run to a folder; `extra` is added to its `config.json`."""
        if self.spec is None:
            raise UsageError("only a trained model can be saved; train one with dear.adapt")
        with locked(Path(folder)):
            spec = msgspec.structs.replace(self.spec, extra={**self.spec.extra, **plain(extra)})
            write_spec(Path(folder), self.method, spec)
            self.write(Path(folder))

    def write(self, folder: Path) -> None:
        """Write everything learned into a run folder that has its `config.json` and is locked."""
        write_learned(folder, self.method, self.metrics, self.lines)
        write_calibration(folder, self.calibration, self.reference)

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """The content of `metrics.json`: steps, seconds, evaluations."""
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
        """Seconds of training, interrupted parts included."""
        return float(self.metrics.get("seconds", 0.0))
