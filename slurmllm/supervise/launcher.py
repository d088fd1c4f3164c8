"""One process a node: puts the graphs in place, runs the node's workers, keeps its new graphs.

The precompile stage runs the workers under the compiler's own tool, where it has one, and judges
by what then lies in the cache: such tools say 0 after a failure, and more than 0 after none.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from slurmllm.backends.environment import load_environment
from slurmllm.errors import EXIT_OK, EXIT_REQUEUE, NodeError, SlurmllmError, StorageError
from slurmllm.graphs import archive as graph_cache
from slurmllm.graphs import merge
from slurmllm.graphs.fingerprint import graph_fingerprint
from slurmllm.graphs.reuse import measured_micro_batch
from slurmllm.plan.mesh import load_mesh
from slurmllm.records import GraphManifest, NodeRecord, WorkerRecord
from slurmllm.rundir import RunDir, Stage
from slurmllm.supervise.workers import POLL_S, WORKER_SIGNAL, Workers, run_command

STOPPED_GRACE_S = 10.0  # for other nodes to hand in what they have, after a stop signal


class Launcher:
    """One node's part in one attempt."""

    def __init__(self, run: RunDir, stage: Stage, attempt: int) -> None:
        self.run, self.stage = run, stage
        self.workers = Workers(run, stage, attempt)
        self.config, self.record = self.workers.config, self.workers.record
        self.attempt, self.node = self.workers.attempt, self.workers.node
        self.environment = load_environment(self.config.backend)
        self.cache = Path(os.environ["SLURMLLM_CACHE"])
        self.manifest: GraphManifest | None = None  # of the archive, train stage
        self.stopped_at: float | None = None

    def main(self) -> int:
        """Run the node's share of the attempt.

        Returns:
            0 where every worker finished or saved and left, else 1: the supervisor reads the
            records, and srun ends the other launchers on any other code than 0.
        """
        self.workers.watch_signals()
        try:
            self.workers.save(versions=self.environment.node_versions())
            self._prepare_cache()
            run = self._precompile if self.stage == "precompile" else self.workers.run_to_end
            failed = run()
        except SlurmllmError as error:
            self.workers.end()
            self.workers.save_at_last(error=str(error))
            print(f"{self.node}: {error}", file=sys.stderr, flush=True)
            failed = True
        self._hand_in_added()
        return 1 if failed else 0

    def _prepare_cache(self) -> None:
        started = time.monotonic()
        if self.stage == "precompile":
            # The nodes of --local share one folder. The first one empties it, before its workers
            # open the rendezvous: nobody has compiled anything by then.
            if self.workers.node_rank == 0 or not self.workers.local:
                graph_cache.fresh_cache(self.cache)
                self._continue_earlier()
            if self.workers.node_rank == 0:
                graph_cache.forget_handed_in(self.run, self.record.nodes)
                self._forget_complete()
            return
        self.manifest = GraphManifest.load(self.run.graphs_manifest)
        here = self.environment.versions()
        if here != self.manifest.versions:
            words = differences(self.manifest.versions, here)
            print(
                f"{self.node}: the archive's graphs are of other versions ({words}) and stay "
                "unused; this node compiles its own",
                flush=True,
            )
            graph_cache.without_archive(self.cache, f"{self.run.path} {self.attempt.number}")
            self.workers.save(cache="other_versions", cache_s=time.monotonic() - started)
            return
        origin = graph_cache.put_in_place(self.cache, self.run, self.manifest)
        self.workers.save(cache=origin, cache_s=time.monotonic() - started)

    def _continue_earlier(self) -> None:
        """Begin with the graphs that an earlier precompile attempt got compiled.

        Those that failed are not among them, so that they are tried again.
        """
        if not self.run.graphs_manifest.is_file():
            return
        with suppress(StorageError, NodeError):
            earlier = GraphManifest.load(self.run.graphs_manifest)
            same = earlier.versions == self.environment.versions()
            if same and not earlier.complete and earlier.fingerprint == self._fingerprint():
                graph_cache.put_in_place(self.cache, self.run, earlier)

    def _forget_complete(self) -> None:
        """Take back an archive that was whole: somebody found that it does not serve."""
        with suppress(StorageError):
            if GraphManifest.load(self.run.graphs_manifest).complete:
                self.run.graphs_manifest.unlink(missing_ok=True)

    def _fingerprint(self) -> str | None:
        mesh, measured = load_mesh(self.run.plan), measured_micro_batch(self.run)
        return graph_fingerprint(self.config, mesh, self.workers.local, measured)

    def _precompile(self) -> bool:
        """Run the workers under the backend's commands and archive what the cache then holds.

        Returns:
            Whether a worker failed.
        """
        work = self.cache.with_name(f"{self.cache.name}.work-{self.node}")
        inner = [
            sys.executable, "-m", "slurmllm.supervise.workers",
            str(self.run.path), self.stage, str(self.attempt.number),
        ]  # fmt: skip
        run_workers, *compilers = self.environment.precompile_commands(self.config, inner, work)
        try:
            code = self._command(run_workers, WORKER_SIGNAL)
            self.workers.load_seen()
            seen = self.workers.seen
            codes = set(seen.exit_codes.values())
            if seen.error is not None or codes - {EXIT_OK, EXIT_REQUEUE}:
                return True
            if not seen.pids or len(seen.exit_codes) < len(seen.pids):
                raise NodeError(
                    f"{run_workers[0]} ended with exit code {code} and did not see the workers "
                    f"through; its words are in {self.run.stage_log(self.stage)}"
                )
            if EXIT_REQUEUE in codes:
                return False  # stopped on the way
            # The nodes of --local share one cache: the first one compiles for all.
            if not self.workers.local or self._others_done():
                started = time.monotonic()
                for command in compilers:
                    code = self._command(command, signal.SIGKILL)
                    print(f"{self.node}: {Path(command[0]).name}: exit code {code}", flush=True)
                self._archive_graphs(time.monotonic() - started if compilers else 0.0)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return False

    def _command(self, command: Sequence[str], on_stop: signal.Signals) -> int:
        def send(group: int) -> None:
            self.stopped_at = self.stopped_at or time.monotonic()
            with suppress(ProcessLookupError):
                os.killpg(group, on_stop)

        try:
            return run_command(list(command), lambda: self.workers.stop_requested, send)
        except OSError as error:
            raise NodeError(
                f"{command[0]} cannot be started on {self.node}: {error.strerror or error}; it "
                f"must be on $PATH there or beside {sys.executable}"
            ) from error

    def _others_done(self) -> bool:
        """Of --local's nodes: whether this is the first, once the others' workers have ended."""
        if self.workers.node_rank != 0:
            return False
        for name in self.record.nodes[1:]:
            while not self._ended(name) and not self._given_up(name):
                time.sleep(POLL_S)
        return True

    def _archive_graphs(self, compile_s: float) -> None:
        """Pack the graphs of all nodes: the others leave theirs in the run directory."""
        others = () if self.workers.local else self.record.nodes[1:]
        found = self.environment.graphs(self.cache)
        compiled = tuple(graph.folder for graph in found if graph.state == "compiled")
        self.workers.save(compile_s=compile_s, graphs=compiled)
        if self.workers.node_rank != 0:
            elsewhere = self._compiled_before()
            graph_cache.hand_in(self.cache, self.run, self.node, without=elsewhere)
            return
        absent = graph_cache.take_in(self.cache, self.run, others, self._given_up)
        first = self.attempt.worker(0)
        manifest = graph_cache.pack(
            self.cache,
            self.run,
            self.config.backend,
            WorkerRecord.load(first).first_step_s if first.is_file() else 0.0,
            compile_s=compile_s,
            fingerprint=self._fingerprint(),
            expected=self.environment.expects_graphs(self.config),
            absent=absent,
        )
        graphs = f"{manifest.graphs} of {len(manifest.states)}"
        print(
            f"graph cache: {manifest.graphs if manifest.complete else graphs} graphs in "
            f"{manifest.archive_bytes / 1e6:.1f} MB; "
            f"first step {manifest.cold_first_step_s:.1f} s with an empty cache"
            + (f", compiled in {compile_s:.1f} s" if compile_s else ""),
            flush=True,
        )

    def _compiled_before(self) -> set[str]:
        """Graphs that a node before this one compiled too, and hands in."""
        records = (self._record_of(name) for name in self.record.nodes[: self.workers.node_rank])
        return {folder for record in records if record is not None for folder in record.graphs}

    def _record_of(self, node: str) -> NodeRecord | None:
        path = self.attempt.node(node)
        with suppress(StorageError):
            return NodeRecord.load(path) if path.is_file() else None
        return None

    def _ended(self, node: str) -> bool:
        record = self._record_of(node)
        if record is None:
            return False
        all_codes = bool(record.pids) and len(record.exit_codes) == len(record.pids)
        return record.error is not None or all_codes

    def _given_up(self, node: str) -> bool:
        """Whether nothing more can be hoped for from another node of the precompile stage."""
        record = self._record_of(node)
        if record is not None and (record.error is not None or any(record.exit_codes.values())):
            return True
        if self.workers.stop_requested and self.stopped_at is None:
            self.stopped_at = time.monotonic()
        return self.stopped_at is not None and time.monotonic() > self.stopped_at + STOPPED_GRACE_S

    def _hand_in_added(self) -> None:
        """Leave what was compiled while training; a failure here changes nothing of the attempt."""
        if self.manifest is None or not self.workers.seen.pids:
            return
        try:
            names = merge.hand_in_added(
                self.cache, self.run, self.attempt.number, self.record.nodes, self.node,
                self.manifest,
            )  # fmt: skip
            if names:
                self.workers.save(graphs_added=names)
        except (SlurmllmError, OSError) as error:
            print(f"{self.node}: new graphs are not kept: {error}", file=sys.stderr, flush=True)


def differences(before: dict[str, str], now: dict[str, str]) -> str:
    """`torch 2.9 there, 2.10 here`, for every version that differs."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return "; ".join(
        f"{name} {before.get(name, 'none')} there, {now.get(name, 'none')} here" for name in names
    )


def launch(run: RunDir, stage: Stage, attempt: int) -> int:
    """Entry of the hidden verb `launch`."""
    if "SLURMLLM_CACHE" not in os.environ:
        raise NodeError("SLURMLLM_CACHE is not set: `launch` is started by the job scripts")
    return Launcher(run, stage, attempt).main()
