"""Everything that the README shows in Python runs, and says what is so."""

import pathlib
import re
from typing import Any

import jax
import numpy as np
from absl import flags
from absl.testing import absltest

from dsa.examples import attend_text

_README = pathlib.Path(__file__).parents[2] / "README.md"


def _python_blocks():
  text = _README.read_text()
  return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def _table(after):
  """The first two cells of the rows of the table that follows a heading."""
  section = _README.read_text().split(f"\n## {after}\n")[1].split("\n## ")[0]
  rows = [line for line in section.splitlines() if line.startswith("|")]
  return [
    [cell.strip(" `") for cell in row.split("|")[1:3]] for row in rows[2:]
  ]


class ReadmeTest(absltest.TestCase):
  def test_its_python_runs_from_top_to_bottom(self):
    names: dict[str, Any] = {}
    blocks = _python_blocks()
    self.assertGreaterEqual(len(blocks), 6)
    for block in blocks:
      exec(compile(block, str(_README), "exec"), names)
    result, packed, grads = names["result"], names["packed"], names["grads"]
    self.assertEqual(result.out.shape, names["x"].shape)
    self.assertEqual(result.selection.indices.shape, (2, 64, 16))
    # The steps, one by one, are the composition.
    np.testing.assert_array_equal(names["indices"], result.selection.indices)
    np.testing.assert_allclose(names["out"], result.out, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(packed.out[1, :32], 0.0)
    self.assertFalse((packed.selection.indices[0, 32:] % 64 < 32).any())
    for leaf in jax.tree.leaves(grads.indexer):
      np.testing.assert_array_equal(leaf, 0.0)
    for leaf in jax.tree.leaves(grads.mla):
      self.assertGreater(np.abs(leaf).max(), 0)

  def test_it_names_the_flags_of_the_example_and_their_defaults(self):
    defined = flags.FLAGS.get_flags_for_module(attend_text)
    documented = dict(_table("The example"))
    self.assertEqual(set(documented), {f"--{flag.name}" for flag in defined})
    for flag in defined:
      if flag.default is not None:
        self.assertEqual(documented[f"--{flag.name}"], str(flag.default))

  def test_it_names_the_backends(self):
    documented = [name for name, _ in _table("Backends")]
    names = (*attend_text.BACKENDS, "auto")  # The last picks of the others.
    self.assertEqual(documented, [f"{name}()" for name in names])

  def test_it_opens_with_the_two_commands(self):
    commands = re.findall(r"^    (\S.*)$", _README.read_text(), re.MULTILINE)
    self.assertEqual(
      commands[:2],
      [
        "./third_party/bazelw run //dsa/examples:attend_text",
        "./third_party/bazelw test //...",
      ],
    )


if __name__ == "__main__":
  absltest.main()
