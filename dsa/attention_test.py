"""The composed layer: visibility, padding, packing, gradients and errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import dsa
from testing import layers, oracle, oracle_grad, tolerances

TOPK = 3
ONE_SEGMENT = np.ones((2, 12), np.int32)
PACKED = np.asarray([[1] * 5 + [2] * 7, [7] * 9 + [3] * 3], np.int32)
PADDED = np.asarray([[0] * 3 + [1] * 9, [1] * 4 + [0] * 2 + [5] * 6], np.int32)


def setUpModule():
  # Each program runs once or twice: what takes the time is compiling it.
  jax.config.update("jax_disable_most_optimizations", True)


def make(seed, **options):
  return layers.layer(seed, **{"index_topk": TOPK, **options})


@functools.cache
def compiled(config):
  """The layer as one program for each configuration and shape."""
  return jax.jit(dsa.make_attention(config, backend=dsa.backends.dot_product()))


@functools.cache
def compiled_gradients(config):
  """Gradients of sum(out * cotangent) by parameters and x."""
  attention = dsa.make_attention(config, backend=dsa.backends.dot_product())

  def loss(params, x, cotangent, **options):
    return jnp.sum(attention(params, x, **options).out * cotangent)

  return jax.jit(jax.grad(loss, (0, 1)))


def options(layer, segment_ids, positions=None):
  """The arguments that vary, always passed, so that programs are shared."""
  if segment_ids is None:
    segment_ids = np.ones(layer.x.shape[:2], np.int32)
  positions = layer.positions if positions is None else positions
  return {
    "positions": jnp.asarray(positions, jnp.int32),
    "segment_ids": jnp.asarray(segment_ids),
  }


def run(layer, segment_ids=None, positions=None):
  attention = compiled(layer.config)
  return attention(
    layer.params, layer.x, **options(layer, segment_ids, positions)
  )


def gradients(layer, cotangent, segment_ids=None):
  return compiled_gradients(layer.config)(
    layer.params, layer.x, cotangent, **options(layer, segment_ids)
  )


def oracle_answer(layer, segment_ids=None, positions=None):
  return oracle.dsa_layer(
    *layers.oracle_params(layer.params),
    layer.x,
    layer.config,
    segment_ids=segment_ids,
    positions=layer.positions if positions is None else positions,
  )


def cotangent_of(layer, seed=0):
  return np.random.default_rng(seed).normal(size=layer.x.shape)


class OracleTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("one_segment", ONE_SEGMENT), ("packed", PACKED), ("padded", PADDED)
  )
  def test_output_and_selection(self, segment_ids):
    layer = make(0)
    wanted = oracle_answer(layer, segment_ids)
    actual = run(layer, segment_ids)
    np.testing.assert_array_equal(
      actual.selection.indices, oracle.mask_to_indices(wanted.mask, TOPK)
    )
    tolerances.assert_output_close(actual.out, wanted.out, "float32")

  def test_interleaved_indexer(self):
    layer = make(1, indexer_rope_interleave=True)
    wanted = oracle_answer(layer)
    actual = run(layer)
    np.testing.assert_array_equal(actual.selection.mask(12), wanted.mask)
    tolerances.assert_output_close(actual.out, wanted.out, "float32")

  @parameterized.product(
    field=(*dsa.MLAParams._fields, "x"), segments=("PACKED", "PADDED")
  )
  def test_gradient(self, field, segments):
    layer, segment_ids = make(2), globals()[segments]
    cotangent = cotangent_of(layer)
    params, x = gradients(layer, cotangent, segment_ids)
    wanted_params, wanted_x = oracle_grad.sparse_mla_vjp(
      layers.oracle_params(layer.params)[0],
      layer.x,
      layer.positions,
      oracle_answer(layer, segment_ids).mask,
      layer.config,
      cotangent,
    )
    actual = params.mla._asdict() | {"x": x}
    wanted = wanted_params._asdict() | {"x": wanted_x}
    tolerances.assert_close_by_norm(
      actual[field], wanted[field], tolerances.GRADIENT["float32"], field
    )

  def test_defaults_are_one_segment_and_token_order(self):
    layer = make(3)
    attention = compiled(layer.config)
    actual = attention(layer.params, layer.x)
    wanted = run(layer)
    np.testing.assert_array_equal(actual.out, wanted.out)
    self.assertEqual(actual.indexer_loss.dtype, jnp.float32)
    self.assertEqual(actual.indexer_loss, 0)

  def test_the_indexer_reads_the_latent_after_its_norm(self):
    layer = make(4)
    mla = layer.params.mla
    gainless = layer.params._replace(
      mla=mla._replace(q_norm=jnp.ones_like(mla.q_norm))
    )
    actual = run(layer).selection.indices
    without = run(layer._replace(params=gainless)).selection.indices
    self.assertTrue(np.any(actual != without))


class LengthTest(parameterized.TestCase):
  def test_fewer_keys_than_topk_is_dense_causal_attention(self):
    layer = make(5, index_topk=8, length=5)
    result = run(layer)
    causal = oracle.visibility(np.ones((2, 5)))
    self.assertEqual(result.selection.indices.shape, (2, 5, 5))
    np.testing.assert_array_equal(result.selection.mask(5), causal)
    wanted = oracle.sparse_mla(
      layers.oracle_params(layer.params)[0],
      layer.x,
      layer.positions,
      causal,
      layer.config,
    )
    tolerances.assert_output_close(result.out, wanted, "float32")

  @parameterized.parameters((5, 8), (12, 3))
  def test_a_later_token_changes_no_bit_of_earlier_ones(self, length, topk):
    layer = make(6, index_topk=topk, length=length)
    changed = layer._replace(x=layer.x.at[:, -1].add(1))
    np.testing.assert_array_equal(
      run(layer).out[:, :-1], run(changed).out[:, :-1]
    )
    self.assertTrue(np.any(run(layer).out[:, -1] != run(changed).out[:, -1]))

  @parameterized.parameters(3, 4, 5)
  def test_gradients_on_both_sides_of_topk(self, length):
    layer = make(7, index_topk=4, length=length)
    cotangent = cotangent_of(layer)
    params, x = gradients(layer, cotangent)
    wanted_params, wanted_x = oracle_grad.sparse_mla_vjp(
      layers.oracle_params(layer.params)[0],
      layer.x,
      layer.positions,
      oracle_answer(layer).mask,
      layer.config,
      cotangent,
    )
    actual = params.mla._asdict() | {"x": x}
    wanted = wanted_params._asdict() | {"x": wanted_x}
    for name, gradient in wanted.items():
      tolerances.assert_close_by_norm(
        actual[name], gradient, tolerances.GRADIENT["float32"], name
      )


class PackingTest(parameterized.TestCase):
  def test_left_padding_changes_nothing(self):
    layer = make(8, index_topk=4, length=8)
    segment_ids = np.ones((2, 8), np.int32)
    segment_ids[0, :3] = 0
    padded = run(layer, segment_ids)
    solo = run(
      layer._replace(x=layer.x[:1, 3:], positions=layer.positions[:1, :5])
    )
    tolerances.assert_output_close(padded.out[:1, 3:], solo.out, "float32")
    np.testing.assert_array_equal(
      padded.selection.mask(8)[:1, 3:, 3:], solo.selection.mask(5)
    )
    self.assertFalse(np.any(padded.selection.mask(8)[0, :, :3]))
    self.assertFalse(np.any(padded.out[0, :3]))

  def test_a_packed_document_equals_its_solo_run(self):
    layer = make(9)
    packed = run(layer, PACKED)
    second = np.asarray(packed.selection.indices[0, 5:])
    self.assertTrue(np.all((second >= 5) | (second == -1)))
    solo = run(
      layer._replace(x=layer.x[:1, 5:], positions=layer.positions[:1, :7])
    )
    tolerances.assert_output_close(packed.out[:1, 5:], solo.out, "float32")
    np.testing.assert_array_equal(
      packed.selection.mask(12)[:1, 5:, 5:], solo.selection.mask(7)
    )

  @parameterized.named_parameters(
    ("reversed", np.arange(12)[::-1]),
    ("repeated", np.full(12, 3)),
    ("restarted", np.arange(12) % 5),
  )
  def test_order_is_token_order_whatever_the_positions(self, positions):
    layer = make(10)
    positions = np.broadcast_to(positions, (2, 12))
    wanted = oracle_answer(layer, positions=positions)
    actual = run(layer, positions=positions)
    np.testing.assert_array_equal(actual.selection.mask(12), wanted.mask)
    tolerances.assert_output_close(actual.out, wanted.out, "float32")

  @parameterized.parameters(jnp.float32, jnp.bfloat16)
  def test_a_sequence_of_padding_is_exactly_zero(self, dtype):
    layer = make(11, dtype=dtype)
    layer = layer._replace(x=layer.x.at[0].set(jnp.nan))
    segment_ids = np.repeat([[0], [1]], 12, axis=1).astype(np.int32)
    result = run(layer, segment_ids)
    self.assertEqual(result.out.dtype, dtype)
    self.assertFalse(np.any(result.out[0]))
    self.assertTrue(np.all(result.selection.indices[0] == -1))
    self.assertTrue(np.all(np.isfinite(result.out[1].astype(np.float32))))
    params, x = gradients(layer, np.ones(layer.x.shape), segment_ids)
    self.assertFalse(np.any(x[0]))
    for gradient in jax.tree.leaves((params, x)):
      self.assertTrue(np.all(np.isfinite(gradient.astype(np.float32))))


class IsolationTest(parameterized.TestCase):
  """What lies outside a query's selection cannot reach it."""

  @parameterized.parameters(np.nan, np.inf)
  def test_what_lies_in_padding_reaches_nothing(self, value):
    layer = make(12)
    padding = jnp.asarray(PADDED == 0)[..., None]
    filled = layer._replace(x=jnp.where(padding, value, layer.x))
    clean, poisoned = run(layer, PADDED), run(filled, PADDED)
    jax.tree.map(np.testing.assert_array_equal, clean, poisoned)
    jax.tree.map(
      np.testing.assert_array_equal,
      gradients(layer, cotangent_of(layer), PADDED),
      gradients(filled, cotangent_of(layer), PADDED),
    )

  def test_nan_stays_in_its_document(self):
    layer = make(13)
    poisoned = layer._replace(x=layer.x.at[0, 2].set(jnp.nan))
    clean, dirty = run(layer, PACKED), run(poisoned, PACKED)
    np.testing.assert_array_equal(clean.out[0, 5:], dirty.out[0, 5:])
    np.testing.assert_array_equal(clean.out[1], dirty.out[1])
    np.testing.assert_array_equal(clean.out[0, :2], dirty.out[0, :2])
    self.assertTrue(np.all(np.isnan(dirty.out[0, 2])))

  def test_the_indexer_gets_no_gradient_from_the_output(self):
    layer = make(14)
    params, _ = gradients(layer, cotangent_of(layer))
    for gradient in params.indexer:
      np.testing.assert_array_equal(gradient, np.zeros_like(gradient))

  def test_two_models_of_the_same_shapes_do_not_mix(self):
    first, second = make(15), make(16)
    rope = dsa.RopeConfig(rope_theta=500.0)
    config = dsa.DSAConfig(**vars(first.config) | {"rope": rope})
    before = run(first).out
    others = run(second).out, run(first._replace(config=config)).out
    np.testing.assert_array_equal(run(first).out, before)
    for other in others:
      self.assertGreater(np.abs(other - before).max(), 1e-2)


class GivenSelectionTest(parameterized.TestCase):
  def test_it_stands_in_for_the_indexers(self):
    layer = make(17)
    result = run(layer, PADDED)
    without_indexer = layer.params._replace(indexer=None)
    again = compiled(layer.config)(
      without_indexer,
      layer.x,
      selection=result.selection,
      **options(layer, PADDED),
    )
    np.testing.assert_array_equal(again.out, result.out)
    np.testing.assert_array_equal(
      again.selection.indices, result.selection.indices
    )

  def test_what_a_query_may_not_see_is_dropped_from_it(self):
    layer = make(18)
    everything = np.broadcast_to(np.arange(12, dtype=np.int32), (2, 12, 12))
    result = compiled(layer.config)(
      layer.params,
      layer.x,
      selection=dsa.Selection(jnp.asarray(everything)),
      **options(layer, PADDED),
    )
    np.testing.assert_array_equal(
      result.selection.mask(12), oracle.visibility(PADDED)
    )
    self.assertFalse(np.any(np.asarray(result.out)[PADDED == 0]))


class ErrorTest(parameterized.TestCase):
  """Each names the argument, before any compute."""

  def call(self, params=None, x=None, **options):
    layer = make(19)
    attention = dsa.make_attention(layer.config, backend=self.unreachable)
    params = layer.params if params is None else params
    attention(params, layer.x if x is None else x, **options)

  def unreachable(self, inputs, selection, *, scale):
    self.fail("the backend was called with arguments that do not fit")

  @parameterized.named_parameters(
    ("x_too_wide", {"x": jnp.ones((2, 12, 25))}, "x"),
    ("x_of_two_axes", {"x": jnp.ones((12, 24))}, "x"),
    ("positions", {"positions": jnp.ones((2, 11), int)}, "positions"),
    ("segment_ids", {"segment_ids": jnp.ones((1, 12), int)}, "segment_ids"),
    (
      "selection",
      {"selection": dsa.Selection(jnp.zeros((2, 11, 3), int))},
      "selection.indices",
    ),
  )
  def test_a_wrong_shape(self, arguments, name):
    with self.assertRaisesRegex(ValueError, f"^{name} must have shape .* got"):
      self.call(**arguments)

  @parameterized.named_parameters(
    ("x", {"x": jnp.ones((2, 12, 24), int)}, "x"),
    ("positions", {"positions": jnp.ones((2, 12))}, "positions"),
    ("segment_ids", {"segment_ids": jnp.ones((2, 12), bool)}, "segment_ids"),
    (
      "selection",
      {"selection": dsa.Selection(jnp.zeros((2, 12, 3)))},
      "selection.indices",
    ),
  )
  def test_a_wrong_dtype(self, arguments, name):
    with self.assertRaisesRegex(TypeError, f"^{name} must be of dtype .* got"):
      self.call(**arguments)

  @parameterized.parameters(("mla", "wkv_b"), ("indexer", "wk"))
  def test_a_parameter_of_another_shape(self, group, name):
    params = make(19).params
    part = getattr(params, group)
    part = part._replace(**{name: getattr(part, name)[1:]})
    with self.assertRaisesRegex(ValueError, f"params.{group}.{name} must have"):
      self.call(params=params._replace(**{group: part}))

  def test_parameters_of_another_type(self):
    with self.assertRaisesRegex(TypeError, "params must be DSAParams"):
      self.call(params=make(19).params._asdict())

  @parameterized.parameters("B", "T")
  def test_no_tokens(self, axis):
    x = jnp.ones((0, 12, 24) if axis == "B" else (2, 0, 24))
    with self.assertRaisesRegex(ValueError, "x must hold at least one token"):
      self.call(x=x)

  @parameterized.parameters("gather", None)
  def test_a_backend_that_is_no_function(self, backend):
    with self.assertRaisesRegex(TypeError, "backend must be a function"):
      dsa.make_attention(make(19).config, backend=backend)

  def test_neither_indexer_nor_selection(self):
    params = make(19).params._replace(indexer=None)
    with self.assertRaisesRegex(ValueError, "selection is required"):
      self.call(params=params)

  def test_a_mask_is_no_selection(self):
    with self.assertRaisesRegex(
      TypeError, "selection must be a Selection, got Array"
    ):
      self.call(selection=jnp.ones((2, 12, 12), bool))


if __name__ == "__main__":
  absltest.main()
