"""Draws time and memory against the sequence length."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsa.examples.selection_plot import require_matplotlib

__all__ = ["draw", "require_matplotlib"]


def draw(figures: Sequence[Mapping[str, Any]], path: Path) -> None:
  """Writes a PNG with a line for each backend, top-k and pass.

  Args:
    figures: Rows with backend, seq_len, topk, what, seconds, temporary_bytes.
    path: Where to write.
  """
  mpl = require_matplotlib()
  canvas = mpl.figure.Figure(figsize=(11, 4.5), layout="constrained")
  time_axes, memory_axes = canvas.subplots(1, 2)
  lines = defaultdict(list)
  for row in figures:
    label = f"{row['backend']}, top {row['topk']}, {row['what']}"
    lines[label].append(row)
  for label, rows in lines.items():
    rows.sort(key=lambda row: row["seq_len"])
    lengths = [row["seq_len"] for row in rows]
    timed = [row["seconds"] or float("nan") for row in rows]
    time_axes.plot(lengths, timed, marker="o", label=label)
    memory = [(row["temporary_bytes"] or 0) / 2**30 for row in rows]
    memory_axes.plot(lengths, memory, marker="o", label=label)
  time_axes.set_ylabel("median seconds")
  memory_axes.set_ylabel("temporary memory, GiB")
  for axes in (time_axes, memory_axes):
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("sequence length S, tokens")
    axes.grid(alpha=0.3)
  time_axes.legend(fontsize="small")
  canvas.savefig(path, dpi=130)
