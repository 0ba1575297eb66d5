"""Scattering features of images: fixed wavelets, nothing that is learned.

Moduli of wavelet coefficients, twice, and local means of them (Bruna and Mallat, "Invariant
Scattering Convolution Networks", 2013):

    x * phi,    |x * psi_a| * phi,    ||x * psi_a| * psi_b| * phi    (b coarser than a)

with 8 directions and 2 octaves, at every fourth pixel: 81 channels for one of colour. A linear
model on them can be better than a network if training is private, because it has far fewer
parameters to noise (Tramèr and Boneh, "Differentially Private Learning Needs Better Features (or
Much More Data)", 2021). Features of an image depend on that image alone, so they cost no privacy.

Where an image and its mirror image mean the same, the mean of the features of both is as good, and
half as many numbers to noise. A linear model on them is what training on both would lead to.

Red, green and blue are much alike. Of a coloured image the channels are those of its brightness and
of two differences from it, as in JPEG: normalised one by one, these tell more.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import scipy.fft

_DIRECTIONS = 8
_OCTAVES = 2
_STRIDE = 2**_OCTAVES

# Of the mother wavelet, in pixels and radians a pixel, and how much narrower it is across.
_WIDTH = 0.8
_FREQUENCY = 3 * np.pi / 4
_SLANT = 4 / _DIRECTIONS

# Brightness, and what blue and red are more than it (ITU-R BT.601), of red, green and blue.
_BRIGHTNESS = np.array([0.299, 0.587, 0.114], np.float32)
_COLOURS = np.stack(
    [
        _BRIGHTNESS,
        (np.array([0.0, 0.0, 1.0], np.float32) - _BRIGHTNESS) / 1.772,
        (np.array([1.0, 0.0, 0.0], np.float32) - _BRIGHTNESS) / 1.402,
    ],
    axis=1,
)

# Channels of one example are normalised in groups of this many, of one kind but for the first.
_GROUP = 3
_CHUNK = 16  # Images at once; more do not fit into a processor's cache.


def scattering_features(images: np.ndarray) -> np.ndarray:
    """Returns the features of images `[count, height, width(, colours)]`, a row an image.

    Each group of channels is shifted and scaled to mean 0 and variance 1, image by image.
    """
    return np.concatenate([_normalised(channels) for channels in _scattered(images)])


def mirrored_features(images: np.ndarray) -> np.ndarray:
    """Returns the same of the mean over an image and its mirror image."""
    return np.concatenate(
        [_normalised(_with_mirror_image(channels)) for channels in _scattered(images)]
    )


def _scattered(images: np.ndarray) -> Iterator[np.ndarray]:
    if images.ndim == 3:
        images = images[..., None]
    if images.shape[-1] == len(_COLOURS):
        images = images @ _COLOURS
    for start in range(0, len(images), _CHUNK):
        yield _scatter(np.moveaxis(images[start : start + _CHUNK], -1, 1))


def _scatter(images: np.ndarray) -> np.ndarray:
    """Returns `[count, channels, height / 4, width / 4]` of `[count, colours, height, width]`."""
    margin = ((0, 0), (0, 0), (_STRIDE, _STRIDE), (_STRIDE, _STRIDE))
    padded = np.pad(images.astype(np.float32), margin, mode="reflect")
    height, width = shape = padded.shape[-2:]
    fine, coarse = (wavelets(shape, octave) for octave in range(_OCTAVES))
    down, right = local_means(height), local_means(width)
    spectrum = scipy.fft.fft2(padded)
    maps, twice = [padded], []
    for wavelet in fine:
        maps.append(np.abs(scipy.fft.ifft2(spectrum * wavelet)))
        again = scipy.fft.fft2(maps[-1])
        twice += [np.abs(scipy.fft.ifft2(again * coarser)) for coarser in coarse]
    maps += [np.abs(scipy.fft.ifft2(spectrum * wavelet)) for wavelet in coarse]
    stacked = np.stack([down @ map_ @ right.T for map_ in (*maps, *twice)], axis=2)
    return stacked.reshape(len(images), -1, *stacked.shape[-2:])


def _with_mirror_image(channels: np.ndarray) -> np.ndarray:
    """Returns the left half of the mean of channels and those of mirror images.

    A mirror image has the same channels from right to left, but for directions, which turn.
    """
    turned = -np.arange(_DIRECTIONS) % _DIRECTIONS
    pairs = _DIRECTIONS * turned[:, None] + turned
    once = 1 + _DIRECTIONS * np.arange(_OCTAVES)[:, None] + turned
    order = np.concatenate([[0], once.ravel(), 1 + once.size + pairs.ravel()])
    by_colour = channels.reshape(len(channels), -1, len(order), *channels.shape[2:])
    means = (by_colour + by_colour[:, :, order, :, ::-1]) / 2
    left = means[..., : -(-means.shape[-1] // 2)]
    return left.reshape(len(channels), -1, *left.shape[3:])


def _normalised(channels: np.ndarray) -> np.ndarray:
    groups = channels.reshape(len(channels), channels.shape[1] // _GROUP, -1)
    groups = groups - groups.mean(axis=-1, keepdims=True)
    groups /= np.sqrt(groups.var(axis=-1, keepdims=True) + 1e-5)
    return groups.reshape(len(channels), -1).astype(np.float32)


@functools.cache
def wavelets(shape: tuple[int, int], octave: int) -> list[np.ndarray]:
    """Returns the spectra of Morlet wavelets in all directions: waves in a bell, without mean."""
    width, frequency = _WIDTH * 2**octave, _FREQUENCY / 2**octave
    made = []
    for direction in range(_DIRECTIONS):
        angle = np.pi * direction / _DIRECTIONS
        bell = _bell(shape, width, angle, _SLANT, 0.0)
        wave = _bell(shape, width, angle, _SLANT, frequency)
        wavelet = wave - bell * (wave.sum() / bell.sum())
        made.append(_spectrum(wavelet * _SLANT / (2 * np.pi * width**2)))
    return made


@functools.cache
def local_means(size: int) -> np.ndarray:
    """Returns the matrix that smoothes a padded line by phi, at every fourth place inside.

    Places are the same from both ends, so that a mirror image has mirrored features.
    """
    count = -(-size // _STRIDE) - 2
    places = (size - 1) / 2 + _STRIDE * (np.arange(count) - (count - 1) / 2)
    width = _WIDTH * 2 ** (_OCTAVES - 1)
    bells = np.exp(-((np.arange(size) - places[:, None]) ** 2) / (2 * width**2))
    return (bells / bells.sum(axis=1, keepdims=True)).astype(np.float32)


def _spectrum(filter_: np.ndarray) -> np.ndarray:
    # Symmetric up to conjugation around pixel 0, so the spectrum is real.
    return scipy.fft.fft2(filter_).real.astype(np.float32)


def _bell(
    shape: tuple[int, int], width: float, angle: float, slant: float, frequency: float
) -> np.ndarray:
    """Returns a Gaussian around pixel 0, times a wave, on a torus: the sum of all its copies."""
    total = np.zeros(shape, np.complex128)
    for down in range(-2, 3):
        for right in range(-2, 3):
            y = np.arange(shape[0])[:, None] + down * shape[0]
            x = np.arange(shape[1]) + right * shape[1]
            along = x * np.cos(angle) + y * np.sin(angle)
            across = y * np.cos(angle) - x * np.sin(angle)
            exponent = -(along**2 + (slant * across) ** 2) / (2 * width**2)
            total += np.exp(exponent + 1j * frequency * along)
    return total
