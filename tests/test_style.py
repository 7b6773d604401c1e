"""House rules that a program can check: sizes of functions, US spelling, one word for one thing."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "dear"

MAX_LINES, MAX_PARAMETERS = 60, 10
LONG = {
    "dear/world/tasks.py:_make": "the table of the attribute world's tasks",
}
MANY_PARAMETERS = {
    "dear/workflows/classifier.py:__init__": "scikit-learn's manners: parameters are visible and copyable",
}
COMMANDS = "dear/cli/"  # the options of a command are its parameters, one or more lines each
KERNELS = "kernels.py"

# Words of British spelling. Names that old files hold, and words that users may type, are allowed below.
BRITISH = (
    "colour|optimis|normalis|regularis|initialis|generalis|specialis|summaris|organis|recognis|visualis|"
    "parametris|serialis|quantis|vectoris|memoris|minimis|maximis|utilis|centre|licence|behaviour|grey|"
    "neighbour|favour|honour|flavour|labelled|labelling|modelling|analyse|catalogue|artefact|judgement|"
    "travell|towards|whilst|per cent"
)
PER = (
    "head|class|layer|image|step|batch|attribute|second|row|seed|method|dataset|cell|call|category|domain|"
    "concept|backbone|group|machine|GPU|epoch|mode|core|worker|minute|hour|line|task"
)
PATTERNS = {
    "US spelling": rf"{BRITISH}",
    "image, not picture": r"picture",
    # a count of something "a head": "phrases a head", "one row a layer"
    "per head, not 'a head'": (
        r"\b(numbers|parameters|phrases|tokens|captions|crops|weights|gates|shots|steps|epochs|operations|"
        r"ms|MB|GB|bytes|cells|labels|views|seconds|milliseconds|prompts|templates|photos|once|"
        r"(?:one|two|three) (?:\w+ )?(?!(?:of|in|on|is|not|with|for|to|from|as|has|over|than|and|or)\b)\w+|"
        r"a (?:row|bar|folder|line|column|token|file|table|gate|mask|set|vector|score|seed))"
        rf" (?:a|an) (?:{PER})\b"
    ),
    "images per class, not 'images a class'": r"\bimages a (?:class|step|second|domain|batch|call|GPU)\b",
    "dataset, not data set": r"\bdata sets?\b",
}
ALLOWED = {  # what a line may hold, and why
    r'"(colour|optimiser|centre|pictures|phrases_a_head)"': "words of older files, and what users may type",
    r"'colour'": "a field that no service knows",
    r'"Colour"|\^optimiser|optimiser\.': "the same",
    r'"(gray", ")?grey"': "a caption's or a class's word",
    r'_template\("a picture|^\s*"a picture",$': "captions and templates",
    r"not \(in code\)|\| picture, photo|data set, corpus": "the glossary says which words are not used",
}
DATA = ("src/dear/heads/corpus/words/", "tests/test_style.py")


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{path.relative_to(SOURCE.parent).as_posix()}:{node.name}", node


def lines_of(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """All lines of a function; of a command those after its options and its help text."""
    first = node.lineno
    if name.startswith(COMMANDS):
        body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
        first = body[0].lineno
    return (node.end_lineno or first) - first + 1


def parameters_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return sum(one.arg not in ("self", "cls", "ctx") for one in every)


def test_functions_are_short():
    long = {name: lines_of(name, node) for name, node in functions() if lines_of(name, node) > MAX_LINES}
    assert {name: lines for name, lines in long.items() if name not in LONG} == {}
    assert set(LONG) <= set(long), "an exception that is not needed any more"


def test_functions_take_few_parameters():
    many = {name: parameters_of(node) for name, node in functions() if parameters_of(node) > MAX_PARAMETERS}
    free = {name for name in many if name.startswith(COMMANDS) or name.split(":")[0].endswith(KERNELS)}
    assert {name: count for name, count in many.items() if name not in free | set(MANY_PARAMETERS)} == {}
    assert set(MANY_PARAMETERS) <= set(many), "an exception that is not needed any more"


def texts() -> Iterator[tuple[str, str]]:
    found = [ROOT / name for name in ("README.md", "CHANGELOG.md", "SECURITY.md", "Makefile", "mkdocs.yml")]
    for folder in ("src/dear", "docs", "tests", "benchmarks", "scripts", "examples"):
        found += [
            path
            for path in (ROOT / folder).rglob("*")
            if path.suffix in (".py", ".md", ".html", ".js", ".css")
        ]
    for path in sorted(found):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(DATA):
            yield name, path.read_text(encoding="utf-8")


@pytest.mark.parametrize("rule", PATTERNS)
def test_words(rule):
    pattern, allowed = re.compile(PATTERNS[rule], re.IGNORECASE), re.compile("|".join(ALLOWED))
    wrong = [
        f"{name}:{number}: {line.strip()[:100]}"
        for name, text in texts()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(allowed.sub("", line))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ("US spelling", "the optimiser of a run"),
        ("image, not picture", "eight pictures"),
        ("per head, not 'a head'", "twenty phrases a head"),
        ("per head, not 'a head'", "one row a layer"),
        ("per head, not 'a head'", "one learned bias a class"),
        ("images per class, not 'images a class'", "16 images a class"),
        ("dataset, not data set", "a data set"),
    ],
)
def test_the_rules_find_what_they_forbid(rule, line):
    assert re.search(PATTERNS[rule], line, re.IGNORECASE)


def test_every_guide_is_listed():
    guides = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
    readme, nav = (ROOT / "README.md").read_text(), (ROOT / "mkdocs.yml").read_text()
    assert [name for name in guides if f": {name}" not in nav] == []
    assert [name for name in guides if name != "index.md" and f"- [docs/{name}]" not in readme] == []
