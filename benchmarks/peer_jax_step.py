"""Times steps of `jax-privacy`, in its own environment, for `keras_step.py`.

    python peer_jax_step.py \
        '{"model": "lstm", "kind": "bounded", "repetitions": 10, "max_batch_size": 79}'

`kind` is "bounded" for Poisson samples, cut to a largest size and padded to it (the library
compiles a step for every size that it meets), or "fixed" for random subsets of one size; they take
turns with the plain step. For memory it is one of these or "plain", and "_alone". The networks are
those of `step_models.py`, written in JAX. A private step clips with `clipped_grad` and adds
`gaussian_privatizer`'s noise. Prints one JSON object.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax_privacy import batch_selection, clipping, noise_addition
from step_models import (
    BATCH_SIZES,
    BLOCKS,
    CLASSES,
    GROUPS,
    HEADS,
    RANK,
    STAGES,
    WIDTH,
    WORDS,
    examples,
)
from step_timing import measure

BATCHES, RATE = 20, 0.1


class Parameters:
    """Makes named weights of given shapes, the same ones every time."""

    def __init__(self):
        self.values, self._rng = {}, np.random.default_rng(0)

    def add(self, name, *shape):
        self.values[name] = jnp.asarray(0.05 * self._rng.normal(size=shape), jnp.float32)


def _dense(p, name, x):
    return x @ p[f"{name}/w"] + p[f"{name}/b"]


def _normal(p, name, x):
    x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-3)
    return x * p[f"{name}/w"] + p[f"{name}/b"]


def _convolve(x, kernel, stride, padding):
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _grouped(p, name, x):
    by_group = x.reshape(*x.shape[:3], GROUPS, -1)
    mean = by_group.mean((1, 2, 4), keepdims=True)
    variance = by_group.var((1, 2, 4), keepdims=True)
    x = ((by_group - mean) * jax.lax.rsqrt(variance + 1e-3)).reshape(x.shape)
    return x * p[f"{name}/w"] + p[f"{name}/b"]


def _pooled(x):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "VALID")


def _cnn(p, x):
    x = jax.nn.relu(_convolve(x, p["one/w"], 2, "SAME") + p["one/b"])
    x = jax.nn.relu(_convolve(_pooled(x), p["two/w"], 2, "VALID") + p["two/b"])
    x = _pooled(x).reshape(x.shape[0], -1)
    return _dense(p, "last", jax.nn.relu(_dense(p, "wide", x)))


def _attention(p, name, x, adapters):
    heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
    q, k, v = (_dense(p, f"{name}/{part}", x) for part in "qkv")
    if adapters:
        q += x @ adapters[f"{name}/q/a"] @ adapters[f"{name}/q/b"]
        v += x @ adapters[f"{name}/v/a"] @ adapters[f"{name}/v/b"]
    q, k, v = (part.reshape(heads) for part in (q, k, v))
    weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(WIDTH // HEADS))
    return _dense(p, f"{name}/o", jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape))


def _transformer(p, tokens, adapters=None):
    x = p["words"][tokens]
    for i in range(BLOCKS):
        x += _attention(p, f"{i}", _normal(p, f"{i}/n1", x), adapters)
        wide = jax.nn.relu(_dense(p, f"{i}/wide", _normal(p, f"{i}/n2", x)))
        x += _dense(p, f"{i}/narrow", wide)
    x = _normal(p, "normal", x).mean(1)
    return _dense(adapters or p, "last", x)


def _resnet(p, x):
    def block(name, x, stride=1):
        return _grouped(p, name, _convolve(x, p[f"{name}/k"], stride, "SAME"))

    x = jax.nn.relu(block("first", x))
    for stage, _ in enumerate(STAGES):
        for number in range(2):
            name, stride = f"{stage}/{number}", 2 if number == 0 and stage > 0 else 1
            short = x if stride == 1 else block(f"{name}/short", x, stride)
            x = block(f"{name}/two", jax.nn.relu(block(f"{name}/one", x, stride)))
            x = jax.nn.relu(x + short)
    return _dense(p, "last", x.mean((1, 2)))


def _lstm(p, tokens):
    x = p["words"][tokens]

    def step(state, x):
        h, c = state
        i, f, g, o = jnp.split(x @ p["in"] + h @ p["rec"] + p["bias"], 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), None

    zeros = jnp.zeros((x.shape[0], WIDTH))
    (h, _), _ = jax.lax.scan(step, (zeros, zeros), x.swapaxes(0, 1))
    return _dense(p, "last", h)


def _weights(name):
    """Returns what is trained, and what is not."""
    made = Parameters()

    def dense_weights(name, inputs, outputs):
        made.add(f"{name}/w", inputs, outputs)
        made.add(f"{name}/b", outputs)

    def scales(name, size):
        made.values[f"{name}/w"], made.values[f"{name}/b"] = jnp.ones(size), jnp.zeros(size)

    if name == "cnn":
        for part, shape in (("one", (8, 8, 1, 16)), ("two", (4, 4, 16, 32))):
            made.add(f"{part}/w", *shape)
            made.add(f"{part}/b", shape[-1])
        dense_weights("wide", 512, 32)
        dense_weights("last", 32, CLASSES)
    elif name == "resnet":

        def kernel(name, inputs, outputs, size=3):
            made.add(f"{name}/k", size, size, inputs, outputs)
            scales(name, outputs)

        kernel("first", 3, STAGES[0])
        inputs = STAGES[0]
        for stage, outputs in enumerate(STAGES):
            for number in range(2):
                kernel(f"{stage}/{number}/one", inputs, outputs)
                kernel(f"{stage}/{number}/two", outputs, outputs)
                if number == 0 and stage > 0:
                    kernel(f"{stage}/{number}/short", inputs, outputs, 1)
                inputs = outputs
        dense_weights("last", STAGES[-1], CLASSES)
    elif name == "lstm":
        made.add("words", WORDS, WIDTH)
        made.add("in", WIDTH, 4 * WIDTH)
        made.add("rec", WIDTH, 4 * WIDTH)
        made.add("bias", 4 * WIDTH)
        dense_weights("last", WIDTH, CLASSES)
    else:
        made.add("words", WORDS, WIDTH)
        for i in range(BLOCKS):
            for part in "qkvo":
                dense_weights(f"{i}/{part}", WIDTH, WIDTH)
            scales(f"{i}/n1", WIDTH)
            scales(f"{i}/n2", WIDTH)
            dense_weights(f"{i}/wide", WIDTH, 4 * WIDTH)
            dense_weights(f"{i}/narrow", 4 * WIDTH, WIDTH)
        scales("normal", WIDTH)
        dense_weights("last", WIDTH, CLASSES)
    if name != "lora":
        return made.values, None
    adapters = Parameters()
    for i in range(BLOCKS):
        for part in "qv":
            adapters.add(f"{i}/{part}/a", WIDTH, RANK)
            adapters.add(f"{i}/{part}/b", RANK, WIDTH)
    trained = {k: v for k, v in made.values.items() if k.startswith("last/")}
    return {**adapters.values, **trained}, made.values


def _loss_of(name, frozen):
    def loss(trained, batch):
        x, y = batch
        if name == "lora":
            logits = _transformer(frozen, x, trained)
        else:
            logits = {"cnn": _cnn, "resnet": _resnet, "lstm": _lstm, "transformer": _transformer}[
                name
            ](trained, x)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1))

    return loss


def _drawn(kind, count, size, max_batch_size):
    """Yields the numbers of examples, -1 for padding."""
    rng = np.random.default_rng(0)
    while kind == "fixed":
        yield rng.choice(count, size, replace=False)
    samples = batch_selection.CyclicPoissonSampling(size / count, 100_000, max_batch_size)
    for sample in samples.batch_iterator(count, rng):
        yield batch_selection.pad_to_multiple_of(sample, max_batch_size)


def _stepper(name, kind, max_batch_size):
    """Returns a function that takes one step."""
    size = BATCH_SIZES[name]
    trained, frozen = _weights(name)
    x, y = examples(name, BATCHES * size)
    loss = _loss_of(name, frozen)

    def moved(trained, gradients):
        return jax.tree.map(lambda p, g: p - RATE * g, trained, gradients)

    if kind == "plain":
        update = jax.jit(lambda t, b: moved(t, jax.grad(loss)(t, b)), donate_argnums=0)
        state = {"trained": trained, "at": 0}

        def step():
            at = state["at"] % len(y)
            batch = jnp.asarray(x[at : at + size]), jnp.asarray(y[at : at + size])
            state["trained"] = jax.block_until_ready(update(state["trained"], batch))
            state["at"] += size

    else:
        clipped = clipping.clipped_grad(loss, l2_clip_norm=1.0, normalize_by=size)
        privatizer = noise_addition.gaussian_privatizer(
            stddev=1.0 / size, prng_key=jax.random.key(0)
        )

        def private_update(trained, noise, batch, is_padding):
            gradients = clipped(trained, batch, is_padding_example=is_padding)
            gradients, noise = privatizer.update(gradients, noise)
            return moved(trained, gradients), noise

        update = jax.jit(private_update, donate_argnums=(0, 1))
        batches = _drawn(kind, len(y), size, max_batch_size)
        state = {"trained": trained, "noise": privatizer.init(trained)}

        def step():
            drawn = next(batches)
            batch = jnp.asarray(x[drawn]), jnp.asarray(y[drawn])
            result = update(state["trained"], state["noise"], batch, jnp.asarray(drawn < 0))
            state["trained"], state["noise"] = jax.block_until_ready(result)

    for _ in range(2):
        step()
    return step


def run(model, kind, repetitions, max_batch_size):
    """Returns seconds of CPU, or memory of one kind alone."""
    return measure(lambda kind: _stepper(model, kind, max_batch_size), kind, repetitions)


if __name__ == "__main__":
    print(json.dumps(run(**json.loads(sys.argv[1]))))
