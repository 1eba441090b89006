"""Checkpoints in memory: names, layouts, fp8 blocks, and what is refused."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized

from dsa import checkpoint
from dsa import params as params_lib
from dsa.config import DSAConfig, RopeConfig
from testing import goldens

_PREFIX = "model.layers.7.self_attn."
# No two sizes alike, and none that divides another where heads are folded.
_CONFIG = DSAConfig(
  hidden_size=30,
  num_hidden_layers=1,
  num_attention_heads=3,
  q_lora_rank=14,
  kv_lora_rank=18,
  qk_nope_head_dim=11,
  qk_rope_head_dim=4,
  v_head_dim=7,
  index_n_heads=5,
  index_head_dim=8,
  index_topk=8,
  rope=RopeConfig(),
)
_NAMES = {
  "q_a_proj.weight": (14, 30),
  "q_a_layernorm.weight": (14,),
  "q_b_proj.weight": (3 * 15, 14),
  "kv_a_proj_with_mqa.weight": (22, 30),
  "kv_a_layernorm.weight": (18,),
  "kv_b_proj.weight": (3 * 18, 18),
  "o_proj.weight": (30, 3 * 7),
  "indexer.wq_b.weight": (5 * 8, 14),
  "indexer.wk.weight": (8, 30),
  "indexer.k_norm.weight": (8,),
  "indexer.k_norm.bias": (8,),
  "indexer.weights_proj.weight": (5, 30),
}


def _tensors(seed=0, dtype=np.float32):
  rng = np.random.default_rng(seed)
  return {
    _PREFIX + name: rng.normal(size=shape).astype(dtype)
    for name, shape in _NAMES.items()
  }


def _load(tensors, **options):
  return checkpoint.params_from_hf(tensors, _CONFIG, prefix=_PREFIX, **options)


class GoldenTest(parameterized.TestCase):
  @parameterized.parameters(
    ("deepseek_v32_yarn_100", "self_attn."),
    ("deepseek_v32_plain_rope_100", "self_attn."),
    ("deepseek_v32_causal_lm_100", "model.layers.0.self_attn."),
    ("deepseek_v32_causal_lm_100", "model.layers.2.self_attn."),
    ("glm_moe_dsa_shared_100", "model.layers.0.self_attn."),
    ("glm_moe_dsa_shared_100", "model.layers.2.self_attn."),
  )
  def test_reads_what_the_oracle_reads(self, name, prefix):
    golden = goldens.load(name)
    params: Any = checkpoint.params_from_hf(
      golden.tensors, DSAConfig.from_hf(golden.hf_config), prefix=prefix
    )
    config = goldens.config(golden)
    for ours, theirs in (
      (params.mla, goldens.mla_params(golden.tensors, config, prefix)),
      (params.indexer, goldens.indexer_params(golden.tensors, config, prefix)),
    ):
      for field in ours._fields:
        np.testing.assert_array_equal(
          getattr(ours, field), getattr(theirs, field), err_msg=field
        )

  @parameterized.parameters(1, 3)
  def test_a_layer_that_shares_its_selection_has_no_indexer(self, layer):
    golden = goldens.load("glm_moe_dsa_shared_100")
    params = checkpoint.params_from_hf(
      golden.tensors,
      DSAConfig.from_hf(golden.hf_config),
      prefix=f"model.layers.{layer}.self_attn.",
      has_indexer=False,
    )
    self.assertIsNone(params.indexer)


class LayoutTest(parameterized.TestCase):
  def test_is_the_tree_of_the_configuration(self):
    chex.assert_trees_all_equal_shapes_and_dtypes(
      _load(_tensors()), params_lib.abstract_params(_CONFIG)
    )

  @parameterized.parameters(
    ("wq_a", (29, 13), "q_a_proj.weight", (13, 29)),
    ("wq_b", (13, 2, 14), "q_b_proj.weight", (2 * 15 + 14, 13)),
    ("wkv_a", (29, 21), "kv_a_proj_with_mqa.weight", (21, 29)),
    ("wkv_b", (17, 1, 12), "kv_b_proj.weight", (1 * 18 + 12, 17)),
    ("wo", (2, 5, 29), "o_proj.weight", (29, 2 * 7 + 5)),
  )
  def test_where_an_mla_weight_comes_from(self, field, ours, name, theirs):
    tensors = _tensors()
    params = _load(tensors)
    self.assertEqual(
      getattr(params.mla, field)[ours], tensors[_PREFIX + name][theirs]
    )

  @parameterized.parameters(
    ("wq_b", (13, 4, 6), "wq_b.weight", (4 * 8 + 6, 13)),
    ("wk", (29, 7), "wk.weight", (7, 29)),
    ("weights_proj", (29, 4), "weights_proj.weight", (4, 29)),
  )
  def test_where_an_index_weight_comes_from(self, field, ours, name, theirs):
    tensors = _tensors()
    params = _load(tensors)
    self.assertEqual(
      getattr(params.indexer, field)[ours],
      tensors[f"{_PREFIX}indexer.{name}"][theirs],
    )

  def test_other_tensors_are_ignored(self):
    tensors = _tensors()
    more = tensors | {"model.layers.8.self_attn.o_proj.weight": np.ones(1)}
    chex.assert_trees_all_equal(_load(more), _load(tensors))

  def test_writing_over_the_tensors_changes_no_parameter(self):
    tensors, copies = _tensors(), _tensors()
    params = _load(tensors)
    for tensor in tensors.values():
      tensor[...] = 0
    chex.assert_trees_all_equal(params, _load(copies))

  def test_loads_under_jit_as_constants(self):
    tensors = _tensors()
    total = jax.jit(lambda: _load(tensors).mla.wo.sum())()
    np.testing.assert_allclose(
      total, tensors[_PREFIX + "o_proj.weight"].sum(), rtol=1e-5
    )


class DtypeTest(parameterized.TestCase):
  @parameterized.parameters(np.float32, ml_dtypes.bfloat16, np.float16)
  def test_is_kept_but_for_the_head_weights(self, dtype):
    params = _load(_tensors(dtype=dtype))
    self.assertEqual(params.indexer.weights_proj.dtype, jnp.float32)
    rest = params._replace(indexer=params.indexer._replace(weights_proj=None))
    for leaf in jax.tree.leaves(rest):
      self.assertEqual(leaf.dtype, dtype)

  @parameterized.parameters(
    np.int32, np.int8, np.uint8, np.bool_, np.complex64, ml_dtypes.float8_e5m2
  )
  def test_what_is_no_plain_number_is_refused(self, dtype):
    tensors = _tensors()
    name = _PREFIX + "o_proj.weight"
    tensors[name] = tensors[name].astype(dtype)
    with self.assertRaisesRegex(
      ValueError,
      f"^{name} must be of a float dtype of at least 16 bits or float8_e4m3fn, "
      f"got {np.dtype(dtype)}$",
    ):
      _load(tensors)


class RoundTripTest(parameterized.TestCase):
  @parameterized.parameters(np.float32, ml_dtypes.bfloat16, np.float16)
  def test_parameters_come_back_to_the_bit(self, dtype):
    params = _load(_tensors(dtype=dtype))
    tensors = checkpoint.params_to_hf(params, _CONFIG, _PREFIX)
    chex.assert_trees_all_equal(_load(tensors), params)
    chex.assert_trees_all_equal_shapes_and_dtypes(_load(tensors), params)

  @parameterized.parameters(np.float32, ml_dtypes.bfloat16)
  def test_tensors_come_back_to_the_bit(self, dtype):
    tensors = _tensors(dtype=dtype)
    name = _PREFIX + "indexer.weights_proj.weight"
    tensors[name] = tensors[name].astype(np.float32)
    written = checkpoint.params_to_hf(_load(tensors), _CONFIG, _PREFIX)
    self.assertEqual(written.keys(), tensors.keys())
    for name, tensor in tensors.items():
      self.assertEqual(written[name].dtype, tensor.dtype, name)
      np.testing.assert_array_equal(written[name], tensor, err_msg=name)

  def test_nan_and_signed_zero_come_back(self):
    tensors = _tensors()
    name = _PREFIX + "o_proj.weight"
    tensors[name][0, :4] = np.nan, -0.0, np.inf, 1e-45
    written = checkpoint.params_to_hf(_load(tensors), _CONFIG, _PREFIX)
    np.testing.assert_array_equal(
      written[name].view(np.uint32), tensors[name].view(np.uint32)
    )

  def test_without_indexer(self):
    params = _load(_tensors(), has_indexer=False)
    written = checkpoint.params_to_hf(params, _CONFIG, _PREFIX)
    self.assertLen(written, 7)
    chex.assert_trees_all_equal(_load(written, has_indexer=False), params)


class WriteErrorTest(parameterized.TestCase):
  def test_other_trees_are_named(self):
    params: Any = {}
    with self.assertRaisesRegex(
      TypeError, "^params must be DSAParams, got dict$"
    ):
      checkpoint.params_to_hf(params, _CONFIG, _PREFIX)

  def test_other_shapes_are_named(self):
    params = _load(_tensors())
    mla = params.mla._replace(wo=jnp.zeros((3, 6, 30)))
    with self.assertRaisesRegex(
      ValueError,
      r"^params.mla.wo must have shape \[3, 7, 30\], got \(3, 6, 30\)$",
    ):
      checkpoint.params_to_hf(params._replace(mla=mla), _CONFIG, _PREFIX)


class ReadErrorTest(parameterized.TestCase):
  @parameterized.parameters(*_NAMES)
  def test_a_missing_tensor_is_named(self, name):
    tensors = _tensors()
    del tensors[_PREFIX + name]
    with self.assertRaisesRegex(
      ValueError, f"^checkpoint lacks {_PREFIX}{name}$"
    ):
      _load(tensors)

  def test_all_that_are_missing_are_named(self):
    with self.assertRaisesRegex(ValueError, "q_a_proj.*indexer.weights_proj"):
      _load({})

  def test_a_missing_indexer_is_not_left_out(self):
    tensors = {k: v for k, v in _tensors().items() if "indexer" not in k}
    with self.assertRaisesRegex(ValueError, "lacks .*indexer.wq_b.weight"):
      _load(tensors)

  @parameterized.parameters(*_NAMES.items())
  def test_another_shape_is_named(self, name, shape):
    tensors = _tensors()
    wrong = (shape[0] + 1, *shape[1:])
    tensors[_PREFIX + name] = np.zeros(wrong, np.float32)
    with self.assertRaises(ValueError) as raised:
      _load(tensors)
    self.assertEqual(
      str(raised.exception),
      f"{_PREFIX}{name} must have shape {shape}, got {wrong}",
    )

  def test_a_transposed_matrix_is_named(self):
    tensors = _tensors()
    name = _PREFIX + "q_a_proj.weight"
    tensors[name] = tensors[name].T
    with self.assertRaisesRegex(
      ValueError, rf"^{name} must have shape \(14, 30\), got \(30, 14\)$"
    ):
      _load(tensors)


class Fp8Test(parameterized.TestCase):
  """Weights of 576 x 128 and of 300 x 200, in blocks of 128 x 128."""

  name = _PREFIX + "kv_a_proj_with_mqa.weight"

  def _tensors(self, latent, hidden, seed=0):
    """A checkpoint whose kv_a_proj is fp8, of [latent + 64, hidden]."""
    self.config = DSAConfig(
      hidden_size=hidden,
      num_hidden_layers=1,
      num_attention_heads=1,
      q_lora_rank=2,
      kv_lora_rank=latent,
      qk_nope_head_dim=2,
      qk_rope_head_dim=64,
      v_head_dim=2,
      index_n_heads=1,
      index_head_dim=64,
      index_topk=8,
      rope=RopeConfig(),
    )
    params = jax.tree.map(
      lambda leaf: np.zeros(leaf.shape, leaf.dtype),
      params_lib.abstract_params(self.config),
    )
    tensors = checkpoint.params_to_hf(params, self.config, _PREFIX)
    shape = (latent + 64, hidden)
    values = np.random.default_rng(seed).normal(size=shape)
    tensors[self.name] = values.astype(ml_dtypes.float8_e4m3fn)
    blocks = tuple(-(-size // 128) for size in shape)
    scale = np.arange(1, 1 + np.prod(blocks)).reshape(blocks)
    tensors[self.name + "_scale_inv"] = scale.astype(np.float32)
    return tensors

  def _load(self, tensors):
    return checkpoint.params_from_hf(tensors, self.config, prefix=_PREFIX)

  def test_a_scale_counts_for_its_block_of_rows(self):
    tensors = self._tensors(512, 128)
    tensors[self.name] = np.ones((576, 128), ml_dtypes.float8_e4m3fn)
    wkv_a = self._load(tensors).mla.wkv_a
    self.assertEqual(wkv_a.dtype, jnp.bfloat16)
    rows = np.repeat([1, 2, 3, 4, 5], 128)[:576]
    self.assertEqual(rows[512], 5)
    np.testing.assert_array_equal(wkv_a, np.broadcast_to(rows, (128, 576)))

  def test_blocks_that_end_early_in_both_axes(self):
    tensors = self._tensors(300 - 64, 200)
    scale = np.random.default_rng(1).uniform(0.1, 1, (3, 2)).astype(np.float32)
    tensors[self.name + "_scale_inv"] = scale
    weight = tensors[self.name].astype(np.float32)
    wanted = [
      [weight[r, c] * scale[r // 128, c // 128] for r in range(300)]
      for c in range(200)
    ]
    np.testing.assert_array_equal(
      self._load(tensors).mla.wkv_a, jnp.asarray(wanted, jnp.bfloat16)
    )

  def test_scales_of_ue8m0_are_powers_of_two(self):
    tensors = self._tensors(512, 128)
    scale = tensors[self.name + "_scale_inv"]
    powers = (2.0**-scale).astype(np.float32)
    tensors[self.name + "_scale_inv"] = powers
    wanted = self._load(tensors).mla.wkv_a
    tensors[self.name + "_scale_inv"] = powers.astype(ml_dtypes.float8_e8m0fnu)
    np.testing.assert_array_equal(self._load(tensors).mla.wkv_a, wanted)

  def test_fp8_head_weights_are_float32(self):
    tensors = self._tensors(512, 128)
    name = _PREFIX + "indexer.weights_proj.weight"
    tensors[name] = np.ones((1, 128), ml_dtypes.float8_e4m3fn)
    tensors[name + "_scale_inv"] = np.full((1, 1), 3, np.float32)
    weights_proj = self._load(tensors).indexer.weights_proj
    self.assertEqual(weights_proj.dtype, jnp.float32)
    np.testing.assert_array_equal(weights_proj, np.full((128, 1), 3))

  def test_a_missing_scale_is_named(self):
    tensors = self._tensors(512, 128)
    del tensors[self.name + "_scale_inv"]
    with self.assertRaisesRegex(
      ValueError,
      f"^{self.name} is float8_e4m3fn but {self.name}_scale_inv is missing$",
    ):
      self._load(tensors)

  @parameterized.parameters((4, 1), (5, 2), (1, 5), (5,), ())
  def test_another_shape_of_the_scale_is_named(self, *shape):
    tensors = self._tensors(512, 128)
    tensors[self.name + "_scale_inv"] = np.ones(shape, np.float32)
    with self.assertRaises(ValueError) as raised:
      self._load(tensors)
    self.assertEqual(
      str(raised.exception),
      f"{self.name}_scale_inv must have shape (5, 1), got {shape}",
    )

  def test_bytes_are_no_scale(self):
    tensors = self._tensors(512, 128)
    tensors[self.name + "_scale_inv"] = np.ones((5, 1), np.uint8)
    with self.assertRaisesRegex(
      ValueError, f"^{self.name}_scale_inv must be of a float dtype, got uint8$"
    ):
      self._load(tensors)


if __name__ == "__main__":
  absltest.main()
