"""Which software made a file, and when: versions of packages, times in UTC as ISO 8601."""

from __future__ import annotations

import datetime
import importlib.metadata

from bandmf_tf.errors import BandMFError

_SECONDS = "%Y-%m-%dT%H:%M:%SZ"
_MICROSECONDS = "%Y-%m-%dT%H:%M:%S.%fZ"


def version_of(package: str = "bandmf-tf") -> str:
    """Returns the version of an installed package; of this library by default."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def now() -> str:
    """Returns the time, to the second."""
    return datetime.datetime.now(datetime.UTC).strftime(_SECONDS)


def exact_now() -> str:
    """Returns the time, to the microsecond."""
    return format_time(datetime.datetime.now(datetime.UTC))


def check_time(name: str, text: object) -> None:
    """Raises unless `text` is a time like those of `now`."""
    try:
        datetime.datetime.strptime(text, _SECONDS)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise BandMFError(
            f"{name} must be a time in UTC such as 2024-02-29T12:00:00Z. Found {text!r}."
        ) from None


def format_time(time: datetime.datetime) -> str:
    """Returns a time, to the microsecond."""
    if time.tzinfo is None:
        raise BandMFError(f"A time needs a time zone. Found {time!r}.")
    return time.astimezone(datetime.UTC).strftime(_MICROSECONDS)


def parse_time(text: str) -> datetime.datetime:
    """The inverse of `format_time`."""
    try:
        time = datetime.datetime.strptime(text, _MICROSECONDS).replace(tzinfo=datetime.UTC)
    except (TypeError, ValueError):
        time = None
    if time is None or format_time(time) != text:
        raise BandMFError(f"A time must look like 2024-02-29T12:00:00.000000Z. Found {text!r}.")
    return time
