"""Exceptions for states that a caller can handle."""


class EmptyPrompt(ValueError):
    """A request without a single prompt token."""


class RequestTooLong(ValueError):
    """A request that can never fit the context or the page pool."""


class UnknownToken(ValueError):
    """A prompt or stop id outside the vocabulary."""


class UnsupportedConfig(ValueError):
    """A checkpoint config with a field that changes the result and is not implemented."""


class CheckpointMismatch(ValueError):
    """Tensors that are missing, unexpected, damaged or of another shape than the model's."""


class OutOfPages(RuntimeError):
    """A page pool without enough free pages for the demand."""


class TransferFailed(RuntimeError):
    """A handoff whose pages did not arrive or did not verify."""


class EngineFailed(RuntimeError):
    """A device program that failed, or a step that could not go on; its requests have ended."""
