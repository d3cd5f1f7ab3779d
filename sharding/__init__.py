"""Meshes, logical-axis rules, pipeline schedules and transfers between meshes."""

from sharding.collectives import Collective, collectives, sent_bytes
from sharding.expert import exchange, gather_tokens, own_tokens
from sharding.mesh import (
    AXES,
    DATA,
    EXPERT,
    PIPELINE,
    TENSOR,
    Device,
    MeshSpec,
    make_mesh,
    replicate,
    split_devices,
)
from sharding.pipeline import Cuts, Placed, Schedule, spread_layers, stage_counts
from sharding.rules import Rules, check_experts, check_tensor, partition_spec
from sharding.transfer import InFlight, Side, TransferPlan

__all__ = [
    "Collective",
    "collectives",
    "sent_bytes",
    "AXES",
    "DATA",
    "EXPERT",
    "PIPELINE",
    "TENSOR",
    "Cuts",
    "Device",
    "InFlight",
    "MeshSpec",
    "Placed",
    "Rules",
    "Schedule",
    "Side",
    "TransferPlan",
    "check_experts",
    "check_tensor",
    "exchange",
    "gather_tokens",
    "make_mesh",
    "own_tokens",
    "partition_spec",
    "replicate",
    "split_devices",
    "spread_layers",
    "stage_counts",
]
