"""The layer on a mesh of devices, as a caller's own program spreads it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.extend import core
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dsa
from testing import layers, tolerances

DEVICES = 4
# Chunks of 12 do not divide the sequence, and run in loops of their own rule.
WAYS = {
  "gather": {"backend": dsa.backends.gather(), "query_chunk_size": 12},
  "dense": {
    "backend": dsa.backends.dot_product(),
    "query_chunk_size": 12,
    "stage": "dense_warmup",
  },
}


def setUpModule():
  jax.config.update("jax_num_cpu_devices", 8)
  # Each program runs once or twice: what takes the time is compiling it.
  jax.config.update("jax_disable_most_optimizations", True)


def setup(way):
  """A layer, its attention, and a mesh-wide sum of its outputs and loss."""
  layer = layers.layer(0, batch=DEVICES, length=20)
  attention = dsa.make_attention(layer.config, indexer_loss=True, **WAYS[way])

  def loss(params, x, *, reduce=lambda total: total, devices=1):
    result = attention(params, x)
    total = jnp.sum(result.out**2) + result.indexer_loss / devices
    return reduce(total), result.selection.indices

  return layer, loss


def mesh_of(axis_type):
  return jax.make_mesh(
    (DEVICES,),
    ("data",),
    axis_types=(axis_type,),
    devices=jax.devices()[:DEVICES],
  )


def placed(layer, mesh):
  """The parameters on every device, x spread over them by rows."""
  return (
    jax.device_put(layer.params, jax.NamedSharding(mesh, P())),
    jax.device_put(layer.x, jax.NamedSharding(mesh, P("data"))),
  )


def mapped_gradient(loss, mesh):
  """Gradients and selection, each device working on its own rows."""
  summed = functools.partial(
    loss,
    reduce=lambda total: jax.lax.psum(total, "data"),
    devices=DEVICES,
  )
  return jax.shard_map(
    jax.grad(summed, argnums=(0, 1), has_aux=True),
    mesh=mesh,
    in_specs=(P(), P("data")),
    out_specs=((P(), P("data")), P("data")),
  )


@functools.cache
def on_one_device(way):
  layer, loss = setup(way)
  program = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
  return program(layer.params, layer.x)


class MeshTest(parameterized.TestCase):
  def assert_as_on_one_device(self, answer, way):
    (grads, indices), (wanted, wanted_indices) = answer, on_one_device(way)
    np.testing.assert_array_equal(indices, wanted_indices)
    for actual, expected in zip(
      jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True
    ):
      tolerances.assert_close_by_norm(actual, expected, 1e-5)

  @parameterized.parameters(
    ("gather", AxisType.Auto),
    ("gather", AxisType.Explicit),
    ("dense", AxisType.Auto),
  )
  def test_gradients_inside_shard_map(self, way, axis_type):
    layer, loss = setup(way)
    mesh = mesh_of(axis_type)
    with jax.set_mesh(mesh):
      answer = jax.jit(mapped_gradient(loss, mesh))(*placed(layer, mesh))
    self.assert_as_on_one_device(answer, way)

  @parameterized.parameters(*WAYS)
  def test_weight_gradients_cross_devices_once(self, way):
    layer, loss = setup(way)
    mesh = mesh_of(AxisType.Auto)
    gradient = mapped_gradient(loss, mesh)
    jaxpr = jax.make_jaxpr(gradient)(layer.params, layer.x)
    everywhere = names_of(equations(jaxpr.jaxpr))
    loops = [e for e in equations(jaxpr.jaxpr) if e.primitive.name == "scan"]
    in_loops = set().union(*(names_of(inner_equations(e)) for e in loops))
    self.assertContainsSubset({"psum_invariant"}, everywhere)
    self.assertContainsSubset({"dot_general"}, in_loops)
    self.assertEmpty([name for name in in_loops if "psum" in name])

  @parameterized.parameters(*WAYS)
  def test_explicit_axes(self, way):
    layer, loss = setup(way)
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
      params, x = placed(layer, mesh)
      program = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
      answer = program(params, x)
    self.assert_as_on_one_device(answer, way)
    # The rows stay where they are.
    self.assertEqual(answer[1].sharding.spec[0], "data")


def equations(jaxpr):
  """Every equation of a jaxpr, those of inner jaxprs included."""
  for eqn in jaxpr.eqns:
    yield eqn
    yield from inner_equations(eqn)


def inner_equations(eqn):
  for inner in jax.tree.leaves(eqn.params):
    if isinstance(inner, core.ClosedJaxpr):
      yield from equations(inner.jaxpr)
    elif isinstance(inner, core.Jaxpr):
      yield from equations(inner)


def names_of(equations):
  return {eqn.primitive.name for eqn in equations}


if __name__ == "__main__":
  absltest.main()
