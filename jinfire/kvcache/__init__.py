"""Paged KV cache: the host's page accounting and the device's page pools."""
