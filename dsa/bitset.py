"""Sets of keys as bits, 32 to a word.

Key s is bit s % 32 of word s // 32. A set of S keys then takes S / 8 bytes, and
its members are listed by counting bits instead of by moving keys: the word of
the j-th member is found in the running count of bits, its place in the word by
halving.
"""

import einops
import jax
import jax.numpy as jnp

WORD_BITS = 32


def pack(members: jax.Array) -> jax.Array:
  """Packs a boolean mask.

  Args:
    members: bool [..., S], S a multiple of 32.

  Returns:
    uint32 [..., S / 32].
  """
  bits = einops.rearrange(members, "... (w b) -> ... w b", b=WORD_BITS)
  place = jnp.arange(WORD_BITS, dtype=jnp.uint32)
  return jnp.sum(bits.astype(jnp.uint32) << place, axis=-1, dtype=jnp.uint32)


def unpack(words: jax.Array) -> jax.Array:
  """The inverse of `pack`.

  Args:
    words: uint32 [..., W].

  Returns:
    bool [..., 32 W].
  """
  place = jnp.arange(WORD_BITS, dtype=jnp.uint32)
  bits = (words[..., None] >> place) & 1
  return einops.rearrange(bits != 0, "... w b -> ... (w b)")


def size(words: jax.Array) -> jax.Array:
  """How many members each word holds, int32 in the shape of `words`."""
  return jax.lax.population_count(words).astype(jnp.int32)


def keep_lowest(words: jax.Array, count: jax.Array) -> jax.Array:
  """The `count` lowest members of each set.

  Args:
    words: uint32 [..., W].
    count: int32 [...].

  Returns:
    uint32 [..., W].
  """
  sizes = size(words)
  before = jnp.cumsum(sizes, axis=-1, dtype=jnp.int32) - sizes
  wanted = count[..., None] - before
  end = jnp.minimum(_place_of(words, jnp.maximum(wanted, 0)), 31)
  low = (jnp.uint32(1) << end.astype(jnp.uint32)) - 1
  return jnp.where(wanted >= sizes, words, words & low)


def members(words: jax.Array, *, width: int) -> jax.Array:
  """Lists the members of each set.

  Args:
    words: uint32 [..., W].
    width: Places in a row of the result.

  Returns:
    int32 [..., width], the lowest members in ascending order, -1 after the
    last.
  """
  sizes = size(words)
  upto = jnp.cumsum(sizes, axis=-1, dtype=jnp.int32)
  order = jnp.arange(width, dtype=jnp.int32)
  flat = einops.rearrange(upto, "... w -> (...) w")
  word = jax.vmap(lambda row: jnp.searchsorted(row, order, side="right"))(flat)
  word = word.reshape(*upto.shape[:-1], width).astype(jnp.int32)
  inside = jnp.minimum(word, words.shape[-1] - 1)
  before = jnp.take_along_axis(upto - sizes, inside, axis=-1)
  place = _place_of(jnp.take_along_axis(words, inside, axis=-1), order - before)
  return jnp.where(order < upto[..., -1:], inside * WORD_BITS + place, -1)


def _place_of(words: jax.Array, rank: jax.Array) -> jax.Array:
  """Place of the set bit that has `rank` set bits below it, int32."""
  place = jnp.zeros_like(rank)
  for half in (16, 8, 4, 2, 1):
    low = words & jnp.uint32((1 << half) - 1)
    count = size(low)
    in_high = rank >= count
    rank = jnp.where(in_high, rank - count, rank)
    words = jnp.where(in_high, words >> half, low)
    place = jnp.where(in_high, place + half, place)
  return place
