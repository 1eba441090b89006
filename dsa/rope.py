"""Rotary position embeddings, plain or stretched by YaRN, in both layouts.

A pair of dims (a, b) with frequency f turns by the angle t = position * f:

    a' = a cos t - b sin t        b' = b cos t + a sin t

The halves layout pairs (x[i], x[i + R/2]); the interleaved layout pairs
(x[2i], x[2i + 1]). YaRN divides the slow frequencies by `factor`, keeps the
fast ones and blends between; cos and sin are not scaled, the softmax scale is
(see `DSAConfig.softmax_scale`).

Sources: RoPE, arXiv 2104.09864; YaRN, arXiv 2309.00071, section 3.2.
"""

import math

import einops
import jax
import jax.numpy as jnp
import numpy as np

from dsa.checks import check_dtype
from dsa.config import RopeConfig


def yarn_ramp(rope: RopeConfig, dim: int) -> tuple[int, int]:
  """The pairs between which YaRN blends: the last one kept, the first divided.

  Args:
    rope: A configuration of type "yarn".
    dim: R, the number of dims that turn.

  Returns:
    (low, high) indices of pairs; (10, 23) for DeepSeek-V3.2.
  """

  def pair_that_turns(rotations: float) -> float:
    wavelength = rope.original_max_position_embeddings / (
      rotations * 2 * math.pi
    )
    return dim * math.log(wavelength) / (2 * math.log(rope.rope_theta))

  low = math.floor(pair_that_turns(rope.beta_fast))
  high = math.ceil(pair_that_turns(rope.beta_slow))
  return max(low, 0), min(high, dim - 1)


def yarn_frequencies(rope: RopeConfig, dim: int) -> np.ndarray:
  """Angle per position of each pair, in radians.

  Args:
    rope: The configuration, of either type.
    dim: R, even.

  Returns:
    [R/2] float32, a constant computed in float64 at trace time.

  Raises:
    ValueError: If `dim` is odd or not positive.
  """
  if dim < 2 or dim % 2:
    raise ValueError(
      f"dim must be even and at least 2, since RoPE turns pairs, got {dim}"
    )
  frequencies = rope.rope_theta ** -(np.arange(0, dim, 2) / dim)
  if rope.rope_type == "yarn":
    low, high = yarn_ramp(rope, dim)
    # A ramp of zero width would divide by zero; 1e-3 makes it a step.
    width = max(high - low, 1e-3)
    divided = np.clip((np.arange(dim // 2) - low) / width, 0.0, 1.0)
    frequencies = frequencies * (1 - divided + divided / rope.factor)
  return frequencies.astype(np.float32)


def _cos_sin(
  x: jax.Array, positions: jax.Array, rope: RopeConfig
) -> tuple[jax.Array, jax.Array]:
  """cos and sin of shape [*positions, 1, ..., 1, R/2], float32."""
  # Integers: bfloat16 positions would merge neighbours past 256.
  check_dtype("positions", positions, jnp.integer)
  check_dtype("x", x, jnp.floating)
  lead = x.shape[: positions.ndim]
  if x.ndim <= positions.ndim or lead != positions.shape:
    raise ValueError(
      "positions must have the leading shape of x, whose last axis turns: got "
      f"positions {positions.shape} and x {x.shape}"
    )
  if x.shape[-1] % 2 or not x.shape[-1]:
    raise ValueError(
      f"x must have an even last axis, since RoPE turns pairs, got {x.shape}"
    )
  frequencies = yarn_frequencies(rope, x.shape[-1])
  angles = positions[..., None].astype(jnp.float32) * frequencies
  broadcast = (1,) * (x.ndim - 1 - positions.ndim)
  angles = angles.reshape(*positions.shape, *broadcast, frequencies.size)
  return jnp.cos(angles), jnp.sin(angles)


def _rotate(
  x: jax.Array, positions: jax.Array, rope: RopeConfig, *, layout: str
) -> jax.Array:
  cos, sin = _cos_sin(x, positions, rope)
  pairs = einops.rearrange(
    x.astype(jnp.float32), f"... {layout} -> pair ... half", pair=2
  )
  first, second = pairs[0], pairs[1]
  turned = jnp.stack((first * cos - second * sin, second * cos + first * sin))
  turned = einops.rearrange(turned, f"pair ... half -> ... {layout}")
  return turned.astype(x.dtype)


def yarn_rope_concat(
  x: jax.Array, positions: jax.Array, rope: RopeConfig
) -> jax.Array:
  """Turns pairs (x[i], x[i + R/2]): the halves layout of DeepSeek's indexer.

  Args:
    x: [..., R]; its leading axes begin with those of `positions`, further axes
      (heads) share an angle.
    positions: Integers, for example [B, T].
    rope: The configuration.

  Returns:
    The shape and dtype of x; angles are float32 whatever x is.

  Raises:
    ValueError: If R is odd or `positions` does not lead x's shape.
    TypeError: If `positions` are not integers or x is not of a float dtype.
  """
  return _rotate(x, positions, rope, layout="(pair half)")


def yarn_rope_interleaved(
  x: jax.Array, positions: jax.Array, rope: RopeConfig
) -> jax.Array:
  """Turns pairs (x[2i], x[2i + 1]): the layout of MLA and of GLM-5's indexer.

  Args:
    x: [..., R]; its leading axes begin with those of `positions`, further axes
      (heads) share an angle.
    positions: Integers, for example [B, T].
    rope: The configuration.

  Returns:
    The shape and dtype of x; angles are float32 whatever x is.

  Raises:
    ValueError: If R is odd or `positions` does not lead x's shape.
    TypeError: If `positions` are not integers or x is not of a float dtype.
  """
  return _rotate(x, positions, rope, layout="(half pair)")
