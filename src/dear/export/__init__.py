"""One file for other programs: an adapted model as ONNX, and the small runtime that answers with it.

Nothing is imported here, so that `dear.export.runtime` works where PyTorch is not installed.
"""
