"""Errors that a user can act on. Introduced in phase 1a.

Every message is one paragraph: what was wrong, with which value, and what would be right. The command line prints it
without a traceback and exits with code 2; a server turns it into an error body. Anything else that is raised is a bug.
"""


class InferError(ValueError):
    """The user's input or environment is at fault; the message says why and what to do instead."""


class ModelFolderError(InferError):
    """A model folder (config, weights, tokenizer) is missing, damaged, unsafe or unsupported."""


class ConfigError(InferError):
    """An engine setting is out of range, contradicts another, or belongs to a later phase."""


class RequestError(InferError):
    """A request's prompt or sampling parameters are invalid for this model."""


class ContextLengthError(RequestError):
    """A prompt, or a prompt with its output, has more tokens than a sequence may have, or than the KV cache holds."""


class UnknownSegmentError(RequestError):
    """A segment's id was never registered, or the segment has been forgotten (phase 9.1)."""


class SegmentInUseError(RequestError):
    """A segment cannot be evicted or deleted, because a request uses it (phase 9.1)."""


class CapacityError(InferError):
    """The KV cache cannot hold the requested tokens."""


class QueueFullError(InferError):
    """The waiting queue is full; the client may retry later."""


class BlockError(InferError):
    """A KV cache block was freed twice, or freed by a request that does not hold it."""


class RankError(InferError):
    """A rank has died, hung or failed, so the group of ranks that shares the model has ended (phase 12.1)."""
