"""Scattering features of images: fixed wavelets, nothing that is learned.

Moduli of wavelet coefficients, twice, and local means of them (Bruna and Mallat, "Invariant
Scattering Convolution Networks", 2013):

    x * phi,    |x * psi_a| * phi,    ||x * psi_a| * psi_b| * phi    (b coarser than a)

with 8 directions and 2 octaves, every fourth pixel of the result: 81 channels for one of colour. A
linear model on them can be better than a network if training is private, because it has far fewer
parameters to noise (Tramèr and Boneh, "Differentially Private Learning Needs Better Features (or
Much More Data)", 2021). Features of an image depend on that image alone, so they cost no privacy.
"""

from __future__ import annotations

import numpy as np
import scipy.fft

_DIRECTIONS = 8
_OCTAVES = 2
_STRIDE = 2**_OCTAVES

# Of the mother wavelet, in pixels and radians a pixel, and how much narrower it is across.
_WIDTH = 0.8
_FREQUENCY = 3 * np.pi / 4
_SLANT = 4 / _DIRECTIONS

# Channels of one example are normalised in groups of this many.
_GROUP = 3
_CHUNK = 250  # Images at once.


def scattering_features(images: np.ndarray) -> np.ndarray:
    """Returns the features of images `[count, height, width(, colours)]`, a row an image.

    Each group of channels is shifted and scaled to mean 0 and variance 1, image by image.
    """
    if images.ndim == 3:
        images = images[..., None]
    rows = [
        _normalised(_scatter(np.moveaxis(images[start : start + _CHUNK], -1, 1)))
        for start in range(0, len(images), _CHUNK)
    ]
    return np.concatenate(rows)


def _scatter(images: np.ndarray) -> np.ndarray:
    """Returns `[count, channels, height / 4, width / 4]` of `[count, colours, height, width]`."""
    margin = ((0, 0), (0, 0), (_STRIDE, _STRIDE), (_STRIDE, _STRIDE))
    padded = np.pad(images.astype(np.float32), margin, mode="reflect")
    height, width = shape = padded.shape[-2:]
    fine, coarse = (wavelets(shape, octave) for octave in range(_OCTAVES))
    down, right = local_means(height), local_means(width)
    spectrum = scipy.fft.fft2(padded)
    channels = [down @ padded @ right.T]
    for wavelet in fine:
        moduli = np.abs(scipy.fft.ifft2(spectrum * wavelet))
        channels.append(down @ moduli @ right.T)
        again = scipy.fft.fft2(moduli)
        for coarser in coarse:
            channels.append(down @ np.abs(scipy.fft.ifft2(again * coarser)) @ right.T)
    for wavelet in coarse:
        channels.append(down @ np.abs(scipy.fft.ifft2(spectrum * wavelet)) @ right.T)
    stacked = np.stack(channels, axis=2)
    return stacked.reshape(len(images), -1, *stacked.shape[-2:])


def _normalised(channels: np.ndarray) -> np.ndarray:
    groups = channels.reshape(len(channels), channels.shape[1] // _GROUP, -1)
    groups = groups - groups.mean(axis=-1, keepdims=True)
    groups /= np.sqrt(groups.var(axis=-1, keepdims=True) + 1e-5)
    return groups.reshape(len(channels), -1).astype(np.float32)


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


def local_means(size: int) -> np.ndarray:
    """Returns the matrix that smoothes a padded line by phi and takes every fourth pixel inside."""
    places = np.arange(_STRIDE, size - _STRIDE, _STRIDE)
    bell = _bell((1, size), _WIDTH * 2 ** (_OCTAVES - 1), 0.0, 1.0, 0.0)[0].real
    rows = np.stack([np.roll(bell / bell.sum(), place) for place in places])
    return rows.astype(np.float32)


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
