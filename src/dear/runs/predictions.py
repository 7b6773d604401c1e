"""`Predictions`: the answers for a list of images, as a table, a notebook, and files show them.

This module needs no PyTorch, so that exported models return the same type.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from dear.errors import InputError
from dear.runs.answer import NONE_OF_THESE, Answer
from dear.utils.text import spreadsheet_safe

if TYPE_CHECKING:
    import pandas as pd

    from dear.utils.files import PathLike


@dataclass(frozen=True)
class Predictions(Sequence[Answer]):
    """Answers for images, in their order; a notebook shows them as a table."""

    answers: tuple[Answer, ...]

    @overload
    def __getitem__(self, index: int) -> Answer: ...

    @overload
    def __getitem__(self, index: slice) -> Predictions: ...

    def __getitem__(self, index: int | slice) -> Answer | Predictions:
        return Predictions(self.answers[index]) if isinstance(index, slice) else self.answers[index]

    def __len__(self) -> int:
        return len(self.answers)

    def __iter__(self) -> Iterator[Answer]:
        return iter(self.answers)

    def __repr__(self) -> str:
        labels = [repr(label) for label in self.labels[:5]] + ["…"] * (len(self) > 5)
        count = "1 image" if len(self) == 1 else f"{len(self)} images"
        return f"<Predictions: {', '.join([count, *labels])}>"

    @property
    def labels(self) -> list[str | None]:
        """The answer of each image: a class, "none of these", or None for an unreadable image."""
        return [answer_label(answer) for answer in self.answers]

    @property
    def errors(self) -> list[str]:
        """Why images could not be read, one message each."""
        return [answer.error for answer in self.answers if answer.error is not None]

    def require_readable(self) -> None:
        """Raise an InputError if none of the images could be read."""
        errors = self.errors
        if errors and len(errors) == len(self):
            raise InputError(
                errors[0] if len(errors) == 1 else f"none of {len(errors)} images can be read: {errors[0]}"
            )

    def rows(self) -> list[dict[str, Any]]:
        """One row per image; all have the same columns.

        `answer` is the class, or "none of these" for a rejected image; `class_1`, `probability_1`, … are the
        likeliest classes of every image that could be read, rejected ones included.
        """
        count = max([1, *(len(answer.classes) for answer in self.answers)])
        rows = []
        for answer in self.answers:
            row: dict[str, Any] = {"image": answer.image, "answer": answer_label(answer)}
            for index in range(count):
                name, value = answer.classes[index] if index < len(answer.classes) else (None, None)
                row[f"class_{index + 1}"], row[f"probability_{index + 1}"] = name, value
            rows.append({**row, "rejected": answer.rejected, "error": answer.error})
        return rows

    def plain(self) -> list[dict[str, Any]]:
        """Plain values for JSON, one object per image."""
        return [
            {
                "image": answer.image,
                "answer": answer_label(answer),
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
            cells = (answer.image, answer_label(answer) or "", answer.error or likeliest)
            rows += "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
        more = f"<p>and {len(self) - 50} more</p>" if len(self) > 50 else ""
        head = "<tr><th>image</th><th>answer</th><th>likeliest classes</th></tr>"
        return f"<table>{head}{rows}</table>{more}"


def answer_label(answer: Answer) -> str | None:
    """The answer in words, several labels with `;` between; None where the image could not be read."""
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
    return spreadsheet_safe(str(value))
