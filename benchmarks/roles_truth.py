"""Are the roles of `mini` true? Asked where the truth is known, in the attribute world.

    python benchmarks/roles_truth.py --images 2000 --concepts clusters

Two questions. Of the heads called core for a concept: for how many does that concept's factor explain more of
the head's variance than the other four core factors do, against the same share for shuffled roles? And does
ablating the core heads of a concept cost most on zero-shot questions about that concept: a table of five by
five, beside as many random heads of the same layers.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

import dear
from dear import world
from dear._io.files import write_json
from dear.clip.model import Clip
from dear.heads import RoleMap, Task, collect, concept_table, discover_roles, rerule
from dear.heads.names import CORE
from dear.world import factors
from dear.world.measure import PROMPTS, batches, head_truth, held_out_scenes

FACTOR_OF = {"Color": "color", "Shape": "shape", "Texture": "texture", "Location": "place"}


def leading_concept(truth: Mapping[str, Tensor], layers: tuple[int, ...]) -> dict[tuple[int, int], str]:
    """Of the five core concepts, the one that explains most of each head's variance."""
    table = torch.stack([truth[concept] for concept in CORE], dim=-1)  # [L, H, 5]
    return {
        (layer, head): CORE[int(table[place, head].argmax())]
        for place, layer in enumerate(layers)
        for head in range(table.shape[1])
    }


def right_share(roles: RoleMap, lead: Mapping[tuple[int, int], str]) -> float:
    """Share of core heads whose concept leads the truth."""
    core = [(key, role.concept) for key, role in roles if role.kind == "core"]
    return sum(lead[key] == concept for key, concept in core) / max(1, len(core))


def questions(clip: Clip, layers: tuple[int, ...], number: int) -> dict[str, Task]:
    """A zero-shot question for each core concept, on images that pretraining never showed."""
    scenes = held_out_scenes(number)
    kept, values = collect(clip, batches(clip, scenes), layers), scenes.factors()
    tasks = {}
    for concept, name in FACTOR_OF.items():
        column, template, words = PROMPTS[name]
        shown = values[:, column] >= 0
        some = type(kept)(kept.features[shown], kept.outputs[shown], kept.maps, kept.layers)
        text = clip.encode_text([template.replace("{}", word) for word in words])
        tasks[concept] = Task(some, values[shown, column], text)
    things = world.sample(number, torch.Generator().manual_seed(5), kinds=(factors.OBJECT,))
    labels = things.factors()[:, factors.SUBJECT] - factors.KIND_FIRST[factors.OBJECT]
    text = clip.encode_text([f"a {name}" for name in factors.OBJECTS])
    tasks["Object"] = Task(collect(clip, batches(clip, things), layers), labels, text)
    return {concept: tasks[concept] for concept in CORE}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=2000, help="images the roles are found on")
    parser.add_argument("--truth", type=int, default=1000, help="images a kind for the truth")
    parser.add_argument("--questions", type=int, default=1500, help="images a zero-shot question")
    parser.add_argument("--concepts", default="clusters", choices=("clusters", "fixed", "tags"))
    parser.add_argument("--phrases", type=int, default=None)
    parser.add_argument("--seeds", type=int, default=20, help="draws of shuffled roles and random heads")
    parser.add_argument("--json", type=Path, default=None, help="also write the figures here")
    options = parser.parse_args()
    clip = dear.load("mini")
    scenes = world.sample(options.images, torch.Generator().manual_seed(1))
    roles = discover_roles(clip, batches(clip, scenes), concepts=options.concepts, phrases=options.phrases)
    lead = leading_concept(head_truth(clip, roles.layers, options.truth), roles.layers)
    figures: dict[str, object] = {"concepts": options.concepts, "phrases": roles.evidence["phrases_per_head"]}
    for name, found in (("dominant", roles), ("quantile", rerule(roles, "quantile"))):
        shuffled = [right_share(found.shuffled(seed), lead) for seed in range(options.seeds)]
        chance = sum(shuffled) / len(shuffled)
        share = right_share(found, lead)
        figures[name] = {
            "counts": found.counts(),
            "core": found.concept_counts(),
            "right": round(share, 3),
            "shuffled": round(chance, 3),
        }
        print(f"{name}: {found.counts()}, core {found.concept_counts()}")
        print(f"  core heads whose factor leads: {share:.0%}; shuffled roles: {chance:.0%}")
    tasks = questions(clip, roles.layers, options.questions)
    for measure in ("accuracy", "margin"):
        drop, random = concept_table(tasks, roles, options.seeds, measure)
        whole = {name: getattr(task, measure)() for name, task in tasks.items()}
        print(
            f"\n{measure} lost, in percent, when the core heads of a concept (row) are replaced by their mean"
        )
        print("in brackets: as many random heads of the same layers")
        print(f"{'':>14}" + "".join(f"{name:>16}" for name in tasks))
        print(f"{'whole':>14}" + "".join(f"{100 * value:>16.1f}" for value in whole.values()))
        for concept, row in drop.items():
            cells = (f"{100 * row[n]:+.1f} ({100 * random[concept][n]:+.1f})" for n in tasks)
            name = f"{concept} ({len(roles.select('core', concept))})"
            print(f"{name:>14}" + "".join(f"{cell:>16}" for cell in cells))
        figures[measure] = {"whole": whole, "lost": drop, "lost_random": random}
    if options.json:
        write_json(options.json, figures)


if __name__ == "__main__":
    main()
