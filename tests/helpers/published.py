"""Writes a transformers CLIPModel in the four published layouts, without the package's own tables."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel


def random_model(vision: dict, text: dict, embed_dim: int, seed: int = 0, half: bool = False) -> CLIPModel:
    """A CLIPModel whose every tensor is random: no zero bias or unit norm may hide a swapped name."""
    torch.manual_seed(seed)
    config = CLIPConfig(vision_config=vision, text_config=text, projection_dim=embed_dim)
    model = CLIPModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            if half:  # values that half precision holds exactly, so that any container keeps them
                parameter.copy_(parameter.half().float())
    return model


def weights(model: CLIPModel) -> dict[str, Tensor]:
    """The model's learned tensors by Hugging Face name."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


_RENAMED = {
    r"^vision_model\.": "visual.",
    r"^text_model\.": "",
    r"encoder\.layers\.": "transformer.resblocks.",
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    r"mlp\.fc1": "mlp.c_fc",
    r"mlp\.fc2": "mlp.c_proj",
    r"self_attn\.out_proj": "attn.out_proj",
    r"self_attn\.q_proj\.": "attn.in_proj_",
    r"embeddings\.patch_embedding\.": "conv1.",
    r"embeddings\.(class_embedding|token_embedding)": r"\1",
    r"embeddings\.position_embedding\.weight": "positional_embedding",
    "pre_layrnorm": "ln_pre",
    "post_layernorm": "ln_post",
    "final_layer_norm": "ln_final",
    r"visual_projection\.weight": "visual.proj",
    r"text_projection\.weight": "text_projection",
}


def openai_state(model: CLIPModel) -> dict[str, Tensor]:
    """The same numbers under OpenAI's names: q, k and v in one matrix, projections the other way round."""
    state, source = {}, weights(model)
    for theirs, tensor in source.items():
        if re.search(r"\.[kv]_proj\.", theirs):
            continue
        name = theirs
        for pattern, new in _RENAMED.items():
            name = re.sub(pattern, new, name)
        if ".q_proj." in theirs:
            state[name] = torch.cat([source[theirs.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"])
        else:
            state[name] = tensor.T.contiguous() if "_projection." in theirs else tensor
    return state


def write_huggingface(model: CLIPModel, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()))
    safetensors.torch.save_file(
        {name: tensor.to(dtype).contiguous() for name, tensor in weights(model).items()},
        folder / "model.safetensors",
    )
    return folder


def openclip_config(model: CLIPModel) -> dict:
    vision, text = model.config.vision_config, model.config.text_config
    width = vision.hidden_size // vision.num_attention_heads
    cfg = {
        "embed_dim": model.config.projection_dim,
        "vision_cfg": {
            "image_size": vision.image_size,
            "layers": vision.num_hidden_layers,
            "width": vision.hidden_size,
            "patch_size": vision.patch_size,
            **({} if width == 64 else {"head_width": width}),
            **_ratio(vision),
        },
        "text_cfg": {
            "context_length": text.max_position_embeddings,
            "vocab_size": text.vocab_size,
            "width": text.hidden_size,
            "heads": text.num_attention_heads,
            "layers": text.num_hidden_layers,
            **_ratio(text),
        },
    }
    if vision.hidden_act == "quick_gelu":
        cfg["quick_gelu"] = True
    return {"model_cfg": cfg, "preprocess_cfg": {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.25, 0.3]}}


def _ratio(tower) -> dict:
    ratio = tower.intermediate_size / tower.hidden_size
    return {} if ratio == 4 else {"mlp_ratio": ratio}


def write_openclip(model: CLIPModel, folder: Path, dtype: torch.dtype = torch.float32, pickled=False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "open_clip_config.json").write_text(json.dumps(openclip_config(model)))
    state = {name: tensor.to(dtype) for name, tensor in openai_state(model).items()}
    if pickled:
        torch.save(state, folder / "open_clip_pytorch_model.bin")
    else:
        safetensors.torch.save_file(state, folder / "open_clip_model.safetensors")
    return folder


def write_state_dict(model: CLIPModel, path: Path, dtype: torch.dtype = torch.float32) -> Path:
    torch.save({name: tensor.to(dtype) for name, tensor in openai_state(model).items()}, path)
    return path


class QuickGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class ResBlock(nn.Module):
    def __init__(self, width: int, heads: int, mlp: int, quick: bool) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(width, heads)
        self.ln_1 = nn.LayerNorm(width)
        act = QuickGELU() if quick else nn.GELU()
        layers = [("c_fc", nn.Linear(width, mlp)), ("gelu", act), ("c_proj", nn.Linear(mlp, width))]
        self.mlp = nn.Sequential(OrderedDict(layers))
        self.ln_2 = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    def __init__(self, tower, quick: bool) -> None:
        super().__init__()
        self.width = tower.hidden_size
        self.layers = tower.num_hidden_layers
        size = (tower.hidden_size, tower.num_attention_heads, tower.intermediate_size, quick)
        self.resblocks = nn.Sequential(*[ResBlock(*size) for _ in range(self.layers)])

    def forward(self, x: Tensor) -> Tensor:
        return self.resblocks(x)


class VisualTransformer(nn.Module):
    def __init__(self, vision, embed_dim: int, quick: bool) -> None:
        super().__init__()
        width, patch = vision.hidden_size, vision.patch_size
        self.conv1 = nn.Conv2d(3, width, patch, stride=patch, bias=False)
        self.class_embedding = nn.Parameter(torch.empty(width))
        self.positional_embedding = nn.Parameter(torch.empty((vision.image_size // patch) ** 2 + 1, width))
        self.ln_pre = nn.LayerNorm(width)
        self.transformer = Transformer(vision, quick)
        self.ln_post = nn.LayerNorm(width)
        self.proj = nn.Parameter(torch.empty(width, embed_dim))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x).flatten(2).permute(0, 2, 1)
        x = torch.cat([self.class_embedding.expand(x.shape[0], 1, -1), x], dim=1) + self.positional_embedding
        x = self.transformer(self.ln_pre(x).permute(1, 0, 2))
        return self.ln_post(x[0]) @ self.proj


class Multimodal(nn.Module):
    """The module tree of OpenAI's archives, with the three sizes they keep as buffers."""

    def __init__(self, config, quick: bool) -> None:
        super().__init__()
        text = config.text_config
        self.visual = VisualTransformer(config.vision_config, config.projection_dim, quick)
        self.transformer = Transformer(text, quick)
        self.token_embedding = nn.Embedding(text.vocab_size, text.hidden_size)
        self.positional_embedding = nn.Parameter(torch.empty(text.max_position_embeddings, text.hidden_size))
        self.ln_final = nn.LayerNorm(text.hidden_size)
        self.text_projection = nn.Parameter(torch.empty(text.hidden_size, config.projection_dim))
        self.logit_scale = nn.Parameter(torch.empty(()))
        self.register_buffer("input_resolution", torch.tensor(config.vision_config.image_size))
        self.register_buffer("context_length", torch.tensor(text.max_position_embeddings))
        self.register_buffer("vocab_size", torch.tensor(text.vocab_size))

    def forward(self, image: Tensor) -> Tensor:
        return self.visual(image)


def write_torchscript(model: CLIPModel, path: Path, dtype: torch.dtype = torch.float32) -> Path:
    quick = model.config.vision_config.hidden_act == "quick_gelu"
    with torch.device("meta"):
        tree = Multimodal(model.config, quick)
    notes = {"input_resolution": 224, "context_length": 77, "vocab_size": 49408}
    state = {name: tensor.to(dtype) for name, tensor in openai_state(model).items()}
    state |= {name: torch.tensor(value) for name, value in notes.items()}
    tree.load_state_dict(state, assign=True)
    torch.jit.save(torch.jit.script(tree.eval()), str(path))
    return path
