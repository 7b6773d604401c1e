"""Accuracy of a backbone in the attribute world, on compositions held out of pretraining."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dear import world
from dear.clip.model import Clip
from dear.heads.contributions import head_maps, head_outputs
from dear.heads.discover import discover_roles
from dear.heads.explained_variance import explained_variance
from dear.heads.roles import RoleMap
from dear.images.views import normalize
from dear.tasks.load import load_backbone
from dear.utils.files import PathLike, check_output, write_json
from dear.world import factors as vocabulary

WAYS = 100  #: compositions to choose from
_AT_ONCE = 256
_SEED = 20_260  # not a seed of pretraining or of any task

PROMPTS: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "color": (vocabulary.COLOR, "a {} shape", tuple(c.words[0] for c in vocabulary.COLORS)),
    "shape": (vocabulary.SUBJECT, "a {}", vocabulary.SHAPES),
    "texture": (vocabulary.TEXTURE, "a {} shape", tuple(words[0] for words in vocabulary.TEXTURES)),
    "place": (vocabulary.PLACE, "a shape {}", tuple(phrases[0] for phrases, _ in vocabulary.PLACES)),
    "style": (vocabulary.STYLE, "{} a shape", tuple(phrases[0] for phrases, _ in vocabulary.STYLES)),
}
"""For each factor: its column among the factors, the prompt, and the word of every value."""


def held_out_scenes(number: int) -> world.Scenes:
    """Scenes of shapes whose composition of color, texture, shape and place pretraining left out."""
    rng = torch.Generator().manual_seed(_SEED)
    scenes = world.sample(number * 20, rng, kinds=(vocabulary.SHAPE,), avoid_held_out=False)
    return scenes[world.is_held_out(scenes).nonzero()[:, 0][:number]]


def batches(clip: Clip, scenes: world.Scenes) -> Iterator[Tensor]:
    """Normalized pixels of the scenes, rendered piece by piece on the backbone's device."""
    for start in range(0, len(scenes), _AT_ONCE):
        pixels = world.render(scenes[slice(start, start + _AT_ONCE)].to(clip.device))
        yield normalize(pixels, clip.config.mean, clip.config.std)


def image_features(clip: Clip, scenes: world.Scenes) -> Tensor:
    """Unit image features of the scenes, [n, E], on the CPU."""
    return torch.cat([F.normalize(clip.encode_image(part), dim=-1).cpu() for part in batches(clip, scenes)])


def _text_features(clip: Clip, texts: list[str]) -> Tensor:
    return F.normalize(clip.encode_text(texts).cpu(), dim=-1)


def factor_accuracies(clip: Clip, number: int = 4000) -> dict[str, float]:
    """Zero-shot accuracy for each factor on held-out compositions; images that hide it do not count."""
    scenes = held_out_scenes(number)
    features, values = image_features(clip, scenes), scenes.factors()
    result = {}
    for name, (column, template, words) in PROMPTS.items():
        prompts = _text_features(clip, [template.replace("{}", word) for word in words])
        shown = values[:, column] >= 0
        guess = (features[shown] @ prompts.T).argmax(dim=1)
        result[name] = float((guess == values[shown, column]).float().mean())
    return result


def composition_scenes(each: int = 20) -> tuple[world.Scenes, Tensor, list[str]]:
    """Photos of single shapes in `WAYS` held-out compositions: scenes, labels, captions."""
    rng = torch.Generator().manual_seed(_SEED + 1)
    pool = world.sample(WAYS * 400, rng, kinds=(vocabulary.SHAPE,), avoid_held_out=False)
    pool = pool[world.is_held_out(pool).nonzero()[:, 0]]
    first_rows: dict[tuple[int, int, int, int], int] = {}
    composed = (pool.subject, pool.color, pool.texture, pool.place)
    for row, key in enumerate(zip(*(values.tolist() for values in composed), strict=True)):
        if key not in first_rows and key[2] != vocabulary.PLAIN:
            first_rows[key] = row
    rows = torch.tensor(list(first_rows.values())[:WAYS]).repeat_interleave(each)
    fresh = world.sample(len(rows), rng)
    scenes = pool[rows].replace(
        count=torch.ones_like(rows), style=torch.zeros_like(rows), nuisance=fresh.nuisance
    )
    captions = [
        f"a {vocabulary.TEXTURES[t][0]} {vocabulary.COLORS[c].words[0]} {vocabulary.SHAPES[s]} "
        f"{vocabulary.PLACES[p][0][0]}"
        for s, c, t, p in list(first_rows)[:WAYS]
    ]
    return scenes, torch.arange(len(captions)).repeat_interleave(each), captions


def composition_accuracy(clip: Clip) -> float:
    """Zero-shot accuracy among `WAYS` compositions never seen together in pretraining."""
    scenes, labels, captions = composition_scenes()
    guess = (image_features(clip, scenes) @ _text_features(clip, captions).T).argmax(dim=1)
    return float((guess == labels).float().mean())


CONCEPT_FACTORS = {
    "Color": (vocabulary.COLOR, vocabulary.SHAPE),
    "Shape": (vocabulary.SUBJECT, vocabulary.SHAPE),
    "Texture": (vocabulary.TEXTURE, vocabulary.SHAPE),
    "Object": (vocabulary.SUBJECT, vocabulary.OBJECT),
    "Location": (vocabulary.PLACE, vocabulary.SHAPE),
    "Number": (vocabulary.COUNT, vocabulary.SHAPE),
    "Style": (vocabulary.STYLE, vocabulary.SHAPE),
    "Animal": (vocabulary.SUBJECT, vocabulary.ANIMAL),
    "Action": (vocabulary.SUBJECT, vocabulary.PERSON),
    "Emotion": (vocabulary.SUBJECT, vocabulary.FACE),
    "Text": (vocabulary.SUBJECT, vocabulary.LETTER),
}
"""For each concept: the factor that carries it, and the kind of subject whose images it is measured on."""


def head_truth(clip: Clip, layers: Sequence[int], number: int = 2000) -> dict[str, Tensor]:
    """Share of each head's variance that the factor of each concept explains, [L, H] per concept.

    Each concept is measured on images of the kind where it is at play: color, texture, shape, place, count
    and style on shapes, object identity on objects, and so on.
    """
    maps = head_maps(clip, layers)
    rng = torch.Generator().manual_seed(_SEED + 2)
    outputs: dict[int, tuple[Tensor, Tensor]] = {}
    for kind in sorted({kind for _, kind in CONCEPT_FACTORS.values()}):
        scenes = world.sample(number, rng, kinds=(kind,))
        parts = [head_outputs(clip, pixels, layers).outputs.cpu() for pixels in batches(clip, scenes)]
        outputs[kind] = torch.cat(parts), scenes.factors()
    result = {}
    for concept, (column, kind) in CONCEPT_FACTORS.items():
        rows, values = outputs[kind]
        shown = values[:, column] >= 0
        result[concept] = explained_variance(rows[shown], maps.cpu(), values[shown, column])
    return result


def mini_roles(clip: Clip, images: int = 2500) -> RoleMap:
    """Roles of a backbone of this world, judged on images of everything there is in it.

    Concepts are the tags of the world's own phrases: there each phrase names one factor, so nothing need be
    guessed from the wording.
    """
    scenes = world.sample(images, torch.Generator().manual_seed(1))
    return discover_roles(clip, batches(clip, scenes), concepts="tags")


def write_head_truth(path: PathLike, clip: Clip, layers: Sequence[int]) -> None:
    """Write `head_truth` as JSON: per layer and head, the explained share of every concept."""
    shares = head_truth(clip, layers)
    heads = [
        {
            "layer": layer,
            "head": head,
            "explained": {name: round(float(table[place, head]), 4) for name, table in shares.items()},
        }
        for place, layer in enumerate(layers)
        for head in range(clip.config.vision.heads)
    ]
    write_json(path, {"backbone": clip.name, "fingerprint": clip.fingerprint, "heads": heads})


def measure_mini(
    *,
    backbone: PathLike | Clip = "mini",
    number: int = 4000,
    truth: PathLike | None = None,
    roles: PathLike | None = None,
    device: str = "auto",
) -> dict[str, float]:
    """Zero-shot accuracies of a backbone in the attribute world, on compositions that pretraining left out.

    Args:
        backbone: what `load` takes, or a loaded backbone.
        number: images per factor.
        truth: file to write what explains each head's variance to.
        roles: file to write the role map to.
        device: "auto", "cpu", "cuda", …
    """
    for path in (truth, roles):
        check_output(path)
    clip = load_backbone(backbone, device)
    accuracies = factor_accuracies(clip, number)
    accuracies["compositions (100-way)"] = composition_accuracy(clip)
    if truth is not None:
        write_head_truth(truth, clip, clip.config.vision.last_third)
    if roles is not None:
        mini_roles(clip).save(roles)
    return accuracies
