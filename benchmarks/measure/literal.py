"""DeAR's training step without a single saving, as steps look in the field's code: to compare ours with.

A frozen image pass and an adapted one, each through all layers; all 77 positions of every class text
through all text layers; every row of the last layer; full additive masks [H, Q, K]; mixed precision by
autocast. It uses PyTorch's fused attention and none of this project's modules.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dear.clip.model import Clip
from dear.methods import DeAR


class LiteralStep:
    """The step from a state dict: `loss`, then backward and an optimizer over `learned`.

    Args:
        model: where weights, masks and the start of the learned tensors are taken from.
        ids: token ids [C, 77].
        clip: the weights in float32, where the model reads a copy in another precision.
    """

    def __init__(self, model: DeAR, ids: Tensor, clip: Clip | None = None) -> None:
        weights = (model.clip if clip is None else clip).state_dict()
        self.w = {name: t.detach() for name, t in weights.items()}
        self.shape, self.config = model.clip.config, model.config
        self.first, self.text_first = model.first, model.text_first
        self.ids = ids.to(model.clip.device)
        self.learned = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
        n = self.shape.vision.positions
        self.masks = {
            layer: mask.additive(n, self.ids.device, torch.float32) for layer, mask in model.masks.items()
        }
        with torch.no_grad():  # once per task, as everybody does
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
        features: Tensor = x[torch.arange(len(x)), self.ids.argmax(-1) + count] @ w["text.proj"]
        return features

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
