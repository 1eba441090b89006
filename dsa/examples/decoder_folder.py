"""Decoders as checkpoint folders, in the names of DeepSeek-V3.2.

`save` writes a trained decoder as Hugging Face lays a model out, `load` reads
such a folder: the attention as `dsa.checkpoint` does, and beside it the
embedding, RMSNorms, dense MLPs and head that this table names. Experts are not
read: a model that has them is refused.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import dsa
from dsa.checkpoint_files import Folder
from dsa.examples.decoder import (
  DecoderParams,
  Indexers,
  LayerParams,
  StackedParams,
)

_CONFIG, _WEIGHTS = "config.json", "model.safetensors"

_EMBEDDING = "model.embed_tokens.weight"
_FINAL_NORM = "model.norm.weight"
_HEAD = "lm_head.weight"

# Names of a layer's weights behind its prefix. Matrices are [outputs, inputs].
_LAYER = "model.layers.{}."
_ATTENTION = "self_attn."
_NORMS = {
  "attention_norm": "input_layernorm.weight",
  "mlp_norm": "post_attention_layernorm.weight",
}
_MATRICES = {
  "w_gate": "mlp.gate_proj.weight",
  "w_up": "mlp.up_proj.weight",
  "w_down": "mlp.down_proj.weight",
}

# Keys of config.json with which this decoder would be another, and the value
# with which it is not.
_FIXED = {"hidden_act": "silu", "mlp_bias": False}


class Decoder(NamedTuple):
  """A decoder to be served.

  Attributes:
    params: Its weights, a tuple of layers.
    indexers: The indexer of each layer, None where it shares a selection.
  """

  params: DecoderParams[tuple[LayerParams, ...]]
  indexers: tuple[Indexers | None, ...]


class Loaded(NamedTuple):
  """What a folder holds.

  Attributes:
    config: The sizes.
    decoder: The weights.
    end_tokens: Tokens that end a text; often none.
    max_positions: Tokens of the longest text it is made for, where that is
      said.
  """

  config: dsa.DSAConfig
  decoder: Decoder
  end_tokens: frozenset[int]
  max_positions: int | None


def prepare(directory: Path) -> None:
  """Makes a folder, and makes sure that a decoder can be saved in it.

  Args:
    directory: The folder.

  Raises:
    OSError: If it cannot be made or written to.
    ModuleNotFoundError: If safetensors is not installed.
  """
  _save_file()
  directory.mkdir(parents=True, exist_ok=True)
  probe = directory / f"{_WEIGHTS}.{os.getpid()}.tmp"
  probe.touch()
  probe.unlink()


def save(
  directory: Path,
  decoder: StackedParams,
  indexers: Indexers,
  config: dsa.DSAConfig,
  *,
  max_positions: int,
) -> None:
  """Writes a decoder as config.json and model.safetensors.

  Args:
    directory: A folder that is there; files of these names are replaced.
    decoder: The weights, layers stacked.
    indexers: Those of the indexers, likewise.
    config: The sizes.
    max_positions: Tokens of the longest text it was trained on.

  Raises:
    OSError: If it cannot be written.
    ModuleNotFoundError: If safetensors is not installed.
  """
  tensors: dict[str, Any] = {
    _EMBEDDING: decoder.embedding,
    _FINAL_NORM: decoder.final_norm,
    _HEAD: decoder.head.T,
  }
  for number in range(config.num_hidden_layers):
    layer, indexer = jax.tree.map(
      lambda stacked, at=number: stacked[at], (decoder.layers, indexers)
    )
    prefix = _LAYER.format(number)
    tensors |= dsa.checkpoint.params_to_hf(
      dsa.DSAParams(layer.mla, indexer), config, prefix + _ATTENTION
    )
    for field, name in _NORMS.items():
      tensors[prefix + name] = getattr(layer, field)
    for field, name in _MATRICES.items():
      tensors[prefix + name] = getattr(layer, field).T
  config_json = _config_json(config, decoder, max_positions)
  contiguous = {k: np.ascontiguousarray(v) for k, v in tensors.items()}
  _save_file()(contiguous, directory / _WEIGHTS, {"format": "pt"})
  (directory / _CONFIG).write_text(json.dumps(config_json, indent=2) + "\n")


def load(directory: Path) -> Loaded:
  """Reads a decoder.

  Args:
    directory: A folder of DeepSeek-V3.2 or GLM-5, whose MLPs are dense.

  Returns:
    What it holds.

  Raises:
    FileNotFoundError: If the folder or a file of it is missing.
    ValueError: If it is damaged, a tensor is missing or of the wrong shape, or
      the model is one that this decoder is not.
  """
  folder = dsa.checkpoint.open_hf(directory)
  config_json = folder.config_json()
  config = dsa.DSAConfig.from_hf(config_json)
  _check_dense(config_json, config)
  end_tokens = _end_tokens(config_json)
  max_positions = _integer(config_json, "max_position_embeddings")
  layers = range(config.num_hidden_layers)
  attention = dsa.checkpoint.load_hf(directory, config, layers)
  params = DecoderParams(
    embedding=_read(folder, _EMBEDDING, _sizes(config_json)),
    layers=tuple(
      _read_layer(folder, layer, attention[layer].mla, config_json)
      for layer in layers
    ),
    final_norm=_read(folder, _FINAL_NORM, _sizes(config_json)[1:]),
    head=_read_head(folder, config_json),
  )
  return Loaded(
    config=config,
    decoder=Decoder(params, tuple(layer.indexer for layer in attention)),
    end_tokens=end_tokens,
    max_positions=max_positions,
  )


def _read_layer(
  folder: Folder,
  number: int,
  mla: dsa.MLAParams[jax.Array],
  config_json: Mapping[str, Any],
) -> LayerParams:
  prefix = _LAYER.format(number)
  embed, width = config_json["hidden_size"], config_json["intermediate_size"]
  gains = {
    field: _read(folder, prefix + name, (embed,))
    for field, name in _NORMS.items()
  }
  matrices = {
    field: _read(
      folder,
      prefix + name,
      (embed, width) if field == "w_down" else (width, embed),
    ).T
    for field, name in _MATRICES.items()
  }
  return LayerParams(mla=mla, **gains, **matrices)


def _end_tokens(config_json: Mapping[str, Any]) -> frozenset[int]:
  """Tokens that end a text: a checkpoint says one, several or none."""
  said = config_json.get("eos_token_id")
  tokens = said if isinstance(said, list) else [] if said is None else [said]
  if any(type(token) is not int for token in tokens):
    raise ValueError(f"eos_token_id must be integers, got {said!r}")
  return frozenset(tokens)


def _integer(config_json: Mapping[str, Any], key: str) -> int | None:
  """What a key says; None where it is missing or null."""
  said: int | None = config_json.get(key)
  if said is not None and type(said) is not int:
    raise ValueError(f"{key} must be an integer, got {said!r}")
  return said


def _read_head(folder: Folder, config_json: Mapping[str, Any]) -> jax.Array:
  is_tied = config_json.get("tie_word_embeddings", False)
  name = _EMBEDDING if is_tied else _HEAD
  return _read(folder, name, _sizes(config_json)).T


def _read(folder: Folder, name: str, shape: tuple[int, ...]) -> jax.Array:
  return jnp.asarray(dsa.checkpoint.read_tensor(folder, name, shape))


def _sizes(config_json: Mapping[str, Any]) -> tuple[int, int]:
  """The vocabulary's size and E."""
  return config_json["vocab_size"], config_json["hidden_size"]


def _check_dense(config_json: Mapping[str, Any], config: dsa.DSAConfig) -> None:
  """Refuses what `apply_layer` does not compute."""
  missing = [
    key
    for key in ("vocab_size", "intermediate_size")
    if _integer(config_json, key) is None
  ]
  if missing:
    raise ValueError(f"config lacks {', '.join(missing)}")
  for key, value in _FIXED.items():
    if config_json.get(key, value) != value:
      raise ValueError(
        f"{key}={config_json[key]!r} is not supported, only {value!r}"
      )
  layers = config.num_hidden_layers
  kinds = config_json.get("mlp_layer_types")
  if kinds is None:
    dense = _integer(config_json, "first_k_dense_replace")
    dense = layers if dense is None else dense
    kinds = ["dense"] * dense + ["sparse"] * (layers - dense)
  if not isinstance(kinds, list):
    raise ValueError(f"mlp_layer_types must be a list, got {kinds!r}")
  if "sparse" in kinds[:layers]:
    raise ValueError(
      f"layer {kinds.index('sparse')} is a mixture of experts: only models of "
      "dense MLPs are supported"
    )


def _config_json(
  config: dsa.DSAConfig, decoder: StackedParams, max_positions: int
) -> dict[str, Any]:
  rope = dataclasses.asdict(config.rope)
  if config.rope.rope_type == "default":
    rope = {key: rope[key] for key in ("rope_type", "rope_theta")}
  else:
    rope["mscale"] = rope["mscale_all_dim"]
  fields = dataclasses.asdict(config)
  ours = ("rope", "latent_norm_eps", "index_k_norm_eps", "indexer_types")
  sizes = {
    key: value
    for key, value in fields.items()
    if key not in ours and not key.endswith("_quantization")
  }
  return {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    **sizes,
    "num_key_value_heads": config.num_attention_heads,
    "vocab_size": decoder.embedding.shape[0],
    "intermediate_size": decoder.layers.w_gate.shape[-1],
    "hidden_act": _FIXED["hidden_act"],
    "first_k_dense_replace": config.num_hidden_layers,
    "max_position_embeddings": max_positions,
    "rope_parameters": rope,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": str(decoder.embedding.dtype),
  }


def _save_file() -> Any:
  try:
    from safetensors.numpy import save_file
  except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
      "writing a checkpoint needs safetensors: "
      "pip install 'dsa-jax[checkpoint]'"
    ) from error
  return save_file
