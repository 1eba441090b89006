"""The oracle's indexer loss: its value, its gradient, its average."""

import math
import sys

import numpy as np
from absl.testing import absltest, parameterized

from testing import (
  finite_difference,
  oracle,
  oracle_loss,
  random_layer,
  tolerances,
)

CONFIG = random_layer.CONFIG
SEGMENTS = np.array([[0, 0] + [1] * 10, [1] * 5 + [2] * 7])
EXACT = tolerances.OUTPUT["float64"]._asdict()


def stage_mask(layer, stage):
  """Returns the keys the loss runs over, bool [B, T, T]."""
  if stage == "dense_warmup":
    return oracle.visibility(SEGMENTS)
  return oracle.dsa_layer(
    layer.mla, layer.indexer, layer.x, CONFIG, segment_ids=SEGMENTS
  ).mask


class QueryKLTest(absltest.TestCase):
  def test_value(self):
    kl = oracle_loss.query_kl(
      [[[0, math.log(3), 50]]], [[[0.5, 0.5, 0]]], np.array([[[1, 1, 0]]]) > 0
    )
    self.assertAlmostEqual(kl[0, 0], 0.5 * math.log(4 / 3), 12)

  def test_equal_distributions_have_none(self):
    mask = np.ones((1, 1, 3), bool)
    scores = np.array([[[1.0, 2.0, 3.0]]])
    p = oracle_loss.masked_softmax(scores, mask)
    self.assertAlmostEqual(oracle_loss.query_kl(scores, p, mask)[0, 0], 0, 12)

  def test_a_p_of_zero_contributes_nothing(self):
    kl = oracle_loss.query_kl([[[0, 0]]], [[[0, 1]]], np.ones((1, 1, 2)) > 0)
    self.assertAlmostEqual(kl[0, 0], math.log(2), 12)

  def test_scores_of_a_thousand_apart_stay_exact(self):
    kl = oracle_loss.query_kl([[[0, 1000]]], [[[1, 0]]], np.ones((1, 1, 2)) > 0)
    self.assertAlmostEqual(kl[0, 0], 1000, 9)

  def test_nan_off_the_mask_counts_for_nothing(self):
    kl = oracle_loss.query_kl(
      [[[0, np.nan]]], [[[1, np.nan]]], np.array([[[True, False]]])
    )
    self.assertEqual(kl[0, 0], 0)


class LossTest(parameterized.TestCase):
  def test_averages_over_queries_with_a_key(self):
    mask = np.ones((1, 4, 2), bool)
    mask[0, 1:3] = False
    p = np.broadcast_to([1.0, 0.0], (1, 4, 2))
    loss = oracle_loss.indexer_kl_loss(np.zeros((1, 4, 2)), p, mask)
    self.assertAlmostEqual(loss, math.log(2), 12)

  def test_a_query_that_is_not_valid_may_hold_nan(self):
    scores = np.array([[[0, 0], [np.nan, 0]]])
    p = np.broadcast_to([1.0, 0.0], (1, 2, 2))
    mask, valid = np.ones((1, 2, 2), bool), np.array([[True, False]])
    loss = oracle_loss.indexer_kl_loss(scores, p, mask, valid)
    self.assertAlmostEqual(loss, math.log(2), 12)

  def test_a_query_that_is_not_valid_gets_no_gradient(self):
    scores = np.array([[[0, 0], [np.nan, 0]]])
    p = np.broadcast_to([1.0, 0.0], (1, 2, 2))
    mask, valid = np.ones((1, 2, 2), bool), np.array([[True, False]])
    grad = oracle_loss.indexer_kl_loss_vjp(scores, p, mask, valid)
    np.testing.assert_array_equal(grad, [[[-0.5, 0.5], [0, 0]]])

  def test_without_valid_queries_it_is_zero(self):
    nothing = np.zeros((1, 3, 3))
    self.assertEqual(
      oracle_loss.indexer_kl_loss(nothing, nothing, nothing > 0), 0
    )

  @parameterized.parameters("dense_warmup", "sparse")
  def test_gradient_by_the_scores(self, stage):
    layer = random_layer.random_layer(1)
    mask = stage_mask(layer, stage)
    p = oracle_loss.target_probs(
      layer.mla, layer.x, layer.positions, mask, CONFIG
    )
    scores = np.random.default_rng(2).normal(size=mask.shape)
    finite_difference.assert_gradient(
      lambda value: oracle_loss.indexer_kl_loss(value, p, mask),
      scores,
      oracle_loss.indexer_kl_loss_vjp(scores, p, mask),
    )

  @parameterized.product(
    field=oracle.IndexerParams._fields, stage=("dense_warmup", "sparse")
  )
  def test_gradient_by_the_parameters(self, field, stage):
    layer = random_layer.random_layer(3)
    mask = stage_mask(layer, stage)

    def loss(indexer):
      return oracle_loss.layer_loss(
        layer.mla, indexer, layer.x, layer.positions, mask, CONFIG
      )

    finite_difference.assert_gradient(
      lambda value: loss(layer.indexer._replace(**{field: value}))[0],
      getattr(layer.indexer, field),
      getattr(loss(layer.indexer)[1], field),
      name=field,
    )

  def test_micro_batches_averaged_by_valid_queries_give_the_same_loss(self):
    layer = random_layer.random_layer(4)
    mask = stage_mask(layer, "sparse")
    rows = [
      oracle_loss.layer_loss(
        layer.mla,
        layer.indexer,
        layer.x[b : b + 1],
        layer.positions[b : b + 1],
        mask[b : b + 1],
        CONFIG,
      )[0]
      for b in range(2)
    ]
    whole, _ = oracle_loss.layer_loss(
      layer.mla, layer.indexer, layer.x, layer.positions, mask, CONFIG
    )
    np.testing.assert_allclose(
      whole, np.average(rows, weights=[10, 12]), **EXACT
    )

  def test_target_is_the_mean_over_heads(self):
    layer = random_layer.random_layer(5)
    mask = stage_mask(layer, "sparse")
    inputs = oracle.mla_inputs(layer.mla, layer.x, layer.positions, CONFIG)
    scale = oracle.softmax_scale(CONFIG)
    probs = oracle.attention_probs(inputs, mask, scale=scale)
    p = oracle_loss.target_probs(
      layer.mla, layer.x, layer.positions, mask, CONFIG
    )
    np.testing.assert_allclose(
      p, (probs[:, 0] + probs[:, 1] + probs[:, 2]) / 3, **EXACT
    )


class IndependenceTest(absltest.TestCase):
  def test_the_oracle_imports_neither_jax_nor_the_library(self):
    self.assertNoCommonElements(sys.modules, ["jax", "dsa"])


if __name__ == "__main__":
  absltest.main()
