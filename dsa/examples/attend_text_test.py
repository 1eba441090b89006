"""Runs the program in this process, and where that matters in its own."""

import contextlib
import io
import os
import pathlib
import re
import subprocess
import sys
from unittest import mock

from absl import flags, logging
from absl.testing import absltest, flagsaver, parameterized

import dsa
from dsa.examples import attend_text, report

_SMALL = ("--seq_len=40", "--topk=8")


def _refuse(inputs, selection, *, scale):
  del inputs, selection, scale
  raise NotImplementedError("needs a quantum computer")


def _said(stderr):
  """Its lines, less what a library logged: matplotlib of its caches, say."""
  lines = stderr.splitlines()
  return [line for line in lines if not re.match(r"W\d{4} ", line)]


def _run(*arguments):
  """Returns the exit status, stdout and what was said on stderr."""
  out, err = io.StringIO(), io.StringIO()
  with (
    flagsaver.flagsaver(),
    contextlib.redirect_stdout(out),
    contextlib.redirect_stderr(err),
  ):
    try:
      argv = attend_text.parse_flags(["attend_text", *arguments])
    except SystemExit as leaving:
      status = leaving.code
    else:
      status = attend_text.main(argv)
  return status, out.getvalue(), _said(err.getvalue())


def _run_process(*arguments, **environment):
  return subprocess.run(
    [sys.executable, "-m", "dsa.examples.attend_text", *arguments],
    env={
      **os.environ,
      "JAX_PLATFORMS": "cpu",
      "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
      **environment,
    },
    capture_output=True,
    text=True,
  )


class AttendTextTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.text = self.folder / "text.txt"
    self.text.write_text("the quick brown fox jumps over the lazy dog. " * 2)
    (self.folder / "empty.txt").touch()

  def test_each_backend_has_a_row_and_agrees_with_the_definition(self):
    status, out, _ = _run(f"--text={self.text}", *_SMALL)
    self.assertEqual(status, 0)
    self.assertIn(f"{self.text}: the first 40 bytes, 40 tokens", out)
    for backend in attend_text.BACKENDS:
      (row,) = re.findall(rf"^{backend} .*", out, re.MULTILINE)
      *_, difference, attended = row.split()
      self.assertLess(float(difference), 1e-5)
      # Of 820 visible keys: 1 + ... + 8 for the first queries, then 32 of 8.
      self.assertEqual(attended, f"{(36 + 32 * 8) / 820:.1%}")

  def test_a_short_text_is_read_whole_and_said_to_be_short(self):
    status, out, _ = _run(
      f"--text={self.text}", "--topk=500", "--backend=dot_product"
    )
    self.assertEqual(status, 0)
    self.assertIn("all 90 bytes", out)
    self.assertIn("shorter than --seq_len 512", out)
    self.assertIn("every visible key", out)
    self.assertIn("100.0%", out)

  def test_the_default_text_is_the_readme(self):
    text = attend_text.read_text(None, 1000)
    self.assertEqual(text.name, "README.md")
    self.assertStartsWith(text.data, b"# dsa")

  def test_without_its_readme_the_package_reads_its_source(self):
    installed = self.folder / "dsa" / "examples" / "attend_text.py"
    (self.folder / "README.md").write_text("Of another package.")
    with mock.patch.object(attend_text, "__file__", str(installed)):
      text = attend_text.read_text(None, 10)
    self.assertEqual(text.name, "dsa/mla.py")

  @parameterized.named_parameters(
    ("missing_text", ["--text=missing.txt"], "missing.txt"),
    ("directory", ["--text=."], "directory"),
    ("empty_text", ["--text=empty.txt"], "empty.txt: the file is empty"),
    ("topk_0", ["--topk=0"], "--topk=0"),
    ("topk_negative", ["--topk=-1"], "--topk=-1"),
    ("topk_no_number", ["--topk=many"], "many"),
    ("seq_len_0", ["--seq_len=0"], "--seq_len=0"),
    ("seq_len_huge", ["--seq_len=99999999999"], "--seq_len=99999999999"),
    ("unknown_backend", ["--backend=none"], "<dot_product|"),
    ("unknown_flag", ["--topkk=3"], "topkk"),
    ("no_flag", ["text.txt"], "text.txt"),
    ("plot_nowhere", ["--plot=no/such.png"], "no/such.png"),
    ("plot_directory", ["--plot=."], "--plot .: it is a directory"),
    ("plot_format", ["--plot=a.docx"], "png"),
  )
  def test_wrong_input_is_one_line_and_status_1(self, arguments, expected):
    where = {"BUILD_WORKING_DIRECTORY": str(self.folder)}
    with mock.patch.dict(os.environ, where):
      status, out, err = _run(*arguments)
    self.assertEqual((status, out), (1, ""))
    self.assertLen(err, 1)
    self.assertIn(expected, err[0])

  def test_without_matplotlib_a_plot_fails_before_the_work(self):
    with mock.patch.dict(sys.modules, {"matplotlib": None}):
      status, _, err = _run("--plot=a.png", "--text=missing.txt")
    self.assertEqual(status, 1)
    self.assertLen(err, 1)
    self.assertIn("pip install 'dsa-jax[plot]'", err[0])

  def test_a_backend_that_does_not_run_here_is_left_out_by_default(self):
    backends = {
      "tokamax_flash": lambda: _refuse,
      "dot_product": dsa.backends.dot_product,
    }
    with mock.patch.object(attend_text, "BACKENDS", backends):
      status, out, err = _run(f"--text={self.text}", *_SMALL)
    self.assertEqual(status, 0)
    self.assertNotIn("tokamax_flash", out)
    self.assertRegex(out, "(?m)^dot_product")
    self.assertIn("quantum computer", "\n".join(err))

  def test_a_backend_asked_for_that_does_not_run_here_is_an_error(self):
    backends = {"tokamax_flash": lambda: _refuse}
    with mock.patch.object(attend_text, "BACKENDS", backends):
      status, _, err = _run(f"--text={self.text}", "--backend=tokamax_flash")
    self.assertEqual(status, 1)
    self.assertIn("tokamax_flash: needs a quantum computer", err[-1])

  def test_what_does_not_fit_into_memory_does_not_run(self):
    with mock.patch.object(report, "device_memory_bytes", return_value=1024):
      status, _, err = _run(f"--text={self.text}", *_SMALL)
    self.assertEqual(status, 1)
    self.assertRegex(err[-1], "40 tokens need .* there are 1.00 KiB")

  def test_libraries_log_their_information_only_when_asked_to(self):
    with flagsaver.flagsaver():
      attend_text.parse_flags(["attend_text"])
      # Else app.run would raise it.
      self.assertFalse(flags.FLAGS["verbosity"].using_default_value)
      self.assertEqual(flags.FLAGS.verbosity, logging.WARNING)
      attend_text.parse_flags(["attend_text", "--verbosity=1"])
      self.assertEqual(flags.FLAGS.verbosity, logging.DEBUG)

  def test_one_line_and_status_1_leave_the_process(self):
    for arguments in (["--topk=0"], ["--text=/missing.txt"]):
      done = _run_process(*arguments)
      self.assertEqual((done.returncode, done.stdout), (1, ""))
      self.assertLen(done.stderr.splitlines(), 1)

  def test_the_process_shows_progress_alone_and_draws_where_it_was_called(self):
    done = _run_process(
      *("--text=text.txt", "--backend=dot_product", "--plot=selected.png"),
      BUILD_WORKING_DIRECTORY=str(self.folder),
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertEqual(
      _said(re.sub(r"took .* \.\.\.", "took T ...", done.stderr)),
      [
        "read text.txt",
        "dot_product: compiling ...",
        "dot_product: running ...",
        "dot_product: timing, the first run took T ...",
        f"wrote {self.folder}/selected.png",
      ],
    )
    picture = (self.folder / "selected.png").read_bytes()
    self.assertStartsWith(picture, b"\x89PNG")


if __name__ == "__main__":
  absltest.main()
