"""Block fp8 against published formulas, bit for bit, and against NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import dsa
from dsa import quantization
from testing import goldens, layers, oracle, oracle_quantization

FORMATS = ("float32", "ue8m0")
WIDTHS = (32, 64, 128)


def setUpModule():
  # Each program runs once or twice: what takes the time is compiling it.
  jax.config.update("jax_disable_most_optimizations", True)


def golden():
  return goldens.load("fp8_index_100").arrays


def numbers(seed, *shape, outliers=True):
  """Normal numbers whose rows differ in size, with a few large ones."""
  rng = np.random.default_rng(seed)
  x = rng.normal(size=shape) * np.exp2(rng.integers(-8, 8, (*shape[:-1], 1)))
  if outliers:
    x *= np.where(rng.random(shape) < 0.02, 50, 1)
  return x.astype(np.float32)


def operands(seed, width):
  """Index queries [2, 5, 3, D], keys [2, 300, D] and weights [2, 5, 3]."""
  q = numbers(seed, 2, 5, 3, width)
  k = numbers(seed + 1, 2, 300, width)
  return q, k, numbers(seed + 2, 2, 5, 3, outliers=False)


def bits(values):
  return np.asarray(values).view(np.uint8)


def assert_rows_close(actual, wanted, tolerance):
  """Fails unless each element is close, relative to its row's largest."""
  actual, wanted = (np.asarray(x, np.float64) for x in (actual, wanted))
  size = np.abs(wanted).max(axis=-1, keepdims=True)
  np.testing.assert_allclose(
    actual / size, wanted / size, rtol=0, atol=tolerance, strict=True
  )


class GoldenTest(parameterized.TestCase):
  @parameterized.parameters("q", "k")
  def test_the_rotation_agrees(self, name):
    arrays = golden()
    rotated = quantization.hadamard(jnp.asarray(arrays[name]))
    assert_rows_close(rotated, arrays[f"{name}_rotated"], 1e-6)

  @parameterized.product(name=("q", "k"), scale_format=FORMATS)
  def test_bits_and_scales_are_the_same(self, name, scale_format):
    arrays = golden()
    blocks = quantization.quantize_blocks(
      jnp.asarray(arrays[f"{name}_rotated"]), scale_format=scale_format
    )
    wanted = arrays[f"{scale_format}/{name}_bits"]
    np.testing.assert_array_equal(bits(blocks.values), wanted, strict=True)
    wanted = arrays[f"{scale_format}/{name}_scale"]
    np.testing.assert_array_equal(blocks.scales, wanted, strict=True)

  @parameterized.parameters(*FORMATS)
  def test_scores_agree(self, scale_format):
    arrays = golden()
    q, k = (
      quantization.quantize_blocks(
        jnp.asarray(arrays[f"{name}_rotated"]), scale_format=scale_format
      )
      for name in "qk"
    )
    scores = quantization.fp8_index_scores(*q, *k, jnp.asarray(arrays["w"]))
    assert_rows_close(scores, arrays[f"{scale_format}/scores"], 1e-6)


class HadamardTest(parameterized.TestCase):
  @parameterized.parameters(1, 2, *WIDTHS, 1024)
  def test_is_the_matrix_and_its_own_inverse(self, width):
    x = numbers(0, 3, width, outliers=False)
    rotated = quantization.hadamard(jnp.asarray(x))
    assert_rows_close(rotated, oracle_quantization.hadamard(x), 1e-6)
    assert_rows_close(quantization.hadamard(rotated), x, 2e-6)

  def test_bfloat16_is_rounded_once(self):
    x = jnp.asarray(numbers(0, 4, 128), jnp.bfloat16)
    wanted = quantization.hadamard(x.astype(jnp.float32)).astype(jnp.bfloat16)
    rotated = quantization.hadamard(x)
    self.assertEqual(rotated.dtype, jnp.bfloat16)
    np.testing.assert_array_equal(rotated, wanted)

  def test_of_queries_and_keys_leaves_scores_alone(self):
    q, k, weights = map(jnp.asarray, operands(0, 64))
    plain = dsa.weighted_relu_scores(q, k, weights)
    rotated = dsa.weighted_relu_scores(
      quantization.hadamard(q), quantization.hadamard(k), weights
    )
    assert_rows_close(rotated, plain, 5e-6)
    alone = dsa.weighted_relu_scores(quantization.hadamard(q), k, weights)
    with self.assertRaises(AssertionError):
      assert_rows_close(alone, plain, 0.1)

  @parameterized.parameters(((2, 3),), ((2, 0),), ((),))
  def test_other_widths_are_refused(self, shape):
    with self.assertRaisesRegex(ValueError, "power of two"):
      quantization.hadamard(jnp.zeros(shape))

  def test_integers_are_refused(self):
    with self.assertRaisesRegex(TypeError, "x must be of dtype floating"):
      quantization.hadamard(jnp.zeros((2, 4), int))

  @parameterized.parameters(quantization.hadamard, quantization.quantize_blocks)
  def test_fp8_without_its_scale_is_refused(self, function):
    with self.assertRaisesRegex(TypeError, "x must be of a float dtype of at"):
      function(jnp.zeros((2, 4), jnp.float8_e4m3fn))


class BlocksTest(parameterized.TestCase):
  @parameterized.product(
    scale_format=FORMATS, width_and_block=((32, 32), (256, 128), (300, 128))
  )
  def test_agrees_with_numpy_to_the_bit(self, scale_format, width_and_block):
    width, block_size = width_and_block
    x = numbers(1, 4, 50, width)
    x[0, 0] = 0
    x[0, 1] *= 1e-20
    options = {"scale_format": scale_format, "block_size": block_size}
    blocks = jax.jit(lambda x: quantization.quantize_blocks(x, **options))(
      jnp.asarray(x)
    )
    values, scales = oracle_quantization.quantize(x, **options)
    np.testing.assert_array_equal(bits(blocks.values), bits(values))
    np.testing.assert_array_equal(blocks.scales, scales, strict=True)
    np.testing.assert_allclose(
      quantization.dequantize_blocks(
        blocks, block_size=block_size, dtype=jnp.float32
      ),
      oracle_quantization.dequantize(values, scales, block_size=block_size),
      rtol=1e-6,
    )

  @parameterized.parameters((447.9, 1), (448, 1), (448.1, 2), (0, 2**-22))
  def test_ue8m0_scales_are_rounded_up(self, amax, wanted):
    x = jnp.full((1, 4), amax, jnp.float32)
    blocks = quantization.quantize_blocks(x, scale_format="ue8m0")
    self.assertEqual(float(blocks.scales[0, 0]), wanted)

  @parameterized.product(scale_format=FORMATS, value=(np.nan, np.inf, -np.inf))
  def test_what_is_not_finite_stays_so(self, scale_format, value):
    x = jnp.ones((2, 256)).at[0, 5].set(value)
    blocks = quantization.quantize_blocks(x, scale_format=scale_format)
    back = quantization.dequantize_blocks(blocks, dtype=jnp.float32)
    wanted = np.zeros((2, 256), bool)
    wanted[0, :128] = True
    np.testing.assert_array_equal(np.isnan(back), wanted)

  def test_arguments_are_checked(self):
    x = jnp.zeros((2, 4))
    with self.assertRaisesRegex(ValueError, "scale_format must be one of"):
      quantization.quantize_blocks(x, scale_format="e8m0")
    with self.assertRaisesRegex(ValueError, "block_size must be at least 1"):
      quantization.quantize_blocks(x, block_size=0)
    with self.assertRaisesRegex(ValueError, "x must have a last axis"):
      quantization.quantize_blocks(jnp.zeros(()))
    with self.assertRaisesRegex(TypeError, "x must be of dtype floating"):
      quantization.quantize_blocks(x.astype(int))
    blocks = quantization.quantize_blocks(x)
    with self.assertRaisesRegex(ValueError, r"scales must have shape \(2, 2\)"):
      quantization.dequantize_blocks(blocks, block_size=2, dtype=jnp.float32)


class ScoresTest(parameterized.TestCase):
  @parameterized.product(scale_format=FORMATS, width=WIDTHS)
  def test_agree_with_numpy_over_tiles_of_keys(self, scale_format, width):
    q, k, weights = operands(3, width)
    q, k = (
      quantization.quantize_index(jnp.asarray(x), scale_format=scale_format)
      for x in (q, k)
    )
    self.assertEqual(k.scales.shape, (2, 300, 1))
    scores = quantization.fp8_index_scores(*q, *k, jnp.asarray(weights))
    q, k = (
      oracle_quantization.dequantize(*map(np.asarray, x), block_size=width)
      for x in (q, k)
    )
    wanted = oracle.index_scores(q, k, weights)
    assert_rows_close(scores, wanted, 1e-6)

  def test_arguments_are_checked(self):
    q, k, weights = map(jnp.asarray, operands(0, 32))
    q8, k8 = (
      quantization.quantize_index(x, scale_format="ue8m0") for x in (q, k)
    )
    with self.assertRaisesRegex(TypeError, "q_values must be of dtype float8"):
      quantization.fp8_index_scores(q, q8.scales, *k8, weights)
    with self.assertRaisesRegex(ValueError, r"q_scales must have shape \[B=2"):
      quantization.fp8_index_scores(q8.values, k8.scales, *k8, weights)
    with self.assertRaisesRegex(ValueError, r"k_scales must have shape \[B=2"):
      quantization.fp8_index_scores(*q8, k8.values, q8.scales[0], weights)
    # Those that would broadcast to the shape of the scales, too.
    for wrong in (weights[..., :1], weights[0], weights[..., None]):
      with self.assertRaisesRegex(ValueError, r"weights must have shape \[B=2"):
        quantization.fp8_index_scores(*q8, *k8, wrong)
    with self.assertRaisesRegex(TypeError, "weights must be of dtype float32"):
      quantization.fp8_index_scores(*q8, *k8, weights.astype(jnp.bfloat16))
    with self.assertRaisesRegex(ValueError, "at most 128"):
      quantization.quantize_index(jnp.zeros((2, 256)), scale_format="ue8m0")


class ConfigTest(parameterized.TestCase):
  def config(self, **changes):
    config = layers.layer(0, index_head_dim=16).config
    return dataclasses.replace(config, **changes)

  @parameterized.parameters("index_quantization", "kv_quantization")
  def test_unknown_formats_are_refused(self, field):
    with self.assertRaisesRegex(ValueError, f"{field} must be one of"):
      self.config(**{field: "fp8"})

  @parameterized.parameters(24, 256)
  def test_a_width_that_cannot_be_rotated_is_refused(self, width):
    with self.assertRaisesRegex(ValueError, "index_head_dim must be a power"):
      self.config(index_head_dim=width, index_quantization="fp8_ue8m0")
    self.config(index_head_dim=width)

  def test_a_loss_of_rounded_scores_is_refused(self):
    with self.assertRaisesRegex(ValueError, "index_quantization='none'"):
      dsa.make_attention(
        self.config(index_quantization="fp8_float32"),
        backend=dsa.backends.gather(),
        indexer_loss=True,
      )


class AttentionTest(parameterized.TestCase):
  @parameterized.parameters("fp8_float32", "fp8_ue8m0")
  def test_selects_by_the_rounded_scores(self, how):
    layer = layers.layer(5, length=150, index_head_dim=16)
    config = dataclasses.replace(layer.config, index_quantization=how)
    attention = dsa.make_attention(config, backend=dsa.backends.gather())
    result = jax.jit(attention)(layer.params, layer.x)
    q_latent = dsa.query_latent(layer.params.mla, layer.x, config)
    indexer, positions = layer.params.indexer, layer.positions
    q = dsa.index_queries(indexer, q_latent, positions, config)
    k = dsa.index_keys(indexer, layer.x, positions, config)
    q, k = (self.rounded(x, how.removeprefix("fp8_")) for x in (q, k))
    scores = oracle.index_scores(
      q, k, dsa.index_head_weights(indexer, layer.x, config)
    )
    visible = oracle.visibility(np.ones(layer.x.shape[:2], int))
    np.testing.assert_array_equal(
      result.selection.indices,
      oracle.topk_indices(scores, config.index_topk, visible),
    )

  def rounded(self, x, scale_format):
    rotated = quantization.hadamard(x)
    width = x.shape[-1]
    values, scales = oracle_quantization.quantize(
      rotated, scale_format=scale_format, block_size=width
    )
    return oracle_quantization.dequantize(values, scales, block_size=width)


if __name__ == "__main__":
  absltest.main()
