"""Writes checkpoint folders as Hugging Face lays them out, for tests."""

import json
import pathlib

import ml_dtypes
import numpy as np
from safetensors import numpy as safetensors


def write_folder(directory, tensors, hf_config, shards=1):
  """Writes config.json, the shards, and their index if there are several.

  Args:
    directory: where; made if it is not there.
    tensors: arrays by name; those of a layer spread over all shards.
    hf_config: what config.json says.
    shards: how many.

  Returns:
    The name of the shard of each tensor.
  """
  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  (directory / "config.json").write_text(json.dumps(hf_config))
  files = [
    f"model-{shard + 1:05}-of-{shards:05}.safetensors"
    for shard in range(shards)
  ]
  if shards == 1:
    files = ["model.safetensors"]
  weight_map = {
    name: files[place % shards] for place, name in enumerate(tensors)
  }
  for file in files:
    held = {n: np.ascontiguousarray(tensors[n]) for n in tensors}
    safetensors.save_file(
      {n: held[n] for n in held if weight_map[n] == file}, directory / file
    )
  if shards > 1:
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
  return weight_map


def quantized(tensors, seed=0):
  """The matrices as seeded fp8 blocks, and what they stand for in float32.

  Args:
    tensors: arrays by name; only their shapes count where they are matrices.
    seed: of the numbers and the scales.

  Returns:
    Tensors by name with a scale beside each fp8 one, and the plain numbers of
    all but the scales.
  """
  rng = np.random.default_rng(seed)
  stored, plain = {}, {}
  for name, tensor in tensors.items():
    if tensor.ndim != 2:
      stored[name] = plain[name] = tensor
      continue
    rows, cols = tensor.shape
    values = rng.normal(size=tensor.shape).astype(ml_dtypes.float8_e4m3fn)
    blocks = -(-rows // 128), -(-cols // 128)
    scales = rng.uniform(0.01, 0.1, blocks).astype(np.float32)
    stored[name], stored[f"{name}_scale_inv"] = values, scales
    block_of_row, block_of_col = np.arange(rows) // 128, np.arange(cols) // 128
    each = scales[block_of_row[:, None], block_of_col]
    plain[name] = values.astype(np.float32) * each
  return stored, plain
