"""Runs the program in this process, on folders that the test writes."""

import contextlib
import io
import os
import pathlib
import signal
import tempfile
from unittest import mock

import jax
from absl.testing import absltest, flagsaver, parameterized

from dsa.examples import (
  common,
  decoder,
  decoder_folder,
  generate,
  generation,
)
from testing import checkpoint_folders, goldens


def setUpModule():
  # Each program runs a few steps: what takes the time is compiling it.
  jax.config.update("jax_disable_most_optimizations", True)


def _run(*arguments):
  """Returns the exit status, stdout and the lines of stderr."""
  out, err = io.StringIO(), io.StringIO()
  with (
    flagsaver.flagsaver(),
    contextlib.redirect_stdout(out),
    contextlib.redirect_stderr(err),
  ):
    try:
      argv = common.parse_flags(["generate", *arguments])
    except SystemExit as leaving:
      status = leaving.code
    else:
      status = generate.main(argv)
  return status, out.getvalue(), err.getvalue().splitlines()


class GenerateTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = pathlib.Path(
      tempfile.mkdtemp(dir=absltest.get_default_test_tmpdir())
    )
    config = decoder.decoder_config(
      hidden_size=16, layers=1, heads=2, index_heads=2, topk=4
    )
    decoder_folder.prepare(cls.folder / "bytes")
    decoder_folder.save(
      cls.folder / "bytes",
      *decoder.init_decoder(jax.random.key(0), config),
      config,
      max_positions=16,
    )
    golden = goldens.load("deepseek_v32_causal_lm_100")
    checkpoint_folders.write_folder(
      cls.folder / "golden", golden.tensors, golden.hf_config, shards=3
    )
    cls.greedy = golden.arrays["greedy"][0].tolist()
    cls.prompt_tokens = ",".join(map(str, golden.arrays["prompt"][0]))
    (cls.folder / "empty").mkdir()

  def _run(self, *arguments):
    where = {"BUILD_WORKING_DIRECTORY": str(self.folder)}
    with mock.patch.dict(os.environ, where):
      return _run(*arguments)

  def test_the_golden_model_generates_what_the_peer_generates(self):
    status, out, err = self._run(
      "--checkpoint=golden",
      f"--prompt_tokens={self.prompt_tokens}",
      "--temperature=0",
      "--max_tokens=24",
      "--prefill_chunk=16",
    )
    self.assertEqual(status, 0, err)
    self.assertEqual(out, " ".join(map(str, self.greedy)) + " \n")
    self.assertNotIn("note", "\n".join(err))
    self.assertRegex(
      err[-1],
      r"^prefill: 20 tokens in .*, [0-9,]+ tokens/s; "
      r"decode: 24 tokens in .*, [0-9,]+ tokens/s$",
    )

  def test_text_goes_on_from_the_prompt_and_hangs_on_the_seed_alone(self):
    arguments = ("--checkpoint=bytes", "--prompt=a\u00e9b", "--max_tokens=30")
    runs = [self._run(*arguments, f"--seed={seed}") for seed in (3, 3, 4)]
    for status, out, err in runs:
      self.assertEqual(status, 0, err)
      self.assertStartsWith(out, "a\u00e9b")
      self.assertIn("note: past 16 tokens the decoder is on new ground", err)
      self.assertEndsWith(out, "\n")
      # An untrained model writes any bytes; a terminal is sent none of them.
      self.assertTrue(
        all(c.isprintable() or c in "\n\t" for c in out), repr(out)
      )
    self.assertEqual(runs[0][1], runs[1][1])
    self.assertNotEqual(runs[0][1], runs[2][1])

  def test_text_comes_as_it_is_generated(self):
    written = []

    class Listener(io.StringIO):
      def flush(self):
        written.append(self.getvalue())

    with contextlib.redirect_stdout(Listener()):
      generate._write(list(b"ab"), iter(b"cd"), is_text=True)
    self.assertEqual(written, ["ab", "abc", "abcd", "abcd\n"])

  def test_an_interrupt_keeps_what_was_written_and_says_how_fast_it_was(self):
    def interrupted(*args, **kwargs):
      yield from b"xy"
      raise KeyboardInterrupt

    with mock.patch.object(generation, "decode", interrupted):
      status, out, err = self._run("--checkpoint=bytes", "--prompt=ab")
    self.assertEqual((status, out), (128 + signal.SIGINT, "abxy\n"))
    self.assertIn("decode: 2 tokens", err[-2])
    self.assertEqual(err[-1], "generate: stopped")

  @parameterized.named_parameters(
    ("no_folder_named", [], "--checkpoint is missing"),
    ("no_folder", ["--checkpoint=none"], "none is no folder"),
    ("empty", ["--checkpoint=empty"], "empty has neither model.safetensors"),
    ("empty_prompt", ["--checkpoint=bytes", "--prompt="], "--prompt is empty"),
    ("no_bytes", ["--checkpoint=golden"], "96 tokens, which are no bytes: use"),
    (
      "words",
      ["--checkpoint=golden", "--prompt_tokens=1,two"],
      "--prompt_tokens: invalid literal",
    ),
    (
      "too_large",
      ["--checkpoint=golden", "--prompt_tokens=1,96"],
      "must be numbers from 0 to 95",
    ),
    (
      "no_token",
      ["--checkpoint=golden", "--prompt_tokens="],
      "must be numbers from 0 to 95",
    ),
    ("temperature", ["--temperature=-1"], "temperature"),
    ("backend", ["--backend=none"], "<gather|dot_product>"),
  )
  def test_wrong_input_is_one_line_and_status_1(self, arguments, expected):
    status, out, err = self._run(*arguments)
    self.assertEqual((status, out), (1, ""))
    self.assertIn(expected, err[-1])
    self.assertEqual([line for line in err[:-1] if "reading" not in line], [])


if __name__ == "__main__":
  absltest.main()
