"""Predictions of layouts that use every part of the model: a change of it shows here in numbers."""

import re

import pytest

from slurmllm.core.config.resolve import resolve
from slurmllm.plan.lost_time import lost_time
from slurmllm.plan.mesh import make_mesh
from slurmllm.plan.search import predict

# Recipe, profile, nodes | seconds of a step: compute and optimizer, recompute, tensor, bubble and
# transfer, data and overhead; MiB of the fullest device; MFU, productive share of node hours and of
# wall time, %; steps from checkpoint to checkpoint. Below, what --set changes.
SHORT = {"p.": "parallel.", "t.": "train.", "h.": "cluster.hardware."}
SHORT |= {"recompute": "train.activation_checkpointing"}
FIGURES = """
llama2_70b trn1 32 | 51.072 0.60915 11.834 2.8786 1.3229 13855 28.301 98.879 98.791 36
neox_20b trn1 4   | 13.202 3.574 1.6545 1.2785 0.012084 9589.8 28.003 99.457 99.384 528
    slurm.spare_nodes=2
neox_20b trn1 16  | 210.11 57.185 26.472 7.7786 0.66184 9589.8 29.238 95.903 95.827 200
    t.global_batch=16384 checkpoint.every_steps=200
neox_20b trn1 4   | 17.19 5.0746 7.854 0 2.0554 9417.2 17.165 99.459 99.385 324
    p.pipeline=1 p.tensor=32 data.mask=document
llama2_7b trn1 128 | 1.1697 0.030457 0.13489 0 0.89724 11921 22.253 99.333 99.187 135
    checkpoint.asynchronous=true
gpt3_46b trn1 32  | 16.698 4.5914 1.1723 7.4267 0.7595 12388 20 92.12 90.334 65
    p.sequence=false slurm.time=2:00:00
llama2_13b trn1 4 | 58.618 0 6.3284 6.5369 0.0076308 1.419e+05 42.06 99.551 99.477 117
    p.virtual_pipeline=2 t.micro_batch=2 recompute=none
llama3_70b trn1 16 | 203.9 27.421 48.969 8.2702 0.96078 15857 28.678 98.923 98.843 17
    recompute=[core,mlp] watchdog.enabled=false
qwen3_8b trn1 4   | 2.0589 0.2143 0.12656 1.5461 0.0080913 44150 14.355 99.587 99.513 1964
    p.tensor=8 p.pipeline=4 recompute=[mlp,norm] t.precision=bf16_mixed
gpt3_1.3b trn1 1  | 22.721 0 0 0 0.061979 36636 54.946 99.76 99.687 590
    p.zero=0 t.precision=fp32 slurm.restart=none
gpt3_1.3b p5 8    | 0.34316 0.094493 0 0 0.12064 3293 26.909 99.621 99.54 6285
    p.zero=3 p.shard_nodes=2 t.micro_batch=2 recompute=full
gpt3_1.3b p4d 2   | 2.9262 0 0.25058 0 0.075751 12196 58.596 99.74 99.667 2440
    p.tensor=2 p.sequence=true t.micro_batch=4
llama3_8b p5 2    | 54.398 9.9634 11.199 0 0.12306 28526 40.544 99.622 99.548 173
    p.tensor=4 p.sequence=true t.micro_batch=2 data.mask=document recompute=[core,mlp]
llama3_8b p5 2    | 72.406 6.502 0 0 4.2192 91017 36.913 99.622 99.549 157
    p.tensor=1 t.micro_batch=1 data.mask=document t.compile=false recompute=selective p.zero=2
qwen3_8b p5 4     | 1.2238 0.13767 0 0.43063 0.030648 31472 23.916 99.587 99.513 4260
    p.pipeline=4 t.global_batch=64 t.micro_batch=1 recompute=[core,mlp,norm] t.compile=false
qwen3_8b p5 2     | 2.3225 0 0.1222 0.30617 0.023784 65659 31.422 99.609 99.536 5168
    p.pipeline=2 p.tensor=2 t.compile=false t.micro_batch=2 t.global_batch=64 recompute=none
llama2_70b h100_ib 8 | 68.682 19.949 24.521 7.6847 0.36971 2.2367e+05 24.289 98.993 98.917 79
    p.tensor=8 p.pipeline=8 p.virtual_pipeline=2 t.micro_batch=1 recompute=full
gpt3_13b p5 16    | 2.5988 0 0 0 2.1112 32932 28.853 99.201 99.121 975
    p.zero=3 t.micro_batch=2 h.network_half=16 h.overlap=0.5
gpt3_125m p5 1    | 2.8522 0 0 0 0 13476 35.957 99.801 99.728 3169
    cluster.devices_per_node=1 t.precision=fp32 t.micro_batch=8
pythia_70m p5 1   | 3.0275 0 0 0 0.014907 5795.9 23.913 99.759 99.686 1000
    cluster.devices_per_node=1 t.micro_batch=16 t.precision=bf16_mixed
tiny_llama local 2 | 0.13277 0 0 0 0.082231 57.368 36.52 22.754 10.846 20
    p.zero=3
tiny_gpt3 local 4 | 0.14717 0 0 0.034342 0.017 27.722 21.298 21.386 10.099 20
    p.pipeline=4 t.micro_batch=1 data.mask=document
tiny_neox local 4 | 0.069925 0 0.020062 0 0.026646 24.783 36.249 13.774 6.1902 20
    p.tensor=2 p.sequence=true t.precision=bf16_mixed
neox_20b trn1 3   | 7.5099 1.787 0.82725 1.0823 0.7058 9667.5 23.18 99.379 99.274 1163
    p.pipeline=4 p.tensor=8 t.global_batch=96 p.zero=1 t.precision=bf16_mixed
llama2_7b p5 6    | 0.70141 0 0 0.34811 0.047099 58240 34.792 99.737 99.714 3730
    p.pipeline=2 p.tensor=1 t.global_batch=96 t.micro_batch=2 h.part_of_node=0.5
    h.operator_us=3000 slurm.spare_nodes=1 slurm.time=14-0
"""


@pytest.mark.parametrize("case", FIGURES.replace("\n    ", " | ").strip().splitlines())
def test_a_layout_s_figures(case: str) -> None:
    place, figures, *settings = case.split(" | ")
    recipe, cluster, nodes = place.split()
    overrides = " ".join(settings).split()
    for short, name in SHORT.items():
        overrides = [re.sub(rf"^{re.escape(short)}", name, setting) for setting in overrides]
    config = resolve(recipe, cluster, overrides)
    layout = predict(config, make_mesh(config, int(nodes)))
    step, lost = layout.step, lost_time(config, int(nodes), layout.step.total)
    times = [step.compute + step.optimizer, step.recompute, step.tensor]
    times += [step.bubble + step.transfer, step.data + step.overhead]
    shares = layout.mfu, lost.effective, lost.goodput
    predicted = [*times, layout.memory.peak / 2**20, *(100 * x for x in shares)]
    expected = [float(figure) for figure in figures.split()]
    assert [*predicted, lost.interval_steps] == pytest.approx(expected, rel=1e-4)
