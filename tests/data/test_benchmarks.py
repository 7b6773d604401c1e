"""The field's layouts, written here as their publishers lay them out, and read back."""

import json

import pytest

from dear.data import ImageSet, check_dataset, list_datasets, open_data, select_domains
from dear.data.names import check_template
from dear.data.open import BENCHMARKS, open_benchmark
from dear.errors import DataError, UsageError

# Supplement, Table 4.
TEMPLATES = {
    "OxfordPets": "a photo of a {}, a type of pet.",
    "OxfordFlowers": "a photo of a {}, a type of flower.",
    "FGVCAircraft": "a photo of a {}, a type of aircraft.",
    "DescribableTextures": "{} texture.",
    "EuroSAT": "a centered satellite photo of {}.",
    "StanfordCars": "a photo of a {}.",
    "Food101": "a photo of {}, a type of food.",
    "SUN397": "a photo of a {}.",
    "Caltech101": "a photo of a {}.",
    "UCF101": "a photo of a person doing {}.",
    "ImageNet": "a photo of a {}.",
    "ImageNetSketch": "a photo of a {}.",
    "ImageNetV2": "a photo of a {}.",
    "ImageNetA": "a photo of a {}.",
    "ImageNetR": "a photo of a {}.",
}
SPLIT_SETS = [name for name, benchmark in BENCHMARKS.items() if benchmark.kind == "split"]


def test_twenty_benchmarks_with_the_papers_templates():
    assert len(BENCHMARKS) == 22
    assert {name: BENCHMARKS[name].template for name in TEMPLATES} == TEMPLATES
    for benchmark in BENCHMARKS.values():
        check_template(benchmark.template)
        assert benchmark.source


def write_split(root, name, table):
    benchmark = BENCHMARKS[name]
    home = root / benchmark.folder
    (home / benchmark.images).mkdir(parents=True, exist_ok=True)
    (home / benchmark.split).write_text(json.dumps(table))
    return home / benchmark.images


@pytest.mark.parametrize("name", SPLIT_SETS)
def test_split_files(paint, name):
    root = paint("x/y.png")
    table = {
        "train": [["b/1.png", 1, "american_bulldog"], ["a/1.png", 0, "Annual Crop Land"]],
        "val": [["b/2.png", 1, "american_bulldog"]],
        "test": [["a/2.png", 0, "Annual Crop Land"]],
    }
    folder = write_split(root, name, table)
    paint(*(str((folder / row[0]).relative_to(root)) for rows in table.values() for row in rows))
    train = open_data(name.lower(), "train", root=root)
    assert train.name == name
    assert train.classes == ("Annual Crop Land", "american bulldog")
    assert train.labels.tolist() == [1, 0]
    assert train.key(0) == "b/1.png"
    assert train.image(0).size == (12, 8)
    assert train.template == TEMPLATES[name]
    assert [len(open_data(name, split, root=root)) for split in ("val", "test", "all")] == [1, 1, 4]
    with pytest.raises(DataError, match="'dev'"):
        open_data(name, "dev", root=root)
    assert open_data(name, "test", root=root, template="a {}").template == "a {}"


@pytest.mark.parametrize(
    ("row", "match"),
    [
        (["../../secret.png", 0, "a"], r"train row 2: .*secret\.png"),
        (["/etc/passwd", 0, "a"], "/etc/passwd"),
        (["out/secret.png", 0, "a"], r"out/secret\.png"),
        (["a.png", "0", "a"], "train row 2"),
        (["a.png", True, "a"], "train row 2"),
        (["a.png", 0], "train row 2"),
        (["a.png", 0, "b"], "0 .*'a' .*'b'"),
    ],
)
def test_hostile_split_files_are_refused(paint, row, match):
    root = paint("outside/secret.png")
    folder = write_split(root, "EuroSAT", {"train": [["ok.png", 0, "a"], row], "test": []})
    (folder / "out").symlink_to(root / "outside")
    with pytest.raises(DataError, match=match):
        open_data("EuroSAT", "train", root=root)


@pytest.mark.parametrize("content", ["[]", "{}", '{"train": 3}', "nonsense", '{"train": [], "train": []}'])
def test_malformed_split_files(paint, content):
    root = paint("eurosat/2750/a/1.png")
    (root / "eurosat" / "split_zhou_EuroSAT.json").write_text(content)
    with pytest.raises(DataError, match="split_zhou_EuroSAT"):
        open_data("EuroSAT", "train", root=root)


WORDNET = {"n01440764": "tench", "n02012849": "crane", "n03126707": "crane", "n04209239": "shower_curtain"}


def classnames(folder):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "classnames.txt").write_text(
        "".join(f"{key} {name}\n" for key, name in reversed(WORDNET.items()))
    )


def test_imagenet(paint):
    ids = list(WORDNET)
    root = paint(
        *(f"imagenet/images/{s}/{i}/{n}.jpeg" for s in ("train", "val") for i in ids for n in range(2))
    )
    classnames(root / "imagenet")
    train = open_data("ImageNet", "train", root=root)
    assert train.classes == (
        "tench",
        "crane",
        "crane",
        "shower curtain",
    )  # two classes of one name, as published
    assert train.labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert open_data("ImageNet", "test", root=root).key(0) == "val/n01440764/0.jpeg"
    assert train.select_labels([2, 3]).classes == ("crane", "shower curtain")
    paint("imagenet/images/train/n99999999/0.jpeg")
    with pytest.raises(DataError, match="n99999999"):
        open_data("ImageNet", "train", root=root)


def test_imagenet_v2_folders_are_numbers(paint):
    folder = "imagenetv2/imagenetv2-matched-frequency-format-val"
    root = paint(*(f"{folder}/{label}/a.jpeg" for label in (3, 0, 2)))
    classnames(root / "imagenet")  # ImageNet's file serves its variants
    data = open_data("ImageNetV2", "test", root=root)
    assert data.labels.tolist() == [0, 2, 3]
    assert len(data.classes) == 4
    with pytest.raises(DataError, match="'train'"):
        open_data("ImageNetV2", "train", root=root)


@pytest.mark.parametrize(
    ("name", "folder"),
    [("ImageNetA", "imagenet-adversarial/imagenet-a"), ("ImageNetR", "imagenet-rendition/imagenet-r")],
)
def test_imagenet_a_and_r_have_their_own_classes(paint, name, folder):
    root = paint(f"{folder}/n04209239/1.jpg", f"{folder}/n02012849/2.jpg")
    (root / folder / "README.txt").write_text("x")
    classnames((root / folder).parent)
    data = open_data(name, "test", root=root)
    assert data.classes == ("crane", "shower curtain")
    assert data.paths == ("n02012849/2.jpg", "n04209239/1.jpg")
    assert data.labels.tolist() == [0, 1]


def test_imagenet_sketch_has_all_classes(paint):
    root = paint("imagenet-sketch/images/n04209239/1.jpg")
    classnames(root / "imagenet-sketch")
    data = open_data("ImageNetSketch", "test", root=root)
    assert len(data.classes) == 4
    assert data.labels.tolist() == [3]


def test_aircraft(paint):
    root = paint("fgvc_aircraft/images/0034309.jpg", "fgvc_aircraft/images/1025794.jpg")
    home = root / "fgvc_aircraft"
    (home / "variants.txt").write_text("707-320\nF/A-18\nModel B200\n")
    (home / "images_variant_train.txt").write_text("1025794 707-320\n0034309 Model B200\n")
    (home / "images_variant_val.txt").write_text("")
    (home / "images_variant_test.txt").write_text("0034309 F/A-18\n")
    train = open_data("FGVCAircraft", "train", root=root)
    assert train.classes == ("707-320", "F/A-18", "Model B200")
    assert train.paths == ("1025794.jpg", "0034309.jpg")
    assert train.labels.tolist() == [0, 2]
    (home / "images_variant_test.txt").write_text("0034309 Concorde\n")
    with pytest.raises(DataError, match="'Concorde'"):
        open_data("FGVCAircraft", "test", root=root)
    (home / "images_variant_test.txt").write_text("../../secret F/A-18\n")
    with pytest.raises(DataError, match="secret"):
        open_data("FGVCAircraft", "test", root=root)


@pytest.mark.parametrize("name", [name for name, benchmark in BENCHMARKS.items() if benchmark.domains])
def test_domains(paint, name):
    benchmark = BENCHMARKS[name]
    root = paint(
        *(
            f"{benchmark.folder}/{d}/{c}/{n}.jpg"
            for d in benchmark.domains
            for c in ("Alarm_Clock", "dog")
            for n in range(5)
        )
    )
    data = open_data(name, "all", root=root)
    assert data.classes == ("Alarm Clock", "dog")
    assert len(data) == 10 * len(benchmark.domains)
    assert set(data.domains) == set(benchmark.domains)
    held = open_data(name, "test", root=root)
    train = open_data(name, "train", root=root)
    assert (len(train), len(held)) == (8 * len(benchmark.domains), 2 * len(benchmark.domains))
    assert not set(train.paths) & set(held.paths)
    one = select_domains(data, [benchmark.domains[1]])
    assert one.labels.tolist() == [0] * 5 + [1] * 5
    for place in sorted((root / benchmark.folder / benchmark.domains[0]).rglob("*"), reverse=True):
        place.unlink() if place.is_file() else place.rmdir()
    (root / benchmark.folder / benchmark.domains[0]).rmdir()
    with pytest.raises(DataError, match=f"'{benchmark.domains[0]}'"):
        open_data(name, "all", root=root)


@pytest.mark.parametrize("name", list(BENCHMARKS))
def test_an_empty_root_is_explained(tmp_path, name):
    with pytest.raises(DataError, match=BENCHMARKS[name].folder):
        open_benchmark(name, "test", tmp_path)
    check = check_dataset(name, tmp_path)
    assert not check.complete
    assert check.missing
    assert "http" in str(check)
    assert json.loads(json.dumps(check.to_dict()))["complete"] is False


def test_check_counts_images_and_those_missing(paint):
    root = paint("eurosat/2750/a/1.png")
    write_split(root, "EuroSAT", {"train": [["a/1.png", 0, "a"], ["a/2.png", 0, "a"]], "val": [], "test": []})
    check = check_dataset("EuroSAT", root)
    assert check.images == {"train": 2, "val": 0, "test": 0}
    assert check.absent == {"train": 1, "val": 0, "test": 0}
    assert "1 of 10" in str(check)


def test_names_that_are_no_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="OxfordPets"):
        open_data("OxfordPets", "test")
    with pytest.raises(DataError, match="OxfordPets"):
        open_data("OxfordPet", "test")
    with pytest.raises(DataError, match="photos"):
        open_data("photos", "test")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(DataError, match="notes"):
        open_data("notes.txt", "test")
    with pytest.raises(UsageError, match="Nothing"):
        check_dataset("Nothing", tmp_path)


def test_a_folder_of_a_benchmarks_name_is_a_folder_without_a_root(paint, monkeypatch):
    monkeypatch.chdir(paint("PACS/cat/1.png", "PACS/cat/2.png"))
    assert open_data("PACS", "all").classes == ("cat",)


def test_tasks_of_the_world():
    names = list_datasets()
    assert set(BENCHMARKS) < set(names)
    assert "world:textures" in names
    task = open_data("world:textures", "test", template="a {}!")
    assert isinstance(task, ImageSet)
    assert task.template == "a {}!"
    assert open_data("world:textures", "test").template != "a {}!"
    with pytest.raises(DataError, match="nothing"):
        open_data("world:nothing", "test")
