"""`dear methods`: what can be trained."""

from __future__ import annotations

import typer

from dear.cli.common import Json, print_json

METHODS: dict[str, str] = {
    "zeroshot": "the frozen model; nothing is trained",
    "linear-probe": "a linear classifier on frozen features; seconds, trained classes only",
    "coop": "learned words around the class name",
    "cocoop": "learned words that shift with each image; slow",
    "vpt": "learned tokens in the image tower",
    "maple": "learned tokens in both towers, coupled",
    "promptsrc": "learned tokens in both towers, kept close to the frozen model",
    "prograd": "learned words that may not contradict the frozen model",
    "kgcoop": "learned words kept close to the frozen prompts",
    "tcp": "learned words that depend on the class",
    "clip-adapter": "a small network behind frozen features; fast",
    "tip-adapter": "compares with stored training images; nothing is trained, trained classes only",
    "tip-adapter-f": "the same with stored features that are trained; trained classes only",
    "clip-lora": "low-rank changes of both towers",
    "rpo": "read-only tokens in both towers",
    "mmrl": "representation tokens shared by both towers",
    "mmrlpp": "the same with fewer parameters",
    "dear": "attribute tokens that reach only the heads with their role; the default",
    "purify": "low-rank changes and gates per head, for images from several domains",
    "skip-tuning": "the upper half of both towers, trained in full; many parameters",
    "two-stage": "the norms of both towers first, then a classifier",
    "prolip": "only the projection of the image tower, kept close to the frozen one; fast",
    "lp-plus-plus": "a linear classifier blended with the prompts; seconds, trained classes only",
    "proker": "compares with stored training images by kernel regression; seconds, trained classes only",
}
"""One line per method, for people who choose."""


def methods(as_json: Json = False) -> None:
    """List the methods that `dear adapt --method` takes, one line each.

    Example: `dear methods`
    """
    from dear.methods import list_methods

    found = {name: METHODS.get(name, "") for name in list_methods()}
    if as_json:
        print_json({"methods": found})
        return
    width = max(map(len, found))
    for name, line in found.items():
        typer.echo(f"{name:{width}}  {line}".rstrip())
