"""The layer spread over a mesh is the layer on one device."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import dsa
from dsa import sharding
from testing import layers, tolerances

LENGTH = 32
# Packed documents, and padding at the front of one row and the back of others.
SEGMENTS = np.asarray(
  [[1] * 9 + [2] * 23, [0] * 5 + [3] * 27, [4] * 20 + [0] * 12, [5] * 32]
)
MESHES = {
  "context 2": {"context": 2},
  "context 8": {"context": 8},
  "tensor 4": {"tensor": 4},
  "data 2, context 2, tensor 2": {"data": 2, "context": 2, "tensor": 2},
}


def setUpModule():
  jax.config.update("jax_num_cpu_devices", 8)
  # Each program runs once or twice: what takes the time is compiling it.
  jax.config.update("jax_disable_most_optimizations", True)


def mesh_of(axes):
  names, sizes = tuple(axes), tuple(axes.values())
  return jax.make_mesh(
    sizes,
    names,
    axis_types=(jax.sharding.AxisType.Auto,) * len(names),
    devices=jax.devices()[: int(np.prod(sizes))],
  )


@functools.cache
def make(dtype=jnp.float32):
  """Rows that see more keys than they select; scores have ties of zero."""
  return layers.layer(
    0,
    batch=4,
    length=LENGTH,
    num_attention_heads=4,
    index_n_heads=4,
    index_head_dim=16,
    index_topk=6,
    dtype=dtype,
  )


def answer_of(attention, layer, order=lambda x: x, back=lambda x: x):
  """Gradients of params and x, and the result's parts in token order.

  Args:
    attention: an attention function.
    layer: what it is given.
    order: puts arrays [B, T, ...] into the order that it expects.
    back: the inverse.
  """
  segments = order(jnp.asarray(SEGMENTS, jnp.int32))
  positions = order(layer.positions)
  cotangent = order(jnp.cos(jnp.arange(layer.x.size)).reshape(layer.x.shape))

  def loss(params, x):
    result = attention(
      params, order(x), positions=positions, segment_ids=segments
    )
    return jnp.sum(result.out * cotangent) + result.indexer_loss, result

  grads, result = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(
    layer.params, layer.x
  )
  return (
    grads,
    back(result.out),
    back(result.selection.indices),
    result.indexer_loss,
  )


@functools.cache
def on_one_device(stage):
  layer = make()
  attention = dsa.make_attention(
    layer.config, backend=dsa.backends.gather(), stage=stage, indexer_loss=True
  )
  return answer_of(attention, layer)


def sharded(axes, layer, rules=sharding.RULES, **options):
  options = {"backend": dsa.backends.gather(), "indexer_loss": True} | options
  return dsa.make_sharded_attention(
    layer.config, mesh_of(axes), rules, **options
  )


class ShardedTest(parameterized.TestCase):
  def assert_same(self, answer, stage="sparse"):
    grads, out, indices, loss = answer
    wanted_grads, wanted_out, wanted_indices, wanted_loss = on_one_device(stage)
    np.testing.assert_array_equal(indices, wanted_indices)
    tolerances.assert_output_close(out, wanted_out, "float32")
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    for actual, expected in zip(
      jax.tree.leaves(grads), jax.tree.leaves(wanted_grads), strict=True
    ):
      tolerances.assert_close_by_norm(actual, expected, 1e-5)

  @parameterized.parameters(*MESHES)
  def test_is_the_layer_on_one_device(self, mesh):
    layer = make()
    self.assert_same(answer_of(sharded(MESHES[mesh], layer), layer))

  def test_in_zigzag_order(self):
    parts = 4
    layer = make()
    attention = sharded(
      {"context": parts}, layer, zigzag=True, query_chunk_size=3
    )
    answer = answer_of(
      attention,
      layer,
      order=lambda x: sharding.to_zigzag(x, parts),
      back=lambda x: sharding.from_zigzag(x, parts),
    )
    self.assert_same(answer)

  def test_dense_warmup(self):
    layer = make()
    attention = sharded(
      {"context": 2, "tensor": 2},
      layer,
      backend=dsa.backends.dot_product(),
      stage="dense_warmup",
      query_chunk_size=5,
    )
    self.assert_same(answer_of(attention, layer), "dense_warmup")

  @parameterized.parameters(
    {"mesh": {"data": 2, "fsdp": 2}, "batch": ("data", "fsdp")},
    # Over the tokens' axis, and over one that spreads weights alone.
    {"mesh": {"context": 2, "fsdp": 2}, "batch": "data", "q_latent": "context"},
  )
  def test_weights_lie_over_any_axis(self, mesh, **rules):
    layer = make()
    rules = sharding.RULES | rules
    self.assert_same(answer_of(sharded(mesh, layer, rules), layer))

  def test_a_given_selection_is_attended_to(self):
    layer = make()
    _, wanted_out, indices, _ = on_one_device("sparse")
    params = layer.params._replace(indexer=None)
    attention = sharded({"context": 2, "tensor": 2}, layer)
    result = jax.jit(attention)(
      params,
      layer.x,
      segment_ids=jnp.asarray(SEGMENTS, jnp.int32),
      selection=dsa.Selection(indices),
    )
    tolerances.assert_output_close(result.out, wanted_out, "float32")
    with self.assertRaisesRegex(ValueError, "selection is required"):
      attention(params, layer.x)

  @parameterized.parameters((jnp.bfloat16, "none"), (jnp.float32, "fp8_ue8m0"))
  def test_selects_as_one_device_does(self, dtype, how):
    layer = make(dtype)
    config = dataclasses.replace(layer.config, index_quantization=how)
    backend = dsa.backends.gather()
    wanted = jax.jit(dsa.make_attention(config, backend=backend))(
      layer.params, layer.x
    )
    attention = dsa.make_sharded_attention(
      config,
      mesh_of({"data": 2, "context": 2, "tensor": 2}),
      backend=backend,
    )
    actual = jax.jit(attention)(layer.params, layer.x)
    np.testing.assert_array_equal(
      actual.selection.indices, wanted.selection.indices
    )

  def test_explicit_axes(self):
    layer = make()
    mesh = jax.make_mesh((2, 2, 2), ("data", "context", "tensor"))
    attention = dsa.make_sharded_attention(
      layer.config, mesh, backend=dsa.backends.gather(), indexer_loss=True
    )
    with jax.set_mesh(mesh):
      self.assert_same(answer_of(attention, layer))

  def test_devices_pass_on_no_scores_and_no_masks(self):
    layer = make()
    attention = sharded({"context": 4, "tensor": 2}, layer)
    text = (
      jax.jit(lambda *args: attention(*args).out.sum())
      .lower(layer.params, layer.x)
      .compile()
      .as_text()
    )
    passed = re.findall(r"= \(?(\w+\[[\d,]*\]).* all-(?:gather|reduce)\(", text)
    self.assertNotEmpty(passed)
    batch, length = layer.x.shape[:2]
    for shape in passed:
      sizes = [int(n) for n in re.findall(r"\d+", shape.split("[")[1])]
      self.assertLess(math.prod(sizes), batch * length * length, shape)

  def test_arguments_are_checked(self):
    layer = make()
    attention = sharded({"data": 2, "context": 2}, layer, zigzag=True)
    with self.assertRaisesRegex(ValueError, "multiple of 2 rows and of 4 tok"):
      attention(layer.params, layer.x[:, :30])
    with self.assertRaisesRegex(ValueError, "multiple of 2 rows and of 4 tok"):
      attention(layer.params, layer.x[:3])
    with self.assertRaisesRegex(ValueError, r"params.mla.wq_b .* divide over"):
      sharded({"tensor": 8}, layer)(layer.params, layer.x)
    with self.assertRaisesRegex(ValueError, r"segment_ids must have shape"):
      attention(layer.params, layer.x, segment_ids=jnp.ones((4, 3), int))
    with self.assertRaisesRegex(ValueError, "rules must name logical axes"):
      sharded({"tensor": 2}, layer, {"head": "tensor"})


if __name__ == "__main__":
  absltest.main()
