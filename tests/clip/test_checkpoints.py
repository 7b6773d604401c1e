"""Every published layout gives the features transformers computes from the same numbers."""

from __future__ import annotations

import json

import numpy as np
import published
import pytest
import safetensors.torch
import torch
from PIL import Image
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

import dear
from dear.clip.checkpoint import read_checkpoint, save_hf
from dear.clip.config import ClipConfig, TextConfig, VisionConfig
from dear.clip.config_huggingface import from_huggingface
from dear.clip.config_openclip import from_openclip
from dear.clip.model import Clip
from dear.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

REAL_TEXT = {"hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8, "intermediate_size": 2048}
REAL_VISION = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}
ODD_TEXT = {
    "hidden_size": 320,
    "num_hidden_layers": 7,
    "num_attention_heads": 5,
    "intermediate_size": 333,
    "vocab_size": 99,
    "eos_token_id": 98,
    "max_position_embeddings": 19,
}
ODD_VISION = {
    "hidden_size": 320,
    "num_hidden_layers": 7,
    "num_attention_heads": 5,
    "intermediate_size": 333,
    "image_size": 45,
    "patch_size": 15,
}
SIZES = {
    "ViT-B/16, QuickGELU": (REAL_VISION | {"patch_size": 16}, REAL_TEXT, 512, "quick_gelu"),
    "ViT-B/32 of two layers, GELU": (
        *(REAL_VISION | {"patch_size": 32, "num_hidden_layers": 2}, REAL_TEXT | {"num_hidden_layers": 2}),
        *(512, "gelu"),
    ),
    "odd, QuickGELU": (ODD_VISION, ODD_TEXT, 37, "quick_gelu"),
    "odd, GELU": (ODD_VISION, ODD_TEXT, 37, "gelu"),
}
WRITERS = {
    "huggingface": lambda model, folder: published.write_huggingface(model, folder, torch.float16),
    "openclip": lambda model, folder: published.write_openclip(model, folder, torch.float16),
    "torchscript": lambda model, folder: published.write_torchscript(model, folder / "a.pt", torch.float16),
    "openai": lambda model, folder: published.write_state_dict(model, folder / "ViT.pt", torch.float16),
}


def features(model: CLIPModel) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images, ids, and what transformers makes of them."""
    random = torch.Generator().manual_seed(1)
    size, text = model.config.vision_config.image_size, model.config.text_config
    pixels = torch.randn(2, 3, size, size, generator=random)
    ids = torch.randint(1, text.vocab_size - 2, (3, text.max_position_embeddings), generator=random)
    for row, end in enumerate((4, 11, text.max_position_embeddings - 1)):
        ids[row, end] = text.vocab_size - 1
        ids[row, end + 1 :] = 0
    with torch.no_grad():
        images, texts = model.get_image_features(pixel_values=pixels), model.get_text_features(input_ids=ids)
    return pixels, ids, getattr(images, "pooler_output", images), getattr(texts, "pooler_output", texts)


@pytest.fixture(scope="module", params=list(SIZES))
def reference(request):
    """A random CLIPModel and its features; values are exact in half precision."""
    vision, text, embed_dim, activation = SIZES[request.param]
    act = {"hidden_act": activation}
    model = published.random_model(vision | act, text | act, embed_dim, half=True)
    return model, features(model)


@pytest.mark.parametrize("layout", list(WRITERS))
def test_features_are_those_of_transformers(reference, layout, tmp_path):
    model, (pixels, ids, images, texts) = reference
    activation = model.config.vision_config.hidden_act
    source = WRITERS[layout](model, tmp_path)
    explicit = activation if (layout, activation) == ("openai", "gelu") else None
    clip = dear.load(source, activation=explicit)
    assert clip.config.vision.activation == clip.config.text.activation == activation
    assert (clip.encode_image(pixels) - images).abs().max() < 1e-4
    assert (clip.encode_text(ids) - texts).abs().max() < 1e-4
    assert clip.logit_scale == pytest.approx(model.logit_scale.exp().item(), rel=1e-6)
    assert not any(p.requires_grad for p in clip.parameters())
    assert not clip.training
    for file in tmp_path.iterdir():  # half a gigabyte each at the real sizes
        file.unlink()


def test_another_activation_would_have_been_seen(reference, tmp_path):
    model, (pixels, _, images, _) = reference
    other = {"gelu": "quick_gelu", "quick_gelu": "gelu"}[model.config.vision_config.hidden_act]
    file = WRITERS["openai"](model, tmp_path)
    clip = dear.load(file, activation=other)
    file.unlink()
    assert (clip.encode_image(pixels) - images).abs().max() > 1e-3


@pytest.fixture(scope="module")
def odd_sized():
    vision, text, embed_dim, activation = SIZES["odd, QuickGELU"]
    act = {"hidden_act": activation}
    return published.random_model(vision | act, text | act, embed_dim, half=True)


def test_the_fingerprint_is_the_same_in_every_layout_and_precision(odd_sized, tmp_path):
    sources = [
        writer(odd_sized, tmp_path / name) for name, writer in _writers_in_own_folder(tmp_path).items()
    ]
    sources.append(published.write_huggingface(odd_sized, tmp_path / "float32"))
    sources.append(published.write_huggingface(odd_sized, tmp_path / "float64", torch.float64))
    loaded = [dear.load(source) for source in sources]
    assert len({clip.fingerprint for clip in loaded}) == 1
    openclip = loaded.pop(list(WRITERS).index("openclip"))  # is written with another mean and deviation
    assert len({clip.identity for clip in loaded}) == 1
    assert openclip.identity != loaded[0].identity


def _writers_in_own_folder(tmp_path):
    for name in WRITERS:
        (tmp_path / name).mkdir()
    return WRITERS


def test_the_fingerprint_knows_the_visual_weights_alone(odd_sized, tmp_path):
    first = dear.load(published.write_huggingface(odd_sized, tmp_path / "a")).fingerprint
    state = published.weights(odd_sized)
    cases = {
        "text_projection.weight": True,
        "logit_scale": True,
        "visual_projection.weight": False,
        "vision_model.encoder.layers.3.layer_norm2.bias": False,
    }
    for name, same in cases.items():
        changed = {k: (v + 0.25 if k == name else v).contiguous() for k, v in state.items()}
        safetensors.torch.save_file(changed, tmp_path / "a" / "model.safetensors")
        assert (dear.load(tmp_path / "a").fingerprint == first) is same, name


def test_half_precision_keeps_the_identity_and_the_norms(odd_sized, tmp_path):
    pixels, ids, images, texts = features(odd_sized)
    folder = published.write_huggingface(odd_sized, tmp_path)
    full, half = dear.load(folder), dear.load(folder, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert half.visual.ln_post.weight.dtype == torch.float32
    assert half.fingerprint == full.fingerprint
    assert half.identity == full.identity
    assert half.logit_scale == full.logit_scale
    assert torch.nn.functional.cosine_similarity(half.encode_image(pixels).float(), images).min() > 0.99
    assert torch.nn.functional.cosine_similarity(half.encode_text(ids).float(), texts).min() > 0.99


def test_pickled_and_sharded_weights_read_the_same(odd_sized, tmp_path):
    expected = dear.load(published.write_huggingface(odd_sized, tmp_path / "plain")).state_dict()
    state = {k: v.contiguous() for k, v in published.weights(odd_sized).items()}
    state["text_model.embeddings.position_ids"] = torch.arange(19)[None]  # older releases store these
    state["vision_model.embeddings.position_ids"] = torch.arange(10)[None]
    config = (tmp_path / "plain" / "config.json").read_text()
    pickled, sharded = tmp_path / "pickled", tmp_path / "sharded"
    for folder in (pickled, sharded):
        folder.mkdir()
        (folder / "config.json").write_text(config)
    torch.save(state, pickled / "pytorch_model.bin")
    names = sorted(state)
    where = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(where.values()):
        part = {name: state[name] for name in names if where[name] == file}
        safetensors.torch.save_file(part, sharded / file)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    openclip = published.write_openclip(odd_sized, tmp_path / "openclip", pickled=True)
    for folder in (pickled, sharded, openclip):
        state = dear.load(folder).state_dict()
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in expected), folder


def test_a_folder_with_both_layouts_is_read_as_hugging_faces(odd_sized, tmp_path):
    published.write_openclip(odd_sized, tmp_path)
    assert read_checkpoint(tmp_path).layout == "openclip"
    assert read_checkpoint(tmp_path).config.mean == (0.5, 0.4, 0.3)
    published.write_huggingface(odd_sized, tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 1, 1]})
    )
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.layout == "huggingface"
    assert checkpoint.config.mean == (0.1, 0.2, 0.3)


def test_weight_files_are_recognized_by_their_content(odd_sized, tmp_path):
    folder = published.write_huggingface(odd_sized, tmp_path / "hf")
    assert read_checkpoint(folder / "model.safetensors").layout == "huggingface"
    folder = published.write_openclip(odd_sized, tmp_path / "openclip")
    assert read_checkpoint(folder / "open_clip_model.safetensors").layout == "openclip"
    bare = tmp_path / "weights.safetensors"
    safetensors.torch.save_file(published.openai_state(odd_sized), bare)
    with pytest.raises(CheckpointError, match=r"weights\.safetensors.*activation"):
        dear.load(bare)
    assert read_checkpoint(bare, "gelu").config.vision.activation == "gelu"
    training = tmp_path / "epoch_32.pt"
    state = {f"module.{name}": tensor for name, tensor in published.openai_state(odd_sized).items()}
    torch.save({"epoch": 32, "state_dict": state}, training)
    with pytest.raises(CheckpointError, match=r"epoch_32\.pt.*activation"):
        dear.load(training)
    assert read_checkpoint(training, "quick_gelu").config.vision.heads == 5
    with pytest.raises(CheckpointError, match="activation='gelu'"):
        read_checkpoint(folder, "gelu")


def test_a_saved_folder_is_read_by_transformers_and_back(tmp_path):
    torch.manual_seed(3)
    vision = VisionConfig(
        width=40, layers=3, heads=5, mlp=70, activation="gelu", eps=1e-6, image_size=33, patch_size=11
    )
    text = TextConfig(width=24, layers=2, heads=3, context=15, vocab=60)
    clip = Clip(ClipConfig(vision, text, 16, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)))
    save_hf(clip, tmp_path)
    again = dear.load(tmp_path)
    assert again.config == clip.config
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in clip.state_dict().items())
    pixels, ids, images, texts = features(CLIPModel.from_pretrained(tmp_path).eval())
    assert (clip.encode_image(pixels) - images).abs().max() < 1e-5
    assert (clip.encode_text(ids) - texts).abs().max() < 1e-5
    save_hf(clip, tmp_path, torch.float16)
    assert dear.load(tmp_path).visual.proj.dtype == torch.float32
    assert torch.equal(dear.load(tmp_path).visual.proj, clip.visual.proj.half().float())


@pytest.mark.parametrize("resize", ["crop", "squash"])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_a_saved_folder_prepares_images_as_the_model_does(tmp_path, resize, interpolation):
    vision = VisionConfig(width=32, layers=1, heads=2, image_size=24, patch_size=8)
    text = TextConfig(width=32, layers=1, heads=2, context=9, vocab=50)
    clip = Clip(ClipConfig(vision, text, 8, resize=resize, interpolation=interpolation))
    save_hf(clip, tmp_path)
    assert dear.load(tmp_path).config == clip.config
    noise = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    theirs = CLIPImageProcessor.from_pretrained(tmp_path)(image, return_tensors="pt")["pixel_values"][0]
    step = 1 / 255 / min(clip.config.std)
    assert (clip.preprocess(image) - theirs).abs().max() < 1.01 * step


def test_a_shortened_vocabulary_comes_back_with_its_rows(tmp_path):
    torch.manual_seed(4)
    config = ClipConfig(
        VisionConfig(width=32, layers=1, heads=2, image_size=8, patch_size=4),
        TextConfig(width=32, layers=1, heads=2, context=9, vocab=50),
        8,
    )
    clip = Clip(config, token_rows=6)
    clip.text.rows = torch.tensor([5] * 45 + [0, 1, 2, 3, 4])
    save_hf(clip, tmp_path)
    again = dear.load(tmp_path)
    assert again.config.text.vocab == 50
    assert again.text.tokens.shape == (6, 32)
    ids = torch.tensor([[48, 45, 46, 3, 49, 0], [48, 47, 44, 49, 0, 0]])
    assert torch.equal(again.encode_text(ids), clip.encode_text(ids))
    full = Clip(config)  # the same texts, with a row of its own for every id
    state = clip.state_dict()
    rows = state.pop("text.rows")
    full.load_state_dict(state | {"text.tokens": state["text.tokens"][rows]})
    assert torch.equal(full.encode_text(ids), clip.encode_text(ids))


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"model_type": "clip", "projection_dim": 768},
        # what openai/clip-vit-base-patch16 says: a few fields, the end token wrong, the legacy keys empty
        {
            "projection_dim": 512,
            "text_config": {"eos_token_id": 2, "bos_token_id": 0, "dropout": 0.0},
            "text_config_dict": None,
            "vision_config": {"patch_size": 16, "dropout": 0.0},
            "vision_config_dict": None,
        },
        {
            "vision_config": {"hidden_act": "gelu", "layer_norm_eps": 1e-6},
            "text_config": {"hidden_act": "gelu"},
        },
        # the legacy keys win, and what they leave out goes back to the defaults
        {
            "vision_config": {"hidden_size": 1024, "patch_size": 14, "num_attention_heads": 16},
            "vision_config_dict": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16},
            "text_config": {"hidden_size": 768},
            "text_config_dict": {"num_hidden_layers": 3},
        },
    ],
)
def test_missing_fields_mean_what_transformers_takes_them_for(raw):
    ours = from_huggingface(raw, None, "config.json")
    theirs = CLIPConfig(**json.loads(json.dumps(raw)))
    assert ours.embed_dim == theirs.projection_dim
    for mine, other in ((ours.vision, theirs.vision_config), (ours.text, theirs.text_config)):
        assert mine.width == other.hidden_size
        assert mine.layers == other.num_hidden_layers
        assert mine.heads == other.num_attention_heads
        assert mine.mlp == other.intermediate_size
        assert mine.activation == other.hidden_act
        assert mine.eps == other.layer_norm_eps
    assert ours.vision.image_size == theirs.vision_config.image_size
    assert ours.vision.patch_size == theirs.vision_config.patch_size
    assert ours.text.context == theirs.text_config.max_position_embeddings


def test_openclip_defaults_and_heads():
    config = from_openclip(
        {"model_cfg": {"embed_dim": 512, "vision_cfg": {"width": 896, "layers": 12}, "text_cfg": {}}},
        "x.json",
    )
    assert (config.vision.heads, config.vision.mlp, config.vision.patch_size) == (14, 3584, 16)
    assert (config.text.heads, config.text.width, config.text.vocab) == (8, 512, 49408)
    assert config.vision.activation == config.text.activation == "gelu"
    assert config == from_openclip(
        {
            "model_cfg": {
                "embed_dim": 512,
                "custom_text": False,
                "vision_cfg": {"width": 896, "layers": 12, "patch_dropout": 0.5, "ls_init_value": None},
                "text_cfg": {"hf_model_name": None, "pool_type": "argmax"},
            },
            "preprocess_cfg": {"interpolation": "bicubic", "resize_mode": "shortest"},
        },
        "x.json",
    )


@pytest.mark.parametrize(
    ("where", "key", "value", "words"),
    [
        ("vision_cfg", "timm_model_name", "convnext_base", "convnext_base"),
        ("vision_cfg", "timm_model_name", "fastvit_mci2", "fastvit_mci2"),
        ("vision_cfg", "timm_model_name", "vit_so400m_patch14_siglip_gap_384", "gap_384"),
        ("vision_cfg", "timm_model_name", "vit_base_patch16_siglip_224", "pool None"),
        ("vision_cfg", "attentional_pool", True, "attentional_pool"),
        ("vision_cfg", "ls_init_value", 1e-5, "ls_init_value"),
        ("vision_cfg", "layers", [3, 4, 6, 3], "ResNet"),
        ("vision_cfg", "pool_type", "avg", "pool_type"),
        ("vision_cfg", "final_ln_after_pool", True, "final_ln_after_pool"),
        ("text_cfg", "hf_model_name", "roberta-base", "MetaCLIP 2"),
        ("text_cfg", "hf_tokenizer_name", "bert-base-uncased", "bert-base-uncased"),
        ("text_cfg", "pool_type", "last", "'last'"),
        ("text_cfg", "pool_type", "first", "'first'"),
        ("text_cfg", "norm_kwargs", {"affine": False}, "affine"),
        (None, "multimodal_cfg", {"layers": 12}, "multimodal_cfg"),
    ],
)
def test_parts_of_openclip_that_are_not_supported_are_refused(where, key, value, words):
    model = {"embed_dim": 512, "vision_cfg": {}, "text_cfg": {}}
    (model[where] if where else model)[key] = value
    with pytest.raises(CheckpointError, match=rf"x\.json.*{words}"):
        from_openclip({"model_cfg": model}, "x.json")


def test_unknown_sources_name_what_is_known(tmp_path):
    with pytest.raises(CheckpointError, match="no-such-thing"):
        dear.load("no-such-thing")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        dear.load(tmp_path)
    with pytest.raises(CheckpointError, match=r"missing\.pt"):
        dear.load(tmp_path / "missing.pt")


def test_list_backbones_names_the_public_clips():
    names = dear.list_backbones()
    assert "laion/CLIP-ViT-B-16-laion2B-s34B-b88K" in names
    assert len(set(names)) == len(names)
