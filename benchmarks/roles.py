"""Finding the phrases of every head: ours against the literal procedure, on the same images, in one run.

    python benchmarks/roles.py --device cpu --images 64 --phrases 300
    python benchmarks/roles.py --device cuda --images 5000 --phrases 3500 --csv benchmarks/results/roles.csv

A random CLIP of the ViT-B/16 size, random images and random token ids: time does not depend on what weights
and images show. From images and token ids to the phrase list of each head of the last four layers; naming
the concepts of the phrases afterwards takes the same few seconds either way and is left out of both.

The literal procedure is what the method says, word for word: attention written out; for every head and every
patch its contribution [B, H, N, E] to the class token's feature, brought to the CPU and summed over patches
there; all contributions [n, L, H, E] kept; then, head after head in numpy, a singular value decomposition and
20 rounds of projecting all contributions on all phrases. Texts run through all 77 positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from measure.clock import Laps
from measure.script import DEVICE, arguments, record
from torch import Tensor

from dear.clip.config import ClipConfig
from dear.clip.model import Clip
from dear.heads.contributions import decompose
from dear.heads.moments import compute_moments
from dear.heads.textspan import textspan_moments


def images(clip: Clip, count: int, batch: int) -> Iterator[Tensor]:
    """The same random images each time: color fields with noise, so that heads have something to tell."""
    size, device = clip.config.vision.image_size, clip.device
    for start in range(0, count, batch):
        here = min(batch, count - start)
        generator = torch.Generator(device).manual_seed(start)
        coarse = torch.randn(here, 3, 4, 4, generator=generator, device=device)
        noise = torch.randn(here, 3, size, size, generator=generator, device=device)
        yield torch.nn.functional.interpolate(coarse, size, mode="bilinear") + 0.3 * noise


def token_ids(clip: Clip, count: int) -> Tensor:
    """Phrases of 3 to 9 tokens between the first and the last, as ids [m, 77]."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.zeros(count, clip.config.text.context, dtype=torch.long)
    for row in range(count):
        words = int(torch.randint(3, 10, (), generator=generator))
        ids[row, 0] = clip.config.text.vocab - 2
        ids[row, 1 : 1 + words] = torch.randint(300, 40_000, (words,), generator=generator)
        ids[row, 1 + words] = clip.config.text.vocab - 1
    return ids.to(clip.device)


@torch.no_grad()
def ours(clip: Clip, ids: Tensor, count: int, batch: int) -> tuple[Tensor, dict[str, float]]:
    """Phrase numbers [L, H, 20], and seconds by stage."""
    clock = Laps()
    text = clip.encode_text(ids)
    clock.lap("text")
    seen = compute_moments(clip, images(clip, count, batch), clip.config.vision.last_third)
    clock.lap("images")
    picks = textspan_moments(seen, text).picks.cpu()
    clock.lap("textspan")
    return picks, clock.seconds


@torch.no_grad()
def literal(
    clip: Clip, ids: Tensor, count: int, batch: int, some: int, heads: int
) -> tuple[Tensor, dict[str, float], dict[str, float]]:
    """The same by the letter: phrase numbers [heads, 20] of the first heads, seconds by stage, their scale.

    With fewer than all images or heads, the time of that stage is measured on them and multiplied; the
    contributions of the other images are then ours, which are checked to be the same on those of both.
    """
    clock = Laps()
    text = torch.cat([_all_positions(clip, part) for part in ids.split(64)])
    unit = torch.nn.functional.normalize(text, dim=-1).cpu().numpy()
    clock.lap("text")
    # Per-patch contributions of four layers fill memory soon: fewer images at once than ours.
    pieces = (piece for part in images(clip, some, batch) for piece in part.split(max(1, batch // 4)))
    kept = np.concatenate([_contributions(clip, piece) for piece in pieces])  # [n, L, H, E]
    clock.lap("images")
    total = kept.shape[1] * kept.shape[2]
    if some < count:
        parts = [
            decompose(clip, part, clip.config.vision.last_third).heads.cpu().numpy()
            for part in images(clip, count, batch)
        ]
        every = np.concatenate(parts)
        error = np.abs(every[:some] - kept).max() / np.abs(kept).max()
        if error > 1e-3:
            raise SystemExit(f"our contributions differ from the literal ones by {error:.1e}")
        kept = every
    clock.skip()
    each = kept.reshape(len(kept), total, -1)
    rows = [_textspan(np.ascontiguousarray(each[:, head]), unit) for head in range(heads)]
    clock.lap("textspan")
    scale = {"text": 1.0, "images": count / some, "textspan": total / heads}
    return torch.tensor(rows), clock.seconds, scale


def _all_positions(clip: Clip, ids: Tensor) -> Tensor:
    """Text features from all 77 positions."""
    x = clip.text.run(clip.text.embed(ids))
    return clip.text.project(x[torch.arange(len(x)), clip.text.eot(ids)])


def _contributions(clip: Clip, pixels: Tensor) -> np.ndarray:
    """[B, L, H, E]: per head and patch on the device, summed over patches on the CPU."""
    visual, heads = clip.visual, clip.config.vision.heads
    x = visual.embed(pixels)
    terms = []
    for layer, block in enumerate(visual.blocks, 1):
        y = block.ln_1(x)
        q, k, v = (linear(y).unflatten(-1, (heads, -1)).transpose(1, 2) for linear in _qkv(block))
        weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)  # [B, H, N, N]
        if layer in clip.config.vision.last_third:
            out = block.attn.o.weight.T.unflatten(0, (heads, -1))  # [H, d, D]
            patches = weights[:, :, 0, :, None] * v  # [B, H, N, d]: what each patch sends to the class token
            terms.append(torch.einsum("bhnd,hdw->bhnw", patches, out))
        x = x + block.attn.o((weights @ v).transpose(1, 2).flatten(2))
        x = x + block.mlp(block.ln_2(x))
    norm = visual.ln_post
    spread = (x[:, 0].var(-1, unbiased=False) + norm.eps).sqrt()[:, None, None, None]
    carried = []
    for term in terms:  # [B, H, N, D] each, through the final norm and the projection
        centered = (term - term.mean(-1, keepdim=True)) / spread * norm.weight
        carried.append((centered @ visual.proj).cpu().numpy().sum(axis=2))
    return np.stack(carried, axis=1)


def _qkv(block: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    return block.attn.q, block.attn.k, block.attn.v  # type: ignore[union-attr,return-value]


def _textspan(C: np.ndarray, T: np.ndarray, rounds: int = 20, rank: int = 80) -> list[int]:
    """TEXTSPAN of one head in numpy."""
    _, singular, rows = np.linalg.svd(C, full_matrices=False)
    tolerance = singular[0] * max(C.shape) * np.finfo(np.float32).eps
    V = rows[: min(rank, int((singular > tolerance).sum()))].T
    T = T @ V @ V.T
    C = C - C.mean(axis=0)
    picks = []
    for _ in range(rounds):
        best = int((C @ T.T).std(axis=0).argmax())
        t = T[best].copy()
        picks.append(best)
        C = C - np.outer(C @ t, t) / (t @ t)
        T = T - np.outer(T @ t, t) / (t @ t)
    return picks


def main() -> None:
    options = arguments(
        __doc__,
        model="ViT-B-16",
        device=DEVICE,
        images=5000,
        phrases=3500,
        batch=(int, "images at once (64 on a CPU, 250 on a GPU)"),
        literal_images=(int, "images of the literal procedure (default: all)"),
        literal_heads=(int, "heads of its TEXTSPAN (default: all)"),
        csv=Path,
    )
    torch.manual_seed(0)
    clip = Clip(ClipConfig.named(options.model)).to(options.device)
    ids = token_ids(clip, options.phrases)
    batch = options.batch or (250 if clip.device.type == "cuda" else 64)
    small = min(8, options.images)
    ours(clip, ids[:64], small, small)  # warm-up: kernels are loaded, memory is claimed
    total = len(clip.config.vision.last_third) * clip.config.vision.heads
    literal(clip, ids[:64], small, small, small, 1)
    our_lists, our_laps = ours(clip, ids, options.images, batch)
    some, heads = options.literal_images or options.images, options.literal_heads or total
    some = min(options.images, -(-some // batch) * batch)  # whole batches: the same images
    literal_lists, measured, scale = literal(clip, ids, options.images, batch, some, heads)
    their_laps = {name: value * scale[name] for name, value in measured.items()}
    our_lists = our_lists.flatten(0, 1)[:heads]
    same = int((our_lists == literal_lists).all(-1).sum())
    row = {
        "model": options.model,
        "images": options.images,
        "phrases": options.phrases,
        **{f"ours_{name}_s": round(value, 3) for name, value in our_laps.items()},
        "ours_s": round(sum(our_laps.values()), 3),
        **{f"literal_{name}_s": round(value, 3) for name, value in their_laps.items()},
        "literal_s": round(sum(their_laps.values()), 3),
        "ratio": round(sum(their_laps.values()) / sum(our_laps.values()), 1),
        "literal_images_measured": some,
        "literal_heads_measured": f"{heads}/{total}",
        "same_lists": f"{same}/{heads}",
        "same_phrases": round(float((our_lists == literal_lists).float().mean()), 4),
    }
    record(options.csv, [row], options.device)


if __name__ == "__main__":
    main()
