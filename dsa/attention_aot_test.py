"""The layer of the 671B model compiles ahead of time, where selection bites.

Nothing is allocated and nothing is run: parameters are shapes alone.
"""

import jax
import jax.numpy as jnp
from absl.testing import absltest

import dsa

LENGTH = 4096


def abstract_arguments(config):
  params = dsa.abstract_params(config, jnp.bfloat16)
  x = jax.ShapeDtypeStruct((1, LENGTH, config.hidden_size), jnp.bfloat16)
  return params, x


class DeepSeekV32Test(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.config = dsa.deepseek_v32()
    self.attention = dsa.make_attention(
      self.config, backend=dsa.backends.dot_product()
    )

  def test_forward_compiles_and_selects_a_part_of_the_keys(self):
    params, x = abstract_arguments(self.config)
    lowered = jax.jit(self.attention).lower(params, x)
    result = lowered.out_info
    self.assertEqual(result.out.shape, x.shape)
    self.assertEqual(result.selection.indices.shape, (1, LENGTH, 2048))
    self.assertLess(result.selection.indices.shape[-1], LENGTH)
    # Of the size of its results and of what a chunk of queries needs, far from
    # the 8 GiB that the logits of all heads take at once.
    memory = lowered.compile().memory_analysis()
    self.assertLess(memory.temp_size_in_bytes, 4 << 30)

  def test_backward_compiles(self):
    def loss(params, x):
      return jnp.sum(self.attention(params, x).out.astype(jnp.float32))

    arguments = abstract_arguments(self.config)
    lowered = jax.jit(jax.grad(loss, (0, 1))).lower(*arguments)
    lowered.compile()
    shapes = jax.tree.map(lambda array: array.shape, lowered.out_info)
    self.assertEqual(shapes, jax.tree.map(lambda a: a.shape, arguments))


if __name__ == "__main__":
  absltest.main()
