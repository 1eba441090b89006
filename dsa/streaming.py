"""The loops over chunks of tokens and over gathered rows, each written once.

    out[chunk] = body(weights, keys, tokens[chunk])        map_chunks
    out[block] = body(tokens[block], table[indices[block]])    map_gathered

Nothing but the inputs is kept for the backward pass: it runs `body` again,
chunk by chunk, and adds the gradients of what chunks share up in float32, so
that memory does not grow with the number of chunks and sums of bfloat16
gradients do not lose their small terms.

In causal order the chunks fall into groups, and each group is given only the
keys up to its last query. With G groups that costs (G + 1) / G times the
arithmetic of a triangle.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dsa import mesh

# 12.5 % more arithmetic than a triangle; more groups take longer to compile.
_CAUSAL_GROUPS = 8

# Bytes of gathered rows in a block: enough work for all cores at once, and few
# enough to stay in a cache that they share.
_GATHERED_BYTES = 20 << 20

Body = Callable[[Any, Any, Any], Any]


def map_chunks(
  body: Body,
  weights: Any,
  keys: Any,
  queries: Any,
  *,
  chunk_size: int,
  causal: bool,
  out_axis: int = 1,
) -> Any:
  """Applies a function to tokens, most often queries, chunk by chunk.

  Args:
    body: Called with (weights, keys, queries of the chunk), returns a tree of
      arrays [B, chunk_size, ...]. It sees zeros for the queries that fill up
      the last chunk. A single chunk is given as it is.
    weights: A tree that each chunk sees whole.
    keys: A tree of arrays [B, S, ...]. In causal order a chunk may see no more
      of them than those up to the last query of its group.
    queries: A tree of arrays [B, T, ...].
    chunk_size: Queries in a chunk.
    causal: Whether query t needs only the keys 0..t, where T = S.
    out_axis: The axis of T in what `body` returns.

  Returns:
    The tree that `body` returns, of arrays [B, T, ...]. Its floats are
    differentiable in the floats of weights, keys and queries.
  """
  if chunk_size >= jax.tree.leaves(queries)[0].shape[1]:
    return body(weights, keys, queries)
  return _map(body, chunk_size, causal, out_axis, weights, keys, queries)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _map(
  body: Body,
  chunk_size: int,
  causal: bool,
  out_axis: int,
  weights: Any,
  keys: Any,
  queries: Any,
) -> Any:
  chunks = _split(queries, chunk_size)
  outs = []
  for start, stop in _groups(chunks, causal=causal):
    group_keys = _prefix(keys, stop * chunk_size) if causal else keys
    run = functools.partial(_run_chunk, body, weights, group_keys, chunks)
    outs.append(jax.lax.map(run, jnp.arange(start, stop)))
  return _join(outs, queries, out_axis)


def _run_chunk(
  body: Body, weights: Any, keys: Any, chunks: Any, index: jax.Array
) -> Any:
  return body(weights, keys, _chunk(chunks, index))


def _map_fwd(
  body: Body,
  chunk_size: int,
  causal: bool,
  out_axis: int,
  weights: Any,
  keys: Any,
  queries: Any,
) -> tuple[Any, Any]:
  out = _map(body, chunk_size, causal, out_axis, weights, keys, queries)
  return out, (weights, keys, queries)


def _map_bwd(
  body: Body,
  chunk_size: int,
  causal: bool,
  out_axis: int,
  inputs: tuple[Any, Any, Any],
  cotangents: Any,
) -> tuple[Any, Any, Any]:
  """Runs each chunk again and pulls its cotangent back."""
  primals = inputs
  weights, keys, queries = _vary(inputs, cotangents)
  chunks = _split(queries, chunk_size), _split(cotangents, chunk_size, out_axis)
  d_weights, d_keys = _zeros_float32(weights), _zeros_float32(keys)
  d_queries = []
  for start, stop in _groups(chunks, causal=causal):
    group_keys = _prefix(keys, stop * chunk_size) if causal else keys
    (d_weights, d_group_keys), d_group_queries = jax.lax.scan(
      functools.partial(_pull_back, body, weights, group_keys, chunks),
      (d_weights, _zeros_float32(group_keys)),
      jnp.arange(start, stop),
    )
    d_keys = _add_prefix(d_keys, d_group_keys)
    d_queries.append(d_group_queries)
  d_queries = _join(d_queries, queries)
  weights, keys, queries = primals
  return (
    _match(d_weights, weights),
    _match(d_keys, keys),
    _match(d_queries, queries),
  )


def _pull_back(
  body: Body,
  weights: Any,
  keys: Any,
  chunks: tuple[Any, Any],
  sums: tuple[Any, Any],
  index: jax.Array,
) -> tuple[tuple[Any, Any], Any]:
  """One chunk's gradients: added to the sums, or returned for its queries."""
  queries, cotangent = _chunk(chunks, index)
  floats, rebuild = _floats((weights, keys, queries))
  _, vjp = jax.vjp(lambda floats: body(*rebuild(floats)), floats)
  d_weights, d_keys, d_queries = vjp(cotangent)[0]
  return (_add(sums[0], d_weights), _add(sums[1], d_keys)), d_queries


_map.defvjp(_map_fwd, _map_bwd)


def map_gathered(
  body: Callable[[Any, Any, jax.Array], Any],
  tables: Any,
  indices: jax.Array,
  queries: Any,
  *,
  block_size: int,
) -> Any:
  """Applies a function to queries and the table rows that each of them names.

  Queries are taken in blocks. The backward pass gathers a block's rows again,
  pulls its cotangent back through `body`, and adds what comes out into the
  tables' gradients in float32 and in the order of the queries.

  Args:
    body: Called with (queries, rows, valid) of a block: rows has arrays
      [B, block_size, K, ...], zeros where `valid` [B, block_size, K] is false.
      Returns a tree of arrays [B, block_size, ...].
    tables: A tree of arrays [B, S, ...].
    indices: int32 [B, T, K]; -1 names no row: it reads and writes nothing.
    queries: A tree of arrays [B, T, ...].
    block_size: Queries in a block.

  Returns:
    The tree that `body` returns, of arrays [B, T, ...]. Its floats are
    differentiable in the floats of tables and queries.
  """
  return _gathered(body, block_size, tables, indices, queries)


def gathered_block_size(tables: Any, indices: jax.Array) -> int:
  """How many queries' rows stay in a cache.

  Args:
    tables: A tree of arrays [B, S, ...].
    indices: int32 [B, T, K].

  Returns:
    Queries in a block of `map_gathered`: a power of two, at most T.
  """
  batch, queries, keys = indices.shape
  row_bytes = sum(
    math.prod(table.shape[2:]) * table.dtype.itemsize
    for table in jax.tree.leaves(tables)
  )
  fitting = max(_GATHERED_BYTES // max(batch * keys * row_bytes, 1), 1)
  return min(1 << (fitting.bit_length() - 1), queries)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gathered(
  body: Callable[[Any, Any, jax.Array], Any],
  block_size: int,
  tables: Any,
  indices: jax.Array,
  queries: Any,
) -> Any:
  def run(block: tuple[jax.Array, Any]) -> Any:
    indices, queries = block
    return body(queries, _rows(tables, indices), indices >= 0)

  # Filled up with index 0, which is harmless: those answers are cut off.
  blocks = _split((indices, queries), block_size)
  return _join([jax.lax.map(run, blocks)], queries)


def _gathered_fwd(
  body: Callable[[Any, Any, jax.Array], Any],
  block_size: int,
  tables: Any,
  indices: jax.Array,
  queries: Any,
) -> tuple[Any, Any]:
  out = _gathered(body, block_size, tables, indices, queries)
  return out, (tables, indices, queries)


def _gathered_bwd(
  body: Callable[[Any, Any, jax.Array], Any],
  block_size: int,
  inputs: tuple[Any, jax.Array, Any],
  cotangents: Any,
) -> tuple[Any, None, Any]:
  """Gathers each block again, pulls back, and scatters into the tables."""
  primals = inputs
  tables, indices, queries = _vary(inputs, cotangents)

  def pull_back(d_tables: Any, block: tuple[Any, ...]) -> tuple[Any, Any]:
    indices, queries, cotangent = block
    floats, rebuild = _floats((queries, _rows(tables, indices)))

    def run(floats: Any) -> Any:
      queries, rows = rebuild(floats)
      return body(queries, rows, indices >= 0)

    _, vjp = jax.vjp(run, floats)
    d_queries, d_rows = vjp(cotangent)[0]
    return _scatter_add(d_tables, indices, d_rows), d_queries

  d_tables, d_queries = jax.lax.scan(
    pull_back,
    _zeros_float32(tables),
    _split((indices, queries, cotangents), block_size),
  )
  d_queries = _join([d_queries], queries)
  tables, _, queries = primals
  return _match(d_tables, tables), None, _match(d_queries, queries)


_gathered.defvjp(_gathered_fwd, _gathered_bwd)


def _rows(tables: Any, indices: jax.Array) -> Any:
  """The rows that indices name, zeros for -1."""

  def rows(table: jax.Array) -> jax.Array:
    taken = jax.vmap(_take)(table, jnp.maximum(indices, 0))
    valid = indices.reshape(*indices.shape, *[1] * (table.ndim - 2)) >= 0
    return jnp.where(valid, taken, 0)

  return jax.tree.map(rows, tables)


def _take(table: jax.Array, indices: jax.Array) -> jax.Array:
  return table.at[indices].get(mode="promise_in_bounds")


def _scatter_add(sums: Any, indices: jax.Array, rows: Any) -> Any:
  """Adds each row to the place that its index names; -1 names none."""

  def add(total: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    # -1 would wrap to the last row; S is out of bounds and dropped.
    places = jnp.where(indices < 0, total.shape[0], indices)
    return total.at[places].add(rows.astype(jnp.float32), mode="drop")

  return jax.tree.map(
    lambda total, rows: jax.vmap(add)(total, indices, rows), sums, rows
  )


def causal_groups(num_chunks: int) -> int:
  """G of so many chunks: of all pairs, (G + 1) / 2G are worked on."""
  return min(_CAUSAL_GROUPS, num_chunks)


def _groups(chunks: Any, *, causal: bool) -> list[tuple[int, int]]:
  """First and last (exclusive) chunk of each group that shares its keys."""
  num_chunks = jax.tree.leaves(chunks)[0].shape[0]
  count = causal_groups(num_chunks) if causal else 1
  bounds = [num_chunks * i // count for i in range(count + 1)]
  return list(zip(bounds[:-1], bounds[1:], strict=True))


def _split(tree: Any, chunk_size: int, axis: int = 1) -> Any:
  """T of [B, T, ...], filled up with zeros, as [chunks, B, chunk_size, ...]."""

  def split(x: jax.Array) -> jax.Array:
    fill = [(0, 0)] * x.ndim
    fill[axis] = (0, -x.shape[axis] % chunk_size)
    x = jnp.pad(x, fill)
    x = x.reshape(*x.shape[:axis], -1, chunk_size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)

  return jax.tree.map(split, tree)


def _join(groups: list[Any], queries: Any, axis: int = 1) -> Any:
  """The inverse of `_split`, for a list of groups of chunks."""
  length = jax.tree.leaves(queries)[0].shape[1]

  def join(*chunks: jax.Array) -> jax.Array:
    x = jnp.moveaxis(jnp.concatenate(chunks), 0, axis)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return jax.lax.slice_in_dim(x, 0, length, axis=axis)

  return jax.tree.map(join, *groups)


def _chunk(chunks: Any, index: jax.Array) -> Any:
  """One chunk of all: a group's own, cut out, would be copied."""
  return jax.tree.map(
    lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), chunks
  )


def _prefix(keys: Any, length: int) -> Any:
  return jax.tree.map(lambda x: x[:, :length], keys)


def _is_float(x: jax.Array) -> bool:
  return jnp.issubdtype(x.dtype, jnp.floating)


def _floats(tree: Any) -> tuple[Any, Callable[[Any], Any]]:
  """The tree with None for what is not differentiable, and the way back."""
  floats = jax.tree.map(lambda x: x if _is_float(x) else None, tree)

  def rebuild(floats: Any) -> Any:
    return jax.tree.map(
      lambda x, f: x if f is None else f,
      tree,
      floats,
      is_leaf=lambda x: x is None,
    )

  return floats, rebuild


def _vary[Inputs](inputs: Inputs, cotangents: Any) -> Inputs:
  """Floats as varying as anything: gradients are summed over chunks first.

  Over devices they are summed once, in `_match`, not after every chunk.
  """
  axes = mesh.varying_axes(inputs, cotangents)
  return jax.tree.map(
    lambda x: mesh.vary(x, axes) if _is_float(x) else x, inputs
  )


def _zeros_float32(tree: Any) -> Any:
  # Like x: spread over devices as x is.
  return jax.tree.map(
    lambda x: jnp.zeros_like(x, jnp.float32) if _is_float(x) else None, tree
  )


def _add(sums: Any, terms: Any) -> Any:
  return jax.tree.map(lambda a, b: a + b.astype(jnp.float32), sums, terms)


def _add_prefix(sums: Any, terms: Any) -> Any:
  return jax.tree.map(lambda a, b: a.at[:, : b.shape[1]].add(b), sums, terms)


def _match(gradients: Any, primals: Any) -> Any:
  """Gradients in their primals' dtypes; None where there is none."""

  def match(x: jax.Array, gradient: jax.Array | None) -> jax.Array | None:
    if gradient is None:
      return None
    return mesh.sum_like(gradient, x).astype(x.dtype)

  return jax.tree.map(match, primals, gradients, is_leaf=lambda x: x is None)
