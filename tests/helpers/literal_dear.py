"""DeAR written out step by step, as the oracle of the tests. It shares no code with `dear`.

It takes a state dict and plain options, runs a separate frozen pass, all 77 text tokens, full masks
[H, Q, K] and a Python loop over heads, and sums every loss part as its equation stands.
"""

from __future__ import annotations

import math

import torch

INF = float("-inf")


def norm(x, weight, bias, eps):
    mean = x.mean(-1, keepdim=True)
    var = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(var + eps) * weight + bias


def block(w, name, x, heads, mask, quick, eps):
    """One transformer layer; mask [H, Q, K]."""
    p = lambda key: w[f"{name}.{key}"]  # noqa: E731
    y = norm(x, p("ln_1.weight"), p("ln_1.bias"), eps)
    d = x.shape[-1] // heads
    out = torch.zeros_like(x) + p("attn.o.bias")
    for h in range(heads):
        rows = slice(h * d, (h + 1) * d)
        q = y @ p("attn.q.weight")[rows].T + p("attn.q.bias")[rows]
        k = y @ p("attn.k.weight")[rows].T + p("attn.k.bias")[rows]
        v = y @ p("attn.v.weight")[rows].T + p("attn.v.bias")[rows]
        scores = q @ k.transpose(1, 2) / math.sqrt(d) + mask[h]
        out = out + torch.softmax(scores, -1) @ v @ p("attn.o.weight")[:, rows].T
    x = x + out
    y = norm(x, p("ln_2.weight"), p("ln_2.bias"), eps) @ p("mlp.up.weight").T + p("mlp.up.bias")
    y = y * torch.sigmoid(1.702 * y) if quick else 0.5 * y * (1 + torch.erf(y / math.sqrt(2)))
    return x + y @ p("mlp.down.weight").T + p("mlp.down.bias")


def role_mask(kind, concept, attributes, originals, isolation):
    """Eq. 8 and 9 for one head, [Q, K], one cell at a time."""
    total = originals + len(attributes)
    mask = torch.zeros(total, total, dtype=torch.float64)
    for i in range(total):
        for j in range(total):
            i_attr, j_attr = i >= originals, j >= originals
            owner = attributes[j - originals] if j_attr else None
            if kind == "core":
                hidden = j_attr and owner != concept
            elif kind == "mixed":
                hidden = False
            elif isolation == "readonly":
                hidden = not i_attr and j_attr
            else:
                hidden = i_attr != j_attr
            if hidden:
                mask[i, j] = INF
    return mask


def image_tower(
    w,
    pixels,
    *,
    layers,
    heads,
    patch,
    quick,
    eps,
    tokens=None,
    first=None,
    beta=None,
    masks=None,
    start="free",
    early=None,
    stop=None,
):
    """All tokens of the last layer. tokens: {layer: [T, D]} learned tokens; masks: {layer: [H, Q, K]}.

    early: {layer: [T', D]} free tokens of layers before `first`; stop: return the input of this layer.
    """
    b, _, size, _ = pixels.shape
    side = size // patch
    grid = []
    for r in range(side):
        for c in range(side):
            cell = pixels[:, :, r * patch : (r + 1) * patch, c * patch : (c + 1) * patch].reshape(b, -1)
            grid.append(cell @ w["visual.patch.weight"].reshape(w["visual.patch.weight"].shape[0], -1).T)
    x = torch.stack([w["visual.class_token"].expand(b, -1), *grid], 1) + w["visual.positions"]
    x = norm(x, w["visual.ln_pre.weight"], w["visual.ln_pre.bias"], eps)
    n = x.shape[1]
    for layer in range(1, layers + 1):
        if layer == stop:
            return x
        if early is not None and layer in early:
            x = torch.cat([x[:, :n], early[layer].expand(b, -1, -1)], 1)
        if tokens is not None and layer == first:
            x = x[:, :n]  # early tokens are gone
        if tokens is not None and layer >= first:
            raw = tokens[layer].expand(b, -1, -1)
            if start == "class":  # the class token of each image on its way into layer J of the frozen tower
                shape = {"layers": layers, "heads": heads, "patch": patch, "quick": quick, "eps": eps}
                raw = raw + image_tower(w, pixels, **shape, stop=first)[:, :1].detach()
            mixed = raw if layer == first else beta * raw + (1 - beta) * x[:, n:]  # eq. 5
            x = torch.cat([x[:, :n], mixed], 1)
            mask = masks[layer]
        else:
            mask = torch.zeros(heads, x.shape[1], x.shape[1], dtype=x.dtype)
        x = block(w, f"visual.blocks.{layer - 1}", x, heads, mask, quick, eps)
    return norm(x, w["visual.ln_post.weight"], w["visual.ln_post.bias"], eps)


def text_tower(w, ids, *, layers, heads, quick, eps, tokens=None, first=None, beta=None):
    """Features [C, E] from full rows of ids [C, 77]."""
    x = w["text.tokens"][ids] + w["text.positions"][: ids.shape[1]]
    c, _n = ids.shape
    count = 0 if tokens is None else tokens[first].shape[0]
    for layer in range(1, layers + 1):
        if tokens is not None and layer >= first:
            raw = tokens[layer].expand(c, -1, -1)
            if layer == first:
                x = torch.cat([x[:, :1], raw, x[:, 1:]], 1)
            else:  # eq. 6
                x = torch.cat([x[:, :1], beta * raw + (1 - beta) * x[:, 1 : 1 + count], x[:, 1 + count :]], 1)
        length = x.shape[1]
        causal = torch.full((length, length), INF, dtype=x.dtype).triu(1)
        x = block(w, f"text.blocks.{layer - 1}", x, heads, causal.expand(heads, -1, -1), quick, eps)
    x = norm(x, w["text.ln_final.weight"], w["text.ln_final.bias"], eps)
    rows = [x[i, int(ids[i].argmax()) + count] for i in range(c)]
    return torch.stack(rows) @ w["text.proj"]


def cosine(a, b):
    return (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))


def step(w, config, learned, roles, ids, pixels, labels, o):
    """The whole step.

    w: state dict; config: shape; learned: dict of tensors; roles: {(layer, head): (kind, concept)};
    o: dict of options. Returns (fused logits, decoupled logits, parts, total).
    """
    vision, text = config.vision, config.text
    first, text_first, beta = o["first"], o["text_first"], o["beta"]
    attributes = o["attributes"]
    n = (vision.image_size // vision.patch_size) ** 2 + 1

    def sets(t, start, stop):
        return dict.fromkeys(range(start, stop + 1), t)

    masks = {}
    for layer in range(first, vision.layers + 1):
        per_head = []
        for h in range(vision.heads):
            kind, concept = roles[layer, h]
            if kind == "core" and concept not in attributes:
                kind = "other"
            per_head.append(role_mask(kind, concept, attributes, n, o["isolation"]))
        masks[layer] = torch.stack(per_head)
    v_shape = {
        "layers": vision.layers,
        "heads": vision.heads,
        "patch": vision.patch_size,
        "quick": vision.activation == "quick_gelu",
        "eps": vision.eps,
    }
    t_shape = {
        "layers": text.layers,
        "heads": text.heads,
        "quick": text.activation == "quick_gelu",
        "eps": text.eps,
    }
    early = None
    if "early_tokens" in learned:
        begin = first - len(learned["early_tokens"])
        early = {begin + i: tokens for i, tokens in enumerate(learned["early_tokens"])}
    frozen = image_tower(w, pixels, **v_shape)[:, 0] @ w["visual.proj"]
    x = image_tower(
        w,
        pixels,
        tokens=sets(learned["tokens"], first, vision.layers),
        first=first,
        beta=beta,
        masks=masks,
        start=o["start"],
        early=early,
        **v_shape,
    )
    f_cls = x[:, 0] @ w["visual.proj"]  # eq. 10
    f_attr = []
    for a in range(len(attributes)):  # eq. 11
        f_attr.append(x[:, n + a] @ learned["p_attr"])
    w_frozen = text_tower(w, ids, **t_shape)
    texts = text_tower(
        w,
        ids,
        tokens=sets(learned["text_tokens"], text_first, text.layers),
        first=text_first,
        beta=o["text_beta"],
        **t_shape,
    )
    tau = torch.exp(w["log_scale"])
    alpha = torch.exp(learned["v"]) / torch.exp(learned["v"]).sum()

    def vote(f, mean):  # eq. 17; with a mean [E], cos(f, w) - mean . w / |w|
        return tau * (cosine(f[:, None], texts[None]) - (texts @ mean) / texts.norm(dim=-1))

    decoupled = vote(f_cls, o["mean"])
    fused = alpha[0] * decoupled
    for a, f in enumerate(f_attr):  # eq. 19
        fused = fused + alpha[a + 1] * vote(f, o["mean"])
    ce = torch.stack(
        [torch.logsumexp(fused[i], 0) - fused[i, int(label)] for i, label in enumerate(labels)]
    ).mean()
    share = o["class_ce"]
    alone = torch.stack(
        [torch.logsumexp(decoupled[i], 0) - decoupled[i, int(label)] for i, label in enumerate(labels)]
    ).mean()
    parts = {
        **({"ce_class": alone} if share else {}),
        "ce": ce,
        "reg_image": (1 - cosine(f_cls, frozen)).mean(),
        "reg_text": (1 - cosine(texts, w_frozen)).mean(),
        "fusion": -torch.log(alpha[0]),
    }
    total = (
        (1 - share) * ce
        + share * alone
        + o["lambda_reg"] * (parts["reg_image"] + parts["reg_text"])
        + o["lambda_fusion"] * parts["fusion"]
    )
    return fused, decoupled, parts, total
