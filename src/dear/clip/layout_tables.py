"""The published layouts as tables: Hugging Face's, OpenAI's, PE-Core's, and OpenCLIP's with timm's towers.

Each function lists every tensor of a layout with its shape and the tensor of `Clip` that it becomes; which of
them exist is decided by the configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dear.clip.config import ClipConfig, TextConfig, TowerConfig, VisionConfig
from dear.clip.layouts import TOKEN_ROWS, TOKEN_TABLE, Entry

# Ours -> the published names inside one layer, or inside the pooling.
_HF_BLOCK = {
    "ln_1": "layer_norm1",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.out_proj",
    "ln_2": "layer_norm2",
    "mlp.up": "mlp.fc1",
    "mlp.down": "mlp.fc2",
}
_OPENAI_BLOCK = {
    "ln_1": "ln_1",
    "attn.o": "attn.out_proj",
    "ln_2": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_TIMM_BLOCK = {
    "ln_1": "norm1",
    "attn.o": "attn.proj",
    "ln_2": "norm2",
    "mlp.up": "mlp.fc1",
    "mlp.down": "mlp.fc2",
}
_HF_POOL = {"attn.o": "attention.out_proj", "norm": "layernorm", "mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"}
_OPENAI_POOL = {
    "attn.o": "attn.out_proj",
    "norm": "layernorm",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_TIMM_POOL = {"attn.q": "q", "attn.o": "proj", "norm": "norm", "mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"}


def huggingface(config: ClipConfig, rows: int | None = None) -> tuple[Entry, ...]:
    """Hugging Face's `CLIPModel`, `MetaClip2Model` or `SiglipModel`; `rows`: a shortened token table's."""
    vision, text, E = config.vision, config.text, config.embed_dim
    table = [
        *_scale(config),
        Entry(TOKEN_TABLE, (text.vocab if rows is None else rows, text.width), ("text.tokens",)),
        Entry(
            "text_model.embeddings.position_embedding.weight", (text.context, text.width), ("text.positions",)
        ),
        *_norm("text_model.final_layer_norm", "text.ln_final", text.width),
        *_image_ends(
            vision,
            patch="vision_model.embeddings.patch_embedding",
            class_token="vision_model.embeddings.class_embedding",
            positions="vision_model.embeddings.position_embedding.weight",
            pre="vision_model.pre_layrnorm",  # the published name has the slip
            post="vision_model.post_layernorm",
        ),
        *_blocks("vision_model.encoder.layers", "visual.blocks", vision, _HF_BLOCK),
        *_blocks("text_model.encoder.layers", "text.blocks", text, _HF_BLOCK),
    ]
    if text.projection_bias:  # SigLIP's name
        table += _linear("text_model.head", "text.proj", (E, text.width))
    else:
        table.append(
            Entry("text_projection.weight", (E, text.width), ("text.proj",), transposed=True),
        )
    if vision.projection:
        table.append(
            Entry("visual_projection.weight", (E, vision.width), ("visual.proj",), transposed=True),
        )
    if vision.pool == "attention":
        table.append(Entry("vision_model.head.probe", (vision.width,), ("visual.pool.probe",)))
        table += _packed("vision_model.head.attention.in_proj_{}", "visual.pool.attn", "qkv", vision.width)
        table += _named("vision_model.head", "visual.pool", vision, _HF_POOL)
    if rows is not None:
        table.append(Entry(TOKEN_ROWS, (text.vocab,), ("text.rows",), integer=True))
    return tuple(table)


def openai(config: ClipConfig, text_at: str = "") -> tuple[Entry, ...]:
    """OpenAI's state dict, which OpenCLIP and PE-Core share; OpenCLIP may put "text." before text names."""
    vision, E = config.vision, config.embed_dim
    table = [
        *_scale(config),
        *_openai_text(config, text_at),
        *_image_ends(
            vision,
            patch="visual.conv1",
            class_token="visual.class_embedding",
            positions="visual.positional_embedding",
            pre="visual.ln_pre",
            post="visual.ln_post",
        ),
        *_openai_blocks("visual.transformer.resblocks", "visual.blocks", vision),
        Entry("visual.proj", (vision.width, E), ("visual.proj",)),
    ]
    if vision.pool == "attention":
        table.append(Entry("visual.attn_pool.probe", (vision.width,), ("visual.pool.probe",)))
        table += _packed("visual.attn_pool.attn.in_proj_{}", "visual.pool.attn", "qkv", vision.width)
        table += _named("visual.attn_pool", "visual.pool", vision, _OPENAI_POOL)
    return tuple(table)


def timm(config: ClipConfig, text_at: str = "text.") -> tuple[Entry, ...]:
    """OpenCLIP's state dict around an image tower of timm."""
    vision, E = config.vision, config.embed_dim
    table = [
        *_scale(config),
        *_openai_text(config, text_at),
        *_image_ends(
            vision,
            patch="visual.trunk.patch_embed.proj",
            class_token="visual.trunk.cls_token",
            positions="visual.trunk.pos_embed",
            pre="visual.trunk.norm_pre",
            post="visual.trunk.norm",
        ),
        *_blocks("visual.trunk.blocks", "visual.blocks", vision, _TIMM_BLOCK),
    ]
    for layer in range(vision.layers):
        source = f"visual.trunk.blocks.{layer}.attn.qkv."
        table += _packed(source + "{}", f"visual.blocks.{layer}.attn", "qkv", vision.width)
    if vision.projection:
        table += _linear("visual.trunk.head", "visual.proj", (E, vision.width))
    if vision.pool == "attention":
        table.append(Entry("visual.trunk.attn_pool.latent", (vision.width,), ("visual.pool.probe",)))
        table += _packed("visual.trunk.attn_pool.kv.{}", "visual.pool.attn", "kv", vision.width)
        table += _named("visual.trunk.attn_pool", "visual.pool", vision, _TIMM_POOL)
    return tuple(table)


def _scale(config: ClipConfig) -> Iterator[Entry]:
    yield Entry("logit_scale", (), ("log_scale",))
    if config.logit_bias:
        yield Entry("logit_bias", (), ("pair_bias",))


def _openai_text(config: ClipConfig, at: str) -> Iterator[Entry]:
    text, E = config.text, config.embed_dim
    if text.projection_bias:
        yield from _linear(f"{at}text_projection", "text.proj", (E, text.width))
    else:
        yield Entry(f"{at}text_projection", (text.width, E), ("text.proj",))
    yield Entry(f"{at}token_embedding.weight", (text.vocab, text.width), ("text.tokens",))
    yield Entry(f"{at}positional_embedding", (text.context, text.width), ("text.positions",))
    yield from _norm(f"{at}ln_final", "text.ln_final", text.width)
    yield from _openai_blocks(f"{at}transformer.resblocks", "text.blocks", text)


def _image_ends(
    vision: VisionConfig, patch: str, class_token: str, positions: str, pre: str, post: str
) -> Iterator[Entry]:
    """What stands before and after the layers; the class token has a position of its own."""
    shape = (vision.width, 3, vision.patch_size, vision.patch_size)
    yield Entry(f"{patch}.weight", shape, ("visual.patch.weight",))
    if vision.patch_bias:
        yield Entry(f"{patch}.bias", (vision.width,), ("visual.patch.bias",))
    if vision.class_token:
        yield Entry(class_token, (vision.width,), ("visual.class_token",))
    yield Entry(positions, (vision.positions, vision.width), ("visual.positions",))
    if vision.pre_norm:
        yield from _norm(pre, "visual.ln_pre", vision.width)
    yield from _norm(post, "visual.ln_post", vision.width)


def _norm(source: str, ours: str, width: int) -> Iterator[Entry]:
    for part in ("weight", "bias"):
        yield Entry(f"{source}.{part}", (width,), (f"{ours}.{part}",))


def _linear(source: str, ours: str, shape: tuple[int, int]) -> Iterator[Entry]:
    """A projection with a bias, of which ours is the transpose."""
    yield Entry(f"{source}.weight", shape, (ours,), transposed=True)
    yield Entry(f"{source}.bias", shape[:1], (f"{ours}_bias",))


def _packed(source: str, ours: str, names: str, width: int) -> Iterator[Entry]:
    """Several square projections in one matrix; `{}` in `source` becomes "weight" or "bias"."""
    count = len(names)
    for part, shape in (("weight", (count * width, width)), ("bias", (count * width,))):
        yield Entry(source.format(part), shape, tuple(f"{ours}.{name}.{part}" for name in names))


def _openai_blocks(source: str, ours: str, tower: VisionConfig | TextConfig) -> Iterator[Entry]:
    yield from _blocks(source, ours, tower, _OPENAI_BLOCK)
    for layer in range(tower.layers):
        packed = f"{source}.{layer}.attn.in_proj_"
        yield from _packed(packed + "{}", f"{ours}.{layer}.attn", "qkv", tower.width)


def _blocks(source: str, ours: str, tower: TowerConfig, names: Mapping[str, str]) -> Iterator[Entry]:
    for layer in range(tower.layers):
        yield from _named(f"{source}.{layer}", f"{ours}.{layer}", tower, names)


def _named(source: str, ours: str, tower: TowerConfig, names: Mapping[str, str]) -> Iterator[Entry]:
    """The parts of a layer or of the pooling; a bias has the first number of its weight's shape."""
    D = tower.width
    square = dict.fromkeys(("attn.q", "attn.k", "attn.v", "attn.o"), (D, D))
    norms = dict.fromkeys(("ln_1", "ln_2", "norm"), (D,))
    sizes: dict[str, tuple[int, ...]] = {
        **norms, **square, "mlp.up": (tower.mlp, D), "mlp.down": (D, tower.mlp)
    }  # fmt: skip
    for name, published in names.items():
        for part, shape in (("weight", sizes[name]), ("bias", sizes[name][:1])):
            yield Entry(f"{source}.{published}.{part}", shape, (f"{ours}.{name}.{part}",))
