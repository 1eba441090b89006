"""What the public transformers package answered, read from goldens/*.npz.

`load` gives a file as it is; `config`, `mla_params` and `indexer_params` turn
Hugging Face's names and [out, in] matrices into the oracle's, without the
library's own checkpoint code, so that the two can be held against each other.
"""

import json
import os
from typing import Any, NamedTuple

import numpy as np
from einops import rearrange

from testing import oracle

_DIRECTORY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "goldens")


class Golden(NamedTuple):
  """One file of goldens."""

  hf_config: dict[str, Any]  # {} where the file has none
  tensors: dict[str, np.ndarray]  # weights under their checkpoint names
  grads: dict[str, np.ndarray]  # gradients of sum(out * cotangent), likewise
  arrays: dict[str, np.ndarray]  # all else: inputs, outputs, masks


def load(name):
  """Reads one file, for example load("deepseek_v32_yarn_100")."""
  hf_config, tensors, grads, arrays = {}, {}, {}, {}
  with np.load(os.path.join(_DIRECTORY, name + ".npz")) as file:
    for key in file.files:
      if key == "hf_config":
        hf_config = json.loads(str(file[key]))
      elif key.startswith("w/"):
        tensors[key.removeprefix("w/")] = file[key]
      elif key.startswith("g/"):
        grads[key.removeprefix("g/")] = file[key]
      else:
        arrays[key] = file[key]
  return Golden(hf_config, tensors, grads, arrays)


def config(golden):
  """Returns the oracle's `Config` of a golden's config.json."""
  given = golden.hf_config
  rope = {
    field: given["rope_parameters"][field]
    for field in oracle.Rope._fields
    if field in given["rope_parameters"]
  }
  same_name = {
    field: given[field] for field in oracle.Config._fields if field in given
  }
  return oracle.Config(
    **same_name,
    indexer_rope_interleave=given["model_type"] == "glm_moe_dsa",
    rope=oracle.Rope(**rope),
  )


def mla_params(tensors, config, prefix="self_attn."):
  """Returns `oracle.MLAParams` of weights, or of gradients, of one layer.

  Args:
    tensors: arrays under checkpoint names; matrices are [out, in].
    config: `oracle.Config`.
    prefix: what stands before "q_a_proj.weight".
  """
  heads = config.num_attention_heads

  def tensor(name):
    return tensors[f"{prefix}{name}.weight"]

  return oracle.MLAParams(
    wq_a=tensor("q_a_proj").T,
    q_norm=tensor("q_a_layernorm"),
    wq_b=rearrange(tensor("q_b_proj"), "(n d) l -> l n d", n=heads),
    wkv_a=tensor("kv_a_proj_with_mqa").T,
    kv_norm=tensor("kv_a_layernorm"),
    wkv_b=rearrange(tensor("kv_b_proj"), "(n d) c -> c n d", n=heads),
    wo=rearrange(tensor("o_proj"), "e (n v) -> n v e", n=heads),
  )


def indexer_params(tensors, config, prefix="self_attn."):
  """Returns `oracle.IndexerParams`, args as `mla_params`; None without one."""
  prefix += "indexer."
  if prefix + "wk.weight" not in tensors:
    return None
  wq_b = tensors[prefix + "wq_b.weight"]
  return oracle.IndexerParams(
    wq_b=rearrange(wq_b, "(i d) l -> l i d", i=config.index_n_heads),
    wk=tensors[prefix + "wk.weight"].T,
    k_norm_scale=tensors[prefix + "k_norm.weight"],
    k_norm_bias=tensors[prefix + "k_norm.bias"],
    weights_proj=tensors[prefix + "weights_proj.weight"].T,
  )
