"""The hash of compressed files."""

from collections.abc import Buffer

try:
    import xxhash
except ModuleNotFoundError:  # kernels are checked on machines that have JAX and NumPy alone
    xxhash = None


def hash_bytes(*parts: Buffer) -> int:
    """XXH3, 64 bits, seed 0, of the parts as if they were one.

    Raises: ModuleNotFoundError where the package xxhash is missing.
    """
    if xxhash is None:
        raise ModuleNotFoundError("compressed files need the package xxhash: pip install xxhash")
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.intdigest()
