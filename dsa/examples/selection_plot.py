"""A picture of which keys each query selected.

Queries run down, keys run across. A long sequence has more tokens than a
picture has dots: tokens are then taken together in square cells, and a cell
shows which share of its visible pairs is selected. A cell with but one selected
pair still has a colour of its own.
"""

from pathlib import Path
from typing import Any

import numpy as np

_MOST_CELLS = 512


def require_matplotlib() -> Any:
  """Imports matplotlib, which the library itself does without.

  Returns:
    The module, its `figure` submodule loaded.

  Raises:
    ModuleNotFoundError: If it is not installed, with the way to get it.
  """
  try:
    import matplotlib.figure
  except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
      f"plots need matplotlib ({error}): pip install 'dsa-jax[plot]'"
    ) from error
  return matplotlib


def check_path(path: Path) -> None:
  """Checks that a picture can be written, before the work on it begins.

  Args:
    path: Where to write.

  Raises:
    ModuleNotFoundError: If matplotlib is not installed.
    ValueError: If the suffix names no picture format.
    OSError: If the folder is missing or the path is a folder.
  """
  if path.is_dir():
    raise IsADirectoryError("it is a directory")
  if not path.parent.is_dir():
    raise FileNotFoundError(f"there is no directory {path.parent}")
  canvas = require_matplotlib().figure.Figure().canvas
  formats = sorted(canvas.get_supported_filetypes())
  if path.suffix.lower().removeprefix(".") not in formats:
    raise ValueError(f"the name must end in one of {', '.join(formats)}")


def selected_share(indices: np.ndarray, cell: int) -> np.ndarray:
  """How much of each cell is selected.

  Args:
    indices: Integers [T, K], the keys of each query among S = T, -1 for none.
    cell: Tokens along the side of a cell.

  Returns:
    [ceil(T / cell), ceil(T / cell)]: selected pairs by visible pairs of each
    cell, NaN where none is visible.
  """
  tokens = indices.shape[0]
  cells = -(-tokens // cell)
  queries, places = np.nonzero(indices >= 0)
  keys = indices[queries, places]
  flat = (queries // cell) * cells + keys // cell
  selected = np.bincount(flat, minlength=cells * cells).reshape(cells, cells)
  sides = np.diff(np.minimum(np.arange(cells + 1) * cell, tokens))
  visible = np.tril(np.outer(sides, sides), -1)
  visible += np.diag(sides * (sides + 1) // 2)
  return np.divide(
    selected, visible, where=visible > 0, out=np.full(visible.shape, np.nan)
  )


def draw(indices: np.ndarray, path: Path, *, title: str) -> None:
  """Writes the picture.

  Args:
    indices: Integers [T, K], the keys of each query among S = T, -1 for none.
    path: Where to write; the suffix chooses the format.
    title: What stands above.

  Raises:
    ModuleNotFoundError: If matplotlib is not installed.
    OSError: If the file cannot be written.
  """
  mpl = require_matplotlib()
  tokens = indices.shape[0]
  cell = -(-tokens // _MOST_CELLS)
  share = selected_share(indices, cell)
  figure = mpl.figure.Figure(figsize=(8, 7), dpi=150, layout="constrained")
  axes = figure.add_subplot()
  colours = mpl.colors.LinearSegmentedColormap.from_list(
    "selected", ("#86b6e0", "#08306b")
  ).with_extremes(under="white", bad="lightgrey")
  # White, under the lowest, is for cells with nothing selected. Below the
  # diagonal of a long text shares are small: a root keeps them apart.
  lowest = min(np.min(share[share > 0]), 0.999)
  norm = mpl.colors.PowerNorm(0.4, vmin=lowest, vmax=1.0)
  edge = -0.5, tokens - 0.5
  image = axes.imshow(
    share,
    cmap=colours,
    norm=norm,
    extent=(*edge, *reversed(edge)),
    interpolation="nearest",
  )
  for axis in (axes.xaxis, axes.yaxis):
    axis.set_major_locator(mpl.ticker.MaxNLocator(integer=True))
  axes.set_xlabel("key (token)")
  axes.set_ylabel("query (token)")
  axes.set_title(title, parse_math=False)
  _explain(figure, axes, image, cell)
  figure.savefig(path)


def _explain(figure: Any, axes: Any, image: Any, cell: int) -> None:
  """Says what the colours mean."""
  patch = require_matplotlib().patches.Patch
  handles = [
    patch(facecolor="white", edgecolor="grey", label="visible, not selected"),
    patch(facecolor="lightgrey", label="not visible: later than the query"),
  ]
  if cell == 1:
    handles.insert(0, patch(facecolor="#08306b", label="selected"))
  else:
    figure.colorbar(
      image,
      shrink=0.8,
      format=require_matplotlib().ticker.PercentFormatter(xmax=1),
      label=f"visible pairs selected, in cells of {cell} x {cell} tokens",
    )
  axes.legend(handles=handles, loc="upper right")
