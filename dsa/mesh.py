"""What code has to say so that a mesh of devices may run it.

Inside `jax.shard_map` an array's type names the axes over which its values
differ from device to device, and a loop must start from the type that it ends
with. Under explicit axes (`jax.make_mesh`'s own kind) an array's type names the
axes that it is spread over; what mixes batch rows runs on each device's own.
On one device none of this does anything.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec


def varying_axes(*trees: Any) -> frozenset[str]:
  """The manual axes over which the values of any array differ.

  Args:
    *trees: Trees of arrays.

  Returns:
    Names of axes of a `jax.shard_map`; none outside of one.
  """
  types = [jax.typeof(x) for x in jax.tree.leaves(trees)]
  axes = [aval.manual_axis_type.varying for aval in types]
  return frozenset().union(*axes)


def vary[Tree](tree: Tree, axes: frozenset[str]) -> Tree:
  """What is equal on all devices, as what may differ: a type, no work.

  Args:
    tree: A tree of arrays.
    axes: Manual axes.

  Returns:
    The tree, each array varying over the axes at least. The derivative sums
    over those that were added.
  """

  def cast(x: jax.Array) -> jax.Array:
    missing = tuple(sorted(axes - varying_axes(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x

  cast_tree: Tree = jax.tree.map(cast, tree)
  return cast_tree


def sum_like(x: jax.Array, like: jax.Array) -> jax.Array:
  """Sums over the axes over which x varies and another array does not.

  Args:
    x: What each device has.
    like: An array that varies over no axis but those of x.

  Returns:
    The sum, which varies as `like` does.
  """
  return sum_over(tuple(sorted(varying_axes(x) - varying_axes(like))), x)


def sum_over(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
  """Adds up what devices have along manual axes; x where there are none."""
  if not axes:
    return x
  total: jax.Array = jax.lax.psum(x, axes)  # type: ignore[no-untyped-call]
  return total


def mean_over(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
  """Averages what devices have along manual axes; x where there are none."""
  if not axes:
    return x
  mean: jax.Array = jax.lax.pmean(x, axes)  # type: ignore[no-untyped-call]
  return mean


def all_gather(
  x: jax.Array, axes: tuple[str, ...], *, axis: int, equal: bool = False
) -> jax.Array:
  """Concatenates what devices have along some manual axes.

  Args:
    x: A device's part.
    axes: Manual axes, or none for x itself.
    axis: The array axis along which to concatenate.
    equal: Whether the type should say that all devices have the same. Then
      its gradient is the same on all devices too, and not summed over them.

  Returns:
    The whole.
  """
  if not axes:
    return x
  to = "invarying" if equal else "varying"
  whole: jax.Array = jax.lax.all_gather(x, axes, axis=axis, tiled=True, to=to)
  return whole


def map_rows(body: Callable[[Any, Any], Any], weights: Any, rows: Any) -> Any:
  """Applies a function, on each device to the batch rows that lie there.

  Args:
    body: Called with (weights, rows); no row's answer depends on another row.
    weights: A tree of arrays, gathered to all devices that share rows.
    rows: A tree of arrays [B, ...], spread over explicit axes or not.

  Returns:
    The tree of arrays [B, ...] that `body` returns, spread as the rows.
  """
  sharding = jax.typeof(jax.tree.leaves(rows)[0]).sharding
  axes = sharding.spec[0] if len(sharding.spec) else None
  if axes is None:
    return body(weights, rows)
  whole = PartitionSpec()  # type: ignore[no-untyped-call]
  spread = PartitionSpec(axes)  # type: ignore[no-untyped-call]
  names = {axes} if isinstance(axes, str) else set(axes)
  mapped = jax.shard_map(
    body,
    mesh=sharding.mesh,
    in_specs=(whole, spread),
    out_specs=spread,
    axis_names=names,
  )
  reshard: Callable[[Any, Any], Any] = jax.reshard
  return mapped(reshard(weights, whole), reshard(rows, spread))
