"""A whole training run: its stages in order, measured between and saved often.

All that a run knows is one tree of arrays, `Run`; each step is a pure function
of it, the settings and the text. A run that is read back therefore goes on, to
the bit, as if it had never been stopped.
"""

import dataclasses
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import dsa
from dsa.examples import common, corpus, decoder, report, training

# Before the first stage and after each of the three.
NUM_POINTS = 4

_HELD_OUT_SEQUENCES = 16
_PROGRESS_S = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """What makes a run the run it is.

  Attributes:
    hidden_size: E.
    layers: How many.
    heads: N.
    index_heads: I.
    topk: Keys that a query selects.
    seq_len: T, tokens in a sequence.
    batch: B, sequences in a step.
    dense_steps: Steps of the first stage.
    warmup_steps: Steps of the second.
    sparse_steps: Steps of the third.
    lr: Highest learning rate of the dense stage.
    indexer_lr: Of the warm-up.
    sparse_lr: Of the sparse stage.
    seed: Of the weights and of the order of the text.
    backend: Name of the kernel of sparse attention.
  """

  hidden_size: int
  layers: int
  heads: int
  index_heads: int
  topk: int
  seq_len: int
  batch: int
  dense_steps: int
  warmup_steps: int
  sparse_steps: int
  lr: float
  indexer_lr: float
  sparse_lr: float
  seed: int
  backend: str

  def config(self) -> dsa.DSAConfig:
    """The sizes of a layer."""
    return decoder.decoder_config(
      hidden_size=self.hidden_size,
      layers=self.layers,
      heads=self.heads,
      index_heads=self.index_heads,
      topk=self.topk,
    )

  def stages(self) -> tuple["Stage", ...]:
    """The stages in order."""
    dense = Stage("dense", 0, self.dense_steps, self.lr)
    warmup = Stage("warm-up", dense.stop, self.warmup_steps, self.indexer_lr)
    sparse = Stage("sparse", warmup.stop, self.sparse_steps, self.sparse_lr)
    return dense, warmup, sparse


class Stage(NamedTuple):
  """A stage: its name, the step it starts at, its steps and learning rate."""

  name: training.StageName
  start: int
  steps: int
  lr: float

  @property
  def stop(self) -> int:
    """The step behind its last."""
    return self.start + self.steps


class Run(NamedTuple):
  """All that a run knows.

  Attributes:
    step: int64, steps done; with the seed, the place in the text.
    model: Weights and Adam.
    losses: Of each training step, float32 [steps], NaN where there is none.
    measured: At each of the `NUM_POINTS` points, float32 with that axis in
      front, NaN where it is not reached.
  """

  step: np.ndarray
  model: training.Model
  losses: training.Losses[np.ndarray]
  measured: training.Measurement[np.ndarray]


class StopRequest:
  """Whether a signal has asked to stop, and which."""

  signal: int | None = None


def init_run(settings: Settings) -> Run:
  """A run before its first step."""
  no_loss = np.full(settings.stages()[-1].stop, np.nan, np.float32)
  measured = jax.eval_shape(
    training.make_measure(settings.config(), dsa.backends.dot_product()),
    jax.eval_shape(lambda: _init_model(settings)),
    jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
      (1, settings.seq_len + 1), jnp.int32
    ),
  )
  return Run(
    step=np.zeros((), np.int64),
    model=_init_model(settings),
    losses=training.Losses(no_loss, no_loss),
    measured=jax.tree.map(
      lambda x: np.full((NUM_POINTS, *x.shape), np.nan, np.float32), measured
    ),
  )


def train(
  run: Run,
  settings: Settings,
  text: corpus.Corpus,
  backend: dsa.Backend,
  *,
  save: Callable[[Run], None],
  save_every: int,
  stop: StopRequest,
) -> Run:
  """Takes a run to its end, or to where it is asked to stop.

  Args:
    run: The run so far.
    settings: What it is.
    text: What it is trained and measured on.
    backend: The kernel of sparse attention.
    save: Called every `save_every` steps, at the end of each stage and when
      asked to stop.
    save_every: Steps.
    stop: Looked at after each step.

  Returns:
    The run, saved.
  """
  for after, is_measured in _advance(run, settings, text, backend):
    run = after
    if stop.signal is not None:
      break
    if is_measured or run.step % save_every == 0:
      save(run)
  if stop.signal is not None:
    save(run)
  return run


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
  """Catches the first SIGINT or SIGTERM; a second one ends the program."""
  request = StopRequest()
  numbers = signal.SIGINT, signal.SIGTERM
  before = {number: signal.getsignal(number) for number in numbers}

  def restore() -> None:
    for number, handler in before.items():
      signal.signal(number, handler)

  def ask(number: int, frame: FrameType | None) -> None:
    del frame
    request.signal = number
    restore()
    report.progress("stopping after this step ...")

  for number in numbers:
    signal.signal(number, ask)
  try:
    yield request
  finally:
    restore()


def _init_model(settings: Settings) -> training.Model:
  config = settings.config()
  # Compiled as one: op by op it takes longer than all the drawing.
  return jax.jit(lambda: training.init_model(settings.seed, config))()


def _advance(
  run: Run, settings: Settings, text: corpus.Corpus, backend: dsa.Backend
) -> Iterator[tuple[Run, bool]]:
  """The run after each step and measurement that are left; which it was."""
  measure = _Measurer(settings, text, backend)
  if np.isnan(run.measured.dense_loss[0]):
    run = measure(run, 0)
    yield run, True
  for point, stage in enumerate(settings.stages(), 1):
    for after in _steps(run, stage, settings, text, backend):
      run = after
      yield run, False
    if np.isnan(run.measured.dense_loss[point]):
      run = measure(run, point)
      yield run, True


def _steps(
  run: Run,
  stage: Stage,
  settings: Settings,
  text: corpus.Corpus,
  backend: dsa.Backend,
) -> Iterator[Run]:
  """The run after each of the stage's steps that are left."""

  def tokens(step: int) -> jax.Array:
    return jnp.asarray(
      corpus.training_batch(
        text,
        seed=settings.seed,
        step=step,
        batch=settings.batch,
        seq_len=settings.seq_len,
      )
    )

  first = int(run.step)
  if first >= stage.stop:
    return
  take_step = training.make_step(stage.name, settings.config(), backend)
  rate = jnp.zeros(())
  with common.announced(f"{stage.name}: compiling"):
    take_step = (
      jax.jit(take_step).lower(run.model, tokens(first), rate).compile()
    )
  progress = _Progress(stage, settings)
  for step in range(first, stage.stop):
    rate = jnp.asarray(
      training.learning_rate(stage.lr, step - stage.start, stage.steps),
      jnp.float32,
    )
    model, losses = take_step(run.model, tokens(step), rate)
    run = Run(
      step=np.asarray(step + 1),
      model=model,
      losses=_with_row(run.losses, step, losses),
      measured=run.measured,
    )
    progress(step + 1, losses)
    yield run


class _Progress:
  """Shows a stage's steps, every few seconds and at its end."""

  def __init__(self, stage: Stage, settings: Settings):
    self._stage = stage
    self._tokens_a_step = settings.batch * settings.seq_len
    self._last_step: int | None = None
    self._last_time = time.perf_counter()

  def __call__(self, step: int, losses: training.Losses[jax.Array]) -> None:
    stage = self._stage
    now = time.perf_counter()
    is_due = now - self._last_time >= _PROGRESS_S or step == stage.stop
    if not is_due and self._last_step is not None:
      return
    line = f"{stage.name}: step {step - stage.start:,} of {stage.steps:,}"
    for name, loss in zip(("LM", "indexer"), losses, strict=True):
      if not np.isnan(loss):
        line += f"  {name} loss {float(loss):.3f}"
    if self._last_step is not None:
      tokens = (step - self._last_step) * self._tokens_a_step
      line += f"  {tokens / (now - self._last_time):,.0f} tokens/s"
    report.progress(line)
    self._last_step, self._last_time = step, now


class _Measurer:
  """Measures a run on held-out text; compiled at the first use."""

  def __init__(
    self, settings: Settings, text: corpus.Corpus, backend: dsa.Backend
  ):
    self._batches = corpus.held_out_batches(
      text,
      batches=-(-_HELD_OUT_SEQUENCES // settings.batch),
      batch=settings.batch,
      seq_len=settings.seq_len,
    )
    self._measure: Any = jax.jit(
      training.make_measure(settings.config(), backend)
    )

  def __call__(self, run: Run, point: int) -> Run:
    """The run with what was measured written in at a point."""
    with common.announced("measuring on held-out text"):
      each = [self._measure(run.model, batch) for batch in self._batches]
      mean = jax.tree.map(lambda *x: np.mean(np.stack(x), axis=0), *each)
    return run._replace(measured=_with_row(run.measured, point, mean))


def _with_row[Table](table: Table, row: int, values: Table) -> Table:
  """A copy of a tree of arrays with one row of each replaced."""

  def write(array: np.ndarray, value: Any) -> np.ndarray:
    array = array.copy()
    array[row] = value
    return array

  return jax.tree.map(write, table, values)


def as_dict(settings: Settings, text: corpus.Corpus) -> Mapping[str, Any]:
  """What two runs must share for the one to go on where the other stopped."""
  return {**dataclasses.asdict(settings), "text_sha256": text.sha256()}
