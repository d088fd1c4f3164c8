"""The arguments that a run passes to the functions of neuronx-distributed (NxD); torch-free.

They have NxD's own names and plain values, as `submit --dry-run` prints them. A class or function
is given by its name, which `runtime.py` replaces with the object.
"""

from __future__ import annotations

from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.format import Json
from slurmllm.plan.mesh import Mesh
from slurmllm.plan.parameters import kv_copies

# Classes of `model.py`, by name. NxD's tracer does not trace into a module whose class name
# contains one of the leaf names.
BLOCK = "ParallelBlock"
CORE = "CoreAttention"
NORMS = ("LayerNorm", "RMSNorm", "OnePlusNorm", "VectorNorm")
LEAVES = (*NORMS, "VocabularyEmbedding", "Positions", "ParallelLoss")
# The sequence dimension of activations in `slurmllm.train.model`: [batch, seq, hidden].
SEQUENCE_DIMENSION = 1

_RECOMPUTED_CLASSES = {
    "core": [CORE],
    "mlp": ["FeedForward", "GatedFeedForward"],
    "norm": [*NORMS],
    "block": [BLOCK],
}


def dtype(precision: str) -> str:  # of weights and activations on the device
    return "float32" if precision == "fp32" else "bfloat16"


def optimizer_dtype(precision: str) -> str:
    """Return the dtype of the optimizer state and, with ZeRO-1, of the weights that it updates."""
    return "float32" if precision in ("fp32", "bf16_mixed") else "bfloat16"


def model_inputs(config: RunConfig) -> tuple[str, ...]:
    documents = ("positions",) if config.recipe.data.mask == "document" else ()
    return ("tokens", "labels", *documents)


def arguments(config: RunConfig, mesh: Mesh) -> Json:
    recipe = config.recipe
    parallel = recipe.parallel
    train = recipe.train
    optim = recipe.optim
    recomputed = [name for block in train.recomputed for name in _RECOMPUTED_CLASSES[block]]
    zero = parallel.zero > 0
    master = train.precision == "bf16_mixed"
    return {
        "neuronx_distributed_config": {
            "tensor_parallel_size": mesh.tensor,
            "pipeline_parallel_size": mesh.pipeline,
            "sequence_parallel": parallel.sequence,
            "pipeline_config": _pipeline(config, mesh) if mesh.pipeline > 1 else None,
            # `shards.py` computes the gradient norm and clips: NxD does both wrong if key and value
            # heads are replicated, and its ZeRO-1 always clips at 1.
            "optimizer_config": {"zero_one_enabled": zero, "grad_clipping": False},
            "activation_checkpoint_config": recomputed or None,
            "model_init_config": {"meta_device_init": True, "param_init_fn": "initialize"},
            # With master weights in the checkpoint, a resume restores the fp32 weights.
            "mixed_precision_config": {
                "use_master_weights": master,
                "use_fp32_grad_acc": master,
                "use_master_weights_in_ckpt": master,
            },
        },
        "initialize_parallel_optimizer": {
            "optimizer_class": "torch.optim.AdamW",
            "lr": optim.lr,
            "betas": list(optim.betas),
            "eps": optim.eps,
            "weight_decay": optim.weight_decay,
            # Step and learning rate become inputs of the compiled graph, not constants.
            "capturable": config.cluster.device == "neuron",
            **({"optimizer_dtype": optimizer_dtype(train.precision)} if zero else {}),
        },
        "parallel_layers": {
            "dtype": dtype(train.precision),
            # With NxD's default, fp32, the reduced gradient of a bf16 layer is lost.
            "reduce_dtype": dtype(train.precision),
            "sequence_parallel_enabled": parallel.sequence,
            "sequence_dimension": SEQUENCE_DIMENSION if parallel.sequence else None,
            "kv_size_multiplier": kv_copies(recipe.model, mesh.tensor),
        },
        "save_checkpoint": {
            # Always in a thread, so that a failed write can be reported to all workers. Training
            # waits for it if `checkpoint.asynchronous` is false.
            "async_save": True,
            "num_kept_ckpts": None,
        },
    }


def _pipeline(config: RunConfig, mesh: Mesh) -> Json:
    layers = config.recipe.model.num_layers // mesh.chunks
    return {
        "transformer_layer_cls": BLOCK,
        "num_microbatches": mesh.accumulation,
        "virtual_pipeline_size": mesh.virtual_pipeline,
        "pipeline_cuts": [f"layers.{layers * chunk - 1}" for chunk in range(1, mesh.chunks)],
        "input_names": list(model_inputs(config)),
        "output_loss_value_spec": True,
        "leaf_module_cls": list(LEAVES),
        "use_optimizer_wrapper": True,
        "use_zero1_optimizer": config.recipe.parallel.zero > 0,
        # Copying the loss to the host would block every step until the device has finished.
        "return_loss_on_cpu": False,
    }
