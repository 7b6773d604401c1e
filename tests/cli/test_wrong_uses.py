"""What people do wrong, and the sentence each gets: exit status, words, and nothing left behind.

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

import contextlib
import hashlib
import io
import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from dear.cli import main

# A command, and below it what its message must hold, parts separated by " & ".
WRONG = """
zeroshot
    Missing option '--data'
zeroshot --data
    Option '--data' requires an argument
zeroshot --dta photos
    No such option: --dta
zeroshot --data nowhere
    nowhere: no such folder, table or dataset
zeroshot --data eurosatt
    no such folder, table or dataset; did you mean EuroSAT?
zeroshot --data EuroSAT
    EuroSAT: is a benchmark; root must name the folder that holds eurosat/ & name it with --data-root
zeroshot --data EuroSAT --data-root empty
    empty/eurosat: no such folder & `dear data check NAME
zeroshot --data note.txt
    note.txt: is neither a folder nor a .csv or .jsonl table
zeroshot --data empty
    empty: holds no class folders; put the images of each class in a folder of its name
zeroshot --data hollows
    hollows: its class folders hold no images
zeroshot --data same
    the classes 'Red' and 'red_' both read 'red'; rename or merge them
zeroshot --data broken --split all
    1 of 13 images cannot be read & broken/red/x.jpg & --unreadable skip
zeroshot --data broken --unreadable ignore
    the policy is stop or skip, not 'ignore'
zeroshot --data photos --split validation
    there are only train, test and all, not 'validation'
zeroshot --data columns.csv
    has no column path and no column label; separate columns by commas
zeroshot --data outside.csv
    outside.csv, row 2: the path '../x.png' leaves
zeroshot --data unlabeled.jsonl
    unlabeled.jsonl, row 1: has no label
zeroshot --data train-only.csv
    train-only.csv: has no rows of split 'test'; it has train
zeroshot --data latin.csv
    latin.csv: cannot be read as a table: it is not UTF-8 text (byte 11)
zeroshot --data world:textur
    world:textur: no such task; the tasks are textures
zeroshot --data photos --template "a photo"
    the template 'a photo' must hold {} once, where the class name goes
zeroshot --data photos --template "a {} {}"
    must hold {} once, where the class name goes, not 2 times
zeroshot --data photos --half third
    --half third: choose from all, base, novel
zeroshot --data photos --device tpu
    device tpu: not usable here & use cpu, cuda or auto
zeroshot --data photos --backbone nothing
    'nothing' is not a backbone & known names are mini, openai/
zeroshot --data photos --backbone hollow
    hollow: holds no CLIP checkpoint; a folder needs config.json with
zeroshot --data photos --backbone page.pt
    page.pt: is a text file, not a checkpoint; get it again
zeroshot --data photos --backbone openai/clip-vit-base-patch16
    is not in the cache & pass its folder
adapt --data photos
    Missing option '--out'
adapt --data one --out x
    one: has only the class 'red'; a classifier needs at least two
adapt --data photos --out x --method daer
    no method is called 'daer'; known are zeroshot, linear-probe, coop
adapt --data photos --out x --shots two
    Invalid value for '--shots'
adapt --data photos --out x --shots -1
    shots = -1: ask for at least 1 image per class, or for all with 0
adapt --data photos --out x --epochs -1
    --epochs -1: train for at least 1 epoch
adapt --data photos --out x --set beta
    --set beta: write it as NAME=VALUE
adapt --data photos --out x --set beta=2
    beta = 2 is not possible: a number from 0 to 1 is expected
adapt --data photos --out x --set beta=much
    beta = 'much' is not possible: a number is expected
adapt --data photos --out x --set bta=1
    the method 'dear' has no option 'bta'; its options are alpha_rate, alpha_start, attributes, beta
adapt --data photos --out x --set text_tokens=1000000000
    no option is larger than 100,000
adapt --data photos --out x --set first_layer=99
    first_layer = 99 is not a layer of a tower of 12
adapt --data photos --out x --roles nowhere.json
    nowhere.json: no such role map
adapt --data photos --out x --roles bad.json
    bad.json: is not a valid role map
adapt --data photos --out x --roles twice.json
    the key 'format' stands twice in one object
adapt --data photos --out x --roles other.json
    the role map was computed on mini & `dear roles discover`
adapt --data photos --out x --method coop --roles other.json
    --roles: the method 'coop' uses no role map
adapt --data photos --out run
    run: holds a finished run; choose another folder, or delete it first
adapt --data photos --out half
    half: holds a run that was not completed; resume it, or delete it first; continue with --resume
adapt --data photos --out half --resume --shots 2 --seed 2
    it was begun with different settings: recipe (epochs, seed) & choose another
adapt --data photos --out note.txt
    note.txt: is a file; name a folder for the run
adapt --data broken --out x --shots 0 --epochs 1
    broken/red/x.jpg: the image is damaged & replace or remove it
evaluate nowhere --data photos
    nowhere: is not a run folder (no config.json) & `dear adapt --out FOLDER` makes a run folder
audit nowhere
    nowhere: is not a run folder (no config.json) & `dear adapt --out FOLDER` makes a run folder
report nowhere --out page.html
    nowhere: is not a run folder (no config.json) & `dear adapt --out FOLDER` makes a run folder
evaluate half --data photos
    half: this run was not completed; resume it; continue it with `dear adapt --resume`
evaluate cut --data photos
    cut/adapter.safetensors: is not a whole adapter
evaluate moved --data photos
    moved: was trained on a backbone called 'gone-model' & say where it is; name it with --backbone
evaluate run --data photos --mode fast
    the method 'dear' has no mode 'fast'; it has fused, decoupled
evaluate probe --data world:textures
    the method 'linear-probe' learns its classes: it cannot name others
predict
    name a run folder and at least one image: dear predict run a.jpg
predict run nowhere.jpg
    nowhere.jpg: no such image
predict run note.jpg
    note.jpg: is a text file, not an image
predict run empty
    empty: there is no image in this folder
predict run photos/red/0.png --top 0
    --top 0: ask for at least one answer per image
predict run photos/red/0.png --classes ","
    --classes names no class; give names with commas between
predict run photos/red/0.png --classes "cat, cat"
    the class 'cat' is named twice; name it once
predict run photos/red/0.png --classes "<|endoftext|>, cat"
    contains CLIP's special token <|endoftext|>
predict run photos/red/0.png --classes note.txt
    --classes note.txt: is a file; give it as --classes-file note.txt
predict run photos/red/0.png --classes-file nowhere.txt
    nowhere.txt
predict run photos/red/0.png --classes-file note.txt --classes "cat, dog"
    --classes and --classes-file: give one of them
predict --onnx model.onnx photos/red/0.png --top 0
    --top 0: ask for at least one answer per image
predict --onnx model.onnx photos/red/0.png --template "my {}"
    --template: an exported model has its classes, prompts and weights built in
predict --onnx model.onnx photos/red/0.png --backbone mini
    --backbone: an exported model has its classes, prompts and weights built in
predict --onnx model.onnx photos/red/0.png --device cuda
    --device: an exported model has its classes, prompts and weights built in
adapt --data photos --out x --epochs 0
    --epochs 0: train for at least 1 epoch
adapt --data photos --out x --epochs 2 --recipe epochs=3
    --epochs and --recipe epochs=3: give one of them
adapt --data photos --out x --recipe strong --recipe weak
    --recipe strong and --recipe weak: name one preset
adapt --data photos --out x --recipe unheard
    the method 'dear' has no preset 'unheard'
bench base-to-novel --methods coop,vpt --datasets world:textures --out x --recipe strong
    --recipe strong: none of the methods (coop, vpt) has a preset of that name
adapt --data photos --out x --recipe rate=3
    the recipe has no 'rate'
evaluate run --data broken --split all
    1 of 13 images cannot be read & --unreadable skip
retrieve run --query photos/red/0.png --gallery EuroSAT
    EuroSAT: is a benchmark & name it with --data-root
predict run photos/red/0.png --mode quick
    the method 'dear' has no mode 'quick'; it has fused, decoupled
predict --onnx nowhere.onnx a.jpg
    nowhere.onnx: no such ONNX model & `dear export RUN --onnx FILE` writes one
predict --onnx model.onnx photos/red/0.png
    model.onnx: is not a whole ONNX model & export it again
retrieve run --query photos/red/0.png --gallery empty
    empty: there is no image in this folder
retrieve run --query photos/red/0.png --gallery photos --attribute smell
    no head of the role map has the role 'smell'; there are
roles show note.txt
    note.txt: is not a valid role map
roles discover
    the rule dominant judges heads by images & --images
roles discover --rule table2 --images photos
    --rule table2 & takes no --images
roles discover --rule table2 --value 0.5
    takes no --value
roles discover --images photos --sentences nowhere
    the sentence model 'nowhere' cannot be loaded
roles discover --images photos --layers nine
    --layers nine: write layers as 9-12 or 9,11
roles discover --images photos --layers 12-9
    --layers 12-9: write layers as 9-12 or 9,11
roles discover --images photos --layers 20-22
    do not all exist: the image tower has layers 1 to 12
roles discover --images photos --rule tabel2
    no rule is called 'tabel2'; choose dominant or quantile
roles discover --images photos --rule dominant --value 2
    dominant tau = 2.0 must lie above 0 and not above 1
roles discover --images photos --concepts dreams
    is not a way to find concepts; use 'clusters', 'fixed' or 'tags'
roles discover --images photos --phrases 0
    phrases = 0: a head is described by at least one phrase
roles discover --images photos --corpus nowhere.txt
    nowhere.txt: no such corpus
roles report other.json --images photos --backbone mini
    computed on mini & --allow-other-roles
bench base-to-nowhere --out g
    no protocol 'base-to-nowhere'; choose from base-to-novel, few-shot
bench base-to-novel --out g
    base-to-novel: name the datasets; use --datasets
bench base-to-novel --datasets nowhere --out g
    nowhere: no such folder, table or dataset
bench base-to-novel --datasets photos --methods clop --out g
    no method is called 'clop'; known are
bench base-to-novel --datasets photos --seeds one --out g
    --seeds one: whole numbers with commas between them
bench base-to-novel --datasets photos --set beta=1 --out g
    write METHOD.OPTION=VALUE, as in dear.beta=0.8
bench base-to-novel --datasets photos --recipe epoch=1 --out g
    the recipe has no 'epoch'; it has augment
bench base-to-novel --datasets photos --engine slurm --out g
    no engine is called 'slurm'; choose local or ray
bench base-to-novel --datasets photos --workers 0 --out g
    workers = 0: at least one is needed
bench leave-one-domain-out --datasets photos --out g
    photos: has no domains to leave one out of
ablate nonsense --out g
    no study 'nonsense'; choose from masks, losses
export nowhere --onnx m.onnx
    nowhere: is not a run folder
export run --onnx m.onnx --classes ","
    --classes names no class; give names with commas between
data check Imagnet
    no such folder, table or dataset; did you mean ImageNet?
studio --port 99999
    port = 99999: choose between 1 and 65535, or 0 for a free one
studio --max-upload-mb 0
    max_upload_mb = 0: choose between 1 and 1000
pretrain --out p --steps 0
    --steps 0: at least one is needed
frobnicate
    No such command 'frobnicate'
"""
_LINES = [line.strip() for line in WRONG.strip().splitlines()]
USES = list(zip(_LINES[::2], _LINES[1::2], strict=True))


def dear(*words: str) -> tuple[int, str]:
    """Run a command in this process: exit status, and what it said on standard error."""
    said, before = io.StringIO(), sys.argv
    sys.argv = ["dear", *words]
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            main()
    except SystemExit as end:
        return int(end.code or 0), said.getvalue()
    finally:
        sys.argv = before
    return 0, said.getvalue()


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


def test_there_are_at_least_fifty() -> None:
    assert len(USES) >= 50
    assert len({command for command, _ in USES}) == len(USES)


@pytest.mark.parametrize(("command", "sentence"), USES, ids=[command for command, _ in USES])
def test_wrong_uses(command: str, sentence: str, place: Path) -> None:
    before = contents(place)
    status, said = dear(*shlex.split(command))
    flat = " ".join(said.replace("│", " ").split())
    for part in sentence.split(" & "):
        assert part in flat, said
    assert status == 2, said
    assert "Traceback" not in said
    lines = [line for line in said.strip().splitlines() if not line.startswith("note: ")]
    if lines[0].startswith("dear: ") and "cannot be read:" not in said:  # those are listed, one per line
        assert len(lines) == 1
    assert contents(place) == before  # names and bytes


def test_nothing_was_changed(place: Path) -> None:
    """After all of them: everything is as it was made, byte for byte, and the run still answers."""
    snapshot = json.loads((place.parent / f"{place.name}.json").read_text())
    assert {name: digest(data) for name, data in contents(place).items()} == snapshot
    assert dear("evaluate", "run", "--data", "photos", "--json")[0] == 0
    after = {name: digest(data) for name, data in contents(place).items()}
    assert {name for name in after if after[name] != snapshot.get(name)} == {"run/metrics.json"}
