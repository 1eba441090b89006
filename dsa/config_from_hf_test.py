"""Configurations read from a config.json: no size in them is guessed."""

import math
from typing import Any

from absl.testing import absltest, parameterized

from dsa import config as config_lib
from dsa.config import DSAConfig, RopeConfig
from testing import goldens, oracle

_YARN: dict[str, Any] = {
  "beta_fast": 32,
  "beta_slow": 1,
  "factor": 40,
  "mscale": 1.0,
  "mscale_all_dim": 1.0,
  "original_max_position_embeddings": 4096,
}

# As published with DeepSeek-V3.2-Exp and DeepSeek-V3.2, less what is not read.
_DEEPSEEK_V32: dict[str, Any] = {
  "architectures": ["DeepseekV32ForCausalLM"],
  "attention_bias": False,
  "attention_dropout": 0.0,
  "hidden_size": 7168,
  "index_head_dim": 128,
  "index_n_heads": 64,
  "index_topk": 2048,
  "kv_lora_rank": 512,
  "max_position_embeddings": 163840,
  "model_type": "deepseek_v32",
  "num_attention_heads": 128,
  "num_hidden_layers": 61,
  "num_key_value_heads": 128,
  "q_lora_rank": 1536,
  "qk_nope_head_dim": 128,
  "qk_rope_head_dim": 64,
  "rms_norm_eps": 1e-06,
  "rope_scaling": {"type": "yarn", **_YARN},
  "rope_theta": 10000,
  "v_head_dim": 128,
}

# As published with GLM-5, less what is not read.
_GLM_5: dict[str, Any] = {
  "architectures": ["GlmMoeDsaForCausalLM"],
  "attention_bias": False,
  "hidden_size": 6144,
  "index_head_dim": 128,
  "index_n_heads": 32,
  "index_topk": 2048,
  "indexer_rope_interleave": True,
  "kv_lora_rank": 512,
  "max_position_embeddings": 202752,
  "model_type": "glm_moe_dsa",
  "num_attention_heads": 64,
  "num_hidden_layers": 78,
  "q_lora_rank": 2048,
  "qk_nope_head_dim": 192,
  "qk_rope_head_dim": 64,
  "rms_norm_eps": 1e-05,
  "rope_interleave": True,
  "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
  "v_head_dim": 256,
}

_REQUIRED = (
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
  "rms_norm_eps",
)

_GOLDENS = (
  "deepseek_v32_yarn_100",
  "deepseek_v32_padded_100",
  "deepseek_v32_plain_rope_100",
  "deepseek_v32_short_100",
  "deepseek_v32_causal_lm_100",
  "glm_moe_dsa_shared_100",
)


def _without(config_json, *keys):
  return {k: v for k, v in config_json.items() if k not in keys}


def _respelled(config_json, **rope):
  """The same config.json with other RoPE keys at its top."""
  keys = ("rope_scaling", "rope_parameters", "rope_theta")
  return _without(config_json, *keys) | rope


class PublishedTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("deepseek_v32", config_lib.deepseek_v32, _DEEPSEEK_V32),
    (
      "deepseek_v32_in_the_newer_spelling",
      config_lib.deepseek_v32,
      _respelled(
        _DEEPSEEK_V32,
        rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, **_YARN},
      ),
    ),
    ("glm_5", config_lib.glm_5, _GLM_5),
    (
      "glm_5_in_the_older_spelling",
      config_lib.glm_5,
      _respelled(_GLM_5, rope_theta=1000000, rope_scaling=None),
    ),
  )
  def test_preset_is_what_the_checkpoint_says(self, preset, config_json):
    self.assertEqual(DSAConfig.from_hf(config_json), preset())

  @parameterized.parameters(*_GOLDENS)
  def test_golden_config_reads_as_the_oracle_reads_it(self, name):
    golden = goldens.load(name)
    wanted = goldens.config(golden)
    config = DSAConfig.from_hf(golden.hf_config)
    for field in wanted._fields:
      if field != "rope":
        self.assertEqual(getattr(config, field), getattr(wanted, field), field)
    self.assertEqual(config.softmax_scale, oracle.softmax_scale(wanted))
    read = ["rope_theta", "rope_type"]
    if wanted.rope.rope_type == "yarn":
      read += ["factor", "original_max_position_embeddings", "mscale_all_dim"]
      read += ["beta_fast", "beta_slow"]
    for field in read:
      self.assertEqual(
        getattr(config.rope, field), getattr(wanted.rope, field), field
      )


class FromHfTest(parameterized.TestCase):
  @parameterized.parameters(*_REQUIRED)
  def test_no_size_is_guessed(self, key):
    with self.assertRaisesRegex(ValueError, f"^config lacks {key}$"):
      DSAConfig.from_hf(_without(_DEEPSEEK_V32, key))

  def test_null_is_missing(self):
    with self.assertRaisesRegex(ValueError, "^config lacks q_lora_rank$"):
      DSAConfig.from_hf(_DEEPSEEK_V32 | {"q_lora_rank": None})

  def test_all_that_is_missing_is_named(self):
    config_json = _without(_GLM_5, "index_topk", "index_n_heads")
    with self.assertRaisesRegex(ValueError, "index_n_heads, index_topk"):
      DSAConfig.from_hf(config_json)

  @parameterized.parameters(*_REQUIRED)
  def test_every_size_is_the_checkpoints(self, key):
    value = 2.5e-5 if key == "rms_norm_eps" else _DEEPSEEK_V32[key] + 2
    config = DSAConfig.from_hf(_DEEPSEEK_V32 | {key: value})
    self.assertEqual(getattr(config, key), value)

  @parameterized.parameters(1e-5, 1e-6)
  def test_the_epsilon_of_the_latents_is_not_the_decoders(self, eps):
    config = DSAConfig.from_hf(_GLM_5 | {"rms_norm_eps": eps})
    self.assertEqual(config.latent_norm_eps, 1e-6)

  @parameterized.parameters(("deepseek_v3",), ("llama",), (None,), ({},))
  def test_other_models_are_refused(self, model_type):
    with self.assertRaisesRegex(
      ValueError,
      rf"model_type must be one of \['deepseek_v32', 'glm_moe_dsa'\], got "
      f"{model_type!r}",
    ):
      DSAConfig.from_hf(_DEEPSEEK_V32 | {"model_type": model_type})

  @parameterized.product(
    config_json=(_DEEPSEEK_V32, _GLM_5), interleave=(True, False)
  )
  def test_index_layout_that_is_said_wins(self, config_json, interleave):
    config = DSAConfig.from_hf(
      config_json | {"indexer_rope_interleave": interleave}
    )
    self.assertEqual(config.indexer_rope_interleave, interleave)

  @parameterized.parameters(("deepseek_v32", False), ("glm_moe_dsa", True))
  def test_index_layout_follows_the_model(self, model_type, interleave):
    config_json = _without(_GLM_5, "indexer_rope_interleave")
    config = DSAConfig.from_hf(config_json | {"model_type": model_type})
    self.assertEqual(config.indexer_rope_interleave, interleave)

  @parameterized.parameters(
    ("attention_bias", True), ("rope_interleave", False)
  )
  def test_what_the_layer_has_not_is_refused(self, key, value):
    with self.assertRaisesRegex(ValueError, f"{key}={value} is not supported"):
      DSAConfig.from_hf(_GLM_5 | {key: value})

  def test_bad_size_is_named(self):
    with self.assertRaisesRegex(ValueError, "index_topk must be .* got 0"):
      DSAConfig.from_hf(_GLM_5 | {"index_topk": 0})

  def test_a_path_is_refused(self):
    path: Any = "config.json"
    with self.assertRaisesRegex(
      TypeError, "config_json must be the parsed dictionary, got str"
    ):
      DSAConfig.from_hf(path)

  def test_nothing_is_changed_in_what_was_passed(self):
    config_json = _DEEPSEEK_V32 | {"rope_scaling": {"type": "yarn", **_YARN}}
    DSAConfig.from_hf(config_json)
    self.assertEqual(config_json, _DEEPSEEK_V32)


class IndexerTypesTest(parameterized.TestCase):
  """What transformers 5.24's GlmMoeDsaConfig answers, F full and S shared."""

  @parameterized.named_parameters(
    ("nothing_said", {}, "FFFFFFFF"),
    ("every_second", {"index_topk_freq": 2}, "FFSFSFSF"),
    ("every_fourth", {"index_topk_freq": 4}, "FFSSSFSS"),
    ("freq_0_is_1", {"index_topk_freq": 0}, "FFFFFFFF"),
    ("null_is_not_said", {"index_topk_freq": None}, "FFFFFFFF"),
    (
      "from_the_first_on",
      {"index_topk_freq": 4, "index_skip_topk_offset": 1},
      "FSSSFSSS",
    ),
    (
      "from_the_fourth_on",
      {"index_topk_freq": 3, "index_skip_topk_offset": 4},
      "FFFFSSFS",
    ),
    ("offset_alone", {"index_skip_topk_offset": 3}, "FFFFFFFF"),
    (
      "a_pattern_wins_over_a_period",
      {"index_topk_pattern": "FSSFSFFS", "index_topk_freq": 2},
      "FSSFSFFS",
    ),
    (
      "a_pattern_in_words",
      {"index_topk_pattern": ["full", "shared"] * 4},
      "FSFSFSFS",
    ),
    (
      "types_win_over_a_pattern",
      {"indexer_types": ["full"] * 7 + ["shared"], "index_topk_pattern": "FS"},
      "FFFFFFFS",
    ),
    (
      "more_than_the_layers",
      {"index_topk_pattern": "FSFSFSFSFS"},
      "FSFSFSFSFS",
    ),
  )
  def test_is_what_the_model_does(self, said, wanted):
    config = DSAConfig.from_hf(_GLM_5 | {"num_hidden_layers": 8} | said)
    words = {"F": "full", "S": "shared"}
    self.assertEqual(config.indexer_types, tuple(words[w] for w in wanted))
    self.assertEqual(
      [config.has_indexer(layer) for layer in range(8)],
      [letter == "F" for letter in wanted[:8]],
    )

  def test_deepseek_says_nothing_and_all_are_full(self):
    config = DSAConfig.from_hf(_DEEPSEEK_V32)
    self.assertIsNone(config.indexer_types)
    self.assertTrue(all(config.has_indexer(layer) for layer in range(61)))

  def test_what_is_said_counts_in_any_model(self):
    config = DSAConfig.from_hf(_DEEPSEEK_V32 | {"index_topk_freq": 2})
    self.assertFalse(config.has_indexer(2))

  @parameterized.parameters(
    ({"index_topk_pattern": "FXS"}, "letters F and S, got 'X' in it"),
    ({"index_topk_pattern": "FS"}, "each of the .*=78 layers, got 2 entries"),
    ({"index_topk_pattern": "S" * 78}, "must begin with 'full', .*'shared'"),
    ({"index_topk_freq": 2.5}, "index_topk_freq must be an integer, got 2.5"),
    ({"index_skip_topk_offset": True}, "must be an integer, got True"),
    ({"indexer_types": ["half"] * 78}, "must be a tuple of .* got .*'half'"),
    ({"indexer_types": {"0": "full"}}, "indexer_types must be a list, got"),
    ({"num_hidden_layers": "8"}, "num_hidden_layers must be an integer"),
  )
  def test_what_makes_no_sense_is_named(self, said, wanted):
    with self.assertRaisesRegex(ValueError, wanted):
      DSAConfig.from_hf(_GLM_5 | said)

  @parameterized.parameters(-1, 78)
  def test_a_layer_that_is_not_there_is_named(self, layer):
    with self.assertRaisesRegex(
      ValueError, f"below num_hidden_layers=78, got {layer}$"
    ):
      config_lib.glm_5().has_indexer(layer)


class RopeFromHfTest(parameterized.TestCase):
  def test_trained_length_is_the_original_one(self):
    rope = RopeConfig.from_hf(_DEEPSEEK_V32)
    self.assertEqual(rope.original_max_position_embeddings, 4096)

  @parameterized.parameters("type", "rope_type")
  def test_either_name_of_the_type(self, name):
    rope = RopeConfig.from_hf(
      {"rope_theta": 10000, "rope_scaling": {name: "yarn", **_YARN}}
    )
    self.assertEqual(rope.rope_type, "yarn")

  def test_theta_may_stand_beside_rope_parameters(self):
    rope = RopeConfig.from_hf(
      {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}}
    )
    self.assertEqual(rope, RopeConfig(rope_theta=5e5))

  def test_theta_alone_is_plain_rope(self):
    rope = RopeConfig.from_hf({"rope_theta": 5e5})
    self.assertEqual(rope, RopeConfig(rope_theta=5e5))

  def test_no_type_is_plain_rope(self):
    rope = RopeConfig.from_hf({"rope_parameters": {"rope_theta": 5e5}})
    self.assertEqual(rope, RopeConfig(rope_theta=5e5))

  @parameterized.named_parameters(
    ("missing", _without(_YARN, "beta_fast", "beta_slow")),
    ("null", _YARN | {"beta_fast": None, "beta_slow": None}),
  )
  def test_betas_default_to_32_and_1(self, yarn):
    rope = RopeConfig.from_hf(
      {"rope_theta": 10000, "rope_scaling": {"type": "yarn", **yarn}}
    )
    self.assertEqual((rope.beta_fast, rope.beta_slow), (32.0, 1.0))

  @parameterized.parameters("factor", "original_max_position_embeddings")
  def test_what_yarn_needs_is_named(self, key):
    with self.assertRaisesRegex(
      ValueError, f"rope_scaling is of type 'yarn' but lacks '{key}'"
    ):
      self._yarn(**{key: None})

  @parameterized.parameters(
    (1.0, 0.7), (0.7, 1.0), (None, 1.0), (1.0, None), (None, None), (0, 0)
  )
  def test_scaled_cos_and_sin_are_refused(self, mscale, mscale_all_dim):
    with self.assertRaisesRegex(
      ValueError,
      f"mscale={mscale} and mscale_all_dim={mscale_all_dim}, expected equal",
    ):
      self._yarn(mscale=mscale, mscale_all_dim=mscale_all_dim)

  def test_equal_mscales_that_are_not_one(self):
    rope = self._yarn(mscale=0.7, mscale_all_dim=0.7)
    self.assertAlmostEqual(rope.mscale, 0.07 * math.log(40) + 1)

  def test_unscaled_cos_and_sin_may_be_said_outright(self):
    rope = self._yarn(mscale=None, mscale_all_dim=None, attention_factor=1.0)
    self.assertEqual(rope.mscale, 1.0)

  @parameterized.parameters(
    ("attention_factor", 1.2),
    ("partial_rotary_factor", 0.5),
    ("truncate", False),
  )
  def test_other_angles_are_refused(self, key, value):
    with self.assertRaisesRegex(ValueError, f"has {key}={value}, only"):
      self._yarn(**{key: value})

  def test_unknown_type_is_named(self):
    with self.assertRaisesRegex(
      ValueError,
      r"rope_scaling has rope type 'linear', expected one of "
      r"\['default', 'yarn'\]",
    ):
      self._yarn(type="linear")

  @parameterized.parameters(
    ({},),
    ({"rope_theta": None},),
    ({"rope_parameters": {"rope_type": "default"}},),
    ({"rope_scaling": {"type": "yarn", **_YARN}},),
  )
  def test_missing_theta_is_named(self, config_json):
    with self.assertRaisesRegex(ValueError, "config lacks rope_theta"):
      RopeConfig.from_hf(config_json)

  @parameterized.product(
    where=("rope_parameters", "rope_scaling"), value=("yarn", ["yarn"], [])
  )
  def test_no_dictionary_is_named(self, where, value):
    with self.assertRaisesRegex(ValueError, f"{where} must be a dictionary"):
      RopeConfig.from_hf({"rope_theta": 10000, where: value})

  def _yarn(self, **changes):
    scaling = {"type": "yarn", **_YARN} | changes
    return RopeConfig.from_hf({"rope_theta": 10000, "rope_scaling": scaling})


if __name__ == "__main__":
  absltest.main()
