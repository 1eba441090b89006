"""Selection case by case: visibility, ties, empty rows, and what errors say."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from dsa import selection
from dsa.selection import Selection
from testing import goldens, oracle

_LAYERS = (
  "deepseek_v32_yarn_100",
  "deepseek_v32_padded_100",
  "deepseek_v32_plain_rope_100",
  "deepseek_v32_short_100",
)


# Compiled whole: each step on its own takes far longer for as many shapes.
_topk_mask = jax.jit(selection.topk_mask, static_argnums=1)
_topk_indices = jax.jit(selection.topk_indices, static_argnums=1)
_visible_mask = jax.jit(selection.visible_mask)


def _all(*shape):
  return np.ones(shape, bool)


def _causal(length):
  return np.tril(_all(length, length))


class TopkTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("ties_do_not_widen", [1, 1, 1, 5], 2, [0, 3]),
    ("the_best", [3, 1, 4, 1, 5, 9, 2, 6], 3, [4, 5, 7]),
    ("negative_numbers", [-3, -1, -2, -4], 2, [1, 2]),
    ("signed_zeros_are_equal", [-0.0, 0.0, -0.0, 0.0], 2, [0, 1]),
    ("nan_is_never_preferred", [np.nan, -1, np.nan, -2], 2, [1, 3]),
    ("negative_nan_neither", [-np.nan, -1, -np.nan, -2], 2, [1, 3]),
    ("nan_yields_to_minus_infinity", [np.nan, -np.inf], 1, [1]),
    ("nan_where_numbers_run_out", [np.nan, 3, np.nan, np.nan], 2, [0, 1]),
    ("infinity_comes_first", [0, np.inf, -np.inf, 3e38], 1, [1]),
    ("minus_infinity_is_a_score", [-np.inf, -np.inf, -np.inf], 2, [0, 1]),
    ("subnormals_are_ordered", [1e-45, 3e-45, 0.0, -1e-45], 2, [0, 1]),
    ("subnormals_are_not_zero", [0.0, -1e-45, 1e-45], 1, [2]),
    ("plateau", [0.0] * 4096, 32, list(range(32))),
    ("all_at_k_of_s", [3, 1, 2], 3, [0, 1, 2]),
  )
  def test_selects(self, scores, k, wanted):
    scores = np.array([scores], np.float32)
    indices = _topk_indices(scores, k, _all(*scores.shape))
    np.testing.assert_array_equal(indices, [wanted])

  def test_more_keys_asked_for_than_there_are(self):
    scores = jnp.array(np.random.default_rng(0).normal(size=(1, 5, 5)))
    indices = _topk_indices(scores, 8, _causal(5))
    wanted = oracle.mask_to_indices(_causal(5)[None], 5)
    self.assertEqual(indices.dtype, jnp.int32)
    np.testing.assert_array_equal(indices, wanted)

  @parameterized.parameters(2, 3, 8)
  def test_allowed_passes_through_where_k_is_enough(self, k):
    allowed = jnp.array([[True, False], [True, True]])
    mask = _topk_mask(jnp.array([[1.0, 9.0], [9.0, 1.0]]), k, allowed)
    np.testing.assert_array_equal(mask, allowed)

  @parameterized.parameters(1, 2, 3)
  def test_nothing_allowed_is_nothing_selected(self, k):
    scores = jnp.array([[1.0, np.nan, np.inf]])
    allowed = jnp.zeros((1, 3), bool)
    self.assertFalse(_topk_mask(scores, k, allowed).any())
    np.testing.assert_array_equal(
      _topk_indices(scores, k, allowed), np.full((1, k), -1)
    )

  @parameterized.parameters((2, [1, 4]), (3, [1, 3, 4]), (4, [1, 3, 4, -1]))
  def test_what_is_not_allowed_is_never_selected(self, k, wanted):
    scores = jnp.array([[np.inf, -5.0, 9.0, np.nan, -6.0]])
    allowed = jnp.array([[False, True, False, True, True]])
    np.testing.assert_array_equal(_topk_indices(scores, k, allowed), [wanted])

  def test_fewer_allowed_than_k_are_all_selected(self):
    allowed = jnp.array([[False, True, False, True, False, False]])
    np.testing.assert_array_equal(
      _topk_indices(jnp.zeros((1, 6)), 4, allowed), [[1, 3, -1, -1]]
    )

  @parameterized.parameters(
    ((),), ((5,),), ((4, 5),), ((1, 5),), ((3, 1, 1),), ((1, 4, 1),)
  )
  def test_allowed_broadcasts(self, shape):
    rng = np.random.default_rng(1)
    scores = jnp.asarray(rng.normal(size=(3, 4, 5)))
    allowed = jnp.asarray(rng.random(shape) < 0.6)
    np.testing.assert_array_equal(
      _topk_mask(scores, 2, allowed),
      _topk_mask(scores, 2, jnp.broadcast_to(allowed, scores.shape)),
    )

  @parameterized.parameters((0, 2, 5), (2, 0, 5), (1, 2, 0))
  def test_nothing_to_select_from(self, *shape):
    indices = _topk_indices(jnp.zeros(shape), 3, _all(*shape))
    self.assertEqual(indices.shape, (*shape[:-1], min(3, shape[-1])))

  @parameterized.parameters(np.int64, np.uint8, np.uint64, np.array, jnp.array)
  def test_k_may_be_any_integer(self, kind):
    scores = jnp.array([[1.0, 1.0, 1.0, 5.0]])
    indices = selection.topk_indices(scores, kind(2), _all(1, 4))
    np.testing.assert_array_equal(indices, [[0, 3]])


class GoldenTest(parameterized.TestCase):
  @parameterized.parameters(*_LAYERS)
  def test_golden_scores(self, name):
    golden = goldens.load(name)
    scores = golden.arrays["index_scores"]
    segment_ids = jnp.asarray(golden.arrays["token_valid"], jnp.int32)
    visible = _visible_mask(segment_ids, segment_ids)
    k = goldens.config(golden).index_topk
    np.testing.assert_array_equal(visible, np.isfinite(scores))
    np.testing.assert_array_equal(
      _topk_mask(scores, k, visible),
      oracle.topk_mask(scores, k, np.isfinite(scores)),
    )

  def test_golden_selection_of_packed_documents(self):
    arrays = goldens.load("indexer_kl_100").arrays
    segment_ids = jnp.asarray(arrays["segment_ids"])
    visible = _visible_mask(segment_ids, segment_ids)
    np.testing.assert_array_equal(visible, arrays["visible"])
    scores = arrays["index_scores"].astype(np.float32)
    np.testing.assert_array_equal(
      _topk_mask(scores, int(arrays["topk"]), visible), arrays["selected"]
    )

  def test_golden_selection_of_glm(self):
    golden = goldens.load("glm_moe_dsa_shared_100")
    config = goldens.config(golden)
    prefix = "model.layers.0.self_attn."
    x, positions = golden.arrays["x"], golden.arrays["positions"]
    mla = goldens.mla_params(golden.tensors, config, prefix)
    indexer = goldens.indexer_params(golden.tensors, config, prefix)
    scores = oracle.indexer_scores(
      indexer, x, oracle.query_latent(mla, x), positions, config
    ).astype(np.float32)
    np.testing.assert_array_equal(
      _topk_mask(scores, config.index_topk, _causal(x.shape[1])),
      golden.arrays["layer0_topk_mask"],
    )


class SelectionTest(parameterized.TestCase):
  def test_minus_one_is_no_key(self):
    mask = Selection(jnp.array([[[0, -1]]])).mask(4)
    self.assertEqual(mask.dtype, jnp.bool_)
    np.testing.assert_array_equal(mask, [[[True, False, False, False]]])

  def test_minus_one_does_not_clear_the_last_key(self):
    mask = Selection(jnp.array([[[3, -1, -1]]])).mask(4)
    np.testing.assert_array_equal(mask, [[[False, False, False, True]]])

  def test_a_mask_passes_through_unchanged(self):
    mask = jnp.array([[[True, False], [True, True]]])
    indices = selection.topk_indices(jnp.zeros(mask.shape), 2, mask)
    np.testing.assert_array_equal(indices, [[[0, -1], [0, 1]]])
    np.testing.assert_array_equal(Selection(indices).mask(2), mask)

  def test_lists_and_masks_are_inverse(self):
    mask = np.random.default_rng(2).random((2, 9, 33)) < 0.3
    mask[0, 0], mask[1, 1] = False, True
    scores = jnp.zeros(mask.shape)
    indices = selection.topk_indices(scores, 33, jnp.asarray(mask))
    self.assertEqual(indices.dtype, jnp.int32)
    np.testing.assert_array_equal(indices, oracle.mask_to_indices(mask, 33))
    np.testing.assert_array_equal(Selection(indices).mask(33), mask)

  @parameterized.parameters("int8", "int16", "uint8", "uint32")
  def test_indices_may_be_narrow(self, dtype):
    mask = Selection(jnp.array([[[0, 7]]], dtype)).mask(300)
    np.testing.assert_array_equal(np.flatnonzero(mask), [0, 7])

  def test_is_a_pytree(self):
    selected = Selection(jnp.array([[[0, -1]]]))
    doubled = jax.jit(lambda s: s)(selected)
    self.assertIsInstance(doubled, Selection)
    np.testing.assert_array_equal(doubled.indices, selected.indices)

  def test_other_rank_is_named(self):
    with self.assertRaisesRegex(
      ValueError, r"^indices must have shape \[B, T, K\], got \(1, 2\)$"
    ):
      Selection(jnp.array([[0, 1]])).mask(4)

  @parameterized.parameters(
    ([[[0, 1]]], "indices must be an array, got list"),
    (np.array([[[0.0]]]), "indices must be of dtype integer, got float64"),
    (np.array([[[True]]]), "indices must be of dtype integer, got bool"),
  )
  def test_what_are_no_indices_is_named(self, indices, wanted):
    with self.assertRaisesRegex(TypeError, f"^{wanted}$"):
      Selection(indices).mask(4)


class CheckSelectionTest(parameterized.TestCase):
  def test_adds_its_sizes_to_those_given(self):
    selected = Selection(jnp.zeros((2, 3, 4), jnp.int32))
    self.assertEqual(
      selection.check_selection(selected, B=2, S=9),
      {"B": 2, "T": 3, "K": 4, "S": 9},
    )

  @parameterized.parameters(
    (np.zeros((2, 3, 4), np.int32), "selection must be a Selection, got nd"),
    (None, "selection must be a Selection, got NoneType"),
    (Selection(np.zeros((2, 3, 4))), "selection.indices must be of dtype int"),
    (
      Selection(np.zeros((2, 3, 4), np.uint32)),
      "selection.indices must be of dtype int32, got uint32",
    ),
    (
      Selection(np.zeros((2, 3, 4), np.int8)),
      "selection.indices must be of dtype int32, got int8",
    ),
    (Selection([[[0]]]), "selection.indices must be an array, got list"),
  )
  def test_what_is_no_selection_is_named(self, selected, wanted):
    with self.assertRaisesRegex(TypeError, f"^{wanted}"):
      selection.check_selection(selected)

  def test_other_sizes_are_named(self):
    selected = Selection(jnp.zeros((2, 3, 4), jnp.int32))
    with self.assertRaisesRegex(
      ValueError,
      r"^selection.indices must have shape \[B, T=5, K\], got \(2, 3, 4\)$",
    ):
      selection.check_selection(selected, T=5)


class VisibleMaskTest(parameterized.TestCase):
  def test_matches_the_oracle(self):
    ids = np.random.default_rng(3).integers(0, 3, size=(3, 20))
    actual = _visible_mask(jnp.asarray(ids), jnp.asarray(ids))
    self.assertEqual(actual.dtype, jnp.bool_)
    np.testing.assert_array_equal(actual, oracle.visibility(ids))

  def test_padding_sees_nothing_and_is_not_seen(self):
    ids = jnp.array([[0, 1, 0, 1]])
    visible = np.array(_visible_mask(ids, ids)[0])
    np.testing.assert_array_equal(visible.sum(axis=1), [0, 1, 0, 2])
    np.testing.assert_array_equal(visible.sum(axis=0), [0, 2, 0, 1])

  def test_a_document_sees_itself_alone(self):
    ids = jnp.array([[1] * 5 + [2] * 7])
    indices = _topk_indices(jnp.zeros((1, 12, 12)), 12, _visible_mask(ids, ids))
    np.testing.assert_array_equal(indices[0, 11], [*range(5, 12)] + [-1] * 5)

  def test_a_document_that_resumes_sees_its_beginning(self):
    ids = jnp.array([[1, 2, 1]])
    np.testing.assert_array_equal(
      _visible_mask(ids, ids)[0, 2], [True, False, True]
    )

  @parameterized.parameters(0, 3, 7)
  def test_queries_that_begin_later(self, first):
    ids = np.random.default_rng(4).integers(0, 3, size=(2, 12))
    actual = selection.visible_mask(
      jnp.asarray(ids[:, first : first + 5]),
      jnp.asarray(ids),
      first_query=first,
    )
    wanted = oracle.visibility(ids)[:, first : first + 5]
    np.testing.assert_array_equal(actual, wanted)

  @parameterized.parameters((jnp.array,), (np.array,), (list,))
  def test_rows_that_begin_at_their_own_query(self, kind):
    ids = np.random.default_rng(5).integers(0, 3, size=(3, 12))
    queries = np.stack(
      [row[i : i + 4] for row, i in zip(ids, (0, 3, 8), strict=True)]
    )
    actual = selection.visible_mask(
      jnp.asarray(queries), jnp.asarray(ids), first_query=kind([0, 3, 8])
    )
    wanted = oracle.visibility(ids)
    for row, first in enumerate((0, 3, 8)):
      np.testing.assert_array_equal(actual[row], wanted[row, first : first + 4])

  def test_first_query_may_be_traced(self):
    ids = jnp.ones((2, 4), jnp.int32)
    visible = jax.jit(
      lambda first: selection.visible_mask(ids[:, :1], ids, first_query=first)
    )
    np.testing.assert_array_equal(visible(2)[0], [[True, True, True, False]])

  @parameterized.parameters(
    (((2, 3), (3, 3)), r"key_segment_ids must have shape \[B=2, S\], got"),
    (((3,), (2, 3)), r"query_segment_ids must have shape \[B, T\], got \(3,\)"),
    (((2, 3), (3,)), r"key_segment_ids must have shape \[B=2, S\], got"),
  )
  def test_other_shapes_are_named(self, shapes, wanted):
    queries, keys = (jnp.ones(shape, jnp.int32) for shape in shapes)
    with self.assertRaisesRegex(ValueError, f"^{wanted}"):
      selection.visible_mask(queries, keys)

  @parameterized.parameters((3,), (1,), ((2, 1),))
  def test_other_first_queries_are_named(self, shape):
    ids = jnp.ones((2, 3), jnp.int32)
    with self.assertRaisesRegex(
      ValueError, r"^first_query must have shape \[B=2\], got \("
    ):
      selection.visible_mask(ids, ids, first_query=jnp.zeros(shape, int))

  @parameterized.parameters(
    ("query_segment_ids", dict(query_segment_ids=np.ones((2, 3)))),
    ("key_segment_ids", dict(key_segment_ids=np.ones((2, 3), bool))),
    ("first_query", dict(first_query=1.0)),
    ("first_query", dict(first_query=True)),
  )
  def test_what_are_no_integers_is_named(self, name, change):
    ids = jnp.ones((2, 3), jnp.int32)
    arguments = dict(query_segment_ids=ids, key_segment_ids=ids) | change
    with self.assertRaisesRegex(TypeError, f"^{name} must be of dtype integer"):
      selection.visible_mask(**arguments)


class ErrorTest(parameterized.TestCase):
  @parameterized.product(
    topk=(selection.topk_mask, selection.topk_indices),
    case=(
      (dict(k=0), ValueError, "k must be at least 1, got 0"),
      (dict(k=2.0), TypeError, "k must be a static integer, got 2.0"),
      (dict(k=True), TypeError, "k must be an integer, got True"),
      (dict(k=None), TypeError, "k must be a static integer, got None"),
      (
        dict(scores=[[1.0, 2.0]]),
        TypeError,
        "scores must be of dtype floating, got list",
      ),
      (
        dict(scores=np.ones((2, 3), np.int32)),
        TypeError,
        "scores must be of dtype floating, got int32",
      ),
      (
        dict(allowed=[[True, False]]),
        TypeError,
        "allowed must be of dtype bool, got list",
      ),
      (
        dict(allowed=np.ones((2, 3), np.float32)),
        TypeError,
        "allowed must be of dtype bool, got float32",
      ),
      (
        dict(allowed=_all(2, 2)),
        ValueError,
        r"allowed must broadcast to scores \[..., T, S\], got allowed \(2, 2\) "
        r"and scores \(2, 3\)",
      ),
      (dict(allowed=_all(1, 2, 3)), ValueError, "allowed must broadcast to"),
      (
        dict(scores=np.ones((2, 1), np.float32)),
        ValueError,
        "allowed must broadcast to",
      ),
      (
        dict(scores=np.ones((), np.float32)),
        ValueError,
        "allowed must broadcast to",
      ),
    ),
  )
  def test_argument_is_named(self, topk, case):
    change, error, wanted = case
    arguments = dict(
      scores=np.ones((2, 3), np.float32), k=2, allowed=_all(2, 3)
    )
    with self.assertRaisesRegex(error, f"^{wanted}"):
      topk(**(arguments | change))

  def test_a_traced_k_is_named(self):
    topk = functools.partial(selection.topk_indices, allowed=_all(2, 3))
    with self.assertRaisesRegex(TypeError, "^k must be a static integer, got"):
      jax.jit(topk)(jnp.ones((2, 3)), 2)

  def test_float64_is_refused_for_it_would_be_rounded(self):
    with jax.enable_x64(True):
      with self.assertRaisesRegex(
        TypeError, "^scores must be of at most 32 bits, got float64$"
      ):
        selection.topk_mask(jnp.ones((2, 3), jnp.float64), 2, _all(2, 3))


if __name__ == "__main__":
  absltest.main()
