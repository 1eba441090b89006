"""The oracle against what the public transformers package answered."""

import numpy as np
from absl.testing import absltest, parameterized

from testing import goldens, oracle, oracle_grad, oracle_loss, tolerances

LAYERS = (
  "deepseek_v32_yarn_100",
  "deepseek_v32_padded_100",
  "deepseek_v32_plain_rope_100",
  "deepseek_v32_short_100",
)


def load_layer(name):
  """Returns the golden, its config and what the oracle answers to it."""
  golden = goldens.load(name)
  config = goldens.config(golden)
  answer = oracle.dsa_layer(
    goldens.mla_params(golden.tensors, config),
    goldens.indexer_params(golden.tensors, config),
    golden.arrays["x"],
    config,
    positions=golden.arrays["positions"],
    segment_ids=golden.arrays["token_valid"].astype(int),
  )
  return golden, config, answer


class LayerTest(parameterized.TestCase):
  @parameterized.parameters(*LAYERS)
  def test_output_at_valid_tokens(self, name):
    golden, _, answer = load_layer(name)
    valid = golden.arrays["token_valid"]
    tolerances.assert_output_close(
      answer.out[valid], golden.arrays["attention_out"][valid], "float32"
    )

  @parameterized.parameters(*LAYERS)
  def test_index_scores_at_visible_keys(self, name):
    golden, _, answer = load_layer(name)
    scores = golden.arrays["index_scores"]
    seen = np.isfinite(scores)
    tolerances.assert_output_close(answer.scores[seen], scores[seen], "float32")

  @parameterized.parameters(*LAYERS)
  def test_visible_is_where_the_golden_scores_are_finite(self, name):
    golden, _, _ = load_layer(name)
    valid = golden.arrays["token_valid"]
    np.testing.assert_array_equal(
      oracle.visibility(valid.astype(int)),
      np.isfinite(golden.arrays["index_scores"]),
    )

  @parameterized.parameters(*LAYERS)
  def test_selection_is_that_of_the_golden_scores(self, name):
    golden, config, answer = load_layer(name)
    scores = golden.arrays["index_scores"]
    wanted = oracle.topk_mask(scores, config.index_topk, np.isfinite(scores))
    np.testing.assert_array_equal(answer.mask, wanted)

  @parameterized.product(name=LAYERS, field=oracle.MLAParams._fields + ("x",))
  def test_gradient(self, name, field):
    golden, config, answer = load_layer(name)
    grads, d_x = oracle_grad.sparse_mla_vjp(
      goldens.mla_params(golden.tensors, config),
      golden.arrays["x"],
      golden.arrays["positions"],
      answer.mask,
      config,
      golden.arrays["cotangent"],
    )
    actual = grads._asdict() | {"x": d_x}
    wanted = goldens.mla_params(golden.grads, config)._asdict()
    wanted["x"] = golden.arrays["grad_x"]
    tolerances.assert_close_by_norm(
      actual[field], wanted[field], tolerances.GRADIENT["float32"], field
    )


class SharedIndexerTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.golden = goldens.load("glm_moe_dsa_shared_100")
    self.answers = []
    config = goldens.config(self.golden)
    x, mask = self.golden.arrays["x"], None
    for layer in range(4):
      prefix = f"model.layers.{layer}.self_attn."
      indexer = goldens.indexer_params(self.golden.tensors, config, prefix)
      answer = oracle.dsa_layer(
        goldens.mla_params(self.golden.tensors, config, prefix),
        indexer,
        x,
        config,
        positions=self.golden.arrays["positions"],
        mask=None if indexer else mask,
      )
      # A layer reads the residual stream, without a norm in between.
      x, mask = x + answer.out, answer.mask
      self.answers.append(answer)

  @parameterized.parameters(range(4))
  def test_output(self, layer):
    wanted = self.golden.arrays[f"layer{layer}_out"]
    tolerances.assert_output_close(self.answers[layer].out, wanted, "float32")

  @parameterized.parameters(range(4))
  def test_selection(self, layer):
    wanted = self.golden.arrays[f"layer{layer}_topk_mask"]
    np.testing.assert_array_equal(self.answers[layer].mask, wanted)


class CausalLMTest(absltest.TestCase):
  def test_logits_of_three_layers(self):
    golden = goldens.load("deepseek_v32_causal_lm_100")
    config, tensors = goldens.config(golden), golden.tensors
    x = tensors["model.embed_tokens.weight"][golden.arrays["input_ids"]]
    for layer in range(3):
      prefix = f"model.layers.{layer}."
      mla = goldens.mla_params(tensors, config, prefix + "self_attn.")
      indexer = goldens.indexer_params(tensors, config, prefix + "self_attn.")
      h = oracle.rms_norm(x, tensors[prefix + "input_layernorm.weight"])
      x = x + oracle.dsa_layer(mla, indexer, h, config).out
      gain = tensors[prefix + "post_attention_layernorm.weight"]
      h = oracle.rms_norm(x, gain)
      gate = h @ tensors[prefix + "mlp.gate_proj.weight"].T
      up = h @ tensors[prefix + "mlp.up_proj.weight"].T
      silu = gate / (1 + np.exp(-gate))
      x = x + (silu * up) @ tensors[prefix + "mlp.down_proj.weight"].T
    x = oracle.rms_norm(x, tensors["model.norm.weight"])
    logits = x @ tensors["lm_head.weight"].T
    tolerances.assert_output_close(logits, golden.arrays["logits"], "float32")


class IndexerLossTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.arrays = goldens.load("indexer_kl_100").arrays
    self.scores = self.arrays["index_scores"]
    self.masks = {
      "dense": self.arrays["visible"],
      "sparse": self.arrays["selected"],
    }

  def p(self, stage):
    mask = self.masks[stage][:, None]
    logits = self.arrays["logits"]  # [B, N, T, S], scaled
    mask = np.broadcast_to(mask, logits.shape)
    return np.mean(oracle_loss.masked_softmax(logits, mask), axis=1)

  def test_visible(self):
    visible = oracle.visibility(self.arrays["segment_ids"])
    np.testing.assert_array_equal(visible, self.masks["dense"])

  def test_selected(self):
    topk = int(self.arrays["topk"])
    selected = oracle.topk_mask(self.scores, topk, self.masks["dense"])
    np.testing.assert_array_equal(selected, self.masks["sparse"])

  @parameterized.parameters("dense", "sparse")
  def test_target_distribution(self, stage):
    tolerances.assert_output_close(
      self.p(stage), self.arrays[f"{stage}/p"], "float64"
    )

  @parameterized.parameters("dense", "sparse")
  def test_kl_of_each_query(self, stage):
    kl = oracle_loss.query_kl(self.scores, self.p(stage), self.masks[stage])
    tolerances.assert_output_close(kl, self.arrays[f"{stage}/kl"], "float64")

  @parameterized.parameters("dense", "sparse")
  def test_loss_over_valid_queries(self, stage):
    loss = oracle_loss.indexer_kl_loss(
      self.scores, self.p(stage), self.masks[stage]
    )
    tolerances.assert_output_close(
      loss, self.arrays[f"{stage}/loss"], "float64"
    )

  @parameterized.parameters("dense", "sparse")
  def test_gradient_by_the_scores(self, stage):
    grad = oracle_loss.indexer_kl_loss_vjp(
      self.scores, self.p(stage), self.masks[stage]
    )
    wanted = self.arrays[f"{stage}/grad_index_scores"]
    tolerances.assert_close_by_norm(
      grad, wanted, tolerances.LOSS_GRADIENT["float64"]
    )


if __name__ == "__main__":
  absltest.main()
