"""Configuration of a DSA layer, in the names of Hugging Face's config.json.

A `DSAConfig` says the sizes of one attention layer and how its positions turn;
it is hashable, so it can be a static argument of `jax.jit`. The softmax scale
follows from it: with P, R the widths of a query's two parts and YaRN's
m = 0.1 * mscale_all_dim * ln(factor) + 1,

    scale = (P + R)^-1/2 * m^2        (m = 1 without YaRN)

Sources: DeepSeek-V3.2 (arXiv 2512.02556), YaRN (arXiv 2309.00071, section 3.4).
"""

import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import Any, Literal, get_args

from dsa import config_hf

RopeType = Literal["default", "yarn"]

# fp8 blocks with float32 scales, or with scales rounded up to powers of two.
Quantization = Literal["none", "fp8_float32", "fp8_ue8m0"]

# A full layer selects keys; a shared one takes what the last full one selected.
IndexerType = Literal["full", "shared"]


def _check_positive(**sizes: int) -> None:
  for name, value in sizes.items():
    is_integer = isinstance(value, numbers.Integral)
    if not is_integer or isinstance(value, bool) or value < 1:
      raise ValueError(
        f"{name} must be an integer of at least 1, got {value!r}"
      )


def _check_positive_number(**values: float) -> None:
  for name, value in values.items():
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
      raise ValueError(f"{name} must be a number above 0, got {value!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
  """How rotary position embeddings turn, with or without YaRN.

  Attributes:
    rope_theta: Base of the frequencies theta^(-2i/R).
    rope_type: "default" for plain RoPE, "yarn" to stretch it by `factor`.
    factor: How many times the trained length is stretched (YaRN).
    original_max_position_embeddings: The length trained on before stretching,
      in tokens (YaRN). Not the longer `max_position_embeddings`.
    beta_fast: Rotations over the original length above which a frequency is
      kept as it is (YaRN).
    beta_slow: Rotations below which a frequency is divided by `factor` (YaRN).
    mscale_all_dim: Weight of the logarithmic term in the softmax scale (YaRN);
      0 leaves the scale alone.
  """

  rope_theta: float = 10000.0
  rope_type: RopeType = "default"
  factor: float = 1.0
  original_max_position_embeddings: int = 4096
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  mscale_all_dim: float = 0.0

  def __post_init__(self) -> None:
    if self.rope_type not in get_args(RopeType):
      raise ValueError(
        f"rope_type must be one of {get_args(RopeType)}, got {self.rope_type!r}"
      )
    _check_positive(
      original_max_position_embeddings=self.original_max_position_embeddings
    )
    _check_positive_number(
      rope_theta=self.rope_theta,
      factor=self.factor,
      beta_fast=self.beta_fast,
      beta_slow=self.beta_slow,
    )
    if self.rope_theta <= 1:
      raise ValueError(f"rope_theta must be above 1, got {self.rope_theta!r}")
    if self.factor < 1:
      raise ValueError(f"factor must be at least 1, got {self.factor!r}")
    if self.beta_fast < self.beta_slow:
      raise ValueError(
        "beta_fast must be at least beta_slow, got "
        f"beta_fast={self.beta_fast!r} and beta_slow={self.beta_slow!r}"
      )

  @property
  def mscale(self) -> float:
    """m of the softmax scale: 1 without YaRN, 1.368888 for DeepSeek-V3.2."""
    if self.rope_type == "default":
      return 1.0
    return 0.1 * self.mscale_all_dim * math.log(self.factor) + 1.0

  @classmethod
  def from_hf(cls, config_json: Mapping[str, Any]) -> "RopeConfig":
    """Reads either spelling of RoPE in a config.json.

    Args:
      config_json: The whole dictionary: `rope_parameters` as newer releases
        write it, or `rope_theta` beside `rope_scaling` (or null) as older ones.

    Returns:
      The RoPE configuration.

    Raises:
      ValueError: If a key that YaRN needs is missing, the type is unknown, or
        cos and sin would be scaled, which no DSA model does.
    """
    return cls(**config_hf.rope_fields(config_json))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSAConfig:
  """Sizes and constants of one DSA layer.

  Attributes:
    hidden_size: E, width of the residual stream.
    num_hidden_layers: Layers in the model; one layer's functions ignore it.
    num_attention_heads: N, attention heads.
    q_lora_rank: L, width of the query latent.
    kv_lora_rank: C, width of the key-value latent.
    qk_nope_head_dim: P, part of a query without position.
    qk_rope_head_dim: R, part that RoPE turns, in MLA and in the indexer.
    v_head_dim: V, width of a value.
    index_n_heads: I, index heads.
    index_head_dim: D, width of an index query or key.
    index_topk: Keys that a query selects at most.
    rope: How positions turn.
    rms_norm_eps: Epsilon of the decoder's own RMSNorms, outside this layer.
    latent_norm_eps: Epsilon of the RMSNorms of the two latents. Checkpoints do
      not state it: transformers takes 1e-6 also where rms_norm_eps is 1e-5.
    index_k_norm_eps: Epsilon of the index key's LayerNorm.
    indexer_rope_interleave: True where the indexer pairs dims (2i, 2i + 1), as
      GLM-5 does; False where it pairs (i, i + R/2), as DeepSeek-V3.2 does.
    indexer_types: For each layer of the model, "full" where it selects keys
      itself and "shared" where it is given what the last full layer before it
      selected. None where all are full; entries past the last layer are idle.
    index_quantization: How index queries and keys are scored and cached: as
      they are, or in fp8 after a Hadamard rotation. For inference alone; D must
      then be a power of two of at most 128.
    kv_quantization: How the latent is cached: as it is, or in fp8 blocks of
      128. It changes nothing outside the cache.
  """

  hidden_size: int
  num_hidden_layers: int
  num_attention_heads: int
  q_lora_rank: int
  kv_lora_rank: int
  qk_nope_head_dim: int
  qk_rope_head_dim: int
  v_head_dim: int
  index_n_heads: int
  index_head_dim: int
  index_topk: int
  rope: RopeConfig
  rms_norm_eps: float = 1e-6
  latent_norm_eps: float = 1e-6
  index_k_norm_eps: float = 1e-6
  indexer_rope_interleave: bool = False
  indexer_types: tuple[IndexerType, ...] | None = None
  index_quantization: Quantization = "none"
  kv_quantization: Quantization = "none"

  def __post_init__(self) -> None:
    _check_positive(**{name: getattr(self, name) for name in config_hf.SIZES})
    _check_positive_number(
      rms_norm_eps=self.rms_norm_eps,
      latent_norm_eps=self.latent_norm_eps,
      index_k_norm_eps=self.index_k_norm_eps,
    )
    if self.qk_rope_head_dim % 2:
      raise ValueError(
        "qk_rope_head_dim must be even, since RoPE turns pairs, got "
        f"{self.qk_rope_head_dim}"
      )
    if self.index_head_dim < self.qk_rope_head_dim:
      raise ValueError(
        "index_head_dim must be at least qk_rope_head_dim, got "
        f"{self.index_head_dim} and {self.qk_rope_head_dim}"
      )
    if self.indexer_types is not None:
      self._check_indexer_types(self.indexer_types)
    for name in ("index_quantization", "kv_quantization"):
      if getattr(self, name) not in get_args(Quantization):
        raise ValueError(
          f"{name} must be one of {get_args(Quantization)}, got "
          f"{getattr(self, name)!r}"
        )
    if self.index_quantization != "none":
      self._check_rotatable()

  def _check_indexer_types(self, types: tuple[IndexerType, ...]) -> None:
    known = get_args(IndexerType)
    if not isinstance(types, tuple) or any(t not in known for t in types):
      raise ValueError(
        f"indexer_types must be a tuple of {known}, got {types!r}"
      )
    if len(types) < self.num_hidden_layers:
      raise ValueError(
        "indexer_types must say each of the num_hidden_layers="
        f"{self.num_hidden_layers} layers, got {len(types)} entries"
      )
    if types[0] != "full":
      raise ValueError(
        "indexer_types must begin with 'full', as no layer before the first "
        f"selects keys, got {types[0]!r}"
      )

  def _check_rotatable(self) -> None:
    width = self.index_head_dim
    if width > 128 or width & (width - 1):
      raise ValueError(
        "index_head_dim must be a power of two of at most 128 under "
        f"index_quantization={self.index_quantization!r}, got {width}"
      )

  def has_indexer(self, layer: int) -> bool:
    """Whether a layer holds an indexer, or is given its selection.

    Args:
      layer: From 0 on.

    Returns:
      False for a "shared" layer: its `params.indexer` is None, and it takes the
      selection of the last layer before it for which this is True.

    Raises:
      ValueError: If there is no such layer.
    """
    if not 0 <= layer < self.num_hidden_layers:
      raise ValueError(
        f"layer must be at least 0 and below num_hidden_layers="
        f"{self.num_hidden_layers}, got {layer}"
      )
    return self.indexer_types is None or self.indexer_types[layer] == "full"

  @property
  def softmax_scale(self) -> float:
    """(P + R)^-1/2 * m^2: 0.1352338 for DeepSeek-V3.2."""
    width = self.qk_nope_head_dim + self.qk_rope_head_dim
    return width**-0.5 * self.rope.mscale**2

  @classmethod
  def from_hf(cls, config_json: Mapping[str, Any]) -> "DSAConfig":
    """Reads the config.json of a DeepSeek-V3.2(-Exp) or GLM-5 checkpoint.

    Args:
      config_json: The parsed dictionary. `model_type` decides the layout of the
        indexer's RoPE, unless `indexer_rope_interleave` says it. Which layers
        share a selection stands in `indexer_types`, or follows from
        `index_topk_pattern`, or from `index_topk_freq` and
        `index_skip_topk_offset`, as in transformers' GlmMoeDsaConfig.

    Returns:
      The configuration; every size comes from the checkpoint, none is guessed.

    Raises:
      TypeError: If `config_json` is not a dictionary.
      ValueError: If a size is missing or the model needs what DSA has not
        (another model type, attention biases, a halves layout in MLA).
    """
    return cls(
      **config_hf.layer_fields(config_json),
      rope=RopeConfig.from_hf(config_json),
    )


def deepseek_v32() -> DSAConfig:
  """DeepSeek-V3.2, 671B parameters in 61 layers (arXiv 2512.02556)."""
  return DSAConfig(
    hidden_size=7168,
    num_hidden_layers=61,
    num_attention_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    index_n_heads=64,
    index_head_dim=128,
    index_topk=2048,
    rope=RopeConfig(
      rope_theta=10000.0,
      rope_type="yarn",
      factor=40.0,
      original_max_position_embeddings=4096,
      beta_fast=32.0,
      beta_slow=1.0,
      mscale_all_dim=1.0,
    ),
    rms_norm_eps=1e-6,
    indexer_rope_interleave=False,
  )


def glm_5() -> DSAConfig:
  """GLM-5, 744B parameters in 78 layers: plain RoPE, interleaved indexer."""
  return DSAConfig(
    hidden_size=6144,
    num_hidden_layers=78,
    num_attention_heads=64,
    q_lora_rank=2048,
    kv_lora_rank=512,
    qk_nope_head_dim=192,
    qk_rope_head_dim=64,
    v_head_dim=256,
    index_n_heads=32,
    index_head_dim=128,
    index_topk=2048,
    rope=RopeConfig(rope_theta=1000000.0),
    rms_norm_eps=1e-5,
    indexer_rope_interleave=True,
    indexer_types=("full",) * 78,
  )
