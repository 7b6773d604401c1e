r"""Are explanations true? Heatmaps against the object's mask, deletion and insertion, and planted shortcuts.

    python research/heads/explain.py masks --out research/results/explain_masks.csv
    python research/heads/explain.py shortcuts --out research/results/explain_shortcuts.csv
    python research/heads/explain.py photos --backbone FOLDER --data TABLE \
        --images 48 --out research/results/explain_photos.csv

*masks*: scenes of the attribute world with one animal, drawn at two places; pixels that do not change are the
animal. Four zero-shot questions: which animal, which place, which color, which texture; the score is that of
the true answer above the mean of the others. Figures per method: how well the map ranks the pixels of the
mask above the others (AUC), the share of its positive part that lies in the mask (energy), and how often its
largest value does (pointing). The mask is the animal, for places everything else. Of rivals that have a layer
to choose, the best layer is shown, chosen on the same scenes, and each with its parts spread to neighbors as
the exact parts are, or not, whichever is better.

*photos*: deletion (patches painted with the mean color, the most important first; the faster the answer's
probability falls, the better) and insertion (the other way round), zero-shot on real photos.

*shortcuts*: a linear probe on tasks with a planted shortcut; of its wrong answers on test images, the share
whose explanation names the planted concept first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from explain_rivals import forward, grad_cam, gradient_input, legrad, rollout
from measure.script import add_options, parser_of, record
from sklearn.metrics import roc_auc_score
from torch import Tensor

import dear
from dear import world
from dear.clip.model import Clip
from dear.data.batches import pixels_for
from dear.data.open import open_data
from dear.heads.known_roles import known_roles
from dear.images.views import normalize
from dear.methods import build_method
from dear.runs.model import Model
from dear.tasks.adapt import adapt
from dear.tasks.explain.explainer import Explainer
from dear.tasks.explain.parts import Trace, smooth
from dear.tasks.explain.scores import ScoreParts
from dear.tasks.mini.measure import PROMPTS
from dear.world import factors as W
from dear.world.shortcuts import KINDS

Maps = dict[str, Tensor]  #: method -> [B, S, S]
BATCH = 16


def scenes_with_masks(number: int, seed: int, textured: bool = False) -> tuple[world.Scenes, Tensor, Tensor]:
    """Scenes with one animal, their images uint8 [n, 3, 64, 64], and masks of the animal [n, 64, 64]."""
    drawn = world.sample(number * 12, torch.Generator().manual_seed(seed), kinds=(W.ANIMAL,))
    plain = (drawn.count == 1) & (drawn.style == W.PHOTO)
    if textured:  # a question about textures needs one
        plain &= drawn.texture != W.PLAIN
    drawn = drawn[plain.nonzero()[:, 0]]
    images = world.render(drawn)
    same = torch.ones(len(drawn), 64, 64, dtype=torch.bool)
    for step in (3, 5, 7):  # a pixel may be the same at two places by chance
        other = drawn.replace(place=(drawn.place + step) % len(W.PLACES))
        same &= (world.render(other).int() - images.int()).abs().amax(1) <= 6
    share = same.float().mean((1, 2))
    good = ((share > 0.04) & (share < 0.6)).nonzero()[:, 0][:number]
    return drawn[good], images[good], same[good]


def questions(clip: Clip, scenes: world.Scenes) -> dict[str, Tensor]:
    """For each question the direction [n, E] of the true answer against the mean of the others."""
    animals = [f"a {name}" for name in W.ANIMALS]
    truths = {"class": (scenes.subject - W.KIND_FIRST[W.ANIMAL], animals)}
    for name in ("place", "color", "texture"):
        column, template, words = PROMPTS[name]
        truths[name] = (
            scenes.factors()[:, column],
            [template.replace("shape", "animal").replace("{}", word) for word in words],
        )
    directions = {}
    for name, (truth, texts) in truths.items():
        features = F.normalize(clip.encode_text(texts).float(), dim=-1)
        others = (features.sum(0) - features) / (len(features) - 1)
        directions[name] = (features - others)[truth]
    return directions


def exact(clip: Clip, pixels: Tensor, question: Tensor, groups: Mapping[str, Any]) -> Maps:
    """Exact parts by patch: of all heads, and of some."""
    trace = Trace(clip, lambda c: F.normalize(c.encode_image(pixels).float(), dim=-1) @ question.T)
    patches = trace.parts(torch.eye(len(question))[None].double(), patches=True).patches
    assert patches is not None
    each = patches[0, :, 0]  # [B, L, H, S, S]
    maps = {"exact parts": smooth(each.sum((1, 2))), "exact parts, not spread": each.sum((1, 2))}
    for name, heads in groups.items():
        maps[f"exact parts, {name}"] = torch.stack([each[:, la - 1, h] for la, h in heads]).sum(0)
    return maps


def rivals(clip: Clip, pixels: Tensor, question: Tensor, layers: range) -> Maps:
    """The maps of all rivals, those with a layer at every layer."""
    run = forward(clip, pixels, question)
    maps = {"rollout": rollout(run), "LeGrad": legrad(clip, run, question)}
    for layer in layers:
        maps[f"Grad-CAM @{layer}"] = grad_cam(run, layer)
        maps[f"gradient x input @{layer}"] = gradient_input(run, layer)
    return maps


def spread_too(maps: Maps) -> Maps:
    """Maps as they are and spread to neighbors, for methods that choose the better one."""
    return maps | {
        f"{name}{' ' if ' @' in name else ' @'}spread": smooth(each) for name, each in maps.items()
    }


def scored(maps: Tensor, masks: Tensor) -> tuple[float, float, float]:
    """AUC, energy and pointing of maps [n, S, S] against masks [n, P, P], means over images."""
    wide = F.interpolate(maps[:, None].float(), masks.shape[1:], mode="bilinear")[:, 0].flatten(1)
    flat = masks.flatten(1)
    positive = wide.clamp(min=0)
    energy = (positive * flat).sum(1) / positive.sum(1).clamp(min=1e-12)
    pointing = flat.gather(1, wide.argmax(1, keepdim=True)).float()
    areas = [roc_auc_score(mask, values) for values, mask in zip(wide, flat, strict=True)]
    return sum(areas) / len(areas), float(energy.mean()), float(pointing.mean())


def best_layers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of methods with a layer, the layer with the best AUC."""
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        name = row["method"].partition(" @")[0]
        if name not in best or row["auc"] > best[name]["auc"]:
            best[name] = row
    return list(best.values())


def masks(args: argparse.Namespace) -> list[dict[str, Any]]:
    clip = dear.load("mini")
    roles = known_roles(clip)
    assert roles is not None
    about = {"class": "Object", "place": "Location", "color": "Color", "texture": "Texture"}
    rows = []
    for name, role in about.items():
        scenes, images, inside = scenes_with_masks(args.images, args.seed, name == "texture")
        pixels = normalize(images, clip.config.mean, clip.config.std)
        question = questions(clip, scenes)[name]
        groups = {f"{role} heads": roles.select(concept=role)}
        maps_of: dict[str, list[Tensor]] = {}
        for start in range(0, len(pixels), BATCH):
            part, directions = pixels[start : start + BATCH], question[start : start + BATCH]
            others = {} if args.exact else spread_too(rivals(clip, part, directions, range(1, 13)))
            maps = exact(clip, part, directions, groups) | others
            for method, values in maps.items():
                maps_of.setdefault(method, []).append(values)
        target = ~inside if name == "place" else inside
        every = []
        for method, parts in maps_of.items():
            figures = scored(torch.cat(parts), target)
            every.append(
                {"question": name, "method": method}
                | dict(zip(("auc", "energy", "pointing"), figures, strict=True))
            )
        rows += best_layers(every)
    return [
        {**row, **{k: round(row[k], 4) for k in ("auc", "energy", "pointing")}, "images": len(pixels)}
        for row in rows
    ]


def photos(args: argparse.Namespace) -> list[dict[str, Any]]:
    clip = dear.load(args.backbone)
    images = open_data(args.data, "test")
    chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(args.seed))
    images = images.subset(chosen[: args.images].tolist())
    model = build_method("zeroshot", clip, images.classes, template=images.template)
    pixels = pixels_for(clip, images, range(len(images)))
    logits = model.logits(pixels)
    answers = logits.argmax(1)
    texts = model.prompts.frozen
    question = (texts - (texts.sum(0) - texts) / (len(texts) - 1))[answers]
    last = clip.config.vision.layers
    maps: dict[str, list[Tensor]] = {}
    for start in range(0, len(pixels), BATCH):
        part, directions = pixels[start : start + BATCH], question[start : start + BATCH]
        others = {} if args.exact else rivals(clip, part, directions, range(last - 2, last))
        for method, values in (exact(clip, part, directions, {}) | others).items():
            maps.setdefault(method, []).append(values)
    maps["random"] = [torch.rand(len(pixels), clip.config.vision.side, clip.config.vision.side)]
    rows = []
    for method, parts in maps.items():
        order = torch.cat(parts).flatten(1).argsort(dim=1, descending=True)
        removed = curve(model.logits, pixels, order, answers, clip.config.vision.patch_size, True)
        kept = curve(model.logits, pixels, order, answers, clip.config.vision.patch_size, False)
        rows.append(
            {
                "data": images.name,
                "method": method,
                "deletion": round(removed, 4),
                "insertion": round(kept, 4),
                "images": len(pixels),
            }
        )
    return rows


def curve(
    logits: Callable[[Tensor], Tensor],
    pixels: Tensor,
    order: Tensor,
    answers: Tensor,
    size: int,
    delete: bool,
) -> float:
    """Mean probability of the answers while patches are deleted, or inserted, in order."""
    side = pixels.shape[-1] // size
    count, total = side * side, []
    for share in torch.linspace(0, 1, 9).tolist():
        first = order[:, : round(share * count)]
        hidden = torch.zeros(len(pixels), count).scatter(1, first, 1.0)
        hidden = hidden if delete else 1 - hidden
        mask = hidden.unflatten(1, (side, side))[:, None]
        mask = F.interpolate(mask, scale_factor=size, mode="nearest")
        seen = pixels * (1 - mask)  # normalized pixels: 0 is the mean color
        total.append(
            torch.cat([logits(part) for part in seen.split(32)])
            .softmax(-1)
            .gather(1, answers[:, None])
            .mean()
        )
    return float(torch.stack(total).mean())


def shortcuts(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for kind in ("place", "color", "texture", "text"):
        name, planted = f"world:shortcut-{kind}", KINDS[kind].concept
        trained = adapt(
            name, None, backbone="mini", method="linear-probe", shots=16, calibrate=False, seed=args.seed
        )
        model, test = Model(trained.method), open_data(name, "test")
        chosen = torch.randperm(len(test), generator=torch.Generator().manual_seed(args.seed))
        test = test.subset(chosen[:240].tolist())
        answers = model.logits(test)[model.modes[0]].argmax(1)
        wrong = (answers != test.labels).nonzero()[:, 0].tolist()[: args.images]
        explainer = Explainer(ScoreParts(model, open_data(name, "train")))
        explanations = explainer.explain(test.subset(wrong))
        first = [one.without_concepts[0].name for one in explanations]
        by_heads = [_largest(one) for one in explanations]
        rows.append(
            {
                "shortcut": kind,
                "concept": planted,
                "accuracy": round(float((answers == test.labels).float().mean()), 4),
                "wrong": len(wrong),
                "named_first": round(first.count(planted) / max(1, len(first)), 4),
                "named_by_heads": round(by_heads.count(planted) / max(1, len(first)), 4),
                "exact": max(
                    abs(sum(bar.lead for bar in one.bars) - one.scores[0] + one.scores[1])
                    for one in explanations
                )
                < 1e-4,
            }
        )
    return rows


def _largest(one: Any) -> str:
    """The role whose heads speak most for the answer against the other class."""
    return str(max((bar for bar in one.bars if bar.kind == "role"), key=lambda bar: bar.lead).name)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("part", choices=("masks", "photos", "shortcuts"))
    add_options(parser, images=80, seed=1, backbone=("mini", "of photos"), out=Path)
    add_options(parser, data=("", "of photos: a table or folder of images"))
    add_options(parser, exact=(False, "of masks and photos: without rivals"))
    args = parser.parse_args()
    rows = {"masks": masks, "photos": photos, "shortcuts": shortcuts}[args.part](args)
    record(args.out, [{**row, "seed": args.seed} for row in rows], machine_last=True)


if __name__ == "__main__":
    main()
