"""Answers for images: `dear predict`, `dear.predict`, and `dear.zeroshot` with class names.

An exported model answers without PyTorch, so modules that import it are imported where a run needs them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from dear.errors import InputError, UsageError
from dear.images.names import find_images
from dear.runs.answer import Answer, share_of_rejected
from dear.runs.predictions import Predictions
from dear.utils.progress import Progress

if TYPE_CHECKING:
    from dear.clip.model import Clip
    from dear.data.batches import Images
    from dear.runs.model import Run
    from dear.utils.files import PathLike


@runtime_checkable
class Exported(Protocol):
    """A model without PyTorch that answers image files, such as `dear.export.runtime.OnnxModel`."""

    def preprocess(self, image: Any) -> Any:
        """An image to normalized pixels."""

    def predict(
        self,
        images: Any,
        top: int = 5,
        mode: str | None = None,
        reject: float | None = None,
        certain: float | None = None,
    ) -> list[Answer]:
        """The likeliest classes of each image."""


def predict(
    run: Run | Exported,
    images: Images | str | os.PathLike[str],
    *,
    classes: str | Sequence[str] | None = None,
    template: str | None = None,
    reject: bool | float = False,
    reject_share: float = 0.05,
    certain: float | None = None,
    top: int = 5,
    together: bool = False,
    mode: str | None = None,
    backbone: PathLike | Clip | None = None,
    device: str = "auto",
    unreadable: str = "skip",
    csv: PathLike | None = None,
    jsonl: PathLike | None = None,
    progress: Progress | None = None,
) -> Predictions:
    """The likeliest classes of each image, with probabilities.

    Args:
        run: run folder, archive, `hf://owner/name`, model, method, or an exported model.
        images: an image, a folder, a pattern, or a list of them; Pillow images and arrays in a list; an
            image set.
        classes: other classes than the trained ones, as names or as a text with commas; a `+` before any
            name adds all of them to the trained ones.
        template: prompt with `{}`; None: the one the run was trained with.
        reject: answer images that belong to none of the classes with "none of these"; a number is the share
            of images of known classes that may be rejected.
        reject_share: that share, where `reject` is True.
        certain: of a run with a tree of classes: the probability that the answered node has at least; None:
            0.8. The answer is the deepest such node: a class, or a node above it.
        top: classes per image.
        together: let the images help each other (`dear.tasks.together`): the answer of an image depends on
            the others. For the trained classes of a calibrated run.
        mode: way to predict ("fused", "decoupled"); None: the method's usual one.
        backbone: for a run whose backbone moved.
        device: "auto", "cpu", "cuda", …
        unreadable: "skip" answers an image that cannot be read with an error, "stop" raises.
        csv: file to write as a table.
        jsonl: file to write as one JSON object per line.
        progress: called with ("images", images done, images in all).

    Raises:
        InputError: none of the images can be read.
        DearError: anything else a user can correct.

    Example:
        >>> predictions = predict("run", "photos/", top=3)     # doctest: +SKIP
        >>> predictions.to_frame()                             # doctest: +SKIP
    """
    _check_options(top, unreadable)
    if csv is not None or jsonl is not None:
        from dear.utils.files import check_output

        check_output(csv)
        check_output(jsonl)
    share = share_of_rejected(reject or None, reject_share)
    if together and not isinstance(run, Exported):
        from dear.tasks.load import load_model

        run = load_model(run, backbone, device)
        if run.method.several:
            raise UsageError("together: needs one label per image, but this run has several; leave it out")
        if run.tree is not None and share is not None:
            raise UsageError("together: a run with a tree rejects no images; leave reject out")
    if together and (classes is not None or template is not None or isinstance(run, Exported)):
        raise UsageError(
            "together answers with the trained classes of a run; leave classes, template and onnx out"
        )
    if isinstance(run, Exported):
        check_exported(classes=classes, template=template, backbone=backbone)
        settings = {"top": top, "mode": mode, "reject": share, "certain": certain}
        answers = _predict_exported(run, _files(images), settings, unreadable)
    else:
        from dear.data.inputs import find_inputs
        from dear.tasks.load import load_model

        if not isinstance(run, str | os.PathLike):
            run = load_model(run, backbone, device)  # refuses another type before images are read
        inputs = find_inputs(images)
        model = load_model(run, backbone, device)
        answers = model.answers(
            inputs,
            classes=None if classes is None else model.parse_classes(classes),
            template=template,
            reject=share,
            certain=certain,
            top=top,
            mode=mode,
            unreadable=unreadable,
            progress=progress,
        )
        if together:
            from dear.tasks.together import answer_together

            answers = answer_together(model, inputs, answers, top, mode, certain)
    predictions = Predictions(tuple(answers))
    predictions.require_readable()
    if csv is not None:
        predictions.write_csv(csv)
    if jsonl is not None:
        predictions.write_jsonl(jsonl)
    return predictions


def _files(images: Any) -> list[str]:
    names = [images] if isinstance(images, str | os.PathLike) else list(images)
    if not all(isinstance(name, str | os.PathLike) for name in names):
        raise UsageError("an exported model answers image files; name files or folders")
    return find_images([os.fspath(name) for name in names])


def _check_options(top: int, unreadable: str) -> None:
    if top < 1:
        raise UsageError(f"top must be at least 1, got {top}")
    if unreadable not in ("skip", "stop"):
        raise UsageError(f"unreadable must be skip or stop, got {unreadable!r}")


def check_exported(*, top: int = 5, unreadable: str = "skip", **settings: object) -> None:
    """Reject settings without effect on an exported model, whose classes and prompts are fixed.

    Raises:
        UsageError: names the setting.
    """
    _check_options(top, unreadable)
    name = next((name for name, value in settings.items() if value is not None), None)
    if name is not None:
        raise UsageError(f"{name}: an exported model has fixed classes and weights; use the run folder")


def _predict_exported(
    model: Exported, files: Sequence[str], settings: Mapping[str, Any], unreadable: str
) -> list[Answer]:
    answers = []
    for path in files:
        try:
            answers += model.predict([path], **settings)
        except InputError as error:
            if unreadable == "stop":
                raise
            answers.append(Answer(path, (), str(error)))
    return answers
