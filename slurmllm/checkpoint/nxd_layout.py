"""What neuronx-distributed's files do not say of themselves: mesh, types, names; torch-free.

    nxd_layout.json                                       this record
    nxd/model/dp_rank_00_tp_rank_TT_pp_rank_PP.pt         name → the worker's part of a parameter
    nxd/optim/dp_rank_DD_tp_rank_TT_pp_rank_PP.pt         the optimizer's state, by number
    nxd/checkpoint, nxd/done                              NxD's own marks

The numbers count through the optimizer's parameters, which `names` lists in that order.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from slurmllm.records import Record

LAYOUT = "nxd_layout.json"
TAG = "nxd"  # NxD's word for the folder of one checkpoint


class NxdLayout(Record):
    """`nxd_layout.json` of a checkpoint that NxD wrote, or that was converted for it."""

    tensor: int = Field(description="tensor-parallel workers")
    pipeline: int = Field(description="stages")
    data: int = Field(description="data-parallel workers; each has a file of its own under zero")
    virtual_pipeline: int = Field(default=1, description="chunks of layers a stage")
    zero: bool = Field(description="ZeRO-1: the optimizer's state is shared out over `data`")
    optimizer_dtype: str = Field(description="of the moments, and of master weights: float32")
    dtype: str = Field(description="of the weights: bfloat16")
    trained: bool = Field(
        default=True, description="the optimizer's state is there; else the weights alone"
    )
    names: tuple[tuple[str, ...], ...] = Field(
        description="each stage's parameters in the optimizer's order, named as in the whole model"
    )


def model_file(tensor_rank: int, pipeline_rank: int) -> str:
    """Where a worker's weights lie in the checkpoint folder; replicas have one file."""
    return f"{TAG}/model/{_place(0, tensor_rank, pipeline_rank)}"


def optimizer_file(data_rank: int, tensor_rank: int, pipeline_rank: int) -> str:
    """Where a worker's share of the optimizer's state lies; without zero, `data_rank` is 0."""
    return f"{TAG}/optim/{_place(data_rank, tensor_rank, pipeline_rank)}"


def _place(data: int, tensor: int, pipeline: int) -> str:
    return f"dp_rank_{data:02d}_tp_rank_{tensor:02d}_pp_rank_{pipeline:02d}.pt"


def read_layout(directory: Path) -> NxdLayout | None:
    """The layout of a checkpoint folder; None where it is none of NxD's.

    Raises:
        StorageError: the file is damaged.
    """
    path = directory / LAYOUT
    return NxdLayout.load(path) if path.is_file() else None
