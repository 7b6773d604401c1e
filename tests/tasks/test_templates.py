"""One rule for prompts: a run keeps the template it was trained with, for old and new classes."""

from __future__ import annotations

import torch
from tiny import Colors, tiny_clip

from dear.runs.model import Model
from dear.tasks.adapt import adapt
from dear.tasks.evaluate import evaluate

CLIP = tiny_clip(dtype=torch.float32)
OWN = "a drawing of the {} thing"


def run():
    return adapt(Colors(), backbone=CLIP, method="zeroshot", template=OWN, calibrate=False).method


def renamed() -> Colors:
    images = Colors()
    images.classes = ("crimson", "lime", "navy")
    return images


def expected(names: tuple[str, ...], template: str) -> torch.Tensor:
    """Zero-shot probabilities of the set's images, from features alone."""
    pixels = torch.stack([CLIP.preprocess(Colors().image(i)) for i in range(len(Colors()))])
    texts = torch.nn.functional.normalize(
        CLIP.encode_text([template.replace("{}", n) for n in names]), dim=-1
    )
    features = torch.nn.functional.normalize(CLIP.encode_image(pixels), dim=-1)
    return (CLIP.logit_scale * features @ texts.T).softmax(-1)


def test_new_classes_keep_the_template_of_the_run() -> None:
    images = renamed()
    assert images.template != OWN
    model, _ = Model(run()).for_labels(images)
    assert model.template == OWN
    found = Model(run()).evaluate(images)
    torch.testing.assert_close(
        found.confidence["default"], expected(images.classes, OWN).max(-1).values, atol=1e-4, rtol=0
    )


def test_evaluate_and_predict_follow_the_same_rule() -> None:
    images = renamed()
    queries = [images.image(i) for i in range(len(images))]
    for template in (None, "one {}"):
        wanted = expected(images.classes, template or OWN)
        evaluated = evaluate(run(), images, template=template).confidence["default"]
        predicted = Model.of(run()).answers(queries, classes=images.classes, template=template, top=1)
        torch.testing.assert_close(evaluated, wanted.max(-1).values, atol=1e-4, rtol=0)
        told = torch.tensor([answer.classes[0][1] for answer in predicted])
        torch.testing.assert_close(told, wanted.max(-1).values, atol=1e-4, rtol=0)


def test_a_template_without_classes_is_used() -> None:
    images = Colors()
    queries = [images.image(i) for i in range(len(images))]
    wanted = expected(images.classes, "one {}")
    told = Model.of(run()).answers(queries, template="one {}", top=3)
    for answer, row in zip(told, wanted, strict=True):
        probabilities = torch.tensor([probability for _, probability in answer.classes])
        torch.testing.assert_close(probabilities, row.topk(3).values, atol=1e-4, rtol=0)
    own = Model.of(run()).answers(queries, top=3)
    assert any(a.classes[0][1] != b.classes[0][1] for a, b in zip(told, own, strict=True))
