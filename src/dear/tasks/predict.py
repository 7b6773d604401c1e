"""Answers for images: `dear predict`, `dear.predict`, and `dear.zeroshot` with class names.

An exported model answers without PyTorch, so modules that import it are imported where a run needs them.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, overload, runtime_checkable

from dear.errors import InputError, UsageError
from dear.images.names import find_images
from dear.runs.answer import NONE_OF_THESE, Answer
from dear.utils.progress import Progress

if TYPE_CHECKING:
    import pandas as pd

    from dear.clip.model import Clip
    from dear.data.batches import Images
    from dear.runs.model import Run
    from dear.utils.files import PathLike

#: Spreadsheets run a cell that starts with one of these as a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


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


@dataclass(frozen=True)
class Predictions(Sequence[Answer]):
    """Answers for images, in their order; a notebook shows them as a table."""

    answers: tuple[Answer, ...]

    @overload
    def __getitem__(self, place: int) -> Answer: ...

    @overload
    def __getitem__(self, place: slice) -> Predictions: ...

    def __getitem__(self, place: int | slice) -> Answer | Predictions:
        return Predictions(self.answers[place]) if isinstance(place, slice) else self.answers[place]

    def __len__(self) -> int:
        return len(self.answers)

    def __iter__(self) -> Iterator[Answer]:
        return iter(self.answers)

    def __repr__(self) -> str:
        shown = ", ".join(repr(label) for label in self.labels[:5]) + (", …" if len(self) > 5 else "")
        return f"<Predictions: {len(self)} images, {shown}>"

    @property
    def labels(self) -> list[str | None]:
        """The answer of each image: a class, "none of these", or None for an unreadable image."""
        return [_label(answer) for answer in self.answers]

    @property
    def errors(self) -> list[str]:
        """Why images could not be read, one message each."""
        return [answer.error for answer in self.answers if answer.error is not None]

    def rows(self) -> list[dict[str, Any]]:
        """One row per image; all have the same columns.

        `answer` is the class, or "none of these" for a rejected image; `class_1`, `probability_1`, … are the
        likeliest classes of every image that could be read, rejected ones included.
        """
        count = max([1, *(len(answer.classes) for answer in self.answers)])
        rows = []
        for answer in self.answers:
            row: dict[str, Any] = {"image": answer.image, "answer": _label(answer)}
            for place in range(count):
                name, value = answer.classes[place] if place < len(answer.classes) else (None, None)
                row[f"class_{place + 1}"], row[f"probability_{place + 1}"] = name, value
            rows.append({**row, "rejected": answer.rejected, "error": answer.error})
        return rows

    def plain(self) -> list[dict[str, Any]]:
        """Plain values for JSON, one object per image."""
        return [
            {
                "image": answer.image,
                "answer": _label(answer),
                "classes": [{"name": name, "probability": value} for name, value in answer.classes],
                "rejected": answer.rejected,  # null: rejection is off
                **(
                    {}
                    if answer.node is None
                    else {"node": {"name": answer.node[0], "probability": answer.node[1]}}
                ),
                **({} if answer.labels is None else {"labels": list(answer.labels)}),
                "error": answer.error,
            }
            for answer in self.answers
        ]

    def to_frame(self) -> pd.DataFrame:
        """The rows as a pandas table."""
        import pandas as pd

        return pd.DataFrame(self.rows())

    def write_csv(self, path: PathLike) -> None:
        """Write one row per image.

        A text that a spreadsheet would run as a formula gets an apostrophe before it; line breaks in file
        names are quoted as CSV has it.
        """
        from dear.utils.files import write_atomic

        rows = self.rows()
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(rows[0] if rows else ("image", "answer", "rejected", "error"))
        for row in rows:
            table.writerow([_cell(value) for value in row.values()])
        write_atomic(Path(path), text.getvalue())

    def write_jsonl(self, path: PathLike) -> None:
        """Write one JSON object per image and line."""
        from dear.utils.files import write_atomic

        lines = "".join(json.dumps(row, allow_nan=False) + "\n" for row in self.plain())
        write_atomic(Path(path), lines)

    def _repr_html_(self) -> str:
        rows = ""
        for answer in self.answers[:50]:
            likeliest = ", ".join(f"{name} {value:.1%}" for name, value in answer.classes[:3])
            cells = (answer.image, _label(answer) or "", answer.error or likeliest)
            rows += "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
        more = f"<p>and {len(self) - 50} more</p>" if len(self) > 50 else ""
        head = "<tr><th>image</th><th>answer</th><th>likeliest classes</th></tr>"
        return f"<table>{head}{rows}</table>{more}"


def _label(answer: Answer) -> str | None:
    if answer.rejected:
        return NONE_OF_THESE
    if answer.labels is not None:
        return ";".join(answer.labels) or NONE_OF_THESE
    if answer.node is not None:
        return answer.node[0]
    return answer.classes[0][0] if answer.classes else None


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6f}"
    text = str(value)
    return f"'{text}" if text.startswith(_FORMULA) else text


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
    share = reject_share if reject is True else float(reject) if reject else None
    if together and not isinstance(run, Exported):
        from dear.tasks.load import load_model as load_together

        run = load_together(run, backbone, device)
        if run.method.several:
            raise UsageError("together: needs one label per image, but this run has several; leave it out")
    if together and (classes is not None or template is not None or isinstance(run, Exported)):
        raise UsageError(
            "together answers with the trained classes of a run; leave classes, template and onnx out"
        )
    if isinstance(run, Exported):
        check_exported(classes=classes, template=template, backbone=backbone)
        settings = {"top": top, "mode": mode, "reject": share, "certain": certain}
        answers = _predict_exported(run, _files(images), settings, unreadable)
    else:
        from dear.runs.class_lists import resolve_classes, split_class_list
        from dear.tasks.load import load_model

        pictures = _images(images)
        model = load_model(run, backbone, device)
        if classes is not None:
            names = split_class_list(classes) if isinstance(classes, str) else classes
            classes = resolve_classes(names, model.classes)
        answers = model.answers(
            pictures,
            classes=classes,
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

            answers = answer_together(model, pictures, answers, top, mode)
    predictions = Predictions(tuple(answers))
    errors = predictions.errors
    if errors and len(errors) == len(predictions):
        raise InputError(
            errors[0] if len(errors) == 1 else f"none of {len(errors)} images can be read: {errors[0]}"
        )
    if csv is not None:
        predictions.write_csv(csv)
    if jsonl is not None:
        predictions.write_jsonl(jsonl)
    return predictions


def _images(images: Images | str | os.PathLike[str]) -> Images:
    """Images to answer: files for a path, a folder or a pattern; images in memory as they are."""
    from dear.data.images import ImageSet
    from dear.data.inputs import as_images

    if isinstance(images, ImageSet):
        return images
    if isinstance(images, str | os.PathLike):
        return find_images([os.fspath(images)])
    items = as_images(images)
    if all(isinstance(item, str | os.PathLike) for item in items):
        return find_images([os.fspath(item) for item in items])  # type: ignore[arg-type]
    return items


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
