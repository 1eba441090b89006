"""Shares of attention mass against counts by loops over NumPy arrays."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import dsa
from dsa.examples import decoder, recall

_TOKENS = 7
_TOPK = 3


def _random_probs(seed=0, batch=2, tokens=_TOKENS):
  rng = np.random.default_rng(seed)
  probs = np.tril(rng.exponential(size=(batch, tokens, tokens)) ** 3)
  return (probs / probs.sum(axis=-1, keepdims=True)).astype(np.float32)


def _kept(probs, choose):
  """Mean over queries of the mass at the keys that `choose(b, t)` names."""
  batch, tokens, _ = probs.shape
  shares = [
    sum(float(probs[b, t, s]) for s in choose(b, t))
    for b in range(batch)
    for t in range(tokens)
  ]
  return np.mean(shares)


def _selection(lists):
  width = max(map(len, itertools.chain(*lists)))
  indices = [
    [[*keys, *[-1] * (width - len(keys))] for keys in b] for b in lists
  ]
  return dsa.Selection(jnp.array(indices, jnp.int32))


def _measure(probs, selection=None, topk=_TOPK):
  if selection is None:
    selection = _selection([[[0]] * probs.shape[1]] * probs.shape[0])
  measure = jax.jit(recall.measure_recall, static_argnames="topk")
  return measure(jnp.asarray(probs), selection, topk=topk)


class RecallTest(parameterized.TestCase):
  def test_a_selection_keeps_the_mass_of_its_keys(self):
    probs = _random_probs()
    rng = np.random.default_rng(1)
    lists = [
      [sorted(rng.permutation(t + 1)[:_TOPK]) for t in range(_TOKENS)]
      for _ in probs
    ]
    actual = _measure(probs, _selection(lists)).selected
    self.assertAlmostEqual(
      actual, _kept(probs, lambda b, t: lists[b][t]), places=6
    )

  def test_a_perfect_selection_keeps_everything(self):
    # No query attends to more than three keys: these are the selection.
    rng = np.random.default_rng(2)
    lists = [[sorted(rng.permutation(t + 1)[:_TOPK]) for t in range(_TOKENS)]]
    probs = np.zeros((1, _TOKENS, _TOKENS), np.float32)
    for t, keys in enumerate(lists[0]):
      probs[0, t, keys] = 1 / len(keys)
    result = _measure(probs, _selection(lists))
    self.assertAlmostEqual(result.selected, 1.0, places=6)
    self.assertAlmostEqual(result.best, 1.0, places=6)

  @parameterized.parameters(3, 20)
  def test_recent_keys_are_the_last_ones_up_to_the_query(self, topk):
    probs = _random_probs()
    expected = _kept(probs, lambda b, t: range(max(0, t + 1 - topk), t + 1))
    self.assertAlmostEqual(
      _measure(probs, topk=topk).recent, expected, places=6
    )

  @parameterized.parameters(3, 20)
  def test_a_random_choice_is_the_mean_over_all_choices(self, topk):
    probs = _random_probs()

    def mean_over_choices(b, t):
      count = min(topk, t + 1)
      choices = list(itertools.combinations(range(t + 1), count))
      return np.mean([sum(probs[b, t, list(keys)]) for keys in choices])

    expected = np.mean(
      [mean_over_choices(b, t) for b in range(2) for t in range(_TOKENS)]
    )
    self.assertAlmostEqual(
      _measure(probs, topk=topk).random, expected, places=6
    )

  def test_no_choice_keeps_more_than_the_best(self):
    probs = _random_probs()
    expected = _kept(probs, lambda b, t: np.argsort(-probs[b, t])[:_TOPK])
    self.assertAlmostEqual(_measure(probs).best, expected, places=6)

  def test_dense_probs_are_the_attention_of_the_layer(self):
    config = decoder.decoder_config(
      hidden_size=16, layers=1, heads=2, index_heads=1, topk=1
    )
    params = jax.jit(lambda key: dsa.init_params(key, config))(
      jax.random.key(0)
    )
    x = jax.random.normal(jax.random.key(1), (2, _TOKENS, 16))

    @jax.jit
    def both(params, x):
      seen = []

      def listen(inputs, selection, *, scale):
        out, probs = dsa.backends.dot_product().with_probs(
          inputs, selection, scale=scale
        )
        seen.append(probs)
        return out

      dsa.make_attention(config, backend=listen, stage="dense_warmup")(
        params, x
      )
      return recall.dense_probs(params.mla, x, config), seen[0]

    actual, expected = both(params, x)
    np.testing.assert_allclose(actual, expected, atol=1e-6)


if __name__ == "__main__":
  absltest.main()
