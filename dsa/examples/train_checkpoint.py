"""Saves a tree of arrays so that no kill and no full disk loses what was saved.

A checkpoint is one .npz file: an array for each leaf, named by its place in the
tree, and the settings of the run as JSON. It is written beside the old one,
forced to the disk, and only then takes its name; until then the old one stands.
"""

import contextlib
import json
import os
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

_SETTINGS = "settings"
_DAMAGED = "it is damaged ({}); remove it to start over"

Settings = Mapping[str, int | float | str]


def save(path: Path, tree: Any, settings: Settings) -> None:
  """Writes a checkpoint in place of the old one, whole or not at all.

  Args:
    path: The file.
    tree: Any pytree of arrays.
    settings: What must be the same where the checkpoint is read.

  Raises:
    OSError: If it cannot be written; the old one is then as it was.
  """
  arrays = {name: np.asarray(leaf) for name, leaf in _named(tree).items()}
  arrays[_SETTINGS] = np.asarray(json.dumps(settings))
  temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
  try:
    with temporary.open("wb") as stream:
      np.savez(stream, **arrays)  # type: ignore[arg-type]
      stream.flush()
      os.fsync(stream.fileno())
    os.replace(temporary, path)
  except BaseException:
    temporary.unlink(missing_ok=True)
    raise
  _sync_directory(path.parent)


def load(path: Path, template: Any, settings: Settings) -> Any:
  """Reads a checkpoint.

  Args:
    path: The file.
    template: A tree of arrays, or of their shapes, like the one saved.
    settings: What the checkpoint must have been saved with.

  Returns:
    The tree, of NumPy arrays.

  Raises:
    OSError: If the file cannot be read.
    ValueError: If it is damaged, or of a run with other settings.
  """
  if path.is_file() and not zipfile.is_zipfile(path):
    raise ValueError(_DAMAGED.format("it is no .npz file"))
  try:
    with np.load(path, allow_pickle=False) as stored:
      saved = json.loads(stored[_SETTINGS].item())
      _check_settings(saved, settings)
      leaves = [
        _checked(name, stored[name], leaf)
        for name, leaf in _named(template).items()
      ]
  except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
    raise ValueError(_DAMAGED.format(error)) from error
  return jax.tree.unflatten(jax.tree.structure(template), leaves)


def prepare(path: Path) -> None:
  """Makes a checkpoint's folder, and makes sure that it can be written to.

  Args:
    path: The file; what a killed run left half written beside it is removed.

  Raises:
    OSError: If it cannot.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  for leftover in path.parent.glob(f"{path.name}.*.tmp"):
    leftover.unlink()
  probe = path.with_name(f"{path.name}.{os.getpid()}.tmp")
  probe.touch()
  probe.unlink()


def _named(tree: Any) -> dict[str, Any]:
  """The leaves in order, by their place in the tree."""
  leaves, _ = jax.tree.flatten_with_path(tree)
  return {"tree" + jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def _check_settings(saved: dict[str, Any], settings: Settings) -> None:
  names = sorted({*saved, *settings})
  differences = [
    f"{name} is {saved.get(name)!r} there and {settings.get(name)!r} here"
    for name in names
    if saved.get(name) != settings.get(name)
  ]
  if differences:
    raise ValueError("it is of another run: " + ", ".join(differences))


def _checked(name: str, array: np.ndarray, wanted: Any) -> np.ndarray:
  if array.shape != wanted.shape or array.dtype != wanted.dtype:
    raise ValueError(
      f"{name} is {array.dtype} {array.shape} there and {wanted.dtype} "
      f"{wanted.shape} here"
    )
  return array


def _sync_directory(directory: Path) -> None:
  """Forces a renaming to the disk, where the system can."""
  descriptor = os.open(directory, os.O_RDONLY)
  with contextlib.suppress(OSError):
    os.fsync(descriptor)
  os.close(descriptor)
