"""Configurations: what none may say, and the softmax scale that follows."""

import dataclasses
import functools
import math
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from dsa import config as config_lib
from dsa.config import RopeConfig

_SIZES = (
  "hidden_size",
  "num_hidden_layers",
  "num_attention_heads",
  "q_lora_rank",
  "kv_lora_rank",
  "qk_nope_head_dim",
  "qk_rope_head_dim",
  "v_head_dim",
  "index_n_heads",
  "index_head_dim",
  "index_topk",
)


class RopeConfigTest(parameterized.TestCase):
  @parameterized.parameters(
    ("rope_type", "linear", "must be one of"),
    ("rope_theta", 0, "must be a number above 0"),
    ("rope_theta", 1.0, "must be above 1"),
    ("rope_theta", "10000", "must be a number above 0"),
    ("rope_theta", math.inf, "must be a number above 0"),
    ("factor", 0.5, "must be at least 1"),
    ("factor", math.nan, "must be a number above 0"),
    ("beta_fast", 0.5, "must be at least beta_slow"),
    ("beta_slow", -1.0, "must be a number above 0"),
    ("original_max_position_embeddings", 0, "must be an integer of at least 1"),
    ("original_max_position_embeddings", 4096.5, "must be an integer"),
  )
  def test_bad_value_is_named(self, field, value, wanted):
    with self.assertRaisesRegex(
      ValueError, f"^{field} {wanted}.* got .*{value!r}"
    ):
      RopeConfig(**{field: value})

  def test_equal_betas_are_a_ramp(self):
    rope = RopeConfig(rope_type="yarn", factor=32, beta_fast=1.0, beta_slow=1.0)
    self.assertEqual(rope.beta_fast, 1.0)

  @parameterized.product(
    name=(
      "rope_theta",
      "factor",
      "original_max_position_embeddings",
      "beta_fast",
      "beta_slow",
      "mscale_all_dim",
    ),
    value=("x", ["x"], math.inf),
  )
  def test_what_is_no_number_in_a_checkpoint_is_named(self, name, value):
    rope: dict[str, Any] = {
      "rope_theta": 10000,
      "rope_type": "yarn",
      "factor": 40,
      "original_max_position_embeddings": 4096,
      "mscale": 1.0,
      "mscale_all_dim": 1.0,
    }
    rope[name] = value
    if name == "mscale_all_dim":
      rope["mscale"] = value
    with self.assertRaisesRegex(
      ValueError, f"^{name} must be a number, got {re.escape(repr(value))}$"
    ):
      RopeConfig.from_hf({"rope_parameters": rope})

  def test_mscale_is_one_without_yarn(self):
    self.assertEqual(RopeConfig(factor=40.0, mscale_all_dim=1.0).mscale, 1.0)


class DSAConfigTest(parameterized.TestCase):
  @parameterized.product(field=_SIZES, value=(0, -1, 2.0, True, "8", None))
  def test_sizes_are_positive_integers(self, field, value):
    with self.assertRaisesRegex(
      ValueError, f"^{field} must be an integer of at least 1, got {value!r}$"
    ):
      dataclasses.replace(config_lib.glm_5(), **{field: value})

  @parameterized.product(
    field=("rms_norm_eps", "latent_norm_eps", "index_k_norm_eps"),
    value=(0, -1e-6, math.nan, None),
  )
  def test_epsilons_are_positive(self, field, value):
    with self.assertRaisesRegex(
      ValueError, f"^{field} must be a number above 0, got {value!r}$"
    ):
      dataclasses.replace(config_lib.glm_5(), **{field: value})

  def test_rope_turns_pairs(self):
    with self.assertRaisesRegex(
      ValueError, "^qk_rope_head_dim must be even, .* got 63$"
    ):
      dataclasses.replace(config_lib.glm_5(), qk_rope_head_dim=63)

  def test_index_width_holds_what_turns(self):
    with self.assertRaisesRegex(
      ValueError, "^index_head_dim must be at least .* got 32 and 64$"
    ):
      dataclasses.replace(config_lib.glm_5(), index_head_dim=32)

  @parameterized.parameters(
    (("full", "full"), "must say each of the num_hidden_layers=78 layers"),
    (["full"] * 78, "must be a tuple of"),
    (("full", None) * 39, "must be a tuple of"),
    (("full", ["full"]) * 39, "must be a tuple of"),
    (("shared", "full") * 39, "must begin with 'full'"),
  )
  def test_kinds_of_layers_that_make_no_sense_are_named(self, types, wanted):
    with self.assertRaisesRegex(ValueError, f"^indexer_types {wanted}"):
      dataclasses.replace(config_lib.glm_5(), indexer_types=types)

  def test_fewer_layers_keep_their_kinds(self):
    types: Any = ("full", "shared") * 39
    config = dataclasses.replace(
      config_lib.glm_5(), indexer_types=types, num_hidden_layers=3
    )
    self.assertEqual([config.has_indexer(i) for i in range(3)], [1, 0, 1])

  def test_numpy_integers_are_integers(self):
    topk: Any = np.int64(2048)
    config = dataclasses.replace(config_lib.glm_5(), index_topk=topk)
    self.assertEqual(config, config_lib.glm_5())
    self.assertEqual(hash(config), hash(config_lib.glm_5()))

  def test_is_a_static_argument_of_jit(self):
    @functools.partial(jax.jit, static_argnums=1)
    @chex.assert_max_traces(n=1)
    def scaled(x, config):
      return x * config.softmax_scale

    for _ in range(2):
      np.testing.assert_array_equal(
        scaled(jnp.full(3, 16.0), config_lib.glm_5()), 1
      )

  def test_is_frozen(self):
    with self.assertRaises(dataclasses.FrozenInstanceError):
      config_lib.glm_5().index_topk = 1  # type: ignore[misc]


class SoftmaxScaleTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("deepseek_v32", config_lib.deepseek_v32().rope, 0.1352338),
    ("without_yarn", RopeConfig(), 0.0721688),
  )
  def test_scale_of_192_dims(self, rope, wanted):
    config = dataclasses.replace(config_lib.deepseek_v32(), rope=rope)
    self.assertAlmostEqual(config.softmax_scale, wanted, places=7)

  def test_m_of_deepseek_v32(self):
    self.assertAlmostEqual(
      config_lib.deepseek_v32().rope.mscale, 1.368888, places=6
    )

  def test_scale_of_glm_5(self):
    self.assertEqual(config_lib.glm_5().softmax_scale, 1 / 16)


if __name__ == "__main__":
  absltest.main()
