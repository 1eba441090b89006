"""Tokens that are not finite are cut out, and their answers are put back."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from dsa.backends import masking
from dsa.conformance_cases import random_case
from dsa.selection import Selection

_BY_QUERY = ("q_nope", "q_rope")
_BY_KEY = ("kv_latent", "k_rope")


def _selection(*rows):
  """One batch row, whose queries select these keys."""
  return Selection(jnp.asarray([rows], jnp.int32))


class IsolateNonfiniteTest(parameterized.TestCase):
  def test_finite_inputs_are_unchanged(self):
    inputs, selection, _ = random_case(0).arguments()
    clean, poisoned = masking.isolate_nonfinite(inputs, selection)
    jax.tree.map(np.testing.assert_array_equal, clean, inputs)
    self.assertFalse(poisoned.any())

  @parameterized.product(
    name=_BY_QUERY + _BY_KEY, value=(np.nan, np.inf, -np.inf)
  )
  def test_the_whole_token_is_zeroed_and_no_other(self, name, value):
    case = random_case(1)
    poisoned_case = case.fill(value, name, at=(0, 3, ..., 1))
    inputs, selection, _ = poisoned_case.arguments()
    clean, _ = masking.isolate_nonfinite(inputs, selection)
    token = _BY_QUERY if name in _BY_QUERY else _BY_KEY
    wanted = case.fill(0, *token, at=(0, 3)).inputs
    jax.tree.map(np.testing.assert_array_equal, clean, wanted)

  @parameterized.parameters(*_BY_KEY)
  def test_queries_of_a_bad_key_are_poisoned(self, name):
    inputs, _, _ = random_case(2, B=1, T=4, S=5).arguments()
    array = getattr(inputs, name)
    inputs = inputs._replace(**{name: array.at[0, [0, 4], 1].set(jnp.nan)})
    selection = _selection([1, 4], [1, 3], [2, -1], [-1, -1])
    _, poisoned = masking.isolate_nonfinite(inputs, selection)
    np.testing.assert_array_equal(poisoned, [[True, False, False, False]])

  @parameterized.parameters(*_BY_QUERY)
  def test_a_bad_query_is_poisoned_alone(self, name):
    inputs, selection, _ = (
      random_case(3).fill(np.nan, name, at=(0, 2, 1)).arguments()
    )
    _, poisoned = masking.isolate_nonfinite(inputs, selection)
    self.assertEqual(np.argwhere(poisoned).tolist(), [[0, 2]])


class SkipNonfiniteTest(parameterized.TestCase):
  @parameterized.product(
    name=_BY_KEY, value=(np.nan, np.inf, -np.inf), num_keys=(6, 50)
  )
  def test_bad_keys_are_not_selected(self, name, value, num_keys):
    # Fewer keys than are selected, and more: the rows checked differ.
    inputs, _, _ = random_case(5, B=1, T=4, S=num_keys).arguments()
    array = getattr(inputs, name)
    bad = inputs._replace(**{name: array.at[0, [0, 4], 1].set(value)})
    selection = _selection([0, 1, 4], [1, 3, -1], [2, 4, -1], [-1, -1, -1])
    same, finite, poisoned = masking.skip_nonfinite(bad, selection)
    jax.tree.map(np.testing.assert_array_equal, same, bad)
    np.testing.assert_array_equal(
      finite.indices[0],
      [[-1, 1, -1], [1, 3, -1], [2, -1, -1], [-1, -1, -1]],
    )
    np.testing.assert_array_equal(poisoned, [[True, False, True, False]])

  @parameterized.parameters(*_BY_QUERY)
  def test_a_bad_query_is_zeroed_and_poisoned_alone(self, name):
    case = random_case(6)
    inputs, selection, _ = case.fill(np.nan, name, at=(0, 2, 1)).arguments()
    clean, finite, poisoned = masking.skip_nonfinite(inputs, selection)
    wanted = case.fill(0, *_BY_QUERY, at=(0, 2)).inputs
    jax.tree.map(np.testing.assert_array_equal, clean, wanted)
    np.testing.assert_array_equal(finite.indices, selection.indices)
    self.assertEqual(np.argwhere(poisoned).tolist(), [[0, 2]])


class FinishTest(parameterized.TestCase):
  def test_zero_for_the_empty_and_nan_for_the_poisoned(self):
    out = jnp.full((1, 4, 2, 3), 7.0)
    selection = _selection([0, 1], [-1, -1], [0, -1], [-1, -1])
    poisoned = jnp.asarray([[False, False, True, True]])
    finished = masking.finish(out, selection, poisoned)
    np.testing.assert_array_equal(
      finished[0, :, 0, 0], np.array([7.0, 0.0, np.nan, 0.0])
    )

  def test_replaced_rows_pass_no_gradient_whatever_comes(self):
    selection = _selection([0], [-1], [0])
    poisoned = jnp.asarray([[False, False, True]])

    def finish(out):
      return masking.finish(out, selection, poisoned)

    _, pullback = jax.vjp(finish, jnp.full((1, 3, 1, 1), jnp.nan))
    (gradient,) = pullback(
      jnp.asarray([2.0, jnp.nan, jnp.nan])[None, :, None, None]
    )
    np.testing.assert_array_equal(gradient.ravel(), [2.0, 0.0, 0.0])

  def test_no_nan_is_made_where_nothing_is_poisoned(self):
    with jax.debug_nans(True):
      inputs, selection, cotangent = random_case(4).arguments()
      clean, poisoned = masking.isolate_nonfinite(inputs, selection)
      masking.finish(cotangent, selection, poisoned).block_until_ready()
      jax.tree.map(jax.block_until_ready, clean)


if __name__ == "__main__":
  absltest.main()
