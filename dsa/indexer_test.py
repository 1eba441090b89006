"""The indexer against the oracle, and the cases on which others failed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import dsa
from dsa import indexer
from testing import layers, oracle, oracle_grad, tolerances

LAYOUTS = (False, True)  # Of `indexer_rope_interleave`.


def make(seed, **options):
  """A layer whose positions are past those of a short prompt."""
  layer = layers.layer(seed, **options)
  return layer._replace(positions=layer.positions + 500)


def latent(layer):
  return dsa.query_latent(layer.params.mla, layer.x, layer.config)


def scores(layer, params=None):
  """The library's index scores."""
  params = layer.params.indexer if params is None else params
  return dsa.indexer_scores(
    params, layer.x, latent(layer), layer.positions, layer.config
  )


class OracleTest(parameterized.TestCase):
  @parameterized.product(interleave=LAYOUTS, part=("queries", "keys", "scores"))
  def test_agrees_with_the_oracle(self, interleave, part):
    layer = make(0, indexer_rope_interleave=interleave)
    q_latent = latent(layer)
    config, positions = layer.config, layer.positions
    _, params = layers.oracle_params(layer.params)
    if part == "queries":
      actual = dsa.index_queries(
        layer.params.indexer, q_latent, positions, config
      )
      wanted = oracle.index_queries(params, q_latent, positions, config)
    elif part == "keys":
      actual = dsa.index_keys(layer.params.indexer, layer.x, positions, config)
      wanted = oracle.index_keys(params, layer.x, positions, config)
    else:
      actual = scores(layer)
      wanted = oracle.indexer_scores(
        params, layer.x, q_latent, positions, config
      )
    tolerances.assert_output_close(actual, wanted, "float32")

  @parameterized.parameters(jnp.float32, jnp.bfloat16)
  def test_head_weights_are_float32_whatever_x_is(self, dtype):
    layer = make(1, dtype=dtype)
    actual = dsa.index_head_weights(layer.params.indexer, layer.x, layer.config)
    _, params = layers.oracle_params(layer.params)
    wanted = oracle.index_head_weights(params, layer.x, layer.config)
    self.assertEqual(actual.dtype, jnp.float32)
    tolerances.assert_output_close(actual, wanted, "float32")

  @parameterized.parameters(*dsa.IndexerParams._fields)
  def test_gradient_of(self, name):
    layer = make(2)
    cotangent = np.random.default_rng(2).normal(size=(2, 12, 12))

    def loss(params):
      return jnp.sum(scores(layer, params) * cotangent)

    actual = jax.grad(loss)(layer.params.indexer)
    wanted = oracle_grad.indexer_scores_vjp(
      layers.oracle_params(layer.params)[1],
      layer.x,
      latent(layer),
      layer.positions,
      layer.config,
      cotangent,
    )
    tolerances.assert_close_by_norm(
      getattr(actual, name),
      getattr(wanted, name),
      tolerances.GRADIENT["float32"],
    )

  def test_bfloat16_agrees_with_the_oracle(self):
    layer = make(3, dtype=jnp.bfloat16)
    actual = scores(layer)
    wanted = oracle.indexer_scores(
      layers.oracle_params(layer.params)[1],
      layer.x,
      latent(layer),
      layer.positions,
      layer.config,
    )
    self.assertEqual(actual.dtype, jnp.float32)
    tolerances.assert_close_by_norm(
      actual, wanted, tolerances.GRADIENT["bfloat16"], "scores"
    )


class DetachedTest(absltest.TestCase):
  def test_scores_pass_no_gradient_to_x_or_the_latent(self):
    layer = make(4)

    def loss(x, q_latent):
      return jnp.sum(
        dsa.indexer_scores(
          layer.params.indexer, x, q_latent, layer.positions, layer.config
        )
      )

    for gradient in jax.grad(loss, (0, 1))(layer.x, latent(layer)):
      np.testing.assert_array_equal(gradient, np.zeros_like(gradient))


class RopeTest(parameterized.TestCase):
  """Index dims are [rope | rest], in the layout that the model uses."""

  def turned(self, interleave):
    """Index queries of all ones at positions 0 and 1, D = 6, R = 4."""
    layer = layers.layer(
      5,
      index_head_dim=6,
      qk_rope_head_dim=4,
      rope=oracle.Rope(rope_theta=10000.0),
      indexer_rope_interleave=interleave,
    )
    params = layer.params.indexer
    params = params._replace(wq_b=jnp.ones_like(params.wq_b))
    width = layer.config.q_lora_rank
    q_latent = jnp.full((1, 2, width), 1 / width)
    return dsa.index_queries(
      params, q_latent, jnp.asarray([[0, 1]]), layer.config
    )[0, :, 0]

  @parameterized.parameters(*LAYOUTS)
  def test_only_the_first_dims_turn(self, interleave):
    still, moved = self.turned(interleave)
    np.testing.assert_allclose(still, np.ones(6), rtol=1e-6)
    np.testing.assert_array_equal(still[4:], moved[4:])
    self.assertGreater(np.abs(still[:4] - moved[:4]).min(), 1e-3)

  def test_layouts_pair_different_dims(self):
    cos, sin = np.cos([1, 0.01]), np.sin([1, 0.01])
    a, b = cos - sin, cos + sin
    halves = self.turned(interleave=False)[1, :4]
    np.testing.assert_allclose(halves, [a[0], a[1], b[0], b[1]], rtol=1e-5)
    pairs = self.turned(interleave=True)[1, :4]
    np.testing.assert_allclose(pairs, [a[0], b[0], a[1], b[1]], rtol=1e-5)

  def test_changing_the_layout_changes_the_scores(self):
    layer = make(6)
    config = dataclasses.replace(layer.config, indexer_rope_interleave=True)
    self.assertGreater(
      np.abs(scores(layer) - scores(layer._replace(config=config))).max(), 0.1
    )


class WeightedReluScoresTest(parameterized.TestCase):
  def test_relu_comes_per_head_before_the_sum(self):
    actual = dsa.weighted_relu_scores(
      jnp.asarray([[[[1.0], [-1.0]]]]),
      jnp.asarray([[[2.0], [-3.0], [0.0]]]),
      jnp.ones((1, 1, 2)),
    )
    np.testing.assert_array_equal(actual, [[[2, 3, 0]]])

  @parameterized.named_parameters(
    ("over_heads", [[1, 0], [0, 1]]), ("within_a_head", [[1, 1]])
  )
  def test_sums_of_bfloat16_are_float32(self, heads):
    actual = dsa.weighted_relu_scores(
      jnp.asarray([[heads]], jnp.bfloat16),
      jnp.asarray([[[256, 0], [256, 1]]], jnp.bfloat16),
      jnp.ones((1, 1, len(heads))),
    )
    np.testing.assert_array_equal(actual, [[[256, 257]]])
    np.testing.assert_array_equal(
      dsa.topk_indices(actual, 1, jnp.ones((1, 1, 2), bool)), [[[1]]]
    )

  def test_a_negative_weight_counts_against_a_key(self):
    actual = dsa.weighted_relu_scores(
      jnp.ones((1, 1, 1, 1)), jnp.ones((1, 1, 1)), jnp.full((1, 1, 1), -2.0)
    )
    np.testing.assert_array_equal(actual, [[[-2]]])

  @parameterized.parameters(1, 3, 64)
  def test_bits_do_not_depend_on_how_many_queries_there_are(self, length):
    rng = np.random.default_rng(7)
    # Integers multiply exactly; what is left is the order of the heads' sum.
    q = jnp.asarray(rng.integers(-8, 9, size=(1, 300, 12, 4)), jnp.float32)
    k = jnp.asarray(rng.integers(-8, 9, size=(1, 20, 4)), jnp.float32)
    weights = jnp.asarray(rng.normal(size=(1, 300, 12)), jnp.float32)
    together = dsa.weighted_relu_scores(q, k, weights)
    part = dsa.weighted_relu_scores(q[:, :length], k, weights[:, :length])
    np.testing.assert_array_equal(part, together[:, :length])

  def test_scores_of_selected_keys_are_those_of_all_keys(self):
    layer = make(8)
    params, positions = layer.params.indexer, layer.positions
    q = dsa.index_queries(params, latent(layer), positions, layer.config)
    k = dsa.index_keys(params, layer.x, positions, layer.config)
    weights = dsa.index_head_weights(params, layer.x, layer.config)
    rng = np.random.default_rng(8)
    indices = jnp.asarray(rng.integers(0, 12, size=(2, 12, 5)), jnp.int32)
    tolerances.assert_output_close(
      dsa.selected_scores(q, k, weights, indices),
      np.take_along_axis(
        np.asarray(dsa.weighted_relu_scores(q, k, weights)), indices, axis=-1
      ),
      "float32",
    )


class ErrorTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.layer = make(9)
    self.q_latent = latent(self.layer)

  @parameterized.named_parameters(
    ("x", "x", np.s_[..., :-1]),
    ("x_of_two_axes", "x", np.s_[0]),
    ("q_latent", "q_latent", np.s_[..., :-1]),
    ("positions", "positions", np.s_[:, :-1]),
  )
  def test_a_wrong_shape_is_named(self, name, part):
    arguments = {
      "x": self.layer.x,
      "q_latent": self.q_latent,
      "positions": self.layer.positions,
    }
    arguments[name] = arguments[name][part]
    with self.assertRaisesRegex(ValueError, f"^{name} must have"):
      dsa.indexer_scores(
        self.layer.params.indexer, **arguments, config=self.layer.config
      )

  def test_positions_are_integers(self):
    with self.assertRaisesRegex(TypeError, "positions must be of dtype int"):
      dsa.index_keys(
        self.layer.params.indexer,
        self.layer.x,
        self.layer.positions.astype(jnp.float32),
        self.layer.config,
      )

  @parameterized.named_parameters(
    ("q", "q", (1, 2, 3)),
    ("k", "k", (1, 5, 3)),
    ("weights", "weights", (1, 2, 2)),
  )
  def test_scores_name_what_does_not_fit(self, name, shape):
    shapes = {"q": (1, 2, 3, 4), "k": (1, 5, 4), "weights": (1, 2, 3)}
    shapes[name] = shape
    with self.assertRaisesRegex(ValueError, f"^{name} must have shape"):
      dsa.weighted_relu_scores(**{n: jnp.ones(s) for n, s in shapes.items()})

  def test_weights_are_float32(self):
    with self.assertRaisesRegex(TypeError, "weights must be of dtype float32"):
      indexer.weighted_relu_scores(
        jnp.ones((1, 2, 3, 4)),
        jnp.ones((1, 5, 4)),
        jnp.ones((1, 2, 3), jnp.bfloat16),
      )


if __name__ == "__main__":
  absltest.main()
