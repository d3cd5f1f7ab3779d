"""Jitted device programs: what one dispatch to a mesh computes."""
