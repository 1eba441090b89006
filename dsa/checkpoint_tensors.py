"""One tensor of a checkpoint: whether it is what it must be, and its numbers.

Checkpoints hold some weights as float8_e4m3fn with a `weight_scale_inv` beside
them: value = weight * scale of its 128 x 128 block, where the last block of a
row or column may be partial. Bytes without their scale are never numbers.

Source: the published checkpoints of DeepSeek-V3.2.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from dsa.checkpoint_files import Folder, StoredTensor

_BLOCK = 128


def check_present(tensors: Mapping[str, Any], names: Sequence[str]) -> None:
  """Checks that tensors are there.

  Args:
    tensors: Arrays by their name in the checkpoint, or an opened folder.
    names: Those wanted.

  Raises:
    ValueError: If some are missing; it names each.
  """
  missing = [name for name in names if name not in tensors]
  if missing:
    where = tensors.listing if isinstance(tensors, Folder) else "checkpoint"
    raise ValueError(f"{where} lacks {', '.join(missing)}")


def _tensor(tensors: Mapping[str, Any], name: str) -> np.ndarray | StoredTensor:
  """A tensor whose shape and dtype are known; one in a file is not read."""
  tensor = tensors[name]
  return tensor if isinstance(tensor, StoredTensor) else np.asarray(tensor)


def _called(name: str, tensor: np.ndarray | StoredTensor) -> str:
  """What errors call a tensor."""
  if isinstance(tensor, StoredTensor):
    return f"{name} in {tensor.path}"
  return name


def check_tensor(
  tensors: Mapping[str, Any], name: str, shape: tuple[int, ...]
) -> None:
  """Checks the shape and dtype of a tensor, and of its scale if it has one.

  Args:
    tensors: Arrays by their name in the checkpoint, or an opened folder, from
      which no number is read.
    name: Which.
    shape: What its shape must be.

  Raises:
    ValueError: If it is of another shape or no floats, or its scale is missing
      or wrong.
  """
  tensor = _tensor(tensors, name)
  called = _called(name, tensor)
  if tensor.shape != shape:
    raise ValueError(f"{called} must have shape {shape}, got {tensor.shape}")
  if tensor.dtype != ml_dtypes.float8_e4m3fn:
    _check_float(called, tensor.dtype)
    return
  scale_name = f"{name}_scale_inv"
  if scale_name not in tensors:
    raise ValueError(f"{called} is float8_e4m3fn but {scale_name} is missing")
  scale = _tensor(tensors, scale_name)
  called = _called(scale_name, scale)
  blocks = tuple(-(-size // _BLOCK) for size in shape)
  if scale.shape != blocks:
    raise ValueError(f"{called} must have shape {blocks}, got {scale.shape}")
  if not jnp.issubdtype(scale.dtype, jnp.floating):
    raise ValueError(f"{called} must be of a float dtype, got {scale.dtype}")


def read_checked(
  tensors: Mapping[str, Any], name: str, dequantized: Any
) -> np.ndarray:
  """Reads a tensor that was checked.

  Args:
    tensors: Arrays by their name in the checkpoint, or an opened folder.
    name: Which.
    dequantized: The dtype to return fp8 weights in.

  Returns:
    The tensor, in its own dtype unless it is fp8.
  """
  tensor = np.asarray(tensors[name])
  if tensor.dtype != ml_dtypes.float8_e4m3fn:
    return tensor
  scale = np.asarray(tensors[f"{name}_scale_inv"])
  return _dequantize(tensor, scale).astype(dequantized)


def _check_float(called: str, dtype: np.dtype[Any]) -> None:
  """Bytes and integers are never read as plain numbers."""
  if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
    raise ValueError(
      f"{called} must be of a float dtype of at least 16 bits or "
      f"float8_e4m3fn, got {dtype}"
    )


def _dequantize(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
  """Multiplies each 128 x 128 block by its scale; float32."""
  scale = scale.astype(np.float32)
  for axis, size in enumerate(weight.shape):
    scale = np.repeat(scale, _BLOCK, axis=axis).take(range(size), axis=axis)
  return weight.astype(np.float32) * scale
