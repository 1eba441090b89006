"""Decoders come back from folders as they were saved, or are refused."""

import json
import pathlib
import sys
from unittest import mock

import jax
import numpy as np
from absl.testing import absltest, parameterized
from safetensors import numpy as safetensors

import dsa
from dsa.examples import decoder, decoder_folder
from testing import checkpoint_folders, goldens

_CONFIG = decoder.decoder_config(
  hidden_size=16, layers=2, heads=2, index_heads=3, topk=4
)


class FolderTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.directory = pathlib.Path(self.create_tempdir().full_path) / "a" / "b"

  def _save(self):
    saved = decoder.init_decoder(jax.random.key(0), _CONFIG)
    decoder_folder.prepare(self.directory)
    decoder_folder.save(self.directory, *saved, _CONFIG, max_positions=64)
    return saved

  def _golden_folder(self, **changes):
    golden = goldens.load("deepseek_v32_causal_lm_100")
    config_json = {
      key: value
      for key, value in (golden.hf_config | changes).items()
      if value is not None
    }
    checkpoint_folders.write_folder(self.directory, golden.tensors, config_json)
    return golden.tensors

  def test_what_was_saved_comes_back_to_the_bit(self):
    saved, indexers = self._save()
    config, loaded, end_tokens, max_positions = decoder_folder.load(
      self.directory
    )
    self.assertEqual(max_positions, 64)
    self.assertEqual(config, _CONFIG)
    self.assertEmpty(end_tokens)
    for layer in range(2):
      for stacked, actual in (
        (saved.layers, loaded.params.layers[layer]),
        (indexers, loaded.indexers[layer]),
      ):
        wanted = jax.tree.map(lambda a, at=layer: a[at], stacked)
        jax.tree.map(np.testing.assert_array_equal, actual, wanted)
    for name in ("embedding", "final_norm", "head"):
      np.testing.assert_array_equal(
        getattr(loaded.params, name), getattr(saved, name), err_msg=name
      )

  def test_the_folder_bears_the_names_of_a_published_one(self):
    self._save()
    golden = goldens.load("deepseek_v32_causal_lm_100")
    tensors = safetensors.load_file(self.directory / "model.safetensors")
    wanted = {name for name in golden.tensors if ".layers.2." not in name}
    self.assertEqual(set(tensors), wanted)
    self.assertEqual(tensors["lm_head.weight"].shape, (256, 16))
    self.assertEqual(
      tensors["model.layers.1.mlp.down_proj.weight"].shape, (16, 48)
    )
    config_json = json.loads((self.directory / "config.json").read_text())
    self.assertEqual(config_json["model_type"], "deepseek_v32")
    self.assertEqual(config_json["intermediate_size"], 48)
    self.assertEqual(config_json["max_position_embeddings"], 64)
    self.assertEqual(sorted(self.directory.iterdir())[2:], [])

  def test_tied_embeddings_are_the_head(self):
    tensors = self._golden_folder(tie_word_embeddings=True, eos_token_id=[3, 5])
    loaded = decoder_folder.load(self.directory)
    np.testing.assert_array_equal(
      loaded.decoder.params.head, tensors["model.embed_tokens.weight"].T
    )
    self.assertEqual(loaded.end_tokens, {3, 5})

  @parameterized.parameters(
    ({"vocab_size": None}, "config lacks vocab_size"),
    ({"vocab_size": "96"}, "vocab_size must be an integer, got '96'"),
    ({"eos_token_id": [1, None]}, "eos_token_id must be integers, got .1, N"),
    ({"eos_token_id": {}}, "eos_token_id must be integers, got {}"),
    ({"max_position_embeddings": []}, "max_position_embeddings must be an int"),
    ({"mlp_layer_types": 3}, "mlp_layer_types must be a list, got 3"),
    (
      {"mlp_layer_types": None, "first_k_dense_replace": "all"},
      "first_k_dense_replace must be an integer, got 'all'",
    ),
    ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
    ({"mlp_bias": True}, "mlp_bias=True is not supported"),
    (
      {"mlp_layer_types": ["dense", "sparse", "dense"]},
      "layer 1 is a mixture of experts",
    ),
    (
      {"mlp_layer_types": None, "first_k_dense_replace": 2},
      "layer 2 is a mixture of experts",
    ),
    (
      {"intermediate_size": 100},
      r"mlp.\w+.weight in .*/model.safetensors must have shape",
    ),
  )
  def test_what_this_decoder_is_not_is_refused(self, changes, wanted):
    self._golden_folder(**changes)
    with self.assertRaisesRegex(ValueError, wanted):
      decoder_folder.load(self.directory)

  def test_without_safetensors_nothing_is_made(self):
    with (
      mock.patch.dict(sys.modules, {"safetensors.numpy": None}),
      self.assertRaisesRegex(
        ModuleNotFoundError, r"pip install 'dsa-jax\[checkpoint\]'"
      ),
    ):
      decoder_folder.prepare(self.directory)
    self.assertFalse(self.directory.exists())

  def test_the_tensors_are_served_by_the_library(self):
    saved, _ = self._save()
    params = dsa.checkpoint.load_hf(self.directory, _CONFIG, [1])
    np.testing.assert_array_equal(params[0].mla.wo, saved.layers.mla.wo[1])


if __name__ == "__main__":
  absltest.main()
