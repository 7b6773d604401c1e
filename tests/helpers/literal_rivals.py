"""Rivals written out step by step, as oracles of the tests. They share no code with `dear`.

Each takes a state dict, the shapes, learned tensors and plain options; runs all 77 text columns, a separate
frozen pass, Python loops over heads (`literal_dear.block`), and sums every loss as its formula stands.
"""

from __future__ import annotations

import math

import torch
from literal_dear import INF, block, cosine, norm


def causal(length, heads):
    return torch.full((length, length), INF, dtype=torch.float64).triu(1).expand(heads, -1, -1)


def text_features(w, ids, c, x=None, change=None, shift=0):
    """Features [C, E]; x: embedded rows instead of those of `ids`; change(layer, x) acts before a layer."""
    quick = c.activation == "quick_gelu"
    x = w["text.tokens"][ids] if x is None else x
    x = x + w["text.positions"][: x.shape[1]]
    for layer in range(1, c.layers + 1):
        x = x if change is None else change(layer, x)
        x = block(w, f"text.blocks.{layer - 1}", x, c.heads, causal(x.shape[1], c.heads), quick, c.eps)
    x = norm(x, w["text.ln_final.weight"], w["text.ln_final.bias"], c.eps)
    return torch.stack([x[i, int(row.argmax()) + shift] for i, row in enumerate(ids)]) @ w["text.proj"]


def image_tokens(w, pixels, c, extra=None, change=None):
    """All tokens after the last norm; extra [T, D] stand behind the patches before the first norm."""
    b, patch = len(pixels), c.patch_size
    side = c.image_size // patch
    rows = [w["visual.class_token"].expand(b, -1)]
    kernel = w["visual.patch.weight"].flatten(1)
    for r in range(side):
        for s in range(side):
            cell = pixels[:, :, r * patch : (r + 1) * patch, s * patch : (s + 1) * patch]
            rows.append(cell.reshape(b, -1) @ kernel.T)
    x = torch.stack(rows, 1) + w["visual.positions"]
    if extra is not None:
        x = torch.cat([x, extra.expand(b, -1, -1)], 1)
    x = norm(x, w["visual.ln_pre.weight"], w["visual.ln_pre.bias"], c.eps)
    for layer in range(1, c.layers + 1):
        x = x if change is None else change(layer, x)
        mask = torch.zeros(c.heads, x.shape[1], x.shape[1], dtype=x.dtype)
        x = block(w, f"visual.blocks.{layer - 1}", x, c.heads, mask, c.activation == "quick_gelu", c.eps)
    return norm(x, w["visual.ln_post.weight"], w["visual.ln_post.bias"], c.eps)


def logits_of(w, images, texts):
    return torch.exp(w["log_scale"]) * cosine(images[:, None], texts[None])


def cross_entropy(logits, labels):
    rows = [torch.logsumexp(logits[i], 0) - logits[i, int(y)] for i, y in enumerate(labels)]
    return torch.stack(rows).mean()


def replace_words(vectors):
    """In layers 2 to J the vectors behind BOT are replaced by the layer's own."""

    def change(layer, x):
        if not 2 <= layer <= len(vectors):
            return x
        layer_tokens = vectors[layer - 1].expand(len(x), -1, -1)
        return torch.cat([x[:, :1], layer_tokens, x[:, 1 + layer_tokens.shape[1] :]], 1)

    return change


def replace_last(tokens):
    """In layers 2 to J the last tokens are replaced by the layer's own."""

    def change(layer, x):
        if not 2 <= layer <= len(tokens):
            return x
        layer_tokens = tokens[layer - 1].expand(len(x), -1, -1)
        return torch.cat([x[:, : x.shape[1] - layer_tokens.shape[1]], layer_tokens], 1)

    return change


def with_context(w, ids, context):
    rows = w["text.tokens"][ids]
    return torch.cat([rows[:, :1], context.expand(len(ids), -1, -1), rows[:, 1 + len(context) :]], 1)


def coop(w, c, p, ids, pixels, labels, o):
    texts = text_features(w, ids, c.text, with_context(w, ids, p["ctx"]))
    images = image_tokens(w, pixels, c.vision)[:, 0] @ w["visual.proj"]
    logits = logits_of(w, images, texts)
    return {"default": logits}, cross_entropy(logits, labels)


def maple(w, c, p, ids, pixels, labels, o):
    vectors = list(p["vectors"])
    tokens = [v @ p["couple"][i].T + p["couple_bias"][i] for i, v in enumerate(vectors)]
    texts = text_features(w, ids, c.text, with_context(w, ids, vectors[0]), replace_words(vectors))
    x = image_tokens(w, pixels, c.vision, tokens[0], replace_last(tokens))
    logits = logits_of(w, x[:, 0] @ w["visual.proj"], texts)
    return {"default": logits}, cross_entropy(logits, labels)


def promptsrc(w, c, p, ids, pixels, labels, o):
    vectors, tokens = list(p["vectors"]), list(p["tokens"])
    texts = text_features(w, ids, c.text, with_context(w, ids, vectors[0]), replace_words(vectors))
    images = image_tokens(w, pixels, c.vision, tokens[0], replace_last(tokens))[:, 0] @ w["visual.proj"]
    logits = logits_of(w, images, texts)
    frozen = image_tokens(w, pixels, c.vision)[:, 0] @ w["visual.proj"]
    ways = [text_features(w, way, c.text) for way in o["templates"]]
    teacher = sum(ways) / len(ways)
    q = torch.softmax(logits_of(w, frozen, teacher), -1)
    kl = 0
    for i in range(len(q)):
        for j in range(q.shape[1]):
            kl = kl + q[i, j] * (torch.log(q[i, j]) - torch.log_softmax(logits[i], 0)[j])
    unit = lambda t: t / t.norm(dim=-1, keepdim=True)  # noqa: E731
    loss = cross_entropy(logits, labels) + 25 * (unit(texts) - unit(teacher)).abs().mean()
    loss = loss + 10 * (unit(images) - unit(frozen)).abs().mean() + kl / q.numel()
    return {"default": logits}, loss


def mmrl(w, c, p, ids, pixels, labels, o):
    def tokens(name):
        weight, bias = p[f"to_{name}"], p[f"to_{name}_bias"]
        return [p["space"] @ weight[i].T + bias[i] for i in range(len(weight))]

    return _mmrl(w, c, tokens, p["proj"], 1.0, ids, pixels, labels, o)


def mmrlpp(w, c, p, ids, pixels, labels, o):
    def tokens(name):
        shared, bias = p[f"to_{name}"], p[f"to_{name}_bias"]
        a, b = p[f"{name}_a"], p[f"{name}_b"]
        return [p["space"] @ (shared + a[i] @ b[i]).T + bias[i] for i in range(len(bias))]

    proj = w["visual.proj"] + p["proj_a"] @ p["proj_b"]
    return _mmrl(w, c, tokens, proj, o["beta"], ids, pixels, labels, o)


def _mmrl(w, c, tokens, proj, beta, ids, pixels, labels, o):
    def behind_first(layer_tokens, first):
        """Tokens behind the class token or BOT from layer `first` on."""
        count = layer_tokens[0].shape[0]

        def change(layer, x):
            if layer < first:
                return x
            fresh = layer_tokens[layer - first].expand(len(x), -1, -1)
            if layer == first:
                return torch.cat([x[:, :1], fresh, x[:, 1:]], 1)
            mixed = beta * fresh + (1 - beta) * x[:, 1 : 1 + count]
            return torch.cat([x[:, :1], mixed, x[:, 1 + count :]], 1)

        return change

    image, text = tokens("image"), tokens("text")
    first, text_first = c.vision.layers - len(image) + 1, c.text.layers - len(text) + 1
    k = image[0].shape[0]
    texts = text_features(w, ids, c.text, change=behind_first(text, text_first), shift=k)
    x = image_tokens(w, pixels, c.vision, change=behind_first(image, first))
    f_c, f_r = x[:, 0] @ w["visual.proj"], sum(x[:, 1 + i] for i in range(k)) / k @ proj
    frozen = image_tokens(w, pixels, c.vision)[:, 0] @ w["visual.proj"]
    s_c, s_r = logits_of(w, f_c, texts), logits_of(w, f_r, texts)
    alpha = o["alpha"]
    loss = alpha * cross_entropy(s_c, labels) + (1 - alpha) * cross_entropy(s_r, labels)
    agreement = (1 - cosine(f_c, frozen)).mean()
    agreement = agreement + (1 - cosine(texts, text_features(w, ids, c.text))).mean()
    return {"fused": alpha * s_c + (1 - alpha) * s_r, "decoupled": s_c}, loss + o["weight"] * agreement


def clip_lora(w, c, p, ids, pixels, labels, o):
    w = dict(w)
    for name, prefix, tower in (("image", "visual", c.vision), ("text", "text", c.text)):
        for layer in range(tower.layers):
            for i, which in enumerate(("q", "k", "v")):
                a, b = p[f"{name}_down"][layer, i], p[f"{name}_up"][layer, i].flatten(0, 1)
                key = f"{prefix}.blocks.{layer}.attn.{which}.weight"
                w[key] = w[key] + b @ a / math.sqrt(o["rank"])
    images = image_tokens(w, pixels, c.vision)[:, 0] @ w["visual.proj"]
    logits = logits_of(w, images, text_features(w, ids, c.text))
    return {"default": logits}, cross_entropy(logits, labels)


def sgd(p, gradient, lr, decay):
    """The first step of SGD: momentum has nothing to remember."""
    return p - lr * (gradient + decay * p)


def adamw(p, gradient, lr, decay):
    """The first step of AdamW: both moments are the gradient's own after correction."""
    return p * (1 - lr * decay) - lr * gradient / (gradient.abs() + 1e-8)
