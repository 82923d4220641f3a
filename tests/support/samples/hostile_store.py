"""A store full of hostile texts, in every place that models, prompts, sources, file names and reports can write to.

Their scripts and event handlers call `struck`; their links and pictures point at a host that is not this machine.
"""

from pathlib import Path
from typing import Any

from nautile.common.files import read_json, write_json
from nautile.store.artifacts import Store
from nautile.store.catalog import Catalog
from nautile.store.events import EventWriter
from nautile.store.manifest import now, with_seal
from nautile.tasks.engine.attempt_log import write_attempt_row, write_row

ELSEWHERE = "http://elsewhere.invalid"
FORMS = (
    "<script>struck()</script>",
    f"<img src='{ELSEWHERE}/a.png' onerror='struck()'>",
    f"![picture]({ELSEWHERE}/b.png)",
    "[press](javascript:struck())",
    "<a href='javascript:struck()'>press</a>",
    "<svg onload='struck()'></svg>",
    f"<iframe src='{ELSEWHERE}'></iframe>",
    "$$\\href{javascript:struck()}{x}$$ and $x^2$",
    ":red[coloured] :material/delete: :rainbow[all]",
    "```\n</code></pre><script>struck()</script>\n```",
    '"] x [URL="javascript:struck()"',
    "# heading\n\n* item **bold** | cell |",
)
TEXT = " ".join(FORMS)
NAME = "<img src=x onerror=struck()> [n](javascript:struck()) **b** $x^2$ :red[r]"


def make_hostile(root: Path, outputs: dict[str, dict[str, str]]) -> None:
    """Add a run, metrics, samples, calls, facts and scores of such texts to a store where the toy chain has run."""
    store = Store(root)
    for label, kinds in outputs.items():
        for artifact_id in kinds.values():
            _poison_manifest(store, artifact_id)
        _emit_events(store, store.get(next(iter(kinds.values()))).execution, label.partition(":")[0])
    (store.get(outputs["reason"]["rollouts"]).path / "<img src=x onerror=struck()>.jsonl").write_text('{"text": "x"}\n')
    row = {"id": "hostile", "run": NAME, "config": NAME, "stage": "align", "label": NAME, "key": "0" * 64}
    row |= {"execution": NAME, "attempt": 1, "state": "failed", "started": now(), "ended": now(), "error": TEXT}
    write_attempt_row(store, row)
    steps = [{"label": NAME, "stage": "align", "key": "0" * 64, "after": [NAME]}]
    plan = {
        "id": "hostile",
        "run": NAME,
        "config": NAME,
        "name": NAME,
        "state": "failed",
        "steps": steps,
        "error": TEXT,
    }
    plan |= {"changes": [{"field": NAME, "before": TEXT, "after": NAME}], "settings": {}, "resume": TEXT}
    write_row(store, "plan", plan | {"started": now(), "ended": now()})
    write_row(store, "note", {"id": NAME, "text": TEXT, "tags": [NAME]})
    Catalog(store).rebuild()


def _emit_events(store: Store, execution: str, stage: str) -> None:
    emit = EventWriter(store.root / "events" / f"hostile-{execution}.jsonl", execution, stage=stage)
    for step in range(1, 4):
        for name in ("loss", "reward", NAME):
            emit("metric", name=name, step=step, value=float(step), source=NAME)
    shown: dict[str, Any] = dict.fromkeys(
        (
            "question",
            "prompt",
            "text",
            "output",
            "query",
            "reasoning",
            "answer",
            "task",
            "teacher",
            "reply",
            "expected",
        ),
        f"{TEXT}<|think_end|>{TEXT}",
    )
    for name in ("rollouts", "documents", NAME):
        emit(
            "sample", set=name, index=100, **shown, rejected=TEXT, problem=NAME, parts={NAME: TEXT}, step=9, reward=2.0
        )
    call = {"endpoint": NAME, "model": NAME, "purpose": NAME, "attempt": 1, "status": NAME, "error": TEXT}
    emit("call", **call, tokens_in=1, tokens_out=1, dollars=0.5, latency_s=0.1, cached=False)
    emit.close()


def _poison_manifest(store: Store, artifact_id: str) -> None:
    """Put hostile texts into an artifact's manifest and its `scores.json`."""
    folder = store.get(artifact_id).path
    manifest = read_json(folder / "manifest.json") or {}
    facts = manifest["facts"]
    facts |= {"stand_in": TEXT, "judge": {"model": NAME, "stand_in": True}, NAME: TEXT}
    if facts.get("teachers"):
        facts |= {"teachers": {NAME: {"asked": 2, "kept": 1}}, "rejected": {NAME: 1}}
    write_json(folder / "manifest.json", with_seal({name: value for name, value in manifest.items() if name != "seal"}))
    scores = read_json(folder / "scores.json")
    if scores:
        for score in scores["benchmarks"].values():
            score |= {"title": NAME, "stand_in": TEXT, "differs": [TEXT]}
        write_json(folder / "scores.json", scores | {"model": NAME})
