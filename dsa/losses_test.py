"""Tests of the indexer's loss."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from dsa import losses
from testing import goldens, oracle_loss

_STAGES = {"dense": "visible", "sparse": "selected"}


def _golden(stage):
  arrays = goldens.load("indexer_kl_100").arrays
  mask = np.asarray(arrays[_STAGES[stage]])
  valid = np.asarray(arrays["segment_ids"]) != 0
  return arrays, mask, valid


class GoldenTest(parameterized.TestCase):
  @parameterized.parameters(*_STAGES)
  def test_loss_is_the_golden_one(self, stage):
    arrays, mask, valid = _golden(stage)
    loss = losses.indexer_kl_loss(
      jnp.asarray(arrays["index_scores"], jnp.float32),
      jnp.asarray(arrays[f"{stage}/p"], jnp.float32),
      jnp.asarray(mask),
      valid=jnp.asarray(valid),
    )
    self.assertLess(abs(float(loss) - float(arrays[f"{stage}/loss"])), 1e-6)

  @parameterized.parameters(*_STAGES)
  def test_divergence_of_each_query_is_the_golden_one(self, stage):
    arrays, mask, valid = _golden(stage)
    divergences = losses.indexer_kl(
      jnp.asarray(arrays["index_scores"], jnp.float32),
      jnp.asarray(arrays[f"{stage}/p"], jnp.float32),
      jnp.asarray(mask),
    )
    np.testing.assert_allclose(
      divergences[valid], arrays[f"{stage}/kl"][valid], atol=2e-6
    )

  @parameterized.parameters(*_STAGES)
  def test_gradient_is_the_golden_one(self, stage):
    arrays, mask, valid = _golden(stage)
    grad = jax.grad(losses.indexer_kl_loss)(
      jnp.asarray(arrays["index_scores"], jnp.float32),
      jnp.asarray(arrays[f"{stage}/p"], jnp.float32),
      jnp.asarray(mask),
      valid=jnp.asarray(valid),
    )
    wanted = arrays[f"{stage}/grad_index_scores"]
    error = np.linalg.norm(grad - wanted) / np.linalg.norm(wanted)
    self.assertLess(error, 1e-5)


class IndexerLossTest(parameterized.TestCase):
  def _case(self, seed=0):
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal((2, 5, 7))
    mask = rng.random((2, 5, 7)) < 0.6
    mask[0, 0] = False
    probs = oracle_loss.masked_softmax(rng.standard_normal((2, 5, 7)), mask)
    float32 = jnp.float32
    return (
      jnp.asarray(scores, float32),
      jnp.asarray(probs, float32),
      jnp.asarray(mask),
    )

  def test_loss_is_the_oracles(self):
    scores, probs, mask = self._case()
    valid = np.any(np.asarray(mask), axis=-1)
    wanted = oracle_loss.indexer_kl_loss(
      np.asarray(scores), np.asarray(probs), np.asarray(mask), valid=valid
    )
    loss = losses.indexer_kl_loss(scores, probs, mask)
    np.testing.assert_allclose(loss, wanted, atol=1e-6)

  def test_gradient_is_softmax_minus_p_over_the_valid_queries(self):
    scores, probs, mask = self._case()
    grad = jax.grad(losses.indexer_kl_loss)(scores, probs, mask)
    softmax = oracle_loss.masked_softmax(np.asarray(scores), np.asarray(mask))
    count = np.sum(np.any(np.asarray(mask), axis=-1))
    np.testing.assert_allclose(
      grad, (softmax - np.asarray(probs)) / count, atol=1e-6
    )

  def test_target_probabilities_get_no_gradient(self):
    scores, probs, mask = self._case()
    grad = jax.grad(losses.indexer_kl_loss, argnums=1)(scores, probs, mask)
    np.testing.assert_array_equal(grad, 0)

  def test_equal_distributions_have_no_divergence(self):
    scores, _, mask = self._case()
    probs = oracle_loss.masked_softmax(np.asarray(scores), np.asarray(mask))
    loss = losses.indexer_kl_loss(scores, jnp.asarray(probs, jnp.float32), mask)
    self.assertLess(abs(float(loss)), 1e-6)

  def test_unmarked_nan_reaches_neither_loss_nor_gradient(self):
    scores, probs, mask = self._case()
    scores = jnp.where(mask, scores, jnp.nan)
    with jax.debug_nans(False):
      loss, grad = jax.value_and_grad(losses.indexer_kl_loss)(
        scores, probs, mask
      )
    self.assertTrue(jnp.isfinite(loss))
    np.testing.assert_array_equal(grad[~mask], 0)

  def test_zero_probability_costs_nothing(self):
    scores = jnp.zeros((1, 1, 2))
    probs = jnp.array([[[1.0, 0.0]]])
    loss = losses.indexer_kl_loss(scores, probs, jnp.ones((1, 1, 2), bool))
    np.testing.assert_allclose(loss, np.log(2), rtol=1e-6)

  def test_padding_does_not_count(self):
    scores, probs, mask = self._case()
    divergences = losses.indexer_kl(scores, probs, mask)
    valid = jnp.zeros(mask.shape[:2], bool).at[1, 2:4].set(True)
    loss = losses.indexer_kl_loss(scores, probs, mask, valid=valid)
    np.testing.assert_allclose(loss, jnp.mean(divergences[1, 2:4]), rtol=1e-6)

  def test_no_valid_query_has_no_loss(self):
    scores, probs, mask = self._case()
    valid = jnp.zeros(mask.shape[:2], bool)
    loss = losses.indexer_kl_loss(scores, probs, mask, valid=valid)
    self.assertEqual(loss, 0.0)

  def test_scores_far_apart_stay_finite(self):
    scores = jnp.array([[[1e6, -1e6]]])
    probs = jnp.array([[[0.5, 0.5]]])
    mask = jnp.ones((1, 1, 2), bool)
    loss, grad = jax.value_and_grad(losses.indexer_kl_loss)(scores, probs, mask)
    np.testing.assert_allclose(loss, 1e6, rtol=1e-5)
    np.testing.assert_allclose(grad, [[[0.5, -0.5]]], atol=1e-6)

  def test_mask_that_does_not_fit_is_named(self):
    scores, probs, mask = self._case()
    with self.assertRaisesRegex(ValueError, r"mask must have shape .* got"):
      losses.indexer_kl_loss(scores, probs, mask[:, :, :3])

  def test_mask_of_floats_is_named(self):
    scores, probs, mask = self._case()
    with self.assertRaisesRegex(TypeError, "mask must be of dtype bool"):
      losses.indexer_kl_loss(scores, probs, mask.astype(jnp.float32))


if __name__ == "__main__":
  absltest.main()
