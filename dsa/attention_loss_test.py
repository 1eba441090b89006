"""The indexer's loss of a layer: its value, its gradients, what it reaches."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import dsa
from testing import layers, oracle, oracle_loss, tolerances

TOPK = 4
# Four rows: packed, padded, whole, and all padding but one token.
SEGMENTS = np.asarray(
  [
    [1] * 5 + [2] * 7,
    [0] * 3 + [1] * 9,
    [1] * 12,
    [0] * 11 + [1],
  ],
  np.int32,
)
WAYS = {
  "whole": {"backend": dsa.backends.dot_product(), "query_chunk_size": 64},
  "in chunks": {"backend": dsa.backends.gather(), "query_chunk_size": 6},
  "without probs": {
    "backend": dsa.backends.tokamax_flash(),
    "query_chunk_size": 6,
  },
}
STAGES = ("sparse", "dense_warmup")


def setUpModule():
  # Each program runs once or twice: what takes the time is compiling it.
  jax.config.update("jax_disable_most_optimizations", True)


def make(seed):
  return layers.layer(seed, batch=4, index_topk=TOPK)


@functools.cache
def compiled(config, stage, way):
  """Loss and output weighted, with the gradients by parameters and x."""
  attention = dsa.make_attention(
    config, stage=stage, indexer_loss=True, **WAYS[way]
  )

  def value(params, x, segment_ids, cotangent, weight):
    result = attention(params, x, segment_ids=segment_ids)
    out = jnp.vdot(result.out, cotangent)
    return out + weight * result.indexer_loss, result.indexer_loss

  return jax.jit(jax.value_and_grad(value, (0, 1), has_aux=True))


def run(layer, stage, way, *, rows=slice(None), out=0.0, weight=1.0):
  """The loss, and gradients of out * sum(output) + weight * loss."""
  x = layer.x[rows]
  (_, loss), gradients = compiled(layer.config, stage, way)(
    layer.params, x, SEGMENTS[rows], jnp.full_like(x, out), weight
  )
  return loss, gradients


def wanted(layer, stage):
  mask = visible = oracle.visibility(SEGMENTS)
  mla, indexer = layers.oracle_params(layer.params)
  positions = np.broadcast_to(np.arange(12), SEGMENTS.shape)
  x, config = layer.x, layer.config
  # What lies in padding is taken for zero.
  x = np.where(SEGMENTS[..., None] == 0, 0, x)
  if stage == "sparse":
    q_latent = oracle.query_latent(mla, x)
    scores = oracle.indexer_scores(indexer, x, q_latent, positions, config)
    mask = oracle.topk_mask(scores, TOPK, visible)
  return oracle_loss.layer_loss(mla, indexer, x, positions, mask, config)


class LossTest(parameterized.TestCase):
  @parameterized.product(stage=STAGES, way=tuple(WAYS))
  def test_loss_and_gradients_are_the_oracles(self, stage, way):
    layer = make(0)
    wanted_loss, wanted_grads = wanted(layer, stage)
    loss, (grads, _) = run(layer, stage, way)
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    for name in dsa.IndexerParams._fields:
      tolerances.assert_close_by_norm(
        getattr(grads.indexer, name),
        getattr(wanted_grads, name),
        tolerances.LOSS_GRADIENT["float32"],
        name,
      )

  @parameterized.product(stage=STAGES, way=tuple(WAYS))
  def test_the_loss_reaches_the_indexer_alone(self, stage, way):
    _, (grads, by_x) = run(make(1), stage, way)
    for leaf in (*grads.mla, by_x):
      np.testing.assert_array_equal(leaf, 0)
    for leaf in grads.indexer:
      self.assertGreater(np.linalg.norm(leaf), 0)

  @parameterized.product(stage=STAGES, way=tuple(WAYS))
  def test_the_output_does_not_reach_the_indexer(self, stage, way):
    _, (grads, by_x) = run(make(2), stage, way, out=1.0, weight=0.0)
    for leaf in grads.indexer:
      np.testing.assert_array_equal(leaf, 0)
    self.assertGreater(np.linalg.norm(by_x), 0)

  @parameterized.parameters(*STAGES)
  def test_a_loss_weight_of_zero_gives_zeros_of_the_same_tree(self, stage):
    layer = make(3)
    _, (grads, _) = run(layer, stage, "in chunks", out=1.0, weight=0.0)
    chex.assert_trees_all_equal_shapes_and_dtypes(grads, layer.params)
    for leaf in grads.indexer:
      np.testing.assert_array_equal(leaf, 0)

  @parameterized.parameters(*STAGES)
  def test_micro_batches_weighted_by_valid_tokens_are_one_batch(self, stage):
    layer = make(4)
    loss, (grads, _) = run(layer, stage, "in chunks")
    counts = np.sum(SEGMENTS != 0, axis=1)
    shares = counts / np.sum(counts)
    parts = [
      run(layer, stage, "in chunks", rows=slice(row, row + 1))
      for row in range(4)
    ]
    mean_loss = sum(
      share * part[0] for share, part in zip(shares, parts, strict=True)
    )
    np.testing.assert_allclose(mean_loss, loss, rtol=1e-5)
    for name in dsa.IndexerParams._fields:
      mean = sum(
        share * getattr(part[1][0].indexer, name)
        for share, part in zip(shares, parts, strict=True)
      )
      tolerances.assert_close_by_norm(
        mean, getattr(grads.indexer, name), 1e-5, name
      )


if __name__ == "__main__":
  absltest.main()
