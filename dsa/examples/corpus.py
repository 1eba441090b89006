"""Text to train on: a file, a folder, or the sources of Python, as bytes."""

import hashlib
import os
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np

_MOST_BYTES = 64 << 20
_HELD_OUT_SHARE = 1 / 20

# Folders of the standard library that hold what is not of it, or reads unlike
# the rest.
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


class Corpus(NamedTuple):
  """A text in two parts.

  Attributes:
    name: What to call it.
    train: uint8 [bytes], to train on.
    held_out: uint8 [bytes], to measure on.
  """

  name: str
  train: np.ndarray
  held_out: np.ndarray

  def sha256(self) -> str:
    """A fingerprint of both parts."""
    digest = hashlib.sha256(self.train.tobytes())
    digest.update(self.held_out.tobytes())
    return digest.hexdigest()[:16]


def read_corpus(path: Path | None, *, seq_len: int, seed: int) -> Corpus:
  """Reads a text and holds out the last twentieth of it.

  Args:
    path: A file, or a folder whose files are read in a seeded order; None for
      the sources of the standard library of the Python that runs this.
    seq_len: Tokens in a sequence; each part holds one more at least.
    seed: Of the order of files.

  Returns:
    The text, of at most 64 MiB.

  Raises:
    OSError: If there is no such file or it cannot be read.
    ValueError: If there is too little text.
  """
  if path is None:
    name, files = _standard_library()
  elif path.is_dir():
    name = str(path)
    files = [
      file
      for file in sorted(path.rglob("*"))
      if file.is_file()
      and not any(part[0] == "." for part in file.relative_to(path).parts)
    ]
    if not files:
      raise ValueError("there is no file in the folder")
  else:
    name, files = str(path), [path]
  order = np.random.default_rng(seed).permutation(len(files))
  data = np.frombuffer(_read([files[i] for i in order]), np.uint8)
  held_out = max(int(len(data) * _HELD_OUT_SHARE), seq_len + 1)
  if len(data) - held_out < seq_len + 1:
    raise ValueError(
      f"{len(data):,} bytes are too few for sequences of {seq_len:,} tokens: "
      f"{2 * (seq_len + 1):,} are needed"
    )
  # A file's name may hold bytes that no terminal or picture can show.
  name = os.fsencode(name).decode("utf-8", "backslashreplace")
  return Corpus(name, data[:-held_out], data[-held_out:])


def training_batch(
  corpus: Corpus, *, seed: int, step: int, batch: int, seq_len: int
) -> np.ndarray:
  """The sequences of a training step: a pure function of seed and step.

  Args:
    corpus: The text.
    seed: Seed of the run.
    step: Steps done before.
    batch: B.
    seq_len: T.

  Returns:
    int32 [B, T + 1]: places drawn at random.
  """
  rng = np.random.default_rng([seed, step])
  starts = rng.integers(0, len(corpus.train) - seq_len, batch)
  return _windows(corpus.train, starts, seq_len)


def held_out_batches(
  corpus: Corpus, *, batches: int, batch: int, seq_len: int
) -> np.ndarray:
  """Sequences that are evenly spread over the text that is not trained on.

  Args:
    corpus: The text.
    batches: How many.
    batch: B.
    seq_len: T.

  Returns:
    int32 [batches, B, T + 1].
  """
  last = len(corpus.held_out) - seq_len - 1
  starts = np.linspace(0, last, batches * batch).astype(np.int64)
  windows = _windows(corpus.held_out, starts, seq_len)
  return windows.reshape(batches, batch, seq_len + 1)


def _windows(data: np.ndarray, starts: np.ndarray, seq_len: int) -> np.ndarray:
  places = starts[:, None] + np.arange(seq_len + 1)
  return data[places].astype(np.int32)


def _standard_library() -> tuple[str, list[Path]]:
  """Its name and its source files."""
  folder = Path(sysconfig.get_path("stdlib"))
  files = [
    file
    for file in sorted(folder.rglob("*.py"))
    if not _SKIPPED.intersection(file.relative_to(folder).parts)
  ]
  if not files:
    raise ValueError(f"no sources of Python in {folder}: use --text")
  version = ".".join(map(str, sys.version_info[:2]))
  return f"Python {version}'s standard library", files


def _read(files: list[Path]) -> bytes:
  """The files, one after another, up to the most that is read."""
  parts: list[bytes] = []
  room = _MOST_BYTES
  for file in files:
    with file.open("rb") as stream:
      parts.append(stream.read(room))
    room -= len(parts[-1])
    if not room:
      break
  return b"".join(parts)
