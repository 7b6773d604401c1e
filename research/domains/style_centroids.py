"""Unseen domains without training: style centroids subtracted, and the most that gates can gain.

    python research/domains/style_centroids.py --data world:domains --out style_centroids.csv
    python research/domains/style_centroids.py --backbone SMALL --data pacs/index.csv --out …

Each domain is left out once, as in `dear bench leave-one-domain-out`; the same source images, frozen
features.

- `zero-shot`, `probe` (ridge regression on features): as they are.
- `sources`: the style centroid of each source domain (its mean feature) is subtracted from images of that
  domain; an image of the unseen domain loses the mean of the source centroids, weighted by softmax(10
  cosine), which is the idea of SHED (arXiv 2605.16973) without its training and its texts for domains.
  Texts lose their mean.
- `target`: the same, but the unseen domain loses its own mean, which needs its images (without labels).
- `span`: the directions between source centroids are projected out of every feature.
- `heads`: heads of the last third are mean-ablated one after the other, each time the one whose removal
  raises accuracy most, at most `--heads` of them: chosen on the source images (`heads sources`), or, as a
  generous estimate, on the test images of the unseen domain themselves (`heads
  oracle`). Zero-shot.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from measure.script import arguments, record
from torch import Tensor

import dear
from dear.bench.protocols.held_out import domains_of, split_sources, splits_of
from dear.data.images import ImageSet, select_domains
from dear.data.open import open_data
from dear.heads.ablate import AblationTask
from dear.heads.collect import HeadContributions, collect_contributions
from dear.utils.text import fill_template

SHARPNESS = 10.0  # of the softmax over cosines with source centroids
RIDGE = 1.0


def main() -> None:
    options = arguments(
        __doc__,
        backbone="mini",
        data=["world:domains"],
        seeds=[1, 2, 3],
        heads=(6, "most heads to remove"),
        device="cpu",
        out=Path,
    )
    clip = dear.load(options.backbone, device=options.device)
    last = clip.config.vision.last_third
    for name in options.data:
        train, test = (open_data(name, split) for split in splits_of(name))
        texts = clip.encode_text([fill_template(train.template, word) for word in train.classes])
        texts = F.normalize(texts.float().cpu(), dim=-1)
        images = {
            "train": collect_contributions(clip, train, last),
            "test": collect_contributions(clip, test, last),
        }
        for domain in domains_of(train):
            for seed in options.seeds:
                rows = measure(images, (train, test), domain, seed, texts, options.heads)
                about = {"backbone": clip.name, "dataset": train.name, "held_out": domain, "seed": seed}
                record(options.out, [{**about, **row} for row in rows], options.device, machine_last=True)


def measure(
    images: dict[str, HeadContributions],
    sets: tuple[ImageSet, ImageSet],
    domain: str,
    seed: int,
    texts: Tensor,
    most: int,
) -> list[dict[str, object]]:
    """Accuracy on the unseen domain in every way."""
    train, test = sets
    others = [name for name in domains_of(train) if name != domain]
    sources, _ = split_sources(select_domains(train, others), seed)
    places = {train.key(i): i for i in range(len(train))}
    rows = torch.tensor([places[sources.key(i)] for i in range(len(sources))])
    target = torch.tensor([i for i, name in enumerate(test.domains or ()) if name == domain])
    x = F.normalize(images["train"].features[rows].float(), dim=-1)
    z = F.normalize(images["test"].features[target].float(), dim=-1)
    labels, truth = train.labels[rows], test.labels[target]
    known = torch.tensor([others.index(name) for name in sources.domains or ()])
    centroids = torch.stack([x[known == place].mean(dim=0) for place in range(len(others))])
    member = (SHARPNESS * F.normalize(z, dim=-1) @ F.normalize(centroids, dim=-1).T).softmax(dim=-1)
    between = torch.linalg.svd(centroids - centroids.mean(dim=0), full_matrices=False)
    basis = between.Vh[1e-4 * between.S.max() < between.S]
    plain = texts - texts.mean(dim=0)
    ways = {
        "as they are": (x, z, texts),
        "sources": (x - centroids[known], z - member @ centroids, plain),
        "target": (x - centroids[known], z - z.mean(dim=0), plain),
        "span": (x - x @ basis.T @ basis, z - z @ basis.T @ basis, texts),
    }
    results: list[dict[str, object]] = []
    for way, (learn, answer, words) in ways.items():
        zero = 100 * float((answer @ words.T).argmax(dim=1).eq(truth).double().mean())
        weights = ridge(learn, labels, len(train.classes))
        probe = 100 * float((answer @ weights[:-1] + weights[-1]).argmax(dim=1).eq(truth).double().mean())
        results.append({"way": way, "zero_shot": round(zero, 2), "probe": round(probe, 2), "removed": 0})
    tasks = {
        "heads sources": AblationTask(part(images["train"], rows), labels, texts),
        "heads oracle": AblationTask(part(images["test"], target), truth, texts),
    }
    for way, task in tasks.items():
        heads = remove_greedily(task, most)
        accuracy = 100 * tasks["heads oracle"].accuracy(heads)
        results.append({"way": way, "zero_shot": round(accuracy, 2), "probe": "", "removed": len(heads)})
    return results


def part(images: HeadContributions, rows: Tensor) -> HeadContributions:
    """Some of the images."""
    return HeadContributions(
        images.features[rows].float(), images.outputs[rows].float(), images.maps.float(), images.layers
    )


def ridge(x: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Weights [E + 1, C] of a ridge regression to one-hot labels; the last row is the bias."""
    ones = torch.cat([x, torch.ones(len(x), 1)], dim=1).double()
    left = ones.T @ ones + RIDGE * torch.eye(ones.shape[1], dtype=torch.float64)
    return torch.linalg.solve(left, ones.T @ F.one_hot(labels, classes).double()).float()


def remove_greedily(task: AblationTask, most: int) -> list[tuple[int, int]]:
    """Heads whose removal raises accuracy, one after the other."""
    heads: list[tuple[int, int]] = []
    every = [(layer, head) for layer in task.images.layers for head in range(task.images.outputs.shape[2])]
    best = task.accuracy()
    while len(heads) < most:
        trials = [(task.accuracy([*heads, head]), head) for head in every if head not in heads]
        accuracy, head = max(trials)
        if accuracy <= best:
            break
        heads.append(head)
        best = accuracy
    return heads


if __name__ == "__main__":
    main()
