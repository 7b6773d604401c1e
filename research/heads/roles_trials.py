"""Other ways to find roles on `mini`, judged where the truth is known and never chosen by it.

    python research/heads/roles_trials.py --out research/results/roles_trials.csv

The roles that ship are those of TEXTSPAN: five phrases per head, each counted once. Tried here: another
number of phrases; phrases counted by the variance they explain; shares divided by the concept's share of the
corpus; as many phrases of every concept in the corpus; and no phrases at all, but the share of a head's
variance in the span of a concept's phrases (the directions that hold 80, 90 or 95 % of their variance).
Figures: heads named; heads whose concept is the one that explains most of them in `head_truth.json`; the same
for Text, Shape and the heads called core (among core concepts); and accuracy in the worst group of a logistic
regression when a planted shortcut (correlation 1) is removed by the heads of its concept, with their number.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from measure.script import arguments, record
from measure.world import backbone, draw_of, probe, rows, scored, seen
from torch import Tensor

from dear import world
from dear.clip.factory import EMBEDDED
from dear.data.world_images import world_task
from dear.heads.corpus import load_corpus
from dear.heads.discover import text_features
from dear.heads.moments import Moments, compute_moments
from dear.heads.names import CORE
from dear.heads.textspan import textspan_moments
from dear.shortcuts.removal import remove_heads
from dear.tasks.mini.measure import batches
from dear.world.shortcuts import KINDS

Key = tuple[int, int]
Shares = dict[Key, dict[str, float]]
LAYERS, TAU = (9, 10, 11, 12), 0.35
REPAIRED = ("place", "color", "texture", "text")


def by_phrases(
    seen_by_heads: Moments, features: Tensor, tags: list[str], count: int, explained: bool, by_corpus: bool
) -> Shares:
    """Shares of concepts among the phrases that TEXTSPAN picks for each head."""
    spans, written = textspan_moments(seen_by_heads, features, count), Counter(tags)
    shares_of: Shares = {}
    for place, layer in enumerate(LAYERS):
        for head, picks in enumerate(spans.picks[place].tolist()):
            head_shares = shares_of.setdefault((layer, head), {})
            for pick, share in zip(picks, spans.explained[place, head].tolist(), strict=True):
                if pick >= 0:
                    weight = (share if explained else 1.0) / (written[tags[pick]] if by_corpus else 1)
                    head_shares[tags[pick]] = head_shares.get(tags[pick], 0.0) + weight
    return shares_of


def by_span(seen_by_heads: Moments, features: Tensor, tags: list[str], energy: float) -> Shares:
    """Share of each head's variance in the span of each concept's phrases."""
    mean = seen_by_heads.total.double() / seen_by_heads.count
    inner = seen_by_heads.square.double() / seen_by_heads.count - mean[..., :, None] * mean[..., None, :]
    maps = seen_by_heads.maps.double()
    covariance = maps.transpose(-1, -2) @ inner @ maps  # [L, H, E, E]
    whole = covariance.diagonal(dim1=-2, dim2=-1).sum(-1)
    shares_of: Shares = {(layer, head): {} for layer in LAYERS for head in range(maps.shape[1])}
    for concept in sorted(set(tags)):
        phrases = features[torch.tensor([tag == concept for tag in tags])].double()
        _, lengths, axes = torch.linalg.svd(phrases - phrases.mean(dim=0), full_matrices=False)
        inside = (lengths**2).cumsum(0) / (lengths**2).sum()
        basis = axes[: int((inside < energy).sum()) + 1]
        share = torch.einsum("ke,lhef,kf->lh", basis, covariance, basis) / whole
        for layer, head in shares_of:
            shares_of[layer, head][concept] = float(share[LAYERS.index(layer), head])
    return shares_of


def trials(seen_by_heads: Moments, features: Tensor, tags: list[str]) -> Iterator[tuple[str, dict[Key, str]]]:
    """(what was tried, concept of each head that has one)."""
    for count in (3, 5, 8, 10):
        for explained in (False, True):
            for by_corpus in (False, True):
                shares = by_phrases(seen_by_heads, features, tags, count, explained, by_corpus)
                words = [f"{count} phrases", *["by variance"] * explained, *["by corpus share"] * by_corpus]
                yield ", ".join(words), named(shares, TAU)
    for seed in (1, 2):
        rng, keep = random.Random(seed), []
        for concept in sorted(set(tags)):
            rows_of_concept = [row for row, tag in enumerate(tags) if tag == concept]
            keep += rng.sample(rows_of_concept, min(24, len(rows_of_concept)))
        shares = by_phrases(seen_by_heads, features[keep], [tags[row] for row in keep], 5, False, False)
        yield f"5 phrases, at most 24 per concept in the corpus (draw {seed})", named(shares, TAU)
    for energy in (0.8, 0.9, 0.95):
        yield f"span of {energy:.0%}", named(by_span(seen_by_heads, features, tags, energy), 0)


def named(shares: Shares, tau: float) -> dict[Key, str]:
    """The leading concept of heads in which it reaches tau."""
    concepts = {}
    for key, head_shares in shares.items():
        concept = max(head_shares, key=head_shares.__getitem__)
        if head_shares[concept] >= tau * sum(head_shares.values()) - 1e-6:
            concepts[key] = concept
    return concepts


def agreement(concepts: Mapping[Key, str], truth: Mapping[Key, Mapping[str, float]]) -> dict[str, object]:
    """How far the concepts are those that explain most."""
    lead = {key: max(head_shares, key=head_shares.__getitem__) for key, head_shares in truth.items()}
    core_lead = {key: max(CORE, key=head_shares.__getitem__) for key, head_shares in truth.items()}
    core = [key for key, concept in concepts.items() if concept in CORE]
    row: dict[str, object] = {
        "named": len(concepts),
        "right": sum(lead[key] == concept for key, concept in concepts.items()),
        "core": len(core),
        "core_right": sum(core_lead[key] == concepts[key] for key in core),
    }
    for concept in ("Text", "Shape"):
        called = [key for key, name in concepts.items() if name == concept]
        row[concept.lower()] = len(called)
        row[f"{concept.lower()}_right"] = sum(lead[key] == concept for key in called)
    return row


def repaired(concepts: Mapping[Key, str]) -> dict[str, object]:
    """Worst group without the heads of each planted concept; empty where there are none."""
    row: dict[str, object] = {}
    for kind in REPAIRED:
        name = f"shortcut-{kind}@1"
        heads = [key for key, concept in concepts.items() if concept == KINDS[kind].concept]
        row[f"{kind}_heads"], row[f"{kind}_worst"] = len(heads), ""
        if heads:
            drawn, places = draw_of(name, 1)
            learn, test, images = (
                rows(seen(name, "train"), places),
                seen(name, "test"),
                world_task(name, "test"),
            )
            repair = remove_heads(learn, heads, kind)
            weight, bias = probe(repair.apply(learn), drawn.labels)
            answers = (F.normalize(repair.apply(test), dim=-1) @ weight.T + bias).argmax(dim=1)
            row[f"{kind}_worst"] = round(scored(answers, images.labels, images.groups or ())[1], 4)
    return row


def main() -> None:
    args = arguments(__doc__, images=2500, out=Path)
    torch.set_num_threads(1)
    clip, corpus = backbone(), load_corpus("world")
    texts, features, _ = text_features(clip, corpus.texts)
    tags = [corpus.tags[text] for text in texts]
    table = json.loads((EMBEDDED / "mini" / "head_truth.json").read_text())["heads"]
    truth = {(row["layer"], row["head"]): row["explained"] for row in table}
    scenes = world.sample(args.images, torch.Generator().manual_seed(1))
    seen_by_heads = compute_moments(clip, batches(clip, scenes), LAYERS)
    for trial, concepts in trials(seen_by_heads, features, tags):
        row = {"trial": trial, **agreement(concepts, truth), **repaired(concepts)}
        record(args.out, [row], machine_last=True)


if __name__ == "__main__":
    main()
