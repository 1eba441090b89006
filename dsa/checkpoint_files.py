"""Hugging Face checkpoint folders, whose tensors are read when they are needed.

A folder holds config.json and one model.safetensors, or several shards and a
model.safetensors.index.json whose `weight_map` names the shard of each tensor.
A shard is

    8 bytes   N, little-endian
    N bytes   JSON: the dtype, shape and data_offsets of each tensor, by name
    the rest  the tensors, row-major and little-endian

Source: the description of the format in github.com/huggingface/safetensors.
"""

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

_CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_ONLY_SHARD = "model.safetensors"

_LENGTH_BYTES = 8
_METADATA = "__metadata__"

_DTYPES = {
  "F64": np.float64,
  "F32": np.float32,
  "F16": np.float16,
  "BF16": ml_dtypes.bfloat16,
  "F8_E4M3": ml_dtypes.float8_e4m3fn,
  "F8_E5M2": ml_dtypes.float8_e5m2,
  "F8_E8M0": ml_dtypes.float8_e8m0fnu,
  "I64": np.int64,
  "I32": np.int32,
  "I16": np.int16,
  "I8": np.int8,
  "U64": np.uint64,
  "U32": np.uint32,
  "U16": np.uint16,
  "U8": np.uint8,
  "BOOL": np.bool_,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor:
  """A tensor in a shard; `np.asarray` reads it.

  Attributes:
    path: The shard.
    shape: Its sizes.
    dtype: Its NumPy dtype.
    start: Where its bytes begin in the shard.
  """

  path: Path
  shape: tuple[int, ...]
  dtype: np.dtype[Any]
  start: int

  @property
  def nbytes(self) -> int:
    """Bytes that it takes."""
    return math.prod(self.shape) * self.dtype.itemsize

  def __array__(
    self, dtype: Any = None, copy: bool | None = None
  ) -> np.ndarray:
    del copy  # What is read is a copy.
    data = np.fromfile(self.path, np.uint8, self.nbytes, offset=self.start)
    if data.size != self.nbytes:
      raise ValueError(f"{self.path} became shorter while it was read")
    array = data.view(self.dtype).reshape(self.shape)
    return array if dtype is None else array.astype(dtype)


class Folder(Mapping[str, StoredTensor]):
  """The tensors of a checkpoint folder by name.

  Shards are opened when a tensor of theirs is first asked for, and then only
  their headers are read; `np.asarray` reads a tensor.

  Attributes:
    directory: The folder.
    listing: The file that says which tensors there are.
  """

  def __init__(self, directory: str | os.PathLike[str]):
    """Reads which tensors there are, and in which shard.

    Args:
      directory: The folder.

    Raises:
      FileNotFoundError: If it, or both of the files that may list its tensors,
        do not exist.
      ValueError: If the list is damaged.
    """
    self.directory = Path(directory)
    self._headers: dict[Path, dict[str, StoredTensor]] = {}
    self.listing = self.directory / _INDEX
    if self.listing.exists():
      self._shards = self._read_index()
      return
    self.listing = self.directory / _ONLY_SHARD
    if not self.listing.exists():
      raise FileNotFoundError(
        f"{self.directory} has neither {_INDEX} nor {_ONLY_SHARD}"
      )
    self._headers[self.listing] = _read_header(self.listing)
    self._shards = dict.fromkeys(self._headers[self.listing], self.listing)

  def __getitem__(self, name: str) -> StoredTensor:
    path = self._shards[name]
    if path not in self._headers:
      if not path.is_file():
        raise FileNotFoundError(f"{path} is missing, which should hold {name}")
      try:
        self._headers[path] = _read_header(path)
      except ValueError as error:
        raise ValueError(f"cannot read {name}: {error}") from error
    if name not in self._headers[path]:
      raise ValueError(f"{path} lacks {name}, which {self.listing} says it has")
    return self._headers[path][name]

  def __iter__(self) -> Iterator[str]:
    return iter(self._shards)

  def __len__(self) -> int:
    return len(self._shards)

  def __contains__(self, name: object) -> bool:
    return name in self._shards

  def config_json(self) -> dict[str, Any]:
    """Reads config.json.

    Returns:
      The parsed dictionary.

    Raises:
      FileNotFoundError: If there is none.
      ValueError: If it is no dictionary.
    """
    return _read_json(self.directory / _CONFIG)

  def _read_index(self) -> dict[str, Path]:
    weight_map = _read_json(self.listing).get("weight_map")
    if not isinstance(weight_map, dict):
      raise ValueError(f"{self.listing} has no dictionary under weight_map")
    for name, shard in weight_map.items():
      # Never a path: what is listed lies in the folder.
      if not isinstance(shard, str) or not _is_file_name(shard):
        raise ValueError(
          f"{self.listing} must name a file of the folder for {name}, got "
          f"{shard!r}"
        )
    return {name: self.directory / shard for name, shard in weight_map.items()}


def _is_file_name(name: str) -> bool:
  return name not in ("", "..") and Path(name).name == name


def _read_json(path: Path) -> dict[str, Any]:
  try:
    parsed = json.loads(path.read_bytes())
  except ValueError as error:
    raise ValueError(f"{path} is no JSON: {error}") from error
  if not isinstance(parsed, dict):
    raise ValueError(f"{path} must hold a dictionary, got {parsed!r}")
  return parsed


def _read_header(path: Path) -> dict[str, StoredTensor]:
  """The tensors of a shard, which must hold their bytes and no others."""
  size = path.stat().st_size
  with path.open("rb") as stream:
    length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
    data_start = _LENGTH_BYTES + length
    if data_start > size:
      raise ValueError(
        f"{path} is truncated or no safetensors file: it has {size} bytes, its "
        f"header alone would take {data_start}"
      )
    header = stream.read(length)
  try:
    entries = json.loads(header)
    tensors = {
      name: _stored_tensor(path, data_start, **entry)
      for name, entry in entries.items()
      if name != _METADATA
    }
  except (AttributeError, TypeError, ValueError) as error:
    raise ValueError(f"{path} has a damaged header: {error}") from error
  _check_coverage(path, tensors, data_start, size)
  return tensors


def _stored_tensor(
  path: Path,
  data_start: int,
  *,
  dtype: str,
  shape: list[int],
  data_offsets: list[int],
) -> StoredTensor:
  if dtype not in _DTYPES:
    raise ValueError(f"dtype {dtype!r} is none of {sorted(_DTYPES)}")
  begin, end = data_offsets
  if any(type(number) is not int for number in (begin, end, *shape)):
    raise ValueError(f"{shape} and {data_offsets} must be integers")
  tensor = StoredTensor(
    path=path,
    shape=tuple(shape),
    dtype=np.dtype(_DTYPES[dtype]),
    start=data_start + begin,
  )
  if min(begin, *shape, 0) < 0 or tensor.nbytes != end - begin:
    raise ValueError(
      f"bytes {begin} to {end} are no {dtype} of shape {tensor.shape}"
    )
  return tensor


def _check_coverage(
  path: Path, tensors: Mapping[str, StoredTensor], data_start: int, size: int
) -> None:
  """Checks that tensors lie one behind the other, up to the file's end."""
  ordered = sorted(
    tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)
  )
  end = data_start
  for name, tensor in ordered:
    if tensor.start != end:
      raise ValueError(
        f"{path} has a damaged header: {name} begins at byte {tensor.start}, "
        f"the one before it ends at {end}"
      )
    end += tensor.nbytes
    if end > size:
      raise ValueError(
        f"{path} is truncated: {name} ends at byte {end}, the file at {size}"
      )
  if end != size:
    raise ValueError(
      f"{path} has {size} bytes where its header says {end}: it is damaged"
    )
