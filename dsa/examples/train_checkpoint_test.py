"""What was saved is read back whole, whatever happens to later savings."""

import os
import pathlib
from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized

from dsa.examples import train_checkpoint

_SETTINGS = {"layers": 2, "lr": 3e-3, "text": "ab"}


def _tree(seed):
  rng = np.random.default_rng(seed)
  return {
    "weights": [rng.normal(size=(3, 4)).astype(np.float32), np.float32(seed)],
    "step": np.int64(seed),
    "losses": np.array([1.5, np.nan], np.float32),
  }


class TrainCheckpointTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.path = self.folder / "checkpoint.npz"

  def _assert_holds(self, seed):
    loaded = train_checkpoint.load(self.path, _tree(0), _SETTINGS)
    np.testing.assert_equal(loaded, _tree(seed))
    self.assertEqual(loaded["step"].dtype, np.int64)

  def test_a_tree_comes_back_to_the_bit(self):
    train_checkpoint.save(self.path, _tree(7), _SETTINGS)
    self._assert_holds(7)

  def test_the_last_one_saved_is_read(self):
    for seed in (7, 8):
      train_checkpoint.save(self.path, _tree(seed), _SETTINGS)
    self._assert_holds(8)
    self.assertEqual(os.listdir(self.folder), [self.path.name])

  @parameterized.parameters("savez", "fsync", "replace")
  def test_a_torn_write_leaves_the_old_one(self, step):
    def tear(stream, *args, **kwargs):
      del args, kwargs
      if step == "savez":
        stream.write(b"PK torn")
      raise OSError(28, "No space left on device")

    train_checkpoint.save(self.path, _tree(7), _SETTINGS)
    owner = np if step == "savez" else os
    with mock.patch.object(owner, step, tear), self.assertRaises(OSError):
      train_checkpoint.save(self.path, _tree(8), _SETTINGS)
    self._assert_holds(7)
    self.assertEqual(os.listdir(self.folder), [self.path.name])

  def test_what_is_written_is_on_the_disk_before_it_takes_the_name(self):
    calls = []

    def sync(descriptor):
      calls.append(("sync", os.fstat(descriptor).st_size))

    with (
      mock.patch.object(os, "fsync", sync),
      mock.patch.object(os, "replace", lambda *_: calls.append(("name",))),
    ):
      train_checkpoint.save(self.path, _tree(7), _SETTINGS)
    self.assertEqual([call[0] for call in calls], ["sync", "name", "sync"])
    (written,) = self.folder.iterdir()
    self.assertEqual(calls[0][1], written.stat().st_size)

  def test_what_a_killed_write_left_is_never_read_and_is_removed(self):
    train_checkpoint.save(self.path, _tree(7), _SETTINGS)
    (self.folder / "checkpoint.npz.123.tmp").write_bytes(b"PK half")
    train_checkpoint.prepare(self.path)
    self._assert_holds(7)
    self.assertEqual(os.listdir(self.folder), [self.path.name])

  def test_other_settings_are_refused_by_name(self):
    train_checkpoint.save(self.path, _tree(7), _SETTINGS)
    other = {**_SETTINGS, "layers": 3}
    with self.assertRaisesRegex(ValueError, "layers is 2 there and 3 here$"):
      train_checkpoint.load(self.path, _tree(0), other)

  def test_another_shape_or_dtype_is_refused(self):
    train_checkpoint.save(self.path, _tree(7), _SETTINGS)
    for losses in (np.zeros(3, np.float32), np.zeros(2, np.float64)):
      template = {**_tree(0), "losses": losses}
      with self.assertRaisesRegex(ValueError, "losses.* is float32 .2,. there"):
        train_checkpoint.load(self.path, template, _SETTINGS)

  @parameterized.parameters(0, 1, 50, 500, -200, -1)
  def test_a_damaged_file_is_refused(self, length):
    train_checkpoint.save(self.path, _tree(7), _SETTINGS)
    self.path.write_bytes(self.path.read_bytes()[:length])
    with self.assertRaisesRegex(ValueError, "damaged"):
      train_checkpoint.load(self.path, _tree(0), _SETTINGS)

  def test_a_flipped_bit_is_refused(self):
    train_checkpoint.save(self.path, _tree(7), _SETTINGS)
    data = bytearray(self.path.read_bytes())
    weights = _tree(7)["weights"][0].tobytes()
    data[data.index(weights)] ^= 1
    self.path.write_bytes(data)
    with self.assertRaisesRegex(ValueError, "damaged"):
      train_checkpoint.load(self.path, _tree(0), _SETTINGS)

  def test_a_folder_that_cannot_be_made_raises(self):
    (self.folder / "file").touch()
    for folder in ("file", "file/below"):
      with self.assertRaises(OSError):
        train_checkpoint.prepare(self.folder / folder / "checkpoint.npz")


if __name__ == "__main__":
  absltest.main()
