"""The gather backend against the conformance kit, and its own options."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from dsa import conformance
from dsa.backends.dot_product import dot_product
from dsa.backends.gather import gather
from dsa.mla import MLAInputs
from dsa.selection import Selection


class GatherInBlocksOfThreeTest(conformance.BackendConformanceTest):
  def make_backend(self):
    return gather(block_size=3)


def _inputs(seed, batch=2, queries=6, keys=16, dtype=jnp.float32):
  rng = np.random.default_rng(seed)

  def normal(*shape):
    return jnp.asarray(rng.standard_normal(shape), dtype)

  return MLAInputs(
    q_nope=normal(batch, queries, 3, 4),
    q_rope=normal(batch, queries, 3, 2),
    kv_latent=normal(batch, keys, 5),
    k_rope=normal(batch, keys, 2),
    w_uk=normal(5, 3, 4),
    w_uv=normal(5, 3, 6),
  )


def _random_selection(seed, batch=2, queries=6, keys=16, width=7):
  rng = np.random.default_rng(seed)
  indices = np.full((batch, queries, width), -1)
  for b in range(batch):
    for t in range(queries):
      count = rng.integers(0, width + 1)
      indices[b, t, :count] = np.sort(rng.permutation(keys)[:count])
  return Selection(jnp.asarray(indices, jnp.int32))


class GatherOptionsTest(parameterized.TestCase):
  def test_leading_minus_ones_change_nothing(self):
    inputs = _inputs(0)
    keys = jnp.broadcast_to(jnp.arange(16, dtype=jnp.int32), (2, 6, 16))
    padded = jnp.concatenate((jnp.full_like(keys, -1), keys), axis=-1)
    dense = dot_product()(inputs, Selection(keys), scale=0.5)
    out = gather()(inputs, Selection(padded), scale=0.5)
    np.testing.assert_allclose(out, dense, rtol=1e-5, atol=1e-5)

  def test_nothing_selected_gives_zero(self):
    selection = Selection(jnp.full((2, 6, 32), -1, jnp.int32))
    out = gather()(_inputs(0), selection, scale=0.5)
    np.testing.assert_array_equal(out, 0)

  def test_each_batch_row_has_the_gradients_of_its_solo_run(self):
    inputs, selection = _inputs(1), _random_selection(1)
    cotangent = jnp.asarray(
      np.random.default_rng(2).standard_normal((2, 6, 3, 6)), jnp.float32
    )

    def latent_gradient(rows):
      mine = inputs._replace(
        q_nope=inputs.q_nope[rows],
        q_rope=inputs.q_rope[rows],
        k_rope=inputs.k_rope[rows],
      )

      def value(kv_latent):
        out = gather()(
          mine._replace(kv_latent=kv_latent),
          Selection(selection.indices[rows]),
          scale=0.5,
        )
        return jnp.sum(out * cotangent[rows])

      return jax.grad(value)(inputs.kv_latent[rows])

    together = latent_gradient(slice(None))
    for row in (0, 1):
      alone = latent_gradient(slice(row, row + 1))
      np.testing.assert_allclose(together[row], alone[0], rtol=1e-5, atol=1e-6)
      chosen = selection.mask(16)[row].any(axis=0)
      np.testing.assert_array_equal(together[row][~chosen], 0)

  def test_an_empty_row_has_finite_gradients_under_debug_nans(self):
    selection = _random_selection(3)
    selection = Selection(selection.indices.at[1, 2].set(-1))
    with jax.debug_nans(True):
      grads = jax.grad(
        lambda inputs: jnp.sum(gather()(inputs, selection, scale=0.5) ** 2)
      )(_inputs(3))
    for grad in grads:
      self.assertTrue(jnp.all(jnp.isfinite(grad)))

  def test_the_last_of_65536_queries_is_right(self):
    queries = 65536
    inputs = _inputs(4, batch=1, queries=1, keys=8)
    many = inputs._replace(
      q_nope=jnp.tile(inputs.q_nope, (1, queries, 1, 1)).at[:, :-1].set(0),
      q_rope=jnp.tile(inputs.q_rope, (1, queries, 1, 1)).at[:, :-1].set(0),
    )
    chosen = jnp.array([[[0, 3, 7]]], jnp.int32)
    out = gather()(
      many, Selection(jnp.tile(chosen, (1, queries, 1))), scale=1.0
    )
    alone = dot_product()(inputs, Selection(chosen), scale=1.0)
    np.testing.assert_allclose(out[:, -1:], alone, rtol=1e-5, atol=1e-5)

  @parameterized.parameters(1, 4, 6)
  def test_probabilities_are_those_of_the_definition(self, block_size):
    inputs, selection = _inputs(5), _random_selection(5)
    _, probs = gather(block_size=block_size).with_probs(
      inputs, selection, scale=0.5
    )
    _, wanted = dot_product().with_probs(inputs, selection, scale=0.5)
    np.testing.assert_allclose(probs, wanted, atol=1e-6)
    np.testing.assert_array_equal(probs[selection.indices < 0], 0)

  def test_probabilities_carry_no_gradient(self):
    selection = _random_selection(6)

    def value(inputs):
      return jnp.sum(gather().with_probs(inputs, selection, scale=0.5)[1] ** 2)

    for grad in jax.grad(value)(_inputs(6)):
      np.testing.assert_array_equal(grad, 0)

  def test_nothing_of_size_t_times_k_rows_is_kept_for_the_backward_pass(self):
    inputs = _inputs(7, batch=1, queries=64, keys=64)
    selection = _random_selection(7, batch=1, queries=64, keys=64, width=32)
    _, pullback = jax.vjp(
      lambda inputs: gather()(inputs, selection, scale=0.5), inputs
    )
    largest = max(leaf.size for leaf in jax.tree.leaves(pullback))
    self.assertLess(largest, 64 * 32 * 5)

  def test_block_size_of_zero_is_refused(self):
    with self.assertRaisesRegex(ValueError, "block_size must be at least 1"):
      gather(block_size=0)

  def test_block_size_of_a_fraction_is_refused(self):
    with self.assertRaisesRegex(TypeError, "block_size must be .* integer"):
      gather(block_size=1.5)


if __name__ == "__main__":
  absltest.main()
