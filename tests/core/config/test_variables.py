"""Variables of recipes and profiles: those that are reserved, those that load code, secrets."""

import os
from pathlib import Path

import pytest

from slurmllm.core.config.load import load, load_leniently, save
from slurmllm.core.config.resolve import change, clusters_dir, recipes_dir, resolve
from slurmllm.core.config.variables import is_secret
from slurmllm.core.errors import ConfigError
from slurmllm.core.run.rundir import RunDir

CANARY = "hf_cAnArY"


def recipe_with(folder: Path, *lines: str) -> str:
    path = folder / "mine.yaml"
    text = (recipes_dir() / "tiny_neox.yaml").read_text()
    path.write_text("\n".join([text, "env:", *(f"  {line}" for line in lines)]) + "\n")
    return str(path)


@pytest.mark.parametrize("name", ["SLURMLLM_RUN", "SLURM_JOB_ID", "LOCAL_RANK", "MASTER_PORT"])
def test_reserved_names(name: str, tmp_path: Path) -> None:
    for arguments in (
        ("tiny_neox", "local", [f"env.{name}=/tmp/x"]),
        ("tiny_neox", "local", [f"cluster.env.{name}=/tmp/x"]),
        (recipe_with(tmp_path, f"{name}: /tmp/x"), "local", []),
    ):
        with pytest.raises(ConfigError) as error:
            resolve(*arguments)
        (fault,) = error.value.faults
        assert f"env.{name}" in fault
        assert "reserved: slurmllm, Slurm or the launcher set it" in fault


REFUSED = """
LD_PRELOAD LD_LIBRARY_PATH PYTHONPATH PATH BASH_ENV CXX TORCHINDUCTOR_CACHE_DIR HF_HOME OPENSSL_CONF
INTEL_LIBITTNOTIFY64 DEPENDENCIES_OUTPUT SUNPRO_DEPENDENCIES http_proxy HTTPS_PROXY ALL_PROXY IFS
MLFLOW_TRACKING_URI REQUESTS_CA_BUNDLE AWS_ENDPOINT_URL_S3 AWS_CONFIG_FILE SSLKEYLOGFILE HF_ENDPOINT
WANDB_BASE_URL GIT_SSH_COMMAND TORCH_LOGS_OUT TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD HF_ALLOW_CODE_EVAL
HF_TOKEN CUDA_INJECTION64_PATH OMP_TOOL_LIBRARIES KMP_DUPLICATE_LIB_OK GCONV_PATH TMPDIR
MALLOC_TRACE GLIBC_TUNABLES TRITON_CACHE_MANAGER NEURON_COMPILE_CACHE_URL NEURON_DUMP_PATH
TF_XLA_FLAGS MY_SETTING NCCL_TOPO_FILE NCCL_GRAPH_FILE NCCL_GRAPH_DUMP_FILE NCCL_DEBUG_FILE
NCCL_CONF_FILE NCCL_NET_PLUGIN NCCL_TUNER_PLUGIN NCCL_PROFILER_PLUGIN NCCL_ENV_PLUGIN NCCL_COMM_ID
NCCL_HOSTID NCCL_TOPO_DUMP_FILE NCCL_RAS_ADDR NCCL_PROXY_PROFILE NCCL_CUDA_PATH
NCCL_INSPECTOR_ENABLE NCCL_TUNER_CONFIG_FILE TORCH_NCCL_DEBUG_INFO_TEMP_FILE
TORCH_NCCL_DEBUG_INFO_PIPE_FILE TORCH_NCCL_DUMP_ON_TIMEOUT OFI_NCCL_TOPO_FILE_TEMPLATE
FI_PROVIDER_PATH FI_UCX_CONFIG NEURON_RT_INSPECT_OUTPUT_DIR NEURON_RT_INSPECT_ENABLE
NEURON_RT_DBG_CORE_DUMP NEURON_RT_LOG_LOCATION NEURON_RT_ROOT_COMM_ID XLA_SAVE_TENSORS_FILE
XLA_METRICS_FILE XLA_PERSISTENT_CACHE_PATH XLA_REGISTER_INSTALLED_PLUGINS
GLOO_DEVICE_TRANSPORT_TCP_TLS_CA_FILE
"""
ALLOWED = {
    **dict.fromkeys(("NCCL_P2P_DIRECT_DISABLE", "NCCL_NVLS_ENABLE", "NCCL_CUMEM_HOST_ENABLE"), "1"),
    **dict.fromkeys(("NCCL_IB_GID_INDEX", "TORCH_NCCL_NAN_CHECK", "OMP_NUM_THREADS"), "3"),
    **dict.fromkeys(("NEURON_RT_IO_RING_CACHE_SIZE", "NEURON_RT_EXEC_TIMEOUT"), "600"),
    **dict.fromkeys(("HF_HUB_OFFLINE", "TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN"), "1"),
    **dict.fromkeys(("FI_LOG_LEVEL", "NEURON_RT_LOG_LEVEL", "TORCH_DISTRIBUTED_DEBUG"), "INFO"),
    "NEURON_RT_DBG_CC_DMA_PACKET_SIZE": "65536,4096",
    "NCCL_DEBUG": "INFO",
    "NCCL_SOCKET_IFNAME": "^docker,lo",
    "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1",
    "NCCL_ALGO": "allreduce:tree;allgather:^ring",
    "NCCL_NET": "AWS Libfabric",
    "FI_PROVIDER": "efa",
    "FI_EFA_USE_DEVICE_RDMA": "1",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,roundup_power2_divisions:[256:1,>:2]",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler=true --xla_gpu_autotune_level=0",
    "NEURON_CC_FLAGS": "--distribution-strategy=llm-training --optlevel=1 --logical-nc-config=2",
    "SLURMLLM_LOG": "debug",
    "SLURMLLM_REHEARSAL_STEP_S": "1",
}


def test_what_does_not_tune_is_not_set_by_a_recipe_file(tmp_path: Path) -> None:
    names = REFUSED.split()
    with pytest.raises(ConfigError) as error:
        resolve(recipe_with(tmp_path, *(f"{name}: '1'" for name in names)), "local")
    for name, fault in zip(names, error.value.faults, strict=True):
        assert fault.startswith(f"env.{name} (mine.yaml:")
        assert "sets only variables for tuning" in fault
        assert f"--set env.{name}=…, or the cluster profile's env" in fault
    for section in ("env", "cluster.env"):
        config = resolve("tiny_neox", "local", [f"{section}.{name}=/x" for name in names])
        assert config.variable(names[0]) == "/x"
    # The recipe's value is not used if the command line replaces it.
    config = resolve(recipe_with(tmp_path, "PATH: '1'"), "local", ["env.PATH=/x"])
    assert config.recipe.env == {"PATH": "/x"}


def test_what_tunes_is(tmp_path: Path) -> None:
    lines = [f"{name}: '{value}'" for name, value in ALLOWED.items()]
    assert resolve(recipe_with(tmp_path, *lines), "local").recipe.env == ALLOWED


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_DEBUG", "/home/bob/x"),
        ("FI_PROVIDER", "$HOME"),
        ("XLA_FLAGS", "flags"),  # a file with flags
        ("XLA_FLAGS", "--xla_dump_to=x"),
        ("XLA_FLAGS", "--xla_gpu_autotune_level=0 --xla_gpu_cuda_data_dir=x"),
        ("NEURON_CC_FLAGS", "--cache_dir=x"),
        ("NEURON_CC_FLAGS", "--model-type transformer --logfile x"),
        ("NEURON_CC_FLAGS", "-o x"),
    ],
)
def test_values_that_name_files(name: str, value: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sets only variables for tuning"):
        resolve(recipe_with(tmp_path, f"{name}: {value!r}"), "local")


def test_a_recipe_names_no_profile_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text("extends: local\nsetup: [touch /tmp/pwned]\n")
    path = Path(recipe_with(tmp_path, "NCCL_DEBUG: INFO"))
    text = path.read_text().replace(
        "default_cluster: local", f"default_cluster: {tmp_path}/site.yaml"
    )
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"mine\.yaml:\d+\).* --cluster .*site\.yaml"):
        resolve(str(path))


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("mine.yaml", "env: {<<: {LD_PRELOAD: /x}}"),
        ("mine.yaml", "env:\n  <<: [{NCCL_DEBUG: b}, {LD_PRELOAD: /x}]"),
        ("mine.yaml", "<<: {<<: {env: {LD_PRELOAD: /x}}}"),
        ("--set x.yaml", "env: {LD_PRELOAD: /x}"),
    ],
)
def test_no_way_of_writing_brings_it_in(file: str, text: str, tmp_path: Path) -> None:
    recipe = (recipes_dir() / "tiny_neox.yaml").read_text()
    (tmp_path / file).write_text(f"{recipe}\n{text}\n")
    with pytest.raises(ConfigError, match="sets only variables for tuning") as error:
        resolve(str(tmp_path / file), "local")
    assert error.value.faults[0].startswith(f"env.LD_PRELOAD ({file}:")


def test_secrets_by_name() -> None:
    secrets = "HF_TOKEN WANDB_API_KEY AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN DB_PASSWORD hf_token"
    secrets += " MYSQL_PASSWD GITHUB_PAT OPENAI_APIKEY GOOGLE_CREDENTIALS NGC_KEY BASIC_AUTH TOKEN2"
    assert all(map(is_secret, secrets.split()))
    for name in ["TOKENIZERS_PARALLELISM", "MONKEY", "KEYBOARD", "AUTHOR", "PATH", "COMPAT", "PWD"]:
        assert not is_secret(name, "1")
        assert is_secret(name, "https://ada:pw@proxy:3128")


def test_a_secret_is_in_no_text() -> None:
    config = resolve("tiny_neox", "local", [f"env.HF_TOKEN={CANARY}", f"cluster.env.KEY={CANARY}"])
    assert config.recipe.env == {"HF_TOKEN": CANARY}
    shown = f"{config.to_yaml()} {config.values()} {config.rows()} {dict(config.origins)}"
    assert CANARY not in shown
    assert "--set env.HF_TOKEN=***" in shown
    whole = resolve("tiny_neox", "local", [f"env={{HF_TOKEN: {CANARY}}}"])
    assert CANARY not in f"{whole.to_yaml()} {whole.rows()}"
    assert whole.recipe.env == {"HF_TOKEN": CANARY}


def test_a_variable_of_the_shell_needs_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", CANARY)
    config = resolve("tiny_neox", "local", ["env.HF_TOKEN", "cluster.env.HF_TOKEN"])
    assert config.recipe.env == config.cluster.env == {"HF_TOKEN": CANARY}
    assert CANARY not in f"{config.values()} {config.origins}"
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ConfigError) as error:
        resolve("tiny_neox", "local", ["env.HF_TOKEN", "env", "optim.lr"])
    assert "--set env.HF_TOKEN: HF_TOKEN is not set here; `export HF_TOKEN=…` first" in str(
        error.value
    )
    assert len(error.value.faults) == 3


def test_a_secret_is_in_no_error(tmp_path: Path) -> None:
    for line in ("HF_TOKEN: [hf_cAnArY]", "HF_TOKEN: {a: hf_cAnArY}"):
        with pytest.raises(ConfigError) as error:
            resolve(recipe_with(tmp_path, line), "local")
        assert CANARY not in f"{error.value} {error.value.faults}"
    with pytest.raises(ConfigError) as error:
        resolve("tiny_neox", "local", [f"env.HF_TOKEN={CANARY}", "train.steps=x", "env.RANK=1"])
    assert CANARY not in f"{error.value} {error.value.faults}"


def test_a_secret_comes_back_to_its_owner(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    profile = tmp_path / "site.yaml"
    text = (clusters_dir() / "local.yaml").read_text()
    profile.write_text(f"{text}\nenv:\n  WANDB_API_KEY: {CANARY}\n")
    save(resolve("tiny_neox", str(profile), [f"env.HF_TOKEN={CANARY}2"]), run)
    assert run.secrets.stat().st_mode & 0o777 == 0o600
    config = load(run.config)
    assert config.worker_secrets() == {"WANDB_API_KEY": CANARY, "HF_TOKEN": f"{CANARY}2"}
    assert CANARY not in str(load_leniently(run.config).values)
    changed = change(config, None, ["train.steps=70"])
    assert changed.worker_secrets() == config.worker_secrets()
    assert change(config, None, ["env.HF_TOKEN=new"]).recipe.env["HF_TOKEN"] == "new"
    # Without the file, the run can be shown, and not be trained.
    run.secrets.unlink()
    with pytest.raises(ConfigError) as error:
        save(load(run.config), run)
    assert any("--set env.HF_TOKEN=…" in fault for fault in error.value.faults)
    save(change(load(run.config), None, ["env.HF_TOKEN=a", "cluster.env.WANDB_API_KEY=b"]), run)
    assert load(run.config).worker_secrets() == {"WANDB_API_KEY": "b", "HF_TOKEN": "a"}


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to make another user's file")
def test_secrets_of_another_user_are_not_used(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    save(resolve("tiny_neox", "local", ["env.HF_TOKEN=mine"]), run)
    os.chown(run.secrets, 12345, 12345)
    assert load(run.config).recipe.env == {"HF_TOKEN": "***"}


def test_an_unchanged_configuration_is_read_once(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    save(resolve("tiny_neox", "local"), run)
    config = load(run.config)
    assert load(run.config) is config
    save(resolve("tiny_neox", "local", ["optim.lr=1e-3"]), run)
    assert load(run.config, trusted=True).recipe.optim.lr == 1e-3
    run.config.chmod(0o666)
    with pytest.raises(ConfigError, match="chmod go-w"):
        load(run.config, trusted=True)


def test_no_password_of_a_mirror_is_stored(tmp_path: Path) -> None:
    mirrors = '{"https://x/": "https://user:P@SS@mirror/"}'
    config = resolve("tiny_llama", "local", [f"cluster.data_mirrors={mirrors}"])
    assert config.cluster.data_mirrors == {"https://x/": "https://user:P@SS@mirror/"}, "for fetch"
    assert "SS@" not in config.to_yaml()
    assert "https://***@mirror/" in config.to_yaml()


@pytest.mark.parametrize(
    ("location", "fault"),
    [
        ("reference://x::https://x/a.json", "a single address"),
        ("simplecache::s3://b/runs", "a single address"),
        *((f"{name}://x/runs", "must begin with") for name in ("sftp", "reference", "dask", "zip")),
        ("runs", "must begin with"),
        ("https://user:secret@x/runs", "an address with a password"),
        ("/fsx/runs", ""),
        ("file:///fsx/runs", ""),
    ],
)
def test_addresses_of_replicas(location: str, fault: str) -> None:
    if not fault:
        assert resolve("tiny_llama", "local", [f"checkpoint.replica={location}"])
        return
    with pytest.raises(ConfigError, match=fault) as caught:
        resolve("tiny_llama", "local", [f"checkpoint.replica={location}"])
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "field",
    [
        "data.corpus",
        "train.init_from",
        "slurm.notify.command",
        "command.run",
        "cluster.setup",
        "cluster.trackers.entity",
    ],
)
def test_addresses_with_a_password_are_refused(field: str) -> None:
    value = "see https://user:secret@host/x"
    recipe = "trainers/plain" if field.startswith("command") else "tiny_llama"
    with pytest.raises(ConfigError, match=f"{field}.*an address with a password") as caught:
        resolve(recipe, "local", [f"{field}={[value] if field == 'cluster.setup' else value}"])
    assert "secret" not in str(caught.value)
    users = "pip install git+ssh://git@github.com/x; train abfs://container@account/x"
    assert resolve("trainers/plain", "local", [f"command.run={users}"]).recipe.command.run == users
