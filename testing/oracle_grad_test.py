"""The oracle's gradients against finite differences, step by step."""

import numpy as np
from absl.testing import absltest, parameterized

from testing import finite_difference, oracle, oracle_grad, random_layer

CONFIG = random_layer.CONFIG
POSITIONS = np.array([[3, 4, 5], [0, 7, 2]])
FREQUENCIES = oracle.rope_frequencies(CONFIG.rope, CONFIG.qk_rope_head_dim)
SEGMENTS = np.array([[0, 0] + [1] * 10, [1] * 5 + [2] * 7])


def selected(layer, config=CONFIG):
  return oracle.dsa_layer(
    layer.mla, layer.indexer, layer.x, config, segment_ids=SEGMENTS
  ).mask


class StepTest(parameterized.TestCase):
  """Each f_vjp returns the slopes of sum(f(*arguments) * cotangent)."""

  def check(self, f, f_vjp, *shapes):
    rng = np.random.default_rng(11)
    arguments = [rng.normal(size=shape) for shape in shapes]
    outputs = f(*arguments)
    several = isinstance(outputs, tuple)
    outputs = outputs if several else (outputs,)
    cotangents = [rng.normal(size=np.shape(output)) for output in outputs]
    grads = f_vjp(*arguments, *cotangents)
    grads = grads if isinstance(grads, tuple) else (grads,)
    self.assertLen(grads, len(arguments))

    def total(place, value):
      outputs = f(*arguments[:place], value, *arguments[place + 1 :])
      outputs = outputs if several else (outputs,)
      return sum(
        np.sum(o * g) for o, g in zip(outputs, cotangents, strict=True)
      )

    for i, (x, grad) in enumerate(zip(arguments, grads, strict=True)):
      finite_difference.assert_gradient(
        lambda value, i=i: total(i, value), x, grad, name=f"argument {i}"
      )

  def test_rms_norm(self):
    self.check(oracle.rms_norm, oracle_grad.rms_norm_vjp, (2, 3, 5), (5,))

  def test_layer_norm(self):
    self.check(
      oracle.layer_norm,
      lambda x, scale, bias, g: oracle_grad.layer_norm_vjp(x, scale, g),
      (2, 3, 5),
      (5,),
      (5,),
    )

  @parameterized.parameters(((2, 3, 8),), ((2, 3, 2, 8),))
  def test_rope_concat(self, shape):
    self.check(
      lambda x: oracle.rope_concat(x, POSITIONS, FREQUENCIES),
      lambda x, g: oracle_grad.rope_concat_vjp(POSITIONS, FREQUENCIES, g),
      shape,
    )

  @parameterized.parameters(((2, 3, 8),), ((2, 3, 2, 8),))
  def test_rope_interleaved(self, shape):
    self.check(
      lambda x: oracle.rope_interleaved(x, POSITIONS, FREQUENCIES),
      lambda x, g: oracle_grad.rope_interleaved_vjp(POSITIONS, FREQUENCIES, g),
      shape,
    )

  @parameterized.parameters(False, True)
  def test_index_rope(self, interleave):
    config = CONFIG._replace(indexer_rope_interleave=interleave)
    self.check(
      lambda x: oracle.index_rope(x, POSITIONS, config),
      lambda x, g: oracle_grad.index_rope_vjp(POSITIONS, config, g),
      (2, 3, 2, 12),
    )

  def test_expand_heads(self):
    self.check(
      oracle.expand_heads,
      oracle_grad.expand_heads_vjp,
      (2, 3, 4),
      (4, 2, 5),
      (4, 2, 6),
    )

  def test_attend_with_more_keys_than_queries_and_an_empty_row(self):
    mask = np.random.default_rng(1).random((2, 3, 5)) < 0.5
    mask[0, 1] = False
    self.check(
      lambda *inputs: oracle.attend(oracle.MLAInputs(*inputs), mask, scale=0.7),
      lambda *inputs_and_g: tuple(
        oracle_grad.attend_vjp(
          oracle.MLAInputs(*inputs_and_g[:-1]),
          mask,
          inputs_and_g[-1],
          scale=0.7,
        )
      ),
      (2, 3, 2, 4),
      (2, 3, 2, 6),
      (2, 5, 7),
      (2, 5, 6),
      (7, 2, 4),
      (7, 2, 3),
    )

  def test_index_scores(self):
    self.check(
      oracle.index_scores,
      oracle_grad.index_scores_vjp,
      (2, 3, 2, 4),
      (2, 5, 4),
      (2, 3, 2),
    )


class LayerTest(parameterized.TestCase):
  @parameterized.parameters(*oracle.MLAParams._fields, "x")
  def test_sparse_mla(self, field):
    layer = random_layer.random_layer(3)
    mask = selected(layer)
    g = np.random.default_rng(4).normal(size=layer.x.shape)
    grads, d_x = oracle_grad.sparse_mla_vjp(
      layer.mla, layer.x, layer.positions, mask, CONFIG, g
    )

    def total(value):
      x = value if field == "x" else layer.x
      mla = layer.mla
      mla = mla if field == "x" else mla._replace(**{field: value})
      out = oracle.sparse_mla(mla, x, layer.positions, mask, CONFIG)
      return np.sum(out * g)

    finite_difference.assert_gradient(
      total,
      layer.x if field == "x" else getattr(layer.mla, field),
      d_x if field == "x" else getattr(grads, field),
      name=field,
    )

  @parameterized.product(
    field=oracle.IndexerParams._fields, interleave=(False, True)
  )
  def test_indexer_scores(self, field, interleave):
    config = CONFIG._replace(indexer_rope_interleave=interleave)
    layer = random_layer.random_layer(5)
    q_latent = oracle.query_latent(layer.mla, layer.x)
    g = np.random.default_rng(6).normal(size=(2, 12, 12))
    grads = oracle_grad.indexer_scores_vjp(
      layer.indexer, layer.x, q_latent, layer.positions, config, g
    )

    def total(value):
      indexer = layer.indexer._replace(**{field: value})
      scores = oracle.indexer_scores(
        indexer, layer.x, q_latent, layer.positions, config
      )
      return np.sum(scores * g)

    finite_difference.assert_gradient(
      total, getattr(layer.indexer, field), getattr(grads, field), name=field
    )


class ZeroTest(absltest.TestCase):
  def test_padding_that_holds_nan_changes_no_gradient(self):
    layer = random_layer.random_layer(7)
    mask = selected(layer)
    g = np.random.default_rng(8).normal(size=layer.x.shape)
    poisoned = np.where(SEGMENTS[..., None] == 0, np.nan, layer.x)
    wanted, d_x = oracle_grad.sparse_mla_vjp(
      layer.mla, layer.x, layer.positions, mask, CONFIG, g
    )
    actual, d_poisoned = oracle_grad.sparse_mla_vjp(
      layer.mla, poisoned, layer.positions, mask, CONFIG, g
    )
    np.testing.assert_array_equal(d_poisoned, d_x)
    for field in wanted._fields:
      np.testing.assert_array_equal(
        getattr(actual, field), getattr(wanted, field), field
      )

  def test_padding_gets_exactly_zero(self):
    layer = random_layer.random_layer(9)
    g = np.ones_like(layer.x)
    _, d_x = oracle_grad.sparse_mla_vjp(
      layer.mla, layer.x, layer.positions, selected(layer), CONFIG, g
    )
    np.testing.assert_array_equal(d_x[SEGMENTS == 0], 0)

  def test_a_latent_that_nobody_selected_gets_exactly_zero(self):
    layer = random_layer.random_layer(10)
    mask = selected(layer)
    mask[:, :, 4] = False
    inputs = oracle.mla_inputs(layer.mla, layer.x, layer.positions, CONFIG)
    inputs.kv_latent[:, 4] = np.nan
    grads = oracle_grad.attend_vjp(
      inputs, mask, np.ones((2, 12, 3, 5)), scale=0.3
    )
    np.testing.assert_array_equal(grads.kv_latent[:, 4], 0)

  def test_a_nan_latent_that_nobody_selected_leaves_the_rest_finite(self):
    layer = random_layer.random_layer(10)
    mask = selected(layer)
    mask[:, :, 4] = False
    inputs = oracle.mla_inputs(layer.mla, layer.x, layer.positions, CONFIG)
    inputs.kv_latent[:, 4] = np.nan
    grads = oracle_grad.attend_vjp(
      inputs, mask, np.ones((2, 12, 3, 5)), scale=0.3
    )
    self.assertTrue(all(np.all(np.isfinite(grad)) for grad in grads))


if __name__ == "__main__":
  absltest.main()
