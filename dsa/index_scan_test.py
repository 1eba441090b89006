"""Selecting: the same bits however a sequence is cut, at the cost of the keys.

Compiled as it is used: what is switched off elsewhere decides bits.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from dsa import index_scan, indexer, mla, selection
from testing import layers, tolerances

# Where shapes decide which kernels multiply: narrow, wide, one head.
LAYERS = {
  "narrow": {"length": 90},
  "wide": {
    "length": 150,
    "batch": 1,
    "hidden_size": 256,
    "q_lora_rank": 512,
    "index_n_heads": 16,
    "index_head_dim": 128,
  },
  "one_head": {"length": 150, "batch": 1, "index_n_heads": 1},
}
CASES = (
  ("narrow", jnp.float32),
  ("wide", jnp.float32),
  ("wide", jnp.bfloat16),
  ("one_head", jnp.float32),
  ("one_head", jnp.bfloat16),
)
# First token and the one after the last, of pieces that are compared.
PIECES = ((0, 1), (7, 9), (33, 90))


@functools.cache
def make(name, dtype):
  return layers.layer(0, dtype=dtype, **LAYERS[name])


@functools.partial(jax.jit, static_argnames="config")
def project(params, x, positions, *, config):
  """What is computed of each token alone: q_latent, q, w and k."""
  q_latent = index_scan.query_latent(params.mla, x, config)
  q, weights = index_scan.index_queries(
    params.indexer, x, q_latent, positions, config
  )
  keys = index_scan.index_keys(params.indexer, x, positions, config)
  return q_latent, q, weights, keys


def projected(name, dtype, piece=slice(None), run=project):
  layer = make(name, dtype)
  positions = jnp.broadcast_to(jnp.arange(layer.x.shape[1]), layer.x.shape[:2])
  return run(
    layer.params, layer.x[:, piece], positions[:, piece], config=layer.config
  )


def assert_same_bits(actual, wanted):
  jax.tree.map(np.testing.assert_array_equal, actual, wanted)


class ProjectionTest(parameterized.TestCase):
  @parameterized.product(name=tuple(LAYERS), dtype=(jnp.float32, jnp.bfloat16))
  def test_bits_do_not_depend_on_the_number_of_tokens(self, name, dtype):
    whole = projected(name, dtype)
    for first, last in PIECES:
      piece = slice(first, last)
      wanted = jax.tree.map(lambda x, at=piece: x[:, at], whole)
      assert_same_bits(projected(name, dtype, piece), wanted)

  def test_bits_do_not_depend_on_jit(self):
    piece = slice(2, 5)
    actual = projected("narrow", jnp.float32, piece, project.__wrapped__)
    assert_same_bits(actual, projected("narrow", jnp.float32, piece))

  def test_they_are_the_indexers(self):
    layer = make("narrow", jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(90), (2, 90))
    q_latent = mla.query_latent(layer.params.mla, layer.x, layer.config)
    params, config = layer.params.indexer, layer.config
    wanted = (
      q_latent,
      indexer.index_queries(params, q_latent, positions, config),
      indexer.index_head_weights(params, layer.x, config),
      indexer.index_keys(params, layer.x, positions, config),
    )
    for actual, array in zip(
      projected("narrow", jnp.float32), wanted, strict=True
    ):
      tolerances.assert_output_close(actual, array, "float32")


class ScanTest(parameterized.TestCase):
  @parameterized.product(name=tuple(LAYERS), dtype=(jnp.float32, jnp.bfloat16))
  def test_bits_do_not_depend_on_the_queries_or_the_buffer(self, name, dtype):
    _, q, weights, keys = projected(name, dtype)
    length = keys.shape[1]
    scan = jax.jit(index_scan.scan, static_argnames="length")
    whole = scan(q[:, :128], weights[:, :128], keys, length=length)
    unused = jnp.full_like(keys, jnp.nan)
    buffer = jnp.concatenate((keys, unused, unused, unused), axis=1)
    for first, last in PIECES:
      at = slice(first, last)
      actual = scan(
        q[:, at], weights[:, at], buffer, jnp.int32(last), length=length + 100
      )
      assert_same_bits(actual[:, :, :last], whole[:, at, :last])
      alone = scan(q[:, at], weights[:, at], keys[:, :last], length=last)
      assert_same_bits(alone, whole[:, at, :last])

  def test_it_scores_in_tiles_that_need_not_divide_the_keys(self):
    rng = np.random.default_rng(0)
    q, weights, keys = (
      jnp.asarray(rng.normal(size=shape), jnp.float32)
      for shape in ((1, 128, 16, 8), (1, 128, 16), (1, 2500, 8))
    )
    scan = functools.partial(index_scan.scan, q, weights, keys)
    wanted = np.einsum(
      "tis,ti->ts",
      np.maximum(np.einsum("tid,sd->tis", q[0], keys[0]), 0),
      weights[0],
    )
    actual = scan(length=2500)
    np.testing.assert_allclose(actual[0], wanted, rtol=1e-4, atol=1e-4)
    some = scan(jnp.int32(1100), length=2500)
    assert_same_bits(some[:, :, :1100], actual[:, :, :1100])
    # Only whole tiles beyond were left out.
    self.assertFalse(np.any(some[:, :, 2048:]))


class SelectTest(parameterized.TestCase):
  @parameterized.parameters(1, 40, 1500, 2600)
  def test_it_is_the_top_k_of_the_scores(self, num_keys):
    layer = make("one_head", jnp.float32)
    rng = np.random.default_rng(1)
    keys = jnp.asarray(rng.normal(size=(1, 2600, 12)), jnp.float32)
    order = jnp.asarray([[max(num_keys - 2, 0), num_keys - 1]], jnp.int32)
    x = layer.x[:, :2]
    tokens = index_scan.Tokens(
      x,
      index_scan.query_latent(layer.params.mla, x, layer.config),
      order,
      jnp.asarray([[0 if num_keys == 1 else 1, 1]]),
      order,
    )
    ones = jnp.ones((1, 2600), jnp.int32)
    run = functools.partial(
      index_scan.select,
      layer.params.indexer,
      tokens,
      keys.at[:, num_keys:].set(jnp.nan),
      ones,
      config=layer.config,
      width=layer.config.index_topk + 2,
    )
    actual = run(jnp.int32(num_keys))
    q, weights = index_scan.index_queries(
      layer.params.indexer, x, tokens.q_latent, order, layer.config
    )
    visible = selection.visible_mask(
      tokens.segment_ids, ones, first_query=order[:, 0]
    )
    wanted = selection.topk_indices(
      index_scan.scan(q, weights, keys, length=2600),
      layer.config.index_topk,
      visible,
    )
    fill = [(0, 0), (0, 0), (0, 2)]
    assert_same_bits(actual, jnp.pad(wanted, fill, constant_values=-1))
    assert_same_bits(run(), actual)


class OverPrefixesTest(parameterized.TestCase):
  @parameterized.parameters(
    (0, 640), (640, 640), (641, 1280), (2500, 2500), (None, 2500)
  )
  def test_the_smallest_that_holds_all_keys(self, num_keys, wanted):
    @jax.jit
    def run(num_keys):
      return index_scan.over_prefixes(jnp.int32, num_keys, 2500)

    num_keys = None if num_keys is None else jnp.int32(num_keys)
    self.assertEqual(run(num_keys), wanted)

  @parameterized.parameters(1, 1024, 1025, 65536, 100_001)
  def test_less_than_twice_the_keys_there_are(self, length):
    seen = []
    jax.eval_shape(
      lambda n: index_scan.over_prefixes(
        lambda prefix: seen.append(prefix) or n, n, length
      ),
      jnp.int32(1),
    )
    self.assertEqual(seen, sorted(seen))
    self.assertEqual(seen[-1], length)
    self.assertLessEqual(seen[0], 1024)
    for shorter, longer in zip(seen[:-1], seen[1:], strict=True):
      self.assertLessEqual(longer, 2 * shorter)


if __name__ == "__main__":
  absltest.main()
