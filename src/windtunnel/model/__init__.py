"""Models: read from a Hugging Face config.json; their parameters, bytes and FLOPs."""

from windtunnel.model.catalogue import load_model, model_names
from windtunnel.model.config import read_config
from windtunnel.model.families.compressed import CompressedAttention
from windtunnel.model.layers import MLA, MLP, Attention, Layer, LinearAttention, MoE
from windtunnel.model.quantization import Quantization
from windtunnel.model.selective_scan import SelectiveScan
from windtunnel.model.spec import Model
from windtunnel.model.state_space import StateSpace

__all__ = [
    "MLA",
    "MLP",
    "Attention",
    "CompressedAttention",
    "Layer",
    "LinearAttention",
    "MoE",
    "Model",
    "Quantization",
    "SelectiveScan",
    "StateSpace",
    "load_model",
    "model_names",
    "read_config",
]
