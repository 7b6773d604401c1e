"""What a labeling session learns from the labels: guesses, the next images, suspects, and a forecast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dear.data.folds import IntArray
from dear.tasks.labeling.next import guess
from dear.train.label_check import LEAST_IMAGES, out_of_sample, rank_labels
from dear.unlabeled import UNLABELED, Forecast, choose_next, draw_rows, forecast_gain, learning_curve

AHEAD = 40  #: images that are chosen at once
MOST_IMAGES = 5_000  #: of a large pool that are chosen from, besides the labeled ones
MOST_FORECAST = 1_000  #: unlabeled images that the forecast reads
MORE = 50  #: labels whose gain is forecast
WORTH = 0.01  #: expected gain below which more labels are hardly worth it


@dataclass(frozen=True)
class Learned:
    """What was computed from the labels last."""

    probabilities: Tensor | None = None  #: [n, C]; None: no class is known
    classes: tuple[str, ...] = ()  #: columns of the probabilities
    queue: tuple[int, ...] = ()  #: indices of the images to label next, the most useful first
    suspects: tuple[tuple[int, str, float], ...] = ()  #: index, suggested class and its probability
    forecast: Forecast | None = None
    labels: int = 0  #: number of labels that it was trained on
    seconds: float = 0.0  #: of the training and the choice


def learn(
    features: Tensor,
    labels: Tensor,
    names: Sequence[str],
    texts: Tensor | None,
    exclude: Tensor,
    units: IntArray,
) -> Learned:
    """Train the probe and choose the next images.

    Args:
        features: unit features [n, E] of all images.
        labels: [n], `UNLABELED` where there is none.
        names: of the classes.
        texts: their text features [C, E]; None: there are no classes.
        exclude: bool [n], images that are not to be chosen.
        units: [n], equal for copies of one image.
    """
    labeled = labels != UNLABELED
    part = torch.cat([labeled.nonzero()[:, 0], draw_rows((~labeled).nonzero()[:, 0], MOST_IMAGES)])
    rows = choose_next(
        features[part],
        min(AHEAD, len(part)),
        labels=labels[part] if bool(labeled.any()) else None,
        texts=texts,
        exclude=exclude[part],
    )
    probabilities = None
    if texts is not None:
        probabilities = torch.zeros(len(labels), len(names))
        probabilities[part] = guess(features[part], labels[part], texts)
    suspects = find_suspects(features, labels, names, units)
    return Learned(
        probabilities, tuple(names), tuple(part[rows].tolist()), suspects, labels=int(labeled.sum())
    )


def find_suspects(
    features: Tensor, labels: Tensor, names: Sequence[str], units: IntArray
) -> tuple[tuple[int, str, float], ...]:
    """Labels that look wrong: index of the image, suggested class and its probability."""
    rows = (labels != UNLABELED).nonzero()[:, 0]
    if len(rows) < LEAST_IMAGES:
        return ()
    probabilities = out_of_sample(features[rows], labels[rows], len(names), units=units[rows.numpy()])
    places, best = rank_labels(probabilities, labels[rows])
    return tuple(
        (int(rows[place]), names[int(best[place])], float(probabilities[place, best[place]]))
        for place in places
    )


def forecast_more(features: Tensor, labels: Tensor, texts: Tensor | None, units: IntArray) -> Forecast | None:
    """Cross-validate the probe, and forecast the gain of more labels; None without labels."""
    labeled = labels != UNLABELED
    if texts is None or not bool(labeled.any()):
        return None
    rows = torch.cat([labeled.nonzero()[:, 0], draw_rows((~labeled).nonzero()[:, 0], MOST_FORECAST)])
    curve = learning_curve(features[rows], labels[rows], texts, units=torch.from_numpy(units)[rows])
    return forecast_gain(curve, int(labeled.sum()), MORE)


def describe_forecast(forecast: Forecast | None, without_labels: Sequence[str] = ()) -> dict[str, Any] | None:
    """Cross-validated accuracy with its interval, the expected gain, and advice; None: not known yet.

    Of fewer than 20 held-out images nothing is shown: they belong to the classes that have most labels, which
    are answered better than the others. The accuracy does not cover classes `without_labels`.

    >>> describe_forecast(Forecast(40, 0.9, (0.8, 0.95), 0.004, (-0.06, 0.07)))["advice"]
    'More labels are hardly worth it: 50 more are expected to bring 0 points (90% interval -6 to 7).'
    """
    if forecast is None or forecast.gain is None or forecast.gain_interval is None:
        return None
    least, most = (f"{100 * end:.0f}" for end in forecast.gain_interval)
    points = f"{100 * forecast.gain:.0f} points (90% interval {least} to {most})"
    advice = f"{MORE} more labels are expected to bring {points}."
    if forecast.gain < WORTH:
        advice = f"More labels are hardly worth it: {MORE} more are expected to bring {points}."
    if without_labels:
        more = f" and {len(without_labels) - 3} more" if len(without_labels) > 3 else ""
        advice = (
            f"Label images of {', '.join(without_labels[:3])}{more} first: the accuracy does not cover "
            "classes without a label."
        )
    low, high = forecast.accuracy_interval
    return {
        "accuracy": round(forecast.accuracy, 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "images": forecast.images,
        "gain": round(forecast.gain, 4),
        "advice": advice,
    }
