"""Checks of arguments, made while tracing and before any compute.

Each error names the argument, what was expected and what came. Shapes are
written with the letters of the docstrings, as in `"B T E"`.
"""

import operator
from typing import Any

import jax.numpy as jnp


def check_shape(
  name: str, array: Any, axes: str, **sizes: int
) -> dict[str, int]:
  """Checks an array's rank, and the sizes of those axes that are known.

  Args:
    name: The argument's name, for the error.
    array: Anything with a shape.
    axes: A letter or number for each axis, separated by spaces.
    **sizes: Known sizes by letter.

  Returns:
    `sizes` with those of this array added, to check the next one with.

  Raises:
    TypeError: If `array` has no shape.
    ValueError: If the rank or a size differs.
  """
  if not hasattr(array, "shape"):
    raise TypeError(f"{name} must be an array, got {type(array).__name__}")
  letters = axes.split()
  expected = {a: int(a) if a.isdigit() else sizes.get(a) for a in letters}
  shape = tuple(array.shape)
  if len(shape) != len(letters) or any(
    expected[letter] not in (None, size)
    for letter, size in zip(letters, shape, strict=True)
  ):
    wanted = ", ".join(
      a if expected[a] is None or a.isdigit() else f"{a}={expected[a]}"
      for a in letters
    )
    raise ValueError(f"{name} must have shape [{wanted}], got {shape}")
  return {**sizes, **dict(zip(letters, shape, strict=True))}


def check_dtype(name: str, array: Any, kind: Any) -> None:
  """Checks that an array's dtype is of a kind.

  Args:
    name: The argument's name, for the error.
    array: Anything with a dtype.
    kind: An abstract dtype such as `jnp.floating`, or a dtype.

  Raises:
    TypeError: If the dtype is of another kind.
  """
  dtype = getattr(array, "dtype", None)
  if dtype is None or not jnp.issubdtype(dtype, kind):
    raise TypeError(
      f"{name} must be of dtype {getattr(kind, '__name__', kind)}, got "
      f"{type(array).__name__ if dtype is None else dtype}"
    )


def check_numbers(name: str, array: Any) -> None:
  """Checks that an array's dtype is a float that needs no scale beside it.

  Args:
    name: The argument's name, for the error.
    array: Anything with a dtype.

  Raises:
    TypeError: If the dtype is no float, or one of fewer than 16 bits.
  """
  check_dtype(name, array, jnp.floating)
  if array.dtype.itemsize < 2:
    raise TypeError(
      f"{name} must be of a float dtype of at least 16 bits, got {array.dtype}"
    )


def check_count(name: str, value: Any) -> int:
  """Checks a static number of things, at least 1.

  Args:
    name: The argument's name, for the error.
    value: What was passed.

  Returns:
    The number as an int.

  Raises:
    TypeError: If it is not an integer known while tracing.
    ValueError: If it is below 1.
  """
  try:
    count = operator.index(value)
  except Exception as error:  # A tracer raises an error of its own.
    raise TypeError(
      f"{name} must be a static integer, got {value!r}"
    ) from error
  if isinstance(value, bool):
    raise TypeError(f"{name} must be an integer, got {value!r}")
  if count < 1:
    raise ValueError(f"{name} must be at least 1, got {count}")
  return count
