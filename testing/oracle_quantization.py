"""Block fp8 in NumPy, written to be read.

  y      = x H D^-1/2         H the D x D Sylvester matrix of +-1
  scale  = max(amax, 1e-4) * (1/448), in float32; ue8m0: up to a power of two
  values = y / scale in float32, clamped to +-448, rounded to e4m3

Scores of what was rounded are float64. Letters as in `oracle`.
"""

import ml_dtypes
import numpy as np

from testing.oracle_rope import f64


def hadamard(x):
  """Returns x H D^-1/2 over the last axis, float64."""
  width = np.shape(x)[-1]
  matrix = np.ones((1, 1))
  while len(matrix) < width:
    matrix = np.block([[matrix, matrix], [matrix, -matrix]])
  return f64(x) @ matrix / np.sqrt(width)


def quantize(x, *, scale_format, block_size):
  """Returns e4m3 values [..., D] and float32 scales [..., D / block_size]."""
  x = np.asarray(x, np.float32)
  width = x.shape[-1]
  values, scales = [], []
  for start in range(0, width, block_size):
    block = x[..., start : start + block_size]
    amax = np.max(np.abs(block), axis=-1, keepdims=True)
    scale = np.maximum(amax, np.float32(1e-4)) * np.float32(1 / 448)
    if scale_format == "ue8m0":
      mantissa, exponent = np.frexp(scale)  # scale = mantissa * 2^exponent
      exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
      scale = np.ldexp(np.float32(1), exponent)
    rounded = np.clip(block / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    values.append(rounded)
    scales.append(scale)
  return np.concatenate(values, axis=-1), np.concatenate(scales, axis=-1)


def dequantize(values, scales, *, block_size):
  """Returns values times their scales, float64 [..., D]."""
  width = values.shape[-1]
  spread = np.repeat(f64(scales), block_size, axis=-1)[..., :width]
  return f64(values) * spread
