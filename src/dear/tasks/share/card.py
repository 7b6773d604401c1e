"""The model card of a run that is shared: what it is, what was measured, how to use it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dear.runs.evaluation import share_interval
from dear.runs.spec import Spec

MOST_CLASSES = 50  #: named on the card


def model_card(config: Spec, metrics: Mapping[str, Any], name: str) -> str:
    """The card as Markdown with the hub's metadata block; every figure is one that the run's files hold."""
    classes = ", ".join(_plain(each) for each in config.classes[:MOST_CLASSES])
    more = len(config.classes) - MOST_CLASSES
    lines = [
        "---",
        "library_name: dear",
        "pipeline_tag: image-classification",
        "tags: [clip, few-shot, dear]",
        "---",
        "",
        f"# {_plain(name)}",
        "",
        f"`{config.method}` on the frozen backbone `{_plain(config.backbone)}`; dear {config.dear}.",
        "Only what was learned is here; the backbone is loaded by its name.",
        "",
        "## Classes",
        "",
        f"{len(config.classes)}: {classes}{f' and {more} more' if more > 0 else ''}.",
        "",
        "## How it was made",
        "",
        f"- backbone: `{_plain(config.backbone)}`, weights `{config.fingerprint}`",
        f"- training images: {config.images} of {_plain(config.dataset)}",
        f"- template: `{_plain(config.template)}`",
        f"- learned parameters: {metrics.get('trainable_parameters', 0):,}",
        "",
        "## Measured",
        "",
        *_figures(metrics),
        "",
        "## Use",
        "",
        "```",
        f"dear predict hf://{name} photo.jpg",
        "```",
        "",
        "```python",
        "import dear",
        f'dear.Classifier.load("hf://{name}").predict(["photo.jpg"])',
        "```",
        "",
    ]
    return "\n".join(lines)


def _figures(metrics: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, entry in metrics.items():
        accuracy = entry.get("accuracy") if isinstance(entry, Mapping) else None
        if isinstance(accuracy, Mapping):  # by mode, the usual one first
            accuracy = next(iter(accuracy.values()), None)
        images = entry.get("images") if isinstance(entry, Mapping) else None
        if isinstance(accuracy, int | float) and isinstance(images, int) and images > 0:
            low, high = share_interval(round(accuracy * images), images, 0.95)
            lines.append(
                f"- {_plain(name)}: accuracy {accuracy:.1%} of {images} images "
                f"(95% confidence interval {low:.1%} to {high:.1%})"
            )
    return lines or ["- no accuracy was measured on held-out images"]


def _plain(text: str) -> str:
    """Text of a user that cannot change the card's layout."""
    return " ".join(text.replace("`", "'").replace("<", "‹").replace(">", "›").split())
