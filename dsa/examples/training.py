"""The three stages in which a sparse decoder is trained, one step at a time.

    dense    LM loss, dense attention       trains all but the indexers
    warm-up  indexer loss, dense attention  trains the indexers alone
    sparse   LM loss + indexer loss         trains both, each by its own loss

Source: DeepSeek-V3.2, arXiv 2512.02556, section 2.1.1; Adam, arXiv 1412.6980.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

import dsa
from dsa.examples import decoder as decoder_lib
from dsa.examples import recall as recall_lib

StageName = Literal["dense", "warm-up", "sparse"]

# Steps over which the learning rate rises, and the share of its peak that it
# falls to by the end of a stage.
_RISE_STEPS = 20
_LAST_SHARE = 0.1


class Adam(NamedTuple):
  """Adam's running means of the gradients, and over how many steps."""

  steps: jax.Array
  mean: Any
  square: Any


class Model(NamedTuple):
  """What training changes: two groups of weights, each with its Adam."""

  decoder: decoder_lib.StackedParams
  decoder_adam: Adam
  indexers: decoder_lib.Indexers
  indexers_adam: Adam


class Losses[Leaf](NamedTuple):
  """float32 scalars, NaN where a stage does not compute them.

  Attributes:
    language_model: Nats a byte.
    indexer: Nats a query, mean over layers.
  """

  language_model: Leaf
  indexer: Leaf


class Measurement[Leaf](NamedTuple):
  """What held-out text says of a model.

  Attributes:
    dense_loss: Language-model loss with dense attention, scalar.
    sparse_loss: The same with the selected keys alone.
    indexer_loss: Over all visible keys, scalar, mean over layers.
    recall: Shares of the dense attention mass, each [layers].
  """

  dense_loss: Leaf
  sparse_loss: Leaf
  indexer_loss: Leaf
  recall: recall_lib.Recall[Leaf]


Step = Callable[[Model, jax.Array, jax.Array], tuple[Model, Losses[jax.Array]]]
Measure = Callable[[Model, jax.Array], Measurement[jax.Array]]


def init_adam(params: Any) -> Adam:
  """Adam before its first step."""
  zeros = jax.tree.map(jnp.zeros_like, params)
  return Adam(jnp.zeros((), jnp.int32), zeros, zeros)


def adam_step(
  params: Any,
  grads: Any,
  state: Adam,
  *,
  rate: jax.Array,
  decay: tuple[float, float] = (0.9, 0.99),
  eps: float = 1e-8,
) -> tuple[Any, Adam]:
  """One step of Adam.

  Args:
    params: A tree of arrays.
    grads: Their gradients.
    state: Adam's running means.
    rate: Learning rate, scalar.
    decay: Of the mean gradient, and of the mean squared gradient.
    eps: Added to the root of the latter.

  Returns:
    The new parameters and running means.
  """
  first, second = decay
  steps = state.steps + 1
  mean = jax.tree.map(lambda m, g: m + (1 - first) * (g - m), state.mean, grads)
  square = jax.tree.map(
    lambda s, g: s + (1 - second) * (g * g - s), state.square, grads
  )
  rate = rate * jnp.sqrt(1 - second**steps) / (1 - first**steps)
  params = jax.tree.map(
    lambda p, m, s: p - rate * m / (jnp.sqrt(s) + eps), params, mean, square
  )
  return params, Adam(steps, mean, square)


def learning_rate(peak: float, step: int, steps: int) -> float:
  """Rises linearly from zero, then falls along a cosine.

  Args:
    peak: The highest.
    step: Steps of the stage that are done.
    steps: Steps of the stage in all.

  Returns:
    The learning rate of the next step.
  """
  rise = min((step + 1) / min(_RISE_STEPS, steps), 1.0)
  fall = (1 + math.cos(math.pi * step / steps)) / 2
  return peak * rise * (_LAST_SHARE + (1 - _LAST_SHARE) * fall)


def init_model(seed: int, config: dsa.DSAConfig) -> Model:
  """Seeded weights, and Adam before its first step."""
  decoder, indexers = decoder_lib.init_decoder(jax.random.key(seed), config)
  return Model(decoder, init_adam(decoder), indexers, init_adam(indexers))


def make_step(
  stage: StageName, config: dsa.DSAConfig, backend: dsa.Backend
) -> Step:
  """The training step of a stage.

  Args:
    stage: Which.
    config: The sizes.
    backend: The kernel of sparse attention.

  Returns:
    A pure function of the model, tokens [B, T + 1] and the learning rate, that
    returns the new model and the losses before the step.
  """
  attend = _make_attend(stage, config, backend)

  def losses(
    trained: tuple[Any, Any], frozen: Model, tokens: jax.Array
  ) -> tuple[jax.Array, Losses[jax.Array]]:
    decoder, indexers = trained
    logits, indexer_losses = decoder_lib.apply_decoder(
      frozen.decoder if decoder is None else decoder,
      frozen.indexers if indexers is None else indexers,
      tokens[:, :-1],
      attend=attend,
      eps=config.rms_norm_eps,
    )
    nothing = jnp.full((), jnp.nan)
    language_model, indexer = nothing, nothing
    total = jnp.zeros(())
    if decoder is not None:
      language_model = decoder_lib.next_byte_loss(logits, tokens[:, 1:])
      total += language_model
    if indexers is not None:
      indexer = jnp.mean(indexer_losses)
      total += indexer
    return total, Losses(language_model, indexer)

  def step(
    model: Model, tokens: jax.Array, rate: jax.Array
  ) -> tuple[Model, Losses[jax.Array]]:
    trained = (
      None if stage == "warm-up" else model.decoder,
      None if stage == "dense" else model.indexers,
    )
    grads, values = jax.grad(losses, has_aux=True)(trained, model, tokens)
    decoder_grads, indexer_grads = grads
    if decoder_grads is not None:
      decoder, adam = adam_step(
        model.decoder, decoder_grads, model.decoder_adam, rate=rate
      )
      model = model._replace(decoder=decoder, decoder_adam=adam)
    if indexer_grads is not None:
      indexers, adam = adam_step(
        model.indexers, indexer_grads, model.indexers_adam, rate=rate
      )
      model = model._replace(indexers=indexers, indexers_adam=adam)
    return model, values

  return step


def _make_attend(
  stage: StageName, config: dsa.DSAConfig, backend: dsa.Backend
) -> decoder_lib.Attend:
  """The attention of a stage; beside its output, its indexer's loss."""
  # A kernel for few keys is no kernel for all of them.
  attention = dsa.make_attention(
    config,
    backend=backend if stage == "sparse" else dsa.backends.dot_product(),
    stage="sparse" if stage == "sparse" else "dense_warmup",
    indexer_loss=stage != "dense",
  )

  def attend(
    params: dsa.DSAParams[jax.Array], x: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    result = attention(params, x)
    return result.out, result.indexer_loss

  return attend


def make_measure(config: dsa.DSAConfig, backend: dsa.Backend) -> Measure:
  """The measurement of a model on held-out text.

  Args:
    config: The sizes.
    backend: The kernel of sparse attention.

  Returns:
    A pure function of the model and tokens [B, T + 1].
  """
  dense = dsa.make_attention(
    config,
    backend=dsa.backends.dot_product(),
    stage="dense_warmup",
    indexer_loss=True,
  )

  def attend_dense(
    params: dsa.DSAParams[jax.Array], x: jax.Array
  ) -> tuple[jax.Array, tuple[jax.Array, recall_lib.Recall[jax.Array]]]:
    result = dense(params, x)
    shares = recall_lib.measure_recall(
      recall_lib.dense_probs(params.mla, x, config),
      result.selection,
      topk=config.index_topk,
    )
    return result.out, (result.indexer_loss, shares)

  def measure(model: Model, tokens: jax.Array) -> Measurement[jax.Array]:
    apply = functools.partial(
      decoder_lib.apply_decoder,
      model.decoder,
      model.indexers,
      tokens[:, :-1],
      eps=config.rms_norm_eps,
    )
    logits, (indexer_losses, shares) = apply(attend=attend_dense)
    sparse_logits, _ = apply(attend=_make_attend("sparse", config, backend))
    return Measurement(
      dense_loss=decoder_lib.next_byte_loss(logits, tokens[:, 1:]),
      sparse_loss=decoder_lib.next_byte_loss(sparse_logits, tokens[:, 1:]),
      indexer_loss=jnp.mean(indexer_losses),
      recall=shares,
    )

  return measure
