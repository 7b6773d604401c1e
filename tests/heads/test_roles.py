"""Role maps: Table 2, the rules, the file, the binding to weights."""

import json
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from msgspec import structs

from dear.clip.config import ClipConfig
from dear.errors import DearError, RoleError
from dear.heads.known_roles import known_roles, read_roles
from dear.heads.names import CORE
from dear.heads.role import Role
from dear.heads.roles import RoleMap
from dear.heads.rules import (
    HeadDescription,
    assign_roles,
    concept_entropy,
    concept_shares,
    dominant,
    quantile,
    reassign_roles,
)

PRINT = "sha256:" + "ab" * 32


def clip(layers=12, heads=12, fingerprint=PRINT):
    vision = SimpleNamespace(layers=layers, heads=heads)
    return SimpleNamespace(config=SimpleNamespace(vision=vision), fingerprint=fingerprint)


def head(**counts):
    concepts = tuple(c for c, n in counts.items() for _ in range(n))
    return HeadDescription.of([f"phrase {i}" for i in range(len(concepts))], concepts)


def small_map(**kwargs):
    heads = {
        (1, 0): head(Color=4),
        (1, 1): head(Animal=3, Color=1),
        (2, 0): head(Style=4),
        (2, 1): head(Color=2, Text=2),
    }
    table = dominant(heads, 0.6)
    return RoleMap(table, 2, "tiny", PRINT, 2, "dominant", {"tau": 0.6}, **kwargs)


def test_table2_counts_of_the_supplement():
    roles = RoleMap.table2()
    assert roles.layers == (9, 10, 11, 12)
    assert roles.heads == 12
    assert roles.counts() == {"core": 28, "other": 8, "generalization": 7, "mixed": 5}
    assert roles.concept_counts() == {"Location": 13, "Object": 6, "Texture": 4, "Color": 3, "Shape": 2}
    assert roles[9, 2].kind == "mixed"
    assert roles[12, 7] == Role(
        "core", "Object", None, {},
        ("A stick", "A cup", "A bonnet", "A shoelace", "A bottle", "A belt", "A jacket", "A puddle"),
    )  # fmt: skip
    assert all(len(role.phrases) >= 3 for _, role in roles)
    assert all(role.concept == "Style" for _, role in roles if role.kind == "generalization")


def test_entropy_by_hand():
    assert concept_entropy(concept_shares(["A"] * 20)) == 0
    assert concept_entropy(concept_shares("ABCD" * 5)) == 2
    assert concept_entropy(concept_shares("AAB")) == pytest.approx(0.9182958340544896)
    assert concept_entropy({"A": 1.0, "B": 0.0}) == 0


def test_quantile_counts_order_and_ties():
    heads = {(layer, h): head(Color=20 - h, Animal=h) for layer in range(9, 13) for h in range(11)}
    heads |= {(layer, 11): head(Animal=20) for layer in range(9, 13)}
    table = quantile(heads, 0.2)
    kinds = [role.kind for role in table.values()]
    assert len(table) == 48
    assert kinds.count("core") + kinds.count("other") == 10  # "about 10/10/28 of 48"
    assert kinds.count("generalization") == 10
    assert kinds.count("mixed") == 28
    assert table[9, 11].kind == "other"
    assert table[9, 11].concept == "Animal"
    assert table[9, 0].kind == "core"
    assert all(table[layer, 10].kind == "generalization" for layer in range(9, 13))
    shuffled = list(heads.items())
    random.Random(0).shuffle(shuffled)
    assert quantile(dict(shuffled), 0.2) == table
    for bad in (0, -0.1, 0.6):
        with pytest.raises(RoleError, match=str(bad)):
            quantile(heads, bad)


def test_dominant_by_hand():
    table = dominant(
        {
            (1, 0): head(Color=7, Animal=6, Text=7),
            (1, 1): head(Style=12, Color=8),
            (1, 2): head(Animal=10, Color=10),
            (1, 3): head(Color=6, Animal=6, Text=6, Number=2),
        },
        0.35,
    )
    assert [(r.kind, r.concept) for r in table.values()] == [
        ("core", "Color"), ("generalization", "Style"), ("other", "Animal"), ("mixed", None),
    ]  # fmt: skip
    assert list(table[1, 3].shares.items()) == [
        ("Color", 0.3),
        ("Animal", 0.3),
        ("Text", 0.3),
        ("Number", 0.1),
    ]
    with pytest.raises(RoleError):
        dominant({(1, 0): head(Color=1)}, 0)


def test_save_and_load_are_inverse_and_stable(tmp_path):
    roles = small_map(evidence={"image_count": 12, "note": "größer"})
    roles.save(tmp_path / "roles.json")
    again = RoleMap.load(tmp_path / "roles.json")
    assert again == roles
    again.save(tmp_path / "second.json")
    assert (tmp_path / "second.json").read_bytes() == (tmp_path / "roles.json").read_bytes()
    table2 = RoleMap.table2()
    table2.save(tmp_path / "t2.json")
    assert RoleMap.load(tmp_path / "t2.json") == table2


def change(document, path, value):
    for key in path[:-1]:
        document = document[key]
    if value is KeyError:
        del document[path[-1]]
    else:
        document[path[-1]] = value


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (["format"], "other", "not a role map"),
        (["schema"], 3, "schema 3"),
        (["rule"], KeyError, "rule"),
        (["extra"], 1, "extra"),
        (["heads"], True, "at heads: expected `int`, got `bool`"),
        (["heads"], 10**9, "at heads: expected `int` <= 512"),
        (["heads"], 3, "each of 3 heads"),
        (["layers"], [2, 1], "layers must ascend"),
        (["layers"], [], "at layers: expected `array` of length >= 1"),
        (["depth"], 1, "[1, 2]"),
        (["fingerprint"], "md5:1", "at fingerprint: expected `str` matching regex '^sha256:"),
        (["core"], ["Color", "Color"], "core must be a list of different concepts"),
        (["core"], ["Shape"], "core for 'Color'"),
        (["roles", 0, "kind"], "best", "at roles[0].kind: invalid enum value 'best'"),
        (["roles", 0, "kind"], [], "at roles[0].kind: expected `str`, got `array`"),
        (["roles", 0, "layer"], 1.5, "at roles[0].layer: expected `int`, got `float`"),
        (["roles", 0, "head"], 1, "twice"),
        (["roles", 0, "head"], 7, "(1, 0)"),
        (["roles", 0, "entropy"], -1, "at roles[0].entropy: expected `float` >= 0"),
        (["roles", 0, "entropy"], "1", "at roles[0].entropy: expected `float | null`, got `str`"),
        (["roles", 0, "shares"], {"Color": 0.5}, "add up"),
        (["roles", 0, "shares"], {"Color": 2}, "at roles[0].shares[a value]: expected `float` <= 1"),
        (["roles", 0, "phrases"], ["x", 1], "at roles[0].phrases[1]: expected `str`, got `int`"),
        (["roles", 0, "concept"], None, "needs a concept"),
        (["roles", 0, "concept"], 4, "at roles[0].concept: expected `str | null`, got `int`"),
        (["roles", 0], "x", "at roles[0]: expected `object`, got `str`"),
        (["roles"], {}, "at roles: expected `array`, got `object`"),
        (["location"], "a\u001bb", "at location"),
        (["evidence", "information"], 3, "information"),
        (["evidence", "information"], {"bits": -1}, "information"),
        (["evidence"], [], "at evidence: expected `object`, got `array`"),
    ],
)
def test_damaged_files_are_refused_with_the_place(tmp_path, path, value, says):
    file = tmp_path / "roles.json"
    small_map().save(file)
    document = json.loads(file.read_text())
    change(document, path, value)
    file.write_text(json.dumps(document))
    with pytest.raises(RoleError, match=r"roles\.json") as error:
        RoleMap.load(file)
    assert says in str(error.value)


def test_missing_and_cut_files(tmp_path):
    with pytest.raises(DearError, match=r"none\.json"):
        RoleMap.load(tmp_path / "none.json")
    file = tmp_path / "roles.json"
    small_map().save(file)
    file.write_text(file.read_text()[:-20])
    with pytest.raises(DearError, match=r"roles\.json"):
        RoleMap.load(file)


def test_bound_to_the_weights():
    roles = small_map()
    assert roles.check(clip(2, 2)) is None
    with pytest.raises(RoleError, match="discover_roles") as error:
        roles.check(clip(2, 2, "sha256:" + "cd" * 32))
    assert "allow_other" in str(error.value)
    assert "cdcdcd" in str(roles.check(clip(2, 2, "sha256:" + "cd" * 32), allow_other=True))
    for shape in ((2, 3), (3, 2), (1, 2)):
        with pytest.raises(RoleError, match="layers"):
            roles.check(clip(*shape), allow_other=True)


def test_table2_fits_any_12_by_12_tower_with_a_notice():
    for roles in (RoleMap.table2(), RoleMap.table2().shuffled(3)):
        assert "Table 2" in str(roles.check(clip()))
        with pytest.raises(RoleError):
            roles.check(clip(24, 16))
        with pytest.raises(RoleError):
            roles.check(clip(12, 6))


def test_shuffle_keeps_counts_and_moves_roles():
    roles = RoleMap.table2()
    a, b = roles.shuffled(1), roles.shuffled(2)
    assert a.counts() == roles.counts()
    assert a.concept_counts() == roles.concept_counts()
    assert a == roles.shuffled(1)
    assert [r.kind for _, r in a] != [r.kind for _, r in b]
    assert a[9, 0].phrases == roles[9, 0].phrases
    assert a.rule == "shuffled"
    assert a.parameters == {"of": "table2", "seed": 1}


def test_uniform_maps():
    roles = RoleMap.uniform("generalization", [5, 6], 8)
    assert roles.counts() == {"core": 0, "other": 0, "generalization": 16, "mixed": 0}
    assert roles.check(clip(6, 8)) is None
    with pytest.raises(RoleError):
        RoleMap.uniform("core", [5, 6], 8)


def test_select_and_missing_heads():
    roles = RoleMap.table2()
    assert len(roles.select("core", "Location")) == 13
    assert len(roles.select(concept="Style")) == 7
    with pytest.raises(RoleError, match=r"\b8\b"):
        roles[8, 0]
    with pytest.raises(RoleError, match=r"\(1, 1\)"):
        RoleMap({(1, 0): Role("mixed")}, 2)
    assert roles.core == CORE


def test_another_rule_on_the_same_measurements(tmp_path):
    small_map().save(tmp_path / "roles.json")
    roles = RoleMap.load(tmp_path / "roles.json")
    strict = reassign_roles(roles, "dominant", 0.8)
    assert [role.kind for _, role in strict] == ["core", "mixed", "generalization", "mixed"]
    ranked = reassign_roles(roles, "quantile", 0.25)
    assert [role.kind for _, role in ranked] == ["core", "mixed", "mixed", "generalization"]
    assert ranked.parameters == {"q": 0.25}
    assert reassign_roles(ranked, "dominant", 0.6).table == roles.table
    with pytest.raises(RoleError, match="table2"):
        reassign_roles(RoleMap.table2(), "quantile")
    with pytest.raises(RoleError, match="best"):
        reassign_roles(roles, "best")


def test_heads_without_phrases_are_mixed():
    for rule in ("quantile", "dominant"):
        table, _ = assign_roles({(1, 0): head(), (1, 1): head(Color=3)}, rule)
        assert table[1, 0].kind == "mixed"


def test_chance_of_reaching_the_default_threshold():
    """7 of 20 phrases in some one of twelve concepts, drawn evenly, is rarer than one in a hundred."""
    rng = random.Random(0)
    hits = sum(max(map([rng.randrange(12) for _ in range(20)].count, range(12))) >= 7 for _ in range(3000))
    assert hits / 3000 < 0.01


@pytest.mark.parametrize(
    ("name", "changes", "known"),
    [
        ("openai/clip-vit-base-patch16", {}, True),
        ("clip-vit-base-patch16", {}, True),  # a folder downloaded from the hub
        ("ViT-B-16.pt", {}, True),  # OpenAI's own file
        ("ViT-B-16.pt", {"activation": "gelu"}, False),  # LAION's weights in the same shape
        ("openai/clip-vit-base-patch16", {"patch_size": 32}, False),
        ("laion/CLIP-ViT-B-16-laion2B-s34B-b88K", {"activation": "gelu"}, False),
        ("openai/clip-vit-base-patch32", {}, False),
        ("my-finetuned-b16", {}, False),
        ("random", {}, False),
    ],
)
def test_table2_is_taken_by_itself_for_openais_b16_alone(name, changes, known):
    config = ClipConfig.named("ViT-B-16")
    config = replace(config, vision=replace(config.vision, **changes))
    clip = SimpleNamespace(name=name, config=config, fingerprint="sha256:0")
    roles = known_roles(clip)
    assert (roles is not None) == known
    assert roles is None or roles.rule == "table2"


def test_table2_can_be_asked_for_by_name(tmp_path):
    assert read_roles("table2") == RoleMap.table2()
    small_map().save(tmp_path / "roles.json")
    assert read_roles(tmp_path / "roles.json") == small_map()


@pytest.mark.parametrize("key", ["concept", "entropy", "shares", "phrases"])
def test_a_row_of_a_file_lacks_nothing(key, tmp_path):
    path = tmp_path / "roles.json"
    RoleMap.table2().save(path)
    document = json.loads(path.read_text())
    del document["roles"][3][key]
    path.write_text(json.dumps(document))
    with pytest.raises(RoleError, match=key):
        RoleMap.load(path)


def test_a_map_shows_itself_as_a_line_and_as_a_table():
    roles = RoleMap.table2()
    assert len(repr(roles)) < 150
    assert "28 core" in repr(roles)
    table = roles._repr_html_()
    assert table.count("<td") == len(roles)
    odd = structs.replace(small_map(), backbone="<b>odd")
    assert "<b>" not in odd._repr_html_()
