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
llama2_70b trn1 32 | 49.632 0.77159 13.309 2.8756 1.3229 13855 28.22 98.879 98.791 36
neox_20b trn1 4   | 13.314 3.5698 1.5918 1.2769 0.012064 9589.8 27.941 99.457 99.384 527
    slurm.spare_nodes=2
neox_20b trn1 16  | 211.84 57.117 25.469 7.7462 0.66176 9589.8 29.177 95.901 95.824 200
    t.global_batch=16384 checkpoint.every_steps=200
neox_20b trn1 4   | 15.745 4.5644 10.052 0 2.0554 9417.2 17.036 99.458 99.384 322
    p.pipeline=1 p.tensor=32 data.mask=document
llama2_7b trn1 128 | 1.1931 0.038579 0.13087 0 0.90287 11921 21.927 99.333 99.187 133
    checkpoint.asynchronous=true
gpt3_46b trn1 32  | 17.25 4.7237 1.1374 7.4896 0.75943 12388 19.545 92.12 90.334 64
    p.sequence=false slurm.time=2:00:00
llama2_13b trn1 4 | 62.467 0 6.2459 6.5695 0.0076112 1.419e+05 39.938 99.551 99.477 111
    p.virtual_pipeline=2 t.micro_batch=2 recompute=none
llama3_70b trn1 16 | 204.75 29.754 52.203 8.3112 0.96075 15857 28.052 98.924 98.844 17
    recompute=[core,mlp] watchdog.enabled=false
qwen3_8b trn1 4   | 2.1445 0.2242 0.12279 1.5657 0.0080717 44150 13.962 99.587 99.513 1910
    p.tensor=8 p.pipeline=4 recompute=[mlp,norm] t.precision=bf16_mixed
gpt3_1.3b trn1 1  | 25.557 0 0 0 0.062089 36636 48.863 99.76 99.687 525
    p.zero=0 t.precision=fp32 slurm.restart=none
gpt3_1.3b p5 8    | 0.31911 0.086937 0 0 0.090912 3293 30.231 99.605 99.514 7061
    p.zero=3 p.shard_nodes=2 t.micro_batch=2 recompute=full
gpt3_1.3b p4d 2   | 2.7744 0 0.22988 0 0.069546 12196 62.002 99.74 99.667 2581
    p.tensor=2 p.sequence=true t.micro_batch=4
llama3_8b p5 2    | 52.923 9.9421 10.832 0 0.11806 28526 41.57 99.622 99.549 177
    p.tensor=4 p.sequence=true t.micro_batch=2 data.mask=document recompute=[core,mlp]
llama3_8b p5 2    | 72.375 6.502 0 0 4.0265 91017 37.013 99.621 99.548 158
    p.tensor=1 t.micro_batch=1 data.mask=document t.compile=false recompute=selective p.zero=2
qwen3_8b p5 4     | 1.1992 0.13511 0 0.41985 0.030535 31472 24.426 99.587 99.513 4351
    p.pipeline=4 t.global_batch=64 t.micro_batch=1 recompute=[core,mlp,norm] t.compile=false
qwen3_8b p5 2     | 2.295 0 0.11438 0.29985 0.023639 65659 31.903 99.609 99.536 5247
    p.pipeline=2 p.tensor=2 t.compile=false t.micro_batch=2 t.global_batch=64 recompute=none
llama2_70b h100_ib 8 | 65.979 19.071 23.733 7.3166 0.3555 2.2367e+05 25.279 98.994 98.918 82
    p.tensor=8 p.pipeline=8 p.virtual_pipeline=2 t.micro_batch=1 recompute=full
gpt3_13b p5 16    | 2.5588 0 0 0 2.0779 32932 29.309 99.201 99.121 990
    p.zero=3 t.micro_batch=2 h.network_half=16 h.overlap=0.5
gpt3_125m p5 1    | 2.5187 0 0 0 0 13476 40.719 99.801 99.728 3588
    cluster.devices_per_node=1 t.precision=fp32 t.micro_batch=8
pythia_70m p5 1   | 2.711 0 0 0 0.014907 5795.9 26.69 99.747 99.674 1000
    cluster.devices_per_node=1 t.micro_batch=16 t.precision=bf16_mixed
tiny_llama local 2 | 0.13277 0 0 0 0.082231 57.368 36.52 22.754 10.846 20
    p.zero=3
tiny_gpt3 local 4 | 0.14717 0 0 0.034342 0.017 27.722 21.298 21.386 10.099 20
    p.pipeline=4 t.micro_batch=1 data.mask=document
tiny_neox local 4 | 0.069925 0 0.020062 0 0.026646 24.783 36.249 13.774 6.1902 20
    p.tensor=2 p.sequence=true t.precision=bf16_mixed
neox_20b trn1 3   | 7.6136 1.7849 0.7959 1.0858 0.70574 9667.5 23.037 99.382 99.277 1156
    p.pipeline=4 p.tensor=8 t.global_batch=96 p.zero=1 t.precision=bf16_mixed
llama2_7b p5 6    | 0.69963 0 0 0.34659 0.043671 58240 35.006 99.737 99.713 3753
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
