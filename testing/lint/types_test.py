"""Type-checks the library strictly, and what serves tests where annotated.

Tests themselves are left out: many pass what is wrong on purpose, and each runs
anyway. The settings stand in pyproject.toml: `mypy dsa` in a shell and an
editor see what this test sees.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

from absl.testing import absltest

_ROOT = pathlib.Path(__file__).parents[2]

# What an oracle, a benchmark or the conformance kit need not do.
_LIBRARY_ONLY = {
  "no-untyped-call",
  "no-untyped-def",
  "type-arg",
}


def _is_library(file: str) -> bool:
  return not file.startswith("testing/") and file != "dsa/conformance.py"


def _errors() -> list[str]:
  """Returns what mypy has to say, one line each."""
  files = sorted(
    str(f.relative_to(_ROOT))
    for f in _ROOT.rglob("*.py")
    if not f.name.endswith("_test.py")
  )
  with tempfile.TemporaryDirectory() as cache:
    done = subprocess.run(
      [
        *(sys.executable, "-m", "mypy", "--config-file=pyproject.toml"),
        *("--output=json", f"--cache-dir={cache}", *files),
      ],
      cwd=_ROOT,
      capture_output=True,
      text=True,
    )
  if done.returncode not in (0, 1) or done.stderr:
    return [done.stdout + done.stderr]
  found = [json.loads(line) for line in done.stdout.splitlines()]
  return [
    "{file}:{line}: {message} [{code}]".format(**error)
    for error in found
    if error["severity"] == "error"
    and (_is_library(error["file"]) or error["code"] not in _LIBRARY_ONLY)
  ]


class TypesTest(absltest.TestCase):
  def test_types(self):
    if errors := _errors():
      self.fail("\n".join([f"{len(errors)} errors", *errors]))


if __name__ == "__main__":
  absltest.main()
