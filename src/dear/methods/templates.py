"""Sixty prompt templates of different wording, for methods that average text features over templates."""

DIVERSE = tuple(
    f"{kind} of {which}."
    for kind in (
        "a photo",
        "a picture",
        "a snapshot",
        "a close-up",
        "a bright photo",
        "a dark photo",
        "a blurry photo",
        "a cropped photo",
        "a drawing",
        "a painting",
        "a sketch",
        "a rendering",
    )
    for which in ("a {}", "the {}", "one {}", "a small {}", "a large {}")
)
