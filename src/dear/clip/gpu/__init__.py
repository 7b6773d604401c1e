"""Kernels and streams of the fast path on an NVIDIA GPU; every one has a plain twin in `dear.clip`."""
