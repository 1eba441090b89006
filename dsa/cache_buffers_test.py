"""Buffers of the cache: what they hold in fp8, its size, what is checked."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import dsa
from testing import layers, oracle_quantization, tolerances

LENGTH, MAX_LENGTH = 12, 16
FP8 = ("fp8_float32", "fp8_ue8m0")


def setUpModule():
  # Each program runs a few times: what takes the time is compiling it.
  jax.config.update("jax_disable_most_optimizations", True)


def make(seed, **changes):
  """A layer whose latent takes two blocks, the last one partial."""
  layer = layers.layer(seed, length=LENGTH, index_head_dim=16, kv_lora_rank=140)
  return layer._replace(config=dataclasses.replace(layer.config, **changes))


@functools.cache
def compiled(config):
  return jax.jit(
    dsa.make_cached_attention(config, backend=dsa.backends.gather())
  )


def empty(config, batch=2):
  return dsa.init_cache(config, batch, MAX_LENGTH)


def serve(layer, sizes):
  cache, outs, indices, start = empty(layer.config), [], [], 0
  for size in sizes:
    x = layer.x[:, start : start + size]
    result = compiled(layer.config)(layer.params, x, cache)
    cache, start = result.cache, start + size
    outs.append(result.out)
    indices.append(result.selection.indices)
  return jnp.concatenate(outs, 1), jnp.concatenate(indices, 1), cache


class QuantizedTest(parameterized.TestCase):
  @parameterized.parameters(*FP8)
  def test_latents_are_kept_in_blocks_with_their_scales(self, how):
    layer = make(0, kv_quantization=how)
    _, _, cache = serve(layer, [LENGTH])
    latent, _ = dsa.kv_latents(
      layer.params.mla, layer.x, layer.positions, layer.config
    )
    values, scales = oracle_quantization.quantize(
      latent, scale_format=how.removeprefix("fp8_"), block_size=128
    )
    kept = jax.tree.map(lambda x: np.asarray(x[:, :LENGTH]), cache.kv_latent)
    self.assertEqual(kept.values.dtype, jnp.float8_e4m3fn)
    self.assertEqual(kept.scales.shape, (2, LENGTH, 2))
    tolerances.assert_close_by_norm(
      oracle_quantization.dequantize(*kept, block_size=128),
      oracle_quantization.dequantize(values, scales, block_size=128),
      1e-3,  # A latent next to the middle of two values may go either way.
    )

  def test_attention_reads_what_is_kept(self):
    layer = make(1, kv_quantization="fp8_ue8m0")
    plain = layer._replace(
      config=dataclasses.replace(layer.config, kv_quantization="none")
    )
    _, indices, cache = serve(layer, [LENGTH])
    _, _, plain_cache = serve(plain, [LENGTH])
    restored = oracle_quantization.dequantize(
      *map(np.asarray, cache.kv_latent), block_size=128
    )
    # The last token again, over the rounded latents in a plain cache.
    at_last = jnp.full(2, LENGTH - 1, jnp.int32)
    plain_cache = plain_cache._replace(
      kv_latent=jnp.asarray(restored, jnp.float32), length=at_last
    )
    cache = cache._replace(length=at_last)
    last = layer.x[:, -1:]
    selection = dsa.Selection(indices[:, -2:-1])
    wanted = compiled(plain.config)(
      layer.params, last, plain_cache, selection=selection
    )
    actual = compiled(layer.config)(
      layer.params, last, cache, selection=selection
    )
    tolerances.assert_output_close(actual.out, wanted.out, "float32")

  @parameterized.parameters(*FP8)
  def test_any_split_is_one_pass(self, how):
    layer = make(2, kv_quantization=how, index_quantization=how)
    out, indices, cache = serve(layer, [LENGTH])
    split_out, split_indices, split_cache = serve(layer, [5, 1, 5, 1])
    np.testing.assert_array_equal(split_indices, indices)
    tolerances.assert_output_close(split_out, out, "float32")
    jax.tree.map(np.testing.assert_array_equal, split_cache[:3], cache[:3])
    attention = jax.jit(
      dsa.make_attention(layer.config, backend=dsa.backends.gather())
    )
    np.testing.assert_array_equal(
      indices, attention(layer.params, layer.x).selection.indices
    )

  def test_takes_about_half_the_memory_of_bfloat16(self):
    config = dsa.deepseek_v32()
    fp8 = dataclasses.replace(
      config, kv_quantization="fp8_ue8m0", index_quantization="fp8_ue8m0"
    )
    plain, rounded = (
      jax.eval_shape(
        lambda config=config: dsa.init_cache(config, 1, 1, jnp.bfloat16)
      )
      for config in (config, fp8)
    )
    # One byte a number, and one float32 scale for each 128 of them.
    self.assertEqual(nbytes(plain.index_keys), 256)
    self.assertEqual(nbytes(rounded.index_keys), 128 + 4)
    self.assertEqual(nbytes(plain.kv_latent), 1024)
    self.assertEqual(nbytes(rounded.kv_latent), 512 + 16)


class CheckTest(parameterized.TestCase):
  @parameterized.parameters(
    ("kv_latent", "kv_quantization"), ("index_keys", "index_quantization")
  )
  def test_a_cache_of_another_configuration_is_refused(self, buffer, field):
    plain, fp8 = make(0), make(0, **{field: "fp8_ue8m0"})
    for layer, other, wanted in ((plain, fp8, "Array"), (fp8, plain, "Blocks")):
      with self.assertRaisesRegex(
        TypeError, f"cache.{buffer} must be {wanted} where {field} is"
      ):
        compiled(layer.config)(layer.params, layer.x, empty(other.config))

  def test_shapes_are_checked(self):
    layer = make(0, kv_quantization="fp8_ue8m0")
    cache = empty(layer.config)
    blocks = cache.kv_latent
    for buffer, wrong in (
      ("kv_latent.values", blocks._replace(values=blocks.values[:, :, 1:])),
      ("kv_latent.scales", blocks._replace(scales=blocks.scales[:, :, 1:])),
    ):
      with self.assertRaisesRegex(ValueError, f"cache.{buffer} must have"):
        compiled(layer.config)(
          layer.params, layer.x, cache._replace(kv_latent=wrong)
        )
    with self.assertRaisesRegex(ValueError, "cache.k_rope must have shape"):
      compiled(layer.config)(layer.params, layer.x, empty(layer.config, 3))


def nbytes(tree):
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


if __name__ == "__main__":
  absltest.main()
