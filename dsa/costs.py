"""What attention over a selection takes on a device, by a model of three terms.

With pairs = T * S' keys that a dense form works on, S' what causal skipping
leaves of S, and T * K those that a gather works on:

    dense (MHA)    2 N (P + R + V) operations a pair, and 2 C N (P + V) for each
                   key, which a group of chunks expands to heads
    gather (MQA)   2 N (2 C + R) operations a pair, and C + R numbers copied
    both           N exponentials a pair

    seconds = operations / their rate + bytes / their rate
            + exponentials / their rate

The rates of the CPU were measured, on two cores, by the benchmark of attention;
what is compared is the ratio of two backends, which more cores leave alone.
Those of accelerators are their data sheets': no kernel reaches them, but two
backends miss them alike.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from dsa import streaming
from dsa.config import DSAConfig

Form = Literal["MHA", "MQA"]

_GIB = 1 << 30


class Rates(NamedTuple):
  """What a device does in a second.

  Attributes:
    operations: Of large matrix products in the inputs' dtype bfloat16.
    operations_float32: The same in float32.
    gathered_share: Share of these rates in products of one query's heads with
      its own keys.
    exponentials: Entries of a softmax.
    bytes: Copied.
    memory: Bytes that it has, 0 where that is not known.
  """

  operations: float
  operations_float32: float
  gathered_share: float
  exponentials: float
  bytes: float
  memory: int


# By the names that `jax.Device.device_kind` gives.
RATES: Mapping[str, Rates] = {
  "cpu": Rates(300e9, 300e9, 0.55, 0.25e9, 26e9, 0),
  "TPU v5 lite": Rates(197e12, 33e12, 0.5, 0.8e12, 819e9, 16 * _GIB),
  "TPU v5": Rates(459e12, 76e12, 0.5, 2e12, 2765e9, 95 * _GIB),
  "TPU v6 lite": Rates(918e12, 153e12, 0.5, 2e12, 1640e9, 32 * _GIB),
  "TPU7x": Rates(1153e12, 192e12, 0.5, 4e12, 3690e9, 96 * _GIB),
  "NVIDIA H100": Rates(989e12, 67e12, 0.5, 4e12, 3350e9, 80 * _GIB),
  "NVIDIA H200": Rates(989e12, 67e12, 0.5, 4e12, 4800e9, 141 * _GIB),
}

# What a kind is taken for that is not in the table, by how its name begins.
_FAMILIES: Mapping[str, str] = {
  "cpu": "cpu",
  "TPU": "TPU v5",
  "tpu": "TPU v5",
  "NVIDIA": "NVIDIA H100",
  "cuda": "NVIDIA H100",
  "gpu": "NVIDIA H100",
}

# The backends that may be chosen, by how a kind's name begins: on TPU tokamax
# skips blocks, elsewhere its cost is that of the definition.
_DENSE: Mapping[str, str] = {
  "cpu": "dot_product",
  "TPU": "tokamax_flash",
  "NVIDIA": "tokamax_flash",
}

# Bytes that a chunk's queries and outputs may take, and its logits and
# probabilities where there are some for every key.
_QUERY_BYTES, _LOGIT_BYTES = 64 << 20, 128 << 20
_SMALLEST_CHUNK, _LARGEST_CHUNK = 16, 512

# Fewer queries would leave most of a kernel's block of them empty.
_SMALLEST_DENSE_CHUNK = 128

Sizes = Mapping[str, int]


class Estimate(NamedTuple):
  """What a backend would take.

  Attributes:
    backend: Its name in `dsa.backends`.
    form: "MHA" expands heads, "MQA" absorbs the weights.
    query_chunk_size: Queries that attend at once.
    operations: Multiplies and adds.
    bytes: Copied from gathered rows.
    exponentials: Entries of softmaxes.
    seconds: By the rates of the device.
  """

  backend: str
  form: Form
  query_chunk_size: int
  operations: float
  bytes: float
  exponentials: float
  seconds: float


def layer_sizes(
  config: DSAConfig,
  *,
  batch: int,
  queries: int,
  keys: int,
  selected: int | None = None,
  heads: int | None = None,
) -> dict[str, int]:
  """The sizes of a layer's attention by their letters.

  Args:
    config: The sizes of the layer.
    batch: B.
    queries: T.
    keys: S.
    selected: K; min(index_topk, S) by default.
    heads: N, where a device has some of them; all by default.

  Returns:
    B, T, S, K, N, P, R, C and V.
  """
  return {
    "B": batch,
    "T": queries,
    "S": keys,
    "K": min(config.index_topk, keys) if selected is None else selected,
    "N": config.num_attention_heads if heads is None else heads,
    "P": config.qk_nope_head_dim,
    "R": config.qk_rope_head_dim,
    "C": config.kv_lora_rank,
    "V": config.v_head_dim,
  }


def known_kind(device_kind: str) -> str:
  """The entry of `RATES` that a device kind goes by.

  Args:
    device_kind: As `jax.Device.device_kind` says it, or a platform: "cpu",
      "tpu", "cuda" or "gpu".

  Returns:
    A key of `RATES`.

  Raises:
    ValueError: If neither the kind nor its family is known.
  """
  kinds = sorted(RATES, key=len, reverse=True)
  for kind in kinds:
    if device_kind.startswith(kind):
      return kind
  for beginning, kind in _FAMILIES.items():
    if device_kind.startswith(beginning):
      return kind
  raise ValueError(
    f"device_kind must begin with one of {sorted({*RATES, *_FAMILIES})}, got "
    f"{device_kind!r}"
  )


def query_chunk_size(
  sizes: Sizes, *, itemsize: int, reads_all_keys: bool
) -> int:
  """Queries that attend at once by default.

  Args:
    sizes: B, S, N, P, R, C and V.
    itemsize: Bytes of a number of the inputs.
    reads_all_keys: Whether logits of each query are held for every key.

  Returns:
    A power of two whose chunk fits a fixed number of bytes.
  """
  widths = 2 * (sizes["P"] + sizes["R"])
  widths += 2 * (sizes["C"] + sizes["R"]) + 2 * sizes["V"]
  rows = sizes["B"] * sizes["N"]
  fitting, smallest = (
    _QUERY_BYTES // (rows * widths * itemsize),
    _SMALLEST_CHUNK,
  )
  if reads_all_keys:
    smallest = _SMALLEST_DENSE_CHUNK
    fitting = min(fitting, _LOGIT_BYTES // (rows * 2 * sizes["S"] * 4))
  power = 1 << (max(fitting, 1).bit_length() - 1)
  return min(max(power, smallest), _LARGEST_CHUNK)


def estimates(
  sizes: Sizes, *, itemsize: int, causal: bool, device_kind: str
) -> tuple[Estimate, ...]:
  """What each backend would take that may be chosen on a device.

  Args:
    sizes: B, T, S, K, N, P, R, C and V.
    itemsize: Bytes of a number of the inputs: 2 or 4.
    causal: Whether queries 0..T-1 are attended in chunks that are given the
      keys up to them alone; or else at once.
    device_kind: What `known_kind` takes.

  Returns:
    The estimates, the fastest first.
  """
  kind = known_kind(device_kind)
  candidates = (
    _dense(sizes, itemsize, causal=causal, kind=kind),
    _gathered(sizes, itemsize, causal=causal, kind=kind),
  )
  return tuple(sorted(candidates, key=lambda estimate: estimate.seconds))


def _dense(sizes: Sizes, itemsize: int, *, causal: bool, kind: str) -> Estimate:
  heads, keys, queries = sizes["N"], sizes["S"], sizes["T"]
  chunk = query_chunk_size(sizes, itemsize=itemsize, reads_all_keys=True)
  chunk = min(chunk, queries) if causal else queries
  groups = streaming.causal_groups(-(-queries // chunk))
  keys_seen = keys * (groups + 1) / (2 * groups) if causal else keys
  entries = sizes["B"] * heads * queries * keys_seen
  width = sizes["P"] + sizes["R"] + sizes["V"]
  expanded = sizes["B"] * heads * keys_seen * groups
  expanding = 2 * sizes["C"] * (sizes["P"] + sizes["V"]) * expanded
  operations = 2 * width * entries + expanding
  rates = RATES[kind]
  return Estimate(
    backend=next(b for k, b in _DENSE.items() if kind.startswith(k)),
    form="MHA",
    query_chunk_size=chunk,
    operations=operations,
    bytes=0.0,
    exponentials=entries,
    seconds=operations / _operations_a_second(rates, itemsize)
    + entries / rates.exponentials,
  )


def _gathered(
  sizes: Sizes, itemsize: int, *, causal: bool, kind: str
) -> Estimate:
  chunk = query_chunk_size(sizes, itemsize=itemsize, reads_all_keys=False)
  pairs = sizes["B"] * sizes["T"] * sizes["K"]
  entries = pairs * sizes["N"]
  operations = 2 * (2 * sizes["C"] + sizes["R"]) * entries
  copied = pairs * (sizes["C"] + sizes["R"]) * itemsize
  rates = RATES[kind]
  rate = rates.gathered_share * _operations_a_second(rates, itemsize)
  return Estimate(
    backend="gather",
    form="MQA",
    query_chunk_size=min(chunk, sizes["T"]) if causal else sizes["T"],
    operations=operations,
    bytes=copied,
    exponentials=entries,
    seconds=operations / rate
    + copied / rates.bytes
    + entries / rates.exponentials,
  )


def _operations_a_second(rates: Rates, itemsize: int) -> float:
  return rates.operations if itemsize <= 2 else rates.operations_float32
