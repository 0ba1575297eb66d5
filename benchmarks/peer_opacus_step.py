"""Times steps of Opacus with ghost clipping, in its own environment, for `keras_step.py`.

    python peer_opacus_step.py '{"model": "transformer", "kind": "bounded", "repetitions": 10}'

`kind` is "bounded" for Poisson samples, which have no largest size here, or "fixed" for batches of
one size; they take turns with the plain step. For memory it is one of these or "plain", and
"_alone". The networks are those of `step_models.py`. Prints one JSON object.
"""

import json
import sys
import warnings

import numpy as np
import torch
from opacus import PrivacyEngine
from opacus.layers import DPLSTM, DPMultiheadAttention
from step_models import (
    BATCH_SIZES,
    BLOCKS,
    CLASSES,
    GROUPS,
    HEADS,
    RANK,
    SHAPES,
    STAGES,
    WIDTH,
    WORDS,
    examples,
)
from step_timing import measure
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCHES = 20


class _Adapted(nn.Module):
    """A frozen linear layer with an adapter of a low rank beside it."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.a = nn.Linear(linear.in_features, RANK, bias=False)
        self.b = nn.Linear(RANK, linear.out_features, bias=False)

    def forward(self, x):
        return self.linear(x) + self.b(self.a(x))


class _Block(nn.Module):
    def __init__(self, private):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        kind = DPMultiheadAttention if private else nn.MultiheadAttention
        self.attention = kind(WIDTH, HEADS, batch_first=True)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.first(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.narrow(torch.relu(self.wide(self.second(x))))


class _Transformer(nn.Module):
    def __init__(self, private, adapted=False):
        super().__init__()
        # PyTorch's own attention has one matrix for all three, which takes no adapter.
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(_Block(private or adapted) for _ in range(BLOCKS))
        self.normal, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)
        if adapted:
            for part in (self.words, self.blocks, self.normal):
                part.requires_grad_(False)
            for block in self.blocks:
                block.attention.qlinear = _Adapted(block.attention.qlinear)
                block.attention.vlinear = _Adapted(block.attention.vlinear)

    def forward(self, tokens):
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.last(self.normal(x).mean(dim=1))


class _Residual(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.first, self.second = (
            _convolution(inputs, outputs, stride),
            _convolution(outputs, outputs),
        )
        self.short = _convolution(inputs, outputs, stride, 1) if stride > 1 else nn.Identity()

    def forward(self, x):
        return torch.relu(self.second(torch.relu(self.first(x))) + self.short(x))


def _convolution(inputs, outputs, stride=1, size=3):
    kernel = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(kernel, nn.GroupNorm(GROUPS, outputs))


def _resnet():
    blocks, inputs = [_convolution(3, STAGES[0]), nn.ReLU()], STAGES[0]
    for outputs in STAGES:
        blocks += [_Residual(inputs, outputs, 1 if inputs == outputs else 2)]
        blocks += [_Residual(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(
        *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(STAGES[-1], CLASSES)
    )


class _Recurrent(nn.Module):
    def __init__(self, private):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.lstm = (DPLSTM if private else nn.LSTM)(WIDTH, WIDTH, batch_first=True)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens):
        return self.last(self.lstm(self.words(tokens))[0][:, -1])


def _cnn():
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.ReLU(),
        nn.Linear(32, CLASSES),
    )


def _make(name, private):
    """Returns the network; parts that Opacus cannot do are those that it has for them."""
    torch.manual_seed(0)
    if name in ("transformer", "lora"):
        return _Transformer(private, name == "lora")
    return {"cnn": _cnn, "resnet": _resnet}[name]() if name != "lstm" else _Recurrent(private)


def _data(name, size):
    x, labels = examples(name, BATCHES * size)
    if name in SHAPES:
        x = np.ascontiguousarray(np.moveaxis(x, -1, 1))
    return TensorDataset(torch.from_numpy(x), torch.from_numpy(labels))


def _endless(loader):
    while True:
        yield from loader


def _stepper(name, kind):
    """Returns a function that takes one step."""
    size, private = BATCH_SIZES[name], kind != "plain"
    model, loss = _make(name, private), nn.CrossEntropyLoss()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    loader = DataLoader(_data(name, size), batch_size=size)
    if private:
        model.train()
        made = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            criterion=loss,
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            grad_sample_mode="ghost",
            poisson_sampling=kind == "bounded",
        )
        model, optimizer, loss, loader = made
    batches = _endless(loader)

    def step():
        x, y = next(batches)
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()

    for _ in range(2):
        step()
    return step


def run(model, kind, repetitions, max_batch_size=None):
    """Returns seconds of CPU, or memory of one kind alone."""
    del max_batch_size  # Of our samples alone.
    return measure(lambda kind: _stepper(model, kind), kind, repetitions)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(run(**json.loads(sys.argv[1]))))
