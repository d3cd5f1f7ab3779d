"""Lossless compression of weights on the host: codec, container, device form."""
