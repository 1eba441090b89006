"""Logical axes of everything in a layer, and the mesh axes that they map to.

    logical axes   names of an array's axes: ("embed", "index_heads")
    rules          what each name is spread over: {"index_heads": "tensor"}
    spec           PartitionSpec(None, "tensor")

Parameters bear their logical axes (`dsa.params`); those of activations and of
the cache stand here. One table of rules says all of a layout: tensor parallel
where heads are spread, context parallel where tokens are, data parallel where
batch rows are, and FSDP where any other axis of a parameter is: over mesh axes
of its own, or better over those of the batch or of the tokens.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsa import params as params_lib
from dsa.cache_buffers import Cache, init_cache
from dsa.checks import check_count
from dsa.config import DSAConfig
from dsa.params import DSAParams

# Mesh axes that an array axis is spread over; None for no axis.
MeshAxes = str | tuple[str, ...] | None
Rules = Mapping[str, MeshAxes]

# What is not named here is not spread. Axes that a mesh lacks do not count.
RULES: Rules = {
  "batch": ("data", "fsdp"),
  "tokens": "context",
  "heads": "tensor",
  "index_heads": "tensor",
  "embed": "fsdp",
}

# Logical axes of what an attention function is given and returns.
ACTIVATIONS: Mapping[str, tuple[str, ...]] = {
  "x": ("batch", "tokens", "hidden"),
  "positions": ("batch", "tokens"),
  "segment_ids": ("batch", "tokens"),
  "out": ("batch", "tokens", "hidden"),
  "selection": ("batch", "tokens", "selected"),
  "indexer_loss": (),
}

# Logical axes of the cache's buffers, by rank.
_CACHE_ROWS = ("batch", "cached_tokens", "cached_dim")
_CACHE_STATE = ("batch",)


def mesh_axes(rules: Rules, name: str) -> tuple[str, ...]:
  """The mesh axes that a logical axis is spread over.

  Args:
    rules: The table.
    name: Of the logical axis.

  Returns:
    Names of mesh axes, none where it is not spread.
  """
  axes = rules.get(name)
  if axes is None:
    return ()
  return (axes,) if isinstance(axes, str) else tuple(axes)


def rules_for(mesh: Mesh, rules: Rules = RULES) -> Rules:
  """The rules as far as a mesh has the axes that they name.

  Args:
    mesh: The devices.
    rules: The table.

  Returns:
    The rules without the axes that the mesh lacks.
  """
  kept = {
    name: tuple(a for a in mesh_axes(rules, name) if a in mesh.axis_names)
    for name in rules
  }
  return {name: axes for name, axes in kept.items() if axes}


def partition_spec(axes: tuple[str, ...], rules: Rules) -> PartitionSpec:
  """What an array of given logical axes is spread over.

  Args:
    axes: The logical axes, such as `ACTIVATIONS["x"]`.
    rules: The table.

  Returns:
    The spec, with a tuple of mesh axes or None for each axis.
  """
  return PartitionSpec(  # type: ignore[no-untyped-call]
    *(mesh_axes(rules, name) or None for name in axes)
  )


def param_specs(
  config: DSAConfig, rules: Rules = RULES
) -> DSAParams[PartitionSpec]:
  """What each parameter of a layer is spread over.

  Args:
    config: The sizes.
    rules: The table.

  Returns:
    The tree of parameters with a `PartitionSpec` in each place.

  Raises:
    ValueError: If a rule bears the name of no logical axis, or one parameter
      would be spread over a mesh axis twice.
  """
  table = params_lib.param_specs(config, jnp.float32)
  _check_rules(table, rules)
  return jax.tree.map(
    lambda spec: partition_spec(spec.logical_axes, rules), table
  )


def cache_specs(
  config: DSAConfig, rules: Rules = RULES, *, index_keys: bool = True
) -> Cache:
  """What each buffer of a layer's cache is spread over.

  Args:
    config: The sizes, and what is quantised.
    rules: The table; the places of a row are "cached_tokens".
    index_keys: As in `init_cache`.

  Returns:
    The tree of the cache with a `PartitionSpec` in each place.
  """
  shapes = jax.eval_shape(
    functools.partial(init_cache, config, 1, 1, index_keys=index_keys)
  )
  return jax.tree.map(
    lambda x: partition_spec(
      _CACHE_ROWS if len(x.shape) == len(_CACHE_ROWS) else _CACHE_STATE, rules
    ),
    shapes,
  )


def init_sharded(
  key: jax.Array,
  config: DSAConfig,
  mesh: Mesh,
  rules: Rules = RULES,
  dtype: Any = jnp.float32,
) -> DSAParams[jax.Array]:
  """Draws the parameters of one layer where they are to lie.

  Args:
    key: A JAX random key.
    config: The sizes.
    mesh: The devices.
    rules: The table; axes that the mesh lacks do not count.
    dtype: As in `init_params`.

  Returns:
    What `init_params` returns but for rounding, each device with its part.

  Raises:
    ValueError: If a rule bears the name of no logical axis, or an axis does not
      divide evenly.
    TypeError: If `dtype` is not a float dtype.
  """
  shapes = params_lib.abstract_params(config, dtype)
  specs = param_specs(config, rules_for(mesh, rules))
  check_divisible(shapes, specs, mesh)
  shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
  init = jax.jit(
    functools.partial(params_lib.init_params, config=config, dtype=dtype),
    out_shardings=shardings,
  )
  params: DSAParams[jax.Array] = init(key)
  return params


def check_divisible(arrays: Any, specs: Any, mesh: Mesh) -> None:
  """Checks that each axis divides over the devices that it is spread over.

  Args:
    arrays: A tree of anything with a shape.
    specs: The same tree of `PartitionSpec`.
    mesh: The devices.

  Raises:
    ValueError: If an axis does not, naming the array.
  """
  named, _ = jax.tree.flatten_with_path(arrays)
  for (path, array), spec in zip(named, jax.tree.leaves(specs), strict=True):
    for size, axes in zip(array.shape, spec, strict=False):
      parts = axes_size(mesh, axes)
      if size % parts:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        raise ValueError(
          f"{name} of shape {tuple(array.shape)} has an axis of {size}, which "
          f"must divide over the {parts} devices of mesh axes {axes}"
        )


def axes_size(mesh: Mesh, axes: MeshAxes) -> int:
  """Devices along some axes of a mesh."""
  names = (axes,) if isinstance(axes, str) else axes or ()
  return math.prod(mesh.shape[name] for name in names)


def to_zigzag(x: jax.Array, parts: int, *, axis: int = 1) -> jax.Array:
  """Reorders tokens so that causal work is the same on all devices.

  In order, the last of the devices has the queries that see the most keys. Cut
  into 2 * `parts` slices, each device gets one from the front and the one that
  lies as far from the back.

  Args:
    x: An array in token order, for example [B, T, E].
    parts: Devices that tokens are spread over.
    axis: The axis of T, which 2 * `parts` divides.

  Returns:
    The array with its tokens reordered.

  Raises:
    ValueError: If T does not divide.
  """
  pairs = [(i, 2 * parts - 1 - i) for i in range(check_count("parts", parts))]
  return _reorder(x, [i for pair in pairs for i in pair], axis)


def from_zigzag(x: jax.Array, parts: int, *, axis: int = 1) -> jax.Array:
  """The inverse of `to_zigzag`.

  Args:
    x: An array whose tokens were reordered.
    parts: Devices that tokens are spread over.
    axis: The axis of T.

  Returns:
    The array in token order.

  Raises:
    ValueError: If T does not divide.
  """
  parts = check_count("parts", parts)
  places = [2 * i for i in range(parts)]
  places += [2 * i + 1 for i in reversed(range(parts))]
  return _reorder(x, places, axis)


def _reorder(x: jax.Array, slices: list[int], axis: int) -> jax.Array:
  length = x.shape[axis]
  if length % len(slices):
    raise ValueError(
      f"x must have a multiple of {len(slices)} tokens on axis {axis}, got "
      f"shape {x.shape}"
    )
  width = length // len(slices)
  return jnp.concatenate(
    [
      jax.lax.slice_in_dim(x, i * width, (i + 1) * width, axis=axis)
      for i in slices
    ],
    axis=axis,
  )


def _check_rules(table: DSAParams[params_lib.ParamSpec], rules: Rules) -> None:
  leaves = jax.tree.leaves(table)
  names = {axis for spec in leaves for axis in spec.logical_axes}
  names |= {axis for axes in ACTIVATIONS.values() for axis in axes}
  names |= {*_CACHE_ROWS, *_CACHE_STATE}
  unknown = sorted(set(rules) - names)
  if unknown:
    raise ValueError(
      f"rules must name logical axes, of {sorted(names)}, got {unknown}"
    )
  for spec in leaves:
    used = [a for name in spec.logical_axes for a in mesh_axes(rules, name)]
    if len(used) != len(set(used)):
      raise ValueError(
        "rules must not spread a parameter over a mesh axis twice, got "
        f"{used} for one of axes {spec.logical_axes}"
      )
