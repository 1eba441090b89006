"""Attends over a text with each backend, and compares what they took.

The bytes of the text are tokens, embedded by a seeded table; one DSA layer with
seeded weights, narrow but otherwise DeepSeek-V3.2's, selects keys for each of
them and attends to those. Results go to stdout, progress to stderr.

    python -m dsa.examples.attend_text --text FILE --plot selected.png
"""

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging

import dsa
from dsa.examples import comparison, report, selection_plot

BACKENDS: comparison.Backends = {
  "dot_product": dsa.backends.dot_product,
  "gather": dsa.backends.gather,
  "tokamax_flash": dsa.backends.tokamax_flash,
}

_LARGEST = 2**31 - 1

_TEXT = flags.DEFINE_string(
  "text", None, "File to read, as bytes; the README of dsa by default."
)
_SEQ_LEN = flags.DEFINE_integer(
  "seq_len",
  512,
  "Tokens (bytes) to read; fewer where the text is shorter.",
  lower_bound=1,
  upper_bound=_LARGEST,
)
_TOPK = flags.DEFINE_integer(
  "topk",
  64,
  "Keys that each query selects.",
  lower_bound=1,
  upper_bound=_LARGEST,
)
_BACKEND = flags.DEFINE_multi_enum(
  "backend",
  None,
  list(BACKENDS),
  "Backend to run; may be repeated. All that run here by default.",
)
_PLOT = flags.DEFINE_string(
  "plot", None, "Picture to write of the keys each query selected (.png)."
)
_SEED = flags.DEFINE_integer(
  "seed",
  0,
  "Seed of the embedding table and the weights.",
  lower_bound=0,
  upper_bound=_LARGEST,
)


class InputError(Exception):
  """Something that was asked for cannot be done; the message is one line."""


class Text(NamedTuple):
  """A text that was read.

  Attributes:
    name: What to call it.
    data: Its first bytes.
    is_whole: False where it goes on behind `data`.
    seconds: How long reading took.
  """

  name: str
  data: bytes
  is_whole: bool
  seconds: float


def layer_config(topk: int) -> dsa.DSAConfig:
  """DeepSeek-V3.2 with every width cut down to what a laptop runs."""
  return dataclasses.replace(
    dsa.deepseek_v32(),
    hidden_size=256,
    num_attention_heads=4,
    q_lora_rank=96,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    index_n_heads=4,
    index_head_dim=32,
    index_topk=topk,
  )


def read_text(path: str | None, limit: int) -> Text:
  """Reads the beginning of a file, or of a text that is always at hand.

  Args:
    path: The file; None for the README.
    limit: Bytes to read at most.

  Returns:
    The text, of at least one byte.

  Raises:
    InputError: If there is nothing to read.
  """
  file, name = _default_text() if path is None else (_resolve(path), path)
  # A file's name may hold bytes that no terminal or picture can show.
  name = os.fsencode(name).decode("utf-8", "backslashreplace")
  start = time.perf_counter()
  with _reported_as(f"--text {name}"), file.open("rb") as stream:
    data = stream.read(limit)
    is_whole = not stream.read(1)
  if not data:
    raise InputError(f"--text {name}: the file is empty")
  report.progress(f"read {name}")
  return Text(name, data, is_whole, time.perf_counter() - start)


def embed(data: bytes, width: int, key: jax.Array) -> jax.Array:
  """Hidden states [1, S, E] of bytes, by a table of normal numbers."""
  table = jax.random.normal(key, (256, width))
  return table[np.frombuffer(data, np.uint8)][None]


def describe(text: Text, config: dsa.DSAConfig) -> str:
  """What was read and what it runs through, in two lines."""
  tokens = len(text.data)
  amount = f"all {tokens:,}" if text.is_whole else f"the first {tokens:,}"
  topk = f"top {config.index_topk:,}"
  if config.index_topk >= tokens:
    topk += " (every visible key)"
  return (
    f"text   {text.name}: {amount} bytes, {tokens:,} tokens, read in "
    f"{report.format_seconds(text.seconds)}\n"
    f"layer  {config.hidden_size} wide, {config.num_attention_heads} heads, "
    f"{config.index_n_heads} index heads, {topk}; float32 on "
    f"{jax.devices()[0].device_kind}"
  )


def attend_text() -> None:
  """Does what the flags say.

  Raises:
    InputError: If that cannot be done.
  """
  plot = None if _PLOT.value is None else _resolve(_PLOT.value)
  if plot is not None:
    with _reported_as(f"--plot {_PLOT.value}"):
      selection_plot.check_path(plot)
  text = read_text(_TEXT.value, _SEQ_LEN.value)
  config = layer_config(_TOPK.value)
  table_key, params_key = jax.random.split(jax.random.key(_SEED.value))
  params = dsa.init_params(params_key, config, jnp.float32)
  names = _BACKEND.value or BACKENDS
  with _reported_as("cannot run"):
    measurements, reference = comparison.compare(
      {name: BACKENDS[name] for name in names},
      config,
      params,
      embed(text.data, config.hidden_size, table_key),
      skip_refusals=not _BACKEND.value,
    )
  print(describe(text, config))
  if len(text.data) < _SEQ_LEN.value:
    print(f"note   the text is shorter than --seq_len {_SEQ_LEN.value:,}")
  print()
  print(comparison.write_table(measurements, reference))
  print()
  print(f"difference: the largest from {comparison.REFERENCE} in any output")
  print("attended: selected keys by visible keys, over all queries", flush=True)
  if plot is not None:
    with _reported_as(f"--plot {_PLOT.value}"):
      _draw(reference.selection, plot, text, config)
    report.progress(f"wrote {plot}")


def main(argv: Sequence[str]) -> int:
  """Runs the program once the flags are parsed.

  Args:
    argv: The program's name and what is no flag.

  Returns:
    The exit status.
  """
  try:
    if len(argv) > 1:
      raise InputError(f"unexpected argument {argv[1]!r}: use --text FILE")
    attend_text()
  except InputError as error:
    report.progress(_one_line(error))
    return 1
  return 0


def parse_flags(argv: Sequence[str]) -> list[str]:
  """Parses the flags, or leaves with one line and exit status 1.

  Args:
    argv: The program's name and its arguments.

  Returns:
    The name and what is no flag.
  """
  # Else app.run turns on what jax and matplotlib log for their developers.
  quiet = f"--verbosity={logging.WARNING}"
  try:
    return flags.FLAGS([argv[0], quiet, *argv[1:]])
  except flags.Error as error:
    report.progress(_one_line(error))
    sys.exit(1)


def _draw(
  selection: dsa.Selection, path: Path, text: Text, config: dsa.DSAConfig
) -> None:
  share = comparison.attended_share(selection)
  title = (
    f"Keys that each query selects\n{Path(text.name).name}, "
    f"{len(text.data):,} tokens, top {config.index_topk:,}: {share:.1%} of the "
    "visible keys"
  )
  selection_plot.draw(np.asarray(selection.indices[0]), path, title=title)


def _one_line(error: Exception) -> str:
  return "attend_text: " + " ".join(str(error).split())


@contextlib.contextmanager
def _reported_as(what: str) -> Iterator[None]:
  """Turns what the caller or the machine is to blame for into `InputError`."""
  try:
    yield
  except OSError as error:
    raise InputError(f"{what}: {error.strerror or error}") from error
  except (
    ValueError,
    ModuleNotFoundError,
    MemoryError,
    NotImplementedError,
  ) as error:
    raise InputError(f"{what}: {error}") from error


def _resolve(path: str) -> Path:
  """A path as the caller meant it: `bazel run` changes the directory."""
  return Path(os.environ.get("BUILD_WORKING_DIRECTORY", ""), path)


def _default_text() -> tuple[Path, str]:
  """The README, or a source file where the package came without it."""
  readme = Path(__file__).parents[2] / "README.md"
  # Beside an installed package lies what other packages left there.
  if readme.is_file() and readme.read_bytes().startswith(b"# dsa"):
    return readme, readme.name
  report.progress("no README is installed with the package: taking its source")
  return Path(dsa.__file__).parent / "mla.py", "dsa/mla.py"


if __name__ == "__main__":
  app.run(main, flags_parser=parse_flags)
