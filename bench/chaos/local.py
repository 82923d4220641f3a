"""Thirty faults in one run of configs/local.toml, placed by what is seen of it.

The store is at an S3 server on a small disk, behind a proxy; the teacher is a server that counts what it answers. Only
the endpoint differs from the configuration as shipped: its address and prices. A schedule drawn from a seed says which
fault strikes in which step and when (a share of its work, a checkpoint, a work item); it strikes once the run is seen
to be there, and the next one waits until the run is farther than before the fault. A second and third machine, folders
of their own, take over where a fault ends the first.

At the end: the same payloads and rows as an undisturbed run's, in a local folder and with the same teacher; store and
remote verify; no process is left; each answer of the teacher is in the ledger, but those that were on their way as a
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

from bench.chaos.local_faults import STRIKES, Planned, draw_schedule
from bench.chaos.local_scene import LocalRound
from bench.chaos.random_times import Chaos, left_running
from bench.chaos.servers import PRICES, CountingTeacher, MirrorServer
from store.manifest import MIRRORED

RENEW_S, EXPIRES_S = "5", "15"
RECOVERY_S, STALLED_S, LOOK_S = 300.0, 900.0, 1.5
ENDPOINT = "smollm2"  # whose place the counting teacher takes
SLOW_S, QUICK_S = 1.5, 0.02  # a teacher's answer in the distillation, where it meets faults, and elsewhere
KILLS = re.compile(r"kill|torn|holder|stand")  # faults that end a process which may ask
STATUSES = {"429": ("429",), "500": ("500",)}  # of the fault, as the ledger calls it; the others have several names


class LocalChaos(Chaos):
    """The bench: an undisturbed run, a disturbed one, and what became of it."""

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
        """The configuration with the teacher behind a socket."""
        shipped = self.options.config.read_text(encoding="utf-8")
        endpoint = (
            f'[endpoints.{ENDPOINT}]\nkind = "openai"\nmodel = "SmolLM2-135M-Instruct"\nconcurrency = 2\n'
            f'license = "Apache-2.0"\nstand_in = true\n'
            f'url = "http://127.0.0.1:{self.options.port}/v1"\ntimeout_s = 8.0\n'
            f"dollars_per_million_in = {PRICES[0]}\ndollars_per_million_out = {PRICES[1]}\n\n"
        )
        text, count = re.subn(rf"\[endpoints\.{ENDPOINT}\]\n[^\[]*", endpoint, shipped)
        if count != 1:
            raise SystemExit(f"{self.options.config}: no [endpoints.{ENDPOINT}] to replace")
        path = self.out / "local.toml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    def _mounts(self) -> bool:
        """The disk of an earlier call is kept: its run goes on."""
        self.disk.mkdir(exist_ok=True)
        return os.path.ismount(self.disk) or self._mount()

    def run(self) -> None:
        self.counting.models = ("SmolLM2-135M-Instruct",)
        self.counting.delay_s = QUICK_S
        with self.counting:
            plain = self.plain()
            scene = self._scene()
            try:
                rows = self._disturbed(scene)
                problems = self._judge(scene, plain) + self._ledger(scene, rows)
                self._write(rows, problems, plain)
            finally:
                scene.close()
                self.mirror.close()
                self._unmount(self.out / "s3-disk")

    def plain(self) -> dict[str, Any]:
        result = super().plain()
        if not self.faults.exists():  # what the undisturbed run asked does not count
            self.counting.log.unlink(missing_ok=True)
            self.counting.answered_ever = 0
        return result

    def _scene(self) -> LocalRound:
        """The scene as it was left, or a new one if the disk of an earlier call is gone."""
        self._unmount(self.mirror.folder)
        size = ["mount", "-t", "tmpfs", "-o", "size=700m", "tmpfs", str(self.mirror.folder)]
        subprocess.run(size, check=True)
        self.mirror.start()
        assert self.clock_library
        folder, clock = self.disk / "run", self.out / "clock"
        going_on = self.faults.exists() and folder.exists()
        if not going_on:
            shutil.rmtree(folder, ignore_errors=True)
            for path in (self.faults, self.counting.log, *self.out.glob("*machine-*.log")):
                path.unlink(missing_ok=True)
            self.counting.answered_ever = 0
        scene = LocalRound(
            folder, self.config, self.round(folder, clock).environment, None, clock, self.options.stop_s,
            "bench.chaos.command", mirror=self.mirror, counting=self.counting,
            prompts=tomllib.loads(Path(self.config).read_text(encoding="utf-8"))["distill"]["prompts"],
        )  # fmt: skip
        scene.environment |= self.mirror.environment | {"CHAOS_RENEW_S": RENEW_S, "CHAOS_EXPIRES_S": EXPIRES_S}
        done = self._done() if going_on else []
        for number in range(1, max((row["machine"] for row in done), default=1) + 1):
            scene.at_machine(number)
            if not going_on:
                shutil.copytree(self.out / "plain/store/compiled", scene.store / "compiled", dirs_exist_ok=True)
            else:  # the S3 server has begun anew: each machine sends what it has, whatever it knows to be there
                for marker in scene.store.glob(f"artifacts/*/*/{MIRRORED}"):
                    marker.unlink()
                scene.in_its_store("store", "push")
        return scene

    def _unmount(self, folder: Path) -> None:
        if os.path.ismount(folder):
            subprocess.run(["umount", "-l", str(folder)], check=True)

    def _disturbed(self, scene: LocalRound) -> list[dict[str, Any]]:
        """The run with its faults, to its good end. Each fault that is overcome is a line of a file."""
        rows = self._done()
        self.started = time.monotonic() - max((row["at_s"] for row in rows), default=0.0)
        scene.start()
        for planned in self.plan:
            if any(row["number"] == planned.number for row in rows):
                continue
            if planned.fault.startswith("the teacher") and planned.label in scene.finished():
                print(f"{planned.number} {planned.fault}: {planned.label} was made before", flush=True)
                continue
            if not self._approach(scene, planned, rows):
                print(f"{planned.number} {planned.fault}: the run was over before", flush=True)
                break
            if row := self._strike_and_recover(scene, planned, rows):
                rows.append(row)
                with self.faults.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(json.dumps(row), flush=True)
        while self._stay_alive(scene, rows):
            time.sleep(0.2)
        return rows

    def _approach(self, scene: LocalRound, planned: Planned, rows: list[dict[str, Any]]) -> bool:
        """Wait until the run is where the fault is to strike, or past it and at work; False once it is over."""
        self.counting.delay_s = SLOW_S if planned.label == "distill" else QUICK_S
        passed_s, looked_s, moved_s, mark = 0.0, 0.0, time.monotonic(), scene.mark()
        while True:
            if not self._stay_alive(scene, rows):
                return False
            if planned.is_reached(scene):
                return True
            now = time.monotonic()
            if now - looked_s > LOOK_S:  # costs more than to see whether the place is reached
                looked_s = now
                if scene.is_beyond(mark):
                    moved_s, mark = now, scene.mark()
                if now - moved_s > STALLED_S:
                    raise SystemExit(f"nothing has moved for {STALLED_S:.0f} s in {scene.at()}; see {scene.log}")
                if planned.label in scene.finished() and any(work.total for work in scene.work()):
                    passed_s = passed_s or now
                    if now - passed_s > LOOK_S / 2:
                        return True
            time.sleep(0.1)

    def _strike_and_recover(
        self, scene: LocalRound, planned: Planned, rows: list[dict[str, Any]]
    ) -> dict[str, Any] | None:
        at, mark, since, failed = scene.at(), scene.mark(), scene.log_sizes(), scene.failed_calls()
        row: dict[str, Any] = {
            "number": planned.number, "fault": planned.fault, "where": planned.where, "at": at,
            "at_s": round(time.monotonic() - self.started, 1), "in_flight": self.counting.in_flight,
            "outcome": "went on", "commands": 0, "said": "",
        }  # fmt: skip
        began = time.monotonic()
        hit = STRIKES[planned.fault](scene, random.Random(f"{self.options.seed}/{planned.number}"))
        if hit is None:
            print(f"{planned.number} {planned.fault} in {at}: nothing to hit", flush=True)
            return None
        row["in_flight"] = max(row["in_flight"], self.counting.in_flight)
        row["hit"] = hit.replace(str(scene.folder), "")
        while time.monotonic() - began < RECOVERY_S:
            if not self._stay_alive(scene, [row]) or scene.is_beyond(mark):
                row["recovered_s"] = round(time.monotonic() - began, 1)
                break
            time.sleep(0.3)
        row["machine"] = scene.machine
        lines = scene.telling_lines(since)
        more = ", ".join(f"{status} ({count})" for status, count in (scene.failed_calls() - failed).items())
        evidence = [f"rows of calls without an answer: {more}"] if more else []
        lines.sort(key=lambda line: planned.label not in line)
        row["evidence"] = "; ".join([*evidence, *lines[:1]]) or row["said"]
        del row["said"]
        return row

    def _stay_alive(self, scene: Any, rows: list[dict[str, Any]]) -> bool:
        """As for a local store; a damaged copy is fetched again from the remote, as its message offers."""
        if not scene.alive() and scene.flow.wait() > 0:
            for damaged in sorted(set(re.findall(r"`nautile store fetch ([^`]+)`", scene.output()))):
                done = scene.in_its_store("store", "fetch", damaged)
                rows[-1]["commands"] += 1
                rows[-1]["said"] = f"damaged {damaged}; `nautile store fetch` ended with exit code {done.returncode}"
                scene.start()
                return True
        return super()._stay_alive(scene, rows)

    def _mended(self, scene: Any, rows: list[dict[str, Any]]) -> bool:
        """After a good end: damage that no step happened to read is named by `verify`, and fetched again."""
        if not any(row["fault"] == "flipped byte" for row in rows):
            return False
        for name in scene.nautile("store", "verify")["damaged"]:
            done = scene.in_its_store("store", "fetch", name)
            row = next(row for row in reversed(rows) if row["fault"] == "flipped byte")
            row |= {"evidence": f"`verify` named {name}; `store fetch` ended with exit code {done.returncode}"}
        return False

    def _judge(self, scene: Any, plain: dict[str, Any]) -> list[str]:
        """What is wrong at the end: as for the random rounds, and on every machine that was away."""
        problems = []
        last = scene.machine
        for number in range(1, last):
            scene.at_machine(number)
            scene.start()
            code = scene.flow.wait()
            made = re.findall(r"^([a-z_:]+): done", scene.output(), re.MULTILINE)
            if code or made:
                problems.append(f"machine {number}, back again: exit code {code}, made {made} once more")
            problems += left_running(scene.store)
            if damaged := scene.nautile("store", "verify")["damaged"]:
                problems.append(f"machine {number}: damaged {damaged}")
        scene.at_machine(last)
        return problems + super()._judge(scene, plain)

    def _ledger(self, scene: LocalRound, rows: list[dict[str, Any]]) -> list[str]:
        """The teacher's own count against the rows of the calls."""
        totals = self.counting.totals()
        calls = scene.query(
            "SELECT status, count(*) AS n, coalesce(sum(dollars), 0) AS dollars FROM calls "
            f"WHERE endpoint = '{ENDPOINT}' AND NOT coalesce(cached, false) GROUP BY status"
        )
        by_status = {call["status"]: call["n"] for call in calls}
        dollars = sum(call["dollars"] for call in calls)
        answered, asked = sum(totals["answers"].values()), len(totals["answers"])
        on_the_way = sum(row["in_flight"] for row in rows if KILLS.search(f"{row['fault']} {row['hit']}"))
        failed_rows = sum(count for status, count in by_status.items() if status != "ok")
        faults = sum(totals["faults"].values())
        self.account = {
            "requests": asked, "answers": answered, "rows": by_status, "faults": dict(totals["faults"]),
            "dollars_of_the_teacher": totals["dollars"], "dollars_of_the_ledger": dollars,
            "in_flight_at_kills": on_the_way,
        }  # fmt: skip
        lost = answered - by_status.get("ok", 0)
        problems = []
        if not 0 <= lost <= on_the_way:
            problems.append(f"{lost} answers have no row, and {on_the_way} requests were on their way at kills")
        if answered - asked > on_the_way:
            problems.append(f"{answered - asked} answers were given twice: more than were on their way at kills")
        if (abs(totals["dollars"] - dollars) > 1e-9) != bool(lost):
            problems.append(f"the answers cost {totals['dollars']}, the ledger has {dollars}, {lost} are lost")
        if not faults - on_the_way <= failed_rows:
            problems.append(f"the teacher failed {faults} times, and {failed_rows} rows say so")
        for fault, statuses in STATUSES.items():
            if sum(by_status.get(status, 0) for status in statuses) > totals["faults"].get(fault, 0):
                problems.append(f"more rows than failures of {fault}")
        return problems

    def _write(self, rows: list[dict[str, Any]], problems: list[str], plain: dict[str, Any]) -> None:
        """The page of the results."""
        account, seconds = self.account, time.monotonic() - self.started
        kinds = ", ".join(f"{fault}: {count}" for fault, count in account["faults"].items())
        lines = [
            "# Faults in the default run",
            "",
            f"Written by `python bench/chaos/chaos.py local --work DIR --seed {self.options.seed}`: {len(rows)} faults"
            f" in one run of `{self.options.config.name}`, its store at an S3 server, its teacher behind a socket.",
            f"The undisturbed run took {plain['seconds']:.0f} s, the disturbed one {seconds:.0f} s with all of its"
            f" checks, on {os.cpu_count()} cores (load {os.getloadavg()[2]:.1f} in the last quarter of an hour)."
            " *Recovered* is the time from the fault until the run is farther than it was before, the"
            " fault's own length included.",
            "",
            "| | fault | in | what happened | recovered | evidence |",
            "| ---: | --- | --- | --- | ---: | --- |",
        ]
        for row in rows:
            outcome = row["outcome"] if row["commands"] else "went on by itself"
            took = f"{row['recovered_s']:.0f} s" if "recovered_s" in row else "not seen"
            place = row["where"] if row["where"].partition(",")[0] in row["at"] else row["at"]
            cells = [row["number"], row["fault"], place, f"{row['hit']}: {outcome}", took, row["evidence"]]
            lines.append(f"| {' | '.join(cell_text(cell) for cell in cells)} |")
        lines += [
            "",
            f"At the end the {len(plain['payloads'])} payloads (digests of files, scores of evaluations) and the rows"
            " of metrics, samples and calls were compared with the undisturbed run's, store and remote were verified, a"
            " catalog was rebuilt from the files, processes were looked for: "
            + ("wrong is" if problems else "all as it should be."),
            *(f"- {problem}" for problem in problems),
            "",
            f"The teacher answered {account['requests']} different requests {account['answers']} times and failed"
            f" {sum(account['faults'].values())} times ({kinds}); the ledger has {account['rows']}. The answers cost"
            f" ${account['dollars_of_the_teacher']:.6f}, the rows have ${account['dollars_of_the_ledger']:.6f};"
            f" {account['in_flight_at_kills']} requests were on their way as processes were killed.",
        ]
        text = "\n".join(lines) + "\n"
        (self.out / "table.md").write_text(text, encoding="utf-8")
        (self.out / "table.json").write_text(json.dumps({"faults": rows, "problems": problems, "account": account}))
        whole = not self.options.only and len(rows) == len(self.plan)
        if whole:
            self.options.report.write_text(text, encoding="utf-8")
        print(text)


def cell_text(value: object) -> str:
    """A cell of a Markdown table."""
    return " ".join(str(value).replace("|", "/").split())[:160]


__all__ = ["LocalChaos"]
