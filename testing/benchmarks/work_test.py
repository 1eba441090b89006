"""Tests of the counts that the benchmarks divide by."""

from absl.testing import absltest, parameterized

import dsa
from testing.benchmarks import work


def _ones(**sizes):
  names = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "v_head_dim",
    "index_n_heads",
    "index_topk",
  )
  values = dict.fromkeys(names, 1)
  values |= {"qk_rope_head_dim": 2, "index_head_dim": 2, **sizes}
  return dsa.DSAConfig(rope=dsa.RopeConfig(), **values)


class WorkTest(parameterized.TestCase):
  @parameterized.parameters((1, 4), (4, 4), (5, 4), (9, 3), (100, 7))
  def test_pairs_are_those_of_a_loop(self, length, topk):
    visible = sum(t + 1 for t in range(length))
    selected = sum(min(topk, t + 1) for t in range(length))
    self.assertEqual(work.visible_pairs(length), visible)
    self.assertEqual(work.selected_pairs(length, topk), selected)

  def test_forward_of_the_smallest_layer_is_counted_by_hand(self):
    # Projections 1 + 3 + 3 + 2 + 1 and 2 + 2 + 1, one pair of 4 and one of 2.
    config = _ones()
    self.assertEqual(
      work.operations(config, 1, "forward"), 2 * (10 + 5 + 4 + 2)
    )

  def test_a_gradient_costs_two_more_forward_passes_of_the_attention(self):
    config = _ones()
    self.assertEqual(
      work.operations(config, 1, "gradient"), 2 * (21 + 2 * (10 + 4))
    )

  def test_the_loss_adds_the_selected_pairs_alone(self):
    config = _ones(index_n_heads=3, index_topk=2)
    extra = [
      work.operations(config, length, "gradient with indexer loss")
      - work.operations(config, length, "gradient")
      for length in (10, 11)
    ]
    one_more_token = 6 + 2 + 3  # The indexer's projections.
    self.assertEqual(extra[1] - extra[0], 4 * (one_more_token + 2 * 6 * 3 // 2))


if __name__ == "__main__":
  absltest.main()
