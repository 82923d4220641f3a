"""Thirty faults in one run of configs/local.toml, each injected when the run reaches a certain place.

The store is at an S3 server on a small disk, behind a proxy; the teacher is a server that counts its answers. Only the
endpoint's address and prices differ from the shipped configuration. A schedule drawn from a seed gives each fault a
step and a place in it (a share of its work, a checkpoint, a work item). After a fault, the next one waits until the run
is past its earlier progress. Where a fault ends the first machine, a second or third one takes over, with its own
folder.

Checks at the end: payloads and rows equal those of an undisturbed run in a local folder with the same teacher; store
and remote verify; no process is left; each of the teacher's answers is in the ledger, except those in flight when a
process was killed; each of its failures has a row.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import time
import tomllib
from pathlib import Path
from typing import Any

from bench.chaos.local_faults import INJECTORS, PlannedFault, draw_schedule
from bench.chaos.local_run import LocalChaosRun
from bench.chaos.random_times import Chaos, left_running
from bench.chaos.servers import PRICES, CountingTeacher, MirrorServer
from store.manifest import MIRRORED

# Seconds of a lease here; in a store they are minutes, which would be most of the bench.
RENEW_S, EXPIRES_S = "5", "15"
# How long a fault may take to be overcome, how long nothing may move before the bench gives up, and how often it looks.
RECOVERY_S, STALLED_S, LOOK_S = 300.0, 900.0, 1.5
ENDPOINT = "smollm2"  # replaced by the counting teacher
SLOW_S, QUICK_S = 1.5, 0.02  # duration of an answer: in the distillation, where faults hit the teacher, and elsewhere
KILLS = re.compile(r"kill|torn|holder|stand")  # faults that end a process which may have requests in flight
STATUSES = {"429": ("429",), "500": ("500",)}  # statuses of a fault in the ledger; other faults have several


class LocalChaos(Chaos):
    """The bench: an undisturbed run, a run with faults, and the comparison of the two."""

    def __init__(self, options: argparse.Namespace) -> None:
        options.minutes, options.kinds, options.faults, options.each_round = 600.0, "", 0, 0
        super().__init__(options)
        if not self.own_disk or self.clock_library is None:
            raise SystemExit("this schedule needs root (`mount` of a tmpfs) and a C compiler")
        self.plan = draw_schedule(options.seed)
        if options.only:
            self.plan = [planned for planned in self.plan if str(planned.number) in options.only.split(",")]
        self.counting = CountingTeacher(self.out / "teacher.jsonl", options.port)
        (self.out / "s3-disk").mkdir(exist_ok=True)
        self.mirror = MirrorServer(self.out / "s3-disk", options.port + 1)
        self.started = 0.0
        self.account: dict[str, Any] = {}

    def _config(self) -> str:
        """Write the configuration with the teacher's address and prices; returns its path."""
        shipped = self.options.config.read_text(encoding="utf-8")
        endpoint = (
            f'[endpoints.{ENDPOINT}]\nkind = "openai"\nmodel = "SmolLM2-135M-Instruct"\nconcurrency = 2\n'
            f'license = "Apache-2.0"\nstand_in = true\n'
            f'url = "http://127.0.0.1:{self.options.port}/v1"\ntimeout_s = 8.0\n'
            f"dollars_per_million_in = {PRICES[0]}\ndollars_per_million_out = {PRICES[1]}\n\n"
        )
        # Everything else of the shipped configuration stays as it is: that one is on trial.
        text, count = re.subn(rf"\[endpoints\.{ENDPOINT}\]\n[^\[]*", endpoint, shipped)
        if count != 1:
            raise SystemExit(f"{self.options.config}: no [endpoints.{ENDPOINT}] to replace")
        path = self.out / "local.toml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    def _mount_disk(self) -> bool:
        """Mount the disk, unless an earlier call has: its run continues."""
        self.disk.mkdir(exist_ok=True)
        return os.path.ismount(self.disk) or self._mount()

    def run(self) -> None:
        self.counting.models = ("SmolLM2-135M-Instruct",)
        self.counting.delay_s = QUICK_S
        with self.counting:
            plain = self.plain()
            run = self._new_run()
            try:
                rows = self._run_all_faults(run)
                problems = self._find_problems(run, plain) + self._ledger(run, rows)
                self._write(rows, problems, plain)
            finally:
                run.close()
                self.mirror.close()
                self._unmount(self.out / "s3-disk")

    def plain(self) -> dict[str, Any]:
        result = super().plain()
        if not self.faults.exists():  # requests of the undisturbed run are not counted
            self.counting.log.unlink(missing_ok=True)
            self.counting.answered_ever = 0
        return result

    def _new_run(self) -> LocalChaosRun:
        """The run of an earlier call, or a new one if its disk is gone."""
        self._unmount(self.mirror.folder)
        size = ["mount", "-t", "tmpfs", "-o", "size=700m", "tmpfs", str(self.mirror.folder)]
        subprocess.run(size, check=True)
        self.mirror.start()
        assert self.clock_library
        folder, clock = self.disk / "run", self.out / "clock"
        # The tmpfs is still mounted, so the machines' folders are there and the run can go on; the S3 server's own
        # memory of its objects ended with its process.
        going_on = self.faults.exists() and folder.exists()
        if not going_on:
            shutil.rmtree(folder, ignore_errors=True)
            for path in (self.faults, self.counting.log, *self.out.glob("*machine-*.log")):
                path.unlink(missing_ok=True)
            self.counting.answered_ever = 0
        run = LocalChaosRun(
            folder, self.config, self.new_run(folder, clock).environment, None, clock, self.options.stop_s,
            "bench.chaos.command", mirror=self.mirror, counting=self.counting,
            prompts=tomllib.loads(Path(self.config).read_text(encoding="utf-8"))["distill"]["prompts"],
        )  # fmt: skip
        run.environment |= self.mirror.environment | {"CHAOS_RENEW_S": RENEW_S, "CHAOS_EXPIRES_S": EXPIRES_S}
        finished_rows = self._finished_rows() if going_on else []
        for number in range(1, max((row["machine"] for row in finished_rows), default=1) + 1):
            run.at_machine(number)
            if not going_on:
                shutil.copytree(self.out / "plain/store/compiled", run.store / "compiled", dirs_exist_ok=True)
            else:  # the restarted S3 server is empty: each machine uploads all that it has
                for marker in run.store.glob(f"artifacts/*/*/{MIRRORED}"):
                    marker.unlink()
                run.run_command("store", "push")
        return run

    def _unmount(self, folder: Path) -> None:
        if os.path.ismount(folder):
            subprocess.run(["umount", "-l", str(folder)], check=True)

    def _run_all_faults(self, run: LocalChaosRun) -> list[dict[str, Any]]:
        """Run to the end with all faults. Each fault from which the run recovered is a line of a file."""
        rows = self._finished_rows()
        self.started = time.monotonic() - max((row["at_s"] for row in rows), default=0.0)
        run.start()
        for planned in self.plan:
            if any(row["number"] == planned.number for row in rows):
                continue
            # A finished distillation sends nothing, so a failing teacher has nobody to fail.
            if planned.fault.startswith("the teacher") and planned.label in run.finished():
                print(f"{planned.number} {planned.fault}: {planned.label} had finished before", flush=True)
                continue
            if not self._wait_for_place(run, planned, rows):
                print(f"{planned.number} {planned.fault}: the run was over before", flush=True)
                break
            if row := self._inject_and_recover(run, planned, rows):
                rows.append(row)
                # A line per fault as soon as the run has recovered from it: a bench that is stopped repeats at most
                # one.
                with self.faults.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(json.dumps(row), flush=True)
        while self._keep_running(run, rows):
            time.sleep(0.2)
        return rows

    def _wait_for_place(self, run: LocalChaosRun, planned: PlannedFault, rows: list[dict[str, Any]]) -> bool:
        """Wait until the run has reached the place of the fault or is working past it; False if it ended before."""
        self.counting.delay_s = SLOW_S if planned.label == "distill" else QUICK_S
        passed_s, looked_s, moved_s, mark = 0.0, 0.0, time.monotonic(), run.progress()
        while True:
            if not self._keep_running(run, rows):
                return False
            if planned.is_reached(run):
                return True
            now = time.monotonic()
            if now - looked_s > LOOK_S:  # costs more than `is_reached`
                looked_s = now
                if run.is_beyond(mark):
                    moved_s, mark = now, run.progress()
                if now - moved_s > STALLED_S:
                    raise SystemExit(f"nothing has moved for {STALLED_S:.0f} s in {run.current_stage()}; see {run.log}")
                # The step is over before its place was seen: the fault then hits whatever works now, and the table says
                # where.
                if planned.label in run.finished() and any(work.total for work in run.active_steps()):
                    passed_s = passed_s or now
                    if now - passed_s > LOOK_S / 2:
                        return True
            time.sleep(0.1)

    def _inject_and_recover(
        self, run: LocalChaosRun, planned: PlannedFault, rows: list[dict[str, Any]]
    ) -> dict[str, Any] | None:
        at, mark, since, failed = run.current_stage(), run.progress(), run.log_sizes(), run.failed_calls()
        row: dict[str, Any] = {
            "number": planned.number, "fault": planned.fault, "where": planned.place, "at": at,
            "at_s": round(time.monotonic() - self.started, 1), "in_flight": self.counting.in_flight,
            "outcome": "went on", "commands": 0, "said": "",
        }  # fmt: skip
        start = time.monotonic()
        target = INJECTORS[planned.fault](run, random.Random(f"{self.options.seed}/{planned.number}"))
        if target is None:
            print(f"{planned.number} {planned.fault} in {at}: nothing to hit", flush=True)
            return None
        # Counted before and after, because an answer may arrive between the two.
        row["in_flight"] = max(row["in_flight"], self.counting.in_flight)
        row["hit"] = target.replace(str(run.folder), "")
        # Recovered means further than before the fault, and not merely alive again.
        while time.monotonic() - start < RECOVERY_S:
            if not self._keep_running(run, [row]) or run.is_beyond(mark):
                row["recovered_s"] = round(time.monotonic() - start, 1)
                break
            time.sleep(0.3)
        row["machine"] = run.machine
        lines = run.trouble_lines(since)
        failures = ", ".join(f"{status} ({count})" for status, count in (run.failed_calls() - failed).items())
        evidence = [f"rows of calls without an answer: {failures}"] if failures else []
        # Lines about the step that was hit are better evidence than others.
        lines.sort(key=lambda line: planned.label not in line)
        row["evidence"] = "; ".join([*evidence, *lines[:1]]) or row["said"]
        del row["said"]
        return row

    def _keep_running(self, run: Any, rows: list[dict[str, Any]]) -> bool:
        """Restart a stopped run; a damaged copy is first fetched again from the remote, as its message offers."""
        if not run.alive() and run.flow.wait() > 0:
            for damaged in sorted(set(re.findall(r"`nautile store fetch ([^`]+)`", run.output()))):
                completed = run.run_command("store", "fetch", damaged)
                rows[-1]["commands"] += 1
                rows[-1]["said"] = (
                    f"damaged {damaged}; `nautile store fetch` ended with exit code {completed.returncode}"
                )
                run.start()
                return True
        return super()._keep_running(run, rows)

    def _repair_damage(self, run: Any, rows: list[dict[str, Any]]) -> bool:
        """After a successful end, fetch again what `verify` reports as damaged because no step had read it."""
        if not any(row["fault"] == "flipped byte" for row in rows):
            return False
        for name in run.nautile("store", "verify")["damaged"]:
            completed = run.run_command("store", "fetch", name)
            row = next(row for row in reversed(rows) if row["fault"] == "flipped byte")
            row |= {"evidence": f"`verify` named {name}; `store fetch` ended with exit code {completed.returncode}"}
        return False

    def _find_problems(self, run: Any, plain: dict[str, Any]) -> list[str]:
        """Problems at the end: those of the random rounds, and those of every machine that was down."""
        problems = []
        last_machine = run.machine
        # A machine that was lost comes back with its old folder. It must find that nothing is left to do, and must not
        # publish anything of its own.
        for number in range(1, last_machine):
            run.at_machine(number)
            run.start()
            code = run.flow.wait()
            repeated_steps = re.findall(r"^([a-z_:]+): done", run.output(), re.MULTILINE)
            if code or repeated_steps:
                problems.append(f"machine {number}, back again: exit code {code}, made {repeated_steps} once more")
            problems += left_running(run.store)
            if damaged := run.nautile("store", "verify")["damaged"]:
                problems.append(f"machine {number}: damaged {damaged}")
        run.at_machine(last_machine)
        return problems + super()._find_problems(run, plain)

    def _ledger(self, run: LocalChaosRun, rows: list[dict[str, Any]]) -> list[str]:
        """Problems in the ledger: the teacher's own counts and cost compared with the rows of the calls."""
        totals = self.counting.totals()
        calls = run.query(
            "SELECT status, count(*) AS n, coalesce(sum(dollars), 0) AS dollars FROM calls "
            f"WHERE endpoint = '{ENDPOINT}' AND NOT coalesce(cached, false) GROUP BY status"
        )
        by_status = {call["status"]: call["n"] for call in calls}
        dollars = sum(call["dollars"] for call in calls)
        answers, requests = sum(totals["answers"].values()), len(totals["answers"])
        # A killed process may have lost at most what was on its way at that moment: this is the tolerance of all sums
        # below.
        in_flight_at_kills = sum(row["in_flight"] for row in rows if KILLS.search(f"{row['fault']} {row['hit']}"))
        failed_rows = sum(count for status, count in by_status.items() if status != "ok")
        faults = sum(totals["faults"].values())
        self.account = {
            "requests": requests, "answers": answers, "rows": by_status, "faults": dict(totals["faults"]),
            "dollars_of_the_teacher": totals["dollars"], "dollars_of_the_ledger": dollars,
            "in_flight_at_kills": in_flight_at_kills,
        }  # fmt: skip
        # An answer may lack a row only if it was in flight when a process was killed.
        unrecorded = answers - by_status.get("ok", 0)
        problems = []
        if not 0 <= unrecorded <= in_flight_at_kills:
            problems.append(
                f"{unrecorded} answers have no row, and {in_flight_at_kills} requests were on their way at kills"
            )
        if answers - requests > in_flight_at_kills:
            problems.append(f"{answers - requests} answers were given twice: more than were on their way at kills")
        if (abs(totals["dollars"] - dollars) > 1e-9) != bool(unrecorded):
            problems.append(f"the answers cost {totals['dollars']}, the ledger has {dollars}, {unrecorded} are lost")
        # Each failure of the teacher must have a row, and no status may have more rows than failures.
        if not faults - in_flight_at_kills <= failed_rows:
            problems.append(f"the teacher failed {faults} times, and {failed_rows} rows say so")
        for fault, statuses in STATUSES.items():
            if sum(by_status.get(status, 0) for status in statuses) > totals["faults"].get(fault, 0):
                problems.append(f"more rows than failures of {fault}")
        return problems

    def _write(self, rows: list[dict[str, Any]], problems: list[str], plain: dict[str, Any]) -> None:
        """Write the page of the results, docs/results/chaos-local.md for a complete run."""
        account, seconds = self.account, time.monotonic() - self.started
        kinds = ", ".join(f"{fault}: {count}" for fault, count in account["faults"].items())
        lines = [
            "# Faults in the default run",
            "",
            f"Written by `python bench/chaos/chaos.py local --work DIR --seed {self.options.seed}`: {len(rows)} faults"
            f" in one run of `{self.options.config.name}`, with the store at an S3 server and the teacher behind"
            " a socket.",
            f"The undisturbed run took {plain['seconds']:.0f} s, the disturbed one {seconds:.0f} s with all of its"
            f" checks, on {os.cpu_count()} cores (load {os.getloadavg()[2]:.1f} in the last quarter of an hour)."
            " *Recovered* is the time from the fault until the run passes its earlier progress, the"
            " fault's own length included.",
            "",
            "| | fault | in | what happened | recovered | evidence |",
            "| ---: | --- | --- | --- | ---: | --- |",
        ]
        # One row of the table for each fault.
        for row in rows:
            outcome = row["outcome"] if row["commands"] else "went on by itself"
            recovery = f"{row['recovered_s']:.0f} s" if "recovered_s" in row else "not seen"
            place = row["where"] if row["where"].partition(",")[0] in row["at"] else row["at"]
            cells = [row["number"], row["fault"], place, f"{row['hit']}: {outcome}", recovery, row["evidence"]]
            lines.append(f"| {' | '.join(cell_text(cell) for cell in cells)} |")
        lines += [
            "",
            f"At the end the {len(plain['payloads'])} payloads (digests of files, scores of evaluations) and the rows"
            " of metrics, samples and calls were compared with the undisturbed run's, store and remote were verified, a"
            " catalog was rebuilt from the files, and remaining processes were searched: "
            + ("problems:" if problems else "no problems."),
            *(f"- {problem}" for problem in problems),
            "",
            f"The teacher answered {account['requests']} different requests {account['answers']} times and failed"
            f" {sum(account['faults'].values())} times ({kinds}); the ledger has {account['rows']}. The answers cost"
            f" ${account['dollars_of_the_teacher']:.6f}, the rows have ${account['dollars_of_the_ledger']:.6f};"
            f" {account['in_flight_at_kills']} requests were in flight when processes were killed.",
        ]
        text = "\n".join(lines) + "\n"
        (self.out / "table.md").write_text(text, encoding="utf-8")
        (self.out / "table.json").write_text(json.dumps({"faults": rows, "problems": problems, "account": account}))
        is_complete = not self.options.only and len(rows) == len(self.plan)
        if is_complete:
            self.options.report.write_text(text, encoding="utf-8")
        print(text)


def cell_text(value: object) -> str:
    """Text as a cell of a Markdown table, at most 160 characters."""
    return " ".join(str(value).replace("|", "/").split())[:160]


__all__ = ["LocalChaos"]
