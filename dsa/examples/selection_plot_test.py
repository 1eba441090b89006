"""What the picture shows is what was selected."""

import pathlib

import numpy as np
from absl.testing import absltest, parameterized
from matplotlib import image

from dsa.examples import selection_plot


def _random_indices(tokens, topk, seed=0):
  rng = np.random.default_rng(seed)
  indices = np.full((tokens, topk), -1)
  for t in range(tokens):
    keys = rng.permutation(t + 1)[:topk]
    indices[t, : len(keys)] = np.sort(keys)
  return indices


def _is_blue(pixels):
  return pixels[..., 2] - pixels[..., 0] > 0.1


class SelectionPlotTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def _draw(self, indices):
    """Returns the pixels [height, width, 3], from 0 to 1."""
    selection_plot.draw(indices, self.folder / "a.png", title="a $_$ b")
    return image.imread(self.folder / "a.png")[..., :3]

  @parameterized.parameters(1, 2, 3, 5, 17, 30)
  def test_a_cell_counts_its_selected_by_its_visible_pairs(self, cell):
    tokens = 17
    indices = _random_indices(tokens, 4)
    selected = np.zeros((tokens, tokens))
    for t, keys in enumerate(indices):
      selected[t, keys[keys >= 0]] = 1
    visible = np.tril(np.ones((tokens, tokens)))
    cells = range(0, tokens, cell)
    with np.errstate(invalid="ignore"):
      expected = [
        [
          np.divide(
            selected[i : i + cell, j : j + cell].sum(),
            visible[i : i + cell, j : j + cell].sum(),
          )
          for j in cells
        ]
        for i in cells
      ]
    actual = selection_plot.selected_share(indices, cell)
    np.testing.assert_array_equal(actual, expected)

  @parameterized.parameters(1, 40, 5003)
  def test_a_single_selected_key_is_seen_at_any_length(self, tokens):
    # In the last row, the key in the middle; nothing else is selected.
    indices = np.full((tokens, 1), -1)
    indices[-1] = tokens // 2
    pixels = self._draw(indices)
    # Below the legend, left of the colour bar.
    height, width, _ = pixels.shape
    blue = _is_blue(pixels)[height // 2 :, : width * 4 // 5]
    self.assertGreater(blue.sum(), 0)

  def test_a_long_selection_is_drawn_in_one_cell_a_dot_at_most(self):
    pixels = self._draw(_random_indices(1500, 8))
    blue = _is_blue(pixels)[:, : pixels.shape[1] * 4 // 5].mean()
    # Neither drowned in white nor a full triangle, which would be half.
    self.assertBetween(blue, 0.02, 0.3)

  @parameterized.parameters(
    ("a.docx", ValueError),
    ("a", ValueError),
    ("folder.png", IsADirectoryError),
    ("missing/a.png", FileNotFoundError),
  )
  def test_paths_that_cannot_be_written_raise(self, path, error):
    (self.folder / "folder.png").mkdir()
    with self.assertRaises(error):
      selection_plot.check_path(self.folder / path)

  def test_checking_a_path_writes_nothing(self):
    selection_plot.check_path(self.folder / "a.PNG")
    self.assertEmpty(list(self.folder.iterdir()))


if __name__ == "__main__":
  absltest.main()
