"""Flax layers. All of them run inside `jax.shard_map` on local shards of their weights."""
