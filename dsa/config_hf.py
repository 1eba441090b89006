"""What a checkpoint's config.json says, as the fields of our configurations.

Every size comes from the checkpoint, none is guessed, and what DSA has not is
refused by name. `DSAConfig.from_hf` and `RopeConfig.from_hf` are built on it.

Sources: the published config.json files of DeepSeek-V3.2 and GLM-5, and what
transformers reads in them (DeepseekV32Config and GlmMoeDsaConfig of 5.24).
"""

import math
from collections.abc import Mapping
from typing import Any

SIZES = (
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

# The layout of the indexer's RoPE where config.json does not say it.
_INDEXER_ROPE_INTERLEAVE: Mapping[str, bool] = {
  "deepseek_v32": False,
  "glm_moe_dsa": True,
}

# What rope_type may say in a checkpoint.
_ROPE_TYPES = ("default", "yarn")

# Keys of a checkpoint's RoPE that would change the angles or scale cos and sin,
# and the value with which they do not.
_ROPE_FIXED = {
  "attention_factor": 1,
  "partial_rotary_factor": 1,
  "truncate": True,
}

# Any of these says which layers hold an indexer.
_INDEXER_TYPES_KEYS = (
  "indexer_types",
  "index_topk_pattern",
  "index_topk_freq",
  "index_skip_topk_offset",
)
_PATTERN_LETTERS = {"F": "full", "S": "shared"}


def layer_fields(config_json: Mapping[str, Any]) -> dict[str, Any]:
  """The fields of `DSAConfig` that a config.json states, but for `rope`.

  Args:
    config_json: The parsed dictionary.

  Returns:
    Values by the field's name.

  Raises:
    TypeError: If `config_json` is not a dictionary.
    ValueError: If a size is missing or the model needs what DSA has not
      (another model type, attention biases, a halves layout in MLA).
  """
  if not isinstance(config_json, Mapping):
    raise TypeError(
      "config_json must be the parsed dictionary, got "
      f"{type(config_json).__name__}"
    )
  model_type: Any = config_json.get("model_type")
  if model_type not in list(_INDEXER_ROPE_INTERLEAVE):  # May be any JSON.
    raise ValueError(
      f"model_type must be one of {sorted(_INDEXER_ROPE_INTERLEAVE)}, got "
      f"{model_type!r}"
    )
  required = (*SIZES, "rms_norm_eps")
  missing = [key for key in required if config_json.get(key) is None]
  if missing:
    raise ValueError(f"config lacks {', '.join(missing)}")
  if config_json.get("attention_bias"):
    raise ValueError("attention_bias=True is not supported: MLA has no biases")
  if config_json.get("rope_interleave") is False:
    raise ValueError(
      "rope_interleave=False is not supported: MLA turns pairs (2i, 2i + 1)"
    )
  interleave = config_json.get("indexer_rope_interleave")
  if interleave is None:
    interleave = _INDEXER_ROPE_INTERLEAVE[model_type]
  return {
    **{key: config_json[key] for key in required},
    "indexer_rope_interleave": bool(interleave),
    "indexer_types": _indexer_types(config_json),
  }


def _indexer_types(config_json: Mapping[str, Any]) -> tuple[str, ...] | None:
  """The layers' kinds: said outright, by a pattern, or by a period.

  From `index_skip_topk_offset` on, one layer in `index_topk_freq` is full;
  those before it are all full.
  """
  types, pattern, freq, offset = map(config_json.get, _INDEXER_TYPES_KEYS)
  given = types if types is not None else pattern
  if isinstance(given, str):
    unknown = sorted({*given} - {*_PATTERN_LETTERS})
    if unknown:
      raise ValueError(
        "index_topk_pattern must be of the letters F and S, got "
        f"{''.join(unknown)!r} in it"
      )
    return tuple(_PATTERN_LETTERS[letter] for letter in given)
  if given is not None:
    if not isinstance(given, list | tuple):
      raise ValueError(f"indexer_types must be a list, got {given!r}")
    return tuple(given)
  has_period = freq is not None or offset is not None
  if not has_period and config_json["model_type"] != "glm_moe_dsa":
    return None
  freq = 1 if freq is None else freq
  offset = 2 if offset is None else offset
  layers = config_json["num_hidden_layers"]
  for name, value in (
    ("index_topk_freq", freq),
    ("index_skip_topk_offset", offset),
    ("num_hidden_layers", layers),
  ):
    if not isinstance(value, int) or isinstance(value, bool):
      raise ValueError(f"{name} must be an integer, got {value!r}")
  return tuple(
    "shared" if max(layer - offset + 1, 0) % max(freq, 1) else "full"
    for layer in range(layers)
  )


def rope_fields(config_json: Mapping[str, Any]) -> dict[str, Any]:
  """The fields of `RopeConfig`, from either spelling in a config.json.

  Args:
    config_json: The whole dictionary: `rope_parameters` as newer releases
      write it, or `rope_theta` beside `rope_scaling` (or null) as older ones.

  Returns:
    Values by the field's name.

  Raises:
    ValueError: If a key that YaRN needs is missing, the type is unknown, or
      cos and sin would be scaled, which no DSA model does.
  """
  where = "rope_parameters"
  if config_json.get(where) is None:
    where = "rope_scaling"
  rope = config_json.get(where)
  if rope is None:
    rope = {}
  if not isinstance(rope, Mapping):
    raise ValueError(f"{where} must be a dictionary, got {rope!r}")
  theta = rope.get("rope_theta") or config_json.get("rope_theta")
  if theta is None:
    raise ValueError(f"config lacks rope_theta, beside {where} and in it")
  for key, value in _ROPE_FIXED.items():
    if rope.get(key) not in (None, value):
      raise ValueError(
        f"{where} has {key}={rope[key]!r}, only {value!r} is supported"
      )
  rope_type = rope.get("rope_type") or rope.get("type") or "default"
  if rope_type not in _ROPE_TYPES:
    raise ValueError(
      f"{where} has rope type {rope_type!r}, expected one of "
      f"{list(_ROPE_TYPES)}"
    )
  fields = {"rope_theta": _number("rope_theta", theta)}
  if rope_type == "default":
    return fields
  return fields | _yarn_fields(rope, where)


def _yarn_fields(rope: Mapping[str, Any], where: str) -> dict[str, Any]:
  for key in ("factor", "original_max_position_embeddings"):
    if rope.get(key) is None:
      raise ValueError(f"{where} is of type 'yarn' but lacks {key!r}")
  mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
  # cos and sin are scaled by the quotient of the two, or by the whole
  # logarithmic term where either is missing or 0.
  unscaled = mscale and mscale == mscale_all_dim
  if rope.get("attention_factor") is None and not unscaled:
    raise ValueError(
      f"{where} has mscale={mscale!r} and mscale_all_dim={mscale_all_dim!r}, "
      "expected equal numbers other than 0: else cos and sin are scaled, "
      "which is not supported"
    )
  return {
    "rope_type": "yarn",
    "factor": _number("factor", rope["factor"]),
    "original_max_position_embeddings": int(
      _number(
        "original_max_position_embeddings",
        rope["original_max_position_embeddings"],
      )
    ),
    "beta_fast": _number("beta_fast", rope.get("beta_fast") or 32.0),
    "beta_slow": _number("beta_slow", rope.get("beta_slow") or 1.0),
    "mscale_all_dim": _number("mscale_all_dim", mscale_all_dim or 0.0),
  }


def _number(name: str, value: Any) -> float:
  if not isinstance(value, int | float) or not math.isfinite(value):
    raise ValueError(f"{name} must be a number, got {value!r}")
  return float(value)
