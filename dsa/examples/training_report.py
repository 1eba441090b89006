"""What a training run came to: tables for a terminal, and a picture."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from dsa.examples import corpus, report, train_run
from dsa.examples.selection_plot import require_matplotlib

_POINTS = (
  "at the start",
  "after dense training",
  "after the warm-up",
  "after sparse training",
)

# The choices of keys, in the order of the tables, and their colours.
_CHOICES = {
  "selected": ("indexer", "#1f5fa8"),
  "recent": ("most recent", "#e08a1e"),
  "random": ("random", "#a9a9a9"),
  "best": ("best possible", "#bcd5ee"),
}


def describe(
  run: train_run.Run, settings: train_run.Settings, text: corpus.Corpus
) -> str:
  """What is trained on what, in three lines."""

  def count(tree: Any) -> int:
    return sum(x.size for x in jax.tree.leaves(tree))

  indexers = count(run.model.indexers)
  return (
    f"text     {text.name}: {len(text.train):,} bytes to train on, "
    f"{len(text.held_out):,} held out\n"
    f"decoder  {settings.layers} layers, {settings.hidden_size} wide, "
    f"{count(run.model.decoder) + indexers:,} parameters, "
    f"{indexers:,} of them in indexers\n"
    f"tokens   {settings.seq_len:,} a sequence, {settings.batch} sequences a "
    f"step; each attends to {settings.topk:,} once sparse"
  )


def summarise(run: train_run.Run, settings: train_run.Settings) -> str:
  """The tables of a run that is done.

  Args:
    run: The run.
    settings: Its settings.

  Returns:
    Lines of text.
  """
  measured = run.measured
  losses = measured.dense_loss, measured.sparse_loss, measured.indexer_loss
  loss_table = report.format_table(
    ("loss on held-out text", "LM, dense", "LM, sparse", "indexer"),
    [
      (name, *(f"{loss[i]:.3f}" for loss in losses))
      for i, name in enumerate(_POINTS)
    ],
  )
  rows = [(_POINTS[i], _mean_shares(run, i)) for i in range(1, len(_POINTS))]
  rows += [
    (f"  layer {layer + 1}", [share[-1, layer] for share in measured.recall])
    for layer in range(settings.layers)
  ]
  recall_table = report.format_table(
    ("recall", *(name for name, _ in _CHOICES.values())),
    [(name, *(f"{share:.1%}" for share in shares)) for name, shares in rows],
  )
  return (
    f"{loss_table}\n\n{recall_table}\n\n"
    "LM: nats a byte; dense attends to all visible keys, sparse to the selected"
    "\nindexer: KL from dense attention to the indexer, nats a query\n"
    f"recall: the share of the dense attention mass that {settings.topk:,} keys"
    " keep, chosen by\n  the indexer and otherwise; mean over queries, heads "
    "and layers; layers at the end"
  )


def draw(
  run: train_run.Run,
  settings: train_run.Settings,
  path: Path,
  *,
  title: str,
) -> None:
  """Writes the picture.

  Args:
    run: A run that is done.
    settings: Its settings.
    path: Where to write; the suffix chooses the format.
    title: What stands above.

  Raises:
    ModuleNotFoundError: If matplotlib is not installed.
    OSError: If the file cannot be written.
  """
  mpl = require_matplotlib()
  figure = mpl.figure.Figure(figsize=(11, 6.5), dpi=150, layout="constrained")
  figure.suptitle(title, parse_math=False)
  axes = figure.subplot_mosaic(
    [["loss", "recall"], ["indexer", "recall"]], width_ratios=(1.25, 1)
  )
  _draw_losses(axes["loss"], run, settings)
  _draw_indexer_loss(axes["indexer"], run, settings)
  _draw_recall(axes["recall"], run, settings)
  axes["indexer"].sharex(axes["loss"])
  figure.savefig(path)


def _mean_shares(run: train_run.Run, point: int) -> list[float]:
  return [float(np.mean(share[point])) for share in run.measured.recall]


def _stops(settings: train_run.Settings) -> list[int]:
  """The step of each point."""
  return [0, *(stage.stop for stage in settings.stages())]


def _draw_losses(axes: Any, run: train_run.Run, settings: Any) -> None:
  losses = run.losses.language_model
  axes.plot(np.arange(1, len(losses) + 1), losses, color="#c3c9d0", lw=0.8)
  axes.plot([], [], color="#c3c9d0", label="training batch")
  stops = _stops(settings)
  for values, name, style, colour in (
    (run.measured.dense_loss, "held out, dense", "o-", "#333333"),
    (run.measured.sparse_loss, "held out, sparse", "s--", "#1f5fa8"),
  ):
    axes.plot(stops, values, style, color=colour, ms=5, lw=1, label=name)
  axes.set_ylabel("LM loss (nats a byte)")
  axes.set_ylim(bottom=0)
  axes.legend(frameon=False)
  _mark_stages(axes, settings)


def _draw_indexer_loss(axes: Any, run: train_run.Run, settings: Any) -> None:
  losses = run.losses.indexer
  axes.plot(
    np.arange(1, len(losses) + 1),
    losses,
    color="#8fb3d9",
    lw=0.8,
    label="training batch",
  )
  axes.plot(
    _stops(settings),
    run.measured.indexer_loss,
    "o:",
    color="#333333",
    ms=5,
    lw=1,
    label="held out, over all visible keys",
  )
  axes.set_ylabel("indexer loss (nats a query)")
  axes.set_xlabel("step")
  axes.set_ylim(bottom=0)
  axes.legend(frameon=False)
  _mark_stages(axes, settings)


def _mark_stages(axes: Any, settings: train_run.Settings) -> None:
  """Names the stages above a plot and parts them."""
  for stage in settings.stages():
    if not stage.steps:
      continue
    axes.axvline(stage.stop, color="#dddddd", lw=0.8, zorder=0)
    axes.text(
      stage.start + stage.steps / 2,
      1.01,
      stage.name,
      transform=axes.get_xaxis_transform(),
      ha="center",
      va="bottom",
      fontsize=9,
    )
  for side in ("top", "right"):
    axes.spines[side].set_visible(False)


def _draw_recall(axes: Any, run: train_run.Run, settings: Any) -> None:
  points = range(1, len(_POINTS))
  shares = np.array([_mean_shares(run, i) for i in points])
  width = 0.8 / len(_CHOICES)
  for i, (name, colour) in enumerate(_CHOICES.values()):
    places = np.arange(len(points)) + (i - (len(_CHOICES) - 1) / 2) * width
    bars = axes.bar(places, shares[:, i], width, color=colour, label=name)
    axes.bar_label(bars, fmt="{:.0%}", fontsize=8, padding=1)
  axes.set_xticks(
    range(len(points)),
    [_POINTS[i].replace("after ", "after\n") for i in points],
  )
  axes.set_ylim(0, 1.12)
  axes.set_yticks(np.linspace(0, 1, 6))
  axes.yaxis.set_major_formatter(
    require_matplotlib().ticker.PercentFormatter(xmax=1)
  )
  axes.set_title(
    f"Share of the dense attention mass that {settings.topk:,} keys keep",
    fontsize=10,
  )
  axes.legend(frameon=False, ncols=2, loc="upper left")
  for side in ("top", "right"):
    axes.spines[side].set_visible(False)
