"""Hugging Face tensors to and from `DSAParams`, in memory or in a folder.

Checkpoints hold matrices of shape [outputs, inputs] with the heads folded into
one of the two. One table says, for each parameter, its name there and how its
axes lie; it is read in one direction to load and in the other to save.

Block-quantised weights are dequantised on the way in. All names, shapes and
dtypes are checked before the first number is read.

Source: the published checkpoints of DeepSeek-V3.2 and GLM-5.
"""

import math
import operator
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import einops
import jax
import jax.numpy as jnp
import numpy as np

from dsa import config_hf
from dsa.checkpoint_files import Folder
from dsa.checkpoint_tensors import check_present, check_tensor, read_checked
from dsa.config import DSAConfig
from dsa.params import (
  DSAParams,
  IndexerParams,
  MLAParams,
  check_params,
  param_specs,
)

# What stands before the names of a layer's attention, in a folder.
_LAYER_PREFIX = "model.layers.{}.self_attn."

# Loads that take less are silent; longer ones say so as often.
_PROGRESS_S = 5.0


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
  layer = _Layer(config, prefix=prefix, has_indexer=has_indexer)
  layer.check(tensors)
  return layer.read(tensors)


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
  layer = _Layer(config, prefix=prefix, has_indexer=params.indexer is not None)
  leaves = layer.treedef.flatten_up_to(params)
  tensors = {}
  for place, leaf in zip(layer.places, leaves, strict=True):
    theirs = einops.rearrange(
      np.asarray(leaf),
      f"{place.entry.ours} -> {place.entry.theirs}",
      **place.sizes,
    )
    # What writes a file may take an array's memory for its elements in order.
    tensors[place.name] = np.ascontiguousarray(theirs)
  return tensors


def open_hf(directory: str | os.PathLike[str]) -> Folder:
  """Opens a checkpoint folder; no tensor is read yet.

  Args:
    directory: The folder.

  Returns:
    A mapping of names to tensors that `np.asarray` reads, for `params_from_hf`
    and `read_tensor`. `config_json()` reads its config.json.

  Raises:
    FileNotFoundError: If it does not exist or has no safetensors files.
    ValueError: If the list of its tensors is damaged.
  """
  return Folder(directory)


def load_hf(
  directory: str | os.PathLike[str],
  config: DSAConfig,
  layers: Iterable[int],
  *,
  progress: Callable[[str], None] | None = None,
) -> list[DSAParams[jax.Array]]:
  """Reads the attention parameters of layers from a checkpoint folder.

  Only the shards that hold these layers are opened, and only the attention's
  tensors are read.

  Args:
    directory: A Hugging Face folder: config.json and safetensors.
    config: The sizes, `DSAConfig.from_hf(open_hf(directory).config_json())`;
      what it says otherwise than config.json is an error.
    layers: Which layers, from 0 on.
    progress: Called with a line every few seconds of a long load; writes to
      stderr by default.

  Returns:
    The parameters of each layer, in the order of `layers` and as
    `params_from_hf` gives them. A layer for which `config.has_indexer` is False
    has none.

  Raises:
    FileNotFoundError: If the folder, config.json or a shard is missing.
    TypeError: If a layer is no integer.
    ValueError: If there is no such layer, config.json says otherwise than
      `config`, a shard is damaged, or a tensor or scale is missing or not of
      the shape and dtype it must have. The file and the tensor are named, and
      nothing is loaded.
  """
  folder = Folder(directory)
  numbers = [operator.index(layer) for layer in layers]
  _check_config(folder, config, numbers)
  plan = [
    _Layer(
      config,
      prefix=_LAYER_PREFIX.format(number),
      has_indexer=config.has_indexer(number),
    )
    for number in numbers
  ]
  for layer in plan:
    layer.check(folder)
  report = _Progress(folder, plan, progress or _to_stderr)
  loaded = []
  for layer in plan:
    loaded.append(layer.read(folder))
    report(layer)
  return loaded


def read_tensor(
  tensors: Mapping[str, Any], name: str, shape: tuple[int, ...]
) -> np.ndarray:
  """Reads one tensor in plain numbers: what a layer needs beside attention.

  Args:
    tensors: Arrays by their name in the checkpoint, or an opened folder.
    name: Which.
    shape: What its shape must be.

  Returns:
    The tensor in its own dtype, fp8 weights in bfloat16.

  Raises:
    ValueError: If it or its scale is missing, of another shape or no floats.
  """
  check_present(tensors, [name])
  check_tensor(tensors, name, shape)
  return read_checked(tensors, name, jnp.bfloat16)


class _Place(NamedTuple):
  """A parameter's name in a checkpoint, how it lies there, and its sizes."""

  name: str
  entry: _Tensor
  sizes: dict[str, int]


class _Layer:
  """Where the parameters of one layer lie in a checkpoint.

  Attributes:
    prefix: What stands before their names.
    places: One for each, in the order of the tree's leaves.
    treedef: The tree.
  """

  def __init__(self, config: DSAConfig, *, prefix: str, has_indexer: bool):
    specs = param_specs(config, jnp.float32)
    if not has_indexer:
      specs = specs._replace(indexer=None)
    table = DSAParams(mla=_MLA, indexer=_INDEXER if has_indexer else None)
    self.prefix = prefix
    treedef: Any = jax.tree.structure(specs)
    self.treedef = treedef
    self.places = [
      _Place(
        prefix + entry.name,
        entry,
        dict(zip(entry.ours.split(), spec.shape, strict=True)),
      )
      for entry, spec in zip(
        treedef.flatten_up_to(table),
        treedef.flatten_up_to(specs),
        strict=True,
      )
    ]

  def check(self, tensors: Mapping[str, Any]) -> None:
    """Raises unless all can be read; reads no numbers from a file."""
    check_present(tensors, [place.name for place in self.places])
    for place in self.places:
      shape = _folded_shape(place.entry.theirs, place.sizes)
      check_tensor(tensors, place.name, shape)

  def read(self, tensors: Mapping[str, Any]) -> DSAParams[jax.Array]:
    leaves = []
    for name, entry, sizes in self.places:
      is_head_weights = entry is _INDEXER.weights_proj
      dequantized = jnp.float32 if is_head_weights else jnp.bfloat16
      theirs = read_checked(tensors, name, dequantized)
      ours = einops.rearrange(
        theirs, f"{entry.theirs} -> {entry.ours}", **sizes
      )
      leaves.append(jnp.asarray(ours, jnp.float32 if is_head_weights else None))
    return jax.tree.unflatten(self.treedef, leaves)


class _Progress:
  """Says every few seconds how much of a load is done."""

  def __init__(
    self, folder: Folder, plan: list[_Layer], say: Callable[[str], None]
  ):
    self._folder, self._say = folder, say
    self._total = sum(map(self._bytes, plan))
    self._done = 0
    self._last = time.monotonic()

  def __call__(self, layer: _Layer) -> None:
    self._done += self._bytes(layer)
    now = time.monotonic()
    if now - self._last >= _PROGRESS_S:
      self._last = now
      self._say(
        f"reading {self._folder.directory}: {self._done / 1e9:,.1f} of "
        f"{self._total / 1e9:,.1f} GB, up to {layer.prefix}*"
      )

  def _bytes(self, layer: _Layer) -> int:
    return sum(self._folder[place.name].nbytes for place in layer.places)


def _to_stderr(line: str) -> None:
  sys.stderr.write(f"{line}\n")
  sys.stderr.flush()


def _check_config(folder: Folder, config: DSAConfig, layers: list[int]) -> None:
  """What a checkpoint says of itself is never overruled by a default."""
  path = folder.directory / "config.json"
  config_json = folder.config_json()
  try:
    stated = DSAConfig.from_hf(config_json)
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error
  # A model may be cut to its first layers, and entries past them are idle.
  names = {"rope", *config_hf.layer_fields(config_json)}
  names -= {"num_hidden_layers", "indexer_types"}
  differences = [
    f"{name}={getattr(stated, name)!r}, got {getattr(config, name)!r}"
    for name in sorted(names)
    if getattr(stated, name) != getattr(config, name)
  ]
  differences += [
    f"has_indexer({layer})={stated.has_indexer(layer)}, got "
    f"{config.has_indexer(layer)}"
    for layer in layers
    if stated.has_indexer(layer) != config.has_indexer(layer)
  ]
  if differences:
    raise ValueError(f"config must have {path}'s {'; '.join(differences)}")


def _folded_shape(axes: str, sizes: dict[str, int]) -> tuple[int, ...]:
  """The shape that einops axes such as "(N Q) L" stand for."""
  words = re.findall(r"\(.*?\)|\w+", axes)
  return tuple(
    math.prod(sizes[axis] for axis in word.strip("()").split())
    for word in words
  )
