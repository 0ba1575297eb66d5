"""The errors of the library: what its callers can act on, and nothing else.

Every error that a careless or unlucky caller can cause is a `BandMFError` with one sentence: the
value, the limit, the way out. Programs print that sentence. Any other exception is a bug of ours,
and keeps its traceback.
"""


class BandMFError(ValueError):
    """What was given or asked for cannot be done."""


class BandMFImportError(ImportError, BandMFError):
    """What was asked for needs a package that is not installed."""


class BandMFTypeError(BandMFError, TypeError):
    """What was given is of the wrong kind."""
