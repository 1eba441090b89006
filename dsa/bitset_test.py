"""Tests of sets of keys as bits."""

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from dsa import bitset


def _random_mask(share, shape=(5, 4, 96), seed=0):
  return np.random.default_rng(seed).random(shape) < share


class BitsetTest(parameterized.TestCase):
  @parameterized.parameters(0.0, 0.03, 0.5, 1.0)
  def test_unpack_is_the_inverse_of_pack(self, share):
    mask = _random_mask(share)
    words = bitset.pack(jnp.asarray(mask))
    self.assertEqual(words.shape, (5, 4, 3))
    np.testing.assert_array_equal(bitset.unpack(words), mask)

  def test_key_33_is_bit_1_of_word_1(self):
    mask = np.zeros(64, bool)
    mask[33] = True
    np.testing.assert_array_equal(bitset.pack(jnp.asarray(mask)), [0, 2])

  @parameterized.parameters(0.0, 0.03, 0.5, 1.0)
  def test_size_counts_the_members_of_each_word(self, share):
    mask = _random_mask(share)
    sizes = bitset.size(bitset.pack(jnp.asarray(mask)))
    wanted = mask.reshape(5, 4, 3, 32).sum(axis=-1)
    np.testing.assert_array_equal(sizes, wanted)

  @parameterized.product(share=(0.0, 0.03, 0.5, 1.0), width=(1, 7, 32, 96))
  def test_members_are_ascending_with_minus_one_after_the_last(
    self, share, width
  ):
    mask = _random_mask(share)
    listed = bitset.members(bitset.pack(jnp.asarray(mask)), width=width)
    for row, keys in zip(
      mask.reshape(-1, 96), np.asarray(listed).reshape(-1, width), strict=True
    ):
      wanted = np.full(width, -1)
      lowest = np.flatnonzero(row)[:width]
      wanted[: lowest.size] = lowest
      np.testing.assert_array_equal(keys, wanted)

  @parameterized.product(
    share=(0.0, 0.03, 0.5, 1.0), count=(0, 1, 31, 32, 33, 95, 96)
  )
  def test_keep_lowest_keeps_the_first_members(self, share, count):
    mask = _random_mask(share)
    counts = jnp.full(mask.shape[:-1], count, jnp.int32)
    kept = bitset.keep_lowest(bitset.pack(jnp.asarray(mask)), counts)
    wanted = mask & (np.cumsum(mask, axis=-1) <= count)
    np.testing.assert_array_equal(bitset.unpack(kept), wanted)


if __name__ == "__main__":
  absltest.main()
