"""Hugging Face tensors to and from `DSAParams`.

Checkpoints hold matrices of shape [outputs, inputs] with the heads folded into
one of the two. One table says, for each parameter, its name there and how its
axes lie; it is read in one direction to load and in the other to save.

Block-quantised weights (float8_e4m3fn with a `weight_scale_inv` beside them)
are dequantised: value = weight * scale of its 128 x 128 block, where the last
block of a row or column may be partial.

Source: the published checkpoints of DeepSeek-V3.2 and GLM-5.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import einops
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from dsa.config import DSAConfig
from dsa.params import (
  DSAParams,
  IndexerParams,
  MLAParams,
  ParamSpec,
  check_params,
  param_specs,
)

_BLOCK = 128


class _Tensor(NamedTuple):
  """Where a parameter lies in a checkpoint.

  Attributes:
    name: Its name behind the layer's prefix.
    theirs: Its axes in the checkpoint, as einops writes them.
    ours: Its axes in `DSAParams`.
  """

  name: str
  theirs: str
  ours: str


_MLA = MLAParams(
  wq_a=_Tensor("q_a_proj.weight", "L E", "E L"),
  q_norm=_Tensor("q_a_layernorm.weight", "L", "L"),
  wq_b=_Tensor("q_b_proj.weight", "(N Q) L", "L N Q"),
  wkv_a=_Tensor("kv_a_proj_with_mqa.weight", "A E", "E A"),
  kv_norm=_Tensor("kv_a_layernorm.weight", "C", "C"),
  wkv_b=_Tensor("kv_b_proj.weight", "(N U) C", "C N U"),
  wo=_Tensor("o_proj.weight", "E (N V)", "N V E"),
)
_INDEXER = IndexerParams(
  wq_b=_Tensor("indexer.wq_b.weight", "(I D) L", "L I D"),
  wk=_Tensor("indexer.wk.weight", "D E", "E D"),
  k_norm_scale=_Tensor("indexer.k_norm.weight", "D", "D"),
  k_norm_bias=_Tensor("indexer.k_norm.bias", "D", "D"),
  weights_proj=_Tensor("indexer.weights_proj.weight", "I E", "E I"),
)


def params_from_hf(
  tensors: Mapping[str, Any],
  config: DSAConfig,
  *,
  prefix: str,
  has_indexer: bool = True,
) -> DSAParams[jax.Array]:
  """Reads the attention parameters of one layer.

  Args:
    tensors: Arrays by their name in the checkpoint; others are ignored.
    config: The sizes.
    prefix: What stands before the names, such as
      "model.layers.0.self_attn.".
    has_indexer: False for a layer that is given its selection and holds no
      indexer tensors.

  Returns:
    The parameters in the checkpoint's dtypes, fp8 weights in bfloat16 and
    `weights_proj` in float32.

  Raises:
    ValueError: If a tensor or a scale is missing, or a shape is not what the
      configuration says. Nothing is loaded then.
  """
  entries, specs, treedef = _layout(config, has_indexer=has_indexer)
  names = [prefix + entry.name for entry in entries]
  missing = [name for name in names if name not in tensors]
  if missing:
    raise ValueError(f"checkpoint lacks {', '.join(missing)}")
  leaves = []
  for name, entry, spec in zip(names, entries, specs, strict=True):
    sizes = dict(zip(entry.ours.split(), spec.shape, strict=True))
    tensor = _read(tensors, name, entry, sizes)
    ours = einops.rearrange(tensor, f"{entry.theirs} -> {entry.ours}", **sizes)
    is_head_weights = entry is _INDEXER.weights_proj
    leaves.append(jnp.asarray(ours, jnp.float32 if is_head_weights else None))
  return jax.tree.unflatten(treedef, leaves)


def params_to_hf(
  params: DSAParams[jax.Array], config: DSAConfig, prefix: str
) -> dict[str, np.ndarray]:
  """Writes the parameters of one layer under their names in a checkpoint.

  Args:
    params: The parameters; without an indexer its tensors are left out.
    config: The sizes.
    prefix: What stands before the names.

  Returns:
    Arrays by name, in the parameters' dtypes; `params_from_hf` gives back the
    same bits.

  Raises:
    TypeError: If `params` is not a `DSAParams` of arrays of float dtypes.
    ValueError: If a shape is not what the configuration says.
  """
  check_params(params, config)
  has_indexer = params.indexer is not None
  entries, specs, treedef = _layout(config, has_indexer=has_indexer)
  leaves = treedef.flatten_up_to(params)
  tensors = {}
  for entry, spec, leaf in zip(entries, specs, leaves, strict=True):
    name = prefix + entry.name
    sizes = dict(zip(entry.ours.split(), spec.shape, strict=True))
    tensors[name] = einops.rearrange(
      np.asarray(leaf), f"{entry.ours} -> {entry.theirs}", **sizes
    )
  return tensors


def _layout(
  config: DSAConfig, *, has_indexer: bool
) -> tuple[list[_Tensor], list[ParamSpec], Any]:
  """Each parameter's place in a checkpoint and its spec, and their tree."""
  specs = param_specs(config, jnp.float32)
  if not has_indexer:
    specs = specs._replace(indexer=None)
  table = DSAParams(mla=_MLA, indexer=_INDEXER if has_indexer else None)
  treedef: Any = jax.tree.structure(specs)
  return treedef.flatten_up_to(table), treedef.flatten_up_to(specs), treedef


def _read(
  tensors: Mapping[str, Any], name: str, entry: _Tensor, sizes: dict[str, int]
) -> np.ndarray:
  """The tensor in plain numbers, its shape checked."""
  tensor = np.asarray(tensors[name])
  expected = _folded_shape(entry.theirs, sizes)
  if tensor.shape != expected:
    raise ValueError(f"{name} must have shape {expected}, got {tensor.shape}")
  if tensor.dtype != ml_dtypes.float8_e4m3fn:
    _check_float(name, tensor)
    return tensor
  scale_name = f"{name}_scale_inv"
  if scale_name not in tensors:
    raise ValueError(f"{name} is float8_e4m3fn but {scale_name} is missing")
  return _dequantize(tensor, np.asarray(tensors[scale_name]), scale_name)


def _check_float(name: str, tensor: np.ndarray) -> None:
  """Bytes and integers are never read as plain numbers."""
  is_float = jnp.issubdtype(tensor.dtype, jnp.floating)
  if not is_float or tensor.dtype.itemsize < 2:
    raise ValueError(
      f"{name} must be of a float dtype of at least 16 bits or float8_e4m3fn, "
      f"got {tensor.dtype}"
    )


def _folded_shape(axes: str, sizes: dict[str, int]) -> tuple[int, ...]:
  """The shape that einops axes such as "(N Q) L" stand for."""
  words = re.findall(r"\(.*?\)|\w+", axes)
  return tuple(
    math.prod(sizes[axis] for axis in word.strip("()").split())
    for word in words
  )


def _dequantize(
  weight: np.ndarray, scale: np.ndarray, scale_name: str
) -> np.ndarray:
  """Multiplies each 128 x 128 block by its scale; bfloat16."""
  blocks = tuple(-(-size // _BLOCK) for size in weight.shape)
  if scale.shape != blocks:
    raise ValueError(
      f"{scale_name} must have shape {blocks}, got {scale.shape}"
    )
  if not jnp.issubdtype(scale.dtype, jnp.floating):
    raise ValueError(
      f"{scale_name} must be of a float dtype, got {scale.dtype}"
    )
  scale = scale.astype(np.float32)
  for axis, size in enumerate(weight.shape):
    scale = np.repeat(scale, _BLOCK, axis=axis).take(range(size), axis=axis)
  return (weight.astype(np.float32) * scale).astype(ml_dtypes.bfloat16)
