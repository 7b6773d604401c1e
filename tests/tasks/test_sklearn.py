"""`dear.Classifier` inside scikit-learn: its own checks where they apply, and its tools."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from sklearn.base import clone, is_classifier
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils import estimator_checks as checks
from tiny import Colors, tiny_clip

from dear.classifier import Classifier
from dear.errors import UsageError

CLIP = tiny_clip(dtype=torch.float32)
WITHOUT_DATA = [
    "check_parameters_default_constructible",
    "check_get_params_invariance",
    "check_set_params",
    "check_no_attributes_set_in_init",
    "check_estimator_cloneable",
    "check_estimator_repr",
    "check_estimator_tags_renamed",
    "check_valid_tag_types",
]


@pytest.fixture(scope="module")
def colors() -> tuple[list, list[str]]:
    images = Colors(classes=3, each=4)
    return [images.image(i) for i in range(12)], [images.classes[label] for label in images.labels]


def quick(**changes: object) -> Classifier:
    return Classifier(**{"method": "linear-probe", "backbone": CLIP, "epochs": 2, **changes})


@pytest.mark.parametrize("name", [name for name in WITHOUT_DATA if hasattr(checks, name)])
def test_scikit_learns_own_checks(name: str) -> None:
    getattr(checks, name)("Classifier", Classifier(method="linear-probe"))


def test_tools_of_scikit_learn(colors: tuple[list, list[str]]) -> None:
    images, names = colors
    assert is_classifier(quick())
    scores = cross_val_score(quick(calibrate=False), images, names, cv=2)
    assert np.isfinite(scores).all()  # NaN stands for a training that failed
    search = GridSearchCV(quick(calibrate=False), {"lr": [1e-4, 1e-1]}, cv=2).fit(images, names)
    assert search.best_estimator_.run_.spec.recipe["lr"] == search.best_params_["lr"]
    pipeline = make_pipeline(FunctionTransformer(), quick(calibrate=False)).fit(images, names)
    alone = quick(calibrate=False).fit(images, names)
    assert pipeline.predict(images).tolist() == alone.predict(images).tolist()


def test_probabilities_sum_to_one_and_order_does_not_matter(colors: tuple[list, list[str]]) -> None:
    images, names = colors
    fitted = quick().fit(images, names)
    assert fitted.run_.calibration is not None
    proba = fitted.predict_proba(images)
    np.testing.assert_allclose(proba.sum(axis=1), 1, rtol=1e-5)
    assert (fitted.classes_[proba.argmax(axis=1)] == fitted.predict(images)).all()
    np.testing.assert_allclose(fitted.predict_proba(images[::-1])[::-1], proba, rtol=1e-4)
    arrays = [np.asarray(image) for image in images]
    np.testing.assert_allclose(fitted.predict_proba(arrays), proba, rtol=1e-4)


def test_a_fitted_classifier_can_be_cloned_and_pickled(colors: tuple[list, list[str]]) -> None:
    images, names = colors
    fitted = Classifier(method="linear-probe", epochs=1, reject=0.2).fit(images, names)
    assert not hasattr(clone(fitted), "method_")
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_allclose(again.predict_proba(images), fitted.predict_proba(images), rtol=1e-5)
    assert (again.predict(images) == fitted.predict(images)).all()
    assert again.run_.calibration == fitted.run_.calibration


def test_class_weight_is_a_choice_of_two(colors: tuple[list, list[str]]) -> None:
    images, names = colors
    few = [*images[:4], *images[4:6], *images[8:9]]  # 4, 2 and 1 images
    told = [*names[:4], *names[4:6], *names[8:9]]
    weighted, plain = (quick(class_weight=w, calibrate=False).fit(few, told) for w in ("balanced", None))
    assert not np.allclose(weighted.predict_proba(few), plain.predict_proba(few))
    with pytest.raises(UsageError, match="class_weight"):
        quick(class_weight={"red": 2}).fit(images, names)
