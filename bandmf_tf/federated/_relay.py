"""Runs a TFF worker where nobody can reach it, and lets in only who may: a script, not a module.

TFF's `worker_binary` listens on all interfaces without authentication, and whoever reaches it can
run any computation as its owner. Here it runs in a network namespace of its own, in which nothing
but this script exists, and the script forwards connections to it:

    program --(unix socket, owner only)--> relay --(loopback of the namespace)--> worker_binary
    program --(TLS, client certificate)--> relay --(loopback of the namespace)--> worker_binary

Sockets stay in the namespace in which they were made, so the listening one is opened before the
namespace is entered. The relay ends with the program that started it, the worker with the relay.

It uses the standard library only and is started by its path, so that it is up in a moment. It
prints `READY` when the worker answers, or why the system refuses a namespace, and then ends with
the status `NO_NAMESPACE`. With `--open` it does without one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import fcntl
import functools
import os
import signal
import socket
import ssl
import struct
import subprocess
import sys

READY = "ready"
NO_NAMESPACE = 3  # Exit status: the system gives no private network to this process.

_CHUNK = 1 << 20
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_PDEATHSIG = 1
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1

_LIBC = ctypes.CDLL(None, use_errno=True)


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _unshare(flags: int) -> None:
    if _LIBC.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _enter_private_network() -> None:
    """Moves this process into a network namespace with nothing but a loopback interface.

    Who has the capability may do that as it is; anybody else becomes root of a user namespace
    first, in which the own user stays the owner of files.
    """
    try:
        _unshare(_CLONE_NEWNET)
    except PermissionError:
        user, group = os.geteuid(), os.getegid()
        _unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    with socket.socket() as probe:
        request = struct.pack("16sH14s", b"lo", 0, b"")
        flags = struct.unpack("16sH14s", fcntl.ioctl(probe, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(probe, _SIOCSIFFLAGS, struct.pack("16sH14s", b"lo", flags | _IFF_UP, b""))


def _listen(where: str) -> socket.socket:
    """Opens the socket of the door: a path that only its owner can use, or `host:port`."""
    if "/" in where:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(where)
        os.chmod(where, 0o600)
    else:
        host, _, port = where.rpartition(":")
        listener = socket.create_server((host or "0.0.0.0", int(port)))
    listener.listen()
    return listener


def _tls(certificate: str, key: str, client_ca: str) -> ssl.SSLContext:
    """Lets in whoever shows a certificate of `client_ca`; gRPC insists on the protocol h2."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(certificate, key)
    context.load_verify_locations(client_ca)
    context.set_alpn_protocols(["h2"])
    return context


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()


def _is_own(writer: asyncio.StreamWriter) -> bool:
    """Whether the other end of a Unix socket belongs to us; the folder's mode says so, too."""
    raw = writer.get_extra_info("socket")
    credentials = raw.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1] in (os.geteuid(), 0)


async def _forward(port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    is_unix = writer.get_extra_info("socket").family == socket.AF_UNIX
    if is_unix and not _is_own(writer):
        writer.close()
        return
    there, back = await asyncio.open_connection("127.0.0.1", port, limit=_CHUNK)
    await asyncio.gather(_copy(reader, back), _copy(there, writer))


async def _end_with_the_program() -> None:
    """Ends this process when nobody holds the other end of its standard input any more."""
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    while await reader.read(_CHUNK):
        pass
    os._exit(1)


async def _serve(listener: socket.socket, tls: ssl.SSLContext | None, worker: list[str]) -> int:
    watcher = None if tls else asyncio.ensure_future(_end_with_the_program())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        *worker, f"--port={port}", stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent
    )
    ended = asyncio.ensure_future(process.wait())
    while not ended.done():
        try:
            _, probe = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.02)
            continue
        probe.close()
        server = await asyncio.start_server(
            functools.partial(_forward, port), sock=listener, ssl=tls, limit=_CHUNK
        )
        print(READY, flush=True)
        async with server:
            await ended
    if watcher:
        watcher.cancel()
    return ended.result()


def main() -> int:
    """Runs the relay until the worker or the process that started it ends."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--certificate")
    parser.add_argument("--key")
    parser.add_argument("--client_ca")
    parser.add_argument("--open", action="store_true")
    parser.add_argument("worker", nargs="+")
    options = parser.parse_args()
    files = (options.certificate, options.key, options.client_ca)
    tls = _tls(*files) if all(files) else None
    if tls is None and "/" not in options.listen:
        parser.error("a door on the network needs --certificate, --key and --client_ca")
    listener = _listen(options.listen)
    try:
        if not options.open:
            _enter_private_network()
    except OSError as error:
        print(error, flush=True)
        return NO_NAMESPACE
    return asyncio.run(_serve(listener, tls, options.worker))


if __name__ == "__main__":
    sys.exit(main())
