"""The oracle against answers worked out by hand, mostly from CASES.md."""

import math

import numpy as np
from absl.testing import absltest, parameterized

from testing import oracle, random_layer, tolerances

CONFIG = random_layer.CONFIG
DEEPSEEK_V32 = oracle.Config(
  hidden_size=7168,
  num_attention_heads=128,
  q_lora_rank=1536,
  kv_lora_rank=512,
  qk_nope_head_dim=128,
  qk_rope_head_dim=64,
  v_head_dim=128,
  index_n_heads=64,
  index_head_dim=128,
  index_topk=2048,
  indexer_rope_interleave=False,
  rope=oracle.Rope(rope_type="yarn", factor=40.0),
)


def first_pair_turned(turn):
  """Turns [1, 0, 0, 0] at position 1 under frequencies [1, 0.01]."""
  x = np.array([1.0, 0, 0, 0])[None, None]
  return turn(x, np.array([[1]]), np.array([1, 0.01]))[0, 0]


class RopeTest(parameterized.TestCase):
  def test_halves_layout_turns_dims_half_a_width_apart(self):
    turned = first_pair_turned(oracle.rope_concat)
    np.testing.assert_allclose(turned, [0.5403, 0, 0.8415, 0], atol=5e-5)

  def test_interleaved_layout_turns_neighbours(self):
    turned = first_pair_turned(oracle.rope_interleaved)
    np.testing.assert_allclose(turned, [0.5403, 0.8415, 0, 0], atol=5e-5)

  @parameterized.named_parameters(
    ("halves", False, [0.5403, 0, 0.8415, 0]),
    ("interleaved", True, [0.5403, 0.8415, 0, 0]),
  )
  def test_the_config_picks_the_indexer_layout(self, interleave, wanted):
    config = CONFIG._replace(
      qk_rope_head_dim=4,
      indexer_rope_interleave=interleave,
      rope=oracle.Rope(rope_theta=10000.0),
    )
    x = np.array([1.0, 0, 0, 0])[None, None]
    turned = oracle.index_rope(x, np.array([[1]]), config)[0, 0]
    np.testing.assert_allclose(turned, wanted, atol=5e-5)

  def test_index_rope_turns_the_first_dims_alone(self):
    config = CONFIG._replace(qk_rope_head_dim=2)
    turned = oracle.index_rope(np.ones((1, 1, 6)), np.array([[1]]), config)
    changed = np.flatnonzero(turned[0, 0] != 1)
    np.testing.assert_array_equal(changed, [0, 1])

  def test_mla_rope_turns_the_last_query_dims(self):
    layer = random_layer.random_layer(0, batch=1, length=3)
    latent = oracle.query_latent(layer.mla, layer.x)
    plain = np.einsum("btl,lnd->btnd", latent, layer.mla.wq_b)
    _, q_rope = oracle.mla_queries(layer.mla, latent, [[0, 0, 0]], CONFIG)
    np.testing.assert_array_equal(q_rope, plain[..., CONFIG.qk_nope_head_dim :])

  @parameterized.parameters(
    (64, 4096, (10, 23)), (64, 163840, (23, 36)), (8, 64, (0, 2))
  )
  def test_yarn_ramp(self, rope_dim, original, wanted):
    rope = oracle.Rope(
      rope_type="yarn",
      factor=40.0,
      original_max_position_embeddings=original,
    )
    self.assertEqual(oracle.yarn_ramp(rope, rope_dim), wanted)

  def test_yarn_divides_by_factor_above_the_ramp_and_nothing_below_it(self):
    plain = oracle.rope_frequencies(oracle.Rope(), 64)
    ratio = plain / oracle.rope_frequencies(DEEPSEEK_V32.rope, 64)
    np.testing.assert_allclose(ratio[:11], 1)
    np.testing.assert_allclose(ratio[23:], 40)
    self.assertTrue(np.all(np.diff(ratio[10:24]) > 0))

  def test_yarn_ramp_without_width_stays_finite(self):
    rope = oracle.Rope(
      rope_type="yarn",
      factor=40.0,
      beta_fast=1.0,
      original_max_position_embeddings=6,
    )
    self.assertEqual(oracle.yarn_ramp(rope, 8), (0, 0))
    frequencies = oracle.rope_frequencies(rope, 8)
    plain = oracle.rope_frequencies(oracle.Rope(), 8)
    np.testing.assert_allclose(frequencies, plain / [1, 40, 40, 40])

  def test_unknown_rope_type_is_named(self):
    with self.assertRaisesRegex(ValueError, "longrope"):
      oracle.rope_frequencies(oracle.Rope(rope_type="longrope"), 8)


class ScaleTest(parameterized.TestCase):
  def test_yarn_scale_holds_mscale_squared(self):
    self.assertAlmostEqual(oracle.softmax_scale(DEEPSEEK_V32), 0.1352338, 6)

  @parameterized.named_parameters(
    ("without_yarn", oracle.Rope(rope_type="default", factor=40.0)),
    ("stretched_by_less_than_1", oracle.Rope(rope_type="yarn", factor=0.5)),
  )
  def test_scale_is_the_inverse_root_of_the_width(self, rope):
    config = DEEPSEEK_V32._replace(rope=rope)
    self.assertAlmostEqual(oracle.softmax_scale(config), 0.072169, 6)


class NormTest(absltest.TestCase):
  def test_layer_norm_takes_the_mean_away(self):
    normal = oracle.layer_norm([1, 2, 3, 4], np.ones(4), np.zeros(4))
    np.testing.assert_allclose(
      normal, [-1.3416, -0.4472, 0.4472, 1.3416], atol=5e-5
    )

  def test_layer_norm_eps_counts_on_small_inputs(self):
    normal = oracle.layer_norm([1e-3, -1e-3], np.ones(2), np.zeros(2))
    np.testing.assert_allclose(normal, [0.7071, -0.7071], atol=5e-5)

  def test_layer_norm_scales_then_shifts(self):
    normal = oracle.layer_norm([1, -1], [2.0, 3.0], [10.0, 20.0], eps=0)
    np.testing.assert_allclose(normal, [12, 17])

  def test_rms_norm_keeps_the_mean(self):
    np.testing.assert_allclose(oracle.rms_norm([2, 2], [1, 3]), [1, 3], 1e-6)


class IndexerTest(absltest.TestCase):
  def test_relu_comes_per_head_before_the_sum(self):
    scores = oracle.index_scores(
      queries=np.reshape([1, -1], (1, 1, 2, 1)),
      keys=np.reshape([2, -3, 0], (1, 3, 1)),
      weights=np.ones((1, 1, 2)),
    )
    np.testing.assert_array_equal(scores[0, 0], [2, 3, 0])

  def test_head_weights_hold_both_roots(self):
    layer = random_layer.random_layer(1)
    weights = oracle.index_head_weights(layer.indexer, layer.x, CONFIG)
    np.testing.assert_allclose(
      weights, layer.x @ layer.indexer.weights_proj / math.sqrt(2 * 12)
    )

  def test_the_gain_of_the_latent_norm_changes_the_ranking(self):
    layer = random_layer.random_layer(2)
    plain = layer.mla._replace(q_norm=np.ones(CONFIG.q_lora_rank))
    masks = [
      oracle.dsa_layer(mla, layer.indexer, layer.x, CONFIG).mask
      for mla in (layer.mla, plain)
    ]
    self.assertTrue(np.any(masks[0] != masks[1]))

  def test_hadamard_on_queries_and_keys_changes_no_score(self):
    rng = np.random.default_rng(3)
    pair = np.array([[1, 1], [1, -1]])
    rotation = np.kron(pair, pair) / 2
    queries = rng.normal(size=(1, 5, 2, 4))
    keys = rng.normal(size=(1, 5, 4))
    weights = rng.normal(size=(1, 5, 2))
    np.testing.assert_allclose(
      oracle.index_scores(queries @ rotation, keys @ rotation, weights),
      oracle.index_scores(queries, keys, weights),
      **tolerances.OUTPUT["float64"]._asdict(),
    )


if __name__ == "__main__":
  absltest.main()
