"""Checks of arguments: what passes, and what each error says."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from dsa import checks


class CheckShapeTest(parameterized.TestCase):
  def test_returns_the_sizes_with_those_it_was_given(self):
    sizes = checks.check_shape("x", jnp.zeros((2, 3, 4)), "B T E", E=4, K=7)
    self.assertEqual(sizes, {"B": 2, "T": 3, "E": 4, "K": 7})

  @parameterized.parameters(
    ((2, 3), "B T", {}),
    ((2, 3), "2 T", {}),
    ((), "", {}),
    ((0,), "0", {}),
    ((2, 3), "B T", {"B": 2, "T": 3}),
  )
  def test_accepts(self, shape, axes, sizes):
    checks.check_shape("x", jnp.zeros(shape), axes, **sizes)

  @parameterized.parameters(
    ((2, 3), "B T E", {}, r"\[B, T, E\], got \(2, 3\)"),
    ((2, 3), "B", {}, r"\[B\], got \(2, 3\)"),
    ((2, 3), "B T", {"T": 4}, r"\[B, T=4\], got \(2, 3\)"),
    ((2, 3), "B T", {"B": 1}, r"\[B=1, T\], got \(2, 3\)"),
    ((2, 0), "B T", {"B": 2, "T": 1}, r"\[B=2, T=1\], got \(2, 0\)"),
    ((2, 3), "B T", {"T": 0}, r"\[B, T=0\], got \(2, 3\)"),
    ((2, 3), "2 4", {}, r"\[2, 4\], got \(2, 3\)"),
    ((), "B", {}, r"\[B\], got \(\)"),
  )
  def test_other_shape_is_named(self, shape, axes, sizes, wanted):
    with self.assertRaisesRegex(ValueError, f"^x must have shape {wanted}$"):
      checks.check_shape("x", jnp.zeros(shape), axes, **sizes)

  @parameterized.parameters(
    ([1.0, 2.0], "list"), (None, "NoneType"), (3, "int")
  )
  def test_what_is_no_array_is_named(self, value, kind):
    with self.assertRaisesRegex(TypeError, f"^x must be an array, got {kind}$"):
      checks.check_shape("x", value, "B")

  def test_reads_shapes_without_values(self):
    abstract = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    self.assertEqual(checks.check_shape("x", abstract, "B T"), {"B": 2, "T": 3})

  def test_reads_numpy_arrays(self):
    self.assertEqual(checks.check_shape("x", np.zeros(3), "B"), {"B": 3})


class CheckDtypeTest(parameterized.TestCase):
  @parameterized.parameters(
    (jnp.float32, jnp.floating),
    (jnp.bfloat16, jnp.floating),
    (jnp.int8, jnp.integer),
    (jnp.uint32, jnp.integer),
    (jnp.bool_, jnp.bool_),
    (jnp.float32, jnp.float32),
    (jnp.float32, np.dtype("float32")),
  )
  def test_accepts(self, dtype, kind):
    checks.check_dtype("x", jnp.zeros(3, dtype), kind)

  @parameterized.parameters(
    (jnp.int32, jnp.floating, "floating", "int32"),
    (jnp.bool_, jnp.floating, "floating", "bool"),
    (jnp.bool_, jnp.integer, "integer", "bool"),
    (jnp.float32, jnp.integer, "integer", "float32"),
    (jnp.int32, jnp.bool_, "bool", "int32"),
    (jnp.bfloat16, jnp.float32, "float32", "bfloat16"),
    (jnp.bfloat16, np.dtype("float32"), "float32", "bfloat16"),
  )
  def test_other_dtype_is_named(self, dtype, kind, wanted, got):
    with self.assertRaisesRegex(
      TypeError, f"^x must be of dtype {wanted}, got {got}$"
    ):
      checks.check_dtype("x", jnp.zeros(3, dtype), kind)

  @parameterized.parameters(([1.0],), (1.0,), (None,))
  def test_what_is_no_array_is_named(self, value):
    with self.assertRaisesRegex(
      TypeError, f"^x must be of dtype floating, got {type(value).__name__}$"
    ):
      checks.check_dtype("x", value, jnp.floating)

  def test_random_keys_are_not_integers(self):
    with self.assertRaisesRegex(TypeError, "^x must be of dtype integer"):
      checks.check_dtype("x", jax.random.key(0), jnp.integer)


class CheckNumbersTest(parameterized.TestCase):
  @parameterized.parameters(jnp.bfloat16, jnp.float16, np.float32, np.float64)
  def test_accepts(self, dtype):
    checks.check_numbers("x", np.zeros(3, dtype))

  @parameterized.parameters(
    (np.int32, "dtype floating"),
    (jnp.float8_e4m3fn, "a float dtype of at least 16 bits"),
    (jnp.float8_e5m2, "a float dtype of at least 16 bits"),
  )
  def test_what_needs_a_scale_is_named(self, dtype, wanted):
    got = np.dtype(dtype)
    with self.assertRaisesRegex(
      TypeError, f"^x must be of {wanted}, got {got}$"
    ):
      checks.check_numbers("x", np.zeros(3, dtype))


class CheckCountTest(parameterized.TestCase):
  @parameterized.parameters(
    (1,), (7,), (np.int64(7),), (np.uint8(7),), (np.array(7),)
  )
  def test_returns_an_int(self, value):
    count = checks.check_count("k", value)
    self.assertIs(type(count), int)
    self.assertEqual(count, int(value))

  @parameterized.parameters(0, -1, np.int32(0))
  def test_less_than_one_is_named(self, value):
    with self.assertRaisesRegex(
      ValueError, f"^k must be at least 1, got {int(value)}$"
    ):
      checks.check_count("k", value)

  @parameterized.parameters(
    (True, "True"),
    (False, "False"),
    (np.True_, "np.True_"),
    (2.0, "2.0"),
    ("2", "'2'"),
    (None, "None"),
    (np.array([2, 3]), "array"),
  )
  def test_what_is_no_integer_is_named(self, value, got):
    with self.assertRaisesRegex(
      TypeError, f"^k must be a.* integer, got {got}"
    ):
      checks.check_count("k", value)

  def test_a_tracer_is_named(self):
    with self.assertRaisesRegex(
      TypeError, "^k must be a static integer, got .*Tracer"
    ):
      jax.jit(lambda k: checks.check_count("k", k))(3)


if __name__ == "__main__":
  absltest.main()
