"""DSA attention: indexer, exact top-k and MLA over the selected keys, composed.

    scores    = indexer(x, q_latent)                     of all visible pairs
    selection = top-k of the visible keys by score
    out       = MLA over the selection                   (sparse stage)
    loss      = mean over queries of KL(p || softmax(scores))

Keys and latents, O(S), are computed once; all else runs over chunks of queries,
projections included, so that nothing of size T * S is alive at once, forward or
backward. Selecting runs in chunks of its own fixed size: which keys are chosen
never depends on how the attention is chunked.

Gradients: the language-model loss reaches x and the MLA parameters through the
selected keys alone; the indexer learns from its own loss alone.

Source: DeepSeek-V3.2, arXiv 2512.02556, section 2.1.
"""

import functools
from typing import NamedTuple, Protocol

import jax

from dsa import index_scan, losses, mesh, mla, streaming
from dsa.composition import Stage, attend, make_options, select_chunk
from dsa.config import DSAConfig
from dsa.params import DSAParams, IndexerParams, MLAParams, check_params
from dsa.selection import Selection
from dsa.tokens import Tokens, make_keys, make_tokens, visible_part


class AttentionResult(NamedTuple):
  """What an attention function returns, the same whatever its options.

  Attributes:
    out: [B, T, E]; exactly zero at padding.
    selection: The keys that each query selected.
    indexer_loss: float32 scalar, in nats; zero unless asked for.
  """

  out: jax.Array
  selection: Selection
  indexer_loss: jax.Array


class Attention(Protocol):
  """An attention function made by `make_attention`."""

  def __call__(
    self,
    params: DSAParams[jax.Array],
    x: jax.Array,
    *,
    positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    selection: Selection | None = None,
  ) -> AttentionResult:
    """Attends from each token of x to its selected keys; see make_attention."""
    ...


def make_attention(
  config: DSAConfig,
  *,
  backend: mla.Backend,
  stage: Stage = "sparse",
  indexer_loss: bool = False,
  query_chunk_size: int | None = None,
) -> Attention:
  """Composes the steps of a DSA layer into one pure function.

  Args:
    config: The sizes and constants of the layer.
    backend: The attention kernel, for example `dsa.backends.gather()`.
    stage: "sparse" attends to the selected keys. "dense_warmup" attends to all
      visible keys, so that the indexer learns from a dense model; the selection
      is reported all the same.
    indexer_loss: Whether to compute the loss that trains the indexer: over the
      selected keys in the sparse stage, over the visible ones in dense_warmup.
    query_chunk_size: Queries that attend at once; from the shapes by default.
      It changes memory and speed, never the selection. A chunk of T or more
      keeps what autodiff keeps; smaller ones compute it again backward.

  Returns:
    `attention(params, x, positions=None, segment_ids=None, selection=None)`:
      params: `DSAParams` of the layer.
      x: Hidden states [B, T, E].
      positions: Integers [B, T] for RoPE; the index of the token by default.
      segment_ids: Integers [B, T]: a token sees its own segment alone, and 0 is
        padding. All tokens are in segment 1 by default.
      selection: Keys to attend to, in place of the indexer's; what is not
        visible in it is dropped. Required where `params.indexer` is None, and
        then the loss is zero.
    It raises ValueError or TypeError, before any compute, for arguments that do
    not fit the configuration.

  Raises:
    ValueError: If `stage` is unknown, `query_chunk_size` below 1, or a loss is
      asked for while `config.index_quantization` rounds the scores.
    TypeError: If `backend` is not a function or `query_chunk_size` no integer.
  """
  options = make_options(
    config,
    backend=backend,
    stage=stage,
    indexer_loss=indexer_loss,
    query_chunk_size=query_chunk_size,
  )

  def attention(
    params: DSAParams[jax.Array],
    x: jax.Array,
    *,
    positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    selection: Selection | None = None,
  ) -> AttentionResult:
    check_params(params, config)
    tokens = make_tokens(x, positions, segment_ids, config)
    if selection is None:
      selection = _select(params, tokens, config)
    else:
      selection = visible_part(selection, tokens, tokens.segment_ids)
    indexer = params.indexer if indexer_loss else None
    out, divergences = attend(
      options,
      (params.mla, indexer),
      make_keys(params.mla, indexer, tokens, config),
      (tokens, selection),
      causal=True,
    )
    loss = losses.mean_over_valid(divergences, tokens.segment_ids != 0)
    return AttentionResult(out, selection, loss)

  return attention


def _select(
  params: DSAParams[jax.Array], tokens: Tokens, config: DSAConfig
) -> Selection:
  """Scores the visible keys of each query and keeps the best; detached."""
  if params.indexer is None:
    raise ValueError("selection is required where params.indexer is None")
  weights, tokens = jax.lax.stop_gradient(
    ((params.mla, params.indexer), tokens)
  )
  select = functools.partial(_select_rows, config)
  return Selection(mesh.map_rows(select, weights, tokens))


def _select_rows(
  config: DSAConfig,
  weights: tuple[MLAParams[jax.Array], IndexerParams[jax.Array]],
  tokens: Tokens,
) -> jax.Array:
  """int32 [B, T, min(index_topk, S)] for whole sequences."""
  index_keys = index_scan.index_keys(
    weights[1], tokens.x, tokens.positions, config
  )
  indices: jax.Array = streaming.map_chunks(
    functools.partial(select_chunk, config, tokens.order.shape[1]),
    weights,
    (index_keys, tokens.segment_ids),
    tokens,
    chunk_size=index_scan.QUERY_CHUNK,
    causal=True,
  )
  return indices
