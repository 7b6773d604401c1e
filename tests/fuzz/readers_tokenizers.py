"""Readers of tokenizers, which native code parses, and of configurations that name code."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import mutate
import published
import sentencepiece
from fuzzing import Target
from readers_tensors import TEXT, VISION, check_checkpoint
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from dear.clip.config import ClipConfig, TextConfig
from dear.clip.tokenizer_file import FileTokenizer

CORPUS = ["a photo of a red cat", "the dog and the house", "straße, кошка, 猫", "don't (2) stop_now"] * 5
SIGLIP = replace(ClipConfig.named("ViT-B-16-SigLIP").text, vocab=200)
GEMMA = replace(ClipConfig.named("ViT-B-16-SigLIP2").text, vocab=200)


def _check_ids(folder: Path, config: TextConfig) -> None:
    """What must hold of a tokenizer that was read: ids that the text tower has rows for."""
    ids = FileTokenizer(folder, config)(["a red cat"], 16)
    assert ids.shape == (1, 16)
    assert 0 <= int(ids.min()) <= int(ids.max()) < config.vocab


def pieces(folder: Path) -> Target:
    """spiece.model: protobuf, parsed by sentencepiece."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, vocab_size=60, character_coverage=1.0,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    place = folder / "pieces"
    place.mkdir()

    def read(data: bytes) -> None:
        (place / "spiece.model").write_bytes(data)
        _check_ids(place, SIGLIP)

    words = [b"\x0a\x05", b"\x12\x00", b"\x1a\xff\xff\xff\xff\x0f", b"\x80" * 10, b"\xe2\x96\x81", b"<unk>"]
    return Target("tokenizer-pieces", [model.getvalue()], read, words=words)


def tokenizer_json(folder: Path) -> Target:
    """tokenizer.json and tokenizer_config.json, the former parsed by tokenizers."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    trainer = trainers.BpeTrainer(vocab_size=80, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 1)])
    place = folder / "json"
    place.mkdir()

    def read(data: bytes) -> None:
        whole, _, settings = data.partition(b"\n--\n")
        (place / "tokenizer.json").write_bytes(whole)
        (place / "tokenizer_config.json").write_bytes(settings)
        _check_ids(place, GEMMA)

    def change(data: bytes, rng, pool, words) -> bytes:
        parts = list(data.partition(b"\n--\n")[::2])
        at = rng.choice((0, 0, 0, 1))
        parts[at] = mutate.json_text(parts[at], rng, parts, words)
        return b"\n--\n".join(parts)

    settings = json.dumps({"pad_token": {"content": "<pad>"}, "tokenizer_class": "GemmaTokenizer"}).encode()
    seed = tokenizer.to_str().encode() + b"\n--\n" + settings
    words = [
        b'"Unigram"',
        b'"WordPiece"',
        b'"Regex"',
        b'{"Regex": "(a+)+$"}',
        b'"Precompiled"',
        b'"auto_map"',
    ]
    return Target("tokenizer-json", [seed], read, change, words)


def code_config(folder: Path) -> Target:
    """config.json that names code next to it: it is never imported."""
    place = published.write_huggingface(published.random_model(VISION, TEXT, 8), folder / "code")
    (place / "modeling_hostile.py").write_text("raise SystemExit('code of a checkpoint was run')\n")
    whole = json.loads((place / "config.json").read_text())
    names = {"AutoModel": "modeling_hostile.Model", "AutoConfig": "modeling_hostile.Config"}
    keys = {"auto_map": names, "architectures": ["modeling_hostile.Model"], "custom_pipelines": {"x": names}}
    keys |= {"trust_remote_code": True, "tokenizer_class": "modeling_hostile.Tokenizer"}

    def read(data: bytes) -> None:
        (place / "config.json").write_bytes(data)
        try:
            check_checkpoint(place)
        finally:
            assert "modeling_hostile" not in sys.modules

    words = [b'"modeling_hostile.Model"', b"\"__import__('os').mkdir('x')\"", b'"!!python/object:os.system"']
    return Target("code-config", [json.dumps({**whole, **keys}).encode()], read, mutate.json_text, words)


TARGETS = {"tokenizer-pieces": pieces, "tokenizer-json": tokenizer_json, "code-config": code_config}
