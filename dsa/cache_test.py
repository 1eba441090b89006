"""The cached layer: any split is one pass; rows, padding, overflow, buffers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import dsa
from testing import layers, oracle, tolerances

TOPK = 3
LENGTH, MAX_LENGTH = 12, 16
BACKENDS = {
  "gather": dsa.backends.gather,
  "dot_product": dsa.backends.dot_product,
}


def setUpModule():
  # Each program runs a few times: what takes the time is compiling it.
  jax.config.update("jax_disable_most_optimizations", True)


def make(seed, **options):
  return layers.layer(seed, **{"index_topk": TOPK, "length": LENGTH, **options})


@functools.cache
def compiled(config, backend="gather"):
  return jax.jit(dsa.make_cached_attention(config, backend=BACKENDS[backend]()))


@functools.cache
def one_pass(config):
  return jax.jit(dsa.make_attention(config, backend=dsa.backends.gather()))


def empty(layer, **options):
  return dsa.init_cache(
    layer.config, layer.x.shape[0], MAX_LENGTH, layer.x.dtype, **options
  )


def serve(layer, sizes, cache=None, backend="gather"):
  """Appends x in pieces of the given sizes, all rows alike."""
  cache = empty(layer) if cache is None else cache
  outs, indices, start = [], [], 0
  for size in sizes:
    x = layer.x[:, start : start + size]
    # Always passed, so that programs are shared.
    num_new = jnp.full(x.shape[0], size, jnp.int32)
    result = compiled(layer.config, backend)(
      layer.params, x, cache, num_new=num_new
    )
    cache = result.cache
    outs.append(result.out)
    indices.append(result.selection.indices)
    start += size
  return dsa.CachedResult(
    jnp.concatenate(outs, 1), cache, dsa.Selection(jnp.concatenate(indices, 1))
  )


def assert_same(actual, wanted):
  jax.tree.map(np.testing.assert_array_equal, actual, wanted)


class SplitTest(parameterized.TestCase):
  @parameterized.product(
    sizes=([1] * LENGTH, [5, 1, 5, 1], [12]),
    backend_and_dtype=(
      ("gather", jnp.float32),
      ("gather", jnp.bfloat16),
      ("dot_product", jnp.float32),
    ),
  )
  def test_any_split_is_one_pass(self, sizes, backend_and_dtype):
    backend, dtype = backend_and_dtype
    layer = make(0, dtype=dtype)
    wanted = one_pass(layer.config)(layer.params, layer.x)
    actual = serve(layer, sizes, backend=backend)
    assert_same(actual.selection, wanted.selection)
    tolerances.assert_output_close(
      actual.out, wanted.out.astype(jnp.float32), dtype
    )
    self.assertEqual(actual.out.dtype, dtype)
    assert_same(actual.cache.length, [LENGTH] * 2)
    assert_same(actual.cache.overflowed, [False] * 2)

  def test_it_is_the_oracles_layer(self):
    layer = make(1, indexer_rope_interleave=True)
    wanted = oracle.dsa_layer(
      *layers.oracle_params(layer.params),
      layer.x,
      layer.config,
      positions=np.broadcast_to(np.arange(LENGTH), (2, LENGTH)),
    )
    actual = serve(layer, [5, 1, 5, 1])
    assert_same(actual.selection.mask(LENGTH), wanted.mask)
    tolerances.assert_output_close(actual.out, wanted.out, "float32")

  def test_a_step_compiles_once_for_all_lengths(self):
    layer = make(2)
    traces = []
    backend = dsa.backends.gather()

    def counted(inputs, selection, *, scale):
      traces.append(inputs.q_nope.shape)
      return backend(inputs, selection, scale=scale)

    step = jax.jit(dsa.make_cached_attention(layer.config, backend=counted))
    cache = empty(layer)
    for at in range(LENGTH):
      cache = step(layer.params, layer.x[:, at : at + 1], cache).cache
    self.assertLen(traces, 1)


class RowsTest(parameterized.TestCase):
  def test_rows_of_different_lengths_are_each_a_sequence_of_its_own(self):
    layer = make(3)
    wanted = serve(layer, [12])
    cache, done = empty(layer), np.zeros(2, int)
    for num_new in ([5, 2], [0, 4], [3, 0], [1, 5], [3, 1]):
      x = np.full((2, 5, layer.x.shape[2]), np.nan, np.float32)
      for row, count in enumerate(num_new):
        x[row, :count] = layer.x[row, done[row] : done[row] + count]
      result = compiled(layer.config)(
        layer.params, jnp.asarray(x), cache, num_new=jnp.asarray(num_new)
      )
      for row, count in enumerate(num_new):
        at = slice(done[row], done[row] + count)
        tolerances.assert_output_close(
          result.out[row, :count], wanted.out[row, at], "float32"
        )
        assert_same(
          result.selection.indices[row, :count],
          wanted.selection.indices[row, at],
        )
        assert_same(result.out[row, count:], np.zeros((5 - count, 24)))
        self.assertTrue(np.all(result.selection.indices[row, count:] == -1))
      cache, done = result.cache, done + num_new
    assert_same(cache.length, [12, 12])
    for actual, kept in zip(cache[:3], wanted.cache[:3], strict=True):
      np.testing.assert_allclose(actual, kept, rtol=1e-5, atol=1e-6)

  def test_all_tokens_are_new_by_default(self):
    layer = make(3)
    actual = compiled(layer.config)(layer.params, layer.x, empty(layer))
    assert_same(actual, serve(layer, [12]))

  @parameterized.parameters(-1, 13)
  def test_num_new_is_kept_between_none_and_all(self, num_new):
    layer = make(3)
    result = compiled(layer.config)(
      layer.params, layer.x, empty(layer), num_new=jnp.full(2, num_new)
    )
    assert_same(result.cache.length, [np.clip(num_new, 0, 12)] * 2)


class GradientTest(parameterized.TestCase):
  def test_it_is_that_of_one_pass_whatever_lies_in_padding(self):
    layer = make(16)
    cotangent = np.random.default_rng(0).normal(size=layer.x.shape)

    def one_pass_loss(params, x):
      attention = dsa.make_attention(
        layer.config, backend=dsa.backends.gather()
      )
      return jnp.sum(attention(params, x).out * cotangent)

    def cached_loss(params, x):
      attention = dsa.make_cached_attention(
        layer.config, backend=dsa.backends.gather()
      )
      result = attention(
        params,
        jnp.concatenate((x, jnp.full_like(x[:, :4], jnp.nan)), axis=1),
        empty(layer),
        num_new=jnp.full(2, LENGTH),
      )
      return jnp.sum(result.out[:, :LENGTH] * cotangent)

    wanted, actual = (
      jax.jit(jax.grad(loss, (0, 1)))(layer.params, layer.x)
      for loss in (one_pass_loss, cached_loss)
    )
    jax.tree.map(
      lambda a, w: tolerances.assert_close_by_norm(
        a, w, tolerances.GRADIENT["float32"]
      ),
      actual,
      wanted,
    )


class BufferTest(parameterized.TestCase):
  @parameterized.product(backend=tuple(BACKENDS), value=(np.nan, np.inf))
  def test_what_lay_in_unused_places_reaches_nothing(self, backend, value):
    layer = make(4)
    clean = serve(layer, [5, 1, 5], backend=backend)
    filled = empty(layer)
    filled = filled._replace(
      **{
        name: jnp.full_like(getattr(filled, name), value)
        for name in ("kv_latent", "k_rope", "index_keys")
      }
    )
    dirty = serve(layer, [5, 1, 5], filled, backend=backend)
    assert_same(dirty.out, clean.out)
    assert_same(dirty.selection, clean.selection)
    assert_same(dirty.cache.kv_latent[:, :11], clean.cache.kv_latent[:, :11])
    # What is not written stays as it was.
    assert_same(dirty.cache.kv_latent[:, 11:], filled.kv_latent[:, 11:])

  def test_a_nan_shows_in_those_alone_that_selected_it(self):
    layer = make(5)
    poisoned = layer._replace(x=layer.x.at[0, 2].set(jnp.nan))
    clean, dirty = serve(layer, [5, 1, 5, 1]), serve(poisoned, [5, 1, 5, 1])
    assert_same(dirty.out[1], clean.out[1])
    selects = np.any(dirty.selection.indices[0] == 2, axis=-1)
    assert_same(np.isnan(dirty.out[0]).all(-1), selects)
    self.assertTrue(selects[2] and not selects.all())

  def test_a_donated_cache_is_updated_in_place(self):
    layer = make(6, kv_lora_rank=64)
    step = jax.jit(
      dsa.make_cached_attention(layer.config, backend=dsa.backends.gather()),
      donate_argnums=2,
    )
    cache = dsa.init_cache(layer.config, 2, 1 << 14)
    size = sum(x.nbytes for x in jax.tree.leaves(cache))
    x = layer.x[:, :1]
    memory = step.lower(layer.params, x, cache).compile().memory_analysis()
    self.assertGreaterEqual(memory.alias_size_in_bytes, size)
    # Scores of all keys, and no copy of a buffer.
    self.assertLess(memory.temp_size_in_bytes, size / 4)
    at = cache.kv_latent.unsafe_buffer_pointer()
    result = step(layer.params, x, cache)
    self.assertTrue(cache.kv_latent.is_deleted())
    self.assertEqual(result.cache.kv_latent.unsafe_buffer_pointer(), at)
    assert_same(result.out, serve(layer, [1]).out)

  def test_it_rounds_to_the_dtype_of_the_cache(self):
    layer = make(7)
    cache = dsa.init_cache(layer.config, 2, MAX_LENGTH, jnp.bfloat16)
    one, more = (serve(layer, sizes, cache) for sizes in ([12], [5, 1, 5, 1]))
    self.assertEqual(one.cache.kv_latent.dtype, jnp.bfloat16)
    self.assertEqual(one.out.dtype, jnp.float32)
    assert_same(one.selection, more.selection)
    tolerances.assert_output_close(
      one.out, serve(layer, [12]).out, jnp.bfloat16
    )


class OverflowTest(parameterized.TestCase):
  def test_what_does_not_fit_is_refused_visibly(self):
    layer = make(8)
    full = serve(layer, [12])
    cache = full.cache._replace(length=jnp.asarray([12, 10]))
    # Row 0 has room for four of the five, row 1 for all.
    result = compiled(layer.config)(
      layer.params, layer.x[:, :5], cache, num_new=jnp.asarray([5, 5])
    )
    assert_same(result.cache.length, [16, 15])
    assert_same(result.cache.overflowed, [True, False])
    assert_same(result.out[0, 4], np.zeros(24))
    self.assertTrue(np.all(result.selection.indices[0, 4] == -1))
    fitting = compiled(layer.config)(
      layer.params, layer.x[:, :5], cache, num_new=jnp.asarray([4, 5])
    )
    assert_same(result.out, fitting.out)
    assert_same(
      result.cache._replace(overflowed=None),
      fitting.cache._replace(overflowed=None),
    )
    self.assertFalse(np.any(fitting.cache.overflowed))

  def test_a_full_row_stays_as_it_is_and_remembers(self):
    layer = make(9)
    cache = empty(layer)._replace(length=jnp.asarray([16, 3]))
    step = compiled(layer.config)
    first = step(
      layer.params, layer.x[:, :1], cache, num_new=jnp.asarray([1, 1])
    )
    assert_same(first.cache.kv_latent[0], cache.kv_latent[0])
    assert_same(first.cache.index_keys[0], cache.index_keys[0])
    assert_same(first.cache.length, [16, 4])
    assert_same(first.cache.overflowed, [True, False])
    self.assertFalse(np.any(first.out[0]))
    self.assertTrue(np.any(first.out[1]))
    second = step(
      layer.params, layer.x[:, :1], first.cache, num_new=jnp.asarray([0, 1])
    )
    assert_same(second.cache.overflowed, [True, False])

  def test_a_row_may_be_filled_to_the_last_place(self):
    layer = make(10, length=MAX_LENGTH)
    result = serve(layer, [MAX_LENGTH])
    wanted = one_pass(layer.config)(layer.params, layer.x)
    assert_same(result.cache.overflowed, [False, False])
    assert_same(result.selection, wanted.selection)
    tolerances.assert_output_close(result.out, wanted.out, "float32")


class GivenSelectionTest(parameterized.TestCase):
  """A layer without an indexer, as GLM-5's shared layers."""

  @parameterized.parameters(([12],), ([5, 1, 5, 1],))
  def test_it_attends_to_what_another_layer_selected(self, sizes):
    layer, shared = make(11), make(12)
    params = shared.params._replace(indexer=None)
    wanted = one_pass(layer.config)(layer.params, layer.x)
    wanted = one_pass(layer.config)(
      params, shared.x, selection=wanted.selection
    )
    caches, start = (empty(layer), empty(shared, index_keys=False)), 0
    self.assertIsNone(caches[1].index_keys)
    step = compiled(layer.config)
    for size in sizes:
      at = slice(start, start + size)
      first = step(layer.params, layer.x[:, at], caches[0])
      second = step(
        params, shared.x[:, at], caches[1], selection=first.selection
      )
      assert_same(second.selection, first.selection)
      tolerances.assert_output_close(second.out, wanted.out[:, at], "float32")
      caches, start = (first.cache, second.cache), start + size

  def test_what_a_token_may_not_see_is_dropped_from_it(self):
    layer = make(13)
    cache = serve(layer, [5]).cache
    everything = np.broadcast_to(np.arange(MAX_LENGTH), (2, 5, MAX_LENGTH))
    result = compiled(layer.config)(
      layer.params,
      layer.x[:, 5:10],
      cache,
      num_new=jnp.asarray([5, 3]),
      selection=dsa.Selection(jnp.asarray(everything, jnp.int32)),
    )
    visible = np.arange(MAX_LENGTH) <= np.arange(5, 10)[:, None]
    assert_same(result.selection.mask(MAX_LENGTH)[0], visible)
    assert_same(result.selection.mask(MAX_LENGTH)[1, :3], visible[:3])
    self.assertFalse(np.any(result.selection.mask(MAX_LENGTH)[1, 3:]))

  def test_keys_are_kept_for_later_calls_that_select(self):
    layer = make(14)
    given = dsa.Selection(jnp.zeros((2, 5, TOPK), jnp.int32))
    cache = compiled(layer.config)(
      layer.params, layer.x[:, :5], empty(layer), selection=given
    ).cache
    assert_same(cache.index_keys, serve(layer, [5]).cache.index_keys)


if __name__ == "__main__":
  absltest.main()
