"""Softmax over marked entries: what is unmarked is as if it were not there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from dsa.softmax import masked_log_softmax, masked_softmax
from testing import oracle, tolerances


def _case(seed, shape=(4, 6, 17)):
  """Logits and a mask in which row [0, 0] has no mark."""
  rng = np.random.default_rng(seed)
  logits = (3 * rng.normal(size=shape)).astype(np.float32)
  mask = rng.random(shape) < 0.4
  mask[0, 0] = False
  return logits, mask


def _wanted(logits, mask):
  wanted = np.zeros(logits.shape)
  for row in np.ndindex(logits.shape[:-1]):
    if mask[row].any():
      marked = np.asarray(logits[row], np.float64)[mask[row]]
      wanted[row][mask[row]] = oracle.softmax(marked)
  return wanted


def _gradient(softmax, logits, mask, cotangent):
  function = functools.partial(softmax, mask=mask)
  cotangent = jnp.asarray(cotangent, jnp.float32)
  return jax.vjp(function, jnp.asarray(logits))[1](cotangent)[0]


class MaskedSoftmaxTest(parameterized.TestCase):
  @parameterized.parameters("float32", "bfloat16")
  def test_matches_the_oracle_over_the_marked(self, dtype):
    logits, mask = _case(0)
    logits = jnp.asarray(logits, dtype)
    probs = masked_softmax(logits, mask)
    self.assertEqual(probs.dtype, jnp.float32)
    tolerances.assert_output_close(probs, _wanted(logits, mask), "float32")

  def test_unmarked_is_exactly_zero(self):
    logits, mask = _case(1)
    probs = masked_softmax(logits, mask)
    np.testing.assert_array_equal(probs[~mask], 0)

  def test_no_mark_is_all_zeros(self):
    logits = jnp.array([[1.0, -jnp.inf, jnp.nan]])
    probs = masked_softmax(logits, jnp.zeros((1, 3), bool))
    np.testing.assert_array_equal(probs, 0)

  @parameterized.parameters(np.nan, np.inf, -np.inf, 3e38)
  def test_unmarked_values_change_no_bit(self, value):
    logits, mask = _case(2)
    np.testing.assert_array_equal(
      masked_softmax(np.where(mask, logits, value), mask),
      masked_softmax(logits, mask),
    )

  @parameterized.parameters(np.nan, np.inf)
  def test_marked_poison_stays_in_its_row(self, value):
    logits, mask = _case(3)
    mask[1, 2, :2] = True, False
    poisoned = logits.copy()
    poisoned[1, 2, 0] = value
    probs = np.array(masked_softmax(poisoned, mask))
    self.assertTrue(np.isnan(probs[1, 2, 0]))
    probs[1, 2] = masked_softmax(logits, mask)[1, 2]
    np.testing.assert_array_equal(probs, masked_softmax(logits, mask))

  @parameterized.parameters(np.nan, np.inf)
  def test_marked_poison_leaves_the_unmarked_zero(self, value):
    probs = masked_softmax(
      jnp.array([value, 1.0, 2.0]), jnp.array([True, True, False])
    )
    self.assertEqual(probs[2], 0)

  @parameterized.parameters(1e30, -1e30)
  def test_large_logits_do_not_overflow(self, offset):
    probs = masked_softmax(
      jnp.array([offset, offset, 0.0]), jnp.array([True, True, False])
    )
    np.testing.assert_array_equal(probs, [0.5, 0.5, 0.0])

  def test_mask_broadcasts(self):
    logits, mask = _case(4)
    whole = jnp.broadcast_to(mask[:1], mask.shape)
    np.testing.assert_array_equal(
      masked_softmax(logits, mask[:1]), masked_softmax(logits, whole)
    )

  def test_another_axis_gives_the_same(self):
    logits, mask = _case(5)
    swapped = masked_softmax(
      jnp.swapaxes(logits, 1, 2), jnp.swapaxes(mask, 1, 2), axis=1
    )
    wanted = masked_softmax(logits, mask)
    np.testing.assert_allclose(jnp.swapaxes(swapped, 1, 2), wanted, atol=1e-6)

  def test_no_entries_at_all(self):
    probs = masked_softmax(jnp.zeros((2, 0)), jnp.zeros((2, 0), bool))
    self.assertEqual(probs.shape, (2, 0))

  def test_gradient_matches_the_oracle(self):
    logits, mask = _case(5)
    cotangent = np.random.default_rng(6).normal(size=logits.shape)
    actual = _gradient(masked_softmax, logits, mask, cotangent)
    probs = _wanted(logits, mask)
    inner = np.sum(probs * cotangent, axis=-1, keepdims=True)
    tolerances.assert_close_by_norm(
      actual, probs * (cotangent - inner), tolerances.GRADIENT["float32"]
    )


class MaskedLogSoftmaxTest(parameterized.TestCase):
  @parameterized.parameters("float32", "bfloat16")
  def test_matches_the_oracle_over_the_marked(self, dtype):
    logits, mask = _case(9)
    logits = jnp.asarray(logits, dtype)
    actual = masked_log_softmax(logits, mask)
    self.assertEqual(actual.dtype, jnp.float32)
    wanted = np.log(np.where(mask, _wanted(logits, mask), 1))
    tolerances.assert_output_close(actual, wanted, "float32")

  def test_stays_finite_where_the_softmax_is_zero(self):
    actual = masked_log_softmax(
      jnp.array([[0.0, -1e4, 7.0]]), jnp.array([[True, True, False]])
    )
    np.testing.assert_array_equal(actual, [[0.0, -1e4, 0.0]])

  def test_no_mark_is_all_zeros(self):
    logits = jnp.array([[1.0, -jnp.inf, jnp.nan]])
    actual = masked_log_softmax(logits, jnp.zeros((1, 3), bool))
    np.testing.assert_array_equal(actual, 0)

  @parameterized.parameters(np.nan, np.inf, -np.inf, 3e38)
  def test_unmarked_values_change_no_bit(self, value):
    logits, mask = _case(10)
    np.testing.assert_array_equal(
      masked_log_softmax(np.where(mask, logits, value), mask),
      masked_log_softmax(logits, mask),
    )

  def test_gradient_matches_the_oracle(self):
    logits, mask = _case(11)
    cotangent = np.random.default_rng(12).normal(size=logits.shape)
    actual = _gradient(masked_log_softmax, logits, mask, cotangent)
    cotangent = np.where(mask, cotangent, 0)
    total = np.sum(cotangent, axis=-1, keepdims=True)
    tolerances.assert_close_by_norm(
      actual,
      cotangent - _wanted(logits, mask) * total,
      tolerances.GRADIENT["float32"],
    )


class PoisonTest(parameterized.TestCase):
  @parameterized.product(
    softmax=(masked_softmax, masked_log_softmax),
    value=(np.nan, np.inf, -np.inf),
  )
  def test_unmarked_values_get_no_gradient(self, softmax, value):
    logits, mask = _case(7)
    gradient = _gradient(
      softmax, np.where(mask, logits, value), mask, np.ones_like(logits)
    )
    np.testing.assert_array_equal(gradient[~mask], 0)
    self.assertTrue(np.isfinite(gradient).all())

  @parameterized.parameters(masked_softmax, masked_log_softmax)
  def test_gradient_passes_where_nan_is_an_error(self, softmax):
    logits, mask = _case(8)
    with jax.debug_nans(True):
      _gradient(softmax, logits, mask, np.ones_like(logits))


if __name__ == "__main__":
  absltest.main()
