"""Says which backend, form, chunk and schedule suit a layer, and why.

    plan = dsa.plan(config, dsa.PlanShapes(batch=1, tokens=32768), "TPU v5p")
    print(plan)
    attention = dsa.make_attention(config, backend=plan.make_backend(), ...)

A pure function of shapes and of the table in `dsa.costs`: nothing is measured,
and no device is asked. `dsa.backends.auto()` makes the same choice of backend
by itself.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp

from dsa import backends, costs, mla
from dsa.checks import check_count
from dsa.config import DSAConfig

Schedule = Literal["none", "all_gather"]


class PlanShapes(NamedTuple):
  """What a layer is run on.

  Attributes:
    batch: B.
    tokens: T of the whole sequence.
    keys: S, where queries attend to more than themselves, as in decoding; T by
      default.
    dtype: Of the hidden states.
    context_devices: Devices that share the queries of a sequence.
    tensor_devices: Devices that share the heads.
  """

  batch: int
  tokens: int
  keys: int | None = None
  dtype: str = "bfloat16"
  context_devices: int = 1
  tensor_devices: int = 1


class Plan(NamedTuple):
  """What suits a layer.

  Attributes:
    backend: A name in `dsa.backends`.
    form: "MHA" expands heads, "MQA" absorbs the weights.
    query_chunk_size: Queries that attend at once.
    schedule: How devices that share queries get all keys.
    device_kind: The entry of `dsa.costs.RATES` that was gone by.
    estimates: What each candidate would take, the fastest first.
    reasons: A sentence for each choice.
  """

  backend: str
  form: costs.Form
  query_chunk_size: int
  schedule: Schedule
  device_kind: str
  estimates: tuple[costs.Estimate, ...]
  reasons: tuple[str, ...]

  def make_backend(self) -> mla.Backend:
    """The backend of the plan, as `make_attention` takes it."""
    backend: mla.Backend = getattr(backends, self.backend)()
    return backend

  def __str__(self) -> str:
    choice = (
      f"{self.backend} ({self.form}), {self.query_chunk_size} queries at once, "
      f"schedule {self.schedule}, on {self.device_kind}"
    )
    return "\n".join((choice, *(f"  {reason}" for reason in self.reasons)))


def plan(config: DSAConfig, shapes: PlanShapes, device_kind: str) -> Plan:
  """Chooses backend, form, chunk size and schedule.

  Args:
    config: The sizes.
    shapes: What the layer is run on.
    device_kind: As `jax.Device.device_kind` says it, or "cpu", "tpu", "cuda".

  Returns:
    The plan; `print` explains it.

  Raises:
    ValueError: If the device kind is unknown, or a size is below 1 or does not
      divide over the devices.
    TypeError: If a size is not an integer.
  """
  sizes, itemsize = _sizes(config, shapes)
  kind = costs.known_kind(device_kind)
  found = costs.estimates(
    sizes,
    itemsize=itemsize,
    causal=shapes.keys is None,
    device_kind=kind,
  )
  schedule, why_schedule = _schedule(config, shapes, itemsize, kind)
  best = found[0]
  return Plan(
    backend=best.backend,
    form=best.form,
    query_chunk_size=best.query_chunk_size,
    schedule=schedule,
    device_kind=kind,
    estimates=found,
    reasons=(
      *(_describe(estimate) for estimate in found),
      f"{best.query_chunk_size} queries of {sizes['N']} heads fit what a chunk "
      "may hold",
      why_schedule,
    ),
  )


def _describe(estimate: costs.Estimate) -> str:
  return (
    f"{estimate.backend} ({estimate.form}) takes about "
    f"{1e3 * estimate.seconds:.3g} ms: {estimate.operations:.3g} operations, "
    f"{estimate.exponentials:.3g} exponentials, {estimate.bytes:.3g} bytes "
    "gathered"
  )


def _sizes(config: DSAConfig, shapes: PlanShapes) -> tuple[dict[str, int], int]:
  """Sizes by letter of what one device does, and the bytes of a number."""
  for name in ("batch", "tokens", "context_devices", "tensor_devices"):
    check_count(name, getattr(shapes, name))
  keys = shapes.tokens
  if shapes.keys is not None:
    keys = check_count("keys", shapes.keys)
  heads = config.num_attention_heads
  for name, size, devices in (
    ("tokens", shapes.tokens, shapes.context_devices),
    ("num_attention_heads", heads, shapes.tensor_devices),
  ):
    if size % devices:
      raise ValueError(f"{name} must divide over {devices} devices, got {size}")
  sizes = costs.layer_sizes(
    config,
    batch=shapes.batch,
    queries=shapes.tokens // shapes.context_devices,
    keys=keys,
    heads=heads // shapes.tensor_devices,
  )
  return sizes, jnp.dtype(shapes.dtype).itemsize


def _schedule(
  config: DSAConfig, shapes: PlanShapes, itemsize: int, kind: str
) -> tuple[Schedule, str]:
  """How devices that share queries get all keys, and why."""
  if shapes.context_devices == 1:
    return "none", "one device has all tokens of a sequence"
  width = config.kv_lora_rank + config.qk_rope_head_dim + config.index_head_dim
  size = shapes.batch * (shapes.keys or shapes.tokens) * width * itemsize
  memory = costs.RATES[kind].memory
  sentence = f"all keys, {width} numbers a token, take {size / 2**30:.3g} GiB"
  if memory:
    sentence += f" of {memory / 2**30:.0f} GiB"
  return "all_gather", f"{sentence} on each device"
