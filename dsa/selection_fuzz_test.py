"""Selection of hostile scores against the oracle, in every form of one call.

Scores come from families that break selections: any bits at all (NaN payloads,
infinities, subnormals), few distinct values, plateaus of zeros, both zeros.
"""

import jax
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from dsa import selection
from testing import oracle

_ROWS = 24
_KEYS = 67
_FEW_KEYS = 7
_FLOAT32_SPECIALS = np.array(
  [np.nan, -np.nan, np.inf, -np.inf, 0, -0.0, 1e-45, -1e-45, 1e-38, 3e38, 1],
  np.float32,
)

_topk_mask = jax.jit(selection.topk_mask, static_argnums=1)
_topk_indices = jax.jit(selection.topk_indices, static_argnums=1)


def setUpModule():
  jax.config.update("jax_num_cpu_devices", 8)


def _any_bits(rng, shape, dtype):
  bits = np.dtype(f"uint{8 * np.dtype(dtype).itemsize}")
  return rng.integers(0, np.iinfo(bits).max, shape, bits, True).view(dtype)


def _few_values(rng, shape, dtype):
  return rng.integers(-2, 3, shape).astype(dtype)


def _plateaus(rng, shape, dtype):
  return np.maximum(rng.normal(size=shape) - 1, 0).astype(dtype)


def _specials(rng, shape, dtype):
  return rng.choice(_FLOAT32_SPECIALS, shape).astype(dtype)


def _neighbours(rng, shape, dtype):
  """Numbers that differ in their last bit or not at all."""
  one = np.ones((), dtype).view(f"uint{8 * np.dtype(dtype).itemsize}")
  return (one + rng.integers(0, 8, shape).astype(one.dtype)).view(dtype)


def _far_apart(rng, shape, dtype):
  """Exponents of all sizes, of both signs, and numbers next to each other."""
  exponents = rng.choice([-140, -20, 0, 1, 100], shape)
  signs = rng.choice([-1, 1], shape)
  near_one = _neighbours(rng, shape, np.float32)
  return (signs * np.ldexp(near_one, exponents)).astype(dtype)


_FAMILIES = (
  _any_bits,
  _few_values,
  _plateaus,
  _specials,
  _neighbours,
  _far_apart,
)


def _case(seed, family, dtype=np.float32, keys=_KEYS):
  """Scores [2, rows, keys], and what is allowed: also nothing and all."""
  rng = np.random.default_rng(seed)
  shape = (2, _ROWS, keys)
  density = rng.choice([0.05, 0.5, 0.95], (2, _ROWS, 1))
  allowed = rng.random(shape) < density
  allowed[:, 0], allowed[:, 1] = False, True
  with np.errstate(all="ignore"):
    return family(rng, shape, dtype), allowed


def _wanted(scores, k, allowed):
  with np.errstate(all="ignore"):
    return oracle.topk_mask(scores.astype(np.float64), k, allowed)


class FuzzTest(parameterized.TestCase):
  @parameterized.product(family=_FAMILIES, k=(1, 20, _KEYS - 1))
  def test_matches_the_oracle(self, family, k):
    scores, allowed = _case(k, family)
    wanted = _wanted(scores, k, allowed)
    np.testing.assert_array_equal(_topk_mask(scores, k, allowed), wanted)

  @parameterized.product(
    family=_FAMILIES, dtype=(ml_dtypes.bfloat16, np.float16)
  )
  def test_narrow_floats_match_the_oracle(self, family, dtype):
    scores, allowed = _case(0, family, dtype)
    wanted = _wanted(scores, 20, allowed)
    np.testing.assert_array_equal(_topk_mask(scores, 20, allowed), wanted)

  @parameterized.product(family=_FAMILIES, k=(1, 3, _FEW_KEYS + 2))
  def test_few_keys_match_the_oracle(self, family, k):
    scores, allowed = _case(k, family, keys=_FEW_KEYS)
    wanted = _wanted(scores, k, allowed)
    np.testing.assert_array_equal(_topk_mask(scores, k, allowed), wanted)

  @parameterized.product(family=_FAMILIES, k=(1, 20))
  def test_indices_list_the_mask(self, family, k):
    scores, allowed = _case(k, family)
    indices = _topk_indices(scores, k, allowed)
    mask = np.asarray(_topk_mask(scores, k, allowed))
    np.testing.assert_array_equal(indices, oracle.mask_to_indices(mask, k))

  @parameterized.product(family=_FAMILIES, k=(1, 20))
  def test_as_many_as_there_are_but_never_more_than_k(self, family, k):
    scores, allowed = _case(k, family)
    counts = np.asarray(_topk_mask(scores, k, allowed)).sum(axis=-1)
    np.testing.assert_array_equal(counts, np.minimum(k, allowed.sum(axis=-1)))


class FormsTest(parameterized.TestCase):
  """One selection, whatever form the call takes."""

  def setUp(self):
    super().setUp()
    self.scores, self.allowed = _case(0, _specials)
    self.wanted = _wanted(self.scores, 20, self.allowed)

  def test_without_jit(self):
    mask = selection.topk_mask(self.scores, 20, self.allowed)
    np.testing.assert_array_equal(mask, self.wanted)

  def test_step_by_step(self):
    row = slice(0, 1), slice(2, 3)
    with jax.disable_jit():
      mask = selection.topk_mask(self.scores[row], 20, self.allowed[row])
    np.testing.assert_array_equal(mask, self.wanted[row])

  def test_row_by_row(self):
    for b, t in np.ndindex(2, _ROWS):
      mask = _topk_mask(self.scores[b, t], 20, self.allowed[b, t])
      np.testing.assert_array_equal(mask, self.wanted[b, t])

  def test_under_vmap(self):
    def topk(scores, allowed):
      return selection.topk_mask(scores, 20, allowed)

    mask = jax.jit(jax.vmap(topk, in_axes=1))(self.scores, self.allowed)
    np.testing.assert_array_equal(np.swapaxes(mask, 0, 1), self.wanted)

  def test_under_map(self):
    def topk(row):
      return selection.topk_indices(row[0], 20, row[1])

    mapped = jax.jit(lambda rows: jax.lax.map(topk, rows))
    np.testing.assert_array_equal(
      mapped((self.scores, self.allowed)),
      oracle.mask_to_indices(self.wanted, 20),
    )

  def test_under_grad(self):
    def sum_of_selected(scores):
      mask = selection.topk_mask(scores, 20, self.allowed)
      return jnp.where(mask, scores, 0).sum(), mask

    gradient, mask = jax.jit(jax.grad(sum_of_selected, has_aux=True))(
      self.scores
    )
    np.testing.assert_array_equal(mask, self.wanted)
    np.testing.assert_array_equal(gradient, self.wanted.astype(np.float32))

  def test_under_x64(self):
    with jax.enable_x64(True):
      indices = _topk_indices(self.scores, 20, self.allowed)
    self.assertEqual(indices.dtype, jnp.int32)
    np.testing.assert_array_equal(
      indices, oracle.mask_to_indices(self.wanted, 20)
    )

  @parameterized.parameters((None, "x"), ("x", None))
  def test_sharded(self, *axes):
    rng = np.random.default_rng(1)
    scores = _plateaus(rng, (8, 8192), np.float32)
    scores[:2] = 0
    wanted = oracle.mask_to_indices(
      oracle.topk_mask(scores, 32, np.ones(scores.shape, bool)), 32
    )
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    sharded = jax.device_put(scores, sharding)
    self.assertLen(sharded.sharding.device_set, 8)
    allowed = jax.device_put(np.ones(scores.shape, bool), sharding)
    np.testing.assert_array_equal(_topk_indices(sharded, 32, allowed), wanted)


class PlateauTest(parameterized.TestCase):
  """Zeros(4096) and k = 32: keys 0..31, however the rows are cut."""

  @parameterized.parameters(1, 8)
  def test_in_chunks_of(self, rows):
    scores = np.zeros((rows, 4096), np.float32)
    np.testing.assert_array_equal(
      _topk_indices(scores, 32, np.ones(4096, bool)), [np.arange(32)] * rows
    )

  def test_causal(self):
    allowed = np.tril(np.ones((64, 4096), bool))
    indices = _topk_indices(np.zeros((64, 4096), np.float32), 32, allowed)
    np.testing.assert_array_equal(
      indices, oracle.topk_indices(np.zeros((64, 4096)), 32, allowed)
    )


if __name__ == "__main__":
  absltest.main()
