"""Generating gives what transformers' DeepseekV32ForCausalLM gives."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import dsa
from dsa.examples import decoder as decoder_lib
from dsa.examples import decoder_folder, generation
from testing import checkpoint_folders, goldens

_CHUNK = 8
_TOLERANCE = 1e-4


@functools.cache
def _golden():
  return goldens.load("deepseek_v32_causal_lm_100")


@functools.cache
def _loaded():
  """The golden's model, from a folder of three shards."""
  folder = absltest.get_default_test_tmpdir() + "/deepseek"
  checkpoint_folders.write_folder(
    folder, _golden().tensors, _golden().hf_config, shards=3
  )
  return decoder_folder.load(folder)


def _caches(batch=1, max_length=48):
  return generation.init_caches(
    _loaded().config, batch, max_length, jnp.float32
  )


@functools.cache
def _steps():
  config, decoder, *_ = _loaded()
  step = generation.make_step(config, dsa.backends.gather())
  return generation.compile_steps(step, decoder, _caches(), chunk=_CHUNK)


def _prefill(prompt):
  return generation.prefill(
    _steps(), _loaded().decoder, _caches(), prompt, chunk=_CHUNK
  )


class GoldenTest(parameterized.TestCase):
  @parameterized.parameters(0, 1)
  def test_logits_by_prefill(self, row):
    arrays = _golden().arrays
    result = _prefill(arrays["input_ids"][row].tolist())
    np.testing.assert_allclose(
      result.logits[0], arrays["logits"][row], rtol=0, atol=_TOLERANCE
    )
    for cache in result.caches:
      np.testing.assert_array_equal(cache.length, [40])

  def test_logits_by_decode(self):
    arrays = _golden().arrays
    tokens = arrays["input_ids"][0].tolist()
    logits, caches = _prefill(tokens[:3])
    answers = [logits[0]]
    for token in tokens[3:]:
      logits, caches = _steps().decode(
        _loaded().decoder, jnp.array([[token]]), caches, jnp.array([1])
      )
      answers.append(logits[0])
    np.testing.assert_allclose(
      np.concatenate(answers), arrays["logits"][0], rtol=0, atol=_TOLERANCE
    )

  @parameterized.parameters(0, 0.001)
  def test_greedy_continuation_token_for_token(self, temperature):
    arrays = _golden().arrays
    prompt, wanted = arrays["prompt"][0].tolist(), arrays["greedy"][0].tolist()
    self.assertEqual(wanted[: len(prompt)], prompt)
    tokens = generation.decode(
      _steps(),
      _loaded().decoder,
      _prefill(prompt),
      num_tokens=len(wanted) - len(prompt),
      choose=generation.make_choose(temperature, seed=0),
    )
    self.assertEqual(list(tokens), wanted[len(prompt) :])

  def test_greedy_continuation_by_prefill_alone(self):
    tokens = _golden().arrays["greedy"][0].tolist()
    prompt_length = _golden().arrays["prompt"].shape[1]
    chosen = np.argmax(_prefill(tokens).logits[0], axis=-1).tolist()
    self.assertEqual(chosen[prompt_length - 1 : -1], tokens[prompt_length:])

  def test_a_token_that_ends_the_text_ends_it(self):
    prompt = _golden().arrays["prompt"][0].tolist()
    wanted = _golden().arrays["greedy"][0].tolist()[len(prompt) :]
    end = wanted[5]
    tokens = generation.decode(
      _steps(),
      _loaded().decoder,
      _prefill(prompt),
      num_tokens=len(wanted),
      choose=generation.make_choose(0, 0),
      end_tokens={end},
    )
    self.assertEqual(list(tokens), wanted[: wanted.index(end)])


class ChooseTest(absltest.TestCase):
  def test_tokens_are_drawn_by_their_probability(self):
    logits = jnp.log(jnp.array([0.2, 0.5, 0.3]))
    choose = generation.make_choose(1.0, seed=0)
    drawn = np.bincount([int(choose(logits, i)) for i in range(400)])
    np.testing.assert_allclose(drawn / 400, [0.2, 0.5, 0.3], atol=0.08)
    again = generation.make_choose(1.0, seed=0)
    self.assertEqual(choose(logits, 7), again(logits, 7))


class SharedSelectionTest(absltest.TestCase):
  def test_a_shared_layer_takes_the_selection_before_it(self):
    config, decoder, *_ = _loaded()
    config = dataclasses.replace(
      config, indexer_types=("full", "shared", "full")
    )
    indexers = decoder.indexers[0], None, decoder.indexers[2]
    tokens = jnp.asarray(_golden().arrays["input_ids"], jnp.int32)
    attention = dsa.make_attention(config, backend=dsa.backends.dot_product())

    @jax.jit
    def whole(decoder):
      x = decoder.params.embedding[tokens]
      selection = None
      for layer, weights in enumerate(decoder.params.layers):
        given = None if layer != 1 else selection

        def attend(params, x, given=given):
          result = attention(params, x, selection=given)
          return result.out, result.selection

        x, selection = decoder_lib.apply_layer(
          x, weights, indexers[layer], attend=attend, eps=1e-6
        )
      return decoder_lib.read_out(decoder.params, x, eps=1e-6)

    step = generation.make_step(config, dsa.backends.gather())
    caches = generation.init_caches(config, 2, 40, jnp.float32)
    self.assertIsNone(caches[1].index_keys)
    served = jax.jit(step)(
      decoder._replace(indexers=indexers), tokens, caches, jnp.array([40, 40])
    )
    wanted = whole(decoder)
    np.testing.assert_allclose(served.logits, wanted, atol=_TOLERANCE)
    self.assertGreater(
      np.abs(wanted - _golden().arrays["logits"]).max(), 100 * _TOLERANCE
    )


if __name__ == "__main__":
  absltest.main()
