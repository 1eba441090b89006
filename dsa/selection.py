"""Which keys a query may see, and which of them it selects.

Visible: key s is visible to query t when s is not later than t in token order
and both carry the same segment id, other than 0 (padding).

Selected: the k visible keys with the highest score; equal scores go to the
lower key index, -0.0 equals 0.0, and a NaN is below every number. With fewer
than k visible keys, all of them; never more than k.

A threshold is searched for by halving, on integers that are ordered as the
scores are: no tie is left to a sort, so all devices and chunkings select alike.

    threshold = a t with |{s : rank[s] >= t}| = k, or else the largest with >= k
    selected  = {rank > threshold} and the first of {rank == threshold}

Source: DeepSeek-V3.2, arXiv 2512.02556, section 2.1.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dsa import bitset
from dsa.checks import check_count, check_dtype, check_shape

# Ranks of float32 bits: numbers lie from -inf, 0x007FFFFF, through zero upward.
_RANK_HIDDEN = np.uint32(0)
_RANK_NAN = np.uint32(1)
_RANK_ZERO = np.uint32(0x80000000)
_RANK_LAST = np.uint32(0xFFFFFFFF)


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
    check_shape("indices", self.indices, "B T K")
    check_dtype("indices", self.indices, jnp.integer)
    indices = self.indices.astype(jnp.int32)
    # -1 would wrap to the last key; S is out of bounds and dropped.
    columns = jnp.where(indices < 0, num_keys, indices)

    def mark(columns: jax.Array) -> jax.Array:
      return jnp.zeros(num_keys, bool).at[columns].set(True, mode="drop")

    # By row, so that rows may be spread over devices.
    return jax.vmap(jax.vmap(mark))(columns)


def check_selection(selection: Selection, **sizes: int) -> dict[str, int]:
  """Checks what was passed as a selection.

  Args:
    selection: The selected keys.
    **sizes: Known sizes of B, T and K.

  Returns:
    `sizes` with those of the selection added.

  Raises:
    TypeError: If it is not a `Selection` of int32.
    ValueError: If a size differs.
  """
  if not isinstance(selection, Selection):
    raise TypeError(
      f"selection must be a Selection, got {type(selection).__name__}"
    )
  indices = selection.indices
  sizes = check_shape("selection.indices", indices, "B T K", **sizes)
  # Unsigned integers have no -1, and S does not fit into fewer bits.
  check_dtype("selection.indices", indices, jnp.int32)
  return sizes


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
  num_keys = scores.shape[-1]
  if k >= num_keys:
    return jnp.broadcast_to(allowed, scores.shape)
  return bitset.unpack(_topk_set(scores, k, allowed))[..., :num_keys]


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
  k = _check_topk(scores, k, allowed)
  width = min(k, scores.shape[-1])
  return bitset.members(_topk_set(scores, k, allowed), width=width)


def _topk_set(scores: jax.Array, k: int, allowed: jax.Array) -> jax.Array:
  """The selected keys as a `bitset`, uint32 [..., T, ceil(S / 32)]."""
  allowed = jnp.broadcast_to(allowed, scores.shape)
  fill = [(0, 0)] * (scores.ndim - 1)
  fill.append((0, -scores.shape[-1] % bitset.WORD_BITS))
  if k >= scores.shape[-1]:
    return bitset.pack(jnp.pad(allowed, fill))
  ranks = jnp.pad(_ranks(scores, allowed), fill, constant_values=_RANK_HIDDEN)
  threshold = _threshold(ranks, k)[..., None]
  above = bitset.pack(ranks > threshold)
  ties = bitset.pack(ranks == threshold)
  room = k - jnp.sum(bitset.size(above), axis=-1)
  return above | bitset.keep_lowest(ties, room)


def _ranks(scores: jax.Array, allowed: jax.Array) -> jax.Array:
  """uint32 in the order of the scores, NaN below numbers, hidden keys last."""
  # On bits alone: where a device flushes subnormals, comparing floats would
  # tie what is not equal.
  bits = jax.lax.bitcast_convert_type(scores.astype(jnp.float32), jnp.uint32)
  magnitude = bits & jnp.uint32(0x7FFFFFFF)
  bits = jnp.where(magnitude == 0, jnp.uint32(0), bits)  # -0.0 equals 0.0
  ranks = _rank(jax.lax.bitcast_convert_type(bits, jnp.float32))
  is_nan = magnitude > jnp.uint32(0x7F800000)
  ranks = jnp.where(is_nan, _RANK_NAN, ranks)
  return jnp.where(allowed, ranks, _RANK_HIDDEN)


class _Bracket(NamedTuple):
  """A row's search: at least k ranks lie from `low` on, fewer from `high` on.

  Attributes:
    low: uint32 [...].
    high: uint32 [...].
    total: int32 [...], how many ranks lie from `low` on.
  """

  low: jax.Array
  high: jax.Array
  total: jax.Array


def _threshold(ranks: jax.Array, k: int) -> jax.Array:
  """The module docstring's threshold of each row, never `_RANK_HIDDEN`."""

  def narrow(bracket: _Bracket, probe: jax.Array) -> _Bracket:
    members = bitset.pack(ranks >= probe[..., None])
    count = jnp.sum(bitset.size(members), axis=-1)
    inside = (bracket.low < probe) & (probe < bracket.high)
    raise_low = inside & (count >= k)
    return _Bracket(
      low=jnp.where(raise_low, probe, bracket.low),
      high=jnp.where(inside & (count < k), probe, bracket.high),
      total=jnp.where(raise_low, count, bracket.total),
    )

  def is_open(bracket: _Bracket) -> jax.Array:
    return (bracket.total > k) & (bracket.high - bracket.low > 1)

  def halve(state: tuple[jax.Array, _Bracket]) -> tuple[jax.Array, _Bracket]:
    step, bracket = state
    low, high = bracket.low, bracket.high
    middle = low + (high - low) // 2
    # Halving the values takes fewer steps than halving the ranks, where scores
    # spread over many exponents; every third step bounds the rest.
    value = 0.5 * _value(low) + 0.5 * _value(high)
    by_value = jnp.isfinite(value) & (step % 3 != 2)
    probe = jnp.where(by_value, _rank(value), middle)
    probe = jnp.clip(probe, low + 1, high - 1)
    return step + 1, narrow(bracket, jnp.where(is_open(bracket), probe, low))

  rows = jnp.zeros_like(ranks[..., 0])  # Spread over devices as the ranks are.
  seen = bitset.pack(ranks > _RANK_HIDDEN)
  bracket = _Bracket(
    low=rows + _RANK_NAN,
    high=jnp.max(ranks, axis=-1) + 1,
    total=jnp.sum(bitset.size(seen), axis=-1),
  )
  numbers = jnp.where(ranks <= _RANK_NAN, _RANK_LAST, ranks)
  zero = rows + _RANK_ZERO
  # ReLU makes plateaus of exact zeros, which halving would take long to reach.
  for probe in (jnp.min(numbers, axis=-1), zero, zero + 1):
    bracket = narrow(bracket, probe)
  _, bracket = jax.lax.while_loop(
    lambda state: jnp.any(is_open(state[1])), halve, (jnp.int32(0), bracket)
  )
  return bracket.low


def _rank(value: jax.Array) -> jax.Array:
  """uint32 in the order of float32 numbers."""
  bits = jax.lax.bitcast_convert_type(value, jnp.uint32)
  negative = bits >= _RANK_ZERO
  return jnp.where(negative, ~bits, bits | _RANK_ZERO)


def _value(rank: jax.Array) -> jax.Array:
  """The inverse of `_rank`."""
  positive = rank >= _RANK_ZERO
  bits = jnp.where(positive, rank ^ _RANK_ZERO, ~rank)
  return jax.lax.bitcast_convert_type(bits, jnp.float32)


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
