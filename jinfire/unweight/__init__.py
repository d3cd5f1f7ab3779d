"""Lossless compressed weights: codec, device form, and what the engine does with them."""
