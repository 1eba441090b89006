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


def empty(config, batch=2, **options):
  return dsa.init_cache(config, batch, MAX_LENGTH, **options)


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

  def test_any_split_is_rounded_alike_to_the_dtype_of_the_cache(self):
    layer = layers.layer(3, length=40, hidden_size=256, kv_lora_rank=64)
    step = compiled(layer.config)
    cache = dsa.init_cache(layer.config, 2, 40, jnp.float16)
    whole = step(layer.params, layer.x, cache)
    for start, stop in (*((i, i + 1) for i in range(8)), (8, 40)):
      cache = step(layer.params, layer.x[:, start:stop], cache).cache
    jax.tree.map(np.testing.assert_array_equal, cache, whole.cache)

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
    for layer, other, wanted in (
      (plain, fp8, "an array"),
      (fp8, plain, "Blocks"),
    ):
      with self.assertRaisesRegex(
        TypeError, f"cache.{buffer} must be {wanted} where {field} is"
      ):
        compiled(layer.config)(layer.params, layer.x, empty(other.config))

  @parameterized.product(
    buffer_and_field=(
      ("kv_latent", "kv_quantization"),
      ("index_keys", "index_quantization"),
    ),
    part_and_wanted=(("values", "float8_e4m3fn"), ("scales", "float32")),
  )
  def test_dtypes_of_blocks_are_checked(
    self, buffer_and_field, part_and_wanted
  ):
    (buffer, field), (part, wanted) = buffer_and_field, part_and_wanted
    layer = make(0, **{field: "fp8_ue8m0"})
    cache = empty(layer.config)
    blocks = getattr(cache, buffer)
    wrong = blocks._replace(
      **{part: getattr(blocks, part).astype(jnp.bfloat16)}
    )
    with self.assertRaisesRegex(
      TypeError, f"^cache.{buffer}.{part} must be of dtype {wanted}, got bf"
    ):
      compiled(layer.config)(
        layer.params, layer.x, cache._replace(**{buffer: wrong})
      )

  @parameterized.parameters("kv_latent", "k_rope", "index_keys")
  def test_fp8_without_scales_is_no_buffer(self, name):
    layer = make(0)
    cache = empty(layer.config)
    bare = getattr(cache, name).astype(jnp.float8_e4m3fn)
    with self.assertRaisesRegex(
      TypeError, f"^cache.{name} must be of a float dtype of at least 16 bits"
    ):
      compiled(layer.config)(
        layer.params, layer.x, cache._replace(**{name: bare})
      )

  def test_numpy_arrays_are_buffers(self):
    layer = make(0)
    cache = jax.tree.map(np.asarray, empty(layer.config))
    serve_once = dsa.make_cached_attention(
      layer.config, backend=dsa.backends.gather()
    )
    result = serve_once(layer.params, layer.x[:, :1], cache)
    np.testing.assert_array_equal(result.cache.length, [1, 1])
    self.assertTrue(np.any(result.cache.k_rope))

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


class ErrorTest(parameterized.TestCase):
  """Each names the argument, before any compute."""

  def call(self, params=None, x=None, cache=None, **options):
    layer = make(15)
    attention = dsa.make_cached_attention(
      layer.config, backend=self.unreachable
    )
    params = layer.params if params is None else params
    cache = empty(layer.config) if cache is None else cache
    attention(params, layer.x if x is None else x, cache, **options)

  def unreachable(self, inputs, selection, *, scale):
    self.fail("the backend was called with arguments that do not fit")

  @parameterized.named_parameters(
    ("x_too_wide", {"x": jnp.ones((2, 12, 25))}, "x"),
    ("num_new", {"num_new": jnp.ones(3, int)}, "num_new"),
    (
      "selection",
      {"selection": dsa.Selection(jnp.zeros((2, 11, 3), int))},
      "selection.indices",
    ),
  )
  def test_a_wrong_shape(self, arguments, name):
    with self.assertRaisesRegex(ValueError, f"^{name} must have shape .* got"):
      self.call(**arguments)

  @parameterized.parameters(
    "kv_latent", "k_rope", "index_keys", "length", "overflowed"
  )
  def test_a_cache_of_another_shape_or_dtype(self, name):
    cache = empty(make(15).config)
    array = getattr(cache, name)
    for shape in ((3, *array.shape[1:]), (*array.shape, 1)):
      with self.assertRaisesRegex(
        ValueError, f"^cache.{name} must have shape .* got"
      ):
        self.call(cache=cache._replace(**{name: jnp.zeros(shape, array.dtype)}))
    with self.assertRaisesRegex(
      TypeError, f"^cache.{name} must be of dtype .* got"
    ):
      self.call(cache=cache._replace(**{name: array.astype(complex)}))

  def test_more_tokens_than_a_row_may_hold(self):
    with self.assertRaisesRegex(ValueError, "x must hold at most .*=16.* 17"):
      self.call(x=jnp.ones((2, 17, 24)))

  @parameterized.parameters("B", "T")
  def test_no_tokens(self, axis):
    x = jnp.ones((0, 12, 24) if axis == "B" else (2, 0, 24))
    with self.assertRaisesRegex(ValueError, "x must hold at least one token"):
      self.call(x=x)

  @parameterized.named_parameters(
    ("num_new", {"num_new": jnp.ones(2)}, "num_new must be of dtype"),
    ("cache", {"cache": ()}, "cache must be a Cache, got tuple"),
    (
      "selection",
      {"selection": jnp.ones((2, 12, 3), int)},
      "selection must be a Selection, got",
    ),
  )
  def test_a_wrong_type(self, arguments, message):
    with self.assertRaisesRegex(TypeError, message):
      self.call(**arguments)

  @parameterized.parameters(True, False)
  def test_nothing_to_select_with(self, has_indexer):
    layer = make(15)
    params = layer.params
    if not has_indexer:
      params = params._replace(indexer=None)
    with self.assertRaisesRegex(ValueError, "selection is required"):
      self.call(
        params=params, cache=empty(layer.config, index_keys=not has_indexer)
      )

  def test_a_backend_that_is_no_function(self):
    with self.assertRaisesRegex(TypeError, "backend must be a function"):
      dsa.make_cached_attention(make(15).config, backend="gather")

  @parameterized.parameters((0, 4), (2, 0))
  def test_a_cache_of_nothing(self, *sizes):
    with self.assertRaisesRegex(ValueError, "must be at least 1, got 0"):
      dsa.init_cache(make(15).config, *sizes)

  @parameterized.parameters(jnp.int32, jnp.float8_e4m3fn)
  def test_a_cache_of_what_are_no_plain_numbers(self, dtype):
    with self.assertRaisesRegex(
      TypeError, f"dtype must be a float dtype .*, got {jnp.dtype(dtype)}"
    ):
      dsa.init_cache(make(15).config, 1, 4, dtype)


def nbytes(tree):
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


if __name__ == "__main__":
  absltest.main()
