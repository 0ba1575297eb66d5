"""Formulas for LSTM, GRU and SimpleRNN: one product for all steps of time.

A recurrent layer adds, at each step t, the products of its kernel with the input x_t and of its
recurrent kernel with the state h_(t-1). If e_t is the gradient of the loss at the sum, before the
activations, the gradients of the kernels are sum_t x_t e_t^T and sum_t h_(t-1) e_t^T: sums of outer
products as in a dense layer on a sequence. So the layer runs in a loop of our own which takes all
x_t times the kernel at once, adds zeros to what comes from the state, and keeps the states; the
gradients at those two are all that is needed. Autodiff does it, without the sums over time of
gradients of kernels that make up a large part of a plain step.

The loop computes what Keras computes, masks and directions included. What it has no code for is
refused: states that outlive a batch, initial states with masks, dropout of states, and axes in
another order.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from bandmf_tf.keras._compat import Unsupported
from bandmf_tf.keras.matrix_layers import Term

# From a cell, products with inputs and with the state, and the states to the new states.
_Step = Callable[[Any, tf.Tensor, tf.Tensor, list[tf.Tensor]], list[tf.Tensor]]


def check(layer: Any) -> None:
    """Raises `Unsupported` for options that the loop has no code for."""
    cell = layer.cell
    if type(cell) is not _STEPS[type(layer)].cell:
        raise Unsupported(f"the cell of {layer.name}")
    if layer.stateful or getattr(layer, "time_major", False):
        raise Unsupported(f"states that outlive a batch, or time as first axis, in {layer.name}")
    if layer.recurrent_dropout or (layer.dropout and getattr(cell, "implementation", 2) != 2):
        raise Unsupported(f"dropout of states or of single gates in {layer.name}")


def _lstm(cell: Any, x: tf.Tensor, s: tf.Tensor, states: list[tf.Tensor]) -> list[tf.Tensor]:
    i, f, candidate, o = tf.split(x + s, 4, axis=1)
    gate = cell.recurrent_activation
    carry = gate(f) * states[1] + gate(i) * cell.activation(candidate)
    return [gate(o) * cell.activation(carry), carry]


def _gru(cell: Any, x: tf.Tensor, s: tf.Tensor, states: list[tf.Tensor]) -> list[tf.Tensor]:
    (x_z, x_r, x_h), (s_z, s_r, s_h) = tf.split(x, 3, axis=1), tf.split(s, 3, axis=1)
    z, r = cell.recurrent_activation(x_z + s_z), cell.recurrent_activation(x_r + s_r)
    if cell.reset_after:
        from_state = r * s_h
    else:
        from_state = tf.matmul(r * states[0], _recurrent_kernel(cell, x.dtype)[:, -z.shape[1] :])
    return [z * states[0] + (1 - z) * cell.activation(x_h + from_state)]


def _recurrent_kernel(cell: Any, dtype: tf.DType) -> tf.Tensor:
    # Autodiff would sum up its gradient step by step otherwise.
    return tf.stop_gradient(tf.cast(tf.convert_to_tensor(cell.recurrent_kernel), dtype))


def _simple(cell: Any, x: tf.Tensor, s: tf.Tensor, states: list[tf.Tensor]) -> list[tf.Tensor]:
    del states
    return [cell.activation(x + s)]


@dataclasses.dataclass(frozen=True)
class _Cell:
    cell: type
    step: _Step
    num_states: int


_layers = tf.keras.layers
_STEPS = {
    _layers.LSTM: _Cell(_layers.LSTMCell, _lstm, 2),
    _layers.GRU: _Cell(_layers.GRUCell, _gru, 1),
    _layers.SimpleRNN: _Cell(_layers.SimpleRNNCell, _simple, 1),
}
LAYERS = frozenset(_STEPS)
CELLS = [known.cell for known in _STEPS.values()]


def call(layer: Any, original: Any, watch: Any, *args: Any, **kwargs: Any) -> Any:
    """Does what `layer.call` does, and notes inputs, states and both products."""
    del original
    given = inspect.signature(type(layer).call).bind(layer, *args, **kwargs).arguments
    _, inputs = list(given.items())[1]
    mask, initial = given.get("mask"), given.get("initial_state")
    if isinstance(inputs, (list, tuple)):  # Keras 2 hands on symbolic states like this.
        inputs, *initial = inputs
        mask = mask[0] if isinstance(mask, (list, tuple)) else mask
    if initial is not None and mask is not None:
        raise Unsupported(f"initial states with a mask of {layer.name}")
    if not (inputs.dtype.is_floating and inputs.shape[1:].is_fully_defined()):
        raise Unsupported(f"the unknown size or the integers of the input of {layer.name}")
    if layer.dropout and given.get("training"):
        kept = tf.nn.dropout(tf.ones_like(inputs[:, :1]), layer.dropout)
        inputs *= kept
    if layer.go_backwards:
        inputs, mask = (None if t is None else tf.reverse(t, [1]) for t in (inputs, mask))
    cell, dtype = layer.cell, inputs.dtype
    kernel, bias, state_bias = (
        None if value is None else tf.cast(value, dtype) for value in _values(cell)
    )
    from_inputs = tf.tensordot(inputs, kernel, 1)
    from_inputs = from_inputs if bias is None else from_inputs + bias
    products = [from_inputs]
    if state_bias is not None:
        products.append(tf.zeros_like(from_inputs) + state_bias)
    saved = [inputs, from_inputs]
    products = watch(saved, products)
    begin = _initial_states(layer, initial, from_inputs)
    outputs, states = _loop(layer, products, mask, begin)
    saved.append(tf.concat([begin[0][:, None], outputs[:, :-1]], axis=1))
    if mask is not None and layer.zero_output_for_mask:
        outputs *= tf.cast(mask, dtype)[:, :, None]
    result = outputs if layer.return_sequences else outputs[:, -1]
    return [result, *states] if layer.return_state else result


def _initial_states(layer: Any, given: Any, like: tf.Tensor) -> list[tf.Tensor]:
    if given is not None:
        return [tf.cast(state, like.dtype) for state in tf.nest.flatten(given)]
    zeros = tf.zeros([tf.shape(like)[0], layer.cell.recurrent_kernel.shape[0]], like.dtype)
    return [zeros] * _STEPS[type(layer)].num_states


def _values(cell: Any) -> tuple[tf.Tensor, tf.Tensor | None, tf.Tensor | None]:
    """Returns the kernel and what is added to the products with inputs and with states.

    None for states where the gradient behind both products is the same.
    """
    kernel = tf.convert_to_tensor(cell.kernel)
    bias = tf.convert_to_tensor(cell.bias) if cell.use_bias else None
    if not getattr(cell, "reset_after", False):
        return kernel, bias, None
    if bias is None:
        return kernel, None, tf.zeros([kernel.shape[1]], kernel.dtype)
    return kernel, bias[0], bias[1]


def _loop(
    layer: Any, products: list[tf.Tensor], mask: tf.Tensor | None, begin: list[tf.Tensor]
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Returns the states after each step, `[examples, steps, units]`, and the last ones."""
    step = _STEPS[type(layer)].step
    length, dtype = products[0].shape[1], products[0].dtype
    kernel = _recurrent_kernel(layer.cell, dtype)
    sequences = [tf.transpose(t, [1, 0, 2]) for t in products]
    if mask is not None:
        sequences.append(tf.transpose(mask)[:, :, None])
    arrays = [tf.TensorArray(t.dtype, length).unstack(t) for t in sequences]

    def body(t: tf.Tensor, states: list[tf.Tensor], written: tf.TensorArray) -> tuple:
        from_input, *others = [array.read(t) for array in arrays]
        from_state = tf.matmul(states[0], kernel)
        if len(products) > 1:
            from_state += others[0]
        new = step(layer.cell, from_input, from_state, states)
        if mask is not None:
            pairs = zip(new, states, strict=True)
            new = [tf.where(others[-1], after, before) for after, before in pairs]
        return t + 1, new, written.write(t, new[0])

    _, states, written = tf.while_loop(
        lambda t, *_: t < length,
        body,
        (tf.constant(0), begin, tf.TensorArray(dtype, length)),
        maximum_iterations=length,
    )
    outputs = tf.transpose(written.stack(), [1, 0, 2])
    return tf.ensure_shape(outputs, [None, length, kernel.shape[0]]), list(states)


def terms(layer: Any, saved: Any, behind: Any) -> list[Term]:
    """Returns the terms of both kernels and the bias."""
    inputs, from_inputs, states = saved
    cell, sums = layer.cell, [tf.reduce_sum(e, axis=1) for e in behind]
    recurrent = (states, behind[-1])
    if not getattr(cell, "reset_after", True):
        recurrent = _reset_first(cell, from_inputs, states, behind[0])
    return [
        (cell.kernel, inputs, behind[0]),
        (cell.recurrent_kernel, *recurrent),
        (cell.bias, tf.stack(sums, axis=1) if len(sums) > 1 else sums[0]),
    ]


def _reset_first(
    cell: Any, from_inputs: tf.Tensor, states: tf.Tensor, behind: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns rows of a GRU whose last gate sees states after their reset: twice the positions."""
    units = states.shape[2]
    kernel = _recurrent_kernel(cell, states.dtype)[:, units : 2 * units]
    reset = from_inputs[..., units : 2 * units] + tf.tensordot(states, kernel, 1)
    last = tf.constant([0.0] * (2 * units) + [1.0] * units, behind.dtype)
    return (
        tf.concat([states, cell.recurrent_activation(reset) * states], axis=1),
        tf.concat([behind * (1 - last), behind * last], axis=1),
    )
