"""What a layer keeps of its tokens: the buffers of cached attention.

Of each token C + R + D numbers: its latent, its rope key and its index key, in
the dtype of the cache or as blocks of fp8 with their scales.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dsa import quantization
from dsa.checks import check_count, check_dtype, check_numbers, check_shape
from dsa.config import DSAConfig
from dsa.quantization import Blocks


class Cache(NamedTuple):
  """What is kept of the tokens of one layer; S is the `max_length`.

  Attributes:
    kv_latent: [B, S, C], in fp8 where the configuration quantises them.
    k_rope: [B, S, R].
    index_keys: [B, S, D] as they are scored, in fp8 likewise; None in a layer
      that is given its selection.
    length: int32 [B], tokens that each row holds, from the first place on.
    overflowed: bool [B], whether a row was given more tokens than fit.
  """

  kv_latent: jax.Array | Blocks
  k_rope: jax.Array
  index_keys: jax.Array | Blocks | None
  length: jax.Array
  overflowed: jax.Array


def init_cache(
  config: DSAConfig,
  batch_size: int,
  max_length: int,
  dtype: Any = jnp.float32,
  *,
  index_keys: bool = True,
) -> Cache:
  """An empty cache for one layer.

  Args:
    config: The sizes, and what is quantised.
    batch_size: B, rows.
    max_length: S, tokens that a row may hold.
    dtype: A float dtype of at least 16 bits; what is stored is rounded to it.
    index_keys: Whether to hold keys for the indexer; a layer that is given its
      selection, `params.indexer` None, needs none.

  Returns:
    The cache, of length zero.

  Raises:
    ValueError: If a size is below 1.
    TypeError: If a size is no integer or `dtype` no such dtype.
  """
  batch_size = check_count("batch_size", batch_size)
  max_length = check_count("max_length", max_length)
  dtype = jax.dtypes.canonicalize_dtype(dtype)
  if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
    raise TypeError(
      f"dtype must be a float dtype of at least 16 bits, got {dtype}"
    )

  def empty(store: Callable[..., Any], width: int) -> Any:
    rows = jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
      (batch_size, max_length, width), dtype
    )
    stored = jax.eval_shape(functools.partial(store, config=config), rows)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), stored)

  return Cache(
    kv_latent=empty(quantization.stored_latents, config.kv_lora_rank),
    k_rope=jnp.zeros((batch_size, max_length, config.qk_rope_head_dim), dtype),
    index_keys=empty(quantization.stored_index_keys, config.index_head_dim)
    if index_keys
    else None,
    length=jnp.zeros(batch_size, jnp.int32),
    overflowed=jnp.zeros(batch_size, bool),
  )


def write_rows(
  buffers: Any, rows: Any, order: jax.Array, stored: jax.Array
) -> Any:
  """Puts rows in their places, those that are to be stored.

  Args:
    buffers: A tree of arrays [B, S, ...].
    rows: The same tree of arrays [B, T, ...].
    order: int32 [B, T], the place of each row.
    stored: bool [B, T], which rows to put there.

  Returns:
    The buffers with the rows.
  """
  batch = jnp.arange(order.shape[0])[:, None]

  def write(buffer: jax.Array, rows: jax.Array) -> jax.Array:
    places = jnp.where(stored, order, buffer.shape[1])
    rows = rows.astype(buffer.dtype)
    return jnp.asarray(buffer).at[batch, places].set(rows, mode="drop")

  written = jax.tree.map(write, buffers, rows)
  # Else a compiler writes once more where the rows are read, and the buffer is
  # copied because it is still needed as it was.
  return jax.lax.optimization_barrier(  # type: ignore[no-untyped-call]
    written
  )


def check_cache(cache: Cache, config: DSAConfig, *, batch_size: int) -> int:
  """Checks that a cache is what a configuration says.

  Args:
    cache: What was passed as a cache.
    config: The sizes, and what is quantised.
    batch_size: B.

  Returns:
    S, the `max_length`.

  Raises:
    TypeError: If it is not a `Cache` of arrays and fp8 blocks where they
      should be.
    ValueError: If a shape differs.
  """
  if not isinstance(cache, Cache):
    raise TypeError(f"cache must be a Cache, got {type(cache).__name__}")
  axes = f"B S {config.qk_rope_head_dim}"
  sizes = check_shape("cache.k_rope", cache.k_rope, axes, B=batch_size)
  check_numbers("cache.k_rope", cache.k_rope)
  _check_stored(cache, "kv_latent", sizes, config.kv_lora_rank, config)
  if cache.index_keys is not None:
    _check_stored(cache, "index_keys", sizes, config.index_head_dim, config)
  check_shape("cache.length", cache.length, "B", B=batch_size)
  check_dtype("cache.length", cache.length, jnp.integer)
  check_shape("cache.overflowed", cache.overflowed, "B", B=batch_size)
  check_dtype("cache.overflowed", cache.overflowed, jnp.bool_)
  return sizes["S"]


# Which field of the configuration says how a buffer is stored.
_STORED_AS = {
  "kv_latent": "kv_quantization",
  "index_keys": "index_quantization",
}


def _check_stored(
  cache: Cache,
  name: str,
  sizes: dict[str, int],
  width: int,
  config: DSAConfig,
) -> None:
  """Checks that a buffer [B, S, width] is stored as the configuration says."""
  stored, field = getattr(cache, name), _STORED_AS[name]
  quantized, name = getattr(config, field), f"cache.{name}"
  if isinstance(stored, Blocks) == (quantized == "none"):
    wanted = "an array" if quantized == "none" else "Blocks"
    raise TypeError(
      f"{name} must be {wanted} where {field} is {quantized!r}, got "
      f"{type(stored).__name__}"
    )
  if not isinstance(stored, Blocks):
    check_shape(name, stored, f"B S {width}", **sizes)
    check_numbers(name, stored)
    return
  count = -(-width // quantization.BLOCK_SIZE)
  check_shape(f"{name}.values", stored.values, f"B S {width}", **sizes)
  check_shape(f"{name}.scales", stored.scales, f"B S {count}", **sizes)
  check_dtype(f"{name}.values", stored.values, quantization.VALUE_DTYPE)
  check_dtype(f"{name}.scales", stored.scales, jnp.float32)
