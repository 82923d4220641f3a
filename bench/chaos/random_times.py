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

from bench.chaos.chain import ROOT, Round, Teacher, offered
from bench.chaos.compare import asked_twice, differences, leftovers, prefect_running
from bench.chaos.faults import FAULTS, Fault, end, family, wait_for

DISK = "1500m"


class Chaos:
    """The whole bench."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out: Path = options.work.resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.until = time.monotonic() + 60 * options.minutes
        self.faults = self.out / "faults.jsonl"
        self.disk = self.out / "disk"
        kinds = options.kinds.split(",") if options.kinds else [fault.name for fault in FAULTS]
        if options.schedule == "toy":
            kinds = [name for name in kinds if name not in ("kill the teacher", "kill a worker")]
        self.kinds = [fault for fault in FAULTS if fault.name in kinds]
        self.teacher = Teacher(options.port) if options.schedule == "chain" else None
        self.config = self._config()
        self.clock_library = self._clock()
        self.own_disk = self._mounts()

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

    def _clock(self) -> Path | None:
        library, source = self.out / "clock.so", Path(__file__).with_name("clock.c")
        command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl", "-lpthread"]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return library

    def _mounts(self) -> bool:
        self.disk.mkdir(exist_ok=True)
        if os.path.ismount(self.disk):
            subprocess.run(["umount", "-l", str(self.disk)], check=True)
        return self._mount()

    def _mount(self) -> bool:
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(self.disk)]
        return subprocess.run(command, capture_output=True).returncode == 0

    def round(self, folder: Path, clock: Path | None) -> Round:
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
        return Round(folder, self.config, environment, self.teacher, clock, self.options.stop_s, "flows.cli.main")

    def plain(self) -> dict[str, Any]:
        """What an undisturbed run makes, run once."""
        kept = self.out / "plain.json"
        if not kept.exists():
            folder = self.out / "plain"
            folder.mkdir(exist_ok=True)
            scene = self.round(folder, None)
            started = time.monotonic()
            scene.start()
            try:
                if scene.flow.wait() != 0:
                    raise SystemExit(f"the undisturbed run failed: {scene.output()}")
            finally:
                end(scene.flow)
            result = {**scene.everything(), "seconds": time.monotonic() - started}
            kept.write_text(json.dumps(result), encoding="utf-8")
        result = json.loads(kept.read_text(encoding="utf-8"))
        return result | {"rows": {table: Counter(row) for table, row in result["rows"].items()}}

    def run(self) -> None:
        """Rounds until there are faults enough, or the time is over."""
        if self.teacher:
            self.teacher.start()
        try:
            plain = self.plain()
            while len(done := self._done()) < self.options.faults and time.monotonic() < self.until:
                self._one_round(plain, len({row["round"] for row in done}), len(done))
        finally:
            if self.teacher:
                self.teacher.close()
            self._write_table()

    def _done(self) -> list[dict[str, Any]]:
        if not self.faults.exists():
            return []
        return [json.loads(line) for line in self.faults.read_text(encoding="utf-8").splitlines()]

    def _one_round(self, plain: dict[str, Any], number: int, before: int) -> None:
        if self.own_disk:
            self._mounts()
        folder = (self.disk if self.own_disk else self.out / "rounds") / str(number)
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "store").mkdir(parents=True)
        if (compiled := self.out / "plain/store/compiled").exists():
            shutil.copytree(compiled, folder / "store/compiled")
        clock = self.out / "clock" if self.clock_library else None
        scene = self.round(folder, clock)
        scene.log = self.out / f"round-{number}.log"
        scene.log.unlink(missing_ok=True)
        draw = random.Random(f"{self.options.seed}/{number}")
        events: list[dict[str, Any]] = []
        try:
            finished = self._disturb(scene, draw, plain, events, number)
            if finished:
                problems = self._judge(scene, plain)
                for row in events:
                    row["round_problems"] = problems
                with self.faults.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(row) + "\n" for row in events)
                print(
                    f"round {number}: {len(events)} faults; {'; '.join(problems) or 'the same as undisturbed'}",
                    flush=True,
                )
                if problems:
                    shutil.copytree(scene.store, self.out / f"kept-{number}", ignore=shutil.ignore_patterns("compiled"))
        finally:
            if scene.flow is not None:
                end(scene.flow)

    def _disturb(self, scene: Round, draw: random.Random, plain: Any, rows: list[dict[str, Any]], number: int) -> bool:
        """The run with its faults to its good end; False if the time is over first."""
        deck = [fault for fault in self.kinds if self.own_disk or not fault.own_disk]
        deck = [fault for fault in deck if scene.clock or fault.name != "clock jump"]
        offset = number * self.options.each_round
        wanted = [deck[(offset + i) % len(deck)] for i in range(self.options.each_round)]
        draw.shuffle(wanted)
        gap = 1.6 * plain["seconds"] / len(wanted)
        begun = time.monotonic()
        scene.start()
        for fault in wanted:
            if not self._stay_alive(scene, rows):
                return True
            moment = self._moment(scene, draw, gap)
            while scene.alive() and time.monotonic() < moment:
                time.sleep(0.02)
            if not scene.alive() and not self._stay_alive(scene, rows):
                return True
            if time.monotonic() > self.until:
                return False
            self._strike(scene, fault, draw, rows, number, time.monotonic() - begun)
        while self._stay_alive(scene, rows):
            if time.monotonic() > self.until + 240:
                return False
            time.sleep(0.2)
        return True

    def _moment(self, scene: Round, draw: random.Random, gap: float) -> float:
        """When the next fault comes: of five, one while the command still starts, the others while stages work."""
        if draw.random() < 0.2:
            return time.monotonic() + draw.uniform(0.0, 12.0)
        wait_for(scene, lambda: [*family(scene, "stage"), *family(scene, "worker")], 120.0)
        return time.monotonic() + draw.uniform(0.0, gap)

    def _strike(
        self, scene: Round, fault: Fault, draw: random.Random, rows: list[dict[str, Any]], number: int, moment: float
    ) -> None:
        at = scene.at()
        hit = fault.strike(scene, draw)
        if hit is None:
            return
        row = {"round": number, "fault": fault.name, "hit": hit, "at": at, "moment_s": round(moment, 1)}
        rows.append(row | {"outcome": "went on", "commands": 0, "said": ""})
        print(f"{number}/{len(rows)} {fault.name} ({hit}) in {at}", flush=True)

    def _stay_alive(self, scene: Round, rows: list[dict[str, Any]]) -> bool:
        """True while the run goes on, begun again where it had stopped; False once it has ended well."""
        if scene.alive():
            return True
        code = scene.flow.wait()
        if code == 0:
            return self._mended(scene, rows)
        last = rows[-1] if rows else {"fault": "none", "commands": 0}
        lines = [
            line
            for line in scene.output().splitlines()
            if " failed: " in line or "nautile" in line or "damaged" in line
        ]
        last["said"] = (lines[0] if lines else scene.output()[-300:])[:400].replace(str(scene.store), "STORE")
        last["commands"] += 1
        last["outcome"] = "stopped, went on by one command" if last["commands"] == 1 else f"{last['commands']} commands"
        if last["commands"] > 4:
            raise SystemExit(f"{last['fault']} cannot be overcome: {scene.output()[-3000:]}")
        if code != -9 and (words := offered(scene.output())):
            scene.start(*words)
            if scene.flow.wait() != 0:
                last["outcome"] = "the offered command failed"
                last["said"] = scene.output()[-400:]
        scene.start()
        return True

    def _mended(self, scene: Round, rows: list[dict[str, Any]]) -> bool:
        """After a good end: damage that no stage happened to read is found by `verify` and mended as it says."""
        flipped = [row for row in rows if row["fault"] == "flipped byte" and not row["commands"]]
        if not flipped:
            return False
        report = scene.nautile("store", "verify")
        if not report["damaged"]:
            return False
        output = next(iter(report["remedies"].values()))
        flipped[-1] |= {"commands": 1, "outcome": "found by verify, went on by one command", "said": output[:400]}
        scene.start(*(word if word != "CONFIG" else self.config for word in offered(output) or []))
        return True

    def _judge(self, scene: Round, plain: dict[str, Any]) -> list[str]:
        """What is wrong at the end of a round."""
        time.sleep(1.0)
        problems = []
        problems += left_running(scene.store)
        damaged = scene.nautile("store", "verify")["damaged"]
        problems += [f"damaged: {name}: {files}" for name, files in damaged.items()]
        result = scene.everything()
        problems += differences(plain, result) + leftovers(scene.store, scene.query)
        before = scene.tables()
        scene.nautile("store", "rebuild")
        after = scene.tables()
        for name in before:
            if before[name] != after[name]:
                odd = set(before[name]) ^ set(after[name])
                problems.append(f"rebuilt: {name} differs in {len(odd)} rows, one is {min(odd)[:300]}")
        print(f"   calls made twice: {asked_twice(plain, result)}; flow runs RUNNING: {prefect_running(scene.store)}")
        return problems

    def _write_table(self) -> None:
        """The tables, of what there is."""
        done = self._done()
        counts = Counter((row["fault"], row["outcome"]) for row in done)
        bad = sorted({problem for row in done for problem in row["round_problems"]})
        (self.out / "table.json").write_text(json.dumps({"faults": done, "problems": bad}, indent=1), encoding="utf-8")
        outcomes = sorted({outcome for _, outcome in counts})
        lines = [f"| fault | {' | '.join(outcomes)} |", f"| --- |{' --- |' * len(outcomes)}"]
        for name in (fault.name for fault in FAULTS):
            if any(fault == name for fault, _ in counts):
                lines.append(f"| {name} | {' | '.join(str(counts[name, outcome] or '') for outcome in outcomes)} |")
        rounds = {row["round"]: row["round_problems"] for row in done}
        whole = sum(not problems for problems in rounds.values())
        lines += [
            "",
            f"{len(done)} faults in {len(rounds)} rounds of {Path(self.config).stem}; {whole} rounds ended as",
        ]
        lines[-1] += " the undisturbed run did."
        missing = [
            name for name, there in (("full disk", self.own_disk), ("clock jump", self.clock_library)) if not there
        ]
        lines += [f"Left out on this machine: {', '.join(missing)}."] if missing else []
        lines += [f"- {problem}" for problem in bad]
        (self.out / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print("\n".join(lines))


def left_running(store: Path) -> list[str]:
    """The processes that still work in a store."""
    lines = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("NAUTILE_STORE") == str(store):
                lines.append(f"left running: {' '.join(process.cmdline()[-4:])[:120]}")
    return lines
