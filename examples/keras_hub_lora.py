"""A language model of KerasHub, fine-tuned privately with LoRA.

    python -m examples.keras_hub_lora --output=lora
    python -m examples.keras_hub_lora --output=lora --data=my_texts.txt --preset=gpt2_base_en

A language model of KerasHub that has learnt a public text without privacy learns a private one with
it: its weights are frozen, and adapters of a low rank (`enable_lora`) are trained by `fit` with the
noise of a mechanism. What is published are the adapters, a few kilobytes.

Weights, tokens and architecture come from a preset (`from_preset`): one that KerasHub downloads, or
a folder that `save_to_preset` wrote. Without `--preset` the program writes such a folder first: a
small GPT-2 of bytes, which has learnt docstrings of Python's library. The private text is that of
`--data`, cut into pieces of equal length, each an example; without it, scikit-learn's descriptions
of data sets. (Who wrote what is not in such a file; where it is known,
`private_keras.group_by_user` protects authors.)

The folder gets the adapters, the mechanism and the run record, of which `bandmf-report --run=lora
--output=report` makes a report. A run that was interrupted goes on when it is started again.

Needs Keras 3 and keras-hub, which `requirements/modern.lock` has and Python 3.11's lock has not.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.resources
import importlib.util
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
from absl import flags

import bandmf_tf as bm
from bandmf_tf import keras as private_keras
from bandmf_tf._numbers import exactly, round_up
from bandmf_tf.cli.program import UsageError, run_program

_ADAPTERS, _PRESET = "adapters.lora.h5", "preset"
_MECHANISM, _RECORD = "mechanism.bandmf", "run_record.json"
_PUBLIC_BYTES = 600_000
_SIZES = {"num_layers": 2, "num_heads": 4, "hidden_dim": 128, "intermediate_dim": 512}
_DELTA, _CLIP, _MOMENTUM = 1e-5, 0.1, 0.9


@dataclasses.dataclass(frozen=True)
class Texts:
    """Tokens in pieces of one length, `[pieces, length + 1]`; every tenth piece is for testing."""

    pieces: np.ndarray

    @classmethod
    def cut(cls, tokens: np.ndarray, length: int) -> Texts:
        """Returns the pieces of a text; what is left over at its end is left out."""
        count = len(tokens) // (length + 1)
        if count < 20:
            raise UsageError(
                f"The text must have 20 pieces of length={length} tokens at least. Found {count}."
            )
        return cls(tokens[: count * (length + 1)].reshape(count, -1).astype(np.int32))

    @property
    def training(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Inputs and labels: every token and the next."""
        return self._examples(np.arange(len(self.pieces)) % 10 != 9)

    @property
    def test(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """The same, of pieces that are not trained on."""
        return self._examples(np.arange(len(self.pieces)) % 10 == 9)

    def _examples(self, chosen: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        tokens = self.pieces[chosen]
        x = {"token_ids": tokens[:, :-1], "padding_mask": np.ones_like(tokens[:, :-1])}
        return x, tokens[:, 1:]


def public_text(size: int) -> str:
    """Returns the first docstrings of Python's library, by name of the file, so many characters."""
    texts: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                texts.append(ast.get_docstring(node) or "")
        if sum(map(len, texts)) > size:
            break
    return "\n\n".join(filter(None, texts))[:size]


def private_text(path: str | None) -> str:
    """Returns the text in a file or, in its place, scikit-learn's descriptions of data sets."""
    if path is not None:
        try:
            return Path(path).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"data must be a text file in UTF-8; {path}: {error}") from error
    folder = importlib.resources.files("sklearn.datasets.descr")
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".rst")), key=lambda f: f.name)
    return "\n".join(f.read_text("utf-8") for f in files)


def small_model(length: int) -> Any:
    """Returns GPT-2 in small, with random weights, for bytes."""
    import keras_hub

    names = _names_of_bytes()
    pair = names[255] * 2  # A merge there must be; this one is in no text in UTF-8.
    tokens = [*names, "<|endoftext|>", pair]
    tokenizer = keras_hub.models.GPT2Tokenizer(
        vocabulary={token: i for i, token in enumerate(tokens)}, merges=[" ".join(pair)]
    )
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=len(tokens), max_sequence_length=length, dropout=0.0, **_SIZES
    )
    preprocessor = keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=length)
    return keras_hub.models.GPT2CausalLM(backbone, preprocessor)


def _names_of_bytes() -> list[str]:
    """Returns what GPT-2 calls the 256 bytes: visible letters of Latin-1, others from 256 on."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]


def tokens_of(task: Any, text: str) -> np.ndarray:
    """Returns a text in the tokens of a model."""
    return np.asarray(task.preprocessor.tokenizer(text))


def write_preset(length: int, epochs: int, folder: Path) -> None:
    """Trains a small model without privacy on a public text, unless that was done before."""
    import keras

    if folder.exists():
        return
    task = small_model(length)
    texts = Texts.cut(tokens_of(task, public_text(_PUBLIC_BYTES)), length)
    model = keras.Model(task.input, task.output)
    model.compile(keras.optimizers.Adam(2e-3), _loss())
    model.fit(*texts.training, batch_size=64, epochs=epochs, verbose=2)
    unfinished = folder.with_suffix(".unfinished")
    task.save_to_preset(os.fspath(unfinished))
    unfinished.rename(folder)


def add_adapters(task: Any, rank: int) -> None:
    """Freezes a model but for adapters of its attention; biases stay as they are, too."""
    task.backbone.enable_lora(rank)
    for layer in task.backbone._flatten_layers(include_self=False):
        if getattr(layer, "lora_enabled", False) and layer.bias is not None:
            layer.bias.trainable = False


def plan(size: int, values: flags.FlagValues) -> bm.Mechanism:
    """Returns the best banded mechanism for SGD with momentum and Poisson samples."""
    if values.batch_size > size:
        raise UsageError(
            f"batch_size must be at most the {size:,} training pieces. Found {values.batch_size}."
        )
    num_rounds = values.epochs * (size // values.batch_size)
    request = bm.PlanRequest(
        workload=bm.sgd(num_rounds, momentum=_MOMENTUM),
        epsilon=values.epsilon,
        delta=_DELTA,
        batch_size=values.batch_size,
        dataset_size=size,
        l2_norm_clip=_CLIP,
        compare_dense=False,
    )
    return bm.plan_mechanism(request).mechanism


def fine_tune(
    task: Any, mechanism: bm.Mechanism, texts: Texts, values: flags.FlagValues, output: Path
) -> tuple[float, float]:
    """Trains the adapters, or goes on with it; returns the loss on test pieces before and after."""
    import keras

    secret = private_keras.make_secret_folder(output / "secret")
    model = private_keras.make_private(task)
    optimizer = private_keras.SGD(mechanism, values.learning_rate, momentum=_MOMENTUM)
    model.compile(optimizer, _loss())
    before = model.evaluate(*texts.test, batch_size=128, verbose=0)
    model.fit(
        private_keras.make_batches(texts.training, mechanism),
        epochs=values.epochs,
        verbose=2,
        callbacks=[
            keras.callbacks.BackupAndRestore(os.fspath(secret / "backup"), double_checkpoint=True),
            private_keras.PrivacyCallback(output / _RECORD),
        ],
    )
    after = model.evaluate(*texts.test, batch_size=128, verbose=0)
    task.backbone.save_lora_weights(output / _ADAPTERS)  # Without the noise, which is secret.
    return before, after


def _loss() -> Any:
    import keras

    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _define() -> flags.FlagValues:
    values = flags.FlagValues()
    where: dict[str, Any] = {"flag_values": values}
    integer, number = flags.DEFINE_integer, flags.DEFINE_float
    flags.DEFINE_string("output", None, "Folder for adapters, mechanism and record.", **where)
    flags.DEFINE_string("data", None, "A text file to fine-tune on, in UTF-8.", **where)
    flags.DEFINE_string("preset", None, "A preset of a causal model of KerasHub.", **where)
    integer("length", 64, "Tokens in an example.", lower_bound=2, **where)
    integer("rank", 4, "Rank of the adapters.", lower_bound=1, **where)
    integer("public_epochs", 4, "Passes over the public text.", lower_bound=1, **where)
    integer("epochs", 8, "Passes over the private text.", lower_bound=1, **where)
    integer("batch_size", 64, "Expected batch size.", lower_bound=1, **where)
    number("epsilon", 8.0, "Epsilon of one example, for zero-out neighbours.", **where)
    number("learning_rate", 1.0, "Learning rate; tune it on public data.", **where)
    flags.DEFINE_boolean("help", False, "Print this help.", **where)
    return values


def _load_preset(preset: str) -> Any:
    import keras_hub

    try:
        return keras_hub.models.CausalLM.from_preset(preset)
    except Exception as error:  # Of any kind: it asks three registries, and folders.
        reason = str(error).strip().partition("\n")[0]
        raise UsageError(f"The preset {preset} cannot be loaded: {reason}") from error


def _run(values: flags.FlagValues) -> int:
    if not values.output:
        raise UsageError("output must be a folder for the results; give --output.")
    if values.learning_rate <= 0:
        raise UsageError(f"learning_rate must be positive. Found {values.learning_rate}.")
    if importlib.util.find_spec("keras_hub") is None:
        raise UsageError(
            "keras-hub is not installed: it needs Keras 3, on Python 3.12 or 3.13 (`make "
            "test-modern` makes .venv-modern with it)."
        )
    output = Path(values.output)
    if (output / _ADAPTERS).exists():
        raise UsageError(
            f"{output} holds a finished run, and another one with its data would add to its "
            "privacy loss; choose a new folder."
        )
    output.mkdir(parents=True, exist_ok=True)
    try:
        text = private_text(values.data)
        if values.preset is None:
            write_preset(values.length, values.public_epochs, output / _PRESET)
        task = _load_preset(values.preset or os.fspath(output / _PRESET))
        texts = Texts.cut(tokens_of(task, text), values.length)
        add_adapters(task, values.rank)
        path = output / _MECHANISM
        if path.exists():
            mechanism = bm.load_mechanism(path)
        else:
            mechanism = plan(len(texts.training[1]), values)
            bm.save_mechanism(mechanism, path)
        print(mechanism.describe())
        before, after = fine_tune(task, mechanism, texts, values, output)
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    trained = sum(int(np.prod(v.shape)) for v in task.trainable_variables)
    print(f"\n{trained:,} of {task.count_params():,} parameters were trained.")
    print(f"Loss a token on test pieces: {before:.3f} before, {after:.3f} after")
    print(
        f"epsilon {round_up(mechanism.epsilon):g} at delta {exactly(mechanism.delta)}, zero-out "
        "neighbours"
    )
    print(
        f"In {output}{os.sep}: {_ADAPTERS}, {_MECHANISM} and {_RECORD}, and secret/ (keep it so)."
    )
    return 0


def main(argv: list[str] | None = None) -> int:
    """Runs the program on `argv` (the process's own by default) and returns its exit status."""
    return run_program("keras_hub_lora", f"{__doc__}\nFlags:", _define(), _run, argv)


if __name__ == "__main__":
    sys.exit(main())
