"""Tests of the chunk loop and the gather loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from dsa import streaming
from dsa.softmax import masked_softmax

_WIDTH = 4


def _normal(seed, *shape):
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def _attend(weights, keys, queries):
  """A causal attention with a second output and an integer input."""
  x, order = queries
  visible = jnp.arange(keys.shape[1]) <= order[..., None]
  logits = jnp.einsum("btd,bsd->bts", x @ weights, keys)
  probs = masked_softmax(logits, visible)
  return jnp.einsum("bts,bsd->btd", probs, keys), jnp.sum(probs**2, axis=-1)


def _inputs(batch=2, length=37):
  order = jnp.broadcast_to(jnp.arange(length), (batch, length))
  weights = _normal(0, _WIDTH, _WIDTH)
  keys = _normal(1, batch, length, _WIDTH)
  return weights, keys, (_normal(2, batch, length, _WIDTH), order)


def _value(run, weights, keys, x, order):
  out, squares = run(weights, keys, (x, order))
  return jnp.sum(jnp.sin(out)) + jnp.sum(squares)


class MapChunksTest(parameterized.TestCase):
  @parameterized.product(chunk_size=(1, 5, 8, 36, 37, 64), causal=(True, False))
  def test_outputs_do_not_depend_on_the_chunks(self, chunk_size, causal):
    weights, keys, queries = _inputs()
    whole = _attend(weights, keys, queries)
    chunked = streaming.map_chunks(
      _attend, weights, keys, queries, chunk_size=chunk_size, causal=causal
    )
    for actual, wanted in zip(chunked, whole, strict=True):
      np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5)

  @parameterized.product(chunk_size=(1, 5, 8, 36), causal=(True, False))
  def test_gradients_are_those_of_autodiff(self, chunk_size, causal):
    weights, keys, (x, order) = _inputs()
    run = functools.partial(
      streaming.map_chunks, _attend, chunk_size=chunk_size, causal=causal
    )
    arguments = weights, keys, x, order
    wanted = jax.grad(functools.partial(_value, _attend), (0, 1, 2))(*arguments)
    actual = jax.grad(functools.partial(_value, run), (0, 1, 2))(*arguments)
    for a, w in zip(actual, wanted, strict=True):
      error = jnp.linalg.norm(a - w) / jnp.linalg.norm(w)
      self.assertLess(error, 1e-5)

  def test_causal_chunks_are_given_few_keys_past_their_last_query(self):
    lengths = []

    def record(weights, keys, queries):
      del weights
      lengths.append(keys.shape[1])
      return queries

    x = jnp.zeros((1, 160, 1))
    streaming.map_chunks(record, None, x, x, chunk_size=10, causal=True)
    # Eight groups of two chunks: 20, 40, ..., 160 keys.
    self.assertEqual(lengths, list(range(20, 161, 20)))
    pairs = sum(2 * 10 * length for length in lengths)
    self.assertLess(pairs, 1.15 * 160 * 160 / 2)

  def test_gradients_of_many_bfloat16_chunks_add_up_in_float32(self):
    # In bfloat16 the sum would stop growing at 256 + 1 = 256.
    weight = jnp.ones((1,), jnp.bfloat16)
    x = jnp.ones((1, 1000, 1), jnp.bfloat16)
    run = functools.partial(
      streaming.map_chunks,
      lambda weight, keys, x: weight * x + keys[:, :1],
      chunk_size=1,
      causal=False,
    )
    d_weight, d_key = jax.grad(
      lambda w, k: jnp.sum(run(w, k, x).astype(jnp.float32)), (0, 1)
    )(weight, jnp.ones((1, 1, 1), jnp.bfloat16))
    self.assertEqual(d_weight[0], 1000)
    self.assertEqual(d_key[0, 0, 0], 1000)

  def test_backward_keeps_no_more_than_the_inputs(self):
    weights, keys, (x, order) = _inputs(batch=1, length=64)
    _, pullback = jax.vjp(
      lambda x: streaming.map_chunks(
        _attend, weights, keys, (x, order), chunk_size=8, causal=True
      ),
      x,
    )
    kept = sum(leaf.size for leaf in jax.tree.leaves(pullback))
    inputs = weights.size + keys.size + x.size + order.size
    self.assertLessEqual(kept, inputs)


def _sum_rows(queries, rows, valid):
  table, other = rows
  del valid
  scores = jnp.einsum("btd,btkd->btk", queries, table)
  return jnp.tanh(scores) @ jnp.ones(scores.shape[-1]), jnp.sum(other, axis=2)


class MapGatheredTest(parameterized.TestCase):
  def _run(self, tables, indices, queries, block_size):
    return streaming.map_gathered(
      _sum_rows, tables, indices, queries, block_size=block_size
    )

  def _tables(self):
    return _normal(3, 2, 11, _WIDTH), _normal(4, 2, 11, 2, 3)

  def _indices(self):
    rng = np.random.default_rng(5)
    return jnp.asarray(rng.integers(-1, 11, size=(2, 9, 6)), jnp.int32)

  def _wanted(self, tables, indices, queries):
    """Every row by a one-hot product."""
    hot = jax.nn.one_hot(indices, 11)
    rows = [jnp.einsum("btks,bs...->btk...", hot, t) for t in tables]
    return _sum_rows(queries, rows, None)

  @parameterized.parameters(1, 2, 4, 9, 100)
  def test_outputs_are_those_of_a_one_hot_product(self, block_size):
    arguments = self._tables(), self._indices(), _normal(6, 2, 9, _WIDTH)
    actual = self._run(*arguments, block_size)
    for a, w in zip(actual, self._wanted(*arguments), strict=True):
      np.testing.assert_allclose(a, w, rtol=1e-5, atol=1e-5)

  @parameterized.parameters(1, 2, 4, 9)
  def test_gradients_are_those_of_a_one_hot_product(self, block_size):
    tables, indices = self._tables(), self._indices()
    queries = _normal(6, 2, 9, _WIDTH)

    def value(run, tables, queries):
      first, second = run(tables, indices, queries)
      return jnp.sum(jnp.sin(first)) + jnp.sum(jnp.cos(second))

    blocks = functools.partial(self._run, block_size=block_size)
    wanted = jax.grad(functools.partial(value, self._wanted), (0, 1))
    actual = jax.grad(functools.partial(value, blocks), (0, 1))
    for a, w in zip(
      jax.tree.leaves(actual(tables, queries)),
      jax.tree.leaves(wanted(tables, queries)),
      strict=True,
    ):
      np.testing.assert_allclose(a, w, rtol=1e-4, atol=1e-5)

  def test_minus_one_neither_reads_nor_writes_a_row(self):
    tables = tuple(t.at[:, -1].set(jnp.nan) for t in self._tables())
    indices = jnp.minimum(self._indices(), 9)
    queries = _normal(6, 2, 9, _WIDTH)

    def value(tables):
      first, second = self._run(tables, indices, queries, 2)
      return jnp.sum(first) + jnp.sum(second)

    total, grads = jax.value_and_grad(value)(tables)
    self.assertTrue(jnp.isfinite(total))
    for grad in grads:
      np.testing.assert_array_equal(grad[:, -1], 0)
      self.assertTrue(jnp.all(jnp.isfinite(grad)))

  def test_table_gradients_add_up_in_float32(self):
    table = jnp.ones((1, 2, 1), jnp.bfloat16)
    indices = jnp.zeros((1, 1000, 1), jnp.int32)
    queries = jnp.ones((1, 1000, 1), jnp.bfloat16)

    def value(table):
      out = streaming.map_gathered(
        lambda q, rows, valid: jnp.where(valid, q * rows[..., 0], 0),
        table,
        indices,
        queries,
        block_size=8,
      )
      return jnp.sum(out.astype(jnp.float32))

    grad = jax.grad(value)(table)
    np.testing.assert_array_equal(grad[0, :, 0], [1000, 0])

  def test_a_block_fits_the_cache_and_the_queries(self):
    table = jnp.zeros((2, 100, 1024), jnp.float32)
    block_size = streaming.gathered_block_size
    many = jnp.zeros((2, 64, 64), jnp.int32)
    self.assertEqual(block_size(table, many), 32)  # 20 MiB / (2 * 64 * 4 KiB)
    self.assertEqual(block_size(table, many[:, :3]), 3)
    self.assertEqual(block_size(table, jnp.zeros((2, 4, 4096), jnp.int32)), 1)


if __name__ == "__main__":
  absltest.main()
