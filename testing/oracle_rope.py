"""RoPE and the two norms in NumPy float64: part of the oracle.

turned pair   (a cos - b sin, b cos + a sin), angle = position * f
f_i           theta^(-2i/R), divided by factor where YaRN stretches it
RMSNorm       x / sqrt(mean(x^2) + eps) * scale
LayerNorm     (x - mean) / sqrt(variance + eps) * scale + bias
"""

import math
from typing import NamedTuple

import numpy as np

# Of the two latent norms and the index key norm. Hugging Face leaves it at
# 1e-6 even where rms_norm_eps, which the norms between layers use, is 1e-5
# (GLM-5).
NORM_EPS = 1e-6


class Rope(NamedTuple):
  """What the rotary embedding reads; all after rope_theta is YaRN's own."""

  rope_theta: float = 10000.0
  rope_type: str = "default"
  factor: float = 1.0
  original_max_position_embeddings: int = 4096
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  mscale: float = 1.0
  mscale_all_dim: float = 1.0


def f64(array):
  """Returns the array as NumPy float64."""
  return np.asarray(array, np.float64)


def rms_norm(x, scale, eps=NORM_EPS):
  """x / sqrt(mean(x^2) + eps) * scale over the last axis."""
  x = f64(x)
  return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * f64(scale)


def layer_norm(x, scale, bias, eps=NORM_EPS):
  """(x - mean) / sqrt(variance + eps) * scale + bias over the last axis."""
  x = f64(x)
  x = x - np.mean(x, axis=-1, keepdims=True)
  normal = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps)
  return normal * f64(scale) + f64(bias)


def yarn_ramp(rope, rope_dim):
  """Returns the pairs (low, high) between which YaRN blends frequencies.

  Pair i turns original / (2 pi theta^(2i/R)) times within the original length;
  low is the pair that turns beta_fast times, high the one that turns beta_slow
  times, rounded outwards and kept within 0..R-1.
  """

  def pair_that_turns(times):
    wavelengths = rope.original_max_position_embeddings / (times * 2 * math.pi)
    return rope_dim * math.log(wavelengths) / (2 * math.log(rope.rope_theta))

  low = math.floor(pair_that_turns(rope.beta_fast))
  high = math.ceil(pair_that_turns(rope.beta_slow))
  return max(low, 0), min(high, rope_dim - 1)


def rope_frequencies(rope, rope_dim):
  """Returns the angle each pair turns by from one position to the next, [R/2].

  Args:
    rope: an object with the attributes of `Rope`.
    rope_dim: R.
  """
  pairs = np.arange(rope_dim // 2, dtype=np.float64)
  plain = rope.rope_theta ** (-2 * pairs / rope_dim)
  if rope.rope_type == "default":
    return plain
  if rope.rope_type != "yarn":
    raise ValueError(f"rope_type is neither default nor yarn: {rope.rope_type}")
  low, high = yarn_ramp(rope, rope_dim)
  # A ramp of no width is a step: pairs up to low keep f, the rest take
  # f / factor.
  width = high - low if high > low else 0.001
  stretched = np.clip((pairs - low) / width, 0, 1)
  return plain * (1 - stretched) + plain / rope.factor * stretched


def _angles(x, positions, frequencies):
  """Returns cos, sin [B, T, (1,) R/2] that broadcast against x's pairs."""
  angles = f64(positions)[..., None] * frequencies  # [B, T, R/2]
  if np.ndim(x) == 4:
    angles = angles[:, :, None]  # one angle for all heads
  return np.cos(angles), np.sin(angles)


def rope_concat(x, positions, frequencies):
  """Turns the pairs (x[i], x[i + R/2]): the halves layout.

  Args:
    x: [B, T, R] or [B, T, heads, R].
    positions: [B, T].
    frequencies: [R/2].
  """
  x = f64(x)
  cos, sin = _angles(x, positions, frequencies)
  half = x.shape[-1] // 2
  a, b = x[..., :half], x[..., half:]
  return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def rope_interleaved(x, positions, frequencies):
  """Turns the pairs (x[2i], x[2i + 1]): the interleaved layout.

  Args:
    x: [B, T, R] or [B, T, heads, R].
    positions: [B, T].
    frequencies: [R/2].
  """
  x = f64(x)
  cos, sin = _angles(x, positions, frequencies)
  a, b = x[..., 0::2], x[..., 1::2]
  turned = np.empty_like(x)
  turned[..., 0::2] = a * cos - b * sin
  turned[..., 1::2] = b * cos + a * sin
  return turned
