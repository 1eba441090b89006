"""Generates tokens with a decoder: prefill in chunks, then one at a time.

A step appends tokens to the caches of all layers and returns the logits behind
each: prefill and decode are the same step at two widths. A layer that shares
its selection is passed that of the last layer before it that selects.
"""

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import dsa
from dsa.examples import decoder as decoder_lib
from dsa.examples.decoder_folder import Decoder

Caches = tuple[dsa.Cache, ...]


class StepResult(NamedTuple):
  """What a step returns.

  Attributes:
    logits: [B, T, vocabulary], of the token that follows each.
    caches: Those of the layers, with the new tokens.
  """

  logits: jax.Array
  caches: Caches


# Called with the decoder, tokens [B, T], the layers' caches, and how many of
# the tokens of each row are to be appended, int32 [B].
Step = Callable[[Decoder, jax.Array, Caches, jax.Array], StepResult]


class Steps(NamedTuple):
  """A step compiled at two widths: a chunk of a prompt, and one token."""

  prefill: Step
  decode: Step


def init_caches(
  config: dsa.DSAConfig, batch_size: int, max_length: int, dtype: Any
) -> Caches:
  """An empty cache for each layer."""
  return tuple(
    dsa.init_cache(
      config,
      batch_size,
      max_length,
      dtype,
      index_keys=config.has_indexer(layer),
    )
    for layer in range(config.num_hidden_layers)
  )


def make_step(config: dsa.DSAConfig, backend: dsa.Backend) -> Step:
  """Composes the layers of a decoder over their caches.

  Args:
    config: The sizes.
    backend: The kernel of attention.

  Returns:
    A pure function; the caches may be donated.
  """
  serve = dsa.make_cached_attention(config, backend=backend)

  def step(
    decoder: Decoder, tokens: jax.Array, caches: Caches, num_new: jax.Array
  ) -> StepResult:
    params, indexers = decoder
    x = params.embedding[tokens]  # [B, T, E]
    selection: dsa.Selection | None = None
    after = []
    for layer, weights in enumerate(params.layers):
      attend = functools.partial(
        _attend,
        serve,
        cache=caches[layer],
        num_new=num_new,
        selection=None if config.has_indexer(layer) else selection,
      )
      x, result = decoder_lib.apply_layer(
        x, weights, indexers[layer], attend=attend, eps=config.rms_norm_eps
      )
      selection = result.selection
      after.append(result.cache)
    logits = decoder_lib.read_out(params, x, eps=config.rms_norm_eps)
    return StepResult(logits, tuple(after))

  return step


def _attend(
  serve: dsa.CachedAttention,
  params: dsa.DSAParams[jax.Array],
  x: jax.Array,
  **options: Any,
) -> tuple[jax.Array, dsa.CachedResult]:
  result = serve(params, x, **options)
  return result.out, result


def compile_steps(
  step: Step, decoder: Decoder, caches: Caches, *, chunk: int
) -> Steps:
  """Compiles a step for one row, at the two widths that generating needs.

  Args:
    step: From `make_step`.
    decoder: The weights, or their shapes.
    caches: From `init_caches` with batch_size 1, or their shapes.
    chunk: Tokens of a prompt that are prefilled at once.

  Returns:
    The compiled steps, which are donated their caches.
  """
  jitted = jax.jit(step, donate_argnums=2)
  num_new = jnp.ones(1, jnp.int32)

  def compiled(width: int) -> Any:
    tokens = jnp.zeros((1, width), jnp.int32)
    return jitted.lower(decoder, tokens, caches, num_new).compile()

  return Steps(compiled(chunk), compiled(1))


def prefill(
  steps: Steps,
  decoder: Decoder,
  caches: Caches,
  prompt: Sequence[int],
  *,
  chunk: int,
) -> StepResult:
  """Appends a prompt to empty caches.

  Args:
    steps: Compiled for this chunk.
    decoder: The weights.
    caches: Of one row; given up.
    prompt: One token at least.
    chunk: Tokens that are appended at once.

  Returns:
    Logits [1, T, vocabulary] of all of the prompt, and the caches.
  """
  logits = []
  for start in range(0, len(prompt), chunk):
    part = np.asarray(prompt[start : start + chunk], np.int32)
    padded = np.pad(part, (0, chunk - len(part)))
    result = steps.prefill(
      decoder,
      jnp.asarray(padded)[None],
      caches,
      jnp.asarray([len(part)], jnp.int32),
    )
    caches = result.caches
    logits.append(result.logits[:, : len(part)])
  return StepResult(jnp.concatenate(logits, axis=1), caches)


def decode(
  steps: Steps,
  decoder: Decoder,
  prefilled: StepResult,
  *,
  num_tokens: int,
  choose: Callable[[jax.Array, int], jax.Array],
  end_tokens: Collection[int] = (),
) -> Iterator[int]:
  """Generates tokens, each from all before it.

  Args:
    steps: Compiled.
    decoder: The weights.
    prefilled: From `prefill`; its caches are given up.
    num_tokens: How many at most; the caches hold the prompt and as many.
    choose: Called with logits [vocabulary] and the number of tokens before.
    end_tokens: Tokens that end the text.

  Yields:
    The tokens, as soon as each is there; not those that end the text.
  """
  logits, caches = prefilled
  num_new = jnp.ones(1, jnp.int32)
  for place in range(num_tokens):
    token = int(choose(logits[0, -1], place))
    if token in end_tokens:
      return
    yield token
    if place + 1 < num_tokens:
      tokens = jnp.full((1, 1), token, jnp.int32)
      logits, caches = steps.decode(decoder, tokens, caches, num_new)


def make_choose(
  temperature: float, seed: int
) -> Callable[[jax.Array, int], jax.Array]:
  """The likeliest token at temperature 0, else one drawn by its probability.

  Args:
    temperature: What logits are divided by.
    seed: Of what is drawn.

  Returns:
    A function of logits [vocabulary] and of the number of tokens before.
  """
  if temperature == 0:
    return jax.jit(lambda logits, place: jnp.argmax(logits))
  key = jax.random.key(seed)

  @jax.jit
  def choose(logits: jax.Array, place: int) -> jax.Array:
    drawn = jax.random.fold_in(key, place)
    scaled = logits.astype(jnp.float32) / temperature
    return jax.random.categorical(drawn, scaled)

  return choose
