"""What the programs share: flags of their own, help, and errors in one sentence.

A command-line tool defines its flags, and does its work in a function that returns an exit status.
Whatever is wrong with its input or its surroundings is printed in one sentence, with exit status 2.
Any other exception is a bug and keeps its traceback.
"""

from __future__ import annotations

import difflib
import io
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from absl import flags

from bandmf_tf._files import temporary_folder
from bandmf_tf.errors import BandMFError

_WIDTH = 100


# What input and surroundings can cause.
EXPECTED = (BandMFError, OSError, MemoryError)


class UsageError(BandMFError):
    """Something is wrong with the flags; the message is the sentence to print."""


def run_program(
    name: str,
    usage: str,
    values: flags.FlagValues,
    run: Callable[[flags.FlagValues], int],
    argv: Sequence[str] | None = None,
) -> int:
    """Runs a program and returns its exit status.

    Args:
      name: What the program calls itself in front of an error.
      usage: What `--help` prints before the flags.
      values: The defined flags, with `help` among them.
      run: The work, on the parsed flags.
      argv: The arguments, beginning with the program; those of the process by default.
    """
    try:
        _parse(values, list(sys.argv if argv is None else argv))
        if values.help:
            print(_help(usage, values))
            return 0
        with warnings.catch_warnings():
            # Accounting overflows where epsilon is enormous; its result is checked, not trusted.
            warnings.simplefilter("ignore", RuntimeWarning)
            return run(values)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # Whoever read the output has seen enough; what was written stays.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except EXPECTED as error:
        print(f"{name}: {sentence(error)}", file=sys.stderr)
        return 2


def output_folder(output: str, files: Sequence[str]) -> Path:
    """Returns the folder to write `files` to, which may not exist yet but can be made."""
    folder = Path(output)
    if not output or (folder.exists() and not folder.is_dir()):
        raise UsageError(f"output must be a folder. Found {output!r}.")
    for file in files:
        if (folder / file).is_dir():
            raise UsageError(f"output={output} holds a folder called {file}; choose another one.")
    try:
        with temporary_folder(folder):
            return folder
    except OSError as error:
        raise UsageError(f"output={output} cannot be written: {error.strerror}.") from None


def sentence(error: BaseException) -> str:
    """Returns what a program prints about an error that is expected."""
    if isinstance(error, MemoryError):
        return "There is not enough memory; use fewer rounds, fewer bands or a smaller model."
    text = str(error) or type(error).__name__
    # Names of files may hold anything, line breaks and bytes that are not UTF-8 included.
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def quiet_imports() -> None:
    """Keeps notes about installation that help nobody off the screen; call before TensorFlow.

    TensorFlow 2.14 reports as errors that CUDA plugins are registered twice, on every machine.
    Whoever sets TF_CPP_MIN_LOG_LEVEL gets what they ask for.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def print_in_order() -> None:
    """Writes every line when it is printed: in a log it must not follow later errors."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def fill(text: str, first: str, following: str) -> str:
    """Returns the text in lines that fit a terminal, with these indentations."""
    return textwrap.fill(
        text, _WIDTH, initial_indent=first, subsequent_indent=following, break_on_hyphens=False
    )


def refuse_repeated(values: flags.FlagValues) -> None:
    """Makes a flag that is given twice an error, unless it is a list: the last would win."""
    for name in values:
        values[name].present = 0
        if not isinstance(values[name], flags.MultiFlag):
            values[name].allow_overwrite = False


def _parse(values: flags.FlagValues, arguments: list[str]) -> None:
    refuse_repeated(values)
    try:
        arguments = values.read_flags_from_files(arguments)
        if any(re.match(r"--?undefok\b", argument) for argument in arguments):
            raise UsageError("There is no flag --undefok: a misspelled flag must not be ignored.")
        rest = values(arguments)
    except flags.IllegalFlagValueError as error:
        raise UsageError(_illegal_value(values, str(error))) from None
    except flags.UnrecognizedFlagError as error:
        similar = difflib.get_close_matches(error.flagname, list(values), n=1)
        hint = f", did you mean --{similar[0]}?" if similar else "; see --help."
        raise UsageError(f"There is no flag --{error.flagname}{hint}") from None
    except flags.Error as error:
        raise UsageError(f"{str(error).rstrip('.')}; see --help.") from None
    if len(rest) > 1:
        raise UsageError(f"Every argument must be a flag; see --help. Found {rest[1]!r}.")


def _illegal_value(values: flags.FlagValues, message: str) -> str:
    match = re.match(r"flag --(?:no)?(\w+)=(.*?): ", message, re.DOTALL)
    if match is None or match[1] not in values:
        return message
    if ": already defined as " in message:
        return f"--{match[1]} was given twice, at last as {match[2]!r}; give it once."
    parser = values[match[1]].parser
    choices = getattr(parser, "enum_values", None)
    wanted = parser.syntactic_help or "true or false"
    if choices:
        wanted = f"one of {', '.join(choices)}"
    return f"{match[1]} must be {wanted}. Found {match[2]!r}."


def _help(usage: str, values: flags.FlagValues) -> str:
    lines = [usage]
    for flag in (flag for module in values.flags_by_module_dict().values() for flag in module):
        choices = getattr(flag.parser, "enum_values", None)
        text = flag.help.split(">: ")[-1] if choices else flag.help
        if choices:
            text += f" One of {', '.join(choices)}."
        if flag.default is not None:
            text += f" Default: {flag.default_as_str.strip(chr(39))}."
        lines += [f"  --{flag.name}", fill(text, " " * 6, " " * 6)]
    return "\n".join(lines)
