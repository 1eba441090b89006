"""Runs the program in this process, and where that matters in its own.

Compiled functions are kept in a folder that all runs of the test share: what is
tested is what a run that goes on computes, not how long compiling takes.
"""

import contextlib
import io
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from unittest import mock

import jax
import numpy as np
from absl.testing import absltest, flagsaver, parameterized
from matplotlib import image

from dsa.examples import (
  common,
  corpus,
  decoder_folder,
  train_checkpoint,
  train_text,
)

_STEPS = (14, 12, 8)
_SMALL = (
  *("--hidden_size=16", "--layers=2", "--heads=2", "--index_heads=2"),
  *("--topk=4", "--seq_len=16", "--batch=2", "--checkpoint_every=5"),
  *(f"--dense_steps={_STEPS[0]}", f"--warmup_steps={_STEPS[1]}"),
  *(f"--sparse_steps={_STEPS[2]}", "--lr=0.06", "--indexer_lr=0.02"),
)

_CACHE = {
  "jax_compilation_cache_dir": tempfile.mkdtemp(
    dir=absltest.get_default_test_tmpdir()
  ),
  "jax_persistent_cache_min_compile_time_secs": 0.0,
  "jax_persistent_cache_min_entry_size_bytes": -1,
}


class _Killed(BaseException):
  """What no program catches."""


def setUpModule():
  for name, value in _CACHE.items():
    jax.config.update(name, value)


def _run(*arguments):
  """Returns the exit status, stdout and the lines of stderr."""
  out, err = io.StringIO(), io.StringIO()
  with (
    flagsaver.flagsaver(),
    contextlib.redirect_stdout(out),
    contextlib.redirect_stderr(err),
  ):
    try:
      argv = common.parse_flags(["train_text", *arguments])
    except SystemExit as leaving:
      status = leaving.code
    else:
      status = train_text.main(argv)
  return status, out.getvalue(), err.getvalue().splitlines()


def _start_process(*arguments):
  cache = {name.upper(): str(value) for name, value in _CACHE.items()}
  return subprocess.Popen(
    [sys.executable, "-m", "dsa.examples.train_text", *arguments],
    env={
      **os.environ,
      **cache,
      "JAX_PLATFORMS": "cpu",
      "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    },
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


@contextlib.contextmanager
def _before_step(wanted, act):
  """Calls `act` when the text of a step is asked for, for the first time."""
  batch = corpus.training_batch
  done = []

  def training_batch(text, *, step, **kwargs):
    # A stage asks for its first step twice: once to compile for it.
    if step == wanted and not done:
      done.append(step)
      act()
    return batch(text, step=step, **kwargs)

  with mock.patch.object(corpus, "training_batch", training_batch):
    yield


def _kill():
  raise _Killed


def _signal(number):
  os.kill(os.getpid(), number)


class TrainTextTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = pathlib.Path(
      tempfile.mkdtemp(dir=absltest.get_default_test_tmpdir())
    )
    cls.text = cls.folder / "text.txt"
    cls.text.write_text("the quick brown fox jumps over the lazy dog. " * 99)
    (cls.folder / "empty").mkdir()
    (cls.folder / "short.txt").write_text("0123456789")
    cls.arguments = (f"--text={cls.text}", *_SMALL)
    cls.whole_dir = cls.folder / "whole"
    cls.status, cls.out, cls.err = _run(
      *cls.arguments,
      f"--checkpoint_dir={cls.whole_dir}",
      f"--plot={cls.folder / 'plot.png'}",
      f"--export={cls.folder / 'export'}",
    )

  def setUp(self):
    super().setUp()
    self.run_dir = pathlib.Path(self.create_tempdir().full_path) / "run"
    self.with_dir = (*self.arguments, f"--checkpoint_dir={self.run_dir}")

  def _saved_step(self):
    with np.load(self.run_dir / "checkpoint.npz") as stored:
      return int(stored["tree.step"])

  def _assert_same_as_whole(self):
    """Holds a folder's checkpoint against the one of the unbroken run."""
    with (
      np.load(self.whole_dir / "checkpoint.npz") as whole,
      np.load(self.run_dir / "checkpoint.npz") as other,
    ):
      self.assertEqual(other["tree.step"], sum(_STEPS))
      self.assertEqual(whole.files, other.files)
      for name in whole.files:
        # As bytes: NaN stands for what a stage does not compute.
        self.assertEqual(whole[name].tobytes(), other[name].tobytes(), name)

  def test_a_run_that_is_killed_goes_on_to_the_same_bits(self):
    for step in (8, sum(_STEPS) - 3):
      with self.assertRaises(_Killed), _before_step(step, _kill):
        _run(*self.with_dir)
      self.assertLessEqual(step - self._saved_step(), 5)
    status, out, _ = _run(*self.with_dir)
    self.assertEqual((status, out), (0, self.out))
    self._assert_same_as_whole()

  def test_a_signal_saves_the_step_and_the_same_command_goes_on(self):
    for number, step in ((signal.SIGTERM, 2), (signal.SIGINT, 7)):
      handler = signal.getsignal(number)
      with _before_step(step, lambda number=number: _signal(number)):
        status, out, err = _run(*self.with_dir)
      self.assertEqual((status, out), (128 + number, ""))
      self.assertIn(
        f"stopped at step {step + 1} of {sum(_STEPS)}, saved", err[-1]
      )
      self.assertEqual(self._saved_step(), step + 1)
      self.assertEqual(signal.getsignal(number), handler)
    self.assertIn("going on from step 3", "\n".join(err))

  def test_a_process_that_is_killed_goes_on_to_the_same_bits(self):
    process = _start_process(*self.with_dir)
    while process.poll() is None:
      if (self.run_dir / "checkpoint.npz").exists() and self._saved_step():
        break
      time.sleep(0.01)
    process.kill()
    process.communicate()
    self.assertEqual(process.returncode, -signal.SIGKILL)
    process = _start_process(*self.with_dir)
    out, err = process.communicate()
    self.assertEqual((process.returncode, out), (0, self.out), err)
    self.assertIn("going on from step", err)
    self._assert_same_as_whole()

  def test_a_run_that_is_done_is_only_reported(self):
    status, out, err = _run(
      *self.arguments, f"--checkpoint_dir={self.whole_dir}"
    )
    self.assertEqual((status, out), (0, self.out))
    self.assertNotIn("compiling", "\n".join(err))

  def test_a_run_learns_a_repetitive_text(self):
    self.assertEqual(self.status, 0, self.err)
    (start, dense, warm, sparse) = re.findall(
      r"^(?:at|after) .*?  +([\d.]+) +([\d.]+) +([\d.]+)$",
      self.out,
      re.MULTILINE,
    )
    self.assertGreater(float(start[0]), 5)
    self.assertLess(float(dense[0]), 3.5)
    # Nothing but the indexers learns in the warm-up.
    self.assertEqual(dense[0], warm[0])
    self.assertLess(float(warm[2]), float(dense[2]))
    self.assertLess(float(sparse[1]), float(warm[1]))

  def test_progress_names_stage_step_and_losses(self):
    err = "\n".join(self.err)
    for stage, steps, losses in zip(
      ("dense", "warm-up", "sparse"),
      _STEPS,
      ("LM loss [0-9.]+", "indexer loss [0-9.]+", "LM loss .* indexer loss .*"),
      strict=True,
    ):
      self.assertRegex(err, f"{stage}: step {steps} of {steps}  {losses}")
    self.assertRegex(err, "[0-9]+ tokens/s")

  def test_the_plot_is_a_picture(self):
    self.assertIn(f"wrote {self.folder}/plot.png", self.err)
    pixels = image.imread(self.folder / "plot.png")
    self.assertGreater(pixels.std(), 0.05)

  def test_the_export_is_the_trained_decoder(self):
    self.assertIn(f"wrote {self.folder}/export", self.err)
    params, indexers = decoder_folder.load(self.folder / "export").decoder
    with np.load(self.whole_dir / "checkpoint.npz") as whole:
      for name, actual in (
        ("decoder.embedding", params.embedding),
        ("decoder.layers.w_gate", params.layers[1].w_gate),
        ("decoder.layers.mla.wo", params.layers[1].mla.wo),
        ("indexers.wk", indexers[1].wk),
      ):
        wanted = whole[f"tree.model.{name}"]
        wanted = wanted if wanted.ndim == actual.ndim else wanted[1]
        np.testing.assert_array_equal(actual, wanted, err_msg=name)

  @parameterized.named_parameters(
    ("missing_text", ["--text=missing"], "--text missing: No such file"),
    ("empty_folder", ["--text=empty"], "--text empty: there is no file"),
    ("short_text", ["--text=short.txt"], "10 bytes are too few"),
    ("heads", ["--heads=3"], "hidden_size must be a multiple of 4 * heads"),
    ("layers_0", ["--layers=0"], "--layers=0"),
    ("steps_negative", ["--dense_steps=-1"], "--dense_steps=-1"),
    ("lr_no_number", ["--lr=fast"], "fast"),
    ("backend", ["--backend=none"], "<dot_product|"),
    ("no_flag", ["text.txt"], "text.txt"),
    ("plot_nowhere", ["--plot=no/such.png"], "no/such.png"),
    ("plot_format", ["--plot=a.docx"], "png"),
    ("export_is_file", ["--export=text.txt"], "text.txt: File exists"),
    ("dir_is_file", ["--checkpoint_dir=short.txt"], "short.txt: File exists"),
    ("dir_below_file", ["--checkpoint_dir=text.txt/a"], "Not a directory"),
  )
  def test_wrong_input_is_one_line_and_status_1(self, arguments, expected):
    where = {"BUILD_WORKING_DIRECTORY": str(self.folder)}
    with mock.patch.dict(os.environ, where):
      status, out, err = _run("--text=text.txt", *_SMALL, *arguments)
    self.assertEqual((status, out), (1, ""))
    self.assertIn(expected, err[-1])
    self.assertEqual([line for line in err[:-1] if "read" not in line], [])

  def test_without_matplotlib_a_plot_fails_before_the_work(self):
    with mock.patch.dict(sys.modules, {"matplotlib": None}):
      status, _, err = _run("--plot=a.png", *self.arguments)
    self.assertEqual(status, 1)
    self.assertLen(err, 1)
    self.assertIn("pip install 'dsa-jax[plot]'", err[0])

  def test_a_checkpoint_of_another_run_is_refused(self):
    where = f"--checkpoint_dir={self.whole_dir}"
    for argument, expected in (
      ("--layers=1", "layers is 2 there and 1 here"),
      ("--seed=5", "seed is 0 there and 5 here"),
      (f"--text={__file__}", "text_sha256 is"),
    ):
      status, out, err = _run(*self.arguments, where, argument)
      self.assertEqual((status, out), (1, ""))
      self.assertIn(expected, err[-1])

  def test_a_disk_that_fills_up_is_one_line(self):
    full = OSError(28, "No space left on device")
    with mock.patch.object(train_checkpoint, "save", side_effect=full):
      status, out, err = _run(*self.with_dir)
    self.assertEqual((status, out), (1, ""))
    self.assertEndsWith(err[-1], f"{self.run_dir}: No space left on device")


if __name__ == "__main__":
  absltest.main()
