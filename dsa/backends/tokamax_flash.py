"""Flash attention by tokamax, under the selection as a dynamic mask.

    q, k, v = heads of the latent form                     [nope P | rope R], V
    out     = softmax(scale * q k^T over selected keys) v

On TPU this is tokamax's splash attention, a kernel that skips the blocks of
keys in which no query of a block selected any. Its softmax is to base 2, so
scale * log2(e) is folded into q, in float32 and rounded once. Elsewhere it is
tokamax's public `dot_product_attention`.

Sources: FlashAttention-2, arXiv 2307.08691; the kernel is
tokamax/_src/ops/experimental/tpu/splash_attention of tokamax 0.0.17, which has
no public name for its dynamic-mask form.
"""

import dataclasses
import functools
import math
from typing import Any

import einops
import jax
import jax.numpy as jnp
import tokamax
from tokamax._src.ops.experimental.tpu.splash_attention import (
  splash_attention_kernel as splash,
)

from dsa import mla
from dsa.backends import masking
from dsa.backends.contract import check_inputs
from dsa.selection import Selection

SplashConfig = splash.SplashConfig
QKVLayout = splash.QKVLayout

# Fields that change the answer or assume a causal mask, with what they must be.
_FIXED_FIELDS = {
  "attn_logits_soft_cap": None,
  "max_logit_const": None,
  "dropout_rate": 0.0,
  "qk_diag_skip": False,
  "sv_diag_skip": False,
}
# What the matrix unit of a TPU multiplies.
_SPLASH_DTYPES = (jnp.bfloat16, jnp.float32)
_LANES = 128
# A block of 512 tokens in bfloat16, of 256 in float32.
_LARGEST_BLOCK_BYTES = 1024


def tokamax_flash(
  *,
  splash_config: SplashConfig | None = None,
  implementation: Any = None,
) -> mla.Backend:
  """Makes the tokamax backend.

  Which kernel runs is settled when the program is lowered, by the platform it
  is lowered for: splash attention on TPU, also when a host without one
  compiles ahead of time, and `tokamax.dot_product_attention` elsewhere.

  Args:
    splash_config: Block sizes and layouts of splash attention, which then runs
      on every platform: `interpret=True` runs it where there is no TPU. The
      *_dkv blocks are needed for gradients. By default
      `default_splash_config` of the lengths at hand.
    implementation: What `tokamax.dot_product_attention` is to use where splash
      attention does not run; None leaves the choice to tokamax.

  Returns:
    A backend. T and S may be any length: what is padded to fill a block is
    neither seen nor returned. Under `jax.shard_map` it needs
    `check_vma=False`, for the kernel does not say how its outputs vary.

  Raises:
    TypeError: If `splash_config` is not a `SplashConfig`.
    ValueError: If `splash_config` sets a field that changes the answer, or
      both arguments are given.
  """
  if splash_config is not None:
    if implementation is not None:
      raise ValueError(
        "splash_config runs splash attention on every platform, so "
        f"implementation must be None, got {implementation!r}"
      )
    _check_config(splash_config)

  # Compiled, so that without an outer jit too the platform is that on which
  # the arrays are, not the default one.
  @functools.partial(jax.jit, static_argnames="scale")
  def kernel(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    *,
    scale: float,
  ) -> jax.Array:
    def on_tpu(*operands: jax.Array) -> jax.Array:
      return _splash_attention(*operands, scale=scale, config=splash_config)

    def elsewhere(*operands: jax.Array) -> jax.Array:
      return _dot_product_attention(
        *operands, scale=scale, implementation=implementation
      )

    if splash_config is not None:
      return on_tpu(q, k, v, mask)
    if q.dtype not in _SPLASH_DTYPES:
      return elsewhere(q, k, v, mask)
    return jax.lax.platform_dependent(
      q, k, v, mask, tpu=on_tpu, default=elsewhere
    )

  def attend(
    inputs: mla.MLAInputs, selection: Selection, *, scale: float
  ) -> jax.Array:
    sizes = check_inputs(inputs, selection)
    mask = selection.mask(sizes["S"])  # [B, T, S]
    clean, poisoned = masking.isolate_nonfinite(inputs, selection)
    heads = mla.expand_heads(clean)
    q, k, v = (x.astype(jnp.result_type(*heads)) for x in heads)
    out = kernel(q, k, v, mask, scale=scale).astype(heads[0].dtype)
    return masking.finish(out, selection, poisoned)

  return attend


def default_splash_config(
  num_queries: int, num_keys: int, *, dtype: jax.typing.DTypeLike
) -> SplashConfig:
  """Block sizes whose backward pass fits the scratch memory of every TPU.

  Found by compiling for v5e, v5p, v6e and tpu7x up to P + R = V = 256.

  Args:
    num_queries: T.
    num_keys: S.
    dtype: Of the inputs.

  Returns:
    A configuration with backward blocks, to be changed with
    `dataclasses.replace`.
  """
  largest = _LARGEST_BLOCK_BYTES // jnp.dtype(dtype).itemsize
  block_q = _even_block(num_queries, largest)
  block_kv = _even_block(num_keys, largest)
  return SplashConfig(
    block_q=block_q,
    block_kv=block_kv,
    block_q_dkv=block_q,
    block_kv_dkv=block_kv,
  )


def _even_block(length: int, largest: int) -> int:
  """The block that cuts a length into the fewest blocks with little padding."""
  num_blocks = max(1, math.ceil(length / largest))
  return max(1, math.ceil(length / num_blocks / _LANES)) * _LANES


def _check_config(config: SplashConfig) -> None:
  """Refuses configurations under which the kernel computes something else."""
  if not isinstance(config, SplashConfig):
    raise TypeError(
      f"splash_config must be a SplashConfig, got {type(config).__name__}"
    )
  for field, value in _FIXED_FIELDS.items():
    if getattr(config, field) != value:
      raise ValueError(
        f"splash_config.{field} must be {value!r}, got "
        f"{getattr(config, field)!r}: it would change the answer"
      )


def _dot_product_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  mask: jax.Array,
  *,
  scale: float,
  implementation: Any,
) -> jax.Array:
  """Tokamax's own choice; q [B,T,N,P+R], k, v, mask [B,T,S] to [B,T,N,V]."""
  return tokamax.dot_product_attention(
    q,
    k,
    v,
    mask=mask[:, None],
    scale=scale,
    # By default float32 is cut to TensorFloat-32 on a GPU.
    precision=jax.lax.Precision.HIGHEST,
    implementation=implementation,
  )


def _splash_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  mask: jax.Array,
  *,
  scale: float,
  config: SplashConfig | None,
) -> jax.Array:
  """Splash attention, one batch element after another.

  Args:
    q: [B, T, N, P + R].
    k: [B, S, N, P + R].
    v: [B, S, N, V].
    mask: bool [B, T, S].
    scale: Multiplies the logits.
    config: None for the default.

  Returns:
    [B, T, N, V], without meaning where nothing is selected.

  Raises:
    NotImplementedError: If the dtype is not float32 or bfloat16.
  """
  if q.dtype not in _SPLASH_DTYPES:
    raise NotImplementedError(
      f"splash attention takes float32 and bfloat16, got {q.dtype}"
    )
  queries, keys = mask.shape[1:]
  if config is None:
    config = default_splash_config(queries, keys, dtype=q.dtype)
  if config.use_base2_exp:
    scale = scale * splash.LOG2E
    config = dataclasses.replace(config, q_prescaled_log2e=True)
  q = (q.astype(jnp.float32) * scale).astype(q.dtype)

  pad_q = -queries % math.lcm(config.block_q, config.block_q_dkv or 1)
  pad_kv = -keys % math.lcm(config.block_kv, config.block_kv_dkv or 1)
  mask = jnp.pad(mask, ((0, 0), (0, pad_q), (0, pad_kv)))
  # The kernel leaves blocks that it does not visit unwritten, and its backward
  # pass may read them. With a key for each query it visits all queries.
  empty = ~mask.any(axis=-1, keepdims=True)
  mask = mask.at[:, :, :1].set(mask[:, :, :1] | empty)

  def head_major(x: jax.Array, pad: int) -> jax.Array:
    x = jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0)))
    return einops.rearrange(x, "b s n d -> b n s d")

  def attend_element(element: tuple[jax.Array, ...]) -> jax.Array:
    return _splash_element(config, *element)

  # A loop, for the elements differ in the number of blocks to visit.
  out = jax.lax.map(
    attend_element,
    (head_major(q, pad_q), head_major(k, pad_kv), head_major(v, pad_kv), mask),
  )  # [B, N, T + pad, V]
  return einops.rearrange(out[:, :, :queries], "b n t v -> b t n v")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _splash_element(
  config: SplashConfig,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  mask: jax.Array,
) -> jax.Array:
  """Splash attention with the dot products of its kernels in full precision.

  The dots in the kernels name no precision, and a TPU then multiplies float32
  as bfloat16. They follow the setting at the time that each kernel is traced;
  for the backward kernel that is after this function has returned. Hence a
  derivative rule: it is tokamax's own, called under the same setting.

  Args:
    config: Block sizes that divide T and S.
    q: [N, T, P + R], scaled.
    k: [N, S, P + R].
    v: [N, S, V].
    mask: bool [T, S].

  Returns:
    [N, T, V].
  """
  with _kernel_precision(q.dtype):
    return _splash_kernel(config, mask)(q, k, v)


def _splash_element_fwd(
  config: SplashConfig,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  mask: jax.Array,
) -> tuple[jax.Array, Any]:
  with _kernel_precision(q.dtype):
    return jax.vjp(_splash_kernel(config, mask), q, k, v)


def _splash_element_bwd(
  config: SplashConfig, pullback: Any, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
  del config
  with _kernel_precision(cotangent.dtype):
    return *pullback(cotangent), None


_splash_element.defvjp(_splash_element_fwd, _splash_element_bwd)


def _splash_kernel(config: SplashConfig, mask: jax.Array) -> Any:
  return splash.make_dynamic_splash_mha(
    mask, config=config, downcast_smem_data=False
  )


def _kernel_precision(dtype: jnp.dtype) -> Any:
  exact = "highest" if dtype == jnp.float32 else "default"
  return jax.default_matmul_precision(exact)
