"""Tokens as queries and as keys of a DSA layer, and which see which.

Everything of size T, made before any chunk of queries is taken.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dsa import indexer as indexer_lib
from dsa import mla
from dsa import selection as selection_lib
from dsa.checks import check_dtype, check_shape
from dsa.config import DSAConfig
from dsa.params import IndexerParams, MLAParams
from dsa.selection import Selection


class Tokens(NamedTuple):
  """What is known of each token: x [B, T, E], the others integers [B, T]."""

  x: jax.Array
  positions: jax.Array
  segment_ids: jax.Array
  order: jax.Array


class Keys(NamedTuple):
  """What queries need of each key: O(S), computed once.

  Attributes:
    kv_latent: [B, S, C].
    k_rope: [B, S, R].
    index_keys: [B, S, D], or None where no loss is asked for.
    segment_ids: Integers [B, S].
  """

  kv_latent: jax.Array
  k_rope: jax.Array
  index_keys: jax.Array | None
  segment_ids: jax.Array


def check_tokens(
  x: jax.Array,
  positions: jax.Array | None,
  segment_ids: jax.Array | None,
  config: DSAConfig,
) -> dict[str, int]:
  """Checks shapes and dtypes of what was passed of tokens.

  Args:
    x: Hidden states [B, T, E].
    positions: Integers [B, T], or None.
    segment_ids: Integers [B, T], or None.
    config: The sizes.

  Returns:
    The sizes by letter: B, T and E.

  Raises:
    ValueError: If a shape differs.
    TypeError: If a dtype is not of its kind.
  """
  sizes = check_shape("x", x, "B T E", E=config.hidden_size)
  check_dtype("x", x, jnp.floating)
  for name, array in (("positions", positions), ("segment_ids", segment_ids)):
    if array is not None:
      check_shape(name, array, "B T", B=sizes["B"], T=sizes["T"])
      check_dtype(name, array, jnp.integer)
  return sizes


def make_tokens(
  x: jax.Array,
  positions: jax.Array | None,
  segment_ids: jax.Array | None,
  config: DSAConfig,
  *,
  order: jax.Array | None = None,
) -> Tokens:
  """Checks what was passed of tokens and fills in the defaults.

  Args:
    x: Hidden states [B, T, E]; zeroed at padding.
    positions: Integers [B, T], or None for the order.
    segment_ids: Integers [B, T], or None for one segment.
    config: The sizes.
    order: int32 [T], each token's index among the keys, or None for 0..T-1.

  Returns:
    The tokens.

  Raises:
    ValueError: If a shape differs or x holds no token.
    TypeError: If a dtype is not of its kind.
  """
  sizes = check_tokens(x, positions, segment_ids, config)
  if 0 in x.shape:
    raise ValueError(f"x must hold at least one token, got shape {x.shape}")
  if order is None:
    order = jnp.arange(sizes["T"], dtype=jnp.int32)
  # Made from x, to be spread over devices as x is.
  order = jnp.zeros_like(x[..., 0], jnp.int32) + order
  if positions is None:
    positions = order
  if segment_ids is None:
    segment_ids = jnp.ones_like(order)
  # What lies in padding, NaN included, must not reach a weight's gradient.
  x = jnp.where(segment_ids[..., None] == 0, 0, x)
  return Tokens(x, positions, segment_ids, order)


def make_keys(
  params: MLAParams[jax.Array],
  indexer: IndexerParams[jax.Array] | None,
  tokens: Tokens,
  config: DSAConfig,
) -> Keys:
  """What queries need of each token.

  Args:
    params: Weights of the attention.
    indexer: Weights of the indexer, or None where no loss is asked for.
    tokens: The tokens [B, S].
    config: The sizes.

  Returns:
    The keys.
  """
  x, positions = tokens.x, tokens.positions
  kv_latent, k_rope = mla.kv_latents(params, x, positions, config)
  index_keys = None
  if indexer is not None:
    index_keys = indexer_lib.index_keys(indexer, x, positions, config)
  return Keys(kv_latent, k_rope, index_keys, tokens.segment_ids)


def _visible(tokens: Tokens, key_segment_ids: jax.Array) -> jax.Array:
  """bool [B, T, S]: which keys a chunk's queries may see."""
  return selection_lib.visible_mask(
    tokens.segment_ids, key_segment_ids, first_query=tokens.order[:, 0]
  )


def all_visible(tokens: Tokens, key_segment_ids: jax.Array) -> Selection:
  """Every visible key selected, each at the place of its own index.

  Args:
    tokens: Queries [B, T] that follow one another.
    key_segment_ids: Integers [B, S].

  Returns:
    The selection, of indices [B, T, S].
  """
  keys = jnp.arange(key_segment_ids.shape[1], dtype=jnp.int32)
  return Selection(jnp.where(_visible(tokens, key_segment_ids), keys, -1))


def visible_part(
  selection: Selection, tokens: Tokens, key_segment_ids: jax.Array
) -> Selection:
  """A given selection without what its queries may not see.

  Args:
    selection: Of keys [B, T, K].
    tokens: The queries [B, T].
    key_segment_ids: Integers [B, S].

  Returns:
    The selection, -1 in place of what was left out.

  Raises:
    TypeError: If it is not a `Selection` of int32.
    ValueError: If a size differs.
  """
  batch, queries = tokens.order.shape
  selection_lib.check_selection(selection, B=batch, T=queries)
  indices = selection.indices
  key_ids = jax.vmap(lambda ids, i: ids[i])(
    key_segment_ids, jnp.clip(indices, 0, key_segment_ids.shape[1] - 1)
  )
  query_ids = tokens.segment_ids[..., None]
  visible = (indices <= tokens.order[..., None]) & (key_ids == query_ids)
  return Selection(jnp.where(visible & (query_ids != 0), indices, -1))
