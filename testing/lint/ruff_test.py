"""Holds every Python file to the rules in pyproject.toml."""

import pathlib
import subprocess
import sys

from absl.testing import absltest

_ROOT = pathlib.Path(__file__).parents[2]


def _files(root: pathlib.Path) -> list[str]:
  folders = ("dsa", "testing", "third_party")
  found = [f for folder in folders for f in (root / folder).rglob("*.py")]
  return sorted(str(f.relative_to(root)) for f in found)


def _ruff(*arguments: str) -> str:
  """Runs ruff over all files; returns what it says, empty if nothing."""
  # Each file by name: a walk over folders would skip the links of the runfiles.
  files = _files(_ROOT)
  done = subprocess.run(
    [sys.executable, "-m", "ruff", *arguments, "--quiet", "--no-cache", *files],
    cwd=_ROOT,
    capture_output=True,
    text=True,
  )
  return done.stdout + done.stderr if done.returncode else ""


class RuffTest(absltest.TestCase):
  def test_every_file_keeps_the_lint_rules(self):
    if found := _ruff("check", "--output-format=concise"):
      self.fail(f"\n{found}\nTo mend what can be: ruff check --fix")

  def test_every_file_is_formatted(self):
    if found := _ruff("format", "--diff"):
      self.fail(f"\n{found}\nTo mend: ruff format")

  def test_no_file_is_left_out(self):
    # What Bazel shows to this test are links into the checkout.
    checkout = (_ROOT / "pyproject.toml").resolve().parent
    if not (checkout / "WORKSPACE").exists():
      self.skipTest("the checkout cannot be seen from here")
    left_out = set(_files(checkout)) - set(_files(_ROOT))
    if left_out:
      self.fail(f"{sorted(left_out)}: add their package to testing/lint/BUILD")


if __name__ == "__main__":
  absltest.main()
