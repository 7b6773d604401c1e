"""Role maps of a backbone: discover one (`dear roles discover`), and write its page (`dear roles report`)."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dear.clip.model import Clip
from dear.data.images import ImageSet
from dear.data.open import default_split, open_data
from dear.errors import DataError, DearError, InputError, Interrupted, UsageError
from dear.heads.discover import discover_roles
from dear.heads.known_roles import TABLE2, read_roles
from dear.heads.moments import resume_path
from dear.heads.roles import RoleMap
from dear.heads.sentences import DEFAULT
from dear.tasks.load import load_backbone
from dear.tasks.roles.evidence import measure_heads
from dear.tasks.roles.page import write_roles_page
from dear.utils.files import PathLike, check_output
from dear.utils.progress import Progress, silent


def discover(
    images: PathLike | ImageSet | None = None,
    out: PathLike = "roles.json",
    *,
    backbone: PathLike | Clip = "mini",
    data_root: PathLike | None = None,
    split: str | None = None,
    source: str = "images",
    rule: str = "dominant",
    value: float | None = None,
    layers: str | Iterable[int] | None = None,
    corpus: PathLike | None = None,
    phrases: int | None = None,
    concepts: str = "clusters",
    sentences: str | None = None,
    batch: int = 64,
    unreadable: str = "stop",
    device: str = "auto",
    progress: Progress = silent,
) -> RoleMap:
    """Find the role of every head of the last layers, and write the role map.

    After an interruption the same call continues where it was.

    Args:
        images: what `open_data` takes, or an image set; labels are not used. None with `source="weights"`.
        out: the role map to write.
        backbone: what `load` takes, or a loaded backbone.
        data_root: folder of the benchmarks, for the name of a benchmark.
        split: of the images; None: "train", or all of a folder that is a split itself.
        source: "images" or "weights".
        rule: "dominant", "quantile", or "table2" for the paper's map.
        value: the rule's tau (dominant) or q (quantile).
        layers: layers from 1, as numbers or as "9-12" or "9,11"; None: the last third.
        corpus: "general", "world", or a .txt or .jsonl file of phrases.
        phrases: phrases that describe a head.
        concepts: "clusters", "fixed" or "tags".
        sentences: a sentence-transformers model or folder.
        batch: images at once.
        unreadable: "stop" refuses images that cannot be read, "skip" leaves them out.
        device: "auto", "cpu", "cuda", …
        progress: called with (stage, done, total).

    Raises:
        Interrupted: Ctrl-C was pressed.
        DearError: anything a user can correct.
    """
    check_output(out)
    if rule == TABLE2:
        unused = {
            **{"images": images, "value": value, "layers": layers},
            **{"corpus": corpus, "phrases": phrases, "sentences": sentences},
        }
        name = next((name for name, each in unused.items() if each is not None), None)
        if name is not None:
            raise UsageError(f"rule table2 is the paper's own map and takes no {name}; leave it out")
        role_map = read_roles(TABLE2)
        role_map.save(out)
        return role_map
    if images is None and source == "images":
        raise UsageError(f"rule {rule} needs images to judge heads by, or source weights", hint="role-images")
    numbers = parse_layers(layers) if isinstance(layers, str) else layers
    if images is not None and not isinstance(images, ImageSet):
        images = open_data(images, split or default_split(str(images), "train"), root=data_root)
    clip = load_backbone(backbone, device)
    partial = resume_path(out)
    try:
        role_map = discover_roles(
            clip,
            images,
            source=source,
            rule=rule,
            value=value,
            layers=numbers,
            corpus=corpus,
            phrases=phrases,
            concepts=concepts,
            batch_size=batch,
            unreadable=unreadable,
            sentences=sentences or DEFAULT,
            progress=progress,
            keep=partial,
        )
    except KeyboardInterrupt:
        more = "; the same command continues" if partial.exists() else ""
        raise Interrupted(f"interrupted{more}") from None
    except (DataError, InputError):
        partial.unlink(missing_ok=True)  # of other images than those without the damaged ones
        raise
    role_map.save(out)
    return role_map


def report(
    file: PathLike,
    out: PathLike = "roles.html",
    *,
    images: PathLike | ImageSet | None = None,
    backbone: PathLike | Clip | None = None,
    data_root: PathLike | None = None,
    limit: int = 1000,
    allow_other_roles: bool = False,
    device: str = "auto",
    progress: Progress = silent,
) -> Path:
    """Write one page about the heads; with images it shows what activates each head and where it looks.

    Args:
        file: a role map, or "table2".
        out: the page to write.
        images: what `open_data` takes (its test split), or an image set; None: the map alone is shown.
        backbone: what `load` takes; None: the backbone that the map names.
        data_root: folder of the benchmarks, for the name of a benchmark.
        limit: images at most.
        allow_other_roles: accept a role map that was made on other weights.
        device: "auto", "cpu", "cuda", …
        progress: called with (stage, done, total).

    Returns:
        The page.

    Raises:
        RoleError: the map was made on other weights.
        DearError: anything else a user can correct.
    """
    check_output(out)
    roles, clip = read_roles(file), None
    if images is not None:
        if not isinstance(images, ImageSet):
            images = open_data(images, default_split(str(images), "test"), root=data_root)
        clip = _backbone_of(roles, file, device) if backbone is None else load_backbone(backbone, device)
    evidence = measure_heads(
        roles, clip, images, limit=limit, allow_other=allow_other_roles, progress=progress
    )
    named = backbone.source if isinstance(backbone, Clip) else backbone
    name = shlex.quote(str(named or roles.backbone_source() or "BACKBONE"))
    adapt = f"dear adapt --data photos/ --backbone {name} --roles {file} --out run"
    again = f"dear roles report {file} --backbone {name} --images photos/ --out {out}"
    steps = {
        "Adapt the backbone to your own images with this map:": adapt,
        "Measure what its kinds of heads are worth on a labeled set:": again,
    }
    write_roles_page(roles, out, evidence, steps)
    return Path(out)


def _backbone_of(roles: RoleMap, file: PathLike, device: str) -> Clip:
    """The backbone that a map was made on."""
    if not roles.backbone:
        raise UsageError(f"{file}: names no backbone", hint="backbone")
    try:
        return load_backbone(roles.backbone_source(), device)
    except DearError:
        place = roles.location or roles.backbone
        raise UsageError(f"{file}: its backbone {place!r} cannot be loaded", hint="backbone") from None


def parse_layers(text: str) -> list[int]:
    """Layers as numbers.

    >>> parse_layers("9-11"), parse_layers("9,11")
    ([9, 10, 11], [9, 11])
    """
    result: list[int] = []
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1)
            if not 0 < len(numbers) <= 1000:
                raise ValueError
            result += numbers
    except ValueError:
        raise UsageError(f"layers must be written as 9-12 or 9,11, got {text!r}") from None
    return result


def role_report(roles: RoleMap) -> dict[str, Any]:
    """A role map as plain values for JSON."""
    heads = [
        {
            "layer": layer,
            "head": head,
            "kind": role.kind,
            "concept": role.concept,
            "entropy": role.entropy,
            "phrases": role.phrases,
        }
        for (layer, head), role in roles
    ]
    return {"backbone": roles.backbone, "rule": roles.rule, "counts": roles.counts(), "heads": heads}
