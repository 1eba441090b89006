"""The layer under JAX's transformations, whole and in chunks of queries."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import dsa
from testing import layers, tolerances

DOCUMENTS = np.asarray([[0] * 2 + [1] * 8, [1] * 4 + [2] * 6], np.int32)
# Chunks run in loops with a derivative rule of their own.
WAYS = {
  "whole": {"backend": dsa.backends.dot_product()},
  "chunks": {"backend": dsa.backends.gather(), "query_chunk_size": 4},
}
OVER_WAYS = parameterized.parameters(*WAYS)


def make(seed, **options):
  return layers.layer(seed, length=10, index_topk=3, **options)


def attention_of(way, config):
  attention = dsa.make_attention(config, **WAYS[way])
  return functools.partial(attention, segment_ids=jnp.asarray(DOCUMENTS))


def loss_of(attention):
  def loss(params, x):
    out = attention(params, x).out
    weights = jnp.cos(jnp.arange(out.size)).reshape(out.shape)
    return jnp.sum(out.astype(jnp.float32) * weights)

  return loss


@functools.cache
def answer(way, seed, dtype=jnp.float32):
  """The result and the gradients, compiled: what other ways must equal."""
  layer = make(seed, dtype=dtype)
  attention = attention_of(way, layer.config)
  result = jax.jit(attention)(layer.params, layer.x)
  grads = jax.jit(jax.grad(loss_of(attention), (0, 1)))(layer.params, layer.x)
  return layer, attention, result, grads


def assert_same(actual, wanted):
  """Selections exactly, outputs within tolerance."""
  np.testing.assert_array_equal(
    actual.selection.indices, wanted.selection.indices
  )
  tolerances.assert_output_close(actual.out, wanted.out, "float32")


def assert_same_gradients(actual, wanted):
  for one, other in zip(*map(jax.tree.leaves, (actual, wanted)), strict=True):
    tolerances.assert_close_by_norm(one, other, tolerances.GRADIENT["float32"])


class TransformTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    chex.clear_trace_counter()

  @OVER_WAYS
  def test_jit(self, way):
    layer, attention, wanted, _ = answer(way, 0)
    assert_same(attention(layer.params, layer.x), wanted)

  def test_ways_agree(self):
    _, _, whole, whole_grads = answer("whole", 0)
    _, _, chunks, chunks_grads = answer("chunks", 0)
    assert_same(chunks, whole)
    assert_same_gradients(chunks_grads, whole_grads)

  @OVER_WAYS
  def test_remat(self, way):
    layer, attention, _, wanted = answer(way, 0)
    loss = loss_of(jax.checkpoint(attention))
    actual = jax.jit(jax.grad(loss, (0, 1)))(layer.params, layer.x)
    assert_same_gradients(actual, wanted)

  @OVER_WAYS
  def test_vmap_over_inputs(self, way):
    layer, attention, wanted, _ = answer(way, 0)
    x = jnp.stack((2 * layer.x, layer.x))
    actual = jax.jit(jax.vmap(attention, in_axes=(None, 0)))(layer.params, x)
    assert_same(jax.tree.map(lambda lanes: lanes[1], actual), wanted)

  @OVER_WAYS
  def test_vmap_over_layers_with_gradients(self, way):
    layer, attention, _, wanted = answer(way, 0)
    other = make(1).params
    params = jax.tree.map(lambda *p: jnp.stack(p), other, layer.params)
    gradient = jax.vmap(jax.grad(loss_of(attention), (0, 1)), in_axes=(0, None))
    actual = jax.jit(gradient)(params, layer.x)
    assert_same_gradients(jax.tree.map(lambda g: g[1], actual), wanted)

  @OVER_WAYS
  def test_scan_over_layers(self, way):
    layer, attention, _, _ = answer(way, 0)
    stack = [make(seed).params for seed in (0, 1, 2)]

    def add_layer(x, params):
      result = attention(params, x)
      return x + result.out, result.selection

    @jax.jit
    @jax.value_and_grad
    def scanned(params):
      out, selections = jax.lax.scan(add_layer, layer.x, params)
      del selections
      return jnp.sum(jnp.square(out))

    @jax.value_and_grad
    def one_by_one(stack):
      x = layer.x
      for params in stack:
        x, _ = add_layer(x, params)
      return jnp.sum(jnp.square(x))

    stacked = jax.tree.map(lambda *p: jnp.stack(p), *stack)
    value, gradients = scanned(stacked)
    wanted_value, wanted = jax.jit(one_by_one)(stack)
    np.testing.assert_allclose(value, wanted_value, rtol=1e-5)
    assert_same_gradients(
      gradients, jax.tree.map(lambda *g: jnp.stack(g), *wanted)
    )

  @OVER_WAYS
  def test_equal_shapes_are_traced_once(self, way):
    config = make(0).config

    @jax.jit
    @chex.assert_max_traces(n=1)
    def attend(params, x, segment_ids):
      attention = dsa.make_attention(config, **WAYS[way])
      return attention(params, x, segment_ids=segment_ids).out

    for seed in (2, 3):
      layer = make(seed)
      attend(layer.params, layer.x, jnp.asarray(DOCUMENTS[:: 5 - 2 * seed]))

  @OVER_WAYS
  def test_no_tracer_leaks(self, way):
    layer = make(4)
    attention = attention_of(way, layer.config)
    with jax.checking_leaks():
      jax.eval_shape(
        jax.grad(loss_of(attention), (0, 1)), layer.params, layer.x
      )

  @OVER_WAYS
  def test_bfloat16(self, way):
    _, _, result, grads = answer(way, 5, jnp.bfloat16)
    layer = make(5, dtype=jnp.bfloat16)
    self.assertEqual(result.out.dtype, jnp.bfloat16)
    self.assertEqual(result.indexer_loss.dtype, jnp.float32)
    chex.assert_trees_all_equal_shapes_and_dtypes(
      grads, (layer.params, layer.x)
    )
    chex.assert_tree_all_finite((result.out, grads))


class AbstractTest(parameterized.TestCase):
  """Shapes without values: nothing is allocated and nothing is run."""

  @parameterized.product(
    preset=(dsa.deepseek_v32, dsa.glm_5),
    length=(1, 128, 4096),
    dtype=(jnp.float32, jnp.bfloat16),
  )
  def test_shapes(self, preset, length, dtype):
    config = preset()
    attention = dsa.make_attention(config, backend=dsa.backends.dot_product())
    x = jax.ShapeDtypeStruct((2, length, config.hidden_size), dtype)
    result = jax.eval_shape(attention, dsa.abstract_params(config, dtype), x)
    self.assertEqual((result.out.shape, result.out.dtype), (x.shape, dtype))
    self.assertEqual(result.indexer_loss.shape, ())
    indices = result.selection.indices
    self.assertEqual(indices.shape, (2, length, min(2048, length)))
    self.assertEqual(indices.dtype, jnp.int32)

  def test_gradients_have_the_tree_of_the_parameters(self):
    config = dsa.deepseek_v32()
    attention = dsa.make_attention(config, backend=dsa.backends.dot_product())
    params = dsa.abstract_params(config, jnp.bfloat16)
    x = jax.ShapeDtypeStruct((1, 256, config.hidden_size), jnp.bfloat16)
    gradients = jax.eval_shape(
      jax.grad(lambda *args: attention(*args).out.sum(), (0, 1)), params, x
    )
    chex.assert_trees_all_equal_shapes_and_dtypes(gradients, (params, x))


if __name__ == "__main__":
  absltest.main()
