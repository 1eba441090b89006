"""The attention of a DSA layer spread over a mesh of devices.

    tensor parallel    each device has some heads; outputs are summed
    context parallel   each device has some queries; latents and index keys,
                       C + R + D numbers a token, are gathered
    data parallel      each device has some rows
    FSDP               weights are gathered where they are used

What a key scores must not depend on how the layer is spread, to the last bit,
for else devices would select differently. So no score is summed over devices:
where heads are spread, each device takes a share of the queries instead, scores
it with all index heads in their order, and the lists of keys are gathered. That
is as much arithmetic a device as with a share of the heads.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dsa import composition, index_scan, losses, mla, sharding, streaming
from dsa import mesh as mesh_lib
from dsa import params as params_lib
from dsa import tokens as tokens_lib
from dsa.attention import Attention, AttentionResult
from dsa.config import DSAConfig
from dsa.params import DSAParams, IndexerParams, MLAParams
from dsa.selection import Selection
from dsa.tokens import Tokens

_Weights = tuple[MLAParams[jax.Array], IndexerParams[jax.Array]]


class _Layout:
  """Which mesh axes are what, under the rules that a mesh has axes for."""

  def __init__(self, mesh: Mesh, rules: sharding.Rules, *, zigzag: bool):
    self.mesh = mesh
    self.rules = sharding.rules_for(mesh, rules)
    self.zigzag = zigzag
    self.batch = sharding.mesh_axes(self.rules, "batch")
    self.tokens = sharding.mesh_axes(self.rules, "tokens")
    self.heads = self._spread_heads("heads")
    self.index_heads = self._spread_heads("index_heads")
    both = {*self.heads, *self.index_heads}
    self.tensor = tuple(a for a in mesh.axis_names if a in both)
    self.num_token_parts = sharding.axes_size(mesh, self.tokens)

  def _spread_heads(self, name: str) -> tuple[str, ...]:
    """Axes over which devices share tokens and each keep their heads."""
    axes = sharding.mesh_axes(self.rules, name)
    # Over axes that spread tokens, heads can only be stored: that is FSDP.
    return () if {*axes} & {*self.batch, *self.tokens} else axes

  def spec(self, name: str) -> Any:
    return sharding.partition_spec(sharding.ACTIVATIONS[name], self.rules)


def make_sharded_attention(
  config: DSAConfig,
  mesh: Mesh,
  rules: sharding.Rules = sharding.RULES,
  *,
  backend: mla.Backend,
  stage: composition.Stage = "sparse",
  indexer_loss: bool = False,
  query_chunk_size: int | None = None,
  zigzag: bool = False,
) -> Attention:
  """`make_attention` over a mesh: the same function of the same arrays.

  The selection is that of one device, to the bit; outputs and gradients differ
  by the order of sums over devices.

  Args:
    config: The sizes and constants of the layer.
    mesh: The devices.
    rules: What is spread over which axes; axes that the mesh lacks do not
      count. Parameters are expected as `sharding.param_specs` says, x as
      `sharding.ACTIVATIONS` says; `jax.jit` moves what lies elsewhere.
    backend: The attention kernel, for example `dsa.backends.gather()`.
    stage: As in `make_attention`.
    indexer_loss: As in `make_attention`.
    query_chunk_size: As in `make_attention`, of the queries of one device.
    zigzag: Whether tokens come, and results leave, in the order of
      `sharding.to_zigzag`, so that devices have equal work. The keys of a
      selection are named by their place in token order all the same.

  Returns:
    `attention(params, x, positions=None, segment_ids=None, selection=None)` as
    `make_attention` returns it. T must divide over the devices that tokens are
    spread over, twice under `zigzag`: fill up with segment 0.

  Raises:
    ValueError: As `make_attention`, or if a rule bears the name of no axis.
    TypeError: As `make_attention`.
  """
  layout = _Layout(mesh, rules, zigzag=zigzag)
  options = composition.make_options(
    config,
    backend=backend,
    stage=stage,
    indexer_loss=indexer_loss,
    query_chunk_size=query_chunk_size,
  )._replace(head_axes=layout.heads, index_head_axes=layout.index_heads)
  specs = sharding.param_specs(config, layout.rules)

  def attention(
    params: DSAParams[jax.Array],
    x: jax.Array,
    *,
    positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    selection: Selection | None = None,
  ) -> AttentionResult:
    params_lib.check_params(params, config)
    _check_tokens(x, positions, segment_ids, layout, config)
    layer_specs = specs
    if params.indexer is None:
      layer_specs = specs._replace(indexer=None)
    sharding.check_divisible({"params": params}, {"params": layer_specs}, mesh)
    in_specs = (
      layer_specs,
      layout.spec("x"),
      layout.spec("positions"),
      layout.spec("segment_ids"),
      layout.spec("selection"),
    )
    mapped = jax.shard_map(
      functools.partial(_attend_shard, options, layout),
      mesh=mesh,
      in_specs=in_specs,
      out_specs=AttentionResult(
        layout.spec("out"),
        Selection(layout.spec("selection")),
        layout.spec("indexer_loss"),
      ),
    )
    arguments = params, x, positions, segment_ids, selection
    result: AttentionResult = mapped(*_placed(arguments, in_specs, mesh))
    return result

  return attention


def _placed(arguments: Any, specs: Any, mesh: Mesh) -> Any:
  """Arguments where they are expected; under automatic axes XLA moves them."""
  if AxisType.Explicit not in mesh.axis_types:
    return arguments
  reshard: Callable[[Any, Any], Any] = jax.reshard
  return jax.tree.map(
    lambda spec, tree: reshard(tree, NamedSharding(mesh, spec)),
    specs,
    arguments,
    is_leaf=lambda x: isinstance(x, PartitionSpec),
  )


def _check_tokens(
  x: jax.Array,
  positions: jax.Array | None,
  segment_ids: jax.Array | None,
  layout: _Layout,
  config: DSAConfig,
) -> None:
  """Checks whole arrays, before they are cut."""
  sizes = tokens_lib.check_tokens(x, positions, segment_ids, config)
  rows = sharding.axes_size(layout.mesh, layout.batch)
  slices = layout.num_token_parts * (2 if layout.zigzag else 1)
  if sizes["B"] % rows or sizes["T"] % slices or 0 in x.shape:
    raise ValueError(
      f"x must have a multiple of {rows} rows and of {slices} tokens on this "
      f"mesh, got shape {x.shape}; fill up with segment 0"
    )


def _attend_shard(
  options: composition.Options,
  layout: _Layout,
  params: DSAParams[jax.Array],
  x: jax.Array,
  positions: jax.Array | None,
  segment_ids: jax.Array | None,
  selection: Selection | None,
) -> AttentionResult:
  """What one device does with its rows, tokens and heads."""
  config = options.config
  params = _gather_params(params, layout, config)
  tokens = tokens_lib.make_tokens(
    x, positions, segment_ids, config, order=_order(x.shape[1], layout)
  )
  indexer = params.indexer if options.indexer_loss else None
  keys = _gather_tokens(
    tokens_lib.make_keys(params.mla, indexer, tokens, config), layout
  )
  if selection is not None:
    selection = tokens_lib.visible_part(selection, tokens, keys.segment_ids)
  elif params.indexer is None:
    raise ValueError("selection is required where params.indexer is None")
  else:
    selection = _select(
      (params.mla, params.indexer), tokens, keys.segment_ids, layout, config
    )
  pieces = [
    composition.attend(
      options, (params.mla, indexer), keys, queries, causal=False
    )
    for queries in _pieces((tokens, selection), layout)
  ]
  out, divergences = _join(pieces)
  loss = losses.mean_over_valid(
    divergences, tokens.segment_ids != 0, axes=layout.batch + layout.tokens
  )
  return AttentionResult(out, selection, loss)


def _order(num_tokens: int, layout: _Layout) -> jax.Array:
  """int32 [T]: where in the sequence this device's tokens lie."""
  here = jax.lax.axis_index(layout.tokens) if layout.tokens else 0
  new = jnp.arange(num_tokens, dtype=jnp.int32)
  if not layout.zigzag:
    return here * num_tokens + new
  width = num_tokens // 2
  mirrored = 2 * layout.num_token_parts - 1 - here
  return jnp.concatenate(
    (here * width + new[:width], mirrored * width + new[:width])
  )


def _pieces[Tree](tree: Tree, layout: _Layout) -> list[Tree]:
  """The runs of tokens that follow one another, [B, T, ...] each."""
  if not layout.zigzag:
    return [tree]
  width = jax.tree.leaves(tree)[0].shape[1] // 2
  return [
    jax.tree.map(lambda x: x[:, :width], tree),
    jax.tree.map(lambda x: x[:, width:], tree),
  ]


def _join(pieces: list[Any]) -> Any:
  """The inverse of `_pieces`."""
  return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *pieces)


def _gather_tokens[Tree](tree: Tree, layout: _Layout) -> Tree:
  """Arrays [B, T, ...] of each device as [B, S, ...] in token order."""

  def gather(x: jax.Array) -> jax.Array:
    x = mesh_lib.all_gather(x, layout.tokens, axis=1)
    if not layout.zigzag:
      return x
    return sharding.from_zigzag(x, layout.num_token_parts)

  gathered: Tree = jax.tree.map(gather, tree)
  return gathered


def _gather_params(
  params: DSAParams[jax.Array], layout: _Layout, config: DSAConfig
) -> DSAParams[jax.Array]:
  """Whole weights, but for the heads that this device keeps to itself."""
  table = params_lib.param_specs(config, jnp.float32)
  if params.indexer is None:
    table = table._replace(indexer=None)
  kept = {"heads": layout.heads, "index_heads": layout.index_heads}

  def gather(spec: params_lib.ParamSpec, x: jax.Array) -> jax.Array:
    for axis, name in enumerate(spec.logical_axes):
      if kept.get(name):
        continue
      # The first of several mesh axes is the outermost.
      for mesh_axis in reversed(sharding.mesh_axes(layout.rules, name)):
        # Devices of the same tokens have the same gradient of what is whole.
        equal = mesh_axis not in layout.batch + layout.tokens
        x = mesh_lib.all_gather(x, (mesh_axis,), axis=axis, equal=equal)
    return x

  return jax.tree.map(gather, table, params)


def _select(
  weights: _Weights,
  tokens: Tokens,
  key_segment_ids: jax.Array,
  layout: _Layout,
  config: DSAConfig,
) -> Selection:
  """Scores the visible keys of each query and keeps the best; detached."""
  (params, indexer), tokens = jax.lax.stop_gradient((weights, tokens))
  # All index heads, for a share of the queries.
  indexer = indexer._replace(
    wq_b=mesh_lib.all_gather(indexer.wq_b, layout.index_heads, axis=1),
    weights_proj=mesh_lib.all_gather(
      indexer.weights_proj, layout.index_heads, axis=1
    ),
  )
  index_keys = index_scan.index_keys(
    indexer, tokens.x, tokens.positions, config
  )
  keys = _gather_tokens(index_keys, layout), key_segment_ids
  select = functools.partial(
    composition.select_chunk, config, key_segment_ids.shape[1], num_seen=True
  )
  pieces = [
    _gather_share(
      streaming.map_chunks(
        select,
        (params, indexer),
        keys,
        _share(piece, layout),
        chunk_size=index_scan.QUERY_CHUNK,
        causal=False,
      ),
      piece.order.shape[1],
      layout,
    )
    for piece in _pieces(tokens, layout)
  ]
  return Selection(_join(pieces))


def _share(tokens: Tokens, layout: _Layout) -> Tokens:
  """This device's share of tokens that devices of other heads have too."""
  parts = sharding.axes_size(layout.mesh, layout.tensor)
  if parts == 1:
    return tokens
  width = -(-tokens.order.shape[1] // parts)
  start = jax.lax.axis_index(layout.tensor) * width

  def share(x: jax.Array) -> jax.Array:
    fill = [(0, 0)] * x.ndim
    fill[1] = 0, parts * width - x.shape[1]
    return jax.lax.dynamic_slice_in_dim(jnp.pad(x, fill), start, width, axis=1)

  return jax.tree.map(share, tokens)


def _gather_share(
  indices: jax.Array, num_tokens: int, layout: _Layout
) -> jax.Array:
  """int32 [B, T, K] of the shares, the same on all devices that took one."""
  indices = mesh_lib.all_gather(indices, layout.tensor, axis=1, equal=True)
  return indices[:, :num_tokens]
