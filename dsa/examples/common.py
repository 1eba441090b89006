"""What programs share: errors in one line, paths, and signs of life."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
from absl import flags, logging

from dsa.examples import report

_TICK_S = 5.0


class InputError(Exception):
  """Something that was asked for cannot be done; the message is one line."""


class Stopped(Exception):
  """A signal asked the program to stop, and it has put things in order.

  Attributes:
    signal: Its number.
  """

  def __init__(self, message: str, signal: int):
    super().__init__(message)
    self.signal = signal


def run_program(program: Callable[[], None], argv: Sequence[str]) -> int:
  """Runs a program once its flags are parsed.

  Args:
    program: Does what the flags say, or raises `InputError` or `Stopped`.
    argv: The program's name and what is no flag.

  Returns:
    The exit status: 1 after an error, 128 and its number after a signal.
  """
  try:
    if len(argv) > 1:
      raise InputError(f"unexpected argument {argv[1]!r}: use flags")
    program()
  except InputError as error:
    report.progress(_one_line(argv[0], error))
    return 1
  except Stopped as stopped:
    report.progress(_one_line(argv[0], stopped))
    return 128 + stopped.signal
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
    report.progress(_one_line(argv[0], error))
    sys.exit(1)


@contextlib.contextmanager
def reported_as(what: str) -> Iterator[None]:
  """Turns what the caller or the machine is to blame for into `InputError`."""
  try:
    yield
  except OSError as error:
    raise InputError(f"{what}: {error.strerror or error}") from error
  except (
    jax.errors.JaxRuntimeError,  # Out of memory, as a rule.
    ValueError,
    ModuleNotFoundError,
    MemoryError,
    NotImplementedError,
  ) as error:
    raise InputError(f"{what}: {error}") from error


def resolve(path: str) -> Path:
  """A path as the caller meant it: `bazel run` changes the directory."""
  return Path(os.environ.get("BUILD_WORKING_DIRECTORY", ""), path)


@contextlib.contextmanager
def announced(what: str) -> Iterator[None]:
  """Says on stderr that something begins, and that it goes on while it does."""
  report.progress(f"{what} ...")
  done = threading.Event()
  start = time.perf_counter()

  def tick() -> None:
    while not done.wait(_TICK_S):
      seconds = time.perf_counter() - start
      report.progress(f"{what} ... {seconds:.0f} s")

  ticker = threading.Thread(target=tick, daemon=True)
  ticker.start()
  try:
    yield
  finally:
    done.set()
    ticker.join()


def _one_line(program: str, error: Exception) -> str:
  return f"{Path(program).stem}: " + " ".join(str(error).split())
