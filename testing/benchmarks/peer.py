"""Runs the same layer of the transformers package on torch, in its own process.

This library does not depend on torch: the program below is handed to a Python
that has it. Memory is what the process grew by while it ran.
"""

import dataclasses
import json
import subprocess
from typing import NamedTuple

import dsa

_PROGRAM = """
import inspect, json, resource, statistics, sys, time
import torch
from transformers import DeepseekV32Config
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as modeling

asked = json.loads(sys.argv[1])
config = DeepseekV32Config(**asked["config"])
config._attn_implementation = asked["implementation"]
torch.manual_seed(0)
layer = modeling.DeepseekV32Attention(config, layer_idx=0)
rotary = modeling.DeepseekV32RotaryEmbedding(config)
length = asked["seq_len"]
x = torch.randn(1, length, config.hidden_size)
positions = torch.arange(length)[None]
embeddings = rotary(x, positions)
mask = torch.full((length, length), torch.finfo(x.dtype).min).triu(1)
arguments = dict(
  hidden_states=x, position_embeddings=embeddings,
  attention_mask=mask[None, None], position_ids=positions,
)
accepted = inspect.signature(layer.forward).parameters
arguments = {k: v for k, v in arguments.items() if k in accepted}

def run():
  if not asked["gradient"]:
    with torch.no_grad():
      return layer(**arguments)[0]
  x.requires_grad_(True)
  layer.zero_grad()
  out = layer(**arguments)[0]
  out.sum().backward()
  return out

peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
run()
seconds = []
for _ in range(asked["runs"]):
  start = time.perf_counter()
  run()
  seconds.append(time.perf_counter() - start)
print(json.dumps(
  {"seconds": statistics.median(seconds), "peak_bytes": peak() - before}
))
"""


class PeerAnswer(NamedTuple):
  """Median seconds of a run, and by how many bytes the process grew."""

  seconds: float
  peak_bytes: int


def time_transformers(
  python: str,
  config: dsa.DSAConfig,
  *,
  seq_len: int,
  implementation: str,
  gradient: bool,
  runs: int,
) -> PeerAnswer:
  """Times transformers' DeepseekV32Attention.

  Args:
    python: An interpreter that has torch and transformers.
    config: The sizes.
    seq_len: T = S.
    implementation: "eager" or "sdpa".
    gradient: Whether to run backward too.
    runs: Timed runs, after one that is not.

  Returns:
    The median and the memory.

  Raises:
    RuntimeError: If the process failed; with the last lines that it wrote.
  """
  sizes = dataclasses.asdict(config)
  rope = sizes.pop("rope")
  for ours in (
    "latent_norm_eps",
    "index_k_norm_eps",
    "indexer_rope_interleave",
  ):
    del sizes[ours]
  asked = {
    "config": {
      **sizes,
      "num_key_value_heads": config.num_attention_heads,
      "rope_parameters": {
        "rope_type": "default",
        "rope_theta": rope["rope_theta"],
      },
    },
    "seq_len": seq_len,
    "implementation": implementation,
    "gradient": gradient,
    "runs": runs,
  }
  process = subprocess.run(
    [python, "-c", _PROGRAM, json.dumps(asked)],
    capture_output=True,
    text=True,
    check=False,
  )
  if process.returncode:
    last = "\n".join(process.stderr.strip().splitlines()[-3:])
    raise RuntimeError(f"{python} could not run transformers:\n{last}")
  return PeerAnswer(**json.loads(process.stdout.strip().splitlines()[-1]))
