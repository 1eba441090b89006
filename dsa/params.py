"""Parameters of a DSA layer, as plain pytrees under DeepSeek's names.

One table of specs (shape, dtype, logical axes, initializer) stands for a layer;
`init_params` and `abstract_params` are both derived from it, and so are
shardings. Letters: E hidden_size, L q_lora_rank, C kv_lora_rank, N heads,
P qk_nope_head_dim, R qk_rope_head_dim, V v_head_dim, I index_n_heads,
D index_head_dim.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dsa.checks import check_dtype, check_shape
from dsa.config import DSAConfig


class MLAParams[Leaf](NamedTuple):
  """Weights of Multi-head Latent Attention.

  Attributes:
    wq_a: [E, L], down to the query latent.
    q_norm: [L], RMSNorm gain of the query latent.
    wq_b: [L, N, P + R], up to the queries of the heads, [nope | rope].
    wkv_a: [E, C + R], down to the key-value latent and the shared rope key.
    kv_norm: [C], RMSNorm gain of the key-value latent.
    wkv_b: [C, N, P + V], up to the keys and values of the heads.
    wo: [N, V, E], output projection.
  """

  wq_a: Leaf
  q_norm: Leaf
  wq_b: Leaf
  wkv_a: Leaf
  kv_norm: Leaf
  wkv_b: Leaf
  wo: Leaf


class IndexerParams[Leaf](NamedTuple):
  """Weights of the lightning indexer.

  Attributes:
    wq_b: [L, I, D], query latent to index queries, [rope | rest].
    wk: [E, D], hidden state to the index key, [rope | rest].
    k_norm_scale: [D], LayerNorm gain of the index key.
    k_norm_bias: [D], LayerNorm bias of the index key.
    weights_proj: [E, I], hidden state to the weights of the index heads. Always
      float32, as checkpoints keep it.
  """

  wq_b: Leaf
  wk: Leaf
  k_norm_scale: Leaf
  k_norm_bias: Leaf
  weights_proj: Leaf


class DSAParams[Leaf](NamedTuple):
  """Weights of one DSA layer.

  Attributes:
    mla: The attention.
    indexer: The indexer, or None in a layer that is given its selection.
  """

  mla: MLAParams[Leaf]
  indexer: IndexerParams[Leaf] | None


@dataclasses.dataclass(frozen=True)
class ParamSpec:
  """What a parameter is before it has values.

  Attributes:
    shape: Its sizes.
    dtype: Its dtype.
    logical_axes: A name for each axis, to be mapped to a device mesh.
    initializer: Called with (key, shape, dtype).
  """

  shape: tuple[int, ...]
  dtype: Any
  logical_axes: tuple[str, ...]
  initializer: jax.nn.initializers.Initializer


def _weight(dtype: Any, inputs: int = 1, **axes: int) -> ParamSpec:
  """A projection from its first `inputs` axes to the others."""
  rank = len(axes)
  initializer = jax.nn.initializers.variance_scaling(
    1.0,
    "fan_in",
    "normal",
    in_axis=tuple(range(inputs)),
    out_axis=tuple(range(inputs, rank)),
  )
  return ParamSpec(tuple(axes.values()), dtype, tuple(axes), initializer)


def _gain(dtype: Any, **axes: int) -> ParamSpec:
  ones = jax.nn.initializers.ones
  return ParamSpec(tuple(axes.values()), dtype, tuple(axes), ones)


def param_specs(config: DSAConfig, dtype: Any) -> DSAParams[ParamSpec]:
  """The table that a layer's parameters are made from.

  Args:
    config: The sizes.
    dtype: A float dtype for all but `weights_proj`, which is float32.

  Returns:
    The tree of parameters with a `ParamSpec` in each place.

  Raises:
    TypeError: If `dtype` is not a float dtype.
  """
  # float64 means float32 unless jax_enable_x64 is set, here as in arrays.
  dtype = jax.dtypes.canonicalize_dtype(dtype)
  if not jnp.issubdtype(dtype, jnp.floating):
    raise TypeError(f"dtype must be a float dtype, got {dtype}")
  embed, heads = config.hidden_size, config.num_attention_heads
  q_latent, kv_latent = config.q_lora_rank, config.kv_lora_rank
  rope = config.qk_rope_head_dim
  nope, value = config.qk_nope_head_dim, config.v_head_dim
  index_heads, index_dim = config.index_n_heads, config.index_head_dim
  mla = MLAParams(
    wq_a=_weight(dtype, embed=embed, q_latent=q_latent),
    q_norm=_gain(dtype, q_latent=q_latent),
    wq_b=_weight(dtype, q_latent=q_latent, heads=heads, qk_dim=nope + rope),
    wkv_a=_weight(dtype, embed=embed, kv_latent_rope=kv_latent + rope),
    kv_norm=_gain(dtype, kv_latent=kv_latent),
    wkv_b=_weight(dtype, kv_latent=kv_latent, heads=heads, kv_dim=nope + value),
    wo=_weight(dtype, inputs=2, heads=heads, v_dim=value, embed=embed),
  )
  indexer = IndexerParams(
    wq_b=_weight(
      dtype, q_latent=q_latent, index_heads=index_heads, index_dim=index_dim
    ),
    wk=_weight(dtype, embed=embed, index_dim=index_dim),
    k_norm_scale=_gain(dtype, index_dim=index_dim),
    k_norm_bias=ParamSpec(
      (index_dim,), dtype, ("index_dim",), jax.nn.initializers.zeros
    ),
    weights_proj=_weight(
      jnp.dtype(jnp.float32), embed=embed, index_heads=index_heads
    ),
  )
  return DSAParams(mla=mla, indexer=indexer)


def init_params(
  key: jax.Array, config: DSAConfig, dtype: Any = jnp.float32
) -> DSAParams[jax.Array]:
  """Draws the parameters of one layer.

  Args:
    key: A JAX random key.
    config: The sizes.
    dtype: A float dtype for all but `weights_proj`, which is float32.

  Returns:
    Weights of variance 1 / fan-in, gains of one, biases of zero.

  Raises:
    TypeError: If `dtype` is not a float dtype.
  """
  specs, treedef = jax.tree.flatten(param_specs(config, dtype))
  keys = jax.random.split(key, len(specs))
  leaves = [
    spec.initializer(leaf_key, spec.shape, spec.dtype)
    for leaf_key, spec in zip(keys, specs, strict=True)
  ]
  return jax.tree.unflatten(treedef, leaves)


def abstract_params(
  config: DSAConfig, dtype: Any = jnp.float32
) -> DSAParams[jax.ShapeDtypeStruct]:
  """The tree of `init_params` without values: nothing is allocated.

  Args:
    config: The sizes.
    dtype: A float dtype for all but `weights_proj`, which is float32.

  Returns:
    The same tree with a `jax.ShapeDtypeStruct` in each place.

  Raises:
    TypeError: If `dtype` is not a float dtype.
  """
  return jax.tree.map(
    lambda spec: jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
      spec.shape, spec.dtype
    ),
    param_specs(config, dtype),
  )


def check_params(params: DSAParams[Any], config: DSAConfig) -> None:
  """Checks that parameters have the shapes that a configuration says.

  Args:
    params: The parameters of a layer, with or without an indexer.
    config: The sizes.

  Raises:
    TypeError: If `params` is not a `DSAParams` of arrays of float dtypes.
    ValueError: If a shape differs.
  """
  if not isinstance(params, DSAParams):
    raise TypeError(f"params must be DSAParams, got {type(params).__name__}")
  specs = param_specs(config, jnp.float32)
  groups: list[tuple[str, Any, Any]] = [("mla", params.mla, specs.mla)]
  if params.indexer is not None:
    groups.append(("indexer", params.indexer, specs.indexer))
  for group, values, group_specs in groups:
    if type(values) is not type(group_specs):
      raise TypeError(
        f"params.{group} must be {type(group_specs).__name__}, got "
        f"{type(values).__name__}"
      )
    for name, spec in group_specs._asdict().items():
      value = getattr(values, name)
      axes = " ".join(str(size) for size in spec.shape)
      check_shape(f"params.{group}.{name}", value, axes)
      check_dtype(f"params.{group}.{name}", value, jnp.floating)
