"""Shortcuts: image properties and concepts that a classifier may use instead of the class.

`properties`, `metadata`, and `marks` measure images without a model, and `find` compares each class with the
rest. `edits` and `edited_images` change a property on purpose; `causal` measures how predictions change.
`removal`, `without`, and `edit_plan` remove a concept or a property from a training; `trials`,
`concept_trials`, and `edit_trials` choose how.
"""
