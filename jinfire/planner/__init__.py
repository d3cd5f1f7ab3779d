"""What a model needs on a number of GPUs, before there is one: memory, KV room, times."""
