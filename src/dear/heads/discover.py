"""From images and phrases to a role map: the whole pipeline of section 3.2."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dear._io.progress import Progress
from dear.clip.model import Clip
from dear.errors import OutOfMemory, RoleError, ran_out
from dear.heads.batches import Images, batches, count
from dear.heads.concepts import (
    Concepts,
    check_prototypes,
    cluster_concepts,
    fixed_concepts,
    tagged_concepts,
)
from dear.heads.contributions import check_layers, head_maps
from dear.heads.corpus import Corpus, load_corpus
from dear.heads.embed import DEFAULT, Embedder, sentence_embedder, unit
from dear.heads.moments import EVERY, Moments, NamedImages, SavedMoments, moments
from dear.heads.names import CORE, PROTOTYPES
from dear.heads.pooled import LinearShare
from dear.heads.roles import Role, RoleMap
from dear.heads.rules import Measured, assign
from dear.heads.stability import REPLICATES, BlockMoments, bootstrap
from dear.heads.textspan import Spans, textspan_moments

WAYS = ("clusters", "fixed", "tags")  #: how concepts are found
_TEXTS_AT_ONCE = 256


@dataclass(frozen=True)
class RoleOptions:
    """Options of role discovery."""

    rule: str = "dominant"  #: "dominant" or "quantile"
    value: float | None = None  #: the rule's threshold, its tau or q; None: 0.35 and 0.20
    layers: Iterable[int] | None = None  #: layers counted from 1; None: the last third (9-12 of 12)
    #: "general", "world", a .txt or .jsonl file, or a `Corpus`. None: "world" for the embedded backbone,
    #: whose text tower knows no other words, else "general"
    corpus: str | PathLike[str] | Corpus | None = None
    phrases: int | None = None  #: how many phrases describe one head; None: `default_phrases`
    #: "clusters" (HDBSCAN, the paper's way), "fixed" (the twelve named concepts), "tags" (the concepts that
    #: the corpus names), or your own names with a few sentences each
    concepts: str | Mapping[str, Sequence[str]] = "clusters"
    core: tuple[str, ...] = CORE  #: concepts that get an attribute token
    sentences: str = DEFAULT  #: sentence-transformers model that measures how alike phrases are
    batch_size: int = 64  #: images at once
    #: how often roles are found again on images drawn anew, to tell how steady they are
    replicates: int = REPLICATES

    def __post_init__(self) -> None:
        assign({}, self.rule, self.value)
        if isinstance(self.concepts, str) and self.concepts not in WAYS:
            raise RoleError(
                f"concepts = {self.concepts!r} is not a way to find concepts; "
                "use 'clusters', 'fixed' or 'tags'"
            )
        if isinstance(self.concepts, Mapping):
            check_prototypes(self.concepts)
        if self.phrases is not None and self.phrases < 1:
            raise RoleError(f"phrases = {self.phrases}: a head is described by at least one phrase")
        if self.batch_size < 1:
            raise RoleError(f"batch_size = {self.batch_size} must be at least 1")
        if self.replicates < 0:
            raise RoleError(f"replicates = {self.replicates} cannot be negative")


def discover_roles(
    clip: Clip,
    images: Images,
    options: RoleOptions | None = None,
    *,
    progress: Progress | None = None,
    keep: str | PathLike[str] | None = None,
    **changes: Any,
) -> RoleMap:
    """Find the role of every head of the last layers.

    Args:
        clip: the backbone.
        images: an image set, normalized pixels [n, 3, S, S], or batches of them; thousands are best.
        options: see `RoleOptions`; its fields can also be given by name, as in `rule="quantile"`.
        progress: told about each stage: "phrases", "images", "heads", "concepts", "stability".
        keep: file in which what was measured is kept until the end; the same call after an interruption
            continues from it, to the same roles. Needs images with names (an image set).
        changes: fields of `options`.

    Returns:
        A role map bound to the backbone's weights.

    Raises:
        RoleError: an option does not exist, or there is too little to judge by.
        DearError: the sentence model is missing or cannot be loaded. Both before any image is read.
    """
    tell = progress or (lambda stage, done, total: None)
    options = _changed(options or RoleOptions(), changes)
    chosen = clip.config.vision.last_third if options.layers is None else check_layers(clip, options.layers)
    words = _words(clip, options)
    _demand_two(count(images))
    embed = sentence_embedder(options.sentences) if options.concepts != "tags" else None
    texts, features, dropped = text_features(clip, words.texts, tell)
    seen, kept, share = _read(clip, images, chosen, options.batch_size, tell, keep)
    tell("heads", 0, None)
    phrases = options.phrases or default_phrases(clip)
    spans = textspan_moments(seen, features, phrases)
    picked = _phrases(spans, texts, chosen)
    tell("concepts", 0, None)
    found = _concepts(picked, options.concepts, words.tags, embed)
    heads = {key: Measured.of(said, [found.of[phrase] for phrase in said]) for key, said in picked.items()}
    table, parameters = assign(heads, options.rule, options.value, options.core)
    tell("stability", 0, None)

    def again(other: Moments) -> Mapping[tuple[int, int], Role]:
        said = _phrases(textspan_moments(other, features, phrases), texts, chosen)
        return _roles_again(said, _concept_of(said, found, words.tags, embed), options)

    steady = bootstrap(seen, again, table, options.replicates)
    if kept is not None:
        kept.remove()
    evidence = {
        **_evidence_of_inputs(images, seen.count, words, dropped),
        "phrases_per_head": phrases,
        **({} if steady is None else {"stability": steady.evidence()}),
        **({} if share is None else {"linear_share": round(share, 4)}),
        **_evidence(found, spans, chosen),
    }
    return _role_map(clip, options, table, parameters, evidence)


def _role_map(
    clip: Clip,
    options: RoleOptions,
    table: dict[tuple[int, int], Role],
    parameters: dict[str, float],
    evidence: dict[str, Any],
) -> RoleMap:
    return RoleMap(
        table,
        clip.config.vision.heads,
        backbone=clip.name,
        fingerprint=clip.fingerprint,
        depth=clip.config.vision.layers,
        rule=options.rule,
        parameters=parameters,
        core=options.core,
        evidence=evidence,
    )


def _changed(options: RoleOptions, changes: Mapping[str, Any]) -> RoleOptions:
    known = [field.name for field in fields(RoleOptions)]
    unknown = next((name for name in changes if name not in known), None)
    if unknown is not None:
        raise RoleError(f"roles have no option {unknown!r}; there are {', '.join(known)}")
    return replace(options, **changes)


def _demand_two(images: int | None) -> None:
    if images is not None and images < 2:
        raise RoleError(f"roles need at least two images; {images} came")


def _words(clip: Clip, options: RoleOptions) -> Corpus:
    """The corpus; where concepts are its tags, every phrase must have one."""
    corpus = options.corpus
    words = corpus if isinstance(corpus, Corpus) else load_corpus(corpus or default_corpus(clip))
    if options.concepts == "tags":
        tagged_concepts(words.texts, words.tags)
    return words


def _read(
    clip: Clip,
    images: Images,
    layers: tuple[int, ...],
    batch_size: int,
    tell: Progress,
    keep: str | PathLike[str] | None,
) -> tuple[BlockMoments, SavedMoments | None, float | None]:
    """The moments of all images, where they are kept for a second try, and the share of `LinearShare`."""
    total, share, every = count(images), LinearShare(clip), images
    seen = BlockMoments(head_maps(clip, layers), layers)
    kept = None
    if keep is not None and isinstance(images, NamedImages):
        kept = SavedMoments(keep, clip, images, layers, batch_size)
        images = images.subset(range(kept.restore(seen), len(images)))
        kept.save(seen)  # fails now, not after the images, if the folder cannot be written
    tell("images", seen.count, total)
    batch = 0

    def done(done_images: int) -> None:
        nonlocal batch
        batch += 1
        if kept is not None and batch % EVERY == 0:
            kept.save(seen)
        tell("images", done_images, total)

    try:
        moments(clip, share.watch(batches(clip, images, batch_size)), layers, done, seen)
        if share.value is None and clip.visual.pool is not None:  # all was measured before an interruption
            next(share.watch(batches(clip, every, batch_size)), None)
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        raise OutOfMemory(
            f"out of memory with {batch_size} images at once; choose a smaller batch_size", hint="batch"
        ) from error
    _demand_two(seen.count)
    return seen, kept, share.value


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
    clip: Clip, texts: Sequence[str], tell: Progress | None = None
) -> tuple[tuple[str, ...], Tensor, int]:
    """The phrases that the text tower can distinguish, their unit features [m, E], and how many it cannot.

    A tower with a reduced vocabulary reads all words it does not know alike; of phrases with the same
    feature only the first stays, or the choice between them would be made by rounding.
    """
    ids = clip.tokenize(texts)
    order = clip.text.eot(ids).argsort(
        stable=True
    )  # texts of a length together: each batch is cut to its own
    parts = []
    for rows in order.split(_TEXTS_AT_ONCE):
        parts.append(clip.encode_text(ids[rows]).float())
        if tell is not None:
            tell("phrases", sum(map(len, parts)), len(texts))
    features = torch.nn.functional.normalize(torch.cat(parts)[order.argsort().to(clip.device)], dim=-1)
    keep: list[int] = []
    for start in range(0, len(features), 1024):
        close = features[start : start + 1024] @ features.T > 1 - 1e-6  # [b, m]
        first = close.float().argmax(dim=1)  # the earliest phrase that reads the same, maybe itself
        rows = torch.arange(start, start + len(first), device=first.device)
        keep += rows[first >= rows].tolist()
    return tuple(texts[row] for row in keep), features[keep], len(texts) - len(keep)


def _phrases(
    spans: Spans, texts: Sequence[str], layers: Sequence[int]
) -> dict[tuple[int, int], tuple[str, ...]]:
    """The picked phrases of each (layer, head)."""
    return {
        (layer, head): tuple(texts[pick] for pick in row.tolist() if pick >= 0)
        for place, layer in enumerate(layers)
        for head, row in enumerate(spans.picks[place])
    }


def _evidence_of_inputs(images: Images, count: int, words: Corpus, dropped: int) -> dict[str, Any]:
    """What the roles were found with: images and corpus."""
    name = getattr(images, "name", None)
    return {
        "image_count": count,
        "image_source": name if isinstance(name, str) else "",
        "corpus": {"name": words.name, "phrases": len(words), "indistinct": dropped},
    }


def _evidence(found: Concepts, spans: Spans, layers: Sequence[int]) -> dict[str, Any]:
    """What is kept of the concepts and of how well phrases explain heads."""
    return {
        "concepts": found.summary(),
        "explained": _explained(spans, layers),
        "concept_of": dict(sorted(found.of.items())),
    }


def _explained(spans: Spans, layers: Sequence[int]) -> dict[str, list[float]]:
    """Share of each head's variance that its phrases explain, one list per layer."""
    total = spans.explained.sum(dim=-1)  # [L, H]
    return {
        str(layer): [round(share, 4) for share in total[place].tolist()] for place, layer in enumerate(layers)
    }


def _concepts(
    picked: Mapping[tuple[int, int], tuple[str, ...]],
    way: str | Mapping[str, Sequence[str]],
    tags: Mapping[str, str],
    embed: Embedder | None,
) -> Concepts:
    """The concepts of all picked phrases, by the asked way; `embed` is needed for all but the tags."""
    different = list(dict.fromkeys(phrase for _, said in sorted(picked.items()) for phrase in said))
    if not different:
        raise RoleError("no head's output varies over these images; give images that differ")
    if embed is None:
        return tagged_concepts(different, tags)
    if isinstance(way, Mapping) or way == "fixed":
        return fixed_concepts(different, embed, way if isinstance(way, Mapping) else PROTOTYPES, tags)
    return cluster_concepts(different, embed, tags)


def _roles_again(
    picked: Mapping[tuple[int, int], tuple[str, ...]], of: Mapping[str, str], options: RoleOptions
) -> Mapping[tuple[int, int], Role]:
    """The roles that picked phrases with known concepts give."""
    heads = {key: Measured.of(said, [of[phrase] for phrase in said]) for key, said in picked.items()}
    return assign(heads, options.rule, options.value, options.core)[0]


def _concept_of(
    picked: Mapping[tuple[int, int], tuple[str, ...]],
    found: Concepts,
    tags: Mapping[str, str],
    embed: Embedder | None,
) -> dict[str, str]:
    """The concept of each picked phrase: as it was found, and for new phrases that of the nearest cluster."""
    of = dict(found.of)
    fresh = list(dict.fromkeys(phrase for said in picked.values() for phrase in said if phrase not in of))
    if not fresh:
        return of
    if embed is None or not found.clusters:
        return of | {phrase: tags.get(phrase, "") for phrase in fresh}
    centers = np.array([cluster.centroid for cluster in found.clusters])  # [k, d]
    nearest = (unit(embed(fresh)) @ centers.T).argmax(axis=1)
    return of | {
        phrase: found.clusters[int(place)].concept for phrase, place in zip(fresh, nearest, strict=True)
    }
