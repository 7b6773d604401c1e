"""A plain-loop CLIP tower in numpy: one head, one query, one key at a time. Shares no code with ours."""

from __future__ import annotations

import math

import numpy as np


def layer_norm(x, weight, bias, eps):
    mean = x.mean(-1, keepdims=True)
    var = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(var + eps) * weight + bias


def activation(x, kind):
    if kind == "quick_gelu":
        return x / (1 + np.exp(-1.702 * x))
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def attention(x, w, prefix, heads, mask=None, gate=None, causal=False, dq=None, dv=None):
    """x [N, D] of one image; mask [H, N, N]; gate [H]; dq, dv [H*d, D] added to the projections."""
    n, width = x.shape
    d = width // heads
    wq, wv = w[f"{prefix}.q.weight"], w[f"{prefix}.v.weight"]
    if dq is not None:
        wq = wq + dq
    if dv is not None:
        wv = wv + dv
    q = x @ wq.T + w[f"{prefix}.q.bias"]
    k = x @ w[f"{prefix}.k.weight"].T + w[f"{prefix}.k.bias"]
    v = x @ wv.T + w[f"{prefix}.v.bias"]
    out = np.zeros((n, width))
    for h in range(heads):
        part = slice(h * d, (h + 1) * d)
        for i in range(n):
            scores = np.full(n, -np.inf)
            for j in range(n):
                if causal and j > i:
                    continue
                scores[j] = q[i, part] @ k[j, part] / math.sqrt(d)
                if mask is not None:
                    scores[j] += mask[h, i, j]
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            out[i, part] = (1.0 if gate is None else gate[h]) * (weights @ v[:, part])
    return out @ w[f"{prefix}.o.weight"].T + w[f"{prefix}.o.bias"]


def block(x, w, prefix, config, **changes):
    x = x + attention(
        layer_norm(x, w[f"{prefix}.ln_1.weight"], w[f"{prefix}.ln_1.bias"], config.eps),
        w,
        f"{prefix}.attn",
        config.heads,
        **changes,
    )
    h = layer_norm(x, w[f"{prefix}.ln_2.weight"], w[f"{prefix}.ln_2.bias"], config.eps)
    h = activation(h @ w[f"{prefix}.mlp.up.weight"].T + w[f"{prefix}.mlp.up.bias"], config.activation)
    return x + h @ w[f"{prefix}.mlp.down.weight"].T + w[f"{prefix}.mlp.down.bias"]


def embed_image(pixels, w, config):
    """pixels [3, S, S] -> [N, D]."""
    p, side = config.patch_size, config.side
    kernel = w["visual.patch.weight"].reshape(config.width, -1)
    rows = [w["visual.class_token"]]
    for r in range(side):
        for c in range(side):
            patch = pixels[:, r * p : (r + 1) * p, c * p : (c + 1) * p].reshape(-1)
            rows.append(kernel @ patch)
    x = np.stack(rows) + w["visual.positions"]
    return layer_norm(x, w["visual.ln_pre.weight"], w["visual.ln_pre.bias"], config.eps)


def visual(pixels, w, config, changes=None):
    """Feature [E] of one image; `changes` maps a layer (from 1) to what differs in its attention."""
    x = embed_image(pixels, w, config)
    for layer in range(1, config.layers + 1):
        x = block(x, w, f"visual.blocks.{layer - 1}", config, **(changes or {}).get(layer, {}))
    return (
        layer_norm(x[0], w["visual.ln_post.weight"], w["visual.ln_post.bias"], config.eps) @ w["visual.proj"]
    )


def text(ids, w, config):
    """Feature [E] of one text of token ids [T], all T columns computed."""
    x = w["text.tokens"][ids] + w["text.positions"][: len(ids)]
    for layer in range(config.layers):
        x = block(x, w, f"text.blocks.{layer}", config, causal=True)
    end = x[int(np.argmax(ids))]
    return layer_norm(end, w["text.ln_final.weight"], w["text.ln_final.bias"], config.eps) @ w["text.proj"]
