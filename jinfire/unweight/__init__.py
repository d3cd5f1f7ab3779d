"""Lossless compressed weights: codec, container, device form, and the leaf of the engine."""
