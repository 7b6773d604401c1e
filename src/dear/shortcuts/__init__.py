"""Properties of images and concepts that a classifier may take for the class: measure, find, and remove them.

`properties`, `files`, and `marks` measure images without a model, and `find` compares each class with the
rest. `edits` and `edited_images` change a property on purpose; `causal` counts how that changes answers.
`removal`, `without`, `choose`, `plan`, and `trials` remove a concept or a property from a training.
"""
