"""Type-checks every Python file: the library strictly, tests where annotated.

The settings stand in pyproject.toml, so that `mypy dsa` in a shell and an
editor see what this test sees.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

from absl.testing import absltest

_ROOT = pathlib.Path(__file__).parents[2]

# What a test, an oracle or a benchmark need not do.
_LIBRARY_ONLY = {
  "no-untyped-call",
  "no-untyped-def",
  "type-arg",
}


def _is_library(file: str) -> bool:
  tests = file.startswith("testing/") or file.endswith("_test.py")
  return not tests and file != "dsa/conformance.py"


def _errors() -> list[str]:
  """Returns what mypy has to say, one line each."""
  files = sorted(str(f.relative_to(_ROOT)) for f in _ROOT.rglob("*.py"))
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
  def test_every_file_type_checks(self):
    if errors := _errors():
      self.fail("\n".join([f"{len(errors)} errors", *errors]))


if __name__ == "__main__":
  absltest.main()
