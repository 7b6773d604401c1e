"""`dear.Classifier`: few-shot adaptation with the interface of a scikit-learn estimator."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any, ParamSpec

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, TransformerMixin
from sklearn.exceptions import NotFittedError

from dear.classifier.parameters import parameters_of
from dear.classifier.training_set import Labels, split_unlabeled, training_set
from dear.clip.factory import list_backbones, load, pick_device
from dear.clip.model import Clip
from dear.data.batches import Images, name_of
from dear.data.images import (
    ImageSet,
    require_one_label,
    targets_of,
)
from dear.data.inputs import as_images, as_indicators, check_labels
from dear.data.open import open_data
from dear.errors import DataError, InputError, RunError, UsageError
from dear.heads.roles import RoleMap
from dear.images.names import find_images, is_image_name
from dear.methods import METHODS
from dear.methods.tensors import unit
from dear.runs.answer import NONE_OF_THESE, share_of_rejected
from dear.runs.folder import read_config
from dear.runs.model import Model
from dear.runs.predictions import Predictions
from dear.runs.recipe import parse_recipe, recipe_texts
from dear.tasks.adapt import adapt
from dear.tasks.explain.explanation import Explanations
from dear.tasks.explain.task import explainer_of
from dear.tasks.load import is_run
from dear.tasks.share.task import local_run
from dear.utils.files import PathLike

Parameters = ParamSpec("Parameters")


def _name_keywords(init: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """Let positional arguments raise a TypeError that names the keyword to use."""

    @wraps(init)
    def checked(*args: Parameters.args, **parameters: Parameters.kwargs) -> None:
        values = args[1:]  # without self
        if values:
            value = values[0]
            is_method = isinstance(value, str) and value in METHODS
            call = f"Classifier({'method' if is_method else 'backbone'}={_short(value)})"
            if not is_method and isinstance(value, str | os.PathLike) and is_run(value):
                call = f"Classifier.load({_short(value)})"
            raise TypeError(f"Classifier takes keyword arguments only, got {_short(value)}; use {call}")
        init(*args, **parameters)

    return checked


def _short(value: Any) -> str:
    return "clip" if isinstance(value, Clip) else repr(value)


class Classifier(ClassifierMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """An image classifier that learns from a few images per class.

    `fit` takes a folder of class folders, a table, `world:NAME`, an image set, or a list of images with a
    list of labels; the last is what `cross_val_score` and `GridSearchCV` work with. Images are files, bytes,
    Pillow images, arrays or tensors. `transform` returns features, so that a classifier can be a step of a
    pipeline. A pickled classifier holds what was learned and the backbone's name, not the backbone. All
    parameters are keywords.

    Args:
        method: name of the method; see `dear.list_methods()`.
        backbone: what `dear.load` takes, or a loaded backbone.
        shots: images per class to train on; None: all.
        seed: of the draw of images and of training.
        roles: role map or its file, for methods that use roles; None: the backbone's, or discovered.
        template: prompt with `{}`; None: the dataset's, or "a photo of a {}.".
        texts: several texts per class, averaged: a JSON file or a mapping `{class: [sentence, …]}`.
        tree: a tree of the classes, by which `run_.answers` names nodes: a JSON file or a mapping,
            nested or from child to parent.
        mode: how to predict ("fused", "decoupled", ...); None: the method's usual mode.
        recipe: a preset of the method ("strong"), values of the recipe by name ({"weight_decay": 0.01}), or a
            list of both (["strong", "weight_decay=0.01"]); None: what the method recommends.
        epochs: passes over the training images; None: the method's value.
        batch: images per step; None: the method's value.
        lr: learning rate; None: the method's value.
        options: of the method, by name.
        device: "auto", "cpu", "cuda", …
        without: concepts to remove before anything is learned ("location", ["location", "color"]).
        examples: images that show the values of the only concept to remove, one folder per value; for several
            concepts a mapping from concept to folder.
        way: how the concepts are removed ("words", "heads", …); "auto" chooses on the training images.
        focus: role whose heads to learn with in addition to the whole feature ("location"), or "auto".
        calibrate: fit probabilities by cross-validation on the training images, which takes about one and a
            half further trainings.
        reject: share of images of known classes that `predict` may reject (such as 0.05), so that it answers
            images of no class with "none of these", or with -1 where the labels are numbers; None: off.
        class_weight: "balanced" repeats images of rare classes in training; None shows each image once.
        unreadable: "stop" refuses training images that cannot be read, "skip" leaves them out.

    Attributes:
        classes_: the labels that `predict` answers with.
        method_: the trained method.
        run_: the trained model.

    Example:
        >>> clf = Classifier(shots=4, epochs=2)                              # doctest: +SKIP
        >>> clf.fit("photos/train").predict(["a.jpg"])                       # doctest: +SKIP
        array(['golden retriever'], dtype='<U16')
    """

    @_name_keywords
    def __init__(
        self,
        *,
        method: str = "dear",
        backbone: PathLike | Clip = "mini",
        shots: int | None = None,
        seed: int = 1,
        roles: PathLike | RoleMap | None = None,
        template: str | None = None,
        texts: PathLike | Mapping[str, Any] | None = None,
        tree: PathLike | Mapping[str, Any] | None = None,
        mode: str | None = None,
        recipe: str | Mapping[str, Any] | Sequence[str] | None = None,
        epochs: int | None = None,
        batch: int | None = None,
        lr: float | None = None,
        options: dict[str, Any] | None = None,
        device: str = "auto",
        without: str | Sequence[str] | None = None,
        examples: PathLike | Mapping[str, PathLike] | None = None,
        way: str = "auto",
        focus: str | None = None,
        calibrate: bool = True,
        reject: float | None = None,
        class_weight: str | None = "balanced",
        unreadable: str = "stop",
    ) -> None:
        self.method = method
        self.backbone = backbone
        self.shots = shots
        self.seed = seed
        self.roles = roles
        self.template = template
        self.texts = texts
        self.tree = tree
        self.mode = mode
        self.recipe = recipe
        self.epochs = epochs
        self.batch = batch
        self.lr = lr
        self.options = options
        self.device = device
        self.without = without
        self.examples = examples
        self.way = way
        self.focus = focus
        self.calibrate = calibrate
        self.reject = reject
        self.class_weight = class_weight
        self.unreadable = unreadable

    def fit(
        self,
        X: Any,
        y: Sequence[Any] | Labels | None = None,
        *,
        class_names: Any = None,
        unlabeled: Any = None,
    ) -> Classifier:
        """Train on images.

        Args:
            X: a folder, table, `world:NAME` or image set; or a list of images, with `y`.
            y: one label per image, or an indicator matrix [n, classes] of several, as in scikit-learn; -1
                among whole numbers and None among names mean that there is none, as in scikit-learn's
                semi-supervised estimators.
            class_names: words for the labels, as a mapping from label to name or in the labels' order. CLIP
                reads them, so labels that are numbers need names; None: the labels themselves.
            unlabeled: images without labels to learn from as well: a list of images, or what `dear.adapt`
                takes. They are used where cross-validation does not show that they harm.

        Raises:
            DearError: one sentence on what is wrong with the images, labels or options.
        """
        X, y, unlabeled = split_unlabeled(X, y, unlabeled)
        images, self.classes_ = training_set(X, y, class_names, self.template)
        if targets_of(images) is not None and self.reject is not None:
            raise UsageError(
                f"reject must be None with several labels per image, which have thresholds, got {self.reject}"
            )
        if self.class_weight not in (None, "balanced"):
            raise UsageError(f"class_weight must be None or 'balanced', got {self.class_weight!r}")
        if self.reject is not None and not 0 < self.reject <= 0.5:
            raise UsageError(f"reject must be above 0 and at most 0.5, got {self.reject}")
        if self.reject is not None and not self.calibrate:
            raise UsageError(f"reject = {self.reject} needs calibrate=True")
        preset, values = parse_recipe(self.recipe, epochs=self.epochs, batch=self.batch, lr=self.lr)
        self.run_: Model = adapt(
            images,
            method=self.method,
            backbone=_load_backbone(self.backbone, pick_device(self.device)),
            roles=self.roles,
            unreadable=self.unreadable,
            shots=self.shots,
            seed=self.seed,
            template=self.template,
            texts=self.texts,
            tree=self.tree,
            recipe=recipe_texts(preset, values),
            options=self.options,
            mode=self.mode,
            without=self.without,
            examples=self.examples,
            way=self.way,
            focus=self.focus,
            calibrate=self.calibrate,
            balance=self.class_weight == "balanced",
            unlabeled=unlabeled,
        )
        self.method_ = self.run_.method
        return self

    def predict_proba(self, X: Any) -> NDArray[np.float32]:
        """Probability of each class, [n, classes], calibrated if the method is; X as in `predict`.

        An image that cannot be read has a row of NaN, and a warning names it.
        """
        self._check_fitted()
        images = self._images(X)
        probabilities = self.run_.probabilities(images, self.mode, unreadable="skip")
        unreadable = probabilities.isnan().any(dim=1).nonzero()[:, 0].tolist()
        if unreadable:
            row = unreadable[0]
            first = images.key(row) if isinstance(images, ImageSet) else name_of(images[row])
            warnings.warn(
                f"{len(unreadable)} of {len(probabilities)} images cannot be read: {first}", stacklevel=2
            )
        proba: NDArray[np.float32] = probabilities.numpy()
        return proba

    def predict(
        self, X: Any, classes: str | Sequence[str] | None = None, reject: bool | float | None = None
    ) -> Labels:
        """The likeliest class of each image.

        With `reject`, an image that scores below the run's threshold is answered with "none of these", or
        with -1 where the labels are numbers. An image that cannot be read is answered with None, and a
        warning names it.

        Args:
            X: one image or a list of them; or what `fit` and `score` take, of which the test images are
                answered, in the order of `open_data(X, "test")`; or a folder that holds only images.
            classes: names to choose from instead of the trained ones, as a list or a text with commas; a `+`
                before any name adds all of them to the trained ones. The answers are then names.
            reject: share of images of known classes that may be rejected; True means 0.05, False none, None
                the classifier's `reject`.

        Raises:
            InputError: none of the images can be read.
            UsageError: the method cannot name new classes, or a class has the name of the rejection answer.
        """
        self._check_fitted()
        reject = share_of_rejected(self.reject if reject is None else reject)
        numeric = np.issubdtype(self.classes_.dtype, np.number) and classes is None
        rejected: Any = -1 if numeric else NONE_OF_THESE
        label_of = dict(zip(self.method_.classes, self.classes_.tolist(), strict=True))
        names: tuple[str, ...] | None = None
        if classes is not None:
            names = self.run_.parse_classes(classes)
            label_of = {name: name for name in names}
        if reject is not None and rejected in label_of.values():
            raise UsageError(
                f"with reject no class may be called {rejected!r}, the answer for images of no class; "
                "rename it"
            )
        if self.method_.several:
            if classes is not None:
                raise UsageError("classes must be None for a classifier with several labels per image")
            sets = self.run_.answers(self._images(X), top=1, mode=self.mode, reject=reject)
            rows = [[name in (answer.labels or ()) for name in self.method_.classes] for answer in sets]
            return np.array(rows, dtype=np.int64).reshape(len(sets), len(self.method_.classes))
        answers = self.run_.answers(
            self._images(X), top=1, mode=self.mode, classes=names, reject=reject, unreadable="skip"
        )
        predictions = Predictions(tuple(answers))
        predictions.require_readable()
        errors = predictions.errors
        if errors:
            warnings.warn(f"{len(errors)} of {len(answers)} images cannot be read: {errors[0]}", stacklevel=2)
        labels = [
            None
            if answer.error is not None
            else rejected
            if answer.rejected
            else label_of[answer.classes[0][0]]
            for answer in answers
        ]
        if errors:
            return np.array(labels, dtype=object)
        return np.array(labels, dtype=_label_dtype(labels, np.array(list(label_of.values()))))

    def transform(self, X: Any) -> NDArray[np.float32]:
        """Frozen features of the backbone, [n, E], each of unit length; X as in `predict`.

        Features of image files come from the user's cache where they are known.

        Raises:
            InputError: an image cannot be read.
        """
        self._check_fitted()
        features: NDArray[np.float32] = unit(self.run_.features(self._images(X))).numpy()
        return features

    def explain(self, X: Any, answer: str | None = None, against: str | None = None) -> Explanations:
        """Why each image is answered as it is: exact contributions of roles, heads and patches.

        Args:
            X: as in `predict`.
            answer: name of the class to explain; None: the answer for each image.
            against: name of the class to compare with; None: the likeliest other one.
        """
        self._check_fitted()
        return explainer_of(self.run_, mode=self.mode).explain(self._images(X), answer, against)

    def _images(self, X: Any) -> Images:
        """The images to predict."""
        if isinstance(X, ImageSet):
            return X
        if not isinstance(X, str | os.PathLike):
            return as_images(X)
        if os.path.isdir(X) and not any(entry.is_dir() for entry in Path(X).iterdir()):
            return find_images([os.fspath(X)])
        if is_image_name(os.fspath(X)):
            return as_images([X])
        return open_data(X, "test", template=self.template)

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Share of images answered correctly: of a dataset's test split, or of files and their labels y.

        An image that `predict` refuses (with `reject`) or cannot read counts as wrong, in both cases.
        """
        self._check_fitted()
        if y is None:
            if not isinstance(X, ImageSet | str | os.PathLike):
                raise InputError("score needs y, one label per image, with a list of images")
            images = X if isinstance(X, ImageSet) else open_data(X, "test", template=self.template)
            unknown = [name for name in images.classes if name not in self.method_.classes]
            if unknown:
                raise DataError(
                    f"{images.name}: the class {unknown[0]!r} was not trained; for new classes use "
                    "`method_.with_classes`",
                    hint="evaluate",
                )
            places = [self.method_.classes.index(name) for name in images.classes]
            targets = targets_of(images)
            if self.method_.several:
                if targets is None:
                    targets = torch.nn.functional.one_hot(images.labels, len(images.classes)).bool()
                y = np.zeros((len(images), len(self.method_.classes)), dtype=bool)
                y[:, places] = targets.numpy()
                X = images
            else:
                require_one_label(images, "score")
                X, y = images, self.classes_[places][images.labels.numpy()]
        answers = self.predict(X)
        if self.method_.several:
            truth = as_indicators(y)
            if truth is None or truth.shape != answers.shape:
                raise InputError(f"y must be an indicator matrix {list(answers.shape)}, got {np.shape(y)}")
            return float(np.average((answers == truth).all(axis=1), weights=sample_weight))
        return float(np.average(answers == check_labels(y, len(answers)), weights=sample_weight))

    def save(self, path: PathLike) -> None:
        """Write a run folder that `load`, `dear evaluate` and `dear predict` read."""
        self._check_fitted()
        settings = {"mode": self.mode, "reject": self.reject, "labels": self.classes_.tolist()}
        self.run_.save(path, classifier=settings)

    @classmethod
    def load(
        cls, path: PathLike, backbone: PathLike | Clip | None = None, device: str = "auto"
    ) -> Classifier:
        """A classifier from a run folder, whether `save` or `dear adapt` wrote it; or `hf://owner/name`.

        Raises:
            RunError: the folder holds no finished run, or the backbone does not fit it.
        """
        path = local_run(path)
        run = Model.load(path, backbone, pick_device(device))
        config, method = read_config(path), run.method
        _ = run.metrics, run.lines  # read now, so that damaged files raise here
        stored = config.extra.get("classifier", {})
        labels = stored.get("labels", list(config.classes)) if isinstance(stored, dict) else None
        plain = isinstance(labels, list) and all(isinstance(label, str | int | float) for label in labels)
        if not isinstance(labels, list) or not plain or len(labels) != len(method.classes):
            raise RunError(
                f"{os.fspath(path)}: the classifier's labels do not fit its {len(method.classes)} classes"
            )
        estimator = cls(
            backbone=config.backbone_source() if backbone is None else backbone,
            mode=stored.get("mode"),
            reject=stored.get("reject"),
            device=device,
            **parameters_of(config, method),
        )
        estimator.method_ = method
        estimator.classes_ = np.array(labels)
        estimator.run_ = run
        return estimator

    def __getstate__(self) -> dict[str, Any]:
        """The parameters, and of a trained classifier the files of its run: no weights of the backbone."""
        state = dict(super().__getstate__())
        method = state.pop("method_", None)
        run = state.pop("run_", None)
        if isinstance(self.backbone, Clip):
            state["backbone"] = _name_of(self.backbone)
        if method is None or run is None:
            return state
        with tempfile.TemporaryDirectory() as folder:
            self.save(folder)
            state["_files"] = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
        state["_backbone"] = _name_of(method.clip)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load the backbone again by its name, and put what was learned on it."""
        files, backbone = state.pop("_files", None), state.pop("_backbone", None)
        super().__setstate__(state)
        if files is None:
            return
        with tempfile.TemporaryDirectory() as folder:
            for name, data in files.items():
                (Path(folder) / Path(name).name).write_bytes(data)
            clip = _load_backbone(backbone, pick_device(self.device))
            loaded = Classifier.load(folder, clip, self.device)
        self.method_, self.run_ = loaded.method_, loaded.run_
        self.run_.path = None

    def _check_fitted(self) -> None:
        if not hasattr(self, "method_"):
            raise NotFittedError("this Classifier is not fitted yet; call fit, or use Classifier.load")


@lru_cache(maxsize=2)
def _load_cached(source: str | Path, device: str) -> Clip:
    """Load a backbone by name, once: a grid search fits many classifiers on it."""
    return load(source, device=device)


def _load_backbone(source: PathLike | Clip, device: str) -> Clip:
    if isinstance(source, Clip):
        return source
    return _load_cached(source if isinstance(source, str) else Path(source), device)


def _label_dtype(labels: list[Any], classes: Labels) -> Any:
    """The type of an array of labels that also holds every class."""
    return np.result_type(classes.dtype, np.array(labels).dtype) if labels else classes.dtype


def _name_of(clip: Clip) -> str | Path | Clip:
    """What `dear.load` takes to load a backbone again: its path or its name; itself if it has neither."""
    if clip.source is not None:
        return Path(clip.source)
    return clip.name if clip.name in list_backbones() else clip
