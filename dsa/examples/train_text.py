"""Trains a small decoder dense, warms its indexers up, and trains it sparse.

The bytes of a text are tokens. Stage 1 trains all but the indexers with dense
attention, stage 2 the indexers alone, stage 3 both, with the keys that the
indexers select. Results go to stdout, progress to stderr.

    python -m dsa.examples.train_text --checkpoint_dir run --plot training.png
    python -m dsa.examples.train_text --checkpoint_dir run --export folder
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

import dsa
from dsa.examples import (
  common,
  comparison,
  corpus,
  decoder_folder,
  report,
  selection_plot,
  train_checkpoint,
  train_run,
  training_report,
)

BACKENDS: comparison.Backends = {
  "dot_product": dsa.backends.dot_product,
  "gather": dsa.backends.gather,
  "tokamax_flash": dsa.backends.tokamax_flash,
}

_LARGEST = 2**31 - 1

_TEXT = flags.DEFINE_string(
  "text",
  None,
  "File or folder to train on, as bytes; the sources of Python's standard "
  "library by default.",
)
_PLOT = flags.DEFINE_string(
  "plot", None, "Picture to write of the losses and the recall (.png)."
)
_EXPORT = flags.DEFINE_string(
  "export",
  None,
  "Folder to write the trained decoder in, as a Hugging Face checkpoint that "
  "generate reads.",
)
_CHECKPOINT_DIR = flags.DEFINE_string(
  "checkpoint_dir",
  None,
  "Folder to save the run in, and to go on from where it has one.",
)
_CHECKPOINT_EVERY = flags.DEFINE_integer(
  "checkpoint_every",
  20,
  "Steps between savings.",
  lower_bound=1,
  upper_bound=_LARGEST,
)
_BACKEND = flags.DEFINE_enum(
  "backend",
  "gather",
  list(BACKENDS),
  "Backend of sparse attention; dense attention runs on dot_product.",
)


def _define_size(
  name: str, default: int, what: str, lowest: int = 1
) -> flags.FlagHolder[int]:
  return flags.DEFINE_integer(
    name, default, what, lower_bound=lowest, upper_bound=_LARGEST
  )


def _define_rate(
  name: str, default: float, what: str
) -> flags.FlagHolder[float]:
  return flags.DEFINE_float(
    name, default, what, lower_bound=0.0, upper_bound=1.0
  )


# Each is a field of train_run.Settings.
_SETTINGS = (
  _define_size("hidden_size", 128, "Width of the residual stream."),
  _define_size("layers", 3, "Layers of the decoder."),
  _define_size("heads", 4, "Attention heads."),
  _define_size("index_heads", 4, "Index heads."),
  _define_size("topk", 32, "Keys that each query selects."),
  _define_size("seq_len", 256, "Tokens (bytes) in a sequence."),
  _define_size("batch", 4, "Sequences in a step."),
  _define_size("dense_steps", 800, "Steps of stage 1, dense.", 0),
  _define_size("warmup_steps", 150, "Steps of stage 2, the indexers.", 0),
  _define_size("sparse_steps", 150, "Steps of stage 3, sparse.", 0),
  _define_rate("lr", 3e-3, "Highest learning rate of stage 1."),
  _define_rate("indexer_lr", 3e-3, "Highest learning rate of stage 2."),
  _define_rate("sparse_lr", 1e-3, "Highest learning rate of stage 3."),
  _define_size("seed", 0, "Seed of the weights and of the text's order.", 0),
  _BACKEND,
)


def train_text() -> None:
  """Does what the flags say.

  Raises:
    InputError: If that cannot be done.
    Stopped: If a signal asked to stop.
  """
  with train_run.stop_on_signals() as stop:
    plot = None if _PLOT.value is None else common.resolve(_PLOT.value)
    if plot is not None:
      with common.reported_as(f"--plot {_PLOT.value}"):
        selection_plot.check_path(plot)
    export = None if _EXPORT.value is None else common.resolve(_EXPORT.value)
    if export is not None:
      with common.reported_as(f"--export {_EXPORT.value}"):
        decoder_folder.prepare(export)
    values: dict[str, Any] = {flag.name: flag.value for flag in _SETTINGS}
    settings = train_run.Settings(**values)
    with common.reported_as("cannot train"):
      settings.config()
    text = _read_text(settings)
    run = _train(settings, text, stop)
  if stop.signal is not None:
    raise common.Stopped(_farewell(run, settings), stop.signal)
  print(training_report.describe(run, settings, text))
  print()
  print(training_report.summarise(run, settings), flush=True)
  if plot is not None:
    title = f"{settings.layers} DSA layers trained on {text.name}"
    with common.reported_as(f"--plot {_PLOT.value}"):
      training_report.draw(run, settings, plot, title=title)
    report.progress(f"wrote {plot}")
  if export is not None:
    _export(run, settings, export)


def main(argv: Sequence[str]) -> int:
  """Runs the program once the flags are parsed.

  Args:
    argv: The program's name and what is no flag.

  Returns:
    The exit status.
  """
  return common.run_program(train_text, argv)


def _read_text(settings: train_run.Settings) -> corpus.Corpus:
  path = None if _TEXT.value is None else common.resolve(_TEXT.value)
  what = "the default text" if path is None else f"--text {_TEXT.value}"
  with common.reported_as(what):
    text = corpus.read_corpus(
      path, seq_len=settings.seq_len, seed=settings.seed
    )
  report.progress(f"read {len(text.train) + len(text.held_out):,} bytes")
  return text


def _train(
  settings: train_run.Settings,
  text: corpus.Corpus,
  stop: train_run.StopRequest,
) -> train_run.Run:
  """Goes on from the checkpoint, or begins."""
  path = None
  identity = train_run.as_dict(settings, text)
  run = train_run.init_run(settings)
  if _CHECKPOINT_DIR.value is not None:
    path = common.resolve(_CHECKPOINT_DIR.value) / "checkpoint.npz"
    with common.reported_as(f"--checkpoint_dir {_CHECKPOINT_DIR.value}"):
      run = _restore(path, run, identity)

  def save(run: train_run.Run) -> None:
    if path is not None:
      with common.reported_as(f"--checkpoint_dir {_CHECKPOINT_DIR.value}"):
        train_checkpoint.save(path, run, identity)

  with common.reported_as("cannot train"):
    return train_run.train(
      run,
      settings,
      text,
      BACKENDS[settings.backend](),
      save=save,
      save_every=_CHECKPOINT_EVERY.value,
      stop=stop,
    )


def _restore(
  path: Path, run: train_run.Run, identity: train_checkpoint.Settings
) -> train_run.Run:
  """The run as it was saved, or as it is where none was."""
  train_checkpoint.prepare(path)
  if not path.exists():
    return run
  run = train_checkpoint.load(path, run, identity)
  report.progress(f"going on from step {int(run.step):,}, saved in {path}")
  return run


def _export(
  run: train_run.Run, settings: train_run.Settings, directory: Path
) -> None:
  with common.reported_as(f"--export {_EXPORT.value}"):
    decoder_folder.save(
      directory,
      run.model.decoder,
      run.model.indexers,
      settings.config(),
      max_positions=settings.seq_len,
    )
  report.progress(f"wrote {directory}")


def _farewell(run: train_run.Run, settings: train_run.Settings) -> str:
  where = "nothing is saved without --checkpoint_dir"
  if _CHECKPOINT_DIR.value is not None:
    where = "saved; the same command goes on from here"
  steps = settings.stages()[-1].stop
  return f"stopped at step {int(run.step):,} of {steps:,}, {where}"


if __name__ == "__main__":
  app.run(main, flags_parser=common.parse_flags)
