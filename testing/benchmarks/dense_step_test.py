"""The step that decoding is compared with does the same work, densely."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import dsa
from testing import layers, tolerances
from testing.benchmarks import dense_step


class DenseStepTest(parameterized.TestCase):
  @parameterized.parameters(40, 700)
  def test_it_is_the_cached_layer_that_selects_everything(self, max_length):
    layer = layers.layer(0, length=13, index_topk=max_length)
    serve = jax.jit(
      dsa.make_cached_attention(
        layer.config, backend=dsa.backends.dot_product()
      )
    )
    cache = dsa.init_cache(layer.config, 2, max_length)
    # Rows of different lengths; the longer one ends in the last, moved tile.
    rng = np.random.default_rng(1)
    cache = cache._replace(
      kv_latent=jnp.asarray(
        rng.normal(size=cache.kv_latent.shape), jnp.float32
      ),
      k_rope=jnp.asarray(rng.normal(size=cache.k_rope.shape), jnp.float32),
      length=jnp.asarray([max_length - 2, 7]),
    )
    x = layer.x[:, :1]
    wanted = serve(layer.params, x, cache)
    out, after = jax.jit(dense_step.dense_step, static_argnums=0)(
      layer.config, layer.params, x, cache
    )
    tolerances.assert_output_close(out, wanted.out, "float32")
    np.testing.assert_array_equal(after.length, wanted.cache.length)
    tolerances.assert_output_close(
      after.kv_latent, wanted.cache.kv_latent, "float32"
    )


if __name__ == "__main__":
  absltest.main()
