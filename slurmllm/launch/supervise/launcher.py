"""One process per node: installs the graphs, runs the node's workers, keeps its new graphs.

The precompile stage runs the workers under the compiler's own tool, if it has one, and judges the
result by the cache: such tools exit with 0 after failures, and with others after successes.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from slurmllm.core.config.variables import is_secret
from slurmllm.core.errors import EXIT_OK, EXIT_REQUEUE, NodeError, SlurmllmError, StorageError
from slurmllm.core.plugins import versions
from slurmllm.core.run.artifact_records import GraphManifest
from slurmllm.core.run.records import NodeRecord, Versions, WorkerRecord
from slurmllm.core.run.rundir import RunDir, Stage
from slurmllm.core.run.worker_files import INSTALLED_FILE, REUSED
from slurmllm.core.slurm.error_texts import Command
from slurmllm.launch.graphs import archive as graph_cache
from slurmllm.launch.graphs import merge
from slurmllm.launch.graphs.reuse import graph_fingerprint, measured_micro_batch, node_processor
from slurmllm.launch.supervise.classify import reported_all
from slurmllm.launch.supervise.rank_logs import collect_leftovers
from slurmllm.launch.supervise.workers import POLL_S, WORKER_SIGNAL, Workers, run_command
from slurmllm.plan.mesh import load_mesh
from slurmllm.train.backends.environment import (
    BROADCAST,
    load_environment,
    make_cache_folder,
    node_disk,
    node_local_cache,
    remove_leftovers,
    requires_graphs,
    worker_environment,
)

STOPPED_GRACE_S = 10.0  # after a stop signal, for other nodes to submit their graphs

log = logging.getLogger(__name__)


class Launcher(Workers):
    """One node's part in one attempt: its workers, and the graphs that they use and compile."""

    def __init__(self, run: RunDir, stage: Stage, attempt: int) -> None:
        super().__init__(run, stage, attempt)
        self.backend = load_environment(self.config.backend)
        self.planned_cache = self.cache = Path(node_local_cache(self.config, run))
        self.group = self.config.cluster.trusted_group
        self.manifest: GraphManifest | None = None  # of the archive, train stage
        # Of this node: what its graphs are made for, and that with the versions of libraries.
        self.processor: Versions = {}
        self.versions: Versions = {}
        self.stopped_at: float | None = None

    def main(self) -> int:
        """Run the node's share of the attempt; returns 0 if all workers finished or saved.

        Else 1: the supervisor reads the records, and srun ends the other launchers.
        """
        self.watch_signals()
        try:
            self._prepare()
            if self.stage == "precompile":
                failed = self._precompile()
            else:
                # Workers import while the graphs are installed, and wait before they compile.
                with graph_cache.installing(
                    self.cache, self.node, self.attempt.number
                ) as installed:
                    self.variables[INSTALLED_FILE] = str(installed)
                    failed = self.run_to_end(lambda: self._install_graphs(installed))
        except SlurmllmError as error:
            self.end_with_error(error)
            failed = True
        self._submit_new_graphs()
        return 1 if failed else 0

    def _prepare(self) -> None:
        config = self.config
        recipe = config.recipe
        plugins = versions(recipe.plugin_refs, recipe.plugins)
        if config.cluster.setup or config.cluster.container:
            # Again: cluster.setup and an image may have changed the variables.
            variables = worker_environment(config, self.run).items()
            os.environ.update({n: v.value for n, v in variables if not is_secret(n, v.value)})
        self.processor = node_processor(config)
        self.versions = {**self.backend.versions(), **self.processor}
        short = {n: v for n, v in self.processor.items() if n in ("cpu_capability", "gpu")}
        self.save(versions={**self.backend.node_versions(), **short, **plugins})
        self.cache = make_cache_folder(config, self.run)
        if self.processor:  # nodes may share a disk, and a disk may get another processor
            digest = hashlib.sha256(str(self.processor).encode()).hexdigest()[:8]
            self.cache = self.cache.with_name(f"{self.cache.name}-{digest}")
        variables = self.backend.cache_variables(str(self.cache)).items()
        configured = {**config.cluster.env, **recipe.env}
        os.environ.update({n: v.value for n, v in variables if n not in configured})
        os.environ["SLURMLLM_CACHE"] = str(self.cache)
        collect_leftovers(config, self.run, self.stage, self.attempt.number)

    def _submit_new_graphs(self) -> None:
        """Submit what was compiled in training; after a failure too, as it is needed again."""
        if self.manifest is None or not self.node_record.pids:
            return
        try:
            names = merge.submit_new_graphs(
                self.cache,
                self.run,
                self.attempt.number,
                self.record.nodes,
                self.node,
                self.manifest,
                self.versions,
            )
            if names:
                self.save(new_graphs=names)
        except (SlurmllmError, OSError) as error:  # changes nothing in the attempt
            log.warning("new graphs are not kept: %s", error)

    def _empty_cache(self) -> None:
        # The nodes of --local share one folder. The first one empties it before its workers
        # open the rendezvous, when no worker can have compiled anything.
        run = self.run
        if self.node_rank == 0 or not self.local:
            graph_cache.empty_cache(self.cache)
            # Begin with the graphs of an earlier attempt; those that failed are retried.
            with suppress(StorageError, NodeError):
                if run.graphs_manifest.is_file():
                    earlier = graph_cache.load_manifest(run, self.group)
                    same = not earlier.unusable(self.versions) and not earlier.complete
                    if same and earlier.fingerprint == self._fingerprint():
                        graph_cache.install_archive(self.cache, run, earlier, group=self.group)
        if self.node_rank == 0:
            for node in self.record.nodes:  # of an attempt that did not finish
                run.graphs_of_node(node).unlink(missing_ok=True)
            # A complete archive here was rejected by the user (`--precompile always`).
            rejected = GraphManifest.find_readable(run.graphs_manifest)
            if rejected and rejected.complete:
                run.graphs_manifest.unlink(missing_ok=True)
        remove_leftovers(self.planned_cache)

    def _install_graphs(self, installed: Path) -> None:
        fields = {}
        if self.run.graphs_manifest.is_file() or requires_graphs(self.config):
            fields = self._unpack_graphs()
        remove_leftovers(self.planned_cache)
        reused = self.manifest is not None and self.manifest.graphs and not fields["cache_reason"]
        self.compiles = self.backend.expects_graphs(self.config) and not reused
        # Graphs of a backend that serve any node are not suspect: Neuron's may take hours to
        # compile.
        content = REUSED if reused and self.processor else ""
        with node_disk(f"write {installed}"):
            partial = installed.with_name(f"{installed.name}.new")
            partial.write_text(content, "ascii")
            partial.replace(installed)
        if fields:
            self.save(**fields)

    def _unpack_graphs(self) -> dict[str, object]:
        started = time.monotonic()
        self.manifest = graph_cache.load_manifest(self.run, self.group)
        if reason := self.manifest.unusable(self.versions):
            log.warning("ignoring the graph archive: %s; this node compiles its own graphs", reason)
            graph_cache.empty_cache_once(self.cache, f"{self.run.path} {self.attempt.number}")
            origin = "rejected" if self.manifest.rejected else "other_versions"
        else:
            broadcast = os.environ.get(BROADCAST)
            origin = graph_cache.install_archive(
                self.cache,
                self.run,
                self.manifest,
                Path(broadcast) if broadcast else None,
                self.group,
            )
        seconds = time.monotonic() - started
        return {"cache": origin, "cache_reason": reason or "", "cache_s": seconds}

    def _fingerprint(self) -> str | None:
        return graph_fingerprint(
            self.config, load_mesh(self.run.plan), self.local, measured_micro_batch(self.run)
        )

    def _precompile(self) -> bool:
        """Run the workers under the backend's commands; returns whether one of them failed."""
        self._empty_cache()
        work = self.cache.with_name(f"{self.cache.name}.work-{self.node}")
        inner = [
            sys.executable,
            "-P",
            "-m",
            "slurmllm.launch.supervise.workers",
            str(self.run.path),
            self.stage,
            str(self.attempt.number),
        ]
        run_workers, *compilers = self.backend.precompile_commands(self.config, inner, work)
        try:
            code = self._command(run_workers, WORKER_SIGNAL)
            self.load_record()
            record = self.node_record
            codes = set(record.exit_codes.values())
            if record.error is not None or codes - {EXIT_OK, EXIT_REQUEUE}:
                return True
            if not record.pids or len(record.exit_codes) < len(record.pids):
                raise NodeError(
                    f"{run_workers[0]} ended with exit code {code} before its workers did; "
                    f"see its output in {self.run.stage_log(self.stage)}"
                )
            if EXIT_REQUEUE not in codes:  # else stopped before the end
                self._compile(compilers)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return False

    def _compile(self, compilers: Sequence[Command]) -> None:
        """Run the backend's compilers on what the workers traced, and archive the graphs."""
        if self.local:
            # The nodes of --local share one cache: the first one compiles for all of them, when
            # their workers have ended.
            if self.node_rank != 0:
                return
            for name in self.record.nodes[1:]:
                while not reported_all(self._record_of(name)) and not self._has_failed(name):
                    time.sleep(POLL_S)
        started = time.monotonic()
        for command in compilers:
            # SIGKILL on a stop: a compiler has nothing to save, unlike the workers.
            code = self._command(command, signal.SIGKILL)
            log.info("%s: exit code %d", Path(command[0]).name, code)
        self._archive_graphs(time.monotonic() - started if compilers else 0.0)

    def _command(self, command: Command, on_stop: signal.Signals) -> int:
        def stop() -> bool:
            if self.node_rank == 0 and self.backend.expects_graphs(self.config):
                self.log_compiling()
            if self.stop_requested:
                self.stopped_at = self.stopped_at or time.monotonic()
            return self.stop_requested

        try:
            return run_command(list(command), stop, on_stop)
        except OSError as error:
            raise NodeError(
                f"{command[0]} cannot be started on {self.node}: {error.strerror or error}; it "
                f"must be on $PATH there or next to {sys.executable}"
            ) from error

    def _archive_graphs(self, compile_s: float) -> None:
        # The other nodes submit their graphs through the run directory.
        other_nodes = () if self.local else self.record.nodes[1:]
        self.save(
            compile_s=compile_s,
            graphs=tuple(
                graph.folder
                for graph in self.backend.graphs(self.cache)
                if graph.state == "compiled"
            ),
        )
        if self.node_rank != 0:
            # Nodes before this one submit the graphs that both have compiled.
            graph_cache.submit_graphs(
                self.cache,
                self.run,
                self.node,
                without={
                    folder
                    for r in map(self._record_of, self.record.nodes[: self.node_rank])
                    if r is not None
                    for folder in r.graphs
                },
            )
            return
        missing = graph_cache.collect_graphs(
            self.cache, self.run, other_nodes, self._has_failed, self.group
        )
        first = self.attempt.worker(0)
        manifest = graph_cache.pack_archive(
            self.cache,
            self.run,
            self.config.backend,
            WorkerRecord.load(first).first_step_s if first.is_file() else 0.0,
            versions=self.versions,
            compile_s=compile_s,
            fingerprint=self._fingerprint(),
            missing_nodes=missing,
            expected=self.backend.expects_graphs(self.config),
        )
        total = "" if manifest.complete else f" of {len(manifest.states)}"
        log.info(
            f"graph cache: {manifest.graphs}{total} graphs in {manifest.archive_bytes / 1e6:.1f} "
            f"MB; first step {manifest.cold_first_step_s:.1f} s with an empty cache"
            + (f", compiled in {compile_s:.1f} s" if compile_s else "")
        )

    def _record_of(self, node: str) -> NodeRecord | None:
        return NodeRecord.find_readable(self.attempt.node(node))

    def _has_failed(self, node: str) -> bool:
        """Whether another precompile node will submit nothing more: it failed, or was stopped."""
        record = self._record_of(node)
        if record is not None and (record.error is not None or any(record.exit_codes.values())):
            return True
        if self.stop_requested and self.stopped_at is None:
            self.stopped_at = time.monotonic()
        return self.stopped_at is not None and time.monotonic() > self.stopped_at + STOPPED_GRACE_S
