"""Layers from checkpoint folders: to the bit and only those, or an error."""

import json
import pathlib
from typing import Any
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized

import dsa
from dsa import checkpoint
from testing import checkpoint_folders, goldens

_PREFIX = "model.layers.{}.self_attn."

# Blocks of 128 end early in both axes, in the middle of a head too.
_PARTIAL_BLOCKS = {
  "model_type": "deepseek_v32",
  "hidden_size": 200,
  "num_hidden_layers": 2,
  "num_attention_heads": 3,
  "q_lora_rank": 136,
  "kv_lora_rank": 236,
  "qk_nope_head_dim": 60,
  "qk_rope_head_dim": 64,
  "v_head_dim": 70,
  "index_n_heads": 3,
  "index_head_dim": 96,
  "index_topk": 8,
  "rms_norm_eps": 1e-6,
  "rope_theta": 10000.0,
}


def _golden(dtype=np.float32):
  """Four layers of GLM, two of which share a selection: config and tensors."""
  golden = goldens.load("glm_moe_dsa_shared_100")
  tensors = {
    name: tensor.astype(dtype) for name, tensor in golden.tensors.items()
  }
  other = np.ones((7, 3), np.int32)
  return golden.hf_config, tensors | {"model.layers.0.mlp.w.weight": other}


def _random_tensors(config):
  """A model's attention, seeded, under the names of a checkpoint."""
  tensors = {}
  for layer in range(config.num_hidden_layers):
    params = dsa.init_params(jax.random.key(layer), config)
    prefix = _PREFIX.format(layer)
    tensors |= checkpoint.params_to_hf(params, config, prefix)
  return tensors


def _in_memory(tensors, config, layers):
  return [
    checkpoint.params_from_hf(
      tensors,
      config,
      prefix=_PREFIX.format(layer),
      has_indexer=config.has_indexer(layer),
    )
    for layer in layers
  ]


class FolderTestCase(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.directory = pathlib.Path(self.create_tempdir().full_path)

  def write(self, tensors, hf_config, shards=1):
    self.config = dsa.DSAConfig.from_hf(hf_config)
    self.shard_of = checkpoint_folders.write_folder(
      self.directory, tensors, hf_config, shards
    )

  def load(self, layers=(0, 1, 2, 3), **options):
    return checkpoint.load_hf(self.directory, self.config, layers, **options)

  def assert_same_bits(self, actual, wanted):
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, wanted)
    for a, w in zip(
      jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True
    ):
      self.assertEqual(np.asarray(a).tobytes(), np.asarray(w).tobytes())


class LoadTest(FolderTestCase):
  @parameterized.product(dtype=(np.float32, ml_dtypes.bfloat16), shards=(1, 3))
  def test_layers_are_what_was_written_to_the_bit(self, dtype, shards):
    hf_config, tensors = _golden(dtype)
    self.write(tensors, hf_config, shards)
    layers = self.load()
    self.assert_same_bits(layers, _in_memory(tensors, self.config, range(4)))
    self.assertEqual(layers[2].mla.wo.dtype, dtype)
    self.assertEqual(layers[2].indexer.weights_proj.dtype, jnp.float32)

  @parameterized.parameters(1, 3)
  def test_fp8_blocks_are_multiplied_by_their_scales(self, shards):
    config = dsa.DSAConfig.from_hf(_PARTIAL_BLOCKS)
    stored, plain = checkpoint_folders.quantized(_random_tensors(config))
    self.write(stored, _PARTIAL_BLOCKS, shards)
    wanted = _in_memory(
      {
        # The index head weights stay in float32, all else is bfloat16.
        name: tensor
        if tensor.ndim == 1 or "weights_proj" in name
        else tensor.astype(ml_dtypes.bfloat16)
        for name, tensor in plain.items()
      },
      config,
      (0, 1),
    )
    self.assert_same_bits(self.load((0, 1)), wanted)

  @parameterized.product(dtype=(jnp.float32, jnp.bfloat16), shards=(1, 3))
  def test_what_params_to_hf_writes_comes_back_to_the_bit(self, dtype, shards):
    config = dsa.DSAConfig.from_hf(_PARTIAL_BLOCKS)
    params = [
      dsa.init_params(jax.random.key(layer), config, dtype)
      for layer in range(2)
    ]
    tensors = {}
    for layer, layer_params in enumerate(params):
      prefix = _PREFIX.format(layer)
      tensors |= checkpoint.params_to_hf(layer_params, config, prefix)
    for tensor in tensors.values():
      self.assertTrue(tensor.flags.c_contiguous)
    self.write(tensors, _PARTIAL_BLOCKS, shards)
    self.assert_same_bits(self.load((0, 1)), params)

  def test_layers_come_in_the_order_asked_for(self):
    hf_config, tensors = _golden()
    self.write(tensors, hf_config, 3)
    wanted = _in_memory(tensors, self.config, (3, 0))
    self.assert_same_bits(self.load(np.array([3, 0])), wanted)
    self.assertEqual(self.load([]), [])

  def test_shared_layers_hold_no_indexer(self):
    self.write(_golden()[1], _golden()[0])
    has_indexer = [layer.indexer is not None for layer in self.load()]
    self.assertEqual(has_indexer, [True, False, True, False])

  def test_shards_of_other_layers_are_not_opened(self):
    hf_config, tensors = _golden()
    first = {name: t for name, t in tensors.items() if ".layers.0." in name}
    self.write(first, hf_config)
    weight_map = {
      name: "model.safetensors" if name in first else "not_downloaded"
      for name in tensors
    }
    index = json.dumps({"weight_map": weight_map})
    (self.directory / "model.safetensors.index.json").write_text(index)
    self.assert_same_bits(self.load([0]), _in_memory(tensors, self.config, [0]))

  def test_only_the_attention_of_the_layers_asked_for_is_read(self):
    hf_config, tensors = _golden()
    self.write(tensors, hf_config, 3)
    with mock.patch.object(np, "fromfile", wraps=np.fromfile) as read:
      self.load([1, 2])
    wanted = sum(
      tensor.nbytes
      for name, tensor in tensors.items()
      if ".layers.1.self_attn" in name or ".layers.2.self_attn" in name
    )
    self.assertEqual(sum(call.args[2] for call in read.mock_calls), wanted)

  def test_an_open_folder_serves_params_from_hf_and_read_tensor(self):
    hf_config, tensors = _golden()
    tensors["model.norm.weight"] = np.arange(5, dtype=np.float32)
    self.write(tensors, hf_config, 3)
    folder = checkpoint.open_hf(str(self.directory))
    self.assertEqual(folder.config_json(), hf_config)
    self.assertEqual(set(folder), set(tensors))
    self.assert_same_bits(
      _in_memory(folder, self.config, range(4)),
      _in_memory(tensors, self.config, range(4)),
    )
    norm = checkpoint.read_tensor(folder, "model.norm.weight", (5,))
    np.testing.assert_array_equal(norm, np.arange(5))
    with self.assertRaisesRegex(
      ValueError,
      r"^model.norm.weight in .*safetensors must have shape \(6,\), got",
    ):
      checkpoint.read_tensor(folder, "model.norm.weight", (6,))

  def test_long_loads_say_how_far_they_are(self):
    hf_config, tensors = _golden()
    self.write(tensors, hf_config)
    lines: list[str] = []
    self.load(progress=lines.append)
    self.assertEqual(lines, [])
    with mock.patch.object(checkpoint, "_PROGRESS_S", 0):
      self.load(progress=lines.append)
    self.assertLen(lines, 4)
    total = sum(t.nbytes for n, t in tensors.items() if "self_attn" in n)
    for layer, line in enumerate(lines):
      self.assertRegex(line, f"^reading {self.directory}: .*layers.{layer}")
      self.assertIn(f" of {total / 1e9:,.1f} GB", line)


class ConfigTest(FolderTestCase):
  @parameterized.parameters(
    {"index_topk": 16},
    {"rms_norm_eps": 1e-6},
    {"index_n_heads": 4},
    {"rope": dsa.RopeConfig(rope_theta=10000.0)},
    {"indexer_rope_interleave": False},
  )
  def test_no_default_wins_over_what_the_checkpoint_says(self, **change):
    hf_config, tensors = _golden()
    self.write(tensors, hf_config)
    ((name, value),) = change.items()
    stated = getattr(self.config, name)
    self.config = self._changed(**change)
    with self.assertRaises(ValueError) as raised:
      self.load()
    self.assertEqual(
      str(raised.exception),
      f"config must have {self.directory}/config.json's {name}={stated!r}, "
      f"got {value!r}",
    )

  def test_the_selection_is_as_wide_as_the_checkpoint_says(self):
    hf_config, tensors = _golden()
    self.write(tensors, hf_config | {"index_topk": 5})
    self.assertEqual(self.config.index_topk, 5)

  def test_other_kinds_of_layers_are_named(self):
    hf_config, tensors = _golden()
    self.write(tensors, hf_config)
    self.config = self._changed(indexer_types=None)
    with self.assertRaisesRegex(
      ValueError, r"has_indexer\(1\)=False, got True; has_indexer\(3\)=False"
    ):
      self.load()
    self.assertLen(self.load([0, 2]), 2)

  def test_options_that_no_checkpoint_states_are_free(self):
    hf_config, tensors = _golden()
    self.write(tensors, hf_config)
    self.config = self._changed(num_hidden_layers=2, latent_norm_eps=1e-5)
    self.assertLen(self.load([0, 1]), 2)

  @parameterized.parameters(([4], 4), ([0, -1], -1))
  def test_a_layer_that_is_not_there_is_named(self, layers, named):
    hf_config, tensors = _golden()
    self.write(tensors, hf_config)
    with self.assertRaisesRegex(
      ValueError, f"below num_hidden_layers=4, got {named}$"
    ):
      self.load(layers)

  def test_what_config_json_lacks_is_named_with_its_path(self):
    hf_config, tensors = _golden()
    self.write(tensors, hf_config)
    config_json = {k: v for k, v in hf_config.items() if k != "index_topk"}
    (self.directory / "config.json").write_text(json.dumps(config_json))
    with self.assertRaisesRegex(
      ValueError, f"^{self.directory}/config.json: config lacks index_topk$"
    ):
      self.load()

  def _changed(self, **change: Any) -> dsa.DSAConfig:
    return dsa.DSAConfig(**{**vars(self.config), **change})


class ErrorTest(FolderTestCase):
  """What is wrong is in the last layer: nothing of the first ones is read."""

  name = "model.layers.3.self_attn.o_proj.weight"

  def _fails(self, error, *wanted):
    with (
      mock.patch.object(np, "fromfile", wraps=np.fromfile) as read,
      self.assertRaises(error) as raised,
    ):
      self.load()
    self.assertEmpty(read.mock_calls)
    for part in wanted:
      self.assertIn(str(part), str(raised.exception))

  def _path(self, name=None):
    return self.directory / self.shard_of[name or self.name]

  @parameterized.parameters(1, 3)
  def test_a_missing_tensor_is_named(self, shards):
    hf_config, tensors = _golden()
    del tensors[self.name]
    self.write(tensors, hf_config, shards)
    listing = "model.safetensors" + (".index.json" if shards > 1 else "")
    self._fails(ValueError, f"{self.directory / listing} lacks {self.name}")

  @parameterized.parameters(1, 3)
  def test_another_shape_is_named(self, shards):
    hf_config, tensors = _golden()
    shape = tensors[self.name].shape
    tensors[self.name] = tensors[self.name].T
    self.write(tensors, hf_config, shards)
    self._fails(
      ValueError,
      f"{self.name} in {self._path()} must have shape {shape}, got "
      f"{shape[::-1]}",
    )

  @parameterized.parameters(np.int32, np.uint8, ml_dtypes.float8_e5m2)
  def test_what_is_no_plain_number_is_named(self, dtype):
    hf_config, tensors = _golden()
    tensors[self.name] = tensors[self.name].astype(dtype)
    self.write(tensors, hf_config, 3)
    self._fails(
      ValueError, f"{self.name} in {self._path()}", f"got {np.dtype(dtype)}"
    )

  def test_a_missing_scale_is_named(self):
    hf_config, tensors = _golden()
    stored, _ = checkpoint_folders.quantized(tensors)
    del stored[f"{self.name}_scale_inv"]
    self.write(stored, hf_config, 3)
    self._fails(
      ValueError,
      f"{self.name} in {self._path()} is float8_e4m3fn but "
      f"{self.name}_scale_inv is missing",
    )

  def test_another_shape_of_a_scale_is_named(self):
    hf_config, tensors = _golden()
    stored, _ = checkpoint_folders.quantized(tensors)
    scale = f"{self.name}_scale_inv"
    stored[scale] = np.ones((1, 2), np.float32)
    self.write(stored, hf_config, 3)
    self._fails(
      ValueError,
      f"{scale} in {self._path(scale)} must have shape (1, 1), got (1, 2)",
    )

  def test_a_missing_shard_is_named_with_what_it_should_hold(self):
    hf_config, tensors = _golden()
    self.write(tensors, hf_config, 3)
    self._path().unlink()
    self._fails(
      FileNotFoundError, f"{self._path()} is missing, which should hold model."
    )

  @parameterized.parameters(1, 3)
  def test_a_truncated_shard_is_named_with_where_it_ends(self, shards):
    hf_config, tensors = _golden()
    self.write(tensors, hf_config, shards)
    path = self._path()
    path.write_bytes(path.read_bytes()[:-1])
    self._fails(ValueError, f"{path} is truncated: ", " ends at byte ")

  def test_config_json_is_named_where_it_is_missing(self):
    self.write(_golden()[1], _golden()[0])
    (self.directory / "config.json").unlink()
    self._fails(FileNotFoundError, self.directory / "config.json")


if __name__ == "__main__":
  absltest.main()
