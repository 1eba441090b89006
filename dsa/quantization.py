"""Block fp8: index queries and keys after a Hadamard rotation, and latents.

    y       = x H D^-1/2                            hadamard, H H^T = D
    scale   = max(amax of a block, 1e-4) / 448      rounded up to 2^n: ue8m0
    values  = clamp(y / scale, +-448) as e4m3       y ~ values * scale
    score   = k_scale sum_i w_i q_scale_i relu(q_values_i . k_values)

The rotation goes on queries and keys alike, so without rounding it changes no
score; it spreads outliers over all dims, so that a block's scale fits them all.
Nothing here is differentiable: it is for inference.

Source: the index path of DeepSeek-V3.2-Exp's inference code, arXiv 2512.02556.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

import einops
import jax
import jax.numpy as jnp
import numpy as np

from dsa import indexer
from dsa.checks import check_count, check_dtype, check_numbers, check_shape
from dsa.config import DSAConfig, Quantization

ScaleFormat = Literal["float32", "ue8m0"]

SCALE_FORMATS: Mapping[Quantization, ScaleFormat] = {
  "fp8_float32": "float32",
  "fp8_ue8m0": "ue8m0",
}

# Values that share a scale, where the width is not smaller.
BLOCK_SIZE = 128

# What the values are, in the cache too.
VALUE_DTYPE = jnp.float8_e4m3fn
_LARGEST_VALUE = 448.0
# Multiplied by, as the published kernels do: a division rounds differently.
_INVERSE_LARGEST = np.float32(1 / _LARGEST_VALUE)
_SMALLEST_AMAX = 1e-4


class Blocks(NamedTuple):
  """Numbers in fp8, with a scale for each block of the last axis.

  Attributes:
    values: float8_e4m3fn [..., D].
    scales: float32 [..., ceil(D / block_size)].
  """

  values: jax.Array
  scales: jax.Array


def hadamard(x: jax.Array) -> jax.Array:
  """The Hadamard transform of the last axis, times D^-1/2: its own inverse.

  log2(D) rounds of sums and differences, in float32 at least.

  Args:
    x: Floats [..., D], D a power of two.

  Returns:
    [..., D] in the dtype of x.

  Raises:
    ValueError: If D is not a power of two.
    TypeError: If x is not of a float dtype of at least 16 bits.
  """
  check_numbers("x", x)
  width = x.shape[-1] if x.ndim else 0
  if width < 1 or width & (width - 1):
    raise ValueError(
      f"x must have a last axis of a power of two, got shape {x.shape}"
    )
  y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  half = 1
  while half < width:
    y = einops.rearrange(y, "... (n two h) -> two ... n h", two=2, h=half)
    y = jnp.stack((y[0] + y[1], y[0] - y[1]), axis=-2)
    y = einops.rearrange(y, "... n two h -> ... (n two h)")
    half *= 2
  return (y * width**-0.5).astype(x.dtype)


def quantize_blocks(
  x: jax.Array,
  *,
  scale_format: ScaleFormat = "ue8m0",
  block_size: int = BLOCK_SIZE,
) -> Blocks:
  """Rounds to fp8, with one scale for each block of the last axis.

  Args:
    x: Floats [..., D].
    scale_format: "ue8m0" rounds scales up to a power of two, "float32" not.
    block_size: Values that share a scale; the last block may be partial.

  Returns:
    The values and their scales. NaN and infinity make their whole block NaN.

  Raises:
    ValueError: If x has no axis, `scale_format` is unknown or `block_size`
      below 1.
    TypeError: If x is not of a float dtype of at least 16 bits or `block_size`
      no integer.
  """
  check_numbers("x", x)
  if x.ndim < 1:
    raise ValueError(f"x must have a last axis, got shape {x.shape}")
  if scale_format not in get_args(ScaleFormat):
    raise ValueError(
      f"scale_format must be one of {get_args(ScaleFormat)}, got "
      f"{scale_format!r}"
    )
  block_size = check_count("block_size", block_size)
  width = x.shape[-1]
  blocks = _blocks(x.astype(jnp.float32), block_size)  # [..., D / block, block]
  amax = jnp.max(jnp.abs(blocks), axis=-1)
  scales = jnp.maximum(amax, _SMALLEST_AMAX) * _INVERSE_LARGEST
  if scale_format == "ue8m0":
    scales = _power_of_two_above(scales)
  values = jnp.clip(blocks / scales[..., None], -_LARGEST_VALUE, _LARGEST_VALUE)
  values = einops.rearrange(values.astype(VALUE_DTYPE), "... n d -> ... (n d)")
  return Blocks(values[..., :width], scales)


def dequantize_blocks(
  blocks: Blocks, *, block_size: int = BLOCK_SIZE, dtype: jnp.dtype
) -> jax.Array:
  """The numbers that blocks stand for: values times scales.

  Args:
    blocks: As `quantize_blocks` returns them.
    block_size: Values that share a scale.
    dtype: The float dtype of the answer; the product is taken in float32.

  Returns:
    [..., D].

  Raises:
    ValueError: If the scales do not fit the values or `block_size` is below 1.
    TypeError: If `block_size` is no integer.
  """
  block_size = check_count("block_size", block_size)
  values, scales = blocks
  count = -(-values.shape[-1] // block_size)
  if scales.shape != (*values.shape[:-1], count):
    raise ValueError(
      f"blocks.scales must have shape {(*values.shape[:-1], count)}, one for "
      f"{block_size} values, got {scales.shape}"
    )
  numbers = _blocks(values.astype(jnp.float32), block_size) * scales[..., None]
  numbers = einops.rearrange(numbers, "... n d -> ... (n d)")
  return numbers[..., : values.shape[-1]].astype(dtype)


def quantize_index(x: jax.Array, *, scale_format: ScaleFormat) -> Blocks:
  """Index queries or keys as the fp8 path scores and stores them.

  Args:
    x: [..., D] after RoPE, D a power of two of at most `BLOCK_SIZE`.
    scale_format: "ue8m0" or "float32".

  Returns:
    The rotated x in fp8, with one scale [..., 1] for all of D.

  Raises:
    ValueError: If D is not a power of two or above `BLOCK_SIZE`.
    TypeError: If x is not of a float dtype of at least 16 bits.
  """
  rotated = hadamard(x)
  if x.shape[-1] > BLOCK_SIZE:
    raise ValueError(
      f"x must have a last axis of at most {BLOCK_SIZE}, since a score takes "
      f"one scale from each side, got {x.shape[-1]}"
    )
  return quantize_blocks(rotated, scale_format=scale_format)


def stored_index_keys(k: jax.Array, config: DSAConfig) -> jax.Array | Blocks:
  """Index keys as they are scored and cached under a configuration.

  Args:
    k: Index keys [B, S, D], as `dsa.index_keys` returns them.
    config: Says whether they are quantised, and how.

  Returns:
    k itself, or its fp8 blocks.
  """
  if config.index_quantization == "none":
    return k
  return quantize_index(
    k, scale_format=SCALE_FORMATS[config.index_quantization]
  )


def stored_index_queries(
  q: jax.Array, weights: jax.Array, config: DSAConfig
) -> tuple[jax.Array, jax.Array]:
  """Index queries and head weights as stored keys are scored with them.

  Args:
    q: Index queries [B, T, I, D], as `dsa.index_queries` returns them.
    weights: float32 [B, T, I].
    config: Says how the keys are quantised.

  Returns:
    q and the weights themselves, or q in fp8 and the weights times its scales.
  """
  if config.index_quantization == "none":
    return q, weights
  values, scales = quantize_index(
    q, scale_format=SCALE_FORMATS[config.index_quantization]
  )
  return values, weights * scales[..., 0]


def stored_index_scores(
  q: jax.Array, keys: jax.Array | Blocks, weights: jax.Array
) -> jax.Array:
  """Scores stored keys for queries.

  Args:
    q: [B, T, I, D], from `stored_index_queries`.
    keys: What `stored_index_keys` returned, [B, S, D].
    weights: float32 [B, T, I], from `stored_index_queries`.

  Returns:
    float32 [B, T, S], unmasked.
  """
  if not isinstance(keys, Blocks):
    return indexer.weighted_relu_scores(q, keys, weights)
  return indexer.weighted_relu_scores(
    q, keys.values, weights, key_scales=keys.scales[..., 0]
  )


def stored_latents(
  kv_latent: jax.Array, config: DSAConfig
) -> jax.Array | Blocks:
  """Latents as they are cached under a configuration.

  Args:
    kv_latent: [B, S, C], as `dsa.kv_latents` returns them.
    config: Says whether they are quantised, and how.

  Returns:
    The latents themselves, or their fp8 blocks.
  """
  if config.kv_quantization == "none":
    return kv_latent
  return quantize_blocks(
    kv_latent, scale_format=SCALE_FORMATS[config.kv_quantization]
  )


def restored_latents(stored: jax.Array | Blocks, dtype: jnp.dtype) -> jax.Array:
  """Latents as they are attended to.

  Args:
    stored: What `stored_latents` returned.
    dtype: A float dtype for what was quantised.

  Returns:
    [B, S, C].
  """
  if not isinstance(stored, Blocks):
    return stored
  return dequantize_blocks(stored, dtype=dtype)


def fp8_index_scores(
  q_values: jax.Array,
  q_scales: jax.Array,
  k_values: jax.Array,
  k_scales: jax.Array,
  weights: jax.Array,
) -> jax.Array:
  """Scores every key for every query, in fp8; see the module docstring.

  Args:
    q_values: float8_e4m3fn [B, T, I, D].
    q_scales: float32 [B, T, I, 1].
    k_values: float8_e4m3fn [B, S, D].
    k_scales: float32 [B, S, 1].
    weights: float32 [B, T, I].

  Returns:
    float32 [B, T, S], unmasked.

  Raises:
    ValueError: If the shapes do not fit each other.
    TypeError: If the values are not float8_e4m3fn or the rest not float32.
  """
  sizes = check_shape("q_values", q_values, "B T I D")
  check_shape("q_scales", q_scales, "B T I 1", **_without_width(sizes))
  check_shape("weights", weights, "B T I", **_without_width(sizes))
  sizes = check_shape("k_values", k_values, "B S D", B=sizes["B"], D=sizes["D"])
  check_shape("k_scales", k_scales, "B S 1", **_without_width(sizes))
  for name, values in (("q_values", q_values), ("k_values", k_values)):
    check_dtype(name, values, VALUE_DTYPE)
  for name, numbers in (
    ("q_scales", q_scales),
    ("k_scales", k_scales),
    ("weights", weights),
  ):
    check_dtype(name, numbers, jnp.float32)
  return indexer.weighted_relu_scores(
    q_values,
    k_values,
    weights * q_scales[..., 0],
    key_scales=k_scales[..., 0],
  )


def _without_width(sizes: dict[str, int]) -> dict[str, int]:
  return {letter: size for letter, size in sizes.items() if letter != "D"}


def _blocks(x: jax.Array, block_size: int) -> jax.Array:
  """[..., D] filled up with zeros, as [..., ceil(D / block), block]."""
  fill = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % block_size)]
  return einops.rearrange(
    jnp.pad(x, fill), "... (n d) -> ... n d", d=block_size
  )


def _power_of_two_above(x: jax.Array) -> jax.Array:
  """The smallest power of two not below x, a normal float32; NaN stays NaN."""
  # On bits: a logarithm would be off by one next to a power of two.
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
  bits = (bits + jnp.uint32(0x007FFFFF)) & jnp.uint32(0xFF800000)
  power = jax.lax.bitcast_convert_type(bits, jnp.float32)
  return jnp.where(jnp.isfinite(x), power, x)
