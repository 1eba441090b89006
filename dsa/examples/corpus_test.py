"""What is trained on and what is held out."""

import pathlib

import numpy as np
from absl.testing import absltest

from dsa.examples import corpus


class CorpusTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def _write(self, name, data):
    path = self.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path

  def _read(self, path, seq_len=4, seed=0):
    return corpus.read_corpus(path, seq_len=seq_len, seed=seed)

  def test_the_last_twentieth_of_a_file_is_held_out(self):
    data = bytes(range(200))
    text = self._read(self._write("a", data))
    self.assertEqual(text.train.tobytes(), data[:190])
    self.assertEqual(text.held_out.tobytes(), data[190:])

  def test_each_part_holds_a_sequence_and_its_last_target(self):
    text = self._read(self._write("a", b"0123456789"))
    self.assertEqual((len(text.train), len(text.held_out)), (5, 5))
    with self.assertRaisesRegex(ValueError, "9 bytes are too few .* 10 are"):
      self._read(self._write("b", b"012345678"))

  def test_all_files_of_a_folder_are_read_but_hidden_ones(self):
    for name in ("a", "b/c", "b/d/e"):
      self._write(name, name.encode() * 20)
    self._write(".git/x", b"hidden")
    self._write("b/.y", b"hidden")
    text = self._read(self.folder)
    data = text.train.tobytes() + text.held_out.tobytes()
    for name in ("a", "b/c", "b/d/e"):
      self.assertIn(name.encode() * 20, data)
    self.assertLen(data, 20 * len("ab/cb/d/e"))

  def test_the_order_of_files_hangs_on_the_seed_alone(self):
    for i in range(10):
      self._write(str(i), bytes([i]) * 10)
    same = [self._read(self.folder, seed=3).sha256() for _ in range(2)]
    self.assertEqual(*same)
    self.assertNotEqual(same[0], self._read(self.folder, seed=4).sha256())

  def test_no_files_raise(self):
    with self.assertRaisesRegex(ValueError, "no file in the folder"):
      self._read(self.folder)
    with self.assertRaises(FileNotFoundError):
      self._read(self.folder / "missing")

  def test_the_default_is_source_text_of_python(self):
    text = corpus.read_corpus(None, seq_len=512, seed=0)
    self.assertGreater(len(text.train), 1 << 20)
    self.assertIn(b"def dataclass(", text.train.tobytes())

  def test_a_batch_is_consecutive_text_drawn_by_seed_and_step(self):
    data = np.random.default_rng(0).permutation(200).astype(np.uint8)
    text = self._read(self._write("a", data.tobytes()))

    def batch(seed=1, step=2):
      return corpus.training_batch(
        text, seed=seed, step=step, batch=3, seq_len=4
      )

    np.testing.assert_array_equal(batch(), batch())
    self.assertFalse(np.array_equal(batch(), batch(step=3)))
    self.assertFalse(np.array_equal(batch(), batch(seed=2)))
    self.assertEqual(batch().shape, (3, 5))
    for row in batch():
      self.assertIn(row.astype(np.uint8).tobytes(), text.train.tobytes())

  def test_every_place_of_the_text_is_trained_on(self):
    text = self._read(self._write("a", bytes(range(10))))
    seen = {
      int(token)
      for step in range(20)
      for token in corpus.training_batch(
        text, seed=0, step=step, batch=1, seq_len=2
      ).ravel()
    }
    self.assertEqual(seen, set(text.train.tolist()))

  def test_held_out_sequences_spread_over_the_held_out_part(self):
    text = self._read(self._write("a", bytes(i % 251 for i in range(2000))))
    batches = corpus.held_out_batches(text, batches=2, batch=3, seq_len=4)
    self.assertEqual(batches.shape, (2, 3, 5))
    np.testing.assert_array_equal(batches[0, 0], text.held_out[:5])
    np.testing.assert_array_equal(batches[-1, -1], text.held_out[-5:])


if __name__ == "__main__":
  absltest.main()
