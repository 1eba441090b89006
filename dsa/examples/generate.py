"""Generates text with a DSA decoder, from a checkpoint folder and a prompt.

The folder is one that train_text wrote with --export, or any of DeepSeek-V3.2's
or GLM-5's kind with dense MLPs. A vocabulary of 256 is read as bytes; for any
other, tokens are numbers. Text goes to stdout as it is generated, progress and
speed to stderr.

    python -m dsa.examples.train_text --export folder
    python -m dsa.examples.generate --checkpoint folder --prompt "def "
"""

import codecs
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from absl import app, flags

import dsa
from dsa.examples import (
  common,
  comparison,
  decoder_folder,
  generation,
  report,
)
from dsa.examples.decoder import NUM_BYTES

BACKENDS: comparison.Backends = {
  "gather": dsa.backends.gather,
  "dot_product": dsa.backends.dot_product,
}

_CHECKPOINT = flags.DEFINE_string(
  "checkpoint", None, "Folder with config.json and safetensors."
)
_PROMPT = flags.DEFINE_string(
  "prompt", "import ", "Text to go on from, where tokens are bytes."
)
_PROMPT_TOKENS = flags.DEFINE_list(
  "prompt_tokens", None, "Tokens to go on from, as numbers: 3,14,15."
)
_MAX_TOKENS = flags.DEFINE_integer(
  "max_tokens", 200, "Tokens to generate at most.", 1, 1 << 20
)
_TEMPERATURE = flags.DEFINE_float(
  "temperature", 0.7, "0 for the likeliest token, 1 to draw as trained.", 0.0
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of what is drawn.", 0, 2**31 - 1)
_PREFILL_CHUNK = flags.DEFINE_integer(
  "prefill_chunk", 128, "Tokens of the prompt to read at once.", 1, 1 << 16
)
_BACKEND = flags.DEFINE_enum(
  "backend", "gather", list(BACKENDS), "Backend of attention."
)


def generate() -> None:
  """Does what the flags say.

  Raises:
    InputError: If that cannot be done.
    Stopped: If a signal asked to stop.
  """
  if _CHECKPOINT.value is None:
    raise common.InputError("--checkpoint is missing: name a folder")
  directory = common.resolve(_CHECKPOINT.value)
  with (
    common.reported_as(f"--checkpoint {_CHECKPOINT.value}"),
    common.announced(f"reading {directory}"),
  ):
    loaded = _load(directory)
  vocabulary = loaded.decoder.params.embedding.shape[0]
  prompt = _prompt(vocabulary)
  with common.reported_as("cannot generate"):
    _generate(loaded, prompt, is_text=vocabulary == NUM_BYTES)


def main(argv: Sequence[str]) -> int:
  """Runs the program once the flags are parsed.

  Args:
    argv: The program's name and what is no flag.

  Returns:
    The exit status.
  """
  return common.run_program(generate, argv)


def _load(directory: Path) -> decoder_folder.Loaded:
  if not directory.is_dir():
    raise common.InputError(f"--checkpoint {directory} is no folder")
  return decoder_folder.load(directory)


def _prompt(vocabulary: int) -> list[int]:
  """The tokens to go on from."""
  if _PROMPT_TOKENS.value is None:
    if vocabulary != NUM_BYTES:
      raise common.InputError(
        f"the vocabulary has {vocabulary:,} tokens, which are no bytes: use "
        "--prompt_tokens"
      )
    if not _PROMPT.value:
      raise common.InputError("--prompt is empty")
    return list(_PROMPT.value.encode("utf-8", "surrogateescape"))
  try:
    tokens = [int(token) for token in _PROMPT_TOKENS.value]
  except ValueError as error:
    raise common.InputError(f"--prompt_tokens: {error}") from error
  if not tokens or not 0 <= min(tokens) <= max(tokens) < vocabulary:
    raise common.InputError(
      f"--prompt_tokens must be numbers from 0 to {vocabulary - 1}, got "
      f"{_PROMPT_TOKENS.value}"
    )
  return tokens


def _generate(
  loaded: decoder_folder.Loaded, prompt: list[int], *, is_text: bool
) -> None:
  """Prefills, then writes tokens as they come, then says how fast it was."""
  config, decoder, end_tokens, max_positions = loaded
  max_length = len(prompt) + _MAX_TOKENS.value
  if max_positions is not None and max_length > max_positions:
    report.progress(
      f"note: past {max_positions:,} tokens the decoder is on new ground"
    )
  chunk = min(_PREFILL_CHUNK.value, max_length)
  choose = generation.make_choose(_TEMPERATURE.value, _SEED.value)
  caches = generation.init_caches(
    config, 1, max_length, decoder.params.embedding.dtype
  )
  with common.announced("compiling"):
    step = generation.make_step(config, BACKENDS[_BACKEND.value]())
    steps = generation.compile_steps(step, decoder, caches, chunk=chunk)
    report.wait_for(choose(decoder.params.head[0], 0))
  start = time.perf_counter()
  prefilled = report.wait_for(
    generation.prefill(steps, decoder, caches, prompt, chunk=chunk)
  )
  prefill_s = time.perf_counter() - start
  tokens = generation.decode(
    steps,
    decoder,
    prefilled,
    num_tokens=_MAX_TOKENS.value,
    choose=choose,
    end_tokens=end_tokens,
  )
  start = time.perf_counter()
  count, is_stopped = _write(prompt, tokens, is_text=is_text)
  decode_s = time.perf_counter() - start
  report.progress(
    f"prefill: {_speed(len(prompt), prefill_s)}; "
    f"decode: {_speed(count, decode_s)}"
  )
  if is_stopped:
    raise common.Stopped("stopped", signal.SIGINT)


def _write(
  prompt: list[int], tokens: Iterator[int], *, is_text: bool
) -> tuple[int, bool]:
  """Writes tokens as they come; how many came, and whether it was stopped."""
  codec = codecs.getincrementaldecoder("utf-8")("replace")

  def write(token: int) -> None:
    text = codec.decode(bytes([token])) if is_text else f"{token} "
    sys.stdout.write("".join(map(_shown, text)))

  count = 0
  is_stopped = False
  try:
    for token in prompt:
      write(token)
    sys.stdout.flush()
    for token in tokens:
      write(token)
      sys.stdout.flush()
      count += 1
  except KeyboardInterrupt:
    is_stopped = True
  print(flush=True)
  return count, is_stopped


def _shown(character: str) -> str:
  """What no terminal takes for a command."""
  is_plain = character.isprintable() or character in "\n\t"
  return character if is_plain else "\N{REPLACEMENT CHARACTER}"


def _speed(count: int, seconds: float) -> str:
  return (
    f"{count:,} tokens in {report.format_seconds(seconds)}, "
    f"{count / seconds:,.0f} tokens/s"
  )


if __name__ == "__main__":
  app.run(main, flags_parser=common.parse_flags)
