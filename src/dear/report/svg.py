"""Small charts as SVG text: no library in the page, sharp on paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape


def tag(name: str, content: str | None = None, /, **attributes: object) -> str:
    """One element; attributes are escaped, `content` is taken as it is, numbers get one decimal.

    >>> tag("circle", cx=1, r=0.25), tag("text", escape("<b>"), class_="tick")
    ('<circle cx="1" r="0.2"/>', '<text class="tick">&lt;b&gt;</text>')
    """
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_plain(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{told}/>" if content is None else f"<{name}{told}>{content}</{name}>"


def _plain(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) else escape(str(value), quote=True)


def line_chart(
    xs: Sequence[int],
    series: Mapping[str, Sequence[float]],
    colors: Sequence[str],
    title: str,
    x_title: str,
    y_title: str,
    reference: float | None = None,
    shade: tuple[int, int] | None = None,
    width: int = 560,
    height: int = 280,
) -> str:
    """Lines over whole numbers, with the numbers themselves as tooltips.

    Args:
        xs: places on the x axis.
        series: y values by name.
        colors: one a series.
        title: for readers who do not see it.
        x_title: name of the x axis.
        y_title: name of the y axis.
        reference: a dashed level.
        shade: first and last x of a band behind the lines.
        width: in pixels.
        height: in pixels.
    """
    left, right, top, bottom = 52, width - 16, 34, height - 40
    values = [value for line in series.values() for value in line]
    values += [] if reference is None else [reference]
    low, high = min(values), max(values)
    pad = 0.08 * (high - low) or 0.05
    low, high = max(0.0, low - pad), high + pad if high > 1 else min(1.0, high + pad)

    def x(value: float) -> float:
        return left + (value - xs[0] + 0.5) / (xs[-1] - xs[0] + 1) * (right - left)

    def y(value: float) -> float:
        return bottom - (value - low) / (high - low) * (bottom - top)

    def level(value: float, style: str) -> str:
        return tag("line", class_=style, x1=left, x2=right, y1=y(value), y2=y(value))

    parts = []
    if shade is not None:
        start, stop = x(shade[0] - 0.5), x(shade[1] + 0.5)
        parts.append(tag("rect", class_="band", x=start, y=top, width=stop - start, height=bottom - top))
    for step in range(5):
        value = low + (high - low) * step / 4
        number = tag("text", f"{value:.2f}", class_="tick", x=left - 6, y=y(value) + 4, text_anchor="end")
        parts += [level(value, "grid"), number]
    for value in xs:
        parts.append(tag("text", str(value), class_="tick", x=x(value), y=bottom + 16, text_anchor="middle"))
    if reference is not None:
        parts.append(level(reference, "reference"))
    for place, ((name, line), color) in enumerate(zip(series.items(), colors, strict=True)):
        pen = {"stroke": color, "stroke_width": 2, "stroke_dasharray": "6 3" if place % 2 else None}
        points = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in zip(xs, line, strict=True))
        parts.append(tag("polyline", points=points, fill="none", **pen))
        for a, b in zip(xs, line, strict=True):
            said = tag("title", escape(f"{name}, {a}: {b:.3f}"))
            parts.append(tag("circle", said, cx=x(a), cy=y(b), r=3.5, fill=color))
        start = left + 8 + 230 * place
        parts.append(tag("line", x1=start, x2=start + 24, y1=14, y2=14, **pen))
        parts.append(tag("text", escape(name), class_="tick", x=start + 30, y=18))
    turned = f"translate(12 {(bottom + top) // 2}) rotate(-90)"
    middle = (left + right) // 2
    parts.append(tag("text", escape(x_title), class_="tick", x=middle, y=height - 6, text_anchor="middle"))
    parts.append(tag("text", escape(y_title), class_="tick", transform=turned, text_anchor="middle"))
    return tag("svg", "".join(parts), viewBox=f"0 0 {width} {height}", role="img", aria_label=title)


def scatter(
    points: Sequence[tuple[float, float]],
    labels: Sequence[str],
    groups: Sequence[str],
    colors: Mapping[str, str],
    title: str,
    size: int = 560,
) -> str:
    """Points in a plane, colored by group, each with its label as tooltip; a group's name at its middle."""
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    wide, tall = max(xs) - min(xs) or 1.0, max(ys) - min(ys) or 1.0
    margin = 24
    parts = []
    spots: dict[str, list[tuple[float, float]]] = {}
    for point, label, group in zip(points, labels, groups, strict=True):
        a = margin + (point[0] - min(xs)) / wide * (size - 2 * margin)
        b = margin + (point[1] - min(ys)) / tall * (size - 2 * margin)
        spots.setdefault(group, []).append((a, b))
        said = tag("title", escape(f"{label} ({group})"))
        parts.append(tag("circle", said, cx=a, cy=b, r=4, fill=colors[group], class_="spot"))
    for group, members in spots.items():
        # The member nearest to all others lies inside its group, where a mean may fall between two parts.
        a, b = min(members, key=lambda m: sum(abs(m[0] - o[0]) + abs(m[1] - o[1]) for o in members))
        anchor = "start" if a < 60 else "end" if a > size - 60 else "middle"
        parts.append(tag("text", escape(group), class_="group", x=a, y=b - 7, text_anchor=anchor))
    return tag("svg", "".join(parts), viewBox=f"0 0 {size} {size}", role="img", aria_label=title)
