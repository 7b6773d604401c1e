"""Calibration's formulas against numpy, scipy and scikit-learn written out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from sklearn.metrics import roc_auc_score

from dear.calibration.calibration import (
    Calibration,
    ModeCalibration,
    apply_scales,
    class_scales,
    threshold,
)
from dear.calibration.temperature import (
    CAUTION,
    auroc,
    cautious_temperature,
    fit_temperature,
    temperature_error,
)
from dear.errors import UsageError
from dear.runs.evaluation import calibration_error, share_interval
from dear.train.calibrate import TOWER_CAUTION, TWO_THIRDS_BIAS, fit_calibration, with_nearness
from dear.train.crossval import HeldOut, HeldOutClasses


def softmax(z: np.ndarray) -> np.ndarray:
    powers = np.exp(z - z.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def logits(
    n: int = 300, classes: int = 6, scale: float = 4.0, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Logits whose softmax is right, times `scale`."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(n, classes)) * 1.5
    labels = np.array([rng.choice(classes, p=row) for row in softmax(z)])
    return z * scale, labels


def test_calibration_error_is_the_literal_sum_over_bins() -> None:
    z, labels = logits()
    p = softmax(z)
    sure, right = p.max(axis=1), p.argmax(axis=1) == labels
    expected = 0.0
    for k in range(15):
        inside = (sure > k / 15) & (sure <= (k + 1) / 15)
        if inside.any():
            expected += inside.sum() / len(sure) * abs(right[inside].mean() - sure[inside].mean())
    assert calibration_error(torch.tensor(sure), torch.tensor(right)) == pytest.approx(expected, abs=1e-9)


def test_temperature_has_the_least_negative_log_likelihood() -> None:
    z, labels = logits()
    n, classes = z.shape
    target = np.full((n, classes), 1 / (n + 2) / (classes - 1))
    target[np.arange(n), labels] = (n + 1) / (n + 2)

    def loss(temperature: float) -> float:
        return -(target * np.log(softmax(z / temperature))).sum(axis=1).mean()

    expected = optimize.minimize_scalar(loss, bounds=(0.05, 40), method="bounded", options={"xatol": 1e-8}).x
    found = fit_temperature(torch.tensor(z), torch.tensor(labels))
    assert found == pytest.approx(expected, rel=1e-4)
    assert found == pytest.approx(4.0, rel=0.15)  # the scale the logits were made with


def test_a_perfect_answer_does_not_make_the_temperature_zero() -> None:
    z = torch.eye(3).repeat(4, 1) * 2
    few = fit_temperature(z, torch.arange(3).repeat(4))
    many = fit_temperature(z.repeat(50, 1), torch.arange(3).repeat(200))
    assert 0.02 < many < few  # more images allow more confidence


def test_scales_of_trained_and_new_classes() -> None:
    calibration = ModeCalibration(temperature=2.0, new_temperature=8.0)
    mixed, new = (class_scales(calibration, trained) for trained in ([True, False], [False, False]))
    z = torch.tensor([[3.0, 8.0]])
    torch.testing.assert_close(apply_scales(z, mixed), z / 2)
    torch.testing.assert_close(apply_scales(z, new).softmax(-1), (z / 8).softmax(-1))
    torch.testing.assert_close(apply_scales(z, new).mean(), (z / 2).mean())  # the mean keeps its scale
    moved = apply_scales(z + 7, mixed)
    torch.testing.assert_close(moved.softmax(-1), apply_scales(z, mixed).softmax(-1))


def test_auroc_and_interval_agree_with_the_libraries() -> None:
    rng = np.random.default_rng(2)
    known, unknown = rng.integers(0, 9, 50) + 2, rng.integers(0, 9, 70)  # with ties
    expected = roc_auc_score([1] * 50 + [0] * 70, np.concatenate([known, unknown]))
    assert auroc(torch.tensor(known), torch.tensor(unknown)) == pytest.approx(expected)
    for hits, n in ((0, 8), (3, 20), (20, 20)):
        interval = stats.binomtest(hits, n).proportion_ci(0.9, method="exact")
        assert share_interval(hits, n) == pytest.approx((interval.low, interval.high), abs=1e-9)


def test_threshold_keeps_its_promise_on_new_draws() -> None:
    """The true share of refused images lies in the stated interval in about 95 % of draws."""
    rng = np.random.default_rng(3)
    inside, refused = 0, []
    for _ in range(400):
        limit = threshold(rng.normal(size=160).tolist(), 0.05)
        share = stats.norm.cdf(limit.value)
        inside += limit.low <= share <= limit.high
        refused.append(share)
    assert 0.92 < inside / 400 < 0.98
    assert np.mean(refused) < 0.053


def test_few_images_give_a_wide_interval_and_nonsense_is_refused() -> None:
    few = threshold([0.2, 0.5, 0.9])
    assert few.value == 0.2
    assert few.high > 0.5
    for share in (0.0, 0.6, float("nan")):
        with pytest.raises(UsageError, match=str(share)):
            threshold([0.1, 0.2], share)
    with pytest.raises(UsageError):
        threshold([])


def test_the_score_is_the_literal_formula_of_standard_scores() -> None:
    rng = np.random.default_rng(4)
    held, near = rng.normal(9, 3, 50), rng.normal(0.7, 0.1, 50)
    calibration = Calibration(nearness=tuple(near), modes={"m": ModeCalibration(1.0, logits=tuple(held))})
    largest, nearness = rng.normal(8, 3, 7), rng.normal(0.6, 0.1, 7)
    alone = (largest - held.mean()) / held.std()
    both = alone - np.minimum((nearness - near.mean()) / near.std(), 0) ** 2
    scores = torch.tensor(largest), torch.tensor(nearness)
    np.testing.assert_allclose(calibration.score("m", *scores), both, rtol=1e-9)
    np.testing.assert_allclose(calibration.score("m", scores[0]), alone, rtol=1e-9)
    expected = stats.zscore(held) - np.minimum(stats.zscore(near), 0) ** 2
    np.testing.assert_allclose(calibration.held_out("m"), expected, rtol=1e-9)
    np.testing.assert_allclose(calibration.held_out("m", nearness=False), stats.zscore(held), rtol=1e-9)


def test_held_out_images_are_compared_with_all_others_but_themselves() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.nn.functional.normalize(torch.randn(30, 8, generator=generator), dim=1)
    labels = torch.arange(30) % 3
    rows = torch.tensor([4, 0, 29])
    held = HeldOut({"m": torch.randn(3, 3, generator=generator)}, labels[rows], rows)
    part = turn(0, 1)
    part = replace(part, trained=("a", "b"), new=("c",), rows=torch.arange(30), labels=labels,
                   logits={"m": part.logits["m"][:30, :2]})  # fmt: skip
    plain = fit_calibration(held, [part], False, 10)
    calibration = with_nearness(plain, held, [part], features, labels, tuple("abc"))

    def near(row: int, others: list[int]) -> float:
        cosines = sorted((float(features[row] @ features[o]) for o in others if o != row), reverse=True)
        return float(np.mean(cosines[:5]))

    expected = [near(row, list(range(30))) for row in rows.tolist()]
    np.testing.assert_allclose(calibration.nearness, expected, atol=1e-5)
    # Of the turn, whose method knows two of the three classes: both parts by its own known images.
    known = labels.numpy() < 2
    nearness = np.array([near(row, np.flatnonzero(known).tolist()) for row in range(30)])
    largest = part.logits["m"].amax(1).double().numpy()
    logit, near_by = ((x - x[known].mean()) / x[known].std() for x in (largest, nearness))
    score = logit - np.minimum(near_by, 0) ** 2
    assert calibration.modes["m"].auroc == pytest.approx(roc_auc_score(known, score), abs=1e-6)


def turn(shift: float, seed: int, spread: float = 1.5) -> HeldOutClasses:
    """Three trained and three new classes; logits of new ones are `shift` too low."""
    rng = np.random.default_rng(seed)
    labels = np.arange(240) % 6
    z = rng.normal(size=(240, 6)) * spread
    z[np.arange(240), labels] += 2.5
    z[:, 3:] -= shift
    names = tuple("abcdef")
    logits = {"m": torch.tensor(z, dtype=torch.float32)}
    return HeldOutClasses(logits, torch.tensor(labels), torch.arange(240), names[:3], names[3:])


def test_how_sharp_the_methods_of_the_turns_are_does_not_matter() -> None:
    """They learned from fewer images: their logits may be half as large as those of the method itself."""
    held = HeldOut({"m": turn(0, 5).logits["m"]}, turn(0, 5).labels, torch.arange(240))
    sharp = [turn(3.0, 1), turn(3.0, 2)]
    weak = [replace(one, logits={"m": one.logits["m"] / 2}) for one in sharp]
    first, second = (fit_calibration(held, turns, True, 2).modes["m"] for turns in (sharp, weak))
    for name in ("temperature", "new_temperature"):
        assert getattr(first, name) == pytest.approx(getattr(second, name), rel=1e-3), name
    assert first.auroc == pytest.approx(second.auroc)


def test_the_error_of_a_temperature_is_its_spread_over_many_draws() -> None:
    logs, errors = [], []
    for seed in range(60):
        z, labels = logits(n=200, scale=2.0, seed=seed)
        z, labels = torch.tensor(z), torch.tensor(labels)
        logs.append(np.log(fit_temperature(z, labels)))
        errors.append(temperature_error(z, labels, float(np.exp(logs[-1]))))
    assert np.mean(errors) == pytest.approx(np.std(logs), rel=0.25)


def test_a_cautious_temperature_leaves_calibrated_logits_alone_and_corrects_others() -> None:
    z, labels = (torch.tensor(values) for values in logits(scale=1.0))
    assert cautious_temperature(z, labels) == 1.0
    for scale in (4.0, 0.25):
        best = fit_temperature(z * scale, labels)
        error = temperature_error(z * scale, labels, best)
        cautious = cautious_temperature(z * scale, labels)
        nearer = np.log(best) - np.sign(np.log(scale)) * CAUTION * error
        assert np.log(cautious) == pytest.approx(nearer, abs=1e-9)
        assert abs(np.log(cautious / scale)) < 0.5 * abs(np.log(scale))  # most of the way
        lower = cautious_temperature(z * scale, labels, bias=0.1)
        assert np.log(lower) == pytest.approx(np.log(cautious) - 0.1)
    best = fit_temperature(z[:20] * 1.2, labels[:20])
    assert abs(np.log(best)) > 0.1
    assert cautious_temperature(z[:20] * 1.2, labels[:20]) == 1.0  # 20 images do not show a factor of 1.2


@pytest.mark.parametrize("count", [20, 80, 400])
def test_logits_that_say_nothing_about_the_labels_do_not_stay_confident(count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    z = 3 * torch.randn(count, 4, generator=generator)
    labels = torch.randint(0, 4, (count,), generator=generator)
    confidence = (z / cautious_temperature(z, labels)).softmax(dim=-1).amax(dim=-1).mean()
    assert confidence < 0.5  # 0.75 at T = 1, and 0.25 of the answers are right


def test_the_refused_share_of_further_images_lies_within_its_interval() -> None:
    """Scores are uniform, so a threshold refuses a share of its own value."""
    rng = np.random.default_rng(0)
    inside = {"images": 0, "true share": 0}
    low, high = threshold(tuple(rng.random(96))).among(300)
    for _ in range(400):
        limit = threshold(tuple(rng.random(96)))
        refused = (rng.random(300) < limit.value).mean()
        inside["images"] += low <= refused <= high
        inside["true share"] += limit.low <= refused <= limit.high
    assert inside["images"] / 400 >= 0.94
    assert inside["true share"] / 400 < 0.93  # 300 images show the true share with an error
    low, high = threshold(tuple(rng.random(96))).among(10**4)
    assert (low, high) == pytest.approx(stats.beta.ppf([0.025, 0.975], 4, 93), abs=3e-3)


def test_methods_that_learned_from_fewer_images_need_a_higher_temperature() -> None:
    z, labels = (torch.tensor(values) for values in logits(scale=4.0))
    held = HeldOut({"m": z}, labels, torch.arange(len(labels)))
    one, three = (fit_calibration(held, [], True, n).modes["m"].temperature for n in (1, 3))
    unbiased = cautious_temperature(z, labels, caution=TOWER_CAUTION)
    assert one == three == pytest.approx(unbiased * np.exp(-TWO_THIRDS_BIAS))


def test_overconfidence_shows_in_a_third_of_160_images() -> None:
    """Logits that are a third too large: 54 held-out images used to leave T at 1."""
    errors = []
    for seed in range(20):
        z, labels = (torch.tensor(values) for values in logits(n=54 + 400, scale=4 / 3, seed=seed))
        held = HeldOut({"m": z[:54]}, labels[:54], torch.arange(54))
        temperature = fit_calibration(held, [], True, 1).modes["m"].temperature
        errors.append(np.log(temperature * 3 / 4))
    assert np.mean(errors) > -0.22  # the whole of it would be log(3 / 4) = -0.29
    assert np.mean(np.exp(errors) > 0.8) > 0.4
