"""Checkpoint folders as files: what is listed, and shards that are damaged."""

import json
import pathlib

import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from safetensors import numpy as safetensors

from dsa import checkpoint_files
from testing import checkpoint_folders

_INDEX = "model.safetensors.index.json"


def _tensors():
  rng = np.random.default_rng(0)
  return {
    name: rng.normal(size=shape).astype(np.float32)
    for name, shape in (("a", (3, 4)), ("b", (5,)), ("c", (2, 2, 2)))
  }


class FilesTestCase(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.directory = pathlib.Path(self.create_tempdir().full_path)
    self.shard = self.directory / "model.safetensors"

  def write(self, shards=1):
    return checkpoint_folders.write_folder(
      self.directory, _tensors(), {"a": 1}, shards
    )

  def open(self):
    return checkpoint_files.Folder(self.directory)


class FolderTest(FilesTestCase):
  @parameterized.parameters(1, 2, 3)
  def test_holds_what_was_written(self, shards):
    self.write(shards)
    folder = self.open()
    self.assertEqual(set(folder), {"a", "b", "c"})
    self.assertLen(folder, 3)
    self.assertNotIn("d", folder)
    for name, wanted in _tensors().items():
      self.assertEqual(folder[name].shape, wanted.shape)
      self.assertEqual(folder[name].nbytes, wanted.nbytes)
      np.testing.assert_array_equal(np.asarray(folder[name]), wanted)
    self.assertEqual(folder.config_json(), {"a": 1})

  @parameterized.parameters(
    np.float64,
    np.float32,
    np.float16,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
    ml_dtypes.float8_e8m0fnu,
    np.int64,
    np.int32,
    np.int16,
    np.int8,
    np.uint8,
    np.uint16,
    np.uint32,
    np.uint64,
    np.bool_,
  )
  def test_every_dtype_is_read_to_the_bit(self, dtype):
    tensor = np.array([[1, 2, 0.5], [4, 8, 16]]).astype(dtype)
    empty, scalar = np.zeros((0, 2), dtype), np.ones((), dtype)
    tensors = {"a": tensor, "b": empty, "c": scalar}
    safetensors.save_file(tensors, self.shard, {"format": "np"})
    for name, wanted in tensors.items():
      actual = np.asarray(self.open()[name])
      self.assertEqual(actual.dtype, wanted.dtype)
      self.assertEqual(actual.shape, wanted.shape)
      self.assertEqual(actual.tobytes(), wanted.tobytes())

  def test_what_was_read_can_be_written_over(self):
    self.write()
    array = np.asarray(self.open()["a"])
    array[...] = 0
    np.testing.assert_array_equal(np.asarray(self.open()["a"]), _tensors()["a"])

  def test_a_folder_that_is_empty_or_not_there_is_named(self):
    with self.assertRaisesRegex(
      FileNotFoundError, f"{self.directory} has neither {_INDEX} nor model.s"
    ):
      self.open()

  @parameterized.parameters(
    (b"{", "is no JSON"),
    (b"\xff", "is no JSON"),
    (b"[]", "must hold a dictionary"),
    (b"{}", "has no dictionary under weight_map"),
    (b'{"weight_map": {"a": "../a"}}', "a file of the folder for a, got '../a"),
    (b'{"weight_map": {"a": ".."}}', "a file of the folder for a, got '..'"),
    (b'{"weight_map": {"a": ""}}', "a file of the folder for a, got ''"),
    (b'{"weight_map": {"a": 3}}', "a file of the folder for a, got 3"),
  )
  def test_a_damaged_index_is_named(self, index, wanted):
    (self.directory / _INDEX).write_bytes(index)
    with self.assertRaisesRegex(
      ValueError, f"^{self.directory / _INDEX} .*{wanted}"
    ):
      self.open()

  def test_a_folder_in_place_of_a_shard_is_named(self):
    path = self.directory / self.write(3)["a"]
    path.unlink()
    path.mkdir()
    with self.assertRaisesRegex(FileNotFoundError, f"^{path} is missing"):
      self.open()["a"]

  def test_an_index_that_is_wrong_is_named(self):
    shard_of = self.write(3)
    shard_of["a"], shard_of["b"] = shard_of["b"], shard_of["a"]
    index = json.dumps({"weight_map": shard_of})
    (self.directory / _INDEX).write_text(index)
    with self.assertRaisesRegex(
      ValueError, f"{shard_of['a']} lacks a, which .*{_INDEX} says it has"
    ):
      self.open()["a"]


class DamageTest(FilesTestCase):
  def test_no_cut_goes_unnoticed(self):
    self.write()
    whole = self.shard.read_bytes()
    for length in range(0, len(whole), 5):
      self.shard.write_bytes(whole[:length])
      with self.assertRaisesRegex(ValueError, f"{self.shard} is truncated"):
        self.open()

  def test_the_tensor_that_is_cut_is_named(self):
    self.write()
    whole = self.shard.read_bytes()
    last = max(self.open().items(), key=lambda item: item[1].start)
    self.shard.write_bytes(whole[: last[1].start + 1])
    with self.assertRaisesRegex(
      ValueError, f"{self.shard} is truncated: {last[0]} ends at byte"
    ):
      self.open()

  def test_in_several_shards_the_tensor_asked_for_is_named(self):
    path = self.directory / self.write(3)["b"]
    path.write_bytes(b"")
    folder = self.open()
    self.assertEqual(folder["a"].shape, (3, 4))
    with self.assertRaisesRegex(
      ValueError, f"^cannot read b: {path} is truncated or no safetensors file"
    ):
      folder["b"]

  def test_bytes_that_belong_to_no_tensor_are_named(self):
    self.write()
    self.shard.write_bytes(self.shard.read_bytes() + b"0")
    with self.assertRaisesRegex(ValueError, "where its header says .* damaged"):
      self.open()

  @parameterized.named_parameters(
    ("no_json", b"{", "has a damaged header"),
    ("no_dictionary", b"[]", "has a damaged header"),
    ("no_entry", b'{"a": 3}', "has a damaged header"),
    ("no_offsets", b'{"a": {"dtype": "F32", "shape": [1]}}', "data_offsets"),
    (
      "unknown_dtype",
      b'{"a": {"dtype": "F4", "shape": [8], "data_offsets": [0, 4]}}',
      "dtype 'F4' is none of",
    ),
    (
      "another_size",
      b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
      r"bytes 0 to 4 are no F32 of shape \(2,\)",
    ),
    (
      "a_size_that_is_no_integer",
      b'{"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}',
      r"\[1.0\] and \[0, 4\] must be integers",
    ),
    (
      "before_the_data",
      b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}',
      "bytes -4 to 0 are no",
    ),
    (
      "overlap",
      b'{"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},'
      b' "b": {"dtype": "U8", "shape": [2], "data_offsets": [2, 4]}}',
      "b begins at byte .*, the one before it ends at",
    ),
  )
  def test_a_damaged_header_is_named(self, header, wanted):
    length = len(header).to_bytes(8, "little")
    self.shard.write_bytes(length + header + b"0000")
    with self.assertRaisesRegex(ValueError, f"^{self.shard} .*{wanted}"):
      self.open()

  def test_a_file_that_shrinks_while_it_is_read_is_named(self):
    self.write()
    folder = self.open()
    self.shard.write_bytes(self.shard.read_bytes()[:-40])
    with self.assertRaisesRegex(ValueError, f"{self.shard} became shorter"):
      [np.asarray(tensor) for tensor in folder.values()]


if __name__ == "__main__":
  absltest.main()
