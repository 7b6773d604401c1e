"""Role discovery: from images (or weights alone) and phrases to a role map (section 3.2)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from dear.clip.model import Clip, require_clip
from dear.data.batches import Pixels, count_images, over_pixels
from dear.data.images import ImageSet, is_utf8
from dear.data.inputs import is_frame
from dear.data.unlabeled import open_unlabeled
from dear.errors import RoleError
from dear.heads.concepts import Concepts, check_prototypes, cluster_concepts, fixed_concepts, tagged_concepts
from dear.heads.contributions import check_layers, explained_share, head_maps, head_outputs
from dear.heads.corpus import Corpus, load_corpus
from dear.heads.from_weights import phrase_stability, weight_moments
from dear.heads.information import measure_information
from dear.heads.moments import SAVE_EVERY, Moments, SavedMoments
from dear.heads.names import CORE, PROTOTYPES, Head
from dear.heads.role import Role
from dear.heads.roles import RoleMap
from dear.heads.rules import HeadDescription, assign_roles, check_rule
from dear.heads.sentences import DEFAULT, Embedder, sentence_embedder, unit
from dear.heads.stability import REPLICATES, BlockMoments, bootstrap
from dear.heads.textspan import Spans, textspan_moments
from dear.images.open import ImageLike
from dear.utils.files import PathLike
from dear.utils.progress import Progress, silent

Picked = Mapping[Head, tuple[str, ...]]  #: the phrases that describe each head
_TEXTS_AT_ONCE = 256
SOURCES = ("images", "weights")  #: what roles can be discovered from


@dataclass(frozen=True)
class RoleOptions:
    """Options of role discovery."""

    rule: str = "dominant"  #: "dominant" or "quantile"
    value: float | None = None  #: the rule's threshold, its tau or q; None: 0.35 and 0.20
    layers: Iterable[int] | None = None  #: layers counted from 1; None: the last third (9-12 of 12)
    #: "general", "world", a .txt or .jsonl file, or a `Corpus`. None: "world" for the embedded backbone,
    #: whose text tower knows no other words, else "general"
    corpus: PathLike | Corpus | None = None
    phrases: int | None = None  #: how many phrases describe one head; None: `default_phrases`
    #: "clusters" (HDBSCAN, the paper's way), "fixed" (the twelve named concepts), "tags" (the concepts that
    #: the corpus names), or names with a few sentences each
    concepts: str | Mapping[str, Sequence[str]] = "clusters"
    core: tuple[str, ...] = CORE  #: concepts that get an attribute token
    sentences: str = DEFAULT  #: sentence-transformers model that measures how alike phrases are
    batch_size: int = 64  #: images at once; halved when memory runs out
    unreadable: str = "stop"  #: "stop" at an image that cannot be read, or "skip" it
    #: "images", or "weights": no image is read, heads are described by what they can write
    source: str = "images"
    #: number of times that roles are discovered again on images (or, from weights, phrases) drawn anew
    replicates: int = REPLICATES

    def __post_init__(self) -> None:
        check_rule(self.rule, self.value)
        if isinstance(self.concepts, Mapping):
            check_prototypes(self.concepts)
        elif self.concepts not in ("clusters", "fixed", "tags"):
            raise RoleError(
                f"concepts must be 'clusters', 'fixed', 'tags' or a mapping, got {self.concepts!r}"
            )
        if self.phrases is not None and self.phrases < 1:
            raise RoleError(f"phrases must be at least 1, got {self.phrases}")
        if self.batch_size < 1:
            raise RoleError(f"batch_size must be at least 1, got {self.batch_size}")
        if self.unreadable not in ("stop", "skip"):
            raise RoleError(f"unreadable must be stop or skip, got {self.unreadable!r}")
        if self.source not in SOURCES:
            raise RoleError(f"source must be {' or '.join(SOURCES)}, got {self.source!r}")
        if self.replicates < 0:
            raise RoleError(f"replicates must be at least 0, got {self.replicates}")


def discover_roles(
    clip: Clip,
    images: Pixels | PathLike | Sequence[ImageLike] | None = None,
    options: RoleOptions | None = None,
    *,
    progress: Progress | None = None,
    keep: PathLike | None = None,
    **changes: Any,
) -> RoleMap:
    """Find the role of every head of the last layers.

    Args:
        clip: the backbone.
        images: a folder or table of images, a list of files or Pillow images, an image set, normalized pixels
            [n, 3, S, S], or batches of them; thousands are best. None with `source="weights"`.
        options: see `RoleOptions`; its fields can also be passed by name, as in `rule="quantile"`.
        progress: called in each stage: "phrases", "images", "heads", "concepts", "stability".
        keep: file in which what was measured is kept until the end; the same call after an interruption
            continues from it, to the same roles. Needs images with names (an image set).
        changes: fields of `options`.

    Returns:
        A role map bound to the backbone's weights.

    Raises:
        RoleError: an option does not exist, or there is too little to judge by.
        DearError: the sentence model is missing or cannot be loaded. Both before any image is read.
    """
    require_clip(clip)
    progress = progress or silent
    options = _apply_changes(options or RoleOptions(), changes)
    chosen = clip.config.vision.last_third if options.layers is None else check_layers(clip, options.layers)
    source = default_corpus(clip) if options.corpus is None else options.corpus
    corpus = source if isinstance(source, Corpus) else load_corpus(source)
    if not len(corpus):
        raise RoleError(f"the corpus {corpus.name!r} must have at least one phrase, got none")
    if options.concepts == "tags":
        tagged_concepts(corpus.texts, corpus.tags)  # every phrase must have one
    images = _open_images(images)
    _check_source(options.source, images)
    embed = sentence_embedder(options.sentences) if options.concepts != "tags" else None
    texts, features, dropped = text_features(clip, corpus.texts, progress)
    moments: Moments
    saved, linear_share, skipped = None, None, 0
    if images is None:
        moments = weight_moments(clip, chosen)
    else:
        moments, saved, linear_share, skipped = _read_moments(clip, images, chosen, options, progress, keep)
    progress("heads", 0, None)
    phrases = options.phrases or default_phrases(clip)
    spans = textspan_moments(moments, features, phrases)
    picked = _phrases(spans, texts, chosen)
    progress("concepts", 0, None)
    concepts = _concepts(picked, options.concepts, corpus.tags, embed)
    table, parameters = _roles_of(picked, concepts.concept_of, options)
    progress("stability", 0, None)

    def describe(new: Moments, rows: Sequence[int] = range(len(texts))) -> tuple[Picked, Mapping[str, str]]:
        """Phrases of each head, and their concepts, by other moments or with some of the phrases."""
        new_spans = textspan_moments(new, features[list(rows)], phrases)
        new_phrases = _phrases(new_spans, [texts[row] for row in rows], chosen)
        return new_phrases, _concept_of(new_phrases, concepts, corpus.tags, embed)

    def concepts_of(heads: Picked, concept_of: Mapping[str, str]) -> list[list[str]]:
        return [[concept_of[phrase] for phrase in head] for head in heads.values()]

    stability = information = None
    if isinstance(moments, BlockMoments):
        stability = bootstrap(
            moments, lambda new: _roles_of(*describe(new), options)[0], table, options.replicates
        )
    elif options.replicates:
        stability = phrase_stability(
            lambda rows: _roles_of(*describe(moments, rows), options)[0],
            table,
            len(texts),
            options.replicates,
        )
    if options.replicates:
        information = measure_information(
            concepts_of(picked, concepts.concept_of), moments, lambda new: concepts_of(*describe(new))
        )
    if saved is not None:
        saved.remove()
    name, explained = getattr(images, "name", None), spans.explained.sum(dim=-1)  # [L, H]
    evidence = {
        "source": options.source,
        **({} if images is None else {"image_count": moments.count}),
        **({"unreadable_images": skipped} if skipped else {}),
        "image_source": name if isinstance(name, str) else "",
        "corpus": {"name": corpus.name, "phrases": len(corpus), "indistinct": dropped},
        "phrases_per_head": phrases,
        **({} if stability is None else {"stability": stability.evidence()}),
        **({} if information is None else {"information": structs.asdict(information)}),
        **({} if linear_share is None else {"linear_share": round(linear_share, 4)}),
        "concepts": concepts.summary(),
        "explained": {
            str(layer): [round(part, 4) for part in row]
            for layer, row in zip(chosen, explained.tolist(), strict=True)
        },
        "concept_of": dict(sorted(concepts.concept_of.items())),
    }
    vision = clip.config.vision
    about = (clip.name, clip.fingerprint, vision.layers, options.rule, parameters, options.core)
    return RoleMap(table, vision.heads, *about, evidence, location_of(clip))


def location_of(clip: Clip) -> str | None:
    """The path of a backbone; None where it has none, or it cannot be written as plain text."""
    return clip.source if clip.source and is_utf8(clip.source) and clip.source.isprintable() else None


def _apply_changes(options: RoleOptions, changes: Mapping[str, Any]) -> RoleOptions:
    known = [field.name for field in fields(RoleOptions)]
    unknown = next((name for name in changes if name not in known), None)
    if unknown is not None:
        raise RoleError(f"roles have no option {unknown!r}; there are {', '.join(known)}")
    return replace(options, **changes)


def _open_images(images: Pixels | PathLike | Sequence[ImageLike] | None) -> Pixels | None:
    """Files as an image set; everything else as it is."""
    if isinstance(images, str | os.PathLike):
        return open_unlabeled(images)
    if is_frame(images) or (
        isinstance(images, list | tuple) and not any(isinstance(item, Tensor) for item in images)
    ):
        return open_unlabeled(cast("Sequence[ImageLike]", images))
    return cast("Pixels | None", images)


def _check_source(source: str, images: Pixels | None) -> None:
    """Raise a RoleError unless images are passed exactly if the source needs them."""
    if (images is None) != (source == "weights"):
        remedy = "leave them out" if source == "weights" else 'pass some, or source="weights"'
        raise RoleError(f"source = {source!r} needs {'no ' * (source == 'weights')}images; {remedy}")
    if images is not None:
        _require_two(count_images(images))


def _require_two(images: int | None) -> None:
    if images is not None and images < 2:
        raise RoleError(f"role discovery needs at least two images, got {images}")


def _read_moments(
    clip: Clip,
    images: Pixels,
    layers: tuple[int, ...],
    options: RoleOptions,
    progress: Progress,
    keep: PathLike | None,
) -> tuple[BlockMoments, SavedMoments | None, float | None, int]:
    """Moments of all images, their file, `explained_share` of the first batch, number of images skipped."""
    total, batch = count_images(images), options.batch_size
    moments = BlockMoments(head_maps(clip, layers), layers)
    shares: list[float | None] = []
    saved, start, batches = None, 0, 0
    if keep is not None and isinstance(images, ImageSet):
        saved = SavedMoments(keep, clip, images, layers, batch)
        start = saved.restore(moments)
        saved.save(moments, start)  # fails now, not after the images, if the folder cannot be written
    progress("images", start, total)

    def measure(pixels: Tensor) -> None:
        outputs = head_outputs(clip, pixels, layers).outputs
        if not shares:
            shares.append(explained_share(clip, pixels))
        moments.add(outputs)

    def report(stage: str, done: int, _: int | None) -> None:
        nonlocal batches
        batches += 1
        if saved is not None and batches % SAVE_EVERY == 0:
            saved.save(moments, start + done)
        progress(stage, start + done, total)

    rows = range(start, len(images)) if start and isinstance(images, ImageSet) else None
    over_pixels(images, measure, clip, unreadable=options.unreadable, progress=report, batch=batch, rows=rows)
    if not shares and isinstance(images, ImageSet):  # all was measured before an interruption
        first = range(min(batch, len(images)))
        shares, _ = over_pixels(
            images, lambda pixels: explained_share(clip, pixels), clip,
            unreadable=options.unreadable, batch=batch, rows=first,
        )  # fmt: skip
    _require_two(moments.count)
    skipped = len(images) - moments.count if isinstance(images, ImageSet) else 0
    return moments, saved, shares[0] if shares else None, skipped


def default_phrases(clip: Clip) -> int:
    """The paper's 20 phrases for heads that are 64 wide, in proportion fewer for narrower heads.

    A head's contributions span no more directions than it is wide. Twenty phrases describe the strongest
    third of a head of 64; of a head of 16 they would span everything: the last picks would say nothing, and
    Concept Entropy would measure the corpus.

    >>> from dear.clip.config import ClipConfig
    >>> default_phrases(Clip(ClipConfig.named("ViT-B-32")))
    20
    """
    return max(1, min(20, round(20 * clip.config.vision.head_width / 64)))


def default_corpus(clip: Clip) -> str:
    """The corpus whose words the text tower knows: a reduced vocabulary means the attribute world's."""
    return "general" if clip.text.rows is None else "world"


def text_features(
    clip: Clip, texts: Sequence[str], progress: Progress = silent
) -> tuple[tuple[str, ...], Tensor, int]:
    """The phrases that the text tower can distinguish, their unit features [m, E], and how many it cannot.

    A tower with a reduced vocabulary reads all words it does not know alike; of phrases with the same
    feature only the first stays, or the choice between them would be made by rounding.
    """
    ids = clip.tokenize(texts)
    order = clip.text.eot(ids).argsort(stable=True)  # texts of a length together: batches are cut to theirs
    parts = []
    for rows in order.split(_TEXTS_AT_ONCE):
        parts.append(clip.encode_text(ids[rows]).float())
        progress("phrases", sum(map(len, parts)), len(texts))
    features = torch.nn.functional.normalize(torch.cat(parts)[order.argsort().to(clip.device)], dim=-1)
    keep: list[int] = []
    for start in range(0, len(features), 1024):
        close = features[start : start + 1024] @ features.T > 1 - 1e-6  # [b, m]
        first = close.float().argmax(dim=1)  # the earliest phrase that reads the same, maybe itself
        rows = torch.arange(start, start + len(first), device=first.device)
        keep += rows[first >= rows].tolist()
    return tuple(texts[row] for row in keep), features[keep], len(texts) - len(keep)


def _phrases(spans: Spans, texts: Sequence[str], layers: Sequence[int]) -> Picked:
    """The picked phrases of each head."""
    return {
        (layer, head): tuple(texts[pick] for pick in row if pick >= 0)
        for layer, rows in zip(layers, spans.picks.tolist(), strict=True)
        for head, row in enumerate(rows)
    }


def _concepts(
    picked: Picked,
    way: str | Mapping[str, Sequence[str]],
    tags: Mapping[str, str],
    embed: Embedder | None,
) -> Concepts:
    """The concepts of all picked phrases; `embed` is needed for all ways but the tags."""
    phrases = list(dict.fromkeys(phrase for _, row in sorted(picked.items()) for phrase in row))
    if not phrases:
        raise RoleError("role discovery needs images that differ; no head's output varies over these")
    if embed is None:
        return tagged_concepts(phrases, tags)
    if way == "clusters":
        return cluster_concepts(phrases, embed, tags)
    return fixed_concepts(phrases, embed, way if isinstance(way, Mapping) else PROTOTYPES, tags)


def _roles_of(
    picked: Picked, concept_of: Mapping[str, str], options: RoleOptions
) -> tuple[dict[Head, Role], dict[str, float]]:
    """The roles of heads with these phrases and concepts, and the parameters of the rule."""
    heads = {
        key: HeadDescription.of(phrases, [concept_of[phrase] for phrase in phrases])
        for key, phrases in picked.items()
    }
    return assign_roles(heads, options.rule, options.value, options.core)


def _concept_of(
    picked: Picked, concepts: Concepts, tags: Mapping[str, str], embed: Embedder | None
) -> dict[str, str]:
    """The concept of each picked phrase: as discovered, and for new phrases that of the nearest cluster."""
    concept_of = dict(concepts.concept_of)
    new_phrases = list(
        dict.fromkeys(phrase for phrases in picked.values() for phrase in phrases if phrase not in concept_of)
    )
    if not new_phrases:
        return concept_of
    if embed is None or not concepts.clusters:
        return concept_of | {phrase: tags.get(phrase, "") for phrase in new_phrases}
    centers = np.array([cluster.centroid for cluster in concepts.clusters])  # [k, d]
    nearest = (unit(embed(new_phrases)) @ centers.T).argmax(axis=1)
    return concept_of | {
        phrase: concepts.clusters[index].concept for phrase, index in zip(new_phrases, nearest, strict=True)
    }
