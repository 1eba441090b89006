"""Parameters: their sizes, names, dtypes and first values."""

import functools
import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from dsa import config as config_lib
from dsa import params as params_lib
from dsa.config import DSAConfig, RopeConfig
from testing import oracle, random_layer

_CONFIG = DSAConfig(
  hidden_size=96,
  num_hidden_layers=1,
  num_attention_heads=4,
  q_lora_rank=48,
  kv_lora_rank=64,
  qk_nope_head_dim=20,
  qk_rope_head_dim=12,
  v_head_dim=28,
  index_n_heads=6,
  index_head_dim=40,
  index_topk=8,
  rope=RopeConfig(),
)
_PRESETS = (config_lib.deepseek_v32(), config_lib.glm_5())


@functools.cache
def _drawn(seed=0):
  return params_lib.init_params(jax.random.key(seed), _CONFIG)


def _count(tree):
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


class AbstractParamsTest(parameterized.TestCase):
  def test_the_indexers_of_deepseek_v32_hold_851_524_864_parameters(self):
    config = config_lib.deepseek_v32()
    per_layer = _count(params_lib.abstract_params(config).indexer)
    self.assertEqual(per_layer, 13_959_424)
    self.assertEqual(per_layer * config.num_hidden_layers, 851_524_864)

  def test_the_attention_of_deepseek_v32_holds_187_107_328_parameters(self):
    params = params_lib.abstract_params(config_lib.deepseek_v32())
    self.assertEqual(_count(params.mla), 187_107_328)

  def test_nothing_is_allocated(self):
    before = len(jax.live_arrays())
    params = params_lib.abstract_params(config_lib.deepseek_v32())
    for leaf in jax.tree.leaves(params):
      self.assertIsInstance(leaf, jax.ShapeDtypeStruct)
    self.assertLen(jax.live_arrays(), before)

  @parameterized.product(
    config=_PRESETS, dtype=("float32", "bfloat16", "float64")
  )
  def test_is_the_tree_of_init_params(self, config, dtype):
    init = functools.partial(params_lib.init_params, config=config, dtype=dtype)
    chex.assert_trees_all_equal_shapes_and_dtypes(
      params_lib.abstract_params(config, dtype),
      jax.eval_shape(init, jax.random.key(0)),
    )

  def test_float64_where_it_is_enabled(self):
    with jax.enable_x64(True):
      params = params_lib.abstract_params(_CONFIG, jnp.float64)
    self.assertEqual(params.mla.wq_a.dtype, jnp.float64)

  def test_shapes_are_those_of_the_oracle(self):
    small = random_layer.CONFIG
    same = {
      field: value
      for field, value in small._asdict().items()
      if field not in ("rope", "indexer_rope_interleave")
    }
    config = DSAConfig(num_hidden_layers=1, rope=RopeConfig(), **same)
    layer = random_layer.random_layer(0)
    params: Any = params_lib.abstract_params(config)
    for ours, theirs in (
      (params.mla, layer.mla),
      (params.indexer, layer.indexer),
    ):
      self.assertEqual(
        {name: leaf.shape for name, leaf in ours._asdict().items()},
        {name: leaf.shape for name, leaf in theirs._asdict().items()},
      )

  def test_names_are_those_of_the_oracle(self):
    self.assertEqual(params_lib.MLAParams._fields, oracle.MLAParams._fields)
    self.assertEqual(
      params_lib.IndexerParams._fields, oracle.IndexerParams._fields
    )

  @parameterized.parameters(*_PRESETS)
  def test_head_weights_are_float32_among_bfloat16(self, config):
    params: Any = params_lib.abstract_params(config, jnp.bfloat16)
    self.assertEqual(params.indexer.weights_proj.dtype, jnp.float32)
    rest = params._replace(indexer=params.indexer._replace(weights_proj=None))
    for leaf in jax.tree.leaves(rest):
      self.assertEqual(leaf.dtype, jnp.bfloat16)

  @parameterized.parameters(jnp.int32, jnp.bool_, jnp.complex64)
  def test_other_dtypes_are_named(self, dtype):
    with self.assertRaisesRegex(
      TypeError, f"^dtype must be a float dtype, got {np.dtype(dtype)}$"
    ):
      params_lib.abstract_params(_CONFIG, dtype)


class LogicalAxesTest(parameterized.TestCase):
  def test_every_axis_has_a_name_of_its_own(self):
    for spec in jax.tree.leaves(params_lib.param_specs(_CONFIG, jnp.float32)):
      self.assertLen(spec.logical_axes, len(spec.shape))
      self.assertLen(set(spec.logical_axes), len(spec.shape))

  def test_one_name_has_one_size(self):
    sizes: dict[str, int] = {}
    for spec in jax.tree.leaves(params_lib.param_specs(_CONFIG, jnp.float32)):
      for name, size in zip(spec.logical_axes, spec.shape, strict=True):
        self.assertEqual(sizes.setdefault(name, size), size, name)


class InitParamsTest(parameterized.TestCase):
  @parameterized.parameters(
    ("mla", "wq_a", 96),
    ("mla", "wq_b", 48),
    ("mla", "wkv_a", 96),
    ("mla", "wkv_b", 64),
    ("mla", "wo", 4 * 28),
    ("indexer", "wq_b", 48),
    ("indexer", "wk", 96),
    ("indexer", "weights_proj", 96),
  )
  def test_variance_is_one_over_fan_in(self, group, name, fan_in):
    params = _drawn(1)
    weight = np.asarray(getattr(getattr(params, group), name))
    # 576 samples at least: the deviation of a deviation is 3 % at most.
    self.assertAlmostEqual(weight.std() * math.sqrt(fan_in), 1.0, delta=0.12)
    self.assertAlmostEqual(weight.mean() * math.sqrt(fan_in), 0.0, delta=0.15)

  @parameterized.parameters(
    ("mla", "q_norm", 1),
    ("mla", "kv_norm", 1),
    ("indexer", "k_norm_scale", 1),
    ("indexer", "k_norm_bias", 0),
  )
  def test_norms_start_as_the_identity(self, group, name, value):
    params = _drawn()
    np.testing.assert_array_equal(getattr(getattr(params, group), name), value)

  def test_no_two_weights_share_their_draws(self):
    params = _drawn()
    leaves = [x for x in jax.tree.leaves(params) if x.ndim > 1]
    # The variance differs, so compare the signs of what was drawn.
    signs = {tuple(np.sign(leaf).ravel()[:64].tolist()) for leaf in leaves}
    self.assertLen(signs, len(leaves))

  def test_equal_keys_give_equal_bits(self):
    again = params_lib.init_params(jax.random.key(0), _CONFIG)
    chex.assert_trees_all_equal(again, _drawn())

  def test_other_keys_give_other_values(self):
    first = _drawn()
    second = _drawn(1)
    self.assertFalse((first.mla.wq_a == second.mla.wq_a).any())


class CheckParamsTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.params: Any = params_lib.abstract_params(_CONFIG)

  @parameterized.parameters("float32", "bfloat16")
  def test_accepts_what_was_made(self, dtype):
    params_lib.check_params(params_lib.abstract_params(_CONFIG, dtype), _CONFIG)

  def test_accepts_a_layer_without_indexer(self):
    params_lib.check_params(self.params._replace(indexer=None), _CONFIG)

  @parameterized.parameters(
    *(("mla", name) for name in params_lib.MLAParams._fields),
    *(("indexer", name) for name in params_lib.IndexerParams._fields),
  )
  def test_other_shape_is_named(self, group, name):
    shape = getattr(getattr(self.params, group), name).shape
    wrong = (*shape[:-1], shape[-1] + 1)
    with self.assertRaises(ValueError) as raised:
      params_lib.check_params(self._with(group, name, wrong), _CONFIG)
    self.assertEqual(
      str(raised.exception),
      f"params.{group}.{name} must have shape {list(shape)}, got {wrong}",
    )

  @parameterized.parameters(("mla", "wo"), ("indexer", "wk"))
  def test_integers_are_named(self, group, name):
    shape = getattr(getattr(self.params, group), name).shape
    with self.assertRaisesRegex(
      TypeError,
      f"^params.{group}.{name} must be of dtype floating, got int32$",
    ):
      params_lib.check_params(
        self._with(group, name, shape, jnp.int32), _CONFIG
      )

  def test_what_is_no_array_is_named(self):
    mla = self.params.mla._replace(wo=None)
    with self.assertRaisesRegex(
      TypeError, "^params.mla.wo must be an array, got NoneType$"
    ):
      params_lib.check_params(self.params._replace(mla=mla), _CONFIG)

  def test_other_trees_are_named(self):
    with self.assertRaisesRegex(
      TypeError, "^params must be DSAParams, got MLAParams$"
    ):
      params_lib.check_params(self.params.mla, _CONFIG)

  @parameterized.parameters(
    ("mla", "MLAParams", "IndexerParams"), ("indexer", "IndexerParams", "dict")
  )
  def test_other_parts_are_named(self, group, wanted, got):
    other: Any = self.params.indexer if group == "mla" else {}
    with self.assertRaisesRegex(
      TypeError, f"^params.{group} must be {wanted}, got {got}$"
    ):
      params_lib.check_params(self.params._replace(**{group: other}), _CONFIG)

  def _with(self, group, name, shape, dtype=jnp.float32):
    leaf = jax.ShapeDtypeStruct(shape, dtype)
    part = getattr(self.params, group)._replace(**{name: leaf})
    return self.params._replace(**{group: part})


if __name__ == "__main__":
  absltest.main()
