"""Which keys a query may see, and which of them it selects.

Visible: key s is visible to query t when s is not later than t in token order
and both carry the same segment id, other than 0 (padding).

Selected: the k visible keys with the highest score; equal scores go to the
lower key index, -0.0 equals 0.0, and a NaN is below every number. With fewer
than k visible keys, all of them; never more than k.

The k-th best is found bit by bit on integers that are ordered as the scores
are, so no tie is left to a sort, and every device and chunking selects alike:

    threshold = max { t : |{s : rank[s] >= t}| >= k }
    selected  = {rank > threshold} and the first of {rank == threshold}

Source: DeepSeek-V3.2, arXiv 2512.02556, section 2.1.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dsa.checks import check_count, check_dtype, check_shape

# Ranks below those of the numbers: -inf has rank 0x007FFFFF.
_RANK_HIDDEN = 0
_RANK_NAN = 1


class Selection(NamedTuple):
  """The keys that each query attends to.

  Attributes:
    indices: int32 [B, T, K], ascending key indices, -1 after the last.
  """

  indices: jax.Array

  def mask(self, num_keys: int) -> jax.Array:
    """The selection as a boolean mask.

    Args:
      num_keys: S.

    Returns:
      bool [B, T, S], true at the selected keys; -1 stands for no key.

    Raises:
      ValueError: If `indices` is not of rank 3.
      TypeError: If `indices` are not integers.
    """
    sizes = check_shape("indices", self.indices, "B T K")
    check_dtype("indices", self.indices, jnp.integer)
    indices = self.indices.astype(jnp.int32)
    # -1 would wrap to the last key; S is out of bounds and dropped.
    columns = jnp.where(indices < 0, num_keys, indices)
    empty = jnp.zeros((sizes["B"], sizes["T"], num_keys), bool)
    return jnp.put_along_axis(
      empty, columns, True, axis=-1, inplace=False, mode="drop"
    )


def visible_mask(
  query_segment_ids: jax.Array,
  key_segment_ids: jax.Array,
  *,
  first_query: jax.Array | int = 0,
) -> jax.Array:
  """Which keys each query may see.

  Args:
    query_segment_ids: Integers [B, T], 0 for padding.
    key_segment_ids: Integers [B, S], 0 for padding.
    first_query: Index among the keys of the first query, in token order: a
      number for all rows or [B].

  Returns:
    bool [B, T, S].

  Raises:
    ValueError: If the ids are not of rank 2 with the same B, or `first_query`
      is neither a number nor [B].
    TypeError: If the ids or `first_query` are not integers.
  """
  sizes = check_shape("query_segment_ids", query_segment_ids, "B T")
  check_shape("key_segment_ids", key_segment_ids, "B S", B=sizes["B"])
  check_dtype("query_segment_ids", query_segment_ids, jnp.integer)
  check_dtype("key_segment_ids", key_segment_ids, jnp.integer)
  first_query = jnp.asarray(first_query)
  check_dtype("first_query", first_query, jnp.integer)
  if first_query.ndim:
    check_shape("first_query", first_query, "B", B=sizes["B"])
  query_order = jnp.arange(query_segment_ids.shape[1])
  query_order = first_query[..., None, None] + query_order[:, None]
  not_later = jnp.arange(key_segment_ids.shape[1]) <= query_order
  query_ids = query_segment_ids[:, :, None]
  same_segment = query_ids == key_segment_ids[:, None, :]
  return not_later & same_segment & (query_ids != 0)


def topk_mask(scores: jax.Array, k: int, allowed: jax.Array) -> jax.Array:
  """Marks the k allowed keys with the highest score.

  Args:
    scores: [..., T, S], any float dtype.
    k: How many keys at most, at least 1; may exceed S.
    allowed: bool, broadcastable to the shape of `scores`; no other key is ever
      selected.

  Returns:
    bool [..., T, S] with exactly min(k, allowed keys) marks a row. Equal scores
    go to the lower index; NaNs are marked only where numbers run out.

  Raises:
    ValueError: If k is below 1 or `allowed` does not broadcast to `scores`.
    TypeError: If `scores` are not floats, `allowed` not booleans, k no integer.
  """
  k = _check_topk(scores, k, allowed)
  allowed = jnp.broadcast_to(allowed, scores.shape)
  if k >= scores.shape[-1]:
    return allowed
  ranks = _ranks(scores, allowed)
  threshold = _kth_highest(ranks, k)[..., None]
  above = ranks > threshold
  ties = ranks == threshold
  room = k - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)
  tie_order = jnp.cumsum(ties, axis=-1, dtype=jnp.int32)
  return (above | (ties & (tie_order <= room))) & allowed


def topk_indices(scores: jax.Array, k: int, allowed: jax.Array) -> jax.Array:
  """Lists the k allowed keys with the highest score, in ascending order.

  Args:
    scores: [..., T, S], any float dtype.
    k: How many keys at most, at least 1; may exceed S.
    allowed: bool, broadcastable to the shape of `scores`.

  Returns:
    int32 [..., T, min(k, S)]: the keys that `topk_mask` marks, ascending, -1
    after the last.

  Raises:
    ValueError: If k is below 1 or `allowed` does not broadcast to `scores`.
    TypeError: If `scores` are not floats, `allowed` not booleans, k no integer.
  """
  mask = topk_mask(scores, k, allowed)
  return mask_to_indices(mask, width=min(int(k), scores.shape[-1]))


def mask_to_indices(mask: jax.Array, *, width: int) -> jax.Array:
  """Lists the marked keys of each row.

  Args:
    mask: bool [..., T, S], at most `width` marks a row.
    width: Number of places in a row of the result.

  Returns:
    int32 [..., T, width], ascending, -1 after the last.
  """
  order = jnp.cumsum(mask, axis=-1, dtype=jnp.int32)
  # Place of each marked key in its row; unmarked keys fall out of bounds.
  places = jnp.where(mask, order - 1, width)
  keys = jnp.broadcast_to(
    jnp.arange(mask.shape[-1], dtype=jnp.int32), mask.shape
  )
  return jnp.put_along_axis(
    jnp.full((*mask.shape[:-1], width), -1, jnp.int32),
    places,
    keys,
    axis=-1,
    inplace=False,
    mode="drop",
  )


def _ranks(scores: jax.Array, allowed: jax.Array) -> jax.Array:
  """uint32 in the order of the scores, NaN below numbers, hidden keys last."""
  # On bits alone: where a device flushes subnormals, comparing floats would
  # tie what is not equal.
  bits = jax.lax.bitcast_convert_type(scores.astype(jnp.float32), jnp.uint32)
  magnitude = bits & jnp.uint32(0x7FFFFFFF)
  bits = jnp.where(magnitude == 0, jnp.uint32(0), bits)  # -0.0 equals 0.0
  sign = jnp.uint32(0x80000000)
  ranks = jnp.where(bits & sign, ~bits, bits | sign)
  is_nan = magnitude > jnp.uint32(0x7F800000)
  ranks = jnp.where(is_nan, jnp.uint32(_RANK_NAN), ranks)
  return jnp.where(allowed, ranks, jnp.uint32(_RANK_HIDDEN))


def _kth_highest(ranks: jax.Array, k: int) -> jax.Array:
  """The largest t for which at least k of a row's ranks are t or more."""

  def decide_bit(i: jax.Array, threshold: jax.Array) -> jax.Array:
    # An int, not an array, under jax.disable_jit.
    place = jnp.asarray(i).astype(jnp.uint32)
    raised = threshold | (jnp.uint32(1 << 31) >> place)
    count = jnp.sum(ranks >= raised[..., None], axis=-1, dtype=jnp.int32)
    return jnp.where(count >= k, raised, threshold)

  return jax.lax.fori_loop(
    0, 32, decide_bit, jnp.zeros(ranks.shape[:-1], jnp.uint32)
  )


def _check_topk(scores: jax.Array, k: int, allowed: jax.Array) -> int:
  count = check_count("k", k)
  check_dtype("scores", scores, jnp.floating)
  if scores.dtype.itemsize > 4:
    # Ranks have 32 bits: a wider score would be rounded, and rounding ties.
    raise TypeError(f"scores must be of at most 32 bits, got {scores.dtype}")
  check_dtype("allowed", allowed, jnp.bool_)
  fits = allowed.ndim <= scores.ndim and all(
    size in (1, wanted)
    for size, wanted in zip(
      allowed.shape[::-1], scores.shape[::-1], strict=False
    )
  )
  if scores.ndim < 1 or not fits:
    raise ValueError(
      "allowed must broadcast to scores [..., T, S], got allowed "
      f"{allowed.shape} and scores {scores.shape}"
    )
  return count
