"""Faults at random moments: rounds of one small pipeline, each in a new store, compared with an undisturbed run."""

import argparse
import json
import os
import random
import shutil
import subprocess
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from bench.chaos.chaos_run import ROOT, ChaosRun, Teacher, offered_command
from bench.chaos.compare import differences, leftovers, prefect_running, repeated_calls
from bench.chaos.faults import FAULTS, Fault, child_processes, kill_session, wait_for

DISK = "1500m"  # room for a round, and little enough to be filled in seconds


class Chaos:
    """The bench: an undisturbed run, then rounds of faults, each in a new store."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out: Path = options.work.resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.until = time.monotonic() + 60 * options.minutes
        self.faults = self.out / "faults.jsonl"
        self.disk = self.out / "disk"
        kinds = options.kinds.split(",") if options.kinds else [fault.name for fault in FAULTS]
        if options.schedule == "toy":
            # The toy chain has neither.
            kinds = [name for name in kinds if name not in ("kill the teacher", "kill a worker")]
        self.kinds = [fault for fault in FAULTS if fault.name in kinds]
        self.teacher = Teacher(options.port) if options.schedule == "chain" else None
        self.config = self._config()
        self.clock_library = self._build_clock()
        self.own_disk = self._mount_disk()

    def _config(self) -> str:
        if self.options.schedule != "chain":
            return (
                str(ROOT / "tests/support/stages/toy.toml") if self.options.schedule == "toy" else self.options.schedule
            )
        path = self.out / "chain.toml"
        chain = (ROOT / "tests/support/stages/chain.toml").read_text(encoding="utf-8")
        url = f"http://127.0.0.1:{self.options.port}/v1"
        endpoint = f'kind = "openai"\nmodel = "fake"\nurl = "{url}"\nstand_in = true\n'
        path.write_text(f"{chain}\n[endpoints.teacher]\n{endpoint}", encoding="utf-8")
        return str(path)

    def _build_clock(self) -> Path | None:
        library, source = self.out / "clock.so", Path(__file__).with_name("clock.c")
        command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl", "-lpthread"]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return library

    def _mount_disk(self) -> bool:
        self.disk.mkdir(exist_ok=True)
        if os.path.ismount(self.disk):
            # Lazily: a process of an earlier round that died badly may still hold a file of the old disk.
            subprocess.run(["umount", "-l", str(self.disk)], check=True)
        return self._mount()

    def _mount(self) -> bool:
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(self.disk)]
        return subprocess.run(command, capture_output=True).returncode == 0

    def new_run(self, folder: Path, clock: Path | None) -> ChaosRun:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "NAUTILE"))
        }
        environment["PYTHONPATH"] = str(ROOT)
        if clock:
            clock.write_bytes(bytes(8))
            environment |= {"LD_PRELOAD": str(self.clock_library), "CHAOS_CLOCK": str(clock)}
        toy = self.options.schedule == "toy"
        if toy:
            environment |= {"NAUTILE_DAG": "tests.support.stages.toy_dag:toy_dag", "NAUTILE_TOY_STEP_S": "0.15"}
        return ChaosRun(folder, self.config, environment, self.teacher, clock, self.options.stop_s, "flows.cli.main")

    def plain(self) -> dict[str, Any]:
        """Payloads, rows and seconds of an undisturbed run, which is run once and cached in a file."""
        file = self.out / "plain.json"
        if not file.exists():
            folder = self.out / "plain"
            folder.mkdir(exist_ok=True)
            run = self.new_run(folder, None)
            start = time.monotonic()
            run.start()
            try:
                if run.flow.wait() != 0:
                    raise SystemExit(f"the undisturbed run failed: {run.output()}")
            finally:
                kill_session(run.flow)
            result = {**run.snapshot(), "seconds": time.monotonic() - start}
            file.write_text(json.dumps(result), encoding="utf-8")
        result = json.loads(file.read_text(encoding="utf-8"))
        return result | {"rows": {table: Counter(row) for table, row in result["rows"].items()}}

    def run(self) -> None:
        """Rounds until there are faults enough, or the time is over."""
        if self.teacher:
            self.teacher.start()
        try:
            plain = self.plain()
            while len(done := self._finished_rows()) < self.options.faults and time.monotonic() < self.until:
                self._one_round(plain, len({row["round"] for row in done}), len(done))
        finally:
            if self.teacher:
                self.teacher.close()
            self._write_table()

    def _finished_rows(self) -> list[dict[str, Any]]:
        if not self.faults.exists():
            return []
        return [json.loads(line) for line in self.faults.read_text(encoding="utf-8").splitlines()]

    def _one_round(self, plain: dict[str, Any], number: int, before: int) -> None:
        if self.own_disk:
            self._mount_disk()
        folder = (self.disk if self.own_disk else self.out / "rounds") / str(number)
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "store").mkdir(parents=True)
        # Each round begins with compiled programs, so that faults hit stages at work and not the compiler.
        if (compiled := self.out / "plain/store/compiled").exists():
            shutil.copytree(compiled, folder / "store/compiled")
        clock = self.out / "clock" if self.clock_library else None
        run = self.new_run(folder, clock)
        run.log = self.out / f"round-{number}.log"
        run.log.unlink(missing_ok=True)
        # The round's own seed: an interrupted round is repeated with the same faults at the same moments.
        rng = random.Random(f"{self.options.seed}/{number}")
        events: list[dict[str, Any]] = []
        try:
            finished = self._run_with_faults(run, rng, plain, events, number)
            if finished:
                problems = self._find_problems(run, plain)
                for row in events:
                    row["round_problems"] = problems
                with self.faults.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(row) + "\n" for row in events)
                print(
                    f"round {number}: {len(events)} faults; {'; '.join(problems) or 'the same as undisturbed'}",
                    flush=True,
                )
                if problems:
                    shutil.copytree(run.store, self.out / f"kept-{number}", ignore=shutil.ignore_patterns("compiled"))
        finally:
            if run.flow is not None:
                kill_session(run.flow)

    def _run_with_faults(
        self, run: ChaosRun, rng: random.Random, plain: Any, rows: list[dict[str, Any]], number: int
    ) -> bool:
        """Run to the end with the faults of one round; False if the time is over first."""
        usable_faults = [fault for fault in self.kinds if self.own_disk or not fault.own_disk]
        usable_faults = [fault for fault in usable_faults if run.clock or fault.name != "clock jump"]
        # In turn over all kinds, so that every kind occurs equally often over the rounds; only their order is drawn.
        offset = number * self.options.each_round
        chosen_faults = [usable_faults[(offset + i) % len(usable_faults)] for i in range(self.options.each_round)]
        rng.shuffle(chosen_faults)
        # A run with faults takes longer than an undisturbed one: spread over 1.6 times its length, the last faults
        # still hit it.
        gap = 1.6 * plain["seconds"] / len(chosen_faults)
        start = time.monotonic()
        run.start()
        for fault in chosen_faults:
            if not self._keep_running(run, rows):
                return True
            moment = self._next_moment(run, rng, gap)
            while run.alive() and time.monotonic() < moment:
                time.sleep(0.02)
            if not run.alive() and not self._keep_running(run, rows):
                return True
            if time.monotonic() > self.until:
                return False
            self._inject(run, fault, rng, rows, number, time.monotonic() - start)
        while self._keep_running(run, rows):
            if time.monotonic() > self.until + 240:
                return False
            time.sleep(0.2)
        return True

    def _next_moment(self, run: ChaosRun, rng: random.Random, gap: float) -> float:
        """The time of the next fault: one in five during the start of the command, the others while stages work."""
        if rng.random() < 0.2:
            return time.monotonic() + rng.uniform(0.0, 12.0)
        wait_for(run, lambda: [*child_processes(run, "stage"), *child_processes(run, "worker")], 120.0)
        return time.monotonic() + rng.uniform(0.0, gap)

    def _inject(
        self, run: ChaosRun, fault: Fault, rng: random.Random, rows: list[dict[str, Any]], number: int, moment: float
    ) -> None:
        stage = run.current_stage()
        target = fault.inject(run, rng)
        if target is None:
            return
        row = {"round": number, "fault": fault.name, "hit": target, "at": stage, "moment_s": round(moment, 1)}
        rows.append(row | {"outcome": "went on", "commands": 0, "said": ""})
        print(f"{number}/{len(rows)} {fault.name} ({target}) in {stage}", flush=True)

    def _keep_running(self, run: ChaosRun, rows: list[dict[str, Any]]) -> bool:
        """Restart the run if it has stopped; False once it has ended successfully.

        Each restart is a command in the row of the last fault. For a damaged artifact the offered command comes first.
        """
        if run.alive():
            return True
        code = run.flow.wait()
        if code == 0:
            return self._repair_damage(run, rows)
        last_row: dict[str, Any] = rows[-1] if rows else {"fault": "none", "commands": 0}
        lines = [
            line for line in run.output().splitlines() if " failed: " in line or "nautile" in line or "damaged" in line
        ]
        last_row["said"] = (lines[0] if lines else run.output()[-300:])[:400].replace(str(run.store), "STORE")
        last_row["commands"] += 1
        last_row["outcome"] = (
            "stopped, went on by one command" if last_row["commands"] == 1 else f"{last_row['commands']} commands"
        )
        if last_row["commands"] > 4:
            raise SystemExit(f"no recovery from {last_row['fault']}: {run.output()[-3000:]}")
        # Killed by the bench, the run had no time for a message.
        if code != -9 and (command := offered_command(run.output())):
            run.start(*command)
            if run.flow.wait() != 0:
                last_row["outcome"] = "the offered command failed"
                last_row["said"] = run.output()[-400:]
        run.start()
        return True

    def _repair_damage(self, run: ChaosRun, rows: list[dict[str, Any]]) -> bool:
        """After a successful end, repair damage that `verify` reports, by its command; True if a run was started."""
        flipped = [row for row in rows if row["fault"] == "flipped byte" and not row["commands"]]
        if not flipped:
            return False
        report = run.nautile("store", "verify")
        if not report["damaged"]:
            return False
        output = next(iter(report["remedies"].values()))
        flipped[-1] |= {"commands": 1, "outcome": "found by verify, went on by one command", "said": output[:400]}
        run.start(*(word if word != "CONFIG" else self.config for word in offered_command(output) or []))
        return True

    def _find_problems(self, run: ChaosRun, plain: dict[str, Any]) -> list[str]:
        """Problems at the end of a round: processes, damage, and differences from the undisturbed run."""
        time.sleep(1.0)
        problems = []
        problems += left_running(run.store)
        damaged = run.nautile("store", "verify")["damaged"]
        problems += [f"damaged: {name}: {files}" for name, files in damaged.items()]
        result = run.snapshot()
        problems += differences(plain, result) + leftovers(run.store, run.query)
        # The catalog as the run left it, against one that is rebuilt from the files alone.
        before = run.tables()
        run.nautile("store", "rebuild")
        after = run.tables()
        for name in before:
            if before[name] != after[name]:
                differing_rows = set(before[name]) ^ set(after[name])
                problems.append(
                    f"rebuilt: {name} differs in {len(differing_rows)} rows, one is {min(differing_rows)[:300]}"
                )
        print(f"   calls made twice: {repeated_calls(plain, result)}; flow runs RUNNING: {prefect_running(run.store)}")
        return problems

    def _write_table(self) -> None:
        """Write table.json and table.md from the rounds so far."""
        rows = self._finished_rows()
        counts = Counter((row["fault"], row["outcome"]) for row in rows)
        problems_found = sorted({problem for row in rows for problem in row["round_problems"]})
        (self.out / "table.json").write_text(
            json.dumps({"faults": rows, "problems": problems_found}, indent=1), encoding="utf-8"
        )
        outcomes = sorted({outcome for _, outcome in counts})
        lines = [f"| fault | {' | '.join(outcomes)} |", f"| --- |{' --- |' * len(outcomes)}"]
        for name in (fault.name for fault in FAULTS):
            if any(fault == name for fault, _ in counts):
                lines.append(f"| {name} | {' | '.join(str(counts[name, outcome] or '') for outcome in outcomes)} |")
        rounds = {row["round"]: row["round_problems"] for row in rows}
        clean_rounds = sum(not problems for problems in rounds.values())
        lines += [
            "",
            f"{len(rows)} faults in {len(rounds)} rounds of {Path(self.config).stem}; {clean_rounds} rounds ended as",
        ]
        lines[-1] += " the undisturbed run did."
        unavailable = [
            name
            for name, is_available in (("full disk", self.own_disk), ("clock jump", self.clock_library))
            if not is_available
        ]
        lines += [f"Left out on this machine: {', '.join(unavailable)}."] if unavailable else []
        lines += [f"- {problem}" for problem in problems_found]
        (self.out / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print("\n".join(lines))


def left_running(store: Path) -> list[str]:
    """A line for each process that still works in a store."""
    lines = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("NAUTILE_STORE") == str(store):
                lines.append(f"left running: {' '.join(process.cmdline()[-4:])[:120]}")
    return lines
