"""The layer under JAX's transformations, whole and in chunks of queries."""

import functools
import operator

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


def setUpModule():
  # Each program runs once or twice: what takes the time is compiling it.
  jax.config.update("jax_disable_most_optimizations", True)


def make(seed, **options):
  return layers.layer(seed, length=10, index_topk=3, **options)


def attention_of(way, config):
  attention = dsa.make_attention(config, **WAYS[way])
  return functools.partial(attention, segment_ids=jnp.asarray(DOCUMENTS))


def pull_back(attention, params, x, cotangent):
  """Gradients of sum(out * cotangent) by params and x, and the result."""

  def out_of(params, x):
    result = attention(params, x)
    return result.out, result

  _, pullback, result = jax.vjp(out_of, params, x, has_aux=True)
  return pullback(cotangent), result


def cotangent_of(x):
  return jnp.cos(jnp.arange(x.size)).reshape(x.shape).astype(x.dtype)


@functools.cache
def compiled(way):
  """`pull_back` of a layer of the usual sizes, as one program."""
  attention = attention_of(way, make(0).config)
  return jax.jit(functools.partial(pull_back, attention))


@functools.cache
def answer(way, seed, dtype=jnp.float32):
  """The result and the gradients, compiled: what other ways must equal."""
  layer = make(seed, dtype=dtype)
  cotangent = cotangent_of(layer.x)
  grads, result = compiled(way)(layer.params, layer.x, cotangent)
  return layer, attention_of(way, layer.config), result, grads


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

  def test_jit(self):
    layer, attention, wanted, _ = answer("whole", 0)
    assert_same(attention(layer.params, layer.x), wanted)

  def test_ways_agree(self):
    _, _, whole, whole_grads = answer("whole", 0)
    _, _, chunks, chunks_grads = answer("chunks", 0)
    assert_same(chunks, whole)
    assert_same_gradients(chunks_grads, whole_grads)

  @OVER_WAYS
  def test_remat(self, way):
    layer, attention, _, wanted = answer(way, 0)
    gradient = functools.partial(pull_back, jax.checkpoint(attention))
    actual, _ = jax.jit(gradient)(layer.params, layer.x, cotangent_of(layer.x))
    assert_same_gradients(actual, wanted)

  @OVER_WAYS
  def test_vmap_over_layers_and_inputs(self, way):
    layer, attention, result, wanted = answer(way, 0)
    cotangent = cotangent_of(layer.x)
    lanes = jax.tree.map(
      lambda *arrays: jnp.stack(arrays),
      (make(1).params, 2 * layer.x, cotangent),
      (layer.params, layer.x, cotangent),
    )
    gradient = functools.partial(pull_back, attention)
    lanes = jax.jit(jax.vmap(gradient))(*lanes)
    actual, same_result = jax.tree.map(lambda lane: lane[1], lanes)
    assert_same(same_result, result)
    assert_same_gradients(actual, wanted)

  @OVER_WAYS
  def test_scan_over_layers(self, way):
    layer, attention, _, _ = answer(way, 0)
    stack = [make(seed).params for seed in (0, 1, 2)]
    cotangent = cotangent_of(layer.x)

    def add_layer(x, params):
      return x + attention(params, x).out, x

    @jax.jit
    def scanned(params):
      x, pullback, xs = jax.vjp(
        lambda params: jax.lax.scan(add_layer, layer.x, params),
        params,
        has_aux=True,
      )
      return pullback(cotangent)[0], (*xs, x)

    gradients, xs = scanned(jax.tree.map(lambda *p: jnp.stack(p), *stack))
    by_x = cotangent
    for i in (2, 1, 0):
      (by_params, by_residual), result = compiled(way)(stack[i], xs[i], by_x)
      tolerances.assert_output_close(xs[i] + result.out, xs[i + 1], "float32")
      of_layer = jax.tree.map(operator.itemgetter(i), gradients)
      assert_same_gradients(of_layer, by_params)
      by_x += by_residual

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
        functools.partial(pull_back, attention), layer.params, layer.x, layer.x
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

  @parameterized.product(preset=(dsa.deepseek_v32, dsa.glm_5), length=(1, 4096))
  def test_shapes(self, preset, length):
    config, dtype = preset(), jnp.bfloat16
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
