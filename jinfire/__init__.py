"""Pure-JAX LLM inference with prefill and decode on separate meshes."""

from jinfire.checkpoints import load_tokenizer, open_checkpoint
from jinfire.config import EngineConfig, ModelConfig, Placement
from jinfire.engine import Engine
from jinfire.errors import (
    CheckpointMismatch,
    EmptyPrompt,
    EngineFailed,
    OutOfPages,
    RequestTooLong,
    TransferFailed,
    UnknownToken,
    UnsupportedConfig,
)
from jinfire.fetch import fetch
from jinfire.metrics import DEFINITIONS, EventLog, RequestMetrics, request_metrics, summary
from jinfire.model import Model
from jinfire.planner.gpus import GPUS
from jinfire.planner.layouts import Fitting, Plan
from jinfire.planner.plan import plan, plan_json
from jinfire.request import (
    FinishReason,
    RequestOutput,
    SamplingParams,
    TokenEvent,
    TokenLogprobs,
)
from jinfire.tokenizer import Tokenizer
from jinfire.training import Routing, TrainableModel
from jinfire.unweight.codec import decode as unweight_decode
from jinfire.unweight.codec import encode as unweight_encode
from jinfire.unweight.compress import compress
from jinfire.unweight.decompress import decompress
from jinfire.unweight.describe import describe_compressed
from jinfire.unweight.policy import (
    VARIANTS,
    Choice,
    PhasePolicies,
    UnweightPolicy,
    read_policies,
    write_policies,
)
from jinfire.unweight.verify import verify_compressed
from pallas_kernels import ToolchainMissing, UnweightOptions
from pallas_kernels import unweight_encode as unweight_reference_encode
from sharding import MeshSpec

__version__ = "0.1.0"

__all__ = [
    "DEFINITIONS",
    "GPUS",
    "VARIANTS",
    "CheckpointMismatch",
    "Choice",
    "EmptyPrompt",
    "Engine",
    "EngineConfig",
    "EngineFailed",
    "EventLog",
    "FinishReason",
    "Fitting",
    "MeshSpec",
    "Model",
    "ModelConfig",
    "OutOfPages",
    "PhasePolicies",
    "Placement",
    "Plan",
    "RequestMetrics",
    "RequestOutput",
    "RequestTooLong",
    "Routing",
    "SamplingParams",
    "TokenEvent",
    "TokenLogprobs",
    "Tokenizer",
    "ToolchainMissing",
    "TrainableModel",
    "TransferFailed",
    "UnknownToken",
    "UnsupportedConfig",
    "UnweightOptions",
    "UnweightPolicy",
    "compress",
    "decompress",
    "describe_compressed",
    "fetch",
    "load_tokenizer",
    "open_checkpoint",
    "plan",
    "plan_json",
    "read_policies",
    "request_metrics",
    "summary",
    "unweight_decode",
    "unweight_encode",
    "unweight_reference_encode",
    "verify_compressed",
    "write_policies",
]
