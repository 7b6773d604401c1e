"""One training step of DeAR against the same step written without its savings.

    python benchmarks/step.py --device cpu --batch 4 --classes 20 --repeats 3
    python benchmarks/step.py --device cuda --precision bfloat16 --batch 16 --classes 100 --csv step.csv

The plain step is what a step looks like in the field's code: a frozen image pass and an adapted one, each
through all layers; all 77 positions of every class text through all text layers; every row of the last
layer; full additive masks [H, Q, K]; mixed precision by autocast. It uses PyTorch's fused attention and
none of this project's modules, and its loss is checked against ours before the clock starts. All steps
include the backward pass and AdamW; they alternate, so that a busy machine slows all. On a GPU, "replayed"
is the step as the training loop runs it: recorded as a CUDA graph.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import dear
from dear.heads.roles import RoleMap
from dear.methods import Batch, DeAR
from dear.train.precision import backbone_in
from dear.train.replay import Replay

BOT, EOT = 49_406, 49_407


def token_ids(classes: int) -> Tensor:
    """Prompts of the usual length: 5 to 10 words between BOT and EOT."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.zeros(classes, 77, dtype=torch.long)
    for row in range(classes):
        words = int(torch.randint(5, 11, (), generator=generator))
        ids[row, 0] = BOT
        ids[row, 1 : 1 + words] = torch.randint(300, 40_000, (words,), generator=generator)
        ids[row, 1 + words] = EOT
    return ids


class PlainStep:
    """The step without savings, from a state dict."""

    def __init__(self, model: DeAR, ids: Tensor) -> None:
        self.w = {name: t.detach() for name, t in model.clip.state_dict().items()}
        self.shape, self.config = model.clip.config, model.config
        self.first, self.text_first = model.first, model.text_first
        self.ids = ids.to(model.clip.device)
        self.learned = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
        n = self.shape.vision.positions
        self.masks = {
            layer: mask.additive(n, self.ids.device, torch.float32) for layer, mask in model.masks.items()
        }
        with torch.no_grad():  # once a task, as everybody does
            self.frozen_text = F.normalize(self.text(False), dim=-1)

    def block(self, name: str, x: Tensor, heads: int, mask: Tensor | None, causal: bool) -> Tensor:
        """One transformer layer on x [B, N, D]."""

        def linear(y: Tensor, key: str) -> Tensor:
            return F.linear(y, self.w[f"{name}.{key}.weight"], self.w[f"{name}.{key}.bias"])

        def norm(y: Tensor, key: str) -> Tensor:
            return F.layer_norm(y, y.shape[-1:], self.w[f"{name}.{key}.weight"], self.w[f"{name}.{key}.bias"])

        y = norm(x, "ln_1")
        q, k, v = (linear(y, f"attn.{p}").unflatten(-1, (heads, -1)).transpose(1, 2) for p in "qkv")
        mask = None if mask is None else mask.to(q.dtype)
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        x = x + linear(z.transpose(1, 2).flatten(2), "attn.o")
        y = linear(norm(x, "ln_2"), "mlp.up")
        return x + linear(y * torch.sigmoid(1.702 * y), "mlp.down")

    def image(self, pixels: Tensor, adapted: bool) -> Tensor:
        """All rows of the last layer, normed."""
        w, v = self.w, self.shape.vision
        x = F.conv2d(pixels, w["visual.patch.weight"], stride=v.patch_size).flatten(2).transpose(1, 2)
        x = torch.cat([w["visual.class_token"].to(x.dtype).expand(len(x), 1, -1), x], 1)
        x = x + w["visual.positions"]
        x = F.layer_norm(x, x.shape[-1:], w["visual.ln_pre.weight"], w["visual.ln_pre.bias"])
        n, beta = x.shape[1], self.config.beta
        for layer in range(1, v.layers + 1):
            mask = None
            if adapted and layer >= self.first:
                raw = self.learned["tokens"].expand(len(x), -1, -1)
                if layer > self.first:
                    raw = beta * raw + (1 - beta) * x[:, n:]
                x = torch.cat([x[:, :n], raw], 1)
                mask = self.masks[layer]
            x = self.block(f"visual.blocks.{layer - 1}", x, v.heads, mask, False)
        return F.layer_norm(x, x.shape[-1:], w["visual.ln_post.weight"], w["visual.ln_post.bias"])

    def text(self, adapted: bool) -> Tensor:
        """Text features [C, E] from all 77 positions."""
        w, t, beta = self.w, self.shape.text, self.config.beta
        x = w["text.tokens"][self.ids] + w["text.positions"]
        count = self.learned["text_tokens"].shape[0] if adapted else 0
        for layer in range(1, t.layers + 1):
            if adapted and layer >= self.text_first:
                raw = self.learned["text_tokens"].expand(len(x), -1, -1)
                rest = x[:, 1:]
                if layer > self.text_first:
                    raw = beta * raw + (1 - beta) * x[:, 1 : 1 + count]
                    rest = x[:, 1 + count :]
                x = torch.cat([x[:, :1], raw, rest], 1)
            x = self.block(f"text.blocks.{layer - 1}", x, t.heads, None, True)
        x = F.layer_norm(x, x.shape[-1:], w["text.ln_final.weight"], w["text.ln_final.bias"])
        return x[torch.arange(len(x)), self.ids.argmax(-1) + count] @ w["text.proj"]

    def loss(self, pixels: Tensor, labels: Tensor) -> Tensor:
        """DeAR's loss (eq. 12)."""

        def unit(x: Tensor) -> Tensor:
            return F.normalize(x.float(), dim=-1)

        n = self.shape.vision.positions
        with torch.no_grad():
            frozen = unit(self.image(pixels, False)[:, 0] @ self.w["visual.proj"])
        x = self.image(pixels, True)
        f_cls = unit(x[:, 0] @ self.w["visual.proj"])
        f_attr = unit(x[:, n:] @ self.learned["p_attr"])
        texts = unit(self.text(True))
        alpha = self.learned["v"].softmax(0)
        scores = torch.cat([f_cls[:, None], f_attr], 1) @ texts.T * self.w["log_scale"].exp()
        ce = F.cross_entropy((alpha[:, None] * scores).sum(1), labels)
        reg = (1 - (f_cls * frozen).sum(-1)).mean() + (1 - (texts * self.frozen_text).sum(-1)).mean()
        return ce + self.config.lambda_reg * reg - self.config.lambda_fusion * alpha[0].log()


def measure(steps: dict[str, Callable[[], None]], repeats: int, device: torch.device) -> dict[str, float]:
    """Median seconds of each step; the steps take turns."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(3 if device.type == "cuda" else 1):
            step()
    for _ in range(repeats):
        for name, step in steps.items():
            wait()
            began = time.perf_counter()
            step()
            wait()
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", default="ViT-B-16", choices=dear.ClipConfig.names())
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--classes", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--precision", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--csv", type=Path, help="append the rows to this file")
    options = parser.parse_args()

    device = torch.device(options.device)
    torch.manual_seed(0)
    clip = dear.Clip(dear.ClipConfig.named(options.shape)).to(device)
    ids = token_ids(options.classes)
    names = [f"class {i}" for i in range(options.classes)]
    model = DeAR(clip, names, roles=RoleMap.table2(), ids=ids)
    size = clip.config.vision.image_size
    pixels = torch.randn(options.batch, 3, size, size, device=device)
    labels = torch.randint(0, options.classes, (options.batch,), device=device)
    plain = PlainStep(model, ids)
    with backbone_in(model, options.precision) as dtype:
        cast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
        with cast:
            theirs = plain.loss(pixels, labels).item()
        ours = model.loss(pixels, labels).total.item()
        tolerance = 1e-3 if dtype == torch.float32 else 5e-2
        if abs(ours - theirs) > tolerance * abs(theirs):
            raise SystemExit(f"the two steps disagree: {ours} and {theirs}")

        own = torch.optim.AdamW(model.parameters(), 1e-6)
        other = torch.optim.AdamW(plain.learned.values(), 1e-6)

        def our_step() -> None:
            own.zero_grad()
            model.loss(pixels, labels).total.backward()
            own.step()

        def plain_step() -> None:
            other.zero_grad()
            with cast:
                loss = plain.loss(pixels, labels)
            loss.backward()
            other.step()

        steps = {"plain": plain_step, "ours": our_step}
        if device.type == "cuda":
            batch = Batch(pixels, labels)
            replay = Replay(model, batch, lambda loss: loss)

            def replayed_step() -> None:
                replay(batch)
                own.step()

            steps["ours, replayed"] = replayed_step
        seconds = measure(steps, options.repeats, device)
    machine = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    rows = [
        {
            "date": datetime.date.today().isoformat(),
            "machine": f"{machine}, {torch.get_num_threads()} threads",
            "torch": torch.__version__,
            "dear": dear.__version__,
            "shape": options.shape,
            "batch": options.batch,
            "classes": options.classes,
            "precision": str(dtype).removeprefix("torch."),
            "step": name,
            "seconds": f"{value:.5f}",
            "speed-up": f"{seconds['plain'] / value:.2f}",
        }
        for name, value in seconds.items()
    ]
    for row in rows:
        print(", ".join(f"{key}: {value}" for key, value in row.items()))
    if options.csv:
        fresh = not options.csv.exists()
        with options.csv.open("a", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            if fresh:
                writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
