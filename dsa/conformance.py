"""The tests that prove an attention backend, wherever it comes from.

    from absl.testing import absltest
    from dsa import conformance

    class MyKernelTest(conformance.BackendConformanceTest):

      def make_backend(self):
        return my_kernels.attend           # what dsa.backends.contract says

    if __name__ == "__main__":
      absltest.main()

A failure names the fault it found; what the backend refuses, by raising
NotImplementedError, is skipped with its reason. Answers are held against the
contract's formulas in NumPy float64 (`dsa.conformance_cases.reference`).
"""

import functools
import unittest
from collections.abc import Callable
from typing import Any, ClassVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from dsa.conformance_cases import (
  QUARTERS,
  SHAPES,
  Case,
  random_case,
  random_counts,
  reference,
)
from dsa.mla import Backend, MLAInputs
from dsa.selection import Selection, visible_mask

# Outputs: |actual - wanted| <= tolerance * (1 + |wanted|), element by element.
OUTPUT_TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
# Gradients: ||actual - wanted|| <= tolerance * ||wanted||, array by array.
GRADIENT_TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
# What cancels to nothing is held to this share of the largest gradient.
CANCELLED_SHARE = 1e-2

_SCALE = 0.4
_NOT_FINITE = (float("nan"), float("inf"))
_BY_QUERY = ("q_nope", "q_rope")
_BY_KEY = ("kv_latent", "k_rope")


def _answer(
  attend: Backend,
  inputs: MLAInputs,
  selection: Selection,
  cotangent: jax.Array,
  *,
  scale: float,
) -> tuple[jax.Array, MLAInputs]:
  """The output of `attend` and the gradients of sum(output * cotangent)."""

  def at_inputs(inputs: MLAInputs) -> jax.Array:
    return attend(inputs, selection, scale=scale)

  out, pullback = jax.vjp(at_inputs, inputs)
  return out, pullback(cotangent.astype(out.dtype))[0]


def _skip_refused(attend: Callable[..., Any]) -> Callable[..., Any]:
  """Turns a refusal into a skipped test."""

  def attend_or_skip(*args: Any, **kwargs: Any) -> Any:
    try:
      return attend(*args, **kwargs)
    except NotImplementedError as error:
      raise unittest.SkipTest(f"refused: {error}") from error

  return attend_or_skip


class BackendConformanceTest(parameterized.TestCase):
  """Subclass it and override `make_backend`; the module shows how."""

  backend: ClassVar[Any]
  with_probs: ClassVar[Any]
  compiled: ClassVar[Any]

  def make_backend(self) -> Backend:
    """Makes the backend under test, once for the class."""
    raise NotImplementedError("override make_backend")

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    if cls is BackendConformanceTest:
      raise unittest.SkipTest("runs in subclasses that make a backend")

  def setUp(self):
    super().setUp()
    chex.clear_trace_counter()
    cls = type(self)
    if "backend" not in vars(cls):  # Once: programs are compiled by function.
      backend = self.make_backend()
      with_probs: Any = getattr(backend, "with_probs", None)
      cls.with_probs = staticmethod(with_probs)
      cls.backend = staticmethod(_skip_refused(backend))
      answer = functools.partial(_answer, cls.backend)
      cls.compiled = staticmethod(jax.jit(answer, static_argnames="scale"))

  def assert_output(
    self, out: jax.Array, case: Case, fault: str, *, scale: float = _SCALE
  ) -> None:
    """Holds an output to the reference, with zeros exact."""
    dtype = case.inputs.q_nope.dtype
    self.assertEqual(out.dtype, dtype, f"{fault}: dtype of the output")
    tolerance = OUTPUT_TOLERANCE[dtype.name]
    actual = np.asarray(out, np.float64)
    wanted = reference(case, scale).out
    np.testing.assert_allclose(
      actual, wanted, rtol=tolerance, atol=tolerance, err_msg=fault
    )
    empty_rows = actual[~case.mask.any(-1)]
    self.assertFalse(np.any(empty_rows), f"{fault}: output of an empty row")

  def assert_gradients(
    self, grads: MLAInputs, case: Case, fault: str, *, scale: float = _SCALE
  ) -> None:
    """Holds gradients to the reference, with zeros exact."""
    wanted = reference(case, scale).grads
    largest = max(np.linalg.norm(gradient) for gradient in wanted)
    for name, array in case.inputs._asdict().items():
      actual, where = getattr(grads, name), f"{fault}: gradient of {name}"
      self.assertEqual(actual.dtype, array.dtype, f"{where}, its dtype")
      self.assertEqual(actual.shape, array.shape, f"{where}, its shape")
      exact = getattr(wanted, name)
      error = np.linalg.norm(np.asarray(actual, np.float64) - exact)
      size = max(np.linalg.norm(exact), CANCELLED_SHARE * largest)
      allowed = GRADIENT_TOLERANCE[array.dtype.name] * size
      self.assertLessEqual(error, allowed, where)
    for name in _BY_QUERY + _BY_KEY:
      others = 2 if name in _BY_QUERY else 1  # The axis that they lie on.
      unused = np.asarray(getattr(grads, name))[~case.mask.any(others)]
      self.assertFalse(np.any(unused), f"{fault}: gradient of an unused {name}")

  def assert_conforms(
    self,
    case: Case,
    fault: str,
    *,
    wanted: Case | None = None,
    selection: Selection | None = None,
    scale: float = _SCALE,
  ) -> None:
    """Holds output and gradients to the reference.

    Args:
      case: What the backend is given.
      fault: What it has done wrong if it fails.
      wanted: The case with the right answer, where that is another.
      selection: In place of the case's own.
      scale: The softmax scale.
    """
    inputs, its_selection, cotangent = case.arguments()
    selection = its_selection if selection is None else selection
    out, grads = self.compiled(inputs, selection, cotangent, scale=scale)
    wanted = case if wanted is None else wanted
    self.assert_output(out, wanted, fault, scale=scale)
    self.assert_gradients(grads, wanted, fault, scale=scale)

  def _assert_isolated(
    self, case: Case, fault: str, *, clean: Case, query: tuple[int, int]
  ) -> None:
    """Holds all to the reference but one query, whose answer is not finite."""
    case.cotangent[query] = 0
    wanted = clean.select(False, at=query)._replace(cotangent=case.cotangent)
    out, grads = self.compiled(*case.arguments(), scale=_SCALE)
    self.assert_output(out.at[query].set(0), wanted, fault)
    self.assert_gradients(grads, wanted, fault)

  @parameterized.named_parameters(*SHAPES)
  def test_output(self, fault, options):
    case = random_case(1, **options)
    out, _ = self.compiled(*case.arguments(), scale=_SCALE)
    self.assert_output(out, case, fault)

  @parameterized.named_parameters(*SHAPES)
  def test_gradients(self, fault, options):
    case = random_case(1, **options)
    _, grads = self.compiled(*case.arguments(), scale=_SCALE)
    self.assert_gradients(grads, case, fault)

  def test_scale(self):
    self.assert_conforms(random_case(2), "forgets the scale", scale=3.0)

  def test_documents_and_order(self):
    segments = jnp.asarray([[1] * 5 + [2] * 7 + [0], [0] * 3 + [1] * 10])
    visible = np.asarray(visible_mask(segments, segments))
    case = random_case(3, T=13, S=13, topk=8)
    case = case._replace(mask=case.mask & visible)
    self.assert_conforms(case, "reads another document or a later key")

  @parameterized.named_parameters(
    ("one_query", (0, 2)), ("one_row_of_the_batch", 1), ("every_query", ...)
  )
  def test_nothing_selected(self, at):
    case = random_case(4).select(False, at=at)
    with jax.debug_nans(True):
      self.assert_conforms(case, "answers where nothing is selected")

  def test_nothing_selected_by_a_query_of_nan(self):
    case = random_case(4).select(False, at=(0, 2))
    poisoned = case.fill(np.nan, *_BY_QUERY, at=(0, 2))
    fault = "lets a query that selected nothing poison others"
    self.assert_conforms(poisoned, fault, wanted=case)

  def test_rows_of_different_lengths(self):
    case = random_case(5, topk=random_counts(5, most=4))
    self.assert_conforms(case, "takes -1 for a key")

  def test_minus_one_before_the_keys(self):
    case, fault = random_case(6), "takes -1 for a key, or for the end"
    indices = case.selection().indices
    indices = jnp.concatenate((jnp.full_like(indices, -1), indices), axis=-1)
    self.assert_conforms(case, fault, selection=Selection(indices))

  def test_minus_one_never_reads_the_last_row(self):
    case = random_case(7, topk=random_counts(7, most=4))
    case = case.select(False, at=(..., -1))
    poisoned = case.fill(np.nan, *_BY_KEY, at=(slice(None), -1))
    fault = "reads the last row at an index of -1"
    self.assert_conforms(poisoned, fault, wanted=case)

  @parameterized.product(value=_NOT_FINITE, name=_BY_KEY)
  def test_key_that_nobody_selected(self, value, name):
    case = random_case(8).select(False, at=(0, slice(None), 3))
    poisoned = case.fill(value, name, at=(0, 3))
    fault = f"lets {value} in {name} of a key that nobody selected through"
    self.assert_conforms(poisoned, fault, wanted=case)

  @parameterized.product(value=_NOT_FINITE, name=_BY_KEY)
  def test_key_that_one_query_selected(self, value, name):
    case = random_case(9).select(False, at=(0, slice(None), 3))
    case = case.select(True, at=(0, 2, 3))
    poisoned = case.fill(value, name, at=(0, 3))
    fault = f"lets {value} in {name} of one query's key reach other queries"
    self._assert_isolated(poisoned, fault, clean=case, query=(0, 2))

  @parameterized.product(value=_NOT_FINITE, name=_BY_QUERY)
  def test_query_that_is_not_finite(self, value, name):
    case = random_case(10)
    poisoned = case.fill(value, name, at=(0, 2))
    fault = f"lets {value} in {name} of one query reach other queries"
    self._assert_isolated(poisoned, fault, clean=case, query=(0, 2))

  @parameterized.parameters(*_BY_KEY)
  def test_nan_of_a_selected_key_shows(self, name):
    case = random_case(11).select(True, at=(0, 2, 3))
    poisoned = case.fill(np.nan, name, at=(0, 3))
    out, _ = self.compiled(*poisoned.arguments(), scale=_SCALE)
    fault = f"hides a NaN in {name} of a key from the query that selected it"
    self.assertTrue(np.all(np.isnan(out[0, 2])), fault)

  def test_equal_logits(self):
    case = random_case(12).fill(0, "w_uk", "k_rope")
    self.assert_conforms(case, "widens or narrows a selection of equal logits")

  @parameterized.parameters(-1e5, 1e5)
  def test_extreme_logits(self, selected):
    case = random_case(13).select(False, at=(..., 0))
    case = case.fill(0, "q_nope").fill(1, "q_rope").fill(selected, "k_rope")
    case = case.fill(-selected, "k_rope", at=(slice(None), 0))
    out, _ = self.compiled(*case.arguments(), scale=_SCALE)
    fault = f"wrong for logits of {selected} beside unselected {-selected}"
    self.assert_output(out, case, fault)

  def test_bfloat16(self):
    case = random_case(14, dtype=jnp.bfloat16)
    self.assert_conforms(case, "wrong in bfloat16")

  def test_bfloat16_logits_are_float32(self):
    sizes = {"T": 1, "S": 3, "N": 1, "C": 3, "R": 2, "V": 3}
    case = random_case(15, dtype=jnp.bfloat16, topk=3, **sizes)
    case = case.fill(0, "q_nope").fill(1, "q_rope")
    case = case.fill([[256, 0], [256, 1], [256, 0]], "k_rope")
    case = case.fill(np.eye(3), "kv_latent").fill(np.eye(3)[:, None], "w_uv")
    out, _ = self.compiled(*case.arguments(), scale=1.0)
    fault = "rounds logits of 256 and 257 to bfloat16"
    self.assert_output(out, case, fault, scale=1.0)

  def test_bfloat16_gradients_are_summed_in_float32(self):
    sizes = {"B": 1, "T": 600, "S": 3, "N": 1}
    case = random_case(16, dtype=jnp.bfloat16, topk=0, **sizes)
    case = case.select(True, at=(..., 1)).fill(1, "w_uv")
    case = case._replace(cotangent=np.ones_like(case.cotangent))
    self.assert_conforms(case, "sums gradients of 600 queries in bfloat16")

  @parameterized.named_parameters(*QUARTERS)
  def test_whole_blocks(self, quarters):
    case = random_case(17, B=1, N=2, T=256, S=256)
    mask = np.kron(quarters, np.ones((128, 128))).astype(bool)
    case = case._replace(mask=mask[None])
    self.assert_conforms(case, "wrong where whole blocks are not selected")

  def test_rows_of_the_batch_are_on_their_own(self):
    case = random_case(18, N=2, T=256, S=256)
    mask = np.stack((np.ones((256, 256), bool), np.eye(256, dtype=bool)))
    case = case._replace(mask=mask)
    self.assert_conforms(case, "mixes up a dense and a sparse row of the batch")

  def test_without_jit(self):
    for seed, fault in ((1, "differs"), (2, "keeps something of a call")):
      case = random_case(seed)
      out, grads = _answer(self.backend, *case.arguments(), scale=_SCALE)
      self.assert_output(out, case, f"{fault} without jit")
      self.assert_gradients(grads, case, f"{fault} without jit")

  def test_vmap(self):
    weights = random_case(0).inputs[4:]
    cases = [
      case._replace(inputs=MLAInputs(*case.inputs[:4], *weights))
      for case in (random_case(seed) for seed in (19, 20, 21))
    ]
    inputs, selections, _ = jax.tree.map(
      lambda *arrays: jnp.stack(arrays), *(case.arguments() for case in cases)
    )
    inputs = MLAInputs(*inputs[:4], *map(jnp.asarray, weights))
    lanes: Any = (0, 0, 0, 0, None, None)
    lanes = MLAInputs(*lanes)
    attend = functools.partial(self.backend, scale=_SCALE)
    outs = jax.jit(jax.vmap(attend, in_axes=(lanes, 0)))(inputs, selections)
    for case, out in zip(cases, outs, strict=True):
      self.assert_output(out, case, "wrong under vmap")

  def test_remat(self):
    case = random_case(1)

    @functools.partial(jax.jit, static_argnames="scale")
    def attend(inputs, selection, *, scale):
      fixed = functools.partial(self.backend, scale=scale)
      return jax.checkpoint(fixed)(inputs, selection)

    out, grads = _answer(attend, *case.arguments(), scale=_SCALE)
    self.assert_output(out, case, "wrong under jax.checkpoint")
    self.assert_gradients(grads, case, "wrong under jax.checkpoint")

  def test_probabilities(self):
    if self.with_probs is None:
      self.skipTest("the backend does not offer with_probs")
    case = random_case(26, topk=random_counts(26, most=4))
    case = case.select(False, at=(0, 2))
    inputs, selection, cotangent = case.arguments()
    attend = jax.jit(functools.partial(self.with_probs, scale=_SCALE))
    (out, probs), pullback = jax.vjp(lambda x: attend(x, selection), inputs)
    self.assert_output(out, case, "wrong beside the probabilities")
    grads = pullback((cotangent, probs))[0]
    self.assert_gradients(grads, case, "lets the probabilities pass gradients")
    indices = np.asarray(selection.indices)
    dense = reference(case, _SCALE).probs
    wanted = np.take_along_axis(dense, indices, axis=-1) * (indices >= 0)
    tolerance = OUTPUT_TOLERANCE["float32"]
    np.testing.assert_allclose(
      probs, wanted, tolerance, tolerance, err_msg="wrong probabilities"
    )

  def test_traces_once_for_equal_shapes(self):
    @jax.jit
    @chex.assert_max_traces(n=1)
    def attend(inputs, selection):
      return self.backend(inputs, selection, scale=_SCALE)

    for seed in (22, 23):
      case = random_case(seed)
      out = attend(*case.arguments()[:2])
      self.assert_output(out, case, "keeps something of an earlier call")

  @parameterized.parameters(
    *((name, np.s_[..., 0]) for name in MLAInputs._fields),
    *((name, np.s_[:, 1:]) for name in ("q_rope", "k_rope", "w_uk", "w_uv")),
  )
  def test_wrong_shape(self, name, part):
    inputs, selection, _ = random_case(24).arguments()
    inputs = inputs._replace(**{name: getattr(inputs, name)[part]})
    fault = f"accepts {name} of a wrong shape, or does not name it"
    with self.assertRaisesRegex(ValueError, name, msg=fault):
      self.backend(inputs, selection, scale=_SCALE)

  @parameterized.named_parameters(
    ("rank", ValueError, lambda indices: indices[..., 0]),
    ("size", ValueError, lambda indices: indices[:, :-1]),
    ("dtype", TypeError, lambda indices: indices.astype(jnp.float32)),
  )
  def test_wrong_selection(self, error, change):
    inputs, selection, _ = random_case(25).arguments()
    selection = Selection(change(selection.indices))
    fault = "accepts a selection that does not fit, or does not name it"
    with self.assertRaisesRegex(error, "selection", msg=fault):
      self.backend(inputs, selection, scale=_SCALE)
