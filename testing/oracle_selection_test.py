"""The oracle's selection and what follows from it, case by case."""

import numpy as np
from absl.testing import absltest, parameterized

from testing import oracle, random_layer, tolerances

CONFIG = random_layer.CONFIG
EXACT = tolerances.OUTPUT["float64"]._asdict()


def run(layer, config=CONFIG, **inputs):
  return oracle.dsa_layer(layer.mla, layer.indexer, layer.x, config, **inputs)


class TopkTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("ties_do_not_widen", [1, 1, 1, 5], 2, [0, 3]),
    ("signed_zeros_are_equal", [-0.0, 0.0, -0.0, 0.0], 2, [0, 1]),
    ("nan_is_never_preferred", [np.nan, -1, np.nan, -2], 2, [1, 3]),
    ("nan_yields_to_minus_infinity", [np.nan, -np.inf], 1, [1]),
    ("nan_is_taken_for_want_of_numbers", [np.nan, 3, np.nan], 2, [0, 1]),
    ("infinity_comes_first", [0, np.inf, -np.inf], 1, [1]),
    ("fewer_than_k", [3, 1, 2], 8, [0, 1, 2]),
    ("plateau", np.zeros(4096), 32, list(range(32))),
  )
  def test_selects(self, scores, k, wanted):
    scores = np.asarray(scores, np.float64)
    chosen = oracle.topk_row(scores, k, np.ones(scores.shape, bool))
    np.testing.assert_array_equal(chosen, wanted)

  def test_what_is_not_allowed_is_not_selected(self):
    mask = oracle.topk_mask([[9, 1, 8, 2]], 2, [[False, True, False, True]])
    np.testing.assert_array_equal(mask, [[False, True, False, True]])

  def test_indices_ascend_and_end_in_minus_one(self):
    allowed = np.tril(np.ones((4, 4), bool))
    scores = np.broadcast_to([1.0, 4.0, 3.0, 2.0], (4, 4))
    np.testing.assert_array_equal(
      oracle.topk_indices(scores, 2, allowed),
      [[0, -1], [0, 1], [1, 2], [1, 2]],
    )

  def test_indices_are_no_wider_than_the_keys(self):
    indices = oracle.topk_indices(np.zeros((1, 5)), 8, np.ones((1, 5), bool))
    np.testing.assert_array_equal(indices, [[0, 1, 2, 3, 4]])

  def test_minus_one_is_no_index(self):
    np.testing.assert_array_equal(
      oracle.indices_to_mask([[0, -1]], 4), [[True, False, False, False]]
    )


class VisibilityTest(absltest.TestCase):
  def test_segments_padding_and_order(self):
    visible = oracle.visibility([[0, 1, 1, 2, 0]])
    wanted = np.zeros((5, 5), bool)
    for t, s in [(1, 1), (2, 1), (2, 2), (3, 3)]:
      wanted[t, s] = True
    np.testing.assert_array_equal(visible[0], wanted)

  def test_order_is_token_order_whatever_the_positions(self):
    layer = random_layer.random_layer(0)
    config = CONFIG._replace(index_topk=12)
    selected = run(layer, config, positions=layer.positions[:, ::-1]).mask
    np.testing.assert_array_equal(selected, np.tril(np.ones((2, 12, 12))))


class LayerTest(parameterized.TestCase):
  def test_topk_beyond_the_keys_is_dense_causal_attention(self):
    layer = random_layer.random_layer(1, length=5)
    causal = oracle.visibility(np.ones((2, 5), int))
    np.testing.assert_array_equal(
      run(layer, CONFIG._replace(index_topk=8)).out,
      run(layer, mask=causal).out,
    )

  def test_topk_beyond_the_keys_keeps_the_causal_mask(self):
    config = CONFIG._replace(index_topk=8)
    layer = random_layer.random_layer(2, length=4)
    changed = layer._replace(x=layer.x.copy())
    changed.x[:, 3] += 1
    np.testing.assert_array_equal(
      run(layer, config).out[:, :3], run(changed, config).out[:, :3]
    )

  def test_left_padding_changes_no_valid_row(self):
    layer = random_layer.random_layer(3, batch=1, length=8)
    solo = layer._replace(x=layer.x[:, 3:])
    segments = np.array([[0, 0, 0, 1, 1, 1, 1, 1]])
    np.testing.assert_allclose(
      run(layer, segment_ids=segments).out[:, 3:], run(solo).out, **EXACT
    )

  def test_a_packed_document_equals_its_solo_run(self):
    config = CONFIG._replace(index_topk=3)
    layer = random_layer.random_layer(4, batch=1, length=12)
    packed = run(layer, config, segment_ids=[[1] * 5 + [2] * 7])
    solo = run(layer._replace(x=layer.x[:, 5:]), config)
    np.testing.assert_allclose(packed.out[:, 5:], solo.out, **EXACT)

  def test_a_boolean_mask_passes_through_unchanged(self):
    layer = random_layer.random_layer(5, batch=1, length=2)
    mask = np.array([[[True, False], [True, True]]])
    np.testing.assert_array_equal(run(layer, mask=mask).mask, mask)

  def test_a_padded_sequence_of_nan_gives_exact_zeros(self):
    layer = random_layer.random_layer(6)
    layer.x[0] = np.nan
    out = run(layer, segment_ids=np.repeat([[0], [1]], 12, axis=1)).out
    np.testing.assert_array_equal(out[0], np.zeros_like(out[0]))

  def test_nan_in_an_unselected_latent_leaks_nowhere(self):
    layer = random_layer.random_layer(7)
    mask = run(layer).mask
    mask[:, :, 4] = False
    inputs = oracle.mla_inputs(layer.mla, layer.x, layer.positions, CONFIG)
    wanted = oracle.attend(inputs, mask, scale=0.3)
    inputs.kv_latent[:, 4] = np.nan
    inputs.k_rope[:, 4] = np.nan
    np.testing.assert_array_equal(
      oracle.attend(inputs, mask, scale=0.3), wanted
    )

  def test_probabilities_sum_to_one_and_stay_on_the_mask(self):
    layer = random_layer.random_layer(8)
    mask = run(layer).mask
    inputs = oracle.mla_inputs(layer.mla, layer.x, layer.positions, CONFIG)
    probs = oracle.attention_probs(inputs, mask, scale=0.3)
    np.testing.assert_allclose(np.sum(probs, -1, where=mask[:, None]), 1)
    np.testing.assert_array_equal(np.sum(probs, -1, where=~mask[:, None]), 0)


if __name__ == "__main__":
  absltest.main()
