"""Helpers that know nothing of images or models: files, text, validation, threads, progress."""
