"""What people do wrong: exit status, one sentence that names the thing at fault, nothing left behind.

Every line is a command as it would be typed in a folder with these things in it:

- `photos` (red, blue), `one` (one class), `hollows` (only an empty class), `same` (two
  classes that read the same), `broken` (a cut image), `empty`;
- tables: `columns.csv` (semicolons), `outside.csv` (a path with `..`), `unlabeled.jsonl`, `train-only.csv`,
  `latin.csv` (not UTF-8);
- `run` (DeAR on photos), `probe` (a linear probe), `half` (not completed), `cut` (adapter cut), `moved` (its
  backbone is gone);
- `other.json` (a role map of other weights), `bad.json`, `twice.json`, `note.txt`, `note.jpg` (text),
  `page.pt` (an HTML page), `model.onnx` (no model), `hollow` (a model folder without a model).
"""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from typed import dear

# A command, and the things that its message must name: what is at fault, and what helps.
WRONG = """
zeroshot | --data
zeroshot --data | --data
zeroshot --dta photos | --dta
zeroshot --data photos --classes +wolf | +wolf
zeroshot --data nowhere | nowhere
zeroshot --data eurosatt | eurosatt & EuroSAT
zeroshot --data EuroSAT | EuroSAT & eurosat/ & --data-root
zeroshot --data EuroSAT --data-root empty | empty/eurosat & dear data check
zeroshot --data note.txt | note.txt & .csv & .jsonl
zeroshot --data empty | empty: & class folders
zeroshot --data hollows | hollows: & no images
zeroshot --data same | 'Red' & 'red_'
zeroshot --data broken --split all | broken/red/x.jpg & --unreadable skip
zeroshot --data broken --unreadable ignore | 'ignore' & stop & skip
zeroshot --data photos --split validation | 'validation' & train & test
zeroshot --data columns.csv | path & label & commas
zeroshot --data outside.csv --split all | x.png
zeroshot --data unlabeled.jsonl | unlabeled.jsonl, row 1 & label
zeroshot --data train-only.csv | train-only.csv & 'test'
zeroshot --data latin.csv | latin.csv & UTF-8 & byte 11
zeroshot --data world:textur | world:textur & textures
zeroshot --data photos --template "a photo" | 'a photo' & {}
zeroshot --data photos --template "a {} {}" | {} & 2
zeroshot --data photos --half third | 'third' & base & novel
zeroshot --data photos --device tpu | tpu & cpu & cuda
zeroshot --data photos --backbone nothing | 'nothing' & dear backbones
zeroshot --data photos --backbone hollow | hollow: & config.json
zeroshot --data photos --backbone page.pt | page.pt: & text file
zeroshot --data photos --backbone openai/clip-vit-base-patch16 | openai/clip-vit-base-patch16 & cache
adapt --data photos | --out
adapt --data one --out x | one: & 'red'
adapt --data photos --out x --method daer | 'daer' & 'dear'
adapt --data photos --out x --shots two | --shots
adapt --data photos --out x --shots -1 | shots & -1
adapt --data photos --out x --epochs -1 | epochs & -1
adapt --data photos --out x --set beta | 'beta' & NAME=VALUE
adapt --data photos --out x --set beta=2 | beta & 2 & from 0 to 1
adapt --data photos --out x --set beta=much | beta & 'much'
adapt --data photos --out x --set bta=1 | 'bta' & beta
adapt --data photos --out x --set text_tokens=1000000000 | text_tokens & 100,000
adapt --data photos --out x --set first_layer=99 | first_layer & 99 & 12
adapt --data photos --out x --roles nowhere.json | nowhere.json
adapt --data photos --out x --roles bad.json | bad.json
adapt --data photos --out x --roles twice.json | twice.json & 'format'
adapt --data photos --out x --roles other.json | mini & dear roles discover
adapt --data photos --out x --method coop --roles other.json | roles & 'coop'
adapt --data photos --out run | run: & finished
adapt --data photos --out half | half: & --resume
adapt --data photos --out half --resume --shots 2 --seed 2 | epochs, seed
adapt --data photos --out note.txt | note.txt: & folder
adapt --data broken --out x --shots 0 --epochs 1 | broken/red/x.jpg
evaluate nowhere --data photos | nowhere: & dear adapt --out
audit nowhere | nowhere: & dear adapt --out
report nowhere --out page.html | nowhere: & dear adapt --out
evaluate half --data photos | half: & dear adapt --resume
evaluate cut --data photos | cut/adapter.safetensors
evaluate moved --data photos | moved: & 'gone-model' & --backbone
evaluate run --data photos --mode fast | 'fast' & fused, decoupled
evaluate probe --data world:textures | 'linear-probe' & classes
predict | run & image
predict run nowhere.jpg | nowhere.jpg
predict run note.jpg | note.jpg & text file
predict run train-only.csv | train-only.csv & table
drift run train-only.csv | train-only.csv & table
predict run empty | empty:
predict run photos/red/0.png --top 0 | top & 0
predict run photos/red/0.png --classes "," | --classes
predict run photos/red/0.png --classes "cat, cat" | 'cat'
predict run photos/red/0.png --classes "<|endoftext|>, cat" | <|endoftext|>
predict run photos/red/0.png --classes note.txt | --classes-file note.txt
predict run photos/red/0.png --classes-file nowhere.txt | nowhere.txt
predict run photos/red/0.png --classes-file note.txt --classes "cat, dog" | --classes & --classes-file
predict --onnx model.onnx photos/red/0.png --top 0 | top & 0
predict --onnx model.onnx photos/red/0.png --template "my {}" | template
predict --onnx model.onnx photos/red/0.png --backbone mini | backbone
predict --onnx model.onnx photos/red/0.png --device cuda | device & cuda
adapt --data photos --out x --epochs 0 | epochs & 0
adapt --data photos --out x --epochs 2 --recipe epochs=3 | epochs & 2 & 3
adapt --data photos --out x --recipe strong --recipe weak | 'strong' & 'weak'
adapt --data photos --out x --recipe unheard | 'unheard'
bench base-to-novel --methods coop,vpt --datasets photos --out x --recipe strong | 'strong' & coop, vpt
adapt --data photos --out x --recipe rate=3 | 'rate'
evaluate run --data broken --split all | broken/red/x.jpg & --unreadable skip
retrieve run --query photos/red/0.png --gallery EuroSAT | EuroSAT & --data-root
predict run photos/red/0.png --mode quick | 'quick' & fused, decoupled
predict --onnx nowhere.onnx a.jpg | nowhere.onnx & dear export
predict --onnx model.onnx photos/red/0.png | model.onnx
retrieve run --query photos/red/0.png --gallery empty | empty:
retrieve run --query photos/red/0.png --gallery photos --attribute smell | 'smell'
roles show note.txt | note.txt
roles discover | dominant & --images
roles discover --rule table2 --images photos | table2 & images
roles discover --rule table2 --value 0.5 | table2 & value
roles discover --images photos --sentences nowhere | 'nowhere'
roles discover --images photos --layers nine | layers & 'nine'
roles discover --images photos --layers 12-9 | layers & '12-9'
roles discover --images photos --layers 20-22 | 20 & 1 to 12
roles discover --images photos --rule tabel2 | 'tabel2' & dominant
roles discover --images photos --rule dominant --value 2 | tau & 2.0
roles discover --images photos --concepts dreams | dreams & 'clusters'
roles discover --images photos --phrases 0 | phrases must be at least 1, got 0
roles discover --images photos --corpus nowhere.txt | nowhere.txt
roles report other.json --images photos --backbone mini | mini & --allow-other-roles
bench base-to-nowhere --out g | 'base-to-nowhere' & base-to-novel
bench base-to-novel --out g | --datasets
bench base-to-novel --datasets nowhere --out g | nowhere
bench base-to-novel --datasets photos --methods clop --out g | 'clop'
bench base-to-novel --datasets photos --seeds one --out g | seeds & 'one'
bench base-to-novel --datasets photos --set beta=1 --out g | METHOD.OPTION=VALUE
bench base-to-novel --datasets photos --recipe epoch=1 --out g | 'epoch'
bench base-to-novel --datasets photos --engine slurm --out g | 'slurm' & local & ray
bench base-to-novel --datasets photos --workers 0 --out g | workers & 0
bench leave-one-domain-out --datasets photos --out g | photos: & domains
ablate nonsense --out g | 'nonsense' & masks, losses
export nowhere --onnx m.onnx | nowhere
export run --onnx m.onnx --classes "," | --classes
data check Imagnet | Imagnet & ImageNet
studio --port 99999 | port & 99999 & 65535
studio --max-upload-mb 0 | max_upload_mb & 0
pretrain --out p --steps 0 | steps & 0
predict run photos/red --csv empty | empty: & file
predict run photos/red --csv note.txt/a.csv | note.txt/a.csv & note.txt
explain run photos/red/0.png --out empty | empty: & file
explain run photos/red/0.png --out note.txt/why.html | note.txt/why.html
audit --data photos --out empty | empty: & file
audit run --mode quick | 'quick' & fused, decoupled
audit run --shots -1 | shots & -1
drift run nowhere | nowhere & no such
drift run photos --out empty | empty: & file
report run --out note.txt/page.html | note.txt/page.html
retrieve run --query nowhere.png --gallery photos | nowhere.png: & no such image
retrieve run --query photos/red/0.png --gallery photos --out note.txt | note.txt: & folder
retrieve run --query photos/red/0.png --gallery broken | broken/red/x.jpg
repair run --without location --out run | run: & finished
export run --onnx empty | empty: & file
export run --onnx note.txt/m.onnx | note.txt/m.onnx
bundle run note.txt/run.zip | note.txt/run.zip
adapt --data photos --out x --log paper:x | 'paper:x' & tensorboard
bench base-to-novel --datasets photos --methods zeroshot --out note.txt | note.txt: & folder
bench base-to-novel --datasets photos --methods zeroshot --out g --log paper:x | 'paper:x' & tensorboard
bench base-to-novel --datasets photos --methods zeroshot --out g --template photos | photos & DATASET=TEMPLATE
roles discover --images photos --out empty | empty: & file
roles report table2 --out empty | empty: & file
label next photos --classes a,b --out empty | empty
label start nowhere --classes a,b --out labels.csv | nowhere
label start photos --classes a,b --out note.txt/labels.csv | note.txt/labels.csv
data check photos --backbone mini --out note.txt/s.csv | note.txt/s.csv
demo --data photos --backbone mini --out note.txt | note.txt: & folder
mini --images 0 | --images
speed --classes 1 | classes & 1
frobnicate | 'frobnicate'
"""
USES = [tuple(line.rsplit(" | ", 1)) for line in WRONG.strip().splitlines()]


def photos(folder: Path, *classes: str) -> Path:
    for name in classes:
        (folder / name).mkdir(parents=True)
        for number in range(6):
            tone = 40 + 20 * number
            Image.new("RGB", (32, 32), (tone, 20, 30) if name == "red" else (30, 20, tone)).save(
                folder / name / f"{number}.png"
            )
    return folder


def changed(source: Path, target: Path, **changes: object) -> None:
    target.write_text(json.dumps({**json.loads(source.read_text()), **changes}))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder; locks that a command held are gone, so they would show."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the commands are typed in."""
    home = tmp_path_factory.mktemp("place")
    photos(home / "photos", "red", "blue")
    photos(home / "one", "red")
    photos(home / "same", "Red", "red_")
    (home / "hollows" / "green").mkdir(parents=True)
    (photos(home / "broken", "red", "blue") / "red" / "x.jpg").write_bytes(b"\xff\xd8\xff\xe0 cut")
    (home / "empty").mkdir()
    (home / "hollow").mkdir()
    (home / "columns.csv").write_text("file;label\na;b\n")
    (home / "outside.csv").write_text("path,label\n../x.png,a\n")
    (home / "unlabeled.jsonl").write_text('{"path": "a.png"}\n')
    (home / "train-only.csv").write_text("path,label,split\nphotos/red/0.png,red,train\n")
    (home / "latin.csv").write_bytes(b"path,label\n\xe9.png,a\n")
    for name in ("note.txt", "note.jpg"):
        (home / name).write_text("hello, this is text")
    (home / "page.pt").write_text("<!doctype html><title>404</title>")
    (home / "model.onnx").write_bytes(b"not a model")
    (home / "bad.json").write_text("{")
    (home / "twice.json").write_text('{"format": "dear roles", "format": 1}')
    train = ("adapt", "--data", str(home / "photos"), "--shots", "2", "--epochs", "1", "--out")
    assert dear(*train, str(home / "run"))[0] == 0
    assert dear(*train, str(home / "probe"), "--method", "linear-probe")[0] == 0
    changed(home / "run/roles.json", home / "other.json", fingerprint="sha256:" + "0" * 64)
    for name in ("half", "cut", "moved"):
        shutil.copytree(home / "run", home / name)
    (home / "half/adapter.safetensors").unlink()
    (home / "half/metrics.json").unlink()
    (home / "cut/adapter.safetensors").write_bytes((home / "run/adapter.safetensors").read_bytes()[:100])
    changed(home / "run/config.json", home / "moved/config.json", backbone="gone-model")
    snapshot = {name: digest(data) for name, data in contents(home).items()}
    (home.parent / f"{home.name}.json").write_text(json.dumps(snapshot))
    return home


@pytest.fixture(autouse=True)
def typed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)


@pytest.mark.parametrize(("command", "things"), USES, ids=[command for command, _ in USES])
def test_wrong_uses(command: str, things: str, place: Path) -> None:
    before = contents(place)
    status, output = dear(*shlex.split(command))
    flat = " ".join(output.replace("│", " ").split())
    for part in things.split(" & "):
        assert part in flat, output
    assert status == 2, output
    assert "Traceback" not in output
    lines = [line for line in output.strip().splitlines() if not line.startswith("notice: ")]
    if lines[0].startswith("dear: ") and "cannot be read:" not in output:  # those are listed, one per line
        assert len(lines) == 1
    assert contents(place) == before  # names and bytes


def test_nothing_was_changed(place: Path) -> None:
    """After all of them: everything is as it was made, byte for byte, and the run still answers."""
    snapshot = json.loads((place.parent / f"{place.name}.json").read_text())
    assert {name: digest(data) for name, data in contents(place).items()} == snapshot
    assert dear("evaluate", "run", "--data", "photos", "--json")[0] == 0
    after = {name: digest(data) for name, data in contents(place).items()}
    assert {name for name in after if after[name] != snapshot.get(name)} == {"run/metrics.json"}
