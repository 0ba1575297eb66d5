"""Patch features of coloured images: how like they are to patches of two public photographs.

Every patch of 6 x 6 pixels of an image is compared with 256 patches of the photographs that
scikit-learn ships (a temple and a flower), after both are whitened: of one contrast, and with the
correlations of neighbouring pixels taken out, as they are in those photographs. Likeness above a
threshold, of either sign, is averaged over a grid of 3 x 3 places. This is the network of one layer
of Coates, Ng and Lee, "An Analysis of Single-Layer Networks in Unsupervised Feature Learning"
(2011), with random patches as its filters. There they come from the training images. Here these are
private, so nothing is learned from them: features of an image depend on that image and on the
photographs alone, and cost no privacy.

A patch and its mirror image are both among the 256, so that the features of a mirror image are the
same in another order. Taken is the mean over an image and its mirror image.

In the end features are whitened, too, by how they vary among pieces of the photographs. Few
directions have most of their variance: gradients are clipped by what they are along these, and
private training has no time to learn along the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import scipy.linalg
import sklearn.datasets
import tensorflow as tf

_PATCHES = 256  # Half of them are mirror images of the others.
_SIZE = 6
_STRIDE = 1
_GRID = 3
_THRESHOLD = 1.0

_SHRUNK = (2, 4)  # Pixels of a photograph to one, each way: small images show things from afar.
_SAMPLES = 10_000  # Patches of each by which correlations are estimated.
_LEAST_VARIANCE = 10 / 255**2  # Added to that of a patch: flat ones are not all noise.
_LEAST_EIGENVALUE = 0.1  # Added to those of the correlations, likewise.
_CHUNK = 20  # Images at once; more do not fit into a processor's cache.

_PIECES_SHRUNK = (1, 2, 4, 8)  # Pieces show parts of things and whole ones.
_PIECES = 600  # Of each photograph in each size.
_LEAST_SPREAD = 1.0  # Added to variances of features: pieces tell little of small ones.
_WHITENED = 1000  # Rows at once.


def patch_features(images: np.ndarray) -> np.ndarray:
    """Returns the features of images `[count, height, width, 3]` in [0, 1], a row an image.

    Rows have mean square 1.
    """
    least, most = _SIZE + _GRID - 1, min(_photographs(max(_PIECES_SHRUNK))[0].shape[:2])
    sizes = images.shape[1:3]
    if images.ndim != 4 or images.shape[-1] != 3 or min(sizes) < least or max(sizes) > most:
        raise ValueError(
            f"images must have three colours and {least} to {most} pixels each way, "
            f"[count, height, width, 3]. Found {list(images.shape)}."
        )
    mean, whitening = _whitening(*sizes)
    rows = _alike(images)
    for some in np.array_split(rows, -(-len(rows) // _WHITENED)):
        white = (some - mean) @ whitening
        some[:] = white / np.sqrt(np.mean(white**2, axis=1, keepdims=True) + 1e-5)
    return rows


def _alike(images: np.ndarray) -> np.ndarray:
    """Returns square roots of likeness, shifted and scaled to mean 0 and variance 1 by image."""
    likeness = _likeness()
    rows = []
    for start in range(0, len(images), _CHUNK):
        grid = np.sqrt(likeness(tf.constant(images[start : start + _CHUNK], tf.float32)).numpy())
        row = grid.reshape(len(grid), -1)
        row -= row.mean(axis=1, keepdims=True)
        rows.append(row / np.sqrt(row.var(axis=1, keepdims=True) + 1e-5))
    return np.concatenate(rows)


@functools.cache
def _whitening(height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns a mean to subtract from rows, and a matrix to multiply them by.

    Any root of the inverse covariance does: to noise and to clipping all directions are the same.
    """
    rng = np.random.default_rng(1)
    pieces = []
    for by in _PIECES_SHRUNK:
        for photograph in _photographs(by):
            windows = np.lib.stride_tricks.sliding_window_view(photograph, (height, width), (0, 1))
            rows, columns = (rng.integers(size, size=_PIECES) for size in windows.shape[:2])
            pieces.append(np.moveaxis(windows[rows, columns], 1, -1))
    features = _alike(np.concatenate(pieces))
    covariance = np.cov(features.T) + _LEAST_SPREAD * np.eye(features.shape[1])
    root = np.linalg.cholesky(covariance)
    inverse = scipy.linalg.solve_triangular(root, np.eye(len(root)), lower=True)
    return features.mean(axis=0), inverse.T.astype(np.float32)


@functools.cache
def _likeness() -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns what makes `[count, 3, 2, 2, patches]` of images: place, sign and patch."""
    filters, offset = _filters()
    kernel = tf.constant(filters.reshape(_SIZE, _SIZE, 3, _PATCHES))
    mean = tf.ones((_SIZE, _SIZE, 3, 1)) / (3 * _SIZE**2)
    mirrored = np.roll(np.arange(_PATCHES), _PATCHES // 2)

    @tf.function
    def likeness(images: tf.Tensor) -> tf.Tensor:
        means = tf.nn.conv2d(images, mean, _STRIDE, "VALID")
        variances = tf.nn.conv2d(images**2, mean, _STRIDE, "VALID") - means**2
        products = tf.nn.conv2d(images, kernel, _STRIDE, "VALID") - means * filters.sum(axis=0)
        alike = products / tf.sqrt(tf.nn.relu(variances) + _LEAST_VARIANCE) - offset
        signs = tf.stack([tf.nn.relu(alike - _THRESHOLD), tf.nn.relu(-alike - _THRESHOLD)], axis=3)
        rows = [tf.reduce_mean(part, axis=1) for part in _parts(signs, axis=1)]
        cells = [tf.reduce_mean(part, axis=2) for part in _parts(tf.stack(rows, 1), axis=2)]
        grid = tf.stack(cells, axis=2)
        both = (grid + tf.gather(grid[:, :, ::-1], mirrored, axis=-1)) / 2
        return both[:, :, : -(-_GRID // 2)]

    return likeness


def _parts(map_: tf.Tensor, axis: int) -> list[tf.Tensor]:
    """Returns thirds of a map, the outer ones of one size, as they are in its mirror image."""
    size = map_.shape[axis]
    outer = size // _GRID
    return tf.split(map_, [outer, size - 2 * outer, outer], axis=axis)


def _filters() -> tuple[np.ndarray, np.ndarray]:
    """Returns a column a patch, and what to subtract from its products.

    Products are with a patch of an image that was shifted and scaled to mean 0 and variance 1.
    """
    rng = np.random.default_rng(0)
    samples = []
    for photographs in zip(*map(_photographs, _SHRUNK), strict=True):
        for small in photographs:
            windows = np.lib.stride_tricks.sliding_window_view(small, (_SIZE, _SIZE), axis=(0, 1))
            rows, columns = (rng.integers(size, size=_SAMPLES) for size in windows.shape[:2])
            samples.append(np.moveaxis(windows[rows, columns], 1, -1))
    patches = np.concatenate(samples)
    contrasts = patches.std(axis=(1, 2, 3))
    patches = np.concatenate([patches, patches[:, :, ::-1]]).reshape(2 * len(patches), -1)
    patches -= patches.mean(axis=1, keepdims=True)
    patches /= np.sqrt(patches.var(axis=1, keepdims=True) + _LEAST_VARIANCE)
    mean = patches.mean(axis=0)
    eigenvalues, vectors = np.linalg.eigh(np.cov(patches.T))
    whitening = vectors / np.sqrt(eigenvalues + _LEAST_EIGENVALUE) @ vectors.T
    chosen = rng.choice(np.flatnonzero(contrasts > 0.05), _PATCHES // 2, replace=False)
    chosen = np.concatenate([chosen, chosen + len(contrasts)])
    white = (patches[chosen] - mean) @ whitening
    white /= np.linalg.norm(white, axis=1, keepdims=True)
    filters = whitening @ white.T
    return filters.astype(np.float32), (mean @ filters).astype(np.float32)


@functools.cache
def _photographs(by: int) -> list[np.ndarray]:
    """Returns both with numbers in [0, 1], shrunk."""
    images = sklearn.datasets.load_sample_images().images
    return [_shrunk(image / np.float32(255), by) for image in images]


def _shrunk(photograph: np.ndarray, by: int) -> np.ndarray:
    height, width = (size // by for size in photograph.shape[:2])
    cut = photograph[: height * by, : width * by]
    return cut.reshape(height, by, width, by, 3).mean(axis=(1, 3))
