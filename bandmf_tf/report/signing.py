"""Signatures of public editions: ed25519 over the digests of all files of a report.

Two files stand beside a signed report, in formats that need none of this library:

    SHA256SUMS       the SHA-256 of every file, as `sha256sum -c` reads it
    SHA256SUMS.sig   the ed25519 signature of those bytes, 64 bytes (RFC 8032)

so that anybody who has the public key from the owner can verify a report, here or by

    openssl pkeyutl -verify -pubin -inkey public.pem -rawin -in SHA256SUMS -sigfile SHA256SUMS.sig
    sha256sum -c SHA256SUMS

Keys are PEM files as `openssl genpkey -algorithm ed25519` makes them. A key beside the report would
prove nothing, so none is written there. Only public editions are signed. The package `cryptography`
does the cryptography; it is the extra `sign`.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bandmf_tf.evidence.reader import ReportError, UnreadableError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ed25519

SUMS, SIGNATURE = "SHA256SUMS", "SHA256SUMS.sig"


def signed(contents: Mapping[str, bytes], key: Path) -> dict[str, bytes]:
    """Returns the files of a report with its digests and their signature.

    Raises:
      ReportError: The key is none, or others than its owner can read it.
      OSError: It cannot be read.
    """
    private = _load_private(key)
    sums = _sums({name: hashlib.sha256(data).hexdigest() for name, data in contents.items()})
    return {**contents, SUMS: sums, SIGNATURE: private.sign(sums)}


def check_signature(folder: Path, names: tuple[str, ...], key: Path) -> dict[str, bytes]:
    """Returns the files of a signed report, verified.

    Args:
      folder: The folder of the report.
      names: The files that a report has.
      key: The owner's public key, from the owner.

    Raises:
      ReportError: A file was changed, is missing, or somebody else signed.
      OSError: A file cannot be read.
    """
    public = _load_public(key)
    sums, signature = ((folder / name).read_bytes() for name in (SUMS, SIGNATURE))
    from cryptography import exceptions

    try:
        public.verify(signature, sums)
    except exceptions.InvalidSignature:
        raise ReportError(
            f"{folder / SIGNATURE} is not a signature of {SUMS} by this key: another key signed, "
            "or one of the files was changed."
        ) from None
    contents = {name: (folder / name).read_bytes() for name in names}
    found = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    if _sums(found) != sums:
        lines = sums.splitlines()
        changed = [name for name in names if f"{found[name]}  {name}".encode() not in lines]
        what = changed[0] if changed else SUMS  # It lists more than a report has.
        raise ReportError(f"{folder / what} is not the file that was signed.")
    return contents


def _sums(digests: Mapping[str, str]) -> bytes:
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items())).encode()


def _load_private(path: Path) -> ed25519.Ed25519PrivateKey:
    serialization, ed25519 = _cryptography()
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ReportError(
            f"{os.fspath(path)} has permissions {mode:o}: others could sign in your name; make a "
            "new key that its owner alone can read (chmod 600)."
        )
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError) as error:  # TypeError: it has a password.
        raise _no_key(path, "private", error) from error
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise _no_key(path, "private", type(key).__name__)
    return key


def _load_public(path: Path) -> ed25519.Ed25519PublicKey:
    serialization, ed25519 = _cryptography()
    try:
        key = serialization.load_pem_public_key(path.read_bytes())
    except ValueError as error:
        raise _no_key(path, "public", error) from error
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise _no_key(path, "public", type(key).__name__)
    return key


def _no_key(path: Path, kind: str, why: object) -> UnreadableError:
    reason = str(why).splitlines()[0].rstrip(".")[:80]
    return UnreadableError(
        f"{os.fspath(path)} must be a {kind} key for ed25519 in PEM, without a password, as "
        f"openssl genpkey -algorithm ed25519 makes it ({reason})."
    )


def _cryptography() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise UnreadableError(
            "Signatures need the package cryptography: pip install 'bandmf-tf[sign]'; "
            f"openssl verifies without it, see {SUMS} in docs/how_to/privacy_reports.md."
        ) from None
    return serialization, ed25519
