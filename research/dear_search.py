"""DeAR with changed options on base-to-novel tasks: one row per training and weight of the class token.

    python research/dear_search.py --variants variants.json --datasets world:textures,world:scenes \
        --device cuda --jobs 14 --seconds 400 --csv search.csv

`variants.json` maps a name to changes of a preset of DeAR (`--preset`): options, fields of the training
recipe under "recipe", and "roles" ("uniform:mixed", "shuffled:1"). The answer is the cosine with `w f_cls +
(1 - w) fused`; one training gives the accuracies of every w, 0 being the mode `fused`, and those of `(1 - s)
fused + s frozen feature` (column `frozen`: s), all less the training images' mean. A last row, "..., nothing
learned", has the frozen model's answer less that mean. `--scores` keeps the cosines of every test image
(`dear_classes.py` reads them). The real datasets need `--data-root` (folders of tables), `--small` and
`--roles`, as in fair_table.py. Decoded images are kept in `--keep`. research/results/dear_search.csv holds
means over seeds, its changes are to `quick`; strong_table.csv has `strong` itself, one row per training.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fair_table import REAL
from jobs import workers
from PIL import Image

from dear.bench.session import starting_roles
from dear.clip.factory import load
from dear.clip.model import Clip
from dear.data.images import ImageSet
from dear.data.open import BENCHMARKS, open_data
from dear.data.shots import few_shot
from dear.heads.roles import RoleMap
from dear.heads.rules import derive_roles
from dear.images.views import normalize, resize_short, to_tensor
from dear.methods import DeAR
from dear.methods.tensors import unit
from dear.runs.recipe import Recipe
from dear.tasks.speed import add_rows, machine
from dear.train.run import train

WEIGHTS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0)
FROZEN = (0.1, 0.2, 0.3, 0.5, 1.0)
Row = dict[str, Any]


class Decoded:
    """A set whose images are in memory; everything else is asked of the set itself."""

    def __init__(self, own: ImageSet, images: list[torch.Tensor]) -> None:
        self._own, self._images = own, images

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __len__(self) -> int:
        return len(self._own)

    def image(self, index: int) -> Image.Image:
        """One image."""
        return Image.fromarray(self._images[index].permute(1, 2, 0).numpy())


@lru_cache(maxsize=2)
def backbone(name: str, roles: str | None, device: str) -> tuple[Clip, RoleMap]:
    """A backbone and its role map."""
    clip = load(name, device=device)
    found = starting_roles(clip, roles)
    assert found is not None
    return clip, found


def opened(dataset: str, split: str, root: str | None) -> ImageSet:
    """A split of a task of the attribute world, or of a real dataset with its own template."""
    if dataset not in REAL:
        return open_data(dataset, split)
    path = Path(root or ".") / REAL[dataset] / "index.csv"
    return open_data(str(path), split, template=BENCHMARKS[dataset].template)


def prepare(dataset: str, place: Mapping[str, Any], seeds: tuple[int, ...]) -> None:
    """Decode the training images of every seed and the views of the test images once."""
    clip, _ = backbone(*whose(dataset, place), "cpu")
    keep = Path(place["keep"])
    whole, test = (opened(dataset, split, place["root"]) for split in ("train", "test"))
    half = -(-len(whole.classes) // 2)
    short = -(-clip.config.vision.image_size * 2**0.5 // 1)
    for seed in seeds:
        path = keep / f"{dataset}-{seed}.pt".replace(":", "-")
        if not path.exists():
            drawn = few_shot(whole.select_classes(whole.classes[:half]), 16, seed)
            images = [np.array(drawn.image(i)) for i in range(len(drawn))]
            small = [resize_short(i, int(short)) if min(i.shape[:2]) > short else i for i in images]
            torch.save([to_tensor(image) for image in small], path)
    path = keep / f"{dataset}-test.pt".replace(":", "-")
    if not path.exists():
        torch.save(test.pixels(list(range(len(test))), clip.config.view), path)


def whose(dataset: str, place: Mapping[str, Any]) -> tuple[str, str | None]:
    """The backbone of a dataset and the file of its role map."""
    return (place["small"], place["roles"]) if dataset in REAL else ("mini", None)


@lru_cache(maxsize=40)
def task(dataset: str, seed: int, keep: str, root: str | None) -> tuple[Any, ImageSet, torch.Tensor]:
    """Training images of the first half of the classes, the test set, and its views."""
    whole, test = (opened(dataset, split, root) for split in ("train", "test"))
    drawn = few_shot(whole.select_classes(whole.classes[: -(-len(whole.classes) // 2)]), 16, seed)
    kept = [torch.load(Path(keep) / f"{dataset}-{part}.pt".replace(":", "-")) for part in (seed, "test")]
    return Decoded(drawn, kept[0]), test, kept[1]


def cell(
    dataset: str, variant: str, seed: int, changes: Mapping[str, Any], place: Mapping[str, Any]
) -> list[Row]:
    """Train once; accuracies of every weight."""
    began = time.perf_counter()
    clip, roles = backbone(*whose(dataset, place), place["device"])
    drawn, test, views = task(dataset, seed, place["keep"], place["root"])
    changes = dict(changes)
    recipe, spec = changes.pop("recipe", {}), changes.pop("roles", None)
    preset = DeAR.preset(place["preset"])
    method = DeAR(
        clip,
        drawn.classes,
        roles=derive_roles(roles, spec) if spec else roles,
        template=drawn.template,
        seed=seed,
        **{**preset.options, **changes},
    )
    started, cpu = time.perf_counter(), time.process_time()
    train(method, drawn, Recipe.of(DeAR, **{**preset.recipe, **recipe, "seed": seed}))
    trained, cpu = time.perf_counter(), time.process_time() - cpu
    half, labels = len(drawn.classes), test.labels.to(clip.device)
    with torch.no_grad():
        whole = method.with_classes(test.classes, test.template).in_precision("auto")
        found = []
        for part in views.split(500):
            pixels = normalize(part.to(clip.device), clip.config.mean, clip.config.std)
            f_cls, f_attr = (unit(f) for f in whole.image_features(pixels))
            frozen = unit(clip.encode_image(pixels)).to(f_attr.dtype)
            own, other = (whole.centered(f.to(f_attr.dtype), whole.image_mean) for f in (f_cls, frozen))
            found.append(torch.stack([own, whole._mixed(f_cls, f_attr), other, frozen]))
        features = torch.cat(found, dim=1).float()  # [4, n, E]
        own, fused, frozen = features[:3] @ whole.texts().float().T  # [n, C] each
    right = {(w, 0.0): accuracies(w * own + (1 - w) * fused, labels, half) for w in WEIGHTS}
    right |= {(0.0, s): accuracies(s * frozen + (1 - s) * fused, labels, half) for s in FROZEN}
    centered, zero_shot = features[2:] @ whole.prompts.frozen.float().T
    if place["scores"]:
        scores = {"class": own, "fused": fused, "frozen": frozen, "zero_shot": zero_shot}
        known = {"labels": labels.cpu(), "half": half, "classes": list(test.classes)}
        name = f"{dataset}-{variant}-{seed}.pt".replace(":", "-").replace(" ", "_")
        torch.save({**{k: v.cpu() for k, v in scores.items()}, **known}, Path(place["scores"]) / name)
    facts = {"variant": variant, "dataset": dataset, "seed": seed}
    times = {"train_s": round(trained - started, 2), "train_cpu_s": round(cpu, 2)}
    times |= {"whole_s": round(time.perf_counter() - began, 2)}
    alpha = {"alpha_class": round(method.fusion_weights()["class"], 4)}
    rows = [
        {**facts, "weight": weight, "frozen": share, **found, **alpha, **times}
        for (weight, share), found in right.items()
    ]
    own = {"variant": f"{variant}, nothing learned", "weight": 0.0, "frozen": 0.0}
    return [*rows, {**rows[0], **own, **accuracies(centered, labels, half)}]


def accuracies(scores: torch.Tensor, labels: torch.Tensor, half: int) -> dict[str, float]:
    """Base, novel, HM and accuracy over the joint list."""
    known = labels < half
    base = float((scores[known][:, :half].argmax(1) == labels[known]).double().mean())
    novel = float((scores[~known][:, half:].argmax(1) == labels[~known] - half).double().mean())
    joint = float((scores.argmax(1) == labels).double().mean())
    hm = 2 * base * novel / max(base + novel, 1e-9)
    return {name: round(v, 5) for name, v in (("base", base), ("novel", novel), ("hm", hm), ("joint", joint))}


def main() -> None:
    """Parse, decode, train; rows are written as they are measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", required=True)
    parser.add_argument("--datasets", default="world:textures,world:scenes,Caltech101,DescribableTextures")
    parser.add_argument("--preset", default="strong", help="of DeAR, that the changes are made to")
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--only", help="comma-separated names of variants")
    parser.add_argument("--data-root")
    parser.add_argument("--small")
    parser.add_argument("--roles")
    parser.add_argument("--keep", default="kept")
    parser.add_argument("--scores", help="folder for the cosines of every test image")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so long")
    parser.add_argument("--csv", required=True)
    args = parser.parse_args()
    began = time.perf_counter()
    variants = json.loads(Path(args.variants).read_text())
    if args.only:
        variants = {name: variants[name] for name in args.only.split(",")}
    datasets, seeds = args.datasets.split(","), tuple(int(seed) for seed in args.seeds.split(","))
    place = {"keep": args.keep, "root": args.data_root, "small": args.small, "roles": args.roles}
    place |= {"device": args.device, "preset": args.preset, "scores": args.scores}
    for folder in (args.keep, args.scores):
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    about = machine(torch.device(args.device))
    with workers(args.jobs) as run:
        for _ in run(prepare, [(dataset, place, seeds) for dataset in datasets]):
            pass
        print(f"decoded after {time.perf_counter() - began:.0f} s", flush=True)
        calls = [
            (dataset, name, seed, changes, place)
            for seed in seeds
            for name, changes in variants.items()
            for dataset in datasets
        ]
        done = 0
        for _, rows in run(cell, calls):
            add_rows(Path(args.csv), [{**about, **row} for row in rows])
            done += 1
            if time.perf_counter() - began > args.seconds:
                break
        print(f"{done} of {len(calls)} trainings in {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
