"""`dear backbones`: what can be loaded."""

from __future__ import annotations

from dear.cli import options as opt
from dear.cli.printing import echo, print_json, say


def backbones(as_json: opt.Json = False) -> None:
    """List the backbones known by name; --backbone also takes a folder or a checkpoint file.

    The ImageNet column is zero-shot accuracy in percent as published, not measured here; a star marks the
    best of its size. Weights under a non-commercial license are marked.

    Example: `dear backbones`
    """
    import msgspec

    from dear.clip.backbones import backbones as known
    from dear.clip.backbones import best_per_cost
    from dear.clip.factory import list_embedded

    if as_json:
        described = {name: msgspec.to_builtins(entry) for name, entry in known().items()}
        print_json({"backbones": [*list_embedded(), *described], "described": described})
        return
    best = set(best_per_cost())
    rows = [("name", "ImageNet", "px", "architecture", "trained on", "license")]
    rows += [(name, "", "", "comes with dear", "the attribute world", "MIT") for name in list_embedded()]
    for name, entry in known().items():
        accuracy = "" if entry.imagenet is None else f"{entry.imagenet:.1f}{'*' if name in best else ' '}"
        terms = entry.license if entry.commercial else f"{entry.license} (non-commercial)"
        rows.append((name, accuracy, str(entry.image_size), entry.shape, entry.trained_on, terms))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    say(
        "ImageNet: zero-shot accuracy in percent as published; * is the best of its size. "
        "Check a license on the model's own page."
    )
