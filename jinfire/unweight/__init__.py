"""Lossless compression of weights: coding on the host, compressed folders, device forms."""
